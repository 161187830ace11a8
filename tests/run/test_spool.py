"""Anchors on disk, on the worker's side and on the trainer's."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Subscriber
from pulsesync.core.types import TensorSpec
from pulsesync.errors import ChecksumError, FormatError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.manifest import Manifest, PartRef, RecordKind
from pulsesync.format.patch import EncodedPart
from pulsesync.publish import anchors
from pulsesync.run import bodies, keys, spool
from pulsesync.run.spool import AnchorSpool, Outbox
from pulsesync.state.anchors import AnchorLoader
from pulsesync.testing import random_bits
from tests.helpers import RUN, count_sums
from tests.processes import Fleet, fleet, told
from tests.runs import Watched, equal, parts_of, publish_steps, worker

__all__ = ["fleet"]

pytestmark = pytest.mark.usefixtures("parts_as_objects")

LAYOUT = layouts.make([TensorSpec(f"t{i}", "U16", (300,)) for i in range(3)])


class Anchor:
    """An anchor of three parts, and a store that has it."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        state = {spec.name: random_bits(rng, np.uint16, (300,)) for spec in LAYOUT.tensors}
        sums = count_sums(LAYOUT, state)
        self.parts = [patch.encode_whole(LAYOUT, [tile], state, sums) for tile in LAYOUT.tiles]
        self.refs = tuple(PartRef(part.id, len(part.data)) for part in self.parts)
        self.record = Manifest(RUN, 0, 0, 0, 0, None, LAYOUT.id, self.refs, "0" * 64, None, 0, RecordKind.ANCHOR)
        self.store = Watched()
        for part in self.parts:
            self.store.store.put(keys.part_key(part.id), part.data)


def fetch(spool: AnchorSpool, anchor: Anchor) -> tuple[list[Body], int]:
    """All parts of an anchor, and the bytes that were fetched."""
    got = list(spool.fetch(anchor.record, anchor.store, LAYOUT))
    return [body for body, _ in got], sum(size for _, size in got)


def test_an_anchor_is_fetched_part_by_part_and_lies_on_disk(tmp_path: Path) -> None:
    anchor = Anchor()
    bodies, fetched = fetch(AnchorSpool(tmp_path), anchor)
    assert fetched == anchor.record.size_bytes
    assert [body.index.header.id for body in bodies] == [part.id for part in anchor.parts]
    assert [(tmp_path / "parts" / part.id).read_bytes() for part in anchor.parts] == [p.data for p in anchor.parts]


def test_what_is_on_disk_is_not_fetched_again(tmp_path: Path) -> None:
    anchor = Anchor()
    fetch(AnchorSpool(tmp_path), anchor)
    anchor.store.gets.clear()
    bodies, fetched = fetch(AnchorSpool(tmp_path), anchor)
    assert (len(bodies), fetched, anchor.store.gets) == (3, 0, [])


def test_after_a_failure_only_what_is_missing_is_fetched(tmp_path: Path) -> None:
    anchor = Anchor()
    anchor.store.fail_at(keys.part_key(anchor.refs[2].id))
    with pytest.raises(StoreError):
        fetch(AnchorSpool(tmp_path), anchor)
    anchor.store.fail_at()
    anchor.store.gets.clear()
    _, fetched = fetch(AnchorSpool(tmp_path), anchor)
    assert fetched == anchor.refs[2].size
    assert anchor.store.got("parts/") == [keys.part_key(anchor.refs[2].id)]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_part_that_the_disk_damaged_is_fetched_again(tmp_path: Path, damage: str) -> None:
    anchor = Anchor()
    fetch(AnchorSpool(tmp_path), anchor)
    path = tmp_path / "parts" / anchor.refs[1].id
    data = path.read_bytes()
    path.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "cut": data[:50], "empty": b""}[damage])
    _, fetched = fetch(AnchorSpool(tmp_path), anchor)
    assert fetched == anchor.refs[1].size
    assert path.read_bytes() == data


def test_a_part_that_the_store_damaged_does_not_get_to_the_disk(tmp_path: Path) -> None:
    anchor = Anchor()
    anchor.store.received = lambda key, data: data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(ChecksumError) as caught:
        fetch(AnchorSpool(tmp_path), anchor)
    assert caught.value.key in [keys.part_key(ref.id) for ref in anchor.refs]
    assert not (tmp_path / "parts").exists()


