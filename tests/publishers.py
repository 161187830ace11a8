"""Publishers with what only tests replace: the threads that encode and send, and how many patches make an epoch."""

from concurrent.futures import Executor
from typing import Any

import pulsesync
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.group.collective import Team
from pulsesync.publish import sharded
from pulsesync.store import Location


def kept_bytes(publisher: pulsesync.Publisher) -> int:
    """The bytes of the last version that a process keeps."""
    base = publisher._sender.committed.base if publisher._sender else None
    return sum(flat.nbytes for flat in base.state.flats.values()) if base else 0


class Publisher(pulsesync.Publisher):
    def __init__(
        self,
        location: Location,
        *,
        executor: Executor | None = None,
        epoch_patches: int = EPOCH_PATCHES,
        **options: Any,
    ) -> None:
        self._executor, self._epoch_patches = executor, epoch_patches
        super().__init__(location, **options)


class ShardedPublisher(sharded.ShardedPublisher):
    def __init__(
        self,
        location: Location,
        team: Team,
        *,
        executor: Executor | None = None,
        epoch_patches: int = EPOCH_PATCHES,
        **options: Any,
    ) -> None:
        self._executor, self._epoch_patches = executor, epoch_patches
        super().__init__(location, team, **options)
