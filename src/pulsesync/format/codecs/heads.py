"""The heads of many `context` payloads at once, for a GPU that codes all tiles of a part together.

The bytes and the checks are those of `context`; here numpy goes once over all tiles, where there it would cost a model
of some hundred tiles more time than coding takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import Tile
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import wire
from pulsesync.format.codecs import context
from pulsesync.kernels import spec


def build_many(
    table: int,
    cuts: NDArray[np.int64],
    first_block: NDArray[np.int64],
    blocks: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
    colds: NDArray[np.int64],
) -> list[bytes]:
    """`context.build_heads` of tiles that use one table, up to the cold changes, of which each has so many.

    blocks: changes, lanes and words of the blocks of all tiles, those of tile i from first_block[i] to the next one's.
    """
    changes, lanes, words = blocks
    coded = changes > 0
    before = np.r_[0, np.cumsum(1 + coded)]  # numbers of the blocks before each
    counts = 2 + np.diff(before[first_block])
    begins = np.cumsum(counts) - counts
    values = np.empty(counts.sum(), np.int64)
    values[begins], values[begins + counts - 1] = cuts, colds
    tile = np.repeat(np.arange(cuts.size), np.diff(first_block))
    at = begins[tile] + 1 + before[:-1] - before[first_block[tile]]
    values[at] = np.where(coded, changes << 3 | np.log2(lanes).astype(np.int64), 0)
    values[at[coded] + 1] = words[coded]
    return [bytes((table,)) + run for run in wire.runs(values, counts)]


def build_cold(first: NDArray[np.int64], cold: NDArray[np.int64], steps: NDArray[np.int64]) -> list[bytes]:
    """The cold changes of tiles, those of tile i from first[i] to the next one's: positions in the tile, and steps."""
    counts = np.diff(first)
    few = np.repeat(counts <= context.FEW_COLD, counts)
    pairs = np.empty((cold.size, 2), np.int64)
    pairs[:, 0] = np.diff(cold, prepend=0) - 1
    starts = first[:-1][counts > 0]
    pairs[starts, 0] = cold[starts]
    pairs[:, 1] = (steps << 1) ^ (steps >> 63)
    out = wire.runs(pairs[few].reshape(-1), np.where(counts <= context.FEW_COLD, 2 * counts, 0))
    for i in np.flatnonzero(counts > context.FEW_COLD).tolist():
        out[i] = context.build_cold(cold[first[i] : first[i + 1]], steps[first[i] : first[i + 1]])
    return out


@dataclass(frozen=True)
class OpenedPayload:
    """A payload of which the table and the cut are read: what a reader must know to look for the hot weights."""

    table: int
    cut: int
    reader: wire.ByteReader
    tile: Tile


def begin(data: memoryview, tile: Tile) -> OpenedPayload:
    """Begin to read the payload of a tile. Raises: FormatError, LimitError."""
    reader = wire.ByteReader(data, "a context payload")
    table, kind = reader.byte(), tile.tensor.kind
    cut = reader.number(1 << (8 * kind.itemsize - 1 - (kind.exponent_shift or 0)))
    return OpenedPayload(table, cut, reader, tile)


@dataclass(frozen=True)
class PayloadStreams:
    """What payloads say of their streams, those of all of them one after the other: of blocks, or groups of bundles."""

    first: NDArray[np.int64]  # where the streams of each payload begin, and where those of the last end
    changes: NDArray[np.int64]
    lanes: NDArray[np.int64]
    words: NDArray[np.int64]
    colds: NDArray[np.int64]  # of each payload: how many cold changes follow


@dataclass(frozen=True)
class ColdChanges:
    """The cold changes of payloads, those of all of them one after the other."""

    positions: NDArray[np.int64]  # in the tile
    steps: NDArray[np.int64]
    checked: NDArray[np.bool_]  # of all streams, whether the payload says how its digest moves
    checks: NDArray[np.uint32]  # and how: 0 where nothing changes


