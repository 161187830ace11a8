"""The state of each worker, by its heartbeat and by what the run has; and the run itself at a glance."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync.errors import NothingPublishedError, StoreError
from pulsesync.run.fleet import WRONG
from pulsesync.run.heartbeats import Heartbeat
from pulsesync.store import MemoryStore, ObjectEntry

RECORD = Heartbeat(
    worker="w", host="node", pid=7, package="0.1", time_s=1e9, version=4, step=40, newest=4, synced_s=1e9
)


class ClockedStore(MemoryStore):
    """Lists heartbeats as if they were some seconds old."""

    def __init__(self) -> None:
        super().__init__()
        self.old_s: dict[str, float] = {}

    def list(self, prefix: str) -> Any:
        for entry in super().list(prefix):
            yield ObjectEntry(entry.key, entry.size_bytes, entry.modified_s - self.old_s.get(entry.key, 0.0))


@pytest.fixture
def store() -> ClockedStore:
    store = ClockedStore()
    weights = {"w": np.zeros(1000, np.float32)}
    with pulse.Publisher(store) as publisher:
        for step in range(0, 50, 10):
            weights["w"][: step + 1] += 1
            publisher.publish(weights, step=step)
    return store


def put(store: ClockedStore, old_s: float = 0.0, **facts: Any) -> None:
    store.put("heartbeats/w", replace(RECORD, **facts).build())
    store.old_s["heartbeats/w"] = old_s


def test_a_run_at_a_glance(store: ClockedStore) -> None:
    pulse.move_pointer(store, "stable", 3)
    status = pulse.read_fleet(store)
    assert (status.newest.version, status.newest.step) == (4, 40)
    assert [one.version for one in status.versions] == [4, 3, 2, 1, 0]
    assert all(one.size_bytes > 0 for one in status.versions[:-1])
    assert status.anchor is not None
    assert status.anchor.version == 0
    assert status.pointers == {"stable": 3}
    assert 0 <= status.age_s < 60
    assert status.workers == ()
    assert status.is_well
    assert status.signed_by is None


@pytest.mark.parametrize(
    ("state", "lag", "old_s", "facts"),
    [
        ("ok", 0, 0, {}),
        ("ok", 2, 0, {"version": 2}),
        ("behind", 4, 0, {"version": 0}),
        ("ok", 0, 0, {"version": 1, "follows": "stable"}),
        ("behind", 3, 0, {"version": 4, "follows": "stable"}),  # it was rolled back, and this worker was not
        ("ok", None, 0, {"version": 4, "follows": "none"}),
        ("joining", None, 0, {"version": None, "synced_s": None}),
        ("failing", 0, 0, {"error": "disk full"}),
        ("failing", None, 0, {"version": None, "error": "disk full"}),
        ("failing", 0, 0, {"recount_equal": False, "recounted_s": 1e9 + 1}),
        ("ok", 0, 0, {"recount_equal": False, "recounted_s": 1e9 - 1}),  # it has been repaired since
        ("torn", None, 0, {"version": None, "error": "half", "torn": True}),
        ("silent", 0, 121, {}),
        ("silent", 0, 121, {"error": "disk full"}),
        ("ok", 0, 100, {}),
        ("ended", 0, 500, {"ended": True}),
    ],
)
def test_states(store: ClockedStore, state: str, lag: int | None, old_s: float, facts: dict[str, Any]) -> None:
    pulse.move_pointer(store, "stable", 1)
    put(store, old_s, **facts)
    status = pulse.read_fleet(store, max_lag=2)
    (worker,) = status.workers
    assert (worker.name, worker.state, worker.lag) == ("w", state, lag)
    assert abs(worker.seen_s - old_s) < 30
    assert status.is_well == (state not in WRONG)
    assert (worker.problem is None) == status.is_well


def test_limits_are_those_that_are_given(store: ClockedStore) -> None:
    put(store, 50, version=0)
    assert pulse.read_fleet(store).is_well
    assert [one.state for one in pulse.read_fleet(store, max_lag=3).workers] == ["behind"]
    assert [one.state for one in pulse.read_fleet(store, max_age_s=40).workers] == ["silent"]


def test_a_record_that_cannot_be_read_is_shown_as_such(store: ClockedStore) -> None:
    store.put("heartbeats/w", b"\x1b[2J")
    (worker,) = pulse.read_fleet(store).workers
    assert (worker.state, worker.version) == ("unreadable", None)
    assert worker.problem is not None
    assert worker.problem.isprintable()


def test_what_is_no_heartbeat_raises_no_alarm(store: ClockedStore) -> None:
    put(store)
    store.put("heartbeats/junk", b"{}")
    assert pulse.read_fleet(store).is_well
    put(store, 121)
    assert not pulse.read_fleet(store).is_well


def test_a_heartbeat_that_two_processes_write_needs_attention(store: ClockedStore) -> None:
    put(store, rival="process 8 on host other")
    (worker,) = pulse.read_fleet(store).workers
    assert (worker.state, worker.problem) == (
        "failing",
        "process 8 on host other writes the same heartbeat, so one of the two is not shown: give each a name",
    )


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_ages_are_by_the_clock_of_the_store_alone(off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour off, a dead worker was ok, or a live one silent."""
    old_s = [0.0]
    store = ClockedStore()
    clock = SimpleNamespace(time=lambda: time.time() + off_s - old_s[0])
    monkeypatch.setattr("pulsesync.store.memory.time", clock)
    with pulse.Publisher(store) as publisher:
        publisher.publish({"w": np.zeros(1000, np.float32)}, step=40)
    for name, seconds in (("alive", 10.0), ("dead", 600.0)):
        old_s[0] = seconds
        store.put(f"heartbeats/{name}", replace(RECORD, worker=name, version=0).build())
    old_s[0] = 0.0
    status = pulse.read_fleet(store)
    assert [(one.name, one.state, round(one.seen_s, -1)) for one in status.workers] == [
        ("alive", "ok", 10),
        ("dead", "silent", 600),
    ]
    assert status.own_clock is None


