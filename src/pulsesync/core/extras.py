"""What is said where a package is missing that only some uses of pulsesync need."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from pulsesync.errors import PulseError


def load(name: str, extra: str) -> Any:
    """Import a module that needs an extra. Raises: PulseError, which names the extra, if it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as e:
        raise missing(e, extra) from e


def missing(error: ImportError, extra: str) -> PulseError:
    """The error for a package that is not installed: it names the extra of pulsesync that brings it along."""
    return PulseError(f"{error.name} is not installed: pip install 'pulsesync[{extra}]'")


@contextmanager
def needed_for(use: str) -> Iterator[None]:
    """Import inside this what a small installation may lack. Raises: PulseError, which names the package."""
    try:
        yield
    except ModuleNotFoundError as e:
        package = (e.name or "").partition(".")[0]
        raise PulseError(f"{package} is not installed, and {use} need it: pip install {package}") from e
