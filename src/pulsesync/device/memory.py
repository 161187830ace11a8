"""Memory on a device: tensors as bits, arrays for kernels, and copies to the host and back."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import TensorSpec
from pulsesync.errors import StateError
from pulsesync.state.views import dtype_name, named, torch_dtype

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED = 16  # alignment of arrays in bytes, for which kernels are compiled
PINNED = 1 << 24  # up to this size in bytes, an array is copied to the device through pinned memory
TOGETHER = 1 << 20  # up to this size in bytes, several arrays are copied to the host together
_UNSIGNED = {torch.int16: torch.uint16, torch.int32: torch.uint32, torch.int64: torch.uint64}


@dataclass(frozen=True)
class DeviceView:
    """A tensor on a device, as integers of its size."""

    spec: TensorSpec
    tensor: torch.Tensor

    @property
    def address(self) -> int:
        """The address of the weights; 0 if there are none."""
        return self.tensor.data_ptr()

    @property
    def shared(self) -> bool:
        """Whether it can be written in place."""
        return self.tensor.is_contiguous()

    @property
    def flat(self) -> torch.Tensor:
        """All the weights in row-major order: a view if they are contiguous, else a copy."""
        return self.tensor.reshape(-1)


def view(source: Any) -> tuple[dict[str, DeviceView], dict[str, str]]:
    """View a source as bits; return canonical tensors, and aliases by name. Raises: StateError: one is not plain."""
    views: dict[str, DeviceView] = {}
    ties: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in named(source):
        if not isinstance(tensor, torch.Tensor):
            raise StateError(f"{name!r} must be a tensor; got {type(tensor).__name__}", tensor=name)
        spec = TensorSpec(name, dtype_name(name, tensor), tuple(tensor.shape))
        try:
            bits = tensor.detach().view(INTEGERS[tensor.element_size()])
            place = (bits.data_ptr(), spec.dtype, spec.shape, bits.stride())
        except (RuntimeError, TypeError) as e:  # sparse, lazily negated, or otherwise not plain memory
            raise StateError(f"tensor {name!r} is not a plain, dense tensor: {e}", tensor=name) from e
        if bits.numel() and not place[0]:  # DTensors and other wrappers
            raise StateError(
                f"tensor {name!r} is a {type(tensor).__name__}, not a plain tensor; publish this rank's shard "
                "with ShardedPublisher, or gather it first",
                tensor=name,
            )
        if bits.numel() and place in seen:
            ties[name] = seen[place]
            continue
        seen[place] = name
        views[name] = DeviceView(spec, bits)
    return views, ties


class Tensors(Mapping[str, torch.Tensor]):
    """Tensors by name, flat.

    place: while this is the same object, they have not moved; None: not known. masters: the names of FP32 tensors that
    are published in another dtype, and that dtype.
    """

    def __init__(
        self, flats: Mapping[str, Any], place: object | None = None, masters: Mapping[str, str] | None = None
    ) -> None:
        self._flats, self.place, self.masters = flats, place, masters or {}

    def published(self, name: str) -> torch.Tensor:
        """A tensor as it is published: a copy if it is cast."""
        return cast(self[name], self.masters[name]) if name in self.masters else self[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        flat: torch.Tensor = self._flats[name]
        return flat

    def __iter__(self) -> Iterator[str]:
        return iter(self._flats)

    def __len__(self) -> int:
        return len(self._flats)


class ViewedTensors(Tensors):
    """The tensors of views, flat: made on access."""

    def __getitem__(self, name: str) -> torch.Tensor:
        flat: torch.Tensor = self._flats[name].flat
        return flat


def cast(masters: torch.Tensor, dtype: str) -> torch.Tensor:
    """Cast the bits of FP32 weights to those of another dtype."""
    wanted = torch_dtype(dtype)
    return masters.view(torch.float32).to(wanted).view(INTEGERS[wanted.itemsize])


def main_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """The device of the first tensor on a GPU; if there is none, that of the first tensor."""
    found = list(dict.fromkeys(tensor.device for tensor in tensors))
    return next((device for device in found if device.type == "cuda"), found[0])


def worker_of(tensor: torch.Tensor, main: torch.device) -> torch.device:
    """The device that works on a tensor: its own, or the main one where it is in host memory."""
    return tensor.device if tensor.device.type == "cuda" else main


def reachable(flat: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor that a device can read: a pinned copy if it is in host memory that is not pinned, as casts make it."""
    apart = device.type == "cuda" and flat.device.type == "cpu" and flat.numel() > 0 and not flat.is_pinned()
    return flat.to(device) if apart else flat


