"""What is published, evaluated and rolled out: the weights that all trainers share, by the names of a model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync import Publisher, Subscriber
from pulsesync.errors import StateError
from pulsesync.loco import SGD, PulseLoCo
from pulsesync.store import MemoryStore
from tests.loco.fleet import Trainer, Weights, alone, flat, meet, same, together


class Tied(torch.nn.Module):
    """A model with a tied weight, a buffer, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = torch.nn.Embedding(6, 4), torch.nn.Linear(4, 6)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def trained(model: Any, steps: int = 6, **options: Any) -> Any:
    """A trainer of a model, or of masters, after some rounds in which the gate kept something back."""
    parameters: list[torch.Tensor] = []
    for piece in model if isinstance(model, list) else [model]:
        parameters += piece.values() if isinstance(piece, dict) else [p for p in piece.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    rng = np.random.default_rng(0)
    with PulseLoCo(model, optimizer, exchange=alone(), outer=SGD(0.5, 0.5), **options) as loco:
        for _ in range(steps):
            for p in parameters:
                p.grad = torch.from_numpy(np.asarray(rng.standard_normal(p.shape), np.float32))
            optimizer.step()
    assert all(state.any() for state in loco.state_dict()["private"]["residuals"])
    return loco


def test_two_trainers_publish_the_same_weights_though_their_models_differ(tmp_path: Path) -> None:
    store = MemoryStore()
    fleet = [Trainer(meet(store, name, 2), i, compact=1) for i, name in enumerate("ab")]
    held: list[dict[str, torch.Tensor]] = [{}, {}]

    def train(i: int) -> list[str]:
        digests, place, t = [], str(tmp_path / "ab"[i]), fleet[i]
        held[i] = {name: torch.zeros_like(p) for name, p in t.modules[0].named_parameters()}
        with t, Publisher(place) as publisher, Subscriber(place) as worker:
            for number in range(1, 4):
                t.step(2)
                publisher.publish(t.loco.shared_weights(), step=number)
                synced = worker.sync(held[i])
                assert synced.step == number
                digests.append(synced.digest)
        return digests

    one, other = together(lambda: train(0), lambda: train(1))
    assert one == other
    assert len(set(one)) == 3
    assert not same(fleet[0].weights, fleet[1].weights)
    for t, weights in zip(fleet, held, strict=True):
        assert same(torch.cat([w.reshape(-1) for w in weights.values()]).numpy(), t.theta)
        assert not same(t.weights, t.theta)


def test_they_are_theta_and_not_where_the_trainer_is() -> None:
    with Trainer(alone(), 0) as t:
        t.step(5)
        shared = t.loco.shared_weights()
        assert list(shared) == [name for name, _ in t.modules[0].named_parameters()]
        assert [w.shape for w in shared.values()] == [p.shape for p in t.modules[0].parameters()]
        assert same(torch.cat([w.reshape(-1) for w in shared.values()]).numpy(), t.theta)
        assert not same(t.theta, t.start)
        assert not any(w.requires_grad for w in shared.values())


@pytest.mark.parametrize("kind", ["DiLoCo", "PublishedPulseLoCo", "DDP"])
def test_with_a_shared_momentum_they_are_the_models_own_right_after_a_round(kind: str) -> None:
    with Trainer(alone(), 0, kind) as t:
        t.step(4)
        assert same(torch.cat([w.reshape(-1) for w in t.loco.shared_weights().values()]).numpy(), t.weights)


def test_tied_weights_have_both_names_and_buffers_and_frozen_parameters_are_the_models_own() -> None:
    model = Tied()
    loco = trained(model, sync_every=2)
    shared = loco.shared_weights()
    assert set(shared) == set(model.state_dict())
    assert torch.equal(shared["head.weight"], shared["embed.weight"])
    theta = loco.state_dict()["shared"][0]["theta"]
    assert torch.equal(torch.cat([shared["embed.weight"].reshape(-1), shared["head.bias"]]), theta)
    assert not torch.equal(shared["embed.weight"], model.embed.weight)
    assert torch.equal(shared["scale"], model.get_buffer("scale"))
    assert torch.equal(shared["frozen"], model.frozen)


def test_masters_are_named_as_they_were_given_or_as_a_model_names_them() -> None:
    masters = {name: p.detach().clone() for name, p in Weights().named_parameters()}
    loco = trained(masters, sync_every=2)
    theta = loco.state_dict()["shared"][0]["theta"]
    shared = loco.shared_weights()
    assert list(shared) == list(masters)
    assert torch.equal(torch.cat([w.reshape(-1) for w in shared.values()]), theta)
    extra = torch.ones(2)
    other = loco.shared_weights({"extra": extra, **{f"model.{name}": p for name, p in masters.items()}})
    assert torch.equal(other["model.embed"], shared["embed"])
    assert torch.equal(other["extra"], extra)
    assert not torch.equal(masters["embed"], shared["embed"])


def test_a_model_that_lacks_what_is_trained_is_refused_rather_than_returned_as_it_is() -> None:
    """Tensors of a BF16 model with FP32 masters are not trained; their values are this trainer's own, not shared."""
    model = Weights().bfloat16()
    masters = {name: p.detach().float() for name, p in model.named_parameters()}
    loco = trained(masters, sync_every=2)
    with pytest.raises(StateError, match=r"all 4 tensors that are trained"):
        loco.shared_weights(model)
    with pytest.raises(StateError, match=r"without 3 of them"):
        loco.shared_weights({"embed": masters["embed"]})


def test_fragments_with_names_of_their_own_are_put_together_and_those_with_the_same_need_the_whole_model() -> None:
    whole = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    loco = trained([whole[0], whole[1]], sync_every=2)
    with pytest.raises(StateError, match=r"two fragments have a tensor named 'bias'"):
        loco.shared_weights()
    shared = loco.shared_weights(whole)
    assert list(shared) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    thetas = [fragment["theta"] for fragment in loco.state_dict()["shared"]]
    assert torch.equal(torch.cat([w.reshape(-1) for w in shared.values()]), torch.cat(thetas))
    assert not np.array_equal(flat(whole), torch.cat(thetas).numpy())
    pieces = [{"a": torch.ones(5)}, {"b": torch.full((5,), 2.0)}]
    assert list(trained(pieces, sync_every=2).shared_weights()) == ["a", "b"]


def test_they_stay_as_they_were_when_the_next_round_comes() -> None:
    with Trainer(alone(), 0) as t:
        t.step(4)
        shared = t.loco.shared_weights()
        before = {name: w.clone() for name, w in shared.items()}
        t.step(4)
        assert all(torch.equal(shared[name], w) for name, w in before.items())
        assert not torch.equal(t.loco.shared_weights()["embed"], before["embed"])
