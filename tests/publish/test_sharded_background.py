"""Ranks that publish with wait=False: versions that end with the same call on all ranks, failures, anchors, closing.

Ranks are threads here. What one of them is to wait for is a gate: nothing depends on how fast a thread is.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pulsesync.errors import AnotherPublisherError, ClosedError, GroupError, PulseError, StateError, StoreError
from pulsesync.format.manifest import Manifest
from pulsesync.maintain.verify import RunVerifier
from pulsesync.publish.cadence import Cadence
from pulsesync.publish.publisher import Publisher
from pulsesync.run import keys
from pulsesync.store import MemoryStore, Store
from tests.publish.test_sharded import Group, Rank, Threads, synced
from tests.readers import Subscriber
from tests.runs import Training, Watched, down, equal, kept, record, version, versions, worker

pytestmark = pytest.mark.usefixtures("parts_as_objects")

PATIENCE_S = 20.0


class Gate:
    """Stops the threads that reach it until it is opened."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def stop_here(self) -> None:
        self.reached.set()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"

    def wait_reached(self) -> None:
        assert self.reached.wait(PATIENCE_S), "no thread reached the gate"

    def open(self) -> None:
        self._open.set()


class Trainers(Group):
    """Ranks whose trainers call publish one by one, each when the test says so: `go` for one, `go_all` for all."""

    def __init__(self, store: Store | Sequence[Store], size: int = 2, steps: int = 12, **options: Any) -> None:
        super().__init__(store, size, **options)
        training = Training()
        self.states = [kept(training.weights)]  # by step
        for _ in range(steps):
            training.step()
            self.states.append(kept(training.weights))

    def go(self, rank: int, step: int, **options: Any) -> Any:
        """Publish a step on one rank, from memory that changes afterwards, as a trainer's does."""
        mine = kept(self.states[step])
        shards = self.split(mine, rank, self.crew.size)
        out = self.pubs[rank].publish(shards, step=step, **{"wait": False, **options})
        for array in mine.values():
            array.view(np.uint16)[...] = 0x5A5A
        return out

    def go_all(self, step: int, **options: Any) -> list[Any]:
        """Publish a step on all ranks concurrently; return what each returned or raised."""
        return self.crew.act(lambda team: self.go(team.rank, step, **options))

    def begin(self) -> None:
        """Publish step 0, so that there is a base."""
        for one in self.go_all(0):
            assert one.result(PATIENCE_S).version == 0
        self.flush()

    def each(self, work: Callable[[Publisher], Any]) -> list[Any]:
        return self.crew.act(lambda team: work(self.pubs[team.rank]))

    def close(self) -> list[Any]:
        return self.each(lambda pub: pub.close())

    def assert_whole(self, store: Store) -> list[Manifest]:
        """Check that every version is what all ranks had at its step; return the records."""
        found = [version(store, number) for number in versions(store)]
        for one in found:
            held = worker()
            sub = Subscriber(store)
            sub.sync(held, version=one.version)
            sub.verify()
            assert equal(held, self.states[one.step]), f"version {one.version} is not step {one.step}"
        return found


def results(futures: Sequence["Future[Any]"]) -> list[Any]:
    """What the futures of ranks gave: reports, or exceptions."""
    return [future.exception(PATIENCE_S) or future.result() for future in futures]


@contextmanager
def stopped(threads: Threads) -> Iterator[None]:
    """Keep a rank from sending, so that its trainer can run ahead."""
    threads.wait()
    gates = [Gate(), Gate()]
    for gate in gates:  # one for each thread
        threads.submit(gate.stop_here)
        gate.wait_reached()
    try:
        yield
    finally:
        for gate in gates:
            gate.open()


# -- what is published ---------------------------------------------------------------------------------------------


def test_a_version_is_what_the_ranks_had_when_they_called_and_the_weights_may_change_afterwards() -> None:
    store = MemoryStore()
    ranks = Trainers(store, 3)
    for step in range(4):
        reports = results(ranks.go_all(step))
        assert {(r.version, r.step, r.changed) for r in reports} == {(step, step, reports[0].changed)}
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == [0, 1, 2, 3]


def test_publish_returns_while_the_version_is_sent() -> None:
    store, gate = Watched(), Gate()
    ranks = Trainers(store)
    ranks.begin()
    store.before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(1)
    gate.wait_reached()
    assert not any(future.done() for future in futures)
    gate.open()
    assert [report.version for report in results(futures)] == [1, 1]
    ranks.close()


