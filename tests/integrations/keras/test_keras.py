"""Keras models on the backend that KERAS_BACKEND names: make test-jax runs this once for each."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REASON = "needs Keras 3: make test-jax runs it"
pytest.importorskip("keras", reason=REASON)

import keras  # noqa: E402

from pulsesync.errors import StateError, VerificationError  # noqa: E402
from pulsesync.integrations.frameworks import FrameworkWeights  # noqa: E402
from pulsesync.integrations.keras import BACKENDS, KerasCallback, KerasPublisher, KerasSubscriber, KerasWeights  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from pulsesync.testing import FrameworkTests  # noqa: E402
from pulsesync.testing.frameworks import Arrays, assert_same, read  # noqa: E402
from tests.examples import python_path  # noqa: E402

BACKEND = keras.backend.backend()
pytestmark = [
    pytest.mark.timeout(240),  # on a machine without cached kernels a test compiles them
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras on torch, in predict
]


def exactly(array: Any) -> Any:
    """An array as a value to assign; Keras on torch would take BF16 through FP32, which alters NaN."""
    if BACKEND != "torch":
        return array.copy()
    import torch

    return torch.from_numpy(array.copy().view(f"u{array.itemsize}")).view(getattr(torch, array.dtype.name))


class Holder(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a variable for each array."""

    def __init__(self, arrays: Arrays) -> None:
        super().__init__(name="holder")
        for name, array in arrays.items():
            variable = self.add_weight(
                shape=array.shape, dtype=array.dtype.name, initializer="zeros", name=name, trainable=False
            )
            variable.assign(exactly(array))
        self.built = True


class TestKeras(FrameworkTests):
    def make(self, arrays: Arrays) -> FrameworkWeights:
        return KerasWeights(Holder(arrays))


@pytest.fixture(autouse=True)
def fresh_names() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)


def policy(dtype: str = "float32") -> Any:
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="relu", name="hidden"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.1, name="dropout"),
        keras.layers.Dense(4, name="out"),
    ]
    with_dtype = keras.DTypePolicy(dtype)
    for layer in layers[1:]:
        layer.dtype_policy = with_dtype
    return keras.Sequential(layers, name="policy")


def compiled() -> Any:
    model = policy()
    model.compile(optimizer=keras.optimizers.Adam(1e-3, name="adam"), loss="mse")
    return model


def data(batches: int = 6) -> tuple[Any, Any]:
    x = np.random.default_rng(0).standard_normal((batches * 16, 8)).astype(np.float32)
    return x, x[:, :4] * 2


NAMES = [
    *("policy/hidden/kernel", "policy/hidden/bias", "policy/norm/gamma", "policy/norm/beta"),
    *("policy/norm/moving_mean", "policy/norm/moving_variance", "policy/out/kernel", "policy/out/bias"),
]


def test_this_runs_on_a_backend_that_is_supported() -> None:
    assert BACKEND in BACKENDS
    assert os.environ.get("KERAS_BACKEND", BACKEND) == BACKEND


def test_names_are_the_paths_of_the_weights_without_optimizer_and_seeds() -> None:
    model = compiled()
    model.fit(*data(1), verbose=0)
    assert list(KerasWeights(model).names()) == NAMES


def test_other_variables_are_published_when_they_are_asked_for() -> None:
    store, model, other = MemoryStore(), compiled(), compiled()

    def everything(model: Any) -> list[Any]:
        return [*model.weights, *model.optimizer.variables]

    for one in (model, other):
        one.optimizer.build(one.trainable_variables)
    model.fit(*data(3), batch_size=16, verbose=0)
    with (
        KerasPublisher(store, variables=everything) as publisher,
        KerasSubscriber(store, variables=everything) as subscriber,
    ):
        publisher.publish(model)
        subscriber.sync(other)
    assert int(other.optimizer.iterations) == 3  # of 16 examples each
    assert_same(read(KerasWeights(other, everything)), read(KerasWeights(model, everything)))


def test_two_variables_of_one_path_are_refused() -> None:
    def twice(model: Any) -> list[Any]:
        return [*model.weights, model.weights[0]]

    with pytest.raises(StateError, match="two variables have the path 'policy/hidden/kernel'") as caught:
        KerasWeights(policy(), twice)
    assert caught.value.tensor == "policy/hidden/kernel"


def test_a_model_that_is_not_built_is_refused() -> None:
    with pytest.raises(StateError, match="model 'empty' has no weights yet"):
        KerasWeights(keras.Sequential([keras.layers.Dense(3)], name="empty"))


