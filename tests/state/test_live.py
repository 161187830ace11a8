"""Live weights in host memory: every codec, several versions at once, slices, ties and anchors.

The rules that hold on every backend are in test_transaction.py.
"""

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import digest
from pulsesync.core.types import BLOCK, Bits, Sum, TensorSpec
from pulsesync.errors import BaseMismatchError, ChecksumError, FormatError, PulseError, StateError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef, RecordKind
from pulsesync.format.patch import CodecName
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.slices import Slice, Slices, find_places
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.weights import Recount, Snapshot, WeightState
from tests.helpers import (
    Writer,
    apply,
    changed_state,
    copied,
    load,
    near,
    nudge,
    random_layout,
    random_state,
    reader,
    same,
    seeds,
)

Version = tuple[Manifest, list[bytes]]
CODECS = ["auto", "history", "context", "gap", "step", "dense", "xor"]
SPECS = [TensorSpec("a", "BF16", (60, 50), (20,), (25,)), TensorSpec("b", "F32", (500,)), TensorSpec("c", "I64", (40,))]


def start() -> tuple[Writer, WeightState, np.random.Generator]:
    """A writer and a reader at the second version of a run, with a history."""
    rng, layout = np.random.default_rng(0), layouts.make(SPECS)
    state = {spec.name: near(rng, spec.dtype, (spec.size,), 30) for spec in SPECS}
    writer = Writer(layout, state)
    held = reader(layout, state)
    codecs: list[CodecName] = ["history", "auto"]
    for writer.codec in codecs:
        apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    return writer, held, rng


def remembered(state: WeightState) -> tuple[Any, ...]:
    copies = {name: [bits.copy() for bits in some] for name, some in state.backend.copies.items()}
    return copied(state.flats), copies, dict(state.sums), state.history.digest(), state.digest


def assert_untouched(state: WeightState, before: tuple[Any, ...]) -> None:
    assert same(state.flats, before[0])
    copies = state.backend.copies
    assert all(np.array_equal(a, b) for name in before[1] for a, b in zip(copies[name], before[1][name], strict=True))
    assert (state.sums, state.history.digest(), state.digest) == before[2:]


@given(seeds, st.lists(st.sampled_from(CODECS), min_size=1, max_size=5))
def test_a_reader_follows_a_writer_bit_for_bit(seed: int, codecs: list[patch.CodecName]) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    held = reader(layout, random_state(rng, layout))
    load(held, writer.anchor())
    assert same(held.flats, writer.state)
    for codec in codecs:
        writer.codec = codec
        apply(held, writer.advance(changed_state(rng, writer.state, 0.05, small=bool(rng.integers(0, 2)))))
        assert same(held.flats, writer.state)
        assert held.digest == writer.digest == Recount(held).digest()
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
    load(held, writer.anchor())
    assert (held.history.index, held.history.tiles) == (0, {})
    apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    assert same(held.flats, writer.state)


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
        (changed_manifest(base=None), BaseMismatchError),
        (changed_manifest(base=None, kind=RecordKind.ANCHOR), BaseMismatchError),
        (changed_manifest(index=1), FormatError),
        (changed_manifest(kind=RecordKind.SQUASH), FormatError),
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
    writer.codec = "history"
    good = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    before = remembered(held)
    with pytest.raises(error):
        PatchTransaction(held).prepare(*spoil(good))
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
    with pytest.raises(VerificationError, match="digest mismatch: the decoded tensor 'c' differs") as caught:
        PatchTransaction(held).prepare(fitting, parts)
    assert caught.value.tensor == "c"


class Moody(np.ndarray[Any, Any]):
    """An array that, once, writes half of what it should and raises."""

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
    transition, before = PatchTransaction(held).prepare(*version), remembered(held)
    held.flats["b"] = held.flats["b"].view(Moody)
    held.backend.__dict__.pop("memory")  # which is made of the flats, once
    Moody.tired = True
    with pytest.raises(MemoryError):
        held.commit(transition)
    assert_untouched(held, before)
    held.commit(transition)
    assert same(held.flats, writer.state)


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
    apply(held, (replace(manifest, parts=refs, history=later.digest()), [bytes(part.data) for part in parts]))
    assert same(held.flats, new)


def test_a_recount_finds_a_foreign_write() -> None:
    _, held, _ = start()
    before = held.digest
    held.flats["a"][7] ^= 1
    assert held.digest == before
    assert Recount(held).digest() != before


