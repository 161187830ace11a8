"""The lease of a run: by it a publisher that is started by mistake stops, and not the one that trains.

The publisher of a run writes `publisher/lease` when it begins, and again every 15 s on a thread of its own. Another
publisher waits until that ends: because it was released, because the process is gone from this host, or because it was
not renewed for 60 s. If it is renewed meanwhile, the other publisher raises.

A publisher with take_over=True writes its lease before it reads the run, and waits until the other one has seen that,
creates no more versions and has answered, or until there is no answer: otherwise the other one could create the next
version first, or both could stop.

A lease is a hint. What keeps two publishers apart is that a version is created only if it is absent: a store that
refuses leases, a publisher of an earlier release that has none, and clocks of any error cost nothing but the hint.
"""

import hashlib
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from pulsesync.core.text import printable
from pulsesync.core.threads import SignalSafeFlag
from pulsesync.core.version import __version__
from pulsesync.errors import AnotherPublisherError, ClosedError, FormatError, NotFoundError, StoreError
from pulsesync.format.json_reader import load_json
from pulsesync.run.clock import store_time
from pulsesync.run.heartbeats import EXIT_S, close_at_exit
from pulsesync.run.keys import HEAD, LEASE, LEASES
from pulsesync.store import Store
from pulsesync.store.base import is_private

FORMAT = "pulse-lease/1"
MAX_BYTES = 1 << 11
LEASE_S = 60.0  # without a renewal, after which a lease has ended
RENEW_S = 15.0  # between two renewals: a lease outlives three that are lost
WATCH_S = 2.0  # between two looks at one's own lease: another publisher that takes the run over waits for that
ANSWER_S = 10.0  # without an answer, after which a publisher takes the run over from one that may be alive
LOOK_S = 0.5  # between two looks at a lease that is waited for
SAY_S = 15.0  # between two lines of the log that say so
MAX_TERM = (1 << 53) - 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    """What is stored: who has the lease. Everything is as that publisher wrote it, and nothing checks it."""

    token: str  # of the publisher
    process: str  # random, the same for all publishers of one process
    host: str
    pid: int
    started: int  # when the process was, in clock ticks since the boot; 0: not known
    place: str  # where `pid` and `started` can be compared, see `_place`; empty: nowhere
    package: str  # version of pulsesync
    term: int = 1  # one more than that of the lease before it: of two publishers, the later one has the run
    renewals: int = 0  # so that every renewal has other bytes
    ended: bool = False
    asks: bool = False  # the publisher before this one, to store the record again with False when it has stopped

    def build(self) -> bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()

    @property
    def is_ours(self) -> bool:
        """Whether it belongs to this process: a program may replace its own publisher at any time."""
        return self.process == _process()

    @property
    def is_over(self) -> bool:
        """Whether it was released, or belongs to a process of this host that has ended."""
        if self.ended:
            return True
        if not self.place or self.place != _place():
            return False
        try:
            os.kill(self.pid, 0)  # sends nothing
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass  # another user's
        now = _started(self.pid)
        return now is not None and now != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}"


def parse(data: bytes) -> LeaseRecord | None:
    """Read a stored lease; None if it is none. Fields that this version does not know are ignored."""
    try:
        table = load_json(data, "the lease", MAX_BYTES)
    except FormatError:
        return None
    if table.get("format") != FORMAT:
        return None
    found: dict[str, Any] = {one.name: table.get(one.name) for one in fields(LeaseRecord)}
    if any(type(value) is not LeaseRecord.__annotations__[name] for name, value in found.items()):
        return None
    if not (0 < found["pid"] < 1 << 31 and 0 < found["term"] <= MAX_TERM):
        return None
    return LeaseRecord(**found | {"host": printable(found["host"], 64)})


def _term_after(found: LeaseRecord) -> int:
    """The term of the next lease. No publisher reaches the highest one, so a lease that has it is no publisher's."""
    return found.term % MAX_TERM + 1


_processes: dict[int, str] = {}


def _process() -> str:
    """An id of this process, which a forked child does not share."""
    return _processes.setdefault(os.getpid(), secrets.token_hex(16))


