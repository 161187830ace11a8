"""An ASGI application that serves a store: its objects, entire or in ranges, and its listings."""

import asyncio
import hashlib
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from pulsesync.errors import ConflictError, FormatError, NotFoundError, PulseError, StoreError
from pulsesync.run.heartbeats import printable
from pulsesync.server.board import MAX_BYTES, HeartbeatBoard
from pulsesync.server.calls import in_thread
from pulsesync.server.monitor import SentAnswer, ServerMonitor
from pulsesync.store.base import WINDOW_BYTES, Store, forget, is_content_addressed, is_near, size_of
from pulsesync.store.http import LISTING_TYPE, WRITER_HEADER, check_token
from pulsesync.store.keys import check_key, check_prefix, is_heartbeat

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_PIECE = WINDOW_BYTES  # bytes of an object that are read at once, at multiples of this: a cache keeps such pieces
_AHEAD = 3  # pieces read ahead while one is sent: an upstream 50 ms away then delivers 250 MB/s
_AHEAD_NEAR = 1  # the same for cached objects: a disk is faster than a connection
# Content-addressed objects that are read and sent at a time. A relay serves as many cached objects in addition, which
# an upstream that hangs must not delay. With the above, this takes at most 512 MiB, and 256 MiB for cached objects.
_BODIES = 32
_RECORDS = 1024  # all other requests: small, and a worker that polls may wait long for a store that does not answer
_LOOKS = 32  # requests at a time for which a cache is searched
# A client that receives more slowly than this is dropped, so that a few of them cannot block the server. The limit is
# the one that our own clients set for a server: 16 KiB/s.
_SLICE = 1 << 18
_SEND_TIMEOUT_S = _SLICE / (1 << 14)
_MAX_SIZE = 1 << 42  # bytes of an object; some file systems support no larger offsets
_RANGE = re.compile(r"bytes=(\d{0,16})-(\d{0,16})", re.ASCII)
_HEARTBEAT_S = 10.0  # in which a heartbeat must have arrived
_LEFT = 499  # what a request is counted as whose client left, or that the end of the server broke off, before an answer
_CAUSE_CHARACTERS = 500  # of an error, in the log
_LOG_EVERY_S = 10.0  # while a store does not answer, every request fails; this is logged at most this often

logger = logging.getLogger(__name__)


def make_app(store: Store, token: str | None = None, *, open_metrics: bool = False) -> "Starlette":
    """Return an ASGI application that serves a store for reading, to clients that send the token if there is one.

    `/healthz` and `/metrics` are answered by the server itself; no key of a run is either of them.

    Args:
        store: What to serve.
        token: What clients must send; without one, no token is required.
        open_metrics: Whether `/metrics` needs no token. `/healthz` never does.

    Raises:
        ValueError: the token is empty, or is not plain ASCII.
        PulseError: Starlette is not installed.
    """
    if token is not None:
        check_token(token)
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ModuleNotFoundError as e:
        raise missing(e) from e
    service = _Service(store, token, open_metrics)
    return Starlette(
        routes=[
            Route("/healthz", service.health, methods=["GET"]),
            Route("/metrics", service.metrics, methods=["GET"]),
            Route("/{key:path}", service, methods=["GET", "PUT"]),
        ]
    )


