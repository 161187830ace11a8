import hashlib
from collections.abc import Mapping
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import digest, threads, types
from pulsesync.core.types import DTYPES, Bits, Sum, TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.testing import mutate, random_bits
from tests.backends import use_kernels
from tests.helpers import FLOATS, changed_state, count_sums, densities, encode, random_layout, random_state, seeds

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def table_of(spec: TensorSpec) -> bytes:
    """Name, dtype and shape of a tensor, straight from format.md."""
    head = len(spec.name).to_bytes(4, "little") + spec.name.encode() + bytes([spec.kind.code, len(spec.shape)])
    return head + b"".join(n.to_bytes(8, "little") for n in spec.shape)


def key(offset: int, index: int, word: int) -> int:
    """The key of a unit by its tensor's offset and its index there, straight from format.md."""
    golden, chunk, place = 0x9E3779B97F4A7C15, offset + index // 4096, index % 4096
    a = mix(0x706C616365000000 + word + (place + 1) * golden) >> 32 | 1
    b = mix(0x70756C7365000000 + word + chunk * golden) | 1
    return a * b


def by_hand(spec: TensorSpec, bits: Bits) -> Sum:
    offset = int.from_bytes(hashlib.sha256(table_of(spec)).digest()[:8], "little")
    units = (bits if bits.itemsize == 1 else bits.view(np.uint16)).tolist()
    return Sum(*(sum(u * key(offset, i, word) for i, u in enumerate(units)) & MASK for word in (1, 2)))


def count(spec: TensorSpec, bits: Bits) -> Sum:
    (tile,) = layouts.make([TensorSpec(spec.name, spec.dtype, spec.shape)]).tiles
    return digest.count_tile(tile, bits)


def whole(bits: Bits, dtype: str = "BF16") -> Sum:
    return count(TensorSpec("w", dtype, (bits.size,)), bits)


def digest_of(layout: Layout, state: Mapping[str, Bits]) -> str:
    return digest.state_digest(layout.tables, count_sums(layout, state).values())


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_tensor_is_counted_as_the_format_says(dtype: str) -> None:
    bits = random_bits(np.random.default_rng(0), DTYPES[dtype].bits.type, (9000,))
    expected = by_hand(TensorSpec("w", dtype, (9000,)), bits)
    for kernel in ("reference", "cpu"):
        with use_kernels(kernel):
            assert whole(bits, dtype) == expected, kernel


@pytest.mark.parametrize("codec", ["gap", "context", "dense"])
@given(seed=seeds, density=densities, bundled=st.booleans())
def test_moving_along_with_a_patch_is_counting_anew(
    codec: patch.CodecName, seed: int, density: float, bundled: bool
) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    layout = layouts.bundle(layout) if bundled else layout
    old = random_state(rng, layout)
    new = changed_state(rng, old, density, small=False)
    before, after = count_sums(layout, old), count_sums(layout, new)
    for one in encode(layout, old, new, codec=codec).patches:
        assert before[one.tile.ordinal] + digest.moved(one) == after[one.tile.ordinal]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@given(seed=seeds)
def test_the_blocks_of_a_tile_add_up_to_it(kernel: str, seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    state = random_state(rng, layout)
    with use_kernels(kernel), mock.patch.object(digest, "BLOCK", 64), mock.patch.object(types, "BLOCK", 64):
        for tile in layout.tiles:
            flat = state[tile.tensor.name]
            blocks = [digest.count_block(tile, n, tile.read_block(flat, n)) for n in range(tile.block_count)]
            assert digest.sum_up(blocks) == digest.count_tile(tile, flat)


@pytest.mark.parametrize("columns", [(), (1500,)])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "I64"])
def test_the_second_block_of_a_tile_is_counted_where_it_lies(dtype: str, columns: tuple[int, ...]) -> None:
    layout = layouts.make([TensorSpec("w", dtype, (1100, 1600), (13,), columns)])
    flat = random_bits(np.random.default_rng(1), DTYPES[dtype].bits.type, (1100 * 1600,))
    tile = layout.tiles[len(columns) + 1]  # the first of the second row of tiles
    assert (tile.row, tile.block_count) == (13, 2)
    blocks = [digest.count_block(tile, n, tile.read_block(flat, n)) for n in range(2)]
    assert digest.sum_up(blocks) == digest.count_tile(tile, flat)
    assert blocks[1] != digest.count_block(tile, 0, tile.read_block(flat, 1))


