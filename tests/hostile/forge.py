"""Versions that can be taken apart into every field they are made of, and put together again with some of them wrong.

Hashes, ids and sizes are recomputed on writing, so that a checksum does not hide the check that an attack is about.
`read_part` and the `write` methods follow docs/format.md, not the library's encoder; `Victim` is a reader to attack.
"""

import copy
import hashlib
import itertools
import json
import pickle
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import zstandard
from numpy.typing import NDArray

from pulsesync.core import digest
from pulsesync.core.types import Codec, TensorSpec
from pulsesync.errors import NotFoundError, NothingPublishedError, PulseError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch, signature, tables, wire
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef, Manifest, RecordKind
from pulsesync.format.signature import SigningKey
from pulsesync.run.reporting import SyncReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import WeightState
from pulsesync.store.base import ObjectEntry, ReadOnlyStore
from tests import records

RUN = "0123456789abcdef" * 2
HEADER_BYTES = 44  # of a part, without its table of sections
ANY = 1 << 70  # no limit: forging is not where numbers are judged
KEY, HELPER, STRANGER = (SigningKey(digit * 64) for digit in "123")
DELEGATE = SigningKey(HELPER.secret, KEY.delegate(RUN, HELPER.public))


def numbers(values: list[int]) -> bytes:
    """As LEB128; what is negative as a writer would that lets 64 bits wrap around."""
    if all(0 <= n < 128 for n in values):
        return bytes(values)
    return wire.few_numbers(n if n >= 0 else n + (1 << 64) for n in values)


# -- the fields of a part ------------------------------------------------------------------------------------------


@dataclass
class Plane:
    """Some bytes, and how they are stored."""

    content: bytes
    packed: bool = False
    stored: bytes | None = None  # what to write in place of everything else
    good: tuple[bytes, bytes] = (b"", b"")  # a content, and the frame that a writer has made of it

    def write(self) -> bytes:
        if self.stored is not None:
            return self.stored
        if self.packed and self.content == self.good[0]:
            return self.good[1]
        if not self.packed:
            return b"\x00" + self.content
        frame = zstandard.ZstdCompressor(level=1).compress(self.content)
        return b"\x01" + wire.number(len(frame)) + frame

    @classmethod
    def read(cls, reader: wire.ByteReader, size: int) -> "Plane":
        begin, packed = reader.at, reader.data[reader.at] == 1
        content = bytes(reader.plane(size))
        return cls(content, packed, good=(content, bytes(reader.data[begin : reader.at])))


@dataclass
class Table:
    """Frequencies as the index lists them; everything as it is stored."""

    dtype: int
    lo: int
    classes: int
    ages: int
    counts: list[int]  # symbols of each context
    skips: list[int]
    frequencies: list[int]  # less one
    listed: list[int] = field(default_factory=list)  # sizes of steps: each less the one before, less one
    listed_count: int | None = None  # what to say in place of the truth

    def write(self) -> bytes:
        listed = len(self.listed) if self.listed_count is None else self.listed_count
        sizes = [self.lo, self.classes, self.ages, listed, *self.listed]
        return bytes([self.dtype]) + numbers([*sizes, *self.counts, *self.skips, *self.frequencies])

    @classmethod
    def read(cls, reader: wire.ByteReader) -> "Table":
        dtype, lo, classes, ages = reader.byte(), *(reader.number(ANY) for _ in range(3))
        listed = [reader.number(ANY) for _ in range(reader.number(ANY))]
        counts = [reader.number(ANY) for _ in range(classes * ages)]
        skips, frequencies = ([reader.number(ANY) for _ in range(sum(counts))] for _ in range(2))
        return cls(dtype, lo, classes, ages, counts, skips, frequencies, listed)


