"""`context` and `history`: code what changed against the old weights, which both ends hold.

Weights whose old magnitude class is below a cut are *hot*: each is one decision (unchanged, or which step) of an
entropy coder, under a table chosen by its class and, in `history`, by the patch that last changed it; its last
direction turns the sign. The few changes of cold weights are written as gaps and steps. docs/FORMAT.md has the bytes.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.errors import FormatError, LimitError, VerificationError
from pulsesync.format import tables, wire
from pulsesync.format.index import Table
from pulsesync.kernels import spec
from pulsesync.model import BLOCK, Bits, BlockChange, Dtype

NO_HISTORY = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Memory:
    """What a block remembers of its epoch: bytes of the weights whose class is below the cut (see `history`)."""

    cut: int = 0
    last: NDArray[np.uint8] = field(default_factory=lambda: NO_HISTORY)
    index: int = 0  # of the patch at hand in its epoch; 0 where nothing is to be remembered


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


def count(
    old: Bits,
    kind: Dtype,
    cut: int,
    memory: Memory,
    hot: HotChanges,
    contexts: tables.Contexts,
    counts: NDArray[np.int64],
) -> tuple[int, NDArray[np.uint8]]:
    """Add a block's decisions to counts; return how many there are, and the block's history afterwards."""
    decided, remembered = kernels.active().count_block(
        old, kind.exponent_shift, cut, contexts.rows, contexts.bits, memory.last, memory.cut, hot.positions,
        hot.new, hot.symbols, counts, memory.index, hot.entering_at, hot.entering,
    )  # fmt: skip
    assert decided >= 0, "a publisher's base and its history are written together"
    return int(decided), remembered


def encode_block(
    old: Bits, kind: Dtype, cut: int, memory: Memory, hot: HotChanges, table: Table, decisions: int
) -> NDArray[np.uint16]:
    """Return a block's stream."""
    stream: NDArray[np.uint16] = kernels.active().encode_block(
        old, kind.exponent_shift, cut, table.contexts.rows, table.contexts.bits, memory.last, memory.cut,
        hot.positions, hot.symbols, hot.extras, table.cumulative, table.reciprocals, decisions,
        tables.lanes_for(decisions),
    )  # fmt: skip
    return stream


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


def build(payload: Payload) -> bytes:
    """Write a payload: table, cut, block heads, cold changes, streams."""
    heads = []
    for block in payload.blocks:
        heads.append(block.changes << 3 | block.lanes.bit_length() - 1 if block.changes else 0)
        if block.changes:
            heads.append(block.words.size)
    cold = np.empty((payload.cold.size, 2), np.int64)
    cold[:, 0] = payload.cold
    cold[1:, 0] -= payload.cold[:-1] + 1
    cold[:, 1] = (payload.steps << 1) ^ (payload.steps >> 63)
    return b"".join((
        bytes([payload.table]),
        wire.number(payload.cut),
        wire.numbers(np.array(heads, np.int64)),
        wire.number(payload.cold.size),
        wire.numbers(cold.reshape(-1)),
        *(block.words.astype("<u2").tobytes() for block in payload.blocks if block.changes),
    ))  # fmt: skip


def parse(data: memoryview, size: int, kind: Dtype) -> Payload:
    """Read the payload of a tile of this many weights, all but the streams' contents.

    Raises:
        FormatError: cut short or too long, or more changes than weights; LimitError.
    """
    reader = wire.Reader(data, "a context payload")
    table = reader.byte()
    width = 8 * kind.itemsize
    cut = reader.number(1 << (width - 1 - (kind.exponent_shift or 0)))
    heads: list[tuple[int, int, int]] = []
    for begin in range(0, size, BLOCK):
        weights = min(BLOCK, size - begin)
        head = reader.number(weights << 3 | 7)
        changes, lanes_log2 = head >> 3, head & 7
        if changes > weights or lanes_log2 > spec.MAX_LANES_LOG2 or (changes == 0 and head):
            raise FormatError("a block says it has more changes or lanes than it can")
        # a decision takes one word at most, a change two more
        heads.append((changes, 1 << lanes_log2, reader.number(64 + 3 * weights) if changes else 0))
    cold_count = reader.number(size)
    pairs = reader.numbers(2 * cold_count, 1 << 47).reshape(-1, 2)
    if cold_count and float(pairs[:, 0].sum(dtype=np.float64)) + cold_count > size:
        raise FormatError("a context payload has cold changes outside its tile")
    steps = (pairs[:, 1] >> 1) ^ -(pairs[:, 1] & 1)
    if (cold_count and (steps == 0).any()) or (np.abs(steps) > 1 << (width - 1)).any():
        raise LimitError("a cold change is no step, or longer than its dtype has")
    blocks = tuple(
        BlockStream(changes, lanes, np.frombuffer(reader.take(2 * words), "<u2").astype(np.uint16))
        for changes, lanes, words in heads
    )
    reader.end()
    return Payload(table, cut, blocks, np.cumsum(pairs[:, 0] + 1) - 1, steps)


def has_changes(payload: Payload, number: int) -> bool:
    """Whether a block has any: one that has none need not be read."""
    first, last = np.searchsorted(payload.cold, (number * BLOCK, (number + 1) * BLOCK))
    return payload.blocks[number].changes > 0 or first < last


def decode_block(
    payload: Payload, number: int, old: Bits, kind: Dtype, table: Table, memory: Memory
) -> BlockChange | None:
    """Return the changes of one block of a tile; None if there are none.

    Raises:
        FormatError: the stream does not decode, or a cold change is on a hot weight; VerificationError: the weights are
        not those that the history is of.
    """
    begin, block, shift = number * BLOCK, payload.blocks[number], kind.exponent_shift or 0
    first, last = np.searchsorted(payload.cold, (begin, begin + old.size))
    cold, steps = payload.cold[first:last] - begin, payload.steps[first:last]
    if (magnitudes(old[cold], shift) < payload.cut).any():
        raise FormatError("a context payload names a hot weight among the cold changes")
    moved = tables.apply_steps(old[cold], steps)
    half = 1 << (8 * old.itemsize - 1)
    if ((np.abs(steps) == half) & ((steps < 0) == (old[cold] >= half))).any():
        raise FormatError("a cold change goes half the circle by the wrong way")
    positions, new, remembered = cold.astype(np.uint32), moved, None
    if block.changes:
        enters = magnitudes(moved, shift) < payload.cut
        positions, new, remembered, fault = kernels.active().decode_block(
            old, shift, payload.cut, table.contexts.rows, table.contexts.bits, memory.last, memory.cut,
            table.cumulative, table.contexts.symbols, block.lanes, block.words, block.changes, memory.index,
            positions[enters], np.where(steps[enters] < 0, 0x80, 0).astype(np.uint8),
        )  # fmt: skip
        if fault:
            raise (VerificationError if fault == spec.FOREIGN_WRITE else FormatError)(spec.FAULTS[fault])
        if cold.size:
            positions, new = np.concatenate([positions, cold.astype(np.uint32)]), np.concatenate([new, moved])
            order = np.argsort(positions, kind="stable")
            positions, new = positions[order], new[order]
    if positions.size == 0:
        return None
    return BlockChange(number, positions, old[positions], new, remembered if memory.index else None)
