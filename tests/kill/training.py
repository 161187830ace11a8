"""A trainer's weights as a function of seed and step, so that every process can say what is right."""

import hashlib
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync.testing import AdamUpdates

SHAPES = {"embed": (200, 60), "layer.weight": (60, 60), "norm": (60,)}


@cache
def _updates(seed: int) -> tuple[AdamUpdates, list[dict[str, np.ndarray]]]:
    updates = AdamUpdates(SHAPES, seed=seed, scale=0.01)
    return updates, [{name: bits.copy() for name, bits in updates.state().items()}]


def state_after(seed: int, step: int) -> dict[str, Any]:
    updates, states = _updates(seed)
    while len(states) <= step:
        updates.step()
        states.append({name: bits.copy() for name, bits in updates.state().items()})
    return {name: bits.copy().view(ml_dtypes.bfloat16) for name, bits in states[step].items()}


def hash_of(state: dict[str, Any]) -> str:
    h = hashlib.sha256()
    for name in sorted(state):
        h.update(state[name].tobytes())
    return h.hexdigest()
