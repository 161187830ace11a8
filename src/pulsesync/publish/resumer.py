"""Resume a run: find its last version, and rebuild it with all ranks of a team, so that the next is a patch to it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pulsesync.core.types import TensorSpec
from pulsesync.errors import (
    ChainError,
    FormatError,
    NotFoundError,
    SignatureError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.publish.agreement import TeamAgreement
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.baseline import RankBase
from pulsesync.publish.checkpoint import check_continues
from pulsesync.publish.committed import CommittedVersion
from pulsesync.publish.companions import put_companions
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.ownership import RankReport, VersionTables, agreed
from pulsesync.publish.pending import PendingVersion
from pulsesync.publish.records import RunRecords, WriterOptions
from pulsesync.publish.team import CoordinatorMessage, TeamRounds
from pulsesync.run import keys
from pulsesync.run.follower import RunFollower
from pulsesync.run.reader import location_of
from pulsesync.state.sharding import Shards, TileShare, Windows, layout_of, owner_of, share_of, windows_from, windows_to
from pulsesync.state.weights import WeightState
from pulsesync.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeamPlan:
    """What a team needs to begin: the layout, the tiles of each rank, and the last version of the run."""

    layout: Layout
    everyones: Sequence[Windows]
    record: bytes  # of last, as stored
    last: Manifest | None


@dataclass(eq=False, repr=False)
class RunResumer:
    """Looks for a run at the location, and rebuilds its last version if the weights of the trainer continue it.

    Each rank rebuilds its own tiles; the coordinator checks that they are that version.
    """

    _committed: CommittedVersion
    _agreement: TeamAgreement
    _records: RunRecords
    _rounds: TeamRounds
    _queue: SendQueue
    _anchors: AnchorCoordinator
    _options: WriterOptions
    _lease: PublisherLease
    _was_refused: bool = False  # on the coordinator: whether weights were refused that do not continue the run

    def find(self, version: PendingVersion, last_call: int) -> RankBase | TeamPlan:
        """Agree on a layout, and look for a run. Return the base of a run that can be resumed, or a plan for a root."""
        shards = version.shards
        assert shards is not None

        def windows() -> tuple[tuple[Windows, Mapping[str, str]], bytes]:
            self._agreement.fix(version, last_call)
            return (shards.windows, shards.ties), b"" if self._rounds.is_alone else windows_to(shards)

        mine, sent = self._rounds.run_on_all(windows)
        everyones, ties = agreed([mine] if self._rounds.is_alone else [windows_from(message) for message in sent])
        if not any(everyones):
            raise StateError(
                "there is no tensor to publish: pass a model, its state_dict(), or a mapping of names to tensors that "
                "is not empty"
            )
        pieces = layout_of(everyones, ties, self._options.grid, self._options.min_tile)
        layout = layouts.bundle(pieces, owner_of(pieces, everyones))
        message = self._rounds.run_on_coordinator(self._find_last)
        last = self._records.parse(message.record) if message.record else None
        plan = TeamPlan(layout, everyones, message.record, last)
        if last is None or (found := self._resume(plan, last, shards)) is None:
            return plan
        base, due = found
        self._compare_resumed(base, version)
        with self._queue.lock:
            self._committed.start(base)
        self._anchors.begin_or_retry(base, due)
        return base

    def _find_last(self) -> CoordinatorMessage:
        self._lease.wait(self._queue.closed.is_set)
        reader = self._records.reader()
        last = reader.newest()
        if last is not None and self._records.signing_key is None and last.signed_by:
            raise SignatureError(
                "this run is signed; pass signing_key= to resume it, with the key that signed it, or publish to "
                "another location. Nothing was published",
                key=keys.manifest_key(last.version),
            )
        if self._options.continues:
            check_continues(self._options.continues, reader, last)
        return CoordinatorMessage(self._records.sign(last), newest=last.anchor) if last else CoordinatorMessage()

    def _resume(self, plan: TeamPlan, last: Manifest, shards: Shards) -> tuple[RankBase, bool] | None:
        """Rebuild the last version; return it, and whether an anchor is due; None on all ranks if it cannot be."""
        writer = self._anchors.writer

        def rebuild() -> tuple[tuple[TileShare, WeightState] | None, RankReport]:
            layout = self._records.reader().layout(last.layout)
            _check_same_tensors(layout, plan.layout.tensors, plan.layout.ties)
            try:
                owners = owner_of(layout, plan.everyones)
            except StateError:
                return None, RankReport(failed=True)  # a tile of the run lies in several shards of this team
            writer.newest = last.anchor
            writer.finish(last.run)
            share = share_of(layout, owners, self._rounds.team.rank, shards)
            state = self._rebuild(last, share, shards)
            if state is None and writer.busy:
                try:
                    writer.wait()  # the path may begin at an anchor that is still in the outbox
                except (StoreError, FormatError):
                    pass  # logged where the anchor is written
                else:
                    with suppress(StoreError):
                        state = self._rebuild(last, share, shards)
            return ((share, state), RankReport.of(state, share)) if state else (None, RankReport(failed=True))

        found, reports = self._rounds.report(rebuild)
        if found is None or any(report.failed for report in reports):
            return None
        message = self._rounds.run_on_coordinator(lambda: self._check_rebuilt(plan, last, found[0].layout, reports))
        if not message.record:
            return None
        return RankBase(last, plan.record, *found), message.anchor

    def _rebuild(self, last: Manifest, share: TileShare, shards: Shards) -> WeightState | None:
        """Return this rank's tiles of the last version; None if no path leads to it."""
        baseline = self._committed.baseline
        assert baseline is not None
        tensors = baseline.rebuild(share, shards)
        records = self._records
        trust = {records.signing_key.public} if records.signing_key else None
        follower = RunFollower(records.store, trust, slices=share.slices, epoch_patches=records.epoch_patches)
        try:
            follower.sync(tensors, version=last.version)
        except SignatureError:
            raise
        except (ChainError, NotFoundError, FormatError, VerificationError):
            return None
        if follower.state is None or follower.version != last.version:
            return None
        return baseline.adopt(share, follower.state)

    def _check_rebuilt(
        self, plan: TeamPlan, last: Manifest, layout: Layout, reports: Sequence[RankReport]
    ) -> CoordinatorMessage:
        """Decide whether the tiles that all ranks have rebuilt are, together, the last version."""
        tables = VersionTables().after(reports)
        start = last.at_start  # at the start of an epoch no history is needed
        if tables.digest(layout) != last.digest or (not start and tables.history(last.index) != last.history):
            return CoordinatorMessage()
        self._committed.tables = tables
        self._anchors.measure(last)
        return CoordinatorMessage(plan.record, anchor=self._anchors.is_due(last, layout))

    def _compare_resumed(self, base: RankBase, version: PendingVersion) -> None:
        """Compare the first version with the last one of the run. Raises: StateError, if it does not continue it."""

        def compare() -> tuple[None, RankReport]:
            assert version.shards is not None
            with self._queue.lock:
                self._committed.compare(version, version.shards, self._agreement.codec, resumed=base)
            assert version.difference is not None
            return None, RankReport(changed=version.difference.changed)

        def check() -> CoordinatorMessage:
            changed, total = sum(report.changed for report in reports), base.state.layout.size
            if 2 * changed > total and not self._is_declared:
                if self.may_be_grafted(base.last, version.step):
                    self._was_refused = True
                    raise _grafted(self._records.store, base.last, version.step, changed, total)
                text = (
                    "%s of %s weights differ from version %d, the last one of the run at %s. If they are of another "
                    "model or training, publish them to another location."
                )
                place = location_of(self._records.store)
                logger.warning(text, f"{changed:,}", f"{total:,}", base.last.version, place)
            self._lease.hold()  # not before: a publisher that is refused must not keep the right one waiting
            self._committed.files = put_companions(self._records.store, self._options.files, version.source, base.last)
            return CoordinatorMessage()

        _, reports = self._rounds.report(compare)
        self._rounds.run_on_coordinator(check)

    def may_be_grafted(self, last: Manifest, step: int) -> bool:
        """Return whether nothing says that the first version of this publisher continues a run."""
        return not self._is_declared and (step <= last.step or self._was_refused)

    @property
    def _is_declared(self) -> bool:
        """Whether the trainer has said that its weights belong to the run."""
        return self._options.resume or bool(self._options.continues) or self._committed.last is not None


