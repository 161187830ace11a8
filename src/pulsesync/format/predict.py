"""Code tiles against their old weights: plan, count, code.

Three passes over a part's changed tiles, because the tables that its tiles share must be known before the first of them
is written: choose each tile's cut; count every decision of the hot weights; write the streams under the tables.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pulsesync import kernels
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Codec, Remembered, Tile
from pulsesync.format import tables
from pulsesync.format.codecs import context
from pulsesync.format.diff import Diff
from pulsesync.format.history import History, memory_of
from pulsesync.format.index import FrequencyTable
from pulsesync.format.weights import Weights
from pulsesync.kernels.arrays import I64, U32
from pulsesync.kernels.records import BlockStreams, CodedSpan, Decisions, HotChanges

Pieces = Sequence[bytes | memoryview]  # of a payload, one after the other
# Codecs that read all old weights of a tile; others read only those that change.
PREDICTING = (Codec.CONTEXT, Codec.HISTORY)


MOST_KEPT = 1 << 28  # bytes of decisions that are kept until they are coded; at most one for each weight


class CodedTile(NamedTuple):
    """A tile's payload, and other results of its codec."""

    codec: Codec
    pieces: Pieces
    cut: int = 0
    remembered: Mapping[int, Remembered] = {}  # by block: its history afterwards

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(frozen=True, eq=False)
class _CodingPlan:
    """A tile that is to be coded against its old weights."""

    diff: Diff
    cut: int
    hot: Mapping[int, HotChanges]  # by block
    cold: I64
    steps: I64


def _choose_cuts(diffs: Sequence[Diff], history: History | None) -> list[int]:
    """The cut of each tile."""
    sampled = [diff.sampled for diff in diffs if diff.sampled is not None]
    if not sampled:
        return []
    changed = np.stack([diff.changed_by_class() for diff in diffs])
    cuts: list[int] = tables.choose_cuts(changed, np.stack(sampled)).tolist()
    if history is None:
        return cuts
    return [max(cut, history.cut(diff.tile.ordinal)) for cut, diff in zip(cuts, diffs, strict=True)]


def _plan(diff: Diff, cut: int) -> _CodingPlan:
    shift = diff.tile.tensor.kind.exponent_shift
    hot, cold, cold_steps = {}, [], []
    for block, steps in zip(diff.blocks, diff.steps, strict=True):
        parted = kernels.active().split(block.positions, block.new, *steps[:3], shift, cut)
        at, new, symbols, extras, cold_at, moved_by, entering_at, entering = parted
        if at.size:
            hot[block.number] = HotChanges(at, new, symbols, extras, entering_at, entering)
        cold.append(cold_at + block.number * BLOCK)
        cold_steps.append(moved_by)
    if len(cold) > 1:
        cold, cold_steps = [np.concatenate(cold)], [np.concatenate(cold_steps)]
    return _CodingPlan(diff, cut, hot, cold[0], cold_steps[0])


def code_against_old(
    diffs: Sequence[Diff], old: Weights, history: History | None
) -> tuple[list[FrequencyTable], dict[int, CodedTile]]:
    """Code all tiles of float dtypes against their old weights; tables are shared by the tiles of a dtype."""
    floats = [diff for diff in diffs if diff.steps]
    # short Python steps, which threads would only slow down
    plans = [_plan(diff, cut) for diff, cut in zip(floats, _choose_cuts(floats, history), strict=True)]
    codec = Codec.CONTEXT if history is None else Codec.HISTORY
    shared: list[FrequencyTable] = []
    out: dict[int, CodedTile] = {}
    for dtype in sorted({p.diff.tile.tensor.dtype for p in plans}):
        same = [p for p in plans if p.diff.tile.tensor.dtype == dtype]
        ages = history.index + 1 if history is not None else 1
        sizes = _list_sizes(same, ages)
        table, counted = _count(same, sizes, old, history)
        payloads = _code(same, table, len(shared), [decisions for decisions, _ in counted])
        remembered: dict[_CodingPlan, dict[int, Remembered]] = {plan: {} for plan in same}
        for (plan, number), (_, after) in zip(_jobs(same), counted, strict=True):
            if history is not None:
                remembered[plan][number] = after
        for plan, body in zip(same, payloads, strict=True):
            out[plan.diff.tile.ordinal] = CodedTile(codec, [body], plan.cut, remembered[plan])
        shared.append(table)
    return shared, out


