"""How long, and how many bytes, from `publish` to verified weights on a worker, over links of several speeds?

    python -m benchmarks sync --small                             # generated updates, under a minute, no root
    python -m benchmarks sync --trace DIR [--gguf FILE]           # the recorded run: twenty minutes
    python -m benchmarks sync --trace DIR --memory                # memory of publish and sync, less the weights

Trainer and worker are processes with a link between them (links.py describes how it is slowed down; the method in use
is printed). A folder at the trainer's end is served by `pulsesync.server`. The worker fetches over HTTP, and a message
on a pipe announces each new version; a worker that polls would wait half its interval longer. Time runs from the call
of `publish` until the new weights are in the worker's tensors. Three methods take turns, step by step:

- full weights: all BF16 bytes, as one object;
- PULSE as published: `baselines.PulseCoo`, positions and values under zstd-1, as one object;
- pulsesync: `Publisher` and `Subscriber` with their defaults, which find the new version themselves (five requests).

The first two get the object's name in the message, and verify nothing within the measured time; ours has verified every
hash and digest when its time ends. Afterwards each state is compared with the trainer's by SHA-256, and the benchmark
fails if one differs.

Then the benchmark reports what anchors add, what it costs to join late, the bandwidth at which the steps of a 7 B model
are busy for 90 % of the time, and publish_every="auto" compared with fixed numbers of steps. Files are in memory
(/dev/shm, if it exists), not on a disk.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import pulsesync
from benchmarks.harness import recording
from benchmarks.harness.baselines import PulseCoo
from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.links import Link, end_like_ctrl_c, open_link
from benchmarks.harness.processes import Remote, command, last_line
from benchmarks.harness.report import json_line, provenance, shown, spread, table
from benchmarks.harness.weights import SEED, Bits, Shapes, Steps, as_bf16, generated, recorded, split
from benchmarks.sync.ends import EpochPublisher
from pulsesync import Publisher
from pulsesync.format import epochs
from pulsesync.store import LocalStore, ThrottledStore
from tests.readers import Squasher

QUICK = ("--small", "--width", "64", "--steps", "1", "--full-s", "2", "--link", "proxy")
ENDS = "benchmarks.sync.ends"
NAMES = {"full": "full weights", "pulse": "PULSE as published", "ours": "pulsesync"}
RATES = (None, 1e9, 200e6, 100e6, 50e6, 20e6, 10e6)  # bits a second; None: not limited
MODELLED = (1e10, 2e10, 1e11)
JOIN_RATE = 100e6
STEP_S, BUSY, BIG = 50.0, 0.9, 7_000_000_000  # PULSE's figure 1: 14 GB need 20 Gbit/s, 140 MB need 0.2
GRAIL_ANCHOR_STEPS = 10  # PULSE's own code writes the full weights at this interval


# -- the steps -----------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A run as its initial weights and the changes of each step, with all tensors in one flat array."""

    about: str
    shapes: Shapes
    start: Bits
    steps: list[tuple[Any, Bits]]  # positions, new values
    sha256: list[str]  # of the state after each step

    @classmethod
    def of(cls, about: str, steps: Steps, count: int) -> "Source":
        shapes: Shapes = {}
        changes: list[tuple[Any, Bits]] = []
        sha256: list[str] = []
        for at, old, new in steps:
            if at == 0:
                shapes = {name: bits.shape for name, bits in old.items()}
                start = np.concatenate([bits.reshape(-1) for bits in old.values()])
                flat = start.copy()
            after = np.concatenate([bits.reshape(-1) for bits in new.values()])
            positions = np.flatnonzero(flat != after).astype(np.uint32)
            changes.append((positions, after[positions]))
            flat = after
            sha256.append(hashlib.sha256(flat.data).hexdigest())
            if at + 1 == count:
                break
        return cls(about, shapes, start, changes, sha256)

    @property
    def weights(self) -> int:
        return self.start.size

    @property
    def full_bytes(self) -> int:
        return 2 * self.start.size


# -- the trainer's end ---------------------------------------------------------------------------------------------


