"""Rectangles of tensors, and where the tiles of a run lie in them: numbers only."""

import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec, Tile
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.state.slices import LocalTile, Slice, Slices, WidenedTile, Window, windows
from tests.helpers import cuts, seeds


def window(spec: TensorSpec, slices: Slices) -> Window | None:
    return windows([spec], slices).get(spec.name)


WEIGHT = TensorSpec("layer.weight", "F16", (8, 6), (4,), (2, 4))


def tiles_of(spec: TensorSpec) -> tuple[Tile, ...]:
    return layouts.make([spec]).tiles


def test_without_a_slice_all_of_a_tensor_is_held() -> None:
    held = window(WEIGHT, {"other*": Slice(rows=(0, 1))})
    assert held is not None
    assert (held.rows, held.columns, held.local.shape) == ((0, 8), (0, 6), (8, 6))


def test_the_first_pattern_that_fits_counts() -> None:
    held = window(WEIGHT, {"layer.*": Slice(rows=(2, 5)), "*": None})
    assert held is not None
    assert held.rows == (2, 5)


def test_a_tensor_can_be_held_not_at_all() -> None:
    assert window(WEIGHT, {"layer.*": None}) is None


def test_rows_of_a_tensor_of_many_dimensions_keep_the_others() -> None:
    assert Slice(rows=(1, 3)).of(TensorSpec("t", "F32", (4, 2, 5))).local.shape == (2, 2, 5)


def test_columns_run_over_all_the_other_dimensions_together() -> None:
    assert Slice(columns=(5, 10)).of(TensorSpec("t", "F32", (4, 2, 5))).local.shape == (4, 5)


def test_a_scalar_is_held_whole() -> None:
    assert Slice().of(TensorSpec("t", "F32", ())).local.shape == ()


@pytest.mark.parametrize(
    "held", [Slice(rows=(0, 9)), Slice(columns=(3, 7)), Slice(rows=(5, 4)), Slice(columns=(-1, 2))], ids=repr
)
def test_a_slice_that_the_tensor_does_not_have_is_refused_by_name(held: Slice) -> None:
    with pytest.raises(StateError, match=r"layer\.weight") as caught:
        held.of(WEIGHT)
    assert caught.value.tensor == "layer.weight"


def test_a_tile_on_the_grid_is_whole_and_one_outside_is_nowhere() -> None:
    held = Slice(rows=(4, 8), columns=(2, 6)).of(WEIGHT)
    places = [held.place(tile) for tile in tiles_of(WEIGHT)]
    assert [None if place is None else place.whole for place in places] == [None, None, None, None, True, True]
    assert [(p.tile.row, p.tile.column) for p in places if p] == [(0, 0), (0, 2)]


def test_a_tile_that_is_cut_is_not_whole() -> None:
    held = Slice(rows=(3, 8)).of(WEIGHT)
    place = held.place(tiles_of(WEIGHT)[0])
    assert place is not None
    assert not place.whole


