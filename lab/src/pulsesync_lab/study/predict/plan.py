"""What a run needs of its links: bytes per sync, seconds, utilisation, best codec, number of anchors.

    plan = make_plan(read_model("checkpoint"), Training(lr=1e-6), bandwidth=200e6, step_s=50)
    plan.options["history"].size_bytes, plan.needed_bandwidth(plan.best)

Utilisation is U = step / (step + sync), where a sync is the time of its bytes on the link and a step is everything
between two syncs. The underlying forecast is a mean: single syncs differ more, the first ones most. The errors of such
means are in `evidence`, for the kinds of runs that were measured; a plan claims nothing for other kinds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pulsesync.core.threads import default_threads
from pulsesync.core.types import DTYPES
from pulsesync.group.cost_model import ASSUMED, CostModel, EndpointTime, Method, TransferLoad
from pulsesync.group.cost_model import MethodCost as Assumed
from pulsesync_lab.study.predict import evidence, theory
from pulsesync_lab.study.predict.evidence import Evidence
from pulsesync_lab.study.predict.forecast import Forecast, ForecastSync, TrainingSettings, forecast
from pulsesync_lab.study.predict.models import ModelFacts

GOAL = 0.9  # utilisation to reach
ENOUGH = 0.98  # utilisation with full weights above which patches gain little
CODECS = ("history", "context", "gap", "plain", "full")  # the fewest bytes first
LITTLE = 0.02  # of a step: a shorter sync is fast enough, so that bytes decide
_METHODS: Mapping[Method, str] = {"coded": "history", "gap": "gap", "dense": "full"}  # what a publisher can do


@dataclass(frozen=True)
class TransferOption:
    """One method to send a version: the bytes of a sync (mean and maximum), and what follows from the mean."""

    size_bytes: int
    most_bytes: int
    seconds: float  # on the link
    utilisation: float


@dataclass(frozen=True)
class SyncPlan:
    """The result. Bytes are means over the forecast, unless they are called the most."""

    model: ModelFacts
    dtype: str
    training: TrainingSettings
    bandwidth: float  # bits a second
    step_s: float  # between two syncs
    expected: Forecast
    options: Mapping[str, TransferOption]  # by codec, and "full"
    best: str  # among `options`
    took: Mapping[str, float]  # seconds of a sync, by method, with encoding and decoding
    cores: int  # at each end, for encoding and decoding

    @property
    def full_bytes(self) -> int:
        return self.model.size * DTYPES[self.dtype].itemsize

    @property
    def unlike(self) -> tuple[str, ...]:
        """How this run differs from those on which forecasts were measured."""
        asked, found = self.training, evidence.find(self.training)
        rated = [one for one in found if one.covers_rate(asked.lr)]
        differs = {
            "assumed magnitudes": self.model.assumed,
            self.dtype: self.dtype != "BF16",
            asked.label: not found,
            f"syncs of {asked.every} steps": asked.every != 1,
            "a warm-up": asked.warm_up > 1,
            f"a learning rate of {asked.lr:g}": bool(found) and not rated,
            f"a model of {self.model.size:,} weights": bool(found)
            and not any(one.covers_size(self.model.size) for one in rated or found),
            "start weights finer than the dtype": self.dtype == "BF16" and not self.model.rounded,
        }
        return tuple(what for what, does in differs.items() if does)

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The errors of forecasts for such runs, by kind of model; empty if they were not measured."""
        found = () if self.unlike else evidence.find(self.training)
        return tuple(one for one in found if one.covers_rate(self.training.lr) and one.covers_size(self.model.size))

    @property
    def early_bytes(self) -> int:
        """The forecast of a sync of `history` over the first steps, whose error is in `evidence`."""
        return self.expected.mean(0, evidence.STEPS[1]).sizes["history"]

    @property
    def critical(self) -> tuple[float, float]:
        """Magnitudes below which a step of one learning rate changes all weights, and above which none.

        The first is 0 where there are small weights that it does not change: the smallest of FP8 under its scale.
        """
        coarsest = float(theory.unit([0], self.dtype)[0]) / 2 / min(self.model.by_scale, default=1.0)
        sure, never = theory.critical_magnitude(self.training.lr, dtype=self.dtype)
        return (sure if self.training.lr > coarsest else 0.0), never

    @property
    def enough(self) -> bool:
        """Whether the link is fast enough for full weights."""
        return self.options["full"].utilisation >= ENOUGH

    def needed_bandwidth(self, option: str, goal: float = GOAL) -> float:
        """Bits a second at which a method reaches a utilisation."""
        return 8 * self.options[option].size_bytes / (self.step_s * (1 / goal - 1))

    @property
    def anchor_syncs(self) -> int:
        """Syncs between two anchors, by the publisher's rule: when the patches since then add up to all weights."""
        return max(1, round(self.full_bytes / max(self.options["history"].size_bytes, 1)))

    @property
    def joiner_bytes(self) -> tuple[int, int]:
        """What a late worker fetches, on average and at most, without squashing: an anchor, and the patches since."""
        anchor = self.expected.plateau.sizes["dense"]
        return anchor + self.full_bytes // 2, anchor + self.full_bytes


