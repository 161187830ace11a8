"""Bundles on a device, as ranks of a group send them: copied into messages, read from them, compared and sampled.

A message is bytes on a device. This module knows only where tiles begin in it: `group.messages` has the rest of the
format. The number of launches grows neither with the number of tensors nor with that of bundles.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Sum, Tile
from pulsesync.device.blocks import TiedTensors, begin_count
from pulsesync.device.changes import PileChanges, device_keys, digest_changes_by_block
from pulsesync.device.compare import AlikeTiles, PilePair, compare_pile, find_at_once
from pulsesync.device.memory import (
    INTEGERS,
    all_to_stream,
    empty,
    fetch,
    on,
    starts_of,
    to_device,
    to_host,
    to_stream,
    unsigned,
    worker_of,
)
from pulsesync.device.pieces import Pieces, padded
from pulsesync.device.pile import WORDS, Pile, PileAddresses, cache_put, make_piles, place_of
from pulsesync.device.source import DeviceSource
from pulsesync.device.state import DeviceBackend, backend_of
from pulsesync.errors import FormatError, StateError
from pulsesync.format.layout import Layout
from pulsesync.kernels import cuda
from pulsesync.kernels.arrays import I64
from pulsesync.kernels.spec import GPU_CHUNK
from pulsesync.state.slices import LocalTile, TileStorage
from pulsesync.state.weights import WeightState

SPAN = 512  # changes that a program processes at a time
SPREAD = 16  # programs for a tile of a table
SHAPES = 64  # layouts of messages whose tables stay on the device
Places = Mapping[int, TileStorage]  # by ordinal: where bundles lie in the tensors of a process


class WholeTiles:
    """The tiles of a pile, whole in a message; begins: where each begins there, in bytes: a multiple of 8."""

    def __init__(self, pile: Pile, begins: I64) -> None:
        self.pile, self._begins, self._wide = pile, begins, pile.kind.itemsize
        self._addresses: dict[tuple[TiedTensors, int], torch.Tensor] = {}

    @cached_property
    def _pieces(self) -> Pieces:
        starts = np.append(self._begins // self._wide, 0)
        return Pieces(self.pile.tiles, self.pile.places, self.pile.device, starts)

    def gather(self, tensors: Mapping[str, torch.Tensor], message: torch.Tensor) -> None:
        """Copy the weights of tensors into a message; masters in the dtype in which they are published."""
        with on(self.pile.device):
            self._pieces.gather(tensors, self._wide, message.view(INTEGERS[self._wide]))

    def scatter(self, message: torch.Tensor, tied: TiedTensors) -> None:
        """Write the tiles of a message into tensors, and into those that are tied to them."""
        run = message.view(INTEGERS[self._wide])
        with on(self.pile.device):
            for n in range(tied.count_of(self.pile)):
                self._pieces.table.scatter(run, self._at(tied, n))

    def _at(self, tied: TiedTensors, n: int) -> torch.Tensor:
        """The addresses of the pieces in the n-th memory that each tensor has, cached."""
        if (tied, n) not in self._addresses:
            flats = [tied.memory(name, n) for name in self._pieces.names]
            self._addresses[tied, n] = to_device(self._pieces.addresses(flats, self._wide), self.pile.device)
        return self._addresses[tied, n]

    def make_ready(self, tied: TiedTensors) -> None:
        """Make all tables that `scatter` needs."""
        with on(self.pile.device):
            for n in range(tied.count_of(self.pile)):
                self._at(tied, n)
            self._pieces.table  # noqa: B018 - made when it is first asked for

    def begin_count(self, message: torch.Tensor) -> Callable[[], NDArray[np.uint64]]:
        """Begin to count the digests of the tiles in the message; return a function that waits for them: (tiles, 2)."""
        pile = self.pile
        at = message.data_ptr() + self._begins[pile.tile_of] + pile.host_begins * self._wide
        with on(pile.device):
            counted = begin_count(pile, PileAddresses(to_stream(at, pile.device), (message,)))
        return lambda: counted()[0].view(np.uint64).reshape(-1, 2)


def count_whole(some: Sequence[WholeTiles], message: torch.Tensor) -> "TileSums":
    """The digests of all tiles that are whole in a message."""
    waiting = [tiles.begin_count(message) for tiles in some]
    return TileSums.join([TileSums(tiles.pile.ordinals, wait()) for tiles, wait in zip(some, waiting, strict=True)])


@dataclass(frozen=True)
class TileSums:
    """Digests of tiles, or how they change."""

    ordinals: I64
    sums: NDArray[np.uint64]  # (tiles, 2)

    @classmethod
    def join(cls, some: "Sequence[TileSums]") -> "TileSums":
        ordinals = np.concatenate([np.empty(0, np.int64), *(one.ordinals for one in some)])
        return cls(ordinals, np.concatenate([np.empty((0, 2), np.uint64), *(one.sums for one in some)]))

    def of(self, ordinals: I64) -> NDArray[np.uint64]:
        """Those of some of the tiles."""
        order = np.argsort(self.ordinals)
        return self.sums[order[np.searchsorted(self.ordinals, ordinals, sorter=order)]]


class MessageShapes:
    """Which tiles are whole in messages, and where: tables for launches are kept for the next message."""

    def __init__(self, parts: Callable[[Iterable[int]], Sequence[tuple[Pile, Pile]]]) -> None:
        self._parts = parts
        self._known: dict[tuple[tuple[int, int], ...], Sequence[WholeTiles]] = {}

    def __call__(self, begins: Mapping[int, int]) -> Sequence[WholeTiles]:
        """These tiles in a message, given by ordinal where each begins in it, in bytes."""
        key = tuple(begins.items())
        if (found := self._known.get(key)) is None:
            found = [
                WholeTiles(part, np.array([begins[tile.ordinal] for tile in part.tiles], np.int64))
                for _, part in self._parts(begins)
            ]
            cache_put(self._known, key, found, SHAPES)
        return found


class ChangeTable(NamedTuple):
    """A table of changes in a message, by ordinal: how many each tile has, and where these begin, in bytes."""

    changes: I64
    places: I64
    values: I64

    @classmethod
    def of(cls, tiles: int, ordinals: I64, changes: I64, begins: I64) -> "ChangeTable":
        """Some of this number of tiles; begins: of positions, and of values (tiles, 2)."""
        rows = np.zeros((3, tiles), np.int64)
        rows[:, ordinals] = np.stack([changes, begins[:, 0], begins[:, 1]])
        return cls(*rows)


def count_changed(runs: Sequence[PileChanges], starts: Sequence[I64], tiles: int) -> I64:
    """How many changes each tile of a layout has, by ordinal. starts: those of the runs, on the host."""
    counts = np.zeros(tiles, np.int64)
    for run, at in zip(runs, starts, strict=True):
        counts[run.pile.ordinals] = np.diff(at[run.pile.first_block])
    return counts


def write_table(run: PileChanges, starts: I64, table: ChangeTable, message: torch.Tensor) -> None:
    """Write changes into a table. starts: those of the run, on the host."""
    pile, base = run.pile, message.data_ptr()
    tiles = pile.ordinals[pile.tile_of]
    before = starts[:-1] - starts[pile.first_block][pile.tile_of]  # changes of the tile in the blocks before
    places = base + table.places[tiles] + 4 * before
    values = base + table.values[tiles] + pile.kind.itemsize * before
    with on(pile.device):
        place_at, value_at = all_to_stream((places, values), pile.device)
        cuda.write_table[(pile.blocks, 4)](
            place_at, value_at, pile.tables.begins, run.starts, unsigned(run.positions), unsigned(run.new),
            ITEM=pile.kind.itemsize, SPAN=SPAN,
        )  # fmt: skip


def read_table(
    backend: DeviceBackend, ordinals: Iterable[int], table: ChangeTable, message: torch.Tensor
) -> list[PileChanges]:
    """Read changes of local tiles, without the old weights (`with_old`). Raises: FormatError: one is out of place."""
    runs, faults = list[PileChanges](), list[torch.Tensor]()
    for _, part in backend.piles.parts(ordinals):
        with on(part.device):
            run, wrong = _read_part(part, table, message)
        runs.append(run)
        faults.append(wrong)
    if any(found.any() for found in to_host(*faults)):
        raise FormatError("a table has changes beyond the end of their tile, or not in ascending order")
    return runs


def _read_part(part: Pile, table: ChangeTable, message: torch.Tensor) -> tuple[PileChanges, torch.Tensor]:
    device, wide, base = part.device, part.kind.itemsize, message.data_ptr()
    changes = table.changes[part.ordinals]
    firsts = starts_of(changes)
    total = int(firsts[-1])
    sizes = np.array([tile.size for tile in part.tiles], np.int64)
    addresses = table.places[part.ordinals] + base, table.values[part.ordinals] + base
    place_at, value_at, counts, first, size = all_to_stream((*addresses, changes, firsts[:-1], sizes), device)
    starts = torch.full((part.blocks + 1,), total, dtype=torch.int64, device=device)
    positions, new = empty(total, torch.int32, device), empty(total, INTEGERS[wide], device)
    wrong = torch.zeros(1, dtype=torch.int32, device=device)
    cuda.table_starts[(part.blocks,)](part.tables.block_tile, part.tables.begins, place_at, counts, first, starts)
    cuda.read_table[(len(part.tiles), SPREAD)](
        size, place_at, value_at, counts, first, unsigned(positions), unsigned(new), wrong, ITEM=wide, SPAN=SPAN
    )
    return PileChanges(part, starts, positions, new, new), wrong


def with_old(backend: DeviceBackend, runs: Sequence[PileChanges]) -> tuple[list[PileChanges], Callable[[], TileSums]]:
    """Changes with the current weights that they replace; and a function that waits for how they change the digests."""
    found, sums = list[PileChanges](), list[torch.Tensor]()
    for run in runs:
        pile, old = run.pile, torch.empty_like(run.new)
        moved = torch.zeros(2 * pile.blocks, dtype=torch.int64, device=pile.device)
        if run.count:
            with on(pile.device):
                weights = pile.locate(backend.tensors)
                cuda.read_old[(pile.blocks, 8)](
                    weights.at, pile.tables.begins, pile.tables.indices.blocks, pile.tables.indices.table, run.starts,
                    unsigned(run.positions), unsigned(old), unsigned(run.new), device_keys(pile.device), moved,
                    ITEM=pile.kind.itemsize, SPAN=SPAN,
                )  # fmt: skip
        found.append(replace(run, old=old))
        sums.append(moved)
    counted = fetch(*sums)
    return found, lambda: _by_tile([run.pile for run in runs], counted())


def count_digest_changes(runs: Sequence[PileChanges]) -> TileSums:
    """How changes change the digests of tiles: for all tiles of the piles of the runs."""
    counted = digest_changes_by_block(runs)
    return _by_tile(list(counted), list(counted.values()))


def _by_tile(piles: Sequence[Pile], by_block: Sequence[NDArray[Any]]) -> TileSums:
    """From sums of blocks to sums of tiles."""
    pairs = zip(piles, (sums.view(np.uint64).reshape(-1, 2) for sums in by_block), strict=True)
    added = [TileSums(pile.ordinals, np.add.reduceat(some, pile.first_block[:-1], axis=0)) for pile, some in pairs]
    return TileSums.join(added)


class SourceBundles:
    """The bundles that a rank sends, in its tensors, and a copy of what was last sent, if one is kept.

    layout: the bundles of all ranks. places: where those of this rank lie in its tensors. device: the first of these.
    """

    def __init__(self, layout: Layout, places: Places, source: DeviceSource, device: torch.device) -> None:
        self.layout, self.device = layout, device
        self.base: WeightState | None = None
        # Where each tile of the copy lies: the buffer that it shares with others, and its offset
        self._rooms: dict[int, tuple[torch.Tensor, int]] = {}
        self.bind(places, source)

    def bind(self, places: Places, source: DeviceSource) -> None:
        """Read the bundles from tensors in other memory from now on; the copy stays."""
        self._places = {ordinal: place_of(place) for ordinal, place in places.items()}
        self._source, self._tensors = source, source.tensors
        workers = {name: worker_of(view.tensor, self.device) for name, view in source.views.items()}
        self._live = make_piles(self.layout.tiles, self._places, workers)
        self.shapes = MessageShapes(self._live.parts)
        self._pairs: dict[tuple[int, ...], PilePair] = {}

    def gather(self, begins: Mapping[int, int], message: torch.Tensor) -> Sequence[WholeTiles]:
        """Copy the current tiles into a message, given where each begins in it, in bytes, by ordinal."""
        some = self.shapes(begins)
        for tiles in some:
            tiles.gather(self._tensors, message)
        return some

    def make_room(self) -> None:
        """Allocate the copy of what is sent, if there is none yet."""
        if self.base is not None:
            return
        flats: dict[str, torch.Tensor] = {}
        for pile in self._live:
            kind = INTEGERS[pile.kind.itemsize]
            starts = starts_of(np.array([padded(tile.size) for tile in pile.tiles], np.int64)).tolist()
            run = torch.empty(starts[-1], dtype=kind, device=pile.device)
            room = run.view(torch.uint8)
            for tile, at in zip(pile.tiles, starts, strict=False):
                flats[tile.tensor.name] = run[at : at + tile.size]
                self._rooms[tile.ordinal] = room, at * kind.itemsize
        tiles = [self.layout.tiles[ordinal] for ordinal in self._places]
        places = {tile.ordinal: LocalTile(tile, True) for tile in tiles}
        self.base = WeightState(DeviceBackend(self.layout, flats, places=places, device=self.device), {})

    def drop_copy(self) -> None:
        """Keep no copy, and free its memory."""
        self.base = None
        self._rooms, self._pairs = {}, {}

    def keep_copy(self, sums: Mapping[int, Sum]) -> None:
        """Copy the current tiles, given the digests of what was sent. Raises: StateError: they differ from it."""
        assert self.base is not None
        by_room: dict[torch.Tensor, dict[int, int]] = {}
        for ordinal in sorted(sums):
            room, begin = self._rooms[ordinal]
            by_room.setdefault(room, {})[ordinal] = begin
        for room, begins in by_room.items():
            first = min(begins.values())
            tiles = ((begin, self.layout.tiles[ordinal]) for ordinal, begin in begins.items())
            last = max(begin + padded(tile.size) * tile.tensor.kind.itemsize for begin, tile in tiles)
            here = {ordinal: begin - first for ordinal, begin in begins.items()}
            # Only the part in use: casting FP32 masters needs as much memory as the target.
            for some in self.gather(here, room[first:last]):
                counted, sent = some.begin_count(room[first:last])(), [sums[n] for n in some.pile.index]
                if not np.array_equal(counted, np.array(sent, np.uint64)):
                    raise StateError(
                        "the weights changed while they were pushed: receivers have what was sent, and the next push "
                        "sends all weights. Let nothing write them before push returns"
                    )
        with self.base.lock:
            self.base.sums = {**self.base.sums, **sums}

    def saved(self, begins: Mapping[int, int], message: torch.Tensor) -> None:
        """Copy tiles as they were last sent into a message."""
        assert self.base is not None
        base = backend_of(self.base)
        for tiles in MessageShapes(base.piles.parts)(begins):
            tiles.gather(base.tensors, message)

    def compare(self, tiles: Sequence[Tile]) -> list[PileChanges]:
        """The changes of these tiles since the copy; runs without changes are left out."""
        assert self.base is not None
        found = (compare_pile(pair, self._source, self._find) for pair in self._pairs_of(tiles))
        return [run for run in found if run.count]

    def _find(self, one: AlikeTiles, new: PileAddresses) -> PileChanges:
        assert self.base is not None
        with on(one.here.device):
            return find_at_once(one, new, backend_of(self.base))

    def _pairs_of(self, tiles: Sequence[Tile]) -> list[PilePair]:
        assert self.base is not None
        out = []
        for _, here in backend_of(self.base).piles.parts(tile.ordinal for tile in tiles):
            key = tuple(here.index)
            if (pair := self._pairs.get(key)) is None:
                pair = PilePair.of(here, here.in_tensors(self._places), self._source.dtypes)
                cache_put(self._pairs, key, pair, SHAPES)
            out.append(pair)
        return out

    def sample(self, begins: Mapping[int, int], size: int) -> dict[int, int]:
        """How many of at most `size` weights of each tile, from `begins` on, differ from the copy, by ordinal."""
        if not begins:
            return {}
        counted, waiting = dict[int, int](), []
        for pair in self._pairs_of([self.layout.tiles[ordinal] for ordinal in begins]):
            for one in pair.alike:
                with on(one.here.device):
                    waiting.append((one.here, self._sample(one, begins, size)))
        fetched = fetch(*(counts for _, counts in waiting))()
        for (pile, _), counts in zip(waiting, fetched, strict=True):
            by_tile = counts.reshape(len(pile.tiles), -1).sum(axis=1).tolist()
            counted.update(zip((tile.ordinal for tile in pile.tiles), by_tile, strict=True))
        return counted

    def _sample(self, one: AlikeTiles, begins: Mapping[int, int], size: int) -> torch.Tensor:
        """Begin to count the differences in the samples of tiles that are compared together."""
        assert self.base is not None
        pile, wide = one.here, one.here.kind.itemsize
        new = one.there.locate(self._tensors, itemsize=4 if one.cast else None)
        old = pile.locate(backend_of(self.base).tensors)
        ordinals = [tile.ordinal for tile in pile.tiles]
        at = np.array([begins[ordinal] for ordinal in ordinals], np.int64)
        sizes = np.minimum(np.array([tile.size for tile in pile.tiles], np.int64) - at, size)
        each = -(-size // GPU_CHUNK)
        blocks = np.repeat(np.arange(len(ordinals), dtype=np.int32), each)
        first = np.arange(len(ordinals) + 1, dtype=np.int64) * each
        tables = (at, sizes, blocks, first, pile.first_block[:-1])
        where, left, chunk_block, first_chunk, firsts = all_to_stream(tables, pile.device)
        counts = torch.zeros(blocks.size, dtype=torch.int32, device=pile.device)
        bitmap = empty(blocks.size * WORDS, torch.int32, pile.device)
        cuda.compare[(blocks.size,)](
            old.at[firsts] + where * wide, new.at[firsts] + where * (4 if one.cast else wide), left, chunk_block,
            first_chunk, unsigned(bitmap), counts, ITEM=wide, CAST=one.cast,
        )  # fmt: skip
        return counts
