"""The lease of a run: who has to stop if two publishers are started, and that nobody waits for one that has ended."""

import atexit
import json
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher
from pulsesync.errors import AnotherPublisherError, ClosedError, NotFoundError, PulseError, StoreError
from pulsesync.publish import lease
from pulsesync.publish.lease import LeaseRecord, PublisherLease, parse
from pulsesync.run import keys
from pulsesync.run.keys import LEASE
from pulsesync.store import LocalStore, MemoryStore
from tests.processes import Fleet, alive, fleet
from tests.publish.test_sharded import Group
from tests.runs import Training, Watched, versions

assert fleet  # a fixture


def train(pipes: str, run: str, times: tuple[float, float], options: dict[str, Any]) -> None:
    """A process that publishes a version for each step that it is sent, and ends as Python does."""
    lease.LEASE_S, lease.RENEW_S = times
    lease.WATCH_S = lease.LOOK_S = times[1]
    with open(f"{pipes}/steps") as steps, open(f"{pipes}/outcomes", "w", buffering=1) as outcomes:
        publisher = Publisher(run, **options)
        for step in steps:
            try:
                outcomes.write(f"published {publisher.publish(weights(int(step)), step=int(step)).version}\n")
            except PulseError as e:
                outcomes.write(f"{type(e).__name__} {e}\n")
        atexit._run_exitfuncs()


class Trainer:
    """The other end of `train`."""

    def __init__(self, fleet: Fleet, pipes: Path, run: Path, times: tuple[float, float], options: Any) -> None:
        pipes.mkdir()
        for name in ("steps", "outcomes"):
            os.mkfifo(pipes / name)
        self.pid, self.out = fleet.start(train, pipes=str(pipes), run=str(run), times=times, options=options)
        self._steps, self._outcomes = open(pipes / "steps", "w", buffering=1), open(pipes / "outcomes")  # noqa: SIM115

    def publish(self, step: int) -> str:
        self._steps.write(f"{step}\n")
        return self._outcomes.readline().strip()

    def end(self) -> None:
        """Let the process end by itself."""
        self._steps.close()
        assert self._outcomes.readline() == ""
        self.kill()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        while alive(self.pid):
            time.sleep(0.005)
        with suppress(BrokenPipeError):
            self._steps.close()
        self._outcomes.close()


@pytest.fixture
def trainers(tmp_path: Path, fleet: Fleet) -> Iterator[Callable[..., Trainer]]:
    started: list[Trainer] = []

    def start(times: tuple[float, float] = (60.0, 0.1), **options: Any) -> Trainer:
        pipes = tmp_path / f"pipes-{len(started)}"
        started.append(Trainer(fleet, pipes, tmp_path / "run", times, options))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LEASE_S", 1.0), ("ANSWER_S", 1.0), ("RENEW_S", 0.05), ("WATCH_S", 0.05), ("LOOK_S", 0.05)):
        monkeypatch.setattr(lease, name, seconds)


def stranger(**facts: Any) -> LeaseRecord:
    """The lease of a process on another host, about which nothing can be found out."""
    here = LeaseRecord(token="t", process="p", host="far", pid=7, started=1, place="elsewhere", package="0.2")
    return replace(here, **facts)


def weights(step: int) -> dict[str, Any]:
    """A few change in a step."""
    return {"w": np.r_[step, np.ones(99)].astype(np.float32)}


class Shared(Watched):
    """A store in memory that counts as one that other processes reach."""

    is_private = False


# Real processes


def test_a_second_launch_by_mistake_stops_and_the_real_run_goes_on(trainers: Any) -> None:
    first, second = trainers(), trainers()
    assert first.publish(1) == "published 0"
    outcome = second.publish(9)
    assert outcome.startswith(
        f"AnotherPublisherError another publisher is writing to this run: process {first.pid} on host "
    ), outcome
    assert "has just renewed its lease. Nothing was published, and that publisher goes on." in outcome
    assert [first.publish(step) for step in (2, 3)] == ["published 1", "published 2"]


@pytest.mark.parametrize("end", ["kill", "end"])
def test_after_a_kill_or_an_end_on_this_host_a_restart_begins_at_once(tmp_path: Path, trainers: Any, end: str) -> None:
    first, restarted = trainers(), trainers()
    assert first.publish(1) == "published 0"
    getattr(first, end)()
    record = parse(LocalStore(tmp_path / "run").get(LEASE))
    assert record
    assert record.ended == (end == "end")  # without close()
    began = time.monotonic()
    assert restarted.publish(2) == "published 1"
    assert time.monotonic() - began < 5


