"""An interrupt in the middle of publishes and syncs reaches the program as it is; `interrupts.py` has the trial."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos import interrupts
from tests.examples import python_path

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_no_interrupt_becomes_an_error_that_programs_catch() -> None:
    command = [sys.executable, "-m", "tests.chaos.interrupts", "100"]
    env = {"PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found.pop(interrupts.LOST, 0) <= 2, "more than Python loses by accident"
    assert found == {"KeyboardInterrupt": 50, "SystemExit 143": 50}
