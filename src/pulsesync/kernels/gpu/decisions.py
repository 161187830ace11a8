"""From changes to decisions about hot weights, how often each is taken, and back to changes."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import (
    CHUNK,
    COLD_HALF_CIRCLE,
    DIRECT,
    HOT_AMONG_COLD,
    PLACES,
    ROW,
    ROWS,
    STEP_TOO_LONG,
    find_last,
    load_bits,
    ordered,
    popcount,
    prefix,
    select_bit,
    step_of,
)


# Counts differ in every patch, so kernels are not specialized for them.
@triton.jit(do_not_specialize=["places", "copies", "most"])
def decide(
    chunk_block, first_chunk, hot_map, offsets, positions, before, after, hot_at, hot_change_at, rows,
    symbols, sizes, cold_positions, cold_steps, counts, places, copies, longs, most,
    BITS: tl.constexpr, ITEM: tl.constexpr, HISTORY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write the changes of hot weights among the decisions, as symbols and step sizes; cold ones as steps.

    counts: of each symbol of each row, in copies that are summed later, to reduce contention between programs. longs:
    the number of hot changes with steps longer than a symbol can express; then the sizes of the first `most` of them,
    in any order.
    """
    c = tl.program_id(0).to(tl.int64)
    change, end = tl.load(offsets + c), tl.load(offsets + c + 1)
    if change < end:
        begin = (c - tl.load(first_chunk + tl.load(chunk_block + c))) * CHUNK
        hot = tl.load(hot_map + c * ROWS + tl.arange(0, ROWS))
        ranks = prefix(popcount(hot))
        decided, hot_change = tl.load(hot_at + c), tl.load(hot_change_at + c)
        cold = change - hot_change
        mine = counts + (c % copies) * places
        for k in range(change, end, SPAN):
            j = k + tl.arange(0, SPAN)
            some = j < end
            i = tl.load(positions + j, mask=some, other=0).to(tl.int64)
            old = tl.load(before + j, mask=some, other=0).to(tl.uint32)
            new = tl.load(after + j, mask=some, other=1).to(tl.uint32)
            symbol, _, size, falls = step_of(old, new, ITEM)
            inside = tl.where(some, i - begin, 0).to(tl.int32)
            word, bit = tl.gather(hot, inside >> 5, 0), tl.full([SPAN], 1, tl.uint32) << (inside & 31).to(tl.uint32)
            is_hot = some & ((word & bit) != 0)
            is_cold = some & ((word & bit) == 0)
            d = decided + tl.gather(ranks, inside >> 5, 0) + popcount(word & (bit - 1))
            row = tl.load(rows + d, mask=is_hot, other=0).to(tl.int32)
            if HISTORY:
                symbol = ((symbol - 1) ^ (row >> 15)) + 1
            tl.store(symbols + d, symbol.to(tl.uint8), mask=is_hot)
            tl.atomic_add(
                mine + ((row & ROW) << BITS) + symbol, tl.full([SPAN], 1, tl.int32), mask=is_hot, sem="relaxed"
            )
            hots, colds = is_hot.to(tl.int32), is_cold.to(tl.int32)
            tl.store(sizes + hot_change + prefix(hots), size.to(tl.uint32), mask=is_hot)
            tl.store(cold_positions + cold + prefix(colds), i, mask=is_cold)
            tl.store(cold_steps + cold + prefix(colds), tl.where(falls, -size, size), mask=is_cold)
            hot_change += tl.sum(hots)
            cold += tl.sum(colds)
            far = (is_hot & (size > DIRECT)).to(tl.int32)
            long = tl.sum(far)
            if (long > 0) & (tl.load(longs) <= most):  # a much larger number would not fit
                at = tl.atomic_add(longs, long, sem="relaxed") + prefix(far)
                tl.store(longs + 1 + at, size.to(tl.uint32).to(tl.int32, bitcast=True), mask=(far != 0) & (at < most))


