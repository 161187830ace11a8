"""What a store must be able to do. Objects are small files or whole parts; keys are paths with `/`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from pulsesync.errors import StoreError

_CONTENT_ADDRESSED = ("parts", "layouts", "files")

WINDOW_BYTES = 1 << 22  # what a server, and whatever measures an object by reading it, reads of one at once


def is_content_addressed(key: str) -> bool:
    """Return whether a key names its content: such an object stays as it is until it is deleted.

    It may begin with the folder of a run, because a server may serve a folder above several. A pointer, or the folder
    of a run, may have the name of such a kind; their objects change.
    """
    *above, kind, name = "", *key.split("/")
    return kind in _CONTENT_ADDRESSED and name != "head" and above[-1:] != ["pointers"]


@dataclass(frozen=True)
class ObjectEntry:
    """An object as a listing shows it."""

    key: str
    size_bytes: int
    modified_s: float  # since 1970, by the store's own clock


class Store(Protocol):
    """Five verbs. Implementations translate their own exceptions into StoreError, and may be used by many threads."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object, or its bytes begin..end: fewer where it ends earlier, none beyond. Raises: NotFoundError.

        A reader that does not trust the store gives an end: no more than that is ever held in memory.
        """

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, whole or not at all; one that exists is replaced."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist; of several at once, one succeeds. Raises: ConflictError."""

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with a prefix ending in `/`, sorted by key."""

    def delete(self, key: str) -> None:
        """Remove an object; none is no error."""


class ReadOnlyStore:
    """The verbs that write, for a store that is read only: each raises what `_read_only` returns."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def create(self, key: str, data: bytes) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def _read_only(self, key: str) -> StoreError:
        """The error for an attempt to write, which names where the object can be written."""
        raise NotImplementedError


def forget(store: Store, key: str) -> None:
    """Have every cache on the path to the origin replace an object that turned out to be bad. No verb: most have none.

    A cache checks its copy and fetches it again if it cannot show that it is right; a wrapper passes the call on, and a
    client over HTTP sends `Cache-Control: no-cache` with its next request.
    """
    tell = getattr(store, "forget", None)
    if tell is not None:
        tell(key)


def pass_on(store: Store, key: str, data: bytes) -> None:
    """Send the heartbeat of a worker to where a relay reads from. No verb: only a store that relays passes it on.

    Raises:
        StoreError: it is not accepted there.
    """
    send = getattr(store, "pass_on", None)
    if send is not None:
        send(key, data)


def is_near(store: Store, key: str, begin: int = 0, end: int | None = None) -> bool:
    """Return whether a range of an object is in a cache of this store. No verb: most stores have no cache.

    A server keeps what is near apart from what it has to wait for.
    """
    ask = getattr(store, "has", None)
    return ask is not None and bool(ask(key, begin, end))


def is_local(store: Store) -> bool:
    """Return whether objects stay on this machine, so that writing them says nothing about a network. No verb.

    A store says so by an attribute of this name; a wrapper without it is as local as what it wraps.
    """
    if hasattr(store, "is_local"):
        return bool(store.is_local)
    wrapped = getattr(store, "store", None)
    return wrapped is not None and is_local(wrapped)


def size_of(store: Store, key: str) -> int:
    """Return the bytes of an object. No verb: a store without a `size` of its own is read to the object's end.

    Raises:
        NotFoundError: there is no such object.
        StoreError: it cannot be read.
    """
    ask = getattr(store, "size", None)
    if ask is not None:
        return int(ask(key))
    size = 0
    while piece := store.get(key, size, size + WINDOW_BYTES):
        size += len(piece)
        if size % WINDOW_BYTES:
            break
    return size
