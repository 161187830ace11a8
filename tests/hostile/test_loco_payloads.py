"""Each function below spoils a good payload of a trainer in one way; another must refuse it by name, and at once.

Whatever an attack does, the hash is made to fit again, unless it is what the attack is about: trainers trust each
other, but not their disks and networks. `pytest --collect-only -q` lists every attack with the error
it expects.
"""

import hashlib
import inspect
import json
import time
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


Spoil = Callable[[Letter], bytes | memoryview | None]  # changes the letter, or returns what will be read


@dataclass(frozen=True)
class Attack:
    end: type[PulseError]
    spoil: Spoil
    on: str

    @property
    def name(self) -> str:
        return f"{self.spoil.__name__}-{self.end.__name__}"


ATTACKS: list[Attack] = []


def attack(end: type[PulseError], on: str = "exact") -> Callable[[Spoil], Spoil]:
    def register(spoil: Spoil) -> Spoil:
        ATTACKS.append(Attack(end, spoil, on))
        return spoil

    return register


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


@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_payload_is_refused_at_once(case: Attack) -> None:
    coder, sent, good = victim(case.on)
    spoilt = letter(case.on)
    data = case.spoil(spoilt)
    if data is None:
        data = spoilt.write()
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


@pytest.mark.parametrize("mode", ["exact", "compact", "dense"])
def test_an_unspoilt_letter_is_the_payload(mode: str) -> None:
    assert letter(mode).write() == victim(mode)[2]


def test_every_function_that_spoils_a_letter_is_an_attack_with_an_expected_error() -> None:
    """A function without `@attack(...)` would never run."""
    signatures = {name: inspect.signature(it) for name, it in globals().items() if inspect.isfunction(it)}
    spoiling = [
        name
        for name, signature in signatures.items()
        if [p.annotation for p in signature.parameters.values()] == [Letter]
    ]
    assert spoiling == [case.spoil.__name__ for case in ATTACKS]


# -- the head ------------------------------------------------------------------------------------------------------


@attack(FormatError)
def an_empty_payload(it: Letter) -> bytes:
    return b""


@attack(FormatError)
def a_payload_without_a_newline(it: Letter) -> bytes:
    return canonical(it.head)


@attack(FormatError)
def a_payload_whose_head_is_longer_than_any(it: Letter) -> None:
    it.text = lambda head: canonical(head)[:-1] + b" " * 5000 + b"}"


@attack(FormatError)
def a_payload_of_a_gigabyte_without_a_head(it: Letter) -> memoryview:
    return np.zeros(1 << 30, np.uint8).data


@attack(FormatError)
def a_payload_whose_head_is_a_list(it: Letter) -> None:
    it.text = lambda head: canonical([head])


@attack(FormatError)
def a_payload_whose_head_is_not_text(it: Letter) -> None:
    it.text = lambda head: b"\xff" + canonical(head)


@attack(FormatError)
def a_payload_whose_head_is_nested_deep(it: Letter) -> None:
    it.text = lambda head: b'{"a":' * 800 + b"1" + b"}" * 800


@attack(FormatError)
def a_payload_that_says_a_key_twice(it: Letter) -> None:
    it.text = lambda head: canonical(head)[:-1] + b',"trainer":"ada"}'


@attack(FormatError)
def a_payload_with_its_keys_in_another_order(it: Letter) -> None:
    it.text = lambda head: json.dumps(dict(sorted(head.items(), reverse=True)), separators=(",", ":")).encode()


@attack(FormatError)
def a_payload_with_spaces_in_its_head(it: Letter) -> None:
    it.text = lambda head: json.dumps(head, sort_keys=True).encode()


@attack(FormatError)
def a_payload_with_an_escape_it_does_not_need(it: Letter) -> None:
    it.text = lambda head: canonical(head).replace(b'"ada"', b'"\\u0061da"')


@attack(FormatError)
def a_payload_with_minus_zero(it: Letter) -> None:
    it.text = lambda head: canonical(head).replace(b'"begin":0', b'"begin":-0')


@attack(FormatError)
def a_payload_with_a_field_more(it: Letter) -> None:
    it.head["more"] = 1


@attack(FormatError)
def a_payload_with_a_field_less(it: Letter) -> None:
    del it.head["terms"]


@attack(UnsupportedError)
def a_payload_without_a_format(it: Letter) -> None:
    del it.head["format"]


@attack(UnsupportedError)
def a_payload_of_another_format(it: Letter) -> None:
    it.head["format"] = "pulse-loco/2"


@attack(UnsupportedError)
def a_payload_whose_format_is_a_list(it: Letter) -> None:
    it.head["format"] = [it.head["format"]]


@attack(FormatError)
def a_payload_with_a_float_for_a_round(it: Letter) -> None:
    it.head["round"] = 5.0


@attack(FormatError)
def a_payload_with_true_for_a_number(it: Letter) -> None:
    it.head["fragment"] = True


