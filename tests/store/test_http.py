"""HttpStore against servers made of a socket and a few lines: well-behaved, plain, broken and hostile ones."""

import json
import socket
import socketserver
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from pulsesync.errors import LimitError, NotFoundError, PulseError, StoreError
from pulsesync.store import RetryStore
from pulsesync.store.base import ObjectEntry
from pulsesync.store.http import HttpStore
from pulsesync.testing.stores import NOT_KEYS, in_threads
from tests.identity import make_identity

CONTENT = bytes(range(256)) * 20
Reply = Callable[[str], bytes]


class Place:
    """A server in this process: what it was asked, on how many connections, and a store that asks it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[str] = []
        self.connections = 0
        self.opened: list[socket.socket] = []

    def close_connections(self) -> None:
        """Of clients that keep them for their next request."""
        for connection in self.opened:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    """An answer with its length, and other headers by name: content_type for Content-Type."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextmanager
def answering(reply: Reply, tls: ssl.SSLContext | None = None) -> Iterator[Place]:
    """Answer each request with the bytes of reply, and close the connection after an answer that says so."""
    place = Place("")

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            place.connections += 1
            while head := self.head():
                place.requests.append(head)
                data = reply(head)
                try:
                    self.wfile.write(data)
                except OSError:  # the client has what it wanted
                    return
                if b"Connection: close" in data:
                    return

        def head(self) -> str:
            lines = []
            while (line := self.rfile.readline()) not in (b"", b"\r\n"):
                lines.append(line.decode())
            return "".join(lines)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

        def get_request(self) -> tuple[socket.socket, object]:
            connection, address = super().get_request()
            connection.settimeout(10)
            place.opened.append(connection)
            if tls is not None:
                connection = place.opened[-1] = tls.wrap_socket(connection, server_side=True)
            return connection, address

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        place.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield place
        finally:
            server.shutdown()
            thread.join()
            place.close_connections()


@contextmanager
def asking(reply: Reply, **options: object) -> Iterator[tuple[HttpStore, Place]]:
    with answering(reply) as place, closing(HttpStore(place.url, **options)) as store:  # type: ignore[arg-type]
        yield store, place


def ranged(request: str) -> bytes:
    """A server that knows ranges, with CONTENT under every key but `none`."""
    if request.startswith("GET /none "):
        return answer("404 Not Found", b"no such thing")
    found = [line for line in request.splitlines() if line.startswith("Range: bytes=")]
    if not found:
        return answer("200 OK", CONTENT)
    first, _, last = found[0].removeprefix("Range: bytes=").partition("-")
    begin, end = int(first), min(int(last or len(CONTENT)) + 1, len(CONTENT))
    if begin >= len(CONTENT):
        return answer("416 Range Not Satisfiable")
    return answer("206 Partial Content", CONTENT[begin:end], Content_Range=f"bytes {begin}-{end - 1}/{len(CONTENT)}")


def plain(request: str) -> bytes:
    """A server that does not know ranges."""
    return answer("200 OK", CONTENT)


def test_an_object_is_got_whole_without_a_range() -> None:
    with asking(plain) as (store, place):
        assert store.get("parts/a") == CONTENT
    assert place.requests[0].startswith("GET /parts/a HTTP/1.1\r\n")
    assert "Range:" not in place.requests[0]


@pytest.mark.parametrize("reply", [ranged, plain])
def test_a_range_is_what_it_is_of_the_whole(reply: Reply) -> None:
    with asking(reply) as (store, _):
        ranges = [(0, 10), (7, 9), (100, None), (0, 1 << 30), (5119, 5121), (5120, 5121), (9000, None), (5, 5)]
        for begin, end in ranges:
            assert store.get("parts/a", begin, end) == CONTENT[begin:end], (begin, end)


def test_what_is_not_there_is_not_found() -> None:
    with asking(ranged) as (store, _):
        for begin, end in ((0, None), (0, 5), (3, 3)):
            with pytest.raises(NotFoundError) as caught:
                store.get("none", begin, end)
            assert caught.value.key == "none"


