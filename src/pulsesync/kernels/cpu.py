"""The hot loops for CPUs, compiled by numba. Same names and same results, bit for bit, as `reference`.

Every function works on at most 2^20 consecutive weights of a tile, one block or several, as a contiguous array of
unsigned integers. All of them release the GIL, and parallelism comes from a thread pool over blocks. None checks its
arguments beyond what memory safety needs: the codecs have done that.

The entropy coder and the rounds of LoCo are in separate files; here are the comparison, which processes 64 weights at a
time, the steps of changes, and the digest.
"""

import threading
from typing import Any

import numpy as np

from pulsesync.kernels import reference, spec
from pulsesync.kernels.coder import count_blocks, decode_blocks, encode_blocks  # noqa: F401 - of this set of kernels
from pulsesync.kernels.jit import (
    ONE,
    U,
    compiled,
    copy_from,
    inner,
    mark_changed,
    prefetch,
    store_at,
    store_word,
    trailing_zeros,
)
from pulsesync.kernels.rounds import add_at, advance, describe, find_visible, move  # noqa: F401 - the same

_scratch = threading.local()
_CHUNK_BITS = spec.CHUNK_BITS
_CHUNK = 1 << spec.CHUNK_BITS

# Needed where the coder has not processed a block's hot weights, which is rare: not worth a second of compilation.
advance_history = reference.advance_history


def changed(old: Any, new: Any) -> Any:
    """Return where the bits of two equally long arrays differ: positions (uint32, ascending), old bits, new bits."""
    if old.itemsize != 2:
        # another compiled version for each dtype would cost more time at first use than it ever saves: numpy is nearly
        # as fast
        return reference.changed(old, new)
    if not hasattr(_scratch, "positions") or _scratch.positions.size < old.size:
        _scratch.positions = np.empty(old.size, np.uint32)
        _scratch.before, _scratch.after = np.empty(old.size, old.dtype), np.empty(old.size, old.dtype)
    found = _scratch.positions, _scratch.before, _scratch.after
    count = _differ(old, new, *found)
    return found[0][:count].copy(), found[1][:count].copy(), found[2][:count].copy()


@compiled
def _differ(old: Any, new: Any, positions: Any, before: Any, after: Any) -> Any:
    """Write where weights differ, and both of them, while they are in the cache; return their number.

    The caller keeps the arrays from call to call: new memory for the worst case costs as much time, in pages that the
    system zeroes, as the comparison.
    """
    k, first, end = U(0), U(0), U(old.size)
    while first < end:
        mark = U(0)
        if end - first >= U(64):
            mark = mark_changed(old, new, first)
        else:
            for i in range(end - first):
                mark |= U(old[first + U(i)] != new[first + U(i)]) << U(i)
        while mark != 0:
            i = first + trailing_zeros(mark)
            a, b = old[i], new[i]
            positions[k], before[k], after[k] = i, a, b
            k += U(a != b)  # they are equal if another process wrote them between the two reads
            mark &= mark - ONE
        first += U(64)
    return k


def pick(bits: Any, positions: Any) -> Any:
    """Return the weights at these positions, all of which must be inside."""
    return _pick(bits, positions) if bits.itemsize == 2 else reference.pick(bits, positions)


@compiled
def _pick(bits: Any, positions: Any) -> Any:
    out = np.empty(positions.size, bits.dtype)
    for k in range(positions.size):
        out[k] = bits[positions[k]]
    return out


def scatter(bits: Any, positions: Any, new: Any) -> None:
    """Write weights at these positions, all of which must be inside."""
    (_scatter if bits.itemsize == 2 else reference.scatter)(bits, positions, new)


@compiled
def _scatter(bits: Any, positions: Any, new: Any) -> None:
    ahead = max(0, positions.size - 16)
    for k in range(ahead):
        prefetch(bits, positions[k + 16])  # otherwise each write waits for memory
        bits[positions[k]] = new[k]
    for k in range(ahead, positions.size):
        bits[positions[k]] = new[k]


@compiled
def gather_runs(addresses: Any, starts: Any, out: Any) -> None:
    """Copy runs of weights from these addresses to where each starts in out."""
    for n in range(addresses.size):
        copy_from(out, starts[n], addresses[n], starts[n + 1] - starts[n])


