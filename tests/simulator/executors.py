"""Executors that do their work when a schedule decides, in its thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.simulator.line import Crash

T = TypeVar("T")


class InlineExecutor(Executor):
    """Does everything at once, in the caller's thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()
        _run(future, lambda: fn(*args, **kwargs))
        return future


class QueuedExecutor(Executor):
    """Does nothing by itself: background tasks wait for `run_one`, in any order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._at_once = False

    @property
    def waiting(self) -> int:
        """The number of waiting tasks. Not __len__: an executor without tasks would be false."""
        return len(self._waiting)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = _Awaited(self._run_now)
        self._waiting.append((future, lambda: _run(future, lambda: fn(*args, **kwargs))))
        if self._at_once:
            self.run_one(self.waiting - 1)
        return future

    def run_one(self, number: int = 0) -> None:
        """Do one of the waiting tasks, counted from the oldest."""
        _, task = self._waiting[number]
        del self._waiting[number]
        task()

    def _run_now(self, future: "Future[Any]") -> None:
        waiting = [one for one, _ in self._waiting]
        assert future in waiting, "a task waits for itself, or for one that waits for it"
        self.run_one(waiting.index(future))

    def run_all(self) -> None:
        while self._waiting:
            self.run_one()

    @contextmanager
    def at_once(self, backlog: bool = True) -> Iterator[None]:
        """Run each new task at once inside the block, for a caller that waits for it.

        backlog: first run waiting tasks.
        """
        if backlog:
            self.run_all()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


class _Awaited(Future[T]):
    """A future whose task is done, at the latest, when a caller waits for it."""

    def __init__(self, run_now: "Callable[[Future[Any]], None]") -> None:
        super().__init__()
        self._run_now = run_now

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._run_now(self)
        return super().result(timeout)


def _run(future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except Crash:
        raise  # all threads of a process die together
    except BaseException as e:  # noqa: BLE001 - raised where the future is read
        future.set_exception(e)
