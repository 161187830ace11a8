"""The heartbeats of workers that read a run over HTTP: kept in memory, listed with those of the store, sent upstream.

Any client that may read may also send one, so everything is bounded: how many there are, how long each is, how long it
is kept, how many names are sent on. Only records that parse are kept, and only those of a run are sent on.
"""

import logging
import threading
import time
from collections.abc import Iterable

from pulsesync.errors import NotFoundError
from pulsesync.run.heartbeats import MAX_BYTES, MAX_WORKERS, parse
from pulsesync.run.keys import HEAD, HEARTBEATS
from pulsesync.store.base import ObjectEntry, Store, pass_on
from pulsesync.store.keys import is_heartbeat

__all__ = ["MAX_BYTES", "HeartbeatBoard"]

KEEP_S = 24 * 3600.0
_PASS_EVERY_S = 1.0  # between two rounds of sending heartbeats upstream: only the newest of each worker is sent
_PASS_WARN_S = 600.0
_NEWER_S = 60.0  # by which a record of the store must be newer to count instead: it may be the same one, passed on

logger = logging.getLogger(__name__)


class HeartbeatBoard:
    """The newest heartbeat of each worker, by key.

    Args:
        store: What is served. A relay's store passes heartbeats on to its upstream, in the background.
        max_workers: How many are kept; the oldest one is dropped first. As many names are passed on.
        keep_s: For how long each is kept, and a name counts that is not heard from again.
    """

    def __init__(self, store: Store, *, max_workers: int = MAX_WORKERS, keep_s: float = KEEP_S) -> None:
        self._store, self._max_workers, self._keep_s = store, max_workers, keep_s
        self._passes_on = hasattr(store, "pass_on")
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[bytes, float]] = {}  # by key, with the time it arrived; oldest first
        self._waiting: dict[str, bytes] = {}  # to be passed on
        self._passed: dict[str, float] = {}  # keys that are passed on, by the monotonic time of the last; oldest first
        self._sender: threading.Thread | None = None
        self._warned_at = -_PASS_WARN_S

    def put(self, key: str, data: bytes) -> None:
        """Keep a heartbeat instead of the one before. Raises: FormatError, if it is malformed."""
        parse(data, key.rpartition("/")[2])
        with self._lock:
            before = self._kept.pop(key, None)
            self._kept[key] = (data, time.time())
            self._drop_old()
            is_new = before is None or before[0] != data  # the same bytes again come from relays that form a circle
            if self._passes_on and is_new and self._may_pass_on(key):
                self._waiting[key] = data
                if self._sender is None:
                    sender = threading.Thread(target=self._send, name="pulse-heartbeats", daemon=True)
                    sender.start()
                    self._sender = sender

    def _may_pass_on(self, key: str) -> bool:
        """Whether the upstream may get a record under this key: a client that makes up names must not fill it."""
        now = time.monotonic()
        while self._passed and now - next(iter(self._passed.values())) > self._keep_s:
            del self._passed[next(iter(self._passed))]
        if key not in self._passed and len(self._passed) >= self._max_workers:
            return False
        self._passed.pop(key, None)
        self._passed[key] = now
        return True

    def get(self, key: str) -> bytes | None:
        """Return the heartbeat under a key; None if this server did not receive one."""
        if not is_heartbeat(key):
            return None
        with self._lock:
            self._drop_old()
            return self._kept.get(key, (None, 0.0))[0]

    def list(self, prefix: str, stored: Iterable[ObjectEntry]) -> list[ObjectEntry]:
        """Return a listing of the store with the heartbeats below the same prefix that are kept in memory."""
        if not prefix.endswith("heartbeats/"):
            return list(stored)
        listed = {entry.key: entry for entry in stored}
        with self._lock:
            self._drop_old()
            for key, (data, came_s) in list(self._kept.items()):
                if key in listed and listed[key].modified_s > came_s + _NEWER_S:
                    del self._kept[key]  # the worker has sent newer heartbeats elsewhere
                elif key.startswith(prefix):
                    listed[key] = ObjectEntry(key, len(data), came_s)
        return sorted(listed.values(), key=lambda entry: entry.key)

    def _drop_old(self) -> None:
        now_s = time.time()
        while self._kept:
            key, (_, came_s) = next(iter(self._kept.items()))
            if len(self._kept) <= self._max_workers and abs(now_s - came_s) <= self._keep_s:
                return
            del self._kept[key]

    def _send(self) -> None:
        """Send heartbeats upstream, repeatedly. Those that the upstream does not accept are dropped."""
        while True:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
                if not waiting:
                    self._sender = None
                    return
            for key, data in waiting.items():
                try:
                    # Nothing is written where there is no run, lest a client adds objects anywhere in the upstream.
                    self._store.get(key[: key.rindex(HEARTBEATS)] + HEAD, 0, 1)
                    pass_on(self._store, key, data)
                except NotFoundError:
                    continue
                except Exception as e:  # noqa: BLE001 - whatever the upstream raises, later heartbeats are sent
                    self._warn(e)
            time.sleep(_PASS_EVERY_S)

    def _warn(self, error: Exception) -> None:
        if time.monotonic() - self._warned_at >= _PASS_WARN_S:
            self._warned_at = time.monotonic()
            logger.warning("The heartbeats of workers cannot be sent to the upstream: %s", error)