def _place() -> str:
    """Where process ids and their starts mean the same as here: this host and boot, in these namespaces.

    Empty if that is not known. Two containers of one host have the same boot and process ids of their own.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""  # /proc is that of another namespace
        # The host's name, because copies of a virtual machine may have the same boot id.
        spaces = [socket.gethostname(), Path("/proc/sys/kernel/random/boot_id").read_text()]
        spaces.append(os.readlink("/proc/self/ns/pid"))
        with suppress(FileNotFoundError):  # Linux before 5.6
            spaces.append(os.readlink("/proc/self/ns/time"))
    except (OSError, ValueError):
        return ""
    return hashlib.sha256("\n".join(spaces).encode()).hexdigest()[:32]


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot; 0 if it has ended; None if that cannot be seen."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if fields[0] in b"ZX" else int(fields[19])  # a zombie: its parent has not looked at its end yet
    except (OSError, ValueError, IndexError):
        return None


class PublisherLease:
    """The lease of one publisher on the run of a store. No version waits for it, except the first of a publisher.

    A store that only this process can reach needs no lease, and gets none. With take_over, the end of another
    publisher's lease is not waited for: that publisher is made to stop.
    """

    def __init__(self, store: Store, take_over: bool = False) -> None:
        self._store, self._take_over = store, take_over
        self._record: LeaseRecord | None = None  # None: this publisher has no lease
        self._lost_to: LeaseRecord | None = None  # who took it over
        self._taken: LeaseRecord | None = None  # from a publisher that may be alive, until this one creates a version
        self._asks = False  # whether that publisher has yet to answer
        self._term = 1
        self._due_s = 0.0  # when the next renewal is
        self._is_creating = False
        self._end = SignalSafeFlag()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._is_refused = is_private(store)

    def wait(self, is_closed: Callable[[], bool]) -> None:
        """Before the run is read, wait until no other publisher has its lease. With take_over, take it before that.

        Signals reach the caller, and a publisher that is closed meanwhile ends the wait.

        Raises: AnotherPublisherError: another publisher has renewed its lease meanwhile, or takes the run over too: it
        is alive. ClosedError: this publisher was closed. StoreError: the store does not answer.
        """
        if self._record is None and not self._is_refused and (found := self._look()) is not None:
            self._term = _term_after(found)
            if not (found.is_over or found.is_ours):
                if not self._take_over:
                    self._wait_for_end(found, is_closed)
                    return
                text = "This publisher takes the run over from another one, %s, and waits %.0f s for it to stop."
                logger.warning(text, found, ANSWER_S)
                self._taken, self._asks = found, True
                self.hold()
        if self._record is not None and self._asks:
            self._wait_for_answer(self._record, is_closed)

    def _wait_for_end(self, found: LeaseRecord, is_closed: Callable[[], bool]) -> None:
        now_s, said_s = time.monotonic(), -SAY_S
        until_s = now_s + LEASE_S - self._age_s()
        while now_s < until_s:
            if now_s - said_s >= SAY_S:
                said_s = now_s
                text = (
                    "Another publisher, %s, has published to this run. Its lease ends in %.0f s unless it is renewed, "
                    "and this publisher waits for that; Publisher(take_over=True) does not wait."
                )
                logger.warning(text, found, until_s - now_s)
            newer = self._look_later(found, until_s, is_closed)
            if newer is None or newer.is_over:
                if newer is not None:
                    self._term = _term_after(newer)
                return
            if newer != found:
                raise AnotherPublisherError(
                    f"another publisher is writing to this run: {newer} has just renewed its lease. Nothing was "
                    "published, and that publisher goes on. To continue the run here instead, end that process first, "
                    "or pass take_over=True (pulse publish --take-over); or publish to another location",
                    key=LEASE,
                )
            now_s = time.monotonic()

    def _wait_for_answer(self, mine: LeaseRecord, is_closed: Callable[[], bool]) -> None:
        """Wait until the publisher before this one has stopped; or has not answered for so long that it has ended."""
        newest, until_s = mine, time.monotonic() + ANSWER_S
        while time.monotonic() < until_s:
            found = self._look_later(newest, until_s, is_closed)
            if found is None:
                continue  # `_renew` puts it again
            if found.token != mine.token:
                if found.term >= mine.term and not found.is_over:
                    raise AnotherPublisherError(
                        f"another publisher, {found}, was also started with take_over=True and has taken this run "
                        "over. Nothing was published here. Decide which of the two is to continue, and end the other",
                        key=LEASE,
                    )
            elif not found.asks:
                self._taken = None  # it creates no more versions
                break
            elif found != newest:  # it has seen this lease, and is creating a version
                newest, until_s = found, time.monotonic() + ANSWER_S
        self._asks = False

    def _look_later(self, found: LeaseRecord, until_s: float, is_closed: Callable[[], bool]) -> LeaseRecord | None:
        """Wait a moment, and return the lease that is stored then. Raises: ClosedError: this publisher was closed."""
        time.sleep(max(0.0, min(LOOK_S, until_s - time.monotonic())))
        if is_closed():
            raise ClosedError(
                f"this Publisher was closed while it waited for the lease of another one, {self._taken or found}; "
                "nothing was published"
            )
        return self._look(found)

    def hold(self) -> None:
        """Take the lease, and renew it in the background until `close`. A store that refuses is logged; no error."""
        if self._record is not None or self._is_refused:
            return
        pid = os.getpid()
        self._record = LeaseRecord(
            token=secrets.token_hex(16),
            process=_process(),
            host=printable(socket.gethostname(), 64),
            pid=pid,
            started=_started(pid) or 0,
            place=_place() if _started(pid) else "",
            package=__version__,
            term=self._term,
            asks=self._asks,
        )
        if not self._attempt(self._put):
            self._is_refused, self._record = True, None
            return
        self._thread = threading.Thread(target=self._run, name="pulse-lease", daemon=True)
        with suppress(RuntimeError):  # the system has no more threads: then the lease ends by time
            self._thread.start()
            close_at_exit(self)

    @contextmanager
    def creating(self) -> Iterator[None]:
        """Create a version within this: a publisher that takes the run over waits for its end. Raises: as `check`."""
        try:
            self._is_creating = True  # before the check: `_stop` looks in the other order
            self.check()
            yield
            self._taken = None
        finally:
            self._is_creating = False

    def check(self) -> None:
        """Raises: AnotherPublisherError, if another publisher has taken the lease over. The store is not asked."""
        if self._lost_to is not None:
            raise AnotherPublisherError(
                f"another publisher, {self._lost_to}, has taken this run over: it was started with take_over=True, or "
                f"this process was stopped for longer than {LEASE_S:.0f} s. These weights were not published. Decide "
                "which trainer's weights the workers should have, and end the other one; a new Publisher with "
                "take_over=True continues the run here",
                key=LEASE,
            )

    def close(self) -> None:
        """Release the lease, in the background. Any thread and any signal handler may call this."""
        if self._is_mine:
            self._is_closed = True
            self._end.set()

    def join(self, timeout_s: float = EXIT_S) -> None:
        """After `close`, wait until the lease was released, or the time has passed."""
        if self._is_mine and self._thread is not None and self._thread.ident is not None:
            self._thread.join(timeout_s)

    @property
    def _is_mine(self) -> bool:
        """Whether this process has the thread: one that was forked from it has not."""
        return self._record is not None and self._record.process == _process()

    def _look(self, found: LeaseRecord | None = None) -> LeaseRecord | None:
        """Return the stored lease; the one found before, if the store does not answer this time."""
        try:
            return parse(self._store.get(LEASE, 0, MAX_BYTES + 1))
        except NotFoundError:
            return None
        except StoreError as e:
            if e.retryable and found is not None:
                return found
            if e.retryable:
                raise
            self._refuse(e)
            return None

    def _age_s(self) -> float:
        """How long ago the lease was renewed, by the store's clock; 0 if the store does not show that."""
        with suppress(StoreError):
            for entry in self._store.list(LEASES):
                if entry.key == LEASE:
                    return max(0.0, store_time(self._store) - entry.modified_s)
        return 0.0

    def _run(self) -> None:
        while not self._end.wait(RENEW_S if self._is_refused else WATCH_S):
            self._attempt(self._renew)
            if self._lost_to is not None:
                return
        self._attempt(lambda: self._renew(ended=True))

    def _renew(self, ended: bool = False) -> None:
        """Look who has the lease, and renew it if that is due and nobody has taken it over."""
        assert self._record is not None
        mine, found = self._record, None
        try:
            found = parse(self._store.get(LEASE, 0, MAX_BYTES + 1))
        except NotFoundError:
            if ended or not self._has_run():
                return  # the run was removed: nothing is left where it was
        if found is None:
            pass
        elif found.token == mine.token:
            if not ended and (self._asks or time.monotonic() < self._due_s):
                return  # a renewal could be stored over an answer
        elif found.is_ours:
            return  # a later publisher of this process has it
        elif found.is_over or found.term < mine.term:
            if ended:
                return
            # The lower term is that of a process that was stopped in the middle of a renewal.
        else:
            # With the same term both began at once, and the first to create a version has the run.
            if found.term > mine.term:
                self._stop(found)
            return
        if ended and self._taken is not None:
            self._store.put(LEASE, self._taken.build())  # nothing came of taking it: its publisher may go on
            return
        self._record = replace(mine, renewals=mine.renewals + 1, ended=ended, asks=self._asks)
        self._put()

    def _stop(self, taken_by: LeaseRecord) -> None:
        """Create no more versions, because another publisher has taken the run over; answer it if it waits for that."""
        self._lost_to = taken_by
        if not self._is_closed:
            text = "Another publisher, %s, has taken this run over. The next publish here raises AnotherPublisherError."
            logger.error(text, taken_by)
        while self._is_creating:
            if taken_by.asks:  # the new record shows that this publisher is alive, and still creates a version
                taken_by = replace(taken_by, renewals=taken_by.renewals + 1)
                self._store.put(LEASE, taken_by.build())
            time.sleep(LOOK_S)
        if taken_by.asks:
            self._store.put(LEASE, replace(taken_by, asks=False).build())

    def _has_run(self) -> bool:
        try:
            self._store.get(HEAD, 0, 1)
        except NotFoundError:
            return False
        return True

    def _put(self) -> None:
        assert self._record is not None
        self._store.put(LEASE, self._record.build())
        self._due_s = time.monotonic() + RENEW_S

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do something with the store; return False if it refuses for good. An error is logged: a lease is a hint."""
        try:
            work()
        except Exception as e:  # noqa: BLE001 - whatever a store raises, publishing goes on
            if getattr(e, "retryable", False):
                logger.info("The lease of this publisher was not renewed: %s", e)
                return True
            self._refuse(e)
            return False
        return True

    def _refuse(self, error: Exception) -> None:
        if not self._is_refused and not self._is_closed:
            logger.warning(
                "The lease of this publisher cannot be read or written, so another one that is started by mistake is "
                "noticed only when both publish the same version; publishing goes on: %s",
                error,
            )
        self._is_refused = True
