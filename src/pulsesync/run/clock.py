"""The time of a store, by its own clock: with it the age of an object does not depend on this machine's clock."""

from typing import Any

from pulsesync.errors import StoreError
from pulsesync.run import keys
from pulsesync.store import Store


def store_time(store: Store) -> float:
    """Return the store's time in seconds since 1970: as its server states it, or that of an object just written.

    Raises:
        StoreError: the store can neither state it nor be written, or it cannot list.
    """
    wrapped: Any = store
    while wrapped is not None:
        if hasattr(wrapped, "now"):
            return float(wrapped.now())
        wrapped = getattr(wrapped, "store", None)
    store.put(keys.CLOCK, b"")
    for entry in store.list(keys.PRUNED):
        if entry.key == keys.CLOCK:
            return entry.modified_s
    raise StoreError(f"{keys.CLOCK} was written, but a listing does not show it", key=keys.CLOCK, retryable=True)
