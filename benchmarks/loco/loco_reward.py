"""Does a policy learn as well by PULSELoCo as by dense DiLoCo? Real GRPO in closed loop, several seeds, with controls.

    python -m benchmarks loco_reward --arms dense,pulse,pulse/c1 --jobs 2              # the demo's policy
    python -m benchmarks loco_reward --model .models/smollm2 --device cuda --lr 1e-6 --rounds 16 --group 16 \
        --evaluated 256 --look-every 2 --arms dense,pulse/c1 --wire 8,16 --jobs 4 --out runs
    python -m benchmarks loco_reward --report runs                                     # tables and plots again

The criterion was fixed before the runs. Take the mean reward of the last three evaluations of an arm, minus that of
dense with the same seed: the 95 % interval of this difference must lie above −MARGIN, and its center must be at least
−MIDDLE. The comparison is meaningful only if dense beats the untouched policy, the one before the first round, by more
than MARGIN. The shared weights are evaluated, as BF16, on the same prompts for every arm.

Arms:
    dense       DiLoCo: all of the update, one shared momentum
    pulse       ours: each trainer has its own outer momentum, before the gate, and keeps the residual in its weights
    published   PULSELoCo as published: the gate, then one shared momentum
    top-k       ours, but the largest entries are sent instead of the visible ones: as many as fit in the bytes that the
                arm of --equal sent in the same round with the same seed
    random-k    the same with entries drawn at random. Both use the coder that was designed for the gate, and random-k
                would need no positions at all: with coders of their own they could send more entries
    late        dense, applied one round late
    ddp         gradients averaged at each step, with rollouts of that step and no outer step: for reference
An arm may have options, each after a slash:
    cK      compact: values are sent with K bits (pulse, published, top-k, random-k)
    rX      the gate's reach (pulse, published)
    lrY     the outer learning rate
    lifeN   a trainer leaves after N rounds; its residual, momentum and inner optimizer are lost, and a new trainer
            replaces it; trainers leave one after another, not all at once
    joinD   a new trainer begins with the momentum of a trainer whose every update was equal to the last shared step D:
            D / lr. So does a trainer that joins through a store, since it has seen at least one round

--forward BF16 lets trainers compute with the BF16 values of their master weights, as autocast does (on a CPU the demo
computes in FP32). "apart" is the share of weights for which trainer 0 begins the next round with a different BF16 value
than the shared one. Every run has a JSON file in --out, which is written after every round: the file of an interrupted
run still shows the rounds that it finished, and the run starts again with the next call; a complete run is skipped.
"""

import argparse
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.links import ROOT
from benchmarks.harness.processes import command
from benchmarks.harness.report import json_line, provenance
from benchmarks.loco import fleet as fleets
from benchmarks.loco.fleet import Chosen, Fleet, dense_bytes, measure
from pulsesync.loco.gate import DenseGate, GateRule, VisibilityGate
from pulsesync.loco.outer_step import SGD, Nesterov, OuterRule, OwnMomentum, SharedMomentum
from pulsesync.loco.vectors import F32
from pulsesync_lab.charts import Panel, figure
from pulsesync_lab.demo.game import open_game
from pulsesync_lab.demo.settings import DemoSettings

QUICK = (
    "--every", "1", "--trainers", "2", "--rounds", "2", "--prompts", "2", "--group", "2", "--evaluated", "4",
    "--seeds", "1", "--arms", "dense,pulse/c1", "--look-every", "1", "--wire", "2", "--jobs", "1", "--out", "",
)  # fmt: skip
MARGIN, MIDDLE, LAST = 0.03, 0.015, 3  # of the difference to dense, and the evaluations that it is the mean of
FIRST = 3  # rounds that byte counts leave out: a checkpoint begins on the BF16 grid, where fewer entries are sent
KINDS = ("dense", "pulse", "published", "top-k", "random-k", "late", "ddp")
DEFAULT = "dense,pulse,pulse/c1,published,top-k/c1"
OUTERS = {"nesterov": Nesterov(0.7, 0.9), "average": SGD(1.0)}
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds
Run = dict[str, Any]  # what a run's file holds


