"""What a sync costs on a GPU: diff, encode, decode, apply, digest; over sizes and densities.

    python -m benchmarks gpu                                  # the table of one size and density: 7.6 B, 1 %
    python -m benchmarks gpu --sizes 0.1 1 7.6 30 --densities 0.1 1 10 --json gpu.json
    python -m benchmarks gpu --kernels                        # and where the time goes, kernel by kernel
    python -m benchmarks gpu --others --json others.json      # next to full weights and to other codecs (others.py)

Tensors have the shapes of models of that size, with as many layers as the size needs; harness/device.py says which
weights change. Every time is a median of wall-clock times on an idle GPU, from a call to the end of all work it
launched. A floor is the time to move the bytes that must move, at the copy speed that was measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu import others, profile
from benchmarks.harness.device import (
    DEVICE,
    Pair,
    allocated,
    as_device,
    empty_cache,
    equal,
    make_pair,
    median_ms,
    name_of,
    need_gpu,
    peak_gb,
    peak_since,
    reset_peak,
    timed_ms,
    wait,
)
from pulsesync import Publisher
from pulsesync.core import digest
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference
from pulsesync.device.changes import digest_changes, digest_changes_by_block
from pulsesync.device.encode import code_piles
from pulsesync.device.state import DeviceBackend, backend_of
from pulsesync.format import layout as layouts
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import CodecName
from pulsesync.publish.baseline import baseline_for
from pulsesync.publish.commit import next_record, root_record
from pulsesync.state.backend import Transition
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.sharding import owner_of, share_of
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import MemoryStore

QUICK = ("--sizes", "0.0000011", "--densities", "10", "--repeats", "1", "--codecs", "context")
CODECS: tuple[CodecName, ...] = ("context", "history")
LARGE = 16e9  # weights from which the new ones do not stay on the GPU while a worker is measured


@dataclass
class Row:
    """Milliseconds, and bytes."""

    weights: int
    density: float
    hot: float
    patch_bytes: int
    ms: dict[str, float] = field(default_factory=dict)
    gigabytes: dict[str, float] = field(default_factory=dict)  # peak, in addition to the weights and the base


class Bench:
    """One model, with the state of a trainer and that of a worker."""

    def __init__(self, model: Pair) -> None:
        self.model = model
        baseline = baseline_for(model.old, "device")
        assert isinstance(baseline, DeviceBaseline)
        self.baseline = baseline
        self.shards = baseline.read(model.new, {})
        layout = layouts.make([window.tensor for window in self.shards.windows.values()], self.shards.ties)
        self.share = share_of(layout, owner_of(layout, [self.shards.windows]), 0, self.shards)
        # The base is the old model itself, and not a third copy.
        self.state = WeightState.attach(DeviceBackend, model.old, layout)
        self.last = root_record(None, 0, layout.id, self.state.digest, None, ())

    def compare(self) -> DeviceDifference:
        return self.baseline.compare(self.share, self.state, self.shards, "context")

    def encode(self, codec: CodecName) -> object:
        return self.compare().encode(self.last, codec)

    def record(self, codec: CodecName) -> tuple[Manifest, bytes]:
        """The next version, as a worker gets it."""
        part, transition = self.compare().encode(self.last, codec)
        history = transition.history.digest() if transition.history.tiles else None
        state = digest.state_digest(self.state.layout.tables, transition.sums.values())
        parts = (PartRef(part.id, len(part.data)),)
        return next_record(self.last, 1, parts, state, history, None, ()), bytes(part.data)


def measure(weights: float, density: float, repeats: int, codecs: Sequence[CodecName]) -> Row:
    """Measure publishing first and then syncing: of the largest models only two copies fit on the GPU."""
    model = make_pair(weights, density)
    bench = Bench(model)
    state, difference = bench.state, bench.compare()
    changed = sum(run.count for run in difference.runs)
    row = Row(model.size, changed / model.size, hot_share(difference), 0)
    some = max(model.old.values(), key=lambda tensor: tensor.numel())
    speed = 2 * some.numel() * 2 / median_ms(some.clone, repeats)  # bytes a millisecond, read and written
    row.ms["copy of all weights (floor of a diff)"] = model.size * 4 / speed
    row.ms["read of all weights (floor of a recount)"] = model.size * 2 / speed
    row.ms["diff + compaction"] = median_ms(bench.compare, repeats)
    row.ms["incremental digest"] = median_ms(partial(digest_of, difference), repeats)
    del difference
    parts: dict[CodecName, tuple[Manifest, bytes]] = {}
    for codec in codecs:
        encode = partial(bench.encode, codec)
        row.ms[f"diff + {codec} encode + patch on the host"] = median_ms(encode, repeats)
        row.gigabytes[f"diff + {codec} encode"] = peak_gb(encode)
        parts[codec] = bench.record(codec)
    row.patch_bytes = len(parts[codecs[0]][1])
    if large := model.size > LARGE:
        model.new.clear()
    del bench, encode
    empty_cache()
    for codec, (manifest, data) in parts.items():
        body = [Body.of(data, state.layout)]
        row.gigabytes[f"{codec} decode + apply"] = peak_gb(partial(sync_and_undo, state, manifest, data))
        times, pauses = [], []
        for _ in range(repeats):
            transition, prepare_ms = timed_ms(partial(PatchTransaction(state).prepare, manifest, body))
            back, pause_ms = timed_ms(partial(state.commit, transition))
            times.append(prepare_ms + pause_ms)
            pauses.append(pause_ms)
            assert Recount(state).digest() == manifest.digest
            assert large or equal(model.old, model.new), "the decoded weights are not the new ones"
            state.commit(back)
            del transition, back
        row.ms[f"{codec} decode + apply with undo log"] = statistics.median(times)
        row.ms[f"of it the pause, {codec}"] = statistics.median(pauses)
    row.ms["full digest recount"] = median_ms(state.backend.count, repeats)
    return row


def digest_of(difference: DeviceDifference) -> object:
    """Update the digests of what changed."""
    return digest_changes(digest_changes_by_block(difference.runs))


def sync(state: WeightState, manifest: Manifest, data: bytes) -> Transition:
    """Decode and apply; return what undoes it."""
    return state.commit(PatchTransaction(state).prepare(manifest, [Body.of(data, state.layout)]))


def sync_and_undo(state: WeightState, manifest: Manifest, data: bytes) -> None:
    state.commit(sync(state, manifest, data))


def hot_share(difference: DeviceDifference) -> float:
    """The share of the weights that `context` codes as decisions."""
    hot = total = 0
    tensors = backend_of(difference.state).tensors
    for run in difference.runs:
        coded = code_piles([(run, run.pile.locate(tensors))], None, 0)
        hot += int(coded.hot[run.pile].counts.sum())
        total += int(run.pile.host_sizes.sum())
    return hot / max(total, 1)


def products(busy_ms: float) -> Callable[[], None]:
    """Matrix products that keep the GPU busy for about `busy_ms`, as a forward and backward pass do."""
    a, b, out = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    count = max(1, round(busy_ms / median_ms(lambda: torch.mm(a, b, out=out))))

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
    hook = way == "host+hook"
    keep: Literal["device", "host"] = "device" if way == "device" else "host"
    model = make_pair(weights, density)
    for name, tensor in model.new.items():
        tensor.view(torch.int16).bitwise_xor_(model.old[name].view(torch.int16))  # from one state to the other
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=DEVICE))], lr=0.0)
    work = products(busy_ms)
    alone = median_ms(work)
    before = allocated()
    found: dict[str, list[float]] = {}
    with Publisher(MemoryStore(), keep=keep) as publisher:
        if hook:
            publisher.hold(optimizer)
        publisher.publish(model.old)
        kept = (allocated() - before) / 1e9
        reset_peak()
        for n in range(7):
            for name, tensor in model.old.items():
                tensor.view(torch.int16).bitwise_xor_(model.new[name].view(torch.int16))
            wait()
            began = time.perf_counter()
            future = publisher.publish(model.old, step=n, wait=False)
            published = worked = time.perf_counter()
            if hook:
                work()
                wait()
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
        most = peak_since(before)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    return {**medians, "kept on the GPU, GB": kept, "at the most, GB": most}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=float, nargs="+", default=[7.6], help="billions of weights")
    parser.add_argument("--densities", type=float, nargs="+", default=[1.0], help="percent of the weights that change")
    ways = ["device", "host", "host+hook"]
    parser.add_argument("--held", nargs="*", choices=ways, default=[], help="also time publishes with this keep")
    parser.add_argument("--busy", type=float, default=400, help="ms of matrix products after each publish of host+hook")
    parser.add_argument("--kernels", action="store_true", help="profile one encode and decode, first size and density")
    parser.add_argument("--lines", nargs="*", choices=["context", "history"], default=[], help="time host functions")
    parser.add_argument("--others", action="store_true", help="also measure full weights and other codecs")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--repeats", type=int, default=5, help="of each time")
    parser.add_argument("--json", type=Path, help="write the rows, and those of --others, to this file")


def main(given: argparse.Namespace) -> None:
    need_gpu(1e9 * max(given.sizes))
    print(f"{name_of()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    rows, size, density = [], 1e9 * given.sizes[0], given.densities[0] / 100
    with as_device():
        for weights in given.sizes:
            for percent in given.densities:
                rows.append(measure(1e9 * weights, percent / 100, given.repeats, given.codecs))
                print(json.dumps(asdict(rows[-1])), flush=True)
                empty_cache()
        found = others.measure(make_pair(size, density), rows[0]) if given.others else {}
        if given.json:
            listed = [asdict(row) for row in rows]
            given.json.write_text(json.dumps(found | {"ours": listed} if found else listed, indent=1) + "\n")
        for way in given.held:
            print(way, json.dumps(held(size, density, way, given.busy)), flush=True)
        for codec in given.lines:
            print(profile.lines(Bench(make_pair(size, density)), codec))
        if given.kernels:
            print(profile.kernels(Bench(make_pair(size, density))))
