"""The hot loops of a LoCo round, compiled by numba. Same names and same results, bit for bit, as `reference`.

Every function works on one chunk of a fragment: contiguous arrays of at most 2^18 entries. FP32 operations are rounded
one by one, never fused, so that all machines get the same bits. Operations on bit patterns have no branches and use
unsigned 32-bit numbers, which LLVM turns into vector instructions; numba widens every sum of two such numbers to 64
bits, hence the casts.
"""

from typing import Any

import numpy as np

from pulsesync.kernels import spec
from pulsesync.kernels.jit import ONE, U, compiled, inner, trailing_zeros

W = np.uint32
_FLAGS = 4096  # entries whose flags are computed, in vectors, before the set ones are listed


@inner
def _bits(x: Any) -> Any:
    return np.float32(x).view(W)


@inner
def _number(bits: Any) -> Any:
    return W(bits).view(np.float32)


@inner
def _size(x: Any) -> Any:
    """The bits of a number without its sign: they are in the order of the magnitudes."""
    return W(_bits(x) & W(0x7FFFFFFF))


@inner
def _bf16(bits: Any) -> Any:
    """The BF16 bits of a finite FP32 number: to the nearest, ties to even."""
    return W(W(bits + W(0x7FFF) + (bits >> W(16) & W(1))) >> W(16))


@compiled
def advance(
    theta: Any, residual: Any, momentum: Any, local: Any, lr: Any, mu: Any, nesterov: bool, s: Any, moved: Any
) -> None:
    """Write a trainer's update, s, and its next momentum, from its state at the last round and its current weights.

    lr and mu are np.float32. The outputs share no memory with the inputs.
    """
    for i in range(theta.size):
        delta = (theta[i] - residual[i]) - local[i]
        m = mu * momentum[i] + delta
        by = delta + mu * m if nesterov else m
        moved[i] = m
        s[i] = residual[i] + lr * by


@compiled
def find_visible(theta: Any, s: Any, reach: Any, positions: Any, values: Any) -> Any:
    """List the entries of s that, multiplied by reach, change the BF16 value of theta; return their number, and a size.

    positions (uint32) and values have space for all entries; reach is np.float32. The size is the largest bit pattern
    in s without the sign: from 0x7F800000 on, a value of s is not finite, and the list is meaningless.
    """
    flags = np.zeros(_FLAGS, np.uint8)
    words = flags.view(U)
    k, largest = U(0), W(0)
    for first in range(0, s.size, _FLAGS):
        here = slice(first, min(first + _FLAGS, s.size))
        largest = max(largest, _flag_visible(theta[here], s[here], reach, flags))
        for n in range(_FLAGS >> 3):
            word = words[n]
            while word != 0:
                i = U(first) + (U(n) << U(3)) + (trailing_zeros(word) >> U(3))
                positions[k], values[k] = i, s[i]
                k += ONE
                word &= word - ONE
    return k, largest


@inner
def _flag_visible(theta: Any, s: Any, reach: Any, flags: Any) -> Any:
    largest = W(0)
    for i in range(s.size):
        size = _size(s[i])
        flags[i] = (_bf16(_bits(theta[i] - reach * s[i])) != _bf16(_bits(theta[i]))) & (size != W(0))
        largest = max(largest, size)
    flags[s.size :] = 0
    return largest


@compiled
def describe(theta: Any, trend: Any, out: Any) -> None:
    """Describe entries: bits 7 to 14 are the class, bit 15 is the sign of an update towards the nearest border.

    The class is twice the octave of the distance to the nearest border of the BF16 value, plus one where the trend,
    FP32 or int8, does not have that sign. Differences of neighbouring FP32 numbers are exact, so all machines get the
    same result.
    """
    for i in range(theta.size):
        x = theta[i]
        middle = W(_bf16(_bits(x)) << W(16))
        below = W(middle - W(0x8000)) if W(middle << W(1)) else W(middle ^ W(0x80008000))
        to_outer, to_inner = abs(_number(middle + W(0x8000)) - x), abs(x - _number(below))
        outwards = to_outer <= to_inner
        nearest = to_inner if to_inner < to_outer else to_outer  # above the largest BF16 value, to_outer is NaN
        octave = np.int32(_bits(nearest) >> W(23))
        negative = W((_bits(x) >> W(31)) ^ W(outwards))
        against = np.int32(_against(trend[i], negative))
        kind = min(max(np.int32(2 * (octave - spec.FIRST_OCTAVE) + against), np.int32(0)), np.int32(255))
        out[i] = W(kind) << W(7) | negative << W(15)


@inner
def _against(trend: Any, negative: Any) -> Any:
    """Whether a trend does not have this sign; zero has none."""
    x = np.float32(trend)
    return (_bits(x) >> W(31) != negative) | (_size(x) == W(0))


@compiled
def move(theta: Any, total: Any, trainers: Any, trend: Any) -> Any:
    """Overwrite the total of the updates with theta minus their mean, and write the signs of the mean to trend (int8).

    trainers is np.float32. Returns the number of means that are not zero, and the largest bit patterns without the sign
    of the means and of the new weights: from 0x7F800000 on, one is not finite.
    """
    moved, largest_mean, largest_theta = W(0), W(0), W(0)
    for i in range(theta.size):
        mean = total[i] / trainers
        after = theta[i] - mean
        size = _size(mean)
        total[i] = after
        trend[i] = np.int8(mean > 0) - np.int8(mean < 0)
        moved = W(moved + W(size != W(0)))
        largest_mean, largest_theta = max(largest_mean, size), max(largest_theta, _size(after))
    return moved, largest_mean, largest_theta


@compiled
def add_at(total: Any, positions: Any, values: Any) -> None:
    """Add values to the entries of total at these positions, which ascend and must be inside."""
    for k in range(positions.size):
        total[U(positions[k])] += values[k]
