"""The outer step: from the trainers' updates to the next shared weights, the same bits on every machine.

Every operation is FP32 and rounded by itself, in one order. torch's own SGD is not used because it fuses multiply and
add where the machine can, and replicas on different machines would part.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pulsesync.core.threads import spread
from pulsesync.loco.gate import CHUNK, F32, SparseVector


@dataclass(frozen=True)
class SGD:
    """The outer optimizer. SGD(1.0) is plain averaging.

    Args:
        lr: Learning rate, above 0.
        momentum: From 0 to below 1; 0 for none.
        nesterov: Whether it is Nesterov's momentum.

    Raises:
        ValueError: a number is out of its range, or nesterov without momentum.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 <= self.momentum < 1) or (self.nesterov and not self.momentum):
            raise ValueError("the outer learning rate is above 0, its momentum from 0 to below 1, above for Nesterov's")

    @property
    def reach(self) -> float:
        """How many times its own size an update moves the weights in the end."""
        return self.lr / (1 - self.momentum)

    def step(self, theta: F32, momentum: F32, total: F32, trainers: int = 1) -> tuple[F32, F32]:
        """Return the next weights and momentum, given the sum of so many updates; nothing is modified."""
        lr, mu = np.float32(self.lr), np.float32(self.momentum)
        after, moved = np.empty_like(theta), np.empty_like(momentum)

        def chunk(begin: int) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller looks whether all is finite
                step(slice(begin, begin + CHUNK))

        def step(here: slice) -> None:
            mean = mean_of(total[here], trainers)
            moved[here] = mu * momentum[here] + mean
            by = mean + mu * moved[here] if self.nesterov else moved[here]
            after[here] = theta[here] - lr * by

        spread(chunk, range(0, theta.size, CHUNK))
        return after, moved


def Nesterov(lr: float = 0.7, momentum: float = 0.9) -> SGD:  # noqa: N802 - it stands where a class does
    """DiLoCo's outer optimizer."""
    return SGD(lr, momentum, nesterov=True)


def aggregate(parts: Iterable[SparseVector], size: int) -> F32:
    """Add up the trainers' updates, in the order given: FP32 sums depend on it."""
    total = np.zeros(size, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller looks whether all is finite
        for part in parts:
            part.add_to(total)
    return total


def mean_of(total: F32, trainers: int) -> F32:
    """Divide by all who took part, not by those that sent an entry: who is silent at a place says zero."""
    out: F32 = total / np.float32(trainers)
    return out
