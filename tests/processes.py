"""Processes for tests: forked from one that has torch and the kernels loaded, so that each costs milliseconds.

def case(rank, size, folder):                   # in a test module; runs in a process of its own
    with group(folder, "first", rank, size):
        ...

def test_it(fleet):
    results = fleet.run(case, 3)

A function of `start` ends with its result; one of `start_program` as a program does: exceptions are printed, threads
are waited for, and exit handlers run. Only modules are not taken down, which takes a second with torch loaded.
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
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples import python_path

GROUP_TIMEOUT_S = 20  # nobody waits as long
PROCESS_S = 45  # after which processes that still run are ended, and the test fails
ROOT = Path(__file__).parents[1]
# The exit handler that is registered first, before anything is imported, runs last.
ZYGOTE = """
import atexit
last = []
atexit.register(lambda: [end() for end in last])
from tests.processes import main
main(last)
"""

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
            [sys.executable, "-c", ZYGOTE],
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
        out = self._new_path(case)
        return self._fork(case, out, args), out

    def start_program(
        self,
        case: Callable[..., Any],
        environment: Mapping[str, str] | None = None,
        longest_s: int = PROCESS_S,
        **args: Any,
    ) -> "Program":
        """Start a process that calls a test module's function and then ends as any Python program does."""
        out = self._new_path(case)
        pid = self._fork(case, out, args, program=True, environment=dict(environment or {}), longest_s=longest_s)
        return Program(pid, out)

    def _new_path(self, case: Callable[..., Any]) -> Path:
        self.count += 1
        return self.folder / f"{case.__name__}-{self.count}"

    def _fork(self, case: Callable[..., Any], out: Path, args: Mapping[str, Any], **options: Any) -> int:
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        module = ".".join(Path(inspect.getfile(case)).relative_to(ROOT).with_suffix("").parts)
        order = {"module": module, "case": case.__name__, "args": args, "out": str(out), **options}
        self.zygote.stdin.write(json.dumps(order) + "\n")
        self.zygote.stdin.flush()
        return int(self.zygote.stdout.readline())

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


@dataclass(frozen=True)
class Program:
    """A process whose end is the interpreter's."""

    pid: int
    out: Path

    @property
    def code(self) -> int | None:
        """The exit code, the negative number of the signal that killed it, or None while it runs."""
        path = self.out.with_suffix(".code")
        return int(path.read_text()) if path.exists() else None

    def wait(self, timeout_s: float = PROCESS_S) -> int:
        """The exit code. Raises: AssertionError, if it takes longer."""
        end = time.monotonic() + timeout_s
        while (code := self.code) is None:
            assert time.monotonic() < end, f"process {self.pid} does not end\n{told(self.out)}"
            time.sleep(0.005)
        return code

    def kill(self) -> bool:
        """Kill it, if it still runs, and wait for its end; return whether it was this that ended it."""
        if self.code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL


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
    return one_fleet(tmp_path_factory)


def one_fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
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


def _call(order: dict[str, Any], last: list[Callable[[], None]]) -> None:
    """In a process whose end is the interpreter's, which also prints what is raised here."""
    code = 0

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)

    last.append(leave)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    errors = os.open(Path(order["out"]).with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(errors, 2)
    os.dup2(errors, 1)
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # may be another one in this environment
    try:
        getattr(importlib.import_module(order["module"]), order["case"])(**order["args"])
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    except KeyboardInterrupt:
        code = -signal.SIGINT  # as the interpreter ends then
        raise
    except BaseException:
        code = 1
        raise


_PATHS: dict[int, Path] = {}  # of the processes that run, in the zygote


def _reap(*_: object) -> None:
    """Write down how every process ended, and only then let it be gone. One call may interrupt another one."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            if (out := _PATHS.get(ended.si_pid)) is not None:
                with suppress(
                    OSError
                ):  # the folder is gone with its test, or the call that interrupted this one did it
                    out.with_suffix(".ended").write_text(str(code))
                    out.with_suffix(".ended").rename(out.with_suffix(".code"))
            os.waitpid(ended.si_pid, 0)
            _PATHS.pop(ended.si_pid, None)


def main(last: list[Callable[[], None]]) -> None:
    """Fork a process for each line of the input. last: what a process that ends as a program does at its very end."""
    import ml_dtypes  # loaded here, so that no process loads it again; the same for FSDP
    import torch.distributed.fsdp

    from pulsesync import warm_up
    from tests.loco.fleet import load

    assert ml_dtypes
    assert torch.distributed.fsdp
    signal.signal(signal.SIGCHLD, _reap)
    # A signal that arrives just before a read begins is not handled until the next one: so there is always a next one.
    signal.signal(signal.SIGALRM, _reap)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    torch.set_num_threads(1)
    load()
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        importlib.import_module(order["module"])  # here, once, instead of in every process
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until it is known whose end it will be
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            signal.alarm(order.get("longest_s", PROCESS_S) + 10)  # whatever becomes of the test
            if order.get("program"):
                _call(order, last)
                return
            _child(order)
        _PATHS[pid] = Path(order["out"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        print(pid, flush=True)
