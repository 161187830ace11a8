"""Settings that hold for every test, where the tests of the GPU path keep their tensors, and the slow tier's size."""

import ctypes
import gc
import os
import signal
import socketserver
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings

# A process that a shell starts in the background ignores SIGINT (Ctrl-C), and so do its children. Tests interrupt the
# processes that they start, so the default is restored.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Many containers set PYTHONDONTWRITEBYTECODE. Then each process of pytest rewrites the assertions of every file in
# every run, and every process that a test starts compiles the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Two test processes share the machine, and their tensors are small: torch's threads would mostly wait for each other,
# and burn a core while they do (measured: the tests of the lab take 25 CPU seconds with two threads, 11 with one).
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray gives its workers a low priority: while tests use all cores, they would miss their time limits.
os.environ.setdefault("RAY_worker_niceness", "0")

# A server of the standard library looks twice a second whether it shall end, and a test would wait for that.
socketserver.BaseServer.serve_forever.__defaults__ = (0.01,)
# It writes an answer in two packets, and the second would wait 40 ms for the client to acknowledge the first.
socketserver.StreamRequestHandler.disable_nagle_algorithm = True

# Python would look through all modules and tests again and again while they are made: a third of the collection's
# time. What is there after it stays, so that nothing looks at it later either.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# No deadline: the first example of a test may wait for numba to compile a kernel.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("quick", deadline=None, max_examples=20)  # make test; make test-all takes the default
settings.register_profile("thorough", deadline=None, max_examples=2000)  # pytest --hypothesis-profile=thorough
settings.load_profile("default")


def _sees_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")  # the driver: without it nobody need wait for torch, which takes a second to import
        import torch
    except (OSError, ImportError):
        return False
    return torch.cuda.is_available()


GPU = _sees_gpu()
if not GPU:  # here, because Triton looks when it is first imported, and torch may import it in any test
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def device() -> str:
    """Where tensors are for Triton: on the GPU, or on the CPU, where its interpreter runs the same kernels."""
    return "cuda" if GPU else "cpu"


@pytest.fixture
def a_tile_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bundles: the models of tests are small, and most of them would be one tile."""
    monkeypatch.setattr("pulsesync.format.layout.SMALL", 0)


@pytest.fixture
def no_spare_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is staged goes to disk, as it does where the machine has no memory to spare."""
    monkeypatch.setattr("pulsesync.core.headroom.can_take", lambda _: False)


@pytest.fixture(scope="module")
def parts_as_objects() -> Iterator[None]:
    """Parts are objects of their own, as those of a real model are: nearly all models of the tests fit into records."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("pulsesync.run.bodies.INLINE_BYTES", 0)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing here outlives a loss of power, and each of many thousand writes would wait some milliseconds for it.

    What is to be on the disk before what: `tests/store/test_local.py` puts a function of its own in this place.
    """

    def fsync(handle: int) -> None:
        os.fstat(handle)  # fails for what is not open

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not GPU:
        pytest.skip("needs a CUDA device: run make gpu-test on a machine that has one")


# The slow tier: a run without it says at its end how many tests it left out.

LEFT_OUT = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    if items:
        items[0].config.stash[LEFT_OUT] += sum(item.get_closest_marker("slow") is not None for item in items)


# With pytest-xdist every worker collects all tests, and so deselects as many: the report of any one is the number.
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash[LEFT_OUT]:
        said = f"{left_out} slow tests were left out: make test-slow runs them, make test-all runs everything"
        terminalreporter.write_sep("=", said, yellow=True, bold=True)
