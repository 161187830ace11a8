"""Rounds of trainers whose parameters are on a device: byte for byte those of trainers in host memory, and with them.

Without a GPU, tensors in host memory count as such, and Triton's interpreter runs the kernels.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync import device as devices
from pulsesync.device.vectors import DeviceKernels
from pulsesync.errors import RoundError, StateError
from pulsesync.kernels import spec
from pulsesync.loco import SGD, GroupExchange, PulseLoCo
from pulsesync.loco.fragments import FragmentTensors
from pulsesync.loco.vectors import HOST, vectors_at
from pulsesync.store import MemoryStore
from tests.backends import host_as_device
from tests.device import interpreter
from tests.device.launches import OF_ROUNDS, counted
from tests.loco.fleet import Trainer, alone, meet, same, together
from tests.processes import Fleet, fleet, group
from tests.tiers import slow

__all__ = ["fleet"]

pytestmark = pytest.mark.usefixtures("many_lanes")

SHAPES = {"embed": (16, 8), "layer.weight": (9, 11), "norm": (7,), "none": (0, 3), "scale": ()}
WAYS: dict[str, dict[str, Any]] = {
    "PulseLoCo": {"compact": 0, "reach": 1.4},
    "PulseLoCo, exact": {},
    "as published": {"kind": "PublishedPulseLoCo"},
    "DiLoCo": {"kind": "DiLoCo"},
    "DDP": {"kind": "DDP"},
    "fragments": {"pieces": 2, "compact": 2},
    "delay": {"delay": 1, "blend": 0.25, "compact": 1},
    "everything is sent": {"lr": 0.5, "compact": 3, "outer": SGD(1.0)},
    "nothing is sent": {"lr": 1e-12},
}


def trainer(exchange: Any, who: int, on: str, **options: Any) -> Trainer:
    """A trainer whose parameters are on a device, or, for "host", in host memory."""
    options = {"watch": False, "shapes": SHAPES, **options}
    with host_as_device(on != "host"):
        made = Trainer(exchange, who, device="cpu" if on == "host" else on, **options)
    for fragment in made.loco._fragments:
        assert (fragment.tensors.vectors is HOST) == (on == "host")
    return made


def summary(one: Trainer) -> dict[str, Any]:
    """The state, digests and reports of a trainer, in a form that can be compared byte for byte."""
    state = one.loco.state_dict()
    private = [v.numpy().tobytes() for key in ("residuals", "momenta", "weights") for v in state["private"][key]]
    return {
        "shared": [(s["round"], s["theta"].numpy().tobytes(), s["trend"].numpy().tobytes()) for s in state["shared"]],
        "parts": [s["parts"] for s in state["shared"]],
        "private": private,
        "digests": one.digests,
        "reports": [(r.sent, r.total, r.moved, r.members, r.sent_bytes, r.received_bytes) for r in one.reports],
    }


SLOW_WAYS = ("PulseLoCo, exact", "DiLoCo", "everything is sent", "nothing is sent")  # what others do, too


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW_WAYS)) for way in WAYS])
def test_rounds_are_those_of_the_host_byte_for_byte(device: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceKernels, "chunk", 100)
    found = []
    for on in (device, "host"):
        with trainer(alone(), 0, on, **WAYS[way]) as one:
            one.step(4)
        found.append(summary(one))
    assert found[0] == found[1]
    assert found[0]["reports"]


@pytest.mark.parametrize("way", ["PulseLoCo", *(slow(way) for way in ("delay", "DiLoCo", "DDP"))])
def test_a_trainer_on_a_device_and_one_on_a_host_meet(device: str, way: str) -> None:
    found = []
    for first in (device, "host"):
        store = MemoryStore()
        places = [first, "host"]
        pair = [trainer(meet(store, "ab"[i], 2), i, places[i], **WAYS[way]) for i in range(2)]

        def train(one: Trainer) -> None:
            with one:
                one.step(4)

        together(*(lambda one=one: train(one) for one in pair), timeout_s=120)
        assert pair[0].loco.digests == pair[1].loco.digests
        assert pair[0].loco.rounds[0] >= 2
        found.append([{**summary(one), "reports": None} for one in pair])
    assert found[0] == found[1]


def in_a_group(rank: int, size: int, folder: str, device: str, way: str) -> list[Any]:
    interpreter.mend()
    vars(spec)["LANE_DECISIONS"] = 2  # as `many_lanes` does: this process has nothing of the test's
    out = []
    with group(folder, "mixed", rank, size):
        for reduce in ("owner", "gather"):
            exchange = GroupExchange(reduce=reduce)
            with trainer(exchange, rank, device if rank == 0 else "host", **WAYS[way]) as one:
                one.step(2)
            out.append(one.digests)
    return out


@pytest.mark.parametrize("way", ["PulseLoCo", slow("DiLoCo")])
def test_they_meet_in_a_process_group_too(fleet: Fleet, device: str, way: str) -> None:
    first, second = fleet.run(in_a_group, 2, device=device, way=way)
    assert first == second
    assert first[0] == first[1]  # owner and gather
    assert all(len(digests) == 1 for digests in first)


def test_a_state_that_was_saved_on_one_is_loaded_on_the_other(device: str, tmp_path: Path) -> None:
    options = WAYS["PulseLoCo"]
    found = []
    for saved_on, loaded_on in ((device, "host"), ("host", device), ("host", "host")):
        with trainer(alone(), 0, saved_on, **options) as one:
            one.step(3)
            state = one.loco.state_dict()
        assert all(v.device.type == "cpu" for v in (state["shared"][0]["theta"], *state["private"]["weights"]))
        if loaded_on == device:  # tensors may be on either side
            state["shared"][0]["theta"] = state["shared"][0]["theta"].to(device)
            state["private"]["residuals"] = [v.to(device) for v in state["private"]["residuals"]]
        other = trainer(alone(), 0, loaded_on, **options)
        other.loco.load_state_dict(state)
        other.taken = 3
        with other:
            other.step(3)
        found.append({**summary(other), "reports": None})
    assert found[0] == found[1] == found[2]


def test_shared_weights_are_on_the_device(device: str) -> None:
    with trainer(alone(), 0, device) as one, trainer(alone(), 0, "host") as other:
        for each in (one, other):
            each.step(4)
        there, here = one.loco.shared_weights(), other.loco.shared_weights()
        assert all(w.device == p.device for w, p in zip(there.values(), one.parameters, strict=True))
        before = {name: w.clone() for name, w in there.items()}
        assert all(same(w.cpu(), here[name]) for name, w in there.items())
        one.step(2)
        assert all(same(there[name].cpu(), w.cpu()) for name, w in before.items())


def test_steps_that_came_to_nothing_are_discarded_and_those_not_finite_refused(device: str) -> None:
    with trainer(alone(), 0, device) as one:
        one.step(2)
        start, before = one.start, one.everything()
        one.step()
        with torch.no_grad():
            one.parameters[1][3, 2] = torch.nan
        with pytest.raises(StateError, match=r"the update of 'layer_weight' is not finite"):
            one.step()
        one.loco.discard()
        assert same(one.weights, start)
        assert one.everything() == before


def test_an_update_that_diverged_is_dropped(device: str, caplog: pytest.LogCaptureFixture) -> None:
    exchange: Any = alone()
    with trainer(exchange, 0, device) as one:
        confirm = exchange.confirm

        def fail(*_: Any) -> None:
            raise RoundError("nobody confirms")

        exchange.confirm = fail
        with pytest.raises(RoundError):
            one.step(2)
        exchange.confirm = confirm
        with torch.no_grad():
            one.parameters[0][0] = 1e20
        one.loco.rejoin()
        assert one.loco.rounds == [1]
        assert "its update of 'embed' has a value of" in caplog.text
        assert not one.residual.any()
        assert same(one.weights, one.theta)


def test_tensors_that_are_not_contiguous(device: str) -> None:
    values = np.arange(38, dtype=np.float32)
    with host_as_device():
        tensors = FragmentTensors(
            {"turned": torch.zeros((5, 7), device=device).T, "plain": torch.zeros(3, device=device)}
        )
    assert not tensors.is_contiguous
    v = tensors.vectors
    new = v.to_backend(values)
    tensors.write(new.__getitem__)
    assert same(v.fetch(tensors.read()), values)
    assert same(v.fetch(tensors.read_piece(slice(30, 38))), values[30:])


def test_parameters_in_several_places_are_refused(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masters = {"there": torch.zeros(3, device=device), "here": torch.zeros(2)}
    if device == "cpu":  # there is no other place: say that the first is on a GPU
        monkeypatch.setattr(devices, "find", lambda _: torch.device("cuda", 0))
    with pytest.raises(StateError, match=r"in host memory and others on cuda:0: make a fragment of"):
        FragmentTensors(masters)
    monkeypatch.undo()
    if device == "cuda":
        fragments = [{"there": masters["there"]}, {"here": masters["here"]}]
        optimizer = torch.optim.SGD(list(masters.values()), lr=0.1)
        loco = PulseLoCo(fragments, optimizer, exchange=alone(), sync_every=2)
        assert loco._fragments[0].tensors.vectors is vectors_at(torch.device("cuda", 0))
        assert loco._fragments[1].tensors.vectors is HOST
        assert [w.device.type for w in loco.shared_weights().values()] == ["cuda", "cpu"]


def test_on_round_is_called_where_the_caller_computes(device: str) -> None:
    seen: list[Any] = []
    current = torch.cuda.current_stream if device == "cuda" else lambda: None
    with trainer(alone(), 0, device) as one:
        one.loco._on_round = lambda report: seen.append((report.round, current()))
        one.step(2)
    assert seen == [(1, current())]


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["PulseLoCo", "delay", "DDP"])
def test_rounds_are_in_order_with_training_in_a_stream_of_its_own(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step and every gradient comes after work that takes long: what is read too early is something else."""
    found, stream = [], torch.cuda.Stream()
    large = torch.ones((4096, 4096), device="cuda")
    torch.cuda.synchronize()

    def work(*_: object) -> None:
        for _i in range(20):
            large.copy_(large @ large * 0)

    for delayed in (False, True):
        with torch.cuda.stream(stream), trainer(alone(), 0, "cuda", **WAYS[way]) as one:
            for hook in ("_look", "_count"):  # which wait for the device
                monkeypatch.setattr(one, hook, lambda: None)
            if delayed:
                one.optimizer.register_step_pre_hook(work)
            one.step(6)
        torch.cuda.synchronize()
        found.append({**summary(one), "reports": None})
    assert found[0] == found[1]


