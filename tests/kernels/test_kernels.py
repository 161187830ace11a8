"""The compiled kernels do exactly what the reference does, and decode_blocks survives whatever words it is given."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulsesync.core.digest import keys
from pulsesync.core.types import DTYPES, Bits
from pulsesync.format import tables
from pulsesync.kernels import coder, cpu, reference, spec
from pulsesync.kernels.records import (
    BlockStreams,
    CodedSpan,
    ColdSteps,
    Decisions,
    DecoderTable,
    EncoderTable,
    HotChanges,
    SpanHistory,
)
from pulsesync.testing import mutate, random_bits
from tests.helpers import FLOATS, classes, densities, many, near, nudge, orders, seeds, step

KERNELS = (reference, cpu)
NO_BYTES, NO_POSITIONS, NO_COLD = np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0, np.int64)
SIZES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 1021, 1022, 1037, 4095, 4096, 4097, 4160, 12289]

sizes = st.one_of(st.sampled_from(SIZES), st.integers(0, 5000))


@dataclass
class Case:
    """Some blocks, a patch to them, and their history; each step made by the reference from the one before."""

    dtype: str
    seed: int
    size: int
    density: float
    cut_share: float  # of all the classes of the dtype
    tracked_share: float  # of the cut
    index: int  # of the patch in its epoch; 0: no history
    close: bool  # classes around the cut and small steps; else any bits to any bits
    blocks: int = 1
    still: float = 0.0  # the share of blocks without changes
    lists: bool = False  # the table lists sizes of long steps

    def __post_init__(self) -> None:
        kind, rng = DTYPES[self.dtype], np.random.default_rng(self.seed)
        self.width, self.shift = 8 * kind.itemsize, kind.exponent_shift or 0
        self.highest = 1 << (self.width - 1 - self.shift)
        self.cut = round(self.cut_share * self.highest)
        self.tracked = round(self.tracked_share * self.cut) if self.index else 0
        if self.close:
            self.old = near(rng, self.dtype, (self.size,), self.cut)
            self.new = nudge(rng, self.old, self.density, 9)
        else:
            self.old = random_bits(rng, kind.bits.type, (self.size,))
            self.new = mutate(rng, self.old, self.density)
        inside = np.sort(rng.integers(0, self.size + 1, self.blocks - 1))
        self.borders = np.array([0, *inside, self.size], np.int64)
        for begin, end in pairwise(self.borders):
            if rng.random() < self.still:
                self.new[begin:end] = self.old[begin:end]
        top = max(1, self.cut)
        lo = max(0, top - 24)
        self.listed = self._choose_sizes(rng) if self.lists else tables.NO_SIZES
        symbols = tables.symbol_count(self.width) + 2 * self.listed.size
        self.contexts = tables.Contexts(lo, top - lo, max(1, self.index), symbols)
        tracked = np.flatnonzero(classes(self.old, self.shift) < self.tracked)
        self.ranks = np.searchsorted(tracked, self.borders).astype(np.int64)
        known = tracked.size
        ages = rng.integers(0, max(1, self.index), known, dtype=np.uint8)
        self.last = np.where((rng.random(known) < 0.5) & (ages > 0), ages | 0x80, ages).astype(np.uint8)
        self.lanes = np.int64(1) << rng.integers(0, 6, self.blocks)

    def _choose_sizes(self, rng: np.random.Generator) -> np.ndarray:
        """Some sizes that occur, and one that may not."""
        _, found = tables.long_steps(*self.split[2:4])
        half = 1 << (self.width - 1)
        every = np.unique(np.append(found[found < half], rng.integers(8, half)))
        return np.sort(rng.permutation(every)[: tables.most_sizes(self.width)]).astype(np.uint32)

    @cached_property
    def changed(self) -> tuple[Any, ...]:
        return reference.changed(self.old, self.new)

    @cached_property
    def steps(self) -> tuple[Any, ...]:
        _, old, new = self.changed
        return reference.steps(old, new, self.shift)

    @cached_property
    def split(self) -> tuple[Any, ...]:
        (positions, _, new), (symbols, extras, classes_, *_) = self.changed, self.steps
        return reference.split(positions, new, symbols, extras, classes_, self.shift, self.cut)

    @property
    def hot(self) -> HotChanges:
        at, new, symbols, extras, _, _, entering_at, entering = self.split
        if self.listed.size:
            symbols = tables.list_sizes(symbols, extras, self.listed, self.width)
        return HotChanges(at, new, symbols, extras, entering_at, entering)

    @property
    def cold(self) -> ColdSteps:
        return ColdSteps(*self.split[4:6])

    @property
    def changes(self) -> np.ndarray:
        """How many of the hot changes each block has."""
        return np.diff(np.searchsorted(self.hot.positions, self.borders))

    @property
    def span(self) -> tuple[CodedSpan, SpanHistory]:
        span = CodedSpan(self.old, self.borders, self.shift, self.cut, self.contexts.rows, self.contexts.bits)
        return span, SpanHistory(self.last, self.ranks, self.tracked, self.index)

    def count(self, kernel: ModuleType) -> tuple[Any, ...]:
        """The decisions, field by field; the history afterwards, where its blocks begin, and the counts."""
        counts = self.contexts.empty()
        decisions, *after = kernel.count_blocks(*self.span, self.hot, counts)
        return *decisions, *after, counts

    @cached_property
    def counted(self) -> tuple[Any, ...]:
        return self.count(reference)

    @cached_property
    def frequencies(self) -> np.ndarray:
        counts = self.counted[-1].reshape(self.contexts.classes, self.contexts.ages, -1)
        return tables.normalise(counts[..., : self.contexts.symbols])

    @cached_property
    def cumulative(self) -> np.ndarray:
        return tables.cumulative(self.frequencies)

    def encode(self, kernel: ModuleType) -> tuple[np.ndarray, np.ndarray]:
        table = EncoderTable(self.cumulative, tables.reciprocals(self.frequencies), self.contexts.bits, self.width)
        words, ends = kernel.encode_blocks(Decisions(*self.counted[:4]), self.hot.extras, table, self.lanes)
        return words, ends

    def decode(self, kernel: ModuleType, words: np.ndarray, ends: np.ndarray, changes: np.ndarray) -> tuple[Any, ...]:
        table = DecoderTable(self.cumulative, self.contexts.symbols, self.listed)
        streams = BlockStreams(changes, self.lanes, np.diff(ends), words)
        read: tuple[Any, ...] = kernel.decode_blocks(*self.span, table, streams, self.cold)
        return read

    def alone(self, b: int) -> "Case":
        """One of the blocks as a span of its own, under the tables of all."""
        part = copy(self)
        begin, end = self.borders[b : b + 2]
        part.size, part.blocks, part.borders = int(end - begin), 1, np.array([0, end - begin])
        part.old, part.new = self.old[begin:end].copy(), self.new[begin:end].copy()
        part.last = self.last[self.ranks[b] : self.ranks[b + 1]].copy()
        part.ranks, part.lanes = np.array([0, part.last.size]), self.lanes[b : b + 1].copy()
        part.frequencies, part.cumulative = self.frequencies, self.cumulative
        for known in ("changed", "steps", "split", "counted"):
            vars(part).pop(known, None)
        return part


def any_case(seed: int) -> Case:
    """Hypothesis likes small and plain examples; drawn from a seed, edges and bulk both come often."""
    rng = np.random.default_rng(seed)

    def share() -> float:
        return float(rng.choice([0.0, 0.5, 1.0, rng.random(), rng.random()]))

    return Case(
        dtype=str(rng.choice(FLOATS)),
        seed=seed,
        size=int(rng.choice(SIZES) if rng.random() < 0.5 else rng.integers(0, 5001)),
        density=float(rng.choice([0.0, 0.001, 0.01, 0.1, 0.5, 1.0])),
        cut_share=share() or share(),
        tracked_share=share(),
        index=int(rng.choice([0, 1, 2, 5, 32, 127])),
        close=bool(rng.random() < 0.7),
        blocks=int(rng.choice([1, 1, 2, 3, 9])),
        still=float(rng.choice([0.0, 0.5, 1.0], p=[0.5, 0.4, 0.1])),
        lists=bool(rng.integers(0, 2)),
    )


cases = seeds.map(any_case)


def assert_same(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b)
        assert np.asarray(a).dtype == np.asarray(b).dtype or np.asarray(a).ndim == 0


def assert_decodes(case: Case, found: tuple[Any, ...]) -> None:
    positions, old, new, _, _, fault = found
    assert fault == 0
    assert_same((positions, old, new), case.changed)


@given(seeds, st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]), sizes, densities)
def test_changed_equals_the_reference(seed: int, dtype: type[Any], size: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, dtype, (size,))
    new = mutate(rng, old, density)
    assert_same(cpu.changed(old, new), reference.changed(old, new))


@given(seeds, st.integers(0, 3), densities)
def test_changed_takes_arrays_that_begin_anywhere(seed: int, offset: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = random_bits(rng, np.uint16, (200,))
    new = mutate(rng, old, density)
    assert_same(cpu.changed(old[offset:], new[offset:]), reference.changed(old[offset:], new[offset:]))


@given(seeds, st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]), st.integers(0, 3000))
def test_pick_and_scatter_equal_the_reference(seed: int, dtype: type[Any], size: int) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, size).astype(dtype)
    positions = np.flatnonzero(rng.random(size) < 0.2).astype(np.uint32)
    assert_same((cpu.pick(bits, positions),), (reference.pick(bits, positions),))
    one, other = bits.copy(), bits.copy()
    cpu.scatter(one, positions, bits[positions] ^ dtype(1))
    reference.scatter(other, positions, bits[positions] ^ dtype(1))
    assert_same((one,), (other,))


def test_changed_forgets_the_block_before() -> None:
    old = np.zeros(100, np.uint16)
    first, second = old.copy(), old.copy()
    first[:50], second[3] = 1, 1
    kept, _, _ = cpu.changed(old, first)
    assert cpu.changed(old, second)[0].tolist() == [3]
    assert kept.tolist() == list(range(50))


def test_changed_begins_with_an_empty_block_as_well() -> None:
    empty = np.empty(0, np.uint16)
    with ThreadPoolExecutor(1) as fresh:
        assert_same(fresh.submit(cpu.changed, empty, empty).result(), reference.changed(empty, empty))


@many
@given(cases)
def test_sample_classes_equals_the_reference(case: Case) -> None:
    assert_same([cpu.sample_classes(case.old, case.shift)], [reference.sample_classes(case.old, case.shift)])


@many
@given(cases)
def test_steps_equals_the_reference(case: Case) -> None:
    arguments = (*case.changed[1:], case.shift)
    assert_same(cpu.steps(*arguments), reference.steps(*arguments))


@many
@given(cases)
def test_steps_are_what_the_format_says(case: Case) -> None:
    _, old, new = case.changed
    symbols, extras, found, by_class = cpu.steps(old, new, case.shift)
    for a, b, symbol, extra in zip(orders(old), orders(new), symbols.tolist(), extras.tolist(), strict=True):
        move = step(a, b, case.width)
        size_class, down = divmod(symbol - 1, 2)
        size = size_class + 1 if size_class < 7 else (1 << (size_class - 4)) + extra
        assert (size, down) == (abs(move), move < 0)
        assert size_class < 7 or extra < 1 << (size_class - 4)
    assert np.array_equal(found, classes(old, case.shift))
    assert np.array_equal(by_class, np.bincount(found, minlength=256))


@many
@given(cases)
def test_split_equals_the_reference(case: Case) -> None:
    arguments = (case.changed[0], case.changed[2], *case.steps[:3], case.shift, case.cut)
    assert_same(cpu.split(*arguments), reference.split(*arguments))


@many
@given(cases)
def test_split_loses_no_change(case: Case) -> None:
    at, new, _, _, cold_at, moved, _, _ = cpu.split(
        case.changed[0], case.changed[2], *case.steps[:3], case.shift, case.cut
    )
    out = case.old.copy()
    out[at] = new
    out[cold_at] = tables.apply_steps(case.old[cold_at], moved)
    assert np.array_equal(out, case.new)


@many
@given(cases)
def test_counting_coding_and_decoding_equal_the_reference_and_what_was_coded_is_read(case: Case) -> None:
    counted, ages = case.count(cpu), advanced(reference, case)
    assert_same(counted, case.counted)
    words, ends = case.encode(cpu)
    assert_same((words, ends), case.encode(reference))
    found = case.decode(cpu, words, ends, case.changes)
    assert_decodes(case, found)
    assert_same(found, case.decode(reference, words, ends, case.changes))
    assert_same([advanced(cpu, case)], [ages])
    if case.index:  # writer, reader and the history alone remember the same
        assert_same([counted[4], found[3]], [ages, ages])
    decisions, rows, _, _, _, _, counts = counted
    assert ((decisions > 0) == (case.changes > 0)).all()  # a block without hot changes is neither counted nor coded
    assert ((np.diff(ends) > 0) == (case.changes > 0)).all()
    assert counts.sum() == decisions.sum() == rows.size


def advanced(kernel: ModuleType, case: Case) -> np.ndarray:
    positions, _, new = case.changed
    block = case.old, case.shift, case.tracked, case.cut, case.last
    ages: np.ndarray = kernel.advance_history(*block, positions, new, case.index)
    return ages


@many
@given(cases)
def test_blocks_in_one_call_give_what_one_call_for_each_block_gives(case: Case) -> None:
    """Those that are compiled do; so then do those of the reference, which equal them for one block and for several."""
    kernel = cpu
    decisions, rows, changed, symbols, after, ranks, counts = case.count(kernel)
    words, ends = case.encode(kernel)
    positions, old, new, read_after, read_ranks, fault = case.decode(kernel, words, ends, case.changes)
    assert fault == 0
    first, coded, counted = 0, 0, np.zeros_like(counts)
    for b in range(case.blocks):
        alone = case.alone(b)
        own_decisions, own_rows, own_changed, own_symbols, own_after, _, own_counts = alone.count(kernel)
        assert own_decisions.tolist() == [decisions[b]]
        assert_same([own_after], [after[ranks[b] : ranks[b + 1]]])
        decided = int(decisions[:b].sum())
        assert_same([own_rows], [rows[decided : decided + decisions[b]]])
        own = slice(coded, coded := coded + own_changed.size)
        assert_same((own_changed + np.uint32(decided), own_symbols), (changed[own], symbols[own]))
        counted += own_counts
        own_words, own_ends = alone.encode(kernel)
        assert_same([own_words], [words[ends[b] : ends[b + 1]]])
        at, before, after_, own_history, _, own_fault = alone.decode(kernel, own_words, own_ends, alone.changes)
        assert own_fault == 0
        found = slice(first, first := first + at.size)
        here = at + np.uint32(case.borders[b]), before, after_
        assert_same(here, (positions[found], old[found], new[found]))
        assert_same([own_history], [read_after[read_ranks[b] : read_ranks[b + 1]]])
    assert np.array_equal(counted, counts)
    assert (first, coded) == (positions.size, changed.size)


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_a_step_round_the_circle_is_remembered_by_its_own_direction(kernel: ModuleType) -> None:
    old, new = np.array([0xFFFF], np.uint16), np.array([0x7FFF], np.uint16)  # the lowest NaN to the highest: step -1
    symbols = cpu.steps(old, new, 7)[0]
    contexts, at = tables.Contexts(232, 24, 1, 41), np.array([0], np.uint32)
    span = CodedSpan(old, np.array([0, 1]), 7, 256, contexts.rows, contexts.bits)
    hot = HotChanges(at, new, symbols, NO_POSITIONS, NO_POSITIONS, NO_BYTES)
    _, counted, _ = kernel.count_blocks(span, SpanHistory(NO_BYTES, np.array([0, 0]), 0, 1), hot, contexts.empty())
    assert counted.tolist() == [0x81]
    assert kernel.advance_history(old, 7, 0, 256, NO_BYTES, at, new, 1).tolist() == [0x81]


@many
@given(cases, st.integers(0, 200), seeds)
def test_garbage_streams_give_both_kernels_the_same_fault(case: Case, words: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = np.array([0, *np.sort(rng.integers(0, words + 1, case.blocks - 1)), words])
    assert_same_outcome(case, rng.integers(0, 1 << 16, words, dtype=np.uint16), ends, case.changes)


@many
@given(cases, seeds, st.sampled_from(["flip", "cut", "lengthen", "count"]))
def test_damaged_streams_give_both_kernels_the_same_fault(case: Case, seed: int, how: str) -> None:
    rng = np.random.default_rng(seed)
    (words, ends), changes = case.encode(cpu), case.changes
    if words.size == 0:
        return
    b = int(rng.choice(np.flatnonzero(changes)))
    if how == "flip":
        words[rng.integers(0, words.size)] ^= np.uint16(1 << rng.integers(0, 16))
    elif how == "cut":
        words, ends = resize(words, ends, b, -int(rng.integers(1, ends[b + 1] - ends[b] + 1)))
    elif how == "lengthen":
        words, ends = resize(words, ends, b, 3)
    else:
        changes[b] = int(rng.integers(0, max(case.size, 1)))
    assert_same_outcome(case, words, ends, changes)


def resize(words: np.ndarray, ends: np.ndarray, block: int, more: int) -> tuple[np.ndarray, np.ndarray]:
    """Take the last words of a block's stream away, or add words of zeros to it."""
    end = int(ends[block + 1])
    parts = words[: end + min(more, 0)], np.zeros(max(more, 0), np.uint16), words[end:]
    return np.concatenate(parts), ends + more * (np.arange(ends.size) > block)


