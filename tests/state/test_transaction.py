"""The rules of a transaction, on each backend: all of a version or nothing of it, in host memory and on a device."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Bits, TensorSpec
from pulsesync.errors import BaseMismatchError, FormatError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.patch import WholeBlock
from pulsesync.kernels import spec as kernel_spec
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import Recount, Snapshot, WeightState
from pulsesync.store import MemoryStore
from tests.backends import host_as_device
from tests.helpers import Writer, apply, copied, load, near, nudge, same

LAYOUT = layouts.make(
    [TensorSpec("a", "BF16", (12, 10), column_cuts=(4,)), TensorSpec("b", "F32", (60,)), TensorSpec("c", "I16", (12,))],
    {"tied": "b"},
)


class OnHost:
    """States in host memory."""

    single_write: tuple[type, str] = (HostBackend, "write_change")

    def make(self, layout: Layout, bits: Mapping[str, Bits], tied: Bits | None = None) -> WeightState:
        return WeightState(HostBackend(layout, copied(bits), {} if tied is None else {"b": [tied.copy()]}))

    def bits(self, state: WeightState) -> dict[str, Bits]:
        """All tensors of a state, those that are tied under their number."""
        copies = {f"tied {n}": flat for others in state.backend.copies.values() for n, flat in enumerate(others)}
        return copied({**state.flats, **copies})


class OnDevice(OnHost):
    """States on a GPU, or in Triton's interpreter."""

    def __init__(self, device: str) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("triton")
        from pulsesync.device.changes import PileChanges
        from tests.device import interpreter, pairs

        interpreter.mend()
        self.device, self.pairs, self.single_write = device, pairs, (PileChanges, "write")

    def make(self, layout: Layout, bits: Mapping[str, Bits], tied: Bits | None = None) -> WeightState:
        from pulsesync.device.state import DeviceBackend

        flats = self.pairs.to_flats(bits, self.device)
        copies = {} if tied is None else {"b": list(self.pairs.to_flats({"b": tied}, self.device).values())}
        return WeightState(DeviceBackend(layout, flats, copies))

    def bits(self, state: WeightState) -> dict[str, Bits]:
        copies = {f"tied {n}": flat for others in state.backend.copies.values() for n, flat in enumerate(others)}
        return self.pairs.to_bits({**state.flats, **copies})


class Run:
    """A writer, and a live state that follows it."""

    def __init__(self, backend: OnHost, codec: patch.CodecName = "gap", tied: bool = False) -> None:
        rng = np.random.default_rng(1)
        first = {spec.name: near(rng, spec.dtype, (spec.size,), 4) for spec in LAYOUT.tensors}
        self.backend, self.writer, self.states = backend, Writer(LAYOUT, first, codec), [first]
        self.live = backend.make(LAYOUT, first, first["b"] if tied else None)

    def write(self) -> Any:
        """The next version."""
        rng = np.random.default_rng(len(self.states))
        self.states.append({name: nudge(rng, bits, 0.4) for name, bits in self.states[-1].items()})
        return self.writer.advance(self.states[-1])

    @property
    def facts(self) -> tuple[Any, ...]:
        """Everything that a refused version must leave alone, weights apart."""
        live = self.live
        return dict(live.sums), live.digest, live.history.index, live.history.digest(), live.differing_tie, live.torn

    def assert_at(self, number: int, facts: tuple[Any, ...] | None = None) -> None:
        bits = self.backend.bits(self.live)
        assert same({name: bits[name] for name in self.states[0]}, self.states[number])
        assert all(np.array_equal(flat, bits["b"]) for name, flat in bits.items() if name.startswith("tied"))
        assert self.live.backend.count() == self.live.sums
        assert facts is None or self.facts == facts


