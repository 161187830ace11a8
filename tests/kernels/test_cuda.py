"""The Triton kernels do what the reference does, on a GPU or in Triton's interpreter, and keep within their bounds."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU kernels are NOT tested: torch cannot be imported")
pytest.importorskip("triton", reason="the GPU kernels are NOT tested: triton cannot be imported")

import torch

from pulsesync.core import digest
from pulsesync.core.types import BLOCK, DTYPES, Bits, Sum, TensorSpec
from pulsesync.device.blocks import count_blocks, count_pile
from pulsesync.device.changes import PileChanges, WriteAddresses, digest_changes, digest_changes_by_block, find_changes
from pulsesync.device.decode import BlockPlaces, fetch_weights
from pulsesync.device.memory import starts_of, to_device
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.kernels import reference
from pulsesync.testing import mutate, random_bits
from tests.device import interpreter
from tests.device.pairs import host, locate, pile_of, piles_of

interpreter.mend()


def assert_found(run: PileChanges, old: list[Bits], new: list[Bits]) -> None:
    expected = [reference.changed(a, b) for a, b in zip(old, new, strict=True)]
    dtype = old[0].dtype
    assert run.starts.tolist() == starts_of(np.array([found[0].size for found in expected])).tolist()
    for tensor, arrays, kind in zip(
        (run.positions, run.old, run.new), zip(*expected, strict=True), (np.uint32, dtype, dtype), strict=True
    ):
        assert np.array_equal(host(tensor, kind), np.concatenate(arrays))


# What changed


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "I64"])
def test_compare_and_collect_equal_the_reference(dtype: str, device: str) -> None:
    rng = np.random.default_rng(1)
    sizes = [1, 33, 200, 4099]
    old = [random_bits(rng, DTYPES[dtype].bits.type, (size,)) for size in sizes]
    new = [mutate(rng, bits, 0.03) for bits in old]
    new[1][:] = old[1] ^ old[1].dtype.type(1)  # all of a block, and the ends of a chunk
    new[3][[4095, 4096, 4098]] = ~old[3][[4095, 4096, 4098]]
    pile, pairs = pile_of(dtype, sizes, device), list(zip(old, new, strict=True))
    run = find_changes(pile, locate(pile, old), locate(pile, new), cast=False)
    assert_found(run, old, new)
    in_chunks = [np.count_nonzero(a[k : k + 4096] != b[k : k + 4096]) for a, b in pairs for k in range(0, a.size, 4096)]
    assert np.array_equal(host(run.chunks(), np.int64), np.cumsum([0, *in_chunks]))
    assert np.array_equal(host(run.chunks(), np.int64), host(replace(run, known_chunks=None).chunks(), np.int64))


def test_states_that_are_equal_have_no_changes(device: str) -> None:
    bits = [random_bits(np.random.default_rng(2), np.uint16, (100,))]
    pile = pile_of("BF16", [100], device)
    run = find_changes(pile, locate(pile, bits), locate(pile, bits), cast=False)
    assert run.count == 0
    assert not run.chunks().any()


def masters() -> np.ndarray:
    """FP32 bits: ties both ways, their neighbours, subnormals, both zeros, the largest numbers, infinities; any."""
    ties = np.array([0x3F808000, 0x3F818000, 0x00008000, 0x00018000, 0x80008000, 0x7F7F8000, 0xFF7F8000], np.uint32)
    ends = np.array([0, 0x80000000, 1, 0x80000001, 0x7FFFFF, 0x807FFFFF, 0x7F7FFFFF, 0x7F800000, 0xFF800000], np.uint32)
    found = np.r_[ties, ties - 1, ties + 1, ends, random_bits(np.random.default_rng(3), np.uint32, (60,))]
    nans = (found & 0x7FFFFFFF) > 0x7F800000
    numbers: np.ndarray = found[~nans].astype(np.uint32)
    return numbers


def test_masters_are_rounded_as_torch_casts_them(device: str) -> None:
    new = masters()
    rounded = torch.from_numpy(new.view(np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    old = mutate(np.random.default_rng(4), rounded, 0.7)
    pile = pile_of("BF16", [new.size], device)
    run = find_changes(pile, locate(pile, [old]), locate(pile, [new], itemsize=4), cast=True)
    assert_found(run, [old], [rounded])


def test_a_master_that_is_no_number_is_the_nan_of_torch_on_a_gpu(device: str) -> None:
    new = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32)
    old = np.zeros(4, np.uint16)
    pile = pile_of("BF16", [4], device)
    run = find_changes(pile, locate(pile, [old]), locate(pile, [new], itemsize=4), cast=True)
    assert host(run.new, np.uint16).tolist() == [0x7FFF] * 4
    if device == "cuda":
        assert torch.from_numpy(new.view(np.float32)).cuda().bfloat16().view(torch.int16).tolist() == [0x7FFF] * 4


# Writing and the digest

GRID = [
    TensorSpec("a", "BF16", (9, 11), row_cuts=(4,), column_cuts=(5,)),
    TensorSpec("b", "BF16", (5, 7), row_cuts=(2,)),  # a tile that begins between words
    TensorSpec("c", "BF16", (4200,)),
    TensorSpec("d", "F8_E4M3", (7, 9), column_cuts=(3,)),
    TensorSpec("e", "F32", (33,)),
    TensorSpec("f", "I64", (6, 5), column_cuts=(2,)),
]


def test_tiles_are_counted_written_and_moved_as_on_the_host(device: str) -> None:
    rng = np.random.default_rng(6)
    layout, where = layouts.make(GRID), torch.device(device)
    old = {spec.name: random_bits(rng, spec.kind.bits.type, (spec.size,)) for spec in layout.tensors}
    new = {name: mutate(rng, bits, 0.2 if bits.size < 1000 else 0.01) for name, bits in old.items()}
    for pile in piles_of(layout, device):
        names = {tile.tensor.name for tile in pile.tiles}
        flats, after = ({name: to_device(state[name].copy(), where) for name in names} for state in (old, new))
        counted = count_pile(pile, flats)
        assert counted == {t.ordinal: digest.count_tile(t, old[t.tensor.name]) for t in pile.tiles}
        run = find_changes(pile, pile.locate(flats), pile.locate(after), cast=False)
        moved = digest_changes(digest_changes_by_block([run]))
        assert {n: counted[n] + by for n, by in moved.items()} == count_pile(pile, after)
        tiles = to_device(np.array([flats[t.tensor.name].data_ptr() for t in pile.tiles]), where)
        run.write(WriteAddresses(tiles, torch.empty(0)))
        for name in names:
            assert torch.equal(flats[name], after[name])


CHUNK = 1 << 12  # units
GROUP = 1 << 16  # those of 16 chunks, which are multiplied at once
PROGRAM = 1 << 18


# Half a minute in all: the interpreter takes 0.1 s for a group of chunks.
@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16"])
@pytest.mark.parametrize(
    ("start", "sizes", "shift"),
    [
        (0, (1, 7, 8, 9, CHUNK - 1, CHUNK, CHUNK + 1), 0),
        (0, (GROUP - 1, GROUP, GROUP + 1, 2 * GROUP + CHUNK + 3), 0),
        (8, (1, CHUNK - 8, CHUNK - 7, GROUP), 0),
        (CHUNK - 8, (7, 8, 9, GROUP + 8, GROUP + 9), 0),
        (GROUP + 24, (3, GROUP), 8),  # bytes: words do not lie in pairs
        (5, (1, 3, 11, CHUNK), 0),  # between words
        (0, (PROGRAM + GROUP + 5,), 0),
    ],
)
def test_a_tile_of_any_size_at_any_place_of_a_tensor_is_counted(
    dtype: str, start: int, sizes: tuple[int, ...], shift: int, device: str
) -> None:
    rng = np.random.default_rng(start)
    specs = [TensorSpec(str(n), dtype, (start + n,), row_cuts=(start,) if start else ()) for n in sizes]
    layout, where = layouts.make(specs), torch.device(device)
    bits = {spec.name: random_bits(rng, spec.kind.bits.type, (spec.size,)) for spec in specs}
    apart = shift // specs[0].kind.itemsize
    flats = {
        name: to_device(np.concatenate([one[:apart], one]), where)[apart:] for name, one in bits.items()
    }  # fmt: skip
    (pile,) = piles_of(layout, device)
    assert count_pile(pile, flats) == {t.ordinal: digest.count_tile(t, bits[t.tensor.name]) for t in pile.tiles}


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32", "F64"])
def test_the_largest_sums_are_counted(dtype: str, device: str) -> None:
    """Every bit is set, so that each sum of products of bytes is as large as it can be."""
    spec = TensorSpec("w", dtype, (GROUP + CHUNK,))
    bits = np.full(spec.size, np.iinfo(spec.kind.bits).max, spec.kind.bits)
    (pile,) = piles_of(layouts.make([spec]), device)
    (tile,) = pile.tiles
    flats = {"w": to_device(bits, torch.device(device))}
    assert count_pile(pile, flats) == {tile.ordinal: digest.count_tile(tile, bits)}


def test_weights_of_one_byte_are_read_in_words(device: str) -> None:
    (pile,) = piles_of(layouts.make([TensorSpec("w", "F8_E4M3", (1000,))]), device)
    words, others = pile.tables.indices.runs
    assert (words.block.numel(), others.block.numel()) == (1, 0)


def test_blocks_of_several_dtypes_are_counted_together(device: str) -> None:
    rng = np.random.default_rng(8)
    tiles = [tile for tile in layouts.make(GRID).tiles if 0 < tile.size <= BLOCK]
    assert len({tile.tensor.kind.itemsize for tile in tiles}) > 1
    weights = [random_bits(rng, tile.tensor.kind.bits.type, (tile.size,)) for tile in tiles]
    blocks = [patch.WholeBlock(tile, 0, lambda _: None) for tile in tiles]
    sums = count_blocks(blocks, [to_device(bits, torch.device(device)) for bits in weights], torch.device(device))
    counted = sums.cpu().numpy().view(np.uint64).reshape(-1, 2).tolist()
    expected = [digest.count_block(tile, 0, bits) for tile, bits in zip(tiles, weights, strict=True)]
    assert [Sum(*both) for both in counted] == expected


def test_single_weights_are_fetched(device: str) -> None:
    rng = np.random.default_rng(9)
    bits = [random_bits(rng, np.uint32, (size,)) for size in (40, 50)]
    pile = pile_of("F32", [40, 50], device)
    where = np.array([3, 39, 0, 49], np.int32)
    found = fetch_weights(BlockPlaces.of(pile, np.array([2, 2]), where), locate(pile, bits))()
    assert found.tolist() == [bits[0][3], bits[0][39], bits[1][0], bits[1][49]]