def test_no_weights_count_nothing() -> None:
    for shape, columns in (((0, 4), ()), ((3, 0), ()), ((4, 4), (2,))):
        for tile in layouts.make([TensorSpec("w", "BF16", shape, (), columns)]).tiles:
            assert digest.count_block(tile, 0, np.empty(0, np.uint16)) == Sum(0, 0)


@given(seeds)
def test_the_sums_of_a_grid_add_up_to_those_of_the_tensor(seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    state = random_state(rng, layout)
    sums = count_sums(layout, state)
    for spec in layout.tensors:
        parts = [sums[tile.ordinal] for tile in layout.tiles if tile.tensor == spec]
        assert digest.sum_up(parts) == count(spec, state[spec.name])


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@given(seed=seeds)
def test_neither_grid_nor_bundles_nor_owners_change_the_state_digest(kernel: str, seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, dtypes=["BF16", "F8_E4M3", "F32", "I64"])
    state = random_state(rng, layout)
    plain = layouts.make(TensorSpec(spec.name, spec.dtype, spec.shape) for spec in layout.tensors)
    owners = {piece.ordinal: int(rng.integers(3)) for piece in layout.pieces}
    others = [layout, layouts.bundle(plain), layouts.bundle(layout), layouts.bundle(layout, owners)]
    with use_kernels(kernel):
        assert {digest_of(one, state) for one in others} == {digest_of(plain, state)}


def test_the_weights_of_a_bundle_are_counted_as_the_format_says() -> None:
    specs = [TensorSpec(name, "BF16", shape) for name, shape in (("a", (4099,)), ("b", (3, 5)), ("c", (8200,)))]
    layout = layouts.bundle(layouts.make([replace(spec, row_cuts=(1,)) for spec in specs]))
    assert [len(tile.pieces) for tile in layout.tiles] == [3, 3]
    state = random_state(np.random.default_rng(0), layout)
    expected = digest.sum_up(by_hand(spec, state[spec.name]) for spec in specs)
    assert digest.sum_up(count_sums(layout, state).values()) == expected


def test_a_long_tensor_is_counted_the_same_by_one_thread_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_bits(np.random.default_rng(0), np.uint16, (100_000,))
    (tile,) = layouts.make([TensorSpec("w", "BF16", (100_000,))]).tiles
    monkeypatch.setattr(threads, "default_threads", lambda: 1)
    alone = digest.count_tile(tile, bits)
    monkeypatch.setattr(threads, "default_threads", lambda: 5)
    monkeypatch.setattr(digest, "_RUN", 999)
    assert digest.count_tile(tile, bits) == alone


BITS = np.array([0x3F80, 0x0000, 0x4000, 0x7FC1, 0x3F80], np.uint16)


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("two values swapped", [0x4000, 0x0000, 0x3F80, 0x7FC1, 0x3F80]),
        ("one value moved on", [0x0000, 0x3F80, 0x4000, 0x7FC1, 0x3F80]),
        ("a zero made negative", [0x3F80, 0x8000, 0x4000, 0x7FC1, 0x3F80]),
        ("another payload of a NaN", [0x3F80, 0x0000, 0x4000, 0x7FC2, 0x3F80]),
        ("one more, one less", [0x3F81, 0x0000, 0x4000, 0x7FC1, 0x3F7F]),
    ],
)
def test_what_arithmetic_hardly_sees_changes_the_digest(what: str, other: list[int]) -> None:
    found = whole(np.array(other, np.uint16))
    assert found.first != whole(BITS).first
    assert found.second != whole(BITS).second


