"""A trainer, a worker and a server as processes of their own, scraped over loopback."""

import http.client
import json
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync_lab.demo.settings import DemoSettings
from tests.commands import PULSE, start
from tests.commands import pulse as pulse_command
from tests.forked import Forked
from tests.metrics.scraping import Scraped, scrape
from tests.serving import running

pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
pytest.importorskip("granian")

VERSIONS = 6

TRAINER = f"""
import sys
import numpy as np
import pulsesync as pulse
from pulsesync import metrics

exporter = metrics.export(port=0)
weights = {{"w": np.zeros((64, 64), np.float32)}}
with pulse.Publisher(sys.argv[1]) as publisher:
    for step in range({VERSIONS}):
        weights["w"][step] += 1
        publisher.publish(weights, step=10 * step)
        publisher.flush()
print(exporter.url, flush=True)
sys.stdin.read()
"""

WORKER = """
import sys
import numpy as np
import pulsesync as pulse
from pulsesync import metrics
from pulsesync.run import reporting

reporting.IDLE_S = 0.0  # a sync that finds nothing new is emitted once a second, for users
exporter = metrics.export(port=0)
model = {"w": np.zeros((64, 64), np.float32)}
worker = pulse.Subscriber(sys.argv[1])
for version in (2, None, None):
    worker.sync(model, version=version)
worker.verify()
print(exporter.url, flush=True)
for line in sys.stdin:
    model["w"][0, 0] += 1  # something else writes to the weights
    try:
        worker.verify()
    except pulse.VerificationError:
        print("found", flush=True)
"""


@pytest.mark.timeout(120)
def test_a_trainer_a_worker_and_a_server_can_be_scraped(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(running("serve", folder))
        trainer = stack.enter_context(Forked(TRAINER, folder, kernels=True))
        published = scrape(trainer.stdout.readline().strip())
        worker = stack.enter_context(Forked(WORKER, server.url, kernels=True))
        address = worker.stdout.readline().strip()
        synced, served = scrape(address), scrape(f"{server.url}/metrics")
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "found\n"
        damaged = scrape(address)

    place = str(folder)
    assert published.value("pulse_newest_version", location=place) == VERSIONS - 1
    assert published.value("pulse_step", location=place) == 10 * (VERSIONS - 1)
    assert published.value("pulse_versions_published_total", location=place) == VERSIONS
    assert published.value("pulse_full_bytes", location=place) == 64 * 64 * 4
    assert published.value("pulse_changed_ratio", location=place) == 1 / 64
    assert published.value("pulse_publish_blocked_seconds_count", location=place) == VERSIONS
    assert published.value("pulse_publish_failures_total", location=place, retryable="true") == 0
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    in_versions = published.value("pulse_published_bytes_total", location=place)
    in_anchors = published.value("pulse_anchor_bytes_total", location=place)
    assert in_versions is not None
    assert in_anchors is not None
    assert 0 < in_versions < stored  # small parts are in the records
    assert abs(time.time() - (published.value("pulse_last_publish_timestamp_seconds", location=place) or 0)) < 120

    assert synced.value("pulse_version", location=server.url) == VERSIONS - 1
    assert synced.value("pulse_newest_version", location=server.url) == VERSIONS - 1
    assert synced.value("pulse_lag_versions", location=server.url) == 0
    assert synced.value("pulse_syncs_total", location=server.url) == 3
    assert synced.value("pulse_sync_pause_seconds_count", location=server.url) == 2  # the third found nothing new
    assert synced.value("pulse_recounts_total", location=server.url) == 1
    assert synced.value("pulse_recount_mismatches_total", location=server.url) == 0
    assert synced.value("pulse_weights_torn", location=server.url) == 0

    assert served.value("pulse_store_up", location=place) == 1
    assert served.value("pulse_newest_version", location=place) == VERSIONS - 1
    assert served.value("pulse_store_failures_total", location=place) == 0
    assert served.total("pulse_requests_total", location=place, method="GET", status="206") > VERSIONS
    fetched = synced.value("pulse_fetched_bytes_total", location=server.url)
    assert fetched is not None
    assert 0 < fetched <= served.total("pulse_served_bytes_total", location=place)

    assert damaged.value("pulse_recount_mismatches_total", location=server.url) == 1
    assert damaged.value("pulse_recounts_total", location=server.url) == 2


@pytest.mark.timeout(120)
def test_a_follower_can_be_scraped(tmp_path: Path, free_ports: int) -> None:
    weights = {"w": np.zeros((64, 64), np.float32)}
    with pulse.Publisher(str(tmp_path / "run")) as publisher:
        publisher.publish(weights)
    address = f"127.0.0.1:{free_ports}"
    command = ("follow", tmp_path / "run", tmp_path / "folder", "--metrics", address, "--json")
    with Forked(PULSE[-1], *command, kernels=True) as follower:
        while json.loads(follower.stdout.readline())["event"] != "version":
            pass
        page = scrape(f"http://{address}/metrics")
    assert page.value("pulse_version", location=str(tmp_path / "run")) == 0
    assert page.value("pulse_lag_versions", location=str(tmp_path / "run")) == 0


def test_an_address_for_metrics_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    command = ("follow", tmp_path / "run", tmp_path / "folder", "--metrics")
    for address in ("port", "0.0.0.0:", "host:9464x"):
        assert pulse_command(*command, address).refused(2, "--metrics must be a port, or a host and a port")
    assert pulse_command(*command, "99999").refused(2, "--metrics: port must be a whole number from 0 to 65535")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_every_process_of_a_demo_can_be_scraped(tmp_path: Path, free_ports: int) -> None:
    options = ("--replay", "--steps", 4, "--workers", 1, "--out", tmp_path / "demo", "--json")
    pages: dict[int, Scraped] = {}
    with start("demo", *options, "--metrics", free_ports) as demo:
        while demo.poll() is None:
            for port in (free_ports, free_ports + 1):
                with suppress(OSError, http.client.HTTPException):  # it has not begun, or has ended
                    page = scrape(f"http://127.0.0.1:{port}/metrics")
                    if page.value("pulse_events_dropped_total") is not None:  # else it ended while it answered
                        pages[port] = page
            time.sleep(0.02)
        assert demo.stdout is not None
        summary = json.loads(demo.stdout.read().splitlines()[-1])
    assert (summary["event"], summary["versions"]) == ("summary", 4)
    assert set(pages) == {free_ports, free_ports + 1}
    for page in pages.values():
        assert page.value("pulse_events_dropped_total") == 0


def test_the_ports_of_a_demo_are_those_of_its_trainers_and_then_of_its_workers(free_ports: int) -> None:
    settings = DemoSettings(trainers=2, metrics=free_ports)
    assert DemoSettings().export_metrics("trainer") is None
    for role, port in (("trainer", 0), ("trainer-1", 1), ("0", 2), ("3", 5)):
        assert settings.metrics_port(role) == free_ports + port
    exporter = settings.export_metrics("trainer-1")
    assert exporter is not None
    with exporter:
        assert scrape(f"http://127.0.0.1:{free_ports + 1}/metrics").samples


@pytest.fixture
def free_ports() -> int:
    """The first of two ports in a row that are free."""
    import socket

    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
            with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + 1)):
                return port
