"""Applying a version is a transaction: all of it, or nothing and the same again."""

from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import (
    BaseMismatchError,
    ChecksumError,
    FormatError,
    PulseError,
    StateError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.model import Bits, TensorSpec, TilePatch
from pulsesync.state import State
from tests.helpers import Writer, changed_state, copied, near, nudge, random_layout, random_state, reader, same, seeds

Version = tuple[Manifest, list[bytes]]
SPECS = [
    TensorSpec("a", "BF16", (60, 50), (20,), (25,)),
    TensorSpec("b", "F32", (500,)),
    TensorSpec("c", "I64", (40,)),
]


def start() -> tuple[Writer, State, np.random.Generator]:
    """A writer and a reader at the second version of a run, with a history."""
    rng, layout = np.random.default_rng(0), layouts.make(SPECS)
    state = {spec.name: near(rng, spec.dtype, (spec.size,), 30) for spec in SPECS}
    writer = Writer(layout, state)
    held = reader(layout, state)
    for codec in ("history", "auto"):
        writer.codec = codec  # type: ignore[assignment]
        apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    return writer, held, rng


def apply(state: State, version: Version) -> None:
    state.commit(state.prepare(*version))


def snapshot(state: State) -> tuple[Any, ...]:
    copies = {name: [bits.copy() for bits in some] for name, some in state.copies.items()}
    return copied(state.flats), copies, dict(state.sums), state.history.digest(), state.digest


def assert_untouched(state: State, before: tuple[Any, ...]) -> None:
    assert same(state.flats, before[0])
    assert all(
        np.array_equal(a, b) for name in before[1] for a, b in zip(state.copies[name], before[1][name], strict=True)
    )
    assert (state.sums, state.history.digest(), state.digest) == before[2:]


@given(seeds, st.lists(st.sampled_from(["auto", "history", "context", "gap", "dense"]), min_size=1, max_size=5))
def test_a_reader_follows_a_writer_bit_for_bit(seed: int, codecs: list[patch.CodecName]) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    held = reader(layout, random_state(rng, layout))
    apply(held, writer.anchor())
    assert same(held.flats, writer.state)
    for codec in codecs:
        writer.codec = codec
        apply(held, writer.advance(changed_state(rng, writer.state, 0.05, small=bool(rng.integers(0, 2)))))
        assert same(held.flats, writer.state)
        assert held.digest == writer.digest == held.recount()
        assert held.history.digest() == writer.history.digest()


def test_a_new_epoch_forgets_the_one_before() -> None:
    writer, held, rng = start()
    assert held.history.index == 2
    apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True), new_epoch=True))
    assert held.history.index == 1
    assert held.history.digest() == writer.history.digest()
    assert same(held.flats, writer.state)


def test_an_anchor_forgets_the_history() -> None:
    writer, held, rng = start()
    apply(held, writer.anchor())
    assert (held.history.index, held.history.tiles) == (0, {})
    apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    assert same(held.flats, writer.state)


def test_prepare_touches_nothing() -> None:
    writer, held, rng = start()
    before = snapshot(held)
    held.prepare(*writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    assert_untouched(held, before)


def spoilt_byte(version: Version) -> Version:
    data = bytearray(version[1][0])
    data[-1] ^= 1
    return version[0], [bytes(data)]


def cut_short(version: Version) -> Version:
    return version[0], [version[1][0][:-1]]


def changed_manifest(**fields: object) -> Callable[[Version], Version]:
    return lambda version: (replace(version[0], **fields), version[1])  # type: ignore[arg-type]


def of_another_base(version: Version) -> Version:
    assert version[0].base is not None
    return replace(version[0], base=replace(version[0].base, digest="00" * 32)), version[1]


def other_size(version: Version) -> Version:
    (ref,) = version[0].parts
    return replace(version[0], parts=(PartRef(ref.id, ref.size + 1),)), version[1]


def twice_the_same_tile(version: Version) -> Version:
    return replace(version[0], parts=version[0].parts * 2), version[1] * 2


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (spoilt_byte, ChecksumError),
        (cut_short, FormatError),
        (other_size, FormatError),
        (of_another_base, BaseMismatchError),
        (changed_manifest(layout="00" * 32), BaseMismatchError),
        (changed_manifest(index=5), BaseMismatchError),
        (changed_manifest(digest="00" * 32), VerificationError),
        (changed_manifest(history="00" * 32), VerificationError),
        (changed_manifest(history=None), VerificationError),
        (changed_manifest(parts=(PartRef("00" * 32, 0),)), FormatError),
        (twice_the_same_tile, FormatError),
    ],
)
def test_after_a_refusal_nothing_changed_and_the_good_version_applies(
    spoil: Callable[[Version], Version], error: type[PulseError]
) -> None:
    writer, held, rng = start()
    good = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    before = snapshot(held)
    with pytest.raises(error):
        held.prepare(*spoil(good))
    assert_untouched(held, before)
    apply(held, good)
    assert same(held.flats, writer.state)


