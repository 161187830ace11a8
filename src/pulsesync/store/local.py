"""A folder as a store, safe for several processes of one machine.

What was written is on the disk, under its name, before the call returns: after a power cut, a committed version still
exists, and so does every body that was written before it.
"""

import errno
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pulsesync.core import arguments
from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store.base import ObjectEntry, ReadOnlyStore
from pulsesync.store.keys import check_key, check_prefix

_SPOOL = ".spool-"
_SPOOL_AGE_S = 3600.0
_MAX_WARNED = 1000  # links that are logged
# Opens a folder of a path: on Linux the right to enter it is enough.
_ENTER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
# Errors of the system that mean that there is no object: a path below a file, a name that is too long, a cycle of
# links, a socket or a device without a driver.
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO, errno.ENODEV)
_NO_ROOM = "Make room on its disk: pulse prune removes old versions of a run"
_NO_RIGHT = "Let this user read and write the folder, or give another one"
_ADVICE = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EROFS: _NO_RIGHT,
    errno.ENOTDIR: "Give a folder, or a path at which there is nothing yet",
}

logger = logging.getLogger(__name__)


class LocalStore:
    """Objects are files below a folder. A file appears under its name only when all of it is on the disk.

    Args:
        folder: Where the files are; the first write creates it if it does not exist.
    """

    is_local = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = arguments.folder("folder", folder)
        self._settled: set[Path] = set()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        with self._translated(key, "read"), self._opened(key) as handle:
            size = os.fstat(handle).st_size
            stop, pieces = size if end is None else min(end, size), []
            while begin < stop and (piece := os.pread(handle, stop - begin, begin)):  # of 2 GiB at most
                pieces.append(piece)
                begin += len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def size(self, key: str) -> int:
        with self._translated(key, "read"), self._opened(key) as handle:
            return os.fstat(handle).st_size

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(key)
        with self._translated(key, "write"), self._spooled(path, data) as spool:
            os.replace(spool, path)
            _sync_folder(path.parent)

    def create(self, key: str, data: bytes) -> None:
        path = self._path(key)
        with self._translated(key, "create"), self._spooled(path, data) as spool:
            os.link(spool, path)
            _sync_folder(path.parent)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        with self._translated(prefix, "list"):
            found = [
                ObjectEntry(path.relative_to(self.folder).as_posix(), status.st_size, status.st_mtime)
                for path, status in self._listed(self.folder / prefix)
                if not path.name.startswith(_SPOOL)
            ]
        return iter(sorted(found, key=lambda entry: entry.key))

    def delete(self, key: str) -> None:
        with self._translated(key, "delete"):
            self._path(key).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove incomplete files of processes that were killed more than an hour ago. Returns how many there were."""
        with self._translated("", "sweep"):
            spooled = [(path, status) for path, status in _walk(self.folder) if path.name.startswith(_SPOOL)]
            stale = [path for path, status in spooled if time.time() - status.st_mtime > _SPOOL_AGE_S]
            for path in stale:
                path.unlink(missing_ok=True)
        return len(stale)

    @contextmanager
    def _opened(self, key: str) -> Iterator[int]:
        """Open the file of an object without blocking: a FIFO is not an object. Raises: NotFoundError, OSError."""
        check_key(key)
        if key.rpartition("/")[2].startswith(_SPOOL):
            raise NotFoundError(f"there is no {key} in {self.folder}: it is the name of a temporary file", key=key)
        handle = self._open(self.folder / key)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise NotFoundError(
                    f"there is no {key} in {self.folder}: the entry of that name is not a file", key=key
                )
            yield handle
        finally:
            os.close(handle)

    def _open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def _listed(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        return _walk(folder)

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.rpartition("/")[2].startswith(_SPOOL):
            raise StoreError(f"{key!r} cannot be a key in a folder: it is the name of a temporary file", key=key)
        return self.folder / key

    @contextmanager
    def _spooled(self, target: Path, data: bytes | memoryview) -> Iterator[Path]:
        """Write a temporary file with these bytes next to its target; it exists until the block ends."""
        try:
            self._settle(target.parent)
        except FileExistsError as e:  # must not be mistaken for the object itself
            raise NotADirectoryError(errno.ENOTDIR, "a file is in the place of a folder", str(target.parent)) from e
        path = target.parent / f"{_SPOOL}{secrets.token_hex(8)}"
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _settle(self, folder: Path) -> None:
        """Create a folder, and ensure that it and those above it in the store are on the disk.

        That a folder exists is no proof: the process that created it may not have synced it to disk yet.
        """
        if folder in self._settled and folder.is_dir():
            return
        if self.folder in folder.parents or not folder.parent.exists():
            self._settle(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)
        self._settled.add(folder)

    @contextmanager
    def _translated(self, key: str, verb: str) -> Iterator[None]:
        """Translate errors of the system into the errors of a store."""
        try:
            yield
        except FileExistsError as e:
            if verb != "create":
                raise StoreError(f"cannot {verb} {key} in {self.folder}: {e}", key=key) from e
            raise ConflictError(f"{key} exists already in {self.folder}", key=key) from e
        except FileNotFoundError as e:
            raise NotFoundError(f"there is no {key} in {self.folder}", key=key) from e
        except OSError as e:
            if verb == "read" and e.errno in _ABSENT:
                raise NotFoundError(f"there is no {key} in {self.folder}: {e.strerror}", key=key) from e
            failure = StoreError(f"cannot {verb} {key} in {self.folder}: {e}", key=key)
            raise failure.advise(_ADVICE.get(e.errno or 0, "Check the disk and the file system")) from e


class ServedFolder(ReadOnlyStore, LocalStore):
    """A folder to serve to others: no symbolic link is followed out of it. The folder itself may be one.

    A LocalStore follows every link, because the owner of a run may have moved its bodies to another disk. With that, a
    server would serve any file that a process with write access to the run can link to. Therefore the target of a link
    that leads out of the folder is neither found nor listed; one warning is logged for each such link.

    Args:
        folder: What to serve.
        within: Absolute folders without links, in one of which everything must be; none: in the folder itself.
    """

    def __init__(self, folder: str | os.PathLike[str], within: Sequence[Path] = ()) -> None:
        super().__init__(folder)
        self._within = within
        self._warned: set[Path] = set()

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"a ServedFolder is read-only; write {key} to {self.folder} with a LocalStore", key=key)

    def _open(self, path: Path) -> int:
        """Resolve all links, and then open the target without following any: a link may have been added meanwhile."""
        real = self._resolved(path)
        if real is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        handle = os.open("/", _ENTER)
        names = real.parts[1:] or (".",)
        for flags, name in zip([_ENTER] * (len(names) - 1) + [os.O_RDONLY | os.O_NONBLOCK], names, strict=True):
            try:
                inner = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _listed(self, folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
        """Open the folder as `_open` does, and walk from there: a link may replace it meanwhile."""
        try:
            handle = self._open(folder)
        except OSError as e:
            _raise_unless_absent(e)
            return
        try:
            for where, _, names, inside in os.fwalk(".", onerror=_raise_unless_absent, dir_fd=handle):
                for name in names:
                    path = folder / where / name
                    try:
                        status = os.stat(name, dir_fd=inside, follow_symlinks=False)
                        if stat.S_ISLNK(status.st_mode) and (real := self._resolved(path)) is not None:
                            status = real.lstat()
                    except OSError as e:
                        _raise_unless_absent(e)
                        continue
                    if stat.S_ISREG(status.st_mode):
                        yield path, status
        except NotADirectoryError:
            return
        finally:
            os.close(handle)

    def _resolved(self, path: Path) -> Path | None:
        """Return the target of a path; None if that is outside."""
        roots, real = self._within or (Path(os.path.realpath(self.folder)),), Path(os.path.realpath(path))
        if any(real.is_relative_to(root) for root in roots):
            return real
        self._warn(roots, path)
        return None

    def _warn(self, roots: Sequence[Path], path: Path) -> None:
        """Log which link on a path leads outside, once for each link."""
        names = path.relative_to(self.folder).parts
        for n in range(len(names) + 1):
            outside = self.folder.joinpath(*names[:n])
            if not any(Path(os.path.realpath(outside)).is_relative_to(root) for root in roots):
                break
        if outside not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(outside)
            logger.warning(
                "Not read: %s is a link to %s, outside of %s. Serve or allow a folder that contains both, or copy the "
                "files.",
                outside,
                os.path.realpath(outside),
                ", ".join(map(str, self._within or [self.folder])),
            )


def _sync_folder(folder: Path) -> None:
    """Ensure that the names in a folder are on the disk, as fsync does for the bytes of a file."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # the run's folder may be in one that this process may enter but not read
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise_unless_absent(error: OSError) -> None:
    if error.errno not in _ABSENT:
        raise error


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the files below a folder, and nothing else; none if there is no folder; skip those that vanish."""
    for where, _, names in os.walk(folder, onerror=_raise_unless_absent):
        for name in names:
            path = Path(where, name)
            try:
                status = path.stat()
            except OSError as e:
                _raise_unless_absent(e)  # a broken link is not an object either
                continue
            if stat.S_ISREG(status.st_mode):
                yield path, status
