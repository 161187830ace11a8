"""What a run of bench_gpu_rl.py showed, and how it is told: step by step, by arm, as tables."""

import argparse
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bench_codec import table

ARMS = {  # and what stands over them
    "copy": "without: copy_ on the device, the cheapest sync there is",
    "sync": "with sync",
    "behind": "with sync, the worker a step behind",
}
SYNC = ("publish", "commit", "sync", "copy")  # phases in which a worker is brought to new weights


@dataclass(frozen=True)
class Step:
    """What a step took and did."""

    arm: str
    number: int
    seconds: dict[str, float]
    peak_bytes: dict[str, int]
    reward: float
    taught: int  # samples that had an advantage: learning takes the longer, the more there are
    published: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def sync_s(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in SYNC)


@dataclass
class Measured:
    """All that a run showed."""

    weights: int
    before: list[Step] = field(default_factory=list)  # with copy, when there was no publisher yet
    steps: list[Step] = field(default_factory=list)
    checks_s: list[float] = field(default_factory=list)
    kept_bytes: int = 0  # on the GPU, by publisher and subscriber between steps

    @property
    def arms(self) -> list[str]:
        return [name for name in ARMS if self.of(name)]

    def of(self, arm: str) -> list[Step]:
        return [step for step in self.steps if step.arm == arm]


def spread(values: list[float]) -> dict[str, float]:
    p20, p50, p80 = np.percentile(values, (20, 50, 80)) if values else (0.0, 0.0, 0.0)
    return {"p20": float(p20), "p50": float(p50), "p80": float(p80), "mean": float(np.mean(values or [0.0]))}


def shown(values: list[float], scale: float = 1.0, digits: int = 3) -> str:
    if not values:
        return "–"
    found = spread([value * scale for value in values])
    return f"{found['p50']:,.{digits}f} ({found['p20']:,.{digits}f}–{found['p80']:,.{digits}f})"


def series(steps: list[Step]) -> dict[str, list[float]]:
    """All that is told of an arm, step by step."""
    phases = {name: [step.seconds[name] for step in steps if name in step.seconds] for name in ("play", "learn", *SYNC)}
    sent, got = ([told for step in steps if (told := getattr(step, what))] for what in ("published", "synced"))
    return {
        "step": [step.total_s for step in steps],
        "play and learn": [step.total_s - step.sync_s for step in steps],
        **phases,
        **{name: [one[name] for one in got] for name in ("fetch_s", "prepare_s", "apply_s")},
        **{name: [one[name] for one in sent] for name in ("blocked_s", "encode_s", "store_s")},
        "share": [step.sync_s / step.total_s for step in steps],
        "bytes": [one["payload_bytes"] for one in sent],
        "density": [one["changed"] / one["total"] for one in sent],
        "bits": [8 * one["payload_bytes"] / one["changed"] for one in sent if one["changed"]],
        "smaller": [one["full_bytes"] / one["payload_bytes"] for one in sent],
        "reward": [step.reward for step in steps],
        "taught": [float(step.taught) for step in steps],
    }


def peak(steps: list[Step], phases: tuple[str, ...] = ()) -> int:
    """The most bytes on the GPU in some phases of some steps, or in all."""
    found = (size for step in steps for phase, size in step.peak_bytes.items() if not phases or phase in phases)
    return max(found, default=0)


def memory(found: Measured) -> dict[str, int]:
    return {
        "copy, no publisher yet": peak(found.before),
        **{name: peak(found.of(name)) for name in found.arms},
        "sync, while syncing": peak(found.of("sync"), SYNC),
        "kept by publisher and subscriber": found.kept_bytes,
        "a BF16 state": 2 * found.weights,
    }


ROWS = (  # what, of which series, times, digits
    ("seconds a step", "step", 1.0, 4),
    ("play and learn, s", "play and learn", 1.0, 4),
    ("play, s", "play", 1.0, 4),
    ("learn, s", "learn", 1.0, 4),
    ("copy_, ms", "copy", 1e3, 2),
    ("publish: trainer blocked, ms", "publish", 1e3, 2),
    ("waiting for the commit, ms", "commit", 1e3, 2),
    ("behind it: encode, ms", "encode_s", 1e3, 2),
    ("behind it: store, ms", "store_s", 1e3, 2),
    ("worker's sync, ms", "sync", 1e3, 2),
    ("of it: fetch, ms", "fetch_s", 1e3, 2),
    ("of it: check and decode, ms", "prepare_s", 1e3, 2),
    ("of it: apply (the pause), ms", "apply_s", 1e3, 2),
    ("share of the step, %", "share", 100.0, 2),
    ("changed, %", "density", 100.0, 3),
    ("bytes a version", "bytes", 1.0, 0),
    ("bits a change", "bits", 1.0, 2),
    ("× smaller than full", "smaller", 1.0, 0),
    ("samples that teach", "taught", 1.0, 0),
    ("reward", "reward", 1.0, 3),
)


def conditions(found: Measured, options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """What the numbers mean nothing without."""
    machine, versions = origin["machine"], origin["versions"]
    return (
        f"Command: `{options.command}`. Date: {origin['date']}. Commit: {origin['commit']}.\n"
        f"Hardware: {machine['device']}, {machine['cores']} cores ({machine['arch']}).\n"
        f"Versions: {', '.join(f'{name} {one}' for name, one in versions.items() if one)}.\n"
        f"{found.weights:,} weights, FP32 masters, BF16 published; {options.prompts} prompts × {options.group} samples "
        f"a step, learning rate {options.lr:g}.\n{options.steps} steps of each arm in turns of {options.block}, after "
        f"{options.warm} of each that are not counted. Median of the steps (20th–80th percentile).\n"
    )


def report(found: Measured, options: argparse.Namespace, origin: dict[str, Any]) -> dict[str, Any]:
    """Print the tables; return what goes into the JSON."""
    arms = {name: series(found.of(name)) for name in found.arms}
    print(conditions(found, options, origin))
    rows = [[what, *(shown(arm[of], *scale) for arm in arms.values())] for what, of, *scale in ROWS]
    print(table(["", *(ARMS[name] for name in arms)], rows) + "\n")
    means = {name: float(np.mean(arm["step"])) for name, arm in arms.items()}
    shares = {name: sum(step.sync_s for step in found.of(name)) / sum(arms[name]["step"]) for name in arms}
    told = (f"{name} {means[name]:.4f} s a step, of it {shares[name]:.2%} for the sync" for name in arms)
    print(f"All steps together: {'; '.join(told)}.")
    print(
        f"After each of {len(found.checks_s)} blocks with sync the worker's weights were the trainer's, bit for bit; "
        f"its digest was recounted in {shown(found.checks_s, 1e3, 2)} ms.\n"
    )
    if options.device == "cuda":
        sizes = [[what, f"{size / 1e6:,.0f}"] for what, size in memory(found).items()]
        print(table(["the most that was allocated on the GPU", "MB"], sizes) + "\n")
    return {
        "arms": {name: {what: spread(values) for what, values in arm.items() if values} for name, arm in arms.items()},
        "shares": shares,
        "weights": found.weights,
        "memory_bytes": memory(found),
        "verify_s": spread(found.checks_s),
    }
