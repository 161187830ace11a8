"""A round as a training script meets it: hooks on its optimizer, one trainer or a few in one process."""

import io
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync import Publisher, Subscriber
from pulsesync.errors import RoundError, StateError, StoreError
from pulsesync.loco import (
    DDP,
    SGD,
    DiLoCo,
    Nesterov,
    PulseLoCo,
    diloco,
    gate,
    outer_step,
    round_objects,
    round_rules,
    rounds,
    shared,
    store,
)
from pulsesync.store import MemoryStore
from tests.loco.fleet import KINDS, Trainer, Weights, alone, first_weights, flat, meet, same, settle, together
from tests.tiers import slow


def broken(trainer: Trainer, name: str, error: BaseException) -> None:
    """Have one of the exchange's verbs fail until it is mended."""

    def fail(*_: Any) -> Any:
        raise error

    setattr(trainer.exchange.inner, name, fail)


def mended(trainer: Trainer, name: str) -> None:
    delattr(trainer.exchange.inner, name)


# Failures


@pytest.mark.parametrize("verb", ["prepare", "propose", "confirm"])
@pytest.mark.parametrize("error", [RoundError("no"), KeyboardInterrupt(), slow(StoreError("no", retryable=True))])
@pytest.mark.parametrize(
    "options",
    [{"compact": 2}, {"delay": 1}, *(slow(o) for o in ({}, {"kind": "PublishedPulseLoCo"}, {"kind": "DiLoCo"}))],
)
def test_a_failure_out_of_step_changes_nothing_and_the_next_step_tries_again(
    verb: str, error: BaseException, options: dict[str, Any]
) -> None:
    if options.get("delay") and isinstance(error, KeyboardInterrupt):
        return  # only the training thread receives interrupts
    with Trainer(alone(), 0, sync_every=3, **options) as t:
        t.step(3)
        before, reports = t.everything(), len(t.reports)
        broken(t, verb, error)
        t.step(2)
        for tried in range(2):
            with pytest.raises(type(error)):
                t.step()
            assert t.everything() == before
            assert t.loco.state_dict()["private"]["steps"] == 3 + tried
        mended(t, verb)
        assert not same(t.weights, t.start)  # the inner steps were not undone
        t.step()
        assert t.loco.rounds == [2]
        assert len(t.reports) == reports + 1
        assert t.loco.state_dict()["private"]["steps"] == 0
        assert same(t.weights, t.start)
        if "delay" not in options:
            settle([t])


def test_an_exception_in_the_callback_comes_out_and_the_round_stands() -> None:
    seen = []

    def on_round(report: Any) -> None:
        seen.append(report.round)
        if len(seen) == 1:
            raise KeyboardInterrupt

    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with PulseLoCo(model, optimizer, exchange=alone(), sync_every=1, on_round=on_round) as loco:
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert loco.rounds == [1]
        assert same(flat(model), first_weights(loco.state_dict(), 0))
        optimizer.step()
        assert loco.rounds == [2]
    assert seen == [1, 2]


