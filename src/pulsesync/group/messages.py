"""The messages of a sync inside a group, in host memory or on a GPU: a part of a patch, or a table of tiles.

A part is defined in docs/format.md. A table has the number of its tiles (8 bytes); for each tile its number (8), its
number of changes (8; -1: all its weights) and the digest that it must have (16); and then for each tile its weights, or
the positions of its changes (4 bytes each, ascending) and their new values. All of these begin at a multiple of 8, and
the gaps between them are zero. After either come 8 bytes that belong to the session, not to the bucket: how long the
next message is, if that is known.

`host_weights` makes and reads messages in host memory, `device_weights` on a GPU; the bytes are the same.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import FormatError, VerificationError
from pulsesync.format import container, patch
from pulsesync.format.patch import CodecName
from pulsesync.group.bundles import BundlePlan
from pulsesync.group.cost_model import Method

Message = Any  # bytes: a numpy array in host memory, or a torch tensor of uint8
_HEAD = np.dtype([("magic", "S8"), ("tiles", "<u8")])
_ENTRY = np.dtype([("tile", "<u8"), ("changes", "<i8"), ("sum", "<u8", (2,))])
TABLE = b"\x89PulsTab"
WHOLE = -1
NOTHING: Bits = np.empty(0, np.uint8)
TRAILER = 8  # bytes of a message after the bucket
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
    """A message, and what its tiles will be: changes, or all their weights."""

    message: Message  # empty where a receiver no longer needs it
    changes: Any  # in the form of the backend
    changed: int  # weights
    whole: Mapping[int, Any]  # tiles that are sent whole, by ordinal
    sums: Mapping[int, Sum]


def write_next(message: Message, length: int) -> None:
    """Write how long the next message is."""
    number = np.array([length], np.int64).view(np.uint8)
    if isinstance(message, np.ndarray):
        message[-TRAILER:] = number
    else:
        import torch

        message[-TRAILER:] = torch.from_numpy(number).to(message.device)


def read_next(message: Message) -> int:
    """Read how long the next message is."""
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


def read_sums(message: Bits, wire: BundlePlan) -> dict[int, Sum]:
    """The digests in a message in host memory, all that a source needs of those of others. Raises: FormatError."""
    if bytes(message[:8]) == TABLE:
        table, sums = Table.open(message, message.size, wire)
        return table.named(sums)
    header, sections = container.open_part(message[:-TRAILER].data)
    return {entry.tile: entry.sum for entry in patch.open_index(header, sections[0], wire.layout).entries}


# Tables


class Table:
    """The tiles of a table, the number of changes of each, and where their positions and values begin.

    changes: how many each of the tiles has; WHOLE: all its weights.
    """

    def __init__(self, wire: BundlePlan, ordinals: NDArray[np.int64], changes: NDArray[np.int64]) -> None:
        self.ordinals, self.changes = ordinals, changes
        itemsizes, whole = wire.itemsizes[ordinals], changes == WHOLE
        places = np.where(whole, 0, 4 * changes)
        values = np.where(whole, wire.sizes[ordinals], changes) * itemsizes
        self._lengths = np.stack([places, values], axis=1)
        padded = -(-self._lengths // 8) * 8
        ends = np.cumsum(padded).reshape(-1, 2) + self.head_size(ordinals.size)
        self.begins = ends - padded  # (tiles, 2): of positions, and of values, in bytes
        self.size = int(ends[-1, 1] if ordinals.size else self.head_size(0)) + TRAILER

    @classmethod
    def of_whole(cls, wire: BundlePlan, tiles: Sequence[Tile]) -> "Table":
        """The table of these tiles, whole."""
        return cls(wire, np.array([tile.ordinal for tile in tiles], np.int64), np.full(len(tiles), WHOLE, np.int64))

    @staticmethod
    def head_size(tiles: int) -> int:
        """The size of the header for this number of tiles."""
        return _HEAD.itemsize + _ENTRY.itemsize * tiles

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """For each tile, whether it is whole."""
        found: NDArray[np.bool_] = self.changes == WHOLE
        return found

    @property
    def bodies(self) -> Iterator[tuple[int, slice, slice]]:
        """The ordinal of each tile, and the bytes of its positions and of its values."""
        ends = self.begins + self._lengths
        rows = zip(self.ordinals.tolist(), self.begins.tolist(), ends.tolist(), strict=True)
        return ((n, slice(begin[0], end[0]), slice(begin[1], end[1])) for n, begin, end in rows)

    @property
    def gaps(self) -> list[slice]:
        """The bytes between bodies, which are zero."""
        ends = (self.begins + self._lengths).reshape(-1)
        return [slice(end, -(-end // 8) * 8) for end in ends[ends % 8 != 0].tolist()]

    def head(self, sums: NDArray[np.uint64]) -> Bits:
        """The header, given the digests that tiles must have: (tiles, 2)."""
        front, entries = np.zeros(1, _HEAD), np.zeros(self.ordinals.size, _ENTRY)
        front["magic"], front["tiles"] = TABLE, self.ordinals.size
        entries["tile"], entries["changes"], entries["sum"] = self.ordinals, self.changes, sums
        return np.concatenate([front.view(np.uint8), entries.view(np.uint8)])

    @classmethod
    def open(cls, head: Bits, size: int, wire: BundlePlan) -> tuple["Table", NDArray[np.uint64]]:
        """Read the tiles of a table of this size, and the digests they must have: (tiles, 2). Raises: FormatError.

        head: the beginning of the message, as long as the header of all tiles would be, or all of it.
        """
        if size < _HEAD.itemsize + TRAILER:
            raise FormatError("a table is cut off")
        count = int(head[: _HEAD.itemsize].view(_HEAD)["tiles"][0])
        if count > wire.sizes.size or size < cls.head_size(count) + TRAILER:
            raise FormatError(f"a table of {size} bytes cannot have {count} tiles")
        entries = head[_HEAD.itemsize : cls.head_size(count)].view(_ENTRY)
        ordinals, changes = entries["tile"], entries["changes"].astype(np.int64)
        if (ordinals >= wire.sizes.size).any() or np.unique(ordinals).size != count:
            raise FormatError("a table lists a tile twice, or one that the layout does not have")
        ordinals = ordinals.astype(np.int64)
        possible = (changes >= WHOLE) & (changes <= wire.sizes[ordinals])
        if not possible.all() or (table := cls(wire, ordinals, changes)).size != size:
            raise FormatError(f"a table of {size} bytes does not have the number of changes that its entries state")
        return table, entries["sum"].astype(np.uint64)

    def named(self, sums: NDArray[np.uint64]) -> dict[int, Sum]:
        """Digests of the tiles, by ordinal."""
        return {n: Sum(*pair) for n, pair in zip(self.ordinals.tolist(), sums.tolist(), strict=True)}


def sums_of(sums: Mapping[int, Sum], ordinals: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Digests of tiles as an array: (tiles, 2)."""
    return np.array([sums[n] for n in ordinals.tolist()], np.uint64).reshape(-1, 2)


def longest(wire: BundlePlan, tiles: Sequence[Tile]) -> int:
    """The longest possible message with these tiles or some of them: all their weights have changed."""
    ordinals = np.array([tile.ordinal for tile in tiles], np.int64)
    return 2 * Table(wire, ordinals, wire.sizes[ordinals]).size + (1 << 26)


def digest_mismatch(wire: BundlePlan, ordinal: int) -> VerificationError:
    """The error of a bundle that does not have, or would not have, the digest in a message."""
    names = sorted({piece.tensor for piece in wire.pieces[ordinal]})
    others = f" and {len(names) - 1} tensors bundled with it" if len(names) > 1 else ""
    return VerificationError(
        f"digest mismatch: {names[0]!r}{others} would differ from what was sent; weights unchanged", tensor=names[0]
    )
