"""Who writes a memory: of the states of a process that share some of it, the one that claimed it last."""

import os
import threading
import weakref
from collections.abc import Sequence
from heapq import merge
from typing import Protocol

from pulsesync.errors import VerificationError

Spans = Sequence[tuple[int, int]]  # addresses at which memory begins and ends, sorted, and apart from each other


class SupersededError(VerificationError):
    """Another state of this process has claimed the memory of this one, which therefore writes nothing."""


class Claimant(Protocol):
    """A state of some memory."""

    lock: threading.RLock  # under which it writes
    superseded: bool  # whether another state of this process has claimed some of the memory since

    def spans(self) -> Spans:
        """Return the addresses of the memory."""

    def __hash__(self) -> int: ...


def claim(state: Claimant) -> bool:
    """Have a state write its memory from now on: others of this process are superseded until they claim it again.

    What a superseded state knows of its weights may not be true any more, so that they must be recounted first.
    Another state that is writing at the moment is waited for, and one that is superseded does not write.

    Returns whether another state had the memory: what was counted before this call may not be true any more.
    """
    mine, had_another = state.spans(), False
    with _CLAIMING:
        for other in _CLAIMED:
            if other is not state and _overlap(mine, other.spans()):
                with other.lock:
                    had_another |= not other.superseded
                    other.superseded = True
        _CLAIMED.add(state)
        state.superseded = False
    return had_another


def check_claim(state: Claimant) -> None:
    """Before the first weight is written, with the lock. Raises: SupersededError."""
    if state.superseded:
        raise SupersededError(
            "another Subscriber of this process has taken these tensors during the sync; nothing was written. Sync "
            "again, and sync the tensors of a model with one Subscriber"
        )


_CLAIMED: weakref.WeakSet[Claimant] = weakref.WeakSet()
_CLAIMING = threading.Lock()


def _overlap(some: Spans, others: Spans) -> bool:
    """Whether two sorted lists of addresses have one in common. Those of one list are apart."""
    end = 0  # of what comes before, in either list
    for begin, this_end in merge(some, others):
        if begin < end:
            return True
        end = this_end
    return False


def _forget_claims() -> None:
    """In a forked process: its parent's states are not its own, and their locks may stay locked for ever."""
    global _CLAIMED, _CLAIMING
    _CLAIMED, _CLAIMING = weakref.WeakSet(), threading.Lock()


os.register_at_fork(after_in_child=_forget_claims)
