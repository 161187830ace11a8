"""A cache on the disk of a host: one of the host's processes fetches an object, and the others read it from there.

An object is kept in aligned pieces of 1 MiB, whatever ranges of it are requested, so that it never takes more space
than its own size. Each piece is a file of its own (cache_folder.py). The size of an object of 1 MiB or more is kept as
a file too, so that it is known while the store does not answer.

    parts%2F<id>@0        the first piece of parts/<id>
    parts%2F<id>@size     its size in bytes, as a u64
    parts%2F<id>@0!       a piece that a reader reported as bad, kept until it has been fetched again
"""

import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar
from urllib.parse import quote

from pulsesync.core import arguments
from pulsesync.errors import StoreError
from pulsesync.store.base import WINDOW_BYTES, Store, WrappedStore, is_content_addressed, size_of
from pulsesync.store.cache_folder import SUSPECT, CacheFolder
from pulsesync.store.contents import MAX_TRANSFERS, Arrivals, ContentCheck, DamagedTransferError

MAX_BYTES = 1 << 34  # the default limit of a cache

_SIZE = struct.Struct("<Q")
_PIECE_BYTES = 1 << 20
_PROBES = 64  # pieces after a missing one that are looked for
_ASK_AGAIN_S = 10.0  # wait after the store failed: each failure may take as long
_MAX_RIGHT = 1024  # objects whose hash was checked that are remembered

T = TypeVar("T")

logger = logging.getLogger(__name__)


