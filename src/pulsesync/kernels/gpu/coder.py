"""The entropy coder: a warp for each block, whose threads are the coder's lanes."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import DIRECT, LOW, ROW, TOTAL, P, ballot, popcount


@triton.jit
def _encode_round(
    x, at, change, take, symbol, begin, stop, steps, listed, low, stream, bit, lower, WIDE: tl.constexpr
):  # fmt: skip
    """Code one decision of each lane that takes one; words go before `at`, and the steps are those before `change`."""
    frequency = stop - begin
    changed = ballot(symbol > 0, bit)
    change -= popcount(changed)
    y = x
    t = (symbol - 1) >> 1
    raw = tl.where((symbol > 0) & (t >= DIRECT) & (t < listed), t - (DIRECT - 3), 0).to(tl.uint32)
    if tl.max(raw.to(tl.int32)) > 0:
        one = tl.full([32], 1, tl.uint64)
        extra = tl.load(steps + change + popcount(changed & lower), mask=raw > 0, other=0)
        extra &= ((one << raw.to(tl.uint64)) - 1).to(tl.uint32)  # without the highest bit, which the symbol says
        if WIDE:
            high = tl.where(raw > 16, raw - 16, 0).to(tl.uint32)
            full = (high > 0) & (y.to(tl.uint64) >= (one << (32 - high).to(tl.uint64)))
            w2 = y & 0xFFFF
            has2 = ballot(full, bit)
            y = tl.where(full, y >> 16, y)
            y = tl.where(high > 0, (y << high) | (extra >> 16), y)
            extra = tl.where(high > 0, extra & 0xFFFF, extra)
            raw = tl.where(high > 0, 16, raw).to(tl.uint32)
        full = (raw > 0) & (y.to(tl.uint64) >= (one << (32 - raw).to(tl.uint64)))
        w1 = y & 0xFFFF
        has1 = ballot(full, bit)
        y = tl.where(full, y >> 16, y)
        y = tl.where(raw > 0, (y << raw) | extra, y)
        spills = take & (y.to(tl.uint64) >= (frequency.to(tl.uint64) << (32 - P)))
        has0 = ballot(spills, bit)
        at -= popcount(has0) + popcount(has1)
        place = at + popcount(has0 & lower) + popcount(has1 & lower)
        if WIDE:
            at -= popcount(has2)
            place += popcount(has2 & lower) - popcount(has2)
        then = place + spills.to(tl.int32)
        tl.store(stream + then, w1.to(tl.uint16), mask=full & (then >= low))
        if WIDE:
            then += full.to(tl.int32)
            tl.store(stream + then, w2.to(tl.uint16), mask=(((has2 >> bit) & 1) != 0) & (then >= low))
    else:
        spills = take & (y.to(tl.uint64) >= (frequency.to(tl.uint64) << (32 - P)))
        has0 = ballot(spills, bit)
        at -= popcount(has0)
        place = at + popcount(has0 & lower)
    tl.store(stream + place, (y & 0xFFFF).to(tl.uint16), mask=spills & (place >= low))
    y = tl.where(spills, y >> 16, y)
    quotient = y // frequency
    x = tl.where(take, (quotient << P) + (y - quotient * frequency) + begin, x)
    return x, at, change


@triton.jit(do_not_specialize=["listed"])
def encode(
    rows, symbols, steps, hot_starts, change_starts, lanes, table, listed, out_starts, stream, sizes,
    BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Code each block from its end, a round of lanes at a time; its words end where the next block's room begins.

    What the next four rounds need is under way while four are coded. steps: how far each change goes; those whose size
    class is `listed` or higher have no raw bits. sizes: how many words a block has; where that is more than there is
    room for, nothing outside is written.
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
    j = tl.where(lane < n, (rounds - 1) * n + lane, -1)
    rows += hot
    symbols += hot
    s0, r0 = _decision(symbols, rows, j, total)
    s1, r1 = _decision(symbols, rows, j - n, total)
    s2, r2 = _decision(symbols, rows, j - 2 * n, total)
    s3, r3 = _decision(symbols, rows, j - 3 * n, total)
    for _ in range((rounds + 3) // 4):
        t0, t1, t2, t3 = (j >= 0) & (j < total), j >= n, j >= 2 * n, j >= 3 * n
        b0, e0 = _share(table, s0, r0, t0, BITS)
        b1, e1 = _share(table, s1, r1, t1, BITS)
        b2, e2 = _share(table, s2, r2, t2, BITS)
        b3, e3 = _share(table, s3, r3, t3, BITS)
        later = j - 4 * n
        n0, m0 = _decision(symbols, rows, later, total)
        n1, m1 = _decision(symbols, rows, later - n, total)
        n2, m2 = _decision(symbols, rows, later - 2 * n, total)
        n3, m3 = _decision(symbols, rows, later - 3 * n, total)
        x, at, change = _encode_round(x, at, change, t0, s0, b0, e0, steps, listed, low, stream, bit, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t1, s1, b1, e1, steps, listed, low, stream, bit, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t2, s2, b2, e2, steps, listed, low, stream, bit, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t3, s3, b3, e3, steps, listed, low, stream, bit, lower, WIDE)
        j = tl.where(lane < n, later, -1)
        s0, r0, s1, r1, s2, r2, s3, r3 = n0, m0, n1, m1, n2, m2, n3, m3
    at -= 2 * n
    place = at + 2 * lane
    mine = (lane < n) & (place >= low)
    tl.store(stream + place, (x & 0xFFFF).to(tl.uint16), mask=mine)
    tl.store(stream + place + 1, (x >> 16).to(tl.uint16), mask=mine)
    tl.store(sizes + b, end - at)


@triton.jit
def _decision(symbols, rows, j, total):
    """Symbol and row of decisions."""
    some = (j >= 0) & (j < total)
    symbol = tl.load(symbols + j, mask=some, other=0).to(tl.int32)
    return symbol, tl.load(rows + j, mask=some, other=0).to(tl.int32) & ROW


@triton.jit
def _share(table, symbol, row, take, BITS: tl.constexpr):
    """Where the share of a symbol begins, and where it stops."""
    at = table + (row << BITS) + symbol
    return tl.load(at, mask=take, other=0).to(tl.uint32), tl.load(at + 1, mask=take, other=1).to(tl.uint32)


@triton.jit
def pack(stream, room_ends, sizes, out_starts, out, SPAN: tl.constexpr):
    """Bring the words of all blocks to their bytes in the payloads, low byte first."""
    b = tl.program_id(0)
    size = tl.load(sizes + b)
    begin, to = tl.load(room_ends + b) - size, tl.load(out_starts + b)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        word = tl.load(stream + begin + j, mask=j < size, other=0)
        tl.store(out + to + 2 * j, (word & 0xFF).to(tl.uint8), mask=j < size)
        tl.store(out + to + 2 * j + 1, (word >> 8).to(tl.uint8), mask=j < size)


@triton.jit
def _decode_round(
    x, at, out, fault, take, j, decision, stop, stream, end, table, symbol_count, listed, out_end, out_decisions,
    out_symbols, out_extras, bit, lower, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Take one decision of each lane that takes one; nothing after a fault. stop: of the share of no change."""
    take = take & (fault == 0)
    row = table + ((decision & ROW) << BITS)
    slot = (x & (TOTAL - 1)).to(tl.int32)
    change = take & (slot >= stop)
    changed = ballot(change, bit)
    if changed == 0:  # nothing changed in this round
        y = stop.to(tl.uint32) * (x >> P) + slot.to(tl.uint32)
        needs = take & (y < LOW)
        need = ballot(needs, bit)
        mine = at + popcount(need & lower)
        word = tl.load(stream + mine, mask=needs & (mine < end), other=0).to(tl.uint32)
        x = tl.where(take, tl.where(needs, (y << 16) | word, y), x)
        at += popcount(need)
        lost = 0
    else:
        begin = tl.zeros_like(slot)
        symbol = tl.zeros_like(slot)
        search = change.to(tl.int32)
        while tl.max(search) > 0:
            symbol += search
            begin = tl.where(search > 0, stop, begin)
            stop = tl.where(search > 0, tl.load(row + symbol + 1, mask=search > 0, other=0).to(tl.int32), stop)
            search = ((search > 0) & (slot >= stop) & (symbol + 1 < symbol_count)).to(tl.int32)
        lost = tl.max((take & (slot >= stop)).to(tl.int32))
        y = (stop - begin).to(tl.uint32) * (x >> P) + (slot - begin).to(tl.uint32)
        t = (symbol - 1) >> 1
        raw = tl.where(change & (t >= DIRECT) & (t < listed), t - (DIRECT - 3), 0).to(tl.uint32)
        low = tl.minimum(raw, 16)
        has0 = take & (y < LOW)
        # how many words each lane needs is known before any is read
        refilled = tl.where(has0, y << 16, y) >> low
        has1 = (raw > 0) & (refilled < LOW)
        need0, need1 = ballot(has0, bit), ballot(has1, bit)
        mine = at + popcount(need0 & lower) + popcount(need1 & lower)
        at += popcount(need0) + popcount(need1)
        if WIDE:
            refilled = tl.where(has1, refilled << 16, refilled)
            has2 = (raw > 16) & ((refilled >> (raw - low)) < LOW)
            need2 = ballot(has2, bit)
            mine += popcount(need2 & lower)
            at += popcount(need2)
        one = tl.full([32], 1, tl.uint32)
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
        place = out + popcount(changed & lower)
        keep = change & (place < out_end)
        tl.store(out_decisions + place, j.to(tl.uint32), mask=keep)
        tl.store(out_symbols + place, (((symbol - 1) ^ (decision >> 15)) + 1).to(tl.uint8), mask=keep)
        tl.store(out_extras + place, extra, mask=keep & (raw > 0))
        out += popcount(changed)
    found = tl.where(lost > 0, 2, tl.where(at > end, 1, tl.where(out > out_end, 3, 0)))
    return x, at, out, tl.where(fault == 0, found, fault)


