"""Where weights are counted: on the host with the fastest kernels, on other devices in torch."""

from importlib import import_module
from typing import Any

from pulsesync import kernels
from pulsesync_lab.study.measure.buffers import Buffers, NumpyBuffers, TorchBuffers


def buffers_and_counting(device: str) -> tuple[Buffers, Any]:
    """For tensors of a device: "" is numpy's, on the host."""
    if device not in ("", "cpu"):
        return TorchBuffers(device, on_host=False), import_module("pulsesync_lab.study.measure.counting_torch")
    slow = kernels.active().__name__.endswith("reference")  # no numba, or it is disabled
    counting = import_module(
        "pulsesync_lab.study.measure.counting" if slow else "pulsesync_lab.study.measure.counting_numba"
    )
    if device == "":
        return NumpyBuffers(), counting
    return TorchBuffers(device, on_host=True, to_bf16=None if slow else counting.to_bf16), counting
