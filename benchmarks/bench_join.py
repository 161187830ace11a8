"""What does it cost to write an anchor and to join from one, and how long does a joiner take on a link?

    python benchmarks/bench_join.py                              # 40 M weights on this machine: a minute on 2 cores
    python benchmarks/bench_join.py --links 1 10 --model 135M    # and over links of 1 and 10 Gbit/s
    python benchmarks/bench_join.py --links 1 10 --model 1.5B --rounds 1 --folder /tmp   # 9 GB of memory, 8 of disk
    PYTHONPATH=/other/checkout/src python benchmarks/bench_join.py   # the same with another commit

CPU seconds are those of all threads of the process: the smallest of several rounds, which other programs disturb least.
For comparison, the report gives the time of hashing alone. A link is a store that limits the bytes a second to the
link's rate. The plain copy fetches a safetensors file through the same store, with the same number of threads, into the
memory of the tensors, and verifies nothing. Every process that joins recomputes the digest of the weights that it
received.
"""

import argparse
import ctypes
import gc
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import pulsesync
from pulsesync import Publisher, Subscriber, warm_up
from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format.manifest import Manifest
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.run.spool import Outbox
from pulsesync.state.host import HostState
from pulsesync.store import LocalStore, MemoryStore, Store, ThrottledStore

GB = 1e9
Shapes = dict[str, tuple[int, ...]]
PIECE = 1 << 25  # bytes of a request of the plain copy
FILE = "model.safetensors"


# -- models --------------------------------------------------------------------------------------------------------


def transformer(vocabulary: int, width: int, layers: int, heads: int, inner: int) -> Shapes:
    """The tensors of a decoder with grouped-query attention and tied embeddings."""
    shapes: Shapes = {"embed": (vocabulary, width), "norm": (width,)}
    for n in range(layers):
        of_layer: Shapes = {"q": (width, width), "k": (heads, width), "v": (heads, width), "o": (width, width)}
        of_layer |= {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        of_layer |= {"norm_1": (width,), "norm_2": (width,)}
        shapes |= {f"layers.{n}.{name}": shape for name, shape in of_layer.items()}
    return shapes


MODELS: dict[str, Shapes] = {
    "40M": {f"layers.{n}.w": (2048, 1024) for n in range(19)},
    "135M": transformer(49152, 576, 30, 192, 1536),
    "1.5B": transformer(151936, 1536, 28, 256, 8960),
}


def new_weights(shapes: Shapes) -> dict[str, np.ndarray]:
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


def zeros(shapes: Shapes) -> dict[str, np.ndarray]:
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
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_mb("VmRSS")
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    took = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    return {**took, "peak_mb": memory_mb("VmHWM") - before}


def memory_mb(field: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1e3


def smallest(rounds: Iterator[dict[str, float]]) -> dict[str, float]:
    """The smallest value of each figure over all rounds."""
    found = list(rounds)
    return {name: min(one[name] for one in found) for name in found[0]}


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


def choices() -> list[str]:
    """The codecs with which this commit can write anchors."""
    return ["dense", "raw"] if "anchor_codec" in inspect.signature(Publisher).parameters else ["dense"]


def write_once(state: HostState, store: Store, codec: str) -> dict[str, float]:
    """Write an anchor of a state, from a snapshot to the store."""
    record = Manifest("0" * 32, 0, 0, 0, 0, None, state.layout.id, (), state.digest, None, 0)
    options: dict[str, Any] = {}
    if len(choices()) > 1:
        from pulsesync.publish.costs import AnchorCosts  # an earlier commit does not have it

        options["costs"] = AnchorCosts(codec)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as executor:
        writer = AnchorWriter(store, Outbox(Path(folder)), lambda _: b"", executor, lambda: None, **options)

        def write() -> None:
            writer.begin(state.snapshot(), record, state.layout.tiles)
            writer.wait()

        return timed(write)


def published(weights: dict[str, np.ndarray], store: Store, codec: str) -> Store:
    options: dict[str, Any] = {"anchor_codec": codec} if len(choices()) > 1 else {}
    with Publisher(store, **options) as publisher:
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
    state = HostState(layout, {name: bits.reshape(-1) for name, bits in weights.items()}, {})
    out: dict[str, Any] = {}
    for codec in choices():
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


def save_safetensors(weights: dict[str, np.ndarray], path: Path) -> None:
    table, at = {}, 0
    for name, bits in weights.items():
        table[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    head = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for bits in weights.values():
            file.write(bits.data)


def copy_plain(store: Store, held: dict[str, np.ndarray]) -> None:
    """Fetch a safetensors file into the memory of its tensors, in pieces and in two threads."""
    head = int.from_bytes(store.get(FILE, 0, 8), "little")
    table = json.loads(store.get(FILE, 8, 8 + head))
    jobs = [
        (held[name].reshape(-1).view(np.uint8), 8 + head + row["data_offsets"][0], begin)
        for name, row in table.items()
        for begin in range(0, held[name].nbytes, PIECE)
    ]

    def fetch(job: tuple[np.ndarray, int, int]) -> None:
        tensor, start, begin = job
        end = min(begin + PIECE, tensor.size)
        tensor[begin:end] = np.frombuffer(store.get(FILE, start + begin, start + end), np.uint8)

    with ThreadPoolExecutor(2) as executor:
        list(executor.map(fetch, jobs))


def role(what: str, folder: str, shapes: Shapes, rate: float, codec: str) -> dict[str, float]:
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

    def run(what: str, rate: float = 1.0, codec: str = "dense") -> dict[str, float]:
        command = [sys.executable, __file__, "--model", model, "--role", what, folder, str(rate), codec]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found

    try:
        out: dict[str, Any] = {f"write {codec}": run("write", codec=codec) for codec in choices()}
        for gigabit in gigabits:
            rate = gigabit * 1e9 / 8
            rows = {"plain copy": smallest(run("copy", rate) for _ in range(rounds))}
            for codec in choices():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="40M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--links", type=float, nargs="+", default=[], metavar="GBIT_PER_S")
    parser.add_argument("--folder", help="where files are written while this runs")
    parser.add_argument("--role", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = MODELS[args.model]
    if args.role:
        what, folder, rate, codec = args.role
        print(json.dumps(role(what, folder, shapes, float(rate), codec)))
        return
    print(f"pulsesync from {Path(pulsesync.__file__).parent}, {len(os.sched_getaffinity(0))} cores")
    warm_up()
    if args.links:
        found = measure_links(args.model, args.links, args.rounds, args.folder)
        show_links(args.model, found, size_of(shapes))
    else:
        found = measure_here(shapes, args.rounds)
        show_here(found, size_of(shapes))
    print(json.dumps({"model": args.model, "rounds": args.rounds, "found": found}))


if __name__ == "__main__":
    main()
