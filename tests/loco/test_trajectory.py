import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.loco import SGD, DiLoCo, Nesterov, PublishedPulseLoCo, PulseLoCo, RoundReport, StoreExchange
from pulsesync.store.memory import MemoryStore
from tests.loco import reference
from tests.loco.fleet import flat, plain_gate
from tests.tiers import slow

FOLDER = Path(__file__).with_name("trajectories")
WRITE = os.environ.get("PULSE_WRITE_FIXTURES") == "1"  # writes what is found instead of comparing with it
NAMES = ["ada", "bea", "cia", "dea"]


def recorded(name: str, key: str, found: Any) -> Any:
    """What the fixture has; what was found, where fixtures are being written."""
    path = FOLDER / f"{name}.json"
    table = json.loads(path.read_text()) if path.exists() else {}
    if WRITE:
        table[key] = found
        lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(table[k])}" for k in sorted(table))
        path.write_text("{\n" + lines + "\n}\n")
    return table[key]


def together(count: int, train: Callable[[int, StoreExchange], Any]) -> list[Any]:
    """Run `count` trainers that exchange updates through a store, each in a thread; return their results."""
    store, found, faults = MemoryStore(), [None] * count, []

    def run(i: int) -> None:
        try:
            found[i] = train(i, StoreExchange(store, NAMES[i], trainers=count, patience_s=20, poll_s=0.001))
        except BaseException as e:  # noqa: BLE001 - raised in the test's own thread
            faults.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    if faults:
        raise faults[0]
    assert not any(thread.is_alive() for thread in threads)
    return found


Kind = type[DiLoCo] | type[PulseLoCo] | type[PublishedPulseLoCo]

# Two fragments of one weight each, constant gradients: everything can be worked out by hand

STEPS = 24  # four rounds of each fragment


def worked_out(gradients: list[float], delay: int, blend: float) -> list[list[list[float]]]:
    """DiLoCo in plain Python: the weights of every trainer after every step. Outer SGD of 2, sync_every 6."""
    theta = [1.0, 1.0]
    trainers = [[1.0, 1.0] for _ in gradients]
    history: list[list[list[float]]] = [[] for _ in gradients]
    turn = steps = 0
    mean = 0.0
    for _ in range(STEPS):
        for x, gradient in zip(trainers, gradients, strict=True):
            x[:] = [weight - gradient for weight in x]
        steps += 1
        if steps == 3 - delay:
            mean = sum(theta[turn] - x[turn] for x in trainers) / len(trainers)
        if steps == 3:
            theta[turn] -= 2.0 * mean
            for x in trainers:
                x[turn] = theta[turn] + blend * (x[turn] - theta[turn])
            turn, steps = 1 - turn, 0
        for seen, x in zip(history, trainers, strict=True):
            seen.append(list(x))
    return history


def worked_out_shared(gradients: list[float], delay: int, blend: float) -> list[list[float]]:
    """The shared weights of the same training after every step, as the sum of the updates of each fragment's rounds.

    A trainer begins a round at theta + blend (x − theta); from there its gradient is constant.
    """
    theta, kept = [1.0, 1.0], [[0.0, 0.0] for _ in gradients]  # what blend has kept: x − theta when a round came in
    history = []
    for step in range(1, STEPS + 1):
        if step % 3 == 0:
            turn = step // 3 % 2 ^ 1
            taken = 3 if step == 3 else 6  # steps since its last round
            sent = [g * (taken - delay) - k[turn] for g, k in zip(gradients, kept, strict=True)]
            theta[turn] -= (after := 2.0 * sum(sent) / len(sent))
            for g, k in zip(gradients, kept, strict=True):
                k[turn] = blend * (k[turn] - g * taken + after)
        history.append(list(theta))
    return history


