"""What the ranks that publish one model report to each other about the tiles that each of them owns.

From the reports of all ranks, `VersionTables` computes the digests of a record; no rank needs the weights of another.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.types import Sum
from pulsesync.errors import StateError
from pulsesync.format.history import TileHistorySummary, digest_of
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import PartRef
from pulsesync.state.sharding import TileShare, Windows
from pulsesync.state.weights import WeightState


def agreed(reported: Sequence[tuple[Windows, Mapping[str, str]]]) -> tuple[list[Windows], dict[str, str]]:
    """Return the windows of every rank, and the ties of all: a rank without weights of a tensor cannot see its tie.

    Raises: StateError: two tensors are tied on one rank, but not on another that has weights of both.
    """
    ties: dict[str, str] = {}
    for _, some in reported:
        ties |= some
    for windows, some in reported:
        for alias, name in ties.items():
            window = windows.get(alias)
            if some.get(alias, name) != name or (window is not None and window.local.size):
                raise StateError(
                    f"{alias!r} shares its memory with {name!r} on one rank and not on another; tie the two tensors on "
                    "all ranks or on none",
                    tensor=alias,
                )
    return [{name: window for name, window in windows.items() if name not in ties} for windows, _ in reported], ties


# Messages between ranks

_SUM = np.dtype([("tile", "<u4"), ("first", "<u8"), ("second", "<u8")])
_REMEMBERED = np.dtype([("tile", "<u4"), ("cut", "<u8"), ("size", "<u8"), ("first", "<u8"), ("second", "<u8")])


def write_parts(parts: Iterable[PartRef]) -> list[list[Any]]:
    """Return a record's entries of parts as JSON, for a message between ranks."""
    return [[part.id, part.size, None if part.data is None else part.data.hex()] for part in parts]


def read_parts(table: Iterable[Sequence[Any]]) -> tuple[PartRef, ...]:
    """Read what `write_parts` wrote. Raises: ValueError, TypeError, if it is malformed."""
    return tuple(
        PartRef(str(id_), int(size), None if data is None else bytes.fromhex(data)) for id_, size, data in table
    )


@dataclass(frozen=True)
class RankReport:
    """What a rank reports about its tiles: the parts that it has uploaded, and the sums that digests need."""

    parts: tuple[PartRef, ...] = ()
    changed: int = 0  # number of weights that changed
    sums: Mapping[int, Sum] = field(default_factory=dict)
    remembered: Mapping[int, TileHistorySummary] = field(default_factory=dict)
    failed: bool = False  # whether it has nothing to report, for a reason that is not an error

    @classmethod
    def of(cls, state: WeightState, share: TileShare) -> "RankReport":
        """Return the report of all tiles of a rank, as they are."""
        owned = [tile.ordinal for tile in share.tiles]
        return cls(sums={n: state.sums[n] for n in owned}, remembered=state.history.counts(owned))

    def to_bytes(self) -> bytes:
        sums = np.array([(n, *total) for n, total in self.sums.items()], _SUM)
        remembered = np.array([(n, r.cut, r.size, *r.sum) for n, r in self.remembered.items()], _REMEMBERED)
        tiles = [sums.size, remembered.size]
        head = {"parts": write_parts(self.parts), "changed": self.changed, "tiles": tiles, "failed": self.failed}
        return json.dumps(head).encode() + b"\n" + sums.tobytes() + remembered.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> "RankReport":
        """Read what `to_bytes` wrote; `read_each` has the errors that bad bytes raise."""
        head = json.loads(data[: (at := data.index(b"\n") + 1)])
        some, known = head["tiles"]
        sums = np.ndarray((some,), _SUM, data, at)
        remembered = np.ndarray((known,), _REMEMBERED, data, at + sums.nbytes)
        return cls(
            read_parts(head["parts"]),
            int(head["changed"]),
            {n: Sum(*total) for n, *total in sums.tolist()},
            {n: TileHistorySummary(cut, size, Sum(*total)) for n, cut, size, *total in remembered.tolist()},
            bool(head["failed"]),
        )


@dataclass(frozen=True)
class VersionTables:
    """What the digests of a record are computed from: the sums of all tiles of a version, of every rank."""

    sums: Mapping[int, Sum] = field(default_factory=dict)
    remembered: Mapping[int, TileHistorySummary] = field(default_factory=dict)

    def after(self, reports: Iterable[RankReport], forget: bool = False) -> "VersionTables":
        """Return the tables after the changes that ranks report. forget: an epoch has begun."""
        sums, remembered = dict(self.sums), {} if forget else dict(self.remembered)
        for one in reports:
            sums |= one.sums
            remembered |= one.remembered
        return VersionTables(sums, remembered)

    def digest(self, layout: Layout) -> str:
        return digest.state_digest(layout.tables, (self.sums[tile.ordinal] for tile in layout.tiles if tile.size))

    def history(self, index: int) -> str | None:
        return digest_of(index, self.remembered) if self.remembered else None
