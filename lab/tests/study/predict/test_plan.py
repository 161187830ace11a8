"""The answers of a plan follow from its forecast."""

import numpy as np
import pytest

from lab.tests.forecasts import forecast_once, one_forecast
from pulsesync.core.threads import default_threads
from pulsesync_lab.study.predict import evidence, theory
from pulsesync_lab.study.predict.forecast import TrainingSettings
from pulsesync_lab.study.predict.models import ModelFacts, largest_normal, normal_classes, scale_of
from pulsesync_lab.study.predict.plan import ENOUGH, SyncPlan, make_plan

__all__ = ["forecast_once", "one_forecast"]

SEVEN = ModelFacts("seven", 339, normal_classes(0.02, 7_600_000_000), "", assumed=True)


def plan(bandwidth: float = 200e6, step_s: float = 50.0, *, cores: int = 16, **training: object) -> SyncPlan:
    return make_plan(SEVEN, TrainingSettings(1e-6, **training), bandwidth, step_s, cores=cores)  # type: ignore[arg-type]


def test_full_weights_need_what_the_paper_says_for_90_per_cent() -> None:
    """14 GB and 50 s a step: 20 Gbit/s, and for patches a hundredth of it."""
    told = plan()
    assert told.needed_bandwidth("full") == pytest.approx(20e9, rel=0.15)
    assert told.needed_bandwidth("history") < 0.01 * told.needed_bandwidth("full")


def test_at_the_bandwidth_that_is_needed_the_utilisation_is_the_goal() -> None:
    needed = plan().needed_bandwidth("history")
    assert plan(bandwidth=needed).options["history"].utilisation == pytest.approx(0.9)


def test_on_a_slow_link_the_fewest_bytes_win_and_nothing_is_enough() -> None:
    told = plan()
    assert told.best == "history"
    assert not told.enough
    sizes = [option.size_bytes for option in told.options.values()]
    assert sizes == sorted(sizes)


def test_on_a_link_of_no_cost_full_weights_are_the_quickest_and_enough() -> None:
    told = plan(bandwidth=1e14, step_s=1.0)
    assert told.best == "full"
    assert told.enough
    assert told.options["full"].utilisation > ENOUGH


def test_where_time_is_long_bytes_decide_even_if_the_link_is_quick() -> None:
    assert plan(bandwidth=1e14, step_s=1000.0).best == "history"


def test_a_sync_of_several_steps_has_their_time() -> None:
    one, four = plan(), plan(every=4)
    assert four.step_s == 4 * one.step_s
    assert four.options["history"].size_bytes > one.options["history"].size_bytes
    assert four.options["history"].utilisation > one.options["history"].utilisation


def test_anchors_come_when_patches_add_up_to_a_state_and_a_joiner_pays_for_both() -> None:
    told = plan()
    assert told.anchor_syncs * told.options["history"].size_bytes == pytest.approx(told.full_bytes, rel=0.01)
    average, most = told.joiner_bytes
    assert told.full_bytes < average < most < 2 * told.full_bytes


def test_more_cores_shorten_the_work_and_change_nothing_else() -> None:
    few, many = plan(cores=2), plan(cores=16)
    assert (few.cores, many.cores) == (2, 16)
    for way, seconds in few.took.items():
        on_the_link = few.options[way].seconds
        assert seconds > many.took[way] >= on_the_link
    assert (few.expected, few.options, few.anchor_syncs, few.evidence) == (
        many.expected,
        many.options,
        many.anchor_syncs,
        many.evidence,
    )


def test_without_a_number_the_cores_are_those_of_this_machine() -> None:
    assert make_plan(SEVEN, TrainingSettings(1e-6), 200e6, 50.0).cores == default_threads()


SEEN = ModelFacts("seen", 1, normal_classes(0.02, 300_000), "")


@pytest.mark.usefixtures("one_forecast")
@pytest.mark.parametrize("training", [TrainingSettings(1e-6), TrainingSettings(3e-6, theory.LION, optimizer="lion")])
def test_for_runs_like_those_measured_the_error_is_the_one_of_the_table(training: TrainingSettings) -> None:
    told = make_plan(SEEN, training, 200e6, 50.0)
    assert told.unlike == ()
    assert told.evidence == evidence.find(training) != ()