@attack(FormatError)
def a_payload_with_text_for_a_number(it: Letter) -> None:
    it.head["count"] = str(it.head["count"])


@attack(FormatError)
def a_payload_with_nan_for_a_number(it: Letter) -> None:
    it.head["scale"] = float("nan")


@attack(FormatError)
def a_payload_with_null_for_a_hash(it: Letter) -> None:
    it.sealed, it.head["sha256"] = False, None


@attack(FormatError)
def a_payload_with_a_number_for_a_name(it: Letter) -> None:
    it.head["trainer"] = 1


@attack(FormatError)
def a_payload_of_a_round_below_zero(it: Letter) -> None:
    it.head["round"] = -5


@attack(FormatError)
def a_payload_of_fewer_than_no_entries(it: Letter) -> None:
    it.head["count"] = -1


@attack(FormatError)
def a_payload_that_begins_before_zero(it: Letter) -> None:
    it.head["begin"] = -1


@attack(FormatError)
def a_payload_with_a_coded_part_of_less_than_nothing(it: Letter) -> None:
    it.write()
    it.say(coded=-1)


@attack(FormatError)
def a_payload_of_a_round_of_three_thousand_digits(it: Letter) -> None:
    it.head["round"] = 10**3000


@attack(FormatError)
def a_payload_of_terms_of_three_thousand_digits(it: Letter) -> None:
    it.head["terms"] = 10**3000


@attack(LimitError)
def a_payload_that_ends_at_2_to_the_60(it: Letter) -> None:
    it.head["end"] = 1 << 60


@attack(FormatError)
def a_payload_that_ends_at_2_to_the_46(it: Letter) -> None:
    it.head["end"] = 1 << 46


@attack(LimitError)
def a_payload_that_ends_before_it_begins(it: Letter) -> None:
    it.head["begin"], it.head["end"] = SIZE, 0


@attack(LimitError)
def a_payload_of_more_entries_than_it_covers(it: Letter) -> None:
    it.head["count"] = SIZE + 1


@attack(LimitError)
def a_payload_of_2_to_the_60_entries(it: Letter) -> None:
    it.head["count"] = 1 << 60


@attack(LimitError)
def a_payload_with_a_name_too_long(it: Letter) -> None:
    it.head["trainer"] = "a" * 129


@attack(LimitError)
def a_payload_without_a_name(it: Letter) -> None:
    it.head["trainer"] = ""


@attack(FormatError)
def a_payload_with_half_a_character_for_a_name(it: Letter) -> None:
    it.head["trainer"] = "\ud800"


@attack(LimitError)
def a_payload_with_a_scale_beyond_any(it: Letter) -> None:
    it.head["scale"] = 256


@attack(LimitError)
def a_payload_with_a_scale_of_a_thousand_digits(it: Letter) -> None:
    it.head["scale"] = -(10**1000)


@attack(FormatError)
def a_payload_of_no_known_mode(it: Letter) -> None:
    it.head["mode"] = "sparse"


@attack(FormatError)
def a_payload_of_another_trainer(it: Letter) -> None:
    it.head["trainer"] = "bea"


@attack(FormatError)
def a_payload_of_another_fragment(it: Letter) -> None:
    it.head["fragment"] = 0


@attack(FormatError)
def a_payload_of_the_round_before(it: Letter) -> None:
    it.head["round"] = 4


@attack(FormatError)
def a_payload_of_the_round_after(it: Letter) -> None:
    it.head["round"] = 6


@attack(BaseMismatchError)
def a_payload_from_another_state(it: Letter) -> None:
    it.head["base"] = "0" * 64


@attack(BaseMismatchError)
def a_payload_from_a_state_without_a_name(it: Letter) -> None:
    it.head["base"] = ""


@attack(FormatError)
def a_payload_of_other_entries(it: Letter) -> None:
    it.head["end"] = SIZE - 1


@attack(FormatError)
def a_payload_of_no_entries_for_all(it: Letter) -> None:
    it.head["end"] = it.head["count"] = 0


@attack(FormatError)
def a_payload_of_several_updates_in_the_place_of_one(it: Letter) -> None:
    it.head["terms"] = 3


@attack(FormatError)
def a_payload_of_no_updates(it: Letter) -> None:
    it.head["terms"] = 0


# -- the bytes after the head --------------------------------------------------------------------------------------


@attack(ChecksumError)
def a_payload_with_another_hash(it: Letter) -> None:
    it.write()
    it.sealed, it.head["sha256"] = False, "0" * 64


@attack(ChecksumError)
def a_payload_with_its_hash_in_capitals(it: Letter) -> None:
    it.write()
    it.sealed, it.head["sha256"] = False, it.head["sha256"].upper()


@attack(ChecksumError)
def a_payload_cut_short(it: Letter) -> bytes:
    return it.write()[:-1]


@attack(ChecksumError)
def a_payload_with_a_byte_behind_it(it: Letter) -> bytes:
    return it.write() + b"\0"


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
def a_coded_part_that_is_missing(it: Letter) -> None:
    it.coded = b""


