"""A named pointer of a run: the version that a fleet of workers should have.

Each move of a pointer is a separate object with the next number: canonical JSON on one line, optionally followed by a
signature. Nothing is overwritten: the move with the highest number is valid.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pulsesync.core.arguments import shown
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import signature, versions
from pulsesync.format.json_reader import load_json
from pulsesync.format.manifest import MAX_VERSION

FORMAT = "pulse-pointer/1"
OPTIONAL = "x-"  # how fields begin that a reader ignores if it does not know them
MAX_BYTES = 1 << 12
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62}[a-z0-9_-])?")  # no last dot: Windows drops it
_HASH = re.compile("[0-9a-f]{64}")
_RUN = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Pointer:
    """One move of a pointer: the version that it points to from then on."""

    run: str
    name: str
    number: int  # 0 for the record that creates the pointer, and one more with each move
    version: int
    digest: str  # of the state of that version
    created: int  # seconds since 1970, by the clock of the process that moved it: informative only
    signed_by: str | None = field(default=None, compare=False)  # the public key in the signature

    @property
    def table(self) -> dict[str, str | int]:
        """The fields as they are written."""
        written = ("run", "name", "number", "version", "digest", "created")
        return {"format": FORMAT} | {name: getattr(self, name) for name in written}

    def build(self) -> bytes:
        """Write the line, without a signature."""
        return _write(self.table)


def check_name(name: str) -> str:
    """Check and return the name of a pointer. Raises: ValueError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            "the name of a pointer must be 1 to 64 lower-case letters, digits, '.', '_' or '-', the first a letter or "
            f"digit, the last not '.'; got {shown(name)}"
        )
    return name


def parse(data: bytes, trust: Collection[str] | None = None) -> Pointer:
    """Read one move of a pointer and check everything in it; with keys to trust, only accept one that they signed.

    Raises:
        SignatureError: no trusted key signed it; FormatError: it is not a pointer, or not in canonical form;
        LimitError, UnsupportedError.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a pointer can have {MAX_BYTES} bytes at most; this has {len(data)}", value=len(data))
    if not (end := data.find(b"\n") + 1):
        raise FormatError("a move of a pointer must end with a newline; this one is cut off")
    line, signed = data[:end], signature.parse(data[end:])
    if trust is not None:
        signature.check_move(line, signed, trust)
    table = load_json(line, "the pointer")
    versions.check_name(table.get("format"), FORMAT, "the pointer")
    try:
        pointer = Pointer(
            run=_read_text(table["run"], _RUN),
            name=_read_text(table["name"], NAME),
            number=_read_whole(table["number"]),
            version=_read_whole(table["version"]),
            digest=_read_text(table["digest"], _HASH),
            created=_read_whole(table["created"]),
            signed_by=signed.key if signed else None,
        )
    except KeyError as e:
        raise FormatError(f"the pointer does not have the field {e}") from e
    if _write(pointer.table | _read_optional(table, pointer.table)) != line:
        raise FormatError("the pointer is not in canonical form")
    return pointer


def _read_optional(table: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """The fields that a later release has added, all of them optional. Raises: UnsupportedError, if one is not."""
    added = {name: value for name, value in table.items() if name not in known}
    for name, value in added.items():
        if not name.startswith(OPTIONAL):
            raise versions.unknown(f"the pointer has the field {name[:40]!r}")
        if not isinstance(value, str):
            raise FormatError(f"the field {name[:40]!r} of the pointer must be a string")
    return added


def _write(table: Mapping[str, str | int]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _read_whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise FormatError(f"the pointer must have an integer from 0 to {MAX_VERSION} where it has {str(value)[:40]!r}")
    return value


def _read_text(value: Any, pattern: "re.Pattern[str]") -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise FormatError(f"the pointer must match {pattern.pattern} where it has {str(value)[:40]!r}")
    return value
