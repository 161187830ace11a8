"""Why most weights do not change: how far a weight must move, how far Adam moves it, and what follows.

A weight is stored with m bits of mantissa, so its neighbours are one *unit* away: 2^(e-m) for 2^e <= |w| < 2^(e+1). A
move shorter than half of that is rounded away: the weight *absorbs* it. BF16 has m = 7, so the threshold is 2^(e-8):
between |w|/512 and |w|/256. Adam's moves are about as long as the learning rate whatever the gradient, so the weights
that can change are the small ones. A *class* is the exponent bits of a weight, as in `Step.by_class`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import DTYPES, TensorSpec
from pulsesync.state.views import new_tensors

Floats = NDArray[np.float64]
Betas = tuple[float, float]

ADAM: Betas = (0.9, 0.999)
LION: Betas = (0.9, 0.99)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The array type of a dtype by its safetensors name. Raises: ValueError, for an unsupported dtype."""
    if dtype not in DTYPES or DTYPES[dtype].exponent_shift is None:
        known = ", ".join(name for name, kind in DTYPES.items() if kind.exponent_shift is not None)
        raise ValueError(f"dtype must be one of {known}; got {dtype}")
    found: np.dtype[Any] = new_tensors([TensorSpec("", dtype, (0,))])[""].dtype
    return found


def exponent_bias(dtype: str) -> int:
    """The bias that is subtracted from the exponent bits."""
    kind = DTYPES[dtype]
    return (1 << (8 * kind.itemsize - 2 - (kind.exponent_shift or 0))) - 1


def unit(classes: Sequence[int] | NDArray[np.integer[Any]], dtype: str = "BF16") -> Floats:
    """The distance between neighbours in each class; class 0, subnormals and zero, has that of class 1."""
    exponents = np.maximum(np.asarray(classes, np.int64), 1) - exponent_bias(dtype)
    return np.asarray(np.ldexp(1.0, exponents - (DTYPES[dtype].exponent_shift or 0)), np.float64)


def thresholds(weights: NDArray[Any], dtype: str = "BF16") -> tuple[Floats, Floats]:
    """How far each weight may move towards zero and away from it and still be rounded to its old value.

    Half the distance to the next value, exactly: above a power of two it is twice what it is below, and around zero and
    among subnormals it is the same on both sides. A move of just this length goes to the neighbour whose last bit is 0.
    The weights must be finite; they are rounded to the dtype first. Above the largest value the same spacing is
    assumed.
    """
    kind, values = DTYPES[dtype], weights.astype(numpy_dtype(dtype))
    shift = kind.exponent_shift or 0
    magnitude = values.view(kind.bits).astype(np.int64) & ((1 << (8 * kind.itemsize - 1)) - 1)
    away = unit(magnitude >> shift, dtype) / 2
    towards = unit((np.maximum(magnitude, 1) - 1) >> shift, dtype) / 2
    return towards, away


def adam_bound(betas: Betas = ADAM, step: int | None = None) -> float:
    """The longest move that Adam can make, in learning rates: at a step (from 1), or at any.

    With m = (1-b1) sum b1^j g_j and v = (1-b2) sum b2^j g_j^2 over the gradients j steps ago, write b1^j g_j as
    (b1/sqrt b2)^j times b2^(j/2) g_j; Cauchy and Schwarz then give |m| <= (1-b1) sqrt(sum (b1^2/b2)^j) sqrt(v/(1-b2)).
    Both bias corrections matter at an early step; at the first the bound is 1. For (0.9, 0.999) it grows to 7.27, for
    (0.9, 0.95) to 1.17; without bound if b1^2 >= b2. Reaching it needs a gradient that grows from step to step.
    """
    first, second = betas
    ratio = first**2 / second
    if step is None:
        return math.inf if ratio >= 1 else (1 - first) / math.sqrt((1 - second) * (1 - ratio))
    powers = sum(ratio**j for j in range(step))
    young = math.sqrt((1 - second**step) / (1 - second)) / (1 - first**step)
    return (1 - first) * young * math.sqrt(powers)


def noise_std(betas: Betas = ADAM) -> float:
    """The standard deviation of a move, in learning rates, long after the start, if gradients are noise around zero.

    m is then a sum of independent terms, with variance (1-b1)^2 / (1-b1^2) = (1-b1)/(1+b1) of that of a gradient, and v
    settles at the latter: 0.23 for b1 = 0.9, which makes 0.18 the mean length of a move. Gradients that keep their sign
    give moves of 1, as does the first step.
    """
    return math.sqrt((1 - betas[0]) / (1 + betas[0]))


def critical_magnitude(lr: float, size: float = 1.0, dtype: str = "BF16") -> tuple[float, float]:
    """The |w| below which every weight, fresh from its dtype, sees a move of size x lr; and above which none does.

    256 and 512 times the move for BF16, because the threshold is |w|/512 to |w|/256. For size, take 1 (gradients that
    keep their sign), `noise_std` (noise) or `adam_bound` (the worst).
    """
    factor = 2.0 ** ((DTYPES[dtype].exponent_shift or 0) + 1)
    return factor * lr * size, 2 * factor * lr * size


def expected_density(
    classes: Sequence[int] | NDArray[np.integer[Any]],
    lr: float,
    dtype: str = "BF16",
    *,
    masters: bool = True,
    betas: Betas = ADAM,
    std: float | None = None,
) -> Floats:
    """The share of each class that a step changes, long after the start, for moves that are normal around zero.

    With FP32 masters nothing is lost: a master is uniformly distributed between two borders, so a move d crosses one
    with probability min(1, |d|/unit), whose mean over the normal distribution is sqrt(2/pi) s/unit (1 - exp(-unit^2 / 2
    s^2)) + erfc(unit / s sqrt 2), with s = lr x std. Without masters every weight is a value of the dtype, and moves
    under half a unit are lost: P(|d| > unit/2) = erfc(unit / 2 s sqrt 2).

    Args:
        classes: exponent bits.
        lr: learning rate.
        dtype: the one that inference uses.
        masters: whether the optimizer keeps the weights in FP32.
        betas: Adam's; they determine std if it is not given.
        std: standard deviation of a move in learning rates. Noise has 0.23; gradients that keep their sign 1.
    """
    s = lr * (noise_std(betas) if std is None else std)
    units = unit(classes, dtype)
    if s == 0:
        return np.zeros_like(units)
    erfc = np.vectorize(math.erfc, otypes=[np.float64])
    z = units / (s * math.sqrt(2))
    if not masters:
        return np.asarray(erfc(z / 2), np.float64)
    return np.asarray(-np.expm1(-(z**2)) / (z * math.sqrt(math.pi)) + erfc(z), np.float64)
