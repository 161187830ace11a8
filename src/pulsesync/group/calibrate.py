"""Try every method of a sync on some of a model's own weights, to know what each takes on this machine."""

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from pulsesync.core.types import Bits, TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.weights import by_block
from pulsesync.group import messages
from pulsesync.group.bundles import BundlePlan, LocalBundles, TensorRegion
from pulsesync.group.cost_model import METHODS, CostModel, Method, MethodTrial, TransferLoad
from pulsesync.group.messages import Bucket, SyncTimes
from pulsesync.state.host import HostState, HostTransition
from pulsesync.state.live import AnyTransition
from pulsesync.state.sharding import Shards
from pulsesync.state.slices import Slice
from pulsesync.state.views import BitView, HostSource

FEWEST, MOST = 1 << 16, 1 << 21  # weights that are tried on
DENSITIES = (0.002, 0.02)
Result = TypeVar("Result")
HOT = 0.08  # share of the weights, the smallest, on which changes fall


def try_methods(costs: CostModel, sample: Bits, dtype: str) -> None:
    """Take in what each method takes on these weights; too few of them tell nothing."""
    if sample.size >= FEWEST:
        found = [_TrialEnds(sample, dtype, density) for density in DENSITIES]
        for method in METHODS:
            costs.tried(method, [ends.try_method(method) for ends in found])


class _TrialEnds:
    """Both ends of a sync of one tile, of which some weights have changed as training would change them."""

    def __init__(self, old: Bits, dtype: str, density: float) -> None:
        self.layout = layouts.make([TensorSpec("sample", dtype, (old.size,))])
        self.base = HostState(self.layout, {"sample": old})
        self.live = _bundle(self.layout, old.copy())
        self.receiver = HostState(self.layout, {"sample": old}, places=self.live.places, sums=self.base.sums)
        magnitude = old & old.dtype.type((1 << (8 * old.itemsize - 1)) - 1)
        border = np.partition(magnitude, int(HOT * old.size))[int(HOT * old.size)]
        hot = np.flatnonzero(magnitude <= border)
        positions = np.random.default_rng(0).choice(hot, min(int(density * old.size), hot.size), replace=False)
        new = old.copy()
        new[positions] ^= 1
        self.new = _bundle(self.layout, new)
        self.load = TransferLoad(old.size, old.nbytes, positions.size)

    def try_method(self, method: Method) -> MethodTrial:
        receiver, sums, tiles = (self.receiver, self.live), self.base.sums, self.layout.tiles

        def encode() -> Bucket:
            if method == "dense":
                return messages.raw(self.new, tiles, SyncTimes())
            bucket = messages.encode(self.base, self.new, tiles, method, SyncTimes())
            assert bucket is not None
            return bucket

        bucket, source_s = _time(encode)
        got, receiver_s = _time(lambda: messages.read(bucket.message, self.layout, receiver, sums, SyncTimes()))
        there = HostTransition(by_block(got.patches), got.sums, History())

        def write() -> AnyTransition:
            back = self.receiver.commit(there)
            self.receiver.load_tiles(got.whole, got.sums)
            return back

        _, apply_s = _time(write)
        self.receiver.load_tiles({0: self.base.flats["sample"]}, sums)
        return MethodTrial(self.load, (source_s, receiver_s, apply_s), bucket.message.size)


def _bundle(layout: Layout, bits: Bits) -> LocalBundles:
    spec = layout.tensors[0]
    shards = Shards({spec.name: Slice().of(spec)}, HostSource({spec.name: BitView(spec, bits, True)}, {}), {})
    whole = TensorRegion(spec.name, 0, 0, spec.rows, spec.columns)
    return LocalBundles(BundlePlan(layout, ((whole,),), (0,), (frozenset(),), {}), layout.tiles, shards)


def _time(work: Callable[[], Result]) -> tuple[Result, float]:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return result, min(took[1:])  # the first may compile
