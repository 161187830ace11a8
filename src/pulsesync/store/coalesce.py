"""Many readers of one store, at the cost of one: equal requests at the same time become one request.

For a relay, which hundreds of workers poll. `CoalescingStore(CachedStore(upstream, folder))` asks the upstream at most
once a second for each object that may change or appear, and once for each that never changes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from pulsesync.errors import NotFoundError, StoreError
from pulsesync.store.base import ObjectEntry, ReadOnlyStore, Store, WrappedStore, is_content_addressed, is_near, size_of
from pulsesync.store.contents import DamagedTransferError
from pulsesync.store.keys import check_key, check_prefix

_REMEMBER_S = 1.0
_FORGET_S = 10.0  # between two reports about one object that are forwarded: each may cost a fetch from the upstream
_WHOLE_BYTES = 1 << 22  # records below this size are fetched entirely, so that any ranges of them are one request
_MAX_ABSENT = 1 << 14
_MAX_REMEMBERED = 1024
_MAX_REMEMBERED_BYTES = 1 << 26
_MAX_REPORTED = 4096  # objects whose reports are forwarded in the same ten seconds; as many that are absent
_ENTRY_BYTES = 256  # memory of an outcome that is no object

T = TypeVar("T")
_Call = tuple[str | int | None, ...]


class CoalescingStore(ReadOnlyStore, WrappedStore):
    """A read-only store for many threads. Equal calls at the same time become one call with one outcome.

    The outcome of reading content-addressed objects is not remembered, nor are listings, which the server keeps. That
    of all other reads and of failures (there is no such object, the store does not answer) is remembered for a second:
    so an answer may be older by a second and the time of one call.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._lock = threading.Lock()
        self._under_way: dict[_Call, Future[Any]] = {}
        self._remembered: dict[_Call, _HeldAnswer] = {}  # oldest first
        self._absent: dict[str, float] = {}  # by key, when it was asked for; oldest first
        self._reported: dict[str, float] = {}  # by key, when its last report was forwarded; oldest first
        self._absent_reported: dict[str, float] = {}  # the same, of objects that were absent

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        if is_content_addressed(key):
            return self._found(key, lambda: self._once((key, begin, end), lambda: self.store.get(key, begin, end)))
        whole = self._once((key,), lambda: self.store.get(key, 0, _WHOLE_BYTES), _REMEMBER_S)
        if len(whole) < _WHOLE_BYTES or (end is not None and end <= _WHOLE_BYTES):
            return whole[begin:end]
        return self._once((key, begin, end), lambda: self.store.get(key, begin, end))

    def size(self, key: str) -> int:
        check_key(key)
        return self._found(key, lambda: self._once(("size", key), lambda: size_of(self.store, key), _REMEMBER_S))

    def has(self, key: str, begin: int = 0, end: int | None = None) -> bool:
        return is_near(self.store, key, begin, end)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        return iter(self._once(("list", prefix), lambda: tuple(self.store.list(prefix))))

    def forget(self, key: str) -> None:
        """Forward a report about an object, at most once in ten seconds: any client of a relay can make one.

        That the object was absent is forgotten then. The times of reports are kept separately, so that other requests
        cannot displace them, and those of absent objects apart, because there can be any number of these.
        """
        self._once(("forget", key), lambda: self._forget(key))

    def pass_on(self, key: str, data: bytes) -> None:
        """Send the heartbeat of a worker to the upstream. Raises: StoreError, if the upstream does not accept it."""
        self.store.put(key, data)

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"a relay is read-only; write {key} to the store that the trainer publishes to", key=key)

    def _forget(self, key: str) -> None:
        now = time.monotonic()
        with self._lock:
            reported = self._absent_reported if key in self._absent else self._reported
            _drop_before(now - _FORGET_S, reported)
            if key in reported or len(reported) >= _MAX_REPORTED:
                return
            reported[key] = now
        super().forget(key)
        with self._lock:
            self._absent.pop(key, None)
            for name in [name for name in self._remembered if key in name[:2]]:
                del self._remembered[name]

    def _found(self, key: str, call: Callable[[], T]) -> T:
        """Make a call about an object, unless it was absent a moment ago. Raises: NotFoundError."""
        if not is_content_addressed(key):
            return call()
        now = time.monotonic()
        with self._lock:
            _drop_before(now - _REMEMBER_S, self._absent)
            if key in self._absent:
                raise NotFoundError(f"there was no {key} a moment ago; it is asked for again later", key=key)
        try:
            return call()
        except NotFoundError:
            with self._lock:
                self._reported.pop(key, None)  # only objects that exist are counted there
                if len(self._absent) < _MAX_ABSENT:
                    self._absent.setdefault(key, now)
            raise

    def _once(self, name: _Call, call: Callable[[], T], remember_s: float = 0.0) -> T:
        """Make a call, or share the outcome of an equal one that is running or remembered."""
        now = time.monotonic()
        with self._lock:
            held = self._remembered.get(name)
            shared = self._under_way.get(name) or (held.future if held and now < held.until else None)
            future = shared or self._under_way.setdefault(name, Future())
        if shared is None:
            try:
                future.set_result(call())
            except BaseException as e:  # noqa: BLE001 - raised again below, in this thread and in every thread that waits
                future.set_exception(e)
            with self._lock:
                del self._under_way[name]
                if future.exception():
                    remember_s = 0.0 if isinstance(future.exception(), DamagedTransferError) else _REMEMBER_S
                if remember_s:
                    self._remember(name, now, now + remember_s, future)
        outcome: T = future.result()
        return outcome

    def _remember(self, name: _Call, began: float, until: float, future: Future[Any]) -> None:
        """Keep an outcome for some time after its call began; drop expired ones, and the oldest beyond the limit."""
        self._remembered.pop(name, None)
        self._remembered[name] = _HeldAnswer(until, _weigh(future), future)
        weight = sum(answer.weight for answer in self._remembered.values())
        for old, answer in list(self._remembered.items()):
            too_much = len(self._remembered) > _MAX_REMEMBERED or weight > _MAX_REMEMBERED_BYTES
            if answer.until > began and not too_much:
                break
            del self._remembered[old]
            weight -= answer.weight


class _HeldAnswer(NamedTuple):
    until: float
    weight: int
    future: Future[Any]


def _drop_before(than_s: float, times: dict[str, float]) -> None:
    """Drop what is as old as a time or older; the oldest come first."""
    while times and times[oldest := next(iter(times))] <= than_s:
        del times[oldest]


def _weigh(future: Future[Any]) -> int:
    """Return roughly how many bytes an outcome takes: an object, a size, or an error."""
    if future.exception():
        return 0
    outcome = future.result()
    return len(outcome) if isinstance(outcome, bytes) else _ENTRY_BYTES
