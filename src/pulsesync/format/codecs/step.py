"""`step`: sorted positions as gaps, as in `gap`, and how far each weight moves instead of its new value.

Payload: number of changes; bytes per gap and planes of the gaps; bytes per step and planes of the steps. Steps are
those of `context`, and most are short: one plane, which compresses well. Needs only the old weights at its positions.
"""

import numpy as np

from pulsesync.core.types import Bits
from pulsesync.errors import FormatError
from pulsesync.format import tables, wire
from pulsesync.format.codecs.gap import build_gaps, parse_gaps
from pulsesync.kernels.arrays import I64


def encode(positions: I64, old: Bits, new: Bits) -> bytes:
    """Write changes at ascending positions of a tile; at least one, and each must be a change."""
    return wire.number(positions.size) + build_gaps(positions) + build_steps(tables.wrapped_steps(old, new))


def decode(payload: memoryview, size: int, itemsize: int) -> tuple[I64, I64]:
    """Return positions and steps of a tile of this many weights, of `itemsize` bytes each. Raises: FormatError."""
    reader = wire.ByteReader(payload, "a step payload")
    count = reader.number(size)
    positions = parse_gaps(reader, count, size)
    steps = parse_steps(reader, count, itemsize)
    reader.end()
    # A step of half the range is written downwards: the direction must not depend on the old weight, because a worker
    # that has a part of a tile does not have all old weights.
    if (steps == 1 << (8 * itemsize - 1)).any():
        raise FormatError("a step payload has a step of half its dtype's range upwards; it must be written downwards")
    return positions, steps


def build_steps(steps: I64) -> bytes:
    """Write steps, none of them 0: bytes per step, and the planes of the steps."""
    codes = ((steps << 1) ^ (steps >> 63)) - 1
    width = wire.width(codes)
    return bytes([width]) + wire.planes(codes.astype("<u8"), width)


def parse_steps(reader: wire.ByteReader, count: int, itemsize: int) -> I64:
    """Read steps of weights of this size: none is 0, none is longer than half the range. Raises: FormatError."""
    width = reader.byte()
    if not 1 <= width <= itemsize:
        raise FormatError(f"steps must have 1 to {itemsize} bytes; these have {width}")
    codes = reader.planes(count, width, np.dtype(f"<u{1 << (width - 1).bit_length()}")).astype(np.int64) + 1
    return (codes >> 1) ^ -(codes & 1)
