"""Which entries of an update are sent, and how large they are, coded on a device: the bytes of `loco.steps`.

There is one tile, whose old weights are the descriptions of the entries, which all trainers know, as BF16 bits.
"""

from functools import cache, lru_cache

import torch
from torch import Tensor

from pulsesync.core.types import BLOCK, Bits, TensorSpec, Tile
from pulsesync.device.blocks import count_pile
from pulsesync.device.changes import PileChanges, compose, digest_changes, digest_changes_by_block
from pulsesync.device.decode import check_faults, decode_coded, decode_plain, open_part
from pulsesync.device.encode import code_piles
from pulsesync.device.memory import DeviceStream, to_host
from pulsesync.device.parts import diffs_of
from pulsesync.device.pile import Pile
from pulsesync.device.tracked import DeviceHistory
from pulsesync.errors import ChecksumError, FormatError
from pulsesync.format import container, patch
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout

NAME = "fired"
HALF = 1 << 15


class _Described:
    """The descriptions of the entries, as weights that are copied to the host block by block."""

    def __init__(self, flat: Tensor) -> None:
        self._flat = flat

    def block(self, tile: Tile, number: int) -> Bits:
        piece = self._flat[number * BLOCK : (number + 1) * BLOCK]
        with _fetching(piece.device)():
            return to_host(piece)[0].view(tile.tensor.kind.bits)


@cache
def _fetching(device: torch.device) -> DeviceStream:
    """The stream in which threads fetch data for codecs that are seldom tried."""
    return DeviceStream(device)


@lru_cache(maxsize=256)  # shared states, and the pieces of fragments, one per trainer
def pile_of(name: str, dtype: str, size: int, device: torch.device) -> tuple[Layout, Pile]:
    """The layout of one tensor, and its pile."""
    layout = layouts.make([TensorSpec(name, dtype, (size,))])
    return layout, Pile(layout.tiles, layout.tiles, device)


def encode_steps(described: Tensor, positions: Tensor, sizes: Tensor, negative: Tensor) -> bytes:
    """Write which entries are sent, their sizes in steps, and whether each is negative, 1 or 0."""
    if not positions.numel():
        return b""
    layout, pile = pile_of(NAME, "BF16", described.numel(), described.device)
    flats = {NAME: described}
    weights, before = pile.locate(flats), count_pile(pile, flats)
    old = described[positions]
    up = (old < 0) == (negative != 0)  # towards the nearest border
    new = _unordered(_ordered(old) + torch.where(up, sizes, -sizes))
    borders = torch.arange(pile.blocks + 1, device=pile.device) * BLOCK
    starts = torch.searchsorted(positions, borders)
    run = PileChanges(pile, starts, (positions % BLOCK).to(torch.int32), old, new)
    coded = code_piles([(run, weights)], None, 0)
    after = {0: before[0] + digest_changes(coded.moved)[0]}
    diffs = diffs_of(run, _fetching(described.device))
    done = patch.finish(layout, diffs, _Described(described), [coded.table], coded.tiles, after, "auto")
    return bytes(done.data)


def decode_steps(described: Tensor, data: memoryview, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, sizes, and whether each is negative, of this number of entries. Raises: FormatError, or a subclass."""
    if not count:
        if len(data):
            raise FormatError("a payload without entries must have no bytes for them")
        nothing = torch.empty(0, dtype=torch.int64, device=described.device)
        return nothing, nothing, nothing
    layout, pile = pile_of(NAME, "BF16", described.numel(), described.device)
    flats = {NAME: described}
    header, sections = container.open_part(data, None)
    opened = patch.open_index(header, sections[0], layout)
    part = open_part(opened, dict(enumerate(sections)), dict(enumerate(layout.tiles)), None)
    weights = pile.locate(flats)
    runs: list[PileChanges] = []
    for number, coded in part.coded.items():
        for decoded in decode_coded(pile, coded, part.tables[number], weights, DeviceHistory()):
            check_faults(decoded.faults())
            runs += decoded.runs
    runs += decode_plain(pile, part.plain, weights)
    if len(opened.entries) != 1 or sum(run.count for run in runs) != count:
        raise FormatError("a payload does not have the number of entries that its header states")
    (found,) = compose(runs, ())  # in order
    if count_pile(pile, flats)[0] + digest_changes(digest_changes_by_block([found]))[0] != opened.entries[0].sum:
        raise ChecksumError("a payload is damaged: its decoded entries do not have the digest that it states")
    steps = ((_ordered(found.new) - _ordered(found.old) + HALF) & 0xFFFF) - HALF
    if (steps == -HALF).any():
        raise FormatError("a payload contains a value above the largest that is allowed")
    negative = (found.old < 0) ^ (steps < 0)
    return found.flat_keys(), steps.abs(), negative.to(torch.int64)


def _ordered(bits: Tensor) -> Tensor:
    """The rank of 16-bit patterns in the order of their values."""
    wide = bits.to(torch.int64) & 0xFFFF
    return wide ^ torch.where(bits < 0, 0xFFFF, 0x8000)


def _unordered(places: Tensor) -> Tensor:
    """The 16-bit patterns with these ranks, modulo 2^16, as int16."""
    wide = places & 0xFFFF
    return (wide ^ torch.where(wide >= HALF, HALF, 0xFFFF)).to(torch.int16)
