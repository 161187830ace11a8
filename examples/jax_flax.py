"""Train a Flax model with Optax in one process, and follow its weights in another.

    python examples/jax_flax.py runs/jax

The trainer has FP32 master weights and publishes them as BF16 after every step; the worker has a BF16 tree, and gets a
new one for each version. The location is a new folder, or a URL such as s3://bucket/run, and the worker could be on
another machine. Prints what each version sent instead of all weights, and ends with

    version 10: the worker has the trainer's weights, bit for bit
"""

import argparse
import hashlib
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from pulsesync.integrations.jax import JaxPublisher, JaxSubscriber

STEPS = 10


class Policy(nn.Module):
    """Two layers; what they compute does not matter here."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(256)(nn.relu(nn.Dense(1024)(x)))


def initial(seed: int) -> Any:
    return Policy().init(jax.random.key(seed), jnp.ones((1, 256)))["params"]


def in_bf16(params: Any) -> Any:
    return jax.tree.map(lambda weight: weight.astype(jnp.bfloat16), params)


def sha256(params: Any) -> str:
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))).hexdigest()


def work(location: str) -> str:
    """The worker: sync to every version up to the last step, and generate in between."""
    subscriber = JaxSubscriber(location)
    start = in_bf16(initial(seed=1))  # other weights than the trainer's: the first sync brings them all
    prompt = jnp.ones((1, 256), jnp.bfloat16)
    for params in subscriber.watch(start, wait_s=60, interval_s=0.05, max_interval_s=0.5):
        report = subscriber.report
        assert report is not None
        answer = float(Policy().apply({"params": params}, prompt).mean())  # here a worker would generate
        took_ms = 1000 * (report.fetch_s + report.prepare_s + report.apply_s)
        got = f"{report.fetched_bytes:,} bytes, {took_ms:.0f} ms, output {answer:.5f}"
        print(f"    worker at version {report.version}: {got}", flush=True)
        if report.step == STEPS:
            break
    return sha256(params)


def train(location: str) -> str:
    """The trainer: publish the first weights, and those after every step."""
    params, data = initial(seed=0), np.random.default_rng(0)
    optimizer = optax.adamw(3e-6)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        gradients = jax.grad(lambda params: jnp.mean((Policy().apply({"params": params}, batch) + batch) ** 2))(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    with JaxPublisher(location, cast="BF16") as publisher:
        publisher.publish(params, step=0)
        for number in range(1, STEPS + 1):
            params, state = step(params, state, jnp.asarray(data.standard_normal((64, 256)), jnp.float32))
            report = publisher.publish(params, step=number)
            sent = f"{report.density:.1%} changed, {report.payload_bytes:,} of {report.full_bytes:,} bytes"
            print(f"step {number}, version {report.version}: {sent}", flush=True)
            time.sleep(0.2)  # a step of a larger model takes longer
    return sha256(in_bf16(params))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a Flax model, and follow its weights in another process.")
    parser.add_argument("location", help="where to publish: a new folder, or a URL such as s3://bucket/run")
    given = parser.parse_args()

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        worker = processes.submit(work, given.location)
        published = train(given.location)
        followed = worker.result()
    assert followed == published, f"the worker has {followed}, the trainer published {published}"
    print(f"version {STEPS}: the worker has the trainer's weights, bit for bit")


if __name__ == "__main__":
    main()
