"""The records of a run: what a version, an anchor or a squashed patch is made of, from which base, with which digest.

A record is binary, has exactly one valid encoding, and ends with a checksum; a signature may follow it. A small part is
stored in its record, so that one request fetches a small version. A version exists when its record does.
"""

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pulsesync.errors import ChecksumError, FormatError, LimitError
from pulsesync.format import container, epochs, signature, versions, wire
from pulsesync.format.container import MAX_SECTION_BYTES
from pulsesync.format.wire import ByteReader

MAGIC = b"\x89PR"  # not text
MAX_BYTES = 1 << 24
MAX_PARTS = 1 << 16
MAX_INLINE_BYTES = 1 << 12  # of all parts that are stored in a record, together
MAX_VERSION = 1 << 53
MAX_FILES = 1 << 8
MAX_FILE_BYTES = 1 << 28
MAX_NAME_BYTES = 1 << 7
RECORD_BYTES = 1 << 8  # of a record besides its parts, on average: four hashes, the run, perhaps a signature
MAX_EXTENSIONS, MAX_EXTENSION_BYTES, MAX_TAG = 1 << 4, 1 << 12, (1 << 16) - 1  # the bytes: of all together
CHECK_BYTES = 8
RUN_BYTES, HASH_BYTES = 16, 32
_NAMED, _INLINE = 0, 1  # how a part is stored
_BASE, _HISTORY, _EXTENSIONS = 1, 2, 4  # flags: which fields are present
_REWOUND_AT = 1  # the tag of an extension
_FILE = re.compile(rf"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{{0,{MAX_NAME_BYTES - 2}}}[A-Za-z0-9_-])?")


class RecordKind(StrEnum):
    """The kind of a record."""

    VERSION = "version"
    ANCHOR = "anchor"  # the full state at an epoch start
    SQUASH = "squash"  # one patch from an epoch start to a later one


_KINDS = (RecordKind.VERSION, RecordKind.ANCHOR, RecordKind.SQUASH)  # by their byte


@dataclass(frozen=True)
class PartRef:
    """A part of a version: by its id (the SHA-256 of its header) and size, or the part itself, stored in the record.

    Attributes:
        size: Stored bytes: of the file, or of the sections only if they are in the record.
        data: The whole file of a part that is stored in the record; None for one that is a separate object.
    """

    id: str
    size: int
    data: bytes | None = None


def inline_part(data: bytes | memoryview, limit: int) -> PartRef | None:
    """Return the reference of a part that is stored in its record; None if it has more bytes than the limit."""
    size = len(data) - container.header_size(data)
    if size > limit:
        return None
    header = container.parse_header(data)
    return PartRef(header.id, size, bytes(data)) if len(header.sections) == 2 else None


@dataclass(frozen=True)
class BaseRef:
    """The version a patch is made against, and its state digest."""

    version: int
    digest: str


