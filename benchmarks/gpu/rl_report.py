"""The results of a run of gpu_rl.py, and their report as tables: step by step, by arm, and against the targets."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.report import shown, spread, table

ARMS = {  # and their column headings
    "copy": "without: copy_ on the device, the cheapest sync there is",
    "sync": "with sync",
    "behind": "with sync, the worker a step behind",
    "frozen": "with sync, no garbage collector",
    "python": "copy_ and a thread that runs Python",
    "kernels": "copy_ and copies on another stream",
}
SYNC = ("publish", "commit", "sync", "copy")  # phases of a worker's update
PHASES = ("play", "learn", *SYNC)
LARGE = 1e9  # weights of a model to which the second target applies
TARGETS = {"sync": (0.010, 0.005), "behind": (0.005, 0.002)}  # the share of a step at most: of SmolLM2, of 1.5 B
DRAWS = 4000  # of the bootstrap


@dataclass(frozen=True)
class Step:
    """The figures of a step."""

    arm: str
    turn: int  # the round
    index: int  # of the recorded step that it replays
    number: int
    seconds: dict[str, float]
    memory: dict[str, dict[str, int]]  # of the GPU, in each phase
    host: dict[str, dict[str, float]]  # what the process spent in each phase: see Clock
    launches_s: float  # that a number of small operations took before learning
    core: int  # on which learning began
    reward: float
    taught: int  # samples with an advantage: learning skips all others
    same: bool  # whether the worker has generated what was recorded
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
    """All results of a run."""

    weights: int = 0
    before: list[Step] = field(default_factory=list)  # the recorded ones: with copy, when there was no publisher yet
    steps: list[Step] = field(default_factory=list)
    checks_s: list[float] = field(default_factory=list)
    checksums: dict[int, set[int]] = field(default_factory=dict)  # of the trainer, after a block of so many steps
    kept_bytes: int = 0  # on the GPU, by publisher and subscriber between steps

    @property
    def arms(self) -> list[str]:
        return [name for name in ARMS if self.of(name)]

    def of(self, arm: str) -> list[Step]:
        return [step for step in self.steps if step.arm == arm]

    def against_copy(self, arm: str, of: Callable[[Step], float]) -> list[float]:
        """What a step took, as a multiple of the same step with `copy` in the same round."""
        copied = {(step.turn, step.index): of(step) for step in self.of("copy")}
        pairs = ((of(step), copied.get((step.turn, step.index), 0.0)) for step in self.of(arm))
        return [with_ / without for with_, without in pairs if without]


def series(steps: list[Step]) -> dict[str, list[float]]:
    """All figures of an arm, step by step."""
    phases = {name: [step.seconds[name] for step in steps if name in step.seconds] for name in PHASES}
    sent, got = ([told for step in steps if (told := getattr(step, what))] for what in ("published", "synced"))
    return {
        "step": [step.total_s for step in steps],
        **phases,
        **{name: [one[name] for one in got] for name in ("fetch_s", "prepare_s", "apply_s")},
        **{name: [one[name] for one in sent] for name in ("blocked_s", "encode_s", "store_s")},
        "share": [step.sync_s / step.total_s for step in steps],
        "bytes": [one["payload_bytes"] for one in sent],
        "density": [one["changed"] / one["total"] for one in sent],
        "bits": [8 * one["payload_bytes"] / one["changed"] for one in sent if one["changed"]],
        "smaller": [one["full_bytes"] / one["payload_bytes"] for one in sent],
        "taught": [float(step.taught) for step in steps],
        "launches_s": [step.launches_s for step in steps],
        "learn_cpu": [of_cpu(step) for step in steps],
        "learn_preempted": [step.host["learn"]["preempted"] for step in steps],
    }


ROWS: tuple[tuple[str, str, float, int], ...] = (  # what, of which series, times, digits
    ("seconds a step", "step", 1.0, 4),
    ("play, s", "play", 1.0, 4),
    ("learn, s", "learn", 1.0, 4),
    ("of learn: CPU seconds of all threads", "learn_cpu", 1.0, 4),
    ("of learn: times the thread had to leave its core", "learn_preempted", 1.0, 0),
    ("1,000 small operations before it, ms: how fast the host was", "launches_s", 1e3, 2),
    ("copy_, ms", "copy", 1e3, 2),
    ("publish: trainer blocked, ms", "publish", 1e3, 2),
    ("waiting for the commit, ms", "commit", 1e3, 2),
    ("in the background: encode, ms", "encode_s", 1e3, 2),
    ("in the background: store, ms", "store_s", 1e3, 2),
    ("waiting for the worker's sync, ms", "sync", 1e3, 2),
    ("of a sync: fetch, ms", "fetch_s", 1e3, 2),
    ("of a sync: check and decode, ms", "prepare_s", 1e3, 2),
    ("of a sync: apply (the pause), ms", "apply_s", 1e3, 2),
    ("share of the step, %", "share", 100.0, 2),
    ("changed, %", "density", 100.0, 3),
    ("bytes a version", "bytes", 1.0, 0),
    ("bits a change", "bits", 1.0, 2),
    ("× smaller than full", "smaller", 1.0, 0),
    ("samples that teach", "taught", 1.0, 0),
)


# -- arms against copy, and targets ----------------------------------------------------------------------------------


def of_cpu(step: Step) -> float:
    return step.host["learn"]["main_s"] + step.host["learn"]["others_s"]


COMPARED: dict[str, Callable[[Step], float]] = {  # of an arm and of copy
    "learn": lambda step: step.seconds["learn"],
    "play": lambda step: step.seconds["play"],
    "learn, CPU seconds": of_cpu,
}


def estimate(values: list[float], other: list[float] | None = None) -> dict[str, float]:
    """Median and mean with 95 % intervals, by a bootstrap over steps; with others, the ratio of both sums as mean."""
    drawn = np.random.default_rng(0).integers(len(values), size=(DRAWS, len(values)))
    many = np.array(values)
    below = np.ones(len(values)) if other is None else np.array(other)
    found = {"mean": (many.sum() / below.sum(), many[drawn].sum(1) / below[drawn].sum(1))}
    found["median"] = (np.median(many / below), np.median(many[drawn] / below[drawn], 1))
    out: dict[str, float] = {"steps": len(values)}
    for name, (value, draws) in found.items():
        low, high = np.percentile(draws, (2.5, 97.5))
        out |= {name: float(value), f"{name}_low": float(low), f"{name}_high": float(high)}
    return out


def estimates(found: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """For each arm: its share of the steps, and its phases as multiples of those with copy."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    for arm in found.arms:
        steps = found.of(arm)
        out[arm] = {"share": estimate([step.sync_s for step in steps], [step.total_s for step in steps])}
        for what, of in COMPARED.items():
            if arm != "copy" and (ratios := found.against_copy(arm, of)):
                out[arm][what] = estimate(ratios)
    return out


