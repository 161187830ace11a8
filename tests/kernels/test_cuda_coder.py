"""The Triton kernels of the entropy coder, and what leads to and from it: results of the reference, bounds kept."""

from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU kernels are NOT tested: torch cannot be imported")
pytest.importorskip("triton", reason="the GPU kernels are NOT tested: triton cannot be imported")

import torch

from pulsesync.core.types import DTYPES, Bits, Remembered
from pulsesync.device import encode as encoding
from pulsesync.device.changes import PileChanges, find_changes
from pulsesync.device.memory import starts_of, to_device, to_host, unsigned, warps_of
from pulsesync.device.pile import PileAddresses
from pulsesync.device.tracked import DeviceHistory, HotSearch, HotWeights, PileMemory, advanced, begin_advance
from pulsesync.errors import VerificationError
from pulsesync.format import tables
from pulsesync.format.history import History, TileHistory
from pulsesync.kernels import cuda, reference, spec
from pulsesync.kernels.records import CodedSpan, Decisions, DecoderTable, EncoderTable, SpanHistory
from tests.device import interpreter
from tests.device.pairs import host, locate, pile_of
from tests.helpers import near, nudge

interpreter.mend()

GUARD = 16  # words before and after what a kernel may write
MARK = 0x5A


# From changes to streams


