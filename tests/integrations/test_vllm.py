"""The adapter of vLLM as far as it runs without vLLM: the rule of an update, ranks, routes and the client.

The engine here is a real module with fused parameters on two tensor-parallel ranks, written by the real follower; vLLM
itself is in tests/integrations/vllm, which `make test-vllm` runs.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pulsesync import Publisher, PulseError, SigningKey, StoreError, VerificationError
from pulsesync.errors import ChecksumError, FormatError, NothingPublishedError, SignatureError
from pulsesync.integrations.runtime import EngineRank, ModelShape, fused, grid
from pulsesync.integrations.vllm import ServerFollower, VllmServer, compat
from pulsesync.integrations.vllm.follower import EngineFollower, RunOptions
from pulsesync.integrations.vllm.offline import OfflineFollower
from pulsesync.integrations.vllm.routes import PATH, Routes, ServedEngine, parse_update, read_status
from pulsesync.integrations.vllm.update import Ask, Finish, moving, raise_error, run
from pulsesync.store import open_store

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 100,
    "tie_word_embeddings": True,
}
SHAPE = ModelShape.from_config(CONFIG)
RANKS = [EngineRank.vllm(n, 2) for n in range(2)]


# The rule


class Ranks:
    """Ranks that answer as a script says, and write down what they were asked."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = answers  # for each rank: by request, an answer that is not the usual one
        self.asked: list[str] = []

    def take(self, step: Any) -> Any:
        self.asked.append(step.message["do"] if isinstance(step, Ask) else step if isinstance(step, str) else "finish")
        if not isinstance(step, Ask):
            return None
        do = step.message["do"]
        return [{**self.usual(do), **rank.get(do, {})} for rank in self.answers]

    @staticmethod
    def usual(do: str) -> dict[str, Any]:
        if do == "status":
            return {"version": 3, "digest": "d", "update": "ready", "failure": None}
        if do == "commit":
            return {"version": 4, "changed": 10, "fetched_bytes": 7, "seconds": 0.5}
        return {"version": 4}


FAILURE = {"type": "ChecksumError", "message": "bad bytes"}


def test_all_ranks_commit_when_all_are_ready_and_only_then_is_the_engine_paused() -> None:
    ranks = Ranks({}, {})
    report = run(moving({"location": "x"}, 4), ranks.take)
    assert ranks.asked == ["prepare", "status", "pause", "commit", "finish", "resume"]
    assert (report["changed"], report["fetched_bytes"], report["ranks"]) == (20, 14, 2)


def test_the_latest_version_is_the_one_that_rank_0_finds() -> None:
    ranks = Ranks({"find": {"version": 9}}, {"find": {"version": 8}})
    asked: list[Any] = []

    def take(step: Any) -> Any:
        asked.append(step)
        return ranks.take(step)

    run(moving({"location": "x"}, "latest"), take)
    assert Ask({"do": "prepare", "options": {"location": "x"}, "version": 9}) in asked
    assert Finish(9) in asked


def test_a_rank_that_cannot_prepare_keeps_all_others_from_writing() -> None:
    ranks = Ranks({}, {"status": {"failure": FAILURE}})
    with pytest.raises(ChecksumError, match="bad bytes"):
        run(moving({"location": "x"}, 4), ranks.take)
    assert ranks.asked == ["prepare", "status", "abort"]


def test_a_rank_that_fails_to_write_has_all_of_them_rolled_back() -> None:
    ranks = Ranks({}, {"commit": {"error": FAILURE}})
    with pytest.raises(ChecksumError, match="bad bytes"):
        run(moving({"location": "x"}, 4), ranks.take)
    assert ranks.asked == ["prepare", "status", "pause", "commit", "roll back", "resume"]


def test_an_engine_that_cannot_be_rolled_back_stays_paused() -> None:
    torn = {"type": "VerificationError", "message": "of no version"}
    ranks = Ranks({"roll back": {"error": torn}}, {"commit": {"error": FAILURE}})
    with pytest.raises(VerificationError, match="of no version"):
        run(moving({"location": "x"}, 4), ranks.take)
    assert ranks.asked[-1] == "roll back"


def test_an_engine_that_cannot_name_the_version_is_rolled_back() -> None:
    ranks = Ranks({})

    def take(step: Any) -> Any:
        if isinstance(step, Finish):
            raise ConnectionError("gone")
        return ranks.take(step)

    with pytest.raises(ConnectionError, match="gone"):
        run(moving({"location": "x"}, 4), take)
    assert ranks.asked[-2:] == ["roll back", "resume"]


