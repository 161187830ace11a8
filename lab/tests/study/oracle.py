"""What a recorder should say, from all states of a run kept whole: slow, plain numpy, and nothing of pulsesync."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

State = dict[str, np.ndarray]
FLOATS: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F8_E4M3": 3, "F8_E5M2": 2}
LARGEST = {"F8_E4M3": 448, "F8_E5M2": 57344}


def adam_like(seed: int, steps: int, shapes: dict[str, tuple[int, ...]], lr: float = 3e-5) -> list[State]:
    """States of a run whose updates are about as long as a learning rate, and often go the same way again."""
    rng = np.random.default_rng(seed)
    state = {name: np.asarray(0.02 * rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}
    drift = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}
    out = [state]
    for _ in range(steps):
        noise = {name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()}
        state = {name: np.asarray(w - np.float32(lr) * (drift[name] + noise[name])) for name, w in state.items()}
        out.append(state)
    return out


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        cast = values.astype(FLOATS[dtype])
    return cast.reshape(-1).view(np.dtype(f"u{cast.itemsize}"))


def scaled(values: np.ndarray, first: np.ndarray, dtype: str) -> np.ndarray:
    """As a dtype of few bits is used: the largest weight of the first state becomes the largest there is."""
    if dtype not in LARGEST:
        return values
    limit = np.float32(LARGEST[dtype])
    return np.asarray(np.clip(values * (limit / np.abs(first).max()), -limit, limit))


def ordered(b: np.ndarray) -> np.ndarray:
    half = 1 << (8 * b.itemsize - 1)
    wide = b.astype(np.int64)
    return np.where(wide < half, wide, half - 1 - wide)


def step(states: Sequence[State], dtype: str) -> dict[str, Any]:
    """What the last step of a run did, all weights compared."""
    out: dict[str, Any] = {"changed": (), "again": 0, "same_way": 0, "up": 0}
    units: Counter[int] = Counter()
    by_class: Counter[int] = Counter()
    weights: Counter[int] = Counter()
    for name in states[-1]:
        old, new = (bits(state[name], dtype) for state in states[-2:])
        moved = ordered(new) - ordered(old)
        differ = old != new
        out["changed"] += (int(differ.sum()),)
        out["up"] += int((moved > 0).sum())
        for size in np.abs(moved[differ]).tolist():
            units[size if size < 16 else 1 << (size.bit_length() - 1)] += 1
        exponents = (old & old.dtype.type((1 << 8 * old.itemsize - 1) - 1)) >> old.dtype.type(MANTISSA[dtype])
        by_class.update(exponents[differ].tolist())
        weights.update(exponents.tolist())
        if len(states) > 2:
            earlier = old.astype(np.int64) != bits(states[-3][name], dtype)
            went = np.sign(ordered(old) - ordered(bits(states[-3][name], dtype)))
            out["again"] += int((differ & earlier).sum())
            out["same_way"] += int((differ & earlier & (went == np.sign(moved))).sum())
    return out | {"units": dict(units), "by_class": dict(by_class), "weights_by_class": dict(weights)}


def since(states: Sequence[State], k: int, dtype: str, first: State | None = None) -> tuple[int, ...]:
    """Weights of each tensor that differ from k steps before."""
    out = []
    for name in states[-1]:
        new, old = states[-1][name], states[-1 - k][name]
        if first is not None:
            new, old = scaled(new, first[name], dtype), scaled(old, first[name], dtype)
        out.append(int((bits(old, dtype) != bits(new, dtype)).sum()))
    return tuple(out)
