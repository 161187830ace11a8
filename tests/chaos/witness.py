"""A log outside the processes that are killed: what each of them said, in order, whatever became of it.

A process writes one short line into a pipe, which the kernel takes whole or not at all; the reader is the process that
does the killing. A line that was written is read, even if the writer was killed with the next instruction.
"""

import json
import logging
import os
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

_LONGEST = 4096  # PIPE_BUF: up to here the kernel does not mix lines of different processes
_VARIABLE = "PULSE_CHAOS_WITNESS"


def say(event: str, **facts: Any) -> None:
    """Write one line to the witness that this process's environment names."""
    line = json.dumps({"event": event, "pid": os.getpid(), "at": time.monotonic(), **facts}).encode() + b"\n"
    assert len(line) <= _LONGEST, line
    os.write(_writing_end(os.environ[_VARIABLE]), line)


@cache
def _writing_end(path: str) -> int:
    return os.open(path, os.O_WRONLY)


class WitnessHandler(logging.Handler):
    """Passes what the library logs, from WARNING up, to the witness."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        say("logged", level=record.levelname, logger=record.name, message=record.getMessage()[:1000])


class Witness:
    """The reading end. `said` is what has arrived so far."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.environment = {_VARIABLE: str(path)}
        self._reads = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._writes = os.open(path, os.O_WRONLY)  # until `close`, there is no end of the file
        os.set_blocking(self._reads, True)
        self._lines: list[dict[str, Any]] = []
        self._arrived = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def said(self, event: str | None = None, **facts: Any) -> list[dict[str, Any]]:
        """The lines of an event that carry these facts, in the order in which they were written."""
        with self._arrived:
            lines = list(self._lines)
        return [
            line
            for line in lines
            if event in (None, line["event"]) and all(line.get(name) == fact for name, fact in facts.items())
        ]

    def wait_for(self, event: str, timeout_s: float, **facts: Any) -> dict[str, Any]:
        """The first such line. Raises: TimeoutError."""
        with self._arrived:
            deadline = time.monotonic() + timeout_s
            while not (found := self._found(event, facts)):
                if not self._arrived.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"no process reported {event} {facts} within {timeout_s} s")
        return found

    def close(self) -> None:
        """Read what is left. Every writer must be gone."""
        os.close(self._writes)
        self._thread.join()

    def _found(self, event: str, facts: dict[str, Any]) -> dict[str, Any] | None:
        for line in self._lines:
            if line["event"] == event and all(line.get(name) == fact for name, fact in facts.items()):
                return line
        return None

    def _read(self) -> None:
        with os.fdopen(self._reads, "rb") as pipe:
            for line in pipe:
                with self._arrived:
                    self._lines.append(json.loads(line))
                    self._arrived.notify_all()
