"""The weights of a rank in host memory: makes messages to send, and checks and writes received ones.

`device_weights` has classes with the same methods for weights on a GPU.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Sum, Tile
from pulsesync.errors import FormatError
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.weights import Changes, Weights, by_block
from pulsesync.group import bundles, messages
from pulsesync.group.bundles import BundlePlan, LocalBundles
from pulsesync.group.cost_model import SAMPLE, Method
from pulsesync.group.messages import CODECS, NOTHING, TRAILER, WHOLE, Bucket, SyncTimes, Table
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.sharding import Shards
from pulsesync.state.slices import LocalTile
from pulsesync.state.weights import WeightState


class SpareBuffers:
    """Messages whose memory may be reused: new memory costs as much as the copy into it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bits]] = {}

    def take(self, size: int) -> Bits:
        """Bytes to be written over."""
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):  # two threads may call this at once
            return np.empty(size, np.uint8)

    def replace(self, messages: Iterable[Bits]) -> None:
        """Keep these, and none that were kept before."""
        self._free = {}
        for message in messages:
            self._free.setdefault(message.size, []).append(message)


class _HostWeights:
    """What a rank sends or receives: the copy of what was sent, or the live weights. sums: of the bundles, if known."""

    def __init__(self, wire: BundlePlan, backend: HostBackend, sums: Mapping[int, Sum]) -> None:
        self._wire, self.backend, self.state, self.spare = wire, backend, WeightState(backend, sums), SpareBuffers()

    def begin(self) -> None:
        """A sync begins: its work on the weights comes after that of the calling thread."""

    def write_changes(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> Transition:
        """Write what buckets change into the weights or the copy; return the transition back."""
        changes = {key: change for bucket in buckets for key, change in bucket.changes.items()}
        local = {ordinal: sums[ordinal] for ordinal in self.state.places}
        return self.state.commit(Transition(changes, local, History(), sum(bucket.changed for bucket in buckets)))

    def _bucket(self, message: Bits, changes: Changes, sums: Mapping[int, Sum]) -> Bucket:
        return Bucket(message, changes, self.backend.count_changed(changes), {}, sums)


class HostSourceWeights(_HostWeights):
    """What a rank sends: its weights, and a copy of what it last sent."""

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards) -> None:
        flats = {spec.name: NOTHING for spec in wire.layout.tensors}  # until the first sync: see `write_whole`
        places = {tile.ordinal: LocalTile(tile, True) for tile in tiles}
        super().__init__(wire, HostBackend(wire.layout, flats, places=places), {})
        self._tiles = tiles
        self.messages: list[tuple[Bits, set[int]]] = []  # whose memory contains the copy, and which tiles of it
        self.bind(wire, shards)

    def bind(self, wire: BundlePlan, shards: Shards) -> None:
        """Read the weights from these shards from now on."""
        self.live = LocalBundles(wire, self._tiles, shards)

    def count_differing(self, begins: Mapping[int, int]) -> dict[int, int]:
        """How many weights of a sample of each bundle differ from the copy, given where the samples begin."""
        counted = {}
        for tile in self._tiles:
            begin = begins[tile.ordinal]
            new = self.live.read(tile, begin, min(begin + SAMPLE, tile.size))
            old = self.state.flats[tile.tensor.name][begin : begin + new.size]
            counted[tile.ordinal] = int(np.count_nonzero(old != new))
        return counted

    def encode(self, tiles: Sequence[Tile], method: Method, clock: SyncTimes) -> Bucket | None:
        """Encode the changes of these tiles since the copy; None if nothing changed."""
        if method == "dense":
            return self._raw(self.live, tiles, clock)
        with clock.timed("diff"):
            changes = self.live.changes(tiles, self.state)
        if not changes:
            return None
        if method == "plain":
            return self._plain(changes, clock)
        codec = CODECS[method]
        with clock.timed("encode"):
            diffs = patch.diff_of(tiles, self.state, changes, codec)
            part = patch.encode_diff(self.state.layout, diffs, self.state, self.state.sums, codec=codec)
            message = np.empty(len(part.data) + TRAILER, np.uint8)
            message[:-TRAILER] = np.frombuffer(part.data, np.uint8)
        return self._bucket(message, by_block(part.patches), part.sums)

    def _raw(
        self, weights: Weights, tiles: Sequence[Tile], clock: SyncTimes, sums: Mapping[int, Sum] | None = None
    ) -> Bucket:
        """These tiles as they are; their digests are counted unless they are known."""
        table = Table.of_whole(self._wire, tiles)
        with clock.timed("encode"):
            message = self.spare.take(table.size) if sums is None else np.empty(table.size, np.uint8)
            whole = {tile.ordinal: bits for tile, _, bits in _bodies(message, table, self._wire.layout)}
            for gap in table.gaps:
                message[gap] = 0

            def copy(job: tuple[Tile, int]) -> None:
                tile, n = job
                whole[tile.ordinal][n * BLOCK : (n + 1) * BLOCK] = weights.block(tile, n)

            spread(copy, [(tile, n) for tile in tiles for n in range(tile.block_count)])
        if sums is None:
            with clock.timed("digest"):
                sums = _count(tiles, whole)
        _write_head(message, table, sums)
        return Bucket(message, {}, 0, whole, {tile.ordinal: sums[tile.ordinal] for tile in tiles})

    def _plain(self, changes: Changes, clock: SyncTimes) -> Bucket:
        base, blocks = self.state, dict[int, list[BlockChange]]()
        for (ordinal, _), change in changes.items():
            blocks.setdefault(ordinal, []).append(change)
        with clock.timed("digest"):
            sums = {n: base.sums[n] + by for n, by in self.backend.count_digest_changes(changes).items()}
        with clock.timed("encode"):
            counts = np.array([sum(block.positions.size for block in some) for some in blocks.values()], np.int64)
            table = Table(self._wire, np.array(list(blocks), np.int64), counts)
            message = np.zeros(table.size, np.uint8)
            _write_head(message, table, sums)
            for some, (_, places, values) in zip(blocks.values(), _bodies(message, table, base.layout), strict=True):
                at = 0
                for block in some:
                    here = slice(at, at + block.positions.size)
                    np.add(block.positions, np.uint32(block.number * BLOCK), out=places[here])
                    values[here] = block.new
                    at = here.stop
        return self._bucket(message, changes, sums)

    def saved(self, tiles: Sequence[Tile], clock: SyncTimes, sums: Mapping[int, Sum]) -> Bucket:
        """These tiles as they were last sent, whole."""
        return self._raw(self.state, tiles, clock, sums)

    def write_whole(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        """Move the copy into the new messages; an old message without remaining tiles is free for the next sync."""
        whole = {ordinal: bits for bucket in buckets for ordinal, bits in bucket.whole.items()}
        self.backend.adopt(whole)
        with self.state.lock:
            self.state.begin_at({**self.state.sums, **sums})
        left = [(message, tiles - whole.keys()) for message, tiles in self.messages]
        self.spare.replace(message for message, tiles in left if buckets and not tiles)
        self.messages = [(message, tiles) for message, tiles in left if tiles]
        self.messages += [(bucket.message, set(bucket.whole)) for bucket in buckets]

    def make_room(self) -> None:
        """Allocate the copy before anything is sent, so that a commit cannot run out of memory: it is the messages."""

    def forget(self, buckets: Sequence[Bucket]) -> None:
        """Keep no copy: the memory of these messages is free for the next sync."""
        self.messages = []
        self.spare.replace(bucket.message for bucket in buckets)


class HostReceiverWeights(_HostWeights):
    """What a rank receives, in its live weights."""

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards, sums: Mapping[int, Sum]) -> None:
        self._places = bundles.places_of(wire, tiles, shards)
        flats, copies = bundles.receiver_tensors(shards.published, wire.ties)
        super().__init__(wire, HostBackend(wire.layout, flats, copies, places=self._places), sums)

    def room(self, size: int, carrier: Any) -> Bits:
        """Memory for a message of this size, which travels from a device."""
        return self.spare.take(size)

    def read(self, message: Bits, before: Mapping[int, Sum], clock: SyncTimes) -> Bucket:
        """Check a message and decode its local tiles; before: their digests. Raises: FormatError, VerificationError."""
        if bytes(message[:8]) == messages.TABLE:
            return self._read_table(message, before, clock)
        with clock.timed("prepare"):
            body = Body.of(message[:-TRAILER].data, self._wire.layout)
            found = self.backend.decode([[body]], {}, None)
            if found.fault is not None:
                raise found.fault
            sums = {entry.tile: entry.sum for entry in body.index.entries}
        with clock.timed("digest"):
            PatchTransaction(self.state).check_digest_changes(found.digest_changes[0], sums, before)
        return self._bucket(NOTHING, found.changes, sums)

    def _read_table(self, message: Bits, before: Mapping[int, Sum], clock: SyncTimes) -> Bucket:
        table, sums = Table.open(message, message.size, self._wire)
        in_index, counts = table.named(sums), table.changes.tolist()
        whole: dict[int, Bits] = {}
        changes: dict[tuple[int, int], BlockChange] = {}
        with clock.timed("undo"):  # the undo log needs the old weights
            for (tile, places, bits), changed in zip(_bodies(message, table, self._wire.layout), counts, strict=True):
                if tile.ordinal not in self._places:
                    continue
                if changed == WHOLE:
                    whole[tile.ordinal] = bits
                else:
                    changes |= self._changes(tile, places, bits)
        with clock.timed("digest"):
            digest_changes = self.backend.count_digest_changes(changes)
            PatchTransaction(self.state).check_digest_changes(digest_changes, in_index, before)
            counted = _count([self._wire.layout.tiles[ordinal] for ordinal in whole], whole)
        for ordinal, sum_ in counted.items():
            if sum_ != in_index[ordinal]:
                raise messages.digest_mismatch(self._wire, ordinal)
        return Bucket(message if whole else NOTHING, changes, self.backend.count_changed(changes), whole, in_index)

    def write_whole(self, buckets: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        """Write whole tiles. If this fails, the weights are between two versions."""
        with self.state.lock:
            for ordinal, bits in (item for bucket in buckets for item in bucket.whole.items()):
                tile = self._wire.layout.tiles[ordinal]
                for number in range(tile.block_count):
                    self.backend.write_block(tile, number, bits[number * BLOCK : (number + 1) * BLOCK])
            self.state.begin_at({**self.state.sums, **sums})
        self.spare.replace(bucket.message for bucket in buckets)

    def _changes(self, tile: Tile, places: Bits, values: Bits) -> Changes:
        """The changes of a tile in a table, with the weights that they replace."""
        if places.size and (int(places[-1]) >= tile.size or not (places[1:] > places[:-1]).all()):
            raise FormatError(
                "a table has changes beyond the end of their tile, or not in ascending order", tensor=tile.tensor.name
            )
        borders = np.searchsorted(places, np.arange(0, tile.block_count + 1) * BLOCK)
        changes = {}
        for number in range(tile.block_count):
            here = slice(borders[number], borders[number + 1])
            if here.start < here.stop:
                positions = places[here] - np.uint32(number * BLOCK)
                old = bundles.pick(self._places[tile.ordinal], self.backend.memory, number, positions)
                changes[tile.ordinal, number] = BlockChange(number, positions, old, values[here])
        return changes


def _write_head(message: Bits, table: Table, sums: Mapping[int, Sum]) -> None:
    head = table.head(messages.sums_of(sums, table.ordinals))
    message[: head.size] = head


def _bodies(message: Bits, table: Table, layout: Layout) -> Iterator[tuple[Tile, Bits, Bits]]:
    """The tiles of a table, each with its places and values, as views of the message."""
    for ordinal, places, values in table.bodies:
        tile = layout.tiles[ordinal]
        yield tile, message[places].view(np.uint32), message[values].view(tile.tensor.kind.bits)


def _count(tiles: Sequence[Tile], whole: Mapping[int, Bits]) -> dict[int, Sum]:
    jobs = [(tile, n) for tile in tiles for n in range(tile.block_count)]

    def count(job: tuple[Tile, int]) -> Sum:
        tile, n = job
        return digest.count_block(tile, n, whole[tile.ordinal][n * BLOCK : (n + 1) * BLOCK])

    sums = {tile.ordinal: Sum(0, 0) for tile in tiles}
    for (tile, _), one in zip(jobs, spread(count, jobs), strict=True):
        sums[tile.ordinal] += one
    return sums
