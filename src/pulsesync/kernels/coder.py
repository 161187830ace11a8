"""The entropy coder for CPUs: count, encode and decode the hot weights of a block. Part of `cpu`.

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
def _hot(bits: Any, start: int, cut: Any, hot: Any, flags: Any) -> Any:
    """Write the positions of the weights below the cut, among the _SPAN from start on, to hot; return how many.

    Comparing into bytes is a loop that compilers vectorise; eight bytes then become eight bits of a mask by one
    multiplication. Positions are written eight at a time, whether there are eight or not (hot has room for it),
    because a loop that ends at another place for every 64 weights costs more in mispredicted branches.
    """
    span = bits[start : start + _SPAN]
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
    a = bits ^ (full if bits & sign else sign)
    a = (a - size if (symbol - ONE) & ONE else a + size) & full
    return a ^ (sign if a & sign else full)


@inner
def _room(old: Any, last: Any, tracked: int, cut: int, index: int, entering: Any) -> Any:
    """An array that the block's history after a patch fits in."""
    return np.empty(((last.size if tracked == cut else old.size) if index else 0) + entering.size, np.uint8)


@inner
def _let_in(i: Any, e: Any, entering_at: Any, entering: Any, index: Any, remembered: Any, kept: Any) -> Any:
    """Remember the entering weights that stand before weight i."""
    while e < U(entering.size) and U(entering_at[e]) < i:
        remembered[kept] = index | entering[e]
        kept += ONE
        e += ONE
    return e, kept


