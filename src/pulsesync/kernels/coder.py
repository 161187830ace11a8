"""The entropy coder for CPUs: count, encode and decode the hot weights of blocks. Part of `cpu`.

One call processes a span of consecutive weights with one block or many: `borders` has where each begins, and `ranks`
where its bytes begin in the history; positions count from the start of the span. A block without hot changes is neither
counted nor coded, but its history is updated.

Weights are processed 4,096 at a time, in short loops with one task each: mark the hot ones in bits, list them, look up
their history and their rows of the tables, and only then decide. Nearly all decisions are "unchanged", so the loops
over decisions handle only that symbol, and changes are found by their rank among the marks, or are handled as
exceptions. What the count has looked up is kept for the encoder, two bytes per decision. The coder keeps up to 32
independent rANS states that share one stream of words, so that a CPU overlaps their long latencies and a GPU can give
each its own thread.

Arrays are passed to functions that process a chunk, never to ones that process a weight: numba may count references to
them at each call, with atomic instructions that cost more than the work.
"""

from typing import Any

import numpy as np

from pulsesync.kernels import spec
from pulsesync.kernels.jit import NEVER, ONE, U, compiled, inner, list_marked, mark_below, popcount, prefetch

_CHUNK = 4096  # weights processed at a time
_P = spec.PROBABILITY_BITS
_SLOT = U((1 << spec.PROBABILITY_BITS) - 1)
_LOW = U(spec.STATE_LOW)
_SET_BITS = np.array(  # of every byte, in eight entries each, for `list_marked`
    [([k for k in range(8) if byte >> k & 1] + [0] * 8)[:8] for byte in range(256)], np.uint16
).reshape(-1)


