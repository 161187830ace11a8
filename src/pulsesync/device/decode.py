"""Decode parts on the device: streams are copied to the device, and the decoded changes stay there."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pulsesync.core.threads import begin as begin_work
from pulsesync.core.threads import spread
from pulsesync.core.types import Bits, Codec, Sum, Tile
from pulsesync.device.changes import (
    SPREAD,
    BlockDigestChanges,
    PileChanges,
    begin_digest_changes,
    digest_changes,
    find_changes,
    on_whole,
)
from pulsesync.device.memory import (
    INTEGERS,
    all_to_stream,
    empty,
    fetch,
    on,
    on_host,
    starts_of,
    to_stream,
    unsigned,
    warps_of,
)
from pulsesync.device.pieces import PieceTable
from pulsesync.device.pile import Pile, PileAddresses, Piles
from pulsesync.device.tracked import (
    DeviceHistory,
    HotList,
    HotSearch,
    HotWeights,
    Remembering,
    advanced,
    begin_remember,
)
from pulsesync.errors import FormatError, VerificationError
from pulsesync.format import patch, tables
from pulsesync.format.body import Body
from pulsesync.format.codecs import gap, step
from pulsesync.format.codecs.heads import (
    BegunPayloads,
    ColdChanges,
    PayloadStreams,
    begin,
    parse_cold,
    parse_streams_of,
    streams_of,
)
from pulsesync.format.index import FrequencyTable
from pulsesync.format.patch import OpenedIndex
from pulsesync.format.predict import PREDICTING
from pulsesync.kernels import cuda, spec
from pulsesync.kernels.arrays import I64

logger = logging.getLogger(__name__)

MANY = 1 << 22  # bytes of streams that are copied by several threads ...
COPIERS = 4  # ... of this number
MANY_COLD = 1 << 16  # cold changes that a thread reads concurrently
# Where more than one of this number of weights is said to change, hot weights are counted before memory is allocated.
MANY_CHANGES = 8
LISTED, LISTED_SHARE = 1 << 26, 4  # hot weights listed at a time, two bytes each: this number, or a fourth of a pile


Plain = tuple[Tile, Codec, memoryview]  # a tile that is not predicted, and its payload


@dataclass(frozen=True)
class OpenedPayloads:
    """The payloads of a part: those coded against old weights by table, and the others."""

    tables: Sequence[FrequencyTable]
    coded: Mapping[int, BegunPayloads]
    plain: Sequence[Plain]
    cuts: Mapping[int, int]  # of tiles coded with a history, by ordinal


def open_part(
    opened: OpenedIndex, sections: Mapping[int, memoryview], tiles: Mapping[int, Tile], memories: DeviceHistory | None
) -> OpenedPayloads:
    """Begin to read the payloads of some tiles of a part, by ordinal. Raises: as `format.patch.decode`."""
    plain: list[Plain] = []
    predicted: list[tuple[Codec, Tile, memoryview]] = []
    for entry, body in patch.payloads(opened, sections, tiles):
        tile = tiles[entry.tile]
        patch.check_tile(entry, tile)
        if entry.codec in PREDICTING:
            predicted.append((entry.codec, tile, body))
        else:
            plain.append((tile, entry.codec, body))
    if not predicted:
        return OpenedPayloads(opened.tables, {}, plain, {})
    codecs, predicted_tiles, bodies = zip(*predicted, strict=True)
    begun = begin(bodies, predicted_tiles)
    patch.check_heads_of(codecs, begun, opened.tables, memories)
    fields = zip(codecs, predicted_tiles, begun.cuts.tolist(), strict=True)
    cuts = {tile.ordinal: cut for codec, tile, cut in fields if codec == Codec.HISTORY}
    numbers = dict.fromkeys(begun.tables.tolist())
    coded = {number: begun.part(np.flatnonzero(begun.tables == number)) for number in numbers}
    return OpenedPayloads(opened.tables, coded, plain, cuts)


@dataclass(frozen=True)
class GroupChecks:
    """The checks of a part: how the changes of groups change the digest, by block of a pile."""

    pile: Pile
    blocks: I64
    expected: NDArray[np.uint32]

    def verify(self, by_block: BlockDigestChanges) -> None:
        """Raises: VerificationError, if the changes of a group do not match its check."""
        if not self.blocks.size:
            return
        none = np.zeros(self.blocks.size, np.uint64)
        counted = by_block[self.pile][self.blocks, 0] if self.pile in by_block else none
        wrong = self.blocks[counted.astype(np.uint32) != self.expected]
        if wrong.size:
            tile = self.pile.tiles[self.pile.tile_of[wrong[0]]]
            raise VerificationError(
                f"digest mismatch: a decoded group of {tile.tensor.name} differs from the part's check; weights "
                "unchanged",
                tensor=tile.names[0],
            )


@dataclass(frozen=True)
class DecodedTiles:
    """The changes of tiles that share a table, for the whole pile; the checks they must pass; and their hot weights.

    The changes of a block with a fault are at its first weight, so that they can be counted and marked nevertheless.
    """

    runs: list[PileChanges]
    checks: GroupChecks
    hot: HotWeights
    faults: Callable[[], list[NDArray[np.int32]]]  # waits for those of cold changes, and of blocks


def check_faults(found: Iterable[NDArray[np.int32]]) -> None:
    """Raises: FormatError, by the first fault that kernels have found, if there is one."""
    for faults in found:
        if faults.any():
            raise FormatError(spec.FAULTS[int(faults[faults > 0][0])])


class _TooManyHot(Exception):  # noqa: N818 - an event of a decoding, which no caller sees
    """So much of some tiles is hot that their list would need much memory."""


def decode_coded(
    whole: Pile, coded: BegunPayloads, table: FrequencyTable, weights: PileAddresses, memories: DeviceHistory
) -> list[DecodedTiles]:
    """Launch the decoding of the tiles of a part that share a table; weights: of the whole pile.

    Where a list of all hot weights would need much memory, or more than there is, half of the tiles are decoded after
    the others. It waits until hot weights are counted; the caller must check the faults, before anything is written.

    Raises:
        FormatError: a block has more changes than hot weights; VerificationError: the weights do not match the history;
        torch.OutOfMemoryError: a single tile needs more memory than there is.
    """
    try:
        return [_decode_at_once(whole, coded, table, weights, memories)]
    except _TooManyHot:
        pass
    except torch.OutOfMemoryError:
        if len(coded.tiles) == 1:
            raise
        many = "The GPU has too little free memory to decode %d tiles at once: they are decoded in two parts."
        logger.warning(many, len(coded.tiles))
    halves = (coded.part(half) for half in np.array_split(np.arange(len(coded.tiles)), 2))
    return [one for half in halves for one in decode_coded(whole, half, table, weights, memories)]


def _decode_at_once(
    whole: Pile, coded: BegunPayloads, table: FrequencyTable, weights: PileAddresses, memories: DeviceHistory
) -> DecodedTiles:
    """The same at once. Raises: the same; _TooManyHot: there are several tiles, and their list would be too long.

    Everything is launched before the host waits, unless many weights change: then hot weights are counted first.
    """
    part = whole.part([tile.ordinal for tile in coded.tiles])
    pile = whole if 2 * part.size >= whole.size else part  # of a small part, the rest of the pile need not be read
    weights, tiles = weights.of(whole, pile), pile.tiles_of(part)
    streams = parse_streams_of(coded)
    contents, kept = streams_of(coded, streams), part.kept_streams
    known = memories.of_pile(pile)
    cuts, per_tile = known.cuts.copy(), np.zeros(len(pile.tiles), np.int64)
    cuts[tiles], per_tile[tiles] = coded.cuts, streams.colds
    fields = np.zeros((3, pile.blocks), np.int64)  # of the blocks of other tiles nothing
    fields[:, pile.blocks_of(part)] = streams.changes[kept], streams.lanes[kept], streams.words[kept]
    blocks = _Blocks(*fields)
    likely = known.hot_weights(cuts, tables.likely_decisions(blocks.lanes))
    rooms = np.where(blocks.changes > 0, np.minimum(pile.host_sizes, likely), 0)
    most = max(LISTED, whole.size // LISTED_SHARE) if len(coded.tiles) > 1 else whole.size
    if rooms.sum() > most:
        raise _TooManyHot
    search = HotSearch(pile, weights, cuts, memories, rooms=rooms, contexts=table.contexts, ranks=True)
    reading: Callable[[], ColdChanges] = partial(parse_cold, coded, streams, contents)
    if streams.colds.sum() > MANY_COLD:  # a thread that runs Python takes turns with this one
        reading = begin_work(reading)
    decoder, decoded = None, None
    if blocks.changes.any():
        stream = _upload(_kept_contents(contents, streams, kept), pile.device)
        decoder = _StreamDecoder(pile, weights, table, stream, blocks)
        if MANY_CHANGES * blocks.changes.sum() <= pile.size:
            decoded = decoder.launch(search.listed)
    cold = reading()
    stepped, cold_faults = _step_cold(pile, cuts, per_tile, cold, weights)
    counts = search.count()
    if (counts < blocks.changes).any():  # also before memory is allocated for them
        raise FormatError(spec.FAULTS[spec.OTHER_COUNT])
    if search.lacks_room:
        decoded = None
        if counts[rooms > 0].sum() > most:
            raise _TooManyHot
    hot = replace(search.wait(), changes=blocks.changes)
    if decoder is not None and decoded is None:
        decoded = decoder.launch(hot.listed)
    found, faults = [stepped], [cold_faults]
    if decoded is not None:
        found, faults = [decoded[0], stepped], [cold_faults, decoded[1]]
    checked = cold.checked[kept]
    checks = GroupChecks(whole, whole.blocks_of(part)[checked], cold.checks[kept][checked])
    runs = [on_whole(run, whole) for run in found if run.count]
    return DecodedTiles(runs, checks, hot.without_list(), fetch(*faults))


@dataclass(frozen=True)
class _Blocks:
    """The contents of payloads, by block of a pile."""

    changes: I64
    lanes: I64
    words: I64


def _kept_contents(contents: Sequence[memoryview], streams: PayloadStreams, kept: I64) -> Sequence[memoryview]:
    """The streams to decode, among those of all payloads."""
    if kept.size == streams.changes.size:
        return contents
    ends = 2 * np.r_[0, np.cumsum(streams.words)]
    payload = np.repeat(np.arange(len(contents)), np.diff(streams.first))
    begins = ends[streams.first[:-1]]
    some = ((n, int(payload[n])) for n in kept.tolist())
    return [contents[of][ends[n] - begins[of] : ends[n + 1] - begins[of]] for n, of in some]


class _StreamDecoder:
    """Decodes the streams of a pile's blocks."""

    def __init__(
        self, pile: Pile, weights: PileAddresses, table: FrequencyTable, stream: torch.Tensor, blocks: _Blocks
    ) -> None:
        self._pile, self._weights, self._table, self._stream = pile, weights, table, stream
        coded = np.flatnonzero(blocks.changes)
        lanes, self._total = blocks.lanes[coded], int(blocks.changes.sum())
        arrays = (*warps_of(lanes), lanes.astype(np.int32), coded, starts_of(blocks.words[coded]))
        changes = starts_of(blocks.changes[coded]), starts_of(blocks.changes)
        shares = table.cumulative, np.append(table.sizes, np.uint32(0))
        *self._warps, self._numbers, self._word_starts, self._out_starts, self._starts, self._shares, self._sizes = (
            all_to_stream((*arrays, *changes, *shares), pile.device)
        )

    def launch(self, hot: HotList) -> tuple[PileChanges, torch.Tensor]:
        """Launch the decoding; return the changes and the faults of blocks, whose changes are not valid."""
        pile, table, device, total = self._pile, self._table, self._pile.device, self._total
        decoded, extras = (empty(total, torch.int32, device) for _ in range(2))
        faults = torch.zeros(self._numbers.numel(), dtype=torch.int32, device=device)
        cuda.decode[(self._warps[1].numel() - 1,)](
            *self._warps, self._numbers, unsigned(self._stream), self._word_starts, hot.rooms, hot.found,
            unsigned(hot.rows), unsigned(self._shares), unsigned(self._shares.view(torch.int64)),
            table.contexts.symbols, tables.listed_class(pile.kind), self._out_starts, unsigned(decoded),
            unsigned(extras), faults, BITS=table.contexts.bits, WIDE=pile.kind.itemsize == 4, num_warps=1,
        )  # fmt: skip
        positions = empty(total, torch.int32, device)
        old, new = (empty(total, INTEGERS[pile.kind.itemsize], device) for _ in range(2))
        cuda.land[(faults.numel(), SPREAD)](
            self._weights.at, self._numbers, pile.tables.first_chunk, unsigned(hot.bitmap), unsigned(hot.ranks),
            hot.begins, hot.rooms, self._out_starts, unsigned(decoded), unsigned(extras), unsigned(self._sizes),
            unsigned(positions), unsigned(old), unsigned(new), faults, ITEM=pile.kind.itemsize, SPAN=512,
        )  # fmt: skip
        return PileChanges(pile, self._starts, positions, old, new), faults


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


