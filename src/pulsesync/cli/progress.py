"""Progress bars of commands: on stderr, where a person watches it, and never with --json."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pulsesync.core.progress import ProgressBars, showing

T = TypeVar("T")

_bars: ProgressBars | None = None  # of the command that runs


@contextmanager
def show_progress(as_json: bool) -> Iterator[ProgressBars]:
    """Bars for the work of a command while the block lasts: what it reports, and the transfers of this process."""
    global _bars
    with showing(ProgressBars(is_shown=not as_json)) as bars:
        _bars = bars
        try:
            yield bars
        finally:
            _bars = None


def hide() -> None:
    """Erase the bars before something is printed; the next report shows them again."""
    if _bars is not None:
        _bars.hide()


def track(bars: ProgressBars, what: str, items: Iterable[T], of: int | None) -> Iterator[T]:
    """Yield items, and report how many there were."""
    bars.report(0, of, what)
    for done, item in enumerate(items, 1):
        yield item
        bars.report(done, of, what)
