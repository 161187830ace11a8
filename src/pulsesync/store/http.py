"""Read a run over http or https: from `pulse serve`, a relay, a bucket's public address, or any web server.

The one thing that can be written is the heartbeat of a worker, which `pulse serve` and relays accept.

It uses only the standard library. Listing needs `pulse serve` or a relay as the server; everything else works with any
server of files, with or without range requests. The server's answers are checked: status, range, length, encoding,
every entry of a listing. The content of objects is checked by the reader, as with any store.
"""

import http.client
import io
import json
import re
import secrets
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

from pulsesync.core.location import ParsedLocation
from pulsesync.core.text import printable
from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store.base import (
    MAX_ENTRIES,
    ObjectEntry,
    ReadOnlyStore,
    is_content_addressed,
    too_many,
    too_slow,
    unreachable,
)
from pulsesync.store.deadlines import PIECE_BYTES, Response
from pulsesync.store.keys import check_key, check_prefix, is_heartbeat, is_listed
from pulsesync.store.tokens import IN_CLEAR, advise_token
from pulsesync.store.transport import (
    ENDLESS_TIMEOUTS,
    HttpTransport,
    clean_token,
    is_in_clear,
    limit_time,
    parse_server,
    read,
    skip,
)

LISTING_TYPE = "application/x-ndjson"  # one object a line: {"key": …, "size": bytes, "modified": seconds since 1970}
LISTING_MORE = "Pulse-Listing-More"  # header of a page: yes or no; an answer without it is the entire listing
WRITER_HEADER = "Pulse-Writer"  # a secret by which a server binds the name of a heartbeat to the client that sent it

