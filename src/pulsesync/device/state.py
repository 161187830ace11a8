"""Live weights on a GPU: the backend of torch and Triton. Only records and streams cross to the host and back.

Patches are committed one by one: the kernels that decode the second one read weights from memory, so what the first
one changes must be there, and a copy with its changes in it would be a second copy of the weights (gpu.md).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, Sum, Tile
from pulsesync.device import decode, memory
from pulsesync.device.changes import Changes, PileChanges, as_sums, compose, device_keys, moves, on_whole
from pulsesync.device.hot import DeviceHistory, HotWeights, advance, mark_hot
from pulsesync.device.memory import DeviceStream, DeviceView, StreamPoint, to_host, to_stream
from pulsesync.device.pile import Pile, make_piles
from pulsesync.errors import StateError
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.kernels import cuda
from pulsesync.state.live import BlockSums, LiveState, Transition, VersionChanges, find_places
from pulsesync.state.slices import LocalTile, Slices
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.views import named

TOGETHER = 32  # blocks of an anchor that are decoded, brought up and counted at a time


class DeviceTransition(Transition[Changes, DeviceHistory]):
    """The step from a state on a device to another."""

    @property
    def changed(self) -> int:
        return sum(run.count for run in self.changes)


class DeviceState(LiveState[torch.Tensor, Changes, DeviceHistory]):
    """The tensors of one process on a GPU, in the layout of a run.

    device: where the work is done; tensors may also lie in pinned host memory, which it reads and writes.
    """

    overlays = False  # kernels read weights from memory alone
    widens = False  # kernels address weights in the dtype of the run

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, torch.Tensor],
        copies: Mapping[str, Sequence[torch.Tensor]] | None = None,
        slices: Slices | None = None,
        places: Mapping[int, LocalTile] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or next(iter(flats.values())).device
        places = find_places(layout, slices or {}) if places is None else places
        if cut := next((place for place in places.values() if not place.whole), None):
            name = cut.tile.tensor.name
            raise StateError(
                f"the slice of {name!r} that is held cuts through a tile of the run, which a GPU cannot take: publish "
                "with a grid that has borders there",
                tensor=name,
            )
        self._tiles = {ordinal: place.tile for ordinal, place in places.items()}  # in the tensors here
        self.piles = make_piles(layout.tiles, self._tiles, self.device)
        self.stream: DeviceStream | None = None  # of a publisher's base, which nothing else uses
        self.readers: list[StreamPoint] = []  # launched comparisons with it: nothing is written before they are over
        super().__init__(layout, flats, copies, slices, places)

    @staticmethod
    def views(source: Any) -> Mapping[str, DeviceView]:
        views, ties = memory.view(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    @classmethod
    def addresses(cls, source: Any) -> Mapping[str, int]:
        tensors = ((name, found) for name, found in named(source) if isinstance(found, torch.Tensor))
        return {name: found.data_ptr() for name, found in tensors}  # 0 for those without weights

    @staticmethod
    def span(flat: torch.Tensor) -> tuple[int, int]:
        return flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size()

    @staticmethod
    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        return torch.equal(a, b)

    def bring(self, history: History | DeviceHistory) -> DeviceHistory:
        return history if isinstance(history, DeviceHistory) else DeviceHistory.of(history, self.device)

    def stay(self) -> DeviceTransition:
        return DeviceTransition((), self.sums, self.history)

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        """Bring one block to the host."""
        size = min(BLOCK, tile.size - number * BLOCK)
        flat = self.flats[tile.tensor.name]
        with self.aside():
            bits = flat[self._where(flat, tile, number, size)]
            copied = bits.clone() if bits.device.type == "cpu" else bits
            return to_host(copied)[0].view(tile.tensor.kind.bits)

    def _where(self, flat: torch.Tensor, tile: Tile, number: int, size: int) -> "slice | torch.Tensor":
        """Where the weights of a block lie in a tensor."""
        place, begin = self._tiles[tile.ordinal], number * BLOCK
        if place.contiguous:
            return slice(place.start + begin, place.start + begin + size)
        return torch.from_numpy(place.flat_indices(np.arange(begin, begin + size))).to(flat.device)

    def amended_block(self, tile: Tile, number: int, changes: Changes) -> Bits:
        bits = self.block(tile, number)
        pile = self.piles[tile.tensor.dtype]
        with self.aside():
            for run in changes:
                if run.pile is pile:
                    b = int(pile.first_block[pile.index[tile.ordinal]]) + number
                    begin, end = run.starts[b : b + 2].tolist()
                    if begin < end:
                        bits = bits.copy()
                        where, new = to_host(run.positions[begin:end], run.new[begin:end])
                        bits[where] = new.view(bits.dtype)
        return bits

    def aside(self) -> AbstractContextManager[None]:
        """Do what is launched inside where a trainer does not wait for it, nor it for the trainer."""
        return self.stream() if self.stream is not None else nullcontext()

    def batches(self) -> Iterable[Sequence[Tile]]:
        return (pile.tiles for pile in self.piles.values())

    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        pile = self.piles[tiles[0].tensor.dtype].part([tile.ordinal for tile in tiles])
        with memory.on(self.device):
            return count_pile(pile, self.flats)

    # Decoding

    def decode(
        self, versions: Sequence[Sequence[Body]], after: Changes, history: DeviceHistory | None
    ) -> VersionChanges[Changes, DeviceHistory]:
        assert not after, "a state on a device takes patches one by one"
        (bodies,) = versions
        runs: list[PileChanges] = []
        cuts: dict[int, int] = {}
        touched = [entry.tile for body in bodies for entry in body.index.entries if entry.tile in self.places]
        with memory.on(self.device):
            for body in bodies:
                some, of_tiles = self._decode(body, history)
                runs += some
                cuts.update(of_tiles)
            by = moves(runs)
            later = self.remember(history, cuts, runs, set(touched)) if history is not None else None
            counted = later.digest() if later is not None and later.tiles and self.whole else None
        moved = {ordinal: by.get(ordinal, Sum(0, 0)) for ordinal in touched}
        return VersionChanges(runs, [moved], later, [counted])

    def _decode(self, body: Body, memories: DeviceHistory | None) -> tuple[list[PileChanges], Mapping[int, int]]:
        wanted = None if self.whole else self.places.keys()
        opened = decode.open_part(body.index, body.sections, self.layout, memories, wanted)
        runs = []
        for number, coded in opened.coded.items():
            table = opened.tables[number]
            whole = self.piles[table.dtype]
            pile = whole.part([tile.ordinal for tile, _ in coded])
            known = memories if memories is not None and table.frequencies.shape[1] > 1 else DeviceHistory()
            some = decode.decode_coded(pile, [begun for _, begun in coded], table, pile.locate(self.flats), known)
            runs += [on_whole(run, whole) for run in some]
        for dtype, plain in opened.plain.items():
            runs += decode.decode_plain(self.piles[dtype], plain, self.flats)
        return runs, opened.cuts

    def remember(
        self,
        memories: DeviceHistory,
        cuts: Mapping[int, int],
        runs: Changes,
        touched: set[int],
        hot: Mapping[Pile, HotWeights] | None = None,
    ) -> DeviceHistory:
        """The history after changes of the tiles that were touched; cuts: of those coded with a history.

        hot: what was found on the way; it serves where the cuts are these.
        """
        marked = []
        for pile in self.piles.values():
            new = np.array([cuts.get(ordinal, 0) for ordinal in pile.index], np.int64)
            then = np.where([n in touched for n in pile.index], np.maximum(memories.cuts(pile), new), 0)
            if then.any():
                one = (hot or {}).get(pile)
                if one is None or (one.cuts != then).any():
                    one = mark_hot(pile, pile.locate(self.flats), then, memories)
                marked.append(one)
        return advance(memories, memories.index + 1, marked, runs)

    # Changes

    def inverse(self, changes: Changes) -> Changes:
        return [run.inverse() for run in changes]

    def compose(self, first: Changes, then: Changes) -> Changes:
        if not first:
            return then
        with self.aside():
            return compose(first, then)

    # Writing

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Wait until nothing else runs on the device; for a publisher's base, until no comparison reads it."""
        if self.stream is not None:
            with self.stream(self.readers):
                yield
            self.readers.clear()
            return
        with memory.on(self.device):
            memory.wait(self.device)
            try:
                yield
            finally:
                memory.wait(self.device)

    def write(self, changes: Changes) -> None:
        for run in changes:
            most = max(1 + len(self.copies.get(tile.tensor.name, ())) for tile in run.pile.tiles)
            for n in range(most):
                run.write(self._addresses_of(run.pile, n))

    def _addresses_of(self, pile: Pile, n: int) -> torch.Tensor:
        """Of each tile the address of the n-th memory that its tensor has, or of the last."""
        memories = [self._memory(tile) for tile in pile.tiles]
        return to_stream(np.array([all_[min(n, len(all_) - 1)].data_ptr() for all_ in memories], np.int64), self.device)

    # Tiles that come as a whole

    def write_blocks(self, blocks: Sequence[WholeBlock]) -> list[BlockSums]:
        out: list[BlockSums] = []
        with memory.on(self.device):
            for begin in range(0, len(blocks), TOGETHER):
                some = blocks[begin : begin + TOGETHER]
                _, here = self._bring_up(some)
                for block, bits in zip(some, here, strict=True):
                    for flat, where in self._runs_of(block):
                        flat[where] = bits.to(flat.device)
                out += self._sums_of(some, here)
        return out

    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> list[BlockSums]:
        out: list[BlockSums] = []
        with memory.on(self.device):
            for begin in range(0, len(blocks), TOGETHER):
                some = blocks[begin : begin + TOGETHER]
                decoded, here = self._bring_up(some)
                found = self._sums_of(some, here)
                for block, weights, bits, sums in zip(some, decoded, here, found, strict=True):
                    if staged is not None and not self._has(block, bits):
                        staged.add(block, weights, sums.all)
                out += found
        return out

    def _bring_up(self, blocks: Sequence[WholeBlock]) -> tuple[list[Bits], list[torch.Tensor]]:
        """Decode blocks on the host, and bring each up once."""
        decoded = spread(WholeBlock.decode, blocks)
        return decoded, [to_stream(bits, self.device) for bits in decoded]

    def _has(self, block: WholeBlock, bits: torch.Tensor) -> bool:
        """Whether to write a block would change nothing."""
        return all(torch.equal(flat[where], bits.to(flat.device)) for flat, where in self._runs_of(block))

    def _runs_of(self, block: WholeBlock) -> Iterator[tuple[torch.Tensor, Any]]:
        """Where a block lies, in all the memory that its tensor has."""
        for flat in self._memory(block.tile):
            yield flat, self._where(flat, block.tile, block.number, block.size)

    def _sums_of(self, blocks: Sequence[WholeBlock], here: Sequence[torch.Tensor]) -> list[BlockSums]:
        sums = to_host(count_blocks(blocks, here, self.device))[0].view(np.uint64).reshape(-1, 2)
        return [BlockSums(Sum(*both), Sum(*both)) for both in sums.tolist()]  # no tile is local in part


