"""Servers and relays as processes of their own, asked over loopback; and what coalesces inside a relay."""

import asyncio
import hashlib
import http.client
import http.server
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pulsesync.cli import serve as serving
from pulsesync.cli.options import UsageError
from pulsesync.cli.serve import parse_size
from pulsesync.errors import NotFoundError, PulseError, StoreError
from pulsesync.server import make_app, sending, serve
from pulsesync.server import relay as make_relay
from pulsesync.server import serving as ending
from pulsesync.server.calls import SharedBytes, SharedPlaces
from pulsesync.server.connections import Connections, close_excess, network
from pulsesync.server.listings import PAGE, Listings
from pulsesync.server.sending import send_piece
from pulsesync.server.service import _Service
from pulsesync.store import CachedStore, LocalStore, MemoryStore, ObjectEntry, RetryStore, forget
from pulsesync.store.base import too_many
from pulsesync.store.coalesce import CoalescingStore
from pulsesync.store.http import HttpStore
from tests.forked import Forked
from tests.identity import make_identity
from tests.serving import ask, running

pytest.importorskip("starlette")
pytest.importorskip("granian")
from starlette.datastructures import Headers

from tests.tiers import slow

SMALL = b"0123456789"
PIECE = 1 << 22  # what a server reads at once
LARGE = random.Random(1).randbytes(5 * PIECE + 5)  # more than it reads ahead
TWO_PIECES = LARGE[: PIECE + 5]
RUN = {"parts/small": SMALL, "parts/large": LARGE, "parts/empty": b"", "layouts/a": b"layout", "head": b"41"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "run"
    store = LocalStore(folder)
    for key, data in RUN.items():
        store.put(key, data)
    (folder.parent / "secret").write_text("not to be served")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with running("serve", folder) as server:
        yield server.url


@pytest.fixture
def store(url: str) -> Iterator[HttpStore]:
    with closing(HttpStore(url)) as store:
        yield store


def test_every_object_is_served_as_it_is(store: HttpStore) -> None:
    assert {key: store.get(key) for key in RUN} == RUN


N = len(LARGE)
RANGES = [(0, 5), (3, None), (9, 10), (10, 11), (99, None), (0, N), (0, N + 1), (0, N + 99), (0, 1 << 50), (5, N - 1)]
RANGES += [
    (1 << 20, None),
    (1, (1 << 20) + 1),
    (1, (1 << 20) + 2),
    (N - 1, N + 1),
    (N, N + 1),
    (0, 1 << 20),
    (N + 1, None),
]


def test_a_range_is_what_it_is_of_the_whole(store: HttpStore) -> None:
    for key in ("parts/small", "parts/large", "parts/empty", "head"):
        for begin, end in RANGES:
            assert store.get(key, begin, end) == RUN[key][begin:end], (key, begin, end)


def test_a_part_says_which_it_is(url: str) -> None:
    for asked, content_range, body in (
        ("bytes=2-4", "bytes 2-4/10", b"234"),
        ("bytes=8-99", "bytes 8-9/10", b"89"),
        ("bytes=8-", "bytes 8-9/10", b"89"),
        ("bytes=-3", "bytes 7-9/10", b"789"),
        ("bytes=-99", "bytes 0-9/10", SMALL),
    ):
        answer = ask(url, "/parts/small", Range=asked)
        assert (answer.status, answer.headers["Content-Range"], answer.body) == (206, content_range, body), asked


def test_the_last_bytes_of_a_large_object_are_found(url: str) -> None:
    answer = ask(url, "/parts/large", Range="bytes=-7")
    assert (answer.status, answer.body) == (206, LARGE[-7:])
    assert answer.headers["Content-Range"] == f"bytes {N - 7}-{N - 1}/{N}"


def test_a_part_beyond_the_end_is_not_satisfiable(url: str) -> None:
    for key, asked in (("small", "10-"), ("small", "10-12"), ("small", "-0"), ("empty", "0-5")):
        answer = ask(url, f"/parts/{key}", Range=f"bytes={asked}")
        size = len(RUN[f"parts/{key}"])
        assert (answer.status, answer.headers["Content-Range"]) == (416, f"bytes */{size}"), (key, asked)


def test_what_is_not_one_range_of_bytes_is_answered_with_everything(url: str) -> None:
    for asked in ("bytes=0-1,4-5", "bytes=5-2", "bytes=-", "bytes=x-y", "lines=1-2", "bytes=1"):
        answer = ask(url, "/parts/small", Range=asked)
        assert (answer.status, answer.body) == (200, SMALL), asked


def test_head_tells_the_size_and_sends_nothing(url: str) -> None:
    for key, data in RUN.items():
        answer = ask(url, f"/{key}", "HEAD")
        assert (answer.status, answer.headers["Content-Length"], answer.body) == (200, str(len(data)), b""), key


def test_what_is_content_addressed_may_be_cached_for_ever(url: str) -> None:
    for key in ("parts/small", "parts/large", "layouts/a"):
        headers = ask(url, f"/{key}").headers
        assert headers["Cache-Control"] == "public, max-age=31536000, immutable"
        assert headers["ETag"].startswith('"')


def test_what_may_change_or_appear_is_asked_for_again(url: str) -> None:
    assert ask(url, "/head").headers["Cache-Control"] == "no-cache"
    absent = ask(url, "/manifests/0000000000000042")
    assert (absent.status, absent.headers["Cache-Control"]) == (404, "no-store")


def test_who_has_an_object_is_not_sent_it_again(url: str) -> None:
    for key in ("parts/large", "head"):
        tag = ask(url, f"/{key}").headers["ETag"]
        for names in (tag, f'"other", W/{tag}'):
            answer = ask(url, f"/{key}", If_None_Match=names)
            assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", tag), (key, names)
        assert ask(url, f"/{key}", If_None_Match='"other"').status == 200


def test_a_hint_that_was_replaced_has_another_tag(url: str, folder: Path) -> None:
    before = ask(url, "/head").headers["ETag"]
    LocalStore(folder).put("head", b"42")
    try:
        answer = ask(url, "/head", If_None_Match=before, Range="bytes=0-0", If_Range=before)
    finally:
        LocalStore(folder).put("head", b"41")
    assert (answer.status, answer.body) == (200, b"42")  # all of it, because the part asked for was of another object


def test_other_methods_are_not_allowed(url: str) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        answer = ask(url, "/head", method)
        assert (answer.status, set(answer.headers["Allow"].split(", ")) - {"PUT"}) == (405, {"GET", "HEAD"}), method


def test_a_path_that_is_no_key_leads_nowhere(url: str, folder: Path) -> None:
    for path in (
        "/../secret",
        "/%2e%2e/secret",
        "/..%2fsecret",
        "/parts/../../secret",
        "/parts/%2e%2e/%2e%2e/secret",
        "//etc/passwd",
        "/%2fetc/passwd",
        "/..%5csecret",
        "/head%00",
        "/%ff",
        "/",
        "/.",
        "/parts/",
        "/a%0ab",
    ):
        answer = ask(url, path)
        assert answer.status == 404, path
        assert str(folder).encode() not in answer.body, path
        assert b"served" not in answer.body, path


def test_a_listing_is_that_of_the_store(store: HttpStore, folder: Path) -> None:
    assert list(store.list("parts/")) == list(LocalStore(folder).list("parts/"))
    assert list(store.list("anchors/")) == []


def test_a_prefix_that_is_none_is_a_bad_request(url: str) -> None:
    for prefix in ("", "/", "parts", "../", "parts/../../"):
        assert ask(url, f"/?list={prefix}").status == 400, prefix


def test_pages_of_a_listing_are_the_listing(tmp_path: Path) -> None:
    (tmp_path / "one" / "parts").mkdir(parents=True)
    for i in range(2 * PAGE + 5):
        (tmp_path / "one" / "parts" / f"{i:05d}").touch()
    with running("serve", tmp_path) as server:
        whole = ask(server.url, "/one/?list=parts/")
        assert "Pulse-Listing-More" not in whole.headers  # as a server of 0.1.0 answers, with or without after=
        pages, after, more = b"", "", "yes"
        while more == "yes":
            page = ask(server.url, f"/one/?list=parts/&after={after}")
            assert page.headers["Content-Type"] == whole.headers["Content-Type"]
            more, pages = page.headers["Pulse-Listing-More"], pages + page.body
            assert page.body.count(b"\n") == (PAGE if more == "yes" else 5)
            after = json.loads(page.body.splitlines()[-1])["key"]
        assert pages == whole.body
        assert whole.body.count(b"\n") == 2 * PAGE + 5
        assert ask(server.url, "/one/?list=parts/&after=parts/00006x").body.startswith(b'{"key": "parts/00007"')
        for beyond in (after, "zzz"):
            page = ask(server.url, f"/one/?list=parts/&after={beyond}")
            assert (page.body, page.headers["Pulse-Listing-More"]) == (b"", "no")
        with closing(HttpStore(f"{server.url}/one")) as store:
            assert [entry.key for entry in store.list("parts/")] == [f"parts/{i:05d}" for i in range(2 * PAGE + 5)]


def test_listings_that_nobody_reads_delay_neither_other_requests_nor_the_end(tmp_path: Path) -> None:
    """Of 150, each of which takes a tenth of a second to make and is larger than what a connection takes unread."""
    (tmp_path / "manifests").mkdir()
    for i in range(3000):
        (tmp_path / "manifests" / f"{i:016d}").touch()
    (tmp_path / "head").write_bytes(b"2999")
    with running("serve", tmp_path) as server, ExitStack() as unread:
        address = urlsplit(server.url)
        for _ in range(150):
            connection = socket.socket()
            unread.enter_context(connection).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((address.hostname, address.port))
            connection.sendall(b"GET /?list=manifests/ HTTP/1.1\r\nHost: a\r\n\r\n")
        begin = time.monotonic()
        assert ask(server.url, "/head").body == b"2999"
        assert ask(server.url, "/?list=manifests/").body.count(b"\n") == 3000
        if sys.platform == "linux":
            assert len(os.listdir(f"/proc/{server.process.pid}/task")) < 30
        assert server.stop() == 0
        assert time.monotonic() - begin < 10  # one after the other they would take fifteen seconds


@pytest.mark.slow  # ten seconds
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_listing_that_nobody_reads_takes_little_memory(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    for i in range(12_000):
        (tmp_path / "manifests" / f"{i:0230d}").touch()

    def memory_kb(pid: int) -> int:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    with running("serve", tmp_path) as server, ExitStack() as unread:
        assert len(ask(server.url, "/?list=manifests/").body) > 3_000_000
        before = memory_kb(server.process.pid)
        address = urlsplit(server.url)
        for _ in range(100):
            connection = socket.socket()
            unread.enter_context(connection).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((address.hostname, address.port))
            connection.sendall(b"GET /?list=manifests/ HTTP/1.1\r\nHost: a\r\n\r\n")
        assert len(ask(server.url, "/?list=manifests/").body) > 3_000_000  # those before have been worked on
        time.sleep(1)
        assert memory_kb(server.process.pid) - before < 100 * 450


class CountedListings:
    """Counts how often a store is listed, and how often at the same time."""

    def __init__(self, fails: bool = False) -> None:
        self.made: list[str] = []
        self.running = self.most = 0
        self.fails = fails

    def __call__(self, prefix: str) -> list[ObjectEntry]:
        self.made.append(prefix)
        self.running += 1
        self.most = max(self.most, self.running)
        time.sleep(0.05)
        self.running -= 1
        if self.fails:
            raise StoreError("the store is away", retryable=True)
        return [ObjectEntry(f"{prefix}a", 1, 2.0)]


def test_equal_listings_are_made_once_a_second_and_two_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.listings._KEEP_S", 0.2)
    counted = CountedListings()

    async def many() -> None:
        listings = Listings(counted)
        for _ in range(2):
            found = await asyncio.gather(*(listings.get("", f"{i % 4}/", f"client {i}") for i in range(100)))
            assert {one.data for one in found} == {
                b'{"key": "%d/a", "size": 1, "modified": 2.0}\n' % i for i in range(4)
            }
        assert sorted(counted.made) == ["0/", "1/", "2/", "3/"]
        await asyncio.sleep(0.3)
        assert not listings._flights
        await listings.get("", "0/")

    asyncio.run(many())
    assert (len(counted.made), counted.most) == (5, 2)


def test_a_listing_for_which_nobody_waits_any_more_is_not_begun(caplog: pytest.LogCaptureFixture) -> None:
    counted = CountedListings(fails=True)

    async def leave() -> None:
        listings = Listings(counted)
        tasks = [asyncio.create_task(listings.get("", f"{i}/", f"client {i}")) for i in range(8)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0.1)
        with pytest.raises(StoreError, match="away"):
            await listings.get("", "0/")
        assert not listings._flights

    asyncio.run(leave())
    assert counted.made == ["0/", "1/", "0/"]
    assert not caplog.records


def test_a_client_that_asks_for_many_listings_does_not_delay_those_of_others() -> None:
    counted = CountedListings()

    async def many() -> None:
        listings = Listings(counted)
        tasks = [asyncio.create_task(listings.get("", f"{i}/", "greedy")) for i in range(20)]
        await asyncio.sleep(0.01)
        await listings.get("", "mine/", "other")
        for task in tasks:
            task.cancel()

    asyncio.run(many())
    assert counted.made[:2] == ["0/", "mine/"]


def test_a_listing_is_never_older_than_a_second_or_the_time_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.server.listings._KEEP_S", 0.04)  # it takes 0.05 s
    counted = CountedListings()

    async def twice() -> None:
        listings = Listings(counted)
        await listings.get("", "0/")
        await asyncio.sleep(0.01)
        await listings.get("", "0/")

    asyncio.run(twice())
    assert len(counted.made) == 2


def test_a_client_takes_only_some_of_the_places() -> None:
    async def take() -> None:
        places, order = SharedPlaces(4, 2), list[str]()
        release = asyncio.Event()

        async def request(client: str) -> None:
            async with places.taken(client):
                order.append(client)
                await release.wait()

        tasks = [asyncio.create_task(request(client)) for client in "aaaabbb"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert sorted(order) == ["a", "a", "b", "b"]
        release.set()
        await asyncio.gather(*tasks)
        assert len(order) == 7
        assert not places._own

    asyncio.run(take())


def test_slow_clients_hold_a_limited_number_of_bytes_of_different_listings() -> None:
    held, one, two = SharedBytes(20), bytes(8), bytearray(8)
    three, large = bytes(bytearray(7)), bytes(30)
    with held.taken("a", one), held.taken("a", one), held.taken("b", one):  # the same bytes
        with pytest.raises(StoreError) as caught, held.taken("a", bytes(two)):
            pass
        assert caught.value.retryable
        with held.taken("b", b"22"), held.taken("c", three):
            with pytest.raises(StoreError), held.taken("d", b"4444"):
                pass
            with held.taken("d", b"333"):
                pass
    with held.taken("a", large), pytest.raises(StoreError), held.taken("b", one):
        pass
    with held.taken("b", one):
        pass
    assert not held._bytes
    assert not held._senders


def test_the_token_opens_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with running("serve", folder, token_file=tmp_path / "token") as server:
        for shown in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}, {"Authorization": "\xff"}):
            for path in ("/head", "/none", "/?list=parts/"):
                answer = ask(server.url, path, **shown)
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        with closing(HttpStore(server.url, "s3cret")) as store:
            assert store.get("head") == b"41"
        allowed = ask(server.url, "/parts/small", Authorization="Bearer s3cret")
        assert allowed.headers["Cache-Control"].startswith("private,")  # no cache in between may hand it to others
        with pytest.raises(StoreError, match="requires a token"):
            HttpStore(server.url).get("head")


def test_the_token_may_come_from_the_environment(folder: Path) -> None:
    with running("serve", folder, {"PULSE_TOKEN": "s3cret"}) as server:
        assert ask(server.url, "/head").status == 401


def test_a_certificate_makes_it_https(folder: Path, tmp_path: Path) -> None:
    certificate, private_key = make_identity(tmp_path)
    with running("serve", folder, certificate=certificate, private_key=private_key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with closing(HttpStore(server.url, cafile=str(certificate))) as store:
            assert store.get("parts/large") == LARGE
            assert store.get("head", 0, 1) == b"4"


@pytest.mark.parametrize("number", [slow(signal.SIGINT), signal.SIGTERM])
def test_it_ends_in_order_and_soon_though_a_request_hangs(upstream: "Upstream", tmp_path: Path, number: int) -> None:
    """Without being ended, which users see after a second: test_the_process_ends_after_a_signal_whatever_keeps_it."""
    assert ending._EXIT_S <= 1
    assert 2 * ending._STOP_S < ending._EXIT_S
    never = {"pulsesync.server.serving._EXIT_S": 60.0}
    with running("relay", upstream.url, cache=tmp_path, constants=never) as server, ThreadPoolExecutor() as threads:
        hanging = threads.submit(ask, server.url, "/hang")
        while not upstream.asked:
            time.sleep(0.01)
        begin = time.monotonic()
        assert server.stop(number) == 0
        assert time.monotonic() - begin < 8  # the request hangs for ten seconds
        assert server.printed() == ""  # nothing to complain about
        assert isinstance(hanging.exception(10), OSError | http.client.HTTPException) or hanging.result().status >= 500


END_HANGS = """
import asyncio, os, signal, threading, time
from pulsesync.server import serve, serving
from pulsesync.store import MemoryStore
serving._see_off = lambda threads: time.sleep(60)
serving._EXIT_S = 0.3
def ready(url):
    threading.Thread.start = None  # as if the system had no more threads
    for _ in range(10_000):
        asyncio.get_running_loop().call_soon_threadsafe(int)  # fills the pipe that wakes the loop
    os.kill(os.getpid(), signal.SIGTERM)
serve(MemoryStore(), port=0, on_ready=ready)
"""


def test_the_process_ends_after_a_signal_whatever_keeps_it() -> None:
    with Forked(END_HANGS) as process:
        assert process.wait(20) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_low_limit_of_files_is_raised_as_far_as_the_system_permits(folder: Path) -> None:
    with running("serve", folder, descriptors=(100, 2000)) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    (soft,) = (int(line.split()[3]) for line in limits.splitlines() if line.startswith("Max open files"))
    assert 1500 < soft < 2000


@pytest.mark.parametrize("secure", [False, True])
def test_idle_connections_do_not_shut_out_other_clients(folder: Path, tmp_path: Path, secure: bool) -> None:
    looks_often = {"pulsesync.server.connections._LOOK_EVERY_S": 0.05}
    options: dict[str, Any] = {"descriptors": (400, 400), "constants": looks_often}
    if secure:
        options["certificate"], options["private_key"] = make_identity(tmp_path)
    with running("serve", folder, **options) as server, ExitStack() as idle:
        address = urlsplit(server.url)
        # Without TLS 104 are accepted. With many more, the client's own connection is tried again after a second.
        for _ in range(450 if secure else 130):
            connection = idle.enter_context(socket.socket())
            connection.bind(("127.0.0.2", 0))  # of this client's connections any may be closed, even a new one
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect((address.hostname, address.port))
        begin = time.monotonic()
        cafile = str(options["certificate"]) if secure else None
        with closing(HttpStore(server.url, cafile=cafile)) as store:
            assert store.get("head") == b"41"
        assert time.monotonic() - begin < 8


def test_a_client_that_sends_no_request_is_disconnected(folder: Path) -> None:
    with running("serve", folder, constants={"pulsesync.server.serving._HEADER_S": 0.2}) as server:
        address = urlsplit(server.url)
        with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as idle:
            begin = time.monotonic()
            assert idle.recv(1) == b""
            assert 0.1 < time.monotonic() - begin < 8


def test_of_the_connections_of_a_client_that_has_too_many_the_idle_ones_are_closed() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        clients: list[socket.socket] = []
        for server, host in [(listener, "127.0.0.1")] * 6 + [(listener, "127.0.0.2")] * 3 + [(other, "127.0.0.1")] * 6:
            clients.append(stack.enter_context(socket.socket()))
            clients[-1].bind((host, 0))
            clients[-1].connect(server.getsockname())
            stack.enter_context(server.accept()[0])
        port = listener.getsockname()[1]
        busy = {client.getsockname() for client in clients[:2]}
        assert (
            close_excess(port, 11, {client.getsockname() for client in clients}) == 0
        )  # nine of eleven: there is room
        assert close_excess(port, 6, busy) == 3
        closed = [client for client in clients if select.select([client], [], [], 0)[0]]
        assert set(closed) < set(clients[2:6])
        close_excess(port, 2, busy)
        closed = [client for client in clients[:2] if select.select([client], [], [], 0)[0]]
        assert len(closed) == 1  # then those with a request
        assert not any(select.select([client], [], [], 0)[0] for client in clients[9:])


def test_a_look_at_the_connections_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pulsesync.server.connections._LOOK_EVERY_S", 0.001)
    looks: list[int] = []

    def fail() -> None:
        looks.append(1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("pulsesync.server.connections._descriptors", fail)

    async def watch() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(Connections(make_app(MemoryStore())).watch(1), 0.1)

    asyncio.run(watch())
    assert len(looks) > 2
    assert [one.message for one in caplog.records] == [
        "Connections beyond the limits could not be closed; this is tried again: can't start new thread"
    ]


def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6() -> None:
    for one, other, same in (
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
    ):
        assert (network(one) == network(other)) is same, (one, other)


def test_a_folder_is_served_without_what_is_no_object_of_it(tmp_path: Path) -> None:
    folder = tmp_path
    LocalStore(folder / "run").put("parts/a", SMALL)
    LocalStore(folder / "outside").put("secret", b"secret")
    os.mkfifo(folder / "run" / "parts" / "fifo")
    (folder / "run" / "parts" / "Icon\r").touch()  # of a file manager; no reader could take a listing with this line
    (folder / "run" / "parts" / "link").symlink_to(folder / "outside" / "secret")
    (folder / "run" / "linked").symlink_to(folder / "outside")
    (folder / "run" / "parts" / "device").symlink_to("/dev/zero")
    absent = ["/parts", "/parts/fifo", "/parts/device", "/parts/a/b", "/parts/" + "a" * 300, "/" + "a/" * 3000 + "a"]
    absent += ["/parts/link", "/linked/secret", "/linked", "/parts/.spool-1", "/parts/a%00"]
    listings = {"parts/": ["parts/a"], "linked/": [], "parts/fifo/": [], "a" * 300 + "/": []}
    with running("serve", folder / "run") as server:
        for path in absent:
            for method in ("GET", "HEAD"):
                answer = ask(server.url, path, method)
                assert (answer.status, b"secret" in answer.body) == (404, False), (path[:40], method)
        for prefix, keys in listings.items():
            answer = ask(server.url, f"/?list={prefix}")
            assert answer.status == 200
            assert [json.loads(line)["key"] for line in answer.body.splitlines()] == keys, prefix[:40]


def test_a_token_that_nobody_could_show_is_refused() -> None:
    for token in ("", " ", "two words"):
        with pytest.raises(ValueError, match="token"):
            make_app(MemoryStore(), token)
        with pytest.raises(ValueError, match="token"):
            serve(MemoryStore(), token=token)


def test_a_token_is_not_asked_for_in_clear_from_other_machines() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "trainer"):
        with pytest.raises(ValueError, match=r"unencrypted to .* certificate .*--token-in-clear"):
            serve(MemoryStore(), host, token="s3cret")


def test_a_token_may_be_asked_for_in_clear_where_that_is_permitted() -> None:
    for options in ({"token": "s3cret", "token_in_clear": True}, {}):
        with pytest.raises(PulseError, match="cannot listen"):  # this machine does not have that address
            serve(MemoryStore(), "192.0.2.7", 0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", ["PULSE_TOKEN", "PULSE_UPSTREAM_TOKEN"])
def test_a_token_that_was_given_and_is_empty_is_a_usage_error(
    folder: Path, tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    common: dict[str, Any] = {"host": "127.0.0.1", "port": 0, "certificate": None, "private_key": None, "as_json": True}
    relayed = {**common, "cache": tmp_path / "cache", "max_cache": None, "cafile": None, "token_file": None}
    empty = tmp_path / "token"
    empty.write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        serving.serve(folder, **common, token_file=empty)
    with pytest.raises(UsageError, match="is empty"):
        serving.relay("http://127.0.0.1:1", **relayed, upstream_token_file=empty)
    monkeypatch.setenv(variable, "")
    with pytest.raises(UsageError, match=f"the token in {variable} is empty"):
        serving.relay("http://127.0.0.1:1", **relayed)
    if variable == "PULSE_TOKEN":
        with pytest.raises(UsageError, match="the token in PULSE_TOKEN is empty"):
            serving.serve(folder, **common, token_file=None)


def test_a_size_is_asked_for_and_not_probed() -> None:
    delayed = Slow(seconds=0)
    delayed.put("parts/a", LARGE)
    app = _Service(delayed, None)
    for header in ({}, {"range": "bytes=-7"}, {"range": f"bytes=0-{N}"}, {"range": f"bytes={N}-"}):
        delayed.asked.clear()
        app._object("parts/a", not header, Headers(header))
        assert len(delayed.asked) <= 1


def test_a_client_that_leaves_early_does_no_harm(url: str) -> None:
    parts = urlsplit(url)
    for _ in range(5):
        with socket.create_connection((parts.hostname or "", parts.port or 0)) as connection:
            connection.sendall(b"GET /parts/large HTTP/1.1\r\nHost: a\r\n\r\n")
            connection.recv(100)
    assert ask(url, "/parts/large").body == LARGE


def test_a_port_that_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PulseError, match="cannot listen"):
        serve(MemoryStore(), port=taken.getsockname()[1])


def test_a_certificate_without_its_key_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only one of the two was given"):
        serve(MemoryStore(), port=0, certificate=tmp_path / "certificate.pem")
    with pytest.raises(PulseError, match="cannot use the certificate"):
        serve(MemoryStore(), port=0, certificate=tmp_path / "none.pem", private_key=tmp_path / "none.pem")


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(PulseError, match=r"pip install 'pulsesync\[serve\]'"):
        make_app(MemoryStore())


def test_importing_the_server_imports_no_extra() -> None:
    check = "import pulsesync.server, sys; sys.exit(bool({'starlette', 'granian', 'anyio'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=30).returncode == 0


def test_a_size_is_read_with_its_unit() -> None:
    sizes = {"0": 0, "500": 500, "20kB": 20_000, "5 MB": 5_000_000, "3GiB": 3 << 30, "2T": 2 * 10**12}
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "-1", "1.5GB", "GB", "1PB", "1 000"):
        with pytest.raises(PulseError, match="a size must be"):
            pytest.fail(f"{text!r} is {parse_size(text)}")


class Upstream(http.server.ThreadingHTTPServer):
    """A server in this process that serves a dictionary, and counts what it is asked for."""

    daemon_threads = True

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _UpstreamHandler)
        self.objects = objects
        self.asked: Counter[str] = Counter()
        self.shown: set[str | None] = set()  # as Authorization
        self.states_sizes = True
        self.delay_s = 0.0  # before each answer, so that many can wait for it
        self.damaged: dict[str, tuple[int, int]] = {}  # by key, which byte is damaged, and how many times
        self.ending = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def stated(self, data: bytes | None) -> str:
        return str(len(data)) if data is not None and self.states_sizes else "*"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a relay that was stopped


class _UpstreamHandler(http.server.BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"
    timeout = 10

    def do_GET(self) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        self.server.asked[f"{self.path[1:]} {first}-{last}"] += 1
        self.server.shown.add(self.headers.get("Authorization"))
        time.sleep(self.server.delay_s)
        if self.path.startswith(("/hang", "/parts/hang")):
            self.server.ending.wait(10)
        data = self.server.objects.get(self.path[1:])
        part = b"" if data is None else data[int(first) : int(last) + 1]
        at, times = self.server.damaged.get(self.path[1:], (0, 0))
        if times and int(first) <= at < int(first) + len(part):
            self.server.damaged[self.path[1:]] = at, times - 1
            part = part[: at - int(first)] + b"\x00" + part[at - int(first) + 1 :]
        self.send_response(404 if data is None else 206 if part else 416)
        self.send_header("Content-Length", str(len(part)))
        where = f"{first}-{int(first) + len(part) - 1}" if part else "*"
        self.send_header("Content-Range", f"bytes {where}/{self.server.stated(data)}")
        self.end_headers()
        self.wfile.write(part)

    def do_HEAD(self) -> None:
        self.server.asked[f"HEAD {self.path[1:]}"] += 1
        data = self.server.objects.get(self.path[1:])
        self.send_response(404 if data is None else 200)
        self.send_header("Content-Length", str(len(data or b"")))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        pass


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream(dict(RUN)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.ending.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("states_sizes", [True, False])
def test_many_clients_of_a_relay_cost_one_request_for_each_piece(
    upstream: Upstream, tmp_path: Path, states_sizes: bool
) -> None:
    upstream.states_sizes, upstream.delay_s = states_sizes, 0.05
    with (
        running("relay", upstream.url, cache=tmp_path) as relay,
        closing(HttpStore(relay.url)) as store,
        ThreadPoolExecutor(16) as threads,
    ):
        small = [threads.submit(store.get, "parts/small", 0, 10) for _ in range(16)]
        assert {future.result() for future in small} == {SMALL}
        large = [threads.submit(store.get, "parts/large", 0, N) for _ in range(6)]
        assert all(future.result() == LARGE for future in large)
    assert set(upstream.asked.values()) == {1}
    # The small one and six pieces of the large one; its size, if the upstream does not state it with a piece.
    assert sum(upstream.asked.values()) == 1 + 6 + (not states_sizes)


def test_polling_costs_the_upstream_one_request_a_second_and_key(upstream: Upstream, tmp_path: Path) -> None:
    def poll(store: HttpStore) -> None:
        assert store.get("head", 0, 64) == b"41"
        with pytest.raises(NotFoundError):
            store.get("manifests/0000000000000042", 0, 1 << 24)

    upstream.delay_s = 0.1
    with running("relay", upstream.url, cache=tmp_path) as relay, closing(HttpStore(relay.url)) as store:
        begin = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            for future in [threads.submit(poll, store) for _ in range(100)]:
                future.result()
        seconds = time.monotonic() - begin
    assert len(upstream.asked) == 2
    assert max(upstream.asked.values()) <= seconds + 1


@pytest.mark.slow
def test_a_relay_of_a_relay_passes_everything_on_and_soon(folder: Path, tmp_path: Path) -> None:
    with (
        running("serve", folder) as server,
        running("relay", server.url, cache=tmp_path / "1") as near,
        running("relay", near.url, cache=tmp_path / "2") as far,
        closing(HttpStore(far.url)) as store,
    ):
        for key, data in RUN.items():
            assert store.get(key, 0, len(data) + 1) == data
            assert store.get(key) == data
        assert list(store.list("parts/")) == list(LocalStore(folder).list("parts/"))
        with pytest.raises(NotFoundError):
            store.get("manifests/0000000000000007")
        LocalStore(folder).create("manifests/0000000000000007", b"{}\n")
        begin = time.monotonic()
        while time.monotonic() - begin < 3:
            try:
                assert store.get("manifests/0000000000000007") == b"{}\n"
                break
            except NotFoundError:
                time.sleep(0.05)
        assert time.monotonic() - begin < 2.5  # a second for each relay


def test_a_bad_copy_in_a_chain_of_relays_is_fetched_anew_when_a_reader_says_so(tmp_path: Path) -> None:
    origin = LocalStore(tmp_path / "run")
    origin.put("parts/a", b"damaged in transit")
    with (
        running("serve", origin.folder) as server,
        running("relay", server.url, cache=tmp_path / "1") as near,
        running("relay", near.url, cache=tmp_path / "2") as far,
        closing(HttpStore(far.url)) as store,
    ):
        assert store.get("parts/a", 0, 64) == b"damaged in transit"
        origin.put("parts/a", b"good")
        assert store.get("parts/a", 0, 64) == b"damaged in transit"
        forget(store, "parts/a")
        assert store.get("parts/a", 0, 64) == b"good"


@pytest.mark.parametrize("size", [len(TWO_PIECES), *(slow(size) for size in (len(SMALL), len(LARGE)))])
def test_what_a_relay_receives_damaged_it_does_not_keep(
    upstream: Upstream, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.store.retry.sleep", lambda _: None)
    data = LARGE[:size]
    key = f"files/{hashlib.sha256(data).hexdigest()}"
    upstream.objects[key] = data
    upstream.damaged[key] = (size - 5, 2)
    with running("relay", upstream.url, cache=tmp_path) as relay, closing(HttpStore(relay.url)) as store:
        assert RetryStore(store).get(key) == data
        assert store.get(key) == data
        assert relay.stop() == 0
        assert "damaged in transit" in relay.printed()
    assert upstream.damaged[key][1] == 0


REMEMBER_BRIEFLY = {"pulsesync.store.coalesce._REMEMBER_S": 0.1}  # a second, otherwise


def test_a_relay_of_a_folder_with_several_runs_fetches_what_is_named_by_its_content_once(tmp_path: Path) -> None:
    origin = LocalStore(tmp_path / "runs")
    for key in ("one/parts/a", "one/head"):
        origin.put(key, b"first")
    with (
        running("serve", origin.folder) as server,
        running("relay", server.url, cache=tmp_path / "cache", constants=REMEMBER_BRIEFLY) as relay,
        closing(HttpStore(f"{relay.url}/one")) as store,
    ):
        assert (store.get("parts/a", 0, 64), store.get("head", 0, 64)) == (b"first", b"first")
        for key in ("one/parts/a", "one/head"):
            origin.put(key, b"second")
        time.sleep(0.2)
        assert (store.get("parts/a", 0, 64), store.get("head", 0, 64)) == (b"first", b"second")


def test_a_relay_serves_what_it_has_while_its_upstream_is_away(folder: Path, tmp_path: Path) -> None:
    with (
        running("serve", folder) as server,
        running("relay", server.url, cache=tmp_path) as relay,
        closing(HttpStore(relay.url)) as store,
    ):
        for key in ("parts/large", "parts/small"):
            assert store.get(key, 0, N) == RUN[key]
        server.stop()
        for key in ("parts/large", "parts/small"):
            assert store.get(key, 0, N) == RUN[key]
        for key in ("layouts/a", "head", "manifests/0000000000000000"):
            with pytest.raises(StoreError) as caught:
                store.get(key)
            assert caught.value.retryable


def taken(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.iterdir())


def test_clients_cannot_make_a_relay_keep_more_of_an_object_than_there_is(upstream: Upstream, tmp_path: Path) -> None:
    with running("relay", upstream.url, cache=tmp_path) as relay:
        for i in range(0, 40, 10):
            assert ask(relay.url, "/parts/large", Range=f"bytes={i * 500_009}-").body == LARGE[i * 500_009 :]
            assert ask(relay.url, "/parts/large", Range=f"bytes={i}-{i + 9}").body == LARGE[i : i + 10]
            assert ask(relay.url, "/parts/large", "HEAD").headers["Content-Length"] == str(N)
            assert ask(relay.url, f"/parts/none{i}", Range=f"bytes={i}-").status == 404
            assert ask(relay.url, "/parts/large", Range=f"bytes={N + i * PIECE}-").status == 416
    assert taken(tmp_path) <= N + 40 * 32  # a checksum for each MiB and for the size
    assert sum(count for asked, count in upstream.asked.items() if "none" not in asked) <= 6


def test_a_relay_of_a_folder_does_not_leave_it_through_a_link(tmp_path: Path) -> None:
    LocalStore(tmp_path / "run").put("head", b"41")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret")
    with running("relay", tmp_path / "run", cache=tmp_path / "cache") as relay:
        assert ask(relay.url, "/head").body == b"41"
        assert ask(relay.url, "/link").status == 404


def test_a_relay_keeps_its_cache_below_a_limit(upstream: Upstream, tmp_path: Path) -> None:
    upstream.objects["parts/two"] = TWO_PIECES
    with running("relay", upstream.url, cache=tmp_path, max_cache="3MB") as relay:
        for _ in range(2):
            assert ask(relay.url, "/parts/two").body == TWO_PIECES
            assert 1_000_000 < taken(tmp_path) <= 3_000_000


def test_without_a_limit_given_a_relay_leaves_half_of_the_free_disk(tmp_path: Path) -> None:
    relayed = make_relay(MemoryStore(), tmp_path / "to" / "come")
    assert isinstance(relayed, CoalescingStore)
    assert isinstance(relayed.store, CachedStore)
    limit = relayed.store.max_bytes
    assert limit is not None
    assert abs(limit / (shutil.disk_usage(tmp_path).free / 2) - 1) < 0.1


@pytest.mark.parametrize("right", [True, False], ids=["the copy is right", "the copy cannot be checked"])
def test_no_client_can_evict_the_only_copy_while_the_upstream_is_away(tmp_path: Path, right: bool) -> None:
    key = f"files/{hashlib.sha256(TWO_PIECES).hexdigest()}" if right else "parts/a"
    origin = LocalStore(tmp_path / "run")
    origin.put(key, TWO_PIECES)
    with running("serve", origin.folder) as server, running("relay", server.url, cache=tmp_path / "cache") as relay:
        assert ask(relay.url, f"/{key}").body == TWO_PIECES
        server.stop()
        for _ in range(2):
            answer = ask(relay.url, f"/{key}", Cache_Control="no-cache")
            assert (answer.status, answer.body == TWO_PIECES) == (200, True)
            assert ask(relay.url, f"/{key}", Range="bytes=5-9").body == TWO_PIECES[5:10]
            assert ask(relay.url, f"/{key}", "HEAD").headers["Content-Length"] == str(len(TWO_PIECES))


def test_reports_about_an_object_make_a_relay_fetch_it_now_and_then_alone(upstream: Upstream, tmp_path: Path) -> None:
    name = f"files/{hashlib.sha256(SMALL).hexdigest()}"
    upstream.objects[name] = SMALL
    with running("relay", upstream.url, cache=tmp_path) as relay:
        for _ in range(10):
            for key in (name, "parts/small"):
                assert ask(relay.url, f"/{key}", Cache_Control="no-cache").body == SMALL
    asked = Counter(asked.partition(" ")[0] for asked, count in upstream.asked.items() for _ in range(count))
    assert asked == {name: 1, "parts/small": 1}  # the first report came before there was a copy


def test_a_relay_shows_its_own_token_upstream_and_never_that_of_its_clients(upstream: Upstream, tmp_path: Path) -> None:
    for environment, shown in (({}, None), ({"PULSE_UPSTREAM_TOKEN": "relay"}, "Bearer relay")):
        upstream.shown.clear()
        with running("relay", upstream.url, {"PULSE_TOKEN": "client", **environment}, cache=tmp_path) as relay:
            assert ask(relay.url, "/head").status == 401
            assert ask(relay.url, "/head", Authorization="Bearer relay").status == 401
            assert ask(relay.url, "/head", Authorization="Bearer client").body == b"41"
        assert upstream.shown == {shown}


def test_a_relay_does_not_show_its_token_in_clear_to_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "s3cret")
    with pytest.raises(UsageError, match="unencrypted"):
        serving.relay(
            "http://trainer:8765",
            cache=tmp_path,
            max_cache=None,
            cafile=None,
            host="127.0.0.1",
            port=0,
            token_file=None,
            certificate=None,
            private_key=None,
            as_json=True,
            without_token=True,
        )


def test_a_store_that_fails_is_logged_now_and_then(tmp_path: Path) -> None:
    with running("relay", "http://127.0.0.1:1", cache=tmp_path) as relay:
        for _ in range(3):
            assert ask(relay.url, "/a%0db").status == 503
        relay.stop()
        lines = relay.printed().splitlines()
    assert len(lines) == 1
    assert r"Answered 'a\rb' with 503, because the store failed: cannot read a b" in lines[0]


def test_a_listing_of_the_store_that_has_no_end_is_a_failure_of_the_store(caplog: pytest.LogCaptureFixture) -> None:
    class Endless(MemoryStore):
        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            raise too_many("7 objects", prefix, "https://upstream")

    sent: list[MutableMapping[str, Any]] = []

    async def ask_app() -> None:
        async def receive() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b""}

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"list=parts/", "headers": []}
        await make_app(Endless())(scope, receive, send)

    asyncio.run(ask_app())
    assert sent[0]["status"] == 500
    assert "has more than 7 objects" in caplog.text


def test_workers_that_wait_for_a_silent_upstream_do_not_keep_others_from_what_is_cached(
    upstream: Upstream, tmp_path: Path
) -> None:
    with (
        running("relay", upstream.url, cache=tmp_path) as relay,
        closing(HttpStore(relay.url)) as store,
        ExitStack() as waiting,
    ):
        assert store.get("parts/small", 0, 10) == SMALL
        address = urlsplit(relay.url)
        for i in range(100):
            connection = socket.create_connection((address.hostname or "", address.port or 0))
            waiting.enter_context(connection).sendall(f"GET /hang/{i} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        begin = time.monotonic()
        assert store.get("parts/small", 0, 10) == SMALL
        assert time.monotonic() - begin < 8  # the others are answered after ten seconds
        upstream.ending.set()


class Slow(MemoryStore):
    """A store that takes a while and counts."""

    def __init__(self, seconds: float = 0.05) -> None:
        super().__init__()
        self.seconds = seconds
        self.asked: list[tuple[str, int, int | None]] = []

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.asked.append((key, begin, end))
        time.sleep(self.seconds)
        return super().get(key, begin, end)


def test_equal_reads_at_the_same_time_are_one() -> None:
    delayed = Slow(seconds=0.3)  # for the threads to ask for it, which have all been started
    delayed.put("parts/a", SMALL)
    shared, all_there = CoalescingStore(delayed), threading.Barrier(16)

    def read() -> bytes:
        all_there.wait()
        return shared.get("parts/a", 2, 5)

    with ThreadPoolExecutor(16) as threads:
        futures = [threads.submit(read) for _ in range(16)]
        assert {future.result() for future in futures} == {b"234"}
    assert len(delayed.asked) == 1
    delayed.seconds = 0
    shared.get("parts/a", 2, 5)
    assert len(delayed.asked) == 2  # content is not kept in memory


def test_ranges_of_a_small_record_are_one_read() -> None:
    delayed = Slow()
    delayed.put("head", SMALL)
    shared = CoalescingStore(delayed)
    assert [shared.get("head", begin, end) for begin, end in RANGES] == [SMALL[begin:end] for begin, end in RANGES]
    assert len(delayed.asked) == 1


def test_ranges_of_a_large_record_are_read_as_they_are_asked_for() -> None:
    delayed = Slow(seconds=0)
    delayed.put("manifests/1", LARGE)
    shared = CoalescingStore(delayed)
    for begin, end in RANGES:
        assert shared.get("manifests/1", begin, end) == LARGE[begin:end]


@pytest.mark.parametrize("key", ["head", "parts/a", "layouts/a", "files/a"])
def test_absence_is_remembered_for_a_second_and_no_longer(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pulsesync.store.coalesce.time.monotonic", lambda: now)
    delayed = Slow()
    shared = CoalescingStore(delayed)
    for begin in range(3):
        with pytest.raises(NotFoundError):
            shared.get(key, begin, begin + 9)
        with pytest.raises(NotFoundError):
            shared.get(key)
        now += 1 / 4
    delayed.put(key, SMALL)
    assert len(delayed.asked) == 1
    now += 1 / 3
    assert shared.get(key) == SMALL


def test_a_report_ends_the_absence_of_an_object_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pulsesync.store.coalesce.time.monotonic", lambda: now)
    delayed = Slow(seconds=0)
    shared = CoalescingStore(delayed)
    for _ in range(4):
        with suppress(NotFoundError):
            shared.get("files/a")
        shared.forget("files/a")
        with pytest.raises(NotFoundError):
            shared.get("files/a")
        assert len(delayed.asked) == 2
    now += 10
    with suppress(NotFoundError):
        shared.get("files/a")
    delayed.put("files/a", SMALL)
    shared.forget("files/a")
    assert shared.get("files/a") == SMALL


def test_what_is_remembered_is_bounded() -> None:
    store = MemoryStore()
    shared = CoalescingStore(store)
    for i in range(3000):
        with pytest.raises(NotFoundError):
            shared.get(f"anchors/{i}")
    assert len(shared._remembered) <= 1024
    for i in range(20):
        store.put(f"manifests/{i}", TWO_PIECES)
        shared.get(f"manifests/{i}", 0, 1)
    assert sum(held.weight for held in shared._remembered.values()) <= 1 << 26


def test_a_relay_refuses_to_write() -> None:
    shared = CoalescingStore(MemoryStore())
    writes: list[Callable[[], object]] = [
        lambda: shared.put("a", b""),
        lambda: shared.create("a", b""),
        lambda: shared.delete("a"),
    ]
    for write in writes:
        with pytest.raises(StoreError, match="read-only"):
            write()


def test_workers_that_wait_for_a_new_body_do_not_keep_others_from_bodies_that_are_cached(
    upstream: Upstream, tmp_path: Path
) -> None:
    with (
        running("relay", upstream.url, cache=tmp_path) as relay,
        closing(HttpStore(relay.url)) as store,
        ExitStack() as waiting,
    ):
        assert store.get("parts/large") == LARGE
        address = urlsplit(relay.url)
        for _ in range(100):
            connection = socket.create_connection((address.hostname or "", address.port or 0))
            waiting.enter_context(connection).sendall(b"GET /parts/hang HTTP/1.1\r\nHost: a\r\n\r\n")
        while not any(asked.startswith("parts/hang") for asked in upstream.asked):
            time.sleep(0.01)
        time.sleep(0.1)  # for the relay to work on the others
        begin = time.monotonic()
        assert store.get("parts/large") == LARGE
        assert store.get("parts/large", 5, 9) == LARGE[5:9]
        assert ask(relay.url, "/parts/large", "HEAD").headers["Content-Length"] == str(N)
        assert time.monotonic() - begin < 8  # the others are answered after ten seconds
        upstream.ending.set()


def test_a_tag_is_no_proof_that_an_object_exists(url: str) -> None:
    assert ask(url, "/parts/none", If_None_Match='"parts%2Fnone"').status == 404
    assert ask(url, "/parts/small", If_None_Match='"parts%2Fsmall"').status == 304


class Reported(MemoryStore):
    """A store that notes what readers report."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[str] = []

    def forget(self, key: str) -> None:
        self.reports.append(key)


def test_only_a_request_that_reads_an_object_reports_it() -> None:
    store = Reported()
    store.put("parts/a", SMALL)
    app, report = _Service(store, None), {"cache-control": "no-cache"}
    app._object("parts/a", True, Headers(report))
    app._object("parts/a", False, Headers(report | {"if-none-match": '"parts%2Fa"'}))
    assert store.reports == []
    app._object("parts/a", False, Headers(report))
    assert store.reports == ["parts/a"]


def test_no_other_requests_make_a_relay_pass_a_second_report_on_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pulsesync.store.coalesce.time.monotonic", lambda: now)
    store = Reported()
    store.put("parts/a", SMALL)
    shared = CoalescingStore(store)
    for _ in range(3):
        shared.forget("parts/a")
        for i in range(1100):
            with pytest.raises(NotFoundError):
                shared.get(f"parts/{i}")
    assert store.reports == ["parts/a"]
    now += 10
    shared.forget("parts/a")
    assert store.reports == ["parts/a"] * 2


def test_reports_are_remembered_within_bounds_and_those_of_absent_objects_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pulsesync.store.coalesce._MAX_REPORTED", 16)
    store = Reported()
    shared = CoalescingStore(store)
    for i in range(50):
        shared.forget(f"parts/{i}")
    assert len(shared._reported) == len(store.reports) == 16
    for i in range(50):
        with pytest.raises(NotFoundError):
            shared.get(f"parts/{i}")
    assert not shared._reported


def test_a_client_that_takes_nothing_is_dropped_after_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "SEND_TIMEOUT_S", 0.05)
    slices: list[int] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        slices.append(len(message["body"]))
        if len(slices) == 3:
            await asyncio.sleep(10)

    with pytest.raises(TimeoutError, match=r"262144 bytes within 0\.05 s"):
        asyncio.run(send_piece(send, bytes(PIECE), more=True))
    assert slices == [1 << 18] * 3
