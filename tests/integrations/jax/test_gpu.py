"""Trees on a GPU: through DLPack, without the host. Skipped where torch or JAX sees no CUDA device.

PYTHONPATH=src python -m pytest -q tests/integrations/jax/test_gpu.py
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

REASON = "needs JAX: make test-jax runs it"
pytest.importorskip("jax", reason=REASON)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from pulsesync.integrations.frameworks import FrameworkWeights  # noqa: E402
from pulsesync.integrations.jax import JaxPublisher, JaxSubscriber, JaxWeights  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from pulsesync.testing import FrameworkTests  # noqa: E402
from pulsesync.testing.frameworks import Arrays  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # kernels are compiled


@pytest.fixture(autouse=True)
def gpu() -> Any:
    """The GPU of JAX. Where torch has CUDA and JAX only CPUs, these tests would prove nothing and are skipped."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as e:
        pytest.skip(f"torch sees a CUDA device and JAX does not: install jax[cuda12] ({e})")


class TestJaxOnGpu(FrameworkTests):
    def make(self, arrays: Arrays) -> FrameworkWeights:
        device = jax.devices("gpu")[0]
        return JaxWeights({name: jax.device_put(array.copy(), device) for name, array in arrays.items()})


@pytest.fixture
def no_copies_to_the_host(gpu: Any) -> Iterator[None]:
    """Inside, JAX raises when an array is copied to the host, whether it is asked to or does so by itself."""
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        yield


def model(device: Any, dtype: Any = jnp.bfloat16) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    make = jax.jit(lambda key, shape: (0.02 * jax.random.normal(key, shape)).astype(dtype), static_argnums=1)
    with jax.default_device(device):
        return {
            "embed": make(keys[0], (1000, 256)),
            "layers": [make(keys[1], (512, 257)), make(keys[2], (3, 5, 7))],
            "scale": jnp.asarray(0.5, dtype),
        }


def _stepped(params: Any) -> Any:
    """About one weight in a hundred changes."""
    return jax.tree.map(lambda x: jnp.where(jnp.arange(x.size).reshape(x.shape) % 100 == 7, x * 1.5, x), params)


def _differences(one: Any, other: Any) -> Any:
    """How many bit patterns differ, counted on the device."""
    kinds = {2: jnp.uint16, 4: jnp.uint32}

    def count(a: Any, b: Any) -> Any:
        kind = kinds[a.dtype.itemsize]
        return (jax.lax.bitcast_convert_type(a, kind) != jax.lax.bitcast_convert_type(b, kind)).sum()

    return sum(jax.tree.leaves(jax.tree.map(count, one, other)))


stepped, differences = jax.jit(_stepped), jax.jit(_differences)


def test_arrays_are_handed_to_torch_where_they_are(gpu: Any, no_copies_to_the_host: None) -> None:
    weights = JaxWeights(model(gpu))
    for name in weights.names():
        tensor = weights.bits(name)
        assert tensor.is_cuda
        assert tensor.data_ptr() == weights.array(name).unsafe_buffer_pointer()


@pytest.mark.parametrize("cast", [None, "BF16"])
def test_weights_are_published_and_synced_without_the_host(gpu: Any, cast: str | None) -> None:
    store = MemoryStore()
    trained = model(gpu, jnp.float32 if cast else jnp.bfloat16)
    params = jax.tree.map(jnp.zeros_like, model(gpu))
    zeros, results = params, []
    with JaxPublisher(store, cast=cast) as publisher, JaxSubscriber(store) as subscriber:
        with jax.transfer_guard_device_to_host("disallow_explicit"):
            for step in range(4):
                publisher.publish(trained, step=step)
                before, params = params, subscriber.sync(params)
                half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained)
                results.append((differences(params, half), differences(before, params)))
                trained = stepped(trained)
        assert subscriber.report is not None
        assert subscriber.report.path == ("patch",)
        assert subscriber.verify(params) == publisher.digest
    assert [int(wrong) for wrong, _ in results] == [0, 0, 0, 0]
    assert all(int(changed) > 0 for _, changed in results)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(zeros))


def test_new_leaves_are_in_memory_of_jax_and_no_later_sync_writes_them(gpu: Any) -> None:
    store, trained, params = MemoryStore(), model(gpu), jax.tree.map(jnp.zeros_like, model(gpu))
    trees, expected = [], []
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        for step in range(4):
            publisher.publish(trained, step=step)
            params = subscriber.sync(params)
            assert all(leaf.devices() == {gpu} for leaf in jax.tree.leaves(params))
            trees.append(params)
            expected.append(trained)
            trained = stepped(trained)
    assert [int(differences(tree, wanted)) for tree, wanted in zip(trees, expected, strict=True)] == [0, 0, 0, 0]


def test_arrays_may_be_donated_while_a_version_is_sent(gpu: Any) -> None:
    """Torch has read them when publish returns, though JAX then writes to the same memory in another stream."""
    store = MemoryStore()
    donating = jax.jit(lambda params: jax.tree.map(lambda x: x * 1.01, params), donate_argnums=0)
    keep = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
    params = model(gpu)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        for step in range(8):
            last = keep(params)
            publisher.publish(params, step=step, wait=False)
            params = donating(params)
        publisher.flush()
        got = subscriber.sync(jax.tree.map(jnp.zeros_like, last))
    assert int(differences(got, last)) == 0
