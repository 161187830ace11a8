"""How kernels are compiled: from an empty cache, in a process of its own, because that happens once in a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
if sys.argv[1:]:
    logging.getLogger("numba").setLevel(sys.argv[1])
import numpy as np
from pulsesync.kernels import cpu
cpu._scatter(np.zeros(4, np.uint16), np.arange(2), np.ones(2, np.uint16))
logging.getLogger("another").debug("heard")
"""


def compiled(cache: Path, *level: str) -> list[str]:
    """The log of a process that compiles one small kernel; it takes one to two seconds, most of it numba's."""
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILE, *level]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert any(cache.rglob("*.nbc")), "nothing was compiled"
    return done.stderr.splitlines()


@pytest.mark.timeout(150)
def test_with_debug_logging_numba_stays_quiet_and_others_are_heard(tmp_path: Path) -> None:
    log = compiled(tmp_path)
    assert log[-1] == "DEBUG:another:heard"
    assert [line for line in log if "numba" in line] == []


@pytest.mark.timeout(150)
def test_a_level_that_was_given_to_numba_is_left_alone(tmp_path: Path) -> None:
    assert len([line for line in compiled(tmp_path, "DEBUG") if line.startswith("DEBUG:numba")]) > 100
