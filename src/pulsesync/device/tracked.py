"""Hot weights (those below the cut of their tile) on a device: marked, listed with table rows, and tracked."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from pulsesync.core.types import Remembered
from pulsesync.device.changes import SPAN, SPREAD, Changes, PileChanges, as_sums, device_keys
from pulsesync.device.memory import (
    all_to_stream,
    empty,
    fetch,
    on,
    scan,
    starts_of,
    to_device,
    to_host,
    to_stream,
    unsigned,
)
from pulsesync.device.pile import WORDS, Pile, PileAddresses
from pulsesync.errors import VerificationError
from pulsesync.format.history import History, TileHistory, TileHistorySummary, digest_of
from pulsesync.format.tables import Contexts
from pulsesync.kernels import cuda, spec
from pulsesync.kernels.arrays import I64

MARKS = 8  # chunks whose marks a program counts


@dataclass(frozen=True)
class TileMemory:
    """The history of a tile (see `format.history`), on the device.

    sizes: bytes of each group of weights coded together.
    """

    cut: int
    memory: torch.Tensor  # that the tiles of a pile share
    begin: int  # of this one's bytes in it
    sizes: I64
    counted: TileHistorySummary
    bundled: bool = False  # whether these are the groups of a bundle

    @property
    def end(self) -> int:
        return self.begin + self.counted.size

    @property
    def content(self) -> torch.Tensor:
        return self.memory[self.begin : self.end]


@dataclass(frozen=True)
class DeviceHistory:
    """The history of a state on a device: frozen, as `format.history.History` is."""

    index: int = 0
    tiles: Mapping[int, TileMemory] = field(default_factory=dict)

    def cut(self, tile: int) -> int:
        return self.tiles[tile].cut if tile in self.tiles else 0

    def cuts(self, pile: Pile) -> I64:
        return np.array([self.cut(ordinal) for ordinal in pile.index], np.int64)

    def counts(self, ordinals: Iterable[int]) -> dict[int, TileHistorySummary]:
        """The part of the history digest for these tiles, as far as they are tracked."""
        return {ordinal: self.tiles[ordinal].counted for ordinal in ordinals if ordinal in self.tiles}

    def digest(self) -> str:
        return digest_of(self.index, self.counts(self.tiles))

    def to_bytes(self) -> bytes:
        return self.on_host().to_bytes()

    def on_host(self) -> History:
        tiles = {}
        for ordinal, tile in self.tiles.items():
            (content,) = to_host(tile.content)
            blocks = [Remembered(content, starts_of(tile.sizes))]
            if not tile.bundled:
                blocks = [Remembered.alone(last) for last in np.split(content, np.cumsum(tile.sizes)[:-1])]
            tiles[ordinal] = TileHistory(tile.cut, tuple(blocks))
        return History(self.index, tiles)

    @classmethod
    def of(cls, history: History, device: torch.device) -> "DeviceHistory":
        """Copy a history from the host."""
        counts = history.counts(history.tiles)
        tiles = {}
        for ordinal, tile in history.tiles.items():
            content = to_device(np.concatenate([block.last for block in tile.blocks]), device)
            sizes = np.concatenate([np.diff(block.ranks) for block in tile.blocks])
            tiles[ordinal] = TileMemory(tile.cut, content, 0, sizes, counts[ordinal], len(tile.blocks) == 1)
        return cls(history.index, tiles)


class HotList(NamedTuple):
    """Hot weights, marked and listed on the device: the decisions of the coder, block after block."""

    bitmap: torch.Tensor
    rooms: torch.Tensor  # where the list of each block begins, and where that of the last ends
    found: torch.Tensor  # how many hot and tracked weights each block has; if there is less room, not all are listed
    begins: torch.Tensor  # where the entries of each chunk begin
    rows: torch.Tensor  # of the tables
    ranks: torch.Tensor  # for each word of the bitmap, how many hot weights of its chunk are before it; or empty


@dataclass(frozen=True)
class HotWeights:
    """Which weights of a pile are below the cuts of their tiles, which of them are tracked, and a list of them."""

    pile: Pile
    cuts: I64  # of tiles
    known: torch.Tensor  # bitmap
    known_at: torch.Tensor  # where the bytes of each chunk begin
    last: torch.Tensor  # bytes
    counts: I64  # of blocks
    changes: I64  # of blocks: changes of hot weights, if changes were given
    change_at: torch.Tensor  # where the changes of each chunk begin
    borders: I64  # where the list of each block begins
    listed: HotList

    @property
    def bitmap(self) -> torch.Tensor:
        return self.listed.bitmap

    @property
    def remembers(self) -> bool:
        return self.known is not self.bitmap

    def without_list(self) -> "HotWeights":
        """The same without the list, which occupies most of the memory."""
        empty_rows, empty_ranks = self.listed.rows[:0].clone(), self.listed.ranks[:0].clone()
        return replace(self, listed=self.listed._replace(rows=empty_rows, ranks=empty_ranks))


class HotSearch:
    """A search for hot weights that was begun, and which lists them where there is room. `wait` returns the result.

    changed: changes, to count how many of them are of hot weights. rooms: the expected number of hot weights of each
    block, 0 for blocks that are not listed; if one has more, all are listed again. contexts: the rows of the tables.
    """

    def __init__(
        self,
        pile: Pile,
        weights: PileAddresses,
        cuts: I64,
        memories: DeviceHistory,
        changed: PileChanges | None = None,
        rooms: I64 | None = None,
        contexts: Contexts | None = None,
        ranks: bool = False,
    ) -> None:
        device = pile.device
        self._pile, self._weights, self._cuts, self._ranks = pile, weights, cuts, ranks
        # A compile-time constant, so it depends only on the position in the epoch: the first patch has no history, and
        # every other patch has one, even if nothing is tracked in it.
        self._history = memories.index > 0
        self._contexts = contexts or Contexts(0, 1, 1, 1)
        self._sizes, tracked, self._last = _known_of(pile, cuts, memories)
        self._borders = starts_of(np.zeros(pile.blocks, np.int64) if rooms is None else rooms)
        self._of_tiles, self._tracked, self._known_starts, room_starts = all_to_stream(
            (cuts.astype(np.int32), tracked.astype(np.int32), starts_of(self._sizes), self._borders), device
        )
        self._bitmap = empty(pile.chunks * WORDS, torch.int32, device)
        self._known = empty(self._bitmap.numel(), torch.int32, device) if self._history else self._bitmap
        begins, self._known_at = (empty(pile.chunks, torch.int64, device) for _ in range(2))
        self._change_at = begins if changed is None else _count_changes(changed, self._of_tiles)
        self.listed = self._launch(room_starts, begins)
        changes_at = () if changed is None else (self._change_at[pile.tables.first_chunk],)
        self._counted = fetch(self.listed.found, *changes_at)
        self.listed_again = False

    def _launch(self, rooms: torch.Tensor, begins: torch.Tensor) -> HotList:
        pile, tables, device, shape = self._pile, self._pile.tables, self._pile.device, self._contexts
        found = torch.zeros((pile.blocks, 2), dtype=torch.int64, device=device)
        rows = empty(int(self._borders[-1]), torch.int16, device)
        ranks = empty(pile.chunks * WORDS if self._ranks else 0, torch.int16, device)
        counted = torch.zeros(pile.chunks, dtype=torch.int32, device=device)
        cuda.list_hot[(pile.chunks,)](
            self._weights.at, tables.sizes, tables.chunk_block, tables.first_chunk, tables.block_tile, self._of_tiles,
            self._tracked, rooms, self._known_starts, self._last, unsigned(self._bitmap), unsigned(self._known),
            unsigned(ranks), counted, begins, self._known_at, unsigned(rows), found, shape.lo, shape.classes,
            shape.ages,
            ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, HISTORY=self._history, RANKS=self._ranks,
        )  # fmt: skip
        return HotList(self._bitmap, rooms, found, begins, rows, ranks)

    def wait(self) -> HotWeights:
        """Raises: VerificationError: the weights do not match the history."""
        found, *starts = self._counted()
        counts, tracked = found.T
        if self._history and (tracked != self._sizes).any():
            raise VerificationError(spec.FAULTS[spec.FOREIGN_WRITE])
        rooms = np.diff(self._borders)
        if (counts > rooms)[rooms > 0].any():
            self.listed_again = True
            self._borders = starts_of(np.where(rooms > 0, counts, 0))
            self.listed = self._launch(to_stream(self._borders, self._pile.device), self.listed.begins)
        changes = np.diff(starts[0]) if starts else np.zeros(self._pile.blocks, np.int64)
        return HotWeights(
            self._pile, self._cuts, self._known, self._known_at, self._last, counts, changes, self._change_at,
            self._borders, self.listed,
        )  # fmt: skip


def _known_of(pile: Pile, cuts: I64, memories: DeviceHistory) -> tuple[I64, I64, torch.Tensor]:
    """What the history knows of a pile: how many weights of each block, the cuts of tiles, and the patches."""
    sizes, tracked = np.zeros(pile.blocks, np.int64), np.zeros(len(pile.tiles), np.int64)
    if memories.index == 0:
        return sizes, tracked, pile.tables.nothing_known
    tracked = np.where(cuts, memories.cuts(pile), 0)
    remembered = [memories.tiles[pile.tiles[i].ordinal] for i in np.flatnonzero(tracked).tolist()]
    if not remembered:
        return sizes, tracked, pile.tables.nothing_known
    sizes[tracked[pile.tile_of] > 0] = np.concatenate([tile.sizes for tile in remembered])
    return sizes, tracked, _joined(remembered, pile.device)


def _count_changes(run: PileChanges, cuts: torch.Tensor) -> torch.Tensor:
    """Begin to count the changes of hot weights: where those of each chunk begin, and where those of the last end."""
    pile = run.pile
    counts = empty(pile.chunks, torch.int32, pile.device)
    cuda.count_hot_changes[(pile.blocks,)](
        pile.tables.block_tile, cuts, pile.tables.first_chunk, run.starts, unsigned(run.positions), unsigned(run.old),
        counts, ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, SPAN=1024,
    )  # fmt: skip
    return scan(counts)


def _joined(tiles: Sequence[TileMemory], device: torch.device) -> torch.Tensor:
    """The histories of tiles, concatenated: usually they already are."""
    pieces: list[tuple[torch.Tensor, int, int]] = []
    for tile in tiles:
        begin = tile.begin
        if pieces and pieces[-1][0] is tile.memory and pieces[-1][2] == begin:
            begin = pieces.pop()[1]
        pieces.append((tile.memory, begin, tile.end))
    found = [memory[begin:end].to(device) for memory, begin, end in pieces]
    return found[0] if len(found) == 1 else torch.cat(found)


def begin_remember(
    pile: Pile,
    locate: Callable[[Pile], PileAddresses],
    memories: DeviceHistory,
    cuts: Mapping[int, int],
    runs: Changes,
    touched: Collection[int],
    hot: HotWeights | None = None,
) -> Callable[[], dict[int, TileMemory]] | None:
    """Begin to compute what the history has of a pile after changes; return a function that waits for it.

    None: nothing of it changes. cuts: of tiles that were coded with a history, by ordinal. touched: the tiles with
    changes. hot: hot weights that are already known, used if they have these cuts, and if the history was looked up,
    which a patch coded without a history does not do.
    """
    new = np.array([cuts.get(ordinal, 0) for ordinal in pile.index], np.int64)
    then = np.where([n in touched for n in pile.index], np.maximum(memories.cuts(pile), new), 0)
    if not then.any():
        return None
    if hot is None or (hot.cuts != then).any() or hot.remembers != (memories.index > 0):
        hot = HotSearch(pile, locate(pile), then, memories).wait()
    return begin_advance(hot, memories.index + 1, runs)


def advanced(
    memories: DeviceHistory, later: Iterable[Callable[[], dict[int, TileMemory]]]
) -> DeviceHistory:
    """The history after a patch, given functions that wait for what changes; the same stays of all other tiles."""
    done = dict(memories.tiles)
    for waits in later:
        done.update(waits())
    return DeviceHistory(memories.index + 1, done)


def begin_advance(hot: HotWeights, index: int, changes: Changes) -> Callable[[], dict[int, TileMemory]]:
    """Begin to compute the history of a pile after patch `index` of an epoch; return a function that waits for it.

    It changes for tiles whose cut is above 0. The cut of a tile in `hot`, which is used up, is that of its history.
    """
    pile, tables, device = hot.pile, hot.pile.tables, hot.pile.device
    kind = pile.kind
    later = hot.bitmap
    changed, down = torch.zeros_like(later), torch.zeros_like(later)
    cuts = to_stream(hot.cuts.astype(np.int32), device)
    for run in changes:
        if run.count:
            cuda.mark_later[(pile.blocks, SPREAD)](
                tables.block_tile, cuts, tables.first_chunk, run.starts, unsigned(run.positions), unsigned(run.old),
                unsigned(run.new), unsigned(changed), unsigned(down), unsigned(later), ITEM=kind.itemsize,
                SHIFT=kind.exponent_shift, SPAN=SPAN,
            )  # fmt: skip
    counts = empty(pile.chunks, torch.int32, device)
    cuda.count_marks[(-(-pile.chunks // MARKS),)](unsigned(later), counts, pile.chunks, SPAN=MARKS)
    later_at = scan(counts)
    # A tracked weight is hot, or a cold weight that changes: this bound on the bytes is known without waiting.
    most = int(hot.counts.sum() - hot.changes.sum()) + sum(run.count for run in changes)
    content = empty(most, torch.uint8, device)
    known = hot.known if hot.remembers else torch.zeros_like(later)
    known_at = hot.known_at if hot.remembers else later_at
    starts, sums = later_at[tables.first_chunk], torch.zeros(2 * len(pile.tiles), dtype=torch.int64, device=device)
    if most:
        cuda.remember[(pile.chunks,)](
            unsigned(known), unsigned(changed), unsigned(down), unsigned(later), known_at, later_at, hot.last, index,
            content,
        )  # fmt: skip
        begins = starts[:-1] - starts[tables.tile_starts][tables.block_tile]  # in the tile
        cuda.digest_bytes[(pile.blocks, SPREAD)](
            content, starts, begins, tables.block_tile, device_keys(device), sums, SPAN=1024
        )
    counted = fetch(starts, sums)
    tiles = hot.cuts  # and not the bitmaps, which are freed
    return lambda: _by_tile(pile, tiles, content, *counted())


def _by_tile(pile: Pile, cuts: I64, content: torch.Tensor, borders: I64, sums: I64) -> dict[int, TileMemory]:
    """Split bytes at the borders of tiles, with their digests."""
    totals = as_sums(pile, sums)
    sizes, of_tiles, firsts = np.diff(borders), borders[pile.first_block].tolist(), pile.first_block.tolist()
    out = {}
    for i in np.flatnonzero(cuts).tolist():
        ordinal, cut, (begin, end) = pile.tiles[i].ordinal, int(cuts[i]), of_tiles[i : i + 2]
        counted = TileHistorySummary(cut, end - begin, totals[ordinal])
        some, bundled = sizes[firsts[i] : firsts[i + 1]], bool(pile.tiles[i].groups)
        out[ordinal] = TileMemory(cut, content, begin, some, counted, bundled)
    return out
