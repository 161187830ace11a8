"""What servers and relays report of themselves: /metrics and /healthz of processes, asked over loopback."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync import events, metrics
from pulsesync.errors import NotFoundError, StoreError
from pulsesync.server import ServedFolder, make_app, relay
from pulsesync.server.calls import RememberedCall
from pulsesync.store import LocalStore, MemoryStore, Store
from tests.metrics.scraping import Scraped, scrape
from tests.serving import ask, running

pytest.importorskip("starlette")
pytest.importorskip("granian")

BODY = b"0123456789" * 100
RECORD = "manifests/0000000000000007"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = LocalStore(tmp_path / "run")
    for key, data in {"parts/a": BODY, "head": b"7", RECORD: b"record"}.items():
        store.put(key, data)
    return tmp_path / "run"


# What is counted


def test_a_server_counts_its_requests_by_status_and_their_bytes(folder: Path) -> None:
    with running("serve", folder) as server:
        for path in ("/parts/a", "/parts/a", "/parts/none", "/head"):
            ask(server.url, path)
        ask(server.url, "/parts/a", "HEAD")
        ask(server.url, "/parts/a", Range="bytes=0-9")
        page, place = scrape(f"{server.url}/metrics"), str(folder)
    assert page.value("pulse_requests_total", location=place, method="GET", status="200", cache="none") == 3
    assert page.value("pulse_requests_total", location=place, method="GET", status="404", cache="none") == 1
    assert page.value("pulse_requests_total", location=place, method="GET", status="206", cache="none") == 1
    assert page.value("pulse_requests_total", location=place, method="HEAD", status="200", cache="none") == 1
    assert page.value("pulse_served_bytes_total", location=place, cache="none") == 2 * len(BODY) + 1 + 10
    assert page.value("pulse_request_duration_seconds_count", location=place) == 6
    assert page.value("pulse_store_failures_total", location=place) == 0
    assert page.value("pulse_store_up", location=place) == 1
    assert page.value("pulse_cache_bytes", location=place) is None


def test_scrapes_and_health_checks_are_not_counted(folder: Path) -> None:
    with running("serve", folder) as server:
        for _ in range(3):
            ask(server.url, "/healthz")
            page = scrape(f"{server.url}/metrics")
    assert page.total("pulse_requests_total") == 0


def test_a_relay_counts_what_its_cache_had_and_what_it_had_not(folder: Path, tmp_path: Path) -> None:
    with (
        running("serve", folder) as origin,
        running("relay", origin.url, cache=tmp_path / "cache", max_cache="1GB") as server,
    ):
        for _ in range(3):
            assert ask(server.url, "/parts/a").body == BODY
        assert ask(server.url, "/head").body == b"7"
        page, place = scrape(f"{server.url}/metrics"), origin.url
        upstream = scrape(f"{origin.url}/metrics")
    assert page.total("pulse_requests_total", location=place, cache="miss") == 1
    assert page.total("pulse_requests_total", location=place, cache="hit") == 2
    assert page.total("pulse_requests_total", location=place, cache="none") == 1
    assert page.value("pulse_served_bytes_total", location=place, cache="hit") == 2 * len(BODY)
    assert page.value("pulse_cache_limit_bytes", location=place) == 1e9
    kept = page.value("pulse_cache_bytes", location=place)
    assert kept is not None
    assert len(BODY) < kept < len(BODY) + 200  # a digest, and a file with the size
    assert upstream.value("pulse_served_bytes_total", location=str(folder), cache="none") == len(BODY) + 1


def test_a_relay_whose_upstream_is_away_counts_failures_and_is_not_healthy(folder: Path, tmp_path: Path) -> None:
    briefly = {"pulsesync.store.coalesce._REMEMBER_S": 0.1, "pulsesync.server.monitor._HEALTH_KEEP_S": 0.1}
    with (
        running("serve", folder) as origin,
        running("relay", origin.url, cache=tmp_path / "cache", constants=briefly) as server,
    ):
        assert ask(server.url, "/parts/a").status == 200
        assert ask(server.url, "/healthz").status == 200
        assert scrape(f"{server.url}/metrics").value("pulse_store_up", location=origin.url) == 1
        origin.stop()
        time.sleep(0.2)  # for longer than an answer of the upstream is remembered, a second for users
        assert ask(server.url, "/parts/a").body == BODY  # it is in the cache
        assert ask(server.url, "/head").status == 503
        health, page = ask(server.url, "/healthz"), scrape(f"{server.url}/metrics")
    assert (health.status, json.loads(health.body)) == (503, {"status": "the store does not answer"})
    assert page.value("pulse_store_up", location=origin.url) == 0
    assert page.value("pulse_store_failures_total", location=origin.url) == 1
    assert page.total("pulse_requests_total", location=origin.url, status="503") == 1


def test_the_newest_version_that_was_sent_is_shown_for_every_run_below_a_folder(tmp_path: Path) -> None:
    weights = {"w": np.zeros(100, np.float32)}
    for name, count in (("one", 3), ("deep/two", 2)):
        with pulse.Publisher(str(tmp_path / "runs" / name)) as publisher:
            for step in range(count):
                weights["w"] += 1
                publisher.publish(weights, step=step)
    with running("serve", tmp_path / "runs") as server:
        for name in ("one", "deep/two"):
            pulse.Subscriber(f"{server.url}/{name}").sync({"w": np.zeros(100, np.float32)})
        ask(server.url, "/one/manifests/0000000000000000")  # an older one changes nothing
        ask(server.url, "/none/manifests/0000000000000099")  # and one that is not there neither
        page = scrape(f"{server.url}/metrics")
    shown = {labels: value for (name, labels), value in page.samples.items() if name == "pulse_newest_version"}
    place = str(tmp_path / "runs")
    assert shown == {
        frozenset({("location", f"{place}/one")}): 2.0,
        frozenset({("location", f"{place}/deep/two")}): 1.0,
    }


# Who may ask


def test_metrics_need_the_token_and_health_does_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    with running("serve", folder, token_file=tmp_path / "token") as server:
        assert ask(server.url, "/metrics").status == 401
        assert ask(server.url, "/metrics", Authorization="Bearer other").status == 401
        assert ask(server.url, "/metrics").headers["WWW-Authenticate"] == "Bearer"
        health = ask(server.url, "/healthz")
        assert (health.status, json.loads(health.body)) == (200, {"status": "ok"})
        assert ask(server.url, "/head").status == 401
        page = scrape(f"{server.url}/metrics", "s3cret")
    assert page.total("pulse_requests_total", status="401") == 1


def test_metrics_are_open_where_that_is_permitted_and_objects_are_not(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    with running("serve", folder, token_file=tmp_path / "token", open_metrics=True) as server:
        assert scrape(f"{server.url}/metrics").value("pulse_store_up", location=str(folder)) == 1
        assert ask(server.url, "/head").status == 401


def test_health_reveals_nothing_but_itself_and_may_not_be_kept(folder: Path) -> None:
    with running("serve", folder) as server:
        health = ask(server.url, "/healthz")
        assert ask(server.url, "/healthz", "HEAD").status == 200
        assert ask(server.url, "/healthz", "POST").status == 405
        assert ask(server.url, "/metrics", "POST").status == 405
    assert health.body == b'{"status":"ok"}'
    assert health.headers["Cache-Control"] == "no-store"
    assert health.headers["Content-Type"] == "application/json"


def test_a_prometheus_server_gets_a_format_that_it_knows(folder: Path) -> None:
    with running("serve", folder) as server:
        plain, openmetrics = (
            ask(server.url, "/metrics", Accept=accept)
            for accept in ("", "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5")
        )
    assert plain.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert openmetrics.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert openmetrics.body.endswith(b"# EOF\n")


def test_a_format_that_cannot_be_parsed_is_no_error() -> None:
    page, content_type = metrics.PrometheusMetrics().page("application/openmetrics-text; version=abc")
    assert content_type.startswith(("text/plain", "application/openmetrics-text"))  # the second with prometheus 0.20
    assert page.startswith(b"# HELP pulse_")


# Keys and paths


def test_no_object_of_a_run_is_hidden_by_the_paths_of_the_server(tmp_path: Path) -> None:
    """A run has one object without a folder, which is `head`; a run that is called metrics has its objects in one."""
    weights = {"w": np.zeros(100, np.float32)}
    with pulse.Publisher(str(tmp_path / "metrics"), anchor_every=1) as publisher:
        for step in range(3):
            weights["w"] += 1
            publisher.publish(weights, step=step)
    pulse.move_pointer(str(tmp_path / "metrics"), "stable", 1)
    keys = {str(path.relative_to(tmp_path / "metrics")) for path in (tmp_path / "metrics").rglob("*") if path.is_file()}
    assert {key for key in keys if "/" not in key} == {"head"}
    with running("serve", tmp_path) as server:
        model = {"w": np.zeros(100, np.float32)}
        assert pulse.Subscriber(f"{server.url}/metrics").sync(model).version == 2
        np.testing.assert_array_equal(model["w"], weights["w"])
        assert scrape(f"{server.url}/metrics").total("pulse_requests_total") > 0


# Health


class Sick(MemoryStore):
    """A store whose answers a test sets, and which counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.error = 0, None
        self.released = threading.Event()
        self.released.set()

    error: Exception | None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.asked += 1
        self.released.wait(10)
        if self.error is not None:
            raise self.error
        return super().get(key, begin, end)