@pytest.mark.parametrize("options", [{}, {"compact": 2}, {"kind": "PublishedPulseLoCo"}, {"kind": "DiLoCo"}])
def test_ctrl_c_while_weights_are_written_comes_out_and_leaves_nothing_half_written(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(alone(), 0, **options) as t:
        t.step(3)
        written = [0]
        plain = torch.Tensor.copy_

        def copy_(self: Any, *args: Any) -> Any:
            written[0] += 1
            if written[0] == 2:
                signal.raise_signal(signal.SIGINT)
            return plain(self, *args)

        monkeypatch.setattr(torch.Tensor, "copy_", copy_)
        with pytest.raises(KeyboardInterrupt):
            t.step()
        monkeypatch.undo()
        assert t.loco.rounds == [2]  # it stands
        assert same(t.weights, t.start)
        settle([t])
        t.step(2)
        assert t.loco.rounds == [3]
        settle([t])


@pytest.mark.parametrize("every", [100, slow(15)])
@pytest.mark.parametrize("then", ["step", "save", "rejoin"])
def test_ctrl_c_at_any_line_of_a_round_loses_nothing(then: str, every: int) -> None:
    """At a line of every few, to be quick; each way to go on begins at another."""
    files = {
        module.__file__ for module in (diloco, rounds, round_objects, round_rules, store, shared, gate, outer_step)
    }
    at = 1 + ["step", "save", "rejoin"].index(then) * every // 3
    while True:
        with Trainer(meet(MemoryStore(), "a", 1, state_every=2), 0, compact=2) as t:
            t.step(3)
            left = [at]

            def trace(frame: Any, event: str, _: Any, left: list[int] = left) -> Any:
                if event == "line" and frame.f_code.co_filename in files:
                    left[0] -= 1
                    if left[0] == 0:
                        raise KeyboardInterrupt
                return trace

            before = sys.gettrace()
            sys.settrace(trace)
            try:
                t.step()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            if left[0] > 0:
                break
            if then == "save":
                t.loco.load_state_dict(t.loco.state_dict())
            if then == "rejoin":
                t.loco.rejoin()
                settle([t])
            t.step(2)  # a round that was decided, and not committed when Ctrl-C came, is found by the next step
            settle([t])
        at += every
    assert at > 150


def test_an_interrupt_while_a_delayed_round_is_awaited_leaves_it_on_its_way() -> None:
    with Trainer(alone(), 0, sync_every=2, delay=1) as t:
        t.step(3)
        flight = t.loco._round_in_background
        assert flight is not None
        plain = flight.wait

        def wait(timeout_s: float | None) -> Any:
            flight.wait = plain
            raise KeyboardInterrupt

        flight.wait = wait
        with pytest.raises(KeyboardInterrupt):
            t.step()
        assert t.loco.rounds == [1]
        t.step()
        assert t.loco.rounds == [2]
        assert len(t.ledger.offers) == 2  # it was not sent again


def test_to_join_again_while_a_round_is_on_its_way_lands_it_first() -> None:
    with Trainer(alone(), 0, sync_every=2, delay=1) as t:
        t.step(3)
        assert t.loco.rounds == [1]
        t.loco.rejoin()
        assert t.loco.rounds == [2]
        t.step(4)
        assert t.loco.rounds == [4]


def test_weights_loaded_before_the_first_round_are_where_it_begins() -> None:
    t = Trainer(alone(), 0, "DiLoCo", outer=SGD(0.5), sync_every=1, lr=0.0)
    with torch.no_grad():
        for p in t.parameters:
            p.add_(1.0)
    loaded = t.weights
    with t:
        t.step()
    assert same(t.weights, loaded)


def test_a_state_loaded_while_a_round_is_on_its_way_is_not_overwritten_by_it() -> None:
    with Trainer(alone(), 0, sync_every=4, delay=2, watch=False) as t:
        t.step(4)
        saved = t.loco.state_dict()
        t.step(6)
        t.loco.load_state_dict(saved)
        assert t.loco.rounds == [1]
        t.step(4)
        assert t.loco.rounds == [2]


def test_a_store_that_is_gone_at_the_end_does_not_keep_the_hooks() -> None:
    t = Trainer(alone(), 0, sync_every=2)
    t.loco.__enter__()
    t.step(2)
    broken(t, "leave", StoreError("gone"))
    t.loco.__exit__()  # and hides no exception of the training loop's own
    t.step(4)
    assert t.loco.rounds == [1]


# What is refused


def test_an_optimizer_that_trains_what_no_fragment_has_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    with pytest.raises(StateError, match="trains 2 parameters that no fragment has"):
        PulseLoCo(model[0], torch.optim.SGD(model.parameters(), lr=0.1), exchange=alone())


def test_an_outer_optimizer_of_torch_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="Nesterov"):
        PulseLoCo(model, inner, outer=torch.optim.SGD(model.parameters(), lr=0.7), exchange=alone())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["PulseLoCo", "PublishedPulseLoCo", "DiLoCo"])
