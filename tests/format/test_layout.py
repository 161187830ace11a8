import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import DTYPES, TensorSpec
from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import layout as layouts
from tests.helpers import random_layout, seeds

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
TABLE: dict[str, Any] = {
    "format": layouts.FORMAT,
    "tensors": [
        {"columns": [2], "dtype": "BF16", "name": "a", "rows": [1, 3], "shape": [4, 5]},
        {"dtype": "F32", "name": "b", "shape": []},
    ],
    "bundles": [],
    "ties": {"c": "a"},
}


def written(table: object) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def changed(**fields: object) -> bytes:
    return written({**TABLE, **fields})


def tensor(**fields: object) -> bytes:
    return changed(tensors=[{**TABLE["tensors"][0], **fields}], ties={})


@given(seeds)
def test_a_layout_comes_back(seed: int) -> None:
    layout = random_layout(seed)
    assert layouts.parse(layout.data) == layout


@given(st.lists(names, min_size=2, max_size=8, unique=True))
def test_any_names_come_back_in_the_order_of_their_bytes(some: list[str]) -> None:
    alias, *canonical = some
    layout = layouts.make([TensorSpec(name, "U8", (1,)) for name in canonical], {alias: canonical[0]})
    read = layouts.parse(layout.data)
    assert [spec.name for spec in read.tensors] == sorted(canonical, key=str.encode)
    assert read.ties == {alias: canonical[0]}


def test_the_order_in_which_tensors_are_given_does_not_matter() -> None:
    specs = [TensorSpec(name, "BF16", (2,)) for name in "cab"]
    assert layouts.make(specs).id == layouts.make(specs[::-1]).id


def test_the_id_is_pinned() -> None:
    assert layouts.parse(written(TABLE)).id == "748f4c95f34a87ce8f69d91be1b50823049d2181a61eab6e4c70e6610d3ce5d8"


@pytest.mark.parametrize(
    "other",
    [
        json.dumps(TABLE, sort_keys=True).encode(),
        written(TABLE) + b"\n",
        json.dumps(dict(reversed(TABLE.items())), separators=(",", ":")).encode(),
        written(TABLE).replace(b'"c"', b'"\\u0063"'),
        tensor(rows=[]),
        b"\xef\xbb\xbf" + written(TABLE),
    ],
)
def test_another_way_to_write_the_same_is_refused(other: bytes) -> None:
    with pytest.raises(FormatError):
        layouts.parse(other)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", FormatError),
        (b"[]", FormatError),
        (b"\xff", FormatError),
        (b"[" * 100_000, FormatError),
        (b'{"format":' + b"9" * 5000 + b"}", FormatError),
        (written(TABLE)[:-1], FormatError),
        (written(TABLE).replace(b"[2]", b"[NaN]"), FormatError),
        (written(TABLE).replace(b'"ties"', b'"format":"x","ties"'), FormatError),
        (changed(format="pulse-layout/2"), UnsupportedError),
        (changed(format="pulse-layout/1-draft-2"), UnsupportedError),
        (changed(more=1), UnsupportedError),
        (changed(tensors={}), FormatError),
        (changed(tensors=[3]), FormatError),
        (changed(ties=[]), FormatError),
        (changed(ties={"c": 1}), FormatError),
        (changed(ties={"c": "x"}), FormatError),
        (changed(ties={"b": "a"}), FormatError),
        (changed(ties={"": "a"}), LimitError),
        (changed(ties={"x" * 1025: "a"}), LimitError),
        (changed(tensors=TABLE["tensors"][::-1]), FormatError),
        (changed(tensors=[TABLE["tensors"][1]] * 2, ties={}), FormatError),
        (tensor(name=""), LimitError),
        (tensor(name="x" * 1025), LimitError),
        (tensor(name="\ud800"), FormatError),
        (tensor(name=None), FormatError),
        (tensor(dtype="F4"), UnsupportedError),
        (tensor(dtype=4), FormatError),
        (tensor(size=4), UnsupportedError),
        (tensor(shape="45"), FormatError),
        (tensor(shape=[4, -5]), FormatError),
        (tensor(shape=[4, 5.0]), FormatError),
        (tensor(shape=[4, True]), FormatError),
        (tensor(shape=[1 << 47], rows=[1], columns=[]), LimitError),
        (tensor(shape=[10**4000], rows=[], columns=[]), LimitError),
        (tensor(shape=[0, 1 << 40, 1 << 40], rows=[], columns=[]), LimitError),
        (tensor(dtype="F8_E8M0"), UnsupportedError),
        (tensor(dtype="C64"), UnsupportedError),
        (tensor(shape=[1 << 40, 1 << 7]), LimitError),
        (tensor(shape=[4, 5, *[1] * 7]), LimitError),
        (tensor(rows=[3, 1]), FormatError),
        (tensor(rows=[1, 1]), FormatError),
        (tensor(rows=[0, 1]), FormatError),
        (tensor(rows=[1, 4]), FormatError),
        (tensor(columns=[5]), FormatError),
        (tensor(columns=[True]), FormatError),
    ],
)
def test_what_is_not_a_layout_is_refused(data: bytes, error: type) -> None:
    with pytest.raises(error):
        layouts.parse(data)


