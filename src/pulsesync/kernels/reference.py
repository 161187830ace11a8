"""The kernels in plain numpy and Python: slow, short, and the reference for the others.

A machine without numba uses these: it can read and write everything; a patch takes some 20 times as long.
"""

import ctypes
import itertools
from bisect import bisect_right
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync.kernels import spec
from pulsesync.kernels.arrays import F32, I64, U8, U16, U32, U64, Bits
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


def _magnitudes(bits: Bits) -> Bits:
    """The bits without their signs, in their own dtype: a block of 2^20 weights stays in the cache of a CPU."""
    return bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)


def _ordered(bits: Bits) -> I64:
    """Map bit patterns to the order of their values, -0.0 just below +0.0: neighbours differ by one."""
    sign = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide & sign, (2 * sign - 1) ^ wide, wide | sign)


def _moved(bits: Bits, steps: I64) -> Bits:
    """Weights after their steps, in the circle of all values."""
    sign = 1 << (8 * bits.itemsize - 1)
    ordered = _ordered(bits) + steps & 2 * sign - 1
    return np.where(ordered & sign, ordered ^ sign, ordered ^ 2 * sign - 1).astype(bits.dtype)


def _went_down(old: Bits, new: Bits) -> NDArray[np.bool_]:
    """Whether each step is negative, in the shorter direction, as in `steps`."""
    moved = _ordered(new) - _ordered(old)
    down: NDArray[np.bool_] = (moved < 0) != (np.abs(moved) > 1 << (8 * old.itemsize - 1))
    return down


def changed(old: Bits, new: Bits) -> tuple[U32, Bits, Bits]:
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return positions, old[positions], new[positions]


def pick(bits: Bits, positions: U32) -> Bits:
    return bits[positions]


def scatter(bits: Bits, positions: U32, new: Bits) -> None:
    bits[positions] = new


def gather_runs(addresses: U64, starts: I64, out: Bits) -> None:
    for address, (begin, end) in zip(addresses.tolist(), pairwise(starts.tolist()), strict=True):
        out[begin:end] = _run_at(address, end - begin, out.dtype)


def scatter_to_runs(addresses: U64, starts: I64, positions: U32, new: Bits) -> None:
    borders = np.searchsorted(positions, starts)
    for n in np.flatnonzero(np.diff(borders)).tolist():
        some = slice(borders[n], borders[n + 1])
        run = _run_at(int(addresses[n]), int(starts[n + 1] - starts[n]), new.dtype)
        run[positions[some] - starts[n]] = new[some]


def _run_at(address: int, size: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """The weights at an address, as a view."""
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory).cast("B"), dtype)


def split_planes(weights: Bits, low: U8, high: U8) -> None:
    low[:], high[:] = weights << 1 | weights >> 15, weights >> 7


def join_planes(low: U8, high: U8, out: Bits) -> None:
    rotated = low + (high.astype(np.uint16) << 8)
    out[:] = rotated >> 1 | rotated << 15


