"""The kernels in plain numpy and Python: slow, short, and the reference for the others.

A machine without numba uses these: it can read and write everything; a patch takes some 20 times as long.
"""

import ctypes
import itertools
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pulsesync.kernels import spec

Bits = NDArray[np.unsignedinteger]


def _magnitudes(bits: Bits) -> Bits:
    """The bits without their signs, in their own dtype: a block of 2^20 weights stays in the cache of a CPU."""
    return bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)


def _ordered(bits: Bits) -> NDArray[np.int64]:
    """Map bit patterns to the order of their values, -0.0 just below +0.0: neighbours differ by one."""
    sign = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int64)
    return np.where(wide & sign, (2 * sign - 1) ^ wide, wide | sign)


def _moved(bits: Bits, steps: NDArray[np.int64]) -> Bits:
    """Weights after their steps, in the circle of all values."""
    sign = 1 << (8 * bits.itemsize - 1)
    ordered = _ordered(bits) + steps & 2 * sign - 1
    return np.where(ordered & sign, ordered ^ sign, ordered ^ 2 * sign - 1).astype(bits.dtype)


def _went_down(old: Bits, new: Bits) -> NDArray[np.bool_]:
    """Whether each step is negative, in the shorter direction, as in `steps`."""
    moved = _ordered(new) - _ordered(old)
    down: NDArray[np.bool_] = (moved < 0) != (np.abs(moved) > 1 << (8 * old.itemsize - 1))
    return down


def changed(old: Bits, new: Bits) -> tuple[NDArray[np.uint32], Bits, Bits]:
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return positions, old[positions], new[positions]


def pick(bits: Bits, positions: NDArray[np.uint32]) -> Bits:
    return bits[positions]


def scatter(bits: Bits, positions: NDArray[np.uint32], new: Bits) -> None:
    bits[positions] = new


def gather_runs(addresses: NDArray[np.uint64], starts: NDArray[np.int64], out: Bits) -> None:
    for address, (begin, end) in zip(addresses.tolist(), pairwise(starts.tolist()), strict=True):
        out[begin:end] = _run_at(address, end - begin, out.dtype)


def scatter_to_runs(
    addresses: NDArray[np.uint64], starts: NDArray[np.int64], positions: NDArray[np.uint32], new: Bits
) -> None:
    borders = np.searchsorted(positions, starts)
    for n in np.flatnonzero(np.diff(borders)).tolist():
        some = slice(borders[n], borders[n + 1])
        run = _run_at(int(addresses[n]), int(starts[n + 1] - starts[n]), new.dtype)
        run[positions[some] - starts[n]] = new[some]


def _run_at(address: int, size: int, dtype: np.dtype[np.unsignedinteger]) -> Bits:
    """The weights at an address, as a view."""
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(memory).cast("B"), dtype)


def split_planes(weights: Bits, low: NDArray[np.uint8], high: NDArray[np.uint8]) -> None:
    low[:], high[:] = weights << 1 | weights >> 15, weights >> 7


def join_planes(low: NDArray[np.uint8], high: NDArray[np.uint8], out: Bits) -> None:
    rotated = low + (high.astype(np.uint16) << 8)
    out[:] = rotated >> 1 | rotated << 15


def huffman_streams(
    pairs: NDArray[np.uint16], borders: NDArray[np.int64], codes: NDArray[np.uint32], out: NDArray[np.uint8]
) -> NDArray[np.int64]:
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


def sample_classes(old: Bits, shift: int) -> NDArray[np.int64]:
    looked_at = np.arange(old.size) % spec.SAMPLE_PERIOD < spec.SAMPLE_RUN
    return np.bincount(_magnitudes(old[looked_at]) >> shift, minlength=256)


def steps(
    old: Bits, new: Bits, shift: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint8], NDArray[np.int64]]:
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
    positions: NDArray[np.uint32],
    new: Bits,
    symbols: NDArray[np.uint8],
    extras: NDArray[np.uint32],
    classes: NDArray[np.uint8],
    shift: int,
    cut: int,
) -> tuple[
    NDArray[np.uint32],
    Bits,
    NDArray[np.uint8],
    NDArray[np.uint32],
    NDArray[np.int64],
    NDArray[np.int64],
    NDArray[np.uint32],
    NDArray[np.uint8],
]:
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


