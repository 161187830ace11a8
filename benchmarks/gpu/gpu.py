"""What a sync costs on a GPU: diff, encode, decode, apply, digest; over sizes and densities.

    python -m benchmarks gpu                                  # the table of one size and density: 7.6 B, 1 %
    python -m benchmarks gpu --sizes 0.1 1 7.6 30 --densities 0.1 1 10 --json gpu.json
    python -m benchmarks gpu --uniform                        # each weight changes with the same probability
    python -m benchmarks gpu --tracked 10                     # only the smallest 10 % change: these are tracked
    python -m benchmarks gpu --kernels                        # and where the time goes, kernel by kernel
    python -m benchmarks gpu --others --json others.json      # next to full weights and to other codecs (others.py)

Tensors have the shapes of models of that size, with as many layers as the size needs; harness/device.py says which
weights change. Every time is a median of wall-clock times on an idle GPU, from a call to the end of all work it
launched. A floor is the time to move the bytes that must move, at the copy speed that was measured in the same run.

The first two patches of an epoch are measured. The second one, with as many changes again, has a history to read, as
nearly every patch of a run. Extra memory is what a call allocates at its peak, in addition to the weights, the base and
what there was before, among it the old history; the new history, a byte for each tracked weight, and the undo log are
part of it. `reserved` is what PyTorch has from the driver, and `used` everything on the GPU. In the end, when all is
dropped, that is what the library keeps: pools of CUDA graphs, compiled kernels, and buffers.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

import pulsesync
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
    peak_reserved,
    peak_since,
    reserved,
    reset_peak,
    timed_ms,
    used,
    wait,
)
from benchmarks.harness.report import table
from benchmarks.harness.timing import T
from pulsesync import Publisher
from pulsesync.core import digest
from pulsesync.device import baseline as baseline_module
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

QUICK = ("--sizes", "0.0000011", "--densities", "10", "--repeats", "1", "--codecs", "history")
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
    memory: dict[str, dict[str, float]] = field(default_factory=dict)  # of calls; bytes a weight, and gigabytes


class Bench:
    """One model, with the state of a trainer and that of a worker."""

    def __init__(self, model: Pair) -> None:
        self.model = model
        self._read()
        layout = layouts.make([window.tensor for window in self.shards.windows.values()], self.shards.ties)
        self.share = share_of(layout, owner_of(layout, [self.shards.windows]), 0, self.shards)
        # The base is the old model itself, and not a third copy.
        self.state = WeightState.attach(DeviceBackend, model.old, layout)
        self.rebase()
        self.last = root_record(None, 0, layout.id, self.state.digest, None, ())

    def rebase(self) -> None:
        """Make the publisher's base of the worker's state: the same memory."""
        backend = getattr(baseline_module, "DeviceBase", DeviceBackend)(self.state.layout, self.state.flats)
        self.base = WeightState(backend)
        self.base.history = backend.load_history(self.state.history)

    def _read(self) -> None:
        baseline = baseline_for(self.model.old, "device")
        assert isinstance(baseline, DeviceBaseline)
        self.baseline = baseline
        self.shards = baseline.read(self.model.new, {})

    def compare(self) -> DeviceDifference:
        return self.baseline.compare(self.share, self.base, self.shards, "context")

    def encode(self, codec: CodecName) -> tuple[object, Transition]:
        return self.compare().encode(self.last, codec)

    def record(self, codec: CodecName) -> tuple[Manifest, bytes]:
        """The next version, as a worker gets it."""
        part, transition = self.compare().encode(self.last, codec)
        history = transition.history.digest() if transition.history.tiles else None
        state = digest.state_digest(self.state.layout.tables, transition.sums.values())
        parts = (PartRef(part.id, len(part.data)),)
        number = self.last.next_patch[1]
        return next_record(self.last, number, parts, state, history, None, ()), bytes(part.data)

    def forget_new(self) -> None:
        """Free the new weights."""
        self.model.new.clear()
        del self.baseline, self.shards, self.share, self.base

    def advance(self, manifest: Manifest, data: bytes) -> None:
        """Commit a patch, and draw the next change: the patch of that has a history."""
        sync(self.state, manifest, data)
        self.rebase()
        self.last = manifest
        self.model.change()
        self._read()
        layout = self.state.layout
        self.share = share_of(layout, owner_of(layout, [self.shards.windows]), 0, self.shards)


def measure(model: Pair, repeats: int, codecs: Sequence[CodecName]) -> Row:
    """Measure the first and the second patch of an epoch."""
    bench = Bench(model)
    difference = bench.compare()
    row = Row(model.size, difference_size(difference) / model.size, hot_share(difference), 0)
    some = max(model.old.values(), key=lambda tensor: tensor.numel())
    speed = 2 * some.numel() * 2 / median_ms(some.clone, repeats)  # bytes a millisecond, read and written
    row.ms["copy of all weights (floor of a diff)"] = model.size * 4 / speed
    row.ms["read of all weights (floor of a recount)"] = model.size * 2 / speed
    row.ms["diff + compaction"] = median_ms(bench.compare, repeats)
    row.ms["incremental digest"] = median_ms(partial(digest_of, difference), repeats)
    del difference
    for which in ("", ", second patch"):
        parts = measure_encode(bench, row, repeats, codecs, which)
        if model.size > LARGE:
            bench.forget_new()
        measure_decode(bench, row, repeats, parts, which)
        if model.size <= LARGE:
            bench.forget_new()
        if not which:
            row.patch_bytes = len(parts[codecs[0]][1])
            tell(row)
            bench.advance(*parts["history" if "history" in parts else codecs[0]])  # context leaves no history
    row.ms["full digest recount"] = median_ms(bench.state.backend.count, repeats)
    return row


def measure_if_it_fits(model: Pair, repeats: int, codecs: Sequence[CodecName]) -> Row | None:
    """The same; None if the GPU has too little memory, which is printed."""
    try:
        return measure(model, repeats, codecs)
    except torch.OutOfMemoryError as error:
        print(f"{model.size:,} weights: {str(error).splitlines()[0]}", flush=True)
        return None


Parts = dict[CodecName, tuple[Manifest, bytes]]


def measure_encode(bench: Bench, row: Row, repeats: int, codecs: Sequence[CodecName], which: str) -> Parts:
    """Measure publishing; return the patches."""
    parts: Parts = {}
    for codec in codecs:
        encode = partial(bench.encode, codec)
        row.ms[f"diff + {codec} encode + patch on the host{which}"] = median_ms(encode, repeats)
        name = f"diff + {codec} encode{which}"
        (_, transition), row.memory[name] = memory_of(encode, row.weights)
        row.gigabytes[name] = row.memory[name]["extra"] * row.weights / 1e9
        row.memory[name] |= histories(bench.base.history, transition.history, row.weights)
        del transition
        parts[codec] = bench.record(codec)
    return parts


def measure_decode(bench: Bench, row: Row, repeats: int, parts: Parts, which: str) -> None:
    """Measure syncing, each time from the weights before the patch."""
    state, model = bench.state, bench.model
    for codec, (manifest, data) in parts.items():
        body, before, name = [Body.of(data, state.layout)], state.history, f"{codec} decode + apply{which}"
        times, pauses = [], []
        for _ in range(repeats):
            transition, prepare_ms = timed_ms(partial(PatchTransaction(state).prepare, manifest, body))
            back, pause_ms = timed_ms(partial(state.commit, transition))
            times.append(prepare_ms + pause_ms)
            pauses.append(pause_ms)
            assert Recount(state).digest() == manifest.digest
            assert not model.new or equal(model.old, model.new), "the decoded weights are not the new ones"
            state.commit(back)
            del transition, back
        row.ms[f"{codec} decode + apply with undo log{which}"] = statistics.median(times)
        row.ms[f"of it the pause, {codec}{which}"] = statistics.median(pauses)
        back, row.memory[name] = memory_of(partial(sync, state, manifest, data), row.weights)
        row.gigabytes[name] = row.memory[name]["extra"] * row.weights / 1e9
        row.memory[name] |= histories(before, state.history, row.weights)
        state.commit(back)
        del back, before


def memory_of(work: Callable[[], T], weights: int) -> tuple[T, dict[str, float]]:
    """The result of a call, and the memory at its peak: bytes a weight that it allocates, and gigabytes in all."""
    wait()
    gc.collect()
    empty_cache()
    before, reserved_before = allocated(), reserved()
    reset_peak()
    result = work()
    wait()
    found = {"extra": peak_since(before) * 1e9 / weights, "left of it": (allocated() - before) / weights}
    return result, found | {
        "reserved before, GB": reserved_before / 1e9,
        "reserved at the peak, GB": peak_reserved() / 1e9,
    }


def histories(old: object, new: object, weights: int) -> dict[str, float]:
    """Bytes a weight of the history that was read, and of what the new one does not share with it."""
    before = storages(old)
    after = {at: size for at, size in storages(new).items() if at not in before}
    return {"old history": sum(before.values()) / weights, "new history": sum(after.values()) / weights}


def storages(one: Any) -> dict[int, int]:
    """The memory of all tensors in an object: addresses, and sizes in bytes."""
    if isinstance(one, torch.Tensor):
        memory = one.untyped_storage()
        return {memory.data_ptr(): memory.nbytes()}
    members: Iterable[Any] = ()
    if is_dataclass(one):
        members = (getattr(one, each.name) for each in fields(one))
    elif isinstance(one, Mapping):
        members = one.values()
    elif isinstance(one, tuple):
        members = one
    return {at: size for member in members for at, size in storages(member).items()}


def difference_size(difference: DeviceDifference) -> int:
    return sum(run.count for run in difference.runs)


def tell(row: Row) -> None:
    print(json.dumps(asdict(row)), flush=True)


def digest_of(difference: DeviceDifference) -> object:
    """Update the digests of what changed."""
    return digest_changes(digest_changes_by_block(difference.runs))


def sync(state: WeightState, manifest: Manifest, data: bytes) -> Transition:
    """Decode and apply; return what undoes it."""
    return state.commit(PatchTransaction(state).prepare(manifest, [Body.of(data, state.layout)]))


def hot_share(difference: DeviceDifference) -> float:
    """The share of the weights that `context` codes as decisions."""
    hot = total = 0
    tensors = backend_of(difference.state).tensors
    for run in difference.runs:
        coded = code_piles([(run, run.pile.locate(tensors))], None, 0)
        hot += int(coded.hot[run.pile].counts.sum())
        total += int(run.pile.host_sizes.sum())
    return hot / max(total, 1)


def wait_for_trainer() -> None:
    """Wait until the GPU has finished what the trainer launched, in its own stream."""
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()


def products(busy_ms: float) -> Callable[[], None]:
    """Matrix products that keep the GPU busy for about `busy_ms`, as a forward and backward pass do."""
    size = 8192 if DEVICE.type == "cuda" else 64
    a, b, out = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    count = max(1, round(busy_ms / median_ms(lambda: torch.mm(a, b, out=out))))

    def work() -> None:
        for _ in range(count):
            torch.mm(a, b, out=out)

    return work


def held(model: Pair, way: str, busy_ms: float) -> dict[str, float]:
    """How long publish(wait=False) blocks a trainer, and how long it takes to encode a version in the background.

    The weights stay at their addresses and change in place, as a trainer's do; the store is in memory. With
    "host+hook", every publish is followed by work on the GPU and then by an optimizer's step, which changes nothing;
    the time that the step waits is added to that of publish.
    """
    hook = way == "host+hook"
    keep: Literal["device", "host"] = "device" if way == "device" else "host"
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
                wait_for_trainer()  # and not for the comparison, for which the step waits
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
    changes = parser.add_mutually_exclusive_group()
    changes.add_argument("--uniform", action="store_true", help="weights change whatever their magnitude is")
    changes.add_argument("--tracked", type=float, default=0.0, help="percent of the weights, the smallest, that change")
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
    print(f"{name_of()}, torch {torch.__version__}, CUDA {torch.version.cuda}, {pulsesync.__file__}", flush=True)
    pair = partial(make_pair, uniform=given.uniform, tracked=given.tracked / 100)
    rows, first = list[Row](), partial(pair, 1e9 * given.sizes[0], given.densities[0] / 100)
    with as_device():
        for weights in given.sizes:
            for percent in given.densities:
                started = {"reserved, GB": reserved() / 1e9, "used, GB": used() / 1e9}
                row = measure_if_it_fits(pair(1e9 * weights, percent / 100), given.repeats, given.codecs)
                gc.collect()
                empty_cache()
                if row is None:
                    continue
                rows.append(row)
                row.memory["before everything"] = started
                row.memory["everything dropped"] = {"reserved, GB": reserved() / 1e9, "used, GB": used() / 1e9}
                tell(row)
                show_memory(row)
                if given.json:
                    given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        if given.others and rows:
            found = others.measure(first(), rows[0])
            if given.json:
                given.json.write_text(json.dumps(found | {"ours": [asdict(row) for row in rows]}, indent=1) + "\n")
        for way in given.held:
            print(way, json.dumps(held(first(), way, given.busy)), flush=True)
        for codec in given.lines:
            print(profile.lines(Bench(first()), codec), flush=True)
        if given.kernels:
            print(profile.kernels(Bench(first())), flush=True)


def show_memory(row: Row) -> None:
    """Print the memory of calls, in bytes a weight, with the history stated apart, and what is kept in the end."""
    print(f"\n{row.weights:,} weights, {row.density:.2%} changed, {row.hot:.2%} hot in the first patch\n")
    heads = ("extra", "new history", "old history", "left of it", "reserved before, GB", "reserved at the peak, GB")
    calls = {name: one for name, one in row.memory.items() if "extra" in one}
    cells = [
        [name, f"{one['extra'] - one['new history']:.3f}", *(f"{one[head]:.3f}" for head in heads)]
        for name, one in calls.items()
    ]
    print(table(["bytes a weight at the peak", "without history", *heads], cells) + "\n")
    for name in ("before everything", "everything dropped"):
        print(f"{name}: {', '.join(f'{what} {size:.3f}' for what, size in row.memory[name].items())}")
    print(flush=True)