def test_a_connection_is_used_again_after_objects_and_after_absent_ones() -> None:
    with asking(ranged) as (store, place):
        for key in ("a", "none", "b", "none", "a"):
            try:
                store.get(key, 0, 10)
            except NotFoundError:
                assert key == "none"
    assert (len(place.requests), place.connections) == (5, 1)


def test_a_kept_connection_that_was_closed_meanwhile_is_replaced() -> None:
    with asking(lambda _: plain("")) as (store, place):
        store.get("a")
        place.close_connections()
        assert store.get("a") == CONTENT
    assert place.connections == 2


def test_the_path_of_the_address_stands_before_the_key() -> None:
    with answering(plain) as place, closing(HttpStore(f"{place.url}/runs/7/")) as store:
        store.get("starts/a b%?#")
    assert place.requests[0].startswith("GET /runs/7/starts/a%20b%25%3F%23 HTTP/1.1")


def test_the_token_goes_with_every_request() -> None:
    with asking(plain, token="s3cret") as (store, place):
        store.get("a")
    assert "Authorization: Bearer s3cret\r\n" in place.requests[0]


def test_a_refusal_names_the_options_and_not_the_token() -> None:
    for status in ("401 Unauthorized", "403 Forbidden"):
        with asking(lambda _, status=status: answer(status), token="s3cret") as (store, _):  # type: ignore[misc]
            advice = r"pass token= to Subscriber or open_store, or set PULSE_SEND_TOKENS=http://127\.0\.0\.1:\d+=TOKEN"
            with pytest.raises(StoreError, match=advice) as caught:
                store.get("a")
            assert not caught.value.retryable
            assert "s3cret" not in str(caught.value)


def test_a_status_says_whether_to_try_again() -> None:
    retryable = {"500 Oh": True, "503 Busy": True, "429 Slowly": True, "400 What": False, "302 There": False}
    found = {}
    for status in retryable:
        reply = answer(status, b"words", Location="http://127.0.0.1:1/")
        with asking(lambda _, reply=reply: reply) as (store, _):  # type: ignore[misc]
            with pytest.raises(StoreError, match=status[:3]) as caught:
                store.get("a")
            found[status] = caught.value.retryable
    assert found == retryable


TRUNCATED = {
    "a body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n0123456789",
    "a range": b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-49/99\r\nContent-Length: 50\r\nConnection: close\r\n\r\n01",
    "a range by its own words": b"HTTP/1.1 206 Some\r\nContent-Range: bytes 0-49/99\r\nContent-Length: 4\r\n\r\n0123",
    "a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n10\r\n0123",
    "between chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n4\r\n0123\r\n",
    "a status line": b"HTTP/1.1 2",
    "nothing": b"Connection: close",
}


@pytest.mark.parametrize("data", TRUNCATED.values(), ids=TRUNCATED)
def test_an_answer_that_breaks_off_may_be_tried_again(data: bytes) -> None:
    def reply(request: str) -> bytes:
        return data if b"Connection: close" in data or b"Length: 4" in data else data + b"\r\nConnection: close"

    with asking(reply) as (store, _):
        with pytest.raises(StoreError) as caught:
            store.get("a", 0, 50)
        assert caught.value.retryable


def test_a_skipped_part_that_breaks_off_is_not_taken_for_the_end() -> None:
    with asking(lambda _: TRUNCATED["a body"]) as (store, _):
        with pytest.raises(StoreError, match="connection was closed") as caught:
            store.get("a", 50, 60)
        assert caught.value.retryable


def test_nobody_listening_may_be_tried_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(StoreError) as caught:
            HttpStore(f"http://127.0.0.1:{free.getsockname()[1]}").get("a")
    assert caught.value.retryable


def test_silence_ends_after_the_timeout_and_may_be_tried_again() -> None:
    saying = "timed out: the server is too slow for the limit of 0.1 s"
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreError, match=saying) as caught:
        HttpStore(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.1).get("a")
    assert caught.value.retryable


