"""What the coder's kernels take and return: plain records of arrays, which numba passes field by field."""

from typing import NamedTuple

import numpy as np

from pulsesync.kernels.arrays import I64, U8, U16, U32, Bits


class CodedSpan(NamedTuple):
    """Consecutive weights with one block or many. Positions count from the start of the span."""

    old: Bits
    borders: I64  # where each block begins, and the end of the last
    shift: int  # a weight's class is its magnitude without this number of lower bits
    cut: int  # weights of lower classes are hot
    rows: U32  # by class, where its row of the tables begins; see `tables.Contexts`
    row_bits: int


class SpanHistory(NamedTuple):
    """The patch that last changed each weight of a span whose class is below the cut of the patch before."""

    last: U8
    ranks: I64  # where the bytes of each block begin, and the end of the last
    cut: int
    patch_index: int  # of the current patch in its epoch; 0 where no history is kept


class HotChanges(NamedTuple):
    """The changes of a span's hot weights, as symbols, and the cold weights that turn hot."""

    positions: U32
    new: Bits
    symbols: U8
    extras: U32
    entering_at: U32
    entering: U8  # 0x80 where they go down


class ColdSteps(NamedTuple):
    """The changes of a span's cold weights."""

    positions: I64  # ascending
    steps: I64


class Decisions(NamedTuple):
    """The decisions of a span's hot weights, counted but not coded yet."""

    counts: I64  # how many each block has
    rows: U16  # for each its row of the tables
    changed: U32  # which of them are changes
    symbols: U8  # and their symbols, with directions relative to the last ones


class EncoderTable(NamedTuple):
    """Frequencies as an encoder reads them: see `tables.cumulative` and `tables.reciprocals`."""

    cumulative: U16
    reciprocals: U32
    row_bits: int
    width: int  # bits of a weight


class DecoderTable(NamedTuple):
    """Frequencies as a decoder reads them."""

    cumulative: U16
    symbols: int
    sizes: U32  # the step sizes that it lists; its last symbols are theirs, up and down


class BlockStreams(NamedTuple):
    """The streams of blocks: for each the number of hot changes, lanes and words."""

    changes: I64
    lanes: I64
    sizes: I64
    words: U16  # of all of them, one after the other

    @classmethod
    def none(cls, count: int) -> "BlockStreams":
        """This number of streams without changes."""
        nothing = np.zeros(count, np.int64)
        return cls(nothing, nothing + 1, nothing, np.empty(0, np.uint16))
