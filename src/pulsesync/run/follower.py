"""Keep weights at versions of a run: what a `Subscriber` is inside. It does not wait, and emits nothing of its syncs.

    follower = RunFollower(store, trust)
    report = follower.sync(tensors, version=7)

A sync goes one way: find the goal, attach to the tensors, plan, fetch, check and decode, ask, commit, report. If a
record on the path is missing or bad, it is planned again without that record.
"""

import logging
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from pulsesync import device
from pulsesync.errors import (
    BaseMismatchError,
    ChainError,
    ChecksumError,
    FormatError,
    MissingBucketError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    RunChangedError,
    SignatureError,
    StoreError,
    VerificationError,
)
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.run import planner
from pulsesync.run.applier import NotConfirmed, PlanApplier
from pulsesync.run.goals import GoalFinder
from pulsesync.run.integrity import IntegrityMonitor
from pulsesync.run.local import LocalWeights
from pulsesync.run.planner import SyncPlan
from pulsesync.run.reader import CACHE_BYTES, RunReader, locate, location_of
from pulsesync.run.reporting import SyncEvents, SyncMeter, SyncReport
from pulsesync.state.claims import SupersededError, claim
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import RecordFailed
from pulsesync.state.slices import Slices
from pulsesync.state.views import mapping_of
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import CachedStore, Store

REPLANS = 3  # times that a sync searches another path when an object on the first is missing or bad

# Errors after which another path is searched.
_Replanned: TypeAlias = NotFoundError | FormatError | ChainError | VerificationError

_FINAL = (SignatureError, RunChangedError, NothingPublishedError)  # of those: another path does not help

logger = logging.getLogger(__name__)


class RunFollower:
    """Keeps weights at versions of a run. One thread at a time uses it.

    Its arguments are those of `Subscriber`, and: goals, which finds the version to go to (if not given, the newest);
    events, where recounts and long transfers are reported; epoch_patches, how many patches make an epoch of the run.
    """

    def __init__(
        self,
        store: Store,
        trust: Collection[str] | None,
        *,
        trust_pointers: Collection[str] = (),
        cache: Path | None = None,
        slices: Slices | None = None,
        undo: int = 0,
        widen: bool = False,
        goals: GoalFinder | None = None,
        confirm: Callable[[], None] | None = None,
        events: SyncEvents | None = None,
        epoch_patches: int = EPOCH_PATCHES,
    ) -> None:
        self.store: Store = CachedStore(store, cache, CACHE_BYTES) if cache is not None else store
        self.trust, self.slices, self.widen = trust, slices, widen
        self._trust_pointers, self._epoch_patches = trust_pointers, epoch_patches
        self.goals = goals or GoalFinder()
        self.events = events or SyncEvents(location_of(store))
        self.local = LocalWeights(undo)
        self.integrity = IntegrityMonitor(self.local, self.events)
        folder = cache / "anchors" if cache is not None else None
        self.applier = PlanApplier(self.store, store, folder, self.local, self.events, confirm)
        # Run, version and step of the last report; set from outside where several copies of the weights take turns.
        self.reported: tuple[str, int, int] | None = None

    @property
    def state(self) -> WeightState | None:
        return self.local.state

    @property
    def version(self) -> int | None:
        """The version of the weights; None before the first sync."""
        return self.local.version

    def records(self, avoid: Collection[str] = ()) -> RunReader:
        """Return a reader that knows nothing yet: records are as they are now."""
        return RunReader(self.store, self.trust, avoid, self._epoch_patches, self._trust_pointers)

    def sync(
        self, source: Any, version: int | None = None, *, verify: bool = False, follow_replaced: bool = False
    ) -> SyncReport:
        """Update tensors to the version to follow, or to a given one, in place. Args, Raises: as `Subscriber.sync`."""
        self.integrity.raise_damage()
        attempt = SyncAttempt(self, source, version, follow_replaced)
        state = self.local.state
        if state is not None and not state.is_attached_to(source):
            self.local.forget()  # these are other tensors than those that were synced
            self.integrity.to_repair = ()
        elif verify or (state is not None and state.superseded):
            with attempt.meter.timed("prepare"):
                attempt.recount()
        try:
            return attempt.run()
        except Exception as e:
            if not attempt.meter.torn:
                raise
            reason = e.reason if isinstance(e, PulseError) else str(e)
            raise VerificationError(
                f"loading an anchor failed halfway ({reason}): the weights are between two versions; do not "
                "use them until a sync succeeds",
                torn=True,
            ) from e

    def undo(self) -> SyncReport | None:
        """Undo the last sync; None: there is nothing to undo. Raises: VerificationError, as `Subscriber.roll_back`."""
        if not self.local.can_undo():
            return None
        if damage := self.integrity.recount():  # the undo log is for other weights
            if isinstance(damage, SupersededError):
                return None
            raise damage
        meter, before = SyncMeter(), self.local.version
        self.local.undo(meter)
        position = self.local.position
        assert position is not None
        self.reported = (position.run, position.version, position.step)
        return meter.report(position, from_version=before)

    def resume(self, source: Any, version: int, history: bytes | None) -> bool:
        """Continue with weights that an earlier process left at a version. Returns, Raises: as `Subscriber.resume`."""
        records = self.records()
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
        state.history = state.backend.load_history(known)
        self.local.attach(state, record)
        self.reported = (record.run, record.version, record.step)
        return True


