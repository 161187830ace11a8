"""How long does a round of PULSELoCo take on a CPU besides the exchange, and how much memory?

    python benchmarks/bench_loco_round.py                     # 134.5 M weights, as many as SmolLM2-135M has: 8 GB
    python benchmarks/bench_loco_round.py --weights 1e7

A real `PulseLoCo` with an exchange that adds up the same update R times and sends nothing; weights move by a drift and
noise that send about as many entries as GRPO does on SmolLM2 at 1e-6 (the share is printed). A round is all from the
trainer's weights to its next ones, digest included; coded or not, because what travels is coded for the exchange.
Memory is the peak of what is resident during a round, less what the process had before there were weights, less theta,
residual, momentum and the trainer's weights: 16 bytes a weight. Then the pieces of a round one by one, and a round as
the last release had it, written again here in numpy: whole vectors at a time, with one shared momentum.
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch
from bench_codec import provenance
from bench_memory import peak, reset_peak, status

from pulsesync.core.digest import count_tile
from pulsesync.core.threads import default_threads, spread
from pulsesync.core.types import TensorSpec
from pulsesync.format import layout as layouts
from pulsesync.kernels import reference
from pulsesync.loco import Nesterov, PulseLoCo
from pulsesync.loco.exchange import EncodedUpdate
from pulsesync.loco.fragments import FragmentTensors
from pulsesync.loco.gate import SentUpdate, VisibilityGate
from pulsesync.loco.outer import OwnMomentum, TrainerUpdate, aggregate, diverges, mean_of
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, SharedState
from pulsesync.loco.vectors import F32, chunks_of

WARM = 3  # rounds before those that are measured: a checkpoint begins on the BF16 grid


def drift(here: slice, number: int, drifting: float, noise: float) -> F32:
    """How far a piece of the weights moves in a round: by the same every time, and by something else."""
    size = here.stop - here.start
    always = np.random.default_rng(here.start).standard_normal(size, np.float32)
    once = np.random.default_rng((here.start, number + 1)).standard_normal(size, np.float32)
    out: F32 = np.float32(drifting) * always + np.float32(noise) * once
    return out


def checkpoint(size: int) -> F32:
    """Weights as a checkpoint has them: values of BF16."""
    out = np.empty(size, np.float32)

    def fill(here: slice) -> None:
        values = np.random.default_rng((here.start, 0)).standard_normal(here.stop - here.start, np.float32)
        out[here] = (reference.bf16(np.float32(0.05) * values).astype(np.uint32) << np.uint32(16)).view(np.float32)

    spread(fill, chunks_of(size))
    return out


# The whole of it


class Drift(torch.optim.Optimizer):
    """Moves weights as `drift` says."""

    def __init__(self, weights: Any, options: argparse.Namespace) -> None:
        super().__init__([weights], {})
        self._values, self._options, self._number = weights.detach().numpy(), options, 0

    def step(self, closure: Any = None) -> None:
        self._number += 1
        by = self._options.drift, self._options.noise

        def move(here: slice) -> None:
            self._values[here] -= drift(here, self._number, *by)

        spread(move, chunks_of(self._values.size))


class Alone:
    """An exchange in which every one of R trainers has sent the same update; nothing travels."""

    def __init__(self, trainers: int, coded: bool) -> None:
        self.trainer, self._trainers, self._coded = "00000", trainers, coded
        self.sent_bytes = self.received_bytes = 0
        self._update: SentUpdate | None = None

    def join(self, mine: Sequence[SharedState], about: str) -> list[SharedState]:
        return list(mine)

    def prepare(self, coder: Coder, update: SentUpdate) -> EncodedUpdate:
        self._update = update
        data = coder.encode(self.trainer, update.sent, update.unit) if self._coded else b""
        self.sent_bytes += len(data)
        return EncodedUpdate(hashlib.sha256(data).hexdigest(), (data,))

    def propose(self, coder: Coder, letter: EncodedUpdate, size: int) -> Outcome:
        assert self._update is not None
        total = aggregate([self._update.sent] * self._trainers, size)
        return Outcome({f"{r:05d}": letter.id for r in range(self._trainers)}, total)

    def decline(self, coder: Coder, size: int, why: str) -> None:
        pass

    def confirm(self, coder: Coder, outcome: Outcome, after: SharedState | None) -> None:
        assert after is not None
        assert after.digest  # computes it

    def missed(self, coder: Coder, size: int) -> Outcome | None:
        return None

    def leave(self, rounds: Sequence[int]) -> None:
        pass


def whole(options: argparse.Namespace, size: int, coded: bool) -> dict[str, float]:
    """Seconds of a round, bytes a weight at its peak, and what it sent."""
    reset_peak()
    nothing = status("VmRSS")
    weights = torch.nn.Parameter(torch.from_numpy(checkpoint(size)))
    optimizer, exchange = Drift(weights, options), Alone(options.trainers, coded)
    seconds, peaks, sent, share = [], [], 0, 0.0
    gate = {"compact": options.compact, "reach": options.reach}
    with PulseLoCo({"w": weights}, optimizer, sync_every=1, exchange=exchange, **gate) as loco:
        for number in range(WARM + options.rounds):
            reset_peak()
            before = exchange.sent_bytes
            optimizer.step()
            assert loco.last_report is not None
            sent, share = exchange.sent_bytes - before, loco.last_report.sent / size
            if number >= WARM:
                seconds.append(loco.last_report.seconds)
                peaks.append((peak() - nothing) / size - 16)
    return {"seconds": statistics.median(seconds), "peak": max(peaks), "share": share, "payload": sent}


# Its pieces


class Watch:
    """Seconds of each piece of a round, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        began = perf_counter()
        out = work()
        self.seconds.setdefault(name, []).append(perf_counter() - began)
        return out

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values[WARM:]) for name, values in self.seconds.items()}


