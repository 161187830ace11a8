"""The hot loops, chosen here: numba where it is installed, plain numpy otherwise, which is said once per process.

Importing this costs nothing; the first call of `active` imports numba (about half a second) and the first use of a
kernel loads it from numba's cache, or compiles it once per machine (some seconds for all of them: `pulsesync.warm_up`).
"""

import logging
import threading
from functools import cache
from importlib import import_module
from typing import Any

logger = logging.getLogger(__name__)
_warning = threading.Lock()  # taken for good by the thread that warns: several may choose kernels at once


@cache
def load(name: str) -> Any:
    """Import one set of kernels by name, "reference" or "cpu"."""
    return import_module(f"pulsesync.kernels.{name}")


@cache
def _best() -> tuple[str, str]:
    """The set of kernels to use, and why it is not that of numba."""
    try:
        load("cpu")
    except ModuleNotFoundError:
        return "reference", "is not installed"
    except ImportError as e:  # a numba that does not support the installed numpy
        return "reference", f"cannot be imported ({e})"
    return "cpu", ""


def active(*, warns: bool = True) -> Any:
    """Return the module whose functions to call; `cpu` and `reference` have the same functions.

    Args:
        warns: Whether to log, once per process, that numba is missing: not for what numpy does nearly as fast, which is
            all that weights on a GPU need.
    """
    name, why = _best()
    if why and warns and _warning.acquire(blocking=False):
        logger.warning(
            "numba %s: weights in host memory are compared, decoded and checked in plain numpy. The weights are the "
            "same, but a patch takes some 20 times as long. For fast kernels: pip install numba",
            why,
        )
    return load(name)
