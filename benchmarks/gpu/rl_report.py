"""The results of a run of gpu_rl.py, and their report as tables: step by step, and by arm."""

import argparse
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.harness.report import shown, spread, table

ARMS = {  # and their column headings
    "copy": "without: copy_ on the device, the cheapest sync there is",
    "sync": "with sync",
    "behind": "with sync, the worker a step behind",
}
SYNC = ("publish", "commit", "sync", "copy")  # phases of a worker's update


@dataclass(frozen=True)
class Step:
    """The figures of a step."""

    arm: str
    number: int
    seconds: dict[str, float]
    peak_bytes: dict[str, int]
    host: dict[str, dict[str, float]]  # what the process spent in each phase: see Clock
    launches_s: float  # that a number of small operations took before learning
    core: int  # on which learning began
    reward: float
    taught: int  # samples with an advantage: the time of learning grows with them
    published: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def sync_s(self) -> float:
        return sum(self.seconds.get(phase, 0.0) for phase in SYNC)


@dataclass(frozen=True)
class Version:
    """A version that was published, counted or not."""

    arm: str
    number: int
    step: int
    epoch: int
    index: int  # in its epoch: 1 is the first patch, which has no history
    changed: int
    total: int
    payload_bytes: int
    codec: str | None

    @property
    def density(self) -> float:
        return self.changed / self.total

    @property
    def bits(self) -> float:
        return 8 * self.payload_bytes / self.changed


@dataclass
class Measured:
    """All results of a run."""

    weights: int
    before: list[Step] = field(default_factory=list)  # with copy, when there was no publisher yet
    steps: list[Step] = field(default_factory=list)
    checks_s: list[float] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    kept_bytes: int = 0  # on the GPU, by publisher and subscriber between steps

    @property
    def arms(self) -> list[str]:
        return [name for name in ARMS if self.of(name)]

    def of(self, arm: str) -> list[Step]:
        return [step for step in self.steps if step.arm == arm]


def series(steps: list[Step]) -> dict[str, list[float]]:
    """All figures of an arm, step by step."""
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


