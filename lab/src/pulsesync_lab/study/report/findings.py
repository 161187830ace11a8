"""The results of a recording, as numbers: shares of counts, over time, by tensor, by layer, by exponent, by expert.

Tables, reports and comparisons all use these functions, so that they have the same denominators.
"""

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pulsesync.core.types import DTYPES
from pulsesync_lab.study.recording import PatchBytes, Recording, Step

_NUMBER = re.compile(r"(?:^|\.)(?P<what>\w+)\.(?P<number>\d+)(?=\.|$)")
OUTSIDE = "–"  # the layer of a tensor that is in none


@dataclass(frozen=True)
class Spread:
    """Statistics of some steps."""

    mean: float
    least: float
    most: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None for no values."""
        if not values:
            return None
        return cls(statistics.fmean(values), min(values), max(values), statistics.pstdev(values))


@dataclass(frozen=True)
class Size:
    """Mean bytes of a patch under one codec; None where it was not predicted, or not made, in all of these steps."""

    predicted: float | None
    real: float | None
    steps: int  # over which both are averaged
    comparable: bool = True  # whether these are the same steps as for the other codecs

    def smaller(self, full: int) -> float | None:
        """How many times smaller than all weights: by its real size, if that is known.

        None if the steps are not those of the other codecs: patches of some steps are much larger than of others.
        """
        if not self.comparable:
            return None
        size = self.predicted if self.real is None else self.real
        return full / size if size else None


@dataclass(frozen=True)
class ModelPart:
    """Where in a model a tensor is, by its name."""

    layer: str  # a number, or OUTSIDE
    kind: str  # what it is in its layer: its name without numbers and without `weight`
    expert: int | None = None


def place(name: str) -> ModelPart:
    """`model.layers.3.mlp.experts.7.up_proj.weight` is `mlp.experts.up_proj` of expert 7 in layer 3."""
    layer, expert, end, kind = OUTSIDE, None, 0, name
    for found in _NUMBER.finditer(name):
        if found["what"] in ("experts", "expert"):
            expert = int(found["number"])
        elif layer == OUTSIDE:
            layer, end = found["number"], found.end()
    if layer != OUTSIDE:
        kind = name[end:].lstrip(".") or name
    kind = kind.removeprefix("model.").removesuffix(".weight")
    return ModelPart(layer, re.sub(r"(experts?)\.\d+", r"\1", kind), expert)


def full_bytes(recording: Recording) -> int:
    """The size of all compared weights, in the dtype of inference, or in their stated dtypes."""
    own, stated = recording.header.dtype, recording.header.facts.get("dtypes")
    others = cast_from(recording) | (stated if isinstance(stated, dict) else {})
    dtypes = ((tensor.size, others.get(tensor.name)) for tensor in recording.header.tensors)
    return sum(size * DTYPES[dtype if dtype in DTYPES else own].itemsize for size, dtype in dtypes)


def cast_from(recording: Recording) -> dict[str, Any]:
    """The tensors that were published in another dtype than the one they were compared in, and which."""
    cast = recording.header.facts.get("cast")
    return dict(cast) if isinstance(cast, dict) else {}


def looks_apart(recording: Recording) -> int:
    """Steps between two looks, from the recording's facts; windows are counted in looks."""
    every = recording.header.facts.get("every")
    return every if isinstance(every, int) and every > 0 else 1


# Over time


def sparsity(recording: Recording) -> list[float]:
    """The share of unchanged weights, step by step."""
    return [1 - density for density in recording.density()]


def window_sparsity(recording: Recording, k: int) -> list[tuple[int, float]]:
    """(step, share of the sample that is unchanged since k looks before), for steps with that many before them."""
    return _of_sample(recording, {step.step: step.windows[k] for step in recording.steps if k in step.windows})


def dtype_sparsity(recording: Recording, dtype: str) -> list[tuple[int, float]]:
    """(step, share of the sample that did not change in another dtype)."""
    found = {step.step: step.contrast[dtype] for step in recording.steps if dtype in step.contrast}
    return _of_sample(recording, found)


def gradient_density(recording: Recording) -> list[tuple[int, float]]:
    """(step, share of the sample whose gradient was not zero)."""
    found = {step.step: step.gradients for step in recording.steps if step.gradients}
    return [(step, 1 - share) for step, share in _of_sample(recording, found)]


def moved(recording: Recording) -> dict[int, float]:
    """Updates by size, as shares of the sample in the steps that have them."""
    found = [step.moved for step in recording.steps if step.moved]
    total: Counter[int] = Counter()
    for some in found:
        total.update(some)
    return {size: count / (max(recording.header.sampled, 1) * len(found)) for size, count in sorted(total.items())}


def _of_sample(recording: Recording, counts: Mapping[int, Sequence[int]]) -> list[tuple[int, float]]:
    sampled = max(recording.header.sampled, 1)
    return [(step, 1 - sum(some) / sampled) for step, some in counts.items()]


def overlap(recording: Recording) -> list[tuple[int, float]]:
    """(step, share of its changes that fell on weights which changed in the step before as well).

    Empty if there are none at all: then it was not measured.
    """
    if not any(step.again for step in recording.steps):
        return []
    return [(step.step, step.again / step.all_changed) for step in recording.steps[1:] if step.all_changed]


def chance(recording: Recording) -> list[tuple[int, float]]:
    """The overlap by chance: the density of the step before."""
    before = zip(recording.steps[1:], recording.density(), strict=False)
    return [(step.step, density) for step, density in before if step.all_changed]


