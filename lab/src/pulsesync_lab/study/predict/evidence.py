"""How far forecasts were off on real runs to which no constant was fitted, by optimizer and by kind of model.

Every figure is the forecast over the measurement, minus one, of a mean over all steps of a run; the lowest and the
highest of the runs are kept. The runs, one by one, are in benchmarks/results/plan_heldout_2026-11-16.md, and
`python -m benchmarks plan --heldout FILE` fails where this table does not follow from them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pulsesync_lab.study.predict import theory
from pulsesync_lab.study.predict.forecast import Optimizer, TrainingSettings

Kind = Literal["trained", "random"]  # what the run begins with: a trained model, or one fresh from initialisation
Range = tuple[float, float]

STEPS: tuple[int, int] = (20, 40)  # over which they were measured, from the first on
FEWEST_MODELS = 3  # fewer support no claim about other models


@dataclass(frozen=True)
class Evidence:
    """The lowest and the highest error over some runs."""

    kind: Kind
    runs: int
    models: int
    rates: Range  # the lowest and the highest learning rate
    sizes: tuple[int, int]  # weights of the smallest and of the largest model
    bytes_off: Range  # of `history`
    density_off: Range

    def covers_rate(self, lr: float) -> bool:
        return self.rates[0] <= lr <= self.rates[1]

    def covers_size(self, weights: int) -> bool:
        return self.sizes[0] <= weights <= self.sizes[1]


MEASURED: Mapping[tuple[Optimizer, theory.Betas, bool], tuple[Evidence, ...]] = {
    ("lion", (0.9, 0.99), True): (
        Evidence("trained", 4, 4, (3e-06, 3e-06), (186_944, 1_236_000), (-0.16, 0.06), (0.05, 0.16)),
        Evidence("random", 3, 3, (3e-06, 3e-06), (254_592, 391_008), (0.01, 0.05), (-0.03, 0.0)),
    ),
    ("adamw", (0.9, 0.999), True): (
        Evidence("trained", 15, 6, (1e-06, 1e-05), (186_944, 134_515_008), (-0.12, 0.46), (-0.06, 0.88)),
        Evidence("random", 14, 6, (1e-06, 1e-05), (254_592, 4_240_896), (-0.19, 0.1), (-0.33, 0.35)),
    ),
    ("adamw", (0.9, 0.999), False): (
        Evidence("trained", 3, 3, (3e-06, 3e-06), (186_944, 319_968), (0.04, 0.4), (0.41, 0.65)),
        Evidence("random", 3, 3, (3e-06, 3e-06), (254_592, 391_008), (0.03, 0.1), (-0.12, -0.08)),
    ),
    ("adamw", (0.9, 0.95), True): (
        Evidence("trained", 3, 3, (3e-06, 3e-06), (186_944, 319_968), (0.18, 0.25), (0.6, 0.71)),
        Evidence("random", 3, 3, (3e-06, 3e-06), (254_592, 391_008), (-0.03, 0.0), (-0.12, -0.08)),
    ),
}


def find(training: TrainingSettings) -> tuple[Evidence, ...]:
    """What was measured with this optimizer, these betas and masters (or none), at any rate, on enough models."""
    found = MEASURED.get((training.optimizer, training.betas, training.masters), ())
    return tuple(one for one in found if one.models >= FEWEST_MODELS)
