"""What is whose where several ranks publish one model, and what they tell each other of it.

Each tile is the share of one rank, the first that holds all of it. From what all tell of the tiles in their shares,
`VersionTables` make the digests of a record; nobody needs the weights or the memory of another for them.
"""

import glob
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from pulsesync import device
from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import Sum, Tile
from pulsesync.errors import FormatError, StateError
from pulsesync.format.history import TileHistorySummary, digest_of
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import CodecName
from pulsesync.publish.baseline import Difference, HostDifference, compare_tiles
from pulsesync.state.host import HostState
from pulsesync.state.live import AnyState
from pulsesync.state.sharding import Shards, ShardWeights, Windows
from pulsesync.state.slices import LocalTile, Slice, Slices, Window
from pulsesync.state.views import HostSource, new_tensors


@dataclass(frozen=True)
class TileShare:
    """The tiles that are a rank's own."""

    layout: Layout
    tiles: tuple[Tile, ...]
    windows: Mapping[str, Window]  # of each tensor, the rectangle around them
    shards: Shards  # in which they lie
    places: Mapping[int, LocalTile]  # where
    keeper: "ShardBaseline"  # of the base

    @property
    def slices(self) -> Slices:
        """For a state, or a subscriber, of them alone."""
        held: dict[str, Slice | None] = {glob.escape(n): Slice(w.rows, w.columns) for n, w in self.windows.items()}
        return held | {"*": None}

    def check(self, shards: Shards) -> None:
        """Raises: StateError, if a rank's tensors are not what and where they were."""
        if type(self.shards.published) is not type(shards.published):
            raise StateError("the shards of a run stay on a GPU or in host memory: publish with a new publisher")
        before, now = ({**one.windows, **one.ties} for one in (self.shards, shards))
        if before != now:
            name = min(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
            raise StateError(
                f"the shards of a run stay the same; {name!r} came, went or changed: publish with a new publisher",
                tensor=name,
            )

    @cached_property
    def held(self) -> dict[int, LocalTile]:
        """Where they lie in tensors of their windows."""
        found = ((tile, self.windows[tile.tensor.name].place(tile)) for tile in self.tiles)
        return {tile.ordinal: place for tile, place in found if place}


class ShardBaseline(Protocol):
    """Where a rank keeps its tiles of the last version, to compare with."""

    def copy(self, share: TileShare, shown: Any) -> AnyState:
        """A state of them as they are in shards, in memory of its own."""
        ...

    def tensors(self, share: TileShare, shown: Any) -> dict[str, Any]:
        """Zeros for a subscriber to bring to a version."""
        ...

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        """The state of such tensors, to compare with."""
        ...

    def compare(self, share: TileShare, state: AnyState, shown: Any, codec: CodecName, last: Manifest) -> Difference:
        """How they differ in shards from the state, which is at the version last. Then the shards may change."""
        ...


class HostShardBaseline:
    """Shards and base in host memory."""

    def copy(self, share: TileShare, shown: HostSource) -> AnyState:
        specs = {name: window.local for name, window in share.windows.items()}
        flats = {name: np.zeros(spec.size, spec.kind.bits) for name, spec in specs.items()}
        source, held = ShardWeights(shown, share.places), share.held

        def copy(job: tuple[Tile, int]) -> None:
            tile, number = job
            held[tile.ordinal].write_block(flats[tile.tensor.name], number, source.block(tile, number))

        spread(copy, [(tile, number) for tile in share.tiles for number in range(tile.block_count)])
        return HostState(share.layout, flats, places=held)

    def tensors(self, share: TileShare, shown: HostSource) -> dict[str, Any]:
        return new_tensors(window.local for window in share.windows.values())

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        return state

    def compare(
        self, share: TileShare, state: AnyState, shown: HostSource, codec: CodecName, last: Manifest
    ) -> HostDifference:
        return compare_tiles(share.tiles, state, ShardWeights(shown, share.places), codec)


def shard_baseline_for(shards: Shards) -> ShardBaseline:
    """How the base of shards is kept: where they are."""
    if isinstance(shards.published, HostSource):
        return HostShardBaseline()
    where = device.find({name: view.tensor for name, view in shards.published.views.items()})
    keeper: ShardBaseline = device.load("keeper").DeviceShardBaseline.on(where)
    return keeper


def share_of(layout: Layout, owners: Mapping[int, int], rank: int, shards: Shards) -> TileShare:
    """The tiles of a layout that a rank owns, and where they lie in its shards."""
    tiles = tuple(layout.tiles[ordinal] for ordinal, owner in owners.items() if owner == rank)
    windows: dict[str, Window] = {}
    places = {}
    for tile in tiles:
        rows, columns = (tile.row, tile.row + tile.rows), (tile.column, tile.column + tile.columns)
        if known := windows.get(tile.tensor.name):
            rows = min(known.rows[0], rows[0]), max(known.rows[1], rows[1])
            columns = min(known.columns[0], columns[0]), max(known.columns[1], columns[1])
        windows[tile.tensor.name] = Window(tile.tensor, rows, columns)
        place = shards.windows[tile.tensor.name].place(tile)
        assert place is not None
        places[tile.ordinal] = place
    kept = replace(shards, published=replace(shards.published, views={}))
    return TileShare(layout, tiles, windows, kept, places, shard_baseline_for(shards))


def agreed(told: Sequence[tuple[Windows, Mapping[str, str]]]) -> tuple[list[Windows], dict[str, str]]:
    """Everybody's windows, and the ties of all: who holds no weight of a tensor cannot see that it is tied.

    Raises:
        StateError: tensors are tied for one process and not for another that holds them.
    """
    ties: dict[str, str] = {}
    for _, some in told:
        ties |= some
    for windows, some in told:
        for alias, name in ties.items():
            held = windows.get(alias)
            if some.get(alias, name) != name or (held is not None and held.local.size):
                raise StateError(f"{alias!r} is tied to {name!r} for one process and not for another", tensor=alias)
    return [{name: window for name, window in windows.items() if name not in ties} for windows, _ in told], ties


# What ranks tell each other

_SUM = np.dtype([("tile", "<u4"), ("first", "<u8"), ("second", "<u8")])
_REMEMBERED = np.dtype([("tile", "<u4"), ("cut", "<u8"), ("size", "<u8"), ("first", "<u8"), ("second", "<u8")])


@dataclass(frozen=True)
class RankReport:
    """What a rank tells of its tiles: parts it has put, and what a record's digests need of those that changed."""

    parts: tuple[PartRef, ...] = ()
    changed: int = 0  # weights
    sums: Mapping[int, Sum] = field(default_factory=dict)
    remembered: Mapping[int, TileHistorySummary] = field(default_factory=dict)

    @classmethod
    def of(cls, state: AnyState, share: TileShare) -> "RankReport":
        """Of all its tiles, as they are."""
        owned = [tile.ordinal for tile in share.tiles]
        return cls(sums={n: state.sums[n] for n in owned}, remembered=state.history.counts(owned))

    def to_bytes(self) -> bytes:
        parts = [[part.id, part.size] for part in self.parts]
        sums = np.array([(n, *total) for n, total in self.sums.items()], _SUM)
        remembered = np.array([(n, r.cut, r.size, *r.sum) for n, r in self.remembered.items()], _REMEMBERED)
        head = {"parts": parts, "changed": self.changed, "tiles": [sums.size, remembered.size]}
        return json.dumps(head).encode() + b"\n" + sums.tobytes() + remembered.tobytes()

    @classmethod
    def from_ranks(cls, messages: Sequence[bytes]) -> Iterator["RankReport"]:
        """The reports of all ranks, from their messages in the order of the ranks. Raises: FormatError."""
        return (cls.from_bytes(data, rank) for rank, data in enumerate(messages))

    @classmethod
    def from_bytes(cls, data: bytes, rank: int) -> "RankReport":
        """Raises: FormatError, if it is not what `to_bytes` wrote."""
        try:
            head = json.loads(data[: (at := data.index(b"\n") + 1)])
            some, known = head["tiles"]
            sums = np.ndarray((some,), _SUM, data, at)
            remembered = np.ndarray((known,), _REMEMBERED, data, at + sums.nbytes)
            return cls(
                tuple(PartRef(str(id_), int(size)) for id_, size in head["parts"]),
                int(head["changed"]),
                {n: Sum(*total) for n, *total in sums.tolist()},
                {n: TileHistorySummary(cut, size, Sum(*total)) for n, cut, size, *total in remembered.tolist()},
            )
        except (ValueError, KeyError, TypeError) as e:
            raise FormatError(f"malformed message from rank {rank}: {e}") from e


@dataclass(frozen=True)
class VersionTables:
    """What the digests of a record are computed from: the sums of all tiles of a version, of every rank."""

    sums: Mapping[int, Sum] = field(default_factory=dict)
    remembered: Mapping[int, TileHistorySummary] = field(default_factory=dict)

    def after(self, told: Iterable[RankReport], forget: bool = False) -> "VersionTables":
        """The same when ranks have told what changed. forget: an epoch has begun."""
        sums, remembered = dict(self.sums), {} if forget else dict(self.remembered)
        for one in told:
            sums |= one.sums
            remembered |= one.remembered
        return VersionTables(sums, remembered)

    def digest(self, layout: Layout) -> str:
        empty = {tile.ordinal: Sum(0, 0) for tile in layout.tiles if not tile.size}
        return digest.state_digest(layout.tiles, {**empty, **self.sums})

    def history(self, index: int) -> str | None:
        return digest_of(index, self.remembered) if self.remembered else None
