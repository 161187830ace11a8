"""Each row and function spoils a good payload of a trainer in one way; another must refuse it by name, and at once.

Whatever an attack does, the hash is made to fit again, unless it is what the attack is about: trainers trust each
other, but not their disks and networks. A failure names the attacks that were not refused so.
"""

import hashlib
import inspect
import json
import time
import traceback
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest

from pulsesync.core.digest import count_tile
from pulsesync.core.types import Codec, Sum, TensorSpec
from pulsesync.errors import BaseMismatchError, ChecksumError, FormatError, LimitError, PulseError, UnsupportedError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.loco.gate import LARGEST, SparseVector, VisibilityGate, WholeUpdate
from pulsesync.loco.payload import Coder, describe, read_head
from tests.hostile import forge
from tests.hostile.forge import Dense, Plane
from tests.tiers import slow

MAX_SECONDS = 5.0
MAX_BYTES = 16 << 20
SIZE = 3000
BASE = hashlib.sha256(b"where all begin").hexdigest()
LAYOUT = layouts.make([TensorSpec("fired", "BF16", (SIZE,))])
INTEGERS = ("begin", "coded", "count", "end", "fragment", "round", "scale", "terms")


@dataclass
class Letter:
    """A payload in pieces, which attacks change."""

    head: dict[str, Any]
    coded: bytes
    rest: bytes
    described: np.ndarray | None
    sealed: bool = True  # whether lengths and hash are made to fit
    text: Callable[[dict[str, Any]], bytes] = field(default=lambda head: canonical(head))

    def write(self) -> bytes:
        if self.sealed:
            self.say(coded=len(self.coded))
        return self.text(self.head) + b"\n" + self.coded + self.rest

    def say(self, **fields: Any) -> None:
        """Change fields of the head, and recompute the hash."""
        self.sealed = False
        told = canonical(self.head | fields | {"sha256": ""}) + b"\n"
        self.head |= fields | {"sha256": hashlib.sha256(told + self.coded + self.rest).hexdigest()}

    def recode(self, new: np.ndarray, **options: Any) -> None:
        """Replace the coded part by one that leads from the values that all trainers know to other values."""
        assert self.described is not None
        old, sums = {"fired": self.described}, {0: count_tile(LAYOUT.tiles[0], self.described)}
        self.coded = bytes(patch.encode(LAYOUT, LAYOUT.tiles, old, {"fired": new}, sums, **options).data)

    def moved(self, steps: dict[int, int]) -> np.ndarray:
        """The values that all trainers know, some of them moved by a number of steps in the order of the values."""
        assert self.described is not None
        out = self.described.copy()
        for place, by in steps.items():
            bits = int(out[place])
            order = ((bits ^ 0xFFFF if bits & 0x8000 else bits | 0x8000) + by) & 0xFFFF
            out[place] = order & 0x7FFF if order & 0x8000 else order ^ 0xFFFF
        return out


def canonical(table: Any) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


Spoil = Callable[[Letter], object]  # changes the letter, or returns what will be read, as bytes


@dataclass(frozen=True)
class Attack:
    end: type[PulseError]
    name: str
    spoil: Spoil
    on: str = "exact"  # the mode of the good payload


ATTACKS: list[Attack] = []


def attack(end: type[PulseError], on: str = "exact") -> Callable[[Spoil], Spoil]:
    def register(spoil: Spoil) -> Spoil:
        ATTACKS.append(Attack(end, spoil.__name__.replace("_", " "), spoil, on))
        return spoil

    return register


def put(it: Letter, head: dict[str, Any] | None = None, **attributes: Any) -> None:
    """Set fields of the head, and attributes of the letter."""
    it.head |= head or {}
    for name, value in attributes.items():
        setattr(it, name, value)


