"""Trainers that meet in a store: who is waited for, who is late, what is refused, and what no fault can do."""

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pulsesync.errors import (
    ConflictError,
    FormatError,
    PulseError,
    RoundError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.loco import StoreExchange
from pulsesync.loco.outer_step import LARGEST_UPDATE
from pulsesync.store import LocalStore, MemoryStore
from pulsesync.testing import FaultyStore
from tests.foreign_writes import WRITES
from tests.loco.fleet import Trainer, Turns, meet, same, settle, together, update_of
from tests.processes import Fleet, alive, fleet, told
from tests.s3 import Server, s3_server
from tests.tiers import slow

__all__ = ["fleet", "s3_server"]


@dataclass
class Told:
    """The update of a trainer when it prepared to send, and its momentum at that time."""

    s: np.ndarray
    momentum: np.ndarray | None


@contextlib.contextmanager
def offers(trainer: Trainer, offered: list[Told]) -> Iterator[None]:
    """Note every update that a trainer prepares to send."""
    plain = trainer.exchange.prepare

    def prepare(*args: Any) -> Any:
        s, *momentum = update_of(trainer.loco.state_dict(), 0, trainer.ledger.outer)
        offered.append(Told(s, momentum[0] if momentum else None))
        return plain(*args)

    with mock.patch.object(trainer.exchange, "prepare", prepare):
        yield


@dataclass
class Own:
    """What only one trainer has: its residual and momentum, the start of its round, and its weights."""

    e: np.ndarray
    m: np.ndarray | None
    z: np.ndarray
    x: np.ndarray

    @classmethod
    def of(cls, t: Trainer) -> "Own":
        own = t.loco.state_dict()["private"]["momenta"]
        return cls(t.residual, own[0].numpy() if own else None, t.start, t.weights)

    def follow(self, theta: np.ndarray, cleared: np.ndarray | None = None) -> "Own":
        """As a round leaves it that the trainer only hears of: e and m stand still, and what it has moved is kept."""
        zero, keep = np.float32(0), np.zeros(theta.size, np.bool_) if cleared is None else cleared
        e, moved = np.where(keep, zero, self.e), np.where(keep, zero, self.z - self.x)
        z = theta if self.m is None else theta - e
        return Own(e, None if self.m is None else np.where(keep, zero, self.m), z, z - moved)

    def check(self, t: Trainer) -> None:
        found = Own.of(t)
        assert same(found.e, self.e)
        assert (found.m is None) == (self.m is None)
        assert self.m is None or same(found.m, self.m)
        assert same(found.z, self.z)
        assert same(found.x, self.x)


class Table:
    """Trainers a, b, c … around one store, in one thread: while one waits, the next does what it has to."""

    def __init__(
        self, names: str = "abc", joined: str | None = None, training: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.store, self.turns = MemoryStore(), Turns()
        self.names, self.options, self.training = names, options, training or {}
        self.all: dict[str, Trainer] = {}
        for name in names if joined is None else joined:
            self.seat(name)

    def seat(self, name: str, store: Any = None, **options: Any) -> Trainer:
        exchange = meet(store or self.store, name, len(self.names), **self.turns.options(**self.options))
        self.all[name] = Trainer(exchange, ord(name), **{**self.training, **options})
        return self.all[name].__enter__()

    def __getitem__(self, name: str) -> Trainer:
        return self.all[name]

    def round(self, names: str) -> None:
        """One round of these: each sends while those before it wait."""
        if names[1:]:
            self.turns.meanwhile.append(lambda: self.round(names[1:]))
        self.all[names[0]].step(2)

    def names_of(self, prefix: str = "rounds/") -> list[str]:
        return [entry.key for entry in self.store.list(prefix)]

    def decided(self, round_: int) -> list[str]:
        return list(json.loads(self.store.get(f"rounds/0000/{round_:010d}/decided"))["members"])


class Through:
    """A trainer's own way to the store, on which some calls are the test's."""

    def __init__(self, store: MemoryStore, **calls: Any) -> None:
        self.store, self.calls = store, calls

    def __getattr__(self, name: str) -> Any:
        return self.calls.get(name) or getattr(self.store, name)


# Who is waited for


def test_a_round_is_decided_as_soon_as_everybody_has_sent_and_no_clock_moves() -> None:
    table = Table()
    for number in (1, 2, 3):
        table.round("cab" if number % 2 else "bca")
        assert table.decided(number) == ["a", "b", "c"]
    assert table.turns.now < 1.0
    settle(table.all.values())


def test_who_said_it_would_come_is_waited_for_until_the_deadline_and_then_no_more() -> None:
    table = Table()
    table.round("ab")
    assert table.decided(1) == ["a", "b"]
    assert 10.0 <= table.turns.now < 11.0
    table.round("ab")  # c was not in the last round, and has not said that it works on this one
    assert table.decided(2) == ["a", "b"]
    assert table.turns.now < 11.0
    settle([table["a"], table["b"]])


def test_the_first_round_waits_for_as_many_as_there_should_be() -> None:
    table = Table(joined="ab")
    table.round("ab")
    assert 10.0 <= table.turns.now < 11.0


def test_without_a_quorum_there_is_no_round_and_nothing_changes_until_there_is_one() -> None:
    table = Table(quorum=2)
    before = table["a"].everything()
    for tried in range(2):
        with pytest.raises(RoundError, match="without a quorum of 2"):
            table["a"].step(2 - tried)
        assert table["a"].everything() == before
    assert 200.0 <= table.turns.now < 203.0
    table.turns.meanwhile.append(lambda: table.round("bc"))
    table["a"].step()
    assert table["a"].loco.rounds == [1]
    settle(table.all.values())


@pytest.mark.parametrize(("names", "parted"), [("ab", "b"), ("abcd", "cd")])
def test_replicas_that_diverge_and_leave_no_quorum_are_found_at_the_next_deadline(names: str, parted: str) -> None:
    table = Table(names)
    table.round(names)
    for name in parted:
        state = table[name].loco.state_dict()
        state["shared"][0]["theta"] *= 2
        table[name].loco.load_state_dict(state)
    before = table["a"].everything()
    errors: list[VerificationError] = []

    def step(name: str) -> None:
        with pytest.raises(VerificationError, match="replicas have diverged") as caught:
            table[name].step(2)
        errors.append(caught.value)

    for name in names[1:]:
        table.turns.meanwhile.append(partial(step, name))
    step("a")
    assert table.turns.now < 90.0  # each after a deadline of 10 s, not after its patience of 100 s
    assert len(errors) == len(names)
    assert f"{', '.join(parted)} are at another shared state" in str(errors[-1])
    assert table["a"].everything() == before


def test_one_who_left_is_not_waited_for_and_may_come_back() -> None:
    table = Table()
    table.round("abc")
    table["c"].loco.__exit__()
    table.round("ab")
    table.round("ab")
    assert table.turns.now < 1.0
    table["c"].loco.__enter__()
    assert table["c"].loco.rounds == [3]
    table.round("abc")
    assert table.turns.now < 1.0
    assert table.decided(4) == ["a", "b", "c"]
    settle(table.all.values())


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"quorum": 4}, {"state_every": 0}])
def test_numbers_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a"):
        meet(MemoryStore(), "a", 3, **wrong)