class Trainer:
    """Has the weights of a run at a step, and publishes them by every method, each into its own folder."""

    def __init__(self, source: Source, folder: Path) -> None:
        self.source, self.folder = source, folder
        np.save(folder / "start.npy", source.start)
        self.old, self.new = source.start.copy(), source.start.copy()
        self.tensors = split(self.new, source.shapes)
        self.publisher: Publisher | None = None
        self.root = self.place("root")
        began = time.perf_counter()
        with Publisher(str(self.root)) as publisher:
            publisher.publish(as_bf16(self.tensors), step=0)
            self.anchor_bytes = publisher.anchor_bytes
        self.root_s = time.perf_counter() - began

    def place(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name

    def begin(self, **options: Any) -> None:
        """Return to the initial weights, with a run that has only its first version and its anchor."""
        self.end()
        for name in NAMES:
            for path in self.place(name).iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.root, self.place("ours"), dirs_exist_ok=True)
        np.copyto(self.old, self.source.start)
        np.copyto(self.new, self.source.start)
        self.step = -1
        location = options.pop("location", str(self.place("ours")))
        self.publisher = EpochPublisher(location, **options)

    def end(self) -> None:
        if self.publisher:
            self.publisher.close()
            self.publisher = None

    def train(self) -> None:
        """Take the next step."""
        if self.step >= 0:
            positions = self.source.steps[self.step][0]
            self.old[positions] = self.new[positions]
        self.step += 1
        positions, values = self.source.steps[self.step]
        self.new[positions] = values

    def publish(self, method: str) -> dict[str, Any]:
        """Publish the step; return the message for the worker (`tell`), and the seconds of each part of publishing."""
        began = time.monotonic()
        if method == "ours":
            assert self.publisher is not None
            report = self.publisher.publish(as_bf16(self.tensors), step=self.step + 1)
            parts = {"compare_s": report.blocked_s, "encode_s": report.encode_s, "store_s": report.store_s}
            return {"tell": {}, "began": began, "written_bytes": report.payload_bytes, **parts}
        store, key = LocalStore(self.place(method)), f"parts/{self.step}"
        data: Any = self.new.data.cast("B")
        if method == "pulse":
            data = PulseCoo().encode(split(self.old, self.source.shapes), self.tensors)
        encoded = time.monotonic()
        store.put(key, data)
        store_s = time.monotonic() - encoded
        store.delete(f"parts/{self.step - 1}")
        size = len(data)
        parts = {"compare_s": 0.0, "encode_s": encoded - began, "store_s": store_s}
        return {"tell": {"key": key, "size": size}, "began": began, "written_bytes": size, **parts}


# -- the worker's end ----------------------------------------------------------------------------------------------


def role(name: str, **fields: Any) -> list[str]:
    return command(ENDS, name, json.dumps(fields))


class Bench:
    """A trainer, a server and a worker for each method, and the link between them."""

    def __init__(self, source: Source, link: Link, folder: Path) -> None:
        self.source, self.link, self.folder = source, link, folder
        self.trainer = Trainer(source, folder)
        self.urls, self.workers = {}, {}
        for method in NAMES:
            place = str(self.trainer.place(method))
            served = Remote(link.start(role("serve", folder=place, host=link.host), "trainer"))
            self.urls[method] = link.reach(int(served.heard["url"].rpartition(":")[2]))
            self.workers[method] = self.worker(method)

    def worker(self, method: str, **fields: Any) -> Remote:
        return Remote(self.link.start(role("work", method=method, shapes=self.source.shapes, **fields), "worker"))

    def check(self, worker: Remote, step: int, name: str) -> float:
        """Compare a worker's weights with the trainer's, bit for bit; return the seconds to hash them."""
        found = worker.ask("sha256")
        assert found["sha256"] == self.source.sha256[step], f"{name}: these are not the weights of step {step}"
        return float(found["seconds"])


# -- seconds and bytes against bandwidth ---------------------------------------------------------------------------


@dataclass
class Point:
    """The figures of one method over one link, step by step."""

    method: str
    rate: float | None
    rows: list[dict[str, float]] = field(default_factory=list)

    def values(self, what: str) -> list[float]:
        return [row[what] for row in self.rows]

    def spread(self, what: str) -> dict[str, float]:
        return spread(self.values(what))

    def median(self, what: str) -> float:
        return self.spread(what)["p50"]


PARTS = ("compare_s", "encode_s", "store_s", "fetch_s", "prepare_s", "apply_s")
COLUMNS = ("total_s", *PARTS, "publish_cpu_s", "sync_cpu_s", "fetched_bytes", "wire_bytes", "written_bytes", "hash_s")