@cache
def victim(mode: str) -> tuple[Coder, SparseVector, bytes]:
    """A reader, what it should read, and the good payload: read once, so that every kernel is compiled."""
    rng = np.random.default_rng(0)
    theta = (rng.standard_normal(SIZE) * 0.05).astype(np.float32)
    momentum = (rng.standard_normal(SIZE) * 1e-4).astype(np.float32)
    s = (rng.standard_normal(SIZE) * 1e-4).astype(np.float32)
    coder = Coder(1, 5, BASE, None if mode == "dense" else describe(theta, momentum))
    part = VisibilityGate(3 if mode == "compact" else None).select(theta, WholeUpdate(s))
    sent = SparseVector(SIZE, np.arange(SIZE), s) if mode == "dense" else part.sent
    data = coder.encode("ada", sent, part.unit)
    assert reads(coder, data, sent)
    return coder, sent, data


def reads(coder: Coder, data: bytes, sent: SparseVector) -> bool:
    found = coder.decode(data, "ada", 0, SIZE)[1]
    return np.array_equal(found.positions, sent.positions) and np.array_equal(
        found.values.view(np.uint32), sent.values.view(np.uint32)
    )


def letter(mode: str) -> Letter:
    coder, _, data = victim(mode)
    head, body = read_head(data)
    line = data[: data.index(b"\n")]
    return Letter(json.loads(line), bytes(body[: head.coded]), bytes(body[head.coded :]), coder.described)


MODES = ("exact", "compact", "dense")


@pytest.mark.parametrize("on", MODES)
def test_every_attack_is_refused_at_once(on: str) -> None:
    failures = []
    attacks = [case for case in ATTACKS if case.on == on]
    for case in attacks:
        try:
            check_attack(case)
        except Exception:  # noqa: BLE001 - all attacks are tried, and those that succeed are named
            failures.append(f"{case.name}:\n{traceback.format_exc()}")
    assert not failures, "\n".join(failures)
    assert attacks


def spoilt_payload(case: Attack) -> bytes | memoryview:
    spoilt = letter(case.on)
    data = case.spoil(spoilt)
    return data if isinstance(data, bytes | memoryview) else spoilt.write()


def check_attack(case: Attack) -> None:
    coder, sent, good = victim(case.on)
    data = spoilt_payload(case)
    assert data != good
    tracemalloc.start()
    try:
        began = time.process_time()
        with pytest.raises(PulseError) as caught:
            coder.decode(data, "ada", 0, SIZE)
        took, peak = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert type(caught.value) is case.end, f"{type(caught.value).__name__}: {caught.value}"
    assert took < MAX_SECONDS
    assert peak < MAX_BYTES
    assert reads(coder, good, sent)


def test_an_unspoilt_letter_is_the_payload() -> None:
    for mode in MODES:
        assert letter(mode).write() == victim(mode)[2], mode


def test_every_function_that_spoils_a_letter_is_an_attack_with_an_expected_error() -> None:
    """A function without `@attack(...)` would never run."""
    signatures = {name: inspect.signature(it) for name, it in globals().items() if inspect.isfunction(it)}
    spoiling = [
        name
        for name, signature in signatures.items()
        if [p.annotation for p in signature.parameters.values()] == [Letter]
    ]
    assert spoiling == [case.spoil.__name__ for case in ATTACKS if case.spoil.__name__ != "<lambda>"]
    assert len({case.name for case in ATTACKS}) == len(ATTACKS)
    assert {case.on for case in ATTACKS} == set(MODES)


# -- the head ------------------------------------------------------------------------------------------------------


@attack(FormatError)
def a_payload_with_a_coded_part_of_less_than_nothing(it: Letter) -> None:
    it.write()
    it.say(coded=-1)


