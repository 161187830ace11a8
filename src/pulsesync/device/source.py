"""Sources on a device: a module's or a mapping's tensors as they are published, read in place."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pulsesync.core.types import TensorSpec
from pulsesync.device.memory import INTEGERS, DeviceView, Tensors, ViewedTensors, check_reach, view, worker_of
from pulsesync.errors import StateError
from pulsesync.state.sharding import Shards, SourceMemo, shards_of
from pulsesync.state.views import find_casts, mapping_of


@dataclass(frozen=True)
class DeviceSource:
    """A source on a device as it is published."""

    views: Mapping[str, DeviceView]
    dtypes: Mapping[str, str]  # of tensors that are cast
    place: object | None = None  # while it is the same object, the tensors have not moved; None: not known

    def without_weights(self) -> "DeviceSource":
        """The same without references to the memory of the weights."""
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        return replace(self, views={name: replace(view, tensor=nothing) for name, view in self.views.items()})

    def again(self, tensors: Mapping[str, Any]) -> "DeviceSource":
        """The same with the weights of a source that has the marks of this one's source."""
        return replace(self, views=_LaterDeviceViews(self.views, tensors))

    def detached(self) -> "DeviceSource":
        """The same with the tensors' current memory, even if other memory is assigned to them later."""
        if not isinstance(self.views, _LaterDeviceViews):
            return self
        return replace(self, views=self.views.detached())

    @property
    def written(self) -> list[int]:
        """How often torch has written each tensor in place; writes by other kernels or through `.data` do not count."""
        views = self.views
        tensors = views.tensors if isinstance(views, _LaterDeviceViews) else [one.tensor for one in views.values()]
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]

    @property
    def tensors(self) -> Tensors:
        """The tensors, flat and not cast; those to be cast are masters."""
        return ViewedTensors(self.views, self.place, self.dtypes)

    def spec(self, name: str) -> TensorSpec:
        spec = self.views[name].spec
        return TensorSpec(name, self.dtypes[name], spec.shape) if name in self.dtypes else spec


class _LaterDeviceViews(Mapping[str, DeviceView]):
    """Views of tensors whose metadata is known: made on first access."""

    def __init__(self, known: Mapping[str, DeviceView], tensors: Mapping[str, Any]) -> None:
        self._known, self._tensors = known, tensors

    def detached(self) -> "_LaterDeviceViews":
        return _LaterDeviceViews(self._known, {name: self._tensors[name].detach() for name in self._known})

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._tensors[name] for name in self._known]

    def __getitem__(self, name: str) -> DeviceView:
        tensor = self._tensors[name].detach()
        return replace(self._known[name], tensor=tensor.view(INTEGERS[tensor.element_size()]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class SourceReader:
    """Reads sources on a device; a source with the same memory as the last takes about 1 µs a tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._devices: Mapping[str, torch.device] = {}  # the devices that work on the tensors
        self.in_host_memory = False  # whether some tensors of the last source are
        self._memo = SourceMemo()

    def read(self, source: Any, cast: Mapping[str, str]) -> Shards:
        tensors = mapping_of(source)
        if (known := self._memo.find(tensors, cast)) is not None:
            return known
        shards = shards_of(tensors, cast, self._read)
        placed = replace(shards, published=replace(shards.published, place=object()))
        return placed if self._memo.keep(tensors, cast, placed) else shards

    def _read(self, tensors: Mapping[str, Any], cast: Mapping[str, str]) -> tuple[DeviceSource, Mapping[str, str]]:
        views, ties = view(tensors)
        flats = {name: view.tensor for name, view in views.items() if view.tensor.numel()}
        check_reach(flats, self._device)
        devices = {name: worker_of(flat, self._device) for name, flat in flats.items()}
        if away := next((name for name in devices if self._devices.get(name, devices[name]) != devices[name]), None):
            raise StateError(
                f"tensor {away!r} is on {devices[away]}, and was on {self._devices[away]} when the first "
                "version was published: move it back, or make a new publisher",
                tensor=away,
            )
        self._devices = devices
        self.in_host_memory = self._device.type == "cuda" and any(flat.device.type == "cpu" for flat in flats.values())
        return DeviceSource(views, find_casts((v.spec for v in views.values()), cast)), ties


def read_shards(tensors: Mapping[str, Any], cast: Mapping[str, str], device: torch.device) -> Shards:
    """Read tensors, some on a device; the caller keeps the result until one moves. Raises: as `check_reach`."""
    shards = SourceReader(device).read(tensors, cast)
    if all(view.shared for view in shards.published.views.values()):
        return replace(shards, published=replace(shards.published, place=object()))
    return shards