def judge(most: float, one: dict[str, float]) -> str:
    """Whether a figure is at most that large: the ends of its interval decide."""
    if one["mean_high"] <= most:
        return "met"
    return "not met" if one["mean_low"] > most else "not settled: the interval contains the target"


def targets(found: Measured, by_arm: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Each target, what was measured, and whether it is met."""
    out: list[dict[str, Any]] = []
    for arm, both in TARGETS.items():
        most = both[found.weights >= LARGE]
        for what, limit in (("share", most), ("learn", 1 + most)):
            if one := by_arm.get(arm, {}).get(what):
                out.append({"arm": arm, "what": what, "at_most": limit, "mean": one["mean"], "is": judge(limit, one)})
    return out


def interval(one: dict[str, float], which: str, scale: float, digits: int) -> str:
    value, low, high = (f"{scale * one[which + end]:.{digits}f}" for end in ("", "_low", "_high"))
    return f"{value} [{low}, {high}]"


# -- Python's garbage collector, and memory --------------------------------------------------------------------------


def collections(found: Measured) -> list[list[str]]:
    """By arm and phase: how often each generation was collected, and milliseconds, a step."""
    rows = []
    for arm in found.arms:
        steps = found.of(arm)
        for phase in PHASES:
            spent = [step.host[phase] for step in steps if phase in step.host]
            cells = [
                f"{sum(one[f'collections_{n}'] for one in spent) / len(steps):.2f} × "
                f"{1e3 * sum(one[f'collector_s_{n}'] for one in spent) / len(steps):.2f} ms"
                for n in range(3)
            ]
            if any(one[f"collections_{n}"] for one in spent for n in range(3)):
                rows.append([f"{arm}, {phase}", *cells])
    return rows


def memory(found: Measured) -> dict[str, int]:
    """The most that was allocated on the GPU, in bytes."""

    def peak(steps: list[Step], phases: tuple[str, ...] = PHASES, what: str = "allocated_peak") -> int:
        sizes = (one[what] for step in steps for phase, one in step.memory.items() if phase in phases)
        return max(sizes, default=0)

    return {
        "copy, no publisher yet": peak(found.before),
        **{name: peak(found.of(name)) for name in found.arms},
        **{f"{name}, {phase}": peak(found.of(name), (phase,)) for name in ("sync", "behind") for phase in PHASES[:-1]},
        "reserved, all arms": peak(found.steps, what="reserved_peak"),
        "kept by publisher and subscriber": found.kept_bytes,
        "a BF16 state": 2 * found.weights,
    }


# -- the report ------------------------------------------------------------------------------------------------------


def summary(found: Measured) -> dict[str, Any]:
    """What goes into the JSON besides the steps."""
    by_arm = estimates(found)
    arms = {name: series(found.of(name)) for name in found.arms}
    return {
        "weights": found.weights,
        "arms": {name: {what: spread(one) for what, one in arm.items() if one} for name, arm in arms.items()},
        "estimates": by_arm,
        "targets": targets(found, by_arm),
        "memory_bytes": memory(found),
        "verify_s": spread(found.checks_s),
        "trainers_at_the_end_of_blocks": {steps: len(sums) for steps, sums in found.checksums.items()},
    }


MADE = "Random weights of the shapes of {}; the reward is the share of a completion's tokens that have even numbers.\n"


def conditions(found: Measured, options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """The command, hardware and settings that the figures belong to."""
    machine, versions = origin["machine"], origin["versions"]
    return (
        f"Command: `{options.command}`. Date: {origin['date']}. Commit: {origin['commit']}.\n"
        f"The source that was measured: {origin['source']}.\n"
        f"Hardware: {machine['device']}, {machine['cores']} cores ({machine['arch']}).\n"
        f"Versions: {', '.join(f'{name} {one}' for name, one in versions.items() if one)}.\n"
        f"{found.weights:,} weights, FP32 masters, BF16 published; {options.prompts} prompts × {options.group} samples "
        f"a step, learning rate {options.lr:g}.\n{len(found.of('copy'))} counted steps of each arm in turns of "
        f"{options.block}, which replay the same recorded steps. Median of the steps (20th–80th percentile).\n"
        f"{MADE.format(options.config) if options.config else ''}"
    )


def show(found: Measured, fields: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the tables."""
    print(conditions(found, options, fields))
    arms = {name: series(found.of(name)) for name in found.arms}
    rows = [[what, *(shown(arm[of], scale, digits) for arm in arms.values())] for what, of, scale, digits in ROWS]
    print(table(["", *(ARMS[name] for name in arms)], rows) + "\n")
    show_work(found)
    rows = []
    for arm, one in fields["estimates"].items():
        for what, value in one.items():
            cell = partial(interval, value, scale=100.0 if what == "share" else 1.0, digits=3)
            name = f"{arm}: {'share of all steps, %' if what == 'share' else what + ', as a multiple of copy'}"
            rows.append([name, f"{value['steps']}", cell("mean"), cell("median")])
    print(table(["a step with the same step with copy, 95 % intervals", "steps", "mean", "median"], rows) + "\n")
    for one in fields["targets"]:
        what = "share of a step" if one["what"] == "share" else "learning as a multiple of that with copy"
        print(f"Target, {one['arm']}: {what} <= {one['at_most']:g}; measured {one['mean']:.5f}: {one['is']}.")
    print()
    if rows := collections(found):
        print(table(["garbage collections a step", *(f"generation {n}" for n in range(3))], rows) + "\n")
    if options.device == "cuda":
        sizes = [[what, f"{size / 1e6:,.0f}"] for what, size in fields["memory_bytes"].items()]
        print(table(["the most that was allocated on the GPU", "MB"], sizes) + "\n")


def show_work(found: Measured) -> None:
    """Print whether all arms did the same work, and arrived at the right weights."""
    seen = ", ".join(f"{steps} steps: {len(sums)}" for steps, sums in found.checksums.items())
    print(f"Different trainers, by their bits, at the end of all blocks of {seen}; 1 means that all did the same work.")
    for name in found.arms:
        steps = found.of(name)
        same = sum(step.same for step in steps)
        print(f"{name}: in {same} of {len(steps)} steps the worker generated what was recorded.")
    digest_ms = shown(found.checks_s, 1e3, 2)
    print(
        f"After each of {len(found.checks_s)} blocks with sync the worker's weights were the trainer's, bit for bit; "
        f"its digest was recounted in {digest_ms} ms.\n"
    )
