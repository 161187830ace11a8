"""What LoCo computes with vectors on a device, with the bits that `loco.vectors` has in host memory.

`kernels.gpu.rounds` lists the conditions under which the bits are equal. torch's own operators round every result
separately, with one exception that is avoided: on a GPU, dividing a tensor by a Python number multiplies it by the
reciprocal, which rounds twice (pytorch/pytorch#191495). And no sum of FP32 values is left to torch, whose order differs
between machines.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pulsesync.core.types import MovedEntries, Sum, VisibleEntries
from pulsesync.device import steps
from pulsesync.device.blocks import count_pile
from pulsesync.device.memory import DeviceStream, StreamPoint, empty, on, scan, shared, to_host, unsigned
from pulsesync.device.pile import WORDS
from pulsesync.kernels import cuda
from pulsesync.kernels.spec import GPU_CHUNK

Item = TypeVar("Item")
Result = TypeVar("Result")
CHUNK = 1 << 25  # entries that are processed together: temporary results occupy 128 MB a vector
SPAN = 1024  # entries of a program
EXACT = {"enable_fp_fusion": False}  # option of a launch: products and sums are rounded separately


class DeviceKernels:
    """As `loco.vectors.HostKernels` describes them. Everything is launched in the current stream."""

    chunk = CHUNK

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = DeviceStream(device)

    @contextmanager
    def in_own_stream(self) -> Iterator[None]:
        with on(self.device), torch.inference_mode(False):  # tensors made here are written in place later
            launched = StreamPoint(self.device)
            with self._stream([launched]):
                yield

    def spread(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        with on(self.device):  # threads of a pool would use other streams
            return [work(item) for item in items]

    def each(self, work: Callable[[slice], Result], size: int) -> list[Result]:
        chunk = self.chunk
        return self.spread(work, (slice(at, min(at + chunk, size)) for at in range(0, size, chunk)))

    def _empty(self, size: int) -> Tensor:
        return empty(size, torch.float32, self.device)

    def _results(self, kinds: int, programs: int) -> Tensor:
        """Zeros for the results of programs; rows begin at multiples of 16 bytes, so that kernels are compiled once."""
        return torch.zeros((kinds, -(-programs // 4) * 4), dtype=torch.int32, device=self.device)

    def assign(self, tensors: Sequence[Tensor], values: Tensor) -> None:
        torch._foreach_copy_(list(tensors), list(values.split([tensor.numel() for tensor in tensors])))

    def hand_out(self, values: Tensor) -> Tensor:
        return shared(values)

    def _measure(self, values: Tensor) -> tuple[int, int]:
        """The number of values that are not zero, and the largest bit pattern without the sign."""

        def measure(here: slice) -> list[int]:
            piece = values[here]
            programs = -(-piece.numel() // SPAN)
            found = self._results(2, programs)
            cuda.measure[(programs,)](piece, found[0], found[1], piece.numel(), SPAN=SPAN, **EXACT)
            return _joined(found)

        done = self.each(measure, values.numel())
        return sum(one[0] for one in done), max((one[1] for one in done), default=0)

    def largest(self, values: Tensor) -> np.float32:
        return np.uint32(self._measure(values)[1]).view(np.float32)

    def count_nonzero(self, values: Tensor) -> int:
        return self._measure(values)[0]

    def count(self, name: str, values: Tensor) -> Sum:
        dtype, bits = ("U8", torch.uint8) if values.dtype == torch.int8 else ("F32", torch.int32)
        if not values.numel():
            return Sum(0, 0)
        with on(self.device):
            _, pile = steps.pile_of(name, dtype, values.numel(), self.device)
            return count_pile(pile, {name: values.view(bits)})[0]

    def advance(
        self, theta: Tensor, residual: Tensor, momentum: Tensor, local: Tensor, lr: float, mu: float, nesterov: bool
    ) -> tuple[Tensor, Tensor]:
        size = theta.numel()
        s, moved = self._empty(size), self._empty(size)
        if size:
            with on(self.device):
                cuda.advance[(-(-size // SPAN),)](
                    theta, residual, momentum, local, _rounded(lr), _rounded(mu), s, moved, size,
                    NESTEROV=nesterov, SPAN=SPAN, **EXACT,
                )  # fmt: skip
        return s, moved

    def find_visible(self, theta: Tensor, s: Tensor, reach: float, first: int) -> VisibleEntries:
        size, device = s.numel(), self.device
        chunks = -(-size // GPU_CHUNK)
        bitmap = empty(chunks * WORDS, torch.int32, device)
        counts, largest = (empty(chunks, torch.int32, device) for _ in range(2))
        cuda.flag_visible[(chunks,)](theta, s, _rounded(reach), unsigned(bitmap), counts, largest, size, **EXACT)
        offsets = scan(counts)
        count, most = to_host(torch.stack((offsets[-1], largest.max().to(torch.int64))))[0].tolist()
        positions, values = empty(count, torch.int64, device), self._empty(count)
        if count:
            cuda.list_visible[(chunks,)](s, unsigned(bitmap), offsets, first, positions, values)
        return VisibleEntries(positions, values, most)

    def describe(self, theta: Tensor, trend: Tensor) -> Tensor:
        out = empty(theta.numel(), torch.int16, self.device)

        def describe(here: slice) -> None:
            size = here.stop - here.start
            cuda.describe[(-(-size // SPAN),)](theta[here], trend[here], unsigned(out[here]), size, SPAN=SPAN, **EXACT)

        self.each(describe, theta.numel())
        return out

    def move(self, theta: Tensor, total: Tensor, trainers: int, signs: Tensor) -> MovedEntries:
        size = theta.numel()
        programs = -(-size // SPAN)
        found = self._results(3, programs)
        cuda.move[(programs,)](
            theta, total, float(trainers), signs, found[0], found[1], found[2], size, SPAN=SPAN, **EXACT
        )
        return MovedEntries(*_joined(found))

    def step(
        self, theta: Tensor, momentum: Tensor, total: Tensor, trainers: int, lr: float, mu: float, nesterov: bool
    ) -> tuple[Tensor, Tensor]:
        after, moved = self._empty(theta.numel()), self._empty(theta.numel())

        def step(here: slice) -> None:
            size = here.stop - here.start
            cuda.step_momentum[(-(-size // SPAN),)](
                theta[here], momentum[here], total[here], _rounded(lr), _rounded(mu), float(trainers), after[here],
                moved[here], size, NESTEROV=nesterov, SPAN=SPAN, **EXACT,
            )  # fmt: skip

        self.each(step, theta.numel())
        return after, moved

    def divide(self, values: Tensor, by: float) -> Tensor:
        out = self._empty(values.numel())

        def divide(here: slice) -> None:
            size = here.stop - here.start
            cuda.divide[(-(-size // SPAN),)](values[here], _rounded(by), out[here], size, SPAN=SPAN, **EXACT)

        self.each(divide, values.numel())
        return out

    def add_at(self, total: Tensor, positions: Tensor, values: Tensor) -> None:
        if count := positions.numel():
            with on(self.device):
                cuda.add_at[(-(-count // SPAN),)](total, positions, values, count, SPAN=SPAN, **EXACT)

    def encode_steps(self, described: Tensor, positions: Tensor, sizes: Tensor, negative: Tensor) -> bytes:
        with on(self.device):
            return steps.encode_steps(described, positions, sizes, negative)

    def decode_steps(self, described: Tensor, data: memoryview, count: int) -> tuple[Tensor, Tensor, Tensor]:
        with on(self.device):
            return steps.decode_steps(described, data, count)


def _rounded(number: float) -> float:
    """A number rounded to FP32, as it is passed to a kernel."""
    return float(np.float32(number))


def _joined(found: Tensor) -> list[int]:
    """The results of programs, joined: the sum of the first row, then the maximum of all others."""
    most = found[1:].amax(dim=1).to(torch.int64)
    out: list[int] = to_host(torch.cat((found[0].sum(dtype=torch.int64).view(1), most)))[0].tolist()
    return out
