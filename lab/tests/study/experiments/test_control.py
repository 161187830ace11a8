"""TD3 and its pendulum."""

import math
from typing import Any

import pytest
import torch

from lab.tests.study.experiments.arms import tiny
from pulsesync_lab.study.experiments import control
from pulsesync_lab.study.experiments.arm import Arm
from pulsesync_lab.study.experiments.control import GAMMA, TD3, Pendulums, Replay

CPU = torch.device("cpu")


def arm_of(**changes: Any) -> Arm:
    return tiny(game="pendulum", algorithm="td3", **changes)


def pendulums_at(angle: float, speed: float) -> Pendulums:
    some = Pendulums(1, torch.Generator().manual_seed(0), CPU)
    some.angle, some.speed = torch.tensor([angle]), torch.tensor([speed])
    return some


def test_a_pendulum_that_stands_still_stays_and_costs_nothing() -> None:
    some = pendulums_at(0.0, 0.0)
    seen, reward = some.step(torch.zeros(1, 1))
    assert seen.tolist() == [[1.0, 0.0, 0.0]]
    assert reward.item() == 0.0


def test_a_push_follows_the_equations() -> None:
    some = pendulums_at(math.pi / 2, 1.0)
    seen, reward = some.step(torch.tensor([[3.0]]))  # more than the motor can: 2 is the torque
    assert reward.item() == pytest.approx(-((math.pi / 2) ** 2 + 0.1 + 0.004))
    speed = 1.0 + 0.05 * (15 + 6)
    assert seen[0].tolist() == pytest.approx(
        [math.cos(math.pi / 2 + 0.05 * speed), math.sin(math.pi / 2 + 0.05 * speed), speed / 8], abs=1e-6
    )


def test_a_turn_more_or_less_costs_the_same() -> None:
    costs = [pendulums_at(0.5 + turns * 2 * math.pi, 0.0).step(torch.zeros(1, 1))[1].item() for turns in (-1, 0, 2)]
    assert costs == pytest.approx([-0.25] * 3, abs=1e-5)


def test_what_is_drawn_was_added() -> None:
    replay = Replay(torch.Generator().manual_seed(0), CPU)
    replay.add(torch.ones(64, 3), torch.full((64, 1), 2.0), torch.full((64, 1), 3.0), torch.full((64, 3), 4.0))
    assert [part.unique().tolist() for part in replay.draw()] == [[1.0], [2.0], [3.0], [4.0]]


def test_what_the_critic_wants_is_the_reward_and_the_lesser_of_two_expectations() -> None:
    student = TD3(arm_of())
    after, reward = torch.randn(5, 3), torch.randn(5, 1)
    with torch.no_grad():
        one, two = student._critic_target(after, student._actor_target(after))
    wanted = student.wanted(reward, after, torch.zeros(5, 1))
    assert torch.allclose(wanted, reward + GAMMA * torch.minimum(one, two))
    seen, action = torch.randn(5, 3), torch.randn(5, 1)
    first, second = student.critic(seen, action)
    expected = ((first - wanted) ** 2).mean() + ((second - wanted) ** 2).mean()
    assert student.critic_loss(seen, action, wanted).item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_actor_and_targets_move_only_when_asked() -> None:
    student = TD3(arm_of())
    batch = [torch.randn(8, 3), torch.randn(8, 1), torch.randn(8, 1), torch.randn(8, 3)]
    held = [[w.clone() for w in m.parameters()] for m in (student.actor, student._critic_target, student.critic)]

    def moved() -> list[bool]:
        models = (student.actor, student._critic_target, student.critic)
        now = [list(model.parameters()) for model in models]
        return [not all(map(torch.equal, old, new)) for old, new in zip(held, now, strict=True)]

    student.learn(batch, torch.zeros(8, 1), also_actor=False)
    assert moved() == [False, False, True]
    student.learn(batch, torch.zeros(8, 1), also_actor=True)
    assert moved() == [True, True, True]


def test_a_critic_that_sees_one_moment_learns_its_worth() -> None:
    torch.manual_seed(0)
    student = TD3(arm_of(lr=1e-3))
    moment = [
        torch.randn(1, 3).expand(8, 3),
        torch.zeros(8, 1),
        torch.full((8, 1), -5.0),
        torch.randn(1, 3).expand(8, 3),
    ]
    losses = [student.learn(moment, torch.zeros(8, 1), also_actor=False).item() for _ in range(100)]
    assert losses[-1] < losses[0] / 100


def test_an_actor_learns_where_to_push() -> None:
    """Where pushing hard to one side is what pays, an actor ends up doing so."""
    torch.manual_seed(0)
    student, generator = TD3(arm_of(lr=1e-3)), torch.Generator().manual_seed(0)
    for step in range(150):
        seen, action = torch.randn(2, 64, 3, generator=generator)[0], torch.rand(64, 1, generator=generator) * 2 - 1
        student.learn([seen, action, action, seen], torch.zeros(64, 1), also_actor=step % 2 == 1)
    with torch.no_grad():
        assert student.actor(torch.randn(64, 3, generator=generator)).mean() > 0.8


def test_training_tells_a_reward_before_every_step_of_the_critic() -> None:
    arm = arm_of(steps=4)
    torch.manual_seed(0)
    rewards = list(control.train(arm, 0, TD3(arm)))
    assert len(rewards) == 4
    assert all(-17 < reward < 0 for reward in rewards)
