"""The hot loops for GPUs, in Triton: one launch for all blocks of a dtype.

Weights are met where they lie: a launch is given the address of every block, a multiple of 8. A block is cut into
chunks of 4,096 weights, one program each. What holds of few weights of a chunk (they changed, they are hot) is first
written as a bitmap, reading words of eight bytes at memory speed; a second launch walks the bits that are set, one
thread for 32 weights. Where a chunk's results begin, a prefix sum over counts tells, and inside it the bits before.
The entropy coder gives each block a warp, whose threads are the coder's lanes. Results are those of `reference`.

ITEM is the size of a weight in bytes, SHIFT where its exponent begins. Bits of weights travel as unsigned integers.
"""

import os

import triton
import triton.language as tl

from pulsesync.kernels import spec

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # which knows no instructions of a GPU
CHUNK = tl.constexpr(4096)
ROWS = tl.constexpr(128)  # words of 32 bits in a chunk
P = tl.constexpr(spec.PROBABILITY_BITS)
TOTAL = tl.constexpr(1 << spec.PROBABILITY_BITS)
LOW = tl.constexpr(spec.STATE_LOW)
DIRECT = tl.constexpr(spec.DIRECT)
ALL = tl.constexpr(0xFFFFFFFF)
ROW = tl.constexpr(0x7FFF)  # of a decision: the row of the tables; the top bit says that the weight last went down
CHUNK_BITS = tl.constexpr(spec.CHUNK_BITS)
FIRST_SEED = tl.constexpr(spec.DIGEST_SEEDS[0])
SECOND_SEED = tl.constexpr(spec.DIGEST_SEEDS[1])


# Words and bits


@triton.jit
def _count(x):
    """How many bits are set in words of 32."""
    if INTERPRETED:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _lowest(words):
    """The lowest bit that is set."""
    return words & ((words ^ ALL) + 1)


@triton.jit
def _before(counts):
    """Exclusive prefix sum."""
    return tl.cumsum(counts) - counts


@triton.jit
def _ballot(flags, lane):
    """Which of 32 lanes have a flag, as one word."""
    return tl.sum(flags.to(tl.uint32) << lane)


@triton.jit
def _inside(c, first_chunk, sizes, b):
    """Where a chunk begins in its block, and which bits of its words stand for weights."""
    begin = (c - tl.load(first_chunk + b)) * CHUNK
    left = tl.load(sizes + b) - begin - 32 * tl.arange(0, ROWS)
    left = tl.minimum(tl.maximum(left, 0), 32)
    whole = tl.full([ROWS], 0xFFFFFFFF, tl.uint32)
    return begin, tl.where(left >= 32, whole, (tl.full([ROWS], 1, tl.uint32) << (left & 31).to(tl.uint32)) - 1)


