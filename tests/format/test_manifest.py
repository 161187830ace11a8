import string
import time
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import container, signature, wire
from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import BaseRef, FileRef, Manifest, PartRef, RecordKind
from pulsesync.format.signature import SigningKey
from tests import records
from tests.records import Table, table_of, write

HASH = "0123456789abcdef" * 4
LAYOUT = "12" * 32
PATCH = Manifest(
    run="ab" * 16,
    version=7,
    step=70,
    epoch=1,
    index=3,
    base=BaseRef(6, "cd" * 32),
    layout=LAYOUT,
    parts=(PartRef("34" * 32, 1000), PartRef("56" * 32, 0)),
    digest=HASH,
    history="78" * 32,
    created=1_800_000_000,
    anchor=1,
    files=(FileRef("config.json", "9a" * 32, 700), FileRef("tokenizer", HASH, 0)),
)
ROOT = replace(PATCH, version=0, index=0, base=None, parts=(), history=None, anchor=None)
ANCHOR = replace(PATCH, kind=RecordKind.ANCHOR, index=32, base=None, history=None)
SQUASH = replace(PATCH, kind=RecordKind.SQUASH, index=32, history=None)

whole = st.integers(0, 1 << 53)
hashes = st.binary(min_size=32, max_size=32).map(bytes.hex)


def inline(index: bytes, payloads: bytes, layout: str = LAYOUT) -> PartRef:
    """A part that stands in its record."""
    _, data = container.build(layout, [[index], [payloads]])
    found = manifests.inline_part(data, manifests.MAX_INLINE_BYTES)
    assert found is not None
    return found


SMALL = replace(PATCH, parts=(inline(b"index", b"payloads"),))


def changed(**fields: object) -> bytes:
    return write({**table_of(PATCH), **fields})


# -- what is read --------------------------------------------------------------------------------------------------


@given(whole, whole, whole, st.integers(1, 32), hashes, st.one_of(st.none(), hashes), st.integers(1, 4))
def test_a_patch_comes_back(
    version: int, step: int, epoch: int, index: int, digest: str, history: str | None, parts: int
) -> None:
    manifest = replace(
        PATCH,
        version=version + 1,
        step=step,
        epoch=epoch,
        index=index,
        base=BaseRef(version, digest),
        digest=digest,
        history=history,
        parts=tuple(PartRef(f"{n:064x}", n) for n in range(parts)),
    )
    if version < 1 << 53:
        assert manifests.parse(manifest.build()) == manifest


@pytest.mark.parametrize("record", [ROOT, ANCHOR, SQUASH, replace(ROOT, kind=RecordKind.ANCHOR, parts=PATCH.parts)])
def test_a_record_of_every_kind_comes_back(record: Manifest) -> None:
    assert manifests.parse(record.build()) == record


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=300)), min_size=1, max_size=4, unique=True))
def test_parts_that_stand_in_a_record_come_back_as_the_files_they_would_be(parts: list[tuple[bytes, bytes]]) -> None:
    manifest = replace(PATCH, parts=(*PATCH.parts, *(inline(*part) for part in parts)))
    found = manifests.parse(manifest.build())
    assert found == manifest
    for part, sections in zip(found.parts[2:], parts, strict=True):
        assert part.data is not None
        assert container.open_part(part.data, part.id)[1] == list(sections)
    assert found.size_bytes == 1000 + sum(map(len, (section for part in parts for section in part)))
    assert found.object_bytes == 1000


word = string.ascii_letters + string.digits + "_"
inner = st.builds("{}{}".format, st.text(word + ".-", max_size=126), st.sampled_from(word + "-"))
names = st.builds("{}{}".format, st.sampled_from(word), st.just("") | inner)
refs = st.builds(FileRef, names, hashes, st.integers(0, 1 << 28))
files = st.lists(refs, max_size=5, unique_by=lambda file: file.name.lower())


@given(files, st.one_of(st.none(), whole))
def test_files_and_the_newest_anchor_come_back(some: list[FileRef], anchor: int | None) -> None:
    manifest = replace(PATCH, files=tuple(some), anchor=anchor)
    assert manifests.parse(manifest.build()) == manifest


def test_a_record_says_how_many_bytes_its_parts_are_and_which_epoch_it_starts() -> None:
    assert (PATCH.size_bytes, ROOT.size_bytes, SMALL.size_bytes) == (1000, 0, 13)
    assert (ROOT.starts, PATCH.starts, ANCHOR.starts) == (1, 2, 2)


def test_a_record_is_written_as_the_document_says() -> None:
    for record in (PATCH, ROOT, ANCHOR, SQUASH, SMALL):
        assert record.build() == write(table_of(record))


