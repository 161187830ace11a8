import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import threads
from pulsesync.core.types import BLOCK, Sum, TensorSpec
from pulsesync.errors import BaseMismatchError, ChainError, ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import container, patch
from pulsesync.format import layout as layouts
from pulsesync.loco import vectors as all_vectors
from pulsesync.loco.gate import LARGEST, SparseVector, VisibilityGate, WholeUpdate
from pulsesync.loco.payload import FORMAT, Coder, PayloadHeader, describe, read_head, summed_unit
from tests.helpers import densities, many, orders, seeds, step

BASE = hashlib.sha256(b"base").hexdigest()
MODES = ["dense", "exact", "compact"]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def finite(rng: np.random.Generator, size: int, lowest: int = 0, highest: int = 254) -> np.ndarray:
    """Any finite numbers with exponent fields between two."""
    bits = rng.integers(0, 1 << 32, size, np.uint32) & np.uint32(0x807FFFFF)
    return (bits | rng.integers(lowest, highest, size, np.uint32, endpoint=True) << np.uint32(23)).view(np.float32)


def weights(rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and a trend of either kind: some on the grid of BF16, some zero, some of any size."""
    theta, momentum = finite(rng, size, 100, 130), finite(rng, size, 0, 130)
    some = rng.random(size)
    theta = np.where(some < 0.2, (theta.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32), theta)
    theta = np.where(some > 0.9, finite(rng, size, 0, 253), theta)
    momentum = np.where(rng.random(size) < 0.2, np.float32(0), momentum)
    trend = np.sign(momentum).astype(np.int8) if rng.random() < 0.5 else momentum.astype(np.float32)
    return theta.astype(np.float32), trend


def some_of(rng: np.random.Generator, size: int, density: float, mode: str, unit: int = -30) -> SparseVector:
    positions = np.arange(size) if mode == "dense" else np.flatnonzero(rng.random(size) < density)
    if mode == "compact":
        sizes = rng.integers(1, LARGEST, positions.size, endpoint=True) >> rng.integers(0, 15, positions.size)
        values = np.ldexp(np.maximum(sizes, 1) * rng.choice([-1.0, 1.0], positions.size), unit).astype(np.float32)
    else:
        values = finite(rng, positions.size, *sorted(rng.integers(0, 254, 2, endpoint=True).tolist()))
    return SparseVector(size, positions, values)


def coder(rng: np.random.Generator, size: int, mode: str) -> Coder:
    return Coder(2, 7, BASE, None if mode == "dense" else describe(*weights(rng, size)))


def unit_of(mode: str, unit: int = -30) -> int | None:
    return unit if mode == "compact" else None


def equal(a: SparseVector, b: SparseVector) -> bool:
    return (
        a.size == b.size
        and np.array_equal(a.positions, b.positions)
        and np.array_equal(a.values.view(np.uint32), b.values.view(np.uint32))
    )


def check_comes_back(coder: Coder, sent: SparseVector, unit: int | None) -> PayloadHeader:
    data = coder.encode("ada", sent, unit)
    head, found = coder.decode(data, "ada", 0, sent.size)
    assert equal(found, sent)
    assert found.values.dtype == np.float32
    assert (head.count, head.begin, head.end) == (sent.values.size, 0, sent.size)
    return head


# A reader of its own, from docs/loco.md: one entry after the other, in Python's numbers


def bits_of(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def value_of(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


def grid(x: float) -> int:
    """The upper half of the nearest BF16 value, ties to even."""
    bits = bits_of(x)
    upper, lower = bits >> 16, bits & 0xFFFF
    return upper + (lower > 0x8000 or (lower == 0x8000 and upper & 1 == 1))


def slow_description(theta: float, trend: float) -> int:
    value = grid(theta)
    size, sign = value & 0x7FFF, -1.0 if value & 0x8000 else 1.0
    outer = sign * value_of(size << 16 | 0x8000)
    inner = sign * value_of((size << 16) - 0x8000) if size else -outer
    to_outer, to_inner = abs(outer - theta), abs(theta - inner)
    away = to_outer <= to_inner
    distance = to_outer if away else to_inner
    border = outer if away else inner
    assert float(np.float32(distance)) == distance  # it is exact
    # An update that crosses it: theta − s is beyond the border.
    negative = border > theta if border != theta else (sign > 0) == away
    trend_is_negative = bits_of(trend) >> 31 == 1
    agrees = trend != 0 and trend_is_negative == negative
    exponent = bits_of(distance) >> 23
    kind = min(max(2 * (exponent - 32) + (0 if agrees else 1), 0), 255)
    return kind << 7 | negative << 15


def slow_read(data: bytes, theta: np.ndarray, trend: np.ndarray) -> dict[int, float]:
    """Which entries a payload sends, and what."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    unsealed = line.replace(head["sha256"].encode(), b"")
    assert hashlib.sha256(unsealed + b"\n" + body).hexdigest() == head["sha256"]
    size = head["end"] - head["begin"]
    if head["mode"] == "dense":
        return {i: struct.unpack_from("<f", body, 4 * i)[0] for i in range(size)}
    if not head["count"]:
        assert not body
        return {}
    here = range(head["begin"], head["end"])
    old = np.array([slow_description(float(theta[i]), float(trend[i])) for i in here], np.uint16)
    part = patch.decode(body[: head["coded"]], layouts.make([TensorSpec("fired", "BF16", (size,))]), {"fired": old})
    (only,) = part.patches
    places = [(int(p), int(o), int(n)) for b in only.blocks for p, o, n in zip(b.positions, b.old, b.new, strict=True)]
    count, rest = len(places), body[head["coded"] :]
    assert count == head["count"]
    upper = "".join(f"{byte:08b}" for byte in rest[2 * count :])
    out = {}
    for number, (place, before, after) in enumerate(places):
        assert before == old[place]
        at, to = orders(np.array([before, after], np.uint16))
        moved = step(at, to, 16)
        sign = -1.0 if (before >> 15 == 1) == (moved > 0) else 1.0
        if head["mode"] == "compact":
            assert not rest
            out[place] = sign * abs(moved) * 2.0 ** head["scale"]
        else:
            zigzag = abs(moved) - 1
            exponent = head["scale"] + (zigzag // 2 if zigzag % 2 == 0 else -(zigzag + 1) // 2)
            (low,) = struct.unpack_from("<H", rest, 2 * number)
            bits = exponent << 23 | int(upper[7 * number : 7 * number + 7], 2) << 16 | low
            out[place] = sign * value_of(bits)
    return out


@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds, density=densities)
def test_a_reader_written_from_the_document_reads_the_same(mode: str, seed: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    theta, trend = weights(rng, 40)
    coder = Coder(2, 7, BASE, None if mode == "dense" else describe(theta, trend))
    sent = some_of(rng, 25, density, mode)
    data = coder.encode("ada", sent, unit_of(mode), begin=10)
    found = slow_read(data, theta, trend)
    assert list(found) == sent.positions.tolist()
    assert [bits_of(v) for v in found.values()] == sent.values.view(np.uint32).tolist()


@given(seeds)
def test_descriptions_are_those_of_the_document(seed: int) -> None:
    theta, trend = weights(np.random.default_rng(seed), 100)
    expected = [slow_description(float(t), float(m)) for t, m in zip(theta, trend, strict=True)]
    assert describe(theta, trend).tolist() == expected


@many
@given(st.floats(-(2.0**127), 2.0**127, width=32), st.floats(width=32, allow_nan=False))
def test_the_description_of_any_weight_is_that_of_the_document(theta: float, trend: float) -> None:
    assert describe(f32(theta), f32(trend)).tolist() == [slow_description(theta, trend)]


def test_descriptions_at_borders_powers_of_two_zeros_and_subnormals_are_those_of_the_document() -> None:
    uppers = [0, 1, 2, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x4000, 0x7F00, 0x7F7E]
    lowers = [0, 1, 0x3FFF, 0x4000, 0x4001, 0x7FFF, 0x8000, 0x8001, 0xBFFF, 0xC000, 0xC001, 0xFFFF]
    for sign in (0, 0x8000):
        bits = np.array([(u | sign) << 16 | low for u in uppers for low in lowers], np.uint32)
        for m in (0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149)):
            found = describe(bits.view(np.float32), np.full(bits.size, m, np.float32))
            assert found.tolist() == [slow_description(float(t), m) for t in bits.view(np.float32)]
            signs = np.full(bits.size, np.sign(m), np.int8)
            assert describe(bits.view(np.float32), signs).tolist() == found.tolist()


def test_a_description_says_which_way_the_near_border_lies() -> None:
    near_above, near_below = 1.0 + 2.0**-10, 1.0 + 2.0**-6 - 2.0**-10
    described = describe(f32(near_above, near_below, -near_above, -near_below), f32(0, 0, 0, 0))
    assert (described >> 15).tolist() == [1, 0, 0, 1]


def test_a_description_is_lower_where_the_trend_points_to_the_border() -> None:
    theta = np.full(4, 1.0 + 2.0**-10, np.float32)
    for trend in (f32(-1.0, 1.0, 0.0, -0.0), np.array([-1, 1, 0, 0], np.int8)):
        kinds = (describe(theta, trend) >> 7 & 0xFF).astype(int).tolist()
        assert kinds == [kinds[0], kinds[0] + 1, kinds[0] + 1, kinds[0] + 1]
        assert kinds[0] % 2 == 0


def test_on_the_grid_the_class_is_the_exponent() -> None:
    theta = np.ldexp(f32(1.5), np.arange(-80, 30)).astype(np.float32)
    kinds = (describe(theta, np.zeros_like(theta)) >> 7 & 0xFF).astype(int)
    assert np.unique(np.diff(kinds)).tolist() == [2]


def test_descriptions_are_the_same_whatever_chunks_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    theta, trend = weights(np.random.default_rng(4), 1000)
    expected = describe(theta, trend)
    for chunk, count in ((1, 2), (7, 1), (999, 8), (1000, 2), (1001, 1)):
        monkeypatch.setattr(all_vectors, "CHUNK", chunk)
        monkeypatch.setattr(threads, "default_threads", lambda n=count: n)
        assert np.array_equal(describe(theta, trend), expected)


# Round trips


@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds, size=st.integers(0, 300), density=densities)
def test_any_entries_come_back(mode: str, seed: int, size: int, density: float) -> None:
    rng = np.random.default_rng(seed)
    head = check_comes_back(coder(rng, size, mode), some_of(rng, size, density, mode), unit_of(mode))
    assert head.mode == mode


