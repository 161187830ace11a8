"""The entropy coder for CPUs: count, encode and decode the hot weights of blocks. Part of `cpu`.

A block without hot changes is neither counted nor coded, but its history is updated.

Weights are processed 4,096 at a time, in short loops with one task each: mark the hot ones in bits, list them, look up
their history and their rows of the tables, and only then decide. Nearly all decisions are "unchanged", so the loops
over decisions handle only that symbol, and changes are found by their rank among the marks, or are handled as
exceptions. What the count has looked up is kept for the encoder, two bytes per decision. The coder keeps up to 32
independent rANS states that share one stream of words, so that a CPU overlaps their long latencies and a GPU can give
each its own thread.

numba takes 2 µs to recognise a record that is an argument, as long as 400 weights take: the kernels are given the
fields, and make the records again.
"""

import threading
from typing import Any, NamedTuple

import numpy as np

from pulsesync.kernels import spec
from pulsesync.kernels.jit import (
    NEVER,
    ONE,
    U,
    borrowed,
    compiled,
    hold,
    inlined,
    inner,
    list_marked,
    mark_below,
    popcount,
    prefetch,
)
from pulsesync.kernels.records import (
    BlockStreams,
    CodedSpan,
    ColdSteps,
    Decisions,
    DecoderTable,
    EncoderTable,
    HotChanges,
    SpanHistory,
)

_CHUNK = 4096  # weights processed at a time
_P = spec.PROBABILITY_BITS
_SLOT = U((1 << spec.PROBABILITY_BITS) - 1)
_LOW = U(spec.STATE_LOW)
_SET_BITS = np.array(  # of every byte, in eight entries each, for `list_marked`
    [([k for k in range(8) if byte >> k & 1] + [0] * 8)[:8] for byte in range(256)], np.uint16
).reshape(-1)

_scratch = threading.local()


def count_blocks(span: CodedSpan, history: SpanHistory, hot: HotChanges, counts: Any) -> Any:
    """Add the blocks' decisions to counts, in the order of `tables.Contexts`; return them as `Decisions`.

    If `history.patch_index` is not 0, the history after this patch is returned next, as `advance_history` would make
    it, and where the bytes of each block begin in it. A block whose history does not match its weights has -1
    decisions, and nothing after it is counted.
    """
    if not hasattr(_scratch, "rows") or _scratch.rows.size < span.old.size:
        _scratch.rows = np.empty(span.old.size, np.uint16)
    *decisions, last, ranks = _count(*span, *history, *hot, counts, _scratch.rows)
    return Decisions(*decisions), last, ranks


def encode_blocks(decisions: Decisions, extras: Any, table: EncoderTable, lanes: Any) -> Any:
    """Return the blocks' streams (uint16) one after the other, and where each begins.

    A stream is the lanes' first states, then the words in the order in which a reader needs them.
    """
    return _encode(*decisions, extras, *table, lanes)


def decode_blocks(
    span: CodedSpan, history: SpanHistory, table: DecoderTable, streams: BlockStreams, cold: ColdSteps
) -> Any:
    """Return positions, old and new bits, history and where its blocks begin (see `count_blocks`), and 0 or the fault.

    Cold changes, which are inside the span, are included in the result. Never reads or writes out of bounds, whatever
    the words are; stops at the first fault (see `spec.FAULTS`).
    """
    return _decode(*span, *history, *table, *streams, *cold)


class _Chunk(NamedTuple):
    """Space for what is known of a chunk's weights."""

    marks: Any  # a bit for each weight: whether it is hot
    preceding: Any  # for each 64 weights, the number of hot ones before them
    places: Any  # of each hot weight, its position in the chunk; `list_marked` writes up to eight more
    ages: Any  # of each hot weight, its byte of the history
    rows: Any  # of each hot weight, its row of the tables; in a count, of all chunks
    firsts: Any  # of each class, the row of weights that have not changed yet