@pytest.mark.parametrize("name", ["", "a/b", "a.b", "ü", "x" * 65, "a b", "..", "a\n"])
def test_names_that_could_be_mistaken_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="name must be"):
        StoreExchange(MemoryStore(), name, trainers=1)


# Who is late


PUBLISHED = {"kind": "PublishedPulseLoCo"}
KINDS_OF_ROUND: list[Any] = [{"compact": 2}, slow({}), slow(PUBLISHED), {"kind": "DiLoCo"}]


@pytest.mark.parametrize("late", [slow(1), 2, slow(5)])
@pytest.mark.parametrize("options", KINDS_OF_ROUND)
def test_one_that_is_late_keeps_all_it_has_to_tell_and_follows_the_others(late: int, options: dict[str, Any]) -> None:
    """e becomes s, m becomes m', and its weights z' = theta' − e'; rounds after that it only hears of."""
    table = Table(training=options)
    table.round("abc")
    c = table["c"]
    for _ in range(late):
        table.round("ab")
    c.step()
    offered: list[Told] = []
    with offers(c, offered):
        c.step()
    assert c.loco.rounds == [late + 1]
    assert not c.reports[-1].took_part
    assert c.reports[-1].sent_bytes < 100  # that it is there
    assert (c.reports[-1].round, c.reports[-1].digest) == (late + 1, c.loco.digests[0])  # what a callback can see
    assert same(c.theta, table["a"].theta)
    z = c.theta if offered[0].momentum is None else c.theta - offered[0].s
    Own(offered[0].s, offered[0].momentum, z, z).check(c)
    settle(table.all.values())
    table.round("abc")
    assert table.decided(late + 2) == ["a", "b", "c"]
    settle(table.all.values())


@pytest.mark.parametrize("error", [StoreError("away", retryable=True), RoundError("cannot be read")], ids=repr)
def test_a_late_round_is_reported_if_the_rounds_after_it_cannot_be_read(
    error: PulseError, caplog: pytest.LogCaptureFixture
) -> None:
    table = Table()
    table.round("abc")
    for _ in range(3):
        table.round("ab")
    c = table["c"]
    with mock.patch.object(c.exchange, "missed", side_effect=error):
        c.step(2)
    assert c.loco.rounds == [2]
    assert (c.reports[-1].round, c.reports[-1].took_part) == (2, False)
    assert "could not apply the rounds" in caplog.text
    c.step(2)
    assert c.loco.rounds == [4]
    assert same(c.theta, table["a"].theta)
    settle(table.all.values())


def test_a_late_round_is_reported_before_an_error_that_is_final() -> None:
    table = Table()
    table.round("abc")
    table.round("ab")
    c = table["c"]
    final = StoreError("not allowed", retryable=False)
    with mock.patch.object(c.exchange, "missed", side_effect=final), pytest.raises(StoreError, match="not allowed"):
        c.step(2)
    assert c.reports[-1].round == 2


@pytest.mark.parametrize("options", KINDS_OF_ROUND)
def test_one_that_was_away_until_rounds_are_gone_takes_the_state_and_keeps_what_it_has_to_tell(
    options: dict[str, Any],
) -> None:
    """Away for many rounds, store: e and m stand still, and x' = z' − (z − x)."""
    table = Table(training=options, state_every=2)
    table.round("abc")
    c = table["c"]
    c.step()
    for _ in range(7):
        table.round("ab")
    assert table.names_of("rounds/0000/0000000002/") == ["rounds/0000/0000000002/decided"]
    c.loco.__exit__()
    c.step()  # on its own
    own = Own.of(c)
    c.loco.__enter__()
    assert c.loco.rounds == [8]
    own.follow(table["a"].theta).check(c)
    settle(table.all.values())
    table.turns.meanwhile.append(lambda: table.round("ab"))
    c.step()
    assert table.decided(9) == ["a", "b", "c"]
    settle(table.all.values())


def test_one_that_finds_when_it_sends_that_its_round_is_long_gone_takes_the_state_and_keeps_everything() -> None:
    table = Table(state_every=2)
    table.round("abc")
    c = table["c"]
    c.step()
    for _ in range(7):
        table.round("ab")
    before: list[Own] = []
    plain = c.exchange.prepare

    def prepare(*args: Any) -> Any:
        before.append(Own.of(c))
        return plain(*args)

    with mock.patch.object(c.exchange, "prepare", prepare):
        c.step()
    assert c.loco.rounds == [8]
    before[0].follow(table["a"].theta).check(c)
    settle(table.all.values())
    table.turns.meanwhile.append(lambda: table.round("ab"))
    c.step()  # it is due for a round, and tries again at every step
    assert table.decided(9) == ["a", "b", "c"]
    settle(table.all.values())


def test_one_that_was_away_follows_the_decisions_one_by_one_and_keeps_what_it_has_to_tell() -> None:
    table = Table()
    table.round("abc")
    c = table["c"]
    c.step()
    own = Own.of(c)
    for _ in range(3):
        table.round("ab")
        own = own.follow(table["a"].theta)
    c.loco.rejoin()
    assert c.loco.rounds == [4]
    own.check(c)
    assert own.m is not None
    assert own.m.any()
    settle(table.all.values())


def test_one_that_is_suspended_while_it_waits_notices_that_its_round_is_gone() -> None:
    table = Table(state_every=2)
    table.round("abc")

    def meanwhile() -> None:
        for _ in range(8):
            table.round("ab")

    table.turns.meanwhile.append(meanwhile)
    table["c"].step(2)
    assert table["c"].loco.rounds == [9]
    assert table.turns.now < 12.0  # one deadline, of the others; not its own patience
    settle(table.all.values())


def test_old_rounds_and_states_are_deleted_and_what_a_joiner_needs_is_kept() -> None:
    table = Table("ab", state_every=3)
    table.store.put("rounds/0000/README", b"")
    table.store.put("rounds/0000/README/first", b"")
    for _ in range(10):
        table.round("ab")
    found = {key.split("/")[2] for key in table.names_of() if not key.endswith("/decided")}
    assert sorted(found) == [*(f"{n:010d}" for n in range(7, 12)), "README"]
    assert [key for key in table.names_of() if key.endswith("/decided")] == [
        f"rounds/0000/{n:010d}/decided" for n in range(1, 11)
    ]  # so that no round is decided twice
    assert table.names_of("states/") == ["states/0000/0000000006", "states/0000/0000000009"]


