"""Trees of jax.Array: names, bits, shardings, and the old tree, which stays as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

REASON = "needs JAX: make test-jax runs it"
pytest.importorskip("jax", reason=REASON)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from pulsesync.errors import PulseError, StateError, VerificationError  # noqa: E402
from pulsesync.integrations import jax as adapter  # noqa: E402
from pulsesync.integrations.frameworks import FrameworkWeights  # noqa: E402
from pulsesync.integrations.jax import JaxPublisher, JaxSubscriber, JaxWeights  # noqa: E402
from pulsesync.run.keys import manifest_key  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from pulsesync.testing import FrameworkTests, random_bits  # noqa: E402
from pulsesync.testing.frameworks import Arrays  # noqa: E402

pytestmark = pytest.mark.timeout(240)  # on a machine without cached kernels a test compiles them


def tree_of(arrays: Arrays) -> dict[str, Any]:
    return {name: jax.device_put(array.copy()) for name, array in arrays.items()}


class TestJax(FrameworkTests):
    dtypes = (*FrameworkTests.dtypes, "uint16", "uint32", "int8")

    def make(self, arrays: Arrays) -> FrameworkWeights:
        return JaxWeights(tree_of(arrays))


class TestThroughTorch(FrameworkTests):
    """What arrays on a GPU go through, with torch's tensors in host memory."""

    @pytest.fixture(autouse=True)
    def through_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(adapter, "_through_torch", lambda _: True)
        monkeypatch.setattr(adapter, "_wait_for_torch", lambda _: None)

    def make(self, arrays: Arrays) -> FrameworkWeights:
        with jax.default_device(jax.devices("cpu")[0]):
            return JaxWeights(tree_of(arrays))

    def test_tensors_are_views_of_the_arrays(self) -> None:
        weights = self.make({"a": np.ones((64, 3), np.float32)})
        assert isinstance(weights, JaxWeights)
        assert weights.bits("a").data_ptr() == weights.array("a").unsafe_buffer_pointer()


