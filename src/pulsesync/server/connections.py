"""The connections of a server: fewer than there are file descriptors, and half of them to one client at most.

Those beyond that are closed if they are idle, and the others only when little room is left: before a request, only the
system knows who has connected. A client that finds its idle connection closed makes another.
"""

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import stat
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from pulsesync.server.calls import in_thread

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_CONNECTIONS = 1 << 14  # the most, including idle ones
_FILES = 1 << 12  # descriptors that are left for files and for connections to an upstream
_LOOK_EVERY_S = 0.25
_BACKLOG = 1 << 10  # connections that wait to be accepted
_SPARE = 64  # descriptors beyond these, by which the limit is raised when none is left
_DESCRIPTORS = "/dev/fd"

logger = logging.getLogger(__name__)


class Connections:
    """An ASGI application that notes which connections have a request, and closes those of clients with too many.

    It lets this process open more files, if the system permits that, and leaves some of them for files.
    """

    def __init__(self, app: "ASGIApp") -> None:
        self._app = app
        self._busy: set[tuple[str, int]] = set()
        self._all = _permitted()
        # Connections that may wait to be accepted (granian takes no fewer than 128), and that there may be.
        self.backlog = min(_BACKLOG, max(128, self._all // 8))
        self._usual = max(self._all // 2, self._all - self.backlog - _SPARE)
        self.limit = min(_CONNECTIONS, self._usual - min(_FILES, self._usual // 2))
        self._let_open(self._usual)

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        host, port = scope.get("client") or ("", 0)
        client = host, int(port)  # granian 2.8 gives the port as a text
        self._busy.add(client)
        try:
            await self._app(scope, receive, send)
        finally:
            self._busy.discard(client)

    async def watch(self, port: int) -> None:
        """Close connections to this port that are too many, four times a second, as long as this is not cancelled."""
        warned = False
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self._look(port)
            except Exception as e:  # noqa: BLE001 - a look that fails, for instance for lack of a thread, is not the last
                if not warned:
                    logger.warning("Connections beyond the limits could not be closed; this is tried again: %s", e)
                warned = True

    async def _look(self, port: int) -> None:
        descriptors = _descriptors()
        number = None if isinstance(descriptors, range) else len(list(descriptors))
        if number is None or number > self.limit // 2:
            await in_thread(lambda: close_excess(port, self.limit, set(self._busy)))
        # Without a descriptor to accept with, granian 2.8 tends no TLS handshake, not even one whose client has
        # left, and so gets none back. It does so again when it has accepted all that wait.
        if number is None:
            self._let_open(self._all)
        elif number < self._usual - _SPARE:
            self._let_open(self._usual)

    def _let_open(self, files: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _permitted() -> int:
    """Return how many files this process may open, if its limit is raised as far as the system permits and needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, _CONNECTIONS + _FILES + _BACKLOG + _SPARE)
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


def close_excess(port: int, limit: int, busy: Collection[tuple[str, int]]) -> int:
    """Close the connections of this process to a port that a client has beyond its share; return how many these were.

    Args:
        port: Of this process.
        limit: How many connections there may be. Half of them is the share of a client: of one IPv4 address, or the
            2^64 addresses of one IPv6 network.
        busy: Addresses and ports of clients that wait for an answer. Many of them may share an address, so these are
            closed only to keep an eighth of the limit free for others.
    """
    by_client: defaultdict[bytes, list[tuple[bool, int]]] = defaultdict(list)
    closed = 0
    for number in _descriptors():
        if (peer := _peer(number, port)) is not None:
            by_client[network(peer[0])].append((peer in busy, number))
    total = sum(map(len, by_client.values()))
    for connections in by_client.values():
        for is_busy, number in sorted(connections)[: max(0, len(connections) - limit // 2)]:
            if is_busy and total - closed <= limit - limit // 8:
                break
            closed += _peer(number, port, close=True) is not None  # looked at again: it may be another one meanwhile
    return closed


def _descriptors() -> Iterable[int]:
    """Return the open file descriptors; all possible ones if none is left for looking, none if the system has no list.

    None can be left, because granian does not count TLS handshakes among the connections.
    """
    try:
        return map(int, os.listdir(_DESCRIPTORS))
    except OSError as e:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if e.errno == errno.EMFILE else ()


def _peer(number: int, port: int, close: bool = False) -> tuple[str, int] | None:
    """Return the address of the client that is connected to a port of this process, and perhaps close the connection.

    None if the file descriptor is anything else. It belongs to granian, which sees the end of the connection.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return None
        connection = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.getsockname()[1] != port:
            return None
        host, peer_port = connection.getpeername()[:2]
        if close:
            connection.shutdown(socket.SHUT_RDWR)
        return str(host), int(peer_port)
    except OSError:
        return None
    finally:
        connection.detach()


def network(host: str) -> bytes:
    """Return what counts as one client: an IPv4 address, or the 2^64 addresses of one IPv6 network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # not a host: a test, or a socket of a file
        return host.encode()
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]
