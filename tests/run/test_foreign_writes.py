"""A worker whose weights something else has written to: the next sync repairs and names them, and blames no record."""

import logging
import threading
from collections.abc import Callable

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.format import patch
from pulsesync.store import MemoryStore
from tests.foreign_writes import CODECS, DTYPES, TENSOR, WRITES, sync_after, train, weights


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("codec", CODECS)
def test_a_sync_repairs_what_something_else_has_written(
    codec: patch.CodecName, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in DTYPES:
        for name, write in WRITES.items():
            with caplog.at_level(logging.WARNING, "pulsesync"):
                report, equal = sync_after(write, codec, dtype)
            assert equal, (name, dtype)
            assert report.repaired == (TENSOR,), (name, dtype)
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
