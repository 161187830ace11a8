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
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher
from pulsesync.errors import AnotherPublisherError, ClosedError, NotFoundError, PulseError, StoreError
from pulsesync.publish import lease
from pulsesync.publish.lease import LeaseRecord, PublisherLease, parse
from pulsesync.run import keys
from pulsesync.run.keys import LEASE
from pulsesync.store import LocalStore, MemoryStore, Store
from tests.processes import Fleet, alive, fleet
from tests.publish.test_sharded import Group
from tests.runs import Training, Watched, versions
from tests.tiers import slow

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


PATIENCE_S = 30.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishers look often. Who is alive has long enough to answer; a test in which nobody answers shortens that."""
    for name, seconds in (("ANSWER_S", PATIENCE_S), ("RENEW_S", 0.02), ("WATCH_S", 0.02), ("LOOK_S", 0.02)):
        monkeypatch.setattr(lease, name, seconds)


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


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

    def wait_for_looks(self) -> None:
        """Wait until a publisher with this store has looked at the lease, and has done what follows from that."""
        seen = len(self.got(LEASE))
        until(lambda: len(self.got(LEASE)) >= seen + 2)

    def act_after_looks(self, act: Callable[[], object]) -> threading.Thread:
        """Do something in another thread then."""

        def run() -> None:
            self.wait_for_looks()
            act()

        thread = threading.Thread(target=run)
        thread.start()
        return thread


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
    first, second = trainers((0.4, 0.1)), trainers((0.4, 0.1))
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
    store = Shared()
    mine = PublisherLease(store)
    store.put(LEASE, stranger(term=4, ended=True).build())
    mine.wait(lambda: False)
    mine.hold()
    taken = parse(store.get(LEASE))
    store.put(LEASE, stranger(term=4, renewals=9).build())
    store.wait_for_looks()
    found = parse(store.get(LEASE))
    assert found
    assert taken
    assert (found.token, found.term) == (taken.token, 5)
    store.put(LEASE, stranger(term=5).build())  # both began at once: the version decides, which neither has created yet
    store.wait_for_looks()
    mine.check()
    store.put(LEASE, stranger(term=6).build())
    until(lambda: has_stopped(mine))
    with pytest.raises(AnotherPublisherError, match="process 7 on host far, has taken"):
        mine.check()


def has_stopped(one: PublisherLease) -> bool:
    try:
        one.check()
    except AnotherPublisherError:
        return True
    return False


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

    def reason(self) -> Exception | None:
        """Why it has ended by itself."""
        self._thread.join(PATIENCE_S)
        return self.ended

    def end(self) -> None:
        self.ended = self.ended or Exception("the test is over")
        self._thread.join()
        with suppress(PulseError):
            self.publisher.close()


@pytest.fixture
def strangers(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every publisher counts as one of another process."""
    monkeypatch.setattr(LeaseRecord, "is_ours", False)


def delaying(verb: str, seconds: float) -> Callable[[str, str], None]:
    return lambda done, key: time.sleep(seconds) if done == verb and key.startswith("manifests/") else None


