"""What a call of `publish` does in the caller's thread: it skips the step, or compares its weights and queues them."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from pulsesync.core import arguments
from pulsesync.core.threads import outlives_threads
from pulsesync.errors import ClosedError, StateError
from pulsesync.format.manifest import MAX_VERSION
from pulsesync.publish.baseline import Keep, baseline_for
from pulsesync.publish.cadence import Cadence
from pulsesync.publish.committed import CommittedVersion
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.pending import PendingVersion, PublishFuture, PublishReport
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.sender import VersionSender
from pulsesync.state.sharding import Shards


@dataclass(eq=False, repr=False)
class VersionIntake:
    """Takes the steps of the trainer. `skip` and `compare` need the queue's lock."""

    sender: VersionSender
    _queue: SendQueue
    _cadence: Cadence
    _events: PublishEvents
    _keep: Keep | None  # where the copy of the last version is; see `Publisher`
    _cast: Mapping[str, str]  # the dtypes that are published, by name pattern

    def skip(self, version: PendingVersion, now: bool, began: float) -> "Future[PublishReport] | None":
        """Count a step. Return None if it is published, and otherwise how that ended: the next version contains it."""
        is_due = self._cadence.step(time.monotonic(), version.call)
        skipped: Future[PublishReport] = Future()
        if (rejection := self._queue.rejection(version.call)) is not None:
            skipped.set_exception(rejection)
            return skipped
        base, step = self.sender.committed.base, version.step
        if is_due or now or base is None:
            version.earlier_step = self._cadence.lowest_skipped
            version.coalesced = self._cadence.published()
            return None
        layout, blocked_s = base.state.layout, time.perf_counter() - began
        if arguments.is_whole(step):  # otherwise the next version of a team says so on all ranks
            self._cadence.skip(step)
        skipped.set_result(PublishReport(None, step, 0, layout.size, 0, layout.size_bytes, 0, blocked_s, 0.0, 0.0))
        return skipped

    def compare(self, version: PendingVersion, source: Any, keeps_source: bool, later: bool) -> None:
        """Read and compare a source. In a team, an error is not raised here: the sender reports it to all ranks.

        keeps_source: The caller waits until the version was sent.
        later: The source changes only after `wait_until_compared`.
        """
        committed, codec = self.sender.committed, self.sender.writer.agreement.codec
        try:
            version.step = checked_step(version.step)
            if committed.base is None or committed.baseline is None:
                self.sender.wait_until_compared()
                committed.baseline = baseline_for(source, self._keep)
            shards = committed.baseline.read(source, self._cast)
            if self._queue.is_alone:
                check_complete(shards)
            if keeps_source:
                version.shards, version.source = shards, source
            began = time.perf_counter()
            committed.compare(version, shards, codec, later)
            if self._keep == "host" and not (later or keeps_source) and is_on_one_device(committed):
                self._events.compared(time.perf_counter() - began)
        except Exception as e:
            if self._queue.is_alone:
                self._events.failed(version.step, e)
                raise
            version.fault = e

    def outcome(self, version: PendingVersion, future: PublishFuture) -> "PublishReport | Future[PublishReport]":
        """Return the report of a version that was queued, or its future, as the caller wants it."""
        if version.fault is not None:
            future.was_read = True  # by this exception
            raise version.fault
        if not future.awaited:
            return future
        try:
            report = future.result()
        finally:
            future.awaited = False  # an interrupted caller does not get a later failure from this call
        if not version.waits:
            return future
        if version.is_root:
            written = report.payload_bytes + self.sender.finish_anchor()
            report = replace(report, payload_bytes=written, anchor=self.sender.anchor_writer.choice)
        return report


class OptimizerHolds:
    """Optimizers that wait, before each step, until no comparison reads the weights any more."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, optimizer: Any, wait: Callable[[], None]) -> None:
        """Have an optimizer call `wait` before each step. Raises: TypeError, if it has no hooks for that."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            raise TypeError(
                "hold needs an optimizer with register_step_pre_hook, as every torch.optim.Optimizer has; got "
                f"{type(optimizer).__name__}"
            )
        self._hooks.append(register(lambda *_: wait()))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()


def is_on_one_device(committed: CommittedVersion) -> bool:
    """Whether the tensors are on a GPU, and on no other: `hold` is for these."""
    return committed.base is not None and len(getattr(committed.base.state.backend, "devices", ())) == 1


def check_interpreter() -> None:
    """Raises: ClosedError, if nothing can be sent any more."""
    if outlives_threads():
        raise ClosedError(
            "the interpreter is shutting down and waits for no more threads, so nothing can be published; publish and "
            "close before the main thread ends, not in an atexit handler or a daemon thread"
        )


def checked_step(step: int) -> int:
    """Raises: ValueError, TypeError, if step is not a whole number in the permitted range."""
    return arguments.whole("step", step, 0, MAX_VERSION)


def check_complete(shards: Shards) -> None:
    """Raises: StateError, if a tensor is only a shard of the model's."""
    for name, window in shards.windows.items():
        if shards.partial and not window.whole:
            raise StateError(
                f"tensor {name!r} is only a shard, {window.local.shape} of {window.tensor.shape}; publish the shards "
                "of all ranks with ShardedPublisher, or gather the tensor first",
                tensor=name,
            )