@triton.jit
def _words(at, begin, size, ITEM: tl.constexpr):
    """A chunk as words of eight bytes: (ROWS, 4 * ITEM), 32 weights to a row; those outside are zero."""
    per: tl.constexpr = 4 * ITEM
    i = (begin // (8 // ITEM)) + tl.arange(0, ROWS)[:, None] * per + tl.arange(0, per)[None, :]
    return tl.load(at.to(tl.pointer_type(tl.uint64)) + i, mask=i * (8 // ITEM) < size, other=0)


@triton.jit
def _pack(flags, LANE: tl.constexpr, ITEM: tl.constexpr):
    """Bits of one weight of every eight-byte word, (ROWS, 4 * ITEM) 0 or 1, at their places in words of 32."""
    per: tl.constexpr = 4 * ITEM
    places = tl.arange(0, per)[None, :] * (8 // ITEM) + LANE
    return tl.sum(flags.to(tl.uint32) << places.to(tl.uint32), axis=1)


@triton.jit
def _below(x, cut, ITEM: tl.constexpr):
    """Of every weight in words of eight bytes, whether its magnitude is below a cut: as bits of words of 32, by row."""
    ones: tl.constexpr = 0xFFFFFFFFFFFFFFFF // ((1 << (8 * ITEM)) - 1)  # a one for each weight
    signs: tl.constexpr = ones << (8 * ITEM - 1)
    limit = cut.to(tl.uint64) * ones
    flags = ((((x | signs) - limit) & signs) ^ signs) >> (8 * ITEM - 1)  # borrows stop at the sign, which is set
    if ITEM == 1:
        bits = (flags * 0x0102040810204080) >> 56
    elif ITEM == 2:
        bits = (flags | (flags >> 15)) & 0x0000000300000003
        bits = (bits | (bits >> 30)) & 0xF
    else:
        bits = (flags | (flags >> 31)) & 0x3
    per: tl.constexpr = 4 * ITEM
    places = tl.arange(0, per)[None, :] * (8 // ITEM)
    return tl.sum(bits.to(tl.uint32) << places.to(tl.uint32), axis=1)


@triton.jit
def _load(at, i, mask, ITEM: tl.constexpr):
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
def _store(at, i, value, mask, ITEM: tl.constexpr):
    if ITEM == 1:
        tl.store(at.to(tl.pointer_type(tl.uint8)) + i, value.to(tl.uint8), mask=mask)
    elif ITEM == 2:
        tl.store(at.to(tl.pointer_type(tl.uint16)) + i, value.to(tl.uint16), mask=mask)
    elif ITEM == 4:
        tl.store(at.to(tl.pointer_type(tl.uint32)) + i, value.to(tl.uint32), mask=mask)
    else:
        tl.store(at.to(tl.pointer_type(tl.uint64)) + i, value.to(tl.uint64), mask=mask)


@triton.jit
def _bf16(x):
    """FP32 bits to BF16 bits: to nearest, ties to even, and NaN as torch casts it on a GPU."""
    rounded = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    return tl.where((x & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded).to(tl.uint32)


# What changed


@triton.jit
def compare(
    old_at, new_at, sizes, chunk_block, first_chunk, bitmap, counts, ITEM: tl.constexpr, CAST: tl.constexpr
):  # fmt: skip
    """Mark what differs, and count it. CAST: old is BF16 and new FP32, which is rounded first."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    size = tl.load(sizes + b)
    begin, inside = _inside(c, first_chunk, sizes, b)
    if CAST:
        i = begin + tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        old = _load(tl.load(old_at + b), i, i < size, 2)
        differ = old != _bf16(_load(tl.load(new_at + b), i, i < size, 4))
        marks = tl.sum(differ.to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)
    else:
        x = _words(tl.load(old_at + b), begin, size, ITEM) ^ _words(tl.load(new_at + b), begin, size, ITEM)
        marks = tl.zeros([ROWS], tl.uint32)
        if ITEM == 8:
            marks |= _pack(x != 0, 0, ITEM)
        else:
            mask: tl.constexpr = (1 << (8 * ITEM)) - 1
            for lane in tl.static_range(8 // ITEM):
                marks |= _pack(((x >> (8 * ITEM * lane)) & mask) != 0, lane, ITEM)
    marks &= inside
    tl.store(bitmap + c * ROWS + tl.arange(0, ROWS), marks)
    tl.store(counts + c, tl.sum(_count(marks)))


@triton.jit
def collect(
    old_at, new_at, chunk_block, first_chunk, bitmap, offsets, positions, before, after,
    ITEM: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Write what is marked, in order: position in the block, old bits, new bits."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    begin = (c - tl.load(first_chunk + b)) * CHUNK
    row = tl.arange(0, ROWS)
    words = tl.load(bitmap + c * ROWS + row)
    n = _count(words)
    place = tl.load(offsets + c) + _before(n)
    old_from, new_from = tl.load(old_at + b), tl.load(new_at + b)
    for _ in range(tl.max(n)):
        some = n > 0
        i = begin + 32 * row + _count(_lowest(words) - 1)
        tl.store(positions + place, i.to(tl.uint32), mask=some)
        tl.store(before + place, _load(old_from, i, some, ITEM), mask=some)
        if CAST:
            tl.store(after + place, _bf16(_load(new_from, i, some, 4)), mask=some)
        else:
            tl.store(after + place, _load(new_from, i, some, ITEM), mask=some)
        words &= words - 1
        place += some.to(tl.int32)
        n -= some.to(tl.int32)


@triton.jit
def count_classes(
    before, change_starts, sizes, old_at, block_tile, by_class, sampled,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, PERIOD: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of each tile: its changes by the class of the old weight, and the sample of its weights by class."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b).to(tl.int64)
    bins = tl.arange(0, 256)
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    begin, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    found = tl.zeros([256], tl.int32)
    for k in range(begin, end, SPAN):
        j = k + tl.arange(0, SPAN)
        c = ((tl.load(before + j, mask=j < end, other=0).to(tl.uint32) & mask) >> SHIFT).to(tl.int32)
        found += tl.histogram(c, 256, mask=j < end)
    tl.atomic_add(by_class + tile * 256 + bins, found.to(tl.int64), mask=found > 0)
    size, at = tl.load(sizes + b), tl.load(old_at + b)
    seen = tl.zeros([256], tl.int32)
    for k in range(0, size, PERIOD * (SPAN // RUN)):
        i = k + (tl.arange(0, SPAN) // RUN) * PERIOD + tl.arange(0, SPAN) % RUN
        c = ((_load(at, i, i < size, ITEM) & mask) >> SHIFT).to(tl.int32)
        seen += tl.histogram(c, 256, mask=i < size)
    tl.atomic_add(sampled + tile * 256 + bins, seen.to(tl.int64), mask=seen > 0)


# Hot weights


@triton.jit
def mark_hot(
    old_at, sizes, chunk_block, first_chunk, block_tile, cuts, tracked, bitmap, hot_map, known_map, hots, knowns,
    hot_changes, ITEM: tl.constexpr, SHIFT: tl.constexpr, HISTORY: tl.constexpr, CHANGES: tl.constexpr,
):  # fmt: skip
    """Mark the weights below the cut, and with a history those that it knows; count them, and the hot changes."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    tile = tl.load(block_tile + b)
    begin, inside = _inside(c, first_chunk, sizes, b)
    x = _words(tl.load(old_at + b), begin, tl.load(sizes + b), ITEM)
    hot = _below(x, tl.load(cuts + tile).to(tl.int64) << SHIFT, ITEM) & inside
    row = tl.arange(0, ROWS)
    tl.store(hot_map + c * ROWS + row, hot)
    tl.store(hots + c, tl.sum(_count(hot)))
    if HISTORY:
        known = _below(x, tl.load(tracked + tile).to(tl.int64) << SHIFT, ITEM) & inside
        tl.store(known_map + c * ROWS + row, known)
        tl.store(knowns + c, tl.sum(_count(known)))
    if CHANGES:
        tl.store(hot_changes + c, tl.sum(_count(hot & tl.load(bitmap + c * ROWS + row))))


@triton.jit
def list_hot(
    old_at, chunk_block, first_chunk, coded, hot_map, known_map, hot_at, known_at, last, rows_of, rows, places,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, HISTORY: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Of each hot weight of the blocks that are coded, in order: the row of the tables (see ROW), and its position."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    if tl.load(coded + b) > 0:
        begin = (c - tl.load(first_chunk + b)) * CHUNK
        at = tl.load(old_at + b)
        row = tl.arange(0, ROWS)
        words = tl.load(hot_map + c * ROWS + row)
        n = _count(words)
        place = tl.load(hot_at + c) + _before(n)
        known = tl.zeros([ROWS], tl.uint32)
        memory = tl.zeros([ROWS], tl.int64)
        if HISTORY:
            known = tl.load(known_map + c * ROWS + row)
            memory = tl.load(known_at + c) + _before(_count(known))
        mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
        for _ in range(tl.max(n)):
            some = n > 0
            low = _lowest(words)
            i = begin + 32 * row + _count(low - 1)
            old = _load(at, i, some, ITEM)
            r = tl.load(rows_of + ((old & mask) >> SHIFT), mask=some, other=0).to(tl.int32)
            if HISTORY:
                kept = some & ((known & low) != 0)
                age = tl.load(last + memory + _count(known & (low - 1)), mask=kept, other=0).to(tl.int32)
                r = (r + (age & 0x7F)) | ((age >> 7) << 15)
            tl.store(rows + place, r.to(tl.uint16), mask=some)
            if PLACES:
                tl.store(places + place, i.to(tl.uint32), mask=some)
            words &= words - 1
            place += some.to(tl.int32)
            n -= some.to(tl.int32)


@triton.jit
def _ordered(bits, ITEM: tl.constexpr):
    """Bit patterns in the order of the values they stand for."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    if ITEM < 4:
        wide = bits.to(tl.int32)
    else:
        wide = bits.to(tl.int64)
    return wide ^ tl.where((wide & sign) != 0, full, sign)


@triton.jit
def _step(old, new, ITEM: tl.constexpr):
    """Symbol, extra bits and size of a change, and whether it goes down, as `steps` has them."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    a, b = _ordered(old, ITEM), _ordered(new, ITEM)
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


@triton.jit
def decide(
    chunk_block, first_chunk, hot_map, bitmap, offsets, before, after, hot_at, hot_change_at, rows,
    symbols, extras, cold_positions, cold_steps, ITEM: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Write the changes of hot weights among the decisions, as symbols, and their extra bits; cold ones as steps."""
    c = tl.program_id(0).to(tl.int64)
    begin = (c - tl.load(first_chunk + tl.load(chunk_block + c))) * CHUNK
    row = tl.arange(0, ROWS)
    hot, words = tl.load(hot_map + c * ROWS + row), tl.load(bitmap + c * ROWS + row)
    n = _count(words)
    first, first_hot = tl.load(offsets + c), tl.load(hot_change_at + c)
    change = first + _before(n)
    hot_before = _before(_count(hot & words))
    decision = tl.load(hot_at + c) + _before(_count(hot))
    hot_change = first_hot + hot_before
    cold = first - first_hot + _before(n) - hot_before
    for _ in range(tl.max(n)):
        some = n > 0
        low = _lowest(words)
        old = tl.load(before + change, mask=some, other=0).to(tl.uint32)
        new = tl.load(after + change, mask=some, other=1).to(tl.uint32)
        symbol, extra, size, falls = _step(old, new, ITEM)
        is_hot = some & ((hot & low) != 0)
        is_cold = some & ((hot & low) == 0)
        j = decision + _count(hot & (low - 1))
        if HISTORY:
            symbol = ((symbol - 1) ^ (tl.load(rows + j, mask=is_hot, other=0) >> 15).to(tl.int32)) + 1
        tl.store(symbols + j, symbol.to(tl.uint8), mask=is_hot)
        tl.store(extras + hot_change, extra, mask=is_hot)
        tl.store(cold_positions + cold, begin + 32 * row + _count(low - 1), mask=is_cold)
        tl.store(cold_steps + cold, tl.where(falls, -size, size), mask=is_cold)
        words &= words - 1
        change += some.to(tl.int32)
        hot_change += is_hot.to(tl.int32)
        cold += is_cold.to(tl.int32)
        n -= some.to(tl.int32)


@triton.jit
def count_rows(rows, total, counts, BINS: tl.constexpr, SPAN: tl.constexpr, PER: tl.constexpr):
    """How many decisions each row of the tables has."""
    begin = tl.program_id(0).to(tl.int64) * SPAN * PER
    found = tl.zeros([BINS], tl.int32)
    for k in range(PER):
        j = begin + k * SPAN + tl.arange(0, SPAN)
        r = tl.load(rows + j, mask=j < total, other=0).to(tl.int32) & ROW
        found += tl.histogram(r, BINS, mask=j < total)
    tl.atomic_add(counts + tl.arange(0, BINS), found.to(tl.int64), mask=found > 0)


@triton.jit
def count_symbols(
    rows, symbols, total, counts, places, BITS: tl.constexpr, COPIES: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Of decisions that are changes: how many each symbol of each row has. Counted in copies, which are then added."""
    pid = tl.program_id(0).to(tl.int64)
    mine = counts + (pid % COPIES) * places
    j = pid * SPAN + tl.arange(0, SPAN)
    s = tl.load(symbols + j, mask=j < total, other=0).to(tl.int32)
    r = tl.load(rows + j, mask=s > 0, other=0).to(tl.int32) & ROW
    tl.atomic_add(mine + (r << BITS) + s, tl.full([SPAN], 1, tl.int32), mask=s > 0, sem="relaxed")


# The entropy coder


@triton.jit
def encode(
    rows, symbols, extras, hot_starts, change_starts, lanes, table, out_starts, stream, sizes,
    BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Code each block from its end, a round of lanes at a time; its words end where the next block's room begins.

    sizes: how many words it has; where that is more than there is room for, nothing outside is written.
    """
    b = tl.program_id(0)
    n = tl.load(lanes + b)
    lane = tl.arange(0, 32)
    hot = tl.load(hot_starts + b)
    total = (tl.load(hot_starts + b + 1) - hot).to(tl.int32)
    low, end = tl.load(out_starts + b), tl.load(out_starts + b + 1)
    change = tl.load(change_starts + b + 1)  # those from it on are coded
    x = tl.full([32], LOW, tl.uint32)
    bit = lane.to(tl.uint32)
    lower = (tl.full([32], 1, tl.uint32) << bit) - 1  # lanes before this one
    at = end
    rounds = (total + n - 1) // n
    j = (rounds - 1) * n + lane
    take = (lane < n) & (j >= 0) & (j < total)
    symbol = tl.load(symbols + hot + j, mask=take, other=0).to(tl.int32)
    row = (tl.load(rows + hot + j, mask=take, other=0).to(tl.int32)) & ROW
    begin = tl.load(table + (row << BITS) + symbol, mask=take, other=0).to(tl.uint32)
    stop = tl.load(table + (row << BITS) + symbol + 1, mask=take, other=1).to(tl.uint32)
    for _ in range(rounds):
        # what the next round needs is under way while this one is coded
        j -= n
        next_take = (lane < n) & (j >= 0)
        next_symbol = tl.load(symbols + hot + j, mask=next_take, other=0).to(tl.int32)
        next_row = (tl.load(rows + hot + j, mask=next_take, other=0).to(tl.int32)) & ROW
        frequency = stop - begin
        changed = _ballot(symbol > 0, bit)
        change -= _count(changed)
        y = x
        t = (symbol - 1) >> 1
        raw = tl.where((symbol > 0) & (t >= DIRECT), t - (DIRECT - 3), 0).to(tl.uint32)
        if tl.max(raw.to(tl.int32)) > 0:
            extra = tl.load(extras + change + _count(changed & lower), mask=raw > 0, other=0)
            one = tl.full([32], 1, tl.uint64)
            if WIDE:
                high = tl.where(raw > 16, raw - 16, 0).to(tl.uint32)
                full = (high > 0) & (y.to(tl.uint64) >= (one << (32 - high).to(tl.uint64)))
                w2 = y & 0xFFFF
                has2 = _ballot(full, bit)
                y = tl.where(full, y >> 16, y)
                y = tl.where(high > 0, (y << high) | (extra >> 16), y)
                extra = tl.where(high > 0, extra & 0xFFFF, extra)
                raw = tl.where(high > 0, 16, raw).to(tl.uint32)
            full = (raw > 0) & (y.to(tl.uint64) >= (one << (32 - raw).to(tl.uint64)))
            w1 = y & 0xFFFF
            has1 = _ballot(full, bit)
            y = tl.where(full, y >> 16, y)
            y = tl.where(raw > 0, (y << raw) | extra, y)
            spills = take & (y.to(tl.uint64) >= (frequency.to(tl.uint64) << (32 - P)))
            has0 = _ballot(spills, bit)
            at -= _count(has0) + _count(has1)
            place = at + _count(has0 & lower) + _count(has1 & lower)
            if WIDE:
                at -= _count(has2)
                place += _count(has2 & lower) - _count(has2)
            then = place + spills.to(tl.int32)
            tl.store(stream + then, w1.to(tl.uint16), mask=full & (then >= low))
            if WIDE:
                then += full.to(tl.int32)
                tl.store(stream + then, w2.to(tl.uint16), mask=(((has2 >> bit) & 1) != 0) & (then >= low))
        else:
            spills = take & (y.to(tl.uint64) >= (frequency.to(tl.uint64) << (32 - P)))
            has0 = _ballot(spills, bit)
            at -= _count(has0)
            place = at + _count(has0 & lower)
        tl.store(stream + place, (y & 0xFFFF).to(tl.uint16), mask=spills & (place >= low))
        y = tl.where(spills, y >> 16, y)
        quotient = y // frequency
        x = tl.where(take, (quotient << P) + (y - quotient * frequency) + begin, x)
        take, symbol = next_take, next_symbol
        begin = tl.load(table + (next_row << BITS) + symbol, mask=take, other=0).to(tl.uint32)
        stop = tl.load(table + (next_row << BITS) + symbol + 1, mask=take, other=1).to(tl.uint32)
    at -= 2 * n
    place = at + 2 * lane
    mine = (lane < n) & (place >= low)
    tl.store(stream + place, (x & 0xFFFF).to(tl.uint16), mask=mine)
    tl.store(stream + place + 1, (x >> 16).to(tl.uint16), mask=mine)
    tl.store(sizes + b, end - at)


@triton.jit
def pack(stream, room_ends, sizes, out_starts, out, SPAN: tl.constexpr):
    """Bring the words of all blocks together, one block after the other."""
    b = tl.program_id(0)
    size = tl.load(sizes + b)
    begin, to = tl.load(room_ends + b) - size, tl.load(out_starts + b)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        tl.store(out + to + j, tl.load(stream + begin + j, mask=j < size, other=0), mask=j < size)


@triton.jit
def decode(
    stream, starts, lanes, hot_starts, hot_ends, rows, table, symbol_count, out_starts, out_decisions, out_symbols,
    out_extras, faults, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode the blocks, a round of lanes at a time: of each change its decision, symbol and extra bits.

    Never reads or writes out of bounds, whatever the stream holds. faults: 0, or what was met (see `spec.FAULTS`).
    """
    b = tl.program_id(0)
    n = tl.load(lanes + b)
    lane = tl.arange(0, 32)
    at, end = tl.load(starts + b), tl.load(starts + b + 1)
    hot = tl.load(hot_starts + b)
    total = (tl.load(hot_ends + b) - hot).to(tl.int32)
    out, out_end = tl.load(out_starts + b), tl.load(out_starts + b + 1)
    fault = tl.where(end - at < 2 * n, 1, 0).to(tl.int32)
    on = lane < tl.where(fault == 0, n, 0)
    x = tl.load(stream + at + 2 * lane, mask=on, other=0).to(tl.uint32)
    x = x | (tl.load(stream + at + 2 * lane + 1, mask=on, other=1).to(tl.uint32) << 16)
    at += 2 * n
    bit = lane.to(tl.uint32)
    one = tl.full([32], 1, tl.uint32)
    lower = (one << bit) - 1  # lanes before this one
    j = lane
    left = tl.where(fault == 0, total, 0)
    decision = tl.load(rows + hot + j, mask=on & (j < total), other=0).to(tl.int32)
    while left > 0:
        take = on & (j < total)
        row = table + ((decision & ROW) << BITS)
        stop = tl.load(row + 1, mask=take, other=TOTAL).to(tl.int32)
        down = decision >> 15
        decision = tl.load(rows + hot + j + n, mask=on & (j + n < total), other=0).to(tl.int32)
        slot = (x & (TOTAL - 1)).to(tl.int32)
        change = take & (slot >= stop)
        changed = _ballot(change, bit)
        if changed == 0:  # nothing changed in this round
            y = stop.to(tl.uint32) * (x >> P) + slot.to(tl.uint32)
            needs = take & (y < LOW)
            need = _ballot(needs, bit)
            mine = at + _count(need & lower)
            word = tl.load(stream + mine, mask=needs & (mine < end), other=0).to(tl.uint32)
            x = tl.where(take, tl.where(needs, (y << 16) | word, y), x)
            at += _count(need)
            lost = 0
        else:
            begin = tl.zeros_like(slot)
            symbol = tl.zeros_like(lane)
            search = change.to(tl.int32)
            while tl.max(search) > 0:
                symbol += search
                begin = tl.where(search > 0, stop, begin)
                stop = tl.where(search > 0, tl.load(row + symbol + 1, mask=search > 0, other=0).to(tl.int32), stop)
                search = ((search > 0) & (slot >= stop) & (symbol + 1 < symbol_count)).to(tl.int32)
            lost = tl.max((take & (slot >= stop)).to(tl.int32))
            y = (stop - begin).to(tl.uint32) * (x >> P) + (slot - begin).to(tl.uint32)
            t = (symbol - 1) >> 1
            raw = tl.where(change & (t >= DIRECT), t - (DIRECT - 3), 0).to(tl.uint32)
            low = tl.minimum(raw, 16)
            has0 = take & (y < LOW)
            # how many words each lane needs is known before any is read
            refilled = tl.where(has0, y << 16, y) >> low
            has1 = (raw > 0) & (refilled < LOW)
            need0, need1 = _ballot(has0, bit), _ballot(has1, bit)
            mine = at + _count(need0 & lower) + _count(need1 & lower)
            at += _count(need0) + _count(need1)
            if WIDE:
                refilled = tl.where(has1, refilled << 16, refilled)
                has2 = (raw > 16) & ((refilled >> (raw - low)) < LOW)
                need2 = _ballot(has2, bit)
                mine += _count(need2 & lower)
                at += _count(need2)
            y = tl.where(has0, (y << 16) | tl.load(stream + mine, mask=has0 & (mine < end), other=0).to(tl.uint32), y)
            mine += has0.to(tl.int32)
            extra = y & ((one << low) - 1)
            y = y >> low
            y = tl.where(has1, (y << 16) | tl.load(stream + mine, mask=has1 & (mine < end), other=0).to(tl.uint32), y)
            if WIDE:
                mine += has1.to(tl.int32)
                high = raw - low
                extra = extra | ((y & ((one << high) - 1)) << low)
                y = y >> high
                word = tl.load(stream + mine, mask=has2 & (mine < end), other=0).to(tl.uint32)
                y = tl.where(has2, (y << 16) | word, y)
            x = tl.where(take, y, x)
            place = out + _count(changed & lower)
            keep = change & (place < out_end)
            tl.store(out_decisions + place, j.to(tl.uint32), mask=keep)
            tl.store(out_symbols + place, (((symbol - 1) ^ down) + 1).to(tl.uint8), mask=keep)
            tl.store(out_extras + place, extra, mask=keep & (raw > 0))
            out += _count(changed)
        fault = tl.where(lost > 0, 2, tl.where(at > end, 1, tl.where(out > out_end, 3, 0)))
        left = tl.where(fault == 0, left - n, 0)
        j += n
    unfinished = tl.sum((on & (x != LOW)).to(tl.int32)) > 0
    end_fault = tl.where(out != out_end, 3, tl.where((at != end) | unfinished, 4, 0))
    tl.store(faults + b, tl.where(fault != 0, fault, end_fault).to(tl.int32))


@triton.jit
def _moved(old, symbol, extra, ITEM: tl.constexpr):
    """A weight after the step that a symbol and its extra bits name, and whether there is no such step."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    longest: tl.constexpr = DIRECT + 8 * ITEM - 4
    t = (symbol - 1) >> 1
    one = tl.full(t.shape, 1, tl.int64)
    direct = t < DIRECT
    size = tl.where(direct, t.to(tl.int64) + 1, 0)
    size = tl.where(direct, size, extra.to(tl.int64) + (one << tl.where(direct, 0, t - (DIRECT - 3)).to(tl.int64)))
    down = ((symbol - 1) & 1) != 0
    wrong = (t == longest) & ((extra != 0) | (down == ((old & sign) != 0)))
    wide = old.to(tl.int64)
    key = ((wide ^ tl.where((wide & sign) != 0, full, sign)) + tl.where(down, -size, size)) & full
    return key ^ tl.where((key & sign) != 0, sign, full), wrong


@triton.jit
def land(
    old_at, hot_starts, places, out_starts, decisions, symbols, extras, positions, before, after, faults,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """From what was decoded to changes: position in the block, old bits, new bits."""
    b = tl.program_id(0)
    at, hot = tl.load(old_at + b), tl.load(hot_starts + b)
    begin, end = tl.load(out_starts + b), tl.load(out_starts + b + 1)
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = tl.load(places + hot + tl.load(decisions + j, mask=some, other=0).to(tl.int64), mask=some, other=0)
        old = _load(at, i.to(tl.int64), some, ITEM)
        symbol = tl.load(symbols + j, mask=some, other=1).to(tl.int32)
        far = some & (((symbol - 1) >> 1) >= DIRECT)
        new, wrong = _moved(old, symbol, tl.load(extras + j, mask=far, other=0), ITEM)
        tl.store(positions + j, i, mask=some)
        tl.store(before + j, old, mask=some)
        tl.store(after + j, new, mask=some)
        if tl.sum((wrong & some).to(tl.int32)) > 0:
            tl.store(faults + b, 6)


# What is remembered


@triton.jit
def mark_later(
    block_tile, cuts, first_chunk, change_starts, positions, before, after, changed, down, later,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Mark changes, those that go down, and of the weights below the cut (as they were, in later) which are then."""
    b = tl.program_id(0)
    cut = tl.load(cuts + tl.load(block_tile + b)).to(tl.int64) << SHIFT
    begin, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    first = tl.load(first_chunk + b) * ROWS
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = tl.load(positions + j, mask=some, other=0)
        word = first + (i // 32).to(tl.int64)
        bit = tl.full([SPAN], 1, tl.uint32) << (i % 32)
        old = tl.load(before + j, mask=some, other=0).to(tl.uint32)
        new = tl.load(after + j, mask=some, other=1).to(tl.uint32)
        _, _, _, falls = _step(old, new, ITEM)
        below = (new & mask).to(tl.int64) < cut
        tl.atomic_or(changed + word, bit, mask=some, sem="relaxed")
        tl.atomic_or(down + word, bit, mask=some & falls, sem="relaxed")
        tl.atomic_or(later + word, bit, mask=some & below, sem="relaxed")
        tl.atomic_and(later + word, bit ^ ALL, mask=some & (below == 0), sem="relaxed")


@triton.jit
def count_marks(bitmap, counts):
    """How many bits each chunk has."""
    c = tl.program_id(0).to(tl.int64)
    tl.store(counts + c, tl.sum(_count(tl.load(bitmap + c * ROWS + tl.arange(0, ROWS)))))


@triton.jit
def remember(known_map, changed, down, later, known_at, later_at, last, index, remembered):
    """The history afterwards: of each weight that is then below the cut, when it last changed, and which way."""
    c = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    known, moved = tl.load(known_map + c * ROWS + row), tl.load(changed + c * ROWS + row)
    falls, words = tl.load(down + c * ROWS + row), tl.load(later + c * ROWS + row)
    n = _count(words)
    memory = tl.load(known_at + c) + _before(_count(known))
    place = tl.load(later_at + c) + _before(n)
    for _ in range(tl.max(n)):
        some = n > 0
        low = _lowest(words)
        kept = some & ((known & low) != 0)
        age = tl.load(last + memory + _count(known & (low - 1)), mask=kept, other=0).to(tl.int32)
        now = index + tl.where((falls & low) != 0, 128, 0)
        tl.store(remembered + place, tl.where((moved & low) != 0, now, age).to(tl.uint8), mask=some)
        words &= words - 1
        place += some.to(tl.int32)
        n -= some.to(tl.int32)


# Writing


@triton.jit
def _flat(begin, position, start, columns, stride):
    """The index in its tensor of a weight of a tile, by its position in a block."""
    p = begin + position.to(tl.int64)
    return start + (p // columns) * stride + p % columns


@triton.jit
def apply(
    tile_at, block_tile, begins, tile_start, tile_columns, tile_stride, change_starts, positions, values,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write changed weights where they belong in their tensors."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    at, begin = tl.load(tile_at + tile), tl.load(begins + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    first, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    for k in range(first + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = _flat(begin, tl.load(positions + j, mask=some, other=0), start, columns, stride)
        _store(at, i, tl.load(values + j, mask=some, other=0), some, ITEM)


@triton.jit
def gather(addresses, total, out, ITEM: tl.constexpr, SPAN: tl.constexpr):
    """Read single weights."""
    j = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    at = tl.load(addresses + j, mask=j < total, other=0)
    tl.store(out + j, _load(at, 0, j < total, ITEM), mask=j < total)


# The digest


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _chunk_keys(chunk):
    z = chunk.to(tl.uint64) * 0x9E3779B97F4A7C15
    return _mix(z + FIRST_SEED), _mix(z + SECOND_SEED)


@triton.jit
def digest_change(
    block_tile, begins, tile_start, tile_columns, tile_stride, change_starts, positions, before, after, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How the sums of tiles move: of each change, every 16-bit unit times the key of its place in the tensor."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    begin = tl.load(begins + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    from_, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = _flat(begin, tl.load(positions + j, mask=some, other=0), start, columns, stride) * per
        old = tl.load(before + j, mask=some, other=0).to(tl.uint64)
        new = tl.load(after + j, mask=some, other=0).to(tl.uint64)
        for unit in tl.static_range(per):
            moved = ((new >> (16 * unit)) & 0xFFFF) - ((old >> (16 * unit)) & 0xFFFF)
            left, right = _chunk_keys((i + unit) >> CHUNK_BITS)
            place = (i + unit) & (CHUNK - 1)
            first += moved * tl.load(keys + place, mask=some, other=0).to(tl.uint64) * left
            second += moved * tl.load(keys + CHUNK + place, mask=some, other=0).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def digest_bytes(data, starts, begins, block_tile, keys, sums, SPAN: tl.constexpr):
    """The sums of tiles' bytes, block after block: byte begins[b] of its tile is the first of block b."""
    b = tl.program_id(0)
    tile, begin = tl.load(block_tile + b), tl.load(begins + b)
    from_, end = tl.load(starts + b), tl.load(starts + b + 1)
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        i = begin + j - from_
        u = tl.load(data + j, mask=j < end, other=0).to(tl.uint64)
        left, right = _chunk_keys(i >> CHUNK_BITS)
        place = i & (CHUNK - 1)
        first += u * tl.load(keys + place).to(tl.uint64) * left
        second += u * tl.load(keys + CHUNK + place).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def _wide(a, b):
    """The product of words of 32 bits, in 64."""
    return a.to(tl.uint64) * b.to(tl.uint64)


@triton.jit
def _units(at, i, size):
    """Words of four units; those outside are zero."""
    left = size - 4 * i
    x = tl.load(at + i, mask=(i >= 0) & (left > 0), other=0)
    bits = (16 * tl.minimum(tl.maximum(left, 0), 3)).to(tl.uint64)
    return tl.where(left >= 4, x, x & ((tl.full(i.shape, 1, tl.uint64) << bits) - 1))


@triton.jit
def _weighed(x, k0, k1, k2, k3):
    """The sum of four units times their keys."""
    low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
    return _wide(low & 0xFFFF, k0) + _wide(low >> 16, k1) + _wide(high & 0xFFFF, k2) + _wide(high >> 16, k3)


@triton.jit
def recount(block_at, units, starts, block_tile, keys, sums, PER: tl.constexpr):
    """Sum the 16-bit units of blocks times their keys: program (b, q) takes the q-th run of PER (even) chunks of units.

    A block begins at unit starts[b] of its tensor, a multiple of 4.
    """
    b = tl.program_id(0)
    at = tl.load(block_at + b).to(tl.pointer_type(tl.uint64))
    begin, size = tl.load(starts + b), tl.load(units + b)
    word = tl.arange(0, 1024)
    k = keys + 4 * word
    k0, k1, k2, k3 = tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3)
    k += CHUNK
    q0, q1, q2, q3 = tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3)
    first = tl.zeros([1024], tl.uint64)
    second = tl.zeros([1024], tl.uint64)
    chunk = (begin >> CHUNK_BITS) + tl.program_id(1) * PER
    last = (begin + size - 1) >> CHUNK_BITS
    for _ in range((tl.minimum(PER, last + 1 - chunk) + 1) // 2):
        x = _units(at, (chunk * CHUNK - begin) // 4 + word, size)
        y = _units(at, ((chunk + 1) * CHUNK - begin) // 4 + word, size)  # both are under way before either is used
        one, two = _chunk_keys(chunk)
        first += _weighed(x, k0, k1, k2, k3) * one
        second += _weighed(x, q0, q1, q2, q3) * two
        one, two = _chunk_keys(chunk + 1)
        first += _weighed(y, k0, k1, k2, k3) * one
        second += _weighed(y, q0, q1, q2, q3) * two
        chunk += 2
    tile = tl.load(block_tile + b)
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def recount_any(
    block_at, sizes, block_tile, begins, tile_start, tile_columns, tile_stride, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The same of any tile: single bytes, columns of a tensor, or beginning between words."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    at, begin, size = tl.load(block_at + b), tl.load(begins + b), tl.load(sizes + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        i = _flat(begin, j, start, columns, stride) * per
        x = _load(at, j, j < size, ITEM).to(tl.uint64)
        for unit in tl.static_range(per):
            u = (x >> (16 * unit)) & 0xFFFF
            left, right = _chunk_keys((i + unit) >> CHUNK_BITS)
            place = (i + unit) & (CHUNK - 1)
            first += u * tl.load(keys + place).to(tl.uint64) * left
            second += u * tl.load(keys + CHUNK + place).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))
