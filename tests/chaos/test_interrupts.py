"""An interrupt in the middle of publishes and syncs reaches the program as it is; `interrupts.py` has the trial."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import python_path

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_no_interrupt_becomes_an_error_that_programs_catch() -> None:
    command = [sys.executable, "-m", "tests.chaos.interrupts", "100"]
    env = {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {"KeyboardInterrupt": 50, "SystemExit 143": 50}
