"""A trainer's weights as a function of the step alone, so that every process can say what is right.

A step also names its training: steps 0 to 9,999 are those of training 0, steps 10,000 to 19,999 those of training 1,
and so on. Weights of a run that replaced another one can therefore never be taken for those of the first.
"""

import hashlib
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync.testing import AdamUpdates

SHAPES = {"embed": (200, 60), "layer.weight": (60, 60), "norm": (60,)}
STEPS = 10_000  # of one training


@cache
def _updates(training: int) -> tuple[AdamUpdates, list[dict[str, np.ndarray]]]:
    updates = AdamUpdates(SHAPES, seed=training, scale=0.01)
    return updates, [{name: bits.copy() for name, bits in updates.state().items()}]


def state_after(step: int) -> dict[str, Any]:
    training, step = divmod(step, STEPS)
    updates, states = _updates(training)
    while len(states) <= step:
        updates.step()
        states.append({name: bits.copy() for name, bits in updates.state().items()})
    return {name: bits.copy().view(ml_dtypes.bfloat16) for name, bits in states[step].items()}


def hash_of(state: dict[str, Any]) -> str:
    h = hashlib.sha256()
    for name in sorted(state):
        h.update(state[name].tobytes())
    return h.hexdigest()


@cache
def right_hash(step: int) -> str:
    """The hash of the weights that a trainer has after a step."""
    return hash_of(state_after(step))
