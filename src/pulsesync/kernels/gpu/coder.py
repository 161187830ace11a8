"""The entropy coder: each thread of a warp is a lane of a block, so that a warp codes several blocks with few lanes.

`order` has the numbers of the blocks, those with the most lanes first; warp w has those from firsts[w] to firsts[w +
1], which all have the same number of lanes. The state of a block is kept by each of its lanes.
"""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import (
    DIRECT,
    LOW,
    NO_TABLE,
    OTHER_COUNT,
    PLACES,
    ROW,
    STREAM_TOO_LONG,
    STREAM_TOO_SHORT,
    TOTAL,
    P,
    ballot,
    popcount,
)


@triton.jit
def _lanes_of(order, firsts, lanes):
    """For each thread: its block, its lane there and whether it has one; lanes per block; the threads of its block."""
    w = tl.program_id(0)
    first, last = tl.load(firsts + w), tl.load(firsts + w + 1)
    n = tl.load(lanes + tl.load(order + first))
    thread = tl.arange(0, 32)
    lane = thread & (n - 1)
    which = first + thread // n
    some = which < last
    b = tl.load(order + which, mask=some, other=0)
    group = (tl.full([32], 0xFFFFFFFF, tl.uint32) >> (32 - n).to(tl.uint32)) << (thread - lane).to(tl.uint32)
    lower = ((tl.full([32], 1, tl.uint32) << thread.to(tl.uint32)) - 1) & group
    return b, lane, some, n, group, lower


@triton.jit
def _encode_round(
    x, at, change, take, share, changed, raw, any_raw, steps, stream, bit, group, lower, WIDE: tl.constexpr
):  # fmt: skip
    """Code one decision of each active lane; words are written before `at`, and the steps are those before `change`.

    changed: the lanes with a change. raw: how many bits of its step each lane writes, and any_raw: the most.
    """
    pair = share.to(tl.uint32)
    begin, frequency = pair & 0xFFFF, pair >> 16
    change -= popcount(changed & group)
    y = x
    if any_raw > 0:
        one = tl.full([32], 1, tl.uint64)
        extra = tl.load(steps + (change + popcount(changed & lower)), mask=raw > 0, other=0)
        extra &= ((one << raw.to(tl.uint64)) - 1).to(tl.uint32)  # without the highest bit, which is in the symbol
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
        spills = take & ((y >> (32 - P)) >= frequency)
        has0 = ballot(spills, bit)
        at -= popcount(has0 & group) + popcount(has1 & group)
        place = at + popcount(has0 & lower) + popcount(has1 & lower)
        if WIDE:
            at -= popcount(has2 & group)
            place += popcount(has2 & lower) - popcount(has2 & group)
        then = place + spills.to(tl.int32)
        tl.store(stream + then, w1.to(tl.uint16), mask=full & (then >= 0))
        if WIDE:
            then += full.to(tl.int32)
            tl.store(stream + then, w2.to(tl.uint16), mask=(((has2 >> bit) & 1) != 0) & (then >= 0))
    else:
        spills = take & ((y >> (32 - P)) >= frequency)
        has0 = ballot(spills, bit)
        at -= popcount(has0 & group)
        place = at + popcount(has0 & lower)
    tl.store(stream + place, (y & 0xFFFF).to(tl.uint16), mask=spills & (place >= 0))
    y = tl.where(spills, y >> 16, y)
    quotient = tl.umulhi(y, (share >> 32).to(tl.uint32))  # or one less than that
    rest = y - quotient * frequency
    over = rest >= frequency
    quotient = tl.where(over, quotient + 1, quotient)
    rest = tl.where(over, rest - frequency, rest)
    x = tl.where(take, (quotient << P) + rest + begin, x)
    return x, at, change


