"""How an arm learns from a batch: GRPO, REINFORCE, PPO with a value head, or supervised.

A learner is prepared with a batch, and returns a step that can be taken several times.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from pulsesync.errors import PulseError
from pulsesync_lab.demo import grpo
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.policy import Policy
from pulsesync_lab.study.experiments.arm import Arm

LAMBDA = 0.95  # of generalized advantage estimation; rewards are not discounted
VALUE_SHARE = 0.1  # of the value's loss in what the policy's weights learn from
VALUE_RATE = 1e-3  # of the value head, which begins at zero; the policy's own rate is too small for it
MEMORY = 0.9  # of REINFORCE's baseline


class TrainingGame(Protocol):
    """What the loop needs of a game beyond the demo."""

    group: int

    def policy(self) -> nn.Module: ...

    def play(self, policy: nn.Module, prompts: int, seed: int) -> Rollouts: ...

    def show(self, prompts: int, seed: int) -> Rollouts: ...

    def climb(
        self, policy: nn.Module, optimizer: torch.optim.Optimizer, rollouts: Rollouts, better: Tensor, gain: grpo.Gain
    ) -> Tensor: ...


Step = Callable[[], Tensor]  # takes one optimizer step, returns the loss before it


class Learner:
    """GRPO, and what the others share with it."""

    def __init__(self, arm: Arm, game: TrainingGame, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.arm, self.game, self.policy, self.optimizer = arm, game, policy, optimizer

    def prepare(self, rollouts: Rollouts) -> Step:
        return self._climb(rollouts, grpo.advantages(rollouts.rewards, self.game.group), grpo.clipped)

    def _climb(self, rollouts: Rollouts, better: Tensor, gain: grpo.Gain) -> Step:
        return lambda: self.game.climb(self.policy, self.optimizer, rollouts, better, gain)


class Reinforce(Learner):
    """Reward minus a running mean of rewards, times the gradient of the log-probability; nothing is clipped."""

    baseline: Tensor | None = None

    def prepare(self, rollouts: Rollouts) -> Step:
        mean = rollouts.rewards.mean()
        before = mean if self.baseline is None else self.baseline
        self.baseline = MEMORY * before + (1 - MEMORY) * mean
        return self._climb(rollouts, rollouts.rewards - before, likely)


class Supervised(Learner):
    """Cross-entropy on given samples."""

    def prepare(self, rollouts: Rollouts) -> Step:
        return self._climb(rollouts, torch.ones_like(rollouts.rewards).to(rollouts.tokens.device), likely)


class PPO(Learner):
    """Advantages by token, from a value head on the policy's activations; clipped as in GRPO."""

    def __init__(self, arm: Arm, game: TrainingGame, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(arm, game, policy, optimizer)
        if not isinstance(policy, Policy):
            raise PulseError(
                "PPO needs a policy with a value head, which a language model does not have: use --model demo"
            )
        weight = policy.head.weight
        self.value = nn.Linear(policy.shape.width, 1).to(weight.device, weight.dtype)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)
        self.value_optimizer = torch.optim.AdamW(self.value.parameters(), lr=VALUE_RATE, weight_decay=0.0)

    def prepare(self, rollouts: Rollouts) -> Step:
        with torch.no_grad():
            _, values = self._look(rollouts)
        better = advantages(values, rollouts.rewards)
        wanted = better + values
        better = (better - better.mean()) / (better.std() + 1e-4)
        return lambda: self._step(rollouts, better, wanted)

    def _step(self, rollouts: Rollouts, better: Tensor, wanted: Tensor) -> Tensor:
        now, values = self._look(rollouts)
        loss = -grpo.clipped(now, rollouts.log_probabilities, better).mean()
        loss = loss + VALUE_SHARE * (values - wanted).square().mean()
        for optimizer in (self.optimizer, self.value_optimizer):
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), grpo.LARGEST_NORM)
        self.optimizer.step()
        self.value_optimizer.step()
        return loss.detach()

    def _look(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the answers' tokens, and the value before each: (samples, answer)."""
        assert isinstance(self.policy, Policy)
        answer = rollouts.log_probabilities.shape[1]
        thoughts = self.policy.thoughts(rollouts.tokens[:, :-1])[:, -answer:]
        scores = self.policy.head(thoughts).float().log_softmax(dim=-1)
        chosen = scores.gather(-1, rollouts.tokens[:, -answer:, None])[..., 0]
        return chosen, self.value(thoughts).float()[..., 0]


def likely(now: Tensor, then: Tensor, better: Tensor) -> Tensor:
    """The plain gain: log-probability times advantage."""
    return now * better


def advantages(values: Tensor, rewards: Tensor) -> Tensor:
    """Generalized advantage estimation with a reward at the last token only: (samples, tokens)."""
    after = torch.cat([values[:, 1:], rewards[:, None].to(values)], dim=1)
    surprise = after - values
    better = torch.zeros_like(values)
    last = torch.zeros_like(values[:, 0])
    for token in reversed(range(values.shape[1])):
        last = surprise[:, token] + LAMBDA * last
        better[:, token] = last
    return better


def make_learner(arm: Arm, game: TrainingGame, policy: nn.Module, optimizer: torch.optim.Optimizer) -> Learner:
    kinds: dict[str, type[Learner]] = {"grpo": Learner, "reinforce": Reinforce, "ppo": PPO, "sft": Supervised}
    return kinds[arm.algorithm](arm, game, policy, optimizer)
