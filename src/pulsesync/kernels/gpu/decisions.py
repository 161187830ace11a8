"""From changes to decisions about hot weights, how often each is taken, and back to changes."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import CHUNK, DIRECT, ROW, ROWS, load_bits, lowest_bit, popcount, prefix, step_of


@triton.jit
def decide(
    chunk_block, first_chunk, hot_map, bitmap, offsets, before, after, hot_at, hot_change_at, rows,
    symbols, sizes, cold_positions, cold_steps, ITEM: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Write the changes of hot weights among the decisions, as symbols, and how far they go; cold ones as steps."""
    c = tl.program_id(0).to(tl.int64)
    begin = (c - tl.load(first_chunk + tl.load(chunk_block + c))) * CHUNK
    row = tl.arange(0, ROWS)
    hot, words = tl.load(hot_map + c * ROWS + row), tl.load(bitmap + c * ROWS + row)
    n = popcount(words)
    first, first_hot = tl.load(offsets + c), tl.load(hot_change_at + c)
    change = first + prefix(n)
    hot_before = prefix(popcount(hot & words))
    decision = tl.load(hot_at + c) + prefix(popcount(hot))
    hot_change = first_hot + hot_before
    cold = first - first_hot + prefix(n) - hot_before
    for _ in range(tl.max(n)):
        some = n > 0
        low = lowest_bit(words)
        old = tl.load(before + change, mask=some, other=0).to(tl.uint32)
        new = tl.load(after + change, mask=some, other=1).to(tl.uint32)
        symbol, _, size, falls = step_of(old, new, ITEM)
        is_hot = some & ((hot & low) != 0)
        is_cold = some & ((hot & low) == 0)
        j = decision + popcount(hot & (low - 1))
        if HISTORY:
            symbol = ((symbol - 1) ^ (tl.load(rows + j, mask=is_hot, other=0) >> 15).to(tl.int32)) + 1
        tl.store(symbols + j, symbol.to(tl.uint8), mask=is_hot)
        tl.store(sizes + hot_change, size.to(tl.uint32), mask=is_hot)
        tl.store(cold_positions + cold, begin + 32 * row + popcount(low - 1), mask=is_cold)
        tl.store(cold_steps + cold, tl.where(falls, -size, size), mask=is_cold)
        words &= words - 1
        change += some.to(tl.int32)
        hot_change += is_hot.to(tl.int32)
        cold += is_cold.to(tl.int32)
        n -= some.to(tl.int32)


# Counts differ in every patch: no value is worth a compilation, and neither is the step from 32 bits to 64.
@triton.jit(do_not_specialize=["total"])
def count_rows(rows, total: tl.int64, counts, BINS: tl.constexpr, SPAN: tl.constexpr, PER: tl.constexpr):
    """How many decisions each row of the tables has."""
    begin = tl.program_id(0).to(tl.int64) * SPAN * PER
    found = tl.zeros([BINS], tl.int32)
    for k in range(PER):
        j = begin + k * SPAN + tl.arange(0, SPAN)
        r = tl.load(rows + j, mask=j < total, other=0).to(tl.int32) & ROW
        found += tl.histogram(r, BINS, mask=j < total)
    tl.atomic_add(counts + tl.arange(0, BINS), found.to(tl.int64), mask=found > 0)


@triton.jit(do_not_specialize=["total", "places", "copies"])
def count_symbols(
    rows, symbols, total: tl.int64, counts, places, copies, BITS: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Of decisions that are changes: how many each symbol of each row has. Counted in copies, which are then added."""
    pid = tl.program_id(0).to(tl.int64)
    mine = counts + (pid % copies) * places
    j = pid * SPAN + tl.arange(0, SPAN)
    s = tl.load(symbols + j, mask=j < total, other=0).to(tl.int32)
    r = tl.load(rows + j, mask=s > 0, other=0).to(tl.int32) & ROW
    tl.atomic_add(mine + (r << BITS) + s, tl.full([SPAN], 1, tl.int32), mask=s > 0, sem="relaxed")


@triton.jit
def _moved(old, symbol, extra, ITEM: tl.constexpr):
    """A weight after the step that a symbol and its extra bits name, and whether there is no such step.

    The extra bits of a symbol whose size the table lists are that size.
    """
    sign: tl.constexpr = 1 << (8 * ITEM - 1)
    full: tl.constexpr = 2 * sign - 1
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
    wide = old.to(tl.int64)
    key = ((wide ^ tl.where((wide & sign) != 0, full, sign)) + tl.where(down, -size, size)) & full
    return key ^ tl.where((key & sign) != 0, sign, full), wrong


@triton.jit
def land(
    old_at, hot_starts, places, out_starts, decisions, symbols, extras, sizes, positions, before, after, faults,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """From what was decoded to changes: position in the block, old bits, new bits. Blocks with a fault are left out.

    sizes: of steps, those that the table lists.
    """
    listed: tl.constexpr = DIRECT + 8 * ITEM - 3  # the size class of the first of them
    b = tl.program_id(0)
    at, hot = tl.load(old_at + b), tl.load(hot_starts + b)
    begin, end = tl.load(out_starts + b), tl.load(out_starts + b + 1)
    end = tl.where(tl.load(faults + b) == 0, end, begin)
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = tl.load(places + hot + tl.load(decisions + j, mask=some, other=0).to(tl.int64), mask=some, other=0)
        old = load_bits(at, i.to(tl.int64), some, ITEM)
        symbol = tl.load(symbols + j, mask=some, other=1).to(tl.int32)
        t = (symbol - 1) >> 1
        extra = tl.load(extras + j, mask=some & (t >= DIRECT) & (t < listed), other=0)
        extra += tl.load(sizes + t - listed, mask=some & (t >= listed), other=0)
        new, wrong = _moved(old, symbol, extra, ITEM)
        tl.store(positions + j, i, mask=some)
        tl.store(before + j, old, mask=some)
        tl.store(after + j, new, mask=some)
        if tl.sum((wrong & some).to(tl.int32)) > 0:
            tl.store(faults + b, 6)
