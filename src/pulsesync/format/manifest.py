"""The records of a run: what a version, an anchor or a squashed patch is made of, from which base, with which digest.

Canonical JSON (sorted keys, no spaces) on one line, so that it can be signed as it stands; a signature stands on a
second line. A version exists when its record does.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import epochs, signature
from pulsesync.format.container import MAX_SECTION_BYTES
from pulsesync.format.history import MAX_INDEX
from pulsesync.format.layout import load_json

FORMAT = "pulse-manifest/1-draft"
MAX_BYTES = 1 << 24
MAX_PARTS = 1 << 16
MAX_VERSION = 1 << 53
MAX_FILES = 1 << 8
MAX_FILE_BYTES = 1 << 28
HASH = re.compile("[0-9a-f]{64}")
RUN = re.compile("[0-9a-f]{32}")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class RecordKind(StrEnum):
    """What a record is for."""

    VERSION = "version"
    ANCHOR = "anchor"  # the whole state at an epoch start
    SQUASH = "squash"  # one patch from an epoch start to a later one


@dataclass(frozen=True)
class PartRef:
    """A part by id (the SHA-256 of its header) and size in bytes."""

    id: str
    size: int


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
    """One record: the way to a version, from its base or, for an anchor, from nothing.

    A version without a base is a root: it has no parts, and is reached by an anchor or by holding it.
    """

    run: str  # random, 32 hexadecimal digits: versions of two runs never mix
    version: int
    step: int  # the trainer's own count, which may go back
    epoch: int
    index: int  # patches of the epoch up to this version; 0 for a root
    base: BaseRef | None
    layout: str  # SHA-256 of the layout file
    parts: tuple[PartRef, ...]
    digest: str  # of the state
    history: str | None  # digest of the history after this patch, where it remembers anything
    created: int  # seconds since 1970, by the writer's clock: for people
    kind: RecordKind = RecordKind.VERSION
    anchor: int | None = None  # epoch of the newest anchor before this record, as far as its writer knew
    files: tuple[FileRef, ...] = ()
    epoch_patches: int = epochs.EPOCH_PATCHES  # of the run; not written, because the format fixes it

    @property
    def size_bytes(self) -> int:
        """Of all its parts."""
        return sum(part.size for part in self.parts)

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
        """Write the first line."""
        table = {
            "anchor": self.anchor,
            "base": None if self.base is None else {"digest": self.base.digest, "version": self.base.version},
            "created": self.created,
            "digest": self.digest,
            "epoch": self.epoch,
            "files": [{"id": file.id, "name": file.name, "size": file.size} for file in self.files],
            "format": FORMAT,
            "history": self.history,
            "index": self.index,
            "kind": self.kind.value,
            "layout": self.layout,
            "parts": [{"id": part.id, "size": part.size} for part in self.parts],
            "run": self.run,
            "step": self.step,
            "version": self.version,
        }
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def parse(data: bytes, trust: Collection[str] | None = None, epoch_patches: int = epochs.EPOCH_PATCHES) -> Manifest:
    """Read a record, believing nothing in it; with keys to trust, only one that they signed.

    Raises:
        SignatureError: not signed by whom it should; FormatError: not a record, or not in canonical form; LimitError,
        UnsupportedError: see there.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a manifest of {len(data)} bytes; at most {MAX_BYTES} are read", value=len(data))
    line = signature.check_form(data) if trust is None else signature.check(data, trust)
    table = load_json(line, "the manifest")
    if table.get("format") != FORMAT:
        raise UnsupportedError(f"this reader knows manifests of format {FORMAT}, not {table.get('format')!r}")
    try:
        base, anchor = table["base"], table["anchor"]
        manifest = Manifest(
            run=read_text(table["run"], RUN),
            version=read_whole(table["version"]),
            step=read_whole(table["step"]),
            epoch=read_whole(table["epoch"]),
            index=read_whole(table["index"], MAX_INDEX),
            base=None if base is None else BaseRef(read_whole(base["version"]), read_text(base["digest"], HASH)),
            layout=read_text(table["layout"], HASH),
            parts=tuple(
                PartRef(read_text(p["id"], HASH), read_whole(p["size"], MAX_SECTION_BYTES)) for p in table["parts"]
            ),
            digest=read_text(table["digest"], HASH),
            history=None if table["history"] is None else read_text(table["history"], HASH),
            created=read_whole(table["created"]),
            kind=_kind(table["kind"]),
            anchor=None if anchor is None else read_whole(anchor),
            files=tuple(
                FileRef(read_text(f["name"], _FILE), read_text(f["id"], HASH), read_whole(f["size"], MAX_FILE_BYTES))
                for f in table["files"]
            ),
            epoch_patches=epoch_patches,
        )
    except (KeyError, TypeError) as e:
        raise FormatError(f"the manifest lacks a field or has one of another kind: {e}") from e
    _check(manifest)
    if manifest.build() != line:
        raise FormatError("the manifest is not in canonical form")
    return manifest


def _check(manifest: Manifest) -> None:
    root = manifest.kind == RecordKind.VERSION and manifest.base is None
    if len(manifest.parts) > MAX_PARTS or (not manifest.parts) != root:
        raise LimitError(f"{len(manifest.parts)} parts in a record; a root has none, others 1 to {MAX_PARTS}")
    if len({part.id for part in manifest.parts}) != len(manifest.parts):
        raise FormatError("a manifest names a part twice")
    if len(manifest.files) > MAX_FILES or len({file.name for file in manifest.files}) != len(manifest.files):
        raise FormatError(f"a manifest names at most {MAX_FILES} files, each once")
    if manifest.kind == RecordKind.VERSION and (manifest.index == 0) != (manifest.base is None):
        raise FormatError("a version has a base and an index in its epoch, or neither")
    if manifest.kind == RecordKind.ANCHOR and manifest.base is not None:
        raise FormatError("an anchor has no base")
    if manifest.kind == RecordKind.SQUASH and manifest.base is None:
        raise FormatError("a squashed patch has a base")
    if manifest.kind != RecordKind.VERSION and manifest.history is not None:
        raise FormatError("anchors and squashed patches lead to epoch starts, where nothing is remembered")
    if manifest.base is not None and manifest.base.version >= manifest.version:
        raise FormatError("a version's base must be an earlier one")


def _kind(value: Any) -> RecordKind:
    if value not in list(RecordKind):
        raise UnsupportedError(f"a record of kind {str(value)[:40]!r}, which this reader does not know")
    return RecordKind(value)


def read_whole(value: Any, limit: int = MAX_VERSION) -> int:
    """Return a field of a record that is a whole number. Raises: FormatError."""
    if type(value) is not int or not 0 <= value <= limit:
        raise FormatError(f"the record has {str(value)[:40]!r} where a whole number up to {limit} belongs")
    return value


def read_text(value: Any, pattern: "re.Pattern[str]") -> str:
    """Return a field of a record that is a text of this pattern. Raises: FormatError."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"the record has {str(value)[:40]!r} where {pattern.pattern} belongs")
    return value
