"""What publishers and subscribers emit and log: what happened, once, without credentials, and without waiting."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync import Subscriber, events
from pulsesync.core.events import describe_error
from pulsesync.core.location import without_credentials
from pulsesync.errors import FormatError, NothingPublishedError, StateError, StoreError, VerificationError
from pulsesync.run import fetcher, keys
from pulsesync.run.applier import PlanApplier
from pulsesync.run.reader import location_of
from pulsesync.store import HttpStore, LocalStore, MemoryStore, ObjectStore, RetryStore, open_store
from tests.publish.test_sharded import Group
from tests.publishers import Publisher
from tests.readers import Squasher
from tests.runs import Training, Watched, down, equal, parts_of, publish_steps, versions, worker

Kind = TypeVar("Kind", bound=events.Event)
Received = list[events.Event]


@pytest.fixture
def received() -> Iterator[Received]:
    """All events of this process so far, once `of` or `settle` was called."""
    got: Received = []
    with pulse.listen(got.append) as listening:
        LISTENING.append(listening)
        yield got
        LISTENING.pop()


LISTENING: list[events.Listening] = []


def of(received: Received, kind: type[Kind]) -> list[Kind]:
    """The events of a kind that were emitted so far."""
    assert LISTENING[-1].flush()
    return [event for event in received if isinstance(event, kind)]


def forget(received: Received) -> None:
    assert LISTENING[-1].flush()
    received.clear()


# Publishing


def test_each_version_is_emitted_once_with_what_its_report_says(tmp_path: Path, received: Received) -> None:
    training, location = Training(), str(tmp_path / "run")
    with Publisher(location) as publisher:
        reports = [publisher.publish(training.weights, step=10)]
        training.step()
        reports.append(publisher.publish(training.weights, step=20))
        training.step()
        reports.append(publisher.publish(training.weights, step=30, wait=False).result())
        published = of(received, events.VersionPublished)
        assert [event.version for event in published] == [0, 1, 2]
        assert [event.step for event in published] == [10, 20, 30]
        assert {event.location for event in published} == {location}
        for event, report in zip(published[1:], reports[1:], strict=True):
            for field in ("changed", "total", "payload_bytes", "full_bytes", "coalesced", "blocked_s", "codec"):
                assert getattr(event, field) == getattr(report, field), field
            assert (event.encode_s, event.store_s) == (report.encode_s, report.store_s)
        (anchor,) = of(received, events.AnchorPublished)
        assert anchor.version == 0
        assert anchor.payload_bytes + published[0].payload_bytes == reports[0].payload_bytes
        assert anchor.seconds > 0
    assert not of(received, events.PublishFailed)


def test_steps_that_are_coalesced_are_emitted_with_the_version_that_contains_them(received: Received) -> None:
    training = Training()
    with Publisher(MemoryStore(), publish_every=3) as publisher:
        for step in range(4):
            publisher.publish(training.weights, step=step)
            training.step()
    assert [(event.version, event.coalesced) for event in of(received, events.VersionPublished)] == [(0, 0), (1, 2)]


def test_a_publish_that_fails_is_emitted_whether_or_not_its_caller_waits(received: Received) -> None:
    store, training = Watched(), Training()
    publisher = Publisher(store)
    publisher.publish(training.weights, step=1)
    store.before = lambda verb, key: _refuse(key) if key.startswith("manifests/") and verb == "create" else None
    training.step()
    with pytest.raises(StoreError):
        publisher.publish(training.weights, step=2)
    with pytest.raises(StoreError):
        publisher.publish(training.weights, step=3, wait=False).result()
    store.before = lambda verb, key: None
    assert publisher.publish(training.weights, step=4).version == 1
    publisher.close()
    failed = of(received, events.PublishFailed)
    assert [(event.step, event.retryable, event.rank) for event in failed] == [(2, True, 0), (3, True, 0)]
    assert failed[0].error == "StoreError: too busy"
    assert [event.version for event in of(received, events.VersionPublished)] == [0, 1]


def _refuse(key: str) -> None:
    raise StoreError("too busy", key=key, retryable=True)


def test_tensors_that_do_not_fit_are_a_failed_publish(received: Received) -> None:
    training = Training()
    with Publisher(MemoryStore()) as publisher:
        publisher.publish(training.weights)
        with pytest.raises(StateError):
            publisher.publish({"another": np.zeros(3, np.float32)}, step=5)
    (failed,) = of(received, events.PublishFailed)
    assert failed.step == 5
    assert failed.error.startswith("StateError: ")


def test_a_version_that_was_committed_although_its_publish_failed_is_emitted(received: Received) -> None:
    store, training = Watched(), Training()
    with Publisher(store) as publisher:
        publisher.publish(training.weights)
        training.step()
        store.after = lambda verb, key: _refuse(key) if key == keys.manifest_key(1) and verb == "create" else None
        with pytest.raises(StoreError):
            publisher.publish(training.weights, step=1)
        store.after = lambda verb, key: None
        training.step()
        publisher.publish(training.weights, step=2)
    assert versions(store) == [0, 1, 2]
    published = of(received, events.VersionPublished)
    assert [(event.version, event.step) for event in published] == [(0, 0), (1, 1), (2, 2)]
    assert published[1].changed > 0
    assert published[1].payload_bytes > 0
    assert [event.step for event in of(received, events.PublishFailed)] == [1]


def test_of_a_team_rank_0_emits_versions_and_anchors_and_every_rank_its_failure(received: Received) -> None:
    store, training = Watched(), Training()
    group = Group(store, 3)
    report = group.publish(training.weights)
    training.step()
    group.publish(training.weights, step=1)
    store.before = lambda verb, key: _refuse(key) if key.startswith("manifests/") and verb == "create" else None
    training.step()
    assert all(isinstance(one, Exception) for one in group.try_publish(training.weights, step=2))
    store.before = lambda verb, key: None
    last = group.publish(training.weights, step=3)
    published = of(received, events.VersionPublished)
    assert [(event.version, event.step) for event in published] == [(0, 0), (1, 1), (2, 3)]
    assert (published[2].changed, published[2].payload_bytes) == (last.changed, last.payload_bytes)
    (anchor,) = of(received, events.AnchorPublished)
    assert anchor.payload_bytes + published[0].payload_bytes == report.payload_bytes
    failed = of(received, events.PublishFailed)
    assert sorted(event.rank for event in failed) == [0, 1, 2]
    assert {event.step for event in failed} == {2}


# Syncing


def test_every_sync_is_emitted_also_one_that_finds_nothing_new(
    tmp_path: Path, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.run.reporting.IDLE_S", 0.0)
    location = str(tmp_path / "run")
    publish_steps(location, 2)
    sub, held = Subscriber(location), worker()
    reports = [sub.sync(held), sub.sync(held), sub.sync(held, version=0)]
    synced = of(received, events.Synced)
    assert [event.version for event in synced] == [report.version for report in reports] == [1, 1, 0]
    assert [event.newest for event in synced] == [1, 1, 1]
    assert [event.path for event in synced] == [report.path for report in reports]
    assert synced[0].path[0] == "anchor"
    assert synced[1].path == ()
    assert {event.location for event in synced} == {location}
    for event, report in zip(synced, reports, strict=True):
        for field in ("step", "from_version", "changed", "fetched_bytes", "replanned", "fetch_s", "prepare_s"):
            assert getattr(event, field) == getattr(report, field), field
        assert event.pause_s == report.apply_s
        assert event.repaired == report.repaired


def test_of_syncs_that_find_nothing_new_one_a_second_is_emitted(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.run.reporting.IDLE_S", 1000.0)
    store, training, held = Watched(), Training(), worker()
    publish_steps(store, 2, training)
    sub = Subscriber(store)
    forget(received)
    sub.sync(held, version=0)
    for _ in range(3):
        sub.sync(held)
    store.fail_at("head")
    with pytest.raises(StoreError):
        sub.sync(held)
    store.fail_at()
    for _ in range(3):
        sub.sync(held)
    synced = [event for event in of(received, events.RunEvent) if isinstance(event, events.Synced | events.SyncFailed)]
    assert [getattr(event, "path", None) for event in synced] == [("anchor",), ("patch",), None, ()]


def test_a_sync_that_fails_is_emitted_with_what_is_needed_to_know_its_lag(received: Received) -> None:
    store, training = Watched(), Training()
    publish_steps(store, 2, training)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with Publisher(store) as publisher:
        training.step()
        publisher.publish(training.weights)
    forget(received)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PlanApplier, "apply", lambda *_: down("parts/one"))
        with pytest.raises(StoreError):
            sub.sync(held)
    (failed,) = of(received, events.SyncFailed)
    assert (failed.version, failed.newest, failed.torn, failed.retryable) == (1, 2, False, False)
    assert failed.error == "StoreError: the line is down"
    assert sub.sync(held).version == 2
    assert of(received, events.Synced)[-1].newest == 2


def test_a_first_sync_of_nothing_fails_without_a_version(received: Received) -> None:
    with pytest.raises(NothingPublishedError):
        Subscriber(MemoryStore()).sync(worker(), wait_s=0.3)
    (failed,) = of(received, events.SyncFailed)  # one, however often the store was asked in that time
    assert (failed.version, failed.newest) == (None, None)


def test_an_anchor_that_is_written_in_part_is_emitted_as_torn(
    received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    publish_steps(store, 1)
    sub = Subscriber(store)

    def fail_in_the_middle(loader: Any, *_: Any) -> None:
        loader._state.torn = True
        raise OSError("a device failed")

    monkeypatch.setattr("pulsesync.state.anchors.AnchorLoader.load_whole", fail_in_the_middle)
    with pytest.raises(VerificationError):
        sub.sync(worker())
    (failed,) = of(received, events.SyncFailed)
    assert failed.torn


def test_with_a_pointer_the_newest_version_is_the_one_that_it_names(received: Received) -> None:
    store = MemoryStore()
    publish_steps(store, 3)
    pulse.move_pointer(store, "stable", 1)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    pulse.move_pointer(store, "stable", 0)
    sub.sync(held)
    assert [(event.version, event.newest) for event in of(received, events.Synced)] == [(1, 1), (0, 0)]


def test_a_sync_that_is_rolled_back_is_emitted_as_undone(received: Received) -> None:
    store, training = MemoryStore(), Training()
    states = publish_steps(store, 1, training)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with Publisher(store) as publisher:
        training.step()
        publisher.publish(training.weights, step=7)
    sub.sync(held)
    assert sub.roll_back() == 0
    assert equal(held, states[0])
    undone = of(received, events.Synced)[-1]
    assert (undone.version, undone.from_version, undone.newest, undone.path) == (0, 1, 1, ("undo",))
    assert undone.changed > 0


def test_recounts_are_emitted_with_what_they_found(received: Received) -> None:
    store = MemoryStore()
    publish_steps(store, 1)
    sub, held = Subscriber(store, verify_every=2), worker()
    sub.sync(held)
    sub.sync(held)  # recounts
    sub.verify()
    assert [(event.version, event.equal) for event in of(received, events.Recounted)] == [(0, True)] * 2
    held["norm"][3] = 5.0
    with pytest.raises(VerificationError):
        sub.verify()
    sub.sync(held)
    held["norm"][3] = 5.0
    sub.sync(held, verify=True)
    assert [event.equal for event in of(received, events.Recounted)][2:] == [False, False]
    assert of(received, events.Synced)[-1].repaired


def test_a_scrub_emits_every_recount(received: Received) -> None:
    store = MemoryStore()
    publish_steps(store, 1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with sub.scrub(every_s=0.01):
        _wait_until(lambda: len(of(received, events.Recounted)) >= 3)
        held["norm"][3] = 5.0
        _wait_until(lambda: not of(received, events.Recounted)[-1].equal)
    with pytest.raises(VerificationError, match="something else has written to"):
        sub.sync(held)


def _wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)


# Progress


@pytest.mark.usefixtures("parts_as_objects")
def test_the_progress_of_an_anchor_goes_from_nothing_to_all_that_its_record_names(
    received: Received, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pulsesync.publish.anchors.PART_BYTES", 100)  # several parts
    monkeypatch.setattr("pulsesync.run.reporting.PROGRESS_S", 0.0)
    store = MemoryStore()
    publish_steps(store, 1, grid={"*.weight": (5, 1)}, min_tile=1)
    parts = parts_of(store, keys.anchor_key(0))
    assert len(parts) > 1
    sizes = [len(store.get(part)) for part in parts]
    for cache in (None, tmp_path, tmp_path):  # fetched, spooled, and read from the disk
        forget(received)
        report = Subscriber(store, cache=cache).sync(worker())
        progress = of(received, events.TransferProgress)
        assert [event.done_bytes for event in progress] == [sum(sizes[:n]) for n in range(len(sizes) + 1)]
        assert {(event.what, event.total_bytes) for event in progress} == {("anchor", sum(sizes))}
    assert report.fetched_bytes < sum(sizes)  # that was the last one


def test_many_patches_show_progress_and_few_do_not(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.run.reporting.PROGRESS_S", 0.0)
    store, training = MemoryStore(), Training()
    publish_steps(store, 1, training)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    forget(received)
    for count in (fetcher.AHEAD, fetcher.AHEAD + 1):
        with Publisher(store) as publisher:
            for _ in range(count):
                training.step()
                publisher.publish(training.weights)
        sub.sync(held)
        progress = [event for event in of(received, events.TransferProgress) if event.what == "patches"]
        assert (len(progress) > 0) == (count > fetcher.AHEAD)
    assert progress[0].done_bytes == 0
    assert progress[-1].done_bytes == progress[-1].total_bytes > 0
    assert len(progress) == 1 + count


def test_progress_is_emitted_a_few_times_a_second(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    from pulsesync.run import reporting

    clock = [1000.0]
    monkeypatch.setattr(reporting, "time", type("Clock", (), {"monotonic": staticmethod(lambda: clock[0])}))
    transfer = reporting.Transfer("runs/one", "anchor", 1000)
    for _ in range(1000):
        clock[0] += 1 / 1024  # exact
        transfer.add(1)
    progress = of(received, events.TransferProgress)
    assert [event.done_bytes for event in progress] == [0, 256, 512, 768, 1000]


# What is not a sync of a worker


def test_a_trainer_that_resumes_and_a_squash_are_no_syncs(received: Received) -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 3, training, epoch_patches=2)
    with Publisher(store, epoch_patches=2) as publisher:  # reads the run, to continue it
        training.step()
        publisher.publish(training.weights)
    assert Squasher(store, epoch_patches=2).run()
    assert not of(received, events.Synced)
    assert not of(received, events.SyncFailed)


# Credentials


SECRETS = ("hunter2", "AKIASECRET", "tok3n")


@pytest.mark.parametrize(
    ("store", "location"),
    [
        (lambda: open_store("runs/one"), "runs/one"),
        (lambda: open_store("memory://one"), "memory://one"),
        (lambda: RetryStore(HttpStore("https://host:444/run", token="tok3n")), "https://host:444/run"),
        (
            lambda: ObjectStore("s3://bucket/run", access_key_id="AKIASECRET", secret_access_key="hunter2"),
            "s3://bucket/run",
        ),
        (lambda: _Foreign("ftp://user:hunter2@host/run?key=AKIASECRET#tok3n"), "ftp://host/run"),
    ],
)
def test_a_location_names_the_run_and_no_credential(store: Callable[[], Any], location: str) -> None:
    assert location_of(store()) == location
    assert Subscriber(store()).events.location == location
    assert Publisher(store()).events.location == location


class _Foreign(Watched):
    """A store of the user's own class, with credentials in its address and in its errors."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        del self.store  # so that it is not taken for a wrapper


