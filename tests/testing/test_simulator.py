"""Whole runs by a seed; and mistakes that somebody could make in this library, which the simulator must find."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain as chained
from typing import Any

import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Bits, BlockChange, Tile
from pulsesync.format import epochs
from pulsesync.format.manifest import Manifest
from pulsesync.maintain import prune as pruning
from pulsesync.maintain.squash import _Span
from pulsesync.run.reader import RunReader
from pulsesync.state.live import Snapshot, State, Transition
from pulsesync.store import MemoryStore, ObjectEntry, Store
from pulsesync.testing.simulator import InlineExecutor, QueuedExecutor, RunSimulator

SCHEDULES, CHUNK, EVENTS = 200, 10, 24
SEEDS_FOR_A_MUTANT = 40


@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_a_run_survives_what_can_happen_to_it(first: int) -> None:
    for seed in range(first, first + CHUNK):
        RunSimulator(seed, events=EVENTS).run()


def test_the_same_seed_is_the_same_schedule() -> None:
    first, second = RunSimulator(3), RunSimulator(3)
    assert first.run() == second.run()
    assert first.log == second.log


class OneThread(MemoryStore):
    """A store that is asked from one thread: with two, a seed would not always be the same schedule."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        assert threading.current_thread() is threading.main_thread(), f"{key} is asked for behind the simulator"
        return super().get(key, begin, end)


def test_nobody_asks_the_store_in_a_thread_of_its_own() -> None:
    for seed in range(10):
        RunSimulator(seed, store=OneThread).run()


def test_a_schedule_has_many_events_and_faults() -> None:
    reports = [RunSimulator(seed).run() for seed in range(8)]
    assert sum(report.faults.total() for report in reports) > 40
    assert all(report.versions > 2 for report in reports)
    assert len(set(chained.from_iterable(report.events for report in reports))) > 15


def test_the_epoch_is_as_long_as_before_when_a_schedule_ends() -> None:
    RunSimulator(1, events=5).run()
    assert epochs.EPOCH_PATCHES == 32


def test_the_command_line_runs_schedules_and_says_what_they_were() -> None:
    command = [sys.executable, "-m", "pulsesync.testing.simulator", "--seeds", "0:2", "--events", "10"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "failed: none" in found.stdout
    assert found.stderr == ""


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


# Mistakes


class BaseAdvancesFirst(Publisher):
    """Moves its base before the version is committed."""

    def _commit(self, manifest: Manifest, transition: Transition | None) -> int:
        if transition is not None:
            super()._advance(manifest, transition)
        return super()._commit(manifest, transition)

    def _advance(self, manifest: Manifest, transition: Transition) -> None:
        pass


@dataclass
class RecordBeforeBody:
    """A store that lets a part wait until the next record was written."""

    store: Store
    waiting: tuple[str, bytes] | None = None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self.store.get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key.startswith("parts/"):
            self._send()
            self.waiting = key, bytes(data)
        else:
            self.store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self.store.create(key, data)
        self._send()

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def _send(self) -> None:
        if self.waiting:
            self.store.put(*self.waiting)
        self.waiting = None


class HoldsBeforeCommit(Subscriber):
    """Says that it holds a version before the weights do."""

    def _commit(self, transition: Transition, record: Manifest, progress: Any) -> None:
        self._hold(record)
        super()._commit(transition, record, progress)


class LooksAway(Subscriber):
    """Verifies without counting."""

    def verify(self, source: Any | None = None) -> str:
        assert self._state is not None
        return self._state.digest


class ResumesAnything(Subscriber):
    """Believes that the weights are the version that somebody wrote down."""

    def resume(self, source: Any, version: int, history: bytes | None) -> bool:
        record = RunReader(self.store, self.trust).version(version)
        if record is not None and not super().resume(source, version, history):
            self._hold(record)
        return record is not None


def commit_without_a_way_back(state: State, transition: Transition) -> Transition:
    back = Transition({}, state.sums, state.history)
    for (ordinal, _), change in transition.changes.items():
        state._write(ordinal, change)
    state.sums, state.history = transition.sums, transition.history
    return back


def commit_half(state: State, transition: Transition) -> Transition:
    """Leave the last block out."""
    return COMMIT(state, Transition(dict(list(transition.changes.items())[:-1]), transition.sums, transition.history))


COMMIT = State.commit


def write_one_of_two_tied(state: State, ordinal: int, change: BlockChange) -> None:
    state.places[ordinal].write(state.flats[state.layout.tiles[ordinal].tensor.name], change)


def read_the_live_state(snapshot: Snapshot, tile: Tile, number: int) -> Bits:
    return snapshot._state.block(tile, number)


def believe_head(records: RunReader, after: int = -1) -> Manifest | None:
    head = records._head()
    return records.version(head) if head > after else None


def keep_the_newest_alone(versions: list[tuple[ObjectEntry, Manifest]], *_: Any) -> int:
    return max((record.version for _, record in versions), default=0)


def forget_the_first_half(first: _Span, later: _Span) -> _Span:
    return _Span(first.number // 2, first.base, later.end, first.before, later.changes, 0)


def caught(**options: Any) -> str:
    """What a simulator says of a mistake, within so many seeds; nothing if it does not find it."""
    for seed in range(SEEDS_FOR_A_MUTANT):
        try:
            RunSimulator(seed, events=40, **options).run()
        except AssertionError as e:
            return str(e) if f"--seed {seed} --events 40" in str(e) else ""
    return ""


@pytest.mark.parametrize("publisher", [BaseAdvancesFirst, lambda store, **k: Publisher(RecordBeforeBody(store), **k)])
def test_a_publisher_with_a_mistake_is_caught(publisher: Callable[..., Publisher]) -> None:
    assert caught(publisher=publisher)


@pytest.mark.parametrize("subscriber", [HoldsBeforeCommit, LooksAway, ResumesAnything])
def test_a_subscriber_with_a_mistake_is_caught(subscriber: type[Subscriber]) -> None:
    assert caught(subscriber=subscriber)


@pytest.mark.parametrize(
    ("where", "name", "mistake"),
    [
        (State, "commit", commit_without_a_way_back),
        (State, "commit", commit_half),
        (State, "_write", write_one_of_two_tied),
        (Snapshot, "block", read_the_live_state),
        (RunReader, "newest", believe_head),
        (pruning, "_first_kept", keep_the_newest_alone),
        (_Span, "then", forget_the_first_half),
    ],
)
def test_a_mistake_inside_is_caught(where: Any, name: str, mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(where, name, mistake)
    assert caught()
