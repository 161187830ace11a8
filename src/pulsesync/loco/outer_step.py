"""The outer step: from the trainers' updates to the next shared weights, the same bits on every machine.

There are two forms. DiLoCo has one outer momentum, which all trainers share and which acts on the mean of their
updates: `SharedMomentum`. This PULSELoCo gives each trainer a momentum of its own, which acts before the gate, and lets
trainers begin a round at their own weights, which include what was not sent: `OwnMomentum`.

Every operation is FP32 and rounded separately, in one order. torch's own SGD is not used because it fuses multiply and
add where the machine can, so replicas on different machines would diverge.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pulsesync.core.arguments import number
from pulsesync.core.types import MovedEntries
from pulsesync.loco.gate import ReadPiece, SparseVector
from pulsesync.loco.vectors import HOST, Vector, VectorOps, as_number, kernels_of, vectors_of

# Where the shared weights are heading, entry by entry: the shared momentum, or the signs of the last shared step, int8.
Trend = Vector
Advanced = tuple[Vector, Vector | None]  # the update of a trainer, and its next momentum

# The largest value of an update, and of the mean of a round: 1.1e12. A larger value means that a trainer has diverged.
# In the limit, momentum moves weights by lr / (1 - momentum) times the mean, which stays finite for any product up to
# 2^88, and squares of 2^46 values (the largest tensor) have a finite sum. It is a power of two, so rounding cannot lift
# a mean above it.
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
        number("lr", self.lr, what="a number", above=0)
        number("momentum", self.momentum, what="a number")
        if not (self.lr > 0 and 0 <= self.momentum < 1) or (self.nesterov and not self.momentum):
            raise ValueError(
                f"lr must be above 0, and momentum from 0 to below 1 (above 0 for Nesterov); got lr={self.lr}, "
                f"momentum={self.momentum}"
            )

    @property
    def reach(self) -> float:
        """How far an update moves the weights in the limit, as a multiple of its size."""
        return self.lr / (1 - self.momentum)

    def step(self, theta: Vector, momentum: Vector, total: Vector, trainers: int = 1) -> tuple[Vector, Vector]:
        """Return the next weights and momentum, given the sum of the updates of this number of trainers.

        Nothing is modified.
        """
        return kernels_of(theta).step(theta, momentum, total, trainers, self.lr, self.momentum, self.nesterov)


def Nesterov(lr: float = 0.7, momentum: float = 0.9) -> SGD:  # noqa: N802 - it is used like a class
    """DiLoCo's outer optimizer."""
    return SGD(lr, momentum, nesterov=True)


def diverges(values: Vector) -> bool:
    """Whether an update, or the mean of several, has a value that is not finite or is above LARGEST_UPDATE."""
    return not bool(kernels_of(values).largest(values) <= LARGEST_UPDATE)  # NaN compares as False


