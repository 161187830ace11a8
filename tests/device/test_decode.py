"""A device decodes what the host wrote, and refuses what it would refuse, without a change."""

import tracemalloc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.core.types import Codec, TensorSpec, Tile
from pulsesync.device import decode, pile
from pulsesync.device.memory import empty
from pulsesync.device.state import DeviceBackend
from pulsesync.device.tracked import HotSearch
from pulsesync.errors import FormatError, PulseError
from pulsesync.format import container, index, patch
from pulsesync.format import layout as layouts
from pulsesync.format.codecs import context
from pulsesync.format.codecs.context import Heads
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef, Manifest, PartRef
from pulsesync.format.patch import CodecName
from pulsesync.kernels import spec
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.slices import Slice, find_places
from pulsesync.state.weights import WeightState
from pulsesync.testing import random_bits
from tests.device.pairs import SPECS, Pair, codecs_of, small, to_bits, to_flats, trained
from tests.helpers import Writer, apply, random_state, reader, same

Edit = Callable[[bytes], bytes]


@pytest.mark.parametrize("codec", ["history", "context", "gap", "step", "dense", "xor"])
def test_what_the_host_writes_is_decoded_here(codec: CodecName, device: str, many_lanes: None) -> None:
    layout, state = small()
    writer = Writer(layout, state, codec)
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    for step in range(2 if codec == "history" else 1):
        state = trained(layout, state, step)
        record, parts = writer.advance(state)
        done = PatchTransaction(here).prepare(record, parts)
        here.commit(done)
        assert same(to_bits(here.flats), state)
        assert here.digest == record.digest


def test_an_epoch_remembers_through_a_patch_that_is_coded_without_its_history(device: str, many_lanes: None) -> None:
    layout, state = small(4, (TensorSpec("a", "BF16", (80,)),))
    writer = Writer(layout, state, "history")
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    codecs: list[CodecName] = ["history", "context", "history"]
    for step, codec in enumerate(codecs):
        writer.codec = codec
        state = trained(layout, state, step)
        record, parts = writer.advance(state)
        assert codecs_of(parts[0], layout) == {Codec[codec.upper()]}
        here.commit(PatchTransaction(here).prepare(record, parts))
        assert here.history.digest() == record.history
        assert same(to_bits(here.flats), state)


def test_tiles_of_a_dtype_may_be_stored_raw_or_coded_by_gaps(device: str) -> None:
    layout, state = small(2, (TensorSpec("a", "I16", (16, 9), column_cuts=(4,)), TensorSpec("g", "I16", (9,))))
    new = {"a": random_bits(np.random.default_rng(2), np.uint16, (144,)), "g": state["g"].copy()}
    new["g"][3] ^= 1
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    record, parts = Writer(layout, state, "auto").advance(new)
    assert codecs_of(parts[0], layout) == {Codec.RAW, Codec.GAP}
    here.commit(PatchTransaction(here).prepare(record, parts))
    assert same(to_bits(here.flats), new)


def test_a_dense_tile_takes_little_memory_beside_its_weights(device: str) -> None:
    """On the host; 31 bytes a weight were too many."""
    layout, state = small(2, (TensorSpec("a", "I16", (1 << 15,)),))
    new = {"a": state["a"].copy()}
    new["a"][7::4000] += 1
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    version = Writer(layout, state, "dense").advance(new)
    PatchTransaction(here).prepare(*version)  # kernels are compiled at their first launch
    tracemalloc.start()
    done = PatchTransaction(here).prepare(*version)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    here.commit(done)
    assert same(to_bits(here.flats), new)
    assert peak < 12 * new["a"].size


def test_what_is_written_here_is_decoded_by_the_host(device: str, many_lanes: None) -> None:
    layout, state = small(1, SPECS[:1])
    pair, there = Pair(layout, state, device, "history"), reader(layout, state)
    for step in range(2):
        state = trained(layout, state, step)
        part, transition = pair.encode(state)
        pair.state.commit(transition)
        pair.last, _ = pair.writer.advance(state)
        there.commit(PatchTransaction(there).prepare(pair.last, [bytes(part.data)]))
        assert same(there.flats, state)