def parse_streams_of(payloads: Sequence[OpenedPayload]) -> PayloadStreams:
    """Read what payloads say of their streams. Raises: FormatError, LimitError.

    Those whose streams all have changes are read at once; the others, and those that are wrong, one by one.
    """
    sizes = [np.diff(one.tile.borders) for one in payloads]
    counts = np.array([some.size for some in sizes], np.int64)
    first = np.r_[0, np.cumsum(counts)]
    heads, words, colds, good, lengths = _at_once(payloads, np.concatenate(sizes), counts)
    changes, lanes = heads >> 3, 1 << (heads & 7)
    for one, fine, used in zip(payloads, good.tolist(), lengths, strict=True):
        one.reader.at += used if fine else 0
    for i in np.flatnonzero(~good).tolist():
        some = np.array(context.parse_streams(payloads[i].reader, sizes[i].tolist()), np.int64).reshape(-1, 3)
        changes[first[i] : first[i + 1]], lanes[first[i] : first[i + 1]], words[first[i] : first[i + 1]] = some.T
        colds[i] = payloads[i].reader.number(payloads[i].tile.size)
    return PayloadStreams(first, changes, lanes, words, colds)


def streams_of(payloads: Sequence[OpenedPayload], blocks: PayloadStreams) -> list[memoryview]:
    """The streams of each payload, which are its end. Raises: FormatError."""
    streams = 2 * np.diff(np.r_[0, np.cumsum(blocks.words)][blocks.first])
    ends = (np.array([len(one.reader.data) for one in payloads], np.int64) - streams).tolist()
    if any(end < one.reader.at for one, end in zip(payloads, ends, strict=True)):
        raise FormatError("a context payload ends too early: its streams are longer than what is left")
    return [one.reader.data[end:] for one, end in zip(payloads, ends, strict=True)]


def parse_cold(payloads: Sequence[OpenedPayload], blocks: PayloadStreams, streams: Sequence[memoryview]) -> ColdChanges:
    """What stands before the streams of each, as `context.parse_heads` reads it. Raises: as that."""
    both = [(one.reader, len(stream)) for one, stream in zip(payloads, streams, strict=True)]
    written = [reader.data[reader.at : len(reader.data) - end] for reader, end in both]
    counts = blocks.colds
    first = np.r_[0, np.cumsum(counts)]
    positions, steps = np.empty(first[-1], np.int64), np.empty(first[-1], np.int64)
    for i in np.flatnonzero(counts > context.FEW_COLD).tolist():
        tile, mine = payloads[i].tile, slice(first[i], first[i + 1])
        reader = wire.ByteReader(written[i], "a context payload")
        positions[mine], steps[mine] = context.parse_cold(reader, int(counts[i]), tile.size, tile.tensor.kind.itemsize)
        written[i] = written[i][reader.at :]
    few = np.where(counts > context.FEW_COLD, 0, counts)
    checks: list[memoryview] = []
    for i, one in enumerate(payloads):
        end = _end_of(written[i], 2 * int(few[i])) if context.is_checked(one.tile) else len(written[i])
        checks.append(written[i][end:])
        written[i] = written[i][:end]
    short = np.repeat(few > 0, counts)
    positions[short], steps[short] = _few_cold(written, few, payloads)
    return ColdChanges(positions, steps, *_checks(payloads, blocks, np.split(positions, first[1:-1]), checks))


