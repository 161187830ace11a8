from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, Bits
from pulsesync.errors import FormatError
from pulsesync.format.codecs import dense
from pulsesync.testing import random_bits
from tests.helpers import seeds

dtypes = st.sampled_from([np.dtype(f"<u{n}") for n in (1, 2, 4, 8)])
U16 = np.dtype("<u2")


def blocks(data: bytes, size: int, dtype: np.dtype) -> Iterator[Bits]:
    for planes in dense.open_blocks(memoryview(data), size, dtype):
        out = np.empty(planes[0].size, dtype)
        dense.decode_block(planes, out)
        yield out


def decoded(data: bytes, size: int, dtype: np.dtype) -> Bits:
    return np.concatenate([np.empty(0, dtype), *blocks(data, size, dtype)])


@given(seeds, dtypes, st.integers(0, 3000), st.booleans())
def test_a_tile_comes_back(seed: int, dtype: np.dtype, size: int, plain: bool) -> None:
    weights = np.zeros(size, dtype) if plain else random_bits(np.random.default_rng(seed), dtype.type, (size,))
    data = dense.encode([weights] if size else [])
    assert np.array_equal(decoded(data, size, dtype), weights)
    assert decoded(data, size, dtype).dtype == dtype


def test_a_tile_of_several_blocks_comes_back() -> None:
    weights = random_bits(np.random.default_rng(0), np.uint16, (BLOCK + 3,))
    data = dense.encode([weights[:BLOCK], weights[BLOCK:]])
    assert [block.size for block in blocks(data, weights.size, U16)] == [BLOCK, 3]
    assert np.array_equal(decoded(data, weights.size, U16), weights)


def test_the_bytes_are_those_of_the_format() -> None:
    assert dense.encode([np.array([0x8102, 0x0384], np.uint16)]) == bytes([0, 5, 8, 0, 2, 7])
    assert dense.encode([np.array([0x83040201], np.uint32)]) == bytes([0, 3, 0, 4, 0, 8, 0, 6])
    assert dense.encode([np.array([0x81, 3], np.uint8)]) == bytes([0, 0x81, 3])


@pytest.mark.parametrize("scale", [0.02, 1.0, 100.0])
@pytest.mark.parametrize("size", [BLOCK, 40_000, 8_191])
def test_weights_as_they_are_trained_take_little_more_than_their_entropy(size: int, scale: float) -> None:
    weights = (np.random.default_rng(0).standard_normal(size, np.float32) * scale).view(np.uint32) >> 16
    data = dense.encode([weights.astype(np.uint16)])
    assert np.array_equal(decoded(data, size, U16), weights)
    counts = np.bincount(weights >> 7 & 0xFF)
    chances = counts[counts > 0] / size
    entropy = 8 - float((chances * np.log2(chances)).sum())  # of sign and mantissa, and of the exponent
    assert len(data) < 1.012 * entropy * size / 8 + 100


def test_a_plane_that_is_noise_is_stored_as_it_is() -> None:
    block = np.random.default_rng(0).integers(0, 1 << 16, BLOCK, np.uint16)
    assert sum(map(len, dense.encode_block(block))) == 2 + 2 * BLOCK


@given(seeds, st.data())
def test_a_payload_cut_short_is_refused(seed: int, draw: st.DataObject) -> None:
    data = dense.encode([random_bits(np.random.default_rng(seed), np.uint16, (100,))])
    with pytest.raises(FormatError):
        decoded(data[: draw.draw(st.integers(0, len(data) - 1))], 100, U16)


@pytest.mark.parametrize("size", [99, 101])
def test_a_tile_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(FormatError):
        decoded(dense.encode([np.arange(100, dtype=np.uint16)]), size, U16)


def test_bytes_left_over_are_refused() -> None:
    with pytest.raises(FormatError, match="unexpected bytes"):
        decoded(dense.encode([np.arange(100, dtype=np.uint16)]) + b"\0", 100, U16)
