"""Stores, which keep the objects of a run. The location's scheme selects one; wrappers add behaviour."""

import os
from typing import TYPE_CHECKING, Any

from pulsesync.core.location import ParsedLocation
from pulsesync.store.base import Location, ObjectEntry, Store, forget, size_of
from pulsesync.store.cache import CachedStore, origin_of
from pulsesync.store.local import LocalStore
from pulsesync.store.memory import MemoryStore, named
from pulsesync.store.object import ObjectStore
from pulsesync.store.retry import RetryStore
from pulsesync.store.throttle import ThrottledStore

if TYPE_CHECKING:
    from pulsesync.store.http import HttpStore

__all__ = [
    "CachedStore",
    "HttpStore",
    "LocalStore",
    "Location",
    "MemoryStore",
    "ObjectEntry",
    "ObjectStore",
    "RetryStore",
    "Store",
    "ThrottledStore",
    "forget",
    "open_store",
    "origin_of",
    "size_of",
]


def open_store(location: Location | ParsedLocation) -> Store:
    """Open the store of a location; stores that use a network repeat calls that failed. A store is returned as it is.

    A location is a path (a string or a `pathlib.Path`), `file://path`, `memory://name` (one store for each name of a
    process), `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or the `http://` or `https://`
    address of a server. A URL is written without `%`: a space as a space. `~/name` is in the user's home folder.

    Raises:
        TypeError: this is neither a text, a path nor a store.
        ValueError: the scheme is not among these, or the rest of the location is not valid for its store.
    """
    if not isinstance(location, str | os.PathLike | ParsedLocation) and hasattr(location, "create"):
        return location
    at = ParsedLocation.parse(location)
    if at.path is not None:
        return LocalStore(at.path)
    if at.scheme == "memory":
        return named("/".join((at.authority, *at.segments)))
    if at.scheme in ("s3", "gs", "az"):
        return RetryStore(ObjectStore(at))
    from pulsesync.store.http import HttpStore

    return RetryStore(HttpStore(at))


def __getattr__(name: str) -> Any:
    """Import the HTTP client only when it is used."""
    if name == "HttpStore":
        from pulsesync.store.http import HttpStore

        return HttpStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
