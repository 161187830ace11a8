"""The messages of a sync inside a group, in whichever memory: a part of a patch, or a table of tiles.

A part is as docs/format.md has it. A table holds how many tiles it has (8 bytes), of each its number (8), how many
changes (8; -1: all its weights) and the digest it must have (16), and then of each its weights, or where they change
(4 bytes each, ascending) and what they become; all of these begin at a multiple of 8, and what is between them is zero.
After either come 8 bytes that belong to the session, not to the bucket: how long the next message is, if that is known.

`host_weights` makes and reads messages in host memory, `device_weights` on a GPU; the bytes are the same.
"""

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import FormatError, VerificationError
from pulsesync.format import container, patch
from pulsesync.format.layout import Layout
from pulsesync.format.patch import CodecName
from pulsesync.group.bundles import BundlePlan
from pulsesync.group.cost_model import Method

Message = Any  # bytes: a numpy array in host memory, or a torch tensor of uint8
_COUNT = struct.Struct("<8sQ")
_ENTRY = struct.Struct("<Qq16s")
TABLE = b"\x89PulsTab"
WHOLE = -1
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

    message: Message  # empty where a receiver does not need it any more
    changes: Any  # as the memory has them that the weights are in
    changed: int  # weights
    whole: Mapping[int, Any]  # tiles that are sent whole, by ordinal
    sums: Mapping[int, Sum]


def size_of(message: Message) -> int:
    """The bytes of a message."""
    return int(message.nbytes)


def write_next(message: Message, length: int) -> None:
    """Write how long the next message is."""
    number = np.array([length], np.int64).view(np.uint8)
    if isinstance(message, np.ndarray):
        message[-TRAILER:] = number
    else:
        import torch

        message[-TRAILER:] = torch.from_numpy(number).to(message.device)


def read_next(message: Message) -> int:
    """How long a message says that the next is."""
    trailer = message[-TRAILER:] if isinstance(message, np.ndarray) else message[-TRAILER:].cpu().numpy()
    return int(trailer.copy().view(np.int64)[0])


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


def read_sums(message: Bits, layout: Layout) -> dict[int, Sum]:
    """The digests that a message in host memory names: what a source needs of the other sources' messages.

    Raises:
        FormatError: and branches, for bad bytes.
    """
    if bytes(message[:8]) == TABLE:
        return open_table(message, message.size, layout)[1]
    header, sections = container.open_part(message[:-TRAILER].data)
    return {entry.tile: entry.sum for entry in patch.open_index(header, sections[0], layout).entries}


# Tables

Shape = Sequence[tuple[Tile, int]]  # tiles, and how many changes of each


class TablePlace(NamedTuple):
    """Where the places and values of a tile begin in the message of a table, in bytes."""

    places: int
    values: int


def table_head(shape: Shape, sums: Mapping[int, Sum]) -> bytes:
    """The front of a table: which tiles it holds."""
    entries = (_ENTRY.pack(tile.ordinal, changes, sums[tile.ordinal].to_bytes()) for tile, changes in shape)
    return b"".join((_COUNT.pack(TABLE, len(shape)), *entries))


def longest_head(layout: Layout) -> int:
    """The most bytes that the front of a table has."""
    return _COUNT.size + _ENTRY.size * len(layout.tiles)


def open_table(head: Bits, size: int, layout: Layout) -> tuple[list[tuple[Tile, int]], dict[int, Sum]]:
    """Read which tiles a table of so many bytes holds, and the digests they must have. Raises: FormatError.

    head: its front, up to `longest_head`, or all of it.
    """
    if size < _COUNT.size + TRAILER:
        raise FormatError("a table is cut off")
    _, count = _COUNT.unpack_from(head.data)
    if count > len(layout.tiles) or size < _COUNT.size + count * _ENTRY.size + TRAILER:
        raise FormatError(f"a table of {size} bytes cannot have {count} tiles")
    entries = [_ENTRY.unpack_from(head.data, _COUNT.size + n * _ENTRY.size) for n in range(count)]
    ordinals = [ordinal for ordinal, _, _ in entries]
    if any(ordinal >= len(layout.tiles) for ordinal in ordinals) or len(set(ordinals)) != count:
        raise FormatError("a table names a tile twice, or one that the layout does not have")
    shape = [(layout.tiles[ordinal], changes) for ordinal, changes, _ in entries]
    if any(not WHOLE <= changes <= tile.size for tile, changes in shape) or size != table_size(shape):
        raise FormatError(f"a table of {size} bytes does not have the changes that its entries count")
    return shape, {ordinal: Sum.from_bytes(sum_) for ordinal, _, sum_ in entries}


def body_lengths(tile: Tile, changes: int) -> tuple[int, int]:
    """Bytes of the places and values of a tile in a table."""
    itemsize = tile.tensor.kind.itemsize
    return (0, tile.size * itemsize) if changes == WHOLE else (4 * changes, changes * itemsize)


def table_size(shape: Shape) -> int:
    """How long the message of a table is."""
    bodies = sum(_padded(length) for tile, changes in shape for length in body_lengths(tile, changes))
    return _COUNT.size + _ENTRY.size * len(shape) + bodies + TRAILER


def raw_size(tiles: Sequence[Tile]) -> int:
    """How long the message is that holds these tiles whole."""
    return table_size([(tile, WHOLE) for tile in tiles])


def table_places(shape: Shape) -> Iterator[TablePlace]:
    """Where the places and values of each tile of a table begin."""
    at = _COUNT.size + _ENTRY.size * len(shape)
    for tile, changes in shape:
        places, values = body_lengths(tile, changes)
        yield TablePlace(at, at + _padded(places))
        at += _padded(places) + _padded(values)


def table_gaps(shape: Shape) -> Iterator[slice]:
    """The bytes of a table that are between bodies, and mean nothing."""
    for (tile, changes), place in zip(shape, table_places(shape), strict=True):
        for begin, length in zip(place, body_lengths(tile, changes), strict=True):
            if length % 8:
                yield slice(begin + length, begin + _padded(length))


def _padded(length: int) -> int:
    return -(-length // 8) * 8


def check_whole(promised: Mapping[int, Sum], counted: Mapping[int, Sum], layout: Layout) -> None:
    """Raises: VerificationError, if tiles that came whole do not have the digests that were promised."""
    for ordinal, sum_ in counted.items():
        if sum_ != promised[ordinal]:
            name = layout.tiles[ordinal].tensor.name
            raise VerificationError(
                f"digest mismatch: bundle {name} is not what was sent; weights unchanged", tensor=name
            )