def _end_of(data: memoryview, count: int) -> int:
    """The byte after so many LEB128 numbers. Raises: FormatError, if there are fewer."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) < 0x80)
    if ends.size < count:
        raise FormatError("a context payload has more or fewer cold changes than it says")
    return int(ends[count - 1]) + 1 if count else 0


def _checks(
    payloads: Sequence[OpenedPayload],
    blocks: PayloadStreams,
    cold: Sequence[NDArray[np.int64]],
    written: Sequence[memoryview],
) -> tuple[NDArray[np.bool_], NDArray[np.uint32]]:
    """Of all streams, whether the payload says how its digest moves, and how; cold: where those of each payload are."""
    checked, checks = np.zeros(blocks.changes.size, np.bool_), np.zeros(blocks.changes.size, np.uint32)
    for i, one in enumerate(payloads):
        if context.is_checked(one.tile):
            mine = slice(blocks.first[i], blocks.first[i + 1])
            moved = context.changing(one.tile, blocks.changes[mine], cold[i])
            if len(written[i]) != 4 * moved.sum():
                raise FormatError("a context payload has more or fewer checks than groups that change")
            checked[mine] = True
            checks[mine][moved] = np.frombuffer(written[i], "<u4")
    return checked, checks


def _at_once(
    payloads: Sequence[OpenedPayload], sizes: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], list[int]]:
    """Two numbers a stream and one more of each payload, which payloads are right so, and the bytes that this takes.

    sizes: of all streams, the weights that each is of.
    """
    wanted = 2 * counts + 1
    windows = [one.reader.data[one.reader.at :][: 4 * n] for one, n in zip(payloads, wanted.tolist(), strict=True)]
    begins = np.cumsum([len(window) for window in windows]) - [len(window) for window in windows]
    data = np.frombuffer(b"".join((*windows, bytes(int(wanted.max()) + 4))), np.uint8)  # there is something to take
    ends = np.flatnonzero(data < 0x80)
    first = np.searchsorted(ends, begins)
    good = np.diff(first, append=np.searchsorted(ends, begins[-1] + len(windows[-1]))) >= wanted
    of = np.repeat(np.arange(counts.size), wanted)
    place = np.arange(of.size) - np.repeat(np.cumsum(wanted) - wanted, wanted)  # in its payload
    taken = np.minimum(first[of] + place, ends.size - 1)
    at = np.where(place == 0, begins[of], ends[taken - 1] + 1)
    long = ends[taken] - at
    values = np.zeros(of.size, np.int64)
    for k in range(4):
        values |= np.where(k <= long, data[np.minimum(at + k, data.size - 1)] & 0x7F, 0).astype(np.int64) << (7 * k)
    heads, cold = place % 2 == 0, place == wanted[of] - 1
    before = np.cumsum(counts) - counts  # streams
    weights = sizes[np.minimum(before[of] + place // 2, sizes.size - 1)]
    most = np.where(cold, np.add.reduceat(sizes, before)[of], np.where(heads, weights << 3 | 7, 64 + 3 * weights))
    wrong = (long > 3) | ((long > 0) & (data[ends[taken]] == 0)) | (values > most)
    wrong |= heads & ~cold & ((values < 8) | (values & 7 > spec.MAX_LANES_LOG2))
    good &= ~np.logical_or.reduceat(wrong, np.cumsum(wanted) - wanted)
    last = np.minimum(first + wanted - 1, ends.size - 1)
    lengths = (ends[last] + 1 - begins).tolist()
    return values[heads & ~cold], values[~heads], values[cold], good, lengths


def _few_cold(
    runs: Sequence[memoryview], counts: NDArray[np.int64], payloads: Sequence[OpenedPayload]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions and steps of cold changes that are pairs of numbers: so many each, in bytes that they fill."""
    sizes = np.array([one.tile.size for one in payloads], np.int64)
    circles = np.array([1 << 8 * one.tile.tensor.kind.itemsize for one in payloads], np.int64)
    values = _numbers(runs, 2 * counts)
    gaps, codes = values[::2], values[1::2]
    first = np.cumsum(counts) - counts
    some = np.flatnonzero(counts)
    if some.size:
        spans = np.add.reduceat(gaps.astype(np.float64), first[some]) + counts[some]
        if (spans > sizes[some]).any():
            raise FormatError("a context payload has cold changes outside its tile")
        if codes.min() == 0 or (np.maximum.reduceat(codes, first[some]) > circles[some]).any():
            raise LimitError("a cold change is no step, or longer than its dtype has")
    ends = np.cumsum(gaps + 1)
    return ends - 1 - np.repeat(np.r_[0, ends][first], counts), (codes >> 1) ^ -(codes & 1)


def _numbers(runs: Sequence[memoryview], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """LEB128 numbers that fill runs of bytes, so many each."""
    data = np.frombuffer(b"".join(runs), np.uint8)
    borders = np.cumsum([len(run) for run in runs])
    ends = np.flatnonzero(data < 0x80)
    unfinished = data.size > 0 and bool((data[borders - 1] >= 0x80).any())
    if unfinished or (np.searchsorted(ends, borders) != np.cumsum(counts)).any():
        raise FormatError("a context payload has more or fewer cold changes than it says")
    lengths = np.diff(ends, prepend=-1)
    if ends.size and lengths.max() > 7:
        raise LimitError("a context payload holds a gap or step beyond what is allowed")
    if ((lengths > 1) & (data[ends] == 0)).any():
        raise FormatError("a context payload holds a number written longer than needed")
    at = ends - lengths + 1
    values = (data[at] & 0x7F).astype(np.int64)
    longer = np.flatnonzero(lengths > 1)
    for k in range(1, 7):
        if not longer.size:
            break
        values[longer] |= (data[at[longer] + k] & 0x7F).astype(np.int64) << (7 * k)
        longer = longer[lengths[longer] > k + 1]
    if values.size and values.max() > 1 << 47:
        raise LimitError("a context payload holds a gap or step beyond what is allowed", value=int(values.max()))
    return values
