"""Versions whose parts stand in their records: one object to write, one to read, and nothing else to keep or lose."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import SigningKey
from pulsesync.errors import ChecksumError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.maintain.prune import prune
from pulsesync.publish import anchors
from pulsesync.run import bodies, keys
from pulsesync.store import CachedStore, LocalStore, MemoryStore
from tests.publish.test_sharded import Group
from tests.publishers import Publisher
from tests.readers import RunVerifier, Squasher, Subscriber
from tests.runs import Training, Watched, equal, kept, parts_of, publish_steps, record, version, worker


def hundred(seed: int = 0) -> dict[str, Any]:
    """One tensor of a hundred weights."""
    return {"w": np.random.default_rng(seed).normal(0, 0.02, 100).astype(ml_dtypes.bfloat16)}


def change(weights: dict[str, Any], count: int) -> None:
    weights["w"].view(np.uint16)[:count] += 1


def keys_in(store: Watched | MemoryStore, prefix: str) -> list[str]:
    return [entry.key for entry in store.list(prefix)]


def is_inline(store: Watched | MemoryStore, key: str) -> bool:
    return all(part.data is not None for part in record(store, key).parts)


@pytest.mark.parametrize(
    ("changed", "signed", "limit"), [(100, False, 280), (1, False, 180), (100, True, 380), (1, True, 280)]
)
def test_a_version_of_a_hundred_weights_is_one_object_of_few_bytes(changed: int, signed: bool, limit: int) -> None:
    key = SigningKey("11" * 32) if signed else None
    store, weights = Watched(), hundred()
    with Publisher(store, signing_key=key) as pub:
        pub.publish(weights)
        pub.flush()
        change(weights, changed)
        store.writes.clear()
        report = pub.publish(weights)
    stored = len(store.store.get(keys.manifest_key(1)))
    assert report.payload_bytes == stored <= limit
    assert keys.manifest_key(1) in store.writes
    assert not [name for name in store.writes if name.startswith("parts/")]


def test_a_small_sync_costs_four_calls_and_counts_every_byte() -> None:
    store, weights = Watched(), hundred()
    held = {"w": np.zeros(100, ml_dtypes.bfloat16)}
    with Publisher(store) as pub:
        pub.publish(weights)
        pub.flush()
        sub = Subscriber(store)
        sub.sync(held)
        change(weights, 7)
        pub.publish(weights)
        store.gets.clear()
        report = sub.sync(held)
    asked = [keys.manifest_key(0), keys.HEAD, keys.manifest_key(1), keys.manifest_key(2)]
    assert [key for key, _, _ in store.gets] == asked
    assert report.fetched_bytes == sum(len(store.store.get(key)) for key in (asked[0], asked[2]))
    assert equal(held, weights)


def test_a_joiner_takes_small_anchors_and_squashes_from_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    store, weights, states = Watched(), hundred(), []
    with Publisher(store, epoch_patches=2, anchor_every=1e9) as pub:
        for step in range(8):
            change(weights, 10 + step)
            pub.publish(weights, step=step)
            pub.flush()
            states.append(kept(weights))
    assert Squasher(store, epoch_patches=2).run()
    assert keys_in(store, "parts/") == []
    assert is_inline(store, keys.anchor_key(0))
    assert all(is_inline(store, key) for key in keys_in(store, "squashes/"))
    held = {"w": np.zeros(100, ml_dtypes.bfloat16)}
    report = Subscriber(store, epoch_patches=2).sync(held)
    assert (report.version, report.path[0]) == (7, "anchor")
    assert "squash" in report.path
    assert equal(held, states[7])
    assert [one.fault for one in RunVerifier(store, epoch_patches=2).run()] == [None] * (8 + 1 + 4)


def test_a_prune_takes_small_versions_out_with_their_records() -> None:
    store, weights = MemoryStore(), hundred()
    with Publisher(store, epoch_patches=2, anchor_every=0.0) as pub:
        for step in range(8):
            change(weights, 10 + step)
            pub.publish(weights, step=step)
            pub.flush()
    options: dict[str, Any] = {"keep_versions": 1, "keep_hours": 0.0, "grace_hours": 0.0}
    report = prune(store, **options)
    assert report.versions == 6
    assert prune(store, **options).bodies == 0
    held = {"w": np.zeros(100, ml_dtypes.bfloat16)}
    assert Subscriber(store, epoch_patches=2).sync(held).version == 7
    assert equal(held, weights)


def test_a_part_just_beyond_the_limit_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    publish_steps(store, 2)
    size = version(store, 1).size_bytes
    for limit, inline in ((size, True), (size - 1, False)):
        monkeypatch.setattr(bodies, "INLINE_BYTES", limit)
        store = MemoryStore()
        (_, state) = publish_steps(store, 2)
        assert is_inline(store, keys.manifest_key(1)) is inline
        assert len(parts_of(store, keys.manifest_key(1))) == (not inline)
        held = worker()
        Subscriber(store).sync(held)
        assert equal(held, state)


def test_the_written_bytes_of_a_version_with_an_object_count_it_and_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "INLINE_BYTES", 0)
    store, weights = Watched(), hundred()
    with Publisher(store) as pub:
        pub.publish(weights)
        change(weights, 9)
        report = pub.publish(weights)
    (part,) = parts_of(store, keys.manifest_key(1))
    assert report.payload_bytes == len(store.store.get(part)) + len(store.store.get(keys.manifest_key(1)))


def test_a_version_in_which_nothing_changed_is_a_record_alone() -> None:
    store, weights = MemoryStore(), hundred()
    with Publisher(store) as pub:
        pub.publish(weights)
        pub.publish(weights)
    assert is_inline(store, keys.manifest_key(1))
    held = {"w": np.zeros(100, ml_dtypes.bfloat16)}
    assert Subscriber(store).sync(held).version == 1
    assert equal(held, weights)


def test_a_publisher_resumes_a_run_of_small_versions() -> None:
    store, weights = MemoryStore(), hundred()
    for step in range(4):
        change(weights, 10 + step)
        with Publisher(store) as pub:
            assert pub.publish(weights, step=step).version == step
    assert [version(store, number).base is None for number in range(4)] == [True, False, False, False]
    assert keys_in(store, "parts/") == []


def test_the_parts_of_an_anchor_stand_in_its_record_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SMALL", 0)  # a part for each tensor
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    monkeypatch.setattr(bodies, "INLINE_BYTES", 1000)
    store = MemoryStore()
    (state,) = publish_steps(store, 1)
    parts = record(store, keys.anchor_key(0)).parts
    inside = [part.size for part in parts if part.data is not None]
    assert 0 < len(inside) < len(parts)
    assert sum(inside) <= 1000
    held = worker()
    Subscriber(store).sync(held)
    assert equal(held, state)


def test_a_small_anchor_that_could_not_be_uploaded_is_by_the_next_process(tmp_path: Path) -> None:
    store, weights = Watched(), hundred()
    store.fail_at("anchors/")
    pub = Publisher(store, spool=tmp_path)
    for call in (lambda: pub.publish(weights), pub.close):
        with pytest.raises(StoreError, match="line is down"):
            call()
    store.fail_at()
    with Publisher(store, spool=tmp_path) as pub:
        change(weights, 3)
        pub.publish(weights)
        pub.flush()
    assert is_inline(store, keys.anchor_key(0))
    assert keys_in(store, "parts/") == []


@pytest.mark.parametrize("limit", [4096, 1200, 300])
def test_ranks_share_the_room_in_a_record(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "INLINE_BYTES", limit)
    store, training = MemoryStore(), Training()
    group = Group(store, 3)
    for step in range(3):
        if step:
            training.step()
        group.publish(training.weights, step=step)
    group.flush()
    for number in (1, 2):
        parts = version(store, number).parts
        assert len(parts) == 3
        assert all((part.data is not None) == (part.size <= limit // 3) for part in parts)
        assert len(parts_of(store, keys.manifest_key(number))) == sum(part.data is None for part in parts)
    held = worker()
    assert Subscriber(store).sync(held).version == 2
    assert equal(held, training.weights)
    assert [one.fault for one in RunVerifier(store).run() if one.fault] == []


class Damaged:
    """Flips a bit of one object, the first times that it is read."""

    def __init__(self, store: Watched, key: str, times: int) -> None:
        self.key, self.times = key, times
        store.received = self._flip

    def _flip(self, key: str, data: bytes) -> bytes:
        if key != self.key or not self.times:
            return data
        self.times -= 1
        return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


def test_a_record_damaged_on_its_path_is_read_again_at_once(tmp_path: Path) -> None:
    store = Watched()
    states = publish_steps(store, 3)
    Damaged(store, keys.manifest_key(2), times=1)
    held = worker()
    report = Subscriber(CachedStore(store, tmp_path, 1 << 30)).sync(held)
    assert (report.version, report.replanned) == (2, 0)
    assert equal(held, states[2])


def test_a_record_that_stays_damaged_is_a_checksum_error_and_leaves_the_weights_alone() -> None:
    store = Watched()
    states = publish_steps(store, 3)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1)
    Damaged(store, keys.manifest_key(2), times=10**9)
    with pytest.raises(ChecksumError, match="damaged") as caught:
        sub.sync(held)
    assert caught.value.key == keys.manifest_key(2)
    assert equal(held, states[1])


def test_a_publisher_whose_read_of_the_last_record_is_damaged_reads_it_again(tmp_path: Path) -> None:
    store = Watched(LocalStore(tmp_path))
    training = Training()
    publish_steps(store, 2, training)
    Damaged(store, keys.manifest_key(1), times=1)
    training.step()
    with Publisher(store) as pub:
        assert pub.publish(training.weights).version == 2
    assert version(store, 2).base is not None
