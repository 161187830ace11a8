"""The call of publish that a version ends with, and its base and codec: all ranks of a team agree on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pulsesync.errors import GroupError
from pulsesync.format.patch import CodecName
from pulsesync.group.agreement import read_each
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.cadence import Cadence
from pulsesync.publish.committed import CommitSettler, CommittedVersion
from pulsesync.publish.costs import PatchCosts
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.pending import PendingVersion
from pulsesync.publish.team import COORDINATOR, RankStatus, TeamRounds

CALL_TIMEOUT_S = 300.0  # how long a rank may take to make a call of publish that another has made


@dataclass(eq=False, repr=False)
class TeamAgreement:
    """Agrees with the other ranks, before a version is written, on what it is. A team of one agrees with itself."""

    _committed: CommittedVersion
    _settler: CommitSettler
    _rounds: TeamRounds
    _queue: SendQueue
    _cadence: Cadence
    _anchors: AnchorCoordinator
    _costs: PatchCosts
    _lease: PublisherLease

    def __post_init__(self) -> None:
        self.choice = self._costs.choice  # of the current version, or the expected one of the next

    @property
    def codec(self) -> CodecName:
        """The codec for an encoder, for which "auto" means the smallest."""
        asked = self._costs.codec
        return "step" if asked == "auto" and self.choice.codec == "step" else asked

    def agree_on_call(self, version: PendingVersion) -> int:
        """Return the call that the version ends with, by the status of every rank.

        If ranks have no base, or different ones, none has one afterwards. No rank is in a call of publish meanwhile.
        """
        ranks = self._exchange_status(version)
        calls = max(rank.calls for rank in ranks)
        self._anchors.ranks, self.choice = ranks, ranks[COORDINATOR].choice
        all_wait = all(rank.waits for rank in ranks)
        with self._queue.lock:
            if not self._rounds.is_alone:
                self._cadence.agree(ranks[COORDINATOR].target, calls)
            if all_wait:  # then they are in the same call, even if their counts differ
                self._queue.calls = version.call = calls
        try:
            self._agree_on_base(ranks, can_resume=all_wait or all(r.awaited and r.call == calls for r in ranks))
        except Exception as e:
            self._queue.reject_calls(calls, e)
            raise
        if not self._rounds.is_alone:
            with self._queue.lock:
                self._queue.failures.schedule_raise(calls + 1, any(rank.unread for rank in ranks))
        return calls if all_wait else max(rank.call for rank in ranks)

    def _agree_on_base(self, ranks: Sequence[RankStatus], can_resume: bool) -> None:
        """Raises: StoreError, GroupError: the ranks have different last versions, and cannot resume the run now."""
        unsure = any(rank.unsure for rank in ranks)
        versions = self._settler.resolve_unknown_commit() if unsure else [rank.version for rank in ranks]
        with self._queue.lock:
            if None in versions or len(set(versions)) > 1:
                self._committed.base = None
                self._anchors.abandon()
        if self._committed.base is None and not can_resume:
            raise GroupError(
                "the ranks have different last versions, so nothing was published; publish again on every rank to "
                "resume the run on all of them",
                rank=self._rounds.team.rank,
            )

    def _exchange_status(self, version: PendingVersion) -> list[RankStatus]:
        if self._rounds.is_alone:
            return [self._status(version)]
        _, sent = self._rounds.run_on_all(lambda: (None, self._status(version).to_bytes()))
        return read_each(sent, RankStatus.from_bytes)

    def _status(self, version: PendingVersion) -> RankStatus:
        self._lease.check()
        base = self._committed.base
        if version.fault is not None and base is None:
            raise version.fault  # in the other case it is raised when all ranks have made the same call
        if base is not None:
            self._anchors.writer.renew(base.last.run)
            # On the coordinator, at the first patch of an epoch: how all ranks code the epoch's versions.
            if self._rounds.coordinates and base.last.next_patch[1] == 1 and version.difference is not None:
                self._costs.begin_epoch(version.difference.try_step())
        with self._queue.lock:
            return RankStatus(
                call=version.call,
                calls=self._queue.calls,
                version=self._committed.version,
                unsure=self._settler.draft is not None,
                awaited=version.awaited,
                waits=version.waits and version.fault is None,
                unread=self._queue.failures.has_unread,
                busy=self._anchors.writer.busy,
                share=self._anchors.writer.share,
                target=self._cadence.target(),
                choice=self._costs.choice,
            )

    def fix(self, version: PendingVersion, last_call: int) -> PendingVersion:
        """Return the current version when this rank has made the call that it ends with."""
        fixed = self._queue.fix(version, last_call, CALL_TIMEOUT_S, resumes=self._committed.base is None)
        if fixed.fault is not None:
            raise fixed.fault
        self._rounds.step = fixed.step
        return fixed
