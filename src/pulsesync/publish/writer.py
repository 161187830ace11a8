"""The run writer: commits a compared version to the store, together with the other ranks of a team.

Every publisher has one, and a single process is a team of one. A version takes three rounds of messages: the status of
every rank (`_agree_on_call`), what each has encoded and uploaded (`_offer`), and the record that the coordinator has
created (`_create`). Only the thread that sends uses the team. If a rank fails, the version fails on all, and no base
advances.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pulsesync.errors import (
    AnotherPublisherError,
    GroupError,
    SignatureError,
    StateError,
)
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import FileRef, Manifest, PartRef
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.baseline import Baseline, RankBase
from pulsesync.publish.cadence import Cadence, SentVersion
from pulsesync.publish.commit import create, is_committed, next_record, root_record
from pulsesync.publish.companions import Files, put_companions
from pulsesync.publish.costs import PatchCosts, patch_codec
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.ownership import RankReport, VersionTables, agreed
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.records import RunRecords
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.resume import PublisherState, check_continues, grafted
from pulsesync.publish.resumer import RunResumer, TeamPlan
from pulsesync.publish.team import COORDINATOR, CoordinatorMessage, RankStatus, TeamRounds
from pulsesync.run import keys
from pulsesync.run.bodies import inline_share, keep_body, put_body
from pulsesync.run.reader import location_of
from pulsesync.state.backend import Transition
from pulsesync.state.sharding import (
    Shards,
    TileShare,
    Windows,
    layout_of,
    owner_of,
    share_of,
    windows_from,
    windows_to,
)
from pulsesync.state.weights import WeightState

CALL_TIMEOUT_S = 300.0  # how long a rank may take to make a call of publish that another has made

logger = logging.getLogger(__name__)


@dataclass
class WriterOptions:
    """The options that must be the same on all ranks of a team; see `Publisher`."""

    codec: CodecName
    grid: layouts.Grid
    min_tile: int
    files: Files
    anchor_every: float
    resume: bool = False  # publish to an existing run even weights that do not continue it
    warns_of_fp32: bool = False  # once, if most weights of an FP32 model change in a version
    continues: PublisherState = field(default_factory=PublisherState)  # the version that the run must have; or empty


@dataclass(frozen=True)
class Draft:
    """This rank's part of a version that was sent, and may have been committed."""

    version: int
    encoded: EncodedPart
    transition: Transition
    part: PartRef | None  # None: nothing changed in this rank's tiles, and nothing was uploaded
    record: bytes = b""  # the signed record; on the coordinator only
    tables: VersionTables | None = None  # the tables of the version; on the coordinator only
    report: PublishReport | None = None  # the coordinator's, if the version is committed

    def is_of(self, record: Manifest) -> bool:
        return record.version == self.version and (self.part is None or self.part in record.parts)


