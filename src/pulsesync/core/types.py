"""The records that modules pass to each other. All are frozen; none does I/O."""

import hashlib
import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from pulsesync.kernels.arrays import I64, U8, U32
from pulsesync.kernels.arrays import Bits as Bits

BLOCK = 1 << 20  # weights of a tile that are coded together, in row-major order


class Dtype(NamedTuple):
    """How a tensor's elements are stored: their size, and for floats where the exponent begins."""

    code: int  # in files
    itemsize: int  # bytes
    exponent_shift: int | None  # mantissa bits; None where `context` does not apply

    @property
    def bits(self) -> np.dtype[np.unsignedinteger]:
        return _BITS[self.itemsize]


_BITS: dict[int, np.dtype[np.unsignedinteger]] = {n: np.dtype(f"<u{n}") for n in (1, 2, 4, 8)}


# The names are those of safetensors. Codes are part of the format: never renumber, only add.
DTYPES = {
    "BOOL": Dtype(1, 1, None),
    "U8": Dtype(2, 1, None),
    "I8": Dtype(3, 1, None),
    "F8_E4M3": Dtype(4, 1, 3),
    "F8_E5M2": Dtype(5, 1, 2),
    "U16": Dtype(6, 2, None),
    "I16": Dtype(7, 2, None),
    "F16": Dtype(8, 2, 10),
    "BF16": Dtype(9, 2, 7),
    "U32": Dtype(10, 4, None),
    "I32": Dtype(11, 4, None),
    "F32": Dtype(12, 4, 23),
    "U64": Dtype(13, 8, None),
    "I64": Dtype(14, 8, None),
    "F64": Dtype(15, 8, None),
}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's name, dtype and shape, and the rows and columns at which the publisher cuts it into tiles.

    Cuts are positions inside the 2-D view (shape[0], the rest), without the borders; none means one tile.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    row_cuts: tuple[int, ...] = ()
    column_cuts: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @cached_property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @cached_property
    def kind(self) -> Dtype:
        return DTYPES[self.dtype]

    @cached_property
    def hashed(self) -> bytes:
        """Name, dtype and shape, as digests hash them."""
        name = self.name.encode()
        shape = b"".join(n.to_bytes(8, "little") for n in self.shape)
        return len(name).to_bytes(4, "little") + name + bytes([self.kind.code, len(self.shape)]) + shape

    @cached_property
    def digest_offset(self) -> int:
        """Where the numbers of the tensor's chunks begin in the digest, below 2^64."""
        return int.from_bytes(hashlib.sha256(self.hashed).digest()[:8], "little")


