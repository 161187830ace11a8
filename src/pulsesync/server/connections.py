"""The connections of a server: fewer than there are file descriptors, and half of them to one client at most.

Those beyond that are closed, idle ones first: before a request, only the system knows who has connected. A client that
finds its idle connection closed makes another.
"""

import asyncio
import errno
import ipaddress
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
_DESCRIPTORS = "/dev/fd"


class Connections:
    """An ASGI application that notes which connections have a request, and closes those of clients with too many.

    Args:
        app: What answers.
        limit: How many connections there may be.
    """

    def __init__(self, app: "ASGIApp", limit: int) -> None:
        self._app, self._limit = app, limit
        self._busy: set[tuple[str, int]] = set()

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
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            if len(list(_descriptors())) > self._limit // 2:
                await in_thread(lambda: close_excess(port, self._limit // 2, set(self._busy)))


def raise_limit() -> int:
    """Let this process open more files if the system permits it, and return how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS + _FILES if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS + _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return _CONNECTIONS if soft == resource.RLIM_INFINITY else min(_CONNECTIONS, soft - min(_FILES, soft // 2))


def close_excess(port: int, each: int, busy: Collection[tuple[str, int]]) -> int:
    """Close the connections of this process to a port that a client has beyond a number; return how many these were.

    Args:
        port: Of this process.
        each: How many connections one client may have: one IPv4 address, or the 2^64 addresses of one IPv6 network.
        busy: Addresses and ports of clients that wait for an answer; these are closed last.
    """
    by_client: defaultdict[bytes, list[tuple[bool, int]]] = defaultdict(list)
    closed = 0
    for number in _descriptors():
        if (peer := _peer(number, port)) is not None:
            by_client[_network(peer[0])].append((peer in busy, number))
    for connections in by_client.values():
        for _, number in sorted(connections)[: max(0, len(connections) - each)]:
            closed += _peer(number, port, close=True) is not None  # looked at again: it may be another one meanwhile
    return closed


def _descriptors() -> Iterable[int]:
    """Return the open file descriptors; all possible ones if none is left for looking, none if the system has no list.

    TLS handshakes are not among the connections that granian counts, so that they can use up what is left for files.
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


def _network(host: str) -> bytes:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).packed[:8]
