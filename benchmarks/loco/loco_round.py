"""How long does a round of PULSELoCo take without the exchange, and how much memory? On a CPU, and on a GPU.

    python -m benchmarks loco_round                     # 134.5 M weights, as many as SmolLM2-135M has: 8 GB
    python -m benchmarks loco_round --weights 1e7
    python -m benchmarks loco_round --device cuda       # the same on a GPU, and its stages also on the host
    python -m benchmarks loco_round --device cuda --weights 7.6e9 --fragments 24

A real `PulseLoCo` runs with an exchange that adds up the same update R times and sends nothing. The weights move by a
drift and by noise, which make about as many entries visible as GRPO does on SmolLM2 at 1e-6 (the share is printed). A
round is everything from the trainer's weights to its next ones, digest included. It is measured with and without
coding, since only an update that is sent must be coded. Memory is the peak of resident memory during a round, minus
what the process had before the weights were made, minus theta, residual, momentum and the trainer's weights (16 bytes a
weight). Then the pieces of a round are timed one by one.

With --device cuda, theta, residual, momentum, weights and all intermediate results are on the GPU. First, small rounds
are compared with those of the host: every digest and every payload must be the same. Where numba is installed, the
pieces of a round are then also measured on the host, with the same weights, and digests are compared again. Memory is
the peak of what torch has allocated during a round. With --fragments, the fragments take turns: one round of each is
measured, until --limit-s is over.
"""

import argparse
import hashlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.harness.device import PIECE, wait
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import peak, reset_peak, status, timed
from pulsesync import kernels
from pulsesync.core.threads import default_threads, spread
from pulsesync.kernels import reference
from pulsesync.loco import Nesterov, PulseLoCo
from pulsesync.loco.exchange import EncodedUpdate
from pulsesync.loco.fragments import FragmentTensors
from pulsesync.loco.gate import SentUpdate, VisibilityGate
from pulsesync.loco.outer_step import OwnMomentum, TrainerUpdate, aggregate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, SharedState
from pulsesync.loco.vectors import F32, chunks_of
from tests.backends import host_as_device

QUICK = ("--weights", "1e5", "--rounds", "1", "--trainers", "2")
HOST = torch.device("cpu")
WARM = 3  # rounds before those that are measured: a checkpoint begins on the BF16 grid


def drift(here: slice, number: int, drifting: float, noise: float) -> F32:
    """How far a piece of the weights moves in a round: a drift that is the same every round, plus noise."""
    size = here.stop - here.start
    always = np.random.default_rng(here.start).standard_normal(size, np.float32)
    once = np.random.default_rng((here.start, number + 1)).standard_normal(size, np.float32)
    out: F32 = np.float32(drifting) * always + np.float32(noise) * once
    return out


def checkpoint(size: int) -> F32:
    """Weights as in a checkpoint: FP32 numbers that are exact BF16 values."""
    out = np.empty(size, np.float32)

    def fill(here: slice) -> None:
        values = np.random.default_rng((here.start, 0)).standard_normal(here.stop - here.start, np.float32)
        out[here] = (reference.bf16(np.float32(0.05) * values).astype(np.uint32) << np.uint32(16)).view(np.float32)

    spread(fill, chunks_of(size))
    return out


# A whole round


class Drift(torch.optim.Optimizer):
    """Moves weights by `drift`."""

    def __init__(self, weights: Any, options: argparse.Namespace) -> None:
        super().__init__([weights], {})
        self._values, self._options, self._number = weights.detach().numpy(), options, 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
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

    def propose(self, coder: Coder, encoded: EncodedUpdate, size: int) -> Outcome:
        assert self._update is not None
        total = aggregate([self._update.sent] * self._trainers, size)
        return Outcome({f"{r:05d}": encoded.id for r in range(self._trainers)}, total)

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

    def __init__(self, device: torch.device = HOST) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._device = device

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        out, seconds = timed(work, lambda: wait(self._device))
        self.seconds.setdefault(name, []).append(seconds)
        return out

    def medians(self, warm: int = WARM) -> dict[str, float]:
        return {name: statistics.median(values[warm:]) for name, values in self.seconds.items()}