def test_discard_goes_back_to_where_the_round_began_and_training_goes_on(kind: str) -> None:
    with Trainer(alone(), 0, kind, sync_every=2) as t:
        t.step(2)
        with torch.no_grad():
            t.modules[0].get_parameter("norm")[0] = float("nan")
        with pytest.raises(StateError, match=r"discard\(\)"):
            t.step(2)
        before = t.everything()
        t.loco.discard()
        assert t.everything() == before
        assert same(t.weights, t.start)
        assert same(t.weights, t.theta) == (kind != "PulseLoCo")
        t.step(1)
        assert t.loco.rounds == [2]


def bf16_model() -> Any:
    model = Weights()
    model.norm.data = model.norm.data.bfloat16()
    return model


@pytest.mark.parametrize("kind", list(KINDS))
def test_parameters_that_are_not_fp32_are_refused_by_name(kind: str) -> None:
    model = bf16_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(StateError, match=r"'norm' is torch.bfloat16.*FP32 master") as caught:
        KINDS[kind](model, optimizer, exchange=alone())
    assert caught.value.tensor == "norm"


def test_masters_may_be_given_by_name() -> None:
    model = bf16_model()
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(list(masters.values()), lr=1e-2)
    with PulseLoCo(masters, optimizer, exchange=alone(), sync_every=1, outer=SGD(1.0)) as loco:
        before = {name: p.clone() for name, p in masters.items()}
        for p in masters.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert loco.rounds == [1]
        start = first_weights(loco.state_dict(), 0)
        assert same(start, np.concatenate([p.reshape(-1).numpy() for p in masters.values()]))
        assert not torch.equal(before["embed"], masters["embed"])


def test_frozen_parameters_are_left_out_and_left_alone() -> None:
    model = Weights()
    model.get_parameter("norm").requires_grad_(False)
    frozen = model.get_parameter("norm").detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with DiLoCo(model, optimizer, exchange=alone(), sync_every=1) as loco:
        for p in model.parameters():
            if p.requires_grad:
                p.grad = torch.ones_like(p)
        optimizer.step()
        assert loco.last_report is not None
        assert loco.last_report.total == flat(model).size - frozen.numel()
    assert torch.equal(model.get_parameter("norm"), frozen)
    with pytest.raises(StateError, match="must have parameters"):
        DiLoCo(Weights().requires_grad_(False), optimizer, exchange=alone())


def test_a_tied_parameter_counts_once_and_must_not_be_in_two_fragments() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with DiLoCo(model, optimizer, exchange=alone(), sync_every=1) as loco:
        model.embed.weight.grad = torch.ones(6, 4)
        optimizer.step()
        assert loco.last_report is not None
        assert loco.last_report.total == 24
        assert model.head.weight is model.embed.weight
    with pytest.raises(StateError, match="two fragments"):
        DiLoCo([model.embed, model.head], optimizer, exchange=alone())
    with pytest.raises(StateError, match="twice in one"):
        DiLoCo({"a": model.embed.weight, "b": model.embed.weight}, optimizer, exchange=alone())


