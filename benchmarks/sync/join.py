"""What does it cost to write an anchor and to join from one, and how long does a joiner take on a link?

    python -m benchmarks join                              # 40 M weights on this machine: a minute on 2 cores
    python -m benchmarks join --links 1 10 --model 135M    # and over links of 1 and 10 Gbit/s
    python -m benchmarks join --links 1 10 --model 1.5B --rounds 1 --folder /tmp   # 9 GB of memory, 8 of disk
    PYTHONPATH=/other/checkout/src python -m benchmarks join   # the same with another commit

CPU seconds are those of all threads of the process: the smallest of several rounds, which other programs disturb least.
For comparison, the report gives the time of hashing alone. A link is a store that limits the bytes a second to the
link's rate. The plain copy fetches a safetensors file through the same store, with the same number of threads, into the
memory of the tensors, and verifies nothing. Every process that joins recomputes the digest of the weights that it
received.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import pulsesync
from benchmarks.harness.processes import last_line
from benchmarks.harness.report import json_line
from benchmarks.harness.timing import peak, reset_peak, smallest, spent, status
from benchmarks.harness.weights import Shapes, decoder
from pulsesync import Publisher, Subscriber, warm_up
from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format.manifest import Manifest
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.costs import AnchorCosts
from pulsesync.run.spool import Outbox
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import WeightState
from pulsesync.store import LocalStore, MemoryStore, Store, ThrottledStore

Codec = Literal["dense", "raw"]
CODECS: tuple[Codec, ...] = ("dense", "raw")
QUICK = ("--model", "4M", "--rounds", "1")
Weights = dict[str, npt.NDArray[np.uint16]]
GB = 1e9
PIECE = 1 << 25  # bytes of a request of the plain copy
FILE = "model.safetensors"


# -- models --------------------------------------------------------------------------------------------------------


MODELS: dict[str, Shapes] = {
    "4M": {f"layers.{n}.w": (1024, 1024) for n in range(4)},
    "40M": {f"layers.{n}.w": (2048, 1024) for n in range(19)},
    "135M": decoder(576, 30, 1536, 192, 49152),
    "1.5B": decoder(1536, 28, 8960, 256, 151936),
}


def new_weights(shapes: Shapes) -> Weights:
    """BF16 weights, normally distributed, with a different scale in each tensor."""
    rng = np.random.default_rng(0)
    pool = rng.standard_normal(1 << 24, np.float32)
    out = {}
    for n, (name, shape) in enumerate(shapes.items()):
        bits, at = np.empty(int(np.prod(shape)), np.uint16), 0
        while at < bits.size:
            begin = int(rng.integers(pool.size // 2))
            some = pool[begin : begin + bits.size - at] * np.float32(0.01 + 0.005 * (n % 5))
            bits[at : at + some.size] = some.view(np.uint32) >> 16
            at += some.size
        out[name] = bits.reshape(shape)
    return out


def zeros(shapes: Shapes) -> Weights:
    """Memory for the joined weights, with all pages already allocated."""
    out = {name: np.empty(shape, np.uint16) for name, shape in shapes.items()}
    for tensor in out.values():
        tensor.fill(0)
    return out


def size_of(shapes: Shapes) -> int:
    return sum(2 * int(np.prod(shape)) for shape in shapes.values())


# -- measuring -----------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> dict[str, float]:
    """CPU and wall seconds, and peak memory in MB."""
    reset_peak()
    before = status("VmRSS")
    return {**spent(work), "peak_mb": (peak() - before) / 1e6}


def hashing_s(size: int) -> tuple[float, float]:
    """CPU seconds of SHA-256 over `size` bytes, and the bytes a second of one core."""
    data = os.urandom(1 << 24)

    def once() -> dict[str, float]:
        began = time.process_time()
        hashlib.sha256(data)
        return {"s": time.process_time() - began}

    rate = len(data) / smallest(once() for _ in range(9))["s"]
    return size / rate, rate


# -- an anchor on this machine -------------------------------------------------------------------------------------


def write_once(state: WeightState, store: Store, codec: Codec) -> dict[str, float]:
    """Write an anchor of a state, from a snapshot to the store."""
    record = Manifest("0" * 32, 0, 0, 0, 0, None, state.layout.id, (), state.digest, None, 0)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        writer = AnchorWriter(
            store, Outbox(Path(folder)), lambda _: b"", executor, lambda: None, costs=AnchorCosts(codec)
        )

        def write() -> None:
            writer.begin(state.snapshot(), record, state.layout.tiles)
            writer.wait()

        return timed(write)


def published(weights: Weights, store: Store, codec: Codec) -> Store:
    with Publisher(store, anchor_codec=codec) as publisher:
        publisher.publish(weights)
    return store


def joined_once(store: Store, shapes: Shapes, cache: str | None = None) -> dict[str, float]:
    held, subscriber = zeros(shapes), Subscriber(store, cache=cache)
    took = timed(lambda: subscriber.sync(held))
    subscriber.verify()
    return took


def rejoined_once(store: Store, shapes: Shapes, *, all_differ: bool = False) -> dict[str, float]:
    """A worker that already has a version joins from an anchor; its weights are kept until the anchor is verified.

    One weight differs from the anchor, or all of them do. The time to recompute the digest, which finds this, is
    included.
    """
    held, subscriber = zeros(shapes), Subscriber(store)
    subscriber.sync(held)
    for tensor in held.values() if all_differ else [next(iter(held.values())).reshape(-1)[:1]]:
        tensor ^= 1
    took = timed(lambda: subscriber.sync(held, verify=True))
    subscriber.verify()
    return took


def measure_here(shapes: Shapes, rounds: int) -> dict[str, Any]:
    weights = new_weights(shapes)
    layout = layouts.make([TensorSpec(name, "BF16", shape) for name, shape in shapes.items()])
    state = WeightState(HostBackend(layout, {name: bits.reshape(-1) for name, bits in weights.items()}))
    out: dict[str, Any] = {}
    for codec in CODECS:
        store = published(weights, MemoryStore(), codec)
        stored = sum(len(store.get(entry.key)) for entry in store.list("parts/"))
        hashed_s, rate = hashing_s(stored)
        rows = {"write": smallest(write_once(state, MemoryStore(), codec) for _ in range(rounds))}
        rows["join"] = smallest(joined_once(store, shapes) for _ in range(rounds))
        with tempfile.TemporaryDirectory() as folder:
            local = published(weights, LocalStore(folder), codec)
            rows["join from a folder"] = smallest(joined_once(local, shapes) for _ in range(rounds))
            caches = (str(Path(folder) / f"cache-{n}") for n in range(rounds))
            rows["join through a cache"] = smallest(joined_once(local, shapes, cache) for cache in caches)
        rows["over a version, 1 differs"] = smallest(rejoined_once(store, shapes) for _ in range(rounds))
        everywhere = (rejoined_once(store, shapes, all_differ=True) for _ in range(rounds))
        rows["over a version, all do"] = smallest(everywhere)
        out[codec] = {"stored_bytes": stored, "hash_cpu_s": hashed_s, "sha256_bytes_per_s": rate, **rows}
    return out


def show_here(found: dict[str, Any], size: int) -> None:
    cores = len(os.sched_getaffinity(0))
    for codec, rows in found.items():
        bits = 16 * rows["stored_bytes"] / size
        print(f"\n{codec}: {bits:.2f} bits a weight; SHA-256 at {rows['sha256_bytes_per_s'] / GB:.2f} GB/s a core,")
        alone = size / (rows["hash_cpu_s"] / cores) / GB
        print(f"hashing alone {rows['hash_cpu_s']:.3f} CPU s, {alone:.2f} GB/s of weights on {cores} cores")
        print(f"{'':28}{'CPU s':>8}{'wall s':>8}{'GB/s by CPU':>13}{'of hashing':>12}{'by wall':>9}{'MB more':>9}")
        for name, row in rows.items():
            if isinstance(row, dict):
                by_cpu, by_wall = size * cores / row["cpu_s"] / GB, size / row["wall_s"] / GB
                numbers = f"{row['cpu_s']:8.3f}{row['wall_s']:8.3f}{by_cpu:13.2f}{by_cpu / alone:12.0%}{by_wall:9.2f}"
                print(f"{name:28}{numbers}{row['peak_mb']:9.0f}")


# -- over a link ---------------------------------------------------------------------------------------------------


def save_safetensors(weights: Weights, path: Path) -> None:
    table, at = {}, 0
    for name, bits in weights.items():
        table[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    head = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for bits in weights.values():
            file.write(bits.data)


def copy_plain(store: Store, held: Weights) -> None:
    """Fetch a safetensors file into the memory of its tensors, in pieces and in two threads."""
    head = int.from_bytes(store.get(FILE, 0, 8), "little")
    table = json.loads(store.get(FILE, 8, 8 + head))
    jobs = [
        (held[name].reshape(-1).view(np.uint8), 8 + head + row["data_offsets"][0], begin)
        for name, row in table.items()
        for begin in range(0, held[name].nbytes, PIECE)
    ]

    def fetch(job: tuple[npt.NDArray[np.uint8], int, int]) -> None:
        tensor, start, begin = job
        end = min(begin + PIECE, tensor.size)
        tensor[begin:end] = np.frombuffer(store.get(FILE, start + begin, start + end), np.uint8)

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(fetch, jobs))


def role(what: str, folder: str, shapes: Shapes, rate: float, codec: Codec) -> dict[str, float]:
    """One process of the measurement over a link; rate in bytes a second."""
    warm_up()
    if what == "write":
        weights = new_weights(shapes)
        took = timed(lambda: published(weights, LocalStore(Path(folder) / codec), codec))
        if not (Path(folder) / FILE).exists():
            save_safetensors(weights, Path(folder) / FILE)
        return took
    if what == "copy":
        held = zeros(shapes)
        return timed(lambda: copy_plain(ThrottledStore(LocalStore(folder), rate), held))
    return joined_once(ThrottledStore(LocalStore(Path(folder) / codec), rate), shapes)


def measure_links(model: str, gigabits: list[float], rounds: int, within: str | None) -> dict[str, Any]:
    folder = tempfile.mkdtemp(prefix="pulse-join-", dir=within)

    def run(what: str, rate: float = 1.0, codec: Codec = "dense") -> dict[str, float]:
        role = ("--role", what, folder, rate, codec)
        found: dict[str, float] = last_line("benchmarks", "join", "--model", model, *role)
        return found

    try:
        out: dict[str, Any] = {f"write {codec}": run("write", codec=codec) for codec in CODECS}
        for gigabit in gigabits:
            rate = gigabit * 1e9 / 8
            rows = {"plain copy": smallest(run("copy", rate) for _ in range(rounds))}
            for codec in CODECS:
                rows[f"join, {codec}"] = smallest(run("join", rate, codec) for _ in range(rounds))
            out[f"{gigabit:g} Gbit/s"] = rows
        return out
    finally:
        shutil.rmtree(folder)


def show_links(model: str, found: dict[str, Any], size: int) -> None:
    print(f"\n{model}: {size / GB:.2f} GB of weights")
    print(f"{'':28}{'wall s':>8}{'GB/s':>7}{'CPU s':>8}{'MB more':>9}")
    for name, rows in found.items():
        for what, row in {"": rows}.items() if "wall_s" in rows else rows.items():
            label = f"{name} {what}".strip()
            speed = size / row["wall_s"] / GB
            print(f"{label:28}{row['wall_s']:8.2f}{speed:7.2f}{row['cpu_s']:8.2f}{row['peak_mb']:9.0f}")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="40M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--links", type=float, nargs="+", default=[], metavar="GBIT_PER_S")
    parser.add_argument("--folder", help="where files are written while this runs")
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)


def main(given: argparse.Namespace) -> None:
    shapes = MODELS[given.model]
    if given.role:
        what, folder, rate, codec = given.role
        print(json_line(role(what, folder, shapes, float(rate), codec)))
        return
    print(f"pulsesync from {Path(pulsesync.__file__).parent}, {len(os.sched_getaffinity(0))} cores")
    warm_up()
    if given.links:
        found = measure_links(given.model, given.links, given.rounds, given.folder)
        show_links(given.model, found, size_of(shapes))
    else:
        found = measure_here(shapes, given.rounds)
        show_here(found, size_of(shapes))
    print(json_line({"model": given.model, "rounds": given.rounds, "found": found}))
