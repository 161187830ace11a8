"""Code changes against the old weights, all on the device: the bytes are those that `format.predict` would write.

The host receives counts, from which it chooses cuts and makes tables, and at the end the streams. It waits for a pile
five times: for changes by magnitude, for the number of hot weights, for counts of decisions, for the sizes of the
streams, and for the streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.threads import begin
from pulsesync.core.types import Codec
from pulsesync.device.changes import BlockDigestChanges, PileChanges, begin_digest_changes
from pulsesync.device.memory import all_to_stream, empty, fetch, on, starts_of, to_host, to_stream, unsigned, warps_of
from pulsesync.device.pile import Pile, PileAddresses
from pulsesync.device.tracked import DeviceHistory, HotSearch, HotWeights
from pulsesync.format import tables
from pulsesync.format.codecs.context import is_checked
from pulsesync.format.codecs.heads import build_cold, build_many
from pulsesync.format.index import FrequencyTable
from pulsesync.format.predict import CodedTile
from pulsesync.kernels import cuda, spec

SPARE = 1.2  # space for hot weights, as a multiple of the estimate from a sample of a tile, ...
FEW = 1 << 12  # ... plus this number
COPIES = 1 << 21  # entries in all copies of a table of counts: copies reduce contention between programs
MANY_COLD = 1 << 16  # cold changes that a thread writes concurrently
FEW_LONG = 1 << 13  # up to this number of long steps of a pile, all are copied to the host
# Up to this number of weights, decisions are kept until they are coded; with more they are listed again.
LISTED_ONCE = 1 << 33


LongSteps = NDArray[np.int64] | torch.Tensor  # sizes of the steps of hot changes; on the host, or if many on the device
NO_LONG_STEPS = np.empty(0, np.int64)


@dataclass(frozen=True)
class CodedPiles:
    """Piles of a dtype, coded: their table, and by ordinal the payloads of their changed tiles."""

    table: FrequencyTable
    tiles: dict[int, CodedTile]
    hot: dict[Pile, HotWeights]  # with which they were coded, as far as they were kept
    moved: BlockDigestChanges
    starts: dict[Pile, NDArray[np.int64]]  # where the changes of each block begin, on the host


def code_piles(
    runs: Sequence[tuple[PileChanges, PileAddresses]], memories: DeviceHistory | None, number_of_table: int
) -> CodedPiles:
    """Code the changes of piles of one dtype, given where their old weights are: with a history, if one is given."""
    coders = [_PileCoder(run, weights, memories) for run, weights in runs]
    moved = begin_digest_changes(run for run, _ in runs)
    highest = max(1, *(coder.choose_cuts() for coder in coders))
    lo = max(0, highest - tables.CLASSES)
    dtype, width = coders[0].pile.tiles[0].tensor.dtype, 8 * coders[0].pile.kind.itemsize
    ages = memories.index + 1 if memories is not None else 1
    contexts = tables.Contexts(lo, highest - lo, ages, tables.symbol_count(width))
    keep = sum(int(coder.pile.host_sizes.sum()) for coder in coders) <= LISTED_ONCE
    counts = np.sum([coder.count(contexts, keep, len(coders) == 1) for coder in coders], axis=0)
    sizes = _choose_sizes([coder.long for coder in coders], width, ages)
    if sizes.size:
        contexts = replace(contexts, symbols=contexts.symbols + 2 * sizes.size)
        counts = np.sum([coder.count_listed(contexts, sizes) for coder in coders], axis=0)
    table = FrequencyTable(dtype, lo, tables.normalise(counts), sizes)
    codec = Codec.CONTEXT if memories is None else Codec.HISTORY
    tiles: dict[int, CodedTile] = {}
    for coder in coders:
        tiles |= coder.write(table, number_of_table, codec, moved)
    hot = {coder.pile: coder.kept.hot.without_list() for coder in coders if coder.kept}
    return CodedPiles(table, tiles, hot, moved(), {coder.pile: coder.starts for coder in coders})


@dataclass(frozen=True)
class _BlockCounts:
    """Counts of blocks, on the host."""

    changes: NDArray[np.int64]
    hot_changes: NDArray[np.int64]
    decisions: NDArray[np.int64]

    @property
    def coded(self) -> NDArray[np.intp]:
        """The blocks that have a stream."""
        return np.flatnonzero(self.hot_changes)


@dataclass(frozen=True)
class _StreamPlan:
    """The tables of a launch for the blocks that have a stream; `rooms` in words."""

    changes: NDArray[np.int64]
    lanes: NDArray[np.int64]
    decisions: NDArray[np.int64]
    spans: tuple[torch.Tensor, torch.Tensor]  # the begin and end of the decisions of each block
    tables: tuple[torch.Tensor, ...]  # order and firsts of `warps_of`, lanes, where changes begin, and where buffers do
    rooms: NDArray[np.int64]

    @classmethod
    def of(cls, blocks: _BlockCounts, borders: NDArray[np.int64], device: torch.device) -> "_StreamPlan":
        coded = blocks.coded
        decisions, changes, begins = blocks.decisions[coded], blocks.hot_changes[coded], borders[coded]
        lanes = tables.lanes_for(decisions)
        rooms = starts_of(2 * lanes + decisions // 16 + 2 * changes)
        warps = (*warps_of(lanes), lanes.astype(np.int32), starts_of(changes), rooms)
        begin, end, *rest = all_to_stream((begins, begins + decisions, *warps), device)
        return cls(changes, lanes, decisions, (begin, end), tuple(rest), rooms)

    def with_most_room(self) -> "_StreamPlan":
        """The same with space for one word per decision and two more per change."""
        rooms = starts_of(2 * self.lanes + self.decisions + 3 * self.changes)
        return replace(self, tables=(*self.tables[:-1], to_stream(rooms, self.spans[0].device)), rooms=rooms)


@dataclass(frozen=True)
class _PileDecisions:
    """The decisions of a pile on the device, and its cold changes."""

    hot: HotWeights
    symbols: torch.Tensor
    sizes: torch.Tensor  # of the steps of hot changes
    longs: torch.Tensor  # how many steps are longer than a symbol can express, and the sizes of some of these
    counts: torch.Tensor  # of each symbol of each row, in copies to be summed; `_count_rows` adds "unchanged"
    cold: torch.Tensor  # positions in the block
    cold_steps: torch.Tensor

    def list_sizes(self, sizes: NDArray[np.uint32]) -> None:
        """Give the steps of these sizes their own symbols, as `tables.list_sizes` does."""
        if not sizes.size:
            return
        listed, wide = to_stream(sizes.astype(np.int64), self.sizes.device), _wide(self.sizes)
        place = torch.searchsorted(listed, wide).clamp_(max=sizes.size - 1)
        which = torch.nonzero(listed[place] == wide).view(-1)
        at = torch.nonzero(self.symbols).view(-1)[which]  # changes, in order
        down = (self.symbols[at].to(torch.int64) - 1) & 1
        first = tables.symbol_count(8 * self.hot.pile.kind.itemsize)
        self.symbols[at] = (first + 2 * place[which] + down).to(torch.uint8)


class _PileCoder:
    """Codes the changes of a pile into payloads: `choose_cuts`, `count`, `write`."""

    def __init__(self, run: PileChanges, weights: PileAddresses, memories: DeviceHistory | None) -> None:
        self.run, self.pile, self._weights, self._memories = run, run.pile, weights, memories
        self.kept: _PileDecisions | None = None
        self.long: LongSteps = NO_LONG_STEPS
        with on(self.pile.device):
            self._by_class = self._count_classes()

    def _count_classes(self) -> Callable[[], list[NDArray[np.int64]]]:
        """Begin to count changes and sampled weights by magnitude, for each tile."""
        pile, over = self.pile, self.pile.ranges
        found = torch.zeros((2, len(pile.tiles), 256), dtype=torch.int64, device=pile.device)
        starts = self.run.starts if over.are_blocks else self.run.starts[over.blocks]
        cuda.count_classes[(over.count,)](
            unsigned(self.run.old), starts, over.sizes, over.addresses(self._weights), over.tiles, found[0], found[1],
            ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, PERIOD=spec.SAMPLE_PERIOD, RUN=spec.SAMPLE_RUN,
            SPAN=1024,
        )  # fmt: skip
        return fetch(found, self.run.starts)

    def choose_cuts(self) -> int:
        """Choose the cuts of tiles, 0 where nothing changed, and return the highest."""
        (found, seen), borders = self._by_class()
        cuts = tables.choose_cuts(found, seen)
        known = (self._memories or DeviceHistory()).of_pile(self.pile)
        changed = found.any(axis=1)
        self.cuts = np.where(changed, np.maximum(cuts, known.cuts), known.cuts)
        sampled = np.zeros((len(self.pile.tiles), 257), np.int64)
        np.cumsum(seen, axis=1, out=sampled[:, 1:])
        shares = np.take_along_axis(sampled, self.cuts[:, None], 1)[:, 0] / np.maximum(sampled[:, -1], 1)
        self.starts = borders
        self._changes, sizes = np.diff(borders), self.pile.host_sizes
        likely = np.minimum(sizes, (SPARE * shares[self.pile.tile_of] * sizes).astype(np.int64) + FEW)
        likely = known.hot_weights(self.cuts, likely)
        self._rooms = np.where(self._changes > 0, likely, 0)
        return int(self.cuts[changed].max(initial=0))

    def count(self, contexts: tables.Contexts, keep: bool, alone: bool) -> NDArray[np.int64]:
        """List the decisions, to be kept or listed again, of a pile that may be the only one of its dtype (alone).

        Returns the counts of each symbol in each context: (classes, ages, symbols).
        """
        with on(self.pile.device):
            decisions = self._decide(contexts)
            hot = decisions.hot
            self._blocks = _BlockCounts(self._changes, hot.changes, np.where(hot.changes > 0, hot.counts, 0))
            self._plan = _StreamPlan.of(self._blocks, hot.borders, self.pile.device)
            _count_rows(hot.listed.rows, self._plan, contexts, decisions.counts)
            by_symbol = decisions.counts.sum(dim=0, dtype=torch.int64)
            counts, longs, *self._cold = fetch(by_symbol, decisions.longs, decisions.cold, decisions.cold_steps)()
            self._by_row = counts[:, 0].copy()
            if alone and longs[0] <= FEW_LONG:
                self.long = longs[1 : 1 + longs[0]].view(np.uint32).astype(np.int64)
            elif longs[0]:  # with several piles they may be a sample, in the order of tiles
                wide = _wide(decisions.sizes)
                self.long = wide[wide > spec.DIRECT]
        if keep:
            self.kept = decisions
        return _with_unchanged(self._by_row, counts, contexts)

    def count_listed(self, contexts: tables.Contexts, sizes: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The same after the table lists steps of these sizes."""
        with on(self.pile.device):
            decisions = self.kept or self._decide(contexts)
            decisions.list_sizes(sizes)
            at = torch.nonzero(decisions.symbols).view(-1)
            rows, places = decisions.hot.listed.rows[at].to(torch.int64) & spec.ROW, 1 << contexts.bits
            found = rows * places + decisions.symbols[at]
            (by_symbol,) = to_host(torch.bincount(found, minlength=self._by_row.size * places))
        return _with_unchanged(self._by_row, by_symbol.reshape(-1, places), contexts)

    def _decide(self, contexts: tables.Contexts) -> _PileDecisions:
        """Find the hot weights, wait for them, and begin to write their changes among the decisions."""
        run, pile, device = self.run, self.pile, self.pile.device
        memories = self._memories or DeviceHistory()
        hot = HotSearch(pile, self._weights, self.cuts, memories, run, self._rooms, contexts).wait()
        hot_changes = int(hot.changes.sum())
        counts = _symbol_counts(contexts, device)
        symbols = torch.zeros(max(hot.listed.rows.numel(), 1), dtype=torch.uint8, device=device)
        sizes = empty(hot_changes, torch.int32, device)
        longs = torch.zeros(1 + FEW_LONG, dtype=torch.int32, device=device)
        cold, cold_steps = (empty(run.count - hot_changes, torch.int64, device) for _ in range(2))
        cuda.decide[(pile.chunks,)](
            pile.tables.chunk_block, pile.tables.first_chunk, unsigned(hot.bitmap), run.chunks(),
            unsigned(run.positions), unsigned(run.old), unsigned(run.new), hot.listed.begins, hot.change_at,
            unsigned(hot.listed.rows), symbols, unsigned(sizes), cold, cold_steps, counts, counts[0].numel(),
            counts.shape[0], longs, FEW_LONG,
            BITS=contexts.bits, ITEM=pile.kind.itemsize, HISTORY=hot.remembers, SPAN=64, num_warps=1,
        )  # fmt: skip
        return _PileDecisions(hot, symbols, sizes, longs, counts, cold, cold_steps)

    def _build_cold(self) -> list[bytes]:
        """The encoded cold changes of each tile."""
        cold, steps = self._cold
        in_blocks = self._blocks.changes - self._blocks.hot_changes
        first = starts_of(in_blocks)[self.pile.first_block]
        return build_cold(first, cold + np.repeat(self.pile.host_begins, in_blocks), steps)

    def write(
        self, table: FrequencyTable, number: int, codec: Codec, moved: Callable[[], BlockDigestChanges]
    ) -> dict[int, CodedTile]:
        """The payloads of the tiles that changed, by ordinal; the host writes the cold changes meanwhile."""
        pile, blocks, plan = self.pile, self._blocks, self._plan
        words, streams, colds = np.zeros(pile.blocks, np.int64), fetch(), self._build_cold
        with on(pile.device):
            if plan.lanes.size:
                decisions = self.kept
                if decisions is None:
                    decisions = self._decide(table.contexts)
                    decisions.list_sizes(table.sizes)
                coded = _launch(decisions, table, plan)
                used = fetch(coded.used)
                if self._cold[0].size > MANY_COLD:  # a thread that runs Python takes turns with this one
                    colds = begin(self._build_cold)
                else:  # in this one, while the device codes
                    colds = partial(list, self._build_cold())
                (sizes,) = used()
                if (sizes > np.diff(plan.rooms)).any():  # many changes
                    coded = _launch(decisions, table, plan.with_most_room())
                words[blocks.coded] = sizes
                streams = fetch(_packed(coded, starts_of(2 * sizes)))
        lanes, in_tiles = tables.lanes_for(blocks.decisions), starts_of(blocks.changes - blocks.hot_changes)
        in_tiles = in_tiles[pile.first_block]
        heads = build_many(number, self.cuts, pile.first_block, (blocks.hot_changes, lanes, words), np.diff(in_tiles))
        touched = np.flatnonzero(np.diff(starts_of(blocks.changes)[pile.first_block])).tolist()
        checks = self._checks(touched, moved)
        ends = starts_of(2 * words)[pile.first_block].tolist()
        cold, cuts = colds(), self.cuts.tolist()
        data = streams()[0].data if plan.lanes.size else memoryview(b"")
        out = {}
        for i in touched:
            head = heads[i] + cold[i] + checks.get(i, b"")
            out[pile.tiles[i].ordinal] = CodedTile(codec, (head, data[ends[i] : ends[i + 1]]), cuts[i])
        return out

    def _checks(self, touched: Sequence[int], moved: Callable[[], BlockDigestChanges]) -> dict[int, bytes]:
        """The checks of bundles: how the digest of each group changes, by number of the tile."""
        out, pile = {}, self.pile
        for i in touched:
            if is_checked(pile.tiles[i]):
                mine = slice(pile.first_block[i], pile.first_block[i + 1])
                out[i] = moved()[pile][mine, 0][self._blocks.changes[mine] > 0].astype("<u4").tobytes()
        return out


