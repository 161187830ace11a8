"""Read a run over http or https: from `pulse serve`, a relay, a bucket's public address, or any web server.

The one thing that can be written is the heartbeat of a worker, which `pulse serve` and relays accept.

It uses only the standard library. Listing needs `pulse serve` or a relay as the server; everything else works with any
server of files, with or without range requests. The server's answers are checked: status, range, length, encoding,
every entry of a listing. The content of objects is checked by the reader, as with any store.
"""

import http.client
import io
import ipaddress
import json
import re
import secrets
import ssl
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, urlsplit

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store.base import ObjectEntry, ReadOnlyStore, is_content_addressed, unreachable
from pulsesync.store.deadlines import PIECE_BYTES, Connection, Deadline, Response
from pulsesync.store.keys import check_key, check_prefix, is_heartbeat

LISTING_TYPE = "application/x-ndjson"  # one object a line: {"key": …, "size": bytes, "modified": seconds since 1970}
WRITER_HEADER = "Pulse-Writer"  # a secret by which a server binds the name of a heartbeat to the client that sent it

_MAX_LISTING = 1 << 28
_MAX_NUMBER = 1 << 53
_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)", re.ASCII)
_DIGITS = re.compile(r"\d{1,16}", re.ASCII)
_TOKEN = re.compile(r"[!-~]+")
_BUSY = (408, 425, 429)  # these and all 5xx: the request may be repeated
_NO_HEAD = (405, 501)
_MAX_SIZES = 1024  # sizes of objects that are kept in memory, and reports that were not sent yet
# Limits of an answer that does not state its length, if the request has no end: a server could send forever.
_MAX_UNSTATED = 1 << 30
_UNSTATED_TIMEOUTS = 10  # its time limit, as a multiple of timeout_s
_MAX_WHOLE = 1 << 36  # bytes of an answer that states its length, if the request has no end


