"""The channel from workers to the trainer: they request work and send completions, over a local socket.

A message is a line of JSON, followed by arrays as safetensors; nothing is unpickled. Both ends first prove that they
know the run's secret (multiprocessing.connection's handshake). A worker that loses its connection connects again.
"""

import json
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from torch import Tensor

Message = tuple[dict[str, Any], dict[str, Tensor]]

LARGEST = 1 << 28
HOST = "127.0.0.1"


def pack(facts: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> bytes:
    from safetensors.torch import save

    return json.dumps(facts).encode() + b"\n" + save(tensors or {})


def unpack(data: bytes) -> Message:
    from safetensors.torch import load

    line, _, rest = data.partition(b"\n")
    return json.loads(line), load(rest)


class TrainerEndpoint:
    """The trainer's end: accepts connections, receives messages, and answers."""

    def __init__(self, secret: bytes, port: int = 0) -> None:
        self._listener = Listener((HOST, port), backlog=64, authkey=secret)

    @property
    def port(self) -> int:
        return int(self._listener.address[1])

    def accept(self) -> Connection:
        """Wait for a connection, in a separate thread. Raises: OSError, once it is closed."""
        while True:
            try:
                return self._listener.accept()
            except (EOFError, ConnectionError, AuthenticationError):  # closed, or without the secret
                continue

    def close(self) -> None:
        self._listener.close()


class WorkerEndpoint:
    """A worker's end: sends a message, and waits for the answer; reconnects as often as needed."""

    def __init__(self, port: int, secret: bytes, patience_s: float) -> None:
        self._port, self._secret, self._patience_s = port, secret, patience_s
        self._connection: Connection | None = None

    def ask(self, facts: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> dict[str, Any]:
        """Send a message and return the answer. Raises: ConnectionError, if there is no answer in time."""
        data, until = pack(facts, tensors), time.monotonic() + self._patience_s
        while True:
            try:
                if self._connection is None:
                    self._connection = Client((HOST, self._port), authkey=self._secret)
                self._connection.send_bytes(data)
                return unpack(self._connection.recv_bytes(LARGEST))[0]
            except (EOFError, OSError):
                self.close()
                if time.monotonic() > until:
                    raise ConnectionError(f"no trainer has answered for {self._patience_s:.0f} s") from None
                time.sleep(0.1)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
