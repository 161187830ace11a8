"""How versions are coded: by what the link and the cores were measured to be worth."""

import logging
import time
from typing import Any

import numpy as np
import pytest

from pulsesync import PublishReport
from pulsesync.core.types import BlockChange, Codec, TensorSpec, Tile
from pulsesync.format.codecs import step
from pulsesync.publish import anchors, costs, writer
from pulsesync.publish.costs import (
    CodecChoice,
    CodingCost,
    LinkSpeed,
    Method,
    PatchCosts,
    StepTrial,
    choose_method,
    try_step,
)
from pulsesync.run import keys
from pulsesync.store import CachedStore, LocalStore, MemoryStore, RetryStore, Store, ThrottledStore, throttle
from pulsesync.store.base import is_local
from tests.publish.test_sharded import Group
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import Watched, codecs_of, equal

MANY = 1_000_000  # changes
SMALLEST = CodingCost(300e-9, 0.6)
STEP = CodingCost(30e-9, 1.2)
EVEN = 1e6 * (1.2 - 0.6) / (0.3 - 0.03)  # bytes a second at which both take the same time


def link(bytes_per_s: float) -> LinkSpeed:
    return LinkSpeed(8 * bytes_per_s)


def chosen(bytes_per_s: float, last: Method = "smallest", changes: int = MANY) -> str:
    return choose_method(last, changes, SMALLEST, STEP, link(bytes_per_s)).codec


def test_a_fast_link_takes_what_is_coded_in_less_time() -> None:
    assert chosen(1.25e8) == chosen(1.25e8, "step") == "step"


def test_a_slow_link_takes_what_has_the_fewest_bytes() -> None:
    assert chosen(1e5) == chosen(1e5, "step") == "smallest"


@pytest.mark.parametrize("last", ["smallest", "step"])
@pytest.mark.parametrize("off", [0.95, 1.05])
def test_where_neither_is_clearly_quicker_it_stays_as_it_was(last: Method, off: float) -> None:
    assert chosen(off * EVEN, last) == last


def test_a_version_that_takes_no_time_to_speak_of_stays_small() -> None:
    assert chosen(1.25e9, changes=10_000) == chosen(1.25e9, "step", changes=10_000) == "smallest"


def test_the_reason_has_the_figures() -> None:
    choice = choose_method("smallest", MANY, SMALLEST, STEP, link(1.25e8))
    assert choice.reason == (
        "1,000,000 changes take 0.305 s as smallest and 0.040 s as step at each end, with 4.80 and 9.60 bits a change "
        "over a link of 1,000 Mbit/s, as given"
    )


def test_nothing_is_chosen_before_a_version_has_shown_what_coding_takes() -> None:
    choice = choose_method("smallest", MANY, None, STEP, link(1e12))
    assert choice == CodecChoice("smallest", "nothing was measured yet")


def test_a_link_is_known_once_a_mebibyte_was_uploaded() -> None:
    speed = LinkSpeed()
    speed.sent(costs.LINK_BYTES - 1, 1.0)
    assert speed.bytes_per_s is None
    assert choose_method("smallest", MANY, SMALLEST, STEP, speed).codec == "smallest"
    speed.sent(1, 0.0)
    assert speed.bytes_per_s == costs.LINK_BYTES


def test_uploads_to_a_local_store_say_nothing_about_the_link() -> None:
    speed = LinkSpeed(is_local=True)
    speed.sent(1 << 30, 1e-3)
    choice = choose_method("smallest", MANY, SMALLEST, STEP, speed)
    assert choice.codec == "smallest"
    assert "the store is local, and link= was not given" in choice.reason


def test_a_store_is_local_if_what_it_wraps_is_and_no_link_lies_between(tmp_path: Any) -> None:
    memory = MemoryStore()
    local: list[Store] = [memory, LocalStore(tmp_path), CachedStore(RetryStore(memory), tmp_path), Watched()]
    assert all(map(is_local, local))
    assert not is_local(RetryStore(ThrottledStore(memory, 1e6)))