def measure(bench: Bench, rate: float | None, measured: int, full_s: float) -> list[Point]:
    """Replay the run; measure its last steps over a link of this rate."""
    trainer, source = bench.trainer, bench.source
    trainer.begin()
    bench.link.shape(None)
    count = len(source.steps)
    first = count - measured
    for method, worker in bench.workers.items():
        worker.ask("begin", url=bench.urls[method], start=str(trainer.folder / "start.npy"))
    points = {method: Point(method, rate) for method in NAMES}
    left_s = full_s
    at_full = source.full_bytes * 8 / rate if rate else 0.0
    for step in range(count):
        trainer.train()
        if step < first:
            trainer.publish("ours")
            if step + 1 < first:
                continue
            before = str(trainer.folder / "before.npy")
            np.save(before, trainer.new)
            for method in ("full", "pulse"):
                bench.workers[method].ask("begin", url=bench.urls[method], start=before)
            bench.workers["ours"].ask("sync")
            bench.check(bench.workers["ours"], step, "pulsesync")
            bench.link.shape(rate)
            continue
        methods = list(NAMES)
        for method in methods[step % 3 :] + methods[: step % 3]:
            if method == "full":
                if left_s < at_full:
                    continue
                left_s -= at_full
            points[method].rows.append(once(bench, method, step))
    bench.link.shape(None)
    return [point for point in points.values() if point.rows]


def once(bench: Bench, method: str, step: int) -> dict[str, float]:
    """Publish a step by one method, have it synced, and check what arrived."""
    worker, carried, used = bench.workers[method], bench.link.carried(), time.process_time()
    published = bench.trainer.publish(method)
    published["publish_cpu_s"] = time.process_time() - used
    synced = worker.ask("sync", **published["tell"])
    row = {**published, **synced, "total_s": synced["done"] - published["began"]}
    row["wire_bytes"] = bench.link.carried() - carried
    row["hash_s"] = bench.check(worker, step, NAMES[method])
    return {name: float(row[name]) for name in COLUMNS}


def modelled(points: list[Point], method: str, rate: float) -> float:
    """Modelled seconds at a rate that was not measured: those without fetching, plus the bytes at that rate."""
    point = next(p for p in points if p.method == method and p.rate is None)
    rest = point.median("total_s") - point.median("fetch_s")
    wire = next((p for p in points if p.method == method and p.rate), point)
    return rest + 8 * wire.median("wire_bytes") / rate


def say_rate(rate: float | None) -> str:
    if rate is None:
        return "unshaped"
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def report_sweep(points: list[Point], rates: list[float | None]) -> list[dict[str, Any]]:
    """Print seconds by bandwidth; return all figures."""
    by = {(p.method, p.rate): p for p in points}
    rows, out = [], []
    for rate in [*sorted(MODELLED, reverse=True), *rates]:
        seconds = {}
        cells = [say_rate(rate)]
        for method in NAMES:
            point = by.get((method, rate))
            if point:
                seconds[method] = point.median("total_s")
                cells.append(f"{shown(point.values('total_s'), digits=2)}, {len(point.rows)}")
                out.append(
                    {
                        "method": method,
                        "bits_per_s": rate,
                        "measured": True,
                        "steps": len(point.rows),
                        **{name: point.spread(name) for name in COLUMNS},
                    }
                )
            else:
                assert rate is not None
                seconds[method] = modelled(points, method, rate)
                cells.append(f"{seconds[method]:.2f} modelled")
                out.append(
                    {"method": method, "bits_per_s": rate, "measured": False, "total_s": {"p50": seconds[method]}}
                )
        hashed = seconds["pulse"] + 2 * by.get(("pulse", rate), by["pulse", None]).median("hash_s")
        cells.insert(3, f"{hashed:.2f}")
        cells += [f"{other / seconds['ours']:.1f}" for other in (seconds["full"], seconds["pulse"], hashed)]
        rows.append(cells)
    print(
        "Seconds from publish to the weights in place: median of the steps (20th–80th percentile), number of steps.\n"
    )
    full, pulse, ours = NAMES.values()
    head = ["link", full, pulse, "with its hashes", ours, "full ÷ ours", "PULSE ÷ ours", "with its hashes ÷ ours"]
    print(table(head, rows))
    print(
        "\nWith its hashes: PULSE's paper takes SHA-256 of all weights at both ends; that time is measured separately"
        " and added. modelled: seconds without fetching, from the unshaped link, + bytes on the wire × 8 ÷ rate."
        f" Modelled ÷ measured, where both are known: {model_error(points)}.\n"
    )
    return out


