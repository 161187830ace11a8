"""What is played: a policy, prompts to complete, a reward, and how to learn from it."""

from typing import Protocol

import torch
from torch import nn

from pulsesync.rl import grpo, task
from pulsesync.rl.grpo import Rollouts
from pulsesync.rl.policy import Policy, complete, pretrained
from pulsesync.rl.settings import Settings


class Game(Protocol):
    """A policy and its task."""

    def policy(self) -> nn.Module:
        """The policy that a run begins with: FP32 weights whose values are BF16's."""

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        """Draw prompts by a seed, and complete each a group of times."""

    def learn(self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> float:
        """Take one step; return the loss."""


def open_game(settings: Settings) -> Game:
    if settings.model == "demo":
        return Sums(settings.group)
    from pulsesync.rl.language import LanguageModel

    return LanguageModel(settings.model, settings.group, settings.device)


class Sums:
    """Adding numbers of three digits with the policy that the package ships."""

    def __init__(self, group: int) -> None:
        self.group = group

    def policy(self) -> nn.Module:
        return pretrained()

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        generator = torch.Generator().manual_seed(seed)
        asked = task.prompts(prompts, generator).repeat_interleave(self.group, dim=0)
        assert isinstance(policy, Policy)
        completed, likely = complete(policy, asked, task.ANSWER, generator)
        return Rollouts(torch.cat([asked, completed], dim=1), likely, task.rewards(asked, completed))

    def learn(self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> float:
        return grpo.step(policy, optimizer, rollouts, self.group)
