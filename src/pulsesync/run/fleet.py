"""A run and its fleet at a glance: the newest versions, the last anchor, the pointers, and where each worker is.

    status = read_fleet("s3://bucket/run")
    for worker in status.workers:
        print(worker.name, worker.version, worker.lag, worker.state)

Versions, anchors and pointers are read and checked as every reader does. Workers are as their heartbeats say, which
nothing checks: see run/heartbeats.py.
"""

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pulsesync.core.arguments import seconds, whole
from pulsesync.core.text import printable
from pulsesync.errors import PulseError, StoreError
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys
from pulsesync.run.clock import store_time
from pulsesync.run.heartbeats import FoundHeartbeat, Heartbeat, find_heartbeats
from pulsesync.run.pointers import read_pointers
from pulsesync.run.reader import RunReader, location_of
from pulsesync.store import Location, Store, open_store

MAX_LAG = 10
MAX_AGE_S = 120.0  # four heartbeats
VERSIONS = 8

WorkerState: TypeAlias = Literal["ok", "behind", "silent", "failing", "torn", "joining", "ended", "unreadable"]
WRONG: frozenset[WorkerState] = frozenset({"behind", "silent", "failing", "torn"})  # not what is no heartbeat at all


@dataclass(frozen=True)
class WorkerStatus:
    """A worker, as its heartbeat says."""

    name: str
    state: WorkerState
    lag: int | None  # versions between its own and the one that it follows; None: it has none, or that is not known
    seen_s: float  # seconds since its last heartbeat, by the store's clock
    heartbeat: Heartbeat | None  # None: it cannot be read
    problem: str | None  # what is wrong, for people; None: nothing

    @property
    def version(self) -> int | None:
        return self.heartbeat.version if self.heartbeat else None


@dataclass(frozen=True)
class VersionStatus:
    """A version or an anchor of the run."""

    version: int
    step: int
    size_bytes: int
    created_s: float  # by the clock of the process that wrote it


@dataclass(frozen=True)
class FleetStatus:
    """A run and its workers."""

    location: str
    run: str
    newest: VersionStatus
    age_s: float  # of the newest version
    versions: tuple[VersionStatus, ...]  # the newest first
    anchor: VersionStatus | None  # the last one; None: there is none yet, or none that can be found
    signed_by: str | None  # the key that signed the newest version, which is checked only if keys to trust were given
    pointers: dict[str, int]  # the version that each names
    workers: tuple[WorkerStatus, ...]
    unknown: str | None  # why not all workers are known; None: they are
    own_clock: str | None = None  # why ages are by this machine's clock; None: they are by the store's

    @property
    def is_well(self) -> bool:
        """Whether the workers are known, and none is behind, silent, failing or torn."""
        return self.unknown is None and not any(worker.state in WRONG for worker in self.workers)


def read_fleet(
    location: Location,
    *,
    trust: str | Collection[str] | None = None,
    trust_pointers: str | Collection[str] | None = None,
    max_lag: int = MAX_LAG,
    max_age_s: float = MAX_AGE_S,
) -> FleetStatus:
    """Read the newest versions of a run, its pointers, and the heartbeats of its workers.

    Args:
        location: A path or URL of the run, or a store.
        trust: As for a `Subscriber`.
        trust_pointers: As for a `Subscriber`.
        max_lag: A worker that is more versions away from the one that it follows is `behind`.
        max_age_s: A worker whose last heartbeat is older is `silent`.

    Raises:
        NothingPublishedError: there is no run, or no version in it yet; SignatureError, FormatError, ChainError: its
        newest version or a pointer cannot be read; StoreError. A heartbeat that cannot be read is no error.

    How long ago a worker was seen is by the store's clock: its server's, or that of `pruned/clock`, an empty object
    that this writes for that purpose. Of a store that cannot be written it is by this machine's clock.
    """
    max_lag, max_age_s = whole("max_lag", max_lag, what="a number of versions"), seconds("max_age_s", max_age_s)
    store = open_store(location)
    reader = RunReader(store, trusted(trust), trust_pointers=trusted_for_pointers(trust_pointers, trust))
    newest = reader.required_newest()
    found: list[FoundHeartbeat] = []
    pointers: dict[str, int] = {}
    unknown = None
    try:
        moves = read_pointers(store, trust=trust, trust_pointers=trust_pointers)
        pointers = {name: pointer.version for name, pointer in moves.items()}
        found = find_heartbeats(store)
    except StoreError as e:
        if e.retryable:
            raise
        unknown = str(e)  # a place that cannot list
    for one in found:
        if one.is_refused:
            unknown = f"the store does not show the heartbeat of {one.worker}: {one.fault}"
    now_s, own_clock = _now(store, found)
    return FleetStatus(
        location=location_of(store),
        run=newest.run,
        newest=_status(newest),
        age_s=max(0.0, time.time() - newest.created),
        versions=tuple(map(_status, _newest_versions(reader, newest))),
        anchor=_anchor(store, reader, newest),
        signed_by=newest.signed_by,
        pointers=pointers,
        workers=tuple(_worker(one, newest.version, pointers, now_s, max_lag, max_age_s) for one in found),
        unknown=unknown,
        own_clock=own_clock,
    )


