from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, DTYPES, Bits
from pulsesync.errors import FormatError, LimitError, VerificationError
from pulsesync.format import tables, wire
from pulsesync.format.codecs import context
from pulsesync.format.codecs.context import BlockMemory, BlockStream, Payload
from pulsesync.format.index import FrequencyTable
from pulsesync.kernels import cpu
from tests.helpers import classes, near, nudge, seeds

BF16 = DTYPES["BF16"]
NOTHING = BlockStream(0, 1, np.empty(0, np.uint16))
NO_COLD = np.empty(0, np.int64)


def random_payload(rng: np.random.Generator, size: int) -> Payload:
    blocks = []
    for begin in range(0, size, BLOCK):
        weights, lanes = min(BLOCK, size - begin), 1 << int(rng.integers(0, 6))
        words = rng.integers(0, 1 << 16, int(rng.integers(0, min(64 + 3 * weights, 200))), dtype=np.uint16)
        some = BlockStream(int(rng.integers(1, weights, endpoint=True)), lanes, words)
        blocks.append(some if rng.random() < 0.7 else NOTHING)
    cold = np.sort(rng.choice(size, int(rng.integers(0, min(size, 60), endpoint=True)), replace=False))
    steps = rng.integers(1, 1 << 15, cold.size, endpoint=True) * rng.choice([-1, 1], cold.size)
    return Payload(int(rng.integers(0, 256)), int(rng.integers(0, 257)), tuple(blocks), cold, steps)


def assert_same(a: Payload, b: Payload) -> None:
    assert (a.table, a.cut) == (b.table, b.cut)
    assert np.array_equal(a.cold, b.cold)
    assert np.array_equal(a.steps, b.steps)
    assert [(x.changes, x.lanes) for x in a.blocks] == [(x.changes, x.lanes) for x in b.blocks]
    assert all(np.array_equal(x.words, y.words) for x, y in zip(a.blocks, b.blocks, strict=True))


