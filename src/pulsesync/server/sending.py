"""How answers are sent: piece by piece, some pieces read ahead, until the client has left or takes too long."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pulsesync.errors import StoreError
from pulsesync.server.calls import in_thread
from pulsesync.store.base import WINDOW_BYTES

if TYPE_CHECKING:
    from starlette.types import Receive, Send

PIECE_BYTES = WINDOW_BYTES  # bytes of an object that are read at once, at multiples of this: a cache keeps such pieces
# A client that receives more slowly than this is dropped, so that a few of them cannot block the server. The limit is
# the one that our own clients set for a server: 16 KiB/s.
_SLICE = 1 << 18
SEND_BYTES_PER_S = 1 << 14
SEND_TIMEOUT_S = _SLICE / SEND_BYTES_PER_S

Read = Callable[[int, int], bytes]
Size = Callable[[], int]


@dataclass(frozen=True)
class RangeResponse:
    """An answer with bytes begin..end of an object in it, and the first piece of them."""

    status: int
    headers: dict[str, str]
    read: Read
    begin: int
    end: int
    piece: bytes

    async def send(self, receive: "Receive", send: "Send", ahead: int) -> None:
        """Send the answer piece by piece, until the client disconnects, with this many pieces read ahead.

        An error meanwhile closes the connection, so that the client sees that something is missing.
        """
        await send_start(send, self.status, self.headers)
        at = self.begin
        async with _watching(receive) as left, aclosing(self._pieces(ahead)) as pieces:
            async for piece in pieces:
                await send_piece(send, piece, more=True)
                at += len(piece)
                if left.done():
                    return
        if at != self.end:
            raise StoreError(f"an object ended {self.end - at} bytes early while it was sent")
        await send_piece(send, b"", more=False)

    async def _pieces(self, ahead: int) -> AsyncGenerator[bytes]:
        """Yield the piece that was read and then the others, some of them read ahead."""
        yield self.piece
        reading: deque[asyncio.Task[bytes]] = deque()
        try:
            for begin in range(self.begin + len(self.piece), self.end, PIECE_BYTES):
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
class ObjectRange:
    """Bytes begin..end of an object, and the first piece of them."""

    begin: int
    end: int
    size: int | None  # of the object; None if it is not known and was not needed
    piece: bytes


def find_range(read: Read, size: Size, asked: tuple[int | None, int | None]) -> ObjectRange:
    """Read the first piece of the requested range, and find out where that ends. Raises: StoreError."""
    begin, end = asked
    if begin is None:  # the last bytes
        total = size()
        begin, end = max(0, total - (end or 0)), total
    limit = _bounded(begin, end)
    piece = read(begin, limit)
    read_to = begin + len(piece)
    if read_to < limit and (piece or not begin):
        return ObjectRange(begin, read_to, read_to, piece)
    try:
        stated = size()
    except StoreError:
        if read_to != end:
            raise
        return ObjectRange(begin, end, None, piece)
    if piece and stated < read_to:
        raise StoreError("the object was replaced while it was read", retryable=True)
    return ObjectRange(begin, max(begin, stated if end is None else min(end, stated)), stated, piece)


def _bounded(begin: int, end: int | None) -> int:
    limit = begin - begin % PIECE_BYTES + PIECE_BYTES
    return limit if end is None else min(end, limit)


@asynccontextmanager
async def _watching(receive: "Receive") -> AsyncGenerator["asyncio.Task[None]"]:
    """Yield a task that is done once the client has disconnected: sending to one that has is no error."""

    async def leaving() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    left = asyncio.create_task(leaving())
    try:
        yield left
    finally:
        left.cancel()


async def while_connected(receive: "Receive", work: Coroutine[None, None, None]) -> bool:
    """Do something for as long as the client is there; return whether it was done. Raises: what the work raises."""
    task = asyncio.create_task(work)
    async with _watching(receive) as left:
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return task.done()
        finally:
            task.cancel()


async def send_start(send: "Send", status: int, headers: dict[str, str]) -> None:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})


async def send_piece(send: "Send", piece: bytes, more: bool) -> None:
    """Send a piece in slices. Raises: TimeoutError, if the client receives one of them too slowly."""
    for begin in range(0, max(1, len(piece)), _SLICE):
        body = piece[begin : begin + _SLICE]
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as e:
            raise TimeoutError(f"a client did not receive {len(body)} bytes within {SEND_TIMEOUT_S:g} s") from e
