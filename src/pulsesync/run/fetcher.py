"""Fetch the bodies of patches, some of them ahead, in groups that are decoded together."""

from collections.abc import Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeAlias

from pulsesync.core.threads import CallerExecutor, Started, read_ahead
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


def fetch_groups(store: Store, state: WeightState, path: Sequence[Manifest]) -> Generator[list[Fetching], None, None]:
    """Yield records in groups to be decoded together, while their bodies are fetched, as far as a state has them."""
    layout, wanted = state.layout, None if state.whole else state.places.keys()
    ahead_bytes = max(AHEAD_BYTES, layout.size_bytes // AHEAD_SHARE)
    jobs = ((record, [partial(fetch_body, store, ref, layout, wanted) for ref in record.parts]) for record in path)
    some: list[Fetching] = []
    with ExitStack() as stack:
        executor: Executor = CallerExecutor()  # a thread for one part would take longer to start than a short fetch
        if sum(len(record.parts) for record in path) > 1:
            executor = stack.enter_context(ThreadPoolExecutor(AHEAD, thread_name_prefix="pulse-fetch"))
        coming = read_ahead(executor, jobs, AHEAD, lambda record: record.size_bytes, ahead_bytes)
        for one in stack.enter_context(closing(coming)):
            size = sum(record.size_bytes for record, _ in (*some, one))
            if some and (size > ahead_bytes or len(some) == TOGETHER or not state.backend.overlays):
                yield some
                some = []
            some.append(one)
        if some:
            yield some
