"""The publisher's baseline on a GPU: weights are compared there with a base on the GPU or in pinned host memory.

What `compare` launches in the caller's stream reads the trainer's weights; everything after it reads the base and the
changes that were found, in a separate stream. So training may continue at once: what it launches comes after the
comparison. `compare_later` launches nothing in the caller's stream: a thread compares, and the trainer calls `wait`
before it changes the weights.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from pulsesync.core.threads import start
from pulsesync.core.types import Tile
from pulsesync.device.changes import PileChanges, compose
from pulsesync.device.compare import AlikeTiles, PilePair, compare_pile, find_at_once, find_in_pieces
from pulsesync.device.memory import DeviceStream, StreamPoint, ThreadPoint, on, on_host, order_streams, worker_of
from pulsesync.device.parts import encode_changes
from pulsesync.device.pile import Pile, PileAddresses, make_piles, place_of, rectangle
from pulsesync.device.source import DeviceSource, SourceReader
from pulsesync.device.state import DeviceBackend, backend_of
from pulsesync.device.streamed import BaseStream
from pulsesync.device.tracked import DeviceHistory
from pulsesync.errors import StateError
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.state.backend import Transition
from pulsesync.state.sharding import Shards, TileShare
from pulsesync.state.slices import Window
from pulsesync.state.views import torch_dtype
from pulsesync.state.weights import WeightState


class DeviceBase(DeviceBackend):
    """The last version that a publisher has sent: coded at once, because that takes less time."""

    pieces = 1


class DeviceBaseline:
    """Source on a device, the first of several; base there as well ("device") or in pinned host memory ("host")."""

    def __init__(self, device: torch.device, keep: Literal["device", "host"]) -> None:
        self.device, self.keep = device, keep
        self._stream: DeviceStream | None = None  # of all devices of a base, once there is one
        self._reader = SourceReader(device)
        self._base_stream = BaseStream(device)
        self._over: ThreadPoint | None = None  # the end of the last comparison in a thread
        self._pairs: tuple[TileShare, DeviceBackend, Mapping[str, str], Sequence[PilePair]] | None = None

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        return self._reader.read(source, cast)

    def copy(self, share: TileShare, shards: Shards) -> WeightState:
        flats, workers = {}, {}
        for name, window in share.tensors.items():
            if name in share.windows:
                weights = _weights_in(window, shards)
                flats[name], workers[name] = self._own(weights), worker_of(weights, self.device)
        tensors = shards.published.tensors
        places = _places_of(share)
        devices = {name: worker_of(tensors[name], self.device) for name in tensors}
        order_streams(list(dict.fromkeys(devices.values())))
        for pile in make_piles(share.tiles, places, devices):
            with on(pile.device):
                for name, run in _bundles(pile, tensors).items():
                    flats[name], workers[name] = self._own(run), pile.device
        return WeightState(self._backend(share, flats, workers))

    def _backend(
        self, share: TileShare, flats: Mapping[str, torch.Tensor], workers: Mapping[str, torch.device]
    ) -> DeviceBackend:
        return DeviceBase(share.layout, flats, places=share.copy_places, device=self.device, workers=workers)

    def _own(self, weights: torch.Tensor) -> torch.Tensor:
        """A flat copy of weights in the memory of the base."""
        return self._pinned(weights) if self.keep == "host" else self._clone(weights)

    def _clone(self, weights: torch.Tensor) -> torch.Tensor:
        """A flat copy of weights on their device; in host memory it is pinned, so that a GPU can read it."""
        if weights.device.type == "cpu":
            return self._pinned(weights)
        return weights.clone(memory_format=torch.contiguous_format).view(-1)

    def _pinned(self, weights: torch.Tensor) -> torch.Tensor:
        return on_host(weights.shape, weights.dtype, self.device).copy_(weights).view(-1)

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        out = {}
        for name, window in share.windows.items():
            dtype = torch_dtype(window.tensor.dtype)
            out[name] = self._clone(_weights_in(window, shards)).view(dtype).view(window.local.shape)
        return out

    def adopt(self, share: TileShare, state: WeightState) -> WeightState:
        flats: dict[str, Any] = {name: flat for name, flat in state.flats.items() if name in share.tensors}
        if isinstance(state.backend, DeviceBackend):  # in host memory, if the share has no tiles
            for pile in state.backend.piles:
                with on(pile.device):
                    flats |= _bundles(pile, state.backend.tensors)
        workers = {name: worker_of(flat, self.device) for name, flat in flats.items()}
        if self.keep == "host":
            flats = {name: self._own(flat) for name, flat in flats.items()}
        kept = WeightState(self._backend(share, flats, workers), state.sums)
        kept.history = kept.backend.load_history(state.history)
        return kept

    def compare(self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName) -> "DeviceDifference":
        base = backend_of(state)
        self.wait()
        pairs, stream = self._pairs_of(share, base, shards.published.dtypes), self._stream_of(base)
        found = self._find(pairs, state, stream, shards.published, lambda one, new: find_at_once(one, new, base))
        base.readers.append(found.found)
        if self._reader.in_host_memory:  # the caller may write host memory at once: no stream delays that
            found.found.wait()
        return found

    def wait(self) -> None:
        if self._over is not None:
            self._over.wait()

    def compare_later(
        self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName
    ) -> "DeviceDifference | LaterDifference":
        """Compare with a base in host memory in a thread, piece by piece; a source on several devices at once."""
        base = backend_of(state)
        if self.keep != "host" or len(base.devices) > 1:
            return self.compare(share, state, shards, codec)
        self.wait()  # there are two buffers for the base
        pairs, stream = self._pairs_of(share, base, shards.published.dtypes), self._stream_of(base)
        source = shards.published.detached()
        launched, written = StreamPoint(self.device), source.written

        def compare() -> DeviceDifference:
            with on(self.device), self._base_stream.after(launched):
                pieces = [piece for pair in pairs for one in pair.alike for piece in one.pieces]
                arriving = self._base_stream.buffered(pieces, base.tensors)
                found = self._find(pairs, state, stream, source, lambda one, new: find_in_pieces(one, new, arriving))
            if source.written != written:
                raise StateError(
                    "the weights changed while they were compared in the background, so they are not published: call "
                    "hold() with every optimizer that changes them and leave out buffers that a forward pass writes, "
                    "or do not call hold()"
                )
            return found

        later = LaterDifference(compare)
        try:
            self._over = later.over
            base.readers.append(later.over)
            start(later.run)
        except BaseException as e:  # so that no caller waits for a thread that was never started
            later.run()
            if not isinstance(e, RuntimeError):  # raised when the interpreter is ending and starts no threads
                raise
        return later

    def _stream_of(self, base: DeviceBackend) -> DeviceStream:
        """The stream in which a base is read and written, on all its devices."""
        if self._stream is None:
            self._stream = DeviceStream(*base.devices)
        base.stream = self._stream
        return self._stream

    def _find(
        self,
        pairs: "Sequence[PilePair]",
        state: WeightState,
        stream: DeviceStream,
        source: DeviceSource,
        find: "Callable[[AlikeTiles, PileAddresses], PileChanges]",
    ) -> "DeviceDifference":
        """Launch the comparison of all piles in the current streams."""
        runs, devices = [], backend_of(state).devices
        order_streams(devices)
        for pair in pairs:
            with on(pair.here.device):
                run = compare_pile(pair, source, find)
            if run.count:
                runs.append(run)
        order_streams(devices)
        return DeviceDifference(state, stream, runs, StreamPoint(*devices))

    def _pairs_of(self, share: TileShare, base: DeviceBackend, dtypes: Mapping[str, str]) -> "Sequence[PilePair]":
        """The piles of a base, each with the same tiles in the shards: cached while the shards stay the same."""
        known = self._pairs
        if known is None or known[0] is not share or known[1] is not base or known[2] != dtypes:
            places = _places_of(share)
            both = [(pile, pile.in_tensors(places)) for pile in base.piles]
            known = self._pairs = share, base, dtypes, [PilePair.of(*pair, dtypes) for pair in both]
        return known[3]


def _places_of(share: TileShare) -> dict[int, Tile]:
    """Where the tiles of a share lie in its shards."""
    return {ordinal: place_of(place) for ordinal, place in share.places.items()}


def _bundles(pile: Pile, flats: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bundles of a pile whose weights lie in many tensors: each in its own memory, by name."""
    if pile.placement.pieces is None:
        return {}
    run = pile.placement.pieces.gather(flats, pile.kind.itemsize)
    tiles = pile.tiles[pile.placement.first_gathered :]
    begins = pile.placement.pieces.starts.tolist()
    return {tile.tensor.name: run[at : at + tile.size] for tile, at in zip(tiles, begins, strict=False)}


