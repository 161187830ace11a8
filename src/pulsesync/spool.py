"""Anchors on disk: where a worker checks one before it touches a weight, and where a trainer keeps one to upload."""

import fcntl
import mmap
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pulsesync import chain
from pulsesync.errors import FormatError, NotFoundError, StoreError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.parallel import spread
from pulsesync.records import fetch_body, fetch_part, read_again
from pulsesync.state import Body
from pulsesync.store import LocalStore, Store

DOWNLOADS = 2  # parts of an anchor that are fetched, and in memory, at a time
_FETCHING = ".fetching"  # locked by all who fetch, together, and alone by one who throws away


class AnchorSpool:
    """Parts of anchors in a folder, by id, each checked whenever it is opened. Processes of a host can share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = LocalStore(folder)

    def fetch(self, record: Manifest, store: Store, layout: Layout) -> tuple[list[Body], int]:
        """Have all parts of an anchor on disk, checked, and return them with the bytes that had to be fetched.

        What an earlier attempt, or another process, has fetched already is used. Until all are here, nobody throws one
        away; then they are open, and stay readable whatever becomes of their names.

        Raises:
            StoreError: the store or the disk failed; FormatError: and branches, if the bytes are bad.
        """
        with self._lock(_FETCHING, fcntl.LOCK_SH):
            got = spread(lambda ref: self._have(ref, store, layout), record.parts, DOWNLOADS)
        return [body for body, _ in got], sum(size for _, size in got)

    def _have(self, ref: PartRef, store: Store, layout: Layout) -> tuple[Body, int]:
        with self._lock(_part_lock(ref.id), fcntl.LOCK_EX):  # one process at a time fetches a part
            body, fetched = self._open(ref, layout), 0
            if body is None:
                fetched = self._download(ref, store, layout)
                body = self._open(ref, layout)
        if body is None:
            raise StoreError(f"{self.folder} does not keep what is written to it", key=ref.id)
        return body, fetched

    def fetch_some(
        self, record: Manifest, store: Store, layout: Layout, wanted: Collection[int]
    ) -> tuple[list[Body], int]:
        """The same for a worker that holds slices: only the sections it needs, in memory."""
        got = [fetch_body(store, ref, layout, wanted) for ref in record.parts]
        return [body for body, _ in got], sum(size for _, size in got)

    def _download(self, ref: PartRef, store: Store, layout: Layout) -> int:
        key = chain.part_key(ref.id)

        def fetch() -> bytes:
            data = fetch_part(store, ref)
            Body.of(data, layout, ref.id)
            return data

        data = read_again(store, key, fetch)
        self._files.put(key, data)
        return len(data)

    def _open(self, ref: PartRef, layout: Layout) -> Body | None:
        """A part that is here and whole, mapped rather than read; a damaged one is removed."""
        path = self.folder / "parts" / ref.id
        try:
            with path.open("rb") as file:
                data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            if len(data) != ref.size:
                raise FormatError("of another size")
            return Body.of(data, layout, ref.id)
        except (OSError, ValueError):  # not there, or empty
            return None
        except FormatError:
            path.unlink(missing_ok=True)
            return None

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[None]:
        """Hold a lock of this folder. Raises: BlockingIOError, if somebody else has it and `how` is not to wait."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as e:
            raise StoreError(f"cannot spool an anchor in {self.folder}: {e.strerror}", key=str(self.folder)) from e
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    def keep_only(self, record: Manifest | None) -> None:
        """Throw away every part that is not of this anchor; or nothing, while somebody else fetches one here."""
        if not self.folder.is_dir():
            return
        ids = [part.id for part in record.parts] if record else []
        wanted = {*ids, *map(_part_lock, ids)}
        with suppress(BlockingIOError), self._lock(_FETCHING, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in [*self.folder.glob("parts/*"), *self.folder.glob(_part_lock("*"))]:
                if path.name not in wanted:
                    path.unlink(missing_ok=True)


def _part_lock(id_: str) -> str:
    return f".lock-{id_[:16]}"


class Outbox:
    """Anchors that are finished on disk and not yet all in the store; they outlive the process that made them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def stage(self, epoch: int, parts: Iterable[EncodedPart]) -> tuple[PartRef, ...]:
        """Write the parts of an anchor to disk, one after the other, and return what its record names."""
        self.discard(epoch)
        files, refs = LocalStore(self.folder / str(epoch)), []
        for part in parts:
            files.put(chain.part_key(part.id), part.data)
            refs.append(PartRef(part.id, len(part.data)))
        return tuple(refs)

    def seal(self, epoch: int, record: bytes) -> None:
        """All parts are there: from now on the anchor is finished by whoever opens this folder."""
        LocalStore(self.folder / str(epoch)).put("record", record)

    def waiting(self) -> Iterator[tuple[int, bytes]]:
        """The anchors that are sealed here, as epoch and record, the newest first; what was never sealed is removed."""
        epochs = [int(path.name) for path in self.folder.glob("*") if path.name.isdigit()]
        for epoch in sorted(epochs, reverse=True):
            try:
                yield epoch, LocalStore(self.folder / str(epoch)).get("record")
            except NotFoundError:
                self.discard(epoch)

    def part(self, epoch: int, ref: PartRef) -> bytes:
        return LocalStore(self.folder / str(epoch)).get(chain.part_key(ref.id))

    def discard(self, epoch: int) -> None:
        shutil.rmtree(self.folder / str(epoch), ignore_errors=True)
