"""How weights travel between processes that have different parts of a model: in bundles on which all of them agree.

A model is cut wherever the part of any process ends. Small pieces that are local to the same processes are concatenated
into one bundle, so that twenty thousand tensors cost no more than their weights do; large pieces are a bundle each. A
bundle is a tensor of one dimension and one tile: in that form it is diffed, coded, checked and written as everything
else is, wherever its pieces lie in memory.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec, Tile
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.weights import Changes, Weights
from pulsesync.state.sharding import Shards, Windows, layout_of, windows_from, windows_to
from pulsesync.state.slices import GatheredTile, LocalTile, Memory, Window

SMALL = 1 << 18  # weights below which a piece shares a bundle with others: larger pieces are compared faster in place
DIRECT = 1 << 17  # average weights of a piece above which the pieces of a bundle are compared in place, not gathered
FEW = 1 << 13  # average weights of a piece above which some weights are read from each rather than from all, gathered
LARGE = 1 << 24  # weights above which a piece is split, by rows


@dataclass(frozen=True)
class TensorRegion:
    """A rectangle of a checkpoint's tensor."""

    tensor: str
    row: int
    column: int
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def inside(self, window: Window | None) -> bool:
        if window is None:
            return False
        (top, bottom), (left, right) = window.rows, window.columns
        return top <= self.row <= bottom - self.rows and left <= self.column <= right - self.columns

    def local(self, window: Window, ordinal: int = 0) -> Tile:
        """The piece in the coordinates of a process's local tensor."""
        row, column = self.row - window.rows[0], self.column - window.columns[0]
        return Tile(ordinal, window.local, row, column, self.rows, self.columns)