def pieces(options: argparse.Namespace, size: int) -> dict[str, float]:
    rule, gate, watch = OwnMomentum(Nesterov()), VisibilityGate(options.compact, options.reach), Watch()
    theta = checkpoint(size)
    model = torch.from_numpy(theta.copy())
    tensors = FragmentTensors({"w": model})
    shared = SharedState("0" * 64, theta, rule.first_trend(size))
    residual, momentum = np.zeros(size, np.float32), np.zeros(size, np.float32)
    members = {f"{r:05d}": "" for r in range(options.trainers)}

    def one(shared: SharedState) -> SharedState:
        update = TrainerUpdate(rule, shared.theta, residual, momentum, tensors.read_piece)
        part = watch("propose", lambda: gate.select(shared.theta, update))
        described = watch("describe", lambda: describe(shared.theta, shared.trend))
        coder = Coder(0, shared.round + 1, shared.digest, described)
        watch("encode", lambda: coder.encode("00000", part.sent, part.unit))
        total = watch("add up", lambda: aggregate([part.sent] * options.trainers, size))
        after: SharedState = watch("outer step", lambda: shared.resolve(Outcome(members, total), rule).after)
        watch("digest", lambda: after.digest)
        watch("commit", lambda: update.commit(part.sent))
        watch("weights", lambda: tensors.write(lambda here: rule.start(after.theta[here], residual[here])))
        return after

    for number in range(WARM + options.rounds):
        _move(model.numpy(), number, options)
        shared = one(shared)
    return watch.medians()


def _move(values: F32, number: int, options: argparse.Namespace) -> None:
    def move(here: slice) -> None:
        values[here] -= drift(here, number, options.drift, options.noise)

    spread(move, chunks_of(values.size))


# As it was


def last_release(options: argparse.Namespace, size: int) -> dict[str, float]:
    """The published form in numpy: shared momentum, the whole update in memory, every check a pass of its own."""
    outer, watch = Nesterov(), Watch()
    theta, momentum, residual = checkpoint(size), np.zeros(size, np.float32), np.zeros(size, np.float32)
    model = torch.from_numpy(theta.copy())

    def one() -> tuple[F32, F32, F32]:
        s = residual + (theta - model.numpy().copy())
        assert np.isfinite(s).all()

        def visible(here: slice) -> Any:
            return (
                np.flatnonzero((reference.bf16(theta[here]) != reference.bf16(theta[here] - s[here])) & (s[here] != 0))
                + here.start
            )

        positions = np.concatenate(spread(visible, chunks_of(size)))
        values, described = s[positions], np.empty(size, np.uint16)
        spread(lambda here: reference.describe(theta[here], momentum[here], described[here]), chunks_of(size))
        total = np.zeros(size, np.float32)
        for _ in range(options.trainers):
            total[positions] += values
        assert not diverges(mean_of(total, options.trainers))
        after, moved = outer.step(theta, momentum, total, options.trainers)
        assert np.isfinite(after).all()
        assert np.isfinite(moved).all()
        for vector in (after, moved):
            count_tile(layouts.make([TensorSpec("w", "F32", (size,))]).tiles[0], vector.view(np.uint32))
        np.count_nonzero(total)
        s[positions] -= values
        model.copy_(torch.from_numpy(after))
        return after, moved, s

    for number in range(WARM + options.rounds):
        _move(model.numpy(), number, options)
        theta, momentum, residual = watch("last release, not coded", one)
    return watch.medians()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=float, default=134_515_008)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--compact", type=int, default=0)
    parser.add_argument("--reach", type=float, default=1.4)
    parser.add_argument("--rounds", type=int, default=5, help=f"that are measured, after {WARM} that are not")
    parser.add_argument("--drift", type=float, default=1e-6, help="of a weight in every round, the same each time")
    parser.add_argument("--noise", type=float, default=2e-6, help="of a weight in every round")
    options = parser.parse_args()
    size = int(options.weights)
    small = argparse.Namespace(**{**vars(options), "rounds": 1})
    whole(small, 1 << 16, True)  # loads and compiles all there is
    found: dict[str, Any] = {
        "not coded": whole(options, size, False),
        "coded": whole(options, size, True),
        "pieces": pieces(options, size),
        "last release": last_release(options, size)["last release, not coded"],
    }
    plain, coded, before = found["not coded"], found["coded"], found["last release"]
    print(f"{size:,} weights, {default_threads()} cores, R = {options.trainers}, {plain['share']:.2%} sent.\n")
    print("| a round without the exchange | seconds | × last release | bytes a weight beside theta, e, m and x |")
    print("|---|--:|--:|--:|")
    print(f"| not coded | {plain['seconds']:.2f} | {before / plain['seconds']:.1f} | {plain['peak']:.1f} |")
    print(f"| coded | {coded['seconds']:.2f} | | {coded['peak']:.1f} |")
    print(f"| last release, in numpy, not coded | {before:.2f} | 1 | |\n")
    print("| piece | seconds |\n|---|--:|")
    for name, seconds in found["pieces"].items():
        print(f"| {name} | {seconds:.3f} |")
    print(json.dumps({"bench": "loco-round", **provenance("torch"), "options": vars(options), **found}))


if __name__ == "__main__":
    main()
