import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import manifest as manifests
from pulsesync.format.manifest import BaseRef, FileRef, Manifest, PartRef, RecordKind

HASH = "0123456789abcdef" * 4
PATCH = Manifest(
    run="ab" * 16,
    version=7,
    step=70,
    epoch=1,
    index=3,
    base=BaseRef(6, "cd" * 32),
    layout="12" * 32,
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


def table(record: Manifest = PATCH) -> dict[str, object]:
    found: dict[str, object] = json.loads(record.build())
    return found


def written(fields: object) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@given(whole, whole, whole, st.integers(1, 127), hashes, st.one_of(st.none(), hashes), st.integers(1, 4))
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


names = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", fullmatch=True)
files = st.lists(st.builds(FileRef, names, hashes, st.integers(0, 1 << 28)), max_size=5, unique_by=lambda f: f.name)


@given(files, st.one_of(st.none(), whole))
def test_files_and_the_newest_anchor_come_back(some: list[FileRef], anchor: int | None) -> None:
    manifest = replace(PATCH, files=tuple(some), anchor=anchor)
    assert manifests.parse(manifest.build()) == manifest


def test_a_record_says_how_many_bytes_its_parts_are_and_which_epoch_it_starts() -> None:
    assert (PATCH.size_bytes, ROOT.size_bytes) == (1000, 0)
    assert (ROOT.starts, PATCH.starts, ANCHOR.starts) == (1, 2, 2)


@pytest.mark.parametrize("field", list(json.loads(PATCH.build())))
def test_a_missing_field_is_refused(field: str) -> None:
    fields = table()
    del fields[field]
    with pytest.raises(FormatError):
        manifests.parse(written(fields))


@pytest.mark.parametrize("field", list(json.loads(PATCH.build())))
@pytest.mark.parametrize("value", [-1, 1 << 54, 1.5, True, "x", "", [], {}, [1], {"a": 1}, [None]], ids=repr)
def test_a_field_of_another_kind_is_refused(field: str, value: object) -> None:
    if (field, value) == ("files", []):
        return  # none is as good as some
    with pytest.raises(FormatError):
        manifests.parse(written({**table(), field: value}))


@pytest.mark.parametrize("text", [HASH[:-1], HASH + "0", HASH.upper(), "g" * 64, HASH[:-1] + "\n"])
@pytest.mark.parametrize("field", ["layout", "digest", "history"])
def test_what_is_no_hash_is_refused(field: str, text: str) -> None:
    with pytest.raises(FormatError):
        manifests.parse(written({**table(), field: text}))


@pytest.mark.parametrize("number", ["1.0", "1e0", "01", "-0", "1" * 5000, "NaN", "Infinity", "1e400"])
def test_what_is_no_whole_number_is_refused(number: str) -> None:
    with pytest.raises(FormatError):
        manifests.parse(PATCH.build().replace(b'"epoch":1', b'"epoch":' + number.encode()))


@pytest.mark.parametrize(
    "fields",
    [
        {"more": 1},
        {"base": {"digest": HASH, "version": 6, "more": 1}},
        {"base": {"digest": HASH}},
        {"base": {"digest": HASH, "version": 7}},
        {"base": {"digest": HASH, "version": 8}},
        {"base": None},
        {"index": 0},
        {"index": 128},
        {"parts": []},
        {"parts": {"id": HASH, "size": 1}},
        {"parts": [{"id": HASH, "size": 1}] * 2},
        {"parts": [{"id": HASH, "size": 1, "more": 1}]},
        {"parts": [{"id": HASH}]},
        {"parts": [{"id": HASH, "size": (1 << 40) + 1}]},
        {"parts": [{"id": "../../etc/passwd", "size": 1}]},
        {"run": "ab" * 15},
        {"version": (1 << 53) + 1},
        {"kind": "patch"},
        {"kind": None},
        {"kind": ["version"]},
        {"kind": "anchor"},  # with a base
        {"kind": "anchor", "base": None},  # with a history
        {"kind": "squash"},  # with a history
        {"kind": "squash", "history": None, "base": None},
        {"kind": "squash", "history": None, "parts": []},
        {"kind": "anchor", "history": None, "base": None, "parts": []},
        {"base": None, "index": 0},  # a root with parts
        {"base": None, "index": 0, "history": None},
        {"base": None, "parts": []},  # a root in mid-epoch
        {"anchor": (1 << 53) + 1},
        {"anchor": "1"},
        {"files": [{"id": HASH, "name": "a", "size": 1}, {"id": "9a" * 32, "name": "a", "size": 2}]},
        {"files": [{"id": HASH, "name": "a"}]},
        {"files": [{"id": HASH, "name": "a", "size": 1, "more": 1}]},
        {"files": [{"id": HASH[1:], "name": "a", "size": 1}]},
        {"files": [{"id": HASH, "name": "a", "size": (1 << 28) + 1}]},
        {"files": [{"id": HASH, "name": f"f{n}", "size": 1} for n in range(257)]},
        {"files": {"id": HASH, "name": "a", "size": 1}},
        {"files": ["config.json"]},
    ],
)
def test_what_no_version_can_say_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        manifests.parse(written({**table(), **fields}))


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
        "~",
        "$HOME",
        "a" * 129,
        5,
        None,
    ],
    ids=repr,
)
def test_a_file_name_that_could_lead_elsewhere_is_refused(name: object) -> None:
    with pytest.raises(FormatError):
        manifests.parse(written({**table(), "files": [{"id": HASH, "name": name, "size": 1}]}))


def test_as_many_files_as_allowed_are_read() -> None:
    some = tuple(FileRef(f"f{n}", HASH, 1 << 28) for n in range(manifests.MAX_FILES))
    assert manifests.parse(replace(PATCH, files=some).build()).files == some


def test_an_unknown_kind_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        manifests.parse(written({**table(), "kind": "merge"}))


@pytest.mark.parametrize("kind", ["version", "anchor", "squash"])
def test_only_a_root_has_no_parts(kind: str) -> None:
    with pytest.raises(LimitError, match="parts"):
        manifests.parse(written({**table(), "kind": kind, "history": None, "parts": []}))


@pytest.mark.parametrize(
    "data",
    [
        PATCH.build()[:-1],
        PATCH.build() + b"\n",
        PATCH.build() + b"a signature\n",
        PATCH.build().replace(b",", b", ", 1),
        PATCH.build().replace(b"abab", b"\\u0061bab", 1),
        json.dumps(dict(reversed(table().items())), separators=(",", ":")).encode() + b"\n",
        PATCH.build().replace(b'{"anchor"', b'{"step":70,"anchor"'),
    ],
)
def test_another_way_to_write_the_same_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        manifests.parse(data)


@given(st.binary(max_size=60))
def test_noise_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        manifests.parse(data)


@given(st.integers(0, len(PATCH.build()) - 1), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_makes_another_canonical_manifest(at: int, flip: int) -> None:
    data = bytearray(PATCH.build())
    data[at] ^= flip
    with suppress(FormatError):
        assert manifests.parse(bytes(data)).build() == data


def test_another_format_is_unsupported() -> None:
    with pytest.raises(UnsupportedError):
        manifests.parse(written({**table(), "format": "pulse-manifest/2"}))


def test_too_many_parts_are_refused() -> None:
    some = [{"id": HASH, "size": 1}] * (manifests.MAX_PARTS + 1)
    with pytest.raises(LimitError, match="parts"):
        manifests.parse(written({**table(), "parts": some}))


def test_a_file_too_large_is_refused_unread() -> None:
    with pytest.raises(LimitError, match="at most"):
        manifests.parse(bytes(manifests.MAX_BYTES + 1))