def model_error(points: list[Point]) -> str:
    ratios = [modelled(points, p.method, p.rate) / p.median("total_s") for p in points if p.rate]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "nothing to compare"


def report_parts(points: list[Point]) -> None:
    """Print bytes, and the seconds of each part of a sync over a link that is not limited."""
    rows = []
    for method, name in NAMES.items():
        point = next(p for p in points if p.method == method and p.rate is None)
        rest = point.median("total_s") - sum(point.median(part) for part in PARTS)
        sizes = [f"{point.median(what):,.0f}" for what in ("written_bytes", "fetched_bytes", "wire_bytes")]
        cpu = [f"{point.median(what):.3f}" for what in ("publish_cpu_s", "sync_cpu_s")]
        rows.append([name, *sizes, *(f"{point.median(part):.3f}" for part in PARTS), f"{rest:.3f}", *cpu])
    head = ["a step, unshaped", "bytes stored", "fetched", "on the wire"]
    print(table([*head, *(part.replace("_s", " s") for part in PARTS), "rest s", "CPU s of publish", "of sync"], rows))
    hashing = np.median([p.median("hash_s") for p in points])
    print(
        "\nOn the wire: with HTTP and, where packets are shaped, TCP/IP and Ethernet headers. Ours includes the"
        f" records. SHA-256 of all weights takes {hashing:.2f} s.\n"
    )


def report_anchors(points: list[Point], bench: Bench, patches: list[int]) -> dict[str, Any]:
    """Print what anchors add to a step, by the rule that the publisher follows."""
    mean, full = float(np.mean(patches)), bench.source.full_bytes
    anchor = bench.trainer.anchor_bytes
    rows, out = [], {}
    for fraction in (0.5, 1.0, 2.0, 4.0):
        steps = epochs.EPOCH_PATCHES * math.ceil(fraction * full / mean / epochs.EPOCH_PATCHES)
        each = anchor / steps
        rows.append(
            [
                f"anchor_every={fraction:g}",
                f"{steps:,}",
                f"{mean:,.0f}",
                f"{each:,.0f}",
                f"{mean + each:,.0f}",
                f"{each / mean:.0%}",
            ]
        )
        out[f"{fraction:g}"] = {"steps": steps, "anchor_bytes_per_step": each, "with_anchors": mean + each}
    pulse = float(np.mean([row["written_bytes"] for p in points if p.method == "pulse" for row in p.rows]))
    each = full / GRAIL_ANCHOR_STEPS
    rows.append(
        [
            "PULSE's code: full weights each 10",
            "10",
            f"{pulse:,.0f}",
            f"{each:,.0f}",
            f"{pulse + each:,.0f}",
            f"{each / pulse:.0%}",
        ]
    )
    print(
        f"Anchors: {anchor:,} bytes for {full:,} bytes of weights; the first version and its anchor take"
        f" {bench.trainer.root_s:.1f} s. The trainer writes anchors in the background; a worker that syncs every"
        " version fetches none. An anchor is due at the start of the next epoch (32 patches) after the patches since"
        " the last one add up to anchor_every × the weights. Bytes per step, by the mean patch:\n"
    )
    print(table(["policy", "steps between", "patches", "anchors", "together", "added"], rows) + "\n")
    return {"anchor_bytes": anchor, "root_s": bench.trainer.root_s, "mean_patch_bytes": mean, "policies": out}


# -- 90 % ----------------------------------------------------------------------------------------------------------


def needed(size_bytes: float) -> float:
    """Bits a second at which U = Tc / (Tc + S/B) is BUSY, for S bytes each step."""
    return 8 * size_bytes / (STEP_S * (1 / BUSY - 1))


