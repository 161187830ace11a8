"""An ASGI application that serves a store: its objects, entire or in ranges, and its listings."""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import quote

from pulsesync.core.extras import missing
from pulsesync.core.text import printable
from pulsesync.errors import ConflictError, FormatError, LimitError, NotFoundError, StoreError
from pulsesync.run.keys import HEARTBEATS
from pulsesync.server.board import MAX_BYTES, HeartbeatBoard
from pulsesync.server.calls import SharedBytes, SharedPlaces, in_thread
from pulsesync.server.connections import network
from pulsesync.server.listings import Listings, RecentEntries
from pulsesync.server.monitor import SentAnswer, ServerMonitor
from pulsesync.server.sending import (
    PIECE_BYTES,
    SEND_BYTES_PER_S,
    SEND_TIMEOUT_S,
    RangeResponse,
    Read,
    Size,
    find_range,
    send_piece,
    send_start,
    while_connected,
)
from pulsesync.store.base import ObjectEntry, Store, forget, is_content_addressed, is_near, size_of
from pulsesync.store.http import LISTING_MORE, LISTING_TYPE, WRITER_HEADER
from pulsesync.store.keys import check_key, check_prefix, is_heartbeat
from pulsesync.store.transport import clean_token

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_AHEAD = 3  # pieces read ahead while one is sent: an upstream 50 ms away then delivers 250 MB/s
_AHEAD_NEAR = 1  # the same for cached objects: a disk is faster than a connection
# Content-addressed objects that are read and sent at a time. A relay serves as many cached objects in addition, which
# an upstream that hangs must not delay. With the above, this takes at most 512 MiB, and 256 MiB for cached objects.
_BODIES = 32
_RECORDS = 1024  # all other requests: small, and a worker that polls may wait long for a store that does not answer
_LOOKS = 32  # requests at a time for which a cache is searched
# Listings that are sent at a time, and of these to one client. Each that its client does not read takes 250 KB (512 of
# 11 MB, measured): 260 MB at most. With slices four times and granian's buffer six times as large it was 900 KB. Those
# of the same second share their bytes; slow clients may keep those of many seconds.
_LISTINGS, _LISTINGS_EACH = 1024, 512
_LISTING_BYTES = 1 << 28  # of listings that differ and are being sent, half of them to one client
_LISTING_SLICE = 1 << 14
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
        token = clean_token(token)
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ModuleNotFoundError as e:
        raise missing(e, "serve") from e
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
        self._sent_listings = SharedPlaces(_LISTINGS, _LISTINGS_EACH)
        self._listing_bytes = SharedBytes(_LISTING_BYTES)
        self._listings, self._recent = Listings(self._list), RecentEntries(store.list)
        self._logged_at = -_LOG_EVERY_S

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.requests import Request

        request, answer, began_s = Request(scope, receive), SentAnswer(), time.monotonic()
        try:
            await self._respond(request, answer, answer.counting(send))
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

    async def _respond(self, request: "Request", answer: SentAnswer, send: "Send") -> None:
        if not self._may_read(request.headers.get("authorization", "")):
            await _no_token()(request.scope, request.receive, send)
            return
        if request.method == "PUT":
            await (await self._accept(request))(request.scope, request.receive, send)
            return
        key, prefix = request.path_params["key"], request.query_params.get("list")
        if prefix is not None and (key == "" or key.endswith("/")):
            await self._send_listing(key, prefix, request, answer, send)
            return
        if not is_content_addressed(key):
            places, ahead = self._records, _AHEAD
        elif await self._is_cached(request):
            places, ahead, answer.cache = self._cached, _AHEAD_NEAR, "hit"
        else:
            places, ahead = self._bodies, _AHEAD
            answer.cache = "miss" if hasattr(self._store, "has") else "none"
        async with places:
            response = await self._answer(request, answer)
            if isinstance(response, RangeResponse):
                await response.send(request.receive, send, ahead)
            else:
                await response(request.scope, request.receive, send)

    async def _accept(self, request: "Request") -> "Response":
        """Keep the heartbeat of a worker: the one thing that clients may write."""
        key = request.path_params["key"]
        if not is_heartbeat(key):
            return _words(405, "only heartbeats of workers can be written to this server", {"Allow": "GET, HEAD"})
        try:
            check_key(key)
            async with asyncio.timeout(_HEARTBEAT_S):
                secret = request.headers.get(WRITER_HEADER)
                self._board.put(key, await _read_body(request.receive, MAX_BYTES), secret, _client(request))
                self._listings.forget(key)
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

    async def _answer(self, request: "Request", answer: SentAnswer) -> "RangeResponse | Response":
        key = request.path_params["key"]
        try:
            return await in_thread(lambda: self._object(key, request.method == "HEAD", request.headers))
        except NotFoundError:
            return _words(404, "there is no such object")
        except StoreError as e:
            return self._failed(key, e, answer)

    def _failed(self, asked: str, error: StoreError | LimitError, answer: SentAnswer) -> "Response":
        answer.store_failed = True
        status = 503 if isinstance(error, StoreError) and error.retryable else 500
        if time.monotonic() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = time.monotonic()
            cause = printable(str(error), _CAUSE_CHARACTERS)  # it may contain a key, which a client has chosen
            logger.warning("Answered %.500r with %d, because the store failed: %s", asked, status, cause)
        return _words(status, "the server's store failed; try again, or see the server's log")

    def _list(self, prefix: str) -> Iterable[ObjectEntry]:
        if not prefix.endswith(HEARTBEATS):
            return self._store.list(prefix)
        # Each heartbeat that comes has its listing made again, but the store is not asked again.
        return self._board.list(prefix, self._recent.get(prefix))

    def _may_read(self, shown: str) -> bool:
        return self._authorization is None or secrets.compare_digest(shown.encode(), self._authorization)

    async def _send_listing(
        self, folder: str, prefix: str, request: "Request", answer: SentAnswer, send: "Send"
    ) -> None:
        """List the objects below a prefix of a run, which may be in a folder of the store, with the run's keys.

        A request with `after=` gets the next page after that key, and whether it is the last one; any other gets all.
        """
        try:
            check_prefix(prefix)
            check_prefix(folder + prefix)
        except StoreError:
            words = _words(400, "the prefix to list must be a key that ends in a slash")
            await words(request.scope, request.receive, send)
            return
        if not await while_connected(request.receive, self._send_lines(folder, prefix, request, answer, send)):
            answer.status = answer.status or _LEFT

    async def _send_lines(self, folder: str, prefix: str, request: "Request", answer: SentAnswer, send: "Send") -> None:
        client = _client(request)
        async with self._sent_listings.taken(client):
            try:
                listing = await self._listings.get(folder, prefix, client)
            except (StoreError, LimitError) as e:
                await self._failed(prefix, e, answer)(request.scope, request.receive, send)
                return
            headers, data = {"Content-Type": LISTING_TYPE, "Cache-Control": "no-store"}, listing.data
            if (after := request.query_params.get("after")) is not None:
                data, more = listing.page(after)
                headers[LISTING_MORE] = "yes" if more else "no"
            del listing  # its keys take as much again
            headers["Content-Length"] = str(len(data))
            with ExitStack() as sending:
                try:
                    sending.enter_context(self._listing_bytes.taken(client, data))
                except StoreError as e:
                    await self._failed(prefix, e, answer)(request.scope, request.receive, send)
                    return
                await send_start(send, 200, headers)
                async with asyncio.timeout(SEND_TIMEOUT_S + len(data) / SEND_BYTES_PER_S):
                    for begin in range(0, len(data) if request.method == "GET" else 0, _LISTING_SLICE):
                        await send_piece(send, data[begin : begin + _LISTING_SLICE], more=True)
                    await send_piece(send, b"", more=False)

    def _object(self, key: str, head: bool, asks: "Headers") -> "RangeResponse | Response":
        """Decide what to answer, and read the first piece of it. Raises: NotFoundError, StoreError."""
        try:
            check_key(key)
        except StoreError:
            return _words(404, "there is no such object")
        read, size, headers = self._source(key)
        tag = headers.get("ETag")
        if tag is not None and _names(asks.get("if-none-match", ""), tag):
            size()  # raises NotFoundError; the tag of a content-addressed object does not show whether it exists
            return RangeResponse(304, headers, read, 0, 0, b"")
        if head:
            headers["Content-Length"] = str(size())
            return RangeResponse(200, headers, read, 0, 0, b"")
        if is_content_addressed(key) and "no-cache" in asks.get("cache-control", ""):
            forget(self._store, key)  # a reader found it bad
        asked = _asked_range(asks.get("range", "")) if asks.get("if-range", tag) == tag else None
        found = find_range(read, size, asked or (0, None))
        if asked is not None and not found.piece:
            return _words(416, "the object ends before that range", {"Content-Range": f"bytes */{found.size}"})
        headers["Content-Length"] = str(found.end - found.begin)
        if asked is None:
            return RangeResponse(200, headers, read, found.begin, found.end, found.piece)
        stated = "*" if found.size is None else found.size
        headers["Content-Range"] = f"bytes {found.begin}-{found.end - 1}/{stated}"
        return RangeResponse(206, headers, read, found.begin, found.end, found.piece)

    def _source(self, key: str) -> tuple[Read, Size, dict[str, str]]:
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
        start = self._board.get(key) or self._store.get(key, 0, PIECE_BYTES)
        if len(start) == PIECE_BYTES:
            return read, size, headers
        headers["ETag"] = f'"{hashlib.sha256(start).hexdigest()}"'
        # Read once: it may be replaced meanwhile.
        return (lambda begin, end: start[begin:end]), (lambda: len(start)), headers


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


def _client(request: "Request") -> str:
    return network(request.client.host).hex() if request.client is not None else ""


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
