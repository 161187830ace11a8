"""A step as a delta folder and as pulsesync's patch: how many bytes is each, and what do export and import take?

    python -m benchmarks delta_folders --trace DIR --gguf FILE    # the recorded run
    python -m benchmarks delta_folders --run LOCATION             # a run of your own

The recorded run is published into a temporary folder first, one version a step. Then the run is exported as the delta
folders of slime and miles, in both encodings, and those in `xor` are imported into another run. At the end the
weights of that run are compared with the first one's, bit for bit, and the benchmark fails if they differ. Bytes of
a folder are those of its weight files and its index; bytes of a patch are those of its parts and its record. All files
are on a local disk.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from benchmarks.harness import recording

from pulsesync import Publisher, Subscriber, open_store, warm_up
from pulsesync.integrations.delta_folder import DeltaExporter, DeltaImporter, DeltaVersion
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.state.views import new_tensors
from pulsesync.store import Store, size_of

BF16 = np.dtype(ml_dtypes.bfloat16)


def publish_trace(trace: str, gguf: str | None, location: Path, steps: int | None) -> list[dict[str, Any]]:
    """Publish the recorded run, the weights before its first step as version 0."""
    rows = []
    with Publisher(str(location)) as publisher:
        for number, (step, old, new) in enumerate(recording.load(trace, gguf).steps()):
            if number == steps:
                break
            if not number:
                publisher.publish({name: bits.view(BF16) for name, bits in old.items()}, step=step)
            began = time.perf_counter()
            report = publisher.publish({name: bits.view(BF16) for name, bits in new.items()}, step=step + 1)
            rows.append({"changed": report.changed, "publish_s": time.perf_counter() - began})
    return rows


def timed(advance: Callable[[], DeltaVersion | None]) -> list[tuple[DeltaVersion, float]]:
    done = []
    while True:
        began = time.perf_counter()
        version = advance()
        if version is None:
            return done
        done.append((version, time.perf_counter() - began))


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("model*"))


def patch_bytes(store: Store, version: int) -> int:
    """The bytes of a version: its record, and those parts that are separate objects."""
    record = RunReader(store, None).version(version)
    assert record is not None
    return size_of(store, keys.manifest_key(version)) + record.object_bytes


def time_syncs(store: Store, versions: list[int]) -> tuple[dict[str, Any], list[float]]:
    """The weights after the last version, and the seconds that a worker takes to each."""
    record = RunReader(store, None).version(versions[-1])
    assert record is not None
    weights = new_tensors(RunReader(store, None).layout(record.layout).tensors)
    seconds, worker = [], Subscriber(store, undo=0)
    for version in versions:
        began = time.perf_counter()
        worker.sync(weights, version=version)
        seconds.append(time.perf_counter() - began)
    return weights, seconds


def measure(store: Store, scratch: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    exported = {}
    for encoding in ("overwrite", "xor"):
        with DeltaExporter(store, scratch / encoding, encoding=encoding) as exporter:  # type: ignore[arg-type]
            exported[encoding] = timed(exporter.advance)
    with DeltaImporter(scratch / "xor", str(scratch / "imported")) as importer:
        imported = timed(importer.advance)
    versions = [done.version for done, _ in exported["xor"]]
    weights, sync_s = time_syncs(store, versions)
    again, _ = time_syncs(open_store(str(scratch / "imported")), [imported[-1][0].version])
    if any(weights[name].tobytes() != again[name].tobytes() for name in weights):
        raise SystemExit("the imported run has different weights than the original one: no results are reported")
    steps = []
    for number in range(1, len(versions)):
        (xor, xor_s), (overwrite, overwrite_s) = exported["xor"][number], exported["overwrite"][number]
        steps.append(
            (rows[number - 1] if rows else {})
            | {
                "version": versions[number],
                "patch_bytes": patch_bytes(store, versions[number]),
                "xor_bytes": folder_bytes(xor.folder),
                "overwrite_bytes": folder_bytes(overwrite.folder),
                "sync_s": sync_s[number],
                "export_xor_s": xor_s,
                "export_overwrite_s": overwrite_s,
                "import_xor_s": imported[number][1],
            }
        )
    first = {"export_s": exported["xor"][0][1], "import_s": imported[0][1]}
    size = sum(tensor.nbytes for tensor in weights.values())
    return {"full_bytes": size, "tensors": len(weights), "first": first, "steps": steps}


def show(result: dict[str, Any]) -> None:
    steps = result["steps"]
    print("| version | changed | patch, MB | xor folder, MB | overwrite folder, MB | xor / patch | overwrite / patch |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for step in [*steps, {key: statistics.fmean(s[key] for s in steps) for key in steps[0]}]:
        sizes = [step[f"{name}_bytes"] for name in ("patch", "xor", "overwrite")]
        version = step["version"] if isinstance(step["version"], int) else "mean"
        changed = f"{round(step['changed']):,}" if "changed" in step else "-"
        row = [version, changed, *(f"{size / 1e6:.3f}" for size in sizes)]
        print("|", " | ".join(map(str, [*row, *(f"{size / sizes[0]:.2f}" for size in sizes[1:])])), "|")
    print("\n| seconds a step | p20 | p50 | p80 |\n|---|---:|---:|---:|")
    for key in ("publish_s", "sync_s", "export_xor_s", "export_overwrite_s", "import_xor_s"):
        if key in steps[0]:
            p20, p50, p80 = np.percentile([step[key] for step in steps], [20, 50, 80])
            print(f"| {key.removesuffix('_s').replace('_', ', ')} | {p20:.2f} | {p50:.2f} | {p80:.2f} |")
    first = result["first"]
    print(f"\nThe first version, whole: export {first['export_s']:.2f} s, import {first['import_s']:.2f} s.\n")


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--run", help="location of a run, in place of the recording")
    parser.add_argument("--steps", type=int, help="steps of the recording to use, at most")


def main(given: argparse.Namespace) -> None:
    if bool(given.run) == bool(given.trace):
        parser.error("give either --trace or --run")
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        scratch, rows = Path(folder), []
        if given.trace:
            rows = publish_trace(given.trace, given.gguf, scratch / "run", given.steps)
        result = measure(open_store(given.run or str(scratch / "run")), scratch, rows)
    show(result)
    print(json.dumps({"machine": platform.machine(), "python": platform.python_version(), **result}))
