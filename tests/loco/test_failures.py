"""What a failure in the middle of a commit leaves, and weights that lie or change where one would not expect it."""

from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.errors import RoundError, StateError
from pulsesync.loco import PulseLoCo
from pulsesync.loco import vectors as all_vectors
from pulsesync.loco.fragments import FragmentTensors
from pulsesync.loco.outer_step import OwnMomentum
from tests.loco.fleet import Trainer, Weights, alone, flat, same


@pytest.mark.parametrize("options", [{}, {"blend": 0.5}], ids=str)
def test_a_commit_that_fails_half_way_is_completed_and_advances_nothing_twice(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(all_vectors, "CHUNK", 50)
    with Trainer(alone(), 0, **options) as whole, Trainer(alone(), 0, **options) as torn:
        for t in (whole, torn):
            t.step(3)
        whole.step()
        advance, calls = OwnMomentum.advance, []

        def fail_once(*args: Any) -> Any:
            calls.append(args)
            if len(calls) == 8:  # the update has five pieces: this is in the middle of the commit, not of the gate
                raise OSError("a device failed")
            return advance(*args)

        monkeypatch.setattr(OwnMomentum, "advance", fail_once)
        with pytest.raises(OSError, match="a device failed"):
            torn.step()
        assert torn.loco.rounds == [1]  # it is not complete yet
        ours, theirs = whole.loco.state_dict(), torn.loco.state_dict()  # which completes it
        assert whole.loco.digests == torn.loco.digests
        for key in ("residuals", "momenta", "weights"):
            assert same(ours["private"][key][0], theirs["private"][key][0]), key


def test_tensors_that_are_not_contiguous_are_read_once_and_written_whole() -> None:
    weights = {"turned": torch.randn(5, 7).T, "plain": torch.randn(3)}
    tensors = FragmentTensors(weights)
    assert not tensors.is_contiguous
    new = np.arange(38, dtype=np.float32)
    tensors.write(new.__getitem__)
    assert same(tensors.read(), new)
    assert same(tensors.read_piece(slice(30, 38)), new[30:])


def test_steps_that_came_to_nothing_do_not_reach_residual_or_momentum_by_a_round_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exchange: Any = alone()
    with Trainer(exchange, 0) as t:
        confirm = exchange.confirm

        def fail(*_: Any) -> None:
            raise RoundError("nobody confirms")

        exchange.confirm = fail
        with pytest.raises(RoundError):
            t.step(2)
        exchange.confirm = confirm
        with torch.no_grad():
            t.parameters[0][0] = np.nan
        t.loco.rejoin()
        assert t.loco.rounds == [1]
        assert "has diverged" in caplog.text
        assert not t.residual.any()
        assert same(t.weights, t.theta)
        t.step(2)
        assert t.loco.rounds == [2]


def test_weights_that_are_loaded_before_the_first_round_are_the_shared_ones() -> None:
    model = Weights()
    loco = PulseLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=alone())
    model.load_state_dict(Weights(seed=3).state_dict())
    assert same(np.concatenate([v.reshape(-1) for v in loco.shared_weights().values()]), flat(model))
    assert same(loco.state_dict()["shared"][0]["theta"], flat(model))
    loco.discard()
    assert same(flat(model), flat(Weights(seed=3)))


def test_a_saved_state_that_lacks_something_is_refused_whole() -> None:
    with Trainer(alone(), 0) as t:
        t.step(3)
        state, before = t.loco.state_dict(), t.everything()
        for key in ("weights", "momenta", "residuals", "new"):
            private = {name: value for name, value in state["private"].items() if name != key}
            with pytest.raises(StateError, match=f"{key}.*without load_state_dict"):
                t.loco.load_state_dict({**state, "private": private})
        assert t.everything() == before


def test_after_eight_attempts_at_a_round_the_last_update_is_repeated_and_does_not_pile_up() -> None:
    exchange: Any = alone()
    with Trainer(exchange, 0) as t:

        def fail(*_: Any) -> None:
            raise RoundError("the store is away")

        exchange.propose = fail
        for _ in range(30):
            with pytest.raises(RoundError):
                t.step(2)
        assert len(t.loco._fragments[0].pending.by_payload) == 8
        t.loco.discard()
        with pytest.raises(RoundError):
            t.step(2)
        assert len(t.loco._fragments[0].pending.by_payload) == 9  # what was discarded is not sent again


def test_what_is_no_tensor_and_a_buffer_inside_a_parameter_stay_what_they_are() -> None:
    class Model(Weights):
        def get_extra_state(self) -> dict[str, int]:
            return {"scale": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = Model()
    model.register_buffer("row", dict(model.named_parameters())["embed"].data[:1])
    loco = PulseLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=alone())
    found = loco.shared_weights()
    assert found["_extra_state"] == {"scale": 3}
    assert found["row"].shape == (1, 8)
