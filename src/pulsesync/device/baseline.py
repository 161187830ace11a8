"""The trainer's end on a GPU: weights are compared there with a base that is kept there, or in pinned host memory.

What `compare` launches in the caller's stream reads the trainer's weights; everything after it reads the base and what
was found, in a stream of its own. So training may continue at once: what it launches comes after the comparison.
`compare_later` launches nothing there: a thread compares, and the trainer calls `wait` before it changes the weights.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.threads import start
from pulsesync.core.types import BLOCK, DTYPES, Bits, BlockChange, Codec, Sum, TensorSpec, Tile
from pulsesync.device.changes import (
    BlockMoves,
    PileChanges,
    block_moves,
    compose,
    find_changes,
    join,
    moves,
    on_whole,
)
from pulsesync.device.encode import code_piles
from pulsesync.device.hot import DeviceHistory, HotWeights
from pulsesync.device.memory import (
    INTEGERS,
    DeviceStream,
    DeviceView,
    StreamPoint,
    Tensors,
    ThreadPoint,
    check_reach,
    meet,
    on,
    on_host,
    pinned,
    starts_of,
    to_host,
    to_stream,
    view,
    worker_of,
)
from pulsesync.device.pile import Pile, PileAddresses, make_piles, place_of, rectangle
from pulsesync.device.state import DeviceState, DeviceTransition
from pulsesync.device.streamed import BasePiece, BaseStream, cut
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
from pulsesync.state.views import CASTS, SourceMarks, find_casts, mapping_of

FEW = 1 << 13  # changes of a tile up to which they are brought to the host together with those of others


@dataclass(frozen=True)
class DeviceSource:
    """A source on a device as it is published."""

    views: Mapping[str, DeviceView]
    dtypes: Mapping[str, str]  # of tensors that are cast
    place: object | None = None  # as long as it is the same, the tensors are where they were; None: that is not known

    def without_weights(self) -> "DeviceSource":
        """The same without what keeps the memory of the weights alive."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return replace(self, views={name: replace(view, tensor=nothing) for name, view in self.views.items()})

    def again(self, tensors: Mapping[str, Any]) -> "DeviceSource":
        """The same with the weights of a source that has the marks of the one that this was made of."""
        return replace(self, views=_LaterDeviceViews(self.views, tensors))

    def detached(self) -> "DeviceSource":
        """The same with the memory that the tensors have now, whatever they are assigned later."""
        if not isinstance(self.views, _LaterDeviceViews):
            return self
        return replace(self, views=self.views.detached())

    @property
    def written(self) -> list[int]:
        """How often torch has written each tensor in place; not by kernels of others, nor through `.data`."""
        views = self.views
        tensors = views.tensors if isinstance(views, _LaterDeviceViews) else [one.tensor for one in views.values()]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    @property
    def tensors(self) -> Tensors:
        """The tensors as they are, flat; those that are cast are masters."""
        return Tensors(_Flats(self.views), self.place, self.dtypes)

    def spec(self, name: str) -> TensorSpec:
        spec = self.views[name].spec
        return TensorSpec(name, self.dtypes[name], spec.shape) if name in self.dtypes else spec

    def cast(self, name: str) -> torch.Tensor:
        """A tensor, flat, as it is published: a copy where it is cast or not contiguous."""
        return self.tensors.published(name)


