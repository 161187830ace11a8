"""Reading and writing the small fields of a file: every read is bounded, every fault a FormatError.

Numbers of unknown size are LEB128: seven bits a byte, low ones first, the top bit set on all but the last; at most ten
bytes, no longer than needed.
"""

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulsesync.errors import FormatError, LimitError

RAW, ZSTD = 0, 1
_mine = threading.local()


class Reader:
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
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
            if shift >= 70:
                raise FormatError(f"{self.what} holds a number of more than ten bytes")
        if shift > 7 and byte == 0:
            raise FormatError(f"{self.what} holds a number written longer than needed")
        if value > limit:
            raise LimitError(f"{self.what} holds {value} where at most {limit} is allowed", limit=limit, value=value)
        return value

    def numbers(self, count: int, limit: int) -> NDArray[np.int64]:
        """Count LEB128 numbers, each at most limit (below 2^63)."""
        if count > len(self.data) - self.at:
            raise FormatError(f"{self.what} ends too early: {count} numbers wanted at {self.at} of {len(self.data)}")
        if count < 32:  # where numpy's overhead is the cost
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

    def end(self) -> None:
        if self.at != len(self.data):
            raise FormatError(f"{self.what} has {len(self.data) - self.at} bytes too many")


def _decompressor() -> zstandard.ZstdDecompressor:
    """One for each thread: they may not be shared, and making one takes as long as unpacking a small plane."""
    if not hasattr(_mine, "decompressor"):
        _mine.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _mine.decompressor
    return found


def _unzstd(frame: memoryview, size: int, what: str) -> bytes:
    data: bytes
    try:
        if zstandard.frame_content_size(frame) != size:
            raise FormatError(f"{what} holds a zstd frame of another size than {size} bytes")
        if zstandard.get_frame_parameters(frame).window_size > max(size, 1 << 10):
            raise LimitError(f"{what} holds a zstd frame that asks for more memory than its content has")
        data = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise FormatError(f"{what} holds a broken zstd frame: {e}") from e
    if len(data) != size:
        raise FormatError(f"{what} holds a zstd frame of another size than {size} bytes")
    return data


def number(value: int) -> bytes:
    """Write one LEB128 number."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def numbers(values: NDArray[np.int64]) -> bytes:
    """Write many LEB128 numbers (each in 0..2^63-1)."""
    if values.size < 32:  # where numpy's overhead is the cost
        return b"".join(map(number, values.tolist()))
    lengths = np.ones(values.size, np.int64)
    for k in range(1, 9):
        lengths += values >> (7 * k) > 0
    ends = np.cumsum(lengths)
    place = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    out: NDArray[np.uint8] = (np.repeat(values, lengths) >> (7 * place) & 0x7F | 0x80).astype(np.uint8)
    out[ends - 1] &= 0x7F
    return out.tobytes()


def plane(data: bytes) -> bytes:
    """Write bytes as one zstd frame with its length in front, or as they are where that is no longer."""
    if len(data) > 16:
        frame: bytes = zstandard.ZstdCompressor(level=1, write_checksum=False).compress(data)
        if len(frame) + 4 < len(data):
            return bytes([ZSTD]) + number(len(frame)) + frame
    return bytes([RAW]) + data