def test_who_takes_over_goes_ahead_and_the_other_one_which_publishes_all_the_time_stops(trainers: Any) -> None:
    first, second = trainers(), trainers(take_over=True)
    assert first.publish(1) == "published 0"
    outcomes: list[str] = []

    def publish() -> None:
        while not outcomes or outcomes[-1].startswith("published"):
            outcomes.append(first.publish(len(outcomes) + 2))

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        outcome = second.publish(2)
    finally:
        publishing.join(20)
    assert outcome == f"published {len(outcomes)}"
    expected = f"AnotherPublisherError another publisher, process {second.pid} on host "
    assert outcomes[-1].startswith(expected), outcomes[-1]
    assert "has taken this run over" in outcomes[-1]
    assert second.publish(4) == f"published {len(outcomes) + 1}"


def test_a_trainer_that_was_stopped_for_longer_than_its_lease_loses_the_run(trainers: Any) -> None:
    first, second = trainers((1.0, 0.1)), trainers((1.0, 0.1))
    assert first.publish(1) == "published 0"
    os.kill(first.pid, signal.SIGSTOP)
    try:
        assert second.publish(2) == "published 1"
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.publish(3).startswith("AnotherPublisherError")
    assert second.publish(4) == "published 2"


def test_of_two_leases_the_later_one_stays_although_the_earlier_is_written_over_it(quick: None) -> None:
    """A process that is stopped in the middle of a renewal writes its lease over that of the one that took over."""
    store, process = Shared(), lease._process
    mine = PublisherLease(store)
    store.put(LEASE, stranger(term=4, ended=True).build())
    mine.wait(lambda: False)
    mine.hold()
    store.put(LEASE, stranger(term=4, renewals=9).build())
    time.sleep(0.3)
    found = parse(store.get(LEASE))
    assert found
    assert (found.process, found.term) == (process(), 5)
    store.put(LEASE, stranger(term=5).build())  # both began at once: the version decides, which neither has created yet
    time.sleep(0.3)
    mine.check()
    store.put(LEASE, stranger(term=6).build())
    time.sleep(0.3)
    with pytest.raises(AnotherPublisherError, match="another publisher, process 7 on host far, has taken this run"):
        mine.check()


# Taking over


class Trained:
    """A trainer in this process that publishes all the time, until something ends that."""

    def __init__(self, store: Any) -> None:
        self.publisher = Publisher(store)
        self.publisher.publish(weights(0))
        self.ended: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        step = 0
        while self.ended is None:
            step += 1
            try:
                self.publisher.publish(weights(step), step=step)
            except PulseError as e:
                self.ended = e
            time.sleep(0.002)

    def end(self) -> Exception | None:
        """Why it ended, or None if it published until now."""
        self._thread.join(0.3)
        ended, self.ended = self.ended, self.ended or Exception("the test is over")
        self._thread.join()
        with suppress(PulseError):
            self.publisher.close()
        return ended