def walked(
    kind: Kind, gradients: list[float], delay: int, blend: float, **options: Any
) -> tuple[list[list[list[float]]], list[list[list[float]]], list[list[str]]]:
    """The same with the library, the shared weights of every trainer, and the digests of both fragments."""

    def train(i: int, exchange: StoreExchange) -> tuple[list[list[float]], list[list[float]], list[str]]:
        pieces = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for piece in pieces:
            torch.nn.init.ones_(piece.weight)
        weights = [piece.weight for piece in pieces]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        seen, shared, digests = [], [], []
        with kind(
            pieces,
            optimizer,
            exchange=exchange,
            outer=SGD(2.0),
            sync_every=6,
            delay=delay,
            blend=blend,
            **plain_gate(kind, options),
        ) as loco:
            for _ in range(STEPS):
                for weight in weights:
                    weight.grad = torch.full_like(weight, gradients[i])
                optimizer.step()
                seen.append([weight.item() for weight in weights])
                theta = [saved["theta"].item() for saved in loco.state_dict()["shared"]]
                named = loco.shared_weights({"a": weights[0], "b": weights[1]})
                assert [named["a"].item(), named["b"].item()] == theta
                shared.append(theta)
                digests += loco.digests
        return seen, shared, digests

    found = together(len(gradients), train)
    return [one[0] for one in found], [one[1] for one in found], [one[2] for one in found]


every_kind = pytest.mark.parametrize("kind", [DiLoCo, PulseLoCo, slow(PublishedPulseLoCo)])


@pytest.mark.parametrize(
    ("delay", "blend"), [(0, 0.0), (1, 0.5), slow(0, 0.5), slow(0, 1.0), slow(1, 0.0), slow(1, 1.0)]
)
@every_kind
def test_every_weight_at_every_step_is_the_one_worked_out(kind: Kind, delay: int, blend: float) -> None:
    found, shared, digests = walked(kind, [2.0, 2.0], delay, blend)
    assert found == worked_out([2.0, 2.0], delay, blend)
    assert shared == [worked_out_shared([2.0, 2.0], delay, blend)] * 2
    assert found == recorded("constant", f"delay={delay} blend={blend}", found)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("delay", "blend"), [(0, 0.5), (2, 1.0), slow(0, 0.0), slow(1, 0.5)])
@every_kind
def test_trainers_with_different_gradients_move_by_their_mean(kind: Kind, delay: int, blend: float) -> None:
    found, shared, digests = walked(kind, [2.0, -1.0, 5.0], delay, blend)
    assert found == worked_out([2.0, -1.0, 5.0], delay, blend)
    assert shared == [worked_out_shared([2.0, -1.0, 5.0], delay, blend)] * 3
    assert digests[0] == digests[1] == digests[2]


# A small network whose inner steps are made of integers, so that every machine takes the same


def integers(seed: int, size: int) -> np.ndarray:
    """Odd numbers between ±2^23 by a fixed rule (splitmix64), as FP32."""
    z = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)).astype(np.int64) - (1 << 23) | 1).astype(np.float32)


class Drift(torch.optim.Optimizer):
    """An inner optimizer whose steps are known beforehand: a way of its trainer's own and, all alike, a common one.

    Steady ones go the common way, as far for every weight, and a little besides.
    """

    def __init__(
        self, parameters: Iterator[torch.nn.Parameter], trainer: int, size: float, steady: bool = False
    ) -> None:
        super().__init__(parameters, {})
        self._trainer, self._size, self._steps, self._steady = trainer, np.float32(size / (1 << 23)), 0, steady

    def step(self, closure: Any = None) -> Any:
        self._steps += 1
        for i, parameter in enumerate(self.param_groups[0]["params"]):
            own = integers(1000 * self._trainer + 100 * self._steps + i, parameter.numel()) * self._size
            common = integers(50_000 + i, parameter.numel()) * self._size
            if self._steady:
                own, common = own * np.float32(0.25), np.copysign(self._size * np.float32(1 << 23), common)
            values = parameter.detach().numpy()
            values += (own + common).reshape(values.shape)


def network() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 10))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            start = integers(90_000 + i, parameter.numel()) * np.float32(2.0**-26)
            parameter.copy_(torch.from_numpy(start).view(parameter.shape).bfloat16())
    return model


@dataclass(frozen=True, eq=False)
class Drifted:
    """How a trainer went: what it reported, all that it had after every round, and the weights that it ended with."""

    reports: list[RoundReport]
    theta: list[np.ndarray]
    residual: list[np.ndarray]
    momentum: list[np.ndarray | None]
    weights: np.ndarray


EVERY = 4  # steps of a round


