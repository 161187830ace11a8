"""The weights of a rank on a GPU: the methods of `host_weights`, with the same bytes.

Imported only if a rank has GPU tensors.

Messages with whole weights, or with a table of changes, are made and read on the device. Parts are assembled and
checked on the host, because they are hashed; only their streams are copied.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.device.bundles import (
    ChangeTable,
    MessageShapes,
    SourceBundles,
    TileSums,
    count_changed,
    count_digest_changes,
    count_whole,
    read_table,
    with_old,
    write_table,
)
from pulsesync.device.changes import PileChanges, on_whole
from pulsesync.device.memory import DeviceStream, StreamPoint, order_streams, to_host, to_stream
from pulsesync.device.parts import encode_changes, host_bytes
from pulsesync.device.state import DeviceBackend, backend_of
from pulsesync.device.tracked import DeviceHistory
from pulsesync.format.body import Body
from pulsesync.group import messages
from pulsesync.group.bundles import BundlePlan, places_of, receiver_tensors
from pulsesync.group.cost_model import SAMPLE, Method
from pulsesync.group.messages import CODECS, NOTHING, TRAILER, Bucket, Message, SyncTimes, Table
from pulsesync.state.backend import Transition
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.sharding import Shards
from pulsesync.state.weights import WeightState


class _Work:
    """Launches of one end, in a separate stream, after what the caller had launched when the sync began."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices, self._stream = devices, DeviceStream(*devices)
        self._begun: StreamPoint | None = None

    def begin(self) -> None:
        """Order all later work after what the calling thread has launched."""
        self._begun = StreamPoint(*self.devices)

    @contextmanager
    def __call__(self) -> Iterator[DeviceStream]:
        """Launch work in this stream inside the context, and wait for its end."""
        with self._stream([self._begun] if self._begun else []):
            yield self._stream


class _PartRoom:
    """Memory for a part that is also the message: followed by the trailer's bytes."""

    message: Bits

    def __init__(self, device: torch.device) -> None:
        self._allocate = host_bytes(device)

    def __call__(self, size: int) -> Bits:
        self.message = self._allocate(size + TRAILER)
        return self.message[:size]


