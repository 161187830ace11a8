"""From changes on a device to the bytes of a part, the same that a host would write."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, DTYPES, Bits, BlockChange, Codec, Sum, Tile
from pulsesync.device.changes import BlockDigestChanges, PileChanges, digest_changes, digest_changes_by_block
from pulsesync.device.encode import code_piles
from pulsesync.device.memory import DeviceStream, on, pinned, starts_of, to_host, to_stream
from pulsesync.device.pile import Pile
from pulsesync.device.state import backend_of
from pulsesync.device.tracked import DeviceHistory, HotWeights, Remembering, advanced, begin_remember
from pulsesync.format import patch
from pulsesync.format.container import Allocate, new_bytes
from pulsesync.format.index import FrequencyTable
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.predict import CodedTile
from pulsesync.kernels.arrays import I64
from pulsesync.state.backend import Transition
from pulsesync.state.weights import WeightState

FEW = 1 << 13  # up to this number of changes, those of a tile are copied to the host together with those of others


def encode_changes(
    state: WeightState,
    runs: Sequence[PileChanges],
    memories: DeviceHistory,
    codec: CodecName,
    stream: DeviceStream,
    allocate: Allocate | None = None,
) -> tuple[EncodedPart, Transition]:
    """Encode changes of a state, in the current stream, which must be the given one.

    runs: grouped by dtype. memories: the history of the epoch; empty in its first patch. allocate: returns memory for
    the part; pinned if not given.
    """
    backend = backend_of(state)
    allocate = allocate or host_bytes(backend.device)
    known = memories if codec in ("auto", "history") else None
    shared: list[FrequencyTable] = []
    coded: dict[int, CodedTile] = {}
    hot: dict[Pile, HotWeights] = {}
    by_block: BlockDigestChanges = {}
    starts: dict[Pile, I64] = {}
    for dtype, some in groupby(runs, lambda run: run.pile.tiles[0].tensor.dtype):
        if codec in ("auto", "context", "history") and DTYPES[dtype].exponent_shift is not None:
            piles = code_piles([(run, backend.locate(run.pile)) for run in some], known, len(shared))
            shared.append(piles.table)
            coded |= piles.tiles
            hot |= piles.hot if known is not None else {}
            by_block = {**by_block, **piles.moved}
            starts |= piles.starts
    by_block = {**by_block, **digest_changes_by_block(run for run in runs if run.pile not in by_block)}
    found = (diff for run in runs for diff in diffs_of(run, stream, starts.get(run.pile)))
    diffs = sorted(found, key=lambda diff: diff.tile.ordinal)
    by = digest_changes(by_block)
    after = {diff.tile.ordinal: state.sums[diff.tile.ordinal] + by[diff.tile.ordinal] for diff in diffs}
    likely = _cuts_of(coded.items())

    def begin_history(cuts: Mapping[int, int]) -> Iterable[Remembering]:
        for pile in backend.piles:
            mine, found_hot = [run for run in runs if run.pile is pile], hot.pop(pile, None)
            with on(pile.device):
                yield begin_remember(pile, backend.locate, memories, cuts, mine, after.keys(), found_hot)

    # Nearly always the coded payloads are also chosen, so the device computes this while the host writes the file.
    later = list(begin_history(likely))
    done = patch.finish(state.layout, diffs, state, shared, coded, after, codec, allocate=allocate)
    cuts = _cuts_of((diff.tile.ordinal, choice) for diff, choice in zip(diffs, done.chosen, strict=True))
    history = advanced(memories, later if cuts == likely else begin_history(cuts))
    sums: dict[int, Sum] = {**state.sums, **after}
    return EncodedPart(done.id, done.data, (), after), Transition(runs, sums, history, backend.count_changed(runs))


def host_bytes(device: torch.device) -> Allocate:
    """A function that allocates host memory for finished bytes of a device."""
    return pinned if device.type == "cuda" else new_bytes


def _cuts_of(tiles: Iterable[tuple[int, CodedTile]]) -> dict[int, int]:
    """The cuts of the tiles that are coded with a history, by ordinal."""
    return {ordinal: tile.cut for ordinal, tile in tiles if tile.codec == Codec.HISTORY}


def diffs_of(run: PileChanges, stream: DeviceStream, starts: I64 | None = None) -> "list[DeviceDiff]":
    """The changed tiles of a run; starts: where the changes of each block begin, if the host knows it already."""
    if starts is None:
        (starts,) = to_host(run.starts)
    fetched = _Fetched(run, starts, stream)
    changed = np.diff(starts[run.pile.first_block]).tolist()
    both = enumerate(zip(run.pile.tiles, changed, strict=True))
    return [DeviceDiff(tile, count, fetched, i) for i, (tile, count) in both if count]


class _Fetched:
    """The changes of tiles of a run on the host: those of tiles with few changes are fetched together on first use."""

    def __init__(self, run: PileChanges, starts: I64, stream: DeviceStream) -> None:
        self._run, self._starts, self._stream, self._lock = run, starts, stream, threading.Lock()
        self._borders = starts[run.pile.first_block]
        self._few: tuple[I64, Sequence[NDArray[Any]]] | None = None

    def tile(self, i: int) -> Sequence[NDArray[Any]]:
        """Positions, old and new bits of the changes of a tile; thread-safe."""
        run, (first, last) = self._run, self._borders[i : i + 2].tolist()
        if last - first > FEW:
            with self._stream():
                return to_host(run.positions[first:last], run.old[first:last], run.new[first:last])
        with self._lock:
            if self._few is None:
                self._few = self._fetch_few()
        begins, arrays = self._few
        return [array[begins[i] : begins[i + 1]] for array in arrays]

    def begins(self, i: int) -> I64:
        """For each change of a tile, where the weights that are coded with it begin in the tile."""
        pile = self._run.pile
        first, last = pile.first_block[i : i + 2].tolist()
        return np.repeat(pile.host_begins[first:last], np.diff(self._starts[first : last + 1]))

    def _fetch_few(self) -> tuple[I64, Sequence[NDArray[Any]]]:
        """Where the changes of each tile begin, and all changes."""
        counts, run = np.diff(self._borders), self._run
        counts[counts > FEW] = 0
        begins = starts_of(counts)
        index = np.arange(begins[-1]) + np.repeat(self._borders[:-1] - begins[:-1], counts)
        with self._stream():
            chosen = to_stream(index, run.pile.device)
            return begins, to_host(run.positions[chosen], run.old[chosen], run.new[chosen])


class DeviceDiff(NamedTuple):
    """The changes of a tile, copied to the host only on access (see `format.diff.TileChanges`)."""

    tile: Tile
    changed: int
    fetched: _Fetched
    number: int  # of the tile in the pile

    def positions(self) -> I64:
        return self._fetch()[0]

    def values(self) -> Bits:
        return self._fetch()[2]

    def old_values(self) -> Bits:
        return self._fetch()[1]

    @property
    def blocks(self) -> tuple[BlockChange, ...]:
        where, old, new = self._fetch()
        cuts = pairwise(np.searchsorted(where, np.arange(self.tile.block_count + 1) * BLOCK).tolist())
        return tuple(
            BlockChange(n, (where[a:b] - n * BLOCK).astype(np.uint32), old[a:b], new[a:b])
            for n, (a, b) in enumerate(cuts)
            if a < b
        )

    def _fetch(self) -> tuple[I64, Bits, Bits]:
        """Positions in the tile, old and new bits."""
        where, old, new = self.fetched.tile(self.number)
        bits = self.tile.tensor.kind.bits
        return where + self.fetched.begins(self.number), old.view(bits), new.view(bits)