class _Leaking(MemoryStore):
    """A store whose address has credentials, and whose errors repeat it."""

    def __init__(self) -> None:
        super().__init__(url="https://user:hunter2@host/run?key=AKIASECRET")
        self.fails = False

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if self.fails:
            raise StoreError(f"no answer from {self.url}, twice (https://tok3n@host/b)", key=key)
        return super().get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.fails:
            raise StoreError(f"no answer from {self.url}", key=key)
        super().put(key, data)


@pytest.mark.usefixtures("parts_as_objects")
def test_no_event_contains_a_credential(received: Received) -> None:
    store, training = _Leaking(), Training()
    publisher, sub, held = Publisher(store), Subscriber(store), worker()
    publisher.publish(training.weights)
    publisher.flush()
    sub.sync(held)
    sub.verify()
    store.fails = True
    training.step()
    with pytest.raises(StoreError):
        publisher.publish(training.weights)
    with pytest.raises(StoreError):
        sub.sync(held)
    store.fails = False
    publisher.publish(training.weights)
    publisher.close()
    kinds = {type(event).__name__ for event in of(received, events.RunEvent)}
    assert kinds >= {"VersionPublished", "PublishFailed", "AnchorPublished", "Synced", "SyncFailed", "Recounted"}
    assert {event.location for event in of(received, events.RunEvent)} == {"https://host/run"}
    assert not any(secret in repr(event) for event in received for secret in SECRETS)


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("s3://bucket/a@b/run", "s3://bucket/a@b/run"),
        ("cannot read 'https://u:p@h:1/x?sig=abc' now", "cannot read 'https://h:1/x' now"),
        ("https://user:p@ss@host/run", "https://host/run"),
        ("is it http://h/run? Check it.", "is it http://h/run? Check it."),
        ("C:\\runs\\one, a@b.c, what?", "C:\\runs\\one, a@b.c, what?"),
    ],
)
def test_addresses_lose_user_query_and_fragment_and_nothing_else(text: str, clean: str) -> None:
    assert without_credentials(text) == clean


