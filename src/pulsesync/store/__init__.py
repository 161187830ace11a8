"""Stores, which keep the objects of a run. The location's scheme selects one; wrappers add behaviour."""

import os
from typing import TYPE_CHECKING, Any

from pulsesync.core.location import ParsedLocation
from pulsesync.store.base import Location, ObjectEntry, Store, WrappedStore, forget, size_of
from pulsesync.store.cache import CachedStore, origin_of
from pulsesync.store.local import LocalStore
from pulsesync.store.memory import MemoryStore, named
from pulsesync.store.object import ObjectStore
from pulsesync.store.retry import RetryStore
from pulsesync.store.throttle import ThrottledStore
from pulsesync.store.tokens import find_token, may_send_in_clear

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
    "WrappedStore",
    "forget",
    "open_store",
    "origin_of",
    "size_of",
]


def open_store(location: Location | ParsedLocation, *, token: str | None = None) -> Store:
    """Open the store of a location; stores that use a network repeat calls that failed. A store is returned as it is.

    A location is a path (a string or a `pathlib.Path`), `file://path`, `memory://name` (one store for each name of a
    process), `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`, or the `http://` or `https://`
    address of a server. A URL is written without `%`: a space as a space. `~/name` is in the user's home folder.

    Args:
        location: See above.
        token: Sent to the server of an http or https location, and to no other. If not given, the token that
            PULSE_SEND_TOKENS has for that server, if it has one.

    Raises:
        TypeError: this is neither a text, a path nor a store.
        ValueError: the scheme is not among these, or the rest of the location is not valid for its store; a token is
            malformed, would be sent unencrypted, or does not belong to such a location.
    """
    if not isinstance(location, str | os.PathLike | ParsedLocation) and hasattr(location, "create"):
        if token is not None:
            raise ValueError("a store was given, which is open already: pass token= where it is opened")
        return location
    at = ParsedLocation.parse(location)
    if token is not None and at.scheme not in ("http", "https"):
        raise ValueError(f"token= works with an http:// or https:// location only; got {at}: leave token= out")
    if at.path is not None:
        return LocalStore(at.path)
    if at.scheme == "memory":
        return named("/".join((at.authority, *at.segments)))
    if at.scheme in ("s3", "gs", "az"):
        return RetryStore(ObjectStore(at))
    from pulsesync.store.http import HttpStore

    token = find_token(at) if token is None else token
    return RetryStore(HttpStore(at, token, token_in_clear=may_send_in_clear()))


def __getattr__(name: str) -> Any:
    """Import the HTTP client only when it is used."""
    if name == "HttpStore":
        from pulsesync.store.http import HttpStore

        return HttpStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
