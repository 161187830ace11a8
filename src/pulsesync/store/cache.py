"""A cache on the disk of a host: of all its processes together, one fetches an object, and the others find it there.

An entry is one file: the size of its content (u64), then the content in blocks of 1 MiB (the last may be shorter), each
behind its SHA-256. So a range is checked by reading the blocks it touches, and an entry that was cut short or damaged
is found out, thrown away and fetched again.
"""

import fcntl
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from pulsesync.store.base import CONTENT_ADDRESSED, Entry, Store, forget

_SIZE = struct.Struct("<Q")
_DIGEST_BYTES = 32
_BLOCK_BYTES = 1 << 20
_LOCK = ".lock-"
_SPOOL = ".spool-"


class CachedStore:
    """Keeps content-addressed objects in a folder; everything else passes through.

    Processes of one host, also those of several runs, may share the folder. It is kept below `max_bytes` by throwing
    out what was not used for longest. A disk that is full, read-only or broken costs the cache, never the read.

    The checks find what the disk did. What the store sent is kept as it came: a reader that finds an object bad calls
    `forget` before it asks again.
    """

    def __init__(self, store: Store, folder: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self.store = store
        self.folder = Path(folder)
        self._max_bytes = max_bytes

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if not key.startswith(CONTENT_ADDRESSED):
            return self.store.get(key, begin, end)
        found = self._look_up(key, begin, end)
        if found is not None:
            return found
        with self._turn(_name(key, begin, end)):
            found = self._look_up(key, begin, end)  # whoever had the turn before has put it there
            if found is None:
                found = self.store.get(key, begin, end)
                whole = begin == 0 and (end is None or len(found) < end)
                self._keep(_name(key) if whole else _name(key, begin, end), found)
        return found

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store.put(key, data)
        if key.startswith(CONTENT_ADDRESSED):
            self._drop(key)
            self._keep(_name(key), data)

    def create(self, key: str, data: bytes) -> None:
        self.store.create(key, data)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)
        self._drop(key)

    def forget(self, key: str) -> None:
        """Throw out what the cache holds of an object, so that the next read asks the store; and pass the word on."""
        self._drop(key)
        forget(self.store, key)

    def _drop(self, key: str) -> None:
        whole = _name(key)
        with suppress(OSError):
            for path in list(self.folder.iterdir()):
                if path.name == whole or path.name.startswith(whole + "@"):
                    path.unlink(missing_ok=True)

    def _look_up(self, key: str, begin: int, end: int | None) -> bytes | None:
        """Return these bytes from the whole object, else from an entry of just this range, if either is there."""
        found = self._read(_name(key), begin, end)
        if found is None and (begin, end) != (0, None):
            found = self._read(_name(key, begin, end), 0, None)
        return found

    def _read(self, name: str, begin: int, end: int | None) -> bytes | None:
        path = self.folder / name
        try:
            found = _read_entry(path, begin, end)
            if found is None:
                path.unlink(missing_ok=True)
        except OSError:
            return None
        with suppress(OSError):  # a cache that may only be read serves all the same
            os.utime(path)  # used just now
        return found

    def _keep(self, name: str, data: bytes | memoryview) -> None:
        spool = self.folder / f"{_SPOOL}{secrets.token_hex(8)}"
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                _write_entry(spool, data)
                os.replace(spool, self.folder / name)
            finally:
                spool.unlink(missing_ok=True)
            self._make_room()

    def _make_room(self) -> None:
        if self._max_bytes is None:
            return
        entries = []
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):
                if path.is_file() and not path.name.startswith(_LOCK):
                    status = path.stat()
                    entries.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in entries) - self._max_bytes
        for _, size, path in sorted(entries):
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Let one thread of one process at a time into the block; all of them, where the disk cannot lock."""
        with ExitStack() as stack:
            with suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(self.folder / f"{_LOCK}{name}"))
            yield


def _name(key: str, begin: int = 0, end: int | None = None) -> str:
    """The file of an object, or of a range of it. A quoted key holds no @."""
    whole = quote(key, safe="")
    return whole if (begin, end) == (0, None) else f"{whole}@{begin}-{'' if end is None else end}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file that is there only while somebody holds it or waits. Raises: OSError."""
    while True:
        file = path.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_open_as(path, file.fileno()):
                break
        except BaseException:
            file.close()
            raise
        file.close()  # whoever had it has removed it, and the next holds another file by that name
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        file.close()


def _is_open_as(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write_entry(path: Path, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    with path.open("xb") as file:
        file.write(_SIZE.pack(len(view)))
        for at in range(0, len(view), _BLOCK_BYTES):
            block = view[at : at + _BLOCK_BYTES]
            file.write(hashlib.sha256(block).digest())
            file.write(block)


def _read_entry(path: Path, begin: int, end: int | None) -> bytes | None:
    """Return bytes begin..end of the content, or None if the file is damaged there. Raises: OSError."""
    with path.open("rb") as file:
        head = file.read(_SIZE.size)
        size = _SIZE.unpack(head)[0] if len(head) == _SIZE.size else -1
        blocks = -(-size // _BLOCK_BYTES)
        if os.fstat(file.fileno()).st_size != _SIZE.size + blocks * _DIGEST_BYTES + size:
            return None
        end = size if end is None else min(end, size)
        if begin >= end:
            return b""
        first = begin // _BLOCK_BYTES
        file.seek(_SIZE.size + first * (_DIGEST_BYTES + _BLOCK_BYTES))
        content = []
        for _ in range(first, -(-end // _BLOCK_BYTES)):
            digest, block = file.read(_DIGEST_BYTES), file.read(_BLOCK_BYTES)
            if hashlib.sha256(block).digest() != digest:
                return None
            content.append(block)
    return b"".join(content)[begin - first * _BLOCK_BYTES : end - first * _BLOCK_BYTES]
