"""The gate: which entries of an update the next forward pass would see.

A trainer at shared weights theta has an update s, and would move theta to theta − s. An entry is *sent* if the BF16
value of theta − reach · s is another than that of theta; the rest is kept as the residual and counts in the next round.
Nothing is lost: for every entry sent + kept == s, bit for bit.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.threads import spread

F32 = NDArray[np.float32]
ReadPiece = Callable[[slice], F32]  # returns some entries of a vector, which may be computed only then
LARGEST = (1 << 15) - 1  # of a rounded value, in units; what goes beyond stays in the residual
LOWEST_UNIT = -149  # the exponent of the smallest number that FP32 has
MOST_BITS = 12
MOST_REACH = 1000.0
CHUNK = 1 << 18  # entries that are worked on together: fewer would cost more in calls than they save in cache


def chunks_of(size: int) -> Iterator[slice]:
    """The pieces in which a vector of this size is worked on."""
    return (slice(begin, min(begin + CHUNK, size)) for begin in range(0, size, CHUNK))


@dataclass(frozen=True, eq=False)
class SparseVector:
    """Some entries of a vector; the others are zero."""

    size: int
    positions: NDArray[np.int64]  # ascending
    values: F32

    @property
    def is_whole(self) -> bool:
        """Whether it has all entries."""
        return self.positions.size == self.size

    def part(self, begin: int, end: int) -> "SparseVector":
        """The entries from begin to end, counted from begin."""
        first, last = np.searchsorted(self.positions, (begin, end))
        return SparseVector(end - begin, self.positions[first:last] - begin, self.values[first:last])

    def add_to(self, total: F32) -> None:
        """Add the entries to a whole vector, in place."""
        if self.is_whole:
            total += self.values
        else:
            kernels.active().add_at(total, self.positions, self.values)

    def take_from(self, left: F32) -> None:
        """Subtract the entries from a whole vector, in place: x − y and x + (−y) are the same bits."""
        if self.is_whole:
            left -= self.values
        else:
            kernels.active().add_at(left, self.positions, -self.values)


class Update(Protocol):
    """A trainer's update of a fragment. It is computed when it is read: a whole one would take 4 bytes a weight."""

    @property
    def size(self) -> int:
        """The number of entries."""

    def read(self, here: slice) -> F32:
        """A piece of it, of at most CHUNK entries, in memory of its own."""


@dataclass(frozen=True, eq=False)
class WholeUpdate:
    """An update whose values are all at hand."""

    values: F32

    @property
    def size(self) -> int:
        return self.values.size

    def read(self, here: slice) -> F32:
        return self.values[here].copy()


@dataclass(frozen=True, eq=False)
class SentUpdate:
    """The part of an update that is sent."""

    sent: SparseVector
    unit: int | None  # values are multiples of 2^unit; None: any FP32
    largest: np.float32  # of the whole update, without its sign; not finite if an entry is not


class GateRule(Protocol):
    """What decides which part of an update is sent."""

    @property
    def dense(self) -> bool:
        """Whether all of it is, always: then it travels as plain FP32."""

    def select(self, theta: F32, update: Update) -> SentUpdate:
        """Choose the part of an update that is sent. If an entry is not finite, only `largest` means something."""


@dataclass(frozen=True)
class VisibilityGate:
    """PULSELoCo's rule: what the BF16 forward pass would see.

    `reach` is a factor: an entry is sent if its update, multiplied by it, would change the BF16 value. With `bits`,
    the values that are sent are rounded to multiples of a power of two, which lies that number of bits below their
    root mean square. The remainder is kept: nothing is lost, only delayed.
    """

    bits: int | None = None
    reach: float = 1.0
    dense = False

    def __post_init__(self) -> None:
        if not 0 < self.reach <= MOST_REACH:
            raise ValueError(f"reach must be above 0 and at most {MOST_REACH:g}, but it is {self.reach:g}")
        if self.bits is not None and not 0 <= self.bits <= MOST_BITS:
            raise ValueError(f"compact values keep 0 to {MOST_BITS} bits, but {self.bits} were asked for")

    def select(self, theta: F32, update: Update) -> SentUpdate:
        find_visible, reach = kernels.active().find_visible, np.float32(self.reach)

        def search(here: slice) -> tuple[NDArray[np.int64], F32, int]:
            s = update.read(here)
            places, values = np.empty(s.size, np.uint32), np.empty(s.size, np.float32)
            count, largest = find_visible(theta[here], s, reach, places, values)
            return places[:count] + np.int64(here.start), values[:count].copy(), int(largest)

        found = spread(search, chunks_of(update.size))
        largest = np.uint32(max((piece[2] for piece in found), default=0)).view(np.float32)
        positions = np.concatenate([np.empty(0, np.int64), *(piece[0] for piece in found)])
        values = np.concatenate([np.empty(0, np.float32), *(piece[1] for piece in found)])
        if self.bits is None or not np.isfinite(largest):
            return SentUpdate(SparseVector(update.size, positions, values), None, largest)
        unit = unit_of(values, self.bits)
        most = min(LARGEST, int(np.ldexp(float(np.finfo(np.float32).max), -unit)))
        units = values * np.float64(2.0**-unit)  # in FP64, and exact
        np.clip(np.rint(units, out=units), -most, most, out=units)
        some = units != 0
        values = (units[some] * 2.0**unit).astype(np.float32)
        return SentUpdate(SparseVector(update.size, positions[some], values), unit, largest)


@dataclass(frozen=True)
class DenseGate:
    """DiLoCo's rule: all of it is sent, and nothing is kept."""

    dense = True

    def select(self, theta: F32, update: Update) -> SentUpdate:
        values = np.empty(update.size, np.float32)

        def fill(here: slice) -> int:
            values[here] = update.read(here)
            return int((values[here].view(np.uint32) & np.uint32(0x7FFFFFFF)).max())

        largest = np.uint32(max(spread(fill, chunks_of(update.size)), default=0)).view(np.float32)
        return SentUpdate(SparseVector(update.size, np.arange(update.size), values), None, largest)


def unit_of(values: F32, bits: int) -> int:
    """The power of two that leaves the root mean square of some values so many bits.

    Never one so small that rounding could leave a remainder that FP32 does not have.
    """
    if not values.size:
        return 0
    typical = int(np.frexp(np.sqrt(np.square(values, dtype=np.float64).mean()))[1]) - 1
    largest = int(np.frexp(np.abs(values).max())[1]) - 1
    return max(typical - bits, largest - 22, LOWEST_UNIT)
