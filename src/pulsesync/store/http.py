"""A run behind http or https, for reading: `pulse serve`, a relay, a bucket's public address, any web server.

Only the standard library. Listing needs `pulse serve` or a relay at the other end; everything else needs a server of
files, with or without range requests. What the server says is checked: status, range, length, encoding, every entry of
a listing. What the objects hold is for the reader to check, as with any store.
"""

import http.client
import io
import json
import re
import ssl
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

from pulsesync.errors import NotFoundError, StoreError
from pulsesync.store.base import Entry
from pulsesync.store.keys import check_key, check_prefix

LISTING_TYPE = "application/x-ndjson"  # one object a line: {"key": …, "size": bytes, "modified": seconds since 1970}

_PIECE = 1 << 18  # bytes asked of a connection at once
_MAX_LISTING = 1 << 28
_MAX_NUMBER = 1 << 53
_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_BUSY = (408, 425, 429)  # with all of 5xx: worth another try


class HttpStore:
    """Objects below an address. Writing is refused. Connections are kept open and shared by all threads.

    Args:
        url: `https://host/path` or `http://host:port`; keys are added to its path.
        token: Sent as a bearer token with every request.
        timeout_s: Without a byte from the server.
        cafile: Certificates to trust instead of the system's, for a server that signed its own.

    Raises:
        ValueError: the address is not one of http or https, or the token is not plain ASCII.
        StoreError: the certificates of cafile cannot be read.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 30, cafile: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an address such as https://host/path")
        if parts.username is not None:
            raise ValueError("an address carries no user or password; give a token")
        if token is not None and not _TOKEN.fullmatch(token):
            raise ValueError("a token is printable ASCII without spaces")
        self.url = url.rstrip("/")
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s = timeout_s
        self._tls = _trust(cafile) if parts.scheme == "https" else None
        self._doubted: set[str] = set()  # keys whose next request asks caches in between not to answer
        self._idle: list[http.client.HTTPConnection] = []  # append and pop are atomic: no lock
        weakref.finalize(self, _close, self._idle)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object or a range of it, as every store does; of a longer answer, no more than `end` is read.

        Raises:
            NotFoundError: there is no such object.
            StoreError: anything else; retryable if the server is away, busy, or broke off.
        """
        assert begin >= 0
        check_key(key)
        if end is not None and end <= begin:
            self.get(key, begin, begin + 1)  # for its NotFoundError
            return b""
        headers = {} if begin == 0 and end is None else {"Range": f"bytes={begin}-{'' if end is None else end - 1}"}
        if key in self._doubted:
            self._doubted.discard(key)
            headers["Cache-Control"] = "no-cache"
        with self._asked(f"/{quote(key)}", headers, key) as response:
            if response.status == 416:
                return b""
            if response.status == 206:
                return _read(response, _range_size(response, begin, end, key), key, exactly=True)
            if _skip(response, begin, key) < begin:
                return b""
            return _read(response, None if end is None else end - begin, key)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def create(self, key: str, data: bytes) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        """Refuse. Raises: StoreError."""
        raise self._read_only(key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """Give the objects below a prefix; the whole listing is fetched and checked before the first.

        Raises:
            StoreError: the server cannot list, or its listing is not one.
        """
        check_prefix(prefix)
        try:
            with self._asked(f"/?list={quote(prefix, safe='')}", {}, prefix) as response:
                if response.headers.get_content_type() != LISTING_TYPE:
                    raise self._cannot_list(prefix)
                data = _read(response, _MAX_LISTING + 1, prefix)
        except NotFoundError as e:
            raise self._cannot_list(prefix) from e
        return iter(_parse_listing(data, prefix))

    def forget(self, key: str) -> None:
        """Ask the server, and whatever caches are in front of it, for a fresh copy the next time."""
        self._doubted.add(key)

    def close(self) -> None:
        """Close the connections that wait for the next request; the store can be used again."""
        _close(self._idle)

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"{self.url} is read-only; {key} can be written where it is served from", key=key)

    def _cannot_list(self, prefix: str) -> StoreError:
        return StoreError(f"{self.url} cannot list; it is not served by pulse serve or pulse relay", key=prefix)

    @contextmanager
    def _asked(self, path: str, headers: dict[str, str], key: str) -> Iterator[http.client.HTTPResponse]:
        """Give the answer to a GET, if its status is one that answers; keep the connection if all of it was read."""
        try:
            connection, response = self._send(path, headers)
            try:
                self._check(response, key)
                yield response
            finally:
                keep = _is_done(response)
                response.close()
                self._idle.append(connection) if keep else connection.close()
        except ssl.SSLCertVerificationError as e:
            raise StoreError(f"{self.url} is not trusted: {e.verify_message}; see cafile", key=key) from e
        except (OSError, http.client.HTTPException) as e:
            cause = str(e) or type(e).__name__
            raise StoreError(f"cannot read {key} from {self.url}: {cause}", key=key, retryable=True) from e

    def _send(self, path: str, headers: dict[str, str]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask over a kept connection if there is one that still works, else over a new one."""
        while True:
            kept, connection = self._connection()
            try:
                connection.request("GET", self._path + path, headers=self._headers | headers)
                return connection, connection.getresponse()
            except (ConnectionError, ssl.SSLEOFError):  # RemoteDisconnected is one
                connection.close()
                if not kept:
                    raise  # a kept one may have been closed from the other side long ago; a new one was refused
            except BaseException:
                connection.close()
                raise

    def _connection(self) -> tuple[bool, http.client.HTTPConnection]:
        try:
            return True, self._idle.pop()
        except IndexError:
            pass
        if self._tls is None:
            return False, http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return False, http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def _check(self, response: http.client.HTTPResponse, key: str) -> None:
        """Raise what a status means, unless it comes with the bytes or says that there are none."""
        status = response.status
        if status not in (200, 206) and (response.length or 0) <= _PIECE:
            _skip(response, _PIECE, key)  # what it says in words; the connection can be used again
        if status == 404:
            raise NotFoundError(f"there is no {key} at {self.url}", key=key)
        if status in (401, 403):
            wants = "does not accept this token" if self._headers else "asks for a token"
            raise StoreError(
                f"{self.url} {wants} ({status}): give token=, or on the command line --token-file or PULSE_TOKEN",
                key=key,
            )
        if status not in (200, 206, 416):
            retryable = status in _BUSY or 500 <= status < 600
            raise StoreError(f"{self.url} answers {status} for {key}", key=key, retryable=retryable)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise StoreError(f"{self.url} encodes {key}, which was not asked for", key=key)


def _trust(cafile: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as e:  # ssl.SSLError is one
        raise StoreError(f"cannot read certificates from {cafile}: {e}") from e


def _close(connections: list[http.client.HTTPConnection]) -> None:
    while connections:
        connections.pop().close()


def _range_size(response: http.client.HTTPResponse, begin: int, end: int | None, key: str) -> int:
    """Return how many bytes a partial answer says it has, having checked that they are those asked for."""
    said = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(said)
    first, stop = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
    good = first == begin and stop > first and (end is None or stop <= end)
    if good and match and match[3] != "*":  # the size is told: then all of what there is must be there
        size = int(match[3])
        good = stop == (size if end is None else min(end, size))
    if not good:
        asked = f"{begin}-{'' if end is None else end - 1}"
        raise StoreError(f"asked for bytes {asked} of {key}, the answer has {said[:80]!r}", key=key)
    return stop - first


def _is_done(response: http.client.HTTPResponse) -> bool:
    """Say whether a connection is at the end of this answer and may carry the next."""
    at_end = response.length == 0 or (response.length is None and response.isclosed())
    return at_end and not response.will_close


def _skip(response: http.client.HTTPResponse, count: int, key: str) -> int:
    """Read past bytes of an answer; return how many there were."""
    skipped = 0
    while skipped < count and (piece := _piece(response, count - skipped, key)):
        skipped += len(piece)
    return skipped


def _read(response: http.client.HTTPResponse, limit: int | None, key: str, exactly: bool = False) -> bytes:
    """Read an answer to its end or to a limit, whichever is first. Exactly: it must reach the limit.

    Raises:
        StoreError: it broke off; retryable.
    """
    data = io.BytesIO()  # its bytes can be had without a copy
    while piece := _piece(response, _PIECE if limit is None else limit - data.tell(), key):
        data.write(piece)
    if exactly and data.tell() != limit:
        raise StoreError(f"{key} broke off after {data.tell()} of {limit} bytes", key=key, retryable=True)
    return data.getvalue()


def _piece(response: http.client.HTTPResponse, limit: int, key: str) -> bytes:
    """Return the next bytes of an answer, at most limit; none at the limit and at the end."""
    # Not read(): a chunk whose size says −1 makes it read to the end of the connection, however far that is.
    piece = response.read1(min(_PIECE, limit)) if limit > 0 else b""
    if not piece and limit > 0 and response.length:
        raise StoreError(f"{key} broke off {response.length} bytes before its end", key=key, retryable=True)
    return piece[:limit]


def _parse_listing(data: bytes, prefix: str) -> list[Entry]:
    if len(data) > _MAX_LISTING:
        raise StoreError(f"the listing of {prefix} is beyond {_MAX_LISTING} bytes", key=prefix)
    entries: list[Entry] = []
    for line in data.splitlines():
        entry = _entry(line, prefix)
        if entry is None or (entries and entry.key <= entries[-1].key):
            raise StoreError(f"the listing of {prefix} has a bad line: {line[:80]!r}", key=prefix)
        entries.append(entry)
    return entries


def _entry(line: bytes, prefix: str) -> Entry | None:
    """Return the object a line of a listing names, None if it does not name one below the prefix."""
    try:
        fields: Any = json.loads(line)
        key, size, modified = fields["key"], fields["size"], fields["modified"]
        check_key(key)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, StoreError):
        return None
    if not key.isprintable():  # half a surrogate pair could not even be asked for
        return None
    numbers = type(size) is int and type(modified) in (int, float)
    if numbers and key.startswith(prefix) and 0 <= size <= _MAX_NUMBER and 0 <= modified <= _MAX_NUMBER:
        return Entry(key, size, float(modified))
    return None