def test_an_error_that_is_not_ours_keeps_its_name() -> None:
    with pytest.raises(PulseError, match="RuntimeError: out of memory"):
        raise_error([{"error": {"type": "RuntimeError", "message": "out of memory"}}])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "JSON object"),
        ({}, "location is missing"),
        ({"location": 3}, "location must be a text"),
        ({"location": "x", "version": "newest"}, "version must be a number or 'latest'"),
        ({"location": "x", "version": True}, "version must be a number or 'latest'"),
        ({"location": "x", "kv_cache": "reset"}, "kv_cache must be one of 'drop', 'keep'"),
        ({"location": "x", "trust": ["ab"]}, "64 hexadecimal digits"),
        ({"location": "x", "verison": 3}, "got verison"),
        ({"location": "x", "follow_replaced": 1}, "follow_replaced must be true or false"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_words(body: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_update(body)


# Two ranks of a model with fused parameters


class FusedModel(torch.nn.Module):
    """The parameters that a rank of vLLM has of a model, under vLLM's names."""

    def __init__(self, rank: EngineRank) -> None:
        super().__init__()
        self.rank = rank
        self.tensors = {one.name: torch.zeros(one.shape, dtype=torch.bfloat16) for one in fused(SHAPE, rank)}

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.tensors.items())

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return (tensor for _, tensor in self.named_parameters())

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Put a checkpoint where the rank has it."""
        for name, expected in self.expected(checkpoint).items():
            self.tensors[name].copy_(expected)

    def expected(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The tensors of this rank with the weights of a checkpoint, put together piece by piece."""
        out = {}
        for one in fused(SHAPE, self.rank):
            out[one.name] = torch.zeros(one.shape, dtype=torch.bfloat16)
            for piece in one.pieces:
                whole = checkpoint[piece.name]
                rows, columns = piece.rows or (0, whole.shape[0]), piece.columns
                part = whole[slice(*rows)] if columns is None else whole[slice(*rows), slice(*columns)]
                out[one.name][piece.at] = part
        return out

    def has(self, checkpoint: dict[str, Any]) -> bool:
        return all(
            torch.equal(self.tensors[name].view(torch.int16), tensor.view(torch.int16))
            for name, tensor in self.expected(checkpoint).items()
        )


class TwoRanks:
    """An engine of two ranks, each with a follower, with vLLM's own verbs as `AsyncLLM` has them."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self.models = [FusedModel(rank) for rank in RANKS]
        for model in self.models:
            model.load(checkpoint)
        self.followers = [EngineFollower(SimpleNamespace(rank=model.rank), model) for model in self.models]
        self.paused, self.weight_version, self.dropped = False, "default", 0

    async def collective_rpc(self, method: str, args: tuple[str] = ("",)) -> list[dict[str, Any]]:
        assert method == "pulse_call"
        return [follower.call(json.loads(args[0])) for follower in self.followers]

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        self.paused = True

    async def resume_generation(self) -> None:
        self.paused = False

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        self.dropped += reset_running_requests

    async def update_weight_version(self, version: str) -> None:
        self.weight_version = version

    async def get_weight_version(self) -> str:
        return self.weight_version

    def update(self, location: Path, version: int | str = "latest", **options: Any) -> dict[str, Any]:
        kv_cache = options.pop("kv_cache", "drop")
        return asyncio.run(ServedEngine(self, kv_cache).update({"location": str(location), **options}, version))

    def have(self, checkpoint: dict[str, Any]) -> bool:
        return all(model.has(checkpoint) for model in self.models)


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter asks of vLLM, answered by the engine above."""
    monkeypatch.setattr(compat, "rank_of", lambda config: config.rank)
    monkeypatch.setattr(compat, "hf_config", lambda config: CONFIG)
    monkeypatch.setattr(compat, "checkpoint_of", lambda config, model: iter(()))
    monkeypatch.setattr(compat, "refresh_packed", lambda model: 0)


class Training:
    """A trainer that changes a few weights in each version, and remembers all versions."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.location = folder
        generator = torch.Generator().manual_seed(1)
        shapes = {piece.name: piece.shape for one in fused(SHAPE, EngineRank()) for piece in one.pieces}
        self.weights = {
            name: torch.randn(shape, generator=generator).bfloat16() for name, shape in sorted(shapes.items())
        }
        self.versions: list[dict[str, Any]] = []
        self.publisher = Publisher(str(folder), grid=grid(SHAPE, RANKS), **options)
        self.publish()

    def publish(self) -> None:
        if self.versions:
            for tensor in self.weights.values():
                tensor.view(torch.int16).view(-1)[::97] += 1
        self.publisher.publish(self.weights, step=len(self.versions))
        self.versions.append({name: tensor.clone() for name, tensor in self.weights.items()})


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "run")
    yield made
    made.publisher.close()


def test_two_ranks_follow_a_run_bit_for_bit(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    for _ in range(4):
        training.publish()
    for version in (1, 2, 4):
        report = engine.update(training.location, version)
        assert (report["version"], report["mode"], report["ranks"]) == (version, "in place", 2)
        assert engine.have(training.versions[version])
        assert (engine.weight_version, engine.paused, engine.dropped) == (
            str(version),
            False,
            [1, 2, None, 3][version - 1],
        )


def test_the_kv_cache_is_kept_if_the_caller_says_so(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location, kv_cache="keep")
    assert engine.dropped == 0


def test_an_engine_that_was_paused_stays_paused(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.paused = True
    engine.update(training.location)
    assert engine.paused


def test_weights_that_something_else_wrote_are_found_and_loaded_again(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    training.publish()
    engine.update(training.location)
    for model in engine.models:
        model.tensors["model.layers.1.mlp.down_proj.weight"].fill_(7.0)
    report = engine.update(training.location)
    assert "model.layers.1.mlp.down_proj.weight" in report["repaired"]
    assert engine.have(training.versions[1])


def test_parameters_that_were_replaced_are_found_where_they_are_now(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    for model in engine.models:
        model.tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
    training.publish()
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_a_damaged_version_is_refused_and_the_old_one_is_served(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    damage_version(training.location, 1)
    with pytest.raises(FormatError):
        engine.update(training.location)
    assert engine.have(training.versions[0])
    assert (engine.weight_version, engine.paused) == ("0", False)
    status = asyncio.run(read_status(engine))
    assert (status["version"], status["ranks_agree"], status["broken"]) == (0, True, None)
    training.publish()  # the next version goes by the same patch, or by an anchor
    with pytest.raises(FormatError):
        engine.update(training.location)
    repair_version(training.location, 1)
    engine.update(training.location)
    assert engine.have(training.versions[2])


def damage_version(run: Path, version: int) -> None:
    path = run / "manifests" / f"{version:016d}"
    path.with_name("kept").write_bytes(path.read_bytes())
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)


def repair_version(run: Path, version: int) -> None:
    path = run / "manifests" / f"{version:016d}"
    path.write_bytes(path.with_name("kept").read_bytes())
    path.with_name("kept").unlink()


def test_no_rank_moves_if_one_of_them_cannot_prepare(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    second = engine.followers[1]
    monkeypatch.setattr(second, "_weights_for", lambda *_: (_ for _ in ()).throw(StoreError("no route to the store")))
    with pytest.raises(StoreError, match="no route to the store"):
        engine.update(training.location)
    assert engine.have(training.versions[0])
    assert not engine.paused
    monkeypatch.undo()
    monkeypatch.setattr(compat, "refresh_packed", lambda model: 0)
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_a_rank_that_fails_while_it_writes_has_both_rolled_back_and_the_next_update_works(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    weights = engine.followers[1]._weights
    assert weights is not None
    once = iter([RuntimeError("kernel failed")])

    def fail(names: Any) -> None:
        for error in once:
            raise error

    monkeypatch.setattr(weights, "load", fail)
    with pytest.raises(PulseError, match="kernel failed"):
        engine.update(training.location)
    assert engine.have(training.versions[0])
    assert not engine.paused
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_an_update_that_nobody_commits_leaves_the_weights_alone(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    monkeypatch.setattr("pulsesync.integrations.vllm.follower.PATIENCE_S", 0.05)
    follower = engine.followers[0]
    follower.prepare(RunOptions(str(training.location)), 1)
    end = time.monotonic() + 30
    while follower.status()["failure"] is None and time.monotonic() < end:
        time.sleep(0.01)
    assert "nothing committed the update" in follower.status()["failure"]["message"]
    assert engine.have(training.versions[0])
    monkeypatch.setattr("pulsesync.integrations.vllm.follower.PATIENCE_S", 60.0)
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_signatures_are_checked_by_every_rank(tmp_path: Path) -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    training = Training(tmp_path / "run", signing_key=key)
    training.publisher.close()
    engine = TwoRanks(training.versions[0])
    with pytest.raises(SignatureError):
        engine.update(training.location, trust=[other.public])
    engine.update(training.location, trust=[key.public])
    assert engine.have(training.versions[0])


def test_a_run_with_nothing_in_it_is_an_error_by_name(tmp_path: Path, training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    with pytest.raises(NothingPublishedError):
        engine.update(tmp_path / "empty")
    with pytest.raises(NothingPublishedError, match="version 7"):
        engine.update(training.location, 7)


def test_a_run_with_a_tensor_that_the_map_does_not_know_is_not_written_in_place(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded: dict[str, Any] = {}
    with Publisher(str(tmp_path / "other")) as publisher:
        publisher.publish({**training.weights, "model.extra.weight": torch.ones(8).bfloat16()})
    engine = TwoRanks(training.versions[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "load_weights", lambda config, model, weights: loaded.update(weights))
        patch.setattr(compat, "derived", lambda model: [])
        report = engine.update(tmp_path / "other")
    assert report["mode"] == "mirror"
    assert "'model.extra.weight'" in caplog.text
    assert {name: tensor.tolist() for name, tensor in loaded.items() if "extra" in name} == {
        "model.extra.weight": [1.0] * 8
    }


# Over HTTP


@contextmanager
def served(engine: TwoRanks, key: str | None = None) -> Iterator[str]:
    """The routes of an engine, behind a server of the standard library."""
    from starlette.applications import Starlette

    app = Starlette()
    app.state.engine_client = engine
    app.add_middleware(Routes)

    async def ask(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
        await app(scope, receive, send)  # type: ignore[arg-type]
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                status, content = 401, b'{"error": "Unauthorized"}'
            else:
                status, content = asyncio.run(ask(self.command, self.path, body))
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = answer  # noqa: N815 - named by the standard library

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_is_brought_to_versions_over_http(training: Training) -> None:
    training.publish()
    engine = TwoRanks(training.versions[0])
    with served(engine) as url:
        server = VllmServer(url)
        assert server.status()["version"] is None
        report = server.update(str(training.location), 1)
        assert (report.version, report.mode, report.ranks) == (1, "in place", 2)
        assert engine.have(training.versions[1])
        assert (server.status()["version"], server.status()["weight_version"]) == (1, "1")
        with pytest.raises(NothingPublishedError, match="version 9"):
            server.update(str(training.location), 9)
        assert server.status()["version"] == 1


def test_an_update_waits_for_a_version_that_comes_within_its_time(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    with served(engine) as url:
        later = threading.Timer(0.5, training.publish)
        later.start()
        try:
            assert VllmServer(url).update(str(training.location), 1, wait_s=30).version == 1
        finally:
            later.join()
        assert engine.have(training.versions[1])
        with pytest.raises(NothingPublishedError, match="version 9"):
            VllmServer(url).update(str(training.location), 9, wait_s=0.3)


def test_a_follower_brings_a_server_to_each_version_and_again_when_it_was_restarted(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    with served(engine) as url:
        follower = ServerFollower(VllmServer(url), str(training.location), open_store(str(training.location)))
        assert follower.update() is not None
        assert follower.update() is None
        training.publish()
        updates = follower.follow(0.01)
        assert next(updates).version == 1
        restarted = TwoRanks(training.versions[0])
        engine.models, engine.followers = restarted.models, restarted.followers
        assert next(updates).version == 1
        assert engine.have(training.versions[1])


def test_a_server_that_is_not_there_or_not_ready_for_this_says_what_to_do(training: Training) -> None:
    with pytest.raises(StoreError, match="does not answer"):
        VllmServer("http://127.0.0.1:9").status()
    engine = TwoRanks(training.versions[0])
    with served(engine, key="secret") as url:
        with pytest.raises(PulseError, match="asks for an API key"):
            VllmServer(url).status()
        assert VllmServer(url, api_key="secret").status()["version"] is None
    with served(engine) as url, pytest.raises(PulseError, match=r"--middleware pulsesync\.integrations\.vllm\.Routes"):
        VllmServer(url + "/elsewhere").status()
    assert PATH == "/v1/pulse"


class OfflineLLM:
    """The part of `vllm.LLM` that an offline follower asks for, on the engine above."""

    def __init__(self, engine: TwoRanks) -> None:
        self.engine, self.dropped = engine, 0

    def collective_rpc(self, method: str, args: tuple[str]) -> Any:
        return asyncio.run(self.engine.collective_rpc(method, args))

    def reset_prefix_cache(self) -> None:
        self.dropped += 1


def test_an_offline_llm_follows_a_run(training: Training) -> None:
    training.publish()
    engine = TwoRanks(training.versions[0])
    llm = OfflineLLM(engine)
    follower = OfflineFollower(llm, {"location": str(training.location)})
    assert follower.status()["version"] is None
    assert follower.update().version == 1
    assert (follower.version, llm.dropped, engine.have(training.versions[1])) == (1, 1, True)
