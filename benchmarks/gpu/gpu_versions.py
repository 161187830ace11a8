"""How long does each version of a run take on a GPU, one after the other, and how many kernels are compiled for it?

    python benchmarks/bench_gpu_versions.py                                  # 135 M weights, 65 versions: two epochs
    python benchmarks/bench_gpu_versions.py --weights 1e9 --versions 12 --keep host

Triton begins with an empty cache, and its own hook counts what it compiles. Publisher and worker are in one process and
on one GPU. The density goes up and down between 0.05 % and 20 %; which weights change follows a recorded GRPO run (see
gpu.py). After every version the worker's weights are compared with the trainer's, bit for bit.
"""

import argparse
import os
import tempfile
from typing import Any

import torch
from bench_gpu import DEVICE, SPREAD, chances, shapes
from triton import knobs

from pulsesync import Publisher, Subscriber
from pulsesync.store import MemoryStore

DENSITIES = [0.0005 * 400 ** (step * 5 % 8 / 7) for step in range(8)]
Model = dict[str, torch.Tensor]


def train_(model: Model, chance: torch.Tensor) -> None:
    """Move weights by one unit in the last place, in place, each with the probability for its magnitude."""
    for weights in model.values():
        bits = weights.view(torch.int16)
        moves = torch.rand(bits.shape, device=DEVICE) < chance[((bits & 0x7FFF) >> 7).long()]
        up = torch.rand(bits.shape, device=DEVICE) < 0.5
        bits += torch.where(moves, torch.where(up, 1, -1), 0).to(torch.int16)


def run(options: argparse.Namespace) -> None:
    compiled: list[str] = []

    def hook(*, fn: Any, **_: Any) -> None:
        compiled.append(fn.name)

    knobs.runtime.jit_post_compile_hook = hook
    torch.manual_seed(0)
    model = {name: (torch.randn(shape, device=DEVICE) * SPREAD).bfloat16() for name, shape in shapes(options.weights)}
    by_density = [chances(density) for density in DENSITIES]
    worker = {name: torch.zeros_like(weights) for name, weights in model.items()}
    store, late = MemoryStore(), 0
    print("version  changed  encode ms  prepare ms  apply ms  compiled to publish, to sync", flush=True)
    subscriber = Subscriber(store)
    with Publisher(store, keep=options.keep) as publisher:
        for version in range(options.versions):
            before = len(compiled)
            sent = publisher.publish(model)
            encoding = len(compiled)
            got = subscriber.sync(worker)
            new = [sorted(compiled[begin:end]) for begin, end in ((before, encoding), (encoding, len(compiled)))]
            late += sum(map(len, new)) if version > 2 else 0
            assert all(torch.equal(model[name].view(torch.int16), worker[name].view(torch.int16)) for name in model)
            encode_ms, prepare_ms, apply_ms = (1e3 * s for s in (sent.encode_s, got.prepare_s, got.apply_s))
            print(
                f"{version:7}  {sent.density:7.2%}  {encode_ms:9.1f}  {prepare_ms:10.1f}  {apply_ms:8.1f}  "
                f"{len(new[0])}, {len(new[1])} {' '.join(new[0] + new[1])}",
                flush=True,
            )
            train_(model, by_density[version % len(by_density)])
    print(f"{len(compiled)} kernels were compiled, {late} of them after the third version.")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=135e6)
    parser.add_argument("--versions", type=int, default=65)
    parser.add_argument("--keep", choices=["device", "host"], default="device", help="where the publisher's base is")


def main(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="pulse-triton-") as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        run(given)
