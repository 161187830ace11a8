"""cluster.py with --device: two ranks on one GPU, over gloo, with every method; point by point.

A point is a method, a density and a link. Points are measured in groups: all of our methods share one Broadcast, whose
first sync sends all weights, and every baseline is a group of its own. Each group starts from the same weights. Before
every sync the source's weights change on the device; after it, when the clock has stopped, the checksums of both ranks
are compared.

Links slower than loopback: the kernel paces what each rank's connections send (`links.pace_sockets`, which needs no
root), or with --shaping netns `tc` does it between two network namespaces, and then `lo` is the unlimited link between
them. The rate of a link is measured before it is used; if it is not the requested one, its points are skipped and
listed.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cluster import gpu_report
from benchmarks.harness.links import Link, Namespaces, Proxy
from benchmarks.harness.processes import Pair, seconds_of
from benchmarks.harness.report import provenance

TINY = 0.001  # density of the syncs in which ours learns a new link
TINY_SYNCS = 3
OURS, CODED, PLAIN, PAIRS = "ours", "ours, coded", "ours, plain", "index+value bucketed"
OFF = 0.25  # by which a shaped link may miss its rate


@dataclass(frozen=True)
class Stage:
    """Syncs that are measured together: one method at one density on one link."""

    way: str
    density: float
    link: str = "lo"
    timed: int = 3
    untimed: int = 1

    @property
    def staged(self) -> bool:
        """Whether one more sync is timed stage by stage: other links are computed from these stages."""
        return self.link == "lo" and (self.way == PAIRS or self.way.startswith("ours, "))

    @property
    def group(self) -> str:
        return self.way.partition(",")[0]

    @property
    def name(self) -> str:
        return f"{self.way} at {self.density:.3g} on {self.link}"


def large_plan() -> list[Stage]:
    """7.6 B weights, the most important points of each group first. 10 % is 4.6 GB by index and value, dense 15 GB."""
    loopback = [Stage(way, density) for density in (0.01, 0.001) for way in (OURS, CODED, PLAIN)]
    loopback += [Stage(way, 0.1, timed=2) for way in (OURS, CODED, PLAIN)]
    slow = [Stage(way, 0.01, link, 2, 0) for link in ("1", "0.1") for way in (OURS, CODED)]
    rest = [Stage("ours, gap", 0.01, timed=1), Stage("ours, dense", 0.01, timed=2)]
    rest += [Stage("ours, dense", 0.1, timed=1, untimed=0)]
    pairs = [Stage(PAIRS, 0.01), Stage(PAIRS, 0.001), Stage(PAIRS, 0.01, "1", 1, 0)]
    pairs += [Stage(PAIRS, 0.01, "0.1", 1, 0), Stage(PAIRS, 0.1, timed=2)]
    once = [Stage("index+value per tensor", 0.01, timed=2), Stage("dense bucketed", 0.01, timed=1, untimed=0)]
    return [*loopback, *slow, *rest, *pairs, *once, Stage("dense per tensor", 0.01, timed=1, untimed=0)]


def small_plan() -> list[Stage]:
    """A small model: every method at every density, with more syncs."""
    ours = [OURS, CODED, PLAIN, "ours, gap", "ours, dense"]
    others = [PAIRS, "index+value per tensor", "dense bucketed", "dense per tensor"]
    plan = [Stage(way, density, timed=5) for way in ours for density in (0.01, 0.001, 0.1)]
    plan += [Stage(way, 0.01, link, 3, 0) for link in ("1", "0.1") for way in (OURS, CODED)]
    for way in others:
        plan += [Stage(way, density, timed=5) for density in (0.01, 0.001, 0.1)]
        plan += [Stage(way, 0.01, link, 3, 0) for link in ("1", "0.1") if way == PAIRS]
    return plan


# -- the link ------------------------------------------------------------------------------------------------------


class ShapedPair:
    """The two ranks, and how their link is slowed down."""

    def __init__(self, cache: Path, given: argparse.Namespace) -> None:
        self.link: Link = Proxy()  # only starts the processes: nothing goes through it
        interfaces, self.how = ("lo", "lo"), "loopback; slower: the kernel paces what each connection sends"
        if given.shaping == "netns":
            self.link, interfaces = Namespaces(), ("pulse0", "pulse1")
            self.how = self.link.name
        asked = {"device": "cpu" if given.device == "interpreter" else given.device}
        asked["interpreted"] = given.device == "interpreter"
        self.pair = Pair(self.link, cache, interfaces, "benchmarks.cluster.gpu_ends", **asked)
        self.rates: dict[str, float] = {}
        self._now = ""

    def use(self, name: str) -> float | None:
        """Shape the link; return its measured bits a second, or None if that is not the requested rate."""
        wanted = None if name == "lo" else float(name) * 1e9
        if name != self._now:
            if isinstance(self.link, Namespaces):
                self.link.shape(wanted)
            else:
                self.pair.tell("pace", bits_per_s=wanted)
            self._now = name
        if name not in self.rates:
            self.rates[name] = self.pair.rate(wanted)
            print(f"{name}: one large broadcast gets {self.rates[name] / 1e9:.3f} Gbit/s ({self.how})", flush=True)
        rate = self.rates[name]
        return rate if wanted is None or abs(rate / wanted - 1) < OFF else None

    def close(self) -> None:
        self.link.close()


# -- measuring -----------------------------------------------------------------------------------------------------


class Column:
    """All points of one model."""

    def __init__(self, given: argparse.Namespace, cache: Path, save: Callable[[dict[str, Any]], None]) -> None:
        self.given, self.cache, self.save = given, cache, save
        self.began, self.seed = time.monotonic(), 0
        self.missing: list[str] = []
        self.failed = False
        self.open()

    def open(self) -> None:
        self.shaped = ShapedPair(self.cache, self.given)
        self.pair = self.shaped.pair
        folder = str(self.cache / "smollm2") if self.given.gguf else None
        self.about = self.pair.tell("load", weights=self.given.weights or 7.6e9, folder=folder)[0]
        self.about["model"] = "SmolLM2" if self.given.gguf else f"{self.about['weights'] / 1e9:.2g} B"

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    def late(self, stage: Stage) -> bool:
        """Whether there is no time left for a stage, which is then listed as not measured."""
        if self.spent_s < self.given.budget_s:
            return False
        self.missing.append(stage.name)
        return True

    def measure(self, group: str, stages: list[Stage]) -> None:
        """Set up a method and run its stages. A failure ends the group and is printed."""
        if all(self.late(stage) for stage in stages):
            return
        try:
            self._measure(group, stages)
        except RuntimeError as e:
            print(f"FAILED: {group}: {e}", flush=True)
            self.failed = True
            self.missing.append(f"{group}, from where it failed")
            self.shaped.close()
            self.open()

    def _measure(self, group: str, stages: list[Stage]) -> None:
        self.shaped.use("lo")
        same(self.pair.tell("begin"), f"{group}, at the start")
        self.pair.tell("make", way=group)
        changed: dict[float, float] = {}
        if group == OURS:
            rate = self.shaped.use("lo")
            self._keep(Stage("ours, first sync", 0.0, timed=1, untimed=0), rate, [self._sync(OURS, 0.0)])
        for stage in stages:
            if self.late(stage):
                continue
            if (rate := self.shaped.use(stage.link)) is None:
                self.missing.append(f"{stage.name}, which cannot be shaped here")
                continue
            if stage.way == OURS and stage.link != "lo":
                for _ in range(TINY_SYNCS):
                    self._sync(stage.way, TINY)
            for _ in range(stage.untimed):
                self._sync(stage.way, stage.density)
            syncs = [self._sync(stage.way, stage.density) for _ in range(min(stage.timed, self.given.rounds))]
            more = {}
            if stage.staged:
                by_stages = self._sync(stage.way, stage.density, staged=True)
                more["staged"] = {name: value for name, value in by_stages.items() if name.endswith("_s")}
            changed[stage.density] = syncs[-1]["changed"]
            self._keep(stage, rate, syncs, **more)
        if group == OURS:
            self._keep_choices(changed)

    def _sync(self, way: str, density: float, **options: Any) -> dict[str, Any]:
        """Change the source's weights, sync and compare."""
        self.seed += 1
        changed = self.pair.tell("step", density=density, seed=self.seed)[0]["changed"] if density else 0
        if way.partition(",")[0] == OURS:
            options["method"] = way.partition(", ")[2] or "auto"
        answers = self.pair.tell("sync", **options)
        same(self.pair.tell("check"), f"{way} at {density:.3g}")
        return sync_of(answers) | {"changed": changed}

    def _keep(self, stage: Stage, rate: float | None, syncs: list[dict[str, Any]], **more: Any) -> None:
        point = {**self.about, "way": stage.way, "density": stage.density, "link": stage.link, "rate": rate}
        point |= {"how": self.shaped.how, **summary(syncs), **more}
        self.save(point)
        print(f"{self.spent_s:6.1f} s  {gpu_report.progress(point)}", flush=True)

    def _keep_choices(self, changed: dict[float, float]) -> None:
        """What the cost model would choose on other links, with the costs that it has learnt in this run."""
        links = dict(gpu_report.LINKS)
        for density, count in changed.items():
            found = self.pair.tell("choices", changed=count, links=links)[0]["choices"]
            self.save({**self.about, "way": "choices", "density": density, "link": "computed", "choices": found})