def test_a_tree_of_which_torch_cannot_read_an_array_goes_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is sharded over several GPUs: a state is in host memory or on GPUs, not in both."""
    params = {"one": jnp.ones(3), "sharded": jnp.ones(4)}
    monkeypatch.setattr(adapter, "_through_torch", lambda array: array.shape == (3,))
    weights = JaxWeights(params)
    assert all(isinstance(weights.bits(name), np.ndarray) for name in weights.names())


def bits_of(array: Any) -> np.ndarray[Any, Any]:
    found = np.asarray(array)
    return found.copy(order="C").view(f"u{found.itemsize}")


def same(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        np.array_equal(bits_of(a), bits_of(b))
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


def policy(seed: int, scale: float = 1.0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "dense": {
            "kernel": (jax.random.normal(keys[0], (128, 64)) * scale).astype(jnp.bfloat16),
            "bias": jnp.zeros(64),
        },
        "layers": [jax.random.normal(keys[1], (8, 16)), (jnp.ones(3), jnp.float32(2.5))],
    }


def stepped(params: Any) -> Any:
    return {**params, "dense": {**params["dense"], "kernel": params["dense"]["kernel"].at[3, :5].mul(1.5)}}


# Names


class Pair(NamedTuple):
    first: Any
    second: Any


def test_names_are_the_paths_of_the_leaves() -> None:
    params = {"b": [jnp.ones(1), {"x": jnp.ones(2)}], "a": Pair(jnp.ones(3), (jnp.ones(4), None))}
    assert list(JaxWeights(params).names()) == ["a.first", "a.second.0", "b.0", "b.1.x"]
    assert list(JaxWeights(jnp.ones(1)).names()) == ["params"]


def test_names_of_flax_modules_are_those_of_their_parameters() -> None:
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    variables = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    assert sorted(JaxWeights(variables).names()) == ["params.bias", "params.kernel"]
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    assert sorted(JaxWeights(state).names()) == ["bias.value", "kernel.value"]
    assert same(JaxWeights(state).tree(), state)


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(StateError, match=r"two leaves of the tree have the name 'a\.b'") as caught:
        JaxWeights({"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    assert caught.value.tensor == "a.b"


# Syncing


def test_a_new_tree_comes_back_and_the_old_one_stays_as_it_was(tmp_path: Path) -> None:
    trained, params = policy(0), policy(1)
    trees, bits = [params], [jax.tree.map(bits_of, params)]
    with JaxPublisher(str(tmp_path)) as publisher, JaxSubscriber(str(tmp_path)) as subscriber:
        for step in range(4):
            assert publisher.publish(trained, step=step).version == step
            params = subscriber.sync(params)
            assert subscriber.version == step
            assert same(params, trained)
            trees.append(params)
            bits.append(jax.tree.map(bits_of, params))
            trained = stepped(trained)
    for tree, before in zip(trees, bits, strict=True):
        assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(bits_of(a), b), tree, before))


def test_leaves_that_did_not_change_are_the_same_objects() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained)
        first = subscriber.sync(policy(1))
        publisher.publish(stepped(trained))
        second = subscriber.sync(first)
        assert subscriber.report is not None
        assert subscriber.report.path == ("patch",)
        assert subscriber.sync(second)["dense"]["kernel"] is second["dense"]["kernel"]
    assert second["dense"]["bias"] is first["dense"]["bias"]
    assert second["layers"][0] is first["layers"][0]
    assert second["dense"]["kernel"] is not first["dense"]["kernel"]


def test_any_tree_of_the_same_shapes_is_brought_to_the_version() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained)
        subscriber.sync(policy(1))
        assert same(subscriber.sync(policy(2)), trained)  # nothing new is published, and another tree is given


def test_a_patch_that_is_damaged_raises_and_a_repeated_sync_succeeds() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained)
        params = subscriber.sync(policy(1))
        publisher.publish(stepped(trained))
        good = store.get(manifest_key(1))
        store.put(manifest_key(1), good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
        with pytest.raises(PulseError):
            subscriber.sync(params)
        assert same(params, trained)
        store.put(manifest_key(1), good)
        assert same(subscriber.sync(params), stepped(trained))


def test_roll_back_returns_the_weights_of_the_version_before() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained)
        first = subscriber.sync(policy(1))
        publisher.publish(stepped(trained))
        second = subscriber.sync(first)
        assert same(subscriber.roll_back(second), trained)
        assert subscriber.version == 0
        with pytest.raises(VerificationError, match="no sync to roll back"):
            subscriber.roll_back(second)


def test_verify_finds_a_tree_that_is_not_the_version() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained)
        params = subscriber.sync(policy(1))
        assert subscriber.verify(params) == publisher.digest
        with pytest.raises(VerificationError, match=r"something else has written to 'dense\.kernel'"):
            subscriber.verify(stepped(params))


def test_watching_yields_a_tree_for_each_version() -> None:
    store, trained = MemoryStore(), policy(0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish(trained, step=0)
        for params in subscriber.watch(policy(1), interval_s=0.01):
            assert same(params, trained)
            assert subscriber.report is not None
            if subscriber.report.step == 2:
                break
            trained = stepped(trained)
            publisher.publish(trained, step=subscriber.report.step + 1)


# Publishing


def test_masters_in_fp32_are_published_as_astype_would_cast_them() -> None:
    store, bits = MemoryStore(), random_bits(np.random.default_rng(5), np.uint32, (1 << 14,))
    masters = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float32)
    with JaxPublisher(store, cast="BF16") as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish({"w": masters})
        got = subscriber.sync({"w": jnp.zeros(1 << 14, jnp.bfloat16)})["w"]
    number = ~np.isnan(np.asarray(masters))
    assert np.array_equal(bits_of(got)[number], bits_of(masters.astype(jnp.bfloat16))[number])
    assert np.isnan(np.asarray(got)[~number].astype(np.float32)).all()


def test_an_array_may_be_donated_after_publish_returns() -> None:
    store = MemoryStore()
    double = jax.jit(lambda x: x * 2, donate_argnums=0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        params = {"w": jnp.arange(4096, dtype=jnp.float32)}
        for step in range(4):
            publisher.publish(params, step=step, wait=False)
            expected = np.asarray(params["w"]).copy()
            params = {"w": double(params["w"])}
        publisher.flush()
        got = subscriber.sync({"w": jnp.zeros(4096)})
    assert np.array_equal(bits_of(got["w"]), expected.view(np.uint32))


def test_one_array_at_two_places_is_two_tensors() -> None:
    """Policy and reference model often start as the same arrays."""
    store, shared = MemoryStore(), jnp.arange(100.0)
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish({"policy": shared, "reference": shared})
        publisher.publish({"policy": shared + 1, "reference": shared})
        got = subscriber.sync({"policy": jnp.zeros(100), "reference": jnp.zeros(100)})
    assert same(got, {"policy": shared + 1, "reference": shared})


def deleted() -> Any:
    array = jnp.ones(3)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: 3.5, "is a float, not a jax.Array"),
        (lambda: np.ones(3), "is a ndarray, not a jax.Array"),
        (lambda: jax.random.key(0), "which cannot be weights"),
        (deleted, "was deleted or donated"),
    ],
)
def test_a_leaf_that_is_no_weights_is_refused_by_name(make: Callable[[], Any], message: str) -> None:
    with JaxPublisher(MemoryStore()) as publisher, pytest.raises(StateError, match=message) as caught:
        publisher.publish({"good": jnp.ones(3), "bad": make()})
    assert caught.value.tensor == "bad"


# Shardings


@pytest.fixture(scope="module")
def mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("x", "y"))


SPECS = [("x", "y"), (None, "y"), ("y", None), (("x", "y"), None), (None, None)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_shards_are_in_their_places_and_the_sharding_is_that_of_the_input(mesh: Any, spec: tuple[Any, ...]) -> None:
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    bits = random_bits(np.random.default_rng(1), np.uint16, (64, 32))
    store, there = MemoryStore(), NamedSharding(mesh, PartitionSpec("y", "x"))
    trained = {"w": jax.device_put(bits.view(jnp.bfloat16), there)}
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        params = {"w": jax.device_put(jnp.zeros((64, 32), jnp.bfloat16), sharding)}
        for _ in range(2):
            publisher.publish(trained)
            params = subscriber.sync(params)
            assert params["w"].sharding == sharding
            assert params["w"].committed
            for shard in params["w"].addressable_shards:
                assert np.array_equal(bits_of(shard.data), bits_of(trained["w"])[shard.index])
            trained = {"w": trained["w"].at[5].set(-0.0)}


@pytest.mark.parametrize("committed", [False, True])
def test_an_array_stays_on_its_device_and_as_free_to_move_as_it_was(committed: bool) -> None:
    store, device = MemoryStore(), jax.devices("cpu")[2]
    with jax.default_device(device):
        params = {"w": jax.device_put(jnp.zeros(64), device if committed else None)}
    assert params["w"].committed == committed
    with JaxPublisher(store) as publisher, JaxSubscriber(store) as subscriber:
        publisher.publish({"w": jnp.ones(64)})
        got = subscriber.sync(params)
    assert got["w"].devices() == {device}
    assert got["w"].committed == committed
