"""Runs of the demo whose processes are forked from one that has torch loaded, so that each starts at once.

`lab/tests/cli/test_demo.py` starts them as the command does.
"""

import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

from pulsesync_lab.demo.run import DemoRun
from pulsesync_lab.demo.settings import DemoSettings
from tests.processes import Fleet, alive

LONGEST_S = 220  # of a process, whatever becomes of the test


def run_process(folder: str, name: str, program: str) -> int:
    """What `python -m PROGRAM FOLDER NAME` does; returns its exit code."""
    signal.alarm(LONGEST_S)
    log = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [program, folder, name]
    code: int = importlib.import_module(program).main()
    return code


class ForkedProcess:
    """The part of Popen that DemoRun uses, for a process of a fleet."""

    def __init__(self, pid: int, result: Path) -> None:
        self.pid, self.result = pid, result

    def poll(self) -> int | None:
        """The exit code, None while it runs. A process that left no result was killed."""
        if alive(self.pid):
            return None
        return int(pickle.loads(self.result.read_bytes())) if self.result.exists() else -signal.SIGKILL

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def kill(self) -> None:
        if alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        while alive(self.pid):
            time.sleep(0.005)


class ForkedRun(DemoRun):
    program = "pulsesync_lab.demo.process"

    def __init__(self, fleet: Fleet, folder: Path, settings: DemoSettings) -> None:
        super().__init__(folder, settings)
        self.fleet = fleet

    def _start(self, name: str) -> None:
        started = self.fleet.start(run_process, folder=str(self.folder), name=name, program=self.program)
        forked = ForkedProcess(*started)
        self.processes[name] = cast("subprocess.Popen[bytes]", forked)


class ForkedReplay(ForkedRun):
    program = "pulsesync_lab.demo.replay"
