"""Processes of a benchmark: fresh ones that print a result, and others that answer commands.

A process that answers reads JSON lines from its standard input, answers each by a JSON line, and ends when its input
does. All are started as modules of this folder, from the root of the repository.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.links import ROOT, End, Link

Answer = dict[str, Any]


def command(module: str, *options: Any) -> list[str]:
    """The command that runs a module with this Python, from ROOT: "benchmarks" with a name, or one of its processes."""
    return [sys.executable, "-m", module, *map(str, options)]


def last_line(module: str, *options: Any, env: dict[str, str] | None = None) -> Any:
    """Run a module in a fresh process; return the JSON of its last line.

    Raises:
        RuntimeError: it failed; the message has what it printed to stderr.
    """
    environment = {**os.environ, **(env or {})}
    done = subprocess.run(
        command(module, *options), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, options))} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(fields: Answer) -> None:
    """Send an answer, from the process that was asked."""
    print(json.dumps(fields), flush=True)


def answer_all(actor: object) -> None:
    """Answer every command by the method of its name, until standard input ends."""
    answer({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        answer(getattr(actor, asked.pop("do"))(**asked))


class Remote:
    """A process that answers; `heard` is its first answer."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.heard = self.hear()

    def ask(self, do: str, **fields: Any) -> Answer:
        self.send(do, **fields)
        return self.hear()

    def send(self, do: str, **fields: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def hear(self) -> Answer:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the benchmark has ended; its error is printed above")
        heard: Answer = json.loads(line)
        return heard


class Pair:
    """Two ranks at the two ends of a link, which run the same command at the same time."""

    def __init__(self, link: Link, folder: Path, interfaces: tuple[str, str], module: str, **given: Any) -> None:
        self.link = link
        store = str(folder / f"store-{interfaces[0]}-{os.urandom(4).hex()}")

        def start(rank: int) -> "subprocess.Popen[str]":
            argument = json.dumps({"rank": rank, "store": store, **given})
            environment = os.environ | {"GLOO_SOCKET_IFNAME": interfaces[rank]}
            end: End = "worker" if rank else "trainer"
            return link.start(command(module, argument), end, env=environment)

        started = [start(rank) for rank in (0, 1)]
        self.remotes = [Remote(process) for process in started]

    def tell(self, do: str, **fields: Any) -> list[Answer]:
        """Send a command to both; return their answers, by rank."""
        for remote in self.remotes:
            remote.send(do, **fields)
        return [remote.hear() for remote in self.remotes]

    def rate(self, shaped: float | None) -> float:
        """Bits a second that one large broadcast gets."""
        size = int(min(128e6, (shaped or 10e9) / 8))
        return 8 * size / min(seconds_of(self.tell("probe", size_bytes=size)) for _ in range(3))


def seconds_of(answers: list[Answer]) -> float:
    """Seconds from the first start to the last end; both ranks have the same clock."""
    return float(max(one["done"] for one in answers) - min(one["began"] for one in answers))


def end_with_the_input(stop: Callable[[], None]) -> None:
    """Call `stop` in a thread of its own when standard input ends: for a process that serves."""

    def wait() -> None:
        sys.stdin.read()
        stop()

    threading.Thread(target=wait, daemon=True).start()
