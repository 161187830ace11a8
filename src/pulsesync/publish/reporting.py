"""What a publisher logs and emits: each version, each anchor, and what failed."""

import logging
from dataclasses import dataclass

from pulsesync.core.events import AnchorPublished, PublishFailed, VersionPublished, describe_error, emit, has_listeners
from pulsesync.format.manifest import Manifest
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.team import COORDINATOR

NOTICED_S = 0.05  # for which a comparison blocks the trainer before that is logged

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class PublishEvents:
    """The events of one publisher. Of a team, rank 0 emits versions and anchors, and every rank what failed on it."""

    location: str  # of the run, without credentials
    _rank: int
    muted: bool = False  # True: nothing is logged or emitted
    _blocked: int = 0  # comparisons that blocked the trainer noticeably, and with `hold` would not have

    def ended(self, version: PendingVersion, outcome: PublishReport | BaseException) -> None:
        if isinstance(outcome, PublishReport):
            self.published(outcome)
        else:
            self.failed(version.step, outcome)

    def published(self, report: PublishReport) -> None:
        if self.muted or self._rank != COORDINATOR or report.version is None:
            return
        logger.info("Published to %s: %s.", self.location, report)
        if has_listeners():
            emit(VersionPublished.of(report, location=self.location))

    def failed(self, step: int, error: BaseException) -> None:
        """A publish has failed on this rank. The caller logs it, or the error is raised to the user."""
        if self.muted or not has_listeners():
            return
        text, retryable = describe_error(error), bool(getattr(error, "retryable", False))
        emit(PublishFailed(location=self.location, step=step, rank=self._rank, error=text, retryable=retryable))

    def compared(self, seconds: float) -> None:
        """A comparison blocked the trainer for some time, which `hold` would have saved: say so, once.

        At the second time: the first comparison may compile kernels.
        """
        if self.muted or seconds < NOTICED_S:
            return
        self._blocked += 1
        if self._blocked != 2:
            return
        text = (
            "publish(wait=False) has blocked the trainer for %.2f s: with keep='host' it compares the weights on the "
            "GPU with a copy in host memory, over the bus. Call Publisher.hold(optimizer) once for each optimizer that "
            "changes the weights: then they are compared during the next forward and backward pass."
        )
        logger.warning(text, seconds)

    def anchored(self, record: Manifest, seconds: float) -> None:
        """The record of an anchor was created by this process."""
        if self.muted:
            return
        location, version, size_bytes = self.location, record.version, record.size_bytes
        text = "Published the anchor of version %d to %s: %d bytes, %.1f s."
        logger.info(text, version, location, size_bytes, seconds)
        if has_listeners():
            emit(AnchorPublished(location=location, version=version, payload_bytes=size_bytes, seconds=seconds))