def test_the_bytes_of_a_record_are_these() -> None:
    """Every field spelt out, once."""
    record = replace(SMALL, files=(FileRef("a.json", "9a" * 32, 700),))
    fields = bytes.fromhex("030746010380a4a7da0602") + bytes.fromhex(HASH + LAYOUT)
    fields += b"\x01" + b"\xcd" * 32 + b"\x78" * 32
    fields += b"\x01" + b"\x01" + b"\x05index" + b"\x08payloads"
    fields += b"\x01" + b"\x9a" * 32 + b"\xbc\x05" + b"\x06a.json"
    front = b"\x89PR\x01" + b"\x00" + b"\xab" * 16 + bytes([len(fields) % 128 + 128, len(fields) // 128])
    assert record.build() == records.seal(front + fields)


def test_a_patch_without_files_takes_at_most_180_bytes_and_its_part() -> None:
    record = replace(SMALL, version=1000, step=1000, base=BaseRef(999, HASH), epoch=31, files=())
    assert len(record.build()) - record.size_bytes <= 180


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [name for name in table_of(PATCH) if name not in ("base", "history", "anchor")])
def test_a_missing_field_is_refused(field: str) -> None:
    fields = table_of(PATCH)
    del fields[field]
    with pytest.raises(FormatError):
        manifests.parse(write(fields))


@pytest.mark.parametrize("field", ["version", "step", "epoch", "index", "created", "anchor"])
@pytest.mark.parametrize("value", [-2, (1 << 53) + 1, 1 << 63, 1 << 70, b"\x80", b"\x81\x00", b"\xff" * 11], ids=repr)
def test_a_number_beyond_its_limit_or_written_longer_than_needed_is_refused(field: str, value: object) -> None:
    with pytest.raises(FormatError):
        manifests.parse(changed(**{field: value}))


@pytest.mark.parametrize("text", [HASH[:-2], HASH + "00", b"", bytes(31), bytes(33)])
@pytest.mark.parametrize("field", ["layout", "digest", "history", "run"])
def test_a_hash_of_another_length_is_refused(field: str, text: object) -> None:
    with pytest.raises(FormatError):
        manifests.parse(changed(**{field: text}))


BAD_FIELDS: list[Table] = [
    {"flags": 7},  # extensions that are not there
    {"flags": 0x0B},
    {"flags": 0x83},
    {"flags": 1},  # a history that no flag is for
    {"flags": 2},
    {"length": 0},
    {"length": 1},
    {"length": 1 << 24},
    {"length": 1 << 40},
    {"base": {"digest": HASH, "version": 7}},
    {"base": {"digest": HASH, "version": 8}},
    {"base": {"digest": HASH, "version": -1}},
    {"base": {"digest": HASH}},
    {"base": None},
    {"index": 0},
    {"index": 33},  # an epoch has 32 patches
    {"index": 128},
    {"base": {"digest": HASH, "version": 5}},  # not the version before
    {"parts": []},
    {"parts": [{"id": HASH, "size": 1}] * 2},
    {"parts": [{"id": HASH, "size": (1 << 40) + 1}]},
    {"parts": [{"id": HASH, "size": 1, "form": 2}]},
    {"parts": [{"id": HASH[2:], "size": 1}]},
    {"parts": [{"index": b"i", "payloads": b"p"}] * 2},
    {"parts": [{"index": b"i", "payloads": b"p", "form": 0}]},
    {"parts": [{"index": bytes(4097), "payloads": b""}]},
    {"parts": [{"index": bytes(4000), "payloads": bytes(97)}]},
    {"parts": [{"index": bytes([n]), "payloads": bytes(2047)} for n in range(3)]},  # together too much
    {"kind": 3},
    {"kind": 255},
    {"kind": "anchor"},  # with a base
    {"kind": "anchor", "base": None},  # with a history
    {"kind": "squash"},  # with a history
    {"kind": "squash", "history": None, "base": None},
    {"kind": "squash", "history": None, "parts": []},
    {"kind": "anchor", "history": None, "base": None, "parts": []},
    {"base": None, "index": 0},  # a root with parts
    {"base": None, "index": 0, "history": None},
    {"base": None, "index": 0, "parts": []},  # a root with a history
    {"base": None, "parts": []},  # a root in mid-epoch
    {"anchor": 1 << 54},
    {"files": [{"id": HASH, "name": "a", "size": 1}, {"id": "9a" * 32, "name": "a", "size": 2}]},
    {"files": [{"id": HASH, "name": "a.json", "size": 1}, {"id": HASH, "name": "A.json", "size": 1}]},
    {"files": [{"id": HASH, "name": "a", "size": (1 << 28) + 1}]},
    {"files": [{"id": HASH, "name": f"f{n}", "size": 1} for n in range(257)]},
]


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=lambda fields: str(fields)[:60])
def test_what_no_version_can_say_is_refused(fields: Table) -> None:
    data = changed(**fields)
    with pytest.raises(FormatError) as caught:
        manifests.parse(data)
    assert type(caught.value) is not ChecksumError or "length" in fields


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "a/b",
        "../a",
        "/etc/passwd",
        "a\\b",
        "C:\\a",
        "a b",
        "a\n",
        "a\0",
        "a:b",
        "größe",
        b"\xff\xfe",
        "~",
        "$HOME",
        "a.",
        "a..",
        "a" * 129,
    ],
    ids=repr,
)
def test_a_file_name_that_could_lead_elsewhere_is_refused(name: object) -> None:
    with pytest.raises(FormatError):
        manifests.parse(changed(files=[{"id": HASH, "name": name, "size": 1}]))


