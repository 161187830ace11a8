"""Hot weights (those below the cut of their tile) on a device: marked, listed with table rows, and tracked."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Remembered, Sum
from pulsesync.device.changes import SPAN, SPREAD, Changes, PileChanges, device_keys
from pulsesync.device.memory import (
    all_to_stream,
    empty,
    fetch,
    scan,
    starts_of,
    to_device,
    to_host,
    to_stream,
    unsigned,
)
from pulsesync.device.pile import WORDS, Pile, PileAddresses
from pulsesync.errors import VerificationError
from pulsesync.format.history import History, TileHistory, TileHistorySummary, digest_of_fields
from pulsesync.format.tables import Contexts
from pulsesync.kernels import cuda, spec
from pulsesync.kernels.arrays import I64

MARKS = 8  # chunks whose marks a program counts
BUSY = 3072  # programs that keep a GPU busy: with fewer blocks, each has several segments
NO_FIELDS = np.empty((0, 5), np.uint64)


@dataclass(frozen=True, eq=False)
class PileMemory:
    """The history of the tiles of a pile (see `format.history`): arrays of numbers, and the bytes on the device."""

    pile: Pile
    cuts: I64  # of tiles; 0: it is not tracked
    sizes: I64  # bytes of each block
    content: torch.Tensor  # those of all blocks, one after the other
    sums: NDArray[np.uint64]  # (tiles, 2): the digests of the bytes of each tile

    @cached_property
    def borders(self) -> I64:
        """Where the bytes of each tile begin, and where those of the last end."""
        borders: I64 = starts_of(self.sizes)[self.pile.first_block]
        return borders

    @cached_property
    def tracked(self) -> I64:
        """The numbers of the tracked tiles."""
        return np.flatnonzero(self.cuts)

    def hot_weights(self, cuts: I64, otherwise: I64) -> I64:
        """How many weights of each block are below a cut: known if it is the tile's own, else as given."""
        same: I64 = np.where(((cuts == self.cuts) & (cuts > 0))[self.pile.tile_of], self.sizes, otherwise)
        return same

    @property
    def fields(self) -> NDArray[np.uint64]:
        """What the digest of a history says of each tracked tile: its ordinal, cut, bytes and sums."""
        columns = self.pile.ordinals, self.cuts, np.diff(self.borders)
        numbers = np.stack([column[self.tracked].astype(np.uint64) for column in columns], axis=1)
        return np.concatenate((numbers, self.sums[self.tracked]), axis=1)

    def for_pile(self, pile: Pile) -> "PileMemory | None":
        """The same for a pile of some of its tiles, or for one with the same tiles; None: it has none of them."""
        if _coded_alike(pile, self.pile):
            return replace(self, pile=pile, content=self.content.to(pile.device))
        numbers = np.array([self.pile.index.get(ordinal, -1) for ordinal in pile.index], np.int64)
        here = numbers >= 0
        if not here.any():
            return None
        cuts, sizes = np.zeros(here.size, np.int64), np.zeros(pile.blocks, np.int64)
        sums = np.zeros((here.size, 2), np.uint64)
        cuts[here], sums[here] = self.cuts[numbers[here]], self.sums[numbers[here]]
        runs = []
        for i in np.flatnonzero(cuts).tolist():
            first, last = self.pile.first_block[numbers[i] : numbers[i] + 2].tolist()
            sizes[pile.first_block[i] : pile.first_block[i + 1]] = self.sizes[first:last]
            runs.append(slice(*self.borders[numbers[i] : numbers[i] + 2].tolist()))
        content = torch.cat([self.content[run] for run in runs]) if runs else self.content[:0]
        return PileMemory(pile, cuts, sizes, content.to(pile.device), sums)


