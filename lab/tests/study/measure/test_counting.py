"""Counting: the reference against what the counts mean, the others against the reference, bit for bit."""

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pulsesync_lab.study.measure import counting, counting_numba, counting_torch
from pulsesync_lab.study.measure.buffers import NumpyBuffers
from pulsesync_lab.study.measure.counting import CLASSES, DOWN, UNITS, UP, Tally
from tests.tiers import slow

SHIFTS = {1: 3, 2: 7, 4: 23}
AWKWARD = [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x3F80, 0x3F81]
FLOATS = {1: ml_dtypes.float8_e4m3fn, 2: ml_dtypes.bfloat16, 4: np.float32}


def two_states(rng: np.random.Generator, size: int, itemsize: int, density: float) -> tuple[Any, Any, Any]:
    """Bits of two states and how each weight went before; half of the changes are small, half anything at all."""
    kind = np.dtype(f"u{itemsize}")
    old = rng.integers(0, 1 << 8 * itemsize, size, kind)
    near, far = old + rng.integers(-40, 40, size).astype(kind), rng.integers(0, 1 << 8 * itemsize, size, kind)
    new = np.where(rng.random(size) < density, np.where(rng.random(size) < 0.5, near, far), old)
    return old, new, rng.integers(0, 3, size, np.uint8)


def meaning(old: Any, new: Any, last: Any, ends: list[int], shift: int) -> list[int]:
    """What `compare` returns, weight by weight, from the values that the bits stand for."""
    changed, three = [0] * len(ends), [0, 0, 0]
    units, leaving, entering = [0] * len(UNITS), [0] * CLASSES, [0] * CLASSES
    bits = np.arange(1 << 8 * old.itemsize).astype(old.dtype)
    with np.errstate(invalid="ignore"):
        values = bits.view(FLOATS[old.itemsize]).astype(np.float64)
    finite = [int(b) for b in bits if not math.isnan(values[b])]
    top = 8 * old.itemsize - 1
    rank = {b: n for n, b in enumerate(sorted(finite, key=lambda b: (values[b], -(b >> top))))}
    for i in np.flatnonzero(old != new).tolist():
        a, b = int(old[i]), int(new[i])
        changed[next(t for t, end in enumerate(ends) if i < end)] += 1
        leaving[(a & ((1 << top) - 1)) >> shift] += 1
        entering[(b & ((1 << top) - 1)) >> shift] += 1
        moved = rank[b] - rank[a]
        units[max(n for n, unit in enumerate(UNITS) if unit <= abs(moved))] += 1
        way = UP if moved > 0 else DOWN
        three = [three[0] + (last[i] != 0), three[1] + (last[i] == way), three[2] + (way == UP)]
    return [*changed, *three, *units, *leaving, *entering]


@pytest.mark.parametrize("itemsize", [1, 2])
def test_the_reference_counts_what_the_values_say(itemsize: int) -> None:
    rng = np.random.default_rng(itemsize)
    old, new, last = two_states(rng, 700, itemsize, 0.4)
    for bits in (old, new):
        with np.errstate(invalid="ignore"):
            bits[np.isnan(bits.view(FLOATS[itemsize]).astype(np.float32))] = 0  # NaN has no place among the values
    ends = [0, 130, 130, 555, 700]
    expected = meaning(old, new, last, ends, SHIFTS[itemsize])
    assert counting.compare(old.copy(), new, last.copy(), np.array(ends), SHIFTS[itemsize]).tolist() == expected
    assert sum(expected[: len(ends)]) > 100


@pytest.mark.parametrize("itemsize", [2, slow(1), slow(4)])  # 3 s to compile each
@pytest.mark.parametrize("density", [0.01, 0.6])
def test_all_ways_of_counting_are_the_same(itemsize: int, density: float) -> None:
    for size in (0, 1, 31, 4096):
        assert_same_counts(size, itemsize, density)


@pytest.mark.parametrize("itemsize", [2, slow(1), slow(4)])
def test_all_ways_of_counting_are_the_same_in_several_threads(itemsize: int) -> None:
    assert_same_counts(2_200_001, itemsize, 0.6)


