"""Writing anchors: whole states, behind everything else, from a snapshot to disk and from there to the store."""

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pulsesync.core.threads import submit
from pulsesync.core.types import Tile
from pulsesync.errors import ChainError, ConflictError, FormatError, NotFoundError, PulseError, StoreError
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.manifest import Manifest, PartRef, RecordKind
from pulsesync.format.patch import EncodedPart
from pulsesync.run import keys, planner
from pulsesync.run.planner import Look
from pulsesync.run.spool import Outbox
from pulsesync.state.live import AnyState, Snapshot
from pulsesync.store import Store

PART_BYTES = 1 << 25  # of weights in one part of an anchor: what is in memory at a time, unless a tile is larger

logger = logging.getLogger(__name__)


class AnchorWriter:
    """Writes the anchors of one run, one at a time, and gives way to versions that are being sent."""

    def __init__(
        self,
        store: Store,
        outbox: Outbox,
        sign: Callable[[Manifest], bytes],
        executor: Executor,
        quiet: threading.Event,
    ) -> None:
        self.store, self.outbox, self.sign = store, outbox, sign
        self.newest: int | None = None  # epoch of the newest anchor that is in the store
        self.owed = False  # one was begun and is not in the store
        self.written_bytes = 0
        self._executor, self._quiet = executor, quiet
        self._current: Future[None] | None = None
        self._failures = 0  # in a row that may be made up for later
        self._pause: float = 0  # versions to come before the anchor is tried again

    @property
    def busy(self) -> bool:
        return self._current is not None and not self._current.done()

    def begin(self, snapshot: Snapshot | AnyState, version: Manifest) -> None:
        """Write the anchor of a version, of which this is the state, unless one is being written."""
        if not self.busy:
            self.owed, self._pause = True, 0
            self._current = self._start(version.starts, self._write, snapshot, version)

    def finish(self, run: str) -> None:
        """Upload what is finished on disk, also by a process before this one. Called with every version.

        An upload that failed is as large as the model. So it is tried again 1, 2, 4, 8… versions later if its error was
        retryable, and otherwise not at all: then the next epoch has an anchor of its own.
        """
        if self.busy:
            return
        self._pause -= 1
        if self._pause <= 0 and (waiting := self._waiting(run)):
            self.owed = True
            self._current = self._start(waiting[0][0], self._finish, waiting)

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

    def _start(self, epoch: int, work: Callable[..., None], *args: Any) -> "Future[None]":
        """Run work in the background; what stops it is logged, and raised by `wait`."""

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

    def _write(self, snapshot: Snapshot | AnyState, version: Manifest) -> None:
        epoch = version.starts
        refs = self.outbox.stage(epoch, encode_parts(snapshot.layout.tiles, snapshot))
        record = anchor_record(version, refs, self.newest)
        data = self.sign(record)
        self.outbox.seal(epoch, data)
        self.outbox.discard_before(epoch)
        del snapshot  # from here on only the disk is needed
        self._upload(epoch, record, data)

    def _waiting(self, run: str) -> list[tuple[int, Manifest, bytes]]:
        """What the outbox has for this run; the rest of it goes. A look at the disk, without the parts."""
        found = []
        for epoch, data in self.outbox.waiting():
            try:
                record = manifests.parse(data)
            except PulseError:
                record = None
            if record is None or record.run != run or (self.newest is not None and epoch <= self.newest):
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
        self.owed = False

    def _upload(self, epoch: int, record: Manifest, data: bytes) -> None:
        """Put all parts, whether they are there already or not: one that is old might be about to be pruned."""
        for ref in record.parts:
            self._quiet.wait()
            self.store.put(keys.part_key(ref.id), self._staged(epoch, ref))
            self.written_bytes += ref.size
        with suppress(ConflictError):  # another process was quicker: the run has its anchor
            self.store.create(keys.anchor_key(epoch), data)
        self.newest, self.owed = epoch, False
        self.outbox.discard(epoch)

    def _staged(self, epoch: int, ref: PartRef) -> bytes:
        """A part from disk. Raises: FormatError, NotFoundError, if it is not as it was written; the rest goes too."""
        try:
            return self.outbox.part(epoch, ref)
        except (FormatError, NotFoundError):
            self.outbox.discard(epoch)
            raise


def encode_parts(tiles: Iterable[Tile], state: Snapshot | AnyState) -> Iterator[EncodedPart]:
    """Encode a state, or these tiles of one, whole: part by part, at least one."""
    some: list[Tile] = []
    size = 0
    for tile in tiles:
        if some and size >= PART_BYTES:
            yield patch.encode_whole(state.layout, some, state, state.sums)
            some, size = [], 0
        some.append(tile)
        size += tile.size * tile.tensor.kind.itemsize
    yield patch.encode_whole(state.layout, some, state, state.sums)


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
