"""The part of a sharded model that one process has: rectangles of tensors, in a checkpoint's coordinates.

A source (module, state dict or mapping) is read as shards. A DTensor knows which part of its tensor it is; a `Placed`
gives it for a plain tensor; everything else is a whole tensor.

    mine = shards_of(model, cast={"*": "BF16"})
    everyones = [windows_from(note)[0] for note in gather(windows_to(mine))]
    layout = layout_of(everyones)                       # cut where any process's part ends
    owner_of(layout, everyones)                         # of each tile: the first process that has all of it

No process needs the tensors of the others for this, only their windows. The tiles that a process owns are its
`TileShare`; a process that has the whole model owns all of them.
"""

import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from typing import Any

from pulsesync.core.types import Bits, TensorSpec, Tile
from pulsesync.errors import FormatError, StateError
from pulsesync.format import layout as layouts
from pulsesync.format.json_reader import load_json
from pulsesync.format.layout import Grid, Layout
from pulsesync.state.slices import GatheredTile, Slice, Slices, Span, TileStorage, Window, place_tile
from pulsesync.state.views import HostSource, SourceMarks, named, read_published

Read = Callable[[Mapping[str, Any], Mapping[str, str]], tuple[Any, Mapping[str, str]]]
MAX_NOTE_BYTES = 1 << 28  # of a process's windows, unpacked


@dataclass(frozen=True)
class Placed:
    """A plain tensor that is a rectangle of a checkpoint's tensor.

    Args:
        tensor: The weights, in the checkpoint's order; the tensor's own shape does not matter.
        shape: The shape of the checkpoint's tensor.
        rows: From (included) and to (excluded), along the first dimension of that shape; None for all.
        columns: The same along all other dimensions together.
    """

    tensor: Any
    shape: tuple[int, ...]
    rows: Span | None = None
    columns: Span | None = None