# -- several versions, and back ------------------------------------------------------------------------------------

codec_lists = st.lists(st.sampled_from(CODECS), min_size=1, max_size=4)


def versions(writer: Writer, rng: np.random.Generator, codecs: list[patch.CodecName]) -> list[Version]:
    out = []
    for codec in codecs:
        writer.codec = codec
        out.append(writer.advance(changed_state(rng, writer.state, 0.1, small=bool(rng.integers(0, 2)))))
    return out


@given(seeds, codec_lists)
def test_prepared_one_over_the_other_is_one_after_the_other(seed: int, codecs: list[patch.CodecName]) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    at_once, one_by_one = reader(layout, writer.state), reader(layout, writer.state)
    before, transition = remembered(at_once), None
    for version in versions(writer, rng, codecs):
        transition = PatchTransaction(at_once).prepare(*version, after=transition)
        apply(one_by_one, version)
    assert_untouched(at_once, before)
    assert transition is not None
    at_once.commit(transition)
    assert same(at_once.flats, writer.state)
    assert_untouched(at_once, remembered(one_by_one))
    assert at_once.digest == Recount(at_once).digest() == writer.digest


def test_a_version_prepared_over_another_is_for_the_state_after_it() -> None:
    writer, held, rng = start()
    first, second = versions(writer, rng, ["history", "history"])
    over = PatchTransaction(held).prepare(*first)
    with pytest.raises(BaseMismatchError):
        PatchTransaction(held).prepare(*second)
    with pytest.raises(BaseMismatchError):
        PatchTransaction(held).prepare(*first, after=over)
    held.commit(PatchTransaction(held).prepare(*second, after=over))
    assert same(held.flats, writer.state)


def test_what_a_second_version_takes_back_is_no_change() -> None:
    writer, held, rng = start()
    here = copied(held.flats)
    first = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    second = writer.advance(here)
    over = PatchTransaction(held).prepare(*first)
    assert over.changed > 0
    both = PatchTransaction(held).prepare(*second, after=over)
    assert (both.changed, both.changes) == (0, {})


@given(seeds, codec_lists)
def test_a_commit_returns_the_way_back(seed: int, codecs: list[patch.CodecName]) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    held = reader(layout, writer.state)
    made = versions(writer, rng, codecs)
    befores, ways = [], []
    for version in made:
        befores.append(remembered(held))
        ways.append(apply(held, version))
    for before, back in zip(reversed(befores), reversed(ways), strict=True):
        forth = remembered(held)
        again = held.commit(back)
        assert_untouched(held, before)
        held.commit(again)
        assert_untouched(held, forth)
        held.commit(back)
    for version in made:
        apply(held, version)
    assert same(held.flats, writer.state)


def read(taken: "Snapshot | WeightState") -> dict[str, Bits]:
    """All of a state, block by block."""
    out = {spec.name: np.empty(spec.size, spec.kind.bits) for spec in taken.layout.tensors}
    for tile in taken.layout.tiles:
        for number in range(tile.block_count):
            bits = taken.block(tile, number)
            out[tile.tensor.name][tile.flat_indices(np.arange(bits.size) + number * BLOCK)] = bits
    return out


@given(seeds, st.lists(st.sampled_from(["snapshot", "commit", "undo", "drop"]), min_size=2, max_size=12))
def test_a_snapshot_stays_as_it_was_while_commits_go_on(seed: int, actions: list[str]) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout), "gap")
    held = reader(layout, writer.state)
    taken: list[tuple[Snapshot, dict[str, Bits], dict[int, Sum]]] = []
    undo: list[Transition] = []
    for action in actions:
        if action == "snapshot":
            taken.append((held.snapshot(), copied(held.flats), dict(held.sums)))
        elif action == "commit" and not undo:
            undo.append(apply(held, writer.advance(changed_state(rng, writer.state, 0.2, small=False))))
        elif action == "undo" and undo:
            held.commit(undo.pop())
            writer = Writer(layout, held.flats, "gap", writer.version)
        elif action == "commit":
            undo = []
            apply(held, writer.advance(changed_state(rng, writer.state, 0.2, small=False)))
        elif action == "drop" and taken:
            taken.pop(0)
        for snapshot, flats, sums in taken:
            assert same(read(snapshot), flats)
            assert snapshot.sums == sums
    assert same(held.flats, writer.state)


