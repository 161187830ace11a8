"""The worker's end: which way it takes, what it fetches for that, and what bad objects and interrupts do to it."""

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import SigningKey, Slice
from pulsesync.core.threads import SignalSafeFlag
from pulsesync.core.types import Sum
from pulsesync.errors import (
    ChainError,
    ClosedError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    RunForkedError,
    RunReplacedError,
    RunRolledBackError,
    SignatureError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import patch, replay
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.patch import WholeBlock
from pulsesync.publish import anchors
from pulsesync.run import bodies, fetcher, keys, planner, reader
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.host import HostBackend
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import LocalStore, MemoryStore
from pulsesync.testing import random_bits
from tests.helpers import nudge
from tests.processes import Fleet, fleet, told
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import SHAPES, Training, Watched, equal, kept, make_squash, parts_of, publish_steps, version, worker
from tests.tiers import slow

__all__ = ["fleet"]

pytestmark = pytest.mark.usefixtures("parts_as_objects")

KINDS = ("manifests", "parts", "layouts", "anchors", "starts")


@pytest.fixture
def short_epochs() -> int:
    return 2


@cache
def published(
    steps: int, epoch_patches: int, part_bytes: int, anchor_every: float, bundled_below: int
) -> tuple[MemoryStore, list[dict[str, Any]]]:
    store = MemoryStore()
    options: dict[str, Any] = {"anchor_every": anchor_every, "epoch_patches": epoch_patches}
    return store, publish_steps(store, steps, codec="history", **options)


def run_of(
    steps: int, anchor_every: float = 1.0, epoch_patches: int = EPOCH_PATCHES
) -> tuple[Watched, list[dict[str, Any]]]:
    """A run in a store of the test's own, and the weights of its versions."""
    made, states = published(steps, epoch_patches, anchors.PART_BYTES, anchor_every, layouts.SMALL)
    store = MemoryStore()
    for key in ("head", *(entry.key for kind in KINDS for entry in made.list(f"{kind}/"))):
        store.put(key, made.get(key))
    return Watched(store), states


# -- ways ----------------------------------------------------------------------------------------------------------


def test_a_version_can_be_asked_for() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    report = sub.sync(held, version=3)
    assert (report.version, report.step, report.path) == (3, 3, ("anchor", "patch", "patch", "patch"))
    assert equal(held, states[3])
    assert sub.sync(held).path == ("patch",)
    assert equal(held, states[4])


def test_the_version_that_is_held_can_be_asked_for() -> None:
    store, _ = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    assert sub.sync(held, version=2).path == ()


def test_a_version_that_was_never_published_is_a_missing_link() -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with pytest.raises(MissingLinkError) as caught:
        sub.sync(held, version=9)
    assert caught.value.version == 9
    assert equal(held, states[1])


def test_the_version_before_the_last_sync_is_a_step_back_without_a_body() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=2)
    sub.sync(held)
    store.gets.clear()
    report = sub.sync(held, version=2)
    assert (report.version, report.step, report.path) == (2, 2, ("undo",))
    assert store.got("parts/") == []
    assert equal(held, states[2])
    sub.verify()
    report = sub.sync(held)
    assert (report.path, report.from_version) == (("patch", "patch"), 2)
    assert equal(held, states[4])


def test_the_last_sync_can_be_rolled_back_without_a_store() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=2)
    sub.sync(held)
    store.gets.clear()
    assert sub.roll_back() == 2
    assert (store.gets, sub.version) == ([], 2)
    assert equal(held, states[2])
    sub.verify()
    assert sub.roll_back() is None  # no more was kept
    assert equal(held, states[2])
    assert sub.sync(held).path == ("patch", "patch")
    assert equal(held, states[4])


@pytest.mark.parametrize("first", [None, 2])  # from an anchor, and by patches alone
def test_a_caller_is_asked_once_when_everything_was_fetched_and_nothing_is_written(first: int | None) -> None:
    store, states = run_of(5)
    asked: list[list[str]] = []
    refuses = False

    def confirm() -> None:
        asked.append(store.got("parts/"))
        if refuses:
            assert equal(held, before)
            raise StateError("not now")

    sub, held = Subscriber(store, confirm=confirm), worker()
    if first is not None:
        sub.sync(held, version=first)
    before, asked[:], refuses = {name: tensor.copy() for name, tensor in held.items()}, [], True
    store.gets.clear()
    with pytest.raises(StateError, match="not now"):
        sub.sync(held)
    assert equal(held, before)
    fetched = asked.pop()
    assert not asked
    refuses = False
    store.gets.clear()
    sub.sync(held)
    assert equal(held, states[4])
    assert asked == [store.got("parts/")]  # nothing was fetched afterwards
    assert sorted(fetched) == sorted(asked[0])


def test_as_many_syncs_are_taken_back_as_were_kept() -> None:
    store, states = run_of(6)
    sub, held = Subscriber(store, undo=3), worker()
    for number in range(6):
        sub.sync(held, version=number)
    report = sub.sync(held, version=2)
    assert report.path == ("undo",)
    assert equal(held, states[2])
    sub.verify()
    assert sub.sync(held, version=1).path == ("anchor", "patch")
    assert equal(held, states[1])


def test_an_older_version_that_cannot_be_undone_comes_from_an_anchor() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store, undo=0), worker()
    sub.sync(held)
    assert sub.sync(held, version=1).path == ("anchor", "patch")
    assert equal(held, states[1])
    sub.verify()


def test_squashes_are_taken_where_they_are(short_epochs: int) -> None:
    store, states = run_of(10, anchor_every=1e9, epoch_patches=short_epochs)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=1)
    make_squash(store, 1, 1, epoch_patches=short_epochs)  # epochs 2 and 3: versions 4 to 8
    report = sub.sync(held)
    assert report.path == ("patch", "patch", "patch", "squash", "patch")
    assert equal(held, states[9])
    sub.verify()


def test_a_squash_by_a_key_that_the_run_allows_is_taken_and_any_other_is_refused(short_epochs: int) -> None:
    store, mine, other = Watched(), SigningKey.generate(), SigningKey.generate()
    states = publish_steps(store, 5, signing_key=mine, anchor_every=1e9, epoch_patches=short_epochs)
    delegate = SigningKey(other.secret, mine.delegate(version(store, 0).run, other.public))
    for key in (other, delegate):
        make_squash(store, 1, 0, key, epoch_patches=short_epochs)
        sub, held = Subscriber(store, trust=mine.public, epoch_patches=short_epochs), worker()
        if key is other:
            store.gets.clear()
            with pytest.raises(SignatureError):
                sub.sync(held)
            assert store.got("parts/") == []
            assert equal(held, worker())
        else:
            assert sub.sync(held).path == ("anchor", "squash")
            assert equal(held, states[4])
        store.delete(keys.squash_key(1, 0))


def test_joining_late_does_not_replay_everything(short_epochs: int) -> None:
    store, states = run_of(40, anchor_every=0, epoch_patches=short_epochs)
    held = worker()
    report = Subscriber(store, epoch_patches=short_epochs).sync(held)
    assert report.path == ("anchor", "patch")
    assert len(store.gets) <= 12
    assert len(store.got("parts/")) == 2
    assert equal(held, states[39])


def test_falling_behind_far_enough_the_next_sync_goes_by_an_anchor(short_epochs: int) -> None:
    store, _ = run_of(30, anchor_every=0, epoch_patches=short_epochs)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=0)
    rng = np.random.default_rng(0)
    with Publisher(store, resume=True, anchor_every=0, codec="dense", epoch_patches=short_epochs) as pub:
        for _ in range(8):
            pub.publish({n: random_bits(rng, np.uint16, s).view(ml_dtypes.bfloat16) for n, s in SHAPES.items()})
            pub.flush()
    report = sub.sync(held)
    assert report.path[0] == "anchor"
    assert len(report.path) <= 3


