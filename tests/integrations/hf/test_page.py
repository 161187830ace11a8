"""The programs of docs/integrations/huggingface.md and examples/hf_trainer.py run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REASON = "needs the packages of Hugging Face: make test-trl runs it"
pytest.importorskip("transformers", reason=REASON)

from tests.examples import ROOT, Example, python_path  # noqa: E402

pytestmark = pytest.mark.timeout(240)
PAGE = (ROOT / "docs" / "integrations" / "huggingface.md").read_text()
PROGRAMS = re.findall(
    r"<!-- run by tests/integrations/hf/test_page.py -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.M
)
ENDS = ["step 5: the worker has the trainer's weights, bit for bit: True", "published up to step 3"]


@pytest.mark.parametrize(("program", "end"), [*zip(PROGRAMS, ENDS, strict=True)])
def test_a_program_of_the_page_runs_and_ends_well(program: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == end


def test_the_example_runs_and_ends_with_the_line_that_it_promises(tmp_path: Path) -> None:
    with Example("hf_trainer.py", tmp_path) as example:
        lines = example.lines(200)
    assert lines[-1] == "version 10: the folder loads with the trainer's weights, bit for bit"


def test_the_versions_that_the_page_names_are_those_that_are_tested() -> None:
    pins = (ROOT / "constraints/hf.txt").read_text()
    for name in ("transformers", "accelerate", "peft", "trl"):
        version = re.search(rf"^{name}==(.+)$", pins, re.MULTILINE)
        assert version, name
        assert f"{name} {version[1]}" in PAGE
