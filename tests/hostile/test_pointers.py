"""Attacks on workers that follow a pointer: each must be refused by name, at once, and change no weight.

A move is spoilt and, where that is not what the attack is about, signed again by the key that the worker trusts.
"""

import json
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pulsesync import Publisher, SigningKey, Subscriber, move_pointer
from pulsesync.errors import (
    ChainError,
    FormatError,
    LimitError,
    MissingLinkError,
    PulseError,
    RunReplacedError,
    SignatureError,
    UnsupportedError,
)
from pulsesync.format import signature
from pulsesync.format.pointer import Pointer
from pulsesync.run import keys
from pulsesync.store import MemoryStore
from tests.hostile import mutations

MAX_SECONDS, MAX_BYTES = 5.0, 16 << 20
KEY, THIEF = SigningKey("11" * 32), SigningKey("22" * 32)
NEXT = keys.pointer_key("stable", 1)


class Followed:
    """A signed run of four versions, and a worker at version 2, where its pointer `stable` was moved first."""

    def __init__(self) -> None:
        self.store, weights = MemoryStore(), {"w": np.arange(500, dtype=np.float32)}
        with Publisher(self.store, signing_key=KEY) as pub:
            for _ in range(4):
                weights["w"][::7] += 1
                pub.publish(weights)
        move_pointer(self.store, "stable", 2, signing_key=KEY)
        self.good = replace(move_pointer(self.store, "canary", 3, signing_key=KEY), name="stable", number=1)
        self.restart()

    def restart(self) -> None:
        self.held = {"w": np.zeros(500, np.float32)}
        self.sub = Subscriber(self.store, follow="stable", trust=KEY.public)
        assert self.sub.sync(self.held).version == 2
        self.bits = self.held["w"].tobytes()

    def feed(self, objects: dict[str, bytes]) -> PulseError | None:
        """Let the worker look at a store that has these objects too; return what it raised."""
        for key, data in objects.items():
            self.store.put(key, data)
        try:
            self.sub.sync(self.held)
        except PulseError as e:
            return e
        finally:
            for key in objects:
                self.store.delete(key)
            self.store.put(keys.pointer_hint("stable"), b"0")
        return None

    @property
    def untouched(self) -> bool:
        return self.sub.version == 2 and self.held["w"].tobytes() == self.bits


@dataclass(frozen=True)
class PointerAttack:
    end: type[PulseError]
    spoil: Callable[[Pointer], dict[str, bytes]]


ATTACKS: list[PointerAttack] = []
Spoil = Callable[[Pointer], dict[str, bytes]]


def attack(end: type[PulseError]) -> Callable[[Spoil], Spoil]:
    def register(spoil: Spoil) -> Spoil:
        ATTACKS.append(PointerAttack(end, spoil))
        return spoil

    return register


def signed(line: bytes, key: SigningKey = KEY) -> dict[str, bytes]:
    return {NEXT: signature.sign(line, key)}


def with_fields(good: Pointer, **fields: Any) -> bytes:
    table = {**json.loads(good.build()), **fields}
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@attack(SignatureError)
def a_move_that_nobody_signed(good: Pointer) -> dict[str, bytes]:
    return {NEXT: good.build()}


@attack(SignatureError)
def a_move_by_a_key_that_is_not_trusted(good: Pointer) -> dict[str, bytes]:
    return signed(good.build(), THIEF)


@attack(SignatureError)
def a_move_by_a_key_that_may_squash(good: Pointer) -> dict[str, bytes]:
    return signed(good.build(), SigningKey(THIEF.secret, KEY.delegate(good.run, THIEF.public)))


@attack(SignatureError)
def a_move_that_calls_itself_a_squash(good: Pointer) -> dict[str, bytes]:
    delegate = SigningKey(THIEF.secret, KEY.delegate(good.run, THIEF.public))
    return signed(with_fields(good, kind="squash"), delegate)


