"""Who wrote a record: every rule of a signature, and that nothing of a record is believed before them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, SignatureError, UnsupportedError
from pulsesync.format import manifest as manifests
from pulsesync.format import signature
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.format.signature import Delegation, SigningKey
from tests.records import table_of, write

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


def block_of(data: bytes, record: Manifest = VERSION) -> bytes:
    """The signature that follows a record."""
    return data[len(record.build()) :]


# -- what is accepted ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [VERSION, SQUASH, ANCHOR], ids=lambda r: r.kind)
def test_a_trusted_key_may_write_every_kind_of_record(record: Manifest) -> None:
    assert manifests.parse(signature.sign(record.build(), KEY), TRUST) == record


def test_a_delegate_may_write_a_squash() -> None:
    assert manifests.parse(signature.sign(SQUASH.build(), DELEGATE), TRUST) == SQUASH


def test_any_of_several_trusted_keys_will_do() -> None:
    data = signature.sign(VERSION.build(), STRANGER)
    assert manifests.parse(data, {KEY.public, STRANGER.public}) == VERSION


def test_without_a_key_to_trust_a_signature_may_be_there_or_not() -> None:
    assert manifests.parse(VERSION.build()) == manifests.parse(SIGNED) == VERSION
    assert manifests.parse(signature.sign(SQUASH.build(), STRANGER)) == SQUASH


def test_the_bytes_of_a_signature_are_these() -> None:
    """RFC 8032's first test vector as the key; what follows the record is spelt out."""
    key = SigningKey("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    assert key.public == "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert key.sign(b"").startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155")
    assert signature.sign(b"record", key) == b"record" + bytes.fromhex(key.public + key.sign(b"record"))


def test_the_bytes_of_a_delegation_are_these() -> None:
    said = f'{{"format":"pulse-delegation/1","key":"{HELPER.public}","kind":"squash","run":"{RUN}"}}\n'.encode()
    assert KEY.delegate(RUN, HELPER.public) == Delegation(KEY.public, KEY.sign(said))
    record = SQUASH.build()
    block = HELPER.public + HELPER.sign(record) + KEY.public + KEY.sign(said)
    assert signature.sign(record, DELEGATE) == record + bytes.fromhex(block)


# -- by whom -------------------------------------------------------------------------------------------------------


def refused(data: bytes, trust: set[str] = TRUST, match: str | None = None) -> SignatureError:
    with pytest.raises(SignatureError, match=match) as caught:
        manifests.parse(data, trust)
    return caught.value


def test_a_record_without_a_signature_is_refused() -> None:
    refused(VERSION.build(), match="not signed")


def test_a_record_is_refused_where_nobody_is_trusted() -> None:
    refused(SIGNED, trust=set())


def test_a_record_signed_by_another_key_is_refused_and_the_key_is_named() -> None:
    assert refused(signature.sign(VERSION.build(), STRANGER), match="not trusted").public_key == STRANGER.public


def test_a_record_that_was_changed_and_has_a_good_checksum_is_refused() -> None:
    refused(replace(VERSION, step=71).build() + block_of(SIGNED), match="not valid for this record")


def test_a_trusted_keys_name_on_a_strangers_signature_is_refused() -> None:
    stranger = block_of(signature.sign(VERSION.build(), STRANGER))
    refused(VERSION.build() + bytes.fromhex(KEY.public) + stranger[32:], match="not valid for this record")


def test_extensions_are_signed_although_they_are_ignored() -> None:
    table = table_of(VERSION) | {"extensions": [(1, b"a note")]}
    data = signature.sign(write(table), KEY)
    assert manifests.parse(data, TRUST) == VERSION
    for other in ({"extensions": [(1, b"a lie.")]}, {"extensions": [(3, b"a note")]}, {"extensions": None}):
        refused(write(table | other) + data[len(write(table)) :], match="not valid for this record")


def test_a_signature_of_another_record_is_refused() -> None:
    refused(replace(VERSION, step=VERSION.step + 1).build() + block_of(SIGNED), match="not valid for this record")


def test_a_signature_of_the_record_without_its_checksum_is_refused() -> None:
    record = VERSION.build()
    refused(record + bytes.fromhex(KEY.public + KEY.sign(record[:-8])), match="not valid for this record")


def test_a_key_that_is_no_point_of_the_curve_is_refused() -> None:
    for key in ("ff" * 32, "00" * 32, "02" + "00" * 31):
        refused(VERSION.build() + bytes.fromhex(key) + block_of(SIGNED)[32:], match="not valid for this record")


@given(st.integers(0, len(VERSION.build()) - 1), st.integers(1, 255))
def test_a_changed_byte_of_the_record_is_never_accepted(at: int, flip: int) -> None:
    data = bytearray(SIGNED)
    data[at] ^= flip
    with pytest.raises(FormatError):
        manifests.parse(bytes(data), TRUST)


@given(st.integers(len(VERSION.build()), len(SIGNED) - 1), st.integers(1, 255))
def test_a_changed_byte_of_the_signature_is_never_accepted(at: int, flip: int) -> None:
    data = bytearray(SIGNED)
    data[at] ^= flip
    with pytest.raises(SignatureError):
        manifests.parse(bytes(data), TRUST)


def test_nothing_of_a_record_is_parsed_before_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("parsed")

    monkeypatch.setattr(manifests, "_read", never)
    refused(signature.sign(VERSION.build(), STRANGER))
    refused(VERSION.build())
    with pytest.raises(AssertionError, match="parsed"):
        manifests.parse(SIGNED, TRUST)


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
    said = f'{{"format":"pulse-delegation/1","key":"{HELPER.public}","kind":"anchor","run":"{RUN}"}}\n'.encode()
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
    block = block_of(signature.sign(SQUASH.build(), DELEGATE), SQUASH)
    refused(SQUASH.build() + block[:32] + bytes(64) + block[96:], match="not valid for this record")


def test_the_key_of_a_delegation_can_be_taken_out_of_trust_with_the_runs() -> None:
    refused(signature.sign(SQUASH.build(), DELEGATE), trust={STRANGER.public}, match="not trusted")


@pytest.mark.parametrize("kind", [3, 255])
def test_a_delegate_who_signs_a_record_of_no_kind_is_refused(kind: int) -> None:
    refused(signature.sign(write({**table_of(SQUASH), "kind": kind}), DELEGATE), match="not allowed")


# -- how it is written ---------------------------------------------------------------------------------------------

RECORD, BLOCK = VERSION.build(), block_of(SIGNED)
BAD_BLOCKS: dict[str, bytes] = {
    "a byte": b"\0",
    "a newline": b"\n",
    "a key alone": BLOCK[:32],
    "a byte too few": BLOCK[:-1],
    "a byte too many": BLOCK + b"\0",
    "a newline behind it": BLOCK + b"\n",
    "a delegation cut short": block_of(signature.sign(SQUASH.build(), DELEGATE), SQUASH)[:-1],
    "three pairs": BLOCK * 3,
    "a record behind it": BLOCK + RECORD,
    "as the first draft had it": b'{"key":"","signature":""}\n',
    "a megabyte": bytes(1 << 20),
}


@pytest.mark.parametrize("block", BAD_BLOCKS.values(), ids=BAD_BLOCKS.keys())
def test_a_signature_of_another_length_is_refused(block: bytes) -> None:
    for trust in (None, TRUST):
        with pytest.raises(FormatError) as caught:
            manifests.parse(RECORD + block, trust)
        assert type(caught.value) is not SignatureError


@pytest.mark.parametrize("trust", [None, TRUST])
def test_a_signature_longer_than_any_that_is_known_is_unsupported(trust: set[str] | None) -> None:
    with pytest.raises(UnsupportedError, match=r"193 bytes follow the record.*Upgrade pulsesync"):
        manifests.parse(RECORD + BLOCK * 2 + b"\0", trust)


@given(st.binary(max_size=300))
def test_noise_is_never_signed(block: bytes) -> None:
    with pytest.raises(FormatError):
        manifests.parse(RECORD + block, TRUST)


@given(st.binary(min_size=1, max_size=300))
def test_where_nobody_is_asked_for_a_signature_its_length_is_checked(block: bytes) -> None:
    with suppress(FormatError):
        assert manifests.parse(RECORD + block) == VERSION
        assert len(block) in (96, 192)


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
    assert manifests.parse(signature.sign(RECORD, first), {first.public}) == VERSION


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
