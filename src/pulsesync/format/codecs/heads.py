"""The headers of many `context` payloads at once, for a GPU that codes all tiles of a part together.

The bytes and the checks are those of `context`; here numpy processes all tiles at once. Tile by tile, that would take
longer than the coding for a model of some hundred tiles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import DTYPES, Tile
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import wire
from pulsesync.format.codecs import context, planes
from pulsesync.kernels import spec
from pulsesync.kernels.arrays import I64, U32

_MOST_CUT = {name: 1 << (8 * kind.itemsize - 1 - (kind.exponent_shift or 0)) for name, kind in DTYPES.items()}


def build_many(table: int, cuts: I64, first_block: I64, blocks: tuple[I64, I64, I64], colds: I64) -> list[bytes]:
    """`context.build_heads` of tiles that use one table, up to the cold changes, given their number in each.

    blocks: changes, lanes and words of the blocks of all tiles, those of tile i from first_block[i] to first_block[i +
        1].
    """
    changes, lanes, words = blocks
    coded = changes > 0
    before = context.borders_of(1 + coded)  # how many numbers precede those of each block
    counts = 2 + np.diff(before[first_block])
    begins = np.cumsum(counts) - counts
    values = np.empty(counts.sum(), np.int64)
    values[begins], values[begins + counts - 1] = cuts, colds
    tile = np.repeat(np.arange(cuts.size), np.diff(first_block))
    at = begins[tile] + 1 + before[:-1] - before[first_block[tile]]
    values[at] = np.where(coded, changes << 3 | np.frexp(lanes)[1] - 1, 0)
    values[at[coded] + 1] = words[coded]
    return [bytes((table,)) + run for run in wire.runs(values, counts)]


def build_cold(first: I64, cold: I64, steps: I64) -> list[bytes]:
    """The cold changes of tiles, those of tile i from first[i] to first[i + 1]: positions in the tile, and steps."""
    counts = np.diff(first)
    gaps = cold.copy()
    gaps[1:] -= cold[:-1] + 1
    starts = first[:-1][counts > 0]
    gaps[starts] = cold[starts]
    codes = (steps << 1) ^ (steps >> 63)
    many = counts > context.FEW_COLD
    few = np.flatnonzero(np.repeat(~many, counts))
    out = wire.runs(np.stack((gaps[few], codes[few]), axis=1).reshape(-1), np.where(many, 0, 2 * counts))
    if many.any():
        rest = np.flatnonzero(np.repeat(many, counts))
        in_planes = planes.build(gaps[rest], codes[rest] - 1, counts[many])
        for i, data in zip(np.flatnonzero(many).tolist(), in_planes, strict=True):
            out[i] = data
    return out


@dataclass(frozen=True)
class BegunPayloads:
    """Payloads of which table and cut are read, which a reader needs to find the hot weights."""

    tiles: Sequence[Tile]
    data: Sequence[memoryview]
    tables: I64
    cuts: I64
    at: I64  # offset of the rest in each

    def part(self, chosen: NDArray[np.intp]) -> "BegunPayloads":
        """Some of the payloads."""
        if chosen.size == len(self.tiles):
            return self
        some = chosen.tolist()
        tiles, data = [self.tiles[i] for i in some], [self.data[i] for i in some]
        return BegunPayloads(tiles, data, self.tables[chosen], self.cuts[chosen], self.at[chosen])


def begin(data: Sequence[memoryview], tiles: Sequence[Tile]) -> BegunPayloads:
    """Begin to read the payloads of tiles, at least one. Raises: FormatError, LimitError."""
    most = np.array([_MOST_CUT[tile.tensor.dtype] for tile in tiles], np.int64)
    if min(map(len, data)) < 3:  # every payload has more
        return _begin_each(data, tiles, most)
    tables, low, high = np.frombuffer(b"".join([one[:3] for one in data]), np.uint8).reshape(-1, 3).T.astype(np.int64)
    long = low >= 0x80
    cuts = np.where(long, low & 0x7F | high << 7, low)
    if (long & ((high == 0) | (high >= 0x80)) | (cuts > most)).any():
        return _begin_each(data, tiles, most)
    return BegunPayloads(tiles, data, tables, cuts, 2 + long)


def _begin_each(data: Sequence[memoryview], tiles: Sequence[Tile], most: I64) -> BegunPayloads:
    """The same one by one, which raises the precise error."""
    found = []
    for one, limit in zip(data, most.tolist(), strict=True):
        reader = wire.ByteReader(one, "a context payload")
        found.append((reader.byte(), reader.number(limit), reader.at))
    return BegunPayloads(tiles, data, *np.array(found, np.int64).T)


@dataclass(frozen=True)
class PayloadStreams:
    """The fields of the streams of all payloads, one after the other: of blocks, or of groups of bundles."""

    first: I64  # where the streams of each payload begin, and where those of the last end
    changes: I64
    lanes: I64
    words: I64
    colds: I64  # of each payload: the number of cold changes
    at: I64  # and their offset


@dataclass(frozen=True)
class ColdChanges:
    """The cold changes of all payloads, one after the other."""

    positions: I64  # in the tile
    steps: I64
    checked: NDArray[np.bool_]  # for all streams, whether the payload has a check
    checks: U32  # the checks: 0 where nothing changes


def parse_streams_of(payloads: BegunPayloads) -> PayloadStreams:
    """Read the stream fields of payloads. Raises: FormatError, LimitError.

    Payloads whose streams all have changes are read together; the others, and bad ones, one by one.
    """
    by_tile = [tile.stream_sizes for tile in payloads.tiles]
    first = context.borders_of(np.array(list(map(len, by_tile)), np.int64))
    sizes: I64 = np.array(list(chain.from_iterable(by_tile)), np.int64)
    heads, words, colds, good, at = _at_once(payloads, sizes, first)
    changes, lanes = heads >> 3, 1 << (heads & 7)
    for i in np.flatnonzero(~good).tolist():
        reader = wire.ByteReader(payloads.data[i], "a context payload")
        tile, mine = payloads.tiles[i], slice(*first[i : i + 2])
        reader.at = int(payloads.at[i])
        some = np.array(context.parse_streams(reader, tile.stream_sizes), np.int64).reshape(-1, 3)
        changes[mine], lanes[mine], words[mine] = some.T
        colds[i], at[i] = reader.number(tile.size), reader.at
    return PayloadStreams(first, changes, lanes, words, colds, at)


def _at_once(payloads: BegunPayloads, sizes: I64, first: I64) -> tuple[I64, I64, I64, NDArray[np.bool_], I64]:
    """Two numbers per stream and one more per payload; which payloads have this form; and where the rest begins.

    sizes: the number of weights of each stream; first: where the streams of each payload begin, and the end.
    """
    counts, number = np.diff(first), np.arange(first.size - 1)
    wanted, begun = 2 * counts + 1, 2 * first[:-1] + number
    windows = [
        one[at : at + 4 * n] for one, at, n in zip(payloads.data, payloads.at.tolist(), wanted.tolist(), strict=True)
    ]
    borders = context.borders_of(np.array([len(window) for window in windows], np.int64))
    # Padding, so that every read is inside.
    data = np.frombuffer(b"".join((*windows, bytes(int(wanted.max()) + 4))), np.uint8)
    ends = np.flatnonzero(data < 0x80)
    ended = np.searchsorted(ends, borders)
    good = np.diff(ended) >= wanted
    taken = np.repeat(ended[:-1] - begun, wanted)
    taken += np.arange(taken.size)
    last = ends[np.minimum(taken, ends.size - 1)]
    at = np.empty_like(last)
    at[1:] = np.minimum(last[:-1] + 1, data.size - 1)
    at[begun] = borders[:-1]
    long = last - at
    bits = (data & 0x7F).astype(np.int64)
    values = bits[at]
    for k in range(1, 4):
        longer = np.flatnonzero(long >= k)
        values[longer] |= bits[at[longer] + k] << 7 * k
    wrong = (long > 3) | (long > 0) & (data[last] == 0)
    places = 2 * np.arange(sizes.size) + np.repeat(number, counts)
    heads, words, colds = values[places], values[places + 1], values[begun + wanted - 1]
    wrong[places] |= (heads > sizes << 3 | 7) | (heads < 8) | (heads & 7 > spec.MAX_LANES_LOG2)
    wrong[places + 1] |= words > 64 + 3 * sizes
    good &= ~np.logical_or.reduceat(wrong, begun) & (colds <= np.add.reduceat(sizes, first[:-1]))
    return heads, words, colds, good, payloads.at + last[begun + wanted - 1] + 1 - borders[:-1]


def streams_of(payloads: BegunPayloads, blocks: PayloadStreams) -> list[memoryview]:
    """The streams of each payload, which are its end. Raises: FormatError."""
    streams = 2 * np.diff(context.borders_of(blocks.words)[blocks.first])
    begins = np.array([len(one) for one in payloads.data], np.int64) - streams
    if (begins < blocks.at).any():
        raise FormatError("a context payload ends too early: its streams are longer than the bytes that remain")
    return [one[begin:] for one, begin in zip(payloads.data, begins.tolist(), strict=True)]


def parse_cold(payloads: BegunPayloads, blocks: PayloadStreams, streams: Sequence[memoryview]) -> ColdChanges:
    """Read what precedes the streams of each payload, as `context.parse_heads` does. Raises: the same."""
    fields = zip(payloads.data, blocks.at.tolist(), streams, strict=True)
    written = [data[at : len(data) - len(stream)] for data, at, stream in fields]
    counts = blocks.colds
    first = context.borders_of(counts)
    positions, steps = np.empty(first[-1], np.int64), np.empty(first[-1], np.int64)
    many = counts > context.FEW_COLD
    if many.any():
        _many_cold(np.flatnonzero(many), payloads, first, written, positions, steps)
    few = np.where(many, 0, counts)
    checks: dict[int, memoryview] = {}
    for i, tile in enumerate(payloads.tiles):
        if context.is_checked(tile):
            end = _end_of(written[i], 2 * int(few[i]))
            written[i], checks[i] = written[i][:end], written[i][end:]
    short = slice(None) if not many.any() else np.repeat(~many, counts)
    positions[short], steps[short] = _few_cold(written, few, payloads.tiles)
    return ColdChanges(positions, steps, *_checks(payloads.tiles, blocks, positions, first, checks))


def _many_cold(
    many: NDArray[np.intp], payloads: BegunPayloads, first: I64, written: list[memoryview], positions: I64, steps: I64
) -> None:
    """Read the cold changes of payloads that have many, which are planes, and remove them from `written`.

    Good payloads are read together, the others one by one.
    """
    tiles, counts = [payloads.tiles[i] for i in many.tolist()], np.diff(first)
    sizes = np.array([tile.size for tile in tiles], np.int64)
    itemsizes = np.array([tile.tensor.kind.itemsize for tile in tiles], np.int64)
    found = planes.parse([written[i] for i in many.tolist()], counts[many], sizes, itemsizes)
    read = np.zeros(counts.size, np.bool_)
    read[many[found.good]] = True
    here = np.repeat(read, counts)
    positions[here], steps[here] = found.positions, found.steps
    for i, tile, fine, used in zip(many.tolist(), tiles, found.good.tolist(), found.used.tolist(), strict=True):
        end = used
        if not fine:
            reader, mine = wire.ByteReader(written[i], "a context payload"), slice(*first[i : i + 2])
            count, itemsize = int(counts[i]), tile.tensor.kind.itemsize
            positions[mine], steps[mine] = context.parse_cold(reader, count, tile.size, itemsize)
            end = reader.at
        written[i] = written[i][end:]


def _end_of(data: memoryview, count: int) -> int:
    """The offset after this number of LEB128 numbers. Raises: FormatError, if there are fewer."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) < 0x80)
    if ends.size < count:
        raise FormatError("a context payload does not have the number of cold changes that its header states")
    return int(ends[count - 1]) + 1 if count else 0


