import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.loco import DiLoCo, Nesterov, PulseLoCo, RoundReport, StoreExchange
from pulsesync.loco.outer import SGD
from pulsesync.store.memory import MemoryStore

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
    """Run so many trainers that meet in a store, each in a thread; return what they return."""
    store, found, faults = MemoryStore(), [None] * count, []

    def run(i: int) -> None:
        try:
            found[i] = train(i, StoreExchange(store, NAMES[i], trainers=count, patience_s=20, poll_s=0.005))
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


def walked(
    kind: type[DiLoCo], gradients: list[float], delay: int, blend: float, **options: Any
) -> tuple[list[list[list[float]]], list[list[str]]]:
    """The same with the library, and the digests of both fragments after every step."""

    def train(i: int, exchange: StoreExchange) -> tuple[list[list[float]], list[str]]:
        pieces = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
        for piece in pieces:
            torch.nn.init.ones_(piece.weight)
        weights = [piece.weight for piece in pieces]
        optimizer = torch.optim.SGD(weights, lr=1.0)
        seen, digests = [], []
        with kind(
            pieces, optimizer, exchange=exchange, outer=SGD(2.0), sync_every=6, delay=delay, blend=blend, **options
        ) as loco:
            for _ in range(STEPS):
                for weight in weights:
                    weight.grad = torch.full_like(weight, gradients[i])
                optimizer.step()
                seen.append([weight.item() for weight in weights])
                digests += loco.digests
        return seen, digests

    found = together(len(gradients), train)
    return [seen for seen, _ in found], [digests for _, digests in found]


@pytest.mark.parametrize("blend", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("kind", [DiLoCo, PulseLoCo])
def test_every_weight_at_every_step_is_the_one_worked_out(kind: type[DiLoCo], delay: int, blend: float) -> None:
    found, digests = walked(kind, [2.0, 2.0], delay, blend)
    assert found == worked_out([2.0, 2.0], delay, blend)
    assert found == recorded("constant", f"delay={delay} blend={blend}", found)
    assert digests[0] == digests[1]


@pytest.mark.parametrize(("delay", "blend"), [(0, 0.0), (0, 0.5), (1, 0.5), (2, 1.0)])
@pytest.mark.parametrize("kind", [DiLoCo, PulseLoCo])
def test_trainers_with_different_gradients_move_by_their_mean(kind: type[DiLoCo], delay: int, blend: float) -> None:
    found, digests = walked(kind, [2.0, -1.0, 5.0], delay, blend)
    assert found == worked_out([2.0, -1.0, 5.0], delay, blend)
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


def drifted(
    kind: type[DiLoCo | PulseLoCo], size: float, rounds: int, trainers: int = 3, steady: bool = False, **options: Any
) -> tuple[list[list[RoundReport]], list[np.ndarray]]:
    """The reports of every trainer, and the weights that each ended with."""

    def train(i: int, exchange: StoreExchange) -> tuple[list[RoundReport], np.ndarray]:
        model = network()
        reports: list[RoundReport] = []
        optimizer = Drift(model.parameters(), i, size, steady)
        with kind(model, optimizer, exchange=exchange, sync_every=4, on_round=reports.append, **options):
            for _ in range(4 * rounds):
                optimizer.step()
        return reports, np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])

    found = together(trainers, train)
    return [reports for reports, _ in found], [weights for _, weights in found]


RUNS: dict[str, dict[str, Any]] = {
    "dense": {"kind": DiLoCo},
    "exact": {"kind": PulseLoCo},
    "compact 3": {"kind": PulseLoCo, "compact": 3},
    "compact 0": {"kind": PulseLoCo, "compact": 0},
    "exact with delay and blend": {"kind": PulseLoCo, "delay": 2, "blend": 0.5},
}


@pytest.mark.parametrize("name", list(RUNS))
def test_every_round_of_a_network_leads_to_the_digest_it_once_did(name: str) -> None:
    reports, weights = drifted(size=2.0**-15, rounds=6, **RUNS[name])
    digests = [[report.digest for report in some] for some in reports]
    assert digests[0] == digests[1] == digests[2]
    assert all(len(set(some)) == 6 for some in digests)
    assert [report.round for report in reports[0]] == [1, 2, 3, 4, 5, 6]
    assert all(report.members == ("ada", "bea", "cia") for some in reports for report in some)
    if not RUNS[name].get("blend"):
        assert np.array_equal(weights[0], weights[1])
        assert np.array_equal(weights[0], weights[2])
    if RUNS[name]["kind"] is PulseLoCo:  # the gate is neither open nor shut
        assert all(0.02 < report.sent / report.total < 0.9 for some in reports for report in some)
    found = {"digests": digests[0], "sent": [[report.sent for report in some] for some in reports]}
    assert found == recorded("digests", name, found)


@pytest.mark.parametrize("outer", [SGD(1.0), SGD(0.5, 0.9), Nesterov(0.7, 0.9)], ids=str)
@pytest.mark.parametrize(("delay", "blend"), [(0, 0.0), (1, 0.5)])
def test_where_everything_fires_gated_training_is_dense_training_bit_for_bit(
    outer: SGD, delay: int, blend: float
) -> None:
    options: dict[str, Any] = {"trainers": 2, "steady": True, "outer": outer, "delay": delay, "blend": blend}
    gated, weights = drifted(PulseLoCo, 64.0, 4, **options)
    dense, expected = drifted(DiLoCo, 64.0, 4, **options)
    assert all(report.sent == report.total for some in gated for report in some)
    assert [r.digest for r in gated[0]] == [r.digest for r in dense[0]] == [r.digest for r in gated[1]]
    assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(weights, expected, strict=True))


def test_with_the_gate_half_open_gated_and_dense_training_part() -> None:
    gated, dense = (drifted(kind, 2.0**-15, 2)[0] for kind in (PulseLoCo, DiLoCo))
    assert [r.digest for r in gated[0]] != [r.digest for r in dense[0]]


@pytest.mark.parametrize("compact", [None, 3])
def test_weights_less_the_mean_residual_stay_where_averaging_would_be(compact: int | None) -> None:
    residuals: dict[int, np.ndarray] = {}

    def train(i: int, exchange: StoreExchange) -> np.ndarray:
        model = network()
        optimizer = Drift(model.parameters(), i, 2.0**-15)
        loco = PulseLoCo(model, optimizer, exchange=exchange, outer=SGD(1.0), sync_every=4, compact=compact)
        with loco:
            for _ in range(4 * 6):
                optimizer.step()
            state = loco.state_dict()
        residuals[i] = state["private"]["residuals"][0].numpy().astype(np.float64)
        theta: np.ndarray = state["shared"][0]["theta"].numpy().astype(np.float64)
        return theta

    gated = together(3, train)[0]
    dense = drifted(DiLoCo, 2.0**-15, 6, outer=SGD(1.0))[1][0]
    corrected = gated - np.mean([residuals[i] for i in range(3)], 0)
    assert np.abs(gated - dense).max() > 1e-5
    assert np.abs(corrected - dense).max() < 1e-7