@dataclass(frozen=True)
class BundlePlan:
    """What is sent: bundles, the pieces in them, and the source that sends each."""

    layout: Layout
    pieces: tuple[tuple[TensorRegion, ...], ...]  # of each tile of the layout
    owners: tuple[int, ...]  # of each tile, by place among the sources
    holders: tuple[frozenset[int], ...]  # of each tile: the ranks that have all of it
    ties: Mapping[str, str]
    gathered: frozenset[int] = frozenset()  # tiles that a rank does not have in contiguous memory: a GPU gathers them

    @cached_property
    def id(self) -> str:
        h = hashlib.sha256(f"{self.layout.id} {sorted(self.ties.items())}".encode())
        for pieces, owner in zip(self.pieces, self.owners, strict=True):
            h.update(repr((owner, [(p.tensor, p.row, p.column, p.rows, p.columns) for p in pieces])).encode())
        return h.hexdigest()

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The weights of each tile."""
        return np.array([tile.size for tile in self.layout.tiles], np.int64)

    @cached_property
    def itemsizes(self) -> NDArray[np.int64]:
        """The bytes of a weight of each tile."""
        return np.array([tile.tensor.kind.itemsize for tile in self.layout.tiles], np.int64)

    def local_to(self, rank: int) -> list[Tile]:
        return [tile for tile in self.layout.tiles if rank in self.holders[tile.ordinal]]

    def owned_by(self, source: int) -> list[Tile]:
        return [tile for tile in self.layout.tiles if self.owners[tile.ordinal] == source]


def describe_shards(shards: Shards) -> bytes:
    """Describe the shards of a rank, for `agree`."""
    return (b"some" if shards.partial else b"all ") + windows_to(shards)


def agree(notes: Sequence[bytes], sources: Sequence[int]) -> BundlePlan:
    """Compute what is sent, the same on every rank. Raises: StateError: the models differ; FormatError: bad bytes."""
    read = [windows_from(note[4:]) for note in notes]
    ties = {alias: name for rank in sources for alias, name in read[rank][1].items()}
    everyones = [_without_ties(rank, of, own, ties, sends=rank in sources) for rank, (of, own) in enumerate(read)]
    wire = wire_of(everyones, sources, ties)
    names = {piece.tensor for pieces in wire.pieces for piece in pieces}
    for rank, windows in enumerate(everyones):
        if notes[rank][:4] == b"all " and (missing := sorted(names - windows.keys())):
            raise StateError(
                f"rank {rank} does not have tensor {missing[0]!r} of the sources ({len(missing)} tensors are "
                "missing); give every rank the model of the sources",
                tensor=missing[0],
            )
    for holders, pieces in zip(wire.holders, wire.pieces, strict=True):
        if holders <= set(sources) and len(notes) > len(sources):
            raise StateError(
                f"no receiver has rows {pieces[0].row} to {pieces[0].row + pieces[0].rows} of tensor "
                f"{pieces[0].tensor!r}, which a source has: place them on a receiver, or leave the tensor out",
                tensor=pieces[0].tensor,
            )
    return wire


def _without_ties(
    rank: int, windows: Windows, own: Mapping[str, str], ties: Mapping[str, str], sends: bool
) -> dict[str, Window]:
    """The windows of a rank, without the names that the sources tie to others."""
    for alias, name in own.items():
        if ties.get(alias) != name:
            raise StateError(
                f"rank {rank} ties {alias!r} to {name!r}, and the sources do not: give each its own memory on that "
                "rank",
                tensor=alias,
            )
    for alias in windows.keys() & ties.keys():
        apart, tied = windows[alias], windows.get(ties[alias])
        if tied is None or replace(apart, tensor=replace(apart.tensor, name=ties[alias])) != tied:
            raise StateError(
                f"rank {rank} has another shard of {alias!r} than of {ties[alias]!r}, to which the sources tie "
                "it; shard both alike",
                tensor=alias,
            )
        if sends and apart.local.size:
            raise StateError(
                f"a source ties {alias!r} to {ties[alias]!r}, and rank {rank} does not; tie both on every source",
                tensor=alias,
            )
    return {name: window for name, window in windows.items() if name not in ties}


def wire_of(everyones: Sequence[Windows], sources: Sequence[int], ties: Mapping[str, str]) -> BundlePlan:
    """Compute the bundles from the windows of all ranks. Raises: StateError: they differ, or no source has a weight."""
    groups: dict[tuple[str, int, frozenset[int]], list[TensorRegion]] = {}
    apart = set[TensorRegion]()  # regions that are not contiguous on a rank
    for tile in layout_of(everyones).tiles:
        for piece in _split(tile):
            holders = frozenset(n for n, windows in enumerate(everyones) if piece.inside(windows.get(piece.tensor)))
            owner = next((place for place, rank in enumerate(sources) if rank in holders), None)
            if owner is None and holders:
                raise StateError(
                    f"rank {min(holders)} has rows {piece.row} to {piece.row + piece.rows} of tensor "
                    f"{piece.tensor!r}, and no source has them: place them on a source, or leave the tensor out "
                    "on that rank",
                    tensor=piece.tensor,
                )
            if owner is not None:
                groups.setdefault((tile.tensor.dtype, owner, holders), []).append(piece)
                columns = piece.column, piece.column + piece.columns  # of a rank with more, the rows lie apart
                if piece.rows > 1 and any(everyones[rank][piece.tensor].columns != columns for rank in holders):
                    apart.add(piece)
    # In the order in which the pieces of each set of ranks first appear, whatever the ranks are.
    rows = [(*key, bundle) for key, pieces in groups.items() for bundle in _bundles(pieces)]
    rows.sort(key=lambda row: _is_gathered(row[3], apart))  # last, as the GPU's tables have them; the rest in order
    specs = [TensorSpec(f"{n:08d}", row[0], (sum(p.size for p in row[3]),)) for n, row in enumerate(rows)]
    return BundlePlan(
        layouts.make(specs),
        tuple(tuple(row[3]) for row in rows),
        tuple(row[1] for row in rows),
        tuple(row[2] for row in rows),
        dict(ties),
        frozenset(n for n, row in enumerate(rows) if _is_gathered(row[3], apart)),
    )


def _is_gathered(pieces: Sequence[TensorRegion], apart: Collection[TensorRegion]) -> bool:
    return len(pieces) > 1 or pieces[0] in apart


def _split(tile: Tile) -> Iterator[TensorRegion]:
    if not tile.size:
        return
    step = max(1, LARGE // tile.columns)
    for begin in range(0, tile.rows, step):
        rows = min(step, tile.rows - begin)
        yield TensorRegion(tile.tensor.name, tile.row + begin, tile.column, rows, tile.columns)


def _bundles(pieces: Sequence[TensorRegion]) -> Iterator[list[TensorRegion]]:
    """Group pieces: large ones alone, small ones together."""
    open_, size = list[TensorRegion](), 0
    for piece in pieces:
        if piece.size >= SMALL:
            yield [piece]
            continue
        open_.append(piece)
        size += piece.size
        if size >= BLOCK:
            yield open_
            open_, size = [], 0
    if open_:
        yield open_


def places_of(wire: BundlePlan, tiles: Iterable[Tile], shards: Shards) -> dict[int, LocalTile | GatheredTile]:
    """Where bundles lie in the tensors of a rank: contiguous, or in pieces that are gathered."""
    found: dict[int, LocalTile | GatheredTile] = {}
    for tile in tiles:
        local = [piece.local(shards.windows[piece.tensor], tile.ordinal) for piece in wire.pieces[tile.ordinal]]
        places = [LocalTile(piece, True) for piece in local]
        gathered = tile.ordinal in wire.gathered
        found[tile.ordinal] = GatheredTile(replace(tile, pieces=tuple(local)), places) if gathered else places[0]
    return found


def pick(place: LocalTile | GatheredTile, memory: Memory, number: int, positions: NDArray[np.uint32]) -> Bits:
    """The weights at some positions of a block of a bundle."""
    begin, end = place.tile.block_range(number)
    if (
        isinstance(place, GatheredTile)
        and positions.size * 64 <= BLOCK
        and len(place.places) * FEW <= place.tile.size
        and (views := place.views(memory, 0, place.tile.size)) is not None
    ):
        out = np.empty(positions.size, views[0].dtype)
        for n, some, inside in place.by_piece(positions.astype(np.int64) + begin):
            out[some] = views[n][inside]
        return out
    found: Bits = kernels.active().pick(place.read(memory, begin, end), positions)
    return found


class LocalBundles:
    """The bundles that a rank sends, in its tensors, as they are published."""

    def __init__(self, wire: BundlePlan, tiles: Iterable[Tile], shards: Shards) -> None:
        self._places, self._published = places_of(wire, tiles, shards), shards.published
        self._memory = {name: (view.flat,) for name, view in shards.published.views.items()}
        cast = self._published.dtypes.keys()
        self._cast = {ordinal for ordinal, place in self._places.items() if not cast.isdisjoint(place.tile.names)}

    def read(self, tile: Tile, begin: int, end: int) -> Bits:
        """The weights of a bundle from begin to end: a view where they are contiguous and not cast."""
        place = self._places[tile.ordinal]
        if isinstance(place, LocalTile):
            found: Bits = self._published.read(place.tile, begin, end)
            return found
        if tile.ordinal not in self._cast:
            return place.read(self._memory, begin, end)
        return np.concatenate([self._published.read(place.local[n], a, b) for n, a, b in place.parts(begin, end)])

    def block(self, tile: Tile, number: int) -> Bits:
        return self.read(tile, *tile.block_range(number))

    def changes(self, tiles: Iterable[Tile], old: Weights) -> Changes:
        """The changes of these bundles since the old weights."""
        jobs = [(tile, number) for tile in tiles for number in range(tile.block_count)]
        found = zip(jobs, spread(lambda job: self._change(*job, old.block(*job)), jobs), strict=True)
        return {(tile.ordinal, number): change for (tile, number), change in found if change}

    def _change(self, tile: Tile, number: int, old: Bits) -> BlockChange | None:
        """The changes of a block; large pieces are compared in place."""
        place, runs = self._places[tile.ordinal], None
        large = isinstance(place, GatheredTile) and len(place.places) * DIRECT <= tile.size
        if isinstance(place, GatheredTile) and large and tile.ordinal not in self._cast:
            runs = place.views(self._memory, *tile.block_range(number))
        found, at = [], 0
        for new in runs or [self.block(tile, number)]:
            positions, before, after = kernels.active().changed(old[at : at + new.size], new)
            if positions.size:
                found.append((positions + np.uint32(at) if at else positions, before, after))
            at += new.size
        if len(found) > 1:
            positions, before, after = (np.concatenate(column) for column in zip(*found, strict=True))
            return BlockChange(number, positions, before, after)
        return BlockChange(number, *found[0]) if found else None


def receiver_tensors(published: Any, ties: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The tensors of a receiver, flat; and, by name, those that are tied to one in the group but not here."""
    flats = {name: view.flat for name, view in published.views.items() if view.spec.size}
    copies: dict[str, list[Any]] = {}
    for alias in flats.keys() & ties.keys():
        copies.setdefault(ties[alias], []).append(flats.pop(alias))
    return flats, copies


def bytes_of(tiles: Iterable[Tile]) -> int:
    return sum(tile.size * tile.tensor.kind.itemsize for tile in tiles)