def huffman_streams(pairs: U16, borders: I64, codes: U32, out: U8) -> I64:
    sizes = np.empty((borders.size - 1, 4), np.int64)
    if not codes[pairs].all():
        return sizes[:0]
    written = b""
    for block, (begin, end) in enumerate(pairwise(borders.tolist())):
        for k, some in enumerate(np.split(pairs[begin:end], 4)):
            word, filled = 0, 0
            for code in codes[some[::-1]].tolist():
                word, filled = word | code >> 5 << filled, filled + (code & 31)
            stream = (word | 1 << filled).to_bytes(filled // 8 + 1, "little")
            sizes[block, k] = len(stream)
            written += stream
    out[: len(written)] = np.frombuffer(written, np.uint8)
    return sizes


def sample_classes(old: Bits, shift: int) -> I64:
    looked_at = np.arange(old.size) % spec.SAMPLE_PERIOD < spec.SAMPLE_RUN
    return np.bincount(_magnitudes(old[looked_at]) >> shift, minlength=256)


def steps(old: Bits, new: Bits, shift: int) -> tuple[U8, U32, U8, I64]:
    half = 1 << (8 * old.itemsize - 1)
    moved = _ordered(new) - _ordered(old)
    moved = np.where(moved > half, moved - 2 * half, np.where(moved < -half, moved + 2 * half, moved))
    size, down = np.abs(moved), moved < 0
    k = np.zeros(size.size, np.int64)
    while (size >> k > 1).any():
        k += size >> k > 1
    direct = size <= spec.DIRECT
    size_class = np.where(direct, size - 1, spec.DIRECT + k - 3)
    extra = np.where(direct, 0, size - (1 << k))
    classes = _magnitudes(old) >> shift
    symbols = (1 + 2 * size_class + down).astype(np.uint8)
    return symbols, extra.astype(np.uint32), classes.astype(np.uint8), np.bincount(classes, minlength=256)


def split(
    positions: U32, new: Bits, symbols: U8, extras: U32, classes: U8, shift: int, cut: int
) -> tuple[U32, Bits, U8, U32, I64, I64, U32, U8]:
    hot = classes.astype(np.int64) < cut
    size_class = (symbols[~hot].astype(np.int64) - 1) >> 1
    power = np.int64(1) << np.maximum(size_class - spec.DIRECT + 3, 0)
    size = np.where(size_class < spec.DIRECT, size_class + 1, power + extras[~hot])
    moved = np.where((symbols[~hot] - 1) & 1, -size, size)
    cold_at, enters = positions[~hot], _magnitudes(new[~hot]) >> shift < cut
    down = np.where(moved < 0, 0x80, 0).astype(np.uint8)
    of_hot = positions[hot], new[hot], symbols[hot], extras[hot]
    return *of_hot, cold_at.astype(np.int64), moved, cold_at[enters], down[enters]


def _raw_bits(symbol: int, width: int) -> int:
    """The number of raw bits after a symbol: none for short steps, and none for the sizes that a table lists."""
    size_class = (symbol - 1) >> 1
    return size_class - spec.DIRECT + 3 if spec.DIRECT <= size_class < width + spec.DIRECT - 3 else 0


class _Block(NamedTuple):
    """One block of a span: its borders, and what the span and the history are for it alone."""

    begin: int
    end: int
    span: CodedSpan
    history: SpanHistory

    def share(self, positions: NDArray[np.integer]) -> slice:
        return slice(*np.searchsorted(positions, (self.begin, self.end)).tolist())

    def hot(self, hot: HotChanges) -> HotChanges:
        here, entering = self.share(hot.positions), self.share(hot.entering_at)
        begin = np.uint32(self.begin)
        changes = hot.positions[here] - begin, hot.new[here], hot.symbols[here], hot.extras[here]
        return HotChanges(*changes, hot.entering_at[entering] - begin, hot.entering[entering])


def _blocks(span: CodedSpan, history: SpanHistory) -> list[_Block]:
    sides = zip(pairwise(span.borders.tolist()), pairwise(history.ranks.tolist()), strict=True)
    return [
        _Block(begin, end, span._replace(old=span.old[begin:end]), history._replace(last=history.last[first:behind]))
        for (begin, end), (first, behind) in sides
    ]


def _fits(span: CodedSpan, history: SpanHistory) -> bool:
    """Whether a history may be that of these weights."""
    return bool(np.count_nonzero(_magnitudes(span.old) < history.cut << span.shift) == history.last.size)


def _decide(span: CodedSpan, history: SpanHistory) -> tuple[NDArray[np.intp], I64, I64]:
    """The hot weights in order: position, row of the tables, and whether each moved down when it last changed."""
    sizes = _magnitudes(span.old)
    hot = np.flatnonzero(sizes < span.cut << span.shift)
    ages = np.zeros(hot.size, np.int64)
    ages[sizes[hot] < history.cut << span.shift] = history.last
    found = span.rows[sizes[hot] >> span.shift].astype(np.int64) + ((ages & 0x7F) << span.row_bits)
    return hot, found, ages >> 7


def _count_block(span: CodedSpan, history: SpanHistory, hot: HotChanges, counts: I64) -> Decisions:
    at, begins, down = _decide(span, history)
    decided = np.zeros(at.size, np.int64)
    where = np.searchsorted(at, hot.positions)
    decided[where] = ((hot.symbols.astype(np.int64) - 1) ^ down[where]) + 1
    np.add.at(counts, begins + decided, 1)
    rows = (begins >> span.row_bits).astype(np.uint16)
    return Decisions(np.array([at.size]), rows, where.astype(np.uint32), decided[where].astype(np.uint8))


def _encode_block(decisions: Decisions, extras: U32, table: EncoderTable, lanes: int) -> U16:
    cumulative, rows = table.cumulative.tolist(), decisions.rows
    changed = zip(decisions.symbols.tolist(), extras.tolist(), strict=True)
    changes = dict(zip(decisions.changed.tolist(), changed, strict=True))
    states = [spec.STATE_LOW] * lanes
    backwards: list[int] = []

    def make_room(x: int, limit: int) -> int:
        if x < limit:
            return x
        backwards.append(x & 0xFFFF)
        return x >> 16

    for j in range(rows.size - 1, -1, -1):
        x, symbol = states[j % lanes], 0
        if (change := changes.get(j)) is not None:
            symbol, extra = change
            raw = _raw_bits(symbol, table.width)
            if raw > 16:
                x = make_room(x, 1 << (48 - raw)) << (raw - 16) | extra >> 16
                extra, raw = extra & 0xFFFF, 16
            if raw:
                x = make_room(x, 1 << (32 - raw)) << raw | extra
        at = (int(rows[j]) << table.row_bits) + symbol
        start, end = cumulative[at : at + 2]
        x = make_room(x, (end - start) << (32 - spec.PROBABILITY_BITS))
        quotient, remainder = divmod(x, end - start)
        states[j % lanes] = (quotient << spec.PROBABILITY_BITS) + remainder + start
    first = [half for x in states for half in (x & 0xFFFF, x >> 16)]
    return np.array(first + backwards[::-1], np.uint16)


def _read_changes(
    frequencies: U16, begins: I64, table: DecoderTable, width: int, lanes: int, stream: U16, count: int
) -> tuple[list[tuple[int, int, int]], int]:
    """The decisions of a stream that are changes (which, symbol, raw bits) up to a fault, and that or 0.

    frequencies: for each decision, that of "unchanged"; begins: where its row begins in the tables.
    """
    words, at = stream.tolist(), 2 * lanes
    changes: list[tuple[int, int, int]] = []
    if len(words) < at:
        return changes, spec.STREAM_TOO_SHORT
    states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in range(lanes)]
    bits, low, slot_mask = spec.PROBABILITY_BITS, spec.STATE_LOW, (1 << spec.PROBABILITY_BITS) - 1
    for j, lane, frequency in zip(itertools.count(), itertools.cycle(range(lanes)), frequencies.data):
        x = states[lane]
        slot = x & slot_mask
        if slot < frequency:  # unchanged, as nearly all are: only this branch has to be fast
            x = frequency * (x >> bits) + slot
            if x < low:
                if at == len(words):
                    return changes, spec.STREAM_TOO_SHORT
                x, at = x << 16 | words[at], at + 1
            states[lane] = x
            continue
        row = table.cumulative[begins[j] : begins[j] + table.symbols + 1].tolist()
        symbol = bisect_right(row, slot) - 1
        if symbol == table.symbols or len(changes) == count:
            return changes, spec.NO_TABLE if symbol == table.symbols else spec.OTHER_COUNT
        x = (row[symbol + 1] - row[symbol]) * (x >> bits) + slot - row[symbol]
        extra, taken, raw = 0, 0, _raw_bits(symbol, width)
        while True:
            if x < low:
                if at == len(words):
                    return changes, spec.STREAM_TOO_SHORT
                x, at = x << 16 | words[at], at + 1
            if taken == raw:
                break
            part = min(raw - taken, 16)
            extra |= (x & ((1 << part) - 1)) << taken
            x, taken = x >> part, taken + part
        states[lane] = x
        changes.append((j, symbol, extra))
    if len(changes) != count:
        return changes, spec.OTHER_COUNT
    return changes, spec.STREAM_TOO_LONG if at != len(words) or any(x != low for x in states) else 0


