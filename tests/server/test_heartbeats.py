"""Heartbeats over HTTP: real servers and relays keep them in memory, show them in listings, and pass them on."""

import http.client
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from pulsesync.errors import ConflictError, FormatError, StoreError
from pulsesync.run.clock import store_time
from pulsesync.run.heartbeats import MAX_BYTES, Heartbeat, find_heartbeats, parse
from pulsesync.server.board import HeartbeatBoard
from pulsesync.server.listings import RecentEntries
from pulsesync.store import LocalStore, MemoryStore, ObjectEntry
from pulsesync.store.coalesce import CoalescingStore
from pulsesync.store.http import HttpStore

pytest.importorskip("starlette")
pytest.importorskip("granian")
from tests.commands import PULSE, pulse
from tests.forked import Forked
from tests.runs import publish_steps
from tests.serving import running

PASS_EVERY_S = "pulsesync.server.board._PASS_EVERY_S"  # a second, for users
RECORD = Heartbeat(worker="w", host="node", pid=7, package="0.1", time_s=1e9, version=4)


def record(worker: str, version: int = 4) -> bytes:
    return replace(RECORD, worker=worker, version=version).build()


def wait_until(is_so: Callable[[], bool], timeout_s: float = 15.0) -> None:
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def put(url: str, path: str, body: bytes, **headers: str) -> int:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)) as connection:
        connection.request("PUT", path, body, headers)
        return connection.getresponse().status


def test_a_server_keeps_heartbeats_in_memory_and_lists_them_with_those_of_the_folder(tmp_path: Path) -> None:
    runs = LocalStore(tmp_path)
    runs.put("one/heartbeats/local", record("local"))
    runs.put("two/head", b"1")
    with running("serve", tmp_path) as server, closing(HttpStore(f"{server.url}/one")) as one:
        began = time.time()
        one.put("heartbeats/far", record("far", 5))
        one.put("heartbeats/far", record("far", 6))
        found = {each.worker: each for each in find_heartbeats(one)}
        assert found.keys() == {"far", "local"}
        assert found["far"].heartbeat == replace(RECORD, worker="far", version=6)
        assert began - 5 < found["far"].written_s < time.time() + 5
        with closing(HttpStore(f"{server.url}/two")) as two:
            assert find_heartbeats(two) == []
        with pytest.raises(StoreError, match="read-only"):
            one.put("head", b"5")
    assert not (tmp_path / "one/heartbeats/far").exists()


def test_only_heartbeats_are_accepted(served: str) -> None:
    for path, body, status in (
        ("/heartbeats/w", record("w"), 200),
        ("/a/b/heartbeats/w", record("w"), 200),
        ("/heartbeats/other", record("w"), 400),
        ("/heartbeats/w", b"", 400),
        ("/heartbeats/w", b"x" * (MAX_BYTES + 1), 400),
        ("/heartbeats/w", b"x" * (1 << 22), 400),
        ("/../heartbeats/w", record("w"), 400),
        ("/heartbeats/", record("w"), 405),
        ("/heartbeats/w/x", record("w"), 405),
        ("/heartbeats/%1b%5b2J", record("w"), 405),
        ("/heartbeats/" + "w" * 65, record("w" * 65), 405),
        ("/" + "a/" * 600 + "heartbeats/w", record("w"), 405),
        ("/head", b"41", 405),
        ("/manifests/0000000000000001", b"x", 405),
        ("/pointers/stable/heartbeats/w", record("w"), 405),
        ("/heartbeats/heartbeats/w", record("w"), 405),
    ):
        try:
            assert put(served, path, body) == status, path[:40]
        except (BrokenPipeError, ConnectionResetError):
            assert len(body) > MAX_BYTES  # the server has stopped reading


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("run")
    with running("serve", folder) as server:
        yield server.url
    assert not list(folder.iterdir())  # nothing was written


def test_a_body_that_does_not_come_ends(tmp_path: Path) -> None:
    with running("serve", tmp_path, constants={"pulsesync.server.service._HEARTBEAT_S": 0.2}) as server:
        parts = urlsplit(server.url)
        with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)) as connection:
            connection.putrequest("PUT", "/heartbeats/w")
            connection.putheader("Content-Length", "100")
            connection.endheaders(b"{")
            assert connection.getresponse().status == 408


