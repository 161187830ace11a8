"""What a version costs apart from its changes: many tensors, small versions, first steps, large states.

    python -m benchmarks costs --src OLD/src NEW/src          # both, in turns: half an hour
    python -m benchmarks costs --src src --cases many small   # some cases of one of them

Every case runs in a process of its own, with one `src` folder and then with the other, before the next case begins, so
that noise of the machine affects both. Times are those of `publish` and `sync` through a store in memory, the least of
several steps, as wall time and as CPU time of all threads; bytes are those of all objects of a version, its record
included. After every sync the worker's weights are compared with the trainer's, bit for bit, and the benchmark fails if
they differ.

XOR + zstd is the simplest format that one would write: the bytes of (new XOR old), as they are or shuffled by byte,
whichever is smaller, compressed by zstd-1, without names, hashes, signatures or a record.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.processes import last_line
from benchmarks.harness.report import json_line
from benchmarks.harness.timing import spent
from pulsesync import Publisher, Subscriber
from pulsesync.store import MemoryStore

QUICK = ("--cases", "small", "--rounds", "2")
BF16 = np.dtype(ml_dtypes.bfloat16)
SEED, STEPS = 7, 4
TIMES = ("publish_s", "publish_cpu_s", "sync_s", "sync_cpu_s")
Weights = dict[str, np.ndarray[Any, Any]]
Steps = Iterator[Weights]  # the same arrays, changed in place from one to the next


# -- the steps -----------------------------------------------------------------------------------------------------


def normal(shapes: dict[str, tuple[int, ...]], dtype: Any = BF16) -> Weights:
    rng = np.random.default_rng(SEED)
    return {name: np.array(0.02 * rng.standard_normal(shape, np.float32), dtype) for name, shape in shapes.items()}


def some_changed(weights: Weights, share: float) -> Steps:
    """A share of the weights, at random places, changes its last bit."""
    rng = np.random.default_rng(SEED + 1)
    while True:
        yield weights
        for array in weights.values():
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            at = rng.integers(0, bits.size, max(1, round(bits.size * share)))
            bits[at] ^= 1


def all_changed(weights: Weights) -> Steps:
    rng = np.random.default_rng(SEED + 1)
    while True:
        yield weights
        for array in weights.values():
            array[...] = np.array(rng.standard_normal(array.shape), array.dtype)


def noise(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(rng.standard_normal(shape), np.float32)


def first_steps(weights: Weights, rate: float, masters: bool = False) -> Steps:
    """The first steps of Adam from these weights: gradients of either sign, steps of the learning rate at first."""
    rng = np.random.default_rng(SEED + 2)
    exact: Weights = {name: array.astype(np.float32) for name, array in weights.items()}
    scale = {name: noise(rng, array.shape) for name, array in weights.items()}
    first = {name: np.zeros_like(array) for name, array in exact.items()}
    second = {name: np.zeros_like(array) for name, array in exact.items()}
    for step in range(1, 1000):
        yield weights
        for name, array in exact.items():
            gradient = scale[name] + 0.5 * noise(rng, array.shape)
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            towards = first[name] / (1 - 0.9**step) / (np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8)
            array -= (rate * towards).astype(np.float32)
            weights[name][...] = array.astype(weights[name].dtype)


def experts(layers: int = 48, count: int = 128, rows: int = 50, columns: int = 100) -> dict[str, tuple[int, ...]]:
    """An MoE model's names at a small width: 48 layers of 128 experts of three matrices, norms and routers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}.weight": (columns,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes[f"{name}.mlp.gate.weight"] = (count, columns)
        for expert in range(count):
            for matrix in ("down_proj", "gate_proj", "up_proj"):
                shapes[f"{name}.mlp.experts.{expert}.{matrix}.weight"] = (rows, columns)
    return shapes