def _decode_block(
    span: CodedSpan, history: SpanHistory, table: DecoderTable, lanes: int, stream: U16, count: int
) -> tuple[U32, Bits, int]:
    """Positions and new bits of the changes of a block, and 0 or the fault."""
    nothing = np.empty(0, np.uint32), span.old[:0]
    if not _fits(span, history):
        return *nothing, spec.FOREIGN_WRITE
    hot, begins, down = _decide(span, history)
    old, width = span.old, 8 * span.old.itemsize
    changes, fault = _read_changes(table.cumulative[begins + 1], begins, table, width, lanes, stream, count)
    which, symbols, extras = np.array(changes, np.int64).reshape(-1, 3).T
    positions = hot[which]
    size_class, goes_down = (symbols - 1) >> 1, (symbols - 1 ^ down[which]) & 1
    longest = spec.DIRECT + width - 4  # the size class of half the circle; those above are of sizes that a table lists
    power = np.int64(1) << np.clip(size_class - spec.DIRECT + 3, 0, width)
    size = np.where(size_class < spec.DIRECT, size_class + 1, power + extras)
    listed = size_class > longest
    size[listed] = table.sizes[size_class[listed] - longest - 1]
    negative = old[positions] >> (width - 1)
    if ((size_class == longest) & ((extras != 0) | (goes_down == negative))).any():
        fault = spec.STEP_TOO_LONG
    if fault:
        return *nothing, fault
    return positions.astype(np.uint32), _moved(old[positions], np.where(goes_down, -size, size)), 0


