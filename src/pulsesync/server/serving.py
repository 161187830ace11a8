"""The server process: a port, a certificate, granian, and a shutdown within a second after a signal."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pulsesync.core.extras import missing
from pulsesync.core.threads import SignalSafeFlag
from pulsesync.errors import PulseError
from pulsesync.server.connections import Connections
from pulsesync.server.service import make_app
from pulsesync.store.base import Store
from pulsesync.store.transport import is_loopback

if TYPE_CHECKING:
    from granian.server.embed import Server

_HEADER_S = 10  # for a client to send the header of its first request, or of its next one
_STOP_S = 0.3  # time for running answers to end after a signal, and again for those that are then cancelled
_EXIT_S = 1.0  # after a signal, until the process is ended, whatever keeps it
_START_S = 10.0
_BUFFER_BYTES = 1 << 16  # of an answer that the client does not read, and of a request's header; granian's own: 400 KB


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
    """Serve a store until SIGINT or SIGTERM, then end within a second. Call this from the main thread.

    If the store or the requests do not let it end in this time, the whole process is ended, with status 0.

    The soft limit of files that the process may open (`ulimit -n`) is set to what the connections need, or nearly as
    high as the system permits.

    Args:
        store: What to serve; many threads call its methods.
        host: The address to listen on; `0.0.0.0` for all addresses of this machine.
        port: The port to listen on; 0 for any free port.
        token: The token that clients must send; None: any client may read.
        certificate: PEM file of a certificate, with the private key, for https.
        private_key: PEM file of the certificate's private key, not encrypted.
        token_in_clear: Permit that clients on other machines send the token without TLS, so that it can be read on the
            network; for a server behind a reverse proxy that has the certificate.
        open_metrics: Whether `/metrics` needs no token, for a Prometheus that sends none.
        on_ready: Called with the address once connections are accepted.

    Raises:
        ValueError: the token is empty, is not plain ASCII, or would be sent unencrypted; a certificate or a private key
            is given without the other.
        PulseError: the extra is not installed, the port is in use, or the certificate cannot be used.
    """
    if (certificate is None) != (private_key is None):
        raise ValueError("https needs a certificate and its private key; only one of the two was given")
    app = make_app(store, token, open_metrics=open_metrics)
    if token is not None and certificate is None and not is_loopback(host) and not token_in_clear:
        raise ValueError(
            f"clients would send their token unencrypted to {host}: serve https with a certificate and its private "
            "key, or permit it with token_in_clear=True (--token-in-clear on the command line)"
        )
    try:
        import granian.server.embed  # noqa: F401 - what is not installed is named before anything is opened
    except ModuleNotFoundError as e:
        raise missing(e, "serve") from e
    port = _free_port(host, port)
    connections = Connections(app)

    async def run() -> None:
        server = _make_server(connections, host, port, certificate, private_key)
        watching = asyncio.create_task(connections.watch(port))
        await _run(server, host, port, lambda: on_ready(_url(certificate is not None, host, port)), ending)
        watching.cancel()

    ending, ended = SignalSafeFlag(), SignalSafeFlag()

    def exit_late() -> None:
        ending.wait()
        if not ended.wait(_EXIT_S):
            os._exit(0)

    # Started now: when the signal comes, the system may have no thread left.
    threading.Thread(target=exit_late, name="pulse-exit", daemon=True).start()
    try:
        asyncio.run(run())
    finally:
        ended.set()
        ending.set()


def _make_server(
    connections: Connections, host: str, port: int, certificate: Path | None, private_key: Path | None
) -> "Server":
    from granian.constants import HTTPModes, Interfaces
    from granian.http import HTTP1Settings
    from granian.log import LogLevels
    from granian.server.embed import Server

    try:
        return Server(
            connections,
            address=host,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=connections.backlog,
            backpressure=connections.limit,
            http1_settings=HTTP1Settings(header_read_timeout=round(_HEADER_S * 1000), max_buffer_size=_BUFFER_BYTES),
            log_level=LogLevels.critical,
            ssl_cert=certificate,
            ssl_key=private_key,
        )
    except OSError as e:  # ssl.SSLError is one
        raise PulseError(f"cannot use the certificate {certificate} with the key {private_key}: {e}") from e


async def _run(server: "Server", host: str, port: int, on_ready: Callable[[], None], ending: SignalSafeFlag) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def end(*_: object) -> None:
        ending.set()
        loop.call_soon_threadsafe(stop.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
        # The loop gets signals through the pipe by which threads wake it, and loses them when that is full: with 300
        # answers under way it often is.
        signal.signal(number, end)
    before, started = _foreign_threads(), set[str]()

    def ready() -> None:
        started.update(_foreign_threads() - before)
        on_ready()

    running = asyncio.create_task(server.serve())
    waiting = asyncio.create_task(_wait(host, port, ready, stop))
    await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        await running  # raises the reason, if there is one
        raise PulseError(f"the server on {host} port {port} ended unexpectedly; see the log for the reason")
    standing = await waiting
    server.stop()  # type: ignore[no-untyped-call]
    await asyncio.wait({running}, timeout=_STOP_S)
    # It waits for running answers, however long they take. It must not be cancelled itself: it would log errors.
    for answering in asyncio.all_tasks() - standing:
        answering.cancel()
    await asyncio.wait({running}, timeout=_STOP_S)
    if running.done():
        await _see_off(started)


async def _wait(host: str, port: int, on_ready: Callable[[], None], stop: asyncio.Event) -> set["asyncio.Task[Any]"]:
    """Call on_ready as soon as a connection succeeds; after the stop event, return the tasks that existed before."""
    try:
        async with asyncio.timeout(_START_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                    break
                except OSError:
                    await asyncio.sleep(0.01)
    except TimeoutError as e:
        raise PulseError(
            f"the server did not accept connections on {host} port {port} within {_START_S:g} s; check the address and "
            "the firewall"
        ) from e
    writer.close()
    standing = asyncio.all_tasks()
    on_ready()
    await stop.wait()
    return standing


async def _see_off(threads: set[str]) -> None:
    """Wait for the server's threads, which end a moment after the server.

    One of them is still returning from its last call. If the interpreter ended first, the thread would be stopped
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
    """Return a port on which no process listens: the given one, or any for 0.

    The server itself would share a port that is in use with the other process (it sets SO_REUSEPORT), and does not
    report which port it uses for 0. Raises: PulseError.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port with closing connections is free
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as e:
        raise PulseError(
            f"cannot listen on {host} port {port}: {e.strerror or e}; choose another port, or 0 for any free one"
        ) from e


def _url(secure: bool, host: str, port: int) -> str:
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