@given(seeds, st.sampled_from([1, 2, 100, 5000, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
def test_a_payload_comes_back(seed: int, size: int) -> None:
    payload = random_payload(np.random.default_rng(seed), size)
    assert_same(context.parse(memoryview(context.build(payload)), size, BF16), payload)


@given(seeds, st.data())
def test_a_payload_cut_short_is_refused(seed: int, draw: st.DataObject) -> None:
    data = context.build(random_payload(np.random.default_rng(seed), 300))
    with pytest.raises(FormatError):
        context.parse(memoryview(data)[: draw.draw(st.integers(0, len(data) - 1))], 300, BF16)


@given(seeds, st.sampled_from([1, 300, BLOCK, 3 * BLOCK + 7]), st.sampled_from([0, 1, 32, 33, 200]))
def test_heads_come_back_and_the_streams_follow(seed: int, size: int, cold: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.sort(rng.choice(size, min(size, cold), replace=False))
    steps = rng.choice([-(1 << 15), -1, 1, 77, 1 << 15], at.size)
    whole = replace(random_payload(rng, size), cold=at, steps=steps)
    data = memoryview(context.build(whole))
    heads, begin = context.parse_heads(data, size, BF16)
    assert context.build_heads(heads) == data[:begin]
    assert data[begin:] == b"".join(block.words.tobytes() for block in whole.blocks)
    assert heads.words.tolist() == [block.words.size for block in whole.blocks]
    assert (heads.cold.tolist(), heads.steps.tolist()) == (at.tolist(), steps.tolist())


@pytest.mark.parametrize("count", [1, 40], ids=["few", "many"])
@pytest.mark.parametrize(
    ("last", "error"),
    [((0, 2), None), ((1, 2), FormatError), ((0, 0), LimitError), ((0, (2 << 15) + 1), LimitError)],
    ids=["inside", "behind the tile", "no step", "too long"],
)
def test_the_last_of_few_or_many_cold_changes_is_checked(
    count: int, last: tuple[int, int], error: type[Exception] | None
) -> None:
    data = payload(0, 0, count, *(0, 2) * (count - 1), *last)
    if error is None:
        assert context.parse(data, count, BF16).cold.tolist() == list(range(count))
    else:
        with pytest.raises(error):
            context.parse(data, count, BF16)


def payload(*numbers: int, table: int = 0) -> memoryview:
    return memoryview(bytes([table]) + b"".join(map(wire.number, numbers)))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (payload(257, 0, 0), LimitError),
        (payload(0, 101 << 3, 2, 0), LimitError),
        (payload(0, 1 << 3 | 6, 2, 0), FormatError),
        (payload(0, 3, 0), FormatError),
        (payload(0, 1 << 3, 64 + 300 + 1, 0), LimitError),
        (payload(0, 0, 101), LimitError),
        (payload(0, 0, 1, 100, 2), FormatError),
        (payload(0, 0, 2, 50, 2, 49, 2), FormatError),
        (payload(0, 0, 1, 0, 0), LimitError),
        (payload(0, 0, 1, 0, 2 * (1 << 15) + 2), LimitError),
        (payload(0, 0, 1, 0, 2 * (1 << 15) + 1), LimitError),
        (payload(0, 0, 1, 0, (1 << 47) + 1), LimitError),
        (payload(0, 0, 0, 0), FormatError),
        (payload(0, 1 << 3, 2, 0), FormatError),
    ],
    ids=[
        "a cut above all classes",
        "more changes than weights",
        "more lanes than 32",
        "lanes of no changes",
        "more words than weights can need",
        "more cold changes than weights",
        "a cold change behind the tile",
        "cold changes that end behind the tile",
        "a cold step of 0",
        "a cold step up too long",
        "a cold step down too long",
        "a cold step beyond any",
        "bytes too many",
        "a stream that is not there",
    ],
)
def test_what_is_no_payload_is_refused(data: memoryview, error: type) -> None:
    with pytest.raises(error):
        context.parse(data, 100, BF16)


def test_steps_of_half_the_circle_are_taken_both_ways() -> None:
    found = context.parse(payload(0, 0, 2, 0, 2 << 15, 0, (2 << 15) - 1), 100, BF16)
    assert found.steps.tolist() == [1 << 15, -(1 << 15)]


def coded(old: Bits, new: Bits, cut: int) -> tuple[Payload, FrequencyTable]:
    """One block coded by hand: what patch.encode does over many."""
    shift = BF16.exponent_shift or 0
    positions, before, after = cpu.changed(old, new)
    at, bits, symbols, extras, cold, moved, entering_at, entering = cpu.split(
        positions, after, *cpu.steps(before, after, shift)[:3], shift, cut
    )
    changes = context.HotChanges(at, bits, symbols, extras, entering_at, entering)
    top = max(1, cut)
    contexts = tables.Contexts(max(0, top - 24), min(24, top), 1, 41)
    counts = contexts.empty()
    decisions, _ = context.count(old, BF16, cut, BlockMemory(), changes, contexts, counts)
    by_context = counts.reshape(contexts.classes, 1, -1)[..., :41]
    table = FrequencyTable("BF16", contexts.lo, tables.normalise(by_context))
    stream = context.encode_block(decisions, extras, table)
    return Payload(0, cut, (stream,), cold, moved), table


@given(seeds, st.sampled_from([0, 1, 100, 120, 255, 256]), st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_a_block_comes_back(seed: int, cut: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = near(rng, "BF16", (700,), cut)
    new = nudge(rng, old, density)
    found, table = coded(old, new, cut)
    change = context.decode_block(found, 0, old, BF16, table, BlockMemory())
    out = old.copy()
    if change is not None:
        out[change.positions] = change.new
        assert np.array_equal(change.old, old[change.positions])
        assert (np.diff(change.positions.astype(np.int64)) > 0).all()
    assert np.array_equal(out, new)


OLD = near(np.random.default_rng(0), "BF16", (500,), 120)


def test_a_cold_change_on_a_hot_weight_is_refused() -> None:
    found, table = coded(OLD, nudge(np.random.default_rng(1), OLD, 0.3), 120)
    hot = int(np.flatnonzero(classes(OLD, 7) < 120)[0])
    spoilt = replace(found, cold=np.array([hot]), steps=np.array([1]))
    with pytest.raises(FormatError, match="hot weight among the cold"):
        context.decode_block(spoilt, 0, OLD, BF16, table, BlockMemory())


@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_changes_is_refused(more: int) -> None:
    found, table = coded(OLD, nudge(np.random.default_rng(1), OLD, 0.3), 120)
    block = replace(found.blocks[0], changes=found.blocks[0].changes + more)
    with pytest.raises(FormatError, match="another number of changes"):
        context.decode_block(replace(found, blocks=(block,)), 0, OLD, BF16, table, BlockMemory())


def test_a_history_of_other_weights_is_a_verification_error() -> None:
    found, table = coded(OLD, nudge(np.random.default_rng(1), OLD, 0.3), 120)
    with pytest.raises(VerificationError):
        context.decode_block(found, 0, OLD, BF16, table, BlockMemory(120, np.zeros(3, np.uint8), 1))


def test_the_magnitude_class_is_the_exponent() -> None:
    bits = np.array([0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFFFF, 0x007F], np.uint16)
    assert context.magnitudes(bits, 7).tolist() == [0, 0, 127, 127, 255, 255, 0]
