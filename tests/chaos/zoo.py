"""Processes by name: started, killed, started again, and watched by a witness outside of them."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos import roles
from tests.chaos.witness import Witness
from tests.processes import Fleet, Program, told

LONGEST_S = 240  # of a process, whatever becomes of the trial


class Zoo:
    """The processes of one trial. Every one of them is gone when the `with` block ends."""

    def __init__(self, fleet: Fleet, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.fleet, self.folder = fleet, folder
        (folder / "tmp").mkdir(parents=True, exist_ok=True)  # of their own: what they leave behind there can be counted
        self.witness = Witness(Path(tempfile.mkdtemp(dir=folder)) / "witness")
        self.environment = {**(environment or {}), **self.witness.environment, "TMPDIR": str(folder / "tmp")}
        self.orders: dict[str, dict[str, Any]] = {}
        self.started: list[Program] = []
        self.processes: dict[str, Program] = {}  # the last one of each name
        self.kills = 0

    def __enter__(self) -> "Zoo":
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.started:
            one.kill()
        self.witness.close()

    @property
    def pids(self) -> dict[str, int]:
        return {name: one.pid for name, one in self.processes.items()}

    @property
    def killed(self) -> set[int]:
        """The ids of all processes that a signal has ended."""
        return {one.pid for one in self.started if (one.code or 0) < 0}

    def start(self, name: str, **order: Any) -> None:
        self.orders[name] = {**order, "name": name}
        self.again(name)

    def again(self, name: str, **changed: Any) -> None:
        """Start a process once more, as it was ordered before, but for what has changed."""
        self.orders[name].update(changed)
        self.processes[name] = self.fleet.start_program(
            roles.play, environment=self.environment, longest_s=LONGEST_S, **self.orders[name]
        )
        self.started.append(self.processes[name])

    def alive(self, name: str) -> bool:
        return self.processes[name].code is None

    def kill(self, name: str) -> None:
        if self.alive(name):
            self.processes[name].kill()
            self.kills += 1

    def join(self, *names: str, timeout_s: float) -> None:
        """Wait until these processes have ended by themselves. Raises: AssertionError."""
        self.wait_until(lambda: not any(self.alive(name) for name in names), timeout_s, f"{', '.join(names)} to end")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.errors()}"
            time.sleep(0.01)

    def exit_code(self, name: str) -> int:
        return self.processes[name].wait(10)

    def errors(self) -> str:
        """The last words of every process."""
        return "\n".join(f"{one.out.name}, {one.pid}:\n{words}" for one in self.started if (words := told(one.out)))