def test_as_many_files_as_allowed_are_read() -> None:
    some = tuple(FileRef(f"f{n}", HASH, 1 << 28) for n in range(manifests.MAX_FILES))
    assert manifests.parse(replace(PATCH, files=some).build()).files == some


def test_as_much_as_allowed_stands_in_a_record() -> None:
    record = replace(PATCH, parts=(inline(bytes(96), bytes(2000)), inline(bytes(1000), bytes(1000))))
    assert record.size_bytes == manifests.MAX_INLINE_BYTES
    assert manifests.parse(record.build()) == record


@pytest.mark.parametrize("sections", [[b"index"], [b"index", bytes(4092)], [b"index", b"one", b"two"]], ids=len)
def test_a_part_that_is_large_or_has_other_sections_does_not_stand_in_a_record(sections: list[bytes]) -> None:
    _, data = container.build(LAYOUT, [[section] for section in sections])
    assert manifests.inline_part(data, manifests.MAX_INLINE_BYTES) is None


def test_an_unknown_kind_form_or_flag_is_unsupported() -> None:
    for fields in ({"kind": 3}, {"flags": 8}, {"parts": [{"id": HASH, "size": 1, "form": 2}]}):
        with pytest.raises(UnsupportedError):
            manifests.parse(changed(**fields))


@pytest.mark.parametrize("kind", ["version", "anchor", "squash"])
def test_only_a_root_has_no_parts(kind: str) -> None:
    with pytest.raises(FormatError, match="parts"):
        manifests.parse(changed(kind=kind, history=None, parts=[]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PATCH.build()[:-1],
        PATCH.build()[1:],
        PATCH.build() + b"\n",
        PATCH.build() + b"a signature\n",
        PATCH.build() + PATCH.build(),
        records.seal(PATCH.build()[:-8] + b"\0"),
        records.seal(PATCH.build()),
    ],
)
def test_bytes_too_many_or_too_few_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        manifests.parse(data)


def test_bytes_that_no_field_is_for_are_refused() -> None:
    table = table_of(PATCH)
    front, fields = records.write_front(table), records.write_fields(table) + b"\0"
    with pytest.raises(FormatError, match="unexpected bytes"):
        manifests.parse(records.seal(front + records.number(len(fields)) + fields))


@given(st.binary(max_size=60))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        manifests.parse(data)


@given(st.sampled_from([PATCH, SMALL, ANCHOR]), st.data(), st.integers(1, 255))
def test_a_changed_byte_is_always_found(record: Manifest, data: st.DataObject, flip: int) -> None:
    damaged = bytearray(record.build())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= flip
    with pytest.raises(FormatError):
        manifests.parse(bytes(damaged))


@given(st.data(), st.integers(1, 255))
def test_damage_to_what_a_record_says_is_a_checksum_error(data: st.DataObject, flip: int) -> None:
    good = SMALL.build()
    damaged = bytearray(good)
    damaged[data.draw(st.sampled_from([*range(4, 21), *range(23, len(good))]))] ^= flip  # not its length
    with pytest.raises(ChecksumError):
        manifests.parse(bytes(damaged))


@given(st.sampled_from([PATCH, SMALL, ANCHOR]), st.data(), st.integers(1, 255))
def test_another_byte_under_a_good_checksum_is_refused_or_makes_another_record_that_is_written_so(
    record: Manifest, data: st.DataObject, flip: int
) -> None:
    forged = bytearray(record.build()[: -records.CHECK_BYTES])
    forged[data.draw(st.integers(0, len(forged) - 1))] ^= flip
    with suppress(FormatError):
        assert manifests.parse(records.seal(bytes(forged))).build() == records.seal(bytes(forged))


