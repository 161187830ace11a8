"""What a sync did: the report for its caller, the log and the events."""

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pulsesync.core.events import Recounted, Synced, SyncFailed, TransferProgress, describe_error, emit, has_listeners
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest
from pulsesync.run.heartbeats import HeartbeatWriter
from pulsesync.run.planner import Position
from pulsesync.run.reader import location_of
from pulsesync.store import Store

PROGRESS_S = 0.25  # the shortest time between two events on the progress of a transfer
IDLE_S = 1.0  # the shortest time between two events on syncs that found nothing new, of which a loop can do thousands

logger = logging.getLogger(__name__)

_STEPS = {  # the steps of a path, in singular and plural
    "start": ("local checkpoint", "local checkpoints"),
    "anchor": ("anchor", "anchors"),
    "squash": ("squashed patch", "squashed patches"),
    "patch": ("patch", "patches"),
    "undo": ("undone sync", "undone syncs"),
}


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """What a sync did."""

    version: int  # the version of the weights now
    step: int  # the trainer's step of that version
    path: tuple[str, ...] = ()  # what was applied, in order: "start", "anchor", "squash", "patch", "undo"
    changed: int = 0  # weights written: by a patch those that differ, by an anchor all that this worker has
    fetched_bytes: int = 0
    replanned: int = 0  # times that something on the path was missing or bad, and another path was used
    fetch_s: float = 0.0  # waiting for the store
    prepare_s: float = 0.0  # checking and decoding
    apply_s: float = 0.0  # writing: the only time in which the weights must not be used
    digest: str
    repaired: tuple[str, ...] = ()  # tensors that something else had written to, as a recount found
    from_version: int | None = None  # the version of the report before this one; None: there was none of this run
    from_step: int | None = None  # the trainer's step of that version
    pointer: str | None = None  # the pointer that was followed; None: the newest version, or one that was requested
    rewound_at: int | None = None  # the newest version at which the trainer went back; None: it never did, or unknown

    @property
    def went_back(self) -> bool:
        """Whether the trainer went back to an earlier step since the version of the report before: it was restored.

        Runs that pulsesync 0.1.0 writes do not record it; there, the steps of both versions decide.
        """
        if self.from_version is None or self.from_step is None or self.version <= self.from_version:
            return False
        return self.step < self.from_step or (self.rewound_at is not None and self.rewound_at > self.from_version)

    @property
    def applied(self) -> int:
        """The number of records that were applied: patches, squashed patches and anchors."""
        return sum(kind in ("anchor", "squash", "patch") for kind in self.path)

    def __str__(self) -> str:
        at = f"version {self.version}, step {self.step}"
        if not self.path:
            return f"{at}: nothing new"
        counts = Counter(self.path)
        steps = " + ".join(f"{count} {_STEPS[kind][count > 1]}" for kind, count in counts.items())
        weights = "all" if "anchor" in self.path else f"{self.changed:,}"
        written = f"{weights} weights written in {1e3 * self.apply_s:.1f} ms"
        return f"{at}: {steps}, {self.fetched_bytes:,} bytes, {written}, digest {self.digest[:8]} verified"