def _joined(parts: list[U8], blocks: int) -> tuple[U8, I64]:
    """The histories of the first blocks one after the other, and where each block begins."""
    ranks = np.zeros(blocks + 1, np.int64)
    ranks[1 : len(parts) + 1] = np.cumsum([part.size for part in parts])
    return np.concatenate([np.empty(0, np.uint8), *parts]), ranks


def _carries_over(history: SpanHistory, cut: int, entering: U8) -> bool:
    """Whether the history of a block without hot changes stays as it is, and is not compared with its weights."""
    return history.patch_index == 0 or (history.cut == cut and entering.size == 0)


def count_blocks(span: CodedSpan, history: SpanHistory, hot: HotChanges, counts: I64) -> tuple[Decisions, U8, I64]:
    numbers = np.zeros(span.borders.size - 1, np.int64)
    histories: list[U8] = []
    found = [Decisions(numbers[:0], np.empty(0, np.uint16), np.empty(0, np.uint32), np.empty(0, np.uint8))]
    for b, block in enumerate(_blocks(span, history)):
        here = block.hot(hot)
        if (here.positions.size or not _carries_over(block.history, span.cut, here.entering)) and not _fits(*block[2:]):
            numbers[b] = -1
            break
        histories.append(_remembered(block.span, block.history, here))
        if here.positions.size:
            counted = _count_block(block.span, block.history, here, counts)
            found.append(counted._replace(changed=counted.changed + np.uint32(numbers.sum())))
            numbers[b] = counted.counts[0]
    _, *joined = map(np.concatenate, zip(*found, strict=True))
    return Decisions(numbers, *joined), *_joined(histories, numbers.size)