def count_pile(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[int, Sum]:
    """Count the digests of a pile's tiles from all their weights."""
    counted: dict[int, Sum] = {}
    for part, count in zip(pile.regular_and_odd, (_recount, _recount_any), strict=True):
        if part is not None:
            sums = torch.zeros(2 * len(part.tiles), dtype=torch.int64, device=pile.device)
            weights = part.locate(flats)
            count(part, weights.at, sums)
            counted.update(as_sums(part, to_host(sums)[0]))
    return counted


def _recount(pile: Pile, at: torch.Tensor, sums: torch.Tensor) -> None:
    some = 64  # chunks that a program sums up
    units, starts, chunks = pile.units
    cuda.recount[(pile.blocks, -(-chunks // some))](
        at, units, starts, pile.block_tile, device_keys(pile.device), sums, PER=some, num_warps=8, maxnreg=80
    )


def _recount_any(pile: Pile, at: torch.Tensor, sums: torch.Tensor) -> None:
    cuda.recount_any[(pile.blocks, 16)](
        at, pile.sizes, pile.block_tile, pile.begins, *pile.run_geometry, device_keys(pile.device), sums,
        ITEM=pile.kind.itemsize, SPAN=1024,
    )  # fmt: skip


def count_blocks(blocks: Sequence[WholeBlock], weights: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Count the digests of blocks of tiles, given their weights on the device: two sums of each."""
    sums = torch.zeros(2 * len(blocks), dtype=torch.int64, device=device)
    facts = [
        (bits.data_ptr(), block.size, n, block.number * BLOCK)
        for n, (block, bits) in enumerate(zip(blocks, weights, strict=True))
    ]
    geometry = to_stream(np.array([_geometry(block.tile) for block in blocks], np.int64).T, device)
    widths = np.array([block.tile.tensor.kind.itemsize for block in blocks])
    for wide in np.unique(widths).tolist():
        some = np.array(facts, np.int64)[widths == wide]
        at, *rest = to_stream(some.T, device)
        cuda.recount_any[(len(some), 64)](at, *rest, *geometry, device_keys(device), sums, ITEM=wide, SPAN=1024)
    return sums


def _geometry(tile: Tile) -> tuple[int, int, int]:
    """Where a tile begins in its tensor, how long its rows are there, and how far apart."""
    return (tile.start, tile.size, 0) if tile.contiguous else (tile.start, tile.columns, tile.tensor.columns)