@dataclass(frozen=True)
class DeviceHistory:
    """The history of a state on a device: frozen, as `format.history.History` is."""

    index: int = 0
    memories: tuple[PileMemory, ...] = ()

    @property
    def tiles(self) -> list[int]:
        """The ordinals of the tracked tiles."""
        return [ordinal for one in self.memories for ordinal in one.pile.ordinals[one.tracked].tolist()]

    def of_pile(self, pile: Pile) -> PileMemory:
        """What is known of the tiles of a pile."""
        found = [one for one in self.memories if one.pile is pile]
        found = found or [some for one in self.memories if (some := one.for_pile(pile))]
        if len(found) == 1:
            return found[0]
        nothing = np.zeros(len(pile.tiles), np.int64), np.zeros(pile.blocks, np.int64), pile.tables.nothing_known
        none = PileMemory(pile, *nothing, np.zeros((len(pile.tiles), 2), np.uint64))
        return _merged(none, found) if found else none

    def in_piles(self, piles: Iterable[Pile]) -> "DeviceHistory":
        """The same for the piles of another state."""
        if all(any(one.pile is pile for pile in piles) for one in self.memories):
            return self
        return DeviceHistory(self.index, tuple(one for pile in piles if (one := self.of_pile(pile)).cuts.any()))

    def cut(self, tile: int) -> int:
        return next((int(one.cuts[one.pile.index[tile]]) for one in self.memories if tile in one.pile.index), 0)

    def counts(self, ordinals: Iterable[int]) -> dict[int, TileHistorySummary]:
        """The part of the history digest for these tiles, as far as they are tracked."""
        wanted, rows = set(ordinals), (row for one in self.memories for row in one.fields.tolist())
        return {row[0]: TileHistorySummary(row[1], row[2], Sum(*row[3:])) for row in rows if row[0] in wanted}

    def digest(self) -> str:
        fields = np.concatenate([one.fields for one in self.memories]) if self.memories else NO_FIELDS
        return digest_of_fields(self.index, fields[np.argsort(fields[:, 0])])

    def to_bytes(self) -> bytes:
        return self.on_host().to_bytes()

    def on_host(self) -> History:
        tiles = {}
        for one in self.memories:
            (content,), borders = to_host(one.content), one.borders.tolist()
            for i in one.tracked.tolist():
                sizes = one.sizes[one.pile.first_block[i] : one.pile.first_block[i + 1]]
                last = content[borders[i] : borders[i + 1]]
                blocks = [Remembered(last, starts_of(sizes))]
                if not one.pile.tiles[i].groups:
                    blocks = [Remembered.alone(some) for some in np.split(last, np.cumsum(sizes)[:-1])]
                tiles[one.pile.tiles[i].ordinal] = TileHistory(int(one.cuts[i]), tuple(blocks))
        return History(self.index, tiles)

    @classmethod
    def of(cls, history: History, piles: Iterable[Pile]) -> "DeviceHistory":
        """Copy the history of the tiles of some piles from the host."""
        return cls(history.index, tuple(_copied(history, pile) for pile in piles) if history.tiles else ())


def _coded_alike(pile: Pile, other: Pile) -> bool:
    """Whether two piles have the same blocks of the same tiles."""
    names = ("ordinals", "first_block", "host_begins", "host_sizes")
    return all(np.array_equal(getattr(pile, name), getattr(other, name)) for name in names)


def _copied(history: History, pile: Pile) -> PileMemory:
    cuts, sizes = np.zeros(len(pile.tiles), np.int64), np.zeros(pile.blocks, np.int64)
    sums, last = np.zeros((len(pile.tiles), 2), np.uint64), [np.empty(0, np.uint8)]
    counts = history.counts(pile.index)
    for i, ordinal in enumerate(pile.index):
        if ordinal in counts:
            blocks, cuts[i], sums[i] = history.tiles[ordinal].blocks, counts[ordinal].cut, counts[ordinal].sum
            sizes[pile.first_block[i] : pile.first_block[i + 1]] = np.concatenate([np.diff(b.ranks) for b in blocks])
            last += (block.last for block in blocks)
    return PileMemory(pile, cuts, sizes, to_device(np.concatenate(last), pile.device), sums)


def _merged(none: PileMemory, some: Sequence[PileMemory]) -> PileMemory:
    """The history of a pile, some of whose tiles were in each of several other piles."""
    owners = ((i, one) for i in range(len(none.pile.tiles)) for one in some if one.cuts[i])
    content = [one.content[one.borders[i] : one.borders[i + 1]] for i, one in owners]
    cuts, sizes, sums = (np.add.reduce([getattr(one, name) for one in some]) for name in ("cuts", "sizes", "sums"))
    return PileMemory(none.pile, cuts, sizes, torch.cat([none.content[:0], *content]), sums)


class HotList(NamedTuple):
    """Hot weights, marked and listed on the device: the decisions of the coder, block after block."""

    bitmap: torch.Tensor
    rooms: torch.Tensor  # where the list of each block begins, and where that of the last ends
    found: torch.Tensor  # how many hot and tracked weights each block has; if there is less room, not all are listed
    begins: torch.Tensor  # where the entries of each chunk begin
    rows: torch.Tensor  # of the tables
    ranks: torch.Tensor  # for each word of the bitmap, how many hot weights of its chunk are before it; or empty

    def without_entries(self) -> "HotList":
        """The same without the list itself, which occupies most of the memory."""
        return self._replace(rows=self.rows[:0].clone(), ranks=self.ranks[:0].clone())


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
        return replace(self, listed=self.listed.without_entries())