ATTACKS += [
    Attack(FormatError, "an empty payload", lambda it: b""),
    Attack(FormatError, "a payload without a newline", lambda it: canonical(it.head)),
    Attack(
        FormatError,
        "a payload whose head is longer than any",
        lambda it: put(it, text=lambda head: canonical(head)[:-1] + b" " * 5000 + b"}"),
    ),
    Attack(FormatError, "a payload of a gigabyte without a head", lambda it: np.zeros(1 << 30, np.uint8).data),
    Attack(FormatError, "a payload whose head is a list", lambda it: put(it, text=lambda head: canonical([head]))),
    Attack(
        FormatError, "a payload whose head is not text", lambda it: put(it, text=lambda head: b"\xff" + canonical(head))
    ),
    Attack(
        FormatError,
        "a payload whose head is nested deep",
        lambda it: put(it, text=lambda head: b'{"a":' * 800 + b"1" + b"}" * 800),
    ),
    Attack(
        FormatError,
        "a payload that says a key twice",
        lambda it: put(it, text=lambda head: canonical(head)[:-1] + b',"trainer":"ada"}'),
    ),
    Attack(
        FormatError,
        "a payload with its keys in another order",
        lambda it: put(
            it, text=lambda head: json.dumps(dict(sorted(head.items(), reverse=True)), separators=(",", ":")).encode()
        ),
    ),
    Attack(
        FormatError,
        "a payload with spaces in its head",
        lambda it: put(it, text=lambda head: json.dumps(head, sort_keys=True).encode()),
    ),
    Attack(
        FormatError,
        "a payload with an escape it does not need",
        lambda it: put(it, text=lambda head: canonical(head).replace(b'"ada"', b'"\\u0061da"')),
    ),
    Attack(
        FormatError,
        "a payload with minus zero",
        lambda it: put(it, text=lambda head: canonical(head).replace(b'"begin":0', b'"begin":-0')),
    ),
    Attack(FormatError, "a payload with a field more", lambda it: put(it, {"more": 1})),
    Attack(FormatError, "a payload with a field less", lambda it: it.head.pop("terms")),
    Attack(UnsupportedError, "a payload without a format", lambda it: it.head.pop("format")),
    Attack(UnsupportedError, "a payload of another format", lambda it: put(it, {"format": "pulse-loco/2"})),
    Attack(UnsupportedError, "a payload whose format is a list", lambda it: put(it, {"format": [it.head["format"]]})),
    Attack(FormatError, "a payload with a float for a round", lambda it: put(it, {"round": 5.0})),
    Attack(FormatError, "a payload with true for a number", lambda it: put(it, {"fragment": True})),
    Attack(FormatError, "a payload with text for a number", lambda it: put(it, {"count": str(it.head["count"])})),
    Attack(FormatError, "a payload with nan for a number", lambda it: put(it, {"scale": float("nan")})),
    Attack(FormatError, "a payload with null for a hash", lambda it: put(it, {"sha256": None}, sealed=False)),
    Attack(FormatError, "a payload with a number for a name", lambda it: put(it, {"trainer": 1})),
    Attack(FormatError, "a payload of a round below zero", lambda it: put(it, {"round": -5})),
    Attack(FormatError, "a payload of fewer than no entries", lambda it: put(it, {"count": -1})),
    Attack(FormatError, "a payload that begins before zero", lambda it: put(it, {"begin": -1})),
    Attack(FormatError, "a payload of a round of three thousand digits", lambda it: put(it, {"round": 10**3000})),
    Attack(FormatError, "a payload of terms of three thousand digits", lambda it: put(it, {"terms": 10**3000})),
    Attack(LimitError, "a payload that ends at 2 to the 60", lambda it: put(it, {"end": 1 << 60})),
    Attack(FormatError, "a payload that ends at 2 to the 46", lambda it: put(it, {"end": 1 << 46})),
    Attack(LimitError, "a payload that ends before it begins", lambda it: put(it, {"begin": SIZE, "end": 0})),
    Attack(LimitError, "a payload of more entries than it covers", lambda it: put(it, {"count": SIZE + 1})),
    Attack(LimitError, "a payload of 2 to the 60 entries", lambda it: put(it, {"count": 1 << 60})),
    Attack(LimitError, "a payload with a name too long", lambda it: put(it, {"trainer": "a" * 129})),
    Attack(LimitError, "a payload without a name", lambda it: put(it, {"trainer": ""})),
    Attack(FormatError, "a payload with half a character for a name", lambda it: put(it, {"trainer": "\ud800"})),
    Attack(LimitError, "a payload with a scale beyond any", lambda it: put(it, {"scale": 256})),
    Attack(LimitError, "a payload with a scale of a thousand digits", lambda it: put(it, {"scale": -(10**1000)})),
    Attack(FormatError, "a payload of no known mode", lambda it: put(it, {"mode": "sparse"})),
    Attack(FormatError, "a payload of another trainer", lambda it: put(it, {"trainer": "bea"})),
    Attack(FormatError, "a payload of another fragment", lambda it: put(it, {"fragment": 0})),
    Attack(FormatError, "a payload of the round before", lambda it: put(it, {"round": 4})),
    Attack(FormatError, "a payload of the round after", lambda it: put(it, {"round": 6})),
    Attack(BaseMismatchError, "a payload from another state", lambda it: put(it, {"base": "0" * 64})),
    Attack(BaseMismatchError, "a payload from a state without a name", lambda it: put(it, {"base": ""})),
    Attack(FormatError, "a payload of other entries", lambda it: put(it, {"end": SIZE - 1})),
    Attack(FormatError, "a payload of no entries for all", lambda it: put(it, {"end": 0, "count": 0})),
    Attack(FormatError, "a payload of several updates in the place of one", lambda it: put(it, {"terms": 3})),
    Attack(FormatError, "a payload of no updates", lambda it: put(it, {"terms": 0})),
]


