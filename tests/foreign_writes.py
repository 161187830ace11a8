"""Writes to a worker's weights by something other than a sync, and what the next sync must make of them."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync import Publisher, Subscriber
from pulsesync.format import patch
from pulsesync.run.reporting import SyncReport
from pulsesync.store import MemoryStore
from tests.helpers import nudge

Arrays = dict[str, Any]  # names -> numpy arrays

SHAPES = {"layer.0.weight": (16, 24), "layer.1.weight": (24, 8), "norm": (24,)}
TENSOR = "layer.0.weight"  # to which is written
DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn]
CODECS: tuple[patch.CodecName, ...] = ("auto", "history", "context", "step", "gap", "dense", "xor")


def _swap_rows(array: Any) -> None:
    array[:] = array[::-1].copy()


def _flip_signs(array: Any) -> None:
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    bits ^= bits.dtype.type(1 << (8 * array.itemsize - 1) | 1)


def _initialise(array: Any) -> None:
    array[:] = np.random.default_rng(7).normal(0, 0.5, array.shape).astype(array.dtype)


def _write_a_row(array: Any) -> None:
    array[3] = 0


def _add(array: Any) -> None:
    array[:] = (array.astype(np.float32) + 1e-3).astype(array.dtype)


def _fill(value: float) -> Callable[[Any], None]:
    def write(array: Any) -> None:
        array[:] = value

    return write


WRITES: Mapping[str, Callable[[Any], None]] = {
    "zeros": _fill(0.0),
    "NaN": _fill(float("nan")),
    "large": _fill(400.0),
    "initialised again": _initialise,
    "rows swapped": _swap_rows,
    "1e-3 added": _add,
    "signs flipped": _flip_signs,
    "a row of zeros": _write_a_row,
}


def weights(dtype: Any) -> Arrays:
    rng = np.random.default_rng(1)
    return {name: (0.02 * rng.standard_normal(shape)).astype(dtype) for name, shape in SHAPES.items()}


def train(arrays: Arrays, rng: np.random.Generator) -> None:
    """Change weights by a few units in the last place, most of them small, as training does."""
    for array in arrays.values():
        bits = array.view(f"u{array.itemsize}")
        small = np.abs(array.astype(np.float32)) < 0.02
        bits[...] = np.where(small, nudge(rng, bits, 0.05), bits)


def sync_after(
    write: Callable[[Any], None],
    codec: patch.CodecName,
    dtype: Any,
    to_worker: Callable[[Arrays], Mapping[str, Any]] = dict,
    to_host: Callable[[Any], Any] = lambda tensor: tensor,
    **options: Any,
) -> tuple[SyncReport, bool]:
    """Follow a run, write to a tensor of the worker, and sync over the versions that it missed meanwhile.

    Return the report, and whether the weights are now those of the trainer, after a recount where the sync repaired
    nothing. to_worker: makes the tensors of the worker; to_host: a view or copy of one as a numpy array.
    """
    trained, local, rng, store = weights(dtype), to_worker(weights(dtype)), np.random.default_rng(2), MemoryStore()
    with Publisher(store, codec=codec) as pub, Subscriber(store, **options) as sub:
        for _ in range(2):
            pub.publish(trained)
            sub.sync(local)
            train(trained, rng)
        array = to_host(local[TENSOR])
        write(array)
        if array is not local[TENSOR]:
            local[TENSOR].copy_(to_worker({TENSOR: array})[TENSOR])
        pub.publish(trained)
        train(trained, rng)
        pub.publish(trained)
        report = sub.sync(local)
        if not report.repaired:  # what no patch reads passes unnoticed until the weights are counted
            report = sub.sync(local, verify=True)
    return report, all(to_host(local[name]).tobytes() == trained[name].tobytes() for name in trained)
