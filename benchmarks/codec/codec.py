"""How many bytes and seconds does a step take, by each of our codecs and by what others send?

    python -m benchmarks codec                                            # generated updates, about a minute
    python -m benchmarks codec --trace DIR --gguf FILE --step 14          # the recorded run (see recording.py)

All steps up to the measured one are published and received first, in one epoch, so that the codec `history` has a
history. Then every method encodes and decodes the same step, in interleaved rounds, because the speed of a machine
drifts. For our codecs, every byte that a version adds to a store counts, the part and the manifest. Encoding is all
that a publisher computes for a version. Decoding is all that a worker does: it checks the manifest and hashes, decodes,
updates and compares the digests and the history, and writes the weights. For the others, encoding turns the old and new
state into bytes, and decoding applies these in place; only basilica-sdk verifies, and hashes every weight at both ends
for it. Results are printed only if every method reproduced the new state bit for bit in every round.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pulsesync
from benchmarks.codec.version import Published, publish
from benchmarks.harness import recording
from benchmarks.harness.baselines import Baseline, baselines, check
from benchmarks.harness.report import Rounds, json_line, provenance, table
from benchmarks.harness.weights import SEED, State, Steps, as_bf16, flat, generated, recorded
from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import Recount, WeightState

QUICK = ("--rounds", "1", "--width", "128", "--step", "3")
OURS: tuple[patch.CodecName, ...] = ("gap", "context", "history", "auto")


# -- the methods ---------------------------------------------------------------------------------------------------


class Ours:
    """A publisher and a worker with one codec. All workers share one copy of the weights, since they write the same."""

    def __init__(self, codec: patch.CodecName, layout: Layout, weights: State) -> None:
        self.codec: patch.CodecName = codec
        self.layout = layout
        self.worker = WeightState.attach(HostBackend, as_bf16(weights), layout)
        self.remembers = codec in ("history", "auto")
        self._sums, self._digest, self._history = dict(self.worker.sums), self.worker.digest, History()
        self._held = self.worker.sums, self.worker.history

    def publish(self, step: int, old: State, new: State) -> Published:
        """All that a publisher computes for a version; its base does not change."""
        options: dict[str, Any] = {"codec": self.codec, "remembers": self.remembers}
        base = BaseRef(step, self._digest)
        return publish(self.layout, flat(old), flat(new), self._sums, self._history, base=base, **options)

    def receive(self, published: Published) -> tuple[float, float]:
        """All that a worker does with a version; return the seconds to prepare it, and those to write the weights."""
        began = time.perf_counter()
        transition = PatchTransaction(self.worker).prepare(manifests.parse(published.manifest), [published.part])
        prepared = time.perf_counter()
        self.worker.commit(transition)
        return prepared - began, time.perf_counter() - prepared

    def advance(self, published: Published) -> None:
        """Make the published version the base of the next one, at the publisher and at the worker."""
        self._sums, self._digest, self._history = published.sums, published.digest, published.history
        self._held = self.worker.sums, self.worker.history

    def rewind(self) -> None:
        """Restore the worker's sums and history from before the version. The caller must restore the weights itself."""
        self.worker.sums, self.worker.history = self._held


# -- measuring -----------------------------------------------------------------------------------------------------