def test_an_error_without_a_text_is_named() -> None:
    class BadError(Exception):
        def __str__(self) -> str:
            raise OSError

    assert describe_error(BadError()) == "BadError"


# Listeners in the way


def _run_both(store: Any) -> tuple[list[Any], dict[str, Any]]:
    """Publish and sync some versions; return what the reports say but for times, and the worker's weights."""
    facts: list[Any] = []
    training, held = Training(), worker()
    with Publisher(store) as publisher, Subscriber(store) as sub:
        for step in range(4):
            report = publisher.publish(training.weights, step=step)
            publisher.flush()
            facts.append((report.version, report.step, report.changed))
            synced = sub.sync(held)
            facts.append((synced.version, synced.path, synced.changed, synced.digest))
            training.step()
    return facts, held


def test_a_listener_that_raises_alters_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: events.Event) -> None:
        raise RuntimeError("listener")

    plain = _run_both(MemoryStore())
    with pulse.listen(fail) as listening:
        facts, held = _run_both(MemoryStore())
    assert facts == plain[0]
    assert equal(held, plain[1])
    assert listening.failed >= 9  # 4 versions, 4 syncs and an anchor
    assert "The event listener" in caplog.text


def test_a_listener_that_sleeps_or_needs_the_emitters_lock_keeps_nothing_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "QUEUED", 2)
    release = threading.Event()
    with pulse.listen(lambda event: release.wait(60)) as sleeping:
        began = time.perf_counter()
        _run_both(MemoryStore())
        assert time.perf_counter() - began < 30
        release.set()
    assert sleeping.dropped > 0

    monkeypatch.undo()
    store, training, held = MemoryStore(), Training(), worker()
    sub = Subscriber(store)
    publisher = Publisher(store)
    answers: list[int] = []

    def call_back(event: events.Event) -> None:
        if isinstance(event, events.VersionPublished):
            publisher.flush()
            answers.append(sub.sync(held).version)

    with pulse.listen(call_back):
        for _ in range(3):
            publisher.publish(training.weights)
            training.step()
        publisher.close()
    assert answers == sorted(answers)
    assert len(answers) == 3


