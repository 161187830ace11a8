"""What the operator of an engine allows to its clients: runs, keys, and nothing beyond them by another spelling."""

import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher
from pulsesync.errors import NotFoundError
from pulsesync.integrations.engine.follower import EngineFollower, EngineLimits, RunOptions
from pulsesync.store import ObjectStore, open_store
from tests.s3 import Server, s3_server
from tests.serving import running

__all__ = ["s3_server"]

# Below what is allowed: ways to `outside`, of which each has resolved there with some store.
ESCAPES = [
    "../outside",
    "%2e%2e/outside",
    ".%2E/outside",
    ".\t./outside",
    ".\n./outside",
    "..%2foutside",
    "x%2f..%2f../outside",
    "x%2f..%2f..%2foutside",
    "..\\outside",
    "x/../../outside",
    "%252e%252e/outside",
    "..;/outside",
    "\uff0e\uff0e/outside",
    ".. /outside",
]


class NoEngine:
    """An engine that is never reached, because a request for a version ends before it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


def find(location: str, *runs: str) -> dict[str, Any]:
    """What a request for the newest version at a location is answered by an engine that allows some runs."""
    os.environ["PULSE_TEST_RUNS"] = ",".join(runs)
    try:
        follower = EngineFollower(NoEngine(), EngineLimits.read("PULSE_TEST"))  # type: ignore[arg-type]
    finally:
        del os.environ["PULSE_TEST_RUNS"]
    return follower.call({"do": "find", "options": {"location": location}})


def publish(location: Any) -> None:
    with Publisher(location) as publisher:
        publisher.publish({"w": np.zeros(8, np.float32)}, step=0)


def check(base: str) -> None:
    """Check that an engine which may follow BASE/allowed does so, and does not follow BASE/outside."""
    assert find(f"{base}/allowed/run", f"{base}/allowed") == {"version": 0}
    assert find(f"{base}/allowed/run/", f"{base}/allowed/") == {"version": 0}
    assert find(f"{base}/outside", f"{base}/outside") == {"version": 0}
    for escape in ("../outside", *ESCAPES):
        answer = find(f"{base}/allowed/{escape}", f"{base}/allowed")
        assert answer["error"]["type"] in ("ValueError", "NothingPublishedError"), (escape, answer)
    for other in (f"{base}/outside", f"{base}/allowedx", base):
        answer = find(other, f"{base}/allowed")
        assert "PULSE_TEST_RUNS does not name it" in answer["error"]["message"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs: one below `allowed`, one next to it."""
    folder = tmp_path_factory.mktemp("runs")
    for run in ("allowed/run", "outside"):
        publish(folder / run)
    return folder


def test_no_spelling_of_a_path_leaves_the_folders_that_are_allowed(folder: Path) -> None:
    check(str(folder))
    check(f"file://{folder}")


