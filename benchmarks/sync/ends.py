"""The processes of sync.py: the server, the worker, and those whose memory is measured.

Each takes one JSON object as its argument, reads JSON lines, answers with JSON lines, and ends when its standard input
does.
"""

import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import pulsesync
from benchmarks.harness.baselines import PulseCoo
from benchmarks.harness.processes import answer, answer_all, end_with_the_input
from benchmarks.harness.timing import peak, reset_peak, status, trim
from benchmarks.harness.weights import Bits, as_bf16, split
from pulsesync import Publisher
from pulsesync.format import epochs
from pulsesync.server import serve as serve_store
from pulsesync.store import LocalStore, Location, open_store
from tests.readers import Subscriber

# -- the server ----------------------------------------------------------------------------------------------------


def serve(given: dict[str, Any]) -> None:
    end_with_the_input(lambda: os.kill(os.getpid(), signal.SIGTERM))
    serve_store(LocalStore(given["folder"]), given["host"], 0, on_ready=lambda url: answer({"url": url}))


# -- a publisher with short epochs -----------------------------------------------------------------------------------


class EpochPublisher(Publisher):
    """A publisher whose run has another number of patches in an epoch than the format fixes, to measure less of it."""

    def __init__(self, location: Location, *, epoch_patches: int = epochs.EPOCH_PATCHES, **options: Any) -> None:
        self._epoch_patches = epoch_patches
        super().__init__(location, **options)


# -- the worker ----------------------------------------------------------------------------------------------------


class Worker:
    """Has weights, and syncs them to the next version when a message asks for it."""

    def __init__(self, given: dict[str, Any]) -> None:
        pulsesync.warm_up()
        self.epoch_patches = given.get("epoch", epochs.EPOCH_PATCHES)
        self.method = given["method"]
        shapes = {name: tuple(shape) for name, shape in given["shapes"].items()}
        self.flat: Bits = np.zeros(sum(map(math.prod, shapes.values())), np.uint16)
        self.state = split(self.flat, shapes)

    def begin(self, url: str, start: str | None) -> dict[str, Any]:
        """Start with the weights of a file, or with zeros, and follow the run at `url`."""
        np.copyto(self.flat, np.load(start, mmap_mode="r") if start else np.uint16(0))
        self.store = open_store(url)
        self.subscriber = Subscriber(url, epoch_patches=self.epoch_patches) if self.method == "ours" else None
        return {}

    def sync(self, key: str = "", size: int = 0, version: int | None = None) -> dict[str, Any]:
        """Write the new weights in place; return when that was done, and the seconds of each part."""
        began, used = time.monotonic(), time.process_time()
        if self.subscriber is not None:
            report = self.subscriber.sync(as_bf16(self.state), version)
            return {
                "done": time.monotonic(),
                "began": began,
                "fetch_s": report.fetch_s,
                "prepare_s": report.prepare_s,
                "apply_s": report.apply_s,
                "fetched_bytes": report.fetched_bytes,
                "path": report.path,
                "version": report.version,
                "sync_cpu_s": time.process_time() - used,
            }
        data = self.store.get(key, 0, size)
        fetched = time.monotonic()
        if self.method == "full":
            np.copyto(self.flat, np.frombuffer(data, np.uint16))
        else:
            PulseCoo().apply_(self.state, data)
        done = time.monotonic()
        return {
            "done": done,
            "began": began,
            "fetch_s": fetched - began,
            "prepare_s": 0.0,
            "apply_s": done - fetched,
            "fetched_bytes": len(data),
            "path": [self.method],
            "sync_cpu_s": time.process_time() - used,
        }

    def sha256(self) -> dict[str, Any]:
        began = time.monotonic()
        return {"sha256": hashlib.sha256(self.flat.data).hexdigest(), "seconds": time.monotonic() - began}


