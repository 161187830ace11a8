"""Parts made on a device are, byte for byte, those that the host makes."""

import numpy as np
import pytest
import torch

from pulsesync.core.types import Codec, TensorSpec
from pulsesync.device import encode, pile
from pulsesync.device.state import DeviceBackend
from pulsesync.format import container, index, tables
from pulsesync.format import layout as layouts
from pulsesync.format.patch import CodecName
from pulsesync.format.tables import Contexts
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import Recount, WeightState
from tests.device.launches import counted
from tests.device.pairs import Pair, codecs_of, small, to_bits, to_flats, trained
from tests.helpers import FLOATS, same
from tests.tiers import slow


@pytest.mark.parametrize(
    ("codec", "used"),
    [
        ("history", {Codec.HISTORY, Codec.GAP}),
        ("context", {Codec.CONTEXT, Codec.GAP}),
        ("gap", {Codec.GAP}),
        ("step", {Codec.STEP, Codec.GAP}),
        ("dense", {Codec.DENSE, Codec.RAW}),
        ("xor", {Codec.XOR}),
    ],
)
def test_parts_are_those_of_the_host(codec: CodecName, used: set[Codec], device: str, many_lanes: None) -> None:
    layout, state = small()
    pair = Pair(layout, state, device, codec)
    for step in range(2 if codec == "history" else 1):
        state = trained(layout, state, step)
        _, data = pair.advance(state)
        assert codecs_of(data, layout) == used  # integers always as gaps
        assert same(to_bits(pair.state.flats), state)


