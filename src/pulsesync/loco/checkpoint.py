"""The state of a trainer, to save and to resume from: `state_dict` and `load_state_dict` of a trainer."""

from collections.abc import Mapping, Sequence
from typing import Any

from pulsesync.errors import FormatError, StateError
from pulsesync.loco.fragments import Fragment
from pulsesync.loco.shared import SharedState, read_part, read_trend
from pulsesync.loco.vectors import Vector, vectors_of

FORMAT = "pulse-loco-trainer/1"


def save(fragments: Sequence[Fragment], trainer: str) -> dict[str, Any]:
    """The state of a trainer of this name, as tensors in host memory and numbers."""
    shared = [
        {
            "layout": fragment.shared.layout,
            "round": fragment.shared.round,
            "theta": _tensor(fragment.shared.theta),
            "trend": _tensor(fragment.shared.trend),
            "parts": {name: list(part) for name, part in fragment.shared.parts.items()},
        }
        for fragment in fragments
    ]
    private = {
        "trainer": trainer,
        "residuals": [_tensor(fragment.residual) for fragment in fragments],
        "momenta": [_tensor(fragment.momentum) for fragment in fragments if fragment.momentum is not None],
        "new": [fragment.new for fragment in fragments],
        "weights": [_tensor(fragment.tensors.read()) for fragment in fragments],
    }
    return {"format": FORMAT, "shared": shared, "private": private}


def _tensor(values: Vector) -> Any:
    import torch

    return torch.from_numpy(vectors_of(values).fetch(values).copy())


def load(state: Mapping[str, Any], fragments: Sequence[Fragment], trainer: str, kind: str) -> list[Fragment]:
    """Fragments with the tensors of the given ones and a saved state; the saved weights are not written yet.

    Without "private", or with that of another trainer, they have no state of their own. kind: the class, for errors.

    Raises:
        StateError: the state does not fit.
    """
    if state.get("format") != FORMAT:
        raise StateError(
            f"expected a saved state of format {FORMAT}, but found {state.get('format')!r}: it is not a "
            "state_dict() of this version. Resume from the model's weights instead, without load_state_dict()"
        )
    if [saved["layout"] for saved in state["shared"]] != [fragment.tensors.layout for fragment in fragments]:
        raise StateError(
            "the saved state is of another model, or of other fragments; load it into the model that saved it"
        )
    private = state.get("private") or {}
    own = private if private.get("trainer") == trainer else None
    try:
        return [_read(fragment, saved, own) for fragment, saved in zip(fragments, state["shared"], strict=True)]
    except (KeyError, IndexError, FormatError) as e:
        raise StateError(
            f"the saved state does not fit {kind}: {e}. Load it with the class that saved it, or "
            "resume from the model's weights instead, without load_state_dict()"
        ) from e


def _read(fragment: Fragment, saved: Mapping[str, Any], own: Mapping[str, Any] | None) -> Fragment:
    index, tensors, rule = fragment.index, fragment.tensors, fragment.rule
    parts = {name: read_part(part) for name, part in saved["parts"].items()}
    trend = read_trend(saved["trend"].cpu().numpy(), rule.first_trend(tensors.size, tensors.vectors))
    shared = SharedState(saved["layout"], tensors.vector(saved["theta"]), trend, int(saved["round"]), parts)
    if own is None:
        read, weights = Fragment.of(index, tensors, rule, shared), shared.theta
    else:
        momentum = tensors.vector(own["momenta"][index]) if rule.own_momentum else None
        residual, new = tensors.vector(own["residuals"][index]), bool(own["new"][index])
        read = Fragment(index, tensors, rule, shared, residual, momentum, new)
        weights = tensors.vector(own["weights"][index])
    read.unwritten = weights.__getitem__
    return read
