"""How much memory do encoding and applying need beyond the weights themselves?

    python -m benchmarks memory               # five minutes on 2 cores; 1.1 GB of weights at most
    python -m benchmarks memory --small       # two minutes: small models

By design, memory consists of a fixed number of bytes for each change, a buffer whose size is given, and the history;
nothing grows with the model. To check this, models of several sizes are changed at the same density, one model at
several densities, and one at several positions in an epoch; one process encodes, another applies. The figure is
resident memory (so this needs Linux): its peak minus what the process had with kernels loaded and all weights in place.
It includes the patch itself, and the history from before the patch and the one after it. In the sweep over positions in
an epoch, the history is that of one patch, modified to look old.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import pulsesync
from benchmarks.codec.version import publish
from benchmarks.harness.processes import last_line
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import peak, reset_peak, status
from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.manifest import BaseRef
from pulsesync.format.patch import CodecName
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import WeightState
from pulsesync.testing import AdamUpdates

QUICK = ("--small", "--codecs", "context", "--threads", "1")

MB = 1e6
SHAPE = (2048, 2048)  # of every tensor: 4 blocks
SEED = 0


@dataclass(frozen=True)
class Point:
    """The parameters of one measurement."""

    sweep: str
    weights: int  # a multiple of a tensor's
    density: float
    codec: CodecName
    threads: int
    index: int  # of the measured patch in its epoch


def points(small: bool, codecs: list[CodecName], threads_of: list[int]) -> Iterator[Point]:
    """The sweeps, smallest first."""
    size = 1 << 25 if small else 1 << 27
    sizes = [size >> 1, size] if small else [1 << 25, 1 << 26, 1 << 27, 1 << 28]
    densities = [0.002, 0.02] if small else [0.001, 0.002, 0.004, 0.016, 0.04]
    for codec in codecs:
        for threads in threads_of:
            for weights in sizes:
                yield Point("size", weights, 0.008, codec, threads, 8)
            for density in densities:
                yield Point("density", size, density, codec, threads, 8)
    for index in (2, 32) if small else (2, 32, 127):
        if "history" not in codecs:
            break
        yield Point("index", size, 0.008, "history", max(threads_of), index)


# -- in a process of its own ---------------------------------------------------------------------------------------


def one_tensor_remembered(times: Any, index: int) -> Any:
    """The history of a tensor before patch index: that of one patch, as if all those before had shared its changes."""
    layout = layouts.make([TensorSpec("w", "BF16", SHAPE)])
    old, new = {"w": times[0]}, {"w": times[1]}
    sums = WeightState(HostBackend(layout, old)).sums
    part = patch.encode(layout, layout.tiles, old, new, sums, codec="history", history=History())
    tile = History().after(part.patches, old).tiles[0]
    rng = np.random.default_rng(SEED)

    def older(block: Any) -> Any:
        last = block.last
        some = rng.integers(1, index - 1, last.size, np.uint8, endpoint=True)
        return block._replace(last=np.where(last & 0x7F, some | last & 0x80, 0).astype(np.uint8))

    return replace(tile, blocks=tuple(map(older, tile.blocks)))


def measure(point: Point, what: str, folder: Path) -> dict[str, Any]:
    """Encode a patch of this point into the folder, or read it from there and apply it; return the memory taken."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: point.threads])
    pulsesync.warm_up()
    times = np.load(folder / f"{point.density}.npy")
    names = [f"layer{i:03d}" for i in range(point.weights // times[0].size)]
    layout = layouts.make(TensorSpec(name, "BF16", SHAPE) for name in names)
    worker = WeightState(HostBackend(layout, {name: times[1].copy() for name in names}))
    new = {name: times[2].copy() for name in names}
    tile = one_tensor_remembered(times, point.index) if point.codec == "history" else None
    resets = reset_peak()
    weights_only = status("VmRSS")

    history = History(point.index - 1)
    if tile:  # all tensors are alike, and so is what is remembered of them
        tiles = {
            n: replace(tile, blocks=tuple(b._replace(last=b.last.copy()) for b in tile.blocks))
            for n in range(len(names))
        }
        history = History(point.index - 1, tiles)
    worker.history = history
    out = encode(point, worker, new, folder) if what == "encode" else decode(worker, folder)
    out |= {"bytes": peak() - weights_only, "peak_was_reset": resets}
    if what == "decode":
        assert all(np.array_equal(worker.flats[name], new[name]) for name in names), "these are not the new weights"
    return out


def encode(point: Point, worker: Any, new: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do what a publisher does."""
    before = worker.history
    remembers = bool(before.tiles)
    options: dict[str, Any] = {"codec": point.codec, "remembers": remembers, "base": BaseRef(0, worker.digest)}
    published = publish(worker.layout, worker.flats, new, worker.sums, before, **options)
    (folder / "part").write_bytes(published.part)
    (folder / "manifest").write_bytes(published.manifest)
    return {
        "changed": published.changed,
        "patch_bytes": len(published.part),
        "history_before_bytes": before.size_bytes,
        "history_after_bytes": published.history.size_bytes,
    }


def decode(worker: Any, folder: Path) -> dict[str, Any]:
    """Do what a worker does."""
    manifest = manifests.parse((folder / "manifest").read_bytes())
    worker.commit(PatchTransaction(worker).prepare(manifest, [(folder / "part").read_bytes()]))
    return {}


# -- outside -------------------------------------------------------------------------------------------------------


def tensor_in_time(density: float) -> Any:
    """One tensor at three successive steps of a run in which a step changes about this share of the weights."""
    updates = AdamUpdates({"w": SHAPE}, lr=3e-6 * density / 0.0074, seed=SEED)
    return np.stack([updates.step()["w"].reshape(-1) for _ in range(12)][-3:])


def run(point: Point, folder: Path) -> dict[str, Any]:
    made = folder / f"{point.density}.npy"
    if not made.exists():
        np.save(made, tensor_in_time(point.density))
    out = asdict(point)
    for what in ("encode", "decode"):
        found = last_line("benchmarks", "memory", "--point", json.dumps(asdict(point)), what, folder)
        out |= {f"{what}_bytes" if key == "bytes" else key: value for key, value in found.items()}
    return out


def row(one: dict[str, Any]) -> list[str]:
    cells = [one["codec"], str(one["threads"]), str(one["index"]), f"{one['weights'] / 1e6:.0f}", f"{one['changed']:,}"]
    cells.append(f"{one['changed'] / one['weights']:.2%}")
    cells += [f"{one[f'history_{when}_bytes'] / MB:.1f}" for when in ("before", "after")]
    for what in ("encode_bytes", "decode_bytes"):
        cells += [f"{one[what] / MB:.1f}", f"{one[what] / one['changed']:.0f}", f"{one[what] / one['weights'] / 2:.1%}"]
    return cells


def fit(found: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By codec, direction and threads: peak less both histories = buffer + slope of changes + slope of weights.

    Least squares over the two sweeps; the slope of weights should be zero.
    """
    out = {}
    for codec, threads in sorted({(one["codec"], one["threads"]) for one in found}):
        mine = [one for one in found if (one["codec"], one["threads"]) == (codec, threads) and one["sweep"] != "index"]
        terms = np.array([[1.0, one["changed"], one["weights"]] for one in mine])
        for what in ("encode", "decode"):
            rest = [o[f"{what}_bytes"] - o["history_before_bytes"] - o["history_after_bytes"] for o in mine]
            (buffer, slope, per_weight), *_ = np.linalg.lstsq(terms, np.array(rest, float), rcond=None)
            numbers = {"buffer_mb": buffer / MB, "bytes_per_change": slope, "bytes_per_weight": per_weight}
            out[f"{codec}, {what}, threads {threads}"] = {name: float(number) for name, number in numbers.items()}
    return out


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="smaller models, fewer points")
    codecs = ["gap", "context", "history"]
    parser.add_argument("--codecs", nargs="+", choices=codecs, default=codecs)
    cores = min(2, len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", nargs="+", type=int, default=list(range(1, cores + 1)))
    parser.add_argument("--point", nargs=3, help=argparse.SUPPRESS)  # for the processes that this one starts


def main(given: argparse.Namespace) -> None:
    if given.point:
        point, what, folder = given.point
        print(json.dumps(measure(Point(**json.loads(point)), what, Path(folder))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = [run(point, Path(folder)) for point in points(given.small, given.codecs, given.threads)]
    if not all(one["peak_was_reset"] for one in found):
        print("This system does not let a process reset its peak: numbers are upper bounds.\n")
    print("Peak of resident memory over the weights; patch, and history before and after, included.\n")
    head = ["codec", "threads", "index", "M weights", "changed", "density"]
    head += ["history before MB", "after MB"]
    for what in ("encode", "decode+apply"):
        head += [f"{what} MB", "bytes a change", "of the weights"]
    print(table(head, [row(one) for one in found]))
    fitted = fit(found)
    print("\nFitted, with both histories taken off: peak = buffer + slope × changes + slope × weights.\n")
    rows = [[name, *(f"{number:.3f}" for number in numbers.values())] for name, numbers in fitted.items()]
    print(table(["", "buffer MB", "bytes a change", "bytes a weight"], rows) + "\n")
    print(json_line({"bench": "memory", **provenance(), "seed": SEED, "fit": fitted, "points": found}))
