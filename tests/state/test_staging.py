"""Decoded blocks of an anchor: in memory, on disk, or some here and some there."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pulsesync.core import digest, headroom
from pulsesync.core.threads import spread
from pulsesync.core.types import Bits, TensorSpec
from pulsesync.errors import VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format.patch import WholeBlock
from pulsesync.state import staging
from pulsesync.state.staging import StagedBlocks

LAYOUT = layouts.make([TensorSpec(f"layers.{n}.w", "BF16", (300, 100 + n)) for n in range(6)])
WEIGHTS = {
    tile.ordinal: np.random.default_rng(tile.ordinal).integers(0, 1 << 16, tile.size, np.uint16)
    for tile in LAYOUT.tiles
}


def blocks() -> list[WholeBlock]:
    def decode(ordinal: int, out: Bits) -> None:
        out[:] = WEIGHTS[ordinal]

    return [WholeBlock(tile, 0, partial(decode, tile.ordinal)) for tile in LAYOUT.tiles]


def stage(staged: StagedBlocks, block: WholeBlock) -> None:
    bits = block.decode(staged.room_for(block))
    staged.add(block, bits, digest.count_block(block.tile, 0, bits))


def assert_all_there(staged: StagedBlocks) -> None:
    assert sorted(block.tile.ordinal for block in staged.blocks) == sorted(WEIGHTS)
    for block in staged.blocks:
        assert np.array_equal(block.decode(), WEIGHTS[block.tile.ordinal])


def files_of(staged: StagedBlocks) -> int:
    return staged._end


def test_with_memory_to_spare_nothing_is_written_to_disk() -> None:
    with StagedBlocks(Path("/nowhere/at/all")) as staged:
        spread(lambda block: stage(staged, block), blocks(), threads=3)
        assert_all_there(staged)


def test_without_memory_to_spare_all_is_on_disk(tmp_path: Path, no_spare_memory: None) -> None:
    with StagedBlocks(tmp_path) as staged:
        assert staged.room_for(blocks()[0]) is None
        spread(lambda block: stage(staged, block), blocks(), threads=3)
        assert_all_there(staged)
        assert files_of(staged) == 2 * sum(bits.size for bits in WEIGHTS.values())
        assert list(tmp_path.iterdir()) == []  # the file has no name


def test_what_comes_after_the_memory_that_can_be_spared_goes_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def two_times(size: int) -> bool:
        asked.append(size)
        return len(asked) <= 2

    monkeypatch.setattr(headroom, "can_take", two_times)
    monkeypatch.setattr(staging, "GRANT", 1)
    monkeypatch.setattr(staging, "SLAB", 1)
    with StagedBlocks(tmp_path) as staged:
        for block in blocks():
            stage(staged, block)
        assert_all_there(staged)
        sizes = [2 * bits.size for bits in WEIGHTS.values()]
        assert files_of(staged) == sum(sizes[2:])
    assert asked == sizes[:3]  # and not again for each block


def test_memory_of_a_block_that_is_not_added_is_used_for_the_next() -> None:
    first, second, *_ = blocks()
    with StagedBlocks() as staged:
        room = first.decode(staged.room_for(first))
        stage(staged, second)
        assert np.array_equal(room[:100], WEIGHTS[second.tile.ordinal][:100])


def test_weights_that_a_disk_has_changed_are_not_returned(tmp_path: Path, no_spare_memory: None) -> None:
    with StagedBlocks(tmp_path) as staged:
        stage(staged, blocks()[0])
        assert staged._file is not None
        staged._file.write(b"?")
        with pytest.raises(VerificationError, match="changed"):
            staged.blocks[0].decode()


def test_weights_from_elsewhere_are_copied() -> None:
    block = blocks()[0]
    bits = block.decode()
    with StagedBlocks() as staged:
        staged.add(block, bits, digest.count_block(block.tile, 0, bits))
        bits[:] = 0
        assert np.array_equal(staged.blocks[0].decode(), WEIGHTS[block.tile.ordinal])


def test_threads_do_not_share_memory_before_they_add_it() -> None:
    block = blocks()[0]
    with StagedBlocks() as staged, ThreadPoolExecutor(1) as executor:
        here, there = staged.room_for(block), executor.submit(staged.room_for, block).result()
        assert here is not None
        assert there is not None
        assert not np.shares_memory(here, there)
