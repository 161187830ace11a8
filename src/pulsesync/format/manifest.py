"""What a version is made of: which parts, from which base, with which digest. A version exists when this file does.

Canonical JSON (sorted keys, no spaces), so that it can be signed as it stands; a signature has its place on a second
line, which this reader does not take yet.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format.container import MAX_SECTION_BYTES
from pulsesync.format.history import MAX_INDEX
from pulsesync.format.layout import load_json

FORMAT = "pulse-manifest/1-draft"
MAX_BYTES = 1 << 24
MAX_PARTS = 1 << 16
MAX_VERSION = 1 << 53
_HASH = re.compile("[0-9a-f]{64}")
_RUN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class PartRef:
    """A part by id (the SHA-256 of its header) and size in bytes."""

    id: str
    size: int


@dataclass(frozen=True)
class Base:
    """The version a patch is made against, and its state digest."""

    version: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """One version of a run. Without a base its parts are the whole state: an anchor."""

    run: str  # random, 32 hexadecimal digits: versions of two runs never mix
    version: int
    step: int  # the trainer's own count, which may go back
    epoch: int
    index: int  # patches of the epoch up to this one; 0 for an anchor
    base: Base | None
    layout: str  # SHA-256 of the layout file
    parts: tuple[PartRef, ...]
    digest: str  # of the state
    history: str | None  # digest of the history after this patch, where it remembers anything
    created: int  # seconds since 1970, by the publisher's clock: for people

    def build(self) -> bytes:
        """Write the file."""
        table = {
            "base": None if self.base is None else {"digest": self.base.digest, "version": self.base.version},
            "created": self.created,
            "digest": self.digest,
            "epoch": self.epoch,
            "format": FORMAT,
            "history": self.history,
            "index": self.index,
            "layout": self.layout,
            "parts": [{"id": part.id, "size": part.size} for part in self.parts],
            "run": self.run,
            "step": self.step,
            "version": self.version,
        }
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def parse(data: bytes) -> Manifest:
    """Read a manifest, believing nothing in it.

    Raises:
        FormatError: not a manifest, or not in canonical form; LimitError, UnsupportedError: see there.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a manifest of {len(data)} bytes; at most {MAX_BYTES} are read", value=len(data))
    table = load_json(data, "the manifest")
    if table.get("format") != FORMAT:
        raise UnsupportedError(f"this reader knows manifests of format {FORMAT}, not {table.get('format')!r}")
    try:
        base, parts = table["base"], table["parts"]
        manifest = Manifest(
            run=_text(table["run"], _RUN),
            version=_whole(table["version"]),
            step=_whole(table["step"]),
            epoch=_whole(table["epoch"]),
            index=_whole(table["index"], MAX_INDEX),
            base=None if base is None else Base(_whole(base["version"]), _text(base["digest"], _HASH)),
            layout=_text(table["layout"], _HASH),
            parts=tuple(PartRef(_text(p["id"], _HASH), _whole(p["size"], MAX_SECTION_BYTES)) for p in parts),
            digest=_text(table["digest"], _HASH),
            history=None if table["history"] is None else _text(table["history"], _HASH),
            created=_whole(table["created"]),
        )
    except (KeyError, TypeError) as e:
        raise FormatError(f"the manifest lacks a field or has one of another kind: {e}") from e
    if not 1 <= len(manifest.parts) <= MAX_PARTS:
        raise LimitError(f"{len(manifest.parts)} parts in a version; 1 to {MAX_PARTS} are allowed")
    if len({part.id for part in manifest.parts}) != len(manifest.parts):
        raise FormatError("a manifest names a part twice")
    if (manifest.index == 0) != (manifest.base is None):
        raise FormatError("a manifest has a base and an index in its epoch, or neither")
    if manifest.base is not None and manifest.base.version >= manifest.version:
        raise FormatError("a version's base must be an earlier one")
    if manifest.build() != data:
        raise FormatError("the manifest is not in canonical form")
    return manifest


def _whole(value: Any, limit: int = MAX_VERSION) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise FormatError(f"the manifest holds {str(value)[:40]!r} where a whole number up to {limit} belongs")
    return value


def _text(value: Any, pattern: "re.Pattern[str]") -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"the manifest holds {str(value)[:40]!r} where {pattern.pattern} belongs")
    return value