def report_busy(points: list[Point], weights: int, anchors: dict[str, Any]) -> dict[str, Any]:
    """Print the bandwidth that each method needs at the size of PULSE's figure."""
    scale = BIG / weights
    full, pulse, ours = (
        float(np.mean([row["fetched_bytes"] for p in points if p.method == method for row in p.rows]))
        for method in NAMES
    )
    with_anchors = ours + anchors["policies"]["1"]["anchor_bytes_per_step"]
    sizes = {
        "full weights": scale * full,
        "PULSE, by its paper (140 MB)": 140e6,
        "PULSE as published, on this run": scale * pulse,
        "pulsesync, to a worker": scale * ours,
        "pulsesync, from the trainer, anchors too": scale * with_anchors,
    }
    print(
        f"Bandwidth for {BUSY:.0%} utilisation at {STEP_S:g} s a step, U = Tc / (Tc + S/B), so"
        f" B = 8 S / (Tc (1/U − 1)) = 8 S / {STEP_S * (1 / BUSY - 1):.2f} s; S (mean bytes a step) scaled by weights,"
        f" × {scale:.1f}, to {BIG / 1e9:g} B. Transfer only, as in PULSE's figure 1:\n"
    )
    rows = [
        [name, f"{size / 1e6:,.1f}", f"{needed(size) / 1e9:.4f}", f"{sizes['full weights'] / size:,.0f}"]
        for name, size in sizes.items()
    ]
    print(table(["method", "MB a step at 7 B", "Gbit/s", "× less than full"], rows))
    point = next(p for p in points if p.method == "ours" and p.rate is None)
    stops = {"compare": scale * point.median("compare_s"), "apply": scale * point.median("apply_s")}
    codec = scale * (point.median("encode_s") + point.median("prepare_s"))
    print(
        f"\nNot included: at 7 B, on these cores, the trainer would be blocked for {stops['compare']:.1f} s"
        f" (comparison) and the worker for {stops['apply']:.1f} s (writing); encoding and decoding, {codec:.0f} s, run"
        " during the next step (wait=False) and scale with cores.\n"
    )
    return {
        "formula": "B = 8 S / (Tc (1/U - 1))",
        "step_s": STEP_S,
        "utilisation": BUSY,
        "weights": BIG,
        "bits_per_s": {name: needed(size) for name, size in sizes.items()},
        "bytes": sizes,
        "stops_s": stops,
        "codec_s": codec,
    }


# -- joining late --------------------------------------------------------------------------------------------------


def replay(bench: Bench, **options: Any) -> list[int]:
    """Publish the whole run; return the bytes of each patch, record included."""
    bench.trainer.begin(**options)
    sizes = []
    for _ in bench.source.steps:
        bench.trainer.train()
        sizes.append(int(bench.trainer.publish("ours")["written_bytes"]))
    bench.trainer.end()
    return sizes


