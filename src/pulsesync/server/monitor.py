"""What a server reports of itself: its requests as metrics and events, and whether the store behind it answers."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pulsesync.core.events import RequestServed, emit
from pulsesync.errors import NotFoundError
from pulsesync.metrics import PrometheusMetrics
from pulsesync.run.keys import HEAD
from pulsesync.run.reader import location_of
from pulsesync.server.calls import RememberedCall
from pulsesync.store.base import Store, layers
from pulsesync.store.cache import CachedStore
from pulsesync.store.cache_folder import folder_bytes
from pulsesync.store.local import LocalStore

if TYPE_CHECKING:
    from starlette.types import Message, Send

_HEALTH_KEEP_S = 1.0
_HEALTH_LIMIT_S = 2.0  # a store that takes longer does not answer
_SIZE_KEEP_S = 15.0  # of a cache: to measure one of 100 GB takes about half a second
_SIZE_LIMIT_S = 2.0
_MAX_RUNS = 1000  # below one folder, whose newest versions are shown
_RECORD = re.compile(r"(?:(.+)/)?manifests/(\d{16})", re.ASCII)


@dataclass
class SentAnswer:
    """What of an answer was sent so far."""

    status: int = 0  # 0: nothing
    sent_bytes: int = 0
    cache: str = "none"
    store_failed: bool = False

    def counting(self, send: "Send") -> "Send":
        async def count(message: "Message") -> None:
            await send(message)
            if message["type"] == "http.response.start":
                self.status = message["status"]
            elif self.status < 400:  # the text of an error is not an object
                self.sent_bytes += len(message.get("body", b""))

        return count


class ServerMonitor:
    """Counts what a server sends, and asks its store whether it is there. To be used on one event loop.

    Raises: PulseError: prometheus_client is not installed.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._location = location_of(store)
        self._metrics = PrometheusMetrics(sections=("servers", "versions"))
        self._newest: dict[str, int] = {}  # by location of a run, the newest version that was sent
        self._up = RememberedCall(self._ask, _HEALTH_KEEP_S, _HEALTH_LIMIT_S)
        self._cache = _wrapped(store, CachedStore)
        self._cache_bytes = RememberedCall(self._measure, _SIZE_KEEP_S, _SIZE_LIMIT_S)

    def served(self, method: str, key: str, answer: SentAnswer, seconds: float) -> None:
        """Count an answer, and emit it as an event."""
        event = RequestServed.of(answer, location=self._location, method=method, seconds=seconds)
        self._metrics(event)
        emit(event)
        if answer.status in (200, 206, 304) and (record := _RECORD.fullmatch(key)):
            self._saw(record[1], int(record[2]))

    async def is_up(self) -> bool:
        """Return whether the store answers, as of at most a second ago."""
        return bool(await self._up.outcome())

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, for a client that accepts these formats."""
        self._metrics.set("pulse_store_up", await self.is_up(), location=self._location)
        size = await self._cache_bytes.outcome() if self._cache is not None else None
        if size is not None:
            self._metrics.set("pulse_cache_bytes", size, location=self._location)
        return self._metrics.page(accept)

    def _saw(self, run: str | None, version: int) -> None:
        """Show the newest version that was sent of each run. Clients can invent none: its record was found."""
        location = self._location if run is None else f"{self._location.rstrip('/')}/{run}"
        if version > self._newest.get(location, -1) and (location in self._newest or len(self._newest) < _MAX_RUNS):
            self._newest[location] = version
            self._metrics.set("pulse_newest_version", version, location=location)

    def _ask(self) -> bool:
        folder = _wrapped(self._store, LocalStore)
        try:
            self._store.get(HEAD, 0, 1)
        except NotFoundError:  # it serves several runs, or one without a version
            return folder is None or folder.folder.is_dir()
        except Exception:  # noqa: BLE001 - whatever it raises, it does not answer
            return False
        return True

    def _measure(self) -> int:
        assert self._cache is not None
        if self._cache.max_bytes is not None:
            self._metrics.set("pulse_cache_limit_bytes", self._cache.max_bytes, location=self._location)
        return folder_bytes(self._cache.folder)


def _wrapped(store: Any, kind: type[Any]) -> Any:
    """Return the first store of a kind among one and those that it wraps; None if there is none."""
    return next((layer for layer in layers(store) if isinstance(layer, kind)), None)
