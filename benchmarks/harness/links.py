"""Slow links on one machine, to measure what a run costs on one.

    with open_link() as link:                           # namespaces where that is allowed, else a proxy
        server = link.start(SERVER, "trainer")          # a process at one end
        url = link.reach(port)                          # how the other end gets to a port of it
        worker = link.start(WORKER, "worker")
        link.shape(100e6)                               # bits a second, both ways; None: as fast as it goes

`Namespaces` shapes packets in the kernel (two network namespaces, a veth pair, `tc tbf` at both ends) and needs root.
`Proxy` needs no privileges: a thread forwards bytes at the given rate. Neither adds latency. Where connections cannot
go through a proxy, as gloo's cannot, `pace_sockets` makes the kernel limit the rate at which a process sends; it needs
no root.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
End = Literal["trainer", "worker"]
SO_MAX_PACING_RATE = 47  # of Linux; Python's socket module does not name it


class Link:
    """Processes at two ends, and the link between them. Closing it ends all processes that it started."""

    name = ""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], end: End, **options: Any) -> "subprocess.Popen[str]":
        """Start a process at one end, with pipes, in ROOT; it is to finish when its standard input does."""
        process = subprocess.Popen(
            [*self._inside(end), *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        self._started.append(process)
        return process

    def reach(self, port: int) -> str:
        """The address by which the worker's end gets to a port of the trainer's."""
        raise NotImplementedError

    def shape(self, bits_per_s: float | None) -> None:
        raise NotImplementedError

    def carried(self) -> int:
        """Bytes that have gone from the trainer's end to the worker's."""
        raise NotImplementedError

    @property
    def host(self) -> str:
        """Where servers at the trainer's end listen."""
        return "127.0.0.1"

    def close(self) -> None:
        for process in self._started:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
        for process in self._started:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._started.clear()

    def _inside(self, end: End) -> list[str]:
        return []

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Namespaces(Link):
    """Two network namespaces and a veth pair between them. Raises: OSError, where that is not allowed."""

    name = "two network namespaces, a veth pair, tc tbf at both ends"

    def __init__(self) -> None:
        super().__init__()
        if not (shutil.which("ip") and shutil.which("tc")):
            raise OSError("ip and tc are not installed")
        _remove_left_over()
        self._spaces: dict[End, str] = {end: f"pulsebench-{os.getpid()}-{end}" for end in ("trainer", "worker")}
        self._devices: dict[End, str] = {"trainer": "pulse0", "worker": "pulse1"}
        try:
            for space in self._spaces.values():
                _run("ip", "netns", "add", space)
            ours, theirs = self._spaces["trainer"], self._spaces["worker"]
            peer = ("peer", "name", "pulse1", "netns", theirs)
            _run("ip", "link", "add", "pulse0", "netns", ours, "type", "veth", *peer)
            for number, (end, space) in enumerate(self._spaces.items(), 1):
                _run("ip", "-n", space, "addr", "add", f"10.213.77.{number}/30", "dev", self._devices[end])
                _run("ip", "-n", space, "link", "set", "lo", "up")
                _run("ip", "-n", space, "link", "set", self._devices[end], "up")
        except BaseException:
            self.close()
            raise

    @property
    def host(self) -> str:
        return "10.213.77.1"

    def reach(self, port: int) -> str:
        return f"http://{self.host}:{port}"

    def shape(self, bits_per_s: float | None) -> None:
        for end, space in self._spaces.items():
            place = ("dev", self._devices[end], "root")
            if bits_per_s is None:
                with suppress(OSError):  # there was none
                    _run("tc", "-n", space, "qdisc", "del", *place)
                continue
            # The bytes that may be sent at once after an idle time: few compared with a transfer, and enough for the
            # timer to keep the rate.
            burst = max(4000, int(bits_per_s / 8 * 0.001))
            shaper = ("tbf", "rate", f"{int(bits_per_s)}bit", "burst", f"{burst}b", "latency", "50ms")
            _run("tc", "-n", space, "qdisc", "replace", *place, *shaper)

    def carried(self) -> int:
        show = _run("ip", "-n", self._spaces["trainer"], "-s", "-j", "link", "show", "dev", "pulse0")
        return int(json.loads(show)[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        super().close()
        for space in self._spaces.values():
            with suppress(OSError):
                _run("ip", "netns", "del", space)  # the pair goes with it

    def _inside(self, end: End) -> list[str]:
        return ["ip", "netns", "exec", self._spaces[end]]


class Proxy(Link):
    """One thread for each direction of each connection; those to the worker share one rate."""

    name = "a proxy that forwards bytes at a rate (no network namespaces here)"

    def __init__(self) -> None:
        super().__init__()
        self._rate: float | None = None  # bytes a second
        self._free_at = 0.0
        self._carried = 0
        self._lock = threading.Lock()
        self._listening: list[socket.socket] = []

    def reach(self, port: int) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        self._listening.append(listening)
        threading.Thread(target=self._accept, args=(listening, port), daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    def shape(self, bits_per_s: float | None) -> None:
        with self._lock:
            self._rate, self._free_at = bits_per_s and bits_per_s / 8, 0.0

    def carried(self) -> int:
        return self._carried

    def close(self) -> None:
        super().close()
        for listening in self._listening:
            listening.close()

    def _accept(self, listening: socket.socket, port: int) -> None:
        with suppress(OSError):  # closed
            while True:
                inner, _ = listening.accept()
                outer = socket.create_connection(("127.0.0.1", port))
                for pair in ((inner, outer, False), (outer, inner, True)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(self._piece()):
                if slow:
                    self._wait(len(data))
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _piece(self) -> int:
        return 1 << 18 if self._rate is None else min(1 << 18, max(1500, int(self._rate * 0.002)))

    def _wait(self, size: int) -> None:
        with self._lock:
            self._carried += size
            if self._rate is None:
                return
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size / self._rate
            wait_s = self._free_at - now
        time.sleep(wait_s)


def open_link(kind: str = "auto") -> Link:
    """Open the best kind of link that this machine allows, or the given kind."""
    if kind in ("auto", "netns"):
        try:
            return Namespaces()
        except OSError:
            if kind == "netns":
                raise
    return Proxy()


def pace_sockets(bits_per_s: float | None) -> int:
    """Limit the send rate of each current TCP connection of this process; return the number of connections.

    Linux paces what TCP sends by timers of its own (SO_MAX_PACING_RATE); None: as fast as it goes. Others, such as
    gVisor, take the option and may do nothing: measure what a link then gives.
    """
    rate = (1 << 64) - 1 if bits_per_s is None else int(bits_per_s / 8)
    paced = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # not a socket, or the listing itself
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate.to_bytes(8, sys.byteorder))
                paced += 1
    return paced


def _run(*command: str) -> str:
    """Run a tool; return its output. Raises: OSError, with its error message."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _remove_left_over() -> None:
    """Remove the namespaces of benchmarks that were killed before they removed them."""
    for space in Path("/run/netns").glob("pulsebench-*"):
        pid = space.name.split("-")[1]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                _run("ip", "netns", "del", space.name)


def end_like_ctrl_c() -> None:
    """Have SIGTERM clean up as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
