"""What must be true of every schedule, by name, and the two errors with which a schedule can fail.

A violated invariant is not the same as an unexpected exception: the first means that the library did something wrong,
the second that the library, or the simulator itself, could not run at all.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NoReturn


class Invariant(StrEnum):
    """What is checked after every event, and at the end of a schedule."""

    # Workers
    WORKER_WEIGHTS = "a worker has the weights of the version it reports; if it reports none, whole ones of any version"
    TIED_TENSORS = "tensors that are tied in the run are equal in a worker"
    SYNC_REPORT = (
        "sync and resume report the version that the worker then has, which is the requested one and not an older one"
    )
    VERIFIED_WEIGHTS = "verify succeeds only if the weights are those of the version"
    SAME_RUN = "no process mistakes the run for another one"
    # Trainers
    VERSION_ORDER = "versions are consecutive, and each follows from the one before"
    PUBLISHED_STATE = "every version is a state that a trainer published at that step"
    PUBLISH_REPORT = "a publisher reports versions that were committed, contain what was published, and never go back"
    # The store
    IMMUTABLE_OBJECTS = "no record or body is ever overwritten with other bytes"
    BODIES_FIRST = "every object that a record names was put before the record, and stays as long as it does"
    PATCH_CONTENT = "every patch takes the weights of its base to those of its version"
    ANCHOR_AND_SQUASH_CONTENT = "every anchor and every squash leads to the weights of its version"
    POINTER = "a worker that follows a pointer gets the version of the pointer; each move is one more record; prunes "
    "keep both"
    PATH_TO_NEWEST = "records lead from an anchor to the newest version, and a prune leaves such a path"
    # The end, without faults
    PROGRESS = "without faults the run can be resumed, squashed, joined and pruned, and all reach the newest version"
    JOIN_COST = "joining takes no more records and requests than docs/protocol.md promises"


class Violation(Exception):  # noqa: N818 - inside the simulator; callers see an InvariantError
    """A violated invariant, raised where it is found, which can be inside a call of the library."""

    def __init__(self, invariant: Invariant, reason: str) -> None:
        super().__init__(f"{invariant.name}: {reason}")
        self.invariant = invariant


Fail = Callable[[Invariant, str], NoReturn]  # takes the violated invariant, and the reason


class SimulationError(AssertionError):
    """A schedule that failed. The message has all its events, and the command that repeats it.

    Args:
        reason: What went wrong.
        seed: Of the schedule.
        event: The number of completed events; the number of events of the schedule, if it failed at its end.
        command: The command that repeats the schedule.
        log: What happened.
    """

    def __init__(self, reason: str, *, seed: int, event: int, command: str, log: Sequence[str]) -> None:
        lines = "\n".join(log)
        super().__init__(f"seed {seed}, event {event}: {reason}\n\n{lines}\n\nTo repeat it: {command}")
        self.seed, self.event = seed, event


class InvariantError(SimulationError):
    """An invariant was violated: `invariant` says which."""

    def __init__(
        self, invariant: Invariant, reason: str, *, seed: int, event: int, command: str, log: Sequence[str]
    ) -> None:
        super().__init__(reason, seed=seed, event=event, command=command, log=log)
        self.invariant = invariant


class SimulationCrashError(SimulationError):
    """Something other than a PulseError was raised, by the library or by the simulator. It is the `__cause__`."""