@dataclass
class Index:
    """Section 0: tables, and one column for each property of the tiles."""

    tables: list[Table]
    tiles: list[int]  # less the one before, less one
    codecs: list[int]
    sections: list[int]  # less the one before
    sizes: list[int]
    sums: list[bytes]
    packed: bool = False
    tile_count: int | None = None  # what to say in place of the truth
    table_count: int | None = None
    size: int | None = None

    def plain(self) -> bytes:
        tables = len(self.tables) if self.table_count is None else self.table_count
        tiles = len(self.tiles) if self.tile_count is None else self.tile_count
        return b"".join(
            (
                wire.number(tables),
                *(table.write() for table in self.tables),
                wire.number(tiles),
                numbers(self.tiles),
                bytes(self.codecs),
                numbers(self.sections),
                numbers(self.sizes),
                *self.sums,
            )
        )

    def write(self) -> bytes:
        plain = self.plain()
        return wire.number(len(plain) if self.size is None else self.size) + Plane(plain, self.packed).write()

    @classmethod
    def read(cls, section: bytes) -> "Index":
        outer = wire.ByteReader(section, "forge")
        plane = Plane.read(outer, outer.number(ANY))
        reader = wire.ByteReader(plane.content, "forge")
        tables = [Table.read(reader) for _ in range(reader.number(ANY))]
        count = reader.number(ANY)
        tiles = [reader.number(ANY) for _ in range(count)]
        codecs = list(reader.take(count))
        sections, sizes = ([reader.number(ANY) for _ in range(count)] for _ in range(2))
        return cls(tables, tiles, codecs, sections, sizes, [bytes(reader.take(16)) for _ in tiles], plane.packed)


@dataclass
class Context:
    """A payload of `context` or `history` for a tile of one block."""

    table: int
    cut: int
    heads: list[int]  # changes * 8 + log2 of the lanes, words
    cold: list[int]  # gap, step, gap, step, ...
    stream: bytes
    cold_count: int | None = None  # what to say in place of the truth
    cold_planes: "Steps | None" = None  # what to write in place of cold, as where there are many

    def write(self) -> bytes:
        cold = len(self.cold) // 2 if self.cold_count is None else self.cold_count
        front = bytes([self.table]) + numbers([self.cut, *self.heads, cold])
        return front + (self.cold_planes.write() if self.cold_planes else numbers(self.cold)) + self.stream

    @classmethod
    def read(cls, body: bytes) -> "Context":
        reader = wire.ByteReader(body, "forge")
        table, cut, heads = reader.byte(), reader.number(ANY), [reader.number(ANY)]
        if heads[0]:
            heads.append(reader.number(ANY))
        count = reader.number(ANY)
        cold = [reader.number(ANY) for _ in range(2 * count if count <= 64 else 0)]
        planes = Steps.take(reader, count) if count > 64 else None
        stream = bytes(reader.take(2 * heads[-1]))
        return cls(table, cut, heads, cold, stream, count if planes else None, planes)


@dataclass
class Gap:
    """A payload of `gap`."""

    count: int
    width: int
    planes: list[Plane]

    def write(self) -> bytes:
        return wire.number(self.count) + bytes([self.width]) + b"".join(plane.write() for plane in self.planes)

    @classmethod
    def read(cls, body: bytes, itemsize: int) -> "Gap":
        reader = wire.ByteReader(body, "forge")
        count, width = reader.number(ANY), reader.byte()
        return cls(count, width, [Plane.read(reader, count) for _ in range(width + itemsize)])


@dataclass
class Steps:
    """Gaps and steps, each as many planes as their width says."""

    widths: list[int]
    planes: list[list[Plane]]

    def write(self) -> bytes:
        both = zip(self.widths, self.planes, strict=True)
        return b"".join(bytes([width]) + b"".join(plane.write() for plane in some) for width, some in both)

    @classmethod
    def take(cls, reader: wire.ByteReader, count: int) -> "Steps":
        widths, planes = [], []
        for _ in range(2):
            widths.append(reader.byte())
            planes.append([Plane.read(reader, count) for _ in range(widths[-1])])
        return cls(widths, planes)


