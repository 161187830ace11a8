"""The command as people run it, on real folders. Inspect, and what all commands have in common."""

import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from cyclopts import App
from safetensors.numpy import save_file

from pulsesync.cli import COMMANDS, overview, place_of
from tests import commands
from tests.commands import PULSE, start
from tests.runs import publish_steps

pytestmark = pytest.mark.timeout(180)  # on a machine without cached kernels two processes compile them side by side


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    publish_steps(str(path), 4)
    return path


def test_inspect_lists_the_versions_of_a_run(run: Path) -> None:
    """In a process of its own, as people run it."""
    done = subprocess.run([*PULSE, "inspect", run, "--json"], capture_output=True, text=True, timeout=150, check=True)
    assert [row["version"] for row in json.loads(done.stdout)["versions"]] == [0, 1, 2, 3]


def test_inspect_shows_the_tiles_of_a_part(run: Path) -> None:
    part = max((run / "parts").iterdir(), key=lambda path: path.stat().st_size)
    (facts,) = commands.pulse("inspect", part, "--json").events
    assert [tile["codec"] for tile in facts["tiles"]] == ["dense"]  # three small tensors in one bundle
    assert facts["bytes"] == part.stat().st_size


def test_inspect_refuses_a_damaged_part_in_one_line(run: Path) -> None:
    part = min((run / "parts").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    (part.parent / "damaged").write_bytes(data)
    done = commands.pulse("inspect", part.parent / "damaged")
    (part.parent / "damaged").unlink()
    assert done.refused(1, "section")


def test_inspect_shows_the_tiles_of_a_part_that_stands_in_its_record(run: Path) -> None:
    (facts,) = commands.pulse("inspect", run, "--version", 2, "--json").events
    assert [part["stored"] for part in facts["parts"]] == ["in the record"]
    assert sum(tile["bytes"] for tile in facts["tiles"]) < facts["bytes"]
    (text,) = [line for line in commands.pulse("inspect", run, "--version", 2).out.splitlines() if "bundle" in line]
    assert "bundle 0 (layer.0.weight and others)" in text


def test_inspect_shows_a_record_that_is_given_as_a_file(run: Path) -> None:
    (facts,) = commands.pulse("inspect", run / "manifests" / f"{2:016}", "--json").events
    (version,) = commands.pulse("inspect", run, "--version", 2, "--json").events
    assert facts == {name: value for name, value in version.items() if name != "tiles"}
    (anchor,) = commands.pulse("inspect", run / "anchors" / f"{0:016}", "--json").events
    assert (anchor["kind"], [part["stored"] for part in anchor["parts"]]) == ("anchor", ["parts/"])


def test_inspect_refuses_a_damaged_record(run: Path, tmp_path: Path) -> None:
    data = bytearray((run / "manifests" / f"{2:016}").read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    done = commands.pulse("inspect", tmp_path / "damaged")
    assert (done.code, "damaged" in done.err) == (1, True)


def test_inspect_shows_one_version_and_who_signed_it(run: Path) -> None:
    (facts,) = commands.pulse("inspect", run, "--version", 2, "--json").events
    assert (facts["version"], facts["base"], facts["kind"]) == (2, 1, "version")
    assert facts["bytes"] == sum(part["bytes"] for part in facts["parts"])
    assert facts["signed by"] is None
    assert commands.pulse("inspect", run, "--version", 9).refused(3, "version 9")
    for options in ([], ["--version", 1]):
        done = commands.pulse("inspect", run, *options)
        assert done.code == 0
        assert facts["run"] in done.out


def test_inspect_shows_people_when_a_version_was_made_and_machines_the_seconds(run: Path) -> None:
    (facts,) = commands.pulse("inspect", run, "--version", 2, "--json").events
    out = commands.pulse("inspect", run, "--version", 2).out
    (line,) = (line for line in out.splitlines() if line.startswith("created"))
    said = datetime.strptime(line, "created      %Y-%m-%d %H:%M:%S UTC").replace(tzinfo=UTC)
    assert said.timestamp() == facts["created"]
    assert str(facts["created"]) not in out


def test_inspect_says_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        assert commands.pulse("inspect", path).refused(3, str(path))


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["log"],
        ["log", "x", "--limit", "-1"],
        ["follow", "x"],
        ["publish", "x", "y", "--cast", "BF17"],
        ["publish", "x", "y", "--codec", "zip"],
        ["log", "ftp://host/run"],
        ["log", "x", "--trust", "abc"],
        ["log", "x", "--unheard"],
        ["log", "x", "y", "z"],
        ["prune", "x", "--keep-versions", "0"],
        ["delegate", "x", "y"],
        ["squash", "x", "--delegation", "y"],
        ["squash", "x", "--key", "missing"],
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(arguments: list[str]) -> None:
    assert commands.pulse(*arguments).refused(2, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["log", "{run}", "--trust", ""],
        ["verify", "{run}", "--trust", ""],
        ["verify", "{run}", "--trust="],
        ["inspect", "{run}", "--trust", " "],
        ["publish", "x", "{run}", "--key", ""],
        ["squash", "{run}", "--key="],
        ["squash", "{run}", "--cache", ""],
        ["log", ""],
    ],
)
def test_an_option_that_is_given_but_empty_is_exit_code_2(run: Path, arguments: list[str]) -> None:
    done = commands.pulse(*(argument.format(run=run) for argument in arguments))
    named = next((argument.rstrip("=") for argument in arguments if argument.startswith("--")), "RUN")
    assert done.refused(2, f"{named} is empty")


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["status"], "pulse status needs RUN, which was not given; pulse status --help describes it"),
        (["delegate", "run"], "pulse delegate needs PUBLIC, which was not given"),
        (["plan", "--model", "m"], "pulse plan needs --lr, which was not given"),
        (["log", "run", "--limit"], "--limit needs a value; pulse log --help describes it"),
        (["status", "a", "b"], "pulse status does not take 'b'; pulse status --help lists what it takes"),
        (["nope"], 'Unknown command "nope"'),
    ],
)
def test_a_command_line_that_is_not_complete_is_explained(arguments: list[str], saying: str) -> None:
    assert commands.pulse(*arguments).refused(2, saying)


