"""`context` and `history`: code changes against the old weights, which both ends have.

Weights whose old magnitude class is below a cut are *hot*: each is one decision (unchanged, or which step) of an
entropy coder, under a table chosen by its class and, in `history`, by the patch that last changed it; its last
direction flips the sign. The few changes of cold weights are written as gaps and steps. docs/format.md has the bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core import digest
from pulsesync.core.types import BLOCK, DTYPES, Bits, BlockChange, Remembered, Tile
from pulsesync.errors import FormatError, LimitError, VerificationError
from pulsesync.format import tables, wire
from pulsesync.format.codecs.gap import build_gaps, parse_gaps
from pulsesync.format.codecs.step import build_steps, parse_steps
from pulsesync.format.index import FrequencyTable
from pulsesync.kernels import spec
from pulsesync.kernels.arrays import I64, U16, U32
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

NO_HISTORY = np.empty(0, np.uint8)
NO_COLD = np.empty(0, np.int64)
NO_CHECKS = np.empty(0, np.uint32)
# Up to this number, the cold changes of a tile are pairs of numbers; more are smaller in planes, as in `step`.
FEW_COLD = 64


@dataclass(frozen=True)
class BlockMemory:
    """The history of a block in its epoch: bytes of the weights whose class is below the cut (see `history`)."""

    cut: int = 0
    remembered: Remembered | None = None
    index: int = 0  # of the current patch in its epoch; 0 where no history is kept

    def of_span(self, streams: int) -> SpanHistory:
        """What the coder needs of it for a block of this number of streams."""
        last, ranks = self.remembered or (NO_HISTORY, np.zeros(streams + 1, np.int64))
        return SpanHistory(last, ranks, self.cut, self.index)


def borders_of(sizes: I64) -> I64:
    """Where each of some runs begins if they are concatenated, and where the last one ends."""
    out = np.zeros(sizes.size + 1, np.int64)
    np.cumsum(sizes, out=out[1:])
    return out


def magnitudes(bits: Bits, shift: int) -> I64:
    """The magnitude class of each weight: for floats, the exponent."""
    return ((bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)) >> bits.dtype.type(shift)).astype(np.int64)


def count(span: CodedSpan, memory: BlockMemory, hot: HotChanges, counts: I64) -> tuple[Decisions, Remembered]:
    """Add a block's decisions to counts; return them, and the block's history afterwards."""
    history = memory.of_span(span.borders.size - 1)
    decisions, last, ranks = kernels.active().count_blocks(span, history, hot, counts)
    assert decisions.counts.min() >= 0, "a publisher's base and its history are written together"
    return decisions, Remembered(last, ranks)


def encode_block(decisions: Decisions, extras: U32, table: FrequencyTable) -> BlockStreams:
    """Return the streams of a block; extras are those of its hot changes."""
    lanes, width = tables.lanes_for(decisions.counts), 8 * DTYPES[table.dtype].itemsize
    frequencies = EncoderTable(table.cumulative, table.reciprocals, table.contexts.bits, width)
    words, ends = kernels.active().encode_blocks(decisions, extras, frequencies, lanes)
    if lanes.size == 1:  # nearly always, and each numpy call between two kernels costs as much as 10,000 weights
        return BlockStreams(np.array([decisions.changed.size]), lanes, ends[1:], words)
    changes = np.searchsorted(decisions.changed, borders_of(decisions.counts))
    return BlockStreams(changes[1:] - changes[:-1], lanes, ends[1:] - ends[:-1], words)


class Heads(NamedTuple):
    """A payload without its streams; the fields of streams are arrays, one entry per stream."""

    table: int
    cut: int
    changes: I64
    lanes: I64  # powers of two; for a stream without changes neither lanes nor words are written
    words: I64  # how many it has
    cold: I64  # positions in the tile
    steps: I64
    checks: U32 = NO_CHECKS  # of a bundle: for each group that changes, how its digest changes


class Payload(NamedTuple):
    """A tile as `context` or `history` wrote it."""

    heads: Heads
    words: U16  # of all streams, one after the other


def build(payload: Payload) -> bytes:
    """Write a payload: table, cut, stream headers, cold changes, checks, streams."""
    return build_heads(payload.heads) + payload.words.astype("<u2", copy=False).tobytes()


def build_heads(heads: Heads) -> bytes:
    """Write a payload up to its streams, which follow directly, in order."""
    numbers = [heads.cut]
    for changes, lanes, words in zip(heads.changes.tolist(), heads.lanes.tolist(), heads.words.tolist(), strict=True):
        if changes:
            numbers += (changes << 3 | lanes.bit_length() - 1, words)
        else:
            numbers.append(0)
    numbers.append(heads.cold.size)
    cold = build_cold(heads.cold, heads.steps)
    return bytes((heads.table,)) + wire.few_numbers(numbers) + cold + heads.checks.astype("<u4", copy=False).tobytes()


def build_cold(cold: I64, steps: I64) -> bytes:
    """Write cold changes at ascending positions: a few as pairs of numbers, more as gaps and steps in planes."""
    if cold.size > FEW_COLD:
        return build_gaps(cold) + build_steps(steps)
    at = cold.tolist()
    numbers = [0] * (2 * len(at))
    numbers[::2] = [here - before - 1 for before, here in pairwise((-1, *at))]
    numbers[1::2] = [step << 1 ^ step >> 63 for step in steps.tolist()]
    return wire.few_numbers(numbers)


def parse(data: memoryview, tile: Tile) -> Payload:
    """Read the payload of a tile, except the contents of its streams. Raises: FormatError, LimitError."""
    heads, begin = parse_heads(data, tile)
    return Payload(heads, np.frombuffer(data[begin:], "<u2").astype(np.uint16))


def parse_heads(data: memoryview, tile: Tile) -> tuple[Heads, int]:
    """Read the payload of a tile, except its streams; also return the offset at which those begin.

    The streams fill the rest exactly: stream s has words[s] words of 16 bits, low byte first. Raises: as `parse`.
    """
    reader = wire.ByteReader(data, "a context payload")
    table = reader.byte()
    kind = tile.tensor.kind
    cut = reader.number(1 << (8 * kind.itemsize - 1 - (kind.exponent_shift or 0)))
    by_stream = parse_streams(reader, tile.stream_sizes)
    changes, lanes, words = (np.array(by_stream[k::3], np.int64) for k in range(3))
    cold, steps = parse_cold(reader, reader.number(tile.size), tile.size, kind.itemsize)
    checks = NO_CHECKS
    if is_checked(tile):
        checks = np.frombuffer(reader.take(4 * int(changing(tile, changes, cold).sum())), "<u4")
    begin = reader.at
    reader.take(2 * sum(by_stream[2::3]))
    reader.end()
    return Heads(table, cut, changes, lanes, words, cold, steps, checks), begin


def is_checked(tile: Tile) -> bool:
    """Whether a payload has a check for each group, because a process may have only some of the groups."""
    return len(tile.groups) > 2


def changing(tile: Tile, hot: I64, cold: I64) -> NDArray[np.bool_]:
    """Which streams change something, given the number of hot changes of each, and where the tile's cold ones are."""
    return (hot > 0) | (np.diff(np.searchsorted(cold, tile.borders)) > 0)


