"""The program with Keras of docs/integrations/frameworks.md runs as it stands; the page names the tested versions."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import ROOT, python_path

pytest.importorskip("keras", reason="needs Keras 3: make test-jax runs it")
pytestmark = pytest.mark.timeout(240)  # on a machine without cached kernels each process compiles them
PAGE = (ROOT / "docs" / "integrations" / "frameworks.md").read_text()
MARK = "<!-- run by tests/integrations/keras/test_page.py -->"
PROGRAMS = re.findall(MARK + r"\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(os.environ.get("KERAS_BACKEND") != "tensorflow", reason="runs once, on TensorFlow")
def test_the_program_of_the_page_runs_and_ends_well(tmp_path: Path) -> None:
    (program,) = PROGRAMS
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "the worker is at step 20; the same weights: True"


def test_the_versions_that_the_page_names_are_those_that_are_tested() -> None:
    pins = "".join((ROOT / name).read_text() for name in ("constraints/dev.txt", "constraints/jax.txt"))
    for name in ("keras", "tensorflow", "jax", "torch"):
        version = re.search(rf"^{name}==(.+)$", pins, re.MULTILINE)
        assert version, name
        assert f"{name} {version[1]}" in PAGE
