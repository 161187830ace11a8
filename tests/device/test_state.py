"""Live weights on a device: what is read, tied, sliced and refused. The rules of a transaction are in tests/state."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.core.types import Bits, TensorSpec
from pulsesync.device.state import DeviceBackend
from pulsesync.errors import BaseMismatchError, FormatError, StateError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.slices import Slice, find_places
from pulsesync.state.weights import Recount, WeightState
from pulsesync.testing import mutate
from tests.device.pairs import SPECS, small, to_bits, to_flats, trained
from tests.helpers import Writer, apply, load, random_state, same


class Followed:
    """A writer on the host, and a state on the device that follows it; the codec is the plainest, to be quick."""

    def __init__(self, device: str, codec: patch.CodecName = "gap", specs: tuple[TensorSpec, ...] = SPECS[:3]) -> None:
        self.layout, first = small(1, specs)
        self.states = [first]
        self.writer = Writer(self.layout, first, codec)
        self.here = WeightState(DeviceBackend(self.layout, to_flats(first, device)))

    def write(self) -> Any:
        self.states.append(trained(self.layout, self.states[-1], len(self.states)))
        return self.writer.advance(self.states[-1])

    @property
    def bits(self) -> dict[str, Bits]:
        return to_bits(self.here.flats)


def test_blocks_are_read_to_the_host(device: str) -> None:
    run = Followed(device)
    for tile in run.layout.tiles:
        if tile.size:
            expected = tile.read_block(run.states[0][tile.tensor.name], 0)
            assert np.array_equal(run.here.block(tile, 0), expected)


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
    here = WeightState.attach(DeviceBackend, model, TIED)
    new = {"a": mutate(np.random.default_rng(2), state["a"], 0.3)}
    writer = Writer(TIED, state, "gap")
    apply(here, writer.advance(new))
    for tensor in model.values():
        assert np.array_equal(to_bits({"a": tensor.reshape(-1).view(torch.int16)})["a"], new["a"])
    assert here.is_attached_to(model)
    assert not here.is_attached_to({**model, "tied": model["tied"].clone()})
    model["tied"].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(VerificationError, match="tied"):
        Recount(here).digest()
    with pytest.raises(BaseMismatchError, match="tied"):
        PatchTransaction(here).prepare(*writer.advance(state))
    load(here, writer.anchor())
    assert np.array_equal(to_bits({"a": model["tied"].reshape(-1).view(torch.int16)})["a"], state["a"])


def test_a_tied_tensor_in_the_same_memory_is_written_once(device: str) -> None:
    state = random_state(np.random.default_rng(1), TIED)
    model = tensors(TIED, state, device)
    model["tied"] = model["a"]
    assert WeightState.attach(DeviceBackend, model, TIED).backend.copies == {}


def test_slices_of_whole_tiles_are_followed(device: str, many_lanes: None) -> None:
    layout, state = small(4, (TensorSpec("a", "BF16", (12, 10), row_cuts=(4,), column_cuts=(5,)), *SPECS[1:3]))
    slices = {"a": Slice(rows=(4, 12), columns=(5, 10)), "b": None}
    window = state["a"].reshape(12, 10)[4:, 5:].reshape(-1)
    here = WeightState(
        DeviceBackend(layout, to_flats({"a": window, "c": state["c"]}, device), places=find_places(layout, slices))
    )
    writer = Writer(layout, state, "history")
    for step in range(2):
        state = trained(layout, state, step)
        apply(here, writer.advance(state))
        expected = {"a": state["a"].reshape(12, 10)[4:, 5:].reshape(-1), "c": state["c"]}
        assert same(to_bits(here.flats), expected)
    assert Recount(here).find_damage() is None


REFUSED: dict[str, Callable[[Any], Any]] = {
    "and this model does not": lambda model: {"b": model["b"]},
    "is not contiguous": lambda model: {**model, "a": model["a"].t().contiguous().t()},
    "is F16": lambda model: {**model, "a": model["a"].half()},
    "in the run": lambda model: {**model, "a": model["a"][:4]},
    "and the run does not": lambda model: {**model, "z": model["a"].clone()},
    "share memory": lambda model: {"a": model["a"], "b": model["a"].view(-1)[:9].view(3, 3)},
    "must be a tensor": lambda model: {**model, "a": 3},
}


@pytest.mark.parametrize("why", REFUSED)
def test_tensors_that_do_not_fit_are_refused(why: str, device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (5, 6)), TensorSpec("b", "BF16", (3, 3))])
    model = tensors(layout, random_state(np.random.default_rng(3), layout), device)
    WeightState.attach(DeviceBackend, model, layout)
    with pytest.raises(StateError, match=why):
        WeightState.attach(DeviceBackend, REFUSED[why](model), layout)


def test_fp32_tensors_for_a_bf16_run_are_refused_and_the_fix_is_named(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (5, 6))])
    wide = {"a": torch.zeros(5, 6, device=device)}
    with pytest.raises(StateError, match="Pass widen=True"):
        WeightState.attach(DeviceBackend, wide, layout)
    with pytest.raises(StateError, match="cannot be widened"):
        WeightState.attach(DeviceBackend, wide, layout, widen=True)
    WeightState.attach(DeviceBackend, {"a": wide["a"].bfloat16()}, layout, widen=True)


def test_a_slice_through_a_tile_is_refused(device: str) -> None:
    layout = layouts.make([TensorSpec("a", "BF16", (6, 4), row_cuts=(3,))])
    flats = to_flats({"a": np.zeros(16, np.uint16)}, device)
    with pytest.raises(StateError, match="splits a tile of the run"):
        WeightState(DeviceBackend(layout, flats, places=find_places(layout, {"a": Slice(rows=(0, 4))})))


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
    assert Recount(run.here).digest() == record.digest