def assert_same_outcome(case: Case, words: np.ndarray, ends: np.ndarray, changes: np.ndarray) -> None:
    ours, theirs = (case.decode(kernel, words, ends, changes) for kernel in (cpu, reference))
    assert ours[5] == theirs[5]
    if ours[5] == 0:
        assert_same(ours[:5], theirs[:5])


@many
@given(cases)
def test_a_change_more_or_less_than_the_block_says_is_a_fault(case: Case) -> None:
    coded, changes = case.encode(cpu), case.changes
    for b in np.flatnonzero(changes):
        one = np.arange(changes.size) == b
        assert case.decode(cpu, *coded, changes + one)[5] == 3
        assert changes[b] == 1 or case.decode(cpu, *coded, changes - one)[5] == 3


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@many
@given(case=cases, more=st.integers(-40, 40))
def test_a_history_of_other_weights_is_a_fault(kernel: ModuleType, case: Case, more: int) -> None:
    coded = case.encode(cpu)
    if (b := spoil_history(case, more)) is not None:
        assert case.decode(kernel, *coded, case.changes)[5] != 0
        decisions = case.count(kernel)[0]
        assert decisions[b] == -1
        assert not decisions[b + 1 :].any()


def spoil_history(case: Case, more: int) -> int | None:
    """Make the history of the first block with changes longer or shorter than its weights; None if that did not work.

    Of a block without changes it is not looked at where nothing enters and the cut stays.
    """
    case.frequencies  # noqa: B018 - made while the history is still the right one
    touched = np.flatnonzero(case.changes)
    if not touched.size:
        return None
    b = int(touched[0])
    begin, end = case.ranks[b : b + 2]
    right = case.last[begin:end]
    wrong = np.resize(right, max(0, right.size + more)) if right.size else np.zeros(max(0, more), np.uint8)
    case.last = np.concatenate([case.last[:begin], wrong, case.last[end:]])
    case.ranks = case.ranks + (wrong.size - right.size) * (np.arange(case.ranks.size) > b)
    return b if wrong.size != right.size else None


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_a_history_of_other_weights_is_a_fault_in_a_block_without_changes_where_the_cut_rises(
    kernel: ModuleType,
) -> None:
    case = Case("BF16", 0, 100, 0.0, 0.5, 0.99, 3, close=True, blocks=2)
    case.last = np.append(case.last, np.uint8(0))
    case.ranks = case.ranks + (np.arange(3) > 1)
    assert case.count(kernel)[0].tolist() == [0, -1]
    nothing = np.empty(0, np.uint16), np.zeros(3, np.int64)
    assert case.decode(kernel, *nothing, case.changes)[5] == spec.FOREIGN_WRITE


