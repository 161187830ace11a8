"""Hot weights (those below the cut of their tile) on a device: marked, listed with table rows, and tracked."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from pulsesync.core.types import Remembered
from pulsesync.device.changes import SPAN, SPREAD, Changes, PileChanges, as_sums, device_keys
from pulsesync.device.memory import empty, fetch, on, scan, starts_of, to_device, to_host, to_stream, unsigned
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


@dataclass(frozen=True)
class HotWeights:
    """Which weights of a pile are below the cuts of their tiles, which of them are tracked, and a list of them.

    The list has the decisions of the coder, block after block: those of block b begin at borders[b].
    """

    pile: Pile
    cuts: I64  # of tiles
    bitmap: torch.Tensor
    known: torch.Tensor  # bitmap
    known_at: torch.Tensor  # where the bytes of each chunk begin
    last: torch.Tensor  # bytes
    counts: I64  # of blocks
    changes: I64  # of blocks: changes of hot weights, if changes were given
    change_at: torch.Tensor  # where the changes of each chunk begin
    borders: I64
    begins: torch.Tensor  # where the list entries of each chunk begin
    rows: torch.Tensor  # of the tables
    places: torch.Tensor  # positions in the block, if they are needed

    @property
    def remembers(self) -> bool:
        return self.known is not self.bitmap

    def without_list(self) -> "HotWeights":
        """The same without the list, which occupies most of the memory."""
        return replace(self, rows=self.rows[:0].clone(), places=self.places[:0].clone())


def find_hot(
    pile: Pile,
    weights: PileAddresses,
    cuts: I64,
    memories: DeviceHistory,
    changed: PileChanges | None = None,
    rooms: I64 | None = None,
    contexts: Contexts | None = None,
    places: bool = False,
) -> Callable[[], HotWeights]:
    """Begin to find the hot weights, and to list them if there is space. Returns a function that waits for the result.

    changed: changes, to count how many of them are of hot weights. `rooms`: the expected number of hot weights of each
    block, 0 for blocks that are not listed; if one has more, all are listed again. contexts: the rows of the tables.

    Raises:
        VerificationError: from the returned function: the weights do not match the history.
    """
    device = pile.device
    # A compile-time constant, so it depends only on the position in the epoch: the first patch has no history, and
    # every other patch has one, even if nothing is tracked in it.
    history = memories.index > 0
    sizes, known_of_tiles, known_starts, last = _known_of(pile, cuts, memories)
    of_tiles = to_stream(cuts.astype(np.int32), device)
    bitmap = empty(pile.chunks * WORDS, torch.int32, device)
    known = empty(bitmap.numel(), torch.int32, device) if history else bitmap
    begins, known_at = (empty(pile.chunks, torch.int64, device) for _ in range(2))
    change_at = begins if changed is None else _count_changes(changed, of_tiles)
    hots, knowns = (empty(pile.blocks, torch.int64, device) for _ in range(2))
    shape = contexts or Contexts(0, 1, 1, 1)

    def launch(borders: I64) -> tuple[torch.Tensor, torch.Tensor]:
        rows = empty(int(borders[-1]), torch.int16, device)
        where = empty(rows.numel() if places else 0, torch.int32, device)
        cuda.list_hot[(pile.blocks,)](
            weights.at, pile.tables.sizes, pile.tables.first_chunk, pile.tables.block_tile, of_tiles, known_of_tiles,
            to_stream(borders, device), known_starts, last, unsigned(bitmap), unsigned(known), begins, known_at,
            unsigned(rows), unsigned(where), hots, knowns, shape.lo, shape.classes, shape.ages,
            ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, HISTORY=history, PLACES=places,
        )  # fmt: skip
        return rows, where

    def wait() -> HotWeights:
        counts, found, *firsts = counted()
        if history and (found != sizes).any():
            raise VerificationError(spec.FAULTS[spec.FOREIGN_WRITE])
        borders, listed = likely, rows_and_places
        changes = np.diff(firsts[0]) if firsts else np.zeros(pile.blocks, np.int64)
        if (counts > np.diff(likely))[np.diff(likely) > 0].any():
            borders = starts_of(np.where(np.diff(likely) > 0, counts, 0))
            listed = launch(borders)
        return HotWeights(
            pile, cuts, bitmap, known, known_at, last, counts, changes, change_at, borders, begins, *listed
        )

    likely = starts_of(np.zeros(pile.blocks, np.int64) if rooms is None else rooms)
    rows_and_places = launch(likely)
    counted = fetch(hots, knowns, *(() if changed is None else (change_at[pile.tables.first_chunk],)))
    return wait


def _known_of(pile: Pile, cuts: I64, memories: DeviceHistory) -> tuple[I64, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the history knows of a pile: how many weights of each block, the cuts, where blocks begin, their patches."""
    sizes = np.zeros(pile.blocks, np.int64)
    known_of_tiles, known_starts, last = pile.tables.nothing_known
    if memories.index == 0:
        return sizes, known_of_tiles, known_starts, last
    tracked = np.where(cuts, memories.cuts(pile), 0)
    remembered = [memories.tiles[pile.tiles[i].ordinal] for i in np.flatnonzero(tracked).tolist()]
    if remembered:
        sizes[tracked[pile.tile_of] > 0] = np.concatenate([tile.sizes for tile in remembered])
        last = _joined(remembered, pile.device)
    device = pile.device
    return sizes, to_stream(tracked.astype(np.int32), device), to_stream(starts_of(sizes), device), last


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
    piles: Iterable[Pile],
    locate: Callable[[Pile], PileAddresses],
    memories: DeviceHistory,
    cuts: Mapping[int, int],
    runs: Changes,
    touched: Collection[int],
    hot: Mapping[Pile, HotWeights],
) -> Callable[[], DeviceHistory]:
    """Begin to compute the history after changes of some tiles. Returns a function that waits for it.

    piles: of all local tiles. cuts: of tiles that were coded with a history, by ordinal. touched: the tiles. hot: hot
    weights that are already known, used if they have these cuts, and if the history was looked up, which a patch coded
    without a history does not do.
    """

    def find() -> Iterator[HotWeights]:
        """One pile after the other, to limit memory."""
        for pile in piles:
            new = np.array([cuts.get(ordinal, 0) for ordinal in pile.index], np.int64)
            then = np.where([n in touched for n in pile.index], np.maximum(memories.cuts(pile), new), 0)
            if not then.any():
                continue
            one = hot.get(pile)
            if one is None or (one.cuts != then).any() or one.remembers != (memories.index > 0):
                with on(pile.device):
                    one = find_hot(pile, locate(pile), then, memories)()
            yield one

    return begin_advance(memories, memories.index + 1, find(), runs)


