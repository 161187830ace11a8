"""The counts of `counting` for a CPU, compiled by numba: one pass over the weights, on all cores."""

from typing import Any

import numpy as np

from pulsesync.core.threads import default_threads, spread
from pulsesync.kernels.jit import ONE, U, compiled, inner
from pulsesync_lab.study.measure.counting import CLASSES, DOWN, RATIOS, ROOT_2, UNITS, Numbers, classes, home, row_size

__all__ = ["classes", "compare", "differ", "home", "nonzero", "ratios", "to_bf16"]

_LEAST = 1 << 20  # weights for which starting a thread pays off
_UNITS = len(UNITS)
_AT_ONCE = 4096  # weights


def compare(old: Any, new: Any, last: Any, ends: Numbers, shift: int) -> Numbers:
    """Count differences, and update old to new and last to the directions."""

    def piece(limits: tuple[int, int]) -> Numbers:
        row = np.zeros(row_size(ends.size), np.int64)
        _compare(old, new, last, ends, limits[0], limits[1], shift, row)
        return row

    found = spread(piece, _pieces(old.size))
    return np.sum(found, axis=0, dtype=np.int64) if found else np.zeros(row_size(ends.size), np.int64)


def _to_bf16(bits: Any, out: Any) -> None:
    """Round FP32 to BF16, both as bits: to the nearest, ties to even.

    NaN becomes 0x7FC0, one of the patterns that torch writes.
    """
    for i in range(bits.size):
        x = bits[i]
        rounded = (x + np.uint32(0x7FFF) + ((x >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[i] = np.uint32(0x7FC0) if (x & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else rounded


to_bf16 = compiled(_to_bf16)


def differ(old: Any, new: Any, ends: Numbers) -> Numbers:
    """The number of weights that differ, by tensor."""
    out: Numbers = _differ(old, new, ends)
    return out


def nonzero(values: Any, ends: Numbers) -> Numbers:
    """The number of values that are not zero, by tensor; NaN does not count."""
    out: Numbers = _nonzero(values, ends)
    return out


def ratios(old: Any, new: Any, unit: Any) -> Numbers:
    """Moves by floor(2 log2(|new − old| / unit)) + 254, in FP32.

    The first two and the last two are not distinguished.
    """
    with np.errstate(all="ignore"):  # NaN and infinities are values here
        ratio = new - old
        ratio /= np.asarray(unit, np.float32)
        np.abs(ratio, out=ratio)  # also for NaN, which must have no sign
    out: Numbers = _ratios(ratio.view(np.uint32))
    return out


def _pieces(size: int) -> list[tuple[int, int]]:
    count = max(1, min(default_threads(), size // _LEAST))
    return [(size * n // count, size * (n + 1) // count) for n in range(count) if size]


def _count_found(old: Any, new: Any, last: Any, ends: Any, shift: int, at: Any, tensor: int, row: Any) -> Any:
    """Count these weights; return the tensor of the last one, given a tensor not after that of the first."""
    top, down = U(8 * old.itemsize - 1), U(shift)
    sign, full = ONE << top, (ONE << (top + ONE)) - ONE
    units = U(ends.size + 3)
    leaving = units + U(_UNITS)
    entering = leaving + U(CLASSES)
    again, same_way, ups = U(0), U(0), U(0)
    counted: Any = 0
    for k in range(at.size):
        i = at[k]
        while i >= U(ends[tensor]):
            row[tensor] += k - counted
            counted = k
            tensor += 1
        a, b = U(old[i]), U(new[i])
        was, becomes = (a & (sign - ONE)) >> down, (b & (sign - ONE)) >> down
        row[leaving + was] += 1
        if was != becomes:  # rare: `_compare_piece` adds the others, which leave and enter the same class
            row[entering + was] -= 1
            row[entering + becomes] += 1
        # map to the order of values, as in `ordered`, without a branch
        a, b = a ^ (sign | ((U(0) - (a >> top)) & full)), b ^ (sign | ((U(0) - (b >> top)) & full))
        up = U(b > a)
        size = U(abs(np.int64(b) - np.int64(a)))
        place = size - ONE
        if size > U(15):
            place = U(15)
            while size >> (place - U(10)) != 0:
                place += ONE
        row[units + place] += 1
        direction = U(DOWN) - up
        before = U(last[i])
        again += U(before != 0)
        same_way += U(before == direction)
        ups += up
        last[i] = direction
        old[i] = new[i]
    row[tensor] += at.size - counted
    row[ends.size] += again
    row[ends.size + 1] += same_way
    row[ends.size + 2] += ups
    return tensor


_count = inner(_count_found)


def _compare_piece(old: Any, new: Any, last: Any, ends: Any, begin: int, end: int, shift: int, row: Any) -> None:
    """Collect the differences of a few thousand weights, then count them.

    Where a third of all weights change, at random, a branch for each would cost more than all the rest.
    """
    at = np.empty(_AT_ONCE, np.uint64)
    tensor = 0
    for first in range(begin, end, _AT_ONCE):
        stop = min(first + _AT_ONCE, end)
        a, b, went = (old[first:stop], new[first:stop], last[first:stop])  # loops from 0 are vectorized
        for i in range(a.size):
            went[i] = went[i] if a[i] != b[i] else np.uint8(0)
        found: Any = 0
        for i in range(a.size):
            at[found] = first + i
            found += np.int64(a[i] != b[i])
        tensor = _count(old, new, last, ends, shift, at[:found], tensor, row)
    for n in range(row.size - CLASSES, row.size):
        row[n] += row[n - CLASSES]


_compare = compiled(_compare_piece)


def _differ_in(old: Any, new: Any, ends: Any) -> Any:
    out = np.zeros(ends.size, np.int64)
    begin = 0
    for tensor in range(ends.size):
        a, b, count = old[begin : ends[tensor]], new[begin : ends[tensor]], 0
        for i in range(a.size):
            count += a[i] != b[i]
        out[tensor] = count
        begin = ends[tensor]
    return out


def _nonzero_in(values: Any, ends: Any) -> Any:
    out = np.zeros(ends.size, np.int64)
    begin = 0
    for tensor in range(ends.size):
        a, count = values[begin : ends[tensor]], 0
        for i in range(a.size):
            count += a[i] != 0
        out[tensor] = count
        begin = ends[tensor]
    return out


def _ratios_of(bits: Any) -> Any:
    out = np.zeros(RATIOS, np.int64)
    for i in range(bits.size):
        out[2 * np.int64(bits[i] >> np.uint32(23)) + np.int64((bits[i] & np.uint32(0x7FFFFF)) >= ROOT_2)] += 1
    return out


_differ, _nonzero, _ratios = compiled(_differ_in), compiled(_nonzero_in), compiled(_ratios_of)
