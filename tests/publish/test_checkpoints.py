"""A trainer that is restored from its checkpoint continues the run: with the publisher's state, and after kills."""

import io
import json
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import SigningKey
from pulsesync.core.events import Event, Synced, listen
from pulsesync.errors import (
    RunForkedError,
    RunReplacedError,
    RunRolledBackError,
    SignatureError,
    StateError,
    StoreError,
)
from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.maintain.prune import prune
from pulsesync.publish.checkpoint import PublisherState
from pulsesync.run import keys, reader
from pulsesync.store import LocalStore, MemoryStore, Store
from tests.helpers import nudge
from tests.processes import Fleet, alive, fleet, told
from tests.publish.test_sharded import Group, Rank
from tests.publishers import Publisher, ShardedPublisher
from tests.readers import Subscriber
from tests.runs import Training, Watched, down, equal, kept, make_squash, publish_steps, version, versions, worker
from tests.tiers import slow

assert fleet  # a fixture

pytestmark = pytest.mark.usefixtures("parts_as_objects")

WAIT_S = 20.0  # for a process; each takes less than a second

# One process


@pytest.fixture
def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)


def checkpoint_at(step: int, store: Store, training: Training, to: int, **options: Any) -> PublisherState:
    """Publish steps 0 to `to`, one version each; return the publisher's state after one of them."""
    state = PublisherState()
    with Publisher(store, **options) as pub:
        for now in range(to + 1):
            training.step()
            pub.publish(training.weights, step=now)
            if now == step:
                state = pub.state_dict()
    return state


def objects(store: Store) -> dict[str, bytes]:
    """All that is in a run, by key, without the hint at its newest version."""
    prefixes = ("manifests/", "parts/", "layouts/", "anchors/", "starts/", "files/", "publisher/")
    return {entry.key: store.get(entry.key) for prefix in prefixes for entry in store.list(prefix)}


def copy_of(store: Store) -> MemoryStore:
    """A backup."""
    out = MemoryStore()
    for key, data in objects(store).items():
        out.put(key, data)
    return out


def restored(store: Store, state: PublisherState, **options: Any) -> Publisher:
    pub = Publisher(store, **options)
    pub.load_state_dict(state)
    return pub


def test_a_restored_trainer_continues_the_run_with_a_patch_while_its_step_goes_back() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(2, store, training, to=5)
    training.step()
    with restored(store, state) as pub:
        report = pub.publish(training.weights, step=3)
    assert (report.version, report.step) == (6, 3)
    newest = version(store, 6)
    assert newest.base is not None
    assert (newest.run, newest.base.version, newest.base.digest) == (state["run"], 5, version(store, 5).digest)
    assert [version(store, n).step for n in range(7)] == [0, 1, 2, 3, 4, 5, 3]


def test_a_worker_reports_both_steps_and_warns_once_when_the_trainer_went_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(2, store, training, to=5)
    sub, weights = Subscriber(store), worker()
    first = sub.sync(weights)
    assert (first.from_version, first.from_step, first.went_back) == (None, None, False)
    with restored(store, state) as pub:
        pub.publish(training.weights, step=3)
        back = sub.sync(weights)
        training.step()
        pub.publish(training.weights, step=4)
    onwards, idle = sub.sync(weights), sub.sync(weights)
    assert (back.from_version, back.version, back.from_step, back.step) == (5, 6, 5, 3)
    assert (onwards.from_version, onwards.version, onwards.from_step, onwards.step) == (6, 7, 3, 4)
    assert (idle.from_version, idle.version, idle.path) == (7, 7, ())
    assert [one.went_back for one in (back, onwards, idle)] == [True, False, False]
    assert back.path == ("patch",)
    assert equal(weights, training.weights)
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert warned == [
        "The trainer went back to an earlier step at version 6: version 5 was step 5, and version 6 is step 3."
    ]


BELOW, EQUAL, ABOVE = (3, 4, 5), (3, 4, 5, 6), (3, 4, 5, 6, 7, 8)
WAYS = ["patches", "squash", "anchor", "restart"]


