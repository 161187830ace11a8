"""The worker's end: find the path to a version, fetch and check it, and update the weights in place.

    sub = Subscriber("s3://bucket/run", trust=public_key)
    report = sub.sync(model)                      # to the newest version, once
    for report in sub.watch(model): ...           # to each version as it is published

Everything is checked before a weight changes: first the records, then the bodies, then all that they decode to, for
several patches together. Only during the commit at the end must the weights not be used.
"""

import logging
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pulsesync import device
from pulsesync.core import arguments
from pulsesync.core.threads import SignalSafeFlag, finish
from pulsesync.errors import (
    BaseMismatchError,
    ChainError,
    ChecksumError,
    ClosedError,
    FormatError,
    MissingBucketError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    RunChangedError,
    SignatureError,
    StaleWeightsError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format.body import Body
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys, planner
from pulsesync.run.bodies import stream_bodies
from pulsesync.run.fetcher import AHEAD, AHEAD_BYTES, PatchFetcher
from pulsesync.run.heartbeats import HeartbeatWriter
from pulsesync.run.planner import Position
from pulsesync.run.pointers import FollowTarget
from pulsesync.run.reader import CACHE_BYTES, RunReader, locate, location_of
from pulsesync.run.reporting import SyncEvents, SyncReport, Transfer
from pulsesync.run.spool import AnchorSpool
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.backend import Transition
from pulsesync.state.claims import SupersededError, claim
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.slices import Slices
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import CachedStore, Location, Store, open_store

REPLANS = 3  # times that a sync searches another path when an object on the first is missing or bad
INTERVAL_S, MAX_INTERVAL_S = 0.1, 5.0  # the first and the longest pause between checks of a store with nothing new

logger = logging.getLogger(__name__)

_Group: TypeAlias = list[tuple[Manifest, list[Body]]]  # records with their parts
_Checking: TypeAlias = Callable[[Manifest], AbstractContextManager[None]]  # notes errors as being about this record


@dataclass
class _Progress:
    """What a sync has done so far, over all attempts."""

    path: list[str] = field(default_factory=list)
    changed: int = 0
    fetched_bytes: int = 0
    replanned: int = 0
    refused: dict[str, FormatError] = field(default_factory=dict)  # records whose bodies are bad, by key
    failed_record: str | None = None  # the key of the record at which this attempt failed, so that the next avoids it
    confirmed: bool = False  # whether the caller was asked if weights may be written
    torn: bool = False  # whether an anchor was written in part, and no complete one since
    damage: VerificationError | None = None  # of local weights that something else had written to, as last found
    recounted: WeightState | None = None  # the attached state, if it was just recounted and is no known version
    seconds: dict[str, float] = field(default_factory=lambda: {"fetch": 0.0, "prepare": 0.0, "apply": 0.0})
    inside_s: float = 0.0  # time that inner `timed` blocks have counted, inside the current one

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Add the time of a block to a sum; the time of a `timed` block inside it counts only there."""
        began, around, self.inside_s = time.perf_counter(), self.inside_s, 0.0
        try:
            yield
        finally:
            took_s = time.perf_counter() - began
            self.seconds[what] += took_s - self.inside_s
            self.inside_s = around + took_s

    def waited_for(self, anchor: Manifest, parts: Iterator[tuple[Body, int]], transfer: Transfer) -> Iterator[Body]:
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

    @contextmanager
    def applying(self, record: Manifest, records: RunReader) -> Iterator[None]:
        """Note that an error raised in this block is about this record."""
        try:
            yield
        except PulseError as e:
            self.failed_record = records.key_of(record)
            if isinstance(e, FormatError | ChainError | StoreError | VerificationError):
                locate(e, self.failed_record, records.store)
            raise


class Subscriber:
    """Keeps weights at the newest version of a run, or at the version that a pointer names.

    It is configured with the location and the keys to trust; the rest is read from the run's records.

    What a sync checks: everything that it fetches and writes, relative to the state after the last sync. It does not
    read weights that no patch changes. If another program writes to the weights (an engine's sleep mode, a user's
    edit), only a recount of all weights finds that: `sync(verify=True)`, `verify_every`, `verify` or `scrub`.

    Args:
        location: A path or URL of the run, or a store.
        token: Sent to the server of an http or https location, and to no other. If not given, the token that
            PULSE_SEND_TOKENS has for that server, if it has one.
        trust: Public keys (64 hexadecimal digits); records that none of them signed are refused. None: signatures are
            not checked.
        trust_pointers: Public keys that may sign moves of pointers, and nothing else; it needs `trust`, whose keys may
            sign moves, too.
        cache: A folder in which fetched bytes are kept, shared by the processes of a host; a restarted worker uses it.
        slices: Which part of each tensor is local, by name pattern.
        undo: How many syncs can be undone without fetching anything.
        verify_every: Recount the weights at every N-th sync, as `sync(verify=True)` does; 0: never.
        widen: Accept FP32 tensors for BF16 tensors of the run. Each BF16 value is written as the same FP32 number,
            which is exact. Tensors must be in host memory.
        follow: Name of a pointer of the run: a sync goes to the version that it names, which may be older than the
            local one. None: to the newest version.
        max_staleness: By how many versions the weights may differ from the version to follow; `check_fresh` raises if
            they differ by more. None: this is not checked.
        confirm: Called once in every sync that writes, after all checks that can be made before writing, and before
            the first weight is written. If it raises, the sync ends with the weights unchanged. Several workers that
            must update together vote here.
        executor: Fetches bodies; None: a pool of threads for each sync. It is not shut down by the subscriber.
        heartbeat: The name of this worker, such as "rollout-3": 1 to 64 letters, digits, '.', '_' or '-'. A small
            record at `heartbeats/<name>` in the run, or at the server that serves it, then shows `pulse status` where
            the worker is. It is written in the background, at least every 30 s, and syncs do not depend on it. None:
            no such record is written.
        epoch_patches: How many patches make an epoch of the run. The format fixes it; only tests and measurements pass
            another number, and then to all readers and writers of the run.
    """

    def __init__(
        self,
        location: Location,
        *,
        token: str | None = None,
        trust: str | Collection[str] | None = None,
        trust_pointers: str | Collection[str] | None = None,
        cache: str | Path | None = None,
        slices: Slices | None = None,
        undo: int = 1,
        verify_every: int = 0,
        widen: bool = False,
        follow: str | None = None,
        max_staleness: int | None = None,
        confirm: Callable[[], None] | None = None,
        executor: Executor | None = None,
        heartbeat: str | None = None,
        epoch_patches: int = EPOCH_PATCHES,
    ) -> None:
        undo = arguments.whole("undo", undo, what="a number of syncs")
        self.verify_every = arguments.whole("verify_every", verify_every, what="a number of syncs")
        arguments.mapping("slices", slices, "names of tensors to a Slice or None")
        arguments.function("confirm", confirm)
        self._cache = arguments.folder("cache", cache) if cache is not None else None
        store = open_store(location, token=token)
        self.store: Store = CachedStore(store, self._cache, CACHE_BYTES) if self._cache is not None else store
        self.trust = trusted(trust)
        self._movers = trusted_for_pointers(trust_pointers, trust)
        self.slices = slices
        self.widen = widen
        self._target = FollowTarget(follow, max_staleness)
        self._confirm = confirm
        self._epoch_patches = epoch_patches
        self._origin = store  # for anchors, which are kept in the spool and not in the cache as well
        self._state: WeightState | None = None
        self._position: Position | None = None
        self._step: int | None = None
        # Run, version and step of the last report; set from outside where several copies of the weights take turns.
        self.reported: tuple[str, int, int] | None = None
        self._undo: deque[tuple[Position, int, Transition]] = deque(maxlen=undo)
        self._executor = executor
        self._damage: str | None = None  # found by a scrub
        self._to_repair: tuple[str, ...] = ()  # tensors that a recount found damaged, until a sync has repaired them
        self._syncs = 0
        beats = None if heartbeat is None else HeartbeatWriter(store, heartbeat, follows=follow)
        self.events = SyncEvents(location_of(store), beats)
        if beats is not None:
            weakref.finalize(self, beats.close)
        self._process: int | None = None  # the process that syncs
        self._closed = SignalSafeFlag()
        self._busy = threading.Lock()  # while a sync runs
        self._busy_thread: int | None = None  # the thread that has the lock

    # Closing

    def close(self) -> None:
        """Release the weights and the undo logs, and end calls that wait for a version. The weights are not changed.

        The last heartbeat, if there are any, is written before this returns, unless that takes more than 2 s.

        Any thread and any signal handler may call this. A sync that is running is completed, and the weights are
        released when it is done. In a process that was forked from the one that syncs, this does nothing.
        """
        if self._is_forked:
            return
        self._closed.set()
        self._release()
        if self.events.heartbeat is not None:
            self.events.heartbeat.close()
            self.events.heartbeat.join()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Run one sync, unless this is closed; if it is closed meanwhile, release the weights afterwards."""
        self._check_open()  # before the lock, which may stay locked for ever in a forked process
        if self._busy_thread == threading.get_ident():
            raise StateError(
                "this thread is in the middle of a sync of this Subscriber: confirm, and a signal handler, must not "
                "sync, verify, resume or roll back; do that when sync has returned"
            )
        try:
            with self._busy:
                self._busy_thread = threading.get_ident()
                try:
                    self._check_open()
                    yield
                finally:
                    self._busy_thread = None
        finally:
            if self._closed.is_set():
                self._release()

    def _check_open(self) -> None:
        if self._is_forked:
            raise ClosedError(
                f"this Subscriber belongs to process {self._process}; this is process {os.getpid()}, which was forked "
                "from it, perhaps in the middle of a sync; create a new Subscriber in the child"
            )
        if self._closed.is_set():
            raise ClosedError("this Subscriber was closed; create a new one to sync again")
        self._process = os.getpid()

    @property
    def _is_forked(self) -> bool:
        return self._process not in (None, os.getpid())

    def _release(self) -> None:
        if self._busy.acquire(blocking=False):  # otherwise the sync that is running does it
            try:
                self._forget()
            finally:
                self._busy.release()

    # The local weights

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first sync."""
        return self._position.version if self._position else None

    @property
    def state(self) -> WeightState | None:
        return self._state

    @property
    def position(self) -> Position | None:
        return self._position

    # Syncing

    def sync(
        self,
        source: Any,
        version: int | None = None,
        *,
        wait_s: float = 0.0,
        verify: bool = False,
        follow_replaced: bool = False,
    ) -> SyncReport:
        """Update a module, state dict or mapping of arrays to the newest version, or to a given one, in place.

        Args:
            source: The tensors to write to.
            version: The version to update to; None: the newest, or the one that the pointer names.
            wait_s: How long to wait for the first version, if there is none yet or none any more. During that time, a
                store that does not answer is asked again.
            verify: Recount all the weights first. If something else has written to them, the tensors are named in a
                warning and in the report, and all weights are loaded again from an anchor.
            follow_replaced: If the location has another run than before, or the same run was restored from a backup,
                start over from an anchor of the current run. The version may then be lower than before.

        Raises:
            NothingPublishedError: there is no run at the location, or its first anchor is still being written; this is
                a NotFoundError. StateError: the tensors are not those of the run; SignatureError: no trusted key signed
                the run; RunReplacedError, RunForkedError, RunRolledBackError: the run at the location is not the one
                that was followed; MissingLinkError: no published path leads to the version; ClosedError: this was
                closed; FormatError, ChainError, StoreError, VerificationError.
                After an error the weights are those of the version before the call, or of the last version that was
                completely committed, and the same call can be repeated. The exception is a VerificationError with
                `torn=True`: loading an anchor failed halfway, and the weights are between two versions. Do not use them
                until a sync succeeds.
        """
        version = arguments.optional_whole("version", version, what="the number of a version")
        wait_s = arguments.seconds("wait_s", wait_s)
        try:
            self._syncs += 1
            verify = verify or bool(self.verify_every and self._syncs % self.verify_every == 0)
            report = self._sync_in_time(source, version, wait_s, verify, follow_replaced)
        except ClosedError:
            raise
        except Exception as e:
            self.events.failed(e, self.version)
            raise
        self.events.synced(report)
        return report

    def _sync_in_time(
        self, source: Any, version: int | None, wait_s: float, verify: bool, follow_replaced: bool
    ) -> SyncReport:
        """Sync, and while there is no version, or the store does not answer, try again for some time."""
        until, waiting = time.monotonic() + wait_s, False
        for pause_s in _pauses(INTERVAL_S, MAX_INTERVAL_S):
            try:
                with self._working():  # not while it waits: `verify` need not wait as long
                    return self._sync(source, version, verify, follow_replaced)
            except StoreError as e:
                awaited = isinstance(e, NothingPublishedError) or (e.retryable and self._position is None)
                left_s = until - time.monotonic()
                if not awaited or left_s <= 0:
                    raise
                if not waiting:
                    logger.info("Waiting up to %.0f s for a version at %s.", wait_s, self.events.location)
                waiting = True
            self._closed.wait(min(pause_s, left_s))
            self._check_open()
        raise AssertionError  # the pauses have no end

    def watch(
        self,
        source: Any,
        *,
        wait_s: float = 0.0,
        interval_s: float = INTERVAL_S,
        max_interval_s: float = MAX_INTERVAL_S,
        verify: bool = False,
        follow_replaced: bool = False,
    ) -> Iterator[SyncReport]:
        """Update the tensors to each version as it is published; yield a report each time that weights were written.

        It ends when the caller leaves the loop, or when any thread calls `close`. A temporary error of the store is
        logged as a warning, and the store is asked again.

        Args:
            source: The tensors to write to.
            wait_s: How long to wait for the first version, as for `sync`; `math.inf`: for ever.
            interval_s: The pause after a check of the store that found nothing new. It doubles after each such check.
            max_interval_s: The longest pause.
            verify: As for `sync`, at every check.
            follow_replaced: As for `sync`. While the run is being replaced, the location has no version for a time;
                this is logged once and waited for, if there was a version before.

        Raises:
            PulseError: as `sync` does, except for errors of the store that are `retryable`.
        """
        self._check_open()
        interval_s = arguments.seconds("interval_s", interval_s)
        max_interval_s = arguments.seconds("max_interval_s", max_interval_s)
        pauses = _pauses(interval_s, max_interval_s)
        followed, waiting = self._position is not None, False
        while not self._closed.is_set():
            try:
                report = self.sync(source, wait_s=wait_s, verify=verify, follow_replaced=follow_replaced)
            except ClosedError:
                return
            except NothingPublishedError as e:
                if not (follow_replaced and followed):
                    raise
                if not waiting:
                    logger.warning("Waiting for another run: %s.", e)
                waiting = True
            except SupersededError as e:
                logger.warning("%s; trying again.", e)
            except StoreError as e:
                if not e.retryable:
                    raise
                logger.warning("The store did not answer; trying again: %s.", e)
                try:
                    self._target.check_staleness(self.version)
                except StaleWeightsError as stale:
                    logger.error("The weights are stale and cannot be updated at the moment: %s.", stale)
            else:
                followed, waiting = True, False
                if report.path:
                    yield report
                    pauses = _pauses(interval_s, max_interval_s)
                    continue
            self._closed.wait(next(pauses))

    def check_fresh(self) -> int:
        """Return by how many versions the weights differ from the version to follow, and raise if these are too many.

        Call this before the weights are used, from any thread, also while another one syncs or watches. It reads three
        small objects. If the store does not answer, that is raised too, because weights of unknown age are not fresh.

        Raises:
            StaleWeightsError: by more than `max_staleness`, or nothing was synced yet; StoreError: the store does not
            answer; RunChangedError, FormatError, ChainError: as `sync`. ValueError: there is no `max_staleness`.
        """
        if self._target.max_staleness is None:
            raise ValueError("check_fresh needs a limit: pass max_staleness= to the Subscriber")
        self._check_open()
        self._goal(None, self._records())
        return self._target.check_staleness(self.version)

    def _sync(self, source: Any, version: int | None, verify: bool, follow_replaced: bool) -> SyncReport:
        """Run one sync, from a recount of the weights, if one is due, to its report."""
        self._check_scrub()
        progress = _Progress()
        if self._state is not None and not self._state.is_attached_to(source):
            self._forget()  # these are other tensors than those that were synced
            self._to_repair = ()
        elif verify or (self._state is not None and self._state.superseded):
            with progress.timed("prepare"):
                self._find_repairs(progress)
        try:
            return self._plan_and_apply(source, version, follow_replaced, progress)
        except Exception as e:
            if not progress.torn:
                raise
            raise VerificationError(
                f"loading an anchor failed halfway ({_reason(e)}): the weights are between two versions; do not "
                "use them until a sync succeeds",
                torn=True,
            ) from e

    def _records(self, avoid: Collection[str] = ()) -> RunReader:
        return RunReader(self.store, self.trust, avoid, self._epoch_patches, self._movers)

    def _plan_and_apply(
        self, source: Any, version: int | None, follow_replaced: bool, progress: _Progress
    ) -> SyncReport:
        """Plan, fetch and apply; if something on the path is missing or bad, plan again."""
        avoid: set[str] = set()
        failure: PulseError | None = None  # of the first record that failed
        ours: VerificationError | None = None  # about the local weights
        for attempt in range(1 + REPLANS):
            records = self._records(avoid)
            try:
                with progress.timed("fetch"):
                    goal = self._find_goal(version, records, follow_replaced)
                if goal is not None:
                    self._apply_goal(goal, source, records, progress)
                return self._report(progress, records, version)
            except (SignatureError, RunChangedError, NothingPublishedError):
                raise
            except (NotFoundError, FormatError, ChainError, VerificationError) as e:
                traceback.clear_frames(e.__traceback__)  # frees what it had read before the next attempt
                failed_record, progress.failed_record = progress.failed_record, None
                # Decoding against weights that something else has written can fail in any way, as bad bytes too: before
                # a record is blamed, the weights are counted.
                may_be_ours = failed_record and not isinstance(e, ChecksumError) and e not in progress.refused.values()
                if e is progress.damage or isinstance(e, SupersededError):  # then no record is to blame
                    ours = self._find_repairs(progress) or e
                elif may_be_ours and (damage := self._find_repairs(progress)):
                    ours = damage
                else:
                    failure = failure or e
                    if (about := failed_record or e.key or "") in avoid:
                        break  # there is no path that avoids it
                    avoid.add(about)
                    if isinstance(e, FormatError) and failed_record:
                        progress.refused[about] = e  # its bodies were read twice
                    if isinstance(e, BaseMismatchError):
                        self._forget()  # the local weights are not the version that was assumed
                    if attempt < REPLANS:
                        reason = e.args[0] if e.key == about else e.reason
                        logger.warning("Planning the sync again, because %s failed: %s.", about or "it", reason)
            progress.replanned = attempt + 1
            progress.fetched_bytes += records.fetched_bytes
        if failure is None:
            assert ours is not None
            raise ours
        if self._to_repair:
            then = "do not use the weights until a sync succeeds"
            if self._position is not None:
                then = f"version {self.version} was loaded since then"
            advice = f"Something else has also written to {self._to_repair[0]!r} of this worker: {then}"
            failure.advise(f"{failure.advice}. {advice}" if failure.advice else advice)
        raise failure from ours

    def _find_repairs(self, progress: _Progress) -> VerificationError | None:
        """Recount the local weights; if something else wrote to some, forget their version, and return the error."""
        state = self._state
        if state is None or self._position is None:
            return None
        began, version = time.perf_counter(), self._position.version
        was_superseded = state.superseded
        claim(state)  # before the count: from here on no other Subscriber writes
        damaged = Recount(state).find_damaged()
        self.events.recounted(version, not damaged, began)
        if not damaged:
            return None
        logger.warning(
            "%s has written to %d of the tensors of version %d, first %r. All weights are loaded again from an anchor.",
            "Another Subscriber of this process" if was_superseded else "Something other than a sync",
            len(damaged),
            version,
            damaged[0],
        )
        self._forget()
        self._to_repair, progress.recounted = tuple(sorted({*self._to_repair, *damaged})), state
        self._damage = None  # a scrub may have found the same
        kind = SupersededError if was_superseded else VerificationError
        message = written_by_another(version, damaged[0], was_superseded)
        progress.damage = kind(message, version=version, tensor=damaged[0])
        return progress.damage

    def _report(self, progress: _Progress, records: RunReader, asked: int | None) -> SyncReport:
        assert self._position is not None
        assert self._step is not None
        repaired, self._to_repair = self._to_repair, ()
        run, from_version, from_step = self.reported or (None, None, None)
        if run != self._position.run:
            from_version = from_step = None
        report = SyncReport(
            version=self._position.version,
            step=self._step,
            path=tuple(progress.path),
            changed=progress.changed,
            fetched_bytes=progress.fetched_bytes + records.fetched_bytes,
            replanned=progress.replanned,
            fetch_s=progress.seconds["fetch"],
            prepare_s=progress.seconds["prepare"],
            apply_s=progress.seconds["apply"],
            digest=self._position.digest,
            repaired=repaired,
            from_version=from_version,
            from_step=from_step,
            pointer=self._target.name if asked is None else None,
            rewound_at=records.rewound_at(self._position.version),
        )
        self.reported = (self._position.run, report.version, report.step)
        if report.went_back:
            logger.warning(
                "The trainer went back to an earlier step%s: version %d was step %d, and version %d is step %d.",
                "" if report.rewound_at is None else f" at version {report.rewound_at}",
                from_version,
                from_step,
                report.version,
                report.step,
            )
        return report

    def _apply_goal(self, goal: Manifest, source: Any, records: RunReader, progress: _Progress) -> None:
        if self._state is None or self._state.layout.id != goal.layout:
            with progress.timed("fetch"):
                layout = records.layout(goal.layout)
            state, progress.recounted = progress.recounted, None
            with progress.timed("prepare"):
                if state is None or state.layout.id != layout.id:
                    state = attach(source, layout, self.slices, self.widen)
                self._attach(state, records, progress)
        if (depth := self._undo_depth(goal)) is not None:
            if damage := self._find_repairs(progress):  # an undo log is for the weights of its version, and no others
                raise damage
            self._go_back(depth, progress)
            return
        with progress.timed("fetch"):
            path = self._find_path(goal, records, progress)
        self._apply_path(path, records, progress)

    def _find_goal(self, version: int | None, records: RunReader, follow_replaced: bool) -> Manifest | None:
        """Return the version to update to, None if it is the local one; check that the run is still the same."""
        try:
            try:
                return self._goal(version, records)
            except RunChangedError as e:
                if not follow_replaced:
                    raise
                logger.warning("Starting over from an anchor: %s.", e)
                self._forget()
                self._target.forget()
                self.events.newest = None
                return self._goal(version, records)
        except MissingBucketError as e:
            raise records.nothing_published(": the bucket does not exist") from e

    def _goal(self, version: int | None, records: RunReader) -> Manifest | None:
        local = self._position
        if local:
            records.check_run(local.run, local.version, local.digest)
        here = local.version if local else None
        if version is None:
            goal = self._target.find(records, here)
        else:
            goal = records.required_version(version, local is not None)
        if goal is None:
            if local is None:
                raise records.nothing_published()
            self.events.newest = max(local.version, self.events.newest or 0)
            return None
        if local and goal.run != local.run:
            raise ChainError(  # a bad read, or the run was replaced after the check: the next attempt shows which
                f"version {goal.version} belongs to run {goal.run}, but the local version belongs to run {local.run}; "
                "sync again to check which run is there",
                key=keys.manifest_key(goal.version),
                expected=local.run,
                actual=goal.run,
            )
        follows = version is None and self._target.name is not None
        self.events.newest = goal.version if follows else max(goal.version, self.events.newest or 0)
        return goal if not local or goal.version != local.version else None

    def _attach(self, state: WeightState, records: RunReader, progress: _Progress) -> None:
        """Attach a state; if its weights are those of a published version, the sync starts from that version."""
        self._forget()
        self._state = state
        if claim(state):
            Recount(state).find_damaged()  # counts again: another Subscriber may have written since
        if state.whole and not state.differing_tie and (start := records.start(state.digest)):
            state.history = state.backend.load_history(History(start.index))
            self._move_to(start)
            progress.path.append("start")

    def _find_path(self, goal: Manifest, records: RunReader, progress: _Progress) -> list[Manifest]:
        position = self._position
        if position and position.version > goal.version:
            position = None  # an older version is reached from an anchor
        if records.avoid:
            with suppress(ChainError):  # what was bad is avoided if there is another path
                return planner.find_path(position, goal, records.look)
        try:
            path = planner.find_path(position, goal, records.fetched)
        except MissingLinkError:
            if self._position is not None or goal.anchor is not None or records.avoid:
                raise
            raise records.no_anchor(goal) from None
        for record in path:
            if error := progress.refused.get(key := records.key_of(record)):
                progress.failed_record = key
                raise error  # before anything else on this path is fetched again
        return path

    def _apply_path(self, path: Sequence[Manifest], records: RunReader, progress: _Progress) -> None:
        """Apply records in order: first an anchor, if there is one, then all patches, in as few commits as possible."""
        assert self._state is not None

        def checking(record: Manifest) -> AbstractContextManager[None]:
            return progress.applying(record, records)

        anchor = path[0] if path and path[0].kind == RecordKind.ANCHOR else None
        path = path[1:] if anchor else path
        with closing(self._fetched(path, progress, checking)) as coming:
            # `confirm` is called when everything has been fetched, and checked as far as possible.
            groups: Iterable[_Group] = list(coming) if self._confirm is not None else coming
            if anchor:
                with checking(anchor):
                    self._load(anchor, progress)
            if self._state.backend.overlays:
                self._apply(path, groups, progress, checking, goes_on=False)
                return
            for n, group in enumerate(groups):  # all groups are undone together
                self._apply([record for record, _ in group], [group], progress, checking, goes_on=n > 0)

    def _apply(
        self,
        path: Sequence[Manifest],
        groups: Iterable[_Group],
        progress: _Progress,
        checking: _Checking,
        goes_on: bool,
    ) -> None:
        """Apply patches to the weights, in one commit."""
        if not path:
            return
        assert self._state is not None
        with progress.timed("prepare"):
            transition = PatchTransaction(self._state).prepare_all(groups, checking=checking)
        self._commit(transition, path[-1], progress, goes_on=goes_on)
        progress.path += ("squash" if record.kind == RecordKind.SQUASH else "patch" for record in path)

    def _fetched(
        self, path: Sequence[Manifest], progress: _Progress, checking: _Checking
    ) -> Generator[_Group, None, None]:
        """Yield records with their bodies, in groups that are decoded together."""
        total_bytes = sum(record.size_bytes for record in path)
        is_long = len(path) > AHEAD or total_bytes > AHEAD_BYTES
        transfer = self.events.transfer("patches", total_bytes if is_long else None)
        assert self._state is not None
        fetcher = PatchFetcher(self.store, self._state, self._executor)
        with closing(fetcher.groups(path)) as groups:
            for group in groups:
                versions = []
                for record, fetching in group:
                    with checking(record), progress.timed("fetch"):
                        got = [future.result() for future in fetching]
                    progress.fetched_bytes += sum(size for _, size in got)
                    transfer.add(record.size_bytes)
                    versions.append((record, [body for body, _ in got]))
                yield versions

    def _ask(self, progress: _Progress) -> None:
        """Ask the caller, once in a sync, whether weights may be written now."""
        if self._confirm is not None and not progress.confirmed:
            progress.confirmed = True
            self._confirm()

    def _commit(self, transition: Transition, record: Manifest, progress: _Progress, goes_on: bool) -> None:
        """Write a transition to the weights; goes_on: it is undone together with the one before."""
        assert self._state is not None
        self._ask(progress)
        before, kept = (self._position, self._step), list(self._undo)
        self._undo.clear()  # if this is interrupted, no undo log may be applied to weights that it does not fit
        with progress.timed("apply"):
            try:
                back = self._state.commit(transition)
            finally:  # the position must be that of the weights, also after an error
                if self._state.history is transition.history:
                    self._move_to(record)
                else:
                    self._undo.extend(kept)
        progress.changed += transition.changed
        if goes_on and kept:
            position, step, earlier = kept.pop()
            kept.append((position, step, self._state.join(back, earlier)))
        elif before[0] is not None:
            kept.append((before[0], before[1] or 0, back))
        self._undo.extend(kept)

    def _load(self, anchor: Manifest, progress: _Progress) -> None:
        """Load an anchor.

        The weights do not change until the entire anchor has been fetched and checked; what differs from them is
        staged, and then written without interruption. Each part is fetched, hashed and decoded once.
        """
        assert self._state is not None
        state = self._state
        folder = self._cache / "anchors" if self._cache is not None else None
        with ExitStack() as stack:
            spool = stack.enter_context(closing(AnchorSpool(folder))) if folder is not None else None
            if spool is not None and state.whole:
                parts = spool.fetch(anchor, self._origin, state.layout)
            else:
                wanted = None if state.whole else state.places.keys()
                parts = stream_bodies(self._origin, anchor.parts, state.layout, wanted)
            transfer = self.events.transfer("anchor", anchor.size_bytes)
            with progress.timed("prepare"):
                staged = stack.enter_context(StagedBlocks(folder))
                sums = AnchorLoader(state).check_whole(anchor, progress.waited_for(anchor, parts, transfer), staged)
            self._ask(progress)
            with progress.timed("apply"):
                self._forget()
                try:
                    finish(lambda: AnchorLoader(state).load_whole(staged, sums))
                finally:
                    progress.torn = state.torn
            self._state = state
            self._move_to(anchor)
            progress.changed += sum(len(flat) for flat in state.flats.values())
            if spool is not None:
                spool.keep_only(anchor)
        progress.path.append("anchor")

    def _undo_depth(self, goal: Manifest) -> int | None:
        """Return how many syncs to undo to be at a version; None if none of the kept undo logs began there."""
        began = (position for position, _, _ in reversed(self._undo))
        return next((n for n, position in enumerate(began, 1) if position == Position.of(goal)), None)

    def _go_back(self, depth: int, progress: _Progress) -> None:
        """Undo syncs, in one commit."""
        assert self._state is not None
        self._ask(progress)
        taken = [self._undo[-1 - n] for n in range(depth)]
        with progress.timed("apply"):
            for position, step, back in taken:
                self._undo.pop()
                try:
                    self._state.commit(back)
                finally:
                    if self._state.history is back.history:
                        self._position, self._step = position, step
        progress.changed += sum(back.changed for _, _, back in taken)
        progress.path.append("undo")

    def roll_back(self) -> int | None:
        """Undo the last sync that wrote, from memory, without the store. Return the version, None without an undo log.

        Raises:
            VerificationError: something else has written to the weights, so that nothing was undone; or the undo
            failed, and the weights are as they were before the call.
        """
        undone = self.undo_last()
        return undone.version if undone else None

    def undo_last(self) -> SyncReport | None:
        """The same, with a report; None: there is nothing to undo."""
        with self._working():
            if self._state is None or not self._undo:
                return None
            if damage := self._find_repairs(_Progress()):  # the undo log is for other weights
                if isinstance(damage, SupersededError):
                    return None
                raise damage
            before = self.version
            position, step, back = self._undo.pop()
            began = time.perf_counter()
            try:
                self._state.commit(back)
            finally:
                if self._state.history is back.history:
                    self._position, self._step = position, step
            pause_s = time.perf_counter() - began
            self.reported = (position.run, position.version, step)
        report = SyncReport(
            version=position.version,
            step=step,
            path=("undo",),
            changed=back.changed,
            apply_s=pause_s,
            digest=position.digest,
            from_version=before,
        )
        self.events.synced(report)
        return report

    def _move_to(self, record: Manifest) -> None:
        self._position, self._step = Position.of(record), record.step

    def _forget(self) -> None:
        self._state, self._position, self._step = None, None, None
        self._undo.clear()

    # Restarts and checks

    def resume(self, source: Any, version: int, history: bytes | None) -> bool:
        """Continue with weights that an earlier process left at a version, and with the history that it saved.

        Returns False, and is as before the first sync, if they are not bit for bit that version, or if it is gone.

        Raises:
            StateError: the tensors are not those of the run; StoreError, SignatureError.
        """
        version = arguments.whole("version", version, what="the number of a version")
        with self._working():
            return self._resume(source, version, history)

    def _resume(self, source: Any, version: int, history: bytes | None) -> bool:
        records = self._records()
        record = records.version(version)
        if record is None:
            return False
        state = attach(source, records.layout(record.layout), self.slices, self.widen)
        if claim(state):
            Recount(state).find_damaged()  # counts again: another Subscriber may have written since
        if not state.whole or state.differing_tie or state.digest != record.digest:
            return False
        known = History(record.index)
        if not record.at_start:  # at the start of an epoch no history is needed
            try:
                known = History.from_bytes(history) if history else known
            except FormatError:
                return False
            if known.index != record.index or (known.digest() if known.tiles else None) != record.history:
                return False
        self._forget()
        self._state, state.history = state, state.backend.load_history(known)
        self._move_to(record)
        self.reported = (record.run, record.version, record.step)
        return True

    def verify(self, source: Any | None = None) -> str:
        """Recount the digest of all live weights and return it; check that they are the local version, bit for bit.

        It waits for a sync that is running in another thread.

        Raises:
            StateError: `confirm`, or a handler that has interrupted a sync, calls it. VerificationError: something else
            wrote to them, or these are not the tensors that were synced.
        """
        with self._working():
            return self._verify(source)

    def _verify(self, source: Any | None) -> str:
        if self._state is None or self._position is None:
            raise VerificationError("there is nothing to verify, because nothing has been synced yet; call sync first")
        if source is not None and not self._state.is_attached_to(source):
            raise VerificationError("these are not the tensors that were synced; pass those that sync was called with")
        expected, before = self._state.digest, self._state.sums
        began, version = time.perf_counter(), self._position.version
        try:
            with self._state.lock:
                actual = Recount(self._state).digest()
        except VerificationError:
            self.events.recounted(version, False, began)
            self._forget()
            raise
        self.events.recounted(version, actual == expected, began)
        if actual != expected:
            tiles, now = self._state.layout.tiles, self._state.sums
            first = next(tiles[n].tensor.name for n in sorted(now) if now[n] != before[n])
            self._damage = written_by_another(version, first, self._state.superseded)
            self._check_scrub(expected, actual)
        return actual

    @contextmanager
    def scrub(self, every_s: float = 60.0) -> Iterator[None]:
        """Recount the live weights in the background, again and again; the next sync raises if they were damaged."""
        every_s = arguments.seconds("every_s", every_s)
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(every_s):
                state, version, began = self._state, self.version, time.perf_counter()
                if state is None or state.superseded:  # then the next sync counts
                    continue
                tile = Recount(state).find_damage()
                if state is not self._state or state.superseded:  # a sync has loaded other weights meanwhile
                    continue
                if version is not None:
                    self.events.recounted(version, tile is None, began)
                if tile is not None:
                    self._damage = written_by_another(version, tile.tensor.name)
                    logger.warning("A recount found that %s.", self._damage)

        thread = threading.Thread(target=work, name="pulse-scrub", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _check_scrub(self, expected: str | None = None, actual: str | None = None) -> None:
        """Report damage once, and forget the local version, so that the next sync starts from the actual weights."""
        if self._damage:
            damage, self._damage = self._damage, None
            self._forget()
            raise VerificationError(damage, expected=expected, actual=actual)


def attach(source: Any, layout: Layout, slices: Slices | None, widen: bool = False) -> WeightState:
    """Attach tensors where they are: in host memory, or on a GPU. Raises: StateError."""
    if device.find(source) is None:
        return WeightState.attach(HostBackend, source, layout, slices, widen)
    return WeightState.attach(device.load("state").DeviceBackend, source, layout, slices, widen)


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, PulseError) else str(error)


def written_by_another(version: int | None, tensor: str, by_subscriber: bool = False) -> str:
    """Return the message about weights that are not those of their version, and what to do."""
    if by_subscriber:
        return (
            f"another Subscriber of this process has written to {tensor!r}, so these weights are not version {version} "
            "any more; the next sync loads all of them again. Sync the tensors of a model with one Subscriber"
        )
    return (
        f"the weights in memory are not version {version}: something else has written to {tensor!r}. Stop using the "
        "weights, and doubt what they generated since they were last verified. sync(model, verify=True) loads them "
        "again; then find the code or program that writes to them"
    )


def _pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds to wait between attempts: twice as long each time, up to a limit."""
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)
