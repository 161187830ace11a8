"""Records as tables of their fields, written as docs/format.md says and not by the library: any field can be wrong.

A table has the fields of a `Manifest`, hashes as hexadecimal digits, and perhaps `extensions`: pairs of a tag and
bytes. What is no number, hash or name is written as the bytes that it resembles, and bytes are written as they are:
forging is not where fields are judged.
"""

import hashlib
from typing import Any

from pulsesync.format import container, wire
from pulsesync.format.manifest import Manifest, PartRef

KINDS = ("version", "anchor", "squash")
CHECK_BYTES = 8

Table = dict[str, Any]


def table_of(record: Manifest) -> Table:
    """The fields of a record."""
    return {
        "magic": b"\x89PR",
        "format": 1,
        "kind": record.kind.value,
        "run": record.run,
        "version": record.version,
        "step": record.step,
        "epoch": record.epoch,
        "index": record.index,
        "created": record.created,
        "anchor": record.anchor,
        "digest": record.digest,
        "layout": record.layout,
        "base": None if record.base is None else {"digest": record.base.digest, "version": record.base.version},
        "history": record.history,
        "parts": [_part_of(part) for part in record.parts],
        "files": [{"id": file.id, "name": file.name, "size": file.size} for file in record.files],
    }


def _part_of(part: PartRef) -> Table:
    if part.data is None:
        return {"id": part.id, "size": part.size}
    _, (index, payloads) = container.open_part(part.data, part.id)
    return {"index": bytes(index), "payloads": bytes(payloads)}


def write(table: Table) -> bytes:
    """A record, without a signature."""
    fields = write_fields(table)
    return seal(write_front(table) + number(table.get("length", len(fields))) + fields)


def seal(record: bytes) -> bytes:
    """A record with the checksum that it should have."""
    return record + hashlib.sha256(record).digest()[:CHECK_BYTES]


def write_front(table: Table) -> bytes:
    kind = table.get("kind")
    code = KINDS.index(kind) if kind in KINDS else kind
    return _raw(table.get("magic")) + _byte(table.get("format")) + _byte(code) + _raw(table.get("run"))


def write_fields(table: Table) -> bytes:
    base, history, anchor = table.get("base"), table.get("history"), table.get("anchor")
    extensions = table.get("extensions")
    flags = table.get("flags", (base is not None) + 2 * (history is not None) + 4 * (extensions is not None))
    plain = [table.get(name) for name in ("version", "step", "epoch", "index", "created")]
    out = [_byte(flags), *map(number, plain), number(anchor + 1 if type(anchor) is int else anchor or 0)]
    out += [_raw(table.get("digest")), _raw(table.get("layout"))]
    if base is not None:
        out += _base(table.get("version"), base)
    if history is not None:
        out.append(_raw(history))
    out += [_list(table.get("parts"), _part), _list(table.get("files"), _file)]
    if extensions is not None:
        out.append(_list(extensions, _extension))
    return b"".join(out)


def number(value: Any) -> bytes:
    """As LEB128; what is negative as a writer would that lets 64 bits wrap around."""
    if isinstance(value, int):
        return wire.number(value if value >= 0 else value % (1 << 64))
    return value if isinstance(value, bytes) else b""


def _byte(value: Any) -> bytes:
    return bytes([value % 256]) if isinstance(value, int) else value if isinstance(value, bytes) else b""


def _raw(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    try:
        return bytes.fromhex(value)
    except (TypeError, ValueError):
        return value.encode(errors="replace") if isinstance(value, str) else b""


def _base(version: Any, base: Any) -> list[bytes]:
    if not isinstance(base, dict):
        return [_raw(base)]
    earlier = base.get("version")
    distance = version - earlier if isinstance(version, int) and isinstance(earlier, int) else earlier
    return [number(distance), _raw(base.get("digest"))]


def _list(values: Any, write_one: Any) -> bytes:
    if not isinstance(values, list):
        return number(values)
    return number(len(values)) + b"".join(map(write_one, values))


def _part(part: Any) -> bytes:
    if not isinstance(part, dict):
        return _raw(part)
    if "index" in part or "payloads" in part:
        sections = [_raw(part.get(name)) for name in ("index", "payloads")]
        return _byte(part.get("form", 1)) + b"".join(number(len(section)) + section for section in sections)
    return _byte(part.get("form", 0)) + _raw(part.get("id")) + number(part.get("size"))


def _extension(extension: tuple[Any, Any]) -> bytes:
    tag, content = extension
    return number(tag) + number(len(content)) + _raw(content)


def _file(file: Any) -> bytes:
    if not isinstance(file, dict):
        return _raw(file)
    name = file.get("name")
    text = name.encode(errors="replace") if isinstance(name, str) else _raw(name)
    return _raw(file.get("id")) + number(file.get("size")) + number(len(text)) + text
