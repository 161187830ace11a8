"""The trainer's end on a GPU: weights are compared there with a base that is kept there, or in pinned host memory.

What `compare` launches in the caller's stream reads the trainer's weights; everything after it reads the base and what
was found, in a stream of its own. So training may continue at once: what it launches comes after the comparison.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, Sum, TensorSpec, Tile
from pulsesync.device.changes import ChangeMarks, PileChanges, compose, find_changes, mark, moves, on_whole
from pulsesync.device.encode import code_pile
from pulsesync.device.hot import DeviceHistory, HotWeights
from pulsesync.device.memory import (
    INTEGERS,
    DeviceStream,
    DeviceView,
    StreamPoint,
    on,
    on_host,
    pinned,
    starts_of,
    to_host,
    to_stream,
    view,
)
from pulsesync.device.pile import Pile, rectangle
from pulsesync.device.state import DeviceState, DeviceTransition
from pulsesync.errors import StateError
from pulsesync.format import patch
from pulsesync.format.container import new_bytes
from pulsesync.format.index import FrequencyTable
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.predict import CodedTile
from pulsesync.state.live import AnyState, AnyTransition
from pulsesync.state.sharding import Shards, TileShare, shards_of
from pulsesync.state.slices import Window
from pulsesync.state.views import CASTS, find_casts

FEW = 1 << 13  # changes of a tile up to which they are brought to the host together with those of others


@dataclass(frozen=True)
class DeviceSource:
    """A source on a device as it is published."""

    views: Mapping[str, DeviceView]
    dtypes: Mapping[str, str]  # of tensors that are cast

    def spec(self, name: str) -> TensorSpec:
        spec = self.views[name].spec
        return TensorSpec(name, self.dtypes[name], spec.shape) if name in self.dtypes else spec

    def cast(self, name: str) -> torch.Tensor:
        """A tensor, flat, as it is published: a copy where it is cast or not contiguous."""
        flat = self.views[name].flat
        if name not in self.dtypes:
            return flat
        wanted = getattr(torch, CASTS[self.dtypes[name]])
        return flat.view(torch.float32).to(wanted).view(INTEGERS[wanted.itemsize])


class DeviceBaseline:
    """Source on a device, base there as well (keep "device") or in pinned host memory ("host")."""

    hands_over = False

    def __init__(self, device: torch.device, keep: Literal["device", "host"]) -> None:
        self.device, self.keep = device, keep
        self._stream = DeviceStream(device)

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        return shards_of(source, cast, self._read)

    def _read(self, tensors: Mapping[str, Any], cast: Mapping[str, str]) -> tuple[DeviceSource, Mapping[str, str]]:
        views, ties = view(tensors)
        if away := next((v for v in views.values() if v.tensor.numel() and v.tensor.device != self.device), None):
            raise StateError(
                f"tensor {away.spec.name!r} is on {away.tensor.device}, and was on {self.device}", tensor=away.spec.name
            )
        return DeviceSource(views, find_casts((v.spec for v in views.values()), cast)), ties

    def copy(self, share: TileShare, shards: Shards) -> AnyState:
        flats = {name: self._own(_weights_in(window, shards)) for name, window in share.windows.items()}
        return DeviceState(share.layout, flats, places=share.held, device=self.device)

    def _own(self, weights: torch.Tensor) -> torch.Tensor:
        """A copy of weights where the base is kept, flat."""
        if self.keep == "host":
            return on_host(weights.shape, weights.dtype, self.device).copy_(weights).view(-1)
        return _clone(weights)

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        out = {}
        for name, window in share.windows.items():
            dtype = _torch_dtype(window.tensor, shards.published)
            out[name] = _clone(_weights_in(window, shards)).view(dtype).view(window.local.shape)
        return out

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        if share.whole and self.keep == "device":
            return state
        flats: Mapping[str, Any] = state.flats  # none, and the state the host's, if the share has no tiles
        if self.keep == "host":
            flats = {name: self._own(flat) for name, flat in flats.items()}
        kept = DeviceState(share.layout, flats, places=share.held, device=self.device)
        kept.bring(state.history)
        return kept

    def compare(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> "DeviceDifference":
        assert isinstance(state, DeviceState)
        places = {ordinal: place.tile for ordinal, place in share.places.items()}
        runs, marks = [], {}
        with on(self.device):
            for pile in state.piles.values():
                run, marked = _compare(pile, pile.elsewhere(places), state, shards.published)
                if run.count:
                    runs.append(run)
                    marks[pile] = marked
            launched = StreamPoint(self.device)
        state.stream = self._stream
        state.readers.append(launched)
        return DeviceDifference(state, self._stream, runs, marks, launched)


def _weights_in(window: Window, shards: Shards) -> torch.Tensor:
    """The weights of a window that lies in a shard, as they are published: in place where they are not cast."""
    name = window.tensor.name
    shard = shards.windows[name]
    row, column = window.rows[0] - shard.rows[0], window.columns[0] - shard.columns[0]
    place = Tile(0, shard.local, row, column, window.local.rows, window.local.columns)
    return rectangle(shards.published.cast(name), place)


def _clone(weights: torch.Tensor) -> torch.Tensor:
    return weights.clone(memory_format=torch.contiguous_format).view(-1)


def _torch_dtype(spec: TensorSpec, source: DeviceSource) -> torch.dtype:
    if spec.name in source.dtypes:
        found: torch.dtype = getattr(torch, CASTS[spec.dtype])
        return found
    return source.views[spec.name].dtype


def _compare(pile: Pile, there: Pile, state: DeviceState, source: DeviceSource) -> tuple[PileChanges, ChangeMarks]:
    """Compare the tiles of a pile with the source, where they lie as in the pile there.

    Masters are rounded to BF16 as they are read; where a pile has others too, the two kinds are compared apart.
    """
    masters = [tile.ordinal for tile in pile.tiles if source.dtypes.get(tile.tensor.name) == "BF16"]
    others = [tile.ordinal for tile in pile.tiles if source.dtypes.get(tile.tensor.name) != "BF16"]
    if not masters or not others:
        return _compare_alike(pile, there, state, source, cast=bool(masters))
    runs = [
        on_whole(_compare_alike(pile.part(some), there.part(some), state, source, cast=some is masters)[0], pile)
        for some in (masters, others)
    ]
    run = next(iter(compose(runs, ())), runs[0])
    return run, mark(run)


def _compare_alike(
    pile: Pile, there: Pile, state: DeviceState, source: DeviceSource, cast: bool
) -> tuple[PileChanges, ChangeMarks]:
    names = dict.fromkeys(tile.tensor.name for tile in pile.tiles)
    flats = {name: source.views[name].flat if cast else source.cast(name) for name in names}
    return find_changes(pile, pile.locate(state.flats), there.locate(flats, itemsize=4 if cast else None), cast)


@dataclass(frozen=True)
class DeviceDifference:
    """What differs on a device. `marks` are of runs as they were found; others are marked again."""

    state: DeviceState
    stream: DeviceStream
    runs: Sequence[PileChanges]  # one a pile, in order
    marks: Mapping[Pile, ChangeMarks]
    found: StreamPoint

    def after(self, done: AnyTransition) -> "DeviceDifference":
        assert isinstance(done, DeviceTransition)
        with self.stream([self.found]):
            runs = compose([run.inverse() for run in done.changes], self.runs)
        return replace(self, runs=runs, marks={})

    def try_step(self) -> None:
        """Changes are coded on the device, in less time than it takes to bring them to the host, which `step` needs."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        with self.stream([self.found]):
            return self._encode(last.next_patch[1] > 1, codec)

    def _encode(self, goes_on: bool, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        state = self.state
        memories = state.history if goes_on else DeviceHistory()
        known = memories if codec in ("auto", "history") else None
        shared: list[FrequencyTable] = []
        coded: dict[int, CodedTile] = {}
        hot: dict[Pile, HotWeights] = {}
        for run in self.runs:
            if codec in ("auto", "context", "history") and run.pile.kind.exponent_shift is not None:
                marks = self.marks.get(run.pile) or mark(run)
                one = code_pile(run, marks, run.pile.locate(state.flats), known, len(shared))
                shared.append(one.table)
                coded.update(one.tiles)
                if known is not None:
                    hot[run.pile] = one.hot
        found = (diff for run in self.runs for diff in _diffs(run, self.stream))
        diffs = sorted(found, key=lambda diff: diff.tile.ordinal)
        by = moves(self.runs)
        after = {diff.tile.ordinal: state.sums[diff.tile.ordinal] + by[diff.tile.ordinal] for diff in diffs}
        allocate = pinned if state.device.type == "cuda" else new_bytes
        done = patch.finish(state.layout, diffs, state, shared, coded, after, codec, allocate=allocate)
        cuts = {d.tile.ordinal: c.cut for d, c in zip(diffs, done.chosen, strict=True) if c.codec == Codec.HISTORY}
        later = state.remember(memories, cuts, self.runs, set(after), hot)
        sums: dict[int, Sum] = {**state.sums, **after}
        return EncodedPart(done.id, done.data, (), after), DeviceTransition(self.runs, sums, later)


def _diffs(run: PileChanges, stream: DeviceStream) -> "list[DeviceDiff]":
    """The changed tiles of a run."""
    (starts,) = to_host(run.starts)
    pile = run.pile
    borders = starts[pile.first_block]
    fetched = _Fetched(run, borders, stream)
    counts, firsts = np.diff(borders).tolist(), pile.first_block.tolist()
    return [
        DeviceDiff(tile, count, fetched, i, starts[firsts[i] : firsts[i + 1] + 1])
        for i, (tile, count) in enumerate(zip(pile.tiles, counts, strict=True))
        if count
    ]


class _Fetched:
    """The changes of tiles of a run on the host: of tiles that have few, all at once as soon as one is asked for."""

    def __init__(self, run: PileChanges, borders: NDArray[np.int64], stream: DeviceStream) -> None:
        self._run, self._borders, self._stream, self._lock = run, borders, stream, threading.Lock()
        self._few: tuple[NDArray[np.int64], Sequence[NDArray[Any]]] | None = None

    def tile(self, i: int) -> Sequence[NDArray[Any]]:
        """Positions, old and new bits of the changes of a tile; for any thread."""
        run, (first, last) = self._run, self._borders[i : i + 2].tolist()
        if last - first > FEW:
            with self._stream():
                return to_host(run.positions[first:last], run.old[first:last], run.new[first:last])
        with self._lock:
            if self._few is None:
                self._few = self._fetch_few()
        begins, arrays = self._few
        return [array[begins[i] : begins[i + 1]] for array in arrays]

    def _fetch_few(self) -> tuple[NDArray[np.int64], Sequence[NDArray[Any]]]:
        """Where those of each tile begin, and all of them."""
        counts, run = np.diff(self._borders), self._run
        counts[counts > FEW] = 0
        begins = starts_of(counts)
        index = np.arange(begins[-1]) + np.repeat(self._borders[:-1] - begins[:-1], counts)
        with self._stream():
            chosen = to_stream(index, run.pile.device)
            return begins, to_host(run.positions[chosen], run.old[chosen], run.new[chosen])


@dataclass(frozen=True)
class DeviceDiff:
    """What changed in a tile, brought to the host only where something asks for it (see `format.diff.TileChanges`)."""

    tile: Tile
    changed: int
    fetched: _Fetched
    number: int  # of the tile in the pile
    borders: NDArray[np.int64]  # of blocks, in the run

    def positions(self) -> NDArray[np.int64]:
        where = self._fetch()[0]
        if self.borders.size > 2:
            where += np.repeat(np.arange(self.tile.block_count) * BLOCK, np.diff(self.borders))
        return where

    def values(self) -> Bits:
        return self._fetch()[2]

    def old_values(self) -> Bits:
        return self._fetch()[1]

    @property
    def blocks(self) -> tuple[BlockChange, ...]:
        where, old, new = self._fetch()
        cuts = pairwise((self.borders - self.borders[0]).tolist())
        return tuple(
            BlockChange(n, where[a:b].astype(np.uint32), old[a:b], new[a:b]) for n, (a, b) in enumerate(cuts) if a < b
        )

    def _fetch(self) -> tuple[NDArray[np.int64], Bits, Bits]:
        where, old, new = self.fetched.tile(self.number)
        bits = self.tile.tensor.kind.bits
        return where.astype(np.int64), old.view(bits), new.view(bits)
