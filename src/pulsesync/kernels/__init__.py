"""The hot loops, chosen here: numba where it is installed, plain numpy otherwise.

Importing this costs nothing; the first call of `active` imports numba (about half a second) and the first use of a
kernel loads it from numba's cache, or compiles it once per machine (some seconds for all of them: `pulsesync.warm_up`).
"""

from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_forced: list[str] = []


@cache
def _load(name: str) -> Any:
    return import_module(f"pulsesync.kernels.{name}")


@cache
def _best() -> str:
    try:
        _load("cpu")
    except ImportError:  # no numba, or one that does not go with the numpy that is there
        return "reference"
    return "cpu"


def active() -> Any:
    """Return the module whose functions to call; `cpu` and `reference` have the same ones."""
    return _load(_forced[-1] if _forced else _best())


@contextmanager
def forced(name: str) -> "Iterator[None]":
    """Use one set of kernels, "reference" or "cpu", inside the block (all threads): for tests and comparisons."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()
