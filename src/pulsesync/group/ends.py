"""What a rank brings to a group, and what it is once the group has joined: an end that sends, or one that receives.

Before a join there is a `LocalModel`: shards, and where their tensors lie. A join makes a `SourceEnd` or a
`ReceiverEnd` of it, which has the bundles that all ranks agreed on, the memory they lie in and the version they are at.
An end outlives its group: the next group uses it again where its bundles are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pulsesync.core.threads import finish
from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import StateError, VerificationError
from pulsesync.format.history import History
from pulsesync.format.weights import by_block
from pulsesync.group import bundles, messages
from pulsesync.group.bundles import BundlePlan, LocalBundles
from pulsesync.group.calibrate import MOST, try_methods
from pulsesync.group.cost_model import METHODS, CostModel, Method, TransferLoad
from pulsesync.group.messages import Bucket, SpareBuffers
from pulsesync.state.host import HostState, HostTransition
from pulsesync.state.live import AnyTransition
from pulsesync.state.sharding import Placed, Shards
from pulsesync.state.slices import LocalTile, TileStorage

SAMPLE = 1 << 14  # weights of a bundle that are compared to estimate how many changed

Job = tuple[Method, Sequence[Tile]]  # a bucket to be encoded


@dataclass(frozen=True)
class RankVersion:
    """A version, as one rank knows it."""

    version: int
    digest: str
    sums: Mapping[int, Sum]  # of all bundles, local or not

    @property
    def name(self) -> str:
        return f"{self.version}:{self.digest}"


@dataclass(frozen=True)
class LocalModel:
    """What a rank brings to a join: its shards, and the addresses by which their tensors are recognized later."""

    shards: Shards
    addresses: Sequence[int]

    @property
    def copied(self) -> list[str]:
        """The tensors that are not read where they lie, but were copied: they must be read again in each sync."""
        return [name for name, view in self.shards.published.views.items() if not view.shared]

    def check_writable(self) -> None:
        """Check that all tensors can be written where they lie. Raises: StateError."""
        for name in self.copied:
            raise StateError(
                f"tensor {name!r} is not contiguous, or read-only: it cannot be written in place", tensor=name
            )
        HostState.check_apart({name: view.flat for name, view in self.shards.published.views.items()})


def addresses_of(source: Mapping[str, Any]) -> list[int]:
    """A number for each tensor, which changes when the tensor is replaced; it keeps no tensor alive."""
    return [hash((name, *_address(value))) for name, value in source.items()]


def _address(value: Any) -> tuple[Any, ...]:
    """Where a tensor lies, what it is and which part of the checkpoint's tensor it is."""
    if isinstance(value, Placed):
        return *_address(value.tensor), value.shape, value.rows, value.columns
    value = getattr(value, "_local_tensor", value)  # a DTensor
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.shape, value.dtype
    return (value.data_ptr(), value.shape, value.dtype) if hasattr(value, "data_ptr") else (id(value),)


class GroupEnd(ABC):
    """What both ends have: bundles and their memory, the version they are at, and how to return to the one before."""

    state: HostState  # a source's copy of what it last sent, or a receiver's live weights

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards) -> None:
        self.tiles = tiles  # the bundles that this rank sends, or those that it receives
        self.at: RankVersion | None = None
        self.before: tuple[RankVersion, AnyTransition] | None = (
            None  # where the last sync began, and how to return there
        )
        self.spare = SpareBuffers()
        self.bind(wire, shards)

    def bind(self, wire: BundlePlan, shards: Shards) -> None:
        """Find the bundles, on which the group has agreed, in the memory of these shards."""
        self.live = LocalBundles(wire, self.tiles, shards)
        self.wire, self.shards, self.joined = wire, shards, True

    def attach(self, shards: Shards) -> None:
        """Continue with tensors in other memory; unless they are the same parts of a model, all ranks join again."""
        if self.joined and (shards.windows, shards.ties) == (self.shards.windows, self.shards.ties):
            self.bind(self.wire, shards)
        else:
            self.joined = False

    def reach(self, name: str) -> None:
        """Return to a version, rolling the last sync back if that began there; an end that cannot is at no version."""
        if self.before is not None and self.before[0].name == name:
            point, back = self.before

            def roll_back() -> None:
                self.state.commit(back)
                self.at, self.before = point, None

            finish(roll_back)
        if self.at is None or self.at.name != name:
            self.at = self.before = None

    def commit(self, made: Sequence[Bucket], point: RankVersion) -> None:
        """Write what was received into the weights, or what was sent into the copy of it."""
        sums = {ordinal: point.sums[ordinal] for ordinal in self.state.places}
        changes = by_block([patch for bucket in made for patch in bucket.patches])
        whole = {ordinal: bits for bucket in made for ordinal, bits in bucket.whole.items()}
        back = self.state.commit(HostTransition(changes, sums, History()))
        before, self.before = self.at, None
        if whole:
            self.at = None  # if writing them fails, the weights are those of no version
        self._commit_whole([bucket for bucket in made if bucket.whole], whole, {n: sums[n] for n in whole})
        self.before = (before, back) if before and not whole else None
        self.at = point

    @abstractmethod
    def _commit_whole(self, dense: Sequence[Bucket], whole: Mapping[int, Bits], sums: Mapping[int, Sum]) -> None:
        """Write the tiles that buckets have whole, and keep memory for the next sync."""


