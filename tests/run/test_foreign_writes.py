"""A worker whose weights something else has written to: the next sync repairs and names them, and blames no record."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from pulsesync import Publisher, Slice, Subscriber
from pulsesync.errors import ChecksumError, StateError, VerificationError
from pulsesync.format import patch
from pulsesync.maintain.point import move_pointer
from pulsesync.state import claims
from pulsesync.store import MemoryStore
from tests.foreign_writes import CODECS, DTYPES, TENSOR, WRITES, sync_after, train, weights
from tests.tiers import slow


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            lambda codec, write, dtype: write in (codec, codec + 1) and dtype == (codec + write) % len(DTYPES),
            id="each of these",
        ),
        slow(lambda codec, write, dtype: True, id="all of these"),
    ],
)
def test_a_sync_repairs_what_something_else_has_written(
    cases: Callable[[int, int, int], bool], caplog: pytest.LogCaptureFixture
) -> None:
    """With every codec, write and dtype."""
    for numbered in product(enumerate(CODECS), enumerate(WRITES), enumerate(DTYPES)):
        (_, codec), (_, name), (_, dtype) = numbered
        if cases(*(number for number, _ in numbered)):
            with caplog.at_level(logging.WARNING, "pulsesync"):
                report, equal = sync_after(WRITES[name], codec, dtype)
            assert equal, (codec, name, dtype)
            assert report.repaired == (TENSOR,), (codec, name, dtype)
    assert "Planning the sync again" not in caplog.text


@pytest.mark.parametrize("codec", CODECS)
def test_two_subscribers_that_take_turns_on_one_model_keep_it_right(codec: patch.CodecName) -> None:
    trained, held, rng, store = weights(DTYPES[0]), weights(DTYPES[0]), np.random.default_rng(3), MemoryStore()
    repaired = 0
    with Publisher(store, codec=codec) as pub, Subscriber(store) as one, Subscriber(store) as other:
        for turn in (one, one, other, other, one, other, other):
            pub.publish(trained)
            repaired += bool(turn.sync(held).repaired)
            assert all(held[name].tobytes() == trained[name].tobytes() for name in held)
            train(trained, rng)
        assert one.roll_back() is None  # its undo log is for weights that the other has changed
        assert other.roll_back() == 5
    assert repaired == 2  # the second turn of each; the first of the other attaches to the weights as they are


def test_a_subscriber_that_another_has_not_harmed_keeps_its_version() -> None:
    held, store = weights(DTYPES[0]), MemoryStore()
    with Publisher(store) as pub, Subscriber(store) as one, Subscriber(store) as other:
        pub.publish(weights(DTYPES[0]))
        one.sync(held)
        other.sync(held)
        assert one.sync(held).path == ()


@pytest.mark.parametrize("anchored", [False, True], ids=["patches", "anchor"])
def test_a_sync_does_not_write_to_weights_that_another_subscriber_has_taken_meanwhile(anchored: bool) -> None:
    """The other one syncs on a thread of its own, after all checks of the first and before its first write."""
    trained, held, rng, store = weights(DTYPES[0]), weights(DTYPES[0]), np.random.default_rng(5), MemoryStore()
    published: dict[int | None, dict[str, bytes]] = {}
    between: list[Callable[[], None]] = []

    def publish() -> None:
        train(trained, rng)
        version = pub.publish(trained).version
        published[version] = {name: array.tobytes() for name, array in trained.items()}

    def is_right(sub: Subscriber) -> bool:
        return {name: array.tobytes() for name, array in held.items()} == published[sub.version]

    def confirm() -> None:
        if between:
            thread = threading.Thread(target=between.pop())
            thread.start()
            thread.join()

    def take() -> None:
        publish()
        other.sync(held)
        assert is_right(other)

    with Publisher(store) as pub, Subscriber(store, confirm=confirm) as one, Subscriber(store) as other:
        publish()
        if not anchored:
            one.sync(held)
        publish()
        between.append(take)
        one.sync(held)
        assert is_right(one)
        assert other.sync(held).version == 2
        assert is_right(other)
        publish()
        other.sync(held)
        assert is_right(other)
        one.sync(held)
        assert is_right(one)


def test_views_of_the_same_memory_that_begin_elsewhere_are_seen() -> None:
    """One subscriber has the model, the other half of the rows of one of its tensors."""
    trained, held, rng, store = weights(DTYPES[0]), weights(DTYPES[0]), np.random.default_rng(5), MemoryStore()
    half = {**weights(DTYPES[0]), TENSOR: held[TENSOR][8:]}
    with (
        Publisher(store) as pub,
        Subscriber(store) as one,
        Subscriber(store, slices={TENSOR: Slice(rows=(8, 16))}) as other,
    ):
        for turn in (one, other, one, other, one):
            pub.publish(trained)
            turn.sync(held if turn is one else half)
            assert turn is other or all(held[name].tobytes() == trained[name].tobytes() for name in held)
            assert half[TENSOR].tobytes() == trained[TENSOR][8:].tobytes()
            train(trained, rng)


def test_a_forked_child_waits_for_no_lock_of_its_parent() -> None:
    held, store = weights(DTYPES[0]), MemoryStore()
    with Publisher(store) as pub, Subscriber(store) as parents:
        pub.publish(held)
        parents.sync(held)
        state, locked, done = parents.state, threading.Event(), threading.Event()
        assert state is not None

        def hold() -> None:
            with state.lock, claims._CLAIMING:
                locked.set()
                done.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        locked.wait(10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: a fork while threads run
            child = os.fork()
        if not child:
            signal.alarm(20)  # ends a child that waits
            with Subscriber(store) as own:
                own.sync(held)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        done.set()
        thread.join()
        assert status == 0


@pytest.mark.parametrize("bad", ["anchor", "patch"])
def test_a_bad_object_on_the_path_of_a_repair_is_named_and_so_is_the_state_of_the_weights(bad: str) -> None:
    rng, store = np.random.default_rng(5), MemoryStore()
    trained = {TENSOR: (0.02 * rng.standard_normal((256, 512))).astype(DTYPES[0])}
    held, parts = {TENSOR: trained[TENSOR].copy()}, list[str]()  # the parts of the anchor, of version 1, and of 2
    with Publisher(store, codec="history") as pub, Subscriber(store) as sub:
        for _ in range(2):
            pub.publish(trained)
            sub.sync(held)
            parts += sorted({entry.key for entry in store.list("parts/")} - set(parts))
            train(trained, rng)
        pub.publish(trained)
        held[TENSOR][:] = 0
        key = parts[0 if bad == "anchor" else 1]
        good = store.get(key)
        store.put(key, good[:-9] + bytes(9))
        for _ in range(2):
            with pytest.raises(ChecksumError) as caught:
                sub.sync(held)
            assert caught.value.key == key
            if bad == "anchor":
                assert sub.version is None
                assert f"written to {TENSOR!r} of this worker: do not use the weights" in str(caught.value)
            else:
                assert sub.version == 0
                sub.verify(held)
        store.put(key, good)
        assert sub.sync(held).repaired == (TENSOR,)
        assert held[TENSOR].tobytes() == trained[TENSOR].tobytes()


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("how", ["pointer", "roll back"])
def test_an_undo_log_is_not_applied_to_weights_that_something_else_has_written_to(how: str) -> None:
    trained, held, rng, store = weights(DTYPES[0]), weights(DTYPES[0]), np.random.default_rng(5), MemoryStore()
    states = []
    with Publisher(store) as pub, Subscriber(store, follow="stable") as sub:
        for version in range(3):
            pub.publish(trained)
            pub.flush()
            states.append({name: array.tobytes() for name, array in trained.items()})
            move_pointer(store, "stable", version)
            sub.sync(held)
            train(trained, rng)
        held[TENSOR][:] = 0
        if how == "roll back":
            with pytest.raises(VerificationError, match=f"something else has written to '{TENSOR}'"):
                sub.roll_back()
        move_pointer(store, "stable", 1)
        report = sub.sync(held)
        assert (report.version, report.repaired, "undo" in report.path) == (1, (TENSOR,), False)
        assert {name: array.tobytes() for name, array in held.items()} == states[1]


def test_two_watches_of_one_model_go_on(caplog: pytest.LogCaptureFixture) -> None:
    trained, held, rng, store = weights(DTYPES[0]), weights(DTYPES[0]), np.random.default_rng(5), MemoryStore()
    subscribers = [Subscriber(store), Subscriber(store)]
    ended: list[BaseException | None] = []

    def watch(sub: Subscriber) -> None:
        try:
            for _ in sub.watch(held, interval_s=0.0, max_interval_s=0.001):
                pass
            ended.append(None)
        except BaseException as e:  # noqa: BLE001 - the assertion below shows it
            ended.append(e)

    with Publisher(store) as pub:
        pub.publish(trained)
        threads = [threading.Thread(target=watch, args=[sub]) for sub in subscribers]
        for thread in threads:
            thread.start()
        for _ in range(20):
            train(trained, rng)
            pub.publish(trained)
        for sub in subscribers:
            sub.close()
        for thread in threads:
            thread.join(20)
    assert ended == [None, None]
    with Subscriber(store) as last:
        last.sync(held)
        assert all(held[name].tobytes() == trained[name].tobytes() for name in held)


def test_a_call_from_confirm_is_an_error_and_waits_for_nothing() -> None:
    held, store = weights(DTYPES[0]), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(held)

    def confirm() -> None:
        sub.verify()

    sub = Subscriber(store, confirm=confirm)
    with pytest.raises(StateError, match="in the middle of a sync"):
        sub.sync({name: np.zeros_like(array) for name, array in held.items()})