def _weights_in(window: Window, shards: Shards) -> torch.Tensor:
    """The weights of a window of a shard, as they are published: a view if they are not cast."""
    name = window.tensor.name
    shard = shards.windows[name]
    row, column = window.rows[0] - shard.rows[0], window.columns[0] - shard.columns[0]
    place = Tile(0, shard.local, row, column, window.local.rows, window.local.columns)
    return rectangle(shards.published.tensors.published(name), place)


@dataclass(frozen=True)
class DeviceDifference:
    """A difference on a device."""

    state: WeightState
    stream: DeviceStream
    runs: Sequence[PileChanges]  # one per pile, in order
    found: StreamPoint

    @property
    def changed(self) -> int:
        return sum(run.count for run in self.runs)

    def after(self, done: Transition) -> "DeviceDifference":
        with self.stream([self.found]):
            runs = compose([run.inverse() for run in done.changes], self.runs)
        return replace(self, runs=runs)

    def try_step(self) -> None:
        """Does nothing: coding changes on the device is faster than copying them to the host, which `step` needs."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, Transition]:
        with self.stream([self.found]):
            memories = self.state.history if last.next_patch[1] > 1 else DeviceHistory()
            return encode_changes(self.state, self.runs, memories, codec, self.stream)


class LaterDifference:
    """A difference that a thread is still computing; `encode` raises the error of the thread."""

    def __init__(self, find: Callable[[], DeviceDifference]) -> None:
        self._find: Callable[[], DeviceDifference] | None = find
        self._begun = threading.Lock()  # acquired by the first thread that runs it
        self._found: Future[DeviceDifference] = Future()
        self.over = ThreadPoint()  # from then on, neither source nor base is read

    def run(self) -> None:
        """Compute it, unless another thread has begun. Raises nothing."""
        if not self._begun.acquire(blocking=False):
            return
        assert self._find is not None
        try:
            self._found.set_result(self._find())
        except BaseException as e:  # noqa: BLE001 - carried to the thread that encodes and raised there
            self._found.set_exception(e)
        finally:
            self._find = None  # frees the source as well
            self.over.set()

    @property
    def changed(self) -> int:
        return self._found.result().changed

    def after(self, done: Transition) -> "DeviceDifference | LaterDifference":
        if self._found.exception() is not None:
            return self  # the error is raised when this version is encoded, not for the one that was committed
        return self._found.result().after(done)

    def try_step(self) -> None:
        """As for the difference that is found."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, Transition]:
        return self._found.result().encode(last, codec)
