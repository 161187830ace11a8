import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from pulsesync import Subscriber
from pulsesync.errors import (
    ConflictError,
    LimitError,
    MissingBucketError,
    NotFoundError,
    NothingPublishedError,
    StoreError,
)
from pulsesync.store import ObjectStore, RetryStore, open_store
from pulsesync.testing.stores import StoreTests
from tests.s3 import Server


class TestObjectStore(StoreTests):
    large_bytes = (20 << 20) + 1
    races = 1  # this server takes five seconds to say no to fifteen at once

    @pytest.fixture
    def store(self, s3_server: Server) -> ObjectStore:
        return ObjectStore(s3_server.fresh_url(), **s3_server.options)


def test_large_objects_are_put_in_pieces_and_small_ones_at_once(s3_server: Server) -> None:
    store = ObjectStore(s3_server.fresh_url(), **s3_server.options)
    for key, size in (("large", (20 << 20) + 1), ("small", 8 << 20)):
        store.put(key, bytes(size))
    tags = {key: str(store._store.head(key)["e_tag"]).strip('"') for key in ("large", "small")}
    assert tags["large"].endswith("-3")
    assert "-" not in tags["small"]


def test_runs_of_one_bucket_do_not_see_each_other(s3_server: Server) -> None:
    url = s3_server.fresh_url()
    one, other = (ObjectStore(url + end, **s3_server.options) for end in ("", "-2"))
    one.put("parts/a", b"1")
    assert [entry.key for entry in one.list("parts/")] == ["parts/a"]
    assert list(other.list("parts/")) == []


def test_a_location_alone_opens_with_what_the_environment_says(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    store = open_store(s3_server.fresh_url())
    assert isinstance(store, RetryStore)
    store.put("head", b"1")
    assert store.get("head") == b"1"


def test_wrong_credentials_are_not_worth_a_retry(s3_server: Server) -> None:
    store = ObjectStore(s3_server.fresh_url(), **{**s3_server.options, "secret_access_key": "wrong"})
    for call in calls(store):
        with pytest.raises(StoreError, match="403") as caught:
            call()
        assert not caught.value.retryable


def test_a_bucket_that_is_not_there_is_not_an_empty_run(s3_server: Server) -> None:
    store = ObjectStore("s3://no-such-bucket/run", **s3_server.options)
    with pytest.raises(MissingBucketError, match="bucket does not exist") as caught:
        store.get("head")
    assert not isinstance(caught.value, NotFoundError)
    assert not caught.value.retryable


@pytest.mark.parametrize("bucket", ["there is none", "it has no such run"])
def test_a_worker_that_syncs_from_a_wrong_bucket_or_prefix_is_told_what_was_looked_for(
    s3_server: Server, bucket: str
) -> None:
    url = "s3://no-such-bucket/run" if bucket == "there is none" else s3_server.fresh_url()
    worker = Subscriber(ObjectStore(url, **s3_server.options))
    with pytest.raises(NothingPublishedError, match=r"manifests/.*wait_s=") as caught:
        worker.sync({"w": np.zeros(4, np.float32)})
    assert caught.value.location == url


@pytest.mark.parametrize("url", ["s3://bucket/run?region=x", "s3://bucket/run#x", "s3:///run"])
def test_a_url_that_makes_no_sense_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="s3://"):
        ObjectStore(url)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        ObjectStore("s3://bucket/run", nonsense="1")


def test_nobody_listening_is_worth_a_retry() -> None:
    with broken_server(lambda _: None) as endpoint:
        pass
    for call in calls(store_at(endpoint)):
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.retryable


@pytest.mark.parametrize("status", [500, 502, 503, 429, 408, 400, 401, 403, 405])
def test_the_status_says_whether_to_try_again(status: int) -> None:
    with broken_server(lambda request: respond(request, status)) as endpoint:
        for call in calls(store_at(endpoint)):
            with pytest.raises(StoreError, match=str(status)) as caught:
                call()
            assert caught.value.retryable is (status >= 500 or status in (408, 429))
            assert "Debug" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code><Message>User x isn&apos;t allowed to &lt;read&gt;'
            b"\nRequestId:1</Message><HostId>h</HostId></Error>",
            "403 Forbidden, AccessDenied: User x isn't allowed to <read> (credentials from the keywords of the store)",
        ),
        (b"<Error><Code>Slow</Code></Error>", "403 Forbidden, Slow (credentials from the keywords of the store)"),
        (b"<html><h1>Go\naway</h1></html>", "403 Forbidden (credentials from the keywords of the store)"),
    ],
)
def test_what_a_server_answers_is_told_in_one_line_and_not_as_xml(body: bytes, said: str) -> None:
    with broken_server(lambda request: respond(request, 403, body)) as endpoint:
        for call in calls(store_at(endpoint)):
            with pytest.raises(StoreError) as caught:
                call()
            assert caught.value.reason.endswith(f"in s3://bucket/run: the server answered {said}")
            assert "pulse doctor s3://bucket/run" in str(caught.value)


def test_two_creates_that_crossed_are_no_conflict_yet() -> None:
    body = b"<Error><Code>ConditionalRequestConflict</Code></Error>"
    with broken_server(lambda request: respond(request, 409, body)) as endpoint, pytest.raises(StoreError) as caught:
        store_at(endpoint).create("manifests/0", b"")
    assert caught.value.retryable
    assert not isinstance(caught.value, ConflictError)


