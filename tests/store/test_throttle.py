import threading

import pytest

from pulsesync.store import MemoryStore, ThrottledStore, throttle
from pulsesync.testing.stores import StoreTests, in_threads


class TestThrottledStore(StoreTests):
    @pytest.fixture
    def store(self) -> ThrottledStore:
        return ThrottledStore(MemoryStore(), bytes_per_s=1e9)


class Time:
    """A clock that moves only in sleep."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(throttle, "time", found)
    return found


def test_reads_and_writes_take_their_time(time: Time) -> None:
    store = ThrottledStore(MemoryStore(), 100.0)
    store.put("a", bytes(200))
    assert time.now == 1002.0
    store.get("a")
    assert time.now == 1004.0
    store.get("a", 50, 100)
    assert time.now == 1004.5
    store.create("b", bytes(100))
    assert time.now == 1005.5


def test_an_idle_link_saves_nothing_up(time: Time) -> None:
    store = ThrottledStore(MemoryStore(), 100.0)
    store.put("a", bytes(100))
    time.now += 60.0
    store.put("a", bytes(100))
    assert time.now == 1062.0


def test_every_call_has_the_latency(time: Time) -> None:
    store = ThrottledStore(MemoryStore(), 100.0, latency_s=0.25)
    store.put("x/a", bytes(100))
    assert time.now == 1001.25
    list(store.list("x/"))
    store.delete("x/a")
    assert time.now == 1001.75


def test_threads_share_the_link(time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            waits.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    store = ThrottledStore(MemoryStore(), 100.0)
    in_threads(8, lambda name: store.put(f"x/{name}", bytes(100)))
    assert sorted(waits) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]


def test_a_link_that_carries_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        ThrottledStore(MemoryStore(), 0.0)