def parse_streams(reader: wire.ByteReader, sizes: Sequence[int]) -> list[int]:
    """Changes, lanes and words of each stream, one after the other, given the number of weights of each."""
    out: list[int] = []
    number, most_lanes = reader.number, spec.MAX_LANES_LOG2
    for weights in sizes:
        head = number(weights << 3 | 7)
        if head == 0:
            out += (0, 1, 0)
        elif head < 8 or head & 7 > most_lanes:
            raise FormatError(
                "a context payload has a block with lanes but no changes, or with more lanes than are allowed"
            )
        else:  # a decision takes one word at most, a change two more
            out += (head >> 3, 1 << (head & 7), number(64 + 3 * weights))
    return out


def parse_cold(reader: wire.ByteReader, count: int, size: int, itemsize: int) -> tuple[I64, I64]:
    """Read this many cold changes of a tile: positions and steps. Raises: FormatError, LimitError."""
    if count > FEW_COLD:
        return parse_gaps(reader, count, size), parse_steps(reader, count, itemsize)
    if not count:
        return NO_COLD, NO_COLD
    numbers = [reader.number(1 << 47) for _ in range(2 * count)]
    gaps, codes = numbers[::2], numbers[1::2]
    if sum(gaps) + count > size:
        raise FormatError("a context payload has cold changes beyond the end of its tile")
    if min(codes) == 0 or max(codes) > 1 << 8 * itemsize:  # a code is twice a step, or one less
        raise LimitError("a context payload has a cold change with a step of 0, or a step beyond its dtype's range")
    positions = [at + n for n, at in enumerate(accumulate(gaps))]
    return np.array(positions, np.int64), np.array([code >> 1 ^ -(code & 1) for code in codes], np.int64)


def has_changes(heads: Heads, tile: Tile, number: int) -> bool:
    """Whether a block may have changes: a block without changes need not be read."""
    if tile.block_count == 1 or heads.changes[tile.streams(number)].any():
        return True
    first, last = np.searchsorted(heads.cold, (number * BLOCK, (number + 1) * BLOCK))
    return bool(first < last)


def decode_block(
    payload: Payload, tile: Tile, number: int, old: Bits, table: FrequencyTable, memory: BlockMemory
) -> BlockChange | None:
    """Return the changes of one block of a tile (of a bundle, those of local groups); None if there are none.

    Raises:
        FormatError: a stream does not decode, or a cold change is on a hot weight; VerificationError: the weights do
        not match the history, or a group does not match its check.
    """
    view = _block_view(payload, tile, number, old)
    contexts, cut, shift = table.contexts, payload.heads.cut, tile.tensor.kind.exponent_shift or 0
    positions, before, new, last, ranks, fault = kernels.active().decode_blocks(
        CodedSpan(view.old, view.borders, shift, cut, contexts.rows, contexts.bits),
        memory.of_span(view.borders.size - 1),
        DecoderTable(table.cumulative, contexts.symbols, table.sizes),
        view.streams,
        view.cold,
    )
    if fault:
        raise (VerificationError if fault == spec.FOREIGN_WRITE else FormatError)(spec.FAULTS[fault])
    if positions.size == 0:
        return None
    if view.kept is not None:
        positions = view.kept.expand(positions)
    change = BlockChange(number, positions, before, new, Remembered(last, ranks) if memory.index else None)
    if is_checked(tile):
        _check_groups(tile, payload.heads, change)
    return change


