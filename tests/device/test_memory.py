"""Which tensors are accepted as tensors on a device, and the errors that are raised for others."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pulsesync import Publisher
from pulsesync import device as devices
from pulsesync.device.memory import view
from pulsesync.errors import StateError
from pulsesync.store import MemoryStore
from tests.device.test_baseline import on


class Wrapper(torch.Tensor):
    """A tensor whose weights are in another tensor, as those of quantized and sharded tensors are."""

    weights: torch.Tensor

    @staticmethod
    def __new__(cls: Any, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.weights = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without the class and the function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls(func(*(arg.weights if isinstance(arg, cls) else arg for arg in args), **(kwargs or {})))


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of one process."""
    from torch._C._distributed_c10d import HashStore

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_without_memory_are_refused(device: str) -> None:
    with pytest.raises(StateError, match="is a Wrapper, not a plain tensor") as caught:
        view({"b": torch.zeros(4, device=device), "a": Wrapper(torch.zeros(4, device=device))})
    assert caught.value.tensor == "a"


@pytest.mark.parametrize("how", ["sharded", "replicated"])
def test_tensors_that_ranks_share_are_refused_and_the_way_is_shown(how: str, alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # here: a second that others need not wait
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    placement: Placement = Shard(0) if how == "sharded" else Replicate()
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(StateError, match="ShardedPublisher"):
        view({name: distribute_tensor(torch.ones(4, 2), mesh, [placement]) for name in "ab"})


def test_tensors_without_weights_need_no_memory(device: str) -> None:
    views, ties = view({name: torch.zeros(0, device=device) for name in "ab"})
    assert (set(views), ties) == ({"a", "b"}, {})


@pytest.mark.parametrize("value", [None, {"step": 3}, b"state"], ids=["none", "mapping", "bytes"])
@pytest.mark.parametrize("first", [True, False])
def test_what_is_no_tensor_is_on_no_device_and_is_refused_by_name(value: Any, first: bool, device: str) -> None:
    def beside(tensor: torch.Tensor) -> dict[str, Any]:
        state = {"a": tensor, "_extra_state": value}
        return dict(reversed(state.items())) if first else state

    with pytest.raises(StateError, match="'a' is on meta; host memory and CUDA devices are supported"):
        devices.find(beside(torch.zeros(3, device="meta")))
    with on(device), pytest.raises(StateError, match=r"'_extra_state' must be a tensor; got") as caught:
        Publisher(MemoryStore()).publish(beside(torch.zeros(3, device=device)))
    assert caught.value.tensor == "_extra_state"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from pulsesync import Publisher, Subscriber
from pulsesync.errors import StateError
from pulsesync.store import MemoryStore
from tests.backends import host_as_device

store, weights = MemoryStore(), {"a": torch.zeros(4)}
with Publisher(store) as pub:
    pub.publish(weights)
with host_as_device():
    for call in (
        lambda: Publisher(store).publish(weights),
        lambda: Subscriber(store).sync({"a": torch.ones(4)}),
    ):
        try:
            call()
        except StateError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_without_triton_it_is_said_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all("pip install triton" in line and "host memory" in line for line in said)
