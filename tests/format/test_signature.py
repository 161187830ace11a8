"""Who wrote a record: every rule of a signature, and that nothing of a record is believed before them."""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError, SignatureError
from pulsesync.format import manifest as manifests
from pulsesync.format import signature
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.format.signature import Delegation, SigningKey

RUN = "ab" * 16
KEY, HELPER, STRANGER = SigningKey("11" * 32), SigningKey("22" * 32), SigningKey("33" * 32)
TRUST = {KEY.public}
VERSION = Manifest(
    run=RUN,
    version=32,
    step=70,
    epoch=0,
    index=32,
    base=BaseRef(31, "cd" * 32),
    layout="12" * 32,
    parts=(PartRef("34" * 32, 1000),),
    digest="56" * 32,
    history=None,
    created=1_800_000_000,
)
SQUASH = replace(VERSION, kind=RecordKind.SQUASH, base=BaseRef(0, "cd" * 32))
ANCHOR = replace(VERSION, kind=RecordKind.ANCHOR, base=None)
DELEGATE = SigningKey(HELPER.secret, KEY.delegate(RUN, HELPER.public))
SIGNED = signature.sign(VERSION.build(), KEY)


def canonical(table: Any) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def second_line(data: bytes) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(data.split(b"\n")[1])
    return table


# -- what is accepted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [VERSION, SQUASH, ANCHOR], ids=lambda r: r.kind)
def test_a_trusted_key_may_write_every_kind_of_record(record: Manifest) -> None:
    data = signature.sign(record.build(), KEY)
    assert signature.check(data, TRUST) == record.build()
    assert manifests.parse(data, TRUST) == record


def test_a_delegate_may_write_a_squash() -> None:
    assert manifests.parse(signature.sign(SQUASH.build(), DELEGATE), TRUST) == SQUASH


def test_any_of_several_trusted_keys_will_do() -> None:
    data = signature.sign(VERSION.build(), STRANGER)
    assert manifests.parse(data, {KEY.public, STRANGER.public}) == VERSION


def test_without_a_key_to_trust_a_signature_may_be_there_or_not() -> None:
    assert manifests.parse(VERSION.build()) == manifests.parse(SIGNED) == VERSION
    assert manifests.parse(signature.sign(SQUASH.build(), STRANGER)) == SQUASH