@many
@given(cases)
def test_words_left_over_are_a_fault(case: Case) -> None:
    words, ends = case.encode(cpu)
    for b in np.flatnonzero(case.changes):
        assert case.decode(cpu, *resize(words, ends, int(b), 1), case.changes)[5] == 4


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("old", "symbol", "extra", "fault"),
    [
        (0x0000, 39, 5, 6),
        (0x8000, 40, 5, 6),
        (0x0000, 39, 0, 6),
        (0x8000, 40, 0, 6),
        (0x0000, 40, 0, 0),
        (0x8000, 39, 0, 0),
    ],
)
def test_a_step_beyond_half_the_circle_or_half_of_it_the_wrong_way_is_a_fault(
    kernel: ModuleType, old: int, symbol: int, extra: int, fault: int
) -> None:
    contexts = tables.Contexts(232, 24, 1, 41)
    frequencies = np.zeros((24, 1, 41), np.int64)
    frequencies[..., symbol] = tables.TOTAL
    cumulative = tables.cumulative(frequencies)
    one = np.array([0, 1])
    span = CodedSpan(np.array([old], np.uint16), one, 7, 256, contexts.rows, contexts.bits)
    row = np.array([contexts.rows[old >> 7 & 0xFF] >> contexts.bits], np.uint16)
    decisions = Decisions(one[1:], row, np.array([0], np.uint32), np.array([symbol], np.uint8))
    table = EncoderTable(cumulative, tables.reciprocals(frequencies), contexts.bits, 16)
    words, ends = coder.encode_blocks(decisions, np.array([extra], np.uint32), table, one[1:])
    history, streams = (
        SpanHistory(NO_BYTES, np.array([0, 0]), 0, 1),
        BlockStreams(one[1:], one[1:], np.diff(ends), words),
    )
    readable = DecoderTable(cumulative, 41, tables.NO_SIZES)
    read = kernel.decode_blocks(span, history, readable, streams, ColdSteps(NO_COLD, NO_COLD))
    assert read[5] == fault


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@pytest.mark.parametrize(
    ("old", "step", "fault"),
    [
        (0x3F80, 1, 0),
        (0x0080, 1, spec.HOT_AMONG_COLD),
        (0x3F80, -0x8000, 0),
        (0x3F80, 0x8000, spec.COLD_HALF_CIRCLE),
        (0xBF80, 0x8000, 0),
        (0xBF80, -0x8000, spec.COLD_HALF_CIRCLE),
    ],
)
def test_a_cold_change_of_a_hot_weight_or_half_the_circle_the_wrong_way_is_a_fault(
    kernel: ModuleType, old: int, step: int, fault: int
) -> None:
    contexts = tables.Contexts(0, 24, 1, 41)
    span = CodedSpan(np.array([old], np.uint16), np.array([0, 1]), 7, 24, contexts.rows, contexts.bits)
    table = DecoderTable(tables.cumulative(np.zeros((24, 1, 41), np.int64)), 41, tables.NO_SIZES)
    history, cold = SpanHistory(NO_BYTES, np.array([0, 0]), 0, 0), ColdSteps(np.array([0]), np.array([step]))
    found = kernel.decode_blocks(span, history, table, BlockStreams.none(1), cold)
    assert found[5] == fault
    if not fault:
        assert_same(found[:2], (np.zeros(1, np.uint32), span.old))
        assert_same([found[2]], [tables.apply_steps(span.old, np.array([step]))])