def _newest_versions(reader: RunReader, newest: Manifest) -> Iterator[Manifest]:
    """Yield the newest version and those before it, the newest first, as far as they were not pruned."""
    record: Manifest | None = newest
    while record is not None and newest.version - record.version < VERSIONS:
        yield record
        record = reader.version(record.version - 1) if record.version else None


def _now(store: Store, found: list[FoundHeartbeat]) -> tuple[float, str | None]:
    """The time by which heartbeats are young or old, and why it is not the store's."""
    if not found:
        return 0.0, None
    try:
        return store_time(store), None
    except StoreError as e:
        return max(time.time(), *(one.written_s for one in found)), printable(str(e), 200)


def _status(record: Manifest) -> VersionStatus:
    return VersionStatus(record.version, record.step, record.size_bytes, float(record.created))


def _anchor(store: Store, reader: RunReader, newest: Manifest) -> VersionStatus | None:
    """The last anchor: by a listing, or, where there is none, the one that the newest version names."""
    epoch = newest.anchor
    with suppress(StoreError):
        found = (int(entry.key[-16:]) for entry in store.list("anchors/") if keys.is_record(entry.key))
        epoch = max(found, default=epoch)
    with suppress(PulseError):
        record = reader.look(keys.anchor_key(epoch)) if epoch is not None else None
        return _status(record) if record else None
    return None


def _worker(
    found: FoundHeartbeat, newest: int, pointers: dict[str, int], now_s: float, max_lag: int, max_age_s: float
) -> WorkerStatus:
    seen_s = max(0.0, now_s - found.written_s)
    record = found.heartbeat
    if record is None:
        return WorkerStatus(found.worker, "unreadable", None, seen_s, None, found.fault)
    goal = newest if record.follows is None else pointers.get(record.follows)
    lag = None if record.version is None or goal is None else abs(goal - record.version)
    state, problem = _judge(record, lag, seen_s, max_lag, max_age_s)
    return WorkerStatus(found.worker, state, lag, seen_s, record, problem)


def _judge(
    record: Heartbeat, lag: int | None, seen_s: float, max_lag: int, max_age_s: float
) -> tuple[WorkerState, str | None]:
    """The state that a heartbeat shows, and what is wrong with it. That a worker is silent comes before all else."""
    if record.ended:
        return "ended", None
    if seen_s > max_age_s:
        last = f"; its last error: {record.error}" if record.error else ""
        return "silent", f"no heartbeat for {seen_s:.0f} s{last}"
    if record.torn:
        return "torn", f"its weights are between two versions and must not be used: {record.error}"
    if record.error is not None:
        return "failing", record.error
    if record.recount_equal is False and (record.synced_s or 0.0) <= (record.recounted_s or 0.0):
        return "failing", "a recount found that something else has written to its weights"
    if record.rival is not None:
        return "failing", f"{record.rival} writes the same heartbeat, so one of the two is not shown: give each a name"
    if record.version is None:
        return "joining", None
    if lag is not None and lag > max_lag:
        return "behind", f"it is {lag} versions away from {record.follows or 'the newest'}"
    return "ok", None
