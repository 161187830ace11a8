"""The processes of cluster.py: a source with new weights, and a receiver; one module runs both ranks.

    python -m benchmarks.cluster.ends '{"rank": 0, "store": "FILE"}'
    python -m benchmarks.cluster.gpu_ends '{"rank": 0, "store": "FILE", "device": "cuda"}'

Each process answers commands (see harness/processes.py).
"""

import hashlib
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

import pulsesync
from benchmarks.cluster.methods import BASELINES, OURS, Method, Ours
from benchmarks.harness.processes import answer_all
from tests.backends import host_as_device


class Rank:
    """One of the two processes, in a group over gloo."""

    def __init__(self, given: dict[str, Any], wait_s: float) -> None:
        self.source = given["rank"] == 0
        store = dist.FileStore(given["store"], 2)  # type: ignore[attr-defined]
        wait = timedelta(seconds=wait_s)
        dist.init_process_group("gloo", store=store, rank=given["rank"], world_size=2, timeout=wait)

    def probe(self, size_bytes: int) -> dict[str, Any]:
        """Time one broadcast of the given number of bytes, to measure the rate of the link."""
        data = torch.zeros(size_bytes, dtype=torch.uint8)
        dist.barrier()
        began = time.monotonic()
        dist.broadcast(data, 0)
        return {"began": began, "done": time.monotonic()}


def serve(rank: Callable[[dict[str, Any]], Rank]) -> None:
    """Answer commands until standard input ends; print any error, so that the other rank gets one too."""
    given = json.loads(sys.argv[1])
    failed = False
    try:
        with host_as_device() if given.get("interpreted") else nullcontext():
            answer_all(rank(given))
    except Exception:  # noqa: BLE001 - printed here
        traceback.print_exc()
        failed = True
    os._exit(failed)  # destroying the group would wait for the other


class HostRank(Rank):
    """A rank with the weights in host memory. Those after each step are in a folder: start, and what each changes."""

    def __init__(self, given: dict[str, Any]) -> None:
        pulsesync.warm_up()
        torch.set_num_threads(1)  # two ranks on few cores: torch's threads would wait for each other while spinning
        super().__init__(given, wait_s=600)
        self.before: npt.NDArray[np.int16] | None = None  # of the receiver: its weights before a sync

    def load(self, folder: str, shapes: str) -> dict[str, Any]:
        self.folder = Path(folder)
        self.flat = torch.from_numpy(np.load(self.folder / "start.npy").view(np.int16))
        self.before = None if self.source else self.flat.numpy().copy()
        table = json.loads((self.folder / shapes).read_text())
        pieces = self.flat.view(torch.bfloat16).split([math.prod(shape) for _, shape in table])
        self.model = {name: piece.view(shape) for (name, shape), piece in zip(table, pieces, strict=True)}
        return {}

    def begin(self) -> dict[str, Any]:
        """Restore the initial weights."""
        start = np.load(self.folder / "start.npy", mmap_mode="r").view(np.int16)
        np.copyto(self.flat.numpy(), start)
        if self.before is not None:
            np.copyto(self.before, start)
        self.ways: dict[str, Method] = {}
        return {}

    def join(self, ways: list[str], bucket_bytes: int) -> dict[str, Any]:
        """Set up the methods that have their first sync at the next step."""
        for name in ways:
            if name in OURS:
                self.ways[name] = Ours(self.model, self.source, OURS[name])
            else:
                self.ways[name] = BASELINES[name](self.model, self.source, bucket_bytes)
        return {}

    def step(self, number: int) -> dict[str, Any]:
        """Give the source its new weights; before every sync the receiver has those of the previous step."""
        weights, number = (self.flat.numpy(), number) if self.before is None else (self.before, number - 1)
        if number > 0:
            changed = np.load(self.folder / f"positions{number}.npy")
            weights[changed] = np.load(self.folder / f"values{number}.npy").view(np.int16)
        return {}

    def sync(self, way: str) -> dict[str, Any]:
        if self.before is not None:
            np.copyto(self.flat.numpy(), self.before)
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        told = self.ways[way].sync()
        return {"began": began, "done": time.monotonic(), "cpu_s": time.process_time() - used, **told}

    def check(self) -> dict[str, Any]:
        return {"sha256": hashlib.sha256(self.flat.numpy().data).hexdigest()}


if __name__ == "__main__":
    serve(HostRank)
