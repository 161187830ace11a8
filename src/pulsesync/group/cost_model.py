"""Which way a sync goes, decided before any work is spent on it: weights as they are, or what changed in them.

Four methods. "dense" sends weights whole, and compares nothing. "plain" finds what changed and sends positions and
values as they are; "gap" the distances between positions. "coded" codes them against the old weights: fewest bytes,
most work. What each takes at the source, on the way
and at a receiver is measured: work on a sample of the model's own weights before the first choice and on every sync
after it, the link on every sync, and how much has changed on a sample of this very change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Method = Literal["dense", "plain", "gap", "coded"]
METHODS: tuple[Method, ...] = get_args(Method)
SAMPLE = 1 << 14  # weights of a bundle that are compared to estimate how many changed
SOON_S = 0.001  # within which nobody minds how long it takes
KEPT = 1.2  # times longer that the method of the last sync may take before another is tried
NEW = 0.5  # how much of an estimate the last sync makes up
FORGOTTEN = 0.02  # how much of what is known of a method is lost at each sync by another
MOST_OFF = 5.0
ENOUGH, ENOUGH_BYTES = 1000, 1 << 16  # changes, and bytes on the link, below which a sync tells nothing
FASTEST_S = 1e-11  # a byte, on any link


@dataclass(frozen=True)
class TransferLoad:
    """What there is to be sent: one tile, or all of them."""

    weights: int
    size_bytes: int
    changed: float  # as far as a sample tells

    def __add__(self, other: "TransferLoad") -> "TransferLoad":
        return TransferLoad(
            self.weights + other.weights, self.size_bytes + other.size_bytes, self.changed + other.changed
        )


@dataclass(frozen=True)
class EndpointTime:
    """What an end does with a load, in seconds."""

    per_weight: float
    per_change: float
    per_bucket: float = 0.0

    def of(self, load: TransferLoad, buckets: float = 1.0) -> float:
        return self.per_weight * load.weights + self.per_change * load.changed + self.per_bucket * buckets

    def learnt(self, load: TransferLoad, measured_s: float, buckets: float = 1.0) -> "EndpointTime":
        """The same, scaled towards what a load has really taken."""
        off = measured_s / max(self.of(load, buckets), 1e-9)
        by = min(max(1 + NEW * (off - 1), 0.25), 4.0)
        return EndpointTime(self.per_weight * by, self.per_change * by, self.per_bucket * by)

    def scaled(self, by: float) -> "EndpointTime":
        """The same where memory is slower."""
        return EndpointTime(self.per_weight * by, self.per_change * by, self.per_bucket)


@dataclass(frozen=True)
class MethodCost:
    """What a method takes."""

    source: EndpointTime
    receiver: EndpointTime
    apply: EndpointTime  # writing, when all is checked: nothing goes on beside it
    change_bytes: float | None  # that travel for each change; None: all weights do

    def wire_bytes(self, load: TransferLoad) -> float:
        return load.size_bytes if self.change_bytes is None else self.change_bytes * load.changed


# Before anything is measured: seconds and bytes of the order that two cores have shown.
ASSUMED: Mapping[Method, MethodCost] = {
    "dense": MethodCost(EndpointTime(0.4e-9, 0), EndpointTime(0.3e-9, 0), EndpointTime(0.3e-9, 0), None),
    "plain": MethodCost(EndpointTime(0.4e-9, 20e-9), EndpointTime(0.0, 20e-9), EndpointTime(0.0, 15e-9), 6.0),
    "gap": MethodCost(EndpointTime(0.4e-9, 40e-9), EndpointTime(0.0, 60e-9), EndpointTime(0.0, 15e-9), 2.6),
    "coded": MethodCost(EndpointTime(1e-9, 100e-9), EndpointTime(0.8e-9, 60e-9), EndpointTime(0.0, 15e-9), 0.62),
}

# Seconds on an H200 (benchmarks/results/cluster_h200_2026-11-17.md), whose memory copies so many bytes a second, those
# read and those written. What a weight and a change take follows the memory; what a bucket takes is launches and waits
# of the host. gap is coded by the host.
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
    """What is known of methods and link, and what follows for the next sync."""

    methods: dict[Method, MethodCost] = field(default_factory=lambda: dict(ASSUMED))
    byte_s: float = 1e-6  # of the link; slow, until the first sync has shown it
    bucket_weights: dict[Method, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 1 << 24))
    link_known: bool = False
    last: Method | None = None  # that a sync went by as a whole
    off: dict[Method, float] = field(default_factory=dict)  # how much longer syncs took than their stages say

    def seconds(self, method: Method, load: TransferLoad) -> float:
        """How long a sync would take, corrected by how long others took, of this method or else of any."""
        known = list(self.off.values()) or [1.0]
        return self.off.get(method, sum(known) / len(known)) * self._by_stages(method, load)

    def _by_stages(self, method: Method, load: TransferLoad) -> float:
        """Its longest stage, and of the others what the first bucket cannot hide. Ends that share cores take longer."""
        cost, buckets = self.methods[method], self._buckets(method, load)
        ends = cost.source.of(load, buckets), cost.receiver.of(load, buckets)
        stages = [ends[0], cost.wire_bytes(load) * self.byte_s, ends[1]]
        return max(stages) + (sum(stages) - max(stages)) / buckets + cost.apply.of(load)

    def _buckets(self, method: Method, load: TransferLoad) -> float:
        return max(1.0, load.weights / self.bucket_weights[method])

    def choose(self, loads: Sequence[TransferLoad]) -> list[Method]:
        """The method for each tile: one for all where that is quickest, else each its own.

        Of methods that are as quick as makes no difference, the one with the fewest bytes; and what was last used is
        left only for one that is clearly quicker, because what is known of one that was not used is less sure.
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
        together = each[METHODS.index(best)].sum() + self._fixed(best, table)
        if mixed < 0.9 * together and together > SOON_S:
            return [METHODS[n] for n in own.tolist()]
        return [best] * len(loads)

    def _sums(self, method: Method, table: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the bytes and the weights of each tile take, without what every bucket takes."""
        weights, sizes, changed = table.T
        cost = self.methods[method]
        ends = cost.source, cost.receiver, cost.apply
        carried = sizes if cost.change_bytes is None else cost.change_bytes * changed
        per_weight, per_change = sum(end.per_weight for end in ends), sum(end.per_change for end in ends)
        found: NDArray[np.float64] = carried * self.byte_s + per_weight * weights + per_change * changed
        return found

    def _fixed(self, method: Method, table: NDArray[np.float64]) -> float:
        """What the buckets of some tiles take, however many weights these have."""
        cost, buckets = self.methods[method], self._buckets(method, _load(table))
        return buckets * (cost.source.per_bucket + cost.receiver.per_bucket) + cost.apply.per_bucket

    def learn(self, method: Method, load: TransferLoad, took: "MethodTiming") -> None:
        """Take in what a sync by one method has taken; the load says what really changed.

        So few changes that other things decide tell nothing. What is known of methods that were not used moves back to
        what is known of all: one odd sync must not decide for ever.
        """
        if method != "dense" and load.changed < ENOUGH:
            return
        cost, self.last = self.methods[method], method
        change_bytes = cost.change_bytes
        if change_bytes is not None:
            change_bytes += NEW * (took.sent_bytes / load.changed - change_bytes)
        buckets = self._buckets(method, load)
        source = cost.source.learnt(load, took.source_s, buckets)
        receiver = cost.receiver.learnt(load, took.receiver_s, buckets)
        self.methods[method] = MethodCost(source, receiver, cost.apply, change_bytes)
        off = min(max(took.total_s / max(self._by_stages(method, load), 1e-9), 1 / MOST_OFF), MOST_OFF)
        mean = sum(self.off.values(), off) / (1 + len(self.off))
        self.off = {one: value + FORGOTTEN * (mean - value) for one, value in self.off.items()}
        before = self.off.get(method, mean)
        self.off[method] = before + NEW * (off - before)

    def learn_link(self, sent_bytes: int, wire_s: float, others_s: float) -> None:
        """Take in how long bytes were on their way; others_s is what the longest other stage took.

        A link that was not what held the sync up shows only that it is not slower: what was waited for may have been
        anything.
        """
        if sent_bytes < ENOUGH_BYTES or wire_s <= 0:
            return
        took_s = max(wire_s / sent_bytes, FASTEST_S)
        if not self.link_known or took_s < self.byte_s or wire_s > others_s:
            self.byte_s += (NEW if self.link_known else 1.0) * (took_s - self.byte_s)
            self.link_known = True

    def tried(self, method: Method, trials: Sequence["MethodTrial"]) -> None:
        """Take in what a method took on some weights, changed by little and by more."""
        low, high = trials
        source, receiver, apply = (
            _line(low.load, high.load, before, after) for before, after in zip(low.seconds, high.seconds, strict=True)
        )
        change_bytes = None if self.methods[method].change_bytes is None else high.sent_bytes / high.load.changed
        self.methods[method] = MethodCost(source, receiver, apply, change_bytes)

    def assume_gpu(self, copy_bytes_s: float, receivers_too: bool) -> None:
        """Assume a source on a GPU that copies so many bytes a second, and perhaps receivers on GPUs like it."""
        scale = GPU_COPY_BYTES_S / copy_bytes_s
        for method, cost in ON_GPU.items():
            known = cost if receivers_too else self.methods[method]
            receiver, apply = known.receiver, known.apply
            if receivers_too:
                receiver, apply = receiver.scaled(scale), apply.scaled(scale)
            self.methods[method] = MethodCost(cost.source.scaled(scale), receiver, apply, cost.change_bytes)


@dataclass(frozen=True)
class MethodTiming:
    """What a sync by one method took."""

    source_s: float
    receiver_s: float
    total_s: float
    sent_bytes: int


@dataclass(frozen=True)
class MethodTrial:
    """What a method took on some weights."""

    load: TransferLoad
    seconds: tuple[float, float, float]  # at the source, at a receiver, and to write
    sent_bytes: int


def _load(table: NDArray[np.float64]) -> TransferLoad:
    """All tiles together, given weights, bytes and changes of each."""
    weights, size_bytes, changed = table.sum(axis=0).tolist()
    return TransferLoad(int(weights), int(size_bytes), changed)


def _line(low: TransferLoad, high: TransferLoad, low_s: float, high_s: float) -> EndpointTime:
    """Through two measurements: so much a weight, so much a change."""
    per_change = max((high_s - low_s) / max(high.changed - low.changed, 1.0), 1e-10)
    return EndpointTime(max((low_s - per_change * low.changed) / low.weights, 1e-11), per_change)
