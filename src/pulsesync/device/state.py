"""Live weights on a GPU: the backend of torch and Triton. Only records and streams are copied to the host and back.

Patches are committed one by one: the kernels that decode the second one read weights from memory, so the changes of the
first one must be written there, and a copy with these changes would be a second copy of the weights (gpu.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, Sum, Tile
from pulsesync.device import memory
from pulsesync.device.blocks import PlacedBlocks, TiedTensors, count_pile
from pulsesync.device.changes import Changes, compose, digest_changes, digest_changes_by_block
from pulsesync.device.decode import decode_patch
from pulsesync.device.memory import DeviceStream, DeviceView, Point, Tensors, to_host, to_stream
from pulsesync.device.pile import Pile, PileAddresses, make_piles, place_of
from pulsesync.device.tracked import DeviceHistory
from pulsesync.errors import StateError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.state.backend import BlockSums, StateBackend, VersionChanges
from pulsesync.state.slices import TileStorage, find_places
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.views import named
from pulsesync.state.weights import WeightState

TOGETHER = 32  # blocks of an anchor that are decoded, copied to the device and counted at a time


class DeviceBackend(StateBackend):
    """The tensors of one process on a GPU.

    Each tensor on a GPU is processed there, so that a module may be spread over several GPUs. A tensor in pinned host
    memory is read and written by a GPU: that of `workers`, by name, else `device`.
    """

    # Piles of a dtype on a device are decoded one after the other: temporary memory grows with a pile, and an engine
    # may have left little. More piles take longer.
    pieces: ClassVar[int] = 4
    overlays = False  # kernels read weights from memory only
    widens = False  # kernels address weights in the dtype of the run

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, Tensor],
        copies: Mapping[str, Sequence[Tensor]] | None = None,
        places: Mapping[int, TileStorage] | None = None,
        device: torch.device | None = None,
        workers: Mapping[str, torch.device] | None = None,
    ) -> None:
        self.device = device or memory.main_device(flats.values())
        works_on = {name: memory.worker_of(flat, self.device) for name, flat in flats.items()} | dict(workers or {})
        places = find_places(layout, {}) if places is None else places
        if cut := next((place for place in places.values() if place.splits_coding_group), None):
            name = cut.tile.names[0]
            raise StateError(
                f"the local slice of {name!r} splits a tile of the run, which is not supported on a GPU: publish "
                "with a grid that has borders there",
                tensor=name,
            )
        here = {ordinal: place_of(place) for ordinal, place in places.items()}  # in the local tensors
        tiles = list(layout.tiles)
        for ordinal, tile in here.items():
            if tile.kept is not None:
                tiles[ordinal] = replace(tiles[ordinal], kept=tile.kept)
        tied = {f"{name}, tied": other for name, others in (copies or {}).items() for other in others}
        memory.check_reach({**flats, **tied}, self.device)
        self.piles = make_piles(tiles, here, works_on, self.pieces)
        holding = [memory.worker_of(other, self.device) for other in tied.values()]
        self.devices = list(dict.fromkeys((self.device, *(pile.device for pile in self.piles), *holding)))
        self.tensors = Tensors(flats, object())  # they do not move: see `WeightState.is_attached_to`
        self.stream: DeviceStream | None = None  # used only for a publisher's base
        self.readers: list[Point] = []  # ends of comparisons with it: nothing is written before them
        super().__init__(layout, flats, copies, places)
        self.tied = TiedTensors(self.flats, self.copies)
        self._blocks = PlacedBlocks(here, self.piles, self.tied, self.device)

    @staticmethod
    def views(source: Any) -> Mapping[str, DeviceView]:
        views, ties = memory.view(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    @classmethod
    def addresses(cls, source: Any) -> Mapping[str, int]:
        tensors = ((name, found) for name, found in named(source) if isinstance(found, Tensor))
        return {name: found.data_ptr() for name, found in tensors}  # 0 for those without weights

    @staticmethod
    def span(flat: Tensor) -> tuple[int, int]:
        return flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()

    @staticmethod
    def equal(a: Tensor, b: Tensor) -> bool:
        return torch.equal(a, b.to(a.device))

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        """Copy one block to the host."""
        with self._in_own_stream():
            bits = self._blocks.read(self.tensors, tile, number)
            copied = bits.clone() if bits.device.type == "cpu" else bits
            return to_host(copied)[0].view(tile.tensor.kind.bits)

    def amended_block(self, tile: Tile, number: int, changes: Changes) -> Bits:
        bits = self.block(tile, number)
        pile = self.piles.of(tile.ordinal)
        i = pile.index[tile.ordinal]
        first, last = pile.first_block[i : i + 2].tolist()
        if not tile.groups:
            first, last = first + number, first + number + 1
        with self._in_own_stream():
            for run in changes:
                if run.pile is pile:
                    (starts,) = to_host(run.starts[first : last + 1])
                    begin, end = starts[0], starts[-1]
                    if begin < end:
                        bits = bits.copy()
                        where, new = to_host(run.positions[begin:end], run.new[begin:end])
                        at = pile.host_begins[first:last] - number * BLOCK
                        bits[where + np.repeat(at, np.diff(starts))] = new.view(bits.dtype)
        return bits

    def _in_own_stream(self) -> AbstractContextManager[None]:
        """Launch the work inside in a stream that neither delays the trainer nor waits for it."""
        return self.stream() if self.stream is not None else nullcontext()

    def batches(self) -> Iterable[Sequence[Tile]]:
        return (pile.tiles for pile in self.piles)

    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        pile = self.piles.of(tiles[0].ordinal).part([tile.ordinal for tile in tiles])
        with memory.on(pile.device):
            return count_pile(pile, self.tensors)

    # Patches

    def load_history(self, history: History | DeviceHistory) -> DeviceHistory:
        return (
            history.in_piles(self.piles)
            if isinstance(history, DeviceHistory)
            else DeviceHistory.of(history, self.piles)
        )

    def decode(
        self, versions: Sequence[Sequence[Body]], after: Changes, history: DeviceHistory | None
    ) -> VersionChanges:
        assert not after, "a state on a device takes patches one by one"
        (bodies,) = versions
        with memory.on(self.device):
            locate = cache(self.locate)  # nothing is written meanwhile
            found = decode_patch(bodies, self.piles, self._wanted, history, locate)
            later = found.history
            counted = later.digest() if later is not None and later.tiles and self.whole else None
        touched = [entry.tile for body in bodies for entry in body.index.entries if entry.tile in self.places]
        by_tile = {ordinal: found.digest_changes.get(ordinal, Sum(0, 0)) for ordinal in touched}
        return VersionChanges(found.runs, [by_tile], later, [counted])

    @cached_property
    def _wanted(self) -> Mapping[int, Tile]:
        """The tiles of a part to decode, by ordinal: for complete weights all, so that every entry is checked."""
        return dict(enumerate(self.layout.tiles)) if self.whole else self.tiles

    def locate(self, pile: Pile) -> PileAddresses:
        """Where the weights of a pile are."""
        with memory.on(pile.device):
            return pile.locate(self.tensors)

    def no_changes(self) -> Changes:
        return ()

    def inverse(self, changes: Changes) -> Changes:
        return [run.inverse() for run in changes]

    def compose(self, first: Changes, then: Changes) -> Changes:
        if not (first and then):
            return first or then
        with self._in_own_stream():
            return compose(first, then)

    def count_digest_changes(self, changes: Changes) -> Mapping[int, Sum]:
        return digest_changes(digest_changes_by_block(changes))

    def count_changed(self, changes: Changes) -> int:
        return sum(run.count for run in changes)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until nothing else runs on the device; for a publisher's base, until no comparison reads it."""
        if self.stream is not None:
            with self.stream(self.readers):
                yield
            self.readers.clear()
            return
        memory.wait(self.devices)
        try:
            yield
        finally:
            memory.wait(self.devices)

    def write(self, changes: Changes) -> None:
        for run in changes:
            with memory.on(run.pile.device):
                for at in self.tied.addresses(run.pile):
                    run.write(at)

    # Anchors

    def write_blocks(self, blocks: Sequence[WholeBlock]) -> None:
        for _ in self._write_decoded(blocks):
            pass

    def take_blocks(self, blocks: Sequence[WholeBlock]) -> list[BlockSums]:
        return [found for some, here in self._write_decoded(blocks) for found in self._blocks.count(some, here)]

    def _write_decoded(self, blocks: Sequence[WholeBlock]) -> Iterator[tuple[Sequence[WholeBlock], Sequence[Tensor]]]:
        """Decode and write some blocks at a time; yield them, with their weights on the device."""
        with memory.on(self.device):
            for some, _, here in _decoded(blocks, self.device):
                for block, bits in zip(some, here, strict=True):
                    self._blocks.write(block.tile, block.number, bits)
                yield some, here

    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> list[BlockSums]:
        out: list[BlockSums] = []
        with memory.on(self.device):
            for some, decoded, here in _decoded(blocks, self.device):
                found = self._blocks.count(some, here)
                for block, weights, bits, sums in zip(some, decoded, here, found, strict=True):
                    if staged is not None and not self._blocks.has(block, bits):
                        staged.add(block, weights, sums.all)
                out += found
        return out


def _decoded(
    blocks: Sequence[WholeBlock], device: torch.device
) -> Iterator[tuple[Sequence[WholeBlock], list[Bits], list[Tensor]]]:
    """Some blocks at a time, with their weights: decoded on the host, and copied to the device once."""
    for begin in range(0, len(blocks), TOGETHER):
        some = blocks[begin : begin + TOGETHER]
        decoded = spread(WholeBlock.decode, some)
        yield some, decoded, [to_stream(bits, device) for bits in decoded]


def backend_of(state: WeightState) -> DeviceBackend:
    """The memory of a state that is on a GPU."""
    assert isinstance(state.backend, DeviceBackend)
    return state.backend
