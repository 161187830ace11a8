"""Code changes against the old weights, all on the device: the bytes are those that `format.predict` would write.

The host sees counts, from which it chooses cuts and makes tables, and at the end the streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.device.changes import Marks, Run
from pulsesync.device.hot import Hot, Listed, Memories, list_hot, mark_hot
from pulsesync.device.memory import empty, scan, starts_of, to_device, to_host, unsigned
from pulsesync.device.pile import Located, Pile
from pulsesync.format import index, tables
from pulsesync.format.codecs.heads import build_cold, build_many
from pulsesync.format.index import Table
from pulsesync.format.predict import Coded
from pulsesync.kernels import cuda, spec
from pulsesync.model import Codec

COPIES = 1 << 21  # places in all copies of a table that is counted: copies keep programs out of each other's way


@dataclass(frozen=True)
class CodedPile:
    """The payloads of a pile's changed tiles by ordinal, their table, and the hot weights they were coded with."""

    table: Table
    tiles: dict[int, Coded]
    hot: Hot


@dataclass(frozen=True)
class _Blocks:
    """Counts of blocks, on the host."""

    changes: NDArray[np.int64]
    hot_changes: NDArray[np.int64]
    decisions: NDArray[np.int64]

    @property
    def coded(self) -> NDArray[np.intp]:
        """Those that have a stream."""
        return np.flatnonzero(self.hot_changes)


def code_pile(run: Run, marks: Marks, weights: Located, memories: Memories | None, number_of_table: int) -> CodedPile:
    """Code the changes of a pile; with memories as `history`, else as `context`."""
    pile = run.pile
    cuts, changes = _choose_cuts(run, weights, memories)
    hot = mark_hot(pile, weights, cuts, memories or Memories(), marks.bitmap)
    hot_change_at = scan(hot.hot_changes)
    hot_changes, decisions = to_host(hot_change_at[pile.first_chunk].diff(), scan(hot.counts)[pile.first_chunk].diff())
    blocks = _Blocks(changes, hot_changes, np.where(hot_changes > 0, decisions, 0))
    highest = max(1, int(cuts.max()))
    lo = max(0, highest - index.CLASSES)
    ages = memories.index + 1 if memories is not None else 1
    contexts = tables.Contexts(lo, highest - lo, ages, tables.symbol_count(8 * pile.kind.itemsize))
    coded = to_device((hot_changes > 0).astype(np.int32), pile.device)
    listed = list_hot(hot, weights, coded, contexts, places=False)
    rows = listed.rows
    decided = _decide(run, marks, hot, listed, hot_change_at, blocks)
    table = Table(pile.tiles[0].tensor.dtype, lo, tables.normalise(_count(rows, decided.symbols, contexts)))
    written = _write(pile, rows, decided, table, blocks)
    codec = Codec.CONTEXT if memories is None else Codec.HISTORY
    bodies = _payloads(pile, cuts, blocks, written, number_of_table)
    return CodedPile(table, {o: Coded(codec, pieces, cut) for o, cut, pieces in bodies}, hot)


