"""Retention, and publishers that write while a prune deletes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pulsesync import SigningKey, read_pointers
from pulsesync.errors import FormatError, SignatureError
from pulsesync.maintain.prune import prune
from pulsesync.run import keys
from pulsesync.run.fleet import read_fleet
from pulsesync.run.pointers import list_moves
from pulsesync.store import MemoryStore
from tests.publishers import Publisher
from tests.readers import RunVerifier, Squasher, Subscriber, move_pointer
from tests.runs import Training, Watched, parts_of, publish_steps, versions, worker

pytestmark = pytest.mark.usefixtures("parts_as_objects")


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


# -- pointers ------------------------------------------------------------------------------------------------------


def pointed_run(short_epochs: int, *moves: int) -> Watched:
    """Twelve versions with an anchor at each epoch's start, and the pointer `stable` moved to these."""
    store = Watched()
    publish_steps(store, 12, anchor_every=0, epoch_patches=short_epochs)
    for number in moves:
        move_pointer(store, "stable", number, epoch_patches=short_epochs)
    return store


def moves_left(store: Watched) -> list[int]:
    return list_moves(store).get("stable", [])


def test_the_version_that_a_pointer_names_is_kept_with_its_anchor_and_all_since(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 5)
    report = prune(store, **OPTIONS)
    assert (report.kept_from, report.pinned_by) == (4, "stable")
    assert versions(store) == list(range(4, 12))


def test_a_pointer_at_a_version_that_is_kept_anyway_pins_nothing(short_epochs: int) -> None:
    report = prune(pointed_run(short_epochs, 5, 11), **OPTIONS)
    assert (report.kept_from, report.pinned_by) == (10, None)


def test_a_version_that_a_pointer_named_before_is_not_kept(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 1, 9)
    assert prune(store, **OPTIONS).kept_from == 8


def test_old_moves_go_with_their_versions_and_the_newest_stays(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 0, 2, 9, 11, 8)
    prune(store, **OPTIONS)
    assert moves_left(store) == [2, 3, 4]
    held = worker()
    assert Subscriber(store, follow="stable", epoch_patches=short_epochs).sync(held).version == 8
    assert move_pointer(store, "stable", 11, epoch_patches=short_epochs).number == 5


def test_no_move_goes_that_is_later_than_one_whose_version_is_kept(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 10, 2, 11)
    prune(store, **OPTIONS)
    assert moves_left(store) == [0, 1, 2]
    assert read_pointers(store)["stable"].version == 11


def test_a_reader_finds_the_newest_move_after_a_prune_although_the_hint_had_lagged(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 0, 1, 2, 11)
    sub, held = Subscriber(store, follow="stable", epoch_patches=short_epochs), worker()
    sub.sync(held)
    store.put(keys.pointer_hint("stable"), b"0")
    prune(store, **OPTIONS)
    assert moves_left(store) == [3]
    assert store.get(keys.pointer_hint("stable")) == b"3"


def test_a_pointer_of_a_run_that_was_here_before_keeps_nothing(short_epochs: int) -> None:
    store = pointed_run(short_epochs)
    move = move_pointer(store, "old", 1, epoch_patches=short_epochs)
    store.put(keys.pointer_key("old", 0), replace(move, run="ab" * 16).build())
    assert prune(store, **OPTIONS).pinned_by is None
    assert versions(store) == [10, 11]


STRAYS = (".DS_Store", "._0000000000000001", "0000000000000001.tmp", "1", "Thumbs.db", "notes/0000000000000001")


@pytest.mark.parametrize("name", STRAYS)
def test_objects_that_are_none_of_a_run_do_not_stop_a_prune(name: str, short_epochs: int) -> None:
    """A file manager or a copy leaves some. They stay, and every command reads the run around them."""
    store = MemoryStore()
    publish_steps(store, 12, anchor_every=0, epoch_patches=short_epochs)
    strays = [f"{folder}{name}" for folder in ("manifests/", "anchors/", "squashes/", "squashes/00/", "pruned/")]
    for key in strays:
        store.put(key, b"no record")
    report = prune(store, **OPTIONS)
    assert report.versions > 0
    assert prune(store, **OPTIONS).bodies > 0
    assert all(store.get(key) == b"no record" for key in strays)
    assert not [one.fault for one in RunVerifier(store, epoch_patches=short_epochs).run() if one.fault]
    store.delete(keys.HEAD)
    held = worker()
    assert Subscriber(store, epoch_patches=short_epochs).sync(held).version == 11
    assert read_fleet(store).anchor is not None


@pytest.mark.parametrize(
    "data",
    [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5_000, b"\xff", b"", b"{}", b"[NaN]", b'"x"'],
    ids=lambda one: repr(one[:9]),
)
def test_a_list_of_an_earlier_prune_that_is_none_is_named_with_what_to_do(data: bytes, short_epochs: int) -> None:
    store = MemoryStore()
    publish_steps(store, 4, anchor_every=0, epoch_patches=short_epochs)
    key = "pruned/0-3-0123456789abcdef"
    store.put(key, data)
    with pytest.raises(FormatError, match=rf"{key}.*delete it, and prune again") as caught:
        prune(store, **OPTIONS)
    assert caught.value.key == key
    store.delete(key)
    prune(store, **OPTIONS)


def test_a_pointer_that_cannot_be_read_stops_a_prune_before_it_deletes(short_epochs: int) -> None:
    store = pointed_run(short_epochs, 5)
    store.put(keys.pointer_key("stable", 1), b"rubbish\n")
    with pytest.raises(FormatError):
        prune(store, **OPTIONS)
    assert versions(store) == list(range(12))


def test_a_prune_that_trusts_a_key_does_not_let_others_pin_or_free_versions(short_epochs: int) -> None:
    store, key = Watched(), SigningKey("11" * 32)
    publish_steps(store, 12, anchor_every=0, epoch_patches=short_epochs, signing_key=key)
    move = move_pointer(store, "stable", 5, epoch_patches=short_epochs, signing_key=key)
    store.put(keys.pointer_key("stable", 1), replace(move, number=1, version=11).build())
    with pytest.raises(SignatureError):
        prune(store, trust={key.public}, **OPTIONS)
    assert versions(store) == list(range(12))


def test_heartbeats_go_after_a_week_and_verify_does_not_look_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1e9]
    monkeypatch.setattr("pulsesync.store.memory.time", SimpleNamespace(time=lambda: clock[0]))
    store = MemoryStore()
    publish_steps(store, 2)
    store.put("heartbeats/gone", b"\x00 not JSON")
    clock[0] += 3 * 24 * 3600
    store.put("heartbeats/there", b"{}")
    assert all(one.fault is None for one in RunVerifier(store).run())
    clock[0] += 4 * 24 * 3600 + 1
    prune(store)
    assert [entry.key for entry in store.list("heartbeats/")] == ["heartbeats/there"]
