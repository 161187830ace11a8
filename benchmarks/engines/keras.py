"""What does a sync of a Keras model cost on a backend: bytes, time and pause?

    KERAS_BACKEND=tensorflow python -m benchmarks keras

Trainer and worker are two models in one process, in host memory, and so is the run. The trainer's weights are FP32 and
come from `pulsesync.testing.AdamUpdates`, which resemble a recorded GRPO run; they are published as BF16. The pause is
the time in which the worker's variables are written. After every sync all bits are compared.
"""

import json
import os
import platform
import statistics
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import ml_dtypes
import numpy as np

from pulsesync.integrations.keras import KerasPublisher, KerasSubscriber, KerasWeights
from pulsesync.store import MemoryStore
from pulsesync.testing import AdamUpdates
from pulsesync.testing.frameworks import read

WARM_UP, VERSIONS = 3, 8
LAYERS, HIDDEN = 6, 1024


def model(dtype: str) -> Any:
    keras.utils.clear_session()
    layers = [keras.layers.Dense(HIDDEN, name=f"dense_{n}", dtype=dtype) for n in range(LAYERS)]
    return keras.Sequential([keras.Input((HIDDEN,)), *layers], name="policy")


def main(given: argparse.Namespace) -> None:
    trainer, worker, store, rows = model("float32"), model("bfloat16"), MemoryStore(), []
    updates = AdamUpdates({variable.path: tuple(variable.shape) for variable in trainer.weights})
    new = updates.state()
    with KerasPublisher(store, cast="BF16") as publisher, KerasSubscriber(store) as subscriber:
        for step in range(WARM_UP + VERSIONS):
            for variable in trainer.weights:
                variable.assign(new[variable.path].view(ml_dtypes.bfloat16).astype(np.float32))
            began = time.perf_counter()
            sent = publisher.publish(trainer, step=step)
            published = time.perf_counter()
            report = subscriber.sync(worker)
            ended = time.perf_counter()
            assert all(np.array_equal(bits, new[name]) for name, bits in read(KerasWeights(worker)).items())
            rows.append((sent.payload_bytes, published - began, ended - published, report.apply_s))
            new = updates.step()
    size, publish_s, sync_s, pause_s = (statistics.median(column) for column in zip(*rows[WARM_UP:], strict=True))
    backend = keras.backend.backend()
    times = " | ".join(f"{1e3 * seconds:.1f} ms" for seconds in (publish_s, sync_s, pause_s))
    print("| backend | bytes of a version | of all weights | publish | sync | pause |")
    print("|---|--:|--:|--:|--:|--:|")
    print(f"| {backend} | {size:,.0f} | {sent.full_bytes:,} | {times} |")
    figures = {"backend": backend, "weights": sent.total, "full_bytes": sent.full_bytes, "keras": keras.__version__}
    names = ("bytes", "publish_s", "sync_s", "pause_s")
    print(
        json.dumps({**figures, "machine": platform.machine(), "rows": [dict(zip(names, r, strict=True)) for r in rows]})
    )
