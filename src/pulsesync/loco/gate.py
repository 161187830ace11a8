"""The gate: which entries of an update the next forward pass would see.

A trainer that moved its weights from theta to x has an update s = residual + (theta − x). An entry of it *fires* if the
BF16 value of theta − s is another than that of theta, and only those are sent; the rest is kept as the residual and
counts again in the next round. Nothing is lost, and for every entry sent + kept == s, bit for bit.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.threads import spread

F32 = NDArray[np.float32]
LARGEST = (1 << 15) - 1  # of a rounded value, in units; what goes beyond stays in the residual
LOWEST_UNIT = -149  # the exponent of the smallest number that FP32 has
MOST_BITS = 12
MOST_REACH = 1000.0
CHUNK = 1 << 18  # entries that are worked on together: fewer would cost more in calls than they save in cache


def bf16(x: F32) -> NDArray[np.uint16]:
    """The BF16 bits of finite numbers: to the nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def gate(theta: F32, s: F32) -> NDArray[np.bool_]:
    """Whether each entry would change the BF16 value of theta. Compares bits: −0.0 is not 0.0."""
    with np.errstate(over="ignore", invalid="ignore"):
        fired: NDArray[np.bool_] = bf16(theta) != bf16(theta - s)
    return fired


def update(theta: F32, local: F32, residual: F32) -> F32:
    """What a trainer has to tell: its residual and how far it moved, in FP32."""
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by name, later
        out: F32 = residual + (theta - local)
    return out


@dataclass(frozen=True, eq=False)
class SparseVector:
    """Some entries of a vector; the others are zero."""

    size: int
    positions: NDArray[np.int64]  # ascending
    values: F32

    def part(self, begin: int, end: int) -> "SparseVector":
        """The entries from begin to end, counted from begin."""
        first, last = np.searchsorted(self.positions, (begin, end))
        return SparseVector(end - begin, self.positions[first:last] - begin, self.values[first:last])

    def add_to(self, total: F32) -> None:
        """Add the entries to a whole vector, in place."""
        if self.positions.size == self.size:
            total += self.values
        else:
            total[self.positions] += self.values

    def take_from(self, left: F32) -> None:
        """Subtract the entries from a whole vector, in place."""
        if self.positions.size == self.size:
            left -= self.values
        else:
            left[self.positions] -= self.values


@dataclass(frozen=True, eq=False)
class SplitUpdate:
    """An update in two: what is sent, and what is kept for the next round. Their sum is the update, bit for bit."""

    sent: SparseVector
    s: F32
    unit: int | None = None  # sent values are multiples of 2^unit; None: any FP32

    @property
    def kept(self) -> F32:
        """What is kept, made anew."""
        kept = self.s.copy()
        self.sent.take_from(kept)
        return kept


class GateRule(Protocol):
    """What decides which part of an update is sent."""

    @property
    def dense(self) -> bool:
        """Whether all of it is, always: then it travels as plain FP32."""

    def split(self, theta: F32, s: F32) -> SplitUpdate:
        """Split an update that is all finite. Neither argument is modified."""


@dataclass(frozen=True)
class VisibilityGate:
    """PULSELoCo's rule: what the BF16 forward pass would see.

    With a `reach` above 1, an entry also fires if so many times its update would be seen: an outer step with momentum
    carries it lr / (1 − momentum) times as far in the end. With `bits`, what is sent is rounded to a multiple of a
    power of two that leaves a typical value so many bits, and the remainder is kept: nothing is lost, only delayed.
    """

    bits: int | None = None
    reach: float = 1.0
    dense = False

    def __post_init__(self) -> None:
        if not 0 < self.reach <= MOST_REACH:
            raise ValueError(f"the gate reaches above 0 and up to {MOST_REACH:g} times as far, not {self.reach:g}")
        if self.bits is not None and not 0 <= self.bits <= MOST_BITS:
            raise ValueError(f"compact values keep 0 to {MOST_BITS} bits, not {self.bits}")

    def split(self, theta: F32, s: F32) -> SplitUpdate:
        chunks = [slice(i, i + CHUNK) for i in range(0, s.size, CHUNK)]
        reach = np.float32(self.reach)
        found = spread(lambda c: np.flatnonzero(gate(theta[c], reach * s[c]) & (s[c] != 0)) + c.start, chunks)
        positions = np.concatenate([np.empty(0, np.int64), *found])
        values, unit = s[positions], None
        if self.bits is not None:
            unit = _unit(values, self.bits)
            most = min(LARGEST, int(np.ldexp(float(np.finfo(np.float32).max), -unit)))
            rounded = np.clip(np.rint(np.ldexp(values.astype(np.float64), -unit)), -most, most)
            positions, rounded = positions[rounded != 0], rounded[rounded != 0]
            values = np.ldexp(rounded, unit).astype(np.float32)
        return SplitUpdate(SparseVector(s.size, positions, values), s, unit)


@dataclass(frozen=True)
class DenseGate:
    """DiLoCo's rule: all of it, and nothing kept."""

    dense = True

    def split(self, theta: F32, s: F32) -> SplitUpdate:
        return SplitUpdate(SparseVector(s.size, np.arange(s.size), s.copy()), s)


def _unit(values: F32, bits: int) -> int:
    """The power of two that leaves the root mean square of some values so many bits.

    Never one so small that rounding could leave a remainder that FP32 does not have.
    """
    if not values.size:
        return 0
    typical = int(np.frexp(np.sqrt(np.square(values, dtype=np.float64).mean()))[1]) - 1
    largest = int(np.frexp(np.abs(values).max())[1]) - 1
    return max(typical - bits, largest - 22, LOWEST_UNIT)
