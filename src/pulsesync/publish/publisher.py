"""The trainer's end: find what changed, encode it, write the body, then create the record that commits the version.

    with Publisher("s3://bucket/run") as pub:
        for step in range(steps):
            train_one_step(model)
            pub.publish(model, step=step, wait=False)      # returns as soon as the weights are compared

The version that was committed last is the base of the next one, and the only copy of the weights that is kept.

If a version that was published with wait=False fails, the error is logged, and raised by the next `publish`, by `flush`
and by `close`, once by each, until a later version is committed, which contains its steps. `publish` raises a
`retryable` error of the store only when max_behind consecutive versions have failed, because each version retries.
"""

import logging
import reprlib
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, overload

from pulsesync.core import arguments
from pulsesync.core.process_guard import ProcessGuard
from pulsesync.core.scratch import ScratchFolder
from pulsesync.core.threads import if_cancelled, outlives_threads, start, submit
from pulsesync.errors import AnotherPublisherError, ClosedError, StateError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_VERSION, Manifest
from pulsesync.format.signature import SigningKey, check_signing_key
from pulsesync.group.collective import SoloTeam, Team
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.baseline import Keep, RankBase, baseline_for, check_keep
from pulsesync.publish.cadence import Cadence, Every
from pulsesync.publish.companions import Files
from pulsesync.publish.costs import AnchorCodecChoice, AnchorCosts, LinkSpeed, PatchCosts
from pulsesync.publish.failures import Caller
from pulsesync.publish.lease import PublisherLease
from pulsesync.publish.lifecycle import SendQueue
from pulsesync.publish.pending import PendingVersion, PublishReport
from pulsesync.publish.records import RunRecords
from pulsesync.publish.reporting import PublishEvents
from pulsesync.publish.resume import PublisherState
from pulsesync.publish.team import TeamRounds
from pulsesync.publish.writer import RunWriter, WriterOptions
from pulsesync.run.reader import CACHE_BYTES, location_of
from pulsesync.run.spool import Outbox
from pulsesync.state.sharding import Shards
from pulsesync.state.views import Cast, read_cast
from pulsesync.store import CachedStore, Location, open_store
from pulsesync.store.base import is_local

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
        anchor_every: An anchor is written when the patches since the last one add up to this fraction of its bytes.
        anchor_codec: How anchors are written: "dense", which takes about two thirds of the bytes; "raw", the weights as
            they are; "auto": "raw" where sending the additional bytes takes less time than packing, as measured.
        spool: A folder that only this trainer uses. Bodies are kept in it for a restart, and anchors until they are
            uploaded; a temporary folder if not given.
        keep: Where the copy of the last version is, for tensors on a GPU: "device", on the GPU too, which is the
            default; "host", in pinned host memory, in which case `hold` overlaps the transfer with the next step; or
            "hook": no copy is kept, and the caller passes the old weights to every publish, see `device.hook`.
        executor: Encodes and sends in the background; None: one thread for versions and one for anchors. It is not
            shut down by the publisher.
        epoch_patches: As for a `Subscriber`.
        team: The processes that publish together, each with its shards; None: this process alone. `ShardedPublisher`
            is a publisher with a team.
        take_over: Continue the run although another publisher has its lease: the first publish makes that publisher
            stop, and waits up to 10 s for its answer. Otherwise the first publish waits until that lease ends, for 60 s
            at most, and raises if the other publisher turns out to be alive.

    Raises:
        ValueError: an argument is not one of its choices, or there is no store for the location.
    """

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
        anchor_every: float = 1.0,
        anchor_codec: AnchorCodecChoice = "auto",
        spool: str | Path | None = None,
        keep: Keep | None = None,
        executor: Executor | None = None,
        epoch_patches: int = EPOCH_PATCHES,
        team: Team | None = None,
        take_over: bool = False,
    ) -> None:
        check_keep(keep)
        if keep == "hook" and publish_every != 1:
            raise ValueError(
                "keep='hook' publishes every step, because there is no base to compare a later step with; leave out "
                "publish_every="
            )
        if codec not in get_args(patch.CodecName):
            raise ValueError(f"codec must be one of {', '.join(map(repr, get_args(patch.CodecName)))}; got {codec!r}")
        if anchor_codec not in get_args(AnchorCodecChoice):
            choices = ", ".join(map(repr, get_args(AnchorCodecChoice)))
            raise ValueError(f"anchor_codec must be one of {choices}; got {anchor_codec!r}")
        if link is not None:
            arguments.number("link", link, what="None or a number of bits per second", above=0)
        min_tile = arguments.whole("min_tile", min_tile, 1, what="a number of weights")
        anchor_every = arguments.number("anchor_every", anchor_every, what="a fraction of the anchor's bytes")
        arguments.mapping("grid", grid, "names of tensors to two sizes")
        arguments.mapping("files", files, "names of files to their bytes or paths")
        check_signing_key(signing_key)
        self._anchor_codec: AnchorCodecChoice = anchor_codec
        self._link = link
        self.team: Team = team or SoloTeam()
        self.keep: Keep | None = keep
        self.cast = read_cast(cast)
        self.store = open_store(location)
        self._scratch: ScratchFolder | None = None  # made by the first publish, if no spool is given
        self._spool = None if spool is None else arguments.folder("spool", spool)
        if self._spool:
            self.store = CachedStore(self.store, self._spool / "cache", CACHE_BYTES)
        self._given = executor
        self._sender, self._anchor_sender = (
            ThreadPoolExecutor(1, thread_name_prefix=name) if executor is None else executor
            for name in ("pulse-send", "pulse-anchor")
        )
        self._cadence = Cadence(publish_every, max_behind)
        self._lowest_skipped: int | None = None  # of the steps since the last version
        self.events = PublishEvents(location_of(self.store), self.team)
        self._guard = ProcessGuard(
            "Publisher",
            forked=" and does not have its threads; create a new Publisher in the child, or start the process with "
            "'spawn'",
            closed="is closed; create a new one, which resumes the run",
        )
        self._queue = SendQueue(max_behind, self.team.size == 1, self._guard, self.events.ended)
        self._lease = PublisherLease(self.store, take_over)
        weakref.finalize(self, self._lease.close)
        self._holds: list[Any] = []  # hooks of optimizers, until the publisher is closed
        self._writer: RunWriter  # made by the first publish
        self._records = RunRecords(self.store, signing_key, epoch_patches)
        self._options = WriterOptions(
            codec,
            dict(grid or {}),
            min_tile,
            dict(files or {}),
            anchor_every,
            resume,
            warns_of_fp32=cast is None,
        )

    # Publishing

    @overload
    def publish(
        self,
        source: Any,
        *,
        step: int = ...,
        wait: Literal[True] = ...,
        now: bool = ...,
        coalesce: bool = ...,
        old: Any = ...,
    ) -> PublishReport: ...
    @overload
    def publish(
        self,
        source: Any,
        *,
        step: int = ...,
        wait: Literal[False],
        now: bool = ...,
        coalesce: bool = ...,
        old: Any = ...,
    ) -> "Future[PublishReport]": ...
    def publish(
        self,
        source: Any,
        *,
        step: int = 0,
        wait: bool = True,
        now: bool = False,
        coalesce: bool = True,
        old: Any = None,
    ) -> "PublishReport | Future[PublishReport]":
        """Publish a module, state dict or mapping of arrays as the next version; the first one in full.

        With wait=False it returns as soon as the source has been compared and may change again (on a GPU, by work that
        is launched later in the same stream, or in one that waits for it; with `hold`, by the next step of an
        optimizer). Encoding and sending happen in the background, and the future gives the report. A version that is
        being sent is not changed; one that is still queued is replaced, and its future gives the report of the version
        that contains it.

        A failure in the background is logged. If the caller has not read it from the future, the next publish raises it
        before it compares anything: that call publishes nothing, and may be repeated. A StoreError that is `retryable`
        is raised only when max_behind consecutive versions have failed, because each version retries. A failure whose
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
            old: the weights of the last version, if no copy is kept (keep="hook").

        Raises:
            StateError: tensors were added, removed, reshaped or tied differently, or the first weights do not continue
            the run (see `resume`); AnotherPublisherError: another publisher writes to this run; RunChangedError: the
            run is not that of `load_state_dict`; ClosedError: the publisher was closed, belongs to another process, or
            the interpreter is ending; StoreError, or another error of an earlier version; RuntimeError: it was called
            by a signal handler within another call, or by a callback that would wait for itself. After any exception
            the base is still the last committed version: the next version contains the changes of both steps.
        """
        began = time.perf_counter()
        if old is not None and self.keep != "hook":
            raise ValueError("old= is for a Publisher with keep='hook'; this one keeps a copy itself: leave old= out")
        if not coalesce and self._cadence.every != 1:
            raise ValueError(
                f"coalesce=False makes a version of every step, but publish_every={self._cadence.every!r} makes one of "
                "several; leave one of them out"
            )
        if self._queue.is_alone:
            step = checked_step(step)
        self._guard.check_process()  # before the lock, which may stay locked for ever in a forked process
        caller_passes_old_weights = self.keep == "hook"
        self._queue.check_caller("publish", waits=wait or not coalesce or caller_passes_old_weights)
        with self._queue.call(alone=not coalesce, idle=lambda: caller_passes_old_weights or self._base is None):
            self._check_interpreter()
            self._start()
            self._queue.raise_failure("publish")
            writer = self._writer
            if caller_passes_old_weights and self._queue.failures.has_lost_weights:
                writer.base = None  # no later patch can contain the failed step: a new root is published next
            version = PendingVersion(self._queue.count_call(), step, alone=not coalesce, waits=wait)
            is_due = self._cadence.step(time.monotonic(), version.call)
            if (rejection := self._queue.rejection(version.call)) is not None:
                return _failed(rejection, wait)
            if not (is_due or now) and writer.base is not None:
                return self._skipped(writer.base.state.layout, step, wait, began)
            version.coalesced, version.earlier_step = self._cadence.published(), self._lowest_skipped
            self._lowest_skipped = None
            inline = writer.base is None
            self._compare(version, source, old, keeps_source=wait or inline)
            version.blocked_s = time.perf_counter() - began
            future, starts = self._queue.put(version, awaited=wait or inline)
            at_start = writer.base is not None and writer.base.last.next_patch[1] == self._records.epoch_patches
        if starts:
            self._start_sender(inline)
        if version.fault is not None:
            future.was_read = True  # by this exception
            raise version.fault
        if caller_passes_old_weights and at_start:
            future.wait()  # an anchor may be due, which reads the source
        if not (wait or inline):
            return future
        try:
            report = future.result()
        finally:
            future.awaited = False  # an interrupted caller does not get a later failure from this call
        if wait and version.is_root:
            written = report.payload_bytes + self._finish_anchor()
            report = replace(report, payload_bytes=written, anchor=self._writer.anchors.writer.choice)
        return report if wait else future

    def _compare(self, version: PendingVersion, source: Any, old: Any, keeps_source: bool) -> None:
        """Read and compare a source. In a team, an error is not raised here: the sender reports it to all ranks."""
        writer = self._writer
        try:
            version.step = checked_step(version.step)
            if writer.base is None or writer.baseline is None:
                self._wait_until_compared()
                writer.baseline = baseline_for(source, self.keep)
            shards = writer.baseline.read(source, self.cast)
            if self._queue.is_alone:
                check_complete(shards)
            if keeps_source:
                version.shards, version.source = shards, source
            writer.compare(version, shards, old, later=bool(self._holds) and not version.waits)
        except Exception as e:
            if self._queue.is_alone:
                self.events.failed(version.step, e)
                raise
            version.fault = e

    def _start_sender(self, inline: bool) -> None:
        """Have queued versions sent: in the background, or in this thread if it has to wait for them anyway."""
        if inline:
            self._send()
            return
        try:
            if_cancelled(submit(self._sender, self._send), self._revive)
        except RuntimeError:  # no thread can be started: the caller sends, and waits for it
            self._send()

    def _send(self) -> None:
        """Send queued versions until there are none. Raises nothing: an exception of this thread would be lost."""
        while (version := self._queue.take()) is not None:
            try:
                report = self._writer.write(version)
            except BaseException as e:  # noqa: BLE001 - raised by the futures and by the next call
                writer = self._writer
                if isinstance(e, AnotherPublisherError):
                    self._lease.close()
                self._queue.failed(version, e, writer.resolve_at_once, is_lost=writer.rounds.is_lost)
            else:
                self._queue.completed(report)
            del version  # an exception's traceback refers to this frame, for as long as the future is kept

    def _revive(self) -> None:
        """Run the sender in a new thread: an executor was shut down with cancel_futures=True before it ran it.

        If no thread can be started, what is queued fails, and the next publish tries again.
        """
        try:
            start(self._send)  # not with submit: the thread that shuts an executor down has its lock
        except RuntimeError as e:
            self._queue.start_failed(e)

    def _skipped(self, layout: Layout, step: int, wait: bool, began: float) -> "PublishReport | Future[PublishReport]":
        """Return the report of a step that is skipped: the next version contains its changes."""
        blocked_s = time.perf_counter() - began
        if arguments.is_whole(step):  # otherwise the next version of a team says so on all ranks
            self._lowest_skipped = step if self._lowest_skipped is None else min(step, self._lowest_skipped)
        report = PublishReport(None, step, 0, layout.size, 0, layout.size_bytes, 0, blocked_s, 0.0, 0.0)
        if wait:
            return report
        done: Future[PublishReport] = Future()
        done.set_result(report)
        return done

    def _start(self) -> None:
        """Create what belongs to the process that publishes, at its first publish: a fork before that does no harm."""
        if self._guard.process is not None:
            return
        if self._spool is None:
            self._scratch = ScratchFolder()
            self._spool = self._scratch.path
        outbox = Outbox(self._spool / ("outbox" if self._queue.is_alone else f"outbox-{self.team.rank}"))
        queue, link = self._queue, LinkSpeed(self._link, is_local(self.store))
        anchors = AnchorWriter(
            self.store,
            outbox,
            self._sign,
            self._anchor_sender,
            queue.wait_until_quiet,
            ranks=self.team.size,
            costs=AnchorCosts(self._anchor_codec, link),
            created=self.events.anchored,
        )
        costs = PatchCosts(self._options.codec, link)
        self._writer = RunWriter(
            self._records,
            TeamRounds(self.team),
            queue,
            self._cadence,
            anchors,
            costs,
            self._options,
            self.events,
            self._lease,
        )
        self._guard.claim()

    def _sign(self, record: Manifest) -> bytes:
        """Sign a record of an anchor. As a bound method, it keeps this publisher and its temporary folder alive."""
        return self._records.sign(record)

    def _check_interpreter(self) -> None:
        """Raises: ClosedError, if nothing can be sent any more."""
        if outlives_threads():
            raise ClosedError(
                "the interpreter is shutting down and waits for no more threads, so nothing can be published; publish "
                "and close before the main thread ends, not in an atexit handler or a daemon thread"
            )

    @property
    def _base(self) -> RankBase | None:
        return self._writer.base if self._guard.process else None

    @property
    def _last(self) -> Manifest | None:
        return self._writer.last if self._guard.process else None

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
    def base_bytes(self) -> int:
        """The bytes of the last version that this process keeps."""
        return sum(flat.nbytes for flat in base.state.flats.values()) if (base := self._base) else 0

    @property
    def anchor_bytes(self) -> int:
        """The bytes of anchors that this process has uploaded so far."""
        return self._writer.anchors.writer.written_bytes if self._guard.process else 0

    def state_dict(self) -> PublisherState:
        """Return what to save in a checkpoint of the trainer: the run, and the last version that was committed.

        A dictionary of text and numbers, empty before the first version; `load_state_dict` accepts that too. With
        wait=False, versions that are not committed yet are not in it.
        """
        if (last := self._last) is None:
            return self._options.continues.copy()
        return {"run": last.run, "version": last.version, "step": last.step, "digest": last.digest}

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
        if not isinstance(state, dict) or {name: type(value) for name, value in state.items()} not in (
            {},
            PublisherState.__annotations__,
        ):
            raise ValueError(
                f"load_state_dict needs what state_dict() of a Publisher returned, a dictionary with "
                f"{', '.join(PublisherState.__annotations__)}, or an empty one; got {reprlib.repr(state)}"
            )
        self._options.continues = state.copy()

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

        The optimizer is released when the publisher is closed.

        Args:
            optimizer: A `torch.optim.Optimizer`; call this once for each.

        Raises:
            TypeError: it has no hooks before its steps; ClosedError: the publisher was closed.
        """
        self._guard.check_open()
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            raise TypeError(
                "hold needs an optimizer with register_step_pre_hook, as every torch.optim.Optimizer has; got "
                f"{type(optimizer).__name__}"
            )
        self._holds.append(register(lambda *_: self._wait_until_compared()))

    def _wait_until_compared(self) -> None:
        """Wait until no comparison reads the trainer's weights. In a forked process no thread does."""
        if self._guard.process is not None and not self._guard.is_forked and self._writer.baseline is not None:
            self._writer.baseline.wait()

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
        self._finish("flush")

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
            logger.warning(
                "The last %d steps are in no version, due to publish_every=%r. Publish the last step with now=True.",
                self._cadence.waiting,
                self._cadence.every,
            )
        try:
            self._finish("close")
        finally:
            self._wait_until_compared()
            for hook in self._holds:
                hook.remove()
            for executor in (self._sender, self._anchor_sender):
                if executor is not self._given:
                    executor.shutdown()
            if self._scratch:
                self._scratch.close()
            self._lease.close()
            self._lease.join()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as e:
            if kind is None:
                raise
            logger.warning("Closing the publisher failed as well: %s: %s", type(e).__name__, e)

    def _finish(self, caller: Caller) -> None:
        self._send()  # what an interrupted publish has queued, and started no sender for
        self._queue.wait()
        try:
            self._finish_anchor()
        except Exception:
            self._queue.raise_failure(caller)  # the failure of a version is raised first, then that of an anchor
            raise
        self._queue.raise_failure(caller)

    def _finish_anchor(self) -> int:
        """Wait for an anchor that is being written, unless the team has lost a rank."""
        return (
            0
            if self._guard.process is None or self._writer.rounds.is_lost
            else self._writer.anchors.finish(lambda: self._writer.base)
        )


def _failed(error: BaseException, wait: bool) -> "Future[PublishReport]":
    if wait:
        raise error
    future: Future[PublishReport] = Future()
    future.set_exception(error)
    return future


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
