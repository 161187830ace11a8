"""The two ends of a group: what a rank brings to a join, and the source or receiver that it is after it.

Before a join there is a `LocalModel`: shards, and the addresses of their tensors. A join makes a `SourceEnd` or a
`ReceiverEnd` of it, which has the bundles that all ranks agreed on, their memory and their version. An end outlives its
group: the next group reuses it if its bundles are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pulsesync import device as devices
from pulsesync.core.threads import finish
from pulsesync.core.types import Sum, Tile
from pulsesync.errors import StateError, VerificationError
from pulsesync.group import bundles, messages
from pulsesync.group.bundles import BundlePlan
from pulsesync.group.calibrate import calibrate_host
from pulsesync.group.cost_model import METHODS, SAMPLE, CostModel, Method, TransferLoad
from pulsesync.group.host_weights import HostReceiverWeights, HostSourceWeights
from pulsesync.group.messages import Bucket
from pulsesync.state.attach import check_apart
from pulsesync.state.backend import StateBackend, Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import Placed, Shards, local_tensors, shards_of
from pulsesync.state.views import NOT_WRITABLE

if TYPE_CHECKING:
    import torch

    from pulsesync.group.device_weights import DeviceReceiverWeights, DeviceSourceWeights

ALIGNED = 8  # samples begin at multiples of this number of weights: kernels read words of eight bytes
# Smaller ones overlap better in theory, but where ends share cores, each costs a wake-up or two.
BUCKET_WEIGHTS = 1 << 24
# On a GPU a bucket costs about ten launches and some waits for the host. Whole weights occupy memory until they are
# sent.
DEVICE_BUCKET_WEIGHTS: Mapping[Method, int] = {"dense": 1 << 29, "plain": 1 << 33, "gap": 1 << 33, "coded": 1 << 33}

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
    device: "torch.device | None"  # the first GPU that it is on; None: host memory

    @classmethod
    def of(cls, tensors: Mapping[str, Any], cast: Mapping[str, str] | None, addresses: Sequence[int]) -> "LocalModel":
        """Read tensors as shards, in host memory or on a GPU. Raises: StateError, if they cannot be read."""
        found = devices.find(local_tensors(tensors))
        if found is None:
            return cls(shards_of(tensors, cast), addresses, None)
        shards = devices.load("source").read_shards(tensors, cast or {}, found)
        return cls(shards, addresses, found)

    @property
    def copied(self) -> list[str]:
        """The tensors that were copied instead of read in place: they must be read again in each sync."""
        return [name for name, view in self.shards.published.views.items() if not view.shared]

    def check_writable(self) -> None:
        """Check that all tensors can be written in place. Raises: StateError."""
        for name in self.copied:
            raise StateError(f"tensor {name!r} {NOT_WRITABLE}", tensor=name)
        flats = {name: view.flat for name, view in self.shards.published.views.items()}
        kind: type[StateBackend] = HostBackend if self.device is None else devices.load("state").DeviceBackend
        check_apart(flats, {}, kind.span)


def addresses_of(source: Mapping[str, Any]) -> list[int]:
    """A number for each tensor, which changes when the tensor is replaced; it keeps no tensor alive."""
    return [hash((name, *_address(value))) for name, value in source.items()]


def _address(value: Any) -> tuple[Any, ...]:
    """The address of a tensor, its type, and which part of the checkpoint's tensor it is."""
    if isinstance(value, Placed):
        return *_address(value.tensor), value.shape, value.rows, value.columns
    value = getattr(value, "_local_tensor", value)  # a DTensor
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.shape, value.strides, value.dtype
    if hasattr(value, "data_ptr"):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return (id(value),)


