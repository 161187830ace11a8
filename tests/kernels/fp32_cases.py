"""Weights and updates of every kind, for tests of the kernels of a LoCo round."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
NOT_FINITE = 0x7F800000


def floats(bits: Any) -> F32:
    return np.asarray(bits, np.uint32).view(np.float32)


def weights(rng: np.random.Generator, size: int) -> F32:
    """Finite numbers of every kind: usual ones, borders of BF16 and their neighbours, subnormals, zeros, huge ones."""
    signs = rng.integers(0, 2, size, dtype=np.uint32) << np.uint32(31)
    borders = rng.integers(0, 0x7F7F, size, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)
    near = borders + rng.integers(-2, 3, size).astype(np.uint32)
    kinds = [
        rng.normal(0, 0.02, size).astype(np.float32),
        floats(signs | near),
        floats(signs | rng.integers(0, 1 << 23, size, dtype=np.uint32)),
        floats(signs | rng.integers(0, 4, size, dtype=np.uint32)),
        floats(signs | rng.integers(0x7F000000, NOT_FINITE, size, dtype=np.uint32)),
        floats(signs | np.uint32(0x7F7F8000) + rng.integers(-1, 2, size).astype(np.uint32)),  # the last border
        floats(signs | rng.integers(0, NOT_FINITE, size, dtype=np.uint32)),
        np.where(signs, np.float32(-3e38), np.float32(3e38)),
    ]
    return np.choose(rng.choice(len(kinds), size, p=[0.4, *[0.6 / 7] * 7]), kinds).astype(np.float32)


def updates(rng: np.random.Generator, theta: F32) -> F32:
    """Updates of every kind; many are zero, or move theta to a rounding border of its BF16 value or next to it."""
    border = floats(
        (theta.view(np.uint32) & np.uint32(0xFFFF0000)) + rng.integers(0x7FFE, 0x8003, theta.size).astype("u4")
    )
    with np.errstate(over="ignore", invalid="ignore"):
        steps = theta - np.where(np.isfinite(border), border, theta)
    steps = np.where(np.isfinite(steps), steps, np.float32(0))
    zeros = np.where(rng.random(theta.size) < 0.5, np.float32(0), np.float32(-0.0))
    tiny = rng.normal(0, 1e-6, theta.size).astype(np.float32)
    return np.choose(rng.integers(0, 4, theta.size), [steps, zeros, tiny, weights(rng, theta.size)]).astype(np.float32)
