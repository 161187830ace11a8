"""Blocks of tiles in the tensors of a process on a GPU: read, counted and written one by one, as anchors have them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, Sum, Tile
from pulsesync.device.changes import WriteAddresses, as_sums, device_key_planes, device_keys
from pulsesync.device.indices import BlockIndices
from pulsesync.device.memory import Tensors, fetch, on, to_device, to_host, to_stream
from pulsesync.device.pieces import piece_begins
from pulsesync.device.pile import Pile, PileAddresses, Piles, rectangle
from pulsesync.format.patch import WholeBlock
from pulsesync.kernels import cuda
from pulsesync.state.backend import BlockSums


class TiedTensors:
    """Tensors by name, and those tied to them that have memory of their own: each has one memory or more."""

    def __init__(self, flats: Mapping[str, torch.Tensor], copies: Mapping[str, Sequence[torch.Tensor]]) -> None:
        self._flats, self._copies = flats, copies
        self._addresses: dict[tuple[Pile, int], WriteAddresses] = {}

    def count(self, names: Iterable[str]) -> int:
        """The most memories that one of these tensors has."""
        return 1 + max(len(self._copies.get(name, ())) for name in names) if self._copies else 1

    def count_of(self, pile: Pile) -> int:
        """The most memories that a tensor of a pile has."""
        return self.count(name for place in pile.places for name in place.names)

    def memory(self, name: str, n: int) -> torch.Tensor:
        """The n-th memory of a tensor, or its last."""
        others = self._copies.get(name, ())
        return others[min(n, len(others)) - 1] if n and others else self._flats[name]

    def addresses(self, pile: Pile) -> list[WriteAddresses]:
        """The addresses of the tensors of a pile, one after the other for each of their memories."""
        return [self._addresses_of(pile, n) for n in range(self.count_of(pile))]

    def _addresses_of(self, pile: Pile, n: int) -> WriteAddresses:
        if (known := self._addresses.get((pile, n))) is None:
            first = pile.placement.first_gathered
            flats = [self.memory(place.tensor.name, n) for place in pile.places[:first]]
            at = np.array([flat.data_ptr() for flat in flats], np.int64)
            pieces = np.zeros(0, np.int64)
            if pile.placement.pieces is not None:
                some = [self.memory(name, n) for name in pile.placement.pieces.names]
                pieces = pile.placement.pieces.addresses(some, pile.kind.itemsize)
            known = WriteAddresses(to_device(at, pile.device), to_device(pieces, pile.device))
            self._addresses[pile, n] = known
        return known


@dataclass(frozen=True, eq=False)
class PlacedBlocks:
    """Blocks of the local tiles."""

    places: Mapping[int, Tile]  # in the coordinates of the local tensors, by ordinal
    piles: Piles  # of these tiles
    tied: TiedTensors
    device: torch.device  # on which blocks are counted

    def read(self, tensors: Tensors, tile: Tile, number: int) -> torch.Tensor:
        """A block, as a view or a copy; groups of a bundle that are not local are zeros."""
        place = self.places[tile.ordinal]
        if place.pieces:
            pile = self.piles.of(tile.ordinal).part([tile.ordinal])
            assert pile.placement.pieces is not None
            with on(pile.device):
                return pile.placement.pieces.gather(tensors, tile.tensor.kind.itemsize)[: tile.size]
        flat = tensors[place.tensor.name]
        return flat[self._where(flat, tile, number, min(BLOCK, tile.size - number * BLOCK))]

    def _where(self, flat: torch.Tensor, tile: Tile, number: int, size: int) -> "slice | torch.Tensor":
        """Where the weights of a block lie in a tensor."""
        place, begin = self.places[tile.ordinal], number * BLOCK
        if place.contiguous:
            return slice(place.start + begin, place.start + begin + size)
        return torch.from_numpy(place.flat_indices(np.arange(begin, begin + size))).to(flat.device)

    def write(self, tile: Tile, number: int, bits: torch.Tensor) -> None:
        """Write a block of a tile into all the memory that its tensors have."""
        place = self.places[tile.ordinal]
        for n in range(self.tied.count(place.names)):
            if not place.pieces:
                flat = self.tied.memory(place.tensor.name, n)
                flat[self._where(flat, tile, number, bits.numel())] = bits.to(flat.device)
                continue
            places = [rectangle(self.tied.memory(piece.tensor.name, n), piece) for piece in place.pieces]
            begins = piece_begins(replace(tile, kept=place.kept)).tolist()
            runs = [bits[at : at + to.numel()].view(to.shape) for at, to in zip(begins, places, strict=True)]
            torch._foreach_copy_(places, runs)

    def has(self, block: WholeBlock, bits: torch.Tensor) -> bool:
        """Whether writing a block would change nothing; False for a bundle, which is not compared."""
        place = self.places[block.tile.ordinal]
        if place.pieces:
            return False
        flats = [self.tied.memory(place.tensor.name, n) for n in range(self.tied.count(place.names))]
        runs = [flat[self._where(flat, block.tile, block.number, block.size)] for flat in flats]
        return all(torch.equal(run, bits.to(run.device)) for run in runs)

    def count(self, blocks: Sequence[WholeBlock], here: Sequence[torch.Tensor]) -> list[BlockSums]:
        """The digests of blocks, given their weights on the device."""
        in_part = [n for n, block in enumerate(blocks) if self.places[block.tile.ordinal].kept is not None]
        local = [self._kept_of(blocks[n].tile, here[n]) for n in in_part]
        counted = count_blocks([*blocks, *(blocks[n] for n in in_part)], [*here, *local], self.device)
        sums = [Sum(*both) for both in to_host(counted)[0].view(np.uint64).reshape(-1, 2).tolist()]
        of_local = dict(zip(in_part, sums[len(blocks) :], strict=True))
        return [BlockSums(sums[n], of_local.get(n, sums[n])) for n in range(len(blocks))]

    def _kept_of(self, tile: Tile, bits: torch.Tensor) -> torch.Tensor:
        """The weights of a bundle, with zeros for groups that are not local."""
        out = torch.zeros_like(bits)
        for n in self.places[tile.ordinal].kept or ():
            out[tile.groups[n] : tile.groups[n + 1]] = bits[tile.groups[n] : tile.groups[n + 1]]
        return out


def count_pile(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[int, Sum]:
    """Count the digests of a pile's tiles from all their weights."""
    return dict(as_sums(pile, begin_count(pile, pile.locate(flats))()[0]))