def test_a_tile_that_would_not_be_the_publishers_is_named() -> None:
    writer, held, rng = start()
    writer.codec = "gap"
    tile = held.layout.tiles[-1]
    writer.sums[tile.ordinal] += type(writer.sums[0])(1, 0)
    manifest, parts = writer.advance({**writer.state, "c": nudge(rng, writer.state["c"], 1.0)})
    assert manifest.base is not None
    fitting = replace(manifest, base=replace(manifest.base, digest=held.digest))
    with pytest.raises(VerificationError) as caught:
        held.prepare(fitting, parts)
    assert caught.value.tensor == "c"


@pytest.mark.parametrize("fails_at", [0, 1, 3, 5])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_commit_that_fails_half_way_is_put_back(
    monkeypatch: pytest.MonkeyPatch, fails_at: int, error: type[BaseException]
) -> None:
    writer, held, rng = start()
    version = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    transition = held.prepare(*version)
    assert len(transition.patches) == 6
    before, write, calls = snapshot(held), State._write, []

    def failing(self: State, one: TilePatch, number: int, undo: bool) -> None:
        write(self, one, number, undo)
        calls.append(undo)
        if len(calls) == fails_at + 1:
            raise error

    monkeypatch.setattr(State, "_write", failing)
    with pytest.raises(error):
        held.commit(transition)
    monkeypatch.undo()
    assert_untouched(held, before)
    apply(held, version)
    assert same(held.flats, writer.state)


class Moody(np.ndarray[Any, Any]):
    """An array that writes half of what it is told and fails, once."""

    tired = False

    def __setitem__(self, where: Any, bits: Any) -> None:
        if Moody.tired:
            Moody.tired = False
            super().__setitem__(where[: where.size // 2], bits[: where.size // 2])
            raise MemoryError
        super().__setitem__(where, bits)


def test_an_array_that_fails_in_the_middle_of_a_write_is_put_back() -> None:
    writer, held, rng = start()
    version = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    transition, before = held.prepare(*version), snapshot(held)
    held.flats["b"] = held.flats["b"].view(Moody)
    Moody.tired = True
    with pytest.raises(MemoryError):
        held.commit(transition)
    assert_untouched(held, before)
    held.commit(transition)
    assert same(held.flats, writer.state)


class Interrupted(UserDict[int, Any]):
    """Sums that are never read to the end."""

    def keys(self) -> Any:
        raise KeyboardInterrupt


def test_an_interrupt_after_the_last_write_changes_nothing_either() -> None:
    writer, held, rng = start()
    version = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    transition, before = held.prepare(*version), snapshot(held)
    with pytest.raises(KeyboardInterrupt):
        held.commit(replace(transition, sums=Interrupted()))
    assert_untouched(held, before)


def test_two_parts_over_disjoint_tiles_apply_together() -> None:
    writer, held, rng = start()
    new = changed_state(rng, writer.state, 0.1, small=True)
    earlier, old, sums = writer.history, writer.state, dict(writer.sums)
    manifest, _ = writer.advance(new)
    tiles = writer.layout.tiles
    parts = [
        patch.encode(writer.layout, some, old, new, sums, codec="history", history=earlier)
        for some in (tiles[:2], tiles[2:])
    ]
    later = earlier.after([p for part in parts for p in part.patches], old)
    refs = tuple(PartRef(part.id, len(part.data)) for part in parts)
    apply(held, (replace(manifest, parts=refs, history=later.digest()), [part.data for part in parts]))
    assert same(held.flats, new)


def test_a_recount_finds_a_foreign_write() -> None:
    _, held, _ = start()
    before = held.digest
    held.flats["a"][7] ^= 1
    assert held.digest == before
    assert held.recount() != before


# -- taking hold of tensors ----------------------------------------------------------------------------------------

TIED = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (3,))], {"z": "a"})


def arrays(**others: Any) -> dict[str, Any]:
    return {"a": np.zeros(4, np.float32), "b": np.zeros(3, np.float32), **others}


def tied_writer() -> tuple[Writer, Version]:
    writer = Writer(TIED, {"a": np.zeros(4, np.uint32), "b": np.zeros(3, np.uint32)})
    return writer, writer.advance({"a": np.arange(4, dtype=np.uint32), "b": np.ones(3, np.uint32)})


@pytest.mark.parametrize("how", ["shared", "separate", "absent"])
def test_a_tied_tensor_follows_the_one_it_is_tied_to(how: str) -> None:
    source = arrays()
    if how != "absent":
        source["z"] = source["a"] if how == "shared" else np.zeros(4, np.float32)
    apply(State.attach(source, TIED), tied_writer()[1])
    assert all(source[name].view(np.uint32).tolist() == [0, 1, 2, 3] for name in source if name != "b")