def test_the_bytes_of_a_signature_are_these() -> None:
    """RFC 8032's first test vector as the key; the signed line and the second line are spelt out."""
    key = SigningKey("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert key.public == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    line = b'{"a":1}\n'
    assert signature.sign(line, key) == line + (f'{{"key":"{key.public}","signature":"{key.sign(line)}"}}\n'.encode())


def test_the_bytes_of_a_delegation_are_these() -> None:
    said = f'{{"format":"pulse-delegation/1-draft","key":"{HELPER.public}","kind":"squash","run":"{RUN}"}}\n'.encode()
    assert KEY.delegate(RUN, HELPER.public) == Delegation(KEY.public, KEY.sign(said))
    line = SQUASH.build()
    assert signature.sign(line, DELEGATE) == line + (
        f'{{"delegation":{{"by":"{KEY.public}","signature":"{KEY.sign(said)}"}},'
        f'"key":"{HELPER.public}","signature":"{HELPER.sign(line)}"}}\n'.encode()
    )


# -- by whom -------------------------------------------------------------------------------------------------------


def refused(data: bytes, trust: set[str] = TRUST, match: str | None = None) -> SignatureError:
    with pytest.raises(SignatureError, match=match) as caught:
        signature.check(data, trust)
    with pytest.raises(SignatureError):
        manifests.parse(data, trust)
    return caught.value


def test_a_record_without_a_signature_is_refused() -> None:
    refused(VERSION.build(), match="not signed")


def test_a_record_is_refused_where_nobody_is_trusted() -> None:
    refused(SIGNED, trust=set())


def test_a_record_signed_by_another_key_is_refused_and_the_key_is_named() -> None:
    assert refused(signature.sign(VERSION.build(), STRANGER), match="not trusted").public_key == STRANGER.public


def test_a_changed_line_is_refused() -> None:
    refused(SIGNED.replace(b'"step":70', b'"step":71'), match="does not fit")


def test_a_trusted_keys_name_on_a_strangers_signature_is_refused() -> None:
    stranger = second_line(signature.sign(VERSION.build(), STRANGER))
    refused(VERSION.build() + canonical({**stranger, "key": KEY.public}), match="does not fit")


def test_a_signature_of_another_record_is_refused() -> None:
    refused(replace(VERSION, version=33).build() + canonical(second_line(SIGNED)), match="does not fit")


def test_a_signature_of_the_line_without_its_newline_is_refused() -> None:
    line = VERSION.build()
    refused(line + canonical({"key": KEY.public, "signature": KEY.sign(line[:-1])}), match="does not fit")


def test_a_key_that_is_no_point_of_the_curve_is_refused() -> None:
    for key in ("ff" * 32, "00" * 32, "02" + "00" * 31):
        refused(VERSION.build() + canonical({**second_line(SIGNED), "key": key}), match="does not fit")


@given(st.integers(0, len(VERSION.build()) - 2), st.integers(1, 255))
def test_a_changed_byte_of_the_line_is_never_accepted(at: int, flip: int) -> None:
    data = bytearray(SIGNED)
    data[at] ^= flip
    with pytest.raises((SignatureError, FormatError)):
        signature.check(bytes(data), TRUST)


@given(st.integers(len(VERSION.build()), len(SIGNED) - 1), st.integers(1, 255))
def test_a_changed_byte_of_the_second_line_is_never_accepted(at: int, flip: int) -> None:
    data = bytearray(SIGNED)
    data[at] ^= flip
    with pytest.raises((SignatureError, FormatError)):
        signature.check(bytes(data), TRUST)


def test_nothing_of_a_record_is_parsed_before_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(manifests, "load_json", never)
    monkeypatch.setattr(signature, "load_json", never)
    refused(signature.sign(VERSION.build(), STRANGER))
    refused(VERSION.build())


# -- on whose behalf -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [VERSION, ANCHOR], ids=lambda r: r.kind)
def test_a_delegate_may_write_nothing_but_squashes(record: Manifest) -> None:
    refused(signature.sign(record.build(), DELEGATE), match="not allowed")


def test_a_delegation_for_another_run_is_refused() -> None:
    key = SigningKey(HELPER.secret, KEY.delegate("cd" * 16, HELPER.public))
    refused(signature.sign(SQUASH.build(), key), match="not allowed")


def test_a_delegation_for_another_key_is_refused() -> None:
    key = SigningKey(STRANGER.secret, KEY.delegate(RUN, HELPER.public))
    refused(signature.sign(SQUASH.build(), key), match="not allowed")


def test_a_delegation_for_another_kind_is_refused() -> None:
    said = canonical({"format": signature.DELEGATION, "key": HELPER.public, "kind": "anchor", "run": RUN})
    key = SigningKey(HELPER.secret, Delegation(KEY.public, KEY.sign(said)))
    for record in (SQUASH, ANCHOR):
        refused(signature.sign(record.build(), key), match="not allowed")


def test_a_delegation_by_a_stranger_is_refused() -> None:
    key = SigningKey(HELPER.secret, STRANGER.delegate(RUN, HELPER.public))
    refused(signature.sign(SQUASH.build(), key), match="not trusted")


def test_a_delegation_by_a_stranger_in_the_name_of_a_trusted_key_is_refused() -> None:
    forged = Delegation(KEY.public, STRANGER.delegate(RUN, HELPER.public).signature)
    refused(signature.sign(SQUASH.build(), SigningKey(HELPER.secret, forged)), match="not allowed")


def test_a_delegate_cannot_delegate() -> None:
    further = SigningKey(STRANGER.secret, HELPER.delegate(RUN, STRANGER.public))
    refused(signature.sign(SQUASH.build(), further), match="not trusted")


def test_a_delegate_without_its_delegation_is_refused() -> None:
    refused(signature.sign(SQUASH.build(), HELPER), match="not trusted")


def test_a_delegates_own_signature_must_fit_too() -> None:
    line = canonical({**second_line(signature.sign(SQUASH.build(), DELEGATE)), "signature": "00" * 64})
    refused(SQUASH.build() + line, match="does not fit")


def test_the_key_of_a_delegation_can_be_taken_out_of_trust_with_the_runs() -> None:
    refused(signature.sign(SQUASH.build(), DELEGATE), trust={STRANGER.public}, match="not trusted")


@pytest.mark.parametrize(
    "line",
    [
        b"not json\n",
        b"[]\n",
        b'{"kind":"squash","kind":"squash"}\n',
        b'{"kind":"squash","run":NaN}\n',
        b'{"kind":"squash","run":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
        b'{"kind":"squash","run":' + b"9" * 100_000 + b"}\n",
        b'{"kind":["squash"],"run":{}}\n',
        b"\xff\xfe\n",
    ],
    ids=["no json", "list", "key twice", "nan", "deep", "long number", "other kinds", "no text"],
)
def test_a_delegate_who_signs_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(FormatError):
        signature.check(signature.sign(line, DELEGATE), TRUST)


# -- how it is written ---------------------------------------------------------------------------------------------


def nested(**fields: Any) -> dict[str, Any]:
    return {"by": KEY.public, "signature": "00" * 64, **fields}


LINE, GOOD = VERSION.build(), second_line(SIGNED)
BAD_LINES: dict[str, bytes] = {
    "an empty second line": b"\n",
    "no newline": canonical(GOOD)[:-1],
    "a third line": canonical(GOOD) + b"\n",
    "two signatures": canonical(GOOD) * 2,
    "a record behind it": canonical(GOOD) + LINE,
    "spaces": json.dumps(GOOD, sort_keys=True).encode() + b"\n",
    "a space in front": b" " + canonical(GOOD),
    "another order": json.dumps(dict(reversed(GOOD.items())), separators=(",", ":")).encode() + b"\n",
    "an escape": canonical(GOOD).replace(b'"key"', b'"\\u006bey"'),
    "a key twice": canonical(GOOD).replace(b'{"key"', b'{"key":"","key"'),
    "a carriage return": canonical(GOOD)[:-1] + b"\r\n",
    "utf-16": canonical(GOOD).decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + canonical(GOOD),
    "capitals": canonical({**GOOD, "key": KEY.public.upper()}),
    "a short key": canonical({**GOOD, "key": KEY.public[:-1]}),
    "a key with a newline": canonical({**GOOD, "key": KEY.public + "\n"}),
    "a long signature": canonical({**GOOD, "signature": GOOD["signature"] + "00"}),
    "a number for a key": canonical({**GOOD, "key": 5}),
    "null for a signature": canonical({**GOOD, "signature": None}),
    "no key": canonical({"signature": GOOD["signature"]}),
    "no signature": canonical({"key": KEY.public}),
    "a field more": canonical({**GOOD, "more": 1}),
    "no object": canonical([GOOD]),
    "text": b'"signature"\n',
    "null": b"null\n",
    "no json": b"signed, honestly\n",
    "not text": b"\xff" * 40 + b"\n",
    "deep": b"[" * 500 + b"]" * 500 + b"\n",
    "nan": canonical({**GOOD, "key": float("nan")}),
    "null for a delegation": canonical({**GOOD, "delegation": None}),
    "text for a delegation": canonical({**GOOD, "delegation": "me"}),
    "a list for a delegation": canonical({**GOOD, "delegation": [KEY.public]}),
    "a delegation by nobody": canonical({**GOOD, "delegation": {"signature": "00" * 64}}),
    "a delegation without a signature": canonical({**GOOD, "delegation": {"by": KEY.public}}),
    "a delegation by no key": canonical({**GOOD, "delegation": nested(by="me")}),
    "a delegation with a short signature": canonical({**GOOD, "delegation": nested(signature="00")}),
    "a delegation with a field more": canonical({**GOOD, "delegation": nested(more=1)}),
}


@pytest.mark.parametrize("rest", BAD_LINES.values(), ids=BAD_LINES.keys())
def test_another_way_to_write_a_second_line_is_refused(rest: bytes) -> None:
    for read in (signature.check_form, lambda d: signature.check(d, TRUST), manifests.parse):
        with pytest.raises(FormatError) as caught:
            read(LINE + rest)
        assert type(caught.value) is not SignatureError


@pytest.mark.parametrize("rest", [b" " * 1025, canonical({**GOOD, "more": "x" * 1000}), b"\n" * (1 << 20)])
def test_a_second_line_beyond_its_limit_is_refused_unread(rest: bytes) -> None:
    for read in (signature.check_form, lambda d: signature.check(d, TRUST)):
        with pytest.raises(LimitError, match="at most"):
            read(LINE + rest)


def test_the_longest_second_line_is_within_its_limit() -> None:
    assert len(signature.split(signature.sign(LINE, DELEGATE))[1]) <= signature.MAX_BYTES


@pytest.mark.parametrize("data", [b"", LINE[:-1], b"x" * 1000])
def test_a_record_without_a_newline_is_cut_short(data: bytes) -> None:
    for read in (signature.check_form, lambda d: signature.check(d, TRUST)):
        with pytest.raises(FormatError, match="cut short"):
            read(data)


@given(st.binary(max_size=300))
def test_noise_is_never_signed(data: bytes) -> None:
    for read in (signature.check_form, lambda d: signature.check(d, TRUST)):
        with suppress(FormatError):
            assert read(LINE + data) == LINE
            assert not data


# -- keys ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secret", ["", "1" * 63, "1" * 65, "G" * 64, "AB" * 32, "11" * 32 + "\n"])
def test_what_is_no_key_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        SigningKey(secret)


@pytest.mark.parametrize("show", [repr, str, lambda key: f"{key}"])
def test_a_secret_is_not_shown(show: Callable[[SigningKey], str]) -> None:
    assert KEY.secret not in show(KEY)
    assert KEY.public in show(KEY)


def test_a_generated_key_signs_and_no_two_are_the_same() -> None:
    first, second = SigningKey.generate(), SigningKey.generate()
    assert first.secret != second.secret
    assert signature.check(signature.sign(LINE, first), {first.public}) == LINE


# -- whom to trust -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["", " ", [], (), frozenset(), [""], ["ab" * 32, ""], "abc"])
def test_trust_that_is_given_must_hold_public_keys(keys: Any) -> None:
    with pytest.raises(ValueError, match="trust must be"):
        signature.trusted(keys)


def test_trust_is_one_key_or_several_or_not_asked_for() -> None:
    assert signature.trusted(None) is None
    assert signature.trusted(KEY.public) == frozenset({KEY.public})
    assert signature.trusted(KEY.public.upper()) == frozenset({KEY.public})
    assert signature.trusted([KEY.public, STRANGER.public]) == frozenset({KEY.public, STRANGER.public})
