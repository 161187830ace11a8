"""What `pulse follow` makes of an engine's server that answers wrongly, without end, or points elsewhere."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher
from pulsesync.errors import PulseError, StoreError
from pulsesync.integrations.engine.server import EngineServer, ServerFollower
from pulsesync.integrations.sglang import LOADER, SglangServer
from pulsesync.integrations.vllm import VllmServer
from pulsesync.store import open_store
from pulsesync.store.http import HttpStore

STATUS: dict[str, Any] = {"location": None, "version": None, "update": None, "failure": None, "broken": None}
STATUS |= {"ranks_agree": True}
RANK = {**STATUS, "digest": None, "token": None}
Answer = tuple[int, bytes, dict[str, str]]


class Asked:
    """What a server was asked: the path of each request, and its authorization."""

    def __init__(self, url: str) -> None:
        self.url, self.paths, self.keys = url, list[str](), set[str | None]()


@contextmanager
def answering(answer: Callable[[str], Answer]) -> Iterator[Asked]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            asked.paths.append(self.path)
            asked.keys.add(self.headers["Authorization"])
            status, body, headers = answer(self.path)
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        do_GET = do_POST = respond  # noqa: N815 - named by the standard library

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None: ...

    with Server(("127.0.0.1", 0), Handler) as server:
        asked = Asked(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield asked
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("engine") / "run"
    with Publisher(folder) as publisher:
        publisher.publish({"w": np.arange(64, dtype=np.float32)})
    return str(folder)


def whole(table: Any) -> bytes:
    return json.dumps(table).encode()


MALFORMED = [
    b"{}",
    b"[" * 100_000,
    b'{"version": ' + b"[" * 100_000,
    b"not JSON",
    b"",
    b"[1]",
    b"null",
    b"9" * 5000,
    b'{"results": [{"error": {}}]}',
    b'{"results": [{"error": 7}]}',
    b'{"results": {}}',
    b'{"results": []}',
    b'{"results": [7]}',
    *(whole({**STATUS, "version": value}) for value in ("7", True, 1 << 70, -1)),
    *(whole({name: value for name, value in STATUS.items() if name != missing}) for missing in ("location", "broken")),
    b'{"error": {"type": "StateError"}}',
    b'{"message": "{\\"error\\": 7}", "tp_size": "x", "custom_weight_loader": 7}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
def test_a_malformed_answer_is_a_store_error_that_may_be_tried_again(kind: type[EngineServer], run: str) -> None:
    started = whole({"custom_weight_loader": [LOADER], "tp_size": 1})
    first = started if kind is SglangServer else whole(STATUS)
    at_first = {"/server_info": first, "/v1/pulse": first, "/model_info": b"{}"}
    said: dict[str, Any] = {}
    told: list[PulseError] = []

    def note(error: PulseError) -> None:
        told.append(error)
        raise KeyboardInterrupt  # ends the loop, which would try again

    with answering(lambda path: (200, said["good"].get(path, said["body"]), {})) as asked:
        for body, good in product(MALFORMED, ({}, at_first)):  # at the first request, or at a later one
            said.update(body=body, good=good)
            told.clear()
            follower = ServerFollower(kind(asked.url), run, open_store(run))
            with pytest.raises(KeyboardInterrupt):
                next(follower.follow(0, note))
            is_understood = "install pulsesync" in str(told[0])  # SGLang's answer has a text, which may be any
            assert is_understood or (isinstance(told[0], StoreError) and told[0].retryable), (body[:40], told)


@pytest.mark.parametrize("body", [b for b in MALFORMED if b"results" in b or b == b"{}"], ids=repr)
def test_a_malformed_answer_of_ranks_is_a_store_error(body: bytes, run: str) -> None:
    # A server with vLLM's development routes: the client takes the steps itself.
    answers = iter([whole({"results": [RANK]})])

    def answer(path: str) -> Answer:
        if path == "/collective_rpc":
            return 200, next(answers, body), {}
        return (404, b"", {}) if path == "/v1/pulse" else (200, b"{}", {})

    with answering(answer) as asked:
        server = VllmServer(asked.url)
        assert server.status()["ranks_agree"]
        with pytest.raises(StoreError, match=f"vLLM server at {asked.url}: .*malformed") as caught:
            server.update(run, 0)
        assert caught.value.retryable


def test_a_malformed_report_is_a_store_error_that_names_the_field(run: str) -> None:
    with answering(lambda path: (200, whole(STATUS), {})) as asked:
        with pytest.raises(StoreError) as caught:
            VllmServer(asked.url).update(run, 0)
        assert str(caught.value) == (
            f"the vLLM server at {asked.url}: the answer is malformed: expected a whole number as 'version', got None. "
            "Check that this is the engine's server, with the same version of pulsesync installed"
        )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_so_that_the_key_goes_nowhere_else(status: int) -> None:
    with answering(lambda path: (200, whole(STATUS), {})) as other:
        for kind in (VllmServer, SglangServer):
            moved = {"Location": f"{other.url}/v1/pulse"}
            with answering(lambda path, moved=moved: (status, b"", moved)) as asked:  # type: ignore[misc]
                with pytest.raises(PulseError, match="points to another address"):
                    kind(asked.url, api_key="s3cret\n").status()
                assert asked.keys == {"Bearer s3cret"}
        assert other.paths == []


def test_a_key_is_not_sent_in_clear_to_another_machine_unless_that_is_permitted() -> None:
    for kind in (VllmServer, SglangServer):
        with pytest.raises(ValueError, match="the API key would be sent unencrypted") as caught:
            kind("http://gpu-7:8000", api_key="s3cret")
        assert "s3cret" not in str(caught.value)
        kind("http://gpu-7:8000", api_key="s3cret", api_key_in_clear=True)
        kind("http://gpu-7:8000")
        for url in ("https://gpu-7:8000", "http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:8000"):
            kind(url, api_key="s3cret")
        for key in ("", " ", "two words"):
            with pytest.raises(ValueError, match="key"):
                kind("https://gpu-7", api_key=key)


def test_an_answer_is_read_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.integrations.engine.server._MAX_ANSWER", 1000)
    for status in (200, 500):
        with answering(lambda path, status=status: (status, b" " * 1001, {})) as asked:  # type: ignore[misc]
            with pytest.raises(StoreError, match="more than 1000 bytes") as caught:
                VllmServer(asked.url).status()
            assert caught.value.retryable


def test_what_a_server_says_of_an_error_is_shown_on_one_line(tmp_path: Path) -> None:
    with answering(lambda path: (500, whole({"error": "\x1b[2J no\nroom " + "x" * 5000}), {})) as asked:
        with pytest.raises(PulseError, match="no room") as caught:
            VllmServer(asked.url).status()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 700


REPORT: dict[str, Any] = {"version": 0, "step": 0, "from_version": None, "path": ["anchor"], "changed": 64}
REPORT |= {"fetched_bytes": 9, "seconds": 0.1, "pause_s": 0.1, "digest": "a", "mode": "in place", "ranks": 1}
REPORT |= {"repaired": []}


def test_texts_of_a_report_are_lines_that_a_terminal_shows(run: str) -> None:
    texts = {"digest": "\ud800\nserves version 9", "path": ["\x1b[2J"], "mode": "\x1b]0;x\x07"}
    with answering(lambda path: (200, whole({**STATUS, **REPORT, **texts}), {})) as asked:
        report = VllmServer(asked.url).update(run, 0)
    for text in (report.digest, *report.path, report.mode):
        assert text.isprintable()
        text.encode()


def test_a_server_that_answers_for_another_version_was_not_updated(run: str) -> None:
    with answering(lambda path: (200, whole({**STATUS, **REPORT}), {})) as asked:
        with pytest.raises(StoreError, match="is at version 0 after an update") as caught:
            VllmServer(asked.url).update(run, 1)
        assert caught.value.retryable
        assert VllmServer(asked.url).update(run, "latest").version == 0


def test_what_comes_in_place_of_a_status_line_is_shown_on_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):  # a store and an engine
                connection = listener.accept()[0]
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(b"\x1b[2J" + b"A" * 30_000 + b"\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for ask in (lambda: HttpStore(url).get("head"), lambda: VllmServer(url).status()):
            with pytest.raises(StoreError, match="AAA") as caught:
                ask()
            assert str(caught.value).isprintable()
            assert len(str(caught.value)) < 1000
        thread.join(10)


def test_requests_that_change_something_are_sent_once_and_keep_no_connection() -> None:
    def answer(path: str) -> Answer:
        if path == "/resume":
            raise ConnectionError("the connection is closed without an answer")
        return 200, b"{}", {}

    with answering(answer) as asked:
        server = VllmServer(asked.url)
        for _ in range(5):
            server._step("/pause")
        assert [transport._idle for transport in server._transports.values()] == [[], []]
        with pytest.raises(StoreError, match="does not answer"):
            server._step("/resume")
        assert asked.paths == ["/pause"] * 5 + ["/resume"]


@pytest.mark.parametrize("kind", [VllmServer, SglangServer])
@pytest.mark.parametrize("trust", ["", [], "no key", ["a" * 63]])
def test_an_empty_or_malformed_trust_does_not_turn_the_check_off(kind: type[EngineServer], trust: Any) -> None:
    with answering(lambda _: (500, b"{}", {})) as asked:
        with pytest.raises(ValueError, match="trust must be"):
            kind(asked.url).update("/run", 1, trust=trust)
        assert not asked.paths


def test_one_key_to_trust_is_sent_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Any]()

    def update(_: VllmServer, options: dict[str, Any], *__: Any) -> None:
        sent.append(options["trust"])
        raise PulseError("as far as this test goes")

    monkeypatch.setattr(VllmServer, "_update", update)
    keys: list[Any] = ["A" * 64, ["a" * 64], {"a" * 64}]
    for trust in keys:
        with pytest.raises(PulseError, match="as far as"):
            VllmServer("http://127.0.0.1:1").update("/run", 1, trust=trust)
    assert sent == [["a" * 64]] * 3
