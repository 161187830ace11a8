"""`gap`: sorted positions as gaps, and the new values as they are (PULSE's Algorithm 1, in byte planes).

Payload: number of changes; bytes per gap; one plane per byte of the gaps, lowest first; one plane per byte of the
values, lowest first. Planes are zstd frames where that is shorter. Needs no old weights; applying it twice is harmless.
"""

import numpy as np

from pulsesync.core.types import Bits
from pulsesync.errors import FormatError
from pulsesync.format import wire
from pulsesync.kernels.arrays import I64


def encode(positions: I64, values: Bits) -> bytes:
    """Write changes at ascending positions of a tile; at least one."""
    return wire.number(positions.size) + build_gaps(positions) + wire.planes(values, values.itemsize)


def decode(payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]") -> tuple[I64, Bits]:
    """Return positions and values of a tile of this many weights. Raises: FormatError."""
    reader = wire.ByteReader(payload, "a gap payload")
    count = reader.number(size)
    positions = parse_gaps(reader, count, size)
    values = reader.planes(count, dtype.itemsize, dtype)
    reader.end()
    return positions, values


def build_gaps(positions: I64) -> bytes:
    """Write ascending positions, at least one: bytes per gap, and the planes of the gaps."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    width = wire.width(gaps)
    return bytes([width]) + wire.planes(gaps.astype("<u8"), width)


def parse_gaps(reader: wire.ByteReader, count: int, size: int) -> I64:
    """Read positions in a tile of this many weights. Raises: FormatError, if one is outside, or there are none."""
    width = reader.byte()
    if not 1 <= width <= 6:
        raise FormatError(f"gaps must have 1 to 6 bytes; these have {width}")
    gaps = reader.planes(count, width, np.dtype("<u2" if width <= 2 else "<u8"))
    # gaps of six bytes, 2^46 of them, would overflow 64 bits: check the sum in floating point first
    if count == 0 or float(gaps.sum(dtype=np.float64)) + count > size:
        raise FormatError(f"{reader.what} has changes beyond the end of its tile, or no changes")
    positions = np.cumsum(gaps, dtype=np.int64)
    positions += np.arange(count)
    return positions
