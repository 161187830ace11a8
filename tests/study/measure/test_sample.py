"""The sample: so many weights at most, of every tensor and every column."""

import math

import numpy as np
import pytest

from pulsesync.study.measure.sample import choose


@pytest.mark.parametrize("most", [1, 10, 1000, 5000, 10**9])
def test_a_sample_is_no_larger_than_asked_and_leaves_no_tensor_out(most: int) -> None:
    sizes, columns = [64 * 48, 48, 0, 1, 7 * 30 * 2], [48, 1, 5, 1, 60]
    strides = choose(sizes, columns, most)
    assert sum(stride.count for stride in strides) <= most + len(sizes)  # rounded up for each
    for size, stride in zip(sizes, strides, strict=True):
        taken = stride.of(np.arange(size))
        assert len(taken) == stride.count
        assert (stride.count > 0) == (size > 0)
        assert most < sum(sizes) or stride.count == size


def test_every_column_is_met_about_as_often() -> None:
    (stride,) = choose([4096 * 576], [576], 20_000)
    met = np.bincount(stride.of(np.arange(4096 * 576)) % 576, minlength=576)
    assert math.gcd(stride.step, 576) == 1
    assert met.max() - met.min() <= 1
    assert stride.count > 15_000


def test_a_sample_is_the_same_each_time() -> None:
    assert choose([1000, 10], [10, 1], 100) == choose([1000, 10], [10, 1], 100)
