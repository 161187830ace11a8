"""Processes for tests: forked from one that has torch and the kernels loaded, so that each costs milliseconds.

def case(rank, size, folder):                   # in a test module; runs in a process of its own
    with group(folder, "first", rank, size):
        ...

def test_it(fleet):
    results = fleet.run(case, 3)
"""

import atexit
import importlib
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import python_path

GROUP_TIMEOUT_S = 20  # nobody waits as long
PROCESS_S = 45  # after which processes that still run are ended, and the test fails
ROOT = Path(__file__).parents[1]

# Meeting in a group


@contextmanager
def group(folder: str, name: str, rank: int, size: int) -> Iterator[None]:
    join_group(folder, name, rank, size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def join_group(folder: str, name: str, rank: int, size: int) -> None:
    from datetime import timedelta

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Processes


class Fleet:
    """Forks processes from one that has torch loaded, so that each costs milliseconds; ends them all in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = python_path(ROOT)
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert self.zygote.stdout is not None
        assert self.zygote.stdout.readline() == "ready\n"
        self.count = 0

    def start(self, case: Callable[..., Any], **args: Any) -> tuple[int, Path]:
        """Start a process that calls a test module's function; return its id, and where its result will be."""
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.count += 1
        out = self.folder / f"{case.__name__}-{self.count}"
        module = ".".join(Path(inspect.getfile(case)).relative_to(ROOT).with_suffix("").parts)
        order = {"module": module, "case": case.__name__, "args": args, "out": str(out)}
        self.zygote.stdin.write(json.dumps(order) + "\n")
        self.zygote.stdin.flush()
        return int(self.zygote.stdout.readline()), out

    def run(self, case: Callable[..., Any], ranks: int, killed: Sequence[int] = (), **args: Any) -> list[Any]:
        """Run a function on this many ranks; return what each returned. Exactly those in `killed` return nothing."""
        folder = self.folder / f"group-{self.count}"
        folder.mkdir()
        started = [self.start(case, rank=r, size=ranks, folder=str(folder), **args) for r in range(ranks)]
        end = time.monotonic() + PROCESS_S
        while any(alive(pid) for pid, _ in started) and time.monotonic() < end:
            time.sleep(0.005)
        hanging = [pid for pid, _ in started if alive(pid)]
        for pid in hanging:
            os.kill(pid, signal.SIGKILL)
        words = "\n".join(told(out) for _, out in started)
        assert not hanging, f"{len(hanging)} of {ranks} hang\n{words}"
        results = [pickle.loads(out.read_bytes()) if out.exists() else None for _, out in started]
        assert [r for r in range(ranks) if results[r] is None] == list(killed), words
        return results

    def stop(self) -> None:
        os.killpg(self.zygote.pid, signal.SIGKILL)
        self.zygote.communicate()


def told(out: Path) -> str:
    """A process's last words; none, if it was killed before it could say any."""
    errors = out.with_suffix(".err")
    return errors.read_text()[-3000:] if errors.exists() else ""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


_FLEETS: list[Fleet] = []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """One for all modules of a test process. It ends with it, however that ends: its zygote reads from a pipe."""
    if not _FLEETS:
        _FLEETS.append(Fleet(tmp_path_factory.mktemp("fleet")))
        atexit.register(_FLEETS[0].stop)
    return _FLEETS[0]


def _child(order: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = Path(order["out"])
    with out.with_suffix(".err").open("a") as errors:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)
        try:
            result = getattr(importlib.import_module(order["module"]), order["case"])(**order["args"])
            out.with_suffix(".new").write_bytes(pickle.dumps(result))
            out.with_suffix(".new").rename(out)
        except BaseException:  # noqa: BLE001 - written down, and missed where the result should be
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(5)
    os._exit(0)


def main() -> None:
    import ml_dtypes  # loaded here, so that no process loads it again; the same for FSDP
    import torch.distributed.fsdp

    from pulsesync import warm_up
    from tests.loco.fleet import load

    assert ml_dtypes
    assert torch.distributed.fsdp
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are gone at once
    torch.set_num_threads(1)
    load()
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        importlib.import_module(order["module"])  # here, once, instead of in every process
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(PROCESS_S + 10)  # whatever becomes of the test
            _child(order)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
