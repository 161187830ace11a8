"""Bundles: pieces of tensors laid end to end, read and written wherever they lie."""

from typing import Any

import numpy as np
import pytest

from pulsesync.core.types import BLOCK, BlockChange
from pulsesync.errors import StateError
from pulsesync.group import bundles
from pulsesync.group.bundles import LocalBundles, agree, describe_shards, places_of
from pulsesync.state.sharding import Placed, Shards, shards_of


def model(rng: np.random.Generator, tensors: int = 50) -> dict[str, Any]:
    return {f"t{n:03d}": rng.integers(0, 1 << 16, tuple(rng.integers(1, 30, 2)), np.uint16) for n in range(tensors)}


def agreed(*shards: Shards, sources: tuple[int, ...] = (0,)) -> bundles.BundlePlan:
    return agree([describe_shards(one) for one in shards], sources)


def test_small_tensors_share_bundles_and_large_ones_are_split() -> None:
    tensors = {f"t{n:05d}": np.zeros(100, np.uint16) for n in range(5000)}
    tensors |= {"huge": np.zeros((3000, 9000), np.uint16), "bytes": np.zeros(5, np.uint8)}
    shards = shards_of(tensors)
    wire = agreed(shards, shards)
    sizes = {wire.layout.tiles[n].size: len(pieces) for n, pieces in enumerate(wire.pieces)}
    assert sizes == {500_000: 5000, 5: 1, 1864 * 9000: 1, 1136 * 9000: 1}
    assert max(sizes) <= bundles.LARGE


def test_a_bundle_reads_and_writes_its_pieces_wherever_they_lie() -> None:
    rng = np.random.default_rng(0)
    source = model(rng)
    held = {name: Placed(array[:, :1].copy(), array.shape, columns=(0, 1)) for name, array in source.items()}
    rest = {
        name: Placed(array[:, 1:].copy(), array.shape, columns=(1, array.shape[1])) for name, array in source.items()
    }
    mine, others = shards_of(held), shards_of(rest)
    wire = agreed(shards_of(source), mine, others)
    for shards, rank in ((mine, 1), (others, 2)):
        places = places_of(wire, wire.local_to(rank), shards)
        memory = {name: (view.flat,) for name, view in shards.published.views.items()}
        sender = LocalBundles(wire, wire.owned_by(0), shards_of(source))
        for tile in wire.local_to(rank):
            place, before = places[tile.ordinal], sender.block(tile, 0)
            assert np.array_equal(place.read(memory, 0, tile.size), before)
            at = np.sort(rng.choice(tile.size, tile.size // 3, replace=False)).astype(np.uint32)
            new = rng.integers(0, 1 << 16, at.size, np.uint16)
            place.write(memory, BlockChange(0, at, before[at], new))
            expected = before.copy()
            expected[at] = new
            assert np.array_equal(place.read(memory, 0, tile.size), expected)
            place.write_range(memory, 0, before)
            assert np.array_equal(place.read(memory, 0, tile.size), before)
    for name, array in source.items():
        assert np.array_equal(held[name].tensor, array[:, :1])
        assert np.array_equal(rest[name].tensor, array[:, 1:])


def test_blocks_of_a_bundle_may_begin_and_end_inside_a_tensor() -> None:
    rng = np.random.default_rng(0)
    source = {f"t{n}": rng.integers(0, 1 << 16, BLOCK // 3, np.uint16) for n in range(7)}
    shards = shards_of(source)
    wire = agreed(shards, shards)
    held = LocalBundles(wire, wire.owned_by(0), shards)
    read = [held.block(tile, n) for tile in wire.layout.tiles for n in range(tile.block_count)]
    assert max(block.size for block in read) <= BLOCK
    assert np.array_equal(np.concatenate(read), np.concatenate(list(source.values())))


def test_everybody_agrees_and_the_order_of_names_does_not_matter() -> None:
    source = model(np.random.default_rng(0))
    a, b = shards_of(source), shards_of(dict(reversed(source.items())))
    assert agreed(a, b).id == agreed(b, a).id


def test_sources_own_what_they_hold_first() -> None:
    array = np.arange(40, dtype=np.uint16).reshape(10, 4)
    norm = np.ones(3, np.uint16)
    top = shards_of({"w": Placed(array[:5].copy(), (10, 4), rows=(0, 5)), "norm": norm})
    bottom = shards_of({"w": Placed(array[5:].copy(), (10, 4), rows=(5, 10)), "norm": norm})
    wire = agreed(top, bottom, shards_of({"w": array, "norm": norm}), sources=(0, 1))
    owned = {place: {p.tensor for t in wire.owned_by(place) for p in wire.pieces[t.ordinal]} for place in (0, 1)}
    assert owned == {0: {"w", "norm"}, 1: {"w"}}


@pytest.mark.parametrize(
    ("receiver", "told"),
    [
        ({"a": np.zeros(4, np.uint16)}, "rank 1 does not have tensor 'b'"),
        ({"a": Placed(np.zeros(2, np.uint16), (4,), rows=(0, 2))}, "no receiver has rows 2 to 4 of tensor 'a'"),
        ({"a": np.zeros(4, np.uint16), "b": np.zeros(4, np.uint16), "c": np.zeros(1, np.uint16)}, "no source has them"),
    ],
)
def test_names_that_are_not_covered_are_told(receiver: dict[str, Any], told: str) -> None:
    source = {"a": np.zeros(4, np.uint16), "b": np.zeros(4, np.uint16)}
    with pytest.raises(StateError, match=told):
        agreed(shards_of(source), shards_of(receiver))