TRICKLED = {  # what comes at once, and what follows one byte at a time
    "in the status line": (b"", b"HTTP/1.1 200 OK\r\n"),
    "in the headers": (b"HTTP/1.1 200 OK\r\n", b"X-Long: " + b"a" * 60_000),
    "in interim answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "in the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", bytes(60_000)),
    "after much of the body": (b"HTTP/1.1 200 OK\r\nContent-Length: 360000\r\n\r\n" + bytes(300_000), bytes(60_000)),
    "in a body without a length": (b"HTTP/1.1 200 OK\r\n\r\n", bytes(60_000)),
    "in a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n", bytes(60_000)),
    "in the size of a chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0" * 60_000),
    "in words of an error": (b"HTTP/1.1 503 Busy\r\nContent-Length: 60000\r\n\r\n", bytes(60_000)),
}


def test_a_server_that_sends_a_byte_now_and_then_is_given_up_and_may_be_tried_again() -> None:
    def outcome(number: int) -> tuple[str, bool]:
        at_once, slowly = trickled[number]
        with trickling(at_once, slowly, pause_s=0.08) as url, closing(HttpStore(url, timeout_s=0.2)) as store:
            begin = time.monotonic()
            with pytest.raises(StoreError, match="timed out") as caught:
                store.get("a", 0, 1 << 20)
        took_s = time.monotonic() - begin  # 0.2 s for the headers, and 0.2 s for each 3,277 bytes, of up to 360,000
        return "given up" if took_s < 4 else f"took {took_s} s", caught.value.retryable

    trickled = list(TRICKLED.values())
    outcomes = in_threads(len(trickled), outcome)
    assert dict(zip(TRICKLED, outcomes, strict=True)) == dict.fromkeys(TRICKLED, ("given up", True))


def test_a_tls_handshake_that_does_not_end_is_given_up() -> None:
    record = b"\x16\x03\x03\x40\x00"  # of 16 KiB, which begins a handshake
    with trickling(record, bytes(1 << 14), pause_s=0.08) as url:
        store = HttpStore(url.replace("http:", "https:"), timeout_s=0.2)
        begin = time.monotonic()
        with pytest.raises(StoreError, match="timed out") as caught:
            store.get("a")
        assert time.monotonic() - begin < 10  # it would take 1,300 s
    assert caught.value.retryable


def test_a_slow_server_that_keeps_the_minimum_rate_is_read_to_its_end() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n"
    with (
        trickling(head, bytes(40), pause_s=0.02) as url,
        closing(HttpStore(url, timeout_s=0.4, min_bytes_per_s=10)) as store,
    ):
        assert store.get("a") == bytes(40)  # takes twice timeout_s


