"""Anchors on disk: where a worker checks one before it touches a weight, and where a trainer keeps one to upload."""

import fcntl
import logging
import os
import shutil
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pulsesync.core.threads import spread
from pulsesync.errors import ChecksumError, FormatError, NotFoundError, StoreError
from pulsesync.format import container, patch
from pulsesync.format.body import Body
from pulsesync.format.container import PartHeader
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.run import keys
from pulsesync.run.bodies import fetch_body, fetch_part, put_body
from pulsesync.run.reader import read_again
from pulsesync.store import LocalStore, Store
from pulsesync.store.turns import PATIENCE_S, locked

DOWNLOADS = 2  # parts of an anchor that are fetched, and in memory, at a time
logger = logging.getLogger(__name__)
_FETCHING = ".fetching"  # locked by all processes that fetch or load, together, and by one that removes parts, alone


class AnchorSpool:
    """Parts of anchors in a folder, by id. Processes of a host can share it.

    Another process can write to a file at any time, after it was checked too. So a section is read into memory of this
    process and checked every time that it is used; one that has changed is replaced by the store's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = LocalStore(folder)
        self._unlock: Callable[[], object] = lambda: None

    def fetch(self, record: Manifest, store: Store, layout: Layout) -> tuple[list[Body], int]:
        """Have all parts of an anchor on disk, checked, and return them with the bytes that had to be fetched.

        What an earlier attempt, or another process, has fetched already is used. No process removes one of them until
        `close` or `keep_only` is called, or this object is gone. They are opened whenever they are read: an anchor can
        have more parts than a process may have files open. Parts that stand in the record stay in memory.

        Raises:
            StoreError: the store or the disk failed; FormatError: and branches, if the bytes are bad.
        """
        with self._translated():
            self._lock_parts()
            try:
                got = spread(lambda ref: self._have(ref, store, layout), record.parts, DOWNLOADS)
            except BaseException:
                self.close()
                raise
        return [body for body, _ in got], sum(size for _, size in got)

    def _have(self, ref: PartRef, store: Store, layout: Layout) -> tuple[Body, int]:
        if ref.data is not None:
            return fetch_body(store, ref, layout, None)
        with self._turn(ref):
            body, fetched = self._open(ref, store, layout, check=True), 0
            if body is None:
                data = _download(ref, store, layout)
                self._files.put(keys.part_key(ref.id), data)
                body, fetched = self._open(ref, store, layout, check=False), len(data)
        if body is None:
            raise StoreError(f"{self.folder} does not keep what is written to it", key=ref.id)
        return body, fetched

    def fetch_some(
        self, record: Manifest, store: Store, layout: Layout, wanted: Collection[int]
    ) -> tuple[list[Body], int]:
        """The same for a worker that holds slices: only the sections it needs, in memory."""
        got = [fetch_body(store, ref, layout, wanted) for ref in record.parts]
        return [body for body, _ in got], sum(size for _, size in got)

    def _open(self, ref: PartRef, store: Store, layout: Layout, check: bool) -> Body | None:
        """A part that is in the folder; None if it is not, or is damaged. check: read all of it now."""
        path = self.folder / "parts" / ref.id
        try:
            sections = _FileSections(ref, path, lambda: _download(ref, store, layout))
            if check:
                spread(sections.read, range(len(sections)))
            return Body(patch.open_index(sections.header, sections.read(0), layout), sections)
        except OSError:
            return None
        except FormatError:
            path.unlink(missing_ok=True)
            return None

    @contextmanager
    def _turn(self, ref: PartRef) -> Iterator[None]:
        """Let one process at a time fetch a part. One that hangs is not waited for: then two may fetch the same."""
        with ExitStack() as stack, self._translated():
            try:
                stack.enter_context(locked(self.folder / _part_lock(ref.id), PATIENCE_S))
            except TimeoutError:
                logger.warning("Another process in %s does not finish part %s; fetching it here.", self.folder, ref.id)
            yield

    def _lock_parts(self) -> None:
        """Keep other processes from removing parts until `close`, unless one of them hangs while it removes some."""
        self.close()
        lock = self._open_lock()
        self._unlock = weakref.finalize(self, os.close, lock)
        try:
            _wait_for(lock, fcntl.LOCK_SH, PATIENCE_S)
        except BlockingIOError:
            logger.warning("Another process does not finish removing parts from %s; continuing.", self.folder)

    def close(self) -> None:
        """Let other processes remove the parts that were fetched here: they are not read any more."""
        self._unlock()

    def _open_lock(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        return os.open(self.folder / _FETCHING, os.O_RDWR | os.O_CREAT, 0o644)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises: StoreError, for what the disk raises."""
        try:
            yield
        except OSError as e:
            raise StoreError(f"cannot spool an anchor in {self.folder}: {e.strerror}", key=str(self.folder)) from e

    def keep_only(self, record: Manifest | None) -> None:
        """Remove every part that is not of this anchor; or none, while another process fetches or loads one here."""
        self.close()
        if not self.folder.is_dir():
            return
        ids = [part.id for part in record.parts] if record else []
        wanted = {*ids, *map(_part_lock, ids)}
        with suppress(BlockingIOError), os.fdopen(self._open_lock(), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in [*self.folder.glob("parts/*"), *self.folder.glob(_part_lock("*"))]:
                if path.name not in wanted:
                    path.unlink(missing_ok=True)


def _download(ref: PartRef, store: Store, layout: Layout) -> bytes:
    """Fetch a part and check all of it. Raises: StoreError; FormatError, and branches."""

    def fetch() -> bytes:
        data = fetch_part(store, ref)
        Body.of(data, layout, ref.id)
        return data

    return read_again(store, keys.part_key(ref.id), fetch)


class _FileSections(Mapping[int, memoryview]):
    """The sections of a part in a file that other processes may write: read and checked whenever one is used.

    The file is open only while it is read. If it is changed or removed after the first time, it is unlinked, and the
    store's bytes are used in its place.

    Raises:
        FormatError: the file is not the part that was asked for; OSError.
    """

    def __init__(self, ref: PartRef, path: Path, download: Callable[[], bytes]) -> None:
        self._path, self._download = path, download
        self._replacement: memoryview | None = None  # the part from the store, checked, in memory
        with path.open("rb", buffering=0) as file:
            size = container.header_size(_read(file.fileno(), 0, container.HEADER.size))
            self.header: PartHeader = container.parse_header(_read(file.fileno(), 0, size), ref.id)
            if not self.header.file_size == ref.size == os.fstat(file.fileno()).st_size:
                raise FormatError(f"part {ref.id[:12]} has other than {ref.size} bytes", part=ref.id)

    def read(self, number: int) -> memoryview:
        """A section of the file. Raises: ChecksumError, if it was damaged; OSError."""
        begin, end = self.header.borders[number : number + 2]
        with self._path.open("rb", buffering=0) as file:
            data = _read(file.fileno(), begin, end - begin)
        self.header.check_section(number, data)
        return data

    def __getitem__(self, number: int) -> memoryview:
        if self._replacement is None:
            try:
                return self.read(number)
            except (ChecksumError, OSError) as e:
                logger.warning("%s was changed while it was in use (%s). Fetching the part again.", self._path, e)
            self._replacement = memoryview(self._download())
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
        begin, end = self.header.borders[number : number + 2]
        return self._replacement[begin:end]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self.header.sections)