def report_joining(bench: Bench) -> dict[str, Any]:
    """Print what it costs a worker to join late, by each path, with real squashed patches."""
    count = len(bench.source.steps)
    place, start = str(bench.trainer.place("ours")), str(bench.trainer.folder / "start.npy")
    squashed: dict[int, tuple[int, float]] = {}
    short = max(2, count // 5)
    replay(bench, epoch_patches=short)
    for one in Squasher(place, epoch_patches=short).run():
        if one.base == 0:
            squashed[one.version] = one.size_bytes, 0.0
    joined: dict[str, dict[str, Any]] = {}

    def join(name: str, start: str | None) -> None:
        worker = bench.worker("ours", epoch=count)
        worker.ask("begin", url=bench.urls["ours"], start=start)
        bench.link.shape(JOIN_RATE)
        told = time.monotonic()
        synced = worker.ask("sync")
        bench.link.shape(None)
        bench.check(worker, count - 1, name)
        joined[name] = {
            "path": synced["path"],
            "fetched_bytes": synced["fetched_bytes"],
            "total_s": synced["done"] - told,
            **{part: synced[part] for part in ("fetch_s", "prepare_s", "apply_s")},
        }

    patches = replay(bench, epoch_patches=count)
    join("has the start; patches one by one", start)
    began = time.perf_counter()
    for one in Squasher(place, epoch_patches=count).run():
        squashed[one.version] = one.size_bytes, time.perf_counter() - began
    join("has the start; one squash", start)
    join("has nothing; first anchor and the squash", None)
    replay(bench, anchor_every=1e-9, epoch_patches=count)  # so that there is also an anchor at the end of the epoch
    join("has nothing; an anchor of its own version", None)
    anchor = bench.trainer.anchor_bytes
    rows = [
        [
            f"{steps}",
            f"{sum(patches[:steps]):,}",
            f"{size:,}",
            f"{sum(patches[:steps]) / size:.2f}",
            f"{anchor / size:.0f}",
            f"{100 * size / bench.source.full_bytes:.2f} %",
        ]
        for steps, (size, _) in sorted(squashed.items())
    ]
    print(
        f"Joining late. Bytes from the start of the run (squashes made by Squasher, with epochs of {short} and {count} "
        "patches instead of 32):\n"
    )
    head = ["steps", "patches one by one", "one squash", "patches ÷ squash", "anchor ÷ squash", "of the weights"]
    print(table(head, rows) + "\n")
    print(f"The same over {say_rate(JOIN_RATE)}, {count} steps late:\n")
    rows = [
        [
            name,
            _path(one["path"]),
            f"{one['fetched_bytes']:,}",
            f"{one['total_s']:.2f}",
            *(f"{one[part]:.2f}" for part in ("fetch_s", "prepare_s", "apply_s")),
        ]
        for name, one in joined.items()
    ]
    print(table(["worker", "path", "bytes", "s", "fetch s", "prepare s", "apply s"], rows) + "\n")
    sizes = {str(steps): {"squash": size, "patches": sum(patches[:steps])} for steps, (size, _) in squashed.items()}
    return {"squashes": sizes, "joined": joined, "patch_bytes": patches, "squash_s": squashed[count][1]}


def _path(path: list[str]) -> str:
    kinds = [f"{path.count(kind)} × {kind}" for kind in dict.fromkeys(path)]
    return ", ".join(kind.removeprefix("1 × ") for kind in kinds)


# -- publish_every -------------------------------------------------------------------------------------------------


def report_pace(trainer: Trainer, load: float, step_s: float, mean_patch: float) -> dict[str, Any]:
    """Print how steps are coalesced over a link that the patch of one step occupies for a share of a step's time."""
    rate = mean_patch / (load * step_s)
    rows, out = [], {}
    for every in (1, 2, 4, 8, "auto"):
        one = paced(trainer, every, rate, step_s)
        out[str(every)] = one
        rows.append(
            [
                f"{every!r}",
                f"{one['versions']}",
                f"{one['bytes_per_step']:,.0f}",
                f"{one['stale_steps']:.2f}",
                f"{one['link_share']:.0%}",
                f"{one['held_s']:.3f}",
            ]
        )
    print(
        f"publish_every, wait=False, {trainer.source.about}, {len(trainer.source.steps) - 1} steps of {step_s:g} s"
        f" through a ThrottledStore of {8 * rate / 1e6:.2f} Mbit/s, which one step's patch occupies for {load:.0%}"
        " of a step:\n"
    )
    head = [
        "publish_every",
        "versions",
        "bytes a step",
        "mean steps behind",
        "link in use",
        "trainer blocked, s a step",
    ]
    print(table(head, rows) + "\n")
    return {"bytes_per_s": rate, "step_s": step_s, "load": load, "source": trainer.source.about, "policies": out}


def paced(trainer: Trainer, every: Any, rate: float, step_s: float) -> dict[str, Any]:
    """Train at a fixed pace and publish in the background; return bytes, and how far the newest version is behind."""
    trainer.begin(publish_every=every)
    publisher = trainer.publisher
    assert publisher is not None
    trainer.train()
    publisher.publish(as_bf16(trainer.tensors), step=1, now=True)  # resumes the run, which reads its anchor
    publisher.store = ThrottledStore(publisher.store, rate)
    held = 0.0
    sent: dict[int, Any] = {}
    events: list[tuple[float, int, int]] = []  # when; a step that was trained, or one that the store got

    def done(future: Any) -> None:
        report = future.result()
        if report.version is not None:
            sent[report.version] = report
            events.append((time.monotonic(), 0, report.step))

    began = time.monotonic()
    count = len(trainer.source.steps)
    for turn in range(1, count):
        time.sleep(max(0.0, began + turn * step_s - time.monotonic()))
        trainer.train()
        called = time.monotonic()
        events.append((called, trainer.step + 1, 0))
        publisher.publish(as_bf16(trainer.tensors), step=trainer.step + 1, wait=False).add_done_callback(done)
        held += time.monotonic() - called
    time.sleep(max(0.0, began + count * step_s - time.monotonic()))
    ended = time.monotonic()
    used, stale = sum(report.payload_bytes for report in sent.values()), staleness(events, began, ended)
    publisher.flush()
    if max(report.step for report in sent.values()) < count:  # steps that were not due yet count as bytes only
        report = publisher.publish(as_bf16(trainer.tensors), step=count, now=True)
        assert report.version is not None
        sent[report.version] = report
    trainer.end()
    return {
        "versions": len(sent),
        "bytes_per_step": sum(r.payload_bytes for r in sent.values()) / (count - 1),
        "stale_steps": stale,
        "link_share": used / rate / (ended - began),
        "held_s": held / (count - 1),
    }


def staleness(events: list[tuple[float, int, int]], began: float, ended: float) -> float:
    """Mean over time of how many steps the newest version is behind the newest step."""
    trained = stored = 1
    total, at = 0.0, began
    for when, step, version in sorted(events):
        until = min(max(when, began), ended)
        total += (until - at) * (trained - stored)
        at, trained, stored = until, max(trained, step), max(stored, version)
    return (total + (ended - at) * (trained - stored)) / (ended - began)


# -- memory --------------------------------------------------------------------------------------------------------


def report_memory(source: Source, folder: Path) -> list[dict[str, Any]]:
    """Print the memory that publishing and syncing take in addition to the weights, each in its own process."""
    np.save(folder / "start.npy", source.start)
    for number, (positions, values) in enumerate(source.steps):
        np.save(folder / f"at{number}.npy", positions.astype(np.intp))
        np.save(folder / f"to{number}.npy", values)
    steps = min(10, len(source.steps) - 1)
    out = []

    def weigh(name: str, run: str, what: str, phases: dict[str, str], epoch: int = 32, **options: Any) -> None:
        given = {"folder": str(folder), "run": str(folder / run), "shapes": source.shapes, "epoch": epoch}
        found = last_line(ENDS, "weigh", json.dumps({"what": what, **given, "with": options}))
        for phase, words in phases.items():
            out.append({"what": f"{name}: {words}", "history_bytes": found["history_bytes"], **found[phase]})

    both = {"first": "first version and anchor", "then": f"then {steps} patches"}
    behind = {"then": f"{steps} patches, an anchor at every other, in the background"}
    weigh("publish, wait=True", "a", "trainer", both, wait=True, steps=steps)
    weigh("publish, wait=False", "b", "trainer", {"then": f"{steps} patches"}, wait=False, steps=steps)
    weigh("publish, wait=False", "c", "trainer", behind, epoch=2, wait=False, steps=steps, anchor_every=1e-9)
    patches = list(range(1, steps + 1))
    weigh("sync", "a", "worker", {"then": f"{steps} patches, one by one"}, versions=patches, holding=True)
    weigh("sync", "a", "worker", {"then": f"{steps} patches at once"}, versions=[steps], holding=True)
    weigh("sync", "a", "worker", {"then": "an anchor"}, versions=[0], holding=False)
    weigh("sync", "a", "worker", {"then": f"an anchor and {steps} patches"}, versions=[steps], holding=False)
    weigh("publish, restarted", "a", "resume", {"then": "run resumed, 1 patch"}, steps=steps + 1)

    full = source.full_bytes
    print(
        f"Resident memory in addition to {full / 1e6:.1f} MB of weights, {source.about}; each in a fresh process."
        " Publishing patches includes the publisher's copy of the weights.\n"
    )
    rows = [
        [
            one["what"],
            f"{one['peak_bytes'] / 1e6:.1f}",
            f"{one['peak_bytes'] / full:.2f}",
            f"{one['peak_own_bytes'] / 1e6:.1f}",
            f"{one['stays_bytes'] / 1e6:.1f}",
            f"{one['history_bytes'] / 1e6:.1f}",
        ]
        for one in out
    ]
    print(table(["", "peak MB", "of the weights", "of its own MB", "stays MB", "history MB"], rows))
    print("\nOf its own: without pages of mapped files, which the system can reclaim.")
    if not all(one["peak_was_reset"] for one in out):
        print("This system does not let a process reset its peak: numbers are upper bounds.")
    print()
    return out


# -- all of it -----------------------------------------------------------------------------------------------------


def plot(swept: list[dict[str, Any]], source: Source, passed: float, path: Path) -> None:
    curves = []
    for method, name in NAMES.items():
        points = [
            (one["bits_per_s"] or passed, one["total_s"]["p50"], one["measured"])
            for one in swept
            if one["method"] == method
        ]
        curves.append(Curve(name, sorted(points)))
    ticks = {10.0**power: say_rate(10.0**power) for power in range(7, 12)}
    lowest = min(one["bits_per_s"] or passed for one in swept)
    ticks = {rate: words for rate, words in ticks.items() if rate >= lowest}
    title = f"From publish to verified weights, {source.weights / 1e6:.0f} M weights (hollow: modelled)"
    path.write_text(draw(title, "link", "seconds a step", curves, ticks))


def run(given: argparse.Namespace, source: Source, folder: Path) -> dict[str, Any]:
    rates = [None, 100e6, 20e6] if given.small else list(RATES)
    measured = min(given.steps or (4 if given.small else 8), len(source.steps) - 1)
    with open_link(given.link) as link:
        print(f"{source.about}: {source.weights:,} weights, {len(source.steps)} steps, the last {measured} measured.")
        print(f"Link: {link.name}. Checked: every state that arrived, bit for bit.\n")
        bench = Bench(source, link, folder)
        points: list[Point] = []
        for rate in rates:
            points += measure(bench, rate, measured, given.full_s or (7 if given.small else 60))
            print(f"  {say_rate(rate)} done", file=sys.stderr)
        swept = report_sweep(points, rates)
        report_parts(points)
        joining = report_joining(bench)
        patches = joining["patch_bytes"]
        anchors = report_anchors(points, bench, patches)
        busy = report_busy(points, source.weights, anchors)
        unshaped = next(p for p in points if p.method == "full" and p.rate is None)
        passed = 8 * source.full_bytes / unshaped.median("fetch_s")
        print(f"What the unshaped link passed: {passed / 1e9:.2f} Gbit/s, full weights over HTTP.\n")
        paces = [report_pace(bench.trainer, 0.75, 0.3 if given.small else 1.5, float(np.mean(patches)))]
        if given.plot:
            plot(swept, source, passed, given.plot)
        return {
            "link": link.name,
            "unshaped_bits_per_s": passed,
            "load": os.getloadavg(),
            "points": swept,
            "anchors": anchors,
            "joining": joining,
            "busy": busy,
            "paces": paces,
        }


def pace_of_a_longer_run(folder: Path) -> dict[str, Any]:
    """The same on generated steps, since the recording is too short for eight steps in a version."""
    about, steps = generated(width=256)
    source = Source.of(about, steps, 49)
    trainer = Trainer(source, folder)
    trainer.begin()
    sizes = []
    for _ in range(16):
        trainer.train()
        sizes.append(trainer.publish("ours")["written_bytes"])
    return report_pace(trainer, 0.75, 0.4, float(np.mean(sizes)))


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--small", action="store_true", help="generated updates, three links")
    parser.add_argument("--width", type=int, default=256, help="of the generated model: 256 is 8 M weights")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--link", choices=("auto", "netns", "proxy"), default="auto")
    parser.add_argument("--steps", type=int, help="steps to measure on each link; default: 8, with --small 4")
    parser.add_argument(
        "--full-s", type=float, help="time limit for full weights on a link; default: 60, with --small 7"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG")


def main(given: argparse.Namespace) -> None:
    end_like_ctrl_c()
    pulsesync.warm_up()
    if given.trace:
        about, steps = recorded(given.trace, given.gguf)
        source = Source.of(about, steps, 15)
    else:
        about, steps = generated(given.width)
        source = Source.of(about, steps, 10 if given.small else 15)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="pulse-bench-", dir=memory) as name:
        folder = Path(name)
        os.environ["TMPDIR"] = tempfile.tempdir = name  # for the processes that are started, and for spools here
        fields = {"source": source.about, "weights": source.weights, "seed": SEED}
        if given.memory:
            out: dict[str, Any] = {"bench": "sync-memory", "probes": report_memory(source, folder)}
        else:
            out = {"bench": "sync", **run(given, source, folder)}
            if not given.small:
                (folder / "longer").mkdir()
                out["paces"].append(pace_of_a_longer_run(folder / "longer"))
        print(json_line({**out, **provenance("granian", "starlette"), **fields}))