def _step_cold(
    pile: Pile, cuts: I64, per_tile: I64, colds: ColdChanges, weights: PileAddresses
) -> tuple[PileChanges, Tensor]:
    """Launch the steps of cold changes; return the changes, and the faults that they have."""
    found = pile.find_blocks(per_tile, colds.positions)
    arrays = starts_of(found.counts), found.positions, found.of(colds.steps), cuts.astype(np.int32)
    starts, positions, steps, of_tiles = all_to_stream(arrays, pile.device)
    return _step_at(pile, starts, positions, steps, of_tiles, weights)


def _step_at(
    pile: Pile, starts: Tensor, positions: Tensor, steps: Tensor, cuts: Tensor, weights: PileAddresses
) -> tuple[PileChanges, Tensor]:
    """Launch the steps of single weights, none of which may be below the cut of its tile; return also their faults."""
    count, wide, device = positions.numel(), pile.kind.itemsize, pile.device
    old, new = (empty(count, INTEGERS[wide], device) for _ in range(2))
    faults = torch.zeros(2, dtype=torch.int32, device=device)
    if count:
        cuda.step_at[(pile.blocks,)](
            weights.at, pile.tables.block_tile, cuts, starts, unsigned(positions), steps, unsigned(old), unsigned(new),
            faults, ITEM=wide, SHIFT=pile.kind.exponent_shift or 0, SPAN=256,
        )  # fmt: skip
    return PileChanges(pile, starts, positions, old, new), faults


