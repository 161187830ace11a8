"""Vectors of a fragment, and all computation with them: numpy arrays in host memory, or tensors of torch on a GPU.

The rest of `loco` is the same for both. It adds, subtracts and multiplies vectors with Python's operators, which round
every result separately in both libraries. `VectorOps` has what both can do under the same names; `HostKernels` is the
rest, which `device.vectors` has for a GPU. All yield the same bits, so trainers on different machines can work
together.

Vectors in host memory are not tensors of torch: every operation of torch uses threads of its own, one per core, and
pieces are already processed on threads. With 16 cores, subtracting two vectors of 2^27 entries piece by piece took 38
ms with torch, on 256 threads, and 20 ms with numpy.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulsesync import device, kernels
from pulsesync.core.digest import count_tile
from pulsesync.core.threads import spread
from pulsesync.core.types import MovedEntries, Sum, TensorSpec, VisibleEntries
from pulsesync.format import layout as layouts
from pulsesync.kernels.arrays import I64
from pulsesync.loco import steps

Item = TypeVar("Item")
Result = TypeVar("Result")
F32 = NDArray[np.float32]
# Entries of a fragment, FP32 unless stated otherwise, or numbers derived from them: a numpy array in host memory, or a
# tensor of torch on a device. Both have the operators, slices and len() that are used here.
Vector = Any
CHUNK = 1 << 18  # entries that are processed together: fewer would cost more in calls than they save in cache
UPPER = 1 << 15  # number of values of the upper 16 bits of an FP32 number without the sign


def chunks_of(size: int) -> Iterator[slice]:
    """The pieces in which a vector of this size is processed in host memory."""
    return (slice(begin, min(begin + CHUNK, size)) for begin in range(0, size, CHUNK))


def as_number(bits: int) -> np.float32:
    """The FP32 number of a bit pattern."""
    return np.uint32(bits).view(np.float32)


class HostKernels:
    """What numpy and torch cannot both do: kernels of numba, on threads. `DeviceKernels` has the same methods."""

    @property
    def chunk(self) -> int:
        """How many entries are processed together."""
        return CHUNK

    def in_own_stream(self) -> AbstractContextManager[object]:
        """A context to compute in, after what the caller has launched on the device; waits for the end."""
        return nullcontext()

    def spread(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return [work(item) for item in items]."""
        return spread(work, items)

    def each(self, work: Callable[[slice], Result], size: int) -> list[Result]:
        """Call a function for every piece of `chunk` entries of a vector."""
        return spread(work, chunks_of(size))

    def assign(self, tensors: Sequence[Any], values: F32) -> None:
        """Write a vector into flat torch tensors, one after the other."""
        import torch

        for tensor, part in zip(tensors, torch.from_numpy(values).split([one.numel() for one in tensors]), strict=True):
            tensor.copy_(part)

    def hand_out(self, values: Vector) -> Vector:
        """The same vector, for work that is done outside `in_own_stream`."""
        return values

    def largest(self, values: F32) -> np.float32:
        """The largest magnitude; not finite if a value is not."""

        def here(piece: slice) -> int:
            return int((values[piece].view(np.uint32) & np.uint32(0x7FFFFFFF)).max())

        return as_number(max(self.each(here, values.size), default=0))

    def count_nonzero(self, values: F32) -> int:
        return sum(self.each(lambda here: int(np.count_nonzero(values[here])), values.size))

    def count(self, name: str, values: NDArray[Any]) -> Sum:
        """The digest of FP32 values or signs, as a tensor of this name."""
        dtype, bits = ("U8", np.uint8) if values.dtype == np.int8 else ("F32", np.uint32)
        tile = layouts.make([TensorSpec(name, dtype, (values.size,))]).tiles[0]
        return count_tile(tile, values.view(bits))

    def advance(
        self, theta: F32, residual: F32, momentum: F32, local: F32, lr: float, mu: float, nesterov: bool
    ) -> tuple[F32, F32]:
        """A trainer's update and its next momentum."""
        s, moved = np.empty_like(theta), np.empty_like(theta)
        advance = kernels.active().advance
        advance(theta, residual, momentum, local, np.float32(lr), np.float32(mu), nesterov, s, moved)
        return s, moved

    def find_visible(self, theta: F32, s: F32, reach: float, first: int) -> VisibleEntries:
        """The entries of s that change the BF16 value of theta; the first of s is entry `first`."""
        places, values = np.empty(s.size, np.uint32), np.empty(s.size, np.float32)
        count, largest = kernels.active().find_visible(theta, s, np.float32(reach), places, values)
        return VisibleEntries(places[:count].astype(np.int64) + first, values[:count].copy(), int(largest))

    def describe(self, theta: F32, trend: Vector) -> NDArray[np.uint16]:
        """What all trainers know of each entry, in 16 bits: see `kernels.rounds.describe`."""
        out, describe = np.empty(theta.size, np.uint16), kernels.active().describe
        self.each(lambda here: describe(theta[here], trend[here], out[here]), theta.size)
        return out

    def move(self, theta: F32, total: F32, trainers: int, signs: NDArray[np.int8]) -> MovedEntries:
        """Overwrite the total with theta minus the mean, and write the signs of the mean."""
        found = kernels.active().move(theta, total, np.float32(trainers), signs)
        return MovedEntries(*map(int, found))

    def step(
        self, theta: F32, momentum: F32, total: F32, trainers: int, lr: float, mu: float, nesterov: bool
    ) -> tuple[F32, F32]:
        """The next weights and the next shared momentum; nothing is modified."""
        rate, share = np.float32(lr), np.float32(mu)
        after, moved = np.empty_like(theta), np.empty_like(momentum)

        def step(here: slice) -> None:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller checks that all is finite
                mean = self.divide(total[here], trainers)
                moved[here] = share * momentum[here] + mean
                by = mean + share * moved[here] if nesterov else moved[here]
                after[here] = theta[here] - rate * by

        self.each(step, theta.size)
        return after, moved

    def divide(self, values: F32, by: float) -> F32:
        out: F32 = values / np.float32(by)
        return out

    def add_at(self, total: F32, positions: I64, values: F32) -> None:
        """Add values to entries of a vector, in place; the positions ascend."""
        kernels.active().add_at(total, positions, values)

    encode_steps = staticmethod(steps.encode_steps)
    decode_steps = staticmethod(steps.decode_steps)