# Parts that were tampered with, and sealed again: every hash is right


def resealed(version: tuple[Manifest, list[bytes]], layout: Layout, edit: Edit) -> tuple[Manifest, list[bytes]]:
    """The same version with another payload in its only tile."""
    record, (data,) = version
    header, sections = container.open_part(data)
    opened = patch.open_index(header, sections[0], layout)
    ((entry, body),) = patch.payloads(opened, dict(enumerate(sections)))
    payload = edit(bytes(body))
    lists = [[index.build(opened.tables, [entry._replace(size=len(payload))])], [payload]]
    name, forged = container.build(layout.id, lists)
    return replace(record, parts=(PartRef(name, len(forged)),)), [bytes(forged)]


def with_heads(change: Callable[[Heads], dict[str, Any]], end: int | None = None) -> Edit:
    """Change what a payload of 60 weights says before its stream, and cut that off somewhere."""

    def edit(body: bytes) -> bytes:
        heads, begin = context.parse_heads(memoryview(body), Tile(0, TensorSpec("a", "BF16", (60,)), 0, 0, 60, 1))
        return context.build_heads(heads._replace(**change(heads))) + body[begin:end]

    return edit


def cold(at: int, step: int) -> Edit:
    return with_heads(lambda heads: {"cold": np.array([at]), "steps": np.array([step])})


HOT, COLD = 30, 1  # positions in the tile that is attacked, and what is there
THERE = {HOT: 0x0081, COLD: 0x0680}


def flipped(place: int, bit: int) -> Edit:
    def edit(body: bytes) -> bytes:
        return body[:place] + bytes([body[place] ^ 1 << bit]) + body[place + 1 or len(body) :]

    return edit


