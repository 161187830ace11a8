"""What several ranks that publish one model report to each other about the tiles that each of them owns.

From the reports of all ranks `VersionTables` computes the digests of a record; no rank needs the weights or the memory
of another for them.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.types import Sum
from pulsesync.errors import FormatError, StateError
from pulsesync.format.history import TileHistorySummary, digest_of
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import PartRef
from pulsesync.state.live import AnyState
from pulsesync.state.sharding import TileShare, Windows


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


def write_parts(parts: Iterable[PartRef]) -> list[list[Any]]:
    """What a record has of parts, as a message between ranks has it in JSON."""
    return [[part.id, part.size, None if part.data is None else part.data.hex()] for part in parts]


def read_parts(table: Iterable[Sequence[Any]]) -> tuple[PartRef, ...]:
    """Raises: ValueError, TypeError, if it is not what `write_parts` wrote."""
    return tuple(
        PartRef(str(id_), int(size), None if data is None else bytes.fromhex(data)) for id_, size, data in table
    )


@dataclass(frozen=True)
class RankReport:
    """What a rank tells of its tiles: parts it has put, and what a record's digests need of those that changed."""

    parts: tuple[PartRef, ...] = ()
    changed: int = 0  # weights
    sums: Mapping[int, Sum] = field(default_factory=dict)
    remembered: Mapping[int, TileHistorySummary] = field(default_factory=dict)
    failed: bool = False  # whether it has nothing to report, and why is no error

    @classmethod
    def of(cls, state: AnyState, share: TileShare) -> "RankReport":
        """Of all its tiles, as they are."""
        owned = [tile.ordinal for tile in share.tiles]
        return cls(sums={n: state.sums[n] for n in owned}, remembered=state.history.counts(owned))

    def to_bytes(self) -> bytes:
        sums = np.array([(n, *total) for n, total in self.sums.items()], _SUM)
        remembered = np.array([(n, r.cut, r.size, *r.sum) for n, r in self.remembered.items()], _REMEMBERED)
        tiles = [sums.size, remembered.size]
        head = {"parts": write_parts(self.parts), "changed": self.changed, "tiles": tiles, "failed": self.failed}
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
                read_parts(head["parts"]),
                int(head["changed"]),
                {n: Sum(*total) for n, *total in sums.tolist()},
                {n: TileHistorySummary(cut, size, Sum(*total)) for n, cut, size, *total in remembered.tolist()},
                bool(head["failed"]),
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
        return digest.state_digest(layout.tables, (self.sums[tile.ordinal] for tile in layout.tiles if tile.size))

    def history(self, index: int) -> str | None:
        return digest_of(index, self.remembered) if self.remembered else None
