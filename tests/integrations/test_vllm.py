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

import ml_dtypes
import pytest
import torch

from pulsesync import (
    Publisher,
    PulseError,
    SigningKey,
    StoreError,
    VerificationError,
    events,
    listen,
    move_pointer,
    read_fleet,
)
from pulsesync.errors import ChecksumError, GroupError, NothingPublishedError, SignatureError, StateError
from pulsesync.integrations.engine.follower import EngineFollower, EngineLimits, RunOptions, find_version
from pulsesync.integrations.engine.update import Ask, Finish, moving, raise_error, run
from pulsesync.integrations.runtime import EngineRank, ModelShape, fused, grid
from pulsesync.integrations.vllm import ServerFollower, VllmServer
from pulsesync.integrations.vllm.compat import VllmEngine
from pulsesync.integrations.vllm.offline import OfflineFollower
from pulsesync.integrations.vllm.plugin import read_limits
from pulsesync.integrations.vllm.routes import PATH, Routes, ServedEngine, parse_update
from pulsesync.store import MemoryStore, open_store
from tests.conftest import GPU
from tests.foreign_writes import WRITES
from tests.integrations.engine_tests import EngineTests
from tests.runs import publish_steps

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
DEVICE = "cuda" if GPU else "cpu"  # of the engine; make gpu-test runs this file, too


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
            return {"version": 3, "digest": "d", "update": "ready", "token": "t", "failure": None}
        if do == "commit":
            return {"version": 4, "changed": 10, "fetched_bytes": 7, "seconds": 0.5}
        return {"version": 4}


FAILURE = {"type": "ChecksumError", "message": "bad bytes"}


def test_all_ranks_commit_when_all_are_ready_and_only_then_is_the_engine_paused() -> None:
    ranks = Ranks({}, {})
    report = run(moving({"location": "x"}, 4, "t"), ranks.take)
    assert ranks.asked == ["status", "prepare", "status", "pause", "commit", "finish", "resume"]
    assert (report["changed"], report["fetched_bytes"], report["ranks"]) == (20, 14, 2)


def test_the_latest_version_is_the_one_that_rank_0_finds() -> None:
    ranks = Ranks({"find": {"version": 9}}, {"find": {"version": 8}})
    asked: list[Any] = []

    def take(step: Any) -> Any:
        asked.append(step)
        return ranks.take(step)

    run(moving({"location": "x"}, "latest", "t"), take)
    assert Ask({"do": "prepare", "options": {"location": "x"}, "version": 9, "token": "t"}) in asked
    assert Finish(9) in asked


def test_a_rank_that_cannot_prepare_keeps_all_others_from_writing() -> None:
    ranks = Ranks({}, {"status": {"failure": FAILURE}})
    with pytest.raises(ChecksumError, match="bad bytes"):
        run(moving({"location": "x"}, 4, "t"), ranks.take)
    assert "commit" not in ranks.asked
    assert ranks.asked[-2:] == ["abort", "resume"]


def test_a_rank_that_fails_to_write_has_all_of_them_rolled_back() -> None:
    ranks = Ranks({}, {"commit": {"error": FAILURE}})
    with pytest.raises(ChecksumError, match="bad bytes"):
        run(moving({"location": "x"}, 4, "t"), ranks.take)
    assert ranks.asked == ["status", "prepare", "status", "pause", "commit", "roll back", "resume"]


def test_an_engine_that_cannot_be_rolled_back_stays_paused() -> None:
    torn = {"type": "VerificationError", "message": "of no version"}
    ranks = Ranks({"roll back": {"error": torn}}, {"commit": {"error": FAILURE}})
    with pytest.raises(VerificationError, match=r"of no version \(the update failed: bad bytes\)"):
        run(moving({"location": "x"}, 4, "t"), ranks.take)
    assert ranks.asked[-1] == "roll back"