class _Service:
    """The application that answers."""

    def __init__(self, store: Store, token: str | None, open_metrics: bool = False) -> None:
        self._store = store
        self._board = HeartbeatBoard(store)
        self._monitor = ServerMonitor(store)
        self._open_metrics = open_metrics
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._bodies = asyncio.Semaphore(_BODIES)
        self._cached = asyncio.Semaphore(_BODIES)
        self._looks = asyncio.Semaphore(_LOOKS)
        self._records = asyncio.Semaphore(_RECORDS)
        self._logged_at = -_LOG_EVERY_S

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.requests import Request

        request, answer, began_s = Request(scope), SentAnswer(), time.monotonic()
        try:
            await self._respond(request, answer, receive, answer.counting(send))
        except BaseException as e:
            answer.store_failed |= isinstance(e, StoreError)
            answer.status = answer.status or (500 if isinstance(e, Exception) else _LEFT)
            raise
        finally:
            self._monitor.served(request.method, request.path_params["key"], answer, time.monotonic() - began_s)

    async def health(self, request: "Request") -> "Response":
        """Say whether the store answers, and nothing else: this needs no token."""
        from starlette.responses import JSONResponse

        up = await self._monitor.is_up()
        body = {"status": "ok" if up else "the store does not answer"}
        return JSONResponse(body, 200 if up else 503, {"Cache-Control": "no-store"})

    async def metrics(self, request: "Request") -> "Response":
        """Return what was counted, to clients that send the token, unless none is required for it."""
        from starlette.responses import Response

        if not self._open_metrics and not self._may_read(request.headers.get("authorization", "")):
            return _no_token()
        page, content_type = await self._monitor.page(request.headers.get("accept", ""))
        return Response(page, headers={"Cache-Control": "no-store", "Content-Type": content_type})

    async def _respond(self, request: "Request", answer: SentAnswer, receive: "Receive", send: "Send") -> None:
        if not self._may_read(request.headers.get("authorization", "")):
            await _no_token()(request.scope, receive, send)
            return
        if request.method == "PUT":
            await (await self._accept(request, receive))(request.scope, receive, send)
            return
        if not is_content_addressed(request.path_params["key"]):
            places, ahead = self._records, _AHEAD
        elif await self._is_cached(request):
            places, ahead, answer.cache = self._cached, _AHEAD_NEAR, "hit"
        else:
            places, ahead = self._bodies, _AHEAD
            answer.cache = "miss" if hasattr(self._store, "has") else "none"
        async with places:
            response = await self._answer(request, answer)
            if isinstance(response, _RangeResponse):
                await response.send(receive, send, ahead)
            else:
                await response(request.scope, receive, send)

    async def _accept(self, request: "Request", receive: "Receive") -> "Response":
        """Keep the heartbeat of a worker: the one thing that clients may write."""
        key = request.path_params["key"]
        if not is_heartbeat(key):
            return _words(405, "only heartbeats of workers can be written to this server", {"Allow": "GET, HEAD"})
        try:
            check_key(key)
            async with asyncio.timeout(_HEARTBEAT_S):
                self._board.put(key, await _read_body(receive, MAX_BYTES), request.headers.get(WRITER_HEADER))
        except TimeoutError:
            return _words(408, "the heartbeat did not arrive in time")
        except ConflictError:
            return _words(409, "another process sends heartbeats under this name")
        except (FormatError, StoreError) as e:
            if getattr(e, "retryable", False):
                return _words(429, "as many workers as are kept have sent heartbeats")
            return _words(400, "this is not a heartbeat")
        return _words(200, "kept")

    async def _is_cached(self, request: "Request") -> bool:
        """Return whether the store is a cache that has the requested range."""
        key, asks = request.path_params["key"], request.headers
        if not hasattr(self._store, "has") or "no-cache" in asks.get("cache-control", ""):
            return False
        begin, end = (0, 0) if request.method == "HEAD" else _asked_range(asks.get("range", "")) or (0, None)
        if begin is None:  # the last bytes
            begin, end = 0, None
        async with self._looks:
            return await in_thread(partial(is_near, self._store, key, begin, end))

    async def _answer(self, request: "Request", answer: SentAnswer) -> "_RangeResponse | Response":
        key, prefix = request.path_params["key"], request.query_params.get("list")
        try:
            if (key == "" or key.endswith("/")) and prefix is not None:
                return await in_thread(lambda: self._listing(key, prefix))
            return await in_thread(lambda: self._object(key, request.method == "HEAD", request.headers))
        except NotFoundError:
            return _words(404, "there is no such object")
        except StoreError as e:
            answer.store_failed = True
            status = 503 if e.retryable else 500
            if time.monotonic() - self._logged_at >= _LOG_EVERY_S:
                self._logged_at = time.monotonic()
                cause = printable(str(e), _CAUSE_CHARACTERS)  # it may contain a key, which a client has chosen
                logger.warning("Answered %.500r with %d, because the store failed: %s", key or prefix, status, cause)
            return _words(status, "the server's store failed; try again, or see the server's log")

    def _may_read(self, shown: str) -> bool:
        return self._authorization is None or secrets.compare_digest(shown.encode(), self._authorization)

    def _listing(self, folder: str, prefix: str) -> "Response":
        """List the objects below a prefix of a run, which may be in a folder of the store, with the run's keys."""
        from starlette.responses import Response

        try:
            check_prefix(prefix)
            check_prefix(folder + prefix)
        except StoreError:
            return _words(400, "the prefix to list must be a key that ends in a slash")
        lines = [
            json.dumps({"key": entry.key.removeprefix(folder), "size": entry.size_bytes, "modified": entry.modified_s})
            + "\n"
            for entry in self._board.list(folder + prefix, self._store.list(folder + prefix))
        ]
        return Response("".join(lines), media_type=LISTING_TYPE, headers={"Cache-Control": "no-store"})

    def _object(self, key: str, head: bool, asks: "Headers") -> "_RangeResponse | Response":
        """Decide what to answer, and read the first piece of it. Raises: NotFoundError, StoreError."""
        try:
            check_key(key)
        except StoreError:
            return _words(404, "there is no such object")
        read, size, headers = self._source(key)
        tag = headers.get("ETag")
        if tag is not None and _names(asks.get("if-none-match", ""), tag):
            size()  # raises NotFoundError; the tag of a content-addressed object does not show whether it exists
            return _RangeResponse(304, headers, read, 0, 0, b"")
        if head:
            headers["Content-Length"] = str(size())
            return _RangeResponse(200, headers, read, 0, 0, b"")
        if is_content_addressed(key) and "no-cache" in asks.get("cache-control", ""):
            forget(self._store, key)  # a reader found it bad
        asked = _asked_range(asks.get("range", "")) if asks.get("if-range", tag) == tag else None
        found = _find(read, size, asked or (0, None))
        if asked is not None and not found.piece:
            return _words(416, "the object ends before that range", {"Content-Range": f"bytes */{found.size}"})
        headers["Content-Length"] = str(found.end - found.begin)
        if asked is None:
            return _RangeResponse(200, headers, read, found.begin, found.end, found.piece)
        stated = "*" if found.size is None else found.size
        headers["Content-Range"] = f"bytes {found.begin}-{found.end - 1}/{stated}"
        return _RangeResponse(206, headers, read, found.begin, found.end, found.piece)

    def _source(self, key: str) -> tuple["_Read", "_Size", dict[str, str]]:
        """Return how to read an object, how to measure it, and the headers that do not depend on the range."""
        headers = {"Accept-Ranges": "bytes", "X-Content-Type-Options": "nosniff"}
        headers["Content-Type"] = "application/octet-stream"
        read, size = partial(self._store.get, key), partial(size_of, self._store, key)
        if is_content_addressed(key):
            # If a token is required, a shared cache must not serve the object to others, which "public" would permit.
            audience = "public" if self._authorization is None else "private"
            headers["Cache-Control"] = f"{audience}, max-age=31536000, immutable"
            headers["ETag"] = f'"{quote(key, safe="")}"'
            return read, size, headers
        headers["Cache-Control"] = "no-cache"
        start = self._board.get(key) or self._store.get(key, 0, _PIECE)
        if len(start) == _PIECE:
            return read, size, headers
        headers["ETag"] = f'"{hashlib.sha256(start).hexdigest()}"'
        return (
            lambda begin, end: start[begin:end],
            lambda: len(start),
            headers,
        )  # read once: it may be replaced meanwhile