def test_the_token_is_needed(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame")
    (tmp_path / "run").mkdir()
    with running("serve", tmp_path / "run", token_file=tmp_path / "token") as server:
        assert put(server.url, "/heartbeats/w", record("w")) == 401
        assert put(server.url, "/heartbeats/w", record("w"), Authorization="Bearer wrong") == 401
        with closing(HttpStore(server.url, "sesame")) as store:
            assert find_heartbeats(store) == []
            store.put("heartbeats/w", record("w"))
            assert [one.worker for one in find_heartbeats(store)] == ["w"]


def test_a_relay_passes_heartbeats_on_to_the_server(tmp_path: Path) -> None:
    LocalStore(tmp_path / "run").put("head", b"0")
    with (
        running("serve", tmp_path / "run") as server,
        running("relay", server.url, cache=tmp_path / "cache", constants={PASS_EVERY_S: 0.1}) as near,
        closing(HttpStore(near.url)) as site,
        closing(HttpStore(server.url)) as origin,
    ):
        site.put("heartbeats/w", record("w", 5))
        assert [one.worker for one in find_heartbeats(site)] == ["w"]
        wait_until(lambda: [one.worker for one in find_heartbeats(origin)] == ["w"])
        site.put("heartbeats/w", record("w", 6))
        wait_until(lambda: parse(origin.get("heartbeats/w"), "w").version == 6)


def test_a_relay_of_a_store_that_can_be_written_writes_them_there() -> None:
    upstream = MemoryStore()
    upstream.put("head", b"0")
    board = HeartbeatBoard(CoalescingStore(upstream))
    board.put("heartbeats/w", record("w"))
    wait_until(lambda: [one.worker for one in find_heartbeats(upstream)] == ["w"])


class Upstream(MemoryStore):
    """Counts what a relay sends."""

    def __init__(self) -> None:
        super().__init__()
        self.put("head", b"0")
        self.sent: list[str] = []

    def put(self, key: str, data: bytes | memoryview) -> None:
        if key != "head":
            self.sent.append(key)
        super().put(key, data)


def test_a_client_of_a_relay_adds_no_object_to_a_run_but_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object below manifests/ that is no record would be an error of every later prune."""
    monkeypatch.setattr(PASS_EVERY_S, 0.01)
    upstream = Upstream()
    board = HeartbeatBoard(CoalescingStore(upstream))
    for folder in ("manifests/", "anchors/", "parts/", "elsewhere/"):
        board.put(f"{folder}heartbeats/w", record("w"))
    board.put("heartbeats/w", record("w"))
    wait_until(lambda: upstream.sent == ["heartbeats/w"])


def test_a_client_that_makes_up_names_does_not_fill_the_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 4)
    monkeypatch.setattr("pulsesync.server.board.KEEP_S", 100.0)
    now_s, upstream = 1000.0, Upstream()
    clock = SimpleNamespace(time=lambda: now_s, monotonic=lambda: now_s, sleep=lambda _: time.sleep(0.01))
    monkeypatch.setattr("pulsesync.server.board.time", clock)
    board = HeartbeatBoard(CoalescingStore(upstream))
    for n in range(18):
        ended = replace(RECORD, worker=f"w{n}", ended=n != 1).build()  # these make room for others here
        board.put(f"heartbeats/w{n}", ended, client="ab"[n % 2])
    wait_until(lambda: not board._waiting)
    board.put("heartbeats/w1", record("w1", 5), client="b")
    wait_until(lambda: upstream.sent == [f"heartbeats/w{n}" for n in (*range(16), 1)])
    now_s += 101
    board.put("heartbeats/w17", record("w17", 5), client="a")
    wait_until(lambda: upstream.sent[17:] == ["heartbeats/w17"])


def test_one_network_does_not_take_all_names_that_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 2)
    board = HeartbeatBoard(CoalescingStore(Upstream()))
    assert [board._may_pass_on(f"heartbeats/x{n}", "other") for n in range(9)] == [True] * 4 + [False] * 5
    assert board._may_pass_on("heartbeats/w", "")


def test_relays_in_a_circle_pass_a_heartbeat_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PASS_EVERY_S, 0.01)

    class Other(Upstream):
        def put(self, key: str, data: bytes | memoryview) -> None:
            super().put(key, data)
            if key != "head":
                board.put(key, bytes(data))

    upstream = Other()
    board = HeartbeatBoard(CoalescingStore(upstream))
    board.put("heartbeats/w", record("w"))
    wait_until(lambda: len(upstream.sent) == 1)
    time.sleep(0.1)
    assert len(upstream.sent) == 1


def test_an_error_of_any_kind_does_not_end_the_passing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PASS_EVERY_S, 0.01)

    class Odd(Upstream):
        def put(self, key: str, data: bytes | memoryview) -> None:
            super().put(key, data)
            if key.endswith("/odd"):
                raise KeyError(key)

    upstream = Odd()
    board = HeartbeatBoard(CoalescingStore(upstream))
    board.put("heartbeats/odd", record("odd"))
    wait_until(lambda: upstream.sent == ["heartbeats/odd"])
    time.sleep(0.1)
    board.put("heartbeats/w", record("w"))
    wait_until(lambda: upstream.sent == ["heartbeats/odd", "heartbeats/w"])


def test_an_upstream_that_refuses_costs_nothing_but_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PASS_EVERY_S, 0.01)

    class ReadOnly(MemoryStore):
        asked = 0

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.asked += 1
            raise StoreError("refused", key=key)

    upstream = ReadOnly()
    MemoryStore.put(upstream, "head", b"0")
    board = HeartbeatBoard(CoalescingStore(upstream))
    for n in range(3):
        board.put(f"heartbeats/w{n}", record(f"w{n}"))
    wait_until(lambda: upstream.asked == 3)
    assert len(board.list("heartbeats/", [])) == 3
    assert [one.message for one in caplog.records] == [
        "The heartbeats of workers cannot be sent to the upstream: refused"
    ]


def test_a_relay_that_was_restarted_warns_of_no_other_process_for_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Kept(MemoryStore):
        asked = 0

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.asked += 1
            raise ConflictError("kept for another process", key=key)

    for bound_s, warnings in ((60.0, 0), (0.0, 1)):
        monkeypatch.setattr("pulsesync.server.board.BOUND_S", bound_s)
        upstream = Kept()
        MemoryStore.put(upstream, "head", b"0")
        board = HeartbeatBoard(CoalescingStore(upstream))
        board.put("heartbeats/w", record("w"))
        wait_until(lambda upstream=upstream: upstream.asked == 1)  # type: ignore[misc]
        wait_until(lambda board=board: board._waiting == {})  # type: ignore[misc]
        time.sleep(0.05)
        assert len(caplog.records) == warnings


def test_names_that_a_client_makes_up_displace_no_worker(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 3)
    board = HeartbeatBoard(MemoryStore())
    for n in range(3):
        board.put(f"heartbeats/w{n}", record(f"w{n}"), f"secret {n}", f"network {n}")
    for n in range(100):
        with pytest.raises(StoreError, match="3 workers have sent heartbeats already") as caught:
            board.put(f"heartbeats/x{n}", record(f"x{n}"), "other", "other")
        assert caught.value.retryable
    board.put("heartbeats/w1", record("w1", 5), "secret 1", "network 1")
    assert [entry.key[-2:] for entry in board.list("heartbeats/", [])] == ["w0", "w1", "w2"]
    assert [one.message for one in caplog.records] == [
        "3 workers have sent heartbeats; 3 are kept, half of them from one network: another worker is not shown until "
        "one of them has ended, or was silent for 5 minutes."
    ]
    board.put("heartbeats/w2", replace(RECORD, worker="w2", ended=True).build(), "secret 2")
    board.put("heartbeats/x5", record("x5"), "other", "other")
    assert [entry.key[-2:] for entry in board.list("heartbeats/", [])] == ["w0", "w1", "x5"]


def test_workers_that_were_killed_make_room_for_those_that_replace_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods under generated names: each lives for two hours, and none of them ends in order."""
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 8)
    board, now_s = HeartbeatBoard(MemoryStore()), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for generation in range(8):
        for _ in range(2):
            for n in range(3):
                name = f"{generation}-{n}"
                board.put(f"heartbeats/{name}", record(name), name, "the cluster")
            now_s += 3600
    listed = [entry.key for entry in board.list("heartbeats/", [])]
    assert [f"heartbeats/7-{n}" for n in range(3)] == listed[-3:]


