"""Work on independent blocks, spread over threads. The kernels release the GIL; nothing else here is parallel."""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

    helpers = [threading.Thread(target=take, name="pulse", daemon=True) for _ in range(count - 1)]
    for helper in helpers:
        helper.start()
    take()
    for helper in helpers:
        helper.join()
    if faults:
        raise faults[0]
    return out
