"""A connection to a web server on which every wait ends, however slowly the server sends.

The timeout of http.client is for one read from the socket: a server that sends a byte now and then never exceeds it.
Here each request has a clock, and every read and write may take the time that the clock has left.
"""

import http.client
import io
import math
import socket
import ssl
import time
from typing import Any

PIECE_BYTES = 1 << 18  # bytes that are read from a connection at once


class Deadline:
    """The time at which a request fails, unless more of its answer arrives."""

    def __init__(self, timeout_s: float, min_bytes_per_s: float) -> None:
        self.timeout_s = timeout_s
        self._portion = timeout_s * min_bytes_per_s
        self.start()

    def start(self) -> None:
        """Begin a request, or its body."""
        self._last_s = math.inf
        self._begin_portion()

    def limit(self, seconds: float, total_s: float | None = None) -> None:
        """End the body after this time in any case. total_s: the limit of all answers together, for the error."""
        self._total_s, self._last_s = seconds if total_s is None else total_s, time.monotonic() + seconds

    def _begin_portion(self) -> None:
        self._ends_at = time.monotonic() + self.timeout_s
        self._missing = self._portion

    def count(self, received: int) -> None:
        """Count bytes of a body; each full portion restarts the clock."""
        self._missing -= received
        if self._missing <= 0:
            self._begin_portion()

    def left_s(self) -> float:
        """Return the seconds that are left. Raises: TimeoutError, if there are none."""
        left = min(self._ends_at, self._last_s) - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def error(self) -> TimeoutError:
        """Return an error that names the limit that was exceeded."""
        if self._last_s < self._ends_at:
            return TimeoutError(f"timed out: the answer did not end within the limit of {self._total_s:g} s")
        return TimeoutError(f"timed out: the server is too slow for the limit of {self.timeout_s:g} s")


class Connection(http.client.HTTPConnection):
    """A connection, with TLS if there is a context for it, whose reads and writes have a deadline."""

    def __init__(self, host: str, port: int | None, clock: Deadline, tls: ssl.SSLContext | None) -> None:
        if tls is not None:
            self.default_port = http.client.HTTPS_PORT
        super().__init__(host, port, timeout=clock.timeout_s)
        self.response_class = Response
        self.clock = clock
        self._tls = tls

    def connect(self) -> None:
        """Connect, with the TLS handshake. Raises: TimeoutError, which names the limit; OSError."""
        try:
            super().connect()
            connected = self.sock
            if self._tls is not None:
                connected = self._tls.wrap_socket(connected, server_hostname=self.host)
        except TimeoutError as e:
            self.close()
            raise TimeoutError(f"timed out: no connection within the limit of {self.clock.timeout_s:g} s") from e
        except BaseException:
            self.close()
            raise
        self.sock = _ClockedSocket(connected, self.clock)  # has what http.client calls
        self.clock.start()


class Response(http.client.HTTPResponse):
    """An answer whose body is counted by the clock of its connection."""

    def __init__(self, sock: "_ClockedSocket", *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)  # type: ignore[arg-type]
        self.clock = sock.clock

    def read1(self, n: int = -1) -> bytes:
        piece = super().read1(n)
        self.clock.count(len(piece))
        return piece


class _ClockedSocket:
    """The methods of a socket that http.client uses, with a deadline."""

    def __init__(self, sock: socket.socket, clock: Deadline) -> None:
        self.sock, self.clock = sock, clock

    def sendall(self, data: bytes) -> None:
        self.sock.settimeout(self.clock.left_s())
        try:
            self.sock.sendall(data)
        except TimeoutError as e:
            raise self.clock.error() from e

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_ClockedReader(self), PIECE_BYTES)

    def shutdown(self, how: int) -> None:
        self.sock.shutdown(how)

    def close(self) -> None:
        self.sock.close()


class _ClockedReader(io.RawIOBase):
    """Reads from a socket; each read may take the time that the clock has left, however few bytes arrive."""

    def __init__(self, clocked: _ClockedSocket) -> None:
        self._clocked = clocked
        self._raw = clocked.sock.makefile("rb", buffering=0)  # keeps the socket open until the answer was read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._clocked.sock.settimeout(self._clocked.clock.left_s())
        try:
            return self._raw.readinto(buffer)
        except TimeoutError as e:
            raise self._clocked.clock.error() from e

    def close(self) -> None:
        self._raw.close()
        super().close()