def _checks(
    tiles: Sequence[Tile], blocks: PayloadStreams, cold: I64, first: I64, written: Mapping[int, memoryview]
) -> tuple[NDArray[np.bool_], U32]:
    """For all streams, whether the payload has a check, and the check.

    cold: positions of cold changes, those of payload i from first[i] on; written: the checks, by payload, of those that
        have them.
    """
    checked, checks = np.zeros(blocks.changes.size, np.bool_), np.zeros(blocks.changes.size, np.uint32)
    for i, data in written.items():
        mine = slice(blocks.first[i], blocks.first[i + 1])
        moved = context.changing(tiles[i], blocks.changes[mine], cold[first[i] : first[i + 1]])
        if len(data) != 4 * moved.sum():
            raise FormatError("a context payload must have one check for each group that changes")
        checked[mine] = True
        checks[mine][moved] = np.frombuffer(data, "<u4")
    return checked, checks


def _few_cold(runs: Sequence[memoryview], counts: I64, tiles: Sequence[Tile]) -> tuple[I64, I64]:
    """Positions and steps of cold changes that are pairs of numbers: `counts` per run, filling its bytes exactly."""
    values = _numbers(runs, 2 * counts)
    gaps, codes = values[::2], values[1::2]
    first = np.cumsum(counts) - counts
    some = np.flatnonzero(counts)
    if some.size:
        chosen = [tiles[i] for i in some.tolist()]
        sizes = np.array([tile.size for tile in chosen], np.int64)
        circles = np.array([1 << 8 * tile.tensor.kind.itemsize for tile in chosen], np.int64)
        spans = np.add.reduceat(gaps.astype(np.float64), first[some]) + counts[some]
        if (spans > sizes).any():
            raise FormatError("a context payload has cold changes beyond the end of its tile")
        if codes.min() == 0 or (np.maximum.reduceat(codes, first[some]) > circles).any():
            raise LimitError("a context payload has a cold change with a step of 0, or a step beyond its dtype's range")
    past = context.borders_of(gaps + 1)
    return past[1:] - 1 - np.repeat(past[first], counts), (codes >> 1) ^ -(codes & 1)


