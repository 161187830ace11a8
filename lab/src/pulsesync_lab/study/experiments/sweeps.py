"""The experiments: one frozen configuration each."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pulsesync.errors import PulseError
from pulsesync_lab.demo.policy import PolicyShape
from pulsesync_lab.study.experiments import published
from pulsesync_lab.study.experiments.arm import Algorithm, Arm, Experiment, Masters
from pulsesync_lab.study.experiments.published import sparsity

RATES = (5e-7, 1e-6, 3e-6, 5e-6)
SGD_RATE = 0.003  # see optimizer_sweep
TINY = PolicyShape(32, 2, 2)

_BASE = Arm("GRPO, 3e-6")
_MASTERS = (
    "Ours have FP32 masters unless stated otherwise: an update too small to be visible is kept, and a weight changes "
    "when enough of them add up. The published runs had weights in BF16, where such an update is lost, so they "
    "change less, and less again over k steps."
)
_SCALE = (
    "This policy has 1.2 million weights of its own scale; larger weights have larger gaps between BF16 values, and "
    "change less often. At 6e-5, the demo's rate, it learns in minutes."
)


def lr_sweep() -> Experiment:
    arms = [replace(_BASE, name=f"{rate:.0e}".replace("e-0", "e-"), lr=rate) for rate in (*RATES, 6e-5)]
    rows = [sparsity(f"Qwen2.5 1.5B, {arm.name}", beside=arm.name) for arm in arms[:-1]]
    rows += [published.DTYPES, published.OVERLAP]
    return Experiment(
        "lr", "How does sparsity depend on the learning rate?", tuple(arms), tuple(rows),
        f"{_MASTERS} {_SCALE}",
    )  # fmt: skip


def windows_sweep() -> Experiment:
    arms = (
        replace(_BASE, name="FP32 masters", steps=400),
        replace(_BASE, name="BF16 weights", steps=400, masters="bf16"),
    )  # fmt: skip
    rows = [sparsity(name) for name in published.SPARSITY if name.endswith(" 3e-6") and "SFT" not in name]
    rows += [published.PROFILE, published.OVERLAP, published.GRADIENTS]
    return Experiment(
        "windows", "How does sparsity fall when k steps are sent at once?", arms, tuple(rows), f"{_MASTERS} {_SCALE}"
    )  # fmt: skip


def delay_sweep() -> Experiment:
    late = [replace(_BASE, name=f"delay {delay}", delay=delay) for delay in (0, 1, 4, 16)]
    many = [replace(_BASE, name=f"{updates} updates a batch", updates=updates) for updates in (8, 16)]
    rows = [
        sparsity("Qwen2.5 1.5B, 3e-6", beside="delay 0"),
        *(sparsity(f"Qwen2.5 1.5B, {arm.name}", beside=arm.name) for arm in many),
        sparsity("Qwen2.5 1.5B, 32 updates a batch"),
        published.ALGORITHMS[0],
        published.ALGORITHMS[3],
    ]
    differs = (
        f"{_MASTERS} Old rollouts change the gradient and not Adam's bound on the step, so delay alone does little. "
        "Updates on one batch go the same way, so that averages of the gradient stay large, and more weights change: "
        "see the mean update."
    )
    return Experiment(
        "delay", "Do older rollouts, or more updates on one batch, change more weights?", (*late, *many), tuple(rows),
        differs,
    )  # fmt: skip


def scale_sweep() -> Experiment:
    arms = [
        replace(_BASE, name=f"width {width}", shape=PolicyShape(width, heads=width // 32))
        for width in (64, 96, 128, 256, 384)
    ]
    arms.insert(3, replace(_BASE, name="width 160"))
    rows = [sparsity(name) for name in published.SPARSITY if name.endswith(" 3e-6") and "SFT" not in name]
    differs = (
        f"{_MASTERS} A family trained alike, each to one sum in four: what differs with size is the scale of the "
        "weights, see the median. The published models were trained by different people, and differ more among each "
        "other."
    )
    return Experiment("scale", "Do larger policies change a smaller share?", tuple(arms), tuple(rows), differs)


def optimizer_sweep() -> Experiment:
    betas = ((0.9, 0.999), (0.9, 0.99), (0.9, 0.95), (0.0, 0.999))
    arms = [replace(_BASE, name=f"AdamW {one}, {two}", betas=(one, two)) for one, two in betas]
    arms += [
        replace(_BASE, name="SGD, momentum 0.9", optimizer="sgd", lr=SGD_RATE),
        replace(_BASE, name="Lion, 3e-6", optimizer="lion", betas=(0.9, 0.99)),
        replace(_BASE, name="Lion, 1e-6", optimizer="lion", betas=(0.9, 0.99), lr=1e-6),
        replace(_BASE, name="Muon with AdamW", optimizer="muon"),
    ]
    rows = [sparsity("Qwen2.5 1.5B, 3e-6", beside=arms[0].name)]
    differs = (
        f"{_MASTERS} The papers have AdamW alone. SGD has no bound on its step: its rate is the largest of 0.03, 0.01, "
        "0.003, … at which the mean size of its updates over 25 steps is not above AdamW's at 3e-6 (1.2e-6; at "
        "0.01 the policy forgets), so that both move weights as far then; later AdamW's updates become shorter. Lion "
        "moves every weight by the rate at each step. Without a first average (beta 0.0) AdamW nearly does too. Muon's "
        "update of a matrix of full rank has a root mean square of a fifth of the rate; here it was smaller. So the "
        "order is that of the mean update, but for SGD: its updates are of very unequal size, and fewer weights change "
        "for the same mean."
    )
    return Experiment(
        "optimizer", "What do betas and optimizers do to sparsity?", tuple(arms), tuple(rows), differs
    )  # fmt: skip


def masters_sweep() -> Experiment:
    kinds: tuple[tuple[Masters, str], ...] = (
        ("fp32", "FP32 masters"),
        ("rounded", "BF16 weights, FP32 averages"),
        ("bf16", "BF16 weights and averages"),
    )
    arms = [
        replace(_BASE, name=f"{label}, {name}", lr=rate, masters=kind)
        for rate, name in ((1e-6, "1e-6"), (3e-6, "3e-6"), (5e-6, "5e-6"))
        for kind, label in kinds
    ]  # fmt: skip
    rows = [sparsity(f"Qwen2.5 1.5B, {rate}", beside=f"{kinds[-1][1]}, {rate}") for rate in ("1e-6", "3e-6", "5e-6")]
    differs = (
        "This comparison is like with like: the published runs had weights in BF16. Updates below half a unit are "
        "then lost, the same few weights change again and again, and density grows little with k; with masters the "
        "rest adds up and becomes visible later, so that over k steps many more change, and the policy learns "
        f"faster. Whether Adam's averages are BF16 or FP32 makes no difference in these few steps. {_SCALE}"
    )
    return Experiment(
        "masters", "Where does a small update go: into FP32 masters, or is it lost?", tuple(arms), tuple(rows), differs
    )  # fmt: skip


def warm_up_sweep() -> Experiment:
    arms = [replace(_BASE, name=f"warm-up {steps}", warm_up=steps) for steps in (0, 20)]
    arms.append(replace(_BASE, name="warm-up 20, BF16 weights", masters="bf16"))
    differs = (
        f"{_MASTERS} The dip is where the rate is high already and Adam's averages are young, which makes its updates "
        "longest: after the end of warm-up, and without one soon after the start. Masters add to it: they begin in the "
        "middle between two borders, and many of one magnitude reach a border in the same steps. Of a short run the "
        "lowest ten steps may be its last."
    )
    return Experiment(
        "warm-up", "Is there a dip at the end of warm-up?", tuple(arms),
        (replace(published.PROFILE, beside=arms[-1].name), published.PROFILE_SFT), differs,
    )  # fmt: skip


def algorithm_sweep() -> Experiment:
    kinds: tuple[tuple[str, Algorithm], ...] = (
        ("GRPO", "grpo"), ("PPO with a value head", "ppo"), ("REINFORCE", "reinforce"),
    )  # fmt: skip
    arms = [replace(_BASE, name=name, algorithm=algorithm) for name, algorithm in kinds]
    control = Arm("", game="pendulum", algorithm="td3", warm_up=0, steps=3000)
    arms += [
        replace(control, name=f"TD3, {name}", lr=rate)
        for rate, name in ((1e-3, "1e-3"), (1e-4, "1e-4"), (3e-6, "3e-6"))
    ]
    differs = (
        f"{_MASTERS} What algorithms share is the optimizer, and with it the bound on a step. TD3 (pendulum swing-up, "
        "actor and critic from scratch, replay buffer, target networks) is usually run at 1e-3; its FP32 weights do "
        "not begin at BF16 values."
    )
    return Experiment(
        "algorithm", "Is it GRPO, or does any algorithm change so few?", tuple(arms), published.ALGORITHMS, differs
    )


def sft_sweep() -> Experiment:
    arms = [
        replace(_BASE, name="GRPO, 3e-6"),
        replace(_BASE, name="SFT 3e-6", algorithm="sft"),
        replace(_BASE, name="SFT 2e-5", algorithm="sft", lr=2e-5),
    ]  # fmt: skip
    rows = [sparsity("Qwen2.5 1.5B, 3e-6", beside="GRPO, 3e-6")]
    rows += [sparsity(f"Qwen2.5 1.5B, {arm.name}", beside=arm.name) for arm in arms[1:]]
    differs = (
        f"{_MASTERS} Published, SFT changes {published.SFT_TO_GRPO} times as many weights as GRPO at the same rate. A "
        "gradient that keeps its direction from batch to batch makes Adam's updates longer (see the mean update); that "
        "of rewards is more noise."
    )
    return Experiment(
        "sft", "Does supervised learning change more at the same rate?", tuple(arms), (*rows, published.PROFILE_SFT),
        differs,
    )  # fmt: skip


def moe_sweep() -> Experiment:
    arms = [
        replace(_BASE, name="8 experts", shape=PolicyShape(128, experts=8)),
        replace(_BASE, name="8 experts, 4 prompts a batch", shape=PolicyShape(128, experts=8), prompts=4, group=8),
        replace(_BASE, name="32 experts", shape=PolicyShape(64, experts=32)),
    ]
    differs = (
        "A batch here has some thousand tokens, so that of 8 experts hardly any goes without one; of 32 many do, "
        "since routing was trained without a loss for balance. The published model has 128 experts in each of 48 "
        "layers. An expert without tokens has no gradient, but Adam "
        "goes on moving it by the average of past ones."
    )
    return Experiment(
        "moe", "Which experts change, and how often?", tuple(arms), (published.EXPERTS,), differs,
        tables=("windows", "experts", "changes"),
    )  # fmt: skip


_MAKERS = (
    lr_sweep, windows_sweep, delay_sweep, scale_sweep, optimizer_sweep, masters_sweep, warm_up_sweep, algorithm_sweep,
    sft_sweep, moe_sweep,
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in (make() for make in _MAKERS)}
WITH_LANGUAGE = ("lr", "windows", "delay", "optimizer", "masters", "warm-up", "sft")
NOT_WITH_LANGUAGE = ("6e-5", "SGD, momentum 0.9")  # rates for the demo's policy


def find(names: Sequence[str]) -> list[Experiment]:
    """The experiments of these names; all of them for "all". Raises: PulseError."""
    if list(names) == ["all"]:
        return list(EXPERIMENTS.values())
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        raise PulseError(f"unknown experiment {', '.join(unknown)}; choose from {', '.join(EXPERIMENTS)}, all")
    return [EXPERIMENTS[name] for name in names]


def with_model(experiment: Experiment, folder: str) -> Experiment:
    """The same sweep with a language model, for 40 steps. Raises: PulseError, if it needs the demo's policy."""
    if experiment.name not in WITH_LANGUAGE:
        raise PulseError(
            f"{experiment.name} needs --model demo; with another model, choose from {', '.join(WITH_LANGUAGE)}"
        )
    adapted = replace(
        experiment,
        name=f"{experiment.name}-{Path(folder).resolve().name}",
        arms=tuple(arm for arm in experiment.arms if arm.name not in NOT_WITH_LANGUAGE),
        differs=experiment.differs.replace(_SCALE, "").strip(),
    )
    return adapted.with_arms(game="language", model=folder, steps=40)


def quick(experiment: Experiment) -> Experiment:
    """The same with four steps of a few samples, and tiny policies where they have to be made, as a test."""

    def smaller(arm: Arm) -> Arm:
        shape = arm.shape if arm.shape == PolicyShape() else replace(TINY, experts=min(arm.shape.experts, 4))
        steps = 12 if arm.game == "pendulum" else 4
        return replace(arm, steps=steps, prompts=2, group=4, pretraining=20, shape=shape)

    return replace(experiment, arms=tuple(smaller(arm) for arm in experiment.arms), seeds=experiment.seeds[:1])
