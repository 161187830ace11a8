"""What is read of a torch module is what its `state_dict` returns at that moment, whatever kind of module it is."""

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest

from pulsesync.state.modules import tensors_of
from pulsesync.state.views import mapping_of

pytest.importorskip("torch")
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.bare = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_parameter("absent", None)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("missing", None)
        self.nothing: Any = None
        self.add_module("none", None)


class Extra(Block):
    def get_extra_state(self) -> Any:
        return torch.ones(3)


class OwnState(Block):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {f"own.{name}": tensor for name, tensor in super().state_dict(*args, **options).items()}


class OwnSave(Block):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}saved"] = self.bare.detach() * 2


class Computed(Block):
    @property
    def _non_persistent_buffers_set(self) -> Any:
        return {"kept"}

    @_non_persistent_buffers_set.setter
    def _non_persistent_buffers_set(self, value: Any) -> None:
        self.__dict__["_non_persistent_buffers_set"] = value


class Watched(Block):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return {} if name == "_buffers" else found


class Delegating(Block):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)


class Subclassed(torch.Tensor):
    pass


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Block())
    model[1].weight = model[0].weight
    return model.append(model[0])


def hooked(register: str, hook: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(Block(), nn.Linear(2, 2))
    getattr(model[0], register)(hook)
    return model


def drop(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    state.pop(f"{prefix}bare")


def unsharded(_module: Any, state: dict[str, Any], _prefix: str, _metadata: Any) -> Any:
    return OrderedDict((name.replace("_wrapped.", ""), tensor) for name, tensor in state.items())


def announce(module: Any, _prefix: str, _keep: bool) -> None:
    module.bare.data = torch.zeros(2)


def patched() -> Any:
    model: Any = Block()
    model.state_dict = lambda *_, **__: {"adapter": torch.ones(1)}
    return model


def subclassed() -> nn.Module:
    model = Block()
    model.kept = torch.ones(2).as_subclass(Subclassed)
    return model


def weight_norm() -> Any:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))


PLAIN: dict[str, Callable[[], Any]] = {
    "block": Block,
    "tied": tied,
    "lists": lambda: nn.ModuleDict({"a": nn.ModuleList([Block()]), "b": nn.ParameterList([torch.ones(2)])}),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(3), nn.LSTM(3, 2), nn.MultiheadAttention(4, 2)),
    "parametrized": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)), weight_norm()),
    "delegating": Delegating,
    "frozen": lambda: Block().requires_grad_(False),
    "compiled": lambda: torch.compile(Block()),
    "data parallel": lambda: nn.DataParallel(Block()),
    "scripted": lambda: torch.jit.script(nn.Linear(2, 2)),
    "subclassed": subclassed,
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(Block()),
}
OTHER: dict[str, Callable[[], Any]] = {
    "extra state": lambda: nn.Sequential(Extra()),
    "own state_dict": OwnState,
    "own state_dict inside": lambda: nn.Sequential(Block(), OwnState()),
    "own save": lambda: nn.Sequential(OwnSave()),
    "computed": lambda: nn.Sequential(Computed()),
    "watched": Watched,
    "patched": patched,
    "post-hook": lambda: hooked("register_state_dict_post_hook", drop),
    "sharding hook": lambda: hooked("_register_state_dict_hook", unsharded),
    "pre-hook": lambda: hooked("register_state_dict_pre_hook", announce),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(2)),
}


def check_equal(found: Any, expected: Any) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        other = found[name]
        assert type(other.detach()) is type(tensor)
        assert isinstance(other, nn.Parameter) or type(other) is type(tensor)
        if not nn.parameter.is_lazy(tensor):
            assert other.data_ptr() == tensor.data_ptr()
            assert (other.dtype, other.shape, other.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


@pytest.mark.filterwarnings("ignore")  # of torch.compile and scripts
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_module_is_read_without_its_state_dict(kind: str) -> None:
    model = PLAIN[kind]()
    check_equal(tensors_of(model), model.state_dict())


@pytest.mark.filterwarnings("ignore")  # of lazy modules
@pytest.mark.parametrize("kind", OTHER)
def test_any_other_module_is_read_with_its_state_dict(kind: str) -> None:
    model = OTHER[kind]()
    assert tensors_of(model) is None
    assert list(mapping_of(model)) == list(model.state_dict())


def test_what_changes_between_two_reads_is_seen() -> None:
    model: Any = nn.Sequential(Block(), nn.Linear(2, 2))

    def read_again(*, plain: bool = True) -> None:
        assert (tensors_of(model) is not None) == plain
        check_equal(mapping_of(model), model.state_dict())

    read_again()
    model[0].bare = nn.Parameter(torch.zeros(5))
    model[0].inner.weight.data = torch.zeros(7, 7)
    read_again()
    model.add_module("later", Block())
    model[0].passing = torch.ones(9)
    model[0].register_buffer("passing", torch.ones(9), persistent=True)
    read_again()
    del model[0].inner
    read_again()
    hook = model[0].register_state_dict_post_hook(drop)
    read_again(plain=False)
    hook.remove()
    read_again()
    model[1] = OwnState()
    read_again(plain=False)


@contextmanager
def patched_torch() -> Iterator[None]:
    def state_dict(self: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return {"other": torch.ones(1)}

    with mock.patch.object(nn.Module, "state_dict", state_dict):
        yield


def test_a_library_that_patches_torch_is_noticed() -> None:
    model = Block()
    assert tensors_of(model) is not None
    with patched_torch():
        assert tensors_of(model) is None
        assert list(mapping_of(model)) == ["other"]


def test_a_dtensor_is_read_as_state_dict_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch.distributed.tensor")
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    model: Any = nn.Sequential(Block())
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (1,)), [Replicate()])
        model[0].inner.weight = nn.Parameter(whole)
        found = tensors_of(model)
        assert found is not None
        assert list(found) == list(model.state_dict())
        assert isinstance(found["0.inner.weight"], DTensor)
        assert not found["0.inner.weight"].requires_grad
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_that_was_read_is_freed_without_a_collection() -> None:
    model: Any = Block()
    tensors_of(model)
    weights = weakref.ref(model.bare)
    gc.disable()
    try:
        del model
        assert weights() is None
    finally:
        gc.enable()


def test_nothing_else_is_a_module() -> None:
    assert tensors_of({"w": torch.ones(1)}) is None
    assert tensors_of(torch.optim.SGD([torch.ones(1)])) is None
