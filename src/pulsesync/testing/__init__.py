"""The test kit, for this package and for others.

Weight updates like those of a real run, a recorded run, arbitrary bits; a suite for stores, one for the weights of
frameworks, and a store that fails.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pulsesync.testing.faults import FaultyStore
from pulsesync.testing.recorded import RecordedSlice, load_recorded
from pulsesync.testing.updates import AdamUpdates, mutate, random_bits

if TYPE_CHECKING:
    from pulsesync.testing.frameworks import FrameworkTests
    from pulsesync.testing.stores import StoreTests

__all__ = [
    "AdamUpdates",
    "FaultyStore",
    "FrameworkTests",
    "RecordedSlice",
    "StoreTests",
    "load_recorded",
    "mutate",
    "random_bits",
]


def __getattr__(name: str) -> Any:
    """Import pytest only if a suite is used."""
    module = {"FrameworkTests": "frameworks", "StoreTests": "stores"}.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
