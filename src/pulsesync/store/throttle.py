"""A store behind a slow link: for budgets on a shared line, and to measure what a run costs on one."""

import threading
import time
from collections.abc import Callable, Iterator

from pulsesync.store.base import ObjectEntry, Store, forget, size_of


class ThrottledStore:
    """Lets `bytes_per_s` through, reads and writes of all threads together; every call takes `latency_s` besides.

    A call that finds the link idle starts at once; others queue behind the bytes that were let in before them. Nothing
    is saved up while the link is idle, so that no second carries more than its share.

    Args:
        store: The store whose calls are slowed down.
        bytes_per_s: Bandwidth, of reads and writes of all threads together.
        latency_s: Added to every call.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.

    Raises:
        ValueError: bytes_per_s is not above 0.
    """

    is_local = False  # it stands for a link, whatever it wraps

    def __init__(
        self,
        store: Store,
        bytes_per_s: float,
        latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"bytes_per_s={bytes_per_s}: nothing would ever arrive")
        self.store = store
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = 0.0  # when the link has carried all that was let in
        self._lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self.store.get(key, begin, end)
        self._carry(len(data))
        return data

    def size(self, key: str) -> int:
        self._carry(0)
        return size_of(self.store, key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._carry(memoryview(data).nbytes)
        self.store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._carry(len(data))
        self.store.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        self._carry(0)
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self._carry(0)
        self.store.delete(key)

    def forget(self, key: str) -> None:
        forget(self.store, key)

    def _carry(self, size_bytes: int) -> None:
        """Return when the link has carried these bytes and the latency of a call is over."""
        with self._lock:
            now = self._clock()
            if size_bytes:  # a call without content waits for nobody's
                self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
            wait_s = (self._free_at - now if size_bytes else 0.0) + self._latency_s
        self._sleep(wait_s)