@pytest.mark.parametrize(
    ("way", "steps"),
    [
        *((way, EQUAL) for way in WAYS),
        ("patches", BELOW),
        ("anchor", ABOVE),
        *(
            slow(way, steps)
            for way in WAYS
            for steps in (BELOW, ABOVE)
            if (way, steps) not in {("patches", BELOW), ("anchor", ABOVE)}
        ),
    ],
    ids=str,
)
def test_a_worker_that_jumps_over_a_rewind_is_told(
    way: str, steps: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """The steps of the two versions do not show it: the trainer may have passed the step of the first one again."""
    store, training, options = MemoryStore(), Training(), {"epoch_patches": 3, "anchor_every": 0.0}
    state = checkpoint_at(2, store, training, to=6, **options)
    sub, weights, heard = Subscriber(store, epoch_patches=3), worker(), list[Event]()
    assert not sub.sync(weights).went_back
    with restored(store, state, **options) as pub:
        for step in steps:
            training.step()
            pub.publish(training.weights, step=step)
            pub.flush()  # with the anchor, if one is due
    if way == "squash":
        make_squash(store, 0, 2, epoch_patches=3)
    for entry in list(store.list("anchors/")):
        if way != "anchor":
            store.delete(entry.key)
    if way == "anchor":
        store.delete(keys.manifest_key(7))
    if way == "restart":
        sub = Subscriber(store, epoch_patches=3)
        assert sub.resume(weights, 6, None)
    with listen(heard.append):
        report = sub.sync(weights)
    assert (report.from_version, report.from_step, report.version, report.step) == (6, 6, 6 + len(steps), steps[-1])
    assert (report.went_back, report.rewound_at) == (True, 7)
    assert ("squash" in report.path, "anchor" in report.path) == (way == "squash", way == "anchor")
    assert [one.went_back for one in heard if isinstance(one, Synced)] == [True]
    assert "went back to an earlier step at version 7: version 6 was step 6" in caplog.text
    with restored(store, PublisherState(), **options) as pub:  # resumed again, with steps that grow
        pub.publish(training.weights, step=20)
        report = sub.sync(weights)
    assert (report.went_back, report.rewound_at) == (False, 7)


def test_a_rewind_within_steps_that_are_skipped_is_recorded() -> None:
    store, training = MemoryStore(), Training()
    with Publisher(store, publish_every=4) as pub:
        for step in (*range(9), *range(5, 13)):  # versions of steps 0, 4 and 8, of 8 again, and of 12
            training.step()
            pub.publish(training.weights, step=step)
    records = [reader.RunReader(store, None).version(number) for number in range(5)]
    assert [(one.step, one.rewound_at) for one in records if one] == [(0, None), (4, None), (8, None), (8, 3), (12, 3)]


def test_records_without_rewinds_are_those_of_the_first_release_and_their_steps_decide() -> None:
    """A run that pulsesync 0.1.0 has written for a time has no record of the rewinds in it."""
    store, training = MemoryStore(), Training()
    state = checkpoint_at(2, store, training, to=5)
    sub, weights = Subscriber(store), worker()
    sub.sync(weights)
    with restored(store, state) as pub:
        for step in (3, 4):
            pub.publish(training.weights, step=step)
    for number in (6, 7):
        store.put(keys.manifest_key(number), replace(version(store, number), rewound_at=None).build())
    report = sub.sync(weights)
    assert (report.went_back, report.rewound_at) == (True, None)
    with restored(store, PublisherState()) as pub:
        pub.publish(training.weights, step=5)
        pub.publish(training.weights, step=5)
        pub.publish(training.weights, step=4)
    assert [version(store, number).rewound_at for number in range(6, 11)] == [None, None, None, None, 10]


def test_a_rewind_that_is_coalesced_with_later_steps_is_recorded() -> None:
    store, training = Watched(), Training()
    blocked, go = threading.Event(), threading.Event()
    with Publisher(store) as pub:
        for step in range(4):
            pub.publish(training.weights, step=step)

        def hold(verb: str, key: str) -> None:
            if verb == "create":
                blocked.set()
                assert go.wait(WAIT_S)

        store.before = hold
        training.step()
        pub.publish(training.weights, step=4, wait=False)
        assert blocked.wait(WAIT_S)
        for step in (2, 3, 9):
            training.step()
            pub.publish(training.weights, step=step, wait=False)
        go.set()
        pub.flush()
    assert [(version(store, n).step, version(store, n).rewound_at) for n in (4, 5)] == [(4, None), (9, 5)]


def test_a_worker_that_chooses_an_older_version_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    publish_steps(store, 4)
    sub, weights = Subscriber(store), worker()
    sub.sync(weights)
    report = sub.sync(weights, version=1)
    assert (report.from_version, report.version, report.from_step, report.step) == (3, 1, 3, 1)
    assert not report.went_back
    assert not caplog.records


def test_a_report_begins_where_the_report_before_it_ended_whatever_happened_between() -> None:
    store, training = Watched(), Training()
    state = checkpoint_at(0, store, training, to=4)
    sub, weights = Subscriber(store), worker()
    sub.sync(weights)
    with restored(store, state) as pub:
        pub.publish(training.weights, step=1)
    weights["norm"].view(np.uint16)[3] ^= 1
    store.fail_at("anchors/", "parts/")
    with pytest.raises(StoreError, match="line is down"):
        sub.sync(weights, verify=True)  # the damage was found, and the subscriber knows no version any more
    store.fail_at()
    report = sub.sync(worker())
    assert (report.from_version, report.version, report.from_step, report.step) == (4, 5, 4, 1)


def test_versions_of_another_run_are_not_where_a_report_begins(
    look_again_at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, place = MemoryStore(), MemoryStore(), Watched()
    publish_steps(first, 3)
    publish_steps(second, 6)
    place.store = first
    sub, weights = Subscriber(place), worker()
    sub.sync(weights)
    place.store = second
    report = sub.sync(weights, follow_replaced=True)
    assert (report.version, report.from_version, report.from_step) == (5, None, None)
    assert "went back" not in caplog.text


def test_a_resumed_worker_reports_the_version_that_it_was_left_at() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(0, store, training, to=0)
    weights = kept(training.weights)
    with restored(store, state) as pub:
        training.step()
        pub.publish(training.weights, step=1)
    sub = Subscriber(store)
    assert sub.resume(weights, 0, None)
    report = sub.sync(weights)
    assert (report.from_version, report.from_step, report.path) == (0, 0, ("patch",))


def test_a_folder_reports_the_step_of_its_current_copy_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, training = MemoryStore(), Training()
    reports, state = [], PublisherState()
    with HuggingFaceFolder(store, tmp_path / "folder", hold_s=0) as folder:
        for steps in ((0, 10), (3, 4)):
            with restored(store, state) as pub:
                for step in steps:
                    training.step()
                    pub.publish(training.weights, step=step)
                    pub.flush()
                    update = folder.update()
                    assert update is not None
                    reports.append((update.sync.from_version, update.sync.from_step, update.sync.step))
                state = pub.state_dict()
    assert reports == [(None, None, 0), (0, 0, 10), (1, 10, 3), (2, 3, 4)]
    assert caplog.text.count("went back") == 1


# The state


def test_a_state_names_the_run_and_the_last_version() -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        for step in (7, 9):
            pub.publish(Training(seed=step).weights, step=step)
        last = version(store, 1)
        assert pub.state_dict() == {"run": last.run, "version": 1, "step": 9, "digest": last.digest}


def test_a_state_survives_json_and_torch() -> None:
    torch = pytest.importorskip("torch")
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=2)
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save({"publisher": state}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["publisher"]
    with restored(store, loaded) as pub:
        assert pub.publish(training.weights, step=2).version == 3


def test_a_state_is_empty_before_the_first_version_and_then_constrains_nothing() -> None:
    first, second = MemoryStore(), MemoryStore()
    publish_steps(second, 2)
    with Publisher(first) as pub:
        state = pub.state_dict()
    assert state == {}
    for store, expected in ((first, 0), (second, 2)):
        with restored(store, state) as pub:
            assert pub.publish(Training().weights).version == expected


def test_a_state_that_was_loaded_is_the_state_until_the_first_version() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=2)
    with restored(store, state) as pub:
        mine = pub.state_dict()
        assert mine == state
        mine["version"] = 99  # a copy
        assert pub.state_dict() == state
        pub.publish(training.weights, step=2)
        assert pub.state_dict()["version"] == 3


def test_a_state_names_only_what_is_committed() -> None:
    store, training, release = Watched(), Training(), threading.Event()
    with Publisher(store) as pub:
        pub.publish(training.weights, step=0)
        store.before = lambda verb, key: release.wait(10) if verb == "create" else None
        training.step()
        future = pub.publish(training.weights, step=1, wait=False)
        assert pub.state_dict()["version"] == 0
        release.set()
        future.result(10)
        assert pub.state_dict()["version"] == 1


def test_a_state_names_the_newest_version_of_the_run_if_the_first_publish_resumed_it_and_failed() -> None:
    store, training = Watched(), Training()
    state = checkpoint_at(1, store, training, to=3)
    with restored(store, state) as pub:
        store.before = lambda verb, key: down(key) if verb == "put" else None
        training.step()
        with pytest.raises(StoreError, match="line is down"):
            pub.publish(training.weights, step=2)
        store.fail_at()
        assert pub.state_dict()["version"] == 3


# Refusals


def refused(store: Store, state: PublisherState, error: type[Exception], **options: Any) -> Any:
    """Publish from a restored trainer, which must fail and leave the store as it was; return the error."""
    before = objects(store)
    with restored(store, state, **options) as pub:
        for _ in range(2):
            with pytest.raises(error) as caught:
                pub.publish(Training().weights, step=9)
        assert pub.state_dict() == state
    assert objects(store) == before
    message = str(caught.value)
    assert f"names version {state['version']} of run {state['run']}" in message
    assert "publish to the location of that run, or leave out load_state_dict" in message
    assert "follow_replaced" not in message
    return caught.value


def test_another_run_at_the_location_is_refused(look_again_at_once: None) -> None:
    store, other = MemoryStore(), MemoryStore()
    state = checkpoint_at(1, store, Training(), to=3)
    publish_steps(other, 3)
    error = refused(other, state, RunReplacedError)
    assert (error.version, error.expected, error.actual) == (1, state["run"], version(other, 0).run)


def test_an_empty_location_is_refused() -> None:
    state = checkpoint_at(1, MemoryStore(), Training(), to=1)
    error = refused(MemoryStore(), state, RunReplacedError)
    assert "there is no run at" in str(error)
    assert (error.version, error.expected, error.run) == (1, state["run"], None)


def test_a_run_that_was_restored_from_a_backup_is_refused(look_again_at_once: None) -> None:
    store = MemoryStore()
    publish_steps(store, 3)
    backup = copy_of(store)
    state = checkpoint_at(2, store, Training(), to=2)
    error = refused(backup, state, RunRolledBackError)
    assert (error.version, error.newest, error.run) == (5, 2, state["run"])


def test_a_run_that_was_forked_is_refused(look_again_at_once: None) -> None:
    store = MemoryStore()
    publish_steps(store, 3)
    fork = copy_of(store)
    state = checkpoint_at(2, store, Training(seed=1), to=2, resume=True)
    checkpoint_at(3, fork, Training(seed=2), to=3, resume=True)
    error = refused(fork, state, RunForkedError)
    assert (error.version, error.expected, error.actual) == (5, state["digest"], version(fork, 5).digest)


def test_a_refusal_is_looked_at_twice(look_again_at_once: None) -> None:
    store, training = Watched(), Training()
    state = checkpoint_at(1, store, training, to=3)
    stale = iter([True])

    def lose_once(key: str, data: bytes) -> bytes:
        if key == "manifests/0000000000000001" and next(stale, False):
            return data.replace(state["run"].encode(), b"0" * 32)
        return data

    store.received = lose_once
    with restored(store, state) as pub:
        assert pub.publish(training.weights, step=2).version == 4


# Weights that do not continue a run

FILES = {"config.json": b"{}"}


@pytest.mark.parametrize("wait", [True, False])
def test_a_fresh_model_is_refused_and_nothing_is_written(wait: Any, tmp_path: Path) -> None:
    store, other = LocalStore(tmp_path), Training(seed=1)
    publish_steps(store, 3)
    before = objects(store)
    with Publisher(store, files=FILES) as pub:
        for step in (0, 2, 3):  # once refused, a higher step does not make it a continuation
            with pytest.raises(StateError, match="do not continue the run") as caught:
                pub.publish(other.weights, step=step, wait=wait)
        assert pub.state_dict() == {}  # a checkpoint that is saved now does not make it one either
        assert pub.version is None
    assert objects(store) == before
    message = str(caught.value)
    assert "their step 3 is not above" not in message
    assert "weights were refused by this publisher before, whose step was not above its step 2" in message
    for way in ("load_state_dict", "new location", "resume=True"):
        assert way in message


def test_weights_that_are_refused_without_a_step_name_the_argument() -> None:
    store = MemoryStore()
    publish_steps(store, 3)
    for step in (0, 1):
        with Publisher(store) as pub, pytest.raises(StateError) as caught:
            pub.publish(Training(seed=1).weights, step=step)
        assert ("If no step was passed" in str(caught.value)) is (step == 0)


@pytest.mark.parametrize("way", ["resume", "checkpoint", "location", "above", "few"])
def test_weights_that_continue_a_run_or_are_said_to_are_published(way: str, tmp_path: Path) -> None:
    store, training = LocalStore(tmp_path / "run"), Training()
    state = checkpoint_at(1, store, training, to=2)
    weights = training.weights if way == "few" else Training(seed=1).weights
    with Publisher(tmp_path / "new" if way == "location" else store, files=FILES, resume=way == "resume") as pub:
        if way == "checkpoint":
            pub.load_state_dict(state)
        report = pub.publish(weights, step=3 if way == "above" else 0)
    assert report.version == (0 if way == "location" else 3)
    held = worker()
    Subscriber(pub.store).sync(held)
    assert equal(held, weights)
    assert [file.name for file in version(pub.store, report.version).files] == ["config.json"]


def test_a_publisher_that_resumes_its_own_run_is_not_refused() -> None:
    """As a team does after a rank was lost, also if its caller gives no steps and most weights change in each."""
    store = MemoryStore()
    with Publisher(store) as pub:
        pub.publish(Training(seed=0).weights)
        pub.flush()
        assert pub._sender is not None
        pub._sender.committed.base = None
        assert pub.publish(Training(seed=1).weights).version == 1


def test_a_model_without_tensors_starts_no_run() -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        with pytest.raises(StateError, match="there is no tensor to publish"):
            pub.publish({}, wait=False)
        assert objects(store) == {}
        assert pub.publish(Training().weights).version == 0


@pytest.mark.parametrize(("step", "warns"), [(0, True), (1, False)])
def test_a_version_that_could_not_be_compared_is_published_with_a_warning(
    step: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched()
    store.fail_at("anchors/", "parts/")
    with suppress(StoreError), Publisher(store) as pub:
        pub.publish(Training().weights)
    store.fail_at()
    caplog.clear()
    with Publisher(store) as pub:
        assert pub.publish(Training(seed=1).weights, step=step).codec is None
    warned = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert ["its weights were not compared with version 0 (step 0)" in one for one in warned] == [True] * warns


@pytest.mark.parametrize("says", ["nothing", "resume", "state"])
def test_of_a_team_all_ranks_refuse_a_fresh_model(says: str) -> None:
    store, training = MemoryStore(), Training()
    first = Group(store, 3)
    for step in range(3):
        first.publish(training.weights, step=step)
    first.flush()
    state, before = first.pubs[0].state_dict(), objects(store)
    group = Group(store, 3, files=FILES, resume=says == "resume")
    if says == "state":
        group.pubs[0].load_state_dict(state)
    found = group.try_publish(Training(seed=1).weights, step=1)
    if says != "nothing":
        assert [one.version for one in found] == [3, 3, 3]
        return
    assert [(type(one), one.failed_rank) for one in found] == [(StateError, None), (StateError, 0), (StateError, 0)]
    assert all("do not continue the run" in str(one) for one in found)
    assert objects(store) == before
    training.step()
    assert group.publish(training.weights, step=3).version == 3


def test_a_pruned_version_is_no_reason_to_refuse() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=80, anchor_every=0.0)
    prune(store, keep_versions=10, keep_hours=0.0, grace_hours=0.0)
    assert 1 not in versions(store)
    with restored(store, state) as pub:
        assert pub.publish(training.weights, step=2).version == 81


def test_a_run_that_another_key_signed_is_refused_before_the_checkpoint_is_compared() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=2, signing_key=SigningKey.generate())
    with restored(store, state) as pub, pytest.raises(SignatureError, match="signing_key"):
        pub.publish(training.weights, step=2)