Move = Callable[[torch.Tensor, int], None]  # moves weights as in a round of some number


def pieces(
    options: argparse.Namespace, model: torch.Tensor, move: Move, rounds: int, warm: int = WARM, there: bool = False
) -> tuple[dict[str, float], list[str]]:
    """Seconds of each piece of a round of a trainer with these weights, and digests: of states and of payloads."""
    rule, gate = OwnMomentum(Nesterov()), VisibilityGate(options.compact, options.reach)
    with host_as_device(there):
        tensors = FragmentTensors({"w": model})
    v, size, watch = tensors.vectors, tensors.size, Watch(model.device)
    shared = SharedState("0" * 64, tensors.read(), rule.first_trend(size, v))
    residual, momentum = v.zeros(size), v.zeros(size)
    members = {f"{r:05d}": "" for r in range(options.trainers)}
    digests: list[str] = []

    def one(shared: SharedState) -> SharedState:
        update = TrainerUpdate(rule, shared.theta, residual, momentum, tensors.read_piece)
        part = watch("propose", lambda: gate.select(shared.theta, update))
        described = watch("describe", lambda: describe(shared.theta, shared.trend))
        coder = Coder(0, shared.round + 1, shared.digest, described, v)
        data = watch("encode", lambda: coder.encode("00000", part.sent, part.unit))
        watch("decode, of one trainer", lambda: coder.decode(data, "00000", 0, size))
        total = watch("add up", lambda: aggregate([part.sent] * options.trainers, size))
        after: SharedState = watch("outer step", lambda: shared.resolve(Outcome(members, total), rule).after)
        digests.append(watch("digest", lambda: after.digest))
        watch("commit", lambda: update.commit(part.sent))
        watch("weights", lambda: tensors.write(lambda here: rule.start(after.theta[here], residual[here])))
        digests.append(hashlib.sha256(data).hexdigest())
        return after

    for number in range(warm + rounds):
        move(model, number)
        shared = one(shared)
    return watch.medians(warm), digests


def _move(values: F32, number: int, options: argparse.Namespace) -> None:
    def move(here: slice) -> None:
        values[here] -= drift(here, number, options.drift, options.noise)

    spread(move, chunks_of(values.size))


# On a GPU


def checkpoint_on(device: torch.device, size: int, seed: int = 0) -> torch.Tensor:
    """Weights as in a checkpoint, generated on the device."""
    out, generator = torch.empty(size, device=device), torch.Generator(device).manual_seed(seed)
    for piece in out.split(PIECE):
        piece.normal_(0, 0.05, generator=generator)
        piece.copy_(piece.bfloat16())
    return out


