"""What happens in this process, as typed events, and the listeners that receive them.

    with pulse.listen(print):
        subscriber.sync(model)      # prints a Synced event

Publishers, subscribers, groups, LoCo trainers and servers call `emit`; metrics, heartbeats and progress bars listen. A
listener is any callable that takes an event. It runs on a thread of its own, so it cannot delay or break the library:
what it raises is logged, and events for which it is too slow are dropped, counted and logged. An object may hold a lock
while it emits: a listener that calls that object waits for the lock, and nothing waits for the listener. Events of one
process are delivered to each listener in the order in which they were emitted. A forked child has no such threads:
nothing is delivered there until it adds listeners of its own.

docs/metrics.md says what is emitted when, field by field.
"""

import atexit
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

from pulsesync.core.arguments import shown
from pulsesync.core.location import without_credentials
from pulsesync.core.threads import SignalSafeFlag

__all__ = [
    "AnchorPublished",
    "EngineUpdateFailed",
    "EngineUpdated",
    "Event",
    "GroupSyncFailed",
    "GroupSynced",
    "Listener",
    "Listening",
    "PublishFailed",
    "Recounted",
    "RequestServed",
    "RoundCompleted",
    "RoundFailed",
    "RunEvent",
    "SyncFailed",
    "Synced",
    "TransferProgress",
    "VersionPublished",
    "emit",
    "has_listeners",
    "listen",
]

QUEUED = 1024  # events that wait for a slow listener; later ones are dropped
LOOK_S = 0.02  # between two looks of a listener's thread whether there are events
REST_S = 1.0  # without events, after which it waits to be woken
EXIT_S = 2.0  # for all listeners together to receive what is queued when the interpreter ends

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened."""

    time_s: float = field(default_factory=time.time)  # seconds since 1970

    @classmethod
    def of(cls, report: object, **facts: Any) -> Self:
        """Return the event about a report: with those of its attributes that the event has, too, and these facts."""
        return cls(**{one.name: getattr(report, one.name) for one in fields(cls) if hasattr(report, one.name)} | facts)


@dataclass(frozen=True, kw_only=True)
class RunEvent(Event):
    """Something that happened in this process's use of a run."""

    location: str  # of the run, without credentials: its folder or address


@dataclass(frozen=True, kw_only=True)
class VersionPublished(RunEvent):
    """A version was committed to the store. Where several ranks publish together, rank 0 emits this."""

    version: int
    step: int
    changed: int  # weights
    total: int  # weights
    payload_bytes: int  # that the version added to the store, by all ranks; an anchor is not counted
    full_bytes: int  # of all weights
    coalesced: int  # publishes before this one that are in this version
    blocked_s: float  # how long the caller of publish waited
    encode_s: float
    store_s: float
    codec: str | None


@dataclass(frozen=True, kw_only=True)
class PublishFailed(RunEvent):
    """A publish failed. The next version contains its changes. Of a team, every rank emits its own error.

    If the store did not say whether the version was committed, and it turns out that it was, it is emitted as a
    VersionPublished, too.
    """

    step: int
    error: str  # its class and its message
    retryable: bool
    rank: int = 0  # of the team


@dataclass(frozen=True, kw_only=True)
class AnchorPublished(RunEvent):
    """A full checkpoint was committed to the store. Where several ranks publish together, rank 0 emits this."""

    version: int
    payload_bytes: int
    seconds: float  # since this process began to write it, versions that were sent meanwhile included


@dataclass(frozen=True, kw_only=True)
class Synced(RunEvent):
    """A sync completed: the weights are those of the version, and all that was fetched was checked.

    Of syncs that find nothing new, the first is emitted, and then one a second at most.
    """

    version: int
    step: int
    from_version: int | None
    newest: int | None  # version that was seen; with a pointer to follow, the one that it names; None: not known
    path: tuple[str, ...]  # as of a SyncReport; empty: there was nothing new
    changed: int  # weights
    fetched_bytes: int
    replanned: int
    fetch_s: float
    prepare_s: float
    pause_s: float  # writing: the only time in which the weights must not be used
    repaired: tuple[str, ...]
    went_back: bool = False  # whether the trainer went back to an earlier step, as of a SyncReport


@dataclass(frozen=True, kw_only=True)
class SyncFailed(RunEvent):
    """A sync raised an error."""

    version: int | None  # that the weights are at
    error: str  # its class and its message
    retryable: bool
    torn: bool  # whether the weights are between two versions and must not be used
    newest: int | None = None  # as of Synced


@dataclass(frozen=True, kw_only=True)
class Recounted(RunEvent):
    """The live weights were read anew and compared with the digest of their version."""

    version: int
    equal: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TransferProgress(RunEvent):
    """Part of a long transfer, such as a first sync, is done. The first of a transfer has 0 bytes, the last all.

    The bytes are those of the parts that the records name. A part counts when it is there and checked, whether it was
    fetched, found on disk, or fetched only as far as this worker needs it.
    """

    what: str  # for people: "anchor" or "patches"
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class EngineUpdated(RunEvent):
    """An inference engine was brought to a version, on all of its ranks."""

    version: int
    step: int
    from_version: int | None
    changed: int  # weights, on all ranks
    fetched_bytes: int  # by all ranks
    pause_s: float  # in which the engine did not generate
    seconds: float


@dataclass(frozen=True, kw_only=True)
class EngineUpdateFailed(RunEvent):
    """An inference engine could not be brought to a version."""

    error: str  # its class and its message
    retryable: bool
    torn: bool  # whether the engine has weights of no version and must not generate


