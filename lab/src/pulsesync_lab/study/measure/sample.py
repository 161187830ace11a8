"""Which weights a sample has: the same share of every tensor, in even strides, so that it is a view and not a list.

The stride is one for all, and has no factor in common with the length of any row, so it samples every column equally.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class Stride:
    """Every n-th weight of a flat tensor, from a first one on."""

    start: int
    step: int
    count: int

    def of(self, flat: "Sequence[object]") -> object:
        """The sample of a tensor: a view."""
        return flat if self.step == 1 else flat[self.start :: self.step]


def choose(sizes: Sequence[int], columns: Sequence[int], most: int, seed: int = SEED) -> list[Stride]:
    """Choose at most this number of weights, rounded up for each tensor: at least one of each tensor that has any.

    Where that would be more than half of them, all are.
    """
    step = 1 if 2 * most > sum(sizes) else _step(math.ceil(sum(sizes) / most), set(columns))
    random_ = random.Random(seed)
    return [_stride(size, step, random_) for size in sizes]


def _step(least: int, widths: set[int]) -> int:
    """The smallest step that has no factor in common with any width; if that is far off, the best one nearby."""
    near = range(least, 4 * least + 8)
    apart = (step for step in near if all(math.gcd(step, width) == 1 for width in widths))
    return next(apart, None) or min(near, key=lambda step: max(math.gcd(step, width) for width in widths))


def _stride(size: int, step: int, random_: random.Random) -> Stride:
    start = random_.randrange(min(step, size)) if size else 0
    return Stride(start, step, len(range(start, size, step)))
