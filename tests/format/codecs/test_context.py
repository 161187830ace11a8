import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, DTYPES, Bits, Remembered, TensorSpec, Tile
from pulsesync.errors import FormatError, LimitError, VerificationError
from pulsesync.format import tables, wire
from pulsesync.format.codecs import context
from pulsesync.format.codecs.context import BlockMemory, Heads, Payload
from pulsesync.format.index import FrequencyTable
from pulsesync.kernels import cpu
from pulsesync.kernels.records import CodedSpan, HotChanges
from tests.helpers import classes, near, nudge, seeds

BF16 = DTYPES["BF16"]
NO_COLD = np.empty(0, np.int64)


def tile_of(size: int) -> Tile:
    return Tile(0, TensorSpec("w", "BF16", (size,)), 0, 0, size, 1)


def random_payload(rng: np.random.Generator, size: int) -> Payload:
    columns, words = [], [np.empty(0, np.uint16)]
    for begin in range(0, size, BLOCK):
        weights, lanes = min(BLOCK, size - begin), 1 << int(rng.integers(0, 6))
        some = rng.integers(0, 1 << 16, int(rng.integers(0, min(64 + 3 * weights, 200))), dtype=np.uint16)
        coded = rng.random() < 0.7
        columns.append((int(rng.integers(1, weights, endpoint=True)), lanes, some.size) if coded else (0, 1, 0))
        words.append(some if coded else some[:0])
    cold = np.sort(rng.choice(size, int(rng.integers(0, min(size, 90), endpoint=True)), replace=False))
    steps = rng.integers(1, 1 << 15, cold.size, endpoint=True) * rng.choice([-1, 1], cold.size)
    changes, lanes, sizes = np.array(columns, np.int64).T
    heads = Heads(int(rng.integers(0, 256)), int(rng.integers(0, 257)), changes, lanes, sizes, cold, steps)
    return Payload(heads, np.concatenate(words))


def assert_same(a: Payload, b: Payload) -> None:
    assert a.heads[:2] == b.heads[:2]
    columns = ("changes", "lanes", "words", "cold", "steps", "checks")
    assert all(np.array_equal(getattr(a.heads, one), getattr(b.heads, one)) for one in columns)
    assert np.array_equal(a.words, b.words)


@given(seeds, st.sampled_from([1, 2, 100, 5000, BLOCK, BLOCK + 1, 3 * BLOCK + 7]))
def test_a_payload_comes_back(seed: int, size: int) -> None:
    payload = random_payload(np.random.default_rng(seed), size)
    assert_same(context.parse(memoryview(context.build(payload)), tile_of(size)), payload)


@given(seeds, st.data())
def test_a_payload_cut_short_is_refused(seed: int, draw: st.DataObject) -> None:
    data = context.build(random_payload(np.random.default_rng(seed), 300))
    with pytest.raises(FormatError):
        context.parse(memoryview(data)[: draw.draw(st.integers(0, len(data) - 1))], tile_of(300))


@given(seeds, st.sampled_from([1, 300, BLOCK, 3 * BLOCK + 7]), st.sampled_from([0, 1, 64, 65, 200]))
def test_heads_come_back_and_the_streams_follow(seed: int, size: int, cold: int) -> None:
    rng = np.random.default_rng(seed)
    at = np.sort(rng.choice(size, min(size, cold), replace=False))
    steps = rng.choice([-(1 << 15), -1, 1, 77, 1 << 15], at.size)
    whole = random_payload(rng, size)
    whole = whole._replace(heads=whole.heads._replace(cold=at, steps=steps))
    data = memoryview(context.build(whole))
    heads, begin = context.parse_heads(data, tile_of(size))
    assert context.build_heads(heads) == data[:begin]
    assert data[begin:] == whole.words.tobytes()
    assert heads.words.tolist() == whole.heads.words.tolist()
    assert (heads.cold.tolist(), heads.steps.tolist()) == (at.tolist(), steps.tolist())


@pytest.mark.parametrize("count", [1, 64], ids=["one", "a few"])
@pytest.mark.parametrize(
    ("last", "error"),
    [((0, 2), None), ((1, 2), FormatError), ((0, 0), LimitError), ((0, (2 << 15) + 1), LimitError)],
    ids=["inside", "behind the tile", "no step", "too long"],
)
def test_the_last_of_a_few_cold_changes_is_checked(
    count: int, last: tuple[int, int], error: type[Exception] | None
) -> None:
    data = payload(0, 0, count, *(0, 2) * (count - 1), *last)
    if error is None:
        assert context.parse(data, tile_of(count)).heads.cold.tolist() == list(range(count))
    else:
        with pytest.raises(error):
            context.parse(data, tile_of(count))


