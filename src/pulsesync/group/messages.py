"""The messages of a sync inside a group: a part of a patch, or a table of tiles; made, read and checked one by one.

A part is as docs/format.md has it. A table holds how many tiles it has (8 bytes), of each its number (8), how many
changes (8; -1: all its weights) and the digest it must have (16), and then of each its weights, or where they change
(4 bytes each, ascending) and what they become; all of these begin at a multiple of 8. After either come 8 bytes that
belong to the session, not to the bucket: how long the next message is, if that is known.
"""

import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, Sum, Tile, TilePatch
from pulsesync.errors import FormatError, VerificationError
from pulsesync.format import container, patch
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.patch import CodecName
from pulsesync.format.weights import Changes, Weights
from pulsesync.group.bundles import Bundle, BundlePlan, LocalBundles
from pulsesync.group.cost_model import Method
from pulsesync.state.host import HostState, count_moves

_COUNT = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<Qq16s")
_TABLE = b"\x89PulsTab"
_WHOLE = -1
Receiver = tuple[HostState, LocalBundles]  # live weights, and the bundles in which they lie
NOTHING: Bits = np.empty(0, np.uint8)
TRAILER = 8  # bytes that a message has room for, after the bucket
CODECS: Mapping[Method, CodecName] = {"gap": "gap", "coded": "context"}


