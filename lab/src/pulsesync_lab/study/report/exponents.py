"""The probability that a weight changes, by its magnitude: recorded, and by theory."""

import statistics
from collections import Counter
from dataclasses import dataclass

from pulsesync_lab.study.predict import theory
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report.findings import looks_apart

FLOATS = ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F32")


@dataclass(frozen=True)
class Band:
    """Weights with the same exponent bits, over all steps."""

    number: int  # those bits
    magnitude: float  # of its smallest weight; the largest is nearly twice as much
    weights: int
    changed: int
    noise: float | None = None  # share of them that a step should change, if gradients are noise around zero
    steady: float | None = None  # the same, if gradients keep their sign

    @property
    def density(self) -> float:
        """The share that changed in a step."""
        return self.changed / self.weights if self.weights else 0.0


def magnitude(dtype: str, number: int) -> float:
    """The smallest weight with these exponent bits; for the lowest, where they begin to be subnormal."""
    return 2.0 ** (max(number, 1) - theory.exponent_bias(dtype))


def learning_rate(recording: Recording, lr: float | None = None) -> float | None:
    """The given learning rate, or the mean of the recorded ones, or the one among the facts."""
    rates = [step.lr for step in recording.steps if step.lr is not None]
    known = recording.header.facts.get("lr")
    return lr or (statistics.fmean(rates) if rates else known if isinstance(known, int | float) else None)


def by_exponent(recording: Recording, lr: float | None = None) -> list[Band]:
    """The classes of a recording, small weights first. lr: if the recording does not have it."""
    dtype = recording.header.dtype
    weights: Counter[int] = Counter()
    changed: Counter[int] = Counter()
    for step in recording.steps:
        weights.update(step.weights_by_class)
        changed.update(step.by_class)
    if dtype not in FLOATS:
        return []
    classes = sorted({*weights, *changed})
    noise, steady = (_expected(recording, classes, learning_rate(recording, lr), std) for std in (None, 1.0))
    return [
        Band(number, magnitude(dtype, number), weights[number], changed[number], noise.get(number), steady.get(number))
        for number in classes
    ]


def betas(recording: Recording) -> tuple[float, float] | None:
    """Adam's betas, if the recording has them."""
    values = recording.header.facts.get("betas")
    if not isinstance(values, list | tuple) or len(values) != 2 or not all(isinstance(b, int | float) for b in values):
        return None
    first, second = map(float, values)
    return (first, second) if 0 <= first < 1 and 0 < second < 1 else None


def is_adam(recording: Recording) -> bool:
    """Whether the theory applies to this run: one step of Adam between looks, as far as the recording shows."""
    optimizer = recording.header.facts.get("optimizer")
    return (optimizer is None or str(optimizer).startswith("Adam")) and looks_apart(recording) == 1


def masters(recording: Recording) -> bool:
    """Whether the optimizer keeps the weights in FP32: yes, unless the recording states otherwise."""
    return recording.header.facts.get("masters") in (None, True, "F32")


def _expected(recording: Recording, classes: list[int], lr: float | None, std: float | None) -> dict[int, float]:
    if lr is None or not classes or not is_adam(recording):
        return {}
    dtype, kept = recording.header.dtype, masters(recording)
    shares = theory.expected_density(classes, lr, dtype, masters=kept, betas=betas(recording) or theory.ADAM, std=std)
    return dict(zip(classes, map(float, shares), strict=True))