@inlined
def _room(span: CodedSpan, rows: Any) -> Any:
    firsts = np.empty(span.rows.size, np.uint32)
    for k in range(firsts.size):
        firsts[k] = span.rows[k] >> span.row_bits
    marks, preceding = np.empty(_CHUNK // 64, np.uint64), np.empty(_CHUNK // 64, np.uint64)
    return _Chunk(marks, preceding, np.empty(_CHUNK + 8, np.uint16), np.empty(_CHUNK, np.uint8), rows, firsts)


@inner  # inlined, the kernels would not have enough registers for its loops
def _find(span: CodedSpan, start: Any, end: Any, chunk: _Chunk) -> Any:
    """Mark the hot weights from start to end and list their positions; return their number.

    The next chunk is prefetched meanwhile: the loops between two chunks are so long that the hardware prefetcher loses
    the stream.
    """
    old, marks = span.old, chunk.marks
    cut, magnitude = old.dtype.type(span.cut << span.shift), old.dtype.type((ONE << U(8 * old.itemsize - 1)) - ONE)
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
        chunk.preceding[g] = count
        if marks[g]:
            count += list_marked(marks[g], U(g) << U(6), _SET_BITS, chunk.places, count)
    return count


@inlined
def _hot_before(chunk: _Chunk, place: Any) -> Any:
    """The number of hot weights in a chunk before a position."""
    group = place >> U(6)
    return chunk.preceding[group] + popcount(chunk.marks[group] & ((ONE << (place & U(63))) - ONE))


@inner  # inlined, the kernels would not have enough registers for its loops
def _look_up(
    span: CodedSpan, history: SpanHistory, start: Any, count: Any, rank: Any, known: Any, chunk: _Chunk, at: Any
) -> Any:
    """Write history and row (from `at` on) of a chunk's hot weights.

    Return the rank after them, or NEVER if it exceeds `known`.
    """
    old, last, shift = span.old, history.last, U(span.shift)
    places, ages, rows, firsts = chunk.places, chunk.ages, chunk.rows, chunk.firsts
    magnitude, tracked_cut = (ONE << U(8 * old.itemsize - 1)) - ONE, U(history.cut) << shift
    if history.cut == span.cut:
        if rank + count > known:
            return NEVER
        for h in range(count):
            age, size = last[rank + U(h)], U(old[start + U(places[h])]) & magnitude
            ages[h] = age
            rows[at + U(h)] = firsts[size >> shift] + (age & U(0x7F))
        return rank + count
    for h in range(count):
        size, age = U(old[start + U(places[h])]) & magnitude, U(0)
        if size < tracked_cut:
            if rank >= known:
                return NEVER
            age = U(last[rank])
            rank += ONE
        ages[h] = age
        rows[at + U(h)] = firsts[size >> shift] + (age & U(0x7F))
    return rank


class _NextHistory(NamedTuple):
    """The history after the patch, and what it is made of besides the last one."""

    bytes_: Any
    index: Any  # of the patch; 0 where no history is kept
    hot_cut: Any  # magnitudes below this are hot
    entering_at: Any
    entering: Any


class _Written(NamedTuple):
    """How far the next history is written."""

    done: Any  # hot weights of the current chunk
    entered: Any  # entering weights
    size: Any  # bytes


@inlined
def _next_history(span: CodedSpan, history: SpanHistory, entering_at: Any, entering: Any) -> Any:
    known = history.last.size if history.cut == span.cut else span.old.size
    bytes_ = np.empty((known if history.patch_index else 0) + entering.size, np.uint8)
    return _NextHistory(bytes_, U(history.patch_index), U(span.cut) << U(span.shift), entering_at, entering)


@inlined
def _carries_over(span: CodedSpan, history: SpanHistory, out: _NextHistory, to: _Written, end: Any) -> Any:
    """Whether the history of a block without hot changes stays as it is: the same cut, and no weight enters."""
    if history.cut != span.cut:
        return False
    return to.entered >= U(out.entering.size) or U(out.entering_at[to.entered]) >= end


@inlined
def _copy(history: Any, begin: Any, end: Any, out: _NextHistory, to: _Written) -> Any:
    """Write a part of an earlier history."""
    for h in range(end - begin):
        out.bytes_[to.size + U(h)] = history[begin + U(h)]
    return _Written(end, to.entered, to.size + (end - begin))


@inlined
def _let_in(limit: Any, start: Any, chunk: _Chunk, out: _NextHistory, to: _Written) -> Any:
    """Write the history of the entering weights before a limit, each after the hot weights before it."""
    while to.entered < U(out.entering.size) and U(out.entering_at[to.entered]) < limit:
        hot = _hot_before(chunk, U(out.entering_at[to.entered]) - start)
        to = _copy(chunk.ages, to.done, hot, out, to)
        out.bytes_[to.size] = out.index | U(out.entering[to.entered])
        to = _Written(hot, to.entered + ONE, to.size + ONE)
    return to


@inlined
def _remember(size: Any, down: Any, i: Any, h: Any, start: Any, chunk: _Chunk, out: _NextHistory, to: _Written) -> Any:
    """Note a change of hot weight h of a chunk, at i, to a magnitude; one that is no longer hot is left out."""
    if size < out.hot_cut:
        chunk.ages[h] = out.index | down << U(7)
        return to
    to = _let_in(i, start, chunk, out, to)
    to = _copy(chunk.ages, to.done, h, out, to)
    return _Written(h + ONE, to.entered, to.size)


@inlined
def _finish_chunk(count: Any, stop: Any, start: Any, chunk: _Chunk, out: _NextHistory, to: _Written) -> Any:
    """Write the rest of a chunk's history."""
    if out.index:
        to = _let_in(stop, start, chunk, out, to)
        to = _copy(chunk.ages, to.done, count, out, to)
    return _Written(U(0), to.entered, to.size)


class _Counted(NamedTuple):
    """What a count writes."""

    counts: Any
    unchanged: Any  # by row, close together: this is added to counts at the end
    changed: Any
    symbols: Any


@compiled
def _count(
    old: Any, borders: Any, shift: int, cut: int, first_rows: Any, row_bits: int,
    last: Any, ranks: Any, tracked: int, index: int,
    positions: Any, new: Any, symbols: Any, extras: Any, entering_at: Any, entering: Any,
    counts: Any, rows: Any,
) -> Any:  # fmt: skip
    """See `count_blocks`; rows has space for a row of every weight."""
    span, history, hot = borrowed((
        CodedSpan(old, borders, shift, cut, first_rows, row_bits),
        SpanHistory(last, ranks, tracked, index),
        HotChanges(positions, new, symbols, extras, entering_at, entering),
    ))  # fmt: skip
    changed, turned = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8)
    count_of = _Counted(counts, np.zeros(counts.size >> row_bits, np.int64), changed, turned)
    own = _room(span, rows), _next_history(span, history, entering_at, entering), count_of
    chunk, out, found = borrowed(own)
    decisions, new_ranks = np.zeros(borders.size - 1, np.int64), np.zeros(borders.size, np.int64)
    p, decided, to = U(0), U(0), _Written(U(0), U(0), U(0))
    for b in range(borders.size - 1):
        start, end, rank, known = U(borders[b]), U(borders[b + 1]), U(ranks[b]), U(ranks[b + 1])
        counted = p < U(positions.size) and U(positions[p]) < end
        if not counted and not index:
            continue
        if not counted and _carries_over(span, history, out, to, end):
            to = _copy(last, rank, known, out, to)
            to = _Written(U(0), to.entered, to.size)
            new_ranks[b + 1] = to.size
            continue
        decided_before = decided
        while start < end:
            stop = min(start + U(_CHUNK), end)
            count = _find(span, start, stop, chunk)
            rank = _look_up(span, history, start, count, rank, known, chunk, decided)
            if rank == NEVER:
                break
            if counted:
                p, to = _count_chunk(span, hot, p, start, stop, count, chunk, decided, found, out, to)
                decided += count
            to = _finish_chunk(count, stop, start, chunk, out, to)
            start = stop
        if rank != known:
            decisions[b] = -1
            break
        decisions[b], new_ranks[b + 1] = decided - decided_before, to.size
    for row in range(found.unchanged.size):
        counts[row << row_bits] += found.unchanged[row]
    hold(own)
    return decisions, rows[:decided].copy(), changed, turned, own[1].bytes_[: to.size], new_ranks


