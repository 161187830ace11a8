"""From counts to tables, in integer arithmetic only, so that every machine writes the same bytes.

A *context* is what both ends know about a hot weight before it is decided: its magnitude class and, in an epoch, the
patch that last changed it. For each context a patch carries the frequencies of the symbols, which add up to 2^14.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import Bits, Dtype
from pulsesync.kernels import spec
from pulsesync.kernels.arrays import I64, U8, U16, U32, U64

TOTAL = 1 << spec.PROBABILITY_BITS
NO_SIZES = np.empty(0, np.uint32)
_MORE_LANES = 2 << np.arange(spec.MAX_LANES_LOG2)  # multiples of `spec.LANE_DECISIONS` that double the lanes
CLASSES = 24  # contexts by magnitude: the classes just below the highest cut; lower ones share the first


def symbol_count(width: int) -> int:
    """The number of symbols for weights of this many bits: unchanged, and each size class up or down."""
    return 1 + 2 * (spec.DIRECT + width - 3)


def most_sizes(width: int) -> int:
    """The number of step sizes that a table of this many bits can list: as many as fit its rows, up and down."""
    symbols = symbol_count(width)
    return ((1 << symbols.bit_length()) - 1 - symbols) // 2


def long_steps(symbols: U8, extras: U32) -> tuple[NDArray[np.intp], I64]:
    """Which of these changes have raw bits, and the sizes of their steps."""
    long = np.flatnonzero(symbols > 2 * spec.DIRECT)
    power = (symbols[long].astype(np.int64) - 1 >> 1) - spec.DIRECT + 3
    return long, (np.int64(1) << power) + extras[long]


def list_sizes(symbols: U8, extras: U32, sizes: U32, width: int) -> U8:
    """Return symbols in which steps of these sizes (ascending, at least one) have their own symbols."""
    long, found = long_steps(symbols, extras)
    place = np.minimum(np.searchsorted(sizes, found), sizes.size - 1)
    listed = sizes[place] == found
    long, place = long[listed], place[listed]
    out = symbols.copy()
    out[long] = symbol_count(width) + 2 * place + (symbols[long] - 1 & 1)
    return out


def listed_class(kind: Dtype) -> int:
    """The size class of the first size that a table lists: smaller ones are short steps, and powers of two."""
    return spec.DIRECT + 8 * kind.itemsize - 3


def choose_sizes(sizes: I64, width: int, ages: int) -> U32:
    """Return the sizes that a table lists, ascending: those of the long steps of its tiles that pay off."""
    stride = sample_stride(sizes.size)
    sizes = sizes[::stride]
    low = sizes & 0xFFFF  # sorting only those whose lower bits are common takes a fraction of the time
    common = (np.bincount(low, minlength=1 << 16) >= least_count(sizes.size))[low]
    if not common.any():
        return NO_SIZES
    found, counts = np.unique(sizes[common], return_counts=True)
    return choose_from(found, counts, np.bincount(_bit_length(sizes) - 1), stride, width, ages)


def sample_stride(steps: int) -> int:
    """The stride of the sample of this number of long steps: every second from 2^17 on, every third from 2^18 on."""
    return 1 + (steps >> 17)


def least_count(steps: int) -> int:
    """How often a size must occur among this number of long steps to be listed."""
    return max(8, -(-steps // 256))


def choose_from(found: I64, counts: I64, by_power: I64, stride: int, width: int, ages: int) -> U32:
    """The same, given candidate sizes, ascending, with their counts; and all long steps by power.

    Weights that leave zero move by exactly the learning rate, and in the first step of a run all weights of one
    magnitude move by about the same distance. Listing a size pays off if the raw bits that it saves, minus the extra
    cost of its symbol over that of its power of two, are more than 20 for each context and direction that may have to
    list it.

    stride: each counted step stands for this number.
    """
    powers = _bit_length(found) - 1
    gains = stride * counts * (powers - _bit_length(by_power[powers] // counts))
    costs = 20 * np.minimum(stride * counts, 2 * CLASSES * ages)
    worth = (counts >= least_count(int(by_power.sum()))) & (gains > costs) & (powers < width - 1)
    best = np.lexsort((found[worth], -gains[worth]))[: most_sizes(width)]
    return np.sort(found[worth][best]).astype(np.uint32)


def _bit_length(values: I64) -> I64:
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def choose_cuts(changes: I64, sampled: I64) -> I64:
    """Return, for each tile (row), the class below which weights are hot, given changes and sampled weights by class.

    A cold change costs as much as 1,024 hot decisions: the result is the lowest of the cuts with the least total.
    """
    with_changes = np.flatnonzero(changes.any(axis=0))
    if not with_changes.size:
        return np.zeros(len(changes), np.int64)
    # Others need not be tried: a cut above the last change only costs more, and one below the first costs no less.
    lo, hi = int(with_changes[0]), int(with_changes[-1]) + 1
    costs = np.empty((len(changes), hi - lo + 1), np.int64)  # of each cut, minus the cost of leaving all changes cold
    costs[:, 0] = spec.SAMPLE_SCALE * sampled[:, :lo].sum(axis=1)
    np.multiply(sampled[:, lo:hi], spec.SAMPLE_SCALE, out=costs[:, 1:])
    costs[:, 1:] -= 1024 * changes[:, lo:hi]
    np.cumsum(costs, axis=1, out=costs)
    best = costs.argmin(axis=1)
    return np.where(np.take_along_axis(costs, best[:, None], 1)[:, 0] < 0, lo + best, 0)


@overload
def lanes_for(decisions: int) -> int: ...
@overload
def lanes_for(decisions: I64) -> I64: ...
def lanes_for(decisions: Any) -> Any:
    """Return the number of lanes of a block: the largest power of two, up to 32, with 4,096 decisions or more per lane.

    For one block, or for many at once.
    """
    return 1 << np.searchsorted(_MORE_LANES, decisions // spec.LANE_DECISIONS, "right")


def likely_decisions(lanes: I64) -> I64:
    """The most decisions of blocks with these numbers of lanes; with 32 lanes, seldom exceeded."""
    return 2 * lanes * spec.LANE_DECISIONS


@dataclass(frozen=True)
class Contexts:
    """Where the row of a context begins in a flat table: a row has 2^bits places, one for each symbol, and some unused.

    The row of a weight is rows[its class] plus, in an epoch, the index of the patch that last changed it times 2^bits.
    """

    lo: int  # the class of the first row; lower classes use it too
    classes: int
    ages: int
    symbols: int

    @property
    def bits(self) -> int:
        return self.symbols.bit_length()  # one more than symbols: the end of the last

    @cached_property
    def rows(self) -> U32:
        above = np.clip(np.arange(256) - self.lo, 0, self.classes - 1)
        return (above * self.ages << self.bits).astype(np.uint32)

    def empty(self) -> I64:
        return np.zeros(self.classes * self.ages << self.bits, np.int64)


def normalise(counts: I64) -> I64:
    """Scale the counts of each context (last axis) to frequencies that add up to 2^14; no counts stay no frequencies.

    Each symbol gets its share rounded down, but at least 1 if it occurs; the remaining difference goes to the most
    common symbol, the first of equals.
    """
    totals = counts.sum(axis=-1, keepdims=True)
    scaled: I64 = np.maximum(counts * TOTAL // np.maximum(totals, 1), counts > 0)
    commonest = counts.argmax(axis=-1, keepdims=True)
    missing = np.where(totals > 0, TOTAL - scaled.sum(axis=-1, keepdims=True), 0)
    np.put_along_axis(scaled, commonest, np.take_along_axis(scaled, commonest, -1) + missing, -1)
    return scaled


def cumulative(frequencies: I64) -> U16:
    """Return where each symbol's slots begin, as a flat array, row by row, in the order of `Contexts`."""
    *rows, symbols = frequencies.shape
    out = np.zeros((*rows, 1 << symbols.bit_length()), np.uint16)
    out[..., 1 : symbols + 1] = np.cumsum(frequencies, axis=-1)
    return out.reshape(-1)