def test_steps_that_wait_are_coalesced_into_one_version_and_all_futures_have_its_report() -> None:
    store, gate = Watched(), Gate()
    ranks = Trainers(store)
    ranks.begin()
    store.before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    first = ranks.go_all(1)
    gate.wait_reached()
    later = [ranks.go_all(step) for step in (2, 3, 4)]
    gate.open()
    assert [report.step for report in results(first)] == [1, 1]
    for futures in later:
        assert [(r.version, r.step, r.coalesced) for r in results(futures)] == [(2, 4, 2)] * 2
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store.store)] == [0, 1, 4]


def test_a_rank_that_is_ahead_waits_for_the_call_of_the_others_and_no_version_mixes_steps() -> None:
    store, gate = Watched(), Gate()
    stores = [Watched(store), store]
    ranks = Trainers(stores)
    ranks.begin()
    stores[0].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    ranks.go_all(1)
    gate.wait_reached()
    for step in (2, 3, 4):
        ranks.go(1, step)  # rank 1 coalesces these; rank 0 has not called yet
    behind = [ranks.go(0, 2)]
    gate.open()
    behind += [ranks.go(0, 3), ranks.go(0, 4)]
    assert {(r.version, r.step) for r in results(behind)} == {(2, 4)}
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store.store)] == [0, 1, 4]


