import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import threads
from pulsesync.errors import ChecksumError, FormatError
from pulsesync.loco import vectors as all_vectors
from pulsesync.loco.gate import SparseVector
from pulsesync.loco.outer_step import (
    LARGEST_UPDATE,
    SGD,
    Nesterov,
    OuterRule,
    OwnMomentum,
    SharedMomentum,
    TrainerUpdate,
    aggregate,
    mean_of,
)
from pulsesync.loco.shared import MAX_TRAINERS, Contribution, Outcome, SharedState, read_part
from tests.helpers import many, seeds
from tests.loco import reference

OUTERS = [SGD(1.0), SGD(0.7), SGD(0.7, 0.9), Nesterov(0.7, 0.9), Nesterov(0.4, 0.95)]
RULES: list[OuterRule] = [SharedMomentum(Nesterov()), OwnMomentum(Nesterov())]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def rounded(x: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def sparse(size: int, entries: dict[int, float]) -> SparseVector:
    return SparseVector(size, np.array(sorted(entries), np.int64), f32(*(entries[i] for i in sorted(entries))))


def vectors(seed: int, size: int = 500) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-20, 4, 3)
    return [(rng.standard_normal(size) * scale).astype(np.float32) for scale in sizes]


# The outer step


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@given(seed=seeds)
def test_a_step_rounds_every_operation_by_itself(outer: SGD, seed: int) -> None:
    theta, momentum, mean = vectors(seed, 50)
    after, moved = outer.step(theta, momentum, mean)
    lr, mu = rounded(outer.lr), rounded(outer.momentum)
    for i in range(theta.size):  # a double holds products and, once rounded, sums of two FP32 without a second error
        t, m, g = float(theta[i]), float(momentum[i]), float(mean[i])
        m = rounded(rounded(mu * m) + g)
        by = rounded(g + rounded(mu * m)) if outer.nesterov else m
        assert moved[i] == m
        assert after[i] == rounded(t - rounded(lr * by))


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@given(seed=seeds)
def test_a_step_is_torchs_within_an_ulp_of_its_terms(outer: SGD, seed: int) -> None:
    theta, momentum, mean = vectors(seed)
    after, moved = outer.step(theta, momentum, mean)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    parameter.grad = torch.from_numpy(mean.copy())
    torchs = torch.optim.SGD([parameter], lr=outer.lr, momentum=outer.momentum, nesterov=outer.nesterov)
    if outer.momentum:
        torchs.state[parameter]["momentum_buffer"] = torch.from_numpy(momentum.copy())
    torchs.step()
    terms = np.abs(mean) + np.abs(momentum)
    if outer.momentum:
        buffer = torchs.state[parameter]["momentum_buffer"].numpy()
        assert (np.abs(moved.astype(np.float64) - buffer) <= np.spacing(terms)).all()
    error = np.abs(after.astype(np.float64) - parameter.detach().numpy())
    assert (error <= np.spacing(np.abs(theta) + 3 * terms)).all()


