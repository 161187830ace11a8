"""What a LoCo round computes on a device is, bit for bit, what it computes in host memory."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from pulsesync.core.types import BLOCK
from pulsesync.device.vectors import DeviceKernels
from pulsesync.errors import ChecksumError, FormatError
from pulsesync.loco.gate import SparseVector, VisibilityGate, WholeUpdate, unit_of
from pulsesync.loco.outer_step import Nesterov, OwnMomentum, SharedMomentum, aggregate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, SharedState
from pulsesync.loco.vectors import HOST, VectorOps, vectors_at, vectors_of
from tests.kernels.fp32_cases import F32, updates, weights

SIZES = (1, 31, 4096, 4097, 9001)
CHUNK = 1000  # entries of a vector that are worked on together here, so that there are several such pieces


@pytest.fixture
def there(device: str, monkeypatch: pytest.MonkeyPatch) -> VectorOps:
    monkeypatch.setattr(DeviceKernels, "chunk", CHUNK)
    return vectors_at(torch.empty(0, device=device).device)


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with np.errstate(over="ignore", invalid="ignore"):
        yield


def case(size: int, count: int) -> list[F32]:
    """Weights, and updates of them."""
    rng = np.random.default_rng(size)
    theta = weights(rng, size)
    return [theta, *(updates(rng, theta) for _ in range(count - 1))]


def assert_same(there: Any, here: Any) -> None:
    """The same bits, where they are numbers; what is none need only be none on both sides."""
    found, expected = (vectors_of(v).fetch(v) for v in (there, here))
    assert found.dtype.itemsize == expected.dtype.itemsize
    if expected.dtype != np.float32:
        assert np.array_equal(found.view(expected.dtype), expected)
        return
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert np.array_equal(found.view(np.uint32)[finite], expected.view(np.uint32)[finite])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_and_momenta(there: Any, size: int, nesterov: bool) -> None:
    given, here = case(size, 4), cast(Any, HOST.kernels)
    found = there.kernels.advance(*map(there.to_backend, given), 0.7, 0.9, nesterov)
    for one, other in zip(found, here.advance(*given, 0.7, 0.9, nesterov), strict=True):
        assert_same(one, other)
    found = there.kernels.step(*map(there.to_backend, given[:3]), 3, 0.7, 0.9, nesterov)
    for one, other in zip(found, here.step(*given[:3], 3, 0.7, 0.9, nesterov), strict=True):
        assert_same(one, other)


def test_products_and_sums_are_not_fused(there: Any) -> None:
    """With values at which that would show: most results would differ."""
    rng = np.random.default_rng(1)
    theta, e, m, x = (rng.normal(0, 0.02, 4096).astype(np.float32) for _ in range(4))
    s, moved = there.kernels.advance(*map(there.to_backend, (theta, e, m, x)), 0.7, 0.9, True)
    delta = (theta - e) - x
    fused = (np.float64(np.float32(0.9)) * m.astype(np.float64) + delta).astype(np.float32)
    assert (there.fetch(moved) != fused).any()
    assert_same(moved, np.float32(0.9) * m + delta)
    assert_same(s, e + np.float32(0.7) * (delta + np.float32(0.9) * (np.float32(0.9) * m + delta)))


@pytest.mark.parametrize("by", [3.0, 0.7, 7.0])
def test_quotients_are_rounded_to_the_nearest(there: Any, by: float) -> None:
    values = case(5000, 2)[1]
    assert_same(there.kernels.divide(there.to_backend(values), by), HOST.kernels.divide(values, by))
    exact = np.arange(1, 4096, dtype=np.float32)  # times by, over by: nearly all multiples of the reciprocal are off
    assert_same(
        there.kernels.divide(there.to_backend(exact * np.float32(by)), by),
        HOST.kernels.divide(exact * np.float32(by), by),
    )


def test_subnormal_numbers_are_not_flushed_to_zero(there: Any) -> None:
    tiny = np.arange(-3000, 3000, dtype=np.int64)
    values = (np.abs(tiny).astype(np.uint32) | (tiny < 0).astype(np.uint32) << np.uint32(31)).view(np.float32)
    zeros = np.zeros_like(values)
    s, moved = there.kernels.advance(*map(there.to_backend, (values, zeros, values, zeros)), 1.0, 0.5, False)
    for one, other in zip((s, moved), HOST.kernels.advance(values, zeros, values, zeros, 1.0, 0.5, False), strict=True):
        assert_same(one, other)
        assert np.count_nonzero(other) > 5000
    assert_same(there.kernels.divide(there.to_backend(values), 4.0), HOST.kernels.divide(values, 4.0))
    assert_same(there.to_backend(values) - there.to_backend(values[::-1].copy()), values - values[::-1])


@pytest.mark.parametrize("size", SIZES)
def test_entries_that_are_visible(there: Any, size: int) -> None:
    theta, s = case(size, 2)
    found = there.kernels.find_visible(there.to_backend(theta), there.to_backend(s), 1.4, 77)
    expected = HOST.kernels.find_visible(theta, s, 1.4, 77)
    assert_same(found.positions, expected.positions)
    assert_same(found.values, expected.values)
    assert found.largest == expected.largest


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_found(there: Any, bad: float) -> None:
    theta = np.ones(5000, np.float32)
    s = np.zeros(5000, np.float32)
    s[4321] = bad
    values = there.to_backend(s)
    assert not np.isfinite(there.kernels.largest(values))
    assert not np.isfinite(VisibilityGate(0, 1.4).select(there.to_backend(theta), WholeUpdate(values)).largest)
    assert there.first_beyond(values, np.finfo(np.float32).max) == 4321
    assert there.first_beyond(there.to_backend(theta), np.float32(1)) is None


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("signs", [False, True])
def test_descriptions(there: Any, size: int, signs: bool) -> None:
    theta, trend = case(size, 2)
    either = np.sign(trend).astype(np.int8) if signs else trend
    assert_same(describe(there.to_backend(theta), there.to_backend(either)), describe(theta, either))


@pytest.mark.parametrize("rule", [OwnMomentum(Nesterov()), SharedMomentum(Nesterov())], ids=["own", "shared"])
@pytest.mark.parametrize("trainers", [1, 3])
def test_outer_steps(there: Any, rule: Any, trainers: int) -> None:
    theta, total, trend = case(3001, 3)
    trend = np.sign(trend).astype(np.int8) if rule.own_momentum else trend
    found = rule.step(*map(there.to_backend, (theta, trend, total.copy())), trainers)
    expected = rule.step(theta, trend, total.copy(), trainers)
    assert_same(found.theta, expected.theta)
    assert_same(found.trend, expected.trend)
    assert found[2:] == expected[2:]


@pytest.mark.parametrize("dense", [False, True])
def test_updates_are_added_up_in_their_order(there: Any, dense: bool) -> None:
    rng = np.random.default_rng(0)
    size, parts = 3001, []
    for _ in range(5):
        at = np.arange(size) if dense else np.sort(rng.choice(size, 1200, replace=False))
        parts.append(SparseVector(size, at, (10.0 ** rng.uniform(-6, 6, at.size)).astype(np.float32)))
    brought = [SparseVector(size, there.to_backend(p.positions), there.to_backend(p.values)) for p in parts]
    expected = aggregate(parts, size)
    assert_same(aggregate(brought, size), expected)
    assert not np.array_equal(aggregate(parts[::-1], size), expected)
    left, right = there.to_backend(expected.copy()), expected.copy()
    brought[2].take_from(left)
    parts[2].take_from(right)
    assert_same(left, right)


@pytest.mark.parametrize("bits", [None, 0, 3])
def test_what_a_gate_sends(there: Any, bits: int | None) -> None:
    rng = np.random.default_rng(2)
    theta = rng.normal(0, 0.02, 5000).astype(np.float32)
    s = rng.normal(0, 1e-5, 5000).astype(np.float32)
    gate = VisibilityGate(bits, 1.4)
    found = gate.select(there.to_backend(theta), WholeUpdate(there.to_backend(s)))
    expected = gate.select(theta, WholeUpdate(s))
    assert_same(found.sent.positions, expected.sent.positions)
    assert_same(found.sent.values, expected.sent.values)
    assert (found.unit, found.largest) == (expected.unit, expected.largest)
    assert len(expected.sent.positions)


def test_the_unit_does_not_depend_on_the_order(there: Any) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        values = (10.0 ** rng.uniform(-30, 20, 2000)).astype(np.float32) * rng.choice([-1, 1], 2000)
        values = values.astype(np.float32)
        expected = unit_of(values, 2)
        assert unit_of(there.to_backend(values), 2) == unit_of(there.to_backend(np.sort(values)), 2) == expected
        assert unit_of(rng.permutation(values), 2) == expected


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("size", [1, 3001])
def test_digests_and_saved_states(there: Any, own: bool, size: int) -> None:
    rng = np.random.default_rng(3)
    theta, trend = (rng.normal(0, 0.02, size).astype(np.float32) for _ in range(2))
    either = np.sign(trend).astype(np.int8) if own else trend
    here = SharedState("0" * 64, theta, either, 4)
    one = SharedState("0" * 64, there.to_backend(theta), there.to_backend(either), 4)
    assert one.digest == here.digest
    assert one.to_bytes() == here.to_bytes()
    back = SharedState.from_bytes(here.to_bytes(), like=one)
    assert isinstance(back.theta, torch.Tensor)
    assert back.digest == here.digest
    assert isinstance(SharedState.from_bytes(one.to_bytes(), like=here).theta, np.ndarray)
    changed = there.to_backend(theta)
    changed[size // 2] += 1
    assert SharedState("0" * 64, changed, there.to_backend(either), 4).digest != here.digest


# Payloads


def coders(there: Any, size: int, dense: bool = False) -> tuple[Coder, Coder]:
    """One on the device and one on the host, of the same round."""
    rng = np.random.default_rng(size)
    theta = rng.normal(0, 0.02, size).astype(np.float32)
    trend = rng.integers(-1, 2, size).astype(np.int8)
    if dense:
        return Coder(0, 1, "b", None, there), Coder(0, 1, "b", None)
    described = describe(there.to_backend(theta), there.to_backend(trend))
    return Coder(0, 1, "b", described, there), Coder(0, 1, "b", describe(theta, trend))


def some_of(size: int, count: int, unit: int | None) -> SparseVector:
    rng = np.random.default_rng(count)
    at = np.sort(rng.choice(size, count, replace=False))
    values = rng.normal(0, 1e-4, count).astype(np.float32)
    if unit is not None:
        values = (np.clip(np.rint(values * 2.0**-unit), -9, 9) * 2.0**unit).astype(np.float32)
        at, values = at[values != 0], values[values != 0]
    return SparseVector(size, at, values)


@pytest.mark.usefixtures("many_lanes")
@pytest.mark.parametrize(
    ("size", "count", "unit"),
    [(3001, 500, None), (3001, 700, -14), (40, 40, -16), (3001, 1, None), (3001, 0, None), (500, 300, -14)],
)
def test_payloads_have_the_bytes_of_the_host_and_are_read_by_both(
    there: Any, size: int, count: int, unit: int | None
) -> None:
    one, other = coders(there, size)
    sent = some_of(size, count, unit)
    brought = SparseVector(size, there.to_backend(sent.positions), there.to_backend(sent.values))
    data = other.encode("ada", sent, unit)
    assert one.encode("ada", brought, unit) == data
    head, found = one.decode(data, "ada", 0, size)
    assert head == other.decode(data, "ada", 0, size)[0]
    assert_same(found.positions, sent.positions)
    assert_same(found.values, sent.values)


@pytest.mark.usefixtures("many_lanes")
def test_a_payload_of_a_part_of_a_fragment_that_begins_anywhere(there: Any) -> None:
    one, other = coders(there, 2001)
    sent = some_of(999, 300, None)
    data = other.encode("ada", sent, None, begin=501)
    brought = SparseVector(999, there.to_backend(sent.positions), there.to_backend(sent.values))
    assert one.encode("ada", brought, None, begin=501) == data
    assert_same(one.decode(data, "ada", 501, 1500)[1].values, sent.values)


@pytest.mark.usefixtures("many_lanes")
def test_steps_in_several_blocks(there: Any) -> None:
    """Most entries are far from their border, so that few are hot: the interpreter's time follows these."""
    rng = np.random.default_rng(5)
    size = BLOCK + 5000
    described = np.full(size, 250 << 7, np.uint16)
    near = np.sort(rng.choice(size, 200, replace=False))
    described[near] = rng.integers(1, 20, near.size) << 7 | rng.integers(0, 2, near.size) << 15
    positions = np.sort(np.concatenate([near[::2], [0, BLOCK - 1, BLOCK, size - 1]]))
    positions = np.unique(positions)
    sizes, negative = rng.integers(1, 9, positions.size), rng.integers(0, 2, positions.size)
    data = HOST.kernels.encode_steps(described, positions, sizes, negative)
    brought = there.to_backend(described.view(np.int16))
    assert there.kernels.encode_steps(brought, *map(there.to_backend, (positions, sizes, negative))) == data
    for found, expected in zip(
        there.kernels.decode_steps(brought, memoryview(data), positions.size), (positions, sizes, negative), strict=True
    ):
        assert_same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 0])