@inlined
def _count_chunk(
    span: CodedSpan, hot: HotChanges, p: Any, start: Any, stop: Any, count: Any, chunk: _Chunk, decided: Any,
    found: _Counted, out: _NextHistory, to: _Written,
) -> Any:  # fmt: skip
    """Count the decisions of a chunk, `decided` of the span before it; return the first change after it."""
    magnitude, wide = (ONE << U(8 * span.old.itemsize - 1)) - ONE, U(span.row_bits)
    for h in range(count):
        found.unchanged[chunk.rows[decided + U(h)]] += 1
    while p < U(hot.positions.size) and U(hot.positions[p]) < stop:
        i = U(hot.positions[p])
        h = _hot_before(chunk, i - start)
        row, up_or_down = U(chunk.rows[decided + h]), U(hot.symbols[p]) - ONE
        symbol = (up_or_down ^ (U(chunk.ages[h]) >> U(7))) + ONE
        found.changed[p], found.symbols[p] = decided + h, symbol
        found.unchanged[row] -= 1
        found.counts[(row << wide) + symbol] += 1
        if out.index:
            to = _remember(U(hot.new[p]) & magnitude, up_or_down & ONE, i, h, start, chunk, out, to)
        p += ONE
    return p, to


@inlined
def _put_raw(x: Any, value: Any, k: Any, stream: Any, at: Any) -> Any:
    """Code k <= 16 bits as they are."""
    if x >= ONE << (U(32) - k):
        at -= ONE
        stream[at] = x & U(0xFFFF)
        x >>= U(16)
    return (x << k) | value, at