def test_a_late_worker_reads_hardly_more_than_a_new_one(short_epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not read every version since its own before it finds that an anchor has fewer bytes."""
    store, states = run_of(40, anchor_every=0, epoch_patches=short_epochs)
    Subscriber(store, epoch_patches=short_epochs).sync(worker())
    new = len(store.gets)
    for more in (planner.MORE, 5):  # by the bytes, and without reading any
        monkeypatch.setattr(planner, "MORE", more)
        sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
        sub.sync(held, version=1)
        store.gets.clear()
        assert sub.sync(held).path == ("anchor", "patch")
        assert len(store.gets) <= new + (20 if more > 5 else 4)
        assert equal(held, states[39])


def test_the_next_version_costs_five_calls() -> None:
    store, _ = run_of(4)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=2)
    store.gets.clear()
    sub.sync(held)
    assert [key.partition("/")[0] for key, _, _ in store.gets] == [
        "manifests",
        "head",
        "manifests",
        "manifests",
        "parts",
    ]


# -- fetching ahead, one pause -------------------------------------------------------------------------------------


def test_bodies_are_fetched_ahead_and_not_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(30)
    at_once, most, fetched, decoded, ahead = 0, 0, 0, 0, 0
    lock = threading.Lock()

    def count(verb: str, key: str) -> None:
        nonlocal at_once, most
        if key.startswith("parts/"):
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.002)

    def uncount(verb: str, key: str) -> None:
        nonlocal at_once, fetched, ahead
        if key.startswith("parts/"):
            with lock:
                at_once -= 1
                fetched += 1
                ahead = max(ahead, fetched - decoded)

    decode = HostBackend.decode

    def decoding(backend: HostBackend, versions: Any, *rest: Any) -> Any:
        nonlocal decoded
        time.sleep(0.002)
        made = decode(backend, versions, *rest)
        with lock:
            decoded += len(versions)
        return made

    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    store.before, store.after = count, uncount
    monkeypatch.setattr(HostBackend, "decode", decoding)
    sub.sync(held)
    assert 1 < most <= fetcher.AHEAD
    assert fetcher.TOGETHER < ahead <= fetcher.TOGETHER + fetcher.AHEAD + 2
    assert equal(held, states[29])


def test_one_sync_over_many_versions_is_as_many_syncs() -> None:
    store, states = run_of(30, anchor_every=1e9, epoch_patches=25)
    once, one_by_one = Subscriber(store, epoch_patches=25), Subscriber(store, epoch_patches=25)
    here, there = worker(), worker()
    for sub, held in ((once, here), (one_by_one, there)):
        sub.sync(held, version=0)
    report = once.sync(here, version=29)
    reports = [one_by_one.sync(there, version=n) for n in range(1, 30)]
    assert equal(here, states[29])
    assert equal(there, states[29])
    assert report.path == ("patch",) * 29
    assert (report.version, report.step, report.digest) == (29, 29, reports[-1].digest)
    assert report.fetched_bytes < sum(one.fetched_bytes for one in reports)
    assert (once.position, once.verify()) == (one_by_one.position, one_by_one.verify())
    assert once.state is not None
    assert one_by_one.state is not None
    assert once.state.history.digest() == one_by_one.state.history.digest()
    once.sync(here, version=0)
    assert equal(here, states[0])


@pytest.mark.parametrize("bad", [3, 8, 12])
def test_patches_that_were_prepared_before_a_bad_one_are_not_reported_twice(short_epochs: int, bad: int) -> None:
    store, states = run_of(14, anchor_every=1e9, epoch_patches=short_epochs)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=0)
    epoch = (bad - 1) // short_epochs
    squash = make_squash(store, 0, epoch, epoch_patches=short_epochs)
    refused = parts_of(store, keys.manifest_key(bad))[0]
    kinds = ["patch"] * 13
    kinds[short_epochs * epoch : short_epochs * (epoch + 1)] = ["squash"]
    Spoiler(store, refused, "flipped")
    report = sub.sync(held)
    assert equal(held, states[13])
    assert (report.version, squash.version) == (13, short_epochs * (epoch + 1))
    assert report.path == tuple(kinds)
    assert report.applied == len(kinds)


def test_a_sync_over_many_versions_pauses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(10)
    commit, commits = WeightState.commit, []

    def counted(state: WeightState, transition: Any) -> Any:
        commits.append(transition)
        return commit(state, transition)

    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1)
    monkeypatch.setattr(WeightState, "commit", counted)
    sub.sync(held)
    assert len(commits) == 1
    assert equal(held, states[9])


def test_until_the_pause_the_weights_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(6)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1)
    commit = WeightState.commit

    def looked_at(state: WeightState, transition: Any) -> Any:
        assert equal(held, states[1])
        return commit(state, transition)

    monkeypatch.setattr(WeightState, "commit", looked_at)
    sub.sync(held)
    assert equal(held, states[5])


# -- bad objects ---------------------------------------------------------------------------------------------------

FAULTS = ["missing", "flipped", "truncated", "another"]


class Spoiler:
    """Damages the given number of reads of one object."""

    def __init__(self, store: Watched, key: str, how: str, times: int = 10**9) -> None:
        self.key, self.how, self.times, self.other = key, how, times, b""
        store.received = self._spoil
        kind = key.partition("/")[0]
        others = [entry.key for entry in store.list(f"{kind}/")] if "/" in key else []
        self.other = next((store.store.get(other) for other in others if other != key), b"17")

    def _spoil(self, key: str, data: bytes) -> bytes:
        if key != self.key or self.times == 0:
            return data
        self.times -= 1
        if self.how == "missing":
            raise NotFoundError(f"there is no {key}", key=key)
        return {
            "flipped": data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :],
            "truncated": data[: len(data) * 2 // 3],
            "another": self.other,
        }[self.how]


def place(store: Watched, name: str) -> str:
    """The key of an object on the path of a new worker to version 4."""
    return {
        "head": keys.HEAD,
        "goal": keys.manifest_key(4),
        "link": keys.manifest_key(2),
        "layout": keys.layout_key(version(store, 0).layout),
        "anchor": keys.anchor_key(0),
        "anchor part": parts_of(store, keys.anchor_key(0))[0],
        "part": parts_of(store, keys.manifest_key(2))[0],
        "last part": parts_of(store, keys.manifest_key(4))[0],
    }[name]


PLACES = ["head", "goal", "link", "layout", "anchor", "anchor part", "part", "last part"]


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("how", FAULTS)
def test_an_object_that_is_bad_once_is_read_again(name: str, how: str) -> None:
    store, states = run_of(5)
    held = worker()
    spoiler = Spoiler(store, place(store, name), how, times=1)
    sub = Subscriber(store)
    report = sub.sync(held)
    assert spoiler.times == 0
    if (name, how) == ("goal", "missing"):  # nobody can know that it is there
        assert report.version == 3
        sub.sync(held)
    else:
        assert report.version == 4
        at_once = name not in ("head", "layout") and how != "missing"  # the object alone was read again
        whole = (name, how) == ("goal", "another")  # a good record, of another version
        assert report.replanned == (0 if name == "head" or (at_once and not whole) else 1)
    assert equal(held, states[4])
    sub.verify()


@pytest.mark.parametrize("name", PLACES[1:])
@pytest.mark.parametrize("how", FAULTS)
def test_an_object_that_stays_bad_stops_the_worker_at_a_version_and_a_good_store_helps(name: str, how: str) -> None:
    store, states = run_of(5)
    held = worker()
    Spoiler(store, place(store, name), how)
    sub = Subscriber(store)
    try:
        report = sub.sync(held)
        assert report.version != 4
        assert equal(held, states[report.version])
    except PulseError:
        assert any(equal(held, state) for state in (worker(), *states))
    store.received = lambda key, data: data
    sub.sync(held)
    sub.verify()
    assert equal(held, states[4])


@pytest.mark.parametrize("name", ["link", "part", "last part"])
@pytest.mark.parametrize("how", FAULTS)
def test_a_worker_is_told_that_it_cannot_go_on(name: str, how: str) -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1)
    Spoiler(store, place(store, name), how)
    with pytest.raises((FormatError, ChainError, NotFoundError, VerificationError)):
        sub.sync(held)
    assert equal(held, states[1])
    store.received = lambda key, data: data
    assert sub.sync(held).version == 4
    assert equal(held, states[4])


@pytest.mark.parametrize("how", FAULTS)
def test_what_is_wrong_with_a_version_that_was_asked_for_is_said(how: str) -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=3)
    Spoiler(store, place(store, "last part"), how)
    with pytest.raises((FormatError, NotFoundError)) as caught:
        sub.sync(held, version=4)
    assert isinstance(caught.value, FormatError | NotFoundError)
    assert caught.value.key == place(store, "last part")
    assert equal(held, states[3])


@pytest.mark.parametrize("how", FAULTS)
def test_a_bad_part_is_gone_round_by_a_squash(short_epochs: int, how: str) -> None:
    store, states = run_of(8, anchor_every=1e9, epoch_patches=short_epochs)
    make_squash(store, 0, 1, epoch_patches=short_epochs)  # versions 2 to 4
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=2)
    Spoiler(store, parts_of(store, keys.squash_key(0, 1))[0], how)
    report = sub.sync(held)
    assert (report.replanned, report.path) == (1, ("patch",) * 5)
    assert equal(held, states[7])
    Spoiler(store, parts_of(store, keys.manifest_key(3))[0], how)
    again, other = Subscriber(store, epoch_patches=short_epochs), worker()
    assert again.sync(other).path == ("anchor", "patch", "patch", "squash", "patch", "patch", "patch")
    assert equal(other, states[7])


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("name", ["link", "part"])
def test_a_bad_link_is_gone_round_by_an_anchor(short_epochs: int, how: str, name: str) -> None:
    store, states = run_of(8, anchor_every=0, epoch_patches=short_epochs)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=1)
    Spoiler(store, place(store, name), how)
    report = sub.sync(held)
    assert report.version == 7
    assert "anchor" in report.path
    assert report.replanned == (0 if (name, how) in (("link", "missing"), ("link", "another")) else 1)
    assert equal(held, states[7])
    sub.verify()


@pytest.mark.parametrize("how", FAULTS)
@pytest.mark.parametrize("what", ["record", "part"])
def test_a_bad_anchor_is_gone_round_by_an_older_one(short_epochs: int, how: str, what: str) -> None:
    store, states = run_of(8, anchor_every=0, epoch_patches=short_epochs)
    newest = keys.anchor_key(3)
    Spoiler(store, newest if what == "record" else parts_of(store, newest)[0], how)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    report = sub.sync(held)
    assert report.version == 7
    assert report.path == ("anchor", "patch", "patch", "patch")
    assert equal(held, states[7])


def test_a_line_that_is_down_is_said_at_once_and_the_sync_can_be_repeated() -> None:
    store, states = run_of(4)
    for at in ("manifests/0000000000000002", "parts/", "layouts/", "head", "anchors/"):
        sub, held = Subscriber(store), worker()
        store.fail_at(at)
        with pytest.raises(StoreError, match="line is down"):
            sub.sync(held)
        store.fail_at()
        sub.sync(held)
        assert equal(held, states[3])
        sub.verify()


# -- hints ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_holds_the_base_checkpoint_fetches_no_anchor() -> None:
    store, states = run_of(4)
    held = kept(states[0])
    report = Subscriber(store).sync(held)
    assert report.path == ("start", "patch", "patch", "patch")
    assert store.got("anchors/") == []
    assert parts_of(store, keys.anchor_key(0))[0] not in store.got("parts/")
    assert equal(held, states[3])


def test_a_worker_that_holds_the_start_of_an_epoch_goes_on_from_there(short_epochs: int) -> None:
    store, states = run_of(6, anchor_every=1e9, epoch_patches=short_epochs)
    held = kept(states[4])
    assert Subscriber(store, epoch_patches=short_epochs).sync(held).path == ("start", "patch")
    assert equal(held, states[5])


def test_a_worker_that_holds_the_newest_version_has_nothing_to_do() -> None:
    store, states = run_of(1)
    report = Subscriber(store).sync(kept(states[0]))
    assert (report.version, report.path) == (0, ("start",))
    assert store.got("parts/") == []


@pytest.mark.parametrize("hint", [b"", b"1", b"3", b"99", b"nonsense"])
def test_a_start_that_lies_is_not_believed(hint: bytes) -> None:
    store, states = run_of(4)
    store.put(keys.start_key(version(store, 0).digest), hint)
    held, sub = kept(states[0]), Subscriber(store)
    assert sub.sync(held).version == 3
    sub.verify()
    assert equal(held, states[3])


def test_a_start_in_the_middle_of_an_epoch_is_not_believed() -> None:
    store, states = run_of(5)
    middle = version(store, 2)
    assert middle.history is not None
    store.put(keys.start_key(middle.digest), b"2")
    held, sub = kept(states[2]), Subscriber(store)
    assert sub.sync(held).version == 4
    sub.verify()
    assert equal(held, states[4])


@pytest.mark.parametrize("head", [b"", b"0", b"2", b"70", b"nonsense", None])
def test_a_head_that_lies_is_not_believed(head: bytes | None) -> None:
    store, states = run_of(5)
    if head is None:
        store.delete("head")
    else:
        store.put("head", head)
    held, sub = worker(), Subscriber(store)
    assert sub.sync(held).version == 4
    assert equal(held, states[4])
    assert sub.sync(held).path == ()


# -- caches and spools ---------------------------------------------------------------------------------------------


def test_a_worker_that_restarts_with_its_cache_downloads_nothing_but_records(tmp_path: Path) -> None:
    store, states = run_of(5)
    Subscriber(store, cache=tmp_path).sync(worker())
    store.gets.clear()
    held = worker()
    Subscriber(store, cache=tmp_path).sync(held)
    assert store.got("parts/") == store.got("layouts/") == []
    assert equal(held, states[4])


def test_a_cache_that_was_damaged_costs_a_download(tmp_path: Path) -> None:
    store, states = run_of(5)
    Subscriber(store, cache=tmp_path).sync(worker())
    for path in [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    held = worker()
    Subscriber(store, cache=tmp_path).sync(held)
    assert equal(held, states[4])


@pytest.mark.parametrize("name", ["layout", "anchor part", "part"])
@pytest.mark.parametrize("how", ["flipped", "truncated", "another"])
def test_what_the_store_spoilt_once_does_not_stay_in_the_cache(tmp_path: Path, name: str, how: str) -> None:
    store, states = run_of(5)
    Spoiler(store, place(store, name), how)
    sub, held = Subscriber(store, cache=tmp_path), worker()
    with pytest.raises(PulseError):
        sub.sync(held)
    store.received = lambda key, data: data
    sub.sync(held)
    assert equal(held, states[4])


def follow_once(run: str, cache: str, verified: str) -> None:
    sub = Subscriber(run, cache=cache)
    sub.sync(worker())
    Path(verified).write_text(sub.verify())


def test_processes_of_a_host_share_a_cache(tmp_path: Path, fleet: Fleet) -> None:
    """This process, and one that finds the bodies nowhere but where this one has put them."""
    run, cache = str(tmp_path / "run"), str(tmp_path / "cache")
    publish_steps(run, 5)
    store = LocalStore(run)
    expected = version(store, 4).digest
    first = Subscriber(run, cache=cache)
    first.sync(worker())
    assert first.verify() == expected
    for entry in [*store.list("parts/"), *store.list("layouts/")]:
        store.delete(entry.key)
    second = fleet.start_program(follow_once, run=run, cache=cache, verified=str(tmp_path / "verified"))
    assert second.wait() == 0, told(second.out)
    assert (tmp_path / "verified").read_text() == expected


def test_of_many_workers_with_one_cache_one_fetches_each_body(tmp_path: Path) -> None:
    store, states = run_of(5)
    helds = [worker() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda held: Subscriber(store, cache=tmp_path).sync(held), helds))
    assert all(equal(held, states[4]) for held in helds)
    assert len(store.got("parts/")) == len(set(store.got("parts/"))) == 5


def damage(held: dict[str, Any]) -> None:
    """Write to weights that a sync has brought to a version: `verify=True` loads them again, from an anchor."""
    next(iter(held.values())).reshape(-1)[:1].view(np.uint8)[0] ^= 1


@pytest.mark.parametrize("early", [False, True], ids=["in the middle", "at the very beginning"])
def test_an_interrupt_while_an_anchor_is_loaded_lets_it_finish(monkeypatch: pytest.MonkeyPatch, early: bool) -> None:
    store, states = run_of(1)
    load = AnchorLoader.load_whole
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    damage(held)

    def interrupted(loader: AnchorLoader, *args: Any) -> None:
        time.sleep(0.0 if early else 0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        load(loader, *args)

    monkeypatch.setattr(AnchorLoader, "load_whole", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt):
            sub.sync(held, verify=True)
        assert equal(held, states[0])
    finally:
        time.sleep(0.1)  # should the load still go on
    monkeypatch.undo()
    assert sub.sync(held).path in ((), ("start",))
    sub.verify()


@pytest.fixture
def many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)


def test_a_worker_that_dies_while_it_loads_goes_on_from_its_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_parts: None
) -> None:
    store, states = run_of(3)
    write_blocks = HostBackend.write_blocks

    def half(backend: HostBackend, blocks: Sequence[WholeBlock]) -> None:
        write_blocks(backend, blocks[:1])
        raise MemoryError

    monkeypatch.setattr(HostBackend, "write_blocks", half)
    held = worker()
    with pytest.raises(VerificationError, match="halfway"):
        Subscriber(store, cache=tmp_path).sync(held)
    monkeypatch.undo()
    store.gets.clear()
    Subscriber(store, cache=tmp_path).sync(held)
    assert not set(parts_of(store, keys.anchor_key(0))) & set(store.got("parts/"))
    assert equal(held, states[2])


def test_a_worker_whose_load_failed_does_not_believe_its_weights(
    monkeypatch: pytest.MonkeyPatch, many_parts: None
) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    write_blocks = HostBackend.write_blocks

    def half(backend: HostBackend, blocks: Sequence[WholeBlock]) -> None:
        write_blocks(backend, blocks[:1])
        raise MemoryError

    monkeypatch.setattr(HostBackend, "write_blocks", half)
    with pytest.raises(VerificationError, match="halfway"):
        sub.sync(held)
    monkeypatch.undo()
    assert sub.version is None
    sub.sync(held)
    assert equal(held, states[2])


@pytest.mark.usefixtures("a_tile_for_each_tensor", "no_spare_memory")
@pytest.mark.parametrize("how", ["sync", "watch"])
def test_a_load_that_fails_halfway_is_reported_as_weights_between_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_parts: None, how: str
) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store, cache=tmp_path), worker()
    sub.sync(held)
    damage(held)
    load = AnchorLoader.load_whole

    def cut_short(loader: AnchorLoader, staged: StagedBlocks, sums: Any) -> None:
        assert staged._file is not None
        os.truncate(staged._file.fileno(), 10)
        load(loader, staged, sums)

    monkeypatch.setattr(AnchorLoader, "load_whole", cut_short)
    watching = sub.watch(held, verify=True, interval_s=0.001)
    with pytest.raises(VerificationError, match="between two versions") as caught:
        sub.sync(held, verify=True, wait_s=30) if how == "sync" else next(watching)
    assert isinstance(caught.value.__cause__, StoreError)
    assert caught.value.torn
    assert sub.version is None
    monkeypatch.undo()
    assert sub.sync(held).version == 2
    assert equal(held, states[2])


@pytest.mark.usefixtures("no_spare_memory")
def test_a_disk_that_is_full_leaves_the_weights_and_the_sync_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    damage(held)
    before = kept(held)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StoreError, match="No space left"):
        sub.sync(held, verify=True)
    assert equal(held, before)
    monkeypatch.undo()
    assert sub.sync(held).path == ("anchor",)
    assert equal(held, states[0])


def test_a_worker_that_was_at_a_version_reads_each_part_of_an_anchor_once(many_parts: None) -> None:
    store, states = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    damage(held)
    store.gets.clear()
    assert sub.sync(held, verify=True).path == ("anchor",)
    assert store.got("parts/") == parts_of(store, keys.anchor_key(0))
    assert equal(held, states[0])


def test_weights_that_are_repaired_are_counted_once_before_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    damage(held)
    counted, count = [], HostBackend.count

    def watched(backend: HostBackend) -> dict[int, Sum]:
        counted.append(backend)
        return count(backend)

    monkeypatch.setattr(HostBackend, "count", watched)
    assert sub.sync(held, verify=True).path == ("anchor",)
    assert len(counted) == 1


def test_weights_that_another_program_set_to_a_published_start_go_on_from_there() -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    for name, tensor in held.items():
        np.copyto(tensor, states[0][name])
    assert sub.sync(held, verify=True).path == ("start", "patch")
    assert equal(held, states[1])


@pytest.mark.parametrize("cached", [False, True], ids=["straight from the store", "through a cache"])
def test_an_anchor_that_does_not_all_arrive_leaves_the_weights_of_a_version(
    tmp_path: Path, many_parts: None, cached: bool
) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store, cache=tmp_path if cached else None, undo=0), worker()
    sub.sync(held)
    *_, last = parts_of(store, keys.anchor_key(0))
    for path in (tmp_path / "anchors" / "parts").glob("*"):
        path.unlink()
    store.fail_at(last)
    with pytest.raises(StoreError):
        sub.sync(held, version=0)
    assert sub.version == 2
    assert equal(held, states[2])
    store.fail_at()
    assert sub.sync(held, version=0).path == ("anchor",)
    assert equal(held, states[0])


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_a_joiner_whose_download_fails_keeps_its_weights_and_is_told_why(many_parts: None) -> None:
    store, states = run_of(1)
    *_, last = parts_of(store, keys.anchor_key(0))
    store.fail_at(last)
    sub, held = Subscriber(store), worker()
    with pytest.raises(StoreError):
        sub.sync(held)
    assert sub.version is None
    assert equal(held, worker())
    with pytest.raises(VerificationError, match="nothing has been synced"):
        sub.verify()
    store.fail_at()
    assert sub.sync(held).path == ("anchor",)
    assert equal(held, states[0])


def test_a_joiner_reads_each_part_once_and_keeps_none_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_parts: None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store, states = run_of(1)
    written: list[str] = []
    put = LocalStore.put

    def watched(local: LocalStore, key: str, data: bytes) -> None:
        written.append(key)
        put(local, key, data)

    monkeypatch.setattr(LocalStore, "put", watched)
    store.gets.clear()
    held = worker()
    Subscriber(store).sync(held)
    assert store.got("parts/") == parts_of(store, keys.anchor_key(0))
    assert not written
    assert equal(held, states[0])


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_a_download_that_is_cut_off_goes_on_where_it_was(tmp_path: Path, many_parts: None) -> None:
    store, states = run_of(1)
    parts = parts_of(store, keys.anchor_key(0))
    assert len(parts) == 3
    store.fail_at(parts[2])
    held = worker()
    with pytest.raises(StoreError):
        Subscriber(store, cache=tmp_path).sync(held)
    store.fail_at()
    store.gets.clear()
    Subscriber(store, cache=tmp_path).sync(held)
    assert store.got("parts/") == [parts[2]]
    assert equal(held, states[0])


def test_a_spool_keeps_the_last_anchor_only(tmp_path: Path, short_epochs: int) -> None:
    store, _ = run_of(5, anchor_every=0, epoch_patches=short_epochs)
    for number in (1, 4):
        Subscriber(store, cache=tmp_path, epoch_patches=short_epochs).sync(worker(), version=number)
    kept_parts = {path.name for path in (tmp_path / "anchors" / "parts").iterdir()}
    assert kept_parts == {key.partition("/")[2] for key in parts_of(store, keys.anchor_key(2))}


# -- restarts ------------------------------------------------------------------------------------------------------


def saved(sub: Subscriber) -> bytes:
    assert sub.state is not None
    history: bytes = sub.state.history.to_bytes()
    return history


def test_a_worker_goes_on_from_weights_and_history_that_were_saved() -> None:
    store, states = run_of(6)
    first, held = Subscriber(store), worker()
    first.sync(held, version=3)
    history = saved(first)
    second = Subscriber(store)
    assert second.resume(held, 3, history)
    assert second.version == 3
    store.gets.clear()
    assert second.sync(held).path == ("patch", "patch")
    assert len(store.got("parts/")) == 2
    assert equal(held, states[5])


def test_where_no_history_is_needed_none_need_be_saved(short_epochs: int) -> None:
    store, states = run_of(4, epoch_patches=short_epochs)
    held, sub = kept(states[0]), Subscriber(store, epoch_patches=short_epochs)
    assert sub.resume(held, 0, None)
    sub.sync(held)
    assert equal(held, states[3])


@pytest.mark.parametrize("what", ["weights", "version", "history", "no history", "nonsense", "gone"])
def test_what_does_not_belong_together_is_not_resumed(what: str) -> None:
    store, states = run_of(6)
    first, held = Subscriber(store), worker()
    first.sync(held, version=2)
    other = saved(first)
    first.sync(held, version=3)
    history: bytes | None = saved(first)
    number = 3
    if what == "weights":
        held["norm"].view(np.uint16)[3] ^= 1
    elif what == "version":
        number = 2
    elif what == "history":
        history = other
    elif what == "no history":
        history = None
    elif what == "nonsense":
        history = b"nonsense"
    else:
        number = 77
    sub = Subscriber(store)
    assert not sub.resume(held, number, history)
    assert sub.version is None
    sub.sync(held)
    assert equal(held, states[5])


def cut_after_commit(patches: pytest.MonkeyPatch, sub: Subscriber, held: dict[str, Any], **options: Any) -> None:
    """A sync that is interrupted right after its first commit."""
    commit = WeightState.commit

    def cut(state: WeightState, transition: Any) -> None:
        commit(state, transition)
        raise KeyboardInterrupt

    with patches.context() as patched:
        patched.setattr(WeightState, "commit", cut)
        with pytest.raises(KeyboardInterrupt):
            sub.sync(held, **options)


def test_a_worker_cut_off_just_after_a_commit_holds_what_its_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    cut_after_commit(monkeypatch, sub, held)
    assert sub.version == 1
    assert sub.sync(held).path == ()
    sub.verify()
    assert equal(held, states[1])


def test_a_way_back_that_was_not_noted_is_not_missed_by_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync is interrupted after its commit and before its undo entry: older entries do not apply to these weights."""
    store, states = run_of(3)
    sub, held = Subscriber(store, undo=2), worker()
    sub.sync(held, version=0)
    sub.sync(held, version=1)
    cut_after_commit(monkeypatch, sub, held)
    assert sub.version == 2
    assert sub.sync(held, version=0).path == ("anchor",)
    assert equal(held, states[0])
    sub.verify()


def test_a_way_back_that_cannot_be_joined_is_not_missed_by_an_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: patches are committed one by one, and their ways back joined to one, for which memory may lack."""
    store, states = run_of(4)
    sub, held = Subscriber(store, undo=2), worker()
    sub.sync(held, version=0)
    sub.sync(held, version=1)

    def fail(_: WeightState, __: Any, ___: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(HostBackend, "overlays", False)
    monkeypatch.setattr(WeightState, "join", fail)
    with pytest.raises(MemoryError):
        sub.sync(held)
    monkeypatch.undo()
    assert sub.version == 3
    assert equal(held, states[3])
    assert sub.sync(held, version=0).path == ("anchor",)
    assert equal(held, states[0])
    sub.verify()


def test_after_a_commit_that_changed_nothing_the_ways_back_are_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    sub.sync(held, version=1)

    def fail(_: WeightState, __: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(WeightState, "commit", fail)
    with pytest.raises(MemoryError):
        sub.sync(held)
    monkeypatch.undo()
    assert sub.sync(held, version=0).path == ("undo",)
    assert equal(held, states[0])
    sub.verify()


def test_a_worker_cut_off_just_after_a_step_back_holds_what_its_weights_are(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store, undo=2), worker()
    for number in range(3):
        sub.sync(held, version=number)
    cut_after_commit(monkeypatch, sub, held, version=0)  # the first of two steps
    assert sub.version == 1
    assert equal(held, states[1])
    assert sub.sync(held).path == ("patch",)
    assert equal(held, states[2])
    sub.verify()


def test_a_worker_interrupted_before_an_empty_patch_is_committed_can_repeat_it(monkeypatch: pytest.MonkeyPatch) -> None:
    training, store, held = Training(), MemoryStore(), worker()
    sub = Subscriber(store)
    with Publisher(store) as pub:
        for _ in range(2):
            pub.publish(training.weights)
            training.step()
            pub.publish(training.weights)
        sub.sync(held)
        pub.publish(training.weights)  # nothing changed: the digest is the same, the place in the epoch is not

        def cut(_: WeightState, __: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(WeightState, "commit", cut)
        with pytest.raises(KeyboardInterrupt):
            sub.sync(held)
        monkeypatch.undo()
        training.step()
        pub.publish(training.weights)
    assert sub.sync(held).version == 5
    assert equal(held, training.weights)


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_verify_finds_a_flipped_bit() -> None:
    store, states = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    assert sub.verify(held) == version(store, 0).digest
    held["norm"].view(np.uint16)[3] ^= 1
    with pytest.raises(VerificationError, match=r"not version 0.*'norm'") as caught:
        sub.verify(held)
    assert caught.value.expected != caught.value.actual
    sub.sync(held)
    assert equal(held, states[0])


def test_verify_refuses_other_tensors_than_were_synced() -> None:
    store, _ = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with pytest.raises(VerificationError, match="not the tensors"):
        sub.verify(kept(held))


def test_verify_before_the_first_sync_is_refused() -> None:
    with pytest.raises(VerificationError, match="nothing has been synced"):
        Subscriber(MemoryStore()).verify()


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_a_scrub_finds_a_flipped_bit_and_the_next_sync_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    with sub.scrub(every_s=0.005):
        sub.sync(held)
        held["norm"].view(np.uint16)[3] ^= 1
        until = time.monotonic() + 20
        while "A recount found" not in caplog.text and time.monotonic() < until:
            time.sleep(0.005)
    with pytest.raises(VerificationError, match="norm"):
        sub.sync(held)
    sub.sync(held)
    assert equal(held, states[1])


def test_a_verification_waits_for_a_sync_that_is_running() -> None:
    store, states = run_of(3)
    with ThreadPoolExecutor(1) as pool:
        verifying: list[Future[str]] = []

        def verify_meanwhile() -> None:
            verifying.append(pool.submit(sub.verify))
            with pytest.raises(TimeoutError):
                verifying[-1].result(timeout=0.05)

        sub, held = Subscriber(store, confirm=verify_meanwhile), worker()
        for number in range(3):
            digest = sub.sync(held, version=number).digest
            assert verifying[-1].result(timeout=5) == digest
    assert equal(held, states[2])


def test_a_scrub_beside_syncs_finds_nothing_where_nothing_is() -> None:
    store, states = run_of(20)
    sub, held = Subscriber(store), worker()
    with sub.scrub(every_s=0.0005):
        for number in range(20):
            sub.sync(held, version=number)
    assert equal(held, states[19])


@pytest.mark.parametrize("codec", ["history", "context", "gap"])
def test_a_foreign_write_is_found_by_the_next_patch_and_mended_by_an_anchor(codec: patch.CodecName) -> None:
    training, store, held = Training(), MemoryStore(), worker()
    sub = Subscriber(store)
    with Publisher(store, codec=codec) as pub:
        for _ in range(3):
            pub.publish(training.weights)
            sub.sync(held)
            training.step()
        held["layer.0.weight"].view(np.uint16)[...] ^= np.uint16(0x8001)
        pub.publish(training.weights)
    report = sub.sync(held)
    assert report.replanned
    assert "anchor" in report.path
    assert equal(held, training.weights)


def test_tensors_that_were_replaced_are_followed_in_their_new_memory() -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1)
    old = held["norm"]
    held["norm"] = np.zeros_like(old)
    report = sub.sync(held)
    assert report.path == ("anchor", "patch", "patch")
    assert equal(held, states[2])
    assert old.tobytes() == states[1]["norm"].tobytes()


# -- slices --------------------------------------------------------------------------------------------------------


class Sharded:
    """A model of two layers, published with a grid of 2 by 2, as tensor-parallel workers would hold it."""

    def __init__(self, codec: patch.CodecName = "history", grid: tuple[Any, Any] = (2, 2)) -> None:
        rng = np.random.default_rng(0)
        self.weights = {
            name: (random_bits(rng, np.uint16, (64, 48), special=False) & 0xBFFF).view(ml_dtypes.bfloat16)
            for name in ("layer.0.weight", "layer.1.weight")
        }
        self.store, self.rng = Watched(), rng
        self.pub = Publisher(self.store, codec=codec, grid={"*": grid}, min_tile=1)

    def __enter__(self) -> "Sharded":
        self.pub.publish(self.weights)
        return self

    def __exit__(self, *_: object) -> None:
        self.pub.close()

    def step(self) -> None:
        for array in self.weights.values():
            array.view(np.uint16)[...] = nudge(self.rng, array.view(np.uint16), 0.05)
        self.pub.publish(self.weights)


ROWS, COLUMNS = Slice(rows=(32, 64)), Slice(columns=(0, 24))


def cut(array: Any, held: Slice) -> Any:
    return np.ascontiguousarray(array[slice(*(held.rows or (0, 64))), slice(*(held.columns or (0, 48)))])


@pytest.mark.parametrize("held", [ROWS, COLUMNS, Slice((0, 32), (24, 48))], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("codec", ["history", "context", "gap", "dense", "auto"])
def test_a_worker_that_holds_a_slice_on_the_grid_follows(held: Slice, codec: patch.CodecName) -> None:
    with Sharded(codec) as sharded:
        sub = Subscriber(sharded.store, slices={"*": held})
        local = {name: np.zeros_like(cut(array, held)) for name, array in sharded.weights.items()}
        for _ in range(5):
            sub.sync(local)
            assert equal(local, {name: cut(array, held) for name, array in sharded.weights.items()})
            sharded.step()
        sub.verify()


def test_a_slice_over_many_versions_at_once_is_the_same() -> None:
    with Sharded() as sharded:
        sub = Subscriber(sharded.store, slices={"*": ROWS})
        local = {name: np.zeros_like(cut(array, ROWS)) for name, array in sharded.weights.items()}
        for _ in range(6):
            sharded.step()
        assert sub.sync(local).path == ("anchor", *["patch"] * 6)
        assert equal(local, {name: cut(array, ROWS) for name, array in sharded.weights.items()})


def test_a_worker_of_a_pipeline_holds_its_layers_and_no_others() -> None:
    with Sharded() as sharded:
        sub = Subscriber(sharded.store, slices={"layer.1.*": None})
        local = {"layer.0.weight": np.zeros((64, 48), ml_dtypes.bfloat16)}
        for _ in range(3):
            sub.sync(local)
            assert equal(local, {"layer.0.weight": sharded.weights["layer.0.weight"]})
            sharded.step()
        sub.verify()


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_only_the_tiles_that_are_held_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sharded() as sharded:
        sub = Subscriber(sharded.store, slices={"layer.0.*": ROWS, "layer.1.*": None})
        local = {"layer.0.weight": np.zeros((32, 48), ml_dtypes.bfloat16)}
        sub.sync(local)
        sharded.step()
        decode = patch.run_task
        seen: list[tuple[str, int]] = []

        def watched(task: patch.DecodeTask, *rest: Any) -> Any:
            seen.append((task.tile.tensor.name, task.tile.row))
            return decode(task, *rest)

        monkeypatch.setattr(replay, "run_task", watched)
        sub.sync(local)
        assert seen == [("layer.0.weight", 32)] * 2


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_of_large_parts_only_the_sections_with_held_tiles_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch, "SECTION_BYTES", 1)
    monkeypatch.setattr(bodies, "SMALL_PART", 100)
    monkeypatch.setattr(bodies, "HEADER_GUESS", 600)
    with Sharded("gap") as sharded:
        sharded.step()
        sub = Subscriber(sharded.store, slices={"layer.0.*": ROWS, "layer.1.*": None})
        local = {"layer.0.weight": np.zeros((32, 48), ml_dtypes.bfloat16)}
        sharded.store.gets.clear()
        report = sub.sync(local)
        assert equal(local, {"layer.0.weight": cut(sharded.weights["layer.0.weight"], ROWS)})
        whole = sum(store_size(sharded.store, key) for key in set(sharded.store.got("parts/")))
        ranges = [(begin, end) for key, begin, end in sharded.store.gets if key.startswith("parts/")]
        assert sum((end or 0) - begin for begin, end in ranges) < whole / 2
        assert report.fetched_bytes < whole / 2


def store_size(store: Watched, key: str) -> int:
    return len(store.store.get(key))


@pytest.mark.parametrize("codec", ["history", "context"])
def test_a_slice_that_is_not_on_the_grid_is_refused_by_name(codec: patch.CodecName) -> None:
    with Sharded(codec) as sharded:
        sub = Subscriber(sharded.store, slices={"*": Slice(rows=(16, 48))})
        local = {name: np.zeros((32, 48), ml_dtypes.bfloat16) for name in sharded.weights}
        sub.sync(local)
        before = kept(local)
        sharded.step()
        with pytest.raises(StateError, match=r"layer\.0\.weight"):
            sub.sync(local)
        assert equal(local, before)


@pytest.mark.parametrize("codec", ["gap", "dense"])
def test_a_slice_that_is_not_on_the_grid_follows_what_needs_no_old_weights(codec: patch.CodecName) -> None:
    held = Slice(rows=(10, 50), columns=(5, 30))
    with Sharded(codec) as sharded:
        sub = Subscriber(sharded.store, slices={"*": held})
        local = {name: np.zeros((40, 25), ml_dtypes.bfloat16) for name in sharded.weights}
        for _ in range(3):
            sub.sync(local)
            assert equal(local, {name: cut(array, held) for name, array in sharded.weights.items()})
            sharded.step()


def test_a_slice_of_another_shape_than_is_held_is_refused() -> None:
    with Sharded() as sharded:
        sub = Subscriber(sharded.store, slices={"*": ROWS})
        with pytest.raises(StateError, match=r"layer\.0\.weight"):
            sub.sync({name: np.zeros((31, 48), ml_dtypes.bfloat16) for name in sharded.weights})


def test_a_flipped_bit_in_a_slice_is_found() -> None:
    with Sharded() as sharded:
        sub = Subscriber(sharded.store, slices={"*": ROWS})
        local = {name: np.zeros((32, 48), ml_dtypes.bfloat16) for name in sharded.weights}
        sub.sync(local)
        sub.verify(local)
        local["layer.1.weight"].view(np.uint16)[5, 5] ^= 1
        with pytest.raises(VerificationError):
            sub.verify(local)


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("how", ["sync(verify=True)", "verify_every", "verify", "scrub"])
@pytest.mark.parametrize("widen", [False, True])
def test_what_something_else_writes_to_a_slice_that_is_not_on_the_grid_is_found(how: str, widen: bool) -> None:
    held = Slice(rows=(10, 50), columns=(5, 30))
    with Sharded("gap") as sharded:
        sub = Subscriber(sharded.store, slices={"*": held}, verify_every=4 if how == "verify_every" else 0, widen=widen)
        local = {name: np.zeros((40, 25), np.float32 if widen else ml_dtypes.bfloat16) for name in sharded.weights}
        sub.sync(local)
        for _ in range(2):
            sharded.step()
        sub.sync(local)
        sub.verify(local)
        sub.sync(local, version=0)  # by the undo log
        sub.verify(local)
        local["layer.1.weight"][7] = 1
        if how == "verify":
            with pytest.raises(VerificationError, match=r"layer\.1\.weight"):
                sub.verify(local)
            return
        if how == "scrub":
            with sub.scrub(0.001):
                time.sleep(0.1)
            with pytest.raises(VerificationError, match=r"layer\.1\.weight"):
                sub.sync(local)
            return
        report = sub.sync(local, verify=how == "sync(verify=True)")
        assert (report.repaired, report.path[0]) == (("layer.1.weight",), "anchor")
        expected = {name: cut(array, held) for name, array in sharded.weights.items()}
        assert equal(local, widened(expected) if widen else expected)


# -- a run that is not there, or not yet ---------------------------------------------------------------------------


def empty_places(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "empty").mkdir()
    return {"missing folder": str(tmp_path / "typo"), "empty folder": str(tmp_path / "empty"), "memory": MemoryStore()}


@pytest.mark.parametrize("place", ["missing folder", "empty folder", "memory"])
def test_a_sync_of_a_place_without_a_run_raises_what_was_looked_for_and_where(tmp_path: Path, place: str) -> None:
    location = empty_places(tmp_path)[place]
    held = worker()
    with pytest.raises(NotFoundError, match="wait_s=") as caught:
        Subscriber(location).sync(held)
    assert "manifests/" in str(caught.value)
    assert (location if isinstance(location, str) else "memory://") in str(caught.value)
    assert equal(held, worker())


def test_a_sync_waits_for_the_first_version(caplog: pytest.LogCaptureFixture) -> None:
    store, training = Watched(MemoryStore()), Training()
    sub, held = Subscriber(store), worker()

    def publish_later() -> None:
        while len(store.got("manifests/")) < 3:
            time.sleep(0.005)
        publish_steps(store.store, 1, training)

    caplog.set_level("INFO", logger="pulsesync")
    thread = threading.Thread(target=publish_later)
    thread.start()
    report = sub.sync(held, wait_s=30)
    thread.join()
    assert report.version == 0
    assert equal(held, training.weights)
    assert len([r for r in caplog.records if "waiting" in r.getMessage().lower()]) == 1


def test_a_sync_that_has_waited_in_vain_raises() -> None:
    began = time.monotonic()
    with pytest.raises(NothingPublishedError):
        Subscriber(MemoryStore()).sync(worker(), wait_s=0.2)
    assert 0.2 <= time.monotonic() - began < 5


def test_a_version_whose_first_anchor_is_being_written_is_waited_for_too() -> None:
    store, training, go = Watched(), Training(), threading.Event()
    store.before = lambda verb, key: go.wait(10) if key.startswith("parts/") and verb == "put" else None
    sub, held = Subscriber(store), worker()
    with Publisher(store) as pub:
        pub.publish(training.weights, wait=False).result(10)
        with pytest.raises(NothingPublishedError, match="anchor") as caught:
            sub.sync(held)
        assert caught.value.version == 0
        threading.Timer(0.05, go.set).start()
        assert sub.sync(held, wait_s=30).version == 0
    assert equal(held, training.weights)


def test_a_store_that_answers_late_is_asked_again_while_the_first_version_is_awaited() -> None:
    store, states = run_of(1)
    refused = iter([True] * 2)

    def refuse(verb: str, key: str) -> None:
        if next(refused, False):
            raise StoreError("no answer", retryable=True)

    store.before = refuse
    held = worker()
    with pytest.raises(StoreError, match="no answer"):
        Subscriber(store).sync(held)
    assert Subscriber(store).sync(held, wait_s=30).version == 0
    assert equal(held, states[0])


# -- watching ------------------------------------------------------------------------------------------------------


def test_watch_yields_a_report_for_each_version_that_was_applied() -> None:
    store, training, held = MemoryStore(), Training(), worker()
    seen = []
    with Publisher(store) as pub, Subscriber(store) as sub:
        pub.publish(training.weights)
        for report in sub.watch(held, interval_s=0.001):
            assert equal(held, training.weights)
            seen.append(report.version)
            if len(seen) == 3:
                break
            training.step()
            pub.publish(training.weights)
    assert seen == [0, 1, 2]


def test_watch_backs_off_while_nothing_is_new_and_begins_again_after_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    store, training, held = MemoryStore(), Training(), worker()
    sub, waits = Subscriber(store), []
    with Publisher(store) as pub:
        pub.publish(training.weights)

        def waited(timeout: float) -> bool:
            waits.append(timeout)
            if len(waits) == 5:
                training.step()
                pub.publish(training.weights)
            return False

        monkeypatch.setattr(sub._gate.guard.closed, "wait", waited)
        reports = sub.watch(held, interval_s=0.5, max_interval_s=3.0)
        assert next(reports).version == 0
        assert next(reports).version == 1
        assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]
        waits[:] = [0.0] * 4
        training.step()
        next(reports)
        assert waits[4] == 0.5


def test_watch_raises_where_there_is_no_run_and_waits_if_it_is_asked_to() -> None:
    store = MemoryStore()
    with pytest.raises(NothingPublishedError):
        next(Subscriber(store).watch(worker()))
    threading.Timer(0.05, lambda: publish_steps(store, 1)).start()
    assert next(Subscriber(store).watch(worker(), wait_s=30)).version == 0


def test_watch_goes_on_after_an_error_that_may_pass_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    refused = iter([True] * 3)

    def refuse(verb: str, key: str) -> None:
        if next(refused, False):
            raise StoreError("no answer", retryable=True)

    store.before = refuse
    assert next(sub.watch(held, interval_s=0.001)).version == 1
    assert equal(held, states[1])
    assert [r.levelname for r in caplog.records if "no answer" in r.getMessage()] == ["WARNING"] * 3


def test_watch_raises_an_error_that_stays() -> None:
    store, _ = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    store.fail_at("head")
    with pytest.raises(StoreError, match="line is down"):
        next(sub.watch(held))


@pytest.mark.parametrize("waits_for", ["the first version", "the next version"])
def test_close_from_another_thread_ends_a_watch_at_once(waits_for: str) -> None:
    store = MemoryStore()
    if waits_for == "the next version":
        publish_steps(store, 1)
    sub, held = Subscriber(store), worker()
    if waits_for == "the next version":
        sub.sync(held)
    threading.Timer(0.1, sub.close).start()
    began = time.monotonic()
    assert list(sub.watch(held, wait_s=600, interval_s=300)) == []
    assert time.monotonic() - began < 30


# -- closing -------------------------------------------------------------------------------------------------------


def test_a_closed_subscriber_holds_no_weights_and_refuses_by_name() -> None:
    store, states = run_of(2)
    held = worker()
    with Subscriber(store) as sub:
        sub.sync(held)
        references = [weakref.ref(array) for array in held.values()]
    sub.close()  # once more does no harm
    assert equal(held, states[1])
    del held
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    for call in (lambda: sub.sync(worker()), sub.verify, lambda: next(sub.watch(worker()))):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_close_during_a_sync_takes_effect_when_the_sync_is_done() -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    store.before = lambda verb, key: sub.close() if key.startswith("parts/") else None
    assert sub.sync(held).version == 1
    assert equal(held, states[1])
    assert sub.state is None
    with pytest.raises(ClosedError):
        sub.sync(held)


def close_by_signals(seconds: float) -> None:
    """Close a watch, again and again, from a handler of a signal that comes right after the watch first reads."""
    store = Watched(MemoryStore())
    publish_steps(store, 1)

    def arm(verb: str, key: str) -> None:  # an earlier signal would close a subscriber that does not watch yet
        store.before = lambda verb, key: None
        signal.setitimer(signal.ITIMER_REAL, 0.002)

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sub, held = Subscriber(store), worker()
        sub.sync(held)
        signal.signal(signal.SIGALRM, lambda *_, sub=sub: sub.close())
        store.before = arm
        assert list(sub.watch(held, interval_s=1e-7, max_interval_s=1e-7)) == []


@pytest.mark.parametrize("seconds", [0.25, slow(5.0)])
def test_close_from_a_signal_handler_ends_a_watch_of_the_same_thread(fleet: Fleet, seconds: float) -> None:
    """A process of its own, because one that hangs there cannot be interrupted; time to meet the moment often."""
    program = fleet.start_program(close_by_signals, seconds=seconds)
    try:
        assert program.wait() == 0, told(program.out)
    finally:
        program.kill()


def test_a_wait_ends_although_its_time_is_over_before_it_begins() -> None:
    """Thousands of waits of 100 ns: some threads are interrupted for longer than that before they wait."""

    def wait_often() -> None:
        for _ in range(8_000):
            SignalSafeFlag().wait(1e-7)

    waiting = threading.Thread(target=wait_often, daemon=True)  # one that never ends must not hold up the others
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


def test_a_flag_can_be_set_twice_and_waited_for_by_many() -> None:
    flag = SignalSafeFlag()
    flag.set()
    flag.set()
    with ThreadPoolExecutor(3) as pool:
        assert all(list(pool.map(flag.wait, [60] * 12, timeout=30)))


def test_a_close_ends_every_watch_that_waits() -> None:
    store, _ = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    with ThreadPoolExecutor(3) as pool:
        watches = [pool.submit(lambda: list(sub.watch(held, interval_s=300))) for _ in range(3)]
        time.sleep(0.1)
        sub.close()
        assert [watch.result(30) for watch in watches] == [[], [], []]


@pytest.mark.parametrize("call", ["sync", "watch", "verify", "resume"])
def test_a_subscriber_that_syncs_is_refused_by_name_in_a_forked_process(call: str) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    entered, go = threading.Event(), threading.Event()

    def hold(verb: str, key: str) -> None:
        if key.startswith("parts/"):
            entered.set()
            go.wait(30)

    store.before = hold
    calls: dict[str, Callable[[], object]] = {
        "sync": lambda: sub.sync(held),
        "watch": lambda: next(sub.watch(held)),
        "verify": sub.verify,
        "resume": lambda: sub.resume(held, 0, None),
    }
    thread = threading.Thread(target=lambda: sub.sync(held))
    thread.start()
    try:
        assert entered.wait(30)
        if not (child := os.fork()):
            signal.alarm(10)  # a process that hangs is ended
            try:
                with pytest.raises(ClosedError, match="create a new Subscriber"):
                    calls[call]()
                sub.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go.set()
        thread.join()
    assert equal(held, states[1])  # the child has changed nothing here
    assert sub.sync(held).path == ()


def test_a_subscriber_that_was_not_used_before_a_fork_can_be_used_in_the_child() -> None:
    store, states = run_of(1)
    sub, held = Subscriber(store), worker()
    if not (child := os.fork()):
        signal.alarm(10)
        try:
            sub.sync(held)
            os._exit(0 if equal(held, states[0]) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- recounting ----------------------------------------------------------------------------------------------------


def zero_most(held: dict[str, Any]) -> None:
    """What an engine's sleep does to weights: all but a few rows become zeros."""
    held["layer.0.weight"][:55] = 0
    held["layer.1.weight"][...] = 0


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("new", [True, False], ids=["with a new version", "with nothing new"])
def test_a_sync_with_verify_finds_weights_that_something_else_wrote_and_repairs_them(
    new: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1 if new else 2)
    zero_most(held)
    report = sub.sync(held, verify=True)
    assert equal(held, states[2])
    assert report.repaired == ("layer.0.weight", "layer.1.weight")
    assert report.path[0] == "anchor"
    (warning,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "layer.0.weight" in warning.getMessage()
    assert sub.sync(held, verify=True).repaired == ()


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_damage_that_could_not_be_repaired_at_once_is_reported_by_the_sync_that_repairs_it() -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    zero_most(held)
    store.fail_at("anchors/")
    for _ in range(2):
        with pytest.raises(StoreError):
            sub.sync(held, verify=True)
    store.fail_at()
    assert sub.sync(held).repaired == ("layer.0.weight", "layer.1.weight")
    assert equal(held, states[1])
    assert sub.sync(held).repaired == ()


def test_a_sync_with_verify_of_weights_that_nothing_else_wrote_costs_no_anchor() -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=1, verify=True)
    store.gets.clear()
    assert sub.sync(held, verify=True).path == ("patch",)
    assert sub.sync(held, verify=True).path == ()
    assert store.got("anchors/") == []
    assert equal(held, states[2])


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_verify_every_recounts_at_every_nth_sync() -> None:
    store, states = run_of(1)
    sub, held = Subscriber(store, verify_every=3), worker()
    sub.sync(held)
    zero_most(held)
    assert sub.sync(held).repaired == ()
    assert sub.sync(held).repaired == ("layer.0.weight", "layer.1.weight")
    assert equal(held, states[0])
    with pytest.raises(ValueError, match="verify_every"):
        Subscriber(store, verify_every=-1)


def test_a_tied_copy_that_something_else_wrote_is_repaired_by_a_recount() -> None:
    store, bits = MemoryStore(), np.arange(64, dtype=np.uint16)
    weights = {"a": bits.view(ml_dtypes.bfloat16)}
    weights["b"] = weights["a"]
    held = {name: np.zeros(64, ml_dtypes.bfloat16) for name in "ab"}
    with Publisher(store) as pub:
        pub.publish(weights)
    sub = Subscriber(store)
    sub.sync(held)
    held["b"].view(np.uint16)[3] ^= 1
    assert sub.sync(held, verify=True).repaired == ("a",)
    assert equal(held, weights)


# -- runs that were replaced, forked or rolled back ----------------------------------------------------------------


def wipe(store: Any) -> None:
    for prefix in ("manifests/", "anchors/", "starts/", "squashes/", "parts/", "layouts/"):
        for entry in list(store.list(prefix)):
            store.delete(entry.key)
    store.delete("head")


def restore(store: Any, newest: int) -> None:
    """Bring a store back to what a backup at a version holds."""
    for prefix in ("manifests/", "starts/"):
        for entry in list(store.list(prefix)):
            number = int(store.get(entry.key)) if prefix == "starts/" else int(entry.key.rpartition("/")[2])
            if number > newest:
                store.delete(entry.key)
    store.put("head", str(newest).encode())


@pytest.fixture
def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)