class VectorOps:
    """Vectors in one place: what numpy and torch (xp) can both do; place: the device, for torch."""

    def __init__(self, xp: Any, kernels: HostKernels, **place: Any) -> None:
        self.xp, self.kernels, self._place = xp, kernels, place

    # Making and moving vectors

    def empty(self, size: int) -> Vector:
        return self.xp.empty(max(size, 1), dtype=self.xp.float32, **self._place)[:size]  # it always has an address

    def zeros(self, size: int) -> Vector:
        return self.xp.zeros(max(size, 1), dtype=self.xp.float32, **self._place)[:size]

    def signs(self, size: int) -> Vector:
        """Zeros of type int8."""
        return self.xp.zeros(max(size, 1), dtype=self.xp.int8, **self._place)[:size]

    def join(self, vectors: Sequence[Vector], dtype: str = "float32") -> Vector:
        """Concatenate vectors; a single one may be returned as it is. dtype: of the result if there are none."""
        if len(vectors) == 1:
            return vectors[0]
        return self.xp.concatenate([self.xp.empty(0, dtype=getattr(self.xp, dtype), **self._place), *vectors])

    def copy(self, values: Vector) -> Vector:
        return values.copy() if self.xp is np else values.clone()

    def to_backend(self, values: NDArray[Any]) -> Vector:
        """Values in host memory as a vector, which may share their memory."""
        return self.xp.asarray(values, **self._place)

    def fetch(self, values: Vector) -> NDArray[Any]:
        """A vector in host memory, read-only."""
        found: NDArray[Any] = values if self.xp is np else values.cpu().numpy()  # pinned memory would be kept by torch
        return found

    def flat(self, tensor: Any) -> Vector:
        """The values of a torch tensor in this place: a view if it is contiguous."""
        values = tensor.detach().reshape(-1)
        return values.numpy() if self.xp is np else values

    def tensor(self, values: Vector) -> Any:
        """A vector as a torch tensor, sharing its memory."""
        import torch

        return torch.as_tensor(values)

    # Searching and counting

    def search(self, positions: Vector, borders: Sequence[int]) -> list[int]:
        """The index of each border among ascending positions."""
        found: list[int] = self.xp.searchsorted(positions, self.xp.asarray(borders, **self._place)).tolist()
        return found

    def nonzero(self, values: Vector) -> Vector:
        """The positions of values that are not zero."""

        def find(here: slice) -> Vector:
            return self.xp.argwhere(values[here]).reshape(-1) + here.start

        return self.join(self.kernels.each(find, len(values)), "int64")

    def first_beyond(self, values: Vector, limit: np.float32) -> int | None:
        """The index of the first value whose magnitude is not within a limit."""
        found = self.xp.argwhere(~(abs(values) <= float(limit))).reshape(-1)[:1].tolist()  # NaN compares as False
        return found[0] if found else None

    def count_upper(self, values: Vector) -> I64:
        """A histogram of the upper 16 bits of values without the sign, over `UPPER` bins."""

        def count(here: slice) -> I64:
            upper = (values[here].view(self.xp.int32) >> 16) & (UPPER - 1)
            return self.fetch(self.xp.bincount(upper, minlength=UPPER))

        return sum(self.kernels.each(count, len(values)), np.zeros(UPPER, np.int64))

    def count_small(self, numbers: Vector) -> I64:
        """A histogram of integers from 0 to 255."""
        return self.fetch(self.xp.bincount(numbers, minlength=256))

    # Encoding

    def in_units(self, values: Vector, unit: int) -> Vector:
        """Values as FP64 multiples of 2^unit, exactly."""
        return self.xp.asarray(values, dtype=self.xp.float64) * 2.0**-unit

    def from_units(self, units: Vector, unit: int) -> Vector:
        """The reverse, from integers or FP64 to FP32; infinite where FP32 overflows."""
        with np.errstate(over="ignore"):  # values that are not finite are refused
            return self.xp.asarray(self.xp.asarray(units, dtype=self.xp.float64) * 2.0**unit, dtype=self.xp.float32)

    def integers(self, values: Vector) -> Vector:
        """Integral values as int64."""
        return self.xp.asarray(values, dtype=self.xp.int64)

    def bits(self, values: Vector) -> Vector:
        """The bit patterns of FP32 values, as int64."""
        return self.integers(values.view(self.xp.int32)) & 0xFFFFFFFF

    def from_bits(self, bits: Vector) -> Vector:
        return self.xp.asarray(bits, dtype=self.xp.int32).view(self.xp.float32)


HOST = VectorOps(np, HostKernels())


@cache
def vectors_at(where: Any) -> VectorOps:
    """The vectors on a torch device; None: in host memory."""
    if where is None:
        return HOST
    import torch

    return VectorOps(torch, device.load("vectors").DeviceKernels(where), device=where)


def vectors_of(values: Vector) -> VectorOps:
    """The operations for a vector, where it is."""
    return HOST if isinstance(values, np.ndarray) else vectors_at(values.device)


def kernels_of(values: Vector) -> HostKernels:
    """The kernels for a vector, where it is."""
    return vectors_of(values).kernels