@given(st.integers(0, 2**32 - 1), st.integers(2, 3), st.sampled_from([1, 2, 3, "auto"]))
@settings(max_examples=settings().max_examples // 6)
def test_however_far_ranks_run_ahead_of_each_other_every_version_is_one_call_of_all(
    seed: int, size: int, every: Any
) -> None:
    rng = np.random.default_rng(seed)
    store = MemoryStore()
    ranks = Trainers(store, size, publish_every=every, max_behind=4)
    delays = rng.choice([0.0, 0.0, 0.002, 0.01], (size, 13))
    alone = [bool(n) for n in rng.integers(0, 4, 13) == 0] if every == 1 else [False] * 13

    def train(team: Rank) -> list[Any]:
        futures = []
        for step in range(13):
            time.sleep(delays[team.rank, step])
            futures.append(ranks.go(team.rank, step, now=step == 12, coalesce=not alone[step]))
        ranks.pubs[team.rank].close()
        return [(r.version, r.step) for r in results(futures) if r.version is not None]

    reports = ranks.crew.act(train)
    assert all(one == reports[0] for one in reports), reports
    found = ranks.assert_whole(store)
    assert found[-1].step == 12
    assert {step for step in range(13) if alone[step]} <= {one.step for one in found}


def test_a_step_that_is_not_to_be_coalesced_is_a_version_of_its_own_on_all_ranks() -> None:
    store = MemoryStore()
    ranks = Trainers(store, 3)
    ranks.crew.act(lambda team: [ranks.go(team.rank, step, coalesce=False) for step in range(6)])
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == list(range(6))


def test_publish_every_makes_the_same_versions_on_all_ranks_and_now_sends_a_step_in_between() -> None:
    store = MemoryStore()
    ranks = Trainers(store, publish_every=3)
    found = []
    for step in range(9):
        reports = results(ranks.go_all(step, now=step == 5))
        assert len({(r.version, r.coalesced) for r in reports}) == 1
        found.append(reports[0].version)
    assert found == [0, None, None, 1, None, 2, None, None, 3]
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == [0, 3, 5, 8]


def test_auto_uses_the_target_of_the_coordinator_on_all_ranks_from_the_same_call_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, made, make = MemoryStore(), list[Cadence](), Cadence.__init__
    targets = {0: 3, 1: 1}  # rank 1 would publish every step

    def note(cadence: Cadence, *args: Any, **options: Any) -> None:
        make(cadence, *args, **options)
        made.append(cadence)  # those of the ranks, in their order

    monkeypatch.setattr(Cadence, "__init__", note)
    monkeypatch.setattr(Cadence, "target", lambda cadence: targets[made.index(cadence)])
    ranks = Trainers(store, publish_every="auto", max_behind=4)
    assert len(made) == 2
    found = [[r.version for r in results(ranks.go_all(step))] for step in range(8)]
    targets[0] = 2
    found += [[r.version for r in results(ranks.go_all(step))] for step in range(8, 12)]
    assert all(a == b for a, b in found)
    assert [a for a, _ in found] == [0, None, None, 1, None, None, 2, None, None, 3, None, 4]
    ranks.close()
    ranks.assert_whole(store)


def test_a_masters_cast_a_shared_spool_and_a_base_on_the_host_work_in_the_background(tmp_path: Path) -> None:
    store = MemoryStore()
    ranks = Trainers(store, 3, spool=tmp_path, keep="host", cast="BF16")
    for step in range(4):
        results(ranks.go_all(step))
    ranks.close()
    assert {path.name for path in tmp_path.iterdir()} >= {"cache", "outbox-0", "outbox-1", "outbox-2"}
    assert not list(tmp_path.glob("outbox-*/*"))
    again = Trainers(store, 3, spool=tmp_path, keep="host", cast="BF16")
    assert [report.version for report in results(again.go_all(5))] == [4, 4, 4]
    assert version(store, 4).base is not None
    again.close()
    again.assert_whole(store)


# -- anchors -------------------------------------------------------------------------------------------------------


def test_an_anchor_is_written_while_versions_go_on_and_is_complete() -> None:
    base, gate = MemoryStore(), Gate()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    stores[1].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(0)
    assert [report.version for report in results(futures)] == [0, 0]
    gate.wait_reached()  # rank 1 uploads its share of the anchor
    assert not list(base.list("anchors/"))
    stores[1].before = lambda verb, key: None
    assert [report.version for report in results(ranks.go_all(1))] == [1, 1]
    assert not list(base.list("anchors/"))
    gate.open()
    for threads in ranks.threads:
        threads.wait()
    assert [report.version for report in results(ranks.go_all(2))] == [2, 2]
    assert len(record(base, keys.anchor_key(0)).parts) == 2  # recorded with the version
    assert equal(synced(base), ranks.states[2])
    ranks.close()
    assert [one.fault for one in RunVerifier(base).run() if one.fault] == []


def test_flush_has_the_anchor_in_the_store() -> None:
    store = MemoryStore()
    ranks = Trainers(store, 3)
    ranks.go_all(0)
    ranks.flush()
    assert len(record(store, keys.anchor_key(0)).parts) == 3
    assert equal(synced(store), ranks.states[0])


def test_anchors_in_the_background_come_with_every_epoch_that_needs_one() -> None:
    store = MemoryStore()
    ranks = Trainers(store, epoch_patches=2, anchor_every=0.0)
    for step in range(7):
        results(ranks.go_all(step))
        for threads in ranks.threads:
            threads.wait()
    ranks.close()
    assert [entry.key for entry in store.list("anchors/")] == [keys.anchor_key(n) for n in range(4)]
    for number in range(4):
        held = worker()
        fresh = Subscriber(store, epoch_patches=2)
        fresh.sync(held, version=record(store, keys.anchor_key(number)).version)
        fresh.verify()
        assert equal(held, ranks.states[2 * number])


def test_a_share_of_an_anchor_that_cannot_be_uploaded_is_raised_by_flush_and_comes_with_a_later_version() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    stores[1].before = lambda verb, key: _retryable(key) if verb == "put" else None
    results(ranks.go_all(0))
    errors = ranks.each(lambda pub: pub.flush())
    assert all(isinstance(error, StoreError) for error in errors)
    assert errors[0].failed_rank == 1
    stores[1].before = lambda verb, key: None
    results(ranks.go_all(1))
    ranks.flush()
    assert len(record(base, keys.anchor_key(0)).parts) == 2
    assert equal(synced(base), ranks.states[1])


def _retryable(key: str) -> None:
    raise StoreError("the line is down", key=key, retryable=True)


# -- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_in_the_background_fails_the_version_for_all_by_name_and_the_next_covers_it(
    failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    base = MemoryStore()
    stores = [Watched(base) for _ in range(3)]
    ranks = Trainers(stores, 3)
    ranks.begin()
    stores[failing].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    errors = results(ranks.go_all(1))
    assert all(isinstance(error, StoreError) for error in errors)
    assert [getattr(error, "failed_rank", None) for error in errors] == [
        None if rank == failing else failing for rank in range(3)
    ]
    assert caplog.text.count("Step 1 was not published") == 3
    assert {pub.version for pub in ranks.pubs} == {0}
    stores[failing].before = lambda verb, key: None
    assert [(r.version, r.step) for r in results(ranks.go_all(2))] == [(1, 2)] * 3
    ranks.close()
    assert [one.step for one in ranks.assert_whole(base)] == [0, 2]


def test_a_failure_that_was_not_read_is_raised_by_the_same_later_call_on_all_ranks() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    ranks.go_all(1)
    for threads in ranks.threads:
        threads.wait()
    stores[1].before = lambda verb, key: None
    assert [report.version for report in results(ranks.go_all(2))] == [1, 1]  # where they agree on the call
    raised = ranks.go_all(3)
    assert all(isinstance(error, StoreError) for error in raised)
    assert raised[0].failed_rank == 1
    assert [(r.version, r.step) for r in results(ranks.go_all(3))] == [(2, 3)] * 2  # the call may be repeated
    ranks.close()
    assert [one.step for one in ranks.assert_whole(base)] == [0, 2, 3]


def test_a_failure_that_only_one_rank_has_read_is_raised_on_all_ranks_all_the_same() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    assert isinstance(ranks.go_all(1)[0].exception(PATIENCE_S), StoreError)
    ranks.threads[1].wait()
    stores[1].before = lambda verb, key: None
    results(ranks.go_all(2))
    assert [type(error) for error in ranks.go_all(3)] == [StoreError, StoreError]
    ranks.close()


def test_a_failure_that_a_version_makes_up_for_is_raised_on_all_ranks_however_early_one_calls() -> None:
    base, gate = MemoryStore(), Gate()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    ranks.go_all(1)
    for threads in ranks.threads:
        threads.wait()
    stores[1].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(2)
    gate.wait_reached()
    with pytest.raises(StoreError):
        ranks.go(0, 3)  # before version 1 is committed
    gate.open()
    assert [report.version for report in results(futures)] == [1, 1]
    with pytest.raises(StoreError):
        ranks.go(1, 3)  # after it
    results(ranks.go_all(4))
    ranks.close()
    assert [one.step for one in ranks.assert_whole(base)] == [0, 2, 4]


def test_a_failure_that_all_ranks_have_read_is_not_raised_again() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    results(ranks.go_all(1))
    stores[1].before = lambda verb, key: None
    assert [[r.version for r in results(ranks.go_all(step))] for step in (2, 3, 4)] == [[1, 1], [2, 2], [3, 3]]
    assert ranks.close() == [None, None]


def test_a_store_that_may_work_again_is_raised_only_after_max_failures_versions_on_all_ranks_in_the_same_call() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores, max_failures=3)
    ranks.begin()
    stores[1].before = lambda verb, key: _retryable(key) if key.startswith("parts/") else None
    for step in (1, 2, 3, 4):
        assert all(isinstance(one, Future) for one in ranks.go_all(step)), step
        for threads in ranks.threads:
            threads.wait()
    raised = ranks.go_all(5)
    assert all(isinstance(error, StoreError) and error.retryable for error in raised)
    stores[1].before = lambda verb, key: None
    assert [(r.version, r.step) for r in results(ranks.go_all(6))] == [(1, 6)] * 2
    ranks.close()
    assert [one.step for one in ranks.assert_whole(base)] == [0, 6]