def test_a_signed_run_is_continued_with_its_key() -> None:
    store, training, key = MemoryStore(), Training(), SigningKey.generate()
    state = checkpoint_at(1, store, training, to=2, signing_key=key)
    with restored(store, state, signing_key=key) as pub:
        assert pub.publish(training.weights, step=2).version == 3


GOOD = {"run": "0" * 32, "version": 3, "step": 3, "digest": "0" * 64}


@pytest.mark.parametrize(
    "state",
    [
        {"run": "0" * 32},
        {**GOOD, "more": 1},
        {**GOOD, "version": "3"},
        {**GOOD, "version": True},
        {**GOOD, "digest": None},
        {f"layer.{n}.weight": [0.0] * 1000 for n in range(1000)},
        None,
        [],
        "state",
    ],
)
def test_what_is_no_state_of_a_publisher_is_refused_in_few_words(state: Any) -> None:
    with Publisher(MemoryStore()) as pub:
        with pytest.raises(ValueError, match="a dictionary with run, version, step, digest") as caught:
            pub.load_state_dict(state)
        assert len(str(caught.value)) < 400
        assert pub.state_dict() == {}


def test_a_state_cannot_be_loaded_after_the_first_publish() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=2)
    with Publisher(store) as pub:
        pub.publish(training.weights, step=2)
        with pytest.raises(RuntimeError, match="had published or resumed"):
            pub.load_state_dict(state)


