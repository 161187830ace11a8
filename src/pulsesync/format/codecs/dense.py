"""`dense`: the whole tile, for anchors, and for tiles in which so much changed that every other codec is larger.

Payload: for each block of 2^20 weights, one plane per byte of the weights, lowest first; planes are zstd frames where
that is shorter. Weights of several bytes are rotated left by one bit first: the sign comes last, and the exponent of
BF16 and FP32 is a separate byte, the only one of trained weights that compresses. Needs no old weights.

The codec `xor` is the same for the new weights XOR the old ones, for tiles in which most weights change a little:
unchanged weights are zero, and so are most upper bits of changed ones.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pulsesync import kernels
from pulsesync.core.types import BLOCK, Bits
from pulsesync.format import wire
from pulsesync.format.wire import PackedPlane
from pulsesync.kernels.arrays import U8

MAX_RATIO = 1 << 15  # of weights to payload, in bytes: a zstd block of 128 KiB has at least 4 bytes
_mine = threading.local()


def encode(blocks: Iterable[Bits]) -> bytes:
    """Write a tile, given as its blocks."""
    return b"".join(piece for block in blocks for piece in encode_block(block))


def encode_block(block: Bits) -> list[bytes | memoryview]:
    """Write one block of a tile, in pieces that follow each other."""
    planes = _split(np.ascontiguousarray(block))
    return [piece for plane in planes for piece in wire.weights_plane(plane)]


def _split(block: Bits) -> Sequence[U8]:
    if block.itemsize == 1:
        return [block.view(np.uint8)]
    if block.itemsize == 2:
        low, high = np.empty(block.size, np.uint8), np.empty(block.size, np.uint8)
        kernels.active(warns=False).split_planes(block, low, high)
        return low, high
    rotated = block << 1 | block >> (8 * block.itemsize - 1)
    return [np.ascontiguousarray(plane) for plane in rotated.view(np.uint8).reshape(-1, block.itemsize).T]


def open_blocks(
    payload: memoryview, size: int, dtype: "np.dtype[np.unsignedinteger]"
) -> Iterator[Sequence[PackedPlane]]:
    """Yield the planes of each block of a tile of this many weights, not unpacked yet. Raises: FormatError."""
    reader = wire.ByteReader(payload, "a dense payload")
    for begin in range(0, size, BLOCK):
        count = min(BLOCK, size - begin)
        yield [reader.packed_plane(count) for _ in range(dtype.itemsize)]
    reader.end()


def decode_block(planes: Sequence[PackedPlane], out: Bits) -> None:
    """Unpack the weights of a block into out. Raises: FormatError, for damaged frames."""
    room = _room(len(planes))
    unpacked = [plane.unpack_into(row) for plane, row in zip(planes, room, strict=True)]
    if len(unpacked) == 2:
        kernels.active(warns=False).join_planes(*unpacked, out)
        return
    for place, plane in zip(out.view(np.uint8).reshape(-1, len(planes)).T, unpacked, strict=True):
        place[:] = plane
    if len(planes) > 2:
        out[:] = out >> 1 | out << (8 * out.itemsize - 1)


def _room(planes: int) -> U8:
    """Memory of this thread in which the planes of a block are unpacked: new memory costs a fault for every page."""
    if not hasattr(_mine, "room") or len(_mine.room) < planes:
        _mine.room = np.empty((planes, BLOCK), np.uint8)
    room: U8 = _mine.room
    return room[:planes]
