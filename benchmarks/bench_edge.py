"""How long does a worker on a small machine need without numba and torch, and how much memory?

    python benchmarks/bench_edge.py                            # two minutes
    python benchmarks/bench_edge.py --quick                    # twenty seconds: 2 M weights, two codecs
    python benchmarks/bench_edge.py --against ../other/src     # and with the package of another checkout, in turns

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

from bench_codec import Rounds, generated, json_line, provenance, shown, table

from pulsesync import Publisher

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


def publish(codec: str, width: int, versions: int, run: Path) -> dict[str, Any]:
    """Publish an anchor and patches; return tensors, digest, and changes and bytes of the patches."""
    _, steps = generated(width)
    reports = []
    with Publisher(str(run), codec=codec) as publisher:
        for step, old, new in steps:
            weights = old if step == 0 else new
            reports.append(publisher.publish({name: as_bf16(bits) for name, bits in weights.items()}, coalesce=False))
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


def as_bf16(bits: Any) -> Any:
    import ml_dtypes

    return bits.view(ml_dtypes.bfloat16)


def follow(run: Path, of: dict[str, Any], kernels: str, source: str | None) -> dict[str, Any]:
    """Follow a run in a fresh process, with the package in this folder or with ours."""
    given = json.dumps([str(run), of["tensors"], kernels, len(of["changed"])])
    environment = {**os.environ, **({"PYTHONPATH": source} if source else {})}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, given], env=environment, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["digest"] == of["digest"], "a worker has other weights than the trainer"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", help="the src folder of another checkout")
    given = parser.parse_args()
    width, versions, rounds, codecs = (128, 3, 1, CODECS[:2]) if given.quick else (320, 6, 3, CODECS)
    workers = [("numpy", None), ("numba", None)]
    if given.against:
        workers.insert(1, ("numpy", str(Path(given.against).resolve())))
    names = {worker: worker[0] + (", before" if worker[1] else "") for worker in workers}
    rows, data = [], []
    with tempfile.TemporaryDirectory() as folder:
        for codec in codecs:
            run = Path(folder) / codec
            published = publish(codec, width, versions, run)
            times = {worker: Rounds(names[worker]) for worker in workers}
            memory: dict[Any, list[tuple[float, float]]] = {worker: [] for worker in workers}
            for _, worker in product(range(rounds), workers):
                found = follow(run, published, *worker)
                memory[worker].append((found["peak"] / MB, found["own"] / MB))
                for what, seconds in found["seconds"].items():
                    for one in seconds:
                        times[worker].add(what, one)
            for worker in workers:
                spread = {what: times[worker].spread(what) for what in MEASURED}
                peak, own = map(max, zip(*memory[worker], strict=True))
                rows.append([f"{codec}, {names[worker]}", *map(shown, spread.values()), f"{peak:.0f}", f"{own:.0f}"])
                data.append({"codec": codec, "kernels": names[worker], "seconds": spread, "peak_mb": peak})
            data.append({"codec": codec, **{key: published[key] for key in ("weights", "changed", "bytes")}})
    print(f"{published['weights']:,} BF16 weights, {versions} patches with {min(published['changed']):.2%} to ", end="")
    print(f"{max(published['changed']):.2%} changed.\nSeconds of one core, medians of {rounds} processes ", end="")
    print("(20th–80th percentile); MB resident at the peak, and of these, above the weights and the packages.\n")
    print(table(["codec, kernels", *MEASURED, "peak MB", "of these, sync"], rows) + "\n")
    print(json_line({"bench": "edge", **provenance("ml_dtypes"), "found": data}))


if __name__ == "__main__":
    main()
