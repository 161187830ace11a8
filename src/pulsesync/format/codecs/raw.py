"""`raw`: the elements of a tile as they are in memory, little-endian.

For anchors where the link is faster than `dense` is encoded, and for tiles that `dense` does not make smaller. Needs no
old weights.
"""

from collections.abc import Iterator

import numpy as np

from pulsesync.core.types import BLOCK, Bits
from pulsesync.errors import FormatError

MIN_BYTES = 1  # of a payload: an element has at least one


def encode_block(block: Bits) -> list[bytes | memoryview]:
    """Write one block of a tile, in pieces. The bytes may be those of the weights themselves."""
    return [np.ascontiguousarray(block).view(np.uint8).data]


def open_blocks(payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]") -> Iterator[memoryview]:
    """Yield the bytes of each block of a tile of this many weights. Raises: FormatError, if the length is wrong."""
    if len(payload) != size * dtype.itemsize:
        raise FormatError(
            f"a raw payload must have the {size * dtype.itemsize} bytes of its tile; this has {len(payload)}"
        )
    step = BLOCK * dtype.itemsize
    return (payload[begin : begin + step] for begin in range(0, len(payload), step))


def decode_block(data: memoryview, out: Bits) -> None:
    """Copy the weights of a block, which may be at any address, into out."""
    out.view(np.uint8)[:] = np.frombuffer(data, np.uint8)