@dataclass(frozen=True, kw_only=True)
class GroupSynced(Event):
    """A sync over a process group completed on this rank."""

    rank: int
    version: int
    method: str
    changed: int | None  # weights; None: all were sent, and none compared
    total: int  # weights
    full_bytes: int
    sent_bytes: int
    received_bytes: int
    seconds: float
    pause_s: float  # writing


@dataclass(frozen=True, kw_only=True)
class GroupSyncFailed(Event):
    """A sync over a process group raised an error on this rank; the weights are unchanged."""

    rank: int
    error: str  # its class and its message


@dataclass(frozen=True, kw_only=True)
class RoundCompleted(Event):
    """A LoCo round completed for this trainer."""

    fragment: int
    round: int
    took_part: bool  # False: the round was completed without this trainer's update
    members: int  # trainers whose updates the round contains
    sent: int  # entries
    total: int  # entries
    sent_bytes: int
    received_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RoundFailed(Event):
    """A LoCo round raised an error in this trainer."""

    fragment: int
    round: int  # that was not completed here
    error: str  # its class and its message


@dataclass(frozen=True, kw_only=True)
class RequestServed(RunEvent):
    """A server or relay answered a request."""

    method: str
    status: int
    cache: str  # "hit": a relay had all of what was asked for; "miss": it had not; "none": there is no cache for it
    store_failed: bool  # whether the store behind the server failed
    sent_bytes: int
    seconds: float


class Listener(Protocol):
    """Receives events, one at a time, on a thread of its own."""

    def __call__(self, event: Event, /) -> object: ...


class Listening:
    """A listener that receives events, until `close`.

    To wake a thread costs more than everything else here: about 10 µs, and then the thread that emits shares Python's
    interpreter lock with the listener. So the listener's thread looks for events every `LOOK_S` seconds, and is woken
    only if it found none for `REST_S` seconds, and by `flush` and `close`.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        # For the log. Not its repr, which may wait for a lock that the listener holds, raise, or print a model.
        self._name = str(getattr(listener, "__qualname__", type(listener).__qualname__))
        self._events: deque[Event | threading.Event] = deque()  # append and popleft are atomic: no lock
        self._woken = SignalSafeFlag()
        self._rests = False  # whether the thread waits without end
        self._closed = False
        self.dropped = 0  # events that came while too many were waiting
        self.failed = 0  # events for which the listener raised an error
        self._thread = threading.Thread(target=self._run, name="pulse-events", daemon=True)
        self._thread.start()

    def receive(self, event: Event) -> None:
        """Queue an event for the listener, or count it as dropped. It neither waits nor raises."""
        if len(self._events) < QUEUED:
            self._events.append(event)
            if self._rests:
                self._woken.set()
            return
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # at 1, 2, 4, 8, …: often enough to be seen, never a flood
            logger.warning("The event listener %s is too slow: dropped %d events so far.", self._name, self.dropped)

    def _run(self) -> None:
        rest_at = time.monotonic() + REST_S
        while self._events or not self._closed:
            if not self._events:
                self._rests = time.monotonic() >= rest_at
                if not self._events:  # none came before the emitting thread could see that this one rests
                    self._woken.wait(-1 if self._rests else LOOK_S)
                    self._woken.clear()
                self._rests = False
                continue
            self._deliver(self._events.popleft())
            rest_at = time.monotonic() + REST_S

    def _deliver(self, event: Event | threading.Event) -> None:
        if isinstance(event, threading.Event):  # of flush
            event.set()
            return
        try:
            self._listener(event)
        except BaseException:  # SystemExit too: it would end this thread, and not the process
            self.failed += 1
            if self.failed & (self.failed - 1) == 0:
                logger.exception("The event listener %s failed, %d times so far.", self._name, self.failed)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all events emitted so far were delivered. Returns False if that took longer than the time."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            return not self._events
        reached = threading.Event()
        self._events.append(reached)
        self._woken.set()
        return reached.wait(timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Deliver what is queued, if that takes no longer than the time, and receive nothing more."""
        global _listening
        with _lock:
            _listening = tuple(one for one in _listening if one is not self)
        self.flush(timeout_s)
        self._closed = True
        self._woken.set()

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_listening: tuple[Listening, ...] = ()  # replaced, never changed, so that emit needs no lock
_lock = threading.Lock()


def listen(listener: Listener) -> Listening:
    """Deliver every event of this process to a listener from now on, until the returned object is closed.

    Args:
        listener: Called with each event, on a thread of its own. While 1,024 events wait for it, later ones are
            dropped; `Listening.dropped` counts them.
    """
    global _listening
    if not callable(listener):
        raise TypeError(f"listener must be a function that is called with each event; got {shown(listener)}")
    added = Listening(listener)
    with _lock:
        _listening = (*_listening, added)
    return added


def emit(event: Event) -> None:
    """Deliver an event to all listeners. It neither waits nor raises."""
    for one in _listening:
        one.receive(event)


def has_listeners() -> bool:
    """Whether there is a listener. Without one, an event that is costly to make need not be made."""
    return bool(_listening)


def describe_error(error: BaseException) -> str:
    """What an event says of an error. It does not raise, whatever the error's own text does."""
    try:
        return without_credentials(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - an error of another library
        return type(error).__name__


def _close_all() -> None:
    until = time.monotonic() + EXIT_S
    for one in _listening:
        one.close(max(0.0, until - time.monotonic()))


def _forget_in_child() -> None:
    global _listening, _lock
    _listening, _lock = (), threading.Lock()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_in_child)
