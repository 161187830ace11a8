"""Try every method of a sync on some of a model's own weights, to know what each takes on this machine.

Both ends are real ones, in the memory that the weights are in; the receiver has them in memory of its own.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.group.bundles import BundlePlan, TensorRegion
from pulsesync.group.cost_model import METHODS, CostModel, Method, MethodTrial, TransferLoad
from pulsesync.group.messages import Bucket, SyncTimes
from pulsesync.state.sharding import Shards
from pulsesync.state.slices import Slice

FEWEST = 1 << 16  # weights: fewer tell nothing
DENSITIES = (0.002, 0.02)
HOT = 0.08  # share of the weights, the smallest, on which changes fall
Result = TypeVar("Result")


def try_methods(costs: CostModel, trials: "Sequence[TrialEnds]", receivers_alike: bool) -> None:
    """Take in what each method takes in some trials, of loads as `CostModel.tried` wants them.

    receivers_alike: whether the receivers of the group have their weights in memory of the same kind.
    """
    for method in METHODS:
        costs.tried(method, [ends.try_method(method) for ends in trials], receivers_alike)


class TrialEnds:
    """Both ends of a sync of one tile, of which some weights have changed as training would change them.

    Args:
        old: The weights that were last sent, as `sample_shards` has them, on both ends.
        new: The weights of the source now.
        received: The old ones, in memory that is written.
        changed: How many weights differ.
        make_source: Makes the source's end of bundles, tiles and shards.
        make_receiver: Makes the receiver's end, given the digests of its weights as well.
    """

    def __init__(
        self,
        old: Shards,
        new: Shards,
        received: Shards,
        changed: int,
        make_source: Callable[..., Any],
        make_receiver: Callable[..., Any],
    ) -> None:
        (spec,) = old.tensors
        layout = layouts.make([spec])
        whole = TensorRegion(spec.name, 0, 0, spec.rows, spec.columns)
        wire = BundlePlan(layout, ((whole,),), (0,), (frozenset(),), {})
        self._tiles = layout.tiles
        self._source = make_source(wire, layout.tiles, old)
        before = self._source.encode(layout.tiles, "dense", SyncTimes())
        self._sums = before.sums
        self._source.write_whole([before], before.sums)
        self._source.bind(wire, new)
        self._receiver = make_receiver(wire, layout.tiles, received, before.sums)
        self._load = TransferLoad(spec.size, spec.size * spec.kind.itemsize, changed)

    def try_method(self, method: Method) -> MethodTrial:
        bucket, source_s = _time(lambda: self._source.encode(self._tiles, method, SyncTimes()))
        got, receiver_s = _time(lambda: self._receiver.read(bucket.message, self._sums, SyncTimes()))
        _, apply_s = _time(lambda: self._write(got))
        before = self._source.saved(self._tiles, SyncTimes(), self._sums)
        self._write(self._receiver.read(before.message, self._sums, SyncTimes()))
        return MethodTrial(self._load, (source_s, receiver_s, apply_s), bucket.message.nbytes)

    def _write(self, got: Bucket) -> None:
        sums = {**self._sums, **got.sums}
        self._receiver.write_changes([got], sums)
        self._receiver.write_whole([got] if got.whole else [], {n: sums[n] for n in got.whole})


def sample_shards(dtype: str, size: int, make_source: Callable[[TensorSpec], Any]) -> Shards:
    """Weights of a dtype as the shards of a model of one tensor."""
    spec = TensorSpec("sample", dtype, (size,))
    return Shards({spec.name: Slice().of(spec)}, make_source(spec), {})


def _time(work: Callable[[], Result]) -> tuple[Result, float]:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        result = work()
        took.append(time.perf_counter() - began)
    return result, min(took[1:])  # the first may compile
