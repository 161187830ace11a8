"""Weights on a GPU that change as in training, and the time and memory of work on it.

The weights are normally distributed, with the standard deviation of SmolLM2's. Which of them change follows the shares,
by magnitude, that changed in one step of a recorded GRPO run (0.8 % of all weights), as if enough of these steps were
taken at once to reach the given density.

Where there is no GPU, Triton's interpreter runs the same kernels on tensors in host memory, inside `as_device()`: that
shows that a benchmark runs to its end and that its results are equal, but its times mean nothing.
"""

import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from benchmarks.harness.needs import MissingError
from benchmarks.harness.timing import T, timed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from tests.backends import host_as_device  # noqa: E402 - after that

Model = dict[str, torch.Tensor]
SPREAD = 0.17  # standard deviation of the weights
FIRST_CLASS = 100  # the exponent of the first share: which part of the weights with an exponent changed in the step
SHARES = [
    1, 1, 1, 1, 1, 1, 1, 0.9968, 0.9985, 0.9935, 0.989, 0.9827, 0.9651, 0.9335, 0.8732, 0.7555, 0.4633, 0.3086, 0.1244,
    0.0156, 0.0361, 0.0001, 0, 0, 0, 0, 0, 0,
]  # fmt: skip
PIECE = 1 << 24  # weights made at a time
SAMPLED = 1 << 22  # weights from which the probabilities of changes are estimated
SMALLEST = 6e7  # weights of the smallest model that has the shapes of a real one
FAMILIES = [  # up to how many weights; width, inner width, width of keys and values, words: as models of that size have
    (0.2e9, (576, 1536, 192, 49152)),
    (0.9e9, (896, 4864, 128, 151936)),
    (2e9, (2048, 8192, 512, 128256)),
    (5e9, (3072, 8192, 1024, 128256)),
    (12e9, (3584, 18944, 512, 152064)),
    (float("inf"), (5120, 27648, 1024, 152064)),
]


# -- the device ----------------------------------------------------------------------------------------------------


def as_device() -> AbstractContextManager[None]:
    """Treat host memory as a GPU inside the block, if there is none."""
    return host_as_device(DEVICE.type == "cpu")


def name_of(device: torch.device = DEVICE) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "host memory, Triton's interpreter"


def need_gpu(weights: float) -> None:
    """Raises: MissingError, for a model that the interpreter would take hours for, without a GPU."""
    if DEVICE.type == "cpu" and weights > 1e5:
        raise MissingError("a CUDA GPU")


def wait(device: torch.device = DEVICE) -> None:
    """Wait until a GPU has finished all work that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_ms(work: Callable[[], T]) -> tuple[T, float]:
    """The result of a call, and its milliseconds to the end of all work it launched."""
    result, seconds = timed(work, wait)
    return result, 1e3 * seconds


def median_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """Median milliseconds from a call to the end of all work it launched, after one call that is not counted."""
    work()
    return statistics.median(timed_ms(work)[1] for _ in range(repeats))


def allocated() -> int:
    """Bytes of live tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def reserved() -> int:
    """Bytes that PyTorch's allocator has from the driver, in use or not; 0 without a GPU."""
    return torch.cuda.memory_reserved() if DEVICE.type == "cuda" else 0


def peak_reserved() -> int:
    """The most of these since `reset_peak`."""
    return torch.cuda.max_memory_reserved() if DEVICE.type == "cuda" else 0


def used() -> int:
    """Bytes in use on the GPU by all processes, with those of the driver and of compiled kernels; 0 without a GPU."""
    free, total = torch.cuda.mem_get_info() if DEVICE.type == "cuda" else (0, 0)
    return total - free


def reset_peak() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def empty_cache() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def peak_since(before: int) -> float:
    """The peak of the gigabytes on the GPU since `reset_peak`, less some bytes; 0 without a GPU."""
    return (torch.cuda.max_memory_allocated() - before) / 1e9 if DEVICE.type == "cuda" else 0.0


# -- the weights ---------------------------------------------------------------------------------------------------


