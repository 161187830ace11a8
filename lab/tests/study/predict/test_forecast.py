"""The forecast, against updates that are made for real and against figures that were published."""

import time

import ml_dtypes
import numpy as np
import pytest

from pulsesync.testing import AdamUpdates
from pulsesync_lab.study.predict.forecast import MOST_STEPS, STEPS, TrainingSettings, _Sample, forecast, simulate_moves
from pulsesync_lab.study.predict.models import classes_of, largest_normal, normal_classes, scale_of
from pulsesync_lab.study.predict.theory import LION

LR = 3e-6
# Weights of the shipped policy by exponent bits.
DEMO = {
    101: 1,
    102: 1,
    103: 5,
    104: 2,
    105: 11,
    106: 27,
    107: 57,
    108: 77,
    109: 179,
    110: 353,
    111: 723,
    112: 1376,
    113: 2856,
    114: 5540,
    115: 11249,
    116: 22455,
    117: 45005,
    118: 89173,
    119: 173564,
    120: 307423,
    121: 394653,
    122: 174443,
    123: 5384,
    124: 3,
    126: 673,
    127: 767,
}
QWEN = normal_classes(0.02, 1_500_000_000)


def test_it_tells_what_generated_updates_do_step_by_step() -> None:
    """The forecast knows only the weights' histogram, and still finds the peaks where whole classes cross a border."""
    updates = AdamUpdates({"weight": (1000, 1000)}, lr=LR, scale=0.15)
    state = updates.state()["weight"]
    counts = dict(enumerate(np.bincount(classes_of(state.ravel().view(ml_dtypes.bfloat16))).tolist()))
    told = forecast(counts, 1, TrainingSettings(LR), steps=12)
    real = []
    for _ in range(12):
        new = updates.step()["weight"]
        real.append(float((new != state).mean()))
        state = new
    densities = [sync.density for sync in told.syncs]
    assert sum(densities) == pytest.approx(sum(real), rel=0.08)
    assert int(np.argmax(densities)) == int(np.argmax(real)) == 10
    assert densities == pytest.approx(real, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "published"), [(3e-6, (0.00574, 0.01232)), (5e-6, (0.00942, 0.02137))])
def test_without_masters_it_is_near_the_published_runs(lr: float, published: tuple[float, float]) -> None:
    """Qwen2.5-1.5B with a warm-up of 20 steps: density over 1 and 32 steps. No constant was fitted to these."""
    told = forecast(QWEN, 338, TrainingSettings(lr, warm_up=20, masters=False))
    assert told.windows[1] == pytest.approx(published[0], rel=0.25)
    assert told.windows[32] == pytest.approx(published[1], rel=0.25)
    peak = max(range(STEPS), key=lambda step: told.syncs[step].density)
    assert 10 <= peak <= 30  # the dip in sparsity at the end of the warm-up
    assert told.first.density < 0.2 * told.highest.density


def test_dtypes_are_in_the_order_that_theory_asks_for() -> None:
    plateau = {}
    for dtype in ("F32", "F16", "BF16", "F8_E4M3"):
        weights = normal_classes(0.02, 1_000_000, dtype)
        plateau[dtype] = forecast(
            weights, 10, TrainingSettings(LR), dtype, rounded=dtype != "F8_E4M3", steps=40
        ).plateau.density
    assert plateau["F32"] > 0.95 > plateau["F16"] > 2 * plateau["BF16"] > 2 * plateau["F8_E4M3"] > 0


@pytest.mark.slow
def test_in_fp8_under_a_scale_it_is_near_the_published_density() -> None:
    """0.0655 % at 1e-6; without a scale most weights would be subnormal, and an eighth of that."""
    size, dtype = 4_000_000, "F8_E4M3"  # takes a second: 400 steps, so that gradients have lost their direction
    scale = scale_of(np.array([0.02 * largest_normal(size)]), dtype)
    counts = normal_classes(0.02 * scale, size, dtype)
    told = forecast(counts, 10, TrainingSettings(1e-6), dtype, by_scale={scale: counts}, rounded=False, steps=400)
    assert told.plateau.density == pytest.approx(0.000655, rel=0.15)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_the_largest_values_of_fp8_are_neither_nan_nor_go_beyond(dtype: str) -> None:
    counts = {{"F8_E4M3": 15, "F8_E5M2": 30}[dtype]: 1000}
    sample = _Sample({1.0: counts}, simulate_moves(TrainingSettings(1.0), 2), True, dtype, rounded=False)
    for by in (0.0, 1e5, -2e5):
        sample.move(np.array([by], np.float32))
        assert np.isfinite(sample.values).all()
        assert np.isfinite(sample.bits.view(sample.type).astype(np.float32)).all()


