"""Programs for tests, as `python -c` runs them, forked from one process that has the package and its server loaded.

    with Forked("import sys; print(sys.argv[1])", "x") as process:
        assert process.stdout.readline() == "x\n"

A fork takes some milliseconds; an interpreter that imports the package and what the server needs takes half a second.
All else is as for a process of its own: its arguments, environment, pipes, signals and end.
"""

import atexit
import importlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.examples import python_path

ROOT = Path(__file__).parents[1]
LIFE_S = 150  # after which a process is ended, whatever became of its test
LOADED = ("granian.server.embed", "pulsesync.cli.serve", "pulsesync.server.service", "starlette.applications")
NUMBER = struct.Struct("i")


class Forked:
    """A process that runs a program; used as a context, and like a `subprocess.Popen` with pipes for text.

    Args:
        program: What to run.
        arguments: What it finds in sys.argv, after "-c".
        environment: Variables in addition to those of this process.
        together: Whether stderr goes into stdout.
        kernels: Whether it publishes or syncs. The kernels are loaded before the first such process is forked.
    """

    def __init__(
        self,
        program: str,
        *arguments: object,
        environment: dict[str, str] | None = None,
        together: bool = False,
        kernels: bool = False,
    ) -> None:
        order = {
            "program": program,
            "arguments": [str(one) for one in arguments],
            "environment": {**os.environ, **(environment or {})},
            "folder": str(Path.cwd()),
            "kernels": kernels,
        }
        (stdin, ours), (out, stdout), (err, stderr), (self._life, ended) = (os.pipe() for _ in range(4))
        handles = [stdin, stdout, stdout if together else stderr, ended]
        zygote, data = _zygote(), json.dumps(order).encode()
        socket.send_fds(zygote, [NUMBER.pack(len(data))], handles)
        zygote.sendall(data)
        for handle in (stdin, stdout, stderr, ended):
            os.close(handle)
        (self.pid,) = NUMBER.unpack(os.read(self._life, NUMBER.size))
        self.stdin, self.stdout, self.stderr = os.fdopen(ours, "w"), os.fdopen(out), os.fdopen(err)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._life], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            (self.returncode,) = NUMBER.unpack(os.read(self._life, NUMBER.size))
            os.close(self._life)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return what it has printed since: not more than a pipe takes. Close all pipes."""
        with suppress(OSError):
            self.stdin.close()
        self.wait(timeout)
        with self.stdout, self.stderr:
            return self.stdout.read(), self.stderr.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait(30)
        for file in (self.stdin, self.stdout, self.stderr):
            with suppress(OSError):
                file.close()


_ZYGOTES: list[socket.socket] = []


def _zygote() -> socket.socket:
    """The connection to the process from which the others are forked. That ends when this one does."""
    if not _ZYGOTES:
        connection, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": python_path(ROOT)},
                start_new_session=True,
            )
        _ZYGOTES.append(connection)
        atexit.register(process.wait)
        atexit.register(connection.close)  # which is called first, and ends it
    return _ZYGOTES[0]


def main() -> None:
    """Fork, for each order, a process that runs it and one that reports the process's number and how it ended."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in LOADED:
        with suppress(ModuleNotFoundError):  # an extra that is not installed
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    loaded = False
    while True:
        size, handles, *_ = socket.recv_fds(connection, NUMBER.size, 4)
        if not size:
            return
        order = json.loads(connection.recv(NUMBER.unpack(size)[0], socket.MSG_WAITALL))
        if order["kernels"] and not loaded:
            from pulsesync import warm_up

            warm_up()
            loaded = True
        if os.fork():
            for handle in handles:
                os.close(handle)
            continue
        connection.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        *pipes, ended = handles
        if pid := os.fork():
            for handle in pipes:
                os.close(handle)
            os.write(ended, NUMBER.pack(pid))
            os.write(ended, NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os._exit(0)
        os.close(ended)
        run(order, pipes)
        return


def run(order: dict[str, Any], pipes: Sequence[int]) -> None:
    """Become a process that runs a program. What it raises ends the interpreter, as it would anywhere."""
    signal.alarm(LIFE_S)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, handle in enumerate(pipes):
        os.dup2(handle, number)
        os.close(handle)
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    random.seed()
    sys.argv = ["-c", *order["arguments"]]
    exec(compile(order["program"], "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
