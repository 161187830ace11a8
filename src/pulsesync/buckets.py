"""The messages of a sync inside a group: a part of a patch, or tiles as they are; made, read and checked one by one.

A raw bucket: how many tiles (8 bytes), then of each its number (8) and the digest it must have (16), then the weights
of each, every one from a border of 8 bytes on. Any other bucket is a part as docs/FORMAT.md has it. Behind either come
8 bytes that belong to the stream, not to the bucket: how long the next message is, if that is known.
"""

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pulsesync import digest
from pulsesync.bundles import Held
from pulsesync.costs import Method
from pulsesync.errors import FormatError, VerificationError
from pulsesync.format import container, patch
from pulsesync.format.layout import Layout
from pulsesync.format.patch import CodecName
from pulsesync.model import BLOCK, Bits, Sum, Tile, TilePatch
from pulsesync.parallel import spread
from pulsesync.state import Body, State

_COUNT = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<Q16s")
_RAW = b"\x89PulsRaw"
TRAILER = 8  # bytes that a message has room for, behind the bucket
CODECS: Mapping[Method, CodecName] = {"gap": "gap", "coded": "context"}


@dataclass
class Clock:
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

    message: Bits  # bytes
    patches: tuple[TilePatch, ...]
    whole: Mapping[int, Bits]
    sums: Mapping[int, Sum]


def cut(tiles: Sequence[Tile], most: int) -> Iterator[list[Tile]]:
    """Group tiles, in order, until each group has so many weights."""
    some, size = list[Tile](), 0
    for tile in tiles:
        if some and size + tile.size > most:
            yield some
            some, size = [], 0
        some.append(tile)
        size += tile.size
    if some:
        yield some


def encode(base: State, new: Held, tiles: Sequence[Tile], method: Method, clock: Clock) -> Bucket | None:
    """What takes these tiles of the base to the new weights; None if nothing changed."""
    codec = CODECS[method]
    with clock.timed("diff"):
        diffs = patch.find_diff(tiles, base, new, codec)
    if not diffs:
        return None
    with clock.timed("encode"):
        part = patch.encode_diff(base.layout, diffs, base, base.sums, codec=codec)
    message = np.empty(len(part.data) + TRAILER, np.uint8)
    message[:-TRAILER] = np.frombuffer(part.data, np.uint8)
    return Bucket(message, part.patches, {}, part.sums)


def raw_size(tiles: Sequence[Tile]) -> int:
    """How long the message of these tiles is."""
    head = _COUNT.size + _ENTRY.size * len(tiles)
    return head + sum(_padded(tile) for tile in tiles) + TRAILER


def raw(weights: "Held | State", tiles: Sequence[Tile], clock: Clock, sums: Mapping[int, Sum] | None = None) -> Bucket:
    """These tiles as they are; their digests are counted unless they are known."""
    message = np.empty(raw_size(tiles), np.uint8)
    whole = _lay_out(message, tiles)
    with clock.timed("encode"):

        def copy(job: tuple[Tile, int]) -> None:
            tile, n = job
            whole[tile.ordinal][n * BLOCK : (n + 1) * BLOCK] = weights.block(tile, n)

        spread(copy, [(tile, n) for tile in tiles for n in range(tile.block_count)])
    if sums is None:
        with clock.timed("digest"):
            sums = _count(tiles, whole)
    _COUNT.pack_into(message.data, 0, _RAW, len(tiles))
    for n, tile in enumerate(tiles):
        _ENTRY.pack_into(message.data, _COUNT.size + n * _ENTRY.size, tile.ordinal, sums[tile.ordinal].to_bytes())
    return Bucket(message, (), whole, {tile.ordinal: sums[tile.ordinal] for tile in tiles})


def read(message: Bits, layout: Layout, state: State | None, before: Mapping[int, Sum], clock: Clock) -> Bucket:
    """Check a message and decode what of it is held here, against the digests that tiles had before.

    Raises:
        FormatError: and branches, for bad bytes; VerificationError: it would not give what it promises.
    """
    if bytes(message[:8]) == _RAW:
        return _read_raw(message, layout, state, clock)
    data = message[:-TRAILER].data
    if state is None:  # a source, which wants to know the digests of others' tiles
        header, sections = container.open_part(data)
        index = patch.open_index(header, sections[0], layout)
        return Bucket(message, (), {}, {entry.tile: entry.sum for entry in index.entries})
    with clock.timed("prepare"):
        body = Body.of(data, layout)
        part = state.decode(body)
    with clock.timed("digest"):
        state.move(part.patches, part.sums, before)
    return Bucket(message, part.patches, {}, {entry.tile: entry.sum for entry in body.index.entries})


def _read_raw(message: Bits, layout: Layout, state: State | None, clock: Clock) -> Bucket:
    if message.size < _COUNT.size:
        raise FormatError("a raw bucket is cut off")
    _, count = _COUNT.unpack_from(message.data)
    if count > len(layout.tiles) or message.size < _COUNT.size + count * _ENTRY.size:
        raise FormatError(f"a raw bucket of {message.size} bytes cannot have {count} tiles")
    entries = [_ENTRY.unpack_from(message.data, _COUNT.size + n * _ENTRY.size) for n in range(count)]
    ordinals = [ordinal for ordinal, _ in entries]
    if any(ordinal >= len(layout.tiles) for ordinal in ordinals) or len(set(ordinals)) != count:
        raise FormatError("a raw bucket names a tile twice, or one that there is not")
    tiles = [layout.tiles[ordinal] for ordinal in ordinals]
    if message.size != raw_size(tiles):
        raise FormatError(f"a raw bucket has {message.size} bytes and should have {raw_size(tiles)}")
    promised = {ordinal: Sum.from_bytes(sum_) for ordinal, sum_ in entries}
    held = [tile for tile in tiles if state is not None and tile.ordinal in state.places]
    whole = _lay_out(message, tiles)
    with clock.timed("digest"):
        counted = _count(held, whole)
    for tile in held:
        if counted[tile.ordinal] != promised[tile.ordinal]:
            raise VerificationError(f"bundle {tile.tensor.name} is not what was sent", tensor=tile.tensor.name)
    return Bucket(message, (), {tile.ordinal: whole[tile.ordinal] for tile in held}, promised)


def _lay_out(message: Bits, tiles: Sequence[Tile]) -> dict[int, Bits]:
    """Where in a raw bucket the weights of each tile are, as views of it."""
    whole = {}
    at = _COUNT.size + _ENTRY.size * len(tiles)
    for tile in tiles:
        kind = tile.tensor.kind
        whole[tile.ordinal] = message[at : at + tile.size * kind.itemsize].view(kind.bits)
        at += _padded(tile)
    return whole


def _padded(tile: Tile) -> int:
    return -(-tile.size * tile.tensor.kind.itemsize // 8) * 8


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
