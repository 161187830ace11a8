"""Code changes against the old weights, all on the device: the bytes are those that `format.predict` would write.

The host sees counts, from which it chooses cuts and makes tables, and at the end the streams.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Codec
from pulsesync.device.changes import ChangeMarks, PileChanges
from pulsesync.device.hot import DeviceHistory, HotWeights, find_hot
from pulsesync.device.memory import empty, starts_of, to_host, to_stream, unsigned, warps_of
from pulsesync.device.pile import Pile, PileAddresses
from pulsesync.format import tables
from pulsesync.format.codecs.context import is_checked
from pulsesync.format.codecs.heads import build_cold, build_many
from pulsesync.format.index import FrequencyTable
from pulsesync.format.predict import CodedTile
from pulsesync.kernels import cuda, spec

SPARE = 1.2  # room for hot weights, over what a sample of a tile lets expect, ...
FEW = 1 << 12  # ... and this beside
COPIES = 1 << 21  # places in all copies of a table that is counted: copies keep programs out of each other's way


@dataclass(frozen=True)
class CodedPile:
    """The payloads of a pile's changed tiles by ordinal, their table, and the hot weights they were coded with."""

    table: FrequencyTable
    tiles: dict[int, CodedTile]
    hot: HotWeights


@dataclass(frozen=True)
class _BlockCounts:
    """Counts of blocks, on the host."""

    changes: NDArray[np.int64]
    hot_changes: NDArray[np.int64]
    decisions: NDArray[np.int64]

    @property
    def coded(self) -> NDArray[np.intp]:
        """Those that have a stream."""
        return np.flatnonzero(self.hot_changes)

    def spans(self, borders: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the decisions of those begin and end, given where those of all blocks begin."""
        begins = borders[self.coded]
        return begins, begins + self.decisions[self.coded]


def code_pile(
    run: PileChanges,
    marks: ChangeMarks,
    moved: NDArray[np.uint64],
    weights: PileAddresses,
    memories: DeviceHistory | None,
    number_of_table: int,
) -> CodedPile:
    """Code the changes of a pile; with memories as `history`, else as `context`.

    moved: how the digest moves by each block, two sums each.
    """
    pile = run.pile
    cuts, changes, shares = _choose_cuts(run, weights, memories)
    highest = max(1, int(cuts.max()))
    lo = max(0, highest - tables.CLASSES)
    ages, width = memories.index + 1 if memories is not None else 1, 8 * pile.kind.itemsize
    contexts = tables.Contexts(lo, highest - lo, ages, tables.symbol_count(width))
    likely = np.minimum(pile.host_sizes, (SPARE * shares[pile.tile_of] * pile.host_sizes).astype(np.int64) + FEW)
    rooms = np.where(changes > 0, likely, 0)
    hot = find_hot(pile, weights, cuts, memories or DeviceHistory(), marks.bitmap, rooms, contexts)()
    blocks = _BlockCounts(changes, hot.changes, np.where(hot.changes > 0, hot.counts, 0))
    decided = _decide(run, marks, hot, blocks)
    sizes = _choose_sizes(decided.sizes, width, ages)
    if sizes.size:
        _list_sizes(decided, sizes, width)
        contexts = replace(contexts, symbols=contexts.symbols + 2 * sizes.size)
    counts = _count(hot.rows, decided.symbols, blocks.spans(hot.borders), contexts)
    table = FrequencyTable(pile.tiles[0].tensor.dtype, lo, tables.normalise(counts), sizes)
    codec = Codec.CONTEXT if memories is None else Codec.HISTORY
    bodies = _write(pile, hot, decided, table, blocks, cuts, _checks(pile, blocks, moved), number_of_table)
    coded_tiles = {o: CodedTile(codec, [body], cut) for o, cut, body in bodies}
    return CodedPile(table, coded_tiles, hot)


def _choose_cuts(
    run: PileChanges, weights: PileAddresses, memories: DeviceHistory | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """The cuts of tiles, 0 where nothing changed; the changes of blocks; and the share of each tile that is hot."""
    pile = run.pile
    by_class, sampled = (torch.zeros(256 * len(pile.tiles), dtype=torch.int64, device=pile.device) for _ in range(2))
    over = pile.stretches
    starts = run.starts if over.are_blocks else run.starts[over.blocks]
    cuda.count_classes[(over.count,)](
        unsigned(run.old), starts, over.sizes, over.addresses(weights), over.tiles, by_class, sampled,
        ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, PERIOD=spec.SAMPLE_PERIOD, RUN=spec.SAMPLE_RUN,
        SPAN=1024,
    )  # fmt: skip
    found, seen, borders = to_host(by_class, sampled, run.starts)
    found, seen = found.reshape(-1, 256), seen.reshape(-1, 256)
    touched = np.flatnonzero(found.any(axis=1))
    cuts = np.zeros(len(pile.tiles), np.int64)
    cuts[touched] = tables.choose_cuts(found[touched], seen[touched])
    if memories is not None:
        cuts[touched] = np.maximum(cuts, memories.cuts(pile))[touched]
    below = np.where(np.arange(256) < cuts[:, None], seen, 0).sum(axis=1)
    return cuts, np.diff(borders), below / np.maximum(seen.sum(axis=1), 1)


@dataclass(frozen=True)
class _DecidedPile:
    symbols: torch.Tensor
    sizes: torch.Tensor  # of hot changes: how far they go
    cold: NDArray[np.int64]  # positions in the block
    steps: NDArray[np.int64]


def _decide(
    run: PileChanges,
    marks: ChangeMarks,
    hot: HotWeights,
    blocks: _BlockCounts,
) -> _DecidedPile:
    pile, device = run.pile, run.pile.device
    hot_changes = int(blocks.hot_changes.sum())
    cold = run.count - hot_changes
    symbols = torch.zeros(max(hot.rows.numel(), 1), dtype=torch.uint8, device=device)
    sizes = empty(hot_changes, torch.int32, device)
    cold_at, cold_steps = (empty(cold, torch.int64, device) for _ in range(2))
    cuda.decide[(pile.chunks,)](
        pile.chunk_block, pile.first_chunk, unsigned(hot.bitmap), marks.offsets, unsigned(run.positions),
        unsigned(run.old), unsigned(run.new), hot.begins, hot.change_at, unsigned(hot.rows), symbols,
        unsigned(sizes), cold_at, cold_steps, ITEM=pile.kind.itemsize, HISTORY=hot.remembers, SPAN=64, num_warps=1,
    )  # fmt: skip
    where, steps = to_host(cold_at, cold_steps)
    return _DecidedPile(symbols, sizes, where, steps)


def _choose_sizes(sizes: torch.Tensor, width: int, ages: int) -> NDArray[np.uint32]:
    """`tables.choose_sizes` of long steps among some on the device: the host sees those that are common, and counts."""
    wide = sizes.to(torch.int64) & 0xFFFFFFFF
    long = wide[wide > spec.DIRECT]
    stride = tables.sample_stride(long.numel())
    long = long[::stride]
    low = long & 0xFFFF
    often = torch.bincount(low, minlength=1 << 16) >= tables.least_count(long.numel())
    common = long[often[low]]
    if not common.numel():
        return tables.NO_SIZES
    found, counts = torch.unique(common, return_counts=True)
    powers = torch.frexp(long.to(torch.float64))[1].to(torch.int64) - 1
    by_power = torch.bincount(powers)
    all_found, how_often, all_powers = to_host(found, counts, by_power)
    return tables.choose_from(all_found, how_often, all_powers, stride, width, ages)


def _list_sizes(decided: _DecidedPile, sizes: NDArray[np.uint32], width: int) -> None:
    """Give the steps of these sizes symbols of their own, as `tables.list_sizes` does."""
    device = decided.symbols.device
    listed, wide = to_stream(sizes.astype(np.int64), device), decided.sizes.to(torch.int64) & 0xFFFFFFFF
    place = torch.searchsorted(listed, wide).clamp_(max=sizes.size - 1)
    which = torch.nonzero(listed[place] == wide).view(-1)
    at = torch.nonzero(decided.symbols).view(-1)[which]  # changes, in order
    down = (decided.symbols[at].to(torch.int64) - 1) & 1
    decided.symbols[at] = (tables.symbol_count(width) + 2 * place[which] + down).to(torch.uint8)


def _count(
    rows: torch.Tensor,
    symbols: torch.Tensor,
    spans: tuple[NDArray[np.int64], NDArray[np.int64]],
    contexts: tables.Contexts,
) -> NDArray[np.int64]:
    """How often each symbol of each context is decided: (classes, ages, symbols). spans: where decisions are."""
    device = rows.device
    shape = (contexts.classes * contexts.ages, 1 << contexts.bits)
    copies = max(1, min(256, COPIES // (shape[0] * shape[1])))
    # BINS is compiled in: 32 for the first patch of an epoch, 1,024 for all others, so that nothing is compiled later.
    bins = 32 if contexts.ages == 1 else max(1024, 1 << (shape[0] - 1).bit_length())
    of_rows = torch.zeros(bins, dtype=torch.int64, device=device)
    of_symbols = torch.zeros((copies, *shape), dtype=torch.int32, device=device)
    if spans[0].size:
        begins, ends = (to_stream(some, device) for some in spans)
        cuda.count_rows[(begins.numel(), 2)](unsigned(rows), begins, ends, of_rows, BINS=bins, SPAN=4096)
        cuda.count_symbols[(begins.numel(), 4)](
            unsigned(rows), symbols, begins, ends, of_symbols, shape[0] * shape[1], copies, BITS=contexts.bits,
            SPAN=4096,
        )  # fmt: skip
    every, changed = to_host(of_rows, of_symbols.sum(dim=0, dtype=torch.int64))
    counts = changed.copy()
    counts[:, 0] = every[: shape[0]] - changed.sum(axis=1)
    return counts.reshape(contexts.classes, contexts.ages, -1)[..., : contexts.symbols]


def _checks(pile: Pile, blocks: _BlockCounts, moved: NDArray[np.uint64]) -> dict[int, bytes]:
    """The checks of bundles that say how the digest of each group moves, by number of the tile."""
    out = {}
    for i, tile in enumerate(pile.tiles):
        if is_checked(tile):
            mine = slice(pile.first_block[i], pile.first_block[i + 1])
            out[i] = moved[mine, 0][blocks.changes[mine] > 0].astype("<u4").tobytes()
    return out


def _write(
    pile: Pile,
    hot: HotWeights,
    decided: _DecidedPile,
    table: FrequencyTable,
    blocks: _BlockCounts,
    cuts: NDArray[np.int64],
    checks: Mapping[int, bytes],
    number: int,
) -> list[tuple[int, int, memoryview]]:
    """Ordinal, cut and payload of each tile that changed; the device codes while the cold changes are written here."""
    coded = blocks.coded
    decisions, changes = blocks.decisions[coded], blocks.hot_changes[coded]
    lanes = tables.lanes_for(decisions)
    likely = starts_of(2 * lanes + decisions // 4 + 3 * changes)
    spans = blocks.spans(hot.borders)
    streams = _launch(hot, decided, table, spans, changes, lanes, likely) if coded.size else None
    first_cold = starts_of(blocks.changes - blocks.hot_changes)[pile.first_block]
    cold = decided.cold + np.repeat(pile.host_begins, blocks.changes - blocks.hot_changes)
    colds = build_cold(first_cold, cold, decided.steps)
    words = np.zeros(pile.blocks, np.int64)
    if streams is not None:
        (sizes,) = to_host(streams.used)
        if (sizes > np.diff(likely)).any():  # many changes: there is room for a word a decision and two a change
            most = starts_of(2 * lanes + decisions + 3 * changes)
            streams = _launch(hot, decided, table, spans, changes, lanes, most)
        words[coded] = sizes
    in_blocks = blocks.hot_changes, tables.lanes_for(blocks.decisions), words
    begun = build_many(number, cuts, pile.first_block, in_blocks, np.diff(first_cold))
    touched = np.flatnonzero(np.diff(starts_of(blocks.changes)[pile.first_block])).tolist()
    bodies = _payloads(pile, touched, [begun[i] + colds[i] + checks.get(i, b"") for i in touched], words, streams)
    return [(pile.tiles[i].ordinal, int(cuts[i]), body) for i, body in zip(touched, bodies, strict=True)]


def _payloads(
    pile: Pile, touched: Sequence[int], heads: Sequence[bytes], words: NDArray[np.int64], streams: "_Streams | None"
) -> list[memoryview]:
    """Payloads of tiles on the host, one after the other: heads are written into the gaps that the device leaves."""
    in_tiles = np.diff(starts_of(2 * words)[pile.first_block])[touched]
    long = np.array([len(head) for head in heads], np.int64)
    begins = starts_of(long + in_tiles)
    if streams is None:
        data = np.empty(int(begins[-1]), np.uint8)
    else:
        at = np.zeros(len(pile.tiles), np.int64)
        at[touched] = (begins[:-1] + long) - starts_of(2 * words)[pile.first_block][touched]
        coded = np.flatnonzero(words)
        data = _packed(streams, (starts_of(2 * words)[:-1] + at[pile.tile_of])[coded], int(begins[-1]))
    for head, begin in zip(heads, begins.tolist(), strict=False):
        data[begin : begin + len(head)] = np.frombuffer(head, np.uint8)
    view = data.data
    return [view[begin:end] for begin, end in pairwise(begins.tolist())]


@dataclass(frozen=True)
class _Streams:
    """Streams in rooms of their own, each at the end of its room."""

    stream: torch.Tensor
    ends: torch.Tensor  # of rooms
    used: torch.Tensor  # words


def _launch(
    hot: HotWeights,
    decided: _DecidedPile,
    table: FrequencyTable,
    spans: tuple[NDArray[np.int64], NDArray[np.int64]],
    changes: NDArray[np.int64],
    lanes: NDArray[np.int64],
    rooms: NDArray[np.int64],
) -> _Streams:
    device, kind = hot.pile.device, hot.pile.kind
    room_starts = to_stream(rooms, device)
    stream = empty(int(rooms[-1]), torch.int16, device)
    used = empty(lanes.size, torch.int64, device)
    order, firsts = warps_of(lanes)
    cuda.encode[(firsts.size - 1,)](
        to_stream(order, device), to_stream(firsts, device), to_stream(lanes.astype(np.int32), device),
        unsigned(hot.rows), decided.symbols, unsigned(decided.sizes), *(to_stream(some, device) for some in spans),
        to_stream(starts_of(changes), device), unsigned(to_stream(table.shares, device)), tables.listed_class(kind),
        room_starts, unsigned(stream), used, BITS=table.contexts.bits, WIDE=kind.itemsize == 4, num_warps=1,
    )  # fmt: skip
    return _Streams(stream, room_starts[1:], used)


def _packed(streams: _Streams, begins: NDArray[np.int64], size: int) -> NDArray[np.uint8]:
    """Payloads on the host, of which only the streams are written: each where it begins."""
    device = streams.stream.device
    packed = empty(size, torch.uint8, device)
    cuda.pack[(begins.size, 4)](
        unsigned(streams.stream), streams.ends, streams.used, to_stream(begins, device), packed, SPAN=1024
    )
    (data,) = to_host(packed)
    out: NDArray[np.uint8] = data
    return out
