import hashlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import digest, types
from pulsesync.core.types import DTYPES, Bits, Sum, TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.testing import mutate, random_bits
from pulsesync.testing.backends import use_kernels
from tests.helpers import FLOATS, changed_state, count_sums, densities, encode, random_layout, random_state, seeds

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z &= MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    return z ^ z >> 31


def key(index: int, word: int) -> int:
    """The key of a unit's place, straight from format.md."""
    golden, chunk, place = 0x9E3779B97F4A7C15, index // 4096, index % 4096
    a = mix(0x706C616365000000 + word + (place + 1) * golden) >> 32 | 1
    b = mix(0x70756C7365000000 + word + chunk * golden) | 1
    return a * b


def by_hand(bits: Bits) -> Sum:
    units = (bits if bits.itemsize == 1 else bits.view(np.uint16)).tolist()
    return Sum(*(sum(u * key(i, word) for i, u in enumerate(units)) & MASK for word in (1, 2)))


def whole(bits: Bits, dtype: str = "BF16") -> Sum:
    (tile,) = layouts.make([TensorSpec("w", dtype, (bits.size,))]).tiles
    return digest.count_tile(tile, bits)


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_tensor_is_counted_as_the_format_says(dtype: str, kernel: str) -> None:
    bits = random_bits(np.random.default_rng(0), DTYPES[dtype].bits.type, (9000,))
    with use_kernels(kernel):
        assert whole(bits, dtype) == by_hand(bits)


@pytest.mark.parametrize("codec", ["gap", "context", "dense"])
@given(seed=seeds, density=densities)
def test_moving_along_with_a_patch_is_counting_anew(codec: patch.CodecName, seed: int, density: float) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
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
        assert digest.sum_up(parts) == whole(state[spec.name], spec.dtype)


@given(seeds)
def test_a_grid_does_not_change_the_state_digest(seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    state = random_state(rng, layout)
    plain = layouts.make(TensorSpec(spec.name, spec.dtype, spec.shape) for spec in layout.tensors)
    assert digest.state_digest(layout.tiles, count_sums(layout, state)) == digest.state_digest(
        plain.tiles, count_sums(plain, state)
    )


def test_a_long_tensor_is_counted_the_same_by_one_thread_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = random_bits(np.random.default_rng(0), np.uint16, (100_000,))
    (tile,) = layouts.make([TensorSpec("w", "BF16", (100_000,))]).tiles
    alone = digest.count_tile(tile, bits, threads=1)
    monkeypatch.setattr(digest, "_RUN", 999)
    assert digest.count_tile(tile, bits, threads=5) == alone


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


def test_zeros_behind_the_end_count() -> None:
    found = []
    for size in (4, 5):
        layout = layouts.make([TensorSpec("w", "BF16", (size,))])
        found.append(digest.state_digest(layout.tiles, count_sums(layout, {"w": np.zeros(size, np.uint16)})))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "spec", [("v", "BF16", (6,)), ("w", "F16", (6,)), ("w", "BF16", (2, 3)), ("w", "BF16", (1, 6))]
)
def test_name_dtype_and_shape_count(spec: tuple[str, str, tuple[int, ...]]) -> None:
    def state_digest(*fields: object) -> str:
        tiles = layouts.make([TensorSpec(*fields)]).tiles  # type: ignore[arg-type]
        return digest.state_digest(tiles, {0: Sum(1, 2)})

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
    sums = count_sums(layout, state)
    assert digest.state_digest(layout.tiles, sums) == "0ca429c0c74a8816f84a5ebebb3527d35476bbc0183788101b531876fa621377"
    hashed = b"pulse state 1\n"
    for spec in specs:
        hashed += len(spec.name).to_bytes(4, "little") + spec.name.encode() + bytes([spec.kind.code, len(spec.shape)])
        hashed += b"".join(n.to_bytes(8, "little") for n in spec.shape)
        hashed += b"".join(n.to_bytes(8, "little") for n in by_hand(state[spec.name]))
    assert hashlib.sha256(hashed).hexdigest() == "0ca429c0c74a8816f84a5ebebb3527d35476bbc0183788101b531876fa621377"


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
