"""Locks of the processes of a host: of those that want to fetch the same object, one does, and the others wait.

A process that fetches touches its lock every second. If it is stopped, or its machine hangs, the waiting processes
notice that and continue without it: no process can block the others forever.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

PATIENCE_S = 15.0  # wait for a process that does not touch its lock
_BEAT_S = 1.0  # between two touches of a lock by a process that fetches
_LONGEST_WAIT_S = 900.0  # wait for a process that touches its lock


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which exists only while a process holds it or waits for it.

    Raises: TimeoutError, if the holder does not touch the lock, or does not finish; OSError, if the disk cannot lock.
    """
    file = _acquire(path)
    done = threading.Event()
    thread = threading.Thread(target=_show_life, args=(file, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with suppress(OSError):
            path.unlink(missing_ok=True)
        file.close()


def _acquire(path: Path) -> IO[bytes]:
    began = alive = time.monotonic()
    beat, pause_s = 0, 0.001
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_open_as(path, file.fileno()):
                return file
            file.close()  # its holder has removed it, and the next one locks a new file of that name
            continue
        except BlockingIOError:
            now, seen = time.monotonic(), os.fstat(file.fileno()).st_mtime_ns
            file.close()
        except BaseException:
            file.close()
            raise
        if seen != beat:  # compared with its last value only: the disk may have another clock
            beat, alive = seen, now
        if now - alive > PATIENCE_S:
            raise TimeoutError(f"the process that locked {path} does not respond; the limit is {PATIENCE_S:g} s")
        if now - began > _LONGEST_WAIT_S:
            raise TimeoutError(f"{path} is still locked by a live process; the limit is {_LONGEST_WAIT_S:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)


def _show_life(file: IO[bytes], done: threading.Event) -> None:
    while not done.wait(_BEAT_S):
        with suppress(OSError):
            os.utime(file.fileno())


def _is_open_as(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
