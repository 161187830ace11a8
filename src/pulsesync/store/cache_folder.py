"""The files of a cache: checked at every read, shared by the processes of a host, and kept below a limit.

A file has the SHA-256 of its content, then the content. One that was truncated or damaged is thereby detected and
removed. Nothing here raises: a disk that is full, read-only or broken is one on which nothing is found or kept.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pulsesync.core.scratch import make_private
from pulsesync.store.host_lock import locked

SUSPECT = "!"  # the end of the name of a file that a reader reported as bad; no other name contains it

_DIGEST_BYTES = 32
_MOST_BYTES = 1 << 20  # of the content of a file
_LOCK = ".lock-"
_SPOOL = ".spool-"

logger = logging.getLogger(__name__)


class CacheFolder:
    """Files by name. Those that were not used for longest are removed so that the folder stays below its limit."""

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self.path, self._max_bytes = path, max_bytes
        self._room_bytes = 0  # bytes that may be written before the folder is measured again

    def has(self, name: str) -> bool:
        return os.path.exists(self.path / name)  # False for a name that is too long

    def stated(self, name: str) -> tuple[bytes, int] | None:
        """Return the SHA-256 that a file states, which is not compared with its content, and the content's length."""
        try:
            with (self.path / name).open("rb") as file:
                return file.read(_DIGEST_BYTES), os.fstat(file.fileno()).st_size - _DIGEST_BYTES
        except OSError:
            return None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, None if it does not exist; one that is damaged is removed."""
        path = self.path / name
        try:
            with path.open("rb") as file:
                digest, content = file.read(_DIGEST_BYTES), file.read(_MOST_BYTES + 1)
            if hashlib.sha256(content).digest() != digest:
                path.unlink(missing_ok=True)
                return None
        except OSError:
            return None
        with suppress(OSError):  # a read-only cache is still used
            os.utime(path)  # marks the file as used now
        return content

    def keep(self, name: str, content: memoryview) -> None:
        """Write a file, which also replaces the one of this name that was reported as bad."""
        if self._max_bytes is not None and _DIGEST_BYTES + len(content) > self._max_bytes * 31 // 32:
            return
        spool, kept = self.path / f"{_SPOOL}{secrets.token_hex(8)}", self.path / name
        try:
            make_private(self.path)
            try:
                with spool.open("xb") as file:
                    file.write(hashlib.sha256(content).digest())
                    file.write(content)
                os.replace(spool, kept)
                self._make_room(_DIGEST_BYTES + len(content), kept)
            finally:
                spool.unlink(missing_ok=True)
            (self.path / f"{name}{SUSPECT}").unlink(missing_ok=True)
        except OSError:
            logger.debug("Cannot keep %s in %s.", name, self.path, exc_info=True)

    def suspect(self, prefix: str) -> None:
        """Rename the files whose names begin like this, as a reader reported them as bad."""
        with suppress(OSError):
            for path in self._named(prefix, suspects=False):
                path.replace(path.with_name(path.name + SUSPECT))

    def remove(self, name: str) -> None:
        """Remove a file, and the one of this name that was reported as bad."""
        with suppress(OSError):
            for one in (name, name + SUSPECT):
                (self.path / one).unlink(missing_ok=True)

    def remove_all(self, prefix: str, suspects: bool) -> None:
        """Remove the files whose names begin like this, perhaps with those that were reported as bad."""
        with suppress(OSError):
            for path in self._named(prefix, suspects):
                path.unlink(missing_ok=True)

    def _named(self, prefix: str, suspects: bool) -> list[Path]:
        names = (name for name in os.listdir(self.path) if name.startswith(prefix))
        return [self.path / name for name in names if suspects or not name.endswith(SUSPECT)]

    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Let one thread of one process at a time enter the block; all of them, if the disk cannot lock."""
        with ExitStack() as stack:
            try:
                make_private(self.path)
                stack.enter_context(locked(self.path / f"{_LOCK}{name}"))
            except TimeoutError:
                logger.warning("Another process that uses %s makes no progress on %s; fetching it.", self.path, name)
            except OSError:  # as after every failure of the disk, reads succeed without the cache
                logger.debug("Cannot lock in %s.", self.path, exc_info=True)
            yield

    def _make_room(self, written_bytes: int, kept: Path) -> None:
        """Bring the folder below its limit, counting a file just written. Raises: OSError, and the file is removed.

        The folder is measured each time that this process has written 1/32 of the limit, and that much is left free. A
        listing can miss a file that is renamed meanwhile. Therefore a file is renamed first and the folder measured
        then: the last of several threads sees the files of all.
        """
        if self._max_bytes is None:
            return
        self._room_bytes -= written_bytes
        if self._room_bytes >= 0:
            return
        try:
            files = list(_measure(self.path))
        except OSError:
            kept.unlink(missing_ok=True)  # a folder that cannot be measured must not grow
            raise
        excess = sum(size for _, size, _ in files) - self._max_bytes * 31 // 32
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
        self._room_bytes = self._max_bytes // 32


def folder_bytes(folder: Path) -> int:
    """Return the bytes that a cache takes in its folder; none if there is no folder."""
    try:
        return sum(size for _, size, _ in _measure(folder))
    except OSError:
        return 0


def _measure(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield when each file of a cache was last used, its size and its path. Raises: OSError."""
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            if entry.is_file() and not entry.name.startswith(_LOCK):
                status = entry.stat()
                yield status.st_mtime_ns, status.st_size, Path(entry.path)
