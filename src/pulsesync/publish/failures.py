"""Versions that were not committed: kept until a later one is, and raised once by each verb of the publisher."""

from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

from pulsesync.errors import StoreError
from pulsesync.publish.pending import PendingVersion, PublishFuture

Caller = Literal["publish", "flush", "close"]


@dataclass
class FailedVersion:
    """A version that was not committed. It keeps none of the version's memory."""

    version: int | None
    futures: list[PublishFuture]
    error: BaseException
    traceback: TracebackType | None
    raised_by: set[Caller] = field(default_factory=set)

    @property
    def was_read(self) -> bool:
        return any(future.was_read for future in self.futures)

    @property
    def is_retried(self) -> bool:
        """Whether the next version retries it: the store may work again by then."""
        return isinstance(self.error, StoreError) and self.error.retryable


@dataclass(eq=False, repr=False)
class FailureLedger:
    """The versions that failed since the last commit, and which call raises them. Used under the lock of the queue."""

    _max_failures: int  # consecutive versions that may fail with an error that is retried, before publish raises it
    _is_alone: bool  # whether this is the only rank: then there is nothing to agree on
    _failed: list[FailedVersion] = field(default_factory=list)
    _due: tuple[int, FailedVersion] | None = None  # the call of publish in which all ranks raise a failure

    def add(self, version: PendingVersion, error: BaseException) -> None:
        """Keep the error of a version until a later one is committed."""
        failed = FailedVersion(version.version, version.futures, error, error.__traceback__)
        self._failed = [*self._unraised, failed]

    def clear(self) -> None:
        """A version was committed: it contains the steps of all that failed before."""
        self._failed.clear()

    def clear_failures_through(self, version: int) -> None:
        """Clear the failures up to a version that turned out to be committed: it contains their steps."""
        for number, failure in enumerate(self._failed):
            if failure.version == version:
                del self._failed[: number + 1]
                return

    @property
    def has_unread(self) -> bool:
        return any(not failure.was_read for failure in self._unraised)

    @property
    def _unraised(self) -> list[FailedVersion]:
        """The failures that publish has not raised. In a team, even those that were read: all ranks raise the same."""
        new = [failure for failure in self._failed if "publish" not in failure.raised_by]
        return [failure for failure in new if not failure.was_read] if self._is_alone else new

    def schedule_raise(self, call: int, unread: bool) -> None:
        """Have publish raise a failure in this call, if some rank's caller has not read one.

        In a team all ranks do so, whatever is committed until then. An error of the store that is retried is raised
        only after `max_failures` consecutive failures.
        """
        new = self._unraised
        raised = [one for one in new if len(new) >= self._max_failures or not one.is_retried] if unread else []
        if raised:
            self._due = call, raised[0]
        if raised or not unread:
            for failure in new:
                failure.raised_by.add("publish")

    def to_raise(self, caller: Caller, call: int) -> FailedVersion | None:
        """Return the first failure that a caller has not read and this verb has not raised; it counts as raised then.

        call: the call of publish that this is, or that comes next.
        """
        if caller == "publish":
            if self._is_alone:
                self.schedule_raise(call, self.has_unread)
            if self._due is None or self._due[0] > call:
                return None
            failure, self._due = self._due[1], None
            return failure
        new = [one for one in self._failed if caller not in one.raised_by and not one.was_read]
        for one in new:
            one.raised_by.add(caller)
        return new[0] if new else None