@pytest.mark.parametrize(
    "wrong",
    [
        {"sync_every": 0},
        {"sync_every": -2},
        {"sync_every": 3},
        {"sync_every": 2, "delay": 1},
        {"delay": -1},
        {"blend": -0.1},
        {"blend": 1.5},
        {"sync_every": 4, "delay": 2},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    pieces = [Weights(), Weights(seed=1)]
    optimizer = torch.optim.SGD([p for m in pieces for p in m.parameters()], lr=1e-2)
    with pytest.raises(ValueError, match=r"sync_every|delay|blend"):
        PulseLoCo(pieces, optimizer, exchange=alone(), **wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("options", [{}, {"compact": 2}, {"kind": "DiLoCo"}, {"delay": 1}])
def test_an_update_that_is_not_finite_is_refused_by_name_and_nothing_is_sent(
    value: float, options: dict[str, Any]
) -> None:
    store = MemoryStore()
    with Trainer(meet(store, "a", 1), 0, sync_every=2, **options) as t:
        t.step(2)
        before, keys = t.everything(), [e.key for e in store.list("rounds/")]
        good = t.modules[0].get_parameter("norm").detach().clone()
        with torch.no_grad():
            t.modules[0].get_parameter("norm")[3] = float(value)
        with pytest.raises(StateError, match="'norm' is not finite") as caught:
            t.step(2)
        assert caught.value.tensor == "norm"
        assert t.everything() == before
        assert {e.key for e in store.list("rounds/")} - set(keys) == {"rounds/0000/0000000002/left/a"}  # nobody waits
        with torch.no_grad():
            t.modules[0].get_parameter("norm").copy_(good)
        t.step(2)
        assert t.loco.rounds == [2]


def test_weights_that_could_not_be_written_are_written_at_the_next_occasion(monkeypatch: pytest.MonkeyPatch) -> None:
    with Trainer(alone(), 0, sync_every=2) as t:
        plain, failing = torch.Tensor.copy_, [True]

        def copy(tensor: torch.Tensor, *args: Any) -> Any:
            if failing and failing.pop():
                raise RuntimeError("out of memory")
            return plain(tensor, *args)

        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        with pytest.raises(RuntimeError, match="out of memory"):
            t.step(2)
        assert t.loco.rounds == [1]
        assert same(t.loco.state_dict()["private"]["weights"][0].numpy(), t.start)


# Fragments


def test_fragments_take_turns_and_have_rounds_of_their_own() -> None:
    store = MemoryStore()
    fleet = [Trainer(meet(store, name, 2), i, pieces=3, sync_every=6) for i, name in enumerate("ab")]

    def run(t: Trainer) -> list[Any]:
        seen = []
        with t:
            for _ in range(14):
                t.step()
                seen.append((list(t.loco.rounds), list(t.loco.digests)))
        return seen

    one, other = together(*(lambda t=t: run(t) for t in fleet))
    assert one == other
    assert [(r.fragment, r.round) for r in fleet[0].reports] == [(0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (0, 3)]
    assert [rounds for rounds, _ in one][5::6] == [[1, 1, 1], [2, 2, 2]]
    settle(fleet)


# Hooks


@pytest.mark.parametrize("delay", [0, 1])
def test_the_callback_is_called_once_a_round_in_the_training_thread_with_the_next_rounds_start(delay: int) -> None:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen: list[Any] = []

    def on_round(report: Any) -> None:
        state = loco.state_dict()
        assert threading.current_thread() is threading.main_thread()
        assert same(flat(model), first_weights(state, 0))
        assert report is loco.last_report
        assert report.digest == loco.digests[0]
        seen.append(report.round)

    with PulseLoCo(model, optimizer, exchange=alone(), sync_every=2, delay=delay, on_round=on_round) as loco:
        for i in range(7):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(i - 3))
            optimizer.step()
            assert len(seen) == (i + 1) // 2
    assert seen == [1, 2, 3] + [4] * delay  # a round still in progress at the end is waited for


@pytest.mark.parametrize("kind", list(KINDS))
def test_leaving_removes_the_hooks_and_entering_again_goes_on(kind: str) -> None:
    t = Trainer(alone(), 0, kind)
    t.step(3)
    assert t.loco.rounds == [0]
    t = Trainer(alone(), 0, kind)
    with t:
        t.step(2)
    rounds = t.loco.rounds
    assert rounds == ([2] if kind == "DDP" else [1])
    t.step(3)
    assert t.loco.rounds == rounds
    with t:
        t.step(2)
    assert t.loco.rounds == [2 * rounds[0]]
    with pytest.raises(RuntimeError, match="mine"), t:
        raise RuntimeError("mine")
    t.step(4)
    assert t.loco.rounds == [2 * rounds[0]]


def test_an_optimizer_that_is_given_a_closure_makes_rounds_as_well() -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
    x, y = torch.ones(4, 5), torch.zeros(4, 3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        return loss

    with PulseLoCo(model, optimizer, exchange=alone(), sync_every=2, outer=SGD(1.0)) as loco:
        losses = [float(optimizer.step(closure).detach()) for _ in range(6)]
    assert loco.rounds == [3]
    assert losses[-1] < losses[0]


# Saved states


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"compact": 2}, (1, 5, 6)),
        ({"pieces": 2, "sync_every": 6}, (2, 4, 6)),
        *(
            slow(options, range(1, 7))
            for options in (
                {"compact": 2},
                {"pieces": 2, "sync_every": 6},
                {},
                {"kind": "PublishedPulseLoCo"},
                {"kind": "DiLoCo"},
            )
        ),
    ],
)
def test_a_state_saved_in_the_middle_of_a_round_goes_on_bit_for_bit(
    options: dict[str, Any], steps: Iterable[int], tmp_path: Path
) -> None:
    options = {"sync_every": 3, **options}
    for at in steps:
        with Trainer(alone(), 0, **options) as whole:
            whole.step(at)
            whole.save(tmp_path / "saved")
            whole.step(9)
        again = Trainer(alone(), 0, seed=3, **options)
        again.load(tmp_path / "saved")
        assert again.loco.digests != whole.loco.digests
        store = MemoryStore()
        with Trainer(meet(store, "a", 1), 0, **options):  # the run is there, and at its beginning
            pass
        again.exchange.inner = meet(store, "a", 1)
        with again:
            again.step(9)
        assert again.everything() == whole.everything()
        assert all(same(flat(a), flat(b)) for a, b in zip(again.modules, whole.modules, strict=True))


