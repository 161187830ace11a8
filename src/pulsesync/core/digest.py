"""The positional digest of a state: is this, bit for bit, the state that was published?

The digest of some weights is two sums, modulo 2^64, over their 16-bit units (bytes, for one-byte dtypes) of unit times
a key that belongs to the tensor and to the unit's index in it. The digest of a state is therefore the sum of those of
its tiles, however the tensors are cut and bundled; it changes with O(changed) work, and is recounted by one sequential
read. It guards against accident, not attack: anyone who knows the keys can make two states agree. Signatures are for
that.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Sum, TensorSpec, Tile, TilePatch
from pulsesync.kernels import spec
from pulsesync.kernels.arrays import I64, U8, U32, U64

_MASK = 0xFFFFFFFFFFFFFFFF
_RUN = 1 << 24  # units recounted by one task
_NO_RUNS = np.empty(0, np.int64)
_BYTES = np.zeros((1, 5), np.int64)  # the table of pieces of a tensor of bytes


@cache
def keys() -> U32:
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


def _units_each(bits: Bits) -> int:
    return max(bits.itemsize // 2, 1)


def count_tile(tile: Tile, flat: Bits) -> Sum:
    """Count the digest of a tile that is not a bundle from all its weights; flat is the whole tensor."""
    assert not tile.pieces
    some = max(_RUN // _units_each(flat), 1)

    def part(first: int) -> Sum:
        return _count(flat, first, min(some, tile.size - first), tile.piece_table, in_place=True)

    return sum_up(spread(part, range(0, tile.size, some)))


def count_block(tile: Tile, number: int, bits: Bits) -> Sum:
    """Count the digest of one block of a tile, given its weights: blocks add up to their tile."""
    return _count(bits, number * BLOCK, bits.size, tile.piece_table)


def count_bytes(data: U8, first: int) -> Sum:
    """Count the digest of some bytes of a tensor of bytes whose offset is 0, from the one numbered first on."""
    return _count(data, first, data.size, _BYTES)


def _count(bits: Bits, first: int, count: int, pieces: I64, in_place: bool = False) -> Sum:
    count_weights = kernels.active().digest_weights
    return Sum(*map(int, count_weights(_units(bits), first, count, pieces, _units_each(bits), keys(), in_place)))


def moved(patch: TilePatch) -> Sum:
    """By how much a patch changes a tile's digest: O(changed)."""
    return sum_up(moved_by(patch.tile, block) for block in patch.blocks)


def moved_by(tile: Tile, change: BlockChange) -> Sum:
    """By how much the changes of one block change a tile's digest."""
    first, second, _ = _weigh(tile, change, _NO_RUNS)
    return Sum(int(first), int(second))


def moved_in_runs(tile: Tile, change: BlockChange, first: I64) -> U64:
    """By how much each of several runs of changes changes the first sum of a tile's digest, given where each begins."""
    moved: U64 = _weigh(tile, change, first)[2]
    return moved


def _weigh(tile: Tile, change: BlockChange, runs: I64) -> Any:
    first, per = change.number * BLOCK, _units_each(change.old)
    weigh = kernels.active().digest_change
    return weigh(change.positions, first, tile.piece_table, per, _units(change.old), _units(change.new), keys(), runs)


def sum_up(sums: Iterable[Sum]) -> Sum:
    first = second = 0
    for one in sums:
        first += one.first
        second += one.second
    return Sum(first & _MASK, second & _MASK)


def hash_tables(tensors: Iterable[TensorSpec]) -> bytes:
    """The part of a state digest that is not weights: a hash of all names, dtypes and shapes, in order."""
    return hashlib.sha256(b"".join(spec.hashed for spec in tensors)).digest()


def state_digest(tables: bytes, sums: Iterable[Sum]) -> str:
    """The digest of a state, from the hash of its tables and the sums of all its tiles: 64 hexadecimal digits."""
    return hashlib.sha256(b"pulse state 2\n" + tables + sum_up(sums).to_bytes()).hexdigest()
