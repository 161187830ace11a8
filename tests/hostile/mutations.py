"""Random damage to a good version, at every layer: bytes, sections, fields, tables, payloads, frames, JSON.

Everything is drawn from the generator given, so an input is its seed; hypothesis passes one whose draws it can shrink.
"""

import hashlib
import json
from collections.abc import Callable
from random import Random
from typing import Any

from pulsesync.errors import PulseError
from pulsesync.format import manifest as manifests
from pulsesync.format import signature, wire
from tests import records
from tests.hostile import forge
from tests.hostile.forge import ANY, Context, Dense, Gap, Part, Plane, Sample, Step, Steps, Version, Victim

EDGES = [0, 1, 2, 7, 8, 63, 64, 127, 128, 255, 256, 2047, 2048, 16_383, 16_384, 65_535, 65_536]
EDGES += [1 << 20, 1 << 24, 1 << 28, 1 << 31, 1 << 40, 1 << 47, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 69]


# -- bytes and numbers ---------------------------------------------------------------------------------------------


def _span(data: bytes, rng: Random) -> tuple[int, int]:
    begin = rng.randrange(len(data) + 1)
    return begin, min(len(data), begin + rng.choice((1, 1, 2, 4, 8, 40, 200)))


def damage(data: bytes, rng: Random) -> bytes:
    """Flip, set, insert, delete, repeat, move or cut some bytes."""
    begin, end = _span(data, rng)
    kind = rng.randrange(8)
    if kind <= 1 and data:
        at = rng.randrange(len(data))
        new = data[at] ^ 1 << rng.randrange(8) if kind == 0 else rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        return data[:at] + bytes([new]) + data[at + 1 :]
    if kind == 2:
        return data[:begin] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 9)))) + data[begin:]
    if kind == 3:
        return data[:begin] + data[end:]
    if kind == 4:
        return data[:end] + data[begin:]
    if kind == 5:
        at, _ = _span(data, rng)
        return data[:at] + data[begin:end] + data[at + end - begin :]
    if kind == 6:
        return data[:begin] + bytes([rng.choice((0, 0xFF))]) * (end - begin) + data[end:]
    return data[:begin]


def number(value: int, rng: Random) -> int:
    """A number near it, or one at which something might break."""
    kind = rng.randrange(4)
    if kind == 0:
        return max(0, value + rng.choice((-2, -1, 1, 2)))
    if kind == 1:
        return value ^ 1 << rng.randrange(max(1, value.bit_length() + 1))
    return rng.choice(EDGES) if kind == 2 else rng.randrange(300)


def change_list(values: list[Any], rng: Random, change: Callable[[Any, Random], Any]) -> None:
    """Change, drop, repeat or swap members of a list."""
    if not values:
        return
    kind, i, j = rng.randrange(6), rng.randrange(len(values)), rng.randrange(len(values))
    if kind == 0:
        del values[i]
    elif kind == 1:
        values.insert(j, values[i])
    elif kind == 2:
        values[i], values[j] = values[j], values[i]
    else:
        values[i] = change(values[i], rng)


# -- fields --------------------------------------------------------------------------------------------------------


def _part(version: Version, rng: Random) -> Part:
    return rng.choice([part for part in version.parts if isinstance(part, Part)])


def change_header(version: Version, good: Sample, rng: Random) -> None:
    part, kind = _part(version, rng), rng.randrange(4)
    if kind == 0:
        part.magic = damage(part.magic, rng)[:8].ljust(8)
    elif kind == 1:
        part.version = rng.randrange(256)
    elif kind == 2:
        part.flags = rng.randrange(256)
    else:
        part.layout = hashlib.sha256(part.layout).digest()


def change_index(version: Version, good: Sample, rng: Random) -> None:
    index = _part(version, rng).index
    name = rng.choice(("tiles", "sections", "sizes", "codecs", "sums", "tile_count", "table_count", "size", "packed"))
    if name == "codecs":
        change_list(index.codecs, rng, lambda _, r: r.choice((0, 1, 2, 3, 4, 5, 6, 255)))
    elif name == "sums":
        change_list(index.sums, rng, lambda b, r: damage(b, r)[:16].ljust(16, b"\x00"))
    elif name == "packed":
        index.packed = not index.packed
    elif name in ("tile_count", "table_count", "size"):
        truth = {"tile_count": len(index.tiles), "table_count": len(index.tables), "size": len(index.plain())}
        setattr(index, name, number(truth[name], rng))
    else:
        change_list(getattr(index, name), rng, number)


