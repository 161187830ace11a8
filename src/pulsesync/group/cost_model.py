"""Which method a sync uses, chosen before any work is spent on it: all weights, or only the changes.

Four methods. "dense" sends weights whole, and compares nothing. "plain" finds what changed and sends positions and
values as they are; "gap" sends the distances between positions. "coded" codes them against the old weights: fewest
bytes, most work. The times at the source, on the link and at a receiver are measured: work on a sample of the model's
weights before the first choice and on every sync after it, the link on every sync, and the number of changes on a
sample of the current change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["dense", "plain", "gap", "coded"]
METHODS: tuple[Method, ...] = get_args(Method)
SAMPLE = 1 << 14  # weights of a bundle that are compared to estimate how many changed
SOON_S = 0.001  # differences below this do not matter
KEPT = 1.2  # how many times longer the method of the last sync may take before another is used
NEW = 0.5  # weight of the last sync in an estimate
FORGOTTEN = 0.02  # share of what is known of a method that is forgotten at each sync by another
MOST_OFF = 5.0
ENOUGH, ENOUGH_BYTES = 1000, 1 << 16  # changes, and bytes on the link, below which a sync is not used for estimates
FASTEST_S = 1e-11  # a byte, on any link


@dataclass(frozen=True)
class TransferLoad:
    """What has to be sent: one tile, or all of them."""

    weights: int
    size_bytes: int
    changed: float  # estimated from a sample


@dataclass(frozen=True)
class EndpointTime:
    """The time that one end takes for a load, in seconds."""

    per_weight: float
    per_change: float
    per_bucket: float = 0.0

    def of(self, load: TransferLoad, buckets: float = 1.0) -> float:
        return self.per_weight * load.weights + self.per_change * load.changed + self.per_bucket * buckets

    def learnt(self, load: TransferLoad, measured_s: float, buckets: float) -> "EndpointTime":
        """The same, scaled towards the measured time of a load."""
        off = measured_s / max(self.of(load, buckets), 1e-9)
        by = min(max(1 + NEW * (off - 1), 0.25), 4.0)
        return EndpointTime(self.per_weight * by, self.per_change * by, self.per_bucket * by)

    def scaled(self, by: float) -> "EndpointTime":
        """The same where memory is slower."""
        return EndpointTime(self.per_weight * by, self.per_change * by, self.per_bucket)


@dataclass(frozen=True)
class MethodCost:
    """The cost of a method."""

    source: EndpointTime
    receiver: EndpointTime
    apply: EndpointTime  # writing, when all is checked: nothing runs concurrently
    change_bytes: float | None  # that travel for each change; None: all weights do

    def wire_bytes(self, load: TransferLoad) -> float:
        return load.size_bytes if self.change_bytes is None else self.change_bytes * load.changed


# Before anything is measured: seconds and bytes of the order measured on two cores.
ASSUMED: Mapping[Method, MethodCost] = {
    "dense": MethodCost(EndpointTime(0.4e-9, 0), EndpointTime(0.3e-9, 0), EndpointTime(0.3e-9, 0), None),
    "plain": MethodCost(EndpointTime(0.4e-9, 20e-9), EndpointTime(0.0, 20e-9), EndpointTime(0.0, 15e-9), 6.0),
    "gap": MethodCost(EndpointTime(0.4e-9, 40e-9), EndpointTime(0.0, 60e-9), EndpointTime(0.0, 15e-9), 2.6),
    "coded": MethodCost(EndpointTime(1e-9, 100e-9), EndpointTime(0.8e-9, 60e-9), EndpointTime(0.0, 15e-9), 0.62),
}

# Seconds on an H200 (benchmarks/results/cluster_h200_2026-11-17.md), whose memory copies this many bytes a second,
# counting those read and those written. The time of a weight and of a change scales with the memory; the time of a
# bucket is launches and waits of the host. gap is coded by the host.
GPU_COPY_BYTES_S = 4.1e12
ON_GPU: Mapping[Method, MethodCost] = {
    "dense": MethodCost(
        EndpointTime(1.8e-12, 0, 7e-4), EndpointTime(0.7e-12, 0, 6e-4), EndpointTime(1.5e-12, 0, 1e-4), None
    ),
    "plain": MethodCost(
        EndpointTime(1.45e-12, 1.7e-11, 3e-3), EndpointTime(0, 3e-11, 3e-3), EndpointTime(0, 4.6e-11, 5e-4), 6.0
    ),
    "gap": MethodCost(
        EndpointTime(1.45e-12, 2.7e-8, 3e-3), EndpointTime(0, 4.5e-8, 3e-3), EndpointTime(0, 4.6e-11, 1e-3), 2.3
    ),
    "coded": MethodCost(
        EndpointTime(2.6e-12, 2.5e-10, 12e-3), EndpointTime(1.1e-12, 2e-10, 1e-2), EndpointTime(0, 4.6e-11, 5e-4), 0.5
    ),
}


@dataclass
class CostModel:
    """Estimates for methods and link, and the choice for the next sync."""

    methods: dict[Method, MethodCost] = field(default_factory=lambda: dict(ASSUMED))
    byte_s: float = 1e-6  # of the link; slow, until the first sync has shown it
    bucket_weights: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 1 << 24))
    link_known: bool = False
    last: Method | None = None  # the method of the last sync, if it used only one
    off: dict[Method, float] = field(default_factory=dict)  # how much longer syncs took than the sum of their stages

    def seconds(self, method: Method, load: TransferLoad) -> float:
        """How long a sync would take, corrected by measured syncs of this method, or else of any."""
        known = list(self.off.values()) or [1.0]
        return self.off.get(method, sum(known) / len(known)) * self._by_stages(method, load)

    def _by_stages(self, method: Method, load: TransferLoad) -> float:
        """The longest stage, and the part of the others that the first bucket cannot hide: ends may share cores."""
        cost, buckets = self.methods[method], self._buckets(method, load)
        ends = cost.source.of(load, buckets), cost.receiver.of(load, buckets)
        stages = [ends[0], cost.wire_bytes(load) * self.byte_s, ends[1]]
        return max(stages) + (sum(stages) - max(stages)) / buckets + cost.apply.of(load)

    def _buckets(self, method: Method, load: TransferLoad) -> float:
        return max(1.0, load.weights / self.bucket_weights[method])

    def choose(self, loads: Sequence[TransferLoad]) -> list[Method]:
        """The method for each tile: one for all where that is quickest, else each its own.

        Of methods that are about equally fast, the one with the fewest bytes is chosen. The last method is replaced
        only by one that is clearly faster, because estimates for unused methods are less certain.
        """
        if not loads:
            return []
        table = np.array([(load.weights, load.size_bytes, load.changed) for load in loads], np.float64)
        total = _load(table)
        took = {method: self.seconds(method, total) for method in METHODS}
        near = [method for method in METHODS if took[method] <= max(1.05 * min(took.values()), SOON_S)]
        best = min(near, key=lambda method: self.methods[method].wire_bytes(total))
        if self.last and took[self.last] <= KEPT * took[best]:
            best = self.last
        each = np.array([self._sums(method, table) for method in METHODS])  # (methods, tiles)
        own = each.argmin(axis=0)
        mixed = each.min(axis=0).sum() + sum(self._fixed(METHODS[n], table[own == n]) for n in set(own.tolist()))
        by_one = each[METHODS.index(best)].sum() + self._fixed(best, table)
        if mixed < 0.9 * by_one and by_one > SOON_S:
            return [METHODS[n] for n in own.tolist()]
        return [best] * len(loads)

    def _sums(self, method: Method, table: NDArray[np.float64]) -> NDArray[np.float64]:
        """The time for the bytes and weights of each tile, without the fixed time of a bucket."""
        (weights, sizes, changed), cost = table.T, self.methods[method]
        ends = cost.source, cost.receiver, cost.apply
        carried = sizes if cost.change_bytes is None else cost.change_bytes * changed
        per_weight, per_change = sum(end.per_weight for end in ends), sum(end.per_change for end in ends)
        found: NDArray[np.float64] = carried * self.byte_s + per_weight * weights + per_change * changed
        return found

    def _fixed(self, method: Method, table: NDArray[np.float64]) -> float:
        """The fixed time for the buckets of some tiles."""
        cost, buckets = self.methods[method], self._buckets(method, _load(table))
        return buckets * (cost.source.per_bucket + cost.receiver.per_bucket) + cost.apply.per_bucket

    def learn(self, method: Method, load: TransferLoad, took: "MethodTiming") -> None:
        """Add the times of a sync by one method; the load has the real number of changes.

        Syncs with so few changes that other costs dominate are not used. Estimates for unused methods move back towards
        those of all methods, so that one odd sync does not decide for ever.
        """
        if method != "dense" and load.changed < ENOUGH:
            return
        cost, buckets, self.last = self.methods[method], self._buckets(method, load), method
        change_bytes = cost.change_bytes
        if change_bytes is not None:
            change_bytes += NEW * (took.sent_bytes / load.changed - change_bytes)
        source = cost.source.learnt(load, took.source_s, buckets)
        receiver = cost.receiver.learnt(load, took.receiver_s, buckets)
        self.methods[method] = MethodCost(source, receiver, cost.apply, change_bytes)
        off = min(max(took.total_s / max(self._by_stages(method, load), 1e-9), 1 / MOST_OFF), MOST_OFF)
        mean = sum(self.off.values(), off) / (1 + len(self.off))
        self.off = {one: value + FORGOTTEN * (mean - value) for one, value in self.off.items()}
        before = self.off.get(method, mean)
        self.off[method] = before + NEW * (off - before)

    def learn_link(self, sent_bytes: int, wire_s: float, others_s: float) -> None:
        """Add the time that bytes were on the link; others_s is the time of the longest other stage.

        A link that did not limit the sync shows only that it is not slower: the waiting may have had any cause.
        """
        if sent_bytes < ENOUGH_BYTES or wire_s <= 0:
            return
        took_s = max(wire_s / sent_bytes, FASTEST_S)
        if not self.link_known or took_s < self.byte_s or wire_s > others_s:
            self.byte_s += (NEW if self.link_known else 1.0) * (took_s - self.byte_s)
            self.link_known = True

    def tried(self, method: Method, trials: Sequence["MethodTrial"]) -> None:
        """Add the times of a method on some weights, with few changes and with more."""
        low, high = trials
        pairs = zip(low.seconds, high.seconds, strict=True)
        source, receiver, apply = (_line(low.load, high.load, *pair) for pair in pairs)
        change_bytes = None if self.methods[method].change_bytes is None else high.sent_bytes / high.load.changed
        self.methods[method] = MethodCost(source, receiver, apply, change_bytes)

    def assume_gpu(self, copy_bytes_s: float, receivers_too: bool) -> None:
        """Assume a source on a GPU that copies this many bytes a second, and perhaps receivers on GPUs like it."""
        scale = GPU_COPY_BYTES_S / copy_bytes_s
        for method, cost in ON_GPU.items():
            known, by = (cost, scale) if receivers_too else (self.methods[method], 1.0)
            ends = cost.source.scaled(scale), known.receiver.scaled(by), known.apply.scaled(by)
            self.methods[method] = MethodCost(*ends, cost.change_bytes)


@dataclass(frozen=True)
class MethodTiming:
    """The times of a sync by one method."""

    source_s: float
    receiver_s: float
    total_s: float
    sent_bytes: int


@dataclass(frozen=True)
class MethodTrial:
    """The times of a method in a trial."""

    load: TransferLoad
    seconds: tuple[float, float, float]  # at the source, at a receiver, and to write
    sent_bytes: int


def _load(table: NDArray[np.float64]) -> TransferLoad:
    """All tiles together, given weights, bytes and changes of each."""
    weights, size_bytes, changed = table.sum(axis=0).tolist()
    return TransferLoad(int(weights), int(size_bytes), changed)


def _line(low: TransferLoad, high: TransferLoad, low_s: float, high_s: float) -> EndpointTime:
    """The line through two measurements: time for a weight, and time for a change."""
    per_change = max((high_s - low_s) / max(high.changed - low.changed, 1.0), 1e-10)
    return EndpointTime(max((low_s - per_change * low.changed) / low.weights, 1e-11), per_change)
