"""The launcher of a run: starts its processes, restarts those that die, and yields every step."""

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pulsesync.errors import PulseError
from pulsesync.store import open_store
from pulsesync_lab.demo.settings import DemoSettings

POLL_S = 0.05
MOST_RESTARTS = 5  # of one process without a step between them: more is not a coincidence
PORTS = 12_000, 29_000  # that trainers listen on
WRONG = 3  # the exit code of a process that found an error


class DemoRun:
    """The processes of a run. Use it as a context: they are stopped when it ends.

    with Run(folder, settings) as run:
        for line in run.lines():
            ...
    """

    entry = "pulsesync_lab.demo.process"  # the module that each process runs

    def __init__(self, folder: Path, settings: DemoSettings) -> None:
        if settings.steps % settings.span:
            raise ValueError(f"steps must be a multiple of the {settings.span} steps in a round; got {settings.steps}")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.settings = replace(
            settings,
            store=settings.store or str(folder / "store"),
            port=settings.port or _free_ports(settings.trainers),
            secret=settings.secret or secrets.token_hex(16),
        )
        if settings.trainers > 1 and not (folder / "settings.json").exists():
            _refuse_strangers(self.settings.meeting(folder))
        self.settings.save(folder)
        self.trainers = ["trainer", *(f"trainer-{number}" for number in range(1, settings.trainers))]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.restarts: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._finished: set[str] = set()

    def __enter__(self) -> "DemoRun":
        try:
            for name in (*self.trainers, *map(str, range(self.settings.workers))):
                self._start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what the trainer logs of each step, or of each round of several trainers, until all have finished.

        A step that a restarted trainer repeats is yielded again.

        Raises:
            PulseError: a process found an error, or dies repeatedly.
        """
        path, at = self.folder / "steps.jsonl", 0
        while True:
            ended = self._look_after()
            if path.exists():
                with path.open("rb") as file:
                    file.seek(at)
                    for line in file:
                        if line.endswith(b"\n"):
                            at += len(line)
                            with suppress(ValueError):  # a line that a kill cut off
                                yield json.loads(line)
                                self._in_a_row.clear()
            if ended:
                return
            time.sleep(POLL_S)

    def _look_after(self) -> bool:
        """Restart processes that have died; return whether all are done."""
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None or name in self._finished:
                continue
            if code == 0:
                self._finished.add(name)
            elif code == WRONG or self._in_a_row[name] >= MOST_RESTARTS:
                raise PulseError(f"{_title(name)} failed and stopped the run: {self.last_words(name)}")
            elif name not in self.trainers and self._finished.issuperset(self.trainers):
                self._finished.add(name)  # the run is over, and the worker had no trainer to connect to
            else:
                self.restarts[name] += 1
                self._in_a_row[name] += 1
                self._start(name)
        return len(self._finished) == len(self.processes)

    def _start(self, name: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", self.entry, str(self.folder), name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"


def _title(name: str) -> str:
    return name if name.startswith("trainer") else f"worker {name}"


def _refuse_strangers(meeting: str) -> None:
    """Refuse a location with another run: a new run would continue its rounds."""
    if any(True for _ in open_store(meeting).list("rounds/")):
        raise PulseError(f"{meeting} already has the rounds of another run; give several trainers a new store")


def _free_ports(count: int) -> int:
    """The first of this number of consecutive free ports; all below the ephemeral ports.

    An ephemeral port might be given to another process, or to a worker that connects, while a trainer restarts.
    """
    while True:
        first = random.SystemRandom().randrange(*PORTS)
        with ExitStack() as probes, suppress(OSError):  # one is taken
            for number in range(count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", first + number))
            return first
