"""The processes of cluster.py with --device: a source with new weights, and a receiver.

    python benchmarks/cluster_gpu_roles.py '{"rank": 0, "store": "FILE", "device": "cuda"}'    # both ranks; gloo

Each process reads JSON lines, answers with JSON lines, and ends when its standard input does. Both generate the same
weights from the same seed; then the source's weights change step by step, and the receiver's follow only by syncs.
"""

import gc
import hashlib
import json
import os
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from bench_gpu import PIECE, SPREAD, chances, shapes
from cluster_gpu_ways import finish, make
from benchmarks.harness.links import pace_sockets

from pulsesync.device.memory import copy_speed
from pulsesync.group.cost_model import METHODS, CostModel, TransferLoad
from pulsesync.testing.backends import host_as_device

WAIT_S = 150  # for the other rank, at each message
SMALLEST = 6e7  # weights of a model that gpu.py has shapes for
SAMPLED = 1 << 22  # weights from which the probabilities of changes are estimated


def chances_of(model: dict[str, torch.Tensor], density: float) -> torch.Tensor:
    """For each exponent, the probability that a weight changes; zeros, which have no next value, never do."""
    size = sum(tensor.numel() for tensor in model.values())
    every = size // SAMPLED | 1  # odd: quantised checkpoints have blocks of 32 weights
    sample = torch.cat([tensor.view(-1)[::every] for tensor in model.values()])
    others = sample[(sample.view(torch.int16) & 0x7FFF) >= 0x80]
    out = chances(density * sample.numel() / others.numel(), others)
    out[0] = 0.0
    return out


def change_(model: dict[str, torch.Tensor], chance: torch.Tensor, seed: int) -> int:
    """Change weights to the next value up or down, as training would choose them; return how many."""
    torch.manual_seed(seed)
    changed = torch.zeros((), dtype=torch.int64, device=chance.device)
    for tensor in model.values():
        for bits in tensor.view(-1).view(torch.int16).split(PIECE):
            p = chance[((bits & 0x7FFF) >> 7).long()]
            drawn = torch.rand(bits.numel(), device=bits.device)
            moves, up = drawn < p, drawn < p / 2
            changed += moves.sum()
            bits += up.to(torch.int16) * 2 - moves.to(torch.int16)
    return int(changed)


class GpuRole:
    """One of the two processes."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.source, self.device = given["rank"] == 0, torch.device(given["device"])
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # two ranks on few cores: torch's threads would wait for each other while spinning
        store = dist.FileStore(given["store"], 2)
        wait = timedelta(seconds=WAIT_S)
        dist.init_process_group("gloo", store=store, rank=given["rank"], world_size=2, timeout=wait)
        dist.barrier()
        self.way: Any = None
        self.chances: dict[float, torch.Tensor] = {}
        generator = torch.Generator(self.device).manual_seed(7)
        keys = torch.randint(-(1 << 62), 1 << 62, (PIECE // 4,), generator=generator, device=self.device)
        self.keys = keys * 2 + 1

    # Weights

    def load(self, weights: float, folder: str | None) -> dict[str, Any]:
        """Allocate a model: a generated one with about this number of weights, or the one in a folder."""
        table: list[Any] = list(shapes(weights)) if weights > SMALLEST else small_shapes(int(weights))
        self.start = None
        if folder:
            table = json.loads((Path(folder) / "shapes.json").read_text())
            self.start = torch.from_numpy(np.load(Path(folder) / "start.npy"))
        self.model = {name: torch.empty(shape, dtype=torch.bfloat16, device=self.device) for name, shape in table}
        size = sum(tensor.numel() for tensor in self.model.values())
        return {"weights": size, "tensors": len(self.model), "device": describe(self.device)}

    def begin(self) -> dict[str, Any]:
        """Restore the initial weights."""
        torch.manual_seed(0)
        at = 0
        for tensor in self.model.values():
            flat = tensor.view(-1)
            if self.start is not None:
                flat.view(torch.int16).copy_(self.start[at : at + flat.numel()])
                at += flat.numel()
                continue
            for piece in flat.split(PIECE):
                piece.copy_(torch.randn(piece.numel(), device=self.device) * SPREAD)
        return self.check()

    def step(self, density: float, seed: int) -> dict[str, Any]:
        """Change that share of the source's weights to the next value up or down, as training would choose them."""
        if not self.source:
            return {}
        if density not in self.chances:
            self.chances[density] = chances_of(self.model, density)
        return {"changed": change_(self.model, self.chances[density], 1000 + seed)}

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
        finish(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the other rank is on the same device
        self.before_bytes = self._allocated()
        self.way = make(way, self.model, self.source, WAIT_S)
        return {}

    def sync(self, **options: Any) -> dict[str, Any]:
        finish(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.barrier()
        began, used = time.monotonic(), time.process_time()
        told = self.way.sync(**options)
        finish(self.device)
        ended = {"began": began, "done": time.monotonic(), "cpu_s": time.process_time() - used}
        return {**told, **ended, **self._memory()}

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _memory(self) -> dict[str, Any]:
        """Bytes on the device in addition to the weights, at this sync's peak and after it; and pinned host bytes."""
        if self.device.type != "cuda":
            return {}
        stats = getattr(torch.cuda, "host_memory_stats", dict)()  # of newer versions of torch
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

    def probe(self, size_bytes: int) -> dict[str, Any]:
        """Time one broadcast of the given number of bytes, to measure the rate of the link."""
        data = torch.zeros(size_bytes, dtype=torch.uint8)
        dist.barrier()
        began = time.monotonic()
        dist.broadcast(data, 0)
        return {"began": began, "done": time.monotonic()}


def small_shapes(weights: int) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors for a trial, one of them of an odd size; no model has so few weights."""
    wide = weights // 8 // 64
    return [("odd", (weights - 8 * wide * 64 + 65,)), *((f"layers.{n}", (wide - (n == 0), 64)) for n in range(8))]


def describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory"


def serve(given: dict[str, Any]) -> None:
    """Do what standard input asks for, until it ends."""
    role = GpuRole(given)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(role, asked.pop("do"))(**asked)), flush=True)


def main(given: argparse.Namespace) -> None:
    given = json.loads(sys.argv[1])
    failed = False
    try:
        with host_as_device() if given.get("interpreted") else nullcontext():
            serve(given)
    except Exception:  # noqa: BLE001 - any error is printed here, and the other rank gets an error too
        traceback.print_exc()
        failed = True
    os._exit(failed)  # destroying the group would wait for the other
