"""What changed from one state to the next, tile by tile, as bits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.model import Bits, BlockChange, Tile
from pulsesync.parallel import spread


class Steps(NamedTuple):
    """A block's changes as `context` sees them."""

    symbols: NDArray[np.uint8]
    extras: NDArray[np.uint32]
    classes: NDArray[np.uint8]
    by_class: NDArray[np.int64]


@dataclass(frozen=True)
class Diff:
    """What changed in a tile; where its dtype has exponents, also as steps, with a sample of its old weights."""

    tile: Tile
    blocks: tuple[BlockChange, ...]
    steps: tuple[Steps, ...] = ()
    sampled: NDArray[np.int64] | None = None

    @property
    def changed(self) -> int:
        return sum(block.positions.size for block in self.blocks)

    def positions(self) -> NDArray[np.int64]:
        return np.concatenate([block.tile_positions() for block in self.blocks])

    def values(self) -> Bits:
        return np.concatenate([block.new for block in self.blocks])


def find_changes(
    tiles: Sequence[Tile], old: Mapping[str, Bits], new: Mapping[str, Bits], as_steps: bool, threads: int | None
) -> list[Diff]:
    """Compare two states tile by tile, as bits; return the tiles that differ."""
    run = kernels.active()

    def block(job: tuple[Tile, int]) -> tuple[BlockChange | None, Steps | None, NDArray[np.int64] | None]:
        tile, number = job
        name, shift = tile.tensor.name, tile.tensor.kind.exponent_shift
        before, after = tile.read_block(old[name], number), tile.read_block(new[name], number)
        found = run.changed(before, after)
        change = BlockChange(number, *found) if found[0].size else None
        if not as_steps or shift is None:
            return change, None, None
        return change, Steps(*run.steps(*found[1:], shift)) if change else None, run.sample_classes(before, shift)

    jobs = [(tile, number) for tile in tiles for number in range(tile.block_count)]
    done = iter(spread(block, jobs, threads))
    out = []
    for tile in tiles:
        found = [next(done) for _ in range(tile.block_count)]
        blocks = tuple(change for change, _, _ in found if change is not None)
        some = tuple(steps for _, steps, _ in found if steps is not None)
        samples = [sampled for _, _, sampled in found if sampled is not None]
        if blocks:
            out.append(Diff(tile, blocks, some, np.sum(samples, axis=0) if some else None))
    return out
