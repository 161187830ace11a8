"""Flat buffers into which tensors are cast and concatenated: of numpy, or of torch on any device.

The cast is that of the library that owns the tensors: both round to the nearest, ties to even, but they write NaN
differently.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from pulsesync_lab.study.measure.counting import PIECE
from pulsesync_lab.study.measure.holdings import FLOATS

LARGEST = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}  # the value of a tensor's largest weight under its scale
_HOST_CHUNK, _DEVICE_CHUNK = 1 << 22, 1 << 24  # weights cast at a time: little memory, and few launches
_ALONE = 1 << 14  # weights that torch casts without other threads


class NumpyBuffers:
    """For arrays of numpy."""

    chunk = _HOST_CHUNK

    def empty(self, size: int, dtype: str) -> Any:
        """A buffer of floats, zero at first."""
        label: Any = FLOATS[dtype]
        if label.startswith(("bfloat", "float8")):
            import ml_dtypes

            label = getattr(ml_dtypes, label)
        return np.zeros(size, label)

    def load(self, out: Any, sources: Sequence[Any]) -> None:
        """Concatenate flat tensors."""
        ends = list(accumulate(map(len, sources)))
        with np.errstate(all="ignore"):  # NaN and overflow are values here
            for end, source in zip(ends, sources, strict=True):
                np.copyto(out[end - len(source) : end], source, casting="unsafe")

    def bits(self, buffer: Any) -> Any:
        return buffer.view(np.dtype(f"u{buffer.itemsize}"))

    def floats(self, buffer: Any) -> Any:
        return buffer

    def ends(self, sizes: Sequence[int]) -> Any:
        return np.cumsum(np.array(sizes, np.int64), dtype=np.int64)

    def marks(self, size: int) -> Any:
        """A byte for each weight."""
        return np.zeros(size, np.uint8)

    def scales(self, flats: Sequence[Any], counts: Sequence[int], dtype: str) -> Any:
        """For each weight of a sample, the scale that maps the largest of its tensor to the largest of a dtype."""
        with np.errstate(all="ignore"):
            largest = [_largest(flat) for flat in flats]
        return np.repeat(_factors(np.array(largest, np.float32), dtype), counts)

    def scale(self, values: Any, factors: Any, dtype: str) -> Any:
        limit = np.float32(LARGEST[dtype])
        with np.errstate(all="ignore"):
            return np.clip(values * factors, -limit, limit)

    def to_host(self, buffer: Any) -> Any:
        """A copy of its bits."""
        return self.bits(buffer).copy()

    def settle(self) -> None:
        """Wait for the device."""


class TorchBuffers:
    """For tensors of torch on one device. If counted on the host, buffers are viewed as arrays.

    to_bf16: a faster cast of FP32 than torch's on a host, from bits to bits.
    """

    def __init__(self, device: str, on_host: bool, to_bf16: Any = None) -> None:
        self.device, self.on_host, self._to_bf16 = device, on_host, to_bf16
        self.chunk = _HOST_CHUNK if on_host else _DEVICE_CHUNK

    def empty(self, size: int, dtype: str) -> Any:
        """A buffer of floats, zero at first."""
        import torch

        return torch.zeros(size, dtype=getattr(torch, FLOATS[dtype]), device=self.device)

    def load(self, out: Any, sources: Sequence[Any]) -> None:
        """Concatenate flat tensors, in few launches."""
        import torch

        if not sources:
            return
        places = out[: sum(map(len, sources))].split([len(source) for source in sources])
        if not self.on_host:
            torch._foreach_copy_(list(places), list(sources))
            return
        # In this thread: torch would start all other threads for each tensor, and where cores are shared, waiting for
        # the last of them took longer than the rest of a measurement.
        for place, source in zip(places, sources, strict=True):
            if place.dtype == source.dtype:
                self.bits(place)[:] = self.bits(source)
            elif self._to_bf16 and (place.dtype, source.dtype) == (torch.bfloat16, torch.float32):
                self._to_bf16(self.bits(source), self.bits(place))
            elif len(source):
                torch._foreach_copy_(list(place.split(_ALONE)), list(source.split(_ALONE)))

    def bits(self, buffer: Any) -> Any:
        import torch

        if self.on_host:
            return buffer.view(getattr(torch, f"uint{8 * buffer.itemsize}")).numpy()
        return buffer.view(torch.uint8 if buffer.itemsize == 1 else getattr(torch, f"int{8 * buffer.itemsize}"))

    def floats(self, buffer: Any) -> Any:
        return buffer.numpy() if self.on_host else buffer

    def ends(self, sizes: Sequence[int]) -> Any:
        import torch

        ends = np.cumsum(np.array(sizes, np.int64), dtype=np.int64)
        return ends if self.on_host else torch.from_numpy(ends).to(self.device)

    def marks(self, size: int) -> Any:
        """A byte for each weight."""
        import torch

        marks = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return marks.numpy() if self.on_host else marks

    def scales(self, flats: Sequence[Any], counts: Sequence[int], dtype: str) -> Any:
        """For each weight of a sample, the scale that maps the largest of its tensor to the largest of a dtype."""
        import torch

        none = torch.zeros((), device=self.device)
        parts = [
            [part.float().abs().amax() for part in flat.split(PIECE if self.on_host else self.chunk) if len(part)]
            for flat in flats
        ]
        largest = torch.stack([torch.stack(found).amax() if found else none for found in parts])
        factors = torch.from_numpy(_factors(largest.cpu().numpy(), dtype)).to(self.device)
        return factors.repeat_interleave(torch.tensor(counts, device=self.device))

    def scale(self, values: Any, factors: Any, dtype: str) -> Any:
        import torch

        if self.on_host:
            return torch.from_numpy(NumpyBuffers().scale(values.numpy(), factors.numpy(), dtype))
        return (values * factors).clamp_(-LARGEST[dtype], LARGEST[dtype])

    def to_host(self, buffer: Any) -> Any:
        """A copy of its bits."""
        import torch

        host = buffer.cpu().view(getattr(torch, f"uint{8 * buffer.itemsize}")).numpy()
        return host.copy() if self.on_host else host

    def settle(self) -> None:
        """Wait for the device."""
        import torch

        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


Buffers = NumpyBuffers | TorchBuffers


def _largest(flat: Any) -> Any:
    parts = (flat[begin : begin + PIECE].astype(np.float32) for begin in range(0, flat.size, PIECE))
    return np.max([np.abs(part).max() for part in parts], initial=0)


def _factors(largest: Any, dtype: str) -> Any:
    usable = np.isfinite(largest) & (largest > 0)
    return np.where(usable, np.float32(LARGEST[dtype]) / np.where(usable, largest, 1), 1).astype(np.float32)