@dataclass
class SyncMeter:
    """What a sync has done so far, over all attempts, and how long it took."""

    path: list[str] = field(default_factory=list)
    changed: int = 0
    fetched_bytes: int = 0
    replanned: int = 0
    confirmed: bool = False  # whether the caller was asked if weights may be written
    torn: bool = False  # whether an anchor was written in part, and no complete one since
    seconds: dict[str, float] = field(default_factory=lambda: {"fetch": 0.0, "prepare": 0.0, "apply": 0.0})
    _inside_s: float = 0.0  # time that inner `timed` blocks have counted, inside the current one

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of a block to a sum; the time of a `timed` block inside it counts only there."""
        began, around, self._inside_s = time.perf_counter(), self._inside_s, 0.0
        try:
            yield
        finally:
            took_s = time.perf_counter() - began
            self.seconds[what] += took_s - self._inside_s
            self._inside_s = around + took_s

    def waited_for(self, anchor: Manifest, parts: Iterator[tuple[Body, int]], transfer: "Transfer") -> Iterator[Body]:
        """Yield the parts of an anchor as they arrive, in order. Waiting for one counts as fetching."""
        sizes = [ref.size for ref in reversed(anchor.parts)]
        while True:
            with self.timed("fetch"):
                body, fetched = next(parts, (None, 0))
            if body is None:
                return
            self.fetched_bytes += fetched
            transfer.add(sizes.pop())
            yield body

    def report(self, position: Position, **facts: Any) -> SyncReport:
        return SyncReport(
            version=position.version,
            step=position.step,
            digest=position.digest,
            path=tuple(self.path),
            changed=self.changed,
            fetched_bytes=self.fetched_bytes,
            replanned=self.replanned,
            fetch_s=self.seconds["fetch"],
            prepare_s=self.seconds["prepare"],
            apply_s=self.seconds["apply"],
            **facts,
        )


@dataclass(eq=False, repr=False)
class SyncEvents:
    """The events of one subscriber."""

    location: str  # of the run, without credentials
    heartbeat: HeartbeatWriter | None = None  # shows where this subscriber is to people; None: nothing does
    newest: int | None = None  # version that was seen; with a pointer to follow, the one that it names
    _idle_at: float = -math.inf  # when a sync that finds nothing new is emitted again

    @classmethod
    def of(cls, store: Store, heartbeat: str | None, follow: str | None) -> "SyncEvents":
        """The events of a subscriber of a store, with heartbeats under this name, if one is given."""
        beats = None if heartbeat is None else HeartbeatWriter(store, heartbeat, follows=follow)
        return cls(location_of(store), beats)

    def close(self) -> None:
        """Write the last heartbeat, if there are any; wait for that for 2 s at most."""
        if self.heartbeat is not None:
            self.heartbeat.close()
            self.heartbeat.join()

    def synced(self, report: SyncReport) -> None:
        """Log and emit a sync that returned. One that found nothing new is not logged, and emitted once a second."""
        if report.path:
            logger.info("Synced from %s: %s.", self.location, report)
        if self.heartbeat is not None:
            pause_s = report.apply_s if report.path else None
            self.heartbeat.synced(report.version, report.step, self.newest, pause_s, report.fetched_bytes)
        if has_listeners() and (report.path or report.changed or time.monotonic() >= self._idle_at):
            self._idle_at = time.monotonic() + IDLE_S
            emit(Synced.of(report, location=self.location, newest=self.newest, pause_s=report.apply_s))

    def found_nothing(self, version: int, step: int, digest: str) -> None:
        """Emit a look that found the weights at the version to follow, where no subscriber is asked in that case."""
        self.synced(SyncReport(version=version, step=step, digest=digest))

    def failed(self, error: Exception, version: int | None, *, torn: bool | None = None) -> None:
        """Emit that a sync failed, with the version that the weights are at. It is not logged: the caller has it.

        torn: whether they are between two versions; None: as the error says.
        """
        torn = bool(getattr(error, "torn", False)) if torn is None else torn
        if self.heartbeat is not None:
            self.heartbeat.failed(error, version, torn=torn)
        if has_listeners():
            self._idle_at = -math.inf
            emit(
                SyncFailed(
                    location=self.location,
                    version=version,
                    newest=self.newest,
                    error=describe_error(error),
                    retryable=bool(getattr(error, "retryable", False)),
                    torn=torn,
                )
            )

    def recounted(self, version: int, equal: bool, began: float) -> None:
        """Log and emit a recount that began at a time of `perf_counter`. Damage is logged where it is known which."""
        seconds = time.perf_counter() - began
        if equal:
            logger.info("Recounted the weights of version %d in %.2f s: they are as published.", version, seconds)
        if self.heartbeat is not None:
            self.heartbeat.recounted(equal)
        if has_listeners():
            emit(Recounted(location=self.location, version=version, equal=equal, seconds=seconds))

    def transfer(self, what: str, total_bytes: int | None) -> "Transfer":
        """Begin to emit the progress of a transfer; None: it is too short to be shown."""
        if self.heartbeat is not None and total_bytes is not None:
            self.heartbeat.start(self.newest)
        return Transfer(self.location, what, total_bytes)


@dataclass(eq=False, repr=False)
class Transfer:
    """A transfer that may take long: emits how much of it is done, a few times a second."""

    _location: str  # of the run
    _what: str
    _total: int | None  # bytes by the records; None: it is too short to be shown
    _done: int = 0
    _emitted_s: float = 0.0

    def __post_init__(self) -> None:
        self.add(0)

    def add(self, size_bytes: int) -> None:
        """This many more bytes are there."""
        if self._total is None:
            return
        self._done += size_bytes
        now = time.monotonic()
        if has_listeners() and (now - self._emitted_s >= PROGRESS_S or self._done == self._total):
            self._emitted_s = now
            sizes = {"done_bytes": self._done, "total_bytes": self._total}
            emit(TransferProgress(location=self._location, what=self._what, **sizes))