@pytest.mark.parametrize("codec", ["history", slow("context")])
def test_piles_of_a_dtype_share_a_table_and_make_the_parts_of_one(
    codec: CodecName, device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a large model the tiles of a dtype are in several piles, and what they decide is listed twice."""
    monkeypatch.setattr(pile, "LEAST", 24)
    monkeypatch.setattr(pile, "MOST", 36)
    monkeypatch.setattr(pile, "EACH", 24)
    monkeypatch.setattr(encode, "LISTED_ONCE", 0)
    layout, state = small(7, (*(TensorSpec(name, "BF16", (24,)) for name in "abc"), TensorSpec("d", "F32", (20,))))
    pair = Pair(layout, state, device, codec)
    worker = WeightState(DeviceBackend(layout, to_flats(state, device)))
    assert [len(one.tiles) for one in pair.backend.piles] == [1, 1, 1, 1]
    for step in range(2):
        state = trained(layout, state, step)
        record, data = pair.advance(state)
        worker.commit(PatchTransaction(worker).prepare(record, [data]))
        assert same(to_bits(worker.flats), state)
        assert Recount(worker).digest() == record.digest


def test_auto_chooses_as_the_host_does(device: str, many_lanes: None) -> None:
    """A tile that pays for its tables, and one that is replaced; then a change that pays for nothing, and none."""
    specs = (TensorSpec("a", "BF16", (2500,)), TensorSpec("b", "F16", (24,)), TensorSpec("c", "I16", (12,)))
    layout, state = small(3, specs)
    pair = Pair(layout, state, device)
    new = trained(layout, state, 1, 0.9)
    new["b"] = np.random.default_rng(2).integers(0, 1 << 16, 24).astype(np.uint16)
    _, data = pair.advance(new)
    assert codecs_of(data, layout) >= {Codec.HISTORY, Codec.RAW}
    new["c"][3] += 1
    _, data = pair.advance(new)
    assert codecs_of(data, layout) == {Codec.GAP}
    new["a"][3] += 1
    _, data = pair.advance(new)
    assert codecs_of(data, layout) == {Codec.STEP}
    _, data = pair.advance(new)  # nothing changes
    assert codecs_of(data, layout) == set()


def test_long_steps_and_every_float_are_coded_as_on_the_host(device: str, many_lanes: None) -> None:
    """Any bits to any bits: NaNs, infinities and half the circle among them."""
    layout = layouts.make(TensorSpec(name, name, (16,)) for name in FLOATS)
    rng = np.random.default_rng(4)
    state = {s.name: rng.integers(0, 1 << 8 * s.kind.itemsize, 16).astype(s.kind.bits) for s in layout.tensors}
    new = {name: bits.copy() for name, bits in state.items()}
    for name, bits in state.items():
        sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
        state[name][:3] = new[name][:3] = 0
        new[name][0] = ~bits.dtype.type(0)  # half the circle down
        new[name][1] = sign
        new[name][4:10] = rng.permutation(bits[4:10])
        new[name][10:13] ^= sign
    _, data = Pair(layout, state, device, "history").advance(new)
    assert codecs_of(data, layout) == {Codec.HISTORY}


@pytest.mark.parametrize(
    ("dtype", "listed_once", "few"),
    [
        ("BF16", False, 10),
        *(slow(*case) for case in (("F32", True, 1 << 13), ("BF16", True, 1 << 13), ("F8_E4M3", True, 10))),
    ],
)
def test_long_steps_that_occur_often_are_listed_as_on_the_host(
    dtype: str, listed_once: bool, few: int, device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that leave zero go as far as each other, in the first patch of an epoch and in one with a history.

    With two contexts by magnitude, in place of 24, a few of them are enough to be worth it.
    """
    monkeypatch.setattr(tables, "CLASSES", 2)
    monkeypatch.setattr(encode, "FEW_LONG", few)
    if not listed_once:
        monkeypatch.setattr(encode, "LISTED_ONCE", 0)
    layout, state = small(5, (TensorSpec("a", dtype, (330,)),))
    kind = layout.tensors[0].kind
    sign = kind.bits.type(1 << 8 * kind.itemsize - 1)
    far = sign // 2 + kind.bits.type(5)
    state["a"][1::4] = 0
    pair = Pair(layout, state, device, "history")
    worker = WeightState(DeviceBackend(layout, to_flats(state, device)))
    for first in (1, 5):
        state = {"a": state["a"].copy()}
        state["a"][first::8] = far
        state["a"][first + 8 :: 64] |= sign
        state["a"][2::40] += kind.bits.type(1)
        record, data = pair.advance(state)
        _, sections = container.open_part(data)
        found, _ = index.parse(sections[0], 1, [len(section) for section in sections])
        assert int(far) in found[0].sizes
        worker.commit(PatchTransaction(worker).prepare(record, [data]))
        assert same(to_bits(worker.flats), state)


def test_a_weight_that_turned_cold_and_hot_again_is_coded_as_on_the_host(device: str, many_lanes: None) -> None:
    layout, state = small(5, (TensorSpec("a", "BF16", (60,)),))
    pair = Pair(layout, state, device, "history")
    small_ones = np.flatnonzero(state["a"] & 0x7FFF < 0x300)[:2]
    grown = trained(layout, state, 1)
    grown["a"][small_ones] = 0x3F80  # out of what is remembered
    pair.advance(grown)
    back = trained(layout, grown, 2)
    back["a"][small_ones] = state["a"][small_ones]
    pair.advance(back)
    pair.advance(trained(layout, back, 3))


def test_a_difference_is_coded_as_on_the_host_after_the_base_has_moved(device: str, many_lanes: None) -> None:
    layout, state = small(8, (TensorSpec("a", "BF16", (60,)),))
    pair = Pair(layout, state, device, "history")
    first = trained(layout, state, 1)
    then = trained(layout, first, 2)
    then["a"][::3] = state["a"][::3]  # takes back what the first changes
    pending = pair.difference(then)
    part, transition = pair.encode(first)
    pair.last, _ = pair.writer.advance(first)
    pair.state.commit(transition)
    part, second = pending.after(transition).encode(pair.last, "history")
    record, (data,) = pair.writer.advance(then)
    assert bytes(part.data) == bytes(data)
    pair.state.commit(second)
    assert Recount(pair.state).digest() == record.digest


def test_tables_of_any_size_are_counted_by_the_kernels_of_the_first_two_patches(device: str) -> None:
    rows = torch.tensor([0, 1, 1], dtype=torch.int16, device=device)
    blocks = encode._BlockCounts(*(np.array(some) for some in ([1, 1], [1, 1], [2, 1])))
    plan = encode._StreamPlan.of(blocks, np.array([0, 2, 3]), torch.device(device))
    with counted() as compiled:
        for ages in (1, 2, 8, 32):  # the number of the patch in its epoch
            for classes in (5, 24):
                contexts = Contexts(0, classes, ages, 38)
                counts = encode._symbol_counts(contexts, torch.device(device))
                encode._count_rows(rows, plan, contexts, counts)
                by_row = counts.sum(dim=0)[:, 0]
                assert by_row.tolist() == [1, 2, *(0 for _ in range(classes * ages - 2))]
            if ages == 2:
                early = len(compiled)
    assert compiled[early:] == []


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["auto", "context"])
def test_large_tensors_are_coded_as_on_the_host(codec: CodecName, device: str) -> None:
    """Several blocks, each with 32 lanes, a block of few decisions, and columns cut."""
    specs = (
        TensorSpec("a", "BF16", (2500, 1000)),
        TensorSpec("b", "F32", (1100, 1000), column_cuts=(300,)),
        TensorSpec("c", "F8_E4M3", (1_300_001,)),
        TensorSpec("d", "F16", (70_000,)),
    )
    layout, state = small(6, specs)
    pair = Pair(layout, state, device, codec)
    for step in range(3):
        state = trained(layout, state, step, 0.1)
        pair.advance(state)
        assert same(to_bits(pair.state.flats), state)