def test_one_that_stalled_before_deciding_does_not_decide_a_round_that_is_long_gone() -> None:
    table = Table(joined="ab", state_every=2, quorum=1)
    stalled: list[str] = []

    def create(key: str, data: bytes) -> None:
        if key.endswith("2/decided") and not stalled:
            stalled.append(key)
            for _ in range(8):
                table.round("ab")
        table.store.create(key, data)

    c = table.seat("c", store=Through(table.store, create=create))
    table.round("abc")
    c.step(2)  # decides alone, at its deadline
    assert stalled
    assert c.loco.rounds == [9]
    settle(table.all.values())


def test_of_two_processes_with_one_name_the_first_stops() -> None:
    table = Table("ab")
    table.round("ab")
    twin = Trainer(meet(table.store, "b", 2, **table.turns.options()), 7)
    twin.loco.__enter__()
    with pytest.raises(StateError, match="another process runs as trainer 'b'"):
        table["b"].step(2)


def test_a_stray_state_stops_a_trainer_with_a_word_rather_than_letting_it_train_alone() -> None:
    table = Table("ab")
    table.round("ab")
    table.store.put("states/0000/9999999999", b"nonsense")
    with pytest.raises(StateError, match="deleted or lost"):
        table["a"].step(2)


def test_trainers_that_go_on_in_a_new_place_bring_their_state_there() -> None:
    table = Table("ab")
    table.round("ab")
    fresh = MemoryStore()
    moved = [table["a"], table["b"]]
    for t, name in zip(moved, "ab", strict=True):
        t.loco.rejoin(meet(fresh, name, 2, **table.turns.options()))
        assert t.loco.rounds == [1]
    assert [e.key for e in fresh.list("states/")] == ["states/0000/0000000001"]


# Who comes


def test_one_that_begins_with_the_same_checkpoint_follows_every_round_from_the_first() -> None:
    table = Table("abc", joined="ab")
    for _ in range(4):
        before = table["a"].theta
        table.round("ab")
    c = table.seat("c")
    assert c.loco.rounds == [4]
    nothing, last_step = np.zeros_like(c.theta), before - table["a"].theta
    Own(nothing, last_step / np.float32(0.7), table["a"].theta, table["a"].theta).check(c)
    assert c.trend.tobytes() == table["a"].trend.tobytes()  # without it, it could read no payload
    table.round("abc")
    assert table.decided(5) == ["a", "b", "c"]
    settle(table.all.values())


def test_one_that_begins_with_other_weights_is_refused_until_there_is_a_state_to_begin_with() -> None:
    table = Table("abc", joined="ab", state_every=3)
    table.round("ab")
    with pytest.raises(StateError, match="other weights"):
        table.seat("c", seed=4)
    for _ in range(3):
        before = table["a"].theta
        table.round("ab")
    c = table.seat("c", seed=4)
    assert c.loco.rounds == [4]
    nothing, last_step = np.zeros_like(c.theta), before - table["a"].theta
    Own(nothing, last_step / np.float32(0.7), table["a"].theta, table["a"].theta).check(c)
    table.round("abc")
    settle(table.all.values())


def test_other_models_and_settings_are_refused() -> None:
    table = Table("ab", joined="a")
    for other in ({"shapes": {"x": (3,)}}, {"compact": 2}, {"kind": "DiLoCo"}, {"pieces": 2, "sync_every": 4}):
        with pytest.raises(StateError, match=r"has another (model|settings)"):
            table.seat("b", **other)


@pytest.mark.parametrize("found", ["pulse-loco-round/2-draft", None, 7])
def test_a_place_where_an_earlier_version_began_is_refused_with_what_to_do(found: object) -> None:
    table = Table("ab", joined="a")
    run = json.loads(table.store.get("run"))
    table.store.put("run", json.dumps({**run, "format": found}).encode())
    with pytest.raises(FormatError, match="same version of pulsesync"):
        table.seat("b")


def test_a_state_that_an_earlier_version_left_is_passed_over() -> None:
    table = Table("ab", state_every=2)
    for _ in range(5):
        table.round("ab")
    key = "states/0000/0000000004"
    table.store.put(key, table.store.get(key).replace(b"pulse-loco-state/1", b"pulse-loco-state/2-draft"))
    assert table.seat("c", seed=4).loco.digests == table["a"].loco.digests


@pytest.mark.parametrize("keep", [None, 0, 30])
def test_a_damaged_state_is_passed_over_for_the_one_before(keep: int | None) -> None:
    table = Table("ab", state_every=2)
    for _ in range(5):
        table.round("ab")
    key = "states/0000/0000000004"
    data = bytearray(table.store.get(key))
    data[-3] ^= 1
    table.store.put(key, bytes(data[:keep]))
    c = table.seat("c", seed=4)
    assert c.loco.rounds == [5]
    table.round("abc")
    settle(table.all.values())


# What lies there and should not


def payload_key(table: Table, trainer: str, round_: int) -> str:
    return next(
        k for k in table.names_of(f"rounds/0000/{round_:010d}/sent/") if k.rpartition("/")[2].startswith(trainer)
    )


def with_hash(data: bytes) -> dict[str, bytes]:
    return {f"c.{hashlib.sha256(data).hexdigest()}": data}


def hostile_payloads(table: Table, round_: int) -> dict[str, dict[str, bytes]]:
    """What may lie among the payloads of the round after one, in c's name, and must not count; by what is wrong."""
    good, foreign = (table.store.get(payload_key(table, name, round_)) for name in "cb")
    no_names = ("c", "c.", "c." + "0" * 63, "c." + "G" * 64, "c.d." + "0" * 64)
    renumbered = good.replace(f'"round":{round_}'.encode(), f'"round":{round_ + 1}'.encode())
    return {
        "stale": with_hash(good),
        "foreign": with_hash(foreign),
        "renumbered": with_hash(renumbered),  # the right round by its head, but on another base
        "damaged": with_hash(good[:-1] + bytes([good[-1] ^ 1])),
        "cut off": with_hash(good[:-7]),
        "empty": with_hash(b""),
        "garbage": with_hash(bytes(range(256)) * 9),
        "of another digest": {f"c.{hashlib.sha256(b'no').hexdigest()}": good},
        "of another model": with_hash(good.replace(b'"end":', b'"end":9')),
        "with a name that is none": dict.fromkeys(no_names, good),
    }