def test_models_of_one_tensor_are_read_in_place(device: str) -> None:
    """No copy of the weights is made to compute an update of them."""
    weights = torch.zeros(50, device=device)
    with host_as_device():
        tensors = FragmentTensors({"w": weights})
    assert tensors.read_piece(slice(0, 50)).data_ptr() == weights.data_ptr()


def test_a_step_without_a_round_does_not_wait_for_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    in_own_stream = DeviceKernels.in_own_stream

    def counted(self: DeviceKernels) -> Any:
        entered.append(1)
        return in_own_stream(self)

    with trainer(alone(), 0, device, sync_every=3) as one:
        monkeypatch.setattr(DeviceKernels, "in_own_stream", counted)
        one.step(2)
        assert not entered
        one.step()
        assert entered


def test_later_rounds_compile_nothing(device: str) -> None:
    """But the first few do, and all kernels that there are for rounds, with a momentum of a trainer's own or not."""
    with counted() as found:
        for way in ("PulseLoCo", "as published"):
            with trainer(alone(), 0, device, **WAYS[way]) as one:
                one.step(4)
                known = len(found)
                one.step(4)
        assert found[known:] == []
        assert {one.kernel for one in found} >= OF_ROUNDS - {"divide"}  # of gradients, and for a trainer that joins