def test_a_tensor_that_lacks_a_field_is_refused() -> None:
    for field in ("name", "dtype", "shape"):
        entry = {key: value for key, value in TABLE["tensors"][1].items() if key != field}
        with pytest.raises(FormatError, match=f"does not have the field {field!r}"):
            layouts.parse(changed(tensors=[entry], ties={}))


def test_a_file_too_large_is_refused_unread() -> None:
    with pytest.raises(LimitError, match="at most"):
        layouts.parse(bytes(layouts.MAX_BYTES + 1))


def test_too_many_tiles_are_refused() -> None:
    rows, columns = tuple(range(1, 3000)), tuple(range(1, 2000))
    with pytest.raises(LimitError, match="pieces"):
        layouts.make([TensorSpec("a", "U8", (3000, 2000), rows, columns)])


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "MAX_TENSORS", 2)
    with pytest.raises(LimitError, match="tensors"):
        layouts.make([TensorSpec(name, "U8", ()) for name in "abc"])


@given(seeds)
def test_tiles_cover_every_weight_once(seed: int) -> None:
    layout = random_layout(seed)
    covered = {spec.name: np.zeros(spec.size, np.int64) for spec in layout.tensors}
    for tile in layout.tiles:
        covered[tile.tensor.name][tile.flat_indices(np.arange(tile.size))] += 1
    assert all((count == 1).all() for count in covered.values())


@given(seeds)
def test_a_tile_is_its_rectangle_row_by_row(seed: int) -> None:
    layout = random_layout(seed, dtypes=["U32"])
    for tile in layout.tiles:
        flat = np.arange(tile.tensor.size, dtype=np.uint32)
        matrix = flat.reshape(tile.tensor.rows, tile.tensor.columns)
        inside = matrix[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns].reshape(-1)
        assert np.array_equal(tile.read(flat, 0, tile.size), inside)
        assert np.array_equal(tile.read(flat, tile.size // 3, tile.size // 2), inside[tile.size // 3 : tile.size // 2])


def test_tiles_are_numbered_over_tensors_rows_and_columns() -> None:
    layout = layouts.parse(written(TABLE))
    assert [(t.ordinal, t.tensor.name, t.row, t.column) for t in layout.tiles] == [
        (0, "a", 0, 0),
        (1, "a", 0, 2),
        (2, "a", 1, 0),
        (3, "a", 1, 2),
        (4, "a", 3, 0),
        (5, "a", 3, 2),
        (6, "b", 0, 0),
    ]


grids = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(1, 12), st.integers(1, 1600))


@given(grids)
def test_an_even_cut_makes_at_most_as_many_tiles_as_asked_for(grid: tuple[int, ...]) -> None:
    height, width, rows, columns, least = grid
    spec = layouts.cut_evenly(TensorSpec("a", "U8", (height, width)), rows, columns, least)
    layouts.make([spec])
    assert len(spec.row_cuts) < rows
    assert len(spec.column_cuts) < columns


@given(grids)
def test_the_tiles_of_an_even_cut_differ_by_one_row_or_column(grid: tuple[int, ...]) -> None:
    height, width, rows, columns, _ = grid
    tiles = layouts.make([layouts.cut_evenly(TensorSpec("a", "U8", (height, width)), rows, columns, 1)]).tiles
    assert max(t.rows for t in tiles) - min(t.rows for t in tiles) <= 1
    assert max(t.columns for t in tiles) - min(t.columns for t in tiles) <= 1
    assert len(tiles) == min(rows, height) * min(columns, width)


def test_no_tile_of_an_even_cut_is_smaller_than_asked_for() -> None:
    for height, width, least in [(5, 5, 6), (7, 3, 4), (40, 39, 90)]:
        tiles = layouts.make([layouts.cut_evenly(TensorSpec("a", "U8", (height, width)), 4, 4, least)]).tiles
        assert len(tiles) == 1 or min(tile.size for tile in tiles) >= least


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (4, 0), (1,), (1, 1)])
def test_what_cannot_be_cut_stays_whole(shape: tuple[int, ...]) -> None:
    spec = TensorSpec("a", "U8", shape)
    assert layouts.cut_evenly(spec, 8, 8, 1 << 20) == spec
    layouts.make([layouts.cut_evenly(spec, 8, 8, 0)])