def begin_count(pile: Pile, weights: PileAddresses) -> Callable[[], list[NDArray[Any]]]:
    """Begin to count them. Returns a function that waits for the two sums of each tile."""
    sums = torch.zeros(2 * len(pile.tiles), dtype=torch.int64, device=pile.device)
    _count(pile.tables.indices, weights.at, sums)
    return fetch(sums)


def count_blocks(blocks: Sequence[WholeBlock], weights: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Count the digests of blocks of tiles, given their weights on the device: two sums for each."""
    sums = torch.zeros((len(blocks), 2), dtype=torch.int64, device=device)
    widths = np.array([block.tile.tensor.kind.itemsize for block in blocks])
    for wide in np.unique(widths).tolist():
        chosen = np.flatnonzero(widths == wide)
        some = [blocks[n] for n in chosen.tolist()]
        begins = np.array([block.number * BLOCK for block in some], np.int64)
        sizes = np.array([block.size for block in some], np.int64)
        indices = BlockIndices([block.tile for block in some], np.arange(len(some)), begins, sizes, device)
        at = to_stream(np.array([weights[n].data_ptr() for n in chosen.tolist()], np.int64), device)
        counted = torch.zeros((len(some), 2), dtype=torch.int64, device=device)
        _count(indices, at, counted)
        sums[to_stream(chosen, device)] = counted
    return sums.view(-1)


def _count(indices: BlockIndices, at: torch.Tensor, sums: torch.Tensor) -> None:
    """Add to the two sums of each tile those of the weights of its blocks, given where these are."""
    words, others = indices.runs
    unit = min(indices.itemsize, 2)
    each, warps = 64, 8 // unit  # chunks that a program sums up, and its warps
    if count := words.block.numel():
        cuda.recount[(count, -(-words.chunks // each))](
            words.addresses(at), words.rows, device_key_planes(indices.device, unit), sums,
            UNIT=unit, PER=each, WARPS=warps, num_warps=warps,
        )  # fmt: skip
    if count := others.block.numel():
        cuda.recount_any[(count, min(others.chunks, 64))](
            others.addresses(at), others.rows, device_keys(indices.device), sums, ITEM=indices.itemsize, SPAN=1024
        )