def encode_blocks(decisions: Decisions, extras: U32, table: EncoderTable, lanes: I64) -> tuple[U16, I64]:
    streams = [np.empty(0, np.uint16)]
    borders = pairwise(np.cumsum([0, *decisions.counts]).tolist())
    for (begin, end), count in zip(borders, lanes.tolist(), strict=True):
        here = slice(*np.searchsorted(decisions.changed, (begin, end)).tolist())
        which = decisions.changed[here] - np.uint32(begin)
        block = Decisions(decisions.counts, decisions.rows[begin:end], which, decisions.symbols[here])
        streams.append(_encode_block(block, extras[here], table, count) if end > begin else streams[0])
    return np.concatenate(streams), np.cumsum([stream.size for stream in streams])


def decode_blocks(
    span: CodedSpan, history: SpanHistory, table: DecoderTable, streams: BlockStreams, cold: ColdSteps
) -> tuple[U32, Bits, Bits, U8, I64, int]:
    moved, fault = _move_cold(span, cold)
    enters = _magnitudes(moved) < span.cut << span.shift
    entering_at = cold.positions[enters].astype(np.uint32)
    entering = np.where(cold.steps[enters] < 0, 0x80, 0).astype(np.uint8)
    ends = np.cumsum([0, *streams.sizes])
    found, after = [cold.positions.astype(np.uint32)], [moved]
    histories: list[U8] = []
    nothing = np.empty(0, np.uint32), span.old[:0], np.empty(0, np.uint8), np.empty(0, np.uint32)
    for b, block in enumerate(_blocks(span, history) if not fault else []):
        here = block.hot(HotChanges(*nothing, entering_at, entering))
        if streams.changes[b]:
            stream = int(streams.lanes[b]), streams.words[ends[b] : ends[b + 1]], int(streams.changes[b])
            at, new, fault = _decode_block(block.span, block.history, table, *stream)
            here = here._replace(positions=at, new=new)
            found.append(at + np.uint32(block.begin))
            after.append(new)
        elif not _carries_over(block.history, span.cut, here.entering) and not _fits(block.span, block.history):
            fault = spec.FOREIGN_WRITE
        if fault:
            break
        histories.append(_remembered(block.span, block.history, here))
    positions = np.concatenate(found)
    ascending = np.argsort(positions)
    positions, new = positions[ascending], np.concatenate(after)[ascending]
    return positions, span.old[positions], new, *_joined(histories, streams.changes.size), fault


def _move_cold(span: CodedSpan, cold: ColdSteps) -> tuple[Bits, int]:
    """Cold weights after their steps, and 0 or the first fault."""
    bits, sign = span.old[cold.positions], 1 << (8 * span.old.itemsize - 1)
    half_circle = (np.abs(cold.steps) == sign) & ((cold.steps < 0) == (bits >= sign))
    wrong = np.where(half_circle, spec.COLD_HALF_CIRCLE, 0)
    wrong[_magnitudes(bits) < span.cut << span.shift] = spec.HOT_AMONG_COLD
    return _moved(bits, cold.steps), next((fault for fault in wrong.tolist() if fault), 0)


def _remembered(span: CodedSpan, history: SpanHistory, hot: HotChanges) -> U8:
    """The history after a patch, from its changes of hot weights and the cold ones that become hot."""
    old, index = span.old, history.patch_index
    if index == 0:
        return np.empty(0, np.uint8)
    if _carries_over(history, span.cut, hot.entering) and not hot.positions.size:
        return history.last
    sizes = _magnitudes(old)
    ages = np.zeros(old.size, np.uint8)
    ages[sizes < history.cut << span.shift] = history.last
    ages[hot.positions] = np.where(_went_down(old[hot.positions], hot.new), index | 0x80, index)
    ages[hot.entering_at] = hot.entering | np.uint8(index)
    remembered = sizes < span.cut << span.shift
    remembered[hot.positions] = _magnitudes(hot.new) < span.cut << span.shift
    remembered[hot.entering_at] = True
    return ages[remembered]


