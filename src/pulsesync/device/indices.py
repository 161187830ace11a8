"""The indices of the weights of blocks in their tensors, which the kernels of the digest need."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Tile
from pulsesync.device.memory import starts_of, to_device
from pulsesync.kernels.arrays import I64
from pulsesync.kernels.spec import GPU_CHUNK


class IndexRuns(NamedTuple):
    """Runs of weights, each in one block and in one piece of a tensor."""

    block: torch.Tensor  # of each run
    before: torch.Tensor  # how many bytes of the block are before it
    rows: torch.Tensor  # (runs, 4 or 7): see `recount` and `recount_any`
    chunks: int  # the most chunks of units that a run can be in

    def addresses(self, at: torch.Tensor) -> torch.Tensor:
        """The addresses of the runs, given those of the blocks."""
        return at[self.block] + self.before


class BlockIndices:
    """The pieces of tensors that blocks of tiles are made of; the weights of all tiles have one size.

    tile_of, begins, sizes: of each block, its tile, where it begins there, and how many weights it has.
    """

    def __init__(self, tiles: Sequence[Tile], tile_of: I64, begins: I64, sizes: I64, device: torch.device) -> None:
        self.device, self.itemsize = device, tiles[0].tensor.kind.itemsize
        self._tile_of, self._begins, self._ends = tile_of, begins, begins + sizes
        tables = [tile.piece_table for tile in tiles]
        self._table = np.concatenate(tables)
        tile_begins = starts_of(np.array([tile.size for tile in tiles], np.int64))  # as if they were concatenated
        piece_begins = np.repeat(tile_begins[:-1], [len(table) for table in tables]) + self._table[:, 0]
        self._first = np.searchsorted(piece_begins, tile_begins[tile_of] + begins, "right") - 1
        self._count = np.searchsorted(piece_begins, tile_begins[tile_of] + self._ends) - self._first

    @cached_property
    def table(self) -> torch.Tensor:
        """The rows of `Tile.piece_table` of all tiles."""
        return to_device(self._table, self.device)

    @cached_property
    def blocks(self) -> torch.Tensor:
        """Of each block: its first row in the table, how many it has, and whether a piece is not contiguous."""
        apart = starts_of(self._table[:, 3] != 0)
        some = apart[self._first + self._count] > apart[self._first]
        return to_device(np.stack([self._first, self._count, some], axis=1), self.device)

    @cached_property
    def runs(self) -> tuple[IndexRuns, IndexRuns]:
        """All runs: those to be read in words of eight bytes, at which tiles begin in memory, and then the others."""
        block = np.repeat(np.arange(self._count.size), self._count)
        number = np.arange(block.size) - np.repeat(starts_of(self._count)[:-1], self._count)
        piece = self._first[block] + number
        piece_begins, starts, columns, strides, offsets = self._table[piece].T
        begins = np.maximum(self._begins[block], piece_begins)
        following = self._table[np.minimum(piece + 1, len(self._table) - 1), 0]
        ends = np.where(number == self._count[block] - 1, self._ends[block], following)
        sizes, inside, tiles = ends - begins, begins - piece_begins, self._tile_of[block]
        per = max(self.itemsize // 2, 1)  # units of a weight
        word = max(8 // self.itemsize, 1)  # weights of a word
        in_words = (strides == 0) & ((starts + inside) % word == 0) & (begins % word == 0)

        def runs(some: NDArray[np.bool_], *columns: I64) -> IndexRuns:
            before = (begins - self._begins[block])[some] * self.itemsize
            rows = np.stack([column[some] for column in columns], axis=1)
            chunks = -(-int(sizes[some].max(initial=0)) * per // GPU_CHUNK) + 1
            number, at, table = (to_device(one, self.device) for one in (block[some], before, rows))
            return IndexRuns(number, at, table, chunks)

        words = runs(in_words, tiles, sizes * per, (starts + inside) * per, offsets)
        return words, runs(~in_words, tiles, sizes, inside, starts, columns, strides, offsets)