def test_a_state_can_be_loaded_after_a_first_publish_that_was_refused() -> None:
    store, training = MemoryStore(), Training()
    state = checkpoint_at(1, store, training, to=2)
    with Publisher(store) as pub:
        with pytest.raises(StateError, match="do not continue the run"):
            pub.publish(Training(seed=1).weights, step=0)
        pub.load_state_dict(state)
        assert pub.publish(training.weights, step=2).version == 3


# Teams


def test_a_restored_team_continues_the_run() -> None:
    store, training = MemoryStore(), Training()
    before = Group(store, 2)
    for step in range(3):
        training.step()
        before.publish(training.weights, step=step)
        if step == 1:
            states = [pub.state_dict() for pub in before.pubs]
    assert states[0] == states[1]
    before.flush()
    team = Group(store, 2)
    for pub in team.pubs:
        pub.load_state_dict(states[0])
    report = team.publish(training.weights, step=2)
    assert report.version == 3
    assert version(store, 3).base is not None
    team.flush()


def test_every_rank_of_a_team_is_refused_another_run(look_again_at_once: None) -> None:
    state = checkpoint_at(1, MemoryStore(), Training(), to=1)
    store = MemoryStore()
    publish_steps(store, 2)
    team = Group(store, 2)
    for pub in team.pubs:
        pub.load_state_dict(state)
    found = team.try_publish(Training().weights, step=2)
    assert [type(one) for one in found] == [RunReplacedError, RunReplacedError]
    assert [one.failed_rank for one in found] == [None, 0]
    assert versions(store) == [0, 1]


