"""The parameters of a fragment, which is a model or a piece of one, as one FP32 vector in host memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.loco.gate import F32


class FragmentTensors:
    """The parameters of a fragment as one FP32 vector."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        import torch

        for name, tensor in parameters.items():
            if tensor.dtype != torch.float32:
                raise StateError(
                    f"parameter {name!r} is {tensor.dtype}: trainers average FP32 master weights. Keep the model in "
                    "FP32 and compute in BF16 with autocast, or give the masters as a mapping of names to tensors",
                    tensor=name,
                )
        self._tensors = dict(parameters)
        specs = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in parameters.items()]
        self.layout = layouts.make(specs).id
        self.size = sum(spec.size for spec in specs)

    def _places(self) -> Iterator[tuple[str, Any, slice]]:
        at = 0
        for name, tensor in self._tensors.items():
            yield name, tensor, slice(at, at + tensor.numel())
            at += tensor.numel()

    def read(self, gradients: bool = False) -> F32:
        """A copy, in host memory."""
        out = np.zeros(self.size, np.float32)
        for _, tensor, place in self._places():
            source = tensor.grad if gradients else tensor
            if source is not None:
                out[place] = source.detach().reshape(-1).cpu().numpy()
        return out

    def write(self, values: F32) -> None:
        import torch

        with torch.no_grad():
            for _, tensor, place in self._places():
                tensor.copy_(torch.from_numpy(values[place]).view(tensor.shape))

    def write_gradients(self, values: F32 | None) -> None:
        """Replace the gradients; None removes them, so that an optimizer's step changes nothing."""
        import torch

        for _, tensor, place in self._places():
            if values is None:
                tensor.grad = None
                continue
            new = torch.from_numpy(values[place]).view(tensor.shape)
            if tensor.grad is None:
                tensor.grad = new.to(tensor.device, copy=True)
            else:
                tensor.grad.copy_(new)

    def vector(self, saved: Any) -> F32:
        """A saved vector of this fragment, in memory of its own. Raises: StateError, if it is none."""
        values = np.array(saved.cpu().numpy(), np.float32)
        if values.shape != (self.size,):
            raise StateError(f"the saved state has {values.size} weights, and the fragment {self.size}")
        return values

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]

    def name_of(self, entry: int) -> str:
        return next(name for name, _, place in self._places() if entry < place.stop)


def fragments_of(model: Any) -> list[FragmentTensors]:
    """One for a module or a mapping of masters, or one for each of several."""
    pieces = model if isinstance(model, Sequence) and not hasattr(model, "named_parameters") else [model]
    found = [
        dict(piece)
        if isinstance(piece, Mapping)
        else {name: tensor for name, tensor in piece.named_parameters() if tensor.requires_grad}
        for piece in pieces
    ]
    everyone = [tensor.data_ptr() for tensors in found for tensor in tensors.values() if tensor.numel()]
    if len(set(everyone)) != len(everyone):
        raise StateError("a parameter is in two fragments, or twice in one")
    if not all(found):
        raise StateError("a fragment has no parameters to train")
    return [FragmentTensors(tensors) for tensors in found]


def check_covered(optimizer: Any, fragments: Sequence[FragmentTensors]) -> None:
    """Raises: StateError, if the optimizer moves what no fragment has: replicas would part in it."""
    known = {address for fragment in fragments for address in fragment.addresses()}
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    if missing := [tuple(p.shape) for p in moved if p.data_ptr() not in known]:
        raise StateError(f"the inner optimizer trains {len(missing)} parameters that no fragment has: {missing[0]}")
