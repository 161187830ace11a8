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
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import recording
from benchmarks.harness.report import json_line, provenance, spread, table
from benchmarks.harness.timing import timed
from benchmarks.harness.weights import Steps, as_bf16, recorded, recorded_slice
from pulsesync import Publisher, Subscriber, open_store, warm_up
from pulsesync.integrations.delta_folder import DeltaExporter, DeltaImporter, DeltaVersion
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.state.views import new_tensors
from pulsesync.store import Store, size_of

ENCODINGS: tuple[Literal["overwrite", "xor"], ...] = ("overwrite", "xor")
QUICK = ("--slice", "--steps", "3")


def publish_steps(steps: Steps, location: Path, most: int | None) -> list[dict[str, Any]]:
    """Publish a recorded run, the weights before its first step as version 0."""
    rows = []
    with Publisher(str(location)) as publisher:
        for number, (step, old, new) in enumerate(steps):
            if number == most:
                break
            if not number:
                publisher.publish(as_bf16(old), step=step)
            report, publish_s = timed(partial(publisher.publish, as_bf16(new), step=step + 1))
            rows.append({"changed": report.changed, "publish_s": publish_s})
    return rows


def all_of(advance: Callable[[], DeltaVersion | None]) -> list[tuple[DeltaVersion, float]]:
    """Every version, with the seconds that it took."""
    done: list[tuple[DeltaVersion, float]] = []
    while True:
        version, seconds = timed(advance)
        if version is None:
            return done
        done.append((version, seconds))


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
    worker = Subscriber(store, undo=0)
    return weights, [timed(partial(worker.sync, weights, version=version))[1] for version in versions]


def measure(store: Store, scratch: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    exported = {}
    for encoding in ENCODINGS:
        with DeltaExporter(store, scratch / encoding, encoding=encoding) as exporter:
            exported[encoding] = all_of(exporter.advance)
    with DeltaImporter(scratch / "xor", str(scratch / "imported")) as importer:
        imported = all_of(importer.advance)
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
    rows = []
    for step in [*steps, {key: statistics.fmean(s[key] for s in steps) for key in steps[0]}]:
        sizes = [step[f"{name}_bytes"] for name in ("patch", "xor", "overwrite")]
        version = str(step["version"]) if isinstance(step["version"], int) else "mean"
        changed = f"{round(step['changed']):,}" if "changed" in step else "-"
        times = [f"{size / sizes[0]:.2f}" for size in sizes[1:]]
        rows.append([version, changed, *(f"{size / 1e6:.3f}" for size in sizes), *times])
    head = ["version", "changed", "patch, MB", "xor folder, MB", "overwrite folder, MB", "xor / patch"]
    print(table([*head, "overwrite / patch"], rows) + "\n")
    names = ("publish_s", "sync_s", "export_xor_s", "export_overwrite_s", "import_xor_s")
    rows = [
        [name.removesuffix("_s").replace("_", ", "), *(f"{p:.2f}" for p in spread([s[name] for s in steps]).values())]
        for name in names
        if name in steps[0]
    ]
    print(table(["seconds a step", "p20", "p50", "p80"], rows))
    first = result["first"]
    print(f"\nThe first version, whole: export {first['export_s']:.2f} s, import {first['import_s']:.2f} s.\n")


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--run", help="location of a run, in place of the recording")
    parser.add_argument("--slice", action="store_true", help="the slice of the recording in pulsesync-lab")
    parser.add_argument("--steps", type=int, help="steps of the recording to use, at most")


def main(given: argparse.Namespace) -> None:
    if sum(map(bool, (given.run, given.trace, given.slice))) != 1:
        raise SystemExit("give one of --trace, --slice and --run")
    warm_up()
    with tempfile.TemporaryDirectory() as folder:
        scratch, rows = Path(folder), list[dict[str, Any]]()
        if not given.run:
            steps = (recorded_slice() if given.slice else recorded(given.trace, given.gguf))[1]
            rows = publish_steps(steps, scratch / "run", given.steps)
        result = measure(open_store(given.run or str(scratch / "run")), scratch, rows)
    show(result)
    print(json_line({"bench": "delta_folders", **provenance(), **result}))
