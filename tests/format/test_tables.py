import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import Bits
from pulsesync.format import tables
from pulsesync.testing import mutate, random_bits
from tests.helpers import densities, orders, seeds, step


def random_counts(seed: int) -> np.ndarray:
    """Counts of 41 symbols in up to four contexts: none, few, and many, in every mixture; some contexts are empty."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 4, endpoint=True)), 41
    kinds = (rng.random(shape) > rng.random((shape[0], 1))) * rng.integers(1, 2, shape, endpoint=True)
    kinds *= rng.integers(0, 5, (shape[0], 1)) > 0
    out = np.choose(kinds, [np.zeros(shape, np.int64), rng.integers(0, 31, shape), rng.integers(0, 1 << 40, shape)])
    if rng.random() < 0.3:
        out[0] = np.arange(41) == rng.integers(0, 41)  # one change in all
    return out


counts_of_contexts = seeds.map(random_counts)


@given(counts_of_contexts)
def test_frequencies_of_a_context_add_up_or_there_are_none(counts: np.ndarray) -> None:
    sums = tables.normalise(counts).sum(axis=-1)
    assert np.array_equal(sums, np.where(counts.sum(axis=-1) > 0, tables.TOTAL, 0))


@given(counts_of_contexts)
def test_a_symbol_has_a_frequency_exactly_if_it_occurred(counts: np.ndarray) -> None:
    assert np.array_equal(tables.normalise(counts) > 0, counts > 0)


@given(counts_of_contexts)
def test_frequencies_are_rounded_down_and_the_commonest_takes_the_rest(counts: np.ndarray) -> None:
    for row, got in zip(counts.tolist(), tables.normalise(counts).tolist(), strict=True):
        if not sum(row):
            continue
        wanted = [max(n * tables.TOTAL // sum(row), int(n > 0)) for n in row]
        wanted[row.index(max(row))] += tables.TOTAL - sum(wanted)
        assert got == wanted


def test_of_equally_common_symbols_the_first_takes_the_rest() -> None:
    assert tables.normalise(np.array([[0, 5, 5, 5]])).tolist() == [[0, 5462, 5461, 5461]]


def test_very_rare_symbols_keep_a_frequency_at_the_cost_of_the_commonest() -> None:
    frequencies = tables.normalise(np.array([[10**12, *[1] * 72]]))[0]
    assert frequencies.tolist() == [tables.TOTAL - 72, *[1] * 72]


by_class = st.binary(min_size=256, max_size=256).map(list)
sparse = st.dictionaries(st.integers(0, 255), st.integers(0, 5000), max_size=6).map(
    lambda some: [some.get(c, 0) for c in range(256)]
)


@given(st.one_of(by_class, sparse), st.one_of(by_class, sparse))
def test_choose_cut_finds_the_lowest_of_the_cheapest_cuts(changes: list[int], sampled: list[int]) -> None:
    costs = [64 * sum(sampled[:cut]) + 1024 * sum(changes[cut:]) for cut in range(257)]
    assert tables.choose_cuts(np.array([changes]), np.array([sampled])).tolist() == [costs.index(min(costs))]


@given(st.lists(st.tuples(st.one_of(by_class, sparse), st.one_of(by_class, sparse)), max_size=4))
def test_the_cuts_of_many_tiles_are_those_of_each(tiles: list[tuple[list[int], list[int]]]) -> None:
    changes, sampled = np.array(tiles, np.int64).reshape(-1, 2, 256).transpose(1, 0, 2)
    each = [tables.choose_cuts(a[None], b[None]).tolist() for a, b in zip(changes, sampled, strict=True)]
    assert [[cut] for cut in tables.choose_cuts(changes, sampled).tolist()] == each


def test_no_changes_mean_no_hot_weights() -> None:
    assert tables.choose_cuts(np.zeros((1, 256), np.int64), np.ones((1, 256), np.int64)).tolist() == [0]


@pytest.mark.parametrize(
    ("decisions", "lanes"),
    [(0, 1), (1, 1), (8191, 1), (8192, 2), (16383, 2), (16384, 4), (131071, 16), (131072, 32), (1 << 20, 32)],
)
def test_lanes_keep_at_least_4096_decisions_each(decisions: int, lanes: int) -> None:
    assert tables.lanes_for(decisions) == lanes


@given(st.integers(0, 1 << 20))
def test_lanes_are_the_largest_power_of_two_allowed(decisions: int) -> None:
    assert tables.lanes_for(decisions) == max([n for n in (1, 2, 4, 8, 16, 32) if n * 4096 <= decisions], default=1)


@given(st.lists(st.integers(0, 1 << 20)))
def test_lanes_of_many_blocks_are_those_of_each(decisions: list[int]) -> None:
    found = tables.lanes_for(np.array(decisions, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == [tables.lanes_for(one) for one in decisions]


@given(seeds)
def test_multiplying_by_a_reciprocal_gives_the_quotient_or_one_less(seed: int) -> None:
    rng, u = np.random.default_rng(seed), np.uint64
    f = np.arange(1, tables.TOTAL + 1, dtype=u)
    r = tables.reciprocals(f.astype(np.int64)[:, None]).reshape(-1, 2)[:, 0].astype(u)
    limit = f << u(18)  # an encoder has made room before it divides
    near_multiple = rng.integers(1, 1 << 18, f.size, dtype=u) * f
    for x in (limit - u(1), limit - f, near_multiple, near_multiple - u(1), rng.integers(0, limit, dtype=u), f - u(1)):
        short = x // f - (x * r >> u(32))
        assert np.isin(short, (0, 1)).all()


@given(counts_of_contexts)
def test_cumulative_frequencies_begin_at_0_and_end_at_the_total(counts: np.ndarray) -> None:
    frequencies = tables.normalise(counts)
    flat = tables.cumulative(frequencies).reshape(len(counts), 64)
    assert (flat[:, 0] == 0).all()
    assert np.array_equal(np.diff(flat[:, :42].astype(np.int64)), frequencies)
    assert np.array_equal(flat[:, 41], frequencies.sum(axis=1))


@pytest.mark.parametrize(("width", "symbols"), [(8, 25), (16, 41), (32, 73)])
def test_there_are_as_many_symbols_as_the_format_says(width: int, symbols: int) -> None:
    assert tables.symbol_count(width) == symbols


def test_low_classes_share_the_first_row_and_high_ones_the_last() -> None:
    contexts = tables.Contexts(lo=100, classes=24, ages=3, symbols=41)
    rows = contexts.rows // 64
    assert rows[[0, 99, 100, 101, 123, 124, 255]].tolist() == [0, 0, 0, 3, 69, 69, 69]
    assert contexts.empty().size == 24 * 3 * 64


@given(seeds, st.sampled_from([np.uint8, np.uint16, np.uint32]), densities)
def test_apply_steps_goes_as_far_as_it_is_told(seed: int, dtype: type, density: float) -> None:
    rng = np.random.default_rng(seed)
    old: Bits = random_bits(rng, dtype, (50,))
    new = mutate(rng, old, density)
    steps = [step(a, b, 8 * old.itemsize) for a, b in zip(orders(old), orders(new), strict=True)]
    assert np.array_equal(tables.apply_steps(old, np.array(steps, np.int64)), new)


def test_minus_zero_is_one_step_below_zero() -> None:
    zero = np.array([0x0000], np.uint16)
    assert tables.apply_steps(zero, np.array([-1])).tolist() == [0x8000]
    assert tables.apply_steps(zero, np.array([-2])).tolist() == [0x8001]


# Sizes of steps that a table lists


@pytest.mark.parametrize(("width", "most"), [(8, 3), (16, 11), (32, 27)])
def test_a_table_lists_as_many_sizes_as_its_rows_have_places_for(width: int, most: int) -> None:
    assert tables.most_sizes(width) == most
    symbols = tables.symbol_count(width)
    assert (symbols + 2 * most).bit_length() == symbols.bit_length()
    assert (symbols + 2 * most + 2).bit_length() > symbols.bit_length()


def test_a_size_that_many_long_steps_have_is_listed() -> None:
    rng = np.random.default_rng(0)
    found = np.append(rng.integers(8, 1 << 14, 5000), np.full(700, 13_830))
    assert tables.choose_sizes(rng.permutation(found), 16, 1).tolist() == [13_830]


def test_sizes_that_are_spread_as_raw_bits_are_do_not_pay() -> None:
    found = np.random.default_rng(0).integers(8, 16, 100_000)
    assert tables.choose_sizes(found, 16, 1).size == 0
    assert tables.choose_sizes(np.arange(8, 1 << 15), 16, 1).size == 0
    assert tables.choose_sizes(np.empty(0, np.int64), 16, 1).size == 0


def test_a_size_must_pay_for_all_the_contexts_of_an_epoch() -> None:
    found = np.full(400, 13_830)
    assert tables.choose_sizes(found, 16, 1).tolist() == [13_830]
    assert tables.choose_sizes(found, 16, 32).size == 0


def test_the_sizes_that_save_most_are_listed_the_lower_first_among_equals() -> None:
    found = np.repeat(np.arange(3000, 3030), np.r_[np.full(29, 1000), 2000])
    assert tables.choose_sizes(found, 16, 1).tolist() == [*range(3000, 3010), 3029]


def test_of_very_many_long_steps_some_are_looked_at() -> None:
    found = np.random.default_rng(0).integers(8, 1 << 14, (1 << 17) + 2)
    found[::2] = 13_830
    assert tables.choose_sizes(found, 16, 1).tolist() == [13_830]
    assert tables.choose_sizes(found[1:], 16, 1).size == 0


def test_half_the_circle_is_never_listed() -> None:
    assert tables.choose_sizes(np.full(5000, 1 << 15), 16, 1).size == 0


def test_sizes_with_the_same_lower_bits_are_told_apart() -> None:
    found = np.array([0x10F00, 0x20F00, 0x30F00]).repeat([3000, 5, 2000])
    assert tables.choose_sizes(found, 32, 1).tolist() == [0x10F00, 0x30F00]


@given(seeds)
def test_listed_steps_get_symbols_of_their_own_and_others_stay(seed: int) -> None:
    rng = np.random.default_rng(seed)
    symbols = rng.integers(1, tables.symbol_count(16), 300).astype(np.uint8)
    extras = np.zeros(300, np.uint32)
    long, found = tables.long_steps(symbols, extras)
    assert np.array_equal(long, np.flatnonzero(symbols > 14))
    sizes = np.unique(rng.choice([*found, 9, 77], 3)).astype(np.uint32)
    after = tables.list_sizes(symbols, extras, sizes, 16)
    for before, now, size in zip(symbols[long].tolist(), after[long].tolist(), found.tolist(), strict=True):
        place = sizes.tolist().index(size) if size in sizes else None
        assert now == (before if place is None else 41 + 2 * place + (before - 1) % 2)
    short = symbols <= 14
    assert np.array_equal(after[short], symbols[short])
