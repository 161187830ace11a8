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
from pulsesync.loco import outer as outers
from pulsesync.loco.gate import SparseVector
from pulsesync.loco.outer import SGD, Nesterov, aggregate, mean_of
from pulsesync.loco.shared import LARGEST_UPDATE, MAX_TRAINERS, Contribution, Outcome, SharedState, read_part
from tests.helpers import many, seeds

OUTERS = [SGD(1.0), SGD(0.7), SGD(0.7, 0.9), Nesterov(0.7, 0.9), Nesterov(0.4, 0.95)]


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
        monkeypatch.setattr(outers, "CHUNK", chunk)
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
    "arguments",
    [(0.0,), (-1.0,), (float("nan"),), (1.0, 1.0), (1.0, -0.1), (1.0, float("nan")), (1.0, 0.0, True)],
)
def test_an_outer_optimizer_without_sense_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="outer learning rate"):
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


# What all trainers hold alike


def shared(size: int = 20, round_: int = 4) -> SharedState:
    theta, momentum, _ = vectors(9, size)
    return SharedState(
        "layout", theta, momentum, round_, {"ada": Contribution(4, "a" * 64), "bea": Contribution(2, "b" * 64)}
    )


def test_a_round_moves_weights_momentum_number_and_who_took_part() -> None:
    before = shared(3)
    decided = Outcome({"ada": "1" * 64, "cia": "2" * 64}, f32(2.0, 0.0, -4.0))
    counted, after = before.resolve(decided, Nesterov(0.5, 0.5))
    assert counted is decided
    wanted = Nesterov(0.5, 0.5).step(before.theta, before.momentum, f32(1.0, 0.0, -2.0))
    assert np.array_equal(after.theta, wanted[0])
    assert np.array_equal(after.momentum, wanted[1])
    assert after.round == 5
    assert after.parts == {
        "ada": Contribution(5, "1" * 64),
        "bea": Contribution(2, "b" * 64),
        "cia": Contribution(5, "2" * 64),
    }
    assert before.round == 4
    assert before.parts["ada"] == Contribution(4, "a" * 64)


@pytest.mark.parametrize("total", [np.inf, -np.inf, np.nan, 3e38, -1e30, 2.0**40 * (1 + 2.0**-23)])
def test_a_round_whose_mean_diverges_is_empty_and_only_its_number_changes(total: float) -> None:
    before = shared(3)
    counted, after = before.resolve(Outcome({"ada": "1" * 64}, f32(2.0, total, 0.0)), Nesterov(0.7, 0.9))
    assert not counted.members
    assert not counted.total.any()
    assert (after.round, after.parts) == (5, before.parts)
    assert np.array_equal(after.theta, before.theta)
    assert np.array_equal(after.momentum, before.momentum)
    assert after.digest == replace(before, round=5).digest


@pytest.mark.parametrize("outer", OUTERS, ids=str)
def test_the_largest_updates_of_the_largest_round_are_taken(outer: SGD) -> None:
    before = SharedState("layout", f32(0.5, -0.5), f32(0.0, 0.0))
    largest = float(LARGEST_UPDATE)
    most = aggregate([sparse(2, {0: largest, 1: -largest})] * MAX_TRAINERS, 2)
    decided = Outcome({f"{i:04d}": "1" * 64 for i in range(MAX_TRAINERS)}, most)
    counted, after = before.resolve(decided, outer)
    assert counted is decided
    one = Outcome({"ada": "1" * 64}, f32(largest, -largest))
    for _ in range(100):  # and what momentum adds is finite
        counted, after = after.resolve(one, outer)
        assert counted is one


@pytest.mark.parametrize("outer", [SGD(0.7, 0.9), Nesterov(0.7, 0.9), Nesterov(0.7, 0.99)], ids=str)
def test_a_momentum_that_leads_beyond_fp32_is_reset_by_an_empty_round_and_the_next_round_counts(outer: SGD) -> None:
    before = SharedState("layout", f32(3.28e38, 1.0), f32(-3e38, 2.0), 4)
    decided = Outcome({"ada": "1" * 64}, f32(0.25, 0.25))
    counted, after = before.resolve(decided, outer)
    assert not counted.members
    assert np.array_equal(after.theta, before.theta)
    assert (after.momentum.tolist(), after.round) == ([0.0, 0.0], 5)
    counted, after = after.resolve(decided, outer)
    assert counted is decided
    assert after.theta[1] != before.theta[1]


def test_equal_states_have_equal_digests_whoever_took_part() -> None:
    one = shared()
    assert one.digest == shared().digest == replace(one, parts={}).digest
    assert len(one.digest) == 64


def test_the_digest_changes_with_every_bit_of_weights_and_momentum() -> None:
    state, seen = shared(6), set()
    for name in ("theta", "momentum"):
        for place in range(6):
            for bit in range(32):
                values = getattr(state, name).copy()
                values.view(np.uint32)[place] ^= np.uint32(1 << bit)
                seen.add(replace(state, **{name: values}).digest)
    assert state.digest not in seen
    assert len(seen) == 2 * 6 * 32


def test_the_digest_changes_with_the_round_and_the_layout() -> None:
    state = shared()
    assert len({state.digest, replace(state, round=5).digest, replace(state, layout="other").digest}) == 3


def test_the_digest_tells_weights_from_momentum() -> None:
    state = shared()
    assert replace(state, theta=state.momentum, momentum=state.theta).digest != state.digest


def test_the_digest_tells_zero_from_minus_zero() -> None:
    state = SharedState("layout", f32(0.0), f32(0.0))
    assert state.digest != replace(state, theta=f32(-0.0)).digest


@given(seeds, st.integers(0, 40), st.integers(0, 2**40))
def test_a_shared_state_comes_back(seed: int, size: int, round_: int) -> None:
    rng = np.random.default_rng(seed)
    theta, momentum = (rng.integers(0, 1 << 32, size, np.uint32).view(np.float32) for _ in range(2))
    theta, momentum = (np.where(np.isfinite(x), x, np.float32(1)) for x in (theta, momentum))
    state = SharedState("layout", theta, momentum, round_, {"ada": Contribution(round_, "a" * 64)})
    found = SharedState.from_bytes(state.to_bytes(), SharedState("layout", np.zeros_like(theta), np.zeros_like(theta)))
    assert np.array_equal(found.theta.view(np.uint32), theta.view(np.uint32))
    assert np.array_equal(found.momentum.view(np.uint32), momentum.view(np.uint32))
    assert (found.layout, found.round, found.parts, found.digest) == ("layout", round_, state.parts, state.digest)


def test_a_shared_state_that_was_read_can_be_written() -> None:
    found = SharedState.from_bytes(memoryview(shared().to_bytes()), shared())
    assert found.theta.flags.writeable
    assert found.momentum.flags.writeable
    assert found.to_bytes() == shared().to_bytes()


def test_every_flipped_bit_behind_the_head_of_a_shared_state_is_found() -> None:
    data = shared(3).to_bytes()
    for at in range(data.index(b"\n") + 1, len(data)):
        for bit in range(8):
            spoilt = bytearray(data)
            spoilt[at] ^= 1 << bit
            with pytest.raises(ChecksumError, match="damaged"):
                SharedState.from_bytes(bytes(spoilt), shared(3))


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
