"""The wheel and the sdist for tests: built from this tree, and commands run as a user would, without this checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

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
