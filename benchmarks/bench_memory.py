"""How much memory do encoding and applying need beyond the weights themselves?

    python benchmarks/bench_memory.py               # some minutes; up to 1 GiB of weights twice
    python benchmarks/bench_memory.py --quick       # a minute: small models

Meant to be: so many bytes per change, a buffer whose size is given, and the history; nothing that grows with the model.
So models of several sizes are changed at the same density, one model at several densities, and one at several places in
an epoch, each in a process of its own. What is measured is resident memory: its peak (VmHWM, reset before each part)
less what the process had with kernels loaded and all weights in place. That includes the patch itself and the history
that is held before and made after.
"""

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

MB = 1e6
SHAPE = (2048, 2048)  # of every tensor: 4 blocks
SEED = 0


@dataclass(frozen=True)
class Point:
    """What one process measures."""

    sweep: str
    weights: int  # a multiple of a tensor's
    density: float
    codec: str
    threads: int
    index: int  # of the measured patch in its epoch


def points(quick: bool) -> Iterator[Point]:
    """The sweeps, smallest first."""
    size = 1 << 25 if quick else 1 << 27
    sizes = [size >> 1, size] if quick else [1 << 25, 1 << 26, 1 << 27, 1 << 28]
    densities = [0.002, 0.02] if quick else [0.001, 0.002, 0.004, 0.016, 0.04]
    cores = min(2, len(os.sched_getaffinity(0)))
    for codec in ("gap", "context", "history"):
        for threads in range(1, cores + 1):
            for weights in sizes:
                yield Point("size", weights, 0.008, codec, threads, 8)
            for density in densities:
                yield Point("density", size, density, codec, threads, 8)
    for index in (2, 32) if quick else (2, 32, 127):
        yield Point("index", size, 0.008, "history", cores, index)


