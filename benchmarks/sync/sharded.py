"""How long does publish block the trainers of a sharded model, and how many steps a second do they make?

    python -m benchmarks sharded              # five minutes on 2 cores
    python -m benchmarks sharded --small      # one link, one step time

Two processes over gloo, each with half of every tensor. The updates resemble those of RL (`AdamUpdates`, after 12
steps, when about 1 % of the weights change in a step); 12 are recorded and repeated, so that every mode has the same
ones. Each rank has its own link to the store (a ThrottledStore over a folder). A training step is a sleep, which stands
for a busy GPU, the update of the weights, and a collective of all ranks. Blocks of steps without publishing, with
wait=True and with wait=False take turns in the same run, so that ratios compare the same minutes. After every block
that publishes, a worker syncs on each rank, and its weights are compared with the rank's, bit for bit; a difference
ends the benchmark.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import distributed

from benchmarks.harness.links import ROOT
from benchmarks.harness.processes import command
from benchmarks.harness.report import json_line, provenance, spread, table
from pulsesync import Collective, PublishReport, ShardedPublisher, Subscriber
from pulsesync.state.sharding import Placed
from pulsesync.store import LocalStore, ThrottledStore
from pulsesync.testing import AdamUpdates

QUICK = ("--small", "--rounds", "1", "--block", "2", "--tensors", "2")
RANKS = 2
SHAPE = (2048, 1024)  # of every tensor
WARM_UP, RECORDED = 12, 12  # steps
LINKS = {"10 Mbit/s, 50 ms": (10e6, 0.05), "100 Mbit/s, 20 ms": (100e6, 0.02)}
STEPS_S = (0.25, 1.0)
MODES = ("none", "wait", "background")


class Link:
    """A store whose speed can be changed while it is in use."""

    def __init__(self, store: Any) -> None:
        self.fast = self.now = store

    def shape(self, link: tuple[float, float] | None) -> None:
        self.now = ThrottledStore(self.fast, link[0] / 8, link[1]) if link else self.fast

    def __getattr__(self, name: str) -> Any:
        return getattr(self.now, name)


class Trainer:
    """A rank's half of the model, and the updates of its steps: bits to flip, and where."""

    def __init__(self, rank: int, location: Path, tensors: int) -> None:
        rows = SHAPE[0] // RANKS
        self.rank, self.rows = rank, (rank * rows, (rank + 1) * rows)
        updates = AdamUpdates({f"layer.{n}.weight": (rows, SHAPE[1]) for n in range(tensors)}, seed=rank)
        for _ in range(WARM_UP):
            before = updates.step()
        self.weights = {name: bits.copy() for name, bits in before.items()}
        self.scratch = {name: bits.copy() for name, bits in before.items()}
        self.flips: list[dict[str, tuple[Any, Any]]] = []
        before = {name: bits.copy() for name, bits in before.items()}
        for _ in range(RECORDED):
            after = updates.step()
            flips = {name: (before[name] ^ bits).reshape(-1) for name, bits in after.items()}
            self.flips.append({name: (found := np.flatnonzero(flip), flip[found]) for name, flip in flips.items()})
            before = {name: bits.copy() for name, bits in after.items()}
        self.step = 0
        self.worker = {name: np.zeros(SHAPE, ml_dtypes.bfloat16) for name in self.weights}
        self.subscriber = Subscriber(str(location))

    def update(self, published: bool) -> None:
        weights = self.weights if published else self.scratch
        for name, (places, flips) in self.flips[self.step % RECORDED].items():
            weights[name].reshape(-1)[places] ^= flips
        self.step += published

    def source(self) -> dict[str, Any]:
        return {n: Placed(b.view(ml_dtypes.bfloat16), SHAPE, rows=self.rows) for n, b in self.weights.items()}

    def check(self, digest: str | None) -> None:
        """Raises: SystemExit, if a worker does not get these weights."""
        self.subscriber.sync(self.worker)
        mine = {name: array[slice(*self.rows)].view(np.uint16) for name, array in self.worker.items()}
        same = all(np.array_equal(mine[name], bits) for name, bits in self.weights.items())
        if not same or self.subscriber.verify() != digest:
            raise SystemExit("the worker's weights are not those of the ranks")


