"""Actors for the tests of Ray, and their weights.

Not in the test module: every actor is a process that imports the module of its class, and this one does without pytest.
"""

import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync.core.types import Bits
from pulsesync.integrations.ray import Link, RayStore
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slice
from pulsesync.testing import mutate, random_bits

SHAPES: dict[str, tuple[type[np.uint16] | type[np.uint32], tuple[int, ...]]] = {
    "up": (np.uint16, (64, 48)),
    "down": (np.uint32, (40, 24)),
    "norm": (np.uint16, (50,)),
}
DTYPES: dict[Any, Any] = {np.uint16: ml_dtypes.bfloat16, np.uint32: np.float32}
GRID = {"up": (4, 1), "down": (1, 4)}
Slices = dict[str, Slice | None]  # of the tensors that a process does not have in full; None: it has none of it
HALVES: Slices = {"up": Slice(rows=(0, 32)), "down": Slice(columns=(0, 12))}  # as rank 0 of 2 trainers has them
QUARTERS: Slices = {"up": Slice(rows=(16, 32)), "down": Slice(columns=(18, 24))}
ACROSS: Slices = {"up": Slice(columns=(5, 40)), "down": Slice(rows=(3, 30)), "norm": None}  # on no border of any tile


def state_at(step: int, seed: int = 0) -> dict[str, Any]:
    """Weights of every kind after this many steps: NaNs with payloads, both zeros."""
    rng = np.random.default_rng(seed)
    bits: dict[str, Bits] = {name: random_bits(rng, dtype, shape) for name, (dtype, shape) in SHAPES.items()}
    for _ in range(step):
        bits = {name: mutate(rng, one, 0.03) for name, one in bits.items()}
    return {name: one.view(DTYPES[SHAPES[name][0]]) for name, one in bits.items()}


def cut(state: Mapping[str, Any], slices: Mapping[str, Slice | None]) -> dict[str, Any]:
    """The part of a state that a process with these slices has."""
    out = {}
    for name, array in state.items():
        held = slices.get(name, Slice())
        if held is not None:
            rows, columns = (slice(*span) if span else slice(None) for span in (held.rows, held.columns))
            out[name] = np.ascontiguousarray(array[rows, columns] if array.ndim > 1 else array[rows])
    return out


def shards_at(step: int, rank: int, size: int) -> dict[str, Any]:
    """A trainer's part: of `up` its rows, of `down` its columns, of `norm` all."""
    state = state_at(step)
    if size == 1:
        return state
    rows, columns = (64 // size * rank, 64 // size * (rank + 1)), (24 // size * rank, 24 // size * (rank + 1))
    return {
        "up": Placed(np.ascontiguousarray(state["up"][slice(*rows)]), (64, 48), rows=rows),
        "down": Placed(np.ascontiguousarray(state["down"][:, slice(*columns)]), (40, 24), columns=columns),
        "norm": state["norm"],
    }


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


class WriterActor:
    def put(self, store: RayStore, key: str, size: int) -> None:
        store.put(key, b"7" * size)


class TrainerActor:
    def __init__(self, link: Link, rank: int, size: int, options: dict[str, Any]) -> None:
        self.rank, self.size = rank, size
        self.pub = link.publisher(rank, size, **options)

    def publish(self, step: int) -> int | None:
        return self.pub.publish(shards_at(step, self.rank, self.size), step=step).version

    def process(self) -> int:
        return os.getpid()


class RolloutActor:
    def __init__(self, link: Link, slices: Slices) -> None:
        self.sub = link.subscriber(slices=slices)
        self.weights = cut({name: np.zeros_like(array) for name, array in state_at(0).items()}, slices)

    def sync(self) -> tuple[int, dict[str, Any], tuple[str, ...]]:
        report = self.sub.sync(self.weights, wait_s=30)
        return report.version, {name: array.view(np.uint8) for name, array in self.weights.items()}, report.path

    def process(self) -> int:
        return os.getpid()