@dataclass(frozen=True)
class Tile:
    """A rectangle of a tensor's 2-D view, or a bundle of small ones: the unit of coding, digests and history.

    A bundle is a tile of a tensor of its own, which has one dimension and contains the weights of its pieces one after
    the other. Its groups can be decoded separately: each contains the pieces of one layer or one expert.
    """

    ordinal: int  # in the layout, over all tensors
    tensor: TensorSpec
    row: int
    column: int
    rows: int
    columns: int
    pieces: tuple["Tile", ...] = field(default=(), compare=False, repr=False)  # of a bundle, in tensors of the model
    groups: tuple[int, ...] = field(default=(), compare=False, repr=False)  # where those of a bundle begin, and the end
    kept: tuple[int, ...] | None = field(default=None, compare=False)  # groups that this process has; None: all

    @cached_property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def size_bytes(self) -> int:
        return self.size * self.tensor.kind.itemsize

    @property
    def names(self) -> list[str]:
        """The tensors of the model whose weights are in it."""
        return list(dict.fromkeys(piece.tensor.name for piece in self.pieces)) if self.pieces else [self.tensor.name]

    @cached_property
    def piece_table(self) -> I64:  # (pieces, 5); one row for a tile that is not a bundle
        """What the digest needs of each piece to find the index of a weight of the tile in its own tensor.

        Where the piece begins in the tile, the index of its first weight in the tensor, its columns, the distance
        between its rows there, in weights (0 if it is contiguous), and the digest offset of the tensor.
        """
        pieces = self.pieces or (self,)
        table = np.empty((len(pieces), 5), np.int64)
        table[:, 0] = list(accumulate((piece.size for piece in pieces[:-1]), initial=0))
        table[:, 1] = [piece.start for piece in pieces]
        table[:, 2] = [piece.columns for piece in pieces]
        table[:, 3] = [0 if piece.contiguous else piece.tensor.columns for piece in pieces]
        table.view(np.uint64)[:, 4] = [piece.tensor.digest_offset for piece in pieces]
        return table

    @cached_property
    def borders(self) -> I64:
        """Where the weights that are coded together begin, and the end of the last: groups of a bundle, else blocks."""
        return np.array(self.groups or (*range(0, self.size, BLOCK), self.size), np.int64)

    @cached_property
    def stream_sizes(self) -> list[int]:
        """The number of weights in each of them."""
        sizes: list[int] = np.diff(self.borders).tolist()
        return sizes

    def streams(self, number: int) -> slice:
        """Which of them are in a block."""
        return slice(0, len(self.groups) - 1) if self.groups else slice(number, number + 1)

    @cached_property
    def start(self) -> int:
        """The flat index, in the tensor, of the tile's first weight."""
        return self.row * self.tensor.columns + self.column

    @cached_property
    def contiguous(self) -> bool:
        return self.columns == self.tensor.columns or self.rows == 1

    def read(self, flat: Bits, begin: int, end: int) -> Bits:
        """Weights begin..end of the tile, in row-major order: a view where the tile is contiguous, else a copy."""
        if self.contiguous:
            return flat[self.start + begin : self.start + end]
        first, last = begin // self.columns, -(-end // self.columns)
        rows = flat.reshape(self.tensor.rows, self.tensor.columns)[self.row + first : self.row + last]
        window = np.ascontiguousarray(rows[:, self.column : self.column + self.columns]).reshape(-1)
        return window[begin - first * self.columns : end - first * self.columns]

    @property
    def block_count(self) -> int:
        return -(-self.size // BLOCK)

    def block_range(self, number: int) -> tuple[int, int]:
        """Where a block begins and ends in the tile."""
        return number * BLOCK, min((number + 1) * BLOCK, self.size)

    def read_block(self, flat: Bits, number: int) -> Bits:
        """The weights of one of the tile's blocks, as `read` gives them."""
        return self.read(flat, *self.block_range(number))

    def write(self, flat: Bits, begin: int, bits: Bits) -> None:
        """Write weights of the tile, from the one numbered begin on."""
        if self.contiguous:
            flat[self.start + begin : self.start + begin + bits.size] = bits
        else:
            flat[self.flat_indices(np.arange(begin, begin + bits.size))] = bits

    def flat_indices(self, positions: I64) -> I64:
        """Turn positions in the tile into flat indices of the tensor."""
        if self.contiguous:
            return positions + self.start
        rows, columns = np.divmod(positions, self.columns)
        indices: I64 = rows * self.tensor.columns + (columns + self.start)
        return indices


class Codec(IntEnum):
    """How a tile's payload is written. Numbers are part of the format."""

    DENSE = 0
    GAP = 1
    CONTEXT = 2
    HISTORY = 3
    STEP = 4
    XOR = 5
    RAW = 6


class Remembered(NamedTuple):
    """The history of a block in its epoch: a byte for each weight below the tile's cut (see `format.history`)."""

    last: U8
    ranks: I64  # where the bytes of what is coded together begin, and the end of the last

    @classmethod
    def alone(cls, last: U8) -> "Remembered":
        """Of a block that is coded as one."""
        return cls(last, np.array((0, last.size)))


@dataclass(frozen=True, eq=False)
class BlockChange:
    """What changes in one block of a tile; old is kept for the digest and for undoing."""

    number: int  # of the block in its tile
    positions: U32  # (changes,) from the block's start, ascending
    old: Bits  # (changes,)
    new: Bits  # (changes,)
    remembered: Remembered | None = None  # the block's history afterwards, where the codec computed it anyway

    @classmethod
    def from_zeros(cls, number: int, bits: Bits) -> "BlockChange":
        """The change that makes a block of zeros these weights."""
        return cls(number, np.arange(bits.size, dtype=np.uint32), np.zeros_like(bits), bits)

    def tile_positions(self) -> I64:
        return self.positions.astype(np.int64) + self.number * BLOCK


@dataclass(frozen=True, eq=False)
class TilePatch:
    """What takes a tile from the base to the new version."""

    tile: Tile
    codec: Codec
    blocks: tuple[BlockChange, ...]  # those with changes, ascending
    cut: int = 0  # `history` only: the class below which weights are tracked

    @property
    def changed(self) -> int:
        return sum(block.positions.size for block in self.blocks)

    def flat_indices(self, block: BlockChange) -> I64:
        return self.tile.flat_indices(block.tile_positions())


class VisibleEntries(NamedTuple):
    """The entries of a piece of an update that are sent: arrays of numpy, or tensors on a device."""

    positions: Any  # int64, in the fragment
    values: Any  # FP32
    largest: int  # the largest bit pattern of the whole piece without the sign


class MovedEntries(NamedTuple):
    """What an outer step did to a piece of the weights: see `kernels.rounds.move`."""

    moved: int  # how many means are not zero
    largest_mean: int  # bit patterns without the sign
    largest_theta: int


class Sum(NamedTuple):
    """The digest of some weights: two sums modulo 2^64. Those of disjoint tiles add up."""

    first: int
    second: int

    def __add__(self, other: "Sum") -> "Sum":  # type: ignore[override]
        return Sum((self.first + other.first) & 0xFFFFFFFFFFFFFFFF, (self.second + other.second) & 0xFFFFFFFFFFFFFFFF)

    def to_bytes(self) -> bytes:
        return self.first.to_bytes(8, "little") + self.second.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, data: bytes) -> "Sum":
        return cls(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:16], "little"))
