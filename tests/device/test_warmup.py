"""After `warm_up(device=...)` a run compiles nothing, whatever its model is like."""

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pulsesync import warm_up
from pulsesync.errors import StateError
from pulsesync.format.patch import CodecName
from pulsesync.publish import warmup
from pulsesync.state.views import torch_dtype
from pulsesync.store import MemoryStore
from tests.device.launches import OF_RUNS, Compiled, counted
from tests.device.test_baseline import Model, equal, on
from tests.device.test_launches import Trainer, follow
from tests.publishers import Publisher
from tests.readers import Subscriber

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@pytest.fixture
def compiled(device: str) -> Iterator[list[Compiled]]:
    with on(device), counted() as found:
        yield found


def model(dtype: torch.dtype, device: str) -> Model:
    """Tensors of other sizes than those of `warm_up`: in bundles, tied, odd, and not contiguous."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        weights = torch.exp2(torch.randint(-9, 0, shape, generator=generator).float())
        return weights.to(dtype).to(device)

    out = {f"layers.{n}.norm": some(33 + n) for n in range(3)}
    out |= {"head": some(3, 9), "one": some(1), "odd": some(52)[3:], "turned": some(6, 7).t()}
    out["tied"] = out["head"]
    return out


def train_(weights: Model, step: int, unit: int) -> None:
    for name, tensor in weights.items():
        if name != "tied":
            bits = tensor.view(INTEGERS[tensor.element_size()])
            bits[step % len(bits) :: 3] += unit * (1 + step % 2)


def follow_model(dtype: str, masters: bool, device: str, codec: CodecName) -> None:
    """Publish two epochs, and have a worker follow that has its own memory for tied weights."""
    of_torch = torch_dtype(dtype)
    weights, store = model(torch.float32 if masters else of_torch, device), MemoryStore()
    worker = {name: torch.zeros(tensor.shape, dtype=of_torch, device=device) for name, tensor in weights.items()}
    unit = 1 << 21 if masters else 1  # both dtypes see it
    with (
        Publisher(store, cast=dtype if masters else None, codec=codec, epoch_patches=2) as publisher,
        Subscriber(store, epoch_patches=2) as subscriber,
    ):
        for step in range(5):
            publisher.publish(weights)
            subscriber.sync(worker, verify=step % 2 == 1)
            assert equal(worker, {name: tensor.to(of_torch) for name, tensor in weights.items()})
            train_(weights, step, unit)


# Ten seconds each: three versions twice, and 20 of a small model, in the interpreter.
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_a_run_of_another_model_compiles_nothing_after_a_warm_up(
    dtype: str, device: str, compiled: list[Compiled], many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert warm_up(dtype, device=device) > 0
    assert {one.kernel for one in compiled} == OF_RUNS
    ready = list(compiled)
    for masters in (False, True):
        follow_model(dtype, masters, device, "history")
    monkeypatch.setattr("pulsesync.format.layout.SMALL", 0)  # a tile for each tensor
    for masters in (False, True):
        follow_model(dtype, masters, device, "auto")
    assert compiled == ready


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_a_gpu_compiles_nothing_after_a_warm_up_of_its_dtypes(device: str, compiled: list[Compiled]) -> None:
    """With full epochs, large tensors and three dtypes; Triton's cache on disk may hold the kernels already."""
    for dtype in ("BF16", "F16", "F32"):
        warm_up(dtype, device=torch.device(device))
    ready = list(compiled)
    shapes = [(torch.bfloat16, 3_000_000), (torch.bfloat16, 5001), (torch.float32, 300_000), (torch.float16, 70_000)]
    follow(Trainer(device, shapes), 2, compiled)
    assert compiled == ready


def test_progress_is_logged(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, many_lanes: None
) -> None:
    monkeypatch.setattr(warmup, "VERSIONS", 1)
    with on(device), caplog.at_level(logging.INFO, "pulsesync.publish.warmup"):
        warm_up(device=device)
    told = [record.getMessage() for record in caplog.records if record.name == "pulsesync.publish.warmup"]
    assert len(told) == 2
    assert told[1].startswith(f"BF16 on {device} from FP32 masters: kernels of version 1 of 1 are compiled, ")


# What cannot be warmed up


def test_host_memory_is_the_host_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(warmup, "_warm_up_host", asked.append)
    warm_up(device="cpu")
    warm_up("F16", device=torch.device("cpu"))
    assert asked == ["BF16", "F16"]


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", r"device must be 'cuda', 'cuda:0' and so on, or a torch.device; got 'gpu'"),
        ("meta", r"device must be a CUDA device or 'cpu'; got 'meta'"),
        ("cuda:2", r"device='cuda:2' does not exist: torch finds 2 CUDA devices, from cuda:0 on"),
    ],
)
def test_a_device_that_does_not_exist_is_refused(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=message):
        warm_up(device=device)


def test_a_machine_without_a_gpu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StateError, match="finds none: check that nvidia-smi lists one"):
        warm_up(device="cuda")


def test_a_dtype_that_no_gpu_codes_is_refused(device: str) -> None:
    with on(device), pytest.raises(ValueError, match=r"dtype must be one of .*'BF16'.*; got 'I64'"):
        warm_up("I64", device=device)


def test_without_torch_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "torch", missing)
    with pytest.raises(StateError, match="needs torch, which is not installed: pip install torch"):
        warm_up(device="cuda")