def test_names_that_were_heard_once_make_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 4)
    board, now_s = HeartbeatBoard(MemoryStore()), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for name in ("w", "w", "x1", "x2", "y"):
        board.put(f"heartbeats/{name}", record(name), client="other" if name[0] == "x" else name)
    now_s += 301
    board.put("heartbeats/y", record("y"), client="y")
    for new, listed in (("a", "a w x2 y"), ("b", "a b w y"), ("c", "a b c y")):
        board.put(f"heartbeats/{new}", record(new), client=new)
        assert [entry.key[11:] for entry in board.list("heartbeats/", [])] == listed.split()
    with pytest.raises(StoreError):
        board.put("heartbeats/d", record("d"), client="d")


def test_one_network_does_not_take_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.board.MAX_WORKERS", 4)
    board, now_s = HeartbeatBoard(MemoryStore()), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for n in range(9):
        with suppress(StoreError):
            board.put(f"heartbeats/x{n}", record(f"x{n}"), client="other")
    board.put("heartbeats/w1", record("w1"), client="w")
    board.put("heartbeats/w2", record("w2"), client="w")
    assert [entry.key[-2:] for entry in board.list("heartbeats/", [])] == ["w1", "w2", "x0", "x1"]
    now_s += 301
    board.put("heartbeats/x9", record("x9"), client="other")  # in the place of its own
    assert [entry.key[-2:] for entry in board.list("heartbeats/", [])] == ["w1", "w2", "x1", "x9"]


