"""What the coder's kernels take and return: plain records of arrays, which numba passes field by field."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]


class CodedSpan(NamedTuple):
    """Consecutive weights with one block or many. Positions count from the start of the span."""

    old: Bits
    borders: NDArray[np.int64]  # where each block begins, and the end of the last
    shift: int  # a weight's class is its magnitude without this number of lower bits
    cut: int  # weights of lower classes are hot
    rows: NDArray[np.uint32]  # by class, where its row of the tables begins; see `tables.Contexts`
    row_bits: int


class SpanHistory(NamedTuple):
    """The patch that last changed each weight of a span whose class is below the cut of the patch before."""

    last: NDArray[np.uint8]
    ranks: NDArray[np.int64]  # where the bytes of each block begin, and the end of the last
    cut: int
    patch_index: int  # of the current patch in its epoch; 0 where no history is kept


class HotChanges(NamedTuple):
    """The changes of a span's hot weights, as symbols, and the cold weights that turn hot."""

    positions: NDArray[np.uint32]
    new: Bits
    symbols: NDArray[np.uint8]
    extras: NDArray[np.uint32]
    entering_at: NDArray[np.uint32]
    entering: NDArray[np.uint8]  # 0x80 where they go down


class ColdSteps(NamedTuple):
    """The changes of a span's cold weights."""

    positions: NDArray[np.int64]  # ascending
    steps: NDArray[np.int64]


class Decisions(NamedTuple):
    """The decisions of a span's hot weights, counted but not coded yet."""

    counts: NDArray[np.int64]  # how many each block has
    rows: NDArray[np.uint16]  # for each its row of the tables
    changed: NDArray[np.uint32]  # which of them are changes
    symbols: NDArray[np.uint8]  # and their symbols, with directions relative to the last ones


class EncoderTable(NamedTuple):
    """Frequencies as an encoder reads them: see `tables.cumulative` and `tables.reciprocals`."""

    cumulative: NDArray[np.uint16]
    reciprocals: NDArray[np.uint32]
    row_bits: int
    width: int  # bits of a weight


class DecoderTable(NamedTuple):
    """Frequencies as a decoder reads them."""

    cumulative: NDArray[np.uint16]
    symbols: int
    sizes: NDArray[np.uint32]  # the step sizes that it lists; its last symbols are theirs, up and down


class BlockStreams(NamedTuple):
    """The streams of blocks: for each the number of hot changes, lanes and words."""

    changes: NDArray[np.int64]
    lanes: NDArray[np.int64]
    sizes: NDArray[np.int64]
    words: NDArray[np.uint16]  # of all of them, one after the other

    @classmethod
    def none(cls, count: int) -> "BlockStreams":
        """This number of streams without changes."""
        nothing = np.zeros(count, np.int64)
        return cls(nothing, nothing + 1, nothing, np.empty(0, np.uint16))