def any_window(seed: int) -> tuple[TensorSpec, Slice]:
    rng = np.random.default_rng(seed)
    shape = (int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    spec = TensorSpec("w", "U32", shape, cuts(rng, shape[0]), cuts(rng, shape[1]))
    rows, columns = (tuple(sorted(int(n) for n in rng.integers(0, size, 2, endpoint=True))) for size in shape)
    return spec, Slice((rows[0], rows[1]), (columns[0], columns[1]))


@given(seeds)
def test_reading_a_place_gives_the_tiles_weights_where_they_are_held_and_zero_elsewhere(seed: int) -> None:
    spec, held = any_window(seed)
    rows, columns = held.rows or (0, 0), held.columns or (0, 0)
    full: Bits = (np.arange(spec.size, dtype=np.uint32) + 1).reshape(spec.shape)
    inside = np.zeros(spec.shape, bool)
    inside[slice(*rows), slice(*columns)] = True
    flat = np.ascontiguousarray(full[slice(*rows), slice(*columns)]).reshape(-1)
    for tile in tiles_of(spec):
        place = held.of(spec).place(tile)
        expected = tile.read_block(np.where(inside, full, 0).reshape(-1), 0)
        if place is None:
            assert not expected.any()
        else:
            assert place.whole == (0 not in expected)
            assert np.array_equal(place.read({place.tile.tensor.name: (flat,)}, 0, tile.size), expected)


@given(seeds, st.floats(0, 1))
def test_a_change_of_a_tile_arrives_where_it_is_held_and_nowhere_else(seed: int, density: float) -> None:
    spec, held = any_window(seed)
    rows, columns = held.rows or (0, 0), held.columns or (0, 0)
    rng = np.random.default_rng(seed)
    full: Bits = np.arange(spec.size, dtype=np.uint32).reshape(spec.shape)
    changed = full.copy().reshape(-1)
    flat = np.ascontiguousarray(full[slice(*rows), slice(*columns)]).reshape(-1)
    for tile in tiles_of(spec):
        positions = np.nonzero(rng.random(tile.size) < density)[0].astype(np.uint32)
        old = tile.read_block(full.reshape(-1), 0)[positions]
        change = BlockChange(0, positions, old, old + np.uint32(1000))
        changed[tile.flat_indices(change.tile_positions())] = change.new
        place = held.of(spec).place(tile)
        if place and (kept := place.keep(change)):
            assert np.array_equal(place.read({place.tile.tensor.name: (flat,)}, 0, tile.size)[kept.positions], kept.old)
            place.write({place.tile.tensor.name: (flat,)}, kept)
    expected = changed.reshape(spec.shape)[slice(*rows), slice(*columns)]
    assert np.array_equal(flat, expected.reshape(-1))


def test_a_tile_of_several_blocks_is_cut_in_each_of_them() -> None:
    spec = TensorSpec("w", "U8", (3, BLOCK))
    (tile,) = tiles_of(spec)
    held = Slice(rows=(1, 3), columns=(10, 20)).of(spec)
    place = held.place(tile)
    assert place is not None
    flat = np.arange(1, 21, dtype=np.uint8)
    assert not place.read({place.tile.tensor.name: (flat,)}, *tile.block_range(0)).any()
    for block in (1, 2):
        row = place.read({place.tile.tensor.name: (flat,)}, *tile.block_range(block))
        assert row[10:20].tolist() == list(range(10 * block - 9, 10 * block + 1))
        assert np.count_nonzero(row) == 10


def test_a_tensors_own_name_counts_before_any_pattern() -> None:
    assert window(WEIGHT, {"*": None, WEIGHT.name: Slice(rows=(1, 3))}) is not None


def test_many_names_cost_no_more_than_their_number() -> None:
    specs = [TensorSpec(f"layer.{n}.weight", "BF16", (4, 4)) for n in range(20_000)]
    began = time.process_time()
    found = windows(specs, {spec.name: Slice(rows=(0, 2)) for spec in specs[:10_000]} | {"*": None})
    assert len(found) == 10_000
    assert time.process_time() - began < 2


# -- FP32 memory for BF16 tensors ----------------------------------------------------------------------------------

EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("columns", [(), (100,)], ids=["in a row", "in rectangles"])
def test_every_bf16_number_is_written_as_the_fp32_number_it_is_and_read_back(columns: tuple[int, ...]) -> None:
    spec = TensorSpec("t", "BF16", (256, 256), column_cuts=columns)
    flat = np.full(1 << 16, 0x12345678, np.uint32)
    for tile in tiles_of(spec):
        place = WidenedTile(LocalTile(tile, True))
        bits = tile.read_block(EVERY_BF16, 0)
        assert not place.exact({place.tile.tensor.name: (flat,)}, 0)
        place.write_range({place.tile.tensor.name: (flat,)}, 0, bits)
        assert place.exact({place.tile.tensor.name: (flat,)}, 0)
        assert np.array_equal(place.read({place.tile.tensor.name: (flat,)}, 0, tile.size), bits)
    numbers = EVERY_BF16.view(ml_dtypes.bfloat16).astype(np.float32)
    are_numbers = ~np.isnan(numbers)  # a cast may change what a NaN carries: here its bits stay as they are
    assert np.array_equal(flat[are_numbers], numbers.view(np.uint32)[are_numbers])
    assert np.array_equal(flat >> np.uint32(16), EVERY_BF16)
    assert not (flat & np.uint32(0xFFFF)).any()


def test_a_change_of_some_weights_leaves_the_others_as_they_are() -> None:
    (tile,) = tiles_of(TensorSpec("t", "BF16", (8,)))
    place, flat = WidenedTile(LocalTile(tile, True)), np.full(8, 0x3F800001, np.uint32)
    at, new = np.array([2, 5], np.uint32), np.array([0x8000, 0x7FC1], np.uint16)
    place.write({place.tile.tensor.name: (flat,)}, BlockChange(0, at, new, new))
    assert flat.tolist() == [0x3F800001] * 2 + [0x80000000] + [0x3F800001] * 2 + [0x7FC10000] + [0x3F800001] * 2
