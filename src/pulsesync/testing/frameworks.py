"""One suite for the weights of every framework.

Subclass it, define how weights are made, and pytest runs all of it:

    class TestMyWeights(FrameworkTests):
        def make(self, arrays):
            return MyWeights(my_model_with(arrays))
"""

from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync.errors import PulseError, StateError, VerificationError
from pulsesync.integrations.frameworks import FrameworkSubscriber, FrameworkWeights, published_tensors
from pulsesync.publish.publisher import Publisher
from pulsesync.run.keys import manifest_key
from pulsesync.store import MemoryStore
from pulsesync.testing.updates import mutate, random_bits

Arrays = Mapping[str, np.ndarray[Any, Any]]
SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "odd": (7, 1, 3),
    "prime": (1009,),
    "matrix": (64, 129),
}
UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class FrameworkTests:
    """What `FrameworkWeights` promises, by itself and through a run.

    Attributes:
        dtypes: The dtypes of numpy and ml_dtypes that weights of this framework can have.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "int32", "uint8")

    def make(self, arrays: Arrays) -> FrameworkWeights:
        """New weights of the framework with exactly these bits, in new memory. To be overridden.

        Called twice with the same names, in the trainer and in the worker, it must give the same names of weights. They
        need not be the names of the arrays.
        """
        raise NotImplementedError

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def publisher(self, store: MemoryStore) -> Iterator[Publisher]:
        with Publisher(store) as publisher:
            yield publisher

    @pytest.fixture
    def follower(self, store: MemoryStore) -> Iterator[FrameworkSubscriber]:
        with FrameworkSubscriber(store) as follower:
            yield follower

    # The three methods

    @pytest.mark.parametrize("seed", range(3))
    def test_bits_are_exactly_those_that_the_weights_were_made_with(self, seed: int) -> None:
        arrays = self.arrays(seed)
        assert sorted(plain(one) for one in read(self.make(arrays)).values()) == sorted(map(plain, arrays.values()))

    def test_names_are_unique_and_the_same_in_every_process(self) -> None:
        names = list(self.make(self.arrays(0)).names())
        assert len(set(names)) == len(names) == len(self.arrays(0))
        assert list(self.make(self.arrays(1)).names()) == names
        assert all(isinstance(name, str) and name for name in names)

    def test_a_write_leaves_exactly_its_bits_and_no_other_tensor_or_name(self) -> None:
        weights, other = self.make(self.arrays(0)), self.make(self.arrays(1))
        names, expected = list(weights.names()), read(weights)
        for name in names:
            weights.write(name, duplicate(other.bits(name)))
            expected[name] = read(other)[name]
            assert_same(read(weights), expected)
        assert list(weights.names()) == names

    def test_a_write_copies(self) -> None:
        weights, other = self.make(self.arrays(0)), self.make(self.arrays(1))
        given = {name: duplicate(other.bits(name)) for name in weights.names()}
        for name, bits in given.items():
            weights.write(name, bits)
        expected = read(weights)
        for bits in given.values():
            bits[...] = 0
        assert_same(read(weights), expected)

    # Through a run

    def test_bits_survive_the_way_through_a_run(self, publisher: Publisher, follower: FrameworkSubscriber) -> None:
        worker = self.make(self.zeros())
        for step, arrays in enumerate(self.versions(5)):
            trainer = self.make(arrays)
            publisher.publish(published_tensors(trainer), step=step)
            report = follower.sync(worker)
            assert (report.version, report.step) == (step, step)
            assert report.path == (("anchor",) if step == 0 else ("patch",))
            assert_same(read(worker), read(trainer))
            follower.verify(worker)

    def test_publishing_changes_nothing(self, publisher: Publisher) -> None:
        trainer = self.make(self.arrays(0))
        before = read(trainer)
        publisher.publish(published_tensors(trainer))
        assert_same(read(trainer), before)

    def test_a_sync_without_a_new_version_changes_nothing(
        self, publisher: Publisher, follower: FrameworkSubscriber
    ) -> None:
        trainer, worker = self.make(self.arrays(0)), self.make(self.arrays(0))
        publisher.publish(published_tensors(trainer))
        for path in (("start",), ()):
            assert follower.sync(worker).path == path
            assert_same(read(worker), read(trainer))

    def test_fp32_masters_arrive_in_bf16(self, store: MemoryStore, follower: FrameworkSubscriber) -> None:
        if not {"float32", "bfloat16"} <= set(self.dtypes):
            pytest.skip("this framework does not have both FP32 and BF16")
        masters = {f"master_{name}": normal(shape) for name, shape in SHAPES.items()}
        half = {name: one.astype(ml_dtypes.bfloat16) for name, one in masters.items()}
        worker = self.make({name: np.zeros_like(one) for name, one in half.items()})
        with Publisher(store, cast="BF16") as publisher:
            publisher.publish(published_tensors(self.make(masters)))
        follower.sync(worker)
        assert_same(read(worker), read(self.make(half)))

    def test_a_damaged_patch_leaves_everything_as_it_was(
        self, store: MemoryStore, publisher: Publisher, follower: FrameworkSubscriber
    ) -> None:
        first, second = self.versions(2)
        worker = self.make(self.zeros())
        publisher.publish(published_tensors(self.make(first)))
        follower.sync(worker)
        publisher.publish(published_tensors(self.make(second)))
        key = manifest_key(1)
        good = store.get(key)
        for at in (len(good) // 3, len(good) // 2, len(good) - 9):
            store.put(key, good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            with pytest.raises(PulseError):
                follower.sync(worker)
            assert follower.version == 0
            assert_same(read(worker), read(self.make(first)))
        store.put(key, good)
        follower.sync(worker)
        assert_same(read(worker), read(self.make(second)))

    def test_roll_back_returns_to_the_version_before(self, publisher: Publisher, follower: FrameworkSubscriber) -> None:
        worker = self.make(self.zeros())
        first, second = self.versions(2)
        for arrays in (first, second):
            publisher.publish(published_tensors(self.make(arrays)))
            follower.sync(worker)
        assert follower.roll_back(worker) == 0
        assert_same(read(worker), read(self.make(first)))
        assert follower.sync(worker).version == 1
        assert_same(read(worker), read(self.make(second)))

    @pytest.mark.parametrize("failing", [1, 3])
    def test_a_write_that_fails_leaves_everything_as_it_was(
        self, publisher: Publisher, follower: FrameworkSubscriber, failing: int
    ) -> None:
        trainer, worker = self.make(self.arrays(0)), self.make(self.zeros())
        before = read(worker)
        publisher.publish(published_tensors(trainer))
        with pytest.raises(InterruptedError):
            follower.sync(FailingWeights(worker, failing))
        assert_same(read(worker), before)
        follower.sync(worker)
        assert_same(read(worker), read(trainer))

    def test_what_something_else_wrote_is_found_and_overwritten(
        self, publisher: Publisher, follower: FrameworkSubscriber
    ) -> None:
        trainer, worker = self.make(self.arrays(0)), self.make(self.zeros())
        publisher.publish(published_tensors(trainer))
        follower.sync(worker)
        name = next(iter(worker.names()))
        worker.write(name, duplicate(self.make(self.arrays(1)).bits(name)))
        with pytest.raises(VerificationError, match="something else has written"):
            follower.verify(worker)
        follower.sync(worker)
        assert_same(read(worker), read(trainer))

    def test_weights_that_are_not_those_of_the_run_are_refused_and_stay(
        self, publisher: Publisher, follower: FrameworkSubscriber
    ) -> None:
        publisher.publish(published_tensors(self.make(self.arrays(0))))
        arrays = dict(self.arrays(1))
        arrays.pop(next(iter(arrays)))
        worker = self.make(arrays)
        before = read(worker)
        with pytest.raises(StateError):
            follower.sync(worker)
        assert_same(read(worker), before)

    # Weights to test with

    def arrays(self, seed: int) -> dict[str, np.ndarray[Any, Any]]:
        """Arbitrary bits in every shape and dtype: among them NaN with payloads, infinities, −0.0 and subnormals."""
        rng = np.random.default_rng(seed)
        made = {}
        for label in self.dtypes:
            dtype = np.dtype(getattr(ml_dtypes, label, label))
            for name, shape in SHAPES.items():
                made[f"{label}_{name}"] = random_bits(rng, UNSIGNED[dtype.itemsize], shape).view(dtype)
        return made

    def zeros(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: np.zeros_like(array) for name, array in self.arrays(0).items()}

    def versions(self, count: int) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Arrays of which some elements change from one to the next."""
        rng, current = np.random.default_rng(count), self.arrays(0)
        for _ in range(count):
            yield current
            current = {name: mutate(rng, _unsigned(one), 0.2).view(one.dtype) for name, one in current.items()}


