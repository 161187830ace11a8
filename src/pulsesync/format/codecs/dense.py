"""`dense`: the whole tile, for anchors and where so much changed that anything else is larger.

Payload: for each block of 2^20 weights, one plane per byte of the weights, lowest first; planes are zstd frames where
that is shorter. Needs no old weights.

The codec `xor` is the same of the new weights XOR the old ones, for tiles in which most weights change a little: what
did not change is zero, and so are most upper bits of what did.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from pulsesync.core.types import BLOCK, Bits
from pulsesync.format import wire

MAX_RATIO = 1 << 15  # of weights to payload, in bytes: a zstd block of 128 KiB has at least 4 bytes
MIN_BYTES = 2  # of a payload: a plane has a kind and content


def encode(blocks: Iterable[Bits]) -> bytes:
    """Write a tile, given as its blocks."""
    return b"".join(
        wire.plane(np.ascontiguousarray(plane).tobytes())
        for block in blocks
        for plane in block.view(np.uint8).reshape(-1, block.itemsize).T
    )


def decode(payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]") -> Iterator[Bits]:
    """Yield the weights of each block of a tile of this many weights.

    Raises:
        FormatError: the payload is not one of this codec, or of another length.
    """
    reader = wire.ByteReader(payload, "a dense payload")
    for begin in range(0, size, BLOCK):
        count = min(BLOCK, size - begin)
        run = np.empty((count, dtype.itemsize), np.uint8)
        for k in range(dtype.itemsize):
            run[:, k] = np.frombuffer(reader.plane(count), np.uint8)
        yield run.view(dtype).reshape(-1)
    reader.end()