def test_a_run_that_was_replaced_by_a_shorter_one_raises_and_is_followed_if_asked(look_again_at_once: None) -> None:
    store, states = run_of(8)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    old = version(store, 7).run
    wipe(store)
    others = publish_steps(store, 3, Training(seed=1))
    for _ in range(2):  # it is not forgotten by having been said
        with pytest.raises(RunReplacedError, match="follow_replaced") as caught:
            sub.sync(held)
        assert (caught.value.version, caught.value.expected, caught.value.actual) == (7, old, version(store, 0).run)
        assert equal(held, states[7])
    with pytest.raises(RunReplacedError):
        sub.sync(held, version=1)
    report = sub.sync(held, follow_replaced=True)
    assert (report.version, report.path[0]) == (2, "anchor")
    assert equal(held, others[2])
    assert sub.sync(held).path == ()


def test_a_run_that_was_replaced_by_a_longer_one_raises(look_again_at_once: None) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    wipe(store)
    others = publish_steps(store, 4, Training(seed=1))
    with pytest.raises(RunReplacedError):
        sub.sync(held)
    assert equal(held, states[1])
    assert sub.sync(held, follow_replaced=True).version == 3
    assert equal(held, others[3])


def test_a_run_that_was_forked_behind_a_worker_raises_and_is_followed_if_asked(look_again_at_once: None) -> None:
    store, states = run_of(11)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    expected = version(store, 10).digest
    restore(store, 5)
    training = Training(seed=3)
    for name, array in training.weights.items():
        array[...] = states[5][name]
    with Publisher(store) as pub:
        for step in range(6, 11):
            training.weights["norm"].view(np.uint16)[step] ^= 1
            pub.publish(training.weights, step=step)
        pub.flush()
    assert version(store, 10).run == sub.position.run  # type: ignore[union-attr]
    with pytest.raises(RunForkedError) as caught:
        sub.sync(held)
    assert (caught.value.version, caught.value.expected) == (10, expected)
    assert caught.value.actual == version(store, 10).digest
    assert equal(held, states[10])
    assert sub.sync(held, follow_replaced=True).version == 10
    assert equal(held, training.weights)
    sub.verify()


