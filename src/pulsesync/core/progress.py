"""Progress bars, for people who watch a terminal.

    with pulse.show_progress():
        subscriber.sync(model)      # a bar on stderr while the first sync fetches an anchor

Long transfers emit events (TransferProgress), and this shows them. Commands show other long work with the same bars.
There are none where stderr is not a terminal, and what is printed meanwhile is never touched: a bar is erased first.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

from pulsesync.core.events import Event, TransferProgress, listen

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

Report: TypeAlias = Callable[[int, int | None, str], None]  # done, of how many (None: not known), what

_DELAY_S = 0.25  # for which work has no bar, lest short work flickers
_LONG_BYTES = 1 << 22  # of a transfer that is shown at once: it may consist of few parts
_IDLE_S = 30.0  # after which a transfer that shows no progress was given up


def quietly(done: int, of: int | None, what: str) -> None:
    """Report to no one."""


class ProgressBars:
    """Bars on stderr, one a piece of work; none if stderr is not a terminal.

    Args:
        is_shown: False: there are none in any case.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self.is_shown = is_shown and _is_watched()
        self._lock = threading.RLock()
        self._progress: Progress | None = None  # while bars are on the screen
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, float] = {}
        self._updated: dict[str, float] = {}

    def report(self, done: int, of: int | None, what: str) -> None:
        """Show how much of some work is done, counted in pieces. The bar is removed when all of it is."""
        amount = f"{done:,} of {of:,}" if of is not None else f"{done:,}" if done else ""
        self._show(what, done, of, amount, _DELAY_S if of is not None else 0.0)

    def note(self, event: Event) -> None:
        """Show a transfer that an event is about."""
        if isinstance(event, TransferProgress):
            done, of = event.done_bytes, event.total_bytes
            took_s = time.monotonic() - self._began.get(event.what, time.monotonic())
            speed = f", {_bytes(done / took_s)}/s" if took_s > 0.5 else ""
            delay_s = 0.0 if of >= _LONG_BYTES else _DELAY_S
            self._show(event.what, done, of, f"{_bytes(done)} of {_bytes(of)}{speed}", delay_s)

    def hide(self) -> None:
        """Erase the bars, so that something else can be printed; the next report shows them again."""
        with self._lock:
            if self._progress is not None:
                self._progress.stop()
                self._progress, self._tasks = None, {}

    def _show(self, what: str, done: int, of: int | None, amount: str, delay_s: float) -> None:
        if not self.is_shown:
            return
        with self._lock:
            now = time.monotonic()
            if of is not None and done >= of:
                self._remove(what)
                return
            for idle in [name for name, when in self._updated.items() if now - when > _IDLE_S and name != what]:
                self._remove(idle)
            self._began.setdefault(what, now)
            self._updated[what] = now
            if now - self._began[what] < delay_s:
                return
            if self._progress is None:
                self._progress = _new_bars()
                self._progress.start()
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(what, total=of, amount=amount)
            self._progress.update(self._tasks[what], completed=done, total=of, amount=amount)

    def _remove(self, what: str) -> None:
        self._began.pop(what, None)
        self._updated.pop(what, None)
        task = self._tasks.pop(what, None)
        if self._progress is not None and task is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self.hide()


@contextmanager
def show_progress() -> Iterator[ProgressBars]:
    """Show a bar on stderr for each long transfer of this process, such as a first sync, while the block lasts.

    Where stderr is not a terminal, nothing is shown.
    """
    with showing(ProgressBars()) as bars:
        yield bars


@contextmanager
def showing(bars: ProgressBars) -> Iterator[ProgressBars]:
    """Show the transfers of this process with some bars while the block lasts, and erase them after it."""
    if not bars.is_shown:
        yield bars
        return
    try:
        with listen(bars.note):
            yield bars
    finally:
        bars.hide()


def _is_watched() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it was closed
        return False


def _new_bars() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    what, amount = TextColumn("{task.description}", markup=False), TextColumn("{task.fields[amount]}", markup=False)
    times = TimeElapsedColumn(), TimeRemainingColumn(compact=True)
    # What is printed must go where it was meant to go: to a pipe, if stdout is one. So nothing is redirected.
    console = Console(stderr=True)
    columns = SpinnerColumn(), what, BarColumn(bar_width=24), amount, *times
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)


def _bytes(count: float) -> str:
    for power, unit in ((3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {unit}"
    return f"{count:.0f} bytes"