def piece_table(rng: np.random.Generator, sizes: list[int], far: int) -> NDArray[np.int64]:
    """A table of pieces of these sizes, in any places of tensors with any offsets; some do not lie in a row."""
    rows = []
    for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        columns = int(rng.integers(1, size, endpoint=True))
        stride = columns + int(rng.integers(0, 9000)) if rng.random() < 0.5 else 0
        offset = int(rng.integers(0, 1 << 64, dtype=np.uint64))
        rows.append((begin, int(rng.integers(0, far)), columns, stride, offset - (1 << 63)))
    return np.array(rows, np.int64)


piece_sizes = st.lists(st.integers(1, 9000), min_size=1, max_size=5)


@given(seeds, st.sampled_from([(np.uint8, 1), (np.uint16, 1), (np.uint16, 2), (np.uint16, 4)]), piece_sizes)
def test_digest_weights_equals_the_reference(seed: int, kind: tuple[type[Any], int], sizes: list[int]) -> None:
    (dtype, per), rng = kind, np.random.default_rng(seed)
    first, end = sorted(rng.integers(0, sum(sizes), 2, endpoint=True).tolist())
    units = random_bits(rng, dtype, ((end - first) * per,))
    arguments = (units, first, end - first, piece_table(rng, sizes, 1 << 44), per, keys(), False)
    assert_same(cpu.digest_weights(*arguments), reference.digest_weights(*arguments))