def test_a_part_of_another_size_is_refused(tmp_path: Path) -> None:
    anchor = Anchor()
    anchor.store.received = lambda key, data: data + b"x"
    with pytest.raises(FormatError):
        fetch(AnchorSpool(tmp_path), anchor)


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can grow, as on a full disk; empty ones can be created."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("fault", ["full", "a file in the place of the folder"])
def test_a_folder_that_cannot_be_written_costs_no_anchor(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "anchors" if fault == "full" else tmp_path / "file" / "anchors"
    anchor = Anchor()
    with full_disk() if fault == "full" else nullcontext():
        spool = AnchorSpool(folder)
        for _ in range(2):
            bodies, fetched = fetch(spool, anchor)
            assert [body.index.header.id for body in bodies] == [part.id for part in anchor.parts]
            assert fetched == anchor.record.size_bytes
        spool.keep_only(anchor.record)
    assert len(caplog.records) == 1
    assert "Make room there" in caplog.text
    assert not list(tmp_path.glob("anchors/parts/*"))


def test_a_worker_whose_cache_is_on_a_full_disk_syncs_an_anchor(tmp_path: Path) -> None:
    store, held = Watched(), worker()
    (state,) = publish_steps(store, 1)
    with full_disk():
        assert Subscriber(store, cache=tmp_path).sync(held).path == ("anchor",)
    assert equal(held, state)


def test_of_many_who_share_a_folder_one_fetches_each_part(tmp_path: Path) -> None:
    anchor = Anchor()
    with ThreadPoolExecutor(6) as pool:
        spools = [AnchorSpool(tmp_path) for _ in range(6)]
        fetched = list(pool.map(lambda spool: fetch(spool, anchor)[1], spools))
    assert sum(fetched) == anchor.record.size_bytes
    assert len(anchor.store.gets) == 3


def hold(locks: list[str], holds: str) -> None:
    for file in [os.open(path, os.O_RDWR | os.O_CREAT) for path in locks]:
        fcntl.flock(file, fcntl.LOCK_EX)
    Path(holds).touch()
    threading.Event().wait()


def test_a_process_that_hangs_with_a_lock_does_not_hold_up_the_others(
    tmp_path: Path, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real process, because a lock belongs to one; it is stopped, as one that hangs on a dead disk would be."""
    monkeypatch.setattr(spool, "PATIENCE_S", 0.2)
    anchor = Anchor()
    locks = [tmp_path / ".fetching", *(tmp_path / f".lock-{ref.id[:16]}" for ref in anchor.refs)]
    stuck = fleet.start_program(hold, locks=[str(path) for path in locks], holds=str(tmp_path / "holds"))
    try:
        while not (tmp_path / "holds").exists():
            assert stuck.code is None, told(stuck.out)
            time.sleep(0.005)
        os.kill(stuck.pid, signal.SIGSTOP)
        bodies, _ = fetch(AnchorSpool(tmp_path), anchor)
    finally:
        stuck.kill()
    assert [body.index.header.id for body in bodies] == [part.id for part in anchor.parts]
    assert caplog.text.count("does not finish") == 4


def test_parts_of_other_anchors_are_thrown_away(tmp_path: Path) -> None:
    anchor = Anchor()
    spool = AnchorSpool(tmp_path)
    fetch(spool, anchor)
    (tmp_path / "parts" / ("0" * 64)).write_bytes(b"old")
    spool.keep_only(anchor.record)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {ref.id for ref in anchor.refs}
    spool.keep_only(None)
    assert list((tmp_path / "parts").iterdir()) == []
    assert list(tmp_path.glob(".lock-*")) == []


def test_what_one_fetches_another_does_not_throw_away(tmp_path: Path) -> None:
    anchor = Anchor()
    other = AnchorSpool(tmp_path)

    def received(key: str, data: bytes) -> bytes:
        other.keep_only(None)  # it loaded another anchor just now
        return data

    anchor.store.received = received
    fetch(AnchorSpool(tmp_path), anchor)
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {ref.id for ref in anchor.refs}
    other.keep_only(None)
    assert list((tmp_path / "parts").iterdir()) == []


def test_two_who_load_different_anchors_from_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    def load_often(anchor: Anchor) -> None:
        for _ in range(100):
            spool = AnchorSpool(tmp_path)
            bodies, _ = fetch(spool, anchor)
            assert [body.index.header.id for body in bodies] == [ref.id for ref in anchor.refs]
            spool.keep_only(anchor.record)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(load_often, [Anchor(seed=1), Anchor(seed=2)]))


@pytest.mark.parametrize("done_with", ["keep_only", "close"])
def test_parts_that_one_loads_another_does_not_throw_away(tmp_path: Path, done_with: str) -> None:
    anchor, other = Anchor(), AnchorSpool(tmp_path)
    mine = AnchorSpool(tmp_path)
    fetch(mine, anchor)
    anchor.store.gets.clear()
    other.keep_only(None)
    fetch(mine, anchor)
    assert anchor.store.gets == []
    mine.keep_only(anchor.record) if done_with == "keep_only" else mine.close()
    other.keep_only(None)
    assert list((tmp_path / "parts").iterdir()) == []


@pytest.mark.parametrize("damage", ["removed", "cut short"])
def test_a_part_that_another_process_spoils_is_fetched_again_for_the_next_pass(tmp_path: Path, damage: str) -> None:
    anchor, spool = Anchor(), AnchorSpool(tmp_path)
    fetch(spool, anchor)
    anchor.store.gets.clear()
    path = tmp_path / "parts" / anchor.refs[0].id
    path.unlink() if damage == "removed" else os.truncate(path, 100)
    found, fetched = fetch(spool, anchor)
    assert [body.index.header.id for body in found] == [ref.id for ref in anchor.refs]
    assert anchor.store.got("parts/") == [keys.part_key(anchor.refs[0].id)]
    assert fetched == anchor.refs[0].size
    assert path.read_bytes() == anchor.parts[0].data


def test_the_next_parts_are_fetched_while_one_is_read() -> None:
    anchor, ahead = Anchor(), threading.Event()
    anchor.store.after = lambda verb, key: ahead.set() if key == keys.part_key(anchor.refs[2].id) else None
    parts = bodies.stream_bodies(anchor.store, anchor.refs, LAYOUT)
    first, _ = next(parts)
    assert first.index.header.id == anchor.refs[0].id
    assert ahead.wait(10)
    assert [body.index.header.id for body, _ in parts] == [ref.id for ref in anchor.refs[1:]]


FEW_DESCRIPTORS = """
import resource, sys
import numpy as np
from pulsesync import Publisher, Subscriber
from pulsesync.format import layout
from pulsesync.publish import anchors
from pulsesync.run import bodies
from pulsesync.store import MemoryStore

layout.SMALL, bodies.INLINE_BYTES, anchors.PART_BYTES = 0, 0, 1
weights = {f"t{n}": np.full(4, n, np.float32) for n in range(200)}
store = MemoryStore()
with Publisher(store) as publisher:
    publisher.publish(weights)
assert len(list(store.list("parts/"))) == 200
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
local = {name: np.zeros(4, np.float32) for name in weights}
assert Subscriber(store, cache=sys.argv[1] or None).sync(local).path == ("anchor",)
assert all(np.array_equal(local[name], weights[name]) for name in weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False], ids=["in a cache", "in a scratch folder"])
def test_an_anchor_of_more_parts_than_the_process_may_have_files_open_is_loaded(tmp_path: Path, cache: bool) -> None:
    """A process of its own, for the limit; a second, most of it imports."""
    command = [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path) if cache else ""]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- the trainer's side --------------------------------------------------------------------------------------------