@pytest.mark.parametrize("mode", MODES)
@given(seed=seeds)
def test_a_range_comes_back_counted_from_its_begin(mode: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin, end = sorted(rng.integers(0, 200, 2, endpoint=True).tolist())
    one, sent = coder(rng, 200, mode), some_of(rng, end - begin, 0.3, mode)
    data = one.encode("bea", sent, unit_of(mode), begin=begin, terms=3)
    head, found = one.decode(memoryview(data), "bea", begin, end, 3)
    assert equal(found, sent)
    assert (head.begin, head.end, head.terms, head.trainer) == (begin, end, 3, "bea")


@pytest.mark.parametrize("mode", ["exact", "compact"])
@pytest.mark.parametrize("place", [0, 1, 63, 64, 98, 99])
def test_a_single_entry_comes_back(mode: str, place: int) -> None:
    one = coder(np.random.default_rng(0), 100, mode)
    for value in (2.0**-30, -(2.0**-30), -LARGEST * 2.0**-30):
        check_comes_back(one, SparseVector(100, np.array([place]), f32(value)), unit_of(mode))


@many
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20), seeds)
def test_exact_values_come_back_bit_for_bit_with_sign_exponent_and_subnormals(values: list[float], seed: int) -> None:
    one = coder(np.random.default_rng(seed), 20, "exact")
    check_comes_back(one, SparseVector(20, np.arange(len(values)), f32(*values)), None)


