"""What stands in for instructions of a GPU in Triton's interpreter: numpy computes what the kernels' own code does."""

from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.kernels.gpu import digest, words
from tests.device import interpreter

THREADS = 64  # two warps


@pytest.fixture
def rng(device: str) -> np.random.Generator:
    if device == "cuda":
        pytest.skip("there is no interpreter on a GPU")
    return np.random.default_rng(0)


def tensor(values: Any, dtype: str) -> Any:
    from triton.runtime.interpreter import TensorHandle, tl

    kind = getattr(tl, dtype)
    return tl.tensor(TensorHandle(values, kind), tl.block_type(kind, list(values.shape)))


def own(function: Any, *args: Any) -> Any:
    """The result of a kernel's own code."""
    from triton.runtime import interpreter as triton_interpreter

    triton_interpreter._patch_lang(function.fn)
    return function.rewriter.rewrite_ast()(*args)


def same(got: Any, expected: Any) -> bool:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return torch.equal(torch.from_numpy(got.handle.data), torch.from_numpy(expected.handle.data))


def test_bits_are_counted(rng: np.random.Generator) -> None:
    x = tensor(rng.integers(0, 1 << 32, THREADS, np.uint32), "uint32")
    assert same(interpreter.popcount(x), own(words.popcount, x))


@pytest.mark.parametrize("high", [False, True])
def test_every_other_byte_is_taken(high: bool, rng: np.random.Generator) -> None:
    x = tensor(rng.integers(0, 1 << 64, THREADS, np.uint64), "uint64")
    assert same(interpreter.every_other_byte(x, high), own(digest._every_other_byte, x, high))


def test_rows_are_multiplied_and_added(rng: np.random.Generator) -> None:
    read = [tensor(rng.integers(0, 1 << 32, THREADS, np.uint32), "uint32") for _ in range(4)]
    sums = [tensor(rng.integers(0, 1 << 20, THREADS, np.int32), "int32") for _ in range(2)]
    got, expected = interpreter.row_sums(*read, *sums), own(digest._row_sums, *read, *sums)
    assert all(same(one, other) for one, other in zip(got, expected, strict=True))
