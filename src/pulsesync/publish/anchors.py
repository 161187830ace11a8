"""Write anchors in the background: full checkpoints, from a snapshot to disk and from there to the store."""

import logging
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pulsesync.core.scratch import nearest
from pulsesync.core.threads import submit
from pulsesync.core.types import Tile
from pulsesync.errors import ConflictError, FormatError, NotFoundError, PulseError, StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.manifest import MAX_INLINE_BYTES, Manifest, PartRef, RecordKind
from pulsesync.format.patch import EncodedPart
from pulsesync.publish.costs import AnchorCosts, CodecChoice
from pulsesync.publish.team import AnchorShare
from pulsesync.run import keys
from pulsesync.run.bodies import inline_share
from pulsesync.run.reader import location_of
from pulsesync.run.reporting import Transfer
from pulsesync.run.spool import Outbox
from pulsesync.state.weights import Snapshot, WeightState
from pulsesync.store import Store

FRESH_S = 6 * 3600.0  # age up to which parts that no record names yet are relied on: a prune deletes them after a day
PART_BYTES = 1 << 25  # bytes of weights in one part of an anchor, and in memory at a time, unless a tile is larger

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class AnchorWriter:
    """Writes the anchors of one run, one at a time, and waits while a version is being sent.

    In a team, each rank uploads its own tiles: `share` is what it has uploaded, until the coordinator has created the
    record (`complete`) and every rank knows about it (`recorded`). A team of one creates the record at once.
    """

    store: Store
    outbox: Outbox
    sign: Callable[[Manifest], bytes]
    _executor: Executor
    _give_way: Callable[[], None]  # waits while a version is being sent
    costs: AnchorCosts  # chooses how tiles are coded, and measures the uploads for that
    ranks: int = 1  # of the team
    # Called with the record of an anchor that was created here, and the seconds since it was begun.
    created: Callable[[Manifest, float], None] = lambda record, seconds: None
    newest: int | None = None  # epoch of the newest anchor that is in the store
    owed: bool = False  # whether one was begun and is not in the store
    written_bytes: int = 0
    share: AnchorShare | None = None
    choice: CodecChoice | None = None  # how the last anchor was encoded
    _uploaded_s: float = 0.0  # when the share was uploaded
    _version: Manifest | None = None  # the version of which the last anchor was begun
    _unwritten: tuple[Snapshot | WeightState, Sequence[Tile]] | None = None  # until all of it is on the disk
    _needed: int = 0  # bytes that the disk of the outbox lacked when it was full; 0: it was not full
    _began_s: float = 0.0  # when the last anchor was
    _current: "Future[None] | None" = None
    _failures: int = 0  # consecutive uploads that failed and are tried again later
    _pause: float = 0  # versions to wait for before the anchor is tried again

    def __post_init__(self) -> None:
        self._location, self._alone = location_of(self.store), self.ranks == 1

    @property
    def busy(self) -> bool:
        return self._current is not None and not self._current.done()

    def begin(self, snapshot: Snapshot | WeightState, version: Manifest, tiles: Sequence[Tile]) -> None:
        """Write this rank's tiles of the anchor of a version with this state, unless an anchor is being written."""
        if not self.busy:
            self.owed, self._pause, self.share, self._version = True, 0, None, version
            self._unwritten = snapshot, tiles
            self._start_writing()

    def finish(self, run: str) -> None:
        """Upload the anchors that are complete on disk, also those of an earlier process. Called with every version.

        An upload that failed is as large as the model. Therefore it is tried again 1, 2, 4, 8… versions later if its
        error may pass, and otherwise not at all: then an anchor of the next epoch is written instead. One that could
        not be written to the disk is tried again in the same way, and as soon as a disk that was full has room.
        """
        if self.busy or self.share is not None:
            return
        self._drop_large_snapshot()
        self._pause -= 1
        if self._pause > 0 and not self._has_room_again():
            return
        if self._unwritten is not None:
            self._start_writing()
        elif waiting := self._waiting(run):
            self.owed = True
            self._current = self._start(waiting[0][0], self._finish, waiting)

    def _drop_large_snapshot(self) -> None:
        """Give up an anchor whose snapshot has become large: each change takes up to 8 bytes, and a weight often 2."""
        if self._unwritten is None or not isinstance(snapshot := self._unwritten[0], Snapshot):
            return
        if 4 * snapshot.changed > snapshot.layout.size:
            self._unwritten, self._needed, self._pause = None, 0, math.inf
            logger.warning(
                "An anchor that could not be written is given up, because over a quarter of the weights have changed "
                "since. An anchor of the next epoch is written instead."
            )

    def _start_writing(self) -> None:
        assert self._version is not None
        self._current = self._start(self._version.starts, self._write, self._version)

    def _has_room_again(self) -> bool:
        """Whether the disk of the outbox was full, and is no more."""
        return 0 < self._needed <= self._free_bytes()

    def _free_bytes(self) -> int:
        """Return the free bytes on the disk of the outbox; 0 if they cannot be determined."""
        with suppress(OSError):
            return shutil.disk_usage(nearest(self.outbox.folder)).free
        return 0

    def renew(self, run: str) -> None:
        """Upload this rank's share again if a prune may soon delete it, because no record names it yet."""
        if self.share is not None and time.monotonic() - self._uploaded_s > FRESH_S:
            self.share, self._pause = None, 0
            self.finish(run)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the anchor that is being written, if one is. Raises: what stopped it."""
        if not self.busy and self._has_room_again():
            self._start_writing()
        if self._current is None:
            return
        try:
            self._current.result(timeout_s)
        except CancelledError as e:
            raise StoreError(
                "an anchor was not started, because the executor was shut down with cancel_futures=True; it is tried "
                "again with a later version",
                retryable=True,
            ) from e

    def complete(self, parts: tuple[PartRef, ...]) -> Manifest:
        """Create the record of the anchor that was begun last, now that all its parts are in the store."""
        assert self._version is not None
        record = anchor_record(self._version, parts, self.newest)
        self._create(record, self.sign(record))
        return record

    def recorded(self, epoch: int) -> None:
        """Note that the record of an anchor is in the store: its files, and those of earlier ones, can be removed."""
        self.newest = max(epoch, self.newest or 0)
        if self.share is not None and self.share.epoch <= epoch:
            self.share, self.owed = None, False
        self.outbox.discard_before(epoch + 1)

    def _start(self, epoch: int, work: Callable[..., None], *args: Any) -> "Future[None]":
        """Run work in the background; an error is logged, and raised by `wait`."""
        self._began_s = time.monotonic()

        def run() -> None:
            try:
                work(*args)
            except BaseException as e:
                retried = _may_pass(e)
                self._pause = 2**self._failures if retried else math.inf
                if not retried:
                    self._unwritten, self._needed = None, 0
                self._failures += retried
                then = "An anchor of the next epoch is written instead."
                if retried:
                    then = "It is tried again with a later version."
                logger.warning("The anchor of epoch %d was not uploaded: %s: %s. %s", epoch, type(e).__name__, e, then)
                raise
            self._failures = 0

        try:
            return submit(self._executor, run)
        except RuntimeError as e:
            logger.warning("The anchor of epoch %d was not started and is tried with a later version: %s.", epoch, e)
            waits: Future[None] = Future()
            text = f"the anchor of epoch {epoch} was not started and is tried with a later version: {e}"
            waits.set_exception(StoreError(text, retryable=True))
            return waits

    def _write(self, version: Manifest) -> None:
        with ThreadPoolExecutor(2, thread_name_prefix="pulse-anchor") as executor:
            ahead = _UploadsAhead(executor, self._put)
            record, data = self._stage(version, executor, ahead)
            self._unwritten, self._needed = None, 0  # from here on only the disk is needed
            self.outbox.discard_before(version.starts)
        self._upload(version.starts, record, data, ahead.result())

    def _stage(self, version: Manifest, executor: Executor, ahead: "_UploadsAhead") -> tuple[Manifest, bytes]:
        """Write the anchor to the disk, all of it or nothing: a part of it would keep a full disk full."""
        assert self._unwritten is not None
        snapshot, tiles = self._unwritten
        epoch, total_bytes = version.starts, sum(tile.size * tile.tensor.kind.itemsize for tile in tiles)
        transfer = Transfer(self._location, "encoding an anchor", total_bytes)
        parts = encode_parts(tiles, snapshot, self.costs, transfer.add) if tiles or self._alone else ()
        try:
            refs = self.outbox.stage(epoch, ahead.offering(_one_ahead(executor, parts)), inline_share(self.ranks))
            self.choice = self.costs.choice
            logger.info("The anchor of epoch %d is encoded as %s.", epoch, self.choice)
            record = anchor_record(version, refs, self.newest)
            data = self.sign(record)
            self.outbox.seal(epoch, data)
        except BaseException:
            self.outbox.discard(epoch)
            self._needed = total_bytes if self._free_bytes() < total_bytes else 0
            raise
        return record, data

    def _waiting(self, run: str) -> list[tuple[int, Manifest, bytes]]:
        """Return what the outbox has for this run, and remove the rest. It does not read the parts.

        In a team, what an earlier process has left is removed too: the tiles may belong to other ranks now.
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
        """Upload all parts, but those that were just now: an old one in the store might be about to be pruned."""
        transfer = Transfer(self._location, "uploading an anchor", sum(ref.size for ref in record.parts))
        for ref in record.parts:
            if ref.data is not None:
                self.written_bytes += ref.size
            elif ref.id not in uploaded:
                self._put(ref.id, self._staged(epoch, ref))
            transfer.add(ref.size)
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
            self.created(record, time.monotonic() - self._began_s)

    def _staged(self, epoch: int, ref: PartRef) -> bytes:
        """Read a part from disk. Raises: FormatError, NotFoundError, if it has changed; then the anchor is removed."""
        try:
            return self.outbox.part(epoch, ref)
        except (FormatError, NotFoundError):
            self.outbox.discard(epoch)
            raise


