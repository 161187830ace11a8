"""A worker whose weights something else has written to: the next sync repairs and names them, and blames no record."""

import logging

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
