from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import threads
from pulsesync.core.types import BLOCK, DTYPES, Bits, Codec, Remembered, Sum, TensorSpec
from pulsesync.errors import ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import choice, container, index, patch, tables
from pulsesync.format import layout as layouts
from pulsesync.format.history import History
from pulsesync.format.index import FrequencyTable, TileEntry
from pulsesync.format.layout import Layout
from pulsesync.testing import AdamUpdates, load_recorded, mutate, random_bits
from pulsesync_lab.demo.replay import RECORDED
from tests.backends import use_kernels
from tests.helpers import (
    FLOATS,
    applied,
    changed_state,
    copied,
    count_sums,
    densities,
    encode,
    near,
    nudge,
    random_layout,
    random_state,
    same,
    seeds,
)
from tests.tiers import slow

CODECS = ["auto", "gap", "step", "context", "history", "dense", "xor"]


def read_index(part: patch.EncodedPart, layout: Layout) -> tuple[list[FrequencyTable], list[TileEntry]]:
    _, sections = container.open_part(part.data)
    return index.parse(sections[0], len(layout.tiles), [len(s) for s in sections])


def one_tensor(dtype: str, size: int) -> Layout:
    return layouts.make([TensorSpec("w", dtype, (size,))])


# First, because it compiles the kernels for one dtype after the other: each test has its own sixty seconds.
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_every_dtype_comes_back(dtype: str, codec: patch.CodecName) -> None:
    rng, layout = np.random.default_rng(0), one_tensor(dtype, 2000)
    old = random_state(rng, layout)
    new = changed_state(rng, old, 0.1, small=False)
    part = encode(layout, old, new, codec=codec, history=History())
    assert same(applied(patch.decode(part.data, layout, old, history=History()).patches, old), new)


@pytest.mark.parametrize("codec", CODECS)
@given(seed=seeds, density=densities, small=st.booleans())
def test_any_change_of_any_layout_comes_back(codec: patch.CodecName, seed: int, density: float, small: bool) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    old = random_state(rng, layout)
    new = changed_state(rng, old, density, small)
    part = encode(layout, old, new, codec=codec, history=History())
    found = patch.decode(part.data, layout, old, expected_id=part.id, history=History())
    assert same(applied(found.patches, old), new)
    assert found.sums == part.sums == {k: v for k, v in count_sums(layout, new).items() if k in part.sums}


@given(seeds, densities, st.booleans())
def test_a_chain_of_histories_comes_back(seed: int, density: float, small: bool) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, dtypes=[*FLOATS, "U16"])
    old, writer, reader = random_state(rng, layout), History(), History()
    for _ in range(4):
        new = changed_state(rng, old, density, small)
        part = encode(layout, old, new, codec="history", history=writer)
        found = patch.decode(part.data, layout, old, history=reader)
        assert same(applied(found.patches, old), new)
        writer, reader = writer.after(part.patches, old), reader.after(found.patches, old)
        assert writer.digest() == reader.digest()
        old = new


@pytest.mark.parametrize("codec", ["context", "history", "auto"])
def test_every_bfloat16_turns_into_every_kind_of_bfloat16(codec: patch.CodecName) -> None:
    old = np.arange(1 << 16, dtype=np.uint16)
    layout = one_tensor("BF16", old.size)
    for flip in (0x0001, 0x8000, 0xFFFF, 0x7FFF, 0x7F80):
        new = {"w": old ^ np.uint16(flip)}
        part = encode(layout, {"w": old}, new, codec=codec, history=History())
        found = patch.decode(part.data, layout, {"w": old}, history=History())
        assert same(applied(found.patches, {"w": old}), new)


@pytest.mark.parametrize(
    ("dtype", "codec"),
    [
        *(("BF16", codec) for codec in CODECS),
        ("I32", "auto"),
        *(
            slow(dtype, codec)
            for dtype in ("F32", "F8_E4M3", "I32")
            for codec in CODECS
            if (dtype, codec) != ("I32", "auto")
        ),
    ],
)
def test_tiles_of_several_blocks_come_back(dtype: str, codec: patch.CodecName) -> None:
    rng, layout = np.random.default_rng(0), one_tensor(dtype, 2 * BLOCK + 77)
    old = {"w": near(rng, dtype, (2 * BLOCK + 77,), 14)}
    new = {"w": nudge(rng, old["w"], 0.002)}
    new["w"][BLOCK : 2 * BLOCK] = old["w"][BLOCK : 2 * BLOCK]  # a block without changes
    new["w"][-1] ^= 1
    part = encode(layout, old, new, codec=codec, history=History())
    found = patch.decode(part.data, layout, old, history=History())
    assert same(applied(found.patches, old), new)
    assert [block.number for block in found.patches[0].blocks] == [0, 2]


