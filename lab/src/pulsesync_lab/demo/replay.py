"""A recorded run, replayed across processes: what syncs cost in real training at a real learning rate. No torch.

The trainer's process publishes the recorded states one after another, and waits each time until every worker's process
has followed; each writes its version to a file in the run's folder. Both may die and be restarted.

The recording is a slice of GRPO on SmolLM2-135M at 3e-6, six whole tensors over 15 steps, and part of the package;
data/README.md describes it.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pulsesync.errors import PulseError
from pulsesync.publish.pending import PublishReport
from pulsesync.publish.publisher import Publisher
from pulsesync.publish.warmup import warm_up
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import Store, ThrottledStore, open_store
from pulsesync.testing.recorded import RecordedSlice, load_recorded
from pulsesync_lab.demo.run import WRONG, DemoRun
from pulsesync_lab.demo.settings import DemoSettings

RECORDED = Path(__file__).parent / "data" / "grpo-slice.npz"
RATE = 3e-6  # at which it was recorded
POLL_S = 0.02

State = dict[str, NDArray[Any]]


class ReplayRun(DemoRun):
    """The processes of a replay; settings.model is the recording."""

    def _start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "pulsesync_lab.demo.replay", str(self.folder), name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )


def load(path: Path) -> RecordedSlice:
    """Read a recording. Raises: PulseError, if its steps do not lead to the expected state."""
    try:
        return load_recorded(path)
    except ValueError as e:
        raise PulseError(str(e)) from e


def start_of(recording: RecordedSlice) -> State:
    """The weights before the first step."""
    return {name: bits.view(ml_dtypes.bfloat16) for name, bits in recording.start.items()}


def states(recording: RecordedSlice) -> Iterator[State]:
    """The start, and the state after each step."""
    yield start_of(recording)
    for _, _, new in recording.states():
        yield {name: bits.view(ml_dtypes.bfloat16) for name, bits in new.items()}


def publish(folder: Path, settings: DemoSettings) -> None:
    """The trainer's process: publish each state, and log its cost and the workers' versions."""
    store, written = open_store(settings.store), folder / "steps.jsonl"
    newest = RunReader(store, None).newest()
    if newest is not None and not (folder / "spool").exists():
        raise PulseError(f"{settings.store} already has a run; give a replay a new location")
    done = newest.step if newest is not None else -1
    with Publisher(store, spool=folder / "spool") as publisher:
        for step, state in enumerate(states(load(Path(settings.model)))):
            if done < step <= settings.steps:
                began = time.perf_counter()
                report = publisher.publish(state, step=step)
                published = time.perf_counter()
                workers = _wait_for(folder, settings, step)
                if step:
                    line = _line(report, publisher.digest, workers, published - began, time.perf_counter() - published)
                    with written.open("a") as out:
                        out.write(json.dumps(line) + "\n")


def _wait_for(folder: Path, settings: DemoSettings, version: int) -> dict[str, Any]:
    """The workers' states, once all of them have a version."""
    while True:
        states = {}
        for number in range(settings.workers):
            path = folder / f"worker-{number}.json"
            if path.exists():
                states[f"worker {number}"] = json.loads(path.read_text())
        if len(states) == settings.workers and all(state["version"] >= version for state in states.values()):
            return states
        time.sleep(POLL_S)


def _line(
    report: PublishReport, digest: str | None, workers: dict[str, Any], publish_s: float, wait_s: float
) -> dict[str, Any]:
    return {
        "step": report.step,
        "time": time.time(),
        "reward": None,
        "behind": 0.0,
        "version": report.version,
        "digest": digest,
        "changed": report.changed,
        "total": report.total,
        "size_bytes": report.payload_bytes,
        "full_bytes": report.full_bytes,
        "publish_s": publish_s,
        "train_s": 0.0,
        "wait_s": wait_s,
        "workers": workers,
    }


def follow(folder: Path, settings: DemoSettings, number: int) -> None:
    """A worker's process: it knows names and shapes, and gets everything else from the store.

    It verifies every version.
    """
    weights = {name: np.zeros_like(array) for name, array in start_of(load(Path(settings.model))).items()}
    store: Store = open_store(settings.read or settings.store)
    if settings.link is not None:
        store = ThrottledStore(store, settings.link)
    subscriber = Subscriber(store, cache=folder / f"cache-{number}")
    state: dict[str, Any] = {
        "version": -1,
        "counted": -1,
        "synced": 0,
        "fetched_bytes": 0,
        "generate_s": 0.0,
        "sync_s": 0.0,
        "pause_s": 0.0,
        "wait_s": 0.0,
    }
    began = time.perf_counter()
    for report in subscriber.watch(weights, wait_s=math.inf, interval_s=POLL_S, max_interval_s=POLL_S):
        state["version"] = report.version
        state["synced"] += 1
        state["fetched_bytes"] += report.fetched_bytes
        state["pause_s"] += report.apply_s
        state["sync_s"] += report.fetch_s + report.prepare_s + report.apply_s
        state["wait_s"] = time.perf_counter() - began - state["sync_s"]
        if state["synced"] % settings.recount_every == 1 or report.version == settings.steps:
            subscriber.verify(weights)
            state["counted"] = report.version
        new = folder / f"worker-{number}.new"
        new.write_text(json.dumps(state))
        new.rename(folder / f"worker-{number}.json")
        if report.version >= settings.steps:
            return


def main() -> int:
    """Run one process of a replay: `python -m pulsesync_lab.demo.replay FOLDER trainer`, or a worker's number."""
    folder, role = Path(sys.argv[1]), sys.argv[2]
    settings = DemoSettings.load(folder)
    try:
        settings.export_metrics(role)
        warm_up()
        publish(folder, settings) if role == "trainer" else follow(folder, settings, int(role))
    except PulseError as e:
        sys.stderr.write(f"{role}: {type(e).__name__}: {e}\n")
        return WRONG
    return 0


if __name__ == "__main__":
    sys.exit(main())
