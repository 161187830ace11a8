from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import wire

LARGEST = (1 << 63) - 1
values = st.one_of(st.integers(0, 300), st.integers(0, LARGEST), st.sampled_from([127, 128, 16383, 16384, LARGEST]))


def read(data: bytes) -> wire.ByteReader:
    return wire.ByteReader(data, "the test")


@given(values)
def test_a_number_comes_back(value: int) -> None:
    reader = read(wire.number(value))
    assert reader.number(LARGEST) == value
    reader.end()


@given(st.lists(values, max_size=100))
def test_many_numbers_are_written_as_one_after_the_other(some: list[int]) -> None:
    assert wire.numbers(np.array(some, np.int64)) == b"".join(map(wire.number, some))


@given(st.lists(values, max_size=100), st.binary(max_size=5))
def test_many_numbers_are_read_as_one_after_the_other(some: list[int], rest: bytes) -> None:
    data = b"".join(map(wire.number, some)) + rest
    one_by_one, together = read(data), read(data)
    assert [one_by_one.number(LARGEST) for _ in some] == together.numbers(len(some), LARGEST).tolist() == some
    assert one_by_one.at == together.at


@given(st.binary(min_size=40, max_size=80), st.integers(32, 40), st.sampled_from([5, 127, 1 << 20, LARGEST]))
def test_reading_many_numbers_fails_where_reading_each_fails(data: bytes, count: int, limit: int) -> None:
    def outcome(take: object) -> object:
        try:
            return take()  # type: ignore[operator]
        except FormatError:
            return "refused"

    one_by_one, together = read(data), read(data)
    assert outcome(lambda: [one_by_one.number(limit) for _ in range(count)]) == outcome(
        lambda: together.numbers(count, limit).tolist()
    )


@pytest.mark.parametrize("before", [0, 40], ids=["alone", "among many"])
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (b"\x80\x00", FormatError),
        (b"\xff\x80\x00", FormatError),
        (b"\x80", FormatError),
        (b"\xff" * 10 + b"\x01", FormatError),
        (b"\xff" * 9 + b"\x01", LimitError),
        (b"\xff" * 12, FormatError),
        (b"\x81\x01", LimitError),
        (b"", FormatError),
    ],
)
def test_a_number_too_long_too_large_or_cut_short_is_refused(bad: bytes, error: type, before: int) -> None:
    with pytest.raises(error):
        read(b"\x01" * before + bad).numbers(before + 1, 128)


def test_a_number_at_its_limit_is_taken() -> None:
    assert read(wire.number(128)).number(128) == 128
    assert read(wire.number(128) * 50).numbers(50, 128).tolist() == [128] * 50


def test_a_limit_error_names_value_and_limit() -> None:
    with pytest.raises(LimitError) as caught:
        read(wire.number(129)).number(128)
    assert (caught.value.value, caught.value.limit) == (129, 128)


@pytest.mark.parametrize("count", [2, 1 << 40])
def test_more_numbers_than_there_are_bytes_are_refused_before_memory_is_taken(count: int) -> None:
    with pytest.raises(FormatError, match="too early"):
        read(b"\x00").numbers(count, 10)


def test_bytes_beyond_the_end_are_refused() -> None:
    reader = read(b"abc")
    assert bytes(reader.take(2)) == b"ab"
    with pytest.raises(FormatError, match="too early"):
        reader.take(2)
    with pytest.raises(FormatError, match="too early"):
        reader.take(-1)


def test_bytes_left_over_are_refused() -> None:
    with pytest.raises(FormatError, match="1 unexpected bytes at its end"):
        read(b"a").end()


@given(st.one_of(st.binary(max_size=3000), st.integers(0, 3000).map(bytes)))
def test_a_plane_comes_back(data: bytes) -> None:
    reader = read(wire.plane(data))
    assert bytes(reader.plane(len(data))) == data
    reader.end()


@given(st.binary(max_size=3000))
def test_a_plane_is_at_most_one_byte_longer_than_its_bytes(data: bytes) -> None:
    assert len(wire.plane(data)) <= len(data) + 1


def test_a_plane_that_repeats_itself_is_packed() -> None:
    assert wire.plane(bytes(1000))[0] == wire.ZSTD
    assert wire.plane(bytes(16))[0] == wire.RAW


def zstd_plane(data: bytes, **options: Any) -> bytes:
    frame = zstandard.ZstdCompressor(**options).compress(data)
    return bytes([wire.ZSTD]) + wire.number(len(frame)) + frame


@pytest.mark.parametrize("size", [999, 1001])
def test_a_zstd_frame_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match="does not decode to"):
        read(zstd_plane(bytes(1000))).plane(size)


def test_a_zstd_frame_that_does_not_say_its_size_is_refused() -> None:
    with pytest.raises(FormatError, match="does not decode to"):
        read(zstd_plane(bytes(1000), write_content_size=False)).plane(1000)


def test_a_zstd_frame_that_asks_for_a_large_window_is_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(5000))
    assert frame[4] & 0x20  # a single segment, which has no window of its own: write a header that has one
    wide = frame[:4] + bytes([frame[4] & ~0x20, 17 << 3]) + frame[5:]
    assert zstandard.get_frame_parameters(wide).window_size == 1 << 27
    assert zstandard.ZstdDecompressor().decompress(wide) == bytes(5000)
    with pytest.raises(LimitError, match="more memory"):
        read(bytes([wire.ZSTD]) + wire.number(len(wide)) + wide).plane(5000)


@given(st.data())
def test_a_damaged_zstd_frame_is_refused_or_gives_as_many_bytes(data: st.DataObject) -> None:
    plane = bytearray(wire.plane(b"weights and biases " * 50))
    at = data.draw(st.integers(1, len(plane) - 1))
    plane[at] ^= data.draw(st.integers(1, 255))
    with suppress(FormatError):
        assert len(read(bytes(plane)).plane(950)) == 950


def test_two_frames_in_a_plane_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(500))
    with pytest.raises(FormatError):
        read(bytes([wire.ZSTD]) + wire.number(2 * len(frame)) + frame + frame).plane(500)


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(FormatError):
        read(bytes([wire.ZSTD, 0])).plane(0)


def test_a_plane_of_unknown_kind_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="plane of kind 2"):
        read(b"\x02abc").plane(3)


def test_a_frame_that_saves_nothing_is_refused() -> None:
    content = next(
        data
        for data in (bytes(range(n)) + bytes(k) for n in range(60) for k in range(30))
        if len(zstandard.ZstdCompressor().compress(data)) == len(data)
    )
    with pytest.raises(FormatError):
        read(zstd_plane(content)).plane(len(content))