def test_a_saved_state_holds_plain_tensors_and_numbers_that_do_not_change_later() -> None:
    with Trainer(alone(), 0, compact=2) as t:
        t.step(3)
        state = t.loco.state_dict()
        held = io.BytesIO()
        torch.save(state, held)
        before = {key: state["shared"][0][key].clone() for key in ("theta", "trend")}
        before_own = {key: state["private"][key][0].clone() for key in ("residuals", "momenta")}
        weights = state["private"]["weights"][0].clone()
        t.step(5)
        assert all(torch.equal(state["private"][key][0], value) for key, value in before_own.items())
        assert all(torch.equal(state["shared"][0][key], value) for key, value in before.items())
        assert torch.equal(state["private"]["weights"][0], weights)
        held.seek(0)
        t.loco.load_state_dict(torch.load(held, weights_only=True))
        assert t.loco.rounds == [1]
        assert same(t.weights, weights)
        theta = t.theta
        state["shared"][0]["theta"].zero_()
        assert same(t.theta, theta)


def test_anothers_private_state_gives_shared_weights_and_a_residual_and_momentum_of_zero() -> None:
    with Trainer(alone(), 0) as t:
        t.step(3)
        state = t.loco.state_dict()
    assert state["private"]["residuals"][0].any()
    assert state["private"]["momenta"][0].any()
    without = {key: value for key, value in state.items() if key != "private"}
    for given in (state, without):
        other = Trainer(meet(MemoryStore(), "b", 1), 1, seed=9)
        other.loco.load_state_dict(given)
        assert other.loco.digests == t.loco.digests
        assert not other.residual.any()
        assert not other.momentum.any()
        assert same(other.weights, other.theta)
        assert other.loco.state_dict()["private"]["steps"] == 0
    with pytest.raises(StateError, match="another model"):
        Trainer(alone(), 0, pieces=2, sync_every=2).loco.load_state_dict(state)
    with pytest.raises(StateError, match="another model"):
        Trainer(alone(), 0, shapes={"x": (3,)}).loco.load_state_dict(state)


def earlier(state: dict[str, Any]) -> dict[str, Any]:
    """As the version before wrote it: one momentum, which was shared, and no word of its format."""
    shared = [{**{k: v for k, v in s.items() if k != "trend"}, "momentum": s["theta"]} for s in state["shared"]]
    private = {key: value for key, value in state["private"].items() if key != "momenta"}
    return {"shared": shared, "private": private}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_state_of_an_earlier_version_is_refused_with_what_to_do_and_nothing_changes(kind: str) -> None:
    t = Trainer(alone(), 0, kind)
    state = t.loco.state_dict()
    before, weights = t.everything(), t.weights
    for other in (earlier(state), {**state, "format": "pulse-loco-trainer/2-draft"}, {}):
        with pytest.raises(StateError, match=r"Resume from the model's weights"):
            t.loco.load_state_dict(other)
        assert t.everything() == before
        assert same(t.weights, weights)