def test_a_scale_is_the_same_as_larger_moves_of_larger_weights() -> None:
    plain = dict.fromkeys(range(110, 120), 1000)
    scaled = {c + 3: count for c, count in plain.items()}
    one = forecast(plain, 1, TrainingSettings(LR), steps=8)
    other = forecast(scaled, 1, TrainingSettings(LR), by_scale={8.0: scaled}, steps=8)
    assert [sync.density for sync in other.syncs] == [sync.density for sync in one.syncs]
    both = forecast(plain, 2, TrainingSettings(LR), by_scale={1.0: plain, 8.0: scaled}, steps=8)
    assert [sync.density for sync in both.syncs] == pytest.approx([sync.density for sync in one.syncs])


@pytest.mark.parametrize("every", [513, 1000])
def test_syncs_of_many_steps_are_looked_at_twice(every: int) -> None:
    assert len(forecast({118: 1000}, 1, TrainingSettings(LR, every=every)).syncs) == 2


def test_what_is_less_than_a_sync_or_too_far_is_refused() -> None:
    with pytest.raises(ValueError, match="steps must be from"):
        forecast(QWEN, 338, TrainingSettings(LR, every=4), steps=3)
    with pytest.raises(ValueError, match=f"to {MOST_STEPS}; got"):
        forecast(QWEN, 338, TrainingSettings(LR, every=MOST_STEPS))


@pytest.mark.slow
def test_more_learning_rate_changes_more_and_masters_lose_nothing() -> None:
    slow, fast = (forecast(QWEN, 338, TrainingSettings(lr), steps=40).mean().density for lr in (1e-6, 3e-6))
    assert slow < fast
    bare = forecast(QWEN, 338, TrainingSettings(3e-6, masters=False), steps=40)
    kept = forecast(QWEN, 338, TrainingSettings(3e-6), steps=40)
    assert bare.windows[32] < 0.5 * kept.windows[32]


def test_a_sync_of_several_steps_is_larger_than_one_and_smaller_than_all() -> None:
    each = forecast(QWEN, 338, TrainingSettings(LR), steps=64)
    folded = forecast(QWEN, 338, TrainingSettings(LR, every=4), steps=64)
    assert len(folded.syncs) == 16
    assert each.plateau.density < folded.plateau.density < 4 * each.plateau.density
    assert folded.plateau.sizes["history"] < 4 * each.plateau.sizes["history"]


def test_windows_grow_and_codecs_are_in_order_within_seconds() -> None:
    began = time.process_time()
    told = forecast(QWEN, 338, TrainingSettings(LR))
    assert time.process_time() - began < 5  # 0.5 s where nothing else runs
    assert list(told.windows) == [1, 2, 4, 8, 16, 32]
    assert list(told.windows.values()) == sorted(told.windows.values())
    sizes = told.mean().sizes
    assert sizes["history"] < sizes["context"] < sizes["gap"] < sizes["plain"] < sizes["dense"]
    assert told.syncs[0].sizes["history"] == told.syncs[0].sizes["context"]  # nothing is remembered yet


def test_the_first_moves_are_the_learning_rate_and_warm_up_shortens_them() -> None:
    moves = simulate_moves(TrainingSettings(1e-6), 2)
    assert np.median(np.abs(moves[0])) == pytest.approx(1e-6, rel=0.2)
    assert np.abs(moves[0]).max() <= 1e-6
    warm = simulate_moves(TrainingSettings(1e-6, warm_up=10), 2)
    assert warm[0] == pytest.approx(moves[0] / 10, rel=1e-5)


def test_how_long_gradients_keep_their_direction_does_not_depend_on_the_size_of_the_weights() -> None:
    """An eighth of the rate on weights of an eighth would look the same, but it has gone an eighth of the way."""
    large = forecast({120: 1_000_000}, 1, TrainingSettings(8e-6), steps=30)
    small = forecast({117: 1_000_000}, 1, TrainingSettings(1e-6), steps=30)
    assert small.first.density == large.first.density
    assert small.mean(20).density > 1.5 * large.mean(20).density


def test_lion_moves_every_weight_by_the_learning_rate() -> None:
    moves = simulate_moves(TrainingSettings(1e-6, LION, optimizer="lion"), 5)
    assert np.abs(moves) == pytest.approx(np.full(moves.shape, 1e-6))


@pytest.mark.parametrize(("lr", "measured"), [(1e-6, 0.03733), (3e-6, 0.09159)])
@pytest.mark.slow
def test_under_lion_it_is_near_the_measured_density_of_the_demo(lr: float, measured: float) -> None:
    """200 steps of the demo's policy, warm-up of 20: benchmarks/results/study/optimizer. Nothing was fitted to it."""
    told = forecast(DEMO, 28, TrainingSettings(lr, LION, warm_up=20, optimizer="lion"), steps=200)
    assert told.mean().density == pytest.approx(measured, rel=0.05)


def test_the_same_arguments_give_the_same_forecast() -> None:
    assert forecast(QWEN, 338, TrainingSettings(LR), steps=5) == forecast(QWEN, 338, TrainingSettings(LR), steps=5)


def test_weights_that_nothing_reaches_give_a_forecast_of_nothing() -> None:
    told = forecast({127: 1000}, 1, TrainingSettings(1e-9), steps=3)
    assert told.mean().density == 0
    assert told.mean().sizes["history"] < 1000
