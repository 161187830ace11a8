"""How long does a worker on a small machine need without numba and torch, and how much memory?

    python -m benchmarks edge                            # two minutes
    python -m benchmarks edge --quick                    # twenty seconds: 2 M weights, two codecs
    python -m benchmarks edge --against ../other/src     # and with the package of another checkout, in turns

A trainer publishes an anchor and some patches to a folder, once for each codec. Then fresh processes follow the run,
version by version, with the kernels of numba and with those of plain numpy: there numba and torch cannot be imported.
Each has one core, as a small machine may, and measures itself: seconds of the processor for each sync and for a recount
of all weights, which on a machine without other work is the time that passes, and its resident memory (so this needs
Linux). Every worker must end with the digest of the trainer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Rounds, json_line, provenance, table
from benchmarks.harness.weights import as_bf16, generated
from pulsesync import Publisher

QUICK = ("--width", "128", "--patches", "3", "--rounds", "1", "--codecs", "auto", "step")
CODECS = ("auto", "history", "step", "gap")
MB = 1e6
WORKER = """
import json, os, sys, time
from pathlib import Path

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
run, tensors, kernels, last = json.loads(sys.argv[1])
if kernels == "numpy":
    sys.modules |= dict.fromkeys(("numba", "llvmlite", "torch"))  # a later import of them raises an ImportError
import logging
logging.disable(logging.WARNING)
import numpy as np
import ml_dtypes
import pulsesync

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))

weights = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in tensors}
for array in weights.values():
    array[...] = 1
pulsesync.warm_up()
before = resident("VmRSS")
seconds, subscriber = {}, pulsesync.Subscriber(run)
for version in range(last + 1):
    began = time.process_time()
    subscriber.sync(weights, version)
    seconds.setdefault("a patch" if version else "the anchor", []).append(time.process_time() - began)
began = time.process_time()
digest = subscriber.verify()
seconds["a recount"] = [time.process_time() - began]
peak = resident("VmHWM")
print(json.dumps({"seconds": seconds, "digest": digest, "peak": peak, "own": peak - before}))
"""
MEASURED = ("a patch", "the anchor", "a recount")


def publish(codec: Any, width: int, patches: int, run: Path) -> dict[str, Any]:
    """Publish an anchor and patches; return tensors, digest, and changes and bytes of the patches."""
    _, steps = generated(width)
    reports = []
    with Publisher(str(run), codec=codec) as publisher:
        for step, old, new in steps:
            reports.append(publisher.publish(as_bf16(new if step else old), coalesce=False))
            if step == patches:
                break
        digest = publisher.digest
    count = sum(bits.size for bits in old.values())
    return {
        "tensors": [(name, bits.shape) for name, bits in old.items()],
        "weights": count,
        "digest": digest,
        "changed": [report.changed / count for report in reports[1:]],
        "bytes": [report.payload_bytes for report in reports[1:]],
    }


def follow(run: Path, of: dict[str, Any], kernels: str, source: str | None) -> dict[str, Any]:
    """Follow a run in a fresh process, with the package in this folder or with ours."""
    given = json.dumps([str(run), of["tensors"], kernels, len(of["changed"])])
    environment = {**os.environ, **({"PYTHONPATH": source} if source else {})}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, given], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["digest"] == of["digest"], "a worker has other weights than the trainer"
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=320, help="of the model; 320: 12 M weights")
    parser.add_argument("--patches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--against", help="the src folder of another checkout")


def main(given: argparse.Namespace) -> None:
    workers: list[tuple[str, str | None]] = [("numpy", None), ("numba", None)]
    if given.against:
        workers.insert(1, ("numpy", str(Path(given.against).resolve())))
    names = {worker: worker[0] + (", before" if worker[1] else "") for worker in workers}
    rows, data = [], []
    with tempfile.TemporaryDirectory() as folder:
        for codec in given.codecs:
            run = Path(folder) / codec
            published = publish(codec, given.width, given.patches, run)
            times = {worker: Rounds(names[worker]) for worker in workers}
            memory: dict[Any, list[tuple[float, float]]] = {worker: [] for worker in workers}
            for _, worker in product(range(given.rounds), workers):
                found = follow(run, published, *worker)
                memory[worker].append((found["peak"] / MB, found["own"] / MB))
                for what, seconds in found["seconds"].items():
                    for one in seconds:
                        times[worker].add(what, one)
            for worker in workers:
                peak, own = map(max, zip(*memory[worker], strict=True))
                shown = [times[worker].shown(what) for what in MEASURED]
                rows.append([f"{codec}, {names[worker]}", *shown, f"{peak:.0f}", f"{own:.0f}"])
                spread = {what: times[worker].spread(what) for what in MEASURED}
                data.append({"codec": codec, "kernels": names[worker], "seconds": spread, "peak_mb": peak})
            data.append({"codec": codec, **{key: published[key] for key in ("weights", "changed", "bytes")}})
    low, high = min(published["changed"]), max(published["changed"])
    print(f"{published['weights']:,} BF16 weights, {given.patches} patches with {low:.2%} to {high:.2%} changed.")
    print(f"Seconds of one core, medians of {given.rounds} processes (20th–80th percentile); MB resident at the peak,")
    print("and of these, above the weights and the packages.\n")
    print(table(["codec, kernels", *MEASURED, "peak MB", "of these, sync"], rows) + "\n")
    print(json_line({"bench": "edge", **provenance("ml_dtypes"), "found": data}))