@dataclass
class Step:
    """A payload of `step`."""

    count: int
    columns: Steps

    def write(self) -> bytes:
        return wire.number(self.count) + self.columns.write()

    @classmethod
    def read(cls, body: bytes) -> "Step":
        reader = wire.ByteReader(body, "forge")
        count = reader.number(ANY)
        return cls(count, Steps.take(reader, count))


@dataclass
class Dense:
    """A payload of `dense` or `xor` for a tile of one block."""

    planes: list[Plane]

    def write(self) -> bytes:
        return b"".join(plane.write() for plane in self.planes)

    @classmethod
    def read(cls, body: bytes, size: int, itemsize: int) -> "Dense":
        reader = wire.ByteReader(body, "forge")
        return cls([Plane.read(reader, size) for _ in range(itemsize if size else 0)])


@dataclass
class Part:
    """A whole file. `bodies` holds the payloads of each section from 1 on; `fit` writes their sizes to the index."""

    layout: bytes
    index: Index
    bodies: list[list[Any]]
    magic: bytes = b"\x89PULSE\n\x1a"
    version: int = 1
    flags: int = 0

    def fit(self) -> "Part":
        self.index.sizes = [len(_bytes(body)) for section in self.bodies for body in section]
        return self

    def place(self, payloads: list[tuple[int, int, bytes, Any]], sections: int = 1) -> "Part":
        """List these payloads (tile, codec, sum, body), spread over the given number of sections."""
        per = -(-len(payloads) // sections) if payloads else 1
        tiles = [-1, *(tile for tile, *_ in payloads)]
        places = [1, *(1 + i // per for i in range(len(payloads)))]
        self.index.tiles = [b - a - 1 for a, b in itertools.pairwise(tiles)]
        self.index.codecs = [codec for _, codec, _, _ in payloads]
        self.index.sections = [b - a for a, b in itertools.pairwise(places)]
        self.index.sums = [total for *_, total, _ in payloads]
        self.bodies = [[body for *_, body in payloads[i * per : (i + 1) * per]] for i in range(sections)]
        return self.fit()

    def payloads(self) -> list[tuple[int, int, bytes, Any]]:
        tiles = np.cumsum([n + 1 for n in self.index.tiles]) - 1
        flat = [body for section in self.bodies for body in section]
        return list(zip(map(int, tiles), self.index.codecs, self.index.sums, flat, strict=True))

    def sections(self) -> list[bytes]:
        return [self.index.write(), *(b"".join(map(_bytes, section)) for section in self.bodies)]

    def seal(self, sections: list[bytes], *, count: int | None = None, sizes: dict[int, int] | None = None) -> bytes:
        """The file with these sections, whatever `bodies` says, and whatever count and sizes a liar would give."""
        said = len(sections) if count is None else count
        head = struct.pack("<8sBBH32s", self.magic, self.version, self.flags, said, self.layout)
        table = b"".join(
            struct.pack("<Q32s", (sizes or {}).get(i, len(s)), hashlib.sha256(s).digest())
            for i, s in enumerate(sections)
        )
        return b"".join((head, table, *sections))

    def write(self) -> bytes:
        return self.seal(self.sections())


def _bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else body.write()


def read_part(data: bytes | memoryview, layout: Layout) -> Part:
    """Take a good file apart."""
    data = bytes(data)
    (count,) = struct.unpack_from("<H", data, 10)
    at, sections = HEADER_BYTES + 40 * count, []
    for i in range(count):
        (size,) = struct.unpack_from("<Q", data, HEADER_BYTES + 40 * i)
        sections.append(data[at : at + size])
        at += size
    part = Part(data[12:44], Index.read(sections[0]), [[] for _ in sections[1:]])
    places, used = np.cumsum([1, *part.index.sections])[1:], [0] * count
    tiles = np.cumsum([n + 1 for n in part.index.tiles]) - 1
    for tile, codec, section, size in zip(tiles, part.index.codecs, places, part.index.sizes, strict=True):
        body = sections[section][used[section] : used[section] + size]
        used[section] += size
        part.bodies[section - 1].append(_read_body(codec, body, layout.tiles[tile].size, layout.tiles[tile].tensor))
    assert part.write() == data or part.index.packed  # zstd frames may differ
    return part


def _read_body(codec: int, body: bytes, size: int, tensor: TensorSpec) -> Any:
    if codec == Codec.STEP:
        return Step.read(body)
    if codec in (Codec.DENSE, Codec.XOR):
        return Dense.read(body, size, tensor.kind.itemsize)
    if codec == Codec.RAW:
        return body
    return Gap.read(body, tensor.kind.itemsize) if codec == Codec.GAP else Context.read(body)


# -- a version -----------------------------------------------------------------------------------------------------


@dataclass
class Version:
    """One record and its parts as objects of a store, in pieces that are there to be spoilt.

    `manifest` has the fields of the record, as `tests.records` writes them.
    """

    key: str
    manifest: dict[str, Any]
    layout: bytes
    parts: list[Part | bytes]
    ids: list[str]  # of the good parts
    reseal: bool = True  # name parts by what they have become, in the record too
    inline: bool = False  # whether parts stand in the record, if they are not damaged as files
    signer: SigningKey | None = None
    beside: dict[str, dict[str, Any]] = field(default_factory=dict)  # records that belong to it, by key
    trusted: SigningKey | None = None  # who signs those

    def copy(self) -> "Version":
        copied: Version = pickle.loads(pickle.dumps(self))
        return copied

    def objects(self) -> dict[str, bytes]:
        """What a store would hold of it."""
        files = [part if isinstance(part, bytes) else part.write() for part in self.parts]
        manifest = copy.copy(self.manifest)
        ids = self.ids
        if self.reseal:
            ids = [part_id(data) for data in files]
            manifest["parts"] = [
                self._inlined(part) or {"id": i, "size": len(f)}
                for part, i, f in zip(self.parts, ids, files, strict=True)
            ]
        objects = zip(self.parts, ids, files, strict=False)
        out = {f"parts/{i}": data for part, i, data in objects if not self._inlined(part)}
        if self.layout:
            out[f"layouts/{manifest['layout']}"] = self.layout
        out |= {key: signed(table, self.trusted) for key, table in self.beside.items()}
        return out | {self.key: signed(manifest, self.signer)}

    def _inlined(self, part: Part | bytes) -> dict[str, Any] | None:
        """What the record has of a part that stands in it."""
        if not self.inline or isinstance(part, bytes) or len(part.bodies) != 1:
            return None
        return dict(zip(("index", "payloads"), part.sections(), strict=True))

    def set_layout(self, id_: str) -> None:
        for table in (self.manifest, *self.beside.values()):
            table["layout"] = id_


def signed(table: Any, key: SigningKey | None) -> bytes:
    """A record as it lies in a store."""
    record = records.write(table)
    return signature.sign(record, key) if key else record


def json_bytes(table: Any) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode()


def part_id(data: bytes) -> str:
    """The SHA-256 of what claims to be the header."""
    count = int.from_bytes(data[10:12], "little")
    return hashlib.sha256(data[: HEADER_BYTES + 40 * count]).hexdigest()


def new_layout(version: Version, table: Any) -> None:
    """Give a version another layout, and its parts the hash of it."""
    version.layout = table if isinstance(table, bytes) else json_bytes(table)
    version.set_layout(hashlib.sha256(version.layout).hexdigest())
    for part in version.parts:
        if isinstance(part, Part):
            part.layout = bytes.fromhex(version.manifest["layout"])


# -- good versions to start from -----------------------------------------------------------------------------------

SPECS = [
    TensorSpec("bytes", "U8", (33,)),
    TensorSpec("doubles", "F64", (3, 3)),
    TensorSpec("eight", "F8_E4M3", (24, 16)),
    TensorSpec("eight.wide", "F8_E5M2", (12, 16)),
    TensorSpec("embed", "BF16", (48, 32), (24,), (20,)),  # four tiles, none of them contiguous
    TensorSpec("empty", "BF16", (0, 4)),
    TensorSpec("half", "F16", (40, 16)),
    TensorSpec("ints", "I32", (50,)),
    TensorSpec("main", "BF16", (64, 32)),
    TensorSpec("scalar", "F32", ()),
    TensorSpec("wide", "F32", (30, 16)),
]
TIES = {"head": "main"}
BIG = TensorSpec("main", "BF16", (1 << 14, 16))
TILES = {
    "bytes": 0,
    "doubles": 1,
    "eight": 2,
    "embed": 4,
    "empty": 8,
    "half": 9,
    "ints": 10,
    "main": 11,
    "scalar": 12,
    "wide": 13,
}
_NUMPY = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "U8": "uint8",
}

Flats = dict[str, np.ndarray]


def numpy_dtype(name: str) -> np.dtype:
    label = _NUMPY[name]
    return np.dtype(getattr(ml_dtypes, label) if hasattr(ml_dtypes, label) else label)


def start(specs: list[TensorSpec], seed: int) -> Flats:
    """Weights like a model's, with some that no model has: NaN with a payload, -0.0, subnormals, infinity."""
    rng = np.random.default_rng(seed)
    out = {}
    for spec in specs:
        if spec.kind.exponent_shift is None and spec.dtype != "F64":
            out[spec.name] = rng.integers(0, 1 << 7, spec.size).astype(spec.kind.bits)
            continue
        values = (rng.standard_normal(spec.size) * 0.1).astype(np.float32)
        bits = values.astype(numpy_dtype(spec.dtype)).view(spec.kind.bits)
        top = 1 << (8 * spec.kind.itemsize - 1)
        for i, odd in enumerate((top - 1, top, 0, 1, top | 1)[: spec.size // 8]):
            bits[7 * i] = odd
        out[spec.name] = bits
    return out


def step(old: Flats, seed: int) -> Flats:
    """The next version's weights: some of the smaller ones a place or two on, and a few that are quite different."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, bits in old.items():
        new, size = bits.copy(), bits.size
        top = 1 << (8 * bits.itemsize - 1)
        order = np.argsort(bits & bits.dtype.type(top - 1), kind="stable")
        near = order[: size // 2][rng.random(size // 2) < 0.2]
        new[near] += rng.choice(np.array([1, 1, 1, 2], bits.dtype), near.size)
        for i in rng.integers(0, size, size and 1 + size // 400):
            new[i] ^= bits.dtype.type(rng.integers(1, min(top, 1 << 30)))
        out[name] = new
    return out


def low_cut(changes: np.ndarray, sampled: np.ndarray) -> int:
    """A cut that leaves a quarter of the changes cold: in tiles this small the writer's own would leave none."""
    return int(np.searchsorted(np.cumsum(changes) * 4, 3 * changes.sum()))


def low_cuts(changes: np.ndarray, sampled: np.ndarray) -> NDArray[np.int64]:
    """Such cuts of several tiles."""
    return np.array([low_cut(*one) for one in zip(changes, sampled, strict=True)])


def many_lanes(decisions: NDArray[np.int64]) -> NDArray[np.int64]:
    """More lanes than so few decisions are worth."""
    return 1 << np.minimum(5, decisions // 200)


class Run:
    """A publisher whose bytes are the same every time."""

    def __init__(self, specs: list[TensorSpec], ties: dict[str, str], key: SigningKey | None = None) -> None:
        self.layout, self.key = layouts.make(specs, ties), key
        self.state = WeightState(HostBackend(self.layout, start(specs, 0)))
        self.manifest = Manifest(
            run=RUN,
            version=0,
            step=0,
            epoch=0,
            index=0,
            base=None,
            layout=self.layout.id,
            parts=(),
            digest=self.state.digest,
            history=None,
            created=0,
        )
        self.seed = 0
        self.published: dict[str, bytes] = {f"layouts/{self.layout.id}": self.layout.data}
        self.latest = self.anchor()
        self.latest.beside["manifests/0000000000000000"] = records.table_of(self.manifest)

    def anchor(self) -> Version:
        """An anchor of the version published last."""
        part = patch.encode_whole(self.layout, self.layout.tiles, self.state.flats, self.state.sums)
        record = replace(self.manifest, kind=RecordKind.ANCHOR, base=None, history=None)
        return self._version(f"anchors/{record.starts:016d}", record, [read_part(part.data, self.layout)])

    def encode(self, new: Flats, codec: Any) -> Part:
        state, kept = self.state, self.state.history if codec == "history" else None
        with mock.patch.object(tables, "choose_cuts", low_cuts), mock.patch.object(tables, "lanes_for", many_lanes):
            made = patch.encode(self.layout, self.layout.tiles, state.flats, new, state.sums, codec=codec, history=kept)
        return read_part(made.data, self.layout)

    def advance(self, *codecs: str) -> Version:
        """Publish a version of one codec; or, given several, one in two parts whose tiles take turns with them."""
        self.published |= self.latest.objects()
        self.seed += 1
        new, last = step(self.state.flats, self.seed), self.manifest
        made = [self.encode(new, codec) for codec in codecs]
        parts = made if len(made) == 1 else _take_turns(made)
        sums = {t.ordinal: digest.count_tile(t, new[t.tensor.name]) for t in self.layout.tiles}
        self.manifest = replace(
            last,
            version=last.version + 1,
            index=last.index + 1,
            base=BaseRef(last.version, last.digest),
            digest=digest.state_digest(self.layout.tables, sums.values()),
        )
        found = [patch.decode(p.write(), self.layout, self.state.flats, history=self.state.history) for p in parts]
        history = self.state.history.after([one for part in found for one in part.patches], self.state.flats)
        self.manifest = replace(self.manifest, history=history.digest() if history.tiles else None)
        self.state = WeightState(HostBackend(self.layout, new))
        self.state.history = history
        self.latest = self._version(f"manifests/{self.manifest.version:016d}", self.manifest, parts)
        return self.latest

    def squash(self, base: Manifest, flats: Flats) -> Version:
        """One patch from an epoch's start to the version published last, signed by a delegate if the run is signed."""
        old = WeightState(HostBackend(self.layout, flats))
        with mock.patch.object(tables, "choose_cuts", low_cuts), mock.patch.object(tables, "lanes_for", many_lanes):
            made = patch.encode(self.layout, self.layout.tiles, old.flats, self.state.flats, old.sums, codec="context")
        record = replace(self.manifest, kind=RecordKind.SQUASH, base=BaseRef(base.version, base.digest), history=None)
        out = self._version("squashes/00/0000000000000000", record, [read_part(made.data, self.layout)])
        out.signer = DELEGATE if self.key else None
        return out

    def _version(self, key: str, record: Manifest, parts: list[Part]) -> Version:
        table = records.table_of(record)
        files = [part.write() for part in parts]
        table["parts"] = [{"id": part_id(data), "size": len(data)} for data in files]
        ids = [ref["id"] for ref in table["parts"]]
        return Version(key, table, b"", list(parts), ids, signer=self.key, trusted=self.key)


def _take_turns(made: list[Part]) -> list[Part]:
    """Two parts of two sections each; their tiles in turn by the codecs of these parts, whose tables they share."""
    shared = [table for part in made for table in part.index.tables]
    before = np.cumsum([0, *(len(part.index.tables) for part in made)])
    chosen = []
    for i, choices in enumerate(zip(*(part.payloads() for part in made), strict=True)):
        turn = i % len(made)
        *what, body = choices[turn]
        if isinstance(body, Context):
            body.table += int(before[turn])
        chosen.append((*what, body))
    out = []
    for some in (chosen[::2], chosen[1::2]):
        part = Part(made[0].layout, Index(copy.deepcopy(shared), [], [], [], [], [], packed=True), [])
        out.append(part.place(some, sections=2))
    return out


@dataclass
class Sample:
    """A good version, and what a reader holds before and after it."""

    name: str
    layout: Layout
    version: Version
    published: dict[str, bytes]
    before: Flats
    after: Flats
    history: History  # after it
    others: list[Any] = field(default_factory=list)  # payloads of another version, to splice in
    trust: str | None = None
    patches: dict[str, bytes] = field(default_factory=dict)  # of a squash: what it is in place of


def run_for(name: str) -> Run:
    """The run of a sample up to its base."""
    run = Run([BIG], {}) if name.startswith("big") else Run(SPECS, TIES)
    if not name.endswith("anchor"):
        kept = "history" if name in ("history", "mixed", "big") else name
        for _ in range(2):
            run.advance(kept)
    return run


@cache
def sample(name: str) -> Sample:
    """A record by name: one of NAMES, or "big" and "big.anchor", of one tensor. Patches are the third of their run.

    "inline" is "history" with its part in the record.
    """
    if name == "squash":
        return _squash_sample()
    if name == "inline":
        found = sample("history")
        return replace(found, name=name, version=replace(found.version.copy(), inline=True))
    run = run_for(name)
    if name.endswith("anchor"):
        noise = start(list(run.layout.tensors), 99)
        return Sample(name, run.layout, run.latest, dict(run.published), noise, run.state.flats, History())
    before, last = run.state.flats, run.latest
    codecs = {"mixed": ("history", "gap", "dense", "context", "step", "xor"), "big": ("history",)}
    good = run.advance(*codecs.get(name, (name,)))
    others = _bodies(last)
    return Sample(name, run.layout, good, run.published, before, run.state.flats, run.state.history, others)


def _bodies(version: Version) -> list[Any]:
    """The payloads of a version."""
    return [body for part in version.parts if isinstance(part, Part) for *_, body in part.payloads()]


def _squash_sample() -> Sample:
    """A squash over the first epoch of a signed run, by a delegate; the patches it is in place of are gone."""
    run = Run(SPECS, TIES, KEY)
    root, before = run.manifest, run.state.flats
    others: list[Any] = []
    for _ in range(EPOCH_PATCHES):
        run.advance("history")
        others = others or _bodies(run.latest)
    good = run.squash(root, before)
    last = run.latest
    good.beside[last.key] = last.manifest
    everything = run.published | last.objects()
    kept = [f"layouts/{run.layout.id}", "manifests/" + "0" * 16, "anchors/" + "0" * 16]
    kept += [f"parts/{ref.id}" for ref in manifests.parse(everything[kept[2]]).parts]
    published = {key: everything[key] for key in kept} | {"head": str(run.manifest.version).encode()}
    patches = {key: data for key, data in everything.items() if key not in published}
    return Sample(
        "squash", run.layout, good, published, before, run.state.flats, History(), others, KEY.public, patches
    )


NAMES = ("mixed", "history", "context", "gap", "step", "dense", "xor", "anchor", "squash", "inline")


# -- the reader under attack ---------------------------------------------------------------------------------------


class MemoryStore(ReadOnlyStore):
    """Objects in memory: what was published, and over it what an attacker put there."""

    def __init__(self, published: dict[str, bytes]) -> None:
        self.published = published
        self.forged: dict[str, bytes] = {}

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        for objects in (self.forged, self.published):
            if key in objects:
                return bytes(memoryview(objects[key])[begin:end])  # a copy, as from a disk
        raise NotFoundError(f"there is no {key}", key=key)

    def _read_only(self, key: str) -> StoreError:
        return StoreError("a reader wrote to the store it reads", key=key)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        found = self.published | self.forged
        return (ObjectEntry(key, len(found[key]), 0.0) for key in sorted(found) if key.startswith(prefix))


class Victim:
    """A subscriber that holds a sample's base, in tensors whose memory is one buffer."""

    def __init__(self, target: Sample) -> None:
        self.target = target
        self.store = MemoryStore(target.published)
        specs = {spec.name: spec for spec in target.layout.tensors}
        specs |= {alias: specs[name] for alias, name in target.layout.ties.items()}  # with memory of their own
        sizes = {name: -(-spec.size * spec.kind.itemsize // 8) * 8 for name, spec in specs.items()}
        self.memory = np.zeros(sum(sizes.values()), np.uint8)
        self.tensors, at = {}, 0
        for name, spec in specs.items():
            flat = self.memory[at : at + spec.size * spec.kind.itemsize].view(numpy_dtype(spec.dtype))
            self.tensors[name] = flat.reshape(spec.shape)
            at += sizes[name]
        self.right = self._memory_with(target.after)
        self.report: SyncReport | None = None
        self.reset()

    def _memory_with(self, flats: Flats) -> bytes:
        for name, tensor in self.tensors.items():
            flat = flats[self.target.layout.ties.get(name, name)]
            tensor.reshape(-1).view(flat.dtype)[:] = flat
        return self.memory.tobytes()

    def reset(self) -> None:
        """Bring it back to the base, by a sync of what was published."""
        self.refresh()
        with suppress(NothingPublishedError):  # of an anchor's sample nothing is published before it
            self.subscriber.sync(self.tensors)
        assert self.memory.tobytes() == self.held
        self.state = self.subscriber.state
        self.kept = (self.state.sums, self.state.history, self.subscriber.position) if self.state else None
        self.remembered = self._remembered()

    def refresh(self) -> None:
        """Put a subscriber in its place that holds nothing yet, over the weights of the base."""
        self.store.forged = {}
        self.held = self._memory_with(self.target.before)
        self.subscriber = Subscriber(self.store, trust=self.target.trust)
        self.state, self.kept, self.remembered = None, None, None

    def take_back(self) -> None:
        """The same at once, after a version was accepted."""
        if self.kept is None or self.state is None or self.subscriber.state is not self.state:
            self.reset()
            return
        self.memory[:] = np.frombuffer(self.held, np.uint8)
        self.state.sums, self.state.history, self.state.position = self.kept
        self.subscriber._follower.local._undo.clear()

    def _remembered(self) -> Any:
        state = self.subscriber.state
        if state is None:
            return None
        known = [(k, t.cut, [b.last.tobytes() for b in t.blocks]) for k, t in sorted(state.history.tiles.items())]
        return dict(state.sums), state.history.index, known, self.subscriber.position

    def feed(self, objects: dict[str, bytes]) -> PulseError | None:
        """Sync with these objects in the store. Return the error, or None if they were accepted."""
        self.store.forged, self.report = objects, None
        try:
            self.report = self.subscriber.sync(self.tensors)
        except PulseError as e:
            return e
        finally:
            self.store.forged = {}
        return None

    @property
    def forgot(self) -> bool:
        """Whether the reader no longer knows which version its weights are, although it did before."""
        return self.kept is not None and self.subscriber.position is None

    @property
    def untouched(self) -> bool:
        """Whether no weight has changed, and no sum or byte of history either, unless it forgot its version."""
        same = self.memory.tobytes() == self.held
        return same and (self.subscriber.position is None or self._remembered() == self.remembered)

    def accepted_the_right_state(self) -> bool:
        """Whether the weights are the published ones, and match the sums that the reader keeps."""
        try:
            self.subscriber.verify()
        except PulseError:
            return False
        return self.memory.tobytes() == self.right

    def history_is_right(self) -> bool:
        assert self.subscriber.state is not None
        local, target = self.subscriber.state.history, self.target.history
        return bool(local.tiles.keys() == target.tiles.keys() and local.digest() == target.digest())