def tensor_parallel(
    state: Mapping[str, Any], rank: int, size: int, *, rows: Sequence[str] = (), columns: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a state with each tensor-parallel shard as `Placed`: even pieces of rows or columns, by name pattern.

    Args:
        state: This rank's tensors by name.
        rank: This rank.
        size: How many ranks share the model.
        rows: Name patterns of tensors of which each rank has some rows.
        columns: Name patterns of tensors of which each rank has some columns. A tensor that fits neither is complete on
            every rank.

    Raises:
        StateError: a tensor of one dimension fits a pattern of columns.
    """
    out: dict[str, Any] = {}
    for name, tensor in state.items():
        shape = tuple(int(n) for n in tensor.shape)
        if any(fnmatchcase(name, pattern) for pattern in rows):
            whole = (shape[0] * size, *shape[1:])
            out[name] = Placed(tensor, whole, rows=(shape[0] * rank, shape[0] * (rank + 1)))
        elif any(fnmatchcase(name, pattern) for pattern in columns):
            if len(shape) < 2:
                raise StateError(
                    f"tensor {name!r} has shape {shape}, so it cannot be split by columns: split it by rows",
                    tensor=name,
                )
            whole = (shape[0], shape[1] * size, *shape[2:])
            width = TensorSpec(name, "", shape).columns
            out[name] = Placed(tensor, whole, columns=(width * rank, width * (rank + 1)))
        else:
            out[name] = tensor
    return out


@dataclass(frozen=True)
class Shards:
    """The parts of tensors that a process has."""

    windows: Mapping[str, Window]  # by name; the tensor as the checkpoint has it, in the dtype that is published
    published: Any  # the weights, by the same names: `HostSource`, or the same on a device
    ties: Mapping[str, str]  # alias -> name
    partial: bool = False  # whether any tensor is a DTensor or `Placed`


@dataclass(frozen=True)
class ShardWeights:
    """Shards as weights to encode from: read and cast block by block."""

    published: HostSource
    places: Mapping[int, TileStorage]

    def block(self, tile: Tile, number: int) -> Bits:
        place = self.places[tile.ordinal]
        if isinstance(place, GatheredTile):
            return self.published.bundle(place.local, place.whole_tensors)
        return self.published.block(place.tile, number)


def shards_of(source: Any, cast: Mapping[str, str] | None = None, read: Read = read_published) -> Shards:
    """Read a module, state dict or mapping, whose values may be DTensors or `Placed`, as shards.

    read: how plain tensors are read; the default reads host memory only.

    Raises: StateError: a part that is not a rectangle of its tensor, or anything that `view_bits` refuses.
    """
    tensors = dict(named(source))
    parts = {name: part for name, value in tensors.items() if (part := _part(name, value))}
    published, ties = read(tensors | {name: part.tensor for name, part in parts.items()}, cast or {})
    windows, views = {}, {}
    for name, view in published.views.items():
        spec, part = published.spec(name), parts.get(name)
        if part is None:
            windows[name], views[name] = Window.around(spec), view
            continue
        spec = replace(spec, shape=tuple(part.shape))
        window = Slice(part.rows, part.columns).of(spec)
        if window.local.size != view.spec.size:
            raise StateError(
                f"tensor {name!r} has {view.spec.size} local weights; rows {window.rows} and columns {window.columns} "
                f"of {spec.shape} have {window.local.size}: correct the shard's rows and columns",
                tensor=name,
            )
        windows[name], views[name] = window, replace(view, spec=window.local)
    return Shards(windows, replace(published, views=views), ties, bool(parts))


def local_tensors(source: Any) -> dict[str, Any]:
    """The plain tensors of a source whose values may be DTensors or `Placed`. Raises: StateError."""
    return {name: part.tensor if (part := _part(name, value)) else value for name, value in named(source)}


def _part(name: str, value: Any) -> Placed | None:
    """The part of its tensor that a DTensor or `Placed` is; None for a plain tensor."""
    if isinstance(value, Placed):
        return value
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(value, module.DTensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise StateError(
            f"tensor {name!r}: DTensor has a Partial placement ({value.placements}); redistribute it first", tensor=name
        )
    whole, local = tuple(int(n) for n in value.shape), value.to_local()
    if value.device_mesh.get_coordinate() is None:  # this process has no part of it
        return Placed(local, whole, (0, 0) if whole else None)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if shape[2:] != whole[2:]:
        raise StateError(
            f"tensor {name!r} is split along dimension 2 or later ({value.placements}); only dimensions 0 and 1 are "
            "supported: redistribute it first",
            tensor=name,
        )
    rows = (int(offset[0]), int(offset[0] + shape[0])) if whole else None
    columns = None
    if len(whole) > 1 and shape[1] != whole[1]:
        width = TensorSpec(name, "", whole[1:]).columns
        columns = (int(offset[1]) * width, int(offset[1] + shape[1]) * width)
    if not local.numel():
        rows = (0, 0) if whole else None
    return Placed(local, whole, rows, columns)


# What processes send each other about their shards

Windows = Mapping[str, Window]


class SourceMemo:
    """The last source that was read: one with the same memory and casts need not be viewed again, at 1 µs a tensor."""

    def __init__(self) -> None:
        self._last: tuple[SourceMarks, Mapping[str, str], Shards] | None = None  # without the weights

    def find(self, source: Any, cast: Mapping[str, str]) -> Shards | None:
        """Return the shards of a source, if it is the last one."""
        if self._last is None or self._last[1] != cast or not self._last[0].fit(source):
            return None
        known = self._last[2]
        return replace(known, published=known.published.again(source))

    def keep(self, source: Any, cast: Mapping[str, str], shards: Shards) -> bool:
        """Remember the shards of a source without their weights; return whether it can be recognized."""
        marks = SourceMarks.of(source)
        kept = replace(shards, published=shards.published.without_weights())
        self._last = (marks, cast, kept) if marks is not None else None
        return marks is not None


def windows_to(shards: Shards) -> bytes:
    """Encode which parts a process has, and which names are tied."""
    table = {
        "tensors": [
            [name, w.tensor.dtype, list(w.tensor.shape), *w.rows, *w.columns] for name, w in shards.windows.items()
        ],
        "ties": dict(shards.ties),
    }
    return zlib.compress(json.dumps(table, separators=(",", ":")).encode(), 1)


def windows_from(data: bytes) -> tuple[dict[str, Window], dict[str, str]]:
    """Read what `windows_to` wrote. Raises: FormatError, StateError."""
    try:
        unpacker = zlib.decompressobj()
        table = load_json(unpacker.decompress(data, MAX_NOTE_BYTES), "a list of shards")
        windows = {}
        for name, dtype, shape, top, bottom, left, right in table["tensors"]:
            spec = TensorSpec(str(name), str(dtype), tuple(map(int, shape)))
            windows[spec.name] = Slice((int(top), int(bottom)), (int(left), int(right))).of(spec)
        return windows, {str(alias): str(name) for alias, name in table["ties"].items()}
    except (zlib.error, KeyError, TypeError, ValueError, AttributeError) as e:
        raise FormatError(f"malformed list of shards: {e}") from e


def layout_of(
    everyones: Sequence[Windows], ties: Mapping[str, str] | None = None, grid: Grid | None = None, min_tile: int = 1
) -> Layout:
    """The layout in which the parts of all processes are whole tiles, cut by a grid. Raises: StateError."""
    specs: dict[str, TensorSpec] = {}
    borders: dict[str, tuple[set[int], set[int]]] = {}
    for windows in everyones:
        for name, window in windows.items():
            if (known := specs.setdefault(name, window.tensor)) != window.tensor:
                raise StateError(
                    f"tensor {name!r} is {known.dtype} {known.shape} in one process and {window.tensor.dtype} "
                    f"{window.tensor.shape} in another; they must be the same",
                    tensor=name,
                )
            rows, columns = borders.setdefault(name, (set(), set()))
            if window.local.size:
                rows.update(window.rows)
                columns.update(window.columns)
    cut = []
    for name, spec in specs.items():
        finer = layouts.cut(spec, grid or {}, min_tile)
        row_cuts = sorted({*borders[name][0], *finer.row_cuts} - {0, spec.rows})
        column_cuts = sorted({*borders[name][1], *finer.column_cuts} - {0, spec.columns})
        cut.append(replace(spec, row_cuts=tuple(row_cuts), column_cuts=tuple(column_cuts)))
    return layouts.make(cut, ties)


def owner_of(layout: Layout, everyones: Sequence[Windows]) -> dict[int, int]:
    """For each tile that has weights, the first process that has all of it. Raises: StateError, if none has."""
    owners = {}
    for tile in layout.tiles:
        placed = (place_tile(tile, windows) for windows in everyones)
        owner = next((n for n, place in enumerate(placed) if place and place.whole), None)
        if owner is not None:
            owners[tile.ordinal] = owner
        elif tile.size:
            missing = f"rows {tile.row} to {tile.row + tile.rows} of tensor {tile.tensor.name!r}"
            if tile.pieces:
                names = " and ".join(map(repr, tile.names[:2]))
                missing = f"all of the {len(tile.pieces)} pieces that are bundled with those of {names}"
            raise StateError(f"no process has {missing}", tensor=tile.names[0])
    return owners


# What a process owns


@dataclass(frozen=True)
class TileShare:
    """The tiles that a process owns."""

    layout: Layout
    tiles: tuple[Tile, ...]
    windows: Mapping[str, Window]  # of each tensor, the rectangle around them; of a whole model every tensor
    shards: Shards  # in which they lie; without the weights
    places: Mapping[int, TileStorage]  # where in the shards, by ordinal

    @property
    def whole(self) -> bool:
        """Whether these are all tiles that have weights."""
        return sum(tile.size for tile in self.tiles) == self.layout.size

    @property
    def slices(self) -> Slices | None:
        """The slices of a follower of these tiles only; None for all tiles, which marks its state as complete."""
        return None if self.whole else slices_of(self.windows)

    @cached_property
    def copy_places(self) -> dict[int, TileStorage]:
        """Where they lie in tensors of the size of their windows; each bundle has its own tensor: see `tensors`."""
        found = {tile.ordinal: place_tile(replace(tile, pieces=()), self.tensors) for tile in self.tiles}
        return {ordinal: place for ordinal, place in found.items() if place}

    @cached_property
    def tensors(self) -> dict[str, Window]:
        """The tensors of a copy of these tiles: a window of each tensor, and each bundle."""
        alone = {tile.tensor.name for tile in self.tiles if not tile.pieces}
        bundled = {piece.tensor.name for tile in self.tiles for piece in tile.pieces} - alone
        windows = {name: window for name, window in self.windows.items() if name not in bundled}
        return windows | {tile.tensor.name: Window.around(tile.tensor) for tile in self.tiles if tile.pieces}

    def check(self, shards: Shards) -> None:
        """Raises: StateError, if these are not the shards that the share was made of."""
        if shards.windows is self.shards.windows and shards.ties is self.shards.ties:
            return  # a `SourceMemo` has recognized them
        sides: list[dict[str, Window | str]] = [{**one.windows, **one.ties} for one in (self.shards, shards)]
        before, now = sides
        if before != now:
            name = min(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            old, new = before.get(name), now.get(name)
            if isinstance(old, Window) and isinstance(new, Window) and old.tensor == new.tensor:
                raise StateError(
                    f"this process has another shard of {name!r} than before; the shards of a publisher must stay the "
                    "same: create a new Publisher, which resumes the run",
                    tensor=name,
                )
            raise StateError(
                f"the tensors of a run must not change, but {name!r} {_change(old, new)}; publish the changed model to "
                "a new location",
                tensor=name,
            )


def _change(old: Window | str | None, new: Window | str | None) -> str:
    """How a tensor differs from before: a window, or the name that it is tied to."""
    if isinstance(old, Window) and isinstance(new, Window):
        is_, was = new.tensor, old.tensor
        return f"is {is_.dtype} {is_.shape}, and was {was.dtype} {was.shape}"
    if old is None or new is None:
        return "was added" if old is None else "was removed"
    return "is tied to another tensor than before"


def share_of(layout: Layout, owners: Mapping[int, int], rank: int, shards: Shards) -> TileShare:
    tiles = tuple(layout.tiles[ordinal] for ordinal, owner in owners.items() if owner == rank)
    whole = sum(tile.size for tile in tiles) == layout.size
    windows = {spec.name: Window.around(spec) for spec in layout.tensors if whole}  # those without weights as well
    places = {}
    for tile in tiles:
        for piece in tile.pieces or (tile,):
            rows, columns = (piece.row, piece.row + piece.rows), (piece.column, piece.column + piece.columns)
            if known := windows.get(piece.tensor.name):
                rows = min(known.rows[0], rows[0]), max(known.rows[1], rows[1])
                columns = min(known.columns[0], columns[0]), max(known.columns[1], columns[1])
            windows[piece.tensor.name] = Window(piece.tensor, rows, columns)
        place = place_tile(tile, shards.windows)
        assert place is not None
        places[tile.ordinal] = place
    kept = replace(shards, published=replace(shards.published, views={}))
    return TileShare(layout, tiles, windows, kept, places)


def slices_of(windows: Windows) -> dict[str, Slice | None]:
    """Windows as the slices of a `Subscriber`: tensors that are not listed are not local."""
    return {escape(name): Slice(w.rows, w.columns) for name, w in windows.items()} | {"*": None}
