"""A store in the memory of one process: for tests, and for a trainer and workers that share a process."""

import threading
import time
from collections.abc import Iterator

from pulsesync.errors import ConflictError, NotFoundError
from pulsesync.store.base import ObjectEntry
from pulsesync.store.keys import check_key, check_prefix


class MemoryStore:
    """Keeps objects in a dictionary; they disappear with it.

    Args:
        url: The name of this store in messages and events.
    """

    is_local = is_private = True

    def __init__(self, *, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, tuple[bytes, float]] = {}  # content, modified
        self._lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self._found(key)[begin:end]

    def size(self, key: str) -> int:
        return len(self._found(key))

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        content = bytes(data)
        with self._lock:
            self._objects[key] = content, time.time()

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        content = bytes(data)
        with self._lock:
            if key in self._objects:
                raise ConflictError(f"{key} exists already in memory", key=key)
            self._objects[key] = content, time.time()

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        with self._lock:
            found = sorted((key, *of) for key, of in self._objects.items() if key.startswith(prefix))
        return (ObjectEntry(key, len(data), modified) for key, data, modified in found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._objects.pop(key, None)

    def _found(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            if key not in self._objects:
                raise NotFoundError(f"there is no {key} in memory", key=key)
            return self._objects[key][0]


_NAMED: dict[str, MemoryStore] = {}


def named(name: str) -> MemoryStore:
    """Return the store of a name: in one process the same for the same name, and kept until the process ends."""
    return _NAMED.setdefault(name, MemoryStore(url=f"memory://{name}"))