@given(seeds, st.sampled_from([(np.uint8, 1), (np.uint16, 2)]), st.integers(1, 9000))
def test_digest_weights_counts_in_place_what_it_counts_of_weights_that_are_given(
    seed: int, kind: tuple[type[Any], int], size: int
) -> None:
    (dtype, per), rng = kind, np.random.default_rng(seed)
    table = piece_table(rng, [size], 500)
    ((_, start, columns, stride, _),) = table.tolist()
    at = np.arange(size) if not stride else np.arange(size) // columns * stride + np.arange(size) % columns
    tensor = random_bits(rng, dtype, (start + int(at[-1]) + 1, per))
    first = int(rng.integers(0, size))
    given = np.ascontiguousarray(tensor[start + at[first:]]).reshape(-1)
    for kernel in KERNELS:
        in_place = kernel.digest_weights(tensor.reshape(-1), first, size - first, table, per, keys(), True)
        assert_same(in_place, kernel.digest_weights(given, first, size - first, table, per, keys(), False))


@given(
    seeds,
    st.sampled_from([np.uint8, np.uint16]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 300),
    piece_sizes,
    st.integers(0, 1 << 44),
)
def test_digest_change_equals_the_reference(
    seed: int, dtype: type[Any], per: int, count: int, sizes: list[int], first: int
) -> None:
    rng = np.random.default_rng(seed)
    table = piece_table(rng, sizes, 1 << 44)
    if len(sizes) > 1:
        first = 0  # a bundle is one block
    positions = np.unique(rng.integers(0, 1 << 20 if first else sum(sizes), count, dtype=np.uint32))
    old, new = (random_bits(rng, dtype, (positions.size * per,)) for _ in range(2))
    runs = np.unique(np.append(0, rng.integers(0, positions.size, 3))) if positions.size else np.empty(0, np.int64)
    for some in (runs, runs[:0]):
        found, expected = (k.digest_change(positions, first, table, per, old, new, keys(), some) for k in KERNELS)
        assert_same(found[:2], expected[:2])
        assert np.array_equal(found[2], expected[2])


