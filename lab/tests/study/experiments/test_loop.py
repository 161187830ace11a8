"""Every kind of arm runs, and its recording is right in shape."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.tests.study.experiments.arms import TINY, tiny
from pulsesync.errors import PulseError
from pulsesync_lab.demo.game import AdditionGame
from pulsesync_lab.demo.grpo import Rollouts
from pulsesync_lab.demo.policy import Policy, PolicyShape, fresh
from pulsesync_lab.study.experiments import loop
from pulsesync_lab.study.experiments.arm import Arm
from pulsesync_lab.study.experiments.follower import Follower
from pulsesync_lab.study.experiments.optimizers import make_optimizer
from pulsesync_lab.study.recorder import Recorder
from pulsesync_lab.study.recording import Recording

EXPERTS = PolicyShape(16, 1, 2, experts=4)


def record(arm: Arm, tmp_path: Path, seed: int = 0) -> Recording:
    out = tmp_path / f"{arm.file_name}-{seed}.jsonl"
    loop.train(arm, seed, out, tmp_path / "policies")
    return Recording.read(out)


def reward_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every other completion were right: a policy so small gets none."""
    real = AdditionGame.play

    def play(*args: Any) -> Rollouts:
        rollouts = real(*args)
        return Rollouts(rollouts.tokens, rollouts.log_probabilities, torch.arange(len(rollouts.tokens)) % 2.0)

    monkeypatch.setattr(AdditionGame, "play", play)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"algorithm": "grpo"},
        {"algorithm": "reinforce", "delay": 2},
        {"algorithm": "ppo", "updates": 2},
        {"optimizer": "sgd"},
        {"optimizer": "lion"},
        pytest.param(
            {"optimizer": "muon"},
            marks=[
                pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="NOT TESTED: this torch has no Muon"),
                # torch's Muon multiplies in BF16, and torch warns where the CPU has no instructions for that.
                pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
            ],
        ),
        {"masters": "bf16"},
        {"masters": "rounded"},
        {"warm_up": 2},
    ],
    ids=str,
)
def test_an_arm_is_recorded_step_by_step(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward_some(monkeypatch)
    arm = tiny(**changes)
    recording = record(arm, tmp_path)
    assert recording.header.facts["arm"] == arm.to_json()
    assert recording.header.facts["seed"] == 0
    assert {tensor.name for tensor in recording.header.tensors} == {n for n, _ in Policy(TINY).named_parameters()}
    assert len(recording.steps) == arm.steps
    assert all(step.all_changed for step in recording.steps)
    assert recording.steps[0].facts["reward"] == 0.5
    assert recording.header.facts["masters"] == ("F32" if arm.masters == "fp32" else "BF16")
    rising = [arm.lr * min(1.0, (n + 1) / max(arm.warm_up, 1)) for n in range(arm.steps)]
    assert [step.lr for step in recording.steps] == pytest.approx(rising)


def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(tmp_path: Path) -> None:
    runs = [record(tiny(name), tmp_path, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    changes = [[step.changed for step in run.steps] for run in runs]
    assert changes[0] == changes[1] != changes[2]


def test_actor_and_critic_are_both_recorded(tmp_path: Path) -> None:
    arm = tiny(game="pendulum", algorithm="td3", steps=4)
    actor = record(arm, tmp_path)
    critic = Recording.read(loop.critic_of(tmp_path / "an-arm-0.jsonl"))
    assert (len(actor.steps), len(critic.steps)) == (2, 4)
    assert {tensor.name.split(".")[0] for tensor in critic.header.tensors} == {"one", "two"}
    assert actor.steps[0].facts["reward"] < 0


def test_experts_are_tensors_of_their_own_and_those_not_asked_have_no_gradient() -> None:
    policy: Any = fresh(0, EXPERTS)
    assert "layers.0.experts.3.up.weight" in policy.state_dict()
    with torch.no_grad():
        policy.layers[0].router.weight.zero_()  # ties: the first two are chosen
    policy(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    asked = [bool(expert.up.weight.grad.any()) for expert in policy.layers[0].experts]
    assert sum(asked) == 2


def test_experts_answer_as_if_only_the_chosen_were_asked() -> None:
    policy: Any = fresh(0, EXPERTS)
    layer = policy.layers[0]
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        said = layer._think(x)
        scores, who = layer.router(x).topk(2, dim=-1)
        for place in ((0, 0), (1, 2)):
            shares, expected = scores[place].softmax(0), torch.zeros(16)
            for share, number in zip(shares, who[place], strict=True):
                expert = layer.experts[int(number)]
                expected += share * expert.down(torch.nn.functional.silu(expert.up(x[place])))
            assert torch.allclose(said[place], expected, atol=1e-5)


def test_an_arm_with_experts_is_recorded(tmp_path: Path) -> None:
    recording = record(tiny(shape=EXPERTS), tmp_path)
    assert sum(".experts." in tensor.name for tensor in recording.header.tensors) == 8


def test_a_follower_has_the_bf16_values_of_so_many_calls_ago() -> None:
    policy = torch.nn.Linear(1, 1, bias=False)
    follower, told = Follower(policy, delay=2), []
    for version in range(5):
        with torch.no_grad():
            policy.weight.fill_(version + 0.001)
        (weight,) = follower.follow().parameters()
        told.append(weight.item())
    exactly = [torch.tensor(max(0, version - 2) + 0.001).bfloat16().item() for version in range(5)]
    assert told == exactly
    assert policy.weight.item() == pytest.approx(4.001)


@pytest.mark.parametrize(("delay", "behind"), [(0, 0), (2, 2)])
def test_what_plays_is_as_old_as_the_delay_says(
    delay: int, behind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, learned = [], []
    real_play, real_climb = AdditionGame.play, AdditionGame.climb

    def play(game: AdditionGame, policy: Policy, prompts: int, seed: int) -> Rollouts:
        played.append(policy.head.weight.clone())
        rollouts = real_play(game, policy, prompts, seed)
        return Rollouts(rollouts.tokens, rollouts.log_probabilities, torch.arange(len(rollouts.tokens)) % 2.0)

    def climb(game: AdditionGame, policy: Policy, *rest: Any) -> Any:
        learned.append(policy.head.weight.detach().bfloat16().float())
        return real_climb(game, policy, *rest)

    monkeypatch.setattr(AdditionGame, "play", play)
    monkeypatch.setattr(AdditionGame, "climb", climb)
    record(tiny(algorithm="grpo", delay=delay, steps=5), tmp_path)
    assert len(played) == 5
    assert all(torch.equal(played[n], learned[max(0, n - behind)]) for n in range(5))
    assert not torch.equal(learned[0], learned[4])


def test_updates_of_a_batch_share_what_was_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    real = AdditionGame.play

    def play(game: AdditionGame, *rest: Any) -> Rollouts:
        batches.append(rest[2])
        return real(game, *rest)

    monkeypatch.setattr(AdditionGame, "play", play)
    recording = record(tiny(algorithm="grpo", updates=2, steps=5), tmp_path)
    assert len(recording.steps) == 5
    assert len(batches) == 3


def test_bf16_masters_are_bf16_parameters_with_bf16_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = make_optimizer

    def make(arm: Arm, policy: torch.nn.Module) -> Any:
        optimizer = real(arm, policy)
        optimizer.register_step_post_hook(lambda o, *_: seen.append({s["exp_avg_sq"].dtype for s in o.state.values()}))
        seen.append({weight.dtype for weight in policy.parameters()})
        return optimizer

    monkeypatch.setattr(loop, "make_optimizer", make)
    record(tiny(masters="bf16", steps=1), tmp_path)
    assert seen == [{torch.bfloat16}, {torch.bfloat16}]


def test_a_policy_is_pretrained_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loop.begin(tiny(), tmp_path)
    monkeypatch.setattr(loop, "pretrain", None)
    second = loop.begin(tiny(), tmp_path)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert [path.name for path in tmp_path.iterdir()] == ["16x1x2h-2.safetensors"]


def test_the_share_that_pretraining_came_to_is_told(tmp_path: Path) -> None:
    told = [record(tiny(f"{steps}", pretraining=steps), tmp_path).header.facts for steps in (2, 10)]
    assert "pretrained" not in told[0]  # nobody has looked
    assert 0 <= told[1]["pretrained"] < 0.25


def test_no_two_shapes_share_a_name() -> None:
    shapes = [
        PolicyShape(),
        PolicyShape(heads=2),
        PolicyShape(experts=8),
        PolicyShape(experts=8, chosen=4),
        PolicyShape(experts=8, heads=2),
    ]
    assert [shape.name for shape in shapes] == ["160x4", "160x4x2h", "160x4x8e", "160x4x8ex4c", "160x4x2hx8e"]


def test_a_recording_that_ended_early_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Recorder):
        fault = property(lambda _: OSError("disk full"), lambda *_: None)

    monkeypatch.setattr(loop, "Recorder", Broken)
    with pytest.raises(PulseError, match="disk full"):
        record(tiny(), tmp_path)
