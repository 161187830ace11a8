"""What changed from one state to the next, tile by tile, as bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import Bits, BlockChange, Tile
from pulsesync.format.weights import Changes, Weights
from pulsesync.kernels.arrays import I64, U8, U32


class BlockSteps(NamedTuple):
    """A block's changes as `context` sees them."""

    symbols: U8
    extras: U32
    classes: U8
    by_class: I64


class TileChanges(Protocol):
    """The changes of a tile, in any memory: access to its blocks or positions may copy them to the host."""

    @property
    def tile(self) -> Tile: ...

    @property
    def blocks(self) -> tuple[BlockChange, ...]: ...

    @property
    def changed(self) -> int: ...

    def positions(self) -> I64:
        """Positions in the tile, ascending."""

    def values(self) -> Bits:
        """The new weights there."""

    def old_values(self) -> Bits:
        """The old weights there."""


@dataclass(frozen=True)
class Diff:
    """The changes of a tile; if its dtype has exponents, also as steps, with a sample of its old weights."""

    tile: Tile
    blocks: tuple[BlockChange, ...]
    steps: tuple[BlockSteps, ...] = ()
    sampled: I64 | None = None

    @cached_property
    def changed(self) -> int:
        return sum(block.positions.size for block in self.blocks)

    def changed_by_class(self) -> I64:
        """The number of changes, by the magnitude class of the old weight."""
        return _total([steps.by_class for steps in self.steps])

    def positions(self) -> I64:
        return np.concatenate([block.tile_positions() for block in self.blocks])

    def values(self) -> Bits:
        return np.concatenate([block.new for block in self.blocks])

    def old_values(self) -> Bits:
        return np.concatenate([block.old for block in self.blocks])


def find_changes(tiles: Sequence[Tile], old: Weights, new: Weights, as_steps: bool) -> list[Diff]:
    """Compare two states tile by tile, as bits; return the tiles that differ."""
    run = kernels.active()

    def block(job: tuple[Tile, int]) -> _FoundBlock:
        tile, number = job
        before = old.block(tile, number)
        found = run.changed(before, new.block(tile, number))
        return _describe(tile, BlockChange(number, *found) if found[0].size else None, before, as_steps)

    return _collect(tiles, block)


def from_changes(tiles: Sequence[Tile], old: Weights, changes: Changes, as_steps: bool) -> list[Diff]:
    """The same from changes that are already known, given the old state."""

    def block(job: tuple[Tile, int]) -> _FoundBlock:
        tile, number = job
        return _describe(tile, changes.get((tile.ordinal, number)), old.block(tile, number), as_steps)

    touched = {ordinal for ordinal, _ in changes}
    return _collect([tile for tile in tiles if tile.ordinal in touched], block)


class _FoundBlock(NamedTuple):
    change: BlockChange | None
    steps: BlockSteps | None
    sampled: I64 | None


def _describe(tile: Tile, change: BlockChange | None, before: Bits, as_steps: bool) -> _FoundBlock:
    run, shift = kernels.active(), tile.tensor.kind.exponent_shift
    if not as_steps or shift is None:
        return _FoundBlock(change, None, None)
    steps = BlockSteps(*run.steps(change.old, change.new, shift)) if change else None
    return _FoundBlock(change, steps, run.sample_classes(before, shift))


def _collect(tiles: Sequence[Tile], block: Callable[[tuple[Tile, int]], _FoundBlock]) -> list[Diff]:
    done = iter(spread(block, [(tile, number) for tile in tiles for number in range(tile.block_count)]))
    out = []
    for tile in tiles:
        found = [next(done) for _ in range(tile.block_count)]
        if blocks := tuple(one.change for one in found if one.change is not None):
            steps = tuple(one.steps for one in found if one.steps is not None)
            samples = [one.sampled for one in found if one.sampled is not None]
            out.append(Diff(tile, blocks, steps, _total(samples) if steps else None))
    return out


def _total(counts: Sequence[I64]) -> I64:
    """The sum of at least one array; a single one is not copied."""
    total: I64 = counts[0] if len(counts) == 1 else np.sum(counts, axis=0)
    return total
