"""Retention, and publishers that write while a prune deletes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.maintain.prune import prune
from pulsesync.maintain.squash import Squasher
from pulsesync.run import keys
from tests.runs import Training, Watched, parts_of, publish_steps, versions, worker


@pytest.fixture
def short_epochs() -> int:
    return 2


OPTIONS: dict[str, Any] = {"keep_versions": 1, "keep_hours": 0.0, "grace_hours": 0.0}


class Recurring:
    """A run in which a patch whose record was pruned is about to be made again, with the same bytes."""

    def __init__(self, epoch: int) -> None:
        rng = np.random.default_rng(0)
        self.store, self.epoch = Watched(), epoch
        self.pub = Publisher(self.store, codec="gap", anchor_every=0.0, epoch_patches=epoch)
        self.weights = {"w": np.zeros(500, np.uint16)}
        self.first = rng.integers(0, 1 << 15, 500, np.uint16)
        self.second = self.first.copy()
        self.second[::50] += 1
        self.publish(self.first)
        self.publish(self.second)
        (self.part,) = parts_of(self.store, keys.manifest_key(1))
        for _ in range(2 * epoch):
            self.publish(rng.integers(0, 1 << 15, 500, np.uint16))
        self.publish(self.first)
        assert prune(self.store, **OPTIONS).versions > 2

    def publish(self, weights: "np.ndarray[Any, Any]") -> None:
        self.weights["w"][...] = weights
        self.pub.publish(self.weights)
        self.pub.flush()

    def joined(self) -> "np.ndarray[Any, Any]":
        held = {"w": np.zeros(500, np.uint16)}
        assert Subscriber(self.store, epoch_patches=self.epoch).sync(held).version == versions(self.store)[-1]
        return held["w"]


def delete_after_put(store: Watched) -> None:
    """Have a prune's delete arrive just after the next part was put."""

    def delete(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("parts/"):
            store.after = lambda verb, key: None
            store.store.delete(key)

    store.after = delete


@pytest.mark.parametrize("then", ["files/", "layouts/", "pruned/"])
def test_a_body_that_comes_back_after_a_prune_has_listed_it_stays(short_epochs: int, then: str) -> None:
    run = Recurring(short_epochs)
    listed = []

    def come_back(verb: str, key: str) -> None:
        listed.append(key)
        if key == then and "parts/" in listed:
            run.store.before = lambda verb, key: None
            run.publish(run.second)

    run.store.before = come_back
    prune(run.store, **OPTIONS)
    assert parts_of(run.store, keys.manifest_key(versions(run.store)[-1])) == [run.part]
    assert (run.joined() == run.second).all()


def test_a_body_that_comes_back_between_two_deletes_stays(short_epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.maintain.prune.LOOK_EVERY", 1)
    run = Recurring(short_epochs)
    deleted: list[str] = []

    def come_back(key: str) -> None:
        run.store.store.delete(key)
        deleted.append(key)
        if deleted == [key] and key.startswith("parts/"):
            run.publish(run.second)

    monkeypatch.setattr(run.store, "delete", come_back)
    prune(run.store, **OPTIONS)
    assert len([key for key in deleted if key.startswith("parts/")]) > 1
    assert (run.joined() == run.second).all()


def test_a_body_that_nothing_names_any_more_is_deleted(short_epochs: int) -> None:
    run = Recurring(short_epochs)
    assert prune(run.store, **OPTIONS).bodies > 2
    assert run.part not in [entry.key for entry in run.store.list("parts/")]
    assert (run.joined() == run.first).all()


def test_a_publisher_puts_a_body_again_that_was_deleted_before_its_version_existed(short_epochs: int) -> None:
    run = Recurring(short_epochs)
    delete_after_put(run.store)
    run.publish(run.second)
    assert (run.joined() == run.second).all()


def test_a_publisher_with_a_spool_asks_the_store_and_not_its_own_cache(tmp_path: Path) -> None:
    store, training = Watched(), Training()
    with Publisher(store, spool=tmp_path) as pub:
        pub.publish(training.weights)
        pub.flush()
        training.step()
        delete_after_put(store)
        pub.publish(training.weights)
    assert Subscriber(store).sync(worker()).version == 1


def test_a_squasher_puts_a_body_again_that_was_deleted_before_its_record_existed(short_epochs: int) -> None:
    store = Watched()
    publish_steps(store, short_epochs + 1, epoch_patches=short_epochs)
    delete_after_put(store)
    assert Squasher(store, epoch_patches=short_epochs).run()
    (key,) = parts_of(store, keys.squash_key(0, 0))
    assert store.get(key)


def test_a_store_that_cannot_answer_whether_a_body_is_there_does_not_fail_the_version(
    short_epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = Recurring(short_epochs)

    def fail(verb: str, key: str) -> None:
        if verb == "create":
            run.store.fail_at("parts/")

    run.store.after = fail
    before = versions(run.store)[-1]
    run.publish(run.second)
    assert "Could not check" in caplog.text
    assert versions(run.store)[-1] == before + 1