def test_a_relay_whose_clock_is_late_does_not_give_a_name_to_another_client() -> None:
    board = HeartbeatBoard(CoalescingStore(MemoryStore()))
    board.put("heartbeats/w", record("w"), "mine")
    passed_on = ObjectEntry("heartbeats/w", 9, time.time() + 90)  # by the clock of the upstream
    for _ in range(2):
        assert board.list("heartbeats/", [passed_on]) == [passed_on]
        assert board.get("heartbeats/w") is None
        with pytest.raises(ConflictError):
            board.put("heartbeats/w", record("w", 9), "other")
        board.put("heartbeats/w", record("w", 5), "mine")
        assert parse(board.get("heartbeats/w") or b"", "w").version == 5


def test_a_name_belongs_to_the_client_that_sent_it_until_that_ends_or_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pulsesync.server.board.BOUND_S", 60.0)
    board, now_s = HeartbeatBoard(MemoryStore()), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for first, second in (("a", "b"), ("a", None), (None, "b")):
        board.put("heartbeats/w", record("w", 4), first)
        with pytest.raises(ConflictError):
            board.put("heartbeats/w", record("w", 5), second)
        board.put("heartbeats/w", record("w", 6), first)
        assert parse(board.get("heartbeats/w") or b"", "w").version == 6
        now_s += 61
        board.put("heartbeats/w", record("w", 7), second)
        board.put("heartbeats/w", replace(RECORD, ended=True).build(), second)


def test_a_second_client_is_refused_and_the_secret_is_shown_to_nobody(served: str) -> None:
    with closing(HttpStore(served)) as first, closing(HttpStore(served)) as second:
        first.put("heartbeats/mine", record("mine"))
        with pytest.raises(ConflictError) as caught:
            second.put("heartbeats/mine", record("mine", 9))
        assert f"{served} keeps heartbeats/mine for another process" in str(caught.value)
        first.put("heartbeats/mine", record("mine", 5))
        assert parse(second.get("heartbeats/mine"), "mine").version == 5
        assert first._writer.encode() not in second.get("heartbeats/mine")
        assert put(served, "/heartbeats/mine", record("mine", 9)) == 409  # a worker of 0.1.0


def test_heartbeats_do_not_have_the_store_listed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = list[str]()

    def list_(prefix: str) -> tuple[ObjectEntry, ...]:
        listed.append(prefix)
        return ()

    entries = RecentEntries(list_)
    for _ in range(20):
        assert entries.get("heartbeats/") == ()
    assert listed == ["heartbeats/"]
    for n in range(100):
        entries.get(f"{n}/heartbeats/")
    assert len(entries._kept) < 10
    monkeypatch.setattr("pulsesync.server.listings._KEEP_S", 0.0)
    entries.get("99/heartbeats/")
    assert listed.count("99/heartbeats/") == 2
    monkeypatch.undo()
    with running("serve", tmp_path) as server, closing(HttpStore(server.url)) as store:
        for n in range(5):  # what was sent is listed at once
            store.put(f"heartbeats/w{n}", record(f"w{n}"))
            assert [entry.key for entry in store.list("heartbeats/")] == [f"heartbeats/w{m}" for m in range(n + 1)]