@dataclass(frozen=True)
class BlockPlaces:
    """Positions in the blocks of a pile, on the device: those of block b are starts[b] to starts[b + 1]."""

    pile: Pile
    starts: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, pile: Pile, counts: I64, positions: NDArray[np.int32]) -> "BlockPlaces":
        """Positions, given how many each block has."""
        return cls(pile, to_stream(starts_of(counts), pile.device), to_stream(positions, pile.device))


def fetch_weights(places: BlockPlaces, weights: PileAddresses) -> Callable[[], Bits]:
    """Begin to fetch single weights; return a function that waits for them."""
    pile, device = places.pile, places.pile.device
    nowhere = torch.zeros(places.positions.numel(), dtype=torch.int64, device=device)
    nothing = torch.zeros(len(pile.tiles), dtype=torch.int32, device=device)
    here, _ = _step_at(pile, places.starts, places.positions, nowhere, nothing, weights)
    found = fetch(here.old)
    return lambda: found()[0].view(pile.kind.bits)


def decode_plain(whole: Pile, payloads: Sequence[Plain], weights: PileAddresses) -> list[PileChanges]:
    """The changes of tiles that are not predicted, given the old weights of the pile."""
    runs = []
    for codecs, decode in (((Codec.GAP, Codec.STEP), _sparse), (patch.WHOLE, _whole)):
        some = [(tile, codec, body) for tile, codec, body in payloads if codec in codecs]
        if some:
            pile = whole.part([tile.ordinal for tile, _, _ in some])
            runs.append(on_whole(decode(pile, some, weights.of(whole, pile)), whole))
    return [run for run in runs if run.count]


