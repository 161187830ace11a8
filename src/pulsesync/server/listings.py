"""Listings for many clients at the cost of one: made once for all that ask for the same one, and kept for a second.

A listing of 10,000 objects takes 0.3 s of a processor. Therefore at most two are made at a time, in threads, while the
event loop answers other requests; and one for a client, so that one that asks for many does not delay those of others.
"""

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from pulsesync.server.calls import SharedPlaces, in_thread
from pulsesync.store.base import ObjectEntry
from pulsesync.store.keys import is_listed

PAGE = 1000  # entries
_THREADS = 2
_KEEP_S = 1.0
_KEPT = 8  # prefixes of which the entries of the store are kept


class Listing:
    """The lines of a listing, of objects sorted by key, without the folder that all keys begin with."""

    def __init__(self, entries: Iterable[ObjectEntry], folder: str) -> None:
        self._keys: list[str] = []
        self._begins = [0]  # where each line begins, and where the last one ends
        lines: list[bytes] = []
        for entry in entries:
            key = entry.key.removeprefix(folder)
            if not is_listed(key):  # a reader would refuse the entire listing
                continue
            line = f'{{"key": {json.dumps(key)}, "size": {entry.size_bytes}, "modified": {entry.modified_s!r}}}\n'
            self._keys.append(key)
            lines.append(line.encode())
            self._begins.append(self._begins[-1] + len(line))
        self.data = b"".join(lines)

    def page(self, after: str) -> tuple[bytes, bool]:
        """Return the lines of the next objects after a key, and whether there are more."""
        first = bisect_right(self._keys, after)
        last = min(first + PAGE, len(self._keys))
        return self.data[self._begins[first] : self._begins[last]], last < len(self._keys)


class RecentEntries:
    """What a store lists below a few prefixes, kept for a second: for listings to which this server adds its own."""

    def __init__(self, list_: Callable[[str], Iterable[ObjectEntry]]) -> None:
        self._list = list_
        self._kept: dict[str, tuple[float, tuple[ObjectEntry, ...]]] = {}  # by prefix; with the time of the request

    def get(self, prefix: str) -> tuple[ObjectEntry, ...]:
        """Return the objects below a prefix, as they were at most a second before, or are now. Raises: StoreError."""
        now, kept = time.monotonic(), self._kept.get(prefix)
        if kept is not None and now - kept[0] < _KEEP_S:
            return kept[1]
        entries = tuple(self._list(prefix))
        # Replaced, never changed: several threads list.
        recent = [(name, found) for name, found in self._kept.items() if now - found[0] < _KEEP_S and name != prefix]
        self._kept = dict([*recent[-_KEPT:], (prefix, (now, entries))])
        return entries


@dataclass
class _Flight:
    """A listing that is being made or was just made, for the requests that wait for it."""

    task: "asyncio.Task[Listing]" = field(init=False)
    waiting: int = 0
    begun: bool = False


class Listings:
    """Makes listings, of what a function returns for a prefix, called in a thread. To be used on one event loop."""

    def __init__(self, list_: Callable[[str], Iterable[ObjectEntry]]) -> None:
        self._list = list_
        self._threads = SharedPlaces(_THREADS, 1)
        self._flights: dict[tuple[str, str], _Flight] = {}

    async def get(self, folder: str, prefix: str, client: str = "") -> Listing:
        """Return the listing of a prefix of the run in a folder, as it was at most a second before, or is made now.

        It is made in the place of the client that asked first. One that was not begun when all who asked for it have
        left is not made. Raises: StoreError.
        """
        flight = self._flights.get((folder, prefix))
        if flight is None:
            flight = self._flights[folder, prefix] = _Flight()
            flight.task = asyncio.create_task(self._make(flight, folder, prefix, client))
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # all may have left
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.begun:
                flight.task.cancel()
                self._drop(flight, folder, prefix)

    def forget(self, key: str) -> None:
        """Make the listings of the folder of an object again: it was written just now."""
        for folder, prefix in [name for name in self._flights if "".join(name) == key[: key.rindex("/") + 1]]:
            del self._flights[folder, prefix]

    async def _make(self, flight: _Flight, folder: str, prefix: str, client: str) -> Listing:
        try:
            async with self._threads.taken(client):
                flight.begun, began_s = True, time.monotonic()
                listing = await in_thread(lambda: Listing(self._list(folder + prefix), folder))
        except BaseException:
            self._drop(flight, folder, prefix)
            raise
        left_s = began_s + _KEEP_S - time.monotonic()  # it may be as old as it took
        asyncio.get_running_loop().call_later(max(0.0, left_s), partial(self._drop, flight, folder, prefix))
        return listing

    def _drop(self, flight: _Flight, folder: str, prefix: str) -> None:
        if self._flights.get((folder, prefix)) is flight:
            del self._flights[folder, prefix]
