"""Slices of tensors: a worker that holds a rectangle of one, and where the tiles of a run lie in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec, Tile
from pulsesync.errors import StateError

Span = tuple[int, int]


@dataclass(frozen=True)
class Slice:
    """The rows and columns of a tensor that are local.

    Args:
        rows: From (included) and to (excluded), along the first dimension; None for all.
        columns: The same along all other dimensions together.
    """

    rows: Span | None = None
    columns: Span | None = None

    def of(self, spec: TensorSpec) -> "Window":
        """Raises: StateError, if the tensor has no such rows or columns."""
        rows, columns = self.rows or (0, spec.rows), self.columns or (0, spec.columns)
        for (begin, end), size in ((rows, spec.rows), (columns, spec.columns)):
            if not 0 <= begin <= end <= size:
                raise StateError(f"tensor {spec.name!r} has no slice {begin}..{end} of {size}", tensor=spec.name)
        return Window(spec, rows, columns)


Slices = Mapping[str, Slice | None]  # by name, or else by pattern, the first that fits; None: the tensor is not held


def windows(specs: Iterable[TensorSpec], slices: Slices) -> "dict[str, Window]":
    """What is held of tensors, by name, of those of which anything is."""
    patterns = [(pattern, held) for pattern, held in slices.items() if not _SIGNS.isdisjoint(pattern)]
    found = {}
    for spec in specs:
        if spec.name in slices:
            held = slices[spec.name]
        else:
            held = next((held for pattern, held in patterns if fnmatchcase(spec.name, pattern)), Slice())
        if held is not None:
            found[spec.name] = held.of(spec)
    return found


_SIGNS = frozenset("*?[")


@dataclass(frozen=True)
class Window:
    """The rectangle of a tensor that is held."""

    tensor: TensorSpec
    rows: Span
    columns: Span

    @classmethod
    def around(cls, tensor: TensorSpec) -> "Window":
        """All of a tensor."""
        return cls(tensor, (0, tensor.rows), (0, tensor.columns))

    @property
    def whole(self) -> bool:
        return (self.rows, self.columns) == ((0, self.tensor.rows), (0, self.tensor.columns))

    @property
    def local(self) -> TensorSpec:
        """The tensor as the worker has it."""
        rows, columns = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        if columns == self.tensor.columns and self.tensor.shape:
            shape = (rows, *self.tensor.shape[1:])
        elif self.tensor.shape:
            shape = (rows, columns)
        else:
            shape = ()
        return replace(self.tensor, shape=shape, row_cuts=(), column_cuts=())

    def place(self, tile: Tile) -> "LocalTile | None":
        """Where a tile of the tensor lies here; None if no weight of it does."""
        top, bottom = max(tile.row, self.rows[0]), min(tile.row + tile.rows, self.rows[1])
        left, right = max(tile.column, self.columns[0]), min(tile.column + tile.columns, self.columns[1])
        if top >= bottom or left >= right:
            return None
        if self.whole:
            return LocalTile(tile, True)
        here = replace(tile, tensor=self.local, row=tile.row - self.rows[0], column=tile.column - self.columns[0])
        return LocalTile(here, (bottom - top) * (right - left) == tile.size)


class TileStorage(Protocol):
    """Where a tile lies in a process."""

    @property
    def tile(self) -> Tile | None:
        """The tile in the tensor that holds it; None where no one tensor does."""
        ...

    @property
    def whole(self) -> bool: ...
    def read(self, flat: Bits, number: int) -> Bits: ...
    def keep(self, change: BlockChange) -> BlockChange | None: ...
    def write(self, flat: Bits, change: BlockChange) -> None: ...
    def write_block(self, flat: Bits, number: int, bits: Bits) -> None: ...


@dataclass(frozen=True)
class LocalTile:
    """A tile in the worker's own coordinates. If it sticks out of what is held, it begins or ends outside."""

    tile: Tile
    whole: bool

    def read(self, flat: Bits, number: int) -> Bits:
        """The weights of one of the tile's blocks; those that are not held read as zero."""
        if self.whole:
            return self.tile.read_block(flat, number)
        begin = number * BLOCK
        positions = np.arange(min(BLOCK, self.tile.size - begin)) + begin
        held = self._held(positions)
        out = np.zeros(positions.size, flat.dtype)
        out[held] = flat[self.tile.flat_indices(positions[held])]
        return out

    def keep(self, change: BlockChange) -> BlockChange | None:
        """What of a change falls on weights that are held."""
        if self.whole:
            return change
        held = self._held(change.tile_positions())
        if not held.any():
            return None
        return BlockChange(change.number, change.positions[held], change.old[held], change.new[held])

    def write_block(self, flat: Bits, number: int, bits: Bits) -> None:
        """Write a whole block of the tile, as far as it is held."""
        if self.whole:
            self.tile.write_block(flat, number, bits)
        elif kept := self.keep(BlockChange.from_zeros(number, bits)):
            self.write(flat, kept)

    def write(self, flat: Bits, change: BlockChange) -> None:
        if not self.tile.contiguous or not self.whole:
            flat[self.tile.flat_indices(change.tile_positions())] = change.new
            return
        begin = self.tile.start + change.number * BLOCK
        kernels.active().scatter(flat[begin : begin + BLOCK], change.positions, change.new)

    def _held(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        rows, columns = np.divmod(positions, self.tile.columns)
        rows, columns = rows + self.tile.row, columns + self.tile.column
        inside: NDArray[np.bool_] = (rows >= 0) & (rows < self.tile.tensor.rows)
        return inside & (columns >= 0) & (columns < self.tile.tensor.columns)


@dataclass(frozen=True)
class WidenedTile:
    """A tile of a BF16 tensor in FP32 memory: each value is there as the FP32 number that it is.

    The upper half of an FP32 number is a BF16 number, and they are equal where the lower half is zero. Flat arrays are
    those of the FP32 tensor, blocks and changes are in BF16.
    """

    place: LocalTile

    @property
    def tile(self) -> Tile:
        """The tile in the local tensor, whose dtype is another than the run's."""
        return replace(self.place.tile, tensor=replace(self.place.tile.tensor, dtype="F32"))

    @property
    def whole(self) -> bool:
        return self.place.whole

    def read(self, flat: Bits, number: int) -> Bits:
        return np.ascontiguousarray(self._halves(flat, number)[1::2])

    def exact(self, flat: Bits, number: int) -> bool:
        """Whether all numbers of a block are ones that BF16 has."""
        return not self._halves(flat, number)[::2].any()

    def keep(self, change: BlockChange) -> BlockChange | None:
        return self.place.keep(change)

    def write(self, flat: Bits, change: BlockChange) -> None:
        self.place.write(flat, replace(change, new=_widen(change.new)))

    def write_block(self, flat: Bits, number: int, bits: Bits) -> None:
        self.place.write_block(flat, number, _widen(bits))

    def _halves(self, flat: Bits, number: int) -> Bits:
        """The lower half of each number and then its upper half, as it is in memory."""
        return self.place.read(flat, number).view("<u2")


def _widen(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)
