"""What does a tensor cost on a GPU? As many weights in many small tensors, in few large ones, and as experts.

    python benchmarks/bench_gpu_many.py                            # 20,000 tensors of 5,000 weights, 100 of a million
    python benchmarks/bench_gpu_many.py --keep host --versions 20
    TRITON_INTERPRET=1 python benchmarks/bench_gpu_many.py --tensors 6 --size 40 --few 2 --layers 2 --experts 2 \
        --expert-size 30 --versions 3                              # to its end, without a GPU

Every tensor has memory of its own. Publisher and worker are in one process and on one GPU; the store is in memory.
After every version the worker's weights are compared with the trainer's, bit for bit. The first versions compile
kernels, and build tables of addresses; figures are the least of the later ones:

- publish, sync: milliseconds from the call to the end of all work it launched;
- waits: milliseconds for which publish(wait=False) blocks a trainer;
- check: microseconds a tensor, at each end, to check that the tensors are still at the same addresses;
- host: microseconds a tensor that publish and sync take longer than with few large tensors.

The last line of each case is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_gpu import DEVICE, SPREAD, chances

from pulsesync import Publisher, Subscriber
from pulsesync.device import memory
from pulsesync.state.views import SourceMarks
from pulsesync.store import MemoryStore
from pulsesync.testing.backends import host_as_device

Model = dict[str, torch.Tensor]
EARLY = 3  # versions that compile


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and its milliseconds to the end of all work it launched."""
    memory.wait(DEVICE)
    began = time.perf_counter()
    out = work()
    memory.wait(DEVICE)
    return out, 1e3 * (time.perf_counter() - began)


def shapes(given: argparse.Namespace) -> dict[str, dict[str, int]]:
    """The cases, each as the number of weights of every tensor."""
    total = given.tensors * given.size
    parts = ("gate_proj", "up_proj", "down_proj")
    experts = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight": given.expert_size
        for layer in range(given.layers)
        for expert in range(given.experts)
        for part in parts
    }
    return {
        "few": {f"model.layers.{n}.weight": total // given.few for n in range(given.few)},
        "many": {f"model.layers.{n}.weight": given.size for n in range(given.tensors)},
        "experts": experts,
    }


def make(sizes: dict[str, int]) -> Model:
    torch.manual_seed(0)
    return {name: (torch.randn(size, device=DEVICE) * SPREAD).bfloat16() for name, size in sizes.items()}


def train_(model: Model, chance: torch.Tensor) -> int:
    """Move weights by one unit in the last place, in place; return how many."""
    each = [tensor.view(torch.int16) for tensor in model.values()]
    bits = torch.cat(each)
    moves = torch.rand(bits.shape, device=DEVICE) < chance[((bits & 0x7FFF) >> 7).long()]
    up = torch.rand(bits.shape, device=DEVICE) < 0.5
    by = torch.where(moves, torch.where(up, 1, -1), 0).to(torch.int16)
    torch._foreach_add_(each, by.split([tensor.numel() for tensor in each]))
    return int(moves.sum())


def versions(model: Model, given: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Publish and sync versions one after the other."""
    worker = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    store, chance, changed = MemoryStore(), chances(given.density / 100), 0
    subscriber = Subscriber(store)
    with Publisher(store, codec=given.codec, keep=given.keep) as publisher:
        for version in range(given.versions):
            if version % 2:
                began = time.perf_counter()
                future = publisher.publish(model, wait=False)
                waits_ms = 1e3 * (time.perf_counter() - began)
                report, row = future.result(), {"waits_ms": waits_ms}
            else:
                report, publish_ms = timed(lambda: publisher.publish(model))
                row = {"publish_ms": publish_ms}
            _, row["sync_ms"] = timed(lambda: subscriber.sync(worker))
            same = torch._foreach_sub([t.view(torch.int16) for t in model.values()], [
                t.view(torch.int16) for t in worker.values()
            ])  # fmt: skip
            assert not any(torch.stack([one.any() for one in same]).tolist())
            if version:
                row["bits_a_change"] = 8 * report.payload_bytes / max(changed, 1)
            yield row
            changed = train_(model, chance)


def measure(sizes: dict[str, int], given: argparse.Namespace) -> dict[str, float]:
    model = make(sizes)
    rows = list(versions(model, given))
    late = rows[EARLY:] if len(rows) > EARLY + 1 else rows
    found = {key: min(row[key] for row in late if key in row) for key in ("publish_ms", "waits_ms", "sync_ms")}
    found["bits_a_change"] = rows[-1]["bits_a_change"]
    marks = SourceMarks.of(model)
    assert marks is not None
    found["check_us"] = min(1e3 * timed(lambda: marks.fit(model))[1] for _ in range(5)) / len(model)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=5_000, help="weights of each of the --tensors")
    parser.add_argument("--few", type=int, default=100, help="large tensors, with as many weights in all")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--expert-size", type=int, default=5_000, help="weights of each of an expert's three tensors")
    parser.add_argument("--density", type=float, default=0.8, help="percent of the weights that a version changes")
    parser.add_argument("--versions", type=int, default=12)
    parser.add_argument("--codec", default="auto")
    parser.add_argument("--keep", choices=("device", "host"), default="device")


def main(given: argparse.Namespace) -> None:
    print(torch.cuda.get_device_name() if DEVICE.type == "cuda" else "Triton's interpreter: times mean nothing")
    few: dict[str, float] = {}
    with host_as_device(DEVICE.type == "cpu"):
        for name, sizes in shapes(given).items():
            row = measure(sizes, given)
            few = few or row
            share = sum(sizes.values()) / (given.tensors * given.size)  # scales the time of "few" to these weights
            for end in ("publish", "sync"):
                more_ms = row[f"{end}_ms"] - share * few[f"{end}_ms"]
                row[f"{end}_host_us"] = 1e3 * more_ms / len(sizes)
            rounded = {key: round(value, 3) for key, value in row.items()}
            print(f"{name}: {len(sizes)} tensors, {sum(sizes.values()):,} weights", flush=True)
            print(
                json.dumps({"case": name, "tensors": len(sizes), "weights": sum(sizes.values()), **rounded}), flush=True
            )