ROWS: tuple[tuple[str, str, float, int], ...] = (  # what, of which series, times, digits
    ("seconds a step", "step", 1.0, 4),
    ("play and learn, s", "play and learn", 1.0, 4),
    ("play, s", "play", 1.0, 4),
    ("learn, s", "learn", 1.0, 4),
    ("copy_, ms", "copy", 1e3, 2),
    ("publish: trainer blocked, ms", "publish", 1e3, 2),
    ("waiting for the commit, ms", "commit", 1e3, 2),
    ("in the background: encode, ms", "encode_s", 1e3, 2),
    ("in the background: store, ms", "store_s", 1e3, 2),
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


# -- learning --------------------------------------------------------------------------------------------------------

LEARNING: tuple[tuple[str, Callable[[Step], float]], ...] = (  # what of the phase "learn", and what it is called
    ("learn, s", lambda step: step.seconds["learn"]),
    ("of a core: the thread that learns, s", lambda step: step.host["learn"]["main_s"]),
    ("of a core: all other threads, s", lambda step: step.host["learn"]["others_s"]),
    ("times the thread had to leave its core", lambda step: step.host["learn"]["preempted"]),
    ("Python's garbage collector, s", lambda step: step.host["learn"]["collector_s"]),
    ("allocations by the driver", lambda step: step.host["learn"]["allocations"]),
)
LAUNCHING = "1,000 small operations before it, ms: how fast the host was"
COMPARED: dict[str, Callable[[Step], float]] = {  # of an arm and of copy
    "seconds": lambda step: step.seconds["learn"],
    "seconds of all threads": lambda step: step.host["learn"]["main_s"] + step.host["learn"]["others_s"],
}


def per_thousand(steps: list[Step], of: Callable[[Step], float]) -> list[float]:
    """Seconds of learning by step, for a thousand samples with an advantage: learning skips all others."""
    return [1e3 * of(step) / step.taught for step in steps if step.taught]


def against_copy(found: Measured, arm: str, block: int, of: Callable[[Step], float]) -> list[float]:
    """By round: the time to learn a sample with an arm, as a multiple of that with `copy`."""

    def rounds(name: str) -> list[float]:
        steps = found.of(name)
        return [mean(per_thousand(steps[first : first + block], of)) for first in range(0, len(steps), block)]

    pairs = zip(rounds(arm), rounds("copy"), strict=True)
    return [with_ / without for with_, without in pairs if math.isfinite(with_ / without)]


def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def mean_and_error(values: list[float]) -> dict[str, float]:
    """Of the rounds; there are at least two."""
    return {"mean": mean(values), "standard_error": float(np.std(values, ddof=1) / math.sqrt(len(values)))}


def tell_learning(found: Measured, block: int) -> dict[str, Any]:
    """Print whether learning is slowed; return what goes into the JSON."""
    arms = {"copy, no publisher yet": found.before[1:], **{name: found.of(name) for name in found.arms}}
    series = {name: {what: per_thousand(steps, of) for what, of in LEARNING} for name, steps in arms.items()}
    rows = [[what, *(shown(one[what], 1.0, 4) for one in series.values())] for what, _ in LEARNING]
    rows += [[LAUNCHING, *(shown([step.launches_s for step in steps], 1e3, 2) for steps in arms.values())]]
    rows += [["cores it began on, and how often", *(cores(steps) for steps in arms.values())]]
    print(table(["learning, for a thousand samples that teach", *arms], rows) + "\n")
    compared = {}
    for name in found.arms:
        ratios = {what: against_copy(found, name, block, of) for what, of in COMPARED.items()}
        if name == "copy" or min(map(len, ratios.values())) < 2:
            continue
        compared[name] = {what: mean_and_error(values) for what, values in ratios.items()}
        told = (f"{what} {one['mean']:.3f} ± {one['standard_error']:.3f}" for what, one in compared[name].items())
        print(f"Learning a sample with {name}, as a multiple of that with copy in the same round: {', '.join(told)}.")
    if compared:
        print("(Means of the rounds, and their standard errors.)")
    taught = [step for step in found.steps if step.taught]
    followed = correlation(per_thousand(taught, COMPARED["seconds"]), [step.launches_s for step in taught])
    if followed is not None:
        print(f"Over all steps its correlation with the small operations before it is {followed:.2f}.")
    print()
    return {
        "per_thousand": {name: {what: spread(values) for what, values in one.items()} for name, one in series.items()},
        "launches_s": {name: spread([step.launches_s for step in steps]) for name, steps in arms.items()},
        "against_copy": compared,
        "correlation_with_launches": followed,
    }


def correlation(one: list[float], other: list[float]) -> float | None:
    varies = len(one) > 2 and np.std(one) > 0 and np.std(other) > 0
    return float(np.corrcoef(one, other)[0, 1]) if varies else None


def cores(steps: list[Step]) -> str:
    found = Counter(step.core for step in steps)
    return ", ".join(f"{core} × {times}" for core, times in sorted(found.items())) or "–"


# -- versions --------------------------------------------------------------------------------------------------------


def crossings(lr: float, last: int) -> list[int]:
    """Steps at which weights of one binade change together for the first time, each binade twice as large as the last.

    Masters begin at BF16 values. Adam moves them by about the learning rate, and a weight that moves the same way in
    every step is rounded to the next BF16 value after half the distance: |w| / 512 at the upper end of a
    binade, |w| / 256 at the lower.
    """
    binades = (2.0**exponent for exponent in range(-40, 1))
    steps = (math.floor(size / 256 / lr) + 1 for size in binades)
    return sorted({step for step in steps if 1 < step <= last})


def classes(versions: list[Version], borders: list[int]) -> dict[str, list[Version]]:
    """Versions with changes, by what their bits depend on: the step, steps that were left out, and the epoch."""
    found: dict[str, list[Version]] = {}
    for before, version in pairwise(versions):
        if not version.changed or not version.index:
            continue
        steps = version.step - before.step
        if version.index == 1:
            name = "the first of an epoch"
        elif version.index == 2:
            name = "the second of an epoch"
        elif steps > 1:
            name = "after steps that were not published"
        else:
            first = max((step for step in borders if step <= version.step), default=1)
            later = [step for step in borders if step > version.step]
            name = f"in a row, steps {first} to {later[0] - 1}" if later else f"in a row, from step {first}"
        found.setdefault(name, []).append(version)
    return dict(sorted(found.items(), key=lambda item: (not item[0].startswith("in a row"), item[1][0].step)))


def tell_versions(found: Measured, options: argparse.Namespace) -> dict[str, Any]:
    """Print the contents of versions, one by one and by class; return what goes into the JSON."""
    if not found.versions:
        return {}
    # Masters of --tiny have learnt before the first step, and are between BF16 values.
    borders = [] if options.tiny else crossings(options.lr, found.versions[-1].step)
    by_class = classes(found.versions, borders)
    rows = [
        [
            name,
            f"{len(some)}",
            shown([one.density for one in some], 100.0, 3),
            shown([one.bits for one in some], 1.0, 2),
        ]
        for name, some in by_class.items()
    ]
    print(table(["versions", "number", "changed, %", "bits a change"], rows) + "\n")
    if borders:
        print(
            "Masters begin at BF16 values, so weights of one binade that moved by the learning rate in every step "
            f"change together for the first time: at steps {_and(borders)}, each time weights twice as large.\n"
        )
    print(table(["version", *COLUMNS], [_row(*pair) for pair in pairwise(found.versions)]) + "\n")
    return {
        "crossings": borders,
        "classes": {
            name: {
                "density": spread([one.density for one in some]),
                "bits": spread([one.bits for one in some]),
                "versions": [one.number for one in some],
            }
            for name, some in by_class.items()
        },
    }


COLUMNS = ("arm", "step", "steps in it", "epoch", "place in it", "changed, %", "bytes", "bits a change", "codec")


def _row(before: Version, version: Version) -> list[str]:
    return [
        f"{version.number}",
        version.arm,
        f"{version.step}",
        f"{version.step - before.step}",
        f"{version.epoch}",
        f"{version.index}",
        f"{100 * version.density:.3f}",
        f"{version.payload_bytes:,}",
        f"{version.bits:.2f}" if version.changed else "–",
        version.codec or "–",
    ]


def _and(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


# -- the report ------------------------------------------------------------------------------------------------------


MADE = "Random weights of the shapes of {}; the reward is the share of a completion's tokens that have even numbers.\n"


def conditions(found: Measured, options: argparse.Namespace, origin: dict[str, Any]) -> str:
    """Print the command, hardware and settings that the figures belong to."""
    machine, versions = origin["machine"], origin["versions"]
    return (
        f"Command: `{options.command}`. Date: {origin['date']}. Commit: {origin['commit']}.\n"
        f"Hardware: {machine['device']}, {machine['cores']} cores ({machine['arch']}).\n"
        f"Versions: {', '.join(f'{name} {one}' for name, one in versions.items() if one)}.\n"
        f"{found.weights:,} weights, FP32 masters, BF16 published; {options.prompts} prompts × {options.group} samples "
        f"a step, learning rate {options.lr:g}.\n{options.steps} steps of each arm in turns of {options.block}, after "
        f"{options.warm} of each that are not counted. Median of the steps (20th–80th percentile).\n"
        f"{MADE.format(options.config) if options.config else ''}"
    )


def report(found: Measured, options: argparse.Namespace, origin: dict[str, Any]) -> dict[str, Any]:
    """Print the tables; return what goes into the JSON."""
    arms = {name: series(found.of(name)) for name in found.arms}
    print(conditions(found, options, origin))
    rows = [[what, *(shown(arm[of], scale, digits) for arm in arms.values())] for what, of, scale, digits in ROWS]
    print(table(["", *(ARMS[name] for name in arms)], rows) + "\n")
    means = {name: float(np.mean(arm["step"])) for name, arm in arms.items()}
    shares = {name: sum(step.sync_s for step in found.of(name)) / sum(arms[name]["step"]) for name in arms}
    told = (f"{name} {means[name]:.4f} s a step, of it {shares[name]:.2%} for the sync" for name in arms)
    print(f"All steps together: {'; '.join(told)}.")
    print(
        f"After each of {len(found.checks_s)} blocks with sync the worker's weights were the trainer's, bit for bit; "
        f"its digest was recounted in {shown(found.checks_s, 1e3, 2)} ms.\n"
    )
    learning = tell_learning(found, options.block)
    versions = tell_versions(found, options)
    if options.device == "cuda":
        sizes = [[what, f"{size / 1e6:,.0f}"] for what, size in memory(found).items()]
        print(table(["the most that was allocated on the GPU", "MB"], sizes) + "\n")
    return {
        "arms": {
            name: {what: {**spread(values), "mean": mean(values)} for what, values in arm.items() if values}
            for name, arm in arms.items()
        },
        "shares": shares,
        "weights": found.weights,
        "memory_bytes": memory(found),
        "verify_s": spread(found.checks_s),
        "learning": learning,
        "version_classes": versions,
    }
