"""The history, compared with a simulation of format.md's rules that goes through the weights one by one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, Bits, Codec, Remembered, TensorSpec, Tile, TilePatch
from pulsesync.errors import FormatError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from tests.backends import use_kernels
from tests.helpers import (
    FLOATS,
    applied,
    changed_state,
    classes,
    copied,
    encode,
    near,
    nudge,
    orders,
    random_layout,
    random_state,
    seeds,
    step,
)


@dataclass
class Simulation:
    """The cut of each tile in the history; for each hot weight that was changed, the patch and whether it went down."""

    index: int = 0
    cuts: dict[int, int] = field(default_factory=dict)
    moves: dict[int, dict[int, tuple[int, bool]]] = field(default_factory=dict)

    def take(self, patches: tuple[TilePatch, ...], old: Mapping[str, Bits], new: Mapping[str, Bits]) -> None:
        self.index += 1
        for one in patches:
            ordinal = one.tile.ordinal
            if one.codec == Codec.HISTORY:
                self.cuts[ordinal] = max(self.cuts.get(ordinal, 0), one.cut)
            if ordinal not in self.cuts:
                continue
            moves = self.moves.setdefault(ordinal, {})
            before, after = (one.tile.read(s[one.tile.tensor.name], 0, one.tile.size) for s in (old, new))
            where = np.flatnonzero(before != after)
            for at, a, b in zip(where.tolist(), orders(before[where]), orders(after[where]), strict=True):
                moves[at] = (self.index, step(a, b, 8 * before.itemsize) < 0)
            hot = self.hot(one.tile, new)
            self.moves[ordinal] = {at: move for at, move in moves.items() if hot[at]}

    def hot(self, tile: Tile, state: Mapping[str, Bits]) -> np.ndarray:
        weights = tile.read(state[tile.tensor.name], 0, tile.size)
        return classes(weights, tile.tensor.kind.exponent_shift or 0) < self.cuts[tile.ordinal]

    def bytes_of(self, tile: Tile, state: Mapping[str, Bits]) -> list[int]:
        moves = self.moves[tile.ordinal]
        found = (moves.get(at, (0, False)) for at in np.flatnonzero(self.hot(tile, state)).tolist())
        return [patch_index + 128 * down for patch_index, down in found]


def assert_agree(history: History, simulation: Simulation, layout: Layout, state: Mapping[str, Bits]) -> None:
    assert history.index == simulation.index
    assert {ordinal: known.cut for ordinal, known in history.tiles.items()} == {
        ordinal: cut for ordinal, cut in simulation.cuts.items() if cut
    }
    for ordinal, known in history.tiles.items():
        assert np.concatenate([block.last for block in known.blocks]).tolist() == simulation.bytes_of(
            layout.tiles[ordinal], state
        )


def run(seed: int, codecs: list[patch.CodecName], density: float, small: bool) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, dtypes=[*FLOATS, "I32"])
    old, history, simulation = random_state(rng, layout), History(), Simulation()
    for codec in codecs:
        new = changed_state(rng, old, density, small)
        part = encode(layout, old, new, codec=codec, history=history)
        found = patch.decode(part.data, layout, old, history=history)
        simulation.take(found.patches, old, new)
        history = history.after(found.patches, old)
        assert_agree(history, simulation, layout, new)
        old = new


@given(seeds, st.integers(1, 6), st.sampled_from([0.005, 0.1, 0.5]), st.booleans())
def test_history_is_what_the_rules_say(seed: int, patches: int, density: float, small: bool) -> None:
    run(seed, ["history"] * patches, density, small)


@given(
    seeds,
    st.lists(st.sampled_from(["history", "context", "gap", "dense", "auto"]), min_size=2, max_size=6),
    st.sampled_from([0.005, 0.1]),
    st.booleans(),
)
def test_history_is_what_the_rules_say_whatever_codecs_follow_each_other(
    seed: int, codecs: list[patch.CodecName], density: float, small: bool
) -> None:
    run(seed, codecs, density, small)


def test_history_over_several_blocks_is_what_the_rules_say() -> None:
    size = BLOCK + 500
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "BF16", (size,))])
    old, history, simulation = {"w": near(rng, "BF16", (size,), 100)}, History(), Simulation()
    for codec, where in (("history", slice(0, None)), ("history", slice(BLOCK, None)), ("gap", slice(0, BLOCK))):
        new = copied(old)
        new["w"][where] = nudge(rng, old["w"][where], 0.01)
        part = encode(layout, old, new, codec=codec, history=history)
        simulation.take(part.patches, old, new)
        history = history.after(part.patches, old)
        assert_agree(history, simulation, layout, new)
        old = new
    assert [block.last.size for block in history.tiles[0].blocks] == [
        int((classes(piece, 7) < history.cut(0)).sum()) for piece in (old["w"][:BLOCK], old["w"][BLOCK:])
    ]


def test_a_block_without_changes_is_remembered_too_when_its_tile_begins_and_when_the_cut_rises() -> None:
    size = BLOCK + 3000
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "BF16", (size,))])
    old, history, simulation, cuts = {"w": near(rng, "BF16", (size,), 100)}, History(), Simulation(), []
    for below in (99, 102):
        new = copied(old)
        last = new["w"][BLOCK:]
        last[:] = np.where(classes(last, 7) < below, last ^ 1, last)
        part = encode(layout, old, new, codec="history", history=history)
        simulation.take(part.patches, old, new)
        history = history.after(part.patches, old)
        assert_agree(history, simulation, layout, new)
        cuts.append(history.cut(0))
        old = new
    assert cuts == [99, 102]


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_replaying_the_patches_gives_the_same_history(kernel: str) -> None:
    layout = layouts.make([TensorSpec("w", "BF16", (50, 60), (20,), (31,)), TensorSpec("v", "F16", (500,))])
    rng = np.random.default_rng(0)
    start = {spec.name: near(rng, spec.dtype, (spec.size,), 14) for spec in layout.tensors}
    old, written, parts = start, History(), []
    for codec in ("history", "auto", "gap", "history", "dense"):
        new = changed_state(rng, old, 0.05, small=True)
        part = encode(layout, old, new, codec=codec, history=written)
        parts.append(part.data)
        written, old = written.after(part.patches, old), new
    with use_kernels(kernel):
        held, read = start, History()
        for data in parts:
            found = patch.decode(data, layout, held, history=read)
            held, read = applied(found.patches, held), read.after(found.patches, held)
    assert read.digest() == written.digest()


def first(layout: Layout, old: Bits, new: Bits, history: History | None = None) -> History:
    history = history or History()
    part = encode(layout, {"w": old}, {"w": new}, codec="history", history=history)
    return history.after(part.patches, {"w": old})


LAYOUT = layouts.make([TensorSpec("w", "BF16", (2000,))])
OLD = near(np.random.default_rng(1), "BF16", (2000,), 100)
NEW = nudge(np.random.default_rng(2), OLD, 0.1)


def test_after_leaves_the_history_before_as_it_was() -> None:
    history = first(LAYOUT, OLD, NEW)
    digest = history.digest()
    first(LAYOUT, NEW, nudge(np.random.default_rng(3), NEW, 0.1), history)
    assert history.digest() == digest


def test_an_epoch_begins_with_nothing() -> None:
    assert History().tiles == {}
    assert (History().index, History().size_bytes, History().cut(0)) == (0, 0, 0)


def test_a_tile_that_no_history_payload_reached_is_not_remembered() -> None:
    part = encode(LAYOUT, {"w": OLD}, {"w": NEW}, codec="gap")
    assert History().after(part.patches, {"w": OLD}).tiles == {}


def test_what_came_before_a_tile_began_counts_as_none() -> None:
    part = encode(LAYOUT, {"w": OLD}, {"w": NEW}, codec="gap")
    later = nudge(np.random.default_rng(3), NEW, 0.1)
    history = first(LAYOUT, NEW, later, History().after(part.patches, {"w": OLD}))
    assert {int(b) & 127 for b in history.tiles[0].blocks[0].last} == {0, 2}


def test_memory_is_one_byte_for_each_weight_below_the_cut() -> None:
    history = first(LAYOUT, OLD, NEW)
    assert history.size_bytes == int((classes(NEW, 7) < history.cut(0)).sum()) <= 2000


def test_the_cut_of_a_tile_never_falls() -> None:
    history, old, rng = History(), OLD, np.random.default_rng(4)
    seen = []
    for high in (102, 98, 101, 97):
        new = np.where(classes(old, 7) < high, nudge(rng, old, 0.3), old)
        history, old = first(LAYOUT, old, new, history), new
        seen.append(history.cut(0))
    assert seen == sorted(seen)


@pytest.mark.parametrize("what", ["index", "cut", "byte", "place", "tile"])
def test_the_digest_sees_every_part_of_a_history(what: str) -> None:
    history = first(LAYOUT, OLD, NEW)
    tile = history.tiles[0]
    content = tile.blocks[0].last.copy()
    if what == "byte":
        content[5] ^= 0x80
    if what == "place":
        other = int(np.flatnonzero(content != content[0])[0])
        content[[0, other]] = content[[other, 0]]
    changed = type(tile)(tile.cut + (what == "cut"), (Remembered.alone(content),))
    other_history = History(history.index + (what == "index"), {int(what == "tile"): changed})
    assert other_history.digest() != history.digest()


def test_the_digest_does_not_see_where_blocks_end() -> None:
    history = first(LAYOUT, OLD, NEW)
    content = history.tiles[0].blocks[0].last
    in_two = type(history.tiles[0])(history.cut(0), tuple(map(Remembered.alone, (content[:7], content[7:]))))
    assert History(1, {0: in_two}).digest() == history.digest()


def test_a_saved_history_comes_back_as_one_that_kernels_are_compiled_for() -> None:
    history = first(LAYOUT, OLD, NEW)
    data = history.to_bytes()
    loaded = History.from_bytes(data)
    assert (loaded.index, loaded.digest()) == (history.index, history.digest())
    blocks = [block for known in (history, loaded) for block in known.tiles[0].blocks]
    assert all(block.last.flags.writeable for block in blocks)  # a kernel for read-only arrays is another one
    for damaged in (b"", data[:20], data[:-1], b"[]\n", b'{"index":1}\n'):
        with pytest.raises(FormatError):
            History.from_bytes(damaged)
