"""The baseline, with which a publisher compares: the tiles that a process owns, as they were in the last version.

A process that has the entire model owns all tiles. The copy of a source in host memory is in host memory. The copy of a
source on a GPU is on the GPU or in pinned host memory (`device.baseline`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from pulsesync import device
from pulsesync.core.threads import spread
from pulsesync.core.types import Bits, Tile
from pulsesync.format import patch
from pulsesync.format.diff import Diff
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.weights import Changes, Weights, rebase
from pulsesync.publish.commit import encode_next
from pulsesync.publish.costs import StepTrial, try_step
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import Shards, ShardWeights, SourceMemo, TileShare, local_tensors, shards_of
from pulsesync.state.slices import TileStorage, place_tile
from pulsesync.state.views import mapping_of, new_tensors
from pulsesync.state.weights import WeightState

Keep = Literal["device", "host"]


@dataclass(frozen=True)
class RankBase:
    """The base of a rank: its tiles of the last committed version, with which it compares."""

    last: Manifest
    record: bytes  # the stored record of `last`
    share: TileShare
    state: WeightState


class Difference(Protocol):
    """How a source differs from the base that it was compared with. The source may change afterwards."""

    @property
    def changed(self) -> int:
        """How many weights differ."""

    def after(self, done: Transition) -> "Difference":
        """Return the difference from the base after a transition."""

    def try_step(self) -> StepTrial | None:
        """Measure the codec `step` on a sample; None where it always takes longer than the others."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, Transition]:
        """Encode the difference from the base, which is the version `last`. Changes nothing."""


class Baseline(Protocol):
    """Where the last version of a share is kept, and how a source is compared with it."""

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        """Return the source's tensors as they are published. Raises: StateError."""

    def copy(self, share: TileShare, shards: Shards) -> WeightState:
        """Return a base that equals the source as it is now."""

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        """Return new tensors in the windows of the share, which a follower of its slices then syncs to a version.

        They equal the source as it is now, because a path may begin there.
        """

    def adopt(self, share: TileShare, state: WeightState) -> WeightState:
        """Return the state of such tensors as the base, in the memory where it is kept."""

    def compare(self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName) -> Difference:
        """Compare a source with the base; when this returns, the source may change."""

    def compare_later(self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName) -> Difference:
        """Compare a source that changes only after `wait`: this may return before the source is compared."""

    def wait(self) -> None:
        """Wait until no comparison reads a source any more. The error of one is raised by its difference."""


def check_keep(keep: str | None) -> None:
    """Raises: ValueError, if keep is not one of its choices."""
    if keep not in (None, *get_args(Keep)):
        advice = "keep='hook' was removed in 0.2: use keep='device', or keep='host' to keep the copy in host memory"
        error = f"keep must be one of {', '.join(map(repr, get_args(Keep)))}; got {keep!r}"
        raise ValueError(f"{error}; {advice}" if keep == "hook" else error)


def baseline_for(source: Any, keep: Keep | None) -> Baseline:
    """Return where the base of a source is kept: on the source's device, unless `keep` names another place.

    Raises: ValueError: keep does not apply to this source; StateError: a tensor is neither in host memory nor on a GPU.
    """
    where = device.find(local_tensors(source))
    if where is None:
        if keep not in (None, "host"):
            raise ValueError(
                f"keep={keep!r} applies to tensors on a GPU, and these are in host memory, as is their base; leave out "
                "keep="
            )
        return HostBaseline()
    baseline: Baseline = device.load("baseline").DeviceBaseline(where, keep or "device")
    return baseline


class HostBaseline:
    """Source and base in host memory."""

    def __init__(self) -> None:
        self._memo = SourceMemo()

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        tensors = mapping_of(source)
        shards = self._memo.find(tensors, cast)
        if shards is None:
            shards = shards_of(tensors, cast)
            self._memo.keep(tensors, cast, shards)
        return shards

    def copy(self, share: TileShare, shards: Shards) -> WeightState:
        windows = {name: window.local for name, window in share.tensors.items()}
        # What lies between the tiles, in a window around them, is never read.
        flats: dict[str, Bits] = {name: np.empty(spec.size, spec.kind.bits) for name, spec in windows.items()}
        _copy_tiles(share, ShardWeights(shards.published, share.places), flats, share.copy_places)
        return WeightState(HostBackend(share.layout, flats, places=share.copy_places))

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        tensors = new_tensors(window.local for window in share.windows.values())
        bits = {name: window.tensor.kind.bits for name, window in share.windows.items()}
        flats = {name: tensor.reshape(-1).view(bits[name]) for name, tensor in tensors.items()}
        places = {tile.ordinal: place for tile in share.tiles if (place := place_tile(tile, share.windows))}
        _copy_tiles(share, ShardWeights(shards.published, share.places), flats, places)
        return tensors

    def adopt(self, share: TileShare, state: WeightState) -> WeightState:
        if not share.layout.bundles:
            return state
        flats = {name: flat for name, flat in state.flats.items() if name in share.tensors}
        flats |= {tile.tensor.name: state.block(tile, 0) for tile in share.tiles if tile.pieces}
        adopted = WeightState(HostBackend(share.layout, flats, places=share.copy_places), state.sums)
        adopted.history = state.history
        return adopted

    def compare(self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName) -> "HostDifference":
        diffs = patch.find_diff(share.tiles, state, ShardWeights(shards.published, share.places), codec)
        changes = {(diff.tile.ordinal, block.number): block for diff in diffs for block in diff.blocks}
        return HostDifference(state, changes, diffs, codec)

    compare_later = compare

    def wait(self) -> None:
        """Nothing to wait for: a comparison ends before `compare` returns."""


def _copy_tiles(
    share: TileShare, source: Weights, flats: Mapping[str, Bits], places: Mapping[int, TileStorage]
) -> None:
    """Copy the tiles of a share to their places in memory, block by block."""
    memory = {name: (flat,) for name, flat in flats.items()}

    def copy(job: tuple[Tile, int]) -> None:
        tile, number = job
        places[tile.ordinal].write_range(memory, tile.block_range(number)[0], source.block(tile, number))

    spread(copy, [(tile, number) for tile in share.tiles for number in range(tile.block_count)])


@dataclass(frozen=True)
class HostDifference:
    """What differs in host memory, block by block."""

    state: WeightState
    changes: Changes
    diffs: list[Diff] | None = None  # None after the base has moved: then computed again from the changes
    codec: CodecName = "auto"  # the codec that the diffs are for

    @property
    def changed(self) -> int:
        return sum(change.positions.size for change in self.changes.values())

    def after(self, done: Transition) -> "HostDifference":
        keys = self.changes.keys() | done.changes.keys()
        found = {key: rebase(self.changes.get(key), done.changes.get(key)) for key in keys}
        return HostDifference(self.state, {key: change for key, change in found.items() if change})

    def try_step(self) -> StepTrial:
        return try_step(self.state.layout.tiles, self.changes)

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, Transition]:
        diffs = self.diffs
        if diffs is None or codec != self.codec:
            diffs = patch.diff_of(self.state.layout.tiles, self.state, self.changes, codec)
        return encode_next(self.state, last, diffs, codec)
