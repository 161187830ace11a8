"""What a sync costs on a GPU: diff, encode, decode, apply, digest; over sizes and densities.

    python -m benchmarks gpu                                  # the table of one size and density: 7.6 B, 1 %
    python -m benchmarks gpu --sizes 0.1 1 7.6 30 --densities 0.1 1 10 --json gpu.json
    python -m benchmarks gpu --kernels                        # and where the time goes, kernel by kernel

The weights are normally distributed, with the standard deviation of SmolLM2's. Which of them change follows the shares,
by magnitude, that changed in one step of a recorded GRPO run (0.8 % of all weights), as if enough of these steps were
taken at once to reach the given density. Tensors have the shapes of models of that size, with as many layers as the
size needs. Every time is a median of wall-clock times on an idle GPU, from a call to the end of all work it launched. A
floor is the time to move the bytes that must move, at the copy speed that was measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from pulsesync import Publisher
from pulsesync.core import digest
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference
from pulsesync.device.changes import block_moves, moves
from pulsesync.device.encode import code_piles
from pulsesync.device.state import DeviceState
from pulsesync.format import layout as layouts
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.publish.baseline import baseline_for
from pulsesync.publish.commit import next_record, root_record
from pulsesync.state.sharding import owner_of, share_of
from pulsesync.store import MemoryStore

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPREAD = 0.17  # standard deviation of the weights
FIRST_CLASS = 100  # the exponent of the first share: which part of the weights with an exponent changed in the step
SHARES = [
    1,
    1,
    1,
    1,
    1,
    1,
    1,
    0.9968,
    0.9985,
    0.9935,
    0.989,
    0.9827,
    0.9651,
    0.9335,
    0.8732,
    0.7555,
    0.4633,
    0.3086,
    0.1244,
    0.0156,
    0.0361,
    0.0001,
    0,
    0,
    0,
    0,
    0,
    0,
]
PIECE = 1 << 24  # weights made at a time
LARGE = 16e9  # weights from which the two ends are measured one after the other: both together need too much memory
FAMILIES = [  # up to how many weights; width, inner width, width of keys and values, words: as models of that size have
    (0.2e9, (576, 1536, 192, 49152)),
    (0.9e9, (896, 4864, 128, 151936)),
    (2e9, (2048, 8192, 512, 128256)),
    (5e9, (3072, 8192, 1024, 128256)),
    (12e9, (3584, 18944, 512, 152064)),
    (float("inf"), (5120, 27648, 1024, 152064)),
]


def shapes(weights: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a model of about this size: embeddings, and layers until there are enough weights."""
    hidden, inner, kv, words = next(shape for most, shape in FAMILIES if weights <= most)
    fixed = {"embed": (words, hidden), "head": (words, hidden), "norm": (hidden,)}
    layer = {
        "q": (hidden, hidden),
        "q.bias": (hidden,),
        "k": (kv, hidden),
        "k.bias": (kv,),
        "v": (kv, hidden),
        "v.bias": (kv,),
        "o": (hidden, hidden),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    yield from fixed.items()
    count = sum(int(np.prod(shape)) for shape in fixed.values())
    per_layer = sum(int(np.prod(shape)) for shape in layer.values())
    for n in range(max(1, round((weights - count) / per_layer))):
        yield from ((f"layers.{n}.{name}", shape) for name, shape in layer.items())


@dataclass
class Model:
    """A state and the one after it."""

    old: dict[str, torch.Tensor]
    new: dict[str, torch.Tensor]

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.old.values())


def chances(density: float, sample: torch.Tensor | None = None) -> torch.Tensor:
    """For each exponent, the probability that a weight changes: scaled from the recorded step to the given density.

    The density is that of `sample`, BF16 weights, on whose device the result is; the default is a sample of the weights
    that are generated here.
    """
    if sample is None:
        sample = (torch.randn(1 << 22, device=DEVICE) * SPREAD).bfloat16()
    classes = ((sample.view(torch.int16) & 0x7FFF) >> 7).long()
    recorded = np.interp(np.arange(256) - FIRST_CLASS, np.arange(len(SHARES)), SHARES, left=1.0, right=0.0)
    stays = torch.tensor(1 - recorded, dtype=torch.float64, device=sample.device)
    low, high = 1e-3, 1e6
    for _ in range(60):
        steps = (low * high) ** 0.5
        if (1 - stays**steps)[classes].mean() < density:
            low = steps
        else:
            high = steps
    return (1 - stays**high).float()


