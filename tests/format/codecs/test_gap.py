import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError
from pulsesync.format import wire
from pulsesync.format.codecs import gap
from pulsesync.testing import random_bits
from tests.helpers import seeds

dtypes = st.sampled_from([np.dtype(f"<u{n}") for n in (1, 2, 4, 8)])
U16 = np.dtype("<u2")


def payload(count: int, width: int, planes: list[bytes]) -> memoryview:
    head = wire.number(count) + bytes([width])
    return memoryview(head + b"".join(bytes([wire.RAW]) + plane for plane in planes))


@given(seeds, dtypes, st.integers(1, 200), st.sampled_from([200, 300, 70_000, 1 << 20, 1 << 33, 1 << 46]))
def test_changes_come_back(seed: int, dtype: np.dtype, count: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    positions = np.unique(np.append(rng.integers(0, size, count), rng.choice([0, size - 1])))
    values = random_bits(rng, dtype.type, (positions.size,))
    found, read = gap.decode(memoryview(gap.encode(positions, values)), size, dtype)
    assert np.array_equal(found, positions)
    assert np.array_equal(read, values)
    assert read.dtype == dtype


def test_every_weight_of_a_tile_may_change() -> None:
    values = np.arange(5000, dtype=np.uint16)
    data = gap.encode(np.arange(5000), values)
    assert np.array_equal(gap.decode(memoryview(data), 5000, U16)[1], values)
    assert len(data) < 5300  # gaps of 0 cost nothing, values cannot be packed below a byte and a bit


def test_the_bytes_are_those_of_the_format() -> None:
    data = gap.encode(np.array([0, 300]), np.array([0x0102, 0x0304], np.uint16))
    assert data == bytes([2, 2, 0, 0, 43, 0, 0, 1, 0, 2, 4, 0, 1, 3])


@given(st.data())
def test_a_payload_cut_short_is_refused(draw: st.DataObject) -> None:
    data = gap.encode(np.arange(0, 900, 3), np.zeros(300, np.uint16))
    with pytest.raises(FormatError):
        gap.decode(memoryview(data)[: draw.draw(st.integers(0, len(data) - 1))], 900, U16)


@given(seeds, st.data())
def test_a_damaged_payload_is_refused_or_stays_inside_its_tile(seed: int, draw: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    positions = np.unique(rng.integers(0, 1000, 50))
    data = bytearray(gap.encode(positions, random_bits(rng, np.uint16, (positions.size,))))
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        found, values = gap.decode(memoryview(bytes(data)), 1000, U16)
    except FormatError:
        return
    assert found.size == values.size > 0
    assert found[0] >= 0
    assert found[-1] < 1000
    assert (np.diff(found) > 0).all()


@pytest.mark.parametrize(
    ("data", "size", "error"),
    [
        (payload(1, 1, [b"\x05", b"\0", b"\0"]), 5, FormatError),
        (payload(2, 1, [b"\x02\x02", b"\0\0", b"\0\0"]), 5, FormatError),
        (payload(2, 6, [b"\xff\xff"] * 6 + [b"\0\0"] * 2), 1 << 46, FormatError),
        (payload(0, 1, [b"", b"", b""]), 5, FormatError),
        (payload(6, 1, [bytes(6)] * 3), 5, LimitError),
        (payload(1, 0, [b"\0", b"\0"]), 5, FormatError),
        (payload(1, 7, [b"\0"] * 9), 5, FormatError),
        (payload(1, 1, [b"\0", b"\0"]), 5, FormatError),
        (payload(1, 1, [b"\0", b"\0", b"\0", b"\0"]), 5, FormatError),
    ],
    ids=[
        "behind the tile",
        "together behind the tile",
        "further than numbers go",
        "no change",
        "more changes than weights",
        "gaps of no bytes",
        "gaps of seven bytes",
        "a plane too few",
        "a plane too many",
    ],
)
def test_what_is_no_gap_payload_is_refused(data: memoryview, size: int, error: type) -> None:
    with pytest.raises(error):
        gap.decode(data, size, U16)