class FailingWeights:
    """Weights of which one write fails, counted from 0, after it is done."""

    def __init__(self, weights: FrameworkWeights, failing: int) -> None:
        self._weights, self._left = weights, failing
        self.names, self.bits = weights.names, weights.bits
        self.immutable = getattr(weights, "immutable", False)

    def write(self, name: str, bits: Any) -> None:
        self._weights.write(name, bits)
        self._left -= 1
        if self._left == -1:
            raise InterruptedError("this write failed, on purpose")


def read(weights: FrameworkWeights) -> dict[str, np.ndarray[Any, Any]]:
    """Copies of all weights, as numpy arrays of unsigned integers."""
    return {name: _unsigned(weights.bits(name)) for name in weights.names()}


def assert_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype, name
        assert np.array_equal(found[name], array), name


def plain(array: np.ndarray[Any, Any]) -> tuple[tuple[int, ...], bytes]:
    return array.shape, array.tobytes()


def duplicate(tensor: Any) -> Any:
    """A copy of an array or tensor that can be written."""
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.detach().clone()


def normal(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.default_rng(3).standard_normal(shape), np.float32)


def _unsigned(tensor: Any) -> np.ndarray[Any, Any]:
    if isinstance(tensor, np.ndarray):
        return tensor.copy(order="C").view(f"u{tensor.itemsize}")
    import torch

    plain = tensor.detach().cpu().clone().contiguous()
    array: np.ndarray[Any, Any] = plain.view(getattr(torch, f"uint{8 * plain.element_size()}")).numpy()
    return array