def measured(versions: int, seconds: float = 0.3) -> PatchCosts:
    found = PatchCosts("auto", link(1.25e8))
    for _ in range(versions):
        found.coded(found.choice, MANY, 600_000, seconds)
    return found


def test_one_slow_version_does_not_decide() -> None:
    found = measured(7, seconds=0.03)
    found.coded(found.choice, MANY, 600_000, 60.0)
    found.begin_epoch(StepTrial(MANY, STEP))
    assert found.choice.codec == "smallest"


def test_what_step_really_took_counts_more_than_the_sample() -> None:
    found = measured(1)
    found.begin_epoch(StepTrial(MANY, STEP))
    assert found.choice.codec == "step"
    found.coded(found.choice, MANY, 1_200_000, 3.0)
    found.begin_epoch(StepTrial(MANY, STEP))
    assert found.choice.codec == "smallest"


def test_weights_on_a_gpu_are_always_coded_as_small_as_possible() -> None:
    found = measured(1)
    found.begin_epoch(None)
    assert found.choice.codec == "smallest"
    assert "GPU" in found.choice.reason


def test_a_version_without_changes_decides_nothing() -> None:
    found = measured(1)
    found.begin_epoch(StepTrial(MANY, STEP))
    before = found.choice
    found.begin_epoch(StepTrial(0, CodingCost(0.0, 0.0)))
    assert found.choice is before


def test_a_codec_that_was_asked_for_is_used_whatever_the_link() -> None:
    found = PatchCosts("history", link(1e12))
    found.coded(found.choice, MANY, 600_000, 60.0)
    found.begin_epoch(StepTrial(MANY, STEP))
    assert str(found.choice) == "history: as asked for"


def test_every_change_of_mind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    found = measured(1)
    with caplog.at_level(logging.INFO, "pulsesync.publish.costs"):
        found.begin_epoch(StepTrial(MANY, STEP))
        found.begin_epoch(StepTrial(MANY, STEP))
    assert caplog.messages == [f"From now on, versions are coded as step: {found.choice.reason}."]


def test_step_is_tried_on_blocks_from_all_over_a_version() -> None:
    rng, each, blocks = np.random.default_rng(1), 8192, 40
    tile = Tile(0, TensorSpec("w", "F16", (blocks << 20,)), 0, 0, blocks << 20, 1)
    changes, size_bytes = {}, 0
    for number in range(blocks):
        where = np.sort(rng.choice(1 << 20, each, replace=False))
        old = rng.integers(1, 1 << 15, each, np.uint16)
        new = old + rng.integers(1, 3 if number < blocks // 2 else 30_000, each, np.uint16)  # the later ones are large
        changes[0, number] = BlockChange(number, where.astype(np.uint32), old, new)
        size_bytes += len(step.encode(where, old, new))
    trial = try_step([tile], changes)
    assert trial.changes == blocks * each
    assert trial.cost.size_bytes == pytest.approx(size_bytes / trial.changes, rel=0.1)
    assert trial.cost.seconds > 0


@pytest.mark.parametrize("bad", [0, -1.0, float("nan")])
def test_a_link_that_carries_nothing_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"link must be .* bits per second above 0"):
        Publisher(MemoryStore(), link=bad)


# -- from one end to the other ---------------------------------------------------------------------------------------

SIZE, CHANGED = 1 << 19, 1 << 15


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose for versions that a test encodes in milliseconds, as for large ones."""
    monkeypatch.setattr(costs, "WORTH_S", 0.0)
    monkeypatch.setattr(costs, "LINK_BYTES", 1 << 16)


class Moving:
    """The same weights change in every step, which history learns and `step` does not."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.weights = {"w": rng.choice(np.array([1, 2, 3], np.float16), SIZE)}
        self._where = np.sort(rng.choice(SIZE, CHANGED, replace=False))

    def step(self) -> None:
        self.weights["w"].view(np.uint16)[self._where] ^= 1


