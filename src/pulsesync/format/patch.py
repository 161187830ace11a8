"""A part of a version: from two states to bytes, and from one state and bytes to what changes.

Encoding goes over the old weights twice: once beside the new ones, to find what changed, and once more for each codec
that codes against them; decoding once. Apart from the result, memory is O(changed) and a bounded buffer per thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.digest import moved
from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import container, index, tables
from pulsesync.format.codecs import context, dense, gap
from pulsesync.format.history import MAX_INDEX, History
from pulsesync.format.index import Entry, Table
from pulsesync.format.layout import Layout
from pulsesync.kernels import spec
from pulsesync.model import Bits, BlockChange, Codec, Sum, Tile, TilePatch
from pulsesync.parallel import spread

CodecName = Literal["auto", "gap", "context", "history", "dense"]
SECTION_BYTES = 1 << 22  # a section is closed once it has this much
FEW = 4096  # changes of a part up to which tables may not pay: `gap` is tried as well


@dataclass(frozen=True)
class EncodedPart:
    """A finished part, and what its writer needs to move its own base along."""

    id: str
    data: bytes
    patches: tuple[TilePatch, ...]
    sums: Mapping[int, Sum]  # of the changed tiles, after the patch, by ordinal


@dataclass(frozen=True)
class DecodedPart:
    """What a part changes, and the digests its tiles must then have."""

    patches: tuple[TilePatch, ...]
    sums: Mapping[int, Sum]


# -- finding what changed ------------------------------------------------------------------------------------------


class _Steps(NamedTuple):
    """A block's changes as `context` sees them."""

    symbols: NDArray[np.uint8]
    extras: NDArray[np.uint32]
    classes: NDArray[np.uint8]
    by_class: NDArray[np.int64]


@dataclass(frozen=True)
class _Diff:
    """What changed in a tile; where its dtype has exponents, also as steps, with a sample of its old weights."""

    tile: Tile
    blocks: tuple[BlockChange, ...]
    steps: tuple[_Steps, ...] = ()
    sampled: NDArray[np.int64] | None = None

    @property
    def changed(self) -> int:
        return sum(block.positions.size for block in self.blocks)

    def positions(self) -> NDArray[np.int64]:
        return np.concatenate([block.positions.astype(np.int64) + block.start for block in self.blocks])

    def values(self) -> Bits:
        return np.concatenate([block.new for block in self.blocks])


