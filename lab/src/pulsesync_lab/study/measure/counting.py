"""Counts from two states of flat weights, as bits: the reference, in plain numpy.

`counting_numba` has the same functions for a CPU and `counting_torch` for tensors on any device, with the same results.
`compare` returns one row of numbers, so that a device copies them to the host at once; `Tally` defines their order.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import Bits

Numbers = NDArray[np.int64]

# Steps of 1 to 15 units of the last place have a count each; then 16 stands for 16 to 31, 32 for 32 to 63, and so on.
UNITS = (*range(1, 16), *(1 << k for k in range(4, 32)))
CLASSES = 256
PIECE = 1 << 20  # weights
UP, DOWN = 1, 2  # direction of a weight's last change; 0: it did not change in the step before
RATIOS = 512  # bins of `ratios`: two for each power of two
ROOT_2 = 0x3504F4  # the mantissa from which a float is at least the root of two times its power


@dataclass(frozen=True)
class Tally:
    """The result of `compare`."""

    changed: Numbers  # (tensors,)
    again: int
    same_way: int
    up: int
    units: Numbers  # as in UNITS
    leaving: Numbers  # (CLASSES,) changes by the class of the old weight
    entering: Numbers  # (CLASSES,) and by that of the new one

    @classmethod
    def of(cls, row: Numbers) -> "Tally":
        tensors = row.size - (3 + len(UNITS) + 2 * CLASSES)
        changed, three, units, leaving, entering = np.split(row, np.cumsum([tensors, 3, len(UNITS), CLASSES]))
        again, same_way, up = three.tolist()
        return cls(changed, again, same_way, up, units, leaving, entering)


def row_size(tensors: int) -> int:
    return tensors + 3 + len(UNITS) + 2 * CLASSES


def compare(old: Bits, new: Bits, last: NDArray[np.uint8], ends: Numbers, shift: int) -> Numbers:
    """Count differences, and update old to new and last to the directions."""
    at = np.flatnonzero(old != new)
    a, b = old[at], new[at]
    moved = ordered(b) - ordered(a)
    direction = np.where(moved > 0, UP, DOWN).astype(np.uint8)
    before = last[at]
    old[at] = b
    last[:] = 0
    last[at] = direction
    three = [np.count_nonzero(before), np.count_nonzero(before == direction), np.count_nonzero(moved > 0)]
    units = np.bincount(np.searchsorted(np.array(UNITS), np.abs(moved), side="right") - 1, minlength=len(UNITS))
    by_tensor = np.diff(np.searchsorted(at, ends), prepend=0)
    return np.concatenate([by_tensor, three, units, classes(a, shift), classes(b, shift)])


def ordered(bits: Bits) -> NDArray[np.int64]:
    """Map bit patterns to the order of their values, −0.0 just below +0.0: neighbours differ by one."""
    sign = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide & sign, (2 * sign - 1) ^ wide, wide | sign)


def classes(bits: Bits, shift: int) -> Numbers:
    """Weights by exponent bits; in pieces, which takes little memory."""
    total: Numbers = np.zeros(CLASSES, np.int64)
    mask, down = bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1), bits.dtype.type(shift)
    for begin in range(0, bits.size, PIECE):
        total += np.bincount((bits[begin : begin + PIECE] & mask) >> down, minlength=CLASSES)
    return total


def differ(old: Bits, new: Bits, ends: Numbers) -> Numbers:
    """The number of weights that differ, by tensor."""
    return np.diff(np.searchsorted(np.flatnonzero(old != new), ends), prepend=0)


def nonzero(values: NDArray[np.float32], ends: Numbers) -> Numbers:
    """The number of values that are not zero, by tensor; NaN does not count."""
    return np.diff(np.searchsorted(np.flatnonzero(values), ends), prepend=0)


def ratios(old: NDArray[np.float32], new: NDArray[np.float32], unit: Any) -> Numbers:
    """Moves by floor(2 log2(|new − old| / unit)) + 254, in FP32; the first two and the last two are not distinguished.

    The unit is one number, or one for each.
    """
    with np.errstate(all="ignore"):  # NaN and infinities are values here
        bits = np.abs((new - old) / np.asarray(unit, np.float32)).view(np.uint32)
    places = 2 * (bits >> np.uint32(23)).astype(np.int64) + ((bits & np.uint32(0x7FFFFF)) >= ROOT_2)
    return np.bincount(places, minlength=RATIOS)


def home(rows: list[Any]) -> list[Numbers]:
    """Counts as arrays on the host."""
    return list(rows)