def check_token(token: str) -> None:
    """Check that a text can be sent as a bearer token. Raises: ValueError, which does not show the token."""
    if not token:
        raise ValueError("the token is empty; pass a token, or None to run without authentication")
    if not _TOKEN.fullmatch(token):
        raise ValueError("a token must be printable ASCII characters without spaces; this token has others")


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine by its own name or address: localhost, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class HttpStore(ReadOnlyStore):
    """Reads objects below an address. Writing is refused, except for the heartbeats of workers.

    Connections are kept open and shared by all threads.

    Every request ends. Connecting, the TLS handshake and the response's headers may take `timeout_s` each. Of the body,
    `timeout_s * min_bytes_per_s` bytes must arrive in every `timeout_s`, so that a body of n bytes takes at most
    `timeout_s + n / min_bytes_per_s` seconds. A server that is slower raises a retryable StoreError. Redirects are not
    followed. An answer that does not state its length and is read to its end must end within ten times `timeout_s` and
    within 1 GiB.

    Args:
        url: `https://host/path` or `http://host:port`; keys are added to its path.
        token: Sent as a bearer token with every request.
        timeout_s: See above.
        cafile: Certificates to trust instead of the system's, for a server with a self-signed certificate.
        min_bytes_per_s: See above. The default lets a link of 131 kbit/s pass.
        token_in_clear: Send the token over http to another machine too, although it can be read on the network.

    Raises:
        ValueError: the address is not an http or https address; the token is empty, is not plain ASCII, or would be
            sent unencrypted; timeout_s or min_bytes_per_s is not positive.
        StoreError: the certificates of cafile cannot be read.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_s: float = 30,
        cafile: str | None = None,
        *,
        min_bytes_per_s: float = 1 << 14,
        token_in_clear: bool = False,
    ) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise ValueError("the address of a server must not contain a user or a password; pass token= instead")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"the address of a server must be such as https://host/path; got {url!r}")
        if not (timeout_s > 0 and min_bytes_per_s > 0):
            raise ValueError(
                f"timeout_s and min_bytes_per_s must be positive, so that every request ends; got {timeout_s=}, "
                f"{min_bytes_per_s=}"
            )
        if token is not None:
            check_token(token)
            if parts.scheme == "http" and not is_loopback(parts.hostname) and not token_in_clear:
                raise ValueError(
                    f"{url} is not https, so the token would be sent unencrypted to another machine; use https, or "
                    "permit it with token_in_clear=True (on the command line PULSE_TOKEN_IN_CLEAR=1, for a relay "
                    "--upstream-token-in-clear)"
                )
        self.url = url.rstrip("/")
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._timeout_s, self._min_bytes_per_s = timeout_s, min_bytes_per_s
        self._tls = _trust(cafile) if parts.scheme == "https" else None
        self._writer = secrets.token_hex(16)
        self._now: tuple[float, float] | None = None  # the server's time, and the monotonic time at which it said so
        self._doubted: set[str] = set()  # keys whose next request must not be answered from a cache
        self._sizes: dict[str, int] = {}  # of content-addressed objects, as answers state them
        self._idle: list[Connection] = []  # append and pop are atomic: no lock
        weakref.finalize(self, _close, self._idle)

    @property
    def has_token(self) -> bool:
        """Whether a token is sent with every request."""
        return bool(self._headers)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return an object or a range of it, as every store does; a longer answer is read up to `end` only.

        Raises:
            NotFoundError: there is no such object.
            StoreError: anything else; retryable if the server does not answer, is busy, or closed the connection.
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
            self._learn_size(key, response)
            if response.status == 416:
                return b""
            if response.status == 206:
                return _read(response, _range_size(response, begin, end, key), key, exactly=True)
            if _skip(response, begin, key) < begin:
                return b""
            return _read_whole(response, key) if end is None else _read(response, end - begin, key)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes: as an earlier answer stated it, or by a HEAD request.

        Raises:
            NotFoundError, StoreError: as for get.
        """
        check_key(key)
        if (known := self._sizes.get(key)) is not None:
            return known
        with self._asked(f"/{quote(key)}", {}, key, "HEAD") as response:
            stated = response.headers.get("Content-Length", "")
            if response.status == 200 and stated.isascii() and stated.isdigit() and int(stated) <= _MAX_NUMBER:
                return self._keep_size(key, int(stated))
        with self._asked(f"/{quote(key)}", {}, key) as response:  # the server does not answer HEAD with a length
            size = response.length
            return self._keep_size(key, _measure(response, key) if size is None else size)

    def _learn_size(self, key: str, response: http.client.HTTPResponse) -> None:
        if response.status == 200:
            size = response.length
        else:
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total) if _DIGITS.fullmatch(total) else None
        if size is not None:
            self._keep_size(key, size)

    def _keep_size(self, key: str, size: int) -> int:
        if is_content_addressed(key):
            if len(self._sizes) >= _MAX_SIZES:
                self._sizes.clear()
            self._sizes[key] = size
        return size

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects below a prefix; the entire listing is fetched and checked before the first.

        Raises:
            StoreError: the server cannot list, or its listing is malformed.
        """
        check_prefix(prefix)
        try:
            with self._asked(f"/?list={quote(prefix, safe='')}", {}, prefix) as response:
                if response.headers.get_content_type() != LISTING_TYPE:
                    raise self._cannot_list(prefix)
                if response.length is None:
                    _limit_time(response)
                data = _read(response, _MAX_LISTING + 1, prefix)
        except NotFoundError as e:
            raise self._cannot_list(prefix) from e
        return iter(_parse_listing(data, prefix))

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Send the heartbeat of a worker, which `pulse serve` and relays keep in memory; refuse everything else.

        Raises:
            ConflictError: another process sends heartbeats under this name; StoreError: this is not a heartbeat, or the
            server does not accept it.
        """
        if not is_heartbeat(key):
            raise self._read_only(key)
        check_key(key)
        with self._asked(f"/{quote(key)}", {WRITER_HEADER: self._writer}, key, "PUT", bytes(data)) as response:
            _skip(response, PIECE_BYTES, key)  # so that the connection can be used again

    def now(self) -> float:
        """Return the server's time in seconds since 1970, to a second, by its last answer; without one it is asked.

        Raises:
            StoreError: it does not answer, or does not state its time.
        """
        if self._now is None:
            with suppress(NotFoundError):
                self.get("head", 0, 1)
        if self._now is None:
            raise StoreError(f"{self.url} does not state its time in a Date header")
        stated_s, at_s = self._now
        return stated_s + time.monotonic() - at_s

    def forget(self, key: str) -> None:
        """Ask the server, and all caches in front of it, for a fresh copy the next time."""
        if len(self._doubted) >= _MAX_SIZES:  # a relay forwards what its clients report
            self._doubted.clear()
        self._doubted.add(key)
        self._sizes.pop(key, None)

    def close(self) -> None:
        """Close the idle connections; the store can still be used."""
        _close(self._idle)

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"{self.url} is read-only; write {key} to the store that this server serves", key=key)

    def _cannot_list(self, prefix: str) -> StoreError:
        return StoreError(
            f"{self.url} cannot list objects: serve the run with pulse serve or pulse relay, or give the "
            "address of the store itself",
            key=prefix,
        )

    @contextmanager
    def _asked(
        self, path: str, headers: dict[str, str], key: str, method: str = "GET", body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Yield the answer to a request, if its status is one of success; keep the connection if all was read."""
        try:
            connection, response = self._send(method, path, headers, body)
            self._learn_time(response)
            try:
                if not (method == "HEAD" and response.status in _NO_HEAD):
                    self._check(response, key)
                yield response
            finally:
                keep = _is_done(response)
                response.close()
                self._idle.append(connection) if keep else connection.close()
        except ssl.SSLCertVerificationError as e:
            raise StoreError(
                f"the certificate of {self.url} is not trusted: {e.verify_message}; pass the certificates to trust as "
                "cafile= (pulse relay --cafile), or set SSL_CERT_FILE to their file",
                key=key,
            ) from e
        except (OSError, http.client.HTTPException) as e:
            cause = str(e) or type(e).__name__
            verb = "send {} to" if body is not None else "read {} from"
            error = StoreError(f"cannot {verb.format(key)} {self.url}: {cause}", key=key, retryable=True)
            raise error.advise(unreachable(self.url)) from e

    def _learn_time(self, response: http.client.HTTPResponse) -> None:
        with suppress(TypeError, ValueError, OverflowError):  # it states none
            stated = parsedate_to_datetime(response.headers["Date"]).timestamp()
            age = response.headers.get("Age", "0")  # of an answer that a cache has kept
            self._now = stated + int(age if _DIGITS.fullmatch(age) else 0), time.monotonic()

    def _send(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[Connection, http.client.HTTPResponse]:
        """Send a request over a kept connection, or, if the server has closed that, over a new one."""
        kept = True
        while True:
            kept, connection = self._connection(kept)
            try:
                connection.clock.start()
                connection.request(method, self._path + path, body, self._headers | headers)
                response = connection.getresponse()
                connection.clock.start()  # for the body
                return connection, response
            except (ConnectionError, ssl.SSLEOFError):  # RemoteDisconnected is one
                connection.close()
                if not kept:
                    raise  # only a kept connection may have been closed long ago; this is a new one
                _close(self._idle)  # the others are as old, and each may take timeout_s to fail
                kept = False
            except BaseException:
                connection.close()
                raise

    def _connection(self, keep: bool) -> tuple[bool, Connection]:
        """Return a kept connection if there is one and `keep` is set, or a new one; and whether it was kept."""
        if keep:
            with suppress(IndexError):
                return True, self._idle.pop()
        clock = Deadline(self._timeout_s, self._min_bytes_per_s)
        return False, Connection(self._host, self._port, clock, self._tls)

    def _check(self, response: http.client.HTTPResponse, key: str) -> None:
        """Raise the error of a status, unless it is one of success or of a range beyond the object's end."""
        status = response.status
        if status not in (200, 206) and (response.length or 0) <= PIECE_BYTES:
            _skip(response, PIECE_BYTES, key)  # the text of the error; then the connection can be used again
        if status == 404:
            raise NotFoundError(f"there is no {key} at {self.url}", key=key)
        if status in (401, 403):
            wants = "does not accept this token" if self._headers else "requires a token"
            raise StoreError(
                f"{self.url} {wants} ({status}): pass token=, or set PULSE_TOKEN on the command line "
                "(PULSE_UPSTREAM_TOKEN for the upstream of a relay)",
                key=key,
            )
        if status == 409:
            raise ConflictError(
                f"{self.url} keeps {key} for another process, which sent it less than a minute ago: give each worker a "
                "name of its own",
                key=key,
            )
        if status not in (200, 206, 416):
            retryable = status in _BUSY or 500 <= status < 600
            answer = StoreError(f"{self.url} answers {status} for {key}", key=key, retryable=retryable)
            raise answer.advise(f"See the log of the server or proxy; pulse doctor {self.url} checks each step")
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise StoreError(
                f"{self.url} sends {key} with a Content-Encoding, which was not requested; turn compression off in the "
                "server or proxy",
                key=key,
            )


def _trust(cafile: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cafile)
    except OSError as e:  # ssl.SSLError is one
        raise StoreError(f"cannot read certificates from {cafile}: {e}; give a file in PEM format") from e


def _close(connections: list[Connection]) -> None:
    while connections:
        connections.pop().close()


def _range_size(response: http.client.HTTPResponse, begin: int, end: int | None, key: str) -> int:
    """Return how many bytes a partial answer states, after checking that they are the requested ones."""
    said = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(said)
    first, stop = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
    good = first == begin and stop > first and (end is None or stop <= end)
    if (
        good and match and match[3] != "*"
    ):  # the size is stated: then the answer must reach the requested end, or the object's
        size = int(match[3])
        good = stop == (size if end is None else min(end, size))
    if not good:
        asked = f"{begin}-{'' if end is None else end - 1}"
        raise StoreError(
            f"the request was for bytes {asked} of {key}, but the answer has {said[:80]!r}; check the server or proxy",
            key=key,
        )
    return stop - first


def _is_done(response: http.client.HTTPResponse) -> bool:
    """Return whether a connection is at the end of this answer and can be used for another request."""
    at_end = response.length == 0 or (response.length is None and response.isclosed())
    return at_end and not response.will_close


def _skip(response: http.client.HTTPResponse, count: int, key: str) -> int:
    """Read and discard bytes of an answer; return how many there were."""
    skipped = 0
    while skipped < count and (piece := _piece(response, count - skipped, key)):
        skipped += len(piece)
    return skipped


def _limit_time(response: http.client.HTTPResponse) -> None:
    """Limit the time of an answer that does not state its length, however fast it is sent."""
    assert isinstance(response, Response)
    response.clock.limit(_UNSTATED_TIMEOUTS * response.clock.timeout_s)


def _measure(response: http.client.HTTPResponse, key: str) -> int:
    """Return the length of an answer that does not state it, by reading it. Raises: StoreError, if it is too long."""
    _limit_time(response)
    size = _skip(response, _MAX_UNSTATED + 1, key)
    if size > _MAX_UNSTATED:
        raise StoreError(f"the server does not state the size of {key}, which exceeds {_MAX_UNSTATED} bytes", key=key)
    return size


def _read_whole(response: http.client.HTTPResponse, key: str) -> bytes:
    """Read an answer to its end. Raises: StoreError, if it is too long."""
    stated, limit = response.length, _MAX_WHOLE
    if stated is None:
        _limit_time(response)
        limit = _MAX_UNSTATED
    data = _read(response, limit + 1, key) if stated is None or stated <= limit else None
    if data is None or len(data) > limit:
        raise StoreError(f"{key} exceeds the {limit} bytes that are read at once; read it in ranges", key=key)
    return data


def _read(response: http.client.HTTPResponse, limit: int, key: str, exactly: bool = False) -> bytes:
    """Read an answer to its end or to a limit, whichever is first. exactly: it must reach the limit.

    Raises:
        StoreError: the connection was closed early; retryable.
    """
    data = io.BytesIO()  # returns its bytes without a copy
    while piece := _piece(response, limit - data.tell(), key):
        data.write(piece)
    if exactly and data.tell() != limit:
        raise StoreError(
            f"the connection was closed after {data.tell()} of {limit} bytes of {key}", key=key, retryable=True
        )
    return data.getvalue()


def _piece(response: http.client.HTTPResponse, limit: int, key: str) -> bytes:
    """Return the next bytes of an answer, at most limit; none at the limit and at the end."""
    # Not read(): a chunk whose size is −1 makes it read to the end of the connection, without a limit.
    piece = response.read1(min(PIECE_BYTES, limit)) if limit > 0 else b""
    if not piece and limit > 0 and response.length:
        raise StoreError(
            f"the connection was closed {response.length} bytes before the end of {key}", key=key, retryable=True
        )
    return piece[:limit]


def _parse_listing(data: bytes, prefix: str) -> list[ObjectEntry]:
    if len(data) > _MAX_LISTING:
        raise StoreError(f"the listing of {prefix} has more than {_MAX_LISTING} bytes, the most accepted", key=prefix)
    entries: list[ObjectEntry] = []
    for line in data.splitlines():
        entry = _entry(line, prefix)
        if entry is None or (entries and entry.key <= entries[-1].key):
            raise StoreError(f"the listing of {prefix} has a malformed line: {line[:80]!r}", key=prefix)
        entries.append(entry)
    return entries


def _entry(line: bytes, prefix: str) -> ObjectEntry | None:
    """Return the object that a line of a listing names, None if it names none below the prefix."""
    try:
        fields: Any = json.loads(line)
        key, size, modified = fields["key"], fields["size"], fields["modified"]
        check_key(key)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, StoreError):
        return None
    if not key.isprintable():  # half a surrogate pair cannot be encoded in a request
        return None
    numbers = type(size) is int and type(modified) in (int, float)
    if numbers and key.startswith(prefix) and 0 <= size <= _MAX_NUMBER and 0 <= modified <= _MAX_NUMBER:
        return ObjectEntry(key, size, float(modified))
    return None
