"""States on a GPU: compared, coded, decoded, applied and counted in place, with the bytes that a CPU would write.

Only counts, tables and finished streams are copied to the host. Everything here needs torch and Triton, and is imported
only when a source has tensors on a GPU (`find`).
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pulsesync.errors import StateError

if TYPE_CHECKING:
    import torch


def find(source: Any) -> "torch.device | None":
    """The first GPU on which tensors of a module, state dict or mapping are; None where all are in host memory.

    Tensors without weights count only if no other tensor has any: ranks without a shard have empty tensors on any
        device.

    Raises:
        StateError: a tensor is neither in host memory nor on a CUDA device.
    """
    library: Any = sys.modules.get("torch")
    if library is None:
        return None
    if not isinstance(source, Mapping):
        source = source.state_dict() if hasattr(source, "state_dict") else {}
    places: dict[Any, bool] = {}  # devices in order, and whether there are weights
    for name, tensor in source.items():
        where = getattr(tensor, "device", None) if isinstance(tensor, library.Tensor) else None
        if where is None:
            continue  # not a tensor: the reader of the source raises the error
        if where.type not in ("cuda", "cpu"):
            if tensor.numel() or not places:
                found_on = f"tensor {name!r} is on {where}"
                raise StateError(f"{found_on}; host memory and CUDA devices are supported", tensor=name)
            continue
        places[where] = places.get(where, False) or tensor.numel() > 0
    full = [where for where, has_weights in places.items() if has_weights] or list(places)
    found: torch.device | None = next((where for where in full if not is_host(where)), None)
    return found


def is_host(where: "torch.device") -> bool:
    """Whether tensors on this torch device are in host memory."""
    return where.type == "cpu"


def load(module: str) -> Any:
    """Import a module of this package. Raises: StateError, if a package that it needs is not installed."""
    try:
        return import_module(f"pulsesync.device.{module}")
    except ModuleNotFoundError as e:
        raise StateError(
            f"tensors on a GPU need {e.name}, which comes with torch for CUDA: pip install {e.name}; or pass a copy "
            "in host memory"
        ) from e