@dataclass(frozen=True)
class FileRef:
    """A small file that belongs to the model (config.json, tokenizer), by name, SHA-256 and size in bytes."""

    name: str
    id: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """One record: the path to a version, from its base or, for an anchor, from nothing.

    A version without a base is a root: it has no parts, and is reached through an anchor, or is already local.
    """

    run: str  # random, 32 hexadecimal digits: versions of two runs never mix
    version: int
    step: int  # the trainer's own count, which may decrease
    epoch: int
    index: int  # patches of the epoch up to this version; 0 for a root
    base: BaseRef | None
    layout: str  # SHA-256 of the layout file
    parts: tuple[PartRef, ...]
    digest: str  # of the state
    history: str | None  # digest of the history after this patch, if it tracks any weights
    created: int  # seconds since 1970, by the writer's clock: informative only
    kind: RecordKind = RecordKind.VERSION
    anchor: int | None = None  # epoch of the newest anchor before this record, as far as its writer knew
    files: tuple[FileRef, ...] = ()
    rewound_at: int | None = None  # newest version up to this one at which the step went back; of versions alone
    epoch_patches: int = epochs.EPOCH_PATCHES  # of the run; not written, because the format fixes it
    signed_by: str | None = field(default=None, compare=False)  # the public key in its signature, if it has one

    @property
    def size_bytes(self) -> int:
        """Bytes of all its parts, including those that are stored in the record."""
        return sum(part.size for part in self.parts)

    @property
    def path_bytes(self) -> int:
        """Bytes that a reader on a path fetches for it: those of its parts, and about those of the record besides."""
        return self.size_bytes + RECORD_BYTES

    @property
    def object_bytes(self) -> int:
        """Bytes of its parts that are separate objects."""
        return sum(part.size for part in self.parts if part.data is None)

    @property
    def starts(self) -> int:
        """The epoch that starts at this version, if one does."""
        return epochs.started_by(self.epoch, self.index)

    @property
    def at_start(self) -> bool:
        """Whether an epoch starts at this version."""
        return epochs.is_start(self.index, self.epoch_patches)

    @property
    def next_patch(self) -> tuple[int, int]:
        """The epoch and index of the patch that follows this version."""
        return epochs.next_patch(self.epoch, self.index, self.epoch_patches)

    def build(self) -> bytes:
        """Write the record, without a signature. Raises: FormatError, if the name of a file is not valid."""
        check_file_names([file.name for file in self.files])
        base = extensions = b""
        if self.base is not None:
            base = wire.number(self.version - self.base.version) + bytes.fromhex(self.base.digest)
        if self.rewound_at is not None and self.kind == RecordKind.VERSION:
            content = wire.number(self.rewound_at)
            extensions = wire.few_numbers((1, _REWOUND_AT, len(content))) + content
        flags = (_BASE if base else 0) | (_HISTORY if self.history else 0) | (_EXTENSIONS if extensions else 0)
        anchor = 0 if self.anchor is None else self.anchor + 1
        fields = bytes([flags])
        fields += wire.few_numbers((self.version, self.step, self.epoch, self.index, self.created, anchor))
        fields += bytes.fromhex(self.digest + self.layout) + base + bytes.fromhex(self.history or "")
        fields += b"".join((wire.number(len(self.parts)), *map(_build_part, self.parts)))
        fields += b"".join((wire.number(len(self.files)), *map(_build_file, self.files))) + extensions
        front = MAGIC + bytes([versions.VERSION, _KINDS.index(self.kind)]) + bytes.fromhex(self.run)
        record = front + wire.number(len(fields)) + fields
        return record + _checksum(record)


def _build_part(part: PartRef) -> bytes:
    if part.data is None:
        return bytes([_NAMED]) + bytes.fromhex(part.id) + wire.number(part.size)
    begin, middle, end = container.parse_header(part.data).borders
    index, payloads = part.data[begin:middle], part.data[middle:end]
    return bytes([_INLINE]) + wire.number(len(index)) + index + wire.number(len(payloads)) + payloads


def _build_file(file: FileRef) -> bytes:
    return bytes.fromhex(file.id) + wire.few_numbers((file.size, len(file.name))) + file.name.encode()


def _checksum(record: bytes | memoryview) -> bytes:
    return hashlib.sha256(record).digest()[:CHECK_BYTES]


