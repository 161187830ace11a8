"""The size of a patch under each codec, from counts only: no patch is made.

A coder that knows the right probabilities writes the entropy of what it codes, and ours come within a few per cent of
it, so counts are enough. Predicted against real bytes, step by step: on the 15 steps of a recorded GRPO run (SmolLM2 at
3e-6) `gap` is off by at most 3 %, `context` by 3 % (10 % at the first), `history` by 8 % (12 % at the first two), and
their means by 1, 2 and 1 %; on 35 generated steps of 4 M weights at other scales and rates by 3, 10 and 14 %, `dense`
by 1 %. In 200 tensors of 26,000 weights, where the overhead matters more, by up to 20 %. `history` depends on more than
these counts, namely on when each weight last changed; `of_contexts` uses that where it is known.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, DTYPES
from pulsesync.format.tables import lanes_for
from pulsesync.kernels.spec import DIRECT
from pulsesync_lab.study.recording import Counts

Floats = NDArray[np.floating[Any]]

HOT = 1 / 1024  # share of a class that must change before its weights are hot
COLD_BITS = 24  # of a cold change
# Bits that the coder writes for every bit of entropy: tables are rounded, and shared by tiles that differ.
CODER = 1.025
RECORD_BYTES = 340  # record, header of the part, hashes
TILE_BYTES = 23  # of a changed tile in the index, most of it the digest
BLOCK_BYTES = 5
LANE_BYTES = 4
CELL_BYTES = 1.6  # of a frequency in a table
REMEMBERED, MOST_REMEMBERED = 1.05, 0.36  # see `_saved_by_history`
ORDERED = 0.95  # see `_couple`
HUFFMAN = 1.09  # zstd's first level over the entropy of the byte with the exponent
GAP = 1.04  # the same over all bytes of `gap`


def predict_sizes(
    size: int,
    tensors: int,
    dtype: str,
    *,
    by_class: Counts,
    weights_by_class: Counts,
    units: Counts,
    up: int,
    again: int,
    same_way: int,
) -> dict[str, int]:
    """The bytes of a version with these counts, by codec: all that it adds to a store.

    `size` weights of this dtype in `tensors` tensors; counts as in `Step`. Counts of a sample must be scaled first.
    `dense` is all weights.
    """
    changed = sum(by_class.values())
    whole = _dense(size, tensors, dtype, weights_by_class)
    if not changed:
        return {"plain": RECORD_BYTES, "gap": RECORD_BYTES, "context": RECORD_BYTES, "history": RECORD_BYTES} | {
            "dense": whole
        }
    tiles = min(tensors, changed)
    symbols = _couple(by_class, units, up / changed, DTYPES[dtype].itemsize)
    weights = np.array([max(weights_by_class.get(c, 0), by_class[c]) for c in sorted(by_class)], np.float64)
    context = of_contexts(np.column_stack([weights - symbols.sum(axis=1), symbols]), size, tiles)
    saved = _saved_by_history(again / changed, same_way / max(again, 1))
    return {
        "plain": RECORD_BYTES + tiles * TILE_BYTES + changed * (4 + DTYPES[dtype].itemsize),
        "gap": _gap(size, tiles, dtype, by_class),
        "context": round(context + extra_bits(units) / 8),
        "history": round(context * (1 - saved) + extra_bits(units) / 8),
        "dense": whole,
    }


def of_contexts(counts: Floats, size: int, tiles: int) -> float:
    """Bytes of `context` or `history`, given the counts of each symbol (last axis) in each context.

    The first symbol is "unchanged"; the raw bits of long steps are not counted.
    """
    rows = counts.reshape(-1, counts.shape[-1])
    weights = rows.sum(axis=1)
    changes = weights - rows[:, 0]
    hot = changes > HOT * weights
    bits = CODER * entropy_bits(rows[hot]) + COLD_BITS * float(changes[~hot].sum())
    decisions = float(weights[hot].sum())
    blocks = max(tiles, size / BLOCK)
    framing = blocks * (BLOCK_BYTES + LANE_BYTES * lanes_for(int(decisions / blocks)))
    table = CELL_BYTES * float((rows[hot] >= 1).sum())
    return bits / 8 + framing + table + RECORD_BYTES + tiles * TILE_BYTES


def entropy_bits(counts: Floats) -> float:
    """The entropy in bits of symbols (last axis), given their shares in each context."""
    totals = counts.sum(axis=-1, keepdims=True)
    shares = np.divide(counts, totals, out=np.ones_like(counts), where=(totals > 0) & (counts > 0))
    return float(-(counts * np.log2(shares)).sum())


def symbol_of(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """The size class of a step of this many units: itself, or from 8 on one for each power of two."""
    far = np.frexp(np.maximum(units, 1).astype(np.float64))[1].astype(np.int64) - 4
    return np.where(units <= DIRECT, units, DIRECT + 1 + far)


def extra_bits(units: Mapping[int, float]) -> float:
    """The raw bits of long steps: the position of each in its power of two."""
    return sum(count * math.floor(math.log2(unit)) for unit, count in units.items() if unit > DIRECT)


def _couple(by_class: Counts, units: Counts, up: float, itemsize: int) -> Floats:
    """Changes by class (in order) and symbol, from the two separate counts.

    All weights move about as far, so those in the smallest classes move by the most units: the longest steps are given
    to the lowest classes. The order is not perfect, so a little independence is mixed in.
    """
    totals = np.array([by_class[c] for c in sorted(by_class)], np.float64)
    units = units or {1: 1}
    longest = sorted(units, reverse=True)
    amounts = np.array([units[u] for u in longest], np.float64)
    amounts *= totals.sum() / amounts.sum()
    ends, borders = np.cumsum(totals), np.cumsum(amounts)
    begin_c, begin_u = ends - totals, borders - amounts
    overlap = np.minimum(ends[:, None], borders) - np.maximum(begin_c[:, None], begin_u)
    joint = ORDERED * np.maximum(overlap, 0) + (1 - ORDERED) * np.outer(totals, amounts) / totals.sum()
    sizes = symbol_of(np.array(longest, np.int64))
    out = np.zeros((len(totals), 2 * (DIRECT + 8 * itemsize)))
    for column, at in enumerate(sizes):
        out[:, 2 * at - 2] += up * joint[:, column]
        out[:, 2 * at - 1] += (1 - up) * joint[:, column]
    return out


def _saved_by_history(again: float, same_way: float) -> float:
    """The share of `context`'s bytes that history saves: repeated changes are expected, and so is their direction."""
    if not again:
        return 0.0
    sign = 1 - entropy_bits(np.array([[same_way, 1 - same_way]]))
    return min(MOST_REMEMBERED, REMEMBERED * again) * (1 + 2 * sign) / 3