@pytest.fixture(params=["host", "device"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OnHost:
    monkeypatch.setattr(kernel_spec, "LANE_DECISIONS", 2)  # many lanes in small blocks, which the interpreter likes
    return OnHost() if request.param == "host" else OnDevice(request.getfixturevalue("device"))


def read(taken: Snapshot) -> dict[str, Bits]:
    """All of a snapshot, block by block."""
    out = {spec.name: np.empty(spec.size, spec.kind.bits) for spec in LAYOUT.tensors}
    for tile in LAYOUT.tiles:
        for number in range(tile.block_count):
            tile.write(out[tile.tensor.name], tile.block_range(number)[0], taken.block(tile, number))
    return out


class FailingWrites:
    """Counts the single writes of commits, and has one of them fail, before it writes or after it."""

    def __init__(self, backend: OnHost, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
        owner, name = backend.single_write
        write = getattr(owner, name)
        self.count, self.fails_at, self.writes_first = 0, -1, False

        def counted(*args: Any) -> None:
            self.count += 1
            fails = self.count - 1 == self.fails_at
            if not fails or self.writes_first:
                write(*args)
            if fails:
                raise error

        monkeypatch.setattr(owner, name, counted)

    def fail(self, at: int, writes_first: bool) -> None:
        self.count, self.fails_at, self.writes_first = 0, at, writes_first


def test_preparing_touches_nothing(backend: OnHost) -> None:
    run = Run(backend, "history")
    apply(run.live, run.write())
    before = run.facts
    PatchTransaction(run.live).prepare(*run.write())
    run.assert_at(1, before)


def test_a_commit_is_undone_by_the_transition_that_it_returns(backend: OnHost) -> None:
    run = Run(backend, "history")
    apply(run.live, run.write())
    first = run.facts
    back = apply(run.live, run.write())
    second = run.facts
    assert back.changed == sum(int((run.states[1][name] != run.states[2][name]).sum()) for name in run.states[0])
    again = run.live.commit(back)
    run.assert_at(1, first)
    run.live.commit(again)
    run.assert_at(2, second)


def test_two_transitions_back_are_joined_to_one(backend: OnHost) -> None:
    run = Run(backend)
    before = run.facts
    first, second = apply(run.live, run.write()), apply(run.live, run.write())
    run.live.commit(run.live.join(second, first))
    run.assert_at(0, before)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_commit_that_fails_at_any_write_is_rolled_back(
    backend: OnHost, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(backend, tied=True)
    prepared, before, taken = PatchTransaction(run.live).prepare(*run.write()), run.facts, run.live.snapshot()
    writes = FailingWrites(backend, monkeypatch, error)
    run.live.commit(run.live.commit(prepared))
    commits = writes.count // 2
    assert commits > 2
    for n in range(2 * commits):
        writes.fail(at=n // 2, writes_first=n % 2 == 1)
        with pytest.raises(error):
            run.live.commit(prepared)
        run.assert_at(0, before)
        assert same(read(taken), run.states[0])
    writes.fail(at=-1, writes_first=False)
    run.live.commit(prepared)
    run.assert_at(1)
    assert same(read(taken), run.states[0])


def test_a_commit_that_fails_after_its_last_write_is_rolled_back(
    backend: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(backend)
    prepared, before, taken = PatchTransaction(run.live).prepare(*run.write()), run.facts, run.live.snapshot()

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(type(run.live.backend), "compose", fail)  # what keeps the snapshot readable
        with pytest.raises(MemoryError):
            run.live.commit(prepared)
    run.assert_at(0, before)
    assert same(read(taken), run.states[0])
    run.live.commit(prepared)
    run.assert_at(1)


def test_a_snapshot_stays_readable_while_versions_are_committed_and_undone(backend: OnHost) -> None:
    run = Run(backend)
    first = run.live.snapshot()
    apply(run.live, run.write())
    second = run.live.snapshot()
    back = apply(run.live, run.write())
    for _ in range(2):
        assert same(read(first), run.states[0])
        assert same(read(second), run.states[1])
        back = run.live.commit(back)
    run.live.commit(back)
    assert not second.changes  # nothing is kept for a snapshot of the live weights
    assert first.sums == Writer(LAYOUT, run.states[0]).sums


def test_a_patch_for_another_state_is_refused(backend: OnHost) -> None:
    run = Run(backend)
    first, second = run.write(), run.write()
    before = run.facts
    with pytest.raises(BaseMismatchError):
        PatchTransaction(run.live).prepare(*second)
    with pytest.raises(BaseMismatchError, match="has the layout 000000000000, and the local weights have"):
        PatchTransaction(run.live).prepare(replace(first[0], layout="00" * 32), first[1])
    run.assert_at(0, before)
    apply(run.live, first)
    with pytest.raises(BaseMismatchError):
        PatchTransaction(run.live).prepare(*first)
    run.assert_at(1)


def test_a_patch_that_leads_to_other_weights_is_refused(backend: OnHost) -> None:
    """The writer's weights are not the local ones, though the digest that it says it starts from is."""
    run = Run(backend)
    other, before = copied(run.states[0]), run.facts
    other["c"] = other["c"] + 5
    part = patch.encode(LAYOUT, LAYOUT.tiles, other, run.states[0], run.writer.sums, codec="gap")
    record = run.writer._manifest(run.writer.mark().base, [part], 1)
    with pytest.raises(VerificationError, match="decoded tensor 'c' differs"):
        PatchTransaction(run.live).prepare(record, [bytes(part.data)])
    run.assert_at(0, before)


@pytest.mark.parametrize("field", ["digest", "history"])
def test_a_patch_that_promises_another_digest_is_refused(backend: OnHost, field: str) -> None:
    run = Run(backend, "history")
    (record, parts), before = run.write(), run.facts
    other = replace(record, digest="00" * 32) if field == "digest" else replace(record, history="00" * 32)
    with pytest.raises(VerificationError, match="differ"):
        PatchTransaction(run.live).prepare(other, parts)
    run.assert_at(0, before)


def test_two_parts_that_change_the_same_tile_are_refused(backend: OnHost) -> None:
    run = Run(backend)
    record, parts = run.write()
    with pytest.raises(FormatError, match="two parts"):
        PatchTransaction(run.live).prepare(replace(record, parts=record.parts * 2), parts * 2)
    run.assert_at(0)


def test_an_anchor_that_cannot_be_written_to_the_end_leaves_torn_weights(
    backend: OnHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(backend)
    run.write()
    record, parts = run.writer.anchor(pieces=2)
    bodies = [Body.of(data, LAYOUT, ref.id) for ref, data in zip(record.parts, parts, strict=True)]
    staged, decode, calls = StagedBlocks(), WholeBlock.decode, []
    sums = AnchorLoader(run.live).check_whole(record, bodies, staged)

    def fail(*args: Any) -> Bits:
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return decode(*args)

    with monkeypatch.context() as patched:
        patched.setattr(WholeBlock, "decode", fail)
        with pytest.raises(MemoryError):
            AnchorLoader(run.live).load_whole(staged, sums)
    staged.close()
    torn = run.live.torn
    load(run.live, (record, parts))
    assert (torn, run.live.torn) == (True, False)
    run.assert_at(1)


def test_only_blocks_of_an_anchor_that_differ_from_the_weights_are_staged_and_written(backend: OnHost) -> None:
    run = Run(backend, tied=True)
    record, parts = run.writer.anchor(pieces=2)
    bodies = [Body.of(data, LAYOUT, ref.id) for ref, data in zip(record.parts, parts, strict=True)]
    for damaged in (run.live.flats["a"], run.live.backend.copies["b"][0]):
        damaged[7] ^= 1
    with StagedBlocks() as staged:
        sums = AnchorLoader(run.live).check_whole(record, bodies, staged)
        assert {block.tile.tensor.name for block in staged.blocks} == {"a", "b"}
        AnchorLoader(run.live).load_whole(staged, sums)
    assert Recount(run.live).digest() == record.digest
    run.assert_at(0)


@pytest.mark.usefixtures("no_spare_memory")
def test_weights_that_changed_on_disk_after_they_were_checked_are_not_taken_for_a_version(backend: OnHost) -> None:
    run = Run(backend)
    run.write()
    record, parts = run.writer.anchor()
    bodies = [Body.of(data, LAYOUT, ref.id) for ref, data in zip(record.parts, parts, strict=True)]
    with StagedBlocks() as staged:
        sums = AnchorLoader(run.live).check_whole(record, bodies, staged)
        assert staged._file is not None
        (byte,) = os.pread(staged._file.fileno(), 1, 0)
        os.pwrite(staged._file.fileno(), bytes([byte ^ 1]), 0)
        with pytest.raises(VerificationError, match="weights in a temporary file"):
            AnchorLoader(run.live).load_whole(staged, sums)
    assert run.live.torn
    load(run.live, (record, parts))
    run.assert_at(1)


def test_an_anchor_that_is_not_its_version_is_refused(backend: OnHost) -> None:
    run = Run(backend)
    before = run.facts
    target = {name: nudge(np.random.default_rng(9), bits, 0.4) for name, bits in run.states[0].items()}
    record, _ = Writer(LAYOUT, target).anchor(pieces=2)
    _, others = run.writer.anchor(pieces=2)
    bodies = [Body.of(data, LAYOUT) for data in others]
    with pytest.raises(VerificationError, match="decoded anchor differs from the manifest"):
        AnchorLoader(run.live).check_whole(record, bodies)
    run.assert_at(0, before)


@pytest.mark.parametrize("where", ["flat", "copy"])
def test_a_write_by_another_program_is_found_and_its_tensor_named(backend: OnHost, where: str) -> None:
    run = Run(backend, tied=True)
    assert Recount(run.live).find_damage() is None
    assert Recount(run.live).find_damaged() == []
    (run.live.flats["b"] if where == "flat" else run.live.backend.copies["b"][0])[7] ^= 1
    damaged = Recount(run.live).find_damage()
    assert damaged is not None
    assert damaged.tensor.name == "b"
    assert Recount(run.live).find_damaged() == ["b"]
    with pytest.raises(VerificationError, match="'b'"):
        Recount(run.live).digest()


@pytest.fixture
def worker(backend: OnHost) -> Iterator[dict[str, Any]]:
    """Tensors of a worker: those of the device are torch's."""
    if isinstance(backend, OnDevice):
        import torch

        with host_as_device():
            yield {"w": torch.zeros(40, dtype=torch.bfloat16, device=backend.device)}
    else:
        import ml_dtypes

        yield {"w": np.zeros(40, ml_dtypes.bfloat16)}


def test_several_versions_of_one_sync_are_as_few_commits_as_the_state_allows_and_one_undo(
    worker: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ml_dtypes

    store, weights = MemoryStore(), {"w": np.zeros(40, ml_dtypes.bfloat16)}
    with Publisher(store, codec="gap") as publisher:
        for n in range(4):
            weights["w"][n :: n + 2] += 1
            publisher.publish(weights)
    subscriber = Subscriber(store)
    subscriber.sync(worker, version=0)
    first, commit, commits = subscriber.state and subscriber.state.digest, WeightState.commit, []

    def counted(state: WeightState, transition: Any) -> Any:
        commits.append(transition)
        return commit(state, transition)

    monkeypatch.setattr(WeightState, "commit", counted)
    report = subscriber.sync(worker)
    assert subscriber.state is not None
    assert (report.path, len(commits)) == (("patch",) * 3, 1 if subscriber.state.backend.overlays else 3)
    commits.clear()
    assert subscriber.sync(worker, version=0).path == ("undo",)
    assert len(commits) == 1
    assert subscriber.verify() == first
