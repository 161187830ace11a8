"""Reading and writing the small fields of a file: every read is bounded, every fault a FormatError.

Numbers of unknown size are LEB128: seven bits a byte, low ones first, the top bit set on all but the last; at most ten
bytes, no longer than needed.
"""

import threading
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulsesync.errors import FormatError, LimitError

RAW, ZSTD = 0, 1
FEW = 64  # numbers up to which numpy's overhead is more than a loop costs
_mine = threading.local()


class ByteReader:
    """Takes fields off the front of some bytes."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self.data = memoryview(data)
        self.at = 0
        self.what = what

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.at:
            raise FormatError(f"{self.what} ends too early: {count} bytes wanted at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, limit: int) -> int:
        """One LEB128 number, at most limit."""
        data, at, shift = self.data, self.at, 0
        try:
            value = byte = data[at]
            while byte >= 0x80:
                shift += 7
                at += 1
                byte = data[at]
                value += byte - 1 << shift  # the 1 is the top bit of the byte before
                if shift == 70:
                    raise FormatError(f"{self.what} holds a number of more than ten bytes")
        except IndexError:
            raise FormatError(f"{self.what} ends too early: inside a number, after {len(data)} bytes") from None
        if shift and byte == 0:
            raise FormatError(f"{self.what} holds a number written longer than needed")
        if value > limit:
            raise LimitError(f"{self.what} holds {value} where at most {limit} is allowed", limit=limit, value=value)
        self.at = at + 1
        return value

    def numbers(self, count: int, limit: int) -> NDArray[np.int64]:
        """Count LEB128 numbers, each at most limit (below 2^63)."""
        if count > len(self.data) - self.at:
            raise FormatError(f"{self.what} ends too early: {count} numbers wanted at {self.at} of {len(self.data)}")
        if count <= FEW:
            return np.array([self.number(limit) for _ in range(count)], np.int64)
        window = np.frombuffer(self.data[self.at : self.at + 10 * count], np.uint8)
        ends = np.flatnonzero(window < 0x80)[:count]
        if ends.size < count:
            raise FormatError(f"{self.what} ends inside a number")
        lengths = np.diff(ends, prepend=-1)
        if lengths.max() > 9:
            raise LimitError(f"{self.what} holds a number beyond {limit}", limit=limit)
        if ((lengths > 1) & (window[ends] == 0)).any():
            raise FormatError(f"{self.what} holds a number written longer than needed")
        used = window[: ends[-1] + 1]
        place = np.arange(used.size) - np.repeat(ends - lengths + 1, lengths)
        values = np.add.reduceat((used & 0x7F).astype(np.int64) << (7 * place), ends - lengths + 1)
        if values.max() > limit:
            raise LimitError(f"{self.what} holds {values.max()} where at most {limit} is allowed", limit=limit)
        self.at += int(ends[-1]) + 1
        return values

    def plane(self, size: int) -> memoryview:
        """Size bytes, stored as they are or as one zstd frame (see `plane`)."""
        if self.byte() == RAW:
            return self.take(size)
        self.at -= 1
        if self.byte() != ZSTD:
            raise FormatError(f"{self.what} holds a plane of unknown kind")
        frame = self.take(self.number(limit=max(size - 1, 0)))
        return memoryview(_unzstd(frame, size, self.what))

    def planes(self, count: int, width: int, dtype: "np.dtype[np.unsignedinteger]") -> NDArray[np.unsignedinteger]:
        """Count integers of this many bytes, a plane for each of their bytes (see `planes`), in a dtype with room."""
        columns = np.zeros((count, dtype.itemsize), np.uint8)
        for k in range(width):
            columns[:, k] = np.frombuffer(self.plane(count), np.uint8)
        return columns.view(dtype).reshape(-1)

    def end(self) -> None:
        if self.at != len(self.data):
            raise FormatError(f"{self.what} has {len(self.data) - self.at} bytes too many")


def _zstd() -> tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor]:
    """Both for each thread: they may not be shared, and making one takes as long as a small plane."""
    if not hasattr(_mine, "zstd"):
        _mine.zstd = zstandard.ZstdCompressor(level=1, write_checksum=False), zstandard.ZstdDecompressor()
    found: tuple[zstandard.ZstdCompressor, zstandard.ZstdDecompressor] = _mine.zstd
    return found


def _unzstd(frame: memoryview, size: int, what: str) -> bytes:
    data: bytes
    try:
        if zstandard.frame_content_size(frame) != size:
            raise FormatError(f"{what} holds a zstd frame of another size than {size} bytes")
        if zstandard.get_frame_parameters(frame).window_size > max(size, 1 << 10):
            raise LimitError(f"{what} holds a zstd frame that asks for more memory than its content has")
        data = _zstd()[1].decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FormatError(f"{what} holds a broken zstd frame: {e}") from e
    if len(data) != size:
        raise FormatError(f"{what} holds a zstd frame of another size than {size} bytes")
    return data


def number(value: int) -> bytes:
    """Write one LEB128 number."""
    return few_numbers((value,))


def few_numbers(values: Iterable[int]) -> bytes:
    """Write some LEB128 numbers, where there are too few for `numbers` to pay."""
    out: list[int] = []
    for value in values:
        left = value
        while left >= 0x4000:
            out.append(left & 0x7F | 0x80)
            left >>= 7
        if left >= 0x80:
            out += (left & 0x7F | 0x80, left >> 7)
        else:
            out.append(left)
    return bytes(out)


def numbers(values: NDArray[np.int64]) -> bytes:
    """Write many LEB128 numbers (each in 0..2^63-1)."""
    if values.size <= FEW:
        return few_numbers(values.tolist())
    return _written(values)[0].tobytes()


def runs(values: NDArray[np.int64], counts: NDArray[np.int64]) -> list[bytes]:
    """Write many LEB128 numbers, and cut them into runs of so many."""
    out, ends = _written(values)
    borders = [0, *np.r_[0, ends][np.cumsum(counts)].tolist()]
    data = out.tobytes()
    return [data[begin:end] for begin, end in pairwise(borders)]


def _written(values: NDArray[np.integer]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes of numbers, and where each ends."""
    largest = int(values.max()) if values.size else 0
    rest = values.astype(np.uint32) if largest < 1 << 32 else values  # half the memory to go through
    longest = max(1, -(-largest.bit_length() // 7))
    places, used = np.empty((values.size, longest), np.uint8), np.ones((values.size, longest), np.bool_)
    lengths = np.ones(values.size, np.int64)
    for k in range(longest):
        places[:, k] = rest & 0x7F
        rest = rest >> 7
        if k + 1 < longest:
            longer = rest > 0
            places[:, k] |= longer.view(np.uint8) << 7
            used[:, k + 1] = longer
            lengths += longer
    return places[used], np.cumsum(lengths)


def plane(data: bytes) -> bytes:
    """Write bytes as one zstd frame with its length in front, or as they are where that is no longer."""
    if len(data) > 16:
        frame: bytes = _zstd()[0].compress(data)
        if len(frame) + 4 < len(data):
            return bytes([ZSTD]) + number(len(frame)) + frame
    return bytes([RAW]) + data


def planes(values: NDArray[np.unsignedinteger], width: int) -> bytes:
    """Write the lowest bytes of little-endian integers, this many of each: one plane for each byte, lowest first."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)[:, :width]
    return b"".join(plane(column.tobytes()) for column in columns.T)


def width(values: NDArray[np.int64]) -> int:
    """The bytes that the largest of these integers, none of them negative, needs; at least one."""
    return max(1, (int(values.max()).bit_length() + 7) // 8)
