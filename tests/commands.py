"""The `pulse` command for tests: in this process, where it is fast, or in one of its own, where that is the point."""

import contextlib
import io
import json
import signal
import sys
from dataclasses import dataclass
from typing import Any, TextIO
from unittest import mock

from pulsesync.cli import main
from tests.forked import Forked

PULSE = [sys.executable, "-c", "from pulsesync.cli import main; main()"]


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a command that has ended."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that it printed with --json; every line must parse."""
        return [json.loads(line) for line in self.out.splitlines()]

    def refused(self, code: int, saying: str) -> bool:
        """Whether it failed as it should: with this exit code, one line on stderr, and no other output."""
        assert self.code == code, self
        assert len(self.err.splitlines()) == 1, self.err
        assert saying in self.err, self.err
        return self.err.startswith("pulse: ") and not self.out


def pulse(*arguments: object, stderr: TextIO | None = None) -> Done:
    """Run a command in this process; its stderr can be a file of the caller's, such as a terminal."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with (
            mock.patch.object(sys, "argv", ["pulse", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(stderr or err),
        ):
            main()
    except SystemExit as e:
        return Done(int(e.code or 0), out.getvalue(), err.getvalue())
    finally:
        signal.signal(signal.SIGTERM, before)
    raise AssertionError("the command returned without an exit code")


def start(*arguments: object) -> Forked:
    """Run a command in a process of its own."""
    return Forked(PULSE[-1], *arguments, kernels=True)
