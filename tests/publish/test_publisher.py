"""The trainer's end: what is published, when the caller may go on, and what stores that fail leave behind."""

import errno
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import PublishReport, SigningKey
from pulsesync.core.threads import GatedFuture
from pulsesync.errors import (
    AnotherPublisherError,
    ChecksumError,
    ClosedError,
    FormatError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch, signature
from pulsesync.publish import anchors
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.baseline import HostDifference
from pulsesync.run import keys
from pulsesync.run.spool import Outbox
from pulsesync.state.weights import WeightState
from pulsesync.store import LocalStore, MemoryStore, Store
from pulsesync.testing import random_bits
from tests.examples import ROOT, python_path
from tests.processes import Fleet, fleet, told
from tests.publish import endings
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import Training, Watched, down, equal, kept, parts_of, publish_steps, record, version, versions, worker
from tests.tiers import slow

__all__ = ["fleet"]

pytestmark = pytest.mark.usefixtures("parts_as_objects")

CASTS = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


@pytest.fixture
def short_epochs() -> int:
    return 2


def synced(store: Store, held: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """What a new worker gets."""
    held = held if held is not None else worker()
    sub = Subscriber(store, **options)
    assert sub.sync(held).version is not None
    sub.verify()
    return held


@contextmanager
def abandoned(store: Store, spool: Path, **options: Any) -> Iterator[Publisher]:
    """A publisher whose process dies: nobody closes it, and what its store does to it is nobody's concern."""
    with ThreadPoolExecutor(2) as threads, suppress(StoreError):
        yield Publisher(store, spool=spool, executor=threads, **options)


# -- what is published ---------------------------------------------------------------------------------------------


def master_weights(count: int = 3000) -> Any:
    """FP32 of every kind: NaNs with payloads, infinities, subnormals, ties between neighbours."""
    bits = random_bits(np.random.default_rng(0), np.uint32, (count,))
    bits[::3] = bits[::3] & 0xFFFF0000 | 0x8000  # halfway between two BF16
    return bits.view(np.float32)


@pytest.mark.parametrize("dtype", CASTS)
def test_torch_master_weights_arrive_as_torch_casts_them(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    source = torch.from_numpy(master_weights())
    expected = source.to(getattr(torch, CASTS[dtype]))
    held = {"w": torch.zeros(3000, dtype=getattr(torch, CASTS[dtype]))}
    store = MemoryStore()
    with Publisher(store, cast=dtype) as pub:
        pub.publish({"w": torch.zeros(3000)})
        pub.publish({"w": source})
    Subscriber(store).sync(held)
    assert torch.equal(held["w"].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", CASTS)
def test_numpy_master_weights_arrive_as_numpy_casts_them(dtype: str) -> None:
    target = getattr(ml_dtypes, CASTS[dtype], None) or np.dtype(CASTS[dtype])
    with np.errstate(all="ignore"):
        expected = {"w": master_weights().astype(target)}
    store = MemoryStore()
    with Publisher(store, cast=dtype) as pub:
        pub.publish({"w": master_weights()})
    held = synced(store, {"w": np.zeros(3000, target)})
    assert equal(held, expected)


def test_only_fp32_is_cast_and_patterns_say_where() -> None:
    weights: dict[str, np.ndarray] = {
        "layer.weight": np.ones(4, np.float32),
        "layer.scale": np.ones(4, np.float32),
        "layer.half": np.ones(4, np.float16),
        "layer.eight": np.ones(4, ml_dtypes.float8_e4m3fn),
        "layer.count": np.ones(4, np.int32),
    }
    store = MemoryStore()
    with Publisher(store, cast={"*.scale": "", "*.half": "", "layer.*": "BF16"}) as pub:
        pub.publish(weights)
    expected = {**weights, "layer.weight": weights["layer.weight"].astype(ml_dtypes.bfloat16)}
    assert equal(synced(store, {name: np.zeros_like(array) for name, array in expected.items()}), expected)


@pytest.mark.parametrize("cast", ["INT4", "F32", 16, np.int8, {"*": "bf17"}, {"w": []}, "torch.float32"], ids=str)
def test_a_cast_to_what_is_not_known_is_refused_by_the_constructor(cast: Any) -> None:
    with pytest.raises(ValueError, match="cast must be one of 'BF16'"):
        Publisher(MemoryStore(), cast=cast)


@pytest.mark.parametrize("wanted", CASTS)
def test_a_cast_is_named_as_the_format_or_a_framework_names_it(wanted: str) -> None:
    torch = pytest.importorskip("torch")
    name = CASTS[wanted]
    array = getattr(ml_dtypes, name, None) or getattr(np, name)
    for cast in (wanted, wanted.lower(), name, f"torch.{name}", getattr(torch, name), array, np.dtype(array)):
        assert Publisher(MemoryStore(), cast=cast).cast == {"*": wanted}
        assert Publisher(MemoryStore(), cast={"norm": "", "*": cast}).cast == {"norm": "", "*": wanted}


@pytest.mark.parametrize(
    ("dtype", "cast"), [(np.float16, "BF16"), (ml_dtypes.bfloat16, "F16"), (np.float16, "F8_E5M2")]
)
def test_a_cast_that_would_not_happen_is_refused(dtype: Any, cast: str) -> None:
    store, weights = MemoryStore(), {"ids": np.zeros(3, np.int32), "w": np.ones(4, dtype)}
    with (
        Publisher(store, cast=cast) as pub,
        pytest.raises(StateError, match=r"cast='\w+' converts FP32 only") as caught,
    ):
        pub.publish(weights)
    assert caught.value.tensor == "w"
    assert versions(store) == []
    with Publisher(store, cast={"w": "", "*": cast}) as pub:  # as the error says
        pub.publish(weights)
    with Publisher(MemoryStore(), cast="F16" if dtype is np.float16 else "BF16") as pub:
        pub.publish(weights)


def test_tensors_of_64_bits_are_published_as_they_are_whatever_the_cast() -> None:
    store = MemoryStore()
    with Publisher(store, cast="BF16") as pub:  # as 0.1.0 does: buffers such as inv_freq
        pub.publish({"inv_freq": np.ones(4), "w": np.ones(4, np.float32)})
    with Subscriber(store) as sub:
        sub.sync({"inv_freq": np.zeros(4), "w": np.zeros(4, ml_dtypes.bfloat16)})


def test_weights_that_differ_from_the_last_version_are_logged_though_their_step_is_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    for step in (0, 1):
        with Publisher(store) as pub:
            assert "differ from version" not in caplog.text
            pub.publish({"w": np.random.default_rng(step).standard_normal(100).astype(np.float16)}, step=step)
    assert "100 of 100 weights differ from version 0, the last one of the run at" in caplog.text


@pytest.mark.parametrize("pieces", [2, np.int64(2), (3, 6), np.array([3, 6])], ids=repr)
def test_a_grid_may_have_numbers_of_numpy(pieces: Any) -> None:
    with Publisher(MemoryStore(), grid={"w": (pieces, 1)}, min_tile=1) as pub:
        pub.publish({"w": np.ones((8, 8), np.float16)})


@pytest.mark.parametrize(
    ("cast", "dtype", "some", "warns"),
    [
        (None, np.float32, 0.9, 1),
        (None, np.float32, 0.1, 0),
        ({}, np.float32, 0.9, 0),
        ("BF16", np.float32, 0.9, 0),
        (None, ml_dtypes.bfloat16, 0.9, 0),
    ],
)
def test_fp32_of_which_most_weights_change_is_warned_of_once(
    cast: Any, dtype: Any, some: float, warns: int, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"w": np.ones(1000, dtype), "ids": np.zeros(300, np.int32)}
    with Publisher(MemoryStore(), cast=cast) as pub:
        for step in range(4):
            pub.publish(weights, step=step)
            weights["w"][: int(1000 * some)] += 1
    found = [one.getMessage() for one in caplog.records]
    assert ["900 of 1,300 weights (69.23 %) changed in version 1" in one for one in found] == [True] * warns
    assert all("Pass cast='BF16' to Publisher (pulse publish: --cast BF16) if workers use BF16" in one for one in found)


def test_casting_makes_no_second_copy_of_the_model() -> None:
    weights = {f"layer.{i}": np.zeros((1 << 20,), np.float32) for i in range(32)}
    full = 2 * sum(w.size for w in weights.values())
    with Publisher(MemoryStore(), cast="BF16") as pub:
        pub.publish(weights)
        for array in weights.values():
            array[:100] = 1.5
        tracemalloc.start()
        try:
            pub.publish(weights)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < full / 2


def test_of_the_first_state_one_copy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    weights = {f"layer.{i}": np.zeros((1 << 20,), np.float32) for i in range(8)}
    full = 2 * sum(w.size for w in weights.values())
    with Publisher(MemoryStore(), cast="BF16") as pub:
        pub.publish({"a": np.zeros(64, np.float32)})  # compiles, which takes more memory than the weights
    with Publisher(MemoryStore(), cast="BF16") as pub:
        tracemalloc.start()
        try:
            pub.publish(weights)
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert full <= now < 1.5 * full
    assert peak < 2.5 * full


def test_tied_weights_are_sent_once() -> None:
    store, memory = MemoryStore(), random_bits(np.random.default_rng(0), np.uint16, (50, 40)).view(np.float16)
    with Publisher(store) as pub:
        assert pub.publish({"embed": memory, "head": memory}).total == 2000
        memory[3] = 1
        assert pub.publish({"embed": memory, "head": memory}).changed <= 40
    apart = synced(store, {"embed": np.zeros_like(memory), "head": np.zeros_like(memory)})
    assert equal(apart, {"embed": memory, "head": memory})
    assert equal(synced(store, {"embed": np.zeros_like(memory)}), {"embed": memory})


def test_buffers_travel_as_they_are() -> None:
    state = {"steps": np.array(7, np.int64), "mask": np.array([True, False]), "table": np.arange(9, dtype=np.uint8)}
    store = MemoryStore()
    with Publisher(store, cast="BF16") as pub:
        pub.publish({name: np.zeros_like(array) for name, array in state.items()})
        pub.publish(state)
    assert equal(synced(store, {name: np.zeros_like(array) for name, array in state.items()}), state)


@pytest.mark.parametrize("cast", [None, "BF16"])
def test_a_tensor_that_is_not_contiguous_is_published_in_its_own_order(cast: str | None) -> None:
    memory = np.arange(12, dtype=np.float32).reshape(3, 4)
    store, held = MemoryStore(), {"w": np.zeros((4, 3), ml_dtypes.bfloat16 if cast else np.float32)}
    with Publisher(store, cast=cast) as pub:
        pub.publish({"w": memory.T})
        memory[1, 2] = 50
        pub.publish({"w": memory.T})
    assert synced(store, held)["w"].astype(np.float32).tolist() == memory.T.tolist()


@pytest.mark.parametrize("what", ["gone", "new", "shape", "dtype"])
@pytest.mark.parametrize("wait", [True, False])
def test_tensors_that_change_are_refused_by_name_and_the_run_goes_on(what: str, wait: bool) -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        other, name = dict(training.weights), "norm"
        if what == "gone":
            del other[name]
        elif what == "new":
            name = "other"
            other[name] = np.zeros(3)
        else:
            other[name] = other[name].reshape(5, 10) if what == "shape" else other[name].view(np.int16)
        with pytest.raises(StateError, match=name) as caught:
            pub.publish(other, wait=wait)  # type: ignore[call-overload]
        assert caught.value.tensor == name
        assert "to a new location" in str(caught.value)
        training.step()
        assert pub.publish(training.weights).version == 1
    assert equal(synced(store), training.weights)


def test_ties_that_change_are_refused() -> None:
    a, c = np.zeros(4, np.float32), np.ones(4, np.float32)
    with Publisher(MemoryStore()) as pub:
        pub.publish({"a": a, "c": c, "z": a})
        with pytest.raises(StateError, match="'z' is tied to another tensor"):
            pub.publish({"a": a, "c": c, "z": c})


@pytest.mark.parametrize("step", [-1, 1 << 60, True, 1.5, "7"], ids=repr)
def test_a_step_that_no_record_can_hold_does_not_spoil_the_run(step: Any) -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        with pytest.raises((TypeError, ValueError)):
            pub.publish(training.weights, step=step)
        training.step()
        pub.publish(training.weights)
    assert equal(synced(store), training.weights)


def test_a_step_may_be_a_numpy_integer_and_may_go_back() -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        for step in (np.int64(3), 9, 4):
            pub.publish({"w": np.zeros(3)}, step=step)  # type: ignore[arg-type]
    assert [version(store, n).step for n in range(3)] == [3, 9, 4]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="contxt"):
        Publisher(MemoryStore(), codec="contxt")


def test_files_travel_with_every_version() -> None:
    store, config = MemoryStore(), b'{"layers": 3}'
    with Publisher(store, files={"config.json": config, "tokenizer.json": b"{}"}) as pub:
        pub.publish(Training().weights)
        pub.publish(Training().weights)
    for number in range(2):
        refs = {file.name: file for file in version(store, number).files}
        assert refs.keys() == {"config.json", "tokenizer.json"}
        assert store.get(keys.file_key(refs["config.json"].id)) == config
        assert refs["config.json"].id == hashlib.sha256(config).hexdigest()


def test_a_run_that_is_taken_up_keeps_its_files() -> None:
    store = MemoryStore()
    publish_steps(store, 1, files={"config.json": b"{}"})
    publish_steps(store, 1)
    assert [file.name for file in version(store, 1).files] == ["config.json"]


def test_a_file_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.publish.companions.MAX_FILE_BYTES", 10)
    with Publisher(MemoryStore(), files={"a": bytes(11)}) as pub, pytest.raises(ValueError, match="11 bytes"):
        pub.publish(Training().weights)


@pytest.mark.parametrize(
    "names",
    [["größe.json"], ["a b"], ["a/b"], [".hidden"], ["a."], ["a" * 129], ["a.json", "A.json"], range(257)],
    ids=lambda names: str(names)[:20],
)
def test_files_that_a_record_cannot_name_are_refused_before_anything_is_written(names: Iterable[object]) -> None:
    store = MemoryStore()
    with (
        Publisher(store, files={str(name): b"" for name in names}) as pub,
        pytest.raises(ValueError, match=r"1 to 128 English letters|differ in upper and lower case|256 files"),
    ):
        pub.publish(Training().weights, step=0)
    assert list(store.list("manifests/")) == list(store.list("files/")) == []


def test_a_file_replaces_that_of_the_run_with_the_same_name_in_another_case() -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 1, training, files={"Vocabulary": b"first", "config.json": b"{}"})
    with Publisher(store, files={"vocabulary": b"second"}) as pub:
        pub.publish(training.weights, step=1)
    assert [file.name for file in version(store, 1).files] == ["config.json", "vocabulary"]


class Config:
    """What the contract asks of a model's configuration: that it can write itself."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def to_json_string(self) -> str:
        return json.dumps(self.values)


class Model(dict[str, Any]):
    """Weights with the configurations that a Hugging Face model has."""

    config = Config(model_type="llama")
    generation_config = Config(top_k=7)


def files_of(store: Store, number: int) -> dict[str, bytes]:
    return {file.name: store.get(keys.file_key(file.id)) for file in version(store, number).files}


def test_the_configuration_of_a_model_travels_with_it() -> None:
    store = MemoryStore()
    publish_steps(store, 1)
    assert files_of(store, 0) == {}
    with Publisher(store) as pub:
        pub.publish(Model(Training().weights))
    assert files_of(store, 1) == {"config.json": b'{"model_type": "llama"}', "generation_config.json": b'{"top_k": 7}'}


def test_files_that_are_given_win_over_the_configuration_of_a_model() -> None:
    store = MemoryStore()
    with Publisher(store, files={"config.json": b"mine", "tokenizer.json": b"{}"}) as pub:
        pub.publish(Model(Training().weights))
    expected = {"config.json": b"mine", "generation_config.json": b'{"top_k": 7}', "tokenizer.json": b"{}"}
    assert files_of(store, 0) == expected


def test_of_a_run_that_is_resumed_files_are_replaced_by_the_configuration_of_the_model_and_by_those_given() -> None:
    store = MemoryStore()
    publish_steps(store, 1, files={"config.json": b"first", "tokenizer.json": b"{}", "vocabulary": b"a"})
    with Publisher(store) as pub:
        pub.publish(Model(Training().weights))
    expected = {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b'{"top_k": 7}',
        "tokenizer.json": b"{}",
        "vocabulary": b"a",
    }
    assert files_of(store, 1) == expected
    with Publisher(store, files={"config.json": b"mine", "vocabulary": b"b"}) as pub:
        pub.publish(Model(Training().weights))
    assert files_of(store, 2) == {**expected, "config.json": b"mine", "vocabulary": b"b"}


def test_what_cannot_write_itself_is_no_configuration() -> None:
    class Other(dict[str, Any]):
        config = "llama"

    store = MemoryStore()
    with Publisher(store) as pub:
        pub.publish(Other(Training().weights))
    assert files_of(store, 0) == {}


def test_a_configuration_that_is_too_large_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.publish.companions.MAX_FILE_BYTES", 10)
    with Publisher(MemoryStore()) as pub, pytest.raises(ValueError, match=r"config\.json'\] has 23 bytes"):
        pub.publish(Model(Training().weights))


def test_a_file_may_be_given_as_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"vocab": 3}')
    store, files = MemoryStore(), {"tokenizer.json": tmp_path / "tokenizer.json"}
    publish_steps(store, 1, files=files)
    assert files_of(store, 0) == {"tokenizer.json": b'{"vocab": 3}'}
    monkeypatch.setattr("pulsesync.publish.companions.MAX_FILE_BYTES", 10)
    with pytest.raises(ValueError, match=r"tokenizer\.json'\] has 12 bytes"):
        publish_steps(MemoryStore(), 1, files=files)


def test_a_file_that_is_neither_bytes_nor_a_path_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"files\['tokenizer\.json'\] must be bytes"):
        publish_steps(MemoryStore(), 1, files={"tokenizer.json": "tokenizer.json"})


# -- the order of things -------------------------------------------------------------------------------------------


def test_a_version_is_written_body_first_and_head_last() -> None:
    store, training = Watched(), Training()
    with Publisher(store, codec="gap") as pub:
        pub.publish(training.weights)
        training.step()
        store.writes.clear()
        pub.publish(training.weights)
    manifest = version(store, 1)
    assert store.writes == [
        *(keys.part_key(part.id) for part in manifest.parts),
        keys.start_key(manifest.digest),
        keys.manifest_key(1),
        "head",
    ]


def test_a_version_from_which_a_history_is_needed_is_no_start() -> None:
    store, training = Watched(), Training()
    with Publisher(store, codec="history") as pub:
        pub.publish(training.weights)
        training.step()
        pub.publish(training.weights)
    assert version(store, 1).history is not None
    assert [key for key in store.writes if key.startswith("starts/")] == [keys.start_key(version(store, 0).digest)]


def test_the_first_publish_waits_for_its_anchor() -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        pub.publish(Training().weights)
        assert equal(synced(store), Training().weights)


def test_a_first_publish_that_does_not_wait_leaves_its_anchor_behind() -> None:
    store, go = Watched(), threading.Event()
    store.before = lambda verb, key: go.wait(10) if key.startswith("parts/") else None
    held, sub = worker(), Subscriber(store)
    with Publisher(store) as pub:
        future = pub.publish(Training().weights, wait=False)
        assert future.result(10).version == 0
        with pytest.raises(NothingPublishedError, match="anchor"):  # it is there, and cannot be reached yet
            sub.sync(held)
        go.set()
        pub.flush()
        assert sub.sync(held).version == 0
    assert equal(held, Training().weights)


def test_the_publisher_says_where_it_is() -> None:
    store, training = MemoryStore(), Training()
    with Publisher(store) as pub:
        assert (pub.version, pub.run) == (None, None)
        pub.publish(training.weights)
        pub.publish(training.weights)
        assert (pub.version, pub.run) == (1, version(store, 0).run)


# -- not waiting ---------------------------------------------------------------------------------------------------


class Gate:
    """A store whose bodies wait until the test opens it."""

    def __init__(self) -> None:
        self.store, self.open, self.reached = Watched(), threading.Event(), threading.Event()
        self.open.set()
        self.store.before = self._wait

    def _wait(self, verb: str, key: str) -> None:
        if verb == "put" and key.startswith("parts/") and not self.open.is_set():
            self.reached.set()
            assert self.open.wait(20)

    def close(self) -> None:
        self.reached.clear()
        self.open.clear()


def test_what_arrives_is_what_was_there_at_the_call() -> None:
    training, gate = Training(), Gate()
    with Publisher(gate.store) as pub:
        pub.publish(training.weights)
        for _ in range(4):
            gate.close()
            training.step()
            good = kept(training.weights)
            future = pub.publish(training.weights, wait=False)
            for array in training.weights.values():
                array.view(np.uint16)[...] = 0xABCD  # the optimizer is quick
            gate.open.set()
            future.result(10)
            assert equal(synced(gate.store), good)


def test_the_first_state_too_may_change_right_after_the_call() -> None:
    training, gate = Training(), Gate()
    gate.close()
    with Publisher(gate.store) as pub:
        pub.publish(training.weights, wait=False)
        for array in training.weights.values():
            array[...] = 0
        gate.open.set()
        pub.flush()
    assert equal(synced(gate.store), Training().weights)


def test_while_a_version_is_under_way_ten_more_become_one() -> None:
    training, gate = Training(), Gate()
    with Publisher(gate.store) as pub:
        pub.publish(training.weights)
        gate.close()
        training.step()
        first = pub.publish(training.weights, step=1, wait=False)
        assert gate.reached.wait(10)
        later = []
        for step in range(2, 12):
            training.step()
            later.append(pub.publish(training.weights, step=step, wait=False))
            assert not later[-1].done()
        gate.open.set()
        assert (first.result(10).version, first.result().step, first.result().coalesced) == (1, 1, 0)
        reports = [future.result(10) for future in later]
    assert {(r.version, r.step, r.coalesced) for r in reports} == {(2, 11, 9)}
    assert versions(gate.store) == [0, 1, 2]
    assert equal(synced(gate.store), training.weights)


def test_nothing_queues_without_bound() -> None:
    weights, gate = {"w": np.zeros(1 << 16, np.float32)}, Gate()
    with Publisher(gate.store, codec="gap") as pub:
        pub.publish(weights)
        gate.close()
        weights["w"][:] = 1
        pub.publish(weights, wait=False)
        assert gate.reached.wait(10)
        sizes = []
        tracemalloc.start()
        try:
            for step in range(20):
                weights["w"][:] = step + 2
                pub.publish(weights, wait=False)
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        gate.open.set()
    assert sizes[-1] < sizes[1] + weights["w"].nbytes / 2
    assert versions(gate.store) == [0, 1, 2]
    assert synced(gate.store, {"w": np.zeros(1 << 16, np.float32)})["w"][0] == 21


def test_a_change_that_is_taken_back_while_it_is_sent_arrives_taken_back() -> None:
    weights, gate = {"w": np.zeros(100, np.float32)}, Gate()
    with Publisher(gate.store) as pub:
        pub.publish(weights)
        gate.close()
        weights["w"][:50] = 1
        pub.publish(weights, wait=False)
        assert gate.reached.wait(10)
        weights["w"][:40] = 0
        weights["w"][90:] = 2
        last = pub.publish(weights, wait=False)
        gate.open.set()
        assert last.result(10).changed == 50
    assert equal(synced(gate.store, {"w": np.zeros(100, np.float32)}), weights)


@pytest.mark.parametrize("codec", ["auto", "history", *(slow(codec) for codec in ("context", "gap", "dense"))])
def test_steps_published_in_a_hurry_arrive_whatever_the_codec(codec: Any) -> None:
    training, store, held = Training(), MemoryStore(), worker()
    sub = Subscriber(store)
    with Publisher(store, codec=codec) as pub:
        for step in range(15):
            future = pub.publish(training.weights, step=step, wait=False)
            if step % 7 == 0:
                future.result(10)
                sub.sync(held, wait_s=10)  # the first anchor is written in the background
            last = kept(training.weights)
            training.step()
    sub.sync(held)
    sub.verify()
    assert equal(held, last)


def test_giving_up_on_a_future_stops_nothing() -> None:
    training, gate = Training(), Gate()
    with Publisher(gate.store) as pub:
        pub.publish(training.weights)
        gate.close()
        training.step()
        futures = [pub.publish(training.weights, wait=False)]
        assert gate.reached.wait(10)
        training.step()
        futures += [pub.publish(training.weights, wait=False) for _ in range(2)]
        for future in futures[:2]:
            future.cancel()
        gate.open.set()
        assert futures[2].result(5).version == 2
        training.step()
        assert pub.publish(training.weights, wait=False).result(5).version == 3
    assert equal(synced(gate.store), training.weights)


def test_without_coalescing_every_step_is_a_version() -> None:
    """Three steps over a store that takes 0.05 s a body; coalesced, they would be two versions."""
    training, store, states = Training(), Watched(), []
    with Publisher(store) as pub:
        pub.publish(training.weights)
        store.before = lambda verb, key: time.sleep(0.05) if key.startswith("parts/") else None
        futures = []
        for step in (1, 2, 3):
            training.step()
            states.append(kept(training.weights))
            futures.append(pub.publish(training.weights, step=step, wait=False, coalesce=False))
        assert [(f.result(10).version, f.result().coalesced) for f in futures] == [(1, 0), (2, 0), (3, 0)]
    sub, held = Subscriber(store), worker()
    for number, state in enumerate(states, 1):
        assert sub.sync(held, version=number).step == number
        assert equal(held, state)


@pytest.mark.parametrize("coalesce", [True, False])
def test_a_step_that_is_not_coalesced_stays_alone_whatever_follows_and_holds_up_the_next(coalesce: bool) -> None:
    training, gate = Training(), Gate()
    with Publisher(gate.store) as pub, ThreadPoolExecutor(1) as trainer:
        pub.publish(training.weights)
        gate.close()
        training.step()
        pub.publish(training.weights, step=1, wait=False)
        assert gate.reached.wait(10)
        training.step()
        alone = pub.publish(training.weights, step=2, wait=False, coalesce=False)
        training.step()
        later = trainer.submit(pub.publish, training.weights, step=3, wait=False, coalesce=coalesce)
        with pytest.raises(TimeoutError):
            later.result(0.05)  # one version is being sent and one is queued: no third is kept in memory
        gate.open.set()
        assert (alone.result(10).version, alone.result().coalesced) == (2, 0)
        assert later.result(10).result(10).version == 3
    assert equal(synced(gate.store), training.weights)


@pytest.mark.parametrize("every", [2, "auto"])
def test_every_step_alone_and_several_in_a_version_exclude_each_other(every: Any) -> None:
    with Publisher(MemoryStore(), publish_every=every) as pub, pytest.raises(ValueError, match="publish_every"):
        pub.publish(Training().weights, coalesce=False)


def test_closing_finishes_what_is_under_way() -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(training.weights, wait=False)
        training.step()
        future = pub.publish(training.weights, wait=False)
    assert future.done()
    assert equal(synced(store), training.weights)


def test_an_executor_that_was_given_is_left_running() -> None:
    with ThreadPoolExecutor(2) as pool:
        with Publisher(MemoryStore(), executor=pool) as pub:
            pub.publish(Training().weights)
            pub.publish(Training().weights)
        assert pool.submit(int, "7").result() == 7


# -- how many steps a version has ----------------------------------------------------------------------------------


def test_so_many_steps_go_into_a_version() -> None:
    training, store = Training(), MemoryStore()
    reports: list[PublishReport] = []
    with Publisher(store, publish_every=3) as pub:
        for step in range(8):
            reports.append(pub.publish(training.weights, step=step))
            if reports[-1].version == 2:
                last = kept(training.weights)
            training.step()
    assert [r.version for r in reports] == [0, None, None, 1, None, None, 2, None]
    assert [(r.step, r.coalesced) for r in reports if r.version] == [(3, 2), (6, 2)]
    assert equal(synced(store), last)


def test_a_step_that_is_skipped_reads_and_writes_nothing() -> None:
    training, store = Training(), Watched()
    with Publisher(store, publish_every=3) as pub:
        pub.publish(training.weights)
        store.writes.clear()
        store.gets.clear()
        report = pub.publish({}, step=5, wait=False).result()
        assert (report.version, report.step, report.payload_bytes) == (None, 5, 0)
        assert (store.writes, store.gets) == ([], [])


def test_now_publishes_whatever_was_said() -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store, publish_every=100) as pub:
        for step in range(3):
            pub.publish(training.weights, step=step)
            training.step()
        report = pub.publish(training.weights, step=3, now=True)
    assert (report.version, report.coalesced) == (1, 2)
    assert equal(synced(store), training.weights)


@pytest.mark.parametrize(("steps", "now", "missing"), [(8, False, 3), (5, False, 0), (8, True, 0), (1, False, 0)])
def test_closing_reports_the_steps_that_are_in_no_version(
    caplog: pytest.LogCaptureFixture, steps: int, now: bool, missing: int
) -> None:
    training = Training()
    with Publisher(MemoryStore(), publish_every=4) as pub:
        for step in range(steps):
            pub.publish(training.weights, step=step, now=now and step == steps - 1)
            training.step()
    expected = (
        f"The last {missing} steps are in no version, due to publish_every=4. Publish the last step with now=True."
    )
    assert caplog.messages == ([expected] if missing else [])


def test_on_a_slow_link_auto_folds_steps_and_not_more_than_it_may() -> None:
    training, store, futures = Training(), Watched(), []
    with Publisher(store, publish_every="auto", max_behind=4) as pub:
        pub.publish(training.weights)
        store.before = lambda verb, key: time.sleep(0.15) if key.startswith("parts/") else None
        pub.publish(training.weights)  # which shows how slow the link is
        for step in range(12):
            training.step()
            futures.append(pub.publish(training.weights, step=step, wait=False))
    skipped = [future.result().version is None for future in futures]
    folded = [len(list(group)) for is_skipped, group in groupby(skipped) if is_skipped]
    assert max(folded) == 3  # and the step after them is sent
    assert len(versions(store)) < 8


def test_what_is_no_pace_is_refused() -> None:
    with pytest.raises(ValueError, match="publish_every"):
        Publisher(MemoryStore(), publish_every=0)


# -- stores that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["parts/", "manifests/"])
@pytest.mark.parametrize("wait", [True, False])
def test_after_a_failed_publish_the_next_covers_both(at: str, wait: bool) -> None:
    training, store, held = Training(), Watched(), worker()
    sub = Subscriber(store)
    with Publisher(store) as pub:
        for _ in range(2):
            pub.publish(training.weights)
            training.step()
        store.fail_at(at)
        with pytest.raises(StoreError, match="line is down"):
            _ = pub.publish(training.weights) if wait else pub.publish(training.weights, wait=False).result(10)
        store.fail_at()
        assert sub.sync(held).version == 1
        training.step()
        assert pub.publish(training.weights).version == 2
    sub.sync(held)
    sub.verify()
    assert equal(held, training.weights)


def test_a_future_that_failed_holds_none_of_the_memory_it_took() -> None:
    training, store = Training(), Watched()
    held: list[weakref.ref[Any]] = []

    def fail(verb: str, key: str) -> None:
        mine = np.zeros(3)
        if key.startswith("parts/"):
            held.append(weakref.ref(mine))
            down(key)

    with Publisher(store) as pub:
        pub.publish(training.weights)
        training.step()
        store.before = fail
        failed = pub.publish(training.weights, wait=False)
        assert isinstance(failed.exception(10), StoreError)
        store.fail_at()
        assert held
        assert all(one() is None for one in held)


@pytest.mark.parametrize("at", ["layouts/", "starts/", "manifests/"])
def test_a_failed_first_publish_is_made_again(at: str) -> None:
    training, store = Training(), Watched()
    with Publisher(store) as pub:
        store.fail_at(at)
        with pytest.raises(StoreError, match="line is down"):
            pub.publish(training.weights)
        store.fail_at()
        assert pub.publish(training.weights).version == 0
    assert equal(synced(store), training.weights)


def test_after_a_first_anchor_that_failed_workers_need_not_wait_for_the_next_epoch() -> None:
    training, store = Training(), Watched()
    with Publisher(store) as pub:
        store.before = lambda verb, key: unavailable(key) if key.startswith("parts/") else None
        with pytest.raises(StoreError, match="unavailable"):
            pub.publish(training.weights)
        store.fail_at()
        training.step()
        assert pub.publish(training.weights).version == 1
        pub.flush()
        assert equal(synced(store), training.weights)


def test_closing_after_an_anchor_failed_says_so_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Watched()
    pub = Publisher(store)
    store.fail_at("parts/")
    with pytest.raises(StoreError):
        pub.publish(Training().weights)
    assert list(tmp_path.iterdir())
    with pytest.raises(StoreError):
        pub.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("first", [True, False])
def test_a_head_that_cannot_be_written_does_not_stop_the_run(first: bool) -> None:
    training, store = Training(), Watched()
    with Publisher(store) as pub:
        if not first:
            pub.publish(training.weights)
            training.step()
        store.before = lambda verb, key: down(key) if (verb, key) == ("put", "head") else None
        pub.publish(training.weights)
        store.fail_at()
        assert equal(synced(store), training.weights)
        training.step()
        pub.publish(training.weights)
    assert equal(synced(store), training.weights)


class Unanswered:
    """A store that carries out the next create of a version and then says that it failed."""

    def __init__(self) -> None:
        self.store, self.times = Watched(), 0
        self.store.after = self._fail

    def _fail(self, verb: str, key: str) -> None:
        if verb == "create" and key.startswith("manifests/") and self.times:
            self.times -= 1
            down(key)


@pytest.mark.parametrize("more", [1, 3])
def test_a_commit_that_was_not_answered_is_settled(more: int) -> None:
    training, flaky, held = Training(), Unanswered(), worker()
    sub = Subscriber(flaky.store)
    with Publisher(flaky.store) as pub:
        for _ in range(2):
            pub.publish(training.weights)
            sub.sync(held)
            training.step()
        flaky.times = more
        for _ in range(more):
            with pytest.raises(StoreError) as caught:
                pub.publish(training.weights)
            assert not isinstance(caught.value, AnotherPublisherError)
            training.step()
        assert pub.publish(training.weights).version == 2 + more
    sub.sync(held)
    sub.verify()
    assert equal(held, training.weights)
    assert versions(flaky.store) == list(range(3 + more))


def test_a_first_commit_that_was_not_answered_is_settled() -> None:
    training, flaky = Training(), Unanswered()
    flaky.times = 1
    with Publisher(flaky.store) as pub:
        with pytest.raises(StoreError):
            pub.publish(training.weights)
        training.step()
        pub.publish(training.weights)
        pub.flush()
        assert equal(synced(flaky.store), training.weights)


def test_what_is_pending_when_a_commit_goes_unanswered_follows_it() -> None:
    training, flaky = Training(), Unanswered()
    go, reached = threading.Event(), threading.Event()
    with Publisher(flaky.store) as pub:
        pub.publish(training.weights)
        flaky.times = 1

        def hold(verb: str, key: str) -> None:
            if key == keys.manifest_key(1):
                reached.set()
                go.wait(10)

        flaky.store.before = hold
        training.step()
        first = pub.publish(training.weights, wait=False)
        assert reached.wait(10)
        training.step()
        second = pub.publish(training.weights, wait=False)
        go.set()
        assert isinstance(first.exception(10), StoreError)
        assert second.result(10).version == 2
    assert equal(synced(flaky.store), training.weights)


def test_while_it_cannot_be_known_whether_a_version_was_committed_nothing_is() -> None:
    training, flaky = Training(), Unanswered()
    with Publisher(flaky.store) as pub:
        pub.publish(training.weights)
        flaky.times = 1
        flaky.store.before = lambda verb, key: down(key) if (verb, key) == ("get", keys.manifest_key(1)) else None
        for _ in range(3):
            training.step()
            with pytest.raises(StoreError):
                pub.publish(training.weights)
        flaky.store.fail_at()
        assert versions(flaky.store) == [0, 1]
        assert pub.publish(training.weights).version == 2
    assert equal(synced(flaky.store), training.weights)


def test_a_trainer_interrupted_while_it_waits_goes_on_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        training.step()

        def interrupted(future: Future[Any], timeout: float | None = None) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pub.publish(training.weights)
        monkeypatch.undo()
        training.step()
        pub.publish(training.weights)
    assert equal(synced(store), training.weights)


@pytest.mark.parametrize(("room", "verb"), [(WeightState, "commit"), (HostDifference, "after")])
def test_a_base_that_failed_to_move_to_a_committed_version_is_moved_by_the_next(
    room: type, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is there when memory lacks for what follows; another version waits to be compared with it."""
    training, store, states, move = Training(), Watched(), [], getattr(room, verb)
    failed: list[tuple[Any, ...]] = []
    go, reached = threading.Event(), threading.Event()

    def fail_once(*args: Any) -> Any:
        if not failed:
            failed.append(args)
            raise MemoryError
        return move(*args)

    with Publisher(store) as pub:
        pub.publish(training.weights)

        def hold(verb: str, key: str) -> None:
            if key == keys.manifest_key(1):
                reached.set()
                go.wait(10)

        store.before = hold
        monkeypatch.setattr(room, verb, fail_once)
        futures = []
        for step in (1, 2):
            training.step()
            states.append(kept(training.weights))
            futures.append(pub.publish(training.weights, step=step, wait=False))
            assert reached.wait(10)
        go.set()
        assert isinstance(futures[0].exception(10), MemoryError)
        assert (futures[1].result(10).version, pub.version) == (2, 2)
        training.step()
        states.append(kept(training.weights))
        assert pub.publish(training.weights, step=3).version == 3
    sub, held = Subscriber(store), worker()
    for number, state in enumerate(states, 1):
        assert sub.sync(held, version=number).step == number
        assert equal(held, state)


# -- failures in the background ------------------------------------------------------------------------------------


def failed(pub: Publisher, training: Training) -> Future[PublishReport]:
    """Publish a step in the background, and wait until it has failed without reading that it did."""
    training.step()
    future = pub.publish(training.weights, wait=False)
    wait_for([future], 10)
    return future


def test_a_failure_is_raised_by_publish_by_flush_and_by_close_once_each_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training, store = Training(), Watched()
    pub = Publisher(store)
    pub.publish(training.weights)
    store.fail_at("parts/")
    future = failed(pub, training)
    assert [r.levelname for r in caplog.records] == ["ERROR"]
    assert "Step 0 was not published: StoreError: the line is down" in caplog.text
    raised: list[StoreError | None] = []
    for call in (lambda: pub.publish(training.weights), pub.flush, pub.flush, pub.close, pub.close):
        try:
            call()
        except StoreError as e:
            raised.append(e)
        else:
            raised.append(None)
    assert [error is not None for error in raised] == [True, True, False, True, False]
    assert {error for error in raised if error} == {future.exception()}
    assert versions(store) == [0]


def test_a_store_that_refuses_for_good_stops_the_loop_that_does_not_wait() -> None:
    training, store, done = Training(), Watched(), []
    with pytest.raises(StoreError, match="line is down"), Publisher(store) as pub:  # noqa: PT012 - as in the README
        for step in range(60):
            if step == 3:
                store.fail_at("parts/", "manifests/", "starts/")
            future = pub.publish(training.weights, step=step, wait=False)
            done.append(step)
            training.step()
            wait_for([future], 10)  # a trainer's step takes longer than sending; nobody reads the future
    assert done == [0, 1, 2, 3]
    store.fail_at()
    assert max(versions(store)) <= 2


def test_closing_after_the_last_publish_failed_raises() -> None:
    training, store = Training(), Watched()
    pub = Publisher(store)
    pub.publish(training.weights)
    store.fail_at("manifests/")
    training.step()
    pub.publish(training.weights, wait=False)
    with pytest.raises(StoreError, match="line is down"):
        pub.close()


def test_what_the_body_raises_is_not_masked_by_closing(caplog: pytest.LogCaptureFixture) -> None:
    training, store = Training(), Watched()
    with pytest.raises(ZeroDivisionError), Publisher(store) as pub:  # noqa: PT012 - the block is what is tested
        pub.publish(training.weights)
        store.fail_at("parts/")
        failed(pub, training)
        raise ZeroDivisionError
    assert "Closing the publisher failed as well: StoreError: the line is down" in caplog.text


def test_the_publish_that_raises_a_failure_publishes_nothing_and_the_next_covers_all() -> None:
    training, store = Training(), Watched()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        store.fail_at("parts/")
        failed(pub, training)
        store.fail_at()
        training.step()
        with pytest.raises(StoreError, match="line is down"):
            pub.publish(training.weights)
        assert versions(store) == [0]
        report = pub.publish(training.weights)
        assert (report.version, report.coalesced) == (1, 0)
    assert equal(synced(store), training.weights)


@pytest.mark.parametrize("read", ["result", "exception", "callback", "wait"])
def test_a_failure_that_was_read_is_not_raised_again(read: str) -> None:
    training, store = Training(), Watched()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        store.fail_at("parts/")
        if read == "wait":
            with pytest.raises(StoreError):
                pub.publish(training.weights)
        elif read == "callback":
            failed(pub, training).add_done_callback(lambda future: future.exception() and None)
        elif read == "exception":
            assert isinstance(failed(pub, training).exception(), StoreError)
        else:
            with pytest.raises(StoreError):
                failed(pub, training).result()
        pub.flush()
        store.fail_at()
        if read != "wait":
            assert pub.publish(training.weights).version == 1


def test_a_failure_after_an_interrupted_wait_is_logged_and_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, gate = Training(), Gate()
    pub = Publisher(gate.store)
    pub.publish(training.weights)
    gate.close()
    training.step()
    monkeypatch.setattr(GatedFuture, "wait", lambda future, timeout=None: raise_interrupt())
    with pytest.raises(KeyboardInterrupt):
        pub.publish(training.weights)
    monkeypatch.undo()
    gate.store.fail_at("manifests/")
    gate.open.set()
    with pytest.raises(StoreError, match="line is down"):
        pub.flush()
    assert "Step 0 was not published" in caplog.text
    with pytest.raises(StoreError, match="line is down"):
        pub.close()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_waiting_too_short_for_a_future_reads_nothing() -> None:
    training, gate = Training(), Gate()
    pub = Publisher(gate.store)
    pub.publish(training.weights)
    gate.close()
    training.step()
    future = pub.publish(training.weights, wait=False)
    assert gate.reached.wait(10)
    with pytest.raises(TimeoutError):
        future.result(0)
    gate.store.fail_at("manifests/")
    gate.open.set()
    with pytest.raises(StoreError):
        pub.close()


def test_a_failure_that_a_later_version_made_up_for_is_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    training, gate = Training(), Gate()
    with Publisher(gate.store) as pub:
        pub.publish(training.weights)
        gate.close()
        training.step()
        first = pub.publish(training.weights, wait=False)
        assert gate.reached.wait(10)
        training.step()
        second = pub.publish(training.weights, wait=False)
        gate.store.before = lambda verb, key: down(key) if key == keys.manifest_key(1) and not first.done() else None
        gate.open.set()
        wait_for([second], 10)
        pub.flush()
        pub.publish(training.weights)
    assert isinstance(first.exception(), StoreError)
    assert second.result().version == 1
    assert "the line is down" in caplog.text
    assert equal(synced(gate.store), training.weights)


def test_a_version_that_was_committed_without_an_answer_is_no_failure_once_that_is_known() -> None:
    training, flaky = Training(), Unanswered()
    with Publisher(flaky.store) as pub:
        pub.publish(training.weights)
        flaky.times = 1
        first = failed(pub, training)
        assert pub.publish(training.weights).version == 2
    assert isinstance(first.exception(), StoreError)
    assert versions(flaky.store) == [0, 1, 2]


def test_a_failure_that_is_retried_is_raised_when_it_goes_on_and_at_the_end() -> None:
    """A short outage does not stop a trainer: each next version is the retry. One that does not end does."""
    training, store = Training(), Watched()
    pub = Publisher(store, max_failures=3)
    pub.publish(training.weights)

    def away(verb: str, key: str) -> None:
        raise StoreError("timed out", key=key, retryable=True)

    store.before = away
    failed(pub, training)
    store.fail_at()
    assert pub.publish(training.weights).version == 1
    store.before = away
    for _ in range(3):
        failed(pub, training)
    with pytest.raises(StoreError, match="timed out"):
        pub.publish(training.weights)
    failed(pub, training)
    with pytest.raises(StoreError, match="timed out"):
        pub.close()


def test_failures_are_bounded_in_number_and_hold_none_of_the_memory_they_took() -> None:
    weights, store = {"w": np.zeros(1 << 16, np.float32)}, Watched()
    pub = Publisher(store, codec="gap")
    pub.publish(weights)
    store.fail_at("parts/")
    kept_bytes = []
    tracemalloc.start()
    try:
        for step in range(20):
            weights["w"][:] = step + 1
            with suppress(StoreError):
                wait_for([pub.publish(weights, wait=False)], 10)
            kept_bytes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept_bytes[-1] < kept_bytes[3] + weights["w"].nbytes / 2
    with pytest.raises(StoreError):
        pub.flush()
    pub.flush()  # there was one failure to raise, and not one for each step
    with pytest.raises(StoreError):
        pub.close()


def test_after_closing_a_publisher_says_that_it_is_closed() -> None:
    with Publisher(MemoryStore()) as pub:
        pub.publish(Training().weights)
    with pytest.raises(ClosedError, match="closed; create a new one"):
        pub.publish(Training().weights)


def test_an_executor_that_takes_no_more_work_stops_neither_versions_nor_anchors(short_epochs: int) -> None:
    training, store, pool = Training(), MemoryStore(), ThreadPoolExecutor(2)
    with Publisher(store, executor=pool, anchor_every=0, epoch_patches=short_epochs) as pub:
        pub.publish(training.weights)
        pool.shutdown()
        for step in (1, 2, 3):
            training.step()
            assert pub.publish(training.weights).version == step
        pub.flush()
    assert anchored(store) == [0, 1]
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


def test_without_any_thread_versions_are_sent_and_anchors_wait(
    short_epochs: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    training, store, pool = Training(), MemoryStore(), ThreadPoolExecutor(2)
    with Publisher(store, executor=pool, anchor_every=0, epoch_patches=short_epochs) as pub:
        pub.publish(training.weights)
        pool.shutdown()

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        for step in (1, 2, 3):
            training.step()
            assert pub.publish(training.weights, wait=False).result(0).version == step
        assert (
            "The anchor of epoch 1 was not started and is tried with a later version: can't start new thread"
            in caplog.text
        )
        with pytest.raises(StoreError, match="the anchor of epoch 1 was not started"):
            pub.flush()
        monkeypatch.undo()
        pub.publish(training.weights)
        pub.flush()
    assert anchored(store) == [0, 2]
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


@pytest.mark.parametrize("wait", [False, True])
def test_an_interrupt_while_a_condition_is_entered_does_not_stop_the_sender(
    wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller is interrupted in each Condition.__enter__ of a publish in turn, which leaves the Condition locked."""
    training, enter = Training(), threading.Condition.__enter__
    for number in range(20):
        store, left = MemoryStore(), [number]
        pub = Publisher(store)
        pub.publish(training.weights, step=0)
        training.step()
        pub.publish(training.weights, step=1)  # starts the thread

        def interrupted(condition: threading.Condition, left: list[int] = left) -> bool:
            entered = enter(condition)
            name = sys._getframe(1).f_code.co_filename
            if threading.current_thread() is threading.main_thread() and name.endswith("futures/_base.py") and left:
                left[0] -= 1
                if left[0] < 0:
                    left.clear()
                    raise KeyboardInterrupt
            return entered

        training.step()
        monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
        try:
            if wait:
                pub.publish(training.weights, step=2)
            else:
                pub.publish(training.weights, step=2, wait=False)
        except KeyboardInterrupt:
            pass
        finally:
            monkeypatch.setattr(threading.Condition, "__enter__", enter)

        def publish_and_close(pub: Publisher = pub) -> None:
            pub.publish(training.weights, step=3)
            pub.close()

        closing = threading.Thread(target=publish_and_close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive(), f"it hangs after an interrupt in Condition number {number}"
        assert equal(synced(store), training.weights)
        if left:  # the call had no more of them
            break
    else:
        pytest.fail("every publish was interrupted")


def test_an_interrupt_while_the_base_advances_leaves_it_at_the_version_that_was_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller of a first publish sends the version, so Ctrl-C reaches the thread that commits it."""
    store, training, commit = MemoryStore(), Training(), WeightState.commit
    with Publisher(store) as pub:
        pub.publish(training.weights)

    def interrupted(state: WeightState, transition: Any) -> Any:
        back = commit(state, transition)
        if threading.current_thread().name == "pulse-finish":
            signal.raise_signal(signal.SIGINT)
        return back

    with Publisher(store) as pub:
        training.step()
        with monkeypatch.context() as patched:
            patched.setattr(WeightState, "commit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pub.publish(training.weights)
        assert pub.version == 1
        training.step()
        assert pub.publish(training.weights).version == 2
    held = worker()
    Subscriber(store).sync(held)
    assert equal(held, training.weights)


def test_what_an_interrupted_publish_has_queued_without_a_sender_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    training, store = Training(), MemoryStore()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as threads, Publisher(store, executor=threads) as pub:
        pub.publish(training.weights, step=0)
        for step, repair in ((1, lambda: pub.flush()), (2, lambda: pub.publish(training.weights, step=3))):
            training.step()
            with monkeypatch.context() as patch:
                patch.setattr(threads, "submit", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    pub.publish(training.weights, step=step, wait=False)
            repair()
            assert equal(synced(store), training.weights)


def test_what_an_executor_cancels_is_sent() -> None:
    training, store, pool, free = Training(), MemoryStore(), ThreadPoolExecutor(1), threading.Event()
    pub = Publisher(store, executor=pool)
    pub.publish(training.weights)
    pool.submit(free.wait, 10)
    training.step()
    future = pub.publish(training.weights, wait=False)
    pool.shutdown(wait=False, cancel_futures=True)
    free.set()
    assert future.result(10).version == 1
    pub.close()
    assert equal(synced(store), training.weights)


def test_an_anchor_that_an_executor_cancels_is_reported_and_comes_with_the_next_version(short_epochs: int) -> None:
    training, store, pool, free = Training(), MemoryStore(), ThreadPoolExecutor(1), threading.Event()
    pub = Publisher(store, executor=pool, epoch_patches=short_epochs)
    pool.submit(free.wait, 10)
    pub.publish(training.weights, wait=False)
    pool.shutdown(wait=False, cancel_futures=True)
    free.set()
    with pytest.raises(StoreError, match="cancel_futures=True"):
        pub.flush()
    for _ in range(short_epochs):
        training.step()
        pub.publish(training.weights)
    pub.close()
    assert anchored(store) == [0]
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


def test_what_an_executor_cancels_while_no_thread_can_be_started_fails_and_the_next_version_contains_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    training, store, pool, free = Training(), MemoryStore(), ThreadPoolExecutor(1), threading.Event()
    pub = Publisher(store, executor=pool)
    pub.publish(training.weights)
    pool.submit(free.wait, 10)
    training.step()
    future = pub.publish(training.weights, wait=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool.shutdown(wait=False, cancel_futures=True)
    free.set()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        future.result(10)
    monkeypatch.undo()
    assert pub.publish(training.weights, wait=False).result(10).version == 1
    pub.close()
    assert equal(synced(store), training.weights)


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_that_exits_does_not_end_the_sender(caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    training, gate = Training(), Gate()
    pub = Publisher(gate.store)
    pub.publish(training.weights)
    gate.close()
    training.step()
    future = pub.publish(training.weights, wait=False)
    future.add_done_callback(lambda _: sys.exit(1))
    if fails:
        gate.store.fail_at("manifests/")
    gate.open.set()
    wait_for([future], 10)
    gate.store.fail_at()
    assert future.exception(10) is None or fails
    training.step()
    assert pub.publish(training.weights, wait=False).result(10).version == (1 if fails else 2)
    pub.close()
    assert "A callback of the publish future of step 0 raised SystemExit: 1" in caplog.text


def called_back(again: Callable[[Publisher, Training], object], queued: bool = False) -> tuple[object, int | None]:
    """What a call in the callback of a future returned or raised, and the version after that."""
    training, gate, found = Training(), Gate(), []
    pub = Publisher(gate.store)
    pub.publish(training.weights)
    gate.close()

    def callback(_: object) -> None:
        try:
            found.append(again(pub, training))
        except Exception as e:  # noqa: BLE001 - returned
            found.append(e)

    training.step()
    future = pub.publish(training.weights, wait=False)
    future.add_done_callback(callback)
    if queued:
        assert gate.reached.wait(10)
        pub.publish(training.weights, wait=False, coalesce=False)
    gate.open.set()
    future.result(10)
    while not found:  # hangs if the callback does
        time.sleep(0.001)
    pub.close()
    return found[0], pub.version


@pytest.mark.parametrize(
    ("again", "queued"),
    [
        (lambda pub, training: pub.publish(training.weights), False),
        (lambda pub, training: pub.publish(training.weights, wait=False, coalesce=False), False),
        (lambda pub, training: pub.publish(training.weights, wait=False), True),  # after a step that stays alone
        (lambda pub, training: pub.flush(), False),
        (lambda pub, training: pub.close(), False),
    ],
)
def test_a_call_that_would_wait_for_the_thread_that_makes_it_raises(
    again: Callable[[Publisher, Training], object], queued: bool
) -> None:
    error, newest = called_back(again, queued)
    assert isinstance(error, RuntimeError)
    assert "by a callback of a publish future" in str(error)
    assert newest == (2 if queued else 1)


def test_a_callback_may_publish_without_waiting() -> None:
    future, newest = called_back(lambda pub, training: pub.publish(training.weights, wait=False))
    assert isinstance(future, Future)
    assert (future.result().version, newest) == (2, 2)


class Interrupting(Mapping[str, Any]):
    """A source that gets a signal while it is read."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.weights = weights

    def __getitem__(self, name: str) -> Any:
        return self.weights[name]

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[str]:
        signal.raise_signal(signal.SIGUSR1)
        return iter(self.weights)


@pytest.mark.parametrize("call", ["publish", "flush", "close"])
def test_a_signal_handler_that_needs_a_publisher_within_publish_raises(call: str) -> None:
    training, gate = Training(), Gate()
    pub = Publisher(gate.store)
    before = signal.signal(
        signal.SIGUSR1, lambda *_: pub.publish(training.weights) if call == "publish" else getattr(pub, call)()
    )
    try:
        pub.publish(training.weights)
        gate.close()
        training.step()
        future = pub.publish(training.weights, wait=False)
        assert gate.reached.wait(10)
        with pytest.raises(RuntimeError, match=f"{call} was called by a signal handler"):
            pub.publish(Interrupting(training.weights), wait=False)
        gate.open.set()
        assert future.result(10).version == 1
        training.step()
        assert pub.publish(training.weights).version == 2
        pub.close()
    finally:
        gate.open.set()
        signal.signal(signal.SIGUSR1, before)
    assert equal(synced(gate.store), training.weights)


# -- the end of the process ----------------------------------------------------------------------------------------


@pytest.mark.slow  # it loads the package anew; in the fast tier forked processes end in the same ways
def test_a_publisher_that_is_not_closed_finishes_when_the_process_ends(tmp_path: Path) -> None:
    """In an interpreter of its own, which takes its modules down, too; the others are forked, and end before that."""
    run = "import sys; from tests.publish import endings; endings.end_before_a_version_is_sent(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT)}
    program = [sys.executable, "-c", run, str(tmp_path)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
    store, held = LocalStore(tmp_path), {name: np.zeros(5000, np.float32) for name in "abc"}
    assert versions(store) == [0, 1, 2]
    Subscriber(store).sync(held)
    assert {(array[1], array[2]) for array in held.values()} == {(1.0, 2.0)}


@pytest.mark.parametrize("calls", [(1, 5), slow(range(10))], ids=["some", "all"])
def test_wherever_in_a_version_the_interpreter_ends_everything_published_is_sent(
    tmp_path: Path, fleet: Fleet, short_epochs: int, calls: Sequence[int]
) -> None:
    """Version 2 ends an epoch, so an anchor is due; version 3 is pending. A process for each of these store calls."""
    folders = [tmp_path / str(number) for number in calls]
    programs = [
        fleet.start_program(endings.end_within_a_version, folder=str(folder), at=number)
        for number, folder in zip(calls, folders, strict=True)
    ]
    for program, folder in zip(programs, folders, strict=True):
        assert (program.wait(), told(program.out)) == (0, ""), folder.name
        store, held = LocalStore(folder), endings.small()
        Subscriber(store, epoch_patches=short_epochs).sync(held)
        assert held["w"][3] == 3.0, folder.name
        assert versions(store)[-1] == 3, folder.name
        assert anchored(store) == [0, 1], folder.name


@pytest.mark.parametrize(
    ("ending", "code", "newest", "message"),
    [
        ("exception", 1, 2, "ZeroDivisionError"),
        ("thread", 0, 2, ""),  # that is no daemon, after the main thread has ended
        ("atexit", 0, 1, "ClosedError: the interpreter is shutting down"),
        ("refused", 0, 0, "Step 2 was not published: PermissionError: 403"),  # by Python's handler of last resort
    ],
)
def test_however_the_interpreter_ends_what_was_published_is_sent_or_reported(
    tmp_path: Path, fleet: Fleet, ending: str, code: int, newest: int, message: str
) -> None:
    program = fleet.start_program(endings.end_with, folder=str(tmp_path), ending=ending)
    ended, words = program.wait(), told(program.out)
    assert ended == code, words
    assert message in words
    assert bool(message) == bool(words), words
    store = LocalStore(tmp_path)
    last = version(store, versions(store)[-1])
    assert last.step == newest


def test_a_daemon_that_publishes_does_not_keep_the_process_alive_and_what_it_published_is_sent(
    tmp_path: Path, fleet: Fleet
) -> None:
    said = tmp_path / "said"
    program = fleet.start_program(
        endings.end_with_a_daemon_that_publishes, folder=str(tmp_path / "run"), said=str(said)
    )
    assert (program.wait(), told(program.out)) == (0, "")
    accepted, _, message = said.read_text().partition(" ")
    assert message.startswith("the interpreter is shutting down")
    store = LocalStore(tmp_path / "run")
    assert version(store, versions(store)[-1]).step == int(accepted)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_in_a_forked_process_a_publisher_raises_and_leaves_alone_what_is_its_parents(
    tmp_path: Path, fleet: Fleet
) -> None:
    (tmp_path / "tmp").mkdir()
    program = fleet.start_program(
        endings.fork_while_a_version_is_sent, {"TMPDIR": str(tmp_path / "tmp")}, folder=str(tmp_path)
    )
    assert (program.wait(), told(program.out)) == (0, "")


# -- two publishers ------------------------------------------------------------------------------------------------


def test_of_two_publishers_one_is_refused_and_the_run_is_the_others() -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as first, Publisher(store) as second:
        first.publish(training.weights)
        training.step()
        second.publish(training.weights)  # resumes the run
        training.step()
        with pytest.raises(AnotherPublisherError, match="version 1 already exists: another publisher") as caught:
            first.publish(Training(seed=1).weights)
        assert caught.value.version == 1
        second.publish(training.weights)
        with pytest.raises(AnotherPublisherError):
            first.publish(Training(seed=1).weights)
    assert equal(synced(store), training.weights)
    assert versions(store) == [0, 1, 2]


def test_a_publisher_whose_base_was_pruned_is_refused() -> None:
    training, store = Training(), MemoryStore()
    with Publisher(store) as pub:
        pub.publish(training.weights)
        store.delete(keys.manifest_key(0))
        training.step()
        with pytest.raises(AnotherPublisherError, match="base was pruned"):
            pub.publish(training.weights)


def race(store: Store, count: int, steps: int) -> list[tuple[int, list[dict[str, Any]]]]:
    """Let publishers, each with a training of its own, publish into the same place; return what each committed."""
    ready = threading.Barrier(count)

    def one(name: int) -> tuple[int, list[dict[str, Any]]]:
        training, done = Training(seed=name), []
        with Publisher(store) as pub:
            ready.wait()
            with suppress(AnotherPublisherError, StateError):  # the weights of one that is late do not continue the run
                for step in range(steps):
                    pub.publish(training.weights, step=step)
                    done.append(kept(training.weights))
                    training.step()
        return name, done

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_publishers_that_race_for_a_place_do_no_harm() -> None:
    for _ in range(6):
        store = MemoryStore()
        done = race(store, 3, 3)
        made = versions(store)
        assert made == list(range(len(made)))
        held = synced(store)
        last = version(store, made[-1])
        assert any(states and equal(held, states[-1]) for _, states in done)
        assert sum(len(states) for _, states in done) == last.version + 1


def test_who_lost_the_first_version_does_not_take_the_run_over() -> None:
    store = Watched()
    with Publisher(store) as winner, Publisher(store) as loser:
        training = Training()

        def somebody_else(verb: str, key: str) -> None:
            if verb == "create" and key == keys.manifest_key(0):
                store.before = lambda verb, key: None
                winner.publish(training.weights)

        store.before = somebody_else
        for _ in range(2):
            with pytest.raises(AnotherPublisherError):
                loser.publish(Training(seed=1).weights)
        training.step()
        assert winner.publish(training.weights).version == 1
    assert equal(synced(store), training.weights)


# -- resuming a run ------------------------------------------------------------------------------------------------


def test_a_run_is_taken_up_where_it_ended() -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 3, training)
    held, sub = worker(), Subscriber(store)
    sub.sync(held)
    training.step()
    with Publisher(store) as pub:
        assert pub.publish(training.weights, step=3).version == 3
        assert pub.run == version(store, 0).run
    assert sub.sync(held).path == ("patch",)
    assert equal(held, training.weights)


def test_a_run_is_taken_up_at_an_older_step() -> None:
    store = MemoryStore()
    states = publish_steps(store, 4)
    held, sub = worker(), Subscriber(store)
    sub.sync(held)
    with Publisher(store) as pub:
        assert pub.publish(states[1], step=1).version == 4
    assert sub.sync(held).step == 1
    assert equal(held, states[1])


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"w": np.zeros(5, np.float32)}, r"'w' is F32 \(5,\), and was F32 \(4,\)"),
        ({"w": np.zeros(4, np.float16)}, r"'w' is F16 \(4,\), and was F32 \(4,\)"),
        ({"new": np.zeros(4)}, "'new' was added"),
        ({"w": None}, "'w' was removed"),
        ({"other": None, "w": np.zeros(4, np.float32)}, "'other' was removed"),
    ],
)
def test_other_tensors_than_in_the_last_version_need_a_new_location_and_the_error_says_so(
    change: dict[str, Any], found: str
) -> None:
    """In a publisher and in a new one alike."""
    store, weights = MemoryStore(), {"w": np.ones(4, np.float32), "other": np.ones(4, np.float32)}
    changed = {name: array for name, array in {**weights, **change}.items() if array is not None}
    with Publisher(store) as pub:
        pub.publish(weights)
        with pytest.raises(StateError, match=f"{found}; .*new location"):
            pub.publish(changed)
    with Publisher(store) as pub, pytest.raises(StateError, match="publish to a new location"):
        pub.publish(changed)


def test_a_run_of_other_tensors_is_refused() -> None:
    store = MemoryStore()
    publish_steps(store, 1)
    with Publisher(store) as pub, pytest.raises(StateError, match=r"layer\.0\.weight"):
        pub.publish({"other": np.zeros(3)})
    assert versions(store) == [0]


def test_with_weights_that_are_a_start_no_body_is_fetched() -> None:
    store, training = Watched(), Training()
    publish_steps(store, 1, training)
    store.gets.clear()
    with Publisher(store) as pub:
        pub.publish(training.weights)
    assert store.fetched("parts/") == []
    assert version(store, 1).base is not None


def test_with_the_same_spool_no_body_is_fetched(tmp_path: Path) -> None:
    store, training = Watched(), Training()
    publish_steps(store, 4, training, spool=tmp_path, codec="history")
    store.gets.clear()
    training.step()
    with Publisher(store, spool=tmp_path) as pub:
        assert pub.publish(training.weights).version == 4
    assert store.fetched("parts/") == []
    assert equal(synced(store), training.weights)


def test_where_no_way_leads_to_the_last_version_a_root_is_published() -> None:
    store, training, held = MemoryStore(), Training(), worker()
    publish_steps(store, 3, training)
    sub = Subscriber(store)
    sub.sync(held)
    for key in (keys.anchor_key(0), *parts_of(store, keys.anchor_key(0))):
        store.delete(key)
    training.step()
    with Publisher(store) as pub:
        report = pub.publish(training.weights)
    root = version(store, 3)
    assert (report.version, root.base, root.parts, root.index, root.epoch) == (3, None, (), 0, 1)
    assert sub.sync(held).path == ("anchor",)
    assert equal(held, training.weights)
    assert equal(synced(store), training.weights)


def test_a_root_that_was_cut_off_before_its_anchor_gets_one_from_the_next_publisher(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, training = Watched(), Training()
    with abandoned(store, tmp_path / "first") as pub:
        store.fail_at("parts/", "anchors/")
        pub.publish(training.weights)
    store.fail_at()
    assert versions(store) == [0]
    at_once = Outbox.waiting

    def waiting(outbox: Outbox) -> Iterator[tuple[int, bytes]]:
        time.sleep(0.1)  # a disk that takes its time
        return at_once(outbox)

    monkeypatch.setattr(Outbox, "waiting", waiting)
    with Publisher(store, spool=tmp_path / "second") as pub:
        pub.publish(training.weights)
    assert equal(synced(store), training.weights)


class Dying:
    """A store that dies at its n-th write, before or after the effect, and stays dead until it is revived."""

    def __init__(self, at: int, after: bool) -> None:
        self.store, self.at, self.dead = Watched(), at, False
        if after:
            self.store.after = self._count
        else:
            self.store.before = self._count
        self.count, self.late = 0, after

    def _count(self, verb: str, key: str) -> None:
        if verb in ("put", "create"):
            self.count += 1
            self.dead = self.dead or self.count >= self.at
        if self.dead:
            down(key)

    def revive(self) -> None:
        self.store.before = self.store.after = lambda verb, key: None


def life(store: Store, spool: Path, states: list[dict[str, Any]], epoch_patches: int) -> None:
    with abandoned(store, spool, anchor_every=0, epoch_patches=epoch_patches) as pub:
        for step, state in enumerate(states):
            pub.publish(state, step=step)
            pub.flush()


@pytest.fixture
def trajectory() -> list[dict[str, Any]]:
    training, states = Training(), []
    for _ in range(7):
        states.append(kept(training.weights))
        training.step()
    return states


def writes_of(states: list[dict[str, Any]], spool: Path, epoch_patches: int) -> int:
    store = Watched()
    life(store, spool, states, epoch_patches)
    return len(store.writes)


@pytest.mark.parametrize(
    ("after", "same_spool"),
    [
        (False, False),
        slow(True, False),  # to the next one it is before the next write
        (False, True),
    ],
    ids=["before a write", "after a write", "before a write, with its spool"],
)
def test_whenever_a_publisher_dies_the_next_one_takes_the_run_up(
    tmp_path: Path, trajectory: list[dict[str, Any]], short_epochs: int, after: bool, same_spool: bool
) -> None:
    count = writes_of(
        trajectory[:3], tmp_path / "all", short_epochs
    )  # a root, a patch, one at an epoch's end, and two anchors
    assert count > 14
    for at in range(1, count + 1):
        dying = Dying(at, after)
        spool = tmp_path / str(at)
        life(dying.store, spool, trajectory[:3], short_epochs)
        assert dying.dead
        dying.revive()
        held, sub = worker(), Subscriber(dying.store, epoch_patches=short_epochs)
        with suppress(NothingPublishedError):  # it died before the first version could be reached
            sub.sync(held)
        again = 1 if at % 2 else 5  # an older step, or a newer one
        with Publisher(
            dying.store, spool=spool if same_spool else tmp_path / f"{at}-new", epoch_patches=short_epochs
        ) as pub:
            for state in (trajectory[again], trajectory[again + 1]):
                pub.publish(state)
            pub.flush()
        made = versions(dying.store)
        assert made == list(range(len(made))), at
        assert equal(synced(dying.store, epoch_patches=short_epochs), trajectory[again + 1]), at
        sub.sync(held)
        assert equal(held, trajectory[again + 1]), at


# -- anchors -------------------------------------------------------------------------------------------------------


def anchored(store: Store) -> list[int]:
    return [int(entry.key.rpartition("/")[2]) for entry in store.list("anchors/")]


def test_a_publisher_that_nothing_refers_to_finishes_its_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its temporary folder goes with it: so it must stay until the anchor is uploaded from there."""
    monkeypatch.setattr(anchors, "PART_BYTES", 1000)
    training, gate = Training(), Gate()
    gate.close()
    pub = Publisher(gate.store, grid={"*": (10, 1)}, min_tile=1)
    pub.publish(training.weights, wait=False)
    assert gate.reached.wait(10)  # at the first of several parts
    pub = None  # type: ignore[assignment]
    gc.collect()
    gate.open.set()
    until = time.monotonic() + 10
    while not anchored(gate.store):
        assert time.monotonic() < until
        time.sleep(0.002)
    assert equal(synced(gate.store), training.weights)


@pytest.mark.parametrize(("every", "expected"), [(0.0, [0, 1, 2, 3]), (1e9, [0])])
def test_anchors_come_at_epoch_starts_when_patches_add_up(short_epochs: int, every: float, expected: list[int]) -> None:
    store = MemoryStore()
    publish_steps(store, 7, anchor_every=every, epoch_patches=short_epochs)
    assert anchored(store) == expected


def test_an_anchor_comes_when_the_patches_since_the_last_have_its_bytes(short_epochs: int) -> None:
    store, rng = MemoryStore(), np.random.default_rng(0)
    weights = {"w": np.zeros(1000, np.float32)}
    with Publisher(store, codec="gap", anchor_every=1.0, epoch_patches=short_epochs) as pub:
        pub.publish(weights)
        for _ in range(20):
            weights["w"].view(np.uint32)[:180] = random_bits(rng, np.uint32, (180,))  # nearly a fifth of the bytes
            pub.publish(weights)
            pub.flush()
    made = anchored(store)
    assert made[0] == 0
    assert all(2 <= later - earlier <= 4 for earlier, later in pairwise(made))
    assert len(made) >= 3


def test_records_name_the_newest_anchor_and_anchors_the_one_before(short_epochs: int) -> None:
    store = MemoryStore()
    publish_steps(store, 6, anchor_every=0, epoch_patches=short_epochs)
    assert [version(store, n).anchor for n in range(6)] == [None, 0, 0, 1, 1, 2]
    assert [record(store, keys.anchor_key(n)).anchor for n in range(3)] == [None, 0, 1]


def test_a_commit_at_an_epochs_start_that_was_not_answered_gets_its_anchor(short_epochs: int) -> None:
    training, flaky = Training(), Unanswered()
    with Publisher(flaky.store, anchor_every=0, epoch_patches=short_epochs) as pub:
        for number in range(4):
            flaky.times = int(number == 2)
            with suppress(StoreError):
                pub.publish(training.weights)
            training.step()
        pub.flush()
        assert versions(flaky.store) == [0, 1, 2, 3]
        assert anchored(flaky.store) == [0, 1]


def test_flushing_waits_for_an_anchor_that_is_due(short_epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    training, store = Training(), MemoryStore()
    begin = AnchorWriter.begin

    def slowly(writer: AnchorWriter, *args: Any) -> None:
        time.sleep(0.05)  # the sender's thread is not the quickest
        begin(writer, *args)

    monkeypatch.setattr(AnchorWriter, "begin", slowly)
    with Publisher(store, anchor_every=0, epoch_patches=short_epochs) as pub:
        for _ in range(3):
            pub.publish(training.weights)
        pub.flush()
        assert anchored(store) == [0, 1]


def test_an_anchor_written_while_versions_go_on_is_the_state_it_is_of(
    short_epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    training, store, go = Training(), MemoryStore(), threading.Event()
    encode, reading = patch.encode_whole, threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        if anchored(store):  # not the first
            reading.set()
            assert go.wait(10)
        return encode(*args, **options)

    monkeypatch.setattr(patch, "encode_whole", slowly)
    states = []
    with Publisher(store, anchor_every=0, epoch_patches=short_epochs) as pub:
        for _ in range(3):
            pub.publish(training.weights)
            states.append(kept(training.weights))
            training.step()
        assert reading.wait(10)
        for _ in range(6):
            training.step()
            pub.publish(training.weights)
        go.set()
        pub.flush()
    assert 1 in anchored(store)
    for number in range(1, 3):
        store.delete(keys.manifest_key(number))
    store.put(keys.manifest_key(2), _at(store, 2))
    held = worker()
    assert Subscriber(store, epoch_patches=short_epochs).sync(held, version=2).path == ("anchor",)
    assert equal(held, states[2])


def _at(store: Store, number: int) -> bytes:
    """The record of a version, made again from that of its anchor."""
    anchor = record(store, keys.anchor_key(1))
    following = version(store, number + 1)
    assert following.base is not None
    assert following.base.digest == anchor.digest
    made = manifests.Manifest(
        anchor.run,
        number,
        anchor.step,
        0,
        2,
        manifests.BaseRef(number - 1, "0" * 64),
        anchor.layout,
        following.parts,
        anchor.digest,
        None,
        0,
    )
    return made.build()


@pytest.mark.parametrize("at", range(5))
def test_an_anchor_that_was_cut_off_is_finished_from_the_same_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(layouts, "SMALL", 0)  # a part for each tensor
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    training, store = Training(), Watched()
    seen: list[str] = []

    def cut(verb: str, key: str) -> None:
        if verb in ("put", "create") and key.startswith(("parts/", "anchors/")):
            seen.append(key)
            if len(seen) > at:
                down(key)

    store.before = cut
    with abandoned(store, tmp_path) as pub:
        pub.publish(training.weights)
    assert anchored(store) == ([] if at < 4 else [0])
    store.fail_at()
    training.step()
    with Publisher(store, spool=tmp_path) as pub:
        pub.publish(training.weights)
    assert version(store, 1).base is not None or at == 4
    assert 0 in anchored(store)
    assert equal(synced(store), training.weights)
    assert list((tmp_path / "outbox").iterdir()) == []


@pytest.mark.parametrize("at", range(4))
def test_a_later_anchor_that_was_cut_off_is_finished_from_the_same_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_epochs: int, at: int
) -> None:
    monkeypatch.setattr(layouts, "SMALL", 0)  # a part for each tensor
    monkeypatch.setattr(anchors, "PART_BYTES", 1)
    training, store = Training(), Watched()
    seen: list[str] = []

    def cut(verb: str, key: str) -> None:
        if verb in ("put", "create") and key.startswith(("parts/", "anchors/")):
            seen.append(key)
            if len(seen) > at:
                down(key)

    with abandoned(store, tmp_path, anchor_every=0, epoch_patches=short_epochs) as pub:
        for _ in range(3):
            pub.publish(training.weights)
            pub.flush() if not seen else None
            training.step()
            store.after = lambda verb, key: cut_from_here() if key == keys.manifest_key(2) else None

            def cut_from_here() -> None:
                store.before = cut

        pub.flush()
    assert anchored(store) == [0]
    before = len(seen)
    store.fail_at()
    store.after = lambda verb, key: None
    store.writes.clear()
    with Publisher(store, spool=tmp_path, anchor_every=1e9, epoch_patches=short_epochs) as pub:
        assert pub.publish(training.weights).version == 3
        pub.flush()
    assert anchored(store) == [0, 1]
    assert before == at + 1
    assert record(store, keys.anchor_key(1)).digest == version(store, 2).digest
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


def test_an_anchor_from_the_spool_that_fails_again_is_logged_and_tried_with_the_next_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training, store = Training(), Watched()
    store.before = lambda verb, key: unavailable(key) if verb == "create" and key.startswith("anchors/") else None
    with abandoned(store, tmp_path) as pub:
        pub.publish(training.weights)
    with Publisher(store, spool=tmp_path) as pub:
        caplog.clear()
        for number in (1, 2):
            assert pub.publish(training.weights).version == number
            with suppress(StoreError):
                pub.flush()
            training.step()
        assert caplog.text.count("The anchor of epoch 0 was not uploaded: StoreError: 503 unavailable") >= 2
        store.fail_at()
        for _ in range(2):  # after two failures it waits for two versions
            pub.publish(training.weights)
    assert anchored(store) == [0]


@pytest.mark.parametrize("how", ["changed", "cut short", "gone"])
def test_a_part_that_changed_on_disk_is_not_uploaded_and_the_next_epoch_has_an_anchor(
    tmp_path: Path, short_epochs: int, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    training, store = Training(), Watched()
    with Publisher(store, spool=tmp_path, anchor_every=1e9, epoch_patches=short_epochs) as pub:
        store.before = lambda verb, key: unavailable(key) if verb == "create" and key.startswith("anchors/") else None
        with pytest.raises(StoreError, match="unavailable"):
            pub.publish(training.weights)
        (part,) = (tmp_path / "outbox" / "0" / "parts").iterdir()
        data = bytearray(part.read_bytes())
        data[-5] ^= 1
        part.write_bytes(data if how == "changed" else data[:-5])
        if how == "gone":
            part.unlink()
        store.fail_at()
        training.step()
        pub.publish(training.weights)
        with pytest.raises((ChecksumError, FormatError, NotFoundError)):
            pub.flush()
        assert "The anchor of epoch 0 was not uploaded" in caplog.text
        assert list((tmp_path / "outbox").iterdir()) == []
        assert anchored(store) == []
        training.step()
        pub.publish(training.weights)
        pub.flush()
    assert anchored(store) == [1]
    assert equal(synced(store, epoch_patches=short_epochs), training.weights)


def test_a_run_whose_only_anchor_changed_on_disk_is_resumed_with_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, store, part_of = Training(), Watched(), Outbox.part

    def slowly(*args: Any) -> bytes:
        time.sleep(0.1)  # until the publisher waits for it
        return part_of(*args)

    store.before = lambda verb, key: unavailable(key) if verb == "create" and key.startswith("anchors/") else None
    with abandoned(store, tmp_path) as pub:
        pub.publish(training.weights)
    (part,) = (tmp_path / "outbox" / "0" / "parts").iterdir()
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    store.fail_at()
    monkeypatch.setattr(Outbox, "part", slowly)
    training.step()
    with Publisher(store, spool=tmp_path) as pub:
        assert pub.publish(training.weights).version == 1
    assert version(store, 1).base is None
    assert equal(synced(store), training.weights)


def tries_of_an_anchor(
    spool: Path, retryable: bool, count: int, epoch_patches: int
) -> tuple[list[int], list[set[str]]]:
    """The versions with which an anchor that always fails was uploaded, and what the outbox had after each version."""
    training, store = Training(), Watched()
    tried: list[int] = []
    outbox: list[set[str]] = []

    def fail(verb: str, key: str) -> None:
        if verb == "create" and key.startswith("anchors/"):
            tried.append(len(outbox))
            raise StoreError("413 too large", key=key, retryable=retryable)

    store.before = fail
    pub = Publisher(store, spool=spool, anchor_every=0, epoch_patches=epoch_patches)
    for _ in range(count):
        training.step()
        with suppress(StoreError):
            pub.publish(training.weights)
        with suppress(StoreError):
            pub.flush()
        outbox.append({path.name for path in (spool / "outbox").iterdir()})
    with suppress(StoreError):
        pub.close()
    return tried, outbox


def test_an_anchor_that_fails_for_good_is_tried_once_in_an_epoch_and_one_is_on_the_disk(tmp_path: Path) -> None:
    tried, outbox = tries_of_an_anchor(tmp_path, retryable=False, count=10, epoch_patches=3)
    assert tried == [0, 3, 6, 9]
    assert outbox == [{str(number // 3)} for number in range(10)]


def test_an_anchor_that_may_succeed_later_is_tried_more_and_more_rarely(tmp_path: Path) -> None:
    assert tries_of_an_anchor(tmp_path, retryable=True, count=16, epoch_patches=100)[0] == [0, 1, 3, 7, 15]


class FullDisk:
    """A disk that is full when an anchor has been written to it up to a file of this name, until there is room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shows: bool = True, at: str = "outbox/*/record") -> None:
        self.full, self.tries, self._at = True, list[int](), at
        self.version = 0  # that is published now
        monkeypatch.setattr(os, "replace", partial(self._replace, os.replace))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9 if self.full and shows else 1 << 30))

    def _replace(self, replace: Any, source: Any, target: Path) -> None:
        if self.full and target.match(self._at):
            self.tries.append(self.version)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)


@pytest.mark.parametrize(
    ("shows", "tries"), [(True, [0, 1, 3]), (False, [0, 1, 3, 7])], ids=["a disk", "a quota that nothing shows"]
)
def test_workers_can_join_as_soon_as_the_spool_has_room_again(
    shows: bool, tries: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    disk, training, store = FullDisk(monkeypatch, shows), Training(), MemoryStore()
    with Publisher(store, spool=tmp_path) as pub:
        for disk.version in range(9):
            disk.full = disk.version < (5 if shows else 8)
            with suppress(StoreError):
                pub.publish(training.weights, step=disk.version)
            with suppress(StoreError):
                pub.flush()
            assert bool(anchored(store)) == (shows and disk.version >= 5)
            if disk.full:
                assert list((tmp_path / "outbox").iterdir()) == []  # no part of an anchor keeps the disk full
            training.weights["norm"].view(np.uint16)[disk.version] += 1
        assert disk.tries == tries  # 1, 2, 4… versions later: each try encodes a part of the model
        for step in range(9, 16):
            pub.publish(training.weights, step=step)
    assert anchored(store) == [0]
    assert equal(synced(store), training.weights)


def test_flushing_writes_the_anchor_if_there_is_room_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk, training, store = FullDisk(monkeypatch), Training(), MemoryStore()
    with Publisher(store, spool=tmp_path) as pub:
        with pytest.raises(StoreError, match=r"No space left on device.*Make room on its disk"):
            pub.publish(training.weights)
        disk.full = False
        pub.flush()
        assert anchored(store) == [0]


def test_a_full_store_gets_the_anchor_when_there_is_room_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    disk, training, store = FullDisk(monkeypatch, at="run/parts/*"), Training(), LocalStore(tmp_path / "run")
    with Publisher(store, spool=tmp_path / "spool") as pub:
        with pytest.raises(StoreError, match="No space left on device"):
            pub.publish(training.weights)
        disk.full = False
        assert pub.publish(training.weights).version == 1
        pub.flush()
    assert anchored(store) == [0]
    assert equal(synced(store), training.weights)


def test_an_anchor_that_cannot_be_written_takes_no_more_memory_than_a_copy_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, short_epochs: int
) -> None:
    disk, training, store = FullDisk(monkeypatch), Training(), MemoryStore()
    with Publisher(store, spool=tmp_path, epoch_patches=short_epochs) as pub:
        for step in range(short_epochs + 1):
            disk.full = step < short_epochs
            with suppress(StoreError):
                pub.publish(training.weights, step=step)
            if disk.full:
                assert ("given up, because over a quarter of the weights" in caplog.text) == (step > 0)
            for array in training.weights.values():
                array.view(np.uint16)[:] += 1
    assert anchored(store) == [1]


def unavailable(key: str) -> None:
    raise StoreError("503 unavailable", key=key, retryable=True)


def test_an_anchor_of_another_run_in_the_spool_is_thrown_away(tmp_path: Path) -> None:
    store = Watched()
    store.fail_at("parts/")
    with abandoned(store, tmp_path) as pub:
        pub.publish(Training().weights)
    other = MemoryStore()
    publish_steps(other, 2)
    publish_steps(other, 1, Training(seed=1), spool=tmp_path, resume=True)
    assert list((tmp_path / "outbox").iterdir()) == []
    assert anchored(other) == [0]
    assert equal(synced(other), Training(seed=1).weights)


def test_an_anchor_gives_way_to_versions_that_are_being_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    training, store = Training(), Watched()
    go, sending, order = threading.Event(), threading.Event(), []

    def watch(verb: str, key: str) -> None:
        if verb == "get":
            return
        order.append(key)
        if key == keys.manifest_key(1):
            sending.set()
            assert go.wait(10)

    with Publisher(store, codec="gap") as pub:
        stage = Outbox.stage
        staged = threading.Event()

        def staging(*args: Any) -> Any:
            refs = stage(*args)
            assert staged.wait(10)
            return refs

        monkeypatch.setattr(Outbox, "stage", staging)
        pub.publish(training.weights, wait=False)
        store.before = watch
        training.step()
        future = pub.publish(training.weights, wait=False)
        assert sending.wait(10)
        staged.set()
        time.sleep(0.05)
        assert not any(key.startswith("anchors/") for key in order)
        go.set()
        future.result(10)
    assert order.index(keys.manifest_key(1)) < order.index(keys.anchor_key(0))


# -- signatures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def key() -> SigningKey:
    return SigningKey.generate()


def test_a_signed_run_is_followed_by_who_trusts_its_key(key: SigningKey) -> None:
    store = MemoryStore()
    states = publish_steps(store, 3, signing_key=key)
    for trust in (key.public, [SigningKey.generate().public, key.public], None):
        assert equal(synced(store, trust=trust), states[2])


@pytest.mark.parametrize("signed", [True, False], ids=["another key", "no key"])
def test_a_run_by_somebody_else_is_refused_before_a_body_is_fetched(key: SigningKey, signed: bool) -> None:
    store, held = Watched(), worker()
    publish_steps(store, 3, signing_key=SigningKey.generate() if signed else None)
    store.gets.clear()
    with pytest.raises(SignatureError):
        Subscriber(store, trust=key.public).sync(held)
    assert store.got("parts/") == store.got("layouts/") == []
    assert equal(held, worker())


@pytest.mark.parametrize("what", ["manifests", "anchors"])
def test_one_record_by_somebody_else_is_refused_and_the_weights_stay(key: SigningKey, what: str) -> None:
    store, held = Watched(), worker()
    publish_steps(store, 3, signing_key=key)
    where = keys.anchor_key(0) if what == "anchors" else keys.manifest_key(1)
    store.put(where, signature.sign(record(store, where).build(), SigningKey.generate()))
    store.gets.clear()
    with pytest.raises(SignatureError):
        Subscriber(store, trust=key.public).sync(held)
    assert store.got("parts/") == []
    assert equal(held, worker())


@pytest.mark.parametrize("other", [True, False], ids=["another key", "no key"])
def test_a_signed_run_is_not_taken_up_without_its_key(key: SigningKey, other: bool) -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 2, training, signing_key=key)
    with (
        Publisher(store, signing_key=SigningKey.generate() if other else None) as pub,
        pytest.raises(
            SignatureError, match="not trusted" if other else "this run is signed; pass signing_key= to resume"
        ),
    ):
        pub.publish(training.weights)
    assert versions(store) == [0, 1]


def test_a_signed_run_is_taken_up_with_its_key(key: SigningKey) -> None:
    store, training = MemoryStore(), Training()
    publish_steps(store, 2, training, signing_key=key)
    training.step()
    publish_steps(store, 2, training, signing_key=key)
    assert versions(store) == [0, 1, 2, 3]
    assert equal(synced(store, trust=key.public), training.weights)


def test_an_exception_carries_its_place_in_the_tree() -> None:
    assert issubclass(AnotherPublisherError, StoreError)
    assert issubclass(SignatureError, PulseError)