def same(answers: list[dict[str, Any]], when: str) -> None:
    """Raises: RuntimeError, if the receiver's weights are not the source's."""
    if len({one["checksum"] for one in answers}) > 1:
        raise RuntimeError(f"{when}: the receiver's weights are not the source's")


def sync_of(answers: list[dict[str, Any]]) -> dict[str, Any]:
    source, receiver = answers
    out: dict[str, Any] = {"seconds": seconds_of(answers), "method": source.get("method")}
    out |= {name: source[name] for name in ("messages", "sent_bytes", "buckets") if name in source}
    for end, told in (("source", source), ("receiver", receiver)):
        out |= {
            f"{end}_{name}": told[name] for name in told if name.endswith(("_s", "_bytes")) and name != "sent_bytes"
        }
    for name in ("meet_s", "verdict_s"):
        if name in source:  # the rank that arrives last waits only for the round itself
            out[name] = min(source[name], receiver[name])
    return out


def summary(syncs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the figures of each sync, the largest memory, and the seconds of all syncs."""
    out: dict[str, Any] = {}
    for name in syncs[0]:
        if name != "method":
            middle = max if name.endswith("peak_bytes") else statistics.median
            out[name] = middle([one.get(name, 0) for one in syncs])
    methods, everyone = [one["method"] for one in syncs], [one["seconds"] for one in syncs]
    return out | {"method": statistics.mode(methods), "methods": methods, "least": min(everyone), "all": everyone}


# -- the run -------------------------------------------------------------------------------------------------------


def keep_smollm2(gguf: str, folder: Path) -> None:
    """Write the weights of a GGUF file as one row of bits, and the shapes of its tensors."""
    import gguf as reading
    import torch

    from pulsesync_lab.demo import smollm2

    if (folder / "shapes.json").exists():
        return
    reader = reading.GGUFReader(gguf)
    weights = smollm2.read_weights(reader, {name: field.contents() for name, field in reader.fields.items()})
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "start.npy", np.concatenate([one.view(torch.int16).numpy().ravel() for one in weights.values()]))
    (folder / "shapes.json").write_text(json.dumps([(name, list(one.shape)) for name, one in weights.items()]))


def groups_of(stages: list[Stage]) -> Iterator[tuple[str, list[Stage]]]:
    names = dict.fromkeys(stage.group for stage in stages)
    for name in names:
        yield name, [stage for stage in stages if stage.group == name]


def run(given: argparse.Namespace, cache: Path) -> None:
    """Measure every point that the --points file does not have yet; print all points."""
    file = Path(given.points) if given.points else cache / "points.jsonl"
    points = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if given.gguf:
        keep_smollm2(given.gguf, cache / "smollm2")

    def save(point: dict[str, Any]) -> None:
        points.append(point)
        with file.open("a") as out:
            out.write(json.dumps(point) + "\n")

    column = Column(given, cache, save)
    known = {(one["model"], one["way"], one["density"], one["link"]) for one in points if one["way"] != "about"}
    model = column.about["model"]
    small = column.about["weights"] < 1e9
    stages = [
        stage
        for stage in (small_plan() if small else large_plan())
        if stage.link in given.links
        and (given.ways is None or stage.way in given.ways)
        and (given.densities is None or stage.density in given.densities)
        and (model, stage.way, stage.density, stage.link) not in known
    ]
    try:
        for group, some in groups_of(stages):
            column.measure(group, some)
    finally:
        column.shaped.close()
    save({"way": "about", **provenance("torch", "triton"), "missing": column.missing, "spent_s": column.spent_s})
    gpu_report.report(points)
    if column.failed:
        sys.exit("a method failed or was not exact: see the error above")
