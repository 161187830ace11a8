"""What does one weight sync inside a cluster cost, by method, in messages, bytes and time?

    python -m benchmarks cluster                                          # all sweeps on generated updates
    python -m benchmarks cluster --sweep recorded --trace DIR --gguf FILE # the recorded run (see recording.py)
    python -m benchmarks cluster --sweep density --links full 0.1 --weights 5e6 --rounds 3

Two processes, a source and a receiver, exchange weights over gloo; each has the model as BF16 tensors (methods.py
has the methods). `lo` is loopback; the other links are a veth pair between two network namespaces, at full speed
(`full`) or shaped to the given number of Gbit/s. All methods sync the same steps, in rounds: every method syncs a step
before any syncs the next one. Before each sync the receiver's weights are restored to the previous step. The clock runs
from a barrier until both ranks are done. After each sync, when the clock has stopped, the SHA-256 digests of both
ranks' weights are compared: a method that is not exact ends the benchmark.

With --device the weights are on a GPU (see gpu.py): 7.6 B generated ones, or those of SmolLM2:

    python -m benchmarks cluster --device cuda --links lo 1 0.1 --budget-s 240 --points cluster.jsonl
    python -m benchmarks cluster --device cuda --gguf FILE --links lo 1 0.1 --budget-s 90 --points cluster.jsonl
    python -m benchmarks cluster --device cpu --weights 2e7 --links lo 1            # the same in host memory

With --report, it prints the report of the points that runs with --device have saved (see gpu_report.py).

With --points FILE, each measured point is saved to that file and is not measured again, so that a benchmark can be run
in several parts.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import gpu, gpu_report, report
from benchmarks.cluster.gpu import summary, sync_of
from benchmarks.cluster.methods import BASELINES, OURS
from benchmarks.harness import recording
from benchmarks.harness.links import Link, Namespaces, Proxy, end_like_ctrl_c
from benchmarks.harness.processes import Pair, seconds_of
from pulsesync.testing import AdamUpdates

QUICK = ("--sweep", "links", "--links", "lo", "--weights", "1e6", "--rounds", "1", "--warm-ups", "1")
ENDS = "benchmarks.cluster.ends"
SWEEPS = ("links", "tensors", "density", "recorded")
LINKS = ("lo", "full", "10", "1", "0.1")
DENSITIES = {0.001: 3.42e-7, 0.003: 9.8e-7, 0.01: 3.05e-6, 0.03: 1.034e-5, 0.1: 3.95e-5, 0.4: 2.86e-4}  # learning rates
COUNTS = (100, 1000, 5000, 20_000)
BURN_IN = 8  # generated steps before the first that is used: the first few change fewer weights
LARGE = 10  # tensors with half of the weights; the others are small and equal, as experts are


# -- the weights ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Weights to sync: a folder with the start and what each step changes, and how they are cut into tensors."""

    name: str
    folder: Path
    shapes: str
    tensors: int
    weights: int
    changed: list[int]  # by each step