# -- the bytes after the head --------------------------------------------------------------------------------------


@attack(ChecksumError)
def a_payload_with_another_hash(it: Letter) -> None:
    it.write()
    it.sealed, it.head["sha256"] = False, "0" * 64


@attack(ChecksumError)
def a_payload_with_its_hash_in_capitals(it: Letter) -> None:
    it.write()
    it.sealed, it.head["sha256"] = False, it.head["sha256"].upper()


@attack(FormatError)
def a_coded_part_longer_than_the_payload(it: Letter) -> None:
    it.write()
    it.say(coded=len(it.coded + it.rest) + 1)


@attack(FormatError)
def a_coded_part_of_2_to_the_60_bytes(it: Letter) -> None:
    it.write()
    it.say(coded=1 << 60)


@attack(FormatError)
def a_coded_part_that_begins_in_the_mantissas(it: Letter) -> None:
    it.write()
    it.say(coded=len(it.coded) + 1)


@attack(FormatError)
def a_coded_part_said_to_be_a_byte_shorter(it: Letter) -> None:
    it.write()
    it.say(coded=len(it.coded) - 1)


@attack(FormatError)
def a_coded_part_for_a_tensor_of_another_size(it: Letter) -> None:
    assert it.described is not None
    layout = layouts.make([TensorSpec("fired", "BF16", (SIZE + 1,))])
    old = np.append(it.described, np.uint16(0))
    new = old ^ np.uint16(1)
    it.coded = bytes(patch.encode(layout, layout.tiles, {"fired": old}, {"fired": new}, {0: Sum(0, 0)}).data)


@attack(FormatError)
def a_coded_part_for_a_tensor_of_another_name(it: Letter) -> None:
    assert it.described is not None
    layout = layouts.make([TensorSpec("weights", "BF16", (SIZE,))])
    new = it.described ^ np.uint16(1)
    old = {"weights": it.described}
    it.coded = bytes(patch.encode(layout, layout.tiles, old, {"weights": new}, {0: Sum(0, 0)}).data)


@attack(FormatError)
def a_coded_part_of_no_tiles(it: Letter) -> None:
    part = forge.read_part(it.coded, LAYOUT)
    it.coded = part.place([]).write()


@attack(ChecksumError)
def a_coded_part_with_a_sum_that_is_not_how_it_moves(it: Letter) -> None:
    part = forge.read_part(it.coded, LAYOUT)
    ((tile, codec, total, body),) = part.payloads()
    it.coded = part.place([(tile, codec, bytes([total[0] ^ 1]) + total[1:], body)]).write()


@attack(ChecksumError)
def a_coded_part_with_the_sum_of_the_weights(it: Letter) -> None:
    assert it.described is not None
    new = it.moved({7: 3})
    known = {0: Sum(123, 456)}
    it.coded = bytes(patch.encode(LAYOUT, LAYOUT.tiles, {"fired": it.described}, {"fired": new}, known).data)
    it.head["count"], it.rest = 1, bytes(3)


@attack(FormatError)
def a_coded_part_with_a_history(it: Letter) -> None:
    steps = {place: 1 + place % 3 for place in range(0, SIZE, 2)}
    it.recode(it.moved(steps), codec="history", history=History())
    ((_, codec, _, _),) = forge.read_part(it.coded, LAYOUT).payloads()
    assert codec == Codec.HISTORY
    it.head["count"] = len(steps)


