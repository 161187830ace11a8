"""The process that answers: a port, a certificate, granian, and an end within a second when a signal says so."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsesync.errors import PulseError
from pulsesync.server.service import make_app, missing
from pulsesync.store.base import Store
from pulsesync.store.http import is_loopback

if TYPE_CHECKING:
    from granian.server.embed import Server

_CONNECTIONS = 1 << 14  # idle ones count; at this many the server would not accept another
_STOP_S = 0.3  # for what is under way when the server is told to stop, and again for what is then broken off
_START_S = 10.0


def serve(
    store: Store,
    host: str = "127.0.0.1",
    port: int = 8765,
    *,
    token: str | None = None,
    certificate: Path | None = None,
    private_key: Path | None = None,
    token_in_clear: bool = False,
    open_metrics: bool = False,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve a store until SIGINT or SIGTERM, then end within a second. To be called from the main thread.

    Args:
        store: What to serve; its verbs are called from many threads.
        host: The address to listen on; `0.0.0.0` for every one of this machine.
        port: 0 takes a free one.
        token: What clients have to show; anybody may read if there is none.
        certificate: PEM file, with the private key, for https.
        private_key: PEM file, not encrypted.
        token_in_clear: Let clients on other machines show the token without TLS, where everybody on the path can read
            it; for a server behind another one that has the certificate.
        open_metrics: Whether `/metrics` needs no token, for a Prometheus that sends none.
        on_ready: Called with the address once connections are accepted.

    Raises:
        ValueError: the token is empty, is not plain ASCII, or would travel in clear; a certificate or a private key is
            given without the other.
        PulseError: the extra is not installed, the port is taken, the certificate is not usable.
    """
    if (certificate is None) != (private_key is None):
        raise ValueError("https needs a certificate and its private key; only one of the two was given")
    app = make_app(store, token, open_metrics=open_metrics)
    if token is not None and certificate is None and not is_loopback(host) and not token_in_clear:
        raise ValueError(
            f"clients would send their token in clear to {host}: serve https with a certificate and its private key, "
            "or permit it with token_in_clear=True (--token-in-clear on the command line)"
        )
    try:
        from granian.constants import HTTPModes, Interfaces
        from granian.log import LogLevels
        from granian.server.embed import Server
    except ModuleNotFoundError as e:
        raise missing(e) from e
    port = _free_port(host, port)

    async def run() -> None:
        try:
            server = Server(
                app,
                address=host,
                port=port,
                interface=Interfaces.ASGINL,
                http=HTTPModes.http1,
                websockets=False,
                backlog=1024,
                backpressure=_CONNECTIONS,
                log_level=LogLevels.critical,
                ssl_cert=certificate,
                ssl_key=private_key,
            )
        except OSError as e:  # ssl.SSLError is one
            raise PulseError(f"cannot use the certificate {certificate} with the key {private_key}: {e}") from e
        await _run(server, host, port, lambda: on_ready(_url(certificate is not None, host, port)))

    asyncio.run(run())


async def _run(server: "Server", host: str, port: int, on_ready: Callable[[], None]) -> None:
    """Run a server until a signal stops it."""
    told = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    before, started = _foreign_threads(), set[str]()

    def ready() -> None:
        started.update(_foreign_threads() - before)
        on_ready()

    running = asyncio.create_task(server.serve())
    waiting = asyncio.create_task(_wait(host, port, ready, told))
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        await running  # raises, if it can say why it ended
        raise PulseError(f"the server on {host} port {port} ended by itself")
    standing = await waiting
    server.stop()  # type: ignore[no-untyped-call]
    await asyncio.wait({running}, timeout=_STOP_S)
    # It waits for answers under way, however long; and must not be cancelled itself, or complains on its way out.
    for answering in asyncio.all_tasks() - standing:
        answering.cancel()
    await asyncio.wait({running}, timeout=_STOP_S)
    if running.done():
        await _see_off(started)


async def _wait(host: str, port: int, on_ready: Callable[[], None], told: asyncio.Event) -> set["asyncio.Task[Any]"]:
    """Call on_ready as soon as a connection succeeds; when told to stop, return the tasks that were there before."""
    try:
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                    break
                except OSError:
                    await asyncio.sleep(0.01)
    except TimeoutError as e:
        raise PulseError(f"nothing accepts connections on {host} port {port} after {_START_S:g} s") from e
    writer.close()
    standing = asyncio.all_tasks()
    on_ready()
    await told.wait()
    return standing


async def _see_off(threads: set[str]) -> None:
    """Wait for the server's threads, which end a moment after the server did.

    One of them has yet to come back from telling that it ended. If the interpreter went away first, it would be stopped
    inside Rust, which panics (granian 2.8: 2 stops of 75).
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(_STOP_S):
            while threads & _foreign_threads():
                await asyncio.sleep(0.001)


def _foreign_threads() -> set[str]:
    """Return the threads of this process that Python did not start; none on a system that does not list them."""
    ours = {str(thread.native_id) for thread in threading.enumerate()}
    with suppress(OSError):
        return set(os.listdir("/proc/self/task")) - ours
    return set()


def _free_port(host: str, port: int) -> int:
    """Return a port that nobody listens on: the one asked for, or any for 0.

    The server would share a port that is taken with whoever has it (it sets SO_REUSEPORT), and does not tell which it
    took for 0. Raises: PulseError.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as e:
        raise PulseError(f"cannot listen on {host} port {port}: {e.strerror or e}") from e


def _url(secure: bool, host: str, port: int) -> str:
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
