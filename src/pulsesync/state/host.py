"""Live weights in host memory: the backend of numpy and the CPU's kernels."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Sum, Tile
from pulsesync.errors import StateError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.format.predict import PREDICTING
from pulsesync.format.replay import Keep, replay
from pulsesync.format.weights import Changes, compose, inverse
from pulsesync.state.backend import BlockSums, StateBackend, VersionChanges
from pulsesync.state.slices import GatheredTile, LocalTile, Memory, TileStorage, WidenedTile
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.views import view_bits, zeros

BATCH = 1 << 24  # weights that are counted between two commits, by all threads
_mine = threading.local()


class HostBackend(StateBackend):
    """The tensors of one process in host memory."""

    overlays = True
    widens = True

    @classmethod
    def empty(cls, layout: Layout) -> "HostBackend":
        """Zeros in memory of their own. Raises: LimitError, if there is no memory for it."""
        return cls(layout, {spec.name: zeros(spec, (spec.size,), spec.kind.bits) for spec in layout.tensors})

    @staticmethod
    def views(source: Any) -> Mapping[str, Any]:
        views, ties = view_bits(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    @staticmethod
    def span(flat: Bits) -> tuple[int, int]:
        begin: int = flat.ctypes.data
        return begin, begin + flat.nbytes

    @staticmethod
    def equal(a: Bits, b: Bits) -> bool:
        return np.array_equal(a, b)

    # Reading

    @cached_property
    def memory(self) -> Memory:
        """All the memory that each tensor has here."""
        return {name: (flat, *self.copies.get(name, ())) for name, flat in self.flats.items()}

    def block(self, tile: Tile, number: int) -> Bits:
        return self.places[tile.ordinal].read(self.memory, *tile.block_range(number))

    def amended_block(self, tile: Tile, number: int, changes: Changes) -> Bits:
        bits = self.block(tile, number).copy()
        if change := changes.get((tile.ordinal, number)):
            bits[change.positions] = change.new
        return bits

    def batches(self) -> Iterable[Sequence[Tile]]:
        some: list[Tile] = []
        size = 0
        for tiles in super().batches():
            some += tiles
            size += sum(tile.size for tile in tiles)
            if size >= BATCH:
                yield some
                some, size = [], 0
        yield from [some] if some else ()

    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        sums = spread(lambda tile: _count_tile(tile, self.places[tile.ordinal], self.memory), tiles)
        return dict(zip((tile.ordinal for tile in tiles), sums, strict=True))

    # Patches

    def load_history(self, history: History) -> History:
        return history

    def decode(self, versions: Sequence[Sequence[Body]], after: Changes, history: History | None) -> VersionChanges:
        wanted: Mapping[int, Tile] | None = None
        keep: Keep | None = None
        if not self.whole:
            wanted, keep = self.tiles, lambda ordinal, change: self.places[ordinal].keep(change)
            for body in chain.from_iterable(versions):
                _check_codecs(body, self.layout, self.places)
        changes = after if isinstance(after, dict) else dict(after)
        found = replay(versions, self.layout, self, changes, history, wanted=wanted, keep=keep)
        return VersionChanges(changes, found.digest_changes, found.history, found.history_digests, found.fault)

    def no_changes(self) -> Changes:
        return {}

    def inverse(self, changes: Changes) -> Changes:
        return {key: inverse(change) for key, change in changes.items()}

    def compose(self, first: Changes, then: Changes) -> Changes:
        if not (first and then):
            return first or then
        both = {key: compose(first.get(key), then.get(key)) for key in first.keys() | then.keys()}
        return {key: change for key, change in both.items() if change}

    def count_digest_changes(self, changes: Changes) -> Mapping[int, Sum]:
        tiles, by = self.layout.tiles, dict[int, Sum]()
        counted = spread(lambda item: digest.moved_by(tiles[item[0][0]], item[1]), changes.items())
        for (ordinal, _), one in zip(changes, counted, strict=True):
            by[ordinal] = by[ordinal] + one if ordinal in by else one
        return by

    def count_changed(self, changes: Changes) -> int:
        return sum(change.positions.size for change in changes.values())

    def write(self, changes: Changes) -> None:
        for (ordinal, _), change in changes.items():
            self.write_change(ordinal, change)

    def write_change(self, ordinal: int, change: BlockChange) -> None:
        self.places[ordinal].write(self.memory, change)

    def write_block(self, tile: Tile, number: int, bits: Bits) -> None:
        self.places[tile.ordinal].write_range(self.memory, number * BLOCK, bits)

    # Anchors

    def write_blocks(self, blocks: Sequence[WholeBlock]) -> None:
        spread(self._write_decoded, blocks)

    def take_blocks(self, blocks: Sequence[WholeBlock]) -> list[BlockSums]:
        places = self.places
        return spread(lambda b: _sums_of(b, places[b.tile.ordinal], self._write_decoded(b)), blocks)

    def _write_decoded(self, block: WholeBlock) -> Bits:
        """Decode a block in place, if its memory has the run's order; else into memory of this thread."""
        tile, number, place = block.tile, block.number, self.places[block.tile.ordinal]
        others = self.memory[tile.tensor.name][1:] if tile.tensor.name in self.memory else ()
        in_place = isinstance(place, LocalTile) and place.whole and place.tile.contiguous and not others
        here = place.read(self.memory, *tile.block_range(number)) if in_place else _scratch(tile, block.size)
        bits = block.decode(here)
        if not in_place:
            self.write_block(tile, number, bits)
        return bits

    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> list[BlockSums]:
        return spread(lambda block: self._check_block(block, staged), blocks)

    def _check_block(self, block: WholeBlock, staged: StagedBlocks | None) -> BlockSums:
        room = staged.room_for(block) if staged is not None else None
        bits = block.decode(_scratch(block.tile, block.size) if room is None else room)
        place = self.places[block.tile.ordinal]
        found = _sums_of(block, place, bits)
        if staged is not None and not place.has(self.memory, block.number * BLOCK, bits):
            staged.add(block, bits, found.all)
        return found

    def adopt(self, tiles: Mapping[int, Bits]) -> None:
        """Use these arrays as the memory of tiles that are a whole tensor each."""
        for ordinal, bits in tiles.items():
            self.flats[self.layout.tiles[ordinal].tensor.name] = bits
        self.__dict__.pop("memory", None)  # it has changed