_Read = Callable[[int, int], bytes]
_Size = Callable[[], int]


@dataclass(frozen=True)
class _RangeResponse:
    """An answer with bytes begin..end of an object in it, and the first piece of them."""

    status: int
    headers: dict[str, str]
    read: _Read
    begin: int
    end: int
    piece: bytes

    async def send(self, receive: "Receive", send: "Send", ahead: int) -> None:
        """Send the answer piece by piece, until the client disconnects, with this many pieces read ahead.

        An error meanwhile closes the connection, so that the client sees that something is missing.
        """
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        left = asyncio.create_task(_leaving(receive))  # sending to a client that has disconnected is no error
        at = self.begin
        try:
            async with aclosing(self._pieces(ahead)) as pieces:
                async for piece in pieces:
                    await _send_piece(send, piece, more=True)
                    at += len(piece)
                    if left.done():
                        return
        finally:
            left.cancel()
        if at != self.end:
            raise StoreError(f"an object ended {self.end - at} bytes early while it was sent")
        await _send_piece(send, b"", more=False)

    async def _pieces(self, ahead: int) -> AsyncGenerator[bytes]:
        """Yield the piece that was read and then the others, some of them read ahead."""
        yield self.piece
        reading: deque[asyncio.Task[bytes]] = deque()
        try:
            for begin in range(self.begin + len(self.piece), self.end, _PIECE):
                call = partial(self.read, begin, _bounded(begin, self.end))
                reading.append(asyncio.create_task(in_thread(call)))
                if len(reading) > ahead:
                    yield await reading.popleft()
            while reading:
                yield await reading.popleft()
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)