class _BlockView(NamedTuple):
    """The fields of a payload for a block, or for the concatenated local groups of a bundle."""

    old: Bits
    borders: I64
    streams: BlockStreams
    cold: ColdSteps
    kept: "KeptGroups | None" = None


def _block_view(payload: Payload, tile: Tile, number: int, old: Bits) -> _BlockView:
    heads, which, begin = payload.heads, tile.streams(number), number * BLOCK
    if tile.block_count == 1 and tile.kept is None:  # nearly always, and a dozen numpy calls cost 20 µs
        streams = BlockStreams(heads.changes, heads.lanes, heads.words, payload.words)
        return _BlockView(old, tile.borders, streams, ColdSteps(heads.cold, heads.steps))
    ends = borders_of(heads.words)
    words = payload.words[ends[which.start] : ends[which.stop]]
    streams = BlockStreams(heads.changes[which], heads.lanes[which], heads.words[which], words)
    cold, steps = heads.cold, heads.steps
    if cold.size:
        first, last = np.searchsorted(cold, (begin, begin + old.size))
        cold, steps = cold[first:last] - begin, steps[first:last]
    borders = tile.borders[which.start : which.stop + 1] - begin
    if tile.kept is None:
        return _BlockView(old, borders, streams, ColdSteps(cold, steps))
    kept = KeptGroups.of(tile)
    inside = kept.mask(cold)
    some = [words[ends[n] : ends[n + 1]] for n in tile.kept] or [words[:0]]
    n = list(tile.kept)
    streams = BlockStreams(streams.changes[n], streams.lanes[n], streams.sizes[n], np.concatenate(some))
    local = ColdSteps(kept.shrink(cold[inside]), steps[inside])
    return _BlockView(kept.pick(old), kept.borders, streams, local, kept)


class KeptGroups(NamedTuple):
    """The local groups of a bundle, concatenated."""

    begins: I64  # in the bundle
    ends: I64
    borders: I64  # in the concatenation

    @classmethod
    def of(cls, tile: Tile) -> "KeptGroups":
        kept = np.array(tile.kept or (), np.int64)
        begins, ends = tile.borders[kept], tile.borders[kept + 1]
        return cls(begins, ends, borders_of(ends - begins))

    def pick(self, weights: Bits) -> Bits:
        runs = [weights[begin:end] for begin, end in zip(self.begins.tolist(), self.ends.tolist(), strict=True)]
        return np.concatenate(runs) if runs else weights[:0]

    def mask(self, positions: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which positions of the bundle are in local groups."""
        group = np.searchsorted(self.begins, positions, "right") - 1
        inside: NDArray[np.bool_] = (group >= 0) & (positions < np.append(self.ends, 0)[group])
        return inside

    def shrink(self, positions: NDArray[np.integer]) -> I64:
        """From positions in the bundle, all in local groups, to positions in the concatenation."""
        group = np.searchsorted(self.begins, positions, "right") - 1
        return positions.astype(np.int64) - (self.begins - self.borders[:-1])[group]

    def expand(self, positions: U32) -> U32:
        """The reverse of `shrink`."""
        group = np.searchsorted(self.borders, positions, "right") - 1
        return (positions + (self.begins - self.borders[:-1])[group]).astype(np.uint32)


def _check_groups(tile: Tile, heads: Heads, change: BlockChange) -> None:
    """Raises: VerificationError, if the digest of a local group does not change as its check states."""
    groups = np.flatnonzero(changing(tile, heads.changes, heads.cold))
    promised = dict(zip(groups.tolist(), heads.checks.tolist(), strict=True))
    found = group_checks(tile, change)
    wanted = promised if tile.kept is None else {n: promised[n] for n in tile.kept if n in promised}
    if found != wanted:
        raise VerificationError(
            f"digest mismatch: a decoded group of {tile.tensor.name} differs from the part's check; weights unchanged",
            tensor=tile.names[0],
        )


def group_checks(tile: Tile, change: BlockChange) -> dict[int, int]:
    """For each group of a bundle that changes, the lower half of the change of the digest's first sum."""
    borders = np.searchsorted(change.positions, tile.borders)
    groups = np.flatnonzero(borders[1:] > borders[:-1])
    moved = digest.moved_in_runs(tile, change, borders[groups])
    return dict(zip(groups.tolist(), (moved & np.uint64(0xFFFFFFFF)).tolist(), strict=True))