@compiled
def scatter_to_runs(addresses: Any, starts: Any, positions: Any, new: Any) -> None:
    """Write weights at ascending positions, all of which must be inside, of such runs, concatenated."""
    n = 0
    for k in range(positions.size):
        at = np.int64(positions[k])
        while at >= starts[n + 1]:
            n += 1
        store_at(addresses[n], at - starts[n], new[k])


@compiled
def split_planes(weights: Any, low: Any, high: Any) -> None:
    """Write the lower and the upper bytes of 16-bit weights whose sign has been moved after their last bit."""
    for k in range(weights.size):
        low[k] = np.uint8(weights[k] << np.uint16(1) | weights[k] >> np.uint16(15))
        high[k] = np.uint8(weights[k] >> np.uint16(7))


@compiled
def join_planes(low: Any, high: Any, out: Any) -> None:
    """Undo `split_planes`."""
    for k in range(out.size):
        rotated = np.uint16(low[k]) | np.uint16(high[k]) << np.uint16(8)
        out[k] = rotated >> np.uint16(1) | rotated << np.uint16(15)


@compiled
def huffman_streams(pairs: Any, borders: Any, codes: Any, out: Any) -> Any:
    """Write four streams of Huffman codes for each block of bytes; return their sizes, or none if a code is missing.

    pairs: the bytes, two at a time; borders: of the blocks, in pairs, multiples of 4; codes: for each pair, its bits
    shifted by 5 and their number, at most 22. A stream is read from its end, which a set bit marks. out has space for
    12 bits per byte.
    """
    sizes = np.empty((borders.size - 1, 4), np.int64)
    at = 0
    for block in range(borders.size - 1):
        quarter = (borders[block + 1] - borders[block]) >> 2
        for k in range(4):
            some = pairs[borders[block] + k * quarter : borders[block] + (k + 1) * quarter]
            size = _huffman_stream(some, codes, out[at:])
            if size == 0:
                return sizes[:0]
            sizes[block, k] = size
            at += size
    return sizes


@inner
def _huffman_stream(pairs: Any, codes: Any, out: Any) -> Any:
    """Write one stream; return its size, or 0 if a pair has no code."""
    word, filled, at, missing = U(0), U(0), 0, U(0)
    i = pairs.size
    while i > 1:
        first, second = U(codes[pairs[i - 1]]), U(codes[pairs[i - 2]])
        missing |= (first - ONE) | (second - ONE)  # the top bit, which no code has, where one is 0
        word |= (first >> U(5) | second >> U(5) << (first & U(31))) << filled
        filled += (first & U(31)) + (second & U(31))
        store_word(out, at, word)
        at += np.int64(filled >> U(3))
        word >>= filled & ~U(7)
        filled &= U(7)
        i -= 2
    if i:
        last = U(codes[pairs[0]])
        missing |= last - ONE
        word |= last >> U(5) << filled
        filled += last & U(31)
    store_word(out, at, word | ONE << filled)
    return 0 if missing >> U(63) else at + np.int64(filled >> U(3)) + 1


@compiled
def sample_classes(old: Any, shift: int) -> Any:
    """Count the classes of a fixed 16 of every 1021 weights: enough to choose a cut, at a sixtieth of the cost."""
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    out = np.zeros(256, np.int64)
    for start in range(0, old.size, spec.SAMPLE_PERIOD):
        prefetch(old, start + 8 * spec.SAMPLE_PERIOD)  # otherwise the CPU waits for memory at each run
        for i in range(start, min(start + spec.SAMPLE_RUN, old.size)):
            out[(U(old[i]) & magnitude) >> U(shift)] += 1
    return out


