import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError
from pulsesync.format import tables, wire
from pulsesync.format.codecs import step
from pulsesync.testing import random_bits
from tests.helpers import orders, seeds
from tests.helpers import step as step_between

dtypes = st.sampled_from([np.dtype(f"<u{n}") for n in (1, 2, 4)])
SIZES = st.sampled_from([200, 300, 70_000, 1 << 20, 1 << 33, 1 << 46])


def payload(count: int, gaps: list[bytes], steps: list[bytes]) -> memoryview:
    columns = (bytes([len(some)]) + b"".join(bytes([wire.RAW]) + plane for plane in some) for some in (gaps, steps))
    return memoryview(wire.number(count) + b"".join(columns))


@given(seeds, dtypes, st.integers(1, 200), SIZES, st.booleans())
def test_changes_come_back(seed: int, dtype: np.dtype, count: int, size: int, small: bool) -> None:
    rng = np.random.default_rng(seed)
    positions = np.unique(np.append(rng.integers(0, size, count), rng.choice([0, size - 1])))
    old = random_bits(rng, dtype.type, (positions.size,))
    by = rng.integers(1, 4 if small else 1 << 8 * dtype.itemsize, positions.size).astype(dtype)
    new = old + by
    found, steps = step.decode(memoryview(step.encode(positions, old, new)), size, dtype.itemsize)
    assert np.array_equal(found, positions)
    assert np.array_equal(tables.apply_steps(old, steps), new)


def test_steps_are_those_of_the_format() -> None:
    bits = random_bits(np.random.default_rng(1), np.uint16, (300,))
    old, new = bits[:-1], bits[1:]
    differ = old != new
    _, steps = step.decode(memoryview(step.encode(np.arange(299)[differ], old[differ], new[differ])), 299, 2)
    expected = [step_between(a, b, 16) for a, b in zip(orders(old[differ]), orders(new[differ]), strict=True)]
    assert [s for s in steps.tolist() if s != -(1 << 15)] == [s for s in expected if abs(s) != 1 << 15]


def test_the_bytes_are_those_of_the_format() -> None:
    old = np.array([0x3F80, 0x3F80, 0xBF80, 0x0000], np.uint16)
    new = np.array([0x3F81, 0x3F7F, 0xBF81, 0x3F80], np.uint16)  # up by 1, down by 1, down by 1, up by 0x3F80
    data = step.encode(np.array([0, 1, 2, 300]), old, new)
    assert data == bytes([4, 2, 0, 0, 0, 0, 41, 0, 0, 0, 0, 1, 2, 0, 1, 0, 0, 0xFF, 0, 0, 0, 0, 0x7E])


def test_half_the_circle_is_written_as_a_step_down_whatever_the_old_weight() -> None:
    old = np.array([0x0000, 0xFFFF], np.uint16)
    data = step.encode(np.arange(2), old, old[::-1].copy())
    assert step.decode(memoryview(data), 2, 2)[1].tolist() == [-(1 << 15)] * 2


@given(st.data())
def test_a_payload_cut_short_is_refused(draw: st.DataObject) -> None:
    data = step.encode(np.arange(0, 900, 3), np.zeros(300, np.uint16), np.arange(1, 301, dtype=np.uint16))
    with pytest.raises(FormatError):
        step.decode(memoryview(data)[: draw.draw(st.integers(0, len(data) - 1))], 900, 2)


@given(seeds, st.data())
def test_a_damaged_payload_is_refused_or_has_steps_in_its_tile(seed: int, draw: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    positions = np.unique(rng.integers(0, 1000, 50))
    old = random_bits(rng, np.uint16, (positions.size,))
    data = bytearray(step.encode(positions, old, old + rng.integers(1, 9, old.size).astype(np.uint16)))
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        found, steps = step.decode(memoryview(bytes(data)), 1000, 2)
    except FormatError:
        return
    assert found.size == steps.size > 0
    assert found[0] >= 0
    assert found[-1] < 1000
    assert (np.diff(found) > 0).all()
    assert (steps != 0).all()
    assert steps.min() >= -(1 << 15)
    assert steps.max() < 1 << 15


@pytest.mark.parametrize(
    ("data", "size", "error"),
    [
        (payload(1, [b"\x05"], [b"\0"]), 5, FormatError),
        (payload(2, [b"\x02\x02"], [b"\0\0"]), 5, FormatError),
        (payload(2, [b"\xff\xff"] * 6, [b"\0\0"]), 1 << 46, FormatError),
        (payload(0, [b""], [b""]), 5, FormatError),
        (payload(6, [bytes(6)], [bytes(6)]), 5, LimitError),
        (payload(1, [], [b"\0"]), 5, FormatError),
        (payload(1, [b"\0"] * 7, [b"\0"]), 5, FormatError),
        (payload(1, [b"\0"], []), 5, FormatError),
        (payload(1, [b"\0"], [b"\0"] * 3), 5, FormatError),
        (payload(1, [b"\0"], [b"\xff"] * 2), 5, FormatError),
        (memoryview(payload(1, [b"\0"], [b"\0"]).tobytes() + b"\0"), 5, FormatError),
    ],
    ids=[
        "behind the tile",
        "together behind the tile",
        "further than numbers go",
        "no change",
        "more changes than weights",
        "gaps of no bytes",
        "gaps of seven bytes",
        "steps of no bytes",
        "steps of more bytes than a weight",
        "half the circle upwards",
        "bytes too many",
    ],
)
def test_what_is_no_step_payload_is_refused(data: memoryview, size: int, error: type) -> None:
    with pytest.raises(error):
        step.decode(data, size, 2)