@pytest.mark.parametrize("range_", [(), (0, 5)])
def test_an_object_that_ends_too_early_is_worth_a_retry(range_: tuple[int, ...]) -> None:
    def stop(request: BaseHTTPRequestHandler) -> None:
        head = {"content-length": "5", "content-range": "bytes 0-4/5"}
        respond(request, 206 if range_ else 200, b"01", head)

    with broken_server(stop) as endpoint, pytest.raises(StoreError) as caught:
        store_at(endpoint).get("parts/a", *range_)
    assert caught.value.retryable


def test_a_server_that_falls_silent_is_worth_a_retry() -> None:
    over = threading.Event()

    def say_nothing(request: BaseHTTPRequestHandler) -> None:
        over.wait(20)

    with broken_server(say_nothing) as endpoint:
        try:
            with pytest.raises(StoreError) as caught:
                store_at(endpoint, client_options={"read_timeout": "200ms"}).get("head")
        finally:
            over.set()
    assert caught.value.retryable


def test_no_more_is_taken_than_was_asked_for() -> None:
    def send_more(request: BaseHTTPRequestHandler) -> None:
        respond(request, 206, bytes(1000), {"content-length": "1000", "content-range": "bytes 0-9/1000"})

    with broken_server(send_more) as endpoint, pytest.raises(StoreError, match="more than the 10 bytes") as caught:
        store_at(endpoint).get("manifests/0", 0, 10)
    assert caught.value.key == "manifests/0"


FORK = """
import os, sys
from pulsesync.errors import StoreError
from pulsesync.store import ObjectStore

store = ObjectStore("s3://bucket/run", endpoint=sys.argv[1], access_key_id="k", secret_access_key="s")

def fails():
    try:
        store.get("head")
    except StoreError as e:
        print(e, flush=True)

def forked(work):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    os.waitpid(pid, 0)

forked(fails)
fails()
forked(fails)
"""


def test_a_call_in_a_forked_process_fails_instead_of_waiting_for_ever() -> None:
    source = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with broken_server(lambda request: respond(request, 400)) as endpoint:
        command = [sys.executable, "-c", FORK, endpoint]
        done = subprocess.run(command, capture_output=True, text=True, env=source, timeout=30, check=True)
    before, parent, after = done.stdout.splitlines()
    assert "400" in before
    assert "400" in parent
    assert "start the process with 'spawn'" in after


def calls(store: ObjectStore) -> list[Callable[[], object]]:
    return [
        lambda: store.get("a"),
        lambda: store.get("a", 1, 2),
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
        lambda: store.delete("a"),
        lambda: list(store.list("a/")),
    ]


def store_at(endpoint: str, **options: object) -> ObjectStore:
    return ObjectStore("s3://bucket/run", endpoint=endpoint, access_key_id="k", secret_access_key="s", **options)


def respond(
    request: BaseHTTPRequestHandler, status: int, body: bytes = b"", head: dict[str, str] | None = None
) -> None:
    request.rfile.read(int(request.headers.get("content-length") or 0))
    request.send_response(status)
    dates = {"last-modified": "Sun, 15 Nov 2026 04:57:19 GMT", "etag": '"x"', "content-length": str(len(body))}
    for name, value in (dates | (head or {})).items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(body)
    request.close_connection = True


@contextmanager
def broken_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def handle_one_request(self) -> None:
            self.raw_requestline = self.rfile.readline()
            if self.raw_requestline and self.parse_request():
                answer(self)
            self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("address", ["http://user:s3cret@127.0.0.1:9", "http://127.0.0.1:9/?sig=s3cret"])
@pytest.mark.parametrize("place", ["keyword", "config", "variable", "url"])
def test_an_address_with_a_user_or_a_query_is_refused_and_not_shown(
    place: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, object] = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    if place == "variable":
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    elif place == "keyword":
        keys["endpoint"] = address
    elif place == "config":
        keys["config"] = {"endpoint": address}
    with pytest.raises(ValueError, match="must not contain a user") as caught:
        ObjectStore("s3://user:s3cret@bucket/run?x" if place == "url" else "s3://bucket/run", **keys)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None


def pages(count: int) -> Callable[[BaseHTTPRequestHandler], None]:
    """A server whose listing has no end, in pages of `count` objects."""
    numbers = itertools.count()

    def answer(request: BaseHTTPRequestHandler) -> None:
        number = next(numbers)
        objects = "".join(
            f"<Contents><Key>run/parts/{number:06d}{i}</Key><Size>1</Size><ETag>x</ETag>"
            "<LastModified>2026-11-15T04:57:19.000Z</LastModified></Contents>"
            for i in range(count)
        )
        more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number}</NextContinuationToken>"
        respond(request, 200, f"<ListBucketResult><Name>bucket</Name>{more}{objects}</ListBucketResult>".encode())

    return answer


def test_a_listing_whose_pages_do_not_end_is_given_up_by_entries_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.store.object.MAX_ENTRIES", 2500)
    with broken_server(pages(1000)) as endpoint, pytest.raises(LimitError, match="more than 2,500 objects"):
        store_at(endpoint).list("parts/")
    monkeypatch.setattr("pulsesync.store.object._LISTING_S", 0.3)
    attempts: list[float] = []
    monkeypatch.setattr("pulsesync.store.retry.sleep", attempts.append)
    with broken_server(pages(0)) as endpoint, pytest.raises(LimitError, match=r"limit of 0\.3 s"):
        list(RetryStore(store_at(endpoint)).list("parts/"))
    assert attempts == []  # it is not tried again
