"""The interface of a store. Objects are small files or parts; keys are paths with `/`."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from pulsesync.errors import LimitError, StoreError

_CONTENT_ADDRESSED = ("parts", "layouts", "files")

# Limits of a listing that comes over a network, because its reader may keep all: 500 MB for keys of 80 characters.
MAX_ENTRIES = 1 << 21
WINDOW_BYTES = 1 << 22  # bytes of an object that a server reads at once; also to measure an object by reading it


def is_content_addressed(key: str) -> bool:
    """Return whether a key names its content: such an object stays as it is until it is deleted.

    It may begin with the folder of a run, because a server may serve a folder above several. A pointer, or the folder
    of a run, may have the name of such a kind; their objects change.
    """
    *above, kind, name = "", *key.split("/")
    return kind in _CONTENT_ADDRESSED and name != "head" and above[-1:] != ["pointers"]


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """An object as a listing shows it."""

    key: str
    size_bytes: int
    modified_s: float  # since 1970, by the store's own clock


class Store(Protocol):
    """Five methods. Implementations translate their own exceptions into StoreError, and are safe for many threads."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object, or its bytes begin..end: fewer if it ends earlier. Raises: NotFoundError.

        A reader that does not trust the store passes an end: no more than that is ever kept in memory.
        """

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write an object, completely or not at all; one that exists is replaced."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist; of several concurrent calls, one succeeds. Raises: ConflictError."""

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose keys begin with a prefix ending in `/`, sorted by key."""

    def delete(self, key: str) -> None:
        """Remove an object; if there is none, that is no error."""


Location: TypeAlias = str | os.PathLike[str] | Store
"""The type of a location of a run: a path or URL, or a store that is open already."""


class WrappedStore:
    """A store in front of another: it passes every call on, and a subclass changes those that it is about.

    Args:
        store: The store behind it.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self.store.get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self.store.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def forget(self, key: str) -> None:
        """See `forget`, the function of this module."""
        forget(self.store, key)

    @property
    def is_local(self) -> bool:
        return is_local(self.store)

    @property
    def is_private(self) -> bool:
        return is_private(self.store)


def layers(store: Store) -> Iterator[Any]:
    """Yield a store and those that it wraps, one after the other; the last one keeps the objects."""
    layer: Any = store
    while layer is not None:
        yield layer
        layer = getattr(layer, "store", None)


class ReadOnlyStore:
    """The methods that write, for a store that is read-only: each raises the error that `_read_only` returns."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise self._read_only(key)

    def create(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        raise self._read_only(key)

    def _read_only(self, key: str) -> StoreError:
        """Return the error for an attempt to write, which names where the object can be written."""
        raise NotImplementedError


def too_many(limit: str, prefix: str, address: str) -> LimitError:
    """Return the error for a listing that exceeds a limit."""
    return LimitError(
        f"the listing of {prefix} at {address} has more than {limit}, the most that is read; check that a run is "
        "stored there, and prune it if it is this large",
        key=prefix,
    )


def too_slow(prefix: str, address: str, limit_s: float) -> LimitError:
    """Return the error for a listing that takes too long: no StoreError, because each repetition would take as long."""
    return LimitError(
        f"the listing of {prefix} at {address} did not end within the limit of {limit_s:g} s; check the server, and "
        "prune the run if it is very large",
        key=prefix,
    )


def unreachable(address: str) -> str:
    """Return what to do if a store does not answer."""
    return f"Check the address, and that the server is running; pulse doctor {address} tests the connection"


def refused(address: str) -> str:
    """Return what to do if a store refuses a request."""
    return (
        f"Check what these credentials may do: pulse doctor {address} (--read-only for a worker) names what is missing"
    )


def forget(store: Store, key: str) -> None:
    """Make every cache between here and the origin replace an object that turned out to be bad.

    A cache checks its copy and fetches it again if it cannot prove it right; a wrapper forwards the call, and a client
    over HTTP sends `Cache-Control: no-cache` with its next request. It is not a method of `Store`, because most stores
    have no cache.
    """
    report = getattr(store, "forget", None)
    if report is not None:
        report(key)


def pass_on(store: Store, key: str, data: bytes) -> None:
    """Send the heartbeat of a worker to the upstream of a relay. Only stores of relays have this method.

    Raises: StoreError, if the upstream does not accept it.
    """
    send = getattr(store, "pass_on", None)
    if send is not None:
        send(key, data)


def is_near(store: Store, key: str, begin: int = 0, end: int | None = None) -> bool:
    """Return whether a range of an object is in a cache of this store; False for stores without a cache.

    A server handles cached objects separately from those that it has to wait for.
    """
    ask = getattr(store, "has", None)
    return ask is not None and bool(ask(key, begin, end))


def is_local(store: Store) -> bool:
    """Return whether objects stay on this machine, so that the time of a write does not show the speed of a network.

    Stores for which that is so have an attribute of this name.
    """
    return bool(getattr(store, "is_local", False))


def is_private(store: Store) -> bool:
    """Return whether only this process can reach the objects. Stores have an attribute for it as for `is_local`."""
    return bool(getattr(store, "is_private", False))


def size_of(store: Store, key: str) -> int:
    """Return the size of an object in bytes. If the store has no method `size`, the object is read to its end.

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
