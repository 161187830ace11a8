"""How anchors are written: by what the link and the codec were measured to take."""

import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Codec
from pulsesync.errors import StoreError
from pulsesync.format.layout import SMALL
from pulsesync.publish import anchors, costs
from pulsesync.publish.costs import AnchorCosts, LinkSpeed
from pulsesync.run import keys
from tests.runs import Watched, codecs_of, equal, parts_of, publish_steps

pytestmark = pytest.mark.usefixtures("parts_as_objects", "a_tile_for_each_tensor")

ENOUGH = 2 * costs.PACKED_BYTES


@pytest.fixture(autouse=True)
def hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "hash_rate", lambda: 3e9)


def measured(packing: float, link: float) -> AnchorCosts:
    """What was measured of a machine that packs to two thirds at one rate, and sends at another, in bytes a second."""
    found = AnchorCosts()
    found.packed(ENOUGH, ENOUGH * 2 // 3, ENOUGH / packing)
    found.link.sent(ENOUGH, ENOUGH / link)
    return found


@pytest.mark.parametrize(("link", "expected"), [(1e7, "dense"), (1.25e8, "dense"), (1.25e9, "raw"), (1e10, "raw")])
def test_weights_are_packed_where_that_takes_less_time_than_it_saves_on_the_link(link: float, expected: str) -> None:
    found = measured(packing=5e8, link=link)
    assert found.choose() == expected
    assert found.choice.codec == expected
    assert f"over a link of {8e-6 * link:,.0f} Mbit/s" in found.choice.reason


def test_a_machine_with_many_cores_packs_for_a_fast_link_too() -> None:
    assert measured(packing=2.9e9, link=1.25e9).choose() == "dense"


def test_nothing_is_chosen_by_a_few_bytes() -> None:
    found = AnchorCosts()
    found.packed(1000, 700, 1.0)
    found.link.sent(ENOUGH, 1e-3)
    assert found.choose() == "dense"
    assert "nothing was measured" in found.choice.reason


def test_anchors_of_a_local_run_are_packed_unless_the_link_is_given() -> None:
    local = AnchorCosts(link=LinkSpeed(is_local=True))
    given = AnchorCosts(link=LinkSpeed(10e9, is_local=True))
    for found in (local, given):
        found.packed(ENOUGH, ENOUGH * 2 // 3, ENOUGH / 5e8)
        found.link.sent(ENOUGH, 1e-3)
    assert (local.choose(), given.choose()) == ("dense", "raw")
    assert "the store is local" in local.choice.reason
    assert "a link of 10,000 Mbit/s, as given" in given.choice.reason


def test_a_link_that_has_become_slow_is_noticed() -> None:
    found = measured(packing=5e8, link=1e10)
    assert found.choose() == "raw"
    for _ in range(12):
        found.link.sent(ENOUGH, ENOUGH / 1e7)
    assert found.choose() == "dense"


@pytest.mark.parametrize(("asked", "codec"), [("raw", Codec.RAW), ("dense", Codec.DENSE)])
def test_an_anchor_is_written_as_it_was_asked_for(asked: Any, codec: Codec) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal(5000, np.float32)}  # so large that its part is an object
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
    assert "The anchor of epoch 0 is encoded as dense: the workers' link is not known: the store is" in caplog.text


def test_the_report_says_how_an_anchor_is_written_and_why() -> None:
    with Publisher(Watched(), anchor_codec="raw") as publisher:
        report = publisher.publish({"w": np.zeros(10, np.float32)})
    assert str(report.anchor) == "raw: as asked for"


def three_tiles() -> dict[str, Any]:
    """Tensors that are large enough for tiles of their own."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(SMALL, np.float32) for name in "abc"}


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
    with Publisher(store, spool=tmp_path) as publisher:
        publisher.publish(three_tiles())
    assert len(waited) == 3
    uploads = [key for key in store.writes if key.startswith("parts/")]
    assert sorted(uploads) == sorted(parts_of(store, keys.anchor_key(0)))


def test_an_upload_that_fails_while_others_are_encoded_is_finished_with_a_later_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    monkeypatch.setattr(anchors, "MAX_INLINE_BYTES", 0)
    store, weights = Watched(), three_tiles()
    failed: list[str] = []

    def once(verb: str, key: str) -> None:
        if verb == "put" and key.startswith("parts/") and not failed:
            failed.append(key)
            raise StoreError("no answer", key=key, retryable=True)

    store.before = once
    with Publisher(store, spool=tmp_path) as publisher:
        with pytest.raises(StoreError, match="no answer"):
            publisher.publish(weights)
        weights["a"][0] += 1
        publisher.publish(weights)
        publisher.flush()
    held = {name: np.zeros_like(array) for name, array in weights.items()}
    Subscriber(store).sync(held)
    assert equal(held, weights)
