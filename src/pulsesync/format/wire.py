"""Reading and writing the small fields of a file: every read is bounded, every error a FormatError.

Numbers of unknown size are LEB128: seven bits a byte, low ones first, the top bit set on all except the last; at most
ten bytes, in the shortest form.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from pulsesync.core.threads import default_threads
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import huffman, versions
from pulsesync.kernels.arrays import I64, U8

RAW, ZSTD = 0, 1
FEW = 64  # up to this number of numbers, a loop is faster than numpy
MANY_PLANES = 128  # from this number of planes of some hundred bytes on, threads pay off: ...
PLANE_THREADS = 4  # ... this number
SAMPLES, SAMPLE_BYTES = 16, 1 << 10  # of a plane, to detect noise
# The bytes of weights hardly repeat, and matches that are found cost more than they save: 2.95 bits a byte with level 1
# and 2.72 with these settings, in less than half the time, for the exponents of normally distributed BF16 weights.
_WITHOUT_MATCHES = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=20,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)


class ByteReader:
    """Reads fields from the beginning of some bytes."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self.data = memoryview(data)
        self.at = 0
        self.what = what

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.at:
            raise FormatError(
                f"{self.what} ends too early: expected {count} bytes at offset {self.at} of {len(self.data)}"
            )
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
                value += byte - 1 << shift  # the 1 removes the top bit of the byte before
                if shift == 70:
                    raise FormatError(f"{self.what} contains a number of more than ten bytes")
        except IndexError:
            raise FormatError(f"{self.what} ends inside a number, after {len(data)} bytes") from None
        if shift and byte == 0:
            raise FormatError(f"{self.what} contains a number that is not in its shortest form")
        if value > limit:
            raise LimitError(f"{self.what} contains {value} where at most {limit} is allowed", limit=limit, value=value)
        self.at = at + 1
        return value

    def numbers(self, count: int, limit: int) -> I64:
        """`count` LEB128 numbers, each at most limit (below 2^63)."""
        if count > len(self.data) - self.at:
            raise FormatError(
                f"{self.what} ends too early: expected {count} numbers at offset {self.at} of {len(self.data)}"
            )
        if count <= FEW:
            return np.array([self.number(limit) for _ in range(count)], np.int64)
        window = np.frombuffer(self.data[self.at : self.at + 10 * count], np.uint8)
        if window[:count].max() <= min(limit, 0x7F):  # true for most lists
            self.at += count
            return window[:count].astype(np.int64)
        ends = np.flatnonzero(window < 0x80)[:count]
        if ends.size < count:
            raise FormatError(f"{self.what} ends inside a number")
        lengths = np.diff(ends, prepend=-1)
        if lengths.max() > 9:
            raise LimitError(f"{self.what} contains a number above {limit}", limit=limit)
        if ((lengths > 1) & (window[ends] == 0)).any():
            raise FormatError(f"{self.what} contains a number that is not in its shortest form")
        used = window[: ends[-1] + 1]
        place = np.arange(used.size) - np.repeat(ends - lengths + 1, lengths)
        values = np.add.reduceat((used & 0x7F).astype(np.int64) << (7 * place), ends - lengths + 1)
        if values.max() > limit:
            raise LimitError(f"{self.what} contains {values.max()} where at most {limit} is allowed", limit=limit)
        self.at += int(ends[-1]) + 1
        return values

    def plane(self, size: int) -> memoryview:
        """`size` bytes, stored as they are or as one zstd frame (see `plane`)."""
        return self.packed_plane(size).unpack()

    def packed_plane(self, size: int) -> "PackedPlane":
        """The same, not unpacked yet."""
        kind = self.byte()
        if kind not in (RAW, ZSTD):
            raise versions.unknown(f"{self.what} has a plane of kind {kind}")
        data = self.take(size if kind == RAW else self.number(limit=max(size - 1, 0)))
        return PackedPlane(kind, data, size, self.what)

    def planes(self, count: int, width: int, dtype: "np.dtype[np.unsignedinteger]") -> NDArray[np.unsignedinteger]:
        """`count` integers of this many bytes, one plane per byte (see `planes`), in a large enough dtype."""
        columns = np.zeros((count, dtype.itemsize), np.uint8)
        for k in range(width):
            columns[:, k] = np.frombuffer(self.plane(count), np.uint8)
        return columns.view(dtype).reshape(-1)

    def end(self) -> None:
        if self.at != len(self.data):
            raise FormatError(f"{self.what} has {len(self.data) - self.at} unexpected bytes at its end")