@pytest.mark.parametrize("kernel", KERNELS)
@given(seeds, st.lists(st.integers(1, 300), min_size=1, max_size=9), st.integers(0, 60))
def test_runs_are_gathered_from_their_addresses_and_written_there(
    kernel: Any, seed: int, lengths: list[int], count: int
) -> None:
    rng = np.random.default_rng(seed)
    runs = [random_bits(rng, np.uint16, (size + 2,)) for size in lengths]  # with one weight before it and one after it
    addresses = np.array([run[1:].ctypes.data for run in runs], np.uint64)
    starts = np.cumsum([0, *lengths])
    before, after = (np.full(starts[-1], 7, np.uint16) for _ in range(2))
    kernel.gather_runs(addresses, starts, before)
    assert np.array_equal(before, np.concatenate([run[1:-1] for run in runs]))
    edges = [(run[0], run[-1]) for run in runs]
    positions = np.unique(rng.integers(0, starts[-1], count, dtype=np.uint32))
    new = random_bits(rng, np.uint16, (positions.size,))
    kernel.scatter_to_runs(addresses, starts, positions, new)
    kernel.gather_runs(addresses, starts, after)
    before[positions] = new
    assert np.array_equal(after, before)
    assert [(run[0], run[-1]) for run in runs] == edges