@triton.jit(do_not_specialize=["ages", "places", "copies"])
def count_rows(rows, begins, ends, counts, ages, places, copies, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Count the decisions of each row of the tables, in blocks whose decisions are from begins to ends.

    The counts are those of the symbol "unchanged" in the counts of `decide`. Most weights have not changed in the
    epoch: they are counted by class, of which there are 32 at most, and the others one by one.
    """
    b = tl.program_id(0)
    begin, end = tl.load(begins + b), tl.load(ends + b)
    mine = counts + ((b * tl.num_programs(1) + tl.program_id(1)) % copies) * places
    found = tl.zeros([32], tl.int32)
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        r = tl.load(rows + j, mask=some, other=0).to(tl.int32) & ROW
        kind = r // ages
        old = kind * ages == r
        found += tl.histogram(kind, 32, mask=some & old)
        tl.atomic_add(mine + (r << BITS), tl.full([SPAN], 1, tl.int32), mask=some & (old == 0), sem="relaxed")
    kinds = tl.arange(0, 32)
    tl.atomic_add(mine + (kinds * ages << BITS), found, mask=found > 0, sem="relaxed")


@triton.jit
def _moved(old, symbol, extra, ITEM: tl.constexpr):
    """A weight after the step of a symbol and its extra bits, and whether the step is invalid.

    The extra bits of a symbol whose size the table lists are that size.
    """
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    longest: tl.constexpr = DIRECT + 8 * ITEM - 4
    t = (symbol - 1) >> 1
    one = tl.full(t.shape, 1, tl.int64)
    direct = t < DIRECT
    size = tl.where(direct, t.to(tl.int64) + 1, 0)
    power = tl.where(direct | (t > longest), 0, t - (DIRECT - 3)).to(tl.int64)
    size = tl.where(direct, size, extra.to(tl.int64) + (one << power))
    size = tl.where(t > longest, extra.to(tl.int64), size)
    down = ((symbol - 1) & 1) != 0
    wrong = (t == longest) & ((extra != 0) | (down == ((old & sign) != 0)))
    return _stepped(old, tl.where(down, -size, size), ITEM), wrong


@triton.jit
def _stepped(old, step, ITEM: tl.constexpr):
    """Weights after steps, each less than the circle."""
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
    key = (ordered(old, ITEM).to(tl.int64) + step) & full
    return key ^ tl.where((key & sign) != 0, sign, full)


@triton.jit
def land(
    old_at, numbers, first_chunk, hot_map, ranks, hot_at, rooms, out_starts, changes, extras, sizes, positions, before,
    after, faults, ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """From decoded decisions to changes: position in the block, old bits, new bits; zeros in blocks with a fault.

    A decision becomes a position by the marks of hot weights: its chunk, its word and its bit are searched for.
    numbers: of the blocks, of which `rooms` says where the list of decisions begins. sizes: the step sizes that the
    table lists.
    """
    listed: tl.constexpr = DIRECT + 8 * ITEM - 3  # the size class of the first of them
    k = tl.program_id(0)
    b = tl.load(numbers + k)
    at, hot = tl.load(old_at + b), tl.load(rooms + b)
    first = tl.load(first_chunk + b)
    chunks = tl.load(first_chunk + b + 1) - first
    begin, end, good = tl.load(out_starts + k), tl.load(out_starts + k + 1), tl.load(faults + k) == 0
    for from_ in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = from_ + tl.arange(0, SPAN)
        some = (j < end) & good
        change = tl.load(changes + j, mask=some, other=PLACES)
        decision, symbol = hot + (change % PLACES).to(tl.int64), (change // PLACES).to(tl.int32)
        chunk = find_last(hot_at, first, chunks, decision, 1)
        rank = (decision - tl.load(hot_at + chunk)).to(tl.int32)
        word = find_last(ranks, chunk * ROWS, tl.full([], ROWS, tl.int32), rank, 1)
        bit = select_bit(tl.load(hot_map + word), rank - tl.load(ranks + word).to(tl.int32))
        i = ((chunk - first) * CHUNK + (word - chunk * ROWS) * 32).to(tl.int32) + bit
        old = load_bits(at, i.to(tl.int64), some, ITEM)
        t = (symbol - 1) >> 1
        extra = tl.load(extras + j, mask=some & (t >= DIRECT) & (t < listed), other=0)
        extra += tl.load(sizes + t - listed, mask=some & (t >= listed), other=0)
        new, wrong = _moved(old, symbol, extra, ITEM)
        tl.store(positions + j, tl.where(some, i, 0).to(tl.uint32), mask=j < end)
        tl.store(before + j, old, mask=j < end)
        tl.store(after + j, tl.where(some, new, 0), mask=j < end)
        if tl.sum((wrong & some).to(tl.int32)) > 0:
            tl.store(faults + k, STEP_TOO_LONG)


@triton.jit
def step_at(
    old_at, block_tile, cuts, change_starts, positions, steps, before, after, faults,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """From positions in blocks, and the steps of the weights there, to their old and new bits.

    Weights of 8 bytes are only read. faults: of two kinds, each in its place: a weight is below the cut, or moves by
    half the circle in the wrong direction.
    """
    b = tl.program_id(0)
    at, least = tl.load(old_at + b), tl.load(cuts + tl.load(block_tile + b)).to(tl.int64) << SHIFT
    end = tl.load(change_starts + b + 1)
    for k in range(tl.load(change_starts + b), end, SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        old = load_bits(at, tl.load(positions + j, mask=some, other=0).to(tl.int64), some, ITEM)
        tl.store(before + j, old, mask=some)
        if ITEM < 8:
            sign: tl.constexpr = 1 << (8 * ITEM - 1)
            step = tl.load(steps + j, mask=some, other=1)
            hot = (old & (sign - 1)).to(tl.int64) < least
            half = (tl.abs(step) == sign) & ((step < 0) == ((old & sign) != 0))
            tl.store(after + j, _stepped(old, step, ITEM), mask=some)
            if tl.sum((some & hot).to(tl.int32)) > 0:
                tl.store(faults, HOT_AMONG_COLD)
            if tl.sum((some & half).to(tl.int32)) > 0:
                tl.store(faults + 1, COLD_HALF_CIRCLE)
