"""A part of a version: from two states to bytes, and from one state and bytes to changes.

Encoding reads the old weights once together with the new ones, to find changes, and blocks with hot changes twice more,
to count and to code; decoding reads them once. Besides the result it needs O(changed) memory and a buffer per thread.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import numpy as np

from pulsesync import kernels
from pulsesync.core.digest import moved
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, Sum, Tile, TilePatch
from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import container, index, tables
from pulsesync.format.choice import choose, dense_or_raw
from pulsesync.format.codecs import context, dense, gap, heads, raw, step
from pulsesync.format.diff import Diff, TileChanges, find_changes, from_changes
from pulsesync.format.history import MAX_INDEX, History, memory_of
from pulsesync.format.index import FrequencyTable, TileEntry
from pulsesync.format.layout import Layout, count_pieces
from pulsesync.format.predict import PREDICTING, CodedTile, code_against_old
from pulsesync.format.weights import Changes, State, Weights, as_weights, differing

CodecName = Literal["auto", "gap", "step", "context", "history", "dense", "xor"]
WHOLE = (Codec.DENSE, Codec.XOR, Codec.RAW)  # codecs that write every weight of a tile, changed or not
AGAINST_OLD = (*PREDICTING, Codec.STEP)  # codecs that write steps from the old weights
AnchorCodec = Literal["dense", "raw"]
SECTION_BYTES = 1 << 20  # a section is closed at this size, so that several can be hashed in parallel


@dataclass(frozen=True)
class EncodedPart:
    """A finished part, and what its writer needs to update its own base."""

    id: str
    data: bytes | memoryview
    patches: tuple[TilePatch, ...]
    sums: Mapping[int, Sum]  # of the changed tiles, after the patch, by ordinal


@dataclass(frozen=True)
class DecodedPart:
    """What a part changes, and the digests its tiles must then have."""

    patches: tuple[TilePatch, ...]
    sums: Mapping[int, Sum]


def find_diff(tiles: Sequence[Tile], old: State, new: State, codec: CodecName = "auto") -> list[Diff]:
    """The changes of these tiles from old to new, ready to be encoded. Keeps nothing of new except the differences."""
    return find_changes(tiles, as_weights(old), as_weights(new), _against_old(codec))


def diff_of(tiles: Sequence[Tile], old: Weights, changes: Changes, codec: CodecName = "auto") -> list[Diff]:
    """The same, if the changes are already known."""
    return from_changes(tiles, old, changes, _against_old(codec))


def _against_old(codec: CodecName) -> bool:
    return codec in ("auto", "context", "history")


def encode(
    layout: Layout,
    tiles: Sequence[Tile],
    old: State,
    new: State,
    sums: Mapping[int, Sum],
    *,
    codec: CodecName = "auto",
    history: History | None = None,
) -> EncodedPart:
    """Encode the changes of these tiles from old to new: `find_diff` and `encode_diff`."""
    diffs = find_diff(tiles, old, new, codec)
    return encode_diff(layout, diffs, old, sums, codec=codec, history=history)


def encode_diff(
    layout: Layout,
    diffs: Sequence[Diff],
    old: State,
    sums: Mapping[int, Sum],
    *,
    codec: CodecName = "auto",
    history: History | None = None,
) -> EncodedPart:
    """Encode a diff of the old state; sums: the digests of its tiles before the patch.

    `history` codes with the epoch's history, which must then be given and may be empty. `auto` does so if it is given,
    and tries other codecs where they may be smaller; `gap` is for dtypes that have no exponent.
    """
    if codec == "history" and history is None:
        raise ValueError("codec history needs the history of the epoch; none was given")
    if history is not None and history.index >= MAX_INDEX:
        raise ValueError(f"an epoch can have {MAX_INDEX} patches at most; begin a new epoch")
    weights = as_weights(old)
    shared: list[FrequencyTable] = []
    coded: dict[int, CodedTile] = {}
    if _against_old(codec):
        shared, coded = code_against_old(diffs, weights, None if codec == "context" else history)
    moves = spread(lambda d: moved(TilePatch(d.tile, Codec.GAP, d.blocks)), diffs)
    after = {d.tile.ordinal: sums[d.tile.ordinal] + by for d, by in zip(diffs, moves, strict=True)}
    done = finish(layout, diffs, weights, shared, coded, after, codec)
    patches = tuple(_patch(diff, choice) for diff, choice in zip(diffs, done.chosen, strict=True))
    return EncodedPart(done.id, done.data, patches, after)


@dataclass(frozen=True)
class FinishedPart:
    """The bytes of a part, and how each of its tiles was written, in their order."""

    id: str
    data: memoryview
    chosen: list[CodedTile]


def finish(
    layout: Layout,
    diffs: Sequence[TileChanges],
    old: Weights,
    shared: list[FrequencyTable],
    coded: Mapping[int, CodedTile],
    sums: Mapping[int, Sum],
    codec: CodecName,
    allocate: container.Allocate = container.new_bytes,
) -> FinishedPart:
    """Make a part of changed tiles, given payloads coded against old weights, by ordinal, and the digests afterwards.

    Blocks, old weights, positions and values are read only for codecs that `choose` tries.
    """
    shared, chosen = choose(diffs, old, shared, coded, codec)
    tiles = [d.tile for d in diffs]
    return FinishedPart(*_assemble(layout.id, shared, tiles, chosen, sums, allocate), chosen)


def encode_whole(
    layout: Layout, tiles: Sequence[Tile], state: State, sums: Mapping[int, Sum], codec: AnchorCodec = "dense"
) -> EncodedPart:
    """Encode these tiles whole, as a part of an anchor. The part has no patches, because there is no base.

    codec: `dense`, or `raw`, which is also used for tiles that `dense` does not make smaller.
    """
    weights = as_weights(state)
    written = [tile for tile in tiles if tile.size]
    jobs = [(tile, number) for tile in written for number in range(tile.block_count)]
    encode_block = dense.encode_block if codec == "dense" else raw.encode_block
    blocks = iter(spread(lambda job: encode_block(weights.block(*job)), jobs))
    coded = []
    for tile in written:
        pieces = [piece for _ in range(tile.block_count) for piece in next(blocks)]
        coded.append(dense_or_raw(tile, pieces, weights) if codec == "dense" else CodedTile(Codec.RAW, pieces))
    after = {tile.ordinal: sums[tile.ordinal] for tile in written}
    return EncodedPart(*_assemble(layout.id, [], written, coded, after), (), after)


def _patch(diff: Diff, choice: CodedTile) -> TilePatch:
    blocks, after = diff.blocks, choice.remembered
    if after:
        blocks = tuple(BlockChange(b.number, b.positions, b.old, b.new, after.get(b.number)) for b in blocks)
    return TilePatch(diff.tile, choice.codec, blocks, choice.cut)


def _assemble(
    layout: str,
    shared: Sequence[FrequencyTable],
    tiles: Sequence[Tile],
    coded: Sequence[CodedTile],
    sums: Mapping[int, Sum],
    allocate: container.Allocate = container.new_bytes,
) -> tuple[str, memoryview]:
    """Distribute payloads over sections, at least one and no more than a reader accepts; add index and header."""
    sections: list[list[bytes | memoryview]] = [[]]
    numbers, filled = [], 0
    sizes = [payload.size for payload in coded]
    full = max(SECTION_BYTES, sum(sizes) // (container.MAX_SECTIONS - 2) + 1)
    for payload, size in zip(coded, sizes, strict=True):
        if filled >= full:
            sections.append([])
            filled = 0
        sections[-1] += payload.pieces
        filled += size
        numbers.append(len(sections))
    ordinals, codecs = [tile.ordinal for tile in tiles], [payload.codec for payload in coded]
    entries = zip(ordinals, codecs, numbers, sizes, map(sums.__getitem__, ordinals), strict=True)
    return container.build(layout, [[index.build(shared, entries)], *sections], allocate)


@dataclass(frozen=True)
class OpenedIndex:
    """A part's header and index: which tiles are where."""

    header: container.PartHeader
    tables: Sequence[FrequencyTable]
    entries: Sequence[TileEntry]

    def sections_of(self, tiles: Collection[int]) -> set[int]:
        """The sections in which these tiles are."""
        return {entry.section for entry in self.entries if entry.tile in tiles}