def reciprocals(frequencies: I64) -> U32:
    """Return what an encoder multiplies by instead of dividing: 2^32 - 1 over each frequency, rounded down."""
    *rows, symbols = frequencies.shape
    out = np.zeros((*rows, 1 << symbols.bit_length()), np.uint32)
    out[..., :symbols] = ((1 << 32) - 1) // np.maximum(frequencies, 1)
    return out.reshape(-1)


def shares(frequencies: I64) -> U64:
    """Return the fields of a symbol that an encoder on a GPU reads at once, in the order of `cumulative`.

    From the lowest bits on: where its slots begin (16 bits), how many it has (16), and the reciprocal of that (32).
    """
    *rows, symbols = frequencies.shape
    wide = np.zeros((*rows, 1 << symbols.bit_length()), np.uint64)
    wide[..., :symbols] = frequencies
    begins, over = cumulative(frequencies).astype(np.uint64), reciprocals(frequencies).astype(np.uint64)
    out: U64 = begins | wide.reshape(-1) << np.uint64(16) | over << np.uint64(32)
    return out


def wrapped_steps(old: Bits, new: Bits) -> I64:
    """How far weights move in the order of their values, the shorter way; half the range counts as downwards."""
    return (_orders(new) - _orders(old)).view(f"<i{old.itemsize}").astype(np.int64)


def apply_steps(old: Bits, steps: I64) -> Bits:
    """Move weights by signed steps in the order of their values."""
    ordered = _orders(old)
    ordered += steps.astype(old.dtype)  # both modulo the range
    positive = ordered >> ordered.dtype.type(8 * old.itemsize - 1)
    ordered ^= (positive - ordered.dtype.type(1)) | _sign(ordered)
    return ordered


def _orders(bits: Bits) -> Bits:
    """The ranks of bit patterns by their values, as integers of the same width: all bits are flipped, or the sign."""
    negative = bits >> bits.dtype.type(8 * bits.itemsize - 1)
    orders: Bits = bits ^ (np.negative(negative) | _sign(bits))
    return orders


def _sign(bits: Bits) -> np.unsignedinteger:
    sign: np.unsignedinteger = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return sign
