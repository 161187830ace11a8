"""Weights that are compared while the trainer computes, with a base that is copied to the device piece by piece.

The result is that of a single comparison, and an optimizer passed to `hold` does not step before the comparison ends.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pulsesync import Publisher, Subscriber
from pulsesync.device import baseline as baselines
from pulsesync.device import compare, streamed
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference, LaterDifference
from pulsesync.device.changes import find_changes
from pulsesync.device.memory import to_host
from pulsesync.errors import ClosedError, StateError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.publish import reporting
from pulsesync.publish.baseline import Keep
from pulsesync.publish.commit import root_record
from pulsesync.state.sharding import layout_of, owner_of, share_of
from pulsesync.store import MemoryStore
from tests.device import test_bundles as bundled
from tests.device.pairs import place
from tests.device.test_baseline import (
    Model,
    by_both,
    equal,
    find_by_place,
    kept,
    model,
    objects,
    on,
    read,
    sharded,
    train_,
    train_shards_,
)
from tests.publish.test_sharded import Group, by_rows
from tests.runs import Watched
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("parts_as_objects")

PATIENCE_S = 30.0


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    """One whose steps change nothing."""
    return kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # type: ignore[call-arg]  # as all of them have it


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block and every bundle is a piece of its own."""
    monkeypatch.setattr(streamed, "PIECE", 1)