@dataclass(frozen=True)
class Arm:
    """A training method to compare, parsed from its name."""

    name: str
    kind: str
    bits: int | None = None
    reach: float = 1.0
    lr: float | None = None
    life: int | None = None  # rounds
    join_d: bool = False

    @classmethod
    def read(cls, name: str) -> "Arm":
        kind, *given = name.split("/")
        found: dict[str, Any] = {}
        for option in given:
            match = re.fullmatch(r"(life|lr|c|r)([\d.]+)|join(D)", option)
            if match is None:
                raise SystemExit(
                    f"expected options cK, rX, lrY, lifeN or joinD in an arm, found {option!r} in {name!r}"
                )
            what, value, _ = match.groups()
            key = {"c": "bits", "r": "reach", "lr": "lr", "life": "life", None: "join_d"}[what]
            found[key] = True if what is None else float(value) if what in ("r", "lr") else int(value)
        if kind not in KINDS:
            raise SystemExit(f"expected one of {', '.join(KINDS)} as an arm, found {kind!r}")
        return cls(name, kind, **found)

    @property
    def counts(self) -> bool:
        """Whether it sends as many bytes as another arm did."""
        return self.kind in ("top-k", "random-k")

    def rule(self, outer: SGD) -> OuterRule:
        if self.lr is not None:
            outer = SGD(self.lr, outer.momentum, outer.nesterov)
        return OwnMomentum(outer) if self.kind == "pulse" or self.counts else SharedMomentum(outer)

    def gates(self, trainers: int, seed: int) -> Sequence[GateRule]:
        if self.counts:
            return [Chosen(self.kind == "top-k", self.bits, seed * 100 + r) for r in range(trainers)]
        if self.kind in ("pulse", "published"):
            return [VisibilityGate(self.bits, self.reach)] * trainers
        return [DenseGate()] * trainers

    def leaves(self, number: int, rounds: int, trainers: int) -> bool:
        """Whether trainer `number` leaves after round `rounds`."""
        return self.life is not None and (rounds + number * self.life // trainers) % self.life == 0

    def place(self, folder: Path | str, seed: int) -> Path:
        return Path(folder) / f"{self.name.replace('/', '_')}-{seed}.json"


# One run


def run(options: argparse.Namespace, arm: Arm, seed: int) -> None:
    """One arm with one seed, written to its file after every round."""
    torch.set_num_threads(1 if options.device == "cpu" else len(os.sched_getaffinity(0)))
    game = open_game(DemoSettings(model=options.model, device=options.device, group=options.group))
    rule = arm.rule(OUTERS[options.outer])
    fleet = Fleet(game, rule, seed=seed, forward=options.forward, **fleets.settings(options))
    like = json.loads(Arm.read(options.equal).place(options.out, seed).read_text()) if arm.counts else None
    rounds = _Rounds(options, arm, fleet, seed, like)
    found: Run = {
        "options": _kept(options),
        "arm": arm.name,
        "seed": seed,
        "equal": options.equal if arm.counts else None,
        "weights": fleet.shared.theta.size,
        "complete": False,
        "evaluated": [[0, fleet.evaluate(options.evaluated)]],
        "rounds": [],
    }
    for number in range(1, options.rounds + 1):
        began = time.perf_counter()
        told = rounds.next()
        if number % options.look_every == 0 or number == options.rounds:
            found["evaluated"].append([number, fleet.evaluate(options.evaluated)])
        found["rounds"].append({**told, "seconds": time.perf_counter() - began})
        found["complete"] = number == options.rounds
        place = arm.place(options.out, seed)
        place.with_suffix(".part").write_text(json.dumps(found))
        place.with_suffix(".part").replace(place)
        if options.say:
            last = json.dumps(found["rounds"][-1])
            print(arm.name, seed, number, f"{found['evaluated'][-1][1]:.4f}", last, file=sys.stderr, flush=True)


class _Rounds:
    """The rounds of an arm, one after another."""

    def __init__(self, options: argparse.Namespace, arm: Arm, fleet: Fleet, seed: int, like: Run | None) -> None:
        self._options, self._arm, self._fleet, self._like = options, arm, fleet, like
        self._gates = arm.gates(options.trainers, seed)
        self._bits = 0.0  # that an entry has taken, of an arm that keeps to another's bytes
        self._waiting: F32 = np.zeros_like(fleet.shared.theta)  # the sum of the round before, of the arm that is late

    def next(self) -> dict[str, Any]:
        """Run one round; return its figures."""
        fleet, arm = self._fleet, self._arm
        before, size, number = fleet.shared.theta, fleet.shared.theta.size, fleet.shared.round + 1
        if arm.kind == "ddp":
            fleet.work_together()
            payload = 4 * size * self._options.every
            return {"reward": fleet.rewards[-1], "payload": payload, "share": 1.0, "apart": 0.0, "wire": None}
        told = self._exchange(number)
        total, self._waiting = (self._waiting, fleet.total) if arm.kind == "late" else (fleet.total, self._waiting)
        fleet.step(total)
        told["apart"] = fleet.apart(0)
        for trainer in range(self._options.trainers):
            if arm.leaves(trainer, number, self._options.trainers):
                fleet.replace(trainer, self._steady_momentum(before) if arm.join_d else None)
        return told

    def _exchange(self, number: int) -> dict[str, Any]:
        fleet, size = self._fleet, self._fleet.shared.theta.size
        dense = self._gates[0].dense
        coder = None if dense else fleet.coder(dense)
        self._keep_to_budget(number)
        payloads, counts, parts = [], [], []
        for trainer, update in fleet.work():
            part = self._gates[trainer].select(fleet.shared.theta, update)
            if coder and (trainer == 0 or self._options.device == "cpu"):  # of a large model, one stands for all
                payloads.append(len(coder.encode(f"{trainer:05d}", part.sent, part.unit)))
            counts.append(len(part.sent.positions))
            if number in self._options.wire and coder:
                parts.append(part)
            fleet.take(update, part)
        payload = float(np.mean(payloads)) if payloads else 4.0 * size
        if isinstance(self._gates[0], Chosen):
            self._bits = 8 * payload / self._gates[0].count
        wire = None
        if number in self._options.wire:
            _, ring = dense_bytes(size, self._options.trainers)
            wire = measure(fleet, parts, ["owner"]).wire["owner"][0] if parts else ring
        share = float(np.mean(counts)) / size
        return {"reward": fleet.rewards[-1], "payload": payload, "share": share, "wire": wire}

    def _keep_to_budget(self, number: int) -> None:
        if self._like is None:
            return
        model = self._like["rounds"][number - 1]
        bits = self._bits or 8 * model["payload"] / (model["share"] * self._like["weights"])
        for gate in self._gates:
            assert isinstance(gate, Chosen)
            gate.count = int(8 * model["payload"] / bits)

    def _steady_momentum(self, before: F32) -> F32 | None:
        """The momentum of a trainer whose every step was equal to the last shared step.

        A trainer that moves by delta in every round has the momentum delta / (1 − mu) and steps by lr times that.
        """
        rule = self._fleet.rule
        if not isinstance(rule, OwnMomentum):
            return None
        momentum: F32 = (before - self._fleet.shared.theta) / np.float32(rule.outer.lr)
        return momentum


def _kept(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that two runs must share to be compared."""
    names = ("lr", "every", "trainers", "rounds", "outer", "forward", "prompts", "group", "evaluated", "look_every")
    return {"model": Path(options.model).name, **{name: getattr(options, name) for name in names}}


# Reports


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), T95.get(len(values), 2.262) * spread / math.sqrt(len(values))


def final(run: Run) -> float:
    """The mean reward of the last evaluations, never including that of the untouched policy."""
    return float(np.mean([reward for _, reward in run["evaluated"][1:][-LAST:]]))


def mean(runs: Mapping[int, Run], key: str, first: int = FIRST) -> float:
    """The mean of a figure over rounds and seeds."""
    values = [entry[key] for run in runs.values() for entry in run["rounds"][first:] if entry[key] is not None]
    return float(np.mean(values)) if values else math.nan


def verdict(off: float, half: float) -> str:
    if math.isnan(half):
        return "one seed: no interval"
    if off + half < -MARGIN:
        return "no, worse"
    return "yes" if off - half > -MARGIN and off >= -MIDDLE else "not shown"


def by_arm(runs: Sequence[Run]) -> dict[str, dict[int, Run]]:
    """Runs by arm and seed, arms in the order of KINDS."""
    found: dict[str, dict[int, Run]] = {}
    for one in sorted(runs, key=lambda run: (KINDS.index(run["arm"].split("/")[0]), run["arm"], run["seed"])):
        found.setdefault(one["arm"], {})[one["seed"]] = one
    return found


def tables(runs: Sequence[Run]) -> str:
    """All arms compared with dense, by seed; then the rewards by round, and those of interrupted runs."""
    arms = by_arm([run for run in runs if run["complete"]])
    trainers, size = runs[0]["options"]["trainers"], runs[0]["weights"]
    payload, ring = dense_bytes(size, trainers)
    start = float(np.mean([run["evaluated"][0][1] for run in runs]))
    out = [
        f"Settings: {json.dumps(runs[0]['options'])}.",
        f"Untouched policy: {start:.4f}. Fixed beforehand: of the mean of the last {LAST} evaluations, the paired "
        f"difference to dense has a 95 % interval above −{MARGIN} and a middle of at least −{MIDDLE}.\n",
        f"| arm | reward, last {LAST} evaluations | minus dense, paired | as good as dense? | sent | apart | payload × "
        f"(after round {FIRST}) | payload × (all rounds) | wire ×, owners | seeds |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, some in arms.items():
        level, half = interval([final(run) for run in some.values()])
        pairs = [final(run) - final(arms["dense"][seed]) for seed, run in some.items() if seed in arms.get("dense", {})]
        off, off_half = interval(pairs) if pairs else (math.nan, math.nan)
        said = "–" if name == "dense" or not pairs else verdict(off, off_half)
        equal = next(iter(some.values()))["equal"]
        shown = f"{name}, bytes of {equal}" if equal else name
        out.append(
            f"| {shown} | {level:.4f} ± {half:.4f} | {off:+.4f} ± {off_half:.4f} "
            f"| {said} | {mean(some, 'share'):.2%} | {mean(some, 'apart'):.2%} | {payload / mean(some, 'payload'):.1f} "
            f"| {payload / mean(some, 'payload', 0):.1f} | {ring / mean(some, 'wire', 0):.1f} | {len(some)} |"
        )
    if "dense" in arms:
        level, half = interval([final(run) for run in arms["dense"].values()])
        told = "does" if level - half - start > MARGIN else "does not (or one seed does not show it)"
        out.append(
            f"\nDense {told} beat the untouched policy by more than {MARGIN}: {level - start:+.4f} ± {half:.4f}."
        )
    out += ["\nMean evaluated reward after round:\n", *_growth(arms)]
    for run in runs:
        if not run["complete"]:
            seen = ", ".join(f"{number}: {reward:.4f}" for number, reward in run["evaluated"])
            out.append(f"\nCut off after round {len(run['rounds'])}: {run['arm']}, seed {run['seed']}: {seen}.")
    return "\n".join(out)


def _growth(arms: Mapping[str, Mapping[int, Run]]) -> list[str]:
    numbers = [number for number, _ in next(iter(next(iter(arms.values())).values()))["evaluated"]] if arms else []
    out = ["| arm | " + " | ".join(map(str, numbers)) + " |", "|---|" + "--:|" * len(numbers)]
    for name, some in arms.items():
        rewards = np.mean([[reward for _, reward in run["evaluated"]] for run in some.values()], axis=0)
        out.append(f"| {name} | " + " | ".join(f"{reward:.3f}" for reward in rewards) + " |")
    return out


def plot(runs: Sequence[Run], folder: Path) -> None:
    """Write rounds.svg and bytes.svg: evaluated reward, mean over the seeds of an arm that are complete."""
    by_round, by_bytes = {}, {}
    for name, some in by_arm([run for run in runs if run["complete"]]).items():
        rewards = np.mean([[reward for _, reward in run["evaluated"]] for run in some.values()], axis=0)
        sent = np.mean([np.cumsum([0.0, *(r["payload"] for r in run["rounds"])]) for run in some.values()], axis=0)
        numbers = [number for number, _ in next(iter(some.values()))["evaluated"]]
        by_round[name] = [(float(number), float(reward)) for number, reward in zip(numbers, rewards, strict=True)]
        by_bytes[name] = [
            (float(sent[number]), reward) for number, (_, reward) in zip(numbers, by_round[name], strict=True)
        ]
    rounds = Panel("Reward against rounds", by_round, x_label="rounds", dots=True)
    sizes = Panel(
        "Reward against bytes", by_bytes, log_x=True, x_label="payload bytes that a trainer has sent so far", dots=True
    )
    about = "Evaluated reward of the shared weights, mean over seeds, one curve for each arm"
    (folder / "rounds.svg").write_text(figure(rounds, f"{about}, against rounds."))
    (folder / "bytes.svg").write_text(figure(sizes, f"{about}, against payload bytes, on a logarithmic axis."))


def report(folder: Path, arms: Sequence[str]) -> None:
    """Print the tables and the raw figures of a folder of runs, of some arms or of all, and draw its plots there."""
    runs = [json.loads(place.read_text()) for place in sorted(folder.glob("*-*.json"))]
    runs = [run for run in runs if not arms or run["arm"] in arms]
    if not runs:
        raise SystemExit(f"expected the results of runs in {folder}, found none")
    for one in runs:
        if one["options"] != runs[0]["options"]:
            raise SystemExit(
                f"{folder} holds runs with different settings: {one['arm']} with seed {one['seed']} has "
                f"{one['options']}, and {runs[0]['arm']} {runs[0]['options']}. Move one kind to another folder"
            )
    print(tables(runs))
    if any(run["complete"] for run in runs):
        plot(runs, folder)
    print(json_line({"bench": "loco-reward", **provenance("torch", "transformers"), "runs": runs}))


# All of them


def run_all(options: argparse.Namespace, arms: Sequence[Arm], given: Sequence[str]) -> None:
    """Run every arm with every seed, each in a process and on cores of its own."""
    cores = sorted(os.sched_getaffinity(0))
    threads = options.threads or max(1, len(cores) // options.jobs)
    free: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for job in range(options.jobs):
        free.put([cores[(job * threads + i) % len(cores)] for i in range(threads)])

    def start(arm: Arm, seed: int, first: Future[None] | None) -> None:
        place = arm.place(options.out, seed)
        if first is not None:
            first.result()
        if place.exists():
            found = json.loads(place.read_text())
            if found["options"] != _kept(options) or (arm.counts and found["equal"] != options.equal):
                raise SystemExit(f"{place} is of a run with other settings: give another folder to --out")
            if found["complete"]:
                return
        mine = free.get()
        try:
            one = ("--one", f"{arm.name}:{seed}", "--out", options.out.absolute(), "--cores", *mine)
            subprocess.run(command("benchmarks", *given, *one), cwd=ROOT, check=True)
        finally:
            free.put(mine)

    done: dict[tuple[str, int], Future[None]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for arm in sorted(arms, key=lambda arm: arm.counts):
                first = done.get((options.equal, seed)) if arm.counts else None
                done[arm.name, seed] = pool.submit(start, arm, seed, first)
    for (name, seed), future in done.items():
        if (fault := future.exception()) is not None:
            print(f"{name}, seed {seed}: {fault}", file=sys.stderr)


def arguments(parser: argparse.ArgumentParser) -> None:
    fleets.arguments(parser, lr=3e-6, rounds=40)
    parser.add_argument("--outer", choices=list(OUTERS), default="nesterov")
    parser.add_argument("--forward", choices=["FP32", "BF16"], default="FP32", help="values that trainers compute with")
    parser.add_argument("--evaluated", type=int, default=512, help="prompts of an evaluation")
    parser.add_argument("--look-every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--wire", default="", help="rounds of which the bytes on the wire are counted, as in 8,16")
    parser.add_argument("--arms", help=f"{DEFAULT} by default; with --report, all in the folder")
    parser.add_argument("--equal", default="pulse/c1", help="the arm whose bytes limit top-k and random-k")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, help="of each run; default: the cores are divided evenly")
    parser.add_argument("--out", default="loco_reward", help="folder for every run's result; empty: a temporary one")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only print and plot the results in this folder")
    parser.add_argument("--one", metavar="ARM:SEED", help="run this one in this process")
    parser.add_argument("--cores", type=int, nargs="+", help="cores that --one may use")


def main(given: argparse.Namespace) -> None:
    given.wire = {int(number) for number in given.wire.split(",") if number}
    if given.report:
        report(given.report, given.arms.split(",") if given.arms else [])
        return
    if given.one:
        if given.cores:
            os.sched_setaffinity(0, given.cores)
        name, _, seed = given.one.rpartition(":")
        run(given, Arm.read(name), int(seed))
        return
    arms = [Arm.read(name) for name in (given.arms or DEFAULT).split(",")]
    if any(arm.counts for arm in arms) and given.equal not in {arm.name for arm in arms}:
        raise SystemExit(f"top-k and random-k send as many bytes as {given.equal}: add it to --arms")
    with tempfile.TemporaryDirectory() as scratch:
        given.out = Path(given.out or scratch)
        given.out.mkdir(parents=True, exist_ok=True)
        run_all(given, arms, sys.argv[1:])
        report(given.out, [])
