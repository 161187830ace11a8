"""Consecutive patches of an epoch, decoded block by block: all patches of one block are decoded before the next block.

So a block is copied once for all patches, not once for each; nothing is composed, because the combined changes are the
differences between the final copy and the live weights; and of each patch only the changes of the digests are kept.
Memory is O(combined changes), plus for each thread a copy of one block and its history after each patch.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pulsesync import kernels
from pulsesync.core import digest
from pulsesync.core.threads import default_threads, spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, Remembered, Sum, Tile
from pulsesync.errors import PulseError
from pulsesync.format.body import Body
from pulsesync.format.codecs.context import NO_HISTORY, BlockMemory
from pulsesync.format.history import History, TileHistory, TileHistorySummary, advance_block, digest_of, memory_of
from pulsesync.format.index import FrequencyTable, TileEntry
from pulsesync.format.layout import Layout
from pulsesync.format.patch import DecodeTask, open_tile, payloads, run_task
from pulsesync.format.weights import Overlay, Weights, compose
from pulsesync.kernels.arrays import U32

PIECE = 1 << 18  # weights compared at a time
BATCH = 8 * BLOCK  # weights per thread whose payloads are opened at a time: just enough to keep all threads busy
NO_MEMORY = BlockMemory()

Keep = Callable[[int, BlockChange], BlockChange | None]  # the local part of a change of a tile, by ordinal


@dataclass
class ReplayedPatches:
    """The effect of consecutive patches on a state, as far as they can be decoded."""

    digest_changes: list[dict[int, Sum]]  # for each patch: how the digests of the tiles in it change, by ordinal
    history: History | None  # after the last
    # For each patch: of the history after it; None: there is no history, or it covers only some tiles.
    history_digests: list[str | None]
    fault: PulseError | None = None  # of the first patch that cannot be decoded; the lists end before it


def replay(
    patches: Sequence[Sequence[Body]],
    layout: Layout,
    live: Weights,
    changes: dict[tuple[int, int], BlockChange],
    history: History | None,
    *,
    wanted: Mapping[int, Tile] | None = None,
    keep: Keep | None = None,
) -> ReplayedPatches:
    """Decode patches of one epoch, each against the weights after the one before it. Nothing is changed.

    Args:
        patches: The parts of each, in order.
        layout: Of the run.
        live: The weights.
        changes: Changes of the live weights before the first patch. They become those after the last one, so that the
            two are never in memory together; after a fault they must not be used.
        history: Before the first patch; None: no history is kept, as with a squashed patch.
        wanted: The tiles to decode, by ordinal, possibly with some of their groups only; None: all. Digests of
            histories are known only for all tiles.
        keep: Returns the local part of a change; None: all of it.
    """
    run = _Run(patches, layout, live, changes, history, wanted, keep)
    for tiles in run.batches():
        jobs = [job for tile in tiles for job in run.open(tile)]
        for job, done in zip(jobs, spread(run.apply, jobs), strict=True):
            run.take(job, *done)
    return run.finish()


class _TileStep(NamedTuple):
    """The part of one patch for some blocks of a tile."""

    patch: int  # its position in the sequence
    codec: Codec
    tasks: Sequence[DecodeTask]
    tables: Sequence[FrequencyTable]
    cut: int  # below which weights of the tile are tracked after it
    patch_index: int  # of the patch in its epoch; 0 where no history is kept


class _HistoryTally:
    """The part of the history digest after each patch for one tile.

    The digest is positional, and where the bytes of a block begin is known only when all blocks before it are done. So
    each block is counted by the thread that finishes the last of these, and only the history after the last patch is
    kept.
    """

    def __init__(self, patches: int) -> None:
        self.sizes, self.sums = [0] * patches, [Sum(0, 0)] * patches
        self.blocks: list[Remembered] = []  # after the last patch
        self._done: dict[int, Sequence[Remembered | None]] = {}  # by block, until it is counted
        self._lock = threading.Lock()

    def add(self, number: int, histories: Sequence[Remembered | None]) -> None:
        """Count a block, given its bytes after each patch, and the blocks that waited for it."""
        self._done[number] = histories
        while len(self.blocks) in self._done and self._lock.acquire(blocking=False):
            try:
                while (some := self._done.pop(len(self.blocks), None)) is not None:
                    for n, one in enumerate(some):
                        if one is not None:
                            self.sums[n] += digest.count_bytes(one.last, self.sizes[n])
                            self.sizes[n] += one.last.size
                    self.blocks.append((some[-1] if some else None) or Remembered.alone(NO_HISTORY))
            finally:
                self._lock.release()


class _Job(NamedTuple):
    """The work for some blocks of a tile, over all patches: one block, or the tile if some patch codes it as one."""

    tile: Tile
    numbers: Sequence[int]
    steps: Sequence[_TileStep]
    tally: _HistoryTally


class _OneBlock:
    """One block of the live weights as patches change it: a copy is made at the second change."""

    def __init__(self, live: Bits, number: int, first: BlockChange | None, copy: Callable[[Bits], Bits]) -> None:
        self._live, self._number, self._copy = live, number, copy
        self._first = first  # the changes so far, unless there is a copy
        self._own: Bits | None = None

    def block(self, tile: Tile, number: int) -> Bits:
        if self._first is not None:
            self._own = self._copy(self._live)
            kernels.active().scatter(self._own, self._first.positions, self._first.new)
            self._first = None
        return self._live if self._own is None else self._own

    def change(self, tile: Tile, change: BlockChange) -> None:
        if self._first is None and self._own is None:
            self._first = change
        else:
            kernels.active().scatter(self.block(tile, self._number), change.positions, change.new)

    def changes(self) -> list[BlockChange]:
        """The changes from the live block to this one."""
        if self._own is None:
            return [self._first] if self._first else []
        positions, old, new = _compare(self._live, self._own)
        return [BlockChange(self._number, positions, old, new)] if positions.size else []


def _compare(old: Bits, new: Bits) -> tuple[U32, Bits, Bits]:
    """Where two blocks differ, and how. In pieces, because the kernel keeps memory for the largest input so far."""
    pieces = []
    for begin in range(0, old.size, PIECE):
        positions, before, after = kernels.active().changed(old[begin : begin + PIECE], new[begin : begin + PIECE])
        pieces.append((positions + np.uint32(begin), before, after))
    if len(pieces) == 1:
        return pieces[0]
    positions, before, after = (np.concatenate(some) for some in zip(*pieces, strict=True))
    return positions, before, after


class _WholeTile:
    """All blocks of a tile as patches change them: O(changed) memory, but each change is composed with the last."""

    def __init__(self, live: Weights, changes: dict[tuple[int, int], BlockChange]) -> None:
        self._live, self._changes = live, changes  # from the live blocks to these

    def block(self, tile: Tile, number: int) -> Bits:
        return Overlay(self._live, self._changes).block(tile, number)

    def change(self, tile: Tile, change: BlockChange) -> None:
        key = (tile.ordinal, change.number)
        if both := compose(self._changes.pop(key, None), change):
            self._changes[key] = both

    def changes(self) -> Iterable[BlockChange]:
        return self._changes.values()


class _Run:
    """The work of `replay`."""

    def __init__(
        self,
        patches: Sequence[Sequence[Body]],
        layout: Layout,
        live: Weights,
        changes: dict[tuple[int, int], BlockChange],
        history: History | None,
        wanted: Mapping[int, Tile] | None,
        keep: Keep | None,
    ) -> None:
        self.live, self.changes, self.history, self.keep = live, changes, history, keep
        self.tiles_of: Mapping[int, Tile] | Sequence[Tile] = layout.tiles if wanted is None else wanted
        self.whole = wanted is None  # otherwise the digest of a history is not known
        self.payloads: list[dict[int, tuple[TileEntry, memoryview, Sequence[FrequencyTable]]]] = [
            {
                entry.tile: (entry, payload, body.index.tables)
                for body in bodies
                for entry, payload in payloads(body.index, body.sections, wanted)
            }
            for bodies in patches
        ]
        self.digest_changes: list[dict[int, Sum]] = [{} for _ in patches]
        self.counted: list[dict[int, TileHistorySummary]] = [{} for _ in patches]
        self.tiles: dict[int, TileHistory] = {}  # the histories of tiles that changed, after the last patch
        self.good = len(patches)  # patches before the first that cannot be decoded
        self.fault: PulseError | None = None
        self.buffers = threading.local()

    def batches(self) -> Iterator[list[Tile]]:
        """The tiles that are in some patch, in groups."""
        some: list[Tile] = []
        weights, full = 0, BATCH * default_threads()
        for ordinal in sorted(set().union(*self.payloads)):
            some.append(self.tiles_of[ordinal])
            weights += some[-1].size
            if weights >= full:
                yield some
                some, weights = [], 0
        if some:
            yield some

    def open(self, tile: Tile) -> list[_Job]:
        """The jobs of a tile: one per block, if all patches code blocks separately."""
        steps: list[_TileStep] = []
        cut = self.history.cut(tile.ordinal) if self.history else 0
        for patch in range(self.good):
            if (found := self.payloads[patch].get(tile.ordinal)) is None:
                continue
            entry, payload, tables = found
            known, index = None, 0
            if self.history is not None:
                known = History(self.history.index + patch, {tile.ordinal: TileHistory(cut, ())} if cut else {})
                index = known.index + 1
            try:
                tasks = open_tile(entry, tile, payload, tables, known)
            except PulseError as e:
                self._fail(patch, e)
                break
            if self.history is not None and entry.codec == Codec.HISTORY and tasks[0].payload:
                cut = max(cut, tasks[0].payload.heads.cut)
            steps.append(_TileStep(patch, entry.codec, tasks, tables, cut, index))
        count, tally = tile.block_count, _HistoryTally(len(steps))
        if count == 1 or any(len(step.tasks) != count for step in steps):
            return [_Job(tile, range(count), steps, tally)]
        return [
            _Job(tile, (n,), [step._replace(tasks=step.tasks[n : n + 1]) for step in steps], tally)
            for n in range(count)
        ]

    def apply(self, job: _Job) -> tuple[list[Sum], PulseError | None]:
        """Apply all patches to the blocks of a job; return how each changes the digest, and the fault of the next."""
        tile, first = job.tile, job.numbers[0]
        keys = [(tile.ordinal, n) for n in job.numbers]
        weights: _OneBlock | _WholeTile  # owns the changes so far, which take as much memory as all the rest
        if len(keys) == 1:
            weights = _OneBlock(self.live.block(tile, first), first, self.changes.pop(keys[0], None), self._copy)
        else:
            weights = _WholeTile(self.live, {key: self.changes.pop(key) for key in keys if key in self.changes})
        known = {n: memory_of(self.history, tile, n) for n in job.numbers}
        moves: list[Sum] = []
        histories: dict[int, list[Remembered | None]] = {n: [] for n in job.numbers}
        fault = None
        for step in job.steps:
            known = {n: BlockMemory(memory.cut, memory.remembered, step.patch_index) for n, memory in known.items()}
            try:
                found = [c for task in step.tasks for c in self._decode(task, weights, known[task.number], step)]
            except PulseError as e:
                fault = e
                break
            moves.append(digest.sum_up(digest.moved_by(tile, change) for change in found))
            by_number = {change.number: change for change in found}
            for n, memory in known.items():
                if step.cut:
                    after = advance_block(memory, tile, n, by_number.get(n), step.cut, weights)
                    known[n] = BlockMemory(step.cut, after)
                histories[n].append(known[n].remembered)
            for change in found:
                weights.change(tile, change)
        for n, remembered in histories.items():
            job.tally.add(n, remembered)
        self.changes.update(((tile.ordinal, change.number), change) for change in weights.changes())
        return moves, fault

    def _decode(self, task: DecodeTask, weights: Weights, memory: BlockMemory, step: _TileStep) -> list[BlockChange]:
        found = run_task(task, weights, memory if step.codec == Codec.HISTORY else NO_MEMORY, step.tables)
        if self.keep is None:
            return found
        return [kept for change in found if (kept := self.keep(task.tile.ordinal, change))]

    def _copy(self, bits: Bits) -> Bits:
        """A copy of a block, in memory that this thread reuses for the next block."""
        if not hasattr(self.buffers, "bytes") or self.buffers.bytes.size < bits.nbytes:
            self.buffers.bytes = np.empty(bits.nbytes, np.uint8)
        copy: Bits = self.buffers.bytes[: bits.nbytes].view(bits.dtype)
        np.copyto(copy, bits)
        return copy

    def take(self, job: _Job, moves: Sequence[Sum], fault: PulseError | None) -> None:
        ordinal, tally = job.tile.ordinal, job.tally
        for step, move in zip(job.steps, moves, strict=False):
            by_tile = self.digest_changes[step.patch]
            by_tile[ordinal] = by_tile.get(ordinal, Sum(0, 0)) + move
        if fault is not None:
            self._fail(job.steps[len(moves)].patch, fault)
        if job.numbers[-1] + 1 == job.tile.block_count:  # the last of the tile's jobs
            for step, size, total in zip(job.steps, tally.sizes, tally.sums, strict=True):
                if step.cut:
                    self.counted[step.patch][ordinal] = TileHistorySummary(step.cut, size, total)
                    self.tiles[ordinal] = TileHistory(step.cut, tuple(tally.blocks))

    def _fail(self, patch: int, fault: PulseError) -> None:
        if patch < self.good:
            self.good, self.fault = patch, fault

    def finish(self) -> ReplayedPatches:
        digests: list[str | None] = [None] * self.good
        later: History | None = None
        if self.history is not None:
            before, counts = self.history.index, {}
            if self.whole:
                counts = self.history.counts(self.history.tiles)
                for patch, counted in enumerate(self.counted[: self.good]):
                    counts.update(counted)
                    digests[patch] = digest_of(before + 1 + patch, counts) if counts else None
            later = self.history.replaced(before + self.good, self.tiles, counts)
        return ReplayedPatches(self.digest_changes[: self.good], later, digests, self.fault)