class _LaterDeviceViews(Mapping[str, DeviceView]):
    """Views of tensors of which all but the memory is known: made when they are asked for."""

    def __init__(self, known: Mapping[str, DeviceView], tensors: Mapping[str, Any]) -> None:
        self._known, self._tensors = known, tensors

    def detached(self) -> "_LaterDeviceViews":
        return _LaterDeviceViews(self._known, {name: self._tensors[name].detach() for name in self._known})

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._tensors[name] for name in self._known]

    def __getitem__(self, name: str) -> DeviceView:
        tensor = self._tensors[name].detach()
        return replace(self._known[name], tensor=tensor.view(INTEGERS[tensor.element_size()]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class _Flats(Mapping[str, torch.Tensor]):
    """The tensors of views, flat: made when they are asked for."""

    def __init__(self, views: Mapping[str, DeviceView]) -> None:
        self._views = views

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name].flat

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class SourceReader:
    """Reads sources on a device; one that has the memory of the last at about 1 µs a tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._devices: Mapping[str, torch.device] = {}  # that work on the tensors
        self.in_host_memory = False  # some of the last source
        self._last: tuple[SourceMarks, Mapping[str, str], Shards] | None = None  # without the weights

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        tensors = mapping_of(source)
        if self._last is not None and self._last[1] == cast and self._last[0].fit(tensors):
            known = self._last[2]
            return replace(known, published=known.published.again(tensors))
        shards, marks = shards_of(tensors, cast, self._read), SourceMarks.of(tensors)
        self._last = None
        if marks is not None:
            shards = replace(shards, published=replace(shards.published, place=object()))
            self._last = marks, cast, replace(shards, published=shards.published.without_weights())
        return shards

    def _read(self, tensors: Mapping[str, Any], cast: Mapping[str, str]) -> tuple[DeviceSource, Mapping[str, str]]:
        views, ties = view(tensors)
        flats = {name: view.tensor for name, view in views.items() if view.tensor.numel()}
        check_reach(flats, self._device)
        devices = {name: worker_of(flat, self._device) for name, flat in flats.items()}
        if away := next((name for name in devices if self._devices.get(name, devices[name]) != devices[name]), None):
            raise StateError(
                f"tensor {away!r} is on {devices[away]}, and was on {self._devices[away]}: leave it where the first "
                "version was published from, or begin with another publisher",
                tensor=away,
            )
        self._devices = devices
        self.in_host_memory = self._device.type == "cuda" and any(flat.device.type == "cpu" for flat in flats.values())
        return DeviceSource(views, find_casts((v.spec for v in views.values()), cast)), ties


class DeviceBaseline:
    """Source on a device, base there as well (keep "device") or in pinned host memory ("host").

    A source that is spread over several devices has its base spread in the same way; device: the first of them.
    """

    hands_over = False

    def __init__(self, device: torch.device, keep: Literal["device", "host"]) -> None:
        self.device, self.keep = device, keep
        self._stream: DeviceStream | None = None  # of all devices of a base, once there is one
        self._reader = SourceReader(device)
        self._base_stream = BaseStream(device)
        self._over: ThreadPoint | None = None  # where the last comparison in a thread ends
        self._pairs: tuple[TileShare, DeviceState, Mapping[str, str], Sequence[_PilePair]] | None = None

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        return self._reader.read(source, cast)

    def copy(self, share: TileShare, shards: Shards) -> AnyState:
        flats, workers = {}, {}
        for name, window in share.tensors.items():
            if name in share.windows:
                weights = _weights_in(window, shards)
                flats[name], workers[name] = self._own(weights), worker_of(weights, self.device)
        tensors = shards.published.tensors
        places = _places_of(share)
        devices = {name: worker_of(tensors[name], self.device) for name in tensors}
        meet(list(dict.fromkeys(devices.values())))
        for pile in make_piles(share.tiles, places, devices):
            with on(pile.device):
                for name, run in _bundles(pile, tensors).items():
                    flats[name], workers[name] = self._own(run), pile.device
        return DeviceState(share.layout, flats, places=share.held, device=self.device, workers=workers)

    def _own(self, weights: torch.Tensor) -> torch.Tensor:
        """A copy of weights where the base is kept, flat."""
        return self._pinned(weights) if self.keep == "host" else self._clone(weights)

    def _clone(self, weights: torch.Tensor) -> torch.Tensor:
        """A copy of weights on their device, flat; in host memory it is pinned, so that a GPU can read it there."""
        if weights.device.type == "cpu":
            return self._pinned(weights)
        return weights.clone(memory_format=torch.contiguous_format).view(-1)

    def _pinned(self, weights: torch.Tensor) -> torch.Tensor:
        return on_host(weights.shape, weights.dtype, self.device).copy_(weights).view(-1)

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        out = {}
        for name, window in share.windows.items():
            dtype = _torch_dtype(window.tensor, shards.published)
            out[name] = self._clone(_weights_in(window, shards)).view(dtype).view(window.local.shape)
        return out

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        if share.whole and self.keep == "device" and not share.layout.bundles:
            return state
        flats: dict[str, Any] = {name: flat for name, flat in state.flats.items() if name in share.tensors}
        if isinstance(state, DeviceState):  # the host's, if the share has no tiles
            for pile in state.piles:
                with on(pile.device):
                    flats |= _bundles(pile, state.tensors)
        workers = {name: worker_of(flat, self.device) for name, flat in flats.items()}
        if self.keep == "host":
            flats = {name: self._own(flat) for name, flat in flats.items()}
        kept = DeviceState(share.layout, flats, places=share.held, device=self.device, workers=workers)
        kept.history = kept.bring(state.history)
        return kept

    def compare(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> "DeviceDifference":
        assert isinstance(state, DeviceState)
        self.wait()
        pairs, stream = self._pairs_of(share, state, shards.published.dtypes), self._stream_of(state)
        found = self._find(pairs, state, stream, shards.published, lambda one, new: _find_at_once(one, new, state))
        state.readers.append(found.found)
        if self._reader.in_host_memory:  # which the caller may write at once: no stream keeps it waiting
            found.found.wait()
        return found

    def wait(self) -> None:
        if self._over is not None:
            self._over.wait()

    def compare_later(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> "DeviceDifference | LaterDifference":
        """Compare in a thread with a base in host memory, which comes over the bus piece by piece.

        A source on several devices is compared at once.
        """
        assert isinstance(state, DeviceState)
        if self.keep != "host" or len(state.devices) > 1:
            return self.compare(share, state, shards, codec, last)
        self.wait()  # there are two buffers for the base
        pairs, stream = self._pairs_of(share, state, shards.published.dtypes), self._stream_of(state)
        source = shards.published.detached()
        launched, written = StreamPoint(self.device), source.written

        def compare() -> DeviceDifference:
            with on(self.device), self._base_stream.after(launched):
                pieces = [piece for pair in pairs for one in pair.alike for piece in one.pieces]
                arriving = self._base_stream.bring(pieces, state.tensors)
                found = self._find(pairs, state, stream, source, lambda one, new: _find_in_pieces(one, new, arriving))
            if source.written != written:
                raise StateError(
                    "the weights changed while they were compared in the background, so they are not published: hold "
                    "every optimizer that changes them, leave out buffers that a forward pass writes, or publish with "
                    "no optimizer held"
                )
            return found

        later = LaterDifference(compare)
        try:
            self._over = later.over
            state.readers.append(later.over)
            start(later.run)
        except BaseException as e:  # so that nobody waits for a thread that was never started
            later.run()
            if not isinstance(e, RuntimeError):  # that of an interpreter that is ending, which starts no threads
                raise
        return later

    def _stream_of(self, state: DeviceState) -> DeviceStream:
        """The stream in which a base is read and written, on all its devices."""
        if self._stream is None:
            self._stream = DeviceStream(*state.devices)
        state.stream = self._stream
        return self._stream

    def _find(
        self,
        pairs: "Sequence[_PilePair]",
        state: DeviceState,
        stream: DeviceStream,
        source: DeviceSource,
        find: "Callable[[_AlikeTiles, PileAddresses], PileChanges]",
    ) -> "DeviceDifference":
        """Launch the comparison of all piles in the current streams."""
        runs = []
        meet(state.devices)
        for pair in pairs:
            with on(pair.here.device):
                run = _compare(pair, source, find)
            if run.count:
                runs.append(run)
        meet(state.devices)
        return DeviceDifference(state, stream, runs, StreamPoint(*state.devices))

    def _pairs_of(self, share: TileShare, state: DeviceState, dtypes: Mapping[str, str]) -> "Sequence[_PilePair]":
        """The piles of a base, each with the same tiles in the shards: known as long as these stay."""
        known = self._pairs
        if known is None or known[0] is not share or known[1] is not state or known[2] != dtypes:
            places = _places_of(share)
            both = [(pile, pile.elsewhere(places)) for pile in state.piles]
            known = self._pairs = share, state, dtypes, [_PilePair.of(*pair, dtypes) for pair in both]
        return known[3]


@dataclass(frozen=True)
class _PilePair:
    """Tiles as they lie in a base and in a source.

    Masters are rounded to BF16 as they are read; where a pile has others too, the two kinds are compared apart.
    """

    here: Pile
    alike: "Sequence[_AlikeTiles]"

    @classmethod
    def of(cls, here: Pile, there: Pile, dtypes: Mapping[str, str]) -> "_PilePair":
        masters: list[int] = []  # ordinals
        others: list[int] = []
        for place in there.places:
            alike = bool(dtypes) and all(dtypes.get(name) == "BF16" for name in place.names)
            (masters if alike else others).append(place.ordinal)
        kinds = [(some, some is masters) for some in (masters, others) if some]
        return cls(here, [_AlikeTiles(here.part(some), there.part(some), cast) for some, cast in kinds])


@dataclass(frozen=True)
class _AlikeTiles:
    """Tiles of a pile that are compared at once: as they lie in a base and in a source, and if that has masters."""

    here: Pile
    there: Pile
    cast: bool

    @cached_property
    def pieces(self) -> list[BasePiece]:
        """Of the base, to be brought to the device one after the other."""
        return cut(self.here)


def _places_of(share: TileShare) -> dict[int, Tile]:
    """Where the tiles of a share lie in its shards."""
    return {ordinal: place_of(place) for ordinal, place in share.places.items()}


def _bundles(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bundles of a pile whose weights lie in many tensors: each in memory of its own, by name."""
    if pile.pieces is None:
        return {}
    run = pile.pieces.gather(flats, pile.kind.itemsize)
    tiles = pile.tiles[pile.first_gathered :]
    begins = pile.pieces.starts.tolist()
    return {tile.tensor.name: run[at : at + tile.size] for tile, at in zip(tiles, begins, strict=False)}


def _weights_in(window: Window, shards: Shards) -> torch.Tensor:
    """The weights of a window that lies in a shard, as they are published: in place where they are not cast."""
    name = window.tensor.name
    shard = shards.windows[name]
    row, column = window.rows[0] - shard.rows[0], window.columns[0] - shard.columns[0]
    place = Tile(0, shard.local, row, column, window.local.rows, window.local.columns)
    return rectangle(shards.published.cast(name), place)


def _torch_dtype(spec: TensorSpec, source: DeviceSource) -> torch.dtype:
    if spec.name in source.dtypes:
        found: torch.dtype = getattr(torch, CASTS[spec.dtype])
        return found
    return source.views[spec.name].dtype


def _compare(
    pair: _PilePair, source: DeviceSource, find: Callable[[_AlikeTiles, PileAddresses], PileChanges]
) -> PileChanges:
    """Compare the tiles of a pile with the source."""
    found = [find(one, one.there.locate(source.tensors, itemsize=4 if one.cast else None)) for one in pair.alike]
    if len(found) == 1:
        return found[0]
    runs = [on_whole(run, pair.here) for run in found]
    return next(iter(compose(runs, ())), runs[0])


def _find_at_once(one: _AlikeTiles, new: PileAddresses, state: DeviceState) -> PileChanges:
    return find_changes(one.here, one.here.locate(state.tensors), new, one.cast)


def _find_in_pieces(
    one: _AlikeTiles, new: PileAddresses, arriving: Iterator[tuple[BasePiece, PileAddresses]]
) -> PileChanges:
    found = []
    for piece, old in islice(arriving, len(one.pieces)):
        there = replace(new, at=new.at[piece.blocks].clone())  # Triton compiles anew for a table at an odd address
        found.append(find_changes(piece.pile, old, there, one.cast))
    return join(one.here, found)


@dataclass(frozen=True)
class DeviceDifference:
    """What differs on a device."""

    state: DeviceState
    stream: DeviceStream
    runs: Sequence[PileChanges]  # one a pile, in order
    found: StreamPoint

    def after(self, done: AnyTransition) -> "DeviceDifference":
        assert isinstance(done, DeviceTransition)
        with self.stream([self.found]):
            runs = compose([run.inverse() for run in done.changes], self.runs)
        return replace(self, runs=runs)

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
        by_block: BlockMoves = {}
        for dtype, some in groupby(self.runs, lambda run: run.pile.tiles[0].tensor.dtype):
            if codec in ("auto", "context", "history") and DTYPES[dtype].exponent_shift is not None:
                piles = code_piles([(run, _locate(run.pile, state)) for run in some], known, len(shared))
                shared.append(piles.table)
                coded |= piles.tiles
                hot |= piles.hot if known is not None else {}
                by_block = {**by_block, **piles.moved}
        by_block = {**by_block, **block_moves(run for run in self.runs if run.pile not in by_block)}
        found = (diff for run in self.runs for diff in diffs_of(run, self.stream))
        diffs = sorted(found, key=lambda diff: diff.tile.ordinal)
        by = moves(by_block)
        after = {diff.tile.ordinal: state.sums[diff.tile.ordinal] + by[diff.tile.ordinal] for diff in diffs}
        # Nearly always all that is coded is also chosen, so that the device finds this while the host writes the file.
        likely = _cuts_of(coded.items())
        remembering = state.begin_remember(memories, likely, self.runs, set(after), hot)
        allocate = pinned if state.device.type == "cuda" else new_bytes
        done = patch.finish(state.layout, diffs, state, shared, coded, after, codec, allocate=allocate)
        cuts = _cuts_of((diff.tile.ordinal, choice) for diff, choice in zip(diffs, done.chosen, strict=True))
        if cuts != likely:
            remembering = state.begin_remember(memories, cuts, self.runs, set(after), hot)
        later = remembering()
        sums: dict[int, Sum] = {**state.sums, **after}
        return EncodedPart(done.id, done.data, (), after), DeviceTransition(self.runs, sums, later)


class LaterDifference:
    """A difference that a thread is still looking for; `encode` raises what stopped it.

    Args:
        find: Compares, and waits for its end.
    """

    def __init__(self, find: Callable[[], DeviceDifference]) -> None:
        self._find: Callable[[], DeviceDifference] | None = find
        self._begun = threading.Lock()  # by the first that runs it
        self._found: Future[DeviceDifference] = Future()
        self.over = ThreadPoint()  # neither source nor base is read any more

    def run(self) -> None:
        """Look for it, unless another thread has begun. Raises nothing."""
        if not self._begun.acquire(blocking=False):
            return
        assert self._find is not None
        try:
            self._found.set_result(self._find())
        except BaseException as e:  # noqa: BLE001 - carried to the thread that encodes and raised there
            self._found.set_exception(e)
        finally:
            self._find = None  # and with it the source
            self.over.reached()

    def after(self, done: AnyTransition) -> "DeviceDifference | LaterDifference":
        if self._found.exception() is not None:
            return self  # the version that is encoded fails, not the one that was committed
        return self._found.result().after(done)

    def try_step(self) -> None:
        """As for the difference that is found."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        return self._found.result().encode(last, codec)


def _locate(pile: Pile, state: DeviceState) -> PileAddresses:
    with on(pile.device):
        return pile.locate(state.tensors)


def _cuts_of(tiles: Iterable[tuple[int, CodedTile]]) -> dict[int, int]:
    """The cuts of those tiles, by ordinal, that are coded with a history."""
    return {ordinal: tile.cut for ordinal, tile in tiles if tile.codec == Codec.HISTORY}


def diffs_of(run: PileChanges, stream: DeviceStream) -> "list[DeviceDiff]":
    """The changed tiles of a run."""
    (starts,) = to_host(run.starts)
    fetched = _Fetched(run, starts, stream)
    changed = np.diff(starts[run.pile.first_block]).tolist()
    both = enumerate(zip(run.pile.tiles, changed, strict=True))
    return [DeviceDiff(tile, count, fetched, i) for i, (tile, count) in both if count]


class _Fetched:
    """The changes of tiles of a run on the host: of tiles that have few, all at once as soon as one is asked for."""

    def __init__(self, run: PileChanges, starts: NDArray[np.int64], stream: DeviceStream) -> None:
        self._run, self._starts, self._stream, self._lock = run, starts, stream, threading.Lock()
        self._borders = starts[run.pile.first_block]
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

    def begins(self, i: int) -> NDArray[np.int64]:
        """Of each change of a tile, where in the tile that begins with which it is coded."""
        pile = self._run.pile
        first, last = pile.first_block[i : i + 2].tolist()
        return np.repeat(pile.host_begins[first:last], np.diff(self._starts[first : last + 1]))

    def _fetch_few(self) -> tuple[NDArray[np.int64], Sequence[NDArray[Any]]]:
        """Where those of each tile begin, and all of them."""
        counts, run = np.diff(self._borders), self._run
        counts[counts > FEW] = 0
        begins = starts_of(counts)
        index = np.arange(begins[-1]) + np.repeat(self._borders[:-1] - begins[:-1], counts)
        with self._stream():
            chosen = to_stream(index, run.pile.device)
            return begins, to_host(run.positions[chosen], run.old[chosen], run.new[chosen])


class DeviceDiff(NamedTuple):
    """What changed in a tile, brought to the host only where something asks for it (see `format.diff.TileChanges`)."""

    tile: Tile
    changed: int
    fetched: _Fetched
    number: int  # of the tile in the pile

    def positions(self) -> NDArray[np.int64]:
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

    def _fetch(self) -> tuple[NDArray[np.int64], Bits, Bits]:
        """Positions in the tile, old and new bits."""
        where, old, new = self.fetched.tile(self.number)
        bits = self.tile.tensor.kind.bits
        return where + self.fetched.begins(self.number), old.view(bits), new.view(bits)
