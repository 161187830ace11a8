"""Changes on a device do what those on the host do: found, composed, turned round and written."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from pulsesync.core.types import Bits, BlockChange, TensorSpec
from pulsesync.device.changes import PileChanges, compose, find_changes, on_whole
from pulsesync.device.memory import to_host
from pulsesync.device.pile import Pile
from pulsesync.format import layout as layouts
from pulsesync.format import weights
from pulsesync.kernels import reference
from pulsesync.testing import mutate
from tests.device.pairs import piles_of, to_flats
from tests.helpers import copied, random_state

LAYOUT = layouts.make([TensorSpec("a", "BF16", (8, 9), column_cuts=(5,)), TensorSpec("b", "BF16", (50,))])
Changed = dict[int, BlockChange]


@pytest.fixture(scope="module")
def pile(device: str) -> Pile:
    return piles_of(LAYOUT, device)[0]


def states(count: int, density: float = 0.1) -> list[dict[str, Bits]]:
    rng = np.random.default_rng(count)
    out = [random_state(rng, LAYOUT)]
    while len(out) < count:
        out.append({name: mutate(rng, bits, density) for name, bits in out[-1].items()})
    return out


def find(pile: Pile, old: Mapping[str, Bits], new: Mapping[str, Bits]) -> PileChanges:
    flats = [to_flats(state, str(pile.device)) for state in (old, new)]
    return find_changes(pile, pile.locate(flats[0]), pile.locate(flats[1]), cast=False)


def on_host(old: Mapping[str, Bits], new: Mapping[str, Bits]) -> Changed:
    out = {}
    for tile in LAYOUT.tiles:
        found = reference.changed(*(tile.read_block(state[tile.tensor.name], 0) for state in (old, new)))
        if found[0].size:
            out[tile.ordinal] = BlockChange(0, *found)
    return out


def fetched(runs: Sequence[PileChanges]) -> Changed:
    """What runs of one block a tile hold, by ordinal; no tile is in two of them."""
    out: Changed = {}
    for run in runs:
        starts, where, old, new = to_host(run.starts, run.positions, run.old, run.new)
        for tile, begin, end in zip(run.pile.tiles, starts, starts[1:], strict=False):
            if begin < end:
                assert tile.ordinal not in out
                before, after = (array[begin:end].view(np.uint16) for array in (old, new))
                out[tile.ordinal] = BlockChange(0, where[begin:end].view(np.uint32), before, after)
    return out


def assert_same(ours: Changed, theirs: Changed) -> None:
    assert ours.keys() == theirs.keys()
    for ordinal, change in ours.items():
        for field in ("positions", "old", "new"):
            assert np.array_equal(getattr(change, field), getattr(theirs[ordinal], field))


def test_what_is_found_is_what_the_host_finds(pile: Pile) -> None:
    old, new = states(2)
    assert_same(fetched([find(pile, old, new)]), on_host(old, new))


def test_two_sets_of_changes_are_composed_as_on_the_host(pile: Pile) -> None:
    first, then, last = states(3, 0.3)
    expected = {}
    before, after = on_host(first, then), on_host(then, last)
    for ordinal in before.keys() | after.keys():
        if both := weights.compose(before.get(ordinal), after.get(ordinal)):
            expected[ordinal] = both
    assert_same(fetched(compose([find(pile, first, then)], [find(pile, then, last)])), expected)
    assert_same(expected, on_host(first, last))


def test_a_change_that_is_taken_back_is_none(pile: Pile) -> None:
    old, new = states(2)
    run = find(pile, old, new)
    assert_same(fetched([run.inverse()]), on_host(new, old))
    assert compose([run], [run.inverse()]) == []
    back = copied(new)
    back["a"] = old["a"]
    assert_same(fetched(compose([run], [find(pile, new, back)])), on_host(old, back))


def test_changes_with_nothing_before_or_after_are_composed_to_themselves(pile: Pile) -> None:
    old, new = states(2)
    run = find(pile, old, new)
    for both in (compose([run], []), compose([], [run])):
        assert_same(fetched(both), on_host(old, new))


def test_where_the_changes_of_chunks_begin_is_found_again(pile: Pile) -> None:
    old, new = states(2)
    flats = [to_flats(state, str(pile.device)) for state in (old, new)]
    run = find_changes(pile, pile.locate(flats[0]), pile.locate(flats[1]), cast=False)
    assert run.known_chunks is not None
    assert replace(run, known_chunks=None).chunks().tolist() == run.known_chunks.tolist()


def test_changes_of_a_part_are_changes_of_the_whole(pile: Pile) -> None:
    old, new = states(2, 0.3)
    part = pile.part([pile.tiles[0].ordinal, pile.tiles[2].ordinal])
    run = find(part, old, new)
    whole = on_whole(run, pile)
    assert whole.pile is pile
    assert whole.starts.numel() == pile.blocks + 1
    expected = on_host(old, new)
    del expected[pile.tiles[1].ordinal]
    assert_same(fetched([whole]), expected)
    assert on_whole(whole, pile) is whole


def test_chunks_are_found_in_a_pile_of_thousands_of_blocks(device: str) -> None:
    """Their number times the size of a block is beyond 32 bits."""
    count = 2100
    pile = piles_of(layouts.make(TensorSpec(f"t{n:04}", "BF16", (5,)) for n in range(count)), device)[0]
    ones = torch.ones(count, dtype=torch.int32, device=device)
    starts = torch.arange(count + 1, device=device)
    run = PileChanges(pile, starts, ones, ones.to(torch.int16), ones.to(torch.int16))
    assert run.chunks().tolist() == starts.tolist()
