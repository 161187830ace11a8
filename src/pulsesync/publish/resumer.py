"""Rebuild the last version of a run with all ranks of a team, so that the next one is a patch to it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pulsesync.errors import (
    ChainError,
    FormatError,
    NotFoundError,
    SignatureError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.baseline import Baseline, RankBase
from pulsesync.publish.ownership import RankReport, VersionTables
from pulsesync.publish.records import RunRecords
from pulsesync.publish.resume import same_tensors
from pulsesync.publish.team import CoordinatorMessage, TeamRounds
from pulsesync.run.follower import RunFollower
from pulsesync.state.sharding import Shards, TileShare, Windows, owner_of, share_of
from pulsesync.state.weights import WeightState


@dataclass(frozen=True)
class TeamPlan:
    """What a team needs to begin: the layout, the tiles of each rank, and the last version of the run."""

    layout: Layout
    everyones: Sequence[Windows]
    record: bytes  # of last, as stored
    last: Manifest | None


class RunResumer:
    """Rebuilds the last version on all ranks, each its own tiles, and checks on rank 0 that they are that version.

    Args:
        records: Of the run.
        rounds: The messages of the team.
        anchors: Those of this rank; one may still be in its outbox.
        baseline: Keeps what is rebuilt.
    """

    def __init__(self, records: RunRecords, rounds: TeamRounds, anchors: AnchorCoordinator, baseline: Baseline) -> None:
        self._records, self._rounds, self._anchors, self._baseline = records, rounds, anchors, baseline
        self.tables = VersionTables()  # on rank 0: of the version that was rebuilt

    def resume(self, plan: TeamPlan, last: Manifest, shards: Shards) -> tuple[RankBase, bool] | None:
        """Rebuild the last version, each rank its own tiles; return it, and whether an anchor of it is due.

        Returns None on all ranks if it cannot be rebuilt.
        """
        writer = self._anchors.writer

        def rebuild() -> tuple[tuple[TileShare, WeightState] | None, RankReport]:
            layout = self._records.reader().layout(last.layout)
            same_tensors(layout, plan.layout.tensors, plan.layout.ties)
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
        tensors = self._baseline.rebuild(share, shards)
        if tensors is None:
            return None
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
        return self._baseline.adopt(share, follower.state)

    def _check_rebuilt(
        self, plan: TeamPlan, last: Manifest, layout: Layout, reports: Sequence[RankReport]
    ) -> CoordinatorMessage:
        """Decide whether the tiles that all ranks have rebuilt are, together, the last version."""
        tables = VersionTables().after(reports)
        start = last.at_start  # at the start of an epoch no history is needed
        if tables.digest(layout) != last.digest or (not start and tables.history(last.index) != last.history):
            return CoordinatorMessage()
        self.tables = tables
        self._anchors.measure(last)
        return CoordinatorMessage(plan.record, anchor=self._anchors.is_due(last, layout))
