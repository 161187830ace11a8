"""The sample: at most a given number of weights, from every tensor and every column."""

import math

import numpy as np
import pytest

from pulsesync_lab.study.measure.sample import choose


@pytest.mark.parametrize("most", [1, 10, 1000, 5000, 10**9])
def test_a_sample_is_no_larger_than_asked_and_leaves_no_tensor_out(most: int) -> None:
    sizes, columns = [64 * 48, 48, 0, 1, 7 * 30 * 2], [48, 1, 5, 1, 60]
    strides = choose(sizes, columns, most)
    assert sum(stride.count for stride in strides) <= most + len(sizes)  # rounded up for each
    for size, stride in zip(sizes, strides, strict=True):
        taken = stride.of(range(size))
        assert isinstance(taken, range)
        assert len(taken) == stride.count
        assert (stride.count > 0) == (size > 0)
        assert most < sum(sizes) or stride.count == size


def test_every_column_is_met_about_as_often() -> None:
    (stride,) = choose([4096 * 576], [576], 20_000)
    taken = stride.of(range(4096 * 576))
    assert isinstance(taken, range)
    met = np.bincount(np.asarray(taken) % 576, minlength=576)
    assert math.gcd(stride.step, 576) == 1
    assert met.max() - met.min() <= 1
    assert stride.count > 15_000


@pytest.mark.parametrize("most", [100, 5000, 20_000, 40_000])
def test_the_share_is_the_same_for_all_tensors(most: int) -> None:
    sizes, columns = [64 * 576, 576, 30 * 1536, 7 * 35, 3], [576, 1, 1536, 35, 1]
    strides = choose(sizes, columns, most)
    (step,) = {stride.step for stride in strides}
    assert all(math.gcd(step, width) == 1 for width in columns)
    for size, stride in zip(sizes, strides, strict=True):
        assert abs(stride.count - size / step) <= 1


def test_more_than_half_is_all_of_them() -> None:
    sizes, columns = [64 * 576, 577], [576, 1]
    assert [stride.count for stride in choose(sizes, columns, sum(sizes) // 2 + 1)] == sizes
    assert sum(stride.count for stride in choose(sizes, columns, sum(sizes) // 2)) <= sum(sizes) // 2


def test_rows_that_no_step_is_apart_from_do_not_take_forever() -> None:
    width = math.prod(range(2, 50))
    (stride,) = choose([10**6], [width], 10**5)
    assert 10 <= stride.step < 48


def test_a_sample_is_the_same_each_time() -> None:
    assert choose([1000, 10], [10, 1], 100) == choose([1000, 10], [10, 1], 100)
