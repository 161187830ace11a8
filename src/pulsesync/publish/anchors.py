"""Writing anchors in the background: full checkpoints, from a snapshot to disk and from there to the store."""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pulsesync.core.threads import submit
from pulsesync.core.types import Tile
from pulsesync.errors import ChainError, ConflictError, FormatError, NotFoundError, PulseError, StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.manifest import MAX_INLINE_BYTES, Manifest, PartRef, RecordKind
from pulsesync.format.patch import EncodedPart
from pulsesync.publish.costs import AnchorCosts, CodecChoice
from pulsesync.publish.team import AnchorShare
from pulsesync.run import keys, planner
from pulsesync.run.bodies import inline_share
from pulsesync.run.planner import Look
from pulsesync.run.spool import Outbox
from pulsesync.state.live import AnyState, Snapshot
from pulsesync.store import Store

FRESH_S = 6 * 3600.0  # that parts which no record names yet are counted on: a prune deletes them after a day
PART_BYTES = 1 << 25  # of weights in one part of an anchor: what is in memory at a time, unless a tile is larger

logger = logging.getLogger(__name__)


class AnchorWriter:
    """Writes the anchors of one run, one at a time, and gives way to versions that are being sent.

    Of a team each rank uploads the tiles that are its own: `share` is then what it has uploaded, until the coordinator
    has created the record (`complete`) and every rank knows it (`recorded`). A team of one creates it at once.

    Args:
        give_way: Waits while a version is being sent.
        ranks: Of the team.
        costs: By which it is chosen how tiles are written; they measure the uploads.
        created: Called with the record of an anchor that was created here, and the seconds since it was begun.
    """

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        sign: Callable[[Manifest], bytes],
        executor: Executor,
        give_way: Callable[[], None],
        ranks: int = 1,
        costs: AnchorCosts | None = None,
        created: Callable[[Manifest, float], None] = lambda record, seconds: None,
    ) -> None:
        self.store, self.outbox, self.sign = store, outbox, sign
        self.newest: int | None = None  # epoch of the newest anchor that is in the store
        self.owed = False  # one was begun and is not in the store
        self.written_bytes = 0
        self.share: AnchorShare | None = None
        self.costs = costs or AnchorCosts()
        self.choice: CodecChoice | None = None  # by which the last anchor was encoded
        self._uploaded_s = 0.0  # when the share was
        self._version: Manifest | None = None  # of which the last anchor was begun
        self._executor, self._give_way, self._alone = executor, give_way, ranks == 1
        self._ranks, self._created = ranks, created
        self._began_s = 0.0  # when the last anchor was
        self._current: Future[None] | None = None
        self._failures = 0  # in a row that may be made up for later
        self._pause: float = 0  # versions to come before the anchor is tried again

    @property
    def busy(self) -> bool:
        return self._current is not None and not self._current.done()

    def begin(self, snapshot: Snapshot | AnyState, version: Manifest, tiles: Sequence[Tile]) -> None:
        """Write the anchor of a version, of which this is the state, unless one is being written.

        tiles: those that are this rank's.
        """
        if not self.busy:
            self.owed, self._pause, self.share, self._version = True, 0, None, version
            self._current = self._start(version.starts, self._write, snapshot, version, tiles)

    def finish(self, run: str) -> None:
        """Upload what is finished on disk, also by a process before this one. Called with every version.

        An upload that failed is as large as the model. So it is tried again 1, 2, 4, 8… versions later if its error was
        retryable, and otherwise not at all: then the next epoch has an anchor of its own.
        """
        if self.busy or self.share is not None:
            return
        self._pause -= 1
        if self._pause <= 0 and (waiting := self._waiting(run)):
            self.owed = True
            self._current = self._start(waiting[0][0], self._finish, waiting)

    def renew(self, run: str) -> None:
        """Upload this rank's share again if a prune may soon delete it, because no record names it yet."""
        if self.share is not None and time.monotonic() - self._uploaded_s > FRESH_S:
            self.share, self._pause = None, 0
            self.finish(run)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the anchor that is being written, if one is. Raises: what stopped it."""
        if self._current is None:
            return
        try:
            self._current.result(timeout_s)
        except CancelledError as e:
            raise StoreError(
                "an anchor was not begun, because the executor was shut down with cancel_futures=True; the next epoch "
                "gets one",
                retryable=True,
            ) from e

    def complete(self, parts: tuple[PartRef, ...]) -> Manifest:
        """Create the record of the anchor that was begun last, now that all its parts are in the store."""
        assert self._version is not None
        record = anchor_record(self._version, parts, self.newest)
        self._create(record, self.sign(record))
        return record

    def recorded(self, epoch: int) -> None:
        """The record of an anchor is in the store: nothing of it, or of one before it, is needed here any more."""
        self.newest = max(epoch, self.newest or 0)
        if self.share is not None and self.share.epoch <= epoch:
            self.share, self.owed = None, False
        self.outbox.discard_before(epoch + 1)

    def _start(self, epoch: int, work: Callable[..., None], *args: Any) -> "Future[None]":
        """Run work in the background; what stops it is logged, and raised by `wait`."""
        self._began_s = time.monotonic()

        def run() -> None:
            try:
                work(*args)
            except BaseException as e:
                retried = isinstance(e, StoreError) and e.retryable
                self._pause = 2**self._failures if retried else math.inf
                self._failures += retried
                logger.warning(
                    "The anchor of epoch %d is not in the store: %s: %s. %s",
                    epoch,
                    type(e).__name__,
                    e,
                    "It is tried again with a later version." if retried else "The next epoch gets one instead.",
                )
                raise
            self._failures = 0

        try:
            return submit(self._executor, run)
        except RuntimeError as e:
            logger.warning("The anchor of epoch %d waits for a later version: %s.", epoch, e)
            waits: Future[None] = Future()
            waits.set_exception(StoreError(f"the anchor of epoch {epoch} was not begun: {e}", retryable=True))
            return waits

    def _write(self, snapshot: Snapshot | AnyState, version: Manifest, tiles: Sequence[Tile]) -> None:
        epoch = version.starts
        parts = encode_parts(tiles, snapshot, self.costs) if tiles or self._alone else ()
        with ThreadPoolExecutor(2, thread_name_prefix="pulse-anchor") as executor:
            ahead = _UploadsAhead(executor, self._put)
            refs = self.outbox.stage(epoch, ahead.offering(_one_ahead(executor, parts)), inline_share(self._ranks))
            self.choice = self.costs.choice
            logger.info("The anchor of epoch %d is encoded as %s.", epoch, self.choice)
            record = anchor_record(version, refs, self.newest)
            data = self.sign(record)
            self.outbox.seal(epoch, data)
            self.outbox.discard_before(epoch)
            del snapshot, parts  # from here on only the disk is needed
        self._upload(epoch, record, data, ahead.result())

    def _waiting(self, run: str) -> list[tuple[int, Manifest, bytes]]:
        """What the outbox has for this run; the rest of it goes. A look at the disk, without the parts.

        Of a team, what a process before this one has left goes too: the tiles may be others' now.
        """
        found = []
        for epoch, data in self.outbox.waiting():
            try:
                record = manifests.parse(data)
            except PulseError:
                record = None
            others = not self._alone and (self._version is None or epoch != self._version.starts)
            if record is None or record.run != run or others or (self.newest is not None and epoch <= self.newest):
                self.outbox.discard(epoch)
            else:
                found.append((epoch, record, data))
        return found

    def _finish(self, waiting: Sequence[tuple[int, Manifest, bytes]]) -> None:
        for epoch, record, data in waiting:
            if self.newest is None or epoch > self.newest:
                self._upload(epoch, record, data)
            else:
                self.outbox.discard(epoch)
        self.owed = self.share is not None

    def _upload(self, epoch: int, record: Manifest, data: bytes, uploaded: Collection[str] = ()) -> None:
        """Put all parts, whether they are there already or not: one that is old might be about to be pruned.

        uploaded: those that were put just now.
        """
        for ref in record.parts:
            if ref.data is not None:
                self.written_bytes += ref.size
            elif ref.id not in uploaded:
                self._put(ref.id, self._staged(epoch, ref))
        if not self._alone:
            self.share, self._uploaded_s = AnchorShare(epoch, record.parts), time.monotonic()
            return
        self._create(record, data)
        self.newest, self.owed = epoch, False
        self.outbox.discard(epoch)

    def _put(self, id_: str, data: bytes | memoryview) -> None:
        self._give_way()
        began = time.perf_counter()
        self.store.put(keys.part_key(id_), data)
        self.costs.link.sent(len(data), time.perf_counter() - began)
        self.written_bytes += len(data)

    def _create(self, record: Manifest, data: bytes) -> None:
        try:
            self.store.create(keys.anchor_key(record.starts), data)
        except ConflictError:
            logger.info("The anchor of epoch %d was already written by another process.", record.starts)
        else:
            self._created(record, time.monotonic() - self._began_s)

    def _staged(self, epoch: int, ref: PartRef) -> bytes:
        """A part from disk. Raises: FormatError, NotFoundError, if it is not as it was written; the rest goes too."""
        try:
            return self.outbox.part(epoch, ref)
        except (FormatError, NotFoundError):
            self.outbox.discard(epoch)
            raise


def _one_ahead(executor: Executor, parts: Iterable[EncodedPart]) -> Iterator[EncodedPart]:
    """Yield parts, each of which is encoded while the caller has the one before it, and waits for the disk."""
    encoding = iter(parts)
    coming = submit(executor, next, encoding, None)
    while (part := coming.result()) is not None:
        coming = submit(executor, next, encoding, None)
        yield part


class _UploadsAhead:
    """Uploads parts from memory while the next ones are encoded, as far as the link keeps up.

    A part that comes while another one is being uploaded is left for later: it is on disk.
    """

    def __init__(self, executor: Executor, put: Callable[[str, bytes | memoryview], None]) -> None:
        self._executor, self._put = executor, put
        self._uploaded: set[str] = set()
        self._last: Future[None] | None = None  # after one that failed there is none

    def offering(self, parts: Iterable[EncodedPart]) -> Iterator[EncodedPart]:
        """Yield parts, and upload each that fits when the caller is done with it, which then has it on disk.

        A small one is left for later too: it may stand in the record.
        """
        for part in parts:
            yield part
            if len(part.data) <= 2 * MAX_INLINE_BYTES:
                continue
            if self._last is None or (self._last.done() and self._last.exception() is None):
                with suppress(RuntimeError):  # the interpreter is ending and starts no more threads
                    self._last = self._executor.submit(self._upload, part)

    def _upload(self, part: EncodedPart) -> None:
        self._put(part.id, part.data)
        self._uploaded.add(part.id)

    def result(self) -> Collection[str]:
        """The parts that are in the store, when the last upload has ended. Raises: what it raised."""
        if self._last is not None:
            self._last.result()
        return self._uploaded


def encode_parts(
    tiles: Iterable[Tile], state: Snapshot | AnyState, costs: AnchorCosts | None = None
) -> Iterator[EncodedPart]:
    """Encode a state, or these tiles of one, whole: part by part, at least one."""
    costs = costs or AnchorCosts("dense")
    some: list[Tile] = []
    size = 0
    for tile in tiles:
        if some and size >= PART_BYTES:
            yield _encode_part(some, size, state, costs)
            some, size = [], 0
        some.append(tile)
        size += tile.size * tile.tensor.kind.itemsize
    yield _encode_part(some, size, state, costs)


def _encode_part(tiles: Sequence[Tile], size: int, state: Snapshot | AnyState, costs: AnchorCosts) -> EncodedPart:
    codec, began = costs.choose(), time.perf_counter()
    part = patch.encode_whole(state.layout, tiles, state, state.sums, codec=codec)
    if codec == "dense":
        costs.packed(size, len(part.data), time.perf_counter() - began)
    return part


def anchor_record(version: Manifest, parts: tuple[PartRef, ...], newest: int | None) -> Manifest:
    """The record of a version's whole state, at an epoch's start; newest: the epoch of the anchor before it."""
    return replace(version, kind=RecordKind.ANCHOR, base=None, history=None, parts=parts, anchor=newest)


def path_since_anchor(last: Manifest, look: Look) -> tuple[int | None, float]:
    """The epoch of the newest anchor that leads to a version, and the bytes that a joiner fetches beside it.

    Without an anchor, infinitely many. Raises: StoreError.
    """
    try:
        path = planner.find_path(None, last, look)
    except (ChainError, FormatError):
        return None, math.inf
    return path[0].starts, sum(record.size_bytes for record in path if record.kind != RecordKind.ANCHOR)