def change_table(version: Version, good: Sample, rng: Random) -> None:
    index = _part(version, rng).index
    if not index.tables:
        return
    table, kind = rng.choice(index.tables), rng.randrange(10)
    if kind == 0:
        table.dtype = rng.choice((0, 4, 5, 8, 9, 11, 12, 255))
    elif kind == 1:
        table.lo = number(table.lo, rng)
    elif kind == 2:
        table.classes, table.ages = rng.choice(((table.ages, table.classes), (number(table.classes, rng), table.ages)))
    elif kind == 3:
        change_list(index.tables, rng, lambda t, _: t)
    elif kind == 8:
        table.listed_count = number(len(table.listed), rng)
    elif kind == 9:
        table.listed.append(rng.choice((0, 1, 300, *EDGES)))
        change_list(table.listed, rng, number)
    elif kind == 4 and len(table.frequencies) > 1:  # still adds up, where both are of one context
        i = rng.randrange(len(table.frequencies) - 1)
        moved = rng.randrange(table.frequencies[i] + 1)
        table.frequencies[i] -= moved
        table.frequencies[i + 1] += moved
    else:
        change_list(rng.choice((table.counts, table.skips, table.frequencies)), rng, number)


def change_plane(plane: Plane, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0:
        plane.packed = not plane.packed
    elif kind == 1:
        plane.content = damage(plane.content, rng)
    elif kind == 2:  # as long as before
        plane.content = damage(plane.content, rng)[: len(plane.content)].ljust(len(plane.content), b"\x00")
    else:
        plane.packed = True
        frame = damage(plane.write()[2:], rng)
        plane.stored = b"\x01" + wire.number(len(frame)) + frame


def change_context(payload: Context, rng: Random) -> None:
    kind = rng.randrange(8)
    if kind == 0:
        payload.table = rng.choice((rng.randrange(8), rng.randrange(256)))
    elif kind == 1:
        payload.cut = number(payload.cut, rng)
    elif kind == 2:
        change_list(payload.heads, rng, number)
    elif kind == 3 and payload.cold_planes:
        change_steps(payload.cold_planes, rng)
    elif kind == 3:
        change_list(payload.cold, rng, number)
    elif kind == 4:
        payload.cold_count = number(len(payload.cold) // 2, rng)
    elif kind == 5:  # other words, as many
        payload.stream = damage(payload.stream, rng)[: len(payload.stream)].ljust(len(payload.stream), b"\x00")
    elif kind == 6 and len(payload.heads) == 2:  # the truth about more or fewer words
        payload.stream = damage(payload.stream, rng)
        payload.stream = payload.stream[: len(payload.stream) // 2 * 2]
        payload.heads[1] = len(payload.stream) // 2
    else:
        payload.heads[0] ^= 1 << rng.randrange(8)


def change_steps(columns: Steps, rng: Random) -> None:
    i = rng.randrange(2)
    if rng.randrange(3) == 0:
        columns.widths[i] = rng.randrange(9)
    else:
        change_list(columns.planes[i], rng, _changed_plane)


def change_payload(version: Version, good: Sample, rng: Random) -> None:
    part = _part(version, rng)
    section = rng.choice(part.bodies)
    if not section:
        return
    i, kind = rng.randrange(len(section)), rng.randrange(6)
    body = section[i]
    if kind == 0 or isinstance(body, bytes):
        section[i] = damage(body if isinstance(body, bytes) else body.write(), rng)
    elif kind == 1 and good.others:
        section[i] = rng.choice(good.others)
    elif isinstance(body, Context):
        change_context(body, rng)
    elif isinstance(body, Gap) and rng.randrange(3) == 0:
        body.count, body.width = rng.choice(((number(body.count, rng), body.width), (body.count, rng.randrange(9))))
    elif isinstance(body, Step) and rng.randrange(4) == 0:
        body.count = number(body.count, rng)
    elif isinstance(body, Step):
        change_steps(body.columns, rng)
    elif isinstance(body, Gap | Dense):
        change_list(body.planes, rng, _changed_plane)
    if rng.randrange(8):
        part.fit()


def _changed_plane(plane: Plane, rng: Random) -> Plane:
    out = Plane(plane.content, plane.packed, plane.stored)
    change_plane(out, rng)
    return out


def change_places(version: Version, good: Sample, rng: Random) -> None:
    """List the payloads in another way: other tiles, other codecs, other sections, fewer or twice."""
    part = _part(version, rng)
    index = part.index
    if len({len(index.tiles), len(index.codecs), len(index.sums), sum(map(len, part.bodies))}) > 1 or not index.tiles:
        return
    payloads = part.payloads()
    i, kind = rng.randrange(len(payloads)), rng.randrange(4)
    tile, codec, total, body = payloads[i]
    if kind == 0:
        del payloads[i]
    elif kind == 1:
        payloads[i] = (tile, rng.randrange(7), total, body)
    elif kind == 2:
        free = sorted(set(range(len(good.layout.tiles))) - {p[0] for p in payloads})
        payloads[i] = (rng.choice(free or [tile]), codec, total, body)
    else:
        nothing = bytes([rng.randrange(4), rng.randrange(2) * rng.randrange(128), 0]) if rng.randrange(4) else b""
        payloads.append((forge.TILES["empty"], rng.randrange(6), bytes(16), nothing))
    payloads.sort(key=lambda p: p[0])
    part.place(payloads, sections=rng.choice((1, 2, 3)))


def change_parts(version: Version, good: Sample, rng: Random) -> None:
    """Other parts, or the same in another order, twice, or not at all."""
    kind = rng.randrange(4)
    if kind == 0:
        version.parts.append(good.version.copy().parts[0])
    elif kind == 1 and len(version.parts) > 1:
        version.parts.pop(rng.randrange(len(version.parts)))
    elif kind == 2:
        version.parts.reverse()
    else:
        other = forge.sample(rng.choice(forge.NAMES)).version.copy()
        version.parts[rng.randrange(len(version.parts))] = rng.choice(other.parts)


# -- JSON ----------------------------------------------------------------------------------------------------------


def change_json(value: Any, rng: Random) -> Any:
    """Another value of the same or another kind, somewhere in it."""
    if isinstance(value, dict) and value and rng.randrange(6):
        key, kind = rng.choice(sorted(value)), rng.randrange(8)
        if kind == 0:
            return {k: v for k, v in value.items() if k != key}
        if kind == 1:
            return value | {key + rng.choice(("", " ", "s")): value[rng.choice(sorted(value))]}
        return value | {key: change_json(value[key], rng)}
    if isinstance(value, list) and value and rng.randrange(6):
        out = list(value)
        change_list(out, rng, change_json)
        return out
    if type(value) is int and rng.randrange(4):
        return number(value, rng) * rng.choice((1, 1, 1, -1))
    if isinstance(value, bytes) and rng.randrange(4):
        return damage(value, rng)
    if isinstance(value, str) and rng.randrange(4):
        return damage(value.encode(errors="replace"), rng).decode("latin-1")
    return rng.choice((None, True, 0, -1, 1 << 60, 0.5, 1e300, float("nan"), "", "0" * 64, [], {}, [[]], "\ud800"))


def change_record(data: bytes, rng: Random) -> bytes:
    """Bytes of a record: at random, or under a checksum that fits, or its fields under a length that fits as well."""
    kind, front = rng.randrange(3), 4 + 1 + 16
    if kind == 0 or len(data) < front + records.CHECK_BYTES:
        return damage(data, rng)
    if kind == 1:
        return records.seal(damage(data[: -records.CHECK_BYTES], rng))
    reader = wire.ByteReader(data[front:], "forge")
    fields = damage(bytes(reader.take(reader.number(ANY))), rng)
    return records.seal(data[:front] + wire.number(len(fields)) + fields)


def change_manifest(version: Version, good: Sample, rng: Random) -> None:
    changed = change_json(version.manifest, rng)
    if isinstance(changed, dict) and isinstance(changed.get("parts"), list) and "layout" in changed:
        version.reseal = version.reseal and changed["parts"] == version.manifest["parts"]
        version.manifest = changed


def change_beside(version: Version, good: Sample, rng: Random) -> None:
    """Another root, or another version that a squash is to lead to; or another place for the record."""
    if not version.beside:
        return
    if rng.randrange(4) == 0:
        version.key = rng.choice(
            ("anchors/0000000000000001", "squashes/01/0000000000000000", "squashes/00/0000000000000001", version.key)
        )
        return
    key = rng.choice(sorted(version.beside))
    changed = change_json(version.beside[key], rng)
    if isinstance(changed, dict) and "layout" in changed:
        version.beside[key] = changed


def change_layout(version: Version, good: Sample, rng: Random) -> None:
    table, kind = json.loads(good.layout.data), rng.randrange(4)
    if kind == 0:
        forge.new_layout(version, damage(good.layout.data, rng))
    elif kind == 1:
        forge.new_layout(version, change_json(table, rng))
    elif kind == 2:  # another grid, often a good one
        tensor = rng.choice(table["tensors"])
        tensor[rng.choice(("rows", "columns"))] = sorted(
            {rng.randrange(1, 32) for _ in range(rng.choice((0, 1, 1, 3)))}
        )
        forge.new_layout(version, table)
    else:
        forge.new_layout(version, table | {"ties": change_json(table["ties"], rng)})
    if rng.randrange(4) == 0:
        version.set_layout(good.layout.id)


FIELDS = (
    change_header,
    change_index,
    change_index,
    change_table,
    change_table,
    change_payload,
    change_payload,
    change_payload,
    change_payload,
    change_places,
    change_parts,
    change_manifest,
    change_beside,
    change_layout,
)


# -- an input ------------------------------------------------------------------------------------------------------


def mutate(good: Sample, rng: Random) -> dict[str, bytes]:
    """What a store would hold of a version that was damaged once or more, by fields and by bytes."""
    version = good.version.copy()
    kind = rng.randrange(10)
    if kind < 6:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            rng.choice(FIELDS)(version, good, rng)
    elif kind == 6:  # a file, under its old id or its new one
        i = rng.randrange(len(version.parts))
        version.parts[i] = damage(_written(version.parts[i]), rng)
        version.reseal = rng.randrange(3) > 0
    elif kind == 7:  # a section
        part = _part(version, rng)
        sections = part.sections()
        change_list(sections, rng, damage)
        version.parts[version.parts.index(part)] = part.seal(sections)
    elif kind == 8:  # the index as it is before it is packed
        part = _part(version, rng)
        plain = damage(part.index.plain(), rng)
        stored = wire.number(len(plain)) + Plane(plain, bool(rng.randrange(2))).write()
        version.parts[version.parts.index(part)] = part.seal([stored, *part.sections()[1:]])
    else:  # the record as bytes, signed again if it was
        signer, version.signer = version.signer, None
        objects = version.objects()
        data = change_record(objects[version.key], rng)
        return objects | {version.key: signature.sign(data, signer) if signer else data}
    return version.objects()


def _written(part: Part | bytes) -> bytes:
    return part if isinstance(part, bytes) else part.write()


class MisreadError(AssertionError):
    """A reader accepted or refused an input in a way that it never may."""


def judge(victim: Victim, objects: dict[str, bytes]) -> str:
    """Feed an input to a reader and return the outcome; afterwards the reader is as before.

    Raises:
        MisreadError: another exception than a PulseError, a trace of what was refused, or a state that is not right.
    """
    try:
        error: PulseError | None = victim.feed(objects)
    except Exception as e:
        raise MisreadError(f"{type(e).__name__}: {e}") from e
    if error is not None:
        if not victim.untouched:
            raise MisreadError(f"refused ({type(error).__name__}: {error}), but not without a trace")
        if victim.forgot:
            victim.reset()
        return type(error).__name__
    if not victim.accepted_the_right_state():
        raise MisreadError("accepted a wrong state")
    # The writer of the manifest may begin an epoch: then the history is empty, and the manifest shows it.
    data, good = objects.get(victim.target.version.key), victim.target.version.manifest
    manifest = records.table_of(manifests.parse(data)) if data else {}
    same_place = all(manifest.get(key) == good[key] for key in ("base", "epoch", "index"))
    if same_place and not victim.history_is_right():
        raise MisreadError("accepted a wrong history")
    victim.take_back()
    return "accepted, and right"
