"""The optimizers that are compared: torch's, Lion, and Muon for matrices with AdamW for the rest."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pulsesync.errors import PulseError
from pulsesync_lab.study.experiments.arm import Arm


def make_optimizer(arm: Arm, policy: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of an arm, without weight decay; with masters "rounded", weights are rounded after each step.

    Raises:
        PulseError: this torch has no Muon.
    """
    optimizer = _MAKERS[arm.optimizer](arm, policy)
    if arm.masters == "rounded":
        optimizer.register_step_post_hook(lambda *_: round_(policy.parameters()))
    return optimizer


@torch.no_grad()
def round_(weights: Iterable[Tensor]) -> None:
    """Round to the nearest BF16 value, in place: small updates are lost, as with BF16 weights."""
    for weight in weights:
        weight.copy_(weight.bfloat16())


class Lion(torch.optim.Optimizer):
    """Evolved sign momentum: every weight moves by exactly the learning rate. Chen and others, arXiv 2302.06675."""

    def __init__(self, params: Iterable[Tensor], lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                average = self.state[weight].setdefault("average", torch.zeros_like(weight))
                weight.sub_(average.lerp(weight.grad, 1 - first).sign_(), alpha=group["lr"])
                average.lerp_(weight.grad, 1 - second)


class Pair(torch.optim.Optimizer):
    """Two optimizers as one: hooks and learning rates reach both."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        super().__init__([{"params": group["params"]} for group in first.param_groups + second.param_groups], {})
        self.pair = (first, second)
        self.param_groups = first.param_groups + second.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.pair:
            one.step()


def _adamw(arm: Arm, policy: nn.Module) -> torch.optim.Optimizer:
    return _adamw_of(arm, policy.parameters())


def _adamw_of(arm: Arm, weights: Iterable[Tensor]) -> torch.optim.Optimizer:
    # Fused arithmetic is FP32 also for BF16 weights and averages, which are rounded once; the plain one rounds at
    # every operation. Trainers use the fused one.
    return torch.optim.AdamW(weights, lr=arm.lr, betas=arm.betas, weight_decay=0.0, fused=True)


def _sgd(arm: Arm, policy: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(policy.parameters(), lr=arm.lr, momentum=arm.momentum)


def _lion(arm: Arm, policy: nn.Module) -> torch.optim.Optimizer:
    return Lion(policy.parameters(), arm.lr, arm.betas)


def _muon(arm: Arm, policy: nn.Module) -> torch.optim.Optimizer:
    """Muon for matrices inside the layers, its steps scaled to the size of AdamW's; AdamW for the rest."""
    if not hasattr(torch.optim, "Muon"):
        raise PulseError(f"Muon needs torch 2.9 or newer; this is torch {torch.__version__}")
    inside = [weight for name, weight in policy.named_parameters() if weight.ndim == 2 and "layers." in name]
    known = {id(weight) for weight in inside}
    rest = [weight for weight in policy.parameters() if id(weight) not in known]
    muon = torch.optim.Muon(inside, lr=arm.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return Pair(muon, _adamw_of(arm, rest))


_MAKERS: dict[str, Callable[[Arm, nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "muon": _muon,
}
