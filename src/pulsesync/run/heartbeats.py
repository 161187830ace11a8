"""Heartbeats: a small record that each worker keeps in the run, by which people see where the fleet is.

    Subscriber("s3://bucket/run", heartbeat="rollout-3")    # writes heartbeats/rollout-3
    pulse.read_fleet("s3://bucket/run").workers             # reads all of them (run/fleet.py)

A heartbeat is a hint. Nothing that moves weights reads one, a worker that cannot write its own continues without, and
any process that may write to the store can write any heartbeat. So a reader trusts nothing in it: sizes, types and
names are checked, and what a terminal would interpret is replaced.
"""

import atexit
import json
import logging
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, Protocol, get_args

from pulsesync.core.arguments import shown
from pulsesync.core.location import without_credentials
from pulsesync.core.text import printable
from pulsesync.core.threads import SignalSafeFlag
from pulsesync.core.version import __version__
from pulsesync.errors import ConflictError, FormatError, NotFoundError, StoreError
from pulsesync.format.json_reader import load_json
from pulsesync.run import keys
from pulsesync.store import Store
from pulsesync.store.keys import WORKER

FORMAT = "pulse-heartbeat/1"
MAX_BYTES = 1 << 11
MAX_WORKERS = 4096  # whose heartbeats are read; a listing may have any number
EVERY_S = 30.0  # between two records, while nothing happens
SOONEST_S = 5.0  # between two records, however much happens: an object store charges for each
LONGEST_S = 600.0  # between two attempts, if the store refuses them
EXIT_S = 2.0  # for all last records together when the interpreter ends

_MAX_NUMBER = 1 << 53
_READERS = 16
_ERROR_CHARACTERS, _TEXT_CHARACTERS = 200, 64  # of at most 4 bytes each, so that a record fits into its limit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a worker reports about itself. Times are seconds since 1970 by the worker's own clock."""

    worker: str
    host: str
    pid: int
    package: str  # version of pulsesync
    time_s: float  # when this was written
    version: int | None = None  # that the weights are at; None: nothing was synced yet
    step: int | None = None  # the trainer's, of that version
    newest: int | None = None  # version that the worker last knew to be there
    follows: str | None = None  # the pointer that it follows; None: the newest version
    synced_s: float | None = None  # when the last sync succeeded, whether there was something new or not
    pause_s: float | None = None  # of the last sync that wrote weights
    fetched_bytes: int = 0  # since the worker was started
    recounted_s: float | None = None  # when the digest of all weights was last counted anew
    recount_equal: bool | None = None  # and whether it was that of the version
    error: str | None = None  # of the last sync, if it failed
    rival: str | None = None  # another process that writes a heartbeat under the same name
    torn: bool = False  # whether the weights are between two versions and must not be used
    ended: bool = False  # whether the worker was closed, and this is its last record

    def build(self) -> bytes:
        """The bytes of the record: at most MAX_BYTES."""
        return json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False, separators=(",", ":")).encode()


_KINDS = {one.name: {*(get_args(one.type) or [one.type])} for one in fields(Heartbeat)}  # that each field may have
_REQUIRED = {one.name for one in fields(Heartbeat) if one.default is MISSING}
_NEWS = {"version", "newest", "recounted_s", "error", "torn"}  # what a record is written for, before its time has come


def check_worker(name: str) -> str:
    """Return the name of a worker. Raises: ValueError, for what is none."""
    if not isinstance(name, str) or not WORKER.fullmatch(name):
        raise ValueError(
            "the name of a worker must be 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit; got "
            f"{shown(name)}"
        )
    return name


def name_worker(*parts: str) -> str:
    """A name for a worker of this host, made of parts of any characters."""
    host = socket.gethostname().partition(".")[0][:32]
    text = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join((host, *parts)))
    return check_worker(text.strip("-._")[:64] or "worker")


def parse(data: bytes, worker: str) -> Heartbeat:
    """Read the record of a worker, without fields that this version does not know. Raises: FormatError."""
    if len(data) > MAX_BYTES:
        raise FormatError(f"the heartbeat of {worker} has more than {MAX_BYTES} bytes")
    table = load_json(data, f"the heartbeat of {worker}")
    if table.get("format") != FORMAT:
        raise FormatError(f"the heartbeat of {worker} is not of the format {FORMAT}")
    known = {name: table[name] for name in _KINDS if name in table}
    if bad := sorted((_REQUIRED - known.keys()) | {name for name, value in known.items() if not _fits(name, value)}):
        raise FormatError(f"the heartbeat of {worker} has no usable {bad[0]}")
    if known["worker"] != worker:
        raise FormatError(f"the heartbeat of {worker} is that of another worker")
    for name, value in known.items():
        if isinstance(value, str):
            known[name] = printable(value, _ERROR_CHARACTERS if name == "error" else _TEXT_CHARACTERS)
    return Heartbeat(**known)