def test_a_state_outlives_the_base_that_a_team_lost() -> None:
    store, training = Watched(), Training()
    team = Group(store, 2)
    team.publish(training.weights, step=0)
    state = team.pubs[0].state_dict()
    team.pubs[1] = ShardedPublisher(store, Rank(team.crew, 1))  # a rank that was restarted: the team has no common base
    store.fail_at("manifests/")
    assert [type(one) for one in team.try_publish(training.weights, step=1)] == [StoreError, StoreError]
    assert team.pubs[0].state_dict() == state
    store.fail_at()
    assert team.publish(training.weights, step=1).version == 1
    assert [pub.state_dict()["version"] for pub in team.pubs] == [1, 1]
    team.flush()


# The page


def run_page(folder: str, last: int) -> None:
    """The loop of the page, in a folder, to some last step."""
    page = (Path(__file__).parents[2] / "docs" / "usage.md").read_text()
    script = page.partition("<!-- run by tests/publish/test_checkpoints.py -->\n```python\n")[2].partition("```")[0]
    assert script.count("step < 100") == 1
    os.chdir(folder)
    exec(compile(script.replace("step < 100", f"step < {last}"), "docs/usage.md", "exec"), {})


def test_the_loop_of_the_page_continues_where_its_checkpoint_was_taken(tmp_path: Path, fleet: Fleet) -> None:
    torch = pytest.importorskip("torch")
    store, model = LocalStore(tmp_path / "run"), torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    sub = Subscriber(store)
    for last, path in ((27, None), (43, ("patch",))):
        pid, out = fleet.start(run_page, folder=str(tmp_path), last=last)
        end = time.monotonic() + WAIT_S
        while alive(pid) and time.monotonic() < end:
            time.sleep(0.005)
        assert out.exists(), told(out)
        report = sub.sync(model)
        assert report.step == last
        assert path is None or set(report.path) == set(path)
    steps = [version(store, number).step for number in versions(store)]
    back = steps.index(27)
    assert steps[back : back + 2] == [27, 20]
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert (saved["step"], saved["publisher"]["run"]) == (40, version(store, 0).run)


