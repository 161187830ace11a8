"""The run writer: encodes a compared version and commits it to the store, together with the other ranks of a team.

Every publisher has one, and a single process is a team of one. A version takes three rounds of messages: the status of
every rank (`TeamAgreement`), what each has encoded and uploaded (`_encode`), and the record that the coordinator has
created (`_create`). Only the thread that sends uses the team. If a rank fails, the version fails on all, and no base
advances.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from pulsesync.errors import AnotherPublisherError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.publish.agreement import TeamAgreement
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.baseline import RankBase
from pulsesync.publish.cadence import Cadence, SentVersion
from pulsesync.publish.commit import create, next_record, root_record
from pulsesync.publish.committed import CommitSettler, CommittedVersion, Draft
from pulsesync.publish.companions import put_companions
from pulsesync.publish.costs import PatchCosts
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.ownership import RankReport, VersionTables
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.records import RunRecords, WriterOptions
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.resumer import RunResumer, TeamPlan
from pulsesync.publish.team import CoordinatorMessage, TeamRounds
from pulsesync.run import keys
from pulsesync.run.bodies import inline_share, put_body
from pulsesync.state.sharding import TileShare, owner_of, share_of
from pulsesync.state.weights import WeightState

logger = logging.getLogger(__name__)


class RunWriter:
    """Writes the versions of one run: roots, and patches to the last version. One thread at a time may call `write`."""

    def __init__(
        self,
        records: RunRecords,
        rounds: TeamRounds,
        queue: SendQueue,
        cadence: Cadence,
        anchors: AnchorWriter,
        costs: PatchCosts,
        options: WriterOptions,
        events: PublishEvents,
        lease: PublisherLease,
    ) -> None:
        self._records, self._store, self._queue, self._options = records, records.store, queue, options
        self._cadence, self._costs, self._lease = cadence, costs, lease
        self.rounds = rounds
        self.committed = committed = CommittedVersion()
        self.anchors = AnchorCoordinator(
            anchors, rounds, queue.lock, options.anchor_every, lambda: records.reader().look, self._put
        )
        self.settler = CommitSettler(committed, records, rounds, queue, self.anchors, events)
        self.agreement = TeamAgreement(committed, self.settler, rounds, queue, cadence, self.anchors, costs, lease)
        self._resumer = RunResumer(committed, self.agreement, records, rounds, queue, self.anchors, options, lease)
        self._warns_of_fp32 = options.warns_of_fp32  # on the coordinator

    def write(self, version: PendingVersion) -> PublishReport:
        """Commit the current version with all ranks, and advance the base. Raises: PulseError, if a rank failed."""
        clock = _Clock()
        self.rounds.begin()
        last_call = self.agreement.agree_on_call(version)
        if (base := self.committed.base) is not None:
            return self._write_patch(base, lambda: self.agreement.fix(version, last_call), clock)
        found = self._resumer.find(version, last_call)
        self._queue.resumed()
        if isinstance(found, RankBase):
            return self._write_patch(found, lambda: version, clock)
        return self._write_root(found, version, clock)

    # Roots

    def _write_root(self, plan: TeamPlan, version: PendingVersion, clock: "_Clock") -> PublishReport:
        """Publish a state that has no base. Its anchor is written in the background."""
        baseline, shards = self.committed.baseline, version.shards
        assert baseline is not None
        assert shards is not None

        def copy() -> tuple[tuple[TileShare, WeightState], RankReport]:
            share = share_of(plan.layout, owner_of(plan.layout, plan.everyones), self.rounds.team.rank, shards)
            state = baseline.copy(share, shards)
            clock.encoded()
            return (share, state), RankReport.of(state, share)

        found, reports = self.rounds.report(copy)
        message = self.rounds.run_on_coordinator(lambda: self._create_root(plan, reports, version))
        last = self._records.parse(message.record)
        with self._queue.lock:
            base = RankBase(last, message.record, *found)
            self.committed.start(base)
        self._queue.sent()
        self.anchors.begin_or_retry(base, begins=True)
        version.is_root = True
        return clock.report(version, plan.layout, last, plan.layout.size, message.written)

    def _create_root(
        self, plan: TeamPlan, reports: Sequence[RankReport], version: PendingVersion
    ) -> CoordinatorMessage:
        self._lease.hold()
        self.committed.files = put_companions(self._store, self._options.files, version.source, plan.last)
        tables, newest = VersionTables().after(reports), self.anchors.writer.newest
        digest, every = tables.digest(plan.layout), self._records.epoch_patches
        record = root_record(plan.last, version.step, plan.layout.id, digest, newest, self.committed.files, every)
        data = self._records.sign(record)
        self._store.put(keys.layout_key(plan.layout.id), plan.layout.data)
        with self._lease.creating():
            create(self._store, record, data, plan.last)
        if plan.last is not None and self._resumer.may_be_grafted(plan.last, version.step):
            text = (
                "Version %d (step %d) is published in full, and its weights were not compared with version %d (step "
                "%d), the last one of this run: no path leads to that version, or its tiles do not fit the shards. "
                "If they are of another model or training, publish to another location."
            )
            logger.warning(text, record.version, record.step, plan.last.version, plan.last.step)
        self.committed.tables = tables
        self.anchors.count(record)
        return CoordinatorMessage(data, newest=newest, written=len(plan.layout.data) + len(data))

    # Patches

    def _write_patch(self, base: RankBase, fix: Callable[[], PendingVersion], clock: "_Clock") -> PublishReport:
        """Encode and upload what changed, each rank in its own tiles; commit it as one version; advance the base."""

        def encode() -> tuple[PendingVersion, RankReport]:
            version = fix()
            return version, self._encode(base, version, clock)

        version, reports = self.rounds.report(encode)
        message = self.rounds.run_on_coordinator(lambda: self._create(base, reports, version, clock))
        draft = self.settler.draft
        assert draft is not None
        last = self._records.parse(message.record)
        self.settler.keep_body(draft)
        with self._queue.lock:
            base = self.settler.commit(draft, last, message.record, [self._queue.pending])
            self._cadence.sent(SentVersion(version.coalesced + 1, clock.seconds))
        self._queue.sent()
        self.anchors.note_recorded(message.newest)
        report = self._report_patch(clock, version, base, last, message.changed, message.written)
        self._warn_of_fp32(report, base.state.layout)
        self.anchors.begin_or_retry(base, message.anchor)
        return report

    def _warn_of_fp32(self, report: PublishReport, layout: Layout) -> None:
        """Warn once, on the coordinator, if it seems that FP32 masters are published because a cast was forgotten."""
        if not self._warns_of_fp32 or not self.rounds.coordinates or 2 * report.changed <= report.total:
            return
        if 2 * sum(spec.size for spec in layout.tensors if spec.dtype == "F32") <= report.total:
            return
        self._warns_of_fp32 = False
        text = (
            "%s of %s weights (%.4g %%) changed in version %s, which has %s bytes, because they are published as FP32. "
            "Pass cast='BF16' to Publisher (pulse publish: --cast BF16) if workers use BF16: of BF16 weights about "
            "1 %% change in a step of reinforcement learning. Pass cast={} to publish FP32 without this warning."
        )
        changed, total, size = (f"{number:,}" for number in (report.changed, report.total, report.payload_bytes))
        logger.warning(text, changed, total, 100 * report.density, report.version, size)

    def _report_patch(
        self, clock: "_Clock", version: PendingVersion, base: RankBase, record: Manifest, changed: int, written: int
    ) -> PublishReport:
        report = clock.report(version, base.state.layout, record, changed, written)
        choice = self.agreement.choice
        return replace(report, codec=choice.codec, reason=choice.reason, anchor=self.anchors.writer.choice)

    def _encode(self, base: RankBase, version: PendingVersion, clock: "_Clock") -> RankReport:
        """Encode what changed in this rank's tiles, and upload it, unless nothing has changed."""
        assert version.difference is not None
        began = time.perf_counter()
        part, transition = version.difference.encode(base.last, self.agreement.codec)
        self._costs.coded(self.agreement.choice, transition.changed, len(part.data), time.perf_counter() - began)
        version.version = base.last.version + 1
        clock.encoded()
        ref = self._put(part) if part.sums else None
        self.settler.draft = Draft(version.version, part, transition, ref)
        remembered = transition.history.counts(part.sums)
        return RankReport((ref,) if ref else (), transition.changed, part.sums, remembered)

    def _create(
        self, base: RankBase, reports: Sequence[RankReport], version: PendingVersion, clock: "_Clock"
    ) -> CoordinatorMessage:
        """Create a version from the parts of all ranks. If nothing has changed anywhere, it has one empty part."""
        parts = tuple(part for report in reports for part in report.parts)
        draft = self.settler.draft
        assert draft is not None
        if not parts:
            parts = (self._put(draft.encoded),)
            draft = replace(draft, part=parts[0])
        self.anchors.create_if_complete(base)
        _, index = base.last.next_patch
        tables = self.committed.tables.after(reports, forget=index == 1)
        state, newest = tables.digest(base.state.layout), self.anchors.writer.newest
        history, lowest = tables.history(index), version.lowest_step
        record = next_record(base.last, version.step, parts, state, history, newest, self.committed.files, lowest)
        data = self._records.sign(record)
        changed, written = sum(report.changed for report in reports), record.object_bytes + len(data)
        report = self._report_patch(clock, version, base, record, changed, written)
        self.settler.draft = replace(draft, record=data, tables=tables, report=report)
        self.anchors.count(record)
        try:
            with self._lease.creating():
                create(self._store, record, data, base.last)
        except AnotherPublisherError:
            self.settler.draft = None
            raise
        due = self.anchors.is_due(record, base.state.layout)
        return CoordinatorMessage(data, due, newest, changed, written)

    def _put(self, part: EncodedPart) -> PartRef:
        began = time.perf_counter()
        ref = put_body(self._store, part, inline_share(self.rounds.team.size))
        if ref.data is None:
            self._costs.link.sent(ref.size, time.perf_counter() - began)
        return ref


class _Clock:
    """The times of one rank in one version."""

    def __init__(self) -> None:
        self._began = self._encoded = time.perf_counter()

    def encoded(self) -> None:
        self._encoded = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def report(
        self, version: PendingVersion, layout: Layout, record: Manifest, changed: int, written: int
    ) -> PublishReport:
        encode_s = self._encoded - self._began
        return PublishReport(
            record.version,
            record.step,
            changed,
            layout.size,
            written,
            layout.size_bytes,
            version.coalesced,
            version.blocked_s,
            encode_s,
            self.seconds - encode_s,
        )