@pytest.mark.parametrize("options", [{}, slow({"kind": "DiLoCo"})])
def test_payloads_that_are_stale_damaged_or_anothers_are_refused_and_the_round_goes_on(options: dict[str, Any]) -> None:
    table = Table(training=options)
    table.round("abc")
    count = len(hostile_payloads(table, 1))
    for done in range(count):  # a round that all are in, and then one with something hostile
        round_ = 2 * done + 1
        wrong, objects = list(hostile_payloads(table, round_).items())[done]
        for name, data in objects.items():
            table.store.put(f"rounds/0000/{round_ + 1:010d}/sent/{name}", data)
        began = table.turns.now
        table.round("ab")
        assert table.decided(round_ + 1) == ["a", "b"], wrong
        assert table.turns.now - began >= 10.0, wrong  # c had said that it would come
        table["c"].step(2)
        table.round("abc")
        assert table.decided(round_ + 2) == ["a", "b", "c"], wrong
        settle(table.all.values())


def test_a_good_payload_behind_a_damaged_one_of_the_same_trainer_counts() -> None:
    table = Table("ab")
    table.round("ab")
    table.store.put(f"rounds/0000/0000000002/sent/b.{'0' * 64}", b"nothing")
    table.round("ab")
    assert table.decided(2) == ["a", "b"]
    assert table.turns.now < 1.0
    settle(table.all.values())


GOOD_ID = "0" * 64


DECIDED: list[bytes | dict[str, Any]] = [
    b"",
    b"garbage",
    b"[]",
    b"{}",
    b'{"format":1}',
    b"null",
    b"\xff\xfe",
    {"members": {}},
    {"members": []},
    {"members": {"b": GOOD_ID, "a": GOOD_ID}},
    {"members": {"../x": GOOD_ID}},
    {"members": {"a": "x"}},
    {"members": {"a": 3}},
    {"members": {"a": None}},
    {"base": "0" * 64},
    {"base": 7},
    {"format": "pulse-loco-round/9"},
    {"extra": 1},
    {"members": {"a": GOOD_ID}},
    {"members": {"a": GOOD_ID, "b": GOOD_ID}},
    {"members": {"z": GOOD_ID}},
]


def test_a_decision_that_is_none_is_refused_by_all_and_changes_nothing() -> None:
    table = Table("ab")
    table.round("ab")
    good = {**json.loads(table.store.get("rounds/0000/0000000001/decided")), "base": table["a"].loco.digests[0]}
    key = "rounds/0000/0000000002/decided"
    for name in "ab":
        table[name].step()  # the next one is due for a round, and so is every one after it
    before = {name: table[name].everything() for name in "ab"}
    for decided in DECIDED:
        table.store.put(key, json.dumps({**good, **decided}).encode() if isinstance(decided, dict) else decided)
        for name in "ab":
            with pytest.raises(PulseError):
                table[name].step()
            assert table[name].everything() == before[name], decided
    table.store.delete(key)
    table.turns.meanwhile.append(table["b"].step)
    table["a"].step()
    settle(table.all.values())


@pytest.mark.parametrize("base", ["f" * 64, None])
def test_a_decision_that_no_trainer_made_is_named_and_without_it_the_round_goes_on(base: str | None) -> None:
    table = Table("ab")
    table.round("ab")
    key = "rounds/0000/0000000002/decided"
    forged = {"format": "pulse-loco-round/1", "base": base or table["a"].loco.digests[0], "members": {"x": GOOD_ID}}
    table.store.put(key, json.dumps(forged).encode())
    words = rf"{key} says .*no trainer decided this" if base else rf"the payload of x .* is lost .*delete {key}"
    for name in "ab":
        with pytest.raises(FormatError if base else RoundError, match=words):
            table[name].step(2)
    table.store.delete(key)
    table.turns.meanwhile.append(table["b"].step)
    table["a"].step()
    settle(table.all.values())


def test_many_names_do_not_outnumber_the_trainers(caplog: pytest.LogCaptureFixture) -> None:
    table = Table("ab")
    table.round("ab")
    for name in "stuvwxyz":
        table.seat(name)
    table.round("uvwxyzstba")
    assert table.decided(2) == ["a", "b", "s", "t"]
    assert "took the updates of 4 trainers" in caplog.text
    settle(table.all.values())


def test_of_two_who_decide_at_once_one_wins_and_both_go_on_with_it() -> None:
    table = Table("abc")

    class Slow:
        """a's way to the store: b and c decide while a is about to."""

        def __init__(self, store: MemoryStore) -> None:
            self.store, self.conflicts = store, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def create(self, key: str, data: bytes) -> None:
            if key.endswith("2/decided") and not self.conflicts:
                self.conflicts += 1
                assert list(json.loads(data)["members"]) == ["a", "b"]
                table.all["c"].step(2)  # sees all three, and decides
            self.store.create(key, data)

    slow = Slow(table.store)
    table.seat("a", store=slow)
    table.round("abc")
    table.turns.meanwhile.append(lambda: table["b"].step())
    table["b"].step()
    with pytest.raises(ConflictError):
        slow.store.create("rounds/0000/0000000001/decided", b"")

    def b_sends() -> None:
        # b sends and leaves the deciding to others: it is interrupted while it waits
        table.turns.meanwhile.insert(0, interrupt)
        with pytest.raises(KeyboardInterrupt):
            table["b"].step()

    def interrupt() -> None:
        raise KeyboardInterrupt

    table.turns.meanwhile[:] = [b_sends]
    table["a"].step(2)
    assert slow.conflicts == 1
    assert table.decided(2) == ["a", "b", "c"]
    table["b"].step()
    assert table["b"].loco.rounds == [2]
    settle(table.all.values())


# What is lost


def lose(table: Table, round_: int, how: str) -> None:
    """Delete or damage one payload of a round that is decided."""
    key = payload_key(table, table.decided(round_)[0], round_)
    if how == "deleted":
        table.store.delete(key)
    else:
        table.store.put(key, table.store.get(key)[:-1] + b"?")


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_a_later_state_leads_over_a_round_whose_payload_is_lost(how: str) -> None:
    table = Table(state_every=4)
    table.round("abc")
    c = table["c"]
    c.step()
    own = Own.of(c)
    for _ in range(4):
        table.round("ab")
        if table["a"].loco.rounds == [4]:
            own = own.follow(table["a"].theta)  # the state that leads over it
    own = own.follow(table["a"].theta)
    lose(table, 2, how)
    c.loco.rejoin()
    assert c.loco.digests == table["a"].loco.digests
    assert c.loco.rounds == [5]
    own.check(c)  # nothing of it was taken
    newcomer = table.seat("d")  # with the first checkpoint: it follows round 1, and then takes the state
    assert newcomer.loco.digests == c.loco.digests
    table.round("abcd")
    assert table.decided(6) == ["a", "b", "c", "d"]


def test_a_lost_payload_without_a_later_state_is_an_error_that_says_what_helps_and_a_state_does_help() -> None:
    table = Table(state_every=4)
    table.round("abc")
    table.round("ab")
    lose(table, 2, "deleted")
    before = table["c"].everything()
    for _ in range(2):
        with pytest.raises(RoundError, match=r"payload of a in round 2 is lost.*every 4 rounds"):
            table["c"].step(2)
        assert table["c"].everything() == before
    with pytest.raises(RoundError, match="every 4 rounds"):
        table.seat("d")
    table.round("ab")
    table.round("ab")
    table["c"].step()
    assert table["c"].loco.digests == table["a"].loco.digests
    assert table.seat("d").loco.rounds == [4]
    table.round("abcd")
    assert table.decided(5) == ["a", "b", "c", "d"]