def test_a_snapshot_read_by_another_thread_is_never_torn() -> None:
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "BF16", (5000,))])
    writer = Writer(layout, random_state(rng, layout), "gap")
    held = reader(layout, writer.state)
    expected = copied(held.flats)
    made = versions(writer, rng, ["gap"] * 30)
    taken, torn, done = held.snapshot(), [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            if not same(read(taken), expected):
                torn.append(True)

    thread = threading.Thread(target=watch)
    thread.start()
    for version in made:
        apply(held, version)
    done.set()
    thread.join()
    assert not torn
    assert same(read(taken), expected)


def test_a_snapshot_that_nobody_holds_costs_nothing() -> None:
    writer, held, rng = start()
    taken = held.snapshot()
    apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True)))
    assert taken.changes
    forgotten = weakref.ref(taken)
    del taken
    assert forgotten() is None


# -- squashed patches ----------------------------------------------------------------------------------------------


@given(seeds, codec_lists, st.sampled_from(["auto", "context", "gap", "dense"]))
def test_a_squashed_patch_takes_one_state_to_a_later_one(
    seed: int, codecs: list[patch.CodecName], codec: patch.CodecName
) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    held, since = reader(layout, writer.state), writer.mark()
    versions(writer, rng, codecs)
    apply(held, writer.squash(since, codec))
    assert same(held.flats, writer.state)
    assert held.digest == Recount(held).digest() == writer.digest
    assert (held.history.index, held.history.tiles) == (0, {})
    apply(held, writer.advance(changed_state(rng, writer.state, 0.1, small=True), new_epoch=True))
    assert same(held.flats, writer.state)


def test_a_squashed_patch_and_patches_prepare_over_each_other() -> None:
    writer, held, rng = start()
    (last,) = versions(writer, rng, ["history"])
    since = writer.mark()
    versions(writer, rng, ["history", "gap"])
    squash = writer.squash(since)
    first = writer.advance(changed_state(rng, writer.state, 0.1, small=True), new_epoch=True)
    transition = None
    for version in (last, squash, first):
        transition = PatchTransaction(held).prepare(*version, after=transition)
    assert transition is not None
    held.commit(transition)
    assert same(held.flats, writer.state)
    assert held.history.index == 1
    assert held.history.digest() == writer.history.digest()


def test_a_squashed_patch_with_a_history_payload_is_refused() -> None:
    writer, held, rng = start()
    writer.codec = "history"
    record, parts = writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    before = remembered(held)
    with pytest.raises(FormatError):
        PatchTransaction(held).prepare(replace(record, kind=RecordKind.SQUASH, history=None), parts)
    assert_untouched(held, before)


def test_a_squashed_patch_for_another_state_is_refused() -> None:
    writer, held, rng = start()
    versions(writer, rng, ["gap"])
    since = writer.mark()
    versions(writer, rng, ["gap"])
    with pytest.raises(BaseMismatchError):
        PatchTransaction(held).prepare(*writer.squash(since))


# -- anchors -------------------------------------------------------------------------------------------------------


def opened(layout: Layout, anchor: Version) -> list[Body]:
    return [Body.of(data, layout, ref.id) for ref, data in zip(anchor[0].parts, anchor[1], strict=True)]


def encoded(layout: Layout, writer: Writer, tiles: Any) -> Body:
    return Body.of(patch.encode_whole(layout, tiles, writer.state, writer.sums).data, layout)


def other_codec(layout: Layout, writer: Writer) -> Body:
    zeros = {name: np.zeros_like(bits) for name, bits in writer.state.items()}
    sums = {tile.ordinal: Sum(0, 0) for tile in layout.tiles}
    return Body.of(patch.encode(layout, layout.tiles, zeros, writer.state, sums, codec="gap").data, layout)