class Gate:
    """Stops the comparison, once for each piece, until it is opened; then it may be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self._find = find_changes
        monkeypatch.setattr(compare, "find_changes", self)

    def __call__(self, *args: Any) -> Any:
        self.reached.set()
        assert self._open.wait(PATIENCE_S), "nobody opened the gate"
        if self.error is not None:
            raise self.error
        return self._find(*args)

    def open(self, error: BaseException | None = None) -> None:
        self.error = error
        self._open.set()

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    gate.open()
    yield gate
    gate.open()


class StoreGate:
    """Keeps a store from taking a body."""

    def __init__(self) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()

    def __call__(self, verb: str, key: str) -> None:
        if (verb, key[:6]) == ("put", "parts/"):
            self.arrived.set()
            self.go.wait(PATIENCE_S)


@contextmanager
def stepping(held: torch.optim.Optimizer) -> Iterator[threading.Event]:
    """A step in a thread of its own; yields what says that it was made."""
    made = threading.Event()

    def step() -> None:
        held.step()
        made.set()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield made
    finally:
        thread.join(PATIENCE_S)
    assert made.is_set()


# What is found


class Base:
    """A base in host memory, and sources that are compared with it."""

    def __init__(self, old: Model, layout_from: Any, cast: dict[str, str] | None = None, **grid: Any) -> None:
        self.cast, self.baseline = cast or {}, DeviceBaseline(place(str(next(iter(old.values())).device)), "host")
        shards = self.baseline.read(old, self.cast)
        layout: Layout = layout_from(layout_of([shards.windows], shards.ties, **grid))
        self.share = share_of(layout, owner_of(layout, [shards.windows]), 0, shards)
        state = self.baseline.copy(self.share, shards)
        self.state, self.last = state, root_record(None, 0, layout.id, state.digest, None, ())

    def compare(self, new: Model) -> DeviceDifference:
        return self.baseline.compare(self.share, self.state, self.baseline.read(new, self.cast), "auto")

    def compare_later(self, new: Model) -> LaterDifference:
        shards = self.baseline.read(new, self.cast)
        later = self.baseline.compare_later(self.share, self.state, shards, "auto")
        assert isinstance(later, LaterDifference)
        return later


def compared(
    old: Model, new: Model, layout_from: Any = layouts.bundle, cast: dict[str, str] | None = None, **grid: Any
) -> tuple[DeviceDifference, DeviceDifference]:
    """How a source differs from a base in host memory: found at once, and in pieces."""
    base = Base(old, layout_from, cast, **grid)
    at_once, later = base.compare(new), base.compare_later(new)
    base.baseline.wait()
    return at_once, later._found.result(0)


def assert_same(at_once: DeviceDifference, later: DeviceDifference) -> None:
    assert [run.pile for run in later.runs] == [run.pile for run in at_once.runs]
    for a, b in zip(at_once.runs, later.runs, strict=True):
        for x, y in ((a.starts, b.starts), (a.positions, b.positions), (a.old, b.old), (a.new, b.new)):
            assert (x.dtype, to_host(x)[0].tolist()) == (y.dtype, to_host(y)[0].tolist())
        assert to_host(a.chunks())[0].tolist() == to_host(b.chunks())[0].tolist()


def without_bundles(layout: Layout) -> Layout:
    return layout


@pytest.mark.parametrize(
    ("moves", "layout_from"), [(3, layouts.bundle), (3, without_bundles), (0, layouts.bundle), slow(0, without_bundles)]
)
def test_pieces_yield_what_one_comparison_yields(layout_from: Any, moves: int, device: str, small_pieces: None) -> None:
    """Several dtypes, tensors between words and turned ones, each a tile of its own or in bundles."""
    old = bundled.model(device)
    new = {name: tensor.clone() for name, tensor in old.items() if name not in ("tied", "turned")}
    new |= {"turned": old["turned"].t().clone().t(), "tied": new["a"]}
    for step in range(moves):
        bundled.train_(new, step)
    at_once, later = compared(old, new, layout_from)
    assert bool(at_once.runs) == bool(moves)
    assert_same(at_once, later)


def test_masters_are_cast_in_pieces(device: str, small_pieces: None) -> None:
    """Masters are rounded to BF16 as they are read, along with tensors that are not cast, and to FP16 in a copy."""
    torch.manual_seed(3)
    old = {"a": torch.randn(300), "b": torch.randn(30).bfloat16(), "c": torch.randn(7, 5), "d": torch.randn(9).half()}
    old = {name: tensor.to(device) for name, tensor in old.items()}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor[::3] *= 1.02
    for layout_from in (layouts.bundle, without_bundles):
        at_once, later = compared(old, new, layout_from, cast={"a": "BF16", "c": "F16"})
        assert len(at_once.runs) == 2
        assert_same(at_once, later)


def test_columns_of_a_matrix_are_brought_in_pieces(device: str, small_pieces: None) -> None:
    """Of the base, too, they do not lie in a row."""
    old = {"a": torch.randn(40, 12, device=device).bfloat16()}
    new = {"a": old["a"].clone()}
    new["a"].view(torch.int16)[::3, ::5] += 1
    at_once, later = compared(old, new, without_bundles, grid={"a": (2, 3)}, min_tile=1)
    assert len(at_once.runs[0].pile.tiles) == 6
    assert_same(at_once, later)


@pytest.mark.parametrize("grid", [{}, {"grid": {"a": (1, 2)}, "min_tile": 1}], ids=["rows", "columns"])
def test_a_tile_is_brought_block_by_block(
    grid: Any, device: str, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of 2^13 weights: the interpreter takes seconds for one of 2^20."""
    monkeypatch.setattr("pulsesync.core.types.BLOCK", 1 << 13)
    old = {"a": torch.zeros(4, 4096, dtype=torch.int16, device=device)}
    old |= {"z": torch.zeros((1 << 13) + 1, dtype=torch.int16, device=device)}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(-1)[[0, 5, 4095, 4096, (1 << 13) - 1, 1 << 13, -1]] = 7
    at_once, later = compared(old, new, without_bundles, **grid)
    pieces = streamed.cut(at_once.runs[0].pile)
    assert [(piece.blocks.start, piece.pile.blocks) for piece in pieces] == [(n, 1) for n in range(4)]
    assert_same(at_once, later)