# Logs


def test_the_log_has_a_line_for_what_happened_and_none_for_an_idle_sync(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pulsesync")
    training, held = Training(), worker()
    with Publisher("memory://logged") as publisher, Subscriber("memory://logged") as sub:
        publisher.publish(training.weights, step=3)
        sub.sync(held)
        training.step()
        publisher.publish(training.weights, step=4)
        sub.sync(held)
        lines = [record.getMessage() for record in caplog.records]
        assert [line.partition(", step")[0] for line in lines if line.startswith("Published to")] == [
            "Published to memory://logged: version 0",
            "Published to memory://logged: version 1",
        ]
        assert sum(line.startswith("Published the anchor of version 0 to memory://logged: ") for line in lines) == 1
        assert [line.partition(":")[0] for line in lines if line.startswith("Synced")] == ["Synced from memory"] * 2
        caplog.clear()
        for _ in range(3):
            sub.sync(held)
        assert not caplog.records
        sub.verify()
        assert [record.levelname for record in caplog.records] == ["INFO"]
        assert "they are as published" in caplog.text


def test_a_sync_that_is_planned_again_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 2, training)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    damaged = store.get(keys.manifest_key(1))
    store.put(keys.manifest_key(1), damaged[:-1])
    with pytest.raises(FormatError):
        sub.sync(held)
    assert "Planning the sync again, because manifests/" in caplog.text


def test_a_request_that_is_repeated_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pulsesync.store.retry.sleep", lambda _: None)
    caplog.set_level(logging.INFO, "pulsesync")
    inner, tries = Watched(LocalStore(tmp_path)), []
    inner.before = lambda verb, key: _refuse(key) if tries.append(key) or len(tries) < 3 else None  # type: ignore[func-returns-value]
    RetryStore(inner).put("head", b"1")
    assert [record.getMessage() for record in caplog.records] == [
        f"Attempt {n} of 5 at a request failed; trying again: too busy." for n in (1, 2)
    ]


# The page


def test_the_page_on_metrics_has_every_event_with_every_field() -> None:
    page = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `")}
    common = {field.name for field in fields(events.RunEvent)}
    kinds = [getattr(events, name) for name in events.__all__]
    concrete = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, events.Event)]
    for kind in set(concrete) - {events.Event, events.RunEvent}:
        named = rows[kind.__name__].split("|")[3]
        missing = {field.name for field in fields(kind)} - common - set(re.findall(r"`(\w+)`", named))
        assert not missing, f"docs/metrics.md: {kind.__name__} lacks {missing}"
