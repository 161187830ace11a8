"""PULSELoCo in plain numpy, from docs/loco.md and not from the library: the exact bits that every round must yield."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from pulsesync.loco import SGD

Inner = Callable[[int, int, np.ndarray], np.ndarray]  # trainer, round and weights -> weights after the inner steps


def advance(theta: np.ndarray, e: np.ndarray, m: np.ndarray, x: np.ndarray, outer: SGD) -> list[np.ndarray]:
    """A trainer's update, s, and its next momentum."""
    lr, mu = np.float32(outer.lr), np.float32(outer.momentum)
    delta = (theta - e) - x
    moved = mu * m + delta
    return [e + lr * (delta + mu * moved if outer.nesterov else moved), moved]


def visible(theta: np.ndarray, s: np.ndarray, reach: float) -> np.ndarray:
    a, b = (torch.from_numpy(v).bfloat16().view(torch.int16) for v in (theta, theta - np.float32(reach) * s))
    fired: np.ndarray = (a != b).numpy() & (s != 0)
    return fired


def rounds(
    theta: np.ndarray, trainers: int, outer: SGD, inner: Inner, reach: float | None
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The shared weights after every round, and the residuals and momenta of all trainers. reach: None sends all."""
    e, m = np.zeros((2, trainers, theta.size), np.float32)
    for number in range(1 << 30):
        total = np.zeros_like(theta)
        for r in range(trainers):
            s, m[r] = advance(theta, e[r], m[r], inner(r, number, theta - e[r]), outer)
            q = s if reach is None else np.where(visible(theta, s, reach), s, np.float32(0))
            e[r], total = s - q, total + q
        theta = theta - total / np.float32(trainers)
        yield theta, e.copy(), m.copy()
