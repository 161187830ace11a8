"""The gate: which entries of an update the next forward pass would see.

A trainer at shared weights theta has an update s, which would change theta to theta − s. An entry is *sent* if the BF16
value of theta − reach · s differs from that of theta; the rest is kept as the residual and added to the next update.
Nothing is lost: for every entry sent + kept == s, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pulsesync.core.types import VisibleEntries
from pulsesync.loco.vectors import Vector, as_number, kernels_of, vectors_of

ReadPiece = Callable[[slice], Vector]  # returns some entries of a vector, which may be computed only then
LARGEST = (1 << 15) - 1  # of a rounded value, in units; the excess stays in the residual
LOWEST_UNIT = -149  # the exponent of the smallest number that FP32 has
MOST_BITS = 12
MOST_REACH = 1000.0


@dataclass(frozen=True, eq=False)
class SparseVector:
    """Some entries of a vector; the others are zero."""

    size: int
    positions: Vector  # int64, ascending; for a dense update a range, which occupies no memory
    values: Vector

    @classmethod
    def whole(cls, values: Vector) -> "SparseVector":
        """All entries of a vector."""
        return cls(len(values), range(len(values)), values)

    @property
    def is_whole(self) -> bool:
        """Whether it has all entries."""
        return len(self.positions) == self.size

    def part(self, begin: int, end: int) -> "SparseVector":
        """The entries from begin to end, counted from begin."""
        if (begin, end) == (0, self.size):
            return self
        if isinstance(self.positions, range):
            return SparseVector.whole(self.values[begin:end])
        first, last = vectors_of(self.values).search(self.positions, (begin, end))
        return SparseVector(end - begin, self.positions[first:last] - begin, self.values[first:last])

    def add_to(self, total: Vector) -> None:
        """Add the entries to a whole vector, in place."""
        if self.is_whole:
            total += self.values
        else:
            kernels_of(self.values).add_at(total, self.positions, self.values)

    def take_from(self, left: Vector) -> None:
        """Subtract the entries from a whole vector, in place: x − y and x + (−y) are the same bits."""
        if self.is_whole:
            left -= self.values
        else:
            kernels_of(self.values).add_at(left, self.positions, -self.values)


class Update(Protocol):
    """A trainer's update of a fragment. It is computed when it is read: a whole one would occupy 4 bytes a weight."""

    @property
    def size(self) -> int:
        """The number of entries."""

    def read(self, here: slice) -> Vector:
        """A copy of a piece of it, of at most `HostKernels.chunk` entries."""


@dataclass(frozen=True, eq=False)
class WholeUpdate:
    """An update whose values are all in memory."""

    values: Vector

    @property
    def size(self) -> int:
        return len(self.values)

    def read(self, here: slice) -> Vector:
        return vectors_of(self.values).copy(self.values[here])


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """The part of an update that is sent."""

    sent: SparseVector
    unit: int | None  # values are multiples of 2^unit; None: any FP32
    largest: np.float32  # of the whole update, without its sign; not finite if an entry is not


class GateRule(Protocol):
    """Chooses which part of an update is sent."""

    @property
    def dense(self) -> bool:
        """Whether all of it is always sent: then it travels as plain FP32."""

    def select(self, theta: Vector, update: Update) -> SentUpdate:
        """Choose the part of an update that is sent. If an entry is not finite, only `largest` is meaningful."""


@dataclass(frozen=True)
class VisibilityGate:
    """PULSELoCo's rule: send what the BF16 forward pass would see.

    `reach` is a factor: an entry is sent if its update, multiplied by it, would change the BF16 value. With `bits`,
    the values that are sent are rounded to multiples of a power of two, which lies that number of bits below their
    root mean square. The remainder is kept: nothing is lost, only delayed.
    """

    bits: int | None = None
    reach: float = 1.0
    dense = False

    def __post_init__(self) -> None:
        if not 0 < self.reach <= MOST_REACH:
            raise ValueError(f"reach must be above 0 and at most {MOST_REACH:g}; got {self.reach:g}")
        if self.bits is not None and not 0 <= self.bits <= MOST_BITS:
            raise ValueError(f"compact must be None or 0 to {MOST_BITS} bits; got {self.bits}")

    def select(self, theta: Vector, update: Update) -> SentUpdate:
        v = vectors_of(theta)

        def search(here: slice) -> VisibleEntries:
            return v.kernels.find_visible(theta[here], update.read(here), self.reach, here.start)

        found = v.kernels.each(search, update.size)
        largest = as_number(max((piece.largest for piece in found), default=0))
        positions = v.join([piece.positions for piece in found], "int64")
        values = v.join([piece.values for piece in found])
        del found
        if self.bits is None or not np.isfinite(largest):
            return SentUpdate(SparseVector(update.size, positions, values), None, largest)
        unit = unit_of(values, self.bits)
        most = min(LARGEST, int(np.ldexp(float(np.finfo(np.float32).max), -unit)))
        units = v.xp.clip(v.xp.round(v.in_units(values, unit)), -most, most)
        some = units != 0
        return SentUpdate(SparseVector(update.size, positions[some], v.from_units(units[some], unit)), unit, largest)


@dataclass(frozen=True)
class DenseGate:
    """DiLoCo's rule: everything is sent, and nothing is kept."""

    dense = True

    def select(self, theta: Vector, update: Update) -> SentUpdate:
        v = vectors_of(theta)
        values = v.empty(update.size)

        def fill(here: slice) -> None:
            values[here] = update.read(here)

        v.kernels.each(fill, update.size)
        return SentUpdate(SparseVector.whole(values), None, v.kernels.largest(values))


def unit_of(values: Vector, bits: int) -> int:
    """The power of two that is this number of bits below the root mean square of some values.

    It is never so small that rounding could leave a remainder that FP32 cannot represent.

    The values are truncated to BF16 first, so that a histogram of them is enough, and the sum of the squares is a sum
    of integers. It does not depend on the order of the values; a sum in FP64 would, and machines would disagree.
    """
    counts = vectors_of(values).count_upper(values)
    (found,) = np.nonzero(counts)
    if not found.size:
        return 0
    total = sum(int(counts[upper]) * _in_lowest(int(upper)) ** 2 for upper in found)
    mean = (total << 64) // int(counts.sum())
    typical = (mean.bit_length() - 65) // 2 - 133 if mean else LOWEST_UNIT
    largest = int(found[-1] >> 7) - 127
    return max(typical - bits, largest - 22, LOWEST_UNIT)


def _in_lowest(upper: int) -> int:
    """The number that begins with these 15 bits, in multiples of 2^-133, the smallest that BF16 has."""
    octave, mantissa = upper >> 7, upper & 0x7F
    return (mantissa | 0x80) << (octave - 1) if octave else mantissa