@given(seeds, st.sampled_from(list(DTYPES)))
def test_every_single_change_changes_both_sums(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    bits = random_bits(rng, DTYPES[dtype].bits.type, (5000,))
    other, at = bits.copy(), int(rng.integers(0, bits.size))
    other[at] = mutate(rng, bits[at : at + 1], 1.0)[0]
    a, b = whole(bits, dtype), whole(other, dtype)
    assert a.first != b.first
    assert a.second != b.second


@given(seeds, st.sampled_from(["BF16", "F8_E4M3", "F32"]))
def test_every_swap_of_two_weights_changes_both_sums(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    bits = random_bits(rng, DTYPES[dtype].bits.type, (10_000,))
    i, j = rng.integers(0, bits.size, 2).tolist()
    other = bits.copy()
    other[[i, j]] = other[[j, i]]
    if bits[i] != bits[j]:
        a, b = whole(bits, dtype), whole(other, dtype)
        assert a.first != b.first
        assert a.second != b.second


@pytest.mark.parametrize("size", [6, 70_000])  # in a bundle, and as tiles of their own
def test_two_tensors_that_are_swapped_change_both_sums(size: int) -> None:
    layout = layouts.bundle(layouts.make([TensorSpec(name, "BF16", (size,)) for name in "ab"]))
    state = random_state(np.random.default_rng(0), layout)
    swapped = {"a": state["b"], "b": state["a"]}
    before, after = (digest.sum_up(count_sums(layout, one).values()) for one in (state, swapped))
    assert before.first != after.first
    assert before.second != after.second


def test_a_tensor_of_zeros_counts() -> None:
    specs = [TensorSpec(name, "BF16", (4,)) for name in "ab"]
    one, two = (layouts.bundle(layouts.make(some)) for some in (specs[:1], specs))
    state: dict[str, Bits] = {"a": np.arange(4, dtype=np.uint16), "b": np.zeros(4, np.uint16)}
    assert digest_of(one, {"a": state["a"]}) != digest_of(two, state)


def test_zeros_behind_the_end_count() -> None:
    found = []
    for size in (4, 5):
        layout = layouts.make([TensorSpec("w", "BF16", (size,))])
        found.append(digest_of(layout, {"w": np.zeros(size, np.uint16)}))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "spec", [("v", "BF16", (6,)), ("w", "F16", (6,)), ("w", "BF16", (2, 3)), ("w", "BF16", (1, 6))]
)
def test_name_dtype_and_shape_count(spec: tuple[str, str, tuple[int, ...]]) -> None:
    def state_digest(*fields: object) -> str:
        layout = layouts.make([TensorSpec(*fields)])  # type: ignore[arg-type]
        return digest.state_digest(layout.tables, [Sum(1, 2)])

    assert state_digest(*spec) != state_digest("w", "BF16", (6,))


def test_the_keys_of_places_are_distinct_and_odd() -> None:
    both = digest.keys()
    for word in both:
        assert np.unique(word).size == 4096
        assert (word & 1).all()
    assert not np.array_equal(*both)


def test_the_keys_are_those_of_the_format() -> None:
    for word in (1, 2):
        keys = [mix(0x706C616365000000 + word + (p + 1) * 0x9E3779B97F4A7C15) >> 32 | 1 for p in range(4096)]
        assert digest.keys()[word - 1].tolist() == keys


def test_a_known_state_has_a_known_digest() -> None:
    specs = [TensorSpec("a.weight", "BF16", (3, 5)), TensorSpec("b", "F32", ()), TensorSpec("c", "BOOL", (0, 2))]
    layout = layouts.make(specs)
    state: dict[str, Bits] = {
        "a.weight": np.arange(15, dtype=np.uint16),
        "b": np.array([0x3F800000], np.uint32),
        "c": np.empty(0, np.uint8),
    }
    known = "0fad6a889791f5fa828fb9f3f6e4c64203354efb4647c7ebed9e1a38d84d008a"
    assert digest_of(layout, state) == known
    tables = hashlib.sha256(b"".join(table_of(spec) for spec in specs)).digest()
    sums = [sum(both) & MASK for both in zip(*(by_hand(spec, state[spec.name]) for spec in specs), strict=True)]
    hashed = b"pulse state 2\n" + tables + b"".join(n.to_bytes(8, "little") for n in sums)
    assert hashlib.sha256(hashed).hexdigest() == known


def test_sums_wrap_and_survive_their_bytes() -> None:
    total = Sum(MASK, 5) + Sum(2, MASK)
    assert total == Sum(1, 4)
    assert Sum.from_bytes(total.to_bytes()) == total


@given(seeds)
def test_both_kernels_count_and_move_the_same(seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, dtypes=[*FLOATS, "U64"])
    old = random_state(rng, layout)
    new = changed_state(rng, old, 0.2, small=True)
    found = []
    for kernel in ("reference", "cpu"):
        with use_kernels(kernel):
            part = encode(layout, old, new, codec="gap", history=History())
            found.append((count_sums(layout, new), part.sums))
    assert found[0] == found[1]
