"""`pulse serve` and `pulse relay` as processes of their own, and what they answer to plain requests."""

import http.client
import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.forked import Forked

# What the command line calls, with its options as JSON.
START = """
import importlib, json, resource, sys
from pathlib import Path
from pulsesync.cli import serve
options = dict(host="127.0.0.1", port=0, token_file=None, certificate=None, private_key=None, as_json=True)
if sys.argv[1] == "relay":
    options.update(max_cache=None, cafile=None)
given = json.loads(sys.argv[3])
if "descriptors" in given:
    resource.setrlimit(resource.RLIMIT_NOFILE, given.pop("descriptors"))
for name, value in given.pop("constants", {}).items():
    module, _, constant = name.rpartition(".")
    assert hasattr(importlib.import_module(module), constant)
    setattr(importlib.import_module(module), constant, value)
plain = ("max_cache", "token_in_clear", "upstream_token_in_clear", "without_token", "open_metrics")
options.update({name: value if name in plain else Path(value) for name, value in given.items()})
place = sys.argv[2] if sys.argv[1] == "relay" else Path(sys.argv[2])
sys.exit(getattr(serve, sys.argv[1])(place, **options))
"""


@dataclass
class Running:
    url: str
    process: Forked

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(10)

    def printed(self) -> str:
        """All that a stopped server has printed after its address."""
        return self.process.stdout.read()


@contextmanager
def running(
    verb: str, place: str | Path, environment: dict[str, str] | None = None, **options: object
) -> Iterator[Running]:
    """`pulse serve` or `pulse relay` in a process of its own, for as long as the block lasts.

    Besides the options of the command: constants, by their full names, so that a test need not wait as long as a user.
    """
    given = json.dumps(options, default=str)
    with Forked(START, verb, place, given, environment=environment, together=True) as process:
        yield Running(json.loads(process.stdout.readline())["url"], process)


@dataclass
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(url: str, path: str, method: str = "GET", **headers: str) -> Answer:
    parts = urlsplit(url)
    with closing(http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)) as connection:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
