"""What does a sync of a JAX tree cost, compared with a copy of the whole tree by device_get and device_put?

    python -m benchmarks jax --device cpu                    # a small model
    python -m benchmarks jax --device cuda --out FOLDER      # 0.5 B weights; writes FOLDER/jax_cuda_DATE.json

Trainer and worker are in one process and on one device, and the run is in host memory, so no link is measured; the time
that a link would add is computed from the bytes. The trainer has FP32 master weights and takes Adam steps at a learning
rate of 3e-6, with gradients generated as in `pulsesync.testing.AdamUpdates`, which resemble a recorded GRPO run. It
publishes the weights as BF16. After every sync all bits of the worker's tree are compared with the trainer's, on the
device.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory of the same GPU

import jax
import jax.numpy as jnp

from benchmarks.harness.report import json_line, provenance
from benchmarks.harness.report import table as lay_out
from benchmarks.harness.save import write
from benchmarks.harness.timing import timed
from pulsesync.integrations.jax import JaxPublisher, JaxSubscriber
from pulsesync.store import MemoryStore

QUICK = ("--size", "trial", "--versions", "2")
WARM_UP = 3  # versions that compile kernels, and are left out of the medians
# layers, hidden, intermediate, keys and values, vocabulary; those of the large one are Qwen2.5-0.5B's
SIZES = {"trial": (1, 128, 512, 64, 2048), "small": (4, 512, 2048, 128, 16384), "0.5b": (24, 896, 4864, 128, 151936)}


def shapes(size: str) -> dict[str, Any]:
    """The tree of a Llama-like model, with shapes for leaves."""
    layers, hidden, wide, keys, words = SIZES[size]
    layer = {
        "attention": {"q": (hidden, hidden), "k": (hidden, keys), "v": (hidden, keys), "o": (hidden, hidden)},
        "mlp": {"gate": (hidden, wide), "up": (hidden, wide), "down": (wide, hidden)},
        "norms": {"attention": (hidden,), "mlp": (hidden,)},
    }
    return {"embed": (words, hidden), "layers": [layer] * layers, "norm": (hidden,)}


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


@partial(jax.jit, static_argnums=1)
def begin(key: Any, shape: tuple[int, ...]) -> Any:
    """Masters that are BF16 values, mean gradients with heavy tails, and Adam's two moments."""
    keys = jax.random.split(key, 4)
    masters = (0.15 * jax.random.normal(keys[0], shape)).astype(jnp.bfloat16).astype(jnp.float32)
    mean = jnp.prod(jnp.stack([jax.random.normal(k, shape) for k in keys[1:]]), axis=0)
    return {"w": masters, "mean": mean, "m": jnp.zeros(shape), "v": jnp.zeros(shape)}


@partial(jax.jit, donate_argnums=0)
def adam(one: Any, key: Any, step: Any) -> Any:
    gradient = one["mean"] + 0.2 * jax.random.normal(key, one["w"].shape)
    m, v = 0.9 * one["m"] + 0.1 * gradient, 0.999 * one["v"] + 0.001 * gradient**2
    move = (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 0.05)
    return {"w": one["w"] - 3e-6 * move, "mean": one["mean"], "m": m, "v": v}


@jax.jit
def differing(masters: Any, weights: Any) -> Any:
    bits = jax.lax.bitcast_convert_type(masters.astype(jnp.bfloat16), jnp.uint16)
    return (bits != jax.lax.bitcast_convert_type(weights, jnp.uint16)).sum()


class Trainer:
    def __init__(self, size: str) -> None:
        leaves, self.structure = jax.tree.flatten(shapes(size), is_leaf=is_shape)
        self.key = jax.random.key(0)
        self.states = [begin(self.next_key(), shape) for shape in leaves]
        self.steps = 0

    def next_key(self) -> Any:
        self.key, key = jax.random.split(self.key)
        return key

    def step(self) -> None:
        self.steps += 1
        self.states = [adam(one, self.next_key(), float(self.steps)) for one in self.states]
        jax.block_until_ready(self.states)

    def masters(self) -> Any:
        return self.structure.unflatten([one["w"] for one in self.states])


def ready(work: Callable[[Any], Any], tree: Any) -> Any:
    """The result of a call, when all work that it launched has ended."""
    return jax.block_until_ready(work(tree))


