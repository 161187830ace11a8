"""A TCP proxy on loopback between a real client and a real server, which misbehaves on request.

Modes: `pass` (bytes go through), `hang` (connections stay open and nothing moves), `trickle` (one byte every 0.4 s from
the server), `refuse` (every request is answered with 403), `drop` (connections are closed).
"""

import contextlib
import socket
import threading
import time
from typing import Literal

Mode = Literal["pass", "hang", "trickle", "refuse", "drop"]

_DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
_REFUSAL = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b"
    % (len(_DENIED), _DENIED)
)
_TRICKLE_S = 0.4


class Proxy:
    """Listens on a port of its own; `mode` may be changed at any time, also for connections that are open."""

    def __init__(self, host: str, port: int) -> None:
        self.mode: Mode = "pass"
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        for one in list(self._open):
            self._end(one)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._open |= {client, server}
        back = threading.Thread(target=self._pump, args=(server, client, False), daemon=True)
        back.start()
        self._pump(client, server, True)

    def _pump(self, source: socket.socket, sink: socket.socket, from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if not self._pass_on(data, source, sink, from_client):
                    break
        self._end(source)
        self._end(sink)

    def _pass_on(self, data: bytes, source: socket.socket, sink: socket.socket, from_client: bool) -> bool:
        """Whether the connection goes on after these bytes."""
        while self._is("hang") and not self._closed:
            time.sleep(0.02)
        if self._is("drop") or self._closed:
            return False
        if self._is("refuse"):
            if from_client:
                source.sendall(_REFUSAL)
            return False
        if self._is("trickle") and not from_client:
            for i in range(len(data)):
                if not self._is("trickle"):
                    sink.sendall(data[i:])
                    break
                sink.sendall(data[i : i + 1])
                time.sleep(_TRICKLE_S)
            return True
        sink.sendall(data)
        return True

    def _is(self, mode: Mode) -> bool:
        """Asked again each time: another thread may have changed it."""
        return self.mode == mode

    def _end(self, one: socket.socket) -> None:
        self._open.discard(one)
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
