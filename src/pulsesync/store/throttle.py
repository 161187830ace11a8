"""A store with limited bandwidth: to share a link with others, and to measure a run on a slow link."""

import threading
import time
from collections.abc import Iterator

from pulsesync.core.arguments import number, seconds
from pulsesync.store.base import ObjectEntry, Store, WrappedStore, size_of


class ThrottledStore(WrappedStore):
    """Limits reads and writes of all threads together to `bytes_per_s`; every call takes `latency_s` in addition.

    A call that finds the link idle starts at once; others wait until the bytes of earlier calls are transferred. Idle
    time is not saved up, so that no second transfers more than its share.

    Args:
        store: The store whose calls are slowed down.
        bytes_per_s: Bandwidth, of reads and writes of all threads together.
        latency_s: Added to every call.

    Raises:
        ValueError: bytes_per_s is not above 0.
    """

    is_local = False  # it simulates a network, whatever it wraps

    def __init__(self, store: Store, bytes_per_s: float, latency_s: float = 0.0) -> None:
        super().__init__(store)
        self._bytes_per_s = number("bytes_per_s", bytes_per_s, what="a number of bytes", above=0)
        self._latency_s = seconds("latency_s", latency_s)
        self._free_at = 0.0  # when all bytes of earlier calls are transferred
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

    def _carry(self, size_bytes: int) -> None:
        """Wait until the link has transferred these bytes and the latency of a call is over."""
        with self._lock:
            now = time.perf_counter()
            if size_bytes:  # a call without content does not wait for other calls
                self._free_at = max(now, self._free_at) + size_bytes / self._bytes_per_s
            wait_s = (self._free_at - now if size_bytes else 0.0) + self._latency_s
        time.sleep(wait_s)