@inlined
def _advance(x: Any, begin: Any, frequency: Any, reciprocal: Any) -> Any:
    """Code a symbol in a state that has space for it.

    Multiplication of 32-bit numbers matters: some CPUs need three times as long for 64-bit ones.
    """
    quotient = (U(np.uint32(x)) * reciprocal) >> U(32)  # or one less than that
    quotient += U(x - quotient * frequency >= frequency)
    return x + quotient * (U(1 << _P) - frequency) + begin


class _Unchanged(NamedTuple):
    """What it takes to encode "unchanged", by row, close together."""

    entries: Any  # reciprocal and frequency in one word
    exact: Any  # 2^46 over the frequency, rounded up


@inlined
def _unchanged_of(table: EncoderTable) -> Any:
    entries = np.empty(table.cumulative.size >> table.row_bits, np.uint64)
    exact = np.empty(entries.size, np.uint64)
    for row in range(entries.size):
        frequency = U(table.cumulative[(row << table.row_bits) + 1])
        entries[row] = U(table.reciprocals[row << table.row_bits]) << U(32) | frequency
        frequency = max(ONE, frequency)
        exact[row] = ((ONE << U(32 + _P)) + frequency - ONE) // frequency
    return _Unchanged(entries, exact)


@compiled
def _encode(
    counts: Any, rows: Any, changed: Any, symbols: Any, extras: Any,
    cumulative: Any, reciprocals: Any, row_bits: int, width: int, lanes: Any,
) -> Any:  # fmt: skip
    """See `encode_blocks`. rANS is last in, first out, so decisions are processed from the last to the first."""
    decisions, table = borrowed((
        Decisions(counts, rows, changed, symbols), EncoderTable(cumulative, reciprocals, row_bits, width)
    ))  # fmt: skip
    room = 3 * changed.size
    for b in range(counts.size):
        room += 2 * lanes[b] + counts[b] if counts[b] else 0
    own = _unchanged_of(table), np.empty(1 << spec.MAX_LANES_LOG2, np.uint32), np.empty(room, np.uint16)
    unchanged, states, stream = borrowed(own)
    ends = np.zeros(counts.size + 1, np.int64)
    d, p, at = U(rows.size), U(changed.size), U(room)
    for b in range(counts.size - 1, -1, -1):
        ends[b + 1] = at
        if counts[b] == 0:
            continue
        lane_mask, begin = U(lanes[b] - 1), d - U(counts[b])
        for lane in range(lanes[b]):
            states[lane] = _LOW
        while d > begin:
            here = p > 0 and U(changed[p - ONE]) >= begin
            stop = U(changed[p - ONE]) + ONE if here else begin
            at = _encode_unchanged(decisions.rows, unchanged, begin, d, stop, states, lane_mask, stream, at)
            d = stop
            if here:
                p -= ONE
                d -= ONE
                lane = (d - begin) & lane_mask
                states[lane], at = _encode_change(
                    table, U(states[lane]), U(rows[d]), U(symbols[p]), U(extras[p]), stream, at
                )
        for lane in range(lanes[b] - 1, -1, -1):
            at -= U(2)
            stream[at] = states[lane] & np.uint32(0xFFFF)
            stream[at + ONE] = states[lane] >> np.uint32(16)
    ends[0] = at
    for b in range(ends.size):
        ends[b] -= np.int64(at)
    hold(own)
    return own[2][at:].copy(), ends


