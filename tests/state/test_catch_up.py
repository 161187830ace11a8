"""Several versions that are decoded together do what they do one by one, and fail where the first of them fails."""

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, Bits, TensorSpec
from pulsesync.errors import BaseMismatchError, FormatError, PulseError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import patch, replay
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction, RecordFailed
from pulsesync.state.slices import Slice, find_places
from pulsesync.state.weights import Recount, WeightState
from pulsesync.testing import AdamUpdates
from tests.helpers import Writer, apply, changed_state, copied, near, random_layout, random_state, reader, same, seeds

Version = tuple[Manifest, list[bytes]]
SPECS = [TensorSpec("a", "BF16", (60, 50), (20,), (25,)), TensorSpec("b", "F32", (500,)), TensorSpec("c", "I64", (40,))]
codec_lists = st.lists(st.sampled_from(["auto", "history", "context", "gap", "dense"]), min_size=1, max_size=6)


def facts(state: WeightState) -> tuple[Any, ...]:
    return dict(state.sums), state.digest, state.history.index, state.history.digest(), Recount(state).digest()


def follow(writer: Writer, rng: np.random.Generator, codecs: list[patch.CodecName]) -> list[Version]:
    out = []
    for codec in codecs:
        writer.codec = codec
        new = changed_state(rng, writer.state, 0.1, small=bool(rng.integers(0, 2)))
        out.append(writer.advance(new, new_epoch=bool(rng.integers(0, 4) == 0)))
    return out


def start(versions: int) -> tuple[Writer, WeightState, list[Version]]:
    """A writer, a reader before its versions, all of which have a history, and these."""
    rng, layout = np.random.default_rng(0), layouts.make(SPECS)
    writer = Writer(layout, {spec.name: near(rng, spec.dtype, (spec.size,), 30) for spec in SPECS})
    writer.codec = "history"
    held = reader(layout, writer.state)
    return writer, held, [writer.advance(changed_state(rng, writer.state, 0.1, small=True)) for _ in range(versions)]


def failure(held: WeightState, versions: list[Version]) -> tuple[int, PulseError]:
    """Prepare versions of which one is bad; return the version that is blamed, and the error."""
    with pytest.raises(RecordFailed) as caught:
        PatchTransaction(held).prepare_all([versions])
    return caught.value.record.version, caught.value.cause


@given(seeds, codec_lists, st.lists(st.integers(0, 6), max_size=2))
def test_versions_decoded_together_are_those_decoded_one_by_one(
    seed: int, codecs: list[patch.CodecName], cuts: list[int]
) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    writer = Writer(layout, random_state(rng, layout))
    together, one_by_one = reader(layout, writer.state), reader(layout, writer.state)
    versions, before = follow(writer, rng, codecs), copied(together.flats)
    borders = sorted({0, len(versions), *(cut for cut in cuts if cut < len(versions))})
    transition = PatchTransaction(together).prepare_all(versions[a:b] for a, b in pairwise(borders))
    assert same(together.flats, before)
    back = together.commit(transition)
    for version in versions:
        apply(one_by_one, version)
    assert same(together.flats, writer.state)
    assert facts(together) == facts(one_by_one)
    together.commit(back)
    assert same(together.flats, before)


def test_a_squash_and_patches_after_it_are_prepared_together() -> None:
    writer, held, versions = start(2)
    since = writer.mark()
    rng = np.random.default_rng(1)
    writer.advance(changed_state(rng, writer.state, 0.1, small=True))
    squash = writer.squash(since)
    later = writer.advance(changed_state(rng, writer.state, 0.1, small=True), new_epoch=True)
    held.commit(PatchTransaction(held).prepare_all([[*versions, squash, later]]))
    assert same(held.flats, writer.state)
    assert held.history.digest() == writer.history.digest()


@pytest.mark.parametrize("codecs", [["history"] * 4, ["history", "gap", "history", "dense"], ["gap", "gap", "context"]])
def test_a_tile_of_several_blocks_goes_through_all_versions(codecs: list[patch.CodecName]) -> None:
    rng, size = np.random.default_rng(0), BLOCK + 1000
    layout = layouts.make([TensorSpec("w", "BF16", (size,))])
    state = near(rng, "BF16", (size,), 30)
    writer = Writer(layout, {"w": state})
    together, one_by_one = reader(layout, writer.state), reader(layout, writer.state)
    versions = []
    for writer.codec in codecs:
        new = writer.state["w"].copy()
        new[rng.integers(0, size, 500)] ^= 1
        new[-3:] ^= 1
        versions.append(writer.advance({"w": new}))
    together.commit(PatchTransaction(together).prepare_all([versions]))
    for version in versions:
        apply(one_by_one, version)
    assert same(together.flats, writer.state)
    assert facts(together) == facts(one_by_one)


def test_a_slice_goes_through_all_versions() -> None:
    writer, _, versions = start(4)
    local = {"a": np.zeros(20 * 50, np.uint16)}
    slices = {"a": Slice(rows=(0, 20)), "b": None, "c": None}
    held = WeightState(HostBackend(writer.layout, local, places=find_places(writer.layout, slices)))
    held.flats["a"][:] = start(0)[0].state["a"][:1000]
    held.sums = held.backend.count()
    held.commit(PatchTransaction(held).prepare_all([versions]))
    assert same(held.flats, {"a": writer.state["a"][:1000]})
    assert held.digest == Recount(held).digest()


