"""The hot loops for CPUs, compiled by numba. Same names and same results, bit for bit, as `reference`.

Every function works on one block: at most 2^20 consecutive weights of a tile, as a contiguous array of unsigned
integers. All of them release the GIL, so a thread pool over blocks is all the parallelism there is. None checks its
arguments beyond what memory safety needs: the codecs above have done that.

Three tricks carry the speed. Differences are found eight 64-bit words at a time. Hot weights (magnitude class below a
cut) are found 64 at a time as one bit mask. And the entropy coder keeps up to 32 independent rANS states that share one
stream of words, so that a CPU overlaps their long latencies and a GPU can give each its own thread.
"""

import threading
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pulsesync.kernels import reference, spec


def _can_cache() -> bool:
    """Whether numba finds a folder to keep compiled kernels in; it refuses to decorate where it does not."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


_jit = njit(nogil=True, cache=_can_cache(), error_model="numpy", no_cfunc_wrapper=True)
_part = njit(nogil=True, cache=_can_cache(), error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)

_U = np.uint64
_ONE = _U(1)
_scratch = threading.local()
_SPAN = 4096  # weights searched at a time
_NEVER = ~_U(0)  # a position that no weight has
_GATHER = _U(0x0102040810204080)  # brings the lowest bits of eight bytes together in the highest byte
_P = spec.PROBABILITY_BITS
_SLOT = _U((1 << spec.PROBABILITY_BITS) - 1)
_LOW = _U(spec.STATE_LOW)
_CHUNK_BITS = spec.CHUNK_BITS
_CHUNK = 1 << spec.CHUNK_BITS


@intrinsic
def trailing_zeros(typing_context: Any, x: Any) -> Any:
    """The number of zero bits below the lowest set bit of a uint64."""
    return types.uint64(types.uint64), lambda _, builder, __, args: builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))


@intrinsic
def popcount(typing_context: Any, x: Any) -> Any:
    """The number of set bits of a uint64."""
    return types.uint64(types.uint64), lambda _, builder, __, args: builder.ctpop(args[0])


# Needed where the coder has not met a block's hot weights itself, which is rare: not worth a second of compiling.
advance_history = reference.advance_history


def changed(old: Any, new: Any) -> Any:
    """Return where the bits of two equally long arrays differ: positions (uint32, ascending), old bits, new bits."""
    if old.itemsize != 2:
        # another compiled version for each dtype would cost a newcomer more seconds than it ever saves: numpy is near
        return reference.changed(old, new)
    if not hasattr(_scratch, "positions") or _scratch.positions.size < old.size:
        _scratch.positions = np.empty(old.size, np.uint32)
    whole = old.size // 32 * 32
    a, b, tail = old[:whole].view(np.uint64), new[:whole].view(np.uint64), old[whole:] != new[whole:]
    positions = _scratch.positions[: _differ(a, b, tail, _scratch.positions)].copy()
    before, after, equal = _gather(old, new, positions)
    if equal:  # somebody wrote the weights between the two looks: what is equal now is no change
        differ = before != after
        return positions[differ], before[differ], after[differ]
    return positions, before, after


@_jit
def _differ(a: Any, b: Any, tail: Any, out: Any) -> Any:
    """Write to out where 16-bit weights differ, given four to a word and, for the last few, as differences.

    Returns how many there are. The caller keeps out from call to call: fresh memory for the worst case costs as much,
    in pages zeroed by the system, as the comparison.
    """
    k, i, end = _U(0), _U(0), _U(a.size)
    while i < end:  # a range over signed numbers makes this loop half as fast
        x = (
            (a[i] ^ b[i])
            | (a[i + _U(1)] ^ b[i + _U(1)])
            | (a[i + _U(2)] ^ b[i + _U(2)])
            | (a[i + _U(3)] ^ b[i + _U(3)])
        )
        x |= (a[i + _U(4)] ^ b[i + _U(4)]) | (a[i + _U(5)] ^ b[i + _U(5)])
        x |= (a[i + _U(6)] ^ b[i + _U(6)]) | (a[i + _U(7)] ^ b[i + _U(7)])
        if x != 0:
            for q in range(8):
                j = i + _U(q)
                y = a[j] ^ b[j]
                while y != 0:
                    lane = trailing_zeros(y) >> _U(4)
                    out[k] = (j << _U(2)) + lane
                    k += _ONE
                    y &= ~(_U(0xFFFF) << (lane << _U(4)))
        i += _U(8)
    for j in range(tail.size):
        if tail[j]:
            out[k] = 4 * a.size + j
            k += _ONE
    return k


@_jit
def _gather(old: Any, new: Any, positions: Any) -> Any:
    before, after, equal = np.empty(positions.size, old.dtype), np.empty(positions.size, old.dtype), 0
    for k in range(positions.size):
        before[k], after[k] = old[positions[k]], new[positions[k]]
        equal += before[k] == after[k]
    return before, after, equal


@_part
def _hot(bits: Any, start: int, cut: Any, hot: Any, flags: Any) -> Any:
    """Write the positions of the weights below the cut, among the _SPAN from start on, to hot; return how many.

    Comparing into bytes is a loop that compilers vectorise; eight bytes then become eight bits of a mask by one
    multiplication. Positions are written eight at a time, whether there are eight or not (hot has room for it),
    because a loop that ends at another place for every 64 weights costs more in mispredicted branches.
    """
    span = bits[start : start + _SPAN]
    magnitude = span.dtype.type((_ONE << _U(8 * bits.itemsize - 1)) - _ONE)
    for i in range(span.size):
        flags[i] = span.dtype.type(span[i] & magnitude) < cut
    for i in range(span.size, (span.size + 63) // 64 * 64):
        flags[i] = 0
    words = flags.view(np.uint64)
    count = _U(0)
    for group in range((span.size + 63) // 64):
        mask = _U(0)
        for q in range(8):
            mask |= ((words[8 * group + q] * _GATHER) >> _U(56)) << _U(8 * q)
        first, at = _U(start + 64 * group), count
        count += popcount(mask)
        while True:
            for q in range(8):
                hot[at + _U(q)] = first + trailing_zeros(mask)
                mask &= mask - _ONE
            at += _U(8)
            if mask == 0:
                break
    return count


@_jit
def sample_classes(old: Any, shift: int) -> Any:
    """Count the classes of a fixed 16 of every 1021 weights: enough to choose a cut by, at a sixtieth of the cost."""
    magnitude = (_ONE << _U(8 * old.itemsize - 1)) - _ONE
    out = np.zeros(256, np.int64)
    for start in range(0, old.size, spec.SAMPLE_PERIOD):
        for i in range(start, min(start + spec.SAMPLE_RUN, old.size)):
            out[(_U(old[i]) & magnitude) >> _U(shift)] += 1
    return out


@_jit
def steps(old: Any, new: Any, shift: int) -> Any:
    """Return symbol (uint8), extra bits (uint32) and old class (uint8) of each change, and the changes by class.

    A step is the distance in units of the last place: bits are first put in the order of the values they stand for,
    -0.0 just below +0.0, so neighbours differ by one. Symbols are 1 + 2 * size class + (1 if downwards); symbol 0,
    unchanged, does not occur here.
    """
    width = _U(8 * old.itemsize)
    full = (_ONE << width) - _ONE
    sign = _ONE << (width - _ONE)
    symbols, extras = np.empty(old.size, np.uint8), np.empty(old.size, np.uint32)
    classes, by_class = np.empty(old.size, np.uint8), np.zeros(256, np.int64)
    for i in range(old.size):
        a, b = _U(old[i]), _U(new[i])
        c = (a & (sign - _ONE)) >> _U(shift)
        classes[i] = c
        by_class[c] += 1
        a ^= full if a & sign else sign
        b ^= full if b & sign else sign
        size, direction = (b - a) & full, 0
        if size > sign or (size == sign and b < a):
            size, direction = (a - b) & full, 1
        k, extra = 0, _U(0)
        if size <= spec.DIRECT:
            k = np.int64(size) - 1
        else:
            k = 3
            while (size >> _U(k)) > _ONE:
                k += 1
            extra = size - (_ONE << _U(k))
            k += spec.DIRECT - 3
        symbols[i] = 1 + 2 * k + direction
        extras[i] = extra
    return symbols, extras, classes, by_class


@_jit
def split(positions: Any, new: Any, symbols: Any, extras: Any, classes: Any, shift: int, cut: int) -> Any:
    """Part changes: of hot weights position, new bits, symbol, extra bits; of cold ones position and signed step.

    Last come the cold weights that turn hot: position, and 0x80 if they went down.
    """
    magnitude = (_ONE << _U(8 * new.itemsize - 1)) - _ONE
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
            if np.int64((_U(new[i]) & magnitude) >> _U(shift)) < cut:
                entering_at[e], entering[e] = positions[i], 0x80 if (symbols[i] - 1) & 1 else 0
                e += 1
    return hot_at, hot_new, hot_symbols, hot_extras, cold_at, cold_steps, entering_at[:e], entering[:e]


@_part
def _step(bits: Any, symbol: Any, extra: Any, width: Any) -> Any:
    """Move one weight by the step that a symbol and its extra bits name."""
    full = (_ONE << width) - _ONE
    sign = _ONE << (width - _ONE)
    t = (symbol - _ONE) >> _ONE
    size = t + _ONE if t < spec.DIRECT else (_ONE << (t - _U(spec.DIRECT - 3))) + extra
    a = bits ^ (full if bits & sign else sign)
    a = (a - size if (symbol - _ONE) & _ONE else a + size) & full
    return a ^ (sign if a & sign else full)


@_part
def _room(old: Any, last: Any, tracked: int, cut: int, index: int, entering: Any) -> Any:
    """An array that the block's history after a patch fits in."""
    return np.empty(((last.size if tracked == cut else old.size) if index else 0) + entering.size, np.uint8)