@attack(FormatError)
def a_coded_part_with_a_frame_of_32_megabytes(it: Letter) -> None:
    part = forge.read_part(it.coded, LAYOUT)
    ((tile, _, total, _),) = part.payloads()
    it.coded = part.place([(tile, Codec.DENSE, total, Dense([Plane(bytes(32 << 20), packed=True)] * 2))]).write()


@attack(FormatError)
def an_entry_of_32768_units(it: Letter) -> None:
    it.recode(it.moved({5: 1 << 15}))
    it.head["count"], it.rest = 1, bytes(3)


@attack(FormatError, on="compact")
def a_compact_entry_of_32768_units(it: Letter) -> None:
    assert LARGEST == (1 << 15) - 1
    it.recode(it.moved({5: 1 << 15}))
    it.head["count"] = 1


ATTACKS += [
    Attack(ChecksumError, "a payload cut short", lambda it: it.write()[:-1]),
    Attack(ChecksumError, "a payload with a byte behind it", lambda it: it.write() + b"\0"),
    Attack(FormatError, "a coded part that is missing", lambda it: put(it, coded=b"")),
    Attack(FormatError, "a coded part that is rubbish", lambda it: put(it, coded=bytes(range(256)))),
    Attack(FormatError, "a coded part where nothing was sent", lambda it: put(it, {"count": 0})),
    Attack(FormatError, "mantissas where nothing was sent", lambda it: put(it, {"count": 0}, coded=b"")),
    Attack(FormatError, "one entry more than were coded", lambda it: put(it, {"count": it.head["count"] + 1})),
    Attack(FormatError, "one entry less than were coded", lambda it: put(it, {"count": it.head["count"] - 1})),
]


# -- exact values --------------------------------------------------------------------------------------------------


@attack(FormatError)
def a_bit_behind_the_last_mantissa(it: Letter) -> None:
    it.recode(it.moved({5: 1}))
    it.head["count"], it.rest = 1, b"\0\0\1"


@attack(FormatError)
def an_exponent_above_any(it: Letter) -> None:
    it.recode(it.moved({5: 3}))  # one above the commonest
    it.head["scale"], it.head["count"], it.rest = 255, 1, bytes(3)


@attack(FormatError)
def an_exponent_a_step_leads_far_beyond(it: Letter) -> None:
    it.recode(it.moved({5: 32767, 6: 32766}))
    it.head["count"], it.rest = 2, bytes(6)


@attack(FormatError)
def an_infinite_value(it: Letter) -> None:
    it.recode(it.moved({5: 1}))
    it.head["scale"], it.head["count"], it.rest = 255, 1, bytes(3)


@attack(FormatError)
def a_value_that_is_no_number(it: Letter) -> None:
    it.recode(it.moved({5: -1}))
    it.head["scale"], it.head["count"], it.rest = 255, 1, b"\1\0\0"


ATTACKS += [
    Attack(FormatError, "mantissas cut short", lambda it: put(it, rest=it.rest[:-1])),
    Attack(FormatError, "mantissas with a byte too many", lambda it: put(it, rest=it.rest + b"\0")),
    Attack(FormatError, "mantissas that are missing", lambda it: put(it, rest=b"")),
    Attack(FormatError, "an exponent below any", lambda it: put(it, {"scale": -255})),
    Attack(FormatError, "a commonest exponent that makes all infinite", lambda it: put(it, {"scale": 255})),
]


# -- compact values ------------------------------------------------------------------------------------------------


