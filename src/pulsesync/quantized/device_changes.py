"""Changes of a state on a GPU as flat tensors, and back: the counterpart of `host_changes`, imported only for a GPU."""

from collections.abc import Iterable

import numpy as np
import torch

from pulsesync.core.types import BLOCK
from pulsesync.device.changes import Changes, PileChanges
from pulsesync.device.memory import INTEGERS, on, to_device
from pulsesync.device.pile import Pile
from pulsesync.device.state import backend_of
from pulsesync.quantized.changes import SIGNED, FlatChanges
from pulsesync.state.weights import WeightState


def list_changes(changes: Changes) -> list[FlatChanges]:
    """Changes of tiles as flat tensors, those of each run of a pile together."""
    return [_listed(run) for run in changes if run.count]


def _listed(run: PileChanges) -> FlatChanges:
    pile = run.pile
    with on(pile.device):
        blocks = torch.arange(pile.blocks, device=pile.device)
        blocks = torch.repeat_interleave(blocks, run.starts.diff(), output_size=run.count)
        owners = to_device(pile.ordinals[pile.tile_of], pile.device)[blocks]
        bits = SIGNED[pile.kind.itemsize]
        return FlatChanges(owners, pile.begins[blocks] + run.positions, run.old.view(bits), run.new.view(bits))


def make_changes(state: WeightState, some: Iterable[FlatChanges]) -> Changes:
    """Changes of tensors, each of which is one tile, sorted, in the form of the state."""
    runs = (
        _of_pile(pile, flat, len(state.layout.tiles))
        for flat in some
        for pile in backend_of(state).piles
        if pile.kind.itemsize == flat.new.element_size()
    )
    return [run for run in runs if run.count]


def _of_pile(pile: Pile, flat: FlatChanges, tiles: int) -> PileChanges:
    """The changes of tiles of a pile."""
    firsts = np.full(tiles, -1, np.int64)
    firsts[pile.ordinals] = pile.first_block[:-1]
    with on(pile.device):
        first = to_device(firsts, pile.device)[flat.owners]
        flat, first = flat.where(first >= 0), first[first >= 0]
        blocks = first + flat.indices // BLOCK
        starts = torch.searchsorted(blocks, torch.arange(pile.blocks + 1, device=pile.device))
        bits = INTEGERS[pile.kind.itemsize]
        positions = (flat.indices % BLOCK).to(torch.int32)
        return PileChanges(pile, starts, positions, flat.old.view(bits), flat.new.view(bits))
