"""The results of a run of gpu_rl.py, and their report as tables: step by step, by arm, and against the targets."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.report import shown, spread, table

ARMS = {  # and their column headings
    "copy": "without: copy_ on the device, the cheapest sync there is",
    "again": "copy_ once more",
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
Array = NDArray[np.float64]


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
    checksums: dict[int, set[int]] = field(
        default_factory=dict
    )  # of the trainer, after a block with this number of steps
    kept_bytes: int = 0  # on the GPU, by publisher and subscriber between steps

    @property
    def arms(self) -> list[str]:
        return [name for name in ARMS if self.of(name)]

    def of(self, arm: str) -> list[Step]:
        return [step for step in self.steps if step.arm == arm]

    def against_copy(self, arm: str, of: Callable[[Step], float]) -> list[tuple[int, float, float]]:
        """The rounds of an arm's steps, what each took, and the same step with `copy` in the same round."""
        copied = {(step.turn, step.index): of(step) for step in self.of("copy")}
        pairs = ((step.turn, of(step), copied.get((step.turn, step.index), 0.0)) for step in self.of(arm))
        return [pair for pair in pairs if pair[2]]


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
    "learn, CPU seconds": of_cpu,
    "play": lambda step: step.seconds["play"],
    "play and learn": lambda step: step.seconds["play"] + step.seconds["learn"],
}
FASTEST = "learn, the fastest of all rounds"  # for each recorded step: what else runs on the machine disturbs it least


def estimate(pairs: list[tuple[int, float, float]]) -> dict[str, float]:
    """Of rounds, numerators and denominators: the ratio of the sums, and the median ratio, with 95 % intervals.

    Intervals are by a bootstrap over steps; `rounds_low` and `rounds_high` are by one over whole rounds. Where the
    machine is slower for some steps in a row, the steps of a block are not independent, and the latter is wider.
    """
    random = np.random.default_rng(0)
    turns, above, below = (np.array(column) for column in zip(*pairs, strict=True))

    def drawn(some: Array, others: Array, over: Callable[[Array, Array], Array]) -> tuple[float, float]:
        picks = random.integers(len(some), size=(DRAWS, len(some)))
        low, high = np.percentile(over(some[picks], others[picks]), (2.5, 97.5))
        return float(low), float(high)

    def ratio(some: Array, others: Array) -> Array:
        return np.asarray(some.sum(-1) / others.sum(-1))

    def middle(some: Array, others: Array) -> Array:
        return np.asarray(np.median(some / others, axis=-1))

    every = np.unique(turns)
    above_sums, below_sums = (np.array([one[turns == turn].sum() for turn in every]) for one in (above, below))
    out: dict[str, float] = {"steps": len(pairs), "rounds": len(every)}
    out |= {"mean": float(ratio(above, below)), "median": float(middle(above, below))}
    out["mean_low"], out["mean_high"] = drawn(above, below, ratio)
    out["median_low"], out["median_high"] = drawn(above, below, middle)
    out["rounds_low"], out["rounds_high"] = drawn(above_sums, below_sums, ratio)
    return out


def estimates(found: Measured) -> dict[str, dict[str, dict[str, float]]]:
    """For each arm: its share of the steps, and its phases as multiples of those with copy."""
    out: dict[str, dict[str, dict[str, float]]] = {}
    copied = fastest(found.of("copy"))
    for arm in found.arms:
        steps = found.of(arm)
        out[arm] = {"share": estimate([(step.turn, step.sync_s, step.total_s) for step in steps])}
        if arm == "copy":
            continue
        for what, of in COMPARED.items():
            if ratios := found.against_copy(arm, of):
                out[arm][what] = estimate(ratios)
        if both := [(n, least, copied[n]) for n, least in fastest(steps).items() if n in copied]:
            out[arm][FASTEST] = estimate(both)
    return out


def fastest(steps: list[Step]) -> dict[int, float]:
    """For each recorded step the least seconds of learning."""
    out: dict[int, float] = {}
    for step in steps:
        out[step.index] = min(out.get(step.index, step.seconds["learn"]), step.seconds["learn"])
    return out


def judge(most: float, one: dict[str, float]) -> str:
    """Whether a figure is at most that large: the wider interval decides."""
    low, high = min(one["mean_low"], one["rounds_low"]), max(one["mean_high"], one["rounds_high"])
    interval = f"[{low:.5f}, {high:.5f}]"
    if high <= most:
        return f"met {interval}"
    return f"not met {interval}" if low > most else f"not settled: {interval} contains the target"


def targets(found: Measured, by_arm: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Each target, what was measured, and whether it is met."""
    out: list[dict[str, Any]] = []
    for arm, both in TARGETS.items():
        most = both[found.weights >= LARGE]
        for what, limit in (("share", most), ("learn", 1 + most)):
            if one := by_arm.get(arm, {}).get(what):
                out.append({"arm": arm, "what": what, "at_most": limit, "mean": one["mean"], "is": judge(limit, one)})
    return out


def interval(one: dict[str, float], value: str, ends: str, scale: float) -> str:
    middle, low, high = (f"{scale * one[name]:.3f}" for name in (value, f"{ends}_low", f"{ends}_high"))
    return f"{middle} [{low}, {high}]"


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
            scale = 100.0 if what == "share" else 1.0
            name = f"{arm}: {'share of all steps, %' if what == 'share' else what + ', as a multiple of copy'}"
            cells = (("mean", "mean"), ("median", "median"), ("mean", "rounds"))
            rows.append([name, f"{value['steps']:g}", *(interval(value, *cell, scale) for cell in cells)])
    heads = ["with the same step with copy, 95 % intervals", "steps", "mean", "median", "mean, interval over rounds"]
    print(table(heads, rows) + "\n")
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
        older = ", with weights that are a step older" if name == "behind" else ""
        print(f"{name}: in {same} of {len(steps)} steps the worker generated what was recorded{older}.")
    digest_ms = shown(found.checks_s, 1e3, 2)
    print(
        f"After each of {len(found.checks_s)} blocks with sync the worker's weights were the trainer's, bit for bit; "
        f"its digest was recounted in {digest_ms} ms.\n"
    )
