from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, TensorSpec, Tile
from pulsesync.format import choice, container, index, patch, tables
from pulsesync.format import layout as layouts
from pulsesync.format.codecs import dense
from pulsesync.format.diff import Diff
from pulsesync.format.predict import code_against_old
from pulsesync.format.weights import FlatWeights
from tests.helpers import applied, count_sums, encode, near, nudge, same

LAYOUT = layouts.make([TensorSpec("a", "BF16", (300, 400)), TensorSpec("b", "BF16", (BLOCK + 9,))])


@dataclass
class Elsewhere:
    """A diff whose changes are dear to look at: each look is written down."""

    diff: Diff
    looks: list[str]

    @property
    def tile(self) -> Tile:
        return self.diff.tile

    @property
    def changed(self) -> int:
        return self.diff.changed

    @property
    def blocks(self) -> tuple[BlockChange, ...]:
        self.looks.append("blocks")
        return self.diff.blocks

    def positions(self) -> NDArray[np.int64]:
        self.looks.append("positions")
        return self.diff.positions()

    def values(self) -> Bits:
        return self.diff.values()

    def old_values(self) -> Bits:
        return self.diff.old_values()


def changed(density: float, cut: int = 110) -> tuple[dict[str, Bits], dict[str, Bits]]:
    rng = np.random.default_rng(0)
    old = {spec.name: near(rng, "BF16", (spec.size,), cut) for spec in LAYOUT.tensors}
    return old, {name: nudge(rng, bits, density) for name, bits in old.items()}


def in_views(body: bytes | memoryview) -> list[memoryview]:
    """A payload in pieces, all but one of them short, that are views of other memory."""
    view = memoryview(bytearray(body))
    return [view[:5], view[5:5], view[5:]]


def finished(
    old: dict[str, Bits], new: dict[str, Bits], codec: patch.CodecName, views: bool = False
) -> tuple[patch.FinishedPart, list[str]]:
    """A part by `finish`, and which of its changes were looked at."""
    weights = FlatWeights(old)
    looks: list[str] = []
    diffs = patch.find_diff(LAYOUT.tiles, old, new, codec)
    shared, coded = code_against_old(diffs, weights, None)
    if views:
        coded = {ordinal: one._replace(pieces=in_views(b"".join(one.pieces))) for ordinal, one in coded.items()}
    dear = [Elsewhere(diff, looks) for diff in diffs]
    return patch.finish(LAYOUT, dear, weights, shared, coded, count_sums(LAYOUT, new), codec), looks


@pytest.mark.parametrize("codec", ["context", "auto"])
def test_changes_that_were_coded_well_are_not_looked_at(codec: patch.CodecName) -> None:
    old, new = changed(0.05)
    done, looks = finished(old, new, codec)
    assert looks == []
    assert [one.codec for one in done.chosen] == [Codec.CONTEXT] * 2
    assert done.data == encode(LAYOUT, old, new, codec=codec).data


def test_a_payload_in_pieces_that_are_views_is_written_as_the_same_bytes() -> None:
    old, new = changed(0.05)
    plain, viewed = (finished(old, new, "auto", views)[0] for views in (False, True))
    assert (plain.id, plain.data) == (viewed.id, viewed.data)


def test_only_the_tile_that_was_coded_badly_is_looked_at() -> None:
    old, new = changed(0.05)
    new["a"][::3] = np.random.default_rng(1).choice(new["a"], new["a"][::3].size)
    done, looks = finished(old, new, "auto")
    assert set(looks) == {"positions"}
    assert [one.codec for one in done.chosen] == [Codec.GAP, Codec.CONTEXT]
    assert done.data == encode(LAYOUT, old, new, codec="auto").data


def test_blocks_are_asked_for_where_everything_changed() -> None:
    old, new = changed(0.05)
    new["a"] = old["a"] ^ np.random.default_rng(1).integers(1, 1 << 16, old["a"].size, dtype=np.uint16)
    done, looks = finished(old, new, "auto")
    assert set(looks) == {"positions", "blocks"}
    assert done.chosen[0].codec == Codec.RAW
    assert done.chosen[0].size == new["a"].nbytes
    assert done.data == encode(LAYOUT, old, new, codec="auto").data


def test_a_tile_whose_weights_all_flip_the_same_bits_is_written_as_xor() -> None:
    old, new = changed(0.05)
    new["a"] = old["a"] ^ np.uint16(0x0155)
    done, _ = finished(old, new, "auto")
    assert done.chosen[0].codec == Codec.XOR
    assert done.chosen[0].size < 100
    assert same(applied(patch.decode(done.data, LAYOUT, old).patches, old), new)


def test_the_whole_of_a_tile_is_not_written_as_xor_where_its_beginning_would_be_larger() -> None:
    old, _ = changed(0)
    new = {name: nudge(np.random.default_rng(2), bits, 1.0, places=1) for name, bits in old.items()}
    with mock.patch.object(dense, "encode", wraps=dense.encode) as encode_planes:
        done, _ = finished(old, new, "auto")
    assert [one.codec for one in done.chosen] == [Codec.CONTEXT] * 2
    assert [[block.size for block in call.args[0]] for call in encode_planes.call_args_list] == [[choice.SAMPLE]] * 2


def test_long_steps_that_come_at_regular_places_are_written_as_steps() -> None:
    old, new = changed(0.05)
    at = np.arange(0, old["a"].size, 9)
    new["a"][at] = tables.apply_steps(old["a"][at], 1000 + np.resize(np.arange(200), at.size))
    done, looks = finished(old, new, "auto")
    assert set(looks) == {"positions"}
    assert done.chosen[0].codec == Codec.STEP
    assert same(applied(patch.decode(done.data, LAYOUT, old).patches, old), new)


def test_a_tiny_part_has_no_tables_where_it_is_smaller_without() -> None:
    old, _ = changed(0)
    new = {name: bits.copy() for name, bits in old.items()}
    new["a"][5] ^= 1
    done, looks = finished(old, new, "auto")
    _, sections = container.open_part(done.data, done.id)
    assert set(looks) == {"positions"}
    assert index.parse(sections[0], len(LAYOUT.tiles), [len(s) for s in sections])[0] == []
    assert [one.codec for one in done.chosen] == [Codec.STEP]