def test_a_run_that_was_rolled_back_raises_and_is_followed_if_asked(look_again_at_once: None) -> None:
    store, states = run_of(8)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    restore(store, 4)
    with pytest.raises(RunRolledBackError) as caught:
        sub.sync(held)
    assert (caught.value.version, caught.value.newest, caught.value.run) == (7, 4, version(store, 4).run)
    assert sub.sync(held, follow_replaced=True).version == 4
    assert equal(held, states[4])


def test_a_run_that_is_gone_is_nothing_published_and_the_weights_stay(look_again_at_once: None) -> None:
    store, states = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    wipe(store)
    with pytest.raises(NothingPublishedError, match="version 2"):
        sub.sync(held)
    assert sub.version == 2
    assert equal(held, states[2])


@pytest.mark.parametrize("how", ["watch", "sync"])
def test_a_run_that_is_being_replaced_is_waited_for_if_it_is_to_be_followed(
    look_again_at_once: None, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    store, _ = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    wipe(store)
    other, steps = MemoryStore(), []
    (state,) = publish_steps(other, 1, Training(seed=1))

    def publish_slowly() -> None:
        for kinds in (("layouts/", "manifests/"), ("parts/", "anchors/")):  # for a while there is no anchor
            time.sleep(0.1)
            for key in [entry.key for kind in kinds for entry in other.list(kind)]:
                store.put(key, other.get(key))
            steps.append(kinds)

    caplog.set_level("INFO", logger="pulsesync")
    thread = threading.Thread(target=publish_slowly)
    thread.start()
    if how == "watch":
        report = next(sub.watch(held, interval_s=0.001, max_interval_s=0.01, follow_replaced=True))
    else:
        report = sub.sync(held, wait_s=30, follow_replaced=True)
    thread.join()
    assert (report.version, report.path, len(steps)) == (0, ("anchor",), 2)
    assert equal(held, state)
    assert len([r for r in caplog.records if "waiting" in r.getMessage().lower()]) == 1


def test_watch_raises_if_the_run_is_gone_and_no_other_is_to_be_followed(look_again_at_once: None) -> None:
    store, _ = run_of(3)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    wipe(store)
    with pytest.raises(NothingPublishedError, match="version 2"):
        next(sub.watch(held))


def test_the_local_version_may_be_pruned_away() -> None:
    store, states = run_of(8)
    sub, held = Subscriber(store, undo=0), worker()
    sub.sync(held, version=2)
    for number in range(5):
        store.delete(keys.manifest_key(number))
    with suppress(MissingLinkError):  # whether a path is left is another question
        sub.sync(held)
    store.put(keys.manifest_key(3), run_of(8)[0].get(keys.manifest_key(3)))
    store.put(keys.manifest_key(4), run_of(8)[0].get(keys.manifest_key(4)))
    assert sub.sync(held).path == ("patch",) * 5
    assert equal(held, states[7])


@pytest.mark.parametrize("head", [b"0", b"3", b"", b"9999", None])
def test_a_head_that_lags_is_no_rollback(head: bytes | None) -> None:
    store, _ = run_of(8)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    store.put("head", head) if head is not None else store.delete("head")
    assert sub.sync(held).path == ()


def test_a_head_that_lags_at_a_local_version_that_was_pruned_hides_no_newer_version(short_epochs: int) -> None:
    store, states = run_of(8, anchor_every=0, epoch_patches=short_epochs)
    sub, held = Subscriber(store, epoch_patches=short_epochs), worker()
    sub.sync(held, version=0)
    for number in range(4):
        store.delete(keys.manifest_key(number))
    store.put("head", b"0")
    assert sub.sync(held).version == 7
    assert equal(held, states[7])


def test_a_relay_that_is_a_second_behind_another_is_no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.01)
    store, _ = run_of(8)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    behind, until = run_of(8)[0].store, time.monotonic() + 0.005
    restore(behind, 5)
    now = store.store

    def old(verb: str, key: str) -> None:
        store.store = behind if time.monotonic() < until else now

    store.before = old
    assert sub.sync(held).version == 7


