"""The processes of a simulated run, and their weights. What they do is in `trainers` and `workers`."""

import random
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.publish.pending import PublishReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.host import HostBackend
from pulsesync.state.views import view_bits
from pulsesync.state.weights import WeightState
from pulsesync.testing.updates import random_bits
from tests.publishers import Publisher
from tests.simulator.executors import QueuedExecutor
from tests.simulator.line import StoreLink
from tests.simulator.teams import Sharding, SimulatedPublisher

Arrays = dict[str, np.ndarray[Any, Any]]
Content = dict[str, bytes]  # of every tensor, by canonical name


@dataclass
class TensorSet:
    """Which tensors the run has."""

    arrays: dict[str, tuple[Any, tuple[int, ...]]]  # dtype and shape
    alias: str | None  # a second name of the first tensor
    layout: Layout  # uncut

    @classmethod
    def draw(cls, rng: random.Random) -> "TensorSet":
        dtypes = [ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float32, np.uint8]
        sizes = [(rng.randint(4, 20), rng.randint(4, 40)) for _ in range(rng.randint(1, 3))]
        names = ["embed", "layers.0.weight", "layers.1.weight"]
        arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
            name: (rng.choice(dtypes), shape) for name, shape in zip(names, sizes, strict=False)
        }
        arrays["norm"] = rng.choice(dtypes), (rng.choice([1, 7, 64, 300]),)
        alias = rng.choice([None, "lm_head"])
        plain = {name: np.zeros(shape, dtype) for name, (dtype, shape) in arrays.items()}
        layout = layouts.make(view.spec for view in view_bits(plain)[0].values())
        return cls(arrays, alias, layout)

    def new(self, content: Content | None = None, alias: str = "shared") -> Arrays:
        """Tensors with a content, or zeros; the alias "shared" with its tensor, a "copy" of it, or "absent"."""
        out = {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.arrays.items()}
        self.fill(out, content or {})
        if self.alias and alias != "absent":
            out[self.alias] = out["embed"] if alias == "shared" else out["embed"].copy()
        return out

    def arbitrary(self, rng: np.random.Generator) -> Arrays:
        """Tensors with arbitrary bits."""
        arrays = self.new()
        for name in self.arrays:
            flat = bits(arrays[name])
            flat[...] = random_bits(rng, flat.dtype.type, flat.shape)
        return arrays

    def fill(self, arrays: Arrays, content: Content) -> None:
        for name, data in content.items():
            bits(arrays[name])[...] = np.frombuffer(data, bits(arrays[name]).dtype)

    def content(self, arrays: Arrays) -> Content:
        return {name: arrays[name].tobytes() for name in self.arrays}

    def digest(self, content: Content, layout: Layout) -> str:
        """The digest of weights in a layout: bundles count, cuts do not."""
        return WeightState.attach(HostBackend, self.new(content, "absent"), layout).digest


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array's own memory as flat unsigned integers."""
    return array.reshape(-1).view(f"u{array.itemsize}")


@dataclass(eq=False)
class SimulatedProcess:
    """A process that uses the store."""

    name: str
    line: StoreLink

    @property
    def lines(self) -> list[StoreLink]:
        return [self.line]

    def kill(self) -> None:
        for line in self.lines:
            line.dead = True


@dataclass(eq=False)
class SimulatedTrainer(SimulatedProcess):
    """Weights that change, and the publisher that publishes them, if it is alive."""

    weights: Arrays
    spool: Path
    options: dict[str, Any]
    executor: QueuedExecutor = field(default_factory=QueuedExecutor)
    publisher: Publisher | SimulatedPublisher | None = None
    step: int = 0
    saved: list[tuple[int, Content]] = field(default_factory=list)  # the trainer's own checkpoints
    futures: list[tuple["Future[PublishReport]", int]] = field(default_factory=list)
    version: int = -1  # last reported by the publisher
    sharding: Sharding | None = None  # if the trainer is a team: its first rank has `line`, the others these
    other_lines: list[StoreLink] = field(default_factory=list)

    @property
    def lines(self) -> list[StoreLink]:
        return [self.line, *self.other_lines]

    @property
    def waiting(self) -> int:
        """The number of pending background tasks."""
        return self.publisher.waiting if isinstance(self.publisher, SimulatedPublisher) else self.executor.waiting


@dataclass(eq=False)
class SimulatedWorker(SimulatedProcess):
    """Weights that follow a run, and their subscriber, if it is alive."""

    weights: Arrays
    last: Content  # the weights when they were last checked
    cache: Path | None
    follow: str | None = None  # the pointer
    subscriber: Subscriber | None = None
    saved: tuple[int, bytes, Content] | None = None  # version, history and weights, saved for a restart
    damaged: bool = False
