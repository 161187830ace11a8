"""The time that each method takes on this machine, before the first choice: tried on the model's weights, or scaled.

In host memory every method is tried on some weights, with both ends as they are in a sync. On a GPU the times follow
the speed of its memory, and are scaled from those of a GPU on which they were measured.
"""

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pulsesync.core.types import Bits, TensorSpec, Tile
from pulsesync.format import layout as layouts
from pulsesync.group.bundles import BundlePlan, TensorRegion
from pulsesync.group.cost_model import METHODS, CostModel, Method, MethodTrial, TransferLoad
from pulsesync.group.host_weights import HostReceiverWeights, HostSourceWeights
from pulsesync.group.messages import Bucket, SyncTimes
from pulsesync.state.sharding import Shards
from pulsesync.state.slices import Slice
from pulsesync.state.views import BitView, HostSource

FEWEST, MOST = 1 << 16, 1 << 21  # number of weights in a trial
DENSITIES = (0.002, 0.02)
HOT = 0.08  # share of the weights, the smallest, on which changes fall
Result = TypeVar("Result")


def calibrate_host(costs: CostModel, tiles: Sequence[Tile], weights: HostSourceWeights) -> None:
    """Add the times of each method on some of a source's weights; with too few weights it does nothing."""
    coded = [tile for tile in tiles if tile.tensor.kind.exponent_shift is not None]
    largest = max(coded, key=lambda tile: tile.size, default=None)
    if largest is None or largest.size < FEWEST:
        return
    sample = weights.live.read(largest, 0, min(MOST, largest.size)).copy()
    trials = [_TrialEnds(sample, largest.tensor.dtype, density) for density in DENSITIES]
    for method in METHODS:
        costs.tried(method, [ends.try_method(method) for ends in trials])


class _TrialEnds:
    """Both ends of a sync of one tile, with some weights changed as training would change them."""

    def __init__(self, old: Bits, dtype: str, density: float) -> None:
        magnitude = old & old.dtype.type((1 << (8 * old.itemsize - 1)) - 1)
        border = np.partition(magnitude, int(HOT * old.size))[int(HOT * old.size)]
        hot = np.flatnonzero(magnitude <= border)
        positions = np.random.default_rng(0).choice(hot, min(int(density * old.size), hot.size), replace=False)
        new = old.copy()
        new[positions] ^= 1
        spec = TensorSpec("sample", dtype, (old.size,))
        layout, whole = layouts.make([spec]), TensorRegion(spec.name, 0, 0, spec.rows, spec.columns)
        wire = BundlePlan(layout, ((whole,),), (0,), (frozenset(),), {})
        self._tiles = layout.tiles
        self._source = HostSourceWeights(wire, layout.tiles, _shards(spec, old))
        before = self._source.encode(layout.tiles, "dense", SyncTimes())
        assert before is not None
        self._sums = before.sums
        self._source.write_whole([before], before.sums)
        self._source.bind(wire, _shards(spec, new))
        self._receiver = HostReceiverWeights(wire, layout.tiles, _shards(spec, old.copy()), before.sums)
        self._load = TransferLoad(old.size, old.nbytes, positions.size)

    def try_method(self, method: Method) -> MethodTrial:
        bucket, source_s = _time(lambda: self._source.encode(self._tiles, method, SyncTimes()))
        assert bucket is not None
        got, receiver_s = _time(lambda: self._receiver.read(bucket.message, self._sums, SyncTimes()))
        _, apply_s = _time(lambda: self._write(got))
        before = self._source.saved(self._tiles, SyncTimes(), self._sums)
        self._write(self._receiver.read(before.message, self._sums, SyncTimes()))
        return MethodTrial(self._load, (source_s, receiver_s, apply_s), bucket.message.nbytes)

    def _write(self, got: Bucket) -> None:
        sums = {**self._sums, **got.sums}
        self._receiver.write_changes([got], sums)
        self._receiver.write_whole([got] if got.whole else [], {n: sums[n] for n in got.whole})


def _shards(spec: TensorSpec, bits: Bits) -> Shards:
    return Shards({spec.name: Slice().of(spec)}, HostSource({spec.name: BitView(spec, bits, True)}, {}), {})


def _time(work: Callable[[], Result]) -> tuple[Result, float]:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return result, min(took[1:])  # the first may compile