def make_plan(
    model: ModelFacts,
    training: TrainingSettings,
    bandwidth: float,
    step_s: float,
    dtype: str = "BF16",
    *,
    cores: int | None = None,
) -> SyncPlan:
    """Plan a run.

    Args:
        model: what `read_model` found.
        training: learning rate, optimizer and so on.
        bandwidth: of the link to a worker, in bits a second.
        step_s: seconds for an optimizer step with its rollouts.
        dtype: the one that inference uses.
        cores: at each end, for encoding and decoding; if not given, those of this machine.
    """
    cores = cores or default_threads()
    expected = forecast(
        model.weights_by_class, model.tensors, training, dtype, by_scale=model.by_scale, rounded=model.rounded
    )
    full = model.size * DTYPES[dtype].itemsize
    between_s = step_s * training.every
    mean = expected.mean()
    options = {codec: _option(codec, mean, expected, full, bandwidth, between_s) for codec in CODECS}
    took = _seconds(model.size, full, mean, bandwidth, cores)
    return SyncPlan(
        model, dtype, training, bandwidth, between_s, expected, options, _choose(took, options, between_s), took, cores
    )


def _option(
    codec: str, mean: ForecastSync, expected: Forecast, full: int, bandwidth: float, between_s: float
) -> TransferOption:
    size = most = full
    if codec != "full":
        size, most = mean.sizes[codec], max(sync.sizes[codec] for sync in expected.syncs)
    seconds = 8 * size / bandwidth
    return TransferOption(size, most, seconds, between_s / (between_s + seconds))


def _seconds(size: int, full: int, mean: ForecastSync, bandwidth: float, cores: int) -> dict[str, float]:
    """How long a sync by each method takes: `costs` adds up link and work, with forecast bytes."""
    load = TransferLoad(size, full, mean.density * size)
    options = {method: _on_cores(option, cores) for method, option in ASSUMED.items()}
    for method, codec in _METHODS.items():
        if method != "dense":
            options[method] = replace(options[method], change_bytes=mean.sizes[codec] / max(load.changed, 1.0))
    costs = CostModel(options, byte_s=8 / bandwidth, link_known=True)
    return {codec: costs.seconds(method, load) for method, codec in _METHODS.items()}


def _on_cores(option: Assumed, cores: int) -> Assumed:
    """`costs.ASSUMED` was measured on two cores; work is assumed to scale with the number of cores."""

    def work(of: EndpointTime) -> EndpointTime:
        return EndpointTime(of.per_weight * 2 / cores, of.per_change * 2 / cores)

    return Assumed(work(option.source), work(option.receiver), work(option.apply), option.change_bytes)


def _choose(took: Mapping[str, float], options: Mapping[str, TransferOption], between_s: float) -> str:
    """Of the methods that are fast enough, or else within a twentieth of the fastest, the one with the fewest bytes."""
    near = [option for option, seconds in took.items() if seconds <= max(1.05 * min(took.values()), LITTLE * between_s)]
    return min(near, key=lambda option: options[option].size_bytes)
