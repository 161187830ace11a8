"""From which tensor of the run each tensor of a worker is derived: copied, or quantised with scales."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from pulsesync import device
from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.quantized.recipes import Recipe
from pulsesync.state.views import dtype_name, mapping_of, other_names, torch_dtype, view_bits

FLOATS = ("BF16", "F16", "F32")  # dtypes of a run that are quantised


@dataclass(frozen=True)
class Target:
    """A tensor of the worker that is derived from a tensor of the run."""

    number: int  # in the worker's layout
    name: str
    source: int  # number of the tensor of the run, in its layout
    shape: tuple[int, ...]
    scales: int | None = None  # number of the tensor of its scales, if it is quantised
    first_group: int = 0  # number of its first group among all; equal for two targets that share their scales


@dataclass(frozen=True)
class Targets:
    """All tensors of a worker: as a separate layout, in which each tensor is one tile."""

    layout: Layout
    tensors: Mapping[str, torch.Tensor]  # canonical ones, flat
    copied: Sequence[Target]
    quantized: Sequence[Target]
    groups: int
    dtype: torch.dtype  # of the weights that are quantised

    @classmethod
    def match(cls, source: Any, run: Layout, recipe: Recipe) -> "Targets":
        """Find from which tensor of the run each of a worker is derived. Raises: StateError, if one does not fit."""
        tensors = {name: _plain(name, tensor) for name, tensor in mapping_of(source).items()}
        views, ties = view_bits(tensors) if device.find(tensors) is None else device.load("memory").view(tensors)
        layout = layouts.make([view.spec for view in views.values()], ties)
        numbers = {spec.name: n for n, spec in enumerate(layout.tensors)}
        by_name = {spec.name: n for n, spec in enumerate(run.tensors)}
        sources = by_name | {alias: by_name[name] for alias, name in run.ties.items()}
        _check_all_there(tensors, run)
        where = next(iter(tensors.values())).device
        copied, quantized, dtypes, used, groups = [], [], set(), set(), 0
        first_groups: dict[int, int] = {}
        for name in sorted(sources.keys() & tensors.keys(), key=str.encode):
            spec, tensor, scales = run.tensors[sources[name]], tensors[name], name + recipe.scale_suffix
            quantizes = dtype_name(name, tensor) != spec.dtype
            used |= {name, scales} if quantizes else {name}
            if quantizes:
                _check_quantized(name, tensors, spec, recipe)
                dtypes.add(spec.dtype)
            _check_tensor(name, tensor, spec, where)
            _check_memory(name, ties, sources, recipe.scale_suffix if quantizes else None)
            if name in ties:
                continue  # the same memory under another name
            target = Target(numbers[name], name, sources[name], spec.shape)
            if not quantizes:
                copied.append(target)
                continue
            number = numbers[ties.get(scales, scales)]
            if number not in first_groups:
                first_groups[number], groups = groups, groups + tensors[scales].numel()
            quantized.append(replace(target, scales=number, first_group=first_groups[number]))
        if extra := sorted(tensors.keys() - used):
            raise other_names([], extra)
        if not quantized:
            nothing = f"no local tensor is {recipe.dtype}, so there is nothing to quantise; use Subscriber instead"
            raise StateError(nothing)
        if len(dtypes) > 1:
            raise StateError(
                f"the weights to quantise must have one dtype in the run; they have {sorted(dtypes)}: publish "
                "them with one dtype"
            )
        flats = {name: tensors[name].detach().view(-1) for name in views}
        return cls(layout, flats, copied, quantized, groups, torch_dtype(dtypes.pop()))


def _plain(name: str, tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise StateError(f"quantised weights must be torch tensors; {name!r} is a {type(tensor).__name__}", tensor=name)
    if not tensor.is_contiguous():
        raise StateError(
            f"tensor {name!r} is not contiguous: it cannot be written in place. If an engine keeps it transposed, pass "
            "its transpose, tensor.t()",
            tensor=name,
        )
    return tensor.detach()


def _check_all_there(tensors: Mapping[str, torch.Tensor], run: Layout) -> None:
    """Check that the worker has every tensor of the run, under its name or one that is tied to it."""
    aliases: dict[str, set[str]] = {}
    for alias, name in run.ties.items():
        aliases.setdefault(name, set()).add(alias)
    here = set(tensors)
    absent = [spec.name for spec in run.tensors if spec.name not in here]
    if missing := [name for name in absent if here.isdisjoint(aliases.get(name, ()))]:
        raise other_names(missing, [])


def _check_tensor(name: str, tensor: torch.Tensor, spec: TensorSpec, where: torch.device) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise StateError(
            f"tensor {name!r} has shape {tuple(tensor.shape)} in this worker and {spec.shape} in the run; pass the "
            "complete tensor of the model that the trainer publishes",
            tensor=name,
        )
    if tensor.device != where:
        raise StateError(
            f"tensor {name!r} must be on {where}, where the others are; it is on {tensor.device}: move it there",
            tensor=name,
        )


def _check_memory(name: str, ties: Mapping[str, str], sources: Mapping[str, int], scale_suffix: str | None) -> None:
    """Check that tensors share memory only if they have the same tensor of the run and the same scales."""
    other = ties.get(name, name)
    if sources.get(other) != sources[name]:
        raise StateError(
            f"{name!r} and {other!r} share memory in this worker, but not in the run; give each its own memory",
            tensor=name,
        )
    if scale_suffix is None:
        return
    scales, others = (ties.get(one + scale_suffix, one + scale_suffix) for one in (name, other))
    if scales != others:
        raise StateError(
            f"{name!r} and {other!r} share memory in this worker, but their scales do not; let both scales share "
            "memory, or neither tensor",
            tensor=scales,
        )
    if taken := {scales, name + scale_suffix} & sources.keys():
        raise StateError(
            f"the scales of {name!r} are {min(taken)!r}, which is a tensor of the run; rename the run's tensor, or "
            f"leave {name!r} unquantised",
            tensor=min(taken),
        )


def _check_quantized(name: str, tensors: Mapping[str, torch.Tensor], spec: TensorSpec, recipe: Recipe) -> None:
    """Check that a tensor can be a quantised tensor of the run."""
    tensor = tensors[name]
    if tensor.dtype != recipe.dtype or spec.dtype not in FLOATS:
        raise StateError(
            f"tensor {name!r} is {tensor.dtype} in this worker and {spec.dtype} in the run; it must be the same, or "
            f"for recipe {recipe.name!r} be {recipe.dtype} in the worker and BF16, F16 or F32 in the run",
            tensor=name,
        )
    if len(spec.shape) != 2:
        raise StateError(
            f"tensor {name!r} has shape {spec.shape}; only matrices are quantised: keep it as {spec.dtype} "
            "in this worker",
            tensor=name,
        )
    scales = tensors.get(called := name + recipe.scale_suffix)
    down, across = recipe.scale_shape(spec.shape)
    shape = [n for n in scales.shape if n != 1] if scales is not None else []
    if scales is None or scales.dtype != torch.float32 or shape != [n for n in (down, across) if n != 1]:
        found = "it is missing" if scales is None else f"it is {scales.dtype} {tuple(scales.shape)}"
        raise StateError(
            f"the scales of {name!r} must be a float32 tensor {called!r} of {down} × {across} numbers; {found}",
            tensor=called,
        )
