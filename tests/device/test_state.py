"""A live state on a device: transactions, snapshots, ties, slices and anchors, as on the host."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.core.types import Bits, TensorSpec
from pulsesync.device.changes import PileChanges
from pulsesync.device.state import DeviceState
from pulsesync.errors import BaseMismatchError, FormatError, StateError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout
from pulsesync.state.slices import Slice
from pulsesync.testing import mutate
from tests.device.pairs import SPECS, small, to_bits, to_flats, trained
from tests.helpers import Writer, apply, copied, load, random_state, reader, same


class Followed:
    """A writer on the host, and a state on the device that follows it; the codec is the plainest, to be quick."""

    def __init__(self, device: str, codec: patch.CodecName = "gap", specs: tuple[TensorSpec, ...] = SPECS[:3]) -> None:
        self.layout, first = small(1, specs)
        self.states = [first]
        self.writer = Writer(self.layout, first, codec)
        self.here = DeviceState(self.layout, to_flats(first, device))

    def write(self) -> Any:
        self.states.append(trained(self.layout, self.states[-1], len(self.states)))
        return self.writer.advance(self.states[-1])

    @property
    def bits(self) -> dict[str, Bits]:
        return to_bits(self.here.flats)


# Transactions


def test_preparing_touches_nothing_and_committing_can_be_undone(device: str, many_lanes: None) -> None:
    run = Followed(device, "history", SPECS[:1])
    apply(run.here, run.write())
    before = run.here.digest, run.here.history.to_bytes()
    prepared = run.here.prepare(*run.write())
    assert same(run.bits, run.states[1])
    assert (run.here.digest, run.here.history.to_bytes()) == before
    back = run.here.commit(prepared)
    assert same(run.bits, run.states[2])
    assert run.here.recount() == run.writer.digest
    assert prepared.changed == back.changed == sum(int((run.states[1][n] != run.states[2][n]).sum()) for n in run.bits)
    again = run.here.commit(back)
    assert same(run.bits, run.states[1])
    assert (run.here.recount(), run.here.history.to_bytes()) == before
    run.here.commit(again)
    assert same(run.bits, run.states[2])


def test_two_ways_are_joined_to_one(device: str) -> None:
    run = Followed(device)
    first = apply(run.here, run.write())
    second = apply(run.here, run.write())
    assert same(run.bits, run.states[2])
    run.here.commit(run.here.join(second, first))
    assert same(run.bits, run.states[0])
    assert run.here.recount() == Writer(run.layout, run.states[0]).digest


def test_a_write_that_fails_half_way_is_put_back(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Followed(device)
    prepared = run.here.prepare(*run.write())
    taken = run.here.snapshot()
    write, calls, digest = PileChanges.write, [], run.here.digest

    def fail_once(self: PileChanges, at: torch.Tensor) -> None:
        calls.append(self)
        if len(calls) == 2:
            raise MemoryError("no more of it")
        write(self, at)

    monkeypatch.setattr(PileChanges, "write", fail_once)
    with pytest.raises(MemoryError):
        run.here.commit(prepared)
    assert same(run.bits, run.states[0])
    assert run.here.recount() == digest
    assert taken.changes == ()
    run.here.commit(prepared)  # and can be repeated
    assert same(run.bits, run.states[1])


def test_patches_for_other_states_are_refused(device: str) -> None:
    run = Followed(device)
    first, second = run.write(), run.write()
    with pytest.raises(BaseMismatchError):
        run.here.prepare(*second)
    apply(run.here, first)
    with pytest.raises(BaseMismatchError):
        run.here.prepare(*first)
    assert same(run.bits, run.states[1])
    with pytest.raises(BaseMismatchError, match="another layout"):
        Followed(device, specs=SPECS[:1]).here.prepare(*first)


def test_a_patch_that_leads_elsewhere_is_refused(device: str) -> None:
    """The writer's weights are not those that are held, though the digest it says it starts from is."""
    run = Followed(device)
    other = copied(run.states[0])
    other["c"] = other["c"] + 5
    sums = dict(run.writer.sums)
    part = patch.encode(run.layout, run.layout.tiles, other, run.states[0], sums, codec="gap")
    record = run.writer._manifest(run.writer.mark().base, [part], 1)
    with pytest.raises(VerificationError):
        run.here.prepare(record, [bytes(part.data)])
    assert same(run.bits, run.states[0])