def _decisions(
    old: Bits, shift: int, cut: int, rows: NDArray[np.uint32], row_bits: int, last: NDArray[np.uint8], tracked: int
) -> tuple[NDArray[np.intp], NDArray[np.int64], NDArray[np.int64]]:
    """The hot weights in order: position, row of the tables, and whether each moved down when it last changed."""
    sizes = _magnitudes(old)
    hot = np.flatnonzero(sizes < cut << shift)
    history = np.zeros(hot.size, np.int64)
    history[sizes[hot] < tracked << shift] = last
    found = rows[sizes[hot] >> shift].astype(np.int64) + ((history & 0x7F) << row_bits)
    return hot, found, history >> 7


def _count_block(
    old: Bits,
    shift: int,
    cut: int,
    rows: NDArray[np.uint32],
    row_bits: int,
    last: NDArray[np.uint8],
    tracked: int,
    positions: NDArray[np.uint32],
    new: Bits,
    symbols: NDArray[np.uint8],
    counts: NDArray[np.int64],
    index: int,
    entering_at: NDArray[np.uint32],
    entering: NDArray[np.uint8],
) -> tuple[int, NDArray[np.uint8], NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint8]]:
    if np.count_nonzero(_magnitudes(old) < tracked << shift) != last.size:
        return -1, last, np.empty(0, np.uint16), np.empty(0, np.uint32), np.empty(0, np.uint8)
    hot, begins, down = _decisions(old, shift, cut, rows, row_bits, last, tracked)
    decided = np.zeros(hot.size, np.int64)
    where = np.searchsorted(hot, positions)
    decided[where] = ((symbols.astype(np.int64) - 1) ^ down[where]) + 1
    np.add.at(counts, begins + decided, 1)
    remembered = _remembered(old, shift, tracked, cut, last, positions, new, index, entering_at, entering)
    found = (begins >> row_bits).astype(np.uint16), where.astype(np.uint32), decided[where].astype(np.uint8)
    return hot.size, remembered, *found


def _encode_block(
    rows: NDArray[np.uint16],
    row_bits: int,
    width: int,
    changed: NDArray[np.uint32],
    symbols: NDArray[np.uint8],
    extras: NDArray[np.uint32],
    cumulative: NDArray[np.uint16],
    lanes: int,
) -> NDArray[np.uint16]:
    table = cumulative.tolist()
    changes = {int(p): (int(s), int(e)) for p, s, e in zip(changed, symbols, extras, strict=True)}
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
            raw = _raw_bits(symbol, width)
            if raw > 16:
                x = make_room(x, 1 << (48 - raw)) << (raw - 16) | extra >> 16
                extra, raw = extra & 0xFFFF, 16
            if raw:
                x = make_room(x, 1 << (32 - raw)) << raw | extra
        at = (int(rows[j]) << row_bits) + symbol
        start, end = table[at : at + 2]
        x = make_room(x, (end - start) << (32 - spec.PROBABILITY_BITS))
        quotient, remainder = divmod(x, end - start)
        states[j % lanes] = (quotient << spec.PROBABILITY_BITS) + remainder + start
    first = [half for x in states for half in (x & 0xFFFF, x >> 16)]
    return np.array(first + backwards[::-1], np.uint16)


