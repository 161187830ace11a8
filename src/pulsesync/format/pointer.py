"""A named pointer of a run: the version that a fleet of workers is to have.

Each move of a pointer is a record of its own with the next number, canonical JSON on one line as a manifest is, with
its signature on a second line. Nothing is overwritten: the record with the highest number counts.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import signature
from pulsesync.format.layout import load_json
from pulsesync.format.manifest import HASH, RUN, read_text, read_whole

FORMAT = "pulse-pointer/1-draft"
MAX_BYTES = 1 << 12
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Pointer:
    """One move of a pointer: which version it names from then on."""

    run: str
    name: str
    number: int  # 0 for the record that creates the pointer, and one more with each move
    version: int
    digest: str  # of the state of that version
    created: int  # seconds since 1970, by the clock of the process that moved it: for people
    signed_by: str | None = field(default=None, compare=False)  # the key on the second line; not part of the first

    def build(self) -> bytes:
        """Write the first line."""
        table = {
            "created": self.created,
            "digest": self.digest,
            "format": FORMAT,
            "name": self.name,
            "number": self.number,
            "run": self.run,
            "version": self.version,
        }
        return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def check_name(name: str) -> str:
    """Return the name of a pointer. Raises: ValueError, for what is none."""
    if not NAME.fullmatch(name):
        raise ValueError(
            "the name of a pointer must be 1 to 64 lower-case letters, digits, '.', '_' or '-', the first a letter or "
            f"digit; got {name[:80]!r}"
        )
    return name


def parse(data: bytes, trust: Collection[str] | None = None) -> Pointer:
    """Read one move of a pointer, believing nothing in it; with keys to trust, only one that they signed.

    Raises:
        SignatureError: no trusted key signed it; FormatError: it is not a pointer, or not in canonical form;
        LimitError, UnsupportedError.
    """
    if len(data) > MAX_BYTES:
        raise LimitError(f"a pointer of {len(data)} bytes; at most {MAX_BYTES} are read", value=len(data))
    line = signature.check_form(data) if trust is None else signature.check(data, trust)
    table = load_json(line, "the pointer")
    if table.get("format") != FORMAT:
        raise UnsupportedError(f"this reader knows pointers of format {FORMAT}, not {str(table.get('format'))[:40]!r}")
    try:
        pointer = Pointer(
            run=read_text(table["run"], RUN),
            name=read_text(table["name"], NAME),
            number=read_whole(table["number"]),
            version=read_whole(table["version"]),
            digest=read_text(table["digest"], HASH),
            created=read_whole(table["created"]),
            signed_by=signature.signer(data),
        )
    except KeyError as e:
        raise FormatError(f"the pointer lacks the field {e}") from e
    if pointer.build() != line:
        raise FormatError("the pointer is not in canonical form")
    return pointer