def test_every_exponent_comes_back_whatever_the_commonest() -> None:
    rng = np.random.default_rng(0)
    every = np.arange(255, dtype=np.uint32) << np.uint32(23)
    mantissas = rng.integers(0, 1 << 23, 255).astype(np.uint32)
    for common in (0, 1, 127, 254):
        bits = np.concatenate([every | mantissas, np.full(10, common << 23 | 5, np.uint32)])
        for sign in (np.uint32(0), np.uint32(1 << 31)):
            sent = SparseVector(bits.size, np.arange(bits.size), (bits | sign).view(np.float32))
            assert check_comes_back(coder(rng, bits.size, "exact"), sent, None).scale == common


def test_a_zero_that_was_sent_comes_back_with_its_sign() -> None:
    check_comes_back(
        coder(np.random.default_rng(0), 5, "exact"), SparseVector(5, np.array([1, 3]), f32(0.0, -0.0)), None
    )


@pytest.mark.parametrize("unit", [-149, -135, -126, -30, 0, 100, 112])
def test_compact_values_come_back_in_every_unit(unit: int) -> None:
    rng = np.random.default_rng(0)
    sent = some_of(rng, 300, 1.0, "compact", unit)
    assert check_comes_back(coder(rng, 300, "compact"), sent, unit).scale == unit


