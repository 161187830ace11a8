"""Changes of a block behave as assignments to a dictionary do: one after the other, taken back, laid over a state."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, TensorSpec, TilePatch
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.weights import FlatWeights, Overlay, as_weights, by_block, compose, inverse, rebase
from tests.helpers import applied, changed_state, copied, encode, many, random_layout, random_state, same, seeds

SIZE = 12
Values = tuple[int, ...]
values = st.tuples(*[st.integers(0, 3)] * SIZE)  # few values: changes often meet, and take each other back


def change(old: Values, new: Values, dtype: type = np.uint16) -> BlockChange | None:
    """What takes one block to another, as the encoder finds it."""
    differ = np.flatnonzero(np.array(old) != np.array(new)).astype(np.uint32)
    return BlockChange(3, differ, np.array(old, dtype)[differ], np.array(new, dtype)[differ]) if differ.size else None


def table(one: BlockChange | None) -> dict[int, tuple[int, int]]:
    """The model: position -> old and new."""
    if one is None:
        return {}
    return dict(zip(one.positions.tolist(), zip(one.old.tolist(), one.new.tolist(), strict=True), strict=True))


def between(old: Values, new: Values) -> dict[int, tuple[int, int]]:
    return {i: (a, b) for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b}


def assert_well_formed(one: BlockChange | None) -> None:
    if one is not None:
        assert one.number == 3
        assert one.positions.dtype == np.uint32
        assert one.positions.size == one.old.size == one.new.size > 0
        assert (np.diff(one.positions.astype(np.int64)) > 0).all()
        assert (one.old != one.new).all()


@many
@given(values, values, values)
def test_composing_is_one_change_after_the_other(a: Values, b: Values, c: Values) -> None:
    both = compose(change(a, b), change(b, c))
    assert_well_formed(both)
    assert table(both) == between(a, c)


@many
@given(values, values, values, values)
def test_composing_is_associative(a: Values, b: Values, c: Values, d: Values) -> None:
    first, second, third = change(a, b), change(b, c), change(c, d)
    left, right = compose(compose(first, second), third), compose(first, compose(second, third))
    assert table(left) == table(right) == between(a, d)


@given(values, values)
def test_a_change_and_its_inverse_are_nothing(a: Values, b: Values) -> None:
    one = change(a, b)
    if one is not None:
        assert compose(one, inverse(one)) is None
        assert compose(inverse(one), one) is None
        assert table(inverse(one)) == between(b, a)


@given(values, values)
def test_nothing_composes_with_everything(a: Values, b: Values) -> None:
    one = change(a, b)
    assert compose(None, one) is one
    assert compose(one, None) is one
    assert compose(None, None) is None


@many
@given(values, values, values)
def test_rebasing_leads_from_the_new_base_to_the_same_end(base: Values, end: Values, moved: Values) -> None:
    rebased = rebase(change(base, end), change(base, moved))
    assert_well_formed(rebased)
    assert table(rebased) == between(moved, end)


@given(values, values, values)
def test_neither_change_is_written_to(a: Values, b: Values, c: Values) -> None:
    one, other = change(a, b), change(b, c)
    for made in (one, other):
        for array in (made.positions, made.old, made.new) if made else ():
            array.flags.writeable = False
    compose(one, other)
    rebase(one, change(a, c))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_the_dtype_stays(dtype: type) -> None:
    a, b, c = (0,) * SIZE, (1, 2) * (SIZE // 2), (3,) * SIZE
    both = compose(change(a, b, dtype), change(b, c, dtype))
    assert both is not None
    assert both.old.dtype == both.new.dtype == dtype


def test_large_positions_of_a_block_stay_apart() -> None:
    at = np.array([0, BLOCK - 1], np.uint32)
    first = BlockChange(0, at[1:], np.array([0], np.uint8), np.array([1], np.uint8))
    then = BlockChange(0, at, np.array([5, 1], np.uint8), np.array([6, 2], np.uint8))
    assert table(compose(first, then)) == {0: (5, 6), BLOCK - 1: (0, 2)}


# -- states --------------------------------------------------------------------------------------------------------


def read(layout: Layout, weights: "FlatWeights | Overlay") -> dict[str, Bits]:
    """The full state, read block by block."""
    out = {spec.name: np.empty(spec.size, spec.kind.bits) for spec in layout.tensors}
    for tile in layout.tiles:
        for number in range(tile.block_count):
            bits = weights.block(tile, number)
            out[tile.tensor.name][tile.flat_indices(np.arange(bits.size) + number * BLOCK)] = bits
    return out


@given(seeds)
def test_arrays_read_as_they_are(seed: int) -> None:
    layout = random_layout(seed)
    state = random_state(np.random.default_rng(seed), layout)
    weights = as_weights(state)
    assert isinstance(weights, FlatWeights)
    assert as_weights(weights) is weights
    assert same(read(layout, weights), state)


@given(seeds, st.integers(1, 4))
def test_overlays_on_overlays_read_as_the_patches_applied(seed: int, depth: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    state = random_state(rng, layout)
    weights: FlatWeights | Overlay = FlatWeights(state)
    before, latest = copied(state), state
    composed: dict[tuple[int, int], BlockChange] = {}
    for _ in range(depth):
        new = changed_state(rng, latest, 0.2, small=False)
        patches = encode(layout, latest, new, codec="gap").patches
        assert same(applied(patches, latest), new)
        changes = by_block(patches)
        weights, latest = Overlay(weights, changes), new
        keys = composed.keys() | changes.keys()
        found = {key: compose(composed.get(key), changes.get(key)) for key in keys}
        composed = {key: one for key, one in found.items() if one}
        assert same(read(layout, weights), latest)
        assert same(read(layout, Overlay(FlatWeights(state), composed)), latest)
    assert same(state, before)


def test_reading_through_an_overlay_copies_only_a_block_that_changes() -> None:
    layout = layouts.make([TensorSpec("w", "U8", (BLOCK + 5,))])
    (tile,) = layout.tiles
    flat = np.zeros(BLOCK + 5, np.uint8)
    one = BlockChange(1, np.array([4], np.uint32), np.array([0], np.uint8), np.array([9], np.uint8))
    over = Overlay(FlatWeights({"w": flat}), by_block([TilePatch(tile, Codec.GAP, (one,))]))
    assert np.shares_memory(over.block(tile, 0), flat)
    assert over.block(tile, 1).tolist() == [0, 0, 0, 0, 9]
    assert not flat.any()
