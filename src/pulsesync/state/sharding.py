"""What one process holds of a model whose tensors are spread over several: rectangles, in a checkpoint's coordinates.

A source (module, state dict or mapping) is read as shards. A DTensor says itself which part of its tensor it is; a
`Placed` says it for a plain tensor; everything else is held whole.

    mine = shards_of(model, cast={"*": "BF16"})
    everyones = [windows_from(note) for note in gather(windows_to(mine))]
    layout = layout_of(everyones)                       # cut where any process's part ends
    owner_of(layout, everyones)                         # of each tile: the first process that holds all of it

Nobody needs the tensors of the others for this, only their windows.
"""

import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from pulsesync.core.types import Bits, TensorSpec, Tile
from pulsesync.errors import FormatError, StateError
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Grid, Layout
from pulsesync.state.slices import LocalTile, Slice, Span, Window
from pulsesync.state.views import HostSource, mapping_of, read_published

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
                raise StateError(f"tensor {name!r} has shape {shape}: no columns to be split by", tensor=name)
            whole = (shape[0], shape[1] * size, *shape[2:])
            width = TensorSpec(name, "", shape).columns
            out[name] = Placed(tensor, whole, columns=(width * rank, width * (rank + 1)))
        else:
            out[name] = tensor
    return out


@dataclass(frozen=True)
class Shards:
    """The parts of tensors that a process holds."""

    windows: Mapping[str, Window]  # by name; the tensor as the checkpoint has it, in the dtype that is published
    published: Any  # the weights, by the same names: `HostSource`, or the same on a device
    ties: Mapping[str, str]  # alias -> name
    partial: bool = False  # whether it said of any tensor which part it is

    def weights(self, layout: Layout) -> "ShardWeights":
        """Read them in the tiles of a layout, as far as they are held whole."""
        places = {}
        for tile in layout.tiles:
            held = self.windows.get(tile.tensor.name)
            place = held.place(tile) if held else None
            if place is not None and place.whole:
                places[tile.ordinal] = place
        return ShardWeights(self.published, places)

    def slices(self) -> dict[str, Slice | None]:
        """The same for a `Subscriber` or a `State`: what is not named here is not held."""
        return {_literal(name): Slice(w.rows, w.columns) for name, w in self.windows.items()} | {"*": None}


@dataclass(frozen=True)
class ShardWeights:
    """Shards as weights to encode from: block by block, cast on the way."""

    published: HostSource
    places: Mapping[int, LocalTile]

    def block(self, tile: Tile, number: int) -> Bits:
        return self.published.block(self.places[tile.ordinal].tile, number)


def shards_of(source: Any, cast: Mapping[str, str] | None = None, read: Read = read_published) -> Shards:
    """Read a module, state dict or mapping, whose values may be DTensors or `Placed`, as shards.

    read: how plain tensors are read; of itself those in host memory alone.

    Raises:
        StateError: a part that is no rectangle of its tensor, or whatever `view_bits` refuses.
    """
    placed = {name: _placed(name, value) for name, value in mapping_of(source).items()}
    published, ties = read({name: one.tensor for name, one in placed.items()}, cast or {})
    windows = {}
    for name, view in published.views.items():
        one = placed[name]
        spec = TensorSpec(name, published.spec(name).dtype, tuple(one.shape))
        window = Slice(one.rows, one.columns).of(spec)
        if window.local.size != view.spec.size:
            raise StateError(
                f"tensor {name!r} has {view.spec.size} weights here; rows {window.rows} and columns {window.columns} "
                f"of {spec.shape} are {window.local.size}",
                tensor=name,
            )
        windows[name] = window
    flat = {name: replace(view, spec=windows[name].local) for name, view in published.views.items()}
    partial = any(isinstance(value, Placed) or _is_dtensor(value) for value in source.values())
    return Shards(windows, replace(published, views=flat), ties, partial)


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _placed(name: str, value: Any) -> Placed:
    if isinstance(value, Placed):
        return value
    if not _is_dtensor(value):
        return Placed(value, tuple(int(n) for n in getattr(value, "shape", ())))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in value.placements):
        raise StateError(
            f"tensor {name!r}: DTensor has a Partial placement ({value.placements}); redistribute it first", tensor=name
        )
    whole = tuple(int(n) for n in value.shape)
    if value.device_mesh.get_coordinate() is None:  # not among those who hold it
        return Placed(value.to_local(), whole, (0, 0) if whole else None)
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if shape[2:] != whole[2:]:
        raise StateError(f"tensor {name!r} is split along dimension 2 or later ({value.placements})", tensor=name)
    local = value.to_local()
    rows = (int(offset[0]), int(offset[0] + shape[0])) if whole else None
    columns = None
    if len(whole) > 1 and shape[1] != whole[1]:
        width = TensorSpec(name, "", whole[1:]).columns
        columns = (int(offset[1]) * width, int(offset[1] + shape[1]) * width)
    if not local.numel():
        rows = (0, 0) if whole else None
    return Placed(local, whole, rows, columns)


# What processes tell each other of what they hold

Windows = Mapping[str, Window]


def windows_to(shards: Shards) -> bytes:
    """Write down which parts a process holds, and which names are tied."""
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
        table = layouts.load_json(unpacker.decompress(data, MAX_NOTE_BYTES), "a list of shards")
        windows = {}
        for name, dtype, shape, top, bottom, left, right in table["tensors"]:
            spec = TensorSpec(str(name), str(dtype), tuple(map(int, shape)))
            windows[spec.name] = Slice((int(top), int(bottom)), (int(left), int(right))).of(spec)
        return windows, {str(alias): str(name) for alias, name in table["ties"].items()}
    except (zlib.error, KeyError, TypeError, ValueError, AttributeError) as e:
        raise FormatError(f"this is not a list of shards: {e}") from e


def layout_of(
    everyones: Sequence[Windows], ties: Mapping[str, str] | None = None, grid: Grid | None = None, min_tile: int = 1
) -> Layout:
    """The layout in which every process's parts are whole tiles; the grid may cut it further.

    Raises:
        StateError: two processes hold different tensors by one name.
    """
    specs: dict[str, TensorSpec] = {}
    borders: dict[str, tuple[set[int], set[int]]] = {}
    for windows in everyones:
        for name, window in windows.items():
            if (known := specs.setdefault(name, window.tensor)) != window.tensor:
                raise StateError(
                    f"tensor {name!r} is {known.dtype} {known.shape} for one process and {window.tensor.dtype} "
                    f"{window.tensor.shape} for another",
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
    """Of each tile that has weights, the first process that holds all of it.

    Raises:
        StateError: nobody holds one.
    """
    owners = {}
    for tile in layout.tiles:
        holders = (
            n
            for n, windows in enumerate(everyones)
            if (held := windows.get(tile.tensor.name)) and (place := held.place(tile)) and place.whole
        )
        owner = next(holders, None)
        if owner is not None:
            owners[tile.ordinal] = owner
        elif tile.size:
            raise StateError(
                f"no process holds rows {tile.row} to {tile.row + tile.rows} of tensor {tile.tensor.name!r}",
                tensor=tile.tensor.name,
            )
    return owners


def _literal(name: str) -> str:
    """A pattern that fits this name alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
