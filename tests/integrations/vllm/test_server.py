"""A real vLLM server follows a run: log-probabilities, live parameters, failures, kills and requests in flight.

Each start of vLLM takes 20 seconds or more, so that the tests of a kind share a server.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest
import torch

if find_spec("vllm") is None or find_spec("transformers") is None:
    pytest.skip(
        "vLLM is not installed: its adapter is UNTESTED against it here; run make test-vllm", allow_module_level=True
    )

from pulsesync import Publisher, PulseError, Subscriber
from pulsesync.errors import FormatError
from pulsesync.integrations.vllm import VllmServer
from tests.examples import python_path
from tests.integrations.engine_tests import EngineTests
from tests.integrations.vllm.serving import (
    PROMPTS,
    ROOT,
    ROUTES,
    Server,
    Training,
    difference,
    expected_parameters,
    make_checkpoint,
    prompt_logprobs,
    serving,
)

BOUND = 5e-5  # on log-probabilities, against transformers in FP32
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return folder


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(make_checkpoint(tmp_path / "model"), tmp_path / "run")
    yield made
    made.publisher.close()


@pytest.fixture(scope="module", params=["in place", "mirror"])
def server(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """In place on one rank, and by mirrors on two; test_grpo has a mirror on one."""
    log = tmp_path_factory.mktemp("server") / "log"
    flags = (*ROUTES, "--weight-transfer-config", '{"backend": "pulse"}')
    plain = request.param == "in place"
    with serving(checkpoint, log, *flags, plain=plain, dev=True, ranks=1 if plain else 2) as made:
        yield made


def check_served(server: Server, training: Training, version: int) -> None:
    """The server computes with a version, says so, and its parameters are those bits."""
    assert difference(server.logprobs(), training.logprobs(version)) <= BOUND
    status = VllmServer(server.url).status()
    assert (status["version"], status["weight_version"], status["paused"]) == (version, str(version), False)
    assert (status["ranks"], status["ranks_agree"]) == (server.ranks, True)
    check_parameters(server, training.versions[version])


def check_parameters(server: Server, weights: dict[str, Any]) -> None:
    expected = expected_parameters(weights, server.ranks)
    live = {name: value for name, value in server.ask_workers("peek")[0].items() if name != "lm_head.weight"}
    if server.mode == "in place":
        assert live == expected
    assert live.items() <= expected.items()  # what is not packed away: norms and the embedding at least
    assert len(live) >= 8


def test_the_server_is_brought_to_every_version(server: Server, training: Training) -> None:
    for _ in range(5):
        training.step()
    client = VllmServer(server.url)
    before = training.logprobs(0)
    for version in (0, 1, 2, 5, 4):
        report = client.update(str(training.location), version)
        assert (report.version, report.mode, report.ranks) == (version, server.mode, server.ranks)
        check_served(server, training, version)
    assert difference(training.logprobs(5), before) > 100 * BOUND  # else the bound would show nothing


class FollowedServer:
    """A server and its run, for the suite of every engine."""

    def __init__(self, server: Server, training: Training) -> None:
        self.server, self.training, self.location = server, training, training.location

    def publish(self) -> None:
        self.training.step()

    def update(self, version: int) -> None:
        VllmServer(self.server.url).update(str(self.location), version)

    def check(self, version: int) -> None:
        check_served(self.server, self.training, version)

    def spoil(self) -> None:
        self.server.ask_workers("reload_weights")  # the checkpoint that the server was started with
        newest = len(self.training.versions) - 1
        assert difference(self.server.logprobs(), self.training.logprobs(newest)) > 100 * BOUND


class TestServer(EngineTests):
    @pytest.fixture
    def followed(self, server: Server, training: Training) -> FollowedServer:
        return FollowedServer(server, training)


def test_weights_that_were_written_are_noticed_without_a_new_version(server: Server, training: Training) -> None:
    training.step()
    client = VllmServer(server.url)
    client.update(str(training.location), 1)
    assert "0" not in server.ask_workers("spoil", "layernorm")
    client.update(str(training.location), 1)
    check_served(server, training, 1)


def test_requests_in_flight_are_kept_over_an_update(server: Server, training: Training) -> None:
    client = VllmServer(server.url)
    client.update(str(training.location), 0)
    training.step()
    events: list[tuple[float, dict[str, Any]]] = []

    def generate() -> None:
        events.extend(server.generate(PROMPTS[0], 400))

    stream = threading.Thread(target=generate)
    stream.start()
    end = time.monotonic() + 60
    while len(events) < 20 and time.monotonic() < end:
        time.sleep(0.01)
    report = client.update(str(training.location), 1, kv_cache="keep")
    stream.join(120)
    text = "".join(event["choices"][0]["text"] for _, event in events if event["choices"])
    assert len(text.split()) == 400
    assert events[-1][1]["choices"][0]["finish_reason"] == "length"
    assert report.version == 1
    check_served(server, training, 1)


def test_vllms_own_routes_bring_the_server_to_versions(server: Server, training: Training) -> None:
    training.step()
    server.post("/init_weight_transfer_engine", {"init_info": {"location": str(training.location)}})
    server.post("/pause?mode=keep")
    server.post("/start_weight_update", {})
    server.post("/update_weights", {"update_info": {"version": "latest"}})
    server.post("/finish_weight_update", {"weight_version": "1"})
    server.post("/resume")
    check_served(server, training, 1)


# vLLM keeps what a second rank answered to a failed call.
@pytest.mark.parametrize("server", ["in place"], indirect=True)
def test_an_init_that_fails_leaves_no_old_run_behind(server: Server, training: Training, tmp_path: Path) -> None:
    server.post("/init_weight_transfer_engine", {"init_info": {"location": str(training.location)}})
    with pytest.raises(urllib.error.HTTPError):
        server.post("/init_weight_transfer_engine", {"init_info": {"location": "nowhere://at/all"}})
    server.post("/start_weight_update", {})
    with pytest.raises(urllib.error.HTTPError):
        server.post("/update_weights", {"update_info": {"version": "latest"}})
    client = VllmServer(server.url)
    client.update(str(training.location), 0)
    check_served(server, training, 0)


def test_the_development_routes_do_without_ours(server: Server, training: Training) -> None:
    training.step()
    client = VllmServer(server.url)
    client._by_routes = False  # as of a server that was started without them
    report = client.update(str(training.location), "latest")
    assert (report.version, report.ranks) == (1, server.ranks)
    check_served(server, training, 1)


def pulse(*arguments: str, output: "int | IO[str]" = subprocess.PIPE) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from pulsesync.cli import main; sys.exit(main())", *arguments],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("server", ["in place"], indirect=True)
def test_a_server_that_is_killed_in_an_update_comes_back_to_the_version(server: Server, training: Training) -> None:
    """A start of vLLM: `pulse follow` drives the server, and kill -9 ends it while it is updated."""
    follower = pulse("follow", str(training.location), "--vllm", server.url, "--interval", "0.1")
    try:
        wait_for_version(server, training.location, 0)
        training.step()
        time.sleep(0.15)  # into the update
        server.kill()
        server.start()
        wait_for_version(server, training.location, 1)
        check_served(server, training, 1)
    finally:
        follower.send_signal(signal.SIGINT)
        follower.communicate(timeout=30)


def wait_for_version(server: Server, location: Path, version: int) -> None:
    client, end = VllmServer(server.url), time.monotonic() + 90
    while ((status := client.status())["location"], status["version"]) != (str(location), version):
        assert time.monotonic() < end, f"the server did not reach version {version} of {location}: {status}"
        time.sleep(0.1)


@pytest.mark.parametrize("server", ["in place"], indirect=True)
def test_a_trainer_that_is_killed_leaves_a_run_that_is_served(server: Server, tmp_path: Path) -> None:
    """A real trainer process, which publishes as fast as it can, is killed with kill -9 while the server follows it."""
    run = tmp_path / "run"
    trainer = subprocess.Popen(
        [sys.executable, "-m", "tests.integrations.vllm.endless", str(run)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{python_path()}"},
        cwd=ROOT,
    )
    log = tmp_path / "follower"
    with log.open("w") as output:
        follower = pulse("follow", str(run), "--vllm", server.url, "--interval", "0.05", output=output)
    client = VllmServer(server.url)
    try:
        end = time.monotonic() + 300  # the trainer may have to compile its kernels, on a busy machine
        while client.status()["location"] != str(run) or (client.status()["version"] or 0) < 3:
            assert trainer.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        trainer.kill()
        trainer.wait()
        newest = Subscriber(str(run))
        weights = make_checkpoint(tmp_path / "model").bfloat16()
        version = newest.sync(weights).version
        wait_for_version(server, run, version)
        end = time.monotonic() + 30
        while f"serves version {version}" not in log.read_text():  # which it writes after the server has said so
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.wait()
        follower.send_signal(signal.SIGINT)
        follower.wait(30)
    check_parameters(server, dict(weights.state_dict()))


def test_a_lora_adapter_is_followed_as_a_folder_by_a_server_without_routes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of vLLM; the truth is transformers with the adapter added to the weights."""
    model = make_checkpoint(tmp_path / "model")
    names = [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    adapters: list[dict[str, Any]] = []
    with Publisher(str(tmp_path / "run"), files={"adapter_config.json": json.dumps(config).encode()}) as publisher:
        for step in range(2):
            adapters.append({})
            for name in names:
                shape = model.get_submodule(name).weight.shape
                adapters[step][f"base_model.model.{name}.lora_A.weight"] = torch.randn(8, shape[1]) * 0.1
                adapters[step][f"base_model.model.{name}.lora_B.weight"] = torch.randn(shape[0], 8) * 0.1
            publisher.publish(adapters[step], step=step)
    flags = ("--enable-lora", "--max-lora-rank", "8")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with serving(checkpoint, tmp_path / "log", *flags) as server:
        with pytest.raises(PulseError, match=r"--middleware pulsesync\.integrations\.vllm\.Routes"):
            VllmServer(server.url).status()  # it was started without them
        before = server.logprobs()
        for version in range(2):
            command = ("follow", str(tmp_path / "run"), str(tmp_path / "folder"), "--version", str(version))
            done = pulse(*command, "--vllm", server.url, "--lora", "tuned")
            output, _ = done.communicate(timeout=120)
            assert f"serves version {version} as tuned" in output
            tuned = make_checkpoint(tmp_path / f"model{version}")
            for name in names:
                a, b = (adapters[version][f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
                tuned.get_submodule(name).weight.data += 2.0 * (b @ a)
            assert difference(server.logprobs("tuned"), prompt_logprobs(tuned)) <= BOUND
            assert difference(server.logprobs("tuned"), before) > 100 * BOUND
        assert difference(server.logprobs(), before) <= BOUND


def test_two_tensor_parallel_ranks_move_together_in_place(checkpoint: Path, tmp_path: Path, training: Training) -> None:
    """A start of vLLM with three processes."""
    with serving(checkpoint, tmp_path / "log", *ROUTES, plain=True, ranks=2) as server:
        client = VllmServer(server.url)
        for version in (0, 1, 2):
            report = client.update(str(training.location), version)
            assert (report.version, report.mode, report.ranks) == (version, "in place", 2)
            assert difference(server.logprobs(), training.logprobs(version)) <= BOUND
            training.step()
        record = training.location / "manifests" / f"{3:016d}"
        record.chmod(0o644)
        record.write_bytes(record.read_bytes()[:-20] + bytes(20))
        with pytest.raises(FormatError):
            client.update(str(training.location), 3)
        status = client.status()
        assert (status["version"], status["ranks_agree"], status["paused"]) == (2, True, False)
        assert difference(server.logprobs(), training.logprobs(2)) <= BOUND
