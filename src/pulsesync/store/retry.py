"""Repeats calls that may succeed a little later."""

import logging
from collections.abc import Callable, Iterator
from random import random
from time import sleep
from typing import TypeVar

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store.base import MAX_ENTRIES, ObjectEntry, WrappedStore, size_of, too_many

ATTEMPTS = 5  # calls in all, the first one included
FIRST_WAIT_S = 0.1  # the longest wait before the first repetition; it doubles for each one after that ...
LONGEST_WAIT_S = 5.0  # ... up to this

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RetryStore(WrappedStore):
    """Repeats calls whose error is `retryable`, up to five calls in all, and then raises the last error.

    Before the n-th repetition it waits a random time between 0 and 0.1 s × 2^(n−1), but never more than 5 s: so after
    an outage the requests of many workers are spread out in time.

    Args:
        store: The store whose calls are repeated.
    """

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
        waits, begin, last, count = _waits(), "", "", 0
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
                _wait(e, waits)
                begin = last

    def delete(self, key: str) -> None:
        self._retried(lambda: self.store.delete(key))

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key, end=len(data) + 1) == data
        except NotFoundError:
            return False

    def _retried(self, call: Callable[[], T]) -> T:
        waits = _waits()
        while True:
            try:
                return call()
            except StoreError as e:
                _wait(e, waits)


def _waits() -> Iterator[tuple[int, float]]:
    """Yield, for each attempt but the last one, its number and the longest wait after it."""
    for attempt in range(1, ATTEMPTS):
        yield attempt, min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S)


def _wait(error: StoreError, waits: Iterator[tuple[int, float]]) -> None:
    """Wait before the next attempt. Raises: the error, if it is not retryable or there is no other attempt."""
    following = next(waits, None) if error.retryable else None
    if following is None:
        raise error
    attempt, longest = following
    logger.info("Attempt %d of %d at a request failed; trying again: %s.", attempt, ATTEMPTS, error.reason)
    sleep(random() * longest)