def test_aliases_may_share_memory_apart_from_the_tensor_they_are_tied_to() -> None:
    layout = layouts.make(TIED.tensors, {"y": "a", "z": "a"})
    both = np.zeros(4, np.float32)
    source = arrays(y=both, z=both)
    writer = Writer(layout, {"a": np.zeros(4, np.uint32), "b": np.zeros(3, np.uint32)})
    apply(
        State.attach(source, layout), writer.advance({"a": np.arange(4, dtype=np.uint32), "b": np.zeros(3, np.uint32)})
    )
    assert both.view(np.uint32).tolist() == [0, 1, 2, 3]


def test_a_tied_tensor_that_overlaps_the_one_it_is_tied_to_is_refused() -> None:
    memory = np.zeros(6, np.float32)
    with pytest.raises(StateError):
        State.attach(arrays(a=memory[:4], z=memory[2:]), TIED)


def test_a_failed_commit_puts_copies_of_tied_tensors_back(monkeypatch: pytest.MonkeyPatch) -> None:
    state = State.attach(arrays(z=np.zeros(4, np.float32)), TIED)
    _, version = tied_writer()
    transition, before, write = state.prepare(*version), snapshot(state), State._write

    def failing(self: State, one: TilePatch, number: int, undo: bool) -> None:
        write(self, one, number, undo)
        if not undo and one.tile.tensor.name == "b":
            raise MemoryError

    monkeypatch.setattr(State, "_write", failing)
    with pytest.raises(MemoryError):
        state.commit(transition)
    assert_untouched(state, before)


def test_a_tied_tensor_that_somebody_else_wrote_is_found_by_a_recount() -> None:
    source = arrays(z=np.zeros(4, np.float32))
    state = State.attach(source, TIED)
    source["z"][1] = 1
    with pytest.raises(VerificationError, match="'a'"):
        state.recount()


def test_an_anchor_makes_tied_tensors_with_memory_of_their_own_equal() -> None:
    source = arrays(a=np.full(4, 5, np.float32), z=np.full(4, 7, np.float32))
    writer = Writer(TIED, {"a": np.arange(4, dtype=np.uint32), "b": np.ones(3, np.uint32)})
    apply(State.attach(source, TIED), writer.anchor())
    assert source["z"].view(np.uint32).tolist() == source["a"].view(np.uint32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("overlap", ["whole", "part"])
def test_two_tensors_of_the_run_in_the_same_memory_are_refused(overlap: str) -> None:
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,))])
    memory = np.zeros(6, np.float32)
    source = {"a": memory[:4], "b": memory[:4] if overlap == "whole" else memory[2:]}
    with pytest.raises(StateError):
        State.attach(source, layout)


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(3, np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("b", {"a": np.zeros(4, np.float32)}),
        ("extra", arrays(extra=np.zeros(1, np.float32))),
        ("b", arrays(b=np.zeros(4, np.float32))),
        ("b", arrays(b=np.zeros((3, 1), np.float32))),
        ("b", arrays(b=np.zeros(3, np.int32))),
        ("b", arrays(b=np.zeros(6, np.float32)[::2])),
        ("b", arrays(b=read_only())),
        ("b", arrays(b=[0.0, 0.0, 0.0])),
        ("z", arrays(z=np.zeros(5, np.float32))),
        ("z", arrays(z=np.zeros(8, np.float32)[::2])),
    ],
    ids=["missing", "extra", "size", "shape", "dtype", "strided", "read-only", "list", "alias size", "alias strided"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, source: dict[str, Any]) -> None:
    with pytest.raises(StateError, match=repr(name)) as caught:
        State.attach(source, TIED)
    assert caught.value.tensor == name


def test_holds_knows_its_own_memory_again() -> None:
    source = arrays()
    state = State.attach(source, TIED)
    assert state.holds(dict(source))
    assert not state.holds({**source, "b": source["b"].copy()})


def test_holds_sees_that_two_tensors_changed_places() -> None:
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,))])
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert not State.attach({"a": a, "b": b}, layout).holds({"a": b, "b": a})


def test_holds_does_not_mind_empty_tensors() -> None:
    torch = pytest.importorskip("torch")
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("e", "F32", (0,)), TensorSpec("f", "F32", (0, 3))])
    source = {"a": torch.zeros(4), "e": torch.zeros(0), "f": torch.zeros(0, 3)}
    assert State.attach(source, layout).holds({name: tensor.detach() for name, tensor in source.items()})


def empty_layout() -> Layout:
    return layouts.make([])


def test_a_state_of_nothing_is_a_state() -> None:
    writer, held = Writer(empty_layout(), {}), reader(empty_layout(), {})
    apply(held, writer.anchor())
    apply(held, writer.advance({}))
    assert held.digest == writer.digest


def test_weights_at_odd_addresses_are_followed() -> None:
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "BF16", (300,))])
    buffer = np.zeros(601, np.uint8)
    weights: Bits = buffer[1:].view(np.uint16)
    writer = Writer(layout, {"w": weights.copy()}, "history")
    held = State(layout, {"w": weights}, {})
    for _ in range(2):
        apply(held, writer.advance({"w": nudge(rng, writer.state["w"], 0.3)}))
    assert np.array_equal(weights, writer.state["w"])