def wrong_sum(layout: Layout, writer: Writer) -> Body:
    sums = {**writer.sums, 2: writer.sums[2] + Sum(1, 0)}
    return Body.of(patch.encode_whole(layout, layout.tiles, writer.state, sums).data, layout)


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda layout, w: [encoded(layout, w, layout.tiles[1:])], FormatError),
        (lambda layout, w: [encoded(layout, w, layout.tiles[:-1])], FormatError),
        (lambda layout, w: [], FormatError),
        (lambda layout, w: [encoded(layout, w, layout.tiles)] * 2, FormatError),
        (lambda layout, w: [encoded(layout, w, layout.tiles), encoded(layout, w, layout.tiles[2:3])], FormatError),
        (lambda layout, w: [other_codec(layout, w)], FormatError),
        (lambda layout, w: [wrong_sum(layout, w)], VerificationError),
    ],
    ids=["first tile lacks", "last tile lacks", "no parts", "all twice", "a tile twice", "not dense", "another sum"],
)
def test_an_anchor_that_is_not_a_whole_state_is_refused(
    spoil: Callable[[Layout, Writer], list[Body]], error: type[PulseError]
) -> None:
    writer, held, _ = start()
    record, _ = writer.anchor()
    before = remembered(held)
    with pytest.raises(error):
        AnchorLoader(held).check_whole(record, spoil(held.layout, writer))
    assert_untouched(held, before)


def test_an_anchor_of_another_digest_is_refused() -> None:
    writer, held, _ = start()
    record, parts = writer.anchor()
    bodies, before = opened(held.layout, (record, parts)), remembered(held)
    with pytest.raises(VerificationError):
        AnchorLoader(held).check_whole(replace(record, digest="00" * 32), bodies)
    assert_untouched(held, before)