@dataclass(frozen=True)
class _ObjectRange:
    """Bytes begin..end of an object, and the first piece of them."""

    begin: int
    end: int
    size: int | None  # of the object; None if it is not known and was not needed
    piece: bytes


def _find(read: _Read, size: _Size, asked: tuple[int | None, int | None]) -> _ObjectRange:
    """Read the first piece of the requested range, and find out where the range ends.

    Raises:
        StoreError: the object cannot be read, or was replaced meanwhile.
    """
    begin, end = asked
    if begin is None:  # the last bytes
        total = size()
        begin, end = max(0, total - (end or 0)), total
    limit = _bounded(begin, end)
    piece = read(begin, limit)
    read_to = begin + len(piece)
    if read_to < limit and (piece or not begin):
        return _ObjectRange(begin, read_to, read_to, piece)
    try:
        stated = size()
    except StoreError:
        if read_to != end:
            raise
        return _ObjectRange(begin, end, None, piece)
    if piece and stated < read_to:
        raise StoreError("the object was replaced while it was read", retryable=True)
    return _ObjectRange(begin, max(begin, stated if end is None else min(end, stated)), stated, piece)


def _bounded(begin: int, end: int | None) -> int:
    """Return the end of a piece."""
    limit = begin - begin % _PIECE + _PIECE
    return limit if end is None else min(end, limit)


def _asked_range(header: str) -> tuple[int | None, int | None] | None:
    """Return begin and end of a Range header: (None, n) is the last n bytes, None is not a single range of bytes."""
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[0] == "bytes=-":
        return None
    if match[1] == "":
        return None, int(match[2])
    if match[2] == "":
        return min(int(match[1]), _MAX_SIZE), None
    begin, end = int(match[1]), int(match[2]) + 1
    return (min(begin, _MAX_SIZE), min(end, _MAX_SIZE)) if begin < end else None


def _names(header: str, tag: str) -> bool:
    """Say whether an If-None-Match header names a tag."""
    return any(name.strip().removeprefix("W/") == tag for name in header.split(","))


def _words(status: int, text: str, headers: dict[str, str] | None = None) -> "Response":
    """Return an answer without an object; no cache may keep it, because the object may exist the next time."""
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text + "\n", status, {"Cache-Control": "no-store", **(headers or {})})


async def _read_body(receive: "Receive", limit: int) -> bytes:
    """Read what a client sends: one byte more than the limit at most, which is enough to refuse it."""
    body, more = b"", True
    while more and len(body) <= limit:
        message = await receive()
        if message["type"] != "http.request":
            break  # the client has left
        body += message.get("body", b"")[: limit + 1]
        more = message.get("more_body", False)
    return body


def _no_token() -> "Response":
    return _words(401, "this server requires a token", {"WWW-Authenticate": "Bearer"})


async def _leaving(receive: "Receive") -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_piece(send: "Send", piece: bytes, more: bool) -> None:
    """Send a piece in slices. Raises: TimeoutError, if the client receives one of them too slowly."""
    for begin in range(0, max(1, len(piece)), _SLICE):
        body = piece[begin : begin + _SLICE]
        try:
            async with asyncio.timeout(_SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as e:
            raise TimeoutError(f"a client did not receive {len(body)} bytes within {_SEND_TIMEOUT_S:g} s") from e


def missing(error: ModuleNotFoundError) -> PulseError:
    return PulseError(f"{error.name} is not installed: pip install 'pulsesync[serve]'")