class SourceEnd(GroupEnd):
    """An end that sends what differs between its live weights and its copy of what it last sent."""

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], shards: Shards) -> None:
        super().__init__(wire, tiles, shards)
        self.state = _state(wire, {tile.ordinal: LocalTile(tile, True) for tile in tiles}, {})
        self.messages: list[tuple[Bits, set[int]]] = []  # in whose memory the copy lies, and which tiles of it

    def calibrate(self, costs: CostModel) -> None:
        """Try every method on some of these weights."""
        coded = [tile for tile in self.tiles if tile.tensor.kind.exponent_shift is not None]
        if coded:
            largest = max(coded, key=lambda tile: tile.size)
            try_methods(costs, self.live.read(largest, 0, min(MOST, largest.size)).copy(), largest.tensor.dtype)

    def plan(self, method: Method | Literal["auto"], costs: CostModel, bucket_weights: int) -> tuple[list[Job], str]:
        """What to send, bucket by bucket, and by which method: decided before any bundle is compared."""
        if self.at is None:
            return [("dense", some) for some in messages.cut(self.wire, self.tiles, bucket_weights)], "full"
        chosen = costs.choose(self._sample(self.at.version)) if method == "auto" else [method] * len(self.tiles)
        jobs: list[Job] = []
        for one in METHODS:
            tiles = [tile for tile, its in zip(self.tiles, chosen, strict=True) if its == one]
            jobs += [(one, some) for some in messages.cut(self.wire, tiles, bucket_weights)]
        used = {one for one, _ in jobs}
        return jobs, "mixed" if len(used) > 1 else next(iter(used), "coded")

    def _sample(self, seed: int) -> list[TransferLoad]:
        """Estimate how much of each bundle has changed, from some of its weights."""
        rng = np.random.default_rng(seed)
        loads = []
        for tile, at in zip(self.tiles, rng.random(len(self.tiles)), strict=True):
            begin = int(at * max(tile.size - SAMPLE, 0))
            end = min(begin + SAMPLE, tile.size)
            old = self.state.flats[tile.tensor.name][begin:end]
            differ = np.count_nonzero(old != self.live.read(tile, begin, end))
            loads.append(TransferLoad(tile.size, bundles.bytes_of([tile]), differ / (end - begin) * tile.size))
        return loads

    def _commit_whole(self, dense: Sequence[Bucket], whole: Mapping[int, Bits], sums: Mapping[int, Sum]) -> None:
        """Move the copy into the new messages; an old one in which no tile is left is free for the next sync."""
        self.state.adopt(whole, sums)
        left = [(message, tiles - whole.keys()) for message, tiles in self.messages]
        self.spare.replace(message for message, tiles in left if dense and not tiles)
        self.messages = [(message, tiles) for message, tiles in left if tiles]
        self.messages += [(bucket.message, set(bucket.whole)) for bucket in dense]


class ReceiverEnd(GroupEnd):
    """An end that writes what it receives into its live weights."""

    def bind(self, wire: BundlePlan, shards: Shards) -> None:
        super().bind(wire, shards)
        known = {ordinal: self.at.sums[ordinal] for ordinal in self.live.places} if self.at else {}
        self.state = _state(wire, self.live.places, known)

    def attach(self, shards: Shards) -> None:
        self.at = self.before = None  # the other memory does not have what was pulled
        super().attach(shards)

    def verify(self, point: RankVersion) -> None:
        """Recount the weights. Raises: VerificationError, if they are not those of the version."""
        for ordinal, counted in self.state.count().items():
            if counted != point.sums[ordinal] or self.live.places[ordinal].untied():
                names = sorted({piece.tensor for piece in self.wire.pieces[ordinal]})
                among = names[0] if len(names) == 1 else f"{names[0]}, or of {len(names) - 1} tensors bundled with it,"
                raise VerificationError(
                    f"weights of {among} are not those last pulled: something else wrote them; pull with a new "
                    "Broadcast on this rank to get all weights again",
                    tensor=names[0],
                )

    def _commit_whole(self, dense: Sequence[Bucket], whole: Mapping[int, Bits], sums: Mapping[int, Sum]) -> None:
        self.state.load_tiles(whole, sums)
        self.spare.replace(bucket.message for bucket in dense)


def _state(wire: BundlePlan, places: Mapping[int, TileStorage], sums: Mapping[int, Sum]) -> HostState:
    """A state of bundles, whose weights lie where the places know, or wherever the state is given them later."""
    nowhere: Bits = np.empty(0, np.uint8)
    return HostState(wire.layout, {spec.name: nowhere for spec in wire.layout.tensors}, places=places, sums=sums)
