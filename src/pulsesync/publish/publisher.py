"""The trainer's end: find what changed, encode it, write the body, then create the record that commits the version.

    with Publisher("s3://bucket/run") as pub:
        for step in range(steps):
            train_one_step(model)
            pub.publish(model, step=step, wait=False)      # returns as soon as the weights are compared

The version that was committed last is the base of the next one, and the only copy of the weights that is kept.

If a version that was published with wait=False fails, the error is logged, and raised by the next `publish`, by `flush`
and by `close`, once by each, until a later version is committed, which contains its steps. `publish` raises a
`retryable` error of the store only when max_failures consecutive versions have failed, because each version retries.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Literal, Never, Self, overload

from pulsesync.core import arguments
from pulsesync.core.process_guard import ProcessGuard
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import SigningKey, check_signing_key
from pulsesync.group.collective import SoloTeam, Team
from pulsesync.publish.baseline import Keep, RankBase, check_keep
from pulsesync.publish.cadence import Cadence, Every
from pulsesync.publish.checkpoint import PublisherState, checked_state, state_of
from pulsesync.publish.companions import Files
from pulsesync.publish.costs import AnchorCodecChoice
from pulsesync.publish.intake import OptimizerHolds, VersionIntake, check_interpreter, checked_step
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.records import RunRecords, WriterOptions
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.sender import VersionSender
from pulsesync.run.reader import CACHE_BYTES, location_of
from pulsesync.state.views import Cast, read_cast
from pulsesync.store import CachedStore, Location, open_store

FORKED = " and does not have its threads; create a new Publisher in the child, or start the process with 'spawn'"
CLOSED = "is closed; create a new one, which resumes the run"
REMOVED = {
    "old": "the Publisher compares with the copy that it keeps of the last version; leave old= out",
    "executor": "a Publisher has threads of its own; leave executor= out",
    "epoch_patches": "the format fixes how many patches make an epoch; leave epoch_patches= out",
}

logger = logging.getLogger(__name__)


class Publisher:
    """Publishes changing weights as the versions of a run: a new run, or an existing one, which it resumes.

    A publisher belongs to the process that first publishes with it. In a process forked from that one, `publish` and
    `flush` raise ClosedError and `close` does nothing. When the interpreter ends (by return, `sys.exit` or an
    exception), everything that was published is sent first; a signal that kills the process does not wait for that.

    Args:
        location: A path or URL of the run, or a store.
        resume: Add these weights to a run that exists, whatever they are. Without it, the first publish is refused if
            its weights do not continue the run: its step is not above that of the last version, over half of the
            weights differ from it, and no checkpoint's state was loaded (`load_state_dict`).
        codec: How patches are coded. "auto": each tile with the codec that makes it smallest; or all with `step`, on a
            link so fast that fewer bytes save less time than they cost. The choice is made for each epoch, by the times
            of the last versions; reports and the log give it with its reason.
        link: Bits per second of the slowest link between the run and a worker that matters; None: measured on uploads
            over the network. For a run on a local disk or in memory nothing can be measured: unless `link` is given,
            everything is coded as small as possible.
        cast: The dtype that workers use, for all FP32 tensors or by name pattern, where an empty one means no cast:
            "BF16" (or "bfloat16", torch.bfloat16), "F16", "F8_E4M3", "F8_E5M2". A tensor of BF16, FP16 or FP64 must
            have the dtype already. {}: publish FP32, without the warning if most weights change in a step.
        grid: How tensors are cut into tiles, by name pattern: rows and columns, each as a number of even pieces or as
            a list of borders.
        min_tile: No even piece of the grid has fewer weights than this.
        signing_key: Signs the records. A signed run can be resumed only with its key.
        files: Small files that belong to the model, as bytes or paths. The `config` and `generation_config` of a source
            that can write them (`to_json_string`, as Hugging Face models can) are added under the names that they have
            in a checkpoint, and so are the files of a run that is resumed. Of files with the same name, the one given
            here is published, then the source's, then the run's.
        publish_every: Steps in a version; "auto" coalesces steps as the link requires.
        max_behind: The most steps that "auto" puts into a version.
        max_failures: Consecutive versions that may fail with a `retryable` StoreError before `publish` raises it.
        anchor_every: An anchor is written when the patches since the last one add up to this fraction of its bytes.
        anchor_codec: How anchors are written: "dense", which takes about two thirds of the bytes; "raw", the weights as
            they are; "auto": "raw" where sending the additional bytes takes less time than packing, as measured.
        spool: A folder that only this trainer uses. Bodies are kept in it for a restart, and anchors until they are
            uploaded; a temporary folder if not given.
        keep: Where the copy of the last version is, for tensors on a GPU: "device", on the GPU too, which is the
            default; or "host", in pinned host memory, in which case `hold` overlaps the transfer with the next
            step.
        team: The processes that publish together, each with its shards; None: this process alone. `ShardedPublisher`
            is a publisher with a team.
        take_over: Continue the run although another publisher has its lease: the first publish makes that publisher
            stop, and waits up to 10 s for its answer. Otherwise the first publish waits until that lease ends, for 60 s
            at most, and raises if the other publisher turns out to be alive.

    Raises:
        ValueError: an argument is not one of its choices, or there is no store for the location.
    """

    _executor: Executor | None = None  # what tests replace: None is a thread for versions and one for anchors
    _epoch_patches = EPOCH_PATCHES  # the format fixes it; tests and measurements have shorter epochs

    def __init__(
        self,
        location: Location,
        *,
        resume: bool = False,
        codec: patch.CodecName = "auto",
        link: float | None = None,
        cast: "Cast | Mapping[str, Cast] | None" = None,
        grid: layouts.Grid | None = None,
        min_tile: int = 1 << 20,
        signing_key: SigningKey | None = None,
        files: Files | None = None,
        publish_every: Every = 1,
        max_behind: int = 16,
        max_failures: int = 16,
        anchor_every: float = 1.0,
        anchor_codec: AnchorCodecChoice = "auto",
        spool: str | Path | None = None,
        keep: Keep | None = None,
        team: Team | None = None,
        take_over: bool = False,
        **_removed: Never,
    ) -> None:
        arguments.removed("Publisher", _removed, REMOVED)
        check_keep(keep)
        arguments.mapping("grid", grid, "names of tensors to two sizes")
        arguments.mapping("files", files, "names of files to their bytes or paths")
        grid, files = dict(grid or {}), dict(files or {})
        warns = cast is None
        self._options = WriterOptions(
            codec, grid, min_tile, files, anchor_every, anchor_codec, link, resume, take_over, warns_of_fp32=warns
        )
        max_failures = arguments.whole("max_failures", max_failures, 1, what="a number of versions")
        check_signing_key(signing_key)
        self.team: Team = team or SoloTeam()
        self.keep: Keep | None = keep
        self.cast = read_cast(cast)
        self.store = open_store(location)
        self._spool = None if spool is None else arguments.folder("spool", spool)
        if self._spool:
            self.store = CachedStore(self.store, self._spool / "cache", CACHE_BYTES)
        self._records = RunRecords(self.store, signing_key, self._epoch_patches)
        self._cadence = Cadence(publish_every, max_behind)
        self.events = PublishEvents(location_of(self.store), self.team.rank)
        self._guard = ProcessGuard("Publisher", FORKED, CLOSED)
        self._queue = SendQueue(max_failures, self.team.size == 1, self._guard, self.events.ended)
        self._holds = OptimizerHolds()
        # Made by the first publish: a fork before that does no harm.
        self._sender: VersionSender | None = None
        self._intake: VersionIntake | None = None

    # Publishing

    @overload
    def publish(
        self, source: Any, *, step: int = ..., wait: Literal[True] = ..., now: bool = ..., coalesce: bool = ...
    ) -> PublishReport: ...
    @overload
    def publish(
        self, source: Any, *, step: int = ..., wait: Literal[False], now: bool = ..., coalesce: bool = ...
    ) -> "Future[PublishReport]": ...
    def publish(
        self,
        source: Any,
        *,
        step: int = 0,
        wait: bool = True,
        now: bool = False,
        coalesce: bool = True,
        **_removed: Never,
    ) -> "PublishReport | Future[PublishReport]":
        """Publish a module, state dict or mapping of arrays as the next version; the first one in full.

        With wait=False it returns as soon as the source has been compared and may change again (on a GPU, by work that
        is launched later in the same stream, or in one that waits for it; with `hold`, by the next step of an
        optimizer). Encoding and sending happen in the background, and the future gives the report. A version that is
        being sent is not changed; one that is still queued is replaced, and its future gives the report of the version
        that contains it.

        A failure in the background is logged. If the caller has not read it from the future, the next publish raises it
        before it compares anything: that call publishes nothing, and may be repeated. A StoreError that is `retryable`
        is raised only when max_failures consecutive versions have failed, because each version retries. A failure whose
        steps a later version contains is not raised any more.

        The callbacks of a future run on the thread that sends. A callback may publish with wait=False, if every step
        may be coalesced and a base is kept; a call that would wait for the sender raises RuntimeError there.

        With publish_every, steps that are skipped are in the next version. Publish the last step with now=True: when
        the publisher is closed, steps that are still in no version are not sent.

        Args:
            source: the weights to publish.
            step: the trainer's step, which is written to the record.
            wait: return the report when the version is committed, not a future.
            now: publish this step regardless of publish_every.
            coalesce: False makes a version of this step alone. No other step is coalesced with it, so publish waits
                while another version is queued: at most two are in memory. It excludes publish_every.

        Raises:
            StateError: tensors were added, removed, reshaped or tied differently, or the first weights do not continue
            the run (see `resume`); AnotherPublisherError: another publisher writes to this run; RunChangedError: the
            run is not that of `load_state_dict`; ClosedError: the publisher was closed, belongs to another process, or
            the interpreter is ending; StoreError, or another error of an earlier version; RuntimeError: it was called
            by a signal handler within another call, or by a callback that would wait for itself. After any exception
            the base is still the last committed version: the next version contains the changes of both steps.
        """
        began = time.perf_counter()
        arguments.removed("publish", _removed, REMOVED)
        step = self._check_call(step, wait, coalesce)
        with self._queue.call(alone=not coalesce, idle=lambda: self._base is None):
            intake = self._start()
            version = PendingVersion(self._queue.count_call(), step, alone=not coalesce, waits=wait)
            if (done := intake.skip(version, now, began)) is not None:
                return done.result() if wait else done
            inline = self._base is None
            intake.compare(version, source, keeps_source=wait or inline, later=bool(self._holds) and not wait)
            version.blocked_s = time.perf_counter() - began
            future, starts = self._queue.put(version, awaited=wait or inline)
        if starts:
            intake.sender.start(inline)
        return intake.outcome(version, future)

    def _check_call(self, step: int, wait: bool, coalesce: bool) -> int:
        """Check what needs no lock, which may stay locked for ever in a forked process; return the step."""
        if not coalesce and self._cadence.every != 1:
            raise ValueError(
                f"coalesce=False makes a version of every step, but publish_every={self._cadence.every!r} makes one of "
                "several; leave one of them out"
            )
        if self._queue.is_alone:
            step = checked_step(step)
        self._guard.check_process()
        self._queue.check_caller("publish", waits=wait or not coalesce)
        return step

    def _start(self) -> VersionIntake:
        """Create, at the first publish, what belongs to this process; raise an earlier failure."""
        check_interpreter()
        if self._intake is None:
            queue, cadence, events = self._queue, self._cadence, self.events
            sender = VersionSender(
                queue, self._records, self._options, self.team, cadence, events, self._spool, self._executor
            )
            intake = VersionIntake(sender, queue, cadence, events, self.keep, self.cast)
            self._guard.claim()
            self._sender, self._intake = sender, intake
        self._queue.raise_failure("publish")
        return self._intake

    @property
    def _base(self) -> RankBase | None:
        return self._sender.committed.base if self._sender else None

    @property
    def _last(self) -> Manifest | None:
        return self._sender.committed.last if self._sender else None

    @property
    def version(self) -> int | None:
        """The last version that was committed."""
        return last.version if (last := self._last) else None

    @property
    def digest(self) -> str | None:
        """The state digest of the last version that was committed."""
        return last.digest if (last := self._last) else None

    @property
    def run(self) -> str | None:
        """The id of the run; None before the first publish."""
        return last.run if (last := self._last) else None

    @property
    def anchor_bytes(self) -> int:
        """The bytes of anchors that this process has uploaded so far."""
        return self._sender.anchor_writer.written_bytes if self._sender else 0

    def state_dict(self) -> PublisherState:
        """Return what to save in a checkpoint of the trainer: the run, and the last version that was committed.

        A dictionary of text and numbers, empty before the first version; `load_state_dict` accepts that too. With
        wait=False, versions that are not committed yet are not in it.
        """
        return state_of(last) if (last := self._last) else self._options.continues.copy()

    def load_state_dict(self, state: PublisherState) -> None:
        """Continue the run that a checkpoint of the trainer names, however far it has advanced since.

        The first publish checks that the location has this run, and in it the version of the checkpoint, unless that
        was pruned; if not, it raises RunReplacedError, RunForkedError or RunRolledBackError and publishes nothing. The
        next version is a patch to the newest one: version numbers increase, while the step goes back to the trainer's.
        In a team every rank loads a state, and that of rank 0 is checked.

        Raises:
            ValueError: this is not a state that `state_dict` returned; RuntimeError: this publisher has published
            already, or resumed the run. After a first publish that was refused it may be called.
        """
        if self._last is not None:
            raise RuntimeError(
                "load_state_dict was called after this publisher had published or resumed the run; create a new "
                "Publisher and call it before publish"
            )
        self._options.continues = checked_state(state)

    def hold(self, optimizer: Any) -> None:
        """Make an optimizer wait before each step until no comparison reads the weights any more.

            publisher = Publisher("s3://bucket/run", keep="host")
            publisher.hold(optimizer)

        With keep="host" and weights on a GPU, publish(wait=False) then returns at once, and the weights are compared
        during the next forward and backward pass, which needs two buffers of 256 MB on the GPU. The published tensors
        may then change only in the steps of optimizers that were passed to `hold`: pass all that change them, and do
        not publish buffers that a forward pass writes. If torch notices another write, the version fails with a
        StateError. publish(wait=True) and every other `keep` work as without `hold`, and the optimizer never waits for
        them.

        Args:
            optimizer: A `torch.optim.Optimizer`; call this once for each. `close` releases it.

        Raises:
            TypeError: it has no hooks before its steps; ClosedError: the publisher was closed.
        """
        self._guard.check_open()
        self._holds.add(optimizer, self._wait_until_compared)

    def _wait_until_compared(self) -> None:
        """Wait until no comparison reads the trainer's weights. In a forked process no thread does."""
        if self._sender is not None and not self._guard.is_forked:
            self._sender.wait_until_compared()

    def flush(self) -> None:
        """Wait until everything that was published is in the store, anchors too. In a team every rank calls it.

        Raises:
            The error of a version that failed, once, unless its future was read or a later version was committed.
            StoreError: an anchor could not be written; it is tried again with a later version if the error is
            retryable, and otherwise an anchor of the next epoch is written instead. FormatError: the same, because an
            anchor has changed on disk before it was uploaded. ClosedError: the publisher belongs to another process.
            RuntimeError: it was called by a callback of a future, or by a signal handler within publish.
        """
        self._guard.check_process()
        self._queue.check_caller("flush")
        if self._sender is not None:
            self._sender.finish("flush")

    def close(self) -> None:
        """Finish what is in progress, and stop. A publisher that is not closed finishes when the process ends.

        With publish_every, steps since the last version are not sent: their number is logged as a warning. Publish the
        last step with now=True to have it sent. In a team every rank calls it.

        Raises: as `flush`, once more. A second call does nothing.
        """
        if self._guard.is_forked:
            return
        self._queue.check_caller("close")
        if not self._queue.close():
            return
        if self._cadence.every != 1 and self._cadence.waiting:
            text = "The last %d steps are in no version, due to publish_every=%r. Publish the last step with now=True."
            logger.warning(text, self._cadence.waiting, self._cadence.every)
        try:
            if self._sender is not None:
                self._sender.finish("close")
        finally:
            self._wait_until_compared()
            self._holds.release()
            if self._sender is not None:
                self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as e:
            if kind is None:
                raise
            logger.warning("Closing the publisher failed as well: %s: %s", type(e).__name__, e)
