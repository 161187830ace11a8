"""The history of an epoch, which both ends track: the last patch that changed each hot weight, and the direction.

It depends only on the epoch's patches: empty before the first, and after each one, for every tile that a `history`
payload has reached, one byte per weight whose class is below the tile's cut. No path, anchor or restart can make two
ends differ, and replaying the epoch rebuilds it.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from pulsesync import kernels
from pulsesync.core.digest import count_bytes
from pulsesync.core.threads import spread
from pulsesync.core.types import BlockChange, Codec, Remembered, Sum, Tile, TilePatch
from pulsesync.errors import FormatError
from pulsesync.format.codecs.context import NO_HISTORY, BlockMemory, KeptGroups, magnitudes
from pulsesync.format.json_reader import load_json
from pulsesync.format.weights import State, Weights, as_weights
from pulsesync.kernels.arrays import U8

MAX_INDEX = 127  # patches of an epoch, so that an index fits seven bits


@dataclass(frozen=True)
class TileHistory:
    """The bytes of one tile, block by block, and the class below which its weights are tracked."""

    cut: int
    blocks: tuple[Remembered, ...]


class TileHistorySummary(NamedTuple):
    """The part of a history's digest for one tile."""

    cut: int
    size: int  # bytes
    sum: Sum


@dataclass(frozen=True)
class History:
    """The history of a state: frozen, so that a transaction is the choice between two of them."""

    index: int = 0  # patches of the epoch so far
    tiles: Mapping[int, TileHistory] = field(default_factory=dict)
    counted: dict[int, TileHistorySummary] = field(default_factory=dict, compare=False, repr=False)  # if known

    @property
    def size_bytes(self) -> int:
        return sum(block.last.size for tile in self.tiles.values() for block in tile.blocks)

    def of(self, tile: int, block: int) -> BlockMemory:
        """The history of one block."""
        index = self.index + 1
        known = self.tiles.get(tile)
        return BlockMemory(known.cut, known.blocks[block], index) if known else BlockMemory(index=index)

    def cut(self, tile: int) -> int:
        return self.tiles[tile].cut if tile in self.tiles else 0

    def after(self, patches: Iterable[TilePatch], old: State) -> "History":
        """Return the history after a patch, given the weights before it. This one is unchanged.

        Changes of a tracked tile are tracked, whatever codec they were written with.
        """
        weights = as_weights(old)
        cuts = {}
        for patch in patches:
            if cut := max(self.cut(patch.tile.ordinal), patch.cut if patch.codec == Codec.HISTORY else 0):
                cuts[patch] = cut
        changes = {(patch, block.number): block for patch in cuts for block in patch.blocks}
        jobs = [(patch, number) for patch in cuts for number in range(patch.tile.block_count)]

        def block(job: tuple[TilePatch, int]) -> Remembered:
            patch, number = job
            before = self.of(patch.tile.ordinal, number)
            return advance_block(before, patch.tile, number, changes.get(job), cuts[patch], weights)

        done = iter(spread(block, jobs))
        tiles = {
            patch.tile.ordinal: TileHistory(cut, tuple(next(done) for _ in range(patch.tile.block_count)))
            for patch, cut in cuts.items()
        }
        return self.replaced(self.index + 1, tiles)

    def replaced(
        self, index: int, tiles: Mapping[int, TileHistory], counted: "Mapping[int, TileHistorySummary] | None" = None
    ) -> "History":
        """The history after patch `index`, given the tiles that changed, and their digests as far as they are known."""
        known = {ordinal: one for ordinal, one in self.counted.items() if ordinal not in tiles}
        return History(index, {**self.tiles, **tiles}, {**known, **(counted or {})})

    def digest(self) -> str:
        """Hash cut, length and positional digest of every tracked tile, in order; 64 hexadecimal digits."""
        return digest_of(self.index, self.counts(self.tiles))

    def counts(self, ordinals: Iterable[int]) -> dict[int, TileHistorySummary]:
        """The parts of the digest for these tiles, as far as they are tracked."""
        known = [ordinal for ordinal in ordinals if ordinal in self.tiles]
        new = [ordinal for ordinal in known if ordinal not in self.counted]
        self.counted.update(zip(new, spread(lambda n: count_tile(self.tiles[n]), new), strict=True))
        return {ordinal: self.counted[ordinal] for ordinal in known}

    def to_bytes(self) -> bytes:
        """Encode it for a restart on the same machine: a line of JSON, then the bytes of all blocks.

        Not part of the format: the reader compares its digest with that in the record.
        """
        tiles = {str(n): [tile.cut, [b.ranks.tolist() for b in tile.blocks]] for n, tile in sorted(self.tiles.items())}
        head = json.dumps({"index": self.index, "tiles": tiles}).encode() + b"\n"
        return head + b"".join(block.last.tobytes() for _, tile in sorted(self.tiles.items()) for block in tile.blocks)

    @classmethod
    def from_bytes(cls, data: bytes) -> "History":
        """Read what `to_bytes` wrote. Raises: FormatError."""
        try:
            head = load_json(data[: (at := data.index(b"\n") + 1)], "the head of a saved history")
            tiles = {}
            for n, (cut, ranks) in head["tiles"].items():
                borders = list(accumulate((of_block[-1] for of_block in ranks), initial=at))
                # Copies: for read-only arrays the first patch would compile its kernel again, for several seconds.
                runs = (np.frombuffer(data, np.uint8, end - begin, begin).copy() for begin, end in pairwise(borders))
                blocks = tuple(Remembered(*both) for both in zip(runs, map(np.array, ranks), strict=True))
                tiles[int(n)], at = TileHistory(int(cut), blocks), borders[-1]
            return cls(int(head["index"]), tiles)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as e:
            raise FormatError("these bytes are not a saved history") from e