def _read(handle: int, begin: int, size: int) -> memoryview:
    """Bytes of a file in memory of their own; fewer if the file ends earlier. Raises: OSError."""
    data, filled = memoryview(bytearray(size)), 0
    while filled < size and (count := os.preadv(handle, [data[filled:]], begin + filled)):
        filled += count
    return data[:filled].toreadonly()


def _wait_for(lock: int, how: int, patience_s: float) -> None:
    """Take a lock of an open file. Raises: BlockingIOError, if it is not to be had for so long."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _part_lock(id_: str) -> str:
    return f".lock-{id_[:16]}"


class Outbox:
    """Anchors that are finished on disk and not yet all in the store; they outlive the process that made them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, epoch: int, parts: Iterable[EncodedPart], inline_limit: int) -> tuple[PartRef, ...]:
        """Write the parts of an anchor to disk, one after the other, and return what its record has of them.

        inline_limit: bytes, of all together, up to which small parts stand in the record and not in a file.
        """
        self.discard(epoch)
        files, refs = LocalStore(self.folder / str(epoch)), []
        for part in parts:
            refs.append(put_body(files, part, inline_limit))
            inline_limit -= refs[-1].size if refs[-1].data is not None else 0
        return tuple(refs)

    def seal(self, epoch: int, record: bytes) -> None:
        """All parts are there: from now on the anchor is finished by whoever opens this folder."""
        LocalStore(self.folder / str(epoch)).put("record", record)

    def waiting(self) -> Iterator[tuple[int, bytes]]:
        """The anchors that are sealed here, as epoch and record, the newest first; what was never sealed is removed."""
        for epoch in sorted(self._epochs(), reverse=True):
            try:
                yield epoch, LocalStore(self.folder / str(epoch)).get("record")
            except NotFoundError:
                self.discard(epoch)

    def part(self, epoch: int, ref: PartRef) -> bytes:
        """A part as it was staged. Raises: FormatError, NotFoundError, if it was changed or removed since."""
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