class Bench:
    """One step of a run, ready to be measured."""

    def __init__(self, steps: Steps, step: int) -> None:
        """Publish and receive all steps before this one, and keep the resulting state of both ends."""
        self.step = step
        self.ours: list[Ours] = []
        for at, old, new in steps:
            if at == 0:
                self.weights = {name: bits.copy() for name, bits in old.items()}
                specs = [TensorSpec(name, "BF16", bits.shape) for name, bits in old.items()]
                self.layout = layouts.make(specs)
                self.last = {name: np.zeros(bits.size, np.uint8) for name, bits in old.items()}
                self.ours = [Ours(codec, self.layout, self.weights) for codec in OURS]
            if at == step:
                self.old, self.new = old, new
                return
            self._replay(at, old, new)
        raise IndexError(f"there is no step {step}")

    def _replay(self, at: int, old: State, new: State) -> None:
        published = [one.publish(at, old, new) for one in self.ours]
        for one, what in zip(self.ours, published, strict=True):
            one.receive(what)
            self._put_back(old)
            one.advance(what)
        self._put_back(new)
        remember(self.last, flat(old), flat(new), at + 1)

    def _put_back(self, state: State) -> float:
        """Overwrite all weights, so that every method starts with comparable CPU caches; return the seconds."""
        began = time.perf_counter()
        for name, bits in state.items():
            np.copyto(self.weights[name], bits)
        return time.perf_counter() - began

    def _check(self, name: str) -> None:
        for key, bits in self.new.items():
            assert np.array_equal(self.weights[key], bits), f"{name}: {key} is not the new tensor, bit for bit"

    def run(self, rounds: int) -> tuple[list[Rounds], list[Rounds]]:
        """Measure every method; return bytes and seconds of each codec, and the seconds to find the changes alone."""
        others = baselines()
        check(others)
        codecs = {one.name: Rounds(one.name) for one in others}
        codecs |= {one.codec: Rounds(f"pulsesync {one.codec}") for one in self.ours}
        finders = self._finders()
        diffs = {name: Rounds(name) for name in ("copy of the state, 1 thread", *finders)}
        for counted in range(-1, rounds):  # the first round is a warm-up
            if counted == 0:
                for one in (*codecs.values(), *diffs.values()):
                    one.seconds.clear()
            for baseline in others:
                self._round_of_baseline(baseline, codecs[baseline.name])
            for mine in self.ours:
                self._round_of_ours(mine, codecs[mine.codec])
            diffs["copy of the state, 1 thread"].add("find", self._put_back(self.old))
            for name, find in finders.items():
                began = time.perf_counter()
                found = find()
                diffs[name].add("find", time.perf_counter() - began)
                assert sum(map(len, found)) == self.changed, name
        return list(codecs.values()), list(diffs.values())

    def _round_of_baseline(self, baseline: Baseline, to: Rounds) -> None:
        self._put_back(self.old)
        began = time.perf_counter()
        data = baseline.encode(self.old, self.new)
        to.add("encode", time.perf_counter() - began)
        began = time.perf_counter()
        baseline.apply_(self.weights, data)
        to.add("decode", time.perf_counter() - began)
        to.size = len(data)
        self._check(baseline.name)

    def _round_of_ours(self, mine: Ours, to: Rounds) -> None:
        self._put_back(self.old)
        mine.rewind()
        began = time.perf_counter()
        published = mine.publish(self.step, self.old, self.new)
        to.add("encode", time.perf_counter() - began)
        prepared, written = mine.receive(published)
        to.add("decode", prepared + written)
        to.add("write", written)
        to.size = len(published.part) + len(published.manifest)
        self._check(mine.codec)
        assert mine.worker.digest == published.digest == Recount(mine.worker).digest(), mine.codec

    def _finders(self) -> dict[str, Callable[[], list[Any]]]:
        old, new = flat(self.old), flat(self.new)
        blocks = [
            (tile.read_block(old[tile.tensor.name], number), tile.read_block(new[tile.tensor.name], number))
            for tile in self.layout.tiles
            for number in range(tile.block_count)
        ]

        def kernel(threads: int) -> list[Any]:
            run = kernels.active().changed
            return [found[0] for found in spread(lambda pair: run(*pair), blocks, threads)]

        return {
            "numpy compare and flatnonzero, 1 thread": lambda: [np.flatnonzero(old[k] != new[k]) for k in old],
            "pulsesync changed, 1 thread": lambda: kernel(1),
            "pulsesync changed, 2 threads": lambda: kernel(2),
        }

    @property
    def total(self) -> int:
        return sum(bits.size for bits in self.old.values())

    @property
    def changed(self) -> int:
        return sum(int(np.count_nonzero(self.old[k] != self.new[k])) for k in self.old)


# -- how few bits it could be --------------------------------------------------------------------------------------


def ordered(bits: Any) -> Any:
    """BF16 bits as integers in the order of their values."""
    wide = bits.astype(np.int32)
    return wide ^ np.where(wide & 0x8000, 0xFFFF, 0x8000)


def remember(last: dict[str, Any], old: dict[str, Any], new: dict[str, Any], index: int) -> None:
    """Record for every changed weight the index of this patch, plus 128 if the weight decreased."""
    for name, known in last.items():
        at = np.flatnonzero(old[name] != new[name])
        known[at] = index + 128 * (ordered(new[name][at]) < ordered(old[name][at]))