@dataclass
class Case:
    """Blocks of a pile, with a change of each and a history or none: every stage on the device and by the reference."""

    dtype: str
    index: int  # of the patch in its epoch; 0: no history
    device: str
    sizes: tuple[int, ...] = (1100, 45, 20, 1)
    lanes: tuple[int, ...] = (32, 8, 4, 1)

    def __post_init__(self) -> None:
        kind, rng = DTYPES[self.dtype], np.random.default_rng(self.index + 7)
        width, self.shift = 8 * kind.itemsize, kind.exponent_shift or 0
        self.wide, sign = kind.itemsize, kind.bits.type(1 << (width - 1))
        self.cut = min(12, (1 << (width - 1 - self.shift)) - 3)
        self.tracked = self.cut - 1 if self.index else 0
        self.old = [near(rng, self.dtype, (size,), self.cut) for size in self.sizes]
        self.old[0][30:] |= sign - kind.bits.type(1)  # keep most of the large block cold: decisions take long here
        self.new = [nudge(rng, bits, 0.3, 9) for bits in self.old]
        self.new[0][30:] = nudge(rng, self.old[0][30:], 0.02)
        self.old[1][:4] = np.array([0, sign, 1, sign])  # half the circle, by either way; one place across zero; far
        far: list[Any] = [~kind.bits.type(0), sign - 1, sign | kind.bits.type(1), sign >> kind.bits.type(1)]
        self.new[1][:4] = far
        self.old[3][:], self.new[3][:] = 1, 2
        self.pile = pile_of(self.dtype, list(self.sizes), self.device)
        symbols = tables.symbol_count(width)
        lo = max(0, self.cut - 5)
        self.contexts = tables.Contexts(lo, self.cut - lo, max(1, self.index), symbols)
        self.last = [self._memory(rng, bits) for bits in self.old]

    def _memory(self, rng: np.random.Generator, bits: Bits) -> np.ndarray:
        known = int((reference._magnitudes(bits) < self.tracked << self.shift).sum())
        ages = rng.integers(0, max(1, self.index), known, dtype=np.uint8)
        return np.where((rng.random(known) < 0.5) & (ages > 0), ages | 0x80, ages).astype(np.uint8)

    # By the reference, for each block

    def block(self, b: int) -> tuple[CodedSpan, SpanHistory]:
        old, last = self.old[b], self.last[b]
        span = CodedSpan(old, np.array([0, old.size]), self.shift, self.cut, self.contexts.rows, self.contexts.bits)
        return span, SpanHistory(last, np.array([0, last.size]), self.tracked, 0)

    @cached_property
    def splits(self) -> list[tuple[Any, ...]]:
        out = []
        for old, new in zip(self.old, self.new, strict=True):
            where, before, after = reference.changed(old, new)
            steps = reference.steps(before, after, self.shift)
            out.append(reference.split(where, after, *steps[:3], self.shift, self.cut))
        return out

    @cached_property
    def decided(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each block the rows of its decisions, as the device has them, and the symbols."""
        out = []
        for b, (where, _, symbols, *_) in enumerate(self.splits):
            hot, begins, down = reference._decide(*self.block(b))
            found = np.zeros(hot.size, np.int64)
            at = np.searchsorted(hot, where)
            found[at] = ((symbols.astype(np.int64) - 1) ^ down[at]) + 1
            out.append(((begins >> self.contexts.bits) | down << 15, found))
        return out

    @cached_property
    def counts(self) -> np.ndarray:
        counts = np.zeros((self.contexts.classes * self.contexts.ages, self.contexts.symbols), np.int64)
        for rows, symbols in self.decided:
            np.add.at(counts, (rows & 0x7FFF, symbols), 1)
        return counts

    @cached_property
    def cumulative(self) -> np.ndarray:
        return tables.cumulative(tables.normalise(self.counts))

    @cached_property
    def streams(self) -> list[np.ndarray]:
        out = []
        for (rows, symbols), (*_, extras, _, _, _, _), lanes in zip(self.decided, self.splits, self.lanes, strict=True):
            changed, row = np.flatnonzero(symbols).astype(np.uint32), (rows & 0x7FFF).astype(np.uint16)
            decisions = Decisions(np.array([row.size]), row, changed, symbols[changed].astype(np.uint8))
            table = EncoderTable(self.cumulative, np.empty(0, np.uint32), self.contexts.bits, 8 * self.wide)
            out.append(reference._encode_block(decisions, extras, table, lanes))
        return out

    # On the device

    @cached_property
    def weights(self) -> PileAddresses:
        return locate(self.pile, self.old)

    @cached_property
    def found(self) -> PileChanges:
        return find_changes(self.pile, self.weights, locate(self.pile, self.new), cast=False)

    @cached_property
    def memories(self) -> DeviceHistory:
        sizes, cuts = np.array([last.size for last in self.last]), np.full(len(self.sizes), self.tracked)
        content = to_device(np.concatenate(self.last), self.pile.device)
        sums = np.zeros((len(self.sizes), 2), np.uint64)  # not looked at here
        memory = PileMemory(self.pile, cuts, sizes, content, sums)
        return DeviceHistory(max(0, self.index - 1), (memory,) if self.index else ())

    @cached_property
    def hot(self) -> HotWeights:
        cuts = np.full(len(self.sizes), self.cut)
        rooms = np.array([3, *self.sizes[1:]])  # too little for the first, so that all are listed again
        return HotSearch(
            self.pile, self.weights, cuts, self.memories, self.found, rooms, self.contexts, ranks=True
        ).wait()

    @property
    def borders(self) -> list[tuple[int, int]]:
        """Where the decisions of each block are listed."""
        begins = self.hot.borders[:-1]
        return list(zip(begins.tolist(), (begins + self.hot.counts).tolist(), strict=True))

    @cached_property
    def decisions(self) -> tuple[torch.Tensor, ...]:
        """Symbols, how far hot changes go, cold positions and steps; symbols by row; and how many go far."""
        run = self.found
        hot_at, rows = self.hot.listed.begins, self.hot.listed.rows
        hots = sum(split[0].size for split in self.splits)
        cold = run.count - hots
        device = self.pile.device
        symbols = torch.zeros(rows.numel(), dtype=torch.uint8, device=device)
        extras = torch.zeros(hots, dtype=torch.int32, device=device)
        cold_at, steps = (torch.zeros(cold, dtype=torch.int64, device=device) for _ in range(2))
        shape = (2, self.contexts.classes * self.contexts.ages, 1 << self.contexts.bits)  # two copies
        counts, longs = (torch.zeros(some, dtype=torch.int32, device=device) for some in (shape, 101))
        cuda.decide[(self.pile.chunks,)](
            self.pile.tables.chunk_block,
            self.pile.tables.first_chunk,
            unsigned(self.hot.bitmap),
            run.chunks(),
            unsigned(run.positions),
            unsigned(run.old),
            unsigned(run.new),
            hot_at,
            self.hot.change_at,
            unsigned(rows),
            symbols,
            unsigned(extras),
            cold_at,
            steps,
            counts,
            counts[0].numel(),
            2,
            longs,
            100,
            BITS=self.contexts.bits,
            ITEM=self.wide,
            HISTORY=self.hot.remembers,
            SPAN=64,
            num_warps=1,
        )
        return symbols, extras, cold_at, steps, counts, longs

    def encode(self, rooms: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sizes of the streams, all of the buffer with its guards, and where each block's room begins in it."""
        device = self.pile.device
        symbols, extras, *_ = self.decisions
        starts = starts_of(rooms) + GUARD
        stream = torch.full((int(starts[-1]) + GUARD,), MARK, dtype=torch.int16, device=device)
        sizes = torch.zeros(len(rooms), dtype=torch.int64, device=device)
        changes = starts_of(np.array([split[0].size for split in self.splits]))
        order, firsts = warps_of(np.array(self.lanes))
        cuda.encode[(firsts.size - 1,)](
            to_device(order, device),
            to_device(firsts, device),
            to_device(np.array(self.lanes, np.int32), device),
            unsigned(self.hot.listed.rows),
            symbols,
            unsigned(extras),
            *(to_device(np.array(some), device) for some in zip(*self.borders, strict=True)),
            to_device(changes, device),
            unsigned(to_device(tables.shares(tables.normalise(self.counts)), device)),
            tables.listed_class(DTYPES[self.dtype]),
            to_device(starts, device),
            unsigned(stream),
            sizes,
            BITS=self.contexts.bits,
            WIDE=self.wide == 4,
            num_warps=1,
        )
        return host(sizes, np.int64), host(stream, np.uint16), starts


@cache
def case(dtype: str, index: int, device: str) -> Case:
    return Case(dtype, index, device)


CASES = [("BF16", 3), ("F32", 0), ("F8_E5M2", 2)]
each = pytest.mark.parametrize(("dtype", "index"), CASES, ids=lambda value: str(value))


@each
def test_classes_are_counted_as_the_reference_does(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    run, pile = c.found, c.pile
    by_class, sampled = (torch.zeros(256 * len(c.sizes), dtype=torch.int64, device=pile.device) for _ in range(2))
    cuda.count_classes[(pile.blocks,)](
        unsigned(run.old),
        run.starts,
        pile.tables.sizes,
        c.weights.at,
        pile.tables.block_tile,
        by_class,
        sampled,
        ITEM=c.wide,
        SHIFT=c.shift,
        PERIOD=spec.SAMPLE_PERIOD,
        RUN=spec.SAMPLE_RUN,
        SPAN=1024,
    )
    found, seen = (host(t, np.int64).reshape(-1, 256) for t in (by_class, sampled))
    for b, (old, new) in enumerate(zip(c.old, c.new, strict=True)):
        assert np.array_equal(seen[b], reference.sample_classes(old, c.shift))
        assert np.array_equal(found[b], reference.steps(*reference.changed(old, new)[1:], c.shift)[3])


@each
def test_hot_weights_are_listed_as_the_reference_decides(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    rows, marks = host(c.hot.listed.rows, np.uint16), host(c.hot.bitmap, np.uint8)
    ranks = host(c.hot.listed.ranks, np.uint16).reshape(-1, 128)
    before = np.bitwise_count(marks).reshape(-1, 128, 4).sum(axis=2).cumsum(axis=1)
    assert c.hot.remembers == (index > 0)
    assert np.array_equal(ranks[:, 1:], before[:, :-1])
    assert not ranks[:, 0].any()
    chunks = c.pile.host_first_chunk
    for b, (expected, _) in enumerate(c.decided):
        here = slice(*c.borders[b])
        assert np.array_equal(rows[here], expected)
        places = np.flatnonzero(np.unpackbits(marks[512 * chunks[b] : 512 * chunks[b + 1]], bitorder="little"))
        assert np.array_equal(places, reference._decide(*c.block(b))[0])


@each
def test_changes_become_the_symbols_and_steps_of_the_reference(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    symbols, sizes, cold_at, steps, _, longs = (to_host(t)[0] for t in c.decisions)
    for (begin, end), (_, found) in zip(c.borders, c.decided, strict=True):
        assert np.array_equal(symbols[begin:end], found)
    for got, k in ((cold_at, 4), (steps, 5)):
        expected = np.concatenate([split[k] for split in c.splits])
        assert expected.size
        assert np.array_equal(got, expected)
    codes, extras = (np.concatenate([split[k] for split in c.splits]) for k in (2, 3))
    long, expected = tables.long_steps(codes, extras)
    assert np.array_equal(sizes.view(np.uint32)[long], expected)
    assert np.array_equal(np.delete(sizes, long), (np.delete(codes, long) + 1) // 2)
    assert longs[0] == long.size
    assert sorted(longs[1 : 1 + long.size].view(np.uint32).tolist()) == sorted(expected.tolist())


@each
def test_symbols_are_counted_by_context(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    blocks = encoding._BlockCounts(c.hot.changes, np.ones_like(c.hot.counts), c.hot.counts)
    plan = encoding._StreamPlan.of(blocks, c.hot.borders, c.pile.device)
    in_copies = c.decisions[4].clone()
    encoding._count_rows(c.hot.listed.rows, plan, c.contexts, in_copies)
    by_symbol = to_host(in_copies.sum(dim=0, dtype=torch.int64))[0]
    counts = encoding._with_unchanged(by_symbol[:, 0], by_symbol, c.contexts)
    assert np.array_equal(counts.reshape(c.counts.shape), c.counts)


@each
def test_streams_are_those_of_the_reference(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    rooms = np.array([stream.size + 3 * b for b, stream in enumerate(c.streams)])
    sizes, buffer, starts = c.encode(rooms)
    for b, stream in enumerate(c.streams):
        assert sizes[b] == stream.size
        assert np.array_equal(buffer[starts[b + 1] - stream.size : starts[b + 1]], stream)
        assert (buffer[starts[b] : starts[b + 1] - stream.size] == MARK).all()
    assert (buffer[:GUARD] == MARK).all()
    assert (buffer[-GUARD:] == MARK).all()


def test_a_stream_that_finds_no_room_says_how_long_it_is_and_writes_nothing_outside(device: str) -> None:
    c = case("F32", 0, device)
    rooms = np.array([stream.size for stream in c.streams])
    rooms[:2] = 5
    sizes, buffer, starts = c.encode(rooms)
    assert sizes.tolist() == [stream.size for stream in c.streams]
    for b in (2, 3):
        assert np.array_equal(buffer[starts[b] : starts[b + 1]], c.streams[b])
    assert (buffer[:GUARD] == MARK).all()
    assert (buffer[-GUARD:] == MARK).all()


# And back


@dataclass
class Job:
    """A stream for a block of a case, good or not; how many changes it shall have, and what follows it in memory."""

    block: int
    stream: np.ndarray
    count: int
    beyond: np.ndarray
    cumulative: np.ndarray | None = None


def good(c: Case, b: int) -> Job:
    return Job(b, c.streams[b], c.splits[b][0].size, np.zeros(2, np.uint16))


def decode(c: Case, jobs: list[Job]) -> tuple[np.ndarray, list[tuple[np.ndarray, Bits, Bits]]]:
    """Decode jobs in one launch, and land what is good; between them blocks without decisions guard their borders.

    Returns the fault of each, and positions, old and new weights.
    """
    device, n = c.pile.device, len(jobs)
    starts = starts_of(np.array([size for job in jobs for size in (job.stream.size, job.beyond.size)])) + GUARD
    fill = np.full(GUARD, MARK, np.uint16)
    stream = np.concatenate([fill, *(part for job in jobs for part in (job.stream, job.beyond)), fill])
    outs = starts_of(np.array([size for job in jobs for size in (job.count, GUARD)])) + GUARD
    rows = [c.decided[job.block][0].astype(np.uint16) for job in jobs]
    hots = starts_of(np.array([size for row in rows for size in (row.size, 0)]))
    lanes = np.array([lane for job in jobs for lane in (c.lanes[job.block], 1)], np.int32)
    size = int(outs[-1]) + GUARD
    changes, extras = (torch.full((size,), MARK, dtype=torch.int32, device=device) for _ in range(2))
    faults = torch.full((2 * n,), -1, dtype=torch.int32, device=device)
    table = c.cumulative if jobs[0].cumulative is None else jobs[0].cumulative
    all_rows, out_starts = to_device(np.concatenate(rows), device), to_device(outs, device)
    order, firsts = warps_of(lanes)
    shares = to_device(table, device)
    cuda.decode[(firsts.size - 1,)](
        to_device(order, device),
        to_device(firsts, device),
        to_device(lanes, device),
        to_device(np.arange(2 * n), device),
        unsigned(to_device(stream, device)),
        to_device(starts, device),
        to_device(hots, device),
        to_device(np.stack([np.diff(hots), np.zeros(2 * n, np.int64)], axis=1), device),
        unsigned(all_rows),
        unsigned(shares),
        unsigned(shares.view(torch.int64)),
        c.contexts.symbols,
        tables.listed_class(DTYPES[c.dtype]),
        out_starts,
        unsigned(changes),
        unsigned(extras),
        faults,
        BITS=c.contexts.bits,
        WIDE=c.wide == 4,
        num_warps=1,
    )
    outside = np.ones(size, bool)
    for k in range(n):
        outside[outs[2 * k] : outs[2 * k + 1]] = False
    for written in (changes, extras):
        assert (to_host(written)[0][outside] == MARK).all()
    found = to_host(faults)[0][::2].copy()
    return found, [_land(c, job, k, found, outs, changes, extras) for k, job in enumerate(jobs)]


def _land(c: Case, job: Job, k: int, faults: np.ndarray, outs: np.ndarray, *decoded: torch.Tensor) -> Any:
    """Land one job; a step that there is not becomes its fault."""
    if faults[k]:
        return None
    device = c.pile.device
    dtype = np.dtype(f"u{c.wide}")
    positions = torch.full((outs[-1],), MARK, dtype=torch.int32, device=device)
    old, new = (to_device(np.full(int(outs[-1]), MARK, dtype), device) for _ in range(2))
    fault = torch.zeros(1, dtype=torch.int32, device=device)
    at = to_device(outs[2 * k : 2 * k + 2].copy(), device)
    cuda.land[(1, 2)](
        c.weights.at,
        to_device(np.array([job.block]), device),
        c.pile.tables.first_chunk,
        unsigned(c.hot.bitmap),
        unsigned(c.hot.listed.ranks),
        c.hot.listed.begins,
        c.hot.listed.rooms,
        at,
        *map(unsigned, decoded),
        unsigned(torch.zeros(1, dtype=torch.int32, device=device)),
        unsigned(positions),
        unsigned(old),
        unsigned(new),
        fault,
        ITEM=c.wide,
        SPAN=32,
    )
    faults[k] = int(fault)
    arrays = host(positions, np.uint32), host(old, dtype), host(new, dtype)
    for array in arrays:
        assert (array[: outs[2 * k]] == MARK).all()
        assert (array[outs[2 * k + 1] :] == MARK).all()
    return tuple(array[outs[2 * k] : outs[2 * k + 1]] for array in arrays)


def by_reference(c: Case, job: Job) -> tuple[np.ndarray, Bits, int]:
    cumulative = c.cumulative if job.cumulative is None else job.cumulative
    table = DecoderTable(cumulative, c.contexts.symbols, tables.NO_SIZES)
    return reference._decode_block(*c.block(job.block), table, c.lanes[job.block], job.stream, job.count)


@each
def test_good_streams_decode_to_their_changes(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    jobs = [good(c, b) for b in range(len(c.sizes))]
    faults, found = decode(c, jobs)
    assert faults.tolist() == [0] * len(jobs)
    for b, (positions, old, new) in enumerate(found):
        assert np.array_equal(positions, c.splits[b][0])
        assert np.array_equal(old, c.old[b][positions])
        assert np.array_equal(new, c.splits[b][1])


def test_every_fault_of_a_stream_is_told_and_nothing_outside_is_read_or_written(device: str) -> None:
    c = case("BF16", 3, device)
    b = 2
    whole, count, none = c.streams[b], c.splits[b][0].size, np.zeros(2, np.uint16)
    jobs = [
        Job(b, whole[:-1], count, whole[-1:]),  # the last word is there, but not the block's
        Job(b, whole[:3], count, whole[3:]),  # not even the lanes' states
        Job(b, np.r_[whole, whole[:2]], count, none),
        Job(b, whole, count - 1, none),
        Job(b, whole, count + 1, none),
        good(c, b),
    ]
    faults, _ = decode(c, jobs)
    assert faults.tolist() == [1, 1, 4, 3, 3, 0]
    assert [by_reference(c, job)[2] for job in jobs] == faults.tolist()


def test_a_context_without_a_table_is_a_fault(device: str) -> None:
    c = case("BF16", 3, device)
    empty = Job(2, c.streams[2], c.splits[2][0].size, np.zeros(2, np.uint16), np.zeros_like(c.cumulative))
    assert decode(c, [empty])[0].tolist() == [2]


@pytest.mark.parametrize(("dtype", "index"), [("F32", 0), ("F8_E5M2", 2)])
def test_damaged_streams_are_refused_where_the_reference_refuses_them(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    rng = np.random.default_rng(5)
    jobs = []
    for n in range(6):
        job = good(c, 1 + n % 2)
        job.stream = job.stream.copy()
        job.stream[rng.integers(0, job.stream.size)] ^= np.uint16(1 << rng.integers(0, 16))
        jobs.append(job)
    faults, found = decode(c, jobs)
    expected = [by_reference(c, job) for job in jobs]
    assert [fault > 0 for fault in faults] == [fault > 0 for *_, fault in expected]
    assert faults.any()
    for got, (positions, new, fault) in zip(found, expected, strict=True):
        if not fault:
            assert np.array_equal(got[0], positions)
            assert np.array_equal(got[2], new)


@pytest.mark.parametrize(
    ("old", "symbol", "extra", "fault"), [(0, 1, 0, 6), (0, 2, 0, 0), (0, 2, 1, 6), (128, 1, 0, 0)]
)
def test_half_the_circle_is_gone_by_one_way_only(old: int, symbol: int, extra: int, fault: int, device: str) -> None:
    """symbol: 1 up, 2 down, of the longest size class."""
    longest = tables.symbol_count(8) - 3
    where = torch.device(device)
    weights = to_device(np.full(8, old, np.uint8), where)
    at = to_device(np.array([weights.data_ptr()]), where)
    out = [torch.zeros(1, dtype=t, device=where) for t in (torch.int32, torch.uint8, torch.uint8, torch.int32)]
    one = to_device(np.array([0, 1]), where)
    eight = to_device(np.where(np.arange(128) == 0, 0, 8).astype(np.uint16), where)  # weights, all of them hot
    cuda.land[(1, 1)](
        at,
        one,
        one,
        unsigned(to_device(np.where(np.arange(128) == 0, 255, 0).astype(np.uint32), where)),
        unsigned(eight),
        one,
        one,
        one,
        unsigned(to_device(np.array([(longest + symbol << 20) + 5], np.uint32), where)),
        unsigned(to_device(np.array([extra], np.uint32), where)),
        unsigned(torch.zeros(1, dtype=torch.int32, device=where)),
        unsigned(out[0]),
        out[1],
        out[2],
        out[3],
        ITEM=1,
        SPAN=16,
    )
    assert int(out[3]) == fault
    if not fault:
        (moved,) = tables.apply_steps(np.array([old], np.uint8), np.array([128]))
        assert (int(out[0]), int(out[1]), int(out[2])) == (5, old, moved)


# What is remembered


@pytest.mark.parametrize(("dtype", "index"), [("BF16", 3), ("F8_E5M2", 2)])
def test_the_history_afterwards_is_that_of_the_reference(dtype: str, index: int, device: str) -> None:
    c = case(dtype, index, device)
    hot = replace(c.hot, listed=c.hot.listed._replace(bitmap=c.hot.bitmap.clone()))  # which is used up
    later = advanced(c.memories, [begin_advance(hot, index, [c.found])])
    content = to_host(later.memories[0].content)[0]
    borders = later.memories[0].borders.tolist()
    expected = {}
    for tile, old, new, last in zip(c.pile.tiles, c.old, c.new, c.last, strict=True):
        where, _, after = reference.changed(old, new)
        bits = reference.advance_history(old, c.shift, c.tracked, c.cut, last, where, after, index)
        expected[tile.ordinal] = TileHistory(c.cut, (Remembered.alone(bits),))
        assert np.array_equal(content[slice(*borders[tile.ordinal : tile.ordinal + 2])], bits)
    assert later.digest() == History(index, expected).digest()
    assert later.to_bytes() == History(index, expected).to_bytes()


def test_a_history_of_other_weights_is_refused(device: str) -> None:
    c = case("BF16", 3, device)
    others = [bits.copy() for bits in c.old]
    others[1][:] = 0  # more of them are below the cut than there were
    with pytest.raises(VerificationError, match="something other than a sync wrote them"):
        HotSearch(c.pile, locate(c.pile, others), np.full(4, c.cut), c.memories).wait()