def test_two_parts_for_one_tile_are_refused(device: str) -> None:
    run = Followed(device)
    new = trained(run.layout, run.states[0], 1)
    part = patch.encode(run.layout, run.layout.tiles, run.states[0], new, run.writer.sums, codec="gap")
    record = run.writer._manifest(run.writer.mark().base, [part, part], 1)
    with pytest.raises(FormatError, match="two parts"):
        run.here.prepare(record, [bytes(part.data)] * 2)


# Looking


def test_damage_is_found(device: str) -> None:
    run = Followed(device)
    assert run.here.find_damage() is None
    run.here.flats["b"][7] ^= 1
    damaged = run.here.find_damage()
    assert damaged is not None
    assert damaged.tensor.name == "b"
    assert run.here.digest == run.writer.digest
    assert run.here.recount() != run.writer.digest


def test_damage_of_a_tied_copy_is_told_of_its_tensor(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "F16", (3,)), TensorSpec("b", "BF16", (4, 5))], {"tied": "b"})
    model = {"a": torch.zeros(3, dtype=torch.float16, device=device)}
    model |= {name: torch.zeros(4, 5, dtype=torch.bfloat16, device=device) for name in ("b", "tied")}
    here = DeviceState.attach(model, layout)
    model["tied"][0, 0] = 1
    damaged = here.find_damage()
    assert damaged is not None
    assert damaged.tensor.name == "b"


def test_blocks_are_read_to_the_host(device: str) -> None:
    run = Followed(device)
    for tile in run.layout.tiles:
        if tile.size:
            expected = tile.read_block(run.states[0][tile.tensor.name], 0)
            assert np.array_equal(run.here.block(tile, 0), expected)


def test_a_snapshot_stays_while_versions_are_committed_and_undone(device: str) -> None:
    run = Followed(device)

    def read(taken: Any) -> dict[str, Bits]:
        out = {name: np.zeros_like(bits) for name, bits in run.states[0].items()}
        for tile in run.layout.tiles:
            for number in range(tile.block_count):
                tile.write_block(out[tile.tensor.name], number, taken.block(tile, number))
        return out

    first = run.here.snapshot()
    apply(run.here, run.write())
    second = run.here.snapshot()
    back = apply(run.here, run.write())
    assert same(read(first), run.states[0])
    assert same(read(second), run.states[1])
    run.here.commit(back)
    assert same(read(first), run.states[0])
    assert same(read(second), run.states[1])
    assert second.changes == []  # nothing is held for a snapshot of what is there
    assert first.sums == reader(run.layout, run.states[0]).sums


# Tensors of a process


TIED = layouts.make([TensorSpec("a", "BF16", (5, 6))], {"tied": "a"})


def tensors(layout: Layout, state: Mapping[str, Bits], device: str) -> dict[str, torch.Tensor]:
    """BF16 tensors in their shapes."""
    flats = to_flats(state, device)
    return {spec.name: flats[spec.name].view(torch.bfloat16).view(spec.shape) for spec in layout.tensors}


