"""The tensors of a model that a process counts: with names, flat, each weight counted by one process.

A DTensor is counted shard by shard; if ranks have copies of a shard, by the first of them. A `Placed` is a part of a
tensor. Every other tensor counts as complete, so with several ranks only the first counts it.
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from pulsesync.errors import StateError
from pulsesync.state.sharding import Placed

FLOATS = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
MANTISSAS = {"F8_E5M2": 2, "F8_E4M3": 3, "BF16": 7, "F16": 10, "F32": 23, "F64": 52}
_LABELS = {label: name for name, label in FLOATS.items()}


@dataclass(frozen=True)
class CountedTensor:
    """A tensor of which this process counts some weights."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    local: tuple[int, ...]  # of the local part
    dtype: str
    device: str  # "" for an array of numpy

    @property
    def size(self) -> int:
        return math.prod(self.local)

    @property
    def columns(self) -> int:
        return max(math.prod(self.local[1:]), 1)


@dataclass(frozen=True)
class LocalTensors:
    """Tensors in the order in which they are counted, by device; those of one device lie next to each other."""

    tensors: tuple[CountedTensor, ...]
    names: frozenset[str]  # of all given tensors, counted or not

    @property
    def devices(self) -> dict[str, list[int]]:
        """Which tensors are on each device."""
        out: dict[str, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            out.setdefault(tensor.device, []).append(number)
        return out

    @property
    def masters(self) -> str:
        """The dtypes of the tensors."""
        return ", ".join(sorted({tensor.dtype for tensor in self.tensors}))

    @property
    def mantissa(self) -> int:
        """Bits of the finest tensor."""
        return max((MANTISSAS[tensor.dtype] for tensor in self.tensors), default=MANTISSAS["F64"])

    def pick(self, state: Mapping[str, Any]) -> list[Any]:
        """The tensors of a later state. Raises: StateError, if it has others."""
        for name in sorted(self.names ^ state.keys()):
            problem = "is no longer there" if name in self.names else "was not there before"
            raise StateError(f"tensor {name!r} {problem}", tensor=name)
        for tensor in self.tensors:
            if (found := _local_shape(state[tensor.name])) != tensor.local:
                raise StateError(
                    f"tensor {tensor.name!r} had shape {tensor.local} before and has {found} now", tensor=tensor.name
                )
        return [state[tensor.name] for tensor in self.tensors]


def hold(named: Iterable[tuple[str, Any]]) -> tuple[LocalTensors, list[Any]]:
    """The part of these tensors that this process counts (each memory once, only floats).

    And these tensors, in that order.

    Raises:
        StateError: something that is not a tensor, or a DTensor with a Partial placement.
    """
    places: set[tuple[Any, ...]] = set()
    found: list[tuple[CountedTensor, Any]] = []
    names = set()
    for name, value in named:
        names.add(name)
        local = _local_tensor(name, value)
        if local is None or (local.size and _place(value) in places):
            continue
        places.add(_place(value))
        found.append((local, value))
    first = {device: n for n, device in reversed(list(enumerate(local.device for local, _ in found)))}
    found.sort(key=lambda one: first[one[0].device])  # stable: otherwise in the given order
    return LocalTensors(tuple(local for local, _ in found), frozenset(names)), [value for _, value in found]


def flats(values: Sequence[Any]) -> list[Any]:
    """The local weights of each tensor, flat; a view if it is contiguous. None stays None."""
    torch = sys.modules.get("torch")
    with torch.no_grad() if torch is not None else nullcontext():  # DTensors then return their shards directly
        return [None if value is None else _flat(value) for value in values]


def _flat(value: Any) -> Any:
    value = _local(value)
    if isinstance(value, np.ndarray):
        return value.reshape(-1)
    return (value.to_dense() if value.is_sparse else value).detach().reshape(-1)


def rank_and_size() -> tuple[int, int]:
    """Rank of this process, and number of processes that train together."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _local_tensor(name: str, value: Any) -> CountedTensor | None:
    local = _local(value)
    torch = sys.modules.get("torch")
    if isinstance(local, np.ndarray):
        device = ""
    elif torch is not None and isinstance(local, torch.Tensor):
        device = str(local.device)
    else:
        raise StateError(f"{name!r} must be a tensor; got {type(local).__name__}", tensor=name)
    dtype = _LABELS.get(str(local.dtype).removeprefix("torch."))
    if dtype is None or not _counts_here(name, value):
        return None
    return CountedTensor(name, tuple(int(n) for n in value.shape), _local_shape(value), dtype, device)


def _counts_here(name: str, value: Any) -> bool:
    if isinstance(value, Placed):
        return True
    if not _is_dtensor(value):
        return rank_and_size()[0] == 0
    if any(placement.is_partial() for placement in value.placements):
        raise StateError(
            f"tensor {name!r}: DTensor has a Partial placement ({value.placements}); redistribute it first", tensor=name
        )
    coordinate: Sequence[int] | None = value.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(not p.is_replicate() or c == 0 for p, c in zip(value.placements, coordinate, strict=True))


def _local(value: Any) -> Any:
    if isinstance(value, Placed):
        return value.tensor
    return value.to_local() if _is_dtensor(value) else value


def _local_shape(value: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in _local(value).shape)


def _place(value: Any) -> tuple[Any, ...]:
    local = _local(value)
    if isinstance(local, np.ndarray):
        return local.__array_interface__["data"][0], local.shape, local.strides, local.dtype.str
    return local.data_ptr(), tuple(local.shape), local.stride(), str(local.dtype), str(local.device)


def _is_dtensor(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)
