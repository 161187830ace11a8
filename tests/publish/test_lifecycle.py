"""The state machine of a version, without a store; and that its page has the same moves."""

import re
import threading
from pathlib import Path

import pytest

from pulsesync.core.process_guard import ProcessGuard
from pulsesync.errors import ClosedError, GroupError, StoreError
from pulsesync.publish.lifecycle import MOVES, SendQueue, Stage
from pulsesync.publish.pending import PendingVersion, PublishReport

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
REPORT = PublishReport(1, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)


def new_queue(alone: bool) -> SendQueue:
    return SendQueue(4, alone, ProcessGuard("Publisher", forked="", closed="is closed"))


def put(queue: SendQueue, step: int = 0, alone: bool = False) -> PendingVersion:
    with queue.call(alone, idle=lambda: False):
        version = PendingVersion(queue.count_call(), step, alone=alone)
        queue.put(version, awaited=False)
        return version


def test_the_page_has_the_stages_and_moves_of_the_code() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (.*) \|$", text, re.M)
    assert {(Stage(a), Stage(b)): when for a, b, when in rows} == MOVES
    assert set(re.findall(r"^\| `(\w+)` \| [A-Z]", text, re.M)) == set(Stage)


def test_every_stage_is_reached_and_left() -> None:
    assert {a for a, _ in MOVES} == {b for _, b in MOVES} == set(Stage)


def test_a_version_goes_through_its_stages() -> None:
    queue = new_queue(alone=True)
    first, stages = put(queue), [queue.stage]
    assert queue.take() is first
    stages.append(queue.stage)
    assert queue.fix(first, 1, 1.0, resumes=True) is first
    stages.append(queue.stage)
    queue.resumed()
    stages.append(queue.stage)
    second = put(queue)
    queue.sent()
    stages.append(queue.stage)
    queue.completed(REPORT)
    stages.append(queue.stage)
    assert stages == ["queued", "offered", "resuming", "sending", "ending", "queued"]
    assert first.futures[0].result(0) is REPORT
    assert queue.take() is second


def test_no_other_move_is_made() -> None:
    queue = new_queue(alone=True)
    with pytest.raises(AssertionError):
        queue.sent()
    put(queue)
    with pytest.raises(AssertionError):
        queue.resumed()
    assert queue.stage == Stage.QUEUED


def test_a_version_that_waits_is_replaced_and_its_future_gets_the_report_of_the_next() -> None:
    queue = new_queue(alone=True)
    versions = [put(queue, step) for step in range(3)]
    taken = queue.take()
    assert taken is versions[2]
    assert (taken.step, taken.coalesced) == (2, 2)
    queue.fix(taken, 3, 1.0, resumes=False)
    queue.sent()
    queue.completed(REPORT)
    assert [version.futures[-1].result(0) for version in versions] == [REPORT] * 3


def test_a_rank_that_is_behind_merges_its_calls_up_to_the_one_that_was_agreed_on() -> None:
    queue = new_queue(alone=False)
    put(queue, step=1)
    taken, fixed = queue.take(), list[PendingVersion]()
    assert taken is not None
    sender = threading.Thread(target=lambda: fixed.append(queue.fix(taken, 3, 10.0, resumes=False)))
    sender.start()
    versions = [put(queue, step) for step in (2, 3, 4)]  # each waits while the version is offered
    sender.join(10)
    assert fixed == [versions[1]]
    assert (fixed[0].step, fixed[0].coalesced) == (3, 2)
    assert queue.pending is versions[2]


def test_a_call_waits_while_the_ranks_agree() -> None:
    queue = new_queue(alone=False)
    put(queue)
    taken, made = queue.take(), threading.Event()
    assert taken is not None

    def call() -> None:
        put(queue)
        made.set()

    caller = threading.Thread(target=call)
    caller.start()
    assert not made.wait(0.05)
    queue.fix(taken, 1, 1.0, resumes=False)
    assert made.wait(10)
    caller.join(10)
    assert queue.pending is not None


def test_a_call_that_does_not_come_fails_the_version() -> None:
    queue = new_queue(alone=False)
    taken = (put(queue), queue.take())[1]
    assert taken is not None
    with pytest.raises(
        GroupError, match=r"called publish 1 times and none for 0\.01 s, but another rank called it 2 times"
    ):
        queue.fix(taken, 2, 0.01, resumes=False)
    queue.failed(taken, GroupError("late"), lambda: None, is_lost=False)
    assert queue.stage == Stage.IDLE


def test_ranks_that_lost_each_other_publish_nothing_more() -> None:
    queue = new_queue(alone=False)
    taken = (put(queue), queue.take())[1]
    assert taken is not None
    queue.fix(taken, 1, 1.0, resumes=False)
    waiting = put(queue)
    queue.failed(taken, GroupError("gone"), lambda: None, is_lost=True)
    assert [str(future.exception(0)) for future in waiting.futures] == ["gone", "gone"]
    with pytest.raises(GroupError, match="gone"):
        put(queue)


def fail(queue: SendQueue, error: Exception) -> PendingVersion:
    version = put(queue)
    taken = queue.take()
    assert taken is not None
    queue.fix(taken, queue.calls, 1.0, resumes=False)
    queue.failed(taken, error, lambda: None, is_lost=False)
    return version


def test_a_failure_of_a_team_is_raised_by_the_call_that_was_agreed_on_and_not_before() -> None:
    queue = new_queue(alone=False)
    fail(queue, StoreError("no"))
    unread = [queue.failures.has_unread]
    queue.raise_failure("publish")
    queue.failures.schedule_raise(3, unread=True)
    unread.append(queue.failures.has_unread)
    assert unread == [True, False]
    queue.raise_failure("publish")  # the second call
    queue.count_call()
    with pytest.raises(StoreError, match="no"):
        queue.raise_failure("publish")
    queue.raise_failure("publish")  # once


def test_a_failed_version_gives_up_its_memory() -> None:
    queue = new_queue(alone=True)
    version = fail(queue, StoreError("no"))
    assert (version.difference, version.shards, version.source) == (None, None, None)


def test_after_closing_no_call_is_accepted() -> None:
    queue = new_queue(alone=True)
    assert queue.close()
    assert not queue.close()
    with pytest.raises(ClosedError, match="closed"):
        put(queue)
