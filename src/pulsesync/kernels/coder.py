"""The entropy coder for CPUs: count, encode and decode the hot weights of blocks. Part of `cpu`.

One call takes a span of consecutive weights that holds one block or many: `borders` says where each begins and `ranks`
where its bytes begin in the history; positions count from the start of the span. A block without hot changes is neither
counted nor coded, but its history goes along.

Hot weights are found 64 at a time. The coder keeps up to 32 independent rANS states that share one stream of words, so
that a CPU overlaps their long latencies and a GPU can give each its own thread.
"""

from typing import Any

import numpy as np

from pulsesync.kernels import spec
from pulsesync.kernels.jit import NEVER, ONE, U, compiled, inner, popcount, trailing_zeros

_SPAN = 4096  # weights searched at a time
_GATHER = U(0x0102040810204080)  # brings the lowest bits of eight bytes together in the highest byte
_P = spec.PROBABILITY_BITS
_SLOT = U((1 << spec.PROBABILITY_BITS) - 1)
_LOW = U(spec.STATE_LOW)


@inner
def _hot(bits: Any, start: int, end: int, cut: Any, hot: Any, flags: Any) -> Any:
    """Write the positions of the weights below the cut, among the _SPAN from start on but before end, to hot.

    Returns how many there are.

    Comparing into bytes is a loop that compilers vectorise; eight bytes then become eight bits of a mask by one
    multiplication. Positions are written eight at a time, whether there are eight or not (hot has room for it),
    because a loop that ends at another place for every 64 weights costs more in mispredicted branches.
    """
    span = bits[start : min(start + _SPAN, end)]
    magnitude = span.dtype.type((ONE << U(8 * bits.itemsize - 1)) - ONE)
    for i in range(span.size):
        flags[i] = span.dtype.type(span[i] & magnitude) < cut
    for i in range(span.size, (span.size + 63) // 64 * 64):
        flags[i] = 0
    words = flags.view(np.uint64)
    count = U(0)
    for group in range((span.size + 63) // 64):
        mask = U(0)
        for q in range(8):
            mask |= ((words[8 * group + q] * _GATHER) >> U(56)) << U(8 * q)
        first, at = U(start + 64 * group), count
        count += popcount(mask)
        while True:
            for q in range(8):
                hot[at + U(q)] = first + trailing_zeros(mask)
                mask &= mask - ONE
            at += U(8)
            if mask == 0:
                break
    return count


@inner
def _step(bits: Any, symbol: Any, extra: Any, width: Any) -> Any:
    """Move one weight by the step that a symbol and its extra bits name."""
    full = (ONE << width) - ONE
    sign = ONE << (width - ONE)
    t = (symbol - ONE) >> ONE
    size = t + ONE if t < spec.DIRECT else (ONE << (t - U(spec.DIRECT - 3))) + extra
    if t >= width + U(spec.DIRECT - 3):  # a size of the table's list, which is given as the extra bits
        size = extra
    a = bits ^ (full if bits & sign else sign)
    a = (a - size if (symbol - ONE) & ONE else a + size) & full
    return a ^ (sign if a & sign else full)


@inner
def _room(old: Any, last: Any, tracked: int, cut: int, index: int, entering: Any) -> Any:
    """An array that the history after a patch fits in."""
    return np.empty(((last.size if tracked == cut else old.size) if index else 0) + entering.size, np.uint8)


@inner
def _let_in(i: Any, e: Any, entering_at: Any, entering: Any, index: Any, remembered: Any, kept: Any) -> Any:
    """Remember the entering weights that stand before weight i."""
    while e < U(entering.size) and U(entering_at[e]) < i:
        remembered[kept] = index | entering[e]
        kept += ONE
        e += ONE
    return e, kept


@inner
def _carry(
    old: Any, begin: int, end: int, shift: int, cut: int, last: Any, rank: Any, known: Any, tracked: int, hot: Any,
    flags: Any, index: int, e: Any, entering_at: Any, entering: Any, remembered: Any, kept: Any,
) -> Any:  # fmt: skip
    """Let the history of a block without hot changes go along; return e, kept, and whether it is of these weights."""
    if not index:
        return e, kept, True
    if tracked == cut and (e >= U(entering.size) or U(entering_at[e]) >= U(end)):
        for k in range(rank, known):
            remembered[kept] = last[k]
            kept += ONE
        return e, kept, True
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    small, tracked_cut = old.dtype.type(cut << shift), U(tracked) << U(shift)
    for start in range(begin, end, _SPAN):
        for h in range(_hot(old, start, end, small, hot, flags)):
            i, age = U(hot[h]), U(0)
            if (U(old[i]) & magnitude) < tracked_cut:
                if rank >= known:
                    return e, kept, False
                age = U(last[rank])
                rank += ONE
            e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
            remembered[kept] = age
            kept += ONE
    e, kept = _let_in(U(end), e, entering_at, entering, index, remembered, kept)
    return e, kept, rank == known


@compiled
def count_blocks(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, ranks: Any, tracked: int,
    positions: Any, new: Any, symbols: Any, counts: Any, index: int, entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Add the blocks' decisions to counts, laid out as `tables.Contexts` says; return how many each block has.

    positions, new and symbols hold the changed hot weights alone. If this is patch `index` of an epoch (0: of none),
    the history after it is returned too, as `advance_history` would make it, and where the bytes of each block begin
    in it; for that, entering holds the cold weights that turn hot. A block whose history is not of its weights has -1
    decisions, and nothing after it is counted.
    """
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    hot_cut, remembered, kept = U(cut) << U(shift), _room(old, last, tracked, cut, index, entering), U(0)
    decisions, new_ranks = np.zeros(borders.size - 1, np.int64), np.zeros(borders.size, np.int64)
    e, p = U(0), U(0)
    following = U(positions[0]) if positions.size else NEVER
    for b in range(borders.size - 1):
        begin, end, rank, known = borders[b], borders[b + 1], U(ranks[b]), U(ranks[b + 1])
        if following >= U(end):
            e, kept, fits = _carry(
                old, begin, end, shift, cut, last, rank, known, tracked, hot, flags, index, e, entering_at, entering,
                remembered, kept,
            )  # fmt: skip
            new_ranks[b + 1] = kept
            if not fits:
                decisions[b] = -1
                return decisions, remembered, new_ranks
            continue
        decided = 0
        for start in range(begin, end, _SPAN):
            for h in range(_hot(old, start, end, small, hot, flags)):
                i = U(hot[h])
                size = U(old[i]) & magnitude
                row = U(rows[size >> U(shift)])
                age = U(0)
                if size < tracked_cut:
                    if rank >= known:
                        decisions[b] = -1
                        return decisions, remembered, new_ranks
                    age = U(last[rank])
                    rank += ONE
                    row += (age & U(0x7F)) << wide
                if index:
                    e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
                decided += 1
                if i != following:
                    counts[row] += 1
                    if index:
                        remembered[kept] = age
                        kept += ONE
                    continue
                up_or_down = U(symbols[p]) - ONE
                counts[row + (up_or_down ^ (age >> U(7))) + ONE] += 1
                if index and (U(new[p]) & magnitude) < hot_cut:
                    remembered[kept] = U(index) | ((up_or_down & ONE) << U(7))
                    kept += ONE
                p += ONE
                following = U(positions[p]) if p < positions.size else NEVER
        if index:
            e, kept = _let_in(U(end), e, entering_at, entering, index, remembered, kept)
        decisions[b], new_ranks[b + 1] = decided if rank == known else -1, kept
        if rank != known:
            break
    return decisions, remembered[:kept], new_ranks


@inner
def _put_raw(x: Any, value: Any, k: Any, stream: Any, at: Any) -> Any:
    """Code k <= 16 bits as they are."""
    if x >= ONE << (U(32) - k):
        at -= ONE
        stream[at] = x & U(0xFFFF)
        x >>= U(16)
    return (x << k) | value, at


@compiled
def encode_blocks(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, ranks: Any, tracked: int,
    positions: Any, symbols: Any, extras: Any, cumulative: Any, reciprocals: Any, decisions: Any, lanes: Any,
) -> Any:  # fmt: skip
    """Return the blocks' streams (uint16) one after the other, and where each begins.

    A stream is the lanes' first states, then the words in the order a reader takes them. rANS is last in, first out, so
    blocks are walked from their ends, the last one first. positions, symbols and extras hold the changed hot weights
    alone. Multiplying 32-bit numbers matters here: some CPUs take three times as long for 64-bit ones.
    """
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    room = 3 * positions.size
    for b in range(decisions.size):
        room += 2 * lanes[b] + decisions[b] if decisions[b] else 0
    stream, ends = np.empty(room, np.uint16), np.zeros(decisions.size + 1, np.int64)
    at, listed = U(room), U(8 * old.itemsize + spec.DIRECT - 3)  # size classes from here on have no raw bits
    states = np.empty(1 << spec.MAX_LANES_LOG2, np.uint32)
    p = U(positions.size)
    following = U(positions[p - ONE]) if p else NEVER
    for b in range(decisions.size - 1, -1, -1):
        ends[b + 1] = at
        if decisions[b] == 0:
            continue
        lane_mask, rank, j = U(lanes[b] - 1), U(ranks[b + 1]), U(decisions[b])
        begin_of_block, end_of_block = borders[b], borders[b + 1]
        states[: lanes[b]] = _LOW
        spans = (end_of_block - begin_of_block - 1) // _SPAN
        for start in range(begin_of_block + spans * _SPAN, begin_of_block - 1, -_SPAN):
            for h in range(np.int64(_hot(old, start, end_of_block, small, hot, flags)) - 1, -1, -1):
                i = U(hot[h])
                j -= ONE
                lane = j & lane_mask
                size = U(old[i]) & magnitude
                row = U(rows[size >> U(shift)])
                down = U(0)
                if size < tracked_cut:
                    rank -= ONE
                    age = U(last[rank])
                    row += (age & U(0x7F)) << wide
                    down = age >> U(7)
                x, begin = U(states[lane]), U(0)
                if i == following:
                    p -= ONE
                    following = U(positions[p - ONE]) if p else NEVER
                    symbol = ((U(symbols[p]) - ONE) ^ down) + ONE
                    row += symbol
                    begin = U(cumulative[row])
                    t = (symbol - ONE) >> ONE
                    if spec.DIRECT <= t < listed:
                        k, extra = t - U(spec.DIRECT - 3), U(extras[p])
                        if k > 16:
                            x, at = _put_raw(x, extra >> U(16), k - U(16), stream, at)
                            extra, k = extra & U(0xFFFF), U(16)
                        x, at = _put_raw(x, extra, k, stream, at)
                frequency = U(np.uint32(U(cumulative[row + ONE]) - begin))
                if x >= frequency << U(32 - _P):
                    at -= ONE
                    stream[at] = x & U(0xFFFF)
                    x >>= U(16)
                quotient = (U(np.uint32(x)) * U(reciprocals[row])) >> U(32)  # or one less than that
                rest = x - quotient * frequency
                if rest >= frequency:
                    quotient += ONE
                    rest -= frequency
                states[lane] = (quotient << U(_P)) + rest + begin
        for lane in range(lanes[b] - 1, -1, -1):
            at -= U(2)
            stream[at] = states[lane] & np.uint32(0xFFFF)
            stream[at + ONE] = states[lane] >> np.uint32(16)
    ends[0] = at
    return stream[at:].copy(), ends - np.int64(at)


@compiled
def decode_blocks(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, ranks: Any, tracked: int,
    cumulative: Any, symbol_count: int, sizes: Any, lanes: Any, words: Any, ends: Any, changes: Any, index: int,
    entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Return positions, new bits, history and where its blocks begin (see `count_blocks`), and 0 or the fault met.

    sizes: of steps, those that the table lists (uint32); its last symbols are theirs, up and down. The words of block b
    are those from ends[b] to ends[b + 1]. Never reads or writes out of bounds, whatever they are; stops at the first
    fault (see `spec.FAULTS`).
    """
    width = U(8 * old.itemsize)
    magnitude = (ONE << (width - ONE)) - ONE
    last_symbol = U(symbol_count - 1)
    sign, longest = magnitude + ONE, width + U(spec.DIRECT - 4)
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    total = changes.sum()
    positions, new = np.empty(total, np.uint32), np.empty(total, old.dtype)
    hot_cut, remembered, kept = U(cut) << U(shift), _room(old, last, tracked, cut, index, entering), U(0)
    new_ranks = np.zeros(borders.size, np.int64)
    states = np.empty(1 << spec.MAX_LANES_LOG2, np.uint32)
    e, k, count = U(0), U(0), U(0)
    for b in range(borders.size - 1):
        begin_of_block, end_of_block, rank, known = borders[b], borders[b + 1], U(ranks[b]), U(ranks[b + 1])
        if changes[b] == 0:
            e, kept, fits = _carry(
                old, begin_of_block, end_of_block, shift, cut, last, rank, known, tracked, hot, flags, index, e,
                entering_at, entering, remembered, kept,
            )  # fmt: skip
            new_ranks[b + 1] = kept
            if not fits:
                return positions, new, remembered, new_ranks, spec.FOREIGN_WRITE
            continue
        count += U(changes[b])
        at, end_of_stream, lane_mask = U(ends[b]), U(ends[b + 1]), U(lanes[b] - 1)
        if end_of_stream - at < 2 * lanes[b]:
            return positions, new, remembered, new_ranks, 1
        for lane in range(lanes[b]):
            states[lane] = U(words[at]) | (U(words[at + ONE]) << U(16))
            at += U(2)
        j = U(0)
        for start in range(begin_of_block, end_of_block, _SPAN):
            for h in range(_hot(old, start, end_of_block, small, hot, flags)):
                i = U(hot[h])
                lane = j & lane_mask
                j += ONE
                bits = U(old[i])
                size = bits & magnitude
                row = U(rows[size >> U(shift)])
                age = U(0)
                if size < tracked_cut:
                    if rank >= known:
                        return positions, new, remembered, new_ranks, spec.FOREIGN_WRITE
                    age = U(last[rank])
                    rank += ONE
                    row += (age & U(0x7F)) << wide
                if index:
                    e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
                x = U(states[lane])
                slot = x & _SLOT
                frequency = U(cumulative[row + ONE])
                if slot < frequency:
                    x = frequency * (x >> U(_P)) + slot
                    if x < _LOW:
                        if at >= end_of_stream:
                            return positions, new, remembered, new_ranks, 1
                        x = (x << U(16)) | U(words[at])
                        at += ONE
                    states[lane] = x
                    if index:
                        remembered[kept] = age
                        kept += ONE
                    continue
                symbol = ONE
                while symbol < last_symbol and U(cumulative[row + symbol + ONE]) <= slot:
                    symbol += ONE
                begin, end = U(cumulative[row + symbol]), U(cumulative[row + symbol + ONE])
                if slot >= end or k >= count:
                    return positions, new, remembered, new_ranks, 2 if slot >= end else 3
                x = (end - begin) * (x >> U(_P)) + slot - begin
                if x < _LOW:
                    if at >= end_of_stream:
                        return positions, new, remembered, new_ranks, 1
                    x = (x << U(16)) | U(words[at])
                    at += ONE
                extra = U(0)
                t = (symbol - ONE) >> ONE
                if t > longest:
                    extra = U(sizes[t - longest - ONE])
                elif t >= spec.DIRECT:
                    raw, taken = t - U(spec.DIRECT - 3), U(0)
                    while raw > 0:
                        part = min(raw, U(16))
                        extra |= (x & ((ONE << part) - ONE)) << taken
                        x >>= part
                        raw -= part
                        taken += part
                        if x < _LOW:
                            if at >= end_of_stream:
                                return positions, new, remembered, new_ranks, 1
                            x = (x << U(16)) | U(words[at])
                            at += ONE
                states[lane] = x
                up_or_down = (symbol - ONE) ^ (age >> U(7))
                if t == longest and (extra or (up_or_down & ONE) != U((bits & sign) == 0)):
                    return positions, new, remembered, new_ranks, 6
                moved = _step(bits, up_or_down + ONE, extra, width)
                positions[k], new[k] = i, moved
                k += ONE
                if index and (moved & magnitude) < hot_cut:
                    remembered[kept] = U(index) | ((up_or_down & ONE) << U(7))
                    kept += ONE
        if rank != known:
            return positions, new, remembered, new_ranks, spec.FOREIGN_WRITE
        if k != count:
            return positions, new, remembered, new_ranks, 3
        if at != end_of_stream:
            return positions, new, remembered, new_ranks, 4
        for lane in range(lanes[b]):
            if states[lane] != _LOW:
                return positions, new, remembered, new_ranks, 4
        if index:
            e, kept = _let_in(U(end_of_block), e, entering_at, entering, index, remembered, kept)
        new_ranks[b + 1] = kept
    return positions, new, remembered[:kept], new_ranks, 0