ATTACKS += [
    Attack(
        FormatError,
        "a compact payload with mantissas",
        lambda it: put(it, rest=bytes(23 * it.head["count"] // 8)),
        on="compact",
    ),
    Attack(
        FormatError, "a compact payload with a byte behind its coded part", lambda it: put(it, rest=b"\0"), on="compact"
    ),
    Attack(FormatError, "a unit of 2 to the 128", lambda it: put(it, {"scale": 128}), on="compact"),
    Attack(FormatError, "a unit of 2 to the minus 150", lambda it: put(it, {"scale": -150}), on="compact"),
    Attack(FormatError, "a compact payload that says it is exact", lambda it: put(it, {"mode": "exact"}), on="compact"),
    Attack(FormatError, "an exact payload that says it is compact", lambda it: put(it, {"mode": "compact"})),
]


# -- dense values --------------------------------------------------------------------------------------------------


@attack(FormatError, on="dense")
def a_sparse_payload_among_dense_ones(it: Letter) -> None:
    sparse = letter("exact")
    it.head, it.coded, it.rest = sparse.head, sparse.coded, sparse.rest


ATTACKS += [
    Attack(
        FormatError,
        "a dense payload among sparse ones",
        lambda it: put(it, {"mode": "dense", "count": SIZE}, coded=b"", rest=bytes(4 * SIZE)),
    ),
    Attack(FormatError, "a dense payload cut short", lambda it: put(it, rest=it.rest[:-4]), on="dense"),
    Attack(
        FormatError, "a dense payload with a number too many", lambda it: put(it, rest=it.rest + bytes(4)), on="dense"
    ),
    Attack(FormatError, "a dense payload that ends inside a number", lambda it: put(it, rest=it.rest[:-1]), on="dense"),
    Attack(FormatError, "a dense payload that is empty", lambda it: put(it, rest=b""), on="dense"),
    Attack(
        FormatError,
        "a dense payload of some of its entries",
        lambda it: put(it, {"count": SIZE - 1}, rest=it.rest[:-4]),
        on="dense",
    ),
    Attack(
        FormatError,
        "a dense payload with a coded part",
        lambda it: put(it, coded=it.rest[:400], rest=it.rest[400:]),
        on="dense",
    ),
    Attack(
        FormatError,
        "a dense payload with a nan",
        lambda it: put(it, rest=it.rest[:400] + np.array([np.nan], "<f4").tobytes() + it.rest[404:]),
        on="dense",
    ),
    Attack(
        FormatError,
        "a dense payload with an infinity",
        lambda it: put(it, rest=np.array([-np.inf], "<f4").tobytes() + it.rest[4:]),
        on="dense",
    ),
    Attack(
        FormatError,
        "a dense payload with a signalling nan",
        lambda it: put(it, rest=it.rest[:-4] + np.array([0x7F800001], "<u4").tobytes()),
        on="dense",
    ),
]


# -- at random -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [100, slow(1000)])
@pytest.mark.parametrize("mode", ["exact", "compact"])
def test_a_spoilt_coded_part_with_hashes_that_fit_is_refused_or_read_as_finite_numbers_in_order(
    mode: str, times: int
) -> None:
    coder, _, _ = victim(mode)
    rng = np.random.default_rng(0)
    for _ in range(times):
        it = letter(mode)
        sections = forge.read_part(it.coded, LAYOUT).sections()
        spoilt = [bytearray(section) for section in sections]
        for _ in range(int(rng.integers(1, 3, endpoint=True))):
            section = spoilt[rng.integers(0, len(spoilt))]
            if section:
                section[rng.integers(0, len(section))] ^= 1 << int(rng.integers(0, 8))
        it.coded = forge.read_part(it.coded, LAYOUT).seal([bytes(section) for section in spoilt])
        try:
            found = coder.decode(it.write(), "ada", 0, SIZE)[1]
        except FormatError:
            continue
        assert np.isfinite(found.values).all()
        assert (np.diff(found.positions) > 0).all()
        assert 0 <= found.positions.min() <= found.positions.max() < SIZE


@pytest.mark.parametrize("mode", MODES)
def test_any_number_in_any_field_of_the_head_is_refused_or_makes_no_difference_but_to_scale(mode: str) -> None:
    coder, sent, _ = victim(mode)
    numbers = [-(1 << 63), -256, -1, 0, 1, 2, 127, 255, 256, SIZE - 1, SIZE + 1, 1 << 31, 1 << 46, 1 << 63, 1 << 64]
    for name in INTEGERS:
        for number in numbers:
            it = letter(mode)
            it.write()
            if it.head[name] == number:
                continue
            it.say(**{name: number})
            try:
                found = coder.decode(it.write(), "ada", 0, SIZE)[1]
            except FormatError:
                continue
            assert name == "scale"
            assert np.array_equal(found.positions, sent.positions)
