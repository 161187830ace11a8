"""Vectors of a fragment, and all computation with them: in host memory here, on a GPU in `device.vectors`.

The rest of `loco` is the same for both. It adds, subtracts and multiplies vectors with Python's operators, which round
every result separately in both numpy and torch, and leaves everything else to the `Vectors` of their device. Both yield
the same bits, so trainers on different machines can work together.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pulsesync import device, kernels
from pulsesync.core.digest import count_tile
from pulsesync.core.threads import spread
from pulsesync.core.types import MovedEntries, Sum, TensorSpec, VisibleEntries
from pulsesync.format import layout as layouts
from pulsesync.loco import steps

Item = TypeVar("Item")
Result = TypeVar("Result")
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
# Entries of a fragment, FP32 unless stated otherwise, or numbers derived from them: a numpy array in host memory, or a
# tensor of torch on a device. Both have the operators, slices and len() that are used here.
Vector = Any
CHUNK = 1 << 18  # entries that are processed together: fewer would cost more in calls than they save in cache
UPPER = 1 << 15  # number of values of the upper 16 bits of an FP32 number without the sign


class Vectors(Protocol):
    """A device on which the vectors of a fragment are."""

    @property
    def chunk(self) -> int:
        """How many entries are processed together."""

    def in_own_stream(self) -> AbstractContextManager[object]:
        """A context to compute in, after what the caller has launched on the device; waits for the end."""

    def spread(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return [work(item) for item in items]."""

    def each(self, work: Callable[[slice], Result], size: int) -> list[Result]:
        """Call a function for every piece of `chunk` entries of a vector."""

    # Making and moving vectors

    def empty(self, size: int) -> Vector: ...

    def zeros(self, size: int) -> Vector: ...

    def signs(self, size: int) -> Vector:
        """Zeros of type int8."""

    def copy(self, values: Vector) -> Vector: ...

    def join(self, vectors: Sequence[Vector], dtype: type = np.float32) -> Vector:
        """Concatenate vectors; a single one may be returned as it is. dtype: of the result if there are none."""

    def search(self, positions: Vector, borders: Sequence[int]) -> list[int]:
        """The index of each border among ascending positions."""

    def to_backend(self, values: NDArray[Any]) -> Vector:
        """Copy values from host memory to this device."""

    def fetch(self, values: Vector) -> NDArray[Any]:
        """A vector in host memory, read-only."""

    def flat(self, tensor: Any) -> Vector:
        """The values of a torch tensor on this device: a view if it is contiguous."""

    def tensor(self, values: Vector) -> Any:
        """A vector as a torch tensor, sharing its memory."""

    def assign(self, tensors: Sequence[Any], values: Vector) -> None:
        """Write a vector into flat torch tensors, one after the other."""

    def hand_out(self, values: Vector) -> Vector:
        """The same vector, for work that is done outside `in_own_stream`."""

    # Searching and counting

    def largest(self, values: Vector) -> np.float32:
        """The largest magnitude; not finite if a value is not."""

    def count_nonzero(self, values: Vector) -> int: ...

    def nonzero(self, values: Vector) -> Vector:
        """The positions of values that are not zero."""

    def first_beyond(self, values: Vector, limit: np.float32) -> int | None:
        """The index of the first value whose magnitude is not within a limit."""

    def count_upper(self, values: Vector) -> I64:
        """A histogram of the upper 16 bits of values without the sign, over `UPPER` bins."""

    def count_small(self, numbers: Vector) -> I64:
        """A histogram of integers from 0 to 255."""

    def count(self, name: str, values: Vector) -> Sum:
        """The digest of FP32 values or signs, as a tensor of this name."""

    # Computing

    def advance(
        self, theta: Vector, residual: Vector, momentum: Vector, local: Vector, lr: float, mu: float, nesterov: bool
    ) -> tuple[Vector, Vector]:
        """A trainer's update and its next momentum."""

    def find_visible(self, theta: Vector, s: Vector, reach: float, first: int) -> VisibleEntries:
        """The entries of s that change the BF16 value of theta; the first of s is entry `first`."""

    def describe(self, theta: Vector, trend: Vector) -> Vector:
        """What all trainers know of each entry, in 16 bits: see `kernels.rounds.describe`."""

    def move(self, theta: Vector, total: Vector, trainers: int, signs: Vector) -> MovedEntries:
        """Overwrite the total with theta minus the mean, and write the signs of the mean."""

    def step(
        self, theta: Vector, momentum: Vector, total: Vector, trainers: int, lr: float, mu: float, nesterov: bool
    ) -> tuple[Vector, Vector]:
        """The next weights and the next shared momentum; nothing is modified."""

    def divide(self, values: Vector, by: float) -> Vector: ...

    def add_at(self, total: Vector, positions: Vector, values: Vector) -> None:
        """Add values to entries of a vector, in place; the positions ascend."""

    # Encoding

    def in_units(self, values: Vector, unit: int) -> Vector:
        """Values as FP64 multiples of 2^unit, exactly."""

    def from_units(self, units: Vector, unit: int) -> Vector:
        """The reverse, from integers or FP64 to FP32; infinite where FP32 overflows."""

    def rint(self, values: Vector) -> Vector:
        """The nearest integers, ties to even."""

    def clip(self, values: Vector, most: int) -> Vector: ...

    def integers(self, values: Vector) -> Vector:
        """Integral values as int64."""

    def bits(self, values: Vector) -> Vector:
        """The bit patterns of FP32 values, as int64."""

    def from_bits(self, bits: Vector) -> Vector: ...

    def encode_steps(self, described: Vector, positions: Vector, sizes: Vector, negative: Vector) -> bytes: ...

    def decode_steps(self, described: Vector, data: memoryview, count: int) -> tuple[Vector, Vector, Vector]: ...


