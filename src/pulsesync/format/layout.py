"""The tensor table of a run: names, dtypes, shapes, ties, and its tiles. Written once, referred to by hash.

A grid cuts tensors into pieces. A piece is a tile, or is in a bundle with other small pieces: then the bundle is a
tile.

It is a JSON file, because people read it as often as programs, and reading it need not be fast.
"""

import hashlib
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

from pulsesync.core import digest
from pulsesync.core.arguments import is_whole
from pulsesync.core.types import BLOCK, DTYPES, TensorSpec, Tile
from pulsesync.errors import ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import versions
from pulsesync.format.json_reader import load_json

FORMAT = "pulse-layout/1"
MAX_BYTES = 1 << 27
MAX_TENSORS = 1 << 20
MAX_TILES = 1 << 22  # also limited in proportion to the model: see most_pieces
FREE_TILES, TENSOR_TILES, WEIGHTS_A_TILE = 1 << 12, 512, 1 << 12
MAX_NAME_BYTES = 1 << 10
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 46  # of a tensor
SMALL = 1 << 16  # weights below which a piece shares a tile with others

Bundle = tuple[tuple[int, ...], ...]  # groups of pieces, by number


@dataclass(frozen=True)
class Layout:
    """All canonical tensors in name order, and the names that are tied to one of them."""

    tensors: tuple[TensorSpec, ...]
    ties: Mapping[str, str] = field(default_factory=dict)  # alias -> canonical name
    bundles: tuple[Bundle, ...] = ()

    @cached_property
    def pieces(self) -> tuple[Tile, ...]:
        """The pieces into which the grid cuts tensors, numbered by tensor, row and column."""
        return tuple(map(self.piece, range(self.piece_count)))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Every tile: the pieces that are not in a bundle, in order, and then the bundles."""
        if not self.bundles:
            return self.pieces
        bundled = {piece for bundle in self.bundles for group in bundle for piece in group}
        alone = (piece for piece in self.pieces if piece.ordinal not in bundled)
        out = [replace(piece, ordinal=ordinal) for ordinal, piece in enumerate(alone)]
        return (*out, *(self._bundle(number, len(out) + number) for number in range(len(self.bundles))))

    def _bundle(self, number: int, ordinal: int) -> Tile:
        groups = [[self.piece(n) for n in group] for group in self.bundles[number]]
        sizes = [sum(piece.size for piece in group) for group in groups]
        first = groups[0][0].tensor
        borders = tuple(accumulate(sizes, initial=0))
        spec = TensorSpec(_bundle_name(number, first.name), first.dtype, (borders[-1],))
        return Tile(ordinal, spec, 0, 0, borders[-1], 1, tuple(piece for group in groups for piece in group), borders)

    @cached_property
    def tile_count(self) -> int:
        """How many tiles there are, without making them."""
        bundled = sum(len(group) for bundle in self.bundles for group in bundle)
        return self.piece_count - bundled + len(self.bundles)

    def tile(self, ordinal: int) -> Tile:
        """One tile, without making the others. Raises: IndexError."""
        if not 0 <= ordinal < self.tile_count:
            raise IndexError(f"tile {ordinal} does not exist: the layout has {self.tile_count} tiles")
        alone = self.tile_count - len(self.bundles)
        if ordinal >= alone:
            return self._bundle(ordinal - alone, ordinal)
        return replace(self.piece(ordinal + bisect_right(self._skips, ordinal)), ordinal=ordinal)

    @cached_property
    def _skips(self) -> tuple[int, ...]:
        """For each piece that is in a bundle, in order, the number of pieces before it that are in none."""
        bundled = sorted(piece for bundle in self.bundles for group in bundle for piece in group)
        return tuple(piece - i for i, piece in enumerate(bundled))

    @cached_property
    def piece_count(self) -> int:
        return sum(map(count_pieces, self.tensors))

    def piece(self, number: int) -> Tile:
        """One piece, without making the others. Raises: IndexError."""
        if not 0 <= number < self.piece_count:
            raise IndexError(f"piece {number} does not exist: the layout has {self.piece_count} pieces")
        tensor = bisect_right(self._first_pieces, number) - 1
        spec = self.tensors[tensor]
        i, j = divmod(number - self._first_pieces[tensor], len(spec.column_cuts) + 1)
        (r, r_end), (c, c_end) = _piece(spec.row_cuts, spec.rows, i), _piece(spec.column_cuts, spec.columns, j)
        return Tile(number, spec, r, c, r_end - r, c_end - c)

    @cached_property
    def _first_pieces(self) -> tuple[int, ...]:
        """The number of each tensor's first piece."""
        return tuple(accumulate(map(count_pieces, self.tensors), initial=0))[:-1]

    @cached_property
    def size(self) -> int:
        """The number of all weights."""
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def size_bytes(self) -> int:
        """The size of all weights."""
        return sum(spec.size * spec.kind.itemsize for spec in self.tensors)

    @cached_property
    def data(self) -> bytes:
        """The file: canonical JSON, so that equal layouts have equal hashes."""
        tensors = []
        for spec in self.tensors:
            entry: dict[str, Any] = {"dtype": spec.dtype, "name": spec.name, "shape": list(spec.shape)}
            if spec.row_cuts:
                entry["rows"] = list(spec.row_cuts)
            if spec.column_cuts:
                entry["columns"] = list(spec.column_cuts)
            tensors.append(entry)
        table = {"bundles": self.bundles, "format": FORMAT, "tensors": tensors, "ties": dict(self.ties)}
        return json.dumps(table, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def tables(self) -> bytes:
        """The part of state digests for the tensor table; it does not depend on cuts and bundles."""
        return digest.hash_tables(self.tensors)

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def count_pieces(spec: TensorSpec) -> int:
    return (len(spec.row_cuts) + 1) * (len(spec.column_cuts) + 1)


def _piece(cuts: Sequence[int], end: int, number: int) -> tuple[int, int]:
    """The begin and the end of one of the pieces that these cuts make of 0 to end."""
    return cuts[number - 1] if number else 0, cuts[number] if number < len(cuts) else end


def most_pieces(layout: Layout) -> int:
    """How many pieces a layout of these tensors may have.

    A few kB of cuts can make millions of them, each of which costs a reader about 1 kB and 0.1 ms. So a layout may have
    one for every 4,096 weights, and at least 4,096. The first 512 of each tensor do not count, so that any model can be
    cut by rows for 512 ranks; what one tensor does not use of its 512 does not count for another.
    """
    own = sum(min(count_pieces(spec), TENSOR_TILES) for spec in layout.tensors)
    return min(MAX_TILES, FREE_TILES + own + layout.size // WEIGHTS_A_TILE)


def make(tensors: Iterable[TensorSpec], ties: Mapping[str, str] | None = None) -> Layout:
    """Sort tensors and check them as a reader does.

    Raises: FormatError, for a name twice, a tie to nothing, cuts that do not ascend; LimitError, UnsupportedError.
    """
    layout = Layout(tuple(sorted(tensors, key=lambda s: s.name.encode())), dict(ties or {}))
    _check(layout)
    return layout


def bundle(layout: Layout, owners: Mapping[int, int] | None = None) -> Layout:
    """Join the small pieces of a layout into bundles; owners: by piece, the process that will write it.

    A bundle has pieces of one dtype and owner, in the same cell of their tensors' grids, up to one block of weights; a
    group has the pieces of one layer or expert, of which a process has all or none.
    """
    groups: dict[tuple[Any, ...], list[Tile]] = {}
    for piece in layout.pieces:
        if 0 < piece.size < SMALL:
            spec, owner = piece.tensor, (owners or {}).get(piece.ordinal, 0)
            groups.setdefault((part_of_model(spec.name), spec.dtype, owner, _cell(piece)), []).append(piece)
    packed: dict[tuple[Any, ...], list[list[list[int]]]] = {}
    room: dict[tuple[Any, ...], int] = {}  # of the last bundle of each dtype, owner and cell
    for (_, *of_bundle), pieces in groups.items():
        kind, begun = tuple(of_bundle), False
        bundles = packed.setdefault(kind, [])
        if not bundles or sum(piece.size for piece in pieces) > room[kind]:
            bundles.append([])
            room[kind] = BLOCK
        for piece in pieces:
            if piece.size > room[kind]:  # a group of more than a block
                bundles.append([])
                room[kind], begun = BLOCK, False
            if not begun:
                bundles[-1].append([])
                begun = True
            bundles[-1][-1].append(piece.ordinal)
            room[kind] -= piece.size
    found = (bundle for bundles in packed.values() for bundle in bundles if sum(map(len, bundle)) > 1)
    return replace(layout, bundles=tuple(sorted(tuple(map(tuple, bundle)) for bundle in found)))


def _cell(piece: Tile) -> tuple[int, int, int, int]:
    """The row and column of a piece in the grid of its tensor, and the size of the grid."""
    rows, columns = piece.tensor.row_cuts, piece.tensor.column_cuts
    return bisect_right(rows, piece.row), bisect_right(columns, piece.column), len(rows), len(columns)


_NUMBERED = re.compile(r"(.*(layer|block|expert|stage)s?_?)?\d+", re.IGNORECASE)


def part_of_model(name: str) -> str:
    """The layer or expert that a tensor belongs to: its name up to the last component that is a number, or "layers_3".

    The tensors of a model that are in no layer are one such part.
    """
    components = re.split(r"([./])", name)
    last = max((i for i, one in enumerate(components) if _NUMBERED.fullmatch(one)), default=-1)
    return "".join(components[: last + 1])


Cuts = int | Sequence[int]  # how many even pieces, or the borders between them
Grid = Mapping[str, tuple[Cuts, Cuts]]  # by name pattern, of which the first that matches is used: rows and columns


def cut(spec: TensorSpec, grid: Grid, min_tile: int) -> TensorSpec:
    """Cut a tensor as the grid says; even pieces get at least min_tile weights."""
    for pattern, (rows, columns) in grid.items():
        if fnmatchcase(spec.name, pattern):
            even = cut_evenly(spec, _pieces(rows), _pieces(columns), min_tile)
            return replace(
                even,
                row_cuts=even.row_cuts if is_whole(rows) else tuple(map(int, cast("Sequence[int]", rows))),
                column_cuts=even.column_cuts if is_whole(columns) else tuple(map(int, cast("Sequence[int]", columns))),
            )
    return spec


def _pieces(cuts: Cuts) -> int:
    return int(cast("int", cuts)) if is_whole(cuts) else 1


def cut_evenly(spec: TensorSpec, rows: int, columns: int, min_tile: int) -> TensorSpec:
    """Cut a tensor into a grid of tiles, or a smaller one: no tile gets fewer than min_tile weights."""
    rows, columns = min(rows, max(spec.rows, 1)), min(columns, max(spec.columns, 1))
    while rows * columns > 1 and (spec.rows // rows) * (spec.columns // columns) < min_tile:
        if rows >= columns:
            rows -= 1
        else:
            columns -= 1
    row_cuts = tuple(spec.rows * i // rows for i in range(1, rows))
    return replace(spec, row_cuts=row_cuts, column_cuts=tuple(spec.columns * i // columns for i in range(1, columns)))


def parse(data: bytes, expected_id: str | None = None) -> Layout:
    """Read a layout file and check everything in it.

    Raises:
        FormatError: it is not one, or says the same name twice; ChecksumError: not the one the id names; LimitError,
        UnsupportedError: see there.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a layout can have {MAX_BYTES} bytes at most; this has {len(data)}", value=len(data))
    if expected_id is not None and hashlib.sha256(data).hexdigest() != expected_id:
        damaged = f"layout {expected_id[:12]} is damaged: its bytes do not match its hash"
        raise ChecksumError(damaged, expected=expected_id)
    table = load_json(data, "the layout")
    versions.check_name(table.get("format"), FORMAT, "the layout")
    _check_fields(table, {"bundles", "format", "tensors", "ties"}, set(), "the layout")
    if not isinstance(table["tensors"], list):
        raise FormatError("the tensors of a layout must be a list")
    ties, bundles = table["ties"], table["bundles"]
    specs = tuple(map(_spec, table["tensors"]))
    if not isinstance(ties, dict) or not all(isinstance(name, str) for name in ties.values()):
        raise FormatError("the ties of a layout must map names to names")
    if not isinstance(bundles, list) or not all(isinstance(bundle, list) for bundle in bundles):
        raise FormatError("the bundles of a layout must be lists of groups, which are lists of pieces")
    layout = Layout(specs, ties, tuple(tuple(map(_integers, bundle)) for bundle in bundles))
    _check(layout)
    if layout.data != data:
        raise FormatError("the layout is not in canonical form")
    return layout


def _spec(entry: Any) -> TensorSpec:
    if not isinstance(entry, dict):
        raise FormatError("a tensor of the layout must be a JSON object")
    _check_fields(entry, {"name", "dtype", "shape"}, {"rows", "columns"}, "a tensor of the layout")
    if not isinstance(entry["name"], str) or not isinstance(entry["dtype"], str):
        raise FormatError("names and dtypes of a layout must be strings")
    shape, rows, columns = (_integers(entry.get(k, [])) for k in ("shape", "rows", "columns"))
    return TensorSpec(entry["name"], entry["dtype"], shape, rows, columns)


def _check_fields(table: Mapping[str, Any], needed: set[str], possible: set[str], what: str) -> None:
    if lacks := needed - set(table):
        raise FormatError(f"{what} does not have the field {min(lacks)!r}")
    if added := set(table) - needed - possible:
        raise versions.unknown(f"{what} has the field {min(added)[:40]!r}")


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise FormatError("shapes, cuts and groups of a layout must be lists of integers that are not negative")
    if max(value, default=0) > MAX_ELEMENTS:
        raise LimitError(f"the integers of a layout can be {MAX_ELEMENTS} at most; this has a larger one")
    return tuple(value)


def _check(layout: Layout) -> None:
    names = [spec.name for spec in layout.tensors]
    if len(names) > MAX_TENSORS or len(layout.ties) > MAX_TENSORS:
        raise LimitError(f"a layout can have {MAX_TENSORS} tensors at most; this has {len(names)}", value=len(names))
    for name in (*names, *layout.ties):
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise FormatError("a tensor's name is not valid Unicode") from None
        if not 0 < size <= MAX_NAME_BYTES:
            raise LimitError(f"a tensor's name must have 1 to {MAX_NAME_BYTES} bytes; this has {size}", value=size)
    if not _ascend([name.encode() for name in names]):
        raise FormatError("the tensors of a layout must be in the order of their names, each once")
    known = set(names)
    for alias, canonical in layout.ties.items():
        if alias in known or canonical not in known:
            raise FormatError(
                f"the tie {alias!r} -> {canonical!r} must map a name that no tensor has to a tensor of the layout"
            )
    for spec in layout.tensors:
        _check_spec(spec)
    pieces, most = layout.piece_count, most_pieces(layout)
    if pieces > most:
        raise LimitError(
            f"the layout has {pieces} pieces; with {len(layout.tensors)} tensors of {layout.size} weights at most "
            f"{most} are allowed: cut the tensors into fewer pieces",
            value=pieces,
            limit=most,
        )
    _check_bundles(layout)


def _check_bundles(layout: Layout) -> None:
    seen: set[int] = set()
    count = layout.piece_count
    for bundle in layout.bundles:
        pieces = [number for group in bundle for number in group]
        if len(pieces) < 2 or not all(bundle) or not all(map(_ascend, bundle)):
            raise FormatError("a bundle must have two pieces at least, in groups of ascending pieces")
        if max(pieces) >= count or not seen.isdisjoint(pieces) or len(set(pieces)) < len(pieces):
            raise FormatError(
                "a bundle lists a piece that the layout does not have, or one that is already in a bundle"
            )
        seen.update(pieces)
        tiles = [layout.piece(number) for number in pieces]
        sizes = [tile.size for tile in tiles]
        if len({tile.tensor.dtype for tile in tiles}) > 1 or not all(sizes) or sum(sizes) > BLOCK:
            raise FormatError(
                f"a bundle must have pieces of one dtype, none of them empty, with {BLOCK} weights at most"
            )
    if not _ascend(layout.bundles) or not all(map(_ascend, layout.bundles)):
        raise FormatError("the bundles of a layout, and the groups of a bundle, must be in ascending order")
    names = {_bundle_name(n, layout.piece(bundle[0][0]).tensor.name) for n, bundle in enumerate(layout.bundles)}
    if not names.isdisjoint(spec.name for spec in layout.tensors):
        raise FormatError("the layout has a tensor with the name of a bundle")


def _ascend(values: Sequence[Any]) -> bool:
    """Whether each value is above the one before it."""
    return all(a < b for a, b in pairwise(values))


def _bundle_name(number: int, first: str) -> str:
    """The name of a bundle in messages and among the tensors of a process."""
    return f"bundle {number} ({first} and others)"


def _check_spec(spec: TensorSpec) -> None:
    if spec.dtype not in DTYPES:
        raise UnsupportedError(
            f"tensor {spec.name!r} has dtype {spec.dtype!r}; this release of pulsesync knows {', '.join(DTYPES)}. "
            "If a later release wrote it, upgrade pulsesync",
            tensor=spec.name,
        )
    if len(spec.shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in spec.shape) > MAX_ELEMENTS:
        raise LimitError(f"tensor {spec.name!r} has shape {spec.shape}, which is above the limit", tensor=spec.name)
    for cuts, end in ((spec.row_cuts, spec.rows), (spec.column_cuts, spec.columns)):
        if cuts and not _ascend((0, *cuts, end)):
            raise FormatError(f"the cuts of tensor {spec.name!r} must ascend inside it", tensor=spec.name)