def many_cold(gaps: Bits, steps: Bits, widths: tuple[int, int] = (1, 2)) -> memoryview:
    """A payload of gaps and steps in planes, as they are written."""
    planes = bytes([widths[0]]) + wire.planes(gaps, widths[0]) + bytes([widths[1]]) + wire.planes(steps, widths[1])
    return memoryview(payload(0, 0, gaps.size).tobytes() + planes)


def test_many_cold_changes_are_gaps_and_steps_in_planes() -> None:
    steps = np.array([0, 1, 2, 0xFFFE, 0xFFFF], np.uint16).repeat(13)
    found = context.parse(many_cold(np.zeros(65, np.uint8), steps), tile_of(65)).heads
    assert found.cold.tolist() == list(range(65))
    assert found.steps[::13].tolist() == [-1, 1, -2, -(1 << 15), 1 << 15]


@pytest.mark.parametrize(
    ("last", "widths"),
    [(1, (1, 2)), (0, (0, 2)), (0, (7, 2)), (0, (1, 0)), (0, (1, 3))],
    ids=["behind the tile", "gaps of no bytes", "gaps of seven bytes", "steps of no bytes", "steps beyond the dtype"],
)
def test_many_cold_changes_that_no_writer_makes_are_refused(last: int, widths: tuple[int, int]) -> None:
    gaps = np.zeros(65, np.uint64)
    gaps[-1] = last
    with pytest.raises(FormatError):
        context.parse(many_cold(gaps, np.zeros(65, np.uint64), widths), tile_of(65))


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
        context.parse(data, tile_of(100))


def test_steps_of_half_the_circle_are_taken_both_ways() -> None:
    found = context.parse(payload(0, 0, 2, 0, 2 << 15, 0, (2 << 15) - 1), tile_of(100)).heads
    assert found.steps.tolist() == [1 << 15, -(1 << 15)]


def coded(old: Bits, new: Bits, cut: int) -> tuple[Payload, FrequencyTable]:
    """One block coded by hand: what patch.encode does over many."""
    shift = BF16.exponent_shift or 0
    positions, before, after = cpu.changed(old, new)
    at, bits, symbols, extras, cold, moved, entering_at, entering = cpu.split(
        positions, after, *cpu.steps(before, after, shift)[:3], shift, cut
    )
    changes = HotChanges(at, bits, symbols, extras, entering_at, entering)
    top = max(1, cut)
    contexts = tables.Contexts(max(0, top - 24), min(24, top), 1, 41)
    counts = contexts.empty()
    span = CodedSpan(old, tile_of(old.size).borders, shift, cut, contexts.rows, contexts.bits)
    decisions, _ = context.count(span, BlockMemory(), changes, counts)
    by_context = counts.reshape(contexts.classes, 1, -1)[..., :41]
    table = FrequencyTable("BF16", contexts.lo, tables.normalise(by_context))
    streams = context.encode_block(decisions, extras, table)
    return Payload(Heads(0, cut, *streams[:3], cold, moved), streams.words), table


@given(seeds, st.sampled_from([0, 1, 100, 120, 255, 256]), st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_a_block_comes_back(seed: int, cut: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    old = near(rng, "BF16", (700,), cut)
    new = nudge(rng, old, density)
    found, table = coded(old, new, cut)
    change = context.decode_block(found, tile_of(old.size), 0, old, table, BlockMemory())
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
    spoilt = found._replace(heads=found.heads._replace(cold=np.array([hot]), steps=np.array([1])))
    with pytest.raises(FormatError, match="hot weight among the cold"):
        context.decode_block(spoilt, tile_of(500), 0, OLD, table, BlockMemory())


@pytest.mark.parametrize("more", [-1, 1])
def test_another_number_of_changes_is_refused(more: int) -> None:
    found, table = coded(OLD, nudge(np.random.default_rng(1), OLD, 0.3), 120)
    spoilt = found._replace(heads=found.heads._replace(changes=found.heads.changes + more))
    with pytest.raises(FormatError, match="does not have the number of changes"):
        context.decode_block(spoilt, tile_of(500), 0, OLD, table, BlockMemory())


def test_a_history_of_other_weights_is_a_verification_error() -> None:
    memory = BlockMemory(120, Remembered.alone(np.zeros(3, np.uint8)), 1)
    found, table = coded(OLD, nudge(np.random.default_rng(1), OLD, 0.3), 120)
    with pytest.raises(VerificationError):
        context.decode_block(found, tile_of(500), 0, OLD, table, memory)


def test_the_magnitude_class_is_the_exponent() -> None:
    bits = np.array([0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFFFF, 0x007F], np.uint16)
    assert context.magnitudes(bits, 7).tolist() == [0, 0, 127, 127, 255, 255, 0]