def test_the_first_step_from_no_momentum_is_torchs_first_step() -> None:
    theta, _, mean = vectors(0)
    after, moved = Nesterov().step(theta, np.zeros_like(theta), mean)
    parameter = torch.nn.Parameter(torch.from_numpy(theta.copy()))
    parameter.grad = torch.from_numpy(mean.copy())
    torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True).step()
    assert np.array_equal(moved, mean)
    np.testing.assert_allclose(after, parameter.detach().numpy(), rtol=0, atol=np.spacing(np.abs(theta).max()) * 2)


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_a_step_gives_the_same_bits_whatever_chunks_and_threads(outer: SGD, monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = vectors(5, 3001)
    theta, mean, momentum = given_
    expected = outer.step(theta, mean, momentum)
    for chunk, count in ((1 << 18, 1), (3001, 1), (3000, 2), (17, 1), (17, 8), (256, 3)):
        monkeypatch.setattr(all_vectors, "CHUNK", chunk)
        monkeypatch.setattr(threads, "default_threads", lambda n=count: n)
        for found, wanted in zip(outer.step(theta, mean, momentum), expected, strict=True):
            assert np.array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_a_step_modifies_nothing_it_is_given() -> None:
    given_ = vectors(1)
    before = [x.copy() for x in given_]
    theta, mean, momentum = given_
    Nesterov().step(theta, mean, momentum)
    assert all(np.array_equal(a, b) for a, b in zip(given_, before, strict=True))


def test_plain_sgd_of_one_is_averaging_and_its_momentum_the_mean() -> None:
    after, moved = SGD(1.0).step(f32(1.0, 2.0), f32(5.0, 5.0), f32(0.25, -0.5))
    assert after.tolist() == [0.75, 2.5]
    assert moved.tolist() == [0.25, -0.5]


def test_a_step_of_no_entries_is_none() -> None:
    after, moved = Nesterov().step(f32(), f32(), f32())
    assert after.size == moved.size == 0


@pytest.mark.parametrize(
    "arguments", [(0.0,), (-1.0,), (float("nan"),), (1.0, 1.0), (1.0, -0.1), (1.0, float("nan")), (1.0, 0.0, True)]
)
def test_an_outer_optimizer_without_sense_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"(lr|momentum) must be a|lr must be above 0"):
        SGD(*arguments)


# Adding up


def test_updates_are_added_up_in_the_order_given() -> None:
    parts = [sparse(1, {0: 1.0}), sparse(1, {0: 2.0**-24}), sparse(1, {0: 2.0**-24})]
    assert aggregate(parts, 1).tolist() == [1.0]
    assert aggregate(parts[::-1], 1).tolist() == [1.0 + 2.0**-23]


@many
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
def test_sums_are_rounded_after_every_term(terms: list[float]) -> None:
    total = 0.0
    for term in terms:
        total = rounded(total + term)
    assert aggregate([sparse(3, {1: term}) for term in terms], 3).tolist() == [0.0, total, 0.0]


@given(seeds)
def test_whole_and_sparse_updates_add_up_to_the_same_bits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    dense = [(rng.standard_normal(60) * (rng.random(60) < 0.4)).astype(np.float32) for _ in range(5)]
    whole = [SparseVector(60, np.arange(60), d) for d in dense]
    some = [SparseVector(60, np.flatnonzero(d), d[np.flatnonzero(d)]) for d in dense]
    assert np.array_equal(aggregate(whole, 60).view(np.uint32), aggregate(some, 60).view(np.uint32))


def test_adding_up_does_not_modify_the_updates() -> None:
    parts = [SparseVector(3, np.arange(3), f32(1, 2, 3)), sparse(3, {1: 5.0})]
    aggregate(parts, 3)
    assert parts[0].values.tolist() == [1, 2, 3]
    assert parts[1].values.tolist() == [5]


def test_nobody_adds_up_to_zero() -> None:
    assert aggregate([], 4).tolist() == [0.0] * 4


def test_the_mean_is_over_all_who_took_part_and_not_over_those_who_sent() -> None:
    total = aggregate([sparse(2, {0: 3.0}), sparse(2, {0: 3.0, 1: 3.0}), sparse(2, {})], 2)
    assert mean_of(total, 3).tolist() == [2.0, 1.0]


def test_the_mean_is_a_division_and_not_a_product() -> None:
    x = np.arange(1, 200, dtype=np.float32)
    assert np.array_equal(mean_of(x, 3), f32(*(rounded(float(v) / 3) for v in x)))
    assert mean_of(x, 3).dtype == np.float32