def _fits(name: str, value: Any) -> bool:
    kind = float if type(value) is int and float in _KINDS[name] else type(value)  # JSON may write 1.0 as 1
    if kind not in _KINDS[name]:
        return False
    return not isinstance(value, int | float) or 0 <= value <= _MAX_NUMBER  # false for NaN as well


@dataclass(frozen=True)
class FoundHeartbeat:
    """A heartbeat as it was found in a store, or why it cannot be read."""

    worker: str
    heartbeat: Heartbeat | None
    written_s: float  # by the store's clock
    fault: str | None = None
    is_refused: bool = False  # whether the store does not show it; otherwise what is there is no heartbeat


def find_heartbeats(store: Store) -> list[FoundHeartbeat]:
    """The heartbeats of a run, by name; of one that cannot be read, the reason. Raises: StoreError."""
    entries = list(islice(_entries(store), MAX_WORKERS))
    if not entries:
        return []
    with ThreadPoolExecutor(min(_READERS, len(entries)), thread_name_prefix="pulse-heartbeats") as pool:
        found = pool.map(lambda entry: _find(store, *entry), entries)
        return [one for one in found if one is not None]


def _entries(store: Store) -> Iterator[tuple[str, float]]:
    for entry in store.list(keys.HEARTBEATS):
        name = entry.key.removeprefix(keys.HEARTBEATS)
        if WORKER.fullmatch(name):  # any other object is none of ours, and its name is not shown
            yield name, entry.modified_s


def _find(store: Store, worker: str, written_s: float) -> FoundHeartbeat | None:
    try:
        return FoundHeartbeat(worker, parse(store.get(keys.heartbeat_key(worker), 0, MAX_BYTES + 1), worker), written_s)
    except NotFoundError:  # it was removed just now
        return None
    except FormatError as e:
        return FoundHeartbeat(worker, None, written_s, str(e))
    except StoreError as e:
        if e.retryable:
            raise
        return FoundHeartbeat(worker, None, written_s, printable(str(e), _ERROR_CHARACTERS), is_refused=True)