@triton.jit(do_not_specialize=["listed"])
def encode(
    order, firsts, lanes, rows, symbols, steps, hot_starts, hot_ends, change_starts, shares, listed, out_starts,
    stream, sizes, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Code each block from its end, a round of lanes at a time; its words end where the next block's buffer begins.

    While four rounds are coded, the shares of the next four are fetched, and the decisions of the four after these: a
    round waits for no memory. steps: the step of each change; those whose size class is `listed` or higher have no raw
    bits. shares: see `tables.shares`. sizes: how many words a block has; where that is more than its buffer has,
    nothing outside is written.
    """
    b, lane, some, n, group, lower = _lanes_of(order, firsts, lanes)
    bit = tl.arange(0, 32).to(tl.uint32)
    hot = tl.load(hot_starts + b, mask=some, other=0)
    total = (tl.load(hot_ends + b, mask=some, other=0) - hot).to(tl.int32)
    low = tl.load(out_starts + b, mask=some, other=0)
    room = (tl.load(out_starts + b + 1, mask=some, other=0) - low).to(tl.int32)
    first_change = tl.load(change_starts + b, mask=some, other=0)
    # changes from this one on are coded
    change = (tl.load(change_starts + b + 1, mask=some, other=0) - first_change).to(tl.int32)
    stream += low
    steps += first_change
    rows += hot
    symbols += hot
    x = tl.full([32], LOW, tl.uint32)
    at = room
    rounds = (total + n - 1) // n
    j = (rounds - 1) * n + lane  # below zero: no decision
    s0, r0 = _decision(symbols, rows, j, total)
    s1, r1 = _decision(symbols, rows, j - n, total)
    s2, r2 = _decision(symbols, rows, j - 2 * n, total)
    s3, r3 = _decision(symbols, rows, j - 3 * n, total)
    n0, m0 = _decision(symbols, rows, j - 4 * n, total)
    n1, m1 = _decision(symbols, rows, j - 5 * n, total)
    n2, m2 = _decision(symbols, rows, j - 6 * n, total)
    n3, m3 = _decision(symbols, rows, j - 7 * n, total)
    p0, p1 = _share(shares, s0, r0, j, total, BITS), _share(shares, s1, r1, j - n, total, BITS)
    p2, p3 = _share(shares, s2, r2, j - 2 * n, total, BITS), _share(shares, s3, r3, j - 3 * n, total, BITS)
    for _ in range((tl.max(rounds) + 3) // 4):
        t0, t1, t2, t3 = (j >= 0) & (j < total), j >= n, j >= 2 * n, j >= 3 * n
        c0, c1, c2, c3 = ballot(s0 > 0, bit), ballot(s1 > 0, bit), ballot(s2 > 0, bit), ballot(s3 > 0, bit)
        w0, w1, w2, w3 = _raw_bits(s0, listed), _raw_bits(s1, listed), _raw_bits(s2, listed), _raw_bits(s3, listed)
        a0, a1 = tl.max(w0.to(tl.int32)), tl.max(w1.to(tl.int32))
        a2, a3 = tl.max(w2.to(tl.int32)), tl.max(w3.to(tl.int32))
        later = j - 4 * n
        q0, q1 = _share(shares, n0, m0, later, total, BITS), _share(shares, n1, m1, later - n, total, BITS)
        q2, q3 = _share(shares, n2, m2, later - 2 * n, total, BITS), _share(shares, n3, m3, later - 3 * n, total, BITS)
        s0, s1, s2, s3 = n0, n1, n2, n3
        n0, m0 = _decision(symbols, rows, j - 8 * n, total)
        n1, m1 = _decision(symbols, rows, j - 9 * n, total)
        n2, m2 = _decision(symbols, rows, j - 10 * n, total)
        n3, m3 = _decision(symbols, rows, j - 11 * n, total)
        x, at, change = _encode_round(x, at, change, t0, p0, c0, w0, a0, steps, stream, bit, group, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t1, p1, c1, w1, a1, steps, stream, bit, group, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t2, p2, c2, w2, a2, steps, stream, bit, group, lower, WIDE)
        x, at, change = _encode_round(x, at, change, t3, p3, c3, w3, a3, steps, stream, bit, group, lower, WIDE)
        j = later
        p0, p1, p2, p3 = q0, q1, q2, q3
    at -= 2 * n
    place = at + 2 * lane
    mine = some & (place >= 0)
    tl.store(stream + place, (x & 0xFFFF).to(tl.uint16), mask=mine)
    tl.store(stream + place + 1, (x >> 16).to(tl.uint16), mask=mine)
    tl.store(sizes + b, (room - at).to(tl.int64), mask=some & (lane == 0))


@triton.jit
def _raw_bits(symbol, listed):
    """How many bits of its step a symbol leaves to be written, 0 where there is no change."""
    t = (symbol - 1) >> 1
    return tl.where((symbol > 0) & (t >= DIRECT) & (t < listed), t - (DIRECT - 3), 0).to(tl.uint32)


@triton.jit
def _decision(symbols, rows, j, total):
    """Symbol and row of decisions."""
    some = (j >= 0) & (j < total)
    symbol = tl.load(symbols + j, mask=some, other=0).to(tl.int32)
    return symbol, tl.load(rows + j, mask=some, other=0).to(tl.int32) & ROW


@triton.jit
def _share(shares, symbol, row, j, total, BITS: tl.constexpr):
    """The share of a decision's symbol: where it begins, how wide it is, and its reciprocal."""
    return tl.load(shares + ((row << BITS) + symbol), mask=(j >= 0) & (j < total), other=1 << 16)


@triton.jit
def pack(stream, room_ends, sizes, out_starts, out, SPAN: tl.constexpr):
    """Copy the words of all blocks to their bytes in the payloads, low byte first."""
    b = tl.program_id(0)
    size = tl.load(sizes + b)
    begin, to = tl.load(room_ends + b) - size, tl.load(out_starts + b)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        word = tl.load(stream + begin + j, mask=j < size, other=0)
        tl.store(out + to + 2 * j, (word & 0xFF).to(tl.uint8), mask=j < size)
        tl.store(out + to + 2 * j + 1, (word >> 8).to(tl.uint8), mask=j < size)


@triton.jit
def _likely_round(x, at, out, total, j, decision, first, stream, end, out_end, bit, group, lower):
    """Decode one decision of each lane by the first four entries of its row, which are enough for almost all.

    Also returns the lanes for which they are not, and what is to be stored: where, what, and whether.
    """
    take = j < total
    slot = (x & (TOTAL - 1)).to(tl.int32)
    stop0 = ((first >> 16) & 0xFFFF).to(tl.int32)
    stop1 = ((first >> 32) & 0xFFFF).to(tl.int32)
    stop2 = (first >> 48).to(tl.int32)
    moves, twice = slot >= stop0, slot >= stop1
    begin = tl.where(twice, stop1, tl.where(moves, stop0, 0))
    stop = tl.where(twice, stop2, tl.where(moves, stop1, stop0))
    y = (stop - begin).to(tl.uint32) * (x >> P) + (slot - begin).to(tl.uint32)
    has = take & (y < LOW)
    need, changed = ballot(has, bit), ballot(take & moves, bit)
    mine = at + popcount(need & lower)
    word = tl.load(stream + mine, mask=has & (mine < end), other=0).to(tl.uint32)
    place = out + popcount(changed & lower)
    named = ((moves.to(tl.int32) + twice.to(tl.int32) - 1) ^ (decision >> 15)) + 1
    x = tl.where(take, tl.where(has, (y << 16) | word, y), x)
    far = take & (slot >= stop2)
    value = (j + named * PLACES).to(tl.uint32)
    return x, at + popcount(need & group), out + popcount(changed & group), far, place, value, take & moves


@triton.jit
def _decode_round(
    x, at, out, total, lost, j, decision, first, stream, end, table, symbol_count, listed, out_end, changes, extras,
    bit, group, lower, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode one decision of each lane that has one left, whatever it is; a block with a fault has none left."""
    take = j < total
    slot = (x & (TOTAL - 1)).to(tl.int32)
    stop0 = ((first >> 16) & 0xFFFF).to(tl.int32)
    row = table + ((decision & ROW) << BITS)
    symbol, begin, stop = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32), stop0
    search = (take & (slot >= stop0)).to(tl.int32)
    while tl.max(search) > 0:
        symbol += search
        begin = tl.where(search > 0, stop, begin)
        stop = tl.where(search > 0, tl.load(row + symbol + 1, mask=search > 0, other=0).to(tl.int32), stop)
        search = ((search > 0) & (slot >= stop) & (symbol + 1 < symbol_count)).to(tl.int32)
    lost |= ballot(take & (slot >= stop), bit) & group
    change = take & (symbol > 0)
    changed = ballot(change, bit)
    place = out + popcount(changed & lower)
    keep = change & (place < out_end)
    y = (stop - begin).to(tl.uint32) * (x >> P) + (slot - begin).to(tl.uint32)
    t = (symbol - 1) >> 1
    raw = tl.where(change & (t >= DIRECT) & (t < listed), t - (DIRECT - 3), 0).to(tl.uint32)
    low = tl.minimum(raw, 16)
    has0 = take & (y < LOW)
    # the number of words that each lane needs is known before any is read
    refilled = tl.where(has0, y << 16, y) >> low
    has1 = (raw > 0) & (refilled < LOW)
    need0, need1 = ballot(has0, bit), ballot(has1, bit)
    mine = at + popcount(need0 & lower) + popcount(need1 & lower)
    at += popcount(need0 & group) + popcount(need1 & group)
    if WIDE:
        refilled = tl.where(has1, refilled << 16, refilled)
        has2 = (raw > 16) & ((refilled >> (raw - low)) < LOW)
        need2 = ballot(has2, bit)
        mine += popcount(need2 & lower)
        at += popcount(need2 & group)
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
    tl.store(extras + place, extra, mask=keep & (raw > 0))
    named = ((symbol - 1) ^ (decision >> 15)) + 1
    tl.store(changes + place, (j + named * PLACES).to(tl.uint32), mask=keep)
    out += popcount(changed & group)
    total = tl.where((at > end) | (out > out_end) | (lost != 0), 0, total)
    return x, at, out, total, lost


@triton.jit(do_not_specialize=["symbol_count", "listed"])
def decode(
    order, firsts, lanes, numbers, stream, starts, rooms, found, rows, table, quads, symbol_count, listed, out_starts,
    changes, extras, faults, BITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Decode the blocks, a round of lanes at a time: for each change its decision and symbol, and its extra bits.

    numbers: of the blocks in their pile, whose lists of decisions begin at `rooms`; found: for each of these, how many
    decisions it has, and another number. Symbols whose size class is `listed` or higher have no extra bits. quads: the
    table, four entries in a word. While four rounds are decoded, the entries for the next four are fetched, and the
    rows of the four after these. Never reads or writes out of bounds, whatever the stream contains. faults: 0, or the
    fault (see `spec.FAULTS`).
    """
    b, lane, some, n, group, lower = _lanes_of(order, firsts, lanes)
    bit = tl.arange(0, 32).to(tl.uint32)
    begin = tl.load(starts + b, mask=some, other=0)
    end = (tl.load(starts + b + 1, mask=some, other=0) - begin).to(tl.int32)
    number = tl.load(numbers + b, mask=some, other=0)
    hot = tl.load(rooms + number, mask=some, other=0)
    room = tl.load(rooms + number + 1, mask=some, other=0) - hot
    decisions = tl.minimum(tl.load(found + 2 * number, mask=some, other=0), room).to(tl.int32)
    first_out = tl.load(out_starts + b, mask=some, other=0)
    out_end = (tl.load(out_starts + b + 1, mask=some, other=0) - first_out).to(tl.int32)
    stream += begin
    changes += first_out
    extras += first_out
    rows += hot
    short = end < 2 * n
    on = some & (short == 0)
    total = tl.where(on, decisions, 0)
    x = tl.load(stream + 2 * lane, mask=on, other=0).to(tl.uint32)
    x = x | (tl.load(stream + 2 * lane + 1, mask=on, other=1).to(tl.uint32) << 16)
    at = tl.zeros([32], tl.int32) + 2 * n
    out = tl.zeros([32], tl.int32)
    lost = tl.zeros([32], tl.uint32)
    j = lane
    d0, d1 = _row(rows, j, total), _row(rows, j + n, total)
    d2, d3 = _row(rows, j + 2 * n, total), _row(rows, j + 3 * n, total)
    n0, n1 = _row(rows, j + 4 * n, total), _row(rows, j + 5 * n, total)
    n2, n3 = _row(rows, j + 6 * n, total), _row(rows, j + 7 * n, total)
    f0, f1 = _first(quads, d0, j < total, BITS), _first(quads, d1, j + n < total, BITS)
    f2, f3 = _first(quads, d2, j + 2 * n < total, BITS), _first(quads, d3, j + 3 * n < total, BITS)
    for _ in range((tl.max(total) + 4 * n - 1) // (4 * n)):
        later = j + 4 * n
        g0, g1 = _first(quads, n0, later < total, BITS), _first(quads, n1, later + n < total, BITS)
        g2, g3 = _first(quads, n2, later + 2 * n < total, BITS), _first(quads, n3, later + 3 * n < total, BITS)
        m0, m1 = _row(rows, j + 8 * n, total), _row(rows, j + 9 * n, total)
        m2, m3 = _row(rows, j + 10 * n, total), _row(rows, j + 11 * n, total)
        x1, at1, out1, r0, p0, v0, k0 = _likely_round(
            x, at, out, total, j, d0, f0, stream, end, out_end, bit, group, lower
        )  # fmt: skip
        x1, at1, out1, r1, p1, v1, k1 = _likely_round(
            x1, at1, out1, total, j + n, d1, f1, stream, end, out_end, bit, group, lower
        )  # fmt: skip
        x1, at1, out1, r2, p2, v2, k2 = _likely_round(
            x1, at1, out1, total, j + 2 * n, d2, f2, stream, end, out_end, bit, group, lower
        )  # fmt: skip
        x1, at1, out1, r3, p3, v3, k3 = _likely_round(
            x1, at1, out1, total, j + 3 * n, d3, f3, stream, end, out_end, bit, group, lower
        )  # fmt: skip
        rare = r0 | r1 | r2 | r3 | ((total > 0) & ((at1 > end) | (out1 > out_end)))
        if tl.max(rare.to(tl.int32)) == 0:
            x, at, out = x1, at1, out1
            tl.store(changes + p0, v0, mask=k0)
            tl.store(changes + p1, v1, mask=k1)
            tl.store(changes + p2, v2, mask=k2)
            tl.store(changes + p3, v3, mask=k3)
        else:  # the same rounds again, and nothing of the above has been stored
            x, at, out, total, lost = _decode_round(
                x, at, out, total, lost, j, d0, f0, stream, end, table, symbol_count, listed, out_end, changes, extras,
                bit, group, lower, BITS, WIDE,
            )  # fmt: skip
            x, at, out, total, lost = _decode_round(
                x, at, out, total, lost, j + n, d1, f1, stream, end, table, symbol_count, listed, out_end, changes,
                extras, bit, group, lower, BITS, WIDE,
            )  # fmt: skip
            x, at, out, total, lost = _decode_round(
                x, at, out, total, lost, j + 2 * n, d2, f2, stream, end, table, symbol_count, listed, out_end, changes,
                extras, bit, group, lower, BITS, WIDE,
            )  # fmt: skip
            x, at, out, total, lost = _decode_round(
                x, at, out, total, lost, j + 3 * n, d3, f3, stream, end, table, symbol_count, listed, out_end, changes,
                extras, bit, group, lower, BITS, WIDE,
            )  # fmt: skip
        d0, d1, d2, d3, f0, f1, f2, f3 = n0, n1, n2, n3, g0, g1, g2, g3
        n0, n1, n2, n3 = m0, m1, m2, m3
        j = later
    unfinished = (ballot(on & (x != LOW), bit) & group) != 0
    fault = tl.where(out != out_end, OTHER_COUNT, tl.where((at != end) | unfinished, STREAM_TOO_LONG, 0))
    # `at` is also after the end of a stream that is too short.
    fault = tl.where(lost != 0, NO_TABLE, tl.where(at > end, STREAM_TOO_SHORT, fault))
    tl.store(faults + b, fault.to(tl.int32), mask=some & (lane == 0))


@triton.jit
def _row(rows, j, total):
    """Rows of decisions, with their top bits."""
    return tl.load(rows + j, mask=j < total, other=0).to(tl.int32)


@triton.jit
def _first(quads, decision, take, BITS: tl.constexpr):
    """The first four entries of a row: where the shares of its first symbols begin."""
    return tl.load(quads + ((decision & ROW) << (BITS - 2)), mask=take, other=0)
