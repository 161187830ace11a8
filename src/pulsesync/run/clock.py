"""The time of a store, by its own clock: with it the age of an object does not depend on this machine's clock."""

from pulsesync.errors import StoreError
from pulsesync.run import keys
from pulsesync.store import Store
from pulsesync.store.base import layers


def store_time(store: Store) -> float:
    """Return the store's time in seconds since 1970: as its server states it, or that of an object just written.

    Raises: StoreError: the store can neither state it nor be written, or it cannot list.
    """
    for layer in layers(store):
        if hasattr(layer, "now"):
            return float(layer.now())
    store.put(keys.CLOCK, b"")
    for entry in store.list(keys.PRUNED):
        if entry.key == keys.CLOCK:
            return entry.modified_s
    raise StoreError(f"{keys.CLOCK} was written, but a listing does not show it", key=keys.CLOCK, retryable=True)
