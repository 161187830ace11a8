"""How long does each stage of a sync inside a cluster take on a GPU, with both ends in one process?

    python -m benchmarks cluster_stages --points stages.jsonl                  # 7.6 B weights on a GPU
    python -m benchmarks cluster_stages --device cpu --weights 3000            # Triton's interpreter, to try it

cluster.py has two ranks on one GPU, whose contexts take turns, so that stages wait for those of the other rank.
Here nothing else runs on the GPU, and messages are handed over in device memory, as NCCL would: each stage ends on the
device before the next begins. Each method syncs twice to warm up and is then timed; medians are printed, and saved in
--points for cluster_gpu_report.py, which computes other links from them. After each sync the digest of the receiver's
weights is recomputed.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster.gpu_methods import ended_stages
from benchmarks.harness.device import DEVICE, chances_of, make, name_of, need_gpu, shapes, train_
from benchmarks.harness.report import json_line, provenance, table
from pulsesync.group.bundles import agree, describe_shards
from pulsesync.group.cost_model import CostModel, Method
from pulsesync.group.messages import Bucket, SyncTimes
from pulsesync.group.peers import LocalModel, RankVersion, ReceiverEnd, SourceEnd
from tests.backends import host_as_device

QUICK = ("--weights", "1100", "--rounds", "1", "--densities", "0.01")
METHODS: tuple[Method, ...] = ("plain", "coded", "dense")
SOURCE, RECEIVER = ("diff", "encode", "digest"), ("prepare", "undo", "digest", "apply")
UNTIMED = 2  # syncs of each method


class Ends:
    """A source and a receiver with the same weights, on one device."""

    def __init__(self, weights: float, device: torch.device) -> None:
        self.device, self.sent = device, make(dict(shapes(weights)), device)
        received = {name: tensor.clone() for name, tensor in self.sent.items()}
        models = [LocalModel.of(model, None, ()) for model in (self.sent, received)]
        self.wire = agree([describe_shards(model.shards) for model in models], [0])
        self.source = SourceEnd(self.wire, self.wire.owned_by(0), models[0])
        self.receiver = ReceiverEnd(self.wire, self.wire.local_to(1), models[1])
        self.at = RankVersion(0, "", {})

    def sync(self, method: Method) -> dict[str, float]:
        """Bring the receiver to the source's weights; return the seconds of each stage."""
        source, receiver = SyncTimes(), SyncTimes()
        for end in (self.source, self.receiver):
            end.weights.begin()
        if not self.source.has_weights:
            self.source.at = None  # after a dense sync, as Broadcast does: there is no copy to compare with
        jobs, _ = self.source.plan(method, CostModel(), None)
        made, got = list[Bucket](), list[Bucket]()
        sent_bytes = 0
        for one, tiles in jobs:
            bucket = self.source.weights.encode(tiles, one, source)
            if bucket is not None:
                sent_bytes += bucket.message.nbytes
                got.append(self.receiver.weights.read(bucket.message, self.at.sums, receiver))
                made.append(self.source.sent(bucket))
        sums = {**self.at.sums, **{n: sum_ for bucket in got for n, sum_ in bucket.sums.items()}}
        self.at = RankVersion(self.at.version + 1, "", sums)
        with source.timed("apply"):
            self.source.commit(made, self.at)
        with receiver.timed("apply"):
            self.receiver.commit(got, self.at)
        self.receiver.verify(self.at)
        out = {f"source_{name}_s": source[name] for name in (*SOURCE, "apply")}
        out |= {f"receiver_{name}_s": receiver[name] for name in RECEIVER}
        return out | {"buckets": len(jobs), "sent_bytes": sent_bytes}


@contextmanager
def on(device: str) -> Iterator[torch.device]:
    with host_as_device(device == "cpu"):
        yield torch.empty(0, device=device).device


def measure(ends: Ends, method: Method, density: float, rounds: int) -> dict[str, Any]:
    """Medians over the rounds, after two that are not timed: the first sync may have to send all weights."""
    chance, taken = chances_of(ends.sent, density), []
    for n in range(rounds + UNTIMED):
        torch.manual_seed(n)
        changed = train_(ends.sent, chance)
        with ended_stages(ends.device):
            stages = ends.sync(method)
        if n >= UNTIMED:
            taken.append(stages)
    found = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
    return {"way": "alone", "method": f"ours, {method}", "density": density, "changed": changed, "staged": found}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=7.6e9)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01, 0.1])
    parser.add_argument("--rounds", type=int, default=3, help="timed syncs of each method")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=DEVICE.type)
    parser.add_argument("--points", type=Path, help="append the measured points to this file")


def main(given: argparse.Namespace) -> None:
    need_gpu(given.weights)
    names = [f"source_{name}_s" for name in (*SOURCE, "apply")] + [f"receiver_{name}_s" for name in RECEIVER]
    rows, points = list[list[str]](), list[dict[str, Any]]()
    with on(given.device) as device:
        ends = Ends(given.weights, device)
        ends.sync("plain")  # of all weights
        size = sum(tensor.numel() for tensor in ends.sent.values())
        about: dict[str, Any] = {"model": f"{size / 1e9:.2g} B", "weights": size, "device": name_of(device)}
        for density in given.densities:
            for method in METHODS:
                point = about | measure(ends, method, density, given.rounds)
                points.append(point)
                rows.append([f"{method}, {density:.1%}", *(f"{1e3 * point['staged'][name]:.2f}" for name in names)])
                print(rows[-1], flush=True)
    print(
        f"\n{about['model']} weights on {about['device']}, both ends in one process, ms; medians of {given.rounds}:\n"
    )
    print(table(["method, changed", *(name.removesuffix("_s").replace("_", " ") for name in names)], rows) + "\n")
    print(json_line({"bench": "group-stages", **provenance("torch"), "points": points}))
    if given.points:
        given.points.write_text("".join(json.dumps(point) + "\n" for point in points))
