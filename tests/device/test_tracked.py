"""What is remembered goes to a device and comes back as it was, and follows changes there as on the host."""

import numpy as np
import pytest

from pulsesync.core.types import TensorSpec
from pulsesync.device.changes import find_changes
from pulsesync.device.memory import to_host
from pulsesync.device.tracked import DeviceHistory, HotSearch
from pulsesync.errors import VerificationError
from pulsesync.format.history import History
from pulsesync.format.tables import Contexts
from pulsesync.kernels import spec
from tests.device.launches import counted
from tests.device.pairs import Pair, small, to_flats, trained

SPECS = (TensorSpec("a", "BF16", (10, 8), row_cuts=(5,)), TensorSpec("b", "F32", (40,)))


@pytest.fixture(scope="module")
def pair(device: str) -> Pair:
    """Two versions with a history; the second leaves a tile alone."""
    layout, state = small(2, SPECS)
    pair = Pair(layout, state, device, "history")
    state = trained(layout, state, 1)
    after = trained(layout, state, 2)
    after["a"][:40] = state["a"][:40]
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(spec, "LANE_DECISIONS", 2)  # to be quick, see many_lanes
        pair.advance(state)
        pair.advance(after)
    return pair


def test_a_history_comes_back_as_it_went(pair: Pair) -> None:
    history = pair.writer.history
    there = DeviceHistory.of(history, pair.backend.piles)
    assert there.digest() == history.digest()
    assert there.to_bytes() == history.to_bytes()
    assert all(there.cut(n) == history.cut(n) for n in range(4))


def test_the_history_of_a_state_is_that_of_the_host(pair: Pair) -> None:
    ours, theirs = pair.state.history.on_host(), pair.writer.history
    assert ours.index == theirs.index == 2
    assert ours.to_bytes() == theirs.to_bytes()


def test_an_empty_history_is_like_none(pair: Pair) -> None:
    assert DeviceHistory.of(History(), pair.backend.piles) == DeviceHistory()
    assert DeviceHistory().to_bytes() == History().to_bytes()


def test_weights_are_hot_below_the_cuts_of_their_tiles(pair: Pair) -> None:
    pile, bits = pair.backend.piles[0], pair.writer.state["a"]
    hot = HotSearch(pile, pile.locate(pair.state.flats), np.array([5, 0]), DeviceHistory()).wait()
    marked = np.unpackbits(to_host(hot.bitmap)[0].view(np.uint8), bitorder="little").reshape(2, -1)
    assert np.array_equal(np.flatnonzero(marked[0]), np.flatnonzero((bits[:40] & 0x7FFF) >> 7 < 5))
    assert not marked[1].any()
    assert hot.counts.tolist() == marked.sum(axis=1).tolist()


def test_weights_that_somebody_else_wrote_are_not_those_that_are_remembered(pair: Pair, device: str) -> None:
    pile, state = pair.backend.piles[0], pair.writer.state
    flats = to_flats({**state, "a": np.zeros_like(state["a"])}, device)
    cuts = np.array([pair.state.history.cut(tile.ordinal) for tile in pile.tiles])
    with pytest.raises(VerificationError, match="something other than a sync wrote them"):
        HotSearch(pile, pile.locate(flats), cuts, pair.state.history).wait()


def test_only_the_position_in_the_epoch_decides_which_kernels_find_hot_weights(pair: Pair) -> None:
    """What is tracked, and whether changes are counted, depends on the data: neither may cause a compilation."""
    pile, history = pair.backend.piles[0], pair.state.history
    weights, cuts = pile.locate(pair.state.flats), history.of_pile(pile).cuts
    nothing = find_changes(pile, weights, weights, cast=False)
    with counted() as compiled:
        for memories in (DeviceHistory(history.index), history):
            HotSearch(pile, weights, cuts, memories)
            HotSearch(pile, weights, cuts, memories, changed=nothing)
            HotSearch(pile, weights, cuts, memories, rooms=pile.host_sizes, contexts=Contexts(0, 24, 3, 38))
    assert sorted(one.kernel for one in compiled) == ["count_hot_changes", "list_hot"]
