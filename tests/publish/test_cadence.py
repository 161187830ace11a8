"""How many steps go into a version: rules, with a clock that the test turns."""

from itertools import pairwise
from typing import Any

import pytest

from pulsesync.publish.cadence import SHARE, WINDOW, Cadence, SentVersion


class Clock:
    """A trainer with steps of one length, and a link on which a version of k steps takes what a function says."""

    def __init__(self, pace: Cadence, step_s: float) -> None:
        self.pace, self.step_s, self.now_s = pace, step_s, 0.0

    def steps(self, count: int, send_s: Any = lambda k: 0.0) -> list[int]:
        """Take steps; return the sizes of the versions that were made."""
        made = []
        for _ in range(count):
            self.now_s += self.step_s
            if self.pace.step(self.now_s):
                size = self.pace.published() + 1
                self.pace.sent(SentVersion(size, send_s(size)))
                made.append(size)
        return made


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "always", None])
def test_what_is_no_number_of_steps_is_refused(every: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="publish_every must be 'auto' or a number of steps"):
        Cadence(every)


def test_at_least_one_step_behind_must_be_allowed() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        Cadence("auto", max_behind=0)


def test_every_step_is_published_unless_told_otherwise() -> None:
    assert Clock(Cadence(), 1.0).steps(5) == [1] * 5


def test_a_fixed_number_of_steps_goes_into_a_version() -> None:
    assert Clock(Cadence(4), 1.0).steps(13) == [4, 4, 4]


def test_a_fixed_number_does_not_care_how_long_sending_takes() -> None:
    assert Clock(Cadence(2), 0.1).steps(8, lambda k: 100.0) == [2, 2, 2, 2]


def test_publishing_early_begins_a_new_count() -> None:
    pace = Cadence(3)
    assert [pace.step(0.0), pace.step(1.0)] == [False, False]
    assert pace.published() == 1
    assert [pace.step(2.0), pace.step(3.0), pace.step(4.0)] == [False, False, True]


def test_auto_begins_with_every_step() -> None:
    assert Cadence("auto").target() == 1


def test_auto_stays_with_every_step_while_the_link_can_bear_it() -> None:
    assert Clock(Cadence("auto"), 1.0).steps(20, lambda k: 0.4 * k**0.65) == [1] * 20


def test_auto_folds_steps_until_sending_takes_its_share_of_the_time() -> None:
    def send_s(k: int) -> float:
        return float(k**0.65)  # one step: as long as the step itself

    made = Clock(Cadence("auto"), 1.0).steps(200, send_s)
    settled = made[-1]
    assert settled > 1
    assert send_s(settled) <= SHARE * settled * 1.05
    assert send_s(settled - 1) > SHARE * (settled - 1) * 0.95


def test_auto_never_folds_more_than_it_may() -> None:
    assert set(Clock(Cadence("auto", max_behind=5), 1.0).steps(100, lambda k: 1000.0)[2:]) == {5}


def test_auto_comes_back_when_the_link_does() -> None:
    clock = Clock(Cadence("auto", max_behind=8), 1.0)
    assert clock.steps(80, lambda k: 50.0)[-1] == 8
    assert clock.steps(8 * 2 * WINDOW, lambda k: 0.01)[-1] == 1


def test_one_slow_send_does_not_change_the_pace() -> None:
    clock = Clock(Cadence("auto"), 1.0)
    clock.steps(WINDOW, lambda k: 0.1)
    clock.steps(1, lambda k: 500.0)
    assert clock.steps(5, lambda k: 0.1) == [1] * 5


def test_one_long_step_does_not_change_the_pace() -> None:
    clock = Clock(Cadence("auto"), 1.0)
    clock.steps(WINDOW, lambda k: 0.9 * k**0.65)
    before = clock.pace.target()
    clock.now_s += 1000.0
    clock.steps(1)
    assert clock.pace.target() in (before - 1, before, before + 1)


def test_versions_that_grow_with_the_run_do_not_make_it_jump() -> None:
    clock = Clock(Cadence("auto", max_behind=16), 1.0)
    slow = iter(0.1 * 1.2**n for n in range(100))
    made = clock.steps(60, lambda k: min(next(slow), 0.8) * k**0.7)
    assert made[0] == 1
    assert all(later <= 2 * before + 1 for before, later in pairwise(made))