def entropies(old: dict[str, Any], new: dict[str, Any], last: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Empirical entropies of the step, in bits per change: which weights change, and by how many places.

    Conditioned on the old exponent; and conditioned also on the patch that last changed the weight, with directions
    relative to that change. The cost of transmitting the probabilities is not included, so no real file can be this
    small.
    """
    out = {}
    for label, memory in (("exponent", False), ("exponent and last change", True)):
        weights = np.zeros(1 << 15, np.int64)  # by context: exponent and index of the last change
        contexts, steps = [], []
        for name, known in last.items():
            context = (old[name].astype(np.int32) >> 7 & 0xFF) << 7
            if memory:
                context |= known & 0x7F
            weights += np.bincount(context, minlength=weights.size)
            at = np.flatnonzero(old[name] != new[name])
            step = ordered(new[name][at]) - ordered(old[name][at])
            contexts.append(context[at])
            steps.append(np.where(known[at] >> 7, -step, step) if memory else step)
        context, step = np.concatenate(contexts).astype(np.int64), np.concatenate(steps)
        changes = np.bincount(context, minlength=weights.size)
        position = bits_of(changes) + bits_of(weights - changes) - bits_of(weights)
        _, together = np.unique(context << 17 | step + (1 << 16), return_counts=True)
        size = bits_of(together) - bits_of(changes)
        count = max(len(step), 1)
        out[label] = {"position": position / count, "step": size / count, "sum": (position + size) / count}
    return out


def bits_of(counts: Any) -> float:
    """The sum of -n log2 n. Differences of such sums are entropies."""
    some = counts[counts > 0].astype(np.float64)
    return float(-(some * np.log2(some)).sum())


# -- reporting -----------------------------------------------------------------------------------------------------


def report(bench: Bench, source: str, rounds: int) -> None:
    codecs, diffs = bench.run(rounds)
    bounds = entropies(flat(bench.old), flat(bench.new), bench.last)
    total, changed = bench.total, bench.changed
    full = 2 * total
    print(f"{source}: step {bench.step}, {changed:,} of {total:,} weights changed, {changed / total:.3%}")
    print(f"Seconds are medians of {rounds} interleaved rounds (20th–80th percentile).\n")
    by_name = {one.name: one for one in codecs}
    best = by_name.get("basilica-sdk v3")
    rows, out = [], {}
    for one in codecs:
        bits = 8 * one.size / changed
        entry: dict[str, Any] = {"bytes": one.size, "times_smaller": full / one.size, "bits_per_change": bits}
        entry |= {f"{what}_s": one.spread(what) for what in one.seconds}
        if best:
            entry |= {f"{what}_over_basilica_v3": one.over(best, what) for what in ("encode", "decode")}
        above = ""
        if one.name.startswith("pulsesync"):
            bound = bounds["exponent and last change" if one.name.endswith(("history", "auto")) else "exponent"]["sum"]
            entry |= {"bound_bits": bound, "above_bound_percent": 100 * (bits / bound - 1)}
            above = f"{bits - bound:+.2f} bits, {bits / bound - 1:+.1%}"
        ratios = [f"{one.over(best, what):.2f}" if best else "–" for what in ("encode", "decode")]
        times = [one.shown(what) for what in ("encode", "decode")]
        rows.append([one.name, f"{one.size:,}", f"{full / one.size:.0f}", f"{bits:.2f}", *times, *ratios, above])
        out[one.name] = entry
    head = ["codec", "bytes", "× smaller", "bits a change", "encode s", "decode+apply+verify s"]
    print(table([*head, "encode: v3 ÷ it", "decode: v3 ÷ it", "above entropy"], rows))
    extra = notes(bench, by_name, bounds)
    base = diffs[1]
    rows = [
        [
            one.name,
            one.shown("find"),
            f"{1e9 * one.median('find') / total:.2f}",
            f"{4e-9 * total / one.median('find'):.1f}",
            f"{one.over(base, 'find'):.1f}",
        ]
        for one in diffs
    ]
    print(table(["finding what changed", "s", "ns a weight", "GB/s moved", "numpy ÷ it"], rows) + "\n")
    found = {one.name: {"find_s": one.spread("find"), "numpy_over_it": one.over(base, "find")} for one in diffs}
    about = provenance("basilica-sdk", "torch", "xxhash")
    about |= {"source": source, "step": bench.step, "seed": SEED, "rounds": rounds}
    sizes = {"weights": total, "changed": changed, **extra, "entropy_bits": bounds}
    print(json_line({"bench": "codec", **about, **sizes, "codecs": out, "diff": found}))


def notes(bench: Bench, codecs: dict[str, Rounds], bounds: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Print the figures that the table has no column for, and return them."""
    given = [f"{b['position']:.2f} + {b['step']:.2f} = {b['sum']:.2f} given {label}" for label, b in bounds.items()]
    print(f"\nEntropy of the step, which and how far, in bits a change: {'; '.join(given)}.")
    history = next(one for one in bench.ours if one.codec == "history").worker.history.size_bytes
    out: dict[str, Any] = {"layout_bytes": len(bench.layout.data), "history_bytes": history}
    print(f"Stored once a run: the layout, {out['layout_bytes']:,} bytes. Kept at both ends: {history:,} of history.")
    writing = [f"{name} {one.median('write'):.3f} s" for name, one in codecs.items() if "write" in one.seconds]
    print(f"Of decoding, writing weights takes: {', '.join(writing)}.")
    if "basilica-sdk v1" in codecs:
        out["gap_decode_over_basilica_v1"] = codecs["pulsesync gap"].over(codecs["basilica-sdk v1"], "decode")
        print(f"Decoding by basilica-sdk v1 takes {out['gap_decode_over_basilica_v1']:.2f} times as long as by gap.")
    print()
    return out


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--step", type=int, help="step to measure; by default 14 of the recording, 11 of the generator")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=512, help="of the generated model: 512 is 31 M weights")


def main(given: argparse.Namespace) -> None:
    pulsesync.warm_up()
    source, steps = recorded(given.trace, given.gguf) if given.trace else generated(given.width)
    step = given.step if given.step is not None else 14 if given.trace else 11
    report(Bench(steps, step), source, given.rounds)