def open_index(header: container.PartHeader, section: bytes | memoryview, layout: Layout) -> OpenedIndex:
    """Read the index of a part, section 0, whose hash has been checked. Raises: FormatError and subclasses."""
    if header.layout != layout.id:
        raise FormatError(
            f"expected a part of layout {layout.id[:12]}, but found one of {header.layout[:12]}", part=header.id
        )
    sizes = [size for size, _ in header.sections]
    return OpenedIndex(header, *index.parse(section, layout.tile_count, sizes))


def decode(
    data: bytes | memoryview,
    layout: Layout,
    old: State,
    *,
    expected_id: str | None = None,
    history: History | None = None,
) -> DecodedPart:
    """Check a part and decode all of it against its base state. Nothing is changed.

    Raises: FormatError and subclasses, for bad bytes.
    """
    header, sections = container.open_part(data, expected_id)
    opened, weights = open_index(header, sections[0], layout), as_weights(old)
    tasks = [  # of each tile
        open_tile(entry, layout.tiles[entry.tile], body, opened.tables, history)
        for entry, body in payloads(opened, dict(enumerate(sections)))
    ]

    def run(task: DecodeTask) -> list[BlockChange]:
        memory = memory_of(history if task.codec == Codec.HISTORY else None, task.tile, task.number)
        return run_task(task, weights, memory, opened.tables)

    # `gap` and `step` are numpy calls, which threads slow down.
    is_short = all(entry.codec in (Codec.GAP, Codec.STEP) for entry in opened.entries)
    done = iter(spread(run, [task for some in tasks for task in some], 1 if is_short else None))
    patches = []
    for some in tasks:
        blocks, first = tuple(change for _ in some for change in next(done)), some[0]
        cut = first.payload.heads.cut if first.payload and first.codec == Codec.HISTORY else 0
        patches.append(TilePatch(first.tile, first.codec, blocks, cut))
    return DecodedPart(tuple(patches), {entry.tile: entry.sum for entry in opened.entries})


