"""From the results of the meters to a step of a recording."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pulsesync.format.tables import choose_cuts
from pulsesync.kernels.spec import SAMPLE_SCALE
from pulsesync_lab.study.measure.counting import RATIOS, UNITS, Numbers
from pulsesync_lab.study.measure.meter import MeterReading
from pulsesync_lab.study.predict.sizes import predict_sizes
from pulsesync_lab.study.recording import Counts, PatchBytes, Step


def make_step(
    sights: Sequence[MeterReading],
    number: int,
    dtype: str,
    real: Mapping[str, int],
    *,
    lr: float | None,
    facts: Mapping[str, Any],
) -> Step:
    """Join the results of all devices; sizes are those of a patch of the compared weights."""
    tallies = [sight.tally for sight in sights]
    leaving, weights = _total(t.leaving for t in tallies), _total(s.weights for s in sights)
    step = Step(
        number,
        _joined([t.changed for t in tallies]),
        sum(t.again for t in tallies),
        sum(t.same_way for t in tallies),
        sum(t.up for t in tallies),
        _counts(_total(t.units for t in tallies), UNITS),
        _counts(leaving),
        _counts(weights),
        {k: _joined([s.windows[k] for s in sights]) for k in (sights[0].windows if sights else ())},
        {d: _joined([s.contrast[d] for s in sights]) for d in (sights[0].contrast if sights else ())},
        _joined([s.gradients for s in sights if s.gradients is not None]),
        _moved(_total(s.ratios for s in sights if s.ratios is not None)),
        _hot(leaving, weights),
        lr=lr,
        facts=facts,
    )
    return replace(step, sizes=_sizes(step, dtype, real))


def plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as JSON has them: numbers of numpy and torch as numbers. Raises: TypeError."""
    return {name: json.loads(json.dumps(value, default=_number)) for name, value in facts.items()}


def _number(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"a fact must be a number, a string, a list or a mapping; got {type(value).__name__}")
    return value.item()


def _total(rows: Any) -> Numbers:
    total: Numbers = np.sum(list(rows), axis=0, dtype=np.int64)
    return total


def _joined(rows: Sequence[Numbers]) -> tuple[int, ...]:
    return tuple(int(count) for row in rows for count in row.tolist())


def _counts(row: Numbers, keys: Sequence[int] | None = None) -> Counts:
    if row.ndim == 0:
        return {}
    return {keys[n] if keys else n: int(row[n]) for n in np.flatnonzero(row).tolist()}


def _moved(row: Numbers) -> Counts:
    """Unchanged weights have the smallest key; values that are not finite are left out."""
    if row.ndim == 0:
        return {}
    still = {-254: int(row[:2].sum())} if row[:2].any() else {}
    return still | {n - 254: int(row[n]) for n in range(2, RATIOS - 2) if row[n]}


def _hot(leaving: Numbers, weights: Numbers) -> float | None:
    if weights.ndim == 0 or not weights.sum():
        return None
    (cut,) = choose_cuts(leaving[None], (weights[None] + SAMPLE_SCALE // 2) // SAMPLE_SCALE).tolist()
    return float(weights[:cut].sum() / weights.sum())


def _sizes(step: Step, dtype: str, real: Mapping[str, int]) -> dict[str, PatchBytes]:
    predicted = predict_sizes(
        sum(step.weights_by_class.values()),
        len(step.changed),
        dtype,
        by_class=step.by_class,
        weights_by_class=step.weights_by_class,
        units=step.units,
        up=step.up,
        again=step.again,
        same_way=step.same_way,
    )
    return {codec: PatchBytes(size, real.get(codec)) for codec, size in predicted.items()}