class HotSearch:
    """A search for hot weights that was begun, and which lists them where there is room. `wait` returns the result.

    changed: changes, to count how many of them are of hot weights. `rooms`: the expected number of hot weights of each
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
        known = memories.of_pile(pile)
        assert (cuts >= known.cuts).all()
        self._sizes, self._last = known.sizes, known.content
        self._borders = starts_of(np.zeros(pile.blocks, np.int64) if rooms is None else rooms)
        self._of_tiles, self._tracked, self._known_starts, room_starts = all_to_stream(
            (cuts.astype(np.int32), known.cuts.astype(np.int32), starts_of(self._sizes), self._borders), device
        )
        self._bitmap = empty(pile.chunks * WORDS, torch.int32, device)
        self._known = empty(self._bitmap.numel(), torch.int32, device) if self._history else self._bitmap
        begins, self._known_at = (empty(pile.chunks, torch.int64, device) for _ in range(2))
        self._change_at = begins if changed is None else _count_changes(changed, self._of_tiles)
        self.listed = self._launch(room_starts, begins)
        changes_at = () if changed is None else (self._change_at[pile.tables.first_chunk],)
        self._fetched = fetch(self.listed.found, *changes_at)

    def _launch(self, rooms: torch.Tensor, begins: torch.Tensor) -> HotList:
        pile, tables, device, shape = self._pile, self._pile.tables, self._pile.device, self._contexts
        found = torch.zeros((pile.blocks, 2), dtype=torch.int64, device=device)
        rows = empty(int(self._borders[-1]), torch.int16, device)
        ranks = empty(pile.chunks * WORDS if self._ranks else 0, torch.int16, device)
        segments = next((n for n in (1, 2, 4, 8, 16) if n * pile.blocks >= BUSY), 32)
        programs = pile.blocks * segments
        counted = torch.zeros(programs, dtype=torch.int64, device=device)
        cuda.list_hot[(programs,)](
            self._weights.at, tables.sizes, tables.first_chunk, tables.block_tile, self._of_tiles, self._tracked, rooms,
            self._known_starts, self._last, unsigned(self._bitmap), unsigned(self._known), unsigned(ranks), counted,
            begins, self._known_at, unsigned(rows), found, segments, shape.lo, shape.classes, shape.ages,
            ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, HISTORY=self._history, RANKS=self._ranks,
            maxnreg=64,  # more programs at a time
        )  # fmt: skip
        return HotList(self._bitmap, rooms, found, begins, rows, ranks)

    @cached_property
    def _counted(self) -> list[NDArray[np.int64]]:
        return self._fetched()

    def count(self) -> I64:
        """Wait for the numbers of hot weights of the blocks.

        Raises: VerificationError: the weights do not match the history.
        """
        counts: I64
        counts, tracked = self._counted[0].T
        if self._history and (tracked != self._sizes).any():
            raise VerificationError(spec.FAULTS[spec.FOREIGN_WRITE])
        return counts

    @property
    def lacks_room(self) -> bool:
        """Whether a block that is to be listed has more hot weights than expected."""
        rooms = np.diff(self._borders)
        return bool((self.count() > rooms)[rooms > 0].any())

    def wait(self) -> HotWeights:
        """Wait, and list all again if there was too little room. Raises: as `count`."""
        counts, pile = self.count(), self._pile
        if self.lacks_room:
            self.listed = self.listed.without_entries()  # frees its memory first
            self._borders = starts_of(np.where(np.diff(self._borders) > 0, counts, 0))
            self.listed = self._launch(to_stream(self._borders, pile.device), self.listed.begins)
        starts = self._counted[1:]
        changes = np.diff(starts[0]) if starts else np.zeros(pile.blocks, np.int64)
        return HotWeights(
            pile, self._cuts, self._known, self._known_at, self._last, counts, changes, self._change_at, self._borders,
            self.listed,
        )  # fmt: skip


def _count_changes(run: PileChanges, cuts: torch.Tensor) -> torch.Tensor:
    """Begin to count the changes of hot weights: where those of each chunk begin, and where those of the last end."""
    pile = run.pile
    counts = empty(pile.chunks, torch.int32, pile.device)
    cuda.count_hot_changes[(pile.blocks,)](
        pile.tables.block_tile, cuts, pile.tables.first_chunk, run.starts, unsigned(run.positions), unsigned(run.old),
        counts, ITEM=pile.kind.itemsize, SHIFT=pile.kind.exponent_shift, SPAN=1024,
    )  # fmt: skip
    return scan(counts)


Remembering = Callable[[], PileMemory]  # waits for a history that is being made


def begin_remember(
    pile: Pile,
    locate: Callable[[Pile], PileAddresses],
    memories: DeviceHistory,
    cuts: Mapping[int, int],
    runs: Changes,
    touched: Set[int],
    hot: HotWeights | None = None,
) -> Remembering:
    """Begin to compute what the history has of a pile after changes; return a function that waits for it.

    cuts: of tiles that were coded with a history, by ordinal. touched: the tiles with changes. hot: hot weights that
    are already known, used if they have the cuts of the history, and if it was looked up, which a patch coded without a
    history does not do.
    """
    known = memories.of_pile(pile)
    then = np.maximum(known.cuts, [cuts.get(ordinal, 0) for ordinal in pile.index])
    if not then.any() or touched.isdisjoint(pile.index):
        return lambda: known
    if hot is None or (hot.cuts != then).any() or hot.remembers != (memories.index > 0):
        hot = HotSearch(pile, locate(pile), then, memories).wait()
    return begin_advance(hot, memories.index + 1, runs)


def advanced(memories: DeviceHistory, later: Iterable[Remembering]) -> DeviceHistory:
    """The history after a patch, given functions that wait for that of each pile."""
    found = tuple(one for waits in later if (one := waits()).cuts.any())
    return DeviceHistory(memories.index + 1, found)


def begin_advance(hot: HotWeights, index: int, changes: Changes) -> Remembering:
    """Begin to compute the history of a pile after patch `index` of an epoch; return a function that waits for it.

    The cut of a tile in `hot`, which is used up, is that of its history; tiles whose cut is 0 have none.
    """
    pile, tables, device, kind = hot.pile, hot.pile.tables, hot.pile.device, hot.pile.kind
    later, runs = unsigned(hot.bitmap), [run for run in changes if run.count]
    of_tiles, at = to_stream(hot.cuts.astype(np.int32), device), {"ITEM": kind.itemsize, "SHIFT": kind.exponent_shift}
    for run in runs:
        cuda.mark_later[(pile.blocks, SPREAD)](
            tables.block_tile, of_tiles, tables.first_chunk, run.starts, unsigned(run.positions), unsigned(run.new),
            later, **at, SPAN=SPAN,
        )  # fmt: skip
    counts, ranks = empty(pile.chunks, torch.int32, device), empty(pile.chunks * WORDS, torch.int16, device)
    cuda.count_marks[(-(-pile.chunks // MARKS),)](later, counts, unsigned(ranks), pile.chunks, SPAN=MARKS)
    later_at = scan(counts)
    # A tracked weight is hot, or a cold weight that changes: this bound on the bytes is known without waiting. The
    # changes of a block with a fault are at its first weight, which makes one more.
    most = int(hot.counts.sum() - hot.changes.sum()) + sum(run.count for run in runs) + pile.blocks
    content = (empty if hot.remembers else torch.zeros)(most, dtype=torch.uint8, device=device)
    if hot.remembers:
        cuda.remember[(pile.chunks,)](unsigned(hot.known), later, hot.known_at, later_at, hot.last, content)
    for run in runs:
        cuda.date[(pile.blocks, SPREAD)](
            tables.block_tile, of_tiles, tables.first_chunk, run.starts, unsigned(run.positions), unsigned(run.old),
            unsigned(run.new), later, unsigned(ranks), later_at, index, content, **at, SPAN=SPAN,
        )  # fmt: skip
    starts, sums = later_at[tables.first_chunk], torch.zeros(2 * len(pile.tiles), dtype=torch.int64, device=device)
    begins = starts[:-1] - starts[tables.tile_starts][tables.block_tile]  # in the tile
    cuda.digest_bytes[(pile.blocks, SPREAD)](
        content, starts, begins, tables.block_tile, device_keys(device), sums, SPAN=1024
    )
    counted = fetch(starts, sums)
    cuts = hot.cuts  # and not the bitmaps, which are freed

    def wait() -> PileMemory:
        borders, totals = counted()
        return PileMemory(pile, cuts, np.diff(borders), content, totals.view(np.uint64).reshape(-1, 2))

    return wait
