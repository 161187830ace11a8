"""The wheel and the sdist for tests: built from this tree, and commands run as a user would, without this checkout."""

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The standard output of a command that must succeed."""
    done = subprocess.run([*map(str, command)], cwd=cwd, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, to: Path, *targets: str) -> None:
    chosen = [word for target in targets for word in ("-t", target)]
    run(sys.executable, "-m", "hatchling", "build", *chosen, "-d", to, cwd=source)


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("*.whl")
    return wheel


def sdist_in(folder: Path) -> Path:
    (sdist,) = folder.glob("*.tar.gz")
    return sdist


def metadata_of(wheel: Path) -> bytes:
    name = wheel.name.removesuffix(".whl").rsplit("-", 3)[0]
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{name}.dist-info/METADATA")


def pins(file: Path) -> dict[str, str]:
    """The versions in a file of constraints, by normalised name."""
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    named = [line.partition("==") for line in lines if line]
    return {name.lower().replace("_", "-"): version for name, _, version in named}


def new_environment(folder: Path, *sources: Path, only: Iterable[str] | None = None) -> Path:
    """Make an environment with the wheels of sources and what they declare; return its folder of commands.

    Dependencies are linked from this environment, which needs no network. With `only`, they are these.
    """
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    commands = folder / "venv" / "bin"
    for number, source in enumerate(sources):
        build(source, folder / f"dist{number}", "wheel")
    wheels = [wheel_in(folder / f"dist{number}") for number in range(len(sources))]
    options = ["--no-index", "--no-deps", "--no-compile", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", commands / "python", "install", *options, *wheels)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    ours = {wheel.name.split("-")[0].replace("_", "-") for wheel in wheels}
    for name in _declared(wheels) - ours if only is None else only:
        _link(name, packages)
    return commands


def _declared(wheels: list[Path]) -> set[str]:
    """The distributions that a plain install of wheels brings along: their dependencies, theirs, and so on."""
    asked = [need for wheel in wheels for need in Metadata.from_email(metadata_of(wheel)).requires_dist or ()]
    found: set[str] = set()
    while asked:
        requirement = asked.pop()
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert not requirement.extras, f"{requirement}: this walk does not follow the extras of a dependency"
            if requirement.name not in found:
                found.add(requirement.name)
                asked += map(Requirement, distribution(requirement.name).requires or ())
    return found


def _link(name: str, into: Path) -> None:
    """Show a distribution of this environment to another one, without its scripts."""
    source = distribution(name)
    assert source.files is not None
    for top in {file.parts[0] for file in source.files} - {"..", "__pycache__"}:
        (into / top).symlink_to(Path(str(source.locate_file(top))))
