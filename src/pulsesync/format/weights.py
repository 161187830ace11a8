"""Where coding reads weights from: tensors in memory, or tensors with changes laid over them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from pulsesync.core.types import Bits, BlockChange, Tile, TilePatch
from pulsesync.kernels.arrays import U32


class Weights(Protocol):
    """A state that can be read block by block. The result must not be written; it may be a view."""

    def block(self, tile: Tile, number: int) -> Bits: ...


State: TypeAlias = Mapping[str, Bits] | Weights  # flat tensors by name, or as blocks


@dataclass(frozen=True)
class FlatWeights:
    """Tensors in memory, each flat."""

    flats: Mapping[str, Bits]

    def block(self, tile: Tile, number: int) -> Bits:
        if tile.pieces:
            return np.concatenate([piece.read(self.flats[piece.tensor.name], 0, piece.size) for piece in tile.pieces])
        return tile.read_block(self.flats[tile.tensor.name], number)


Changes = Mapping[tuple[int, int], BlockChange]  # by ordinal of the tile and number of the block


@dataclass(frozen=True)
class Overlay:
    """A state with changes laid over it: O(changed) memory; a block with changes is copied when it is read."""

    under: Weights
    changes: Changes

    def block(self, tile: Tile, number: int) -> Bits:
        bits = self.under.block(tile, number)
        change = self.changes.get((tile.ordinal, number))
        if change is None:
            return bits
        bits = bits.copy()
        bits[change.positions] = change.new
        return bits


def as_weights(state: State) -> Weights:
    """Plain arrays as `Weights`."""
    return FlatWeights(state) if isinstance(state, Mapping) else state


def by_block(patches: Sequence[TilePatch]) -> dict[tuple[int, int], BlockChange]:
    return {(patch.tile.ordinal, block.number): block for patch in patches for block in patch.blocks}


def compose(first: BlockChange | None, then: BlockChange | None) -> BlockChange | None:
    """Two changes of a block, one after the other, as one; None if the second reverts the first."""
    if first is None or then is None:
        return first or then
    positions = _union(first.positions, then.positions)
    old, new = np.empty(positions.size, first.old.dtype), np.empty(positions.size, first.old.dtype)
    earlier, later = np.searchsorted(positions, first.positions), np.searchsorted(positions, then.positions)
    old[later], new[earlier] = then.old, first.new
    old[earlier], new[later] = first.old, then.new
    return differing(first.number, positions, old, new)


def _union(a: U32, b: U32) -> U32:
    """Merge two ascending arrays. numpy's union1d hashes them first, at a hundred times the cost."""
    both = np.concatenate((a, b))
    both.sort(kind="stable")  # finds the two runs, and merges them
    new = np.append(True, both[1:] != both[:-1])
    merged: U32 = both[new]
    return merged


def rebase(change: BlockChange | None, onto: BlockChange | None) -> BlockChange | None:
    """Turn a change of a base into a change of the state after another change of that base."""
    return compose(inverse(onto) if onto else None, change)


def differing(number: int, positions: U32, old: Bits, new: Bits) -> BlockChange | None:
    """The change of a block at those of these positions where old and new differ; None if there are none."""
    differ = old != new
    if not differ.all():
        positions, old, new = positions[differ], old[differ], new[differ]
    return BlockChange(number, positions, old, new) if positions.size else None


def inverse(change: BlockChange) -> BlockChange:
    return BlockChange(change.number, change.positions, change.new, change.old)
