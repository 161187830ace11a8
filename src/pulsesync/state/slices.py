"""Slices of tensors: rectangles that a worker has, and where the tiles of a run lie in them."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.arguments import is_whole
from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec, Tile
from pulsesync.errors import StateError
from pulsesync.format.layout import Layout

FIRST = 1 << 9  # weights of a block that are compared before all of them are
MANY = 1 << 6  # pieces from which on a kernel gathers them: for fewer, calling it takes longer than doing without it
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

    def __post_init__(self) -> None:
        for name, span in (("rows", self.rows), ("columns", self.columns)):
            is_span = isinstance(span, tuple | list) and len(span) == 2 and all(map(is_whole, span))
            if span is not None and not is_span:
                raise TypeError(f"{name} must be None or two whole numbers, first and end; got {span!r:.80}")

    def of(self, spec: TensorSpec) -> "Window":
        """Raises: StateError, if the tensor has no such rows or columns."""
        rows, columns = self.rows or (0, spec.rows), self.columns or (0, spec.columns)
        for (begin, end), size in ((rows, spec.rows), (columns, spec.columns)):
            if not 0 <= begin <= end <= size:
                raise StateError(
                    f"tensor {spec.name!r} has no slice {begin}:{end}: its size is {size}; give one inside 0:{size}",
                    tensor=spec.name,
                )
        return Window(spec, rows, columns)


Slices = Mapping[str, Slice | None]  # by name, or else by pattern, the first that fits; None: the tensor is not local


def place_tile(tile: Tile, local: "Mapping[str, Window]", wide: Collection[str] = ()) -> "TileStorage | None":
    """Where a tile lies in the local tensors, of which some are FP32 (wide); None if none of its weights is local."""
    found = []
    for piece in tile.pieces or (tile,):
        name = piece.tensor.name
        place = local[name].place(piece) if name in local else None
        found.append(WidenedTile(place) if place and name in wide else place)
    if not any(found):
        return None
    return GatheredTile(tile, found) if tile.pieces else found[0]


def find_places(layout: Layout, slices: Slices, wide: Collection[str] = ()) -> "dict[int, TileStorage]":
    """Where the tiles of a run lie in the local tensors, by ordinal; wide: tensors that are FP32 in the model."""
    local = windows(layout.tensors, slices)
    found = {tile.ordinal: place_tile(tile, local, wide) for tile in layout.tiles if tile.size}
    return {ordinal: place for ordinal, place in found.items() if place}


def windows(specs: Iterable[TensorSpec], slices: Slices) -> "dict[str, Window]":
    """The local windows of tensors, by name, of those that are local in part or completely."""
    patterns = [(pattern, local) for pattern, local in slices.items() if not _SIGNS.isdisjoint(pattern)]
    found = {}
    for spec in specs:
        by_pattern = (local for pattern, local in patterns if fnmatchcase(spec.name, pattern))
        local = slices[spec.name] if spec.name in slices else next(by_pattern, Slice())
        if local is not None:
            found[spec.name] = local.of(spec)
    return found


_SIGNS = frozenset("*?[")


@dataclass(frozen=True)
class Window:
    """The rectangle of a tensor that is local."""

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
        shape = (rows, *self.tensor.shape[1:]) if columns == self.tensor.columns else (rows, columns)
        return replace(self.tensor, shape=shape if self.tensor.shape else (), row_cuts=(), column_cuts=())

    def place(self, tile: Tile) -> "LocalTile | None":
        """Where a piece of the tensor lies in this window; None if none of its weights does."""
        top, bottom = max(tile.row, self.rows[0]), min(tile.row + tile.rows, self.rows[1])
        left, right = max(tile.column, self.columns[0]), min(tile.column + tile.columns, self.columns[1])
        if top >= bottom or left >= right:
            return None
        if self.whole:
            return LocalTile(tile, True)
        here = replace(tile, tensor=self.local, row=tile.row - self.rows[0], column=tile.column - self.columns[0])
        return LocalTile(here, (bottom - top) * (right - left) == tile.size)


# By name: a flat tensor, and then the tensors tied to it that have their own memory.
Memory = Mapping[str, Sequence[Bits]]


@dataclass(frozen=True)
class LocalTile:
    """A tile in the worker's own coordinates. One that is only partly local begins or ends outside its tensor."""

    tile: Tile
    whole: bool  # whether all of it is local

    @property
    def splits_coding_group(self) -> bool:
        """Whether weights that are coded together are partly local, which rules out coding against old weights."""
        return not self.whole

    def read(self, memory: Memory, begin: int, end: int) -> Bits:
        """The weights of the tile from begin to end; those that are not local read as zero."""
        flat = memory[self.tile.tensor.name][0]
        if self.whole:
            return self.tile.read(flat, begin, end)
        positions = np.arange(begin, end)
        local = self.is_local(positions)
        out = np.zeros(positions.size, flat.dtype)
        out[local] = flat[self.tile.flat_indices(positions[local])]
        return out

    def keep(self, change: BlockChange) -> BlockChange | None:
        """The part of a change that is in local weights."""
        return change if self.whole else kept_of(change, self.is_local(change.tile_positions()))

    def write_range(self, memory: Memory, begin: int, bits: Bits) -> None:
        """Write weights of the tile, from the one numbered begin on, as far as they are local."""
        for flat in memory[self.tile.tensor.name]:
            if self.whole:
                self.tile.write(flat, begin, bits)
                continue
            positions = np.arange(begin, begin + bits.size)
            local = self.is_local(positions)
            flat[self.tile.flat_indices(positions[local])] = bits[local]

    def has(self, memory: Memory, begin: int, bits: Bits) -> bool:
        """Whether `write_range` would change nothing; may also return False if a comparison would take long."""
        flats = memory[self.tile.tensor.name]
        return self.whole and all(_same(self.tile.read(flat, begin, begin + bits.size), bits) for flat in flats)

    def write(self, memory: Memory, change: BlockChange) -> None:
        for flat in memory[self.tile.tensor.name]:
            if not self.tile.contiguous or not self.whole:
                flat[self.tile.flat_indices(change.tile_positions())] = change.new
            else:
                begin, end = self.tile.start + change.number * BLOCK, self.tile.start + self.tile.size
                kernels.active().scatter(flat[begin:end], change.positions, change.new)

    def is_local(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which positions of the tile are local."""
        rows, columns = np.divmod(positions, self.tile.columns)
        rows, columns = rows + self.tile.row, columns + self.tile.column
        inside: NDArray[np.bool_] = (rows >= 0) & (rows < self.tile.tensor.rows)
        return inside & (columns >= 0) & (columns < self.tile.tensor.columns)


def _same(a: Bits, b: Bits) -> bool:
    """Whether all bits are the same; if they differ, the first few usually show it."""
    return np.array_equal(a[:FIRST], b[:FIRST]) and np.array_equal(a, b)


def kept_of(change: BlockChange, local: NDArray[np.bool_]) -> BlockChange | None:
    """The changes that a mask selects, if any."""
    if local.all():
        return change
    if not local.any():
        return None
    return BlockChange(change.number, change.positions[local], change.old[local], change.new[local])


@dataclass(frozen=True)
class WidenedTile:
    """A tile of a BF16 tensor in FP32 memory: each value is stored as the FP32 number that equals it.

    The upper half of an FP32 number is a BF16 number, and they are equal where the lower half is zero. The memory is
    that of the FP32 tensor, blocks and changes are in BF16.
    """

    place: LocalTile

    @property
    def tile(self) -> Tile:
        """The tile in the local tensor, whose dtype differs from the run's."""
        return replace(self.place.tile, tensor=replace(self.place.tile.tensor, dtype="F32"))

    @property
    def whole(self) -> bool:
        return self.place.whole

    @property
    def splits_coding_group(self) -> bool:
        return self.place.splits_coding_group

    def read(self, memory: Memory, begin: int, end: int) -> Bits:
        return np.ascontiguousarray(self._halves(memory, begin, end)[1::2])

    def exact(self, memory: Memory, number: int) -> bool:
        """Whether all numbers of a block can be represented in BF16."""
        return not self._halves(memory, *self.place.tile.block_range(number))[::2].any()

    def keep(self, change: BlockChange) -> BlockChange | None:
        return self.place.keep(change)

    def is_local(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        return self.place.is_local(positions)

    def write(self, memory: Memory, change: BlockChange) -> None:
        self.place.write(memory, replace(change, new=_widen(change.new)))

    def write_range(self, memory: Memory, begin: int, bits: Bits) -> None:
        self.place.write_range(memory, begin, _widen(bits))

    def has(self, memory: Memory, begin: int, bits: Bits) -> bool:
        return self.place.has(memory, begin, _widen(bits))

    def _halves(self, memory: Memory, begin: int, end: int) -> Bits:
        """The lower half of each number and then its upper half, as they are in memory."""
        return self.place.read(memory, begin, end).view("<u2")


def _widen(bits: Bits) -> Bits:
    return bits.astype(np.uint32) << np.uint32(16)


class GatheredTile:
    """A tile whose pieces lie in several places of the process: gathered to be read, scattered to be written.

    A bundle of a run, or of the tensors that ranks of a group send each other. A piece of which nothing is local has
    None for a place.
    """

    def __init__(self, tile: Tile, places: Sequence[LocalTile | WidenedTile | None]) -> None:
        self.places = places
        self._found: tuple[Memory, _PieceViews | None] | None = None
        self.starts: NDArray[np.int64] = np.cumsum([0, *(piece.size for piece in tile.pieces)])
        local = [place is not None and place.whole for place in places]
        self.whole = all(local)
        kept: tuple[int, ...] | None = None
        if not self.whole:  # the groups that are completely local
            whole = np.logical_and.reduceat(local, np.searchsorted(self.starts, tile.groups[:-1]))
            kept = tuple(np.flatnonzero(whole).tolist())
        self.tile = replace(tile, kept=kept)

    @cached_property
    def splits_coding_group(self) -> bool:
        """Whether a group is partly local."""
        if self.whole:
            return False
        groups = np.searchsorted(self.tile.groups, self.starts[:-1], "right") - 1
        whole = set(self.tile.kept or ())
        return any(place is not None and n not in whole for n, place in zip(groups.tolist(), self.places, strict=True))

    @cached_property
    def local(self) -> list[Tile]:
        """The local pieces, in the coordinates of the local tensors."""
        return [place.tile for place in self.places if place is not None]

    @cached_property
    def whole_tensors(self) -> list[str] | None:
        """The names of their tensors, if each is all of its tensor."""
        if any(tile.size < tile.tensor.size for tile in self.local):
            return None
        return [tile.tensor.name for tile in self.local]

    def views(self, memory: Memory, begin: int, end: int) -> list[Bits] | None:
        """The weights from begin to end, piece by piece, as views.

        None: a piece is not contiguous, partly local or widened, or its tensor has more than one memory.
        """
        if (found := self._locate(memory)) is None:
            return None
        first, last = self._pieces_in(begin, end)
        some = found.views[first:last]
        some[-1] = some[-1][: end - int(self.starts[last - 1])]
        some[0] = some[0][begin - int(self.starts[first]) :]
        return some

    def _pieces_in(self, begin: int, end: int) -> tuple[int, int]:
        """The first piece with weights from begin to end, and the one after the last."""
        return int(np.searchsorted(self.starts, begin, "right")) - 1, int(np.searchsorted(self.starts, end))

    def _locate(self, memory: Memory) -> "_PieceViews | None":
        """Where the pieces are, unless they need more than a view: see `views`.

        Slicing every tensor takes longer than copying its weights. So the views are stored with the memory that they
        point into, which stays alive with them.
        """
        if self._found is None or self._found[0] is not memory:
            plain = all(isinstance(place, LocalTile) and place.whole for place in self.places)
            alone = plain and all(tile.contiguous and len(memory[tile.tensor.name]) == 1 for tile in self.local)
            views = [memory[tile.tensor.name][0][tile.start : tile.start + tile.size] for tile in self.local if alone]
            self._found = memory, _PieceViews.of(views) if alone else None
        return self._found[1]

    def read(self, memory: Memory, begin: int, end: int) -> Bits:
        """The weights from begin to end; those that are not local read as zero."""
        kind = self.tile.tensor.kind.bits
        if (found := self._locate(memory)) is None:
            parts = ((self.places[n], a, b) for n, a, b in self.parts(begin, end))
            return np.concatenate(
                [place.read(memory, a, b) if place else np.zeros(b - a, kind) for place, a, b in parts]
            )
        first, last = self._pieces_in(begin, end)
        if found.addresses is None or last - first < MANY:
            return np.concatenate(self.views(memory, begin, end) or [])
        starts, addresses = self.starts[first : last + 1] - begin, found.addresses[first:last].copy()
        addresses[0] += 2 * (begin - int(self.starts[first]))
        out: Bits = np.empty(end - begin, kind)
        kernels.active().gather_runs(addresses, np.clip(starts, 0, out.size), out)
        return out

    def parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The pieces with weights from begin to end: number, and where these begin and end in the piece."""
        first, last = self._pieces_in(begin, end)
        for n, (start, stop) in enumerate(pairwise(self.starts[first : last + 1].tolist()), first):
            yield n, max(begin, start) - start, min(end, stop) - start

    def exact(self, memory: Memory, number: int) -> bool:
        """Whether all numbers that are wider in the model than in the run can be represented in the run's dtype."""
        return all(place.exact(memory, 0) for place in self.places if isinstance(place, WidenedTile))

    def keep(self, change: BlockChange) -> BlockChange | None:
        if self.whole:
            return change
        local = np.zeros(change.positions.size, np.bool_)
        for n, some, positions in self.by_piece(change.tile_positions()):
            place = self.places[n]
            local[some] = place is not None and (place.whole or place.is_local(positions))
        return kept_of(change, local)

    def write(self, memory: Memory, change: BlockChange) -> None:
        found = self._locate(memory)
        if found is not None and found.addresses is not None:
            starts = self.starts - change.number * BLOCK
            kernels.active().scatter_to_runs(found.addresses, starts, change.positions, change.new)
            return
        for n, some, positions in self.by_piece(change.tile_positions()):
            if found is not None:
                found.views[n][positions] = change.new[some]
            elif (place := self.places[n]) is not None:
                place.write(memory, BlockChange(0, positions.astype(np.uint32), change.old[some], change.new[some]))

    def by_piece(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, slice, NDArray[np.int64]]]:
        """For each piece that contains ascending positions: its number, which ones, and where they are in the piece."""
        borders = np.searchsorted(positions, self.starts)
        touched = np.flatnonzero(borders[1:] > borders[:-1])
        inside = positions - np.repeat(self.starts[touched], np.diff(borders)[touched])
        begins, ends = borders[touched].tolist(), borders[touched + 1].tolist()
        for n, begin, end in zip(touched.tolist(), begins, ends, strict=True):
            yield n, slice(begin, end), inside[begin:end]

    def write_range(self, memory: Memory, begin: int, bits: Bits) -> None:
        if (views := self.views(memory, begin, begin + bits.size)) is not None:
            at = 0
            for view in views:
                view[:] = bits[at : at + view.size]
                at += view.size
            return
        for place, first, some in self._some(begin, bits):
            place.write_range(memory, first, some)

    def has(self, memory: Memory, begin: int, bits: Bits) -> bool:
        if self._locate(memory) is not None:
            return np.array_equal(self.read(memory, begin, begin + bits.size), bits)
        return all(place.has(memory, first, some) for place, first, some in self._some(begin, bits))

    def _some(self, begin: int, bits: Bits) -> Iterator[tuple[LocalTile | WidenedTile, int, Bits]]:
        """Weights from begin on, by piece: its place, the first weight in it, and the weights."""
        at = 0
        for n, first, end in self.parts(begin, begin + bits.size):
            if (place := self.places[n]) is not None:
                yield place, first, bits[at : at + end - first]
            at += end - first


TileStorage = LocalTile | WidenedTile | GatheredTile  # where a tile lies in a process


class _PieceViews(NamedTuple):
    """Where the pieces of a tile are in some memory."""

    views: list[Bits]
    addresses: NDArray[np.uint64] | None  # for kernels; weights of other sizes than two bytes would need their own

    @classmethod
    def of(cls, views: list[Bits]) -> "_PieceViews":
        kernels_can = views[0].itemsize == 2
        return cls(views, np.array([view.ctypes.data for view in views], np.uint64) if kernels_can else None)