# A trainer's own part


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@given(seed=seeds)
def test_an_update_with_a_momentum_of_its_own_rounds_every_operation_by_itself(outer: SGD, seed: int) -> None:
    (theta, e, m), x = vectors(seed, 50), vectors(seed + 1, 50)[0]
    s, moved = OwnMomentum(outer).advance(theta, e, m, x)
    assert moved is not None
    lr, mu = rounded(outer.lr), rounded(outer.momentum)
    for i in range(theta.size):
        delta = rounded(rounded(float(theta[i]) - float(e[i])) - float(x[i]))
        after = rounded(rounded(mu * float(m[i])) + delta)
        by = rounded(delta + rounded(mu * after)) if outer.nesterov else after
        assert moved[i] == after
        assert s[i] == rounded(float(e[i]) + rounded(lr * by))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_reading_an_update_changes_nothing_and_a_commit_changes_all_of_it_once(
    rule: OuterRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    (theta, e, m), x = vectors(3, 1000), vectors(4, 1000)[0]
    momentum = m if rule.own_momentum else None
    s, moved = rule.advance(theta, e, momentum, x)
    taken = SparseVector(1000, np.arange(0, 1000, 3), s[::3])
    for chunk, count in ((1000, 1), (7, 2), (999, 3)):
        monkeypatch.setattr(all_vectors, "CHUNK", chunk)
        monkeypatch.setattr(threads, "default_threads", lambda n=count: n)
        own = [e.copy(), None if momentum is None else momentum.copy()]
        assert own[0] is not None
        update = TrainerUpdate(rule, theta, own[0], own[1], x.__getitem__)
        for _ in range(2):  # a retry finds the same
            assert np.array_equal(np.concatenate([update.read(here) for here in all_vectors.chunks_of(1000)]), s)
        assert np.array_equal(own[0], e)
        update.commit(taken)
        assert not own[0][::3].any()
        assert np.array_equal(own[0][1::3], s[1::3])
        assert moved is None or np.array_equal(own[1], moved)  # type: ignore[arg-type]


def test_a_trainer_begins_at_theta_or_where_nothing_is_missing_that_it_has_not_sent() -> None:
    theta, e, _ = vectors(1)
    assert SharedMomentum(SGD(1.0)).start(theta, e) is theta
    z = OwnMomentum(SGD(1.0)).start(theta, e)
    assert np.array_equal(z, theta - e)


@given(seeds, st.integers(1, 7))
def test_a_plain_average_moves_weights_and_leaves_the_signs_of_its_step(seed: int, trainers: int) -> None:
    theta, _, total = vectors(seed, 60)
    total[::4] = 0
    mean = mean_of(total, trainers)
    step = OwnMomentum(Nesterov()).step(theta, np.zeros(60, np.int8), total.copy(), trainers)
    assert np.array_equal(step.theta, theta - mean)
    assert step.trend.dtype == np.int8
    assert np.array_equal(step.trend, np.sign(mean))
    assert step.finite
    assert step.moved == np.count_nonzero(mean)
    assert step.largest_mean == np.abs(mean).max()


@pytest.mark.parametrize("outer", [SGD(0.5), SGD(0.7, 0.9), Nesterov(0.7, 0.9)], ids=str)
def test_what_an_update_moves_in_the_end_is_its_reach_and_the_momentum_says_what_is_to_come(outer: SGD) -> None:
    """The law of the ledger in `fleet`, in float64."""
    rng = np.random.default_rng(0)
    theta, x = np.zeros(2, np.float32), np.zeros(2, np.float32)
    m, moved, told = np.zeros(2, np.float32), np.zeros(2), np.zeros(2)
    c = outer.lr * outer.momentum ** (2 if outer.nesterov else 1) / (1 - outer.momentum)
    for _ in range(50):
        x = rng.standard_normal(2).astype(np.float32)
        u, m = reference.advance(theta, theta, m, x, outer)
        moved, told = moved - x, told + u
        np.testing.assert_allclose(outer.reach * moved, told + c * m, atol=1e-4)


# What all trainers hold alike


def shared(size: int = 20, round_: int = 4, signs: bool = False) -> SharedState:
    theta, momentum, _ = vectors(9, size)
    trend = np.sign(momentum).astype(np.int8) if signs else momentum
    return SharedState(
        "layout", theta, trend, round_, {"ada": Contribution(4, "a" * 64), "bea": Contribution(2, "b" * 64)}
    )


both_kinds = pytest.mark.parametrize("signs", [False, True], ids=["F32", "I8"])


@pytest.mark.parametrize("rule", [SharedMomentum(Nesterov(0.5, 0.5)), OwnMomentum(Nesterov(0.5, 0.5))], ids=str)
def test_a_round_moves_weights_trend_number_and_who_took_part(rule: OuterRule) -> None:
    before = shared(3, signs=rule.own_momentum)
    decided = Outcome({"ada": "1" * 64, "cia": "2" * 64}, f32(2.0, 0.0, -4.0))
    counted = before.resolve(decided, rule)
    after = counted.after
    assert (counted.members, counted.moved) == (decided.members, 2)
    if rule.own_momentum:
        assert after.theta.tolist() == (before.theta - f32(1.0, 0.0, -2.0)).tolist()
        assert after.trend.tolist() == [1, 0, -1]
    else:
        wanted = Nesterov(0.5, 0.5).step(before.theta, before.trend, f32(1.0, 0.0, -2.0))
        assert np.array_equal(after.theta, wanted[0])
        assert np.array_equal(after.trend, wanted[1])
    assert after.round == 5
    assert after.parts == {
        "ada": Contribution(5, "1" * 64),
        "bea": Contribution(2, "b" * 64),
        "cia": Contribution(5, "2" * 64),
    }
    assert before.round == 4
    assert before.parts["ada"] == Contribution(4, "a" * 64)
    assert before.digest == shared(3, signs=rule.own_momentum).digest


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("total", [np.inf, -np.inf, np.nan, 3e38, -1e30, 2.0**40 * (1 + 2.0**-23)])
def test_a_round_whose_mean_diverges_is_empty_and_only_its_number_changes(rule: OuterRule, total: float) -> None:
    before = shared(3, signs=rule.own_momentum)
    counted = before.resolve(Outcome({"ada": "1" * 64}, f32(2.0, total, 0.0)), rule)
    after = counted.after
    assert not counted.members
    assert not counted.moved
    assert (after.round, after.parts) == (5, before.parts)
    assert np.array_equal(after.theta, before.theta)
    assert np.array_equal(after.trend, before.trend)
    assert after.digest == replace(before, round=5).digest


@pytest.mark.parametrize("outer", OUTERS, ids=str)
@pytest.mark.parametrize("kind", [SharedMomentum, OwnMomentum])
def test_the_largest_updates_of_the_largest_round_are_taken(kind: Callable[[SGD], OuterRule], outer: SGD) -> None:
    rule = kind(outer)
    before = SharedState("layout", f32(0.5, -0.5), rule.first_trend(2))
    largest = float(LARGEST_UPDATE)
    most = aggregate([sparse(2, {0: largest, 1: -largest})] * MAX_TRAINERS, 2)
    decided = Outcome({f"{i:04d}": "1" * 64 for i in range(MAX_TRAINERS)}, most)
    counted = before.resolve(decided, rule)
    assert counted.members is decided.members
    for _ in range(100):  # and what momentum adds is finite
        counted = counted.after.resolve(Outcome({"ada": "1" * 64}, f32(largest, -largest)), rule)
        assert list(counted.members) == ["ada"]


@pytest.mark.parametrize("outer", [SGD(0.7, 0.9), Nesterov(0.7, 0.9), Nesterov(0.7, 0.99)], ids=str)
def test_a_momentum_that_leads_beyond_fp32_is_reset_by_an_empty_round_and_the_next_round_counts(outer: SGD) -> None:
    before = SharedState("layout", f32(3.28e38, 1.0), f32(-3e38, 2.0), 4)
    counted = before.resolve(Outcome({"ada": "1" * 64}, f32(0.25, 0.25)), SharedMomentum(outer))
    assert not counted.members
    after = counted.after
    assert np.array_equal(after.theta, before.theta)
    assert (after.trend.tolist(), after.round) == ([0.0, 0.0], 5)
    counted = after.resolve(Outcome({"ada": "1" * 64}, f32(0.25, 0.25)), SharedMomentum(outer))
    assert list(counted.members) == ["ada"]
    assert counted.after.theta[1] != before.theta[1]


def test_no_average_within_the_limit_leads_finite_weights_beyond_fp32() -> None:
    before = SharedState("layout", f32(3.4028235e38, 1.0), np.array([1, -1], np.int8), 4)
    largest = float(LARGEST_UPDATE)
    counted = before.resolve(Outcome({"ada": "1" * 64}, f32(-largest, 1.0)), OwnMomentum(Nesterov()))
    assert list(counted.members) == ["ada"]  # far below half a place of the largest number
    assert counted.after.theta[0] == before.theta[0]
    assert counted.after.trend.tolist() == [-1, 1]


@both_kinds
def test_equal_states_have_equal_digests_if_other_trainers_took_part(signs: bool) -> None:
    one = shared(signs=signs)
    assert one.digest == shared(signs=signs).digest == replace(one, parts={}).digest
    assert len(one.digest) == 64


def test_the_digest_changes_with_every_bit_of_weights_and_momentum() -> None:
    state, seen = shared(6), set()
    for name in ("theta", "trend"):
        for place in range(6):
            for bit in range(32):
                values = getattr(state, name).copy()
                values.view(np.uint32)[place] ^= np.uint32(1 << bit)
                seen.add(replace(state, **{name: values}).digest)
    assert state.digest not in seen
    assert len(seen) == 2 * 6 * 32


def test_the_digest_changes_with_every_sign_of_the_trend_and_with_its_type() -> None:
    state = shared(6, signs=True)
    seen = {state.digest, replace(state, trend=state.trend.astype(np.float32)).digest}
    for place in range(6):
        for by in (1, 2):
            trend = state.trend.copy()
            trend[place] = (trend[place] + 1 + by) % 3 - 1
            seen.add(replace(state, trend=trend).digest)
    assert len(seen) == 2 + 2 * 6


def test_the_digest_changes_with_the_round_and_the_layout() -> None:
    state = shared()
    assert len({state.digest, replace(state, round=5).digest, replace(state, layout="other").digest}) == 3


def test_the_digest_tells_weights_from_momentum() -> None:
    state = shared()
    assert replace(state, theta=state.trend, trend=state.theta).digest != state.digest


def test_the_digest_tells_zero_from_minus_zero() -> None:
    state = SharedState("layout", f32(0.0), f32(0.0))
    assert state.digest != replace(state, theta=f32(-0.0)).digest


@both_kinds
@given(seed=seeds, size=st.integers(0, 40), round_=st.integers(0, 2**40))
def test_a_shared_state_comes_back(signs: bool, seed: int, size: int, round_: int) -> None:
    rng = np.random.default_rng(seed)
    theta, momentum = (rng.integers(0, 1 << 32, size, np.uint32).view(np.float32) for _ in range(2))
    theta, momentum = (np.where(np.isfinite(x), x, np.float32(1)) for x in (theta, momentum))
    trend = rng.integers(-1, 1, size, np.int8, endpoint=True) if signs else momentum
    state = SharedState("layout", theta, trend, round_, {"ada": Contribution(round_, "a" * 64)})
    found = SharedState.from_bytes(state.to_bytes(), SharedState("layout", np.zeros_like(theta), np.zeros_like(trend)))
    assert np.array_equal(found.theta.view(np.uint32), theta.view(np.uint32))
    assert found.trend.dtype == trend.dtype
    assert found.trend.tobytes() == trend.tobytes()
    assert (found.layout, found.round, found.parts, found.digest) == ("layout", round_, state.parts, state.digest)


def test_a_state_knows_the_trainers_of_the_latest_rounds_and_can_be_read_however_many_came() -> None:
    """More names than a state keeps: the oldest go, and of these it is known when they may have taken part last."""
    state = replace(shared(), round=0, parts={})
    for number in (1, 2, 3):
        names = [f"{number}{n:063d}" for n in range(MAX_TRAINERS // 2)]
        total = np.zeros_like(state.theta)
        state = state.resolve(Outcome(dict.fromkeys(names, "f" * 64), total), SharedMomentum(SGD(1.0))).after
    assert len(state.parts) == MAX_TRAINERS
    assert {part.round for part in state.parts.values()} == {2, 3}
    assert state.last_round_of(names[0]) == 3
    assert state.last_round_of("1" + "0" * 63) == 2  # it was in round 1, but that is not known any more
    assert shared().last_round_of("nobody") == 0
    assert SharedState.from_bytes(state.to_bytes(), state).parts == state.parts


@both_kinds
def test_a_shared_state_that_was_read_can_be_written(signs: bool) -> None:
    found = SharedState.from_bytes(memoryview(shared(signs=signs).to_bytes()), shared(signs=signs))
    assert found.theta.flags.writeable
    assert found.trend.flags.writeable
    assert found.to_bytes() == shared(signs=signs).to_bytes()


@both_kinds
def test_a_shared_state_with_the_other_kind_of_trend_is_refused(signs: bool) -> None:
    with pytest.raises(FormatError, match="expected a trend of type"):
        SharedState.from_bytes(shared(signs=signs).to_bytes(), shared(signs=not signs))


@pytest.mark.parametrize("sign", [2, -2, 127, -128])
def test_signs_other_than_minus_one_zero_and_one_are_refused(sign: int) -> None:
    state = shared(signs=True)
    trend = state.trend.copy()
    trend[7] = sign
    with pytest.raises(FormatError, match="signs other than -1, 0 and 1"):
        SharedState.from_bytes(replace(state, trend=trend).to_bytes(), state)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["theta", "trend"])
def test_weights_and_momenta_that_are_not_finite_are_refused(name: str, value: float) -> None:
    state = shared()
    values = getattr(state, name).copy()
    values[7] = value
    with pytest.raises(FormatError, match="not finite"):
        SharedState.from_bytes(replace(state, **{name: values}).to_bytes(), state)


def test_a_shared_state_of_an_earlier_version_is_refused_with_what_to_do() -> None:
    with pytest.raises(FormatError, match=r"2-draft'.*the same version of pulsesync"):
        SharedState.from_bytes(spoil(lambda h: h.update(format="pulse-loco-state/2-draft")), shared())


@both_kinds
def test_every_flipped_bit_behind_the_head_of_a_shared_state_is_found(signs: bool) -> None:
    data = shared(3, signs=signs).to_bytes()
    for at in range(data.index(b"\n") + 1, len(data)):
        for bit in range(8):
            spoilt = bytearray(data)
            spoilt[at] ^= 1 << bit
            with pytest.raises(ChecksumError, match="damaged"):
                SharedState.from_bytes(bytes(spoilt), shared(3, signs=signs))


def test_a_shared_state_of_another_length_is_refused() -> None:
    data = shared().to_bytes()
    for spoilt in (data[:-1], data[:-4], data + b"\0", data + bytes(8)):
        with pytest.raises(ChecksumError, match="damaged"):
            SharedState.from_bytes(spoilt, shared())


def test_a_shared_state_cut_inside_its_head_is_refused() -> None:
    data = shared().to_bytes()
    for end in (0, 1, 20, data.index(b"\n")):
        with pytest.raises(FormatError, match="shared state"):
            SharedState.from_bytes(data[:end], shared())


def spoil(change: Callable[[dict[str, Any]], object], state: SharedState | None = None) -> bytes:
    """A shared state with another head; hashes and digests are as they were."""
    line, _, body = (state or shared()).to_bytes().partition(b"\n")
    head = json.loads(line)
    del head["sha256"]
    change(head)
    return json.dumps({"sha256": seal(head, body), **head}, sort_keys=True).encode() + b"\n" + body


def seal(head: dict[str, Any], body: bytes) -> str:
    told = {key: value for key, value in head.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode() + b"\n" + body).hexdigest()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda h: h.update(format="pulse-loco-state/2"), FormatError),
        (lambda h: h.pop("parts"), FormatError),
        (lambda h: h.update(more=1), FormatError),
        (lambda h: h.update(layout="other"), FormatError),
        (lambda h: h.update(layout=["layout"]), FormatError),
        (lambda h: h.update(size=21), FormatError),
        (lambda h: h.update(size="20"), FormatError),
        (lambda h: h.pop("trend"), FormatError),
        (lambda h: h.update(trend="I8"), FormatError),
        (lambda h: h.update(trend=["F32"]), FormatError),
        (lambda h: h.update(sha256="0" * 64), ChecksumError),
        (lambda h: h.update(sha256=None), ChecksumError),
        (lambda h: h.update(digest="0" * 64), ChecksumError),
        (lambda h: h.update(digest=0), ChecksumError),
        (lambda h: h.update(round=5), ChecksumError),
        (lambda h: h.update(round=-1), FormatError),
        (lambda h: h.update(round=4.0), FormatError),
        (lambda h: h.update(round=True), FormatError),
        (lambda h: h.update(round="4"), FormatError),
        (lambda h: h.update(parts=[]), FormatError),
        (lambda h: h.update(parts={"ada": 4}), FormatError),
        (lambda h: h.update(parts={"ada": [4]}), FormatError),
        (lambda h: h.update(parts={"ada": ["a" * 64, 4]}), FormatError),
        (lambda h: h.update(parts={"ada": [True, "a" * 64]}), FormatError),
        (lambda h: h.update(parts={"ada": "4a"}), FormatError),
    ],
)
def test_a_shared_state_that_says_something_else_is_refused(
    change: Callable[[dict[str, Any]], object], error: type[Exception]
) -> None:
    assert SharedState.from_bytes(spoil(lambda h: None), shared()).round == 4
    with pytest.raises(error) as caught:
        SharedState.from_bytes(spoil(change), shared())
    assert type(caught.value) is error