def shapes(weights: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a model of about this size: embeddings, and layers until there are enough weights."""
    if weights < SMALLEST:
        yield from small_shapes(int(weights))
        return
    hidden, inner, kv, words = next(shape for most, shape in FAMILIES if weights <= most)
    fixed = {"embed": (words, hidden), "head": (words, hidden), "norm": (hidden,)}
    layer = {
        "q": (hidden, hidden), "q.bias": (hidden,), "k": (kv, hidden), "k.bias": (kv,), "v": (kv, hidden),
        "v.bias": (kv,), "o": (hidden, hidden), "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
        "norm1": (hidden,), "norm2": (hidden,),
    }  # fmt: skip
    yield from fixed.items()
    count = sum(int(np.prod(shape)) for shape in fixed.values())
    per_layer = sum(int(np.prod(shape)) for shape in layer.values())
    for n in range(max(1, round((weights - count) / per_layer))):
        yield from ((f"layers.{n}.{name}", shape) for name, shape in layer.items())


def small_shapes(weights: int) -> list[tuple[str, tuple[int, ...]]]:
    """Tensors for a trial, one of them of an odd size; no model has so few weights."""
    wide = weights // 8 // 64
    return [("odd", (weights - 8 * wide * 64 + 65,)), *((f"layers.{n}", (wide - (n == 0), 64)) for n in range(8))]


def make(sizes: Mapping[str, tuple[int, ...]], device: torch.device = DEVICE, spread: float = SPREAD) -> Model:
    """A model with these tensors, the same in every call."""
    torch.manual_seed(0)
    model = {name: torch.empty(shape, dtype=torch.bfloat16, device=device) for name, shape in sizes.items()}
    fill_(model, spread)
    return model


def fill_(model: Model, spread: float = SPREAD) -> None:
    """Draw all weights of a model."""
    for tensor in model.values():
        for piece in tensor.view(-1).split(PIECE):
            piece.copy_(torch.randn(piece.numel(), device=piece.device) * spread)


def chances(density: float, sample: torch.Tensor | None = None) -> torch.Tensor:
    """For each exponent, the probability that a weight changes: scaled from the recorded step to the given density.

    The density is that of `sample`, BF16 weights, on whose device the result is; the default is a sample of the weights
    that are generated here.
    """
    if sample is None:
        sample = (torch.randn(SAMPLED, device=DEVICE) * SPREAD).bfloat16()
    classes = ((sample.view(torch.int16) & 0x7FFF) >> 7).long()
    recorded = np.interp(np.arange(256) - FIRST_CLASS, np.arange(len(SHARES)), SHARES, left=1.0, right=0.0)
    stays = torch.tensor(1 - recorded, dtype=torch.float64, device=sample.device)
    low, high = 1e-3, 1e6
    for _ in range(60):
        steps = (low * high) ** 0.5
        if (1 - stays**steps)[classes].mean() < density:
            low = steps
        else:
            high = steps
    return (1 - stays**high).float()


def uniform_chances(density: float) -> torch.Tensor:
    """The same probability for every exponent."""
    return torch.full((256,), density, device=DEVICE)


def tracked_chances(density: float, tracked: float) -> tuple[torch.Tensor, float]:
    """One probability for the smallest weights, which are a given share of all, and none for others.

    Also returns the standard deviation with which these are the weights below 2^-6, a border between exponents.
    """
    chance = torch.zeros(256, device=DEVICE)
    chance[: 127 - 6] = density / tracked
    return chance, 2.0**-6 / NormalDist().inv_cdf(0.5 + tracked / 2)


def chances_of(model: Model, density: float) -> torch.Tensor:
    """The same for the weights of a model; zeros, which have no next value, never change."""
    size = sum(tensor.numel() for tensor in model.values())
    every = size // SAMPLED | 1  # odd: quantised checkpoints have blocks of 32 weights
    sample = torch.cat([tensor.view(-1)[::every] for tensor in model.values()])
    others = sample[(sample.view(torch.int16) & 0x7FFF) >= 0x80]
    out = chances(density * sample.numel() / others.numel(), others)
    out[0] = 0.0
    return out


def train_(model: Model, chance: torch.Tensor) -> int:
    """Move weights by one unit in the last place, in place, each with the probability of its exponent.

    Returns how many changed.
    """
    changed = torch.zeros((), dtype=torch.int64, device=chance.device)
    for tensor in model.values():
        for bits in tensor.view(-1).view(torch.int16).split(PIECE):
            p = chance[((bits & 0x7FFF) >> 7).long()]
            drawn = torch.rand(bits.numel(), device=bits.device)
            moves, up = drawn < p, drawn < p / 2
            changed += moves.sum()
            bits += up.to(torch.int16) * 2 - moves.to(torch.int16)
    return int(changed)


def equal(some: Model, others: Model) -> bool:
    """Whether two models have the same bits."""
    return all(torch.equal(some[name].view(torch.int16), others[name].view(torch.int16)) for name in some)


@dataclass
class Pair:
    """A state and the one after it."""

    old: Model
    new: Model

    chance: torch.Tensor  # of a weight to change between the two, by its exponent

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.old.values())

    def change(self) -> None:
        """Draw another new state, from the old one."""
        self.new = {name: tensor.clone() for name, tensor in self.old.items()}
        train_(self.new, self.chance)


def make_pair(weights: float, density: float, uniform: bool = False, tracked: float = 0.0) -> Pair:
    """A model of about this size, and the same after a change of this density.

    uniform: every weight has the same probability to change, whatever its magnitude. tracked: only the smallest weights
    change, with one probability; they are this share of all. 0: by magnitude, as in the recorded step.
    """
    torch.manual_seed(0)
    chance, spread = uniform_chances(density) if uniform else chances(density), SPREAD
    if tracked:
        chance, spread = tracked_chances(density, tracked)
    pair = Pair(make(dict(shapes(weights)), spread=spread), {}, chance)
    pair.change()
    return pair