def _sparse(pile: Pile, payloads: Sequence[Plain], weights: PileAddresses) -> PileChanges:
    """Tiles of `gap` and `step`: the host computes the new weights; only the old weights that change are fetched."""
    decoded = [_positions_and_moves(*payload) for payload in payloads]
    per_tile = np.array([where.size for where, _ in decoded], np.int64)
    found = pile.find_blocks(per_tile, np.concatenate([where for where, _ in decoded]))
    old = fetch_weights(BlockPlaces.of(pile, found.counts, found.positions), weights)()
    before = old
    if found.inside is not None:
        before = np.zeros(per_tile.sum(), old.dtype)  # the new values of weights that are not local are not used
        before[found.inside] = old
    tiles = np.split(before, np.cumsum(per_tile)[:-1])
    moved = [move(some) for (_, move), some in zip(decoded, tiles, strict=True)]
    values = found.of(np.concatenate(moved))
    differ = np.flatnonzero(old != values)
    blocks = np.repeat(np.arange(pile.blocks), found.counts)[differ]
    there = BlockPlaces.of(pile, np.bincount(blocks, minlength=pile.blocks), found.positions[differ])
    bits = (to_stream(some[differ], pile.device) for some in (old, values))
    return PileChanges(pile, there.starts, there.positions, *bits)


