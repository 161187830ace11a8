"""Seconds and memory of a call. Nothing here imports torch or pulsesync: processes that measure their memory use it."""

import ctypes
import gc
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], wait: Callable[[], object] = lambda: None) -> tuple[T, float]:
    """The result of a call, and its seconds. `wait` is called before each reading of the clock: it waits for a GPU."""
    wait()
    began = time.perf_counter()
    result = work()
    wait()
    return result, time.perf_counter() - began


def spent(work: Callable[[], object]) -> dict[str, float]:
    """The wall seconds of a call, and the CPU seconds of all threads of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def smallest(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """The smallest value of each figure over all rounds: the one that other programs have disturbed least."""
    found = list(rounds)
    return {name: min(one[name] for one in found) for name in found[0]}


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def peak() -> int:
    """The most resident memory since `reset_peak`, in bytes."""
    return status("VmHWM")


def trim() -> None:
    """Return freed memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> bool:
    """Return freed memory to the system, and reset the recorded peak; return whether the system allows that."""
    trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False  # then the peak is that of the whole process: an upper bound
    return True
