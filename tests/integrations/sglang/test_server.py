"""SGLang's own server, managers, weight updaters and models follow a run in two ranks: bits, failures and kills.

A start takes 20 seconds or more, most of it imports, so that the tests share a server where they can.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("sglang") is None:
    pytest.skip(
        "SGLang is not installed: its adapter is UNTESTED against it here; run make test-sglang",
        allow_module_level=True,
    )

from pulsesync.errors import PulseError, StoreError
from pulsesync.integrations.engine.server import ServerFollower
from pulsesync.integrations.sglang import LOADER, SglangServer
from pulsesync.store import open_store
from tests.integrations.engine_tests import EngineTests
from tests.integrations.sglang.serving import Server, Training, make_checkpoint, serving

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(checkpoint, tmp_path_factory.mktemp("server") / "log", 2) as made:
        yield made


@pytest.fixture
def training(checkpoint: Path, tmp_path: Path) -> Iterator[Training]:
    made = Training(checkpoint, tmp_path)
    made.publish()
    yield made
    made.publisher.close()


def follower_of(server: Server, training: Training, **options: Any) -> ServerFollower:
    location = str(training.location)
    return ServerFollower(SglangServer(server.url), location, open_store(location), **options)


def check_served(server: Server, training: Training, version: int) -> None:
    status = SglangServer(server.url).status()
    assert (status["location"], status["version"]) == (str(training.location), version)
    assert (status["weight_version"], status["ranks"], status["ranks_agree"]) == (str(version), 2, True)
    assert server.has(training, version)
    assert not server.paused


def test_the_server_is_brought_to_every_version(server: Server, training: Training) -> None:
    follower = follower_of(server, training)
    for version in range(3):
        if version:
            training.publish()
        report = follower.update()
        assert report is not None
        assert (report.version, report.mode, report.ranks) == (version, "in place", 2)
        check_served(server, training, version)
        assert follower.update() is None
        assert report.path == (("patch",) if version else report.path)
        assert 0 < report.pause_s < 60
    assert "Could not compare the engine" not in server.log.read_text(errors="replace")
    assert {answer["versions"][-1] for answer in server.test()} == {"2"}
    assert follower.update(1).version == 1  # type: ignore[union-attr]
    check_served(server, training, 1)


class FollowedServer:
    """A server and its run, for the suite of every engine."""

    def __init__(self, server: Server, training: Training) -> None:
        self.server, self.training, self.location = server, training, training.location

    def publish(self) -> None:
        self.training.publish()

    def update(self, version: int) -> None:
        SglangServer(self.server.url).update(str(self.location), version)

    def check(self, version: int) -> None:
        check_served(self.server, self.training, version)

    def spoil(self) -> None:
        self.server.test(load=str(self.training.checkpoint(0)))


class TestServer(EngineTests):
    @pytest.fixture
    def followed(self, server: Server, training: Training) -> FollowedServer:
        return FollowedServer(server, training)


def test_a_rank_that_fails_after_it_has_written_brings_all_ranks_back(server: Server, training: Training) -> None:
    follower = follower_of(server, training)
    follower.update()
    training.publish()
    server.test(fail=1)
    with pytest.raises(PulseError, match="the GPU is lost"):
        follower.update()
    check_served(server, training, 0)
    assert follower.update() is not None
    check_served(server, training, 1)


def test_the_report_of_a_follower_names_the_weights_that_were_repaired(server: Server, training: Training) -> None:
    follower = follower_of(server, training)
    follower.update()
    training.publish()
    follower.update()
    server.test(load=str(training.checkpoint(0)))
    training.publish()
    report = follower.update()
    assert report is not None
    assert report.repaired


def test_the_cache_of_requests_in_flight_is_dropped_or_kept(server: Server, training: Training) -> None:
    server.test(running=3)
    before = server.test()[0]["flushed"]
    assert SglangServer(server.url).update(str(training.location), "latest").version == 0
    assert server.test()[0]["flushed"] == before + 1
    training.publish()
    assert follower_of(server, training, kv_cache="keep").update() is not None
    assert server.test()[0]["flushed"] == before + 1
    server.test(running=0)
    check_served(server, training, 1)


def test_an_offline_engine_is_brought_to_a_version(server: Server, training: Training) -> None:
    """Through `Engine` and SGLang's own serializer, which shares memory with the ranks."""
    message = {"do": "update", "options": {"location": str(training.location)}, "version": "latest"}
    success, answer = server.test(engine=message)
    assert success
    assert json.loads(answer)["version"] == 0
    assert server.has(training, 0)
    success, answer = server.test(engine={**message, "version": 7})
    assert not success
    assert "version 7 is not published" in answer
    assert server.has(training, 0)


def test_an_update_outside_of_a_session_is_refused_by_sglang(server: Server) -> None:
    body = {"serialized_named_tensors": ["gAQu"] * 2, "load_format": LOADER}
    code, answer = server.post("/update_weights_from_tensor", body)
    assert code == 400
    assert "must run between begin_weight_update() and end_weight_update()" in answer["message"]


def test_tensors_that_are_no_request_are_refused_and_the_server_goes_on(server: Server, training: Training) -> None:
    follower_of(server, training).update()
    driver = SglangServer(server.url)
    driver.status()
    with pytest.raises(PulseError, match="unknown request 'destroy'"):
        driver._ask({"do": "destroy"}, "in_place")
    with pytest.raises(ValueError, match="must not be empty"):
        driver.update("", 0)
    check_served(server, training, 0)


def test_a_follower_that_is_killed_leaves_a_server_that_the_next_one_resumes(
    server: Server, training: Training
) -> None:
    command = [
        sys.executable,
        "-c",
        "from pulsesync.cli import main; main()",
        "follow",
        str(training.location),
        "--sglang",
        server.url,
    ]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any('"event": "version"' in line for line in process.stdout)
        process.send_signal(signal.SIGKILL)
    server.post("/pause_generation", {"mode": "retract"})  # as one that is killed in an update leaves it
    server.post("/begin_weight_update", {})
    assert server.paused
    training.publish()
    done = subprocess.run([*command, "--once"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "version 1" in done.stdout
    check_served(server, training, 1)


def test_a_mirror_is_followed_and_a_rank_that_dies_in_an_update_ends_the_server(tmp_path: Path) -> None:
    """Of Phi-3, two ranks have parts that are no rectangles of its fused matrices."""
    checkpoint = make_checkpoint(tmp_path / "phi3", "Phi3", pad_token_id=0)
    training = Training(checkpoint, tmp_path, ranks=1)
    with serving(checkpoint, tmp_path / "log", 2) as server:
        follower = follower_of(server, training)
        for version in range(3):
            training.publish()
            report = follower.update()
            assert report is not None
            assert (report.version, report.mode) == (version, "mirror")
            check_served(server, training, version)
        training.publish()
        server.test(fail=1)
        with pytest.raises(PulseError, match="the GPU is lost"):
            follower.update()
        check_served(server, training, 2)
        server.test(die=1)
        with pytest.raises(StoreError, match="does not answer"):
            follower.update()
        until = time.monotonic() + 60
        while server.process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert server.process.poll() not in (None, 0)
    training.publisher.close()