@given(seeds, sizes)
def test_planes_are_split_and_joined_as_the_reference_does(seed: int, size: int) -> None:
    weights = random_bits(np.random.default_rng(seed), np.uint16, (size,))
    split = []
    for kernel in KERNELS:
        low, high, joined = np.empty(size, np.uint8), np.empty(size, np.uint8), np.empty(size, np.uint16)
        kernel.split_planes(weights, low, high)
        kernel.join_planes(np.frombuffer(low.tobytes(), np.uint8), np.frombuffer(high.tobytes(), np.uint8), joined)
        assert np.array_equal(joined, weights)
        split.append((low.tobytes(), high.tobytes()))
    assert split[0] == split[1]


@given(seeds, st.lists(st.integers(1, 300), min_size=1, max_size=3), st.booleans())
def test_huffman_streams_equal_the_reference(seed: int, quarters: list[int], complete: bool) -> None:
    rng = np.random.default_rng(seed)
    borders = np.cumsum([0, *quarters]) * 4
    lengths = rng.integers(1, 23, 40).astype(np.uint32)
    codes = np.zeros(1 << 16, np.uint32)
    codes[:40] = (rng.integers(0, 1 << 22, 40).astype(np.uint32) & ((1 << lengths) - 1)) << 5 | lengths
    if not complete:
        codes[rng.integers(40)] = 0
    pairs = rng.integers(0, 40, borders[-1], np.uint16)
    outs = [np.zeros(3 * pairs.size + 64, np.uint8) for _ in KERNELS]
    sizes_ = [kernel.huffman_streams(pairs, borders, codes, out) for kernel, out in zip(KERNELS, outs, strict=True)]
    assert np.array_equal(*sizes_)
    end = sizes_[0].sum()
    assert np.array_equal(outs[0][:end], outs[1][:end])