@_part
def _let_in(i: Any, e: Any, entering_at: Any, entering: Any, index: Any, remembered: Any, kept: Any) -> Any:
    """Remember the entering weights that stand before weight i."""
    while e < _U(entering.size) and _U(entering_at[e]) < i:
        remembered[kept] = index | entering[e]
        kept += _ONE
        e += _ONE
    return e, kept


@_jit
def count_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, positions: Any, new: Any,
    symbols: Any, counts: Any, index: int, entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Add this block's decisions to counts, laid out as `tables.Contexts` says; return how many decisions there are.

    positions, new and symbols hold the changed hot weights alone. If this is patch `index` of an epoch (0: of none),
    the block's history after it is returned too, as `advance_history` would make it; for that, entering holds the
    cold weights that turn hot. A history that is not of these weights is met with -1 decisions.
    """
    magnitude = (_ONE << _U(8 * old.itemsize - 1)) - _ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = _U(tracked) << _U(shift), _U(row_bits)
    hot_cut, remembered, kept = _U(cut) << _U(shift), _room(old, last, tracked, cut, index, entering), _U(0)
    e = _U(0)
    p, rank, known, decisions = _U(0), _U(0), _U(last.size), 0
    following = _U(positions[0]) if positions.size else _NEVER
    for start in range(0, old.size, _SPAN):
        for h in range(_hot(old, start, small, hot, flags)):
            i = _U(hot[h])
            size = _U(old[i]) & magnitude
            row = _U(rows[size >> _U(shift)])
            age = _U(0)
            if size < tracked_cut:
                if rank >= known:
                    return -1, remembered
                age = _U(last[rank])
                rank += _ONE
                row += (age & _U(0x7F)) << wide
            if index:
                e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
            decisions += 1
            if i != following:
                counts[row] += 1
                if index:
                    remembered[kept] = age
                    kept += _ONE
                continue
            up_or_down = _U(symbols[p]) - _ONE
            counts[row + (up_or_down ^ (age >> _U(7))) + _ONE] += 1
            if index and (_U(new[p]) & magnitude) < hot_cut:
                remembered[kept] = _U(index) | ((up_or_down & _ONE) << _U(7))
                kept += _ONE
            p += _ONE
            following = _U(positions[p]) if p < positions.size else _NEVER
    if index:
        e, kept = _let_in(_NEVER, e, entering_at, entering, index, remembered, kept)
    return decisions if rank == known else -1, remembered[:kept]


@_part
def _put_raw(x: Any, value: Any, k: Any, stream: Any, at: Any) -> Any:
    """Code k <= 16 bits as they are."""
    if x >= _ONE << (_U(32) - k):
        at -= _ONE
        stream[at] = x & _U(0xFFFF)
        x >>= _U(16)
    return (x << k) | value, at


@_jit
def encode_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, positions: Any, symbols: Any,
    extras: Any, cumulative: Any, reciprocals: Any, decisions: int, lanes: int,
) -> Any:  # fmt: skip
    """Return the block's stream (uint16): the lanes' first states, then the words in the order a reader takes them.

    rANS is last in, first out, so the block is walked from its end. positions, symbols and extras hold the changed
    hot weights alone. Multiplying 32-bit numbers matters here: some CPUs take three times as long for 64-bit ones.
    """
    magnitude = (_ONE << _U(8 * old.itemsize - 1)) - _ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = _U(tracked) << _U(shift), _U(row_bits)
    room = 2 * lanes + decisions + 3 * positions.size
    stream = np.empty(room, np.uint16)
    at, lane_mask = _U(room), _U(lanes - 1)
    states = np.full(lanes, _LOW, np.uint32)
    p, rank, j = _U(positions.size), _U(last.size), _U(decisions)
    following = _U(positions[p - _ONE]) if p else _NEVER
    for start in range((old.size - 1) // _SPAN * _SPAN, -1, -_SPAN):
        for h in range(np.int64(_hot(old, start, small, hot, flags)) - 1, -1, -1):
            i = _U(hot[h])
            j -= _ONE
            lane = j & lane_mask
            size = _U(old[i]) & magnitude
            row = _U(rows[size >> _U(shift)])
            down = _U(0)
            if size < tracked_cut:
                rank -= _ONE
                age = _U(last[rank])
                row += (age & _U(0x7F)) << wide
                down = age >> _U(7)
            x, begin = _U(states[lane]), _U(0)
            if i == following:
                p -= _ONE
                following = _U(positions[p - _ONE]) if p else _NEVER
                symbol = ((_U(symbols[p]) - _ONE) ^ down) + _ONE
                row += symbol
                begin = _U(cumulative[row])
                t = (symbol - _ONE) >> _ONE
                if t >= spec.DIRECT:
                    k, extra = t - _U(spec.DIRECT - 3), _U(extras[p])
                    if k > 16:
                        x, at = _put_raw(x, extra >> _U(16), k - _U(16), stream, at)
                        extra, k = extra & _U(0xFFFF), _U(16)
                    x, at = _put_raw(x, extra, k, stream, at)
            frequency = _U(np.uint32(_U(cumulative[row + _ONE]) - begin))
            if x >= frequency << _U(32 - _P):
                at -= _ONE
                stream[at] = x & _U(0xFFFF)
                x >>= _U(16)
            quotient = (_U(np.uint32(x)) * _U(reciprocals[row])) >> _U(32)  # or one less than that
            rest = x - quotient * frequency
            if rest >= frequency:
                quotient += _ONE
                rest -= frequency
            states[lane] = (quotient << _U(_P)) + rest + begin
    for lane in range(lanes - 1, -1, -1):
        at -= _U(2)
        stream[at] = states[lane] & np.uint32(0xFFFF)
        stream[at + _ONE] = states[lane] >> np.uint32(16)
    return stream[at:].copy()


@_jit
def decode_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, cumulative: Any,
    symbol_count: int, lanes: int, stream: Any, count: int, index: int, entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Return positions, new bits, history (see `count_block`), and 0 or the fault that was met (see `spec.FAULTS`).

    Never reads or writes out of bounds, whatever the stream holds; stops at the first fault.
    """
    width = _U(8 * old.itemsize)
    magnitude = (_ONE << (width - _ONE)) - _ONE
    last_symbol = _U(symbol_count - 1)
    sign, longest = magnitude + _ONE, (last_symbol - _ONE) >> _ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = _U(tracked) << _U(shift), _U(row_bits)
    positions, new = np.empty(count, np.uint32), np.empty(count, old.dtype)
    hot_cut, remembered, kept = _U(cut) << _U(shift), _room(old, last, tracked, cut, index, entering), _U(0)
    e = _U(0)
    if stream.size < 2 * lanes:
        return positions, new, remembered, 1
    states = np.empty(lanes, np.uint32)
    for lane in range(lanes):
        states[lane] = _U(stream[2 * lane]) | (_U(stream[2 * lane + 1]) << _U(16))
    at, end_of_stream, lane_mask = _U(2 * lanes), _U(stream.size), _U(lanes - 1)
    k, rank, known, j = _U(0), _U(0), _U(last.size), _U(0)
    for start in range(0, old.size, _SPAN):
        for h in range(_hot(old, start, small, hot, flags)):
            i = _U(hot[h])
            lane = j & lane_mask
            j += _ONE
            bits = _U(old[i])
            size = bits & magnitude
            row = _U(rows[size >> _U(shift)])
            age = _U(0)
            if size < tracked_cut:
                if rank >= known:
                    return positions, new, remembered, 5
                age = _U(last[rank])
                rank += _ONE
                row += (age & _U(0x7F)) << wide
            if index:
                e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
            x = _U(states[lane])
            slot = x & _SLOT
            frequency = _U(cumulative[row + _ONE])
            if slot < frequency:
                x = frequency * (x >> _U(_P)) + slot
                if x < _LOW:
                    if at >= end_of_stream:
                        return positions, new, remembered, 1
                    x = (x << _U(16)) | _U(stream[at])
                    at += _ONE
                states[lane] = x
                if index:
                    remembered[kept] = age
                    kept += _ONE
                continue
            symbol = _ONE
            while symbol < last_symbol and _U(cumulative[row + symbol + _ONE]) <= slot:
                symbol += _ONE
            begin, end = _U(cumulative[row + symbol]), _U(cumulative[row + symbol + _ONE])
            if slot >= end or k >= count:
                return positions, new, remembered, 2 if slot >= end else 3
            x = (end - begin) * (x >> _U(_P)) + slot - begin
            if x < _LOW:
                if at >= end_of_stream:
                    return positions, new, remembered, 1
                x = (x << _U(16)) | _U(stream[at])
                at += _ONE
            extra = _U(0)
            t = (symbol - _ONE) >> _ONE
            if t >= spec.DIRECT:
                raw, taken = t - _U(spec.DIRECT - 3), _U(0)
                while raw > 0:
                    part = min(raw, _U(16))
                    extra |= (x & ((_ONE << part) - _ONE)) << taken
                    x >>= part
                    raw -= part
                    taken += part
                    if x < _LOW:
                        if at >= end_of_stream:
                            return positions, new, remembered, 1
                        x = (x << _U(16)) | _U(stream[at])
                        at += _ONE
            states[lane] = x
            up_or_down = (symbol - _ONE) ^ (age >> _U(7))
            if t == longest and (extra or (up_or_down & _ONE) != _U((bits & sign) == 0)):
                return positions, new, remembered, 6
            moved = _step(bits, up_or_down + _ONE, extra, width)
            positions[k], new[k] = i, moved
            k += _ONE
            if index and (moved & magnitude) < hot_cut:
                remembered[kept] = _U(index) | ((up_or_down & _ONE) << _U(7))
                kept += _ONE
    if rank != known:
        return positions, new, remembered, 5
    if k != count:
        return positions, new, remembered, 3
    if at != stream.size:
        return positions, new, remembered, 4
    for lane in range(lanes):
        if states[lane] != _LOW:
            return positions, new, remembered, 4
    if index:
        e, kept = _let_in(_NEVER, e, entering_at, entering, index, remembered, kept)
    return positions, new, remembered[:kept], 0