def warm_up(recording: Recording) -> int | None:
    """The first step with the highest learning rate, if it was lower before."""
    rates = [(step.step, step.lr) for step in recording.steps if step.lr is not None]
    if not rates:
        return None
    top = max(rate for _, rate in rates)
    first = next(step for step, rate in rates if rate >= top)
    return first if rates[0][1] < top else None


def plateau(recording: Recording) -> float | None:
    """Mean sparsity of the second half, of ten steps or more."""
    values = sparsity(recording)
    return statistics.fmean(values[len(values) // 2 :]) if len(values) >= 10 else None


# All steps together


def shares(counts: Iterable[Mapping[int, int]]) -> dict[int, float]:
    """Counts added up, as shares of them all."""
    total: Counter[int] = Counter()
    for some in counts:
        total.update(some)
    whole = sum(total.values())
    return {key: count / whole for key, count in sorted(total.items())} if whole else {}


def share(steps: Iterable[Step], part: str, whole: str) -> float | None:
    """One count of each step over another, summed over all steps; None for zero by zero."""
    steps = list(steps)
    total = sum(getattr(step, whole) for step in steps)
    return sum(getattr(step, part) for step in steps) / total if total else None


def sizes(recording: Recording) -> dict[str, Size]:
    """Mean bytes of a patch by codec, over the same steps for all; codecs in the order of their size.

    The steps are those in which patches of the most used codec were made, or all if none were made; minus those without
    a size of some other codec. A codec without a size in these steps has the mean of its own steps.
    """
    sizes = [step.sizes for step in recording.steps if step.sizes]
    codecs = sorted({codec for some in sizes for codec in some})
    if not codecs:
        return {}
    made = {codec: [some for some in sizes if codec in some and some[codec].real is not None] for codec in codecs}
    among = made[max(codecs, key=lambda codec: len(made[codec]))] or sizes
    common = [codec for codec in codecs if any(codec in some for some in among)]
    same = [some for some in among if all(codec in some for codec in common)]
    found = {codec: _mean_size([some[codec] for some in same], comparable=True) for codec in common if same}
    for codec in codecs:
        if codec not in found:
            found[codec] = _mean_size([some[codec] for some in sizes if codec in some], comparable=False)
    return dict(sorted(found.items(), key=lambda item: -(item[1].predicted or item[1].real or 0)))


def prediction_error(recording: Recording, codec: str) -> float | None:
    """The sum of predicted bytes over the sum of real ones, minus one, where both exist."""
    both = [size for step in recording.steps if (size := step.sizes.get(codec)) and size.real and size.predicted]
    return sum(s.predicted or 0 for s in both) / sum(s.real or 0 for s in both) - 1 if both else None


def _mean_size(sizes: Sequence[PatchBytes], comparable: bool) -> Size:
    predicted, real = _mean([size.predicted for size in sizes]), _mean([size.real for size in sizes])
    return Size(predicted, real, len(sizes), comparable)


def _mean(values: Sequence[int | None]) -> float | None:
    """None, unless all are known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


# By tensor, layer and expert


def by_tensor(recording: Recording) -> list[tuple[str, int, float]]:
    """(name, weights, mean density) of each tensor that has weights, the most changed first."""
    steps = max(len(recording.steps), 1)
    total = [sum(counts) for counts in zip(*(step.changed for step in recording.steps), strict=True)]
    rows = [
        (tensor.name, tensor.size, changed / tensor.size / steps)
        for tensor, changed in zip(recording.header.tensors, total, strict=False)
        if tensor.size
    ]
    return sorted(rows, key=lambda row: -row[2])


def by_layer(recording: Recording) -> dict[str, list[float]]:
    """Density step by step of each layer, in their order; tensors outside of layers have their own rows."""
    groups: dict[str, list[int]] = {}
    for number, tensor in enumerate(recording.header.tensors):
        where = place(tensor.name)
        groups.setdefault(where.kind if where.layer == OUTSIDE else where.layer, []).append(number)
    order = sorted(groups, key=lambda name: (name.isdigit(), int(name) if name.isdigit() else 0, name))
    return {name: _densities(recording, groups[name]) for name in order if _weights(recording, groups[name])}


def by_kind(recording: Recording) -> dict[tuple[str, str], float]:
    """Mean density by (kind, layer), of tensors that are in layers."""
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, tensor in enumerate(recording.header.tensors):
        where = place(tensor.name)
        if where.layer != OUTSIDE:
            groups[where.kind, where.layer].append(number)
    return {
        key: statistics.fmean(_densities(recording, group))
        for key, group in groups.items()
        if _weights(recording, group) and recording.steps
    }


def by_expert(recording: Recording) -> dict[tuple[str, int], list[float]]:
    """Density step by step of each expert of a mixture, by (layer, expert)."""
    groups: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for number, tensor in enumerate(recording.header.tensors):
        where = place(tensor.name)
        if where.expert is not None:
            groups[where.layer, where.expert].append(number)
    return {key: _densities(recording, group) for key, group in sorted(groups.items(), key=_expert_order)}


def _expert_order(item: tuple[tuple[str, int], list[int]]) -> tuple[int, int]:
    (layer, expert), _ = item
    return int(layer) if layer.isdigit() else -1, expert


def _weights(recording: Recording, group: Sequence[int]) -> int:
    return sum(recording.header.tensors[n].size for n in group)


def _densities(recording: Recording, group: Sequence[int]) -> list[float]:
    weights = max(_weights(recording, group), 1)
    return [sum(step.changed[n] for n in group) / weights for step in recording.steps]
