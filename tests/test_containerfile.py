"""The Containerfile says what the package, its extras and its commands are today. It is read here, and not built."""

import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

import pytest

import pulsesync
from pulsesync.server import make_app
from pulsesync.store import MemoryStore
from tests.commands import pulse

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "Containerfile").read_text()
TARGETS = ["relay", "worker", "trainer"]
INSTRUCTIONS = {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER", "WORKDIR"}


@dataclass
class Stage:
    """One FROM of the file, with what follows it."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)  # instruction and arguments

    def all(self, instruction: str) -> list[str]:
        return [arguments for name, arguments in self.steps if name == instruction]

    def words(self, instruction: str) -> list[str]:
        """The list that is the last of these instructions."""
        found: list[str] = json.loads(self.all(instruction)[-1])
        return found


def read_stages() -> dict[str, Stage]:
    text = re.sub(r"^#.*\n", "", LINES, flags=re.MULTILINE)
    steps = [line.split(maxsplit=1) for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    stages: dict[str, Stage] = {}
    for name, arguments in steps:
        assert name in INSTRUCTIONS
        if name == "FROM":
            base, word, stage = arguments.split()
            assert word == "AS"
            stages[stage] = current = Stage(base)
        elif stages:
            current.steps.append((name, arguments))
    return stages


STAGES = read_stages()


def test_the_targets_exist_and_every_stage_is_made_from_one_before_it() -> None:
    assert set(TARGETS) <= set(STAGES)
    before: set[str] = {"${BASE}"}
    for name, stage in STAGES.items():
        copied = [found for copy in stage.all("COPY") for found in re.findall(r"--from=(\S+)", copy)]
        assert {stage.base, *copied} <= before, name
        before.add(name)


def test_the_extras_that_are_installed_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    chosen = dict(re.findall(r"^ARG (\w+_EXTRAS)=(\S+)$", LINES, re.MULTILINE))
    asked = re.findall(r"/source\[([^\]]+)\]", LINES)
    named = [extra for group in asked for extra in chosen.get(group.strip("${}"), group).split(",")]
    assert len(asked) == 3
    assert set(named) <= set(extras)


def test_what_is_copied_into_an_image_is_what_the_package_is_built_from() -> None:
    rules = [line for line in (ROOT / ".containerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = [rule[1:] for rule in rules if rule.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = project["tool"]["hatch"]
    needed = ["pyproject.toml", "README.md", *project["project"]["license-files"], hatch["version"]["path"]]
    needed += [hatch["metadata"]["hooks"]["custom"]["path"], *hatch["build"]["targets"]["wheel"]["packages"]]
    for name in [*needed, *re.findall(r"--constraint /source/(\S+)", LINES)]:
        assert any(name == one or name.startswith(f"{one}/") for one in kept), name
    assert not any(fnmatch(".git/config", one) or fnmatch(".venv/bin/python", one) for one in kept)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_a_user_that_may_not_change_the_package(target: str) -> None:
    names = [name for name, _ in STAGES[target].steps]
    assert STAGES[target].all("USER") == ["pulse"]
    assert names.index("COPY") < names.index("USER") < max(names.index(n) for n in names if n in ("CMD", "ENTRYPOINT"))
    assert "useradd --create-home --uid 1000 pulse" in " ".join(STAGES["python"].all("RUN"))


@pytest.mark.parametrize("target", ["worker", "trainer"])
def test_kernels_are_compiled_when_the_image_is_built_where_the_user_finds_them(target: str) -> None:
    (step,) = STAGES[target].all("RUN")
    program = shlex.split(step)[-1]
    assert program == "import pulsesync; pulsesync.warm_up()"
    assert callable(pulsesync.warm_up)
    folders = dict(word.split("=", 1) for word in STAGES["python"].all("ENV")[0].split())
    made = re.findall(r"--group=pulse (.*)$", STAGES["python"].all("RUN")[0])[0].split()
    for name in ("NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert any(Path(folders[name]).is_relative_to(folder) for folder in made)


@pytest.mark.parametrize(
    ("target", "arguments", "saying"),
    [
        ("relay", ["s3://user:secret@bucket/run"], "user"),  # as far as opening the location
        ("worker", ["nowhere-that-exists", "/weights", "--once"], "no run"),
        ("relay", ["--cash"], "cash"),
    ],
)
def test_the_commands_of_an_image_are_those_of_the_command_line(
    target: str, arguments: list[str], saying: str, tmp_path: Path
) -> None:
    program, *options = STAGES[target].words("ENTRYPOINT")
    assert program == "pulse"
    options = [str(tmp_path / "cache") if option.startswith("/var/") else option for option in options]
    arguments = [str(tmp_path / "weights") if one == "/weights" else one for one in arguments]
    done = pulse(*options, *arguments)
    assert done.code != 0
    assert saying in done.err, done


@pytest.mark.parametrize("target", ["relay", "worker"])
def test_an_image_that_is_run_without_arguments_says_how_to_use_it(target: str) -> None:
    done = pulse(*STAGES[target].words("ENTRYPOINT")[1:], *STAGES[target].words("CMD"))
    assert done.code == 0
    assert f"Usage: pulse {target.replace('worker', 'follow')}" in done.out


def test_the_check_of_a_relay_asks_an_address_that_a_relay_answers() -> None:
    check = STAGES["relay"].all("HEALTHCHECK")[-1]
    program = json.loads(check[check.index("[") :])[-1]
    compile(program, "Containerfile", "exec")
    port, path = re.findall(r"127\.0\.0\.1:(\d+)(/\w+)'", program)[0]
    assert STAGES["relay"].all("EXPOSE") == [port]
    assert f"[default: {port}]" in re.sub(r"[│\s]+", " ", pulse("relay", "--help").out)
    assert path in [getattr(route, "path", None) for route in make_app(MemoryStore()).routes]