def drift_on(
    device: torch.device, size: int, number: int, options: argparse.Namespace, seed: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """As `drift`, piece by piece."""
    for begin in range(0, size, PIECE):
        here = slice(begin, min(begin + PIECE, size))
        out = torch.zeros(here.stop - begin, device=device)
        for by, of in ((options.drift, 0), (options.noise, number + 1)):
            generator = torch.Generator(device).manual_seed((seed << 40) + (begin << 8) + of)
            out += by * torch.empty_like(out).normal_(generator=generator)
        yield here, out


class DeviceDrift(torch.optim.Optimizer):
    """Moves fragments on a GPU by `drift_on`, and waits until the GPU is done."""

    def __init__(
        self, fragments: Sequence[torch.Tensor], model: Sequence[dict[str, Any]], options: argparse.Namespace
    ) -> None:
        super().__init__([parameter for one in model for parameter in one.values()], {})
        self._fragments, self._options, self._number = fragments, options, 0
        self.turn = 0  # the fragment whose round is next: the others need not move for it

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = self._fragments[self.turn]
        for here, by in drift_on(weights.device, weights.numel(), self._number, self._options, self.turn):
            weights[here] -= by
        self._number += 1
        wait(weights.device)


def whole_on(options: argparse.Namespace, device: torch.device, size: int, coded: bool) -> dict[str, Any]:
    """Seconds of rounds of a real trainer, and the peak of torch's memory: in all, and on top of the state."""
    count = options.fragments
    sizes = [size * (i + 1) // count - size * i // count for i in range(count)]
    fragments = [checkpoint_on(device, n, seed) for seed, n in enumerate(sizes)]
    cut = [flat.tensor_split(options.tensors) for flat in fragments]
    model = [{f"{i}.{j}": torch.nn.Parameter(w) for j, w in enumerate(some)} for i, some in enumerate(cut)]
    optimizer, exchange = DeviceDrift(fragments, model, options), Alone(options.trainers, coded)
    seconds: list[list[float]] = [[] for _ in sizes]
    extra, peaks, shares, sent = [], [], [], []
    gate = {"compact": options.compact, "reach": options.reach}
    rounds = options.rounds if count == 1 else 1
    began = perf_counter()
    with host_as_device(device.type == "cpu"):
        loco = PulseLoCo(model, optimizer, sync_every=count, exchange=exchange, **gate)
    with loco:
        for number in range((WARM + rounds) * count):
            if perf_counter() - began > options.limit_s:
                break
            optimizer.turn, before, held = number % count, exchange.sent_bytes, _allocated(device)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            optimizer.step()
            report = loco.last_report
            assert report is not None
            assert report.fragment == optimizer.turn
            if number >= WARM * count:
                seconds[optimizer.turn].append(report.seconds)
                peaks.append(_peak(device))
                extra.append((_peak(device) - held) / report.total)
                shares.append(report.sent / report.total)
                sent.append(exchange.sent_bytes - before)
    measured = [statistics.median(some) for some in seconds if some]
    if not measured:
        raise SystemExit(f"no round was measured within {options.limit_s:g} s: give --limit-s more, or fewer weights")
    return {
        "seconds": statistics.median(measured),
        "seconds of all": sum(measured) if len(measured) == count else None,
        "fragments measured": len(measured),
        "weights of a fragment": max(sizes),
        "peak_bytes": max(peaks),
        "peak bytes a weight of the fragment in addition to what is kept": max(extra),
        "share": statistics.median(shares),
        "payload": statistics.median(sent),
    }


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def movers(options: argparse.Namespace, device: torch.device) -> tuple[Move, Move]:
    """A function that moves weights on a device, and one that moves those in host memory by the same amounts."""

    def there(weights: torch.Tensor, number: int) -> None:
        for here, by in drift_on(device, weights.numel(), number, options):
            weights[here] -= by

    def here(weights: torch.Tensor, number: int) -> None:
        for piece, by in drift_on(device, weights.numel(), number, options):
            weights[piece] -= by.cpu()

    return there, here


def compare(options: argparse.Namespace, device: torch.device, size: int) -> int:
    """Run small rounds on the device and on the host; return how many digests of states and payloads are equal."""
    move_there, move_here = movers(options, device)
    start = checkpoint_on(device, size)
    there = pieces(options, start.clone(), move_there, 2, 1, there=True)[1]
    here = pieces(options, start.cpu().clone(), move_here, 2, 1)[1]
    assert there == here, "a device and a host disagree"
    return len(there)


def on_device(options: argparse.Namespace, size: int) -> None:
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    same = compare(options, device, options.check_weights)
    found: dict[str, Any] = {"device": name, "digests compared": same}
    for coded in (False, True):
        if options.fragments == 1 or coded:
            found["coded" if coded else "not coded"] = whole_on(options, device, size, coded)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    one = found["coded"]
    print(f"{size:,} weights in {options.fragments} fragments of {options.tensors} tensors on {name}, ", end="")
    print(f"R = {options.trainers}, ", end="")
    print(f"{one['share']:.2%} sent; {same} digests of small rounds are those of the host.\n")
    head = ["a round of a fragment without the exchange", "ms", "peak GB"]
    more = "peak bytes a weight of the fragment in addition to what is kept"
    kinds = {kind: found[kind] for kind in ("not coded", "coded") if kind in found}
    cells = [
        [kind, f"{1000 * row['seconds']:.1f}", f"{row['peak_bytes'] / 1e9:.1f}", f"{row[more]:.1f}"]
        for kind, row in kinds.items()
    ]
    print(table([*head, "bytes a weight in addition to what is kept"], cells))
    if options.fragments > 1:
        every = one["seconds of all"]
        told = f"{1000 * every:.0f} ms" if every else f"only {one['fragments measured']} were measured in time"
        print(f"\nOne round of all {options.fragments} fragments, one after the other: {told}.")
    else:
        found["pieces"], found["pieces, host"] = _pieces_of_both(options, device, size)
        host = found["pieces, host"]
        cells = [
            [piece, f"{1000 * seconds:.2f}", f"{1000 * host[piece]:.0f}" if host else "not measured"]
            for piece, seconds in found["pieces"].items()
        ]
        in_a_round = sum(seconds for piece, seconds in found["pieces"].items() if not piece.startswith("decode"))
        print(
            "\n"
            + table(["piece", "GPU, ms", "host, ms"], [*cells, ["all but decoding", f"{1000 * in_a_round:.1f}", ""]])
        )
        print(f"\nThe host has {default_threads()} cores." if host else "\nNo host was measured: pip install numba.")
    print(json_line({"bench": "loco-round", **provenance("torch"), "options": vars(options), **found}))


def _pieces_of_both(
    options: argparse.Namespace, device: torch.device, size: int
) -> tuple[dict[str, float], dict[str, float] | None]:
    move_there, move_here = movers(options, device)
    start = checkpoint_on(device, size)
    host = start.cpu().clone()
    there, digests = pieces(options, start, move_there, options.rounds, there=True)
    if kernels.active().__name__.endswith("reference") or not options.host_rounds:
        return there, None
    here, others = pieces(options, host, move_here, options.host_rounds, 1)
    assert others == digests[: len(others)], "a device and a host disagree"
    return there, here


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=134_515_008)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--compact", type=int, default=0)
    parser.add_argument("--reach", type=float, default=1.4)
    parser.add_argument("--rounds", type=int, default=5, help=f"rounds to measure, after {WARM} of warm-up")
    parser.add_argument("--drift", type=float, default=1e-6, help="of a weight, the same in every round")
    parser.add_argument("--noise", type=float, default=2e-6, help="of a weight, different in every round")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="measure on it; cpu: Triton's interpreter, a trial")
    parser.add_argument("--fragments", type=int, default=1, help="on a GPU: fragments of the weights")
    parser.add_argument("--tensors", type=int, default=272, help="on a GPU: tensors of a fragment")
    parser.add_argument("--limit-s", type=float, default=45, help="on a GPU: start no round after this time")
    parser.add_argument("--host-rounds", type=int, default=2, help="on a GPU: rounds also measured on the host")
    parser.add_argument("--check-weights", type=int, default=1 << 14, help="of the small rounds that are compared")