def test_nothing_is_prepared_from_no_versions() -> None:
    _, held, _ = start(0)
    assert PatchTransaction(held).prepare_all([]).changed == 0


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("digest", "00" * 32, VerificationError),
        ("history", "00" * 32, VerificationError),
        ("history", None, VerificationError),
        ("index", 9, BaseMismatchError),
        ("layout", "00" * 32, BaseMismatchError),
        ("base", None, BaseMismatchError),
    ],
)
def test_a_record_that_is_wrong_is_named_and_nothing_changed(
    n: int, field: str, value: Any, error: type[PulseError]
) -> None:
    _, held, versions = start(4)
    before = copied(held.flats)
    sums = held.sums
    spoilt: dict[str, Any] = {field: value}
    bad = [*versions[:n], (replace(versions[n][0], **spoilt), versions[n][1]), *versions[n + 1 :]]
    blamed, cause = failure(held, bad)
    assert (blamed, type(cause)) == (versions[n][0].version, error)
    assert same(held.flats, before)
    assert (held.sums, held.history.index) == (sums, 0)
    held.commit(PatchTransaction(held).prepare_all([versions]))


def test_a_record_for_another_state_is_named() -> None:
    _, held, versions = start(4)
    record = versions[2][0]
    assert record.base is not None
    versions[2] = replace(record, base=replace(record.base, digest="00" * 32)), versions[2][1]
    blamed, cause = failure(held, versions)
    assert (blamed, type(cause)) == (record.version, BaseMismatchError)


def of_other_weights(held: WeightState, versions: list[Version], n: int, name: str) -> Version:
    """The n-th version with a part that was coded against other weights of a tensor than its base has."""
    rng, at = np.random.default_rng(n), reader(held.layout, held.flats)
    for version in versions[:n]:
        apply(at, version)
    weights: Bits = at.flats[name]
    old = {**copied(at.flats), name: rng.permutation(weights)}
    new, tiles, layout = changed_state(rng, old, 0.3, small=True), held.layout.tiles, held.layout
    part = patch.encode(layout, tiles, old, new, at.sums, codec="history", history=History(n))
    return replace(versions[n][0], parts=(PartRef(part.id, len(part.data)),)), [bytes(part.data)]


@pytest.mark.parametrize("n", range(4))
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_part_that_does_not_decode_is_the_fault_of_its_version(n: int, name: str) -> None:
    _, held, versions = start(4)
    bad, before = [*versions], copied(held.flats)
    bad[n] = of_other_weights(held, versions, n, name)
    blamed, cause = failure(held, bad)
    assert blamed == versions[n][0].version
    assert same(held.flats, before)
    for version in versions[:n]:
        apply(held, version)
    with pytest.raises((FormatError, VerificationError)) as alone:
        PatchTransaction(held).prepare(*bad[n])
    assert type(cause) is type(alone.value)


def test_of_two_parts_that_do_not_decode_the_first_version_is_named_whichever_tile_it_is() -> None:
    for names in (("a", "b"), ("b", "a")):
        _, held, versions = start(4)
        for n, name in zip((1, 2), names, strict=True):
            versions[n] = of_other_weights(held, start(4)[2], n, name)
        blamed, cause = failure(held, versions)
        assert blamed == versions[1][0].version
        assert isinstance(cause, FormatError | VerificationError)


def test_what_was_prepared_before_stays_as_it_was() -> None:
    writer, held, versions = start(4)
    first = PatchTransaction(held).prepare(*versions[0])
    kept = {key: (c.positions.copy(), c.old.copy(), c.new.copy()) for key, c in first.changes.items()}
    rest = PatchTransaction(held).prepare_all([versions[1:]], first)
    assert first.changes.keys() == kept.keys()
    for key, change in first.changes.items():
        for array, before in zip((change.positions, change.old, change.new), kept[key], strict=True):
            assert np.array_equal(array, before)
    held.commit(first)
    assert held.digest == versions[0][0].digest
    held.commit(PatchTransaction(held).prepare_all([versions[1:]]))
    assert (rest.sums, same(held.flats, writer.state)) == (held.sums, True)


def test_the_memory_of_a_catch_up_is_what_differs_in_the_end_and_no_more_for_more_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        replay, "spread", lambda work, items: list(map(work, items))
    )  # a copy of a block for one thread
    updates = AdamUpdates({f"w{n}": (200, 100) for n in range(8)}, scale=0.02)
    layout = layouts.make([TensorSpec(name, "BF16", shape) for name, shape in updates.shapes.items()])
    writer = Writer(layout, {name: bits.reshape(-1) for name, bits in updates.state().items()})
    writer.codec = "history"
    held = reader(layout, writer.state)
    versions = [writer.advance({name: bits.reshape(-1) for name, bits in updates.step().items()}) for _ in range(16)]
    bodies = [(record, [Body.of(part, layout) for part in parts]) for record, parts in versions]

    def peaks(count: int) -> tuple[int, int]:
        """The bytes of the resulting changes, and the peak of all other memory."""
        tracemalloc.start()
        transition = PatchTransaction(held).prepare_all(bodies[n : n + 4] for n in range(0, count, 4))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        differ = sum(a.nbytes for c in transition.changes.values() for a in (c.positions, c.old, c.new))
        return differ, most - differ

    peaks(16)  # makes what is made only once, such as the tables of each part
    (fewer, beside_fewer), (more, beside_more), (one, _) = peaks(8), peaks(16), peaks(1)
    assert more > fewer + one
    assert beside_more < beside_fewer + one, (fewer, beside_fewer, more, beside_more, one)