def test_a_state_error_is_raised_at_once_on_its_rank_and_in_the_same_later_call_by_all() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    wrong = {"layer.0.weight": np.zeros((3, 3), ml_dtypes.bfloat16)}

    def call(team: Rank) -> Any:
        return ranks.go(0, 1) if team.rank == 0 else ranks.pubs[1].publish(wrong, step=1, wait=False)

    future, raised = ranks.crew.act(call)
    assert isinstance(raised, StateError)
    assert isinstance(future, Future)
    for threads in ranks.threads:
        threads.wait()
    assert [(r.version, r.step) for r in results(ranks.go_all(2))] == [(1, 2)] * 2
    again = ranks.go_all(3)
    assert all(isinstance(error, StateError) for error in again)
    assert again[0].failed_rank == 1
    assert [(r.version, r.step) for r in results(ranks.go_all(3))] == [(2, 3)] * 2
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == [0, 2, 3]


def test_a_state_error_of_a_rank_that_is_ahead_fails_the_version_when_the_others_have_made_that_call() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    wrong = {"layer.0.weight": np.zeros((3, 3), ml_dtypes.bfloat16)}
    with stopped(ranks.threads[1]):
        ranks.go(1, 1)
        with pytest.raises(StateError):
            ranks.pubs[1].publish(wrong, step=2, wait=False)
    first, second = ranks.go(0, 1), ranks.go(0, 2)
    errors = results([first, second])
    assert all(isinstance(error, StateError) and error.failed_rank == 1 for error in errors)
    ranks.threads[1].wait()
    assert [(r.version, r.step) for r in results(ranks.go_all(3))] == [(1, 3)] * 2
    assert ranks.close() == [None, None]
    assert [one.step for one in ranks.assert_whole(store)] == [0, 3]


