"""An off-policy actor-critic on a small control task: TD3 swings up a pendulum.

Fujimoto and others, arXiv 1802.09477: two critics, targets that follow slowly, an actor that learns half as often. Many
pendulums swing at once; their transitions are stored in a buffer, from which batches are drawn. The actor that moves
them has BF16 values, some steps old, as a worker's would.
"""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pulsesync_lab.study.experiments.arm import Arm
from pulsesync_lab.study.experiments.follower import Follower
from pulsesync_lab.study.experiments.optimizers import make_optimizer

PENDULUMS, EPISODE = 64, 100  # steps of 0.05 s
BATCH, CAPACITY = 256, 1 << 16
GAMMA, TAU = 0.98, 0.01
EXPLORE, SMOOTH, LARGEST_SMOOTH = 0.15, 0.2, 0.5
FIRST = 20  # random steps, before learning begins
WIDTH = 256


class Pendulums:
    """Many at once: a rod of 1 m and 1 kg that hangs, and a motor too weak to lift it directly."""

    def __init__(self, count: int, generator: torch.Generator, device: torch.device) -> None:
        self._generator, self._device = generator, device
        self.angle, self.speed = torch.zeros(2, count, device=device)
        self.begin()

    def begin(self) -> Tensor:
        """Reset all to random states; return the observations."""
        angle, speed = torch.rand(2, len(self.angle), generator=self._generator).to(self._device) * 2 - 1
        self.angle, self.speed = angle * math.pi, speed
        return self.seen()

    def seen(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 8], dim=1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor]:
        """Apply a torque for 0.05 s.

        Return the next observations and the reward: 0 if upright and still, down to about -16.
        """
        torque = 2 * action[:, 0].clamp(-1, 1)
        off = (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(off.square() + 0.1 * self.speed.square() + 0.001 * torque.square())
        self.speed = (self.speed + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.speed
        return self.seen(), reward


class Replay:
    """The newest CAPACITY transitions, on the device."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self._generator, self._device = generator, device
        self._buffers = [torch.zeros(CAPACITY, width, device=device) for width in (3, 1, 1, 3)]
        self.added = 0

    def add(self, *moments: Tensor) -> None:
        """Observation, action, reward and next observation, each (pendulums, width)."""
        begin = self.added % CAPACITY
        for buffer, new in zip(self._buffers, moments, strict=True):
            buffer[begin : begin + len(new)] = new
        self.added += len(moments[0])

    def draw(self) -> list[Tensor]:
        rows = torch.randint(min(self.added, CAPACITY), (BATCH,), generator=self._generator).to(self._device)
        return [buffer[rows] for buffer in self._buffers]


class Actor(nn.Sequential):
    """From an observation to an action between -1 and 1."""

    def __init__(self) -> None:
        super().__init__(*_layers(3, 1), nn.Tanh())


class Critic(nn.Module):
    """Two estimates of the value of an action."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(*_layers(4, 1)), nn.Sequential(*_layers(4, 1))

    def forward(self, seen: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([seen, action], dim=1)
        return self.one(both), self.two(both)


class TD3:
    """Actor, critic, their targets and optimizers."""

    def __init__(self, arm: Arm) -> None:
        device = torch.device(arm.device)
        self.actor, self.critic = Actor().to(device), Critic().to(device)
        self._actor_target, self._critic_target = copy.deepcopy(self.actor), copy.deepcopy(self.critic)
        self.actor_optimizer = make_optimizer(arm, self.actor)
        self.critic_optimizer = make_optimizer(arm, self.critic)

    def learn(self, batch: list[Tensor], noise: Tensor, *, also_actor: bool) -> Tensor:
        """One step of the critic and, if asked, one of the actor and the targets; return the critic's loss."""
        seen, action, reward, after = batch
        loss = self.critic_loss(seen, action, self.wanted(reward, after, noise))
        _step(self.critic_optimizer, loss)
        if also_actor:
            _step(self.actor_optimizer, -self.critic(seen, self.actor(seen))[0].mean())
            _follow(self._actor_target, self.actor)
            _follow(self._critic_target, self.critic)
        return loss.detach()

    @torch.no_grad()
    def wanted(self, reward: Tensor, after: Tensor, noise: Tensor) -> Tensor:
        """Reward plus the lesser estimate of the target critics for an action near the target actor's."""
        near = noise.mul(SMOOTH).clamp(-LARGEST_SMOOTH, LARGEST_SMOOTH)
        push = (self._actor_target(after) + near).clamp(-1, 1)
        one, two = self._critic_target(after, push)
        expected: Tensor = torch.min(one, two)
        return reward + GAMMA * expected

    def critic_loss(self, seen: Tensor, action: Tensor, wanted: Tensor) -> Tensor:
        one, two = self.critic(seen, action)
        return nn.functional.mse_loss(one, wanted) + nn.functional.mse_loss(two, wanted)


def train(arm: Arm, seed: int, student: TD3) -> Iterator[float]:
    """Run an arm for its number of critic steps; yields the recent mean reward before each of them."""
    device, generator = torch.device(arm.device), torch.Generator().manual_seed(seed)
    replay, pendulums = Replay(generator, device), Pendulums(PENDULUMS, generator, device)
    follower = Follower(student.actor, arm.delay)
    lately = torch.zeros((), device=device)
    for step in range(arm.steps + FIRST):
        seen = pendulums.begin() if step % EPISODE == 0 else pendulums.seen()
        action = _act(follower.follow(), seen, generator, at_random=step < FIRST)
        after, reward = pendulums.step(action)
        replay.add(seen, action, reward[:, None], after)
        lately = reward.mean() if step == 0 else lately.lerp(reward.mean(), 2 / EPISODE)
        if step >= FIRST:
            yield float(lately)
            noise = torch.randn(BATCH, 1, generator=generator).to(device)
            student.learn(replay.draw(), noise, also_actor=step % 2 == 1)


def _layers(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)]


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@torch.no_grad()
def _follow(target: nn.Module, model: nn.Module) -> None:
    for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, TAU)


@torch.no_grad()
def _act(player: nn.Module, seen: Tensor, generator: torch.Generator, *, at_random: bool) -> Tensor:
    noise = torch.randn(len(seen), 1, generator=generator).to(seen.device)
    push: Tensor = noise if at_random else player(seen) + EXPLORE * noise
    return push.clamp(-1, 1)
