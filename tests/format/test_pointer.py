"""The record of a pointer's move: every field comes back, and nothing else is read."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError, SignatureError, UnsupportedError
from pulsesync.format import manifest as manifests
from pulsesync.format import pointer as pointers
from pulsesync.format import signature
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import SigningKey
from tests.format.test_manifest import SQUASH, hashes, whole

KEY, OTHER = SigningKey("11" * 32), SigningKey("22" * 32)
MOVE = Pointer("ab" * 16, "stable", 3, 120, "cd" * 32, 1_800_000_000)
NAMES = ["a", "0", "stable", "eu-west.1_b", "a" * 64, "a-", "a_"]
NO_NAMES = [
    "",
    ".",
    "..",
    "-a",
    "_a",
    "A",
    "Stable",
    "a/b",
    "../a",
    "a b",
    "a\n",
    "a\0",
    "größe",
    "a" * 65,
    "a.",
    "a" * 63 + ".",
]


def written(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def table() -> dict[str, object]:
    found: dict[str, object] = json.loads(MOVE.build())
    return found


@given(st.from_regex(pointers.NAME, fullmatch=True), whole, whole, hashes, whole)
def test_a_move_comes_back(name: str, number: int, version: int, digest: str, created: int) -> None:
    move = Pointer("12" * 16, name, number, version, digest, created)
    assert pointers.parse(move.build()) == move


def test_a_signed_move_comes_back_with_the_key_that_signed_it() -> None:
    found = pointers.parse(signature.sign(MOVE.build(), KEY), {KEY.public})
    assert (found, found.signed_by) == (MOVE, KEY.public)
    assert pointers.parse(MOVE.build()).signed_by is None


def test_a_move_without_a_signature_is_refused_under_trust() -> None:
    with pytest.raises(SignatureError):
        pointers.parse(MOVE.build(), {KEY.public})


def test_a_move_that_another_key_signed_is_refused() -> None:
    with pytest.raises(SignatureError):
        pointers.parse(signature.sign(MOVE.build(), OTHER), {KEY.public})


def test_a_signature_of_another_move_is_refused() -> None:
    other = replace(MOVE, version=7).build()
    block = signature.sign(other, KEY)[len(other) :]
    with pytest.raises(SignatureError):
        pointers.parse(MOVE.build() + block, {KEY.public})


def test_a_delegate_may_not_move_pointers() -> None:
    delegate = SigningKey(OTHER.secret, KEY.delegate(MOVE.run, OTHER.public))
    for line in (MOVE.build(), written({**table(), "kind": "squash"})):
        with pytest.raises(FormatError):
            pointers.parse(signature.sign(line, delegate), {KEY.public})


def test_neither_a_manifest_nor_a_pointer_is_read_as_the_other() -> None:
    with pytest.raises(FormatError):
        pointers.parse(SQUASH.build())
    with pytest.raises(UnsupportedError):
        manifests.parse(MOVE.build())


@pytest.mark.parametrize("field", list(json.loads(MOVE.build())))
def test_a_missing_field_is_refused(field: str) -> None:
    fields = table()
    del fields[field]
    with pytest.raises(FormatError):
        pointers.parse(written(fields))


@pytest.mark.parametrize("field", list(json.loads(MOVE.build())))
@pytest.mark.parametrize("value", [-1, (1 << 53) + 1, 1.5, True, None, "", "X", [], {}, [1]], ids=repr)
def test_a_field_of_another_kind_is_refused(field: str, value: object) -> None:
    with pytest.raises(FormatError):
        pointers.parse(written({**table(), field: value}))


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="the field 'more'"):
        pointers.parse(written({**table(), "more": 1}))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_may_be_this(name: str) -> None:
    assert pointers.check_name(name) == name


@pytest.mark.parametrize("name", NO_NAMES, ids=repr)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be 1 to 64 lower-case letters"):
        pointers.check_name(name)
    with pytest.raises(FormatError):
        pointers.parse(written({**table(), "name": name}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        MOVE.build()[:-1],
        MOVE.build() + b"\n",
        MOVE.build() + b"a signature\n",
        MOVE.build() + MOVE.build(),
        MOVE.build().replace(b",", b", ", 1),
        MOVE.build().replace(b"stable", b"\\u0073table"),
        MOVE.build().replace(b'"number":3', b'"number":3,"number":3'),
        MOVE.build().replace(b'"number":3', b'"number":03'),
        MOVE.build().replace(b'"number":3', b'"number":NaN'),
        MOVE.build().replace(b'"number":3', b'"number":' + b"9" * 3000),
        b"[" * 4000 + b"\n",
    ],
)
def test_what_is_not_written_as_a_move_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        pointers.parse(data)


def test_another_format_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        pointers.parse(written({**table(), "format": "pulse-pointer/2"}))


def test_a_move_of_the_draft_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"before pulsesync 0\.1\.0.*new run"):
        pointers.parse(written({**table(), "format": "pulse-pointer/1-draft"}))


def test_a_field_that_is_not_known_is_ignored_only_if_its_name_says_that_it_may_be() -> None:
    assert pointers.parse(written({**table(), "x-note": "the evaluation passed", "x-": "\ud800"})) == MOVE
    with pytest.raises(UnsupportedError, match=r"the field 'note'.*Upgrade"):
        pointers.parse(written({**table(), "note": "the evaluation passed"}))
    with pytest.raises(FormatError, match="must be a string"):
        pointers.parse(written({**table(), "x-note": 1.5}))


def test_an_object_too_large_is_refused_unread() -> None:
    with pytest.raises(LimitError, match="at most"):
        pointers.parse(bytes(pointers.MAX_BYTES + 1))


@given(st.binary(max_size=60))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        pointers.parse(data)


@given(st.integers(0, len(MOVE.build()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_makes_another_canonical_move(at: int, flip: int) -> None:
    data = bytearray(MOVE.build())
    data[at] ^= flip
    with suppress(FormatError):
        assert pointers.parse(bytes(data)).build() == data


@given(st.integers(0, len(signature.sign(MOVE.build(), KEY)) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_signed_move_is_refused(at: int, flip: int) -> None:
    data = bytearray(signature.sign(MOVE.build(), KEY))
    data[at] ^= flip
    with pytest.raises(FormatError):
        pointers.parse(bytes(data), {KEY.public})