def test_a_flipped_bit_anywhere_in_a_shared_state_is_refused() -> None:
    data = shared().to_bytes()
    for at in range(len(data)):
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << at % 8
        with pytest.raises(FormatError):
            SharedState.from_bytes(bytes(spoilt), shared())


def test_a_shared_state_that_is_no_json_or_says_a_key_twice_is_refused() -> None:
    line, _, body = shared().to_bytes().partition(b"\n")
    for spoilt in (b"[]", b"nonsense", b"\xff", line[:-1] + b', "round": 4}', b"[" * 100_000, line + line):
        with pytest.raises(FormatError):
            SharedState.from_bytes(spoilt + b"\n" + body, shared())


def test_other_weights_with_a_hash_that_fits_are_found_by_the_digest() -> None:
    line, _, body = shared().to_bytes().partition(b"\n")
    body = body[4:8] + body[:4] + body[8:]
    head = json.loads(line) | {"sha256": seal(json.loads(line), body)}
    with pytest.raises(ChecksumError, match="digest"):
        SharedState.from_bytes(json.dumps(head).encode() + b"\n" + body, shared())


def test_a_part_is_read_from_a_list_or_a_pair() -> None:
    assert read_part([3, "id"]) == read_part((3, "id")) == Contribution(3, "id")