def test_ranks_that_are_at_different_calls_when_the_last_version_cannot_be_settled_go_on_with_the_same_call() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[0].before = lambda verb, key: _retryable(key) if verb == "create" else None
    results(ranks.go_all(1))
    stores[0].before = lambda verb, key: _retryable(key) if key.startswith("manifests/") else None
    with stopped(ranks.threads[1]):
        ahead = [ranks.go(1, 2), ranks.go(1, 3)]
    behind = [ranks.go(0, 2)]
    assert all(isinstance(error, StoreError) for error in results([*ahead, *behind]))
    stores[0].before = lambda verb, key: None
    assert isinstance(ranks.go(0, 3).exception(PATIENCE_S), StoreError)  # in no version: rank 1 has none for it
    assert [(r.version, r.step) for r in results(ranks.go_all(4))] == [(1, 4)] * 2
    ranks.close()
    assert [one.step for one in ranks.assert_whole(base)] == [0, 4]


def test_ranks_without_the_same_base_resume_the_run_in_the_same_call_whichever_is_ahead() -> None:
    store = MemoryStore()
    ranks = Trainers(store, publish_every=2)
    ranks.begin()
    with stopped(ranks.threads[1]):
        ahead = [ranks.go(1, step) for step in (1, 2, 3)]
    sender = ranks.pubs[0]._sender
    assert sender is not None
    sender.committed.base = None
    failed = ranks.crew.act(lambda team: ranks.go(0, 1) if team.rank == 0 else ahead[1].exception(PATIENCE_S))
    assert all(isinstance(error, GroupError) for error in failed)
    refused = [ranks.go(0, step).exception(PATIENCE_S) for step in (2, 3)]
    assert all(isinstance(error, GroupError) for error in refused)
    assert [(r.version, r.step) for r in results(ranks.go_all(4))] == [(1, 4)] * 2
    assert version(store, 1).base is not None
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == [0, 4]


def test_ranks_that_publish_different_steps_in_the_background_are_named_and_go_on() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    errors = results([ranks.go(0, 1), ranks.go(1, 2)])
    assert all(isinstance(error, GroupError) and "different steps: (1, 2)" in str(error) for error in errors)
    assert [(r.version, r.step) for r in results(ranks.go_all(3))] == [(1, 3)] * 2
    ranks.close()
    ranks.assert_whole(store)


def test_another_publisher_ends_all_ranks_for_good() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    other = Trainers(store)
    results(other.go_all(5))
    assert all(isinstance(error, AnotherPublisherError) for error in results(ranks.go_all(1)))
    for step in (2, 3):
        assert all(isinstance(error, AnotherPublisherError) for error in ranks.go_all(step))
    other.close()
    ranks.close()


def test_a_version_that_waits_on_one_rank_alone_fails_when_another_publisher_is_found() -> None:
    base, gate = MemoryStore(), Gate()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    other = Trainers(base)
    results(other.go_all(5))
    stores[1].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(1)
    gate.wait_reached()
    waiting = ranks.go(0, 2)  # rank 1 makes this call later, when nothing can be published any more
    gate.open()
    assert all(isinstance(error, AnotherPublisherError) for error in results([*futures, waiting]))
    with pytest.raises(AnotherPublisherError):
        ranks.go(1, 2)
    other.close()
    ranks.close()


# -- a team that is lost, and closing ------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_any_more_is_an_error_of_all_that_was_queued_and_of_every_later_call() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    with stopped(ranks.threads[0]):
        futures = [ranks.go(0, 1), ranks.go(0, 2)]  # rank 1 has stopped
        ranks.crew.abort()  # as when the time is over
    assert all(isinstance(error, GroupError) for error in results(futures))
    for _ in range(2):
        with pytest.raises(GroupError):
            ranks.go(0, 3)
    ranks.pubs[0].close()  # the error was read: and it does not wait for rank 1 again
    assert versions(store) == [0]


def test_close_after_a_lost_team_raises_what_was_not_read_and_waits_for_nobody() -> None:
    store, calls = MemoryStore(), []
    ranks = Trainers(store)
    for one in ranks.go_all(0):
        one.result(PATIENCE_S)  # an anchor is not recorded yet
    ranks.crew.abort()
    ranks.go(0, 1)
    ranks.threads[0].wait()
    ranks.crew.before = lambda rank, number: calls.append(rank)
    with pytest.raises(GroupError):
        ranks.pubs[0].close()
    assert not calls
    with pytest.raises(ClosedError):
        ranks.go(0, 2)