@inner
def _room_for_chunk() -> Any:
    """Arrays for a chunk: marks, the number of hot weights before each, and position and age of every hot weight."""
    marks, preceding = np.empty(_CHUNK // 64, np.uint64), np.empty(_CHUNK // 64, np.uint64)
    return marks, preceding, np.empty(_CHUNK + 8, np.uint16), np.empty(_CHUNK, np.uint8)


@inner
def _find(old: Any, start: Any, end: Any, cut: Any, marks: Any, preceding: Any, places: Any) -> Any:
    """Mark the weights from start to end whose magnitude is below the cut and list their positions.

    Return their number.

    The next chunk is prefetched meanwhile: the loops between two chunks are so long that the hardware prefetcher loses
    the stream.
    """
    magnitude = old.dtype.type((ONE << U(8 * old.itemsize - 1)) - ONE)
    groups = (end - start) >> U(6)
    for g in range(groups):
        prefetch(old, end + (U(g) << U(6)))
        marks[g] = mark_below(old, start + (U(g) << U(6)), cut)
    if groups << U(6) < end - start:
        mark, first = U(0), start + (groups << U(6))
        for i in range(end - first):
            mark |= U(old.dtype.type(old[first + U(i)] & magnitude) < cut) << U(i)
        marks[groups] = mark
        groups += ONE
    count = U(0)
    for g in range(groups):
        preceding[g] = count
        if marks[g]:
            count += list_marked(marks[g], U(g) << U(6), _SET_BITS, places, count)
    return count


@inner
def _below(mark: Any, place: Any) -> Any:
    """The number of bits in a mark below that of a position in the chunk."""
    return popcount(mark & ((ONE << (place & U(63))) - ONE))


@inner
def _look_up(
    old: Any, start: Any, count: Any, places: Any, shift: int, cut: int, firsts: Any, last: Any, rank: Any, known: Any,
    tracked: int, ages: Any, rows: Any, at: Any,
) -> Any:  # fmt: skip
    """Write history and row (from `at` on) of a chunk's hot weights.

    Return the rank after them, or NEVER if it exceeds `known`.
    """
    magnitude, tracked_cut = (ONE << U(8 * old.itemsize - 1)) - ONE, U(tracked) << U(shift)
    if tracked == cut:
        if rank + count > known:
            return NEVER
        for h in range(count):
            age = last[rank + U(h)]
            ages[h] = age
            rows[at + U(h)] = firsts[(U(old[start + U(places[h])]) & magnitude) >> U(shift)] + (age & U(0x7F))
        return rank + count
    for h in range(count):
        size, age = U(old[start + U(places[h])]) & magnitude, U(0)
        if size < tracked_cut:
            if rank >= known:
                return NEVER
            age = U(last[rank])
            rank += ONE
        ages[h] = age
        rows[at + U(h)] = firsts[size >> U(shift)] + (age & U(0x7F))
    return rank


@inner
def _first_rows(rows: Any, row_bits: int) -> Any:
    """The number of the row of each class, where no weight has changed yet."""
    out = np.empty(rows.size, np.uint32)
    for k in range(rows.size):
        out[k] = rows[k] >> row_bits
    return out


@inner
def _step(bits: Any, symbol: Any, extra: Any, width: Any) -> Any:
    """Move one weight by the step of a symbol and its extra bits."""
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
    """An array that is large enough for the history after a patch."""
    return np.empty(((last.size if tracked == cut else old.size) if index else 0) + entering.size, np.uint8)


@inner
def _keep(ages: Any, done: Any, end: Any, remembered: Any, kept: Any) -> Any:
    """Write the history of the hot weights of a chunk from done to end; return the number of bytes so far."""
    for h in range(end - done):
        remembered[kept + U(h)] = ages[done + U(h)]
    return kept + (end - done)


@inner
def _let_in(
    limit: Any, start: Any, marks: Any, preceding: Any, ages: Any, done: Any, e: Any, entering_at: Any, entering: Any,
    index: Any, remembered: Any, kept: Any,
) -> Any:  # fmt: skip
    """Write the history of the entering weights before a limit, each after the hot weights before it."""
    while e < U(entering.size) and U(entering_at[e]) < limit:
        place = U(entering_at[e]) - start
        rank = preceding[place >> U(6)] + _below(marks[place >> U(6)], place)
        kept = _keep(ages, done, rank, remembered, kept)
        done = rank
        remembered[kept] = index | entering[e]
        kept += ONE
        e += ONE
    return done, e, kept


@compiled
def count_blocks(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, ranks: Any, tracked: int,
    positions: Any, new: Any, symbols: Any, counts: Any, index: int, entering_at: Any, entering: Any, found: Any,
) -> Any:  # fmt: skip
    """See `cpu.count_blocks`; found has space for a row of every weight."""
    magnitude, wide = (ONE << U(8 * old.itemsize - 1)) - ONE, U(row_bits)
    small, hot_cut, firsts = old.dtype.type(cut << shift), U(cut) << U(shift), _first_rows(rows, row_bits)
    marks, preceding, places, ages = _room_for_chunk()
    unchanged = np.zeros(counts.size >> row_bits, np.int64)  # by row, close together
    remembered, kept = _room(old, last, tracked, cut, index, entering), U(0)
    decisions, new_ranks = np.zeros(borders.size - 1, np.int64), np.zeros(borders.size, np.int64)
    changed, turned = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
    e, p, decided = U(0), U(0), U(0)
    following = U(positions[0]) if positions.size else NEVER
    for b in range(borders.size - 1):
        start, end, rank, known = U(borders[b]), U(borders[b + 1]), U(ranks[b]), U(ranks[b + 1])
        counted = following < end
        if not counted and not index:
            continue
        if not counted and tracked == cut and (e >= U(entering.size) or U(entering_at[e]) >= end):
            kept = _keep(last, rank, known, remembered, kept)
            new_ranks[b + 1] = kept
            continue
        decided_before = decided
        while start < end and rank != NEVER:
            stop = min(start + U(_CHUNK), end)
            count = _find(old, start, stop, small, marks, preceding, places)
            rank = _look_up(
                old, start, count, places, shift, cut, firsts, last, rank, known, tracked, ages, found, decided
            )
            if rank == NEVER:
                break
            if counted:
                for h in range(count):
                    unchanged[found[decided + U(h)]] += 1
            done = U(0)
            while following < stop:
                place = following - start
                h = preceding[place >> U(6)] + _below(marks[place >> U(6)], place)
                row, up_or_down = U(found[decided + h]), U(symbols[p]) - ONE
                symbol = (up_or_down ^ (U(ages[h]) >> U(7))) + ONE
                changed[p], turned[p] = decided + h, symbol
                unchanged[row] -= 1
                counts[(row << wide) + symbol] += 1
                if index:
                    if (U(new[p]) & magnitude) < hot_cut:
                        ages[h] = U(index) | ((up_or_down & ONE) << U(7))
                    else:
                        done, e, kept = _let_in(
                            following, start, marks, preceding, ages, done, e, entering_at, entering, index, remembered,
                            kept,
                        )  # fmt: skip
                        kept = _keep(ages, done, h, remembered, kept)
                        done = h + ONE
                p += ONE
                following = U(positions[p]) if p < U(positions.size) else NEVER
            if index:
                done, e, kept = _let_in(
                    stop, start, marks, preceding, ages, done, e, entering_at, entering, index, remembered, kept
                )
                kept = _keep(ages, done, count, remembered, kept)
            if counted:
                decided += count
            start = stop
        if rank != known:
            decisions[b] = -1
            break
        decisions[b], new_ranks[b + 1] = decided - decided_before, kept
    for row in range(unchanged.size):
        counts[row << row_bits] += unchanged[row]
    return decisions, remembered[:kept], new_ranks, found[:decided].copy(), changed, turned


@inner
def _put_raw(x: Any, value: Any, k: Any, stream: Any, at: Any) -> Any:
    """Code k <= 16 bits as they are."""
    if x >= ONE << (U(32) - k):
        at -= ONE
        stream[at] = x & U(0xFFFF)
        x >>= U(16)
    return (x << k) | value, at


@inner
def _advance(x: Any, begin: Any, frequency: Any, reciprocal: Any) -> Any:
    """Code a symbol in a state that has space for it.

    Multiplication of 32-bit numbers matters: some CPUs need three times as long for 64-bit ones.
    """
    quotient = (U(np.uint32(x)) * reciprocal) >> U(32)  # or one less than that
    quotient += U(x - quotient * frequency >= frequency)
    return x + quotient * (U(1 << _P) - frequency) + begin


@compiled
def encode_blocks(
    rows: Any, row_bits: int, width: int, changed: Any, symbols: Any, extras: Any, cumulative: Any, reciprocals: Any,
    decisions: Any, lanes: Any,
) -> Any:  # fmt: skip
    """Return the blocks' streams (uint16) one after the other, and where each begins.

    rows, changed and symbols are results of the count: the row of every decision; which decisions are changes, and
    their symbols. Weights have `width` bits. A stream is the lanes' first states, then the words in the order in which
    a reader needs them. rANS is last in, first out, so decisions are processed from the last to the first.
    """
    wide, listed = U(row_bits), U(width + spec.DIRECT - 3)  # higher size classes have no raw bits
    unchanged = np.empty(cumulative.size >> row_bits, np.uint64)  # by row, reciprocal and frequency in one word
    for row in range(unchanged.size):
        unchanged[row] = U(reciprocals[row << row_bits]) << U(32) | U(cumulative[(row << row_bits) + 1])
    # By row: 2^46 over the frequency, rounded up. Multiplied by a state that has space, which is below 2^18 times the
    # frequency, this stays below 2^64 and yields the exact quotient, with a shorter dependency chain than `_advance`.
    exact = np.empty(unchanged.size, np.uint64)
    for row in range(exact.size):
        frequency = U(max(1, cumulative[(row << row_bits) + 1]))
        exact[row] = ((ONE << U(32 + _P)) + frequency - ONE) // frequency
    room = 3 * changed.size
    for b in range(decisions.size):
        room += 2 * lanes[b] + decisions[b] if decisions[b] else 0
    stream, ends = np.empty(room, np.uint16), np.zeros(decisions.size + 1, np.int64)
    states, at = np.empty(1 << spec.MAX_LANES_LOG2, np.uint32), U(room)
    d, p = U(rows.size), U(changed.size)
    for b in range(decisions.size - 1, -1, -1):
        ends[b + 1] = at
        if decisions[b] == 0:
            continue
        lane_mask, begin = U(lanes[b] - 1), d - U(decisions[b])
        for lane in range(lanes[b]):
            states[lane] = _LOW
        while d > begin:
            here = p > 0 and U(changed[p - ONE]) >= begin
            stop = U(changed[p - ONE]) + ONE if here else begin
            if lane_mask == 0:  # in a register: each decision depends on the state after the last one
                x = U(states[0])
                while d > stop:
                    d -= ONE
                    frequency = unchanged[rows[d]] & U(0xFFFF)
                    if x >= frequency << U(32 - _P):
                        at -= ONE
                        stream[at] = x & U(0xFFFF)
                        x >>= U(16)
                    x += (x * exact[rows[d]] >> U(32 + _P)) * (U(1 << _P) - frequency)
                states[0] = x
            while d > stop:
                d -= ONE
                lane, entry = (d - begin) & lane_mask, unchanged[rows[d]]
                x, frequency = U(states[lane]), entry & U(0xFFFF)
                if x >= frequency << U(32 - _P):
                    at -= ONE
                    stream[at] = x & U(0xFFFF)
                    x >>= U(16)
                states[lane] = _advance(x, U(0), frequency, entry >> U(32))
            if not here:
                break
            p -= ONE
            d -= ONE
            lane, symbol = (d - begin) & lane_mask, U(symbols[p])
            row, t, x = (U(rows[d]) << wide) + symbol, (symbol - ONE) >> ONE, U(states[lane])
            if spec.DIRECT <= t < listed:
                k, extra = t - U(spec.DIRECT - 3), U(extras[p])
                if k > 16:
                    x, at = _put_raw(x, extra >> U(16), k - U(16), stream, at)
                    extra, k = extra & U(0xFFFF), U(16)
                x, at = _put_raw(x, extra, k, stream, at)
            frequency = U(cumulative[row + ONE]) - U(cumulative[row])
            if x >= frequency << U(32 - _P):
                at -= ONE
                stream[at] = x & U(0xFFFF)
                x >>= U(16)
            states[lane] = _advance(x, U(cumulative[row]), frequency, U(reciprocals[row]))
        for lane in range(lanes[b] - 1, -1, -1):
            at -= U(2)
            stream[at] = states[lane] & np.uint32(0xFFFF)
            stream[at + ONE] = states[lane] >> np.uint32(16)
    ends[0] = at
    for b in range(ends.size):
        ends[b] -= np.int64(at)
    return stream[at:].copy(), ends


@inner
def _move_cold(old: Any, shift: int, cut: int, cold_at: Any, cold_steps: Any) -> Any:
    """Return cold weights after their steps, those that become hot (position, and 0x80 if down), and 0 or the fault."""
    width = U(8 * old.itemsize)
    full, sign, hot_cut = (ONE << width) - ONE, ONE << (width - ONE), U(cut) << U(shift)
    out = np.empty(cold_at.size, old.dtype)
    entering_at, entering, e = np.empty(cold_at.size, np.uint32), np.empty(cold_at.size, np.uint8), 0
    for c in range(cold_at.size):
        bits, step = U(old[cold_at[c]]), cold_steps[c]
        if (bits & (sign - ONE)) < hot_cut:
            return out, entering_at[:e], entering[:e], spec.HOT_AMONG_COLD
        if (U(step) if step > 0 else U(-step)) == sign and (step < 0) == (bits >= sign):
            return out, entering_at[:e], entering[:e], spec.COLD_HALF_CIRCLE
        a = ((bits ^ (full if bits & sign else sign)) + U(step)) & full
        out[c] = a ^ (sign if a & sign else full)
        if (U(out[c]) & (sign - ONE)) < hot_cut:
            entering_at[e], entering[e] = cold_at[c], 0x80 if step < 0 else 0
            e += 1
    return out, entering_at[:e], entering[:e], 0


@compiled
def decode_blocks(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, ranks: Any, tracked: int,
    cumulative: Any, symbol_count: int, sizes: Any, lanes: Any, words: Any, lengths: Any, changes: Any, index: int,
    cold_at: Any, cold_steps: Any,
) -> Any:  # fmt: skip
    """Return positions, old and new bits, history and where its blocks begin (see `count_blocks`), and 0 or the fault.

    sizes: the step sizes that the table lists (uint32); its last symbols are theirs, up and down. lengths: the number
    of words of each block. cold_at and cold_steps: positions of cold changes in the span (int64, ascending, inside it),
    and their steps; they are included in the result. Never reads or writes out of bounds, whatever the words are; stops
    at the first fault (see `spec.FAULTS`).
    """
    width = U(8 * old.itemsize)
    magnitude, wide = (ONE << (width - ONE)) - ONE, U(row_bits)
    last_symbol = U(symbol_count - 1)
    sign, longest = magnitude + ONE, width + U(spec.DIRECT - 4)
    small, hot_cut, firsts = old.dtype.type(cut << shift), U(cut) << U(shift), _first_rows(rows, row_bits)
    marks, preceding, places, ages = _room_for_chunk()
    found = np.empty(_CHUNK, np.uint16)  # rows
    unchanged = np.empty(cumulative.size >> row_bits, np.uint16)  # frequencies by row, close together
    for row in range(unchanged.size):
        unchanged[row] = cumulative[(row << row_bits) + 1]
    total = cold_at.size
    for b in range(changes.size):
        total += changes[b]
    positions, before, new = np.empty(total, np.uint32), np.empty(total, old.dtype), np.empty(total, old.dtype)
    cold, entering_at, entering, fault = _move_cold(old, shift, cut, cold_at, cold_steps)
    remembered, kept = _room(old, last, tracked, cut, index, entering), U(0)
    new_ranks = np.zeros(borders.size, np.int64)
    if fault:
        return positions, before, new, remembered, new_ranks, fault
    states = np.empty(1 << spec.MAX_LANES_LOG2, np.uint32)
    e, k, most, c, end_of_words = U(0), U(0), U(0), U(0), U(0)  # k: hot changes so far; c: cold ones
    next_cold = U(cold_at[0]) if cold_at.size else NEVER
    for b in range(borders.size - 1):
        start, end, rank, known = U(borders[b]), U(borders[b + 1]), U(ranks[b]), U(ranks[b + 1])
        at, j, coded = end_of_words, U(0), changes[b] > 0
        end_of_words = min(at + U(lengths[b]), U(words.size))
        if not coded and not index:
            continue
        if not coded and tracked == cut and (e >= U(entering.size) or U(entering_at[e]) >= end):
            kept = _keep(last, rank, known, remembered, kept)
            new_ranks[b + 1] = kept
            continue
        most += U(changes[b])
        lane_count = U(lanes[b]) if coded else U(0)
        lane_mask = lane_count - ONE
        if end_of_words - at < lane_count + lane_count:
            return positions, before, new, remembered, new_ranks, 1
        for lane in range(lane_count):
            states[lane] = U(words[at]) | (U(words[at + ONE]) << U(16))
            at += U(2)
        while start < end:
            stop = min(start + U(_CHUNK), end)
            count = _find(old, start, stop, small, marks, preceding, places)
            rank = _look_up(
                old, start, count, places, shift, cut, firsts, last, rank, known, tracked, ages, found, U(0)
            )
            if rank == NEVER:
                return positions, before, new, remembered, new_ranks, spec.FOREIGN_WRITE
            done = U(0)
            h, decided = U(0), count if coded else U(0)
            while True:
                if lane_mask == 0:  # in a register: each decision depends on the state after the last one
                    x = U(states[0])
                    while h < decided:
                        slot, frequency = x & _SLOT, U(unchanged[found[h]])
                        if slot >= frequency:
                            break
                        x = frequency * (x >> U(_P)) + slot
                        if x < _LOW:
                            if at >= end_of_words:
                                return positions, before, new, remembered, new_ranks, 1
                            x = (x << U(16)) | U(words[at])
                            at += ONE
                        h += ONE
                    states[0] = x
                else:
                    while h < decided:
                        lane = (j + h) & lane_mask
                        x = U(states[lane])
                        slot, frequency = x & _SLOT, U(unchanged[found[h]])
                        if slot >= frequency:
                            break
                        x = frequency * (x >> U(_P)) + slot
                        if x < _LOW:
                            if at >= end_of_words:
                                return positions, before, new, remembered, new_ranks, 1
                            x = (x << U(16)) | U(words[at])
                            at += ONE
                        states[lane] = x
                        h += ONE
                if h == decided:
                    break
                lane = (j + h) & lane_mask
                x = U(states[lane])
                slot = x & _SLOT
                row, symbol = U(found[h]) << wide, ONE
                for step in range(2, 10):
                    symbol += U(U(cumulative[row + U(step)]) <= slot)
                while U(9) <= symbol < last_symbol and U(cumulative[row + symbol + ONE]) <= slot:
                    symbol += ONE
                first, behind = U(cumulative[row + symbol]), U(cumulative[row + symbol + ONE])
                if slot >= behind or k >= most:
                    return positions, before, new, remembered, new_ranks, 2 if slot >= behind else 3
                x = (behind - first) * (x >> U(_P)) + slot - first
                if x < _LOW:
                    if at >= end_of_words:
                        return positions, before, new, remembered, new_ranks, 1
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
                            if at >= end_of_words:
                                return positions, before, new, remembered, new_ranks, 1
                            x = (x << U(16)) | U(words[at])
                            at += ONE
                states[lane] = x
                i = start + U(places[h])
                bits = U(old[i])
                up_or_down = (symbol - ONE) ^ (U(ages[h]) >> U(7))
                if t == longest and (extra or (up_or_down & ONE) != U((bits & sign) == 0)):
                    return positions, before, new, remembered, new_ranks, 6
                moved = _step(bits, up_or_down + ONE, extra, width)
                while next_cold < i:
                    positions[k + c], before[k + c], new[k + c] = next_cold, old[next_cold], cold[c]
                    c += ONE
                    next_cold = U(cold_at[c]) if c < U(cold_at.size) else NEVER
                positions[k + c], before[k + c], new[k + c] = i, bits, moved
                k += ONE
                if index:
                    if (moved & magnitude) < hot_cut:
                        ages[h] = U(index) | ((up_or_down & ONE) << U(7))
                    else:
                        done, e, kept = _let_in(
                            i, start, marks, preceding, ages, done, e, entering_at, entering, index, remembered, kept
                        )
                        kept = _keep(ages, done, h, remembered, kept)
                        done = h + ONE
                h += ONE
            j += decided
            if index:
                done, e, kept = _let_in(
                    stop, start, marks, preceding, ages, done, e, entering_at, entering, index, remembered, kept
                )
                kept = _keep(ages, done, count, remembered, kept)
            start = stop
        if rank != known:
            return positions, before, new, remembered, new_ranks, spec.FOREIGN_WRITE
        if k != most:
            return positions, before, new, remembered, new_ranks, 3
        if coded and at != end_of_words:
            return positions, before, new, remembered, new_ranks, 4
        for lane in range(lane_count):
            if states[lane] != _LOW:
                return positions, before, new, remembered, new_ranks, 4
        new_ranks[b + 1] = kept
    while c < U(cold_at.size):
        i = U(cold_at[c])
        positions[k + c], before[k + c], new[k + c] = i, old[i], cold[c]
        c += ONE
    return positions, before, new, remembered[:kept], new_ranks, 0