@inlined
def _encode_unchanged(
    rows: Any, unchanged: _Unchanged, begin: Any, d: Any, stop: Any, states: Any, lane_mask: Any, stream: Any, at: Any
) -> Any:
    """Encode the decisions before d, down to stop, all of which are "unchanged"; return where the stream begins."""
    entries, exact = unchanged.entries, unchanged.exact
    if lane_mask == 0:  # in a register: each decision depends on the state after the last one
        # A state that has space is below 2^18 times the frequency, so multiplied by `exact` it stays below 2^64 and
        # yields the exact quotient, with a shorter dependency chain than `_advance`.
        x = U(states[0])
        while d > stop:
            d -= ONE
            frequency = entries[rows[d]] & U(0xFFFF)
            if x >= frequency << U(32 - _P):
                at -= ONE
                stream[at] = x & U(0xFFFF)
                x >>= U(16)
            x += (x * exact[rows[d]] >> U(32 + _P)) * (U(1 << _P) - frequency)
        states[0] = x
        return at
    while d > stop:
        d -= ONE
        lane, entry = (d - begin) & lane_mask, entries[rows[d]]
        x, frequency = U(states[lane]), entry & U(0xFFFF)
        if x >= frequency << U(32 - _P):
            at -= ONE
            stream[at] = x & U(0xFFFF)
            x >>= U(16)
        states[lane] = _advance(x, U(0), frequency, entry >> U(32))
    return at


@inlined
def _encode_change(table: EncoderTable, x: Any, row: Any, symbol: Any, extra: Any, stream: Any, at: Any) -> Any:
    """Encode a change's raw bits and its symbol; return the state, and where the stream begins."""
    t = (symbol - ONE) >> ONE
    if spec.DIRECT <= t < U(table.width + spec.DIRECT - 3):  # higher size classes have no raw bits
        k = t - U(spec.DIRECT - 3)
        if k > 16:
            x, at = _put_raw(x, extra >> U(16), k - U(16), stream, at)
            extra, k = extra & U(0xFFFF), U(16)
        x, at = _put_raw(x, extra, k, stream, at)
    entry = (row << U(table.row_bits)) + symbol
    first = U(table.cumulative[entry])
    frequency = U(table.cumulative[entry + ONE]) - first
    if x >= frequency << U(32 - _P):
        at -= ONE
        stream[at] = x & U(0xFFFF)
        x >>= U(16)
    return _advance(x, first, frequency, U(table.reciprocals[entry])), at


