"""Work in threads: spread over them, block by block, or finished in one whatever interrupts the caller.

The kernels release the GIL; nothing else here is parallel.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for work: to start some takes as long as hashing a megabyte."""
    return ThreadPoolExecutor(default_threads(), thread_name_prefix="pulse")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not come along


def spread(work: Callable[[Item], Result], items: Iterable[Item], threads: int | None = None) -> list[Result]:
    """Return [work(item) for item in items], on threads; one of the exceptions is raised after all have ended.

    A block can be a few kilobytes: a pool's futures, at 20 µs each, would cost as much as the work.
    """
    todo = list(items)
    count = min(threads or default_threads(), len(todo))
    if count <= 1:
        return [work(item) for item in todo]
    out: list[Any] = [None] * len(todo)
    faults: list[BaseException] = []
    waiting = iter(range(len(todo)))
    lock = threading.Lock()

    def take() -> None:
        try:
            while not faults:
                with lock:
                    i = next(waiting, None)
                if i is None:
                    return
                out[i] = work(todo[i])
        except BaseException as e:  # noqa: BLE001 - carried to the caller's thread and raised there
            faults.append(e)

    helpers: list[Future[None]] = []
    with suppress(RuntimeError):  # while the interpreter shuts down there are no threads to be had: then without
        helpers += [_pool().submit(take) for _ in range(count - 1)]
    take()
    for helper in helpers:
        if not helper.cancel():  # what has not begun by now is not needed: nothing is left to take
            helper.result()
    if faults:
        raise faults[0]
    return out


def finish(work: Callable[[], None]) -> None:
    """Run something to its end in a thread of its own; an interrupt of the caller is raised afterwards.

    For work that must not be left half done: Ctrl-C, or whatever else a signal handler raises, comes to the main thread
    alone. What the work itself raises is raised here, and then the interrupt is not. Only the end of the process cuts
    it off.
    """
    faults: list[BaseException] = []
    go, done = threading.Event(), threading.Event()

    def run() -> None:
        go.wait()
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - carried to the caller's thread and raised there
            faults.append(e)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="pulse-finish", daemon=True)
    thread.start()  # an interrupt here has changed nothing: the work waits for `go`
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            go.set()
            done.wait()  # not join: interrupted, it takes a thread that runs for one that has ended (Python < 3.13)
        except BaseException as e:  # noqa: BLE001 - raised when the work is done
            interrupt = e
    if faults:
        raise faults[0]
    if interrupt is not None:
        raise interrupt
