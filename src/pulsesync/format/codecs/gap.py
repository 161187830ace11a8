"""`gap`: sorted positions as gaps, and the new values as they are (PULSE's Algorithm 1, in byte planes).

Payload: number of changes; bytes per gap; one plane per byte of the gaps, lowest first; one plane per byte of the
values, lowest first. Planes are zstd frames where that is shorter. Needs no old weights; applying it twice is harmless.
"""

import numpy as np
from numpy.typing import NDArray

from pulsesync.errors import FormatError
from pulsesync.format import wire
from pulsesync.model import Bits


def encode(positions: NDArray[np.int64], values: Bits) -> bytes:
    """Write changes at ascending positions of a tile; at least one."""
    gaps = np.diff(positions, prepend=-1) - 1
    width = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    columns = gaps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    planes = [*columns.T, *values.view(np.uint8).reshape(-1, values.itemsize).T]
    return wire.number(positions.size) + bytes([width]) + b"".join(wire.plane(p.tobytes()) for p in planes)


def decode(payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]") -> tuple[NDArray[np.int64], Bits]:
    """Return positions and values of a tile of this many weights.

    Raises:
        FormatError: positions leave the tile, or the payload is not one of this codec.
    """
    reader = wire.Reader(payload, "a gap payload")
    count, width = reader.number(size), reader.byte()
    if not 1 <= width <= 6:
        raise FormatError(f"gaps of {width} bytes; 1 to 6 are allowed")
    gaps = np.zeros(count, np.int64)
    for k in range(width):
        gaps |= np.frombuffer(reader.plane(count), np.uint8).astype(np.int64) << (8 * k)
    values = np.empty((count, dtype.itemsize), np.uint8)
    for k in range(dtype.itemsize):
        values[:, k] = np.frombuffer(reader.plane(count), np.uint8)
    reader.end()
    # 2^48 gaps of less than 2^48 cannot overflow 64 bits only if there are few: compare in floating point first
    if count == 0 or float(gaps.sum(dtype=np.float64)) + count > size:
        raise FormatError("a gap payload has changes outside its tile, or none")
    return np.cumsum(gaps + 1) - 1, values.view(dtype).reshape(-1)
