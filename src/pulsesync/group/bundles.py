"""How weights travel between processes that have different parts of a model: in bundles on which all of them agree.

A model is cut wherever the part of any process ends. Small pieces that are local to the same processes are concatenated
into one bundle, so that twenty thousand tensors cost no more than their weights do; large pieces are a bundle each. A
bundle is a tensor of one dimension and one tile: in that form it is diffed, coded, checked and written as everything
else is, wherever its pieces lie in memory.
"""

import hashlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from pulsesync.state.slices import Memory, Window
from pulsesync.state.views import HostSource

SMALL = 1 << 18  # weights below which a piece shares a bundle with others: larger pieces are compared faster in place
DIRECT = 1 << 17  # weights above which a run in a bundle is compared in place, not gathered first
FEW = 1 << 13  # average weights of a run above which samples are read from each run rather than from a gathered bundle
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
        rows_fit = top <= self.row and self.row + self.rows <= bottom
        return rows_fit and left <= self.column and self.column + self.columns <= right

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
    """Compute what is sent from the descriptions of all ranks; every rank computes the same.

    Raises:
        StateError: the ranks do not have the same model; FormatError: a description is malformed.
    """
    read = [windows_from(note[4:]) for note in notes]
    ties = {alias: name for rank in sources for alias, name in read[rank][1].items()}
    everyones = [_untied(rank, windows, own, ties, sends=rank in sources) for rank, (windows, own) in enumerate(read)]
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