def vectors_of(values: Vector) -> Vectors:
    """The `Vectors` of a vector's device."""
    if isinstance(values, np.ndarray):
        return HOST
    found: Vectors = device.load("vectors").vectors_on(values.device)
    return found


def vectors_at(where: Any) -> Vectors:
    """The `Vectors` of a torch device; None: host memory."""
    if where is None:
        return HOST
    found: Vectors = device.load("vectors").vectors_on(where)
    return found


def chunks_of(size: int) -> Iterator[slice]:
    """The pieces in which a vector of this size is processed in host memory."""
    return (slice(begin, min(begin + CHUNK, size)) for begin in range(0, size, CHUNK))


def as_number(bits: int) -> np.float32:
    """The FP32 number of a bit pattern."""
    return np.uint32(bits).view(np.float32)


class HostVectors:
    """Vectors in host memory: numpy, and the kernels of numba, on threads."""

    @property
    def chunk(self) -> int:
        return CHUNK

    def in_own_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def spread(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        return spread(work, items)

    def each(self, work: Callable[[slice], Result], size: int) -> list[Result]:
        return spread(work, chunks_of(size))

    def empty(self, size: int) -> F32:
        return np.empty(size, np.float32)

    def zeros(self, size: int) -> F32:
        return np.zeros(size, np.float32)

    def signs(self, size: int) -> NDArray[np.int8]:
        return np.zeros(size, np.int8)

    def copy(self, values: NDArray[Any]) -> NDArray[Any]:
        return values.copy()

    def join(self, vectors: Sequence[Vector], dtype: type = np.float32) -> Vector:
        return vectors[0] if len(vectors) == 1 else np.concatenate([np.empty(0, dtype), *vectors])

    def search(self, positions: Vector, borders: Sequence[int]) -> list[int]:
        found: list[int] = np.searchsorted(positions, borders).tolist()
        return found

    def to_backend(self, values: NDArray[Any]) -> NDArray[Any]:
        return values

    def fetch(self, values: NDArray[Any]) -> NDArray[Any]:
        return values

    def flat(self, tensor: Any) -> F32:
        found: F32 = tensor.detach().reshape(-1).numpy()
        return found

    def tensor(self, values: NDArray[Any]) -> Any:
        import torch

        return torch.from_numpy(values)

    def assign(self, tensors: Sequence[Any], values: F32) -> None:
        at = 0
        for tensor in tensors:
            tensor.copy_(self.tensor(values[at : at + tensor.numel()]))
            at += tensor.numel()

    def hand_out(self, values: Vector) -> Vector:
        return values

    def largest(self, values: F32) -> np.float32:
        def here(piece: slice) -> int:
            return int((values[piece].view(np.uint32) & np.uint32(0x7FFFFFFF)).max())

        return as_number(max(self.each(here, values.size), default=0))

    def count_nonzero(self, values: F32) -> int:
        return sum(self.each(lambda here: int(np.count_nonzero(values[here])), values.size))

    def nonzero(self, values: F32) -> NDArray[np.intp]:
        return np.flatnonzero(values)

    def first_beyond(self, values: F32, limit: np.float32) -> int | None:
        found = np.flatnonzero(~(np.abs(values) <= limit))  # NaN compares as False
        return int(found[0]) if found.size else None

    def count_upper(self, values: F32) -> I64:
        return np.bincount(values.view(np.uint32) >> np.uint32(16) & np.uint32(UPPER - 1), minlength=UPPER)

    def count_small(self, numbers: I64) -> I64:
        return np.bincount(numbers, minlength=256)

    def count(self, name: str, values: NDArray[Any]) -> Sum:
        dtype, bits = ("U8", np.uint8) if values.dtype == np.int8 else ("F32", np.uint32)
        tile = layouts.make([TensorSpec(name, dtype, (values.size,))]).tiles[0]
        return count_tile(tile, values.view(bits))

    def advance(
        self, theta: F32, residual: F32, momentum: F32, local: F32, lr: float, mu: float, nesterov: bool
    ) -> tuple[F32, F32]:
        s, moved = np.empty_like(theta), np.empty_like(theta)
        advance = kernels.active().advance
        advance(theta, residual, momentum, local, np.float32(lr), np.float32(mu), nesterov, s, moved)
        return s, moved

    def find_visible(self, theta: F32, s: F32, reach: float, first: int) -> VisibleEntries:
        places, values = np.empty(s.size, np.uint32), np.empty(s.size, np.float32)
        count, largest = kernels.active().find_visible(theta, s, np.float32(reach), places, values)
        return VisibleEntries(places[:count].astype(np.int64) + first, values[:count].copy(), int(largest))

    def describe(self, theta: F32, trend: Vector) -> NDArray[np.uint16]:
        out, describe = np.empty(theta.size, np.uint16), kernels.active().describe
        self.each(lambda here: describe(theta[here], trend[here], out[here]), theta.size)
        return out

    def move(self, theta: F32, total: F32, trainers: int, signs: NDArray[np.int8]) -> MovedEntries:
        found = kernels.active().move(theta, total, np.float32(trainers), signs)
        return MovedEntries(*map(int, found))

    def step(
        self, theta: F32, momentum: F32, total: F32, trainers: int, lr: float, mu: float, nesterov: bool
    ) -> tuple[F32, F32]:
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
        kernels.active().add_at(total, positions, values)

    def in_units(self, values: F32, unit: int) -> NDArray[np.float64]:
        out: NDArray[np.float64] = np.multiply(values, 2.0**-unit, dtype=np.float64)
        return out

    def from_units(self, units: Vector, unit: int) -> F32:
        with np.errstate(over="ignore"):  # values that are not finite are refused
            out: F32 = (units * 2.0**unit).astype(np.float32)
        return out

    def rint(self, values: Vector) -> Vector:
        return np.rint(values)

    def clip(self, values: Vector, most: int) -> Vector:
        return np.clip(values, -most, most)

    def integers(self, values: Vector) -> I64:
        out: I64 = values.astype(np.int64)
        return out

    def bits(self, values: F32) -> I64:
        return values.view(np.uint32).astype(np.int64)

    def from_bits(self, bits: I64) -> F32:
        return bits.astype(np.uint32).view(np.float32)

    def encode_steps(self, described: Vector, positions: I64, sizes: I64, negative: I64) -> bytes:
        return steps.encode_steps(described, positions, sizes, negative)

    def decode_steps(self, described: Vector, data: memoryview, count: int) -> tuple[I64, I64, I64]:
        return steps.decode_steps(described, data, count)


HOST = HostVectors()
