"""Decode parts on the device: their streams go up, and what they change stays there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, Codec, Tile
from pulsesync.device.changes import SPREAD, PileChanges, find_changes, on_whole
from pulsesync.device.hot import DeviceHistory, HotList, list_hot, mark_hot
from pulsesync.device.memory import INTEGERS, empty, on_host, starts_of, to_host, to_stream, unsigned
from pulsesync.device.pile import Pile, PileAddresses, rectangle
from pulsesync.errors import FormatError
from pulsesync.format import patch, tables
from pulsesync.format.codecs import dense, gap, step
from pulsesync.format.codecs.context import move_cold
from pulsesync.format.codecs.heads import (
    ColdChanges,
    OpenedPayload,
    PayloadBlocks,
    begin,
    parse_blocks_of,
    parse_cold,
    streams_of,
)
from pulsesync.format.index import FrequencyTable
from pulsesync.format.layout import Layout
from pulsesync.format.patch import OpenedIndex
from pulsesync.format.predict import PREDICTING
from pulsesync.kernels import cuda, spec

MANY = 1 << 22  # bytes of streams that are copied by several threads ...
COPIERS = 4  # ... of so many


Plain = tuple[Tile, Codec, memoryview]  # a tile that is not predicted, and its payload


@dataclass(frozen=True)
class OpenedPayloads:
    """The payloads of a part: those coded against old weights by table, and the others."""

    tables: Sequence[FrequencyTable]
    coded: Mapping[int, Sequence[tuple[Tile, OpenedPayload]]]
    plain: Mapping[str, Sequence[Plain]]  # by dtype
    cuts: Mapping[int, int]  # of tiles coded with a history, by ordinal


def open_part(
    opened: OpenedIndex,
    sections: Mapping[int, memoryview],
    layout: Layout,
    memories: DeviceHistory | None,
    wanted: Collection[int] | None,
) -> OpenedPayloads:
    """Begin to read the payloads of a part. Raises: FormatError, and its branches, as `format.patch.decode_tiles`."""
    coded: dict[int, list[tuple[Tile, OpenedPayload]]] = {}
    plain: dict[str, list[Plain]] = {}
    cuts = {}
    for entry, body in patch.payloads(opened, sections, wanted):
        tile = layout.tiles[entry.tile]
        patch.check_tile(entry, tile)
        if entry.codec not in PREDICTING:
            plain.setdefault(tile.tensor.dtype, []).append((tile, entry.codec, body))
            continue
        begun = begin(body, tile.size, tile.tensor.kind)
        patch.check_heads(entry, tile, begun, opened.tables, memories)
        coded.setdefault(begun.table, []).append((tile, begun))
        if entry.codec == Codec.HISTORY:
            cuts[tile.ordinal] = begun.cut
    return OpenedPayloads(opened.tables, coded, plain, cuts)


def decode_coded(
    pile: Pile, begun: Sequence[OpenedPayload], table: FrequencyTable, weights: PileAddresses, memories: DeviceHistory
) -> list[PileChanges]:
    """The changes of a part's tiles that share a table; pile and weights are of these tiles alone.

    The device looks for the hot weights and decodes while the host reads on.

    Raises:
        FormatError: a stream does not decode, or a cold change is on a hot weight; VerificationError: the weights are
        not those that the history is of.
    """
    cuts = np.array([one.cut for one in begun], np.int64)
    hot = mark_hot(pile, weights, cuts, memories)
    blocks = parse_blocks_of(begun)
    streams = streams_of(begun, blocks)
    stream = _upload(streams, pile.device)
    everywhere = torch.ones(pile.blocks, dtype=torch.int32, device=pile.device)
    listed = list_hot(hot, weights, everywhere, table.contexts, places=True)
    runs = []
    if blocks.changes.any():
        moved, faults = _hot(pile, weights, table, stream, listed, blocks)
        runs.append(moved)
    runs.append(_cold(pile, cuts, blocks.colds, parse_cold(begun, blocks, streams), weights))
    if blocks.changes.any() and (found := to_host(faults)[0]).any():
        raise FormatError(spec.FAULTS[int(found[found > 0][0])])
    return [run for run in runs if run.count]


def _hot(
    pile: Pile,
    weights: PileAddresses,
    table: FrequencyTable,
    stream: torch.Tensor,
    listed: HotList,
    blocks: PayloadBlocks,
) -> tuple[PileChanges, torch.Tensor]:
    """Have the streams decoded; what is found is right if there turn out to be no faults."""
    device = pile.device
    changes, lanes, words = blocks.changes, blocks.lanes, blocks.words
    total, coded = int(changes.sum()), np.flatnonzero(changes)
    chosen = to_stream(coded, device)
    out_starts = to_stream(starts_of(changes[coded]), device)
    if (np.diff(listed.borders) < changes).any():
        raise FormatError(spec.FAULTS[3])
    first, end = (to_stream(listed.borders[some], device) for some in (coded, coded + 1))
    decisions, extras = (empty(total, torch.int32, device) for _ in range(2))
    symbols = empty(total, torch.uint8, device)
    faults = torch.zeros(coded.size, dtype=torch.int32, device=device)
    cuda.decode[(coded.size,)](
        unsigned(stream), to_stream(starts_of(words[coded]), device), to_stream(lanes[coded].astype(np.int32), device),
        first, end, unsigned(listed.rows), unsigned(to_stream(table.cumulative, device)), table.contexts.symbols,
        out_starts, unsigned(decisions), symbols, unsigned(extras), faults, BITS=table.contexts.bits,
        WIDE=pile.kind.itemsize == 4, num_warps=1,
    )  # fmt: skip
    positions = empty(total, torch.int32, device)
    old, new = (empty(total, INTEGERS[pile.kind.itemsize], device) for _ in range(2))
    cuda.land[(coded.size, SPREAD)](
        weights.at[chosen], first, unsigned(listed.places), out_starts, unsigned(decisions), symbols, unsigned(extras),
        unsigned(positions), unsigned(old), unsigned(new), faults, ITEM=pile.kind.itemsize, SPAN=512,
    )  # fmt: skip
    return PileChanges(pile, to_stream(starts_of(changes), device), positions, old, new), faults


def _upload(streams: Sequence[memoryview], device: torch.device) -> torch.Tensor:
    """All streams, one after the other."""
    borders = starts_of(np.array([len(stream) for stream in streams], np.int64))
    host = on_host(borders[-1:].tolist(), torch.uint8, device)
    array = host.numpy()

    def copy(job: tuple[memoryview, int]) -> None:
        stream, begin = job
        array[begin : begin + len(stream)] = np.frombuffer(stream, np.uint8)

    spread(copy, zip(streams, borders.tolist(), strict=False), COPIERS if array.size > MANY else 1)
    return host.to(device, non_blocking=True).view(torch.int16)


def _cold(
    pile: Pile, cuts: NDArray[np.int64], per_tile: NDArray[np.int64], colds: ColdChanges, weights: PileAddresses
) -> PileChanges:
    """The cold changes: few, so that the host can move them; only their old weights are fetched."""
    blocks = np.repeat(pile.first_block[:-1], per_tile) + colds.positions // BLOCK
    positions = (colds.positions % BLOCK).astype(np.int32)
    starts = np.searchsorted(blocks, np.arange(pile.blocks + 1))
    old = fetch(pile, weights, blocks, positions) if blocks.size else np.empty(0, pile.kind.bits)
    new = move_cold(old, colds.steps, np.repeat(cuts, per_tile), pile.kind.exponent_shift or 0)
    return PileChanges(
        pile, *(to_stream(array, pile.device) for array in (starts.astype(np.int64), positions, old, new))
    )


def fetch(pile: Pile, weights: PileAddresses, blocks: NDArray[np.int64], positions: NDArray[np.int32]) -> Bits:
    """Single weights, by block and position."""
    wide = pile.kind.itemsize
    at = weights.at[to_stream(blocks, pile.device)] + to_stream(positions, pile.device).to(torch.int64) * wide
    out = empty(positions.size, INTEGERS[wide], pile.device)
    cuda.gather[(-(-positions.size // 1024),)](at, positions.size, unsigned(out), ITEM=wide, SPAN=1024)
    return to_host(out)[0].view(pile.kind.bits)


def decode_plain(whole: Pile, payloads: Sequence[Plain], flats: Mapping[str, torch.Tensor]) -> list[PileChanges]:
    """Tiles of a dtype that are not predicted: what of them differs from the old weights."""
    runs = []
    for codecs, decode in (((Codec.GAP, Codec.STEP), _sparse), ((Codec.DENSE, Codec.XOR), _whole)):
        some = [(tile, codec, body) for tile, codec, body in payloads if codec in codecs]
        if some:
            pile = whole.part([tile.ordinal for tile, _, _ in some])
            runs.append(on_whole(decode(pile, some, flats), whole))
    return [run for run in runs if run.count]


def _sparse(pile: Pile, payloads: Sequence[Plain], flats: Mapping[str, torch.Tensor]) -> PileChanges:
    """Tiles of `gap` and `step`: the host puts together new weights, for which only the old ones there are fetched."""
    decoded = [_positions_and_moves(*payload) for payload in payloads]
    firsts = pile.first_block.tolist()
    where = np.concatenate([at + first * BLOCK for (at, _), first in zip(decoded, firsts, strict=False)])
    blocks, here = where // BLOCK, (where % BLOCK).astype(np.int32)
    old = fetch(pile, pile.locate(flats), blocks, here)
    cuts = np.cumsum([at.size for at, _ in decoded])[:-1]
    values = np.concatenate([move(before) for (_, move), before in zip(decoded, np.split(old, cuts), strict=True)])
    differ = old != values
    starts = np.searchsorted(blocks[differ], np.arange(pile.blocks + 1)).astype(np.int64)
    arrays = (starts, here[differ], old[differ], values[differ])
    return PileChanges(pile, *(to_stream(array, pile.device) for array in arrays))


def _positions_and_moves(
    tile: Tile, codec: Codec, body: memoryview
) -> tuple[NDArray[np.int64], Callable[[Bits], Bits]]:
    """Where a tile changes, and what makes new weights of the old ones there."""
    if codec == Codec.GAP:
        positions, values = gap.decode(body, tile.size, tile.tensor.kind.bits)
        return positions, lambda _: values
    positions, steps = step.decode(body, tile.size, tile.tensor.kind.itemsize)
    return positions, lambda old: tables.apply_steps(old, steps)


def _whole(pile: Pile, payloads: Sequence[Plain], flats: Mapping[str, torch.Tensor]) -> PileChanges:
    """Tiles of `dense` and `xor`."""
    tiles = []
    for (tile, codec, body), place in zip(payloads, pile.places, strict=True):
        blocks = [to_stream(bits, pile.device) for bits in dense.decode(body, tile.size, tile.tensor.kind.bits)]
        tiles.append(torch.cat(blocks))
        if codec == Codec.XOR:
            tiles[-1] ^= rectangle(flats[place.tensor.name], place).reshape(-1).view(tiles[-1].dtype)
    run, _ = find_changes(pile, pile.locate(flats), pile.located(tiles), cast=False)
    return run
