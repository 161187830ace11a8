"""Blocking calls of a store, made from the event loop that answers requests."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from pulsesync.errors import StoreError

T = TypeVar("T")


async def in_thread(call: Callable[[], T]) -> T:
    """Make a blocking call in a thread of its own: a daemon, so that a store that hangs keeps nothing from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_: Callable[[Any], None], outcome: object) -> None:
        if not future.done():  # the request may have been given up meanwhile
            set_(outcome)

    def work() -> None:
        try:
            done = partial(settle, future.set_result, call())
        except Exception as e:  # noqa: BLE001 - raised again where it is awaited
            done = partial(settle, future.set_exception, e)
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(done)

    threading.Thread(target=work, daemon=True).start()
    return await future


class SharedPlaces:
    """Places for requests at a time, of which those of one client take some at most (each); all others wait."""

    def __init__(self, places: int, each: int) -> None:
        self._places, self._each = asyncio.Semaphore(places), each
        self._own: dict[str, asyncio.Semaphore] = {}
        self._requests: Counter[str] = Counter()

    @asynccontextmanager
    async def taken(self, client: str) -> AsyncGenerator[None]:
        """Wait for a place, and take it for as long as the block lasts."""
        own = self._own.setdefault(client, asyncio.Semaphore(self._each))
        self._requests[client] += 1
        try:
            async with own, self._places:
                yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client], self._own[client]


class SharedBytes:
    """Bytes that are being sent, of which those to one client may be half. What several are sent counts once.

    One object may be larger than the most that there may be, if nothing else is being sent.
    """

    def __init__(self, most: int) -> None:
        self._limits = most // 2, most
        self._bytes: Counter[str | None] = Counter()  # by client; None: of all clients
        self._senders: Counter[tuple[str | None, int]] = Counter()  # by client and object

    @contextmanager
    def taken(self, client: str, data: bytes) -> Generator[None]:
        """Count an object for as long as the block lasts. Raises: StoreError, retryable, if it is too much."""
        names = (client, id(data)), (None, id(data))
        for (who, _), limit, is_new in zip(
            names, self._limits, [not self._senders[name] for name in names], strict=True
        ):
            if is_new and self._bytes[who] and self._bytes[who] + len(data) > limit:
                raise StoreError(f"more than {limit:,} bytes of different listings are being sent", retryable=True)
        for name in names:
            self._bytes[name[0]] += 0 if self._senders[name] else len(data)
            self._senders[name] += 1
        try:
            yield
        finally:
            for name in names:
                self._senders[name] -= 1
                self._bytes[name[0]] -= 0 if self._senders[name] else len(data)
            self._senders, self._bytes = +self._senders, +self._bytes  # without zeros


class RememberedCall(Generic[T]):
    """A blocking call whose outcome many ask for. It is made once at a time, and its outcome kept for a while.

    The call does not raise. Its outcome is valid for keep_s; if it takes longer than limit_s, those who wait for it do
    without.
    """

    def __init__(self, call: Callable[[], T], keep_s: float, limit_s: float) -> None:
        self._call, self._keep_s, self._limit_s = call, keep_s, limit_s
        self._task: asyncio.Task[T] | None = None
        self._began_s = 0.0

    async def outcome(self) -> T | None:
        """Return the outcome, or None if the call takes too long; it is then waited for no more until it returns."""
        now = time.monotonic()
        if self._task is None or (self._task.done() and now - self._began_s >= self._keep_s):
            self._task, self._began_s = asyncio.create_task(in_thread(self._call)), now
        with suppress(TimeoutError):
            left_s = max(0.0, self._began_s + self._limit_s - now)
            return await asyncio.wait_for(asyncio.shield(self._task), left_s)
        return None