class RunWriter:
    """Writes the versions of one run. One thread at a time may call `write`; `compare` needs the queue's lock."""

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
        self.lease = lease  # the coordinator's is that of the team
        self.store, self.rounds, self.queue, self.options = records.store, rounds, queue, options
        self._records = records
        self.anchors = AnchorCoordinator(
            anchors, rounds, queue.lock, options.anchor_every, lambda: records.reader().look, self._put
        )
        self.baseline: Baseline | None = None  # how the base is kept, once a source was seen
        self.base: RankBase | None = None  # changed only under the queue's lock
        self.last: Manifest | None = None  # the last committed version, even if its base was lost
        self.costs, self._choice = costs, costs.choice
        self._cadence, self._events = cadence, events
        self._draft: Draft | None = None  # kept until it is known whether it was committed
        # The following are used by the coordinator only.
        self._warns_of_fp32 = options.warns_of_fp32
        self._was_refused = False  # whether weights were refused that do not continue the run
        self._tables = VersionTables()
        self._refs: tuple[FileRef, ...] = ()

    # Comparing, in the caller's thread

    def compare(
        self,
        version: PendingVersion,
        shards: Shards,
        old: Any = None,
        later: bool = False,
        resumed: RankBase | None = None,
    ) -> None:
        """Compare a source with the base, if there is one; when this returns, the source may change.

        resumed: The base of a run that is being resumed, which is no one's base yet.
        later: The source changes only after `wait` of the baseline, and may be compared until then.

        Raises:
            StateError: tensors were added, removed, reshaped, or tied or sharded differently.
        """
        base, baseline = resumed or self.base, self.baseline
        if base is None or baseline is None:
            return
        base.share.check(shards)
        compare = baseline.compare_later if later else baseline.compare
        try:
            version.difference = compare(base.share, base.state, shards, self._codec, base.last, old)
        except BaseException as e:
            if baseline.caller_passes_old_weights and not isinstance(e, ValueError | StateError):
                self.base = (
                    None  # the old weights that the caller passed are lost: no patch to the last version is possible
                )
            raise
        version.base = base.last.version

    # One version

    def write(self, version: PendingVersion) -> PublishReport:
        """Commit the current version with all ranks, and advance the base.

        Raises:
            PulseError: a rank failed; the base is still the last committed version.
        """
        clock = _Clock()
        self.rounds.begin()
        last_call = self._agree_on_call(version)
        if self.base is not None:
            return self._write_patch(self.base, lambda: self._fix(version, last_call), clock)
        found = self._open(version, last_call)
        self.queue.resumed()
        if isinstance(found, RankBase):
            return self._write_patch(found, lambda: version, clock)
        return self._write_root(found, version, clock)

    def _agree_on_call(self, version: PendingVersion) -> int:
        """Exchange the status of every rank; return the call that the version ends with.

        If ranks have no base, or different ones, none has one afterwards. No rank is in a call of publish meanwhile.
        """
        ranks = self._exchange_status(version)
        calls = max(rank.calls for rank in ranks)
        self.anchors.ranks, self._choice = ranks, ranks[COORDINATOR].choice
        all_wait = all(rank.waits for rank in ranks)
        with self.queue.lock:
            if not self.rounds.is_alone:
                self._cadence.agree(ranks[COORDINATOR].target, calls)
            if all_wait:  # then they are in the same call, even if their counts differ
                self.queue.calls = version.call = calls
        try:
            self._agree_on_base(ranks, can_resume=all_wait or all(r.awaited and r.call == calls for r in ranks))
        except Exception as e:
            self.queue.reject_calls(calls, e)
            raise
        if not self.rounds.is_alone:
            with self.queue.lock:
                self.queue.failures.schedule_raise(calls + 1, any(rank.unread for rank in ranks))
        return calls if all_wait else max(rank.call for rank in ranks)

    def _agree_on_base(self, ranks: Sequence[RankStatus], can_resume: bool) -> None:
        """Raises: StoreError, GroupError: the ranks have different last versions, and cannot resume the run now."""
        versions = [rank.version for rank in ranks]
        if any(rank.unsure for rank in ranks):
            versions = self._resolve_unknown_commit()
        with self.queue.lock:
            if None in versions or len(set(versions)) > 1:
                self.base = None
                self.anchors.abandon()
        if self.base is None and not can_resume:
            raise GroupError(
                "the ranks have different last versions, so nothing was published; publish again on every rank to "
                "resume the run on all of them",
                rank=self.rounds.team.rank,
            )

    def _exchange_status(self, version: PendingVersion) -> list[RankStatus]:
        def stand() -> RankStatus:
            self.lease.check()
            if version.fault is not None and self.base is None:
                raise version.fault  # in the other case it is raised when all ranks have made the same call
            if self.base is not None:
                self.anchors.writer.renew(self.base.last.run)
                self._choose_codec(self.base.last, version)
            with self.queue.lock:
                return RankStatus(
                    call=version.call,
                    calls=self.queue.calls,
                    version=self.version,
                    unsure=self._draft is not None,
                    awaited=version.awaited,
                    waits=version.waits and version.fault is None,
                    unread=self.queue.failures.has_unread,
                    busy=self.anchors.writer.busy,
                    share=self.anchors.writer.share,
                    target=self._cadence.target(),
                    choice=self.costs.choice,
                )

        if self.rounds.is_alone:
            return [stand()]
        return RankStatus.from_ranks(self.rounds.run_on_all(lambda: (None, stand().to_bytes()))[1])

    def _choose_codec(self, last: Manifest, version: PendingVersion) -> None:
        """Choose, on the coordinator and at the first patch of an epoch, how all ranks code the epoch's versions."""
        if self.rounds.coordinates and last.next_patch[1] == 1 and version.difference is not None:
            self.costs.begin_epoch(version.difference.try_step())

    @property
    def _codec(self) -> CodecName:
        """Return the codec of the current version, or the expected one of the next."""
        return patch_codec(self.options.codec, self._choice)

    def _fix(self, version: PendingVersion, last_call: int) -> PendingVersion:
        """Return the current version when this rank has made the call that it ends with."""
        fixed = self.queue.fix(version, last_call, CALL_TIMEOUT_S, resumes=self.base is None)
        if fixed.fault is not None:
            raise fixed.fault
        self.rounds.step = fixed.step
        return fixed

    @property
    def version(self) -> int | None:
        base = self.base
        return base.last.version if base else None

    # A commit that is not known

    def resolve_at_once(self) -> None:
        """After a failure, find out whether the version was committed anyway; a team does so with the next one."""
        if not self.rounds.is_alone or self._draft is None:
            return
        try:
            self._resolve_unknown_commit()
        except Exception as e:  # noqa: BLE001 - the next version tries again
            logger.warning(
                "It is not known yet whether the last version was committed: %s: %s. The next publish finds out.",
                type(e).__name__,
                e,
            )

    def _resolve_unknown_commit(self) -> list[int | None]:
        """Find out whether a version was committed whose outcome some rank does not know; if so, advance to it.

        Returns the version of each rank's base afterwards.

        Raises:
            StoreError: the store still does not answer.
        """
        base = self.base

        def look() -> CoordinatorMessage:
            draft = self._draft
            if base is None:
                return CoordinatorMessage()
            if draft is not None and draft.record and is_committed(self.store, draft.version, draft.record):
                due = self.anchors.is_due(self._records.parse(draft.record), base.state.layout)
                return CoordinatorMessage(draft.record, anchor=due)
            return CoordinatorMessage(base.record)

        message = self.rounds.run_on_coordinator(look)

        def advance() -> tuple[None, bytes]:
            draft = self._draft
            if draft is not None and message.record and draft.is_of(record := self._records.parse(message.record)):
                self._keep_body(draft)
                with self.queue.lock:
                    base = self._advance(draft, record, message.record, [self.queue.current, self.queue.pending])
                    self.queue.failures.clear_failures_through(record.version)
                logger.info("Version %d was committed, although its publish failed.", record.version)
                if draft.report is not None:
                    self._events.published(draft.report)
                caller_passes_old_weights = (
                    self.baseline is not None and self.baseline.caller_passes_old_weights
                )  # then the source has changed since
                self.anchors.begin_or_retry(base, message.anchor and not caller_passes_old_weights)
            self._draft = None
            return None, json.dumps(self.version).encode()

        _, sent = self.rounds.run_on_all(advance)
        return [json.loads(one) for one in sent]

    def _advance(
        self, draft: Draft, last: Manifest, record: bytes, waiting: Sequence[PendingVersion | None]
    ) -> RankBase:
        """Advance the base to a committed version, and rebase a waiting version that was compared with the old base."""
        base = self.base
        assert base is not None
        for one in waiting:
            if one is not None and one.difference is not None and one.base == base.last.version:
                one.difference, one.base = one.difference.after(draft.transition), last.version
        if base.state.sums is not draft.transition.sums:  # False if an earlier attempt was interrupted after this
            base.state.commit(draft.transition)
        self.base, self.last = replace(base, last=last, record=record), last
        self._tables = draft.tables or self._tables
        self._draft = None
        return self.base

    # Resuming a run

    def _open(self, version: PendingVersion, last_call: int) -> "RankBase | TeamPlan":
        """Agree on a layout, and look for a run. Return the base of a run that can be resumed, or a plan for a root."""
        shards = version.shards
        assert shards is not None

        def windows() -> tuple[tuple[Windows, Mapping[str, str]], bytes]:
            self._fix(version, last_call)
            return (shards.windows, shards.ties), b"" if self.rounds.is_alone else windows_to(shards)

        mine, sent = self.rounds.run_on_all(windows)
        everyones, ties = agreed([mine] if self.rounds.is_alone else [windows_from(message) for message in sent])
        if not any(everyones):
            raise StateError(
                "there is no tensor to publish: pass a model, its state_dict(), or a mapping of names to tensors that "
                "is not empty"
            )
        pieces = layout_of(everyones, ties, self.options.grid, self.options.min_tile)
        layout = layouts.bundle(pieces, owner_of(pieces, everyones))
        message = self.rounds.run_on_coordinator(self._find_last)
        last = self._records.parse(message.record) if message.record else None
        plan = TeamPlan(layout, everyones, message.record, last)
        assert self.baseline is not None
        resumer = RunResumer(self._records, self.rounds, self.anchors, self.baseline)
        if last is None or (found := resumer.resume(plan, last, shards)) is None:
            return plan
        base, due = found
        self._tables = resumer.tables
        self._compare_resumed(base, version)
        with self.queue.lock:
            self.base, self.last = base, last
        self.anchors.begin_or_retry(base, due)
        return base

    def _find_last(self) -> CoordinatorMessage:
        self.lease.wait(lambda: self.queue.closed)
        reader = self._records.reader()
        last = reader.newest()
        if last is not None and self._records.signing_key is None and last.signed_by:
            raise SignatureError(
                "this run is signed; pass signing_key= to resume it, with the key that signed it, or publish to "
                "another location. Nothing was published",
                key=keys.manifest_key(last.version),
            )
        if self.options.continues:
            check_continues(self.options.continues, reader, last)
        return CoordinatorMessage(self._records.sign(last), newest=last.anchor) if last else CoordinatorMessage()

    def _compare_resumed(self, base: RankBase, version: PendingVersion) -> None:
        """Compare the first version of a publisher with the run's last one. Nothing was written yet.

        Raises:
            StateError: the weights do not continue the run.
        """

        def compare() -> tuple[None, RankReport]:
            assert version.shards is not None
            with self.queue.lock:
                self.compare(version, version.shards, resumed=base)
            assert version.difference is not None
            return None, RankReport(changed=version.difference.changed)

        def check() -> CoordinatorMessage:
            changed, total = sum(report.changed for report in reports), base.state.layout.size
            if 2 * changed > total and not self._is_declared:
                if self._may_be_grafted(base.last, version.step):
                    self._was_refused = True
                    raise grafted(self.store, base.last, version.step, changed, total)
                logger.warning(
                    "%s of %s weights differ from version %d, the last one of the run at %s. If they are of another "
                    "model or training, publish them to another location.",
                    f"{changed:,}",
                    f"{total:,}",
                    base.last.version,
                    location_of(self.store),
                )
            self.lease.hold()  # not before: a publisher that is refused must not keep the right one waiting
            self._refs = put_companions(self.store, self.options.files, version.source, base.last)
            return CoordinatorMessage()

        _, reports = self.rounds.report(compare)
        self.rounds.run_on_coordinator(check)

    def _may_be_grafted(self, last: Manifest, step: int) -> bool:
        """Return whether nothing says that the first version of this publisher continues a run."""
        return not self._is_declared and (step <= last.step or self._was_refused)

    @property
    def _is_declared(self) -> bool:
        """Whether the trainer has said that its weights belong to the run."""
        return self.options.resume or bool(self.options.continues) or self.last is not None

    # Roots

    def _write_root(self, plan: TeamPlan, version: PendingVersion, clock: "_Clock") -> PublishReport:
        """Publish a state that has no base. Its anchor is written in the background."""
        baseline, shards = self.baseline, version.shards
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
        with self.queue.lock:
            self.base = base = RankBase(last, message.record, *found)
            self.last = last
        self.queue.sent()
        self.anchors.begin_or_retry(base, begins=True)
        version.is_root = True
        return clock.report(version, plan.layout, last, plan.layout.size, message.written)

    def _create_root(
        self, plan: TeamPlan, reports: Sequence[RankReport], version: PendingVersion
    ) -> CoordinatorMessage:
        self.lease.hold()
        self._refs = put_companions(self.store, self.options.files, version.source, plan.last)
        tables, newest = VersionTables().after(reports), self.anchors.writer.newest
        digest, every = tables.digest(plan.layout), self._records.epoch_patches
        record = root_record(plan.last, version.step, plan.layout.id, digest, newest, self._refs, every)
        data = self._records.sign(record)
        self.store.put(keys.layout_key(plan.layout.id), plan.layout.data)
        with self.lease.creating():
            written = len(plan.layout.data) + create(self.store, record, data, plan.last)
        if plan.last is not None and self._may_be_grafted(plan.last, version.step):
            logger.warning(
                "Version %d (step %d) is published in full, and its weights were not compared with version %d (step "
                "%d), the last one of this run: no path leads to that version, or its tiles do not fit the shards or "
                "keep='hook'. If they are of another model or training, publish to another location.",
                record.version,
                record.step,
                plan.last.version,
                plan.last.step,
            )
        self._tables = tables
        self.anchors.committed(record)
        return CoordinatorMessage(data, newest=newest, written=written)

    # Patches

    def _write_patch(self, base: RankBase, fix: Callable[[], PendingVersion], clock: "_Clock") -> PublishReport:
        """Encode and upload what changed, each rank in its own tiles; commit it as one version; advance the base."""

        def offer() -> tuple[PendingVersion, RankReport]:
            version = fix()
            return version, self._offer(base, version, clock)

        version, reports = self.rounds.report(offer)
        message = self.rounds.run_on_coordinator(lambda: self._create(base, reports, version, clock))
        draft = self._draft
        assert draft is not None
        last = self._records.parse(message.record)
        self._keep_body(draft)
        with self.queue.lock:
            base = self._advance(draft, last, message.record, [self.queue.pending])
            self._cadence.sent(SentVersion(version.coalesced + 1, clock.seconds))
        self.queue.sent()
        self.anchors.note_recorded(message.newest)
        report = self._report_patch(clock, version, base, last, message.changed, message.written)
        self._warn_of_fp32(report, base.state.layout)
        self.anchors.begin_or_retry(base, message.anchor)
        return report

    def _warn_of_fp32(self, report: PublishReport, layout: Layout) -> None:
        """Warn once, on the coordinator, if it seems that FP32 masters are published because a cast was forgotten."""
        wide = sum(spec.size for spec in layout.tensors if spec.dtype == "F32")
        if not self._warns_of_fp32 or not self.rounds.coordinates or 2 * min(wide, report.changed) <= report.total:
            return
        self._warns_of_fp32 = False
        logger.warning(
            "%s of %s weights (%.4g %%) changed in version %s, which has %s bytes, because they are published as FP32. "
            "Pass cast='BF16' to Publisher (pulse publish: --cast BF16) if workers use BF16: of BF16 weights about "
            "1 %% change in a step of reinforcement learning. Pass cast={} to publish FP32 without this warning.",
            f"{report.changed:,}",
            f"{report.total:,}",
            100 * report.density,
            report.version,
            f"{report.payload_bytes:,}",
        )

    def _report_patch(
        self, clock: "_Clock", version: PendingVersion, base: RankBase, record: Manifest, changed: int, written: int
    ) -> PublishReport:
        report = clock.report(version, base.state.layout, record, changed, written)
        return replace(report, codec=self._choice.codec, reason=self._choice.reason, anchor=self.anchors.writer.choice)

    def _offer(self, base: RankBase, version: PendingVersion, clock: "_Clock") -> RankReport:
        """Encode what changed in this rank's tiles, and upload it, unless nothing has changed."""
        assert version.difference is not None
        began = time.perf_counter()
        part, transition = version.difference.encode(base.last, self._codec)
        self.costs.coded(self._choice, transition.changed, len(part.data), time.perf_counter() - began)
        version.version = base.last.version + 1
        clock.encoded()
        ref = self._put(part) if part.sums else None
        self._draft = Draft(version.version, part, transition, ref)
        remembered = transition.history.counts(part.sums)
        return RankReport((ref,) if ref else (), transition.changed, part.sums, remembered)

    def _create(
        self, base: RankBase, reports: Sequence[RankReport], version: PendingVersion, clock: "_Clock"
    ) -> CoordinatorMessage:
        """Create a version from the parts of all ranks. If nothing has changed anywhere, it has one empty part."""
        parts = tuple(part for report in reports for part in report.parts)
        draft = self._draft
        assert draft is not None
        if not parts:
            parts = (self._put(draft.encoded),)
            draft = replace(draft, part=parts[0])
        self.anchors.create_if_complete(base)
        _, index = base.last.next_patch
        tables = self._tables.after(reports, forget=index == 1)
        state, newest = tables.digest(base.state.layout), self.anchors.writer.newest
        history, lowest = tables.history(index), version.lowest_step
        record = next_record(base.last, version.step, parts, state, history, newest, self._refs, lowest)
        data = self._records.sign(record)
        changed, written = sum(report.changed for report in reports), record.object_bytes + len(data)
        report = self._report_patch(clock, version, base, record, changed, written)
        self._draft = replace(draft, record=data, tables=tables, report=report)
        self.anchors.committed(record)
        try:
            with self.lease.creating():
                create(self.store, record, data, base.last)
        except AnotherPublisherError:
            self._draft = None
            raise
        due = self.anchors.is_due(record, base.state.layout)
        return CoordinatorMessage(data, due, newest, changed, written)

    def _keep_body(self, draft: Draft) -> None:
        """Upload the part again if a prune has deleted it between its upload and the record that names it."""
        if draft.part is not None and draft.part.data is None:
            keep_body(self.store, draft.encoded)

    def _put(self, part: EncodedPart) -> PartRef:
        began = time.perf_counter()
        ref = put_body(self.store, part, inline_share(self.rounds.team.size))
        if ref.data is None:
            self.costs.link.sent(ref.size, time.perf_counter() - began)
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