def test_every_compact_size_comes_back_from_every_kind_of_description() -> None:
    sizes = np.array([1, 2, 3, 127, 128, 129, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF] * 2, np.float64)
    signs = np.repeat([1.0, -1.0], 10)
    values = np.ldexp(np.tile(sizes * signs, 8), -30).astype(np.float32)
    for kind in (0, 1, 127, 128, 254, 255):
        described = np.repeat(np.array([kind << 7, kind << 7 | 0x8000], np.uint16), values.size // 2)
        one = Coder(0, 1, BASE, described)
        check_comes_back(one, SparseVector(values.size, np.arange(values.size), values), -30)


@pytest.mark.parametrize("mode", ["exact", "compact"])
@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1])
def test_entries_at_the_borders_of_blocks_come_back(mode: str, size: int) -> None:
    described = np.zeros(size, np.uint16)
    places = sorted({p for p in (0, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, size - 1) if p < size})
    values = np.ldexp(np.arange(1, len(places) + 1) * (-1.0) ** np.arange(len(places)), -30).astype(np.float32)
    check_comes_back(Coder(0, 1, BASE, described), SparseVector(size, np.array(places), values), unit_of(mode))


@pytest.mark.parametrize("bits", [None, 0, 3])
def test_what_the_gate_sends_comes_back(bits: int | None) -> None:
    rng = np.random.default_rng(0)
    theta, trend = weights(rng, 5000)
    s = (theta * rng.standard_normal(5000).astype(np.float32) * np.float32(0.003)).astype(np.float32)
    part = VisibilityGate(bits).select(theta, WholeUpdate(s))
    check_comes_back(Coder(0, 1, BASE, describe(theta, trend)), part.sent, part.unit)


def test_nothing_sent_takes_a_head_and_no_bytes() -> None:
    one = coder(np.random.default_rng(0), 50, "exact")
    data = one.encode("ada", SparseVector(50, np.empty(0, np.int64), f32()), None)
    assert data.endswith(b"\n")
    assert data.count(b"\n") == 1


def test_the_same_entries_make_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    one, sent = coder(rng, 2000, "exact"), some_of(rng, 2000, 0.2, "exact")
    data = one.encode("ada", sent, None)
    monkeypatch.setattr(threads, "default_threads", lambda: 7)
    assert one.encode("ada", sent, None) == data


def test_the_coded_part_is_a_weight_patch_of_one_tensor_with_sums_from_zero() -> None:
    rng = np.random.default_rng(0)
    one, sent = coder(rng, 300, "exact"), some_of(rng, 300, 0.2, "exact")
    head, body = read_head(one.encode("ada", sent, None))
    header, _ = container.open_part(body[: head.coded])
    layout = layouts.make([TensorSpec("fired", "BF16", (300,))])
    assert header.layout == layout.id
    assert one.described is not None
    found = patch.decode(body[: head.coded], layout, {"fired": one.described})
    assert set(found.sums) == {0}
    assert found.sums[0] != Sum(0, 0)