def test_no_spelling_of_an_s3_url_leaves_the_prefixes_that_are_allowed(
    s3_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    base = s3_server.fresh_url()
    for run in ("allowed/run", "outside"):
        publish(open_store(f"{base}/{run}"))
    assert ObjectStore(f"{base}/outside").size("head") > 0
    check(base)


class Files(SimpleHTTPRequestHandler):
    """A web server that decodes and resolves what it is asked for, as many do."""

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module", params=["pulse serve", "http.server"])
def address(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The folder with the two runs, served by `pulse serve` in a process of its own, or by a plain server of files."""
    if request.param == "http.server":
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=folder)) as server:
            threading.Thread(target=server.serve_forever).start()
            yield f"http://127.0.0.1:{server.server_port}"
            server.shutdown()
        return
    with running("serve", folder) as server:
        yield server.url


def test_no_spelling_of_an_address_leaves_the_paths_that_are_allowed(address: str) -> None:
    check(address)
    assert find(f"HTTP{address.removeprefix('http')}/allowed/run", f"{address}/allowed") == {"version": 0}


def options(location: object) -> RunOptions:
    return RunOptions.parse({"location": str(location)})


def test_a_link_leads_out_of_the_folders_neither_before_nor_after_the_check(tmp_path: Path) -> None:
    for name in ("allowed/run", "outside"):
        publish(tmp_path / name)
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    (allowed / "link").symlink_to(outside)
    (allowed / "inner").symlink_to(allowed / "run")
    for spelled in (f"{allowed}/link", f"file://{allowed}/link"):
        assert "does not name it" in find(spelled, str(allowed))["error"]["message"]
    assert find(f"{allowed}/inner", str(allowed)) == {"version": 0}

    limits = EngineLimits(runs=(options(allowed).location,))
    store = limits.open(options(allowed / "run"))
    assert store.get("head")
    (allowed / "run").rename(tmp_path / "real")
    (allowed / "run").symlink_to(outside)  # after the check
    with pytest.raises(NotFoundError):
        store.get("head")
    assert list(store.list("manifests/")) == []
    (allowed / "run").unlink()
    (tmp_path / "real").rename(allowed / "run")
    assert store.get("head")
    (allowed / "run/head").unlink()
    (allowed / "run/head").symlink_to(outside / "head")
    with pytest.raises(NotFoundError):
        store.get("head")


def test_a_folder_that_is_swapped_between_check_and_open_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed, outside = tmp_path / "allowed", tmp_path / "outside"
    for folder, content in ((allowed / "run", b"inside"), (outside, b"outside")):
        (folder / "parts").mkdir(parents=True)
        (folder / "head").write_bytes(content)
        (folder / "parts" / content.decode()).touch()
    store = EngineLimits(runs=(options(allowed).location,)).open(options(allowed / "run"))
    realpath = os.path.realpath

    def swap(path: Any, **given: Any) -> str:
        real = realpath(path, **given)
        if str(real).startswith(str(allowed / "run")):  # was checked; now it is replaced
            (allowed / "run").rename(allowed / "away")
            (allowed / "run").symlink_to(outside)
        return str(real)

    for read in (lambda: store.get("head"), lambda: list(store.list("parts/"))):
        with monkeypatch.context() as patched:
            patched.setattr(os.path, "realpath", swap)
            try:
                found = read()
            except NotFoundError:
                found = []
        assert found == []
        (allowed / "run").unlink()
        (allowed / "away").rename(allowed / "run")
    assert store.get("head") == b"inside"
    assert [entry.key for entry in store.list("parts/")] == ["parts/inside"]


@pytest.mark.parametrize("name", ["RUNS", "TRUST", "CACHE"])
@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_limits_that_are_set_but_empty_are_an_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineLimits.read("PULSE_TEST") == EngineLimits(variable="PULSE_TEST_RUNS")
    monkeypatch.setenv(f"PULSE_TEST_{name}", value)
    if (name, value.strip()) == ("CACHE", ","):
        return  # the name of a folder
    with pytest.raises(ValueError, match=f"PULSE_TEST_{name} .*give it a value"):
        EngineLimits.read("PULSE_TEST")


def test_limits_that_name_no_location_say_which_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TEST_RUNS", "s3://bucket/run, s3:/bucket/other")
    with pytest.raises(ValueError, match=r"PULSE_TEST_RUNS: s3:/bucket/other .* write s3://bucket"):
        EngineLimits.read("PULSE_TEST")


def test_an_engine_that_may_follow_no_run_follows_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may not follow"):
        EngineLimits(runs=()).open(options(tmp_path))


@pytest.mark.parametrize(
    "location", ["https://me:s3cret@host/run", "s3://bucket/run?secret_access_key=s3cret", ["s3cret"]]
)
def test_an_answer_shows_no_secret_of_a_location(location: Any) -> None:
    answer = find(location, "s3://bucket")
    assert answer["error"]["type"] == "ValueError"
    assert "s3cret" not in repr(answer)


def test_a_vllm_server_whose_limits_are_empty_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from pulsesync.integrations.vllm import Routes

    monkeypatch.setenv("PULSE_VLLM_RUNS", ",")
    with pytest.raises(ValueError, match="PULSE_VLLM_RUNS must be"):
        Routes(app=None)