class SyncAttempt:
    """One sync: if something on its path is missing or bad, it is planned again without it."""

    def __init__(self, follower: RunFollower, source: Any, version: int | None, follow_replaced: bool) -> None:
        self._follower, self._local, self._integrity = follower, follower.local, follower.integrity
        self._source, self._version, self._follow_replaced = source, version, follow_replaced
        self.meter = SyncMeter()
        self._recounted: WeightState | None = None  # the attached weights, just recounted: they are no known version
        self._avoid: set[str] = set()  # keys of records that failed
        self._refused: dict[str, FormatError] = {}  # of records whose bodies are bad: they were read twice
        self._failure: _Replanned | None = None  # of the first record that failed
        self._damage: VerificationError | None = None  # of local weights that something else had written to

    def run(self) -> SyncReport:
        """Sync. Raises: as `Subscriber.sync`."""
        for attempt in range(1 + REPLANS):
            records = self._follower.records(self._avoid)
            error, key = self._try(records)
            if error is None:
                return self._report(records)
            if not isinstance(error, _Replanned) or isinstance(error, _FINAL):
                try:
                    raise error
                finally:
                    del error  # it refers to this frame
            if not self._may_repeat(error, key, is_last=attempt == REPLANS):
                break
            self.meter.replanned = attempt + 1
            self.meter.fetched_bytes += records.fetched_bytes
        if self._failure is None:
            assert self._damage is not None
            raise self._damage
        raise self._with_repairs(self._failure) from self._damage

    def _try(self, records: RunReader) -> tuple[PulseError | None, str | None]:
        """Plan and apply; return the error, and the key of the record that it is about, if it is about one."""
        try:
            goal = self._find_goal(records)
            if goal is not None:
                self._bind(goal, records)
                self._follower.applier.apply(self._plan(goal, records), self.meter)
            return None, None
        except NotConfirmed as e:
            refusal = e.cause
        except RecordFailed as failed:
            traceback.clear_frames(failed.__traceback__)  # frees what it had read before the next attempt
            cause, key = failed.cause, records.key_of(failed.record)
            if isinstance(cause, FormatError | ChainError | StoreError | VerificationError):
                locate(cause, key, records.store)
            return cause, key
        except PulseError as e:
            return e, None
        raise refusal

    def _may_repeat(self, error: _Replanned, key: str | None, is_last: bool) -> bool:
        """Note what failed, so that the next attempt avoids it; return whether one may succeed.

        Decoding against weights that something else has written can fail in any way, as bad bytes too: before a record
        is blamed, the weights are counted.
        """
        traceback.clear_frames(error.__traceback__)  # frees what was read, as above
        if error is self._damage:
            return True
        if isinstance(error, SupersededError):
            self._damage = self.recount() or error
            return True
        may_be_ours = key and not isinstance(error, ChecksumError) and error not in self._refused.values()
        if may_be_ours and self.recount():
            return True
        self._failure = self._failure or error
        if (about := key or error.key or "") in self._avoid:
            return False  # there is no path that avoids it
        self._avoid.add(about)
        if isinstance(error, FormatError) and key:
            self._refused[about] = error
        if isinstance(error, BaseMismatchError):
            self._local.forget()  # the local weights are not the version that was assumed
        if not is_last:
            reason = error.args[0] if error.key == about else error.reason
            logger.warning("Planning the sync again, because %s failed: %s.", about or "it", reason)
        return True

    def recount(self) -> VerificationError | None:
        """Recount the local weights; if they are damaged, forget their version, and remember what was counted."""
        state = self._local.state
        damage = self._integrity.recount()
        if damage:
            self._damage, self._recounted = damage, state
        return damage

    def _with_repairs(self, failure: PulseError) -> PulseError:
        """Have an error say that local weights were damaged, too."""
        if names := self._integrity.to_repair:
            then = "do not use the weights until a sync succeeds"
            if self._local.position is not None:
                then = f"version {self._local.version} was loaded since then"
            advice = f"Something else has also written to {names[0]!r} of this worker: {then}"
            failure.advise(f"{failure.advice}. {advice}" if failure.advice else advice)
        return failure

    # The steps of an attempt

    def _find_goal(self, records: RunReader) -> Manifest | None:
        """Return the version to update to; None if it is the local one."""
        goals = self._follower.goals
        try:
            with self.meter.timed("fetch"):
                try:
                    return goals.find(records, self._local.position, self._version)
                except RunChangedError as e:
                    if not self._follow_replaced:
                        raise
                    goals.start_over(e)
                    self._local.forget()
                    return goals.find(records, None, self._version)
        except MissingBucketError as e:
            raise records.nothing_published(": the bucket does not exist") from e
        finally:
            self._follower.events.newest = goals.newest

    def _bind(self, goal: Manifest, records: RunReader) -> None:
        """Attach to the tensors, unless that was done for this layout; begin at a published version if they are one."""
        local, follower = self._local, self._follower
        if local.state is not None and local.state.layout.id == goal.layout:
            return
        with self.meter.timed("fetch"):
            layout = records.layout(goal.layout)
        state, self._recounted = self._recounted, None
        with self.meter.timed("prepare"):
            if state is None or state.layout.id != layout.id:
                state = attach(self._source, layout, follower.slices, follower.widen)
            local.attach(state)
            if claim(state):
                Recount(state).find_damaged()  # counts again: another Subscriber may have written since
            if state.whole and not state.differing_tie and (start := records.start(state.digest)):
                state.history = state.backend.load_history(History(start.index))
                local.attach(state, start)
                self.meter.path.append("start")

    def _plan(self, goal: Manifest, records: RunReader) -> SyncPlan:
        if depth := self._local.undo_depth(goal):
            if damage := self.recount():  # an undo log is for the weights of its version, and no others
                raise damage
            return SyncPlan(undo=depth)
        with self.meter.timed("fetch"):
            return SyncPlan.of(self._find_path(goal, records))

    def _find_path(self, goal: Manifest, records: RunReader) -> list[Manifest]:
        position = self._local.position
        if position and position.version > goal.version:
            position = None  # an older version is reached from an anchor
        if self._avoid:
            with suppress(ChainError):  # what was bad is avoided if there is another path
                return planner.find_path(position, goal, records.look)
        try:
            path = planner.find_path(position, goal, records.fetched)
        except MissingLinkError:
            if self._local.position is not None or goal.anchor is not None or self._avoid:
                raise
            raise records.no_anchor(goal) from None
        for record in path:
            if error := self._refused.get(records.key_of(record)):
                raise RecordFailed(record, error)  # before anything else on this path is fetched again
        return path

    def _report(self, records: RunReader) -> SyncReport:
        follower, position = self._follower, self._local.position
        assert position is not None
        version, step = position.version, position.step
        repaired, self._integrity.to_repair = self._integrity.to_repair, ()
        run, from_version, from_step = follower.reported or (None, None, None)
        if run != position.run:
            from_version = from_step = None
        self.meter.fetched_bytes += records.fetched_bytes
        rewound_at = records.rewound_at(version)
        report = self.meter.report(
            position,
            repaired=repaired,
            from_version=from_version,
            from_step=from_step,
            pointer=follower.goals.pointer if self._version is None else None,
            rewound_at=rewound_at,
        )
        follower.reported = (position.run, version, step)
        if report.went_back:
            text = "The trainer went back to an earlier step%s: version %d was step %d, and version %d is step %d."
            at = "" if rewound_at is None else f" at version {rewound_at}"
            logger.warning(text, at, from_version, from_step, version, step)
        return report


def attach(source: Any, layout: Layout, slices: Slices | None, widen: bool = False) -> WeightState:
    """Attach tensors where they are: in host memory, or on a GPU. Raises: StateError."""
    tensors = mapping_of(source)
    backend = HostBackend if device.find(tensors) is None else device.load("state").DeviceBackend
    return WeightState.attach(backend, tensors, layout, slices, widen)