@pytest.mark.slow
@pytest.mark.timeout(140)
def test_no_kernel_leaves_its_arrays(tmp_path: Path) -> None:
    """Run everything once more with numba's own bounds checks compiled in."""
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def run_all(case: Case, rng: np.random.Generator) -> None:
    """Every kernel once, and decode_blocks on words of all kinds."""
    cpu.changed(case.old, case.new)
    cpu.sample_classes(case.old, case.shift)
    cpu.steps(*case.changed[1:], case.shift)
    cpu.split(case.changed[0], case.changed[2], *case.steps[:3], case.shift, case.cut)
    case.count(cpu)
    advanced(cpu, case)
    (words, ends), changes = case.encode(cpu), case.changes
    case.decode(cpu, words, ends, changes)
    for _ in range(10):
        garbage = rng.integers(0, 1 << 16, words.size, dtype=np.uint16)
        cut = np.minimum(ends, rng.integers(0, words.size + 1))
        case.decode(cpu, garbage, cut, np.minimum(changes, rng.integers(0, changes.max() + 1)))
        damaged: Bits = words.copy()
        damaged[rng.integers(0, max(words.size, 1), 2 * (words.size > 0))] = rng.integers(0, 1 << 16)
        case.decode(cpu, damaged, ends, changes)
    pieces = piece_table(rng, [case.size // 2 + 1, case.size + 1], 5000)
    cpu.digest_weights(case.old, 0, case.size, pieces, 1, keys(), False)
    cpu.digest_weights(case.old, 0, case.size, np.zeros((1, 5), np.int64), 1, keys(), True)
    for more in (-case.last.size, -1, 1, 5000):
        spoil_history(case, more)
        case.decode(cpu, words, ends, changes)
        case.count(cpu)
    cpu.digest_change(case.changed[0], 0, pieces, 1, *case.changed[1:], keys(), np.empty(0, np.int64))


if __name__ == "__main__":
    draw = np.random.default_rng(0)
    for number, size in enumerate(SIZES[::-1] * 4):
        run_all(
            Case(
                dtype=("BF16", "F16")[number % 2],
                seed=number,
                size=size,
                density=float(draw.choice([0.0, 0.01, 0.5, 1.0])),
                cut_share=float(draw.choice([0.0, 0.3, 0.5, 1.0])),
                tracked_share=float(draw.choice([0.0, 0.9, 1.0])),
                index=int(draw.choice([0, 1, 3, 127])),
                close=bool(draw.integers(0, 2)),
                blocks=int(draw.choice([1, 2, 5])),
                still=float(draw.choice([0.0, 0.5])),
            ),
            draw,
        )