def _read_changes(
    frequencies: NDArray[np.uint16],
    begins: NDArray[np.int64],
    cumulative: NDArray[np.uint16],
    symbol_count: int,
    width: int,
    lanes: int,
    stream: NDArray[np.uint16],
    count: int,
) -> tuple[list[tuple[int, int, int]], int]:
    """The decisions of a stream that are changes (which, symbol, raw bits) up to a fault, and that or 0.

    frequencies: for each decision, that of "unchanged"; begins: where its row begins in the tables.
    """
    words, at = stream.tolist(), 2 * lanes
    changes: list[tuple[int, int, int]] = []
    if len(words) < at:
        return changes, 1
    states = [words[2 * lane] | words[2 * lane + 1] << 16 for lane in range(lanes)]
    bits, low, slot_mask = spec.PROBABILITY_BITS, spec.STATE_LOW, (1 << spec.PROBABILITY_BITS) - 1
    for j, lane, frequency in zip(itertools.count(), itertools.cycle(range(lanes)), frequencies.data):
        x = states[lane]
        slot = x & slot_mask
        if slot < frequency:  # unchanged, as nearly all are: only this branch has to be fast
            x = frequency * (x >> bits) + slot
            if x < low:
                if at == len(words):
                    return changes, 1
                x, at = x << 16 | words[at], at + 1
            states[lane] = x
            continue
        row = cumulative[begins[j] : begins[j] + symbol_count + 1].tolist()
        symbol = bisect_right(row, slot) - 1
        if symbol == symbol_count or len(changes) == count:
            return changes, 2 if symbol == symbol_count else 3
        x = (row[symbol + 1] - row[symbol]) * (x >> bits) + slot - row[symbol]
        extra, taken, raw = 0, 0, _raw_bits(symbol, width)
        while True:
            if x < low:
                if at == len(words):
                    return changes, 1
                x, at = x << 16 | words[at], at + 1
            if taken == raw:
                break
            part = min(raw - taken, 16)
            extra |= (x & ((1 << part) - 1)) << taken
            x, taken = x >> part, taken + part
        states[lane] = x
        changes.append((j, symbol, extra))
    if len(changes) != count:
        return changes, 3
    return changes, 4 if at != len(words) or any(x != low for x in states) else 0


def _decode_block(
    old: Bits,
    shift: int,
    cut: int,
    rows: NDArray[np.uint32],
    row_bits: int,
    last: NDArray[np.uint8],
    tracked: int,
    cumulative: NDArray[np.uint16],
    symbol_count: int,
    sizes: NDArray[np.uint32],
    lanes: int,
    stream: NDArray[np.uint16],
    count: int,
    index: int,
    entering_at: NDArray[np.uint32],
    entering: NDArray[np.uint8],
) -> tuple[NDArray[np.uint32], Bits, NDArray[np.uint8], int]:
    if np.count_nonzero(_magnitudes(old) < tracked << shift) != last.size:
        return np.empty(0, np.uint32), old[:0], last, spec.FOREIGN_WRITE
    hot, begins, down = _decisions(old, shift, cut, rows, row_bits, last, tracked)
    width, frequencies = 8 * old.itemsize, cumulative[begins + 1]
    changes, fault = _read_changes(frequencies, begins, cumulative, symbol_count, width, lanes, stream, count)
    which, symbols, extras = np.array(changes, np.int64).reshape(-1, 3).T
    positions = hot[which]
    size_class, goes_down = (symbols - 1) >> 1, (symbols - 1 ^ down[which]) & 1
    longest = (
        spec.DIRECT + width - 4
    )  # the size class of half the circle; those above are of sizes that the table lists
    power = np.int64(1) << np.clip(size_class - spec.DIRECT + 3, 0, width)
    size = np.where(size_class < spec.DIRECT, size_class + 1, power + extras)
    listed = size_class > longest
    size[listed] = sizes[size_class[listed] - longest - 1]
    negative = old[positions] >> (width - 1)
    if ((size_class == longest) & ((extras != 0) | (goes_down == negative))).any():
        fault = 6
    if fault:
        return positions.astype(np.uint32), old[positions], last, fault
    new = _moved(old[positions], np.where(goes_down, -size, size))
    at = positions.astype(np.uint32)
    return at, new, _remembered(old, shift, tracked, cut, last, at, new, index, entering_at, entering), 0


@dataclass(frozen=True)
class _Block:
    """One block of a span: its borders, its bytes of the history, and its part of the lists by position."""

    begin: int
    end: int
    last: NDArray[np.uint8]

    def share(self, positions: NDArray[np.uint32]) -> slice:
        return slice(*np.searchsorted(positions, (self.begin, self.end)).tolist())

    def local(self, positions: NDArray[np.uint32]) -> NDArray[np.uint32]:
        return positions[self.share(positions)] - np.uint32(self.begin)


def _blocks(borders: NDArray[np.int64], last: NDArray[np.uint8], ranks: NDArray[np.int64]) -> list[_Block]:
    sides = zip(pairwise(borders.tolist()), pairwise(ranks.tolist()), strict=True)
    return [_Block(begin, end, last[first:behind]) for (begin, end), (first, behind) in sides]


