"""Metrics of trainers, workers, relays and servers, made from the events of a process.

    from pulsesync import metrics

    metrics.export(port=9464)                              Prometheus: http://127.0.0.1:9464/metrics
    pulse.listen(metrics.OpenTelemetryMetrics())           OpenTelemetry
    pulse.listen(lambda event: print(metrics.scalars(event)))    numbers by name, for experiment trackers

One table has all of them (`INSTRUMENTS`; docs/metrics.md lists it). Servers and relays answer `/metrics` themselves.
"""

from pulsesync.metrics.opentelemetry import OpenTelemetryMetrics
from pulsesync.metrics.prometheus import MetricsExporter, PrometheusMetrics, export
from pulsesync.metrics.table import INSTRUMENTS, Instrument, scalars

__all__ = [
    "INSTRUMENTS",
    "Instrument",
    "MetricsExporter",
    "OpenTelemetryMetrics",
    "PrometheusMetrics",
    "export",
    "scalars",
]