@_part
def _chunk_key(chunk: Any, word: int) -> Any:
    """The odd 64-bit key of a chunk, for the first or second word of the digest (splitmix64)."""
    z = chunk * _U(0x9E3779B97F4A7C15) + (_U(spec.DIGEST_SEEDS[0]) if word == 0 else _U(spec.DIGEST_SEEDS[1]))
    z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
    return (z ^ (z >> _U(31))) | _ONE


@_jit
def digest_rectangle(units: Any, start: int, rows: int, columns: int, stride: int, keys: Any) -> Any:
    """Sum units[i] * key(i) over a rectangle of a flat tensor: rows runs of columns units, stride apart."""
    first, second = _U(0), _U(0)
    for row in range(rows):
        i = start + row * stride
        end = i + columns
        while i < end:
            chunk = i >> _CHUNK_BITS
            stop = min(end, (chunk + 1) << _CHUNK_BITS)
            run = units[i:stop]
            base = i & (_CHUNK - 1)
            left, right = keys[0, base : base + run.size], keys[1, base : base + run.size]
            a, b = _U(0), _U(0)
            for j in range(run.size):
                u = np.uint32(run[j])
                a += _U(u) * _U(left[j])
                b += _U(u) * _U(right[j])
            first += a * _chunk_key(_U(chunk), 0)
            second += b * _chunk_key(_U(chunk), 1)
            i = stop
    return first, second


@_jit
def digest_change(indices: Any, old: Any, new: Any, keys: Any) -> Any:
    """How the two sums move when the units at these indices of the tensor go from old to new."""
    first, second = _U(0), _U(0)
    chunk, left, right = _NEVER, _U(0), _U(0)
    for k in range(indices.size):
        i = _U(indices[k])
        if i >> _U(_CHUNK_BITS) != chunk:
            chunk = i >> _U(_CHUNK_BITS)
            left, right = _chunk_key(chunk, 0), _chunk_key(chunk, 1)
        place = i & _U(_CHUNK - 1)
        moved = _U(new[k]) - _U(old[k])
        first += moved * _U(keys[0, place]) * left
        second += moved * _U(keys[1, place]) * right
    return first, second
