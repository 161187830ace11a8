"""A forecast of what a run will send: a simulation of some thousand weights of every class.

    found = forecast(weights_by_class, tensors=272, training=Training(lr=3e-6))
    found.plateau.density, found.highest.sizes["history"]

A run begins at values of the dtype, in the middle between the borders of rounding. While gradients keep their sign, all
weights of a class reach a border at about the same step, the class above it twice as late: hence the peaks of the first
steps. The gradient is assumed to be:

    g(t) = mean x exp(-path / FADE) + NOISE x normal,    path = sum of learning rates so far

where the mean is a product of three normal numbers and Adam's epsilon is EPSILON. The product and NOISE are those of
`testing.AdamUpdates`, fitted to 15 recorded steps (SmolLM2-135M, GRPO, 3e-6), as was EPSILON here. FADE was fitted to
33 steps at 1e-5 on the same model: as a policy learns, its gradients lose their common direction. An earlier version
measured the path in root mean squares of the weights, which one model could not contradict. Models with smaller weights
do: their gradients keep their direction just as long. `evidence` has how far forecasts were off on runs to which
nothing was fitted to.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import DTYPES
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync_lab.study.measure.buffers import LARGEST
from pulsesync_lab.study.predict import sizes, theory
from pulsesync_lab.study.recording import WINDOWS, Counts

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
ByScale = Mapping[float, Counts]  # weights by what their tensor is multiplied with before the cast, and by class

NOISE = 0.2
EPSILON = 0.03
FADE = 1e-4
PATHS = 2048  # weights of each class
STEPS = 128
MOST_STEPS = 4096  # two syncs of half as many: some seconds
ROWS = 24  # classes that the coder distinguishes


Optimizer = Literal["adamw", "lion"]  # those whose moves are determined by the learning rate and the gradients' signs


@dataclass(frozen=True)
class TrainingSettings:
    """How weights are trained, and how often they are sent."""

    lr: float
    betas: theory.Betas = theory.ADAM
    warm_up: int = 0  # steps in which the learning rate increases to lr, linearly
    masters: bool = True  # in FP32; without, weights are rounded at every step
    every: int = 1  # steps in a sync
    optimizer: Optimizer = "adamw"

    @property
    def label(self) -> str:
        """The optimizer, its betas, and whether it keeps masters, as text."""
        (first, second), masters = self.betas, "FP32 masters" if self.masters else "no masters"
        return f"{self.optimizer} with betas of {first:g} and {second:g} and {masters}"

    def rate(self, step: int) -> float:
        return self.lr * min(1.0, (step + 1) / max(self.warm_up, 1))


@dataclass(frozen=True)
class ForecastSync:
    """The forecast of one sync."""

    density: float
    sizes: dict[str, int]  # bytes by codec


@dataclass(frozen=True)
class Forecast:
    """The syncs of a run's beginning, in order, and what changes over windows of k steps at the end of them."""

    syncs: tuple[ForecastSync, ...]
    windows: dict[int, float] = field(default_factory=dict)

    @property
    def first(self) -> ForecastSync:
        return self.syncs[0]

    @property
    def highest(self) -> ForecastSync:
        return max(self.syncs, key=lambda sync: sync.density)

    @property
    def plateau(self) -> ForecastSync:
        """The mean of the last half."""
        return self.mean(len(self.syncs) // 2)

    def mean(self, begin: int = 0, end: int | None = None) -> ForecastSync:
        """The mean over some of the syncs."""
        some = self.syncs[begin:end]
        codecs = {codec: round(sum(sync.sizes[codec] for sync in some) / len(some)) for codec in some[0].sizes}
        return ForecastSync(sum(sync.density for sync in some) / len(some), codecs)


def forecast(
    weights_by_class: Counts,
    tensors: int,
    training: TrainingSettings,
    dtype: str = "BF16",
    *,
    by_scale: ByScale | None = None,
    rounded: bool = True,
    steps: int | None = None,
) -> Forecast:
    """Predict what a run sends. Always the same for the same arguments; takes under a second, except for long syncs.

    Args:
        weights_by_class: how many weights of the model have which exponent bits, in that dtype.
        tensors: how many it has.
        training: learning rate and so on.
        dtype: the one that inference uses.
        by_scale: the same weights by the scale of their tensor, for FP8; scales are assumed not to change in the run.
        rounded: whether masters begin at values of the dtype, as from a checkpoint in it, and not between them.
        steps: optimizer steps to look ahead; if not given 128, or 32 syncs up to 512, and two syncs at least.

    Raises:
        ValueError: the steps are fewer than those of one sync, or too many.
    """
    steps = steps or max(STEPS, min(EPOCH_PATCHES * training.every, 4 * STEPS), 2 * training.every)
    if not training.every <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be from {training.every} (one sync) to {MOST_STEPS}; got {steps}")
    groups = by_scale or {1.0: weights_by_class}
    moves = simulate_moves(training, steps)
    sample = _Sample(groups, moves, training.masters, dtype, rounded or not training.masters)
    watcher = _Watcher(sample, tensors, dtype)
    syncs = []
    kept: dict[int, NDArray[Any]] = {}
    for step in range(steps):
        kept |= {k: sample.bits for k in WINDOWS if step == steps - k}
        sample.move(moves[step] * sample.scales)
        if (step + 1) % training.every == 0:
            syncs.append(watcher.look())
    windows = {k: watcher.share(sample.bits != before) for k, before in sorted(kept.items())}
    return Forecast(tuple(syncs), windows)


def simulate_moves(training: TrainingSettings, steps: int) -> Floats:  # (steps, PATHS)
    """What the optimizer adds to weights, step by step, for gradients as in the module's docstring."""
    words = np.random.Generator(np.random.PCG64(0))
    mean = words.standard_normal((3, PATHS)).prod(axis=0)
    moved = _LionMoves(training.betas) if training.optimizer == "lion" else _AdamMoves(training.betas)
    moves = np.empty((steps, PATHS), np.float32)
    path = 0.0
    for step in range(steps):
        gradient = mean * np.exp(-path / FADE) + NOISE * words.standard_normal(PATHS)
        moves[step] = -training.rate(step) * moved.by(gradient, step)
        path += training.rate(step)
    return moves


class _AdamMoves:
    def __init__(self, betas: theory.Betas) -> None:
        self.betas = betas
        self.first, self.second = np.zeros(PATHS), np.zeros(PATHS)

    def by(self, gradient: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """How far weights move against the gradient, in learning rates."""
        keep1, keep2 = self.betas
        self.first = keep1 * self.first + (1 - keep1) * gradient
        self.second = keep2 * self.second + (1 - keep2) * gradient**2
        size = np.sqrt(self.second / (1 - keep2 ** (step + 1))) + EPSILON
        return np.asarray(self.first / (1 - keep1 ** (step + 1)) / size, np.float64)


class _LionMoves:
    """Every weight moves by exactly one learning rate, whatever the gradients; these decide only the direction."""

    def __init__(self, betas: theory.Betas) -> None:
        self.betas = betas
        self.average = np.zeros(PATHS)

    def by(self, gradient: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """How far weights move against the gradient, in learning rates."""
        keep1, keep2 = self.betas
        direction = np.sign(keep1 * self.average + (1 - keep1) * gradient)
        self.average = keep2 * self.average + (1 - keep2) * gradient
        return np.asarray(direction, np.float64)


def _columns(groups: ByScale) -> tuple[Ints, NDArray[np.float64], Ints]:
    """Class, scale and number of the weights that have both, the least class first."""
    rows = sorted((c, scale, count) for scale, counts in groups.items() for c, count in counts.items() if count)
    classes, scales, counts = zip(*rows, strict=True) if rows else ((), (), ())
    return np.array(classes, np.int64), np.array(scales, np.float64), np.array(counts, np.int64)


class _Sample:
    """Weights of every class and scale that moves can reach, scaled, and the bits they are published as."""

    def __init__(self, groups: ByScale, moves: Floats, masters: bool, dtype: str, rounded: bool) -> None:
        self.kind, self.type, self.masters = DTYPES[dtype], theory.numpy_dtype(dtype), masters
        self.limit = np.float32(LARGEST.get(dtype, np.inf))
        furthest = float(np.abs(np.cumsum(moves, axis=0)).max())
        populated, scales, counts = _columns(groups)
        units = theory.unit(populated, dtype)
        reached = (units / 4 <= furthest * scales) | (not rounded)  # below a power of two the border is this near
        self.classes, self.scales = populated[reached], scales[reached][:, None].astype(np.float32)
        self.still = Counter[int]()
        for c, count in zip(populated[~reached].tolist(), counts[~reached].tolist(), strict=True):
            self.still[c] += count
        self.each = counts[reached] / PATHS  # weights that one path stands for
        self.bits = self._start()
        self.values = self.bits.view(self.type).astype(np.float32)
        if not rounded:
            anywhere = np.random.Generator(np.random.PCG64(2)).random(self.bits.shape) - 0.5
            self.move((anywhere * units[reached][:, None]).astype(np.float32))

    def _start(self) -> NDArray[Any]:
        """Every mantissa equally often, both signs, in random order; no NaN."""
        words = np.random.Generator(np.random.PCG64(1))
        shift = self.kind.exponent_shift or 0
        mantissas = words.permutation((np.arange(PATHS) << shift) // PATHS)
        sign = words.integers(0, 2, PATHS) << (8 * self.kind.itemsize - 1)
        largest = int(np.array([self.limit]).astype(self.type).view(self.kind.bits)[0])
        return np.asarray(np.minimum((self.classes[:, None] << shift) | mantissas, largest) | sign, self.kind.bits)

    def move(self, by: Floats) -> None:
        self.values = self.values + by
        rounded = np.clip(self.values, -self.limit, self.limit).astype(self.type)
        self.bits = rounded.view(self.kind.bits)
        if not self.masters:
            self.values = rounded.astype(np.float32)


class _Watcher:
    """Compares a sample with its state at the last sync, and computes the size of a patch between them."""

    def __init__(self, sample: _Sample, tensors: int, dtype: str) -> None:
        self.sample, self.tensors, self.dtype = sample, tensors, dtype
        self.before = sample.bits
        self.each = np.broadcast_to(sample.each[:, None], sample.bits.shape)
        self.size = round(float(self.each.sum())) + sum(sample.still.values())
        self.seen = 0  # syncs
        self.last = np.zeros(sample.bits.shape, np.int64)  # the patch of this epoch that last changed it
        self.went_up = np.zeros(sample.bits.shape, bool)
        self.changed = np.zeros(sample.bits.shape, bool)  # by the last patch

    def share(self, changed: NDArray[np.bool_]) -> float:
        return float(self.each[changed].sum()) / max(self.size, 1)

    def look(self) -> ForecastSync:
        shift = self.sample.kind.exponent_shift or 0
        if self.seen % EPOCH_PATCHES == 0:
            self.last[:] = 0
        distance = self._ordered(self.sample.bits) - self._ordered(self.before)
        changed, up = distance != 0, distance > 0
        again = changed & self.changed
        classes = (self.before & ((1 << (8 * self.sample.kind.itemsize - 1)) - 1)).astype(np.int64) >> shift
        counts = self._counts(distance, classes)
        found = sizes.predict_sizes(
            self.size,
            self.tensors,
            self.dtype,
            **counts,
            up=self._count(up),
            again=self._count(again),
            same_way=self._count(again & (up == self.went_up)),
        )
        if changed.any():
            found |= self._coded(distance, classes, counts)
        self.last = np.where(changed, self.seen % EPOCH_PATCHES + 1, self.last)
        self.went_up = np.where(changed, up, self.went_up)
        self.changed, self.before, self.seen = changed, self.sample.bits, self.seen + 1
        return ForecastSync(self.share(changed), found)

    def _ordered(self, bits: NDArray[Any]) -> Ints:
        """Bits as integers in the order of the values."""
        sign = 1 << (8 * self.sample.kind.itemsize - 1)
        wide = bits.astype(np.int64)
        return np.where(wide >= sign, sign - wide, wide)

    def _count(self, which: NDArray[np.bool_]) -> int:
        return round(float(self.each[which].sum()))

    def _counts(self, distance: Ints, classes: Ints) -> dict[str, Counts]:
        changed = distance != 0
        far = np.abs(distance[changed])
        power = np.frexp(far.astype(np.float64))[1].astype(np.int64) - 1
        binned = _by(np.where(far <= 16, far, 16 + power), self.each[changed])
        weights = Counter(_by(classes, self.each))
        weights.update(self.sample.still)
        return {
            "by_class": _by(classes[changed], self.each[changed]),
            "weights_by_class": weights,
            "units": {key if key <= 16 else 1 << key - 16: count for key, count in binned.items()},
        }

    def _coded(self, distance: Ints, classes: Ints, counts: dict[str, Counts]) -> dict[str, int]:
        """Bytes of `context` and `history`, from what their coders' tables would contain."""
        size = sizes.symbol_of(np.abs(distance))
        plain = np.where(distance == 0, 0, 2 * size - (distance > 0))
        turned = np.where(distance == 0, 0, 2 * size - ((distance > 0) ^ (self.went_up & (self.last > 0))))
        rows = np.clip(classes - (int(self.sample.classes[-1]) - ROWS + 1), 0, ROWS - 1)
        tiles = min(self.tensors, sum(counts["by_class"].values()))
        raw = sizes.extra_bits(counts["units"]) / 8
        context = self._table_bytes(rows, plain, tiles)
        history = self._table_bytes(rows * (EPOCH_PATCHES + 1) + self.last, turned, tiles)
        return {"context": round(context + raw), "history": round(history + raw)}

    def _table_bytes(self, contexts: Ints, symbols: Ints, tiles: int) -> float:
        """The bytes for these decisions. A sample's entropy is too low by half a nat for each free entry of a table."""
        width = int(symbols.max()) + 1
        cells = (contexts * width + symbols).ravel()
        count = (int(contexts.max()) + 1) * width
        joint = np.bincount(cells, self.each.ravel(), count).reshape(-1, width).astype(np.float64)
        drawn = np.bincount(cells, minlength=count).reshape(-1, width)
        free = np.maximum((drawn > 0).sum(axis=1) - 1, 0)
        missing = free * joint.sum(axis=1) / np.maximum(drawn.sum(axis=1), 1) / (2 * np.log(2))
        return sizes.of_contexts(joint, self.size, tiles) + float(missing.sum()) / 8


def _by(keys: Ints, weights: NDArray[np.float64]) -> Counts:
    """Sums of weights by key."""
    totals = np.bincount(keys.ravel(), weights.ravel())
    return {int(key): round(float(totals[key])) for key in np.flatnonzero(totals)}
