"""What is published: the wheel and the sdist, and the wheel in an environment that has only what it declares."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pulsesync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # in a new environment the kernels are compiled again

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, to: Path, *targets: str) -> None:
    chosen = [word for target in targets for word in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", *chosen, "-d", to, cwd=source)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this tree."""
    folder = tmp_path_factory.mktemp("dist")
    build(ROOT, folder, "sdist", "wheel")
    return folder


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, int]:
    """The files of a wheel with their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(built: Path) -> None:
    source = ROOT / "src" / "pulsesync"
    wanted = {f"pulsesync/{file.relative_to(source)}" for file in source.rglob("*") if file.is_file()}
    wanted = {name for name in wanted if "__pycache__" not in name}
    found = {name for name in contents(wheel_in(built)) if ".dist-info/" not in name}
    assert found == wanted
    assert {
        "pulsesync/py.typed",
        "pulsesync/lab/demo/policy.safetensors",
        "pulsesync/lab/demo/data/grpo-slice.npz",
    } <= found


def test_the_wheel_built_from_the_sdist_is_the_wheel_built_from_the_tree(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    build(source, tmp_path / "again", "wheel")
    assert contents(wheel_in(tmp_path / "again")) == contents(wheel_in(built))


# -- in an empty environment -----------------------------------------------------------------------------------------


def declared(wheel: Path) -> set[str]:
    """The distributions that a plain install of the wheel brings along: its dependencies, theirs, and so on."""
    name = wheel.name.removesuffix(".whl").rsplit("-", 3)[0]
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"{name}.dist-info/METADATA").decode()
    asked = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    found: set[str] = set()
    while asked:
        requirement = Requirement(asked.pop())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert not requirement.extras, f"{requirement}: this walk does not follow the extras of a dependency"
            if requirement.name not in found:
                found.add(requirement.name)
                asked += distribution(requirement.name).requires or ()
    return found


def link(name: str, into: Path) -> None:
    """Show a distribution of this environment to another one, without its scripts."""
    source = distribution(name)
    assert source.files is not None
    for top in {file.parts[0] for file in source.files} - {"..", "__pycache__"}:
        (into / top).symlink_to(Path(str(source.locate_file(top))))


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of a new environment: the wheel is installed, its declared dependencies are linked."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(environment, symlinks=True, with_pip=False)
    commands = environment / "bin"
    wheel = wheel_in(built)
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", commands / "python", "install", *options, wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    for name in declared(wheel):
        link(name, packages)
    return commands


def test_an_empty_environment_uses_the_installed_wheel_and_no_more_than_it_declares(
    installed: Path, tmp_path: Path
) -> None:
    program = "import pulsesync; from importlib.util import find_spec; print(pulsesync.__file__, find_spec('pytest'))"
    file, foreign = run(installed / "python", "-c", program, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert foreign == "None"


def test_the_installed_command_says_the_version_of_the_source(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "pulse", "--version", cwd=tmp_path).strip() == pulsesync.__version__
    program = "from importlib.metadata import version; print(version('pulsesync'))"
    assert run(installed / "python", "-c", program, cwd=tmp_path).strip() == pulsesync.__version__


def test_the_demo_replays_the_recorded_steps_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    out = run(installed / "pulse", "demo", "--replay", "--steps", "4", "--workers", "1", "--out", "run", cwd=tmp_path)
    assert len([line for line in out.splitlines() if line.startswith("step ")]) == 4
    assert "all workers recounted at the end" in out