class GroupEnd(ABC):
    """What both ends have: bundles and their memory, their version, and how to roll back to the one before."""

    weights: "HostSourceWeights | DeviceSourceWeights | HostReceiverWeights | DeviceReceiverWeights"
    has_weights = True  # of its version; False for a source with method="dense", which keeps no copy

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], model: LocalModel) -> None:
        self.tiles = tiles  # the bundles that this rank sends, or those that it receives
        self.at: RankVersion | None = None
        # The version at which the last sync began, and the transition back to it.
        self.before: tuple[RankVersion, Transition] | None = None
        self.device = model.device
        self.wire, self.shards, self.joined = wire, model.shards, True

    def bind(self, wire: BundlePlan, shards: Shards) -> None:
        """Find the bundles, on which the group has agreed, in the memory of these shards."""
        self._bind_weights(wire, shards)
        self.wire, self.shards, self.joined = wire, shards, True

    @abstractmethod
    def _bind_weights(self, wire: BundlePlan, shards: Shards) -> None: ...

    def attach(self, shards: Shards) -> None:
        """Continue with tensors in other memory; if they are other parts of the model, all ranks join again."""
        if self.joined and (shards.windows, shards.ties) == (self.shards.windows, self.shards.ties):
            self.bind(self.wire, shards)
        else:
            self.joined = False

    def reach(self, name: str) -> None:
        """Return to a version, rolling back the last sync if it began there; else the end has no version."""
        if self.before is not None and self.before[0].name == name:
            point, back = self.before

            def roll_back() -> None:
                assert self.weights.state is not None  # the transition was made from it
                self.weights.state.commit(back)
                self.at, self.before = point, None

            finish(roll_back)
        if self.at is None or self.at.name != name:
            self.at = self.before = None

    def sent(self, bucket: Bucket) -> Bucket:
        """The part of a sent bucket that is needed until the commit."""
        return bucket

    @contextmanager
    def leaving(self, name: str) -> Iterator[None]:
        """Sync from a version, writing nothing inside; if there is none and the sync fails, the end keeps its own."""
        left = self.at, self.before
        self.reach(name)
        try:
            yield
        except BaseException:
            if not name:
                self.at, self.before = left
            raise

    def commit(self, buckets: Sequence[Bucket], point: RankVersion) -> None:
        """Write what was received into the weights, or what was sent into the copy of it."""
        back = self.weights.write_changes(buckets, point.sums)
        before, self.before = self.at, None
        dense = [bucket for bucket in buckets if bucket.whole]
        if dense:
            self.at = None  # if writing fails, the weights are those of no version
        self._write_whole(dense, {n: point.sums[n] for bucket in dense for n in bucket.whole})
        self.before = (before, back) if before and back and not dense else None
        self.at = point

    def _write_whole(self, dense: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        self.weights.write_whole(dense, sums)


class SourceEnd(GroupEnd):
    """An end that sends the differences between its live weights and its copy of what it last sent."""

    weights: "HostSourceWeights | DeviceSourceWeights"

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], model: LocalModel) -> None:
        super().__init__(wire, tiles, model)
        self.has_weights = False  # until the first sync
        self._keeps = True
        if model.device is None:
            self.weights = HostSourceWeights(wire, tiles, model.shards)
        else:
            self.weights = _on_device().DeviceSourceWeights(wire, tiles, model.shards, model.device)

    def _bind_weights(self, wire: BundlePlan, shards: Shards) -> None:
        self.weights.bind(wire, shards)

    def calibrate(self, costs: CostModel, receivers_on_gpu: bool) -> None:
        """Measure the time of every method on these weights."""
        costs.bucket_weights = {method: self._most(method) for method in METHODS}
        if isinstance(self.weights, HostSourceWeights):
            calibrate_host(costs, self.tiles, self.weights)
        else:
            assert self.device is not None
            costs.assume_gpu(devices.load("memory").copy_speed(self.device), receivers_on_gpu)

    def plan(self, method: Method | Literal["auto"], costs: CostModel) -> tuple[list[Job], str]:
        """What to send, bucket by bucket, and by which method, chosen before any bundle is compared."""
        self._keeps = method != "dense"
        if self._keeps:
            self.weights.make_room()
        if self.at is None:
            return self._jobs("dense", self.tiles), "full" if self._keeps else "dense"
        chosen = costs.choose(self.sample(self.at.version)) if method == "auto" else [method] * len(self.tiles)
        jobs: list[Job] = []
        for one in METHODS:
            tiles = [tile for tile, its in zip(self.tiles, chosen, strict=True) if its == one]
            jobs += self._jobs(one, tiles)
        used = {one for one, _ in jobs}
        return jobs, "mixed" if len(used) > 1 else next(iter(used), "coded")

    def sample(self, seed: int) -> list[TransferLoad]:
        """Estimate how much of each bundle has changed, from some of its weights."""
        places = np.random.default_rng(seed).random(len(self.tiles)).tolist()
        most = [max(tile.size - SAMPLE, 0) for tile in self.tiles]
        begins = [int(at * last) // ALIGNED * ALIGNED for at, last in zip(places, most, strict=True)]
        differ = self.weights.count_differing({t.ordinal: at for t, at in zip(self.tiles, begins, strict=True)})
        return [
            TransferLoad(
                tile.size, bundles.bytes_of([tile]), differ[tile.ordinal] / min(SAMPLE, tile.size - at) * tile.size
            )
            for tile, at in zip(self.tiles, begins, strict=True)
        ]

    def _jobs(self, method: Method, tiles: Sequence[Tile]) -> list[Job]:
        return [(method, some) for some in messages.cut(self.wire, tiles, self._most(method))]

    def _most(self, method: Method) -> int:
        """The most weights that a bucket covers."""
        return BUCKET_WEIGHTS if self.device is None else DEVICE_BUCKET_WEIGHTS[method]

    def sent(self, bucket: Bucket) -> Bucket:
        return bucket if self.device is None else replace(bucket, message=messages.NOTHING)

    def _write_whole(self, dense: Sequence[Bucket], sums: Mapping[int, Sum]) -> None:
        self.has_weights = False
        if self._keeps:
            self.weights.write_whole(dense, sums)
        else:
            self.weights.forget(dense)
        self.has_weights = self._keeps


class ReceiverEnd(GroupEnd):
    """An end that writes what it receives into its live weights."""

    weights: "HostReceiverWeights | DeviceReceiverWeights"

    def __init__(self, wire: BundlePlan, tiles: Sequence[Tile], model: LocalModel) -> None:
        super().__init__(wire, tiles, model)
        self._bind_weights(wire, model.shards)

    def _bind_weights(self, wire: BundlePlan, shards: Shards) -> None:
        known = {tile.ordinal: self.at.sums[tile.ordinal] for tile in self.tiles} if self.at else {}
        if self.device is None:
            self.weights = HostReceiverWeights(wire, self.tiles, shards, known)
        else:
            self.weights = _on_device().DeviceReceiverWeights(wire, self.tiles, shards, known, self.device)

    def attach(self, shards: Shards) -> None:
        self.at = self.before = None  # the new memory does not have the pulled weights
        super().attach(shards)

    def verify(self, point: RankVersion) -> None:
        """Recount the weights. Raises: VerificationError: they are not those pulled; the next pull brings all."""
        if (ordinal := self._find_damaged(point)) is None:
            return
        self.at = self.before = None
        names = sorted({piece.tensor for piece in self.wire.pieces[ordinal]})
        among = names[0] if len(names) == 1 else f"{names[0]}, or of {len(names) - 1} tensors bundled with it,"
        raise VerificationError(
            f"weights of {among} are not those last pulled: something else wrote them; the next pull "
            "gets all weights again",
            tensor=names[0],
        )

    def _find_damaged(self, point: RankVersion) -> int | None:
        """Recount the weights; return a bundle that does not have its digest, or of which tied tensors differ."""
        differing_tie = self.weights.state.backend.find_differing_tie()
        for ordinal, counted in self.weights.state.backend.count().items():
            if counted != point.sums[ordinal] or differing_tie in {p.tensor for p in self.wire.pieces[ordinal]}:
                return ordinal
        return None


def _on_device() -> Any:
    """The module of weights on a GPU: all torch and Triton."""
    devices.load("bundles")  # raises an error that names a missing package
    return import_module("pulsesync.group.device_weights")