def _positions_and_moves(tile: Tile, codec: Codec, body: memoryview) -> tuple[I64, Callable[[Bits], Bits]]:
    """The positions at which a tile changes, and a function from the old weights there to the new ones."""
    if codec == Codec.GAP:
        positions, values = gap.decode(body, tile.size, tile.tensor.kind.bits)
        return positions, lambda _: values
    positions, steps = step.decode(body, tile.size, tile.tensor.kind.itemsize)
    return positions, lambda old: tables.apply_steps(old, steps)


def _whole(pile: Pile, payloads: Sequence[Plain], weights: PileAddresses) -> PileChanges:
    """Tiles that are stored whole."""
    whole = (patch.whole_blocks(codec, tile, body) for tile, codec, body in payloads)
    tiles = [torch.cat([to_stream(block.decode(), pile.device) for block in blocks]) for blocks in whole]
    flipped = [n for n, (_, codec, _) in enumerate(payloads) if codec == Codec.XOR]
    if flipped:
        part = pile.part([payloads[n][0].ordinal for n in flipped])
        for n, old in zip(flipped, _copy_tiles(part, weights.of(pile, part)), strict=True):
            tiles[n] ^= old
    return find_changes(pile, weights, _addresses_of(pile, tiles), cast=False)


def _addresses_of(pile: Pile, tiles: Sequence[torch.Tensor]) -> PileAddresses:
    """The blocks of tiles, each of which has its own memory."""
    bases = np.array([tile.data_ptr() for tile in tiles], np.int64)
    at = bases[pile.tile_of] + pile.host_begins * pile.kind.itemsize
    return PileAddresses(to_stream(at, pile.device), tuple(tiles))


