"""The hot loops, chosen here: numba where it is installed, plain numpy otherwise.

Importing this costs nothing; the first call of `active` imports numba (about half a second) and the first use of a
kernel loads it from numba's cache, or compiles it once per machine (some seconds for all of them: `pulsesync.warm_up`).
"""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def load(name: str) -> Any:
    """Import one set of kernels by name, "reference" or "cpu"."""
    return import_module(f"pulsesync.kernels.{name}")


@cache
def _best() -> str:
    try:
        load("cpu")
    except ImportError:  # no numba, or one that does not support the installed numpy
        return "reference"
    return "cpu"


def active() -> Any:
    """Return the module whose functions to call; `cpu` and `reference` have the same functions."""
    return load(_best())