def advance_history(
    old: Bits, shift: int, tracked: int, cut: int, last: U8, positions: U32, new: Bits, index: int
) -> U8:
    """Return a block's history after a patch: one byte for each weight whose new class is below the cut.

    A byte is the index in the epoch of the patch that last changed the weight, 0 for none, with the top bit set if it
    moved down. cut >= tracked: tracked weights stay tracked unless their magnitude grew above the cut.
    """
    sizes = _magnitudes(old)
    known = np.flatnonzero(sizes < tracked << shift)[: last.size]
    history = np.zeros(old.size, np.uint8)
    history[known] = last[: known.size]
    history[positions] = np.where(_went_down(old[positions], new), index | 0x80, index)
    sizes[positions] = _magnitudes(new)
    return history[sizes < cut << shift]


def _chunk_keys(chunks: U64, word: int) -> U64:
    u = np.uint64
    z = chunks * u(0x9E3779B97F4A7C15) + u(spec.DIGEST_SEEDS[word])
    z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
    return (z ^ (z >> u(31))) | u(1)


def _weigh(indices: U64, offsets: U64, values: U64, keys: U32) -> tuple[int, int]:
    """Sum values * key(index, offset), modulo 2^64, under both keys."""
    place = indices & np.uint64((1 << spec.CHUNK_BITS) - 1)
    chunks = offsets + (indices >> np.uint64(spec.CHUNK_BITS))
    first, second = (int(np.sum(values * keys[word, place] * _chunk_keys(chunks, word))) for word in (0, 1))
    return first, second


def _weigh_run(values: Bits, index: int, offset: int, keys: U32) -> tuple[int, int]:
    """The same for consecutive units of a tensor, from this index on: a row for each chunk, which shares a key."""
    chunk, place = divmod(index, 1 << spec.CHUNK_BITS)
    by_chunk = np.zeros((-(-(place + values.size) >> spec.CHUNK_BITS), 1 << spec.CHUNK_BITS), np.uint64)
    by_chunk.reshape(-1)[place : place + values.size] = values
    sums = by_chunk @ keys.T.astype(np.uint64)
    chunks = np.arange(chunk, chunk + len(by_chunk)).astype(np.uint64) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
    first, second = (int(np.sum(sums[:, word] * _chunk_keys(chunks, word))) for word in (0, 1))
    return first, second


def _indices(positions: I64, pieces: I64, per: int) -> tuple[U64, U64]:
    """For each unit of the weights at some positions of a tile: its index in its tensor, and the tensor's offset."""
    begin, start, columns, stride, offset = pieces[np.searchsorted(pieces[:, 0], positions, "right") - 1].T
    inside = positions - begin
    rows, along = np.divmod(inside, np.maximum(columns, 1))
    weights = (start + np.where(stride == 0, inside, rows * stride + along)).astype(np.uint64)
    indices = np.add.outer(weights * np.uint64(per), np.arange(per, dtype=np.uint64)).reshape(-1)
    return indices, np.repeat(offset.astype(np.uint64), per)


def digest_weights(
    units: Bits, first: int, count: int, pieces: I64, per: int, keys: U32, in_place: bool
) -> tuple[int, int]:
    total = second = 0
    ends = [*pieces[1:, 0].tolist(), first + count]
    for (begin, start, _, stride, offset), piece_end in zip(pieces.tolist(), ends, strict=True):
        end = min(piece_end, first + count)
        for here in range(max(begin, first), end, 1 << 18):  # as many as a cache has room for
            some, given = min(1 << 18, end - here), (here - first) * per
            if stride == 0:
                index = (start + here - begin) * per
                at = index if in_place else given
                a, b = _weigh_run(units[at : at + some * per], index, offset, keys)
            else:
                indices, offsets = _indices(np.arange(here, here + some), pieces, per)
                values = units[indices] if in_place else units[given : given + some * per]
                a, b = _weigh(indices, offsets, values.astype(np.uint64), keys)
            total, second = total + a, second + b
    return total & 0xFFFFFFFFFFFFFFFF, second & 0xFFFFFFFFFFFFFFFF


