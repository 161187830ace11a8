"""Training in one process, without workers or a store: rollouts with published weights, learning, and recording."""

import os
from pathlib import Path

import torch
from torch import nn

from pulsesync.errors import PulseError
from pulsesync_lab.demo.game import AdditionGame
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.policy import SHIPPED, Policy, pretrained
from pulsesync_lab.demo.pretrain import pretrain, save, share_of
from pulsesync_lab.study.experiments import control
from pulsesync_lab.study.experiments.arm import Arm
from pulsesync_lab.study.experiments.follower import Follower
from pulsesync_lab.study.experiments.learners import TrainingGame, make_learner
from pulsesync_lab.study.experiments.optimizers import make_optimizer
from pulsesync_lab.study.recorder import Recorder

SEED_STRIDE = 1_000_003  # so that no two seeds share a batch
LOOK_EVERY = 10  # steps between rollouts of supervised arms, to measure their reward
SAMPLE = 1 << 20  # weights


def train(arm: Arm, seed: int, out: Path, policies: Path) -> None:
    """Run an arm; its recording is written to `out`, the critic's, if there is one, to `critic_of(out)`.

    Policies of other shapes than the shipped one are pretrained into `policies`, or found there.

    Raises:
        PulseError: it could not be recorded to the end, or the arm is invalid.
    """
    torch.manual_seed(seed)
    if arm.game == "pendulum":
        _swing(arm, seed, out)
        return
    game = open_game(arm, policies)
    policy = game.policy()
    if arm.masters == "bf16":
        policy.to(torch.bfloat16)
    optimizer = warm_up(make_optimizer(arm, policy), arm.warm_up)
    learner, follower = make_learner(arm, game, policy, optimizer), Follower(policy, arm.delay)
    facts = {"median": median(policy), **_reached(arm, policies)}
    with open_recorder(arm, seed, out, **facts) as recorder:
        recorder.attach(optimizer, policy)
        for batch in range(-(-arm.steps // arm.updates)):
            rollouts, noted = _gather(arm, game, follower, batch, seed * SEED_STRIDE + batch)
            step = learner.prepare(rollouts)
            for _ in range(min(arm.updates, arm.steps - batch * arm.updates)):
                recorder.note(**noted)
                step()
    _check(recorder)


def _swing(arm: Arm, seed: int, out: Path) -> None:
    student = control.TD3(arm)
    with (
        open_recorder(arm, seed, out, median=median(student.actor)) as actor,
        open_recorder(arm, seed, critic_of(out), median=median(student.critic)) as critic,
    ):
        actor.attach(student.actor_optimizer, student.actor)
        critic.attach(student.critic_optimizer, student.critic)
        for reward in control.train(arm, seed, student):
            actor.note(reward=reward)
            critic.note(reward=reward)
    _check(actor)
    _check(critic)


def _check(recorder: Recorder) -> None:
    if recorder.fault is not None:
        raise PulseError(f"recording ended early: {recorder.fault!r}") from recorder.fault


def _gather(
    arm: Arm, game: TrainingGame, follower: Follower, batch: int, seed: int
) -> tuple[Rollouts, dict[str, float]]:
    """A batch to learn from, and its reward if there was a rollout."""
    if arm.algorithm == "sft" and batch % LOOK_EVERY:
        return game.show(arm.prompts, seed), {}
    played = game.play(follower.follow(), arm.prompts, seed)
    facts = {"reward": float(played.rewards.mean())}
    return (game.show(arm.prompts, seed) if arm.algorithm == "sft" else played), facts


def open_recorder(arm: Arm, seed: int, out: Path, **facts: float) -> Recorder:
    """A recorder of an arm; an earlier, unfinished file is replaced."""
    out.unlink(missing_ok=True)
    masters = {"masters": "BF16"} if arm.masters == "rounded" else {}  # the FP32 tensors do not show this
    return Recorder(out, sample=SAMPLE, facts={"arm": arm.to_json(), "seed": seed, **masters, **facts})


def critic_of(out: Path) -> Path:
    return out.with_name(f"critic-{out.name}")


def warm_up(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
    """Increase the learning rate linearly over the first steps, then keep it."""
    top, taken = [group["lr"] for group in optimizer.param_groups], 0

    def set_rate(*_: object) -> None:
        nonlocal taken
        taken += 1
        for group, rate in zip(optimizer.param_groups, top, strict=True):
            group["lr"] = rate * min(1.0, taken / max(steps, 1))

    optimizer.register_step_pre_hook(set_rate)
    return optimizer


def open_game(arm: Arm, policies: Path) -> TrainingGame:
    if arm.game == "language":
        from pulsesync_lab.demo.language import LanguageModel

        return LanguageModel(arm.model, arm.group, arm.device)
    return AdditionGame(arm.group, arm.device, lambda: begin(arm, policies))


def kept(arm: Arm, policies: Path) -> Path:
    """The file of the policy with which an arm begins, if its shape is not shipped."""
    return policies / f"{arm.shape.name}-{arm.pretraining}.safetensors"


def begin(arm: Arm, policies: Path) -> Policy:
    """The policy with which an arm begins: the shipped one, or one that is made once and kept."""
    if arm.shape == SHIPPED:
        return pretrained()
    path = kept(arm, policies)
    if not path.exists():
        policies.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        shares: list[float | None] = [None]
        policy = pretrain(
            0,
            report=lambda *facts: shares.append(facts[2]),
            shape=arm.shape,
            device=arm.device,
            most_steps=arm.pretraining,
        )
        save(policy, made, shares[-1])
        made.replace(path)
    return pretrained(path, arm.shape)


def _reached(arm: Arm, policies: Path) -> dict[str, float]:
    """The share of sums solved after pretraining, if it is known: it may have ended before its goal."""
    if arm.game != "sums" or arm.shape == SHIPPED:
        return {}
    share = share_of(kept(arm, policies))
    return {} if share is None else {"pretrained": share}


def median(policy: nn.Module) -> float:
    """The median magnitude of the weights: it determines the distance between their BF16 values."""
    every = torch.cat([weight.detach().float().abs().flatten() for weight in policy.parameters()])
    return float(every[:: max(1, len(every) >> 20)].median())
