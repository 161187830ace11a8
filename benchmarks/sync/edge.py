"""How long does a worker on a small machine need without numba and torch, and how much memory?

    python -m benchmarks edge                            # two minutes
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

from benchmarks.harness.links import ROOT
from benchmarks.harness.report import Rounds, json_line, provenance, table
from benchmarks.harness.weights import as_bf16, generated
from pulsesync import Publisher
from pulsesync.format.patch import CodecName

QUICK = ("--width", "128", "--versions", "3", "--rounds", "1", "--codecs", "auto", "history")
CODECS = ("auto", "history", "step", "gap")
MB = 1e6
WORKER = """
import json, os, sys, time

os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
run, tensors, kernels, last = json.loads(sys.argv[1])
if kernels == "numpy":
    sys.modules |= dict.fromkeys(("numba", "llvmlite", "torch"))  # a later import of them raises an ImportError
import logging
logging.disable(logging.WARNING)
import numpy as np
import ml_dtypes
import pulsesync
from benchmarks.harness.timing import peak, status

weights = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in tensors}
for array in weights.values():
    array[...] = 1
pulsesync.warm_up()
before = status("VmRSS")
seconds, subscriber = {}, pulsesync.Subscriber(run)
for version in range(last + 1):
    began = time.process_time()
    subscriber.sync(weights, version)
    seconds.setdefault("a patch" if version else "the anchor", []).append(time.process_time() - began)
began = time.process_time()
digest = subscriber.verify()
seconds["a recount"] = [time.process_time() - began]
most = peak()
print(json.dumps({"seconds": seconds, "digest": digest, "peak": most, "own": most - before}))
"""
MEASURED = ("a patch", "the anchor", "a recount")


def publish(codec: CodecName, width: int, versions: int, run: Path) -> dict[str, Any]:
    """Publish an anchor and patches; return tensors, digest, and changes and bytes of the patches."""
    _, steps = generated(width)
    reports = []
    with Publisher(str(run), codec=codec) as publisher:
        for step, old, new in steps:
            weights = old if step == 0 else new
            reports.append(publisher.publish(as_bf16(weights), coalesce=False))
            if step == versions:
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
    worker = [sys.executable, "-c", WORKER, given]
    done = subprocess.run(worker, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["digest"] == of["digest"], "a worker has other weights than the trainer"
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", help="the src folder of another checkout")
    parser.add_argument("--width", type=int, default=320, help="of the generated model: 320 is 12 M weights")
    parser.add_argument("--versions", type=int, default=6, help="patches after the anchor")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))


def main(given: argparse.Namespace) -> None:
    workers: list[tuple[str, str | None]] = [("numpy", None), ("numba", None)]
    if given.against:
        workers.insert(1, ("numpy", str(Path(given.against).resolve())))
    names = {worker: worker[0] + (", before" if worker[1] else "") for worker in workers}
    rows, data = [], []
    with tempfile.TemporaryDirectory() as folder:
        for codec in given.codecs:
            run = Path(folder) / codec
            published = publish(codec, given.width, given.versions, run)
            times = {worker: Rounds(names[worker]) for worker in workers}
            memory: dict[Any, list[tuple[float, float]]] = {worker: [] for worker in workers}
            for _, worker in product(range(given.rounds), workers):
                found = follow(run, published, *worker)
                memory[worker].append((found["peak"] / MB, found["own"] / MB))
                for what, seconds in found["seconds"].items():
                    for one in seconds:
                        times[worker].add(what, one)
            for worker in workers:
                spread = {what: times[worker].spread(what) for what in MEASURED}
                shown = [times[worker].shown(what) for what in MEASURED]
                peak, own = map(max, zip(*memory[worker], strict=True))
                rows.append([f"{codec}, {names[worker]}", *shown, f"{peak:.0f}", f"{own:.0f}"])
                data.append({"codec": codec, "kernels": names[worker], "seconds": spread, "peak_mb": peak})
            data.append({"codec": codec, **{key: published[key] for key in ("weights", "changed", "bytes")}})
    print(
        f"{published['weights']:,} BF16 weights, {given.versions} patches with {min(published['changed']):.2%} to ",
        end="",
    )
    print(
        f"{max(published['changed']):.2%} changed.\nSeconds of one core, medians of {given.rounds} processes ", end=""
    )
    print("(20th–80th percentile); MB resident at the peak, and of these, above the weights and the packages.\n")
    print(table(["codec, kernels", *MEASURED, "peak MB", "of these, sync"], rows) + "\n")
    print(json_line({"bench": "edge", **provenance("ml_dtypes"), "found": data}))