def digest_change(
    positions: U32, first: int, pieces: I64, per: int, old: Bits, new: Bits, keys: U32, runs: I64
) -> tuple[int, int, U64]:
    indices, offsets = _indices(positions.astype(np.int64) + first, pieces, per)
    by = new.astype(np.uint64) - old.astype(np.uint64)
    borders = (np.append(runs, positions.size) * per).tolist()
    moved = [_weigh(indices[a:b], offsets[a:b], by[a:b], keys)[0] for a, b in pairwise(borders)]
    return *_weigh(indices, offsets, by, keys), np.array(moved, np.uint64)


# The rounds of LoCo. The caller detects values that are not finite, by the returned sizes.


def _sizes(x: F32) -> U32:
    """The bits of numbers without their signs."""
    return x.view(np.uint32) & np.uint32(0x7FFFFFFF)


def bf16(x: F32) -> U32:
    """The BF16 bits of finite numbers: to the nearest, ties to even."""
    bits = x.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


def advance(
    theta: F32,
    residual: F32,
    momentum: F32,
    local: F32,
    lr: np.float32,
    mu: np.float32,
    nesterov: bool,
    s: F32,
    moved: F32,
) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        delta = (theta - residual) - local
        moved[:] = mu * momentum + delta
        by = delta + mu * moved if nesterov else moved
        s[:] = residual + lr * by


def find_visible(theta: F32, s: F32, reach: np.float32, positions: U32, values: F32) -> tuple[int, int]:
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.flatnonzero((bf16(theta - reach * s) != bf16(theta)) & (s != 0))
    positions[: found.size], values[: found.size] = found, s[found]
    return found.size, int(_sizes(s).max(initial=0))


def describe(theta: F32, trend: F32 | NDArray[np.int8], out: U16) -> None:
    middle = bf16(theta) << np.uint32(16)
    inner = np.where(middle & np.uint32(0x7FFFFFFF), middle - np.uint32(0x8000), middle ^ np.uint32(0x80008000))
    with np.errstate(over="ignore", invalid="ignore"):  # above the largest BF16 value there is no border
        to_outer = np.abs((middle + np.uint32(0x8000)).view(np.float32) - theta)
        to_inner = np.abs(theta - inner.view(np.float32))
        outwards = to_outer <= to_inner
        octave = (np.minimum(to_outer, to_inner).view(np.uint32) >> np.uint32(23)).astype(np.int32)
    negative = np.signbit(theta) ^ outwards  # the direction of theta minus the update
    signs = trend.astype(np.float32, copy=False)  # for int8, numpy would compute the sign bits in FP16, which is slow
    against = (np.signbit(signs) != negative) | (signs == 0)
    kind = np.clip(2 * (octave - spec.FIRST_OCTAVE) + against, 0, 255).astype(np.uint16)
    out[:] = kind << np.uint16(7) | negative.astype(np.uint16) << np.uint16(15)


def move(theta: F32, total: F32, trainers: np.float32, trend: NDArray[np.int8]) -> tuple[int, int, int]:
    with np.errstate(over="ignore", invalid="ignore"):
        mean = total / trainers
        np.subtract(theta, mean, out=total)
        trend[:] = (mean > 0).astype(np.int8) - (mean < 0)
    sizes = _sizes(mean)
    return int(np.count_nonzero(sizes)), int(sizes.max(initial=0)), int(_sizes(total).max(initial=0))


def add_at(total: F32, positions: I64, values: F32) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total[positions] += values
