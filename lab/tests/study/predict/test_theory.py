"""The closed forms, against rounding and simulation."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync_lab.study.predict import theory

BF16 = ml_dtypes.bfloat16
DTYPES = ("BF16", "F16", "F8_E4M3", "F8_E5M2", "F32")


@given(st.integers(0, 0x7F7E), st.booleans())  # all finite values but the largest
def test_a_weight_absorbs_what_is_below_its_threshold_and_nothing_above(magnitude: int, negative: bool) -> None:
    weight = np.array([magnitude | negative << 15], np.uint16).view(BF16)
    towards, away = theory.thresholds(weight)
    exact = weight.astype(np.float64)
    out = -1.0 if negative else 1.0
    for direction, threshold in ((out, away), (-out, towards)):
        assert (exact + direction * threshold * 0.999).astype(np.float32).astype(BF16) == weight
        assert (exact + direction * threshold * 1.01).astype(np.float32).astype(BF16) != weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_below_a_power_of_two_the_gap_is_half(dtype: str) -> None:
    towards, away = theory.thresholds(np.array([1.0, 1.5], np.float32), dtype)
    assert away[0] == 2 * towards[0] == 2 * theory.thresholds(np.array([0.75], np.float32), dtype)[1][0] == away[1]
    assert towards[1] == away[1]


def test_around_zero_and_among_subnormals_both_gaps_are_the_least() -> None:
    towards, away = theory.thresholds(np.array([0.0, 2.0**-130, 2.0**-126], np.float32))
    assert towards.tolist() == away.tolist() == [2.0**-134] * 3


def test_bf16_absorbs_a_512th_to_a_256th_of_a_weight() -> None:
    weights = np.linspace(0.01, 0.9, 5000).astype(np.float32).astype(BF16)
    share = theory.thresholds(weights)[1] / weights.astype(np.float64)
    assert 1 / 512 < share.min() < 1 / 500
    assert 1 / 260 < share.max() <= 1 / 256


@pytest.mark.parametrize(("beta2", "bound"), [(0.999, 7.27), (0.99, 2.35), (0.98, 1.70), (0.95, 1.17)])
def test_the_bound_on_adam_is_the_published_one(beta2: float, bound: float) -> None:
    assert theory.adam_bound((0.9, beta2)) == pytest.approx(bound, abs=0.006)


def test_the_bound_is_one_at_the_first_step_grows_and_has_no_end_where_beta2_is_small() -> None:
    bounds = [theory.adam_bound(step=step) for step in (1, 2, 10, 100, 5000)]
    assert bounds[0] == pytest.approx(1)
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(theory.adam_bound(), rel=0.01)
    assert theory.adam_bound((0.9, 0.8)) == math.inf


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60))
def test_no_gradients_take_adam_beyond_its_bound(gradients: list[float]) -> None:
    first = second = 0.0
    for step, gradient in enumerate(gradients, 1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        if second > 1e-200:
            move = first / (1 - 0.9**step) / math.sqrt(second / (1 - 0.999**step))
            assert abs(move) <= theory.adam_bound(step=step) * (1 + 1e-9)


def test_the_worst_gradients_reach_the_bound() -> None:
    steps = 2000
    gradients = (0.9 / 0.999) ** np.arange(steps)  # j steps ago
    first = 0.1 * (0.9 ** np.arange(steps) * gradients).sum()
    second = 0.001 * (0.999 ** np.arange(steps) * gradients**2).sum()
    assert first / math.sqrt(second) == pytest.approx(theory.adam_bound(), rel=1e-6)


def test_in_noise_a_move_is_as_long_as_the_theory_says() -> None:
    words = np.random.default_rng(0)
    first, second = np.zeros(4000), np.zeros(4000)
    for _ in range(3000):
        gradient = words.standard_normal(4000)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
    moves = first / np.sqrt(second)
    assert moves.std() == pytest.approx(theory.noise_std(), rel=0.1)
    assert np.abs(moves).mean() == pytest.approx(0.18, rel=0.1)


def test_below_the_critical_magnitude_all_weights_change_and_above_it_none() -> None:
    sure, never = theory.critical_magnitude(3e-6)
    assert (sure, never) == (256 * 3e-6, 512 * 3e-6)
    small = np.linspace(1e-5, sure * 0.99, 1000).astype(np.float32).astype(BF16)
    large = np.linspace(never * 1.01, 0.1, 1000).astype(np.float32).astype(BF16)
    moved = [(weights.astype(np.float32) + np.float32(3e-6)).astype(BF16) != weights for weights in (small, large)]
    assert moved[0].all()
    assert not moved[1].any()


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("std", [0.23, 1.0, 8.0])
def test_the_expected_density_is_what_rounding_gives(masters: bool, std: float) -> None:
    words = np.random.default_rng(1)
    classes = [115, 117, 119]  # 2^-12, 2^-10, 2^-8: of about the size of moves, and of more
    for number, share in zip(classes, theory.expected_density(classes, 3e-6, masters=masters, std=std), strict=True):
        mantissas = words.integers(2, 126, 200_000)
        bits = ((number << 7) | mantissas).astype(np.uint16)
        values = bits.view(BF16).astype(np.float64)
        if masters:
            values += (words.random(values.size) - 0.5) * theory.unit([number])
        new = (values + 3e-6 * std * words.standard_normal(values.size)).astype(np.float32).astype(BF16)
        assert (new.view(np.uint16) != bits).mean() == pytest.approx(share, abs=0.004)


def test_no_move_changes_nothing_and_a_dtype_without_exponent_has_no_theory() -> None:
    assert theory.expected_density([100, 120], 0.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="got I8"):
        theory.numpy_dtype("I8")
