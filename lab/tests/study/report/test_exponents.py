"""Weights by magnitude, recorded and by theory."""

import pytest

from lab.tests.recordings import header, made, step
from pulsesync_lab.study.predict.theory import expected_density
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report.exponents import betas, by_exponent, learning_rate, magnitude


@pytest.mark.parametrize(
    ("dtype", "number", "least"), [("BF16", 127, 1.0), ("F16", 15, 1.0), ("F8_E4M3", 8, 2.0), ("BF16", 0, 2.0**-126)]
)
def test_a_class_begins_at_a_power_of_two(dtype: str, number: int, least: float) -> None:
    assert magnitude(dtype, number) == least


def test_bands_hold_what_all_steps_changed() -> None:
    low, high = by_exponent(made())
    assert (low.weights, low.changed, high.changed) == (1200, 140, 140)
    assert low.density == pytest.approx(140 / 1200)


def test_the_theory_is_for_the_rate_that_was_recorded() -> None:
    rate = learning_rate(made())
    assert rate == pytest.approx(2e-6)
    low, high = by_exponent(made())
    assert [low.noise, high.noise] == pytest.approx(list(expected_density([110, 115], 2e-6)))
    assert [low.steady, high.steady] == pytest.approx(list(expected_density([110, 115], 2e-6, std=1.0)))


def test_without_masters_the_theory_is_another() -> None:
    facts = {"lr": 2e-6, "masters": "BF16"}
    pure = Recording(header(facts=facts), (step(0, 1, 1, 1, 1, lr=None),))
    assert by_exponent(pure)[0].noise == pytest.approx(float(expected_density([110], 2e-6, masters=False)[0]))


def test_without_a_rate_there_is_no_theory_unless_one_is_given() -> None:
    unknown = Recording(header(facts={}), (step(0, 1, 1, 1, 1, lr=None),))
    assert by_exponent(unknown)[0].noise is None
    assert by_exponent(unknown, 1e-6)[0].noise is not None


@pytest.mark.parametrize(
    ("facts", "drawn"),
    [
        ({"optimizer": "AdamW", "every": 1}, True),
        ({"optimizer": "Adam"}, True),
        ({}, True),
        ({"optimizer": "SGD"}, False),
        ({"optimizer": "AdamW", "every": 8}, False),
    ],
)
def test_the_theory_is_that_of_one_step_of_adam(facts: dict[str, object], drawn: bool) -> None:
    assert (by_exponent(Recording(header(facts=facts), made().steps))[0].noise is not None) == drawn


@pytest.mark.parametrize(
    ("told", "known"), [([0, 0.999], (0.0, 0.999)), ([0.9, 1], None), ([0.9, 0], None), ([-1, 0.9], None)]
)
def test_betas_may_be_whole_numbers(told: list[float], known: tuple[float, float] | None) -> None:
    assert betas(Recording(header(facts={"betas": told}), ())) == known
