"""Repeats calls that may succeed a little later."""

import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from pulsesync.core.arguments import whole
from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store.base import MAX_ENTRIES, ObjectEntry, Store, WrappedStore, size_of, too_many

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RetryStore(WrappedStore):
    """Repeats calls whose error is `retryable`, up to `attempts` in all, and then raises the last error.

    Before the n-th repetition it waits a random time between 0 and `first_wait_s` × 2^(n−1), but never more than
    `longest_wait_s`: so after an outage the requests of many workers are spread out in time.

    Args:
        store: The store whose calls are repeated.
        attempts: Calls in all, the first one included.
        first_wait_s: The longest wait before the first repetition; it doubles for each one after that.
        longest_wait_s: The limit of that.
        sleep: Waits for a number of seconds.
        random: Returns a number from 0 to 1.

    Raises:
        ValueError: attempts is less than 1.
    """

    def __init__(
        self,
        store: Store,
        attempts: int = 5,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(store)
        self._attempts = whole("attempts", attempts, 1)
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._sleep = sleep
        self._random = random

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._retried(lambda: self.store.get(key, begin, end))

    def size(self, key: str) -> int:
        return self._retried(lambda: size_of(self.store, key))

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._retried(lambda: self.store.put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist. Raises: ConflictError.

        An attempt that failed may have been executed nevertheless. If a later one finds an object with exactly these
        bytes, that object counts as created by this call.
        """
        failed = False

        def attempt() -> None:
            nonlocal failed
            try:
                self.store.create(key, data)
            except ConflictError:
                if not (failed and self._holds(key, data)):
                    raise
            except StoreError:
                failed = True
                raise

        self._retried(attempt)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects below a prefix; after a failure the listing continues with the next key."""
        waits, begin, last, count = self._waits(), "", "", 0
        while True:
            try:
                for entry in self.store.list(prefix):
                    if entry.key > begin:
                        if (count := count + 1) > MAX_ENTRIES:  # more than one attempt could list
                            raise too_many(
                                f"{MAX_ENTRIES:,} objects", prefix, str(getattr(self.store, "url", "the store"))
                            )
                        last = entry.key
                        yield entry
                return
            except StoreError as e:
                self._wait(e, waits)
                begin = last

    def delete(self, key: str) -> None:
        self._retried(lambda: self.store.delete(key))

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, end=len(data) + 1) == data
        except NotFoundError:
            return False

    def _retried(self, call: Callable[[], T]) -> T:
        waits = self._waits()
        while True:
            try:
                return call()
            except StoreError as e:
                self._wait(e, waits)

    def _waits(self) -> Iterator[tuple[int, float]]:
        """Yield, for each attempt but the last one, its number and the longest wait after it."""
        longest = self._first_wait_s
        for attempt in range(1, self._attempts):
            yield attempt, min(longest, self._longest_wait_s)
            longest *= 2

    def _wait(self, error: StoreError, waits: Iterator[tuple[int, float]]) -> None:
        """Wait before the next attempt. Raises: the error, if it is not retryable or there is no other attempt."""
        following = next(waits, None) if error.retryable else None
        if following is None:
            raise error
        attempt, longest = following
        logger.info("Attempt %d of %d at a request failed; trying again: %s.", attempt, self._attempts, error.reason)
        self._sleep(self._random() * longest)
