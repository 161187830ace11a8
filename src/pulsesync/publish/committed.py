"""The last committed version of a rank, the version that may become the next one, and whether it did."""

import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pulsesync.core.threads import finish
from pulsesync.format.manifest import FileRef, Manifest, PartRef
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.baseline import Baseline, RankBase
from pulsesync.publish.commit import is_committed
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.ownership import VersionTables
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.records import RunRecords
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.team import CoordinatorMessage, TeamRounds
from pulsesync.run.bodies import keep_body
from pulsesync.state.backend import Transition
from pulsesync.state.sharding import Shards

logger = logging.getLogger(__name__)


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


@dataclass(eq=False, repr=False)
class CommittedVersion:
    """The last committed version, with which sources are compared. Changed only under the queue's lock."""

    baseline: Baseline | None = None  # how the base is kept, once a source was seen
    base: RankBase | None = None
    last: Manifest | None = None  # even if its base was lost
    # On the coordinator only:
    tables: VersionTables = field(default_factory=VersionTables)
    files: tuple[FileRef, ...] = ()  # of the versions to come

    @property
    def version(self) -> int | None:
        base = self.base
        return base.last.version if base else None

    def compare(
        self,
        version: PendingVersion,
        shards: Shards,
        codec: CodecName,
        later: bool = False,
        resumed: RankBase | None = None,
    ) -> None:
        """Compare a source with the base, if there is one; when this returns, the source may change.

        later: The source changes only after `wait` of the baseline, and may be compared until then.
        resumed: The base of a run that is being resumed, which is no one's base yet.

        Raises: StateError: tensors were added, removed, reshaped, or tied or sharded differently.
        """
        base, baseline = resumed or self.base, self.baseline
        if base is None or baseline is None:
            return
        base.share.check(shards)
        compare = baseline.compare_later if later else baseline.compare
        version.difference = compare(base.share, base.state, shards, codec)
        version.base = base.last.version

    def start(self, base: RankBase) -> None:
        self.base, self.last = base, base.last

    def advance(
        self, draft: Draft, last: Manifest, record: bytes, waiting: Sequence[PendingVersion | None]
    ) -> RankBase:
        """Advance to a version that was committed, and rebase a waiting one that was compared with the last one."""
        base = self.base
        assert base is not None
        advanced = replace(base, last=last, record=record)
        rebased = [
            (one, one.difference.after(draft.transition))
            for one in waiting
            if one is not None and one.difference is not None and one.base == base.last.version
        ]

        def advance() -> None:
            base.state.commit(draft.transition)
            for one, difference in rebased:
                one.difference, one.base = difference, last.version
            self.base, self.last, self.tables = advanced, last, draft.tables or self.tables

        if threading.current_thread() is threading.main_thread():
            finish(advance)  # Ctrl-C between two of its lines would leave weights that are those of no version
        else:
            advance()
        return advanced


@dataclass(eq=False, repr=False)
class CommitSettler:
    """Keeps the draft of a version until it is known whether it was committed, and then advances to it."""

    _committed: CommittedVersion
    _records: RunRecords
    _rounds: TeamRounds
    _queue: SendQueue
    _anchors: AnchorCoordinator
    _events: PublishEvents
    draft: Draft | None = None

    def commit(self, draft: Draft, last: Manifest, record: bytes, waiting: Sequence[PendingVersion | None]) -> RankBase:
        """Advance to the version of a draft, whose record is in the store. Needs the queue's lock."""
        base = self._committed.advance(draft, last, record, waiting)
        self.draft = None
        return base

    def keep_body(self, draft: Draft) -> None:
        """Upload the part again if a prune has deleted it between its upload and the record that names it."""
        if draft.part is not None and draft.part.data is None:
            keep_body(self._records.store, draft.encoded)

    def resolve_at_once(self) -> None:
        """After a failure, find out whether the version was committed anyway; a team does so with the next one."""
        if not self._rounds.is_alone or self.draft is None:
            return
        try:
            self.resolve_unknown_commit()
        except Exception as e:  # noqa: BLE001 - the next version tries again
            text = "It is not known yet whether the last version was committed: %s: %s. The next publish finds out."
            logger.warning(text, type(e).__name__, e)

    def resolve_unknown_commit(self) -> list[int | None]:
        """Find out whether a version was committed whose outcome some rank does not know; if so, advance to it.

        Returns the version of each rank's base afterwards.

        Raises: StoreError: the store still does not answer.
        """
        message = self._rounds.run_on_coordinator(self._find_last)

        def advance() -> tuple[None, bytes]:
            draft = self.draft
            if draft is not None and message.record and draft.is_of(last := self._records.parse(message.record)):
                self._commit_late(draft, last, message)
            self.draft = None
            return None, json.dumps(self._committed.version).encode()

        _, sent = self._rounds.run_on_all(advance)
        return [json.loads(one) for one in sent]

    def _find_last(self) -> CoordinatorMessage:
        """Return the record of the draft if it is in the store, and otherwise that of the base."""
        base, draft = self._committed.base, self.draft
        if base is None:
            return CoordinatorMessage()
        if draft is not None and draft.record and is_committed(self._records.store, draft.version, draft.record):
            due = self._anchors.is_due(self._records.parse(draft.record), base.state.layout)
            return CoordinatorMessage(draft.record, anchor=due)
        return CoordinatorMessage(base.record)

    def _commit_late(self, draft: Draft, last: Manifest, message: CoordinatorMessage) -> None:
        self.keep_body(draft)
        queue = self._queue
        with queue.lock:
            base = self._committed.base
            if base is None or base.last.version < last.version:
                base = self.commit(draft, last, message.record, [queue.current, queue.pending])
            queue.failures.clear_failures_through(last.version)
        logger.info("Version %d was committed, although its publish failed.", last.version)
        if draft.report is not None:
            self._events.published(draft.report)
        self._anchors.begin_or_retry(base, message.anchor)