def _may_pass(error: BaseException) -> bool:
    """Whether what failed may succeed later: the store may work again, or a disk have room."""
    if not isinstance(error, StoreError) or isinstance(error, NotFoundError):
        return False
    return error.retryable or isinstance(error.__cause__, OSError)


def _one_ahead(executor: Executor, parts: Iterable[EncodedPart]) -> Iterator[EncodedPart]:
    """Yield parts; each is encoded while the caller writes the one before it to disk."""
    encoding = iter(parts)
    coming = submit(executor, next, encoding, None)
    while (part := coming.result()) is not None:
        coming = submit(executor, next, encoding, None)
        yield part


class _UploadsAhead:
    """Uploads parts from memory while the next ones are encoded, as far as the link keeps up.

    A part that is encoded while another one is being uploaded is uploaded later, from disk.
    """

    def __init__(self, executor: Executor, put: Callable[[str, bytes | memoryview], None]) -> None:
        self._executor, self._put = executor, put
        self._uploaded: set[str] = set()
        self._last: Future[None] | None = None  # the last upload; none is started after one that failed

    def offering(self, parts: Iterable[EncodedPart]) -> Iterator[EncodedPart]:
        """Yield parts; when the caller has written one to disk, upload it, unless another upload is running.

        A small part is left for later too: it may be stored in the record.
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
        """Wait for the last upload and return the parts that are in the store. Raises: what the upload raised."""
        if self._last is not None:
            self._last.result()
        return self._uploaded


def encode_parts(
    tiles: Iterable[Tile],
    state: Snapshot | WeightState,
    costs: AnchorCosts | None = None,
    done: Callable[[int], None] = lambda size_bytes: None,
) -> Iterator[EncodedPart]:
    """Encode all weights of a state, or of these tiles of it, part by part; at least one part.

    done: called with the bytes of the weights that were encoded.
    """
    costs = costs or AnchorCosts("dense")
    some: list[Tile] = []
    size = 0
    for tile in tiles:
        if some and size >= PART_BYTES:
            yield _encode_part(some, size, state, costs)
            done(size)
            some, size = [], 0
        some.append(tile)
        size += tile.size * tile.tensor.kind.itemsize
    yield _encode_part(some, size, state, costs)
    done(size)


def _encode_part(tiles: Sequence[Tile], size: int, state: Snapshot | WeightState, costs: AnchorCosts) -> EncodedPart:
    codec, began = costs.choose(), time.perf_counter()
    part = patch.encode_whole(state.layout, tiles, state, state.sums, codec=codec)
    if codec == "dense":
        costs.packed(size, len(part.data), time.perf_counter() - began)
    return part


def anchor_record(version: Manifest, parts: tuple[PartRef, ...], newest: int | None) -> Manifest:
    """Return the record of a version's anchor, at the start of an epoch; newest: the epoch of the anchor before it."""
    return replace(version, kind=RecordKind.ANCHOR, base=None, history=None, parts=parts, anchor=newest)
