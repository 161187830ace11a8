"""Forecasts for tests of plans: each is made once."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from pulsesync_lab.study.predict import plan
from pulsesync_lab.study.predict.forecast import Forecast, forecast


@pytest.fixture(scope="module", autouse=True)
def forecast_once() -> Iterator[None]:
    """Plans differ in the link or the cores more often than in the run, and a forecast takes most of their second."""
    made: dict[str, Forecast] = {}

    def remembered(*args: Any, **options: Any) -> Forecast:
        key = repr((args, options))
        if key not in made:
            made[key] = forecast(*args, **options)
        return made[key]

    with mock.patch.object(plan, "forecast", remembered):
        yield
