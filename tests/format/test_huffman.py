"""Frames of Huffman codes alone, read by libzstd."""

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulsesync.format import huffman
from tests.helpers import seeds


def read(pieces: list[bytes | memoryview] | None) -> bytes:
    assert pieces is not None
    return zstandard.ZstdDecompressor().decompress(b"".join(pieces), allow_extra_data=False)


def skewed(seed: int, size: int, symbols: int, falls: float) -> NDArray[np.uint8]:
    """Bytes of which each occurs less often than the one before it, by a factor."""
    weights = falls ** np.arange(symbols)
    rng = np.random.default_rng(seed)
    return (128 - rng.choice(symbols, size, p=weights / weights.sum())).astype(np.uint8)


@given(seeds, st.integers(512, 40_000), st.integers(3, 128), st.floats(0.4, 1.0))
def test_a_frame_unpacks_to_its_bytes_and_says_how_many_they_are(
    seed: int, eighths: int, symbols: int, falls: float
) -> None:
    data = skewed(seed, 8 * eighths, symbols, falls)
    pieces = huffman.frame(data)
    if pieces is None:
        lengths = huffman._code_lengths(huffman._count(data))
        assert lengths is None or sum(lengths[byte] for byte in data.tolist()) < 1.6 * data.size
        return
    assert read(pieces) == data.tobytes()
    frame = b"".join(pieces)
    assert zstandard.frame_content_size(frame) == data.size
    assert zstandard.get_frame_parameters(frame).window_size <= data.size


def test_bytes_that_were_not_to_be_expected_have_codes_too() -> None:
    data = skewed(0, 1 << 18, 8, 0.6)
    data[12_345] = 3
    data[200_000] = 77
    assert read(huffman.frame(data)) == data.tobytes()


def test_codes_are_at_most_eleven_bits_long() -> None:
    """Fibonacci numbers make the deepest trees there are."""
    counts = [1, 1]
    while len(counts) < 30:
        counts.append(counts[-1] + counts[-2])
    lengths = huffman._code_lengths(counts)
    assert lengths is not None
    assert max(lengths) <= huffman.MAX_BITS
    assert max(huffman._depths(counts)) > huffman.MAX_BITS
    assert sum(2.0**-length for length in lengths) == 1


@pytest.mark.parametrize(
    "data",
    [
        np.zeros(8192, np.uint8),
        np.arange(8192, dtype=np.uint8),
        skewed(0, 8196, 8, 0.6),
        skewed(0, 2048, 8, 0.6),
        np.append(skewed(0, 8191, 8, 0.6), np.uint8(129)),
        (np.arange(8192) % 50 == 0).astype(np.uint8),
    ],
    ids=["one byte", "bytes above 128", "not a multiple of 8", "few", "one byte above 128", "long runs"],
)
def test_what_is_better_left_to_libzstd_is(data: NDArray[np.uint8]) -> None:
    assert huffman.frame(data) is None
