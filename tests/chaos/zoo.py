"""Processes by name: started by the zygote, killed, started again, and watched by a witness outside of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.witness import Witness

ROOT = Path(__file__).parents[2]


class Zoo:
    """The processes of one trial. Every one of them is gone when the `with` block ends."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.witness = Witness()
        self.orders: dict[str, dict[str, Any]] = {}
        self.pids: dict[str, int] = {}
        self.kills = 0
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            pass_fds=[self.witness.writes],
            env={
                **os.environ,
                **(environment or {}),
                **self.witness.environment,
                "PYTHONPATH": path,
                "TMPDIR": str(self._temporary()),
            },
        )
        assert self._zygote.stdout is not None
        assert self._zygote.stdout.readline() == "ready\n", "the zygote did not start"

    def __enter__(self) -> "Zoo":
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._zygote.pid, signal.SIGKILL)
        self._zygote.communicate()
        self.witness.close()

    def start(self, name: str, **order: Any) -> None:
        self.orders[name] = {**order, "name": name, "errors": str(self.folder / f"{name}.err")}
        self.again(name)

    def again(self, name: str, **changed: Any) -> None:
        """Start a process once more, as it was ordered before, but for what has changed."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self.orders[name].update(changed)
        self._zygote.stdin.write(json.dumps(self.orders[name]) + "\n")
        self._zygote.stdin.flush()
        self.pids[name] = int(self._zygote.stdout.readline())

    def alive(self, name: str) -> bool:
        try:
            os.kill(self.pids[name], 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self, name: str) -> None:
        if self.alive(name):
            os.kill(self.pids[name], signal.SIGKILL)
            self.kills += 1
            while self.alive(name):
                time.sleep(0.001)

    def join(self, *names: str, timeout_s: float) -> None:
        """Wait until these processes have ended by themselves. Raises: AssertionError."""
        self.wait_until(lambda: not any(self.alive(name) for name in names), timeout_s, f"{', '.join(names)} to end")

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.errors()}"
            time.sleep(0.01)

    def exit_code(self, name: str) -> int:
        code: int = self.witness.wait_for("ended", 10, child=self.pids[name])["code"]
        return code

    def errors(self) -> str:
        """The last words of every process."""
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.err")))

    def _temporary(self) -> Path:
        """A folder for temporary files of their own: what processes leave behind there can be counted."""
        folder = self.folder / "tmp"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
