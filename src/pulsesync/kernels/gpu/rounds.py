"""What a LoCo round computes of each entry: the results of `kernels.rounds`, bit for bit.

Every FP32 operation is rounded separately. So these kernels are launched with `enable_fp_fusion=False`, without which a
product and a sum become one operation with one rounding, and divide with `div_rn`, because `/` is approximate. Results
over all entries (the largest, the number) are computed in integers, program by program, and joined by the caller: a
maximum and a sum of integers do not depend on the order. Nothing here uses libdevice, the only place where Triton
flushes subnormal numbers to zero. tests/kernels/test_cuda_rounding.py checks all of this in the machine code.

A launch processes one chunk of a fragment: fewer than 2^31 entries, `size` of them.
"""

import triton
import triton.language as tl

from pulsesync.kernels import spec
from pulsesync.kernels.gpu.words import CHUNK, ROWS, lowest_bit, popcount, prefix

FIRST_OCTAVE = tl.constexpr(spec.FIRST_OCTAVE)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _number(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _size(x):
    """The bits of a number without its sign: they are in the order of the magnitudes."""
    return _bits(x) & 0x7FFFFFFF


@triton.jit
def _bf16(bits):
    """The BF16 bits of a finite FP32 number: to the nearest, ties to even."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _most(sizes):
    """The largest of bit patterns without the sign."""
    return tl.max(sizes.to(tl.int32), axis=0)


@triton.jit
def _here(size, SPAN: tl.constexpr):
    """The entries of this program, and which of them exist."""
    i = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    return i, i < size


@triton.jit(do_not_specialize=["size"])
def advance(
    theta, residual, momentum, local, lr, mu, s, moved, size, NESTEROV: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Write a trainer's update, s, and its next momentum, from its state at the last round and its current weights."""
    i, some = _here(size, SPAN)
    e = tl.load(residual + i, mask=some, other=0.0)
    delta = (tl.load(theta + i, mask=some, other=0.0) - e) - tl.load(local + i, mask=some, other=0.0)
    m = mu * tl.load(momentum + i, mask=some, other=0.0) + delta
    if NESTEROV:
        by = delta + mu * m
    else:
        by = m
    tl.store(moved + i, m, mask=some)
    tl.store(s + i, e + lr * by, mask=some)


@triton.jit(do_not_specialize=["size"])
def flag_visible(theta, s, reach, bitmap, counts, largest, size):
    """Mark the entries of s that, multiplied by reach, change the BF16 value of theta: a bit each, in words of 32.

    For each chunk of 4,096 it also writes their number, and the largest bit pattern in s without the sign.
    """
    c = tl.program_id(0)
    i = c * CHUNK + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(theta + i, mask=i < size, other=0.0)
    y = tl.load(s + i, mask=i < size, other=0.0)
    sizes = _size(y)
    visible = (_bf16(_bits(x - reach * y)) != _bf16(_bits(x))) & (sizes != 0)
    marks = tl.sum(visible.to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)
    tl.store(bitmap + c * ROWS + tl.arange(0, ROWS), marks)
    tl.store(counts + c, tl.sum(popcount(marks)))
    tl.store(largest + c, tl.max(tl.max(sizes.to(tl.int32), axis=1), axis=0))


@triton.jit(do_not_specialize=["first"])
def list_visible(s, bitmap, offsets, first: tl.int64, positions, values):
    """Write the marked entries, in order: position, with the first entry at `first`, and value."""
    c = tl.program_id(0)
    row = tl.arange(0, ROWS)
    words = tl.load(bitmap + c * ROWS + row)
    n = popcount(words)
    place = tl.load(offsets + c) + prefix(n)
    for _ in range(tl.max(n)):
        some = n > 0
        i = c * CHUNK + 32 * row + popcount(lowest_bit(words) - 1)
        tl.store(positions + place, first + i, mask=some)
        tl.store(values + place, tl.load(s + i, mask=some, other=0.0), mask=some)
        words &= words - 1
        place += some.to(tl.int32)
        n -= some.to(tl.int32)


@triton.jit(do_not_specialize=["size"])
def describe(theta, trend, out, size, SPAN: tl.constexpr):
    """Write what all trainers know of each entry, as `kernels.rounds.describe` does; trend is FP32 or int8.

    Distances are compared as bit patterns, which have the same order; above the largest BF16 value, the distance to the
    outer border is NaN, and counts as the nearest.
    """
    i, some = _here(size, SPAN)
    x = tl.load(theta + i, mask=some, other=0.0)
    middle = _bf16(_bits(x)) << 16
    below = tl.where((middle << 1) != 0, middle - 0x8000, middle ^ 0x80008000)
    to_outer, to_inner = _size(_number(middle + 0x8000) - x), _size(x - _number(below))
    nearest = tl.where((to_inner < to_outer) & (to_outer <= 0x7F800000), to_inner, to_outer)
    negative = (_bits(x) >> 31) ^ (to_outer <= to_inner).to(tl.uint32)
    sign = tl.load(trend + i, mask=some, other=0).to(tl.float32)
    against = ((_bits(sign) >> 31) != negative) | (_size(sign) == 0)
    kind = 2 * ((nearest >> 23).to(tl.int32) - FIRST_OCTAVE) + against.to(tl.int32)
    kind = tl.minimum(tl.maximum(kind, 0), 255).to(tl.uint32)
    tl.store(out + i, ((kind << 7) | (negative << 15)).to(tl.uint16), mask=some)


@triton.jit(do_not_specialize=["size"])
def move(theta, total, trainers, trend, moved, largest_mean, largest_theta, size, SPAN: tl.constexpr):
    """Overwrite the total of the updates with theta minus their mean, and write the signs of the mean to trend (int8).

    For each program it writes the number of means that are not zero, and the largest bit patterns without the sign of
    the means and of the new weights.
    """
    i, some = _here(size, SPAN)
    mean = tl.div_rn(tl.load(total + i, mask=some, other=0.0), trainers)
    after = tl.load(theta + i, mask=some, other=0.0) - mean
    tl.store(total + i, after, mask=some)
    tl.store(trend + i, (mean > 0).to(tl.int8) - (mean < 0).to(tl.int8), mask=some)
    sizes, p = _size(mean), tl.program_id(0)
    tl.store(moved + p, tl.sum((sizes != 0).to(tl.int32), axis=0))
    tl.store(largest_mean + p, _most(sizes))
    tl.store(largest_theta + p, _most(tl.where(some, _size(after), 0)))


@triton.jit(do_not_specialize=["size"])
def step_momentum(
    theta, momentum, total, lr, mu, trainers, after, moved, size, NESTEROV: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Write the next weights and the next shared momentum, given the sum of the trainers' updates."""
    i, some = _here(size, SPAN)
    mean = tl.div_rn(tl.load(total + i, mask=some, other=0.0), trainers)
    m = mu * tl.load(momentum + i, mask=some, other=0.0) + mean
    if NESTEROV:
        by = mean + mu * m
    else:
        by = m
    tl.store(moved + i, m, mask=some)
    tl.store(after + i, tl.load(theta + i, mask=some, other=0.0) - lr * by, mask=some)


@triton.jit(do_not_specialize=["size"])
def divide(values, by, out, size, SPAN: tl.constexpr):
    i, some = _here(size, SPAN)
    tl.store(out + i, tl.div_rn(tl.load(values + i, mask=some, other=0.0), by), mask=some)


@triton.jit(do_not_specialize=["size"])
def measure(values, nonzero, largest, size, SPAN: tl.constexpr):
    """For each program: the number of values that are not zero, and the largest bit pattern without the sign."""
    i, some = _here(size, SPAN)
    sizes, p = _size(tl.load(values + i, mask=some, other=0.0)), tl.program_id(0)
    tl.store(nonzero + p, tl.sum((sizes != 0).to(tl.int32), axis=0))
    tl.store(largest + p, _most(sizes))


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["total", "values"])
def add_at(total, positions, values, count: tl.int64, SPAN: tl.constexpr):
    """Add values to the entries of total at these positions, which are all different.

    Both may be pieces of vectors with any alignment, for which it is not compiled again.
    """
    j = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    some = j < count
    at = total + tl.load(positions + j, mask=some, other=0)
    tl.store(at, tl.load(at, mask=some, other=0.0) + tl.load(values + j, mask=some, other=0.0), mask=some)