@pytest.fixture
def strangers(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every publisher counts as one of another process."""
    monkeypatch.setattr(LeaseRecord, "is_ours", False)


def slow(verb: str, seconds: float) -> Callable[[str, str], None]:
    return lambda done, key: time.sleep(seconds) if done == verb and key.startswith("manifests/") else None


@pytest.mark.parametrize("slows", ["none", "the new one", "the new one's store", "the old one"])
def test_one_that_takes_over_wins_although_the_other_publishes_every_few_milliseconds(
    strangers: None, slows: str
) -> None:
    """Not both stop, and not the one that was started to take over."""
    memory = MemoryStore()
    for number in range(3):
        ours, theirs = Shared(memory), Shared(memory)
        first = Trained(ours)
        if slows == "the old one":
            ours.before = slow("create", 1.3)  # longer than it may take to answer
        elif slows == "the new one":
            theirs.before = slow("create", 0.3)
        elif slows == "the new one's store":
            theirs.before = lambda verb, key: time.sleep(0.02)
        second = Publisher(theirs, take_over=True, resume=True)
        try:
            report = second.publish(weights(1000), step=1000 * (number + 1))
            ended = first.end()
            assert isinstance(ended, AnotherPublisherError), ended
            assert "has taken this run over" in str(ended)
            assert second.publish(weights(1001), step=1000 * (number + 1)).version == (report.version or 0) + 1
        finally:
            first.end()
            second.close()


def test_one_that_took_over_from_a_live_publisher_and_lost_gives_the_lease_back(strangers: None) -> None:
    memory = MemoryStore()
    ours, theirs = Shared(memory), Shared(memory)
    first = Publisher(ours)
    first.publish(weights(0))

    def unreachable(verb: str, key: str) -> None:
        if (verb, key) == ("get", LEASE):
            raise StoreError("it does not answer", key=key, retryable=True)

    def publish(verb: str, key: str) -> None:
        if verb == "create":
            first.publish(weights(1), step=1)

    ours.before, theirs.before = unreachable, publish
    time.sleep(0.2)
    record = first._lease._record
    assert record
    second = Publisher(theirs, take_over=True)
    with pytest.raises(AnotherPublisherError, match="version 1 already exists"):
        second.publish(weights(9), step=9)
    with suppress(AnotherPublisherError):
        second.close()
    found = parse(memory.get(LEASE))
    assert found
    assert (found.token, found.ended) == (record.token, False)
    ours.before = lambda verb, key: None
    with Publisher(Shared(memory)) as third, pytest.raises(AnotherPublisherError, match="has just renewed its lease"):
        third.publish(weights(8), step=8)
    assert first.publish(weights(2), step=2).version == 2
    first.close()


def test_of_two_that_take_over_at_once_one_wins(strangers: None) -> None:
    memory = MemoryStore()
    first = Trained(Shared(memory))
    outcomes: list[Any] = []
    both = threading.Barrier(2)

    def take_over() -> None:
        store = Shared(memory)
        store.before = lambda verb, key: (
            both.wait(5) if (verb, key) == ("put", LEASE) and not store.writes[:-1] else None
        )
        publisher = Publisher(store, take_over=True)
        try:
            outcomes.append(publisher.publish(weights(1000), step=1000))
        except AnotherPublisherError as e:
            outcomes.append(e)
        time.sleep(0.5)
        with suppress(PulseError):
            publisher.close()

    threads = [threading.Thread(target=take_over) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert isinstance(first.end(), AnotherPublisherError)
    lost = [one for one in outcomes if isinstance(one, AnotherPublisherError)]
    assert len(outcomes) == 2
    assert len(lost) == 1
    assert "was also started with take_over=True" in str(lost[0])


@pytest.mark.parametrize("why", ["closed", "asked"])
def test_one_that_ends_or_does_not_answer_is_waited_for_no_longer(strangers: None, why: str) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    publisher = Publisher(store, take_over=True)
    began = time.monotonic()
    if why == "closed":
        threading.Timer(0.3, publisher.close).start()
        with pytest.raises(ClosedError, match="waited for the lease of another one, process 7 on host far"):
            publisher.publish(weights(0))
        publisher._lease.join()
        assert parse(store.get(LEASE)) == stranger()
    else:
        publisher.publish(weights(0))
        assert time.monotonic() - began >= 1.0
        time.sleep(0.2)
        found = parse(store.get(LEASE))
        assert found
        assert (found.term, found.asks, found.ended) == (2, False, False)
        publisher.close()
    assert time.monotonic() - began < 5


# One process


def test_a_publisher_that_is_closed_forgotten_or_left_in_this_process_keeps_nobody_waiting(tmp_path: Path) -> None:
    left = []
    for step, end in enumerate(("close", "forget", "leave", "close")):
        publisher = Publisher(tmp_path)
        began = time.monotonic()
        assert publisher.publish(weights(step), step=step).version == step
        assert time.monotonic() - began < 30  # the first one compiles kernels
        if end == "close":
            publisher.close()
            record = parse(LocalStore(tmp_path).get(LEASE))
            assert record
            assert record.ended
        elif end == "leave":
            left.append(publisher)
        del publisher
    for one in left:
        one.close()
    record = parse(LocalStore(tmp_path).get(LEASE))
    assert record
    assert record.ended


def test_a_lease_of_an_older_publisher_of_this_process_is_not_renewed_over_the_newer_one(quick: None) -> None:
    store = Shared()
    older, newer = PublisherLease(store), PublisherLease(store)
    older.hold()
    newer.hold()
    time.sleep(0.3)
    assert (older._record, newer._record) != (None, None)
    assert parse(store.get(LEASE)) == newer._record
    older.close()
    older.join()
    assert parse(store.get(LEASE)) is not None
    time.sleep(0.1)
    found = parse(store.get(LEASE))
    assert found
    assert not found.ended
    older.check()
    newer.close()
    newer.join()


def test_a_publish_costs_no_further_call_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "WATCH_S", 60.0)
    counts = {}
    for kind in (Watched, Shared):
        store, training = kind(), Training()
        with Publisher(store) as publisher:
            publisher.publish(training.weights)
            publisher.flush()
            store.gets.clear()
            store.writes.clear()
            for step in range(1, 6):
                training.step()
                publisher.publish(training.weights, step=step)
            counts[kind] = len(store.gets), len(store.writes)
    assert counts[Shared] == counts[Watched]


def test_a_lease_that_was_deleted_is_put_again_unless_the_run_was_removed(quick: None) -> None:
    store = Shared()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
        store.delete(LEASE)
        time.sleep(0.3)
        found = parse(store.get(LEASE))
        assert found
        assert not found.ended
        store.delete(keys.HEAD)
        store.delete(LEASE)
        time.sleep(0.3)
    assert list(store.list(keys.LEASES)) == []


def test_a_junk_term_does_not_switch_leases_off(quick: None) -> None:
    store = Shared()
    for term, next_term in ((lease.MAX_TERM, 1), (lease.MAX_TERM - 1, lease.MAX_TERM), (1 << 60, 1)):
        store.put(LEASE, stranger(term=term, ended=True).build())
        with Publisher(store) as publisher:
            publisher.publish(weights(0), step=0)
            found = parse(store.get(LEASE))
            assert found
            assert (found.term, found.ended) == (next_term, False)


def test_a_store_of_this_process_alone_gets_no_lease() -> None:
    store = MemoryStore()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert list(store.list(keys.LEASES)) == []


@pytest.mark.parametrize("answer", ["refuses", "hangs", "loses"])
def test_a_store_that_has_no_place_for_leases_costs_nothing_but_a_line(
    answer: str, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shared()

    def refuse(verb: str, key: str) -> None:
        if key == LEASE and (answer != "hangs" or verb == "put"):
            raise StoreError("it does not want to", key=key, retryable=answer != "refuses")

    if answer == "loses":
        store.after = lambda verb, key: store.store.delete(LEASE)
    else:
        store.before = refuse
    with caplog.at_level(logging.WARNING):
        if answer == "hangs":
            with Publisher(store) as publisher:
                publisher.publish(weights(0))
                publisher.publish(weights(1), step=1)
        else:
            with Publisher(store) as publisher:
                publisher.publish(weights(0))
                time.sleep(0.2)
                publisher.publish(weights(1), step=1)
    assert versions(store.store) == [0, 1]
    said = [one.getMessage() for one in caplog.records if one.name == lease.__name__]
    assert len(said) == (answer == "refuses")
    assert not said or said[0].startswith("The lease of this publisher cannot be read or written")


def test_a_team_has_one_lease_and_all_its_ranks_are_refused_together(quick: None) -> None:
    store, training = Shared(), Training()
    first = Group(store, 2)
    first.publish(training.weights)
    assert [one._lease._record is not None for one in first.pubs] == [True, False]
    store.put(LEASE, stranger(term=9).build())
    time.sleep(0.3)
    training.step()
    errors = first.try_publish(training.weights)
    assert all(isinstance(e, AnotherPublisherError) and "has taken this run over" in str(e) for e in errors)
    assert versions(store.store) == [0]


# Another host


def test_a_lease_of_another_host_ends_by_the_stores_clock_whatever_the_clock_here(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores_s = [1e9]
    store = Shared(MemoryStore(clock=lambda: stores_s[0]))  # another time than this machine's
    store.put(LEASE, stranger().build())
    stores_s[0] += 0.7
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert 0.2 < time.monotonic() - began < 0.9
    store.put(LEASE, stranger().build())
    stores_s[0] += 3600
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(1), step=1)
    assert time.monotonic() - began < 0.5


def test_where_the_store_shows_no_time_a_lease_is_watched_for_as_long_as_it_lasts(quick: None) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())

    def refuse(verb: str, key: str) -> None:
        if verb == "list":
            raise StoreError("it cannot list", key=key)

    store.before = refuse
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert 1.0 <= time.monotonic() - began < 5


def test_a_lease_that_is_renewed_meanwhile_is_that_of_a_live_publisher(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    renewal = threading.Timer(0.3, lambda: store.put(LEASE, stranger(renewals=1).build()))
    renewal.start()
    with Publisher(store) as publisher, pytest.raises(AnotherPublisherError, match="process 7 on host far has just"):
        publisher.publish(weights(0))
    assert versions(store.store) == []
    assert parse(store.get(LEASE)) == stranger(renewals=1)
    assert [one.getMessage() for one in caplog.records] == [
        "Another publisher, process 7 on host far, has published to this run. Its lease ends in 1 s unless it is "
        "renewed, and this publisher waits for that; Publisher(take_over=True) does not wait."
    ]


@pytest.mark.parametrize("end", ["released", "removed"])
def test_a_lease_that_ends_meanwhile_is_not_waited_for(quick: None, end: str) -> None:
    lease.LEASE_S = 30.0
    store = Shared()
    store.put(LEASE, stranger().build())
    act = {
        "released": lambda: store.put(LEASE, stranger(ended=True).build()),
        "removed": lambda: store.delete(LEASE),
    }[end]
    threading.Timer(0.2, act).start()
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert time.monotonic() - began < 5


def test_close_in_another_thread_ends_the_wait(tmp_path: Path) -> None:
    LocalStore(tmp_path).put(LEASE, stranger().build())
    publisher, raised = Publisher(tmp_path), []

    def publish() -> None:
        try:
            publisher.publish(weights(0))
        except ClosedError as e:
            raised.append(str(e))

    thread = threading.Thread(target=publish)
    thread.start()
    time.sleep(0.3)
    publisher.close()
    thread.join(5)
    assert "closed while it waited for the lease of another one, process 7 on host far" in raised[0]


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    LocalStore(tmp_path).put(LEASE, stranger().build())
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with Publisher(tmp_path) as publisher:
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights(0))
        assert time.monotonic() - began < 5
        with pytest.raises(NotFoundError):
            LocalStore(tmp_path).get(keys.HEAD)


# The record


def test_a_process_id_of_another_place_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container on the same host, with a namespace of its own, may have a process of the same id."""
    here = lease._place()
    assert here, "the tests run where /proc is complete"
    gone = subprocess.Popen(["sleep", "0"])
    while lease._started(gone.pid):
        time.sleep(0.005)
    assert stranger(pid=gone.pid, place=here).is_over  # a zombie
    gone.wait()
    assert stranger(pid=gone.pid, place=here).is_over
    assert not stranger(pid=gone.pid, place="elsewhere").is_over
    assert not stranger(pid=gone.pid, place="").is_over
    assert not stranger(pid=os.getpid(), place=here, started=lease._started(os.getpid())).is_over
    assert stranger(pid=os.getpid(), place=here, started=5).is_over  # the id was given to another process since
    assert not stranger(pid=1, place=here, started=lease._started(1)).is_over  # another user's, perhaps
    monkeypatch.setattr(lease, "_place", lambda: "")
    assert not stranger(pid=gone.pid, place="").is_over


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 2048,
        b"\xff",
        stranger().build() + b" " * 2048,
        stranger().build().replace(b"pulse-lease/1", b"pulse-lease/2"),
        stranger(pid=0).build(),
        stranger(pid=-1).build(),
        stranger(pid=1 << 40).build(),
        stranger(pid=True).build(),
        stranger(ended=1).build(),
        stranger(host=None).build(),
    ],
)
def test_what_is_no_lease_is_none(data: bytes) -> None:
    assert parse(data) is None


def test_a_lease_comes_back_as_it_was_written_and_is_printable() -> None:
    assert parse(stranger(renewals=3, ended=True).build()) == stranger(renewals=3, ended=True)
    table = json.loads(stranger(host="a\x1b[2J").build()) | {"colour": "blue"}
    found = parse(json.dumps(table).encode())
    assert found
    assert str(found).isprintable()
