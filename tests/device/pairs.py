"""A state on the host and the same on a device, moved together: whatever one makes, the other must make too."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pulsesync.core.types import Bits, Codec, TensorSpec, Tile
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference
from pulsesync.device.memory import DeviceView, to_device, to_host
from pulsesync.device.pile import Pile, PileAddresses, make_piles
from pulsesync.device.source import DeviceSource
from pulsesync.device.state import DeviceBackend
from pulsesync.format import container, index, patch
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.format.patch import EncodedPart
from pulsesync.kernels.spec import SAMPLE_PERIOD, SAMPLE_RUN
from pulsesync.state.backend import Transition
from pulsesync.state.sharding import Shards, TileShare, owner_of, share_of
from pulsesync.state.slices import Window
from pulsesync.state.weights import WeightState
from tests.helpers import Writer, classes, near, nudge

SPECS = (
    TensorSpec("a", "BF16", (12, 10), column_cuts=(4,)),
    TensorSpec("b", "F32", (60,)),
    TensorSpec("c", "I16", (12,)),
    TensorSpec("d", "F8_E4M3", (50,)),
    TensorSpec("n", "BF16", (0,)),
)
SMALL, FAR = 4, 13  # classes: most weights are far, and hardly ever change


def place(device: str) -> torch.device:
    """A device as its tensors name it."""
    return torch.empty(0, device=device).device


def to_flats(state: Mapping[str, Bits], device: str) -> dict[str, torch.Tensor]:
    return {name: to_device(bits.copy(), place(device)) for name, bits in state.items()}


def to_bits(flats: Mapping[str, torch.Tensor]) -> dict[str, Bits]:
    """A copy on the host."""
    return {name: to_host(flat)[0].copy().view(f"u{flat.element_size()}") for name, flat in flats.items()}


def piles_of(layout: Layout, device: str, places: Mapping[int, Tile] | None = None) -> Sequence[Pile]:
    """The piles of a layout whose tensors are all on one device."""
    if places is None:
        places = {tile.ordinal: tile for tile in layout.tiles if tile.size}
    return make_piles(layout.tiles, places, {spec.name: place(device) for spec in layout.tensors})


def pile_of(dtype: str, sizes: list[int], device: str) -> Pile:
    """A pile of blocks, each a tensor of its own."""
    layout = layouts.make(TensorSpec(f"t{i:02}", dtype, (size,)) for i, size in enumerate(sizes))
    return piles_of(layout, device)[0]


def locate(pile: Pile, blocks: list[Bits], itemsize: int | None = None) -> PileAddresses:
    flats = {tile.tensor.name: to_device(bits, pile.device) for tile, bits in zip(pile.tiles, blocks, strict=True)}
    return pile.locate(flats, itemsize)


def host(tensor: torch.Tensor, dtype: Any) -> np.ndarray:
    return to_host(tensor)[0].view(dtype)


def small(seed: int = 0, specs: tuple[TensorSpec, ...] = SPECS) -> tuple[Layout, dict[str, Bits]]:
    """A layout, and weights of which some are small; none of those that are looked at to choose the cut is."""
    rng, layout = np.random.default_rng(seed), layouts.make(specs)
    state = {spec.name: rng.integers(0, 100, spec.size).astype(spec.kind.bits) for spec in layout.tensors}
    for tile in layout.tiles:
        name, kind = tile.tensor.name, tile.tensor.kind
        if kind.exponent_shift is not None:
            sampled = np.arange(tile.size) % SAMPLE_PERIOD < SAMPLE_RUN
            hot = (rng.random(tile.size) < 0.3) & ~sampled
            far = (FAR << kind.exponent_shift) + rng.integers(0, 1 << kind.exponent_shift, tile.size)
            bits = np.where(hot, near(rng, tile.tensor.dtype, (tile.size,), SMALL), far.astype(kind.bits))
            state[name][tile.flat_indices(np.arange(tile.size))] = bits
    return layout, state


def trained(layout: Layout, state: Mapping[str, Bits], seed: int, density: float = 0.4) -> dict[str, Bits]:
    """The next state: small weights move by a few places, one in eight of them further; of the others one moves."""
    rng, out = np.random.default_rng(seed), {}
    for spec in layout.tensors:
        bits = state[spec.name]
        moved = nudge(rng, nudge(rng, bits, density, 3), density / 8, 40)
        if spec.size and spec.kind.exponent_shift is not None:
            far = classes(bits, spec.kind.exponent_shift) >= FAR - 1
            moved[far] = bits[far]
            moved[np.flatnonzero(far)[seed % 7]] ^= bits.dtype.type(1)
        out[spec.name] = moved
    return out


def all_of(layout: Layout, source: DeviceSource) -> tuple[TileShare, Shards]:
    """A source in the dtypes of a layout as shards that are complete, and the share of all its tiles."""
    shards = Shards({spec.name: Window.around(spec) for spec in layout.tensors}, source, {})
    return share_of(layout, owner_of(layout, [shards.windows]), 0, shards), shards


class Pair:
    """A writer on the host and a base on the device, at the same version."""

    def __init__(self, layout: Layout, state: Mapping[str, Bits], device: str, codec: patch.CodecName = "auto") -> None:
        self.codec = codec
        self.writer = Writer(layout, dict(state), codec)
        self.backend = DeviceBackend(layout, to_flats(state, device), device=place(device))
        self.state = WeightState(self.backend)
        self.baseline = DeviceBaseline(place(device), "device")
        self.last = self.writer.root()

    def difference(self, new: Mapping[str, Bits]) -> DeviceDifference:
        flats = to_flats(new, str(self.backend.device))
        layout = self.state.layout
        views = {spec.name: DeviceView(spec, flats[spec.name].view(spec.shape)) for spec in layout.tensors}
        share, shards = all_of(layout, DeviceSource(views, {}))
        return self.baseline.compare(share, self.state, shards, self.codec)

    def encode(self, new: Mapping[str, Bits]) -> tuple[EncodedPart, Transition]:
        return self.difference(new).encode(self.last, self.codec)

    def advance(self, new: Mapping[str, Bits]) -> tuple[Manifest, bytes]:
        """Move both on, and hold what the device makes against what the host makes."""
        part, transition = self.encode(new)
        self.last, (data,) = self.writer.advance(new)
        assert bytes(part.data) == bytes(data)
        assert part.id == self.last.parts[0].id
        assert (transition.history.digest() if transition.history.tiles else None) == self.last.history
        self.state.commit(transition)
        assert self.state.digest == self.last.digest
        return self.last, bytes(data)


def codecs_of(data: bytes, layout: Layout) -> set[Codec]:
    """The codecs that a part uses."""
    _, sections = container.open_part(data)
    _, entries = index.parse(sections[0], len(layout.tiles), [len(section) for section in sections])
    return {entry.codec for entry in entries}
