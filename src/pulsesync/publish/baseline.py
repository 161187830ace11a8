"""What a publisher compares with: the tiles that a process owns, as they were in the last version.

A process that has the whole model owns all tiles. The copy is in host memory for sources that are there; for those on a
GPU it is there too or in pinned host memory (`device.baseline`), or nowhere, and the caller passes the old weights to
every comparison (`device.hook`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from pulsesync.state.host import HostState
from pulsesync.state.live import AnyState, AnyTransition
from pulsesync.state.sharding import Shards, ShardWeights, TileShare, local_tensors, shards_of
from pulsesync.state.slices import TileStorage, place_tile
from pulsesync.state.views import SourceMarks, new_tensors

Keep = Literal["device", "host", "hook"]


class Difference(Protocol):
    """How a source differed from the base it was compared with. The source may change again."""

    def after(self, done: AnyTransition) -> "Difference":
        """The same, now that the base has made a transition."""
        ...

    def try_step(self) -> StepTrial | None:
        """What the codec `step` takes, tried on a sample; None where it always takes longer than the others."""
        ...

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        """Encode it against the base, which is at the version last. Changes nothing."""
        ...


class Baseline(Protocol):
    """Where the last version of a share is kept, and how a source is compared with it."""

    hands_over: bool  # no weights are kept: the caller passes the old ones to `compare`

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        """A source as it is published. Raises: StateError."""
        ...

    def copy(self, share: TileShare, shards: Shards) -> AnyState:
        """A base that is the source as it is now."""
        ...

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any] | None:
        """Tensors of their own, in the windows of the share, for a subscriber of its slices to bring to a version.

        They are the source as it is now, because a path may begin there. None: no base is kept.
        """
        ...

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        """The state of such tensors as the base, kept where it is to be."""
        ...

    def compare(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> Difference:
        """Compare a source with the base, which is at the version last; when this returns, the source may change.

        old: the weights of the base, if they are handed over.
        """
        ...

    def compare_later(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> Difference:
        """The same for a source that changes only after `wait`: it may return before the source is compared."""
        ...

    def wait(self) -> None:
        """Wait until no comparison reads a source any more. What stopped one is raised by its difference."""
        ...


def check_keep(keep: Keep | None) -> None:
    """Raises: ValueError, if there is no such place to keep a base."""
    if keep not in (None, *get_args(Keep)):
        raise ValueError(f"keep must be one of {', '.join(map(repr, get_args(Keep)))}; got {keep!r}")


def baseline_for(source: Any, keep: Keep | None) -> Baseline:
    """How the base of a source is kept: on its device, if it is on one, unless something else is asked for.

    Raises:
        ValueError: keep is for another kind of source; StateError: a tensor is neither in host memory nor on a GPU.
    """
    where = device.find(local_tensors(source))
    if where is None:
        if keep not in (None, "host"):
            raise ValueError(f"keep={keep!r} is for tensors on a GPU; these are in host memory, and so is their base")
        return HostBaseline()
    baseline: Baseline
    if keep == "hook":
        baseline = device.load("hook").HookBaseline(where)
    else:
        baseline = device.load("baseline").DeviceBaseline(where, keep or "device")
    return baseline


class HostBaseline:
    """Source and base in host memory."""

    hands_over = False

    def __init__(self) -> None:
        self._last: tuple[SourceMarks, Mapping[str, str], Shards] | None = None  # without the weights

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        if self._last is not None and self._last[1] == cast and self._last[0].fit(source):
            known = self._last[2]
            return replace(known, published=known.published.again(source))
        shards, marks = shards_of(source, cast), SourceMarks.of(source)
        kept = replace(shards, published=shards.published.without_weights())
        self._last = (marks, cast, kept) if marks is not None else None
        return shards

    def copy(self, share: TileShare, shards: Shards) -> AnyState:
        flats = _memory_of(share)
        _copy_tiles(share, ShardWeights(shards.published, share.places), flats, share.copy_places)
        return HostState(share.layout, flats, places=share.copy_places)

    def rebuild(self, share: TileShare, shards: Shards) -> dict[str, Any]:
        tensors = new_tensors(window.local for window in share.windows.values())
        bits = {name: window.tensor.kind.bits for name, window in share.windows.items()}
        flats = {name: tensor.reshape(-1).view(bits[name]) for name, tensor in tensors.items()}
        places = {tile.ordinal: place for tile in share.tiles if (place := place_tile(tile, share.windows))}
        _copy_tiles(share, ShardWeights(shards.published, share.places), flats, places)
        return tensors

    def adopt(self, share: TileShare, state: AnyState) -> AnyState:
        if not share.layout.bundles:
            return state
        flats = {name: flat for name, flat in state.flats.items() if name in share.tensors}
        flats |= {tile.tensor.name: state.block(tile, 0) for tile in share.tiles if tile.pieces}
        adopted = HostState(share.layout, flats, places=share.copy_places, sums=state.sums)
        adopted.history = state.history
        return adopted

    def compare(
        self, share: TileShare, state: AnyState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> "HostDifference":
        diffs = patch.find_diff(share.tiles, state, ShardWeights(shards.published, share.places), codec)
        changes = {(diff.tile.ordinal, block.number): block for diff in diffs for block in diff.blocks}
        return HostDifference(state, changes, diffs, codec)

    compare_later = compare

    def wait(self) -> None:
        """A comparison is over when `compare` returns."""


def _memory_of(share: TileShare) -> dict[str, Bits]:
    """Memory for the tiles of a share. What lies between them, in a window around them, is never read."""
    specs = {name: window.local for name, window in share.tensors.items()}
    return {name: np.empty(spec.size, spec.kind.bits) for name, spec in specs.items()}


def _copy_tiles(
    share: TileShare, source: Weights, flats: Mapping[str, Bits], places: Mapping[int, TileStorage]
) -> None:
    """Copy the tiles of a share to their places in memory, block by block."""
    memory = {name: (flat,) for name, flat in flats.items()}

    def copy(job: tuple[Tile, int]) -> None:
        tile, number = job
        places[tile.ordinal].write_block(memory, number, source.block(tile, number))

    spread(copy, [(tile, number) for tile in share.tiles for number in range(tile.block_count)])


@dataclass(frozen=True)
class HostDifference:
    """What differs in host memory, block by block."""

    state: AnyState
    changes: Changes
    diffs: list[Diff] | None = None  # None once it was rebased: to be found again from the changes
    codec: CodecName = "auto"  # that the diffs are for

    def after(self, done: AnyTransition) -> "HostDifference":
        keys = self.changes.keys() | done.changes.keys()
        found = {key: rebase(self.changes.get(key), done.changes.get(key)) for key in keys}
        return HostDifference(self.state, {key: change for key, change in found.items() if change})

    def try_step(self) -> StepTrial:
        return try_step(self.state.layout.tiles, self.changes)

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        diffs = self.diffs
        if diffs is None or codec != self.codec:
            diffs = patch.diff_of(self.state.layout.tiles, self.state, self.changes, codec)
        return encode_next(self.state, last, diffs, codec)