def _untied(
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
    """Compute the bundles from the windows of all ranks; every rank computes the same.

    Raises:
        StateError: ranks have different tensors under one name, or weights that no source has.
    """
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
                if piece.rows > 1 and any(_is_wider(everyones[rank][piece.tensor], piece) for rank in holders):
                    apart.add(piece)
    rows = []  # in the order in which the pieces of each set of ranks first appear, whatever the ranks are
    for (dtype, owner, holders), pieces in groups.items():
        rows += [(dtype, owner, holders, bundle) for bundle in _bundles(pieces)]
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


def _is_wider(window: Window, piece: TensorRegion) -> bool:
    """Whether a process has more columns than a piece, whose rows are then not contiguous."""
    return window.columns != (piece.column, piece.column + piece.columns)


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


class Bundle:
    """A bundle in the memory of a process: a tile whose weights lie in several places.

    Has the interface of `LocalTile`.

    What it returns is valid until the same thread reads another bundle.
    """

    whole = True
    splits_coding_group = False
    tile: Tile | None = None  # it is not in one tensor

    def __init__(self, tiles: Sequence[Tile], published: HostSource, copies: Sequence[Sequence[Bits]]) -> None:
        self._tiles, self._published, self._copies = tiles, published, copies
        self._starts: NDArray[np.int64] = np.cumsum([0, *(tile.size for tile in tiles)])
        flats = [published.views[tile.tensor.name].flat for tile in tiles]
        # the weights of each tile, if each is contiguous and published without a cast
        self._runs: list[Bits] | None = None
        if all(tile.contiguous and tile.tensor.name not in published.dtypes for tile in tiles):
            self._runs = [flat[tile.start : tile.start + tile.size] for tile, flat in zip(tiles, flats, strict=True)]
        self._memory = [(flat, *others) for flat, others in zip(flats, copies, strict=True)]

    def read(self, memory: Memory, number: int) -> Bits:
        """The weights of one block, as they are published: a view if they are contiguous."""
        begin = number * BLOCK
        return self.read_range(begin, min(begin + BLOCK, int(self._starts[-1])))

    def read_range(self, begin: int, end: int) -> Bits:
        runs = list(self._in(begin, end)) if self._runs is None else self._as_they_are(self._runs, begin, end)
        return runs[0] if len(runs) == 1 else np.concatenate(runs, out=_scratch(end - begin, runs[0].dtype))

    def _as_they_are(self, runs: list[Bits], begin: int, end: int) -> list[Bits]:
        first, last = (int(n) - 1 for n in np.searchsorted(self._starts, (begin, end - 1), "right"))
        some = runs[first : last + 1]
        some[-1] = some[-1][: end - int(self._starts[last])]
        some[0] = some[0][begin - int(self._starts[first]) :]
        return some

    def _in(self, begin: int, end: int) -> Iterator[Bits]:
        for n, a, b in self._parts(begin, end):
            yield self._published.read(self._tiles[n], a, b)

    def changed(self, number: int, old: Bits) -> BlockChange | None:
        """The changes of a block; large runs are compared in place."""
        begin = number * BLOCK
        if self._runs is None:
            return _change(number, [(0, *kernels.active().changed(old, self.read_range(begin, begin + old.size)))])
        found, at, waiting = [], 0, list[Bits]()
        for run in [*self._as_they_are(self._runs, begin, begin + old.size), None]:
            if waiting and (run is None or run.size >= DIRECT):
                size = sum(map(len, waiting))
                new = waiting[0] if len(waiting) == 1 else np.concatenate(waiting, out=_scratch(size, old.dtype))
                found.append((at, *kernels.active().changed(old[at : at + size], new)))
                at, waiting = at + size, []
            if run is not None and run.size < DIRECT:
                waiting.append(run)
            elif run is not None:
                found.append((at, *kernels.active().changed(old[at : at + run.size], run)))
                at += run.size
        return _change(number, found)

    def pick(self, number: int, positions: NDArray[np.uint32]) -> Bits:
        """The weights at some positions of a block."""
        if self._runs is None or positions.size * 64 > BLOCK or len(self._runs) * FEW > self._starts[-1]:
            out: Bits = kernels.active().pick(self.read({}, number), positions)
            return out
        out = np.empty(positions.size, self._runs[0].dtype)
        begin = number * BLOCK
        borders = np.searchsorted(positions, np.maximum(self._starts - begin, 0))
        for n in np.flatnonzero(borders[1:] > borders[:-1]).tolist():
            some = slice(borders[n], borders[n + 1])
            out[some] = self._runs[n][positions[some].astype(np.int64) + (begin - int(self._starts[n]))]
        return out

    def keep(self, change: BlockChange) -> BlockChange:
        return change

    def write(self, memory: Memory, change: BlockChange) -> None:
        begin = change.number * BLOCK
        borders = np.searchsorted(change.positions, np.maximum(self._starts - begin, 0))
        touched = np.flatnonzero(borders[1:] > borders[:-1])
        counts = borders[touched + 1] - borders[touched]
        inside: NDArray[np.int64] = np.repeat(begin - self._starts[touched], counts)
        inside += change.positions  # from the start of their tiles
        ends = borders[touched + 1].tolist()
        for n, first, last in zip(touched.tolist(), borders[touched].tolist(), ends, strict=True):
            self._write_some(n, inside[first:last], change.new[first:last])

    def _write_some(self, n: int, positions: NDArray[np.int64], new: Bits) -> None:
        if self._runs is not None and positions.size > FEW:
            kernels.active().scatter(self._runs[n], positions, new)
        elif self._runs is not None:
            self._runs[n][positions] = new
        else:
            self._memory[n][0][self._tiles[n].flat_indices(positions)] = new
        for other in self._copies[n]:
            other[self._tiles[n].flat_indices(positions)] = new

    def write_block(self, memory: Memory, number: int, bits: Bits) -> None:
        begin, at = number * BLOCK, 0
        if self._runs is not None and not any(self._copies):
            for run in self._as_they_are(self._runs, begin, begin + bits.size):
                run[:] = bits[at : at + run.size]
                at += run.size
            return
        for n, a, b in self._parts(begin, begin + bits.size):
            for flat in self._memory[n]:
                self._tiles[n].write(flat, a, bits[at : at + b - a])
            at += b - a

    def has(self, memory: Memory, number: int, bits: Bits) -> bool:
        return not any(self._copies) and np.array_equal(self.read(memory, number), bits)

    def untied(self) -> bool:
        """Whether a tensor differs from one that it is tied to."""
        return any(
            not np.array_equal(tile.read(other, 0, tile.size), tile.read(self._memory[n][0], 0, tile.size))
            for n, tile in enumerate(self._tiles)
            for other in self._copies[n]
        )

    def _parts(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The tiles that a range of weights covers: number, and begin and end in the tile."""
        n = int(np.searchsorted(self._starts, begin, "right")) - 1
        while begin < end:
            start, stop = int(self._starts[n]), int(self._starts[n + 1])
            yield n, begin - start, min(end, stop) - start
            begin, n = min(end, stop), n + 1


def _change(number: int, found: Sequence[tuple[int, NDArray[np.uint32], Bits, Bits]]) -> BlockChange | None:
    """One change of a block from the changes of its runs, given where each run begins."""
    some = [(positions + np.uint32(at) if at else positions, old, new) for at, positions, old, new in found]
    some = [one for one in some if one[0].size]
    if len(some) <= 1:
        return BlockChange(number, *some[0]) if some else None
    positions, old, new = (np.concatenate(column) for column in zip(*some, strict=True))
    return BlockChange(number, positions, old, new)


_local = threading.local()


def _scratch(size: int, dtype: "np.dtype[np.unsignedinteger]") -> Bits:
    """Memory of this thread, the same each time: new memory costs more than the copy into it."""
    if not hasattr(_local, "bytes") or _local.bytes.size < size * dtype.itemsize:
        _local.bytes = np.empty(size * dtype.itemsize, np.uint8)
    out: Bits = _local.bytes[: size * dtype.itemsize].view(dtype)
    return out


class LocalBundles:
    """All local bundles of a process: the memory of its tiles, to read and, on receivers, to write."""

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards) -> None:
        aliases: dict[str, list[str]] = {}
        for alias, name in wire.ties.items():
            aliases.setdefault(name, []).append(alias)
        self.places: dict[int, Bundle] = {}
        for tile in tiles:
            local, copies = [], []
            for piece in wire.pieces[tile.ordinal]:
                local.append(piece.local(shards.windows[piece.tensor]))
                copies.append(_apart(aliases.get(piece.tensor, ()), shards))
            self.places[tile.ordinal] = Bundle(local, shards.published, copies)

    def block(self, tile: Tile, number: int) -> Bits:
        return self.places[tile.ordinal].read_range(number * BLOCK, min((number + 1) * BLOCK, tile.size))

    def read(self, tile: Tile, begin: int, end: int) -> Bits:
        return self.places[tile.ordinal].read_range(begin, end)

    def changes(self, tiles: Iterable[Tile], old: Weights) -> Changes:
        """The changes of these bundles since the old weights."""
        jobs = [(tile, number) for tile in tiles for number in range(tile.block_count)]

        def block(job: tuple[Tile, int]) -> BlockChange | None:
            tile, number = job
            return self.places[tile.ordinal].changed(number, old.block(tile, number))

        found = zip(jobs, spread(block, jobs), strict=True)
        return {(tile.ordinal, number): change for (tile, number), change in found if change}


def _apart(aliases: Sequence[str], shards: Shards) -> list[Bits]:
    """The memory of names that are tied in the run but have their own tensors in this process."""
    return [shards.published.views[alias].flat for alias in aliases if alias in shards.published.views]


def bytes_of(tiles: Iterable[Tile]) -> int:
    return sum(tile.size * tile.tensor.kind.itemsize for tile in tiles)
