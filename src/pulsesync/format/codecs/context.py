"""`context` and `history`: code what changed against the old weights, which both ends hold.

Weights whose old magnitude class is below a cut are *hot*: each is one decision (unchanged, or which step) of an
entropy coder, under a table chosen by its class and, in `history`, by the patch that last changed it; its last
direction turns the sign. The few changes of cold weights are written as gaps and steps. docs/format.md has the bytes.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.types import BLOCK, Bits, BlockChange, Dtype
from pulsesync.errors import FormatError, LimitError, VerificationError
from pulsesync.format import tables, wire
from pulsesync.format.index import FrequencyTable
from pulsesync.kernels import spec

NO_HISTORY = np.empty(0, np.uint8)
NO_COLD = np.empty(0, np.int64)


@dataclass(frozen=True)
class BlockMemory:
    """What a block remembers of its epoch: bytes of the weights whose class is below the cut (see `history`)."""

    cut: int = 0
    last: NDArray[np.uint8] = field(default_factory=lambda: NO_HISTORY)
    index: int = 0  # of the patch at hand in its epoch; 0 where nothing is to be remembered

    @property
    def ranks(self) -> NDArray[np.int64]:
        """Where the bytes of the coder's blocks begin and end: there is one."""
        return np.array((0, self.last.size))


@dataclass(frozen=True)
class HotChanges:
    """The changes of a block's hot weights, as symbols, and the cold weights that turn hot."""

    positions: NDArray[np.uint32]
    new: Bits
    symbols: NDArray[np.uint8]
    extras: NDArray[np.uint32]
    entering_at: NDArray[np.uint32]
    entering: NDArray[np.uint8]  # 0x80 where they go down


def magnitudes(bits: Bits, shift: int) -> NDArray[np.int64]:
    """The magnitude class of each weight: for floats, the exponent."""
    return ((bits & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)) >> bits.dtype.type(shift)).astype(np.int64)


class Decisions(NamedTuple):
    """The decisions of a block's hot weights, as counted: what is left to do is to code them."""

    counts: NDArray[np.int64]  # how many
    rows: NDArray[np.uint16]  # of each its row of the tables
    changed: NDArray[np.uint32]  # which of them are changes
    symbols: NDArray[np.uint8]  # and by which symbols, once directions are counted from the last ones


def count(
    old: Bits,
    kind: Dtype,
    cut: int,
    memory: BlockMemory,
    hot: HotChanges,
    contexts: tables.Contexts,
    counts: NDArray[np.int64],
) -> tuple[Decisions, NDArray[np.uint8]]:
    """Add a block's decisions to counts; return them, and the block's history afterwards."""
    decided, remembered, _, *found = kernels.active().count_blocks(
        old,
        np.array((0, old.size)),
        kind.exponent_shift,
        cut,
        contexts.rows,
        contexts.bits,
        memory.last,
        memory.ranks,
        memory.cut,
        hot.positions,
        hot.new,
        hot.symbols,
        counts,
        memory.index,
        hot.entering_at,
        hot.entering,
    )
    assert decided.min() >= 0, "a publisher's base and its history are written together"
    return Decisions(decided, *found), remembered


def encode_block(decisions: Decisions, extras: NDArray[np.uint32], table: FrequencyTable) -> "BlockStream":
    """Return a block's stream; extras are those of its hot changes."""
    lanes = tables.lanes_for(decisions.counts)
    words, _ = kernels.active().encode_blocks(
        decisions.rows,
        table.contexts.bits,
        decisions.changed,
        decisions.symbols,
        extras,
        table.cumulative,
        table.reciprocals,
        decisions.counts,
        lanes,
    )
    return BlockStream(decisions.changed.size, int(lanes[0]), words)


@dataclass(frozen=True)
class BlockStream:
    """A block of a payload: how many hot changes it holds, in how many lanes, and its words."""

    changes: int
    lanes: int
    words: NDArray[np.uint16]


@dataclass(frozen=True)
class Payload:
    """A tile as `context` or `history` wrote it."""

    table: int  # which of the part's tables
    cut: int
    blocks: tuple[BlockStream, ...]
    cold: NDArray[np.int64]  # positions in the tile
    steps: NDArray[np.int64]