@pytest.mark.parametrize("codec", CODECS)
def test_tiles_cut_across_rows_with_several_blocks_come_back(codec: patch.CodecName) -> None:
    spec = TensorSpec("w", "BF16", (1500, 1500), (700,), (1, 1499))
    rng, layout = np.random.default_rng(0), layouts.make([spec])
    old = {"w": near(rng, "BF16", (spec.size,), 110)}
    new = {"w": nudge(rng, old["w"], 0.01)}
    part = encode(layout, old, new, codec=codec, history=History())
    found = patch.decode(part.data, layout, old, history=History())
    assert same(applied(found.patches, old), new)
    assert found.sums == count_sums(layout, new)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_an_empty_tensor_among_others_is_no_obstacle(shape: tuple[int, ...], codec: patch.CodecName) -> None:
    layout = layouts.make([TensorSpec("empty", "BF16", shape), TensorSpec("w", "BF16", (4,))])
    old = {"empty": np.empty(0, np.uint16), "w": np.zeros(4, np.uint16)}
    new = {"empty": np.empty(0, np.uint16), "w": np.arange(4, dtype=np.uint16)}
    part = encode(layout, old, new, codec=codec, history=History())
    assert same(applied(patch.decode(part.data, layout, old, history=History()).patches, old), new)


def test_a_payload_for_an_empty_tensor_is_refused() -> None:
    layout = one_tensor("BF16", 0)
    frequencies = np.zeros((1, 1, 41), np.int64)
    frequencies[0, 0, 0] = tables.TOTAL
    entries = [TileEntry(0, Codec.HISTORY, 1, 3, Sum(0, 0))]
    _, data = container.build(
        layout.id, [[index.build([FrequencyTable("BF16", 0, frequencies)], entries)], [b"\0\0\0"]]
    )
    with pytest.raises(FormatError, match="no weights"):
        patch.decode(data, layout, {"w": np.empty(0, np.uint16)}, history=History())


