"""What does a sync of a Keras model cost on a backend: bytes, time and pause?

    KERAS_BACKEND=tensorflow python -m benchmarks keras

Trainer and worker are two models in one process, in host memory, and so is the run. The trainer's weights are FP32 and
come from `pulsesync.testing.AdamUpdates`, which resemble a recorded GRPO run; they are published as BF16. The pause is
the time in which the worker's variables are written. After every sync all bits are compared.
"""

import argparse
import os
import statistics
from functools import partial
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import ml_dtypes
import numpy as np

from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import timed
from pulsesync.integrations.keras import KerasPublisher, KerasSubscriber, KerasWeights
from pulsesync.store import MemoryStore
from pulsesync.testing import AdamUpdates
from pulsesync.testing.frameworks import read

QUICK = ("--versions", "2")
WARM_UP = 3  # versions
LAYERS, HIDDEN = 6, 1024


def model(dtype: str) -> Any:
    keras.utils.clear_session()
    layers = [keras.layers.Dense(HIDDEN, name=f"dense_{n}", dtype=dtype) for n in range(LAYERS)]
    return keras.Sequential([keras.Input((HIDDEN,)), *layers], name="policy")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=8, help="that are measured, after the warm-up")


def main(given: argparse.Namespace) -> None:
    trainer, worker, store, rows = model("float32"), model("bfloat16"), MemoryStore(), []
    updates = AdamUpdates({variable.path: tuple(variable.shape) for variable in trainer.weights})
    new = updates.state()
    with KerasPublisher(store, cast="BF16") as publisher, KerasSubscriber(store) as subscriber:
        for step in range(WARM_UP + given.versions):
            for variable in trainer.weights:
                variable.assign(new[variable.path].view(ml_dtypes.bfloat16).astype(np.float32))
            sent, publish_s = timed(partial(publisher.publish, trainer, step=step))
            report, sync_s = timed(partial(subscriber.sync, worker))
            assert all(np.array_equal(bits, new[name]) for name, bits in read(KerasWeights(worker)).items())
            rows.append((sent.payload_bytes, publish_s, sync_s, report.apply_s))
            new = updates.step()
    size, *seconds = (statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True))
    backend = keras.backend.backend()
    cells = [backend, f"{size:,.0f}", f"{sent.full_bytes:,}", *(f"{1e3 * one:.1f} ms" for one in seconds)]
    print(table(["backend", "bytes of a version", "of all weights", "publish", "sync", "pause"], [cells]) + "\n")
    names = ("bytes", "publish_s", "sync_s", "pause_s")
    figures = {"backend": backend, "weights": sent.total, "full_bytes": sent.full_bytes, **provenance("keras", backend)}
    print(json_line({"bench": "keras", **figures, "rows": [dict(zip(names, r, strict=True)) for r in rows]}))