def _check_same_tensors(layout: Layout, specs: Iterable[TensorSpec], ties: Mapping[str, str]) -> None:
    """Raises: StateError, if these are not the tensors of a run."""
    before: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors} | dict(layout.ties)
    now: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in specs} | dict(ties)
    if before != now:
        names = sorted({name for name, _ in before.items() ^ now.items()})
        raise StateError(
            f"the tensors of a run must not change, but {names[0]!r} was added, removed, cast, reshaped or tied; "
            "publish to a new location",
            tensor=names[0],
        )


def _grafted(store: Store, last: Manifest, step: int, changed: int, total: int) -> StateError:
    """Return the error for weights that do not continue a run: those of another model or training."""
    if step > last.step:
        why = f"weights were refused by this publisher before, whose step was not above its step {last.step}"
    else:
        why = f"their step {step} is not above its step {last.step}"
    unset = "" if step else "If no step was passed, pass that of the training to a new Publisher: step=. "
    return StateError(
        f"these weights do not continue the run at {location_of(store)}: {changed:,} of {total:,} differ from its "
        f"version {last.version}, and {why}. Nothing was published. To continue a training, load its checkpoint: the "
        "model's weights, and those of publisher.state_dict() with load_state_dict() of a new Publisher. "
        f"{unset}For a training that begins anew, give a new location. To publish these weights to the workers of this "
        "run nevertheless, pass resume=True (pulse publish: --resume)"
    )
