"""A worker extension by which tests look at the parameters that vLLM computes with, and damage them."""

import hashlib
from typing import Any


class Peek:
    """Methods that are added to vLLM's workers."""

    model_runner: Any

    def peek(self) -> dict[str, str]:
        """A hash of every live parameter that is not packed away, by name, with its dtype and shape."""
        return {
            name: f"{tensor.dtype} {tuple(tensor.shape)} {_hash(tensor)}"
            for name, tensor in self.model_runner.get_model().named_parameters()
            if tensor.numel()
        }

    def spoil(self, part: str) -> int:
        """Write 1 to every parameter whose name has a part, as a program that knows nothing of us might."""
        found = [
            tensor
            for name, tensor in self.model_runner.get_model().named_parameters()
            if part in name and tensor.numel()
        ]
        for tensor in found:
            tensor.data.fill_(1.0)
        return len(found)


def _hash(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().contiguous().cpu().numpy().tobytes()).hexdigest()[:16]
