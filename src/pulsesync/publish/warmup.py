"""Compile kernels ahead of time, so that the first publish and the first sync do not wait for a compiler."""

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from pulsesync import device as devices
from pulsesync.core.arguments import one_of
from pulsesync.core.types import BlockChange, TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout, patch
from pulsesync.format.history import History
from pulsesync.publish.publisher import Publisher
from pulsesync.run.follower import RunFollower
from pulsesync.state.host import HostBackend
from pulsesync.state.views import CASTS, torch_dtype
from pulsesync.state.weights import WeightState
from pulsesync.store.memory import MemoryStore

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

VERSIONS = 3  # enough to compile every kernel: an anchor, a patch without a history, and one with it
_FEW = 32  # small weights of a tensor, which change: the compiled kernels do not depend on this number
DTYPES = ("BF16", "F16", "F32", "F8_E4M3", "F8_E5M2")


def warm_up(dtype: str = "BF16", *, device: "str | torch.device | None" = None) -> float:
    """Run every kernel on small states, so that each is compiled and cached on disk; return the seconds it took.

    It takes some seconds on a machine that has not done it before, and a fraction of a second later. A trainer calls it
    while its model loads; a container image can call it when it is built. On a GPU the progress is logged (`pulsesync`,
    level INFO).

    Args:
        dtype: The dtype that is published: "BF16", "F16", "F32", "F8_E4M3" or "F8_E5M2"; call this once for each that a
            model has.
        device: Where the weights are: "cuda", "cuda:1", a torch.device; without it, in host memory. On a GPU three
            versions are published and synced, once from this dtype and, if it can be cast to, once from FP32 masters.

    Raises:
        ValueError: there is no such device, or dtype is none of those above.
        StateError: torch or Triton is not installed, or torch finds no CUDA device.
    """
    began = time.perf_counter()
    one_of("dtype", dtype, DTYPES)
    where = None if device is None else _find_device(device)
    if where is None:
        _warm_up_host(dtype)
    else:
        _warm_up_device(dtype, where)
    return time.perf_counter() - began


def _warm_up_host(dtype: str) -> None:
    spec = TensorSpec("w", dtype, (64, 64))
    rng = np.random.default_rng(0)
    old = rng.integers(0, 1 << (8 * spec.kind.itemsize), spec.size, dtype=np.uint64).astype(spec.kind.bits)
    new = old.copy()
    new[::7] += 1
    state, history = WeightState(HostBackend(layout.make([spec]), {"w": old})), History()
    for _ in range(2):
        part = patch.encode(
            state.layout, state.layout.tiles, {"w": old}, {"w": new}, state.sums, codec="history", history=history
        )
        patch.decode(part.data, state.layout, {"w": old}, history=history)
        history = history.after(part.patches, {"w": old})
    history.digest()
    smooth = (np.arange(spec.size) % 29 << 7).astype(spec.kind.bits)  # exponents that can be packed, as in real weights
    whole = patch.encode_whole(state.layout, state.layout.tiles, {"w": smooth}, state.sums)
    patch.decode(whole.data, state.layout, {"w": old})
    _warm_up_bundles(dtype)


def _warm_up_bundles(dtype: str) -> None:
    """Gather two small tensors and write to them, as a worker does."""
    pair = layout.bundle(layout.make([TensorSpec(name, dtype, (40,)) for name in "ab"]))
    backend, (tile,) = HostBackend(pair, {spec.name: np.zeros(40, spec.kind.bits) for spec in pair.tensors}), pair.tiles
    old = backend.block(tile, 0)[30:50]
    backend.write_change(tile.ordinal, BlockChange(0, np.arange(30, 50, dtype=np.uint32), old, old))


def _find_device(device: "str | torch.device") -> "torch.device | None":
    """Return the GPU of this name; None if the name is that of host memory. Raises: ValueError, StateError."""
    try:
        import torch
    except ModuleNotFoundError as e:
        raise StateError(f"device={str(device)!r} needs torch, which is not installed: pip install torch") from e
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device must be 'cuda', 'cuda:0' and so on, or a torch.device; got {device!r}") from e
    if devices.is_host(found):
        return None
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f"device must be a CUDA device or 'cpu'; got {str(found)!r}")
    if found.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise StateError(
                f"device={str(device)!r} needs a CUDA device, and torch {torch.__version__} finds none: check that "
                "nvidia-smi lists one and that torch was installed for CUDA; leave out device= to compile the kernels "
                "for host memory"
            )
        if (found.index or 0) >= count:
            raise ValueError(f"device={str(device)!r} does not exist: torch finds {count} CUDA devices, from cuda:0 on")
    devices.load("state")  # raises an error that names a missing package
    return found


def _warm_up_device(dtype: str, where: "torch.device") -> None:
    began = time.perf_counter()
    for masters in (False, True) if dtype in CASTS else (False,):
        weights = _make_tensors("F32" if masters else dtype, where)
        worker = {name: tensor.to(torch_dtype(dtype)) for name, tensor in weights.items()}
        store = MemoryStore()
        with Publisher(store, codec="history", cast=dtype if masters else None) as publisher:
            publisher.events.muted, follower = True, RunFollower(store, None, undo=1)
            for version in range(VERSIONS):
                publisher.publish(weights)
                follower.sync(worker)
                _change_(weights)
                logger.info(
                    "%s on %s%s: kernels of version %d of %d are compiled, %.1f s since the start",
                    dtype, where, " from FP32 masters" if masters else "", version + 1, VERSIONS,
                    time.perf_counter() - began,
                )  # fmt: skip


def _make_tensors(dtype: str, where: "torch.device") -> "dict[str, torch.Tensor]":
    """Make a tensor with its own tiles, two that share a bundle, and one that is not aligned to eight bytes."""
    import torch

    def some(size: int) -> torch.Tensor:
        weights = torch.ones(size, dtype=torch.float32, device="cpu")
        few = weights[: 16 * _FEW : 16].numpy()
        few[:] = np.exp2(-2.0 - np.arange(few.size) % 6)  # small weights are tracked
        return weights.to(where).to(torch_dtype(dtype))

    return {"large": some(layout.SMALL), "small": some(400), "odd": some(401)[1:], "bias": some(3)}


def _change_(weights: "dict[str, torch.Tensor]") -> None:
    """Change the small weights, and one weight that is not tracked, by a unit in the last place."""
    import torch

    for tensor in weights.values():
        bits = tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
        unit = 1 << 21 if tensor.dtype == torch.float32 else 1  # large enough to change every dtype masters are cast to
        bits[: 16 * _FEW : 16] += unit
        bits[1] += unit
