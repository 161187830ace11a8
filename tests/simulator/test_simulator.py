"""Whole runs by a seed, and the parts of the simulator."""

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain as chained
from typing import Any

import pytest

from pulsesync.errors import GroupError
from pulsesync.publish.lifecycle import MOVES, SendQueue, Stage
from pulsesync.store import CachedStore, MemoryStore, WrappedStore
from tests.publishers import Publisher, ShardedPublisher
from tests.readers import Subscriber
from tests.simulator import (
    InlineExecutor,
    Invariant,
    InvariantError,
    QueuedExecutor,
    RunSimulator,
    SimulationCrashError,
)
from tests.simulator import teams as simulated_teams
from tests.simulator.__main__ import main
from tests.simulator.ending import finish
from tests.simulator.faults import publisher_with
from tests.simulator.teams import SimulatedGroup
from tests.simulator.trainers import new_trainer

QUICK, SCHEDULES, CHUNK, EVENTS = 20, 200, 10, 24
CHUNKS = [
    pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else []) for first in range(0, SCHEDULES, CHUNK)
]


class KnownThreads(MemoryStore):
    """A store for the simulator's own threads, of which one runs at a time: with others, seeds would not repeat."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        here = threading.current_thread()
        assert here is threading.main_thread() or here.name.startswith("rank "), f"{key} is read in {here.name}"
        return super().get(key, begin, end)


@pytest.mark.parametrize("first", CHUNKS)
def test_a_run_survives_what_can_happen_to_it(first: int) -> None:
    """In many events, with many faults."""
    reports = [RunSimulator(seed, events=EVENTS, store=KnownThreads).run() for seed in range(first, first + CHUNK)]
    assert sum(report.faults.total() for report in reports) > 20
    assert sum(report.versions for report in reports) > 3 * CHUNK  # a few have only two
    assert len(set(chained.from_iterable(report.events for report in reports))) > 15


@pytest.mark.parametrize("teams", [0.0, 1.0])
def test_the_same_seed_is_the_same_schedule(teams: float) -> None:
    first, second = (RunSimulator(3, events=12, teams=teams) for _ in range(2))
    assert first.run() == second.run()
    assert first.log == second.log


def test_the_command_line_runs_schedules_and_says_what_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2", "--events", "10"]) == 0
    found = capsys.readouterr()
    assert "failed: none" in found.out
    assert found.err == ""


# Teams


def met(seed: int) -> list[str]:
    """The log of three ranks that gather twice, in the order in which they ran."""
    group, log = SimulatedGroup(3, random.Random(seed)), list[str]()

    def work(rank: int) -> list[bytes]:
        for number in range(2):
            log.append(f"{rank} comes to gather {number}")
            notes = group.gather(rank, b"%d" % rank, misses=False)
        return notes

    ended = group.run([partial(work, rank) for rank in range(3)])
    assert [one.result() for one in ended] == [[b"0", b"1", b"2"]] * 3
    return log


def test_ranks_run_one_after_the_other_up_to_each_gather_in_an_order_of_the_seed() -> None:
    assert [line[-1] for line in met(0)] == ["0"] * 3 + ["1"] * 3
    assert met(0) == met(0)
    assert len({tuple(met(seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize("early", [RuntimeError("no"), None])
def test_a_rank_that_ends_fails_the_gather_of_the_others(early: Exception | None) -> None:
    group = SimulatedGroup(3, random.Random(0))

    def end() -> list[bytes]:
        if early:
            raise early
        return []

    works: list[Callable[[], list[bytes]]] = [
        partial(group.gather, 0, b"", False),
        end,
        partial(group.gather, 2, b"", False),
    ]
    first, second, third = (one.exception() for one in group.run(works))
    assert second is early
    assert isinstance(first, GroupError)
    assert isinstance(third, GroupError)


def test_a_rank_that_blocks_ends_the_schedule_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Stuck(ShardedPublisher):
        def publish(self, source: Any, **options: Any) -> Any:
            if self.team.rank == 1:
                released.wait(30)
            return super().publish(source, **options)

    monkeypatch.setattr(simulated_teams, "TURN_S", 0.2)
    try:
        with pytest.raises(SimulationCrashError, match=r"seed 5, event 0: .*rank 1 has neither ended") as caught:
            RunSimulator(5, teams=1.0, sharded=Stuck).run()
    finally:
        released.set()
    assert "--seed 5 --events 40 --teams 1" in str(caught.value)


def test_ranks_that_never_stop_meeting_end_the_schedule() -> None:
    class Talkative(ShardedPublisher):
        def publish(self, source: Any, **options: Any) -> Any:
            while True:
                self.team.gather(b"")

    with pytest.raises(SimulationCrashError, match="the ranks have made 100 gathers in one call"):
        RunSimulator(0, teams=1.0, trouble=0.0, sharded=Talkative).run()


@pytest.mark.slow
def test_teams_publish_in_parts_die_and_miss_gathers_and_resume_the_run() -> None:
    simulators = [RunSimulator(seed, teams=1.0) for seed in range(8)]
    faults = sum((simulator.run().faults for simulator in simulators), Counter[str]())
    assert min(faults["crash"], faults["missed"]) > 3
    patches = [record for simulator in simulators for record in simulator.records if record.base]
    assert len(patches) > 30
    assert sum(len(patch.parts) > 1 for patch in patches) > 15


def test_teams_and_single_trainers_resume_each_others_runs() -> None:
    simulator = RunSimulator(0, trouble=0.0, teams=0.5)
    world, events = simulator.world, [*["restart the trainer"] * 4, "train", "publish"] * 20
    with world.rules():
        world.trainers.append(new_trainer(world, world.base))
        for event in events:
            simulator._happen(event)
        finish(world)
    log = "\n".join(simulator.log)
    assert "Error" not in log
    for change in (
        "team .*, as trainer",
        "trainer .*, as team",
        "team .*, now over 2 ranks",
        "team .*, now over 3 ranks",
    ):
        assert re.search(f"restart the trainer: {change}", log), change
    bases = [record.base is not None for record in simulator.records[1:]]
    assert bases.count(True) > bases.count(False) > 0  # where the tiles do not fit the shards, a root follows


# The life of a version

# The simulator needs no thread for the sender, so starting one cannot fail; and its ranks make their calls in step, so
# that none is late
NEVER_SIMULATED = {(Stage.QUEUED, Stage.IDLE), (Stage.FIXED, Stage.ENDING)}


def test_schedules_make_every_move_in_the_life_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each move is asserted to be one of the table's where it is made."""
    wanted = MOVES.keys() - NEVER_SIMULATED
    made, move = set[tuple[Stage, Stage]](), SendQueue._move

    def watched(self: SendQueue, stage: Stage) -> None:
        made.add((self.stage, stage))
        move(self, stage)

    monkeypatch.setattr(SendQueue, "_move", watched)
    for seed in (14, 22, *range(40)):  # the first two make all of them
        if made != wanted:
            RunSimulator(seed, teams=0.5).run()
    assert made == wanted