@pytest.mark.parametrize("local", [3, 4], ids=["with a new version", "with nothing new"])
def test_a_local_record_that_cannot_be_read_is_logged_and_gone_round(
    caplog: pytest.LogCaptureFixture, local: int
) -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=local)
    Spoiler(store, keys.manifest_key(local), "truncated")
    assert sub.sync(held).version == 4
    assert equal(held, states[4])
    assert any(keys.manifest_key(local) in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("what", ["digest", "run"])
@pytest.mark.parametrize("record", ["local", "next"])
def test_a_record_that_is_read_wrong_once_is_no_fork_and_no_other_run(
    look_again_at_once: None, what: str, record: str
) -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=3)
    there, wrong = version(store, 3 if record == "local" else 4), iter([True])
    old = (there.digest if what == "digest" else there.run).encode()
    new = (b"1" if old[:1] == b"0" else b"0") + old[1:]
    key = keys.manifest_key(there.version)
    store.received = lambda k, data: data.replace(old, new) if k == key and next(wrong, False) else data
    assert sub.sync(held).version == 4
    assert equal(held, states[4])


def test_a_sync_with_nothing_new_costs_three_small_reads(tmp_path: Path) -> None:
    store, _ = run_of(4)
    sub, held = Subscriber(store, cache=tmp_path), worker()
    sub.sync(held)
    store.gets.clear()
    sub.sync(held)
    assert [key for key, _, _ in store.gets] == [keys.manifest_key(3), "head", keys.manifest_key(4)]


