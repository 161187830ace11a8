"""A store that fails on purpose, by a seed, as networks, proxies and eventually consistent buckets do."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

from pulsesync.errors import StoreError
from pulsesync.store import ObjectEntry, Store, WrappedStore

T = TypeVar("T")


class FaultyStore(WrappedStore):
    """Passes calls on to a store and makes some fail. `faults` counts them, by kind.

    Each keyword is the probability of one kind of fault, drawn for every call that it applies to. Calls of one thread
    fail in the same way for the same seed.

    Args:
        store: The store that carries the calls out.
        rng: Draws the faults.
        lost: A call is not carried out, and raises a retryable StoreError.
        unanswered: A call is carried out, but raises a retryable StoreError.
        truncated: A get returns only the first bytes.
        flipped: A get returns one wrong bit.
        stale: A get returns what the object was before the last put over it.
        doubled: A put arrives twice.
    """

    def __init__(
        self,
        store: Store,
        rng: random.Random,
        *,
        lost: float = 0.0,
        unanswered: float = 0.0,
        truncated: float = 0.0,
        flipped: float = 0.0,
        stale: float = 0.0,
        doubled: float = 0.0,
    ) -> None:
        super().__init__(store)
        self.faults: Counter[str] = Counter()
        self._rng = rng
        self._chances = {"lost": lost, "unanswered": unanswered, "truncated": truncated}
        self._chances |= {"flipped": flipped, "stale": stale, "doubled": doubled}
        self._now: dict[str, bytes] = {}  # as last put through this store
        self._before: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        data = self._call(key, lambda: self.store.get(key, begin, end))
        with self._lock:
            before = self._before.get(key)
        if before is not None and self._strikes("stale"):
            data = before[begin:end]
        if data and self._strikes("truncated"):
            data = data[: self._below(len(data))]
        if data and self._strikes("flipped"):
            data = _flip(data, self._below(8 * len(data)))
        return data

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._call(key, lambda: self._put(key, bytes(data)))

    def create(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self.store.create(key, data))

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        return iter(self._call(prefix, lambda: tuple(self.store.list(prefix))))

    def delete(self, key: str) -> None:
        self._call(key, lambda: self.store.delete(key))

    def _put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        if self._strikes("doubled"):
            self.store.put(key, data)
        with self._lock:
            if key in self._now:
                self._before[key] = self._now[key]
            self._now[key] = data

    def _call(self, key: str, call: Callable[[], T]) -> T:
        if self._strikes("lost"):
            raise StoreError(f"the request for {key} was lost, on purpose", key=key, retryable=True)
        result = call()
        if self._strikes("unanswered"):
            raise StoreError(f"the answer for {key} was lost, on purpose", key=key, retryable=True)
        return result

    def _strikes(self, kind: str) -> bool:
        with self._lock:
            strikes = self._rng.random() < self._chances[kind]
            if strikes:
                self.faults[kind] += 1
        return strikes

    def _below(self, bound: int) -> int:
        with self._lock:
            return self._rng.randrange(bound)


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