def test_a_tied_tensor_with_memory_of_its_own_is_written_too(device: str) -> None:
    state = random_state(np.random.default_rng(1), TIED)
    model = tensors(TIED, state, device)
    model["tied"] = model["a"].clone()
    here = DeviceState.attach(model, TIED)
    new = {"a": mutate(np.random.default_rng(2), state["a"], 0.3)}
    writer = Writer(TIED, state, "gap")
    apply(here, writer.advance(new))
    for tensor in model.values():
        assert np.array_equal(to_bits({"a": tensor.reshape(-1).view(torch.int16)})["a"], new["a"])
    assert here.holds(model)
    assert not here.holds({**model, "tied": model["tied"].clone()})
    model["tied"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(VerificationError, match="tied"):
        here.recount()
    with pytest.raises(BaseMismatchError, match="tied"):
        here.prepare(*writer.advance(state))
    load(here, writer.anchor())
    assert np.array_equal(to_bits({"a": model["tied"].reshape(-1).view(torch.int16)})["a"], state["a"])


def test_a_tied_tensor_in_the_same_memory_is_written_once(device: str) -> None:
    state = random_state(np.random.default_rng(1), TIED)
    model = tensors(TIED, state, device)
    model["tied"] = model["a"]
    assert DeviceState.attach(model, TIED).copies == {}


def test_slices_of_whole_tiles_are_followed(device: str, many_lanes: None) -> None:
    layout, state = small(4, (TensorSpec("a", "BF16", (12, 10), row_cuts=(4,), column_cuts=(5,)), *SPECS[1:3]))
    slices = {"a": Slice(rows=(4, 12), columns=(5, 10)), "b": None}
    window = state["a"].reshape(12, 10)[4:, 5:].reshape(-1)
    here = DeviceState(layout, to_flats({"a": window, "c": state["c"]}, device), {}, slices)
    writer = Writer(layout, state, "history")
    for step in range(2):
        state = trained(layout, state, step)
        apply(here, writer.advance(state))
        expected = {"a": state["a"].reshape(12, 10)[4:, 5:].reshape(-1), "c": state["c"]}
        assert same(to_bits(here.flats), expected)
    assert here.find_damage() is None


REFUSED: dict[str, Callable[[Any], Any]] = {
    "missing": lambda model: {"b": model["b"]},
    "is not contiguous": lambda model: {**model, "a": model["a"].t().contiguous().t()},
    "is F16": lambda model: {**model, "a": model["a"].half()},
    "in the run": lambda model: {**model, "a": model["a"][:4]},
    "no tensor": lambda model: {**model, "z": model["a"].clone()},
    "share memory": lambda model: {"a": model["a"], "b": model["a"].view(-1)[:9].view(3, 3)},
    "not a tensor": lambda model: {**model, "a": 3},
}


@pytest.mark.parametrize("why", REFUSED)
def test_tensors_that_do_not_fit_are_refused(why: str, device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (5, 6)), TensorSpec("b", "BF16", (3, 3))])
    model = tensors(layout, random_state(np.random.default_rng(3), layout), device)
    DeviceState.attach(model, layout)
    with pytest.raises(StateError, match=why):
        DeviceState.attach(REFUSED[why](model), layout)


def test_fp32_tensors_for_a_bf16_run_are_refused_and_the_fix_is_named(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (5, 6))])
    wide = {"a": torch.zeros(5, 6, device=device)}
    with pytest.raises(StateError, match="pass widen=True"):
        DeviceState.attach(wide, layout)
    with pytest.raises(StateError, match="cannot be widened"):
        DeviceState.attach(wide, layout, widen=True)
    DeviceState.attach({"a": wide["a"].bfloat16()}, layout, widen=True)


def test_a_slice_through_a_tile_is_refused(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (6, 4), row_cuts=(3,))])
    flats = to_flats({"a": np.zeros(16, np.uint16)}, device)
    with pytest.raises(StateError, match="cuts through a tile"):
        DeviceState(layout, flats, {}, {"a": Slice(rows=(0, 4))})


# Anchors


def test_anchors_are_loaded_and_bad_ones_refused(device: str) -> None:
    run = Followed(device, specs=SPECS[1:])
    target = trained(run.layout, run.states[0], 9)
    record, parts = Writer(run.layout, target).anchor(pieces=2)
    bad = Writer(run.layout, run.states[0]).anchor(pieces=2)[1]
    with pytest.raises((VerificationError, FormatError)):
        load(run.here, (record, bad))
    assert same(run.bits, run.states[0])
    load(run.here, (record, parts))
    assert same(run.bits, target)
    assert run.here.recount() == record.digest
