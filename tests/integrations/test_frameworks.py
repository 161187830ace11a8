"""The protocol with the simplest frameworks there can be: numpy arrays that are written in place, or replaced."""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync.errors import StateError, VerificationError
from pulsesync.integrations.frameworks import FrameworkSubscriber, FrameworkWeights, published_tensors
from pulsesync.publish.publisher import Publisher
from pulsesync.store import MemoryStore
from pulsesync.testing import FrameworkTests
from pulsesync.testing.frameworks import Arrays, FailingWeights, read
from tests.foreign_writes import TENSOR, WRITES, train, weights


class InPlace:
    """Weights that are written in place."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = {name: array.copy() for name, array in arrays.items()}
        self.written: list[str] = []

    def names(self) -> Iterable[str]:
        return self.arrays

    def bits(self, name: str) -> Any:
        return self.arrays[name]

    def write(self, name: str, bits: Any) -> None:
        self.written.append(name)
        self.arrays[name][...] = bits


class Replaced(InPlace):
    """Weights that are replaced, as JAX's are."""

    immutable = True

    def write(self, name: str, bits: Any) -> None:
        self.arrays[name] = bits.copy()


class TestInPlace(FrameworkTests):
    dtypes = (*FrameworkTests.dtypes, "float64", "int64", "float8_e4m3fn")

    def make(self, arrays: Arrays) -> FrameworkWeights:
        return InPlace(arrays)


class TestReplaced(FrameworkTests):
    def make(self, arrays: Arrays) -> FrameworkWeights:
        return Replaced(arrays)


def test_two_tensors_of_one_name_are_refused() -> None:
    class Twice(InPlace):
        def names(self) -> Iterable[str]:
            return ["a", "b", "a"]

    with pytest.raises(StateError, match="two tensors have the name 'a'") as caught:
        published_tensors(Twice({"a": np.ones(3), "b": np.ones(3)}))
    assert caught.value.tensor == "a"


def test_what_is_no_tensor_is_refused() -> None:
    class Lists(InPlace):
        def bits(self, name: str) -> Any:
            return [1.0, 2.0]

    with pytest.raises(StateError, match=r"bits\('a'\) must return .*; got list"):
        published_tensors(Lists({"a": np.ones(2)}))


def test_two_names_for_the_same_memory_are_two_tensors() -> None:
    """Otherwise the next version, in which they differ, would be refused: ties cannot change."""
    store, shared = MemoryStore(), np.arange(6, dtype=np.float32)
    trainer, worker = InPlace({}), InPlace({"a": np.zeros(6, np.float32), "b": np.zeros(6, np.float32)})
    trainer.arrays = {"a": shared, "b": shared}
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        publisher.publish(published_tensors(trainer))
        trainer.arrays = {"a": shared, "b": shared + 1}
        publisher.publish(published_tensors(trainer))
        follower.sync(worker)
    assert worker.arrays["a"].tolist() == shared.tolist()
    assert worker.arrays["b"].tolist() == (shared + 1).tolist()


def test_only_tensors_that_differ_are_written() -> None:
    store, arrays = MemoryStore(), {"a": np.zeros(600), "b": np.zeros(600)}
    worker = InPlace(arrays)
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        publisher.publish(arrays)
        follower.sync(worker)
        assert worker.written == []
        arrays["b"][7] = -0.0
        publisher.publish(arrays)
        follower.sync(worker)
    assert worker.written == ["b"]


def test_weights_that_cannot_be_restored_after_a_failure_are_reported_as_torn() -> None:
    class Broken(InPlace):
        def write(self, name: str, bits: Any) -> None:
            super().write(name, bits)
            if len(self.written) >= 2:
                raise OSError("the device is gone")

    store, worker = MemoryStore(), Broken({"a": np.zeros(60), "b": np.zeros(60)})
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        publisher.publish({"a": np.ones(60), "b": np.ones(60)})
        with pytest.raises(VerificationError, match="between two versions") as caught:
            follower.sync(worker)
    assert caught.value.torn


def test_the_pause_that_is_reported_is_the_time_of_the_writes() -> None:
    class Slow(InPlace):
        def write(self, name: str, bits: Any) -> None:
            super().write(name, bits)
            time.sleep(0.05)

    store = MemoryStore()
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        publisher.publish({"a": np.ones(60), "b": np.ones(60)})
        began = time.perf_counter()
        report = follower.sync(Slow({"a": np.zeros(60), "b": np.zeros(60)}))
        took_s = time.perf_counter() - began
    assert 0.1 <= report.apply_s < took_s
    assert report.fetch_s + report.prepare_s + report.apply_s < took_s


def test_watching_writes_each_version() -> None:
    store, arrays = MemoryStore(), {"a": np.zeros(60)}
    worker = InPlace(arrays)
    seen = []
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        for version in range(3):
            arrays["a"][version] = 1.0
            publisher.publish(arrays)
            report = next(iter(follower.watch(worker)))
            seen.append((report.version, worker.arrays["a"].sum()))
    assert seen == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_failure_while_watching_leaves_the_weights_and_a_sync_completes() -> None:
    store, worker = MemoryStore(), InPlace({"a": np.zeros(60), "b": np.zeros(60)})
    with Publisher(store) as publisher, FrameworkSubscriber(store) as follower:
        publisher.publish({"a": np.ones(60), "b": np.ones(60)})
        with pytest.raises(InterruptedError):
            next(iter(follower.watch(FailingWeights(worker, 1))))
        assert not any(array.any() for array in read(worker).values())
        follower.sync(worker)
    assert all(array.all() for array in worker.arrays.values())


def test_the_program_of_the_page_runs_and_its_class_passes_the_suite_that_the_page_shows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations" / "frameworks.md").read_text()
    _, _, section = page.partition("## Any framework: three methods")
    program, suite = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(program, names)
    assert capsys.readouterr().out == "version 0: the same bits: True\n"
    exec(suite, names)
    tests = names["TestMyWeights"]()
    tests.test_a_write_leaves_exactly_its_bits_and_no_other_tensor_or_name()
    tests.test_a_write_copies()


@pytest.mark.parametrize("kind", [InPlace, Replaced])
def test_every_write_between_two_versions_is_overwritten_by_the_next_sync(kind: type[InPlace]) -> None:
    for codec in ("history", "gap"):
        for name, write in WRITES.items():
            trained, rng, store = weights(ml_dtypes.bfloat16), np.random.default_rng(2), MemoryStore()
            local = kind(trained)
            with Publisher(store, codec=codec) as pub, FrameworkSubscriber(store) as sub:
                for _ in range(2):
                    pub.publish(trained)
                    sub.sync(local)
                    train(trained, rng)
                write(local.arrays[TENSOR])
                pub.publish(trained)
                assert sub.sync(local).path == ("patch",)
                assert all(local.arrays[one].tobytes() == trained[one].tobytes() for one in trained), (name, codec)
                sub.verify(local)
                write(sub._copy[TENSOR])  # the copy, with which patches are decoded
                train(trained, rng)
                pub.publish(trained)
                report = sub.sync(local)
                if not report.repaired:  # what no patch reads passes unnoticed until the weights are counted
                    report = sub.sync(local, verify=True)
                assert TENSOR in report.repaired, (name, codec)
                assert all(local.arrays[one].tobytes() == trained[one].tobytes() for one in trained), (name, codec)