@inlined
def _move_cold(span: CodedSpan, positions: Any, steps: Any) -> Any:
    """Return cold weights after their steps, those that become hot (position, and 0x80 if down), and 0 or the fault."""
    old, width = span.old, U(8 * span.old.itemsize)
    full, sign, hot_cut = (ONE << width) - ONE, ONE << (width - ONE), U(span.cut) << U(span.shift)
    out = np.empty(positions.size, old.dtype)
    entering_at, entering, e = np.empty(positions.size, np.uint32), np.empty(positions.size, np.uint8), 0
    fault = 0
    for c in range(positions.size):
        bits, step = U(old[positions[c]]), steps[c]
        if (bits & (sign - ONE)) < hot_cut:
            fault = spec.HOT_AMONG_COLD
            break
        if (U(step) if step > 0 else U(-step)) == sign and (step < 0) == (bits >= sign):
            fault = spec.COLD_HALF_CIRCLE
            break
        a = ((bits ^ (full if bits & sign else sign)) + U(step)) & full
        out[c] = a ^ (sign if a & sign else full)
        if (U(out[c]) & (sign - ONE)) < hot_cut:
            entering_at[e], entering[e] = positions[c], 0x80 if step < 0 else 0
            e += 1
    return out, entering_at[:e], entering[:e], fault


@inlined
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


class _Changes(NamedTuple):
    """The changes of a span as they are written, in order of position; hot and cold ones are merged."""

    positions: Any
    old: Any
    new: Any
    cold_at: Any
    cold: Any  # cold weights after their steps


class _Stream(NamedTuple):
    """The stream of a block."""

    words: Any
    end: Any  # of its words
    states: Any
    lane_mask: Any
    most: Any  # hot changes up to its end


class _Decoded(NamedTuple):
    """How far a span is decoded."""

    at: Any  # the next word
    hot: Any  # hot changes
    cold: Any  # cold ones


@inlined
def _room_for_changes(old: Any, changes: Any, cold_at: Any, cold: Any) -> Any:
    total = cold_at.size
    for b in range(changes.size):
        total += changes[b]
    positions, before, new = np.empty(total, np.uint32), np.empty(total, old.dtype), np.empty(total, old.dtype)
    return _Changes(positions, before, new, cold_at, cold)


@inlined
def _frequencies_of_unchanged(cumulative: Any, row_bits: int) -> Any:
    """By row, close together."""
    out = np.empty(cumulative.size >> row_bits, np.uint16)
    for row in range(out.size):
        out[row] = cumulative[(row << row_bits) + 1]
    return out


@compiled
def _decode(
    old: Any, borders: Any, shift: int, cut: int, rows: Any, row_bits: int,
    last: Any, ranks: Any, tracked: int, index: int,
    cumulative: Any, symbols: int, sizes: Any,
    changes: Any, lanes: Any, lengths: Any, words: Any,
    cold_at: Any, cold_steps: Any,
) -> Any:  # fmt: skip
    """See `decode_blocks`."""
    span, history, table, streams = borrowed((
        CodedSpan(old, borders, shift, cut, rows, row_bits),
        SpanHistory(last, ranks, tracked, index),
        DecoderTable(cumulative, symbols, sizes),
        BlockStreams(changes, lanes, lengths, words),
    ))  # fmt: skip
    cold, entering_at, entering, fault = _move_cold(span, cold_at, cold_steps)
    own = (
        _room(span, np.empty(_CHUNK, np.uint16)), _next_history(span, history, entering_at, entering),
        _room_for_changes(old, changes, cold_at, cold), np.empty(1 << spec.MAX_LANES_LOG2, np.uint32),
        _frequencies_of_unchanged(cumulative, row_bits),
    )  # fmt: skip
    chunk, out, found, states, unchanged = borrowed(own)
    new_ranks, most, end_of_words = np.zeros(borders.size, np.int64), U(0), U(0)
    to, done = _Written(U(0), U(0), U(0)), _Decoded(U(0), U(0), U(0))
    for b in range(0 if fault else borders.size - 1):
        start, end, rank, known = U(borders[b]), U(borders[b + 1]), U(ranks[b]), U(ranks[b + 1])
        done, j, coded = _Decoded(end_of_words, done.hot, done.cold), U(0), changes[b] > 0
        end_of_words = min(done.at + U(lengths[b]), U(words.size))
        if not coded and not index:
            continue
        if not coded and _carries_over(span, history, out, to, end):
            to = _copy(last, rank, known, out, to)
            to = _Written(U(0), to.entered, to.size)
            new_ranks[b + 1] = to.size
            continue
        most += U(changes[b])
        stream, done, fault = _begin_stream(streams, b, end_of_words, states, most, done)
        while start < end and fault == 0:
            stop = min(start + U(_CHUNK), end)
            count = _find(span, start, stop, chunk)
            rank = _look_up(span, history, start, count, rank, known, chunk, U(0))
            if rank == NEVER:
                fault = spec.FOREIGN_WRITE
                break
            if coded:
                done, to, fault = _decode_chunk(
                    span, table, unchanged, chunk, start, count, j, stream, done, found, out, to
                )
            to = _finish_chunk(count, stop, start, chunk, out, to)
            j += count
            start = stop
        if fault == 0:
            fault = _fault_at_end(stream, done, rank, known, coded)
        if fault:
            break
        new_ranks[b + 1] = to.size
    _write_cold(old, found, NEVER, done)
    hold(own)
    return own[2].positions, own[2].old, own[2].new, own[1].bytes_[: to.size], new_ranks, fault


