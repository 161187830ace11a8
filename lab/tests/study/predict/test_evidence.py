"""What is claimed of forecasts, and of which runs nothing is."""

import pytest

from pulsesync_lab.study.predict import evidence
from pulsesync_lab.study.predict.forecast import TrainingSettings


def test_every_claim_rests_on_several_models_and_has_its_lowest_error_first() -> None:
    for training in (TrainingSettings(3e-6), TrainingSettings(3e-6, (0.9, 0.99), optimizer="lion")):
        found = evidence.find(training)
        assert found
        for one in found:
            assert one.runs >= one.models >= evidence.FEWEST_MODELS
            assert -1 < one.bytes_off[0] <= one.bytes_off[1]
            assert -1 < one.density_off[0] <= one.density_off[1]


def test_of_betas_that_were_not_measured_nothing_is_claimed() -> None:
    assert evidence.find(TrainingSettings(3e-6, (0.5, 0.9))) == ()


def test_too_few_models_support_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    few = evidence.Evidence("trained", 5, evidence.FEWEST_MODELS - 1, (1e-6, 1e-5), (1, 9), (-0.1, 0.1), (-0.1, 0.1))
    enough = evidence.Evidence("random", 5, evidence.FEWEST_MODELS, (1e-6, 1e-5), (1, 9), (-0.1, 0.1), (-0.1, 0.1))
    monkeypatch.setattr(evidence, "MEASURED", {("adamw", (0.9, 0.999), True): (few, enough)})
    assert evidence.find(TrainingSettings(3e-6)) == (enough,)
