"""The compiled kernels of a LoCo round do exactly what the reference does, and the reference what the page says."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pulsesync.kernels import cpu, reference
from tests.helpers import many, seeds
from tests.kernels.fp32_cases import F32, NOT_FINITE, updates, weights

KERNELS = (reference, cpu)
FULL = 1 << 18
GUARD = 5  # entries before and after an array that no kernel may write
LR, MU, REACH = np.float32(0.7), np.float32(0.9), np.float32(1.5)

sizes = st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 4095, 4096, 4097, 12289]), st.integers(0, 3000))
some = st.sampled_from([np.float32(1), np.float32(3), np.float32(4), np.float32(7)])


class Arrays:
    """Arrays for one call of a kernel, which begin at odd addresses and have guards around them."""

    def __init__(self) -> None:
        self.whole: list[tuple[NDArray[Any], NDArray[Any]]] = []

    def place(self, array: NDArray[Any]) -> NDArray[Any]:
        around = np.full(array.size + 2 * GUARD, 77, array.dtype)
        inside = around[GUARD : GUARD + array.size]
        inside[:] = array
        self.whole.append((around, array))
        return inside

    def check(self) -> None:
        for around, array in self.whole:
            assert (around[:GUARD] == 77).all()
            assert (around[GUARD + array.size :] == 77).all()


def call(kernel: Any, name: str, *arguments: Any) -> tuple[Any, list[NDArray[Any]]]:
    """What a kernel returns, and what its arrays hold after it."""
    arrays = Arrays()
    placed = [arrays.place(x) if isinstance(x, np.ndarray) else x for x in arguments]
    result = getattr(kernel, name)(*placed)
    arrays.check()
    return result, [x for x in placed if isinstance(x, np.ndarray)]


def assert_same(name: str, *arguments: Any) -> tuple[Any, list[NDArray[Any]]]:
    """Both kernels return the same and leave the same bits in all arrays; those are returned."""
    (expected, theirs), (result, ours) = (call(kernel, name, *arguments) for kernel in KERNELS)
    assert result == expected
    for a, b in zip(ours, theirs, strict=True):
        assert a.tobytes() == b.tobytes()
    return expected, theirs


# advance


def advance_case(rng: np.random.Generator, size: int) -> list[F32]:
    theta = weights(rng, size)
    residual = updates(rng, theta)
    return [theta, residual, updates(rng, theta), theta - rng.normal(0, 1e-5, size).astype(np.float32)]


@many
@given(seeds, sizes, st.booleans())
def test_advance_equals_the_reference(seed: int, size: int, nesterov: bool) -> None:
    empty = np.zeros(size, np.float32)
    assert_same("advance", *advance_case(np.random.default_rng(seed), size), LR, MU, nesterov, empty, empty)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_advance_rounds_every_operation_by_itself(kernel: Any, nesterov: bool) -> None:
    rng = np.random.default_rng(1)
    theta = rng.normal(0, 0.02, FULL).astype(np.float32)
    e, m, step = (rng.normal(0, 1e-4, FULL).astype(np.float32) for _ in range(3))
    x = theta - step
    s, moved = np.empty_like(theta), np.empty_like(theta)
    kernel.advance(theta, e, m, x, LR, MU, nesterov, s, moved)
    delta = np.subtract(np.subtract(theta, e), x)
    scaled = np.multiply(MU, m)
    expected = np.add(scaled, delta)
    by = np.add(delta, np.multiply(MU, expected)) if nesterov else expected
    assert np.array_equal(moved.view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(s.view(np.uint32), np.add(e, np.multiply(LR, by)).view(np.uint32))
    exactly = np.float64(MU) * m.astype(np.float64)  # FP64 has all bits of the product: rounded almost as by an FMA
    fused = (exactly + delta).astype(np.float32)
    assert (fused != moved).mean() > 0.01, "these numbers would not show a fused multiply-add"


# find_visible


def found(kernel: Any, theta: F32, s: F32, reach: np.float32) -> tuple[int, int, NDArray[np.uint32], F32]:
    empty = np.zeros(s.size, np.uint32), np.zeros(s.size, np.float32)
    (count, largest), (*_, positions, values) = call(kernel, "find_visible", theta, s, reach, *empty)
    return count, largest, positions[:count], values[:count]


@many
@given(seeds, sizes, st.sampled_from([np.float32(1), REACH, np.float32(0.01), np.float32(1000)]))
def test_find_visible_equals_the_reference(seed: int, size: int, reach: np.float32) -> None:
    rng = np.random.default_rng(seed)
    theta = weights(rng, size)
    s = updates(rng, theta)
    expected, ours = found(reference, theta, s, reach), found(cpu, theta, s, reach)
    assert ours[:2] == expected[:2]
    assert np.array_equal(ours[2], expected[2])
    assert ours[3].tobytes() == expected[3].tobytes()


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_visible_is_what_changes_the_bf16_value(kernel: Any) -> None:
    rng = np.random.default_rng(2)
    theta = weights(rng, 50_000)
    s = updates(rng, theta)
    with np.errstate(over="ignore"):
        before, after = (x.astype(ml_dtypes.bfloat16).view(np.uint16) for x in (theta, theta - REACH * s))
    visible = np.flatnonzero((before != after) & (s != 0))
    count, largest, positions, values = found(kernel, theta, s, REACH)
    assert count == visible.size
    assert 0.1 < count / theta.size < 0.9, "the case is to have both kinds"
    assert np.array_equal(positions, visible)
    assert values.tobytes() == s[visible].tobytes()
    assert largest == np.abs(s).max().view(np.uint32)


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@pytest.mark.parametrize("share", [0.0, 0.03, 1.0])
def test_find_visible_takes_a_whole_chunk(kernel: Any, share: float) -> None:
    rng = np.random.default_rng(3)
    s = np.where(rng.random(FULL) < share, np.float32(0.5), np.float32(-0.0))
    count, _, positions, values = found(kernel, np.ones(FULL, np.float32), s, np.float32(1))
    assert np.array_equal(positions, np.flatnonzero(s))
    assert count == values.size
    assert (values == 0.5).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF])
@pytest.mark.parametrize("size", [1, 65, 4097, FULL])
def test_the_largest_of_what_is_not_finite_is_its_pattern(kernel: Any, bits: int, size: int) -> None:
    theta, s = np.ones(size, np.float32), np.full(size, 3e38, np.float32)
    s.view(np.uint32)[size // 2] = bits
    assert found(kernel, theta, s, np.float32(1))[1] == bits & 0x7FFFFFFF


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_the_largest_of_nothing_is_zero(kernel: Any) -> None:
    nothing = np.empty(0, np.float32)
    assert found(kernel, nothing, nothing, np.float32(1))[:2] == (0, 0)


# describe


def trends(rng: np.random.Generator, size: int, dtype: type[Any]) -> NDArray[Any]:
    signs = rng.integers(-1, 2, size).astype(np.int8)
    return signs if dtype is np.int8 else np.where(signs == 0, np.float32(-0.0), signs * np.abs(weights(rng, size)))


@many
@given(seeds, sizes, st.sampled_from([np.int8, np.float32]))
def test_describe_equals_the_reference(seed: int, size: int, dtype: type[Any]) -> None:
    rng = np.random.default_rng(seed)
    assert_same("describe", weights(rng, size), trends(rng, size, dtype), np.zeros(size, np.uint16))


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_describe_equals_the_reference_on_a_whole_chunk(dtype: type[Any]) -> None:
    rng = np.random.default_rng(4)
    assert_same("describe", weights(rng, FULL), trends(rng, FULL, dtype), np.zeros(FULL, np.uint16))


def described(x: float, trend: int) -> int:
    """The description of a weight that is not among the largest, by FP64 numbers, in which all of this is exact."""
    middle = ml_dtypes.bfloat16(x)
    pattern = int(middle.view(np.uint16))
    beside = np.array([pattern + 1, pattern - 1 if pattern & 0x7FFF else pattern ^ 0x8001], np.uint16)
    outer, inside = (abs((float(middle) + float(b)) / 2 - x) for b in beside.view(ml_dtypes.bfloat16))
    sign = -math.copysign(1, x) if outer <= inside else math.copysign(1, x)  # theta − s is to go outwards: s is not
    field = max(0, math.frexp(min(outer, inside))[1] + 126) if min(outer, inside) else 0
    kind = min(255, max(0, 2 * (field - 32) + (trend != sign)))
    return kind << 7 | (sign < 0) << 15


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_describe_names_the_near_border_its_octave_and_whether_the_trend_goes_there(
    kernel: Any, dtype: type[Any]
) -> None:
    rng = np.random.default_rng(5)
    theta = weights(rng, 5000)
    theta = theta[np.abs(theta) < 3e38]
    trend = rng.integers(-1, 2, theta.size).astype(dtype)
    out = np.empty(theta.size, np.uint16)
    kernel.describe(theta, trend, out)
    expected = [described(float(x), int(t)) for x, t in zip(theta, trend, strict=True)]
    assert out.tolist() == expected
    assert len(set(expected)) > 200


# move


@many
@given(seeds, sizes, some)
def test_move_equals_the_reference(seed: int, size: int, trainers: np.float32) -> None:
    rng = np.random.default_rng(seed)
    theta = weights(rng, size)
    assert_same("move", theta, updates(rng, theta), trainers, np.zeros(size, np.int8))


@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001])
def test_move_reports_what_is_not_finite(bits: int) -> None:
    rng = np.random.default_rng(6)
    theta, total = (rng.normal(0, 0.02, FULL).astype(np.float32) for _ in range(2))
    total.view(np.uint32)[FULL // 3] = bits
    (moved, mean, after), _ = assert_same("move", theta, total, np.float32(4), np.zeros(FULL, np.int8))
    assert moved == FULL
    assert mean >= NOT_FINITE
    assert after >= NOT_FINITE


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_move_takes_the_mean_off_and_keeps_its_sign(kernel: Any) -> None:
    theta = np.array([1, 1, 1, -0.0, 3e38], np.float32)
    total = np.array([1, -2, -0.0, 0, -3e38], np.float32)
    trend = np.full(5, 9, np.int8)
    moved, mean, after = kernel.move(theta, total, np.float32(2), trend)
    assert trend.tolist() == [1, -1, 0, 0, -1]
    assert total.tobytes() == np.array([0.5, 2, 1, -0.0, np.inf], np.float32).tobytes()
    assert (moved, mean, after) == (3, int(np.float32(1.5e38).view(np.uint32)), NOT_FINITE)


# add_at


@many
@given(seeds, sizes, st.sampled_from([0.0, 0.03, 0.5, 1.0]))
def test_add_at_equals_the_reference(seed: int, size: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    positions = np.flatnonzero(rng.random(size) < density)
    assert_same("add_at", weights(rng, size), positions, weights(rng, positions.size))


@pytest.mark.parametrize("kernel", KERNELS, ids=["reference", "cpu"])
def test_add_at_adds_where_it_is_told(kernel: Any) -> None:
    total, positions = np.ones(FULL, np.float32), np.arange(1, FULL, 33)
    kernel.add_at(total, positions, np.full(positions.size, 0.5, np.float32))
    assert np.array_equal(np.flatnonzero(total != 1), positions)
    assert (total[positions] == 1.5).all()
