"""Fetch the bodies of patches, some of them ahead, in groups that are decoded together."""

from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeAlias

from pulsesync.core.threads import Started, read_ahead
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest
from pulsesync.run.bodies import fetch_body
from pulsesync.state.weights import WeightState
from pulsesync.store import Store

AHEAD = 4  # patches fetched before they are decoded
TOGETHER = 16  # patches decoded together, so that the weights are copied and compared once for all of them
# Bytes of patches that are fetched ahead, and of those decoded together; or, if that is more, 1/32 of the weights. A
# decoded patch takes several times its own bytes, so this is less memory than one decoded patch needs.
AHEAD_BYTES = 1 << 24
AHEAD_SHARE = 32

Fetching: TypeAlias = Started[Manifest, tuple[Body, int]]  # a record, and its parts with the bytes that they took


class PatchFetcher:
    """Fetches the bodies of records, as far as a state has their tiles.

    Args:
        store: Where they are.
        state: What they are for.
    """

    def __init__(self, store: Store, state: WeightState) -> None:
        self._store, self._state = store, state
        self._ahead_bytes = max(AHEAD_BYTES, state.layout.size_bytes // AHEAD_SHARE)

    def groups(self, path: Sequence[Manifest]) -> Generator[list[Fetching], None, None]:
        """Yield records in groups that are decoded together, while their bodies are being fetched."""
        some: list[Fetching] = []
        with ExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(AHEAD, thread_name_prefix="pulse-fetch"))
            jobs = ((record, self._parts_of(record)) for record in path)
            coming = read_ahead(executor, jobs, AHEAD, lambda record: record.size_bytes, self._ahead_bytes)
            for one in stack.enter_context(closing(coming)):
                size = sum(record.size_bytes for record, _ in (*some, one))
                if some and (size > self._ahead_bytes or len(some) == TOGETHER or not self._state.backend.overlays):
                    yield some
                    some = []
                some.append(one)
            if some:
                yield some

    def _parts_of(self, record: Manifest) -> list["partial[tuple[Body, int]]"]:
        wanted = None if self._state.whole else self._state.places.keys()
        return [partial(fetch_body, self._store, ref, self._state.layout, wanted) for ref in record.parts]