def test_a_model_follows_another_and_computes_the_same(tmp_path: Path) -> None:
    trainer, worker = compiled(), policy()
    x, y = data()
    for variable in worker.weights:
        variable.assign(np.full(variable.shape, 0.5, np.float32))
    variables = list(worker.weights)
    with KerasPublisher(str(tmp_path)) as publisher, KerasSubscriber(str(tmp_path)) as subscriber:
        for step in range(3):
            publisher.publish(trainer, step=step)
            assert subscriber.sync(worker).step == step
            assert_same(read(KerasWeights(worker)), read(KerasWeights(trainer)))
            assert subscriber.verify(worker) == publisher.digest
            assert np.array_equal(worker.predict(x, verbose=0), trainer.predict(x, verbose=0))
            trainer.fit(x, y, verbose=0)
        assert all(a is b for a, b in zip(worker.weights, variables, strict=True))
        assert subscriber.roll_back(worker) == 1
        worker.weights[0].assign(np.zeros(worker.weights[0].shape, np.float32))
        with pytest.raises(VerificationError, match="something else has written to 'policy/hidden/kernel'"):
            subscriber.verify(worker)


def test_masters_arrive_in_bf16() -> None:
    store, trainer = MemoryStore(), policy()
    keras.utils.clear_session(free_memory=False)
    worker = policy("bfloat16")
    with KerasPublisher(store, cast="BF16") as publisher, KerasSubscriber(store) as subscriber:
        publisher.publish(trainer)
        subscriber.sync(worker)
    cast = {name: (bits.view(np.float32)) for name, bits in read(KerasWeights(trainer)).items()}
    found = read(KerasWeights(worker))
    for name, bits in cast.items():
        rounded = (bits.view(np.uint32) + 0x7FFF + (bits.view(np.uint32) >> 16 & 1)) >> 16
        assert np.array_equal(found[name], rounded.astype(np.uint16)), name


# The callback


def published(store: MemoryStore) -> list[int]:
    """The steps of all versions."""
    worker = policy()
    with KerasSubscriber(store) as subscriber:
        newest = subscriber.sync(worker).version
        return [subscriber.sync(worker, version).step for version in range(newest + 1)]


def test_a_callback_publishes_the_start_every_epoch_and_the_end() -> None:
    store, model = MemoryStore(), compiled()
    callback = KerasCallback(store)
    model.fit(*data(), batch_size=16, epochs=3, verbose=0, callbacks=[callback])
    assert callback.publisher is None
    assert callback.report.step == 18
    keras.utils.clear_session(free_memory=False)
    worker = policy()
    with KerasSubscriber(store) as subscriber:
        subscriber.sync(worker)
    assert_same(read(KerasWeights(worker)), read(KerasWeights(model)))


def test_a_callback_publishes_the_weights_as_they_are_after_a_number_of_batches() -> None:
    """On JAX, fit keeps them in a state of its own until the epoch ends."""
    store, model = MemoryStore(), compiled()
    seen: dict[int, Arrays] = {}

    class Seen(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step = int(self.model.optimizer.iterations) if BACKEND != "jax" else batch + 1
            if step % 2 == 0:
                callback.publisher.flush()  # so that each is a version of its own
                seen[step] = read(KerasWeights(self.model))

    callback = KerasCallback(store, every=2)
    model.fit(*data(), batch_size=16, epochs=1, shuffle=False, verbose=0, callbacks=[callback, Seen()])
    assert len(seen) == 3
    keras.utils.clear_session(free_memory=False)
    assert published(store) == [0, 2, 4, 6, 6]
    keras.utils.clear_session(free_memory=False)
    worker = policy()
    with KerasSubscriber(store) as subscriber:
        for version, step in ((1, 2), (2, 4), (3, 6)):
            subscriber.sync(worker, version)
            assert_same(read(KerasWeights(worker)), seen[step])


def test_a_second_fit_resumes_the_run() -> None:
    store, model = MemoryStore(), compiled()
    callback = KerasCallback(store)
    for epochs in (1, 2):
        model.fit(*data(), batch_size=16, epochs=epochs, initial_epoch=epochs - 1, verbose=0, callbacks=[callback])
    assert callback.report.step == 12


@pytest.mark.parametrize("every", [0, -1, "batch", 1.5])
def test_a_callback_refuses_what_is_neither_an_epoch_nor_batches(every: Any) -> None:
    with pytest.raises(ValueError, match="every must be 'epoch' or a number of batches above 0"):
        KerasCallback("memory://x", every=every)


# Across backends


def test_a_worker_on_another_backend_has_the_bits_that_this_one_published(tmp_path: Path) -> None:
    """About 6 s: a process that imports the next backend. In three runs each publishes once and follows once."""
    other = BACKENDS[(BACKENDS.index(BACKEND) + 1) % len(BACKENDS)]
    model = compiled()
    with KerasPublisher(str(tmp_path / "run")) as publisher:
        publisher.publish(model, step=0)
        model.fit(*data(), verbose=0)
        publisher.publish(model, step=6)
    program = Path(__file__).with_name("worker.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "run")],
        env={**os.environ, "KERAS_BACKEND": other, "PYTHONPATH": python_path(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {name: bits.tobytes().hex() for name, bits in read(KerasWeights(model)).items()}
    assert dict(line.split() for line in done.stdout.splitlines() if line.startswith("policy/")) == expected