def test_an_engine_that_cannot_name_the_version_is_rolled_back() -> None:
    ranks = Ranks({})

    def take(step: Any) -> Any:
        if isinstance(step, Finish):
            raise ConnectionError("gone")
        return ranks.take(step)

    with pytest.raises(ConnectionError, match="gone"):
        run(moving({"location": "x"}, 4, "t"), take)
    assert ranks.asked[-2:] == ["roll back", "resume"]


def test_an_engine_that_cannot_be_paused_is_not_written() -> None:
    ranks = Ranks({})

    def take(step: Any) -> Any:
        if step == "pause":
            raise ConnectionError("gone")
        return ranks.take(step)

    with pytest.raises(ConnectionError, match="gone"):
        run(moving({"location": "x"}, 4, "t"), take)
    assert "commit" not in ranks.asked
    assert "roll back" not in ranks.asked


@pytest.mark.parametrize("version", ["12", 1.0, None, True, -1])
def test_a_version_is_a_number_or_latest(version: Any) -> None:
    with pytest.raises(ValueError, match="version must be a number or 'latest'"):
        run(moving({"location": "x"}, version, "t"), Ranks({}).take)


def test_an_update_fails_if_another_caller_has_begun_one() -> None:
    ranks = Ranks({"status": {"token": "another"}})
    with pytest.raises(GroupError, match="another caller"):
        run(moving({"location": "x"}, 4, "t"), ranks.take)
    assert "commit" not in ranks.asked


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
        ({"location": "x", "verison": 3}, "unknown field verison"),
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
        self.tensors = {
            one.name: torch.zeros(one.shape, dtype=torch.bfloat16, device=DEVICE) for one in fused(SHAPE, rank)
        }

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
            torch.equal(self.tensors[name].cpu().view(torch.int16), tensor.view(torch.int16))
            for name, tensor in self.expected(checkpoint).items()
        )