def _numbers(runs: Sequence[memoryview], counts: I64) -> I64:
    """LEB128 numbers that fill runs of bytes exactly: `counts` per run."""
    data = np.frombuffer(b"".join(runs), np.uint8)
    borders = np.cumsum([len(run) for run in runs])
    ends = np.flatnonzero(data < 0x80)
    unfinished = data.size > 0 and bool((data[borders - 1] >= 0x80).any())
    if unfinished or (np.searchsorted(ends, borders) != np.cumsum(counts)).any():
        raise FormatError("a context payload does not have the number of cold changes that its header states")
    lengths = np.diff(ends, prepend=-1)
    if ends.size and lengths.max() > 7:
        raise LimitError("a context payload contains a gap or step above the limit")
    if ((lengths > 1) & (data[ends] == 0)).any():
        raise FormatError("a context payload contains a number that is not in its shortest form")
    at = ends - lengths + 1
    values = (data[at] & 0x7F).astype(np.int64)
    longer = np.flatnonzero(lengths > 1)
    for k in range(1, 7):
        if not longer.size:
            break
        values[longer] |= (data[at[longer] + k] & 0x7F).astype(np.int64) << (7 * k)
        longer = longer[lengths[longer] > k + 1]
    if values.size and values.max() > 1 << 47:
        raise LimitError("a context payload contains a gap or step above the limit", value=int(values.max()))
    return values
