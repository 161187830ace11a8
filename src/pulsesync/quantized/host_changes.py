"""Changes of a state in host memory as flat tensors, and back."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pulsesync.core.types import BLOCK, BlockChange
from pulsesync.format.weights import Changes
from pulsesync.quantized.changes import FlatChanges
from pulsesync.state.weights import WeightState


def list_changes(changes: Changes) -> list[FlatChanges]:
    """Changes of tiles as flat tensors, those of each size of a weight together."""
    by_size: dict[int, list[tuple[int, BlockChange]]] = {}
    for (ordinal, _), change in sorted(changes.items()):
        by_size.setdefault(change.new.itemsize, []).append((ordinal, change))
    return [_joined(some) for some in by_size.values()]


def _joined(some: Sequence[tuple[int, BlockChange]]) -> FlatChanges:
    counts = [change.positions.size for _, change in some]
    owners = np.repeat([ordinal for ordinal, _ in some], counts)
    indices = np.concatenate([change.tile_positions() for _, change in some])
    old, new = (np.concatenate([getattr(change, side) for _, change in some]) for side in ("old", "new"))
    signed = np.dtype(f"<i{old.itemsize}")
    return FlatChanges(*(torch.from_numpy(column) for column in (owners, indices, old.view(signed), new.view(signed))))


def make_changes(state: WeightState, some: Iterable[FlatChanges]) -> Changes:
    """Changes of tensors, each of which is one tile, sorted, in the form of the state."""
    out: dict[tuple[int, int], BlockChange] = {}
    for flat in some:
        bits = np.dtype(f"<u{flat.new.element_size()}")
        owners, indices, old, new = (column.numpy() for column in (flat.owners, flat.indices, flat.old, flat.new))
        keys = (owners << 26) | (indices // BLOCK)
        begins = np.flatnonzero(np.diff(keys, prepend=-1))
        for begin, end in zip(begins, [*begins[1:], keys.size], strict=True):
            number = int(indices[begin]) // BLOCK
            positions = (indices[begin:end] - number * BLOCK).astype(np.uint32)
            change = BlockChange(number, positions, old[begin:end].view(bits), new[begin:end].view(bits))
            out[int(owners[begin]), number] = change
    return out
