"""Bundles whose weights lie in many tensors: gathered into contiguous memory by one launch, and written by another.

The pieces are described by a table on the device. Its addresses are updated only when a tensor has moved, so that
thousands of small tensors otherwise cost the host nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Tile
from pulsesync.device.memory import INTEGERS, Tensors, cast, reachable, shared, starts_of, to_device, unsigned
from pulsesync.kernels import cuda
from pulsesync.kernels.arrays import I64
from pulsesync.kernels.spec import GPU_CHUNK

KEPT = 8  # tables of addresses that are kept


class PieceTable:
    """What a launch needs to know of some pieces besides their addresses.

    begins: where each begins in the run. geometry: numbers of weights and columns, and the distance between rows in
    weights; 0: it is contiguous.
    """

    def __init__(self, begins: I64, geometry: tuple[I64, I64, I64], device: torch.device) -> None:
        sizes, columns, strides = geometry
        chunks = -(-sizes // GPU_CHUNK)
        self.begins, self.sizes = to_device(begins, device), to_device(sizes, device)
        self.columns, self.strides = to_device(columns, device), to_device(strides, device)
        self._chunk_piece = to_device(np.repeat(np.arange(chunks.size, dtype=np.int32), chunks), device)
        self._first_chunk = to_device(starts_of(chunks), device)

    def gather(self, at: torch.Tensor, run: torch.Tensor, in_a_row: bool = False) -> None:
        """Copy the pieces at some addresses to their places in a run; in_a_row: all of them are contiguous."""
        cuda.gather_pieces[(self._chunk_piece.numel(),)](
            shared(at), shared(self.sizes), shared(self.columns),
            torch.zeros_like(self.strides) if in_a_row else shared(self.strides), shared(self.begins),
            shared(self._chunk_piece), shared(self._first_chunk), unsigned(run), ITEM=run.element_size(),
        )  # fmt: skip

    def scatter(self, run: torch.Tensor, at: torch.Tensor) -> None:
        """Copy the pieces from their places in a run to some addresses."""
        cuda.scatter_pieces[(self._chunk_piece.numel(),)](
            at, self.sizes, self.columns, self.strides, self.begins, self._chunk_piece, self._first_chunk,
            unsigned(run), ITEM=run.element_size(),
        )  # fmt: skip


class Pieces:
    """The pieces of bundles, in the tensors of a process.

    places: the tiles, with the pieces of local groups in local tensors; a tile without pieces is its own only piece.
    starts: where each tile begins in the run, in weights, and where the last ends; if not given, one after the other,
    each at a multiple of 8 weights.
    """

    def __init__(
        self, tiles: Sequence[Tile], places: Sequence[Tile], device: torch.device, starts: I64 | None = None
    ) -> None:
        self.device, spec = device, tiles[0].tensor
        self._itemsize, self._dtype = spec.kind.itemsize, spec.dtype
        self.starts = starts_of(np.array([padded(tile.size) for tile in tiles], np.int64)) if starts is None else starts
        self._partial = any(tile.kept is not None for tile in tiles)
        some = [piece for place in places for piece in place.pieces or (place,)]
        self.names = [piece.tensor.name for piece in some]
        begins = [piece_begins(place if tile.kept is None else tile) for tile, place in zip(tiles, places, strict=True)]
        self.begins = np.concatenate([at + some for at, some in zip(self.starts, begins, strict=False)])
        self._starts = np.array([piece.start for piece in some], np.int64)
        self._geometry = (
            np.array([piece.size for piece in some], np.int64),
            np.array([piece.columns for piece in some], np.int64),
            np.array([0 if piece.contiguous else piece.tensor.columns for piece in some], np.int64),
        )
        self._found: dict[tuple[object, int], _Found] = {}

    @cached_property
    def table(self) -> PieceTable:
        """The table of all pieces."""
        return self._table(np.arange(len(self.names)))

    def _table(self, numbers: I64) -> PieceTable:
        sizes, columns, strides = (column[numbers] for column in self._geometry)
        return PieceTable(self.begins[numbers], (sizes, columns, strides), self.device)

    def gather(
        self, flats: Mapping[str, torch.Tensor], itemsize: int, into: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Gather all bundles into a run, with zeros for other groups. Masters are cast, unless itemsize is theirs."""
        plain, masters, _memory = self._locate(flats, itemsize)  # copies must live until they are read
        new = torch.zeros if self._partial else torch.empty
        run = new(int(self.starts[-1]), dtype=INTEGERS[itemsize], device=self.device) if into is None else into
        if plain is not None:
            plain.table.gather(plain.at, run)
        if masters is None:
            return run
        wide = torch.empty(run.numel(), dtype=torch.int32, device=self.device)
        masters.table.gather(masters.at, wide)
        narrow = cast(wide, self._dtype)
        if plain is None and into is None:
            return narrow
        masters.table.gather(masters.table.begins * itemsize + narrow.data_ptr(), run, in_a_row=True)
        return run

    def _locate(self, flats: Mapping[str, torch.Tensor], itemsize: int) -> "_Found":
        """The addresses of the pieces that are gathered unchanged, and of those that are cast."""
        place, masters = (flats.place, flats.masters) if isinstance(flats, Tensors) else (None, {})
        key = (place, itemsize)
        if place is not None and (known := self._found.get(key)) is not None:
            return known
        given = [flats[name] for name in self.names]
        memory = [reachable(flat, self.device) for flat in given]
        at = self.addresses(memory, itemsize)
        wide = np.array([itemsize == self._itemsize and name in masters for name in self.names], np.bool_)
        at[wide] += (4 - itemsize) * self._starts[wide]
        found = _Found(self._at(at, ~wide), self._at(at, wide))
        if place is None or any(flat is not here for flat, here in zip(given, memory, strict=True)):
            return found._replace(memory=memory)
        for old in list(self._found)[: len(self._found) - KEPT + 1]:
            self._found.pop(old, None)
        self._found[key] = found
        return found

    def addresses(self, flats: Sequence[torch.Tensor], itemsize: int) -> I64:
        """Where each piece begins, given the tensor that it is in."""
        at: I64 = np.array([flat.data_ptr() for flat in flats], np.int64) + self._starts * itemsize
        return at

    def _at(self, at: I64, some: NDArray[np.bool_]) -> "_Located | None":
        numbers = np.flatnonzero(some)
        if not numbers.size:
            return None
        return _Located(self.table if some.all() else self._table(numbers), to_device(at[numbers], self.device))


class _Located(NamedTuple):
    """Some pieces, and where they are."""

    table: PieceTable
    at: torch.Tensor


class _Found(NamedTuple):
    """The addresses of pieces: those in the published dtype, those of masters, and the memory they are in."""

    plain: _Located | None
    masters: _Located | None
    # Empty where the place of the tensors is known: the owner of the tensors keeps it alive.
    memory: Sequence[torch.Tensor] = ()


def padded(size: int) -> int:
    """The next multiple of 8."""
    return -(-size // 8) * 8


def piece_begins(tile: Tile) -> I64:
    """Where the pieces of a bundle begin in it, for the groups that are local."""
    begins = starts_of(np.array([piece.size for piece in tile.pieces or (tile,)], np.int64))[:-1]
    if tile.kept is None:
        return begins
    groups = np.searchsorted(tile.borders, begins, "right") - 1
    return begins[np.isin(groups, tile.kept)]