@attack(SignatureError)
def the_signature_of_another_move(good: Pointer) -> dict[str, bytes]:
    other = replace(good, version=1).build()
    return {NEXT: good.build() + signature.sign(other, KEY)[len(other) :]}


@attack(ChainError)
def a_signed_move_under_another_number(good: Pointer) -> dict[str, bytes]:
    return signed(replace(good, number=7).build())


@attack(ChainError)
def a_signed_move_of_another_pointer(good: Pointer) -> dict[str, bytes]:
    return signed(replace(good, name="canary").build())


@attack(RunReplacedError)
def a_signed_move_of_another_run(good: Pointer) -> dict[str, bytes]:
    return signed(replace(good, run="ab" * 16).build())


@attack(ChainError)
def a_signed_move_to_another_state(good: Pointer) -> dict[str, bytes]:
    return signed(replace(good, digest="ab" * 32).build())


@attack(MissingLinkError)
def a_signed_move_to_a_version_that_was_never_published(good: Pointer) -> dict[str, bytes]:
    return signed(replace(good, version=1 << 53).build())


@attack(UnsupportedError)
def a_manifest_in_place_of_a_move(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, format="pulse-manifest/1"))


@attack(UnsupportedError)
def a_move_of_the_draft(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, format="pulse-pointer/1-draft"))


@attack(UnsupportedError)
def a_move_with_one_more_field(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, more="1"))


@attack(FormatError)
def a_move_with_an_optional_field_that_is_a_number(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, **{"x-note": 1}))


@attack(FormatError)
def a_move_with_true_for_a_number(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, version=True))


@attack(FormatError)
def a_move_with_a_name_that_leads_elsewhere(good: Pointer) -> dict[str, bytes]:
    return signed(with_fields(good, name="../stable"))


@attack(FormatError)
def a_move_of_nothing_but_brackets(good: Pointer) -> dict[str, bytes]:
    return signed(b"[" * 3000 + b"\n")


@attack(LimitError)
def a_move_of_a_hundred_megabytes(good: Pointer) -> dict[str, bytes]:
    return {NEXT: bytes(100_000_000)}


@attack(SignatureError)
def a_hint_at_a_move_far_away_that_nobody_signed(good: Pointer) -> dict[str, bytes]:
    far = replace(good, number=1 << 53)
    return {keys.pointer_key("stable", far.number): far.build(), keys.pointer_hint("stable"): str(1 << 53).encode()}


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: f"{case.spoil.__name__}-{case.end.__name__}")
def test_attack_is_refused_at_once_and_leaves_no_trace(case: PointerAttack) -> None:
    target = Followed()
    objects = case.spoil(target.good)
    tracemalloc.start()
    try:
        began = time.process_time()
        error = target.feed(objects)
        took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(error) is case.end, f"{type(error).__name__}: {error}"
    assert target.untouched
    assert took < MAX_SECONDS
    assert peak < MAX_BYTES
    assert target.feed(signed(target.good.build())) is None
    assert target.sub.version == 3


FOLLOWED = Followed()


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), again=st.booleans())
def test_a_damaged_move_is_refused_without_a_trace(rng: Random, again: bool) -> None:
    """Bytes of a signed move at random; or its fields at random, signed again by a key that may do so."""
    line = FOLLOWED.good.build()
    if again:
        table = mutations.change_json(json.loads(line), rng)
        spoilt = json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"
        data = signature.sign(spoilt, KEY)
    else:
        spoilt, data = b"", mutations.damage(signature.sign(line, KEY), rng)
    if spoilt == line or data == signature.sign(line, KEY):
        return
    error = FOLLOWED.feed({NEXT: data})
    if error is None:  # only the clock of its writer can be another one
        table = json.loads(spoilt)
        assert {**table, "created": 0} == {**json.loads(line), "created": 0}
        FOLLOWED.restart()
    assert FOLLOWED.untouched