def _list_sizes(plans: Sequence[_CodingPlan], ages: int) -> U32:
    """The sizes that the table of these tiles lists; steps of these sizes get their own symbols."""
    blocks = [hot for plan in plans for hot in plan.hot.values()]
    if not blocks:
        return tables.NO_SIZES
    symbols, extras = np.concatenate([b.symbols for b in blocks]), np.concatenate([b.extras for b in blocks])
    width = 8 * blocks[0].new.itemsize
    sizes = tables.choose_sizes(tables.long_steps(symbols, extras)[1], width, ages)
    if sizes.size:
        listed, at = tables.list_sizes(symbols, extras, sizes, width), 0
        for hot in blocks:  # in place: each is a separate array, which the plan has just made
            hot.symbols[:] = listed[at : at + hot.symbols.size]
            at += hot.symbols.size
    return sizes


_Job = tuple[_CodingPlan, int]  # a tile, and which of its blocks
_Decided = Callable[[], Decisions]  # the decisions of a block, kept or counted again


def _jobs(plans: Sequence[_CodingPlan]) -> list[_Job]:
    return [(plan, number) for plan in plans for number in sorted(plan.hot)]


def _count(
    plans: Sequence[_CodingPlan], sizes: U32, old: Weights, history: History | None
) -> tuple[FrequencyTable, list[tuple[_Decided, Remembered]]]:
    """Make the table of a dtype from its tiles' exact counts; also return the decisions and the history of each job.

    Decisions are kept for the coder while there is space for their rows, two bytes each; the others are counted again
    when they are coded.
    """
    dtype, kind = plans[0].diff.tile.tensor.dtype, plans[0].diff.tile.tensor.kind
    highest = max(1, max(plan.cut for plan in plans))
    lo = max(0, highest - tables.CLASSES)
    ages = history.index + 1 if history is not None else 1
    contexts = tables.Contexts(lo, highest - lo, ages, tables.symbol_count(8 * kind.itemsize) + 2 * sizes.size)

    # Each thread counts into its own table: with ages, tables are too large to have one per block.
    mine = threading.local()
    everyone: list[I64] = []
    room = [min(MOST_KEPT, sum(plan.diff.tile.size for plan in plans))]  # bytes of rows
    lock = threading.Lock()

    def count(job: _Job, counts: I64) -> tuple[Decisions, Remembered]:
        plan, number = job
        tile = plan.diff.tile
        before, shift = old.block(tile, number), kind.exponent_shift or 0
        span = CodedSpan(before, _borders(tile, number), shift, plan.cut, contexts.rows, contexts.bits)
        return context.count(span, memory_of(history, tile, number), plan.hot[number], counts)

    def block(job: _Job) -> tuple[_Decided, Remembered]:
        if not hasattr(mine, "counts"):
            mine.counts = contexts.empty()
            everyone.append(mine.counts)
        decisions, remembered = count(job, mine.counts)
        with lock:
            room[0] -= decisions.rows.nbytes
            kept = room[0] >= 0
        if kept:
            return (lambda: decisions), remembered
        return (lambda: count(job, contexts.empty())[0]), remembered

    found = spread(block, _jobs(plans))
    by_context = sum(everyone, contexts.empty()).reshape(contexts.classes, ages, -1)[..., : contexts.symbols]
    return FrequencyTable(dtype, lo, tables.normalise(by_context), sizes), found


def _code(
    plans: Sequence[_CodingPlan], table: FrequencyTable, number_of_table: int, decisions: Sequence[_Decided]
) -> list[bytes]:
    """Write the payloads of the tiles of one dtype."""

    def block(job: tuple[_Job, _Decided]) -> BlockStreams:
        (plan, number), decided = job
        return context.encode_block(decided(), plan.hot[number].extras, table)

    streams = iter(spread(block, zip(_jobs(plans), decisions, strict=True)))
    out = []
    for plan in plans:
        tile = plan.diff.tile
        blocks = [
            next(streams) if n in plan.hot else BlockStreams.none(_borders(tile, n).size - 1)
            for n in range(tile.block_count)
        ]
        joined = BlockStreams(*map(np.concatenate, zip(*blocks, strict=True))) if len(blocks) > 1 else blocks[0]
        out.append(_payload(plan, number_of_table, joined))
    return out


def _payload(plan: _CodingPlan, table: int, streams: BlockStreams) -> bytes:
    tile, checks = plan.diff.tile, context.NO_CHECKS
    if context.is_checked(tile):
        checks = np.array([*context.group_checks(tile, plan.diff.blocks[0]).values()], np.uint32)
    heads = context.Heads(table, plan.cut, *streams[:3], plan.cold, plan.steps, checks)
    return context.build(context.Payload(heads, streams.words))


def _borders(tile: Tile, number: int) -> I64:
    """Where the streams of a block begin in it, and its end."""
    if tile.block_count == 1:
        return tile.borders
    streams = tile.streams(number)
    return tile.borders[streams.start : streams.stop + 1] - number * BLOCK
