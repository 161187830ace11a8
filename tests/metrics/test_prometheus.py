"""Events as Prometheus metrics, and the exporter, asked over loopback."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pulsesync import events, metrics
from pulsesync.core.events import has_listeners
from pulsesync.errors import PulseError
from tests.metrics.samples import PUBLISHED, RUN, SAMPLES, sync_failed, synced
from tests.metrics.scraping import Scraped, scrape

pytest.importorskip("prometheus_client")
from prometheus_client import CollectorRegistry, Counter


def counted(*sent: events.Event) -> Scraped:
    made = metrics.PrometheusMetrics()
    for event in sent:
        made(event)
    return Scraped(made.page()[0].decode())


def test_a_publish_in_all_its_metrics() -> None:
    page = counted(PUBLISHED, PUBLISHED)
    assert page.value("pulse_newest_version", location=RUN) == 8
    assert page.value("pulse_versions_published_total", location=RUN) == 2
    assert page.value("pulse_published_bytes_total", location=RUN) == 600
    assert page.value("pulse_full_bytes", location=RUN) == 2000
    assert page.value("pulse_changed_ratio", location=RUN) == 0.01
    assert page.value("pulse_coalesced_publishes_total", location=RUN) == 2
    assert page.value("pulse_publish_store_seconds_count", location=RUN) == 2
    assert page.value("pulse_publish_store_seconds_sum", location=RUN) == 0.06
    assert page.value("pulse_publish_store_seconds_bucket", location=RUN, le="0.025") == 0
    assert page.value("pulse_publish_store_seconds_bucket", location=RUN, le="0.05") == 2
    assert page.value("pulse_last_publish_timestamp_seconds", location=RUN) == PUBLISHED.time_s


def test_a_sync_after_a_failure_mends_torn_weights() -> None:
    torn = counted(synced(), sync_failed(torn=True))
    assert torn.value("pulse_weights_torn", location=RUN) == 1
    assert torn.value("pulse_sync_failures_total", location=RUN, retryable="true") == 1
    assert torn.value("pulse_lag_versions", location=RUN) == 2
    assert counted(sync_failed(torn=True), synced()).value("pulse_weights_torn", location=RUN) == 0


def test_a_recount_that_differs_is_counted_and_is_no_sign_of_health() -> None:
    page = counted(events.Recounted(location=RUN, version=7, equal=False, seconds=0.1))
    assert page.value("pulse_recount_mismatches_total", location=RUN) == 1
    assert page.value("pulse_last_recount_timestamp_seconds", location=RUN) is None
    page = counted(events.Recounted(location=RUN, version=7, equal=True, seconds=0.1, time_s=5.0))
    assert page.value("pulse_recount_mismatches_total", location=RUN) == 0
    assert page.value("pulse_last_recount_timestamp_seconds", location=RUN) == 5


def test_counters_of_failures_are_there_as_zero_before_anything_fails() -> None:
    page = counted(synced())
    assert page.value("pulse_sync_failures_total", location=RUN, retryable="false") == 0
    assert page.value("pulse_recount_mismatches_total", location=RUN) == 0
    assert page.value("pulse_publish_failures_total", location=RUN, retryable="true") is None
    assert page.value("pulse_requests_total", location=RUN) is None


def test_every_event_is_counted_and_every_metric_is_made() -> None:
    page = counted(*SAMPLES)
    from_events = {one.name for one in metrics.INSTRUMENTS if one.sources}
    shown = {name for name, _ in page.samples}
    assert {name for name in from_events if not {name, f"{name}_count"} & shown} == set()


def test_two_runs_in_one_process_are_apart() -> None:
    page = counted(synced(), synced(location="runs/two", version=3))
    assert page.value("pulse_version", location=RUN) == 7
    assert page.value("pulse_version", location="runs/two") == 3


def test_a_registry_that_is_given_has_its_own_metrics_too() -> None:
    registry = CollectorRegistry()
    Counter("mine", "Another metric.", registry=registry).inc()
    with metrics.export(port=0, registry=registry) as exporter:
        events.emit(PUBLISHED)
        page = scrape(exporter.url)
        assert page.value("mine_total") == 1
        assert page.value("pulse_newest_version", location=RUN) == 8
        with pytest.raises(ValueError, match="Duplicated"):
            metrics.PrometheusMetrics(registry)
    metrics.PrometheusMetrics(registry)  # nothing is left there


def test_an_exporter_shows_every_event_that_came_before_the_scrape() -> None:
    with metrics.export(port=0) as exporter:
        for version in range(200):
            events.emit(synced(version=version, newest=version))
            if version % 50 == 49:
                assert scrape(exporter.url).value("pulse_version", location=RUN) == version
        page = scrape(exporter.url)
        assert page.value("pulse_syncs_total", location=RUN) == 200
        assert page.value("pulse_fetched_bytes_total", location=RUN) == 200_000
        assert page.value("pulse_events_dropped_total") == 0


def test_many_may_scrape_at_the_same_time() -> None:
    with metrics.export(port=0) as exporter, ThreadPoolExecutor(8) as pool:
        events.emit(synced())
        pages = list(pool.map(scrape, [exporter.url] * 32))
        assert {page.value("pulse_version", location=RUN) for page in pages} == {7}


def test_a_closed_exporter_is_gone() -> None:
    exporter = metrics.export(port=0)
    assert has_listeners()
    exporter.close()
    exporter.close()  # a second time does nothing
    assert not has_listeners()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(exporter.url, timeout=5)
    metrics.export(port=exporter.port).close()  # and its port is free


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port() -> None:
    exporter = metrics.export(port=0)
    if (child := os.fork()) == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert scrape(exporter.url).value("pulse_events_dropped_total") == 0
        exporter.close()
        metrics.export(port=exporter.port).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_port_that_is_taken_is_named_and_nothing_is_left_behind() -> None:
    with metrics.export(port=0) as exporter:
        before = exporter.metrics.registry
        with pytest.raises(PulseError, match=f"127.0.0.1 port {exporter.port}: .*give another port"):
            metrics.export(port=exporter.port)
        assert scrape(exporter.url).value("pulse_events_dropped_total") == 0
        assert exporter.metrics.registry is before
    assert not has_listeners()


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("prometheus_client", lambda: metrics.export(port=0), "metrics"),
        ("opentelemetry.metrics", metrics.OpenTelemetryMetrics, "otel"),
    ],
)
def test_what_is_not_installed_is_named_with_its_extra(
    module: str, make: Callable[[], object], extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PulseError, match=rf"pip install 'pulsesync\[{extra}\]'"):
        make()


def test_the_table_needs_neither_prometheus_nor_opentelemetry() -> None:
    program = (
        "import sys; from pulsesync import metrics; metrics.scalars; "
        "print([name for name in ('prometheus_client', 'opentelemetry', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_counting_an_event_takes_less_than_a_millisecond() -> None:
    made = metrics.PrometheusMetrics()
    sent = [synced(version=version) for version in range(300)]
    made(sent[0])
    began = time.thread_time()
    for event in sent:
        made(event)
    assert (time.thread_time() - began) / len(sent) < 1e-3
