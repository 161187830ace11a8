"""Compile ahead: the first sync of a fresh installation should not wait for a compiler."""

import time

import numpy as np

from pulsesync.core.types import BlockChange, TensorSpec
from pulsesync.format import layout, patch
from pulsesync.format.history import History
from pulsesync.state.host import HostState


def warm_up(dtype: str = "BF16") -> float:
    """Run every kernel once on a small state, so that each is compiled and cached; return the seconds it took.

    Some seconds on a machine that has not done it before, a fraction of one later. A trainer calls it while its model
    loads; a container image can call it when it is built.
    """
    began = time.perf_counter()
    spec = TensorSpec("w", dtype, (64, 64))
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << (8 * spec.kind.itemsize), spec.size, dtype=np.uint64).astype(spec.kind.bits)
    new = old.copy()
    new[::7] += 1
    state, history = HostState(layout.make([spec]), {"w": old}, {}), History()
    for _ in range(2):
        part = patch.encode(
            state.layout, state.layout.tiles, {"w": old}, {"w": new}, state.sums, codec="history", history=history
        )
        patch.decode(part.data, state.layout, {"w": old}, history=history)
        history = history.after(part.patches, {"w": old})
    history.digest()
    smooth = (np.arange(spec.size) % 29 << 7).astype(spec.kind.bits)  # exponents that are packed, as those of weights
    whole = patch.encode_whole(state.layout, state.layout.tiles, {"w": smooth}, state.sums)
    patch.decode(whole.data, state.layout, {"w": old})
    _warm_up_bundles(dtype)
    return time.perf_counter() - began


def _warm_up_bundles(dtype: str) -> None:
    """Gather two small tensors and write to them, as a worker does."""
    pair = layout.bundle(layout.make([TensorSpec(name, dtype, (40,)) for name in "ab"]))
    held, (tile,) = HostState(pair, {spec.name: np.zeros(40, spec.kind.bits) for spec in pair.tensors}), pair.tiles
    old = held.block(tile, 0)[30:50]
    held.write_change(tile.ordinal, BlockChange(0, np.arange(30, 50, dtype=np.uint32), old, old))
