"""A module that is spread over devices (`device_map`): each device works on its own tensors, and the run is one.

With one GPU the other device is the host, whose memory the GPU reads and writes where it is pinned.
"""

import pytest
import torch

from pulsesync import Publisher, StateError, Subscriber
from pulsesync.publish.baseline import Keep
from pulsesync.store import MemoryStore

pytestmark = pytest.mark.gpu
Model = dict[str, torch.Tensor]


def spread(dtype: torch.dtype = torch.bfloat16, pinned: bool = True) -> Model:
    """Large and small tensors by turns on the GPU and on the host, and a bundle that is on both."""
    torch.manual_seed(0)
    sizes = {"a": 300_000, "b": 200_000, "c": 70_000, **{f"norm.{n}": 24 for n in range(8)}}
    out = {}
    for n, (name, size) in enumerate(sizes.items()):
        weights = (torch.randn(size) * 0.02).to(dtype)
        out[name] = weights.cuda() if n % 2 == 0 else weights.pin_memory() if pinned else weights
    return out


def train_(model: Model) -> None:
    for weights in model.values():
        bits = weights.view(torch.int16)
        bits += (torch.rand(bits.shape, device=bits.device) < 0.02).to(torch.int16)


def equal(one: Model, other: Model) -> bool:
    return all(torch.equal(one[name].cpu().view(torch.int16), other[name].cpu().view(torch.int16)) for name in one)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_spread_module_is_published_and_synced(keep: Keep) -> None:
    trainer, store = spread(), MemoryStore()
    worker = {name: torch.zeros_like(weights, pin_memory=weights.is_pinned()) for name, weights in trainer.items()}
    on_gpu = {name: torch.zeros_like(weights, device="cuda") for name, weights in trainer.items()}
    on_host = {name: torch.zeros_like(weights, device="cpu") for name, weights in trainer.items()}
    followers = [(model, Subscriber(store)) for model in (worker, on_gpu, on_host)]
    with Publisher(store, keep=keep) as publisher:
        for _ in range(4):
            publisher.publish(trainer)
            for model, subscriber in followers:
                subscriber.sync(model)
                assert equal(model, trainer)
                assert subscriber.verify(model) == publisher.digest
            train_(trainer)


def test_a_spread_worker_follows_a_trainer_on_one_device() -> None:
    trainer = {name: weights.cuda() for name, weights in spread().items()}
    worker, store = spread(), MemoryStore()
    subscriber = Subscriber(store)
    with Publisher(store) as publisher:
        for _ in range(3):
            publisher.publish(trainer)
            subscriber.sync(worker)
            assert equal(worker, trainer)
            train_(trainer)


def test_host_memory_that_is_not_pinned_is_refused_with_what_to_do() -> None:
    with pytest.raises(StateError, match=r"'b' is in host memory that is not pinned.*pin_memory"):
        Publisher(MemoryStore()).publish(spread(pinned=False))


def test_a_tensor_that_went_to_another_device_is_refused() -> None:
    trainer = spread()
    with Publisher(MemoryStore()) as publisher:
        publisher.publish(trainer)
        trainer["a"] = trainer["a"].cpu().pin_memory()  # the same GPU works on it: it is where it was for the kernels
        publisher.publish(trainer)
