"""Who may sync: one thread at a time, of the process that began, until it is closed; and how long it waits."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pulsesync.core.process_guard import ProcessGuard
from pulsesync.errors import NothingPublishedError, StateError, StoreError

INTERVAL_S, MAX_INTERVAL_S = 0.1, 5.0  # the first and the longest pause between checks of a store with nothing new
T = TypeVar("T")

logger = logging.getLogger(__name__)


class SyncGate:
    """Lets one sync at a time write to some weights, until it is closed, and then has them released.

    name: of the class that syncs, for messages. release: called once no sync runs after `close`.
    """

    def __init__(self, name: str, release: Callable[[], None]) -> None:
        self._name, self._release = name, release
        forked = f", perhaps in the middle of a sync; create a new {name} in the child"
        self.guard = ProcessGuard(name, forked, closed="was closed; create a new one to sync again")
        self._busy = threading.Lock()  # while a sync runs
        self._busy_thread: int | None = None  # the thread that has the lock

    def close(self) -> bool:
        """End waiting, and release the weights, or have the sync that is running do so when it is done.

        Any thread and any signal handler may call this. Returns False, and does nothing, in a forked process.
        """
        if self.guard.is_forked:
            return False
        self.guard.closed.set()
        self._release_if_idle()
        return True

    def _release_if_idle(self) -> None:
        if self._busy.acquire(blocking=False):  # otherwise the sync that is running does it
            try:
                self._release()
            finally:
                self._busy.release()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run one sync, unless this is closed; if it is closed meanwhile, release the weights afterwards.

        Raises: ClosedError: it was closed, or this is a forked process; StateError: this thread is in a sync already.
        """
        self.guard.claim()  # before the lock, which may stay locked for ever in a forked process
        if self._busy_thread == threading.get_ident():
            raise StateError(
                f"this thread is in the middle of a sync of this {self._name}: confirm, and a signal handler, must not "
                "sync, verify, resume or roll back; do that when sync has returned"
            )
        try:
            with self._busy:
                self._busy_thread = threading.get_ident()
                try:
                    self.guard.claim()
                    yield
                finally:
                    self._busy_thread = None
        finally:
            if self.guard.closed.is_set():
                self._release_if_idle()

    def sync_in_time(self, sync: Callable[[], T], wait_s: float, is_first: Callable[[], bool], location: str) -> T:
        """Sync, and while there is no version, try again for some time.

        A store that does not answer is asked again, too, if `is_first`: there are no weights yet.
        """
        until, waiting = time.monotonic() + wait_s, False
        for pause_s in pauses(INTERVAL_S, MAX_INTERVAL_S):
            try:
                with self.working():  # not while it waits: `verify` need not wait as long
                    return sync()
            except StoreError as e:
                awaited = isinstance(e, NothingPublishedError) or (e.retryable and is_first())
                left_s = until - time.monotonic()
                if not awaited or left_s <= 0:
                    raise
                if not waiting:
                    logger.info("Waiting up to %.0f s for a version at %s.", wait_s, location)
                waiting = True
            self.guard.closed.wait(min(pause_s, left_s))
            self.guard.claim()
        raise AssertionError  # the pauses have no end


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds to wait between attempts: twice as long each time, up to a limit."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)