@inlined
def _begin_stream(streams: BlockStreams, b: Any, end: Any, states: Any, most: Any, done: _Decoded) -> Any:
    """Read the states of a block's lanes; one without changes has none."""
    lanes, at = U(streams.lanes[b]) if streams.changes[b] > 0 else U(0), done.at
    stream = _Stream(streams.words, end, states, lanes - ONE, most)
    if end - at < lanes + lanes:
        return stream, done, spec.STREAM_TOO_SHORT
    for lane in range(lanes):
        states[lane] = U(streams.words[at]) | (U(streams.words[at + ONE]) << U(16))
        at += U(2)
    return stream, _Decoded(at, done.hot, done.cold), 0


@inner  # as a call of its own, it would have too few registers for its loops
def _decode_chunk(
    span: CodedSpan, table: DecoderTable, unchanged: Any, chunk: _Chunk, start: Any, count: Any, j: Any,
    stream: _Stream, done: _Decoded, found: _Changes, out: _NextHistory, to: _Written,
) -> Any:  # fmt: skip
    """Decode the hot weights of a chunk; j: how many of the block are before it. Last comes 0 or the fault."""
    span, table, chunk, stream, found, out = borrowed((span, table, chunk, stream, found, out))  # it is not inlined
    (unchanged,) = borrowed((unchanged,))
    width, wide = U(8 * span.old.itemsize), U(span.row_bits)
    sign, longest = ONE << (width - ONE), width + U(spec.DIRECT - 4)
    h, at, k, c = U(0), done.at, done.hot, done.cold
    while True:
        h, at = _decode_unchanged(chunk.rows, unchanged, h, count, j, stream, at)
        if at == NEVER:
            return _Decoded(at, k, c), to, spec.STREAM_TOO_SHORT
        if h == count:
            return _Decoded(at, k, c), to, 0
        lane, row = (j + h) & stream.lane_mask, U(chunk.rows[h]) << wide
        x = U(stream.states[lane])
        slot = x & _SLOT
        symbol = _find_symbol(table, row, slot)
        first, behind = U(table.cumulative[row + symbol]), U(table.cumulative[row + symbol + ONE])
        if slot >= behind or k >= stream.most:
            return _Decoded(at, k, c), to, spec.NO_TABLE if slot >= behind else spec.OTHER_COUNT
        x, at = _refill((behind - first) * (x >> U(_P)) + slot - first, stream, at)
        extra, t = U(0), (symbol - ONE) >> ONE
        if t > longest:
            extra = U(table.sizes[t - longest - ONE])
        elif t >= spec.DIRECT:
            x, at, extra = _take_raw(x, t - U(spec.DIRECT - 3), stream, at)
        if at == NEVER:
            return _Decoded(at, k, c), to, spec.STREAM_TOO_SHORT
        stream.states[lane] = x
        i = start + U(chunk.places[h])
        bits, up_or_down = U(span.old[i]), (symbol - ONE) ^ (U(chunk.ages[h]) >> U(7))
        if t == longest and (extra or (up_or_down & ONE) != U((bits & sign) == 0)):
            return _Decoded(at, k, c), to, spec.STEP_TOO_LONG
        moved = _step(bits, up_or_down + ONE, extra, width)
        c = _write_cold(span.old, found, i, _Decoded(at, k, c))
        found.positions[k + c], found.old[k + c], found.new[k + c] = i, bits, moved
        k += ONE
        if out.index:
            to = _remember(moved & (sign - ONE), up_or_down & ONE, i, h, start, chunk, out, to)
        h += ONE


