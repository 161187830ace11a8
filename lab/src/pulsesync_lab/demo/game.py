"""The task of the demo: a policy, prompts to complete, a reward, and how to learn from it."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pulsesync_lab.demo import grpo, task
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.policy import Policy, complete, pretrained
from pulsesync_lab.demo.settings import DemoSettings


class Game(Protocol):
    """A policy and its task."""

    def policy(self) -> nn.Module:
        """The policy that a run begins with: FP32 weights with BF16 values."""

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        """Draw prompts by a seed, and complete each a group of times."""

    def learn(self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> float:
        """Take one step; return the loss."""


def open_game(settings: DemoSettings) -> Game:
    if settings.model == "demo":
        return AdditionGame(settings.group)
    from pulsesync_lab.demo.language import LanguageModel

    return LanguageModel(settings.model, settings.group, settings.device)


class AdditionGame:
    """Adding numbers of three digits with the policy that the package ships, or another."""

    def __init__(self, group: int, device: str = "cpu", begin: Callable[[], Policy] = pretrained) -> None:
        self.group, self.device, self._begin = group, torch.device(device), begin

    def policy(self) -> nn.Module:
        return self._begin().to(self.device)

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts:
        assert isinstance(policy, Policy)
        return self.sample(policy, prompts, torch.Generator().manual_seed(seed))

    def sample(self, policy: Policy, prompts: int, generator: torch.Generator) -> Rollouts:
        """Draw prompts from a CPU generator, which advances, and complete each a group of times."""
        asked = task.prompts(prompts, generator).repeat_interleave(self.group, dim=0)
        right = task.answers(asked).to(self.device)
        asked = asked.to(self.device)
        completed, likely = complete(policy, asked, task.ANSWER, self._here(generator))
        return Rollouts(torch.cat([asked, completed], dim=1), likely, (completed == right).all(dim=1).float())

    def show(self, prompts: int, seed: int) -> Rollouts:
        """A batch for supervised learning: as many samples as in a rollout, each with its own prompt, all correct."""
        asked = task.prompts(prompts * self.group, torch.Generator().manual_seed(seed))
        tokens = torch.cat([asked, task.answers(asked)], dim=1).to(self.device)
        return Rollouts(tokens, torch.zeros(len(tokens), task.ANSWER, device=self.device), torch.ones(len(tokens)))

    def learn(self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> float:
        return grpo.step(policy, optimizer, rollouts, self.group)

    def climb(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, better: Tensor, gain: grpo.Gain
    ) -> Tensor:
        """Take one step to increase a gain; return the loss before it, on its device."""
        return grpo.climb(policy, optimizer, rollouts, better, gain)

    def _here(self, generator: torch.Generator) -> torch.Generator:
        """A generator on the device, seeded from one of the CPU; on a CPU, that one."""
        if self.device.type == "cpu":
            return generator
        return torch.Generator(self.device).manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
