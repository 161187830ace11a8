"""The trainer's end: find what changed, encode it, write the body, then create the record that makes it a version.

    with Publisher("s3://bucket/run") as pub:
        for step in range(steps):
            train_one_step(model)
            pub.publish(model, step=step, wait=False)      # returns as soon as the weights are compared

What was committed last is the base of the next version, and the only copy of the state that is kept.

A version that was published with wait=False and failed is logged, and raised by the next `publish`, by `flush` and by
`close`, once by each, until a later version is committed: that one contains it. A store's error that is `retryable` is
raised by `publish` only when max_behind versions in a row have failed, because each next version is the retry.
"""

import logging
import math
import operator
import os
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args, overload

from pulsesync.core.scratch import ScratchFolder
from pulsesync.core.threads import outlives_threads, start, submit
from pulsesync.core.types import TensorSpec
from pulsesync.errors import (
    AnotherPublisherError,
    ChainError,
    ClosedError,
    FormatError,
    NotFoundError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import patch, signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_VERSION, FileRef, Manifest
from pulsesync.format.signature import SigningKey
from pulsesync.publish.anchors import AnchorWriter, path_since_anchor
from pulsesync.publish.baseline import Baseline, Difference, Keep, SourceView, baseline_for
from pulsesync.publish.cadence import Cadence, Every, SentVersion
from pulsesync.publish.commit import Draft, RunTip, create, root_record
from pulsesync.publish.companions import Files, put_companions
from pulsesync.run import keys
from pulsesync.run.reader import CACHE_BYTES, RunReader
from pulsesync.run.spool import Outbox
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.live import AnyState
from pulsesync.store import CachedStore, Store, open_store

_Raiser = Literal["publish", "flush", "close"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishReport:
    """What a publish did. A report of steps that were folded is that of the version they went into."""

    version: int | None  # None: nothing was sent, the step goes into a later version
    step: int
    changed: int  # weights
    total: int  # weights
    payload_bytes: int  # all that the version added to the store
    full_bytes: int  # what the whole state would be
    coalesced: int  # publishes before this one that are in this version
    blocked_s: float  # the caller was held
    encode_s: float
    store_s: float

    @property
    def density(self) -> float:
        return self.changed / self.total if self.total else 0.0


class _PublishFuture(Future[PublishReport]):
    """A future that knows whether its caller has read how the publish ended."""

    def __init__(self, awaited: bool) -> None:
        super().__init__()
        self.awaited = awaited  # the caller waits for it within publish
        self.was_read = False
        self.set_running_or_notify_cancel()  # it cannot be cancelled: the base moves with it

    def result(self, timeout: float | None = None) -> PublishReport:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.was_read = True
        return error


@dataclass
class _PendingVersion:
    """A state that is to become a version: how it differs from the base it was compared with."""

    step: int
    base: int  # version
    difference: Difference
    coalesced: int
    alone: bool  # no later step is coalesced with it
    blocked_s: float = 0.0
    futures: list[_PublishFuture] = field(default_factory=list)
    fault: BaseException | None = None  # what kept it from being sent
    record: Manifest | None = None  # once it was sent


@dataclass
class _Failure:
    """A version that was not committed, until a later one is. Keeps none of the memory that the version took."""

    record: Manifest | None
    futures: list[_PublishFuture]
    error: BaseException
    traceback: TracebackType | None
    raised_by: set[_Raiser] = field(default_factory=set)

    @property
    def was_read(self) -> bool:
        return any(future.was_read for future in self.futures)

    @property
    def is_retried(self) -> bool:
        """Whether the next version is the retry: the store may work again by then."""
        return isinstance(self.error, StoreError) and self.error.retryable


class Publisher:
    """Publishes a changing state into a run: a new one, or an existing one, which is resumed where it ended.

    A publisher belongs to the process that first publishes with it. In a process forked from that one, `publish` and
    `flush` raise ClosedError and `close` does nothing. When the interpreter ends (by return, `sys.exit` or an
    exception) everything that was published is sent first; a signal that ends the process does not wait for it.

    Args:
        location: A path or URL of the run, or a store.
        codec: How patches are coded; "auto" chooses the smallest for each.
        cast: The dtype that workers use, for all FP32 tensors or by name pattern.
        grid: How tensors are cut into tiles, by name pattern: rows and columns, each as a number of even pieces or as
            the borders themselves.
        min_tile: No even piece of the grid has fewer weights than this.
        signing_key: Signs the records. A signed run can be resumed only with its key.
        files: Small files that belong to the model, as bytes or paths. The `config` and `generation_config` of a source
            that can write them (`to_json_string`, as Hugging Face models can) are added under the names that they have
            in a checkpoint, and those of a run that is resumed. Of the same name, the file given here takes precedence,
            then the source's, then the run's.
        publish_every: Steps in a version; "auto" coalesces steps as the link requires.
        max_behind: The most steps that "auto" puts into a version.
        anchor_every: An anchor is written when the patches since the last one have this fraction of its bytes.
        spool: A folder of this trainer alone, in which bodies are kept for a restart, and anchors until they are
            uploaded; a temporary one if not given.
        keep: Where the copy of the last version is, for tensors on a GPU: "device", on the GPU too, which is the
            default; "host", in pinned host memory; or "hook", nowhere, and the caller passes the old weights to every
            publish, see `device.hook`.
        executor: Encodes and sends in the background; None: a thread for versions and one for anchors. It is not shut
            down here.
        epoch_patches: As for a `Subscriber`.

    Raises:
        ValueError: an argument is not one of its choices, or a location that no store is for.
    """

    def __init__(
        self,
        location: str | Store,
        *,
        codec: patch.CodecName = "auto",
        cast: str | Mapping[str, str] | None = None,
        grid: layouts.Grid | None = None,
        min_tile: int = 1 << 20,
        signing_key: SigningKey | None = None,
        files: Files | None = None,
        publish_every: Every = 1,
        max_behind: int = 16,
        anchor_every: float = 1.0,
        spool: str | Path | None = None,
        keep: Keep | None = None,
        executor: Executor | None = None,
        epoch_patches: int = EPOCH_PATCHES,
    ) -> None:
        if keep not in (None, *get_args(Keep)):
            raise ValueError(f"keep must be one of {', '.join(map(repr, get_args(Keep)))}; got {keep!r}")
        if keep == "hook" and publish_every != 1:
            raise ValueError("keep='hook' publishes every step: there is no base that could wait for more")
        if codec not in get_args(patch.CodecName):
            raise ValueError(f"codec must be one of {', '.join(map(repr, get_args(patch.CodecName)))}; got {codec!r}")
        self.store = open_store(location) if isinstance(location, str) else location
        self.codec: patch.CodecName = codec
        self.cast = {"*": cast} if isinstance(cast, str) else dict(cast or {})
        self.grid, self.min_tile = dict(grid or {}), min_tile
        self.signing_key, self.anchor_every = signing_key, anchor_every
        self._files = dict(files or {})
        self._epoch_patches = epoch_patches
        self._pace = Cadence(publish_every, max_behind)
        self._scratch: ScratchFolder | None = None  # made by the first publish, if no spool is given
        self._spool = Path(spool) if spool else None
        if self._spool:
            self.store = CachedStore(self.store, self._spool / "cache", CACHE_BYTES)
        self._given = executor
        self._lost: AnotherPublisherError | None = None
        self._sender, self._behind = (
            ThreadPoolExecutor(1, thread_name_prefix=name) if executor is None else executor
            for name in ("pulse-send", "pulse-anchor")
        )
        self._quiet = threading.Event()  # set while nothing is being sent
        self._quiet.set()
        self._anchors: AnchorWriter  # made by the first publish
        self._process: int | None = None  # that published first
        self._lock = threading.RLock()  # over all that follows
        self._taken = threading.Condition(self._lock)  # the sender took what was pending, or has nothing more to do
        self.keep: Keep | None = keep
        self._bases: Baseline | None = None  # how the base is kept, once a source was seen
        self._tip: RunTip | None = None  # the end of the run, once it is known
        self._refs: tuple[FileRef, ...] = ()
        self._path_bytes = 0.0  # patches since the newest anchor
        self._pending: _PendingVersion | None = None
        self._latest: _PublishFuture | None = None
        self._sending = False
        self._sender_thread: int | None = None
        self._failures: list[_Failure] = []  # since the last commit
        self._closed = False

    # For people

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
        """Publish a module, state dict or mapping of arrays as the next version; the first one whole.

        With wait=False it returns as soon as source has been compared and may change again (on a GPU, by what is
        launched later in the same stream, or in one that waits for it); encoding and sending happen in the background,
        and the future gives the report. A version that is being sent is not disturbed; one that is still queued is
        replaced, and its future gives the report of the version that contains it.

        A failure in the background is logged. If the caller has not read it from the future, the next publish raises it
        before it compares anything: that call publishes nothing, and may be repeated. A StoreError that is `retryable`
        is raised only when max_behind versions in a row have failed, because each next version is the retry. A failure
        that a later version has made up for is not raised any more.

        The callbacks of a future run on the thread that sends. A callback may publish with wait=False, if every step
        may be coalesced and a base is kept; what would wait for the sender raises RuntimeError there.

        With publish_every, steps that are skipped are in the next version. Publish the last step with now=True: when
        the publisher is closed, steps that are still in no version are not sent.

        Args:
            source: what is published.
            step: the trainer's step, for the record.
            wait: return the report when the version is committed, not a future.
            now: publish this step whatever publish_every says.
            coalesce: False makes a version of this step alone. No other step is coalesced with it, so publish waits
                while a version is queued behind the one being sent: at most two are in memory. It excludes
                publish_every.
            old: the weights of the last version, where none are kept (keep="hook").

        Raises:
            StateError: tensors came, went, changed shape or tie; AnotherPublisherError: another publisher writes to
            this run; ClosedError: the publisher was closed, belongs to another process, or the interpreter is ending;
            StoreError, or what else stopped an earlier version; RuntimeError: it was called by a signal handler within
            another call, or by a callback that would wait for itself. After any exception the base is still the last
            version committed: the next one covers both.
        """
        began = time.perf_counter()
        step = checked_step(step)
        if old is not None and self.keep != "hook":
            raise ValueError("a base is kept: old weights are handed over with keep='hook' alone")
        if not coalesce and self._pace.every != 1:
            raise ValueError(
                f"coalesce=False makes a version of every step, publish_every={self._pace.every!r} makes one of "
                "several; leave one of them out"
            )
        self._check_process()  # before the lock, which a thread of the parent may hold for ever
        self._check_caller("publish", waits=wait or not coalesce or self.keep == "hook")
        if self.keep == "hook":
            self._wait_for_last()
        with self._lock:
            if self._pending is not None and self._pending.alone and self._is_sender:
                raise _waits_for_itself("publish after a step with coalesce=False")
            self._taken.wait_for(lambda: self._pending is None or (coalesce and not self._pending.alone))
            self._check_open()
            self._start()
            if self._lost:
                raise self._lost
            self._raise_failure("publish")
            due = self._pace.step(time.monotonic()) or now
            if self._tip is not None and not due:
                return self._skipped(self._tip, step, wait, began)
            bases = self._bases or baseline_for(source, self.keep)
            shown, ties = bases.read(source, self.cast)
            specs = [shown.spec(name) for name in shown.views]
            if self._tip is None:
                last = self._open(source, bases, shown, specs, ties)
                self._bases = bases
                if self._tip is None:
                    return self._publish_root(last, shown, specs, ties, step, wait, began)
            same_tensors(self._tip.state.layout, specs, ties)
            tip = self._tip
            difference = self._compare(bases, tip, shown, old)
            job = _PendingVersion(step, tip.last.version, difference, self._pace.published(), alone=not coalesce)
            future = self._enqueue(tip, job, wait, began)
            at_start = tip.last.next_patch[1] == self._epoch_patches
        if self.keep == "hook" and at_start:
            wait_for([future])  # an anchor may be due, which reads the source
        if not wait:
            return future
        try:
            return future.result()
        finally:
            future.awaited = False  # an interrupted caller does not hear of a failure that comes later

    def _check_open(self) -> None:
        """Raises: ClosedError, if nothing can be sent any more."""
        if self._closed:
            raise ClosedError("this Publisher is closed; create a new one, which resumes the run")
        if outlives_threads():
            raise ClosedError(
                "the interpreter is shutting down and waits for no more threads, so nothing can be published; publish "
                "and close before the main thread ends, not in an atexit handler or a daemon thread"
            )

    def _check_process(self) -> None:
        """Raises: ClosedError, in a process that was forked from the one that publishes."""
        if self._is_forked:
            raise ClosedError(
                f"this Publisher belongs to process {self._process} and this is process {os.getpid()}, forked from it, "
                "where its threads do not run; create a new Publisher here, or start the process with 'spawn'"
            )

    def _check_caller(self, call: str, waits: bool = True) -> None:
        """Raises: RuntimeError, if a call would wait for what only this thread can do."""
        if self._is_sender:
            if waits:
                raise _waits_for_itself(call)
            return
        try:
            self._taken.notify(0)  # wakes nobody; raises if this thread does not have the lock
        except RuntimeError:
            return
        raise RuntimeError(
            f"{call} was called within publish, by a signal handler that interrupted it, and would wait for it for "
            "ever; raise SystemExit in the handler instead, and close the publisher where that arrives"
        )

    @property
    def _is_sender(self) -> bool:
        return self._sender_thread == threading.get_ident()

    def _start(self) -> None:
        """Make what belongs to the process that publishes, at its first publish: a fork before that does no harm."""
        if self._process is None:
            if self._spool is None:
                self._scratch = ScratchFolder("spool")
                self._spool = self._scratch.path
            outbox = Outbox(self._spool / "outbox")
            self._anchors = AnchorWriter(self.store, outbox, self._sign, self._behind, self._quiet)
            self._process = os.getpid()

    @property
    def _is_forked(self) -> bool:
        return self._process not in (None, os.getpid())

    def _compare(self, bases: Baseline, tip: RunTip, shown: SourceView, old: Any) -> Difference:
        try:
            return bases.compare(tip.state, shown, self.codec, tip.last, old)
        except BaseException as e:
            if self.keep == "hook" and not isinstance(e, ValueError | StateError):
                self._tip = None  # what was handed over is lost, and no later one goes on from the last version
            raise

    def _wait_for_last(self) -> None:
        """Without a base nothing is coalesced: the last version goes first; if it failed, a new root comes next."""
        with self._lock:
            self._taken.wait_for(lambda: not self._sending)  # the sender is done with its source
            if self._failures:
                self._tip = None

    @property
    def version(self) -> int | None:
        """The last version that was committed."""
        return self._tip.last.version if self._tip else None

    @property
    def digest(self) -> str | None:
        """The state digest of the last version that was committed."""
        return self._tip.last.digest if self._tip else None

    @property
    def run(self) -> str | None:
        """The id of the run; None before the first publish."""
        return self._tip.last.run if self._tip else None

    @property
    def anchor_bytes(self) -> int:
        """What anchors have cost so far."""
        return self._anchors.written_bytes if self._process else 0

    def flush(self) -> None:
        """Wait until everything that was published is in the store, anchors too.

        Raises:
            What stopped a version, once, unless its future was read or a later version was committed. StoreError: an
            anchor could not be written; it is tried again with a later version if the error is retryable, and otherwise
            the next epoch gets one. FormatError: so too, an anchor has changed on disk before it was uploaded.
            ClosedError: the publisher belongs to another process. RuntimeError: it was called by a callback of a
            future, or by a signal handler within publish.
        """
        self._check_process()
        self._check_caller("flush")
        self._finish("flush")

    def close(self) -> None:
        """Finish what is in progress, and stop. A publisher that is not closed finishes when the process ends.

        With publish_every, steps since the last version are in none: their number is logged as a warning. Publish the
        last step with now=True to have it sent.

        Raises: what `flush` does, once more. A second call does nothing.
        """
        if self._is_forked:
            return
        self._check_caller("close")
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._pace.every != 1 and self._pace.waiting:
                logger.warning(
                    "The last %d steps are in no version: publish_every=%r. Publish the last step with now=True.",
                    self._pace.waiting,
                    self._pace.every,
                )
        try:
            self._finish("close")
        finally:
            for executor in (self._sender, self._behind):
                if executor is not self._given:
                    executor.shutdown()
            if self._scratch:
                self._scratch.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as e:
            if kind is None:
                raise
            logger.warning("Closing the publisher failed as well: %s: %s", type(e).__name__, e)

    def _finish(self, caller: _Raiser) -> None:
        while (latest := self._latest) is not None and not latest.done():
            wait_for([latest])
        try:
            if self._process:
                self._anchors.wait()
        except Exception:
            self._raise_failure(caller)  # a version comes before an anchor
            raise
        self._raise_failure(caller)

    def _raise_failure(self, caller: _Raiser) -> None:
        """Raise the first failure since the last commit that the caller has neither read nor been raised here."""
        with self._lock:
            new = [failure for failure in self._failures if caller not in failure.raised_by and not failure.was_read]
            if caller == "publish" and len(new) < self._pace.longest:
                new = [failure for failure in new if not failure.is_retried]
            if not new:
                return
            for failure in self._failures:
                failure.raised_by.add(caller)
        raise new[0].error.with_traceback(new[0].traceback)  # without the frames of whom it was raised to before

    # Taking up a run

    def _open(
        self, source: Any, bases: Baseline, shown: SourceView, specs: list[TensorSpec], ties: Mapping[str, str]
    ) -> Manifest | None:
        """Find the end of the run, if there is one, and rebuild the state there: from then on it is the base."""
        last = find_last(self._records(), self.signing_key)
        self._refs = put_companions(self.store, self._files, source, last)
        if last is None:
            return None
        layout = self._records().layout(last.layout)
        same_tensors(layout, specs, ties)
        self._anchors.newest = last.anchor
        self._anchors.finish(last.run)
        state = self._rebuild(last, layout, bases, shown)
        if state is None and self._anchors.busy:
            try:
                self._anchors.wait()  # the path may begin at an anchor that was still in the outbox
            except (StoreError, FormatError):
                pass  # logged where the anchor is written
            else:
                with suppress(StoreError):
                    state = self._rebuild(last, layout, bases, shown)
        if state is not None:
            self._tip = RunTip(self.store, self._sign, last, state)
            self._path_bytes = self._path_since_anchor(last)
            self._maybe_anchor(self._tip)
        return last

    def _rebuild(self, last: Manifest, layout: Layout, bases: Baseline, shown: SourceView) -> AnyState | None:
        """The state of the last version, or None if no way leads there from what the trainer, spool and store have."""
        tensors = bases.tensors(layout, shown)
        if tensors is None:
            return None
        trust = self.signing_key.public if self.signing_key else None
        reader = Subscriber(self.store, trust=trust, undo=0, epoch_patches=self._epoch_patches)
        try:
            reader.sync(tensors, version=last.version)
        except SignatureError:
            raise
        except (ChainError, NotFoundError, FormatError, VerificationError):
            return None
        return bases.adopt(reader.state) if reader.state and reader.version == last.version else None

    def _path_since_anchor(self, last: Manifest) -> float:
        """Bytes that a joiner fetches beside the anchor; without one, infinitely many."""
        newest, path_bytes = path_since_anchor(last, self._records().look)
        if newest is not None:
            self._anchors.newest = max(newest, self._anchors.newest or 0)
        return path_bytes

    # Roots

    def _publish_root(
        self,
        after: Manifest | None,
        shown: SourceView,
        specs: list[TensorSpec],
        ties: Mapping[str, str],
        step: int,
        wait: bool,
        began: float,
    ) -> "PublishReport | Future[PublishReport]":
        """Publish a state that has no base. Its anchor is written behind, and waited for if that is asked."""
        layout = layouts.make((layouts.cut(spec, self.grid, self.min_tile) for spec in specs), ties)
        assert self._bases is not None
        state = self._bases.copy(layout, shown)
        copied = time.perf_counter()
        manifest = root_record(
            after, step, layout.id, state.digest, self._anchors.newest, self._refs, self._epoch_patches
        )
        self.store.put(keys.layout_key(layout.id), layout.data)
        try:
            written = len(layout.data) + create(self.store, manifest, self._sign(manifest), after)
        except AnotherPublisherError as e:
            self._lost = e
            raise
        self._tip, self._path_bytes = RunTip(self.store, self._sign, manifest, state), math.inf
        self._failures.clear()
        self._pace.published()
        blocked_s = time.perf_counter() - began
        self._maybe_anchor(self._tip)
        if wait:
            self._anchors.wait()
            written += self._anchors.written_bytes
        stored = time.perf_counter()
        return _answer(
            report_of(layout, manifest, None, written, 0, blocked_s, copied - began, stored - copied), wait=wait
        )

    # Patches

    def _skipped(self, tip: RunTip, step: int, wait: bool, began: float) -> "PublishReport | Future[PublishReport]":
        """Nothing to do: the step is in the state, and the next version covers it."""
        layout, blocked_s = tip.state.layout, time.perf_counter() - began
        report = PublishReport(None, step, 0, layout.size, 0, layout.size_bytes, 0, blocked_s, 0.0, 0.0)
        return _answer(report, wait=wait)

    def _enqueue(self, tip: RunTip, job: _PendingVersion, wait: bool, began: float) -> _PublishFuture:
        """Have a difference from the base sent; it takes the place of one that has not been begun."""
        if self._pending:
            job.coalesced += 1 + self._pending.coalesced
            job.futures += self._pending.futures
        future = _PublishFuture(awaited=wait)
        job.futures.append(future)
        job.blocked_s = time.perf_counter() - began
        self._pending, self._latest = job, future
        if not self._sending:
            self._sending = True
            try:
                submit(self._sender, self._drain, tip).add_done_callback(lambda sender: self._revive(tip, sender))
            except RuntimeError:  # no thread can be started: the caller sends, and waits for it
                self._drain(tip)
        return future

    def _drain(self, tip: RunTip) -> None:
        """Send what is pending until nothing is: the sender's whole life. Raises nothing: nobody would see it."""
        self._sender_thread = threading.get_ident()
        while (job := self._take(tip)) is not None:
            self._attempt(tip, job)

    def _revive(self, tip: RunTip, sender: "Future[None]") -> None:
        """If an executor was shut down with cancel_futures=True before it ran the sender, run it in a new thread.

        Without one, what is pending fails, and the next publish tries again.
        """
        if not sender.cancelled():
            return
        try:
            start(lambda: self._drain(tip))  # not by submit: the thread that shuts an executor down has its lock
        except RuntimeError as e:
            with self._lock:
                job, self._pending, self._sending = self._pending, None, False
                self._taken.notify_all()
            if job is not None:
                self._fail(job, e)

    def _take(self, tip: RunTip) -> _PendingVersion | None:
        """The pending job, once it is known what it is a change of; None ends the sender."""
        with self._lock:
            fault = None
            try:
                if committed := tip.settle():
                    self._advance(tip, committed)
                    self._make_up_for(committed)
                    self._try_anchor(tip)
            except BaseException as e:  # noqa: BLE001 - the pending job fails with it
                fault = e
                logger.warning("The last version is not settled: %s: %s", type(e).__name__, e)
            job, self._pending = self._pending, None
            if job is None:
                self._sending, self._sender_thread = False, None
            else:
                job.fault = fault
            self._taken.notify_all()
            return job

    def _attempt(self, tip: RunTip, job: _PendingVersion) -> None:
        """Send a job, and report to those who wait for it."""
        try:
            if job.fault:
                raise job.fault
            self._quiet.clear()
            report = self._send(tip, job)
        except BaseException as e:  # noqa: BLE001 - for those who have the futures, and for the next call
            self._quiet.set()
            self._fail(job, e)
        else:
            self._quiet.set()
            self._try_anchor(tip)  # before the future is done: flush waits for both
            for future in job.futures:
                _complete(future, job.step, report)
        del job  # an exception's traceback refers to this frame, for as long as the future is kept

    def _fail(self, job: _PendingVersion, error: BaseException) -> None:
        """Keep what stopped a version until a later one is committed, and report it."""
        if isinstance(error, AnotherPublisherError):
            self._lost = error
        traceback.clear_frames(error.__traceback__)  # the future does not keep the memory that the version took
        with self._lock:
            unseen = [one for one in self._failures if "publish" not in one.raised_by and not one.was_read]
            self._failures = [*unseen, _Failure(job.record, job.futures, error, error.__traceback__)]
        if not all(future.awaited for future in job.futures):
            logger.error(
                "Step %d was not published: %s: %s. The next version that is committed contains it.",
                job.step,
                type(error).__name__,
                error,
                exc_info=None if isinstance(error, PulseError) else error,
            )
        for future in job.futures:
            _complete(future, job.step, error)

    def _make_up_for(self, committed: Draft) -> None:
        """Forget the failures that a version contains: those up to its own."""
        for number, failure in enumerate(self._failures):
            if failure.record is committed.manifest:
                del self._failures[: number + 1]
                return

    def _send(self, tip: RunTip, job: _PendingVersion) -> PublishReport:
        """Encode a job against the base, commit it, and move the base."""
        began = time.perf_counter()
        encoded_next = job.difference.encode(tip.last, self.codec)
        draft = tip.draft(encoded_next, job.step, self._anchors.newest, self._refs)
        job.record = draft.manifest
        encoded = time.perf_counter()
        written = tip.commit(draft)
        with self._lock:
            self._advance(tip, draft)
            self._failures.clear()
            stored = time.perf_counter()
            self._pace.sent(SentVersion(job.coalesced + 1, stored - began))
        return report_of(
            tip.state.layout,
            draft.manifest,
            draft.transition.changed,
            written,
            job.coalesced,
            job.blocked_s,
            encoded - began,
            stored - encoded,
        )

    def _advance(self, tip: RunTip, draft: Draft) -> None:
        """Move the base to a version that was committed; what is pending was compared with the base before."""
        pending = self._pending
        if pending is not None and pending.base == tip.last.version:
            pending.difference, pending.base = pending.difference.after(draft.transition), draft.manifest.version
        tip.advance(draft)
        self._path_bytes += draft.manifest.size_bytes

    # Anchors

    def _try_anchor(self, tip: RunTip) -> None:
        """Begin an anchor if one is due, or leave it to a later epoch: an anchor can wait, versions cannot."""
        try:
            self._maybe_anchor(tip)
        except BaseException as e:  # noqa: BLE001 - in the sender's thread nobody else would report it
            logger.warning("An anchor that may be due was not begun: %s: %s", type(e).__name__, e)

    def _maybe_anchor(self, tip: RunTip) -> None:
        """At an epoch's start, begin an anchor if the way from the last one has grown long, squashed where it is."""
        if tip is not self._tip or self._anchors.busy:
            return
        if not tip.last.at_start:
            if self._anchors.owed:
                self._anchors.finish(tip.last.run)  # it may be on the disk already
            return
        longest = self.anchor_every * tip.state.layout.size_bytes
        if not self._anchors.owed and self._path_bytes >= longest and not math.isinf(self._path_bytes):
            try:
                self._path_bytes = self._path_since_anchor(tip.last)
            except StoreError as e:  # then by what was counted here
                logger.info("The path from the newest anchor could not be measured: %s", e)
        if self._anchors.owed or self._path_bytes >= longest:
            self._anchors.begin(tip.state.snapshot(), tip.last)
            self._path_bytes = 0

    def _records(self) -> RunReader:
        return reader_of(self.store, self.signing_key, self._epoch_patches)

    def _sign(self, record: Manifest) -> bytes:
        return signed(record, self.signing_key)


def reader_of(store: Store, key: SigningKey | None, epoch_patches: int) -> RunReader:
    """The records of a run that its publisher goes on from: its own."""
    return RunReader(store, {key.public} if key else None, epoch_patches=epoch_patches)


def find_last(reader: RunReader, key: SigningKey | None) -> Manifest | None:
    """The last version of the run at this place, if there is one.

    Raises:
        SignatureError: the run is signed, and not with this key; StoreError.
    """
    last = reader.newest()
    if last is not None and key is None and signature.split(reader.store.get(keys.manifest_key(last.version)))[1]:
        raise SignatureError("this run is signed; pass signing_key= to resume it", key=keys.manifest_key(last.version))
    return last


def signed(record: Manifest, key: SigningKey | None) -> bytes:
    """A record as it is stored."""
    line = record.build()
    return signature.sign(line, key) if key else line


def checked_step(step: int) -> int:
    """Raises: ValueError, TypeError, for what is no step."""
    if isinstance(step, bool) or not 0 <= (whole := operator.index(step)) <= MAX_VERSION:
        raise ValueError(f"step must be a whole number from 0 to {MAX_VERSION}, not {step!r}")
    return whole


def report_of(
    layout: Layout,
    manifest: Manifest,
    changed: int | None,
    written: int,
    coalesced: int,
    blocked_s: float,
    encode_s: float,
    store_s: float,
) -> PublishReport:
    """What became of a state; changed is None for all of it."""
    return PublishReport(
        manifest.version,
        manifest.step,
        layout.size if changed is None else changed,
        layout.size,
        written,
        layout.size_bytes,
        coalesced,
        blocked_s,
        encode_s,
        store_s,
    )


def _answer(report: PublishReport, wait: bool) -> "PublishReport | Future[PublishReport]":
    """A report that is there at once, in the form that was asked for."""
    if wait:
        return report
    done: Future[PublishReport] = Future()
    done.set_result(report)
    return done


def _waits_for_itself(call: str) -> RuntimeError:
    return RuntimeError(
        f"{call} would wait for the thread that sends versions, which is this one, in a callback of its own future; "
        "call it in another thread, or publish with wait=False and coalesce=True"
    )


def _complete(future: _PublishFuture, step: int, outcome: PublishReport | BaseException) -> None:
    """Complete a future. What ends a callback of it does not end the sender, which has other versions to send."""
    try:
        if isinstance(outcome, PublishReport):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
    except BaseException as e:  # an Exception is logged by concurrent.futures
        logger.error(
            "A callback of the future of step %d raised %s: %s. Versions are sent as before.",
            step,
            type(e).__name__,
            e,
            exc_info=e,
        )


def same_tensors(layout: Layout, specs: Iterable[TensorSpec], ties: Mapping[str, str]) -> None:
    """Raises: StateError, if these are not the tensors of a run."""
    before: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in layout.tensors} | dict(layout.ties)
    now: dict[str, Any] = {spec.name: (spec.dtype, spec.shape) for spec in specs} | dict(ties)
    if before != now:
        names = sorted({name for name, _ in before.items() ^ now.items()})
        raise StateError(
            f"the tensors of a run stay the same; {names[0]!r} came, went or changed: publish into a new place",
            tensor=names[0],
        )