def _copy_tiles(pile: Pile, weights: PileAddresses) -> list[torch.Tensor]:
    """Copy the weights of each tile; those of groups that are not local are zeros."""
    sizes = np.array([tile.size for tile in pile.tiles], np.int64)
    starts = starts_of(-(-sizes // 8) * 8)
    table = PieceTable(
        starts[pile.tile_of] + pile.host_begins,
        (pile.host_sizes, pile.host_sizes, np.zeros_like(pile.host_sizes)),
        pile.device,
    )
    run = torch.zeros(int(starts[-1]), dtype=INTEGERS[pile.kind.itemsize], device=pile.device)
    table.gather(weights.at, run)
    return [run[at : at + size] for at, size in zip(starts.tolist(), sizes.tolist(), strict=False)]


@dataclass(frozen=True)
class DecodedPatch:
    """The changes of a patch, and what follows from them."""

    runs: list[PileChanges]
    digest_changes: Mapping[int, Sum]  # of all tiles of the piles that have changes, by ordinal
    history: DeviceHistory | None  # after it


def decode_patch(
    bodies: Sequence[Body],
    piles: Piles,
    tiles: Mapping[int, Tile],
    history: DeviceHistory | None,
    locate: Callable[[Pile], PileAddresses],
) -> DecodedPatch:
    """Decode the parts of a patch against the weights, one pile after the other, to limit memory.

    piles: of all local tiles. tiles: those to decode, by ordinal. history: before the patch; None: none is kept.

    Raises:
        FormatError: or a subclass, for bad bytes; VerificationError: changes do not match their check.
    """
    opened = [open_part(body.index, body.sections, tiles, history) for body in bodies]
    touched = {entry.tile for body in bodies for entry in body.index.entries}
    cuts = {tile: cut for one in opened for tile, cut in one.cuts.items()}
    runs: list[PileChanges] = []
    checks: list[GroupChecks] = []
    faults: list[Callable[[], list[NDArray[np.int32]]]] = []
    later: list[Remembering] = []
    by_pile = _payloads_of_piles(opened, piles)
    for pile in piles:
        with on(pile.device):
            coded, plain = by_pile.get(pile, ((), ()))
            found = (decode_coded(pile, *one, locate(pile), _known(history, one[1])) for one in coded)
            decoded = [one for some in found for one in some]
            mine = [run for one in decoded for run in one.runs]
            in_order = sorted(plain, key=lambda payload: payload[0].ordinal)  # parts need not be in that of their tiles
            mine += decode_plain(pile, in_order, locate(pile)) if plain else ()
            checks += (one.checks for one in decoded)
            faults += (one.faults for one in decoded)
            runs += mine
            hot = next((one.hot for one in decoded if one.hot.pile is pile), None)
            decoded.clear()
            if history is not None:
                later.append(begin_remember(pile, locate, history, cuts, mine, touched, hot))
            del hot  # frees memory before the next pile is decoded
    counting = begin_digest_changes(runs)
    for waits in faults:
        check_faults(waits())
    by_block = counting()
    for one in checks:
        one.verify(by_block)
    return DecodedPatch(runs, digest_changes(by_block), advanced(history, later) if history is not None else None)


def _payloads_of_piles(
    opened: Iterable[OpenedPayloads], piles: Piles
) -> Mapping[Pile, tuple[list[tuple[BegunPayloads, FrequencyTable]], list[Plain]]]:
    """The payloads of each pile: those coded against old weights, by table, and the others."""
    out: dict[Pile, tuple[list[tuple[BegunPayloads, FrequencyTable]], list[Plain]]] = {}
    for one in opened:
        for number, coded in one.coded.items():
            for pile, numbers in piles.numbers(coded.tiles):
                some = coded.part(np.array(numbers)) if len(numbers) < len(coded.tiles) else coded
                out.setdefault(pile, ([], []))[0].append((some, one.tables[number]))
        for pile, numbers in piles.numbers([tile for tile, *_ in one.plain]):
            out.setdefault(pile, ([], []))[1].extend(one.plain[n] for n in numbers)
    return out


def _known(history: DeviceHistory | None, table: FrequencyTable) -> DeviceHistory:
    """The history that payloads were coded with: none, if their table has a single age."""
    return history if history is not None and table.frequencies.shape[1] > 1 else DeviceHistory()