@pytest.mark.parametrize(
    ("of", "to"), [("PulseLoCo", "DiLoCo"), ("PublishedPulseLoCo", "PulseLoCo"), ("DiLoCo", "PulseLoCo")]
)
def test_a_state_of_a_trainer_with_another_kind_of_momentum_is_refused_by_name(of: str, to: str) -> None:
    with Trainer(alone(), 0, of) as t:
        t.step(3)
        state = t.loco.state_dict()
    other = Trainer(alone(), 0, to, seed=3)
    before, weights = other.everything(), other.weights
    with pytest.raises(StateError, match=f"does not fit {to}: .*the class that saved it"):
        other.loco.load_state_dict(state)
    assert other.everything() == before
    assert same(other.weights, weights)


def test_a_saved_trend_with_other_signs_than_there_are_is_refused() -> None:
    t = Trainer(alone(), 0)
    state = t.loco.state_dict()
    state["shared"][0]["trend"][3] = 2
    with pytest.raises(StateError, match="signs other than -1, 0 and 1"):
        t.loco.load_state_dict(state)


# DDP, and what is around it


@pytest.mark.parametrize("fragments", [1, 2])
def test_averaged_gradients_are_those_of_the_joint_batch_and_replicas_stay_the_same_bits(fragments: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 5), torch.randn(12, 2)

    def network() -> Any:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))

    def train(model: Any, optimizer: Any, rows: slice) -> None:
        for _ in range(10):
            optimizer.zero_grad()
            ((model(x[rows]) - y[rows]) ** 2).mean().backward()
            optimizer.step()
            seen.setdefault(rows.start, []).append(flat(model).tobytes())

    seen: dict[Any, list[bytes]] = {}
    whole = network()
    train(whole, torch.optim.AdamW(whole.parameters(), lr=1e-2), slice(None))
    store, models = MemoryStore(), [network() for _ in range(3)]

    def part(i: int) -> None:
        optimizer = torch.optim.AdamW(models[i].parameters(), lr=1e-2)
        what = models[i] if fragments == 1 else [models[i][0], models[i][2]]
        with DDP(what, optimizer, exchange=meet(store, f"t{i}", 3), sync_every=5, outer=Nesterov()):
            train(models[i], optimizer, slice(4 * i, 4 * i + 4))

    together(*(lambda i=i: part(i) for i in range(3)))
    assert seen[0] == seen[4] == seen[8]
    np.testing.assert_allclose(flat(models[0]), flat(whole), rtol=1e-4, atol=1e-5)


def test_rounds_are_published_and_a_workers_weights_are_the_bf16_view_of_theta(tmp_path: Path) -> None:
    place = str(tmp_path / "weights")
    store = MemoryStore()
    models = [Weights() for _ in range(2)]
    held = {name: torch.zeros_like(p, dtype=torch.bfloat16) for name, p in models[0].named_parameters()}
    seen: list[Any] = []

    def train(i: int, publisher: Publisher | None) -> None:
        subscriber = Subscriber(place)

        def on_round(report: Any) -> None:
            if publisher is None:
                return
            publisher.publish(loco.shared_weights(), step=report.round)
            synced = subscriber.sync(held)
            assert synced.step == report.round
            theta = loco.state_dict()["shared"][0]["theta"]
            expected = theta.to(torch.bfloat16)
            assert torch.equal(torch.cat([p.reshape(-1) for p in held.values()]), expected)
            seen.append(report.round)

        optimizer = torch.optim.SGD(models[i].parameters(), lr=1e-2)
        exchange = meet(store, f"t{i}", 2)
        with PulseLoCo(models[i], optimizer, exchange=exchange, sync_every=2, on_round=on_round) as loco:
            rng = np.random.default_rng(i)
            for _ in range(10):
                for p in models[i].parameters():
                    p.grad = torch.from_numpy(np.asarray(rng.standard_normal(p.shape), np.float32))
                optimizer.step()

    with Publisher(place, cast="BF16") as publisher:
        together(lambda: train(0, publisher), lambda: train(1, None))
    assert seen == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", KINDS.values())
def test_an_unknown_argument_is_named_and_the_exchange_is_required(kind: Any) -> None:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sync_evry'"):
        kind(model, optimizer, exchange=alone(), sync_evry=4)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'exchange'"):
        kind(model, optimizer)
