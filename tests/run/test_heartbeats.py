"""Heartbeats: what a record may contain, who writes it and when, and that none of this delays or breaks a sync."""

import gc
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulsesync
from pulsesync import Publisher, Subscriber
from pulsesync.errors import ConflictError, FormatError, NothingPublishedError, StoreError
from pulsesync.run import heartbeats
from pulsesync.run.heartbeats import (
    MAX_BYTES,
    Heartbeat,
    HeartbeatWriter,
    check_worker,
    find_heartbeats,
    name_worker,
    parse,
)
from pulsesync.store import LocalStore, MemoryStore
from pulsesync.store.keys import is_heartbeat
from tests.processes import Fleet, fleet, told

__all__ = ["fleet"]

RECORD = Heartbeat(worker="rollout-3", host="node", pid=7, package="0.1", time_s=1e9, version=4, step=40, newest=5)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.005)


class CountingStore(MemoryStore):
    """Counts what is put, and refuses it for as long as it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        super().put("head", b"4")
        self.gets, self.puts, self.refuses, self.is_away = 0, 0, False, False
        self.written: list[bytes] = []

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.gets += 1
        return super().get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts += 1
        if self.refuses:
            raise StoreError("403 Forbidden", key=key)
        if self.is_away:
            raise StoreError("no answer", key=key, retryable=True)
        super().put(key, data)
        self.written.append(bytes(data))

    def heartbeat(self) -> Heartbeat:
        return parse(self.get("heartbeats/rollout-3"), "rollout-3")


# The record


def test_a_record_comes_back_as_it_was_written() -> None:
    full = replace(
        RECORD,
        follows="stable",
        synced_s=1e9,
        pause_s=0.25,
        fetched_bytes=12,
        recounted_s=1e9,
        recount_equal=False,
        error="it failed",
        rival="process 8 on host other",
        torn=True,
        ended=True,
    )
    assert parse(full.build(), "rollout-3") == full
    assert parse(RECORD.build(), "rollout-3") == RECORD


def test_the_longest_record_is_within_the_limit() -> None:
    wide = "\N{GRINNING FACE}"
    writer = HeartbeatWriter(MemoryStore(), "w" * 64, follows="p" * 64)
    writer._facts["host"] = wide * 64
    writer.synced(1 << 53, 1 << 53, newest=1 << 53, fetched_bytes=1 << 52, pause_s=1 / 3)
    writer.recounted(False)
    writer.failed(ValueError(wide * 1000), 1 << 53, torn=True)
    writer._rival = wide * 64
    writer.close()
    data = writer.record.build()
    assert len(data) <= MAX_BYTES
    assert parse(data, "w" * 64).error == wide * 200


def test_fields_of_a_later_version_are_ignored() -> None:
    table = json.loads(RECORD.build()) | {"colour": "blue", "nested": [{}]}
    assert parse(json.dumps(table).encode(), "rollout-3") == RECORD


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b"\xff\xfe",
        b"[" * MAX_BYTES,
        b'{"a":' * 400,
        b" " * (MAX_BYTES + 1),
        RECORD.build() + b" " * MAX_BYTES,
        b"9" * MAX_BYTES,
        b'{"format":"pulse-heartbeat/1"}',
        RECORD.build().replace(b"pulse-heartbeat/1", b"pulse-heartbeat/2"),
        RECORD.build().replace(b"rollout-3", b"rollout-4"),
    ],
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="heartbeat of rollout-3"):
        parse(data, "rollout-3")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pid", "7"),
        ("pid", None),
        ("pid", 7.5),
        ("pid", True),
        ("pid", -1),
        ("version", 1 << 60),
        ("version", "4"),
        ("version", [4]),
        ("step", 1.5),
        ("time_s", None),
        ("time_s", float("nan")),
        ("time_s", float("inf")),
        ("pause_s", -0.5),
        ("pause_s", 1e300),
        ("fetched_bytes", None),
        ("host", None),
        ("host", {"a": 1}),
        ("error", 5),
        ("torn", 1),
        ("torn", None),
        ("ended", "no"),
        ("recount_equal", 0),
    ],
)
def test_a_field_of_the_wrong_type_or_size_is_refused(field: str, value: Any) -> None:
    table = json.loads(RECORD.build()) | {field: value}
    with pytest.raises(FormatError, match=f"no usable {field}|does not allow"):
        parse(json.dumps(table).encode(), "rollout-3")


def test_nothing_that_a_terminal_interprets_comes_out_of_a_record() -> None:
    hostile = "\x1b[2J\x1b]0;title\x07\r\nok\u202e\x00\x9b31m\ud800"
    table = json.loads(RECORD.build()) | {"host": hostile, "package": hostile, "follows": hostile, "error": hostile}
    record = parse(json.dumps(table).encode(), "rollout-3")
    for text in (record.host, record.package, record.follows, record.error):
        assert text is not None
        assert text.isprintable()
        assert "ok" in text


def test_long_texts_are_cut() -> None:
    table = json.loads(RECORD.build()) | {"host": "h" * 500, "error": "e" * 900}
    record = parse(json.dumps(table).encode(), "rollout-3")
    assert (len(record.host), len(record.error or "")) == (64, 200)


@pytest.mark.parametrize("name", ["rollout-3", "a", "A.b_c-9", "9" * 64])
def test_names_of_workers(name: str) -> None:
    assert check_worker(name) == name
    assert is_heartbeat(f"heartbeats/{name}")
    assert is_heartbeat(f"runs/one/heartbeats/{name}")


@pytest.mark.parametrize("name", ["", "-a", ".", "..", "a/b", "a b", "ä", "a\n", "a\x1b", "a" * 65, "a%2f", "a\0"])
def test_what_is_no_name_of_a_worker(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a worker must be"):
        check_worker(name)
    assert not is_heartbeat(f"heartbeats/{name}")


def test_a_name_is_made_of_anything() -> None:
    for parts in (("/srv/weights\x1b", "ü"), ("",), ("x" * 200,), ("http://127.0.0.1:8000/",)):
        assert check_worker(name_worker(*parts))
    assert name_worker("vllm", "http://127.0.0.1:8000").endswith("vllm-http-127.0.0.1-8000")


# Reading


def test_records_that_cannot_be_read_are_found_with_the_reason() -> None:
    store = MemoryStore()
    store.put("heartbeats/rollout-3", RECORD.build())
    store.put("heartbeats/huge", b"x" * (1 << 20))
    store.put("heartbeats/other", RECORD.build())
    store.put("heartbeats/\x1b[31mred", RECORD.build())
    store.put("heartbeats/below/rollout-3", RECORD.build())
    found = {one.worker: one for one in find_heartbeats(store)}
    assert found.keys() == {"rollout-3", "huge", "other"}
    assert found["rollout-3"].heartbeat == RECORD
    assert "more than 2048 bytes" in str(found["huge"].fault)
    assert "another worker" in str(found["other"].fault)


def test_a_store_without_heartbeats_has_none() -> None:
    assert find_heartbeats(MemoryStore()) == []


# Writing


def set_intervals(
    monkeypatch: pytest.MonkeyPatch, *, every_s: float = heartbeats.EVERY_S, soonest_s: float = heartbeats.SOONEST_S
) -> None:
    monkeypatch.setattr(heartbeats, "EVERY_S", every_s)
    monkeypatch.setattr(heartbeats, "SOONEST_S", soonest_s)


def test_the_first_event_is_written_at_once_and_later_ones_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, soonest_s=0.05)
    store = CountingStore()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.synced(4, 40, newest=4, pause_s=0.01, fetched_bytes=100)
        wait_until(lambda: store.puts == 1)
        first = store.heartbeat()
        assert (first.version, first.step, first.pid, first.pause_s) == (4, 40, os.getpid(), 0.01)
        assert abs(first.time_s - time.time()) < 10
        writer.synced(5, 50, newest=9, fetched_bytes=100)
        wait_until(lambda: store.heartbeat().version == 5)
        assert (store.heartbeat().newest, store.heartbeat().fetched_bytes) == (9, 200)


def test_events_within_the_shortest_time_are_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, soonest_s=0.1)
    store = CountingStore()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        began = time.monotonic()
        for version in range(100):
            writer.synced(version, 40, newest=version, pause_s=0.01, fetched_bytes=100)
            time.sleep(0.001)
        wait_until(lambda: store.puts >= 2 and store.heartbeat().version == 99)
        assert store.puts <= 2 + (time.monotonic() - began) / 0.1


def test_looks_that_find_nothing_new_are_written_at_the_long_interval_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, every_s=0.1, soonest_s=0.0)
    store = CountingStore()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        began = time.monotonic()
        writer.synced(4, 40, newest=4, pause_s=0.01, fetched_bytes=100)
        for _ in range(60):
            writer.synced(4, 40, newest=4, fetched_bytes=10)
            time.sleep(0.005)
        assert store.puts <= 2 + (time.monotonic() - began) / 0.1
        assert store.heartbeat().pause_s == 0.01  # of the sync that wrote


def test_a_worker_that_does_nothing_is_seen_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, every_s=0.05, soonest_s=0.05)
    store = CountingStore()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.start(newest=7)
        wait_until(lambda: store.puts >= 3)
        assert (store.heartbeat().version, store.heartbeat().newest) == (None, 7)


def test_an_error_stays_until_a_sync_succeeds() -> None:
    writer = HeartbeatWriter(MemoryStore(), "rollout-3")
    writer.failed(ValueError("disk\x1b[2J full"), 4, torn=True)
    assert (writer.record.error, writer.record.torn) == ("disk\N{REPLACEMENT CHARACTER}[2J full", True)
    writer.recounted(False)
    assert (writer.record.recount_equal, writer.record.torn) == (False, True)
    writer.synced(5, 40, newest=5, pause_s=0.01, fetched_bytes=100)
    assert (writer.record.error, writer.record.torn, writer.record.recount_equal) == (None, False, False)
    writer.close()


def test_an_error_is_shown_without_credentials_and_whatever_its_text_does() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise ValueError

    with closing(HeartbeatWriter(MemoryStore(), "rollout-3")) as writer:
        writer.failed(StoreError("no answer of https://user:secret@host/run/head?sig=secret"), 4)
        assert writer.record.error == "no answer of https://host/run/head"
        writer.failed(MuteError(), 4)
        assert writer.record.error == "MuteError"


def test_a_process_without_threads_syncs_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = CountingStore()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            writer.synced(4, 40, newest=4)
            writer.synced(5, 50, newest=5)
            writer.join()
        assert [record.message for record in caplog.records] == [
            "The heartbeat of rollout-3 has no thread to be written on: can't start new thread"
        ]
        writer.synced(6, 60, newest=6)
        wait_until(lambda: store.puts == 1)
        assert store.heartbeat().version == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_process_that_was_forked_before_the_first_sync_is_shown(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("head", b"4")
    writer = HeartbeatWriter(store, "rollout-3")
    if (child := os.fork()) == 0:
        writer.synced(4, 40, newest=4)
        writer.close()
        writer.join(10)
        os._exit(0)
    os.waitpid(child, 0)
    assert parse(store.get("heartbeats/rollout-3"), "rollout-3").pid == child


def test_a_handler_that_closes_in_the_middle_of_a_sync_ends_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, soonest_s=0.01)
    store = CountingStore()
    writer = HeartbeatWriter(store, "rollout-3")
    writer.synced(4, 40, newest=4)
    wait_until(lambda: store.puts == 1)

    class Interrupted(dict[str, Any]):
        def __or__(self, other: Any) -> Any:
            replaced = dict(self) | other
            writer.close()  # as a signal handler between two instructions
            return replaced

    writer._facts = Interrupted(writer._facts)
    writer.synced(5, 50, newest=5)
    writer.join(10)
    assert writer._thread is not None
    assert not writer._thread.is_alive()
    assert store.heartbeat().ended


def test_nothing_is_written_where_there_is_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, every_s=0.05, soonest_s=0.0)
    store = CountingStore()
    store.delete("head")
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.failed(NothingPublishedError("there is no run", location="typo"), None)
        wait_until(lambda: store.gets >= 3)
        assert store.puts == 0
        MemoryStore.put(store, "head", b"0")
        wait_until(lambda: store.puts > 0)
        assert store.heartbeat().error == "there is no run"


def test_a_closed_worker_says_so_and_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, soonest_s=60.0)
    store = CountingStore()
    writer = HeartbeatWriter(store, "rollout-3")
    writer.synced(4, 40, newest=4, pause_s=0.01, fetched_bytes=100)
    wait_until(lambda: store.puts == 1)
    writer.synced(5, 40, newest=5, pause_s=0.01, fetched_bytes=100)
    writer.close()
    writer.join(10)
    assert (store.heartbeat().ended, store.heartbeat().version) == (True, 5)
    writer.synced(6, 40, newest=6, pause_s=0.01, fetched_bytes=100)
    writer.close()
    assert (writer.record.version, store.puts) == (5, 2)


def test_a_store_that_refuses_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, every_s=0.01)
    store = CountingStore()
    store.refuses = True
    with caplog.at_level(logging.WARNING), closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.synced(4, 40, newest=4, pause_s=0.01, fetched_bytes=100)
        wait_until(lambda: store.puts >= 3)
    assert [record.message for record in caplog.records if "heartbeat of rollout-3" in record.message] == [
        "The heartbeat of rollout-3 cannot be written, so pulse status will not show this worker; syncs go on: "
        "403 Forbidden"
    ]


def is_rival_noticed(store: CountingStore, since: int) -> bool:
    """In any of the records written since: the next one may not have it any more."""
    return any(parse(data, "rollout-3").rival == "process 8 on host other" for data in store.written[since:])


def test_two_workers_of_one_name_notice_each_other(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_intervals(monkeypatch, every_s=0.02, soonest_s=0.02)
    store = CountingStore()
    other = replace(RECORD, host="other", pid=8)
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.synced(4, 40, newest=4)
        wait_until(lambda: store.puts == 1)
        for _ in range(3):  # each writes over the other's
            seen = len(store.written)
            MemoryStore.put(store, "heartbeats/rollout-3", other.build())
            wait_until(partial(is_rival_noticed, store, seen))
        wait_until(lambda: store.heartbeat().rival is None)  # the other has gone
        MemoryStore.put(store, "heartbeats/rollout-3", replace(other, ended=True).build())
        wait_until(lambda: store.heartbeat().pid == os.getpid())
        assert store.heartbeat().rival is None
    assert [record.message for record in caplog.records] == [
        "Another worker, process 8 on host other, writes the heartbeat of rollout-3 too, so that pulse status shows "
        "only one of the two: give each a name of its own. Syncs go on."
    ]


def test_a_name_that_a_server_keeps_for_another_process_is_logged_when_it_stays_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that was killed and restarted waits for a minute; that is no reason for a warning."""
    set_intervals(monkeypatch, every_s=0.02)

    logged = []  # before each put

    class Kept(CountingStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            logged.append(len(caplog.records))
            self.puts += 1
            if self.puts in (1, 3, 4):
                raise ConflictError("the server keeps it for another process", key=key)
            MemoryStore.put(self, key, data)

    store = Kept()
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.synced(4, 40, newest=4)
        wait_until(lambda: store.puts >= 5)
    assert logged[:5] == [0, 0, 0, 0, 1]
    assert [record.message for record in caplog.records] == [
        "The heartbeat of rollout-3 cannot be written, so pulse status will not show this worker; syncs go on: the "
        "server keeps it for another process"
    ]


def test_close_returns_when_the_last_record_is_written() -> None:
    class Slow(MemoryStore):
        def put(self, key: str, data: bytes | memoryview) -> None:
            time.sleep(0.1 if key.startswith("heartbeats/") else 0.0)
            super().put(key, data)

    store = Slow()
    publish(store, 1)
    subscriber, weights = follower(store)
    subscriber.sync(weights)
    subscriber.close()
    assert has_ended(store)


def test_a_worker_is_seen_soon_after_its_store_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    set_intervals(monkeypatch, every_s=0.05)
    store = CountingStore()
    store.is_away = True
    with closing(HeartbeatWriter(store, "rollout-3")) as writer:
        writer.synced(4, 40, newest=4)
        wait_until(lambda: store.puts >= 9)  # to wait twice as long after each would now be 25 s
        store.is_away = False
        wait_until(lambda: read(store) is not None, 5)


def test_a_store_that_hangs_keeps_no_event_waiting() -> None:
    class Hanging(MemoryStore):
        release = threading.Event()

        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            self.release.wait(20)
            raise StoreError("it is away", key=key)

    with closing(HeartbeatWriter(Hanging(), "rollout-3")) as writer:
        began = time.monotonic()
        for version in range(1000):
            writer.synced(version, 40, newest=version, pause_s=0.01, fetched_bytes=100)
        assert time.monotonic() - began < 2
    Hanging.release.set()


def test_the_record_of_a_folder_is_a_file_of_the_run(tmp_path: Any) -> None:
    LocalStore(tmp_path / "run").put("head", b"4")
    writer = HeartbeatWriter(LocalStore(tmp_path / "run"), "rollout-3")
    writer.synced(4, 40, newest=4, pause_s=0.01, fetched_bytes=100)
    writer.close()
    writer.join(10)
    assert parse((tmp_path / "run/heartbeats/rollout-3").read_bytes(), "rollout-3").ended


# Of a subscriber


def follower(store: Any, **options: Any) -> tuple[Subscriber, dict[str, Any]]:
    return Subscriber(store, heartbeat="rollout-3", **options), {"w": np.zeros(1000, np.float32)}


def publish(store: Any, steps: int) -> None:
    weights = {"w": np.zeros(1000, np.float32)}
    with Publisher(store) as publisher:
        for step in range(steps):
            weights["w"][:10] += 1
            publisher.publish(weights, step=step)


def recount_of(subscriber: Subscriber) -> bool | None:
    assert subscriber.events.heartbeat is not None
    return subscriber.events.heartbeat.record.recount_equal


def has_ended(store: Any) -> bool:
    found = read(store)
    return found is not None and found.ended


def test_a_subscriber_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "SOONEST_S", 0.05)
    store = MemoryStore()
    publish(store, 3)
    pulsesync.move_pointer(store, "stable", 1)
    subscriber, weights = follower(store, follow="stable")
    with subscriber:
        subscriber.sync(weights)
        wait_until(lambda: (found := read(store)) is not None and found.version is not None)
        found = read(store)
        assert found is not None
        assert (found.version, found.step, found.newest, found.follows) == (1, 1, 1, "stable")
        assert found.fetched_bytes > 0
        assert found.pause_s is not None
        subscriber.verify()
        assert recount_of(subscriber) is True
        weights["w"][5] = 99
        with pytest.raises(pulsesync.VerificationError):
            subscriber.verify()
        assert recount_of(subscriber) is False
        (worker,) = pulsesync.read_fleet(store).workers
        assert (worker.name, worker.lag) == ("rollout-3", 0)
    wait_until(lambda: has_ended(store))