def _count_tile(tile: Tile, place: TileStorage, memory: Memory) -> Sum:
    if not tile.pieces and place.tile == tile and isinstance(place, LocalTile):
        return digest.count_tile(tile, memory[tile.tensor.name][0])
    numbers = range(tile.block_count)
    sums = spread(lambda n: digest.count_block(tile, n, place.read(memory, *tile.block_range(n))), numbers)
    total = digest.sum_up(sums)
    if isinstance(place, WidenedTile | GatheredTile) and not all(spread(lambda n: place.exact(memory, n), numbers)):
        return total + Sum(1, 1)  # the run's dtype has no such numbers: this differs from every published state
    return total


def _check_codecs(body: Body, layout: Layout, places: Mapping[int, TileStorage]) -> None:
    """A partly local tile can be read only with a codec that needs no old weights except those that it changes."""
    for entry in body.index.entries:
        place = places.get(entry.tile)
        if place and place.splits_coding_group and entry.codec in PREDICTING:
            name = layout.tiles[entry.tile].names[0]
            raise StateError(
                f"the local slice of {name!r} splits a tile of the run: publish with a grid that has "
                "borders there, or with codec='step' or 'gap'",
                tensor=name,
            )


def _sums_of(block: WholeBlock, place: TileStorage, bits: Bits) -> BlockSums:
    total = digest.count_block(block.tile, block.number, bits)
    if place.whole:
        return BlockSums(total, total)
    kept = place.keep(BlockChange.from_zeros(block.number, bits))
    return BlockSums(total, digest.moved_by(block.tile, kept) if kept else Sum(0, 0))


def _scratch(tile: Tile, size: int) -> Bits:
    """Memory of this thread for the weights of a block: new memory costs a fault for every page."""
    if not hasattr(_mine, "scratch"):
        _mine.scratch = np.empty(BLOCK, np.uint64)
    scratch: Bits = _mine.scratch
    return scratch.view(tile.tensor.kind.bits)[:size]