def assert_same_counts(size: int, itemsize: int, density: float) -> None:
    rng = np.random.default_rng([size, itemsize])
    old, new, last = two_states(rng, size, itemsize, density)
    if itemsize == 2 and size > 1000:
        pairs = np.array(np.meshgrid(AWKWARD, AWKWARD), np.uint16).reshape(2, -1)
        old[: pairs.shape[1]], new[: pairs.shape[1]] = pairs
    ends = np.sort(np.append(rng.integers(0, size, 5, endpoint=True), size))
    results = []
    for module in (counting, counting_numba):
        held, went = old.copy(), last.copy()
        results.append((module.compare(held, new, went, ends, SHIFTS[itemsize]), held, went))
        assert np.array_equal(module.differ(old, new, ends), results[0][0][: ends.size])
        assert np.array_equal(module.classes(old, SHIFTS[itemsize]), counting.classes(old, SHIFTS[itemsize]))
    signed = np.dtype("u1" if itemsize == 1 else f"i{itemsize}")
    held, went, then, upto = map(torch.from_numpy, (old.view(signed).copy(), last.copy(), new.view(signed), ends))
    of_torch = [counting_torch.classes(held, SHIFTS[itemsize]), counting_torch.differ(held, then, upto)]
    of_torch.append(counting_torch.compare(held, then, went, upto, SHIFTS[itemsize]))
    by_class, differ, row = counting_torch.home(of_torch)
    assert np.array_equal(by_class, counting.classes(old, SHIFTS[itemsize]))
    assert np.array_equal(differ, results[0][0][: ends.size])
    results.append((row, held.numpy().view(old.dtype), went.numpy()))
    for found in results:
        assert all(np.array_equal(a, b) for a, b in zip(found, results[0], strict=True))
    assert np.array_equal(results[0][1], new)
    assert np.array_equal(results[0][2] != 0, old != new)


def test_steps_are_counted_one_by_one_up_to_15_and_then_by_powers_of_two() -> None:
    sizes = np.array([1, 2, 15, 16, 17, 31, 32, 63, 64, 20_000])
    old = np.full(sizes.size, 0x1000, np.uint16)
    row = counting.compare(old, (old + sizes).astype(np.uint16), np.zeros(10, np.uint8), np.array([10]), 7)
    told = dict(zip(UNITS, Tally.of(row).units.tolist(), strict=True))
    assert {unit: n for unit, n in told.items() if n} == {1: 1, 2: 1, 15: 1, 16: 3, 32: 2, 64: 1, 16384: 1}


def test_moves_are_counted_by_half_powers_of_two_of_the_learning_rate() -> None:
    rng = np.random.default_rng(0)
    old = np.zeros(5000, np.float32)
    new = (rng.choice([-1, 1], old.size) * np.exp2(rng.uniform(-20, 5, old.size))).astype(np.float32)
    new[:4] = [0, np.nan, np.inf, np.sqrt(np.float32(2))]
    lr = np.float32(3e-6)
    expected: dict[int, int] = {}
    for move in new[3:]:
        key = math.floor(2 * math.log2(float(np.float32(abs(move)) / lr)))
        expected[key] = expected.get(key, 0) + 1
    rows = [module.ratios(old, new, 3e-6) for module in (counting, counting_numba)]
    rows.append(counting_torch.ratios(torch.from_numpy(old), torch.from_numpy(new), 3e-6).numpy())
    for row in rows:
        assert {n - 254: int(row[n]) for n in range(2, 510) if row[n]} == expected
        assert (row[:2].sum(), row[510:].sum()) == (1, 2)


def test_moves_may_have_a_unit_each() -> None:
    old, new = np.zeros(5, np.float32), np.array([1, 2, -4, 0, 1], np.float32)
    unit = np.array([1, 2, 1, 0, 0], np.float32)
    rows = [module.ratios(old, new, unit) for module in (counting, counting_numba)]
    rows.append(counting_torch.ratios(torch.from_numpy(old), torch.from_numpy(new), unit).numpy())
    for row in rows:
        assert {int(n): int(row[n]) for n in np.flatnonzero(row)} == {254: 2, 258: 1, 510: 1, 511: 1}


def test_the_first_look_takes_little_memory() -> None:
    weights = np.random.default_rng(0).standard_normal(1 << 24).astype(np.float32)
    bits = weights.view(np.uint16)
    for work in (lambda: counting.classes(bits, 7), lambda: NumpyBuffers().scales([weights], [1], "F8_E4M3")):
        tracemalloc.start()
        work()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < weights.size  # a byte for each would be that
    assert NumpyBuffers().scales([weights], [1], "F8_E4M3")[0] == np.float32(448) / np.abs(weights).max()


def test_values_that_are_not_zero_are_counted_by_tensor() -> None:
    values = np.array([0, 1, -0.0, np.nan, 0, 1e-45], np.float32)
    ends = np.array([1, 1, 4, 6])
    for found in (
        counting.nonzero(values, ends),
        counting_numba.nonzero(values, ends),
        counting_torch.nonzero(torch.from_numpy(values), torch.from_numpy(ends)).numpy(),
    ):
        assert found.tolist() == [0, 0, 2, 1]


def test_fp32_is_rounded_as_torch_rounds_it() -> None:
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 1 << 32, 100_000, dtype=np.uint32)
    bits = np.concatenate([bits, np.arange(1 << 18, dtype=np.uint32) << 14])  # ties, subnormals, both zeros, infinities
    rounded = np.empty(bits.size, np.uint16)
    counting_numba.to_bf16(bits, rounded)
    values = torch.from_numpy(bits.view(np.float32))
    expected = values.bfloat16().view(torch.uint16).numpy()
    nan = np.isnan(bits.view(np.float32))
    assert (rounded[~nan] == expected[~nan]).all()
    assert (rounded[nan] == 0x7FC0).all()
    assert nan.any()