def payloads(
    opened: OpenedIndex, sections: Mapping[int, memoryview], wanted: Collection[int] | None = None
) -> Iterable[tuple[TileEntry, memoryview]]:
    """The wanted tiles with their payloads, which follow each other in their section.

    Sections are read in order, each once, and only those with wanted tiles: they may be on a disk.
    """
    places = [0] * len(opened.header.sections)
    number, section = 0, memoryview(b"")
    for entry in opened.entries:
        begin = places[entry.section]
        places[entry.section] += entry.size
        if wanted is None or entry.tile in wanted:
            if entry.section != number:
                number, section = entry.section, sections[entry.section]
            yield entry, section[begin : begin + entry.size]


class DecodeTask(NamedTuple):
    """One block of a tile coded against old weights, or a whole tile of another codec; a tile has at least one task."""

    codec: Codec
    tile: Tile
    body: memoryview
    payload: context.Payload | None = None
    number: int = 0


def open_tile(
    entry: TileEntry, tile: Tile, body: memoryview, shared: Sequence[FrequencyTable], history: "HistoryLookup | None"
) -> list[DecodeTask]:
    """Read and check the header of a tile's payload; return the remaining tasks, in the order of its blocks.

    Raises: FormatError and subclasses, for bad bytes.
    """
    check_tile(entry, tile)
    if entry.codec not in PREDICTING:
        return [DecodeTask(entry.codec, tile, body)]
    payload = context.parse(body, tile)
    check_heads(entry.codec, tile, payload.heads.table, payload.heads.cut, shared, history)
    return [DecodeTask(entry.codec, tile, body, payload, n) for n in range(tile.block_count)]


def check_tile(entry: TileEntry, tile: Tile) -> None:
    """Raises: FormatError, if the tile has no weights; UnsupportedError, if its dtype cannot have that codec."""
    if tile.size == 0:
        raise FormatError("the index lists a tile that has no weights", tensor=tile.tensor.name)
    if entry.codec in AGAINST_OLD and tile.tensor.kind.exponent_shift is None:
        raise UnsupportedError(f"{tile.tensor.dtype} cannot be coded against old weights", tensor=tile.tensor.name)


class HistoryLookup(Protocol):
    """A history, in host memory or on a GPU."""

    @property
    def index(self) -> int: ...
    def cut(self, tile: int) -> int: ...


def check_heads(
    codec: Codec, tile: Tile, table: int, cut: int, shared: Sequence[FrequencyTable], history: HistoryLookup | None
) -> None:
    """Raises: FormatError and subclasses, if a payload was made with other tables or another history."""
    if table >= len(shared) or shared[table].dtype != tile.tensor.dtype:
        raise FormatError("a tile uses a table that the part does not have", tensor=tile.tensor.name)
    if cut > shared[table].highest_cut:
        raise LimitError("a tile's cut is above the range of its table", tensor=tile.tensor.name)
    known = history if codec == Codec.HISTORY else History()
    if known is None:
        raise FormatError(
            "the part needs the history of its epoch, which is not available; a full resync from an anchor is required"
        )
    if shared[table].frequencies.shape[1] != known.index + 1 or cut < known.cut(tile.ordinal):
        raise FormatError("the part was encoded with another history of the epoch", tensor=tile.tensor.name)


def check_heads_of(
    codecs: Sequence[Codec],
    payloads: heads.BegunPayloads,
    shared: Sequence[FrequencyTable],
    history: HistoryLookup | None,
) -> None:
    """`check_heads` of many payloads: most are equal in all fields that it checks. Raises: the same."""
    seen = set()
    fields = codecs, payloads.tiles, payloads.tables.tolist(), payloads.cuts.tolist()
    for codec, tile, table, cut in zip(*fields, strict=True):
        least = history.cut(tile.ordinal) if codec == Codec.HISTORY and history is not None else 0
        alike = codec, tile.tensor.dtype, table, cut, least
        if alike not in seen:
            check_heads(codec, tile, table, cut, shared, history)
            seen.add(alike)