def make(weights: float, density: float) -> Model:
    torch.manual_seed(0)
    chance = chances(density)
    old = {name: torch.empty(shape, dtype=torch.bfloat16, device=DEVICE) for name, shape in shapes(weights)}
    new = {}
    for name, tensor in old.items():
        after = torch.empty_like(tensor)
        flat, then = tensor.view(-1), after.view(-1).view(torch.int16)
        for begin in range(0, flat.numel(), PIECE):
            piece = flat[begin : begin + PIECE]
            piece.copy_(torch.randn(piece.numel(), device=DEVICE) * SPREAD)
            bits = piece.view(torch.int16)
            moves_ = torch.rand(piece.numel(), device=DEVICE) < chance[((bits & 0x7FFF) >> 7).long()]
            step = torch.where(torch.rand(piece.numel(), device=DEVICE) < 0.5, 1, -1).to(torch.int16)
            then[begin : begin + PIECE] = torch.where(moves_, bits + step, bits)
        new[name] = after
    return Model(old, new)


@dataclass
class Row:
    """Milliseconds, and bytes."""

    weights: int
    density: float
    hot: float
    patch_bytes: int
    ms: dict[str, float] = field(default_factory=dict)
    gigabytes: dict[str, float] = field(default_factory=dict)  # peak, in addition to the weights and the base