class CachedStore(WrappedStore):
    """Keeps content-addressed objects in a folder; all other calls go to the store.

    Processes of one host, also those of several runs, may share the folder. If the disk is full, read-only or broken,
    objects are not cached, but reads succeed. A process waits while another fetches the same piece; if the other makes
    no progress for 15 s (it was stopped, or its machine hangs), this one fetches the piece itself.

    Damage by the disk is found by checksums. An object is hashed while it is fetched from its beginning to its end, and
    dropped if it is not what its key names; then it is fetched again. What came damaged three times in a row is
    returned as it came, and not kept. What was fetched in ranges is not checked: a reader that finds it bad calls
    `forget` before it reads again.

    Args:
        store: Where objects come from.
        folder: Where they are kept; created if it does not exist.
        max_bytes: The folder is kept below this size, except for what is being written at the moment, by removing what
            was not used for longest; None for no limit.
    """

    def __init__(self, store: Store, folder: str | os.PathLike[str], max_bytes: int | None = MAX_BYTES) -> None:
        super().__init__(store)
        self.folder = arguments.folder("folder", folder)
        self.max_bytes = arguments.optional_whole("max_bytes", max_bytes, what="a number of bytes")
        self._files = CacheFolder(self.folder, self.max_bytes)
        self._right: dict[str, bytes] = {}  # by key, the fingerprint of pieces that have the hash that the key states
        self._arrivals = Arrivals(self._look_up)
        self._away_until: dict[str, float] = {}  # by key, when to ask the store again for what was reported as bad

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if not is_content_addressed(key):
            return self.store.get(key, begin, end)
        for _ in range(MAX_TRANSFERS if begin == 0 else 0):
            with suppress(DamagedTransferError):  # from the beginning, so that no caller has bytes of that transfer
                return self._get(key, begin, end)
        return self._get(key, begin, end)

    def _get(self, key: str, begin: int, end: int | None) -> bytes:
        stop = None if end is None else max(end, begin + 1)  # an empty range must look for the object, too
        size = self._stored_size(key)
        if size is not None:
            stop = size if stop is None else min(stop, size)
        at = first = begin - begin % _PIECE_BYTES
        found, ended = [], False
        while not ended and (stop is None or at < stop):
            data, ended = self._look_up(key, at) or self._fetch(key, at, stop)
            found.append(data)
            at += len(data)
        return b"".join(found)[begin - first : None if end is None else max(0, end - first)]

    def size(self, key: str) -> int:
        if not is_content_addressed(key):
            return size_of(self.store, key)
        if (size := self._known_size(key)) is not None:
            return size
        return self._ask(key, lambda: self._measure(key), lambda: self._known_size(key, SUSPECT))

    def has(self, key: str, begin: int = 0, end: int | None = None) -> bool:
        """Return whether the size of an object and a range of it are cached, so that the store need not be asked."""
        size = self._known_size(key) if is_content_addressed(key) else None
        if size is None:
            return False
        stop = size if end is None else min(end, size)
        numbers = range(begin // _PIECE_BYTES, -(-stop // _PIECE_BYTES))
        return all(self._files.has(_name(key, number)) for number in numbers)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.store.put(key, data)
        if is_content_addressed(key):
            self._keep_pieces(key, 0, memoryview(data).cast("B"), ended=True)

    def delete(self, key: str) -> None:
        self.store.delete(key)
        self._away_until.pop(key, None)
        self._drop(key, suspects=True)

    def forget(self, key: str) -> None:
        """Fetch an object again at its next read, unless all of it is cached and has the hash that the key names.

        The cached copy is replaced piece by piece, and is still served while the store does not answer: the reader that
        reported it may be wrong, or malicious.
        """
        if is_content_addressed(key):
            if self._is_right(key):
                logger.info("A reader reported %s as bad; the copy in %s has the right hash.", key, self.folder)
                return
            self._arrivals.drop(key)
            self._files.suspect(_name(key, ""))
        super().forget(key)

    def _drop(self, key: str, suspects: bool = False) -> None:
        """Remove an object, or what of it readers have not reported."""
        self._arrivals.drop(key)
        self._files.remove_all(_name(key, ""), suspects)

    def _is_right(self, key: str) -> bool:
        """Return whether all pieces of an object are cached and have the hash that its key states.

        The answer is remembered with the digests of the pieces, which every read of a piece compares with its content.
        If another process replaces the pieces, they are checked again.
        """
        fingerprint, length = self._survey(key)
        if fingerprint is None:
            return False
        if self._right.get(key) == fingerprint:
            return True
        size = self._known_size(key)
        if not _is_named_by(key, length if size is None else size, self._pieces(key)):
            return False
        if size is None:
            self._keep_size(key, length)
        if self._survey(key)[0] == fingerprint:
            if len(self._right) >= _MAX_RIGHT:
                self._right.clear()
            self._right[key] = fingerprint
        return True

    def _survey(self, key: str) -> tuple[bytes | None, int]:
        """Return a hash over the digests of the pieces of an object, and their length; None if there is no piece."""
        digests, length, number = hashlib.sha256(), 0, 0
        while (stated := self._files.stated(_name(key, number))) is not None:
            digests.update(stated[0])
            length, number = length + stated[1], number + 1
        return (digests.digest() if number else None), length

    def _pieces(self, key: str) -> Iterator[bytes]:
        """Yield the pieces of an object up to the first that is not cached."""
        at, ended = 0, False
        while not ended and (found := self._look_up(key, at)) is not None:
            piece, ended = found
            yield piece
            at += len(piece)

    # Fetching

    def _look_up(self, key: str, at: int, suspect: str = "") -> tuple[bytes, bool] | None:
        """Return the piece that begins at a position, if it is cached, and whether the object ends with it."""
        piece = self._files.read(_name(key, at // _PIECE_BYTES) + suspect)
        return None if piece is None else (piece, len(piece) < _PIECE_BYTES)

    def _fetch(self, key: str, at: int, stop: int | None) -> tuple[bytes, bool]:
        """Return an object from a position on, up to `stop` or to a cached piece, and whether it ends there.

        Of several readers that miss a piece in the same window of an object, one fetches it.
        """
        with self._files.turn(_name(key, f"w{at // WINDOW_BYTES}")):
            if (found := self._look_up(key, at)) is not None:
                return found  # another reader has fetched it meanwhile
            return self._ask(key, lambda: self._download(key, at, stop), lambda: self._recall(key, at))

    def _recall(self, key: str, at: int) -> tuple[bytes, bool] | None:
        """Look up a piece in the copy that a reader reported as bad; at its end, return no bytes."""
        if (found := self._look_up(key, at, SUSPECT)) is not None:
            return found
        size = self._stored_size(key, SUSPECT)
        return (b"", True) if size is not None and at >= size else None

    def _download(self, key: str, at: int, stop: int | None) -> tuple[bytes, bool]:
        end = self._missing_until(key, at, stop)
        data = self.store.get(key, at, end)
        ended = end is None or len(data) < end - at
        if self._arrivals.may_keep(key, at):
            self._keep_pieces(key, at, memoryview(data), ended)
            try:
                self._arrivals.arrived(key, at, data, ended)
            except DamagedTransferError as e:
                logger.warning("%s", e.reason)
                self._drop(key)
                super().forget(key)  # a cache in between may have it
                if e.retryable:
                    raise
        return data, ended

    def _measure(self, key: str) -> int:
        size = size_of(self.store, key)
        self._keep_size(key, size)
        return size

    def _ask(self, key: str, ask: Callable[[], T], recall: Callable[[], T | None]) -> T:
        """Ask the store; if it fails, and for some time after, return what a reader has reported as bad instead."""
        old = recall() if time.monotonic() < self._away_until.get(key, 0.0) else None
        if old is not None:
            return old
        try:
            return ask()
        except DamagedTransferError:
            raise  # it is to be fetched again
        except StoreError as e:
            old = recall()
            if old is None:
                raise
            self._away_until[key] = time.monotonic() + _ASK_AGAIN_S
            logger.warning("A reader reported %s as bad, but the store fails, so the old copy is kept: %s", key, e)
            return old

    def _missing_until(self, key: str, at: int, stop: int | None) -> int | None:
        """Return where to end a fetch of complete pieces, before the next cached one; None for the object's end."""
        first = at // _PIECE_BYTES
        last = first + _PROBES if stop is None else -(-stop // _PIECE_BYTES)
        for number in range(first + 1, min(last, first + _PROBES)):
            if self._files.has(_name(key, number)):
                return number * _PIECE_BYTES
        return None if stop is None else last * _PIECE_BYTES

    # Sizes and pieces

    def _stored_size(self, key: str, suspect: str = "") -> int | None:
        data = self._files.read(_name(key, "size") + suspect)
        return _SIZE.unpack(data)[0] if data is not None and len(data) == _SIZE.size else None

    def _known_size(self, key: str, suspect: str = "") -> int | None:
        """Return the size of an object, if the cached files show it."""
        size = self._stored_size(key, suspect)
        if size is None and (found := self._look_up(key, 0, suspect)) and found[1]:
            size = len(found[0])
        return size

    def _keep_size(self, key: str, size: int) -> None:
        name = _name(key, "size")
        if size >= _PIECE_BYTES:
            self._files.keep(name, memoryview(_SIZE.pack(size)))
        else:  # a smaller object has one piece, which shows its size; a larger copy may have had a file
            self._files.remove(name)

    def _keep_pieces(self, key: str, at: int, data: memoryview, ended: bool) -> None:
        if at and not data:
            return  # beyond the object's end: there is no such piece
        for begin in range(0, max(1, len(data)), _PIECE_BYTES):
            self._files.keep(_name(key, (at + begin) // _PIECE_BYTES), data[begin : begin + _PIECE_BYTES])
        if ended:
            self._keep_size(key, at + len(data))


def origin_of(store: Store) -> Store:
    """Return the store behind a cache, for reads of single bytes: the cache would fetch an entire piece for each."""
    return store.store if isinstance(store, CachedStore) else store


def _name(key: str, what: int | str) -> str:
    """Return the name of the file with a piece, or the size, of an object."""
    return f"{quote(key, safe='')}@{what}"


def _is_named_by(key: str, size: int, pieces: Iterator[bytes]) -> bool:
    """Return whether these pieces have the hash that a content-addressed key names."""
    check, length = ContentCheck(key), 0
    for piece in pieces:
        length += len(piece)
        if not check.feed(piece):
            return False
    return length == size and check.ends()
