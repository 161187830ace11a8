"""The program with JAX of docs/integrations/frameworks.md and examples/jax_flax.py run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import ROOT, Example, python_path

pytest.importorskip("flax", reason="needs JAX, Flax and Optax: make test-jax runs it")

pytestmark = pytest.mark.timeout(240)  # on a machine without cached kernels each process compiles them
PAGE = (ROOT / "docs" / "integrations" / "frameworks.md").read_text()
MARK = "<!-- run by tests/integrations/jax/test_page.py -->"
PROGRAMS = re.findall(MARK + r"\n```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


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
    assert done.stdout.splitlines()[-1] == "the worker is at step 4, version 4"


def test_the_example_ends_with_the_same_bits_in_both_processes(tmp_path: Path) -> None:
    """About 15 s: two processes that import Flax."""
    with Example("jax_flax.py", tmp_path) as example:
        lines = example.lines(200)
    assert lines[-1] == "version 10: the worker has the trainer's weights, bit for bit"


def test_the_versions_that_the_page_names_are_those_that_are_tested() -> None:
    pins = (ROOT / "constraints/jax.txt").read_text()
    for name in ("jax", "flax", "optax"):
        version = re.search(rf"^{name}==(.+)$", pins, re.MULTILINE)
        assert version, name
        assert f"{name} {version[1]}" in PAGE
