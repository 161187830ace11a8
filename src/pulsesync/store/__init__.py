"""Where a run lives. Five verbs; which store, by the location's scheme."""

from pulsesync.store.base import Store
from pulsesync.store.local import LocalStore

__all__ = ["LocalStore", "Store", "open_store"]


def open_store(location: str) -> Store:
    """Open the store of a location: a path or file:// so far.

    Raises:
        ValueError: a scheme that is not known.
    """
    scheme, colon, rest = location.partition("://")
    if colon and scheme != "file":
        raise ValueError(f"no store for {scheme}:// yet; use a folder")
    return LocalStore(rest if colon else location)