def _joined(parts: list[NDArray[np.uint8]], blocks: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The histories of the first blocks one after the other, and where each block begins."""
    ranks = np.zeros(blocks + 1, np.int64)
    ranks[1 : len(parts) + 1] = np.cumsum([part.size for part in parts])
    return np.concatenate([np.empty(0, np.uint8), *parts]), ranks


def _carry(
    old: Bits,
    shift: int,
    tracked: int,
    cut: int,
    last: NDArray[np.uint8],
    index: int,
    entering_at: NDArray[np.uint32],
    entering: NDArray[np.uint8],
) -> NDArray[np.uint8] | None:
    """The history of a block without hot changes after a patch; None if it does not match these weights."""
    if index == 0 or (tracked == cut and entering_at.size == 0):
        return last if index else np.empty(0, np.uint8)
    if np.count_nonzero(_magnitudes(old) < tracked << shift) != last.size:
        return None
    nothing = np.empty(0, np.uint32), np.empty(0, old.dtype)
    return _remembered(old, shift, tracked, cut, last, *nothing, index, entering_at, entering)


def count_blocks(
    old: Bits,
    borders: NDArray[np.int64],
    shift: int,
    cut: int,
    rows: NDArray[np.uint32],
    row_bits: int,
    last: NDArray[np.uint8],
    ranks: NDArray[np.int64],
    tracked: int,
    positions: NDArray[np.uint32],
    new: Bits,
    symbols: NDArray[np.uint8],
    counts: NDArray[np.int64],
    index: int,
    entering_at: NDArray[np.uint32],
    entering: NDArray[np.uint8],
) -> tuple[
    NDArray[np.int64],
    NDArray[np.uint8],
    NDArray[np.int64],
    NDArray[np.uint16],
    NDArray[np.uint32],
    NDArray[np.uint8],
]:
    decisions = np.zeros(borders.size - 1, np.int64)
    histories: list[NDArray[np.uint8]] = []
    found, changed, turned = [np.empty(0, np.uint16)], [np.empty(0, np.uint32)], [np.empty(0, np.uint8)]
    for b, block in enumerate(_blocks(borders, last, ranks)):
        weights, here, enter = old[block.begin : block.end], block.share(positions), block.share(entering_at)
        entries = index, block.local(entering_at), entering[enter]
        if here.start == here.stop:
            carried = _carry(weights, shift, tracked, cut, block.last, *entries)
            if carried is None:
                decisions[b] = -1
                break
            histories.append(carried)
            continue
        changes = block.local(positions), new[here], symbols[here], counts
        decided, after, of_decisions, which, by = _count_block(
            weights, shift, cut, rows, row_bits, block.last, tracked, *changes, *entries
        )
        decisions[b] = decided
        if decided < 0:
            break
        histories.append(after)
        changed.append(which + np.uint32(decisions[:b].sum()))
        found.append(of_decisions)
        turned.append(by)
    kept = np.concatenate(found), np.concatenate(changed), np.concatenate(turned)
    return decisions, *_joined(histories, decisions.size), *kept


def encode_blocks(
    rows: NDArray[np.uint16],
    row_bits: int,
    width: int,
    changed: NDArray[np.uint32],
    symbols: NDArray[np.uint8],
    extras: NDArray[np.uint32],
    cumulative: NDArray[np.uint16],
    reciprocals: NDArray[np.uint32],  # for faster kernels: not needed here
    decisions: NDArray[np.int64],
    lanes: NDArray[np.int64],
) -> tuple[NDArray[np.uint16], NDArray[np.int64]]:
    streams = [np.empty(0, np.uint16)]
    for (begin, end), count in zip(pairwise(np.cumsum([0, *decisions]).tolist()), lanes.tolist(), strict=True):
        here = slice(*np.searchsorted(changed, (begin, end)).tolist())
        changes = changed[here] - np.uint32(begin), symbols[here], extras[here]
        block = _encode_block(rows[begin:end], row_bits, width, *changes, cumulative, count)
        streams.append(block if end > begin else np.empty(0, np.uint16))
    return np.concatenate(streams), np.cumsum([stream.size for stream in streams])


def decode_blocks(
    old: Bits,
    borders: NDArray[np.int64],
    shift: int,
    cut: int,
    rows: NDArray[np.uint32],
    row_bits: int,
    last: NDArray[np.uint8],
    ranks: NDArray[np.int64],
    tracked: int,
    cumulative: NDArray[np.uint16],
    symbol_count: int,
    sizes: NDArray[np.uint32],
    lanes: NDArray[np.int64],
    words: NDArray[np.uint16],
    lengths: NDArray[np.int64],
    changes: NDArray[np.int64],
    index: int,
    cold_at: NDArray[np.int64],
    cold_steps: NDArray[np.int64],
) -> tuple[NDArray[np.uint32], Bits, Bits, NDArray[np.uint8], NDArray[np.int64], int]:
    cold, fault = _move_cold(old, shift, cut, cold_at, cold_steps)
    enters = _magnitudes(cold) < cut << shift
    entering_at = cold_at[enters].astype(np.uint32)
    entering = np.where(cold_steps[enters] < 0, 0x80, 0).astype(np.uint8)
    ends = np.cumsum([0, *lengths])
    found, moved = [cold_at.astype(np.uint32)], [cold]
    histories: list[NDArray[np.uint8]] = []
    for b, block in enumerate(_blocks(borders, last, ranks) if not fault else []):
        weights, context = old[block.begin : block.end], (shift, cut, rows, row_bits, block.last, tracked)
        entries = index, block.local(entering_at), entering[block.share(entering_at)]
        if changes[b] == 0:
            carried = _carry(weights, shift, tracked, cut, block.last, *entries)
            if carried is None:
                fault = spec.FOREIGN_WRITE
                break
            histories.append(carried)
            continue
        stream = int(lanes[b]), words[ends[b] : ends[b + 1]], int(changes[b])
        at, new, after, fault = _decode_block(weights, *context, cumulative, symbol_count, sizes, *stream, *entries)
        if fault:
            break
        found.append(at + np.uint32(block.begin))
        moved.append(new)
        histories.append(after)
    positions = np.concatenate(found)
    ascending = np.argsort(positions)
    positions, new = positions[ascending], np.concatenate(moved)[ascending]
    return positions, old[positions], new, *_joined(histories, changes.size), fault


def _move_cold(
    old: Bits, shift: int, cut: int, cold_at: NDArray[np.int64], cold_steps: NDArray[np.int64]
) -> tuple[Bits, int]:
    """Cold weights after their steps, and 0 or the first fault."""
    bits, sign = old[cold_at], 1 << (8 * old.itemsize - 1)
    half_circle = (np.abs(cold_steps) == sign) & ((cold_steps < 0) == (bits >= sign))
    wrong = np.where(half_circle, spec.COLD_HALF_CIRCLE, 0)
    wrong[_magnitudes(bits) < cut << shift] = spec.HOT_AMONG_COLD
    return _moved(bits, cold_steps), next((fault for fault in wrong.tolist() if fault), 0)


def _remembered(
    old: Bits,
    shift: int,
    tracked: int,
    cut: int,
    last: NDArray[np.uint8],
    positions: NDArray[np.uint32],
    new: Bits,
    index: int,
    entering_at: NDArray[np.uint32],
    entering: NDArray[np.uint8],
) -> NDArray[np.uint8]:
    """The history after a patch, from its changes of hot weights and the cold ones that become hot."""
    if index == 0:
        return np.empty(0, np.uint8)
    sizes = _magnitudes(old)
    history = np.zeros(old.size, np.uint8)
    history[sizes < tracked << shift] = last
    history[positions] = np.where(_went_down(old[positions], new), index | 0x80, index)
    history[entering_at] = entering | np.uint8(index)
    remembered = sizes < cut << shift
    remembered[positions] = _magnitudes(new) < cut << shift
    remembered[entering_at] = True
    return history[remembered]


def advance_history(
    old: Bits,
    shift: int,
    tracked: int,
    cut: int,
    last: NDArray[np.uint8],
    positions: NDArray[np.uint32],
    new: Bits,
    index: int,
) -> NDArray[np.uint8]:
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


def _chunk_keys(chunks: NDArray[np.uint64], word: int) -> NDArray[np.uint64]:
    u = np.uint64
    z = chunks * u(0x9E3779B97F4A7C15) + u(spec.DIGEST_SEEDS[word])
    z = (z ^ (z >> u(30))) * u(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> u(27))) * u(0x94D049BB133111EB)
    return (z ^ (z >> u(31))) | u(1)


def _weigh(
    indices: NDArray[np.uint64], offsets: NDArray[np.uint64], values: NDArray[np.uint64], keys: NDArray[np.uint32]
) -> tuple[int, int]:
    """Sum values * key(index, offset), modulo 2^64, under both keys."""
    place = indices & np.uint64((1 << spec.CHUNK_BITS) - 1)
    chunks = offsets + (indices >> np.uint64(spec.CHUNK_BITS))
    first, second = (int(np.sum(values * keys[word, place] * _chunk_keys(chunks, word))) for word in (0, 1))
    return first, second


def _weigh_run(values: Bits, index: int, offset: int, keys: NDArray[np.uint32]) -> tuple[int, int]:
    """The same for consecutive units of a tensor, from this index on: a row for each chunk, which shares a key."""
    chunk, place = divmod(index, 1 << spec.CHUNK_BITS)
    by_chunk = np.zeros((-(-(place + values.size) >> spec.CHUNK_BITS), 1 << spec.CHUNK_BITS), np.uint64)
    by_chunk.reshape(-1)[place : place + values.size] = values
    sums = by_chunk @ keys.T.astype(np.uint64)
    chunks = np.arange(chunk, chunk + len(by_chunk)).astype(np.uint64) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
    first, second = (int(np.sum(sums[:, word] * _chunk_keys(chunks, word))) for word in (0, 1))
    return first, second


def _indices(
    positions: NDArray[np.int64], pieces: NDArray[np.int64], per: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """For each unit of the weights at some positions of a tile: its index in its tensor, and the tensor's offset."""
    begin, start, columns, stride, offset = pieces[np.searchsorted(pieces[:, 0], positions, "right") - 1].T
    inside = positions - begin
    rows, along = np.divmod(inside, np.maximum(columns, 1))
    weights = (start + np.where(stride == 0, inside, rows * stride + along)).astype(np.uint64)
    indices = np.add.outer(weights * np.uint64(per), np.arange(per, dtype=np.uint64)).reshape(-1)
    return indices, np.repeat(offset.astype(np.uint64), per)


def digest_weights(
    units: Bits,
    first: int,
    count: int,
    pieces: NDArray[np.int64],
    per: int,
    keys: NDArray[np.uint32],
    in_place: bool,
) -> tuple[int, int]:
    total = second = 0
    ends = [*pieces[1:, 0].tolist(), first + count]
    for (begin, start, _, stride, offset), piece_end in zip(pieces.tolist(), ends, strict=True):
        end = min(piece_end, first + count)
        for here in range(
            max(begin, first), end, 1 << 18
        ):  # of the weights in a piece, as many as a cache has room for
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
    positions: NDArray[np.uint32],
    first: int,
    pieces: NDArray[np.int64],
    per: int,
    old: Bits,
    new: Bits,
    keys: NDArray[np.uint32],
    runs: NDArray[np.int64],
) -> tuple[int, int, NDArray[np.uint64]]:
    indices, offsets = _indices(positions.astype(np.int64) + first, pieces, per)
    by = new.astype(np.uint64) - old.astype(np.uint64)
    borders = (np.append(runs, positions.size) * per).tolist()
    moved = [_weigh(indices[a:b], offsets[a:b], by[a:b], keys)[0] for a, b in pairwise(borders)]
    return *_weigh(indices, offsets, by, keys), np.array(moved, np.uint64)


# The rounds of LoCo. The caller detects values that are not finite, by the returned sizes.

F32 = NDArray[np.float32]


def _sizes(x: F32) -> NDArray[np.uint32]:
    """The bits of numbers without their signs."""
    return x.view(np.uint32) & np.uint32(0x7FFFFFFF)


def bf16(x: F32) -> NDArray[np.uint32]:
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


def find_visible(theta: F32, s: F32, reach: np.float32, positions: NDArray[np.uint32], values: F32) -> tuple[int, int]:
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.flatnonzero((bf16(theta - reach * s) != bf16(theta)) & (s != 0))
    positions[: found.size], values[: found.size] = found, s[found]
    return found.size, int(_sizes(s).max(initial=0))


def describe(theta: F32, trend: F32 | NDArray[np.int8], out: NDArray[np.uint16]) -> None:
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


def add_at(total: F32, positions: NDArray[np.int64], values: F32) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        total[positions] += values
