"""No base: the caller passes the old weights with the new ones (keep="hook").

An optimizer that keeps FP32 masters has both for a moment: new masters, and weights that are not updated yet.

    optimizer.step()                                          # masters
    publisher.publish(masters, old=model, wait=False)         # compared and encoded before this returns
    copy_masters_to(model)

It costs no memory between publishes, and the trainer waits for the encoding as well as for the comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pulsesync.device.baseline import DeviceBaseline
from pulsesync.device.changes import Changes
from pulsesync.device.memory import Tensors, to_host
from pulsesync.device.source import SourceReader
from pulsesync.device.state import DeviceBackend
from pulsesync.errors import StateError
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import Shards, TileShare
from pulsesync.state.weights import Snapshot, WeightState

NOTHING = Tensors({})


class HookBackend(DeviceBackend):
    """No weights of its own: those of the last version are lent for a comparison.

    Its tiles have the coordinates of the shards, so that shards serve as its tensors.
    """

    def __init__(self, share: TileShare, shards: Shards, device: torch.device) -> None:
        flats = {name: shards.published.cast(name) for name in share.windows}
        super().__init__(share.layout, flats, places=share.places, device=device)

    def write(self, changes: Changes) -> None:
        """There are no weights to write to."""


class HookState(WeightState):
    """The last version without its weights: digests and history, and the source that it was made from."""

    def __init__(self, share: TileShare, shards: Shards, device: torch.device) -> None:
        self.memory, self.share, self.source = HookBackend(share, shards, device), share, shards
        super().__init__(self.memory)
        self.memory.flats.clear()
        self.memory.tensors = NOTHING

    def hand_over(self, old: Tensors) -> None:
        """Use these weights as those of the last version. Raises: StateError, if they differ from it."""
        self.memory.tensors = old
        if self.memory.count() != self.sums:
            self.memory.tensors = NOTHING
            raise StateError(
                "the old weights are not those of the last published version: pass the weights of every step, or keep "
                "a base (keep='device')"
            )

    def snapshot(self) -> Snapshot:
        """The source as it is now, on the host."""
        flats = {}
        for name, window in self.share.windows.items():
            flat = self.source.published.cast(name)
            (bits,) = to_host(flat.clone() if flat.device.type == "cpu" else flat)
            flats[name] = bits.view(window.tensor.kind.bits)
        return WeightState(HostBackend(self.layout, flats, places=self.places), self.sums).snapshot()


class HookBaseline:
    """Source on a device, and no base."""

    caller_passes_old_weights = True

    def __init__(self, device: torch.device) -> None:
        self._device = DeviceBaseline(device, "device")  # reads and compares
        self._old = SourceReader(device)

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        return self._device.read(source, cast)

    def copy(self, share: TileShare, shards: Shards) -> WeightState:
        return HookState(share, shards, self._device.device)

    def rebuild(self, share: TileShare, shards: Shards) -> None:
        """Does nothing: a run is not resumed from its last version, whose state is not kept."""

    def adopt(self, share: TileShare, state: WeightState) -> WeightState:
        raise AssertionError("keep='hook' has no state to adopt")

    def compare(
        self, share: TileShare, state: WeightState, shards: Shards, codec: CodecName, last: Manifest, old: Any = None
    ) -> "EncodedDifference":
        """Compare and encode. Raises: StateError, if the old weights are not the last version."""
        assert isinstance(state, HookState)
        if old is None:
            raise ValueError("keep='hook' needs the old weights to compare with: call publish(new, old=...)")
        before = self._old.read(old, {})
        for name in share.windows:
            wanted = shards.windows[name]
            if before.windows.get(name) != wanted:
                raise StateError(
                    f"the old weights do not have {name!r}, {wanted.tensor.dtype} {wanted.tensor.shape}, or the shard "
                    "of it that is published",
                    tensor=name,
                )
        state.hand_over(before.published.tensors)
        try:
            done = self._device.compare(share, state, shards, codec, last).encode(last, codec)
        finally:
            state.memory.tensors, state.source = NOTHING, shards
        return EncodedDifference(done)

    compare_later = compare

    def wait(self) -> None:
        """A comparison is over when `compare` returns."""


@dataclass(frozen=True)
class EncodedDifference:
    """A difference that is already encoded."""

    done: tuple[EncodedPart, Transition]

    @property
    def changed(self) -> int:
        return self.done[1].changed

    def after(self, done: Transition) -> "EncodedDifference":
        raise AssertionError("a difference of keep='hook' is sent before the next one is made")

    def try_step(self) -> None:
        """Does nothing: the codec is already chosen."""

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, Transition]:
        return self.done
