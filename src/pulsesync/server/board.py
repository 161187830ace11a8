"""The heartbeats of workers that read a run over HTTP: kept in memory, listed with those of the store, sent upstream.

Any client that may read may also send one, so everything is bounded: how many there are, how long each is, how long it
is kept, how many names are sent on, and how many of both come from one network. Only records that parse are kept, and
only those of a run are sent on. A name belongs to the client that sent it first, by a secret that comes with each
record and is never shown, until it has ended or was silent for a minute. So no client replaces or displaces the
heartbeats of live workers.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.run.heartbeats import MAX_BYTES, MAX_WORKERS, parse
from pulsesync.run.keys import HEAD, HEARTBEATS
from pulsesync.store.base import ObjectEntry, Store, pass_on
from pulsesync.store.keys import is_heartbeat

__all__ = ["MAX_BYTES", "HeartbeatBoard"]

KEEP_S = 24 * 3600.0  # for which each is kept, and a name counts that is not heard from again
# How long a worker must be silent before another client may send records under its name: two heartbeats, so that one
# that was killed and restarted is shown again before it counts as silent.
BOUND_S = 60.0
ROOM_S = 300.0  # ten heartbeats: when there is no room left, a worker that is silent for longer makes it
_PASSED = 4  # times as many names as are kept are passed on in a day: workers under generated names are replaced
_PASS_EVERY_S = 1.0  # between two rounds of sending heartbeats upstream: only the newest of each worker is sent
_WARN_EVERY_S = 600.0

logger = logging.getLogger(__name__)


class _Kept(NamedTuple):
    data: bytes
    came_s: float  # by this machine's clock
    owner: bytes | None  # hash of the secret of the client that sent it; None: of a release that sends none
    ended: bool
    client: str  # the network that it came from
    again: bool  # whether the name was heard before
    shown: bool = True  # False: the store has a newer record of this name, which still belongs to its owner


class HeartbeatBoard:
    """The newest heartbeat of each worker, by key.

    MAX_WORKERS are kept, and half as many from one network: a client that makes up names cannot take all places. When
    there are as many, a new name takes the place of a worker that has ended, or was silent for five minutes: first one
    that was heard once only, then the one that is silent longest. If there is none, no new name is accepted.

    The store is what is served. A relay's passes heartbeats on to its upstream, in the background.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._passes_on = hasattr(store, "pass_on")
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # by key; oldest first
        self._stored: dict[str, float] = {}  # keys that the store itself has, and when they were written there
        self._waiting: dict[str, bytes] = {}  # to be passed on
        # Keys that are passed on, by the monotonic time of the last record, and where it came from; oldest first.
        self._passed: dict[str, tuple[float, str]] = {}
        self._sender: threading.Thread | None = None
        self._warned_at = self._full_at = -_WARN_EVERY_S
        self._began_s = time.monotonic()

    def put(self, key: str, data: bytes, secret: str | None = None, client: str = "") -> None:
        """Keep a heartbeat instead of the one before. client: the network that it comes from.

        Raises: FormatError: it is malformed; ConflictError: the name belongs to another client; StoreError, retryable:
        there are too many workers.
        """
        record, now_s = parse(data, key.rpartition("/")[2]), time.time()
        owner = None if secret is None else hashlib.sha256(secret.encode()).digest()  # a header may be long
        with self._lock:
            self._drop_old()
            before = self._kept.get(key)
            if before is not None and not before.ended and before.owner != owner and self._is_live(before.came_s):
                raise ConflictError(f"{key} was sent by another process less than {BOUND_S:.0f} s ago", key=key)
            if not self._passes_on and self._is_live(self._stored.get(key, 0.0)):
                raise ConflictError(f"{key} is written to the store itself", key=key)
            if before is None and not self._has_room(client):
                self._warn_full()
                count = f"{len(self._kept)} workers have sent heartbeats already"
                raise StoreError(f"{count}, of at most {MAX_WORKERS}", key=key, retryable=True)
            self._kept.pop(key, None)
            self._kept[key] = _Kept(data, now_s, owner, record.ended, client, before is not None)
            is_new = before is None or before.data != data  # the same bytes again come from relays that form a circle
            if self._passes_on and is_new and self._may_pass_on(key, client):
                self._waiting[key] = data
                if self._sender is None:
                    sender = threading.Thread(target=self._send, name="pulse-heartbeats", daemon=True)
                    sender.start()
                    self._sender = sender

    def _is_live(self, came_s: float) -> bool:
        return abs(time.time() - came_s) < BOUND_S

    def _has_room(self, client: str) -> bool:
        """Return whether a new name of a client may be kept, after dropping the one that is missed least if needed."""
        has_its_half = sum(kept.client == client for kept in self._kept.values()) >= max(1, MAX_WORKERS // 2)
        if not has_its_half and len(self._kept) < MAX_WORKERS:
            return True
        silent = [
            (not kept.ended, kept.again, number, key)
            for number, (key, kept) in enumerate(self._kept.items())
            if (kept.ended or abs(time.time() - kept.came_s) > ROOM_S) and (kept.client == client or not has_its_half)
        ]
        if silent:
            del self._kept[min(silent)[-1]]
        return bool(silent)

    def _may_pass_on(self, key: str, client: str) -> bool:
        """Whether the upstream may get a record under this key: a client that makes up names must not fill it."""
        now, limit = time.monotonic(), _PASSED * MAX_WORKERS
        while self._passed and now - next(iter(self._passed.values()))[0] > KEEP_S:
            del self._passed[next(iter(self._passed))]
        if key not in self._passed:
            own = sum(who == client for _, who in self._passed.values())
            if len(self._passed) >= limit or own >= limit // 2:
                return False
        self._passed.pop(key, None)
        self._passed[key] = now, client
        return True

    def get(self, key: str) -> bytes | None:
        """Return the heartbeat under a key; None if this server did not receive one."""
        if not is_heartbeat(key):
            return None
        with self._lock:
            self._drop_old()
            kept = self._kept.get(key)
        return kept.data if kept and kept.shown else None

    def list(self, prefix: str, stored: Iterable[ObjectEntry]) -> list[ObjectEntry]:
        """Return a listing of the store with the heartbeats below the same prefix that are kept in memory.

        Of a worker that is in both, the store's counts if it is newer; and always while it is written, if this server
        passes nothing on, because then the worker writes it there itself.
        """
        if not prefix.endswith("heartbeats/"):
            return list(stored)
        listed = {entry.key: entry for entry in stored}
        with self._lock:
            self._drop_old()
            others = {key: came_s for key, came_s in self._stored.items() if not key.startswith(prefix)}
            live = {entry.key: entry.modified_s for entry in listed.values() if self._is_live(entry.modified_s)}
            self._stored = dict(islice((others | live).items(), MAX_WORKERS))
            for key, kept in list(self._kept.items()):
                theirs = listed.get(key)
                newer_s = BOUND_S if self._passes_on else 0.0  # it may be the same one, passed on
                if theirs is not None and (
                    theirs.modified_s > kept.came_s + newer_s or (key in live and not self._passes_on)
                ):
                    # Not forgotten: to a relay whose clock is late, its own record that was passed on looks newer.
                    self._kept[key] = kept._replace(shown=False)
                elif kept.shown and key.startswith(prefix):
                    listed[key] = ObjectEntry(key, len(kept.data), kept.came_s)
        return sorted(listed.values(), key=lambda entry: entry.key)

    def _drop_old(self) -> None:
        now_s = time.time()
        while self._kept:
            oldest = next(iter(self._kept))
            if abs(now_s - self._kept[oldest].came_s) <= KEEP_S:
                return
            del self._kept[oldest]

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
                except ConflictError as e:
                    # Until then, a relay that was restarted is another process to its upstream than it was before.
                    if time.monotonic() - self._began_s >= BOUND_S:
                        self._warn(e)
                except Exception as e:  # noqa: BLE001 - whatever the upstream raises, later heartbeats are sent
                    self._warn(e)
            time.sleep(_PASS_EVERY_S)

    def _warn_full(self) -> None:
        if time.monotonic() - self._full_at >= _WARN_EVERY_S:
            self._full_at = time.monotonic()
            text = (
                "%d workers have sent heartbeats; %d are kept, half of them from one network: another worker is not "
                "shown until one of them has ended, or was silent for %.0f minutes."
            )
            logger.warning(text, len(self._kept), MAX_WORKERS, ROOM_S / 60)

    def _warn(self, error: Exception) -> None:
        if time.monotonic() - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = time.monotonic()
            logger.warning("The heartbeats of workers cannot be sent to the upstream: %s", error)