def test_pieces_fill_a_buffer(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are put together up to its size; each begins at a word of eight bytes there."""
    monkeypatch.setattr(streamed, "PIECE", 200)
    old = {name: torch.randn(33, device=device).bfloat16() for name in "abcdefg"}
    new = {name: tensor.clone() for name, tensor in old.items()}
    for tensor in new.values():
        tensor.view(torch.int16)[-1] += 1
    at_once, later = compared(old, new, without_bundles)
    pieces = streamed.cut(at_once.runs[0].pile)
    assert [len(piece.pile.tiles) for piece in pieces] == [3, 3, 1]
    assert [(piece.blocks.start, piece.blocks.stop) for piece in pieces] == [(0, 3), (3, 6), (6, 7)]
    assert_same(at_once, later)


@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_trainer_that_is_blocked_without_a_hold_is_told_once(
    keep: Keep, device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "NOTICED_S", 0.0)
    weights = model(device)
    with on(device), Publisher(MemoryStore(), keep=keep) as pub:
        for step in range(4):
            pub.publish(weights, step=step, wait=False).result(PATIENCE_S)
    advice = [record for record in caplog.records if "Publisher.hold(optimizer)" in record.getMessage()]
    assert len(advice) == (keep == "host")


# What is published


@pytest.mark.parametrize("codec", ["history", slow("gap")])
def test_a_run_is_byte_for_byte_that_of_the_host(codec: Any, device: str, small_pieces: None, many_lanes: None) -> None:
    stores, states = (MemoryStore(), MemoryStore()), []
    for store, here in zip(stores, (True, False), strict=True):
        weights, held = model(device if here else "cpu"), optimizer()
        with on(device) if here else nullcontext(), Publisher(store, codec=codec, keep="host") as pub:
            pub.hold(held)
            for step in range(3):
                future = pub.publish(weights, step=step, wait=False)
                states.append(kept(weights))
                held.step()
                train_(weights, step)
                future.result(PATIENCE_S)
    assert objects(stores[0]) == objects(stores[1])
    for version, state in enumerate(states[:3]):
        assert equal(read(stores[0], version, state), state)


def test_the_source_is_that_of_the_call_wherever_its_tensors_are_later(device: str, gate: Gate) -> None:
    """What a tensor is assigned through `.data`, and tensors that are gone, change nothing."""
    store, held = MemoryStore(), optimizer()
    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        weights = {"a": torch.nn.Parameter(torch.randn(40, device=device)), "b": torch.randn(9, device=device)}
        for step in range(2):
            pub.publish(weights, step=step)  # twice, so that the addresses are known
            weights["b"][step] += 1
        weights["a"].data[3:9] += 1
        state = kept(weights)
        gate.close()
        future = pub.publish(weights, step=2, wait=False)
        weights["a"].data = torch.full((40,), 5.0, device=device)
        del weights
        others = [torch.full((40,), 7.0, device=device) for _ in range(20)]
        gate.open()
        future.result(PATIENCE_S)
        del others
    assert equal(read(store, 2, state), state)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_waits_for_the_comparison_and_publish_does_not(
    kind: type[torch.optim.Optimizer], device: str, gate: Gate
) -> None:
    weights, held, other = model(device), optimizer(kind), optimizer()
    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.hold(other)
        pub.publish(weights)
        train_(weights, 1)
        gate.close()
        future = pub.publish(weights, step=1, wait=False)
        assert gate.reached.wait(PATIENCE_S)
        with stepping(held) as made, stepping(other) as also_made:
            assert not made.wait(0.05)
            assert not also_made.is_set()
            assert not future.done()
            gate.open()
        assert future.result(PATIENCE_S).version == 1


@pytest.mark.parametrize("keep", ["device", "host", None])
def test_without_an_optimizer_or_on_the_device_publish_compares(keep: Keep | None, device: str, gate: Gate) -> None:
    """So does every publish that waits."""
    weights, held = model(device), optimizer()
    with on(device), Publisher(MemoryStore(), codec="gap", keep=keep) as pub:
        if keep != "host":
            pub.hold(held)
        pub.publish(weights)
        train_(weights, 1)
        gate.reached.clear()
        future = pub.publish(weights, step=1, wait=False)
        assert gate.reached.is_set()
        overwritten = kept(weights)
        for tensor in weights.values():
            tensor.zero_()
        held.step()
        assert future.result(PATIENCE_S).version == 1
        store = pub.store
    assert equal(read(store, 1, overwritten), overwritten)


def test_in_host_memory_an_optimizer_is_held_and_never_waits() -> None:
    weights, held = model("cpu"), optimizer()
    with Publisher(MemoryStore()) as pub:
        pub.hold(held)
        held.step()  # nothing is published yet
        for step in range(2):
            future = pub.publish(weights, step=step, wait=False)
            held.step()
            train_(weights, step)
        assert future.result(PATIENCE_S).version == 1


def test_a_publish_waits_for_the_comparison_before(device: str, gate: Gate) -> None:
    weights, held, opened = model(device), optimizer(), threading.Event()

    def open_later() -> None:
        opened.set()
        gate.open()

    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        train_(weights, 1)
        gate.close()
        futures = [pub.publish(weights, step=1, wait=False)]
        assert gate.reached.wait(PATIENCE_S)
        threading.Timer(0.05, open_later).start()
        futures.append(pub.publish(weights, step=2, wait=False))
        assert opened.is_set()
        assert {future.result(PATIENCE_S).version for future in futures} <= {1, 2}


def test_versions_are_coalesced_and_start_from_the_one_before(device: str, small_pieces: None) -> None:
    """The store holds the first version up, while two more are published."""
    store, stopped, weights, held, states = Watched(), StoreGate(), model(device), optimizer(), []
    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        store.before = stopped
        futures = []
        for step in range(1, 4):
            held.step()
            train_(weights, step)
            states.append(kept(weights))
            futures.append(pub.publish(weights, step=step, wait=False))
            assert stopped.arrived.wait(PATIENCE_S)
        stopped.go.set()
        reports = [future.result(PATIENCE_S) for future in futures]
    assert [report.version for report in reports] == [1, 2, 2]
    assert equal(read(store, 1, states[0]), states[0])
    assert equal(read(store, 2, states[2]), states[2])


def test_steps_that_are_skipped_are_not_compared(device: str, gate: Gate) -> None:
    weights, held, store = model(device), optimizer(), MemoryStore()
    with on(device), Publisher(store, codec="gap", keep="host", publish_every=2) as pub:
        pub.hold(held)
        pub.publish(weights, step=0)
        found = []
        for step in range(1, 5):
            train_(weights, step)
            gate.reached.clear()
            found.append(pub.publish(weights, step=step, wait=False).result(PATIENCE_S).version)
            assert gate.reached.is_set() == (found[-1] is not None)
            held.step()
    assert found == [None, 1, None, 2]
    assert equal(read(store, 2, weights), kept(weights))


def test_a_run_is_resumed_and_goes_on(device: str, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store, weights, states = MemoryStore(), model(device), []
    find_by_place(monkeypatch)
    with on(device):
        for begin in (0, 2):
            held = optimizer()
            with Publisher(store, codec="gap", keep="host") as pub:
                pub.hold(held)
                for step in range(begin, begin + 2):
                    future = pub.publish(weights, step=step, wait=False)
                    states.append(kept(weights))
                    held.step()
                    train_(weights, step)
                    assert future.result(PATIENCE_S).version == step
    for version, state in enumerate(states):
        assert equal(read(store, version, state), state)
    assert len(objects(store)) == 4  # an anchor and three patches


def test_the_base_moves_only_when_a_comparison_with_it_is_over(device: str, gate: Gate) -> None:
    """The first version is committed while the second is compared with the version before."""
    store, stopped, weights, held, states = Watched(), StoreGate(), model(device), optimizer(), []
    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        store.before = stopped
        train_(weights, 1)
        first = pub.publish(weights, step=1, wait=False)
        states.append(kept(weights))
        assert stopped.arrived.wait(PATIENCE_S)
        held.step()
        train_(weights, 1)
        gate.close()
        second = pub.publish(weights, step=2, wait=False)
        states.append(kept(weights))
        assert gate.reached.wait(PATIENCE_S)
        stopped.go.set()
        assert not first.done()
        gate.open()
        assert [first.result(PATIENCE_S).version, second.result(PATIENCE_S).version] == [1, 2]
    for version, state in enumerate(states, 1):
        assert equal(read(store, version, state), state)


def test_a_base_is_not_written_while_it_is_read(device: str, gate: Gate) -> None:
    """Also where nobody needs what is found any more."""
    weights, written = {"a": torch.randn(30, device=device)}, threading.Event()
    base = Base(weights, layouts.bundle)
    gate.close()
    base.compare_later(weights)

    def write() -> None:
        with base.state.backend.exclusive():
            written.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert gate.reached.wait(PATIENCE_S)
    assert not written.wait(0.05)
    gate.open()
    thread.join(PATIENCE_S)
    assert written.is_set()


# What fails


def test_a_failure_is_in_the_future_and_the_next_version_covers_it(device: str, gate: Gate) -> None:
    weights, held, store = model(device), optimizer(), MemoryStore()
    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        train_(weights, 1)
        gate.close()
        future = pub.publish(weights, step=1, wait=False)
        gate.open(MemoryError("no memory on the device"))
        held.step()  # does not hang
        assert isinstance(future.exception(PATIENCE_S), MemoryError)
        gate.open()
        train_(weights, 2)
        assert pub.publish(weights, step=2).version == 1
    assert equal(read(store, 1, weights), kept(weights))


def test_a_failure_that_nobody_reads_is_raised_by_the_next_publish(device: str, gate: Gate) -> None:
    weights, held = model(device), optimizer()
    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        gate.close()
        pub.publish(weights, step=1, wait=False)
        gate.open(MemoryError("no memory on the device"))
        with pytest.raises(MemoryError, match="no memory"):
            pub.flush()
        gate.open()
        with pytest.raises(MemoryError, match="no memory"):
            pub.publish(weights, step=2, wait=False)
        assert pub.publish(weights, step=2).version == 1


def test_the_version_before_is_committed_when_a_comparison_fails(device: str, gate: Gate) -> None:
    store, stopped, weights, held = Watched(), StoreGate(), model(device), optimizer()
    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        store.before = stopped
        train_(weights, 1)
        first = pub.publish(weights, step=1, wait=False)
        state = kept(weights)
        assert stopped.arrived.wait(PATIENCE_S)
        held.step()
        train_(weights, 2)
        gate.close()
        second = pub.publish(weights, step=2, wait=False)
        assert gate.reached.wait(PATIENCE_S)
        gate.open(MemoryError("no memory on the device"))
        stopped.go.set()
        assert first.result(PATIENCE_S).version == 1
        assert isinstance(second.exception(PATIENCE_S), MemoryError)
        gate.open()
        assert pub.publish(weights, step=3).version == 2
    assert equal(read(store, 1, state), state)
    assert equal(read(store, 2, weights), kept(weights))


def test_a_version_that_fails_in_the_store_is_in_the_next(device: str, small_pieces: None) -> None:
    store, weights, held = Watched(), model(device), optimizer()

    def refuse(verb: str, key: str) -> None:
        if verb == "put":
            raise StoreError("down", retryable=True)

    with on(device), Publisher(store, codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        pub.flush()
        train_(weights, 1)
        store.before = refuse
        future = pub.publish(weights, step=1, wait=False)
        assert isinstance(future.exception(PATIENCE_S), StoreError)
        store.before = lambda verb, key: None
        held.step()
        train_(weights, 2)
        assert pub.publish(weights, step=2, wait=False).result(PATIENCE_S).version == 1
        state = kept(weights)
    assert equal(read(store, 1, state), state)


@pytest.mark.parametrize("times", [1, 3], ids=["viewed", "known"])
def test_weights_that_something_else_writes_meanwhile_are_not_published(times: int, device: str, gate: Gate) -> None:
    weights, held = model(device), optimizer()
    if times > 1:
        del weights["turned"]  # then a source is recognized by the addresses of its tensors
    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        for step in range(times):
            pub.publish(weights, step=step)
        gate.close()
        future = pub.publish(weights, step=times, wait=False)
        assert gate.reached.wait(PATIENCE_S)
        weights["b"][3] += 1  # not by an optimizer that was passed to hold()
        gate.open()
        assert isinstance(error := future.exception(PATIENCE_S), StateError)
        assert "call hold() with every optimizer" in str(error)
        held.step()
        assert pub.publish(weights, step=times + 1).version == times


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_the_thread_is_started_leaves_nobody_waiting(
    when: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, held, start = model(device), optimizer(), baselines.start  # type: ignore[attr-defined]

    def interrupted(work: Any) -> None:
        if when == "after":
            start(work)
        raise KeyboardInterrupt

    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        with monkeypatch.context() as patched:
            patched.setattr(baselines, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pub.publish(weights, step=1, wait=False)
        held.step()
        assert pub.publish(weights, step=2, wait=False).result(PATIENCE_S).version == 1


def test_where_no_thread_can_be_started_publish_compares(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, held = model(device), optimizer()

    def refuse(work: Any) -> None:
        raise RuntimeError("can't start new thread")

    with on(device), Publisher(MemoryStore(), codec="gap", keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        train_(weights, 1)
        monkeypatch.setattr(baselines, "start", refuse)
        future = pub.publish(weights, step=1, wait=False)
        state = kept(weights)
        held.step()
        train_(weights, 2)
        assert future.result(PATIENCE_S).version == 1
        store = pub.store
    assert equal(read(store, 1, state), state)


# Optimizers


def test_close_waits_for_the_comparison_and_releases_the_optimizer(device: str, gate: Gate) -> None:
    weights, held = model(device), optimizer()
    with on(device):
        pub = Publisher(MemoryStore(), codec="gap", keep="host")
        pub.hold(held)
        pub.publish(weights)
        train_(weights, 1)
        gate.close()
        future = pub.publish(weights, step=1, wait=False)
        threading.Timer(0.05, gate.open).start()
        pub.close()
    assert future.result(0).version == 1
    assert not held._optimizer_step_pre_hooks
    held.step()
    with pytest.raises(ClosedError):
        pub.hold(held)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match=r"register_step_pre_hook, as every torch\.optim\.Optimizer has; got dict"):
        Publisher(MemoryStore()).hold({})


def publish(group: Group, weights: Model, step: int) -> list[Any]:
    """The futures of all ranks."""
    shards = group.shards_of(weights)
    return group.crew.act(lambda team: group.pubs[team.rank].publish(shards[team.rank], step=step, wait=False))


@pytest.mark.parametrize("split", [by_rows, slow(by_both)])
def test_ranks_hold_their_own_optimizers(split: Any, device: str, small_pieces: None, many_lanes: None) -> None:
    stores = MemoryStore(), MemoryStore()
    for store, where in zip(stores, ("cpu", device), strict=True):
        weights = sharded(where)
        with nullcontext() if store is stores[0] else on(device):
            group = Group(store, 2, split, timeout_s=60, codec="context", cast="BF16", min_tile=1, keep="host")
            held = [optimizer() for _ in group.pubs]
            for pub, one in zip(group.pubs, held, strict=True):
                pub.hold(one)
            for step in range(3):
                futures = publish(group, weights, step)
                for one in held:
                    one.step()
                train_shards_(weights, step)
                assert [future.result(PATIENCE_S).version for future in futures] == [step, step]
            group.flush()  # the anchor, too, which a thread writes
    assert objects(stores[0]) == objects(stores[1])


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_training_on_cannot_change_what_is_published(side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer steps as soon as it may, with work queued before and after every call: nothing else waits."""
    monkeypatch.setattr(streamed, "PIECE", 1 << 22)
    store, futures, states = MemoryStore(), [], []
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream), Publisher(store, keep="host") as pub:
        weights = {
            "a": torch.nn.Parameter((torch.randn(1 << 24, device="cuda") * 0.02).bfloat16()),
            "m": torch.nn.Parameter((torch.randn(1 << 22, device="cuda") * 0.02).bfloat16()),
            **{f"s{n}": torch.nn.Parameter(torch.randn(999, device="cuda") * 0.02) for n in range(20)},
        }
        held = torch.optim.SGD(list(weights.values()), lr=1e-2)
        pub.hold(held)
        pub.publish(weights)
        for step in range(8):
            torch.cuda._sleep(20_000_000)
            for parameter in weights.values():
                parameter.grad = torch.randn_like(parameter) * parameter.detach().abs()
            held.step()
            futures.append(pub.publish(weights, step=step, wait=False))
            states.append({name: tensor.detach().clone() for name, tensor in weights.items()})
        held.step()
        with torch.no_grad():
            for parameter in weights.values():
                parameter.zero_()
        versions = {future.result(60).version: state for future, state in zip(futures, states, strict=True)}
        stream.synchronize()
    assert max(number or 0 for number in versions) > 1
    there, worker = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}, Subscriber(store)
    for version, state in sorted(versions.items()):  # of steps that were coalesced into one, the last
        worker.sync(there, version=version)
        assert equal(there, state)


@pytest.mark.gpu
def test_publish_returns_before_the_base_has_come_over_the_bus(gate: Gate) -> None:
    """The comparison runs concurrently with the trainer's own stream, and waits for what was launched before it."""
    weights = {"a": torch.nn.Parameter((torch.randn(1 << 26, device="cuda") * 0.02).bfloat16())}
    held = torch.optim.SGD(list(weights.values()), lr=1.0)
    with Publisher(MemoryStore(), keep="host") as pub:
        pub.hold(held)
        pub.publish(weights)
        pub.publish(weights, step=1, wait=False).result(60)  # compiles kernels and allocates buffers
        gate.close()
        future = pub.publish(weights, step=2, wait=False)
        busy = torch.cuda.Event()
        torch.cuda._sleep(1_000_000_000)  # half a second or more: a forward and backward pass
        busy.record()
        gate.open()
        held.step()  # waits for the comparison, not for the work
        assert not busy.query()
        assert future.result(60).version == 2
