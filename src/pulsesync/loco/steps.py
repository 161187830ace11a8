"""Which entries are sent, and how large they are, as a weight patch: in host memory.

`device.steps` does the same on a GPU.

The old weights of the patch are the descriptions of the entries (`describe`), which all trainers know; an entry that is
sent changes by its size, upwards if its sign points to the nearest border.
"""

import numpy as np

from pulsesync.core.digest import count_tile, moved
from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec
from pulsesync.errors import ChecksumError, FormatError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout
from pulsesync.format.tables import apply_steps
from pulsesync.format.weights import as_weights
from pulsesync.kernels.arrays import I64


def _layout(size: int) -> Layout:
    return layouts.make([TensorSpec("fired", "BF16", (size,))])


def encode_steps(described: Bits, positions: I64, sizes: I64, negative: I64) -> bytes:
    """Write which entries are sent, their sizes in steps, and whether each is negative, 1 or 0."""
    if not positions.size:
        return b""
    layout = _layout(described.size)
    old = described[positions]
    steps = np.where(old >> np.uint16(15) == negative, sizes, -sizes)  # upwards: towards the nearest border
    new = apply_steps(old, steps)
    changes = {}
    for number in range(layout.tiles[0].block_count):
        first, last = np.searchsorted(positions, (number * BLOCK, (number + 1) * BLOCK))
        if first < last:
            here = (positions[first:last] - number * BLOCK).astype(np.uint32)
            changes[0, number] = BlockChange(number, here, old[first:last], new[first:last])
    weights = as_weights({"fired": described})
    diffs = patch.diff_of(layout.tiles, weights, changes)
    return bytes(patch.encode_diff(layout, diffs, weights, {0: count_tile(layout.tiles[0], described)}).data)


def decode_steps(described: Bits, data: memoryview, count: int) -> tuple[I64, I64, I64]:
    """Positions, sizes, and whether each is negative, of this number of entries. Raises: FormatError, or a subclass."""
    if not count:
        if len(data):
            raise FormatError("a payload without entries must have no bytes for them")
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
    layout = _layout(described.size)
    decoded = patch.decode(data, layout, {"fired": described})
    if len(decoded.patches) != 1 or decoded.patches[0].changed != count:
        raise FormatError("a payload does not have the number of entries that its header states")
    found = decoded.patches[0]
    if count_tile(layout.tiles[0], described) + moved(found) != decoded.sums[0]:
        raise ChecksumError("a payload is damaged: its decoded entries do not have the digest that it states")
    positions = np.concatenate([block.tile_positions() for block in found.blocks])
    old = np.concatenate([block.old for block in found.blocks])
    new = np.concatenate([block.new for block in found.blocks])
    steps = (_ordered(new) - _ordered(old) + (1 << 15) & 0xFFFF) - (1 << 15)
    if (steps == -(1 << 15)).any():
        raise FormatError("a payload contains a value above the largest that is allowed")
    return positions, np.abs(steps), (old >> np.uint16(15)).astype(np.int64) ^ (steps < 0)


def _ordered(bits: Bits) -> I64:
    wide = bits.astype(np.int64)
    return wide ^ np.where(wide & 0x8000, 0xFFFF, 0x8000)
