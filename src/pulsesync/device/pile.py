"""A pile: the blocks of all tiles of a dtype on a device, and the tables that launches need.

Many small tensors cost no more launches than one large one. A block here is a set of weights that are coded together:
2^20 weights of a tile, or a group of a bundle. A bundle whose weights lie in many tensors is gathered into contiguous
memory first. A large model has several piles of a dtype, so that the memory for coding does not grow with the model.
"""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, Dtype, Tile
from pulsesync.device.indices import BlockIndices
from pulsesync.device.memory import Tensors, reachable, shared, starts_of, to_device, to_stream
from pulsesync.device.pieces import Pieces
from pulsesync.kernels.arrays import I64
from pulsesync.kernels.spec import GPU_CHUNK
from pulsesync.state.slices import GatheredTile, TileStorage

WORDS = GPU_CHUNK // 32  # of a bitmap, in a chunk
Key = TypeVar("Key")
Value = TypeVar("Value")
KEPT = 8  # sets of addresses that a pile keeps
PARTS = 64  # partial piles that a pile keeps
LEAST = 1 << 30  # weights of a pile, at least, where a dtype on a device has several
MOST = 1 << 33  # with more weights, a dtype on a device has piles ...
EACH = 1 << 31  # ... of about this number


@dataclass(frozen=True, eq=False)
class Pile:
    """Tiles of one dtype that have weights, in the order of their ordinals, and their blocks one after the other.

    places: the coordinates of each in the local tensors; a bundle in many tensors has its pieces there.
    """

    tiles: Sequence[Tile]
    places: Sequence[Tile]
    device: torch.device

    @property
    def kind(self) -> Dtype:
        return self.tiles[0].tensor.kind

    @property
    def blocks(self) -> int:
        return int(self.first_block[-1])

    @cached_property
    def size(self) -> int:
        """The number of weights that are coded."""
        return int(self.host_sizes.sum())

    @property
    def chunks(self) -> int:
        return int(self.host_first_chunk[-1])

    @cached_property
    def first_block(self) -> I64:
        """Where the blocks of each tile begin, and where those of the last end."""
        return starts_of(np.array([begins.size for begins, _ in self._coded], np.int64))

    @cached_property
    def tile_of(self) -> I64:
        return np.repeat(np.arange(len(self.tiles)), np.diff(self.first_block))

    @cached_property
    def host_begins(self) -> I64:
        """Where each block begins in its tile."""
        return np.concatenate([begins for begins, _ in self._coded])

    @cached_property
    def host_sizes(self) -> I64:
        return np.concatenate([sizes for _, sizes in self._coded])

    @cached_property
    def _coded(self) -> list[tuple[I64, I64]]:
        """For each tile, where the groups of weights that are coded together begin, and their sizes."""
        return [_coded_together(tile) for tile in self.tiles]

    @cached_property
    def host_first_chunk(self) -> I64:
        return starts_of(-(-self.host_sizes // GPU_CHUNK))

    @cached_property
    def index(self) -> dict[int, int]:
        """The tile of an ordinal."""
        return {tile.ordinal: i for i, tile in enumerate(self.tiles)}

    @cached_property
    def ordinals(self) -> I64:
        return np.array(list(self.index), np.int64)

    def find_blocks(self, per_tile: I64, positions: I64) -> "FoundBlocks":
        """Find the blocks of ascending positions, given tile after tile; per_tile: how many each tile has."""
        offsets, begins, ends = self._laid_out
        where = positions + np.repeat(offsets, per_tile)
        first = np.searchsorted(where, begins)  # a fifth of the time of a search for every position
        counts = (np.searchsorted(where, ends) if self._has_gaps else np.append(first[1:], where.size)) - first
        inside = None
        if counts.sum() < where.size:
            inside = np.arange(counts.sum()) + np.repeat(first - starts_of(counts)[:-1], counts)
            positions = positions[inside]
        return FoundBlocks(inside, counts, (positions - np.repeat(self.host_begins, counts)).astype(np.int32))

    @cached_property
    def _laid_out(self) -> tuple[I64, I64, I64]:
        """Where tiles begin if they are concatenated, and where blocks then begin and end."""
        offsets = starts_of(np.array([tile.size for tile in self.tiles], np.int64))[:-1]
        begins = offsets[self.tile_of] + self.host_begins
        return offsets, begins, begins + self.host_sizes

    @cached_property
    def _has_gaps(self) -> bool:
        """Whether some weights are in no block: groups of bundles that are not local."""
        return any(tile.kept is not None for tile in self.tiles)

    @cached_property
    def kept_streams(self) -> I64:
        """Which of the streams of all tiles, in order, are blocks of this pile: of bundles, the local groups."""
        firsts = starts_of(np.array([tile.borders.size - 1 for tile in self.tiles], np.int64)).tolist()
        all_ = (np.arange(tile.borders.size - 1) if tile.kept is None else np.array(tile.kept) for tile in self.tiles)
        return np.concatenate([first + some for first, some in zip(firsts, all_, strict=False)])

    @cached_property
    def tables(self) -> "PileTables":
        return PileTables(self)

    @cached_property
    def ranges(self) -> "ContiguousRanges":
        return ContiguousRanges(self)

    @cached_property
    def placement(self) -> "PilePlacement":
        return PilePlacement(self)

    # Parts

    def part(self, ordinals: Sequence[int]) -> "Pile":
        """The pile of some of its tiles, given in order."""
        assert all(a < b for a, b in pairwise(ordinals)), "positions are read tile after tile"
        if len(ordinals) == len(self.tiles):
            return self
        key = tuple(ordinals)
        if (found := self._parts.get(key)) is None:
            chosen = [self.index[ordinal] for ordinal in ordinals]
            found = Pile([self.tiles[i] for i in chosen], [self.places[i] for i in chosen], self.device)
            cache_put(self._parts, key, found, PARTS)
        return found

    @cached_property
    def _parts(self) -> "dict[tuple[int, ...], Pile]":
        """The partial piles made last: most versions touch the same tiles."""
        return {}

    def tiles_of(self, part: "Pile") -> I64:
        """The numbers, in this pile, of the tiles of a part."""
        return np.array([self.index[ordinal] for ordinal in part.index], np.int64)

    def blocks_of(self, part: "Pile") -> I64:
        """The numbers, in this pile, of the blocks of a part."""
        firsts = self.first_block[self.tiles_of(part)]
        return np.arange(part.blocks) + np.repeat(firsts - part.first_block[:-1], np.diff(part.first_block))

    # Weights

    def locate(self, flats: Mapping[str, torch.Tensor], itemsize: int | None = None) -> "PileAddresses":
        """Find the blocks in tensors. Bundles in many tensors are gathered, and cast if some of these are masters.

        Tiles that are not contiguous, or not at a multiple of 8 bytes, are copied.
        itemsize: that of masters, which are then not cast.
        """
        return self.placement.locate(flats, itemsize or self.kind.itemsize)

    def in_tensors(self, places: Mapping[int, Tile]) -> "Pile":
        """The same tiles in other tensors."""
        others = [places[tile.ordinal] for tile in self.tiles]
        same = all(a == b and a.pieces == b.pieces for a, b in zip(others, self.places, strict=True))
        return self if same else Pile(self.tiles, others, self.device)


class FoundBlocks(NamedTuple):
    """Where positions in tiles are in the blocks of a pile."""

    inside: I64 | None  # which of them are in a block: of a bundle, those in local groups
    counts: I64  # number of these in each block
    positions: NDArray[np.int32]  # in the blocks

    def of(self, some: NDArray[Any]) -> NDArray[Any]:
        """Select the entries of the positions that are in a block."""
        return some if self.inside is None else some[self.inside]


class PileTables:
    """What launches need to know of a pile, on its device: made when it is first asked for."""

    def __init__(self, pile: Pile) -> None:
        self._device = pile.device
        self._pile: Pile = weakref.proxy(pile)  # which has this: no cycle, so that a GPU's memory is freed at once

    @cached_property
    def sizes(self) -> torch.Tensor:
        return to_device(self._pile.host_sizes, self._device)

    @cached_property
    def begins(self) -> torch.Tensor:
        return to_device(self._pile.host_begins, self._device)

    @cached_property
    def block_tile(self) -> torch.Tensor:
        return to_device(self._pile.tile_of.astype(np.int32), self._device)

    @cached_property
    def first_chunk(self) -> torch.Tensor:
        return to_device(self._pile.host_first_chunk, self._device)

    @cached_property
    def chunk_block(self) -> torch.Tensor:
        blocks = np.repeat(np.arange(self._pile.blocks, dtype=np.int32), np.diff(self._pile.host_first_chunk))
        return to_device(blocks, self._device)

    @cached_property
    def tile_starts(self) -> torch.Tensor:
        """The first block of each tile."""
        return to_device(self._pile.first_block[:-1], self._device)

    @cached_property
    def nothing_known(self) -> torch.Tensor:
        """The bytes of an empty history."""
        return to_device(np.zeros(1, np.uint8), self._device)

    @cached_property
    def indices(self) -> BlockIndices:
        """The indices of its blocks, in the tensors of the run."""
        pile = self._pile
        return BlockIndices(pile.tiles, pile.tile_of, pile.host_begins, pile.host_sizes, self._device)


class PilePlacement:
    """Where the weights of a pile lie in tensors; the addresses are cached, because tensors seldom move."""

    def __init__(self, pile: Pile) -> None:
        self._places, self._device = pile.places, pile.device
        self._pile: Pile = weakref.proxy(pile)  # as above

    @cached_property
    def geometry(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For each tile, in the local tensors: first weight, columns, and distance between rows in weights."""
        starts = np.array([place.start for place in self._places], np.int64)
        columns = np.array([place.size if place.contiguous else place.columns for place in self._places], np.int64)
        strides = np.array([0 if place.contiguous else place.tensor.columns for place in self._places], np.int64)
        return to_device(starts, self._device), to_device(columns, self._device), to_device(strides, self._device)

    @cached_property
    def first_gathered(self) -> int:
        """The first tile whose weights lie in many tensors; all later ones do, too, because bundles are last."""
        return next((i for i, place in enumerate(self._places) if place.pieces), len(self._places))

    @cached_property
    def pieces(self) -> Pieces | None:
        """The pieces of these tiles; None if there are no such tiles."""
        first = self.first_gathered
        if first == len(self._places):
            return None
        return Pieces(self._pile.tiles[first:], self._places[first:], self._device)

    @cached_property
    def blocks_in_run(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the blocks of these tiles: where each begins, in weights, once they are gathered, and its pieces.

        The pieces are given by the piece of its first weight and the one after the piece of its last weight: in tiles
        larger than a block, a piece may be in two blocks.
        """
        assert self.pieces is not None
        first = int(self._pile.first_block[self.first_gathered])
        begins = self.pieces.starts[self._pile.tile_of[first:] - self.first_gathered] + self._pile.host_begins[first:]
        low = np.searchsorted(self.pieces.begins, begins, "right") - 1
        high = np.searchsorted(self.pieces.begins, begins + self._pile.host_sizes[first:])
        return to_device(begins, self._device), to_device(low, self._device), to_device(high, self._device)

    def locate(self, flats: Mapping[str, torch.Tensor], wide: int) -> "PileAddresses":
        """See `Pile.locate`; wide: the bytes of a weight."""
        plain = self._locate_plain(flats, wide)
        if self.pieces is None:
            return plain
        run = self.pieces.gather(flats, wide)
        return PileAddresses(torch.cat((plain.at, self.blocks_in_run[0] * wide + run.data_ptr())), (run, *plain.memory))

    def _locate_plain(self, flats: Mapping[str, torch.Tensor], wide: int) -> "PileAddresses":
        """The same for the tiles that are in one tensor each."""
        names, tensor_of, starts, in_a_row = self._tensor_table
        key: tuple[object, ...] | None = None
        if isinstance(flats, Tensors):
            if wide == self._pile.kind.itemsize and any(name in flats.masters for name in names):
                flats = {name: flats.published(name) for name in names}
            elif flats.place is not None:
                key = (wide, flats.place)
                if (known := self._found.get(key)) is not None:
                    return PileAddresses(shared(known), (flats,))
        given = [flats[name] for name in names]
        memory = tuple(reachable(flat, self._device) for flat in given)
        moved = any(flat is not here for flat, here in zip(given, memory, strict=True))
        addresses = np.array([flat.data_ptr() for flat in memory], np.int64)
        if key is None:
            key = (wide, addresses.tobytes())
            if (known := self._found.get(key)) is not None:
                return PileAddresses(shared(known), memory)
        bases = addresses[tensor_of] + starts * wide
        copies = []
        for i in np.flatnonzero(~in_a_row | (bases % 8 != 0)).tolist():
            lying = rectangle(memory[tensor_of[i]], self._places[i])
            copies.append(lying.clone(memory_format=torch.contiguous_format).view(-1).to(self._device))
            bases[i] = copies[-1].data_ptr()
        blocks = slice(int(self._pile.first_block[self.first_gathered]))
        at = to_device(bases[self._pile.tile_of[blocks]] + self._pile.host_begins[blocks] * wide, self._device)
        if not copies and not moved:
            cache_put(self._found, key, at, KEPT)
        return PileAddresses(at, (*copies, *memory))

    @cached_property
    def _found(self) -> dict[tuple[object, ...], torch.Tensor]:
        """Addresses of the blocks, by the size of a weight and the addresses of the tensors, which seldom change."""
        return {}

    @cached_property
    def _tensor_table(self) -> tuple[list[str], I64, I64, NDArray[np.bool_]]:
        """Names of the tensors; for each tile its tensor, where it begins, and whether it is contiguous."""
        places = self._places[: self.first_gathered]
        names = list(dict.fromkeys(place.tensor.name for place in places))
        number = {name: i for i, name in enumerate(names)}
        tensor_of = np.array([number[place.tensor.name] for place in places], np.int64)
        starts = np.array([place.start for place in places], np.int64)
        return names, tensor_of, starts, np.array([place.contiguous for place in places], np.bool_)


class ContiguousRanges:
    """The contiguous stretches of a pile, of at most 2^20 weights each: blocks of its tiles, and whole bundles."""

    def __init__(self, pile: Pile) -> None:
        self._pile = pile
        counts = np.array([1 if tile.groups else tile.block_count for tile in pile.tiles], np.int64)
        self._tile_of = np.repeat(np.arange(counts.size), counts)
        number = np.arange(self._tile_of.size) - np.repeat(starts_of(counts)[:-1], counts)
        self._begins = number * BLOCK
        self._sizes = np.minimum(np.array([tile.size for tile in pile.tiles])[self._tile_of] - self._begins, BLOCK)
        self._first = pile.first_block[self._tile_of] + number  # block
        self.are_blocks = not any(tile.groups for tile in pile.tiles)

    @property
    def count(self) -> int:
        return self._first.size

    @cached_property
    def sizes(self) -> torch.Tensor:
        return to_device(self._sizes, self._pile.device)

    @cached_property
    def tiles(self) -> torch.Tensor:
        """The tile of each stretch."""
        return to_device(self._tile_of.astype(np.int32), self._pile.device)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """The first block of each stretch, and the end of the last."""
        return to_device(np.append(self._first, self._pile.blocks), self._pile.device)

    def addresses(self, weights: "PileAddresses") -> torch.Tensor:
        """The address of each stretch, given those of the blocks."""
        if self.are_blocks:
            return weights.at
        return weights.at[self.blocks[:-1]] - self._before

    @cached_property
    def _before(self) -> torch.Tensor:
        """The number of bytes of each before its first block: groups of a bundle that are not local."""
        before = self._pile.host_begins[self._first] - self._begins
        return to_device(before * self._pile.kind.itemsize, self._pile.device)


@dataclass(frozen=True)
class PileAddresses:
    """The addresses of a pile's blocks, and the memory they are in."""

    at: torch.Tensor
    memory: tuple[object, ...]  # kept alive while the addresses are used

    def of(self, whole: Pile, part: Pile) -> "PileAddresses":
        """The addresses of a part of the pile."""
        if part is whole:
            return self
        return PileAddresses(self.at[to_stream(whole.blocks_of(part), whole.device)], self.memory)


class Piles(Sequence[Pile]):
    """The piles of some tiles, in the order of dtypes, and then of tiles."""

    def __init__(self, piles: Iterable[Pile]) -> None:
        self._piles = sorted(piles, key=order)
        self._of = {ordinal: pile for pile in self._piles for ordinal in pile.index}

    def __len__(self) -> int:
        return len(self._piles)

    def __getitem__(self, number: Any) -> Any:
        return self._piles[number]

    def of(self, ordinal: int) -> Pile:
        """The pile of a tile."""
        return self._of[ordinal]

    def parts(self, ordinals: Iterable[int]) -> list[tuple[Pile, Pile]]:
        """The piles of some tiles, each with the pile of only these tiles, in order."""
        found: dict[Pile, list[int]] = {}
        for ordinal in sorted(ordinals):
            found.setdefault(self._of[ordinal], []).append(ordinal)
        return [(pile, pile.part(found[pile])) for pile in sorted(found, key=order)]

    def numbers(self, tiles: Sequence[Tile]) -> Iterable[tuple[Pile, list[int]]]:
        """The piles of some tiles, and the numbers of those in each."""
        found: dict[Pile, list[int]] = {}
        for n, tile in enumerate(tiles):
            found.setdefault(self._of[tile.ordinal], []).append(n)
        return found.items()


def make_piles(
    tiles: Sequence[Tile], places: Mapping[int, Tile], devices: Mapping[str, torch.device], pieces: int = 1
) -> "Piles":
    """Piles of the local tiles.

    devices: of the tensors, by name; a bundle is on that of its first tensor. pieces: the most piles of a dtype on a
    device; none of them has fewer than about LEAST weights.
    """
    groups: dict[tuple[str, torch.device], list[Tile]] = {}
    for tile in tiles:
        if tile.ordinal in places:
            place = places[tile.ordinal]
            name = (place.pieces[0] if place.pieces else place).tensor.name
            groups.setdefault((tile.tensor.dtype, devices[name]), []).append(tile)
    split = ((device, some) for (_, device), group in groups.items() for some in _split(group, pieces))
    return Piles(Pile(some, [places[tile.ordinal] for tile in some], device) for device, some in split)


def _split(tiles: Sequence[Tile], pieces: int) -> list[list[Tile]]:
    """Split consecutive tiles into piles of about the same size."""
    starts = starts_of(np.array([tile.size for tile in tiles], np.int64))
    total = int(starts[-1])
    pieces = -(-total // EACH) if total > MOST else max(1, min(pieces, total // LEAST))
    numbers = (starts[:-1] + starts[1:]) * pieces // (2 * max(total, 1))  # by the middle of each tile
    borders = np.searchsorted(numbers, np.arange(pieces + 1)).tolist()
    return [list(tiles[begin:end]) for begin, end in pairwise(borders) if begin < end]


def order(pile: Pile) -> tuple[str, int]:
    """The sort key of piles: those of a dtype are together."""
    return pile.tiles[0].tensor.dtype, pile.tiles[0].ordinal


def place_of(place: TileStorage) -> Tile:
    """A tile in the coordinates of the local tensors; one in many tensors has its pieces there."""
    return replace(place.tile, pieces=tuple(place.local)) if isinstance(place, GatheredTile) else place.tile


def _coded_together(tile: Tile) -> tuple[I64, I64]:
    """Where weights that are coded together begin in a tile, and how many there are: of a bundle, the local groups."""
    begins, sizes = tile.borders[:-1], np.diff(tile.borders)
    if tile.kept is None:
        return begins, sizes
    kept = list(tile.kept)
    return begins[kept], sizes[kept]


def cache_put(some: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Store a value, and drop the oldest if there are more than `most`; thread-safe."""
    for old in list(some)[: max(len(some) - most + 1, 0)]:
        some.pop(old, None)
    some[key] = value


def rectangle(flat: torch.Tensor, place: Tile) -> torch.Tensor:
    """The weights of a tile, in its tensor."""
    if place.contiguous:
        return flat[place.start : place.start + place.size]
    rows = flat.view(place.tensor.rows, place.tensor.columns)[place.row : place.row + place.rows]
    return rows[:, place.column : place.column + place.columns]


def stretch(flat: torch.Tensor, place: Tile, begin: int, end: int) -> torch.Tensor:
    """Weights begin to end of a tile, row by row: a view if they are contiguous in its tensor, else a copy."""
    if place.contiguous:
        return flat[place.start + begin : place.start + end]
    first, last = begin // place.columns, -(-end // place.columns)
    rows = rectangle(flat, place)[first:last].reshape(-1)
    return rows[begin - first * place.columns : end - first * place.columns]