def work(given: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it closes its input
    answer_all(Worker(given))


# -- memory --------------------------------------------------------------------------------------------------------


class Weighed:
    """A fresh process with weights: measures the memory that an operation takes in addition to them."""

    def __init__(self, given: dict[str, Any]) -> None:
        pulsesync.warm_up()
        self.epoch_patches = given.get("epoch", epochs.EPOCH_PATCHES)
        self.folder, self.run = Path(given["folder"]), given["run"]
        shapes = {name: tuple(shape) for name, shape in given["shapes"].items()}
        self.flat: Bits = np.array(np.load(self.folder / "start.npy", mmap_mode="r"))
        self.tensors = as_bf16(split(self.flat, shapes))
        self.resets = True

    @contextmanager
    def weighed(self, out: dict[str, Any]) -> Iterator[None]:
        """Measure the peak of memory while the block runs, and what stays allocated, above what was in use before."""
        self.resets = reset_peak() and self.resets
        before, anonymous = status("VmRSS"), status("RssAnon")
        most, stop = [anonymous], threading.Event()

        def watch() -> None:
            while not stop.wait(0.002):
                most[0] = max(most[0], status("RssAnon"))

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            stop.set()
            watching.join()
        out["peak_bytes"] = peak() - before
        out["peak_own_bytes"] = most[0] - anonymous  # without pages of files, which the system can reclaim
        trim()
        out["stays_bytes"] = status("VmRSS") - before
        out["peak_was_reset"] = self.resets

    def train(self, step: int) -> None:
        """Apply one step to the weights, in place."""
        positions, values = (np.load(self.folder / f"{what}{step}.npy", mmap_mode="r") for what in ("at", "to"))
        self.flat[positions] = values  # allocates nothing: positions have the type that indexing needs

    def trainer(self, wait: bool, steps: int, **options: Any) -> dict[str, Any]:
        """Publish the first version and its anchor, then patches; both figures are above the weights alone."""
        root: dict[str, Any] = {}
        patches: dict[str, Any] = {}
        with self.weighed(root):
            publisher = EpochPublisher(self.run, epoch_patches=self.epoch_patches, **options)
            publisher.publish(self.tensors, step=0)
        with self.weighed(patches):
            for step in range(steps):
                self.train(step)
                if wait:
                    publisher.publish(self.tensors, step=step + 1)
                else:
                    publisher.publish(self.tensors, step=step + 1, wait=False)
                    time.sleep(0.15)  # a trainer would be computing
            publisher.flush()
        for what in ("peak_bytes", "peak_own_bytes", "stays_bytes"):
            patches[what] += root["stays_bytes"]
        history = publisher._base.state.history.size_bytes if publisher._base else 0
        publisher.close()
        return {"first": root, "then": patches, "history_bytes": history}

    def resume(self, steps: int) -> dict[str, Any]:
        """A new publisher resumes the run of an earlier process, and publishes a patch."""
        for step in range(steps):
            self.train(step)
        out: dict[str, Any] = {}
        with self.weighed(out):
            publisher = EpochPublisher(self.run, epoch_patches=self.epoch_patches)
            report = publisher.publish(self.tensors, step=steps)
            publisher.flush()
        publisher.close()
        return {"then": out, "version": report.version, "history_bytes": 0}

    def worker(self, versions: list[int], holding: bool) -> dict[str, Any]:
        """Sync to each version in turn; the last must be the run's newest, and is checked against its digest."""
        if not holding:
            self.flat[:] = 0
        out: dict[str, Any] = {}
        with self.weighed(out):
            subscriber = Subscriber(self.run, epoch_patches=self.epoch_patches)
            paths = [subscriber.sync(self.tensors, version).path for version in versions]
        subscriber.verify(self.tensors)
        assert subscriber.state is not None
        return {"then": out, "paths": paths, "history_bytes": subscriber.state.history.size_bytes}


def weigh(given: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer(getattr(Weighed(given), given["what"])(**given["with"]))


ROLES: dict[str, Callable[[dict[str, Any]], None]] = {"serve": serve, "work": work, "weigh": weigh}

if __name__ == "__main__":
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