# -- in a process of its own ---------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def reset_peak() -> bool:
    """Let go of freed memory, and forget the peak; return whether the system allows that."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False  # then the peak is that of the whole process: an upper bound
    return True


def peak() -> int:
    return max(status("VmHWM"), status("VmRSS")) if Path("/proc/self/status").exists() else _peak_ever()


def _peak_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tensor_pair(density: float) -> tuple[Any, Any, Any]:
    """One tensor at three times: normal weights, of which the smaller change more often, mostly by one place.

    A weight changes by a place when the optimizer's steps add up to the distance to its neighbour, so with a
    probability inverse to its magnitude; that density alone is given.
    """
    rng = np.random.default_rng(SEED)
    count = SHAPE[0] * SHAPE[1]
    first = (rng.standard_normal(count, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    places = np.exp2(127.0 - (first >> 7 & 0xFF))  # neighbours to the unit, up to a factor
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if np.minimum(rate * places, 0.5).mean() < density else (low, rate)
    out = [first]
    for _ in range(2):
        changes = rng.random(count) < np.minimum(rate * places, 0.5)
        out.append(out[-1] + (changes * rng.choice([1, 1, 1, 2], count) * rng.choice([1, -1], count)).astype(np.uint16))
    return tuple(bits.reshape(SHAPE) for bits in out)


def measure(point: Point) -> dict[str, Any]:
    """Publish and receive one patch, and say how much memory either took."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: point.threads])
    import pulsesync
    from pulsesync import digest
    from pulsesync.format import layout as layouts
    from pulsesync.format import manifest as manifests
    from pulsesync.format import patch
    from pulsesync.format.history import History
    from pulsesync.format.manifest import Base, Manifest, PartRef
    from pulsesync.model import TensorSpec
    from pulsesync.state import State

    pulsesync.warm_up()
    pair = tensor_pair(point.density)
    names = [f"layer{i:03d}" for i in range(point.weights // pair[0].size)]
    layout = layouts.make(TensorSpec(name, "BF16", SHAPE) for name in names)
    old = {name: pair[0].reshape(-1).copy() for name in names}
    new = {name: pair[1].reshape(-1).copy() for name in names}
    worker = State(layout, old, {})
    remembers = point.codec == "history"
    resets = reset_peak()
    weights_only = status("VmRSS")

    history = History(point.index - 1)
    if remembers:  # the patch before the measured one, standing for all before it
        part = patch.encode(layout, layout.tiles, old, new, worker.sums, codec="history", history=History())
        first = History().after(part.patches, old)
        history = replace(first, index=point.index - 1)
        for name in names:
            old[name][:], new[name][:] = pair[1].reshape(-1), pair[2].reshape(-1)
        del part, first
        worker.recount()
    reset_peak()
    held = status("VmRSS") - weights_only

    part = patch.encode(
        layout, layout.tiles, old, new, worker.sums, codec=point.codec, history=history if remembers else None
    )
    sums = {**worker.sums, **part.sums}
    after = digest.state_digest(layout.tiles, sums)
    later = history.after(part.patches, old)
    encoding = peak() - weights_only
    manifest = Manifest(
        run="0" * 32, version=1, step=0, epoch=0, index=point.index, base=Base(0, worker.digest), layout=layout.id,
        parts=(PartRef(part.id, len(part.data)),), digest=after, history=later.digest() if later.tiles else None,
        created=0,
    ).build()  # fmt: skip
    changed, data, remembered = sum(p.changed for p in part.patches), part.data, later.size_bytes
    del part, later
    worker.history = history
    reset_peak()

    worker.commit(worker.prepare(manifests.parse(manifest), [data]))
    decoding = peak() - weights_only
    assert all(np.array_equal(old[name], new[name]) for name in names), "the worker has not the new weights"
    return {
        "changed": changed, "patch_bytes": len(data), "history_bytes": remembered, "history_held_bytes": held,
        "encode_bytes": encoding, "decode_bytes": decoding, "peak_was_reset": resets,
    }  # fmt: skip


# -- outside -------------------------------------------------------------------------------------------------------


def run(point: Point) -> dict[str, Any]:
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{point} failed:\n{done.stderr}")
    return {**asdict(point), **json.loads(done.stdout.splitlines()[-1])}


def row(one: dict[str, Any]) -> list[str]:
    cells = [one["codec"], str(one["threads"]), str(one["index"]), f"{one['weights'] / 1e6:.0f}"]
    cells += [f"{one['density']:.1%}", f"{one['changed']:,}", f"{one['history_bytes'] / MB:.1f}"]
    cells.append(f"{one['history_held_bytes'] / MB:.1f}")
    for what in ("encode_bytes", "decode_bytes"):
        cells += [f"{one[what] / MB:.1f}", f"{one[what] / one['changed']:.0f}", f"{one[what] / one['weights'] / 2:.1%}"]
    return cells


def fit(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By codec, threads and direction: peak = constant + slope x changes + history held and made, least squares.

    And the same with the model's size as one more term: what it should not depend on.
    """
    out = {}
    for codec, threads in sorted({(one["codec"], one["threads"]) for one in found}):
        mine = [one for one in found if (one["codec"], one["threads"]) == (codec, threads) and one["sweep"] != "index"]
        changed, weights, history = (
            np.array([o[k] for o in mine], float) for k in ("changed", "weights", "history_bytes")
        )
        for what in ("encode", "decode"):
            rest = np.array([o[f"{what}_bytes"] for o in mine], float) - 2 * history
            terms = np.stack([np.ones(len(mine)), changed, weights], axis=1)
            if len(mine) > terms.shape[1]:
                (buffer, slope, per_weight), *_ = np.linalg.lstsq(terms, rest, rcond=None)
                out[f"{codec}, {what}, threads {threads}"] = {
                    "buffer_mb": float(buffer / MB), "bytes_per_change": float(slope),
                    "bytes_per_weight": float(per_weight),
                }  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer points")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(measure(Point(**json.loads(given.point)))))
        return
    from bench_codec import json_line, provenance, table

    found = [run(point) for point in points(given.quick)]
    if not all(one["peak_was_reset"] for one in found):
        print("This system does not let a process reset its peak: numbers are upper bounds.\n")
    print("Peak of resident memory over the weights; patch, and history before and after, included.\n")
    head = ["codec", "threads", "index", "M weights", "density", "changed", "history MB", "held as MB"]
    for what in ("encode", "decode+apply"):
        head += [f"{what} MB", "bytes a change", "of the weights"]
    print(table(head, [row(one) for one in found]))
    fitted = fit(found)
    print("\nFitted, with twice the history taken off: peak = buffer + slope × changes + slope × weights.\n")
    rows = [
        [k, *(f"{v[w]:.3f}" for w in ("buffer_mb", "bytes_per_change", "bytes_per_weight"))] for k, v in fitted.items()
    ]
    print(table(["", "buffer MB", "bytes a change", "bytes a weight"], rows) + "\n")
    print(json_line({"bench": "memory", **provenance(), "seed": SEED, "fit": fitted, "points": found}))


if __name__ == "__main__":
    main()
