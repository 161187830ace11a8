"""The blocks of all tiles of a dtype, in one pile: what a launch must know of each.

Many small tensors cost no more launches than one large one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, Dtype, Tile
from pulsesync.device.memory import shared, starts_of, to_device, to_stream

CHUNK = 4096  # weights; as kernels/cuda.py has it
WORDS = CHUNK // 32  # of a bitmap, in a chunk
Key = TypeVar("Key")
Value = TypeVar("Value")
KEPT = 8  # parts of a pile, and places where it was found


@dataclass(frozen=True, eq=False)
class Pile:
    """Tiles of one dtype that have weights, in the order of their ordinals, and their blocks one after the other.

    places: where each lies in the tensors at hand, if that is another place than in the run's.
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

    @property
    def chunks(self) -> int:
        return int(self.host_first_chunk[-1])

    # Tables on the host

    @cached_property
    def first_block(self) -> NDArray[np.int64]:
        """Where the blocks of each tile begin, and where those of the last end."""
        return starts_of(np.array([tile.block_count for tile in self.tiles], np.int64))

    @cached_property
    def tile_of(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.tiles)), np.diff(self.first_block))

    @cached_property
    def host_begins(self) -> NDArray[np.int64]:
        """Where each block begins in its tile."""
        begins: NDArray[np.int64] = (np.arange(self.blocks) - self.first_block[self.tile_of]) * BLOCK
        return begins

    @cached_property
    def host_sizes(self) -> NDArray[np.int64]:
        sizes = np.array([tile.size for tile in self.tiles], np.int64)
        left: NDArray[np.int64] = np.minimum(sizes[self.tile_of] - self.host_begins, BLOCK)
        return left

    @cached_property
    def host_first_chunk(self) -> NDArray[np.int64]:
        return starts_of(-(-self.host_sizes // CHUNK))

    @cached_property
    def index(self) -> dict[int, int]:
        """The tile of an ordinal."""
        return {tile.ordinal: i for i, tile in enumerate(self.tiles)}

    # Tables on the device

    @cached_property
    def sizes(self) -> torch.Tensor:
        return to_device(self.host_sizes, self.device)

    @cached_property
    def begins(self) -> torch.Tensor:
        return to_device(self.host_begins, self.device)

    @cached_property
    def block_tile(self) -> torch.Tensor:
        return to_device(self.tile_of.astype(np.int32), self.device)

    @cached_property
    def first_chunk(self) -> torch.Tensor:
        return to_device(self.host_first_chunk, self.device)

    @cached_property
    def chunk_block(self) -> torch.Tensor:
        blocks = np.repeat(np.arange(self.blocks, dtype=np.int32), np.diff(self.host_first_chunk))
        return to_device(blocks, self.device)

    @cached_property
    def run_geometry(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each tile, in the tensor of the run: its first weight, columns, and weights from row to row."""
        return _geometry(self.tiles, self.device)

    @cached_property
    def own_geometry(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same in the tensors at hand."""
        return self.run_geometry if self.places is self.tiles else _geometry(self.places, self.device)

    # For the digest

    @cached_property
    def regular_and_odd(self) -> "tuple[Pile | None, Pile | None]":
        """Its tiles of which the digest can be counted in words of eight bytes, and the others."""
        regular = [tile.ordinal for tile in self.tiles if _in_words(tile)]
        odd = [tile.ordinal for tile in self.tiles if not _in_words(tile)]
        return self.part(regular) if regular else None, self.part(odd) if odd else None

    @cached_property
    def units(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Units of 16 bits of each block, where they begin in the tensor, and the most chunks that a block is in."""
        per = self.kind.itemsize // 2
        starts = np.array([tile.start for tile in self.tiles], np.int64)[self.tile_of] + self.host_begins
        chunks = ((starts + self.host_sizes) * per - 1) // CHUNK - starts * per // CHUNK + 1
        sizes = to_device(self.host_sizes * per, self.device)
        return sizes, to_device(starts * per, self.device), int(chunks.max())

    # Weights

    def part(self, ordinals: Sequence[int]) -> "Pile":
        """The pile of some of its tiles."""
        if len(ordinals) == len(self.tiles):
            return self
        key = tuple(ordinals)
        if (found := self._parts.get(key)) is None:
            chosen = [self.index[ordinal] for ordinal in ordinals]
            tiles = [self.tiles[i] for i in chosen]
            places = tiles if self.places is self.tiles else [self.places[i] for i in chosen]
            found = Pile(tiles, places, self.device)
            _keep(self._parts, key, found)
        return found

    @cached_property
    def _parts(self) -> "dict[tuple[int, ...], Pile]":
        """Those made last: most versions touch the same tiles."""
        return {}

    def blocks_of(self, part: "Pile") -> NDArray[np.int64]:
        """The numbers here of the blocks of a part."""
        firsts = self.first_block[[self.index[tile.ordinal] for tile in part.tiles]]
        return np.arange(part.blocks) + np.repeat(firsts - part.first_block[:-1], np.diff(part.first_block))

    def locate(self, flats: Mapping[str, torch.Tensor], itemsize: int | None = None) -> "PileAddresses":
        """Find the blocks in tensors; tiles that do not lie in a row, or not at a multiple of 8 bytes, are copied."""
        wide = itemsize or self.kind.itemsize
        names, tensor_of, starts, in_a_row = self._lying
        addresses = np.array([flats[name].data_ptr() for name in names], np.int64)
        memory = tuple(flats[name] for name in names)
        if (known := self._found.get(key := (wide, addresses.tobytes()))) is not None:
            return PileAddresses(shared(known), memory)
        bases = addresses[tensor_of] + starts * wide
        copies = []
        for i in np.flatnonzero(~in_a_row | (bases % 8 != 0)).tolist():
            lying = rectangle(flats[self.places[i].tensor.name], self.places[i])
            copies.append(lying.clone(memory_format=torch.contiguous_format).view(-1).to(self.device))
            bases[i] = copies[-1].data_ptr()
        at = to_device(bases[self.tile_of] + self.host_begins * wide, self.device)
        if not copies:
            _keep(self._found, key, at)
        return PileAddresses(at, (*copies, *memory))

    def elsewhere(self, places: Mapping[int, Tile]) -> "Pile":
        """The same tiles as they lie in other tensors."""
        others = [places[tile.ordinal] for tile in self.tiles]
        return self if others == list(self.places) else Pile(self.tiles, others, self.device)

    def located(self, tiles: Sequence[torch.Tensor]) -> "PileAddresses":
        """The blocks of tiles that are each in memory of its own."""
        bases = np.array([tile.data_ptr() for tile in tiles], np.int64)
        at = bases[self.tile_of] + self.host_begins * self.kind.itemsize
        return PileAddresses(to_stream(at, self.device), tuple(tiles))

    @cached_property
    def _found(self) -> dict[tuple[int, bytes], torch.Tensor]:
        """Addresses of the blocks, by the size of a weight and the addresses of the tensors: which seldom move."""
        return {}

    @cached_property
    def _lying(self) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Names of the tensors; of each tile which of them it is in, where it begins, and whether it lies in a row."""
        names = list(dict.fromkeys(place.tensor.name for place in self.places))
        number = {name: i for i, name in enumerate(names)}
        tensor_of = np.array([number[place.tensor.name] for place in self.places], np.int64)
        starts = np.array([place.start for place in self.places], np.int64)
        return names, tensor_of, starts, np.array([place.contiguous for place in self.places])


@dataclass(frozen=True)
class PileAddresses:
    """The addresses of a pile's blocks, and the memory they are in."""

    at: torch.Tensor
    memory: tuple[torch.Tensor, ...]  # held while the addresses are used


def make_piles(tiles: Sequence[Tile], places: Mapping[int, Tile], device: torch.device) -> dict[str, Pile]:
    """Piles by dtype, in the order of their names, of the tiles that have a place here."""
    by_dtype: dict[str, list[Tile]] = {}
    for tile in tiles:
        if tile.ordinal in places:
            by_dtype.setdefault(tile.tensor.dtype, []).append(tile)
    out = {}
    for dtype, some in sorted(by_dtype.items()):
        own = [places[tile.ordinal] for tile in some]
        out[dtype] = Pile(some, some if own == some else own, device)
    return out


def _keep(some: dict[Key, Value], key: Key, value: Value) -> None:
    """Remember a thing, and forget the oldest if there are many; from any thread."""
    for old in list(some)[: len(some) - KEPT + 1]:
        some.pop(old, None)
    some[key] = value


def _in_words(tile: Tile) -> bool:
    """Whether a tile begins in its tensor at a multiple of eight bytes, lies in a row, and is not of single bytes."""
    wide = tile.tensor.kind.itemsize
    return wide > 1 and tile.contiguous and tile.start * wide % 8 == 0


def rectangle(flat: torch.Tensor, place: Tile) -> torch.Tensor:
    """The weights of a tile, in its tensor."""
    if place.contiguous:
        return flat[place.start : place.start + place.size]
    rows = flat.view(place.tensor.rows, place.tensor.columns)[place.row : place.row + place.rows]
    return rows[:, place.column : place.column + place.columns]


def _geometry(tiles: Sequence[Tile], device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = np.array([tile.start for tile in tiles], np.int64)
    columns = np.array([tile.size if tile.contiguous else tile.columns for tile in tiles], np.int64)
    strides = np.array([0 if tile.contiguous else tile.tensor.columns for tile in tiles], np.int64)
    return to_device(starts, device), to_device(columns, device), to_device(strides, device)
