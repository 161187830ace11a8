"""Measure the tensors of one device repeatedly, and count how they differ from before.

    meter = Meter(sizes, columns, plan, buffers, counting)
    meter.look(flats)                # the first state: nothing to count yet
    sight = meter.look(flats, gradients, rates)

It keeps one copy of what it compares in the inference dtype and a byte for each weight (the direction of its last
change); of a sample the values in FP32, in each dtype of contrast, and the states of as many steps as the longest
window has.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from pulsesync.core.types import DTYPES, Bits
from pulsesync_lab.study.measure.buffers import LARGEST, Buffers
from pulsesync_lab.study.measure.counting import Numbers, Tally, row_size
from pulsesync_lab.study.measure.sample import choose


@dataclass(frozen=True)
class MeterSettings:
    """What is measured."""

    dtype: str
    contrast: tuple[str, ...]
    windows: tuple[int, ...]
    sample: int
    whole: bool


@dataclass(frozen=True)
class MeterReading:
    """The result of one look; arrays by tensor are in the order of the tensors."""

    tally: Tally
    weights: Numbers  # (CLASSES,) those compared, by the class that they had before
    windows: dict[int, Numbers]
    contrast: dict[str, Numbers]
    gradients: Numbers | None
    ratios: Numbers | None


class Meter:
    """Of tensors of one device. They are only read, and only casts of them are kept."""

    def __init__(
        self, sizes: Sequence[int], columns: Sequence[int], plan: MeterSettings, buffers: Buffers, counting: Any
    ) -> None:
        self.plan, self.buffers, self.counting = plan, buffers, counting
        self.strides = choose(sizes, columns, plan.sample)
        shift = DTYPES[plan.dtype].exponent_shift
        assert shift is not None
        self.shift = shift
        sampled = [stride.count for stride in self.strides]
        self.sizes = list(sizes) if plan.whole else sampled
        self.kept = _ReferenceCopy(self.sizes, self)
        self.seen = _SampleState(sampled, self)

    def look(
        self, flats: Sequence[Any], gradients: Sequence[Any] | None = None, rates: Sequence[float] | None = None
    ) -> MeterReading | None:
        """Count what changed since the last look; None for the first one."""
        sampled = [stride.of(flat) for stride, flat in zip(self.strides, flats, strict=True)]
        compared = flats if self.plan.whole else sampled
        if self.kept.weights is None:
            self.kept.begin(compared)
            self.seen.begin(flats, sampled)
            return None
        weights = self.kept.weights
        rows = [self.kept.compare(compared)]
        named = self.seen.look(sampled)
        if gradients is not None:
            named["gradients"] = self.seen.slopes(
                [
                    flat if flat is None else stride.of(flat)
                    for stride, flat in zip(self.strides, gradients, strict=True)
                ]
            )
        if rates is not None and any(rates):
            named["ratios"] = self.seen.ratios(rates)
        row, *found = self.counting.home(rows + list(named.values()))
        tally, by_name = Tally.of(row), dict(zip(named, found, strict=True))
        self.kept.weights = weights - tally.leaving + tally.entering
        return MeterReading(
            tally,
            weights,
            {k: by_name[f"window {k}"] for k in self.plan.windows if f"window {k}" in by_name},
            {dtype: by_name[dtype] for dtype in self.plan.contrast},
            by_name.get("gradients"),
            by_name.get("ratios"),
        )

    def bits(self) -> list[Bits]:
        """The kept copy, tensor by tensor, on the host."""
        flat = self.buffers.to_host(self.kept.state)
        return np.split(flat, np.cumsum(self.sizes)[:-1])


@dataclass(frozen=True)
class _Chunk:
    """Weights of consecutive tensors, or parts of them, that are cast and compared together."""

    begin: int  # in the kept copy
    first: int  # tensor
    pieces: tuple[tuple[int, int], ...]  # of that one and those after it
    ends: Any

    @property
    def size(self) -> int:
        return sum(end - begin for begin, end in self.pieces)


class _ReferenceCopy:
    """The copy that all weights are compared with, or those of the sample."""

    def __init__(self, sizes: Sequence[int], meter: Meter) -> None:
        self.tensors, self.meter = len(sizes), meter
        buffers = meter.buffers
        self.state = buffers.empty(sum(sizes), meter.plan.dtype)
        self.last = buffers.marks(sum(sizes))
        self.chunks = list(_chunks(sizes, buffers))
        self.scratch = buffers.empty(max((chunk.size for chunk in self.chunks), default=0), meter.plan.dtype)
        self.weights: Numbers | None = None

    def begin(self, flats: Sequence[Any]) -> None:
        buffers, counting = self.meter.buffers, self.meter.counting
        buffers.load(self.state, flats)
        (self.weights,) = counting.home([counting.classes(buffers.bits(self.state), self.meter.shift)])

    def compare(self, flats: Sequence[Any]) -> Any:
        """Compare with the kept copy, and replace it."""
        buffers, counting = self.meter.buffers, self.meter.counting
        state, scratch = buffers.bits(self.state), buffers.bits(self.scratch)
        total = buffers.ends([0] * row_size(self.tensors))
        for chunk in self.chunks:
            sources = [flats[chunk.first + n][begin:end] for n, (begin, end) in enumerate(chunk.pieces)]
            buffers.load(self.scratch, sources)
            here = slice(chunk.begin, chunk.begin + chunk.size)
            row = counting.compare(state[here], scratch[: chunk.size], self.last[here], chunk.ends, self.meter.shift)
            count = len(chunk.pieces)
            total[chunk.first : chunk.first + count] += row[:count]
            total[self.tensors :] += row[count:]
        return total


def _chunks(sizes: Sequence[int], buffers: Buffers) -> Iterator[_Chunk]:
    """Split concatenated tensors into chunks."""
    ends = [0, *accumulate(sizes)]
    for begin in range(0, ends[-1], buffers.chunk):
        end = min(begin + buffers.chunk, ends[-1])
        first, last = bisect_right(ends, begin) - 1, bisect_left(ends, end)
        pieces = tuple((max(begin, ends[n]) - ends[n], min(end, ends[n + 1]) - ends[n]) for n in range(first, last))
        yield _Chunk(begin, first, pieces, buffers.ends([b - a for a, b in pieces]))


class _SampleState:
    """The sample: its values now and a step before, in every dtype of contrast, and its states of many steps."""

    def __init__(self, counts: Sequence[int], meter: Meter) -> None:
        plan, buffers = meter.plan, meter.buffers
        self.meter, self.counts, self.looks = meter, counts, 0
        size = sum(counts)
        self.ends = buffers.ends(counts)
        self.values, self.before = buffers.empty(size, "F32"), buffers.empty(size, "F32")
        self.others = {d: (buffers.empty(size, d), buffers.empty(size, d)) for d in plan.contrast if d != "F32"}
        self.ring = [buffers.empty(size, plan.dtype) for _ in range(max(plan.windows, default=0) + 1)]
        self.factors: dict[str, Any] = {}
        self.gradients: Any = None

    def begin(self, flats: Sequence[Any], sampled: Sequence[Any]) -> None:
        buffers = self.meter.buffers
        self.factors = {d: buffers.scales(flats, self.counts, d) for d in self.others if d in LARGEST}
        self._take(sampled)

    def _take(self, sampled: Sequence[Any]) -> None:
        buffers = self.meter.buffers
        self.values, self.before = self.before, self.values
        buffers.load(self.values, sampled)
        buffers.load(self.ring[self.looks % len(self.ring)], [self.values])
        for dtype, (now, before) in self.others.items():
            self.others[dtype] = before, now
            factors = self.factors.get(dtype)
            values = self.values if factors is None else buffers.scale(self.values, factors, dtype)
            buffers.load(before, [values])

    def look(self, sampled: Sequence[Any]) -> dict[str, Any]:
        """Count over every window that is full, and in every dtype."""
        self.looks += 1
        self._take(sampled)
        out = {}
        for k in self.meter.plan.windows:
            if k <= self.looks:
                out[f"window {k}"] = self._differ(self.ring[(self.looks - k) % len(self.ring)], self._newest())
        for dtype in self.meter.plan.contrast:
            out[dtype] = self._differ(*((self.before, self.values) if dtype == "F32" else self.others[dtype]))
        return out

    def _newest(self) -> Any:
        return self.ring[self.looks % len(self.ring)]

    def _differ(self, old: Any, new: Any) -> Any:
        bits = self.meter.buffers.bits
        return self.meter.counting.differ(bits(old), bits(new), self.ends)

    def ratios(self, rates: Sequence[float]) -> Any:
        """Moves in learning rates, which are given by tensor."""
        floats = self.meter.buffers.floats
        unit = rates[0] if len(set(rates)) == 1 else np.repeat(np.array(rates, np.float32), self.counts)
        return self.meter.counting.ratios(floats(self.before), floats(self.values), unit)

    def slopes(self, sampled: Sequence[Any]) -> Any:
        """Gradients that are not zero; a tensor without a gradient counts as zero."""
        buffers = self.meter.buffers
        if self.gradients is None:
            self.gradients = buffers.empty(sum(self.counts), "F32")
        there = [flat for flat in sampled if flat is not None]
        counts = [0 if flat is None else count for flat, count in zip(sampled, self.counts, strict=True)]
        buffers.load(self.gradients, there)
        return self.meter.counting.nonzero(buffers.floats(self.gradients)[: sum(counts)], buffers.ends(counts))
