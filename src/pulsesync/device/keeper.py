"""A rank's own tiles of a model whose shards are on a GPU: copied, rebuilt and compared there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pulsesync.core.types import Tile
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference, DeviceSource, torch_dtype
from pulsesync.device.pile import rectangle
from pulsesync.device.state import DeviceState
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import CodecName
from pulsesync.state.live import AnyState
from pulsesync.state.slices import LocalTile, Window


class TileShareLike(Protocol):
    """What it needs of a `publish.ownership.TileShare`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def tiles(self) -> Sequence[Tile]: ...
    @property
    def windows(self) -> Mapping[str, Window]: ...
    @property
    def places(self) -> Mapping[int, LocalTile]: ...
    @property
    def held(self) -> Mapping[int, LocalTile]: ...


@dataclass(frozen=True)
class DeviceShardBaseline:
    """Keeps the base of a share on a device."""

    bases: DeviceBaseline

    @classmethod
    def on(cls, device: torch.device) -> "DeviceShardBaseline":
        return cls(DeviceBaseline(device, "device"))

    def copy(self, share: TileShareLike, shown: DeviceSource) -> AnyState:
        tiles: dict[str, list[Tile]] = {}
        for tile in share.tiles:
            tiles.setdefault(tile.tensor.name, []).append(tile)
        flats = {}
        for name, window in share.windows.items():
            source = shown.cast(name)
            flats[name] = torch.zeros(window.local.size, dtype=source.dtype, device=self.bases.device)
            for tile in tiles[name]:
                mine = rectangle(flats[name], share.held[tile.ordinal].tile)
                mine.copy_(rectangle(source, share.places[tile.ordinal].tile).reshape(mine.shape))
        return self._state(share, flats)

    def tensors(self, share: TileShareLike, shown: DeviceSource) -> dict[str, Any]:
        specs = [window.local for window in share.windows.values()]
        return {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec, shown), device=self.bases.device)
            for spec in specs
        }

    def adopt(self, share: TileShareLike, state: AnyState) -> AnyState:
        kept = self._state(share, state.flats)  # of a rank that owns nothing, the state is the host's
        kept.history = kept.bring(state.history)
        return kept

    def _state(self, share: TileShareLike, flats: Mapping[str, Any]) -> DeviceState:
        return DeviceState(share.layout, flats, places=share.held, device=self.bases.device)

    def compare(
        self, share: TileShareLike, state: AnyState, shown: DeviceSource, codec: CodecName, last: Manifest
    ) -> DeviceDifference:
        self.bases.check_place(shown.views)
        places = {ordinal: place.tile for ordinal, place in share.places.items()}
        return self.bases.compare(state, replace(shown, places=places), codec, last)