def test_a_round_of_several_blocks_and_pieces(there: Any, bits: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceKernels, "chunk", 1 << 19)
    rng = np.random.default_rng(6)
    theta = rng.normal(0, 0.02, 1_300_001).astype(np.float32)
    s = rng.normal(0, 1e-5, theta.size).astype(np.float32)
    trend = rng.integers(-1, 2, theta.size).astype(np.int8)
    gate, rule, results = VisibilityGate(bits, 1.4), OwnMomentum(Nesterov()), []
    for v in (there, HOST):
        vectors = [v.to_backend(one.copy()) for one in (theta, s, trend)]
        part = gate.select(vectors[0], WholeUpdate(vectors[1]))
        coder = Coder(0, 1, "b", describe(vectors[0], vectors[2]), v)
        data = coder.encode("ada", part.sent, part.unit)
        read = coder.decode(data, "ada", 0, theta.size)[1]
        total = aggregate([read, part.sent, part.sent], theta.size)
        after = SharedState("0" * 64, vectors[0], vectors[2]).resolve(Outcome({"a": "", "b": "", "c": ""}, total), rule)
        results.append((data, after.moved, after.after.digest))
    assert results[0] == results[1]


def test_dense_payloads(there: Any) -> None:
    one, other = coders(there, 50, dense=True)
    values = np.random.default_rng(0).normal(0, 1, 50).astype(np.float32)
    data = other.encode("ada", SparseVector(50, np.arange(50), values), None)
    assert one.encode("ada", SparseVector.whole(there.to_backend(values)), None) == data
    assert_same(one.decode(data, "ada", 0, 50)[1].values, values)


@pytest.mark.usefixtures("many_lanes")
def test_payloads_that_are_damaged_or_of_another_state_are_refused(there: Any) -> None:
    one, other = coders(there, 1500)
    sent = some_of(1500, 300, None)
    data = other.encode("ada", sent, None)
    for place in range(0, len(data), len(data) // 40):
        damaged = bytearray(data)
        damaged[place] ^= 4
        with pytest.raises(FormatError):
            one.decode(bytes(damaged), "ada", 0, 1500)
    assert other.described is not None
    steps = bytes(
        HOST.kernels.encode_steps(other.described, sent.positions, np.ones(300, np.int64), sent.positions % 2)
    )
    with pytest.raises(FormatError, match="the number of entries"):
        there.kernels.decode_steps(one.described, memoryview(steps), 299)
    with pytest.raises(FormatError, match="must have no bytes"):
        there.kernels.decode_steps(one.described, memoryview(steps), 0)
    assert one.described is not None
    changed = one.described.flip(0)
    with pytest.raises((FormatError, ChecksumError)):
        there.kernels.decode_steps(changed, memoryview(steps), 300)