def aggregate(parts: Iterable[SparseVector], size: int) -> Vector:
    """Add up the trainers' updates, in the order given: FP32 sums depend on it."""
    in_order = list(parts)
    v = vectors_of(in_order[0].values) if in_order else HOST
    total = v.zeros(size)

    def add(here: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that all is finite
            for part in in_order:
                part.part(here.start, here.stop).add_to(total[here])

    v.kernels.each(add, size)
    return total


def mean_of(total: Vector, trainers: int) -> Vector:
    """Divide by the number of all trainers in the round: an entry that one of them did not send counts as zero."""
    return kernels_of(total).divide(total, trainers)


# The two forms of the outer step


class OuterStep(NamedTuple):
    """The result of an outer step, if it is within bounds."""

    theta: Vector
    trend: Trend
    moved: int  # entries of which the mean update is not zero
    largest_mean: np.float32  # without its sign; NaN or infinite if an entry is
    finite: bool  # whether the new weights and the new trend are


@dataclass(frozen=True)
class SharedMomentum:
    """DiLoCo's outer step, and that of PULSELoCo as it was published: one momentum, of the mean of the updates."""

    outer: SGD
    own_momentum = False  # whether each trainer has an outer momentum of its own

    def first_trend(self, size: int, v: VectorOps = HOST) -> Trend:
        """The trend before the first round, on the device of the fragment's vectors."""
        return v.zeros(size)

    def start(self, theta: Vector, residual: Vector) -> Vector:
        """The weights at which a trainer begins a round; they may be the shared ones, in the same memory."""
        return theta

    def advance(self, theta: Vector, residual: Vector, momentum: Vector | None, local: Vector) -> Advanced:
        """Advance a trainer whose weights are `local`, for a piece of a fragment; nothing is modified."""
        with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that all is finite
            return residual + (theta - local), None

    def first_momentum(self, before: Vector, after: Vector) -> Vector | None:
        """The momentum of a trainer whose updates have always been the step between two shared weights."""
        return None

    def step(self, theta: Vector, trend: Trend, total: Vector, trainers: int) -> OuterStep:
        """Apply the sum of the updates of this number of trainers, whose memory may be used for the result."""
        kernels = kernels_of(theta)
        largest, moved = kernels.largest(total), kernels.count_nonzero(total)
        after, momentum = self.outer.step(theta, trend, total, trainers)
        finite = bool(np.isfinite(kernels.largest(after)) and np.isfinite(kernels.largest(momentum)))
        return OuterStep(after, momentum, moved, np.float32(largest / np.float32(trainers)), finite)


@dataclass(frozen=True)
class OwnMomentum:
    """The outer step of this PULSELoCo: each trainer has a momentum of its own, and the shared step is a plain average.

    A trainer begins a round at z = theta − residual, takes its steps to x, and has moved by delta = z − x. Its update
    is the residual plus the outer step of delta: lr · (delta + mu · momentum) for Nesterov's.
    """

    outer: SGD
    own_momentum = True

    def first_trend(self, size: int, v: VectorOps = HOST) -> Trend:
        return v.signs(size)

    def start(self, theta: Vector, residual: Vector) -> Vector:
        return theta - residual

    def advance(self, theta: Vector, residual: Vector, momentum: Vector | None, local: Vector) -> Advanced:
        assert momentum is not None
        outer, kernels = self.outer, kernels_of(theta)
        return kernels.advance(theta, residual, momentum, local, outer.lr, outer.momentum, outer.nesterov)

    def first_momentum(self, before: Vector, after: Vector) -> Vector | None:
        # If delta is always the same, the momentum is delta / (1 − mu), and the update lr times that.
        return kernels_of(before).divide(before - after, self.outer.lr)

    def step(self, theta: Vector, trend: Trend, total: Vector, trainers: int) -> OuterStep:
        v = vectors_of(theta)
        signs = v.signs(len(theta))

        def step(here: slice) -> MovedEntries:
            return v.kernels.move(theta[here], total[here], trainers, signs[here])

        done = v.kernels.each(step, len(theta))
        largest_mean = as_number(max((one.largest_mean for one in done), default=0))
        largest = as_number(max((one.largest_theta for one in done), default=0))
        return OuterStep(total, signs, sum(one.moved for one in done), largest_mean, bool(np.isfinite(largest)))


OuterRule = SharedMomentum | OwnMomentum


@dataclass(frozen=True, eq=False)
class TrainerUpdate:
    """The update of one trainer in a round, computed from its committed state and its weights when it is read."""

    rule: OuterRule
    theta: Vector
    residual: Vector
    momentum: Vector | None
    local: ReadPiece  # the trainer's weights after its steps
    committed: set[int] = field(default_factory=set)  # the beginnings of the chunks that are committed

    @property
    def size(self) -> int:
        return len(self.theta)

    def read(self, here: slice) -> Vector:
        return self._advance(here)[0]

    def _advance(self, here: slice) -> Advanced:
        momentum = None if self.momentum is None else self.momentum[here]
        return self.rule.advance(self.theta[here], self.residual[here], momentum, self.local(here))

    def commit(self, taken: SparseVector | None) -> None:
        """Change residual and momentum, in place, to those after a round that contains this part of the update.

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

        kernels_of(self.theta).each(advance, self.size)
