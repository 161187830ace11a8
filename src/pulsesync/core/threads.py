"""Work in threads: spread over them block by block, or completed in one even if the caller is interrupted.

The kernels release the GIL; nothing else here is parallel.
"""

import _thread
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

LOOK_S = 1.0  # between two looks whether a future has ended, after a wait for it was interrupted


def default_threads() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    """Threads that wait for work: starting threads takes as long as hashing a megabyte."""
    return ThreadPoolExecutor(default_threads(), thread_name_prefix="pulse")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child does not have the threads


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
    # No threads can be started while the interpreter shuts down: then this thread does the work.
    with suppress(RuntimeError):
        for _ in range(count - 1):
            helpers.append(_pool().submit(take))  # noqa: PERF401 - those before one that fails are waited for
    take()
    for helper in helpers:
        if not helper.cancel():  # a helper that has not begun by now is not needed: no work is left
            helper.result()
    if faults:
        raise faults[0]
    return out


def begin(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin work in a thread; return a function that waits for its end, and raises what the work raised.

    While the interpreter shuts down no threads can be started: then the work is done at once.
    """
    try:
        return _pool().submit(work).result
    except RuntimeError:
        done = work()
        return lambda: done


class GatedFuture(Future[Result]):
    """A future whose callers wait without its Condition, which the thread that completes it needs.

    `Condition.__enter__` is Python code: Ctrl-C in the middle of it, or what a signal handler raises, leaves the
    Condition locked for ever.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_ended = False  # as `done`, without the Condition
        self._gate = threading.Lock()  # taken until then
        self._gate.acquire()
        self.add_done_callback(GatedFuture._open)  # the first: those of the caller may call `result`

    @staticmethod
    def _open(future: Future[Any]) -> None:  # no bound method: that would be a reference cycle
        assert isinstance(future, GatedFuture)
        future.has_ended = True
        future._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, or the time has passed; return whether it has ended."""
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self.has_ended and (left_s := until_s - time.monotonic()) > 0:
            if self._gate.acquire(timeout=min(left_s, LOOK_S)):  # an interrupt may keep it: the others look again
                self._gate.release()
        return self.has_ended

    def result(self, timeout: float | None = None) -> Result:
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.wait(timeout):
            raise TimeoutError
        return super().exception()


class CallerExecutor(Executor):
    """Runs work in the thread that asks for its result, when it asks: for work that nothing runs concurrently with."""

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> "Future[Result]":
        return _AwaitedWork(partial(fn, *args, **kwargs))


class _AwaitedWork(Future[Result]):
    def __init__(self, work: Callable[[], Result]) -> None:
        super().__init__()
        self._work: Callable[[], Result] | None = work

    def result(self, timeout: float | None = None) -> Result:
        if self._work is not None and self.set_running_or_notify_cancel():
            work, self._work = self._work, None
            try:
                self.set_result(work())
            except BaseException as e:  # noqa: BLE001 - raised below
                self.set_exception(e)
        return super().result(timeout)


Started: TypeAlias = tuple[Item, list[Future[Result]]]  # an item, and its work that has been started


def read_ahead(
    executor: Executor,
    jobs: Iterable[tuple[Item, Iterable[Callable[[], Result]]]],
    most: int,
    weight: Callable[[Item], int] = lambda item: 0,
    limit: int = 0,
) -> Generator[Started[Item, Result], None, None]:
    """Yield items in order, each with its work, while that of the next ones runs in the background.

    Args:
        executor: Runs the work.
        jobs: Items, each with the pieces of its work.
        most: At most this many items are ahead of the one that is yielded.
        weight: What an item counts.
        limit: Items ahead, and the one that is yielded, count no more than this, unless one alone does.
    """
    waiting: deque[Started[Item, Result]] = deque()
    total = 0
    try:
        for item, pieces in jobs:
            waiting.append((item, [executor.submit(piece) for piece in pieces]))
            total += weight(item)
            while len(waiting) > most or (len(waiting) > 1 and total > limit):
                total -= weight(waiting[0][0])
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, started in waiting:
            for future in started:
                future.cancel()


class SignalSafeFlag:
    """A flag that any number of threads can wait for, and that a signal handler or a finalizer can set.

    Two classes of the standard library cannot be used for it. `threading.Event.set` takes a lock; a handler that
    interrupts the `wait` of its own thread waits for that lock for ever. `queue.SimpleQueue.get` of CPython waits for
    ever if its timeout passes while it takes its lock for the first time.
    """

    def __init__(self) -> None:
        self._set = False
        self._gate = threading.Lock()
        self._gate.acquire()  # locked until the flag is set; then every waiting thread continues

    def set(self) -> None:
        self._set = True
        self._open()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float = -1) -> bool:
        """Wait until the flag is set, and return whether it is; -1: for ever."""
        if not self._gate.acquire(timeout=timeout_s):
            return self._set  # another thread may have been at the gate just then
        self._open()  # for the next thread that waits
        return True

    def clear(self) -> None:
        """Let the next wait wait again. For a flag that one thread waits for, and for that thread."""
        self._set = False
        self._gate.acquire(blocking=False)

    def _open(self) -> None:
        with suppress(RuntimeError):  # already open: the flag was set twice, or a handler set it again during a wait
            self._gate.release()


def if_cancelled(future: Future[Any], call: Callable[[], None]) -> None:
    """Call something if an executor cancels a future that it was given work for; perhaps twice.

    `add_done_callback` would do that, but with the Condition that the executor's thread needs, see `GatedFuture`. Its
    list and the state are private; Python 3.2 to 3.14 have them.
    """
    future._done_callbacks.append(lambda ended: call() if ended.cancelled() else None)  # type: ignore[attr-defined]
    if future._state.startswith("CANCELLED"):
        call()


def submit(executor: Executor, work: Callable[..., Result], *args: Any) -> "Future[Result]":
    """Run work(*args) once: on an executor, or in a thread of its own when the executor accepts no more work.

    When the main thread has ended, a ThreadPoolExecutor accepts nothing more, although its threads and all others that
    are not daemons finish what they do, and may need it. The interpreter waits for this thread as it does for those.

    Raises: RuntimeError, if no thread can be started either; the work is not run.
    """
    future: Future[Result] = Future()
    # Acquired by the first that runs the work: an executor that cannot start a thread has already queued it.
    begun = threading.Lock()

    def run() -> Any:
        if not begun.acquire(blocking=False):
            return None
        try:
            result = work(*args)
        except BaseException as e:
            future.set_exception(e)
            raise
        future.set_result(result)
        return result

    try:
        return executor.submit(run)
    except RuntimeError:
        try:
            start(run)
        except RuntimeError:
            if begun.acquire(blocking=False):  # from now on, the queued work does nothing
                raise
        return future


def start(work: Callable[[], object]) -> None:
    """Run work in a thread of its own, for which the interpreter waits. What it raises is not reported.

    Raises: RuntimeError, if no thread can be started.
    """

    def run() -> None:
        with suppress(BaseException):
            work()

    threading.Thread(target=run, name="pulse-late", daemon=False).start()


# Set when the main thread has ended, before the interpreter waits for the threads of executors. The main thread still
# counts as alive then, and a daemon that keeps giving executors work would make it wait for ever. Functions that are
# registered like this run last in, first out: this one after that of concurrent.futures, which is imported above. The
# registry is private; Python 3.9 to 3.13 have it. Without it a daemon is refused only after the interpreter has waited.
_ending = threading.Event()
if hasattr(threading, "_register_atexit"):
    threading._register_atexit(_ending.set)


def outlives_threads() -> bool:
    """Whether the interpreter is ending and would not wait for a thread that is started here.

    It waits for threads started by threads that it waits for; an atexit handler and a daemon are not among these.
    """
    here, main = threading.current_thread(), threading.main_thread()
    return (_ending.is_set() or not main.is_alive()) and (here is main or here.daemon)


def finish(work: Callable[[], None]) -> None:
    """Run something to its end in a thread of its own; an interrupt of the caller is raised afterwards.

    For work that must not be left half done: Ctrl-C, and anything else that a signal handler raises, reaches the main
    thread only. What the work raises is raised here, and then the interrupt is not. Only the end of the process stops
    the work.
    """
    faults: list[BaseException] = []
    go, done = SignalSafeFlag(), SignalSafeFlag()  # of Event and Thread, an interrupt can leave a lock taken for ever

    def run() -> None:
        threading.current_thread().name = "pulse-finish"
        go.wait()
        try:
            work()
        except BaseException as e:  # noqa: BLE001 - carried to the caller's thread and raised there
            faults.append(e)
        finally:
            done.set()

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as e:  # no thread can be started any more, unless a signal handler has raised it
        if e.__traceback__ is not None and e.__traceback__.tb_next is not None:
            raise
        work()
        return
    interrupt: BaseException | None = None
    while not done.is_set():
        try:
            go.set()
            done.wait()
        except BaseException as e:  # noqa: BLE001 - raised when the work is done
            interrupt = e
    if faults:
        raise faults[0]
    if interrupt is not None:
        raise interrupt
