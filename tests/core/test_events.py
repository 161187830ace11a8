"""Events reach every listener, and no listener can be in the way."""

import os
import sys
import threading
import time
from collections.abc import Callable

import pytest

import pulsesync as pulse
from pulsesync.core import events
from tests.processes import Fleet, fleet, told

__all__ = ["fleet"]


def recounted(version: int) -> events.Recounted:
    return events.Recounted(location="runs/one", version=version, equal=True, seconds=0.1)


def test_every_listener_receives_every_event_in_order() -> None:
    first: list[events.Event] = []
    second: list[events.Event] = []
    sent = [recounted(version) for version in range(100)]
    with pulse.listen(first.append), pulse.listen(second.append):
        for event in sent:
            events.emit(event)
    assert first == second == sent


def test_a_closed_listener_receives_nothing_more() -> None:
    received: list[events.Event] = []
    listening = pulse.listen(received.append)
    events.emit(recounted(1))
    listening.close()
    events.emit(recounted(2))
    assert [event.version for event in received if isinstance(event, events.Recounted)] == [1]
    assert not events.has_listeners()
    listening.close()  # a second time does nothing


def test_a_listener_that_fails_is_logged_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fail(event: events.Event) -> None:
        calls.append(1)
        raise OSError("no disk")

    with pulse.listen(fail) as listening:
        for version in range(5):
            events.emit(recounted(version))
    assert len(calls) == listening.failed == 5
    assert [record.message.split(", ")[1] for record in caplog.records] == [f"{n} times so far." for n in (1, 2, 4)]
    assert "no disk" in caplog.text


def test_a_listener_that_calls_exit_is_logged_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    with pulse.listen(lambda event: sys.exit("enough")) as listening:
        for version in range(3):
            events.emit(recounted(version))
    assert listening.failed == 3
    assert "enough" in caplog.text


def test_the_log_of_a_slow_listener_does_not_wait_for_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUEUED", 1)
    release, lock = threading.Event(), threading.Lock()

    class Locked:
        def __call__(self, event: events.Event) -> None:
            with lock:
                release.wait(30)

        def __repr__(self) -> str:
            with lock:
                return "Locked"

    with pulse.listen(Locked()):
        began = time.perf_counter()
        for version in range(5):
            events.emit(recounted(version))
            time.sleep(0.05)
        assert time.perf_counter() - began < 5
        release.set()
    assert "Locked is too slow: dropped 1 events so far" in caplog.text


def test_a_slow_listener_keeps_nobody_waiting_and_what_it_misses_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "QUEUED", 10)
    release, received = threading.Event(), list[events.Event]()

    def slow(event: events.Event) -> None:
        release.wait(30)
        received.append(event)

    listening = pulse.listen(slow)
    began = time.perf_counter()
    for version in range(1000):
        events.emit(recounted(version))
    took_s = time.perf_counter() - began
    release.set()
    listening.close()
    assert took_s < 5  # the listener would have taken 30 s for the first
    assert len(received) + listening.dropped == 1000
    assert 10 <= len(received) <= 12
    assert "is too slow: dropped 1 events so far" in caplog.text


def test_a_listener_may_emit_and_flush_without_a_deadlock() -> None:
    received: list[int] = []

    def echo(event: events.Event) -> None:
        assert isinstance(event, events.Recounted)
        received.append(event.version)
        if event.version < 3:
            events.emit(recounted(event.version + 1))
        listening.flush()

    listening = pulse.listen(echo)
    events.emit(recounted(0))
    deadline = time.monotonic() + 10
    while len(received) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    listening.close()
    assert received == [0, 1, 2, 3]


def test_a_listener_that_rests_is_woken_by_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "REST_S", 0.0)
    monkeypatch.setattr(events, "LOOK_S", 1000.0)  # only what wakes it makes it look
    arrived = threading.Event()
    with pulse.listen(lambda event: arrived.set()):
        for version in range(20):
            arrived.clear()
            events.emit(recounted(version))
            assert arrived.wait(10)


def test_events_of_many_threads_are_all_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "QUEUED", 10_000)
    received: list[events.Event] = []

    def emit_many() -> None:
        for version in range(500):
            events.emit(recounted(version))

    with pulse.listen(received.append):
        threads = [threading.Thread(target=emit_many) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(received) == 4000


def end_with_queued_events() -> None:
    def late(event: events.Event) -> None:
        time.sleep(0.1)
        assert isinstance(event, events.Recounted)
        print(event.version, flush=True)

    events.listen(late)
    for version in range(3):
        events.emit(recounted(version))


def end_with_a_listener_that_hangs() -> None:
    events.EXIT_S = 0.2
    events.listen(lambda event: time.sleep(1000))
    events.emit(events.Event())
    print("ends", flush=True)


def fork_with_a_listener() -> None:
    events.listen(lambda event: print("parent", flush=True))
    child = os.fork()
    if child == 0:
        events.emit(events.Event())
        with events.listen(lambda event: print("child", flush=True)):
            events.emit(events.Event())
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(end_with_queued_events, ["0", "1", "2"], id="what is queued is delivered before the end"),
        pytest.param(end_with_a_listener_that_hangs, ["ends"], id="a listener that hangs does not keep it from ending"),
        pytest.param(fork_with_a_listener, ["child"], id="a forked child delivers nothing and can listen itself"),
    ],
)
def test_the_end_of_a_process_with_listeners(fleet: Fleet, program: Callable[[], None], printed: list[str]) -> None:
    ended = fleet.start_program(program)
    assert ended.wait() == 0, told(ended.out)
    assert told(ended.out).split() == printed