def run(store: Store, steps: int, **options: Any) -> list[PublishReport]:
    """Publish with epochs of two patches, and check that a worker gets every version."""
    training = Moving()
    reports = []
    worker = {"w": np.zeros(SIZE, np.float16)}
    subscriber = Subscriber(store, epoch_patches=2)
    with Publisher(store, epoch_patches=2, anchor_every=1e9, **options) as publisher:
        for number in range(steps):
            if number:
                training.step()
            reports.append(publisher.publish(training.weights, step=number))
            subscriber.sync(worker)
            assert equal(worker, training.weights)
    return reports


@pytest.mark.usefixtures("small")
def test_versions_over_a_fast_network_are_coded_as_steps_from_the_second_epoch_on() -> None:
    store = Watched()
    reports = run(ThrottledStore(store, 1e12), 5)
    assert [report.codec for report in reports] == [None, "smallest", "smallest", "step", "step"]
    assert "bits a change over a link of" in reports[3].reason
    assert [codecs_of(store, keys.manifest_key(version)) for version in (2, 3)] == [{Codec.HISTORY}, {Codec.STEP}]


class Waiting:
    """Time in which nobody waits: a sleep is over at once, and is added to what the clocks show."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds

    def perf_counter(self) -> float:
        return time.perf_counter() + self.slept_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.mark.usefixtures("small")
def test_versions_over_a_slow_network_stay_as_small_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    store, waiting = Watched(), Waiting()
    for module in (anchors, writer, throttle):
        monkeypatch.setattr(module, "time", waiting)
    reports = run(ThrottledStore(store, 1e3), 6)
    assert {report.codec for report in reports[1:]} == {"smallest"}
    assert "bits a change over a link of" in reports[3].reason
    assert all(codecs_of(store, keys.manifest_key(version)) == {Codec.HISTORY} for version in range(2, 6))


@pytest.mark.usefixtures("small")
def test_a_local_run_stays_as_small_as_possible_unless_the_link_is_given() -> None:
    assert {report.codec for report in run(Watched(), 6)[1:]} == {"smallest"}
    assert [report.codec for report in run(Watched(), 4, link=1e12)][3] == "step"


@pytest.mark.usefixtures("small")
def test_a_version_that_changes_every_weight_is_never_larger_than_the_weights() -> None:
    store, rng = MemoryStore(), np.random.default_rng(5)
    weights = {"w": rng.integers(0, 1 << 16, 100_000, np.uint16).view(np.float16)}
    with Publisher(store, codec="step") as publisher:
        publisher.publish(weights)
        weights["w"].view(np.uint16)[:] = rng.integers(0, 1 << 16, 100_000, np.uint16)
        report = publisher.publish(weights)
    assert report.payload_bytes < weights["w"].nbytes + 400


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("fast", "expected"), [(0, "step"), (1, "smallest")])
def test_of_a_team_all_ranks_code_as_the_coordinator_chooses(fast: int, expected: str) -> None:
    store, training = MemoryStore(), Moving()
    stores: list[Store] = [store, store]
    stores[fast] = ThrottledStore(store, 1e12)
    group = Group(stores, 2, epoch_patches=2, anchor_every=1e9)
    for number in range(4):
        if number:
            training.step()
        reports = group.try_publish(training.weights, number)
    group.flush()
    assert [(report.codec, report.reason) for report in reports] == 2 * [(expected, reports[0].reason)]
    assert codecs_of(store, keys.manifest_key(3)) == {Codec.STEP if expected == "step" else Codec.HISTORY}
    worker = {"w": np.zeros(SIZE, np.float16)}
    Subscriber(store, epoch_patches=2).sync(worker)
    assert equal(worker, training.weights)