def drifted(
    kind: Kind, size: float, rounds: int, trainers: int = 3, steady: bool = False, **options: Any
) -> list[Drifted]:
    def train(i: int, exchange: StoreExchange) -> Drifted:
        model = network()
        reports: list[RoundReport] = []
        states: list[Any] = []

        def on_round(report: RoundReport) -> None:
            reports.append(report)
            states.append(loco.state_dict())

        optimizer = Drift(model.parameters(), i, size, steady)
        loco = kind(
            model, optimizer, exchange=exchange, sync_every=EVERY, on_round=on_round, **plain_gate(kind, options)
        )
        with loco:
            for _ in range(EVERY * rounds):
                optimizer.step()
        return Drifted(
            reports,
            [state["shared"][0]["theta"].numpy() for state in states],
            [state["private"]["residuals"][0].numpy() for state in states],
            [state["private"]["momenta"][0].numpy() if state["private"]["momenta"] else None for state in states],
            flat(model),
        )

    return together(trainers, train)


def bits(values: np.ndarray) -> bytes:
    return values.tobytes()


RUNS: dict[str, dict[str, Any]] = {
    "dense": {"kind": DiLoCo},
    "exact": {"kind": PulseLoCo},
    "compact 3": {"kind": PulseLoCo, "compact": 3},
    "compact 0": {"kind": PulseLoCo, "compact": 0},
    "reach 2": {"kind": PulseLoCo, "reach": 2.0},
    "the default": {"kind": PulseLoCo, "compact": 0, "reach": 1.4},
    "exact with delay and blend": {"kind": PulseLoCo, "delay": 2, "blend": 0.5},
    "as published, exact": {"kind": PublishedPulseLoCo},
    "as published, compact 3": {"kind": PublishedPulseLoCo, "compact": 3},
    "as published, with delay and blend": {"kind": PublishedPulseLoCo, "delay": 2, "blend": 0.5},
}


SLOW_RUNS = ("exact", "compact 0", "reach 2", "as published, compact 3", "as published, with delay and blend")


@pytest.mark.parametrize("name", [slow(name) if name in SLOW_RUNS else name for name in RUNS])
def test_every_round_of_a_network_leads_to_the_digest_it_once_did(name: str) -> None:
    found = drifted(size=2.0**-15, rounds=6, **RUNS[name])
    reports = [one.reports for one in found]
    digests = [[report.digest for report in some] for some in reports]
    assert digests[0] == digests[1] == digests[2]
    assert all(len(set(some)) == 6 for some in digests)
    assert [report.round for report in reports[0]] == [1, 2, 3, 4, 5, 6]
    assert all(report.members == ("ada", "bea", "cia") for some in reports for report in some)
    for one in found:
        start = one.theta[-1] - one.residual[-1] if RUNS[name]["kind"] is PulseLoCo else one.theta[-1]
        assert RUNS[name].get("blend") or bits(one.weights) == bits(start)
    if RUNS[name]["kind"] is not DiLoCo:  # the gate is neither open nor shut
        assert all(0.02 < report.sent / report.total < 0.9 for some in reports for report in some)
    told = {"digests": digests[0], "sent": [[report.sent for report in some] for some in reports]}
    assert told == recorded("digests", name, told)


OUTERS = [SGD(1.0), SGD(0.5, 0.9), Nesterov(0.7, 0.9)]
QUICK_OUTERS = [*(slow(outer) for outer in OUTERS[:2]), OUTERS[2]]


@pytest.mark.parametrize("outer", QUICK_OUTERS, ids=str)
@pytest.mark.parametrize(("delay", "blend"), [(0, 0.0), (1, 0.5)])
@pytest.mark.parametrize(("kind", "trainers"), [(PublishedPulseLoCo, 2), (PulseLoCo, 1)])
def test_where_everything_is_sent_gated_training_is_dense_training_bit_for_bit(
    kind: Kind, trainers: int, outer: SGD, delay: int, blend: float
) -> None:
    """As published, with any number of trainers; with momenta of their own, for one."""
    options: dict[str, Any] = {"trainers": trainers, "steady": True, "outer": outer, "delay": delay, "blend": blend}
    gated = drifted(kind, 64.0, 4, **options)
    dense = drifted(DiLoCo, 64.0, 4, **options)
    for one, other in zip(gated, dense, strict=True):
        assert all(report.sent == report.total for report in one.reports)
        assert [bits(theta) for theta in one.theta] == [bits(theta) for theta in other.theta]
        assert bits(one.weights) == bits(other.weights)
        assert kind is PulseLoCo or [r.digest for r in one.reports] == [r.digest for r in other.reports]