@triton.jit(do_not_specialize=["symbol_count", "listed"])
def decode(
    stream, starts, lanes, hot_starts, hot_ends, rows, table, symbol_count, listed, out_starts, out_decisions,
    out_symbols, out_extras, faults, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode the blocks, a round of lanes at a time: of each change its decision, symbol and extra bits.

    Symbols whose size class is `listed` or higher have no extra bits. What the next four rounds need is under way while
    four are decoded. Never reads or writes out of bounds, whatever the stream holds. faults: 0, or what was met (see
    `spec.FAULTS`).
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
    lower = (tl.full([32], 1, tl.uint32) << bit) - 1  # lanes before this one
    j = tl.where(on, lane, total)  # total: of no decision
    left = tl.where(fault == 0, total, 0)
    rows += hot
    d0, d1 = _row(rows, j, total), _row(rows, j + n, total)
    d2, d3 = _row(rows, j + 2 * n, total), _row(rows, j + 3 * n, total)
    while left > 0:
        t0, t1, t2, t3 = j < total, j + n < total, j + 2 * n < total, j + 3 * n < total
        s0, s1 = _stop(table, d0, t0, BITS), _stop(table, d1, t1, BITS)
        s2, s3 = _stop(table, d2, t2, BITS), _stop(table, d3, t3, BITS)
        later = j + 4 * n
        n0, n1 = _row(rows, later, total), _row(rows, later + n, total)
        n2, n3 = _row(rows, later + 2 * n, total), _row(rows, later + 3 * n, total)
        x, at, out, fault = _decode_round(
            x, at, out, fault, t0, j, d0, s0, stream, end, table, symbol_count, listed, out_end, out_decisions,
            out_symbols, out_extras, bit, lower, BITS, WIDE,
        )  # fmt: skip
        x, at, out, fault = _decode_round(
            x, at, out, fault, t1, j + n, d1, s1, stream, end, table, symbol_count, listed, out_end, out_decisions,
            out_symbols, out_extras, bit, lower, BITS, WIDE,
        )  # fmt: skip
        x, at, out, fault = _decode_round(
            x, at, out, fault, t2, j + 2 * n, d2, s2, stream, end, table, symbol_count, listed, out_end, out_decisions,
            out_symbols, out_extras, bit, lower, BITS, WIDE,
        )  # fmt: skip
        x, at, out, fault = _decode_round(
            x, at, out, fault, t3, j + 3 * n, d3, s3, stream, end, table, symbol_count, listed, out_end, out_decisions,
            out_symbols, out_extras, bit, lower, BITS, WIDE,
        )  # fmt: skip
        d0, d1, d2, d3 = n0, n1, n2, n3
        left = tl.where(fault == 0, left - 4 * n, 0)
        j = tl.where(on, later, total)
    unfinished = tl.sum((on & (x != LOW)).to(tl.int32)) > 0
    end_fault = tl.where(out != out_end, 3, tl.where((at != end) | unfinished, 4, 0))
    tl.store(faults + b, tl.where(fault != 0, fault, end_fault).to(tl.int32))


@triton.jit
def _row(rows, j, total):
    """Rows of decisions, with their top bits."""
    return tl.load(rows + j, mask=j < total, other=0).to(tl.int32)


@triton.jit
def _stop(table, decision, take, BITS: tl.constexpr):
    """Where the share of no change stops."""
    return tl.load(table + ((decision & ROW) << BITS) + 1, mask=take, other=TOTAL).to(tl.int32)
