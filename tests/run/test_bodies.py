"""The bodies of a run: what is fetched of them, with the calls that it costs."""

import numpy as np
import pytest

from pulsesync.core.types import TensorSpec
from pulsesync.errors import FormatError, NotFoundError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.manifest import PartRef
from pulsesync.run import bodies, keys
from pulsesync.run.bodies import fetch_body
from pulsesync.testing import random_bits
from tests.helpers import count_sums
from tests.runs import Watched


class Large:
    """A part of eight tiles in eight sections, and the store it is in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(patch, "SECTION_BYTES", 1)
        monkeypatch.setattr(bodies, "SMALL_PART", 1000)
        monkeypatch.setattr(bodies, "HEADER_GUESS", 64)
        rng = np.random.default_rng(0)
        self.layout = layouts.make([TensorSpec(f"t{i}", "U16", (500,)) for i in range(8)])
        state = {f"t{i}": random_bits(rng, np.uint16, (500,)) for i in range(8)}
        sums = count_sums(self.layout, state)
        part = patch.encode_whole(self.layout, self.layout.tiles, state, sums)
        self.ref, self.data, self.store = PartRef(part.id, len(part.data)), bytes(part.data), Watched()
        self.key = keys.part_key(part.id)
        self.store.store.put(self.key, part.data)


def test_a_body_is_fetched_whole_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(monkeypatch)
    body, fetched = fetch_body(large.store, large.ref, large.layout, None)
    assert (fetched, len(large.store.gets), len(body.sections)) == (len(large.data), 1, 9)


def test_a_small_body_is_fetched_whole_whatever_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(monkeypatch)
    monkeypatch.setattr(bodies, "SMALL_PART", 1 << 20)
    assert fetch_body(large.store, large.ref, large.layout, {3})[1] == len(large.data)


def test_of_a_large_body_only_the_sections_of_wanted_tiles_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(monkeypatch)
    body, fetched = fetch_body(large.store, large.ref, large.layout, {2, 5})
    assert len(body.sections) == 3
    assert fetched < len(large.data) / 2
    assert all(end is not None for _, _, end in large.store.gets)
    assert sum((end or 0) - begin for _, begin, end in large.store.gets) < len(large.data) / 2


def test_sections_that_follow_each_other_are_fetched_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(monkeypatch)
    few, _ = fetch_body(large.store, large.ref, large.layout, {2})
    calls = len(large.store.gets)
    body, _ = fetch_body(large.store, large.ref, large.layout, {1, 2, 3, 6})
    assert len(large.store.gets) == 2 * calls + 1
    assert sorted(body.sections) == [0, 2, 3, 4, 7]
    assert body.sections[3] == few.sections[3]


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [("flip", None), ("cut", None), ("longer", None), ("other", None), ("flip", {2}), ("cut", {2}), ("other", {2})],
)
def test_a_body_that_its_id_does_not_name_is_refused_with_its_key(
    monkeypatch: pytest.MonkeyPatch, damage: str, wanted: set[int] | None
) -> None:
    large = Large(monkeypatch)
    bad = {
        "flip": large.data[:-1] + bytes([large.data[-1] ^ 1]) if wanted is None else b"x" + large.data[1:],
        "cut": large.data[: len(large.data) // 3],
        "longer": large.data + b"x",
        "other": b"\0" * len(large.data),
    }[damage]
    large.store.store.put(large.key, bad)
    with pytest.raises(FormatError) as caught:
        fetch_body(large.store, large.ref, large.layout, wanted)
    assert caught.value.key == large.key


def test_a_body_that_is_gone_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Large(monkeypatch)
    large.store.delete(large.key)
    with pytest.raises(NotFoundError):
        fetch_body(large.store, large.ref, large.layout, None)