def timed(work: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds from a call to the end of all work it launched."""
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
        del result
    return statistics.median(times)


def peak(work: Callable[[], object]) -> float:
    """The peak of the gigabytes that a call allocates, in addition to what was allocated before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


class Bench:
    """One model, with the state of a trainer and that of a worker."""

    def __init__(self, model: Model) -> None:
        self.model = model
        baseline = baseline_for(model.old, "device")
        assert isinstance(baseline, DeviceBaseline)
        self.baseline = baseline
        self.shards = baseline.read(model.new, {})
        layout = layouts.make(self.shards.tensors, self.shards.ties)
        self.share = share_of(layout, owner_of(layout, [self.shards.windows]), 0, self.shards)
        self.state = DeviceState.attach(model.old, layout)  # the base is the old model itself, and not a third copy
        self.last = root_record(None, 0, layout.id, self.state.digest, None, ())

    def compare(self) -> DeviceDifference:
        return self.baseline.compare(self.share, self.state, self.shards, "context", self.last)

    def encode(self, codec: str) -> object:
        return self.compare().encode(self.last, codec)

    def record(self, codec: str) -> tuple[Manifest, Body, DeviceDifference]:
        """The next version, as a worker gets it."""
        difference = self.compare()
        part, transition = difference.encode(self.last, codec)
        self.data = part.data
        history = transition.history.digest() if transition.history.tiles else None
        state = digest.state_digest(self.state.layout.tables, transition.sums.values())
        manifest = next_record(self.last, 1, (PartRef(part.id, len(part.data)),), state, history, None, ())
        return manifest, Body.of(self.data, self.state.layout), difference


def measure(weights: float, density: float) -> Row:
    model = make(weights, density)
    bench = Bench(model)
    state, layout = bench.state, bench.state.layout
    difference = bench.compare()
    changed = sum(run.count for run in difference.runs)
    row = Row(model.size, changed / model.size, 0.0, 0)
    some = max(model.old.values(), key=lambda tensor: tensor.numel())
    speed = 2 * some.numel() * 2 / timed(lambda: some.clone())  # bytes a millisecond, read and written
    row.ms["copy of all weights (floor of a diff)"] = model.size * 4 / speed
    row.ms["read of all weights (floor of a recount)"] = model.size * 2 / speed
    row.ms["diff + compaction"] = timed(bench.compare)
    for codec in ("context", "history"):
        row.ms[f"diff + {codec} encode + patch on the host"] = timed(partial(bench.encode, codec))
        manifest, body, difference = bench.record(codec)
        if codec == "context":
            row.patch_bytes = len(bench.data)
            row.gigabytes["diff + encode"] = peak(partial(bench.encode, "context"))
            row.gigabytes["decode"] = peak(partial(state.prepare, manifest, [body]))
        back = state.commit(state.prepare(manifest, [Body.of(bench.data, layout)]))
        for name, tensor in model.new.items():
            assert torch.equal(model.old[name].view(torch.int16), tensor.view(torch.int16)), name
        state.commit(back)
        times, applies = [], []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            transition = state.prepare(manifest, [Body.of(bench.data, layout)])
            prepared = time.perf_counter()
            back = state.commit(transition)
            torch.cuda.synchronize()
            ended = time.perf_counter()
            times.append(1e3 * (ended - began))
            applies.append(1e3 * (ended - prepared))
            state.commit(back)
        row.ms[f"{codec} decode + apply with undo log"] = statistics.median(times)
        row.ms[f"of it the pause, {codec}"] = statistics.median(applies)
    row.ms["incremental digest"] = timed(lambda: moves(block_moves(difference.runs)))
    row.ms["full digest recount"] = timed(state.count)
    row.hot = hot_share(difference)
    return row


def measure_large(weights: float, density: float) -> Row:
    """The same for a model of which only two copies fit on the GPU: publishing is measured first, and then syncing."""
    model = make(weights, density)
    bench = Bench(model)
    state, size = bench.state, model.size
    changed = sum(run.count for run in bench.compare().runs)
    row = Row(size, changed / size, 0.0, 0)
    row.ms["diff + compaction"] = timed(bench.compare, 3)
    for codec in ("context", "history"):
        row.ms[f"diff + {codec} encode + patch on the host"] = timed(partial(bench.encode, codec), 3)
        row.gigabytes[f"diff + {codec} encode"] = peak(partial(bench.encode, codec))
    parts = {}
    for codec in ("context", "history"):
        manifest, _, _ = bench.record(codec)
        parts[codec] = manifest, bench.data
    row.patch_bytes = len(parts["context"][1])
    model.new.clear()
    del bench
    torch.cuda.empty_cache()
    for codec, (manifest, data) in parts.items():
        row.gigabytes[f"{codec} decode + apply"] = peak(partial(sync_and_undo, state, manifest, data))
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            back = state.commit(state.prepare(manifest, [Body.of(data, state.layout)]))
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
            assert state.recount() == manifest.digest
            state.commit(back)
        row.ms[f"{codec} decode + apply with undo log"] = statistics.median(times)
    row.ms["full digest recount"] = timed(state.count, 3)
    return row


def sync_and_undo(state: DeviceState, manifest: Manifest, data: bytes) -> None:
    state.commit(state.commit(state.prepare(manifest, [Body.of(data, state.layout)])))


def hot_share(difference: DeviceDifference) -> float:
    """The share of the weights that `context` codes as decisions."""
    hot = total = 0
    for run in difference.runs:
        coded = code_piles([(run, run.pile.locate(difference.state.tensors))], None, 0)
        hot += int(coded.hot[run.pile].counts.sum())
        total += int(run.pile.host_sizes.sum())
    return hot / max(total, 1)


def products(busy_ms: float) -> Callable[[], None]:
    """Matrix products that keep the GPU busy for about `busy_ms`, as a forward and backward pass do."""
    a, b, out = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    count = max(1, round(busy_ms / timed(lambda: torch.mm(a, b, out=out))))

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return work


def held(weights: float, density: float, way: str, busy_ms: float) -> dict[str, float]:
    """How long publish(wait=False) blocks a trainer, and how long it takes to encode a version in the background.

    The weights stay at their addresses and change in place, as a trainer's do; the store is in memory. With
    "host+hook", every publish is followed by work on the GPU and then by an optimizer's step, which changes nothing;
    the time that the step waits is added to that of publish.
    """
    keep, _, hook = way.partition("+")
    model = make(weights, density)
    for name, tensor in model.new.items():
        tensor.view(torch.int16).bitwise_xor_(model.old[name].view(torch.int16))  # from one state to the other
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=DEVICE))], lr=0.0)
    work = products(busy_ms)
    alone = timed(work)
    before = torch.cuda.memory_allocated()
    found: dict[str, list[float]] = {}
    with Publisher(MemoryStore(), keep=keep) as publisher:
        if hook:
            publisher.hold(optimizer)
        publisher.publish(model.old)
        kept = (torch.cuda.memory_allocated() - before) / 1e9
        torch.cuda.reset_peak_memory_stats()
        for n in range(7):
            for name, tensor in model.old.items():
                tensor.view(torch.int16).bitwise_xor_(model.new[name].view(torch.int16))
            torch.cuda.synchronize()
            began = time.perf_counter()
            future = publisher.publish(model.old, step=n, wait=False)
            published = worked = time.perf_counter()
            if hook:
                work()
                torch.cuda.current_stream().synchronize()
                worked = time.perf_counter()
                optimizer.step()
            stepped = time.perf_counter()
            report = future.result()
            ms = {"trainer blocked": published - began + stepped - worked, "encoded in the background": report.encode_s}
            if hook:
                ms |= {"of it publish": published - began, "of it the step": stepped - worked}
                ms |= {"work meanwhile": worked - published, "work alone": alone / 1e3}
            for name, seconds in ms.items():
                found.setdefault(f"{name}, ms", []).append(1e3 * seconds)
        most = (torch.cuda.max_memory_allocated() - before) / 1e9
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    return {**medians, "kept on the GPU, GB": kept, "at the most, GB": most}


