"""When an anchor is due, and its record, which all ranks of a team lead to together. `anchors` writes the bytes."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pulsesync.errors import ChainError, FormatError, StoreError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.publish.anchors import AnchorWriter, encode_parts
from pulsesync.publish.baseline import RankBase
from pulsesync.publish.ownership import RankReport
from pulsesync.publish.team import CoordinatorMessage, RankStatus, TeamRounds
from pulsesync.run import planner
from pulsesync.run.planner import Look

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AnchorCoordinator:
    """The anchors of one rank: begins them with all ranks, and on rank 0 decides when, and creates their records."""

    writer: AnchorWriter  # of this rank's share
    _rounds: TeamRounds
    _lock: threading.RLock  # of the queue: while it is taken, no version is sent
    _anchor_every: float  # an anchor is due when the patches since the last one add up to this fraction of its bytes
    _look: Callable[[], Look]  # returns a function that finds the records of the run as they are now
    _put: Callable[[EncodedPart], PartRef]  # into the store
    ranks: Sequence[RankStatus] = ()  # the last status of every rank
    _unrecorded: int | None = None  # the epoch of an anchor that all ranks started and that has no record yet
    _path_bytes: float = 0.0  # on rank 0: bytes of the patches since the newest anchor

    def is_due(self, last: Manifest, layout: Layout) -> bool:
        """Return whether to start an anchor of a version: at the start of an epoch, if the path has become long."""
        if not last.at_start or any(rank.busy for rank in self.ranks) or self.writer.busy:
            return False
        longest = self._anchor_every * layout.size_bytes
        if not self.writer.owed and longest <= self._path_bytes < math.inf:
            try:
                self.measure(last)
            except StoreError as e:  # then the bytes that were counted in this process decide
                logger.info("Could not measure the path from the newest anchor: %s", e)
        return self.writer.owed or (self._path_bytes >= longest and self.writer.newest != last.starts)

    def measure(self, last: Manifest) -> None:
        """Count the bytes that a new worker fetches besides the anchor; infinite without one. Raises: StoreError."""
        look = self._look()
        try:
            anchor, *patches = planner.find_path(None, last, look)
        except (ChainError, FormatError):
            self._path_bytes = math.inf
            return
        self._path_bytes = sum(record.path_bytes for record in patches)
        self.writer.newest = max(anchor.starts, self.writer.newest or 0)

    def count(self, record: Manifest) -> None:
        """Count what a new worker fetches of a version: a root, to which no anchor leads yet, or a patch."""
        self._path_bytes = math.inf if record.base is None else self._path_bytes + record.path_bytes

    def abandon(self) -> None:
        """Expect no record of an anchor that was begun: the ranks have lost their base."""
        self._unrecorded = None

    def begin_or_retry(self, base: RankBase, begins: bool) -> None:
        """Start an anchor that is due, or upload one that failed before; if that fails, a later version tries again.

        An anchor can wait, versions cannot.
        """
        try:
            if begins:
                self._unrecorded, self._path_bytes = base.last.starts, 0.0
                self.writer.begin(base.state.snapshot(), base.last, base.share.tiles)
            elif self.writer.owed:
                self.writer.finish(base.last.run)  # it may be on the disk already
        except Exception as e:
            logger.warning("An anchor that is due was not started: %s: %s", type(e).__name__, e, exc_info=e)

    def finish(self, base: Callable[[], RankBase | None]) -> int:
        """Wait for the anchor that is being written, and create its record; return the bytes of all ranks.

        In a team every rank calls this, while nothing is being sent. base: may return another one after the wait.

        Raises: StoreError, FormatError: the anchor could not be written.
        """
        fault: Exception | None = None
        if (now := base()) is not None:
            self.writer.renew(now.last.run)
        del now
        try:
            self.writer.wait()
        except Exception as e:
            if self._rounds.is_alone:
                raise
            fault = e
        if self._rounds.is_alone:
            return self.writer.written_bytes

        def share() -> tuple[None, RankReport]:
            if fault is not None:
                raise fault
            mine = self.writer.share
            return None, RankReport(mine.parts) if mine and mine.epoch == self._unrecorded else RankReport(failed=True)

        with self._lock:  # so that no version is sent meanwhile
            if self._unrecorded is None:
                return 0
            self._rounds.begin()
            _, reports = self._rounds.report(share)
            message = self._rounds.run_on_coordinator(lambda: self._create_shared(reports, base()))
            self.note_recorded(message.newest)
        return message.written

    def _create_shared(self, reports: Sequence[RankReport], base: RankBase | None) -> CoordinatorMessage:
        if any(report.failed for report in reports):
            raise StoreError(
                f"the anchor of epoch {self._unrecorded} was not completed, because some ranks could not write their "
                "share; an anchor of the next epoch is written instead",
                retryable=True,
            )
        record = self._create([report.parts for report in reports], base)
        return CoordinatorMessage(newest=record.starts, written=record.size_bytes)

    def create_if_complete(self, base: RankBase) -> None:
        """Create the record of an anchor when every rank has uploaded its share; after a failure, try again later."""
        shares = [rank.share for rank in self.ranks]
        if self._unrecorded is None or any(one is None or one.epoch != self._unrecorded for one in shares):
            return
        try:
            self._create([one.parts for one in shares if one], base)
        except StoreError as e:
            text = "The record of the anchor of epoch %d was not created: %s. It is tried again with a later version."
            logger.warning(text, self._unrecorded, e)

    def _create(self, shares: Iterable[tuple[PartRef, ...]], base: RankBase | None) -> Manifest:
        parts = tuple(part for share in shares for part in share)
        if not parts:  # a model without weights
            assert base is not None
            parts = tuple(self._put(part) for part in encode_parts((), base.state))
        record = self.writer.complete(parts)
        self.writer.newest = record.starts
        return record

    def note_recorded(self, newest: int | None) -> None:
        """Note the newest anchor in the store, which every rank knows: this rank's share of it can be removed."""
        if self._unrecorded is not None and newest is not None and newest >= self._unrecorded:
            self.writer.recorded(newest)
            self._unrecorded = None