@given(seeds, st.sampled_from([0.0, 0.01, 0.5]))
def test_tiles_that_did_not_change_are_not_listed(seed: int, density: float) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    old = random_state(rng, layout)
    new = changed_state(rng, old, density, small=False)
    _, entries = read_index(encode(layout, old, new, codec="auto", history=History()), layout)
    before, after = ([t.read(s[t.tensor.name], 0, t.size) for t in layout.tiles] for s in (old, new))
    differ = [not np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert [entry.tile for entry in entries] == np.flatnonzero(differ).tolist()


def test_a_patch_without_changes_is_small_and_changes_nothing() -> None:
    layout = one_tensor("BF16", 1000)
    old = {"w": random_bits(np.random.default_rng(0), np.uint16, (1000,))}
    part = encode(layout, old, copied(old), codec="auto", history=History())
    assert len(part.data) < 200
    assert patch.decode(part.data, layout, old, history=History()).patches == ()


@pytest.mark.parametrize("codec", CODECS)
def test_the_number_of_threads_does_not_change_a_byte(codec: patch.CodecName, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    layout = layouts.make([TensorSpec(f"t{i}", dtype, (300, 40), (100,), (7,)) for i, dtype in enumerate(DTYPES)])
    old = random_state(rng, layout)
    new = changed_state(rng, old, 0.05, small=True)
    parts = []
    for cores in (1, 7):
        monkeypatch.setattr(threads, "default_threads", lambda cores=cores: cores)
        parts.append(encode(layout, old, new, codec=codec, history=History()))
    assert parts[0].data == parts[1].data


@pytest.mark.parametrize("codec", CODECS)
def test_both_kernels_write_the_same_bytes_and_read_each_other(codec: patch.CodecName) -> None:
    rng = np.random.default_rng(0)
    layout = layouts.make([TensorSpec(dtype, dtype, (20, 100)) for dtype in FLOATS])
    old = {spec.name: near(rng, spec.dtype, (spec.size,), 9) for spec in layout.tensors}
    new = changed_state(rng, old, 0.05, small=True)
    parts = []
    for name in ("reference", "cpu"):
        with use_kernels(name):
            parts.append(encode(layout, old, new, codec=codec, history=History()))
    assert parts[0].data == parts[1].data
    for name in ("reference", "cpu"):
        with use_kernels(name):
            found = patch.decode(parts[0].data, layout, old, history=History())
            assert same(applied(found.patches, old), new)


@pytest.mark.parametrize(("dtype", "most"), [("BF16", 2.6), ("F32", 4.0)])
def test_the_first_step_of_a_run_costs_what_it_is_worth(dtype: str, most: float) -> None:
    """All weights move by the learning rate: those that were zero as far as that, the others as far as their class."""
    rng, kind = np.random.default_rng(0), DTYPES[dtype]
    floats = rng.normal(0, 0.02, 50_000).astype(np.float32)
    floats[::2] *= dtype == "F32"
    moved = floats + np.float32(1e-5) * rng.choice(np.array([-1, 1], np.float32), floats.size)
    old, new = ((x.view(np.uint32) >> 32 - 8 * kind.itemsize).astype(kind.bits) for x in (floats, moved))
    layout = layouts.make([TensorSpec("w", dtype, (50_000,))])
    for kernel in ("cpu", "reference"):
        with use_kernels(kernel):
            part = encode(layout, {"w": old}, {"w": new}, history=History())
            found = patch.decode(part.data, layout, {"w": old}, history=History())
        assert np.array_equal(applied(found.patches, {"w": old})["w"], new)
        assert 8 * len(part.data) < most * np.count_nonzero(old != new)


def test_neither_state_is_modified() -> None:
    rng, layout = np.random.default_rng(0), random_layout(5)
    old = random_state(rng, layout)
    new = changed_state(rng, old, 0.5, small=False)
    before = copied(old), copied(new)  # not read-only: numba would compile every kernel for such arrays again, for 8 s
    part = encode(layout, old, new, codec="auto", history=History())
    patch.decode(part.data, layout, old, history=History())
    assert same(old, before[0])
    assert same(new, before[1])


@given(seeds, st.sampled_from([0.0005, 0.005, 0.05, 1.0]), st.booleans())
def test_auto_is_hardly_larger_than_gap_where_few_weights_changed(seed: int, density: float, small: bool) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, shapes=[(1,), (64,), (40, 100)])
    old = random_state(rng, layout)
    new = changed_state(rng, old, density, small)
    sizes = [len(encode(layout, old, new, codec=codec).data) for codec in ("auto", "gap")]
    if sum((old[name] != new[name]).sum() for name in old) <= choice.FEW:
        assert sizes[0] <= sizes[1] + 16


def test_auto_is_hardly_larger_than_gap_where_many_weights_become_zero() -> None:
    rng, layout = np.random.default_rng(0), one_tensor("BF16", BLOCK)
    old = {"w": (rng.normal(size=BLOCK).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)}
    new = {"w": np.where(rng.random(BLOCK) < 0.02, 0, old["w"]).astype(np.uint16)}
    sizes = [len(encode(layout, old, new, codec=codec, history=History()).data) for codec in ("auto", "gap")]
    assert sizes[0] <= sizes[1] + 256


@given(seeds)
def test_auto_is_never_much_larger_than_the_state(seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed)
    old, new = random_state(rng, layout), random_state(rng, layout)
    whole = patch.encode_whole(layout, layout.tiles, new, count_sums(layout, new))
    assert len(encode(layout, old, new, codec="auto", history=History()).data) <= 1.25 * len(whole.data) + 200


def test_large_payloads_are_spread_over_sections() -> None:
    rng = np.random.default_rng(0)
    layout = layouts.make([TensorSpec(f"t{i}", "BF16", (1 << 18,)) for i in range(6)])
    state = {spec.name: random_bits(rng, np.uint16, (spec.size,)) for spec in layout.tensors}
    part = patch.encode_whole(layout, layout.tiles, state, count_sums(layout, state))
    _, entries = read_index(part, layout)
    assert [entry.section for entry in entries] == [1, 1, 1, 2, 2, 2]
    zeros = {name: np.zeros_like(bits) for name, bits in state.items()}
    assert same(applied(patch.decode(part.data, layout, zeros).patches, zeros), state)


def test_a_part_never_has_more_sections_than_a_reader_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MAX_SECTIONS", 6)
    monkeypatch.setattr(patch, "SECTION_BYTES", 1)
    rng = np.random.default_rng(0)
    for tiles in (1, 4, 5, 6, 40):
        layout = layouts.make([TensorSpec(f"t{i}", "U16", (int(rng.integers(1, 99)),)) for i in range(tiles)])
        state = random_state(rng, layout)
        part = patch.encode_whole(layout, layout.tiles, state, count_sums(layout, state))
        header, _ = container.open_part(part.data, part.id)
        assert min(tiles, 3) < len(header.sections) <= 6


@given(seeds)
def test_an_anchor_takes_any_state_to_its_own(seed: int) -> None:
    rng, layout = np.random.default_rng(seed), random_layout(seed, shapes=[(), (0,), (3, 0), (5, 9), (70,)])
    old, new = random_state(rng, layout), random_state(rng, layout)
    part = patch.encode_whole(layout, layout.tiles, new, count_sums(layout, new))
    assert same(applied(patch.decode(part.data, layout, old).patches, old), new)


def test_parts_over_disjoint_tiles_add_up() -> None:
    rng, layout = np.random.default_rng(0), layouts.make([TensorSpec("w", "F16", (90, 90), (30, 60), (45,))])
    old = random_state(rng, layout)
    new = changed_state(rng, old, 0.1, small=True)
    out, sums = old, count_sums(layout, old)
    for tiles in (layout.tiles[::2], layout.tiles[1::2]):
        part = patch.encode(layout, tiles, old, new, count_sums(layout, old), codec="context")
        out = applied(patch.decode(part.data, layout, old).patches, out)
        sums |= part.sums
    assert same(out, new)
    assert sums == count_sums(layout, new)


def test_the_history_codec_needs_a_history() -> None:
    layout = one_tensor("BF16", 4)
    with pytest.raises(ValueError, match="history"):
        encode(layout, {"w": np.zeros(4, np.uint16)}, {"w": np.ones(4, np.uint16)}, codec="history")


def test_an_epoch_ends_after_127_patches() -> None:
    layout = one_tensor("BF16", 4)
    with pytest.raises(ValueError, match="127"):
        encode(layout, {"w": np.zeros(4, np.uint16)}, {"w": np.ones(4, np.uint16)}, history=History(127))


# -- parts that were made for something else, or spoilt ------------------------------------------------------------


def simple(
    codec: patch.CodecName = "history", history: History | None = None
) -> tuple[Layout, Bits, patch.EncodedPart]:
    rng, layout = np.random.default_rng(0), one_tensor("BF16", 3000)
    old = near(rng, "BF16", (3000,), 110)
    new = nudge(rng, old, 0.1)
    return layout, old, encode(layout, {"w": old}, {"w": new}, codec=codec, history=history or History())


def test_a_part_for_another_layout_is_refused() -> None:
    _, old, part = simple()
    with pytest.raises(FormatError, match="expected a part of layout"):
        patch.decode(part.data, one_tensor("BF16", 3001), {"w": old}, history=History())


def test_another_part_than_expected_is_refused() -> None:
    layout, old, part = simple()
    with pytest.raises(ChecksumError):
        patch.decode(part.data, layout, {"w": old}, expected_id="00" * 32, history=History())


def test_a_history_payload_without_a_history_is_refused() -> None:
    layout, old, part = simple()
    with pytest.raises(FormatError, match="needs the history"):
        patch.decode(part.data, layout, {"w": old})


def test_a_history_payload_with_another_history_is_refused() -> None:
    layout, old, part = simple()
    with pytest.raises(FormatError, match="another history"):
        patch.decode(part.data, layout, {"w": old}, history=History(1))


def test_a_cut_below_the_one_remembered_is_refused() -> None:
    layout, old, part = simple()
    later = History().after(part.patches, {"w": old})
    raised = History(0, {0: type(later.tiles[0])(256, (Remembered.alone(np.zeros(3000, np.uint8)),))})
    with pytest.raises(FormatError, match="another history"):
        patch.decode(part.data, layout, {"w": old}, history=raised)


def rebuilt(
    part: patch.EncodedPart, layout: Layout, shared: list[FrequencyTable], entries: list[TileEntry]
) -> memoryview:
    _, sections = container.open_part(part.data)
    return container.build(layout.id, [[index.build(shared, entries)], *([s] for s in sections[1:])])[1]


def test_a_table_that_the_part_does_not_have_is_refused() -> None:
    layout, old, part = simple("context")
    _, entries = read_index(part, layout)
    with pytest.raises(FormatError, match="does not have"):
        patch.decode(rebuilt(part, layout, [], entries), layout, {"w": old})


def test_a_table_of_another_dtype_is_refused() -> None:
    layout, old, part = simple("context")
    shared, entries = read_index(part, layout)
    other = FrequencyTable("F16", 0, shared[0].frequencies)
    with pytest.raises(FormatError, match="does not have"):
        patch.decode(rebuilt(part, layout, [other], entries), layout, {"w": old})


def test_a_cut_above_the_table_is_refused() -> None:
    layout, old, part = simple("context")
    shared, entries = read_index(part, layout)
    lower = FrequencyTable("BF16", 0, shared[0].frequencies)
    with pytest.raises(LimitError, match="above the range of its table"):
        patch.decode(rebuilt(part, layout, [lower], entries), layout, {"w": old})


@pytest.mark.parametrize("dtype", ["U16", "I16"])
def test_a_dtype_without_exponent_cannot_be_coded_against_old_weights(dtype: str) -> None:
    _, old, part = simple("context")
    layout = one_tensor(dtype, 3000)
    _, sections = container.open_part(part.data)
    _, data = container.build(layout.id, [[s] for s in sections])
    with pytest.raises(UnsupportedError, match=dtype):
        patch.decode(data, layout, {"w": old})


@pytest.mark.parametrize("codec", CODECS)
@given(seed=seeds)
def test_a_spoilt_payload_is_refused_or_stays_inside_its_tile(codec: patch.CodecName, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout, old, part = good_part(codec)
    _, sections = container.open_part(part.data)
    spoilt = [bytearray(s) for s in sections]
    where = int(rng.integers(0, len(spoilt)))
    for _ in range(int(rng.integers(1, 4))):
        spoilt[where][rng.integers(0, len(spoilt[where]))] = rng.integers(0, 256)
    _, data = container.build(layout.id, [[bytes(s)] for s in spoilt])
    try:
        found = patch.decode(data, layout, {"w": old}, history=History())
    except FormatError:
        return
    for one in found.patches:
        for block in one.blocks:
            assert block.positions[-1] < one.tile.size
            assert (np.diff(block.positions.astype(np.int64)) > 0).all()


@cache
def good_part(codec: patch.CodecName) -> tuple[Layout, Bits, patch.EncodedPart]:
    return simple(codec)


# -- how small patches are -----------------------------------------------------------------------------------------


@cache
def recorded_sizes() -> dict[str, tuple[int, int]]:
    """For each codec, bytes of the whole part and of its payloads, at the last of 15 recorded steps."""
    recorded = load_recorded(RECORDED)
    layout = layouts.make(
        TensorSpec(name, "BF16", shape) for name, shape in zip(recorded.names, recorded.shapes, strict=True)
    )
    history = History()
    for _, before, after in recorded.states():
        old, new = ({name: bits.reshape(-1) for name, bits in state.items()} for state in (before, after))
        parts = {codec: encode(layout, old, new, codec=codec, history=history) for codec in ("history", "auto")}
        earlier, history = history, history.after(parts["history"].patches, old)
    parts |= {codec: encode(layout, old, new, codec=codec, history=earlier) for codec in ("context", "gap")}
    assert sum(p.changed for p in parts["gap"].patches) == 13_661
    return {codec: (len(part.data), sum(e.size for e in read_index(part, layout)[1])) for codec, part in parts.items()}


@pytest.mark.parametrize(("codec", "payload"), [("history", 4874), ("context", 7561)])
def test_payloads_of_the_recorded_step_have_exactly_the_size_they_had(codec: str, payload: int) -> None:
    assert recorded_sizes()[codec][1] == payload


@pytest.mark.parametrize(("codec", "bits"), [("history", 3.42), ("auto", 3.42), ("context", 4.77), ("gap", 20.4)])
def test_the_recorded_step_takes_no_more_bits_per_change_than_it_did(codec: str, bits: float) -> None:
    assert 8 * recorded_sizes()[codec][0] / 13_661 <= bits


def test_history_pays_on_training_like_updates() -> None:
    updates = AdamUpdates({"w": (400, 500)}, seed=1, scale=0.02)
    layout, history, old = layouts.make([TensorSpec("w", "BF16", (400, 500))]), History(), updates.state()["w"]
    for _ in range(8):
        new = updates.step()["w"].reshape(-1)
        part = encode(layout, {"w": old.reshape(-1)}, {"w": new}, codec="history", history=history)
        plain = encode(layout, {"w": old.reshape(-1)}, {"w": new}, codec="context")
        history, old = history.after(part.patches, {"w": old.reshape(-1)}), new
    assert len(part.data) < 0.9 * len(plain.data)


def test_mutate_and_decode_agree_on_a_full_change() -> None:
    rng, layout = np.random.default_rng(0), one_tensor("BF16", 5000)
    old = random_bits(rng, np.uint16, (5000,))
    new = mutate(rng, old, 1.0)
    part = encode(layout, {"w": old}, {"w": new}, codec="context")
    assert sum(p.changed for p in patch.decode(part.data, layout, {"w": old}).patches) == 5000