# -- widening ------------------------------------------------------------------------------------------------------

SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0x3F80, 0x3F81]


def widened(weights: dict[str, Any]) -> dict[str, Any]:
    """BF16 weights as the FP32 numbers they are, by their bits."""
    return {name: (a.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for name, a in weights.items()}


def in_fp32(fill: int = 0) -> dict[str, Any]:
    return {name: np.full(shape, fill, np.uint32).view(np.float32) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("codec", ["history", "context", "gap", "dense"])
@pytest.mark.parametrize("fill", [0, 0x3F812345], ids=["zeros", "numbers that BF16 does not have"])
def test_fp32_weights_follow_a_bf16_run_bit_for_bit(codec: patch.CodecName, fill: int) -> None:
    store, training, held = MemoryStore(), Training(), in_fp32(fill)
    sub = Subscriber(store, widen=True, undo=2)
    with Publisher(store, codec=codec) as pub:
        for step in range(6):
            bits = training.weights["layer.0.weight"].view(np.uint16).reshape(-1)
            bits[step : step + len(SPECIAL)] = np.roll(SPECIAL, step)
            pub.publish(training.weights)
            if step in (0, 1, 2, 5):  # the last one brings three versions at once
                path = sub.sync(held).path
                assert path == (("anchor",) if step == 0 else ("patch",) * (3 if step == 5 else 1))
                assert equal(held, widened(training.weights))
                sub.verify(held)
            if step == 2:
                before = kept(training.weights)
            training.step()
    assert sub.sync(held, version=2).path == ("undo",)
    assert equal(held, widened(before))
    sub.verify(held)


def test_fp32_weights_that_are_a_published_start_need_no_anchor() -> None:
    store, states = run_of(3)
    held = widened(states[0])
    sub = Subscriber(store, widen=True)
    assert sub.sync(held).path == ("start", "patch", "patch")
    assert equal(held, widened(states[2]))
    again = Subscriber(store, widen=True)
    assert sub.state is not None
    assert again.resume(held, 2, saved(sub))


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_a_recount_finds_what_something_else_wrote_below_bf16() -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store, widen=True), in_fp32()
    sub.sync(held)
    held["norm"].view(np.uint32)[7] |= 1
    with pytest.raises(VerificationError):
        sub.verify(held)
    sub.sync(held)
    held["norm"].view(np.uint32)[7] |= 0x8000
    assert sub.sync(held, verify=True).repaired == ("norm",)
    assert equal(held, widened(states[1]))


def test_fp32_weights_without_widen_are_refused_and_the_fix_is_named() -> None:
    store, _ = run_of(1)
    with pytest.raises(StateError, match=r"F32.*BF16.*widen=True"):
        Subscriber(store).sync(in_fp32())


def test_only_the_tensors_that_differ_are_widened() -> None:
    store, states = run_of(3)
    held: dict[str, Any] = {**worker(), "norm": in_fp32()["norm"]}
    sub = Subscriber(store, widen=True)
    sub.sync(held, version=1)
    sub.sync(held)
    assert equal(held, {**states[2], "norm": widened(states[2])["norm"]})
    sub.verify()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_other_dtypes_than_bf16_are_not_widened(dtype: str) -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        pub.publish({"w": np.zeros(8, np.float16 if dtype == "float16" else ml_dtypes.float8_e4m3fn)})
    with pytest.raises(StateError, match="BF16"):
        Subscriber(store, widen=True).sync({"w": np.zeros(8, np.float32)})


def test_tied_tensors_are_widened_alike_or_refused() -> None:
    store, weights = MemoryStore(), {"a": np.arange(64, dtype=np.uint16).view(ml_dtypes.bfloat16)}
    weights["b"] = weights["a"]
    with Publisher(store) as pub:
        pub.publish(weights)
    held = {name: np.zeros(64, np.float32) for name in "ab"}
    Subscriber(store, widen=True).sync(held)
    assert equal(held, widened(weights))
    with pytest.raises(StateError, match="'b'"):
        Subscriber(store, widen=True).sync({"a": held["a"], "b": np.zeros(64, ml_dtypes.bfloat16)})


@pytest.mark.parametrize("held", [ROWS, COLUMNS, Slice((0, 32), (24, 48))], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("codec", ["history", "gap"])
def test_a_slice_is_widened_too(held: Slice, codec: patch.CodecName) -> None:
    with Sharded(codec) as sharded:
        sub = Subscriber(sharded.store, slices={"*": held}, widen=True)
        local = {name: cut(array, held).astype(np.float32) * 3 for name, array in sharded.weights.items()}
        for _ in range(4):
            sub.sync(local)
            assert equal(local, widened({name: cut(array, held) for name, array in sharded.weights.items()}))
            sharded.step()
        local["layer.0.weight"].view(np.uint32)[3, 3] |= 2
        with pytest.raises(VerificationError):
            sub.verify()


def test_a_module_in_fp32_computes_with_the_numbers_of_a_bf16_run() -> None:
    torch = pytest.importorskip("torch")
    trained = torch.nn.Linear(40, 30).to(torch.bfloat16)
    served, store = torch.nn.Linear(40, 30), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(trained)
    Subscriber(store, widen=True).sync(served)
    for name, weight in served.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, trained.state_dict()[name].float())


# -- memory --------------------------------------------------------------------------------------------------------

MEASURE = """
import sys, tracemalloc
import numpy as np
from pulsesync import Publisher, Subscriber
from pulsesync.store import LocalStore

rng = np.random.default_rng(0)
count, layers = 30, 1 << 20
weights = {f"layer.{i:02}": np.full(layers, 0x3C00 + i, np.uint16).view(np.float16) for i in range(count)}
held = {name: np.zeros_like(array) for name, array in weights.items()}
full = sum(array.nbytes for array in weights.values())
sub = Subscriber(sys.argv[1])
with Publisher(sys.argv[1], codec=sys.argv[2]) as pub:
    pub.publish(weights)
    tracemalloc.start()
    sub.sync(held)
    anchor = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for _ in range(3):
        for array in weights.values():
            array.view(np.uint16)[rng.integers(0, layers, 1000)] ^= 1
        pub.publish(weights)
tracemalloc.start()
report = sub.sync(held)
patches = tracemalloc.get_traced_memory()[1]
assert report.path == ("patch",) * 3
assert all(np.array_equal(held[name].view(np.uint16), weights[name].view(np.uint16)) for name in weights)
print(full, anchor, patches, sub.state.history.size_bytes)
"""


@pytest.mark.slow
def test_a_sync_needs_little_memory_beside_the_weights(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    program = [sys.executable, "-c", MEASURE, str(tmp_path), "history"]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    full, anchor, patches, history = (int(n) for n in done.stdout.split())
    assert anchor < full / 2
    assert patches < full / 4 + 2 * history


@pytest.mark.parametrize("error", [ChainError, FormatError, NotFoundError, VerificationError])
def test_what_confirm_raises_ends_the_sync_and_nothing_is_written(error: type[PulseError]) -> None:
    store, states = run_of(2)
    asked = []

    def confirm() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise error("another worker is not ready")

    sub, held = Subscriber(store, confirm=confirm), worker()
    sub.sync(held, version=0)
    with pytest.raises(error, match="another worker is not ready"):
        sub.sync(held)
    assert (len(asked), sub.version) == (2, 0)
    assert equal(held, states[0])
    assert sub.sync(held).version == 1
    assert len(asked) == 3


def test_an_undo_that_was_rolled_back_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(2)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    sub.sync(held)

    def fail(_: WeightState, __: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(WeightState, "commit", fail)
        with pytest.raises(MemoryError):
            sub.roll_back()
    assert (sub.version, sub.roll_back()) == (1, 0)
    assert equal(held, states[0])


def test_a_recount_counts_as_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = run_of(1)
    sub, held = Subscriber(store), worker()
    sub.sync(held)
    find = Recount.find_damaged

    def slowly(self: Recount) -> Any:
        time.sleep(0.05)
        return find(self)

    monkeypatch.setattr(Recount, "find_damaged", slowly)
    assert sub.sync(held, verify=True).prepare_s >= 0.05


def test_what_a_failed_attempt_read_is_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    store, states = run_of(6)
    sub, held = Subscriber(store), worker()
    sub.sync(held, version=0)
    decode, alive, read = HostBackend.decode, [], list[weakref.ref[Any]]()

    def decoding(self: HostBackend, versions: Any, *rest: Any) -> Any:
        alive.append(sum(body() is not None for body in read))
        read.extend(weakref.ref(body) for bodies in versions for body in bodies)
        if len(alive) == 1:
            raise VerificationError("made up")
        return decode(self, versions, *rest)

    monkeypatch.setattr(HostBackend, "decode", decoding)
    gc.collect()
    gc.disable()
    try:
        sub.sync(held)
    finally:
        gc.enable()
    assert alive[:2] == [0, 0]
    assert equal(held, states[5])