@pytest.mark.usefixtures("one_forecast")
@pytest.mark.parametrize(
    ("changed", "saying"),
    [
        ({"every": 4}, "syncs of 4 steps"),
        ({"betas": (0.8, 0.9), "masters": False}, "adamw with betas of 0.8 and 0.9 and no masters"),
        ({"warm_up": 20}, "a warm-up"),
        ({"betas": (0.8, 0.9)}, "adamw with betas of 0.8 and 0.9 and FP32 masters"),
        ({"lr": 5e-7}, "a learning rate of 5e-07"),
        ({"lr": 1e-4, "betas": theory.LION, "optimizer": "lion"}, "a learning rate of 0.0001"),
    ],
)
def test_nothing_is_claimed_of_runs_unlike_those_that_were_measured(changed: dict[str, object], saying: str) -> None:
    told = make_plan(SEEN, TrainingSettings(**{"lr": 1e-6, **changed}), 200e6, 50.0)  # type: ignore[arg-type]
    assert told.unlike == (saying,)
    assert told.evidence == ()


@pytest.mark.usefixtures("one_forecast")
@pytest.mark.parametrize("weights", [100_000, 200_000_000, 7_600_000_000])
def test_nothing_is_claimed_of_models_smaller_or_larger_than_those_that_were_measured(weights: int) -> None:
    told = make_plan(ModelFacts("model", 1, normal_classes(0.02, weights), ""), TrainingSettings(1e-6), 200e6, 50.0)
    assert told.unlike == (f"a model of {told.model.size:,} weights",)
    assert told.evidence == ()


@pytest.mark.usefixtures("one_forecast")
def test_a_size_that_was_measured_for_one_kind_of_model_supports_a_claim_for_that_kind_alone() -> None:
    told = make_plan(ModelFacts("model", 1, normal_classes(0.02, 100_000_000), ""), TrainingSettings(1e-6), 200e6, 50.0)
    assert told.unlike == ()
    assert [one.kind for one in told.evidence] == ["trained"]  # up to 135 million; random ones up to 4 million


@pytest.mark.usefixtures("one_forecast")
def test_other_dtypes_finer_starts_and_assumed_magnitudes_are_unlike_them_too() -> None:
    asked = TrainingSettings(1e-6), 200e6, 50.0
    assert make_plan(ModelFacts("half", 1, normal_classes(0.02, 300_000, "F16"), ""), *asked, "F16").unlike == ("F16",)
    fine = ModelFacts("fine", 1, SEEN.weights_by_class, "", rounded=False)
    assert make_plan(fine, *asked).unlike == ("start weights finer than the dtype",)
    assumed = ModelFacts("assumed", 1, SEEN.weights_by_class, "", assumed=True)
    assert make_plan(assumed, *asked).unlike == ("assumed magnitudes",)


def test_the_most_is_the_largest_sync_of_each_codec_and_not_that_of_the_highest_density() -> None:
    counted = normal_classes(0.02, 50_000_000)  # at this rate the highest density comes early and is predictable
    told = make_plan(ModelFacts("skewed", 300, counted, ""), TrainingSettings(1e-5), 200e6, 50.0)
    for codec in ("history", "context", "gap", "plain"):
        assert told.options[codec].most_bytes == max(sync.sizes[codec] for sync in told.expected.syncs)
    assert told.options["history"].most_bytes > told.expected.highest.sizes["history"]


def test_the_critical_magnitude_is_for_the_rate_and_the_dtype() -> None:
    assert plan().critical == pytest.approx((256e-6, 512e-6))
    scale = scale_of(np.array([0.02 * largest_normal(1_000_000)]), "F8_E4M3")
    counts = normal_classes(0.02 * scale, 1_000_000, "F8_E4M3")
    for lr, sure in ((1e-6, 16e-6), (1e-7, 0)):  # half of the least FP8 value is 2.3e-7 under this scale
        model = ModelFacts("eight", 1, counts, "", rounded=False, by_scale={scale: counts})
        assert make_plan(model, TrainingSettings(lr), 200e6, 50.0, "F8_E4M3").critical == pytest.approx((sure, 32 * lr))
