"""Events as OpenTelemetry metrics and spans, through its API. Needs `pip install 'pulsesync[otel]'`."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pulsesync.core.events import (
    AnchorPublished,
    EngineUpdated,
    EngineUpdateFailed,
    Event,
    GroupSynced,
    GroupSyncFailed,
    PublishFailed,
    Recounted,
    RoundCompleted,
    RoundFailed,
    Synced,
    SyncFailed,
    VersionPublished,
)
from pulsesync.core.extras import missing
from pulsesync.core.version import __version__
from pulsesync.metrics.table import BUCKETS_S, INSTRUMENTS, Instrument, measurements

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetryMetrics"]

COUNTS_BY = {"counter": "add", "gauge": "set", "histogram": "record"}  # the method of each kind that takes a value
UNITS = {"": "", "seconds": "s", "bytes": "By", "ratio": "1"}

# The spans of events: their names, and the fields whose sum is how long they took. They end when the event was emitted.
SPANS: dict[type[Event], tuple[str, tuple[str, ...]]] = {
    VersionPublished: ("pulse.publish", ("encode_s", "store_s")),
    PublishFailed: ("pulse.publish", ()),
    AnchorPublished: ("pulse.anchor", ("seconds",)),
    Synced: ("pulse.sync", ("fetch_s", "prepare_s", "pause_s")),
    SyncFailed: ("pulse.sync", ()),
    Recounted: ("pulse.recount", ("seconds",)),
    EngineUpdated: ("pulse.engine_update", ("seconds",)),
    EngineUpdateFailed: ("pulse.engine_update", ()),
    GroupSynced: ("pulse.group_sync", ("seconds",)),
    GroupSyncFailed: ("pulse.group_sync", ()),
    RoundCompleted: ("pulse.round", ("seconds",)),
    RoundFailed: ("pulse.round", ()),
}


class OpenTelemetryMetrics:
    """A listener that records events as metrics and as spans, with all fields of an event on its span.

    The spans of failures have no duration, and the status of an error. A sync that found nothing new has no span.

    Args:
        meter_provider: Where metrics go; the global one if not given.
        tracer_provider: Where spans go; the global one if not given.

    Raises:
        PulseError: OpenTelemetry is not installed.
    """

    def __init__(
        self, meter_provider: "MeterProvider | None" = None, tracer_provider: "TracerProvider | None" = None
    ) -> None:
        try:
            from opentelemetry.metrics import get_meter
            from opentelemetry.trace import get_tracer
        except ModuleNotFoundError as e:
            raise missing(e, "otel") from e
        meter = get_meter("pulsesync", __version__, meter_provider)
        self._tracer = get_tracer("pulsesync", __version__, tracer_provider)
        self._instruments = {one.name: _make(one, meter) for one in INSTRUMENTS if one.sources}

    def __call__(self, event: Event) -> None:
        for instrument, value, labels in measurements(event):
            getattr(self._instruments[instrument.name], COUNTS_BY[instrument.kind])(value, labels)
        if type(event) in SPANS and not (isinstance(event, Synced) and not event.path):
            self._span(event)

    def _span(self, event: Event) -> None:
        from opentelemetry.trace import StatusCode

        name, durations = SPANS[type(event)]
        seconds = sum(getattr(event, field) for field in durations)
        values = {field.name: getattr(event, field.name) for field in fields(event) if field.name != "time_s"}
        attributes = {f"pulse.{field}": value for field, value in values.items() if value is not None}
        span = self._tracer.start_span(name, attributes=attributes, start_time=int((event.time_s - seconds) * 1e9))
        if (error := getattr(event, "error", None)) is not None:
            span.set_status(StatusCode.ERROR, error)
        span.end(int(event.time_s * 1e9))


def _make(instrument: Instrument, meter: "Meter") -> Any:
    name, unit, text = instrument.otel_name, UNITS[instrument.unit], instrument.help
    if instrument.kind == "counter":
        return meter.create_counter(name, unit, text)
    if instrument.kind == "gauge":
        return meter.create_gauge(name, unit, text)
    return meter.create_histogram(name, unit, text, explicit_bucket_boundaries_advisory=BUCKETS_S)
