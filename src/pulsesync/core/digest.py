"""The positional digest of a state: is this, bit for bit, the state that was published?

A tensor's digest is two sums, modulo 2^64, over its 16-bit units (its bytes, for one-byte dtypes) of unit times a key
that belongs to the unit's place. So it is the sum of its tiles', changes with O(changed) work, and is recounted by one
sequential read. It tells accident, not attack: who knows the keys can make two states agree; signatures are for that.
"""

import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Sum, TensorSpec, Tile, TilePatch
from pulsesync.kernels import spec

_MASK = 0xFFFFFFFFFFFFFFFF
_RUN = 1 << 24  # units recounted by one task
_NO_RUNS = np.empty(0, np.int64)


@cache
def keys() -> NDArray[np.uint32]:
    """The keys of the 4,096 places in a chunk, for both sums: the upper halves of splitmix64's output, never 0."""
    out = np.empty((2, 1 << spec.CHUNK_BITS), np.uint32)
    for word, seed in enumerate(spec.PLACE_SEEDS):
        for place in range(1 << spec.CHUNK_BITS):
            z = (seed + (place + 1) * 0x9E3779B97F4A7C15) & _MASK
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
            out[word, place] = (z ^ (z >> 31)) >> 32 | 1
    return out


def _units(bits: Bits) -> Bits:
    """View elements of 2, 4 or 8 bytes as their 16-bit units, low one first; bytes stay bytes."""
    return bits.view(np.uint16) if bits.itemsize > 1 else bits


def count_tile(tile: Tile, flat: Bits, threads: int | None = None) -> Sum:
    """Count the digest of a tile from all its weights; flat is the whole tensor."""
    units = _units(flat)
    per = units.size // flat.size if flat.size else 1
    start, stride, columns = tile.start * per, tile.tensor.columns * per, tile.columns * per
    rows = tile.rows
    if tile.contiguous:
        rows, columns = 1, tile.size * per
    loop = kernels.active().digest_rectangle

    def part(piece: tuple[int, int, int]) -> Sum:
        begin, some_rows, some_columns = piece
        return Sum(*map(int, loop(units, begin, some_rows, some_columns, stride, keys())))

    if rows == 1:
        pieces = [(start + i, 1, min(_RUN, columns - i)) for i in range(0, columns, _RUN)]
    else:
        some = max(1, _RUN // max(columns, 1))
        pieces = [(start + i * stride, min(some, rows - i), columns) for i in range(0, rows, some)]
    return sum_up(spread(part, pieces, threads))


def count_block(tile: Tile, number: int, bits: Bits) -> Sum:
    """Count the digest of one block of a tile, given its weights: blocks add up to their tile."""
    if not tile.contiguous:
        return moved_by(tile, BlockChange.from_zeros(number, bits)) if bits.size else Sum(0, 0)
    units = _units(bits)
    per = units.size // bits.size if bits.size else 1
    start = (tile.start + number * BLOCK) * per
    counted = kernels.active().digest_rectangle(units, start, 1, units.size, units.size, keys(), start)
    return Sum(*map(int, counted))


def moved(patch: TilePatch) -> Sum:
    """How a tile's digest moves by a patch: O(changed)."""
    return sum_up(moved_by(patch.tile, block) for block in patch.blocks)


def moved_by(tile: Tile, change: BlockChange) -> Sum:
    """How a tile's digest moves by the changes of one block."""
    first, second, _ = _weigh(tile, change, _NO_RUNS)
    return Sum(int(first), int(second))


def moved_in_runs(tile: Tile, change: BlockChange, first: NDArray[np.int64]) -> NDArray[np.uint64]:
    """How the first sum of a tile's digest moves by each of several runs of changes, given where each begins."""
    moved: NDArray[np.uint64] = _weigh(tile, change, first)[2]
    return moved


def _weigh(tile: Tile, change: BlockChange, runs: NDArray[np.int64]) -> Any:
    old, new = _units(change.old), _units(change.new)
    columns, stride = (1, 1) if tile.contiguous else (tile.columns, tile.tensor.columns)
    per = old.size // change.old.size if change.old.size else 1
    first = change.number * BLOCK
    weigh = kernels.active().digest_change
    return weigh(change.positions, first, tile.start, columns, stride, per, old, new, keys(), runs)


def sum_up(sums: Iterable[Sum]) -> Sum:
    total = Sum(0, 0)
    for one in sums:
        total += one
    return total


def state_digest(tiles: Iterable[Tile], sums: Mapping[int, Sum]) -> str:
    """Hash name, dtype, shape and sum of every tensor, in name order, and then pieces and sum of every bundle.

    Returns 64 hexadecimal digits. A tensor of which all is in bundles has no sum of its own.
    """
    by_name: dict[str, tuple[TensorSpec, Sum]] = {}
    bundles = []
    for tile in tiles:
        name, total = tile.tensor.name, sums[tile.ordinal]
        if tile.pieces:
            bundles.append(tile.hashed + total.to_bytes())
        else:
            by_name[name] = tile.tensor, by_name[name][1] + total if name in by_name else total
    named = sorted((name.encode(), tensor.hashed + total.to_bytes()) for name, (tensor, total) in by_name.items())
    return hashlib.sha256(b"".join((b"pulse state 1\n", *(part for _, part in named), *bundles))).hexdigest()
