"""How an SGLang server is driven, as far as SGLang is not needed; tests/integrations/sglang has its own code."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pulsesync.errors import PulseError, StateError
from pulsesync.integrations import sglang
from pulsesync.integrations.sglang import LOADER, SglangEngine, SglangServer, load, report_answer, request

STATUS = {"location": None, "version": None, "update": None, "failure": None, "broken": None, "ranks_agree": True}

PLAIN: dict[str, Any] = {"dp_size": 1, "attn_dp_size": 1, "pp_size": 1, "moe": SimpleNamespace(enable_eplb=False)}


class Fake:
    """A server that answers what a test says, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, tuple[int, Any]] = {
            "/model_info": (200, {"weight_version": "default"}),
            "/server_info": (200, {"custom_weight_loader": [LOADER], "tp_size": 2}),
            "/update_weights_from_tensor": (200, {"success": True, "message": json.dumps(STATUS)}),
        }


@pytest.fixture
def fake() -> Iterator[tuple[Fake, SglangServer]]:
    made = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.asked.append(self.path)
            code, table = made.answers.get(self.path, (200, {"success": True}))
            data = json.dumps(table).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield made, SglangServer(f"http://127.0.0.1:{server.server_port}")
    server.shutdown()
    server.server_close()


def test_the_ranks_are_asked_once_while_the_version_is_the_same(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    assert server.status()["version"] is None
    assert made.asked[-5:] == [
        "/pause_generation",
        "/begin_weight_update",
        "/update_weights_from_tensor",
        "/end_weight_update",
        "/continue_generation",
    ]
    del made.asked[:]
    server.status()
    assert made.asked == ["/model_info"]
    made.answers["/model_info"] = (200, {"weight_version": "3"})
    server.status()
    assert "/update_weights_from_tensor" in made.asked


def test_a_server_without_the_loader_is_sent_no_request(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    made.answers["/server_info"] = (200, {"custom_weight_loader": [], "tp_size": 2})
    with pytest.raises(PulseError, match=f"--custom-weight-loader {LOADER}"):
        server.status()
    with pytest.raises(PulseError, match=f"--custom-weight-loader {LOADER}"):
        server.update("/run", 1)
    assert not {"/pause_generation", "/update_weights_from_tensor"} & set(made.asked)


def test_a_server_without_the_plugin_is_named(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    made.answers["/update_weights_from_tensor"] = (200, {"success": True, "message": "Success"})
    with pytest.raises(PulseError, match="let SGLANG_PLUGINS"):
        server.status()
    assert made.asked[-1] == "/continue_generation"


def test_a_key_is_asked_for(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    made.answers["/server_info"] = (401, {"error": "Unauthorized"})
    with pytest.raises(PulseError, match="PULSE_SGLANG_API_KEY"):
        server.status()


def test_an_error_of_a_rank_is_raised_by_its_name_and_generation_resumes(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    told = {"error": {"type": "StateError", "message": "no such tensor"}}
    made.answers["/update_weights_from_tensor"] = (400, {"success": False, "message": json.dumps(told)})
    with pytest.raises(StateError, match="no such tensor"):
        server.update("/run", 1)
    assert made.asked[-2:] == ["/end_weight_update", "/continue_generation"]


def test_a_server_that_cannot_be_resumed_is_said_to_be_paused(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    made.answers["/begin_weight_update"] = (500, {"message": "no memory"})
    made.answers["/continue_generation"] = (500, {"message": "out of order"})
    with pytest.raises(PulseError, match="no memory") as caught:
        server.status()
    assert any("the server may be paused" in note for note in caught.value.__notes__)
    assert made.asked[-1] == "/continue_generation"


def test_an_update_that_another_process_left_open_is_ended_first(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    made.answers["/begin_weight_update"] = (400, {"message": "a weight-update session is already open; call …"})
    with pytest.raises(PulseError, match="already open"):
        server.status()
    assert made.asked.count("/begin_weight_update") == 2
    assert made.asked.index("/end_weight_update") < len(made.asked) - 1 - made.asked[::-1].index("/begin_weight_update")


def test_an_update_is_repeated_if_its_cache_was_not_dropped(fake: tuple[Fake, SglangServer]) -> None:
    made, server = fake
    told = json.dumps({**STATUS, "version": 4})
    made.answers["/update_weights_from_tensor"] = (200, {"success": True, "message": told})
    assert server.status()["paused_by_update"]  # the ranks have version 4, and the server's weight_version is another
    made.answers["/model_info"] = (200, {"weight_version": "4"})
    assert not server.status()["paused_by_update"]


def test_load_takes_a_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_context", lambda _: SimpleNamespace(tp_size=1, **PLAIN))
    model: Any = torch.nn.Linear(1, 1)
    for tensors in ([("lm_head.weight", torch.zeros(3))], [], [*request({"do": "status"}), ("x", torch.zeros(1))]):
        with pytest.raises(ValueError, match="needs the one tensor"):
            load(model, tensors)
    load(model, request({"do": "status"}))
    assert model.pulse_rank.answer["version"] is None


@pytest.mark.parametrize(
    ("name", "flag"), [("dp_size", "--dp-size"), ("attn_dp_size", "--enable-dp-attention"), ("pp_size", "--pp-size")]
)
def test_engines_whose_places_are_not_known_are_refused(name: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**PLAIN}
    monkeypatch.setattr(sglang, "_context", lambda _: SimpleNamespace(**given))
    SglangEngine(torch.nn.Linear(1, 1)).check()
    given[name] = 2
    with pytest.raises(StateError, match=flag):
        load(torch.nn.Linear(1, 1), request({"do": "status"}))


def test_an_engine_that_moves_its_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**PLAIN, "moe": SimpleNamespace(enable_eplb=True)}
    monkeypatch.setattr(sglang, "_context", lambda _: SimpleNamespace(**given))
    with pytest.raises(StateError, match="--enable-eplb"):
        load(torch.nn.Linear(1, 1), request({"do": "status"}))


def test_the_plugin_leaves_other_updates_alone() -> None:
    def original(updater: Any, named_tensors: Any, load_format: str | None) -> tuple[bool, str]:
        raise RuntimeError("not ours")

    with pytest.raises(RuntimeError, match="not ours"):
        report_answer(original, None, [], "direct")
    success, message = report_answer(original, None, [], LOADER)
    assert not success
    assert json.loads(message)["error"] == {"type": "RuntimeError", "message": "not ours"}
