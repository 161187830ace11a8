"""The outer step: from the trainers' updates to the next shared weights, the same bits on every machine.

There are two forms. DiLoCo has one outer momentum, which all trainers share and which acts on the mean of their
updates: `SharedMomentum`. PULSELoCo here gives each trainer a momentum of its own, which acts before the gate, and lets
trainers begin a round at their own weights, where nothing is missing that was not sent: `OwnMomentum`.

Every operation is FP32 and rounded by itself, in one order. torch's own SGD is not used because it fuses multiply and
add where the machine can, and replicas on different machines would part.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.loco.gate import CHUNK, F32, ReadPiece, SparseVector, chunks_of

# Where the shared weights are heading, entry by entry: the shared momentum, or the signs of the last shared step.
Trend = NDArray[np.float32] | NDArray[np.int8]

# Of an update, and of the mean of a round: 1.1e12. A value beyond it means that a trainer has diverged. Momentum moves
# weights by lr / (1 - momentum) times the mean in the end, which stays finite for any product up to 2^88, and squares
# of 2^46 values (the largest tensor) have a finite sum. A power of two: no rounding leads a mean of values beyond it.
LARGEST_UPDATE = np.float32(2**40)


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


def diverges(values: F32) -> bool:
    """Whether an update, or the mean of several, has a value that is not finite or is beyond LARGEST_UPDATE."""
    return not bool((np.abs(values) <= LARGEST_UPDATE).all())  # NaN compares as False


def aggregate(parts: Iterable[SparseVector], size: int) -> F32:
    """Add up the trainers' updates, in the order given: FP32 sums depend on it."""
    total, in_order = np.zeros(size, np.float32), list(parts)

    def add(here: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks whether all is finite
            for part in in_order:
                part.part(here.start, here.stop).add_to(total[here])

    spread(add, chunks_of(size))
    return total


def mean_of(total: F32, trainers: int) -> F32:
    """Divide by all who took part, not by those that sent an entry: who is silent at a place says zero."""
    out: F32 = total / np.float32(trainers)
    return out


# The two forms of the outer step


class OuterStep(NamedTuple):
    """What an outer step leads to, if it is within bounds."""

    theta: F32
    trend: Trend
    moved: int  # entries of which the mean update is not zero
    largest_mean: np.float32  # without its sign; NaN or infinite if an entry is
    finite: bool  # whether the new weights and the new trend are


class OuterRule(Protocol):
    """How a trainer's steps become its update, and how the sum of all updates moves the shared weights."""

    @property
    def own_momentum(self) -> bool:
        """Whether each trainer has an outer momentum of its own."""

    def first_trend(self, size: int) -> Trend:
        """The trend before the first round."""

    def start(self, theta: F32, residual: F32) -> F32:
        """The weights at which a trainer begins a round; they may be the shared ones, in the same memory."""

    def advance(self, theta: F32, residual: F32, momentum: F32 | None, local: F32) -> tuple[F32, F32 | None]:
        """Return the update of a trainer whose weights are `local`, and its next momentum; for at most CHUNK entries.

        Nothing is modified.
        """

    def first_momentum(self, before: F32, after: F32) -> F32 | None:
        """The momentum of a trainer whose updates have always been the step between two shared weights."""

    def step(self, theta: F32, trend: Trend, total: F32, trainers: int) -> OuterStep:
        """Move on by the sum of so many updates, whose memory may be used for the result."""


@dataclass(frozen=True)
class SharedMomentum:
    """DiLoCo's outer step, and that of PULSELoCo as it was published: one momentum, of the mean of the updates."""

    outer: SGD
    own_momentum = False

    def first_trend(self, size: int) -> Trend:
        return np.zeros(size, np.float32)

    def start(self, theta: F32, residual: F32) -> F32:
        return theta

    def advance(self, theta: F32, residual: F32, momentum: F32 | None, local: F32) -> tuple[F32, F32 | None]:
        with np.errstate(over="ignore", invalid="ignore"):  # the caller looks whether all is finite
            return residual + (theta - local), None

    def first_momentum(self, before: F32, after: F32) -> F32 | None:
        return None

    def step(self, theta: F32, trend: Trend, total: F32, trainers: int) -> OuterStep:
        shared = cast(F32, trend)
        largest = max(spread(lambda here: np.abs(total[here]).max(), chunks_of(total.size)), default=np.float32(0))
        moved = sum(spread(lambda here: int(np.count_nonzero(total[here])), chunks_of(total.size)))
        after, momentum = self.outer.step(theta, shared, total, trainers)
        finite = bool(np.isfinite(after).all() and np.isfinite(momentum).all())
        return OuterStep(after, momentum, moved, np.float32(largest / np.float32(trainers)), finite)


@dataclass(frozen=True)
class OwnMomentum:
    """PULSELoCo's outer step here: each trainer has a momentum of its own, and the shared step is a plain average.

    A trainer begins a round at z = theta − residual, takes its steps to x, and has moved by delta = z − x. Its update
    is the residual plus the outer step of delta: lr · (delta + mu · momentum) for Nesterov's.
    """

    outer: SGD
    own_momentum = True

    def first_trend(self, size: int) -> Trend:
        return np.zeros(size, np.int8)

    def start(self, theta: F32, residual: F32) -> F32:
        out: F32 = theta - residual
        return out

    def advance(self, theta: F32, residual: F32, momentum: F32 | None, local: F32) -> tuple[F32, F32 | None]:
        assert momentum is not None
        s, moved = np.empty_like(theta), np.empty_like(theta)
        lr, mu = np.float32(self.outer.lr), np.float32(self.outer.momentum)
        kernels.active().advance(theta, residual, momentum, local, lr, mu, self.outer.nesterov, s, moved)
        return s, moved

    def first_momentum(self, before: F32, after: F32) -> F32 | None:
        # If delta is always the same, the momentum is delta / (1 − mu), and the update lr times that.
        out: F32 = (before - after) / np.float32(self.outer.lr)
        return out

    def step(self, theta: F32, trend: Trend, total: F32, trainers: int) -> OuterStep:
        signs, move = np.empty(theta.size, np.int8), kernels.active().move

        def step(here: slice) -> tuple[int, int, int]:
            moved, mean, after = move(theta[here], total[here], np.float32(trainers), signs[here])
            return int(moved), int(mean), int(after)

        done = spread(step, chunks_of(theta.size))
        largest_mean, largest = (np.uint32(max((one[i] for one in done), default=0)).view(np.float32) for i in (1, 2))
        return OuterStep(total, signs, sum(one[0] for one in done), largest_mean, bool(np.isfinite(largest)))


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    """What one trainer has to tell in a round, computed from its committed state and its weights when it is read."""

    rule: OuterRule
    theta: F32
    residual: F32
    momentum: F32 | None
    local: ReadPiece  # the trainer's weights after its steps
    committed: set[int] = field(default_factory=set)  # where the chunks begin that are committed

    @property
    def size(self) -> int:
        return self.theta.size

    def read(self, here: slice) -> F32:
        return self._advance(here)[0]

    def _advance(self, here: slice) -> tuple[F32, F32 | None]:
        momentum = None if self.momentum is None else self.momentum[here]
        return self.rule.advance(self.theta[here], self.residual[here], momentum, self.local(here))

    def commit(self, taken: SparseVector | None) -> None:
        """Change residual and momentum, in place, to what they are after a round that took this from the update.

        If it fails half-way, calling it again completes it: no chunk is advanced twice.
        """

        def advance(here: slice) -> None:
            if here.start in self.committed:
                return
            s, momentum = self._advance(here)
            if taken is not None:
                taken.part(here.start, here.stop).take_from(s)
            self.residual[here] = s
            if self.momentum is not None:
                self.momentum[here] = momentum
            self.committed.add(here.start)

        spread(advance, chunks_of(self.size))
