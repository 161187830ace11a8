"""Piles know where every block is, and read tensors in place wherever a launch can."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from pulsesync.core.types import BLOCK, TensorSpec, Tile
from pulsesync.device import pile as pile_module
from pulsesync.device.decode import BlockPlaces, fetch_weights
from pulsesync.device.memory import to_device
from pulsesync.device.pile import Pile, make_piles, place_of
from pulsesync.format import layout as layouts
from pulsesync.kernels.gpu import words
from pulsesync.kernels.spec import GPU_CHUNK
from pulsesync.state.slices import Slice, find_places
from tests.device.pairs import piles_of, place, to_flats
from tests.helpers import random_state

SPECS = [
    TensorSpec("a", "BF16", (6, 8), column_cuts=(4,)),
    TensorSpec("b", "F32", (3,)),
    TensorSpec("c", "BF16", (BLOCK + GPU_CHUNK + 5,)),
    TensorSpec("n", "BF16", (0,)),
    TensorSpec("z", "BF16", (7, 3), row_cuts=(1, 4)),
]


def piles(device: str) -> dict[str, Pile]:
    return {pile.tiles[0].tensor.dtype: pile for pile in piles_of(layouts.make(SPECS), device)}


def test_chunks_are_those_of_the_kernels() -> None:
    assert words.CHUNK.value == GPU_CHUNK


def test_tiles_of_a_dtype_are_in_one_pile_block_after_block(device: str) -> None:
    found = piles(device)
    assert list(found) == ["BF16", "F32"]
    pile = found["BF16"]
    assert [tile.tensor.name for tile in pile.tiles] == ["a", "a", "c", "z", "z", "z"]
    assert pile.first_block.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert pile.tables.sizes.tolist() == [24, 24, BLOCK, GPU_CHUNK + 5, 3, 9, 9]
    assert pile.tables.begins.tolist() == [0, 0, 0, BLOCK, 0, 0, 0]
    assert pile.tables.first_chunk.tolist() == [0, 1, 2, 258, 260, 261, 262, 263]
    assert pile.tables.chunk_block.tolist() == [0, 1, *[2] * 256, 3, 3, 4, 5, 6]
    assert pile.tables.block_tile.tolist() == [0, 1, 2, 2, 3, 4, 5]


def test_positions_in_tiles_are_found_in_their_blocks(device: str) -> None:
    pile = piles(device)["BF16"]
    per_tile = np.array([2, 0, 4, 0, 1, 1])
    found = pile.find_blocks(per_tile, np.array([0, 23, 5, BLOCK - 1, BLOCK, BLOCK + 9, 8, 0]))
    assert found.inside is None
    assert found.counts.tolist() == [2, 0, 2, 2, 0, 1, 1]
    assert found.positions.tolist() == [0, 23, 5, BLOCK - 1, 0, 9, 8, 0]
    nothing = pile.find_blocks(np.zeros(6, np.int64), np.empty(0, np.int64))
    assert (nothing.counts.tolist(), nothing.positions.tolist()) == ([0] * 7, [])


def test_positions_in_groups_that_are_not_kept_are_in_no_block(device: str) -> None:
    bundle = Tile(0, TensorSpec("a", "BF16", (20,)), 0, 0, 20, 1, groups=(0, 4, 9, 15, 20), kept=(1, 3))
    pile = Pile([bundle, replace(bundle, ordinal=1, kept=(0, 2))], [bundle, bundle], place(device))
    positions = np.array([0, 4, 8, 9, 14, 15, 19, 3, 4, 9, 19])
    found = pile.find_blocks(np.array([7, 4]), positions)
    assert found.inside is not None
    assert positions[found.inside].tolist() == [4, 8, 15, 19, 3, 9]
    assert found.counts.tolist() == [2, 2, 1, 1]
    assert found.positions.tolist() == [0, 4, 0, 4, 3, 0]
    assert found.of(np.arange(11)).tolist() == found.inside.tolist()


def test_a_large_dtype_has_several_piles_and_those_of_a_device_are_its_own(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = layouts.make([TensorSpec(name, "BF16", (40,)) for name in "abcde"] + [TensorSpec("f", "F32", (200,))])
    assert len(piles_of(layout, device)) == 2
    monkeypatch.setattr(pile_module, "MOST", 100)
    monkeypatch.setattr(pile_module, "EACH", 100)
    names = [[tile.tensor.name for tile in pile.tiles] for pile in piles_of(layout, device)]
    assert names == [["a", "b"], ["c", "d", "e"], ["f"]]
    elsewhere = torch.device("cuda", 7)  # nothing is launched: there need not be one
    devices = {spec.name: elsewhere if spec.name in "bd" else place(device) for spec in layout.tensors}
    found = make_piles(layout.tiles, {tile.ordinal: tile for tile in layout.tiles}, devices)
    assert [([t.tensor.name for t in p.tiles], p.device == elsewhere) for p in found] == [
        (["a"], False),
        (["b", "d"], True),
        (["c", "e"], False),
        (["f"], False),
    ]


def test_geometry_is_where_tiles_lie_in_their_tensors(device: str) -> None:
    starts, columns, strides = (table.tolist() for table in piles(device)["BF16"].placement.geometry)
    assert starts == [0, 4, 0, 0, 3, 12]
    assert columns == [4, 4, BLOCK + GPU_CHUNK + 5, 3, 9, 9]
    assert strides == [8, 8, 0, 0, 0, 0]


def test_the_digest_reads_in_words_what_begins_at_one_in_memory_and_in_its_tensor(device: str) -> None:
    sizes = {"a": 8, "b": 6, "c": 5, "d": 4, "e": 1, "f": 7, "g": 9, "h": 10}
    specs = [TensorSpec(name, "BF16", (size,)) for name, size in sizes.items()]
    layout = layouts.bundle(layouts.make([*specs, TensorSpec("z", "BF16", (1 << 16, 6), (2,))]))
    assert [tile.names for tile in layout.tiles] == [["z"], ["z"], [*sizes]]
    (pile,) = piles_of(layout, device)
    words, others = pile.tables.indices.runs
    assert words.rows[:, 1].tolist() == [12, (1 << 16) * 6 - 12, 8, 6, 7, 10]  # a, b, f and h, of the bundle
    assert others.rows[:, 1].tolist() == [5, 4, 1, 9]


def test_a_part_of_a_pile_knows_its_blocks_in_the_whole(device: str) -> None:
    pile = piles(device)["BF16"]
    ordinals = [pile.tiles[i].ordinal for i in (1, 2, 5)]
    part = pile.part(ordinals)
    assert [tile.ordinal for tile in part.tiles] == ordinals
    assert pile.blocks_of(part).tolist() == [1, 2, 3, 6]
    assert pile.part([tile.ordinal for tile in pile.tiles]) is pile


def test_what_lies_in_a_row_at_a_word_is_read_in_place_and_the_rest_from_a_copy(device: str) -> None:
    layout = layouts.make(SPECS)
    state = random_state(np.random.default_rng(0), layout)
    flats = to_flats(state, device)
    odd = to_device(np.r_[np.uint16(0), state["c"]], place(device))
    flats["c"] = odd[1:]  # between words
    pile = piles(device)["BF16"]
    located = pile.locate(flats)
    in_place = [
        flats[tile.tensor.name].data_ptr() + 2 * tile.start == at
        for tile, at in zip(pile.tiles, located.at[torch.from_numpy(pile.first_block[:-1])].tolist(), strict=True)
    ]
    assert in_place == [False, False, False, True, False, True]
    assert all(at % 8 == 0 for at in located.at.tolist())
    last = (pile.host_sizes - 1).astype(np.int32)
    found = fetch_weights(BlockPlaces.of(pile, np.ones(pile.blocks, np.int64), last), located)()
    for b, bits in enumerate(found):
        tile = pile.tiles[pile.tile_of[b]]
        where = tile.flat_indices(np.array([pile.host_begins[b] + last[b]]))
        assert bits == state[tile.tensor.name][where[0]]


def test_addresses_are_kept_while_tensors_stay_and_what_is_copied_is_copied_every_time(device: str) -> None:
    pile = piles(device)["F32"]
    flats = {"b": torch.arange(4, dtype=torch.int32, device=device)[:3]}
    assert pile.locate(flats).at is pile.locate(flats).at
    moved = pile.locate({"b": flats["b"].clone()})
    memory = moved.memory[-1]
    assert isinstance(memory, torch.Tensor)
    assert moved.at.tolist() == [memory.data_ptr()]
    odd = torch.arange(4, dtype=torch.int32, device=device)[1:]  # not at a multiple of 8 bytes
    one = BlockPlaces.of(pile, np.ones(1, np.int64), np.zeros(1, np.int32))
    assert fetch_weights(one, pile.locate({"b": odd}))().tolist() == [1]
    odd[0] = 9
    assert fetch_weights(one, pile.locate({"b": odd}))().tolist() == [9]


def test_a_slice_is_piled_with_the_places_it_has(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (6, 8), row_cuts=(2, 4)), TensorSpec("b", "BF16", (4,))])
    places = find_places(layout, {"a": Slice(rows=(2, 6)), "b": None})
    (pile,) = piles_of(layout, device, {n: place_of(held) for n, held in places.items()})
    assert [tile.row for tile in pile.tiles] == [2, 4]
    assert [tile.row for tile in pile.places] == [0, 2]
    assert pile.tables.indices.table[:, 1].tolist() == [16, 32]
    assert pile.placement.geometry[0].tolist() == [0, 16]