# Executors


def test_a_queued_executor_works_when_it_is_told() -> None:
    executor, done = QueuedExecutor(), list[int]()
    futures = [executor.submit(done.append, number) for number in range(3)]
    assert (done, executor.waiting) == ([], 3)
    executor.run_one(1)
    assert (done, [future.done() for future in futures]) == ([1], [False, True, False])
    with executor.at_once():
        executor.submit(done.append, 3)
        assert done == [1, 0, 2, 3]


def test_who_waits_for_a_queued_task_has_it_done() -> None:
    executor, done = QueuedExecutor(), list[int]()
    executor.submit(done.append, 0)
    executor.submit(done.append, 1).result()
    assert (done, executor.waiting) == ([1], 1)


def test_executors_keep_what_a_task_raises_for_its_future() -> None:
    def fail() -> None:
        raise ValueError("no")

    queued = QueuedExecutor()
    futures: list[Future[None]] = [InlineExecutor().submit(fail), queued.submit(fail)]
    queued.run_all()
    assert [str(future.exception()) for future in futures] == ["no", "no"]


# Failures


def test_a_failed_schedule_says_which_invariant_at_which_event_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CachedStore, "create", CachedStore.put)
    with pytest.raises(InvariantError) as caught:
        RunSimulator(0, events=30).run()
    error = caught.value
    assert (error.invariant, error.seed, error.event) == (Invariant.IMMUTABLE_OBJECTS, 0, 0)
    first, *log, command = str(error).splitlines()
    assert first.startswith("seed 0, event 0: IMMUTABLE_OBJECTS: manifests/0000000000000000 is put")
    assert "publish" in log
    assert command == "To repeat it: python -m tests.simulator --seed 0 --events 30"


def test_an_unexpected_exception_is_a_crash_and_violates_no_invariant() -> None:
    class Broken(Subscriber):
        def sync(self, *args: Any, **kwargs: Any) -> Any:
            raise TypeError("of the library's own")

    with pytest.raises(SimulationCrashError, match=r"TypeError: of the library's own") as caught:
        RunSimulator(0, events=40, subscriber=Broken).run()
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_violation_that_the_library_catches_ends_the_schedule() -> None:
    """The thread that writes anchors raises nothing: what stops an anchor is logged."""

    class PutsAnchors(WrappedStore):
        def create(self, key: str, data: bytes) -> None:
            (self.put if key.startswith("anchors/") else super().create)(key, data)

    with pytest.raises(InvariantError, match="anchors/0000000000000000 is put") as caught:
        RunSimulator(0, **publisher_with(PutsAnchors)).run()
    assert caught.value.invariant is Invariant.IMMUTABLE_OBJECTS


def test_a_simulator_runs_the_classes_that_it_is_given() -> None:
    made: Counter[str] = Counter()

    class OwnPublisher(Publisher):
        def publish(self, *args: Any, **kwargs: Any) -> Any:
            made["publish"] += 1
            return super().publish(*args, **kwargs)

    class OwnSubscriber(Subscriber):
        def sync(self, *args: Any, **kwargs: Any) -> Any:
            made["sync"] += 1
            return super().sync(*args, **kwargs)

    report = RunSimulator(0, publisher=OwnPublisher, subscriber=OwnSubscriber).run()
    assert made["publish"] >= report.events["publish"]
    assert made["sync"] >= report.events["sync"]