def test_a_long_secret_takes_no_more_memory_than_a_short_one() -> None:
    board = HeartbeatBoard(MemoryStore())
    board.put("heartbeats/w", record("w"), "s" * 100_000)
    assert all(len(value) < 1000 for value in board._kept["heartbeats/w"] if isinstance(value, str | bytes))
    with pytest.raises(ConflictError):
        board.put("heartbeats/w", record("w"), "s" * 100_001)
    board.put("heartbeats/w", record("w"), "s" * 100_000)


def test_a_worker_that_writes_to_the_store_itself_is_not_replaced_by_a_client() -> None:
    board, entry = HeartbeatBoard(MemoryStore()), ObjectEntry("heartbeats/w", 9, time.time())
    board.put("heartbeats/w", record("w", 9), "other")
    assert board.list("heartbeats/", [entry]) == [entry]
    assert board.get("heartbeats/w") is None
    with pytest.raises(ConflictError):
        board.put("heartbeats/w", record("w", 9), "other")
    old = ObjectEntry("heartbeats/w", 9, time.time() - 90)
    assert board.list("heartbeats/", [old]) == [old]
    board.put("heartbeats/w", record("w", 9), "other")


def test_heartbeats_are_kept_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.board.KEEP_S", 100.0)
    board, now_s = HeartbeatBoard(MemoryStore()), time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    board.put("heartbeats/w", record("w"))
    now_s += 99
    assert [entry.key for entry in board.list("heartbeats/", [])] == ["heartbeats/w"]
    now_s += 2
    assert board.list("heartbeats/", []) == []
    assert board.get("heartbeats/w") is None
    with pytest.raises(FormatError):
        board.put("heartbeats/w", b"{}")


def test_the_time_of_a_server_is_that_of_its_answers(served: str) -> None:
    with closing(HttpStore(served)) as store:
        assert abs(store_time(store) - time.time()) < 2
        assert store._now is not None
        store._now = store._now[0] - 3600, store._now[1]
        assert abs(store_time(CoalescingStore(store)) - time.time() + 3600) < 2


def test_a_clock_that_is_set_back_drops_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    board = HeartbeatBoard(MemoryStore())
    board.put("heartbeats/w", record("w"))
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s - 2)
    assert [entry.key for entry in board.list("heartbeats/", [])] == ["heartbeats/w"]


def test_a_newer_record_of_the_store_counts() -> None:
    board = HeartbeatBoard(MemoryStore())
    board.put("heartbeats/w", record("w"))
    older, newer = (ObjectEntry("heartbeats/w", 9, time.time() + late) for late in (-90, 90))
    assert board.list("heartbeats/", [older])[0].size_bytes != 9
    assert board.list("heartbeats/", [newer]) == [newer]
    assert board.get("heartbeats/w") is None
    assert board.list("manifests/", [older]) == [older]


def test_a_worker_behind_a_relay_is_seen_at_the_server(tmp_path: Path) -> None:
    """All of it in processes of their own: server, relay, follower; and status, asked over HTTP."""
    runs = tmp_path / "runs"
    publish_steps(str(runs / "one"), 3)
    with (
        running("serve", runs) as server,
        running("relay", server.url, cache=tmp_path / "cache", constants={PASS_EVERY_S: 0.1}) as near,
    ):
        command = ("follow", f"{near.url}/one", tmp_path / "weights", "--heartbeat", "far-1", "--interval", 0.2)
        with Forked(PULSE[-1], *command, kernels=True) as process:
            for url in (near.url, server.url):
                wait_until(lambda url=url: len(workers(f"{url}/one")) == 1, 60)  # type: ignore[misc]
                (worker,) = workers(f"{url}/one")
                assert (worker["name"], worker["state"], worker["lag"]) == ("far-1", "ok", 0)
                assert worker["heartbeat"]["recount_equal"] is True
            assert pulse("status", f"{server.url}/two", "--json").code == 3
            process.send_signal(signal.SIGINT)
            process.wait(30)
            wait_until(lambda: workers(f"{server.url}/one")[0]["state"] == "ended")
    assert not (runs / "one" / "heartbeats").exists()


def workers(url: str) -> list[dict[str, Any]]:
    done = pulse("status", url, "--json")
    assert done.code == 0, done
    found: list[dict[str, Any]] = done.events[0]["workers"]
    return found