@contextmanager
def client(store: Store, **options: Any) -> Iterator["App"]:
    yield App(make_app(store, **options))


class App:
    """An application, asked without a server in between; on one event loop, as a server has it."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def get(self, path: str) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "root_path": ""}

        async def receive() -> dict[str, Any]:
            await asyncio.sleep(10)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def test_a_store_is_asked_once_a_second_however_many_ask_for_its_health(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("pulsesync.server.calls.time", SimpleNamespace(monotonic=lambda: now_s))

    async def case() -> None:
        nonlocal now_s
        store = Sick()
        with client(store) as app:
            answers = await asyncio.gather(*(app.get("/healthz") for _ in range(50)))
            assert [status for status, _ in answers] == [200] * 50
            assert store.asked == 1
            store.error = StoreError("no route", retryable=True)
            now_s += 0.9
            assert (await app.get("/healthz"))[0] == 200
            now_s += 0.2
            assert (await app.get("/healthz"))[0] == 503
            assert store.asked == 2

    asyncio.run(case())


def test_a_store_that_hangs_is_not_healthy_and_is_not_asked_again_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("pulsesync.server.monitor._HEALTH_LIMIT_S", 0.2)
    monkeypatch.setattr("pulsesync.server.calls.time", SimpleNamespace(monotonic=lambda: now_s))

    async def case() -> None:
        nonlocal now_s
        store = Sick()
        store.released.clear()
        with client(store) as app:
            began = time.monotonic()
            answers = await asyncio.gather(*(app.get("/healthz") for _ in range(20)))
            assert time.monotonic() - began > 0.15
            assert {status for status, _ in answers} == {503}
            now_s += 1.1
            assert (await asyncio.gather(*(app.get("/healthz") for _ in range(3))))[0][0] == 503  # it still hangs
            assert store.asked == 1
            store.released.set()
            for _ in range(100):
                if (await app.get("/healthz"))[0] == 200:
                    break
                now_s += 1.1
                await asyncio.sleep(0.05)
            assert (await app.get("/healthz"))[0] == 200

    asyncio.run(case())


@pytest.mark.parametrize("error", [StoreError("refused"), ValueError("a bug of the store")])
def test_a_store_that_fails_is_not_healthy(error: Exception) -> None:
    store = Sick()
    store.error = error
    with client(store) as app:
        assert asyncio.run(app.get("/healthz")) == (503, b'{"status":"the store does not answer"}')


def test_a_store_without_a_version_is_healthy_and_a_folder_that_is_gone_is_not(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        MemoryStore().get("head")
    with client(MemoryStore()) as app:
        assert asyncio.run(app.get("/healthz"))[0] == 200
    (tmp_path / "empty").mkdir()
    for name, status in (("empty", 200), ("gone", 503)):
        with client(relay(ServedFolder(tmp_path / name), tmp_path / "cache")) as app:
            assert asyncio.run(app.get("/healthz"))[0] == status


def test_a_call_is_made_once_at_a_time_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("pulsesync.server.calls.time", SimpleNamespace(monotonic=lambda: now_s))

    async def case() -> None:
        nonlocal now_s
        calls: list[int] = []

        def count() -> int:
            calls.append(1)
            time.sleep(0.05)
            return len(calls)

        remembered = RememberedCall(count, keep_s=0.2, limit_s=5)
        assert await asyncio.gather(*(remembered.outcome() for _ in range(10))) == [1] * 10
        now_s += 0.19
        assert await remembered.outcome() == 1
        now_s += 0.02
        assert await remembered.outcome() == 2

    asyncio.run(case())


def test_a_call_that_has_had_its_time_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, released = 100.0, threading.Event()
    monkeypatch.setattr("pulsesync.server.calls.time", SimpleNamespace(monotonic=lambda: now_s))

    async def case() -> None:
        nonlocal now_s
        remembered = RememberedCall(lambda: released.wait(30), keep_s=1, limit_s=30)
        first = asyncio.create_task(remembered.outcome())
        await asyncio.sleep(0)
        now_s += 31
        assert await asyncio.wait_for(remembered.outcome(), 10) is None
        released.set()
        assert await first is True

    asyncio.run(case())


# Events


def test_every_answer_is_an_event() -> None:
    store, received = Sick(), list[events.Event]()
    store.put("parts/a", BODY)
    with pulse.listen(received.append), client(store) as app:
        asyncio.run(app.get("/parts/a"))
        store.error = StoreError("no route", retryable=True)
        asyncio.run(app.get("/head"))
        asyncio.run(app.get("/healthz"))
    first, second = (event for event in received if isinstance(event, events.RequestServed))
    assert (first.method, first.status, first.sent_bytes, first.store_failed) == ("GET", 200, len(BODY), False)
    assert (second.status, second.store_failed) == (503, True)
    assert 0 <= first.seconds < 10


def test_an_answer_that_the_store_breaks_off_is_counted_as_its_failure() -> None:
    class Shrinking(MemoryStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            if begin:
                raise StoreError("no route", retryable=True)
            return super().get(key, begin, end)

    store = Shrinking()
    store.put("parts/a", bytes(9 << 20))
    with client(store) as app:
        with pytest.raises(StoreError):
            asyncio.run(app.get("/parts/a"))
        page = Scraped(asyncio.run(app.get("/metrics"))[1].decode())
    assert page.total("pulse_store_failures_total") == 1
    assert page.total("pulse_requests_total", status="200") == 1
    assert page.total("pulse_served_bytes_total") == 4 << 20


def test_a_key_cannot_send_commands_to_the_terminal_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
            raise StoreError(f"cannot read {key}: no answer", key=key, retryable=True)

    with client(Failing()) as app:
        assert asyncio.run(app.get("/\x1b[2J\x07" + "x" * 5000))[0] == 503
    (message,) = [record.message for record in caplog.records]
    assert message.isprintable()
    assert len(message) < 1200


def test_many_requests_at_once_are_all_counted(folder: Path) -> None:
    with running("serve", folder) as server, ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda _: ask(server.url, "/parts/a").status, range(150)))
        page = scrape(f"{server.url}/metrics")
    assert statuses == [200] * 150
    assert page.total("pulse_requests_total") == 150
    assert page.total("pulse_served_bytes_total") == 150 * len(BODY)