def _top_byte_bits(dtype: str, classes: Counts) -> float:
    """The entropy of the byte with sign and exponent, and as much of the mantissa as fits."""
    kind = DTYPES[dtype]
    exponent = 8 * kind.itemsize - 1 - (kind.exponent_shift or 0)
    by_byte: dict[int, float] = {}
    for c, count in classes.items():
        key = c >> max(0, exponent - 7)
        by_byte[key] = by_byte.get(key, 0) + count
    total = sum(by_byte.values())
    bits = entropy_bits(np.array([list(by_byte.values())], np.float64)) / total if total else 7.0
    return min(8.0, 1 + bits + max(0, 7 - exponent))


def _dense(size: int, tensors: int, dtype: str, weights_by_class: Counts) -> int:
    top = min(8.0, HUFFMAN * _top_byte_bits(dtype, weights_by_class)) / 8
    return RECORD_BYTES + tensors * TILE_BYTES + round(size * (DTYPES[dtype].itemsize - 1 + top))


def _gap(size: int, tiles: int, dtype: str, by_class: Counts) -> int:
    changed = sum(by_class.values())
    share = min(changed / size, 0.999)
    near = 1 - (1 - share) ** 256  # probability that a gap has one byte
    low = (1 - share) ** np.arange(256)
    bits = min(8.0, entropy_bits(low[None, :]) / float(low.sum()))
    high = entropy_bits(np.array([[near, 1 - near]])) + (1 - near) * math.log2(math.e / max(near, 1e-9))
    value = 8 * (DTYPES[dtype].itemsize - 1) + _top_byte_bits(dtype, by_class)
    return RECORD_BYTES + tiles * (TILE_BYTES + 20) + round(GAP * changed * (bits + high + value) / 8)
