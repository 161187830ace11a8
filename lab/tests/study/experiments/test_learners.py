"""Losses against values computed by hand, and that a policy learns by them."""

from typing import Any

import pytest
import torch

from lab.tests.study.experiments.arms import TINY, tiny
from pulsesync.errors import PulseError
from pulsesync_lab.demo import task
from pulsesync_lab.demo.game import AdditionGame
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.policy import fresh, log_probabilities
from pulsesync_lab.study.experiments import learners
from pulsesync_lab.study.experiments.learners import LAMBDA, PPO, make_learner


def learner_of(algorithm: str, lr: float = 1e-3, prompts: int = 4) -> Any:
    arm = tiny(algorithm=algorithm, lr=lr, prompts=prompts)
    policy = fresh(0, TINY)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    return make_learner(arm, AdditionGame(arm.group), policy, optimizer)


def first_digit_is_one(rollouts: Rollouts) -> Rollouts:
    """The same, as if answers that begin with 1 were right: something that a policy of any size can learn."""
    return Rollouts(rollouts.tokens, rollouts.log_probabilities, (rollouts.tokens[:, task.PROMPT] == 1).float())


def test_advantages_are_sums_of_discounted_surprises() -> None:
    values, rewards = torch.tensor([[0.5, 0.25, 0.75], [0.0, 0.0, 0.0]]), torch.tensor([1.0, 0.0])
    surprises = [-0.25, 0.5, 0.25]
    expected = [
        surprises[0] + LAMBDA * surprises[1] + LAMBDA**2 * surprises[2],
        surprises[1] + LAMBDA * surprises[2],
        surprises[2],
    ]
    better = learners.advantages(values, rewards)
    assert better[0].tolist() == pytest.approx(expected)
    assert better[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "ppo"])
def test_a_policy_learns_what_is_rewarded(algorithm: str) -> None:
    learner = learner_of(algorithm, lr=1e-2, prompts=16)
    rewards = []
    for batch in range(30):
        rollouts = first_digit_is_one(learner.game.play(learner.policy, 16, batch))
        rewards.append(float(rollouts.rewards.mean()))
        learner.prepare(rollouts)()
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.6


@pytest.mark.slow
def test_ppo_learns_the_value_of_what_it_did() -> None:
    learner = learner_of("ppo")
    rollouts = learner.game.show(2, 0)  # all right: the value is 1
    for _ in range(300):
        learner.prepare(rollouts)()
    with torch.no_grad():
        _, values = learner._look(rollouts)
    assert values.mean() > 0.8


def test_ppo_reads_the_same_log_probabilities_as_grpo() -> None:
    learner = learner_of("ppo")
    rollouts = learner.game.play(learner.policy, 4, 0)
    now, values = learner._look(rollouts)
    assert torch.allclose(now, rollouts.log_probabilities, atol=1e-5)
    assert values.shape == now.shape
    assert not values.any()  # the head begins at zero


def test_ppo_needs_the_demo_policy() -> None:
    with pytest.raises(PulseError, match="value head"):
        PPO(tiny(algorithm="ppo"), AdditionGame(4), layer := torch.nn.Linear(2, 2), torch.optim.SGD(layer.parameters()))


def test_supervised_loss_is_the_cross_entropy_of_the_answers() -> None:
    learner = learner_of("sft")
    rollouts = learner.game.show(4, 0)
    logits = learner.policy(rollouts.tokens[:, :-1])[:, -task.ANSWER :]
    expected = torch.nn.functional.cross_entropy(
        logits.reshape(-1, len(task.SYMBOLS)), rollouts.tokens[:, -task.ANSWER :].reshape(-1)
    )
    assert learner.prepare(rollouts)().item() == pytest.approx(expected.item(), rel=1e-5)


def test_what_is_shown_is_right_and_no_prompt_comes_twice_for_a_group() -> None:
    rollouts = AdditionGame(4).show(8, 0)
    asked = rollouts.tokens[:, : task.PROMPT]
    assert task.rewards(asked, rollouts.tokens[:, task.PROMPT :]).all()
    assert len(asked.unique(dim=0)) == 32


def test_reinforce_compares_with_a_running_mean() -> None:
    learner = learner_of("reinforce")
    tokens, likely = AdditionGame(4).show(1, 0).tokens, torch.zeros(4, task.ANSWER)
    learner.prepare(Rollouts(tokens, likely, torch.ones(4)))
    assert learner.baseline.item() == 1.0
    step = learner.prepare(Rollouts(tokens, likely, torch.zeros(4)))
    assert learner.baseline.item() == pytest.approx(0.9)
    now = log_probabilities(learner.policy, tokens, task.ANSWER)
    assert step().item() == pytest.approx(now.mean().item(), rel=1e-5)  # minus the mean of -1 times log-probability