def order_streams(devices: Sequence[torch.device]) -> None:
    """Order later launches on each of these devices after all launches so far on the others."""
    if len(devices) > 1:
        here = StreamPoint(*devices)
        here.precede([torch.cuda.current_stream(device) for device in devices if device.type == "cuda"])


def check_reach(tensors: Mapping[str, torch.Tensor], main: torch.device) -> None:
    """Refuse tensors that a GPU cannot read in place, and enable access between the GPUs of the others.

    A bundle, or a set of tied tensors, may be on several devices.

    Raises:
        StateError: a tensor is in host memory that is not pinned, or GPUs cannot read each other's memory.
    """
    if main.type != "cuda":
        return
    devices = {tensor.device: name for name, tensor in tensors.items() if tensor.numel()}
    for device, name in devices.items():
        for other in devices:
            if "cpu" in (device.type, other.type) or device == other:
                continue
            if not torch.cuda.can_device_access_peer(device, other):
                raise StateError(
                    f"tensor {name!r} is on {device}, which cannot read the memory of {other}, where other tensors "
                    "are: put the model on devices that can, or publish each device's tensors as a run of its own",
                    tensor=name,
                )
            torch.empty(1, device=device).copy_(torch.empty(1, device=other))  # the first copy enables access
    for name, tensor in tensors.items():
        if tensor.device.type == "cpu" and tensor.numel() and not tensor.is_pinned():
            raise StateError(
                f"tensor {name!r} is in host memory that is not pinned, and others are on {main}, which must read all "
                "of them: pin it (parameter.data = parameter.data.pin_memory()), or bring it to a GPU",
                tensor=name,
            )


def unsigned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as unsigned integers, which kernels need; torch supports few operations on them."""
    return tensor.view(_UNSIGNED.get(tensor.dtype, tensor.dtype))


def empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An array that kernels write; never of size 0, so that it has an address."""
    return torch.empty(max(count, 1), dtype=dtype, device=device)[:count]


def on_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory, whatever torch's default device is, for copies from and to a device: pinned for a GPU."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device, unsigned integers as signed ones, and wait: every stream can read it."""
    return _signed(array).to(device)


def to_stream(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The same for launches in this stream only, without waiting; `to_device` waits for all earlier work.

    Large arrays are waited for, because torch never frees pinned memory.
    """
    plain = _signed(array)
    if device.type == "cpu" or plain.nbytes > PINNED:
        return plain.to(device)
    pinned_ = on_host(plain.shape, plain.dtype, device)
    # From 32,768 elements on, torch would wake all its threads, which takes longer.
    pinned_.numpy()[...] = plain.numpy()
    return pinned_.to(device, non_blocking=True)


def all_to_stream(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """`to_stream` of several small arrays in one copy: starting a copy takes as long as copying 100,000 bytes."""
    plain = [_signed(array) for array in arrays]
    if device.type == "cpu" or sum(one.nbytes for one in plain) > PINNED:
        return [to_stream(array, device) for array in arrays]
    begins = starts_of(np.array([-(-one.nbytes // ALIGNED) * ALIGNED for one in plain], np.int64)).tolist()
    pinned_ = on_host([begins[-1]], torch.uint8, device)
    room = pinned_.numpy()
    for one, begin in zip(plain, begins, strict=False):
        room[begin : begin + one.nbytes] = one.numpy().view(np.uint8)
    there = pinned_.to(device, non_blocking=True)
    return [there[begin : begin + one.nbytes].view(one.dtype) for one, begin in zip(plain, begins, strict=False)]


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor of another stream as used in this one, so that its memory is not reused too early."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _signed(array: NDArray[Any]) -> torch.Tensor:
    unsigned_ = array.dtype.kind == "u" and array.itemsize > 1
    return torch.from_numpy(np.ascontiguousarray(array.view(array.dtype.str.replace("u", "i")) if unsigned_ else array))


def fetch(*tensors: torch.Tensor) -> Callable[[], list[NDArray[Any]]]:
    """Begin to copy arrays to the host. Returns a function that waits for them, but not for later launches.

    Small ones are copied together: every copy, and memory for it, takes longer than copying 100,000 bytes.
    """
    devices = list(dict.fromkeys(tensor.device for tensor in tensors))
    if all(device.type == "cpu" for device in devices):
        return lambda: [tensor.numpy() for tensor in tensors]
    together = len(tensors) > 1 and len(devices) == 1 and sum(t.nbytes for t in tensors) <= TOGETHER
    order = sorted(tensors, key=lambda tensor: -tensor.element_size())  # so that each begins at a multiple of its size
    some = [torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in order])] if together else tensors
    copies = [on_host(t.shape, t.dtype, t.device).copy_(t, non_blocking=True) for t in some]
    copied = StreamPoint(*devices)

    def wait() -> list[NDArray[Any]]:
        copied.wait()
        if not together:
            return [copy.numpy() for copy in copies]
        parts = copies[0].split([tensor.nbytes for tensor in order])
        found = {id(t): part.view(t.dtype).view(t.shape).numpy() for t, part in zip(order, parts, strict=True)}
        return [found[id(tensor)] for tensor in tensors]

    return wait


def to_host(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """Copy arrays to the host, and wait for them once."""
    return fetch(*tensors)()


def pinned(size: int) -> NDArray[np.uint8]:
    """Host memory from torch's pool of pinned memory, if there is some: new memory costs a fault for every page."""
    out: NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
    return out


def scan(counts: torch.Tensor) -> torch.Tensor:
    """The prefix sums of counts: where the results of each begin, and where those of the last end."""
    out = torch.zeros(counts.numel() + 1, dtype=torch.int64, device=counts.device)
    torch.cumsum(counts, 0, out=out[1:])
    return out


def starts_of(counts: NDArray[Any]) -> NDArray[np.int64]:
    """The same for counts on the host."""
    out = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=out[1:])
    return out


