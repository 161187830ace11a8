"""Content-addressed objects, hashed while they arrive: whether they are what their keys name (docs/protocol.md).

A relay must not keep what was damaged in transit, because all of its clients would get it.
"""

import hashlib
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pulsesync.errors import FormatError, StoreError

MAX_TRANSFERS = 3  # of an object that arrives damaged, until its reader is to decide what that means
_MAX_OBJECTS = 1024  # that arrive at the same time, or arrived damaged
_ID = re.compile(r"[0-9a-f]{64}", re.ASCII)


class DamagedTransferError(StoreError):
    """An object did not arrive as its key states; what was kept of it is dropped. The next read fetches it again."""


class ContentCheck:
    """Checks bytes that come in order. The first ones of a part must contain its header.

    Args:
        key: A content-addressed one.
    """

    def __init__(self, key: str) -> None:
        kind, self._name = key.split("/")[-2:]
        # Lengths and hashes that are still to come; a length of None goes to the end of the object.
        self._left: deque[tuple[int | None, str]] = deque() if kind == "parts" else deque([(None, self._name)])
        self._header_comes = kind == "parts"
        self._hashed, self._length = hashlib.sha256(), 0

    def feed(self, data: bytes | memoryview) -> bool:
        """Return whether these can be the next bytes of the object."""
        if self._header_comes:
            from pulsesync.format.container import parse_header

            try:
                header = parse_header(data, self._name)
            except FormatError:
                return False
            self._header_comes = False
            self._left.extend((length, digest.hex()) for length, digest in header.sections)
            data = data[header.size :]
        view = memoryview(data)
        while self._left and (view or self._left[0][0] == self._length):
            end, digest = self._left[0]
            taken = view if end is None else view[: end - self._length]
            self._hashed.update(taken)
            self._length, view = self._length + len(taken), view[len(taken) :]
            if self._length == end:
                if self._hashed.hexdigest() != digest:
                    return False
                self._left.popleft()
                self._hashed, self._length = hashlib.sha256(), 0
        return not view

    def ends(self) -> bool:
        """Return whether the object can end here, and all of it is right."""
        if len(self._left) == 1 and self._left[0][0] is None:
            return self._hashed.hexdigest() == self._left[0][1]
        return not (self._left or self._header_comes)


@dataclass
class _Arrival:
    """An object of which the bytes up to a position have been checked."""

    check: ContentCheck
    at: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Arrivals:
    """Checks objects that arrive in pieces, a few of them in another order. For many threads.

    An object is checked from its beginning on: one whose beginning was kept earlier, or of which only ranges are
    fetched, is not checked to its end. Readers check everything, and report what is bad.

    Args:
        kept: Returns the piece of an object that begins at a position, and whether the object ends with it; None if it
            was not kept.
    """

    def __init__(self, kept: Callable[[str, int], tuple[bytes, bool] | None]) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._arriving: dict[str, _Arrival] = {}  # by key, oldest first
        self._damaged: dict[str, int] = {}  # by key, how often it came damaged in a row

    def may_keep(self, key: str, at: int) -> bool:
        """Return whether bytes that begin at a position are of a transfer that has not been found damaged."""
        with self._lock:
            return at == 0 or key in self._arriving or key not in self._damaged

    def arrived(self, key: str, at: int, data: bytes, ended: bool) -> None:
        """Check bytes that came and were kept, and those after them that came earlier.

        Raises: DamagedTransferError; its `retryable` says whether to fetch the object again, or to pass on what came.
        """
        if not _ID.fullmatch(key.rpartition("/")[2]):
            return  # no key of a run
        with self._lock:
            if at == 0:
                self._arriving.pop(key, None)
                self._arriving[key] = _Arrival(ContentCheck(key))
                _bound(self._arriving)
            arrival = self._arriving.get(key)
        if arrival is None:
            return
        with arrival.lock:
            if at != arrival.at:
                return  # bytes before these have not arrived yet
            is_right = arrival.check.feed(data)
            arrival.at += len(data)
            while is_right and not ended and (next_ := self._kept(key, arrival.at)) is not None:
                piece, ended = next_
                is_right = arrival.check.feed(piece)
                arrival.at += len(piece)
            has_all = is_right and arrival.check.ends()
        if is_right and not ended and not has_all:
            return
        self.drop(key)
        with self._lock:
            times = self._damaged.pop(key, 0) + 1
            if not has_all:
                self._damaged[key] = times
                _bound(self._damaged)
        if not has_all:
            raise DamagedTransferError(
                f"{key} was damaged in transit: its bytes do not have the hash that its name states. They were "
                "dropped; read it again. If this goes on, pulse verify shows whether the store has it right",
                key=key,
                retryable=times < MAX_TRANSFERS,
            )

    def drop(self, key: str) -> None:
        """Check an object no further; it is fetched again, or was deleted."""
        with self._lock:
            self._arriving.pop(key, None)


def _bound(by_key: dict[str, Any]) -> None:
    if len(by_key) > _MAX_OBJECTS:
        del by_key[next(iter(by_key))]