def test_a_payload_that_is_read_badly_once_is_read_again(caplog: pytest.LogCaptureFixture) -> None:
    table = Table(joined="ab", state_every=1)
    badly: list[str] = []

    def get(key: str, *range_: Any) -> bytes:
        data = table.store.get(key, *range_)
        if key in badly:
            badly.remove(key)
            return data[:-1]
        return data

    c = table.seat("c", store=Through(table.store, get=get))
    table.round("abc")
    table.round("ab")
    badly.append(payload_key(table, "a", 2))
    c.step(2)
    assert not badly
    assert "rejoins" not in caplog.text
    assert c.loco.rounds == [2]
    settle(table.all.values())


# Who diverges


@pytest.mark.parametrize("options", KINDS_OF_ROUND)
def test_a_round_whose_sum_is_not_finite_is_empty_for_all_and_everybody_goes_on(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    table = Table(training=options)
    table.round("abc")
    theta, trend = table["c"].theta, table["c"].trend
    table["a"].diverge()
    table["b"].diverge()
    table.round("abc")
    assert table.decided(2) == ["a", "b", "c"]
    for t in table.all.values():
        assert t.loco.rounds == [2]
        assert (t.reports[-1].members, t.reports[-1].took_part, t.reports[-1].moved) == ((), False, 0)
        assert same(t.theta, theta)
        assert same(t.weights, t.start)
        assert t.trend.tobytes() == trend.tobytes()
    assert len({t.loco.digests[0] for t in table.all.values()}) == 1
    momenta = [Own.of(table[name]).m for name in "abc"]
    for name in "ab":  # what diverged is dropped: kept, it would make every round empty
        assert not table[name].residual.any()
        assert same(table[name].weights, theta)
    assert all(m is None or not m.any() for m in momenta[:2])
    offer = list(table["c"].ledger.offers.values())[-1]
    assert offer.residual is not None
    assert same(table["c"].residual, offer.sent + offer.residual)  # what is sound is kept
    assert momenta[2] is None or same(momenta[2], offer.momentum)
    said = [(r.levelname, r.getMessage()) for r in caplog.records if r.name.startswith("pulsesync.")]
    assert [level for level, _ in said].count("ERROR") == 2
    assert any(level == "ERROR" and "Trainer a has diverged: its update of 'norm'" in words for level, words in said)
    assert any("Round 2 of fragment 0 is empty" in words and "a, b, c" in words for _, words in said)
    table.round("abc")
    assert table["a"].reports[-1].members == ("a", "b", "c")
    settle([table["c"]])
    newcomer = table.seat("d")
    assert newcomer.loco.digests == table["a"].loco.digests == table["b"].loco.digests == table["c"].loco.digests
    table.round("abcd")
    assert table.decided(4) == ["a", "b", "c", "d"]


def test_a_round_is_decided_without_those_whose_updates_have_no_finite_sum_if_enough_are_left() -> None:
    table = Table("abcde", quorum=3)
    table.round("abcde")
    table["b"].diverge()
    table["d"].diverge()
    table.round("abcde")
    assert table.decided(2) == ["a", "c", "e"]
    assert table["a"].reports[-1].members == ("a", "c", "e")
    assert not table["b"].residual.any()
    table.round("abcde")
    assert table.decided(3) == ["a", "b", "c", "d", "e"]
    assert len({t.loco.digests[0] for t in table.all.values()}) == 1
    settle([table["a"], table["c"], table["e"]])


@pytest.mark.parametrize("options", [*KINDS_OF_ROUND[:3], slow({"kind": "DiLoCo"})])
def test_one_finite_update_that_diverges_is_left_out_and_no_later_round_is_empty(options: dict[str, Any]) -> None:
    table = Table(training=options)
    table.round("abc")
    table["a"].diverge()  # alone: the sum is finite, and momentum would carry the weights beyond FP32 later
    table.round("abc")
    assert table.decided(2) == ["b", "c"]
    assert not table["a"].residual.any()
    for number in range(3, 14):
        table.round("abc")
        assert table["c"].reports[-1].members == ("a", "b", "c"), number
    assert np.abs(table["c"].theta).max() < 1
    assert table.seat("d").loco.digests == table["a"].loco.digests == table["c"].loco.digests
    settle([table["b"], table["c"]])


@pytest.mark.parametrize("by", [1e6, float(LARGEST_UPDATE)])
def test_large_updates_up_to_the_limit_are_taken_and_rounds_stay_possible(by: float) -> None:
    table = Table(training={"kind": "DiLoCo"})
    table.round("abc")
    table["a"].diverge(by)
    for number in range(2, 14):
        table.round("abc")
        assert table.decided(number) == ["a", "b", "c"]
        assert table["c"].reports[-1].members == ("a", "b", "c")
    assert by < np.abs(table["c"].theta).max() < 7 * by  # 0.7 / (1 - 0.9), by one trainer of three


@pytest.mark.parametrize("state_every", [32, 2])  # with 2 the empty round leaves a state, too
def test_one_that_was_away_follows_the_others_over_an_empty_round(state_every: int) -> None:
    table = Table(state_every=state_every)
    table.round("abc")
    table["a"].diverge()
    table["b"].diverge()
    table.round("ab")
    table.round("ab")
    table["c"].step(2)
    assert table["c"].loco.rounds == [3]
    assert same(table["c"].theta, table["a"].theta)
    assert bool(table.names_of("states/")) == (state_every == 2)
    settle([table["c"]])


@pytest.mark.parametrize("options", [{}, {"sync_every": 2, "delay": 1, "blend": 0.25}])
def test_one_whose_update_alone_leads_beyond_fp32_goes_on_from_the_shared_weights(options: dict[str, Any]) -> None:
    table = Table("a", training=options)
    table.round("a")
    theta = table["a"].theta
    table["a"].diverge()
    table.round("a")
    assert table["a"].loco.rounds == [2]
    assert same(table["a"].theta, theta)
    assert same(table["a"].weights, theta)
    assert not table["a"].residual.any()
    assert not table["a"].momentum.any()
    table.round("a")
    assert table["a"].reports[-1].took_part


# Lives


@pytest.mark.parametrize("seed", [0, slow(1), slow(2)])
@pytest.mark.parametrize("options", KINDS_OF_ROUND)
def test_two_payloads_of_two_lives_in_one_round_count_once(seed: int, options: dict[str, Any], tmp_path: Path) -> None:
    table = Table(training=options)
    table.round("abc")
    first = table["c"]
    first.save(tmp_path / "c")
    first.who = 100 + seed
    with pytest.raises(RoundError):
        first.step(2)  # it has sent, and nobody came; then it dies
    exchange = meet(table.store, "c", 3, **table.turns.options())
    again = table.all["c"] = Trainer(exchange, 200 + seed, **options)
    again.load(tmp_path / "c")
    again.loco.__enter__()
    sent = list(first.ledger.offers)[-1]
    again.ledger.offers[sent] = first.ledger.offers[sent]
    offered: list[Told] = []
    table.turns.meanwhile.append(lambda: table.round("ab"))
    with offers(again, offered):
        again.step(2)
    assert table.decided(2) == ["a", "b", "c"]
    assert len([key for key in table.names_of("rounds/0000/0000000002/sent/") if "/c." in key]) == 2
    taken = again.ledger.offers[json.loads(table.store.get("rounds/0000/0000000002/decided"))["members"]["c"]].sent
    e = offered[-1].s - taken  # whichever of the two it is
    z = again.theta if offered[-1].momentum is None else again.theta - e
    Own(e, offered[-1].momentum, z, z).check(again)
    settle(table.all.values())


@pytest.mark.parametrize("options", KINDS_OF_ROUND[:3])
def test_what_rounds_took_of_an_earlier_life_is_cleared_and_the_rest_is_kept(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A restart with a saved state: e, m and what it moved are zero where that life was heard, and stand elsewhere."""
    table = Table(training=options)
    table.round("abc")
    first = table["c"]
    first.step()
    first.save(tmp_path / "c")
    own = Own.of(first)
    table.turns.meanwhile.append(lambda: table.round("ab"))
    first.step()
    taken = next(reversed(first.ledger.offers.values())).sent
    own = own.follow(table["a"].theta, cleared=taken != 0)
    table.round("ab")  # and one without it
    own = own.follow(table["a"].theta)
    assert (table.decided(2), table.decided(3)) == (["a", "b", "c"], ["a", "b"])
    exchange = meet(table.store, "c", 3, **table.turns.options())
    again = Trainer(exchange, 9, **options)
    again.load(tmp_path / "c")
    again.loco.__enter__()
    assert again.loco.rounds == [3]
    assert 0 < np.count_nonzero(taken) < taken.size
    own.check(again)
    assert again.loco.digests == table["a"].loco.digests


@pytest.mark.parametrize("options", KINDS_OF_ROUND[:3])
def test_one_that_restarts_with_a_saved_state_of_which_nothing_was_taken_since_goes_on_from_it(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A restart with a saved state: it died before it had sent. e, m and x are as saved, and then it follows."""
    table = Table(training=options)
    table.round("abc")
    first = table["c"]
    first.step()
    first.save(tmp_path / "c")
    own = Own.of(first)
    for _ in range(2):
        table.round("ab")  # after the deadline, without it
        own = own.follow(table["a"].theta)
    again = table.all["c"] = Trainer(meet(table.store, "c", 3, **table.turns.options()), 9, **options)
    again.load(tmp_path / "c")
    again.loco.__enter__()
    assert again.loco.rounds == [3]
    own.check(again)
    table.turns.meanwhile.append(lambda: table.round("ab"))
    again.step()
    assert table.decided(4) == ["a", "b", "c"]
    settle(table.all.values())


@pytest.mark.parametrize("options", KINDS_OF_ROUND[:3])
def test_what_a_restart_has_left_is_cleared_if_the_rounds_that_took_of_an_earlier_life_are_gone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    """A trainer restarts from a saved state, and only a shared state still shows that rounds used its updates.

    It begins like a new trainer: e = 0, x = theta, and its momentum is that of the last round, which it can follow.
    """
    table = Table(training=options, state_every=2)
    table.round("abc")
    table["c"].step()
    table["c"].save(tmp_path / "c")
    table.turns.meanwhile.append(lambda: table.round("ab"))
    table["c"].step()
    for _ in range(7):
        before = table["a"].theta
        table.round("ab")
    again = Trainer(meet(table.store, "c", 3, **table.turns.options(state_every=2)), 9, **options)
    again.load(tmp_path / "c")
    assert again.residual.any()
    again.loco.__enter__()
    assert again.loco.rounds == [9]
    nothing, momentum = np.zeros_like(again.theta), (before - again.theta) / np.float32(0.7)
    Own(nothing, None if options.get("kind") else momentum, again.theta, again.theta).check(again)
    assert same(again.theta, table["a"].theta)


def test_one_that_dies_after_it_has_sent_counts_and_takes_the_rest_of_its_momentum_with_it() -> None:
    table = Table()
    table.round("abc")
    theta, c = table["a"].theta, table["c"]

    def die() -> None:
        raise KeyboardInterrupt

    table.turns.meanwhile.append(die)
    with pytest.raises(KeyboardInterrupt):
        c.step(2)
    before = c.everything()
    table.round("ab")
    assert table.decided(2) == ["a", "b", "c"]
    total = np.zeros_like(theta)
    for name in "abc":
        total += list(table[name].ledger.offers.values())[-1].sent
    assert same(table["a"].theta, theta - total / np.float32(3))
    assert table["a"].trend.tolist() == np.sign(total).tolist()
    assert c.everything() == before  # it never heard of it
    settle([table["a"], table["b"]])


def test_a_retry_computes_update_and_momentum_again_from_what_was_committed_and_never_advances_twice() -> None:
    table = Table(quorum=2, patience_s=20.0)
    table.round("abc")
    a = table["a"]
    committed, e, m = a.everything(), a.residual, a.momentum
    a.step()
    for _ in range(3):
        with pytest.raises(RoundError):
            a.step()
        assert a.everything() == committed
    offered: list[Told] = []
    table.turns.meanwhile.append(lambda: table.round("bc"))
    theta = a.theta
    with offers(a, offered):
        a.step()
    tries = list(a.ledger.offers.values())[-4:]
    assert len({offer.sent.tobytes() for offer in tries}) == 4  # each with one step more
    taken = a.ledger.offers[json.loads(table.store.get("rounds/0000/0000000002/decided"))["members"]["a"]]
    s, moved = offered[0].s, offered[0].momentum
    assert moved is not None
    delta = moved.astype(np.float64) - 0.9 * m.astype(np.float64)  # m' = mu m + delta, once
    np.testing.assert_allclose(s, e + 0.7 * (delta + 0.9 * moved.astype(np.float64)), rtol=0, atol=1e-7)
    assert not same(theta, a.theta)
    Own(s - taken.sent, moved, a.theta - (s - taken.sent), a.theta - (s - taken.sent)).check(a)
    settle(table.all.values())


def test_one_that_heard_nothing_of_its_round_and_was_then_away_knows_what_was_taken() -> None:
    table = Table(state_every=2)
    table.round("abc")
    c = table["c"]

    def interrupt() -> None:
        raise KeyboardInterrupt

    table.turns.meanwhile.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        c.step(2)
    for _ in range(7):
        table.round("ab")
    assert table["a"].loco.rounds == [8]
    c.step()
    assert c.loco.rounds == [8]
    settle(table.all.values())


@pytest.mark.parametrize(("verb", "steps"), [("propose", 0), ("confirm", 3), slow("propose", 3), slow("confirm", 0)])
@pytest.mark.parametrize("options", KINDS_OF_ROUND)
def test_one_that_rejoins_after_others_completed_its_round_knows_what_was_taken(
    options: dict[str, Any], verb: str, steps: int
) -> None:
    table = Table(training=options)
    table.round("abc")
    c = table["c"]
    plain = getattr(c.exchange.inner, verb)

    def fail(*args: Any) -> Any:
        plain(*args)
        raise StoreError("the answer was lost", retryable=True)

    setattr(c.exchange.inner, verb, fail)
    table.turns.meanwhile.append(lambda: table.round("ab"))
    with pytest.raises(StoreError, match="lost"):
        c.step(2)
    delattr(c.exchange.inner, verb)
    c.loco.__exit__()
    c.step(steps)  # without a round
    s, *momentum = update_of(c.loco.state_dict(), 0, c.ledger.outer)
    c.loco.__enter__()
    assert c.loco.digests == table["a"].loco.digests
    e = s - list(c.ledger.offers.values())[-1].sent  # the round used what was sent, and m advances once
    z = c.theta - e if momentum else c.theta
    Own(e, momentum[0] if momentum else None, z, z).check(c)
    settle(table.all.values())
    table.round("abc")
    settle(table.all.values())


# Interrupts


@pytest.mark.parametrize("names", [["NaN", "large", "rows swapped"], slow([*WRITES])], ids=len)
def test_what_something_else_writes_to_a_trainer_counts_as_training_or_is_refused_and_stops_nobody(
    names: list[str],
) -> None:
    for name in names:
        write = WRITES[name]
        table = Table("abc")
        table.round("abc")
        weights = next(p for p in table["a"].modules[0].parameters() if p.ndim == 2)
        write(weights.detach().numpy())
        if name == "NaN":
            with pytest.raises(StateError, match=r"'embed' is not finite.*discard\(\)"):
                table["a"].step(2)
            table.round("bc")
            table["a"].loco.discard()
        table.round("abc")
        assert len({tuple(table[one].loco.digests) for one in "abc"}) == 1, name
        assert np.isfinite(table["b"].theta).all(), name


@pytest.mark.parametrize("options", [{}, slow({"compact": 2}), slow({"kind": "DiLoCo"})], ids=str)
def test_whichever_of_many_attempts_is_taken_nothing_is_lost_or_counted_twice(options: dict[str, Any]) -> None:
    """A trainer tries a round 21 times, and the others take one of its payloads; it hears of that, or takes a state."""
    sent = "rounds/0000/0000000002/sent/"
    for taken, away in ((0, False), (5, True), (-1, False)):
        table = Table("abc", training=options, state_every=2)
        table.round("abc")
        a = table["a"]

        def list_(prefix: str, plain: Any = table.store.list) -> Any:
            if prefix.startswith("rounds/"):
                raise StoreError("the store is away", retryable=True)
            return plain(prefix)

        with mock.patch.object(table.store, "list", list_):
            a.step()
            for _ in range(21):
                with pytest.raises(StoreError, match="is away"):
                    a.step()
        there = table.names_of(sent)
        attempts = [key for key in (f"{sent}a.{payload}" for payload in a.ledger.offers) if key in there]
        assert len(attempts) == 8
        for key in set(attempts) - {attempts[taken]}:
            table.store.delete(key)
        table.round("bc")
        assert table.decided(2) == ["a", "b", "c"]
        for _ in range(6 if away else 0):
            table.round("bc")
        a.step()
        assert a.loco.rounds == table["b"].loco.rounds
        settle(table.all.values())


class Interrupting:
    """A store in which one call is cut short by Ctrl-C, before it is carried out or after."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.left, self.after = store, -1, False

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self.left -= 1
            strike = self.left == 0
            if strike and not self.after:
                raise KeyboardInterrupt
            result = plain(*args)
            if strike:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize(
    ("after", "options", "every"),
    [(False, {}, 3), (True, {"compact": 2}, 3)]
    + [slow(after, options, 1) for after in (False, True) for options in ({}, {"compact": 2})],
)
def test_an_interrupt_in_any_call_of_the_store_loses_nothing(after: bool, options: dict[str, Any], every: int) -> None:
    for call in itertools.count(every, every):
        table = Table("ab", joined="b", training=options, state_every=1)
        store = Interrupting(table.store)
        table.seat("a", store=store)
        table.round("ab")
        store.left, store.after = call, after
        table.turns.meanwhile.append(partial(table.round, "b"))
        before = table["a"].everything()
        try:
            table["a"].step(2)
        except KeyboardInterrupt:
            assert table["a"].everything() == before
        was_struck, store.left = store.left <= 0, -1
        if table["a"].loco.rounds == [1]:
            table["a"].step()
        assert table["a"].loco.rounds == table["b"].loco.rounds == [2]
        settle(table.all.values())
        if not was_struck:
            break
    assert call > 6


class Moody:
    """A trainer's way to the store on which any call may fail or be interrupted, before it is carried out or after."""

    def __init__(self, store: MemoryStore, rng: random.Random, chance: float) -> None:
        self.store, self.rng, self.chance, self.struck = store, rng, chance, 0

    def __getattr__(self, name: str) -> Any:
        plain = getattr(self.store, name)

        def call(*args: Any) -> Any:
            strike = self.rng.random() < self.chance
            error = self.rng.choice([KeyboardInterrupt(), StoreError("lost", retryable=True)])
            self.struck += strike
            if strike and self.rng.random() < 0.5:
                raise error
            result = plain(*args)
            if strike:
                raise error
            return result

        return call


@pytest.mark.parametrize(("seed", "events"), [(0, 35), *(slow(seed, 60) for seed in range(6))])
def test_whatever_trainers_do_and_whatever_befalls_them_nothing_is_lost_or_counted_twice(
    seed: int, events: int
) -> None:
    """Rounds of some, interrupts and failures anywhere, rejoining, leaving, coming back, steps on one's own."""
    rng = random.Random(seed)
    training: dict[str, Any] = rng.choice([{}, {"compact": 2}, {"compact": 0}, PUBLISHED, {"kind": "DiLoCo"}])
    training = {**training, "shapes": {"w": (6, 5), "b": (3,)}}
    table = Table(joined="", training=training, state_every=rng.choice([1, 2, 5]), patience_s=30.0)
    moods = {name: Moody(table.store, rng, 0.0) for name in "abc"}
    for name, mood in moods.items():
        table.seat(name, store=mood)

    def tried(call: Any) -> None:
        with contextlib.suppress(PulseError, KeyboardInterrupt):
            call()

    def enter(who: Trainer) -> None:
        while True:
            with contextlib.suppress(PulseError, KeyboardInterrupt):
                who.loco.__enter__()
                return

    def some_round(names: list[str]) -> None:
        first, *rest = names
        if rest:
            table.turns.meanwhile.append(lambda: tried(lambda: some_round(rest)))
        for _ in range(2):
            tried(table[first].step)

    for _ in range(events):
        who = table[rng.choice("abc")]
        for mood in moods.values():
            mood.chance = rng.choice([0.0, 0.0, 0.03, 0.1])
        what = rng.random()
        if what < 0.7:
            some_round(rng.sample("abc", rng.choice([1, 2, 2, 3, 3])))
        elif what < 0.8:
            tried(who.loco.rejoin)
        elif what < 0.9:
            tried(who.loco.__exit__)
            if rng.random() < 0.5:
                who.step()
            enter(who)
        else:
            table.turns.now += 5.0
        table.turns.meanwhile.clear()
    for mood in moods.values():
        mood.chance = 0.0
    for _ in range(2):
        for t in table.all.values():
            t.loco.rejoin()
    assert sum(mood.struck for mood in moods.values()) > 5
    assert table["a"].loco.rounds[0] > events / 6
    settle(table.all.values(), tolerance=1e-4)


# Faults of every kind


@pytest.mark.parametrize(
    ("rounds", "faults", "options"),
    [
        (10, {"lost": 0.05, "unanswered": 0.05}, {"compact": 2}),
        slow(200, {"lost": 0.02, "unanswered": 0.02}, {"compact": 2}),
        slow(
            60,
            {"lost": 0.01, "unanswered": 0.01, "truncated": 0.01, "flipped": 0.01, "stale": 0.02, "doubled": 0.05},
            {"kind": "DiLoCo"},
        ),
    ],
)
def test_rounds_over_a_store_that_fails_lose_nothing(
    rounds: int, faults: dict[str, float], options: dict[str, Any]
) -> None:
    store = MemoryStore()
    stores = [FaultyStore(store, random.Random(i), **faults) for i in range(3)]
    meeting: dict[str, Any] = {"deadline_s": 0.02, "poll_s": 0.002, "state_every": 4}
    options = {**options, "sync_every": 1, "shapes": {"w": (5, 5), "b": (3,)}}
    trainers = [Trainer(meet(stores[i], f"t{i}", 3, **meeting), i, **options) for i in range(3)]
    errors = [0, 0, 0]

    def again(i: int, call: Any) -> None:
        for _ in range(100):
            try:
                call()
            except PulseError:
                errors[i] += 1
            else:
                return
        raise AssertionError("no end of faults")

    def train(i: int) -> None:
        t = trainers[i]
        again(i, t.__enter__)  # also counts the momentum with which a late one begins
        while t.loco.rounds[0] < rounds:
            try:
                t.step()
            except PulseError:
                errors[i] += 1

    together(*(lambda i=i: train(i) for i in range(3)))
    furthest = max(t.loco.rounds[0] for t in trainers)
    for i, t in enumerate(trainers):
        again(i, t.loco.rejoin)
        assert t.loco.rounds[0] == furthest
    assert sum(errors) > rounds / 4
    settle(trainers, tolerance=1e-4)


# Real stores, real processes


@pytest.mark.slow  # in the fast tier they meet in other stores, and the tests of stores use a bucket
def test_trainers_meet_in_a_bucket(s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    url = s3_server.fresh_url()
    trainers = [Trainer(meet(url, f"t{i}", 3, poll_s=0.005, state_every=2), i, compact=2) for i in range(3)]

    def train(t: Trainer) -> None:
        with t:
            t.step(10)

    together(*(lambda t=t: train(t) for t in trainers))
    assert trainers[0].digests == trainers[1].digests == trainers[2].digests
    assert [r.round for r in trainers[0].reports] == [1, 2, 3, 4, 5]
    assert all(len(r.members) == 3 for r in trainers[0].reports)
    settle(trainers)
    late = Trainer(meet(url, "late", 3), 7, seed=3, compact=2)
    late.loco.rejoin()
    assert late.loco.digests == trainers[0].loco.digests


def survivor(folder: str, name: str, who: int, rounds: int) -> dict[str, Any]:
    """A trainer that resumes from its saved state, if any; it may be killed at any moment.

    It trains up to a round, and until nobody is killed any more.
    """
    enough = Path(folder) / "enough"
    saved = Path(folder) / f"{name}.state"
    exchange = meet(str(Path(folder) / "store"), name, 3, deadline_s=0.2, poll_s=0.001, state_every=4, patience_s=30)
    t = Trainer(exchange, who, compact=2, watch=False)
    if saved.exists():
        t.load(saved)
    with t:
        while t.loco.rounds[0] < rounds or not enough.exists():
            t.step()
            if t.taken % 3 == 0:
                t.save(saved)
            time.sleep(0.001)
    return {"digests": t.digests, "round": t.loco.rounds[0]}


@pytest.mark.parametrize(("rounds", "most_kills"), [(5, 2), slow(40, 20)])
def test_trainers_killed_at_random_and_restarted_from_what_they_saved_end_with_the_same_weights(
    fleet: Fleet, tmp_path: Path, rounds: int, most_kills: int
) -> None:
    rng = random.Random(11)
    kills = 0
    names = ["t0", "t1", "t2"]

    def start(i: int) -> tuple[int, Path]:
        return fleet.start(survivor, folder=str(tmp_path), name=names[i], who=i, rounds=rounds)

    running = [start(i) for i in range(3)]
    results: dict[int, Any] = {}
    end = time.monotonic() + 40
    while len(results) < 3:
        assert time.monotonic() < end, [told(out) for _, out in running]
        time.sleep(rng.expovariate(1 / 0.05))
        if kills < most_kills:
            i = rng.randrange(3)
            if alive(running[i][0]):
                os.kill(running[i][0], signal.SIGKILL)
                kills += 1
                if kills == most_kills:
                    (tmp_path / "enough").touch()
        for i, (pid, out) in enumerate(running):
            if i in results or alive(pid):
                continue
            if out.exists():
                results[i] = pickle.loads(out.read_bytes())
            else:
                assert "Traceback" not in told(out), told(out)
                running[i] = start(i)
    assert kills == most_kills
    seen: dict[int, set[str]] = {}
    for result in results.values():
        assert result["round"] >= rounds
        for _, number, digest in result["digests"]:
            seen.setdefault(number, set()).add(digest)
    assert all(len(digests) == 1 for digests in seen.values()), "replicas diverged"
    store = LocalStore(str(tmp_path / "store"))
    assert list(store.list("states/"))