@contextmanager
def trickling(at_once: bytes, slowly: bytes, pause_s: float) -> Iterator[str]:
    """Answer every request with some bytes at once, and then with others one by one, until the client leaves."""
    ending = threading.Event()

    def trickle(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.settimeout(10)
            connection.recv(4096)
            connection.sendall(at_once)
            for at in range(len(slowly)):
                if ending.wait(pause_s):
                    return
                connection.sendall(slowly[at : at + 1])

    def accept(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=trickle, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, args=(listening,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ending.set()
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_the_size_is_that_of_an_earlier_answer_else_it_is_asked_for() -> None:
    def reply(request: str) -> bytes:
        return answer("200 OK", CONTENT)[: -len(CONTENT)] if request.startswith("HEAD ") else ranged(request)

    with asking(reply) as (store, place):
        assert store.size("parts/a") == store.size("parts/a") == len(CONTENT)
        assert store.get("parts/b", 0, 10) == CONTENT[:10]
        assert store.size("parts/b") == len(CONTENT)
        assert store.get("parts/c", 1 << 20, None) == b""
        assert store.size("head") == store.size("head") == len(CONTENT)  # may change: asked for each time
    assert [line.partition(" HTTP")[0] for line in place.requests] == [
        "HEAD /parts/a",
        "GET /parts/b",
        "GET /parts/c",
        "HEAD /head",
        "HEAD /head",
    ]


def test_the_size_is_had_from_a_server_that_does_not_answer_head() -> None:
    for status in ("405 Method Not Allowed", "501 Not Implemented"):
        for body in (answer("200 OK", CONTENT), b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + CONTENT):

            def reply(request: str, status: str = status, body: bytes = body) -> bytes:
                return f"HTTP/1.1 {status}\r\n\r\n".encode() if request.startswith("HEAD ") else body

            with asking(reply) as (store, _):
                assert store.size("parts/a") == len(CONTENT), (status, body[:40])


def test_the_size_of_what_is_not_there_is_not_found() -> None:
    with (
        asking(lambda _: b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\n") as (store, _),
        pytest.raises(NotFoundError),
    ):
        store.size("none")


OVERSIZED = {
    "longer than asked": b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n",
    "without end": b"HTTP/1.1 200 OK\r\n\r\n",
    "a chunk of -1": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a chunk without end": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
}


@pytest.mark.parametrize("head", OVERSIZED.values(), ids=OVERSIZED)
def test_no_more_than_the_end_is_read_of_an_answer_without_bounds(head: bytes) -> None:
    sent = 0
    stopped = threading.Event()

    def pour(listening: socket.socket) -> None:
        nonlocal sent
        connection, _ = listening.accept()
        with connection:
            connection.settimeout(10)
            try:
                connection.recv(4096)
                connection.sendall(head)
                while sent < 1 << 30:
                    sent += connection.send(bytes(1 << 16))
            except OSError:  # the client left
                stopped.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=pour, args=(listening,))
        thread.start()
        assert HttpStore(f"http://127.0.0.1:{listening.getsockname()[1]}").get("a", 10, 1000) == bytes(990)
        thread.join()
    assert stopped.is_set()
    assert sent < 1 << 25  # what the two ends of a connection hold


def test_another_range_than_the_one_asked_for_is_refused() -> None:
    said = ["bytes 1-9/99", "bytes 0-8/99", "bytes 0-9/5", "bytes 0-10/99", "bytes 5-4/99", "bytes 0-9", "items 0-9/99"]
    for one in (*said, "", "bytes 0-" + "9" * 5000):
        reply = answer("206 Partial Content", bytes(10), Content_Range=one)
        with (
            asking(lambda _, reply=reply: reply) as (store, _),  # type: ignore[misc]
            pytest.raises(StoreError, match="request was for bytes 0-9"),
        ):
            pytest.fail(f"{one[:40]!r} was accepted: {store.get('a', 0, 10)!r}")


def test_an_encoding_that_was_not_asked_for_is_refused() -> None:
    with (
        asking(lambda _: answer("200 OK", b"\x1f\x8b", Content_Encoding="gzip")) as (store, _),
        pytest.raises(StoreError, match="Content-Encoding"),
    ):
        store.get("a")


def test_what_is_not_a_key_is_not_asked_for() -> None:
    with asking(plain) as (store, place):
        for key in NOT_KEYS:
            with pytest.raises(StoreError, match="a key must be"):
                store.get(key)
    assert place.requests == []


def test_writing_is_refused() -> None:
    store = HttpStore("http://127.0.0.1:1")
    writes: list[Callable[[], object]] = [
        lambda: store.put("a", b""),
        lambda: store.create("a", b""),
        lambda: store.delete("a"),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="read-only"):
            write()


def test_an_address_that_is_none_is_refused() -> None:
    for url in ("ftp://host", "host", "http://", "http://host?a=1", "http://host#a", "http://a:b@host"):
        with pytest.raises(ValueError, match=r"address|location"):
            HttpStore(url)


def test_a_token_that_is_no_header_is_refused_and_not_shown() -> None:
    for token in ("", "two words", "line\nbreak", "münchen"):
        with pytest.raises(ValueError, match=r"the token is empty|must be printable ASCII"):
            HttpStore("https://host", token)
    for other in (3, b"hunter2"):
        with pytest.raises(TypeError, match=r"the token must be a text; got a value of type (int|bytes)$"):
            HttpStore("https://host/run", other)  # type: ignore[arg-type]


def test_a_token_is_sent_over_tls_and_to_this_machine_and_in_clear_to_another_if_that_is_asked_for() -> None:
    for url in ("http://host", "http://10.0.0.7:8765", "http://localhost.example.com", "http://[::2]"):
        with pytest.raises(ValueError, match=r"https.*token_in_clear=True") as caught:
            HttpStore(url, "s3cret")
        assert "s3cret" not in str(caught.value)
        HttpStore(url, "s3cret", token_in_clear=True)
        HttpStore(url)
    for url in ("https://host", "http://localhost:1", "http://127.0.0.1:1", "http://127.9.9.9:1", "http://[::1]:1"):
        HttpStore(url, "s3cret")


def test_a_redirect_is_not_followed_so_that_the_token_goes_nowhere_else() -> None:
    with answering(plain) as other, asking(lambda _: moved(other.url), token="s3cret") as (store, _):
        calls = ((store.get, "parts/a"), (store.size, "parts/a"), (lambda prefix: list(store.list(prefix)), "parts/"))
        for ask, key in calls:
            with pytest.raises(StoreError, match="302"):
                ask(key)
    assert other.requests == []


def moved(url: str) -> bytes:
    return answer("302 Found", Location=f"{url}/parts/a")


def test_limits_under_which_a_request_might_never_end_are_refused() -> None:
    for timeout_s, min_bytes_per_s in ((0, 1), (-1, 1), (1, 0)):
        with pytest.raises(ValueError, match="must be positive"):
            HttpStore("https://host", timeout_s=timeout_s, min_bytes_per_s=min_bytes_per_s)


def listing(*lines: object) -> Reply:
    body = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    return lambda _: answer("200 OK", body.encode(), Content_Type="application/x-ndjson")


def test_a_listing_is_asked_for_by_its_prefix() -> None:
    lines = [{"key": "parts/a", "size": 3, "modified": 1.5}, {"key": "parts/b/c", "size": 0, "modified": 2}]
    with asking(listing(*lines)) as (store, place):
        assert list(store.list("parts/")) == [ObjectEntry("parts/a", 3, 1.5), ObjectEntry("parts/b/c", 0, 2.0)]
    assert place.requests[0].startswith("GET /?list=parts%2F&after= HTTP/1.1")


BAD_LINES: list[object] = [
    "no JSON",
    "[1]",
    "7",
    "[" * 100_000,
    "{}",
    {"key": "other/a", "size": 1, "modified": 1},
    {"key": "parts/../a", "size": 1, "modified": 1},
    {"key": 7, "size": 1, "modified": 1},
    {"key": "parts/\ud800", "size": 1, "modified": 1},
    {"key": "parts/b", "size": -1, "modified": 1},
    {"key": "parts/b", "size": True, "modified": 1},
    {"key": "parts/b", "size": 1.5, "modified": 1},
    {"key": "parts/b", "size": 1 << 60, "modified": 1},
    {"key": "parts/b", "size": 1, "modified": "x"},
    '{"key": "parts/b", "size": 1, "modified": NaN}',
    {"key": "parts/b", "size": 1, "modified": 10**400},
    {"key": "parts/a", "size": 1, "modified": 1},
]


def test_a_listing_with_a_bad_line_is_refused() -> None:
    for line in BAD_LINES:
        with asking(listing({"key": "parts/a", "size": 1, "modified": 1}, line)) as (store, _):
            with pytest.raises(StoreError, match="malformed line") as caught:
                pytest.fail(f"{str(line)[:40]} was accepted: {list(store.list('parts/'))}")
            assert caught.value.retryable, line  # it is not taken for a server that cannot list


def paged(*pages: bytes) -> Reply:
    """A server that sends a page for each request, and says that there are more."""
    rest = list(pages)
    return lambda _: answer(
        "200 OK", rest.pop(0), Content_Type="application/x-ndjson", Pulse_Listing_More="yes" if rest else "no"
    )


def line_of(key: str) -> bytes:
    return b'{"key": "%s", "size": 1, "modified": 1}\n' % key.encode()


def test_a_listing_in_pages_is_read_one_page_after_the_other() -> None:
    pages = [line_of("parts/a") + line_of("parts/b c"), line_of("parts/d")]
    with asking(paged(*pages)) as (store, place):
        entries = store.list("parts/")
        assert [next(entries).key, next(entries).key] == ["parts/a", "parts/b c"]
        assert len(place.requests) == 1
        assert [entry.key for entry in entries] == ["parts/d"]
    assert [request.split()[1] for request in place.requests] == [
        "/?list=parts%2F&after=",
        "/?list=parts%2F&after=parts%2Fb%20c",
    ]


@pytest.mark.parametrize(
    ("second", "match"),
    [(line_of("parts/a"), "malformed line"), (b"", "empty page"), (b"x" * 40_000, "malformed line")],
)
def test_pages_that_lead_nowhere_are_refused(second: bytes, match: str) -> None:
    with asking(paged(line_of("parts/a"), second, b"")) as (store, _), pytest.raises(StoreError, match=match):
        list(store.list("parts/"))


def test_a_listing_that_does_not_end_is_given_up_by_entries_bytes_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(request: str) -> bytes:
        keys = [f"parts/{len(place.requests):06d}{i}" for i in range(10)]
        return answer(
            "200 OK", b"".join(map(line_of, keys)), Content_Type="application/x-ndjson", Pulse_Listing_More="yes"
        )

    for limit, value, match in (("MAX_ENTRIES", 95, "95 objects"), ("_MAX_LISTING", 5000, "5,000 bytes")):
        with monkeypatch.context() as patched:
            patched.setattr(f"pulsesync.store.http.{limit}", value)
            with asking(endless) as (store, place), pytest.raises(LimitError, match=match):
                list(store.list("parts/"))
            assert len(place.requests) == 10
    monkeypatch.setattr("pulsesync.store.http.ENDLESS_TIMEOUTS", 2)
    attempts: list[float] = []
    monkeypatch.setattr("pulsesync.store.retry.sleep", attempts.append)
    with (
        asking(endless, timeout_s=0.25, min_bytes_per_s=1) as (store, place),
        pytest.raises(LimitError, match=r"within the limit of 0\.5 s"),
    ):
        list(RetryStore(store).list("parts/"))
    assert attempts == []  # it is not tried again


def test_a_reader_of_a_large_listing_keeps_the_answer_and_not_its_entries() -> None:
    body = b"".join(line_of(f"parts/{i:08d}") for i in range(10_000))  # as entries: 2.5 MB
    with asking(lambda _: answer("200 OK", body, Content_Type="application/x-ndjson")) as (store, _):
        tracemalloc.start()
        try:
            assert max(entry.key for entry in store.list("parts/")) == "parts/00009999"
            # The server of this test is in this process; a list of the entries takes five times as much as the answer.
            assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("reply", [plain, lambda _: answer("404 Not Found")])
def test_a_server_of_files_cannot_list_and_the_error_says_so(reply: Reply) -> None:
    with asking(reply) as (store, _):
        with pytest.raises(StoreError, match="cannot list") as caught:
            list(store.list("parts/"))
        assert not isinstance(caught.value, NotFoundError)


def test_a_server_that_signed_its_own_certificate_is_trusted_only_by_it(tmp_path: Path) -> None:
    certificate, private_key = make_identity(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, private_key)
    with answering(ranged, tls) as place:
        with closing(HttpStore(place.url, cafile=str(certificate))) as store:
            assert store.get("a", 5, 10) == CONTENT[5:10]
        with pytest.raises(StoreError, match=r"not trusted.*cafile") as caught:
            HttpStore(place.url).get("a")
        assert not caught.value.retryable


def test_certificates_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read certificates"):
        HttpStore("https://host", cafile=str(tmp_path / "none.pem"))


ENDLESS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_an_answer_without_a_length_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # It keeps the minimum rate, and so the clock of each portion alone would read it for ever.
    monkeypatch.setattr("pulsesync.store.transport.ENDLESS_TIMEOUTS", 3)
    monkeypatch.setattr("pulsesync.store.http.ENDLESS_TIMEOUTS", 3)
    ending = threading.Event()

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=send, args=(listening.accept()[0],), daemon=True).start()

    def send(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if connection.recv(4096).startswith(b"HEAD"):
                connection.sendall(ENDLESS)
                return
            connection.sendall(ENDLESS.replace(b"\r\n\r\n", b"\r\nContent-Type: application/x-ndjson\r\n\r\n"))
            while not ending.wait(0.01):
                connection.sendall(b"100\r\n" + bytes(256) + b"\r\n")

    calls: list[tuple[Callable[[HttpStore], object], type[PulseError], bool | None]] = [
        (lambda store: store.size("parts/a"), StoreError, True),
        (lambda store: store.get("parts/a"), StoreError, True),
        (lambda store: list(store.list("parts/")), LimitError, None),
    ]
    outcomes: list[bool | None] = []

    def ask(number: int) -> None:
        call, error, retryable = calls[number]
        with (
            closing(HttpStore(url, timeout_s=0.2, min_bytes_per_s=100)) as store,
            pytest.raises(error, match=r"did not end within the limit of 0\.6 s") as raised,
        ):
            call(store)
        assert getattr(raised.value, "retryable", None) is retryable
        outcomes.append(retryable)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asking = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(3)]  # which hang if it fails
        for one in asking:
            one.start()
        for one in asking:
            one.join(10)
        ending.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in asking:
            one.join(5)
    assert len(outcomes) == len(calls)


def test_no_answer_is_kept_in_memory_or_measured_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.store.http._MAX_UNSTATED", 1000)
    monkeypatch.setattr("pulsesync.store.http._MAX_WHOLE", 2000)
    unstated = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    for size in (1000, 1001):
        body = unstated + bytes(size)
        with asking(lambda head, body=body: unstated if head.startswith("HEAD") else body) as (store, _):  # type: ignore[misc]
            if size == 1000:
                assert store.get("parts/a") == bytes(size)
                assert store.size("parts/a") == size
                continue
            with pytest.raises(StoreError, match="exceeds the 1000 bytes"):
                store.get("parts/a")
            with pytest.raises(StoreError, match="exceeds 1000 bytes"):
                store.size("parts/a")
            assert store.get("parts/a", 0, 1001) == bytes(1001)
    with asking(lambda _: answer("200 OK", bytes(2001))) as (store, _):
        with pytest.raises(StoreError, match="exceeds the 2000 bytes"):
            store.get("parts/a")
        assert store.get("parts/a", 0, 2001) == bytes(2001)


def test_after_one_kept_connection_was_closed_the_others_are_not_tried() -> None:
    at_once = threading.Barrier(4)
    closing_now = threading.Event()

    def reply(request: str) -> bytes:
        if "/parts/together " in request:
            at_once.wait(5)
        elif closing_now.is_set() and place.connections == 4:
            raise ConnectionError("the connection is closed without an answer")
        return answer("200 OK", b"x")

    with asking(reply) as (store, place):
        threads = [threading.Thread(target=store.get, args=("parts/together",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(store._transport._idle) == 4
        closing_now.set()
        place.requests.clear()
        assert store.get("parts/a") == b"x"
        assert len(place.requests) == 2
        assert len(store._transport._idle) == 1


def test_the_user_part_of_an_address_is_refused_and_not_shown() -> None:
    for url in ("https://user:s3cret@host/?x", "http://user:s3cret@host", "http://s3cret@host/"):
        with pytest.raises(ValueError, match="must not contain a user or a password") as caught:
            HttpStore(url)
        assert "s3cret" not in str(caught.value)


def test_reports_that_no_request_followed_are_kept_within_bounds() -> None:
    store = HttpStore("http://127.0.0.1:1")
    for i in range(5000):
        store.forget(f"parts/{i}")
    assert len(store._doubted) <= 1024