def rank_main(rank: int, folder: Path, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120)
    )
    trainer, link = Trainer(rank, folder / "run", given.tensors), Link(LocalStore(folder / "run"))
    pub = ShardedPublisher(link, Collective(distributed.new_group()), anchor_every=float("inf"))
    pub.publish(trainer.source(), step=0)
    pub.flush()
    out = []
    for name, shape in list(LINKS.items())[:1] if given.small else LINKS.items():
        for step_s in STEPS_S[:1] if given.small else STEPS_S:
            for number in range(given.rounds + 1):  # the first is not counted
                for mode in MODES:
                    link.shape(shape)
                    first = pub.version
                    distributed.barrier()
                    began, kept = time.perf_counter(), list[float]()
                    reports, futures = list[PublishReport](), list[Future[PublishReport]]()
                    for _ in range(given.block):
                        time.sleep(step_s)
                        trainer.update(published=mode != "none")
                        distributed.all_reduce(torch.zeros(1))  # as the gradients of the next step do
                        if mode == "none":
                            continue
                        called = time.perf_counter()
                        if mode == "wait":
                            reports.append(pub.publish(trainer.source(), step=trainer.step))
                        else:
                            futures.append(pub.publish(trainer.source(), step=trainer.step, wait=False))
                        kept.append(time.perf_counter() - called)
                    loop_s = time.perf_counter() - began
                    pub.flush()
                    last_s = time.perf_counter() - began
                    link.shape(None)
                    if mode != "none":
                        trainer.check(pub.digest)
                    if number:
                        found = {one.version: one for one in (*reports, *(one.result() for one in futures))}
                        out.append(
                            {
                                "link": name,
                                "step_s": step_s,
                                "mode": mode,
                                "kept_s": kept,
                                "steps": given.block,
                                "loop_s": loop_s,
                                "flushed_s": last_s,
                                "versions": (pub.version or 0) - (first or 0),
                                "bytes": [one.payload_bytes for one in found.values()],
                                "changed": [one.density for one in found.values()],
                            }
                        )
    pub.close()
    (folder / f"{rank}.json").write_text(json.dumps(out))
    distributed.destroy_process_group()


def p(values: list[float]) -> list[float]:
    return list(spread(values).values())


def summarise(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each link, step time and mode, from the blocks of all ranks."""
    rows = []
    for link, step_s in dict.fromkeys((one["link"], one["step_s"]) for one in found):
        for mode in MODES:
            some = [one for one in found if (one["link"], one["step_s"], one["mode"]) == (link, step_s, mode)]
            kept = [one for block in some for one in block["kept_s"]]
            rows.append(
                {
                    "link": link,
                    "step_s": step_s,
                    "mode": mode,
                    "kept_s": p(kept) if kept else None,
                    "steps_per_s": p([one["steps"] / one["loop_s"] for one in some]),
                    "with_flush_per_s": p([one["steps"] / one["flushed_s"] for one in some]),
                    "versions_per_step": sum(one["versions"] for one in some) / sum(one["steps"] for one in some),
                    "bytes": p([n for one in some for n in one["bytes"]]) if kept else None,
                    "changed": p([n for one in some for n in one["changed"]]) if kept else None,
                }
            )
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="one link, one step time")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--block", type=int, default=6, help="steps in a row in one mode")
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    if given.rank is not None:
        rank_main(given.rank, given.folder, given)
        return
    with tempfile.TemporaryDirectory() as folder:
        start = command("benchmarks", *sys.argv[1:], "--folder", folder, "--rank")
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [subprocess.Popen([*start, str(rank)], cwd=ROOT, env=environment) for rank in range(RANKS)]
        try:
            if any(rank.wait() for rank in ranks):
                raise SystemExit("a rank failed")
        finally:
            for rank in ranks:
                rank.kill()
        found = [block for rank in range(RANKS) for block in json.loads(Path(folder, f"{rank}.json").read_text())]
    rows = summarise(found)
    lines = []
    for row in rows:
        base = next(r for r in rows if (r["link"], r["step_s"], r["mode"]) == (row["link"], row["step_s"], "wait"))
        kept = row["kept_s"]
        lines.append(
            [
                row["link"],
                f"{row['step_s']:g}",
                {"none": "no publish", "wait": "wait=True", "background": "wait=False"}[row["mode"]],
                " / ".join(f"{1000 * one:.0f}" for one in kept) if kept else "",
                f"{kept[1] / base['kept_s'][1]:.2f}" if kept else "",
                f"{row['steps_per_s'][1]:.2f}",
                f"{row['steps_per_s'][1] / base['steps_per_s'][1]:.2f}",
                f"{row['versions_per_step']:.2f}" if kept else "",
                f"{row['bytes'][1] / 1000:,.0f}" if kept else "",
            ]
        )
    weights = given.tensors * SHAPE[0] * SHAPE[1]
    print(f"{weights / 1e6:.1f} million BF16 weights, {RANKS} ranks; {given.rounds} blocks of {given.block} steps.")
    print("Every block that published: the worker's weights and digest are those of the ranks.\n")
    head = ["link of a rank", "step, s", "mode", "publish keeps its caller, ms: p20 / p50 / p80", "of wait=True"]
    print(table([*head, "steps a second", "of wait=True", "versions a step", "kB a version"], lines))
    print()
    print(json_line({"bench": "sharded", **provenance("torch"), "weights": weights, "rows": rows, "blocks": found}))