@attack(FormatError)
def a_coded_part_that_is_rubbish(it: Letter) -> None:
    it.coded = bytes(range(256))


@attack(FormatError)
def a_coded_part_where_nothing_was_sent(it: Letter) -> None:
    it.head["count"] = 0


@attack(FormatError)
def mantissas_where_nothing_was_sent(it: Letter) -> None:
    it.head["count"], it.coded = 0, b""


@attack(FormatError)
def one_entry_more_than_were_coded(it: Letter) -> None:
    it.head["count"] += 1


@attack(FormatError)
def one_entry_less_than_were_coded(it: Letter) -> None:
    it.head["count"] -= 1


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


# -- exact values --------------------------------------------------------------------------------------------------


@attack(FormatError)
def mantissas_cut_short(it: Letter) -> None:
    it.rest = it.rest[:-1]


@attack(FormatError)
def mantissas_with_a_byte_too_many(it: Letter) -> None:
    it.rest += b"\0"


@attack(FormatError)
def mantissas_that_are_missing(it: Letter) -> None:
    it.rest = b""


@attack(FormatError)
def a_bit_behind_the_last_mantissa(it: Letter) -> None:
    it.recode(it.moved({5: 1}))
    it.head["count"], it.rest = 1, b"\0\0\1"


@attack(FormatError)
def an_exponent_below_any(it: Letter) -> None:
    it.head["scale"] = -255


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


@attack(FormatError)
def a_commonest_exponent_that_makes_all_infinite(it: Letter) -> None:
    it.head["scale"] = 255


# -- compact values ------------------------------------------------------------------------------------------------


@attack(FormatError, on="compact")
def a_compact_payload_with_mantissas(it: Letter) -> None:
    it.rest = bytes(23 * it.head["count"] // 8)


@attack(FormatError, on="compact")
def a_compact_payload_with_a_byte_behind_its_coded_part(it: Letter) -> None:
    it.rest = b"\0"


@attack(FormatError, on="compact")
def a_unit_of_2_to_the_128(it: Letter) -> None:
    it.head["scale"] = 128


@attack(FormatError, on="compact")
def a_unit_of_2_to_the_minus_150(it: Letter) -> None:
    it.head["scale"] = -150


@attack(FormatError, on="compact")
def a_compact_payload_that_says_it_is_exact(it: Letter) -> None:
    it.head["mode"] = "exact"


@attack(FormatError)
def an_exact_payload_that_says_it_is_compact(it: Letter) -> None:
    it.head["mode"] = "compact"


# -- dense values --------------------------------------------------------------------------------------------------


@attack(FormatError)
def a_dense_payload_among_sparse_ones(it: Letter) -> None:
    it.head["mode"], it.head["count"], it.coded, it.rest = "dense", SIZE, b"", bytes(4 * SIZE)


@attack(FormatError, on="dense")
def a_sparse_payload_among_dense_ones(it: Letter) -> None:
    sparse = letter("exact")
    it.head, it.coded, it.rest = sparse.head, sparse.coded, sparse.rest


@attack(FormatError, on="dense")
def a_dense_payload_cut_short(it: Letter) -> None:
    it.rest = it.rest[:-4]


@attack(FormatError, on="dense")
def a_dense_payload_with_a_number_too_many(it: Letter) -> None:
    it.rest += bytes(4)


@attack(FormatError, on="dense")
def a_dense_payload_that_ends_inside_a_number(it: Letter) -> None:
    it.rest = it.rest[:-1]


@attack(FormatError, on="dense")
def a_dense_payload_that_is_empty(it: Letter) -> None:
    it.rest = b""


@attack(FormatError, on="dense")
def a_dense_payload_of_some_of_its_entries(it: Letter) -> None:
    it.head["count"], it.rest = SIZE - 1, it.rest[:-4]


@attack(FormatError, on="dense")
def a_dense_payload_with_a_coded_part(it: Letter) -> None:
    it.coded, it.rest = it.rest[:400], it.rest[400:]


@attack(FormatError, on="dense")
def a_dense_payload_with_a_nan(it: Letter) -> None:
    it.rest = it.rest[:400] + np.array([np.nan], "<f4").tobytes() + it.rest[404:]


@attack(FormatError, on="dense")
def a_dense_payload_with_an_infinity(it: Letter) -> None:
    it.rest = np.array([-np.inf], "<f4").tobytes() + it.rest[4:]


@attack(FormatError, on="dense")
def a_dense_payload_with_a_signalling_nan(it: Letter) -> None:
    it.rest = it.rest[:-4] + np.array([0x7F800001], "<u4").tobytes()


# -- at random -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["exact", "compact"])
def test_a_spoilt_coded_part_with_hashes_that_fit_is_refused_or_read_as_finite_numbers_in_order(mode: str) -> None:
    coder, _, _ = victim(mode)
    rng = np.random.default_rng(0)
    for _ in range(300):
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


@pytest.mark.parametrize("mode", ["exact", "compact", "dense"])
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