def by_reference(
    size: float, rounds: int, trainers: int, outer: SGD, reach: float | None, steady: bool = False
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The same with the reference: theta, residuals and momenta after every round."""
    models = [network() for _ in range(trainers)]
    optimizers = [Drift(model.parameters(), i, size, steady) for i, model in enumerate(models)]

    def inner(r: int, _: int, start: np.ndarray) -> np.ndarray:
        torch.nn.utils.vector_to_parameters(torch.from_numpy(start.copy()), models[r].parameters())
        for _ in range(EVERY):
            optimizers[r].step()
        return flat(models[r])

    return list(islice(reference.rounds(flat(network()), trainers, outer, inner, reach), rounds))


@pytest.mark.parametrize("outer", QUICK_OUTERS, ids=str)
@pytest.mark.parametrize("trainers", [slow(2), 3])
@pytest.mark.parametrize(
    ("size", "reach", "steady"), [(64.0, None, True), (2.0**-15, 1.0, False), (2.0**-15, 2.0, False)]
)
def test_every_round_is_that_of_the_reference_bit_for_bit(
    outer: SGD, trainers: int, size: float, reach: float | None, steady: bool
) -> None:
    """With everything sent, and with the gate half open: shared weights, residuals and momenta."""
    options: dict[str, Any] = {"trainers": trainers, "outer": outer, "steady": steady}
    found = drifted(PulseLoCo, size, 5, reach=reach or 1.0, **options)
    expected = by_reference(size, 5, trainers, outer, reach, steady)
    if reach is None:
        assert all(report.sent == report.total for one in found for report in one.reports)
    for r, one in enumerate(found):
        for number, (theta, e, m) in enumerate(expected):
            momentum = one.momentum[number]
            assert momentum is not None
            assert bits(one.theta[number]) == bits(theta)
            assert np.array_equal(one.residual[number], e[r])
            assert np.array_equal(momentum, m[r])


class Piece:
    """One trainer's part of a fragment, for the reference."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.e, self.m = np.zeros((2, flat(module).size), np.float32)
        self.s = self.next_m = self.q = self.e

    def propose(self, theta: np.ndarray, outer: SGD) -> None:
        self.s, self.next_m = reference.advance(theta, self.e, self.m, flat(self.module), outer)
        self.q = np.where(reference.visible(theta, self.s, 1.0), self.s, np.float32(0))

    def commit(self, theta: np.ndarray, blend: float) -> None:
        self.e, self.m = self.s - self.q, self.next_m
        z = theta - self.e
        x = z + np.float32(blend) * (flat(self.module) - z)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(x), self.module.parameters())


def pieces_of(i: int) -> tuple[list[torch.nn.Module], Drift]:
    """Two fragments of a trainer's network, and its inner optimizer."""
    model = network()
    assert isinstance(model, torch.nn.Sequential)
    return [model[0], model[2]], Drift(model.parameters(), i, 2.0**-15)


@pytest.mark.parametrize(
    ("delay", "blend"), [(0, 0.0), (2, 0.5), *(slow(*some) for some in ((0, 0.5), (1, 0.0), (1, 1.0)))]
)
def test_delay_blend_and_fragments_are_those_of_the_reference_after_every_step(delay: int, blend: float) -> None:
    """s and m' are those of the proposal, weights become z' + blend (x − z'), and the next delta counts from z'."""
    outer, count, steps = Nesterov(0.7, 0.9), 2, 24

    def train(i: int, exchange: StoreExchange) -> list[list[bytes]]:
        modules, optimizer = pieces_of(i)
        seen = []
        options: dict[str, Any] = {"outer": outer, "sync_every": 2 * EVERY, "delay": delay, "blend": blend}
        with PulseLoCo(modules, optimizer, exchange=exchange, **plain_gate(PulseLoCo, options)) as loco:
            for step in range(steps):
                optimizer.step()
                seen.append([bits(flat(module)) for module in modules])
                if step % EVERY == EVERY - 1:  # a round has just ended, and none is in progress
                    state = loco.state_dict()
                    thetas = [shared["theta"] for shared in state["shared"]]
                    own = [*state["private"]["residuals"], *state["private"]["momenta"]]
                    seen.append([bits(values.numpy()) for values in [*thetas, *own]])
        return seen

    found = together(count, train)
    fleet = [pieces_of(i) for i in range(count)]
    pieces = [[Piece(module) for module in modules] for modules, _ in fleet]
    theta = [flat(module) for module in fleet[0][0]]
    expected: list[list[list[bytes]]] = [[] for _ in fleet]
    for step in range(steps):
        turn, since = step // EVERY % 2, step % EVERY + 1
        for _, optimizer in fleet:
            optimizer.step()
        if since == EVERY - delay:
            for mine in pieces:
                mine[turn].propose(theta[turn], outer)
        if since == EVERY:
            total = np.zeros_like(theta[turn])
            for mine in pieces:
                total += mine[turn].q
            theta[turn] = theta[turn] - total / np.float32(count)
            for mine in pieces:
                mine[turn].commit(theta[turn], blend)
        for mine, seen in zip(pieces, expected, strict=True):
            seen.append([bits(flat(piece.module)) for piece in mine])
            if since == EVERY:
                seen.append([bits(v) for v in [*theta, *(p.e for p in mine), *(p.m for p in mine)]])
    assert found == expected