_MAX_LISTING = 1 << 28  # bytes, which are parsed one line at a time
_MAX_LINE = 1 << 15
_MAX_NUMBER = 1 << 53
_RANGE = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16}|\*)", re.ASCII)
_DIGITS = re.compile(r"\d{1,16}", re.ASCII)
_BUSY = (408, 425, 429)  # these and all 5xx: the request may be repeated
_NO_HEAD = (405, 501)
_CAUSE_CHARACTERS = 500  # of a text that the server may have written
_MAX_SIZES = 1024  # sizes of objects that are kept in memory, and reports that were not sent yet
_MAX_UNSTATED = 1 << 30  # bytes of an answer that does not state its length, if the request has no end
_MAX_WHOLE = 1 << 36  # bytes of an answer that states its length, if the request has no end


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
        url: str | ParsedLocation,
        token: str | None = None,
        timeout_s: float = 30,
        cafile: str | None = None,
        *,
        min_bytes_per_s: float = 1 << 14,
        token_in_clear: bool = False,
    ) -> None:
        at = parse_server(url)
        if not (timeout_s > 0 and min_bytes_per_s > 0):
            raise ValueError(
                f"timeout_s and min_bytes_per_s must be positive, so that every request ends; got {timeout_s=}, "
                f"{min_bytes_per_s=}"
            )
        if token is not None:
            token = clean_token(token)
            if is_in_clear(at) and not token_in_clear:
                raise ValueError(
                    f"{at} is not https, so the token would be sent unencrypted to another machine; use https, or "
                    f"permit it with {IN_CLEAR}=1 in the environment, HttpStore(token_in_clear=True), or for a relay "
                    "--upstream-token-in-clear"
                )
        self._at, self.url = at, str(at).rstrip("/")
        self._transport = HttpTransport(at, token, timeout_s, cafile, min_bytes_per_s)
        self._listing_s = ENDLESS_TIMEOUTS * timeout_s
        self._writer = secrets.token_hex(16)
        self._now: tuple[float, float] | None = None  # the server's time, and the monotonic time at which it said so
        self._doubted: set[str] = set()  # keys whose next request must not be answered from a cache
        self._sizes: dict[str, int] = {}  # of content-addressed objects, as answers state them

    @property
    def has_token(self) -> bool:
        """Whether a token is sent with every request."""
        return self._transport.has_token

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
                return read(response, _range_size(response, begin, end, key), key, exactly=True)
            if skip(response, begin, key) < begin:
                return b""
            return _read_whole(response, key) if end is None else read(response, end - begin, key)

    def size(self, key: str) -> int:
        """Return an object's size in bytes, as an earlier answer stated it or by a HEAD request. Raises: as get."""
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

    def _learn_size(self, key: str, response: Response) -> None:
        size = response.length
        if response.status != 200:
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
        """Yield the objects below a prefix. A server that offers pages is asked for one after the other.

        Raises:
            StoreError: the server cannot list; retryable: it does not answer, or its listing is malformed. LimitError:
            it lists too many objects, or takes too long.
        """
        check_prefix(prefix)
        last, count, left_bytes, left_s, has_more = "", 0, _MAX_LISTING, self._listing_s, True
        while has_more:
            began_s = time.monotonic()
            try:
                data, has_more = self._page(prefix, last, left_s)
            except StoreError as e:
                if time.monotonic() - began_s >= left_s:
                    raise too_slow(prefix, self.url, self._listing_s) from e
                raise
            left_s, left_bytes = left_s - (time.monotonic() - began_s), left_bytes - len(data)
            if has_more and left_s <= 0:  # each page may have been in time
                raise too_slow(prefix, self.url, self._listing_s)
            if left_bytes < 0:
                raise too_many(f"{_MAX_LISTING:,} bytes", prefix, self.url)
            for line in io.BytesIO(data):
                entry = _entry(line, prefix)
                if entry is None or entry.key <= last:
                    # Retryable, because it may have been damaged in transit, and does not show that nothing is there.
                    malformed = f"the listing of {prefix} has a malformed line: {line[:80]!r}"
                    raise StoreError(malformed, key=prefix, retryable=True)
                if (count := count + 1) > MAX_ENTRIES:
                    raise too_many(f"{MAX_ENTRIES:,} objects", prefix, self.url)
                last = entry.key
                yield entry
            if has_more and not data:
                empty = f"{self.url} sends an empty page of the listing of {prefix}"
                raise StoreError(empty, key=prefix, retryable=True)

    def _page(self, prefix: str, after: str, left_s: float) -> tuple[bytes, bool]:
        """Return the lines of a listing after a key, and whether there are more; a server without pages sends all."""
        path = f"/?list={quote(prefix, safe='')}&after={quote(after, safe='')}"
        try:
            with self._asked(path, {}, prefix) as response:
                if response.headers.get_content_type() != LISTING_TYPE:
                    raise self._cannot_list(prefix)
                response.clock.limit(left_s, self._listing_s)
                return read(response, _MAX_LISTING + 1, prefix), response.headers.get(LISTING_MORE) == "yes"
        except NotFoundError as e:
            raise self._cannot_list(prefix) from e

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
            skip(response, PIECE_BYTES, key)  # so that the connection can be used again

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
        self._transport.close()

    def _read_only(self, key: str) -> StoreError:
        return StoreError(f"{self.url} is read-only; write {key} to the store that this server serves", key=key)

    def _cannot_list(self, prefix: str) -> StoreError:
        advice = "serve the run with pulse serve or pulse relay, or give the address of the store itself"
        return StoreError(f"{self.url} cannot list objects: {advice}", key=prefix)

    @contextmanager
    def _asked(
        self, path: str, headers: dict[str, str], key: str, method: str = "GET", body: bytes | None = None
    ) -> Iterator[Response]:
        """Yield the answer to a request, if its status is one of success."""
        try:
            with self._transport.ask(method, path, headers, body) as response:
                self._learn_time(response)
                if not (method == "HEAD" and response.status in _NO_HEAD):
                    self._check(response, key)
                yield response
        except ssl.SSLCertVerificationError as e:
            raise StoreError(
                f"the certificate of {self.url} is not trusted: {e.verify_message}; pass the certificates to trust as "
                "cafile= (pulse relay --cafile), or set SSL_CERT_FILE to their file",
                key=key,
            ) from e
        except (OSError, http.client.HTTPException) as e:
            cause = printable(str(e), _CAUSE_CHARACTERS) or type(e).__name__
            verb = "send {} to" if body is not None else "read {} from"
            error = StoreError(f"cannot {verb.format(key)} {self.url}: {cause}", key=key, retryable=True)
            raise error.advise(unreachable(self.url)) from e

    def _learn_time(self, response: Response) -> None:
        with suppress(TypeError, ValueError, OverflowError):  # it states none
            stated = parsedate_to_datetime(response.headers["Date"]).timestamp()
            age = response.headers.get("Age", "0")  # of an answer that a cache has kept
            self._now = stated + int(age if _DIGITS.fullmatch(age) else 0), time.monotonic()

    def _check(self, response: Response, key: str) -> None:
        """Raise the error of a status, unless it is one of success or of a range beyond the object's end."""
        status = response.status
        if status not in (200, 206) and (response.length or 0) <= PIECE_BYTES:
            skip(response, PIECE_BYTES, key)  # the text of the error; then the connection can be used again
        if status == 404:
            raise NotFoundError(f"there is no {key} at {self.url}", key=key)
        if status in (401, 403):
            wants = "does not accept this token" if self.has_token else "requires a token"
            raise StoreError(f"{self.url} {wants} ({status}): {advise_token(self._at)}", key=key)
        if status == 409:
            raise ConflictError(
                f"{self.url} keeps {key} for another process, which sent it less than a minute ago: give each worker a "
                "name of its own",
                key=key,
            )
        if 300 <= status < 400:
            raise StoreError(
                f"{self.url} answers {status} for {key}, which points to another address, and redirects are not "
                "followed: give the address of the server itself",
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


def _range_size(response: Response, begin: int, end: int | None, key: str) -> int:
    """Return how many bytes a partial answer states, after checking that they are the requested ones."""
    said = response.headers.get("Content-Range", "")
    match = _RANGE.fullmatch(said)
    first, stop = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
    good = first == begin and stop > first and (end is None or stop <= end)
    if good and match and match[3] != "*":
        size = int(match[3])  # is stated: then the answer must reach the requested end, or the object's
        good = stop == (size if end is None else min(end, size))
    if not good:
        asked = f"{begin}-{'' if end is None else end - 1}"
        raise StoreError(
            f"the request was for bytes {asked} of {key}, but the answer has {said[:80]!r}; check the server or proxy",
            key=key,
        )
    return stop - first


def _measure(response: Response, key: str) -> int:
    """Return the length of an answer that does not state it, by reading it. Raises: StoreError, if it is too long."""
    limit_time(response)
    size = skip(response, _MAX_UNSTATED + 1, key)
    if size > _MAX_UNSTATED:
        raise StoreError(f"the server does not state the size of {key}, which exceeds {_MAX_UNSTATED} bytes", key=key)
    return size


def _read_whole(response: Response, key: str) -> bytes:
    """Read an answer to its end. Raises: StoreError, if it is too long."""
    stated, limit = response.length, _MAX_WHOLE
    if stated is None:
        limit_time(response)
        limit = _MAX_UNSTATED
    data = read(response, limit + 1, key) if stated is None or stated <= limit else None
    if data is None or len(data) > limit:
        raise StoreError(f"{key} exceeds the {limit} bytes that are read at once; read it in ranges", key=key)
    return data


def _entry(line: bytes, prefix: str) -> ObjectEntry | None:
    """Return the object that a line of a listing names, None if it names none below the prefix."""
    if len(line) > _MAX_LINE:
        return None
    try:
        fields: Any = json.loads(line)
        key, size, modified = fields["key"], fields["size"], fields["modified"]
        if not is_listed(key):
            return None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    numbers = type(size) is int and type(modified) in (int, float)
    if numbers and key.startswith(prefix) and 0 <= size <= _MAX_NUMBER and 0 <= modified <= _MAX_NUMBER:
        return ObjectEntry(key, size, float(modified))
    return None