class DeviceSourceWeights:
    """What a rank sends: its weights, and a copy of what it last sent, unless all weights are always sent whole."""

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards, device: torch.device) -> None:
        self._wire, self._tiles, self._device = wire, tiles, device
        self.bundles = SourceBundles(wire.layout, places_of(wire, tiles, shards), shards.published, device)
        self._work = _Work(_devices(shards, device))

    @property
    def state(self) -> WeightState | None:
        return self.bundles.base

    def bind(self, wire: BundlePlan, shards: Shards) -> None:
        self.bundles.bind(places_of(wire, self._tiles, shards), shards.published)
        self._work = _Work(_devices(shards, self._device))

    def begin(self) -> None:
        """A sync begins: work on the weights comes after what the calling thread has launched."""
        self._work.begin()

    def count_differing(self, begins: Mapping[int, int]) -> dict[int, int]:
        with self._work():
            return self.bundles.sample(begins, SAMPLE)

    def encode(self, tiles: Sequence[Tile], method: Method, clock: SyncTimes) -> Bucket | None:
        with self._work() as stream:
            if method == "dense":
                return self._dense(tiles, clock)
            with clock.timed("diff"):
                runs = self.bundles.compare(tiles)
            if not runs:
                return None
            if method == "plain":
                return self._plain(runs, clock)
            assert self.bundles.base is not None
            room = _PartRoom(self._device)
            with clock.timed("encode"):
                part, _ = encode_changes(self.bundles.base, runs, DeviceHistory(), CODECS[method], stream, room)
        return Bucket(room.message, runs, _count(runs), {}, part.sums)

    def _dense(self, tiles: Sequence[Tile], clock: SyncTimes) -> Bucket:
        table = Table.of_whole(self._wire, tiles)
        with clock.timed("encode"):
            message = _new_message(table, self._device)
            order_streams(self._work.devices)
            some = self.bundles.gather(_begins(table), message)
        with clock.timed("digest"):
            sums = count_whole(some, message).of(table.ordinals)
        _write_head(message, table, sums)
        named = table.named(sums)
        return Bucket(message, (), 0, dict.fromkeys(named), named)

    def _plain(self, runs: Sequence[PileChanges], clock: SyncTimes) -> Bucket:
        assert self.bundles.base is not None
        with clock.timed("digest"):
            by = count_digest_changes(runs)
        with clock.timed("encode"):
            starts = to_host(*(run.starts for run in runs))
            changed = count_changed(runs, starts, len(self._wire.layout.tiles))
            ordinals = np.flatnonzero(changed)
            table = Table(self._wire, ordinals, changed[ordinals])
            sums = messages.sums_of(self.bundles.base.sums, ordinals) + by.of(ordinals)
            message = _new_message(table, self._device)
            order_streams(self._work.devices)
            changes = _change_table(self._wire, table)
            for run, at in zip(runs, starts, strict=True):
                write_table(run, at, changes, message)
            _write_head(message, table, sums)
        return Bucket(message, runs, _count(runs), {}, table.named(sums))

    def saved(self, tiles: Sequence[Tile], clock: SyncTimes, sums: Mapping[int, Sum]) -> Bucket:
        table = Table.of_whole(self._wire, tiles)
        with clock.timed("encode"), self._work():
            message = _new_message(table, self._device)
            order_streams(self._work.devices)
            self.bundles.saved(_begins(table), message)
            _write_head(message, table, messages.sums_of(sums, table.ordinals))
        return Bucket(message, (), 0, {}, {tile.ordinal: sums[tile.ordinal] for tile in tiles})

    def write_changes(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> Transition | None:
        """Write what was sent into the copy; return the transition back. None: there is no copy yet."""
        if self.bundles.base is None:
            return None
        return _write_changes(self.bundles.base, buckets, sums)

    def make_room(self) -> None:
        self.bundles.make_room()

    def write_whole(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        """Copy the weights again, so that messages need not stay in memory. Raises: StateError: they have changed."""
        with self._work():
            for bucket in buckets:
                self.bundles.keep_copy({ordinal: sums[ordinal] for ordinal in bucket.whole})

    def forget(self, buckets: Sequence[Bucket]) -> None:
        self.bundles.drop_copy()


class DeviceReceiverWeights:
    """What a rank receives, in its live weights."""

    def __init__(
        self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards, sums: Mapping[int, Sum], device: torch.device
    ) -> None:
        self._wire, self._layout, self._device = wire, wire.layout, device
        self._local = np.array([tile.ordinal for tile in tiles], np.int64)
        places = places_of(wire, tiles, shards)
        flats, copies = receiver_tensors(shards.published, wire.ties)
        self.backend = DeviceBackend(wire.layout, flats, copies, places=places, device=device)
        self.state = WeightState(self.backend, sums)
        self._shapes = MessageShapes(self.backend.piles.parts)
        self._work = _Work(self.backend.devices)

    def begin(self) -> None:
        """A sync begins: work on the weights comes after what the calling thread has launched."""
        self._work.begin()

    def room(self, size: int, carrier: torch.device) -> Message:
        """Memory for a message of this size: on the device if messages travel from one, else pinned."""
        if carrier.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=self._device)
        return host_bytes(self._device)(size)

    def read(self, message: Message, before: Mapping[int, Sum], clock: SyncTimes) -> Bucket:
        with self._work():
            head = self._head(message)
            if bytes(head[:8]) == messages.TABLE:
                return self._read_table(head, message, before, clock)
            with clock.timed("prepare"):
                data = message if isinstance(message, np.ndarray) else to_host(message)[0]
                body = Body.of(data[:-TRAILER].data, self._layout)
                found = self.backend.decode([[body]], (), None)
                runs: list[PileChanges] = list(found.changes)
            with clock.timed("digest"):
                in_message = {entry.tile: entry.sum for entry in body.index.entries}
                PatchTransaction(self.state).check_digest_changes(found.digest_changes[0], in_message, before)
        return Bucket(NOTHING, runs, _count(runs), {}, in_message)

    def _head(self, message: Message) -> Bits:
        """The beginning of a message, on the host: all bytes that may describe tiles."""
        if isinstance(message, np.ndarray):
            return message
        head: Bits = to_host(message[: Table.head_size(len(self._layout.tiles))])[0]
        return head

    def _read_table(self, head: Bits, message: Message, before: Mapping[int, Sum], clock: SyncTimes) -> Bucket:
        table, sums = Table.open(head, message.nbytes, self._wire)
        local = np.isin(table.ordinals, self._local)
        whole, sparse = (table.ordinals[local & some] for some in (table.is_whole, ~table.is_whole))
        with clock.timed("prepare"):
            here = message if isinstance(message, torch.Tensor) else _bring(message, self._device)
            order_streams(self.backend.devices)  # the other devices read it too
            runs = read_table(self.backend, sparse.tolist(), _change_table(self._wire, table), here)
        with clock.timed("undo"):
            runs, moving = with_old(self.backend, runs)
        in_message = TileSums(table.ordinals, sums)
        begins = _begins(table)
        tiles = self._shapes({n: begins[n] for n in whole.tolist()}) if whole.size else ()
        for some in tiles:
            some.make_ready(self.backend.tied)  # now, while a lack of memory can still be reported to all ranks
        with clock.timed("digest"):
            after = messages.sums_of(before, sparse) + moving().of(sparse)
            self._check(sparse, after, in_message)
            self._check(whole, count_whole(tiles, here).of(whole), in_message)
        by_ordinal = {tile.ordinal: some for some in tiles for tile in some.pile.tiles}
        return Bucket(here if whole.size else NOTHING, runs, _count(runs), by_ordinal, table.named(sums))

    def _check(self, ordinals: NDArray[np.int64], found: NDArray[np.uint64], in_message: TileSums) -> None:
        """Raises: VerificationError, if tiles would not have the digests in a message."""
        wrong = ordinals[(found != in_message.of(ordinals)).any(axis=1)]
        if wrong.size:
            raise messages.digest_mismatch(self._wire, int(wrong[0]))

    def write_changes(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> Transition:
        return _write_changes(self.state, buckets, sums)

    def write_whole(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        """Write whole tiles. If this fails, the weights are between two versions."""
        with self.state.lock:
            with self.backend.exclusive():
                for bucket in buckets:
                    for tiles in dict.fromkeys(bucket.whole.values()):
                        tiles.scatter(bucket.message, self.backend.tied)
            self.state.sums = {**self.state.sums, **sums}


def _devices(shards: Shards, device: torch.device) -> list[torch.device]:
    found = (view.tensor.device for view in shards.published.views.values())
    return list(dict.fromkeys((device, *(one for one in found if one.type == "cuda"))))


def _begins(table: Table) -> dict[int, int]:
    """Where the values of each tile begin in a message."""
    return dict(zip(table.ordinals.tolist(), table.begins[:, 1].tolist(), strict=True))


def _change_table(wire: BundlePlan, table: Table) -> ChangeTable:
    return ChangeTable.of(len(wire.layout.tiles), table.ordinals, table.changes, table.begins)


def _new_message(table: Table, device: torch.device) -> torch.Tensor:
    """A message without header and bodies; the gaps between bodies are zero."""
    if not table.is_whole.all():
        return torch.zeros(table.size, dtype=torch.uint8, device=device)
    message = torch.empty(table.size, dtype=torch.uint8, device=device)
    for gap in table.gaps:  # few: most bodies fill words of eight bytes
        message[gap] = 0
    return message


def _write_head(message: torch.Tensor, table: Table, sums: NDArray[np.uint64]) -> None:
    head = table.head(sums)
    message[: head.size] = to_stream(head, message.device)


def _bring(message: Bits, device: torch.device) -> torch.Tensor:
    """Copy a message to the device, asynchronously: the caller waits before it reuses the buffer."""
    return torch.from_numpy(message).to(device, non_blocking=True)


def _count(runs: Sequence[PileChanges]) -> int:
    return sum(run.count for run in runs)


def _write_changes(state: WeightState, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> Transition:
    """Write changes; those of some tiles of a pile are written as changes of the whole pile."""
    changes = (run for bucket in buckets for run in bucket.changes)
    backend = backend_of(state)
    runs = [on_whole(run, backend.piles.of(run.pile.tiles[0].ordinal)) for run in changes]
    local = {ordinal: sums[ordinal] for ordinal in state.places}
    return state.commit(Transition(runs, local, DeviceHistory(), backend.count_changed(runs)))