class PackedPlane(NamedTuple):
    """A plane in a payload. Any thread can unpack it."""

    kind: int
    data: memoryview
    size: int  # of the plane, unpacked
    what: str  # what it is part of, for errors

    def unpack(self) -> memoryview:
        """The bytes of the plane. Raises: FormatError, if its frame is damaged or has another size."""
        return self.data if self.kind == RAW else memoryview(_unzstd(self.data, self.size, self.what))

    def unpack_into(self, room: U8) -> U8:
        """The same, in the given memory, unless the bytes are stored as they are in the payload.

        New memory for a plane of a megabyte costs half as much time as unpacking it.
        """
        if self.kind == RAW:
            return np.frombuffer(self.data, np.uint8)
        out = room[: self.size]
        _unzstd_into(self.data, out, self.what)
        out.flags.writeable = False  # like the other kind: kernels are compiled for each separately
        return out


class _Zstd(threading.local):
    """Of each thread its own: these objects must not be shared, and making one takes as long as a small plane."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1, write_checksum=False)
        self.entropy_coder = zstandard.ZstdCompressor(compression_params=_WITHOUT_MATCHES)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _unzstd(frame: memoryview, size: int, what: str) -> bytes:
    with _checked_frame(frame, size, what):
        data: bytes = _zstd.decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    if len(data) != size:
        raise FormatError(f"{what} contains a zstd frame that does not decode to {size} bytes")
    return data


def _unzstd_into(frame: memoryview, out: U8, what: str) -> None:
    with _checked_frame(frame, out.size, what):
        if _frame_end(frame) != len(frame):  # a stream reader does not check what follows a frame
            raise FormatError(f"{what} contains a zstd frame that ends too early or too late")
        with _zstd.decompressor.stream_reader(frame) as reader:
            if reader.readinto(out.data) != out.size:
                raise FormatError(f"{what} contains a zstd frame that does not decode to {out.size} bytes")


@contextmanager
def _checked_frame(frame: memoryview, size: int, what: str) -> Iterator[None]:
    """A context to unpack a frame, which must state this size. Raises: FormatError, LimitError."""
    try:
        if zstandard.frame_content_size(frame) != size:
            raise FormatError(f"{what} contains a zstd frame that does not decode to {size} bytes")
        if zstandard.get_frame_parameters(frame).window_size > max(size, 1 << 10):
            raise LimitError(f"{what} contains a zstd frame that asks for more memory than its content needs")
        yield
    except zstandard.ZstdError as e:
        raise FormatError(f"{what} contains a damaged zstd frame: {e}") from e


def _frame_end(frame: memoryview) -> int:
    """Where the last block of a frame, and its checksum if it has one, ends; this may be after the end of the bytes."""
    at, last = zstandard.frame_header_size(frame), False
    while not last and at + 3 <= len(frame):
        head = int.from_bytes(frame[at : at + 3], "little")
        last = bool(head & 1)
        repeats_a_byte = head >> 1 & 3 == 1
        at += 3 + (1 if repeats_a_byte else head >> 3)
    if not last:
        return len(frame) + 1
    return at + 4 * zstandard.get_frame_parameters(frame).has_checksum


def number(value: int) -> bytes:
    """Write one LEB128 number."""
    return few_numbers((value,))


def few_numbers(values: Iterable[int]) -> bytes:
    """Write some LEB128 numbers, if there are too few for `numbers` to pay off."""
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


def numbers(values: I64) -> bytes:
    """Write many LEB128 numbers (each in 0..2^63-1)."""
    if values.size <= FEW:
        return few_numbers(values.tolist())
    return _written(values)[0].tobytes()


def runs(values: I64, counts: I64) -> list[bytes]:
    """Write many LEB128 numbers, and split them into runs, of `counts` each."""
    out, borders = _written(values)
    data = out.tobytes()
    return [data[begin:end] for begin, end in pairwise([0, *borders[np.cumsum(counts)].tolist()])]


def _written(values: NDArray[np.integer]) -> tuple[U8, I64]:
    """The bytes of numbers, where each begins, and where the last ends."""
    largest = int(values.max()) if values.size else 0
    if largest < 0x80:
        return values.astype(np.uint8), np.arange(values.size + 1)
    rest = values.astype(np.uint32) if largest < 1 << 32 else values  # half the memory to process
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
    borders = np.zeros(values.size + 1, np.int64)
    np.cumsum(lengths, out=borders[1:])
    return places[used], borders


def plane(data: bytes) -> bytes:
    """Write bytes as one zstd frame with its length in front, or as they are if that is not longer."""
    if len(data) > 16:
        frame: bytes = _zstd.compressor.compress(data)
        if len(frame) + 4 < len(data):
            return bytes([ZSTD]) + number(len(frame)) + frame
    return bytes([RAW]) + data


def pack_planes(some: Sequence[bytes]) -> list[bytes]:
    """Write each of many small planes, all of more than 16 bytes, as `plane` does, without the GIL."""
    raw, packed = bytes((RAW,)), bytes((ZSTD,))
    return [
        b"".join((packed, number(len(frame)), frame)) if len(frame) + 4 < len(data) else raw + data
        for data, frame in zip(some, _compress_each(some), strict=True)
    ]


def _compress_each(some: Sequence[bytes]) -> Any:
    compressor = _zstd.compressor
    if not some or "multi_compress_to_buffer" not in zstandard.backend_features:
        return map(compressor.compress, some)
    return compressor.multi_compress_to_buffer([*some], threads=_plane_threads(len(some)))


def _plane_threads(count: int) -> int:
    return min(PLANE_THREADS, default_threads()) if count >= MANY_PLANES else 1


def unpack_frames(frames: Sequence[memoryview], sizes: Sequence[int]) -> Any:
    """The contents, made without the GIL, of many small zstd frames that state these sizes; None if one is damaged."""
    decompressor = _zstd.decompressor
    try:
        if not frames or "multi_decompress_to_buffer" not in zstandard.backend_features:
            return [decompressor.decompress(frame, max_output_size=n) for frame, n in zip(frames, sizes, strict=True)]
        expected = np.array(sizes, np.uint64).tobytes()
        return decompressor.multi_decompress_to_buffer([*frames], expected, threads=_plane_threads(len(frames)))
    except zstandard.ZstdError:
        return None


def planes(values: NDArray[np.unsignedinteger], width: int) -> bytes:
    """Write the lowest bytes of little-endian integers, this many of each: one plane for each byte, lowest first."""
    columns = values.view(np.uint8).reshape(-1, values.itemsize)[:, :width]
    return b"".join(plane(column.tobytes()) for column in columns.T)


def width(values: I64) -> int:
    """The bytes that the largest of these integers, none of them negative, needs; at least one."""
    return max(1, (int(values.max()).bit_length() + 7) // 8)


def weights_plane(data: U8) -> list[bytes | memoryview]:
    """Write one byte of each of many weights as `plane` does, in pieces.

    Bytes that are noise by a sample are stored as they are.
    """
    frame = huffman.frame(data)
    if frame is None and data.size > 16 and not _is_noise(data):
        frame = [_zstd.entropy_coder.compress(data.data)]
    if frame is not None:
        size = sum(map(len, frame))
        if size + 4 < data.size:
            return [bytes([ZSTD]) + number(size), *frame]
    return [bytes([RAW]), data.data]


def _is_noise(data: U8) -> bool:
    """Whether bytes do not compress, judged by a sample."""
    step = data.size // SAMPLES
    if step < 4 * SAMPLE_BYTES:
        return False
    sample = data[: SAMPLES * step].reshape(SAMPLES, step)[:, :SAMPLE_BYTES].tobytes()
    return len(_zstd.entropy_coder.compress(sample)) >= len(sample)