ATTACKS = {
    "a word short": with_heads(lambda heads: {"words": heads.words - 1}, end=-2),
    "a word too many": lambda body: with_heads(lambda heads: {"words": heads.words + 1})(body) + b"\0\0",
    "a change more": with_heads(lambda heads: {"changes": heads.changes + 1}),
    "more changes than hot weights": with_heads(lambda heads: {"changes": np.full_like(heads.changes, 60)}),
    "a change fewer": with_heads(lambda heads: {"changes": heads.changes - 1}),
    "fewer lanes": with_heads(lambda heads: {"lanes": heads.lanes // 2}),
    "another table": with_heads(lambda heads: {"table": 1}),
    "a cut above the table": with_heads(lambda heads: {"cut": heads.cut + 1}),
    "a cut below what is remembered": with_heads(lambda heads: {"cut": heads.cut - 1}),
    "a cold change of a hot weight": cold(HOT, 1),
    "half the circle by the wrong way": cold(COLD, 1 << 15),
    "a step beyond half the circle": cold(COLD, (1 << 15) + 1),
    "a position outside": cold(60, 1),
    "a state flipped": flipped(-9, 3),
    "a word flipped": flipped(-1, 7),
}


@dataclass(frozen=True)
class Attacked:
    """A state here and on the host, and the next patch for both, which is coded with a history."""

    here: WeightState
    there: WeightState
    version: tuple[Manifest, list[bytes]]
    held: dict[str, Any]


@pytest.fixture(scope="module")
def attacked(device: str) -> Attacked:
    layout, first = small(7, (TensorSpec("a", "BF16", (60,)),))
    first["a"][list(THERE)] = list(THERE.values())
    writer, states, versions = Writer(layout, first, "history"), [first], []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(spec, "LANE_DECISIONS", 2)
        for step in range(2):
            states.append(trained(layout, states[-1], step + 2))
            states[-1]["a"][list(THERE)] = list(THERE.values())
            versions.append(writer.advance(states[-1]))
    here, there = WeightState(DeviceBackend(layout, to_flats(first, device))), reader(layout, first)
    both: tuple[WeightState, ...] = (here, there)
    for state in both:
        apply(state, versions[0])
        PatchTransaction(state).prepare(*versions[1])  # as it is, it is good
    return Attacked(here, there, versions[1], states[1])


@pytest.mark.parametrize("name", ATTACKS)
def test_a_forged_part_is_refused_as_on_the_host_and_changes_nothing(name: str, attacked: Attacked) -> None:
    here = attacked.here
    version = resealed(attacked.version, here.layout, ATTACKS[name])
    with pytest.raises(PulseError) as expected:
        PatchTransaction(attacked.there).prepare(*version)
    sums, history = here.sums, here.history.digest()
    with pytest.raises(PulseError) as found:
        PatchTransaction(here).prepare(*version)
    assert type(found.value) is type(expected.value)
    assert str(found.value) == str(expected.value)
    assert same(to_bits(here.flats), attacked.held)
    assert (here.sums, here.history.digest()) == (sums, history)


def test_for_changes_that_cannot_be_there_no_memory_is_taken(
    attacked: Attacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = empty

    def taken(count: int, *options: Any) -> Any:
        assert count < 60, f"{count} are allocated"  # fewer for cold changes, each of which takes bytes of the file
        return real(count, *options)

    edit = ATTACKS["more changes than hot weights"]
    version = resealed(attacked.version, attacked.here.layout, edit)
    monkeypatch.setattr(decode, "empty", taken)
    with pytest.raises(FormatError, match=spec.FAULTS[3]):
        PatchTransaction(attacked.here).prepare(*version)


def test_a_part_for_a_tile_without_weights_is_refused(device: str) -> None:
    layout, state = small(0, (TensorSpec("a", "I16", (4,)), TensorSpec("n", "I16", (0,))))
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    record, parts = Writer(layout, state, "gap").advance({**state, "a": state["a"] + 1})
    header, sections = container.open_part(parts[0])
    opened = patch.open_index(header, sections[0], layout)
    entries = [opened.entries[0]._replace(tile=1)]
    name, forged = container.build(layout.id, [[index.build([], entries)], [sections[1]]])
    with pytest.raises(FormatError):
        PatchTransaction(here).prepare(replace(record, parts=(PartRef(name, len(forged)),)), [bytes(forged)])
    assert same(to_bits(here.flats), state)


def test_tiles_with_many_hot_weights_are_decoded_in_parts(
    device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "LISTED", 8)
    monkeypatch.setattr(decode, "LISTED_SHARE", 120)
    layout, state = small(9, tuple(TensorSpec(name, "BF16", (40,)) for name in "abcdef"))
    writer, here = Writer(layout, state, "history"), WeightState(DeviceBackend(layout, to_flats(state, device)))
    launches = watched(monkeypatch)
    for step in range(3):
        state = trained(layout, state, step)
        apply(here, writer.advance(state))
        assert same(to_bits(here.flats), state)
        assert here.history.digest() == writer.history.digest()
    assert len(launches) > 3 * 3, "each patch in one go"
    assert max(rows for rows, _ in launches) <= 40, "lists of several parts are kept at once"


def test_where_memory_lacks_tiles_are_decoded_in_parts_and_a_tile_that_does_not_fit_changes_nothing(
    device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout, state = small(9, tuple(TensorSpec(name, "BF16", (40,)) for name in "abcd"))
    writer, here = Writer(layout, state, "history"), WeightState(DeviceBackend(layout, to_flats(state, device)))
    new, left, launch = trained(layout, state, 0), [20], HotSearch._launch
    version = writer.advance(new)

    def allocate(self: HotSearch, *given: Any) -> Any:
        if self._borders[-1] > left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(self, *given)

    monkeypatch.setattr(HotSearch, "_launch", allocate)
    transition = PatchTransaction(here).prepare(*version)
    assert "too little free memory to decode 4 tiles" in caplog.text
    left[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        PatchTransaction(here).prepare(*version)
    assert same(to_bits(here.flats), state)
    here.commit(transition)
    assert same(to_bits(here.flats), new)


@pytest.mark.parametrize("squashed", [False, True])
def test_a_pile_is_freed_before_the_next(
    squashed: bool, device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pile, "LEAST", 40)
    layout, state = small(9, tuple(TensorSpec(name, "BF16", (40,)) for name in "abcd"))
    writer, here = Writer(layout, state, "history"), WeightState(DeviceBackend(layout, to_flats(state, device)))
    mark = writer.mark()
    if not squashed:
        state = trained(layout, state, 0)
        apply(here, writer.advance(state))
    version = writer.advance(trained(layout, state, 1))
    launches = watched(monkeypatch)
    PatchTransaction(here).prepare(*(writer.squash(mark, "context") if squashed else version))
    assert len(launches) == 4, "one for each pile"
    assert launches[1:] == [(0, 0)] * 3, "lists and bitmaps of the pile before"


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many entries of lists and how many bitmaps there are at each search for hot weights from now on."""
    known: list[tuple[Any, Any]] = []
    found: list[tuple[int, int]] = []
    launch = HotSearch._launch

    def watch(self: HotSearch, *given: Any) -> Any:
        rows, bitmaps = (
            ([one for ref in refs if (one := ref()) is not None] for refs in zip(*known, strict=True))
            if known
            else ([], [])
        )
        found.append((sum(one.numel() for one in rows), len(bitmaps)))
        listed = launch(self, *given)
        known.append((weakref.ref(listed.rows), weakref.ref(listed.bitmap)))
        return listed

    monkeypatch.setattr(HotSearch, "_launch", watch)
    return found


def in_reverse(writer: Writer, state: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Manifest, list[bytes]]:
    """A version in a part for each tile, the last tile first, as ranks of a sharded publisher may own them."""
    base, layout = BaseRef(0, writer.digest), writer.layout
    parts = [patch.encode(layout, [tile], state, new, writer.sums, codec=writer.codec) for tile in layout.tiles[::-1]]
    for part in parts:
        writer.sums = {**writer.sums, **part.sums}
    writer.version += 1
    return writer._manifest(base, parts, 1), [bytes(part.data) for part in parts]


@pytest.mark.parametrize("codec", ["gap", "step", "xor", "context"])
def test_parts_need_not_be_in_the_order_of_their_tiles(codec: CodecName, device: str, many_lanes: None) -> None:
    layout, state = small(3, (TensorSpec("a", "BF16", (40,)), TensorSpec("b", "BF16", (90,))))
    new = trained(layout, state, 1)
    version = in_reverse(Writer(layout, state, codec), state, new)
    here = WeightState(DeviceBackend(layout, to_flats(state, device)))
    here.commit(PatchTransaction(here).prepare(*version))
    assert same(to_bits(here.flats), new)


def test_a_worker_with_some_groups_reads_parts_in_any_order(device: str) -> None:
    """Groups of plain codecs have no checks: weights in the wrong place would not be noticed."""
    sizes = {f"layers.{n}.{name}": size for n in range(2) for name, size in (("p", 20), ("q", 30))}
    plain = layouts.make([TensorSpec(name, "I32", (size,)) for name, size in sizes.items()])
    layout = layouts.bundle(plain, {tile.ordinal: int(tile.tensor.name.endswith("p")) for tile in plain.tiles})
    state = random_state(np.random.default_rng(0), plain)
    new = {name: np.where(np.arange(bits.size) % 3 == 0, bits ^ 1, bits) for name, bits in state.items()}
    version = in_reverse(Writer(layout, state, "gap"), state, new)
    mine = {name: bits for name, bits in state.items() if name.startswith("layers.1.")}
    places = find_places(layout, {"layers.1.*": Slice(), "*": None})
    here = WeightState(DeviceBackend(layout, to_flats(mine, device), {}, places))
    here.commit(PatchTransaction(here).prepare(*version))
    assert same(to_bits(here.flats), {name: new[name] for name in mine})
