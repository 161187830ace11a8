"""Ranks whose shards are on a device: what they publish together is byte for byte what they would from host memory."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync import Subscriber
from pulsesync.errors import StateError
from pulsesync.format.patch import CodecName
from pulsesync.state.sharding import Placed
from pulsesync.store import MemoryStore
from tests.device.test_baseline import Model, equal, kept, objects, on
from tests.publish.test_sharded import Group, by_columns, by_rows


def model(device: str) -> Model:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (4, 16), "b": (5,)}
    return {name: (torch.randn(shape, generator=generator) * 0.02).to(device) for name, shape in shapes.items()}


def train_(weights: Model, step: int) -> None:
    weights["a"][step % 4] *= 1.01
    weights["b"][step % 5] += 1e-3


def by_both(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Columns of a matrix each; the rest is held whole by everybody, and is the first rank's."""
    out = dict(weights)
    a = weights["a"]
    out["a"] = Placed(a[:, 8 * rank : 8 * rank + 8].contiguous(), tuple(a.shape), columns=(8 * rank, 8 * rank + 8))
    return out


def by_leftovers(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The first rank holds some columns, the second all: its own begin elsewhere there than where it keeps them."""
    a = weights["a"]
    return {**weights, "a": Placed(a[:, :5], tuple(a.shape), columns=(0, 5))} if rank == 0 else dict(weights)


def all_of_it(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Everything, on every rank; the first owns it."""
    return dict(weights)


@pytest.mark.parametrize(
    ("split", "codec", "versions"),
    [(by_rows, "history", 3), (by_columns, "context", 2), (by_both, "gap", 2), (by_leftovers, "context", 2)],
)
def test_a_version_of_all_ranks_is_that_from_host_memory(
    split: Callable[..., dict[str, Any]], codec: CodecName, versions: int, device: str, many_lanes: None
) -> None:
    stores, states = [MemoryStore(), MemoryStore()], []
    for store, where in zip(stores, ("cpu", device), strict=True):
        weights = model(where)
        with nullcontext() if store is stores[0] else on(device):
            group = Group(store, 2, split, timeout_s=60, codec=codec, cast="BF16", min_tile=1)
            for step in range(versions):
                group.publish(weights, step=step)
                states.append({name: tensor.bfloat16() for name, tensor in kept(weights).items()})
                train_(weights, step)
    assert objects(stores[0]) == objects(stores[1])
    held = {name: torch.zeros_like(tensor) for name, tensor in states[-1].items()}
    Subscriber(stores[1]).sync(held)
    assert equal(held, states[-1])


@pytest.mark.parametrize("split", [by_rows, all_of_it])
def test_a_run_is_taken_up_goes_on_without_a_change_and_has_anchors(
    split: Callable[..., dict[str, Any]], device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, weights = MemoryStore(), model(device)
    options: dict[str, Any] = {"codec": "history", "cast": "BF16", "anchor_every": 0.0}
    with on(device):
        group = Group(store, 2, split, timeout_s=60, **options, epoch_patches=2)
        for step in range(2):
            group.publish(weights, step=step)
            train_(weights, step)
        group = Group(store, 2, split, timeout_s=60, **options, epoch_patches=2)
        assert group.publish(weights, step=2).changed
        assert [pub.version for pub in group.pubs] == [2, 2]
        assert group.publish(weights, step=3).changed == 0
    assert len(list(store.list("anchors/"))) == 2
    state = {name: tensor.bfloat16() for name, tensor in kept(weights).items()}
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    worker = Subscriber(store, epoch_patches=2)
    worker.sync(held)
    worker.verify(held)
    assert equal(held, state)


def test_shards_that_moved_elsewhere_are_refused(device: str) -> None:
    weights = model(device)
    with on(device):
        group = Group(MemoryStore(), 2, by_rows, timeout_s=60, codec="gap")
        group.publish(weights)
    there = {name: np.asarray(tensor.cpu()) for name, tensor in weights.items()}
    for one in group.try_publish(there):
        assert isinstance(one, StateError)
        assert "stay on a GPU" in str(one)
