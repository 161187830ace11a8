"""The life of a version between `publish` and the store: one queue, one state machine, without I/O.

Calls of `publish` put a version into the queue; one sender takes it out. While a version is sent, one more may wait: it
is replaced by the next call, unless it must stay alone. `Stage` and `MOVES` are drawn in docs/lifecycle.md.

Where several ranks publish together, each has its own queue, and their senders agree on the call that a version ends
with (`fix`): every rank is then at the same call, however far its own trainer was when it was asked.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, Literal

from pulsesync.errors import AnotherPublisherError, ClosedError, GroupError, PulseError, StateError, StoreError
from pulsesync.publish.baseline import Difference
from pulsesync.publish.costs import CodecChoice
from pulsesync.state.sharding import Shards

Raiser = Literal["publish", "flush", "close"]

logger = logging.getLogger(__name__)


class Stage(StrEnum):
    """Where the sender is. In every stage but IDLE and QUEUED there is one current version."""

    IDLE = "idle"  # nothing waits and nothing is sent
    QUEUED = "queued"  # a version waits for the sender
    OFFERED = "offered"  # the ranks agree on the call that the version ends with; calls wait
    FIXED = "fixed"  # they agreed: calls up to that one are still merged into the version
    RESUMING = "resuming"  # there is no base: the run is looked for, and resumed if there is one
    SENDING = "sending"  # it is encoded, uploaded and committed; one more version may wait
    ENDING = "ending"  # it is committed, or it failed; an anchor is begun if one is due, and callers are answered


MOVES = {
    (Stage.IDLE, Stage.QUEUED): "publish",
    (Stage.QUEUED, Stage.OFFERED): "the sender takes the version",
    (Stage.OFFERED, Stage.FIXED): "all ranks know the call that it ends with",
    (Stage.FIXED, Stage.SENDING): "this rank has made that call",
    (Stage.FIXED, Stage.RESUMING): "the same, and there is no base",
    (Stage.RESUMING, Stage.SENDING): "the run was resumed, or a new root is published",
    (Stage.SENDING, Stage.ENDING): "it is committed, and the base has moved; or it failed",
    (Stage.ENDING, Stage.IDLE): "its callers have the report, or the error",
    (Stage.ENDING, Stage.QUEUED): "the same, and another version waits",
    # Failures before that
    (Stage.QUEUED, Stage.IDLE): "no thread could be started for the sender",
    (Stage.OFFERED, Stage.ENDING): "the ranks could not agree, or the last version is not settled",
    (Stage.FIXED, Stage.ENDING): "this rank did not make the call in time",
    (Stage.RESUMING, Stage.ENDING): "the run cannot be resumed",
}


@dataclass(frozen=True)
class PublishReport:
    """What a publish did. The report of steps that were coalesced is that of the version that contains them."""

    version: int | None  # None: nothing was sent, the step goes into a later version
    step: int
    changed: int  # weights
    total: int  # weights
    payload_bytes: int  # all that the version added to the store, by all ranks
    full_bytes: int  # what the whole state would be
    coalesced: int  # publishes before this one that are in this version
    blocked_s: float  # how long publish kept its caller
    encode_s: float  # of this rank
    store_s: float  # of this rank, with the time in which it waited for others
    codec: str | None = None  # that a patch was coded with; "smallest": each tile with the one that makes it smallest
    reason: str = ""  # why, with the figures by which it was chosen
    anchor: CodecChoice | None = None  # the same of the last anchor that this process has encoded

    @property
    def density(self) -> float:
        return self.changed / self.total if self.total else 0.0

    def __str__(self) -> str:
        if self.version is None:
            return f"step {self.step}: will be part of a later version"
        times = self.full_bytes / max(self.payload_bytes, 1)
        return (
            f"version {self.version}, step {self.step}: {self.changed:,} of {self.total:,} weights changed, "
            f"{self.payload_bytes:,} bytes ({times:.{0 if times >= 10 else 1}f} times smaller)"
        )


class PublishFuture(Future[PublishReport]):
    """A future that knows whether its caller has read how the publish ended."""

    def __init__(self, awaited: bool) -> None:
        super().__init__()
        self.awaited = awaited  # the caller waits for it within publish
        self.was_read = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled: the base moves with it

    def result(self, timeout: float | None = None) -> PublishReport:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.was_read = True
        return error


@dataclass
class PendingVersion:
    """A state that is to become a version: how it differs from the base that it was compared with."""

    call: int  # the call of publish that it ends with
    step: int
    base: int | None = None  # version; None: it is to be compared when the base is known
    difference: Difference | None = None
    shards: Shards | None = None  # the source, where the caller waits and it cannot change
    source: Any = None  # the same as it was given
    waits: bool = False  # the caller waits in every case, not only where there is no base
    coalesced: int = 0
    alone: bool = False  # no later step is coalesced with it
    blocked_s: float = 0.0
    futures: list[PublishFuture] = field(default_factory=list)
    fault: BaseException | None = None  # what kept this rank from comparing: the ranks are to know
    version: int | None = None  # that it was sent as, whether that was committed or not
    is_root: bool = False  # whether it was sent as a state that has no base

    @property
    def awaited(self) -> bool:
        """Whether the caller waits for it, and so makes no other call."""
        return self.shards is not None

    def release(self) -> None:
        """Give up the memory that it took."""
        self.difference = self.shards = self.source = None

    def absorb(self, earlier: "PendingVersion") -> None:
        """Take the place of a version that was queued before."""
        self.coalesced += 1 + earlier.coalesced
        self.futures = earlier.futures + self.futures


@dataclass
class _Failure:
    """A version that was not committed, until a later one is. Keeps none of the memory that the version took."""

    version: int | None
    futures: list[PublishFuture]
    error: BaseException
    traceback: TracebackType | None
    raised_by: set[Raiser] = field(default_factory=set)

    @property
    def was_read(self) -> bool:
        return any(future.was_read for future in self.futures)

    @property
    def is_retried(self) -> bool:
        """Whether the next version is the retry: the store may work again by then."""
        return isinstance(self.error, StoreError) and self.error.retryable


class SendQueue:
    """The versions of one process on their way to the store, and what became of them.

    Everything is read and written under `lock`, by methods of this class; what follows a version, its base and its
    state, is changed under the same lock by the sender.

    Args:
        longest: Versions in a row that may fail with an error that is retried, before publish raises it.
        alone: Whether this is the only rank: then there is nothing to agree on.
        ended: Called with each version that was committed or has failed, before its callers learn it, without the lock.
    """

    def __init__(
        self,
        longest: int,
        alone: bool,
        ended: "Callable[[PendingVersion, PublishReport | BaseException], None]" = lambda version, outcome: None,
    ) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._longest, self.is_alone, self._ended = longest, alone, ended
        self.stage = Stage.IDLE
        self.calls = 0  # of publish that were counted
        self.closed = False
        self.lost: BaseException | None = None  # why nothing can be published here any more
        self.pending: PendingVersion | None = None
        self.current: PendingVersion | None = None
        self._last_call = 0  # that the current version must end with, once it is fixed
        self._sender: int | None = None  # the thread that sends
        self._latest: PublishFuture | None = None
        self._failures: list[_Failure] = []  # since the last commit
        self._due: tuple[int, _Failure] | None = None  # the call of publish in which all ranks raise a failure
        self._refused: tuple[int, BaseException] | None = None  # calls up to this one are in no version, and why

    def _move(self, stage: Stage) -> None:
        assert (self.stage, stage) in MOVES, (self.stage, stage)
        self.stage = stage
        self._changed.notify_all()

    # The caller's end

    def check_caller(self, call: str, waits: bool = True) -> None:
        """Raises: RuntimeError, if a call would wait for what only this thread can do."""
        if self.is_sender:
            if waits:
                raise waits_for_itself(call)
            return
        try:
            self._changed.notify(0)  # wakes nobody; raises if this thread does not have the lock
        except RuntimeError:
            return
        raise RuntimeError(
            f"{call} was called within publish, by a signal handler that interrupted it, and would wait for it for "
            "ever; raise SystemExit in the handler instead, and close the publisher where that arrives"
        )

    @property
    def is_sender(self) -> bool:
        return self._sender == threading.get_ident()

    @contextmanager
    def call(self, alone: bool, idle: Callable[[], bool]) -> Iterator[None]:
        """Be within a call of publish, with the lock, once a version may be compared and queued.

        Args:
            alone: The version of this call is coalesced with no other.
            idle: Whether nothing may be on its way, as far as is known under the lock.

        Raises:
            ClosedError: the publisher was closed; RuntimeError: the call would wait for its own thread.
        """
        with self.lock:
            if self.is_sender and (self._must_wait(alone) or (idle() and self.stage != Stage.IDLE)):
                raise waits_for_itself("publish after a step with coalesce=False")
            self._changed.wait_for(lambda: not self._must_wait(alone) and (self.stage == Stage.IDLE or not idle()))
            if self.closed:
                raise ClosedError("this Publisher is closed; create a new one, which resumes the run")
            if self.lost is not None:
                raise self.lost
            yield

    def _must_wait(self, alone: bool) -> bool:
        if self.stage == Stage.OFFERED and not self.is_alone:
            return True
        return self.pending is not None and (alone or self.pending.alone)

    def count_call(self) -> int:
        self.calls += 1
        return self.calls

    def put(self, version: PendingVersion, awaited: bool) -> tuple[PublishFuture, bool]:
        """Queue a version; return its future, and whether a sender must be started for it."""
        future = PublishFuture(awaited)
        version.futures.append(future)
        self._latest = future
        if self.stage == Stage.FIXED and version.call <= self._last_call:
            assert self.current is not None
            version.absorb(self.current)
            self.current = version
            self._changed.notify_all()
            return future, False
        if self.pending is not None:
            version.absorb(self.pending)
        self.pending = version
        if self.stage != Stage.IDLE:
            return future, False
        self._move(Stage.QUEUED)
        return future, True

    def refuse(self, last_call: int, error: BaseException) -> None:
        """The ranks failed together before each had made the same calls: those that are behind publish none of these.

        So the next version begins with the same call on all ranks.
        """
        with self.lock:
            self._refused = last_call, error

    def refusal(self, call: int) -> BaseException | None:
        """What keeps a call of publish from being sent, if the other ranks go on without it."""
        return self._refused[1] if self._refused is not None and call <= self._refused[0] else None

    def wait(self) -> None:
        """Wait until every version that was queued is committed or failed."""
        while (latest := self._latest) is not None and not latest.done():
            wait_for([latest])

    def wait_until_idle(self) -> None:
        with self.lock:
            self._changed.wait_for(lambda: self.stage == Stage.IDLE)

    def wait_until_quiet(self) -> None:
        """Wait while a version is sent: for what can wait longer than a version."""
        with self.lock:
            self._changed.wait_for(lambda: self.stage != Stage.SENDING)

    def close(self) -> bool:
        """Accept no more calls; return whether it did before."""
        with self.lock:
            accepted, self.closed = not self.closed, True
            self._changed.notify_all()
            return accepted

    # The sender's end

    def take(self) -> PendingVersion | None:
        """Offer the version that waits; None, and the sender is no more, if there is none."""
        with self.lock:
            self._sender = threading.get_ident() if self.pending is not None else None
            if self.pending is None:
                return None
            self.current, self.pending = self.pending, None
            self._move(Stage.OFFERED)
            return self.current

    def fix(self, version: PendingVersion, last_call: int, timeout_s: float, resumes: bool) -> PendingVersion:
        """Wait until this rank has made the call that a version ends with; return the version as it then is.

        resumes: The run is to be resumed before the version is sent.

        Raises:
            GroupError: the call did not come in time, or cannot come: the caller waits for an earlier one or has closed
            the publisher.
        """
        with self.lock:
            self._last_call = last_call
            self._move(Stage.FIXED)
            if version.awaited and version.call < last_call:
                raise GroupError(
                    f"this rank waits for its {version.call}. call of publish, and another is at its {last_call}.: "
                    "every rank must call publish alike"
                )
            self._changed.wait_for(lambda: self._is_fixed or self.closed, timeout_s)
            if not self._is_fixed:
                when = "and then closed its publisher" if self.closed else f"and no other for {timeout_s:g} s"
                raise GroupError(
                    f"this rank made {self.calls} calls of publish {when}, and another rank made {last_call}: every "
                    "rank must call publish alike"
                )
            self._move(Stage.RESUMING if resumes else Stage.SENDING)
            assert self.current is not None
            return self.current

    def resumed(self) -> None:
        """There is a base, or there will be one with this version."""
        with self.lock:
            self._move(Stage.SENDING)

    @property
    def _is_fixed(self) -> bool:
        return self.current is not None and self.current.call >= self._last_call

    def sent(self) -> None:
        """The current version is committed, and the base has moved to it."""
        with self.lock:
            self._failures.clear()
            self._move(Stage.ENDING)

    def start_failed(self, error: BaseException) -> None:
        """The version that waits fails, because no sender can be started for it."""
        with self.lock:
            version, self.pending = self.pending, None
            if version is not None:
                self._fail(version, error)
                self._move(Stage.IDLE)
        if version is not None:
            self._complete(version, error)

    def completed(self, report: PublishReport) -> None:
        """Nothing more is to be done for the current version: its callers get the report."""
        with self.lock:
            version = self.current
            assert version is not None
            self._leave()
        self._complete(version, report)

    def failed(self, version: PendingVersion, error: BaseException, settle: Callable[[], None], is_lost: bool) -> None:
        """Keep what stopped the current version until a later one is committed, and report it.

        settle: learns whether it was committed all the same, and then makes up for it.
        is_lost: The ranks do not reach each other any more. Then a version that waits fails too: another rank may have
            none for it. The same where another publisher writes to the run.
        """
        is_replaced = isinstance(error, AnotherPublisherError)
        with self.lock:
            version = self.current or version  # with the calls that were merged into it
            self._last_call = 0  # no more are
            if (is_lost or is_replaced) and self.pending is not None:
                self.pending.absorb(version)
                version, self.pending = self.pending, None
            if is_replaced or (is_lost and not all(future.awaited for future in version.futures)):
                self.lost = error  # lost ranks cannot agree any more on the call that their next version ends with
            self._fail(version, error)
            if self.stage != Stage.ENDING:
                self._move(Stage.ENDING)
        version.release()
        settle()
        traceback.clear_frames(error.__traceback__)  # the future does not keep the memory that the version took
        with self.lock:
            self._leave()
        self._complete(version, error)

    def _complete(self, version: PendingVersion, outcome: PublishReport | BaseException) -> None:
        self._ended(version, outcome)
        _complete(version, outcome)

    def _leave(self) -> None:
        self.current = None
        self._move(Stage.IDLE if self.pending is None else Stage.QUEUED)

    def _fail(self, version: PendingVersion, error: BaseException) -> None:
        self._failures = [*self._unraised, _Failure(version.version, version.futures, error, error.__traceback__)]
        if not all(future.awaited for future in version.futures):
            logger.error(
                "Step %d was not published: %s: %s. %s",
                version.step,
                type(error).__name__,
                error,
                "Nothing more can be published here; a new publisher, with a new team if it had one, resumes the run."
                if self.lost
                else "The next version that is committed contains it.",
                exc_info=None if isinstance(error, PulseError) else error,
            )

    # Failures

    @property
    def has_lost_weights(self) -> bool:
        """Whether a version failed whose old weights the caller no longer has: it was not refused in its call."""
        return any(not (one.was_read and isinstance(one.error, ValueError | StateError)) for one in self._failures)

    @property
    def has_unread_failure(self) -> bool:
        return any(not failure.was_read for failure in self._unraised)

    @property
    def _unraised(self) -> list[_Failure]:
        """Failures that publish has not raised. Of a team it does not count who read them: all ranks raise the same."""
        new = [failure for failure in self._failures if "publish" not in failure.raised_by]
        return [failure for failure in new if not failure.was_read] if self.is_alone else new

    def surface(self, call: int, unread: bool) -> None:
        """Have publish raise in this call what it should. Of a team all ranks do so, whatever is committed until then.

        A store's error that is retried is raised only when the longest row of them has failed.

        unread: Whether some rank's caller has not read a failure; if all have, none is raised.
        """
        new = self._unraised
        raised = [one for one in new if len(new) >= self._longest or not one.is_retried] if unread else []
        if raised:
            self._due = call, raised[0]
        if raised or not unread:
            for failure in new:
                failure.raised_by.add("publish")

    def make_up_for(self, version: int) -> None:
        """Forget the failures that a version contains which turned out to be committed: those up to its own."""
        for number, failure in enumerate(self._failures):
            if failure.version == version:
                del self._failures[: number + 1]
                return

    def raise_failure(self, caller: Raiser) -> None:
        """Raise the first failure since the last commit that the caller has neither read nor been raised here."""
        with self.lock:
            if caller == "publish":
                if self.is_alone:
                    self.surface(self.calls + 1, self.has_unread_failure)
                if self._due is None or self._due[0] > self.calls + 1:
                    return
                failure, self._due = self._due[1], None
            else:
                new = [one for one in self._failures if caller not in one.raised_by and not one.was_read]
                if not new:
                    return
                failure = new[0]
                for one in new:
                    one.raised_by.add(caller)
        raise failure.error.with_traceback(failure.traceback)  # without the frames of whom it was raised to before


def waits_for_itself(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} would wait for the thread that sends versions, which is this one, in a callback of its own future; "
        "call it in another thread, or publish with wait=False and coalesce=True"
    )


def _complete(version: PendingVersion, outcome: PublishReport | BaseException) -> None:
    """Complete the futures of a version. What ends a callback of one does not end the sender, which has more to do."""
    for future in version.futures:
        try:
            if isinstance(outcome, PublishReport):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)
        except BaseException as e:  # an Exception is logged by concurrent.futures
            logger.error(
                "A callback of the future of step %d raised %s: %s. Versions are sent as before.",
                version.step,
                type(e).__name__,
                e,
                exc_info=e,
            )