def _block_count(tile: Tile) -> int:
    return -(-tile.size // spec.BLOCK)


def _read(tile: Tile, flat: Bits, number: int) -> Bits:
    return tile.read(flat, number * spec.BLOCK, min((number + 1) * spec.BLOCK, tile.size))


def _find_changes(
    tiles: Sequence[Tile], old: Mapping[str, Bits], new: Mapping[str, Bits], steps: bool, threads: int | None
) -> list[_Diff]:
    """Compare two states tile by tile, as bits; return the tiles that differ."""
    run = kernels.active()

    def block(job: tuple[Tile, int]) -> tuple[BlockChange | None, _Steps | None, NDArray[np.int64] | None]:
        tile, number = job
        name, shift = tile.tensor.name, tile.tensor.kind.exponent_shift
        before, after = _read(tile, old[name], number), _read(tile, new[name], number)
        found = run.changed(before, after)
        change = BlockChange(number * spec.BLOCK, *found) if found[0].size else None
        if not steps or shift is None:
            return change, None, None
        return change, _Steps(*run.steps(*found[1:], shift)) if change else None, run.sample_classes(before, shift)

    jobs = [(tile, number) for tile in tiles for number in range(_block_count(tile))]
    done = iter(spread(block, jobs, threads))
    out = []
    for tile in tiles:
        changes, symbols, samples = zip(*(next(done) for _ in range(_block_count(tile))), strict=True)
        blocks = tuple(change for change in changes if change is not None)
        some = tuple(s for s in symbols if s is not None)
        if blocks:
            out.append(_Diff(tile, blocks, some, sum(samples) if some else None))
    return out


# -- encoding ------------------------------------------------------------------------------------------------------


def encode(
    layout: Layout,
    tiles: Sequence[Tile],
    old: Mapping[str, Bits],
    new: Mapping[str, Bits],
    sums: Mapping[int, Sum],
    *,
    codec: CodecName = "auto",
    history: History | None = None,
    threads: int | None = None,
) -> EncodedPart:
    """Encode what takes these tiles from old to new; sums are their digests before.

    `history` codes with the epoch's memory (which must then be given and may be empty), and `auto` does where it is
    given; either way a tile is written as `gap` or `dense` where that is smaller or its dtype asks for it.
    """
    if codec == "history" and history is None:
        raise ValueError("the history codec needs a history")
    if history is not None and history.index >= MAX_INDEX:
        raise ValueError(f"an epoch has at most {MAX_INDEX} patches: begin a new one")
    against_old = codec in ("auto", "context", "history")
    diffs = _find_changes(tiles, old, new, against_old, threads)
    shared, coded = [], {}
    if against_old:
        shared, coded = _encode_context(diffs, old, None if codec == "context" else history, threads)
    chosen = spread(lambda d: _settle(d, new, coded.get(d.tile.ordinal), codec), diffs, threads)
    if codec == "auto" and sum(d.changed for d in diffs) <= FEW:
        shared, chosen = _without_tables_if_smaller(diffs, shared, chosen)
    patches = [_patch(diff, choice) for diff, choice in zip(diffs, chosen, strict=True)]
    moves = spread(moved, patches, threads)
    after = {p.tile.ordinal: sums[p.tile.ordinal] + by for p, by in zip(patches, moves, strict=True)}
    id_, data = _assemble(layout.id, shared, list(zip(patches, chosen, strict=True)), after)
    return EncodedPart(id_, data, tuple(patches), after)


def encode_whole(
    layout: Layout, tiles: Sequence[Tile], state: Mapping[str, Bits], sums: Mapping[int, Sum], threads: int | None = None
) -> EncodedPart:
    """Encode these tiles whole, as `dense`: a part of an anchor. Its patches are empty: there is no base."""
    patches = [TilePatch(tile, Codec.DENSE, ()) for tile in tiles if tile.size]
    bodies = spread(lambda p: _Coded(Codec.DENSE, _dense(p.tile, state)), patches, threads)
    after = {p.tile.ordinal: sums[p.tile.ordinal] for p in patches}
    return EncodedPart(*_assemble(layout.id, [], list(zip(patches, bodies, strict=True)), after), (), after)


def _patch(diff: _Diff, choice: "_Coded") -> TilePatch:
    blocks = diff.blocks
    if choice.remembered:
        blocks = tuple(replace(b, remembered=choice.remembered.get(b.start // spec.BLOCK)) for b in blocks)
    return TilePatch(diff.tile, choice.codec, blocks, choice.cut)


def _settle(diff: _Diff, new: Mapping[str, Bits], coded: "_Coded | None", codec: CodecName) -> "_Coded":
    """The codec asked for, `gap` where the dtype has no exponent to code against; or, for "auto", the smallest.

    `dense` is tried only where the others come near it.
    """
    if codec == "dense":
        return _Coded(Codec.DENSE, _dense(diff.tile, new))
    best = coded or _Coded(Codec.GAP, gap.encode(diff.positions(), diff.values()))
    if codec == "auto" and 2 * len(best.body) > diff.tile.size * diff.tile.tensor.kind.itemsize:
        whole = _dense(diff.tile, new)
        if len(whole) < len(best.body):
            return _Coded(Codec.DENSE, whole)
    return best


def _dense(tile: Tile, state: Mapping[str, Bits]) -> bytes:
    return dense.encode(_read(tile, state[tile.tensor.name], number) for number in range(_block_count(tile)))


def _without_tables_if_smaller(
    diffs: Sequence[_Diff], shared: list[Table], chosen: list["_Coded"]
) -> tuple[list[Table], list["_Coded"]]:
    """Tiny patches do not pay for tables: take `gap` throughout where it is smaller with everything counted."""
    plain = []
    for diff, best in zip(diffs, chosen, strict=True):
        body = gap.encode(diff.positions(), diff.values())
        dense_is_less = best.codec == Codec.DENSE and len(best.body) < len(body)
        plain.append(best if dense_is_less else _Coded(Codec.GAP, body))
    size = sum(len(c.body) for c in chosen) + len(index.build(shared, []))
    return ([], plain) if sum(len(c.body) for c in plain) < size else (shared, chosen)


@dataclass(frozen=True, eq=False)
class _Plan:
    """A tile that is to be coded against its old weights."""

    diff: _Diff
    cut: int
    hot: Mapping[int, context.HotChanges]  # by block
    cold: NDArray[np.int64]
    steps: NDArray[np.int64]


def _plan(diff: _Diff, history: History | None) -> _Plan:
    assert diff.sampled is not None
    cut = tables.choose_cut(sum((s.by_class for s in diff.steps), np.zeros(256, np.int64)), diff.sampled)
    if history:
        cut = max(cut, history.cut(diff.tile.ordinal))
    shift = diff.tile.tensor.kind.exponent_shift
    hot, cold, cold_steps = {}, [], []
    for block, steps in zip(diff.blocks, diff.steps, strict=True):
        parted = kernels.active().split(block.positions, block.new, *steps[:3], shift, cut)
        *some_hot, positions, moved_by, entering_at, entering = parted
        if some_hot[0].size:
            hot[block.start // spec.BLOCK] = context.HotChanges(*some_hot, entering_at, entering)
        cold.append(positions + block.start)
        cold_steps.append(moved_by)
    if len(cold) > 1:
        cold, cold_steps = [np.concatenate(cold)], [np.concatenate(cold_steps)]
    return _Plan(diff, cut, hot, cold[0], cold_steps[0])


class _Coded(NamedTuple):
    """A tile's payload, and what else its codec found out on the way."""

    codec: Codec
    body: bytes
    cut: int = 0
    remembered: Mapping[int, NDArray[np.uint8]] = {}  # by block: its history afterwards


def _encode_context(
    diffs: Sequence[_Diff], old: Mapping[str, Bits], history: History | None, threads: int | None
) -> tuple[list[Table], dict[int, _Coded]]:
    """Code all tiles of float dtypes against their old weights; tables are shared by the tiles of a dtype."""
    plans = [_plan(d, history) for d in diffs if d.steps]  # short steps of Python: threads would only slow them down
    codec = Codec.CONTEXT if history is None else Codec.HISTORY
    shared: list[Table] = []
    out: dict[int, _Coded] = {}
    for dtype in sorted({p.diff.tile.tensor.dtype for p in plans}):
        same = [p for p in plans if p.diff.tile.tensor.dtype == dtype]
        table, counted = _count(same, dtype, old, history, threads)
        payloads = _code(same, table, len(shared), [decisions for decisions, _ in counted], old, history, threads)
        remembered: dict[_Plan, dict[int, NDArray[np.uint8]]] = {plan: {} for plan in same}
        for (plan, number), (_, after) in zip(_jobs(same), counted, strict=True):
            if history is not None:
                remembered[plan][number] = after
        for plan, body in zip(same, payloads, strict=True):
            out[plan.diff.tile.ordinal] = _Coded(codec, body, plan.cut, remembered[plan])
        shared.append(table)
    return shared, out


def _jobs(plans: Sequence[_Plan]) -> list[tuple[_Plan, int]]:
    return [(plan, number) for plan in plans for number in sorted(plan.hot)]


def _memory(history: History | None, tile: Tile, number: int) -> context.Memory:
    return history.of(tile.ordinal, number) if history is not None else context.Memory()


def _count(
    plans: Sequence[_Plan], dtype: str, old: Mapping[str, Bits], history: History | None, threads: int | None
) -> tuple[Table, list[tuple[int, NDArray[np.uint8]]]]:
    """Make the table of a dtype from its tiles' exact counts; of each job, return decisions and history as well."""
    kind = plans[0].diff.tile.tensor.kind
    highest = max(1, max(plan.cut for plan in plans))
    lo = max(0, highest - index.CLASSES)
    ages = history.index + 1 if history is not None else 1
    contexts = tables.Contexts(lo, highest - lo, ages, tables.symbol_count(8 * kind.itemsize))

    def block(job: tuple[_Plan, int]) -> tuple[NDArray[np.int64], tuple[int, NDArray[np.uint8]]]:
        plan, number = job
        tile, counts = plan.diff.tile, contexts.empty()
        before, memory = _read(tile, old[tile.tensor.name], number), _memory(history, tile, number)
        return counts, context.count(before, kind, plan.cut, memory, plan.hot[number], contexts, counts)

    counted = spread(block, _jobs(plans), threads)
    total = sum((counts for counts, _ in counted), contexts.empty())
    by_context = total.reshape(contexts.classes, ages, -1)[..., : contexts.symbols]
    return Table(dtype, lo, tables.normalise(by_context)), [found for _, found in counted]


def _code(
    plans: Sequence[_Plan],
    table: Table,
    number_of_table: int,
    decisions: Sequence[int],
    old: Mapping[str, Bits],
    history: History | None,
    threads: int | None,
) -> list[bytes]:
    """Write the payloads of the tiles of one dtype."""
    kind = plans[0].diff.tile.tensor.kind

    def block(job: tuple[tuple[_Plan, int], int]) -> context.BlockStream:
        (plan, number), decided = job
        tile, hot = plan.diff.tile, plan.hot[number]
        before, memory = _read(tile, old[tile.tensor.name], number), _memory(history, tile, number)
        words = context.encode_block(before, kind, plan.cut, memory, hot, table, decided)
        return context.BlockStream(hot.positions.size, tables.lanes_for(decided), words)

    streams = iter(spread(block, zip(_jobs(plans), decisions, strict=True), threads))
    nothing = context.BlockStream(0, 1, np.empty(0, np.uint16))
    out = []
    for plan in plans:
        blocks = tuple(next(streams) if n in plan.hot else nothing for n in range(_block_count(plan.diff.tile)))
        out.append(context.build(context.Payload(number_of_table, plan.cut, blocks, plan.cold, plan.steps)))
    return out


def _assemble(
    layout: str, shared: Sequence[Table], coded: Sequence[tuple[TilePatch, _Coded]], sums: Mapping[int, Sum]
) -> tuple[str, bytes]:
    """Lay payloads into sections, at least one, and put index and header in front."""
    sections: list[list[bytes]] = [[]]
    filled = 0
    entries = []
    for patch, choice in coded:
        if filled >= SECTION_BYTES:
            sections.append([])
            filled = 0
        sections[-1].append(choice.body)
        filled += len(choice.body)
        ordinal = patch.tile.ordinal
        entries.append(Entry(ordinal, patch.codec, len(sections), len(choice.body), sums[ordinal]))
    return container.build(layout, [index.build(shared, entries), *(b"".join(s) for s in sections)])


# -- decoding ------------------------------------------------------------------------------------------------------


def decode(
    data: bytes | memoryview,
    layout: Layout,
    old: Mapping[str, Bits],
    *,
    expected_id: str | None = None,
    history: History | None = None,
    threads: int | None = None,
) -> DecodedPart:
    """Check a part and decode all of it against the state it is for. Nothing is changed.

    Raises:
        FormatError: and its branches, for whatever is wrong with the bytes.
    """
    header, sections = container.open_part(data, expected_id)
    if header.layout != layout.id:
        raise FormatError("the part is for another layout", expected=layout.id, actual=header.layout)
    shared, entries = index.parse(sections[0], len(layout.tiles), [len(s) for s in sections])
    places = [0] * len(sections)
    jobs: list[_Job] = []
    coded: list[tuple[Entry, Tile, int]] = []
    for entry in entries:
        tile, begin = layout.tiles[entry.tile], places[entry.section]
        places[entry.section] += entry.size
        body = sections[entry.section][begin : begin + entry.size]
        mine = _open_tile(entry, tile, body, shared, history)
        jobs += mine
        coded.append((entry, tile, len(mine)))
    done = iter(spread(lambda job: _run(job, old, history, shared), jobs, threads))
    patches = []
    for entry, tile, count in coded:
        found = [next(done) for _ in range(count)]
        blocks = tuple(change for changes, _ in found for change in changes)
        cut = found[0][1] if entry.codec == Codec.HISTORY else 0
        patches.append(TilePatch(tile, entry.codec, blocks, cut))
    return DecodedPart(tuple(patches), {e.tile: e.sum for e in entries})


@dataclass(frozen=True)
class _Job:
    """One block of a tile coded against old weights, or one whole tile of another codec."""

    codec: Codec
    tile: Tile
    body: memoryview
    payload: context.Payload | None = None
    number: int = 0


def _open_tile(
    entry: Entry, tile: Tile, body: memoryview, shared: Sequence[Table], history: History | None
) -> list[_Job]:
    if entry.codec in (Codec.DENSE, Codec.GAP):
        return [_Job(entry.codec, tile, body)]
    kind = tile.tensor.kind
    if kind.exponent_shift is None:
        raise UnsupportedError(f"{tile.tensor.dtype} cannot be coded against old weights", tensor=tile.tensor.name)
    payload = context.parse(body, tile.size, kind)
    if payload.table >= len(shared) or shared[payload.table].dtype != tile.tensor.dtype:
        raise FormatError("a tile uses a table that the part does not have", tensor=tile.tensor.name)
    table = shared[payload.table]
    if payload.cut > table.highest_cut:
        raise LimitError("a tile's cut is above its table", tensor=tile.tensor.name)
    known = history if entry.codec == Codec.HISTORY else History()
    if known is None:
        raise FormatError("the part needs the history of its epoch and none is held")
    if table.frequencies.shape[1] != known.index + 1 or payload.cut < known.cut(tile.ordinal):
        raise FormatError("the part was made with another history", tensor=tile.tensor.name)
    return [_Job(entry.codec, tile, body, payload, n) for n in range(_block_count(tile))]


def _run(
    job: _Job,
    old: Mapping[str, Bits],
    history: History | None,
    shared: Sequence[Table],
) -> tuple[list[BlockChange], int]:
    tile, flat = job.tile, old[job.tile.tensor.name]
    if job.payload is None:
        return _run_plain(job, flat), 0
    memory = _memory(history if job.codec == Codec.HISTORY else None, tile, job.number)
    block, cold = job.payload.blocks[job.number], job.payload.cold
    begin = job.number * spec.BLOCK
    if block.changes == 0 and not np.diff(np.searchsorted(cold, (begin, begin + spec.BLOCK)))[0]:
        return [], job.payload.cut
    before, table = _read(tile, flat, job.number), shared[job.payload.table]
    change = context.decode_block(job.payload, job.number, before, tile.tensor.kind, table, memory)
    return [change] if change else [], job.payload.cut


def _run_plain(job: _Job, flat: Bits) -> list[BlockChange]:
    """Decode a tile that needs no old weights, and compare: only what differs from them is a change."""
    tile, dtype, out = job.tile, job.tile.tensor.kind.bits, []
    if job.codec == Codec.DENSE:
        for begin, run in dense.decode(job.body, tile.size, dtype):
            before = tile.read(flat, begin, begin + run.size)
            found = kernels.active().changed(before, run)
            if found[0].size:
                out.append(BlockChange(begin, *found))
        return out
    positions, values = gap.decode(job.body, tile.size, dtype)
    borders = np.searchsorted(positions, np.arange(_block_count(tile) + 1) * spec.BLOCK)
    for number, (first, last) in enumerate(zip(borders, borders[1:], strict=False)):
        if first < last:
            here = positions[first:last]
            before = flat[tile.flat_indices(here)]
            out.append(
                BlockChange(
                    number * spec.BLOCK, (here - number * spec.BLOCK).astype(np.uint32), before, values[first:last]
                )
            )
    return out
