"""What a publisher compares with: how a source is read, and where the copy of the last version is kept.

Here in host memory, for sources that are there; for those on a GPU, `device.base`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from pulsesync import device
from pulsesync.core.types import TensorSpec, Tile
from pulsesync.format import patch
from pulsesync.format.diff import Diff
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.weights import Changes, Weights, rebase
from pulsesync.publish.commit import encode_next
from pulsesync.state.host import HostState, copy_weights
from pulsesync.state.live import AnyState, AnyTransition
from pulsesync.state.views import HostSource, new_tensors, read_published

Keep = Literal["device", "host", "hook"]


class SourceView(Protocol):
    """A source as it is published."""

    @property
    def views(self) -> Mapping[str, Any]: ...
    def spec(self, name: str) -> TensorSpec: ...


class Difference(Protocol):
    """How a source differed from the base it was compared with. The source may change again."""

    def after(self, done: AnyTransition) -> "Difference":
        """The same, now that the base has made a transition."""
        ...

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        """Encode it against the base, which is at the version last. Changes nothing."""
        ...


class Baseline(Protocol):
    """One way of keeping the base."""

    def read(self, source: Any, cast: Mapping[str, str]) -> tuple[SourceView, Mapping[str, str]]:
        """A source as it is published, and its ties. Raises: StateError."""
        ...

    def copy(self, layout: Layout, shown: Any) -> AnyState:
        """A base that is the source as it is now."""
        ...

    def tensors(self, layout: Layout, shown: Any) -> dict[str, Any] | None:
        """The source as it is now, as tensors of their own, to be brought to a version.

        None: no base is kept, so none can be brought anywhere.
        """
        ...

    def adopt(self, state: AnyState) -> AnyState:
        """The state of such tensors as the base, kept where it is to be."""
        ...

    def compare(self, state: AnyState, shown: Any, codec: CodecName, last: Manifest, old: Any = None) -> Difference:
        """Compare a source with the base, which is at the version last; when this returns, the source may change.

        old: the base, where it is handed over.
        """
        ...


def baseline_for(source: Any, keep: Keep | None) -> Baseline:
    """How the base of a source is kept: on its device, if it is on one, unless something else is asked for.

    Raises:
        ValueError: keep is no such way; StateError: tensors of a source are on several devices.
    """
    where = device.find(source)
    if where is None:
        if keep not in (None, "host"):
            raise ValueError(f"keep={keep!r} is for tensors on a GPU; these are in host memory, and so is their base")
        return HostBaseline()
    bases: Baseline
    if keep == "hook":
        bases = device.load("hook").HookBaseline(where)
    else:
        bases = device.load("baseline").DeviceBaseline(where, keep or "device")
    return bases


class HostBaseline:
    """Source and base in host memory."""

    def read(self, source: Any, cast: Mapping[str, str]) -> tuple[HostSource, Mapping[str, str]]:
        return read_published(source, cast)

    def copy(self, layout: Layout, shown: HostSource) -> AnyState:
        flats = {spec.name: np.empty(spec.size, spec.kind.bits) for spec in layout.tensors}
        copy_weights(layout, shown, flats)
        return HostState(layout, flats)

    def tensors(self, layout: Layout, shown: HostSource) -> dict[str, Any]:
        tensors = new_tensors(layout.tensors)
        flats = {spec.name: tensors[spec.name].reshape(-1).view(spec.kind.bits) for spec in layout.tensors}
        copy_weights(layout, shown, flats)
        return tensors

    def adopt(self, state: AnyState) -> AnyState:
        return state

    def compare(
        self, state: AnyState, shown: HostSource, codec: CodecName, last: Manifest, old: Any = None
    ) -> "HostDifference":
        return compare_tiles(state.layout.tiles, state, shown, codec)


def compare_tiles(tiles: Sequence[Tile], state: AnyState, weights: Weights, codec: CodecName) -> "HostDifference":
    """How tiles differ from a base in host memory."""
    diffs = patch.find_diff(tiles, state, weights, codec)
    changes = {(diff.tile.ordinal, block.number): block for diff in diffs for block in diff.blocks}
    return HostDifference(state, changes, diffs)


@dataclass(frozen=True)
class HostDifference:
    """What differs in host memory, block by block."""

    state: AnyState
    changes: Changes
    diffs: list[Diff] | None  # None once it was rebased: to be found again from the changes

    def after(self, done: AnyTransition) -> "HostDifference":
        keys = self.changes.keys() | done.changes.keys()
        found = {key: rebase(self.changes.get(key), done.changes.get(key)) for key in keys}
        return HostDifference(self.state, {key: change for key, change in found.items() if change}, None)

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        diffs = self.diffs
        if diffs is None:
            diffs = patch.diff_of(self.state.layout.tiles, self.state, self.changes, codec)
        return encode_next(self.state, last, diffs, codec)
