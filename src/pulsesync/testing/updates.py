"""Weight updates that look like reinforcement learning, and arbitrary bit patterns for round-trip tests.

`AdamUpdates` replaces a recording of a real run: FP32 master weights, gradients with a persistent mean and fresh noise,
a real Adam update, and the BF16 view a worker would be sent. `random_bits` and `mutate` are for tests that must not
depend on what the bits mean.

    updates = AdamUpdates({"layer.weight": (576, 576)}, seed=0)
    old = updates.state()
    new = updates.step()                # about 0.5 % of the weights differ from old, 1 % in later steps
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bits16 = npt.NDArray[np.uint16]
Unsigned = TypeVar("Unsigned", bound=np.unsignedinteger[Any])

_CHUNK = 1 << 15  # weights per pass: the six arrays of a chunk then fit a core's cache
_EPS = 0.05  # Adam's epsilon in units of a typical gradient: some weights hardly have one, as in real models
_BELL_STD = math.sqrt(4 * (2**32 - 1) / 12)

# (exponent bits, mantissa bits) of the floating-point formats of each width in bytes, BF16 and FP16 both at two.
_FLOAT_FORMATS = {1: ((4, 3), (5, 2)), 2: ((8, 7), (5, 10)), 4: ((8, 23),), 8: ((11, 52),)}


class AdamUpdates:
    """The weights of a model under Adam, one optimizer step at a time, as BF16 bit patterns.

    The run starts from BF16 values, as a run from a published checkpoint does, so a weight first changes when enough
    steps have added up to half the distance to its neighbour. The defaults were fitted to 15 recorded steps of GRPO on
    SmolLM2-135M-Instruct at learning rate 3e-6. At the last of them, recording and 6 M generated weights compare so:
    changed 0.79 / 0.76 %, by one place 85 / 85 %, changed a step ago too 31 / 29 %, and then in the same direction
    98.6 / 98.7 %; bits per change for position given exponent 3.24 / 3.30, given steps since the last change as well
    2.56 / 2.57, for the sign 0.32 / 0.32, for the size 0.45 / 0.44. Density is nearly proportional to `lr / scale`.

    Deterministic: the same arguments yield the same bits on every machine with IEEE arithmetic. Randomness is taken as
    raw words from PCG64, whose stream NumPy guarantees, and only `+ - * / sqrt` follow, each correctly rounded.

    Args:
        shapes: shape of each tensor by name; the order is part of the seed.
        lr: learning rate.
        seed: which run.
        betas: Adam's decay rates.
        scale: standard deviation of the start weights. The recorded model has 0.15; many larger ones have 0.02, which
            at the same learning rate changes seven times as many weights.
        noise: standard deviation of a gradient around its mean. Larger means fewer weights that keep moving one way.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        lr: float = 3e-6,
        seed: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        scale: float = 0.15,
        noise: float = 0.2,
    ) -> None:
        self.shapes, self.lr, self.betas, self.noise = dict(shapes), lr, betas, noise
        self._words = np.random.PCG64(seed)
        self._decays = [1.0, 1.0]  # betas to the power of the steps taken, by multiplication: pow differs by platform
        size = sum(math.prod(shape) for shape in self.shapes.values())
        self._weights, self._means = (np.empty(size, np.float32) for _ in range(2))
        self._first, self._second = (np.zeros(size, np.float32) for _ in range(2))
        for chunk in self._chunks():
            weights, means = self._weights[chunk], self._means[chunk]
            weights[:] = _normal(self._words, len(weights), fine=True) * np.float32(scale)
            weights[:] = _widen(_round_to_bf16(weights))
            means[:] = _normal(self._words, len(means))
            for _ in range(2):  # a product of three has the heavy tails of real gradients, also towards zero
                means *= _normal(self._words, len(means))

    def state(self) -> dict[str, Bits16]:
        """The current weights, rounded to nearest even, in new arrays."""
        return split_tensors(_round_to_bf16(self._weights), self.shapes)

    def step(self) -> dict[str, Bits16]:
        """Take one optimizer step and return the weights after it, in new arrays."""
        beta1, beta2 = self.betas
        self._decays = [self._decays[0] * beta1, self._decays[1] * beta2]
        rate = np.float32(self.lr / (1 - self._decays[0]))
        unbias = np.float32(1 / (1 - self._decays[1]))
        keep1, keep2, take1, take2 = (np.float32(x) for x in (beta1, beta2, 1 - beta1, 1 - beta2))
        for chunk in self._chunks():
            weights, first, second = self._weights[chunk], self._first[chunk], self._second[chunk]
            gradient = _normal(self._words, len(weights))
            gradient *= np.float32(self.noise)
            gradient += self._means[chunk]
            first *= keep1
            first += take1 * gradient
            gradient *= gradient
            gradient *= take2
            second *= keep2
            second += gradient
            size = np.sqrt(second * unbias, out=gradient)
            size += np.float32(_EPS)
            move = first / size
            move *= rate
            weights -= move
        return self.state()

    def _chunks(self) -> list[slice]:
        return [slice(at, at + _CHUNK) for at in range(0, len(self._weights), _CHUNK)]