def memory_of(history: History | None, tile: Tile, number: int) -> BlockMemory:
    """The history of a block; an empty one if none is kept."""
    return BlockMemory() if history is None else history.of(tile.ordinal, number)


def advance_block(
    memory: BlockMemory, tile: Tile, number: int, change: BlockChange | None, cut: int, old: Weights
) -> Remembered:
    """Return the history of a block after a patch; the weights before it are read only if they are needed."""
    if change is None and memory.cut == cut and memory.remembered is not None:
        return memory.remembered
    if change is not None and change.remembered is not None:
        return change.remembered
    before = old.block(tile, number)  # from here on: the coder has not found the hot weights of the block
    positions = change.positions if change else np.empty(0, np.uint32)
    new = change.new if change else np.empty(0, before.dtype)
    shift = tile.tensor.kind.exponent_shift or 0
    if tile.kept is not None:
        kept = KeptGroups.of(tile)
        inside = kept.mask(positions)
        before, positions, new = kept.pick(before), kept.shrink(positions[inside]).astype(np.uint32), new[inside]
    last = memory.remembered.last if memory.remembered else NO_HISTORY
    out: U8 = kernels.active().advance_history(before, shift, memory.cut, cut, last, positions, new, memory.index)
    if not tile.groups:
        return Remembered.alone(out)
    after = before.copy()
    after[positions] = new
    borders = kept.borders if tile.kept is not None else tile.borders
    below = np.append(0, np.cumsum(magnitudes(after, shift) < cut))
    return Remembered(out, below[borders])


def count_tile(tile: TileHistory) -> TileHistorySummary:
    """The part of a history's digest for one tile."""
    size, total = 0, Sum(0, 0)
    for block in tile.blocks:
        total += count_bytes(block.last, size)
        size += block.last.size
    return TileHistorySummary(tile.cut, size, total)


def digest_of(index: int, counts: Mapping[int, TileHistorySummary]) -> str:
    """The digest of a history, from its parts for all tiles: the tiles themselves are not needed."""
    fields = [field for n, (cut, size, total) in sorted(counts.items()) for field in (n, cut, size, *total)]
    packed = struct.pack(f"<{len(fields)}Q", *fields)
    return hashlib.sha256(b"pulse history 1\n" + bytes([index]) + packed).hexdigest()