class HeartbeatWriter:
    """Writes the heartbeat of a worker, on a thread of its own: no sync waits for it or fails by it.

    The first record is written when there is something to show, later ones soon after something has changed, and every
    30 s in any case, until `close`; none while there is no run at the location. A store that refuses is logged once,
    and asked again less and less often; one that does not answer is asked at the same interval.

    Args:
        store: The store of the run.
        worker: Its name: letters, digits, `.`, `_` and `-`.
        follows: The pointer that the worker follows, if it follows one.

    Raises:
        ValueError: the name is not one.
    """

    def __init__(self, store: Store, worker: str, *, follows: str | None = None) -> None:
        self._store = store
        self._pid = os.getpid()
        # The fields of the record. Replaced, never changed: no lock is needed, and a signal handler may close this at
        # any moment. A record is made of them when it is written: that takes 20 µs, and a look at a folder 200.
        name, host = check_worker(worker), printable(socket.gethostname(), _TEXT_CHARACTERS)
        first = Heartbeat(worker=name, host=host, pid=self._pid, package=__version__, time_s=0.0, follows=follows)
        self._facts: dict[str, Any] = asdict(first)
        self._news, self._end = SignalSafeFlag(), SignalSafeFlag()
        self._thread: threading.Thread | None = None
        self._ended = False  # apart from the fields: a handler may set it while a sync replaces them
        self._refused = 0  # attempts in a row
        self._rival: str | None = None  # apart from the fields, too: the thread that writes sets it
        self._wrote: Heartbeat | None = None  # the last record that the store has accepted
        self._is_away = False  # whether the last of them may succeed when it is repeated

    @property
    def record(self) -> Heartbeat:
        """What the next heartbeat will say."""
        return Heartbeat(**self._facts | {"ended": self._ended, "rival": self._rival})

    def start(self, newest: int | None = None) -> None:
        """Show that the worker is there, and which version it goes to; it has none yet, or an older one."""
        self._replace(newest=self._facts["newest"] if newest is None else newest)

    def synced(
        self, version: int, step: int, newest: int | None = None, pause_s: float | None = None, fetched_bytes: int = 0
    ) -> None:
        """Take a sync to a version into the record. This neither waits nor raises.

        newest: the version that is to be followed, as far as the worker knows.
        pause_s: how long weights were written; None: there was nothing new.
        """
        before = self._facts
        self._replace(
            version=version,
            step=step,
            newest=before["newest"] if newest is None else newest,
            synced_s=time.time(),
            pause_s=before["pause_s"] if pause_s is None else pause_s,
            fetched_bytes=before["fetched_bytes"] + fetched_bytes,
            error=None,
            torn=False,
        )

    def recounted(self, equal: bool) -> None:
        """Take a recount of all weights into the record. This neither waits nor raises."""
        self._replace(recounted_s=time.time(), recount_equal=equal)

    def failed(self, error: Exception, version: int | None, *, torn: bool = False) -> None:
        """Take an error into the record, and the version that the weights are at. This neither waits nor raises."""
        try:
            text = printable(without_credentials(str(error)), _ERROR_CHARACTERS)
        except Exception:  # noqa: BLE001 - an error of another library, whose text cannot be had
            text = ""
        self._replace(version=version, error=text or type(error).__name__, torn=torn)

    def close(self) -> None:
        """Write a last record, in the background, and end. Any thread and any signal handler may call this."""
        self._ended = True
        self._end.set()
        self._news.set()

    def join(self, timeout_s: float = EXIT_S) -> None:
        """After `close`, wait until the last record was written, or the time has passed."""
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join(timeout_s)

    def _replace(self, **facts: Any) -> None:
        if self._thread is None:
            self._pid = os.getpid()  # a process that was forked before the first event may write
            facts |= {"pid": self._pid}
        if self._pid != os.getpid() or self._ended:
            return  # a forked child has no thread that writes
        before = self._facts
        self._facts = before | facts
        if self._thread is None:
            self._start()
        elif any(before[name] != value for name, value in facts.items() if name in _NEWS):
            self._news.set()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pulse-heartbeat", daemon=True)
        try:
            thread.start()
        except RuntimeError as e:  # the system has no more threads, or Python is ending; the next event tries again
            if not self._refused:
                logger.warning("The heartbeat of %s has no thread to be written on: %s", self._facts["worker"], e)
            self._refused += 1
            return
        self._thread = thread
        close_at_exit(self)

    def _run(self) -> None:
        if self._facts["version"] is None and self._facts["error"] is None:
            self._news.wait(SOONEST_S)  # most first syncs are over by then, and are one record less
        while True:
            self._news.clear()  # what came until now is in this record
            record = replace(self.record, time_s=time.time())
            self._write(record)
            if record.ended:
                return
            refused = 0 if self._is_away else min(self._refused, 10)  # a worker must not look silent after an outage
            wait_s = min(EVERY_S * 2**refused, LONGEST_S)
            if self._refused:
                self._end.wait(wait_s)
            elif self._news.wait(wait_s):
                self._end.wait(SOONEST_S)

    def _write(self, record: Heartbeat) -> None:
        try:
            # Nothing is left where there is no run: the location may be wrong, or the run was just removed.
            self._store.get(keys.HEAD, 0, 1)
            self._look_for_rival(record.worker)
            record = replace(record, rival=self._rival)
            self._store.put(keys.heartbeat_key(record.worker), record.build())
        except NotFoundError:
            return
        except Exception as e:  # noqa: BLE001 - a heartbeat is a hint; whatever a store raises, the worker goes on
            # A server keeps the name of a worker that was killed for a minute: the first conflict may be with that.
            if self._refused == isinstance(e, ConflictError) and not record.ended:
                text = (
                    "The heartbeat of %s cannot be written, so pulse status will not show this worker; syncs go on: %s"
                )
                logger.warning(text, record.worker, e)
            self._refused += 1
            self._is_away = bool(getattr(e, "retryable", False))
        else:
            self._refused, self._wrote = 0, record

    def _look_for_rival(self, worker: str) -> None:
        """Notice another process that has overwritten the last record: only one of the two is shown."""
        if self._wrote is None:
            return
        try:
            found = parse(self._store.get(keys.heartbeat_key(worker), 0, MAX_BYTES + 1), worker)
        except (NotFoundError, FormatError):
            return
        # An older record of this process may arrive late.
        is_mine = (found.host, found.pid) == (self._wrote.host, self._wrote.pid) and found.time_s <= self._wrote.time_s
        rival = None if is_mine or found.ended else f"process {found.pid} on host {found.host}"[:_TEXT_CHARACTERS]
        if rival and not self._rival:
            text = (
                "Another worker, %s, writes the heartbeat of %s too, so that pulse status shows only one of the two: "
                "give each a name of its own. Syncs go on."
            )
            logger.warning(text, rival, worker)
        self._rival = rival


class Closing(Protocol):
    """What writes a last record when it is closed, in the background."""

    def close(self) -> None: ...

    def join(self, timeout_s: float) -> None: ...


_writers: "weakref.WeakSet[Closing]" = weakref.WeakSet()


def close_at_exit(writer: Closing) -> None:
    """Let a last record be written when the interpreter ends, if that does not take long."""
    _writers.add(writer)


def _finish() -> None:
    until, writers = time.monotonic() + EXIT_S, list(_writers)
    for writer in writers:
        writer.close()
    for writer in writers:
        writer.join(max(0.0, until - time.monotonic()))


atexit.register(_finish)
