"""The table of metrics: its names, what events add to it, and the numbers for experiment trackers."""

import re
from dataclasses import fields
from typing import Any

import pytest

from pulsesync import events, metrics
from pulsesync.metrics.opentelemetry import SPANS
from pulsesync.metrics.table import LABEL_VALUES, measurements
from tests.metrics.samples import SAMPLES, synced


def test_names_follow_the_conventions_of_prometheus() -> None:
    for one in metrics.INSTRUMENTS:
        assert re.fullmatch(r"pulse(_[a-z]+)+", one.name), one.name
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert one.kind != "histogram" or one.unit == "seconds", one.name
        assert not re.search(r"_(ms|mb|kb|count|sum|bucket)$", one.name), one.name
        assert one.help.endswith("."), one.name


def test_names_are_unique_in_prometheus_and_in_opentelemetry() -> None:
    for names in ([one.name for one in metrics.INSTRUMENTS], [one.otel_name for one in metrics.INSTRUMENTS]):
        assert len(set(names)) == len(names)


def test_no_label_is_a_version_a_key_or_a_message() -> None:
    used = {label for one in metrics.INSTRUMENTS for label in one.labels}
    assert used == {"location", "retryable", "rank", "method", "fragment", "status", "cache"}
    assert set(LABEL_VALUES) <= used


def test_every_event_is_in_the_table() -> None:
    concrete = {
        value
        for name, value in vars(events).items()
        if name in events.__all__ and isinstance(value, type) and issubclass(value, events.Event)
    } - {events.Event, events.RunEvent}
    assert {type(event) for event in SAMPLES} == concrete
    assert {event for one in metrics.INSTRUMENTS for event, _ in one.sources} == concrete


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_every_field_that_the_table_names_is_in_its_event(event: events.Event) -> None:
    found = list(measurements(event))
    assert found
    for one in found:
        assert set(one.labels) == set(one.instrument.labels)


def test_every_duration_of_a_span_is_a_field() -> None:
    for event, (_, durations) in SPANS.items():
        assert set(durations) <= {field.name for field in fields(event)}


def test_an_event_of_another_kind_is_no_measurement() -> None:
    assert list(measurements(events.Event())) == []
    assert metrics.scalars(events.Event()) == {}


def test_the_numbers_of_a_sync_for_a_tracker() -> None:
    assert metrics.scalars(synced()) == {
        "pulse/newest_version": 9.0,
        "pulse/version": 7.0,
        "pulse/step": 70.0,
        "pulse/lag_versions": 2.0,
        "pulse/sync_fetch_seconds": 0.5,
        "pulse/sync_prepare_seconds": 0.25,
        "pulse/sync_pause_seconds": 0.004,
        "pulse/fetched_bytes": 1000.0,
        "pulse/sync_replans": 1.0,
        "pulse/repaired_tensors": 2.0,
        "pulse/weights_torn": 0.0,
    }
    assert set(metrics.scalars(synced(), prefix="worker.")) > {"worker.version", "worker.fetched_bytes"}


def test_a_sync_that_found_nothing_new_has_no_pause() -> None:
    nothing: dict[str, Any] = {"path": (), "newest": None}
    names = set(metrics.scalars(synced(**nothing)))
    assert not names & {"pulse/sync_pause_seconds", "pulse/sync_fetch_seconds", "pulse/lag_versions"}
    assert "pulse/version" in names


def test_weights_that_do_not_follow_a_pointer_back_lag() -> None:
    failed = events.SyncFailed(
        location="runs/one", version=12, newest=5, error="StoreError", retryable=True, torn=False
    )
    assert metrics.scalars(failed)["pulse/lag_versions"] == 7