@pytest.mark.parametrize("trust", [",", "{folder}/empty"])
def test_a_trust_option_without_a_key_in_it_is_exit_code_2(run: Path, tmp_path: Path, trust: str) -> None:
    (tmp_path / "empty").touch()
    assert commands.pulse("verify", run, "--trust", trust.format(folder=tmp_path)).refused(2, "64 hexadecimal digits")


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize(
    ("variable", "command"), [("PULSE_TRUST", "verify"), ("PULSE_TRUST", "log"), ("PULSE_KEY", "squash")]
)
def test_a_variable_that_is_set_but_empty_is_exit_code_2(
    run: Path, monkeypatch: pytest.MonkeyPatch, variable: str, command: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert commands.pulse(command, run).refused(2, f"{variable} is set but empty")


def test_an_option_that_is_given_prevails_over_an_empty_variable(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TRUST", "")
    assert commands.pulse("verify", run, "--trust", "ab" * 32).refused(1, "not signed")


@pytest.mark.parametrize("command", ["log", "verify", "squash", "prune", "inspect", "status"])
def test_a_run_that_is_not_there_is_exit_code_3(command: str, tmp_path: Path) -> None:
    assert commands.pulse(command, tmp_path / "run").refused(3, str(tmp_path / "run"))
    assert commands.pulse(command, tmp_path / "run", "--json").refused(3, "")


def test_the_help_tells_the_exit_codes_and_every_command_has_one() -> None:
    done = commands.pulse("--help")
    assert done.code == 0
    assert "Exit codes" in done.out
    for name in (
        "publish",
        "follow",
        "log",
        "inspect",
        "verify",
        "squash",
        "prune",
        "keygen",
        "delegate",
        "relay",
        "status",
    ):
        assert name in done.out
        assert commands.pulse(name, "--help").code == 0


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help", "log"], ["--version", "--help"]])
def test_without_a_command_the_help_is_the_list_of_all_commands(arguments: list[str]) -> None:
    done = commands.pulse(*arguments)
    assert (done.code, done.out.rstrip(), done.err) == (0, overview(), "")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_shows_the_first_sentence_of_every_command(name: str) -> None:
    path, summary = place_of(name), COMMANDS[name]
    module, _, attribute = path.partition(":")
    command = getattr(import_module(module), attribute)
    function = command.default_command if isinstance(command, App) else command
    assert (function.__doc__ or "").split("\n\n")[0] == summary
    assert summary in " ".join(overview().split())


def test_the_list_of_commands_is_shown_without_loading_any_of_them_or_a_parser() -> None:
    program = "import sys; sys.argv = ['pulse', '--help']; from pulsesync import cli; cli.main()"
    shown = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {program}"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, timeout=60, check=True)
    assert "publish" in done.stdout
    loaded = set(done.stderr.split())
    assert not {"numpy", "numba", "torch", "cyclopts", "rich"} & loaded
    assert not {name for name in loaded if name.startswith("pulsesync.cli.")}


def test_whoever_stops_reading_gets_no_traceback(run: Path) -> None:
    with start("log", run) as process:
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) in (0, 141)


def test_an_interrupt_is_exit_code_130_and_no_traceback(run: Path, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    followers = [start("follow", run, tmp_path / f"f{number}", "--json") for number in numbers]
    for number, process in zip(numbers, followers, strict=True):
        assert [json.loads(process.stdout.readline())["event"] for _ in range(3)] == ["waits", "version", "missing"]
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (130, "", ""), number


SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "location",
    [
        f"http://127.0.0.1:1/run?token={SECRET}",
        f"https://me:{SECRET}@127.0.0.1:1/run",
        f"s3://bucket/run?secret_access_key={SECRET}",
        f"s3:/bucket/run?secret_access_key={SECRET}",
        f"az://me:{SECRET}@box/../run",
    ],
)
def test_no_command_prints_what_may_be_a_secret_in_a_location(
    location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    key = tmp_path / "key"
    commands.pulse("keygen", key)
    of_run = ("log", "status", "inspect", "verify", "squash", "prune", "doctor", "relay", "study", "serve")
    lines: list[tuple[object, ...]] = [(command, location) for command in of_run]
    lines += [
        ("status", location, "--json"),
        ("doctor", location, "--json"),
        ("point", location),
        ("point", location, "stable", "3", "--key", key),
        ("delegate", location, "0" * 64, "--key", key),
        ("publish", tmp_path, location),
        ("publish", location, tmp_path / "run"),
        ("follow", location, tmp_path / "weights", "--once"),
        ("follow", tmp_path / "run", location, "--once"),
        ("follow", tmp_path / "run", "--vllm", location, "--once"),
        ("follow", tmp_path / "run", "--sglang", location, "--once"),
        ("export", location, tmp_path / "updates"),
        ("import", tmp_path, location, "--base", tmp_path),
        ("demo", "--store", location, "--replay"),
        ("plan", "--model", location),
    ]
    for line in lines:
        done = commands.pulse(*line)
        assert done.code != 0, line
        assert SECRET not in done.out + done.err, line
    assert SECRET not in repr(sorted(tmp_path.rglob("*")))


@pytest.mark.parametrize("place", ["s3://bucket/out", "s3:/bucket/out", "C:\\out", "https:/host/out"])
def test_no_command_makes_a_folder_of_what_is_no_path(
    place: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in (("follow", run, place, "--once"), ("follow", run, "out", "--once", "--cache", place)):
        assert commands.pulse(*line).refused(2, "path")
    if "://" not in place:
        assert commands.pulse("log", place).refused(2, "path")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_does_not_continue_the_run_needs_resume(tmp_path: Path) -> None:
    for seed, name in enumerate(("first", "other")):
        weights = np.random.default_rng(seed).standard_normal(100).astype(np.float32)
        (tmp_path / name).mkdir()
        save_file({"w": weights}, tmp_path / name / "model.safetensors")
    run = tmp_path / "run"
    assert commands.pulse("publish", tmp_path / "first", run).code == 0
    other = ["publish", tmp_path / "other", run]
    assert commands.pulse(*other, "--step", 0).refused(1, "pulse publish: --resume")
    assert commands.pulse(*other, "--step", 0, "--resume").code == 0
    for step, name in enumerate(("first", "other"), 1):  # as a nightly job does, which gives no step
        (event,) = commands.pulse("publish", tmp_path / name, run, "--json").events
        assert (event["version"], event["step"]) == (step + 1, step)
