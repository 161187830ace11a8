"""Gaps and steps of many tiles in byte planes, at once: the bytes of `gap.build_gaps` and `step.build_steps`.

For a model of some hundred tiles with some hundred cold changes each, a dozen numpy calls per tile cost more than all
of their zstd frames.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync.format import wire
from pulsesync.kernels.arrays import I64, U8

MOST_GAP_BYTES = 4  # of gaps that are read together: their sums do not overflow 64 bits
_ENDS = 1 << 8 * np.arange(1, 8)  # first numbers that do not fit one byte, two, ...
_MAGIC = np.frombuffer(b"\x28\xb5\x2f\xfd", np.uint8)
_HEAD = 12  # bytes of a plain frame, at most, before the content of its block


def build(gaps: I64, codes: I64, counts: I64) -> list[bytes]:
    """Write the gaps of tiles and the codes of their steps, `counts` per tile (more than 16), tile after tile."""
    first = np.cumsum(counts) - counts
    both = gaps, codes
    widths = [1 + np.searchsorted(_ENDS, np.maximum.reduceat(values, first), "right") for values in both]
    columns = [_columns(values, int(wide.max())) for values, wide in zip(both, widths, strict=True)]
    of_tiles = list(zip(*(some.tolist() for some in (first, first + counts, *widths)), strict=True))
    planes: list[bytes] = []
    for begin, end, *wide in of_tiles:
        planes += [column[begin:end] for some, n in zip(columns, wide, strict=True) for column in some[:n]]
    packed, at = wire.pack_planes(planes), 0
    out = []
    for _, _, in_gap, in_step in of_tiles:
        middle, end = at + in_gap, at + in_gap + in_step
        out.append(b"".join((bytes((in_gap,)), *packed[at:middle], bytes((in_step,)), *packed[middle:end])))
        at = end
    return out


def _columns(values: I64, width: int) -> list[bytes]:
    """The lowest bytes of integers, the next ones, and so on."""
    bytes_of = values.astype("<i8", copy=False).view(np.uint8).reshape(-1, 8)
    return [bytes_of[:, k].tobytes() for k in range(width)]


class ParsedPlanes(NamedTuple):
    """What was read of good tiles; the others are left to a reader that raises the precise error."""

    good: NDArray[np.bool_]
    used: I64  # bytes
    positions: I64  # of the good tiles, one after the other
    steps: I64


def parse(written: Sequence[memoryview], counts: I64, sizes: I64, itemsizes: I64) -> ParsedPlanes:
    """Read gaps and steps of tiles, given the changes (at least one), weights and bytes per weight of each.

    Every tile that is reported as good would also be read by `gap.parse_gaps` and `step.parse_steps`. Of these, all
    with frames as `build` writes them and gaps of four bytes at most are good.
    """
    lengths = np.array([len(one) for one in written], np.int64)
    ends = np.cumsum(lengths)
    data = np.frombuffer(b"".join((*written, bytes(_HEAD))), np.uint8)  # padded so that every read is inside
    at, good = ends - lengths, np.ones(counts.size, np.bool_)
    gap_planes = _find(data, at, ends, counts, np.int64(MOST_GAP_BYTES), good)
    step_planes = _find(data, at, ends, counts, itemsizes, good)
    unpacked = _unpack(data.data, (gap_planes, step_planes), counts, good)
    if unpacked is None:
        good[:] = False
        unpacked = (np.empty(0, np.uint8),) * 2
    gaps, codes = unpacked
    positions, inside = _positions(gaps, counts[good], sizes[good])
    if not inside.all():
        of_inside = np.repeat(inside, counts[good])
        positions, codes = positions[of_inside], codes[of_inside]
        good[good] = inside
    steps = codes.astype(np.int64)
    steps += 1
    down = steps & 1
    steps >>= 1
    steps ^= np.negative(down, out=down)
    return ParsedPlanes(good, at - (ends - lengths), positions, steps)


def _positions(gaps: NDArray[np.unsignedinteger], counts: I64, sizes: I64) -> tuple[I64, NDArray[np.bool_]]:
    """Positions in tiles of these sizes, and which tiles contain all of theirs."""
    past = np.zeros(gaps.size + 1, np.int64)
    np.cumsum(gaps, out=past[1:])
    past += np.arange(gaps.size + 1)  # for each, the lowest next position, with all tiles concatenated
    ends = np.cumsum(counts)
    before = past[ends - counts]
    inside: NDArray[np.bool_] = past[ends] - before <= sizes
    return past[1:] - np.repeat(before + 1, counts), inside


class _Planes(NamedTuple):
    """Where the k-th planes of tiles are, for tiles that have one."""

    tiles: NDArray[np.intp]
    begins: I64
    sizes: I64
    packed: NDArray[np.bool_]


def _find(data: U8, at: I64, ends: I64, counts: I64, widest: I64 | np.int64, good: NDArray[np.bool_]) -> list[_Planes]:
    """Find the planes of numbers, by the byte that gives their width; move `at` past them.

    An irregular tile is no longer good; neither is one with a frame of 2^14 bytes, which is read separately.
    """
    last = data.size - _HEAD
    widths = data[np.minimum(at, last)].astype(np.int64)
    good &= (widths >= 1) & (widths <= widest)
    at += 1
    out = []
    for k in range(int(widths[good].max()) if good.any() else 0):
        tiles = np.flatnonzero(good & (widths > k))
        here, count = np.minimum(at[tiles], last), counts[tiles]
        kind, low, high = data[here], data[here + 1].astype(np.int64), data[here + 2].astype(np.int64)
        packed, long = kind == wire.ZSTD, low >= 0x80
        size = np.where(packed, np.where(long, low - 0x80 | high << 7, low), count)
        begin = here + 1 + np.where(packed, 1 + long, 0)
        fine = (kind == wire.RAW) | packed & (size < count) & ~(long & ((high == 0) | (high >= 0x80)))
        fine &= begin + size <= ends[tiles]
        fine[packed] &= _are_plain(data, begin[packed], size[packed], count[packed])
        at[tiles] = begin + size
        good[tiles] = fine
        out.append(_Planes(tiles, begin, size, packed))
    return out


def _are_plain(data: U8, begins: I64, sizes: I64, counts: I64) -> NDArray[np.bool_]:
    """Which zstd frames state these sizes, ask for no more memory, and consist of one block."""
    head = data[np.minimum(begins, data.size - _HEAD)[:, None] + np.arange(_HEAD)].astype(np.int64)
    kind = np.minimum(head[:, 4] >> 6, 2)  # of the content size: 1, 2 (minus 256) or 4 bytes; 8 are never needed
    fine = (head[:, :4] == _MAGIC).all(axis=1) & (head[:, 4] & 0x3F == 0x20) & (head[:, 4] < 0xC0)
    content = head[:, 5] | np.where(kind > 0, head[:, 6] << 8, 0) | np.where(kind > 1, head[:, 7] << 16, 0)
    fine &= (content + np.where(kind == 1, 256, 0) == counts) & ((kind < 2) | (head[:, 8] == 0))
    after = 5 + (1 << kind)  # the block's three bytes
    row = np.arange(after.size)
    block = head[row, after] | head[row, after + 1] << 8 | head[row, after + 2] << 16
    repeats_a_byte = block >> 1 & 3 == 1
    fine &= (block & 1 == 1) & (after + 3 + np.where(repeats_a_byte, 1, block >> 3) == sizes)
    plain: NDArray[np.bool_] = fine
    return plain


def _unpack(
    data: memoryview, found: Sequence[Sequence[_Planes]], counts: I64, good: NDArray[np.bool_]
) -> tuple[NDArray[np.unsignedinteger], NDArray[np.unsignedinteger]] | None:
    """The numbers whose planes were found, of good tiles; None if a frame is damaged."""
    pieces: list[list[memoryview]] = []
    frames: list[memoryview] = []
    sizes: list[int] = []
    holes: list[tuple[list[memoryview], int]] = []  # the destination of each frame's content
    for planes in (one for some in found for one in some):
        mine: list[memoryview] = []
        chosen = good[planes.tiles]
        columns = (planes.begins[chosen], (planes.begins + planes.sizes)[chosen], planes.packed[chosen])
        of = counts[planes.tiles[chosen]]
        for begin, end, packed, count in zip(*(column.tolist() for column in columns), of.tolist(), strict=True):
            if packed:
                holes.append((mine, len(mine)))
                frames.append(data[begin:end])
                sizes.append(count)
            mine.append(data[begin:end])
        pieces.append(mine)
    contents = wire.unpack_frames(frames, sizes)
    if contents is None:
        return None
    for (mine, n), content in zip(holes, contents, strict=True):
        mine[n] = content
    joined = iter(pieces)
    numbers = [_numbers([b"".join(next(joined)) for _ in some], some, counts, good) for some in found]
    return numbers[0], numbers[1]


def _numbers(
    columns: Sequence[bytes], planes: Sequence[_Planes], counts: I64, good: NDArray[np.bool_]
) -> NDArray[np.unsignedinteger]:
    """Integers of good tiles from their bytes: the lowest of all tiles, then the next of the tiles that have it."""
    width = 1 << max(len(columns) - 1, 0).bit_length()
    out = np.zeros((counts[good].sum(), width), np.uint8)
    for k, (column, some) in enumerate(zip(columns, planes, strict=True)):
        has: NDArray[np.bool_] | slice = slice(None)
        if len(column) < len(out):
            tiles = np.zeros(counts.size, np.bool_)
            tiles[some.tiles] = True
            has = np.repeat(tiles[good], counts[good])
        out[has, k] = np.frombuffer(column, np.uint8)
    numbers: NDArray[np.unsignedinteger] = out.view(f"<u{width}").reshape(-1)
    return numbers