def test_codes_of_dtypes_never_change() -> None:
    assert {name: (kind.code, kind.itemsize, kind.exponent_shift) for name, kind in DTYPES.items()} == {
        "BOOL": (1, 1, None),
        "U8": (2, 1, None),
        "I8": (3, 1, None),
        "F8_E4M3": (4, 1, 3),
        "F8_E5M2": (5, 1, 2),
        "U16": (6, 2, None),
        "I16": (7, 2, None),
        "F16": (8, 2, 10),
        "BF16": (9, 2, 7),
        "U32": (10, 4, None),
        "I32": (11, 4, None),
        "F32": (12, 4, 23),
        "U64": (13, 8, None),
        "I64": (14, 8, None),
        "F64": (15, 8, None),
    }


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "allowed"),
    [
        ((512, 512), 512, 512, False),  # 5.8 kB that cost a reader 243 MB and 33 s
        ((512, 512), 64, 64, True),  # as many as any layout may have
        ((1 << 15, 1 << 15), 512, 512, True),  # 4,096 weights in each
        ((1 << 15, 1 << 14), 512, 512, False),
    ],
)
def test_a_layout_has_tiles_in_proportion_to_its_weights(
    shape: tuple[int, int], rows: int, columns: int, allowed: bool
) -> None:
    spec = layouts.cut_evenly(TensorSpec("w", "BF16", shape), rows, columns, 1)
    data = layouts.Layout((spec,)).data
    if allowed:
        assert layouts.parse(data) == layouts.make([spec])
        return
    with pytest.raises(LimitError, match="cut the tensors into fewer pieces"):
        layouts.parse(data)
    with pytest.raises(LimitError):
        layouts.make([spec])  # a writer does not make what readers refuse


SMOLLM2: list[tuple[int, ...]] = [
    (49152, 576),
    *[(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536), (576,)] * 30,
]


@pytest.mark.parametrize("ranks", [8, 192, 512])
def test_a_model_cut_by_rows_for_many_ranks_is_allowed(ranks: int) -> None:
    specs = [layouts.cut_evenly(TensorSpec(f"t{i:03d}", "BF16", shape), ranks, 1, 1) for i, shape in enumerate(SMOLLM2)]
    layout = layouts.make(specs)
    assert layout.tile_count == sum(min(ranks, shape[0]) for shape in SMOLLM2)
    assert layouts.parse(layout.data) == layout


@pytest.mark.parametrize("tiles", [240, 512])
def test_a_tensor_cannot_be_cut_into_the_tiles_that_others_do_not_use(tiles: int) -> None:
    lenders = [TensorSpec(f"t{i:03d}", "U8", ()) for i in range(512)]
    with pytest.raises(LimitError, match="cut the tensors into fewer pieces"):
        layouts.make([*lenders, layouts.cut_evenly(TensorSpec("w", "U8", (tiles, tiles)), tiles, tiles, 1)])


def test_tiles_by_their_numbers_take_time_in_proportion_to_their_count() -> None:
    layout = layouts.make([TensorSpec(f"t{i:05d}", "BF16", (16,)) for i in range(8_000)])
    began = time.process_time()
    found = [layout.tile(number) for number in range(8_000)]
    assert time.process_time() - began < 2.0  # 0.04 s; one after another from the first, 14 s
    assert found == list(layout.tiles)


@pytest.mark.parametrize("seed", range(5))
def test_a_tile_by_its_number_is_that_of_the_list(seed: int) -> None:
    layout = random_layout(seed)
    assert [layout.tile(tile.ordinal) for tile in layout.tiles] == list(layout.tiles)
    assert layout.tile_count == len(layout.tiles)
    for number in (layout.tile_count, -1):
        with pytest.raises(IndexError, match=f"tile {number} does not exist: .* {layout.tile_count}"):
            layout.tile(number)