@pytest.mark.parametrize("slows", ["none", slow("the new one"), "the new one's store", "the old one"])
def test_one_that_takes_over_wins_although_the_other_publishes_every_few_milliseconds(
    strangers: None, slows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not both stop, and not the one that was started to take over."""
    memory = MemoryStore()
    for number in range(3 if slows == "none" else 1):
        ours, theirs = Shared(memory), Shared(memory)
        first = Trained(ours)
        if slows == "the old one":
            monkeypatch.setattr(lease, "ANSWER_S", 0.2)
            ours.before = delaying("create", 0.4)  # longer than it may take to answer
        elif slows == "the new one":
            theirs.before = delaying("create", 0.3)
        elif slows == "the new one's store":
            theirs.before = lambda verb, key: time.sleep(0.01)
        second = Publisher(theirs, take_over=True, resume=True)
        try:
            report = second.publish(weights(1000), step=1000 * (number + 1))
            ended = first.reason()
            assert isinstance(ended, AnotherPublisherError), ended
            assert "has taken this run over" in str(ended)
            assert second.publish(weights(1001), step=1000 * (number + 1)).version == (report.version or 0) + 1
        finally:
            first.end()
            second.close()


def test_one_that_took_over_from_a_live_publisher_and_lost_gives_the_lease_back(
    strangers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ours.wait_for_looks()
    record = parse(memory.get(LEASE))
    assert record
    monkeypatch.setattr(lease, "ANSWER_S", 0.2)
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
    both, ended = threading.Barrier(2), threading.Barrier(2)

    def take_over() -> None:
        store = Shared(memory)
        store.before = lambda verb, key: (
            both.wait(PATIENCE_S) if (verb, key) == ("put", LEASE) and not store.writes[:-1] else None
        )
        publisher = Publisher(store, take_over=True)
        try:
            outcomes.append(publisher.publish(weights(1000), step=1000))
        except AnotherPublisherError as e:
            outcomes.append(e)
        ended.wait(PATIENCE_S)
        with suppress(PulseError):
            publisher.close()

    threads = [threading.Thread(target=take_over) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert isinstance(first.reason(), AnotherPublisherError)
    first.end()
    lost = [one for one in outcomes if isinstance(one, AnotherPublisherError)]
    assert len(outcomes) == 2
    assert len(lost) == 1
    assert "was also started with take_over=True" in str(lost[0])


def test_one_that_is_closed_waits_no_longer_and_leaves_the_lease_to_the_other(strangers: None) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    publisher = Publisher(store, take_over=True)
    closing = store.act_after_looks(publisher.close)
    with pytest.raises(ClosedError, match="process 7 on host far"):
        publisher.publish(weights(0))
    closing.join()
    until(lambda: parse(store.get(LEASE)) == stranger())


def test_one_that_does_not_answer_is_waited_for_no_longer(strangers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "ANSWER_S", 0.2)
    store = Shared()
    store.put(LEASE, stranger().build())
    began = time.monotonic()
    with Publisher(store, take_over=True) as publisher:
        publisher.publish(weights(0))
        assert 0.2 <= time.monotonic() - began < PATIENCE_S
        until(lambda: (found := parse(store.get(LEASE))) and (found.term, found.asks, found.ended) == (2, False, False))


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
    memory = MemoryStore()
    stores = [Shared(memory), Shared(memory)]
    older, newer = map(PublisherLease, stores)
    older.hold()
    first = stored(memory)
    newer.hold()
    second = stored(memory)
    assert second.token != first.token
    for store in stores:
        store.wait_for_looks()
    assert stored(memory).token == second.token
    older.close()
    older.join()
    stores[1].wait_for_looks()
    assert (stored(memory).token, stored(memory).ended) == (second.token, False)
    older.check()
    newer.close()
    newer.join()


def stored(memory: Store) -> LeaseRecord:
    found = parse(memory.get(LEASE))
    assert found
    return found


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


def test_a_lease_that_was_deleted_is_put_again_unless_the_run_was_removed(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "RENEW_S", PATIENCE_S)  # no renewal is under way while the test deletes the lease
    store = Shared()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
        store.delete(LEASE)
        store.wait_for_looks()
        assert not stored(store).ended
        store.delete(keys.HEAD)
        store.delete(LEASE)
        store.wait_for_looks()
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
    with caplog.at_level(logging.WARNING), Publisher(store) as publisher:
        publisher.publish(weights(0))
        if answer == "loses":
            store.wait_for_looks()
        publisher.publish(weights(1), step=1)
    assert versions(store.store) == [0, 1]
    said = [one.getMessage() for one in caplog.records if one.name == lease.__name__]
    assert len(said) == (answer == "refuses")
    assert not said or said[0].startswith("The lease of this publisher cannot be read or written")


def test_a_team_has_one_lease_and_all_its_ranks_are_refused_together(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    memory, training = MemoryStore(), Training()
    stores = [Shared(memory), Shared(memory)]
    first = Group(stores, 2)
    first.publish(training.weights)
    assert [LEASE in store.writes for store in stores] == [True, False]
    memory.put(LEASE, stranger(term=9).build())
    until(lambda: "has taken this run over" in caplog.text)
    training.step()
    errors = first.try_publish(training.weights)
    assert all(isinstance(e, AnotherPublisherError) and "has taken this run over" in str(e) for e in errors)
    assert versions(memory) == [0]


# Another host


def test_a_lease_of_another_host_ends_by_the_stores_clock_whatever_the_clock_here(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores_s = [1e9]  # another time than this machine's
    monkeypatch.setattr("pulsesync.store.memory.time", SimpleNamespace(time=lambda: stores_s[0]))
    store = Shared()
    store.put(LEASE, stranger().build())
    stores_s[0] += lease.LEASE_S - 0.2
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert 0.15 < time.monotonic() - began < PATIENCE_S
    store.put(LEASE, stranger().build())
    stores_s[0] += 3600
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(1), step=1)
    assert time.monotonic() - began < PATIENCE_S


def test_where_the_store_shows_no_time_a_lease_is_watched_for_as_long_as_it_lasts(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    store = Shared()
    store.put(LEASE, stranger().build())

    def refuse(verb: str, key: str) -> None:
        if verb == "list":
            raise StoreError("it cannot list", key=key)

    store.before = refuse
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert 0.3 <= time.monotonic() - began < PATIENCE_S


def at_a_later_look(store: Shared, act: Callable[[], object]) -> None:
    """Do something when a publisher that has found a lease looks at it again."""

    def before(verb: str, key: str) -> None:
        if (verb, key) == ("get", LEASE) and len(store.got(LEASE)) == 3:
            act()

    store.before = before


def test_a_lease_that_is_renewed_meanwhile_is_that_of_a_live_publisher(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    at_a_later_look(store, lambda: store.store.put(LEASE, stranger(renewals=1).build()))
    with Publisher(store) as publisher, pytest.raises(AnotherPublisherError, match="process 7 on host far has just"):
        publisher.publish(weights(0))
    assert versions(store.store) == []
    assert parse(store.get(LEASE)) == stranger(renewals=1)
    (said,) = (one.getMessage() for one in caplog.records)
    assert "Another publisher, process 7 on host far, has published to this run. Its lease ends in 60 s" in said
    assert "Publisher(take_over=True) does not wait" in said


@pytest.mark.parametrize("end", ["released", "removed"])
def test_a_lease_that_ends_meanwhile_is_not_waited_for(quick: None, end: str) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    act = {
        "released": lambda: store.store.put(LEASE, stranger(ended=True).build()),
        "removed": lambda: store.delete(LEASE),
    }[end]
    at_a_later_look(store, act)
    began = time.monotonic()
    with Publisher(store) as publisher:
        publisher.publish(weights(0))
    assert time.monotonic() - began < PATIENCE_S < lease.LEASE_S


def test_close_in_another_thread_ends_the_wait(quick: None) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    publisher = Publisher(store)
    closing = store.act_after_looks(publisher.close)
    with pytest.raises(ClosedError, match=r"closed while it waited.* on host far"):
        publisher.publish(weights(0))
    closing.join()


def test_a_signal_ends_the_wait(quick: None) -> None:
    store = Shared()
    store.put(LEASE, stranger().build())
    with Publisher(store) as publisher:
        began = time.monotonic()
        signalling = store.act_after_looks(lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights(0))
        assert time.monotonic() - began < PATIENCE_S < lease.LEASE_S
        with pytest.raises(NotFoundError):
            store.get(keys.HEAD)
    signalling.join()


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