class TwoRanks:
    """An engine of two ranks, each with a follower, with vLLM's own verbs as `AsyncLLM` has them."""

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self.models = [FusedModel(rank) for rank in RANKS]
        for model in self.models:
            model.load(checkpoint)
        self.config = SimpleNamespace(data_parallel_size=1, enable_eplb=False)
        self.limits = EngineLimits()
        self.start_followers()
        self.paused, self.sleeps, self.weight_version, self.dropped = False, False, "default", 0
        self.served = ServedEngine(self)

    def start_followers(self) -> None:
        self.followers = [
            EngineFollower(
                VllmEngine(
                    SimpleNamespace(
                        rank=model.rank,
                        parallel_config=self.config,
                        lora_config=None,
                        model_config=SimpleNamespace(quantization=None),
                    ),
                    model,
                ),
                self.limits,
            )
            for model in self.models
        ]

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

    async def is_sleeping(self) -> bool:
        return self.sleeps

    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool:
        self.dropped += reset_running_requests and reset_connector
        return True

    async def update_weight_version(self, version: str) -> None:
        self.weight_version = version

    async def get_weight_version(self) -> str:
        return self.weight_version

    def update(self, location: Path, version: int | str = "latest", **options: Any) -> dict[str, Any]:
        kv_cache = options.pop("kv_cache", "drop")
        return asyncio.run(self.served.update({"location": str(location), **options}, version, kv_cache))

    def status(self) -> dict[str, Any]:
        return asyncio.run(self.served.status())

    def have(self, checkpoint: dict[str, Any]) -> bool:
        return all(model.has(checkpoint) for model in self.models)


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the adapter asks of vLLM, answered by the engine above."""
    monkeypatch.setattr(VllmEngine, "rank", lambda engine: engine.config.rank)
    monkeypatch.setattr(VllmEngine, "hf_config", lambda engine: CONFIG)
    monkeypatch.setattr(VllmEngine, "checkpoint", lambda engine: iter(()))
    monkeypatch.setattr(VllmEngine, "refresh_packed", lambda engine: 0)


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


class FollowedRanks:
    """The engine of two ranks and its run, for the suite of every engine."""

    def __init__(self, training: Training) -> None:
        self.training, self.location = training, training.location
        self.engine = TwoRanks(training.versions[0])

    def publish(self) -> None:
        self.training.publish()

    def update(self, version: int) -> None:
        self.engine.update(self.location, version)

    def check(self, version: int) -> None:
        assert self.engine.have(self.training.versions[version])
        assert (self.engine.weight_version, self.engine.paused) == (str(version), False)
        status = self.engine.status()
        assert (status["version"], status["ranks_agree"], status["broken"]) == (version, True, None)

    def spoil(self) -> None:
        for model in self.engine.models:
            model.tensors["model.layers.1.mlp.down_proj.weight"].fill_(7.0)


class TestTwoRanks(EngineTests):
    @pytest.fixture
    def followed(self, training: Training) -> FollowedRanks:
        return FollowedRanks(training)


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


def test_every_write_to_one_rank_of_an_engine_is_repaired_and_named(training: Training) -> None:
    engine, name = TwoRanks(training.versions[0]), "model.layers.1.mlp.down_proj.weight"
    engine.update(training.location)
    for number, write in enumerate(WRITES.values(), 1):
        write(engine.models[1].tensors[name].view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16))
        training.publish()
        report = engine.update(training.location)
        assert (report["version"], report["mode"]) == (number, "in place")
        assert engine.have(training.versions[number])
        if not GPU:  # on a GPU, the write was to a copy
            assert name in report["repaired"]


def test_a_mirror_that_something_else_has_written_to_is_repaired(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, Any] = {}
    name = "model.layers.1.mlp.down_proj.weight"
    engine = TwoRanks(training.versions[0])
    for model in engine.models:
        model.tensors["model.norm.weight"] = torch.zeros(0)  # so that a mirror is used
    monkeypatch.setattr(VllmEngine, "derived", lambda engine: [])

    def load(engine: VllmEngine, weights: Any) -> set[str]:
        loaded.update(weights)
        return set(engine.model.tensors)

    monkeypatch.setattr(VllmEngine, "load_weights", load)
    engine.update(training.location)
    for number, write in enumerate(WRITES.values(), 1):
        for follower in engine.followers:
            assert follower._followed is not None
            assert follower._followed.weights is not None
            write(follower._followed.weights.tensors[name].view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        training.publish()
        report = engine.update(training.location)
        assert (report["version"], report["mode"]) == (number, "mirror")
        if report["repaired"]:  # what no patch reads passes unnoticed until the weights are counted
            assert name in report["repaired"]
            expected = training.versions[number]
            assert all(torch.equal(loaded[one].view(torch.int16), expected[one].view(torch.int16)) for one in expected)


def test_parameters_that_were_replaced_are_found_where_they_are_now(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    for model in engine.models:
        model.tensors = {name: tensor.clone() for name, tensor in model.tensors.items()}
    training.publish()
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_parameters_that_were_packed_away_are_followed_by_a_mirror(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, Any] = {}
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    for model in engine.models:
        model.tensors["model.layers.0.mlp.gate_up_proj.weight"] = torch.zeros(0)
    training.publish()
    monkeypatch.setattr(VllmEngine, "derived", lambda engine: [])

    def load(engine: VllmEngine, weights: Any) -> set[str]:
        loaded.update(weights)
        return set(engine.model.tensors)

    monkeypatch.setattr(VllmEngine, "load_weights", load)
    assert engine.update(training.location)["mode"] == "mirror"
    assert all(
        torch.equal(loaded[name].view(torch.int16), tensor.view(torch.int16))
        for name, tensor in training.versions[1].items()
    )


def test_a_quantised_checkpoint_is_refused_and_one_in_another_float_is_not(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    for model in engine.models:
        model.tensors["model.norm.weight"] = torch.zeros(0)  # so that a mirror is used
    monkeypatch.setattr(VllmEngine, "derived", lambda engine: [])
    monkeypatch.setattr(VllmEngine, "load_weights", lambda engine, weights: set(engine.model.tensors))
    checkpoint = {"model.layers.0.mlp.up_proj.weight": torch.ones(4).to(torch.float8_e4m3fn)}
    monkeypatch.setattr(VllmEngine, "checkpoint", lambda engine: iter(checkpoint.items()))
    with pytest.raises(StateError, match="a quantised checkpoint cannot follow"):
        engine.update(training.location)
    checkpoint = {"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}
    with pytest.raises(StateError, match="a quantised checkpoint cannot follow"):
        engine.update(training.location)
    checkpoint = {"model.layers.0.mlp.up_proj.weight": torch.ones(48, 32, dtype=torch.float16)}
    assert engine.update(training.location)["mode"] == "mirror"


def test_a_loader_that_leaves_parameters_out_fails_the_update(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    for model in engine.models:
        model.tensors["model.norm.weight"] = torch.zeros(0)
    monkeypatch.setattr(VllmEngine, "derived", lambda engine: [])
    monkeypatch.setattr(VllmEngine, "load_weights", lambda engine, weights: {name for name, _ in weights})
    with pytest.raises(StateError, match="did not load"):
        engine.update(training.location)


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
    monkeypatch.delattr(second, "_weights_for")
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_a_rank_that_fails_while_it_writes_has_both_rolled_back_and_the_next_update_works(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    followed = engine.followers[1]._followed
    assert followed is not None
    weights = followed.weights
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
    monkeypatch.setattr("pulsesync.integrations.engine.follower.PATIENCE_S", 0.05)
    follower = engine.followers[0]
    follower.prepare(RunOptions.parse({"location": str(training.location)}), 1)
    assert follower._pending is not None
    assert follower._pending.thread is not None
    follower._pending.thread.join(30)
    assert "the prepared update was dropped" in follower.status()["failure"]["message"]
    assert engine.have(training.versions[0])
    monkeypatch.setattr("pulsesync.integrations.engine.follower.PATIENCE_S", 60.0)
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
        patch.setattr(VllmEngine, "load_weights", lambda engine, weights: loaded.update(weights))
        patch.setattr(VllmEngine, "derived", lambda engine: [])
        report = engine.update(tmp_path / "other")
    assert report["mode"] == "mirror"
    assert "'model.extra.weight'" in caplog.text
    assert {name: tensor.tolist() for name, tensor in loaded.items() if "extra" in name} == {
        "model.extra.weight": [1.0] * 8
    }


def test_packed_copies_are_made_again_after_a_repair(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(VllmEngine, "refresh_packed", lambda engine: packed.append(engine))
    engine = TwoRanks(training.versions[0])
    training.publish()
    engine.update(training.location)
    for model in engine.models:
        model.load(training.versions[0])
    del packed[:]
    engine.update(training.location)
    assert len(packed) == 2
    assert engine.have(training.versions[1])


def test_a_failed_update_to_another_run_leaves_the_version_that_is_served(training: Training, tmp_path: Path) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    with pytest.raises(NothingPublishedError):
        engine.update(tmp_path / "elsewhere", 0)
    assert (engine.status()["location"], engine.status()["version"]) == (str(training.location), 0)
    training.publish()
    assert engine.update(training.location)["path"] == ["patch"]


def test_a_commit_that_fails_in_an_update_to_another_run_returns_to_the_first(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Training(tmp_path / "other")
    other.publish()
    other.publisher.close()
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    calls = iter([None, RuntimeError("kernel failed")])  # the second rank fails

    def synchronize(rank: VllmEngine) -> None:
        if (error := next(calls, None)) is not None:
            raise error

    monkeypatch.setattr(VllmEngine, "synchronize", synchronize)
    with pytest.raises(PulseError, match="kernel failed"):
        engine.update(other.location, 1)
    assert engine.have(training.versions[0])
    assert (engine.status()["location"], engine.status()["version"]) == (str(training.location), 0)
    training.publish()
    engine.update(training.location)
    assert engine.have(training.versions[1])


def test_a_roll_back_needs_no_store(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()

    def lose_the_run(rank: VllmEngine) -> None:
        if training.location.exists():
            training.location.rename(training.location.with_name("away"))
            raise RuntimeError("kernel failed")

    monkeypatch.setattr(VllmEngine, "synchronize", lose_the_run)
    with pytest.raises(PulseError, match="kernel failed"):
        engine.update(training.location)
    assert engine.have(training.versions[0])
    assert (engine.paused, engine.status()["broken"]) == (False, None)


def test_a_first_update_that_fails_returns_to_the_checkpoint(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    training.publish()
    calls = iter([None, RuntimeError("kernel failed")])

    def synchronize(rank: VllmEngine) -> None:
        if (error := next(calls, None)) is not None:
            raise error

    monkeypatch.setattr(VllmEngine, "synchronize", synchronize)
    monkeypatch.setattr(VllmEngine, "load_weights", lambda engine, weights: engine.model.load(training.versions[0]))
    with pytest.raises(PulseError, match="kernel failed"):
        engine.update(training.location)
    assert engine.have(training.versions[0])
    assert (engine.paused, engine.status()["version"], engine.status()["broken"]) == (False, None, None)


def test_an_engine_that_cannot_be_rolled_back_is_paused_until_an_update_succeeds(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TwoRanks(training.versions[0])
    training.publish()
    failing = True

    def synchronize(rank: VllmEngine) -> None:
        if failing and rank.model is engine.models[1]:
            raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(VllmEngine, "synchronize", synchronize)
    monkeypatch.setattr(VllmEngine, "load_weights", lambda engine, weights: None)
    with pytest.raises(VerificationError, match="the GPU is lost"):
        engine.update(training.location)
    status = engine.status()
    assert (engine.paused, status["paused_by_update"], "the GPU is lost" in status["broken"]) == (True, True, True)
    failing = False
    engine.update(training.location)
    assert engine.have(training.versions[1])
    assert (engine.paused, engine.status()["broken"]) == (False, None)


def test_an_abort_does_not_wait_for_a_fetch(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TwoRanks(training.versions[0])
    engine.update(training.location)
    training.publish()
    first, hold = engine.followers[0], threading.Event()
    find = first._weights_for
    monkeypatch.setattr(first, "_weights_for", lambda *given: (hold.wait(30), find(*given))[1])
    first.prepare(RunOptions.parse({"location": str(training.location)}), 1)
    began = time.perf_counter()
    first.abort()
    assert time.perf_counter() - began < 5
    monkeypatch.delattr(first, "_weights_for")
    hold.set()
    engine.update(training.location)  # after the one that was aborted has ended, without writing
    assert engine.have(training.versions[1])


def test_what_could_be_wrong_unnoticed_is_refused(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    engine.config.data_parallel_size = 2
    with pytest.raises(StateError, match="2 data-parallel replicas"):
        engine.update(training.location)
    engine.config.data_parallel_size, engine.config.enable_eplb = 1, True
    with pytest.raises(StateError, match="--enable-eplb"):
        engine.update(training.location)
    engine.config.enable_eplb, engine.sleeps = False, True
    with pytest.raises(StoreError, match="the engine is asleep"):
        engine.update(training.location)
    assert not engine.paused


def test_the_operator_says_which_runs_may_be_followed_and_whom_to_trust(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_VLLM_RUNS", f"s3://bucket/runs, {tmp_path / 'allowed'}")
    for location in (str(training.location), f"{tmp_path}/allowed/../run", "s3://bucket/runsx"):
        with pytest.raises(ValueError, match="PULSE_VLLM_RUNS does not name it"):
            read_limits().applied(RunOptions.parse({"location": location}))
    read_limits().applied(RunOptions.parse({"location": "s3://bucket/runs/one"}))
    engine = TwoRanks(training.versions[0])
    monkeypatch.delenv("PULSE_VLLM_RUNS")
    engine.limits = EngineLimits(trust=(SigningKey.generate().public,))
    engine.start_followers()
    with pytest.raises(SignatureError):
        engine.update(training.location, 0)


def test_latest_is_what_the_operators_key_for_pointers_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, operator, location = SigningKey("11" * 32), SigningKey("22" * 32), str(tmp_path / "run")
    publish_steps(location, 3, signing_key=key)
    move_pointer(location, "stable", 1, signing_key=operator, trust=key.public)
    given = {"location": location, "pointer": "stable", "trust": key.public, "trust_pointers": operator.public}
    assert find_version(RunOptions.parse(given)) == 1
    with pytest.raises(SignatureError, match="may not move pointers"):
        find_version(RunOptions.parse({**given, "trust_pointers": None}))
    with pytest.raises(ValueError, match="trust_pointers= needs trust="):
        RunOptions.parse({**given, "trust": None})
    monkeypatch.setenv("PULSE_VLLM_TRUST", key.public)
    with pytest.raises(SignatureError):  # the operator's list of keys replaces that of a request
        find_version(RunOptions.parse(given), read_limits())
    monkeypatch.setenv("PULSE_VLLM_TRUST_POINTERS", operator.public)
    assert find_version(RunOptions.parse({"location": location, "pointer": "stable"}), read_limits()) == 1
    monkeypatch.delenv("PULSE_VLLM_TRUST")
    with pytest.raises(ValueError, match="trust_pointers= needs trust="):
        read_limits()


def test_a_follower_takes_the_moves_of_a_pointers_key(tmp_path: Path) -> None:
    key, operator, store = SigningKey("11" * 32), SigningKey("22" * 32), MemoryStore()
    publish_steps(store, 3, signing_key=key)
    move_pointer(store, "stable", 1, signing_key=operator, trust=key.public)
    server = VllmServer("http://127.0.0.1:1")
    options: dict[str, Any] = {"pointer": "stable", "trust": [key.public]}
    for movers, accepted in ((None, False), ([operator.public], True)):
        follower = ServerFollower(server, "memory://x", store, trust_pointers=movers, **options)
        state = {"broken": None, "version": 1, "location": "memory://x", "ranks_agree": True}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server, "status", lambda state=state: state)
            if accepted:
                assert follower.update() is None  # the server is there already
            else:
                with pytest.raises(SignatureError):
                    follower.update()


# Over HTTP


@contextmanager
def served(engine: TwoRanks, key: str | None = None) -> Iterator[str]:
    """The routes of an engine, behind a server of the standard library."""
    starlette = pytest.importorskip("starlette.applications", reason="the routes need starlette, as vLLM has it")
    app = starlette.Starlette()
    app.state.engine_client = engine
    app.add_middleware(Routes)

    async def ask(method: str, path: str, body: bytes) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
        await app(scope, receive, send)
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


def test_an_update_waits_for_a_version_that_comes_within_its_time(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.integrations.engine.server.AGAIN_S", 0.02)
    engine = TwoRanks(training.versions[0])
    with served(engine) as url:
        later = threading.Timer(0.2, training.publish)
        later.start()
        try:
            assert VllmServer(url).update(str(training.location), 1, wait_s=30).version == 1
        finally:
            later.join()
        assert engine.have(training.versions[1])
        with pytest.raises(NothingPublishedError, match="version 9"):
            VllmServer(url).update(str(training.location), 9, wait_s=0.1)


def test_a_follower_brings_a_server_to_each_version_and_again_when_it_was_restarted(training: Training) -> None:
    engine = TwoRanks(training.versions[0])
    with served(engine) as url:
        follower = ServerFollower(VllmServer(url), str(training.location), open_store(str(training.location)))
        assert follower.update() is not None
        assert follower.update() is None
        training.publish()
        updates = follower.follow(0.01)
        assert next(updates).version == 1
        for model in engine.models:
            model.load(training.versions[0])
        engine.start_followers()
        assert next(updates).version == 1
        assert engine.have(training.versions[1])


def test_a_run_that_is_named_in_other_words_is_the_same_run(training: Training) -> None:
    engine, location = TwoRanks(training.versions[0]), str(training.location)
    with served(engine) as url:
        assert VllmServer(url).update(f"{location}/", "latest").version == 0
        assert ServerFollower(VllmServer(url), location, open_store(location)).update() is None


def test_a_follower_shows_where_its_server_is(training: Training) -> None:
    engine, store = TwoRanks(training.versions[0]), open_store(str(training.location))
    with served(engine) as url:
        follower = ServerFollower(VllmServer(url), str(training.location), store, heartbeat="gpu-1")
        follower.update()
        follower.update()
        follower.close()
        (worker,) = read_fleet(store).workers
        assert (worker.name, worker.version, worker.lag, worker.state) == ("gpu-1", 0, 0, "ended")
    away = ServerFollower(VllmServer(url), str(training.location), store, heartbeat="gpu-2")
    with pytest.raises(StoreError):
        away.update()
    away.close()
    found = {worker.name: worker.heartbeat for worker in read_fleet(store).workers}["gpu-2"]
    assert found is not None
    assert "does not answer" in str(found.error)


def test_every_look_of_a_follower_is_an_event(training: Training) -> None:
    engine, store, received = TwoRanks(training.versions[0]), open_store(str(training.location)), list[events.Event]()
    with listen(received.append):
        with served(engine) as url:
            follower = ServerFollower(VllmServer(url), str(training.location), store)
            follower.update()
            follower.update()
        with pytest.raises(StoreError):
            follower.update()
    found = [event for event in received if isinstance(event, events.Synced | events.SyncFailed)]
    looked, failed = found[-2:]
    assert (type(looked), looked.version, looked.newest) == (events.Synced, 0, 0)
    assert (type(failed), failed.version, failed.newest) == (events.SyncFailed, 0, 0)
    assert {event.location for event in found} == {str(training.location)}


def test_a_server_that_is_not_there_or_not_ready_for_this_says_what_to_do(training: Training) -> None:
    with pytest.raises(StoreError, match="does not answer"):
        VllmServer("http://127.0.0.1:9").status()
    engine = TwoRanks(training.versions[0])
    with served(engine, key="secret") as url:
        with pytest.raises(PulseError, match="requires an API key"):
            VllmServer(url).status()
        assert VllmServer(url, api_key="secret").status()["version"] is None
    with served(engine) as url, pytest.raises(PulseError, match=r"--middleware pulsesync\.integrations\.vllm\.Routes"):
        VllmServer(url + "/elsewhere").status()
    assert PATH == "/v1/pulse"


def test_an_engine_that_is_updated_over_http_is_emitted_by_its_server_and_by_its_client(training: Training) -> None:
    training.publish()
    received: list[events.Event] = []
    engine = TwoRanks(training.versions[0])
    with served(engine) as url, listen(received.append):
        report = VllmServer(url).update(str(training.location), 1)
        with pytest.raises(NothingPublishedError):
            VllmServer(url).update(str(training.location), 9)
    updated = [event for event in received if isinstance(event, events.EngineUpdated)]
    assert len(updated) == 2  # both are in this process
    for event in updated:
        assert event.location == str(training.location)
        for name in ("version", "step", "from_version", "changed", "fetched_bytes", "pause_s", "seconds"):
            assert getattr(event, name) == getattr(report, name), name
    assert report.pause_s > 0
    failed = [event for event in received if isinstance(event, events.EngineUpdateFailed)]
    assert len(failed) == 2
    assert all(event.error.startswith("NothingPublishedError: version 9") for event in failed)
    assert not any(event.torn for event in failed)
    ranks = [event for event in received if isinstance(event, events.Synced)]
    assert [event.version for event in ranks] == [1, 1]


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
    received: list[events.Event] = []
    with listen(received.append):
        assert follower.update().version == 1
    assert [event.version for event in received if isinstance(event, events.EngineUpdated)] == [1]
    assert (follower.version, llm.dropped, engine.have(training.versions[1])) == (1, 1, True)