def test_of_a_store_that_cannot_be_written_ages_are_by_this_machines_clock_and_it_is_said(store: ClockedStore) -> None:
    class ReadOnly(ClockedStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            raise StoreError("it is read-only", key=key)

    put(store, 121)
    plain = ReadOnly()
    plain._objects, plain.old_s = store._objects, store.old_s
    status = pulse.read_fleet(plain)
    assert status.own_clock == "it is read-only"
    assert [one.state for one in status.workers] == ["silent"]


def test_a_clock_that_is_behind_gives_no_negative_age(store: ClockedStore) -> None:
    put(store, -1000)
    assert pulse.read_fleet(store).workers[0].seen_s == 0


def test_a_store_that_cannot_list_leaves_the_workers_unknown(store: ClockedStore) -> None:
    class Plain(ClockedStore):
        def list(self, prefix: str) -> Any:
            raise StoreError("it cannot list", key=prefix)

    plain = Plain()
    plain._objects = store._objects
    status = pulse.read_fleet(plain)
    assert (status.newest.version, status.workers, status.unknown) == (4, (), "it cannot list")
    assert status.anchor is not None
    assert not status.is_well  # a monitor must not take what is not known for well


def test_a_heartbeat_that_the_store_refuses_hides_no_other(store: ClockedStore) -> None:
    class Picky(ClockedStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            if key == "heartbeats/refused":
                raise StoreError("403\x1b[2J Forbidden", key=key)
            return super().get(key, begin, end)

    put(store)
    store.put("heartbeats/refused", b"{}")
    picky = Picky()
    picky._objects = store._objects
    found = pulse.read_fleet(picky)
    assert [one.state for one in found.workers] == ["unreadable", "ok"]
    assert found.workers[0].problem == "403\N{REPLACEMENT CHARACTER}[2J Forbidden"
    assert found.unknown == f"the store does not show the heartbeat of refused: {found.workers[0].problem}"
    assert not found.is_well


def test_no_run_is_an_error() -> None:
    with pytest.raises(NothingPublishedError):
        pulse.read_fleet(MemoryStore())


def test_hundreds_of_workers_are_read_together(store: ClockedStore) -> None:
    class Slow(ClockedStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            if key.startswith("heartbeats/"):
                time.sleep(0.01)
            return super().get(key, begin, end)

    slow = Slow()
    slow._objects = store._objects
    for n in range(300):
        slow.put(f"heartbeats/w{n}", replace(RECORD, worker=f"w{n}").build())
    began = time.monotonic()
    assert len(pulse.read_fleet(slow).workers) == 300
    assert time.monotonic() - began < 1.5
