"""Temporary folders that are removed even if the process that uses them is killed.

Each folder `pulse-spool-<token>` has a file `pulse-spool-<token>.lock` next to it, on which its process holds an flock
until it ends. A process that makes a folder first removes those whose lock is free. It removes only folders with such a
name and a lock file that contains the line written here: other programs use /tmp too, and flock(1) leaves its lock
files there. Folders without a lock, as earlier releases made them, stay, because nothing shows whether they are in use.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)
_LOCK = ".lock"
_LINE = b"The temporary folder of a pulsesync process that has this file locked.\n"  # all that a lock contains
_NAME = re.compile("pulse-spool-[0-9a-f]{16}")


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone. A folder that exists is not changed.

    What is in it may be readable by all: nobody else can get there. To share it with other users, create it first.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)  # another process may have created it meanwhile


def nearest(folder: Path) -> Path:
    """The nearest folder that exists, of one and those above it. Raises: OSError."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())


class ScratchFolder:
    """A new, empty folder in the system's temporary folder, for this process alone.

    It is removed by `close`, when the object is collected, or when the process exits; if the process is killed, by the
    next process that makes one. A forked child never removes its parent's folder, but keeps it in use while it runs.

    Raises:
        OSError: the temporary folder cannot be written.
    """

    def __init__(self) -> None:
        where = Path(tempfile.gettempdir())
        sweep(where)
        self.path, lock = _make(where)
        self._end = weakref.finalize(self, _remove_own, os.getpid(), self.path, lock)

    def close(self) -> None:
        """Remove the folder and its contents; does nothing if that was already done."""
        self._end()


def sweep(where: Path) -> None:
    """Remove the folders of processes that have ended. What belongs to other users is left alone."""
    for lock in where.glob(f"pulse-*{_LOCK}"):
        if not _NAME.fullmatch(lock.name.removesuffix(_LOCK)):
            continue
        with suppress(OSError):  # in use, another user's, or removed by another process meanwhile
            _remove_abandoned(lock)


def _make(where: Path) -> tuple[Path, int | None]:
    """Make a folder; return it with the open lock, None where the file system has no locks. Raises: OSError."""
    while True:
        path = where / f"pulse-spool-{secrets.token_hex(8)}"
        lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(lock, _LINE)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = _is_open_as(_lock_of(path), lock)
        except BlockingIOError:  # a sweeping process has opened the file before it was locked, and may remove it
            mine = False
        except OSError as e:
            text = "The file system of %s has no locks (%s): %s is not removed if this process is killed."
            logger.info(text, where, e.strerror, path)
            _lock_of(path).unlink(missing_ok=True)
            os.close(lock)
            path.mkdir(mode=0o700)
            return path, None
        if mine:
            path.mkdir(mode=0o700)
            return path, lock
        _lock_of(path).unlink(missing_ok=True)
        os.close(lock)


def _remove_own(process: int, path: Path, lock: int | None) -> None:
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            with suppress(OSError):
                _lock_of(path).unlink(missing_ok=True)
    if lock is not None:
        os.close(lock)  # in a forked child: its copy alone


def _remove_abandoned(lock: Path) -> None:
    """Remove the folder that a lock is for, if no process holds the lock. Raises: OSError."""
    handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            return
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_open_as(lock, handle):
            return  # another process was quicker
        if os.pread(handle, len(_LINE) + 1, 0) != _LINE:
            return  # the file of another program
        path = lock.with_name(lock.name.removesuffix(_LOCK))
        with suppress(FileNotFoundError):
            if path.lstat().st_uid != os.getuid():
                return
            shutil.rmtree(path)
            logger.info("Removed %s, which was left by a process that has ended.", path)
        lock.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _is_open_as(path: Path, handle: int) -> bool:
    """Whether this path is still that of the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(handle))
    except FileNotFoundError:
        return False