def split(data: bytes) -> tuple[bytes, bytes]:
    """Split a stored object into the record, including its checksum, and the signature, which may be empty.

    Raises:
        ChecksumError: the record was damaged; UnsupportedError: it is of another format version; LimitError: it has
        more bytes than a reader accepts; FormatError: it is not a record, or is cut off.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a record can have {MAX_BYTES} bytes at most; this has {len(data)}", value=len(data))
    if data[:1] == b"{":
        raise versions.draft("the record", 1)  # which had records in JSON
    reader = ByteReader(data, "the record")
    if reader.take(len(MAGIC)) != MAGIC:
        raise FormatError("these bytes are not a record: they do not begin with its magic bytes")
    versions.check_version(reader.byte(), "the record")
    reader.take(1 + RUN_BYTES)
    reader.take(reader.number(MAX_BYTES))
    end = reader.at
    expected, actual = bytes(reader.take(CHECK_BYTES)), _checksum(reader.data[:end])
    if expected != actual:
        raise ChecksumError(
            "the record is damaged: its bytes do not match its hash", expected=expected.hex(), actual=actual.hex()
        )
    return data[: reader.at], data[reader.at :]


def parse(data: bytes, trust: Collection[str] | None = None, epoch_patches: int = epochs.EPOCH_PATCHES) -> Manifest:
    """Read a record and check everything in it; with keys to trust, only accept one that they signed.

    Raises:
        SignatureError: no trusted key signed it; FormatError: it is not a record, or not in its valid encoding;
        ChecksumError, LimitError, UnsupportedError: as `split`.
    """
    record, block = split(data)
    signed = signature.parse(block)
    if trust is not None:
        signature.check(record, signed, trust, _squashed_run(record))
    reader = ByteReader(record[:-CHECK_BYTES], "the record")
    manifest = _read(reader, epoch_patches, signed.key if signed else None)
    reader.end()
    _check(manifest)
    return manifest


def _squashed_run(record: bytes) -> str | None:
    """The run of a squashed patch, which a delegate may write; None for every other kind of record."""
    kind, run = record[len(MAGIC) + 1], record[len(MAGIC) + 2 :][:RUN_BYTES]
    return run.hex() if kind == _KINDS.index(RecordKind.SQUASH) else None


def _read(reader: ByteReader, epoch_patches: int, signed_by: str | None) -> Manifest:
    reader.take(len(MAGIC) + 1)
    if (code := reader.byte()) >= len(_KINDS):
        raise versions.unknown(f"the record is of kind {code}")
    kind, run = _KINDS[code], reader.take(RUN_BYTES).hex()
    reader.number(MAX_BYTES)
    flags = reader.byte()
    if flags & ~(_BASE | _HISTORY | _EXTENSIONS):
        raise versions.unknown(f"the record has flags {flags:#04x}")
    version, step, epoch = (reader.number(MAX_VERSION) for _ in range(3))
    index, created, anchor = reader.number(epoch_patches), reader.number(MAX_VERSION), reader.number(MAX_VERSION + 1)
    digest, layout = _read_hash(reader), _read_hash(reader)
    base = BaseRef(version - reader.number(version), _read_hash(reader)) if flags & _BASE else None
    manifest = Manifest(
        run=run,
        version=version,
        step=step,
        epoch=epoch,
        index=index,
        base=base,
        layout=layout,
        digest=digest,
        history=_read_hash(reader) if flags & _HISTORY else None,
        parts=_read_parts(reader, layout),
        created=created,
        kind=kind,
        anchor=anchor - 1 if anchor else None,
        files=tuple(_read_file(reader) for _ in range(reader.number(MAX_FILES))),
        epoch_patches=epoch_patches,
        signed_by=signed_by,
    )
    extensions = _read_extensions(reader) if flags & _EXTENSIONS else {}
    if kind == RecordKind.VERSION and _REWOUND_AT in extensions:
        return replace(manifest, rewound_at=_read_rewound_at(extensions[_REWOUND_AT], version))
    return manifest


def _read_extensions(reader: ByteReader) -> dict[int, bytes]:
    """Read what later releases have added to a record, by tag. Unknown extensions with odd tags can be ignored.

    They belong to one record, and records that are derived from it (an anchor of its version) do not have them.
    """
    found: dict[int, bytes] = {}
    count, last, left = reader.number(MAX_EXTENSIONS), -1, MAX_EXTENSION_BYTES
    if not count:
        raise FormatError("a record with the flag of extensions must have one at least")
    for _ in range(count):
        tag, size = reader.number(MAX_TAG), reader.number(left)
        if tag <= last:
            raise FormatError("the tags of a record's extensions must ascend")
        if tag % 2 == 0:
            raise versions.unknown(f"the record has the extension {tag}")
        found[tag] = bytes(reader.take(size))
        last, left = tag, left - size
    return found


def _read_rewound_at(content: bytes, version: int) -> int | None:
    """Return the version that the extension names; None for other content, which readers may ignore."""
    reader = ByteReader(content, "the extension")
    try:
        value = reader.number(version)
        reader.end()
    except FormatError:
        return None
    return value


def _read_hash(reader: ByteReader) -> str:
    return reader.take(HASH_BYTES).hex()


def _read_parts(reader: ByteReader, layout: str) -> tuple[PartRef, ...]:
    parts: dict[str, PartRef] = {}
    left = MAX_INLINE_BYTES
    for _ in range(reader.number(MAX_PARTS)):
        part = _read_part(reader, layout, left)
        if part.id in parts:
            raise FormatError("a record lists a part twice", part=part.id)
        parts[part.id] = part
        left -= part.size if part.data is not None else 0
    return tuple(parts.values())


def _read_part(reader: ByteReader, layout: str, inline_limit: int) -> PartRef:
    form = reader.byte()
    if form == _NAMED:
        return PartRef(_read_hash(reader), reader.number(MAX_SECTION_BYTES))
    if form != _INLINE:
        raise versions.unknown(f"the record has a part in form {form}")
    index = reader.take(reader.number(inline_limit))
    payloads = reader.take(reader.number(inline_limit - len(index)))
    id_, data = container.build(layout, [[index], [payloads]])
    return PartRef(id_, len(index) + len(payloads), bytes(data))


def _read_file(reader: ByteReader) -> FileRef:
    id_, size = _read_hash(reader), reader.number(MAX_FILE_BYTES)
    return FileRef(bytes(reader.take(reader.number(MAX_NAME_BYTES))).decode("latin-1"), id_, size)


def is_file_name(name: str) -> bool:
    """Whether a file of a model can have this name."""
    return _FILE.fullmatch(name) is not None


def check_file_names(names: Collection[str]) -> None:
    """Check the names of the files of a model: all of them fit into one folder of any file system.

    Raises: FormatError, if a name has other characters, ends with a dot, or differs from another in case alone.
    """
    for name in names:
        if not is_file_name(name):
            raise FormatError(
                f"a file of a model must have a name of 1 to {MAX_NAME_BYTES} English letters, digits, '_', '-' or "
                f"'.', that neither begins with '-' or '.' nor ends with '.'; got {name[:200]!r}"
            )
    if len({name.lower() for name in names}) != len(names):
        raise FormatError("two files of a model have the same name, or names that differ in upper and lower case alone")


def _check(manifest: Manifest) -> None:
    base, kind, parts = manifest.base, manifest.kind, len(manifest.parts)
    is_version = kind == RecordKind.VERSION
    root = is_version and base is None
    if (not parts) != root:
        raise FormatError(f"a root must have no parts, and other records 1 to {MAX_PARTS}; this has {parts}")
    check_file_names([file.name for file in manifest.files])
    if is_version and (manifest.index == 0) != (base is None):
        raise FormatError("a version must have a base and an index in its epoch, or neither")
    if kind == RecordKind.ANCHOR and base is not None:
        raise FormatError("an anchor must have no base")
    if kind == RecordKind.SQUASH and base is None:
        raise FormatError("a squashed patch must have a base")
    if not is_version and manifest.history is not None:
        raise FormatError("anchors and squashed patches must lead to the start of an epoch, where the history is empty")
    if root and manifest.history is not None:
        raise FormatError("a root must have no history")
    if base is not None and not 0 <= base.version < manifest.version:
        raise FormatError("a version's base must be an earlier version")
    if is_version and base and base.version != manifest.version - 1:
        raise FormatError("the base of a version must be the version before it")
