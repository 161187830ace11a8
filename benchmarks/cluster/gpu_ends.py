"""The processes of cluster.py with --device: a source with new weights, and a receiver (see ends.py).

Both generate the same weights from the same seed; then the source's weights change step by step, and the receiver's
follow only by syncs.
"""

import gc
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cluster.ends import Rank, serve
from benchmarks.cluster.gpu_methods import make
from benchmarks.harness.device import PIECE, Model, chances_of, fill_, shapes, train_, wait
from benchmarks.harness.device import name_of as describe
from benchmarks.harness.links import pace_sockets
from pulsesync.device.memory import copy_speed
from pulsesync.group.cost_model import METHODS, CostModel, TransferLoad

WAIT_S = 150  # for the other rank, at each message


class DeviceRank(Rank):
    """A rank with the weights on a GPU, or in host memory as if it were one."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.device = torch.device(given["device"])
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # two ranks on few cores: torch's threads would wait for each other while spinning
        super().__init__(given, WAIT_S)
        dist.barrier()
        self.way: Any = None
        self.chances: dict[float, torch.Tensor] = {}
        generator = torch.Generator(self.device).manual_seed(7)
        keys = torch.randint(-(1 << 62), 1 << 62, (PIECE // 4,), generator=generator, device=self.device)
        self.keys = keys * 2 + 1

    # Weights

    def load(self, weights: float, folder: str | None) -> dict[str, Any]:
        """Allocate a model: a generated one with about this number of weights, or the one in a folder."""
        table: list[Any] = list(shapes(weights))
        self.start = None
        if folder:
            table = json.loads((Path(folder) / "shapes.json").read_text())
            self.start = torch.from_numpy(np.load(Path(folder) / "start.npy"))
        self.model: Model = {
            name: torch.empty(shape, dtype=torch.bfloat16, device=self.device) for name, shape in table
        }
        size = sum(tensor.numel() for tensor in self.model.values())
        return {"weights": size, "tensors": len(self.model), "device": describe(self.device)}

    def begin(self) -> dict[str, Any]:
        """Restore the initial weights."""
        torch.manual_seed(0)
        if self.start is None:
            fill_(self.model)
            return self.check()
        at = 0
        for tensor in self.model.values():
            flat = tensor.view(-1)
            flat.view(torch.int16).copy_(self.start[at : at + flat.numel()])
            at += flat.numel()
        return self.check()

    def step(self, density: float, seed: int) -> dict[str, Any]:
        """Change that share of the source's weights to the next value up or down, as training would choose them."""
        if not self.source:
            return {}
        if density not in self.chances:
            self.chances[density] = chances_of(self.model, density)
        torch.manual_seed(1000 + seed)
        return {"changed": train_(self.model, self.chances[density])}

    def check(self) -> dict[str, Any]:
        """A checksum of all weights, made on the device: words times odd numbers, by tensor and piece, modulo 2^64."""
        keys, sums = self.keys, []
        for tensor in self.model.values():
            bits = tensor.view(-1).view(torch.int16)
            whole = bits.numel() // 4 * 4
            pieces = [*bits[:whole].view(torch.int64).split(PIECE // 4), bits[whole:].long()]
            sums += [(piece * keys[: piece.numel()]).sum() for piece in pieces if piece.numel()]
        return {"checksum": hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()}

    # Methods

    def make(self, way: str) -> dict[str, Any]:
        """Set up a method with the current weights, in place of the previous one."""
        self.way = None
        gc.collect()
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the other rank is on the same device
        self.before_bytes = self._allocated()
        self.way = make(way, self.model, self.source, WAIT_S)
        return {}

    def sync(self, **options: Any) -> dict[str, Any]:
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        told = self.way.sync(**options)
        wait(self.device)
        ended = {"began": began, "done": time.monotonic(), "cpu_s": time.process_time() - used}
        return {**told, **ended, **self._memory()}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _memory(self) -> dict[str, Any]:
        """Bytes on the device in addition to the weights, at this sync's peak and after it; and pinned host bytes."""
        if self.device.type != "cuda":
            return {}
        stats: dict[str, int] = getattr(torch.cuda, "host_memory_stats", dict)()  # of newer versions of torch
        pinned = stats.get("active_bytes.current", 0)
        most = torch.cuda.max_memory_allocated(self.device)
        kept = self._allocated() - self.before_bytes
        return {"peak_bytes": most - self.before_bytes, "kept_bytes": kept, "pinned_bytes": pinned}

    def choices(self, changed: float, links: dict[str, float]) -> dict[str, Any]:
        """The first choice of the cost model for links of the given rates, in bytes a second.

        What it has learnt here is ignored: over gloo its measurements include copies to and from pinned memory.
        """
        if not self.source:
            return {}
        weights = sum(tensor.numel() for tensor in self.model.values())
        load, out = TransferLoad(weights, 2 * weights, changed), {}
        for name, rate in links.items():
            costs = CostModel(byte_s=1 / rate, bucket_weights=self.way.broadcast.costs.bucket_weights)
            if self.device.type == "cuda":
                costs.assume_gpu(copy_speed(self.device), receivers_too=True)
            out[name] = {"method": costs.choose([load])[0]} | {one: costs.seconds(one, load) for one in METHODS}
        return {"choices": out}

    # The link

    def pace(self, bits_per_s: float | None) -> dict[str, Any]:
        return {"paced": pace_sockets(bits_per_s)}


if __name__ == "__main__":
    serve(DeviceRank)