@compiled
def steps(old: Any, new: Any, shift: int) -> Any:
    """Return symbol (uint8), extra bits (uint32) and old class (uint8) of each change, and the changes by class.

    A step is the distance in units of the last place: bits are first mapped to the order of their values, -0.0 just
    below +0.0, so neighbours differ by one. Symbols are 1 + 2 * size class + (1 if downwards); symbol 0, unchanged,
    does not occur here.
    """
    width = U(8 * old.itemsize)
    full = (ONE << width) - ONE
    sign = ONE << (width - ONE)
    symbols, extras = np.empty(old.size, np.uint8), np.empty(old.size, np.uint32)
    classes, by_class = np.empty(old.size, np.uint8), np.zeros(256, np.int64)
    for i in range(old.size):
        a, b = U(old[i]), U(new[i])
        c = (a & (sign - ONE)) >> U(shift)
        classes[i] = c
        by_class[c] += 1
        a ^= full if a & sign else sign
        b ^= full if b & sign else sign
        up, down = (b - a) & full, (a - b) & full
        direction = U(up > sign) | (U(up == sign) & U(b < a))
        size = down if direction else up
        k, extra = 0, U(0)
        if size <= spec.DIRECT:
            k = np.int64(size) - 1
        else:
            k = 3
            while (size >> U(k)) > ONE:
                k += 1
            extra = size - (ONE << U(k))
            k += spec.DIRECT - 3
        symbols[i] = 1 + 2 * k + direction
        extras[i] = extra
    return symbols, extras, classes, by_class


@compiled
def split(positions: Any, new: Any, symbols: Any, extras: Any, classes: Any, shift: int, cut: int) -> Any:
    """Separate changes: of hot weights position, new bits, symbol, extra bits; of cold ones position and signed step.

    Last are the cold weights that become hot: position, and 0x80 if they moved down.
    """
    magnitude = (ONE << U(8 * new.itemsize - 1)) - ONE
    hot = 0
    for i in range(positions.size):
        hot += classes[i] < cut
    hot_new = np.empty(hot, new.dtype)
    entering_at, entering = np.empty(positions.size - hot, np.uint32), np.empty(positions.size - hot, np.uint8)
    hot_at, hot_symbols, hot_extras = np.empty(hot, np.uint32), np.empty(hot, np.uint8), np.empty(hot, np.uint32)
    cold_at, cold_steps = np.empty(positions.size - hot, np.int64), np.empty(positions.size - hot, np.int64)
    h = c = e = 0
    for i in range(positions.size):
        if classes[i] < cut:
            hot_at[h], hot_new[h] = positions[i], new[i]
            hot_symbols[h], hot_extras[h] = symbols[i], extras[i]
            h += 1
        else:
            size_class = (np.int64(symbols[i]) - 1) >> 1
            size = size_class + 1
            if size_class >= spec.DIRECT:
                size = (np.int64(1) << (size_class - (spec.DIRECT - 3))) + np.int64(extras[i])
            cold_at[c], cold_steps[c] = positions[i], -size if (symbols[i] - 1) & 1 else size
            c += 1
            if np.int64((U(new[i]) & magnitude) >> U(shift)) < cut:
                entering_at[e], entering[e] = positions[i], 0x80 if (symbols[i] - 1) & 1 else 0
                e += 1
    return hot_at, hot_new, hot_symbols, hot_extras, cold_at, cold_steps, entering_at[:e], entering[:e]


@inner
def _chunk_key(chunk: Any, word: int) -> Any:
    """The odd 64-bit key of a chunk, for the first or second word of the digest (splitmix64)."""
    z = chunk * U(0x9E3779B97F4A7C15) + (U(spec.DIGEST_SEEDS[0]) if word == 0 else U(spec.DIGEST_SEEDS[1]))
    z = (z ^ (z >> U(30))) * U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U(27))) * U(0x94D049BB133111EB)
    return (z ^ (z >> U(31))) | ONE


@inner
def _weigh_run(units: Any, at: int, index: int, count: int, offset: Any, keys: Any) -> Any:
    """Sum unit * key over `count` units from units[at] on, the first of which has this index in its tensor."""
    first, second = U(0), U(0)
    i, end = index, index + count
    while i < end:
        chunk = i >> _CHUNK_BITS
        stop = min(end, (chunk + 1) << _CHUNK_BITS)
        run = units[at + i - index : at + stop - index]
        base = i & (_CHUNK - 1)
        left, right = keys[0, base : base + run.size], keys[1, base : base + run.size]
        a, b = U(0), U(0)
        for j in range(run.size):
            u = np.uint32(run[j])
            a += U(u) * U(left[j])
            b += U(u) * U(right[j])
        first += a * _chunk_key(offset + U(chunk), 0)
        second += b * _chunk_key(offset + U(chunk), 1)
        i = stop
    return first, second