def main(given: argparse.Namespace) -> None:
    size = int(given.weights)
    if given.device:
        on_device(given, size)
        return
    small = argparse.Namespace(**{**vars(given), "rounds": 1})
    whole(small, 1 << 16, True)  # loads and compiles all there is

    def move(weights: torch.Tensor, number: int) -> None:
        _move(weights.numpy(), number, given)

    found: dict[str, Any] = {
        "not coded": whole(given, size, False),
        "coded": whole(given, size, True),
        "pieces": pieces(given, torch.from_numpy(checkpoint(size)), move, given.rounds)[0],
    }
    plain, coded = found["not coded"], found["coded"]
    print(f"{size:,} weights, {default_threads()} cores, R = {given.trainers}, {plain['share']:.2%} sent.\n")
    head = ["a round without the exchange", "seconds"]
    cells = [
        ["not coded", f"{plain['seconds']:.2f}", f"{plain['peak']:.1f}"],
        ["coded", f"{coded['seconds']:.2f}", f"{coded['peak']:.1f}"],
    ]
    print(table([*head, "bytes a weight in addition to theta, e, m and x"], cells) + "\n")
    print(table(["piece", "seconds"], [[name, f"{seconds:.3f}"] for name, seconds in found["pieces"].items()]) + "\n")
    print(json_line({"bench": "loco-round", **provenance("torch"), "given": vars(given), **found}))
