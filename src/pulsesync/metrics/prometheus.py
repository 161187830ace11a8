"""Events as Prometheus metrics, and an HTTP server of them for trainers and workers.

Needs `pip install 'pulsesync[metrics]'`.
"""

import logging
import os
import weakref
from collections.abc import Collection, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from pulsesync.core.arguments import whole
from pulsesync.core.events import Event, Listening, listen
from pulsesync.core.extras import missing
from pulsesync.errors import PulseError
from pulsesync.metrics.table import BUCKETS_S, DROPPED, INSTRUMENTS, LABEL_VALUES, Instrument, measurements

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["MetricsExporter", "PrometheusMetrics", "export"]

FLUSH_S = 1.0  # that a scrape waits for events that were emitted before it
COUNTS_BY = {"counter": "inc", "gauge": "set", "histogram": "observe"}  # the method of each kind that takes a value

logger = logging.getLogger(__name__)


class PrometheusMetrics:
    """A listener that counts events in Prometheus metrics. It is a collector: any exporter of its registry shows them.

    Args:
        registry: Where to register; a registry of its own if not given.
        sections: Which metrics; all of them if not given.

    Raises:
        PulseError: prometheus_client is not installed.
        ValueError: the registry has these metrics already.
    """

    def __init__(self, registry: "CollectorRegistry | None" = None, sections: Collection[str] | None = None) -> None:
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as e:
            raise missing(e, "metrics") from e
        self.registry = CollectorRegistry() if registry is None else registry
        self._metrics = {
            instrument.name: _make(instrument)
            for instrument in INSTRUMENTS
            if instrument is not DROPPED and (sections is None or instrument.section in sections)
        }
        self._children: dict[tuple[str, ...], Any] = {}  # by name and labels: to look one up there takes half the time
        self._begun: set[tuple[str, str]] = set()  # sections and locations whose counters are exported
        self._listening: Listening | None = None
        self.registry.register(self)

    def listen(self) -> Listening:
        """Count every event of this process from now on. A scrape then shows all events that were emitted before it."""
        self._listening = listen(self)
        return self._listening

    def __call__(self, event: Event) -> None:
        for instrument, value, labels in measurements(event):
            if instrument.name not in self._metrics:
                continue
            begun = (instrument.section, labels.get("location", ""))
            if begun not in self._begun:
                self._begin(*begun)
            key = (instrument.name, *labels.values())
            child = self._children.get(key)
            if child is None:
                child = self._children[key] = self._metrics[instrument.name].labels(**labels)
            getattr(child, COUNTS_BY[instrument.kind])(value)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge to a value that is in no event."""
        self._metrics[name].labels(**labels).set(value)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics of the registry in a text format, and its content type.

        Args:
            accept: The header of this name, by which a Prometheus server says which formats it knows.
        """
        from prometheus_client.exposition import choose_encoder

        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # prometheus_client 0.26 for a version that is not a number
            encode, content_type = choose_encoder("")
        return encode(self.registry), content_type

    def collect(self) -> "Iterator[Metric]":
        """Yield all metrics, as a registry asks for them."""
        if self._listening is not None:
            self._listening.flush(FLUSH_S)
        for metric in self._metrics.values():
            yield from metric.collect()
        if self._listening is not None:
            yield from _dropped(self._listening.dropped)

    def describe(self) -> "Iterator[Metric]":
        """Yield the names of all metrics, as a registry asks for them."""
        for metric in self._metrics.values():
            yield from metric.describe()
        yield from _dropped(0)

    def _begin(self, section: str, location: str) -> None:
        """Export the counters of a section as 0: Prometheus sees an increase only in what it has seen before."""
        self._begun.add((section, location))
        known = {**LABEL_VALUES, "location": (location,)}
        for instrument in INSTRUMENTS:
            if instrument.section == section and instrument.kind == "counter" and set(instrument.labels) <= set(known):
                for values in product(*(known[label] for label in instrument.labels)):
                    self._metrics[instrument.name].labels(*values)


class MetricsExporter:
    """The metrics of this process over HTTP, until `close`."""

    def __init__(self, metrics: PrometheusMetrics, host: str, port: int) -> None:
        from prometheus_client import start_http_server

        self.metrics = metrics
        try:
            self._server, self._thread = start_http_server(port, host, metrics.registry)
        except (OSError, OverflowError) as e:
            metrics.registry.unregister(metrics)
            cause = getattr(e, "strerror", None) or e
            raise PulseError(
                f"cannot serve metrics on {host} port {port}: {cause}; give another port, or 0 for a free one"
            ) from e
        _servers.add(self._server)
        self._listening = metrics.listen()
        self.port = int(self._server.server_port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        logger.info("Metrics of this process are at %s.", self.url)

    def close(self) -> None:
        """Stop the server, and count no more events. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._listening.close()
            self.metrics.registry.unregister(self.metrics)

    def __enter__(self) -> "MetricsExporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_servers: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the ports in a forked child, such as a DataLoader's worker.

    It has no thread that answers there, and may outlive this process: scrapes would wait, and the port stay taken.
    """
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_close_in_child)


def export(
    port: int = 9464, host: str = "127.0.0.1", *, registry: "CollectorRegistry | None" = None
) -> MetricsExporter:
    """Serve the metrics of this process to Prometheus, from now until the returned object is closed.

    Call it before the first publish or sync: earlier events are not counted.

    Args:
        port: The port; 0 takes a free one, which the returned object names.
        host: The address to listen on; `0.0.0.0` for all of this machine. There is no password: any client that can
            reach the port reads the locations of runs, their versions and sizes.
        registry: A Prometheus registry that has other metrics too; a registry of their own if not given.

    Raises:
        PulseError: prometheus_client is not installed, or the port is taken.
    """
    port = whole("port", port, 0, 65_535)
    return MetricsExporter(PrometheusMetrics(registry), host, port)


def _dropped(count: int) -> "Iterator[Metric]":
    from prometheus_client.metrics_core import CounterMetricFamily

    yield CounterMetricFamily(DROPPED.name, DROPPED.help, value=count)


def _make(instrument: Instrument) -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    name, labels = instrument.name, instrument.labels
    if instrument.kind == "histogram":
        return Histogram(name, instrument.help, labels, registry=None, buckets=BUCKETS_S)
    kind = Counter if instrument.kind == "counter" else Gauge
    return kind(name, instrument.help, labels, registry=None)
