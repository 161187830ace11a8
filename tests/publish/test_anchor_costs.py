"""How anchors are written: by what the link and the codec were measured to take."""

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Codec
from pulsesync.errors import StoreError
from pulsesync.format.body import Body
from pulsesync.publish import anchors
from pulsesync.publish.anchors import AnchorCosts
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from tests.runs import Training, Watched, equal, parts_of, publish_steps, worker

ENOUGH = 2 * anchors.MEASURED_BYTES


@pytest.fixture(autouse=True)
def hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "hash_rate", lambda: 3e9)


def measured(packing: float, link: float) -> AnchorCosts:
    """What was measured of a machine that packs to two thirds at one rate, and sends at another, in bytes a second."""
    costs = AnchorCosts()
    costs.packed(ENOUGH, ENOUGH * 2 // 3, ENOUGH / packing)
    costs.sent(ENOUGH, ENOUGH / link)
    return costs


@pytest.mark.parametrize(("link", "expected"), [(1e7, "dense"), (1.25e8, "dense"), (1.25e9, "raw"), (1e10, "raw")])
def test_weights_are_packed_where_that_takes_less_time_than_it_saves_on_the_link(link: float, expected: str) -> None:
    costs = measured(packing=5e8, link=link)
    assert costs.choose() == expected
    assert costs.reason.startswith(f"{expected}: ")
    assert f"sent at {link / 1e9:.2f} GB/s" in costs.reason


def test_a_machine_with_many_cores_packs_for_a_fast_link_too() -> None:
    assert measured(packing=2.9e9, link=1.25e9).choose() == "dense"


def test_nothing_is_chosen_by_a_few_bytes() -> None:
    costs = AnchorCosts()
    costs.packed(1000, 700, 1.0)
    costs.sent(ENOUGH, 1e-3)
    assert costs.choose() == "dense"
    assert "nothing was measured" in costs.reason


def test_a_link_that_has_become_slow_is_noticed() -> None:
    costs = measured(packing=5e8, link=1e10)
    assert costs.choose() == "raw"
    for _ in range(12):
        costs.sent(ENOUGH, ENOUGH / 1e7)
    assert costs.choose() == "dense"


def codecs_of(store: Watched, key: str) -> set[Codec]:
    layout = RunReader(store, None).layout(next(iter(store.list("layouts/"))).key.partition("/")[2])
    bodies = [Body.of(store.store.get(part), layout) for part in parts_of(store, key)]
    return {entry.codec for body in bodies for entry in body.index.entries}


@pytest.mark.parametrize(("asked", "codec"), [("raw", Codec.RAW), ("dense", Codec.DENSE)])
def test_an_anchor_is_written_as_it_was_asked_for(asked: Any, codec: Codec) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal(5000, np.float32)}  # so many that its part is an object
    store = Watched()
    with Publisher(store, anchor_codec=asked) as publisher:
        publisher.publish(weights)
    assert codecs_of(store, keys.anchor_key(0)) == {codec}
    held = {"w": np.ones(5000, np.float32)}
    assert Subscriber(store).sync(held).path == ("anchor",)
    assert equal(held, weights)


def test_a_codec_that_anchors_do_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"anchor_codec must be one of 'auto', 'dense', 'raw'; got 'gap'"):
        Publisher(Watched(), anchor_codec=cast(Any, "gap"))


def test_the_log_says_how_an_anchor_is_written_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "pulsesync.publish.anchors"):
        publish_steps(Watched(), 1)
    assert "The anchor of epoch 0 is encoded as dense: nothing was measured yet." in caplog.text


@pytest.mark.usefixtures("a_tile_for_each_tensor")
def test_parts_are_uploaded_while_the_next_ones_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    store, arrived = Watched(), threading.Event()
    waited: list[Any] = []
    store.after = lambda verb, key: arrived.set() if verb == "put" and key.startswith("parts/") else None
    encode = anchors._encode_part

    def second_waits(*args: Any) -> Any:
        if waited:
            assert arrived.wait(10)
        waited.append(args)
        return encode(*args)

    monkeypatch.setattr(anchors, "_encode_part", second_waits)
    rng = np.random.default_rng(0)
    with Publisher(store, spool=tmp_path) as publisher:
        publisher.publish({name: rng.standard_normal(5000, np.float32) for name in "abc"})
    assert len(waited) == 3
    uploads = [key for key in store.writes if key.startswith("parts/")]
    assert sorted(uploads) == sorted(parts_of(store, keys.anchor_key(0)))


def test_an_upload_that_fails_while_others_are_encoded_is_finished_with_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    store, training = Watched(), Training()
    failed: list[str] = []

    def once(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("parts/") and not failed:
            failed.append(key)
            raise StoreError("no answer", key=key, retryable=True)

    store.before = once
    with Publisher(store, spool=tmp_path) as publisher:
        with pytest.raises(StoreError, match="no answer"):
            publisher.publish(training.weights)
        training.step()
        publisher.publish(training.weights)
        publisher.flush()
    held = worker()
    Subscriber(store).sync(held)
    assert equal(held, training.weights)
