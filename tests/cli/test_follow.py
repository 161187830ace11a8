"""`pulse publish` and `pulse follow`: checkpoints in, checkpoints out."""

import contextlib
import json
import shutil
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from pulsesync import Publisher
from pulsesync.cli.follow import _name_worker, follow
from pulsesync.integrations.folder import read_mark
from pulsesync.run import reader
from pulsesync.state.checkpoint_files import open_checkpoint
from tests.commands import pulse, start
from tests.runs import equal

pytestmark = pytest.mark.timeout(180)  # on a machine without cached kernels the first test compiles them


def remove(run: Path) -> None:
    """Delete a run that another process may be writing its heartbeat to."""
    for _ in range(10):
        with contextlib.suppress(OSError):
            shutil.rmtree(run)
            return
    shutil.rmtree(run)


def write(folder: Path, weights: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


class Checkpoints:
    """A training that leaves FP32 checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, np.random.default_rng(0)
        self.weights: dict[str, Any] = {
            "a": self.rng.normal(size=(40, 30)).astype(np.float32),
            "b": self.rng.normal(size=7).astype(np.float32),
        }

    def next(self) -> Path:
        for array in self.weights.values():
            array += self.rng.normal(0, 1e-3, array.shape).astype(np.float32)
        write(self.folder, self.weights)
        return self.folder

    @property
    def published(self) -> dict[str, Any]:
        return {name: array.astype(ml_dtypes.bfloat16) for name, array in self.weights.items()}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoint")


def held(folder: Path) -> Any:
    return open_checkpoint((folder / "current").resolve()).tensors


def test_checkpoints_travel_and_restarts_go_on_without_the_anchor(checkpoints: Checkpoints, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "f"
    for version in range(4):
        done = pulse("publish", checkpoints.next(), run, "--step", 7 * version, "--cast", "BF16", "--json")
        (published,) = done.events
        assert (published["event"], published["version"], published["step"]) == ("published", version, 7 * version)
        assert published["files"] == ["config.json"]
        assert done.err == ""
        (flip,) = pulse("follow", run, place, "--once", "--hold", 0, "--json").events
        assert (flip["event"], flip["version"], flip["step"]) == ("version", version, 7 * version)
        assert flip["began"] == ["nothing", "copy", "resume", "resume"][version]
        assert flip["path"] == [["anchor"], ["patch"], ["patch"] * 2, ["patch"] * 2][version]
        assert equal(held(place), checkpoints.published)
    (again,) = pulse("follow", run, place, "--once", "--json").events
    assert (again["event"], again["version"]) == ("holds", 3)
    assert pulse("verify", run, place).code == 0
    assert "version 3" in pulse("follow", run, place, "--once").out


def test_a_step_that_goes_back_is_shown(checkpoints: Checkpoints, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "f"
    shown = []
    for step in (3, 9, 4):
        pulse("publish", checkpoints.next(), run, "--step", step, "--resume")
        shown.append(pulse("follow", run, place, "--once", "--hold", 0).out)
    assert shown[1].startswith("version 1 (step 9) is current")
    assert shown[2].startswith("version 2 (step 4, back from step 9) is current")
    for step in (2, 12):
        pulse("publish", checkpoints.next(), run, "--step", step, "--resume")
    shown = [pulse("follow", run, place, "--once", "--hold", 0).out]
    assert shown[0].startswith("version 4 (step 12; it went back at version 3) is current")
    rows = [line.split() for line in pulse("log", run).out.splitlines()]
    assert [row[3:5] for row in rows if "(back)" in row] == [["2", "(back)"], ["4", "(back)"]]


def test_both_versions_and_steps_of_an_update_are_in_its_json(checkpoints: Checkpoints, tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "f"
    updates = []
    for step in (3, 9, 4):
        pulse("publish", checkpoints.next(), run, "--step", step, "--resume")
        (flip,) = pulse("follow", run, place, "--once", "--hold", 0, "--json").events
        updates.append([flip[name] for name in ("from_version", "version", "from_step", "step", "rewound_at")])
    assert updates == [[None, 0, None, 3, None], [0, 1, 3, 9, None], [1, 2, 9, 4, 2]]


def test_publish_says_in_a_line_what_it_did(checkpoints: Checkpoints, tmp_path: Path) -> None:
    done = pulse("publish", checkpoints.next() / "model.safetensors", tmp_path / "run")
    assert done.code == 0
    assert done.out.startswith("version 0 (step 0): 1,207 of 1,207 weights changed")
    assert pulse("publish", tmp_path / "missing", tmp_path / "run").refused(1, "missing")
    write(tmp_path / "other", {"c": np.ones(3)})
    assert pulse("publish", tmp_path / "other", tmp_path / "run").refused(1, "publish to a new location")


def test_an_older_version_can_be_had(checkpoints: Checkpoints, tmp_path: Path) -> None:
    states = []
    for _ in range(3):
        pulse("publish", checkpoints.next(), tmp_path / "run", "--spool", tmp_path / "spool", "--cast", "BF16")
        states.append(checkpoints.published)
    for version in (2, 0, 1):
        assert pulse("follow", tmp_path / "run", tmp_path / "f", "--version", version, "--hold", 0).code == 0
        assert equal(held(tmp_path / "f"), states[version])
    assert pulse("follow", tmp_path / "run", tmp_path / "f", "--version", 8).refused(1, "version 8")


def test_following_nothing_once_is_exit_code_3(tmp_path: Path) -> None:
    assert pulse("follow", tmp_path / "run", tmp_path / "f", "--once").refused(3, "no run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    assert pulse("follow", tmp_path / "run", tmp_path / "mine", "--once").refused(1, "contains other files")


def test_following_a_run_without_its_first_anchor_once_is_exit_code_3(checkpoints: Checkpoints, tmp_path: Path) -> None:
    pulse("publish", checkpoints.next(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "anchors")
    assert pulse("follow", tmp_path / "run", tmp_path / "f", "--once").refused(3, "try again later")
    assert not (tmp_path / "f" / "current").exists()


def follow_a_while(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    """What `pulse follow` reports on stderr until it waits for the third time."""
    waits = iter([False, False, True])

    def wait(seconds: float) -> None:
        if seconds and next(waits):  # 0: a second look, of one update
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", wait)
        done = pulse("follow", *arguments)
    assert done.code == 130
    return done.err


def test_a_live_follower_reports_once_what_it_waits_for(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)
    run, place = tmp_path / "run", tmp_path / "f"
    reported = follow_a_while(monkeypatch, run, place)
    assert reported.count(f"waiting for the first version: there is none at {run} yet") == 1
    pulse("publish", checkpoints.next(), run)
    (run / "anchors").rename(tmp_path / "anchors")
    reported = follow_a_while(monkeypatch, run, place)
    assert reported.count(f"waiting for the first anchor of version 0 at {run}") == 1
    (tmp_path / "anchors").rename(run / "anchors")
    assert pulse("follow", run, place, "--once").code == 0
    remove(run)
    reported = follow_a_while(monkeypatch, run, place)
    assert reported.count(f"there is no version at {run} any more; {place}/current stays version 0") == 1
    assert "first version" not in reported


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({}, ["config.json"]),
        ({"tokenizer.json": b"{}"}, ["config.json"]),
        ({"config.json": b'{"vocab_size": 9}'}, ["tokenizer.json or tokenizer.model"]),
        ({"config.json": b'{"text_config": {"vocab_size": 9}}'}, ["tokenizer.json or tokenizer.model"]),
        ({"config.json": b'{"vocab_size": 9}', "tokenizer.json": b"{}"}, []),
        ({"config.json": b'{"vocab_size": 9}', "vocab.txt": b""}, []),
        ({"config.json": b"{}"}, []),  # a model of images has no tokenizer
        ({"config.json": b"[oops"}, []),
    ],
)
def test_what_a_loader_will_miss_is_said_once(files: dict[str, bytes], missing: list[str], tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "f"
    with Publisher(str(run), files=files) as publisher:
        for step in range(2):
            publisher.publish({"a": np.full(9, step, np.float32)}, step=step)
    flip, *told = pulse("follow", run, place, "--once", "--json").events
    assert (flip["event"], flip["missing"]) == ("version", missing)
    assert told == ([{"event": "missing", "files": missing, "folder": f"{place}/current"}] if missing else [])
    done = pulse("follow", run, place, "--version", 0, "--hold", 0)
    assert done.code == 0
    for name in missing:
        assert f"{place}/current cannot be loaded" in done.err
        assert f"the run has no {name}" in done.err
        assert 'Publisher(files={"config.json": …})' in done.err
    assert len(done.err.splitlines()) == len(missing)


def test_a_live_follower_says_once_what_a_loader_will_miss(tmp_path: Path) -> None:
    """A process of its own, as it follows for ever."""
    with Publisher(str(tmp_path / "run")) as publisher:
        publisher.publish({"a": np.zeros(9, np.float32)}, step=0)
        publisher.flush()
        with start("follow", tmp_path / "run", tmp_path / "f", "--interval", 0.01, "--hold", 0, "--json") as process:
            events = [json.loads(process.stdout.readline())["event"] for _ in range(3)]
            publisher.publish({"a": np.ones(9, np.float32)}, step=1)
            events.append(json.loads(process.stdout.readline())["event"])
            process.kill()
            rest, _ = process.communicate(timeout=30)
    assert (events, rest) == (["waits", "version", "missing", "version"], "")


def test_a_run_that_was_replaced_is_an_error_unless_asked_for(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)
    run, place = tmp_path / "run", tmp_path / "f"
    for _ in range(2):
        pulse("publish", checkpoints.next(), run, "--cast", "BF16")
    assert pulse("follow", run, place, "--once", "--hold", 0).code == 0
    remove(run)
    pulse("publish", checkpoints.next(), run, "--cast", "BF16")
    assert pulse("follow", run, place, "--once", "--hold", 0).refused(1, "--follow-replaced")
    ended = pulse("follow", run, place, "--hold", 0)  # it does not follow the old run for ever
    assert ended.code == 1
    assert "--follow-replaced" in ended.err
    assert pulse("follow", run, place, "--once", "--hold", 0, "--follow-replaced").code == 0
    assert equal(held(place), checkpoints.published)


def test_only_what_a_trusted_key_signed_is_followed(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = tmp_path / "run", tmp_path / "f"
    mine, other = (pulse("keygen", tmp_path / name, "--json").events[0]["public"] for name in ("mine", "other"))
    assert pulse("publish", checkpoints.next(), run, "--key", tmp_path / "mine").code == 0
    assert pulse("follow", run, place, "--once", "--trust", other).refused(1, "not trusted")
    assert read_mark(place / "current") is None
    (tmp_path / "trusted").write_text(f"{other}\n{mine}\n")
    for trust in (mine, f"{other},{mine}", tmp_path / "trusted"):
        assert pulse("follow", run, place, "--once", "--trust", trust).code == 0
    monkeypatch.setenv("PULSE_TRUST", other)
    assert pulse("verify", run, place).refused(1, "not trusted")
    monkeypatch.setenv("PULSE_TRUST", mine)
    assert pulse("verify", run, place).code == 0
    monkeypatch.setenv("PULSE_KEY", str(tmp_path / "mine"))
    assert pulse("publish", checkpoints.next(), run, "--step", 1).code == 0
    assert pulse("follow", run, place, "--once", "--hold", 0).code == 0
    assert pulse("inspect", run, "--version", 1, "--json").events[0]["signed by"] == mine


def test_a_run_is_followed_over_http_with_a_token(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse("publish", checkpoints.next(), tmp_path / "run", "--cast", "BF16")
    with served(tmp_path / "run", "secret") as url:
        assert pulse("follow", url, tmp_path / "f", "--once").code == 1
        monkeypatch.setenv("PULSE_TOKEN", "secret")  # what readers of this machine's own server must send
        assert "PULSE_TOKEN is not sent" in pulse("follow", url, tmp_path / "f", "--once").err
        monkeypatch.setenv("PULSE_SEND_TOKENS", f"{url}=secret")
        assert pulse("follow", url, tmp_path / "f", "--once").code == 0
    assert equal(held(tmp_path / "f"), checkpoints.published)


class served:  # noqa: N801 - used like a function
    """`pulse serve` in a process of its own."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.token = folder, token

    def __enter__(self) -> str:
        (self.folder.parent / "token").write_text(self.token)
        self.process = start("serve", self.folder, "--port", 0, "--token-file", self.folder.parent / "token", "--json")
        return str(json.loads(self.process.stdout.readline())["url"])

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_server_is_given_the_key_of_its_own_kind(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SeenError(Exception):
        pass

    def server(url: str, api_key: str | None, api_key_in_clear: bool) -> None:
        raise SeenError(api_key)

    for name in ("Vllm", "Sglang"):
        monkeypatch.setattr(f"pulsesync.cli.follow.{name}Server", server)
        monkeypatch.setenv(f"PULSE_{name.upper()}_API_KEY", f"key of {name.lower()}")
    address: dict[str, Any] = {engine: "http://127.0.0.1:1"}
    with pytest.raises(SeenError, match=f"key of {engine}"):
        follow(str(tmp_path), **address)
    with pytest.raises(SeenError, match="given"):
        follow(str(tmp_path), **address, api_key="given")
    monkeypatch.setenv(f"PULSE_{engine.upper()}_API_KEY", "")
    empty = f"PULSE_{engine.upper()}_API_KEY is set but empty"
    assert pulse("follow", tmp_path, f"--{engine}", "http://127.0.0.1:1").refused(2, empty)


def test_the_name_of_a_follower_has_nothing_secret_of_its_servers_address() -> None:
    assert _name_worker(None, "http://me:s3cret@host:8000/?token=s3cret", None).endswith("-vllm-host-8000")


def test_a_follower_is_shown_by_status_under_its_own_name(checkpoints: Checkpoints, tmp_path: Path) -> None:
    assert pulse("publish", checkpoints.next(), tmp_path / "run", "--cast", "BF16").code == 0
    given = {"a/weights": (), "b/weights": (), "c": ("--heartbeat", "mine"), "d": ("--no-heartbeat",)}
    for folder, options in given.items():
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        assert pulse("follow", tmp_path / "run", tmp_path / folder, "--once", *options).code == 0
    (facts,) = pulse("status", tmp_path / "run", "--json").events
    names = [worker["name"] for worker in facts["workers"]]
    assert len(names) == 3
    assert "mine" in names
    assert sum("-weights-" in name for name in names) == 2
    assert {(worker["state"], worker["version"]) for worker in facts["workers"]} == {("ended", 0)}


def test_a_heartbeat_needs_a_name_that_is_one(tmp_path: Path) -> None:
    for name in ("a/b", "\x1b[2J"):
        assert pulse("follow", tmp_path / "run", tmp_path / "f", "--heartbeat", name).refused(2, "name of a worker")
    both = pulse("follow", tmp_path / "run", tmp_path / "f", "--heartbeat", "a", "--no-heartbeat")
    assert both.refused(2, "contradicts")
