"""The interface of an adapter to an engine, which the rest of this package uses.

Tested with vLLM and SGLang (`integrations.vllm.compat`, `integrations.sglang`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from pulsesync.errors import PulseError
from pulsesync.group.collective import Collective, SoloTeam, Team
from pulsesync.integrations.runtime import EngineRank, runtime_tensors

TIMEOUT_S = 1800.0  # how long a rank waits for the others, the slowest of which may fetch an anchor
MOVES_EXPERTS = (
    "this engine moves its experts while it runs (--enable-eplb), so the position of a weight is not known: start it "
    "without --enable-eplb"
)


class EngineAdapter(ABC):
    """One rank of an engine, in the process that has its weights; `model` is a torch.nn.Module."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @abstractmethod
    def check(self) -> None:
        """Refuse settings with which weights could be wrong after an update. Raises: StateError: what to do."""

    @abstractmethod
    def rank(self) -> EngineRank:
        """Return which part of the model this rank has."""

    @abstractmethod
    def hf_config(self) -> Any:
        """Return the model's configuration, as transformers has it."""

    @abstractmethod
    def is_quantised(self) -> bool:
        """Return whether the engine has quantised weights as it loaded them, and added parameters of its own."""

    @abstractmethod
    def checkpoint(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors of the engine's checkpoint, as its loader reads them. Raises: PulseError: it has none."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
        """Load tensors of a checkpoint with the model's own loader; return the parameters that it reports as loaded.

        Parameters for which no tensor is given do not change. If it fails, some have new weights; all of them can be
        loaded again.
        """

    def check_loader(self) -> None:  # noqa: B027 - most engines can load weights again
        """Refuse an engine whose loader would not find the layers of a checkpoint. Raises: StateError."""

    def parameters(self) -> dict[str, Any]:
        """Return the live parameters by name."""
        return runtime_tensors(self.model)

    def refresh_packed(self) -> None:  # noqa: B027 - most engines keep nothing derived
        """Recompute what the engine has derived from weights and computes with."""

    def derived(self) -> list[Any]:
        """Return what layers keep in addition to their parameters: packed weights, each an object of its own."""
        return []

    def device(self) -> Any:
        """Return the GPU that the model is on; None if it is on none."""
        return next((tensor.device for tensor in self.model.parameters() if tensor.device.type == "cuda"), None)

    def synchronize(self) -> None:
        """Wait until the model's GPU has finished all work that was launched."""
        if (device := self.device()) is not None:
            import torch

            torch.cuda.synchronize(device)


def no_checkpoint(load_format: str) -> PulseError:
    """The error of an engine that was started with something else than a checkpoint."""
    return PulseError(
        f"the engine was started with load_format={load_format!r}, which has no checkpoint that can be read again"
    )


def unknown_request(do: Any, asked: str) -> ValueError:
    return ValueError(
        f"unknown request {do!r}: caller and {asked} run different versions of pulsesync; install the same one in both"
    )


def gloo_team(size: int) -> Team:
    """Return this many ranks of an engine, in a process group of their own. Every rank must call this at that time."""
    if size == 1:
        return SoloTeam()
    return Collective(import_module("torch.distributed").new_group(backend="gloo"), TIMEOUT_S)
