"""A version between the call of publish and its outcome: what is queued, its future, and the report."""

from dataclasses import dataclass, field
from typing import Any

from pulsesync.core.threads import GatedFuture
from pulsesync.publish.baseline import Difference
from pulsesync.publish.costs import CodecChoice
from pulsesync.state.sharding import Shards


@dataclass(frozen=True)
class PublishReport:
    """What a publish did. The report of steps that were coalesced is that of the version that contains them."""

    version: int | None  # None: nothing was sent, the step goes into a later version
    step: int
    changed: int  # number of weights that changed
    total: int  # number of weights of the model
    payload_bytes: int  # all bytes that the version added to the store, by all ranks
    full_bytes: int  # bytes of the full weights
    coalesced: int  # publishes before this one that are in this version
    blocked_s: float  # how long the call of publish took
    encode_s: float  # time of this rank
    store_s: float  # time of this rank, including the time in which it waited for others
    codec: str | None = None  # the codec of a patch; "smallest": each tile with the one that makes it smallest
    reason: str = ""  # why that codec was chosen, with the figures
    anchor: CodecChoice | None = None  # codec and reason of the last anchor that this process has encoded

    @property
    def density(self) -> float:
        return self.changed / self.total if self.total else 0.0

    def __str__(self) -> str:
        if self.version is None:
            return f"step {self.step}: will be part of a later version"
        times = self.full_bytes / max(self.payload_bytes, 1)
        is_patch = self.codec is not None
        weights = f"{self.changed:,} of {self.total:,} weights changed" if is_patch else f"all {self.total:,} weights"
        return (
            f"version {self.version}, step {self.step}: {weights}, "
            f"{self.payload_bytes:,} bytes ({times:.{0 if times >= 10 else 1}f} times smaller)"
        )


class PublishFuture(GatedFuture[PublishReport]):
    """A future that knows whether its caller has read how the publish ended."""

    def __init__(self, awaited: bool) -> None:
        super().__init__()
        self.awaited = awaited  # whether the caller waits for it within publish
        self.was_read = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled, because the base advances with it

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.was_read = True
        return error


@dataclass
class PendingVersion:
    """A state that is queued to become a version, as its difference from the base."""

    call: int  # the call of publish that it ends with
    step: int
    base: int | None = None  # the base's version; None: it is compared later, when the base is known
    difference: Difference | None = None
    shards: Shards | None = None  # the source, if the caller waits, so that it cannot change
    source: Any = None  # the source as the caller passed it
    waits: bool = False  # whether the caller waits in every case, not only if there is no base
    coalesced: int = 0
    alone: bool = False  # no later step is coalesced with it
    earlier_step: int | None = None  # the lowest step that was coalesced into it
    blocked_s: float = 0.0
    futures: list[PublishFuture] = field(default_factory=list)
    fault: BaseException | None = None  # the error of the comparison on this rank, which is sent to all ranks
    version: int | None = None  # the version it was sent as, whether that was committed or not
    is_root: bool = False  # whether it was sent as a state that has no base

    @property
    def awaited(self) -> bool:
        """Whether the caller waits for it, and therefore makes no other call."""
        return self.shards is not None

    @property
    def lowest_step(self) -> int:
        """The lowest step in it. It is below that of the last version if the trainer went back."""
        return self.step if self.earlier_step is None else min(self.step, self.earlier_step)

    def release(self) -> None:
        self.difference = self.shards = self.source = None

    def absorb(self, earlier: "PendingVersion") -> None:
        """Replace a version that was queued earlier."""
        self.coalesced += 1 + earlier.coalesced
        self.earlier_step = min(self.lowest_step, earlier.lowest_step)
        self.futures = earlier.futures + self.futures