def _wide(sizes: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit numbers as 64-bit numbers."""
    return sizes.to(torch.int64) & 0xFFFFFFFF


def _choose_sizes(found: Sequence[LongSteps], width: int, ages: int) -> NDArray[np.uint32]:
    """`tables.choose_sizes` of long steps; if there are many, the host gets only the common sizes and their counts."""
    on_device = [some for some in found if isinstance(some, torch.Tensor)]
    if not on_device:
        return tables.choose_sizes(np.concatenate([np.asarray(some) for some in found]), width, ages)
    where = on_device[0].device
    long = torch.cat([torch.as_tensor(some).to(where) for some in found])
    stride = tables.sample_stride(long.numel())
    long = long[::stride]
    low = long & 0xFFFF
    often = torch.bincount(low, minlength=1 << 16) >= tables.least_count(long.numel())
    common = long[often[low]]
    if not common.numel():
        return tables.NO_SIZES
    values, counts = torch.unique(common, return_counts=True)
    powers = torch.frexp(long.to(torch.float64))[1].to(torch.int64) - 1
    all_found, how_often, all_powers = to_host(values, counts, torch.bincount(powers))
    return tables.choose_from(all_found, how_often, all_powers, stride, width, ages)


def _symbol_counts(contexts: tables.Contexts, device: torch.device) -> torch.Tensor:
    """Zeros for the counts of symbols (copies that are summed at the end, rows, places of a row)."""
    rows, places = contexts.classes * contexts.ages, 1 << contexts.bits
    return torch.zeros((max(1, min(256, COPIES // (rows * places))), rows, places), dtype=torch.int32, device=device)


def _count_rows(rows: torch.Tensor, plan: _StreamPlan, contexts: tables.Contexts, counts: torch.Tensor) -> None:
    """Launch the count of the decisions of each row of the tables, into the counts of symbols."""
    if plan.lanes.size:
        cuda.count_rows[(plan.lanes.size, 8)](
            unsigned(rows), *plan.spans, counts, contexts.ages, counts[0].numel(), counts.shape[0], BITS=contexts.bits,
            SPAN=2048,
        )  # fmt: skip


def _with_unchanged(
    by_row: NDArray[np.int64], by_symbol: NDArray[np.int64], contexts: tables.Contexts
) -> NDArray[np.int64]:
    """Counts of all symbols, given those of changes and of all decisions: (classes, ages, symbols)."""
    counts = by_symbol.copy()
    counts[:, 0] = by_row - counts[:, 1:].sum(axis=1)
    return counts.reshape(contexts.classes, contexts.ages, -1)[..., : contexts.symbols]


@dataclass(frozen=True)
class _Streams:
    """Streams in separate buffers, each at the end of its buffer."""

    stream: torch.Tensor
    ends: torch.Tensor  # of the buffers
    used: torch.Tensor  # words


def _launch(decisions: _PileDecisions, table: FrequencyTable, plan: _StreamPlan) -> _Streams:
    hot, kind = decisions.hot, decisions.hot.pile.kind
    device = hot.pile.device
    stream = empty(int(plan.rooms[-1]), torch.int16, device)
    used = empty(plan.lanes.size, torch.int64, device)
    order, firsts, lanes, change_starts, rooms = plan.tables
    cuda.encode[(firsts.numel() - 1,)](
        order, firsts, lanes, unsigned(hot.listed.rows), decisions.symbols, unsigned(decisions.sizes), *plan.spans,
        change_starts, unsigned(to_stream(table.shares, device)), tables.listed_class(kind), rooms, unsigned(stream),
        used, BITS=table.contexts.bits, WIDE=kind.itemsize == 4, num_warps=1,
    )  # fmt: skip
    return _Streams(stream, rooms[1:], used)


def _packed(streams: _Streams, begins: NDArray[np.int64]) -> torch.Tensor:
    """The bytes of the streams, each copied to where it begins in the result."""
    device = streams.stream.device
    packed = empty(int(begins[-1]), torch.uint8, device)
    cuda.pack[(begins.size - 1, 4)](
        unsigned(streams.stream), streams.ends, streams.used, to_stream(begins[:-1], device), packed, SPAN=1024
    )
    return packed
