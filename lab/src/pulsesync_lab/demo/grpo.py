"""GRPO: sample a group of completions for each prompt, and prefer those that did better than their group.

FP32 master weights, AdamW. Completions come from workers that have the BF16 values of the same or an earlier version;
the ratio between the probabilities of the current policy and of the worker's is clipped, as in PPO.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pulsesync_lab.demo.policy import log_probabilities

CLIP = 0.2
LARGEST_NORM = 1.0

# The gain to increase, from log-probabilities now and then, and advantages.
Gain = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rollouts:
    """Completions of some prompts, group by group, as a worker made them."""

    tokens: Tensor  # (samples, length) prompt and completion
    log_probabilities: Tensor  # (samples, answer) by the worker's weights
    rewards: Tensor  # (samples,)

    @staticmethod
    def join(parts: "list[Rollouts]") -> "Rollouts":
        return Rollouts(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.log_probabilities for part in parts]),
            torch.cat([part.rewards for part in parts]),
        )


def advantages(rewards: Tensor, group: int) -> Tensor:
    """How much better than its group each sample did, in standard deviations; 0 where all did the same."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-4)).view(-1)


def clipped(now: Tensor, then: Tensor, better: Tensor) -> Tensor:
    """The gain to increase, token by token: the advantage times the probability ratio of a token, up to the clip."""
    ratio = (now - then).exp()
    return torch.min(ratio * better, ratio.clamp(1 - CLIP, 1 + CLIP) * better)


def loss(policy: nn.Module, rollouts: Rollouts, better: Tensor, gain: Gain = clipped) -> Tensor:
    now = log_probabilities(policy, rollouts.tokens, rollouts.log_probabilities.shape[1])
    return -gain(now, rollouts.log_probabilities, better[:, None]).mean()


def climb(
    policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, better: Tensor, gain: Gain = clipped
) -> Tensor:
    """Take one step on a batch; return the loss before it, on its device."""
    value = loss(policy, rollouts, better, gain)
    optimizer.zero_grad()
    value.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), LARGEST_NORM)
    optimizer.step()
    return value.detach()


def step(policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, group: int) -> float:
    """Take one step on a batch; return the loss before it."""
    return float(climb(policy, optimizer, rollouts, advantages(rollouts.rewards, group)))
