"""The life of a version between `publish` and the store: one queue, one state machine, without I/O.

Calls of `publish` put a version into the queue; one sender takes it out. While a version is sent, one more may wait: it
is replaced by the next call, unless it must not be coalesced. `Stage` and `MOVES` are drawn in docs/protocol.md.

Where several ranks publish together, each has its own queue, and their senders agree on the call that a version ends
with (`fix`): the version then ends with the same call on every rank, however many calls each rank had made before.
"""

import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from pulsesync.core.process_guard import ProcessGuard
from pulsesync.errors import AnotherPublisherError, GroupError, PulseError
from pulsesync.publish.failures import Caller, FailureLedger
from pulsesync.publish.pending import PendingVersion, PublishFuture, PublishReport

logger = logging.getLogger(__name__)


class Stage(StrEnum):
    """The state of the sender. In every stage except IDLE and QUEUED there is one current version."""

    IDLE = "idle"  # nothing waits and nothing is sent
    QUEUED = "queued"  # a version waits for the sender
    OFFERED = "offered"  # the ranks agree on the call that the version ends with; calls wait
    FIXED = "fixed"  # they agreed: calls up to that one are still merged into the version
    RESUMING = "resuming"  # there is no base: the store is searched for a run, which is resumed if there is one
    SENDING = "sending"  # it is encoded, uploaded and committed; one more version may wait
    ENDING = "ending"  # it is committed, or it failed; an anchor is started if one is due, and callers get the outcome


MOVES = {
    (Stage.IDLE, Stage.QUEUED): "publish",
    (Stage.QUEUED, Stage.OFFERED): "the sender takes the version",
    (Stage.OFFERED, Stage.FIXED): "all ranks know the call that it ends with",
    (Stage.FIXED, Stage.SENDING): "this rank has made that call",
    (Stage.FIXED, Stage.RESUMING): "the same, and there is no base",
    (Stage.RESUMING, Stage.SENDING): "the run was resumed, or a new root is published",
    (Stage.SENDING, Stage.ENDING): "the version is committed and the base has advanced, or the version failed",
    (Stage.ENDING, Stage.IDLE): "the callers have the report or the error",
    (Stage.ENDING, Stage.QUEUED): "the same, and another version waits",
    # Failures before the version is sent
    (Stage.QUEUED, Stage.IDLE): "no thread could be started for the sender",
    (Stage.OFFERED, Stage.ENDING): "the ranks could not agree, or the last version is not settled",
    (Stage.FIXED, Stage.ENDING): "this rank did not make the call in time",
    (Stage.RESUMING, Stage.ENDING): "the run cannot be resumed",
}


