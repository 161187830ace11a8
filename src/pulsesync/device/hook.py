"""No base at all: whoever updates the weights hands over the old ones beside the new ones (keep="hook").

An optimizer that keeps FP32 masters has both for a moment: masters that are new, and weights that are not yet.

    optimizer.step()                                          # masters
    publisher.publish(masters, old=model, wait=False)         # compared and encoded before this returns
    copy_masters_to(model)

It costs no memory between publishes, and holds the trainer for the encoding as well as for the comparison.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pulsesync.device.baseline import DeviceBaseline, DeviceSource
from pulsesync.device.changes import Changes
from pulsesync.device.memory import to_host
from pulsesync.device.state import DeviceState
from pulsesync.errors import StateError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.state.host import HostState
from pulsesync.state.live import AnyState, AnyTransition, Snapshot


class HookState(DeviceState):
    """The last version without its weights: digests and history, and the source that it was made from."""

    def __init__(self, layout: Layout, shown: DeviceSource, device: torch.device) -> None:
        super().__init__(layout, {spec.name: shown.cast(spec.name) for spec in layout.tensors}, device=device)
        self.flats, self.shown = {}, shown

    def hand_over(self, old: Mapping[str, torch.Tensor]) -> None:
        """Take weights for those of the last version. Raises: StateError, if they are others."""
        self.flats = dict(old)
        if self.count() != self.sums:
            self.flats = {}
            raise StateError(
                "the old weights are not those of the last version that was published: hand over every step, or keep "
                "a base (keep='device')"
            )

    def write(self, changes: Changes) -> None:
        """There are no weights to write to."""

    def snapshot(self) -> Snapshot:
        """The source as it is now, on the host."""
        flats = {}
        for spec in self.layout.tensors:
            flat = self.shown.cast(spec.name)
            (bits,) = to_host(flat.clone() if flat.device.type == "cpu" else flat)
            flats[spec.name] = bits.view(spec.kind.bits)
        return HostState(self.layout, flats, sums=self.sums).snapshot()


class HookBaseline:
    """Source on a device, and no base."""

    def __init__(self, device: torch.device) -> None:
        self._found = DeviceBaseline(device, "device")  # reads and compares

    def read(self, source: Any, cast: Mapping[str, str]) -> tuple[DeviceSource, Mapping[str, str]]:
        return self._found.read(source, cast)

    def tensors(self, layout: Layout, shown: DeviceSource) -> None:
        """A run is not taken up where it ended: its state would have to be kept for that."""

    def adopt(self, state: AnyState) -> AnyState:
        raise AssertionError("there is none")

    def copy(self, layout: Layout, shown: DeviceSource) -> AnyState:
        return HookState(layout, shown, self._found.device)

    def compare(
        self, state: AnyState, shown: DeviceSource, codec: CodecName, last: Manifest, old: Any = None
    ) -> "EncodedDifference":
        """Compare and encode. Raises: StateError, if what is handed over is not the last version."""
        assert isinstance(state, HookState)
        if old is None:
            raise ValueError("keep='hook' compares with what is handed over: publish(new, old=...)")
        before, _ = self.read(old, {})
        for spec in state.layout.tensors:
            found = before.views.get(spec.name)
            if found is None or (found.spec.dtype, found.spec.shape) != (spec.dtype, spec.shape):
                raise StateError(f"the old weights lack {spec.name!r}, {spec.dtype} {spec.shape}", tensor=spec.name)
        state.hand_over({spec.name: before.views[spec.name].flat for spec in state.layout.tensors})
        try:
            done = self._found.compare(state, shown, codec, last).encode(last, codec)
        finally:
            state.flats, state.shown = {}, shown
        return EncodedDifference(done)


@dataclass(frozen=True)
class EncodedDifference:
    """A difference that is encoded already."""

    done: tuple[EncodedPart, AnyTransition]

    def after(self, done: AnyTransition) -> "EncodedDifference":
        raise AssertionError("what was handed over is sent before the next")

    def encode(self, last: Manifest, codec: CodecName) -> tuple[EncodedPart, AnyTransition]:
        return self.done
