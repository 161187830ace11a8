"""Which weights a sample holds: of every tensor the same share, in even strides, so that it is a view and no list.

A stride has no factor in common with the length of a row, so it meets every column alike.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

SEED = 0


@dataclass(frozen=True)
class Stride:
    """Every so many weights of a flat tensor, from a first one on."""

    start: int
    step: int
    count: int

    def of(self, flat: "Sequence[object]") -> object:
        """The sample of a tensor: a view."""
        return flat if self.step == 1 else flat[self.start :: self.step]


def choose(sizes: Sequence[int], columns: Sequence[int], most: int, seed: int = SEED) -> list[Stride]:
    """Choose at most so many weights, rounded up for each tensor: of one that has any, one at least."""
    share = min(1.0, most / max(sum(sizes), 1))
    random_ = random.Random(seed)
    return [_stride(size, width, share, random_) for size, width in zip(sizes, columns, strict=True)]


def _stride(size: int, width: int, share: float, random_: random.Random) -> Stride:
    step = min(math.ceil(1 / share), max(size, 1)) if share > 0 else max(size, 1)
    while step > 1 and math.gcd(step, width) > 1:
        step += 1
    start = random_.randrange(min(step, size)) if size else 0
    return Stride(start, step, len(range(start, size, step)))
