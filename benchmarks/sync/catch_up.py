"""What does it cost a worker to catch up on k patches: in one sync, in k syncs, and with one squashed patch?

    python -m benchmarks catch_up                                   # 40 M weights in 100 tensors; ten minutes
    python -m benchmarks catch_up --trace DIR --patches 1 4 15      # the recorded run (see recording.py)
    python -m benchmarks catch_up --source before=../other/src --source after=src

Each source tree publishes its own run of the same weights and then reads that run, in separate processes, one tree
after the other, because their formats may differ. The report shows the least CPU and wall-clock seconds of several
rounds, the seconds of the pauses in which weights are written, and resident memory: its peak above what the process had
before the sync, and the size of the undo log, which records the differences between the first version and the last.
"squash" prepares and commits one patch from the first version to the last, without the search for it; the MB column
gives the bytes of that patch, and those of all k patches for the other two. After each round the digest of the weights
is recomputed and compared with that of the record.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import recording
from benchmarks.harness.processes import last_line
from benchmarks.harness.report import json_line, table
from benchmarks.harness.timing import peak, reset_peak, status
from benchmarks.harness.weights import as_bf16
from pulsesync import Publisher, Subscriber
from pulsesync.format import patch
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.run.reader import RunReader
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.views import new_tensors
from pulsesync.state.weights import Recount
from pulsesync.store import open_store
from pulsesync.testing import AdamUpdates

QUICK = ("--weights", "1e5", "--patches", "3", "--rounds", "1")
WAYS = ("one sync", "k syncs", "squash")
TENSORS, SETTLED = 100, 15  # optimizer steps before the first version: from then on about 0.9 % change at a step
Weights = dict[str, Any]


# -- in a process of its own ---------------------------------------------------------------------------------------


def generated(weights: float) -> Iterator[Weights]:
    rows = max(1, round(weights / TENSORS / 625))
    updates = AdamUpdates({f"model.layers.{n}.weight": (rows, 625) for n in range(TENSORS)}, seed=1)
    for _ in range(SETTLED):
        updates.step()
    yield updates.state()
    while True:
        yield updates.step()


def recorded(trace: str) -> Iterator[Weights]:
    for n, (_, old, new) in enumerate(recording.load(trace).steps()):
        if n == 0:
            yield old
        yield new


def publish(folder: Path, given: argparse.Namespace) -> None:
    """Publish a run with as many patches as the largest k needs."""
    states = recorded(given.trace) if given.trace else generated(given.weights)
    with Publisher(str(folder), anchor_every=1e9) as publisher:
        for step, state in zip(range(max(given.patches) + 1), states, strict=False):
            publisher.publish(as_bf16(state), step=step)
            publisher.flush()


class Worker:
    """A worker at the first version of a run."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(str(folder))
        self.records = RunReader(self.store, None)
        first = self.record(0)
        self.layout = self.records.layout(first.layout)
        self.model = new_tensors(self.layout.tensors)

    def record(self, version: int) -> Manifest:
        found = self.records.version(version)
        assert found is not None, f"the run has no version {version}"
        return found

    def at(self, version: int) -> Subscriber:
        """A subscriber that has brought the weights to a version."""
        subscriber = Subscriber(self.store)
        subscriber.sync(self.model, version=version)
        return subscriber

    def squash(self, k: int) -> tuple[Manifest, bytes]:
        """One patch from the first version to the k-th."""
        old = self.at(0)
        assert old.state is not None
        before, sums = {name: flat.copy() for name, flat in old.state.flats.items()}, old.state.sums
        new = self.at(k)
        assert new.state is not None
        part = patch.encode(self.layout, self.layout.tiles, before, new.state, sums, codec="context")
        base = BaseRef(0, self.record(0).digest)
        ref = PartRef(part.id, len(part.data))
        record = replace(self.record(k), kind=RecordKind.SQUASH, base=base, history=None, parts=(ref,))
        return record, bytes(part.data)


