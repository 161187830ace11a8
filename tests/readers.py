"""What reads runs whose epochs have fewer patches than the format says, as those that `tests.publishers` write."""

from typing import Any
from unittest import mock

import pulsesync
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.pointer import Pointer
from pulsesync.maintain import point, squash, verify
from pulsesync.store import Location


class Subscriber(pulsesync.Subscriber):
    def __init__(self, location: Location, *, epoch_patches: int = EPOCH_PATCHES, **options: Any) -> None:
        self._epoch_patches = epoch_patches
        super().__init__(location, **options)


class Squasher(squash.Squasher):
    def __init__(self, location: Location, *, epoch_patches: int = EPOCH_PATCHES, **options: Any) -> None:
        self._epoch_patches = epoch_patches
        super().__init__(location, **options)


class RunVerifier(verify.RunVerifier):
    def __init__(self, location: Location, *, epoch_patches: int = EPOCH_PATCHES, **options: Any) -> None:
        self._epoch_patches = epoch_patches
        super().__init__(location, **options)


def move_pointer(
    location: Location, name: str, version: int, *, epoch_patches: int = EPOCH_PATCHES, **options: Any
) -> Pointer:
    with mock.patch.object(point, "EPOCH_PATCHES", epoch_patches):
        return point.move_pointer(location, name, version, **options)