def sized(millions: int) -> dict[str, tuple[int, ...]]:
    """As many matrices of four million weights as make this many millions."""
    return {f"layers.{n}.w": (2000, 2000) for n in range(millions // 4)}


def zeros_and_more() -> Weights:
    """LoRA: one factor begins as zeros."""
    weights = normal({f"layers.{n}.lora_A": (16, 2048) for n in range(60)})
    return weights | {f"layers.{n}.lora_B": np.zeros((2048, 16), BF16) for n in range(60)}


CASES: dict[str, dict[str, Callable[[], Steps]]] = {
    "many": {
        "100 tensors of 1,000,000 weights, 0.8 %": lambda: some_changed(normal(dict(_named(100, 1_000_000))), 0.008),
        "20,000 tensors of 5,000, 0.8 %": lambda: some_changed(normal(dict(_named(20_000, 5000))), 0.008),
        "20,000 layers of one tensor of 5,000, 0.8 %": lambda: some_changed(
            normal({f"layers.{n}.weight": (5000,) for n in range(20_000)}), 0.008
        ),
        "93 tensors of 1,000,000, 0.8 %": lambda: some_changed(normal(dict(_named(93, 1_000_000))), 0.008),
        "MoE: 48 layers, 128 experts, 18,576 tensors, 0.8 %": lambda: some_changed(normal(experts()), 0.008),
        "1,000 tensors of 5,000, 0.8 %": lambda: some_changed(normal(dict(_named(1000, 5000))), 0.008),
        "5 tensors of 1,000,000, 0.8 %": lambda: some_changed(normal(dict(_named(5, 1_000_000))), 0.008),
        "5,000 tensors of 5,000, 0.8 %": lambda: some_changed(normal(dict(_named(5000, 5000))), 0.008),
        "25 tensors of 1,000,000, 0.8 %": lambda: some_changed(normal(dict(_named(25, 1_000_000))), 0.008),
    },
    "small": {
        "2,000 tensors of 256, 0.8 %": lambda: some_changed(normal(dict(_named(2000, 256))), 0.008),
        "1,000 scalars, all": lambda: all_changed(normal({f"s{n:04}": () for n in range(1000)})),
        "one tensor of 100, all": lambda: all_changed(normal({"w": (100,)})),
        "one tensor of 100, one": lambda: some_changed(normal({"w": (100,)}), 0.008),
    },
    "first": {
        "FP32, Adam at 1e-4": lambda: first_steps(normal(dict(_named(8, 250_000)), np.float32), 1e-4),
        "FP32, Adam at 2e-6": lambda: first_steps(normal(dict(_named(8, 250_000)), np.float32), 2e-6),
        "LoRA in BF16, Adam at 1e-4": lambda: first_steps(zeros_and_more(), 1e-4),
        "BF16, Adam at 2e-6": lambda: first_steps(normal(dict(_named(8, 500_000))), 2e-6),
    },
    "large": {
        f"{millions} M weights, 0.8 %": partial(lambda some: some_changed(normal(sized(some)), 0.008), millions)
        for millions in (40, 132, 264, 500, 1000)
    },
}


def _named(count: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((f"t{n:05}", (size,)) for n in range(count))


# -- one case, in a process of its own -----------------------------------------------------------------------------


class Counted(MemoryStore):
    """A store that counts the bytes that are written to it."""

    written = 0

    def put(self, key: str, data: Any) -> None:
        self.written += len(data)
        super().put(key, data)

    def create(self, key: str, data: Any) -> None:
        self.written += len(data)
        super().create(key, data)


def run_case(group: str, name: str, rounds: int) -> dict[str, Any]:
    store = Counted()
    publisher, subscriber = Publisher(store, anchor_every=0), Subscriber(store)
    steps = CASES[group][name]()
    weights = next(steps)
    publisher.publish(weights)
    publisher.flush()
    worker = {key: array.copy() for key, array in weights.items()}
    subscriber.sync(worker)
    found = []
    for _ in islice(steps, rounds):
        changed = sum(int((_bits(weights[key]) != _bits(worker[key])).sum()) for key in weights)
        plain = xor_zstd(weights, worker) if group != "large" else 0
        before = store.written
        published = spent(lambda: publisher.publish(weights))
        synced = spent(lambda: subscriber.sync(worker))
        if not all(np.array_equal(_bits(weights[key]), _bits(worker[key])) for key in weights):
            raise SystemExit(f"{name}: the worker's weights are not the trainer's")
        hints = len(str(publisher.version))  # of the newest version: an object of a few digits that each version moves
        times = [one[what] for one in (published, synced) for what in ("wall_s", "cpu_s")]
        found.append((store.written - before - hints, changed, plain, *times))
    publisher.close()
    first, rest = found[0], np.array(found, float)
    return {
        "group": group, "case": name, "tensors": len(weights), "weights": sum(a.size for a in weights.values()),
        "weight_bytes": sum(a.nbytes for a in weights.values()), "bytes": first[0], "changed": first[1],
        "xor_zstd_bytes": first[2], "bytes_last": int(rest[-1, 0]), "changed_last": int(rest[-1, 1]),
        **dict(zip(TIMES, rest[:, 3:].min(axis=0).tolist(), strict=True)),
    }  # fmt: skip


def xor_zstd(new: Weights, old: Weights) -> int:
    both = np.concatenate([(_bits(new[key]) ^ _bits(old[key])).reshape(-1) for key in sorted(new)])
    shuffled = np.ascontiguousarray(both.view(np.uint8).reshape(-1, both.itemsize).T)
    packer = zstandard.ZstdCompressor(level=1)
    return min(len(packer.compress(both.tobytes())), len(packer.compress(shuffled.tobytes())))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(f"u{array.itemsize}")


# -- all of them ---------------------------------------------------------------------------------------------------


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--src", nargs="+", default=["src"], help="folders with the package: before, after")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=STEPS)
    parser.add_argument("--plot", type=Path, help="draw the times against the number of tensors and of weights: an SVG")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    if given.one:
        print(json_line(run_case(given.one[0], given.one[1], given.rounds)))
        return
    results = []
    print(HEAD)
    for group in given.cases:
        for name in CASES[group]:
            row = [measure(src, group, name, given.rounds) for src in given.src]
            results.append(row)
            print(line(row), flush=True)
    if given.plot:
        given.plot.write_text(plot(results))
    print(json_line({"src": given.src, "rounds": given.rounds, "results": results}))


def measure(src: str, group: str, name: str, rounds: int) -> dict[str, Any]:
    source = {"PYTHONPATH": str(Path(src).resolve())}
    found: dict[str, Any] = last_line("benchmarks", "costs", "--one", group, name, "--rounds", rounds, env=source)
    return found


HEAD = "| case | publish, s | CPU s | sync, s | CPU s | bytes | bits a change | XOR + zstd |\n|---|" + 7 * "--:|"


def line(row: list[dict[str, Any]]) -> str:
    """A row of a table: every figure before and after."""

    def both(key: str, unit: str, scale: float = 1) -> str:
        return " → ".join(f"{scale * one[key]:{unit}}" for one in row)

    bits = " → ".join(f"{8 * one['bytes'] / one['changed']:.2f}" for one in row)
    return (
        f"| {row[0]['case']} | {both('publish_s', '.3f')} | {both('publish_cpu_s', '.3f')} | {both('sync_s', '.3f')} "
        f"| {both('sync_cpu_s', '.3f')} | {both('bytes', ',')} | {bits} | {row[0]['xor_zstd_bytes']:,} |"
    )


def plot(results: list[list[dict[str, Any]]]) -> str:
    """Time of publish and sync against the weights of a state, before and after."""
    curves = []
    for n, when in enumerate(("before", "after")[: len(results[0])]):
        for key, what in (("publish_s", "publish"), ("sync_s", "sync")):
            points = sorted((row[n]["weights"], row[n][key], True) for row in results if row[n]["group"] == "large")
            curves.append(Curve(f"{what}, {when}", points))
    ticks = {row[0]["weights"]: f"{row[0]['weights'] / 1e6:.0f} M" for row in results if row[0]["group"] == "large"}
    return draw("Time of a version against the weights of the state", "weights", "seconds", curves, ticks)
