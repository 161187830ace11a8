import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK
from pulsesync.errors import FormatError
from pulsesync.format.codecs import raw
from pulsesync.testing import random_bits
from tests.helpers import seeds


@given(seeds, st.sampled_from([np.dtype(f"<u{n}") for n in (1, 2, 4, 8)]), st.integers(1, 300), st.integers(0, 7))
def test_a_tile_comes_back_from_any_address(seed: int, dtype: np.dtype, size: int, shift: int) -> None:
    weights = random_bits(np.random.default_rng(seed), dtype.type, (size,))
    data = bytes(shift) + b"".join(raw.encode_block(weights))
    (block,) = raw.open_blocks(memoryview(data)[shift:], size, dtype)
    out = np.empty(size, dtype)
    raw.decode_block(block, out)
    assert np.array_equal(out, weights)


def test_the_bytes_are_those_of_memory() -> None:
    assert b"".join(raw.encode_block(np.array([0x0102, 0x0304], np.uint16))) == bytes([2, 1, 4, 3])


def test_a_tile_of_several_blocks_is_cut_at_them() -> None:
    data = memoryview(bytes(2 * BLOCK + 6))
    assert [len(block) for block in raw.open_blocks(data, BLOCK + 3, np.dtype("<u2"))] == [2 * BLOCK, 6]


@pytest.mark.parametrize("size", [0, 199, 201])
def test_a_payload_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match="a raw payload"):
        raw.open_blocks(memoryview(bytes(size)), 100, np.dtype("<u2"))