def kernels(weights: float, density: float) -> str:
    """Where the time goes: kernels of one encode and one decode, by the profiler."""
    from torch.profiler import ProfilerActivity, profile

    bench = Bench(make(weights, density))
    manifest, _, _ = bench.record("context")

    def all_of_it() -> None:
        encoded = bench.compare().encode(bench.last, "context")
        state = bench.state
        state.commit(state.commit(state.prepare(manifest, [Body.of(encoded[0].data, state.layout)])))
        state.count()

    all_of_it()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        all_of_it()
        torch.cuda.synchronize()
    return str(found.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=48))


LINES = {  # the functions to time, by module; where one calls another, the time of the inner one counts for both
    "device.baseline": "_compare code_piles _diffs moves",
    "device.encode": "begin_moves find_hot _choose_sizes _count_rows _launch build_cold build_many _packed to_host",
    "device.encode._PileCoder": "_count_classes choose_cuts count _decide _build_cold write",
    "device.hot": "_begin _by_tile",
    "device.state": "find_hot begin_advance begin_moves moves",
    "device.decode": "open_part decode_coded find_hot parse_streams_of streams_of _upload parse_cold _begin_cold"
    " to_host",
    "device.decode._StreamDecoder": "__init__ begin",
    "format.patch": "finish choose _assemble",
    "format.container": "build open_part",
    "format.tables": "normalise choose_cuts choose_from",
}


def lines(weights: float, density: float, codec: str) -> str:
    """Where the host's time goes: median milliseconds of functions in seven encodes and decodes, and how often each."""
    import functools
    import importlib

    spent: dict[str, list[float]] = {}

    def told(name: str, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def call(*args: object, **options: object) -> object:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent.setdefault(name, []).append(1e3 * (time.perf_counter() - began))

        return call

    bench = Bench(make(weights, density))
    state, layout = bench.state, bench.state.layout
    if codec == "history":  # measure the second patch of an epoch: the first one has no history
        manifest, body, _ = bench.record(codec)
        state.commit(state.prepare(manifest, [body]))
        bench.last = manifest
        bench.shards = bench.baseline.read(make(weights, density).old, {})
    manifest, _, _ = bench.record(codec)
    for module, names in LINES.items():
        at, _, inside = module.partition("._")
        loaded = importlib.import_module(f"pulsesync.{at}")
        loaded = getattr(loaded, f"_{inside}") if inside else loaded
        for name in names.split():
            setattr(loaded, name, told(f"{module}.{name}", getattr(loaded, name)))
    out = []
    for what in ("encode", "decode and commit"):
        walls = []
        for n in range(9):
            if n == 2:  # warm
                spent.clear()
                walls.clear()
            torch.cuda.synchronize()
            began = time.perf_counter()
            if what == "encode":
                bench.encode(codec)
            else:
                back = state.commit(state.prepare(manifest, [Body.of(bench.data, layout)]))
            torch.cuda.synchronize()
            walls.append(1e3 * (time.perf_counter() - began))
            if what != "encode":
                state.commit(back)
        out.append(f"{what}, {codec}: {statistics.median(walls):.2f} ms")
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
            out.append(f"  {statistics.median(times):8.2f} ms  {len(times) / 7:5.1f} ×  {name}")
    return "\n".join(out)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=float, nargs="+", default=[7.6], help="billions of weights")
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0], help="percent of the weights that change")
    ways = ["device", "host", "host+hook"]
    parser.add_argument("--held", nargs="*", choices=ways, default=[], help="also time publishes with this keep")
    parser.add_argument("--busy", type=float, default=400, help="ms of matrix products after each publish of host+hook")
    parser.add_argument("--kernels", action="store_true", help="profile one encode and decode, first size and density")
    parser.add_argument("--lines", nargs="*", choices=["context", "history"], default=[], help="time host functions")
    parser.add_argument("--json", type=Path)


def main(given: argparse.Namespace) -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    rows = []
    for size in given.sizes:
        for density in given.densities:
            row = (measure_large if 1e9 * size > LARGE else measure)(1e9 * size, density / 100)
            rows.append(row)
            print(json.dumps(asdict(row)), flush=True)
            torch.cuda.empty_cache()
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    for way in given.held:
        print(way, json.dumps(held(1e9 * given.sizes[0], given.densities[0] / 100, way, given.busy)), flush=True)
    for codec in given.lines:
        print(lines(1e9 * given.sizes[0], given.densities[0] / 100, codec))
    if given.kernels:
        print(kernels(1e9 * given.sizes[0], given.densities[0] / 100))
