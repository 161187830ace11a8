"""Trainer and worker, end to end, over a folder."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync import Publisher, Subscriber, chain
from pulsesync.errors import (
    BaseMismatchError,
    ChecksumError,
    ConflictError,
    FormatError,
    PulseError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format import patch
from pulsesync.state import State, Transition
from pulsesync.store import LocalStore
from pulsesync.testing import AdamUpdates, mutate, random_bits

SHAPES = {"layer.0.weight": (60, 50), "layer.1.weight": (50, 7), "norm": (50,)}


class Training:
    """BF16 weights under Adam, in the same arrays all the time."""

    def __init__(self, seed: int = 0) -> None:
        self.updates = AdamUpdates(SHAPES, seed=seed, scale=0.01)
        self.weights = {name: bits.view(ml_dtypes.bfloat16) for name, bits in self.updates.state().items()}

    def step(self) -> None:
        for name, bits in self.updates.step().items():
            self.weights[name].view(np.uint16)[...] = bits


def worker() -> dict[str, Any]:
    return {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in SHAPES.items()}


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k].view(np.uint16), b[k].view(np.uint16)) for k in a)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.mark.parametrize("codec", ["auto", "history", "context", "gap", "dense"])
def test_a_worker_follows_a_trainer_bit_for_bit(folder: str, codec: patch.CodecName) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder, codec=codec), Subscriber(folder)
    for step in range(6):
        report = pub.publish(training.weights, step=step)
        assert sub.sync(held).version == report.version == step
        assert equal(held, training.weights)
        sub.verify()
        training.step()


def test_every_dtype_travels(folder: str) -> None:
    rng = np.random.default_rng(0)
    types = [np.bool_, np.uint8, np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.uint16, np.int16]
    types += [np.float16, ml_dtypes.bfloat16, np.uint32, np.int32, np.float32, np.uint64, np.int64, np.float64]
    shapes = [(), (0,), (3, 5), (200,), (2, 3, 4)]
    state = {
        f"{np.dtype(dtype).name}{shape}": random_bits(rng, np.dtype(f"u{np.dtype(dtype).itemsize}").type, shape).view(
            dtype
        )
        for dtype in types
        for shape in shapes
    }
    held = {name: np.zeros_like(array) for name, array in state.items()}
    pub, sub = Publisher(folder), Subscriber(folder)
    for density in (0.0, 0.1, 1.0):
        for array in state.values():
            bits = array.reshape(-1).view(f"u{array.itemsize}")
            bits[...] = mutate(rng, bits, density)
        pub.publish(state)
        sub.sync(held)
        assert all(held[name].tobytes() == state[name].tobytes() for name in state)


def test_a_grid_of_tiles_travels(folder: str) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder, grid={"layer.*": (3, 2)}, min_tile=100), Subscriber(folder)
    for _ in range(4):
        pub.publish(training.weights)
        sub.sync(held)
        assert equal(held, training.weights)
        training.step()
    assert len(sub._state.layout.tiles) == 9  # type: ignore[union-attr]


def test_a_run_goes_on_over_epochs(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "EPOCH_PATCHES", 3)
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    places = []
    for _ in range(9):
        pub.publish(training.weights)
        sub.sync(held)
        assert equal(held, training.weights)
        places.append((sub._held.epoch, sub._held.index))  # type: ignore[union-attr]
        training.step()
    assert places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]


def test_a_late_worker_takes_all_versions_at_once(folder: str) -> None:
    training = Training()
    pub = Publisher(folder)
    for _ in range(5):
        pub.publish(training.weights)
        training.step()
    pub.publish(training.weights)
    held = worker()
    report = Subscriber(folder).sync(held)
    assert (report.version, report.applied) == (5, 6)
    assert equal(held, training.weights)


def test_a_worker_that_restarts_with_any_weights_catches_up(folder: str) -> None:
    training, held = Training(), worker()
    pub = Publisher(folder)
    for _ in range(3):
        pub.publish(training.weights)
        Subscriber(folder).sync(held)
        assert equal(held, training.weights)
        training.step()
        held["norm"][7] = 3.0


def test_nothing_new_is_nothing_to_do(folder: str) -> None:
    training, held = Training(), worker()
    Publisher(folder).publish(training.weights)
    sub = Subscriber(folder)
    sub.sync(held)
    report = sub.sync(held)
    assert (report.version, report.applied, report.changed, report.fetched_bytes) == (0, 0, 0, 0)


def test_a_run_without_versions_leaves_the_weights_alone(folder: str) -> None:
    held = worker()
    report = Subscriber(folder).sync(held)
    assert (report.version, report.digest) == (None, None)
    assert equal(held, worker())


def test_publishing_without_a_change_makes_a_small_version(folder: str) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(training.weights)
    report = pub.publish(training.weights)
    assert (report.version, report.changed, report.density) == (1, 0, 0.0)
    assert report.payload_bytes < 1000
    assert sub.sync(held).applied == 2
    assert equal(held, training.weights)


def test_reports_count_what_happened(folder: str) -> None:
    a, held = {"w": np.zeros(1000, np.float32)}, {"w": np.ones(1000, np.float32)}
    pub, sub = Publisher(folder), Subscriber(folder)
    first = pub.publish(a)
    assert (first.version, first.changed, first.total, first.full_bytes) == (0, 1000, 1000, 4000)
    assert sub.sync(held).changed == 1000
    a["w"][:7] = 2
    second, synced = pub.publish(a), sub.sync(held)
    assert (second.changed, second.density) == (7, 0.007)
    assert (synced.applied, synced.changed) == (1, 7)
    assert synced.fetched_bytes == second.payload_bytes
    assert synced.digest == sub.verify()


def test_a_worker_in_another_process_agrees(folder: str) -> None:
    training = Training()
    pub = Publisher(folder)
    for _ in range(3):
        pub.publish(training.weights)
        training.step()
    program = (
        "import sys, numpy as np, ml_dtypes; from pulsesync import Subscriber;"
        f"held = {{n: np.zeros(s, ml_dtypes.bfloat16) for n, s in {SHAPES!r}.items()}};"
        "sub = Subscriber(sys.argv[1]); sub.sync(held); print(sub.verify())"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}
    found = subprocess.run(
        [sys.executable, "-c", program, folder], env=environment, capture_output=True, text=True, check=True
    )
    manifest = json.loads(LocalStore(folder).get(chain.manifest_key(2)))
    assert found.stdout.strip() == manifest["digest"]


def test_the_publisher_keeps_a_copy_of_its_own(folder: str) -> None:
    weights, held = {"w": np.zeros(5, np.float32)}, {"w": np.zeros(5, np.float32)}
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(weights)
    weights["w"] += 1
    assert pub.publish(weights).changed == 5
    weights["w"] += 1
    sub.sync(held)
    assert held["w"].tolist() == [1.0] * 5


# -- two publishers, and stores that fail --------------------------------------------------------------------------


def test_a_second_publisher_is_refused_and_does_no_harm(folder: str) -> None:
    training, held = Training(), worker()
    first, second = Publisher(folder), Publisher(folder)
    first.publish(training.weights)
    with pytest.raises(ConflictError, match="another publisher"):
        second.publish(Training(seed=1).weights)
    training.step()
    first.publish(training.weights)
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


class Failing:
    """A store that fails at one of the writes of a version."""

    def __init__(self, folder: str) -> None:
        self.store, self.at = LocalStore(folder), ""

    def _maybe(self, key: str) -> None:
        if self.at and key.startswith(self.at):
            raise StoreError("the line is down", key=key)

    def get(self, key: str) -> bytes:
        self._maybe(key)
        return self.store.get(key)

    def put(self, key: str, data: bytes) -> None:
        self._maybe(key)
        self.store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._maybe(key)
        self.store.create(key, data)

    def list(self, prefix: str) -> Iterator[str]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)


@pytest.mark.parametrize("at", ["parts/", "manifests/"])
def test_a_failed_publish_loses_nothing_the_next_covers_both_steps(folder: str, at: str) -> None:
    training, held, store = Training(), worker(), Failing(folder)
    pub, sub = Publisher(store), Subscriber(folder)
    for _ in range(2):
        pub.publish(training.weights)
        training.step()
    store.at = at
    with pytest.raises(StoreError, match="line is down"):
        pub.publish(training.weights)
    assert sub.sync(held).version == 1
    store.at = ""
    training.step()
    assert pub.publish(training.weights).version == 2
    sub.sync(held)
    assert equal(held, training.weights)
    sub.verify()


@pytest.mark.parametrize("at", ["layouts/", "parts/", "manifests/"])
def test_a_failed_first_publish_is_made_again_whole(folder: str, at: str) -> None:
    training, held, store = Training(), worker(), Failing(folder)
    pub = Publisher(store)
    store.at = at
    with pytest.raises(StoreError, match="line is down"):
        pub.publish(training.weights)
    store.at = ""
    assert pub.publish(training.weights).version == 0
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


@pytest.mark.parametrize("first", [True, False])
def test_a_head_that_cannot_be_written_does_not_stop_the_run(folder: str, first: bool) -> None:
    training, held, store = Training(), worker(), Failing(folder)
    pub = Publisher(store)
    if not first:
        pub.publish(training.weights)
        training.step()
    store.at = "head"
    with suppress(StoreError):
        pub.publish(training.weights)
    store.at = ""
    training.step()
    pub.publish(training.weights)
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


@pytest.mark.parametrize("at", ["manifests/0000000000000002", "parts/", "layouts/"])
def test_a_sync_that_fails_can_be_repeated(folder: str, at: str) -> None:
    training, held, store = Training(), worker(), Failing(folder)
    pub, sub = Publisher(folder), Subscriber(store)
    for _ in range(3):
        pub.publish(training.weights)
        training.step()
    pub.publish(training.weights)
    store.at = at
    with pytest.raises(StoreError):
        sub.sync(held)
    store.at = ""
    sub.sync(held)
    assert equal(held, training.weights)
    sub.verify()


def test_a_damaged_part_leaves_the_weights_at_the_version_before(folder: str) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(training.weights)
    good = {name: array.copy() for name, array in training.weights.items()}
    training.step()
    pub.publish(training.weights)
    store = LocalStore(folder)
    key = chain.part_key(json.loads(store.get(chain.manifest_key(1)))["parts"][0]["id"])
    whole = store.get(key)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ChecksumError):
        sub.sync(held)
    assert equal(held, good)
    sub.verify()
    store.put(key, whole)
    sub.sync(held)
    assert equal(held, training.weights)


# -- what people do ------------------------------------------------------------------------------------------------


def test_verify_finds_a_foreign_write(folder: str) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(training.weights)
    sub.sync(held)
    held["norm"].view(np.uint16)[3] ^= 1
    with pytest.raises(VerificationError, match="not version 0") as caught:
        sub.verify()
    assert caught.value.expected != caught.value.actual


def test_after_a_foreign_write_was_found_no_patch_is_applied(folder: str) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(training.weights)
    sub.sync(held)
    held["norm"].view(np.uint16)[3] ^= 1
    with pytest.raises(VerificationError):
        sub.verify()
    training.step()
    pub.publish(training.weights)
    with pytest.raises(BaseMismatchError):
        sub.sync(held)
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


@pytest.mark.parametrize("codec", ["history", "context", "gap"])
def test_a_foreign_write_is_never_taken_for_the_publishers_version(folder: str, codec: patch.CodecName) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder, codec=codec), Subscriber(folder)
    for _ in range(3):
        pub.publish(training.weights)
        sub.sync(held)
        training.step()
    held["layer.0.weight"].view(np.uint16)[...] ^= np.uint16(0x8001)
    pub.publish(training.weights)
    before = {name: array.copy() for name, array in held.items()}
    with pytest.raises(PulseError):
        sub.sync(held)
    assert equal(held, before)


def test_verify_before_the_first_sync_is_refused(folder: str) -> None:
    with pytest.raises(VerificationError, match="nothing has been synced"):
        Subscriber(folder).verify()


@pytest.mark.parametrize("what", ["gone", "new", "shape", "dtype"])
def test_tensors_that_change_are_refused_by_name_and_the_run_goes_on(folder: str, what: str) -> None:
    training, held = Training(), worker()
    pub = Publisher(folder)
    pub.publish(training.weights)
    other = dict(training.weights)
    name = "norm"
    if what == "gone":
        del other[name]
    elif what == "new":
        name = "other"
        other[name] = np.zeros(3)
    else:
        other[name] = other[name].reshape(5, 10) if what == "shape" else other[name].view(np.int16)
    with pytest.raises(StateError, match=name):
        pub.publish(other)
    training.step()
    assert pub.publish(training.weights).version == 1
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


def test_a_worker_that_lacks_a_tensor_is_refused_by_name(folder: str) -> None:
    Publisher(folder).publish(Training().weights)
    held = worker()
    del held["norm"]
    with pytest.raises(StateError, match="norm"):
        Subscriber(folder).sync(held)


@pytest.mark.parametrize("step", [-1, 1 << 60, True, 1.5, "7"], ids=repr)
def test_a_step_that_no_manifest_can_hold_does_not_spoil_the_run(folder: str, step: Any) -> None:
    training, held = Training(), worker()
    pub = Publisher(folder)
    pub.publish(training.weights)
    with suppress(TypeError, ValueError, PulseError):
        pub.publish(training.weights, step=step)
    training.step()
    pub.publish(training.weights)
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


def test_ties_that_change_are_refused(folder: str) -> None:
    a, c = np.zeros(4, np.float32), np.ones(4, np.float32)
    pub = Publisher(folder)
    pub.publish({"a": a, "c": c, "z": a})
    with pytest.raises(StateError):
        pub.publish({"a": a, "c": c, "z": c})


def test_an_unknown_codec_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="contxt"):
        Publisher(folder, codec="contxt")  # type: ignore[arg-type]


def test_a_worker_whose_tensors_are_tied_and_the_runs_are_not_is_refused(folder: str) -> None:
    Publisher(folder).publish({"a": np.zeros(4, np.float32), "b": np.ones(4, np.float32)})
    memory, sub = np.zeros(4, np.float32), Subscriber(folder)
    with pytest.raises(StateError):
        sub.sync({"a": memory, "b": memory})


# -- torch ---------------------------------------------------------------------------------------------------------


def models() -> tuple[Any, Any, Any]:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(20, 16)
            self.hidden = torch.nn.Linear(16, 16)
            self.norm = torch.nn.BatchNorm1d(16)
            self.head = torch.nn.Linear(16, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            return self.head(self.norm(self.hidden(self.embed(tokens))))

    torch.manual_seed(0)
    return torch, Model().to(torch.bfloat16), Model().to(torch.bfloat16)


def test_a_torch_model_follows_another_while_it_learns(folder: str) -> None:
    torch, trained, served = models()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    pub, sub = Publisher(folder), Subscriber(folder)
    for step in range(4):
        pub.publish(trained, step=step)
        sub.sync(served)
        theirs, ours = trained.state_dict(), served.state_dict()
        for name in theirs:
            assert torch.equal(theirs[name].reshape(-1).view(torch.uint8), ours[name].reshape(-1).view(torch.uint8)), (
                name
            )
        assert served.head.weight.data_ptr() == served.embed.weight.data_ptr()
        sub.verify()
        loss = torch.nn.functional.cross_entropy(trained(torch.arange(20)), torch.arange(20).flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained.eval()
    pub.publish(trained)
    sub.sync(served.eval())
    assert torch.equal(trained(torch.arange(20)), served(torch.arange(20)))


def test_a_state_dict_made_anew_for_every_sync_goes_on_where_it_was(folder: str) -> None:
    torch, trained, served = models()
    pub, sub = Publisher(folder), Subscriber(folder)
    for _ in range(3):
        pub.publish(trained.state_dict())
        assert sub.sync(served.state_dict()).applied == 1
        with torch.no_grad():
            trained.hidden.weight += 1


def test_a_model_whose_tensors_were_replaced_is_followed_in_its_new_memory(folder: str) -> None:
    torch, trained, served = models()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(trained)
    sub.sync(served)
    served.hidden.weight.data = torch.zeros_like(served.hidden.weight)
    with torch.no_grad():
        trained.hidden.weight += 1
    pub.publish(trained)
    sub.sync(served)
    assert torch.equal(trained.hidden.weight, served.hidden.weight)


class Cut(LocalStore):
    """A store whose next create succeeds and is then interrupted, as by Ctrl-C."""

    interrupt = False

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt


@pytest.mark.parametrize("first", [True, False])
def test_a_publisher_cut_off_just_after_its_commit_goes_on_from_there(folder: str, first: bool) -> None:
    training, held, store = Training(), worker(), Cut(folder)
    pub = Publisher(store)
    if not first:
        pub.publish(training.weights)
        training.step()
    store.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        pub.publish(training.weights)
    training.step()
    assert pub.publish(training.weights).version == (1 if first else 2)
    Subscriber(folder).sync(held)
    assert equal(held, training.weights)


def test_a_worker_cut_off_just_after_a_commit_holds_what_its_weights_are(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    pub.publish(training.weights)
    sub.sync(held)
    training.step()
    pub.publish(training.weights)
    commit = State.commit

    def cut(state: State, transition: Transition) -> None:
        commit(state, transition)
        raise KeyboardInterrupt

    monkeypatch.setattr(State, "commit", cut)
    with pytest.raises(KeyboardInterrupt):
        sub.sync(held)
    monkeypatch.undo()
    assert sub.sync(held).version == 1
    sub.verify()
    assert equal(held, training.weights)


def test_a_worker_interrupted_before_an_empty_patch_is_committed_can_repeat_it(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, held = Training(), worker()
    pub, sub = Publisher(folder), Subscriber(folder)
    for _ in range(2):
        pub.publish(training.weights)
        training.step()
        pub.publish(training.weights)
    sub.sync(held)
    pub.publish(training.weights)  # nothing changed: the digest is the same, the place in the epoch is not

    def cut(_: State, __: Transition) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(State, "commit", cut)
    with pytest.raises(KeyboardInterrupt):
        sub.sync(held)
    monkeypatch.undo()
    training.step()
    pub.publish(training.weights)
    assert sub.sync(held).version == 5
    assert equal(held, training.weights)


def test_a_step_may_be_a_numpy_integer(folder: str) -> None:
    assert Publisher(folder).publish({"w": np.zeros(3)}, step=np.int64(3)).version == 0  # type: ignore[arg-type]


def test_a_grid_takes_numbers_of_pieces_and_borders(folder: str) -> None:
    weights = {name: np.zeros((8, 6), np.float32) for name in ("even", "borders", "mixed", "whole")}
    grid = {"even": (2, 3), "borders": ([1, 5], [4]), "mixed": (4, [3])}
    pub, sub, held = (
        Publisher(folder, grid=grid, min_tile=1),
        Subscriber(folder),
        {n: w + 1 for n, w in weights.items()},
    )
    pub.publish(weights)
    sub.sync(held)
    for flat in weights.values():
        flat += np.arange(48, dtype=np.float32).reshape(8, 6)
    pub.publish(weights)
    sub.sync(held)
    sub.verify()
    assert equal(held, weights)
    (layout,) = (Path(folder) / "layouts").iterdir()
    cuts = {t["name"]: (t.get("rows"), t.get("columns")) for t in json.loads(layout.read_bytes())["tensors"]}
    assert cuts == {"even": ([4], [2, 4]), "borders": ([1, 5], [4]), "mixed": ([2, 4, 6], [3]), "whole": (None, None)}


def test_borders_outside_a_tensor_are_refused(folder: str) -> None:
    with pytest.raises(FormatError, match="'w'"):
        Publisher(folder, grid={"w": ([9], 1)}).publish({"w": np.zeros((4, 4), np.float32)})
