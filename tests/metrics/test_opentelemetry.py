"""Events as OpenTelemetry metrics and spans, read back from the SDK's memory."""

from typing import Any

import pytest

from pulsesync import events, listen, metrics
from tests.metrics.samples import PUBLISHED, RUN, SAMPLES, sync_failed, synced

pytest.importorskip("opentelemetry.sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode


class Recorded:
    """What the SDK was given."""

    def __init__(self, *sent: events.Event) -> None:
        reader, spans = InMemoryMetricReader(), InMemorySpanExporter()
        tracers = TracerProvider()
        tracers.add_span_processor(SimpleSpanProcessor(spans))
        meters = MeterProvider(metric_readers=[reader])
        with listen(metrics.OpenTelemetryMetrics(meters, tracers)) as listening:
            for event in sent:
                events.emit(event)
        assert listening.failed == 0
        data = reader.get_metrics_data()
        assert data is not None
        (scope,) = data.resource_metrics[0].scope_metrics
        self.scope = scope.scope.name
        self.metrics: dict[str, Any] = {metric.name: metric for metric in scope.metrics}
        self.spans: tuple[ReadableSpan, ...] = spans.get_finished_spans()
        meters.shutdown()
        tracers.shutdown()

    def point(self, name: str) -> Any:
        (point,) = self.metrics[name].data.data_points
        return point


def test_a_sync_as_metrics_with_units_and_attributes() -> None:
    recorded = Recorded(synced(), synced(version=8))
    assert recorded.scope == "pulsesync"
    assert recorded.point("pulse.version").value == 8
    assert recorded.point("pulse.fetched").value == 2000
    assert recorded.metrics["pulse.fetched"].unit == "By"
    assert dict(recorded.point("pulse.fetched").attributes) == {"location": RUN}
    pause = recorded.point("pulse.sync_pause")
    assert (pause.count, pause.sum) == (2, 0.008)
    assert recorded.metrics["pulse.sync_pause"].unit == "s"
    assert pause.bucket_counts[2] == 2  # from 2.5 to 5 ms


def test_every_metric_that_is_made_of_events_is_recorded() -> None:
    recorded = Recorded(*SAMPLES)
    assert set(recorded.metrics) == {one.otel_name for one in metrics.INSTRUMENTS if one.sources}


def test_a_publish_and_a_sync_are_spans_with_their_times_and_fields() -> None:
    publish, sync = Recorded(PUBLISHED, synced()).spans
    assert (publish.name, sync.name) == ("pulse.publish", "pulse.sync")
    assert publish.attributes is not None
    assert sync.attributes is not None
    assert sync.start_time is not None
    assert sync.end_time is not None
    assert (publish.attributes["pulse.version"], publish.attributes["pulse.payload_bytes"]) == (8, 300)
    assert sync.attributes["pulse.path"] == ("patch", "patch")
    assert (sync.end_time - sync.start_time) / 1e9 == pytest.approx(0.754, abs=1e-3)


def test_a_failure_is_a_span_with_the_status_of_an_error() -> None:
    (failed,) = Recorded(sync_failed(version=None)).spans
    assert failed.name == "pulse.sync"
    assert (failed.status.status_code, failed.status.description) == (StatusCode.ERROR, "no route")
    assert failed.attributes is not None
    assert "pulse.version" not in failed.attributes


def test_a_sync_that_found_nothing_new_is_no_span() -> None:
    assert Recorded(synced(path=())).spans == ()


def test_without_a_provider_nothing_is_recorded_and_nothing_fails() -> None:
    with listen(metrics.OpenTelemetryMetrics()) as listening:
        for event in SAMPLES:
            events.emit(event)
    assert listening.failed == 0
