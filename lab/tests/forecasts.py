"""Forecasts for tests of plans: each is made once."""

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest

from pulsesync_lab.study.predict import plan
from pulsesync_lab.study.predict.evidence import STEPS
from pulsesync_lab.study.predict.forecast import Forecast, TrainingSettings, forecast

AHEAD = 64  # steps
_MADE: dict[str, Forecast] = {}


@pytest.fixture(scope="module", autouse=True)
def forecast_once() -> Iterator[None]:
    """Plans differ in the link or the cores more often than in the run, and a forecast takes most of their second.

    It looks half as far ahead as a user's.
    """

    def remembered(
        weights_by_class: Any, tensors: int, training: TrainingSettings, *args: Any, **more: Any
    ) -> Forecast:
        key = repr((weights_by_class, tensors, training, args, more))
        if key not in _MADE:
            steps = max(AHEAD, 2 * training.every)
            _MADE[key] = forecast(weights_by_class, tensors, training, *args, **more, steps=steps)
        return _MADE[key]

    with mock.patch.object(plan, "forecast", remembered):
        yield


@cache
def _small() -> Forecast:
    return forecast({118: 1_000_000}, 1, TrainingSettings(1e-6), steps=STEPS[1])


@pytest.fixture
def one_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plans of which a test asks what supports them: whatever the run, the forecast is that of a small one."""
    monkeypatch.setattr(plan, "forecast", lambda *_, **__: _small())
