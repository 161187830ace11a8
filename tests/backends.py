"""Run code on another backend than it would choose: on the reference kernels, or on the GPU path without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pulsesync import device, kernels


@contextmanager
def use_kernels(name: str) -> Iterator[None]:
    """Use one set of kernels, "reference" or "cpu", inside the block, in all threads."""

    def chosen(*, warns: bool = True) -> Any:
        return kernels.load(name)

    with mock.patch.object(kernels, "active", chosen):
        yield


@contextmanager
def host_as_device(on: bool = True) -> Iterator[None]:
    """Treat torch tensors in host memory as tensors on a GPU inside the block, for Triton's interpreter.

    on=False treats them as tensors in host memory again, in an inner block.
    """
    with mock.patch.object(device, "is_host", lambda where: not on and where.type == "cpu"):
        yield