def send_whole(half: Any) -> Any:
    """Copy the whole tree to the host and back to the device, into new arrays."""
    leaves = jax.tree.leaves(half)
    host = jax.device_get(leaves)
    if leaves[0].devices() == {jax.devices("cpu")[0]}:
        host = [leaf.copy() for leaf in host]  # there device_get and device_put copy nothing
    return [jax.device_put(leaf, old.sharding) for leaf, old in zip(host, leaves, strict=True)]


to_half = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree))


def run(options: argparse.Namespace) -> dict[str, Any]:
    trainer, store, rows = Trainer(options.size), MemoryStore(), list[dict[str, Any]]()
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), trainer.masters())
    with JaxPublisher(store, cast="BF16") as publisher, JaxSubscriber(store) as subscriber:
        for _ in range(WARM_UP + options.versions):
            sent, publish_s = timed(partial(publisher.publish, trainer.masters(), step=trainer.steps))
            params, sync_s = timed(partial(ready, subscriber.sync, params))
            assert subscriber.report is not None
            wrong = sum(map(int, jax.tree.leaves(jax.tree.map(differing, trainer.masters(), params))))
            assert wrong == 0, f"{wrong} weights differ"
            half = jax.block_until_ready(to_half(trainer.masters()))
            _, whole_s = timed(partial(ready, send_whole, half))
            got = subscriber.report
            rows.append(
                {
                    "version": got.version,
                    "path": got.path,
                    "changed": sent.changed,
                    "bytes": sent.payload_bytes if rows else got.fetched_bytes,
                    "publish_s": publish_s,
                    "blocked_s": sent.blocked_s,
                    "sync_s": sync_s,
                    "prepare_s": got.fetch_s + got.prepare_s,
                    "apply_s": got.apply_s,
                    "whole_s": whole_s,
                }
            )
            print(f"version {got.version}: {rows[-1]['bytes']:,} bytes, {1e3 * sync_s:.1f} ms", flush=True)
            trainer.step()
    return {"rows": rows, "weights": sent.total, "full_bytes": sent.full_bytes}


def median(rows: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows[WARM_UP:]))


def table(found: dict[str, Any]) -> str:
    rows, full = found["rows"], found["full_bytes"]
    size, sync_s, publish_s, whole_s = (median(rows, key) for key in ("bytes", "sync_s", "publish_s", "whole_s"))

    def on_link(gbit: float) -> list[str]:
        ours, whole = size * 8e-9 / gbit + publish_s + sync_s, full * 8e-9 / gbit + whole_s
        return [f"with a link of {gbit:g} Gbit/s (computed)", f"{ours:.3g} s", f"{whole:.3g} s"]

    cells = [
        ["weights changed", f"{median(rows, 'changed') / found['weights']:.2%}", ""],
        ["bytes of a version", f"{size:,.0f}", f"{full:,}"],
        ["pause of the worker", "none", "none"],
        ["publish: compared, coded and stored", f"{1e3 * publish_s:.1f} ms", ""],
        ["sync: a new tree", f"{1e3 * sync_s:.1f} ms", ""],
        ["… of which fetched, decoded, applied to the copy", f"{1e3 * median(rows, 'prepare_s'):.1f} ms", ""],
        ["… of which copied into new arrays", f"{1e3 * median(rows, 'apply_s'):.1f} ms", ""],
        ["device_get and device_put", "", f"{1e3 * whole_s:.1f} ms"],
        *map(on_link, (10, 1, 0.1)),
        ["first version: all weights", f"{rows[0]['bytes']:,} bytes, {rows[0]['sync_s']:.2f} s", ""],
    ]
    title = f"{found['weights'] / 1e6:.1f} M weights, medians of {len(rows) - WARM_UP}"
    return f"\n{lay_out([title, 'pulsesync', 'whole tree'], cells)}\n"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=SIZES, help="default: small for a CPU, 0.5b for a GPU")
    parser.add_argument("--versions", type=int, default=10, help="versions that are measured, after the warm-up")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")


def main(given: argparse.Namespace) -> None:
    given.size = given.size or {"cpu": "small", "cuda": "0.5b"}[given.device]
    device = jax.devices({"cpu": "cpu", "cuda": "gpu"}[given.device])[0]
    with jax.default_device(device):
        found = run(given)
    found |= {"bench": "jax", "device": device.device_kind, "size": given.size, **provenance("jax")}
    if given.device == "cuda":
        import torch

        memory = {"torch_peak_bytes": torch.cuda.max_memory_allocated(), "jax_memory": device.memory_stats()}
        found |= {"torch": torch.__version__, **memory}
    print(table(found))
    print(json_line(found))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        write(given.out / f"jax_{given.device}_{found['date']}.json", [found])