@inlined
def _decode_unchanged(rows: Any, unchanged: Any, h: Any, count: Any, j: Any, stream: _Stream, at: Any) -> Any:
    """Decode from hot weight h of a chunk on while it is "unchanged".

    Return the next one, and where the next word is, or NEVER if there is none.
    """
    words, states, end, lane_mask = stream.words, stream.states, stream.end, stream.lane_mask
    if lane_mask == 0:  # in a register: each decision depends on the state after the last one
        x = U(states[0])
        while h < count:
            slot, frequency = x & _SLOT, U(unchanged[rows[h]])
            if slot >= frequency:
                break
            x = frequency * (x >> U(_P)) + slot
            if x < _LOW:
                if at >= end:
                    return h, NEVER
                x = (x << U(16)) | U(words[at])
                at += ONE
            h += ONE
        states[0] = x
        return h, at
    while h < count:
        lane = (j + h) & lane_mask
        x = U(states[lane])
        slot, frequency = x & _SLOT, U(unchanged[rows[h]])
        if slot >= frequency:
            break
        x = frequency * (x >> U(_P)) + slot
        if x < _LOW:
            if at >= end:
                return h, NEVER
            x = (x << U(16)) | U(words[at])
            at += ONE
        states[lane] = x
        h += ONE
    return h, at


@inlined
def _find_symbol(table: DecoderTable, row: Any, slot: Any) -> Any:
    """The symbol of a slot that is not that of "unchanged"; the last one if the row has no such slot."""
    symbol = ONE
    for step in range(2, 10):
        symbol += U(U(table.cumulative[row + U(step)]) <= slot)
    while U(9) <= symbol < U(table.symbols - 1) and U(table.cumulative[row + symbol + ONE]) <= slot:
        symbol += ONE
    return symbol


@inlined
def _refill(x: Any, stream: _Stream, at: Any) -> Any:
    """Read a word into a state that needs one; return it, and where the next word is, or NEVER if there is none."""
    if x >= _LOW:
        return x, at
    if at >= stream.end:
        return x, NEVER
    return (x << U(16)) | U(stream.words[at]), at + ONE


@inlined
def _take_raw(x: Any, raw: Any, stream: _Stream, at: Any) -> Any:
    """Read this number of raw bits from a state; return it, where the next word is (see `_refill`), and the bits."""
    bits, taken = U(0), U(0)
    while taken < raw and at != NEVER:
        part = min(raw - taken, U(16))
        bits |= (x & ((ONE << part) - ONE)) << taken
        taken += part
        x, at = _refill(x >> part, stream, at)
    return x, at, bits


@inlined
def _write_cold(old: Any, found: _Changes, limit: Any, done: _Decoded) -> Any:
    """Write the cold changes before a limit; return how many are written."""
    c = done.cold
    while c < U(found.cold_at.size) and U(found.cold_at[c]) < limit:
        i, k = U(found.cold_at[c]), done.hot + c
        found.positions[k], found.old[k], found.new[k] = i, old[i], found.cold[c]
        c += ONE
    return c


@inlined
def _fault_at_end(stream: _Stream, done: _Decoded, rank: Any, known: Any, coded: Any) -> Any:
    """What is wrong at the end of a block, or 0."""
    if rank != known:
        return spec.FOREIGN_WRITE
    if done.hot != stream.most:
        return spec.OTHER_COUNT
    if coded:
        if done.at != stream.end:
            return spec.STREAM_TOO_LONG
        for lane in range(stream.lane_mask + ONE):
            if stream.states[lane] != _LOW:
                return spec.STREAM_TOO_LONG
    return 0