def test_other_bytes_at_the_front_are_no_record() -> None:
    with pytest.raises(FormatError, match="not a record"):
        manifests.parse(changed(magic=b"\x89PX"))


@pytest.mark.parametrize("version", [0x00, 0x02, 0x7F])
def test_another_format_is_unsupported(version: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"format version {version}; .* reads version 1. Upgrade pulsesync"):
        manifests.parse(changed(format=version))


@pytest.mark.parametrize("data", [changed(format=0x82), b'{"anchor":null,"format":"pulse-manifest/1-draft"}\n'])
def test_a_record_of_a_draft_says_what_wrote_it_and_what_to_do(data: bytes) -> None:
    with pytest.raises(UnsupportedError, match=r"draft [12] .*before pulsesync 0\.1\.0.* new run.*checkpoint"):
        manifests.parse(data)


def test_an_extension_is_ignored_if_its_tag_is_odd_and_refused_if_it_is_even() -> None:
    for record in (PATCH, ROOT, ANCHOR, SQUASH, SMALL):
        assert manifests.parse(write(table_of(record) | {"extensions": [(1, b"a"), (9, bytes(4000))]})) == record
        with pytest.raises(UnsupportedError, match=r"the extension 8.*Upgrade pulsesync"):
            manifests.parse(write(table_of(record) | {"extensions": [(1, b"a"), (8, b"")]}))


def test_a_version_names_the_one_at_which_the_trainer_went_back_in_an_extension() -> None:
    """A reader of the first release ignores it; without a rewind, the bytes are those of the first release."""
    for record in (PATCH, ROOT, SMALL):
        for at in {0, record.version}:
            rewound = replace(record, rewound_at=at)
            assert manifests.parse(rewound.build()) == rewound
            assert rewound.build() == write(table_of(record) | {"extensions": [(1, wire.number(at))]})
        assert manifests.parse(record.build()).rewound_at is None
    for record in (ANCHOR, SQUASH):  # made from a version, with its other fields
        assert replace(record, rewound_at=record.version).build() == record.build()
        assert manifests.parse(write(table_of(record) | {"extensions": [(1, b"\0")]})) == record


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\x80", b"\x80\0", wire.number(PATCH.version + 1), bytes(11)])
def test_a_rewind_that_no_writer_writes_is_ignored(content: bytes) -> None:
    """What an older reader ignores must not make a newer one refuse the record."""
    assert manifests.parse(write(table_of(PATCH) | {"extensions": [(1, content)]})) == PATCH


def test_as_many_extensions_as_allowed_are_ignored() -> None:
    for some in (
        [(2 * n + 1, b"") for n in range(16)],
        [(1, bytes(4096))],
        [(65_535, b"")],
        [(1, bytes(4000)), (3, bytes(96))],
    ):
        assert manifests.parse(write(table_of(PATCH) | {"extensions": some})) == PATCH


@pytest.mark.parametrize(
    "extensions",
    [
        [],
        [(3, b""), (1, b"")],
        [(1, b"a"), (1, b"b")],
        [(2 * n + 1, b"") for n in range(17)],
        [(1, bytes(4097))],
        [(1, bytes(4000)), (3, bytes(97))],
        [(65_537, b"")],
    ],
    ids=lambda some: str(some)[:40],
)
def test_extensions_out_of_order_or_beyond_their_limits_are_refused(extensions: list[tuple[int, bytes]]) -> None:
    with pytest.raises(FormatError) as caught:
        manifests.parse(write(table_of(PATCH) | {"extensions": extensions}))
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("names", [["größe.json"], ["a b"], ["a."], ["a", "A"]], ids=str)
def test_files_that_no_reader_accepts_are_not_written(names: list[str]) -> None:
    with pytest.raises(FormatError):
        replace(PATCH, files=tuple(FileRef(name, HASH, 1) for name in names)).build()


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(LimitError):
        manifests.parse(changed(parts=manifests.MAX_PARTS + 1))


def test_a_file_too_large_is_refused_unread() -> None:
    with pytest.raises(LimitError, match="at most"):
        manifests.parse(bytes(manifests.MAX_BYTES + 1))


def test_a_record_that_claims_many_parts_in_few_bytes_is_refused_at_once() -> None:
    empty = b"\x01\x00\x00" * manifests.MAX_PARTS
    began = time.process_time()
    with pytest.raises(FormatError, match="twice"):
        manifests.parse(changed(parts=records.number(manifests.MAX_PARTS) + empty))
    assert time.process_time() - began < 1


def test_a_record_says_who_signed_it() -> None:
    key = SigningKey("11" * 32)
    assert manifests.parse(signature.sign(PATCH.build(), key)).signed_by == key.public
    assert manifests.parse(PATCH.build()).signed_by is None
