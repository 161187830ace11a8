"""Changes on a device: found, composed, written and counted. They are also the undo log."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.digest import keys
from pulsesync.core.types import BLOCK, Sum
from pulsesync.device.memory import INTEGERS, empty, fetch, on, scan, to_device, to_stream, unsigned
from pulsesync.device.pile import WORDS, Pile, PileAddresses, order
from pulsesync.kernels import cuda
from pulsesync.kernels.spec import GPU_CHUNK

SPAN = 512  # changes that a program processes at a time
SPREAD = 4  # programs for a block


@dataclass(frozen=True, eq=False)
class PileChanges:
    """Changes of a pile: those of block b are starts[b] to starts[b + 1]; in order if they are to be coded."""

    pile: Pile
    starts: torch.Tensor
    positions: torch.Tensor  # in the block
    old: torch.Tensor
    new: torch.Tensor
    known_chunks: torch.Tensor | None = None  # where the changes of each chunk begin, if it is known already

    @property
    def count(self) -> int:
        return self.positions.numel()

    def inverse(self) -> "PileChanges":
        return replace(self, old=self.new, new=self.old)

    def chunks(self) -> torch.Tensor:
        """Where the changes of each chunk begin, and where those of the last end."""
        if self.known_chunks is not None:
            return self.known_chunks
        tables, number = self.pile.tables, torch.arange(self.pile.chunks, device=self.pile.device)
        blocks = tables.chunk_block
        borders = blocks.to(torch.int64) * BLOCK + (number - tables.first_chunk[blocks]) * GPU_CHUNK
        found = torch.searchsorted(self.flat_keys(), borders)
        return torch.cat((found, found.new_full((1,), self.count)))

    def flat_keys(self) -> torch.Tensor:
        """Number of the block times 2^20, plus the position."""
        blocks = torch.arange(self.pile.blocks, device=self.starts.device)
        blocks = torch.repeat_interleave(blocks, self.starts.diff(), output_size=self.count)
        return blocks * BLOCK + self.positions

    @property
    def _grid(self) -> tuple[int, int]:
        return self.pile.blocks, SPREAD if self.count > SPREAD * SPAN * self.pile.blocks // 4 else 1

    def write(self, at: "WriteAddresses") -> None:
        """Write the new weights into tensors."""
        if not self.count:
            return
        pile, tables, placement = self.pile, self.pile.tables, self.pile.placement
        whole = int(pile.first_block[placement.first_gathered])
        (_, spread), values = self._grid, (unsigned(self.positions), unsigned(self.new))
        if whole:
            cuda.apply[whole, spread](
                at.tiles, tables.block_tile, tables.begins, *placement.geometry, self.starts, *values,
                ITEM=pile.kind.itemsize, SPAN=SPAN,
            )  # fmt: skip
        if placement.pieces is not None:
            table = placement.pieces.table
            begins, first_piece, last_piece = placement.blocks_in_run
            cuda.apply_pieces[pile.blocks - whole, spread](
                whole, begins, first_piece, last_piece, table.begins, at.pieces, table.columns, table.strides,
                self.starts, *values, ITEM=pile.kind.itemsize, SPAN=SPAN,
            )  # fmt: skip

    def count_digest_changes(self, sums: torch.Tensor) -> None:
        """Add to the two sums of each block how the changes change them."""
        if self.count:
            pile, tables = self.pile, self.pile.tables
            cuda.digest_change[self._grid](
                tables.begins, tables.indices.blocks, tables.indices.table, self.starts, unsigned(self.positions),
                unsigned(self.old), unsigned(self.new), device_keys(pile.device), sums,
                ITEM=pile.kind.itemsize, SPAN=SPAN,
            )  # fmt: skip


@dataclass(frozen=True)
class WriteAddresses:
    """Where the tensors of a pile are: of each tile that is in one tensor, and of each piece of the others."""

    tiles: torch.Tensor
    pieces: torch.Tensor


Changes = Sequence[PileChanges]


@cache
def device_keys(device: torch.device) -> torch.Tensor:
    return unsigned(to_device(keys(), device))


@cache
def device_key_planes(device: torch.device, unit: int) -> torch.Tensor:  # (4096,) uint64
    """The keys' bytes, in the order in which `recount` multiplies units of one or two bytes by them.

    For each 64 bytes of a chunk there are eight columns: bytes 0 to 3 of the keys of their units, for either sum.
    """
    columns = keys().view(np.uint8).reshape(2, -1, 4).transpose(0, 2, 1)
    planes = np.ascontiguousarray(columns.reshape(8, -1, 64 // unit).swapaxes(0, 1))
    return unsigned(to_device(planes.reshape(-1).view(np.uint64), device))


def find_changes(pile: Pile, old: PileAddresses, new: PileAddresses, cast: bool) -> PileChanges:
    """Compare two states of a pile. It waits for the number of changes; the rest is only launched."""
    wide, device = pile.kind.itemsize, pile.device
    bitmap = empty(pile.chunks * WORDS, torch.int32, device)
    counts = empty(pile.chunks, torch.int32, device)
    tables = pile.tables
    cuda.compare[(pile.chunks,)](
        old.at, new.at, tables.sizes, tables.chunk_block, tables.first_chunk, unsigned(bitmap), counts,
        ITEM=wide, CAST=cast,
    )  # fmt: skip
    chunks = scan(counts)
    positions = empty(int(chunks[-1]), torch.int32, device)
    before, after = (empty(positions.numel(), INTEGERS[wide], device) for _ in range(2))
    if positions.numel():
        cuda.collect[(pile.chunks,)](
            old.at, new.at, tables.chunk_block, tables.first_chunk, unsigned(bitmap), chunks, unsigned(positions),
            unsigned(before), unsigned(after), ITEM=wide, CAST=cast,
        )  # fmt: skip
    return PileChanges(pile, chunks[tables.first_chunk], positions, before, after, chunks)


def join(pile: Pile, runs: Sequence[PileChanges]) -> PileChanges:
    """Join the changes found in consecutive groups of blocks of a pile."""
    if len(runs) == 1:
        return runs[0]
    starts = scan(torch.cat([run.starts.diff() for run in runs]))
    chunks = scan(torch.cat([run.chunks().diff() for run in runs]))
    positions, old, new = (
        torch.cat(column) for column in zip(*((run.positions, run.old, run.new) for run in runs), strict=True)
    )
    return PileChanges(pile, starts, positions, old, new, chunks)


def compose(first: Changes, then: Changes) -> list[PileChanges]:
    """Two sets of changes as one, in order, without changes that the second reverts."""
    piles = sorted(dict.fromkeys(run.pile for run in (*first, *then)), key=order)
    out = []
    for pile in piles:
        earlier, later = ([run for run in runs if run.pile is pile] for runs in (first, then))
        if both := _compose([*earlier, *later]):
            out.append(both)
    return out


def _compose(runs: Sequence[PileChanges]) -> PileChanges | None:
    """Changes of a pile, the earlier first: no weight is in more than two of the runs."""
    pile = runs[0].pile
    order_of, order = torch.sort(torch.cat([run.flat_keys() for run in runs]), stable=True)
    old, new = torch.cat([run.old for run in runs])[order], torch.cat([run.new for run in runs])[order]
    one = torch.ones(1, dtype=torch.bool, device=pile.device)
    starts_one = order_of[1:] != order_of[:-1]
    firsts, lasts = torch.cat((one, starts_one)), torch.cat((starts_one, one))
    if not order_of.numel():
        return None
    where, old, new = order_of[firsts], old[firsts], new[lasts]
    differ = old != new
    where, old, new = where[differ], old[differ], new[differ]
    if not where.numel():
        return None
    borders = torch.arange(pile.blocks + 1, device=pile.device) * BLOCK
    return PileChanges(pile, torch.searchsorted(where, borders), (where % BLOCK).to(torch.int32), old, new)


BlockDigestChanges = Mapping[Pile, NDArray[np.uint64]]  # of each pile: two sums a block


def begin_digest_changes(changes: Iterable[PileChanges]) -> Callable[[], BlockDigestChanges]:
    """Begin to count how changes change the digest of each block; return a function that waits for it, by pile."""
    sums: dict[Pile, torch.Tensor] = {}
    for run in changes:
        if run.pile not in sums:
            sums[run.pile] = torch.zeros(2 * run.pile.blocks, dtype=torch.int64, device=run.pile.device)
        with on(run.pile.device):
            run.count_digest_changes(sums[run.pile])
    found = fetch(*sums.values())
    return lambda: {pile: sums_.view(np.uint64).reshape(-1, 2) for pile, sums_ in zip(sums, found(), strict=True)}


def digest_changes_by_block(changes: Iterable[PileChanges]) -> BlockDigestChanges:
    """How the changes of each block change the digest, in the piles that have any."""
    return begin_digest_changes(changes)()


def digest_changes(by_block: BlockDigestChanges) -> dict[int, Sum]:
    """The same of tiles, by ordinal, of all tiles of those piles."""
    found: dict[int, Sum] = {}
    for pile, counted in by_block.items():
        found.update(as_sums(pile, np.add.reduceat(counted, pile.first_block[:-1], axis=0)))
    return found


def as_sums(pile: Pile, counted: NDArray[np.integer]) -> Mapping[int, Sum]:
    """Sums by ordinal, from pairs that kernels have written."""
    pairs = counted.view(np.uint64).reshape(-1, 2).tolist()
    return {tile.ordinal: Sum(*pair) for tile, pair in zip(pile.tiles, pairs, strict=True)}


def on_whole(run: PileChanges, pile: Pile) -> PileChanges:
    """Changes of a part of a pile as changes of the whole pile."""
    if run.pile is pile:
        return run
    counts = torch.zeros(pile.blocks, dtype=torch.int64, device=pile.device)
    counts[to_stream(pile.blocks_of(run.pile), pile.device)] = run.starts.diff()
    return PileChanges(pile, scan(counts), run.positions, run.old, run.new)