# Kills. The trainer is a process of its own; its weights depend on the step alone, so that the worker, in the
# test's process, can compute which weights are right.

LAST, SAVE_EVERY = 14, 5


def trained(weights: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The weights after one more step."""
    rng = np.random.default_rng([18, step])
    return {name: nudge(rng, w.view(np.uint16), 0.03).view(ml_dtypes.bfloat16) for name, w in weights.items()}


@cache
def weights_at(step: int) -> dict[str, Any]:
    return trained(weights_at(step - 1), step) if step else kept(Training(seed=18).weights)


def train(folder: str, stall: str, last: int) -> None:
    """Train to a last step from the checkpoint, if there is one, and stall at a point until the process is killed.

    A restored trainer publishes its weights at once, and then waits for the file `go`.
    """
    home, checkpoint = Path(folder), Path(folder, "checkpoint")

    def reach(point: str) -> None:
        if point == stall:
            (home / "stalled").touch()
            threading.Event().wait()

    store = Watched(LocalStore(home / "run"))
    store.before = lambda verb, key: reach(f"before {verb} {key}")
    store.after = lambda verb, key: reach(f"after {verb} {key}")
    saved = pickle.loads(checkpoint.read_bytes()) if checkpoint.exists() else None
    step, weights = (saved["step"], saved["weights"]) if saved else (0, weights_at(0))
    with Publisher(store) as pub:
        pub.load_state_dict(saved["publisher"] if saved else {})
        pub.publish(weights, step=step)
        while saved and not (home / "go").exists():
            time.sleep(0.005)
        while step < last:
            step += 1
            weights = trained(weights, step)
            if step % SAVE_EVERY == 0:
                data = pickle.dumps({"step": step, "weights": weights, "publisher": pub.state_dict()})
                checkpoint.with_suffix(".new").write_bytes(data)
                checkpoint.with_suffix(".new").replace(checkpoint)
                reach(f"saved {step}")
            pub.publish(weights, step=step, wait=False, coalesce=False)
            reach(f"published {step}")


class Trial:
    """A trainer that is killed and restarted, and a worker that follows it and checks every weight."""

    def __init__(self, home: Path, fleet: Fleet) -> None:
        self.home, self.fleet = home, fleet
        self.store = LocalStore(home / "run")
        self.subscriber, self.weights = Subscriber(self.store), worker()
        self.seen: list[tuple[int, int]] = []  # version and step, by sync that changed weights
        self.went_back: list[tuple[int, int]] = []  # steps, from and to

    @contextmanager
    def trainer(self, stall: str = "", last: int = LAST) -> Iterator[None]:
        """Run a trainer; kill it in the end, if it has not ended."""
        for name in ("stalled", "go"):
            (self.home / name).unlink(missing_ok=True)
        self.pid, self.out = self.fleet.start(train, folder=str(self.home), stall=stall, last=last)
        try:
            yield
        finally:
            if alive(self.pid):
                os.kill(self.pid, signal.SIGKILL)
            while alive(self.pid):
                time.sleep(0.002)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end, f"it did not happen in {WAIT_S} s\n{told(self.out)}"
            time.sleep(0.005)

    def sync(self) -> int:
        """One sync of the worker, and everything that must be true after it; the version."""
        report = self.subscriber.sync(self.weights, wait_s=WAIT_S)
        assert equal(self.weights, weights_at(report.step))
        before = self.seen[-1] if self.seen else (None, None)
        assert (report.from_version, report.from_step) == before
        if report.path:
            assert before[0] is None or report.version > before[0]
            self.seen.append((report.version, report.step))
            if report.went_back:
                assert report.from_step is not None
                self.went_back.append((report.from_step, report.step))
        return report.version

    def follow_to(self, newest: int) -> None:
        self.wait_until(lambda: self.sync() >= newest)

    def stalls(self, newest: int, checkpoint: int) -> None:
        """Follow a trainer until it has stalled: with this newest version, and a checkpoint of this step."""
        self.wait_until(lambda: self.sync() >= newest and (self.home / "stalled").exists())
        self.wait_until(lambda: self.saved_step == checkpoint)
        time.sleep(0.05)  # if it were to publish or to save more, it would
        assert (self.sync(), self.saved_step) == (newest, checkpoint)

    @property
    def saved_step(self) -> int:
        path = self.home / "checkpoint"
        return int(pickle.loads(path.read_bytes())["step"]) if path.exists() else -1

    def finish(self) -> None:
        """Let a restored trainer go on to its last step."""
        (self.home / "go").touch()
        self.wait_until(lambda: self.sync() >= 0 and not alive(self.pid))
        assert self.out.exists(), told(self.out)
        self.sync()  # to what came between the last sync and the end

    @property
    def steps(self) -> list[int]:
        """Of all versions."""
        numbers = versions(self.store)
        assert numbers == list(range(len(numbers)))
        return [version(self.store, number).step for number in numbers]


KILLS = {
    # Where it stalls, the newest version then, and the step of the checkpoint. While a version is stuck in the
    # background, the next one is queued, and the trainer takes one more step before it has to wait.
    "between checkpoint and publish": ("saved 10", 9, 10),
    "between publish and checkpoint": ("published 9", 9, 5),
    "between the body of a version and its record": ("before create manifests/0000000000000007", 6, 5),
    "between the record of a version and the hint at it": ("after create manifests/0000000000000007", 7, 5),
    "while the version of the checkpoint is the newest": ("before create manifests/0000000000000006", 5, 5),
    "while the checkpoint is ahead of the newest version": ("before create manifests/0000000000000008", 7, 10),
}


QUICK = (  # the checkpoint is older than the newest version, to which no hint leads yet; or it is newer
    "between the record of a version and the hint at it",
    "while the checkpoint is ahead of the newest version",
)


@pytest.mark.parametrize(
    ("point", "newest", "saved"),
    [pytest.param(*kill, id=name, marks=[] if name in QUICK else pytest.mark.slow) for name, kill in KILLS.items()],
)
def test_a_trainer_that_is_killed_continues_the_run_from_its_checkpoint(
    point: str, newest: int, saved: int, tmp_path: Path, fleet: Fleet
) -> None:
    trial = Trial(tmp_path, fleet)
    with trial.trainer(stall=point):
        trial.stalls(newest, saved)
    with trial.trainer():
        trial.follow_to(newest + 1)
        assert trial.seen[-2:] == [(newest, newest), (newest + 1, saved)]
        trial.finish()
    assert trial.steps == [*range(newest + 1), *range(saved, LAST + 1)]
    assert trial.seen[-1] == (len(trial.steps) - 1, LAST)
    assert trial.went_back == ([(newest, saved)] if saved < newest else [])


def test_a_trainer_that_is_killed_while_it_is_being_restored_is_restored_again(tmp_path: Path, fleet: Fleet) -> None:
    trial = Trial(tmp_path, fleet)
    with trial.trainer(stall="published 9"):
        trial.stalls(9, 5)
    for point, newest in (
        ("after get manifests/0000000000000009", 9),  # while it looks for the newest version
        ("before create manifests/0000000000000010", 9),
        ("after create manifests/0000000000000010", 10),
    ):
        with trial.trainer(stall=point):
            trial.stalls(newest, 5)
    with trial.trainer():
        trial.follow_to(11)
        trial.finish()
    assert trial.steps == [*range(10), 5, *range(5, LAST + 1)]
    assert trial.went_back == [(9, 5)]


@pytest.mark.slow
def test_a_trainer_that_is_killed_at_any_moment_continues_from_its_checkpoint(tmp_path: Path, fleet: Fleet) -> None:
    """About 8 s: twelve trainers, each killed after some versions and up to 50 ms."""
    trial, rng, expected = Trial(tmp_path, fleet), np.random.default_rng(18), list[int]()
    for _ in range(12):
        first, newest = max(trial.saved_step, 0), len(expected) + int(rng.integers(0, 12))
        with trial.trainer(last=10_000):
            (tmp_path / "go").touch()
            trial.follow_to(newest)
            time.sleep(rng.uniform(0, 0.05))
        expected += range(first, first + len(trial.steps) - len(expected))
        assert trial.steps == expected
    assert trial.sync() == len(expected) - 1
    assert any(later <= earlier for earlier, later in pairwise(expected))  # at least one kill undid a step