def begin_advance(
    memories: DeviceHistory, index: int, hot: Iterable[HotWeights], changes: Changes
) -> Callable[[], DeviceHistory]:
    """Begin to compute the history after patch `index` of an epoch. Returns a function that waits for it.

    It changes for tiles whose cut is above 0, and stays the same for all others. The cut of a tile in `hot` is that of
    its history.
    """
    done = dict(memories.tiles)
    before: Callable[[], dict[int, TileMemory]] | None = None
    for one in hot:
        if one.cuts.any():
            with on(one.pile.device):
                waits = _begin(one, index, [run for run in changes if run.pile is one.pile])
            done.update(before() if before is not None else {})  # one pile at a time, to limit memory
            before = waits

    return lambda: DeviceHistory(index, {**done, **(before() if before is not None else {})})


def _begin(hot: HotWeights, index: int, changes: Changes) -> Callable[[], dict[int, TileMemory]]:
    pile, tables, device = hot.pile, hot.pile.tables, hot.pile.device
    kind = pile.kind
    later = hot.bitmap.clone()
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
    return lambda: _by_tile(hot, content, *counted())


def _by_tile(hot: HotWeights, content: torch.Tensor, borders: I64, sums: I64) -> dict[int, TileMemory]:
    """Split bytes at the borders of tiles, with their digests."""
    pile = hot.pile
    totals = as_sums(pile, sums)
    sizes, of_tiles, firsts = np.diff(borders), borders[pile.first_block].tolist(), pile.first_block.tolist()
    out = {}
    for i in np.flatnonzero(hot.cuts).tolist():
        ordinal, cut, (begin, end) = pile.tiles[i].ordinal, int(hot.cuts[i]), of_tiles[i : i + 2]
        counted = TileHistorySummary(cut, end - begin, totals[ordinal])
        some, bundled = sizes[firsts[i] : firsts[i + 1]], bool(pile.tiles[i].groups)
        out[ordinal] = TileMemory(cut, content, begin, some, counted, bundled)
    return out