@compiled
def count_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, positions: Any, new: Any,
    symbols: Any, counts: Any, index: int, entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Add this block's decisions to counts, laid out as `tables.Contexts` says; return how many decisions there are.

    positions, new and symbols hold the changed hot weights alone. If this is patch `index` of an epoch (0: of none),
    the block's history after it is returned too, as `advance_history` would make it; for that, entering holds the
    cold weights that turn hot. A history that is not of these weights is met with -1 decisions.
    """
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    hot_cut, remembered, kept = U(cut) << U(shift), _room(old, last, tracked, cut, index, entering), U(0)
    e = U(0)
    p, rank, known, decisions = U(0), U(0), U(last.size), 0
    following = U(positions[0]) if positions.size else NEVER
    for start in range(0, old.size, _SPAN):
        for h in range(_hot(old, start, small, hot, flags)):
            i = U(hot[h])
            size = U(old[i]) & magnitude
            row = U(rows[size >> U(shift)])
            age = U(0)
            if size < tracked_cut:
                if rank >= known:
                    return -1, remembered
                age = U(last[rank])
                rank += ONE
                row += (age & U(0x7F)) << wide
            if index:
                e, kept = _let_in(i, e, entering_at, entering, index, remembered, kept)
            decisions += 1
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
        e, kept = _let_in(NEVER, e, entering_at, entering, index, remembered, kept)
    return decisions if rank == known else -1, remembered[:kept]


@inner
def _put_raw(x: Any, value: Any, k: Any, stream: Any, at: Any) -> Any:
    """Code k <= 16 bits as they are."""
    if x >= ONE << (U(32) - k):
        at -= ONE
        stream[at] = x & U(0xFFFF)
        x >>= U(16)
    return (x << k) | value, at


@compiled
def encode_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, positions: Any, symbols: Any,
    extras: Any, cumulative: Any, reciprocals: Any, decisions: int, lanes: int,
) -> Any:  # fmt: skip
    """Return the block's stream (uint16): the lanes' first states, then the words in the order a reader takes them.

    rANS is last in, first out, so the block is walked from its end. positions, symbols and extras hold the changed
    hot weights alone. Multiplying 32-bit numbers matters here: some CPUs take three times as long for 64-bit ones.
    """
    magnitude = (ONE << U(8 * old.itemsize - 1)) - ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    room = 2 * lanes + decisions + 3 * positions.size
    stream = np.empty(room, np.uint16)
    at, lane_mask = U(room), U(lanes - 1)
    states = np.full(lanes, _LOW, np.uint32)
    p, rank, j = U(positions.size), U(last.size), U(decisions)
    following = U(positions[p - ONE]) if p else NEVER
    for start in range((old.size - 1) // _SPAN * _SPAN, -1, -_SPAN):
        for h in range(np.int64(_hot(old, start, small, hot, flags)) - 1, -1, -1):
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
                if t >= spec.DIRECT:
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
    for lane in range(lanes - 1, -1, -1):
        at -= U(2)
        stream[at] = states[lane] & np.uint32(0xFFFF)
        stream[at + ONE] = states[lane] >> np.uint32(16)
    return stream[at:].copy()


@compiled
def decode_block(
    old: Any, shift: int, cut: int, rows: Any, row_bits: int, last: Any, tracked: int, cumulative: Any,
    symbol_count: int, lanes: int, stream: Any, count: int, index: int, entering_at: Any, entering: Any,
) -> Any:  # fmt: skip
    """Return positions, new bits, history (see `count_block`), and 0 or the fault that was met (see `spec.FAULTS`).

    Never reads or writes out of bounds, whatever the stream holds; stops at the first fault.
    """
    width = U(8 * old.itemsize)
    magnitude = (ONE << (width - ONE)) - ONE
    last_symbol = U(symbol_count - 1)
    sign, longest = magnitude + ONE, (last_symbol - ONE) >> ONE
    hot, flags = np.empty(_SPAN + 8, np.uint32), np.empty(_SPAN, np.uint8)
    small = old.dtype.type(cut << shift)
    tracked_cut, wide = U(tracked) << U(shift), U(row_bits)
    positions, new = np.empty(count, np.uint32), np.empty(count, old.dtype)
    hot_cut, remembered, kept = U(cut) << U(shift), _room(old, last, tracked, cut, index, entering), U(0)
    e = U(0)
    if stream.size < 2 * lanes:
        return positions, new, remembered, 1
    states = np.empty(lanes, np.uint32)
    for lane in range(lanes):
        states[lane] = U(stream[2 * lane]) | (U(stream[2 * lane + 1]) << U(16))
    at, end_of_stream, lane_mask = U(2 * lanes), U(stream.size), U(lanes - 1)
    k, rank, known, j = U(0), U(0), U(last.size), U(0)
    for start in range(0, old.size, _SPAN):
        for h in range(_hot(old, start, small, hot, flags)):
            i = U(hot[h])
            lane = j & lane_mask
            j += ONE
            bits = U(old[i])
            size = bits & magnitude
            row = U(rows[size >> U(shift)])
            age = U(0)
            if size < tracked_cut:
                if rank >= known:
                    return positions, new, remembered, 5
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
                        return positions, new, remembered, 1
                    x = (x << U(16)) | U(stream[at])
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
                return positions, new, remembered, 2 if slot >= end else 3
            x = (end - begin) * (x >> U(_P)) + slot - begin
            if x < _LOW:
                if at >= end_of_stream:
                    return positions, new, remembered, 1
                x = (x << U(16)) | U(stream[at])
                at += ONE
            extra = U(0)
            t = (symbol - ONE) >> ONE
            if t >= spec.DIRECT:
                raw, taken = t - U(spec.DIRECT - 3), U(0)
                while raw > 0:
                    part = min(raw, U(16))
                    extra |= (x & ((ONE << part) - ONE)) << taken
                    x >>= part
                    raw -= part
                    taken += part
                    if x < _LOW:
                        if at >= end_of_stream:
                            return positions, new, remembered, 1
                        x = (x << U(16)) | U(stream[at])
                        at += ONE
            states[lane] = x
            up_or_down = (symbol - ONE) ^ (age >> U(7))
            if t == longest and (extra or (up_or_down & ONE) != U((bits & sign) == 0)):
                return positions, new, remembered, 6
            moved = _step(bits, up_or_down + ONE, extra, width)
            positions[k], new[k] = i, moved
            k += ONE
            if index and (moved & magnitude) < hot_cut:
                remembered[kept] = U(index) | ((up_or_down & ONE) << U(7))
                kept += ONE
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
        e, kept = _let_in(NEVER, e, entering_at, entering, index, remembered, kept)
    return positions, new, remembered[:kept], 0