class Heads(NamedTuple):
    """A payload without its streams; what is said of each block is in arrays, one entry a block."""

    table: int
    cut: int
    changes: NDArray[np.int64]
    lanes: NDArray[np.int64]  # powers of two; of a block without changes, like its words, not written
    words: NDArray[np.int64]  # how many its stream has
    cold: NDArray[np.int64]
    steps: NDArray[np.int64]


def build(payload: Payload) -> bytes:
    """Write a payload: table, cut, block heads, cold changes, streams."""
    changes, lanes, words = np.array([(b.changes, b.lanes, b.words.size) for b in payload.blocks], np.int64).T
    head = build_heads(Heads(payload.table, payload.cut, changes, lanes, words, payload.cold, payload.steps))
    return b"".join((head, *(b.words.astype("<u2", copy=False).data for b in payload.blocks if b.changes)))


def build_heads(heads: Heads) -> bytes:
    """Write all of a payload but its streams, which follow at once, in the order of their blocks."""
    numbers = [heads.cut]
    for changes, lanes, words in zip(heads.changes.tolist(), heads.lanes.tolist(), heads.words.tolist(), strict=True):
        if changes:
            numbers += (changes << 3 | lanes.bit_length() - 1, words)
        else:
            numbers.append(0)
    numbers.append(heads.cold.size)
    return bytes((heads.table,)) + wire.few_numbers(numbers) + _build_cold(heads.cold, heads.steps)


def _build_cold(cold: NDArray[np.int64], steps: NDArray[np.int64]) -> bytes:
    if 2 * cold.size <= wire.FEW:
        at = cold.tolist()
        numbers = [0] * (2 * len(at))
        numbers[::2] = [here - before - 1 for before, here in pairwise((-1, *at))]
        numbers[1::2] = [step << 1 ^ step >> 63 for step in steps.tolist()]
        return wire.few_numbers(numbers)
    pairs = np.empty((cold.size, 2), np.int64)
    pairs[:, 0] = cold
    pairs[1:, 0] -= cold[:-1] + 1
    pairs[:, 1] = (steps << 1) ^ (steps >> 63)
    return wire.numbers(pairs.reshape(-1))


def parse(data: memoryview, size: int, kind: Dtype) -> Payload:
    """Read the payload of a tile of this many weights, all but the streams' contents.

    Raises:
        FormatError: cut short or too long, or more changes than weights; LimitError.
    """
    heads, begin = parse_heads(data, size, kind)
    words = np.frombuffer(data[begin:], "<u2").astype(np.uint16)
    ends = np.cumsum(heads.words)
    shape = zip(heads.changes.tolist(), heads.lanes.tolist(), (ends - heads.words).tolist(), ends.tolist(), strict=True)
    blocks = tuple(BlockStream(changes, lanes, words[first:last]) for changes, lanes, first, last in shape)
    return Payload(heads.table, heads.cut, blocks, heads.cold, heads.steps)


def parse_heads(data: memoryview, size: int, kind: Dtype) -> tuple[Heads, int]:
    """Read the payload of a tile of this many weights, all but its streams; return also the byte where those begin.

    The streams fill the rest exactly: block b's has words[b] words of 16 bits, low byte first.

    Raises:
        as `parse`.
    """
    reader = wire.ByteReader(data, "a context payload")
    table = reader.byte()
    width = 8 * kind.itemsize
    cut = reader.number(1 << (width - 1 - (kind.exponent_shift or 0)))
    blocks = parse_blocks(reader, size)
    cold, steps = _parse_cold(reader, size, 1 << width)
    begin = reader.at
    reader.take(2 * sum(blocks[2::3]))
    reader.end()
    by_block = np.array(blocks, np.int64).reshape(-1, 3)
    return Heads(table, cut, by_block[:, 0], by_block[:, 1], by_block[:, 2], cold, steps), begin