def test_a_sync_that_fails_is_shown_until_one_succeeds() -> None:
    store = MemoryStore()
    publish(store, 2)
    subscriber, weights = follower(store)
    with subscriber:
        with pytest.raises(pulsesync.StateError):
            subscriber.sync({"other": np.zeros(3, np.float32)})
        assert subscriber.events.heartbeat is not None
        assert "'w'" in str(subscriber.events.heartbeat.record.error)
        subscriber.sync(weights)
        assert subscriber.events.heartbeat.record.error is None


def test_a_read_only_store_costs_a_subscriber_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = CountingStore()
    publish(store, 2)
    store.refuses = True
    subscriber, weights = follower(store)
    with subscriber:
        assert subscriber.sync(weights).version == 1
        wait_until(lambda: "heartbeat of rollout-3" in caplog.text)
        assert subscriber.sync(weights).version == 1


def test_a_watch_that_idles_is_seen_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "EVERY_S", 0.1)
    store = MemoryStore()
    publish(store, 1)
    subscriber, weights = follower(store)
    times: set[float] = set()

    def watch() -> None:
        for _ in subscriber.watch(weights, interval_s=60, max_interval_s=60):
            pass

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while len(times) < 4 and time.monotonic() < until:
        if found := read(store):
            times.add(found.time_s)
        time.sleep(0.01)
    subscriber.close()
    thread.join(10)
    assert len(times) >= 4


