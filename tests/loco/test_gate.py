from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import threads
from pulsesync.kernels.reference import bf16
from pulsesync.loco import vectors as all_vectors
from pulsesync.loco.gate import (
    LARGEST,
    LOWEST_UNIT,
    MOST_BITS,
    DenseGate,
    GateRule,
    SparseVector,
    VisibilityGate,
    WholeUpdate,
    unit_of,
)
from pulsesync.loco.outer_step import SGD, SharedMomentum, aggregate, mean_of
from tests.helpers import many, seeds

RULES: list[GateRule] = [DenseGate(), VisibilityGate(), *(VisibilityGate(bits) for bits in range(MOST_BITS + 1))]
COMPACT = [rule for rule in RULES if isinstance(rule, VisibilityGate) and rule.bits is not None]
SMALLEST = 2.0**-149  # of FP32; of BF16 it is 2^-133

# Any FP32 below 2^127, so that theta − s is one too.
anything = st.floats(-(2.0**126), 2.0**126, width=32)
pairs = st.lists(st.tuples(anything, anything), min_size=1, max_size=30)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def from_bits(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


@dataclass(frozen=True, eq=False)
class Split:
    """What a rule sends of an update, and what is kept if a round takes that."""

    sent: SparseVector
    unit: int | None
    kept: np.ndarray


def split_of(rule: GateRule, theta: np.ndarray, s: np.ndarray) -> Split:
    part = rule.select(theta, WholeUpdate(s))
    assert part.largest == np.abs(s).max(initial=0)
    kept = s.copy()
    part.sent.take_from(kept)
    return Split(part.sent, part.unit, kept)


def gate(theta: np.ndarray, s: np.ndarray, reach: float = 1.0) -> np.ndarray:
    """Which entries fire."""
    fired = np.zeros(s.size, np.bool_)
    fired[VisibilityGate(reach=reach).select(theta, WholeUpdate(s)).sent.positions] = True
    return fired


def fires(theta: float, s: float) -> bool:
    return bool(gate(f32(theta), f32(s))[0])


def random_floats(rng: np.random.Generator, size: int, lowest: int, highest: int) -> np.ndarray:
    """Of either sign, all exponents between two alike; exponent field 0 are zero and subnormals."""
    exponents = rng.integers(lowest, highest, size, endpoint=True).astype(np.uint32)
    mantissas = rng.integers(0, 1 << 23, size).astype(np.uint32) >> rng.integers(0, 23, size).astype(np.uint32)
    signs = rng.integers(0, 2, size).astype(np.uint32)
    bits: np.ndarray = signs << np.uint32(31) | exponents << np.uint32(23) | mantissas
    return bits.view(np.float32)


def wild(seed: int, size: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Weights and updates of every size: of one, of a few octaves, with outliers, subnormal, or all together."""
    rng = np.random.default_rng(seed)
    theta, s = (random_floats(rng, size, *sorted(rng.integers(0, 253, 2, endpoint=True).tolist())) for _ in range(2))
    if rng.random() < 0.5:
        few = rng.integers(0, size, 3)
        s[few] = random_floats(rng, 3, 0, 253)
    if rng.random() < 0.3:  # updates of the size of their weights
        s = theta * (rng.standard_normal(size).astype(np.float32) * np.float32(2.0 ** -rng.integers(3, 12)))
    return theta, s


def whole(sent: SparseVector) -> np.ndarray:
    out = np.zeros(sent.size, np.float32)
    sent.add_to(out)
    return out


def check_nothing_lost(split: Split, s: np.ndarray) -> None:
    """Sent and kept are s, bit for bit, but for the sign of zero; and what was not sent is as it was."""
    silent = np.ones(s.size, np.bool_)
    silent[split.sent.positions] = False
    assert np.array_equal(split.kept[silent].view(np.uint32), s[silent].view(np.uint32))
    both = split.sent.values + split.kept[split.sent.positions]
    expected = s[split.sent.positions] + np.float32(0)
    assert np.array_equal(both.view(np.uint32), expected.view(np.uint32))


def check_split(rule: VisibilityGate | DenseGate, theta: np.ndarray, s: np.ndarray) -> None:
    before = theta.copy(), s.copy()
    split = split_of(rule, theta, s)
    check_nothing_lost(split, s)
    assert np.array_equal(theta.view(np.uint32), before[0].view(np.uint32))
    assert np.array_equal(s.view(np.uint32), before[1].view(np.uint32))
    assert split.kept.dtype == split.sent.values.dtype == np.float32
    assert np.isfinite(split.kept).all()
    if isinstance(rule, VisibilityGate):
        assert gate(theta, s)[split.sent.positions].all()
        assert (np.diff(split.sent.positions) > 0).all()
    if isinstance(rule, VisibilityGate) and rule.bits is not None:
        assert split.unit is not None
        assert LOWEST_UNIT <= split.unit <= 127
        sizes = np.ldexp(split.sent.values.astype(np.float64), -split.unit)
        assert np.array_equal(sizes, np.rint(sizes))
        assert ((np.abs(sizes) >= 1) & (np.abs(sizes) <= LARGEST)).all()
    else:
        assert split.unit is None
        assert not split.kept[split.sent.positions].any()


# bf16


def test_bf16_is_torchs_cast_and_ml_dtypes_for_all_kinds_of_finite_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    lower = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = np.concatenate(
        [*(upper | np.uint32(n) for n in lower), np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32)]
    )
    bits = bits[np.isfinite(bits.view(np.float32))]
    found = bf16(bits.view(np.float32))
    by_torch = torch.from_numpy(bits.view(np.float32)).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(found, by_torch)
    with np.errstate(over="ignore"):
        assert np.array_equal(found, bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16))


@many
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_torchs_cast(x: float) -> None:
    assert int(bf16(f32(x))[0]) == int(torch.tensor(x).to(torch.bfloat16).view(torch.int16)) & 0xFFFF


# The gate


@pytest.mark.parametrize(
    ("theta", "s", "fired"),
    [
        (2.0, 0.003, False),
        (2.0, 0.005, True),
        (0.15234375, 1e-7, False),
        (0.15234375, -1e-7, False),
        (1.0, 0.01, True),
        (1.0, -0.01, True),
        (-2.0, -0.003, False),
        (-2.0, -0.005, True),
    ],
)
def test_an_update_fires_if_the_forward_pass_would_see_it(theta: float, s: float, fired: bool) -> None:
    assert fires(theta, s) is fired


@many
@given(anything)
def test_an_update_of_zero_does_not_fire(theta: float) -> None:
    assert not fires(theta, 0.0)


def test_no_update_sends_nothing_and_keeps_nothing() -> None:
    theta = random_floats(np.random.default_rng(0), 1000, 1, 250)
    for rule in RULES[1:]:
        split = split_of(rule, theta, np.zeros_like(theta))
        assert split.sent.positions.size == split.sent.values.size == 0
        assert not split.kept.any()


def test_where_everything_fires_nothing_is_kept() -> None:
    rng = np.random.default_rng(0)
    theta = random_floats(rng, 1000, 100, 140)
    s = theta * np.float32(0.125)
    split = split_of(VisibilityGate(), theta, s)
    assert np.array_equal(split.sent.positions, np.arange(1000))
    assert np.array_equal(split.sent.values, s)
    assert not split.kept.view(np.uint32).any()


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_border_belongs_to_a_value_whose_last_bit_is_zero(sign: float) -> None:
    even = 1.0 + 2.0**-6
    for half in (2.0**-8, -(2.0**-8)):
        assert not fires(sign * even, sign * half)
        assert fires(sign * even, sign * half * (1 + 2.0**-10))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_border_does_not_belong_to_a_value_whose_last_bit_is_one(sign: float) -> None:
    odd = 1.0 + 2.0**-7
    for half in (2.0**-8, -(2.0**-8)):
        assert fires(sign * odd, sign * half)
        assert not fires(sign * odd, sign * half * (1 - 2.0**-10))


@pytest.mark.parametrize("power", [-125, -60, -3, 0, 1, 60, 126])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_below_a_power_of_two_a_value_is_half_as_wide(power: int, sign: float) -> None:
    theta, border = sign * 2.0**power, sign * 2.0 ** (power - 8)
    assert not fires(theta, -border)
    assert fires(theta, -border * (1 + 2.0**-12))
    assert not fires(theta, border / 2)
    assert fires(theta, border / 2 * (1 + 2.0**-12))


def test_a_weight_off_the_middle_fires_sooner_towards_the_near_border() -> None:
    theta = 1.0 + 2.0**-8 - 2.0**-12
    assert fires(theta, -(2.0**-11))
    assert not fires(theta, 2.0**-11)


def test_zero_fires_if_its_sign_changes_and_not_before_half_the_smallest_value_otherwise() -> None:
    assert fires(0.0, SMALLEST)
    assert not fires(0.0, -SMALLEST)
    assert fires(-0.0, -SMALLEST)
    assert not fires(-0.0, SMALLEST)
    assert not fires(0.0, -(2.0**-134))
    assert fires(0.0, -(2.0**-134) - SMALLEST)


def test_zero_of_either_sign_does_not_fire_by_zero_from_zero() -> None:
    assert not fires(0.0, 0.0)
    assert not fires(0.0, -0.0)
    assert not fires(-0.0, 0.0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_subnormal_weights_have_borders_too(sign: float) -> None:
    theta, half = sign * 3 * 2.0**-133, sign * 2.0**-134
    assert fires(theta, half)  # an odd one
    assert not fires(theta, half - sign * SMALLEST)
    assert not fires(theta + sign * 2.0**-133, half)  # an even one
    assert fires(theta + sign * 2.0**-133, half + sign * SMALLEST)


def test_the_largest_number_fires_beyond_its_border() -> None:
    largest, half = from_bits(0x7F7F0000), from_bits(0x7F7F8000) - from_bits(0x7F7F0000)
    assert gate(largest, -half)[0]  # its last bit is one: the border is not its own
    assert not gate(largest, -half * np.float32(1 - 2.0**-10))[0]
    assert gate(largest, half)[0]
    assert not gate(largest, half * np.float32(1 - 2.0**-10))[0]
    assert gate(-largest, half)[0]


@given(seeds)
def test_the_gate_is_the_comparison_of_torchs_casts(seed: int) -> None:
    theta, s = wild(seed)
    a, b = (torch.from_numpy(x).to(torch.bfloat16).view(torch.int16) for x in (theta, theta - s))
    assert np.array_equal(gate(theta, s), (a != b).numpy() & (s != 0))


def test_an_update_with_a_shared_momentum_is_the_residual_and_the_way_moved_each_rounded_by_itself() -> None:
    theta, local, residual = f32(1.0, -0.0), f32(1.0 - 2.0**-24, 0.0), f32(1.0, -0.0)
    s, momentum = SharedMomentum(SGD(1.0)).advance(theta, residual, None, local)
    assert s.view(np.uint32).tolist() == f32(1.0, -0.0).view(np.uint32).tolist()
    assert momentum is None


# What is sent and what is kept


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(seed=seeds)
def test_sent_and_kept_are_the_update_bit_for_bit(rule: VisibilityGate | DenseGate, seed: int) -> None:
    check_split(rule, *wild(seed))


@pytest.mark.parametrize(
    "rule", [DenseGate(), VisibilityGate(), VisibilityGate(0), VisibilityGate(3), VisibilityGate(12)], ids=str
)
@given(some=pairs)
def test_sent_and_kept_are_the_update_for_any_numbers(
    rule: VisibilityGate | DenseGate, some: list[tuple[float, float]]
) -> None:
    check_split(rule, f32(*(a for a, _ in some)), f32(*(b for _, b in some)))


@pytest.mark.parametrize("rule", COMPACT, ids=str)
def test_an_outlier_of_any_size_among_updates_of_any_size_loses_nothing(rule: VisibilityGate) -> None:
    rng = np.random.default_rng(0)
    for common in (0, 1, 24, 127, 200, 252):
        for outlier in (0, 1, 24, 127, 200, 252):
            s = random_floats(rng, 200, common, common)
            s[77] = random_floats(rng, 1, outlier, outlier)[0]
            check_split(rule, np.zeros_like(s), s)
            check_split(rule, np.full_like(s, -0.0), s)


@pytest.mark.parametrize("rule", COMPACT, ids=str)
def test_every_mantissa_at_every_distance_from_the_unit_loses_nothing(rule: VisibilityGate) -> None:
    rng = np.random.default_rng(1)
    lower = np.arange(0, 60)
    s = np.concatenate([np.ldexp(np.float32(1 + rng.integers(0, 1 << 23) / (1 << 23)), -lower) for _ in range(20)])
    s = np.concatenate([s, -s, np.ldexp(np.float32(1), -lower), np.ldexp(np.float32(1.5), -lower)]).astype(np.float32)
    check_split(rule, np.zeros_like(s), s)
    tiny = (s * np.float32(2.0**-110)).astype(np.float32)
    check_split(rule, np.zeros_like(s), tiny)


def test_nothing_but_outliers_beyond_the_largest_size_leave_a_large_remainder() -> None:
    s = np.full(1000, 1.0, np.float32)
    s[0] = 2.0**20
    split = split_of(VisibilityGate(12), np.zeros_like(s), s)
    assert split.unit is not None
    assert split.sent.positions.tolist()[0] == 0
    assert split.sent.values[0] == LARGEST * 2.0**split.unit
    assert split.kept[0] == 2.0**20 - LARGEST * 2.0**split.unit


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 8, 12])
def test_a_typical_value_keeps_so_many_bits(bits: int) -> None:
    s = np.full(500, 1.375 * 2.0**-20, np.float32)
    split = split_of(VisibilityGate(bits), np.zeros_like(s), s)
    assert split.unit == -20 - bits
    assert (np.abs(split.kept) <= 2.0 ** (split.unit - 1)).all()


def test_compact_values_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    unit = 2.0**-2
    s = f32(*(unit * n for n in (0.5, 1.5, 2.5, 3.5, 2.4375, -0.5, -1.5, -2.5)), *[1.25] * 40)
    split = split_of(VisibilityGate(2), np.zeros_like(s), s)
    assert split.unit == -2
    assert (whole(split.sent) / unit)[:9].tolist() == [0, 2, 2, 4, 2, 0, -2, -2, 5]


def test_an_entry_that_rounds_to_zero_is_kept_and_not_sent() -> None:
    s = f32(1.0, 2.0**-10, -(2.0**-10))
    split = split_of(VisibilityGate(3), np.zeros_like(s), s)
    assert split.sent.positions.tolist() == [0]
    assert split.kept.tolist() == [0.0, 2.0**-10, -(2.0**-10)]


def test_subnormal_updates_are_compacted_to_units_that_fp32_has() -> None:
    s = np.ldexp(np.arange(1, 200, dtype=np.float32), -149).astype(np.float32)
    split = split_of(VisibilityGate(12), np.zeros_like(s), s)
    assert split.unit == LOWEST_UNIT
    assert np.array_equal(split.sent.values, s)


def test_what_would_not_fire_is_never_sent_however_many_bits() -> None:
    theta, s = np.full(100, 2.0, np.float32), np.full(100, 0.003, np.float32)
    for rule in RULES[1:]:
        split = split_of(rule, theta, s)
        assert not split.sent.positions.size
        assert np.array_equal(split.kept, s)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_entries_are_split_into_none(rule: VisibilityGate | DenseGate) -> None:
    split = split_of(rule, f32(), f32())
    assert split.sent.size == len(split.sent.positions) == split.kept.size == 0


@pytest.mark.parametrize("bits", [-1, MOST_BITS + 1])
def test_bits_that_compact_values_cannot_keep_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="0 to 12"):
        VisibilityGate(bits)


@pytest.mark.parametrize("rule", [VisibilityGate(), VisibilityGate(3)], ids=str)
def test_a_split_is_the_same_whatever_chunks_and_threads(rule: VisibilityGate, monkeypatch: pytest.MonkeyPatch) -> None:
    theta, s = wild(7, 1000)
    expected = split_of(rule, theta, s)
    for chunk, count in ((1, 3), (7, 1), (64, 2), (999, 8), (1000, 1), (1001, 2)):
        monkeypatch.setattr(all_vectors, "CHUNK", chunk)
        monkeypatch.setattr(threads, "default_threads", lambda n=count: n)
        found = split_of(rule, theta, s)
        assert np.array_equal(found.sent.positions, expected.sent.positions)
        assert np.array_equal(found.sent.values, expected.sent.values)
        assert np.array_equal(found.kept.view(np.uint32), expected.kept.view(np.uint32))


@given(seeds)
def test_parts_of_a_sparse_vector_together_are_the_vector(seed: int) -> None:
    theta, s = wild(seed, 200)
    sent = split_of(VisibilityGate(), theta, s).sent
    cuts = [0, *sorted(np.random.default_rng(seed).integers(0, 200, 3, endpoint=True).tolist()), 200]
    parts = [sent.part(a, b) for a, b in pairwise(cuts)]
    assert [part.size for part in parts] == np.diff(cuts).tolist()
    assert np.array_equal(np.concatenate([whole(part) for part in parts]), whole(sent))


# Many rounds, with the same updates for gated and dense training


def open_loop(
    rule: VisibilityGate, rounds: int, trainers: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gated and dense weights after rounds of SGD(1.0), the residuals, and the largest residual seen in BF16 ulps."""
    rng, outer, size = np.random.default_rng(3), SGD(1.0), 4000
    start = (rng.standard_normal(size) * 0.05).astype(np.float32)
    start = (bf16(start).astype(np.uint32) << np.uint32(16)).view(np.float32)
    gated, dense, none = start.copy(), start.copy(), np.zeros(size, np.float32)
    residuals = np.zeros((trainers, size), np.float32)
    worst = np.zeros(size)
    for _ in range(rounds):
        drift = rng.standard_normal(size) * 5e-6
        deltas = (drift + rng.standard_normal((trainers, size)) * 5e-6).astype(np.float32)
        sent = []
        for r in range(trainers):
            split = split_of(rule, gated, residuals[r] + deltas[r])
            residuals[r] = split.kept
            sent.append(split.sent)
        gated = outer.step(gated, none, mean_of(aggregate(sent, size), trainers))[0]
        everything = [SparseVector(size, np.arange(size), d) for d in deltas]
        dense = outer.step(dense, none, mean_of(aggregate(everything, size), trainers))[0]
        exponents = np.frexp(np.abs(gated).astype(np.float64))[1]
        worst = np.maximum(worst, np.abs(residuals).max(0) / np.ldexp(1.0, exponents - 8))
    return gated, dense, residuals, worst


@pytest.mark.parametrize("rule", [VisibilityGate(), VisibilityGate(3), VisibilityGate(0)], ids=str)
@pytest.mark.parametrize("trainers", [1, 4])
def test_gated_weights_less_the_mean_residual_are_the_dense_weights(rule: VisibilityGate, trainers: int) -> None:
    gated, dense, residuals, _ = open_loop(rule, 60, trainers)
    error = np.abs(gated.astype(np.float64) - residuals.astype(np.float64).mean(0) - dense)
    lag = np.abs(gated.astype(np.float64) - dense)
    assert (error <= 16 * np.spacing(np.maximum(np.abs(dense), np.float32(2.0**-12)))).all()
    assert error.max() < lag.max() / 100


@pytest.mark.parametrize("trainers", [1, 4])
def test_what_is_kept_never_grows_beyond_two_places_of_bf16(trainers: int) -> None:
    worst = open_loop(VisibilityGate(), 100, trainers)[3]
    assert worst.max() > 0.9
    assert worst.max() <= 2.0


def test_small_steps_in_one_direction_fire_once_they_add_up() -> None:
    theta, residual = f32(1.0), f32(0.0)
    fired = []
    for i in range(20):
        split = split_of(VisibilityGate(), theta, residual + np.float32(-(2.0**-10)))
        residual = split.kept
        if split.sent.positions.size:
            fired.append((i, float(split.sent.values[0])))
            break
    assert fired == [(4, -5 * 2.0**-10)]


# The unit


@many
@given(seeds, st.integers(1, 300), st.integers(-40, 38), st.integers(0, 12))
def test_the_unit_is_that_many_bits_below_the_root_mean_square_of_values_cut_to_bf16(
    seed: int, size: int, octave: int, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    signs = rng.choice([-1, 1], size)
    exact = signs * rng.lognormal(0, 3, size) * 10.0**octave
    values = exact[np.abs(exact) < 3e38].astype(np.float32)
    cut = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    squares = sum(Fraction(float(x)) ** 2 for x in cut)
    unit = unit_of(values, bits)
    assert unit_of(rng.permutation(values), bits) == unit
    if not values.size:
        assert unit == 0
        return
    largest = int(np.frexp(np.abs(values).max())[1]) - 1
    lowest = max(largest - 22, LOWEST_UNIT)
    assert unit >= lowest
    if unit > lowest:
        below, above = (Fraction(4) ** (unit + bits + i) * values.size for i in (0, 1))
        assert below <= squares < above
    elif squares:
        assert squares < Fraction(4) ** (lowest + bits + 1) * values.size


def test_a_unit_near_a_power_of_two_is_that_of_the_cut_values() -> None:
    """0x3F7FFFFF, the number before 1, is cut to 0.996, and so the unit is the one below."""
    assert unit_of(np.full(5, 1, np.float32), 0) == 0
    assert unit_of(np.full(5, np.nextafter(np.float32(1), np.float32(0))), 0) == -1
    assert unit_of(f32(2e-45), 0) == LOWEST_UNIT
    assert unit_of(f32(), 3) == 0
