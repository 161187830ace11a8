"""Anchors on disk: a worker checks one there before it changes a weight, and a trainer keeps one there to upload it."""

import fcntl
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pulsesync.core.scratch import make_private
from pulsesync.errors import FormatError, NotFoundError, StoreError
from pulsesync.format import container
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.run import keys
from pulsesync.run.bodies import ahead, fetch_body, fetch_part, put_body
from pulsesync.run.reader import read_again
from pulsesync.store import LocalStore, Store
from pulsesync.store.host_lock import PATIENCE_S, locked

logger = logging.getLogger(__name__)
_FETCHING = ".fetching"  # lock file: shared by processes that fetch or load; exclusive for one that removes parts


class AnchorSpool:
    """Parts of anchors in a folder, by id. Processes of a host can share it.

    Another process can write to a file at any time, even after it was checked. Therefore a part is read into this
    process's memory and checked each time that it is used; one that has changed is fetched again from the store. If the
    disk is full, read-only or broken, parts are not kept, but every fetch succeeds.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = LocalStore(folder)
        self._unlock: Callable[[], object] = lambda: None
        self._has_warned = False

    def fetch(self, record: Manifest, store: Store, layout: Layout) -> Iterator[tuple[Body, int]]:
        """Yield all parts of an anchor in memory, checked, each with the bytes that had to be fetched for it.

        Each part is written to disk as well. What an earlier attempt or another process has fetched is read from there,
        and so are all parts when this is called again. No process removes them until `close` or `keep_only` is called,
        or this object is garbage-collected. Parts are yielded in order, and some are fetched ahead while the caller
        uses one. Parts that are stored in the record stay in memory.

        Raises: StoreError: the store failed; FormatError and its subclasses: the bytes are bad.
        """
        with self._without_disk():
            self._lock_parts()
        try:
            yield from ahead(lambda ref: self._have(ref, store, layout), record.parts)
        except BaseException:
            self.close()
            raise

    def _have(self, ref: PartRef, store: Store, layout: Layout) -> tuple[Body, int]:
        if ref.data is not None:
            return fetch_body(store, ref, layout, None)
        with self._turn(ref):
            if body := self._read(ref, layout):
                return body, 0
            data, body = _download(ref, store, layout)
            with self._without_disk():
                self._files.put(keys.part_key(ref.id), data)
        return body, len(data)

    def _read(self, ref: PartRef, layout: Layout) -> Body | None:
        """Read a part from the folder; None if it is missing or damaged."""
        try:
            data = self._files.get(keys.part_key(ref.id), 0, ref.size + 1)
            return Body.of(data, layout, ref.id)
        except StoreError:  # most often the file is missing; a broken disk is logged when it is written to
            return None
        except FormatError as e:
            logger.warning("Part %s in %s was damaged (%s). Fetching it again.", ref.id, self.folder, e)
            return None

    @contextmanager
    def _turn(self, ref: PartRef) -> Iterator[None]:
        """Let one process at a time fetch a part. The wait is bounded: if that process hangs, two fetch the same."""
        with ExitStack() as stack:
            try:
                with self._without_disk():
                    stack.enter_context(locked(self.folder / _part_lock(ref.id)))
            except TimeoutError:
                text = "Another process that uses %s does not finish part %s; fetching it."
                logger.warning(text, self.folder, ref.id)
            yield

    def _lock_parts(self) -> None:
        """Prevent other processes from removing parts until `close`; the wait for one that is removing is bounded."""
        self.close()
        lock = self._open_lock()
        self._unlock = weakref.finalize(self, os.close, lock)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                text = "Another process does not finish removing parts from %s; not waiting for it."
                logger.warning(text, self.folder)
            return

    def close(self) -> None:
        """Let other processes remove the parts that were fetched: this one does not read them any more."""
        self._unlock()

    def _open_lock(self) -> int:
        make_private(self.folder)
        return os.open(self.folder / _FETCHING, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def _without_disk(self) -> Iterator[None]:
        """Continue if the disk fails, and log that once."""
        try:
            yield
        except TimeoutError:
            raise  # a lock that another process does not release is no failure of the disk
        except (OSError, StoreError) as e:
            if not self._has_warned:
                self._has_warned = True
                text = (
                    "Cannot keep the parts of an anchor in %s (%s). They are used from memory, and fetched again the "
                    "next time. Make room there, or use another folder."
                )
                logger.warning(text, self.folder, (e.__cause__ or e) if isinstance(e, StoreError) else e)

    def keep_only(self, record: Manifest | None) -> None:
        """Remove all parts that do not belong to this anchor; none while another process fetches or loads an anchor."""
        self.close()
        if not self.folder.is_dir():
            return
        ids = [part.id for part in record.parts] if record else []
        wanted = {*ids, *map(_part_lock, ids)}
        with suppress(OSError), os.fdopen(self._open_lock(), "rb") as lock:  # BlockingIOError is one
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in [*self.folder.glob("parts/*"), *self.folder.glob(_part_lock("*"))]:
                if path.name not in wanted:
                    path.unlink(missing_ok=True)


def _download(ref: PartRef, store: Store, layout: Layout) -> tuple[bytes, Body]:
    """Fetch a part and check all of it. Raises: StoreError; FormatError and its subclasses."""

    def fetch() -> tuple[bytes, Body]:
        data = fetch_part(store, ref)
        return data, Body.of(data, layout, ref.id)

    return read_again(store, keys.part_key(ref.id), fetch)


def _part_lock(id_: str) -> str:
    return f".lock-{id_[:16]}"


@dataclass(frozen=True)
class Outbox:
    """Anchors that are complete on disk and not yet uploaded; they outlive the process that wrote them."""

    folder: Path

    def stage(self, epoch: int, parts: Iterable[EncodedPart], inline_limit: int) -> tuple[PartRef, ...]:
        """Write the parts of an anchor to disk, one after the other, and return its record's entries for them.

        Small parts, up to this many bytes together, are stored in the record and not in a file.
        """
        self.discard(epoch)
        with suppress(OSError):  # the first write reports it
            make_private(self.folder)
        files, refs = LocalStore(self.folder / str(epoch)), []
        for part in parts:
            refs.append(put_body(files, part, inline_limit))
            inline_limit -= refs[-1].size if refs[-1].data is not None else 0
        return tuple(refs)

    def seal(self, epoch: int, record: bytes) -> None:
        """Mark an anchor as complete: from now on, any process that opens this folder can finish its upload."""
        LocalStore(self.folder / str(epoch)).put("record", record)

    def waiting(self) -> Iterator[tuple[int, bytes]]:
        """Yield epoch and record of the sealed anchors, the newest first; what was never sealed is removed."""
        for epoch in sorted(self._epochs(), reverse=True):
            try:
                yield epoch, LocalStore(self.folder / str(epoch)).get("record")
            except NotFoundError:
                self.discard(epoch)

    def part(self, epoch: int, ref: PartRef) -> bytes:
        """Read a part that was staged. Raises: FormatError, NotFoundError, if it was changed or removed since."""
        data = LocalStore(self.folder / str(epoch)).get(keys.part_key(ref.id))
        container.open_part(data, ref.id)
        return data

    def discard(self, epoch: int) -> None:
        shutil.rmtree(self.folder / str(epoch), ignore_errors=True)

    def discard_before(self, epoch: int) -> None:
        """Remove the anchors of earlier epochs, sealed or not."""
        for earlier in self._epochs():
            if earlier < epoch:
                self.discard(earlier)

    def _epochs(self) -> list[int]:
        return [int(path.name) for path in self.folder.glob("*") if path.name.isdigit()]