def test_a_version_that_waits_when_the_team_is_lost_is_not_tried_again() -> None:
    store, gate = MemoryStore(), Gate()
    stores = [Watched(store), Watched(store)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[0].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(1)
    gate.wait_reached()
    waiting = ranks.go(0, 2)
    ranks.crew.abort()
    ranks.threads[1].wait()  # rank 1 has waited for rank 0 in vain
    gathers: list[int] = []
    ranks.crew.before = lambda rank, number: gathers.append(rank)
    gate.open()
    assert all(isinstance(error, GroupError) for error in results([*futures, waiting]))
    assert gathers == [0]
    assert all(isinstance(error, GroupError) for error in ranks.go_all(3))


def test_close_sends_what_is_queued_on_all_ranks() -> None:
    store = MemoryStore()
    ranks = Trainers(store, 3)
    ranks.crew.act(lambda team: [ranks.go(team.rank, step) for step in range(5)])
    assert ranks.close() == [None] * 3
    assert ranks.assert_whole(store)[-1].step == 4
    assert all(isinstance(error, ClosedError) for error in ranks.go_all(5))


def test_a_rank_that_closes_before_it_makes_the_call_of_the_others_fails_the_version_at_once_and_by_name() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    ranks.begin()
    with stopped(ranks.threads[1]):
        ahead = [ranks.go(1, 1), ranks.go(1, 2)]
    mine = ranks.go(0, 1)
    with pytest.raises(GroupError, match=r"2 times and then closed.* 3 times"):
        ranks.pubs[0].close()
    errors = results(ahead)
    assert all(isinstance(error, GroupError) and error.failed_rank == 0 for error in errors)
    assert isinstance(mine.exception(PATIENCE_S), GroupError)
    assert versions(store) == [0]


def test_close_after_a_failure_raises_it_on_all_ranks_once() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    ranks.go_all(1)
    errors = ranks.close()
    assert all(isinstance(error, StoreError) for error in errors)
    assert errors[0].failed_rank == 1
    assert ranks.close() == [None, None]


def test_flush_raises_a_failure_on_all_ranks_and_a_version_is_published_after_it() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[0].before = lambda verb, key: down(key) if key.startswith("parts/") else None
    ranks.go_all(1)
    errors = ranks.each(lambda pub: pub.flush())
    assert all(isinstance(error, StoreError) for error in errors)
    assert errors[1].failed_rank == 0
    stores[0].before = lambda verb, key: None
    assert [(r.version, r.step) for r in results(ranks.go_all(2))] == [(1, 2)] * 2
    ranks.close()
    ranks.assert_whole(base)


def test_ranks_wait_for_a_version_and_go_on_in_the_background_by_turns() -> None:
    store = MemoryStore()
    ranks = Trainers(store)
    for step in range(8):
        out = ranks.go_all(step, wait=step % 3 == 0)
        if step % 3 == 0:
            assert {report.step for report in out} == {step}
    ranks.close()
    found = ranks.assert_whole(store)
    assert {0, 3, 6, 7} <= {one.step for one in found}


def test_callers_are_not_kept_while_another_rank_uploads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    store, gate = MemoryStore(), Gate()
    stores = [Watched(store), Watched(store)]
    ranks = Trainers(stores)
    ranks.begin()
    stores[1].before = lambda verb, key: gate.stop_here() if verb == "put" and key.startswith("parts/") else None
    futures = ranks.go_all(1)
    gate.wait_reached()
    for step in range(2, 9):
        assert all(isinstance(one, Future) for one in ranks.go_all(step))  # all return while rank 1 is stopped
    assert not futures[0].done()
    gate.open()
    ranks.close()
    assert [one.step for one in ranks.assert_whole(store)] == [0, 1, 8]
    assert not caplog.records


def test_errors_of_a_rank_are_of_the_librarys_kinds() -> None:
    base = MemoryStore()
    stores = [Watched(base), Watched(base)]
    ranks = Trainers(stores)
    ranks.begin()

    def broken(verb: str, key: str) -> None:
        raise OSError("no space left")

    stores[1].before = broken
    errors = results(ranks.go_all(1))
    assert isinstance(errors[0], GroupError)
    assert isinstance(errors[0], PulseError)
    assert (errors[0].failed_rank, type(errors[1])) == (1, OSError)
    stores[1].before = lambda verb, key: None
    assert [(r.version, r.step) for r in results(ranks.go_all(2))] == [(1, 2)] * 2
    ranks.close()