def run_task(
    job: DecodeTask, old: Weights, memory: context.BlockMemory, shared: Sequence[FrequencyTable]
) -> list[BlockChange]:
    """Decode a task against the old weights and the history of its block.

    Raises: FormatError and subclasses, for bad bytes; VerificationError, if the weights do not match the history.
    """
    tile, payload = job.tile, job.payload
    if payload is None:
        return _run_whole(job, old) if job.codec in WHOLE else _run_sparse(job, old)
    if not context.has_changes(payload.heads, tile, job.number):
        return []
    before, table = old.block(tile, job.number), shared[payload.heads.table]
    change = context.decode_block(payload, tile, job.number, before, table, memory)
    return [change] if change else []


def _run_sparse(job: DecodeTask, old: Weights) -> list[BlockChange]:
    """Decode a tile of `gap` or `step`, and compare it with the old weights: only differences are changes."""
    tile, kind = job.tile, job.tile.tensor.kind
    if job.codec == Codec.GAP:
        positions, values = gap.decode(job.body, tile.size, kind.bits)
    else:
        positions, steps = step.decode(job.body, tile.size, kind.itemsize)
    borders = np.searchsorted(positions, np.arange(tile.block_count + 1) * BLOCK)
    out: list[BlockChange] = []
    for number, (first, last) in enumerate(pairwise(borders)):
        if first < last:
            here = positions[first:last] - number * BLOCK
            before = old.block(tile, number)[here]
            after = values[first:last] if job.codec == Codec.GAP else tables.apply_steps(before, steps[first:last])
            if change := differing(number, here.astype(np.uint32), before, after):
                out.append(change)
    return out


def _run_whole(job: DecodeTask, old: Weights) -> list[BlockChange]:
    """The same for a tile that is written whole."""
    out = []
    for block in whole_blocks(job.codec, job.tile, job.body):
        before, weights = old.block(job.tile, block.number), block.decode()
        found = kernels.active().changed(before, before ^ weights if job.codec == Codec.XOR else weights)
        if found[0].size:
            out.append(BlockChange(block.number, *found))
    return out


def check_fits(layout: Layout, size_bytes: int) -> None:
    """Check that the parts of an anchor, of this total size, can contain all weights that a layout describes.

    For readers that allocate memory for a state by its layout. No valid anchor is refused. Raises: LimitError.
    """
    tiles = layout.tile_count - sum(count_pieces(spec) for spec in layout.tensors if not spec.size)
    if layout.size_bytes > dense.MAX_RATIO * size_bytes or raw.MIN_BYTES * tiles > size_bytes:
        raise LimitError(
            f"the layout describes {layout.size_bytes} bytes of weights in {tiles} tiles, which an anchor of "
            f"{size_bytes} bytes cannot contain",
            value=layout.size_bytes,
        )


@dataclass(frozen=True)
class WholeBlock:
    """A block of a tile that is stored whole, not decoded yet. Any thread can decode it."""

    tile: Tile
    number: int
    decode_into: Callable[[Bits], None]  # contiguous memory. Raises: FormatError, or StoreError if it is read from disk

    @property
    def size(self) -> int:
        """How many weights it has."""
        return min(BLOCK, self.tile.size - self.number * BLOCK)

    def decode(self, out: Bits | None = None) -> Bits:
        """Its weights, in new memory or in the given contiguous memory. Raises: as `decode_into`."""
        if out is None:
            out = np.empty(self.size, self.tile.tensor.kind.bits)
        self.decode_into(out)
        return out


def whole_blocks(codec: Codec, tile: Tile, body: memoryview) -> Iterable[WholeBlock]:
    """The blocks of a tile that is stored as `dense` or `raw`. Raises: FormatError, if the length is wrong."""
    kind = raw if codec == Codec.RAW else dense
    opened = kind.open_blocks(body, tile.size, tile.tensor.kind.bits)
    return (WholeBlock(tile, number, partial(kind.decode_block, block)) for number, block in enumerate(opened))


def anchor_blocks(
    opened: OpenedIndex, sections: Mapping[int, memoryview], layout: Layout, wanted: Collection[int] | None = None
) -> Iterable[WholeBlock]:
    """Yield the blocks of a part of an anchor, which is all `dense` or `raw`, not decoded yet. Raises: FormatError."""
    for entry, body in payloads(opened, sections, wanted):
        tile = layout.tiles[entry.tile]
        if entry.codec not in (Codec.DENSE, Codec.RAW) or tile.size == 0:
            raise FormatError("an anchor must contain whole tiles only", tensor=tile.tensor.name)
        yield from whole_blocks(entry.codec, tile, body)