@given(seeds, st.integers(1, 3))
def test_an_anchor_in_several_parts_takes_any_state_to_its_own(seed: int, pieces: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer, held = Writer(layout, random_state(rng, layout)), reader(layout, random_state(rng, layout))
    anchor = writer.anchor(pieces)
    before = remembered(held)
    bodies = opened(layout, anchor)
    with StagedBlocks() as staged:
        sums = AnchorLoader(held).check_whole(anchor[0], bodies, staged)
        assert_untouched(held, before)
        AnchorLoader(held).load_whole(staged, sums)
    assert same(held.flats, writer.state)
    assert held.digest == Recount(held).digest() == writer.digest


# -- slices --------------------------------------------------------------------------------------------------------


def cut_out(bits: Bits, spec: TensorSpec, held: Slice) -> Bits:
    rows, columns = held.rows or (0, spec.rows), held.columns or (0, spec.columns)
    return bits.reshape(spec.rows, spec.columns)[slice(*rows), slice(*columns)].reshape(-1).copy()


def sliced(layout: Layout, state: dict[str, Bits], slices: Mapping[str, Slice | None]) -> dict[str, Bits]:
    """What a worker with these slices, by exact name, holds of a state."""
    held = {spec.name: slices.get(spec.name, Slice()) for spec in layout.tensors}
    return {spec.name: cut_out(state[spec.name], spec, w) for spec in layout.tensors if (w := held[spec.name])}


GRID = [
    TensorSpec("a", "BF16", (60, 50), (20, 40), (25,)),
    TensorSpec("b", "F32", (500,), (100,)),
    TensorSpec("c", "I64", (40,)),
]


@pytest.mark.parametrize(
    "slices",
    [
        {"a": Slice(rows=(20, 60))},
        {"a": Slice(columns=(25, 50))},
        {"a": Slice((20, 40), (0, 25)), "b": Slice(rows=(100, 500))},
        {"a": Slice((0, 60), (0, 50)), "c": None},
        {"a": None, "b": Slice(rows=(0, 100)), "c": None},
    ],
    ids=["rows", "columns", "both", "whole but one", "little"],
)
@pytest.mark.parametrize("codecs", [["history"] * 3, ["context", "gap", "dense"], ["history", "step", "auto", "xor"]])
def test_a_slice_of_whole_tiles_follows_every_codec(
    slices: dict[str, Slice | None], codecs: list[patch.CodecName]
) -> None:
    rng, layout = np.random.default_rng(3), layouts.make(GRID)
    state = {spec.name: near(rng, spec.dtype, (spec.size,), 30) for spec in GRID}
    writer = Writer(layout, state)
    held = WeightState(
        HostBackend(layout, sliced(layout, random_state(rng, layout), slices), places=find_places(layout, slices))
    )
    assert not held.whole
    load(held, writer.anchor())
    assert same(held.flats, sliced(layout, writer.state, slices))
    back, at_start = [], copied(held.flats)
    for codec in codecs:
        (version,) = versions(writer, rng, [codec])
        back.append(apply(held, version))
        assert same(held.flats, sliced(layout, writer.state, slices))
        assert held.digest == Recount(held).digest()
    for way in reversed(back):
        held.commit(way)
    assert same(held.flats, at_start)
    held.flats["b"][5] ^= 1
    found = Recount(held).find_damage()
    assert found is not None
    assert found.tensor.name == "b"


@st.composite
def windows(draw: st.DrawFn) -> tuple[int, dict[str, Slice | None]]:
    seed = draw(seeds)
    slices: dict[str, Slice | None] = {}
    for spec in random_layout(seed).tensors:
        if draw(st.booleans()) and spec.shape:
            rows = sorted(draw(st.tuples(st.integers(0, spec.rows), st.integers(0, spec.rows))))
            columns = sorted(draw(st.tuples(st.integers(0, spec.columns), st.integers(0, spec.columns))))
            slices[spec.name] = Slice((rows[0], rows[1]), (columns[0], columns[1]))
        elif draw(st.integers(0, 4)) == 0:
            slices[spec.name] = None
    return seed, slices


@given(windows(), st.lists(st.sampled_from(["gap", "step", "dense", "xor"]), min_size=1, max_size=3))
def test_any_rectangle_follows_what_needs_no_old_weights_but_those_it_changes(
    window: tuple[int, dict[str, Slice | None]], codecs: list[patch.CodecName]
) -> None:
    seed, slices = window
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    held = WeightState(
        HostBackend(layout, sliced(layout, random_state(rng, layout), slices), places=find_places(layout, slices))
    )
    load(held, writer.anchor())
    assert same(held.flats, sliced(layout, writer.state, slices))
    at_start, transition = copied(held.flats), None
    for version in versions(writer, rng, codecs):
        transition = PatchTransaction(held).prepare(*version, after=transition)
    assert transition is not None
    assert same(held.flats, at_start)
    back = held.commit(transition)
    assert same(held.flats, sliced(layout, writer.state, slices))
    for tile in layout.tiles:
        if tile.ordinal in held.places and held.places[tile.ordinal].whole:
            assert held.sums[tile.ordinal] == digest.count_tile(tile, writer.state[tile.tensor.name])
    held.commit(back)
    assert same(held.flats, at_start)


@pytest.mark.parametrize("codec", ["context", "history"])
def test_a_slice_that_cuts_through_a_tile_is_refused_what_needs_all_old_weights(codec: patch.CodecName) -> None:
    rng, layout = np.random.default_rng(3), layouts.make(GRID)
    state = {spec.name: near(rng, spec.dtype, (spec.size,), 30) for spec in GRID}
    writer = Writer(layout, state)
    slices = {"a": Slice(rows=(10, 60))}
    held = WeightState(HostBackend(layout, sliced(layout, state, slices), places=find_places(layout, slices)))
    before = remembered(held)
    (version,) = versions(writer, rng, [codec])
    with pytest.raises(StateError, match=r"'a'.*borders") as caught:
        PatchTransaction(held).prepare(*version)
    assert caught.value.tensor == "a"
    assert_untouched(held, before)


@pytest.mark.parametrize(
    "slices",
    [
        {"a": Slice(rows=(0, 61))},
        {"a": Slice(rows=(-1, 5))},
        {"a": Slice(columns=(9, 3))},
        {"c": Slice(columns=(0, 2))},
    ],
)
def test_a_slice_that_a_tensor_does_not_have_is_refused(slices: Slices) -> None:
    source = {spec.name: np.zeros(spec.shape, spec.kind.bits) for spec in GRID}
    with pytest.raises(StateError, match="has no slice"):
        WeightState.attach(HostBackend, source, layouts.make(GRID), slices)


def test_a_worker_attaches_tensors_of_its_slices_shape() -> None:
    layout = layouts.make([TensorSpec("x", "I32", (6, 2, 4)), TensorSpec("y", "I32", (8,)), TensorSpec("z", "I32", ())])
    slices = {"x": Slice(rows=(2, 5)), "y": None}
    source = {"x": np.zeros((3, 2, 4), np.int32), "z": np.zeros((), np.int32)}
    writer = Writer(layout, {"x": np.zeros(48, np.uint32), "y": np.zeros(8, np.uint32), "z": np.zeros(1, np.uint32)})
    state = WeightState.attach(HostBackend, source, layout, slices)
    new = {"x": np.arange(48, dtype=np.uint32), "y": np.ones(8, np.uint32), "z": np.ones(1, np.uint32)}
    writer.codec = "gap"
    apply(state, writer.advance(new))
    assert source["x"].reshape(-1).tolist() == list(range(16, 40))
    assert source["z"] == 1
    for wrong in ({**source, "y": np.zeros(8, np.int32)}, {**source, "x": np.zeros((6, 2, 4), np.int32)}):
        with pytest.raises(StateError):
            WeightState.attach(HostBackend, wrong, layout, slices)
    flat = {"x": np.zeros((3, 5), np.int32), "z": source["z"]}
    assert WeightState.attach(HostBackend, flat, layout, {"x": Slice((2, 5), (1, 6)), "y": None}).flats["x"].size == 15


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
    apply(WeightState.attach(HostBackend, source, TIED), tied_writer()[1])
    assert all(source[name].view(np.uint32).tolist() == [0, 1, 2, 3] for name in source if name != "b")


def test_aliases_may_share_memory_apart_from_the_tensor_they_are_tied_to() -> None:
    layout = layouts.make(TIED.tensors, {"y": "a", "z": "a"})
    both = np.zeros(4, np.float32)
    source = arrays(y=both, z=both)
    writer = Writer(layout, {"a": np.zeros(4, np.uint32), "b": np.zeros(3, np.uint32)})
    apply(
        WeightState.attach(HostBackend, source, layout),
        writer.advance({"a": np.arange(4, dtype=np.uint32), "b": np.zeros(3, np.uint32)}),
    )
    assert both.view(np.uint32).tolist() == [0, 1, 2, 3]


def test_a_tied_tensor_that_overlaps_the_one_it_is_tied_to_is_refused() -> None:
    memory = np.zeros(6, np.float32)
    with pytest.raises(StateError):
        WeightState.attach(HostBackend, arrays(a=memory[:4], z=memory[2:]), TIED)


def test_an_anchor_makes_tied_tensors_with_memory_of_their_own_equal() -> None:
    source = arrays(a=np.full(4, 5, np.float32), z=np.full(4, 7, np.float32))
    writer = Writer(TIED, {"a": np.arange(4, dtype=np.uint32), "b": np.ones(3, np.uint32)})
    load(WeightState.attach(HostBackend, source, TIED), writer.anchor())
    assert source["z"].view(np.uint32).tolist() == source["a"].view(np.uint32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("overlap", ["whole", "part"])
def test_two_tensors_of_the_run_in_the_same_memory_are_refused(overlap: str) -> None:
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,))])
    memory = np.zeros(6, np.float32)
    source = {"a": memory[:4], "b": memory[:4] if overlap == "whole" else memory[2:]}
    with pytest.raises(StateError):
        WeightState.attach(HostBackend, source, layout)


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
        WeightState.attach(HostBackend, source, TIED)
    assert caught.value.tensor == name


