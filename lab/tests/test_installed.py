"""The lab's wheel together with that of pulsesync, in an environment of their own: no checkout, no extras, no tools.

`make dist-test` installs both with pip, as a user does: PULSE_INSTALLED_LAB is the folder of commands then.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

import pulsesync
import pulsesync_lab
from tests.distributions import CLEAN, ROOT, new_environment, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment with both distributions."""
    if given := os.environ.get("PULSE_INSTALLED_LAB"):
        return Path(given)
    return new_environment(tmp_path_factory.mktemp("installed"), ROOT, ROOT / "lab")


def test_both_distributions_have_one_version_and_the_lab_asks_for_exactly_that() -> None:
    assert pulsesync_lab.__version__ == pulsesync.__version__
    assert f'"pulsesync=={pulsesync.__version__}"' in (ROOT / "lab" / "pyproject.toml").read_text()


def test_the_demo_replays_the_recorded_steps_in_an_empty_environment(installed: Path, tmp_path: Path) -> None:
    out = run(installed / "pulse", "demo", "--replay", "--steps", "4", "--workers", "1", "--out", "run", cwd=tmp_path)
    assert len([line for line in out.splitlines() if line.startswith("step ")]) == 4
    assert "all workers recounted at the end" in out


def test_what_needs_torch_names_the_extra(installed: Path, tmp_path: Path) -> None:
    for command in ("demo", "study experiment list"):
        program: list[str | Path] = [installed / "pulse", *command.split()]
        done = subprocess.run(program, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "pip install 'pulsesync[torch]'" in done.stderr, command


def test_another_version_of_the_lab_is_named_and_not_run(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "pulsesync_lab").mkdir()
    (tmp_path / "pulsesync_lab" / "__init__.py").write_text('__version__ = "0.0.9"')
    program: list[str | Path] = [installed / "python", "-c", "from pulsesync.cli import main; main()", "plan"]
    done = subprocess.run(program, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"pulsesync-lab \S+, of which 0\.0\.9 is installed: pip install pulsesync-lab==", done.stderr)