def _choose_cuts(run: Run, weights: Located, memories: Memories | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The cuts of tiles, 0 where nothing changed, and the changes of blocks."""
    pile = run.pile
    by_class, sampled = (torch.zeros(256 * len(pile.tiles), dtype=torch.int64, device=pile.device) for _ in range(2))
    cuda.count_classes[(pile.blocks,)](
        unsigned(run.old), run.starts, pile.sizes, weights.at, pile.block_tile, by_class, sampled,
        ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, PERIOD=spec.SAMPLE_PERIOD, RUN=spec.SAMPLE_RUN,
        SPAN=1024,
    )  # fmt: skip
    found, seen, starts = to_host(by_class, sampled, run.starts)
    found, seen = found.reshape(-1, 256), seen.reshape(-1, 256)
    touched = np.flatnonzero(found.any(axis=1))
    cuts = np.zeros(len(pile.tiles), np.int64)
    cuts[touched] = tables.choose_cuts(found[touched], seen[touched])
    if memories is not None:
        for i in touched.tolist():
            cuts[i] = max(cuts[i], memories.cut(pile.tiles[i].ordinal))
    return cuts, np.diff(starts)


@dataclass(frozen=True)
class _Decided:
    symbols: torch.Tensor
    extras: torch.Tensor
    cold: NDArray[np.int64]  # positions in the block
    steps: NDArray[np.int64]


def _decide(
    run: Run,
    marks: Marks,
    hot: Hot,
    listed: Listed,
    hot_change_at: torch.Tensor,
    blocks: _Blocks,
) -> _Decided:
    pile, device, rows = run.pile, run.pile.device, listed.rows
    hot_changes = int(blocks.hot_changes.sum())
    cold = run.count - hot_changes
    symbols = torch.zeros(max(rows.numel(), 1), dtype=torch.uint8, device=device)
    extras = empty(hot_changes, torch.int32, device)
    cold_at, cold_steps = (empty(cold, torch.int64, device) for _ in range(2))
    cuda.decide[(pile.chunks,)](
        pile.chunk_block, pile.first_chunk, unsigned(hot.bitmap), unsigned(marks.bitmap), marks.offsets,
        unsigned(run.old), unsigned(run.new), listed.begins, hot_change_at, unsigned(rows), symbols, unsigned(extras),
        cold_at, cold_steps, ITEM=pile.kind.itemsize, HISTORY=hot.remembers,
    )  # fmt: skip
    where, steps = to_host(cold_at, cold_steps)
    return _Decided(symbols, extras, where, steps)


def _count(rows: torch.Tensor, symbols: torch.Tensor, contexts: tables.Contexts) -> NDArray[np.int64]:
    """How often each symbol of each context is decided: (classes, ages, symbols)."""
    device, total = rows.device, rows.numel()
    shape = (contexts.classes * contexts.ages, 1 << contexts.bits)
    copies = max(1, min(256, COPIES // (shape[0] * shape[1])))
    bins = 1 << (shape[0] - 1).bit_length()
    of_rows = torch.zeros(max(bins, 2), dtype=torch.int64, device=device)
    of_symbols = torch.zeros((copies, *shape), dtype=torch.int32, device=device)
    if total:
        per, span = 16, 4096
        cuda.count_rows[(-(-total // (per * span)),)](
            unsigned(rows), total, of_rows, BINS=max(bins, 2), SPAN=span, PER=per
        )
        cuda.count_symbols[(-(-total // span),)](
            unsigned(rows), symbols, total, of_symbols, shape[0] * shape[1], BITS=contexts.bits, COPIES=copies,
            SPAN=span,
        )  # fmt: skip
    every, changed = to_host(of_rows, of_symbols.sum(dim=0, dtype=torch.int64))
    counts = changed.copy()
    counts[:, 0] = every[: shape[0]] - changed.sum(axis=1)
    return counts.reshape(contexts.classes, contexts.ages, -1)[..., : contexts.symbols]


@dataclass(frozen=True)
class _Written:
    words: NDArray[np.int64]  # of each block
    stream: NDArray[np.uint16]  # of all blocks, one after the other
    cold: list[bytes]  # cold changes of each tile


def _write(pile: Pile, rows: torch.Tensor, decided: _Decided, table: Table, blocks: _Blocks) -> _Written:
    """Code the hot weights on the device, and meanwhile write the cold changes here."""
    words = np.zeros(pile.blocks, np.int64)
    coded = blocks.coded
    decisions, changes = blocks.decisions[coded], blocks.hot_changes[coded]
    lanes = lanes_for(decisions)
    likely = starts_of(2 * lanes + decisions // 4 + 3 * changes)
    streams = _launch(pile, rows, decided, table, decisions, changes, lanes, likely) if coded.size else None
    cold = decided.cold + np.repeat(pile.host_begins, blocks.changes - blocks.hot_changes)
    cold_bytes = build_cold(_first_cold(pile, blocks), cold, decided.steps)
    if streams is None:
        return _Written(words, np.empty(0, np.uint16), cold_bytes)
    (sizes,) = to_host(streams.used)
    if (sizes > np.diff(likely)).any():  # many changes: there is always room for a word a decision and two a change
        most = starts_of(2 * lanes + decisions + 3 * changes)
        streams = _launch(pile, rows, decided, table, decisions, changes, lanes, most)
    words[coded] = sizes
    return _Written(words, _packed(streams, sizes), cold_bytes)


@dataclass(frozen=True)
class _Streams:
    """Streams in rooms of their own, each at the end of its room."""

    stream: torch.Tensor
    ends: torch.Tensor  # of rooms
    used: torch.Tensor  # words


def _launch(
    pile: Pile,
    rows: torch.Tensor,
    decided: _Decided,
    table: Table,
    decisions: NDArray[np.int64],
    changes: NDArray[np.int64],
    lanes: NDArray[np.int64],
    rooms: NDArray[np.int64],
) -> _Streams:
    device = pile.device
    room_starts = to_device(rooms, device)
    stream = empty(int(rooms[-1]), torch.int16, device)
    used = empty(lanes.size, torch.int64, device)
    cuda.encode[(lanes.size,)](
        unsigned(rows), decided.symbols, unsigned(decided.extras), to_device(starts_of(decisions), device),
        to_device(starts_of(changes), device), to_device(lanes.astype(np.int32), device),
        unsigned(to_device(table.cumulative, device)), room_starts, unsigned(stream), used, BITS=table.contexts.bits,
        WIDE=pile.kind.itemsize == 4, num_warps=1,
    )  # fmt: skip
    return _Streams(stream, room_starts[1:], used)


def _packed(streams: _Streams, sizes: NDArray[np.int64]) -> NDArray[np.uint16]:
    """All streams on the host, one after the other."""
    begins = starts_of(sizes)
    packed = empty(int(begins[-1]), torch.int16, streams.stream.device)
    cuda.pack[(sizes.size, 4)](
        unsigned(streams.stream), streams.ends, streams.used, to_device(begins, packed.device), unsigned(packed),
        SPAN=1024,
    )  # fmt: skip
    (words,) = to_host(packed)
    out: NDArray[np.uint16] = words.view(np.uint16)
    return out


def lanes_for(decisions: NDArray[np.int64]) -> NDArray[np.int64]:
    """`tables.lanes_for` of many blocks."""
    lanes = np.ones(decisions.size, np.int64)
    for k in range(1, spec.MAX_LANES_LOG2 + 1):
        lanes[decisions >= spec.LANE_DECISIONS << k] = 1 << k
    return lanes


def _payloads(
    pile: Pile,
    cuts: NDArray[np.int64],
    blocks: _Blocks,
    written: _Written,
    number: int,
) -> Sequence[tuple[int, int, tuple[bytes | memoryview, ...]]]:
    """Ordinal, cut and payload of each tile that changed."""
    in_blocks = blocks.hot_changes, lanes_for(blocks.decisions), written.words
    heads = build_many(number, cuts, pile.first_block, in_blocks, np.diff(_first_cold(pile, blocks)))
    data = written.stream.view(np.uint8).data
    borders = (2 * starts_of(written.words)[pile.first_block]).tolist()
    touched = np.flatnonzero(np.diff(starts_of(blocks.changes)[pile.first_block])).tolist()
    return [
        (pile.tiles[i].ordinal, int(cuts[i]), (heads[i], written.cold[i], data[borders[i] : borders[i + 1]]))
        for i in touched
    ]


def _first_cold(pile: Pile, blocks: _Blocks) -> NDArray[np.int64]:
    """Where the cold changes of each tile begin."""
    return starts_of(blocks.changes - blocks.hot_changes)[pile.first_block]