@dataclass
class SyncTimes:
    """Where the time of a sync went."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def __getitem__(self, what: str) -> float:
        return self.seconds.get(what, 0.0)


@dataclass(frozen=True)
class Bucket:
    """A message, and what its tiles will be: what changes in them, or all their weights."""

    message: Bits  # bytes; empty where a receiver does not need them any more
    patches: tuple[TilePatch, ...]
    whole: Mapping[int, Bits]
    sums: Mapping[int, Sum]


class SpareBuffers:
    """Messages whose memory may be used again: new memory costs as much as what is copied into it."""

    def __init__(self) -> None:
        self._free: dict[int, list[Bits]] = {}

    def take(self, size: int) -> Bits:
        """Bytes to be written over."""
        try:
            return self._free[size].pop()
        except (KeyError, IndexError):  # two threads may ask at once
            return np.empty(size, np.uint8)

    def replace(self, messages: Iterable[Bits]) -> None:
        """Keep these, and none that were kept before."""
        self._free = {}
        for message in messages:
            self._free.setdefault(message.size, []).append(message)


def cut(wire: BundlePlan, tiles: Sequence[Tile], most: int) -> Iterator[list[Tile]]:
    """Group tiles, in order, up to `most` weights; all tiles of a group are local to the same ranks."""
    some, size = list[Tile](), 0
    for tile in tiles:
        if some and (size + tile.size > most or wire.holders[tile.ordinal] != wire.holders[some[0].ordinal]):
            yield some
            some, size = [], 0
        some.append(tile)
        size += tile.size
    if some:
        yield some


def encode(
    base: HostState, new: LocalBundles, tiles: Sequence[Tile], method: Method, clock: SyncTimes
) -> Bucket | None:
    """What takes these tiles of the base to the new weights, by a method that compares; None if nothing changed."""
    with clock.timed("diff"):
        changes = new.changes(tiles, base)
    if not changes:
        return None
    if method == "plain":
        return _plain(base, changes, clock)
    codec = CODECS[method]
    with clock.timed("encode"):
        diffs = patch.diff_of(tiles, base, changes, codec)
        part = patch.encode_diff(base.layout, diffs, base, base.sums, codec=codec)
        message = np.empty(len(part.data) + TRAILER, np.uint8)
        message[:-TRAILER] = np.frombuffer(part.data, np.uint8)
    return Bucket(message, part.patches, {}, part.sums)


def _plain(base: HostState, changes: Changes, clock: SyncTimes) -> Bucket:
    blocks: dict[int, list[BlockChange]] = {}
    for (ordinal, _), change in changes.items():
        blocks.setdefault(ordinal, []).append(change)
    patches = tuple(TilePatch(base.layout.tiles[n], Codec.GAP, tuple(some)) for n, some in blocks.items())
    with clock.timed("digest"):
        moves = spread(digest.moved, patches)
        sums = {p.tile.ordinal: base.sums[p.tile.ordinal] + by for p, by in zip(patches, moves, strict=True)}
    with clock.timed("encode"):
        shape = [(patch.tile, patch.changed) for patch in patches]
        message = _head(shape, sums)
        for one, (places, values) in zip(patches, _bodies(message, shape), strict=True):
            at = 0
            for block in one.blocks:
                here = slice(at, at + block.positions.size)
                np.add(block.positions, np.uint32(block.number * BLOCK), out=places[here])
                values[here] = block.new
                at = here.stop
    return Bucket(message, patches, {}, sums)


def raw_size(tiles: Sequence[Tile]) -> int:
    """How long the message is that holds these tiles whole."""
    return _size([(tile, _WHOLE) for tile in tiles])


def raw(
    weights: Weights,
    tiles: Sequence[Tile],
    clock: SyncTimes,
    sums: Mapping[int, Sum] | None = None,
    spare: SpareBuffers | None = None,
) -> Bucket:
    """These tiles as they are; their digests are counted unless they are known."""
    shape = [(tile, _WHOLE) for tile in tiles]
    with clock.timed("encode"):
        message = (spare or SpareBuffers()).take(_size(shape))
        whole = {tile.ordinal: bits for tile, (_, bits) in zip(tiles, _bodies(message, shape), strict=True)}

        def copy(job: tuple[Tile, int]) -> None:
            tile, n = job
            whole[tile.ordinal][n * BLOCK : (n + 1) * BLOCK] = weights.block(tile, n)

        spread(copy, [(tile, n) for tile in tiles for n in range(tile.block_count)])
    if sums is None:
        with clock.timed("digest"):
            sums = _count(tiles, whole)
    _head(shape, sums, message)
    return Bucket(message, (), whole, {tile.ordinal: sums[tile.ordinal] for tile in tiles})


def read(
    message: Bits, layout: Layout, receiver: Receiver | None, before: Mapping[int, Sum], clock: SyncTimes
) -> Bucket:
    """Check a message and decode its tiles that are local, against the digests that tiles had before.

    Raises:
        FormatError: and branches, for bad bytes; VerificationError: its tiles would not have the digests that it names.
    """
    if bytes(message[:8]) == _TABLE:
        return _read_table(message, layout, receiver, before, clock)
    data = message[:-TRAILER].data
    if receiver is None:  # a source, which needs the digests of the other sources' tiles
        header, sections = container.open_part(data)
        index = patch.open_index(header, sections[0], layout)
        return Bucket(NOTHING, (), {}, {entry.tile: entry.sum for entry in index.entries})
    state, _ = receiver
    with clock.timed("prepare"):
        body = Body.of(data, layout)
        part = state.decode_part(body)
    with clock.timed("digest"):
        state.check_moves(count_moves(part.patches), part.sums, before)
    return Bucket(NOTHING, part.patches, {}, {entry.tile: entry.sum for entry in body.index.entries})


# Tables

Shape = Sequence[tuple[Tile, int]]  # tiles, and how many changes of each


def _read_table(
    message: Bits, layout: Layout, receiver: Receiver | None, before: Mapping[int, Sum], clock: SyncTimes
) -> Bucket:
    shape, promised = _open(message, layout)
    if receiver is None:
        return Bucket(NOTHING, (), {}, promised)
    state, live = receiver
    whole, patches = {}, []
    with clock.timed("undo"):  # for which the old weights are read
        for (tile, changes), (places, bits) in zip(shape, _bodies(message, shape), strict=True):
            if tile.ordinal not in live.places:
                continue
            if changes == _WHOLE:
                whole[tile.ordinal] = bits
            else:
                patches.append(_changes(tile, places, bits, live.places[tile.ordinal]))
    with clock.timed("digest"):
        state.check_moves(count_moves(patches), promised, before)
        counted = _count([layout.tiles[ordinal] for ordinal in whole], whole)
    for ordinal, sum_ in counted.items():
        if sum_ != promised[ordinal]:
            name = layout.tiles[ordinal].tensor.name
            raise VerificationError(
                f"digest mismatch: bundle {name} is not what was sent; weights unchanged", tensor=name
            )
    return Bucket(message if whole else NOTHING, tuple(patches), whole, promised)


def _changes(tile: Tile, places: Bits, values: Bits, bundle: Bundle) -> TilePatch:
    if places.size and (int(places[-1]) >= tile.size or not (places[1:] > places[:-1]).all()):
        raise FormatError("a table has changes outside their tile, or not in order", tensor=tile.tensor.name)
    borders = np.searchsorted(places, np.arange(0, tile.block_count + 1) * BLOCK)
    blocks = []
    for number in range(tile.block_count):
        here = slice(borders[number], borders[number + 1])
        if here.start < here.stop:
            positions = places[here] - np.uint32(number * BLOCK)
            blocks.append(BlockChange(number, positions, bundle.pick(number, positions), values[here]))
    return TilePatch(tile, Codec.GAP, tuple(blocks))


def _head(shape: Shape, sums: Mapping[int, Sum], message: Bits | None = None) -> Bits:
    """Write which tiles a table holds, at the front of its message; return that."""
    message = np.empty(_size(shape), np.uint8) if message is None else message
    _COUNT.pack_into(message.data, 0, _TABLE, len(shape))
    for n, (tile, changes) in enumerate(shape):
        entry = tile.ordinal, changes, sums[tile.ordinal].to_bytes()
        _ENTRY.pack_into(message.data, _COUNT.size + n * _ENTRY.size, *entry)
    return message


def _open(message: Bits, layout: Layout) -> tuple[list[tuple[Tile, int]], dict[int, Sum]]:
    """Read which tiles a table holds, and the digests they must have. Raises: FormatError."""
    if message.size < _COUNT.size + TRAILER:
        raise FormatError("a table is cut off")
    _, count = _COUNT.unpack_from(message.data)
    if count > len(layout.tiles) or message.size < _COUNT.size + count * _ENTRY.size + TRAILER:
        raise FormatError(f"a table of {message.size} bytes cannot have {count} tiles")
    entries = [_ENTRY.unpack_from(message.data, _COUNT.size + n * _ENTRY.size) for n in range(count)]
    ordinals = [ordinal for ordinal, _, _ in entries]
    if any(ordinal >= len(layout.tiles) for ordinal in ordinals) or len(set(ordinals)) != count:
        raise FormatError("a table names a tile twice, or one that the layout does not have")
    shape = [(layout.tiles[ordinal], changes) for ordinal, changes, _ in entries]
    if any(not _WHOLE <= changes <= tile.size for tile, changes in shape) or message.size != _size(shape):
        raise FormatError(f"a table of {message.size} bytes does not have the changes that its entries count")
    return shape, {ordinal: Sum.from_bytes(sum_) for ordinal, _, sum_ in entries}


def _lengths(tile: Tile, changes: int) -> tuple[int, int]:
    """Bytes of the places and values of a tile in a table."""
    itemsize = tile.tensor.kind.itemsize
    return (0, tile.size * itemsize) if changes == _WHOLE else (4 * changes, changes * itemsize)


def _size(shape: Shape) -> int:
    bodies = sum(_padded(length) for tile, changes in shape for length in _lengths(tile, changes))
    return _COUNT.size + _ENTRY.size * len(shape) + bodies + TRAILER


def _bodies(message: Bits, shape: Shape) -> Iterator[tuple[Bits, Bits]]:
    """Places and values of each tile of a table, as views of its message."""
    at = _COUNT.size + _ENTRY.size * len(shape)
    for tile, changes in shape:
        places, values = _lengths(tile, changes)
        between = at + _padded(places)
        yield message[at : at + places].view(np.uint32), message[between : between + values].view(tile.tensor.kind.bits)
        at = between + _padded(values)


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def _count(tiles: Sequence[Tile], whole: Mapping[int, Bits]) -> dict[int, Sum]:
    jobs = [(tile, n) for tile in tiles for n in range(tile.block_count)]
    counted = spread(
        lambda job: digest.count_block(job[0], job[1], whole[job[0].ordinal][job[1] * BLOCK : (job[1] + 1) * BLOCK]),
        jobs,
    )
    sums = {tile.ordinal: Sum(0, 0) for tile in tiles}
    for (tile, _), one in zip(jobs, counted, strict=True):
        sums[tile.ordinal] += one
    return sums