@compiled
def digest_weights(units: Any, first: int, count: int, pieces: Any, per: int, keys: Any, in_place: bool) -> Any:
    """Sum unit * key over `count` weights of a tile, from weight `first` on; weights have `per` units each.

    pieces: the tile's table of them (see `Tile.piece_table`). units: those of these weights, in the order of the tile;
    or, with in_place, those of the whole tensor of the tile.
    """
    total, second = U(0), U(0)
    position, end = first, first + count
    piece, last = 0, pieces.shape[0] - 1
    while position < end:
        while piece < last and pieces[piece + 1, 0] <= position:
            piece += 1
        stop = min(end, pieces[piece + 1, 0]) if piece < last else end
        begin, columns, stride = pieces[piece, 0], pieces[piece, 2], pieces[piece, 3]
        i = position - begin
        if stride:  # only to the end of the row
            row = i // columns
            stop = min(stop, begin + (row + 1) * columns)
            i += row * (stride - columns)
        i += pieces[piece, 1]
        at = i if in_place else position - first
        a, b = _weigh_run(units, at * per, i * per, (stop - position) * per, U(pieces[piece, 4]), keys)
        total += a
        second += b
        position = stop
    return total, second


@inner
def _weigh_changes(
    positions: Any, k: Any, end: Any, shift: int, start: int, columns: int, stride: int, offset: Any, per: int,
    old: Any, new: Any, keys: Any,
) -> Any:  # fmt: skip
    """How changes k to end change the two sums; all are in one piece, at position + shift.

    The sum over the changes of a chunk is multiplied by its key once.
    """
    total, second = U(0), U(0)
    chunk, next_chunk, a, b = U(0), U(0), U(0), U(0)
    left, right = keys[0], keys[1]
    for j in range(k, end):
        i = shift + np.int64(positions[j])
        if stride:
            i += i // columns * (stride - columns)
        for unit in range(per):
            at = U((start + i) * per + unit)
            if at >= next_chunk:
                total += a * _chunk_key(offset + chunk, 0)
                second += b * _chunk_key(offset + chunk, 1)
                chunk, a, b = at >> U(_CHUNK_BITS), U(0), U(0)
                next_chunk = (chunk + ONE) << U(_CHUNK_BITS)
            by = U(new[j * per + unit]) - U(old[j * per + unit])
            a += by * U(left[at & U(_CHUNK - 1)])
            b += by * U(right[at & U(_CHUNK - 1)])
    return total + a * _chunk_key(offset + chunk, 0), second + b * _chunk_key(offset + chunk, 1)


@compiled
def digest_change(
    positions: Any, first: int, pieces: Any, per: int, old: Any, new: Any, keys: Any, runs: Any,
) -> Any:  # fmt: skip
    """How the two sums change when weights of a tile change from old to new, and how each run changes the first sum.

    Positions ascend and count from weight `first` of the tile. pieces: the tile's table of them (see
    `Tile.piece_table`). Weights have `per` units each. runs: where each run begins in positions, the first at 0.
    """
    total, second = U(0), U(0)
    moved = np.zeros(runs.size, np.uint64)
    piece, last, k = 0, pieces.shape[0] - 1, 0
    for r in range(max(runs.size, 1)):
        end = runs[r + 1] if r + 1 < runs.size else positions.size
        before = total
        while k < end:
            while piece < last and pieces[piece + 1, 0] <= first + np.int64(positions[k]):
                piece += 1
            stop = end
            if piece < last:
                stop = k + 1
                while stop < end and first + np.int64(positions[stop]) < pieces[piece + 1, 0]:
                    stop += 1
            begin, start, offset = pieces[piece, 0], pieces[piece, 1], U(pieces[piece, 4])
            columns, stride = pieces[piece, 2], pieces[piece, 3]
            if per == 1 and stride == 0:  # nearly always: the loop is compiled for these two
                a, b = _weigh_changes(positions, k, stop, first - begin, start, 1, 0, offset, 1, old, new, keys)
            else:
                a, b = _weigh_changes(
                    positions, k, stop, first - begin, start, columns, stride, offset, per, old, new, keys
                )
            total += a
            second += b
            k = stop
        if r < runs.size:
            moved[r] = total - before
    return total, second, moved
