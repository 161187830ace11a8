"""Attaching to the tensors of a model, in place: which of them are those of a run, and whether they can be written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format.layout import Layout
from pulsesync.state.slices import Slices, TileStorage, find_places, windows
from pulsesync.state.views import CASTS, NOT_WRITABLE, dtype_in_torch, other_names

Flat = TypeVar("Flat")  # a tensor as a backend reads and writes it
SpanOf = Callable[[Flat], tuple[int, int]]  # the addresses at which a tensor begins and ends


@dataclass(frozen=True)
class MatchedTensors(Generic[Flat]):
    """The tensors of a model that have the weights of a run."""

    flats: Mapping[str, Flat]  # by canonical name
    copies: Mapping[str, Sequence[Flat]]  # by canonical name, tied tensors that have memory of their own
    places: Mapping[int, TileStorage]


def match_tensors(
    views: Mapping[str, Any], layout: Layout, slices: Slices, widen: bool, widens: bool, span: SpanOf[Flat]
) -> MatchedTensors[Flat]:
    """Find the tensors of a layout among those of a model.

    views: the model's tensors under all their names. widen: BF16 tensors of the run may be FP32 in the model. widens:
    whether the memory can do that.

    Raises: StateError: names, dtypes or shapes differ from the layout, or a tensor cannot be written in place.
    """
    specs = {name: window.local for name, window in windows(layout.tensors, slices).items()}
    wanted = specs | {alias: specs[name] for alias, name in layout.ties.items() if name in specs}
    dtypes = {name: view.spec.dtype for name, view in views.items()}
    may_be_wide = specs.items() if widen and widens else ()
    wide = {name for name, spec in may_be_wide if (dtypes.get(name), spec.dtype) == ("F32", "BF16")}
    missing, extra = [name for name in specs if name not in views], sorted(views.keys() - wanted.keys())
    if missing or extra:
        raise other_names(missing, extra, "; a process that has a part of the model passes slices=")
    for name, spec in wanted.items():
        if name not in views:
            continue  # it is tied to one that is there
        here, tied_to = views[name].spec, layout.ties.get(name)
        if (here.dtype, here.shape) != ("F32" if (tied_to or name) in wide else spec.dtype, spec.shape):
            raise StateError(
                f"tensor {name!r} is {here.dtype} {here.shape} in this model and {spec.dtype} {spec.shape} in the run; "
                f"{_advice(here, spec, tied_to, widen, widens)}",
                tensor=name,
            )
        if not views[name].shared:
            raise StateError(f"tensor {name!r} {NOT_WRITABLE}", tensor=name)
    flats = {name: views[name].flat for name in specs}
    copies: dict[str, list[Flat]] = {}
    for alias, name in layout.ties.items():
        known = [flats[name], *copies.get(name, ())] if name in flats else []
        if alias in views and all(views[alias].address != span(flat)[0] for flat in known):
            copies.setdefault(name, []).append(views[alias].flat)
    check_apart(flats, copies, span)
    return MatchedTensors(flats, copies, find_places(layout, slices, wide))


def check_apart(flats: Mapping[str, Flat], copies: Mapping[str, Sequence[Flat]], span: SpanOf[Flat]) -> None:
    """Refuse tensors that overlap in memory: writing one would change the other. Raises: StateError."""
    named = [*flats.items(), *((name, other) for name, others in copies.items() for other in others)]
    spans = sorted((*span(flat), name) for name, flat in named)
    for (_, end, name), (begin, _, other) in pairwise(s for s in spans if s[0] < s[1]):
        if begin < end:
            raise StateError(
                f"{name!r} and {other!r} share memory in this model, but not in the run; give each its own memory, "
                "or publish the model with both tied",
                tensor=other,
            )


def _advice(here: TensorSpec, spec: TensorSpec, tied_to: str | None, widen: bool, widens: bool) -> str:
    """Advice for a tensor whose shape or dtype differs from the run's, or from that of the tensor it is tied to."""
    if here.shape != spec.shape:
        return (
            "the weights are unchanged. Build the model with the trainer's configuration; a process that has only its "
            "share of each tensor (tensor parallelism) passes slices= to Subscriber"
        )
    if (here.dtype, spec.dtype) == ("F32", "BF16") and not widen:
        return (
            "the weights are unchanged. Pass widen=True to Subscriber to have each BF16 value written as the FP32 "
            "number that it is, or convert the model: model.to(torch.bfloat16)"
        )
    if (here.dtype, spec.dtype) == ("F32", "BF16") and not widens:
        return "tensors on a GPU cannot be widened: give the model BF16 weights, or widen a copy in host memory"
    if widen and spec.dtype == "BF16" and tied_to:
        return f"{tied_to!r}, to which it is tied, has another dtype in this model: give both the same"
    cast = f", or publish with cast={here.dtype!r}" if spec.dtype == "F32" and here.dtype in CASTS else ""
    return f"the weights are unchanged. Convert the model: model.to(torch.{dtype_in_torch(spec.dtype)}){cast}" + (
        "; widen=True is for tensors that are BF16 in the run" if widen and here.dtype == "F32" else ""
    )
