"""How kernels are compiled and called. A cache is empty once in a process: those tests have a process of their own."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core import serialize

from pulsesync.kernels import cpu
from pulsesync.kernels.jit import compiled as compile_kernel

COMPILE = """
import logging, sys
logging.basicConfig(level=logging.DEBUG)
if sys.argv[1:]:
    logging.getLogger("numba").setLevel(sys.argv[1])
import numpy as np
from pulsesync.kernels import cpu
cpu._scatter(np.zeros(4, np.uint16), np.arange(2), np.ones(2, np.uint16))
logging.getLogger("another").debug("heard")
"""


def compiled(cache: Path, *level: str) -> list[str]:
    """The log of a process that compiles one small kernel; it takes one to two seconds, most of it numba's."""
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", COMPILE, *level]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert any(cache.rglob("*.nbc")), "nothing was compiled"
    return done.stderr.splitlines()


@pytest.mark.timeout(150)
def test_with_debug_logging_numba_stays_quiet_and_others_are_heard(tmp_path: Path) -> None:
    log = compiled(tmp_path)
    assert log[-1] == "DEBUG:another:heard"
    assert [line for line in log if "numba" in line] == []


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_level_that_was_given_to_numba_is_left_alone(tmp_path: Path) -> None:
    assert len([line for line in compiled(tmp_path, "DEBUG") if line.startswith("DEBUG:numba")]) > 100


class Interrupted(dict[Any, Any]):
    """What numba looks at to return an array: a signal handler runs there, and raises."""

    def __init__(self, raised: BaseException) -> None:
        self.raised = raised

    def __getitem__(self, _: Any) -> Any:
        raise self.raised


SOME = np.arange(200, dtype=np.uint16)
FEW = np.arange(20, dtype=np.uint32)
CALLS: list[Callable[[], Any]] = [  # kernels that return an array, several, and several with numbers
    lambda: cpu.pick(SOME, FEW),
    lambda: cpu.steps(SOME, SOME + np.uint16(1), 7),
    lambda: cpu.digest_change(
        FEW, 0, np.zeros((1, 5), np.int64), 1, SOME[:20], SOME[20:40], np.zeros((2, 4096), np.uint32), FEW[:1]
    ),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=["Ctrl-C", "sys.exit"])
def test_what_a_signal_handler_raises_in_a_kernel_is_raised_as_it_is(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in CALLS:
        expected = call()
        with monkeypatch.context() as patched:
            patched.setattr(serialize, "_unpickled_memo", Interrupted(error))
            with pytest.raises(type(error)) as caught:
                call()
        assert caught.value is error
        assert len(call()) == len(expected)


def test_no_signal_in_a_kernel_becomes_a_system_error() -> None:
    for call in CALLS:
        call()  # numba loads a kernel at its first call
    seen: list[type[BaseException]] = []
    armed: list[bool] = []
    end = threading.Event()

    def send() -> None:
        for n in count():
            os.kill(os.getpid(), signal.SIGUSR1)
            if end.wait(3e-4 + n % 17 / 1e5):
                return

    def stop(*_: object) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, stop)
    thread = threading.Thread(target=send)
    try:
        thread.start()
        while len(seen) < 300:
            try:
                armed.append(True)
                while True:
                    for call in CALLS:
                        call()
            except BaseException as e:  # noqa: BLE001 - whatever a program would see
                seen.append(type(e))
    finally:
        end.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {KeyboardInterrupt}


def test_an_error_of_a_kernel_itself_is_not_changed() -> None:
    @compile_kernel
    def broken(x: Any) -> Any:
        raise SystemError

    with pytest.raises(SystemError):
        broken(1)