def test_a_subscriber_that_is_forgotten_ends_its_heartbeat() -> None:
    store = MemoryStore()
    publish(store, 1)
    subscriber, weights = follower(store)
    subscriber.sync(weights)
    wait_until(lambda: read(store) is not None)
    del subscriber
    gc.collect()
    wait_until(lambda: has_ended(store))


def test_a_bad_name_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the name of a worker must be"):
        Subscriber(MemoryStore(), heartbeat="../head")


def follow_until(run: str, name: str, end: str) -> None:
    sub = Subscriber(run, heartbeat=name)
    sub.sync({"w": np.zeros(1000, np.float32)})
    wait_until(Path(end).exists)


def test_a_worker_that_is_killed_becomes_silent_and_one_that_ends_does_not(tmp_path: Path, fleet: Fleet) -> None:
    run, end = tmp_path / "run", tmp_path / "end"
    publish(str(run), 2)
    killed, ended = (
        fleet.start_program(follow_until, run=str(run), name=name, end=str(end)) for name in ("killed", "ended")
    )
    for name in ("killed", "ended"):
        wait_until((run / "heartbeats" / name).exists)
    assert [one.state for one in pulsesync.read_fleet(str(run)).workers] == ["ok", "ok"]
    killed.kill()
    end.touch()
    assert ended.wait() == 0, told(ended.out)
    states = {one.name: one.state for one in pulsesync.read_fleet(str(run), max_age_s=0).workers}
    assert states == {"killed": "silent", "ended": "ended"}


def read(store: Any) -> Heartbeat | None:
    return next((one.heartbeat for one in find_heartbeats(store)), None)
