"""What the kernels share: words of bits, weights at an address, and steps from one weight to another."""

import os

import triton
import triton.language as tl

from pulsesync.kernels import spec

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no instructions of a GPU
CHUNK = tl.constexpr(spec.GPU_CHUNK)
ROWS = tl.constexpr(128)  # words of 32 bits in a chunk
P = tl.constexpr(spec.PROBABILITY_BITS)
TOTAL = tl.constexpr(1 << spec.PROBABILITY_BITS)
LOW = tl.constexpr(spec.STATE_LOW)
DIRECT = tl.constexpr(spec.DIRECT)
ALL = tl.constexpr(0xFFFFFFFF)
ROW = tl.constexpr(spec.ROW)
# Decisions in a block, at most; decoded values are a decision plus PLACES times a symbol.
PLACES = tl.constexpr(1 << 20)
CHUNK_BITS = tl.constexpr(spec.CHUNK_BITS)
STREAM_TOO_SHORT = tl.constexpr(spec.STREAM_TOO_SHORT)
NO_TABLE = tl.constexpr(spec.NO_TABLE)
OTHER_COUNT = tl.constexpr(spec.OTHER_COUNT)
STREAM_TOO_LONG = tl.constexpr(spec.STREAM_TOO_LONG)
STEP_TOO_LONG = tl.constexpr(spec.STEP_TOO_LONG)
HOT_AMONG_COLD = tl.constexpr(spec.HOT_AMONG_COLD)
COLD_HALF_CIRCLE = tl.constexpr(spec.COLD_HALF_CIRCLE)
FIRST_SEED = tl.constexpr(spec.DIGEST_SEEDS[0])
SECOND_SEED = tl.constexpr(spec.DIGEST_SEEDS[1])


@triton.jit
def popcount(x):
    """The number of set bits in 32-bit words."""
    if INTERPRETED:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def lowest_bit(words):
    """The lowest bit that is set."""
    return words & ((words ^ ALL) + 1)


@triton.jit
def prefix(counts):
    """Exclusive prefix sum."""
    return tl.cumsum(counts) - counts


@triton.jit
def ballot(flags, lane):
    """Which of 32 lanes have a flag, as one word for each lane. Only in programs of one warp, one lane a thread."""
    if INTERPRETED:
        return tl.zeros([32], tl.uint32) + tl.sum((flags != 0).to(tl.uint32) << lane)
    else:  # a vote takes a third of the time of a sum; it is not pure, so that no branch may contain it alone
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
            "=r,r", [flags.to(tl.uint32)], dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def select_bit(words, rank):
    """The place of the set bit of words of 32 bits before which there are `rank` others."""
    place = tl.zeros_like(rank)
    half = 16
    while half > 0:
        below = popcount(words & ((1 << half) - 1))
        above = rank >= below
        rank -= tl.where(above, below, 0)
        words = tl.where(above, words >> half, words)
        place += tl.where(above, half, 0)
        half //= 2
    return place


@triton.jit
def find_last(begins, first, count, i, STRIDE: tl.constexpr):
    """The last of `count` numbers from number `first` on that is at most i, by binary search; the first always is.

    begins: the numbers in ascending order, STRIDE apart.
    """
    found = tl.zeros_like(i) + first
    while count > 1:
        half = count // 2
        found = tl.where(tl.load(begins + (found + half) * STRIDE) <= i, found + half, found)
        count -= half
    return found


@triton.jit
def span_of(c, first_chunk, sizes, b):
    """Where a chunk begins in its block, and how many weights it has."""
    begin = (c - tl.load(first_chunk + b)) * CHUNK
    return begin, tl.minimum(tl.load(sizes + b) - begin, CHUNK).to(tl.int32)


@triton.jit
def inside(marks, count):
    """Marks of a chunk without bits beyond its last weight."""
    if count < CHUNK:  # seldom
        left = tl.minimum(tl.maximum(count - 32 * tl.arange(0, ROWS), 0), 32)
        whole = tl.full([ROWS], 0xFFFFFFFF, tl.uint32)
        marks &= tl.where(left >= 32, whole, (tl.full([ROWS], 1, tl.uint32) << (left & 31).to(tl.uint32)) - 1)
    return marks


