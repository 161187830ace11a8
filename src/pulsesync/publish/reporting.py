"""What a publisher logs and emits: each version, each anchor, and what failed."""

import logging

from pulsesync.core.events import AnchorPublished, PublishFailed, VersionPublished, describe_error, emit, has_listeners
from pulsesync.format.manifest import Manifest
from pulsesync.group.collective import Team
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.team import COORDINATOR

logger = logging.getLogger(__name__)


class PublishEvents:
    """The events of one publisher. Of a team, rank 0 emits versions and anchors, and every rank what failed on it.

    Args:
        location: Of the run, without credentials.
        team: The processes that publish together.
    """

    def __init__(self, location: str, team: Team) -> None:
        self.location, self._rank = location, team.rank
        self.muted = False  # True: nothing is logged or emitted

    def ended(self, version: PendingVersion, outcome: PublishReport | BaseException) -> None:
        """A version is committed, or has failed."""
        if isinstance(outcome, PublishReport):
            self.published(outcome)
        else:
            self.failed(version.step, outcome)

    def published(self, report: PublishReport) -> None:
        """A version is committed."""
        if self.muted or self._rank != COORDINATOR or report.version is None:
            return
        logger.info("Published to %s: %s.", self.location, report)
        if has_listeners():
            emit(VersionPublished.of(report, location=self.location))

    def failed(self, step: int, error: BaseException) -> None:
        """A publish has failed on this rank. The caller logs it, or the error is raised to the user."""
        if self.muted or not has_listeners():
            return
        emit(
            PublishFailed(
                location=self.location,
                step=step,
                rank=self._rank,
                error=describe_error(error),
                retryable=bool(getattr(error, "retryable", False)),
            )
        )

    def anchored(self, record: Manifest, seconds: float) -> None:
        """The record of an anchor was created by this process."""
        if self.muted:
            return
        logger.info(
            "Published the anchor of version %d to %s: %d bytes, %.1f s.",
            record.version,
            self.location,
            record.size_bytes,
            seconds,
        )
        if has_listeners():
            emit(
                AnchorPublished(
                    location=self.location, version=record.version, payload_bytes=record.size_bytes, seconds=seconds
                )
            )