def parse_blocks(reader: wire.ByteReader, size: int) -> list[int]:
    """Changes, lanes and words of each block, one after the other."""
    out: list[int] = []
    number, most_lanes = reader.number, spec.MAX_LANES_LOG2
    for weights, blocks in ((BLOCK, size // BLOCK), (size % BLOCK, int(size % BLOCK > 0))):
        most_changes = weights << 3 | 7
        most_words = 64 + 3 * weights  # a decision takes one at most, a change two more
        for _ in range(blocks):
            head = number(most_changes)
            if head == 0:
                out += (0, 1, 0)
            elif head < 8 or head & 7 > most_lanes:
                raise FormatError("a block says it has lanes without changes, or more than it can")
            else:
                out += (head >> 3, 1 << (head & 7), number(most_words))
    return out


def _parse_cold(reader: wire.ByteReader, size: int, circle: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions and steps of the cold changes; the circle is as long as its dtype has bit patterns."""
    count = reader.number(size)
    if 2 * count <= wire.FEW:
        return _parse_few_cold(reader, count, size, circle)
    pairs = reader.numbers(2 * count, 1 << 47).reshape(-1, 2)
    gaps, codes = pairs[:, 0], pairs[:, 1]
    _check_cold(float(gaps.sum(dtype=np.float64)) + count, int(codes.min()), int(codes.max()), size, circle)
    return np.cumsum(gaps + 1) - 1, (codes >> 1) ^ -(codes & 1)


def _parse_few_cold(
    reader: wire.ByteReader, count: int, size: int, circle: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The same without numpy, whose overhead is more than so few cost."""
    if not count:
        return NO_COLD, NO_COLD
    numbers = [reader.number(1 << 47) for _ in range(2 * count)]
    gaps, codes = numbers[::2], numbers[1::2]
    _check_cold(sum(gaps) + count, min(codes), max(codes), size, circle)
    positions = [at + n for n, at in enumerate(accumulate(gaps))]
    return np.array(positions, np.int64), np.array([code >> 1 ^ -(code & 1) for code in codes], np.int64)


def _check_cold(end: float, least: int, most: int, size: int, circle: int) -> None:
    if end > size:
        raise FormatError("a context payload has cold changes outside its tile")
    if least == 0 or most > circle:  # a code is twice a step, or one less: half the circle at most
        raise LimitError("a cold change is no step, or longer than its dtype has")


def has_changes(payload: Payload, number: int) -> bool:
    """Whether a block has any: one that has none need not be read."""
    first, last = np.searchsorted(payload.cold, (number * BLOCK, (number + 1) * BLOCK))
    return payload.blocks[number].changes > 0 or first < last


def move_cold(old: Bits, steps: NDArray[np.int64], cut: int | NDArray[np.int64], shift: int) -> Bits:
    """Move cold weights by their steps. Raises: FormatError, if one is hot, or goes half the circle the wrong way."""
    if (magnitudes(old, shift) < cut).any():
        raise FormatError("a context payload names a hot weight among the cold changes")
    half = 1 << (8 * old.itemsize - 1)
    if ((np.abs(steps) == half) & ((steps < 0) == (old >= half))).any():
        raise FormatError("a cold change goes half the circle by the wrong way")
    return tables.apply_steps(old, steps)


def decode_block(
    payload: Payload, number: int, old: Bits, kind: Dtype, table: FrequencyTable, memory: BlockMemory
) -> BlockChange | None:
    """Return the changes of one block of a tile; None if there are none.

    Raises:
        FormatError: the stream does not decode, or a cold change is on a hot weight; VerificationError: the weights are
        not those that the history is of.
    """
    begin, block, shift = number * BLOCK, payload.blocks[number], kind.exponent_shift or 0
    first, last = np.searchsorted(payload.cold, (begin, begin + old.size))
    cold, steps = payload.cold[first:last] - begin, payload.steps[first:last]
    moved = move_cold(old[cold], steps, payload.cut, shift)
    positions, new, remembered = cold.astype(np.uint32), moved, None
    if block.changes:
        enters = magnitudes(moved, shift) < payload.cut
        positions, new, remembered, _, fault = kernels.active().decode_blocks(
            old,
            np.array((0, old.size)),
            shift,
            payload.cut,
            table.contexts.rows,
            table.contexts.bits,
            memory.last,
            memory.ranks,
            memory.cut,
            table.cumulative,
            table.contexts.symbols,
            np.array((block.lanes,)),
            block.words,
            np.array((0, block.words.size)),
            np.array((block.changes,)),
            memory.index,
            positions[enters],
            np.where(steps[enters] < 0, 0x80, 0).astype(np.uint8),
        )
        if fault:
            raise (VerificationError if fault == spec.FOREIGN_WRITE else FormatError)(spec.FAULTS[fault])
        if cold.size:
            positions, new = np.concatenate([positions, cold.astype(np.uint32)]), np.concatenate([new, moved])
            order = np.argsort(positions, kind="stable")
            positions, new = positions[order], new[order]
    if positions.size == 0:
        return None
    return BlockChange(number, positions, old[positions], new, remembered if memory.index else None)