@triton.jit
def chunk_words(at, begin, count, ITEM: tl.constexpr):
    """A chunk as words of eight bytes: (ROWS, 4 * ITEM), 32 weights per row; those outside are zero."""
    per: tl.constexpr = 4 * ITEM
    i = tl.arange(0, ROWS)[:, None] * per + tl.arange(0, per)[None, :]
    within = (8 * (at & 7)).to(tl.uint64)  # bits of the first word that are before the block
    words = (at - (at & 7)).to(tl.pointer_type(tl.uint64)) + begin // (8 // ITEM)
    if within == 0:
        if count == CHUNK:
            x = tl.load(words + i)
        else:
            x = tl.load(words + i, mask=i * (8 // ITEM) < count, other=0)
    # Groups of bundles have any alignment: each word is made of two, and no word without a weight of the block is read.
    else:
        size = count * (8 * ITEM)
        x = tl.load(words + i, mask=64 * i < size, other=0) >> within
        after = tl.load(words + i + 1, mask=64 * (i + 1) < size + within.to(tl.int32), other=0)
        x |= after << (64 - within)
    return x


@triton.jit
def _to_rows(low, high, ITEM: tl.constexpr):
    """From halves of words of eight bytes, with a flag at the sign of each weight, to words of 32 flags, by row."""
    if ITEM == 1:
        bits = _four(low) | (_four(high) << 4)
    elif ITEM == 2:
        bits = (((low >> 15) | (low >> 30)) & 3) | ((((high >> 15) | (high >> 30)) & 3) << 2)
    elif ITEM == 4:
        bits = (low >> 31) | ((high >> 31) << 1)
    else:
        bits = high >> 31
    per: tl.constexpr = 4 * ITEM
    places = tl.arange(0, per)[None, :] * (8 // ITEM)
    return tl.sum(bits << places.to(tl.uint32), axis=1)


@triton.jit
def _four(flags):
    """The signs of four bytes, as four bits."""
    return (((flags >> 7) & 0x01010101) * 0x01020408) >> 24


@triton.jit
def _halves(x):
    """Words of eight bytes as two of four: 64-bit operations cost twice the instructions."""
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _differs(x, ITEM: tl.constexpr):
    """Set the sign of each weight in words of four bytes if any bit of the weight is set."""
    ones: tl.constexpr = 0xFFFFFFFF // ((1 << (8 * ITEM)) - 1)  # a one for each weight
    signs: tl.constexpr = ones << (8 * ITEM - 1)
    rest: tl.constexpr = signs - ones  # all bits except the signs
    return (((x & rest) + rest) | x) & signs  # sums carry into the sign, but not further


@triton.jit
def not_zero(x, ITEM: tl.constexpr):
    """For every weight in words of eight bytes, whether a bit of it is set: as bits of words of 32, by row."""
    low, high = _halves(x)
    if ITEM == 8:
        high, low = tl.where((low | high) != 0, 0x80000000, 0).to(tl.uint32), low
    else:
        low, high = _differs(low, ITEM), _differs(high, ITEM)
    return _to_rows(low, high, ITEM)


@triton.jit
def below_cut(x, cut, ITEM: tl.constexpr):
    """For every weight in words of eight bytes, whether its magnitude is below a cut: as bits of words of 32, by row.

    Weights that have an exponent have four bytes at most.
    """
    ones: tl.constexpr = 0xFFFFFFFF // ((1 << (8 * ITEM)) - 1)
    signs: tl.constexpr = ones << (8 * ITEM - 1)
    limit = cut.to(tl.uint32) * ones
    low, high = _halves(x)
    # borrows stop at the sign, which is set
    low, high = (((low | signs) - limit) & signs) ^ signs, (((high | signs) - limit) & signs) ^ signs
    return _to_rows(low, high, ITEM)


@triton.jit
def load_bits(at, i, mask, ITEM: tl.constexpr):
    """Single weights at an address; those of one or two bytes as 32 bits."""
    if ITEM == 1:
        return tl.load(at.to(tl.pointer_type(tl.uint8)) + i, mask=mask, other=0).to(tl.uint32)
    elif ITEM == 2:
        return tl.load(at.to(tl.pointer_type(tl.uint16)) + i, mask=mask, other=0).to(tl.uint32)
    elif ITEM == 4:
        return tl.load(at.to(tl.pointer_type(tl.uint32)) + i, mask=mask, other=0)
    else:
        return tl.load(at.to(tl.pointer_type(tl.uint64)) + i, mask=mask, other=0)


@triton.jit
def store_bits(at, i, value, mask, ITEM: tl.constexpr):
    if ITEM == 1:
        tl.store(at.to(tl.pointer_type(tl.uint8)) + i, value.to(tl.uint8), mask=mask)
    elif ITEM == 2:
        tl.store(at.to(tl.pointer_type(tl.uint16)) + i, value.to(tl.uint16), mask=mask)
    elif ITEM == 4:
        tl.store(at.to(tl.pointer_type(tl.uint32)) + i, value.to(tl.uint32), mask=mask)
    else:
        tl.store(at.to(tl.pointer_type(tl.uint64)) + i, value.to(tl.uint64), mask=mask)


@triton.jit
def to_bf16(x):
    """FP32 bits to BF16 bits: to nearest, ties to even, and NaN as torch casts it on a GPU."""
    rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    return tl.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).to(tl.uint32)


@triton.jit
def ordered(bits, ITEM: tl.constexpr):
    """Map bit patterns to the order of their values."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    if ITEM < 4:
        wide = bits.to(tl.int32)
    else:
        wide = bits.to(tl.int64)
    return wide ^ tl.where((wide & sign) != 0, full, sign)


@triton.jit
def step_of(old, new, ITEM: tl.constexpr):
    """Symbol, extra bits and size of a change, and whether it is downwards, as in `steps`."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    a, b = ordered(old, ITEM), ordered(new, ITEM)
    up = (b - a) & full
    falls = (up > sign) | ((up == sign) & (b < a))
    size = tl.where(falls, (a - b) & full, up)
    if ITEM < 4:
        k = (size.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # the highest bit, exactly
    else:
        k = (size.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1023
    big = size > DIRECT
    extra = tl.where(big, size - (1 << tl.where(big, k, 0)), 0)
    size_class = tl.where(big, k + (DIRECT - 3), size - 1)
    return (1 + 2 * size_class).to(tl.int32) + falls.to(tl.int32), extra.to(tl.uint32), size.to(tl.int64), falls