def cut(weights: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
    """That many tensors: half of the weights in ten of them, the rest in equal small ones; the last takes what is left.

    Real experts are larger than these: the number of tensors is that of a MoE model, the number of weights is not.
    """
    wide = weights // 2 // LARGE // 256
    small = (weights - wide * 256 * LARGE) // (count - LARGE) // 32
    shapes: list[tuple[str, tuple[int, ...]]] = [(f"large.{i}", (wide, 256)) for i in range(LARGE)]
    shapes += [(f"expert.{i:05d}", (small, 32)) for i in range(count - LARGE - 1)]
    return [*shapes, ("last", (weights - sum(math.prod(shape) for _, shape in shapes),))]


def keep(folder: Path, states: Iterator[Any], steps: int) -> list[int]:
    """Write the first state and the changes of each step, unless they exist; return how many weights each changes."""
    done = folder / "changed.json"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        old = next(states).copy()
        np.save(folder / "start.npy", old)
        changed = []
        for number in range(1, steps + 1):
            new = next(states)
            positions = np.flatnonzero(old != new).astype(np.int32)
            np.save(folder / f"positions{number}.npy", positions)
            np.save(folder / f"values{number}.npy", new[positions])
            changed.append(int(positions.size))
            old[positions] = new[positions]
        done.write_text(json.dumps(changed))
    return list(json.loads(done.read_text()))


def generated(cache: Path, weights: int, density: float, count: int, steps: int) -> Case:
    def states() -> Iterator[Any]:
        updates = AdamUpdates({"all": (weights,)}, lr=DENSITIES[density])
        for _ in range(BURN_IN):
            updates.step()
        yield updates.state()["all"]
        while True:
            yield updates.step()["all"]

    folder = cache / f"generated-{weights}-{density:g}-{steps}"
    changed = keep(folder, states(), steps)
    shapes = cut(weights, count)
    (folder / f"shapes{count}.json").write_text(json.dumps(shapes))
    name = f"generated, {density:.1%}, {count} tensors"
    return Case(name, folder, f"shapes{count}.json", len(shapes), weights, changed)


def recorded(cache: Path, trace: str, gguf: str | None, steps: int) -> Case:
    """The last steps of the recorded run."""
    run = recording.load(trace, gguf=gguf)
    shapes = list(zip(run.names, run.shapes, strict=True))

    def states() -> Iterator[Any]:
        for number, (_, old, new) in enumerate(run.steps(first=len(run) - steps)):
            if not number:
                yield np.concatenate([bits.reshape(-1) for bits in old.values()])
            yield np.concatenate([bits.reshape(-1) for bits in new.values()])

    folder = cache / f"recorded-{steps}"
    changed = keep(folder, states(), steps)
    (folder / "shapes.json").write_text(json.dumps(shapes))
    weights = sum(math.prod(shape) for shape in run.shapes)
    return Case("recorded run", folder, "shapes.json", len(shapes), weights, changed)


def cases(given: argparse.Namespace, sweep: str, cache: Path, steps: int) -> Iterator[Case]:
    weights = int(given.weights or (50e6 if sweep == "links" else 20e6))
    if sweep == "recorded":
        yield recorded(cache, given.trace, given.gguf, steps)
    elif sweep == "links":
        yield generated(cache, weights, 0.01, 300, steps)
    elif sweep == "density":
        for density in given.densities or DENSITIES:
            yield generated(cache, weights, density, 300, steps)
    else:
        for count in given.counts or COUNTS:
            yield generated(cache, weights, 0.01, count, steps)


# -- the processes -------------------------------------------------------------------------------------------------


@contextmanager
def pairs(cache: Path, wanted: list[str]) -> Iterator[dict[str, Pair]]:
    """Start the processes for the given links. Without network namespaces, print that only loopback is measured."""
    out: dict[str, Pair] = {}
    links: list[Link] = []
    try:
        if "lo" in wanted:
            links.append(Proxy())  # only starts the processes: nothing goes through it
            out["lo"] = Pair(links[-1], cache, ("lo", "lo"), ENDS)
        if shaped := [name for name in wanted if name != "lo"]:
            try:
                links.append(Namespaces())
            except OSError as e:
                print(f"No network namespaces here, so loopback alone: {e}\n")
            else:
                out |= dict.fromkeys(shaped, Pair(links[-1], cache, ("pulse0", "pulse1"), ENDS))
        yield out
    finally:
        for link in links:
            link.close()


# -- measuring -----------------------------------------------------------------------------------------------------


def joins_at(way: str, warm_ups: int) -> int:
    """The step of a method's first sync. Methods that adapt to the link use all warm-ups; others one or two."""
    if way == "index+value bucketed" or way == "ours, dense":
        return max(0, warm_ups - 1)
    return 0 if way in OURS else warm_ups


def measure(pair: Pair, ways: list[str], case: Case, given: argparse.Namespace) -> dict[str, Any]:
    """Sync all steps with every method; return, by method, the figures of its timed syncs."""
    pair.tell("begin")
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    spent = dict.fromkeys(ways, 0.0)
    for step in range(given.warm_ups + given.rounds + 1):  # step 0 changes nothing: ours sends its first, full state
        joining = [way for way in ways if joins_at(way, given.warm_ups) == step]
        pair.tell("join", ways=joining, bucket_bytes=int(given.bucket_mb * 1e6))
        pair.tell("step", number=step)
        for way in ways:
            enough = taken[way] and spent[way] > given.budget_s
            if enough or step < joins_at(way, given.warm_ups):
                continue
            before = pair.link.carried()
            answers = pair.tell("sync", way=way)
            carried = pair.link.carried() - before
            hashes = {one["sha256"] for one in pair.tell("check")}
            assert len(hashes) == 1, f"{way}, step {step}: the receiver's weights are not the source's"
            if step > given.warm_ups:
                spent[way] += seconds_of(answers)
                changed = case.changed[step - 1]
                taken[way].append(sync_of(answers) | {"carried_bytes": carried, "changed": changed})
    return {way: summary(syncs) for way, syncs in taken.items()}


def run(given: argparse.Namespace, cache: Path) -> list[dict[str, Any]]:
    """Measure every point that the --points file does not have yet; return all points."""
    file = Path(given.points) if given.points else None
    points = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    known = {(point["sweep"], point["case"], point["weights"], point["link"]) for point in points}
    with pairs(cache, given.links) as by_link:
        rates = {name: rate_of(name, pair) for name, pair in by_link.items()}
        for sweep in given.sweep:
            for case in cases(given, sweep, cache, given.warm_ups + given.rounds):
                for name, pair in by_link.items():
                    if (sweep, case.name, case.weights, name) in known:
                        continue
                    about = {"sweep": sweep, "case": case.name, "link": name, "rate": rates[name]}
                    points.append(about | point_of(pair, name, case, given))
                    if file:
                        with file.open("a") as out:
                            out.write(json.dumps(points[-1]) + "\n")
                    print(report.progress(points[-1]), flush=True)
    return points


def bits_per_s(name: str) -> float | None:
    return None if name in ("lo", "full") else float(name) * 1e9


def rate_of(name: str, pair: Pair) -> float:
    """Measure and print the rate of a link, in bits a second."""
    pair.link.shape(bits_per_s(name))
    rate = pair.rate(bits_per_s(name))
    print(f"{name}: one large broadcast gets {rate / 1e9:.3f} Gbit/s", flush=True)
    return rate


def point_of(pair: Pair, link: str, case: Case, given: argparse.Namespace) -> dict[str, Any]:
    pair.link.shape(bits_per_s(link))
    pair.tell("load", folder=str(case.folder), shapes=case.shapes)
    density = statistics.median(case.changed[given.warm_ups :]) / case.weights
    about = {"weights": case.weights, "tensors": case.tensors, "density": density}
    return about | {"ways": measure(pair, given.ways, case, given)}


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, help="default: all; recorded only with --trace")
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="lo, full, or a number of Gbit/s")
    parser.add_argument("--ways", nargs="+", choices=[*BASELINES, *OURS], help="methods; default: all", metavar="WAY")
    weights = "generated weights; default: 50e6 for links, 20e6 elsewhere, 7.6e9 with --device"
    parser.add_argument("--weights", type=float, help=weights)
    parser.add_argument("--densities", nargs="+", type=float, choices=list(DENSITIES), help="in the density sweep")
    parser.add_argument("--device", choices=("cuda", "cpu", "interpreter"), help="keep the weights on this device")
    parser.add_argument("--shaping", choices=("pacing", "netns"), default="pacing", help="of links with --device")
    parser.add_argument("--counts", nargs="+", type=int, help="numbers of tensors in the tensor sweep")
    parser.add_argument("--rounds", type=int, default=5, help="timed syncs of each method, at most")
    parser.add_argument("--warm-ups", type=int, default=4, help="earlier steps, in which ours learns link and codec")
    budget = "seconds after which a method is not timed again, default 20; with --device, for all methods, default 240"
    parser.add_argument("--budget-s", type=float, help=budget)
    parser.add_argument("--bucket-mb", type=float, default=16, help="of the baselines; 8 and 64 are no faster")
    parser.add_argument("--cache", help="folder to keep the generated steps in")
    parser.add_argument("--points", metavar="FILE", help="save points to this file, and resume from it")
    files = "only print the report of these files of --points, with a GPU; see gpu_report.py"
    parser.add_argument("--report", nargs="+", type=Path, metavar="POINTS", help=files)
    parser.add_argument("--json", type=Path, help="with --report: write the points to this file")


def main(given: argparse.Namespace) -> None:
    if given.report:
        gpu_report.report_files(given.report, given.json)
        return
    if given.budget_s is None:
        given.budget_s = 240 if given.device else 20
    if given.ways is None and not given.device:
        given.ways = [*BASELINES, *OURS]
    if given.sweep is None:
        given.sweep = [*SWEEPS[:3], *(["recorded"] if given.trace else [])]
    end_like_ctrl_c()
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as folder:
        if given.device:
            gpu.run(given, Path(given.cache or folder))
            return
        points = run(given, Path(given.cache or folder))
    report.report(points, given.warm_ups + 1, given.rounds)