def test_mantissas_take_23_bits_each() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 8, 9, 100):
        one = coder(rng, 100, "exact")
        head, body = read_head(one.encode("ada", SparseVector(100, np.arange(count), finite(rng, count)), None))
        assert len(body) - head.coded == -(-23 * count // 8)


def test_entries_near_a_border_cost_less_than_their_positions_would() -> None:
    rng = np.random.default_rng(0)
    theta = (rng.standard_normal(200_000) * 0.05).astype(np.float32)
    s = (rng.standard_normal(200_000) * 1e-6).astype(np.float32)
    part = VisibilityGate(2).select(theta, WholeUpdate(s))
    data = Coder(0, 1, BASE, describe(theta, np.zeros(theta.size, np.int8))).encode("ada", part.sent, part.unit)
    assert part.sent.positions.size > 500
    assert len(data) < 2 * part.sent.positions.size


# What is refused


def good(mode: str) -> tuple[Coder, SparseVector, bytes]:
    rng = np.random.default_rng(1)
    one, sent = coder(rng, 60, mode), some_of(rng, 60, 0.5, mode)
    return one, sent, one.encode("ada", sent, unit_of(mode))


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_of_another_trainer_fragment_or_round_is_refused(mode: str) -> None:
    one, _, data = good(mode)
    for other in (Coder(3, 7, BASE, one.described), Coder(2, 8, BASE, one.described), Coder(2, 6, BASE, one.described)):
        with pytest.raises(FormatError, match="expected a payload of ada"):
            other.decode(data, "ada", 0, 60)
    with pytest.raises(FormatError, match="payload of bea, fragment 2, round 7"):
        one.decode(data, "bea", 0, 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_that_goes_on_from_another_state_is_refused(mode: str) -> None:
    one, _, data = good(mode)
    with pytest.raises(BaseMismatchError, match="another shared state") as caught:
        Coder(2, 7, "f" * 64, one.described).decode(data, "ada", 0, 60)
    assert (caught.value.expected, caught.value.actual) == ("f" * 64, BASE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", [(0, 59, 1), (1, 60, 1), (0, 61, 1), (1, 61, 1), (0, 60, 2), (0, 60, 0)])
def test_a_payload_of_other_entries_or_terms_is_refused(mode: str, said: tuple[int, int, int]) -> None:
    one, _, data = good(mode)
    with pytest.raises(FormatError, match="1 updates from 0 to 60"):
        one.decode(data, "ada", *said)


@pytest.mark.parametrize("mode", MODES)
def test_a_dense_payload_among_sparse_ones_is_refused_and_the_other_way_round(mode: str) -> None:
    one, _, data = good(mode)
    other = Coder(2, 7, BASE, np.zeros(60, np.uint16) if one.described is None else None)
    with pytest.raises(FormatError, match="does not take payloads in mode"):
        other.decode(data, "ada", 0, 60)


@pytest.mark.parametrize("mode", ["exact", "compact"])
def test_a_payload_decoded_against_other_descriptions_is_never_taken(mode: str) -> None:
    one, _, data = good(mode)
    assert one.described is not None
    for bit in range(7, 16):
        with pytest.raises(FormatError):
            Coder(2, 7, BASE, one.described ^ np.uint16(1 << bit)).decode(data, "ada", 0, 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_cut_anywhere_is_refused(mode: str) -> None:
    one, _, data = good(mode)
    for end in range(len(data)):
        with pytest.raises(FormatError):
            one.decode(data[:end], "ada", 0, 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_with_bytes_behind_it_is_refused(mode: str) -> None:
    one, _, data = good(mode)
    with pytest.raises(ChecksumError, match="damaged"):
        one.decode(data + b"\0", "ada", 0, 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_behind_the_head_is_damage(mode: str) -> None:
    one, _, data = good(mode)
    for at in range(data.index(b"\n") + 1, len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << at % 8
        with pytest.raises(ChecksumError, match="damaged"):
            one.decode(bytes(spoilt), "ada", 0, 60)


@pytest.mark.parametrize("mode", MODES)
def test_a_flipped_bit_in_the_head_is_refused(mode: str) -> None:
    one, _, data = good(mode)
    end = data.index(b"\n") + 1
    for at in range(end):
        for bit in range(8):
            spoilt = bytearray(data)
            spoilt[at] ^= 1 << bit
            with pytest.raises((FormatError, ChainError)):
                one.decode(bytes(spoilt), "ada", 0, 60)


def test_errors_say_what_they_are() -> None:
    one, _, data = good("exact")
    for spoilt, error, match in (
        (b"", FormatError, "no head"),
        (b"x" * 5000, FormatError, "no head"),
        (b"\n", FormatError, "not JSON"),
        (b"[]\n", FormatError, "not a JSON object"),
        (b"{}\n", UnsupportedError, FORMAT),
        (data.replace(b"pulse-loco/1", b"pulse-loco/2"), UnsupportedError, FORMAT),
        (data.replace(b'"ada"', b'"' + b"a" * 129 + b'"'), LimitError, "longer than 128"),
        (data.replace(b",", b", ", 1), FormatError, "canonical"),
    ):
        with pytest.raises(error, match=match) as caught:
            one.decode(spoilt, "ada", 0, 60)
        assert type(caught.value) is error


# Units of sums


def test_a_sum_of_compact_updates_has_the_smallest_of_their_units() -> None:
    total = SparseVector(3, np.arange(3), f32(1.0, -0.25, 3.0))
    assert summed_unit(total, [-2, 0, -1]) == -2


def test_a_sum_with_an_exact_update_in_it_is_exact() -> None:
    assert summed_unit(SparseVector(1, np.arange(1), f32(1.0)), [-2, None]) is None


def test_a_sum_too_large_for_its_unit_is_exact() -> None:
    assert summed_unit(SparseVector(1, np.arange(1), f32(float(LARGEST))), [0, 0]) == 0
    assert summed_unit(SparseVector(1, np.arange(1), f32(-float(LARGEST) - 1)), [0, 0]) is None


def test_a_sum_of_nothing_has_a_unit() -> None:
    assert summed_unit(SparseVector(4, np.empty(0, np.int64), f32()), [0, -5]) == -5