def split_tensors(flat: Bits16, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Bits16]:
    """Views of tensors of these shapes that follow each other in one array."""
    state, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        state[name] = flat[at : at + size].reshape(shape)
        at += size
    return state


def random_bits(
    rng: np.random.Generator, dtype: type[Unsigned], shape: tuple[int, ...], special: bool = True
) -> npt.NDArray[Unsigned]:
    """Arbitrary bit patterns as unsigned integers of 1, 2, 4 or 8 bytes.

    With special, a quarter of them are patterns that arithmetic would not preserve: both zeros, the ends of the
    subnormal and normal ranges, infinities and NaNs with payloads, in every float format of that width.
    """
    bits = rng.integers(0, np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True)
    if special:
        table = _special_bits(dtype)
        bits = np.where(rng.random(shape) < 0.25, table[rng.integers(0, len(table), shape)], bits)
    return np.asarray(bits, dtype)


def mutate(rng: np.random.Generator, bits: npt.NDArray[Unsigned], density: float) -> npt.NDArray[Unsigned]:
    """Return a copy of bits in which each element has, with probability density, become a different one."""
    flips = rng.integers(1, np.iinfo(bits.dtype).max, size=bits.shape, dtype=bits.dtype, endpoint=True)
    chosen = rng.random(bits.shape) < density
    return np.asarray(np.where(chosen, bits ^ flips, bits), bits.dtype)


def _special_bits(dtype: type[Unsigned]) -> npt.NDArray[Unsigned]:
    width = np.dtype(dtype).itemsize
    magnitudes = set()
    for exponent_bits, mantissa_bits in _FLOAT_FORMATS[width]:
        infinity = ((1 << exponent_bits) - 1) << mantissa_bits
        least_normal = 1 << mantissa_bits
        one = (infinity >> 1) & ~(least_normal - 1)
        quiet = infinity | least_normal >> 1
        magnitudes |= {0, 1, least_normal - 1, least_normal, one}
        magnitudes |= {infinity - 1, infinity, infinity + 1, quiet, quiet + 1}
    sign = 1 << (8 * width - 1)
    return np.array(sorted(magnitudes | {sign | m for m in magnitudes} | {sign - 1, 2 * sign - 1}), dtype)


def _normal(words: np.random.PCG64, count: int, fine: bool = False) -> Floats:
    """Nearly normal numbers of unit variance: sums of four 16-bit words; with `fine`, also values between these."""
    raw = words.random_raw(count)
    pairs = ((raw & 0x0000FFFF0000FFFF) + (raw >> 16 & 0x0000FFFF0000FFFF)).view(np.uint32)
    numbers = (pairs[0::2] + pairs[1::2]).astype(np.float32)  # (count,), at most 2**18: exact
    numbers -= np.float32(2 * 0xFFFF)
    if fine:
        numbers += (words.random_raw(count) >> 40).astype(np.float32) * np.float32(2**-24) - np.float32(0.5)
    numbers /= np.float32(_BELL_STD)
    return numbers


def _round_to_bf16(values: Floats) -> Bits16:
    """Round to the nearest BF16, ties to even; the values must not be NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _widen(bits: Bits16) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)