def test_holds_knows_its_own_memory_again() -> None:
    source = arrays()
    state = WeightState.attach(HostBackend, source, TIED)
    assert state.is_attached_to(dict(source))
    assert not state.is_attached_to({**source, "b": source["b"].copy()})


def test_holds_sees_that_two_tensors_changed_places() -> None:
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("b", "F32", (4,))])
    a, b = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert not WeightState.attach(HostBackend, {"a": a, "b": b}, layout).is_attached_to({"a": b, "b": a})


def test_holds_does_not_mind_empty_tensors() -> None:
    torch = pytest.importorskip("torch")
    layout = layouts.make([TensorSpec("a", "F32", (4,)), TensorSpec("e", "F32", (0,)), TensorSpec("f", "F32", (0, 3))])
    source = {"a": torch.zeros(4), "e": torch.zeros(0), "f": torch.zeros(0, 3)}
    assert WeightState.attach(HostBackend, source, layout).is_attached_to(
        {name: tensor.detach() for name, tensor in source.items()}
    )


def empty_layout() -> Layout:
    return layouts.make([])


def test_a_state_of_nothing_is_a_state() -> None:
    writer, held = Writer(empty_layout(), {}), reader(empty_layout(), {})
    load(held, writer.anchor())
    apply(held, writer.advance({}))
    assert held.digest == writer.digest


def test_weights_at_odd_addresses_are_followed() -> None:
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "BF16", (300,))])
    buffer = np.zeros(601, np.uint8)
    weights: Bits = buffer[1:].view(np.uint16)
    writer = Writer(layout, {"w": weights.copy()}, "history")
    held = WeightState(HostBackend(layout, {"w": weights}))
    for _ in range(2):
        apply(held, writer.advance({"w": nudge(rng, writer.state["w"], 0.3)}))
    assert np.array_equal(weights, writer.state["w"])