def test_a_sealed_anchor_waits_with_its_parts(tmp_path: Path) -> None:
    anchor = Anchor()
    refs = Outbox(tmp_path).stage(7, anchor.parts, 0)
    assert refs == anchor.refs
    Outbox(tmp_path).seal(7, b"record")
    again = Outbox(tmp_path)
    assert list(again.waiting()) == [(7, b"record")]
    assert [again.part(7, ref) for ref in refs] == [part.data for part in anchor.parts]


def test_the_newest_anchor_waits_in_front(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    for epoch in (2, 11, 9):
        outbox.stage(epoch, [], 0)
        outbox.seal(epoch, b"%d" % epoch)
    assert [epoch for epoch, _ in outbox.waiting()] == [11, 9, 2]


def test_an_anchor_that_was_never_sealed_is_removed(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path)
    outbox.stage(7, Anchor().parts, 0)
    assert list(outbox.waiting()) == []
    assert list(tmp_path.iterdir()) == []


def test_an_anchor_that_is_staged_again_begins_anew(tmp_path: Path) -> None:
    anchor, outbox = Anchor(), Outbox(tmp_path)
    outbox.stage(7, anchor.parts, 0)
    outbox.seal(7, b"old")
    outbox.stage(7, anchor.parts[:1], 0)
    assert list(outbox.waiting()) == []


def test_parts_are_written_one_at_a_time(tmp_path: Path) -> None:
    anchor = Anchor()
    there = []

    def one_by_one() -> Iterator[EncodedPart]:
        for part in anchor.parts:
            there.append(len(list(tmp_path.rglob("parts/*"))))
            yield part

    Outbox(tmp_path).stage(0, one_by_one(), 0)
    assert there == [0, 1, 2]


def test_what_is_no_anchor_in_the_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    assert list(Outbox(tmp_path).waiting()) == []
    assert (tmp_path / "notes").exists()


def test_a_part_that_stays_bad_is_read_twice_and_no_other_part_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An anchor was fetched twice, all of it, before its damaged part was reported: two seconds for 135 M weights."""
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    store = Watched()
    publish_steps(store, 1)
    *good, bad = parts_of(store, keys.anchor_key(0))
    data = store.store.get(bad)
    store.store.put(bad, data[:-1] + bytes([data[-1] ^ 1]))
    store.gets.clear()
    with pytest.raises(ChecksumError):
        Subscriber(store).sync(worker())
    assert sorted(store.got("parts/")) == sorted([*good, bad, bad])


def test_a_patch_that_stays_bad_is_read_twice_and_no_other_patch_again() -> None:
    store = Watched()
    states = publish_steps(store, 4)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    (good,), (bad,) = (parts_of(store, keys.manifest_key(number)) for number in (2, 3))
    data = store.store.get(bad)
    store.store.put(bad, data[:-1] + bytes([data[-1] ^ 1]))
    store.gets.clear()
    with pytest.raises(ChecksumError):
        sub.sync(held)
    assert (store.got(good), store.got(bad)) == ([good], [bad, bad])
    assert equal(held, states[0])


def flip_behind(monkeypatch: pytest.MonkeyPatch, step: str, path: Callable[[], Path]) -> None:
    """Have another writer of the folder flip a bit of a part just before a step of loading an anchor."""
    run = getattr(AnchorLoader, step)

    def meddled(loader: AnchorLoader, *given: Any) -> Any:
        with path().open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)[0]
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last ^ 1]))
        return run(loader, *given)

    monkeypatch.setattr(AnchorLoader, step, meddled)


def synced_and_damaged(store: Watched, cache: Path) -> tuple[Subscriber, dict[str, Any]]:
    """A worker whose weights were at a version, until something wrote to them: it needs an anchor again."""
    sub, held = Subscriber(store, cache=cache), worker()
    sub.sync(held)
    next(iter(held.values())).reshape(-1)[:1].view(np.uint8)[0] ^= 1
    return sub, held


def test_what_another_process_writes_into_the_folder_does_not_become_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Watched()
    (state,) = publish_steps(store, 1)
    (key,) = parts_of(store, keys.anchor_key(0))
    path = tmp_path / "anchors" / key
    sub, held = synced_and_damaged(store, tmp_path)
    flip_behind(monkeypatch, "check_whole", lambda: path)
    assert sub.sync(held, verify=True).path == ("anchor",)
    assert equal(held, state)
    assert path.read_bytes() == store.store.get(key)
    sub.verify()


def test_what_another_process_writes_into_the_folder_after_the_check_is_not_read_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Watched()
    (state,) = publish_steps(store, 1)
    (key,) = parts_of(store, keys.anchor_key(0))
    sub, held = synced_and_damaged(store, tmp_path)
    flip_behind(monkeypatch, "load_whole", lambda: tmp_path / "anchors" / key)
    store.fail_at("parts/")
    assert sub.sync(held, verify=True).path == ("anchor",)
    assert equal(held, state)
    sub.verify()


def test_what_another_process_writes_into_the_folder_does_not_become_weights_of_a_joiner(tmp_path: Path) -> None:
    store = Watched()
    (state,) = publish_steps(store, 1)
    (key,) = parts_of(store, keys.anchor_key(0))
    path = tmp_path / "anchors" / key
    Subscriber(store, cache=tmp_path).sync(worker())
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    held = worker()
    assert Subscriber(store, cache=tmp_path).sync(held).version == 0
    assert equal(held, state)
    assert path.read_bytes() == data


def test_a_folder_that_another_process_spoils_while_the_store_is_away_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Watched()
    (state,) = publish_steps(store, 1)
    (key,) = parts_of(store, keys.anchor_key(0))
    sub, held = synced_and_damaged(store, tmp_path)
    flip_behind(monkeypatch, "check_whole", lambda: tmp_path / "anchors" / key)
    store.fail_at("parts/")
    with pytest.raises(StoreError):
        sub.sync(held, verify=True)
    assert sub.version is None
    monkeypatch.undo()
    store.fail_at()
    assert sub.sync(held).version == 0
    assert equal(held, state)
