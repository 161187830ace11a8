"""Many readers of one store, at the cost of one: what several ask for at the same time is asked for once.

For a relay, which hundreds of workers poll. `CoalescingStore(CachedStore(upstream, folder))` asks the upstream at most
once a second for each object that may change or appear, and once for each that may not.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from pulsesync.errors import NotFoundError, StoreError
from pulsesync.store.base import ObjectEntry, ReadOnlyStore, Store, forget, is_content_addressed, is_near, size_of
from pulsesync.store.keys import check_key, check_prefix

_REMEMBER_S = 1.0
_FORGET_S = 10.0  # between two reports about one object that are acted on: each may cost a fetch from the upstream
_WHOLE_BYTES = 1 << 22  # records below this size are fetched whole, so that any ranges of them are one request
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 1 << 26
_MAX_REPORTED = 4096  # objects whose reports are passed on in the same ten seconds
_ENTRY_BYTES = 256  # of a listing

T = TypeVar("T")
_Call = tuple[str | int | None, ...]


class CoalescingStore(ReadOnlyStore):
    """A store for reading, for many threads. Equal calls at the same time are one call with one outcome.

    What is content-addressed is passed on. Of everything else, of listings, and of whatever failed (there is no such
    object, the store is away), the outcome is remembered for a second: a reader may be told what was true up to a
    second, and the time of one call, ago.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._under_way: dict[_Call, Future[Any]] = {}
        self._remembered: dict[_Call, _HeldAnswer] = {}  # oldest first
        self._reported: dict[str, float] = {}  # by key, when its last report was passed on; oldest first

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        if is_content_addressed(key):
            try:
                return self._once((key, begin, end), lambda: self.store.get(key, begin, end))
            except NotFoundError:
                with self._lock:
                    self._reported.pop(key, None)  # only objects that exist take a place there
                raise
        whole = self._once((key,), lambda: self.store.get(key, 0, _WHOLE_BYTES), _REMEMBER_S)
        if len(whole) < _WHOLE_BYTES or (end is not None and end <= _WHOLE_BYTES):
            return whole[begin:end]
        return self._once((key, begin, end), lambda: self.store.get(key, begin, end))

    def size(self, key: str) -> int:
        check_key(key)
        return self._once(("size", key), lambda: size_of(self.store, key), _REMEMBER_S)

    def has(self, key: str, begin: int = 0, end: int | None = None) -> bool:
        return is_near(self.store, key, begin, end)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        return iter(self._once(("list", prefix), lambda: tuple(self.store.list(prefix)), _REMEMBER_S))

    def forget(self, key: str) -> None:
        """Pass a report on, once in ten seconds for each object: any client of a relay can make one.

        The times of reports are kept apart from everything else, so that no other requests can displace them.
        """
        self._once(("forget", key), lambda: self._forget(key))

    def pass_on(self, key: str, data: bytes) -> None:
        """Send the heartbeat of a worker to the upstream. Raises: StoreError, if it is not accepted there."""
        self.store.put(key, data)

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"a relay is read-only; {key} can be written where the run is published", key=key)

    def _forget(self, key: str) -> None:
        now = time.monotonic()
        with self._lock:
            while self._reported and now - self._reported[oldest := next(iter(self._reported))] >= _FORGET_S:
                del self._reported[oldest]
            if key in self._reported or len(self._reported) >= _MAX_REPORTED:
                return
            self._reported[key] = now
        forget(self.store, key)
        with self._lock:
            self._remembered.pop(("size", key), None)

    def _once(self, name: _Call, call: Callable[[], T], remember_s: float = 0.0) -> T:
        """Make a call, or share the outcome of an equal one that is under way or is remembered."""
        now = time.monotonic()
        with self._lock:
            shared = self._under_way.get(name) or self._recall(name, now)
            future = shared or self._under_way.setdefault(name, Future())
        if shared is None:
            try:
                future.set_result(call())
            except BaseException as e:  # noqa: BLE001 - raised again below, here and in every thread that waits
                future.set_exception(e)
            with self._lock:
                del self._under_way[name]
                if future.exception():
                    remember_s = _REMEMBER_S
                if remember_s:
                    self._remember(name, now, now + remember_s, future)
        outcome: T = future.result()
        return outcome

    def _recall(self, name: _Call, now: float) -> Future[Any] | None:
        held = self._remembered.get(name)
        return held.future if held is not None and now < held.until else None

    def _remember(self, name: _Call, began: float, until: float, future: Future[Any]) -> None:
        """Keep an outcome for a while from when its call began; drop what is older, and the oldest of too much."""
        self._remembered.pop(name, None)
        self._remembered[name] = _HeldAnswer(until, _weigh(future), future)
        weight = sum(held.weight for held in self._remembered.values())
        for old, held in list(self._remembered.items()):
            too_much = len(self._remembered) > _MAX_REMEMBERED or weight > _MAX_REMEMBERED_BYTES
            if held.until > began and not too_much:
                break
            del self._remembered[old]
            weight -= held.weight


class _HeldAnswer(NamedTuple):
    until: float
    weight: int
    future: Future[Any]


def _weigh(future: Future[Any]) -> int:
    """Return about how many bytes an outcome takes: an object, a listing, or an error."""
    if future.exception():
        return 0
    outcome = future.result()
    if outcome is None or isinstance(outcome, int):
        return _ENTRY_BYTES
    return len(outcome) if isinstance(outcome, bytes) else _ENTRY_BYTES * len(outcome)