class SendQueue:
    """The versions of one process that are queued or being sent, and the outcome of the last ones.

    Methods of this class read and write everything under `lock`; the sender changes the base and its state under the
    same lock. `ended` is called with each version that was committed or has failed, before its callers learn it, and
    without the lock. For the other arguments, see `FailureLedger`.
    """

    def __init__(
        self,
        max_failures: int,
        alone: bool,
        guard: ProcessGuard,
        ended: "Callable[[PendingVersion, PublishReport | BaseException], None]" = lambda version, outcome: None,
    ) -> None:
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self.is_alone, self._guard, self._ended = alone, guard, ended
        self.closed = guard.closed
        self.stage = Stage.IDLE
        self.calls = 0  # of publish that were counted
        self.lost: BaseException | None = None  # why this process can publish nothing any more
        self.pending: PendingVersion | None = None
        self.current: PendingVersion | None = None
        self._last_call = 0  # the call that the current version ends with, once it is fixed
        self._sender: int | None = None  # the thread that sends
        self._latest: PublishFuture | None = None
        self.failures = FailureLedger(max_failures, alone)
        self._rejected: tuple[int, BaseException] | None = None  # calls up to this one are in no version, and why

    def _move(self, stage: Stage) -> None:
        assert (self.stage, stage) in MOVES, (self.stage, stage)
        self.stage = stage
        self._changed.notify_all()

    # For the thread that calls publish

    def check_caller(self, call: str, waits: bool = True) -> None:
        """Raises: RuntimeError, if a call would wait for its own thread."""
        if self.is_sender:
            if waits:
                raise waits_for_itself(call)
            return
        try:
            self._changed.notify(0)  # wakes no thread; raises if this thread does not have the lock
        except RuntimeError:
            return
        raise RuntimeError(
            f"{call} was called by a signal handler that interrupted publish, and would wait for that publish forever; "
            "raise SystemExit in the handler instead, and close the publisher where that exception is caught"
        )

    @property
    def is_sender(self) -> bool:
        return self._sender == threading.get_ident()

    @contextmanager
    def call(self, alone: bool, idle: Callable[[], bool]) -> Iterator[None]:
        """Enter a call of publish, with the lock, as soon as a version may be compared and queued.

        alone: its version is coalesced with no other. idle: returns, under the lock, whether nothing may be being sent.

        Raises: ClosedError: the publisher was closed; RuntimeError: the call would wait for its own thread.
        """
        with self.lock:
            if self.is_sender and self._must_wait(alone):
                raise waits_for_itself("publish after a step with coalesce=False")
            if self.is_sender and idle() and self.stage != Stage.IDLE:
                raise RuntimeError(
                    "publish was called by a callback of a publish future before the last version was settled, and "
                    "would wait for its own thread, which sends versions; call it in another thread"
                )
            self._changed.wait_for(lambda: not self._must_wait(alone) and (self.stage == Stage.IDLE or not idle()))
            self._guard.check_open()
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
        if self.stage == Stage.IDLE:
            self._move(Stage.QUEUED)
        return future, self.stage == Stage.QUEUED  # if an interrupted call has queued a version, it may have no sender

    def reject_calls(self, last_call: int, error: BaseException) -> None:
        """Publish no calls up to this one: ranks failed before all had made it, and begin with the same one next."""
        with self.lock:
            self._rejected = last_call, error

    def rejection(self, call: int) -> BaseException | None:
        """Return why a call of publish is not sent, if the other ranks continue without it."""
        return self._rejected[1] if self._rejected is not None and call <= self._rejected[0] else None

    def wait(self) -> None:
        """Wait until every queued version is committed or has failed."""
        while (latest := self._latest) is not None and not latest.has_ended:
            latest.wait()

    def wait_until_quiet(self) -> None:
        """Wait while a version is being sent: for work that is less urgent than a version."""
        with self.lock:
            self._changed.wait_for(lambda: self.stage != Stage.SENDING)

    def close(self) -> bool:
        """Accept no more calls; return whether calls were accepted before."""
        with self.lock:
            accepted = not self.closed.is_set()
            self.closed.set()
            self._changed.notify_all()
            return accepted

    # For the sender's thread

    def take(self) -> PendingVersion | None:
        """Offer the version that waits. If there is none, or another thread sends, return None: this sender ends."""
        with self.lock:
            if self.is_sender:
                self._sender = None
            if self.stage != Stage.QUEUED:
                return None
            self._sender = threading.get_ident()
            self.current, self.pending = self.pending, None
            self._move(Stage.OFFERED)
            return self.current

    def fix(self, version: PendingVersion, last_call: int, timeout_s: float, resumes: bool) -> PendingVersion:
        """Wait until this rank has made the call that a version ends with; return the version as it is then.

        resumes: The run is resumed before the version is sent.

        Raises: GroupError: this rank did not make the call in time, or cannot make it: the caller waits for an earlier
        call or has closed the publisher.
        """
        with self.lock:
            self._last_call = last_call
            self._move(Stage.FIXED)
            if version.awaited and version.call < last_call:
                raise GroupError(
                    f"this rank waits for its publish call number {version.call}, but another rank is at call number "
                    f"{last_call}: every rank must call publish the same number of times, with the same wait="
                )
            self._changed.wait_for(lambda: self._is_fixed or self.closed.is_set(), timeout_s)
            if not self._is_fixed:
                when = "and then closed its publisher" if self.closed.is_set() else f"and none for {timeout_s:g} s"
                raise GroupError(
                    f"this rank called publish {self.calls} times {when}, but another rank called it {last_call} "
                    "times: every rank must call publish the same number of times"
                )
            self._move(Stage.RESUMING if resumes else Stage.SENDING)
            assert self.current is not None
            return self.current

    def resumed(self) -> None:
        """Note that there is a base, or that this version will be one."""
        with self.lock:
            self._move(Stage.SENDING)

    @property
    def _is_fixed(self) -> bool:
        return self.current is not None and self.current.call >= self._last_call

    def sent(self) -> None:
        """Note that the current version is committed, and that the base has advanced to it."""
        with self.lock:
            self.failures.clear()
            self._move(Stage.ENDING)

    def start_failed(self, error: BaseException) -> None:
        """Fail the version that waits, because no sender can be started for it."""
        with self.lock:
            if self.stage != Stage.QUEUED:
                return
            version, self.pending = self.pending, None
            assert version is not None
            self._fail(version, error)
            self._move(Stage.IDLE)
        self._complete(version, error)

    def completed(self, report: PublishReport) -> None:
        """Finish the current version: its callers get the report."""
        with self.lock:
            version = self.current
            assert version is not None
            self._finish_current()
        self._complete(version, report)

    def failed(self, version: PendingVersion, error: BaseException, settle: Callable[[], None], is_lost: bool) -> None:
        """Keep the error of the current version until a later one is committed, and report it.

        settle: finds out whether the version was committed nevertheless, and then clears the failure.
        is_lost: The ranks cannot reach each other any more, or another publisher writes to the run. Then a version that
            waits fails too, because another rank may have none for it.
        """
        is_replaced = isinstance(error, AnotherPublisherError)
        with self.lock:
            version = self.current or version  # with the calls that were merged into it
            self._last_call = 0  # no more calls are merged
            if (is_lost or is_replaced) and self.pending is not None:
                self.pending.absorb(version)
                version, self.pending = self.pending, None
            if is_replaced or (is_lost and not all(future.awaited for future in version.futures)):
                self.lost = error  # ranks that cannot reach each other cannot agree on the call of their next version
            self._fail(version, error)
            if self.stage != Stage.ENDING:
                self._move(Stage.ENDING)
        version.release()
        settle()
        traceback.clear_frames(error.__traceback__)  # so that the future does not keep the version's memory
        with self.lock:
            self._finish_current()
        self._complete(version, error)

    def _complete(self, version: PendingVersion, outcome: PublishReport | BaseException) -> None:
        """Complete the futures of a version. An error in a callback of one does not end the sender."""
        self._ended(version, outcome)
        for future in version.futures:
            try:
                if isinstance(outcome, PublishReport):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)
            except BaseException as e:  # an Exception is logged by concurrent.futures
                text = "A callback of the publish future of step %d raised %s: %s. Publishing continues."
                logger.error(text, version.step, type(e).__name__, e, exc_info=e)

    def _finish_current(self) -> None:
        self.current = None
        self._move(Stage.IDLE if self.pending is None else Stage.QUEUED)

    def _fail(self, version: PendingVersion, error: BaseException) -> None:
        self.failures.add(version, error)
        if not all(future.awaited for future in version.futures):
            then = "The next version that is committed contains it."
            if self.lost:
                then = (
                    "This publisher can publish nothing more; create a new one, with a new team if it had one, to "
                    "resume the run."
                )
            trace = None if isinstance(error, PulseError) else error
            text = "Step %d was not published: %s: %s. %s"
            logger.error(text, version.step, type(error).__name__, error, then, exc_info=trace)

    def raise_failure(self, caller: Caller) -> None:
        """Raise the first failure since the last commit that the caller has not read and this has not raised."""
        with self.lock:
            failure = self.failures.to_raise(caller, self.calls + 1)
        if failure is not None:  # without the frames of callers that got it before
            raise failure.error.with_traceback(failure.traceback)


def waits_for_itself(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} was called by a callback of a publish future and would wait for its own thread, which sends versions; "
        "call it in another thread, or publish with wait=False and coalesce=True"
    )