def measure(folder: Path, k: int, way: str, rounds: int) -> dict[str, Any]:
    """Catch up by the same method several times; return the least of each figure."""
    worker = Worker(folder)
    squash = worker.squash(k) if way == "squash" else None
    patch_bytes = sum(worker.record(n).size_bytes for n in range(1, k + 1))
    found: list[dict[str, float]] = []
    for _ in range(rounds + 1):  # the first round loads the kernels and is not counted
        subscriber = worker.at(0)
        reset_peak()
        held = status("VmRSS")
        cpu_s, wall_s, pauses_s = time.process_time(), time.perf_counter(), 0.0
        if squash:
            state = subscriber.state
            assert state is not None
            transition = PatchTransaction(state).prepare(squash[0], [squash[1]])
            began = time.perf_counter()
            back = state.commit(transition)
            pauses_s = time.perf_counter() - began
        else:
            for version in [k] if way == "one sync" else range(1, k + 1):
                pauses_s += subscriber.sync(worker.model, version=version).apply_s
        row = {"cpu_s": time.process_time() - cpu_s, "wall_s": time.perf_counter() - wall_s, "pauses_s": pauses_s}
        row["peak_mb"] = (peak() - held) / 1e6
        if not squash:
            subscriber.verify()
            back = subscriber._follower.local._undo[-1].back
        row["undo_mb"] = sum(c.positions.nbytes + c.old.nbytes + c.new.nbytes for c in back.changes.values()) / 1e6
        assert subscriber.state is not None
        assert Recount(subscriber.state).digest() == worker.record(k).digest
        row["history_mb"] = subscriber.state.history.size_bytes / 1e6
        row["mb"] = (len(squash[1]) if squash else patch_bytes) / 1e6
        found.append(row)
        subscriber.close()
    return {name: round(min(row[name] for row in found[1:]), 4) for name in found[0]}


# -- in the process that compares ----------------------------------------------------------------------------------


def child(source: Path, *options: Any) -> Any:
    """Run this benchmark with another source tree; return what its last line says."""
    return last_line("benchmarks", "catch_up", *options, env={"PYTHONPATH": str(source.resolve())})


def compare(sources: dict[str, Path], given: argparse.Namespace, folder: Path) -> None:
    what = ["--trace", given.trace] if given.trace else ["--weights", given.weights]
    for name, source in sources.items():
        child(source, "--publish", folder / name, *what, "--patches", *given.patches)
    found = []
    for k in given.patches:
        for way in WAYS:
            for name, source in sources.items():
                options = ["--measure", folder / name, "--patches", k, "--way", way, "--rounds", given.rounds]
                found.append({"k": k, "way": way, "source": name, **child(source, *options)})
    head = ["method", "k", "source", "CPU s", "wall s", "pauses s", "peak MB", "undo MB", "MB"]
    names = ("cpu_s", "wall_s", "pauses_s", "peak_mb", "undo_mb", "mb")
    print(table(head, [[one["way"], str(one["k"]), one["source"], *(f"{one[n]:.3f}" for n in names)] for one in found]))
    print(json_line({"bench": "catch_up", "found": found}))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=4e7)
    parser.add_argument("--trace", metavar="DIR", help="folder of the recording, in place of generated weights")
    parser.add_argument("--patches", type=int, nargs="+", default=[1, 4, 16, 64], metavar="K")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--source", action="append", metavar="NAME=SRC", help="a source tree to measure; several may be"
    )
    parser.add_argument("--publish", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    if given.publish:
        publish(given.publish, given)
        print("{}")
    elif given.measure:
        print(json_line(measure(given.measure, given.patches[0], given.way, given.rounds)))
    else:
        here = Path(patch.__file__).parents[2]
        sources = {name: Path(path) for name, _, path in (one.partition("=") for one in given.source or ())}
        with tempfile.TemporaryDirectory() as folder:
            compare(sources or {"here": here}, given, Path(folder))
