"""`gap`: sorted positions as gaps, and the new values as they are (PULSE's Algorithm 1, in byte planes).

Payload: number of changes; bytes per gap; one plane per byte of the gaps, lowest first; one plane per byte of the
values, lowest first. Planes are zstd frames where that is shorter. Needs no old weights; applying it twice is harmless.
"""

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import Bits
from pulsesync.errors import FormatError
from pulsesync.format import wire


def encode(positions: NDArray[np.int64], values: Bits) -> bytes:
    """Write changes at ascending positions of a tile; at least one."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    width = max(1, (int(gaps.max()).bit_length() + 7) // 8)
    columns = gaps.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    planes = [*columns.T, *values.view(np.uint8).reshape(-1, values.itemsize).T]
    return wire.number(positions.size) + bytes([width]) + b"".join(wire.plane(p.tobytes()) for p in planes)


def decode(payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]") -> tuple[NDArray[np.int64], Bits]:
    """Return positions and values of a tile of this many weights.

    Raises:
        FormatError: positions leave the tile, or the payload is not one of this codec.
    """
    reader = wire.ByteReader(payload, "a gap payload")
    count, width = reader.number(size), reader.byte()
    if not 1 <= width <= 6:
        raise FormatError(f"gaps of {width} bytes; 1 to 6 are allowed")
    gaps = _from_planes(reader, count, width, np.dtype("<u2" if width <= 2 else "<u8"))
    values = _from_planes(reader, count, dtype.itemsize, dtype)
    reader.end()
    # gaps of six bytes, 2^46 of them, would overflow 64 bits: look at the sum in floating point first
    if count == 0 or float(gaps.sum(dtype=np.float64)) + count > size:
        raise FormatError("a gap payload has changes outside its tile, or none")
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(count)
    return positions, values


def _from_planes(reader: wire.ByteReader, count: int, width: int, dtype: "np.dtype[np.unsignedinteger]") -> Bits:
    """Put planes together, lowest byte first, to integers that have room for them."""
    columns = np.zeros((count, dtype.itemsize), np.uint8)
    for k in range(width):
        columns[:, k] = np.frombuffer(reader.plane(count), np.uint8)
    return columns.view(dtype).reshape(-1)
