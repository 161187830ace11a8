"""Real processes, killed with SIGKILL at random moments over a hundred times: nothing wrong is ever applied.

One publisher, three followers (two of them sharing a cache) and a squasher, over a folder, a real S3 server, and a
chain of two relays whose processes are killed as well. Every follower hashes its weights after every sync; the hash
must be that of the trainer's state at the step the version says, and in the end all have the last one.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kill.training import hash_of, state_after
from tests.s3 import Server, free_ports

KILLS = int(os.environ.get("PULSE_TEST_KILLS", "36"))  # for each of the three transports
BETWEEN_S = 0.1  # on average
DEADLINE_S = 100
SEED = 5


class Zoo:
    """Processes by name, started by the zygote, and started again when they are killed."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        source = Path(__file__).parents[2]
        path = os.pathsep.join([str(source / "src"), str(source)])
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=source, env={**os.environ, **environment, "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        assert self.zygote.stdout is not None
        assert self.zygote.stdout.readline() == "ready\n"
        self.orders: dict[str, dict[str, Any]] = {}
        self.pids: dict[str, int] = {}
        self.kills = 0

    def start(self, name: str, **order: Any) -> None:
        self.orders[name] = {**order, "errors": str(self.folder / f"{name}.err")}
        self.again(name)

    def again(self, name: str) -> None:
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.write(json.dumps(self.orders[name]) + "\n")
        self.zygote.stdin.flush()
        self.pids[name] = int(self.zygote.stdout.readline())

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

    def revive(self, unless: Path | None = None) -> None:
        """Start again whoever has died; not those who may have finished."""
        if unless is None or not unless.exists():
            for name in self.pids:
                if not self.alive(name):
                    self.again(name)

    def stop(self) -> None:
        os.killpg(self.zygote.pid, signal.SIGKILL)
        self.zygote.communicate()

    def errors(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.err")))


@pytest.fixture(params=["folder", "s3", "relays"])
def zoo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Zoo, str, str]]:
    """Processes without a publisher yet, where it publishes, and where followers read."""
    environment: dict[str, str] = {}
    write = read = str(tmp_path / "run")
    if request.param == "s3":
        server: Server = request.getfixturevalue("s3_server")
        environment, write = server.environment, server.fresh_url()
        read = write
    animals = Zoo(tmp_path, environment)
    try:
        if request.param == "relays":
            Path(write).mkdir()
            ports = free_ports(3)
            animals.start("server", role="server", folder=write, port=ports[0])
            for i in (1, 2):
                upstream, cache = f"http://127.0.0.1:{ports[i - 1]}", str(tmp_path / f"relay{i}")
                animals.start(f"relay{i}", role="relay", upstream=upstream, cache=cache, port=ports[i])
            read = f"http://127.0.0.1:{ports[2]}"
        yield animals, write, read
    finally:
        animals.stop()


@pytest.mark.timeout(DEADLINE_S + 20)
def test_processes_killed_at_random_end_bit_identical(zoo: tuple[Zoo, str, str], tmp_path: Path) -> None:
    animals, write, read = zoo
    rng = random.Random(SEED)
    finish, done = tmp_path / "finish", tmp_path / "done"
    logs = {f"follower{i}": tmp_path / f"follower{i}.log" for i in range(3)}
    animals.start(
        "publisher", role="publisher", location=write, spool=str(tmp_path / "spool"), seed=SEED,
        checkpoint=str(tmp_path / "checkpoint"), finish=str(finish), done=str(done),
    )  # fmt: skip
    for i, (name, log) in enumerate(logs.items()):
        cache = str(tmp_path / "shared") if i < 2 else None
        animals.start(name, role="follower", location=read, cache=cache, log=str(log), done=str(done))
    animals.start("squasher", role="squasher", location=write)
    while animals.kills < KILLS:
        time.sleep(rng.expovariate(1 / BETWEEN_S))
        animals.kill(rng.choice(list(animals.pids)))
        animals.revive()
    deadline = time.monotonic() + DEADLINE_S
    while not all(any("patch" in line["path"] for line in seen(log)) for log in logs.values()):
        assert time.monotonic() < deadline, f"no follower gets anywhere:\n{animals.errors()}"
        time.sleep(0.02)
        animals.revive()
    finish.touch()
    while not done.exists() or any(animals.alive(name) for name in logs):
        assert time.monotonic() < deadline, f"not finished in time:\n{animals.errors()}"
        time.sleep(0.02)
        animals.revive(unless=done)
    assert "Traceback" not in animals.errors(), animals.errors()
    last = int(done.read_text())
    for log in logs.values():
        assert seen(log)[-1]["step"] == last
        for line in seen(log):
            assert line["hash"] == hash_of(state_after(SEED, line["step"])), line


def seen(log: Path) -> list[dict[str, Any]]:
    """What a follower wrote down; a line that a kill cut short is none."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line[line.rindex('{"version') :]) for line in lines if line.endswith("}\n")]