def ulp_of(*values: np.ndarray) -> float:
    """The unit in the last place of the largest of some numbers."""
    return float(np.spacing(max(np.abs(v).max() for v in values).astype(np.float32)))


def allowed(outer: SGD, operand: float) -> float:
    """How far FP32 may lead two ways of computing the same rounds apart in a round, given the last place of the largest
    number in it.

    A delta is EVERY sums and a difference on each way, half a place each, and moves weights by its reach in the end;
    what follows is at most eight more operations: momentum (3), times lr, the residual (2), the mean and theta.
    """
    return (outer.reach * (EVERY + 1) + 8) * operand


@pytest.mark.parametrize("outer", QUICK_OUTERS, ids=str)
@pytest.mark.parametrize("trainers", [2, slow(4)])
def test_with_everything_sent_shared_weights_are_those_of_diloco_within_fp32(outer: SGD, trainers: int) -> None:
    """The mean of the trainers' momenta is the momentum of their mean, but for rounding."""
    options: dict[str, Any] = {"trainers": trainers, "outer": outer, "steady": True}
    ours, dense = (drifted(kind, 64.0, 6, **options)[0] for kind in (PulseLoCo, DiLoCo))
    bound = 0.0
    for number, (a, b) in enumerate(zip(ours.theta, dense.theta, strict=True)):
        assert ours.reports[number].sent == ours.reports[number].total
        m = ours.momentum[number]
        assert m is not None
        bound += allowed(outer, ulp_of(a, b, 2 * m))
        assert np.abs(a.astype(np.float64) - b).max() <= bound


def test_with_the_gate_half_open_gated_and_dense_training_part() -> None:
    dense = drifted(DiLoCo, 2.0**-15, 2)[0]
    for kind in (PulseLoCo, PublishedPulseLoCo):
        assert bits(drifted(kind, 2.0**-15, 2)[0].theta[-1]) != bits(dense.theta[-1])


@pytest.mark.parametrize("compact", [slow(None), 3])
@pytest.mark.parametrize(
    ("kind", "outer"),
    [(PulseLoCo, Nesterov()), *(slow(PulseLoCo, outer) for outer in OUTERS[:2]), slow(PublishedPulseLoCo, SGD(1.0))],
)
def test_shared_weights_less_the_mean_residual_are_the_dense_ones_for_the_same_updates(
    kind: Kind, outer: SGD, compact: int | None
) -> None:
    """For a fixed membership, and with a momentum before the gate for any outer step; as published, for averaging."""
    gated = drifted(kind, 2.0**-15, 6, outer=outer, compact=compact)
    dense = drifted(DiLoCo, 2.0**-15, 6, outer=outer)[0]
    bound = 0.0
    for number, theta in enumerate(dense.theta):
        bound += allowed(outer, ulp_of(theta, gated[0].theta[number]))
        corrected = gated[0].theta[number] - np.mean([one.residual[number].astype(np.float64) for one in gated], 0)
        assert np.abs(corrected - theta).max() <= bound
    assert np.abs(gated[0].theta[-1] - dense.theta[-1]).max() > 10 * bound  # and without the residual they are not