def warps_of(lanes: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """How the coder's kernels distribute blocks, given the lanes of each, powers of two up to 32: see `gpu.coder`.

    Returns the numbers of the blocks in order, and where those of each warp begin, and where those of the last end.
    """
    order = np.argsort(-lanes, kind="stable")
    ordered = lanes[order]
    before = np.arange(order.size) - np.searchsorted(-ordered, -ordered)  # number of earlier blocks with as many lanes
    firsts = np.flatnonzero(before % (32 // ordered) == 0)
    return order.astype(np.int32), np.append(firsts, order.size).astype(np.int32)


class DeviceStream:
    """A stream on each of some devices, perhaps with priority (`first`). On a CPU everything is in order."""

    def __init__(self, *devices: torch.device, first: bool = False) -> None:
        cuda = [device for device in devices if device.type == "cuda"]
        self._streams = [torch.cuda.Stream(device, priority=-1 if first else 0) for device in cuda]

    @contextmanager
    def __call__(self, after: Sequence["Point"] = ()) -> Iterator[None]:
        """Launch the work inside in these streams, after some points, and wait for its end."""
        try:
            with self.launches(after):
                yield
        finally:
            for stream in self._streams:
                stream.synchronize()

    def follow(self, points: Sequence["Point"]) -> None:
        """Order later launches in these streams after some points."""
        for point in points:
            point.precede(self._streams)

    @contextmanager
    def launches(self, after: Sequence["Point"] = ()) -> Iterator[None]:
        """The same without waiting for the end."""
        self.follow(after)
        with ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class StreamPoint:
    """A point in the caller's streams on some devices, after everything launched so far."""

    def __init__(self, *devices: torch.device) -> None:
        streams = [torch.cuda.current_stream(device) for device in devices if device.type == "cuda"]
        self._events = [stream.record_event() for stream in streams]

    def wait(self) -> None:
        """Wait until everything launched before it is done."""
        for event in self._events:
            event.synchronize()

    def precede(self, streams: "Sequence[torch.cuda.Stream]") -> None:
        """Order later launches in some streams after it; without streams the order of the calls is enough."""
        for stream in streams:
            for event in self._events:
                stream.wait_event(event)


class ThreadPoint(threading.Event):
    """A point that a thread reaches, and sets, when all that it has launched is done."""

    def precede(self, streams: "Sequence[torch.cuda.Stream]") -> None:
        self.wait()


Point = StreamPoint | ThreadPoint  # after which work in streams may be ordered


def copy_speed(device: torch.device) -> float:
    """The speed of copies within a device's memory, in bytes read and written a second. Takes a millisecond."""
    if device.type != "cuda":
        return 1e10
    source, target = (torch.empty(1 << 27, dtype=torch.uint8, device=device) for _ in range(2))
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with on(device):
        target.copy_(source)
        before.record()
        for _ in range(4):
            target.copy_(source)
        after.record()
    after.synchronize()
    return float(4 * 2 * source.numel() / (1e-3 * before.elapsed_time(after)))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch the work inside on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def wait(devices: Iterable[torch.device]) -> None:
    """Wait until nothing runs on some devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
