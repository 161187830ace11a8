"""What trainers send each other: entries of an update, coded against the weights that all of them have.

An entry is sent where theta lies close to the border of its BF16 value, and mostly to cross that border. So each entry
is described by the distance to the nearest border, in octaves, and by whether the trend points there. *Which* entries
are sent, with what sign, and how large they are is then coded like a weight patch whose old weights are those
descriptions (`pulsesync.format`). The mantissas of exact values follow uncoded. docs/loco.md has the bytes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.errors import BaseMismatchError, ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import layout as layouts
from pulsesync.format.json_reader import load_json
from pulsesync.loco.gate import LARGEST, LOWEST_UNIT, SparseVector
from pulsesync.loco.outer_step import Trend
from pulsesync.loco.vectors import HOST, Vector, VectorOps, kernels_of, vectors_of

FORMAT = "pulse-loco/1"
MAX_HEAD_BYTES = 1 << 12
MAX_NAME = 128
DENSE, EXACT, COMPACT = "dense", "exact", "compact"


@dataclass(frozen=True)
class PayloadHeader:
    """The header of a payload. Its base is the digest of the shared state before the round."""

    trainer: str
    terms: int  # updates that are added up in it: 1, or those of a whole round
    fragment: int
    round: int
    base: str
    begin: int  # the entries of the fragment that it covers
    end: int
    mode: str  # dense, exact or compact
    count: int  # entries sent
    scale: int  # exact: the commonest exponent field; compact: values are multiples of 2^scale
    coded: int  # bytes of the coded part; the mantissas follow
    sha256: str  # of the header with this field empty, and of everything after it


def describe(theta: Vector, trend: Trend) -> Vector:
    """What all trainers know of an entry: bits 7 to 14: its class, bit 15: the sign of an update to the nearest border.

    The class is twice the octave of the distance to the nearest border of the BF16 value, plus one where the trend does
    not point there. Differences of neighbouring FP32 numbers are exact, so all machines get the same result.
    """
    return kernels_of(theta).describe(theta, trend)


@dataclass(frozen=True, eq=False)
class Coder:
    """Encodes and decodes the payloads of one round of one fragment."""

    fragment: int
    round: int
    base: str
    described: Vector | None  # None where payloads are dense
    vectors: VectorOps = HOST  # the device of the entries

    def encode(self, trainer: str, sent: SparseVector, unit: int | None, begin: int = 0, terms: int = 1) -> bytes:
        """Write entries, those of the fragment from begin on. unit: values are multiples of 2^unit, else exact."""
        mode, scale, coded, v = DENSE, 0, b"", self.vectors
        if self.described is None:
            rest = np.ascontiguousarray(v.fetch(sent.values), "<f4").tobytes()
        else:
            bits = v.bits(sent.values)
            if unit is not None:
                mode, scale, rest = COMPACT, unit, b""
                sizes = v.integers(abs(v.in_units(sent.values, unit)))
            else:
                octaves = bits >> 23 & 0xFF
                mode, scale = EXACT, int(v.count_small(octaves).argmax())
                off = octaves - scale
                sizes = 1 + ((off << 1) ^ (off >> 63))
                rest = _pack(v.fetch(bits & 0x7FFFFF).astype(np.uint32))
            described = self.described[begin : begin + sent.size]
            coded = v.kernels.encode_steps(described, sent.positions, sizes, bits >> 31)
        about, end, count = (trainer, terms, self.fragment, self.round, self.base), begin + sent.size, len(sent.values)
        head = PayloadHeader(*about, begin, end, mode, count, scale, coded=len(coded), sha256="")
        return b"".join((_line(_sealed(head, coded, rest)), coded, rest))

    def decode(
        self, data: bytes | memoryview, trainer: str, begin: int, end: int, terms: int = 1
    ) -> tuple[PayloadHeader, SparseVector]:
        """Read a payload that a trainer sent for these entries. Raises: FormatError, or BaseMismatchError."""
        head, body = read_head(data)
        if (head.trainer, head.fragment, head.round) != (trainer, self.fragment, self.round):
            found = f"{head.trainer}, fragment {head.fragment}, round {head.round}"
            expected = f"{trainer}, fragment {self.fragment}, round {self.round}"
            raise FormatError(f"expected a payload of {expected}; found one of {found}")
        if head.base != self.base:
            raise BaseMismatchError(
                f"{trainer} is at another shared state than this trainer", expected=self.base, actual=head.base
            )
        if (head.begin, head.end, head.terms) != (begin, end, terms):
            found = f"{head.terms} updates from {head.begin} to {head.end}"
            raise FormatError(f"expected a payload of {terms} updates from {begin} to {end}; found one of {found}")
        if (head.mode == DENSE) != (self.described is None):
            raise FormatError(f"this exchange does not take payloads in mode {head.mode}")
        sent = self._read(head, body)
        # A sum may overflow: its round is then empty.
        if terms == 1 and not np.isfinite(self.vectors.kernels.largest(sent.values)):
            raise FormatError("a payload contains a value that is not finite")
        return head, sent

    def _read(self, head: PayloadHeader, body: memoryview) -> SparseVector:
        size, v = head.end - head.begin, self.vectors
        if self.described is None:
            if head.count != size or head.coded or len(body) != 4 * size:
                raise FormatError("a dense payload does not have the length of its entries")
            return SparseVector.whole(v.to_backend(np.frombuffer(body, "<f4").astype(np.float32)))
        described = self.described[head.begin : head.end]
        positions, sizes, negative = v.kernels.decode_steps(described, body[: head.coded], head.count)
        rest = body[head.coded :]
        if head.mode == COMPACT:
            if len(rest) or not LOWEST_UNIT <= head.scale <= 127 or (sizes > LARGEST).any():
                raise FormatError("a compact payload has a scale or values out of range")
            bits = v.bits(v.from_units(sizes, head.scale))
        else:
            off = sizes - 1
            octaves = ((off >> 1) ^ -(off & 1)) + head.scale
            if ((octaves < 0) | (octaves > 255)).any():
                raise FormatError("an exact payload has an exponent that FP32 does not have")
            bits = octaves << 23 | v.to_backend(_unpack(rest, head.count).astype(np.int64))
        return SparseVector(size, positions, v.from_bits(bits | negative << 31))

    def nothing(self, size: int) -> SparseVector:
        """A vector of this size without entries."""
        return SparseVector(size, self.vectors.join([], "int64"), self.vectors.empty(0))


def read_head(data: bytes | memoryview) -> tuple[PayloadHeader, memoryview]:
    """Read the header of a payload, and check its hash. Raises: FormatError, or a subclass for its kind of damage."""
    view = memoryview(data)
    line, newline, _ = bytes(view[:MAX_HEAD_BYTES]).partition(b"\n")
    if not newline:
        raise FormatError("these bytes are not a payload: they have no header line")
    table = load_json(line, "the header of a payload")
    if table.pop("format", None) != FORMAT:
        raise UnsupportedError(
            f"the payload is not of format {FORMAT}: trainers that meet must run the same version of pulsesync"
        )
    head = _head(table)
    if _line(head) != line + newline:
        raise FormatError("the header of a payload is not in canonical form")
    body = view[len(line) + 1 :]
    if _sealed(head, body).sha256 != head.sha256:
        raise ChecksumError("a payload is damaged: its bytes do not match its hash", expected=head.sha256)
    if not 0 <= head.begin <= head.end <= layouts.MAX_ELEMENTS or head.count > head.end - head.begin:
        raise LimitError("a payload has more entries than its range")
    if head.coded > len(body) or head.mode not in (DENSE, EXACT, COMPACT):
        raise FormatError("a payload has an unknown mode, or is cut off")
    return head, body


def _sealed(head: PayloadHeader, *body: bytes | memoryview) -> PayloadHeader:
    """A header with the hash of its fields and of what follows it."""
    h = hashlib.sha256(_line(replace(head, sha256="")))
    for piece in body:
        h.update(piece)
    return replace(head, sha256=h.hexdigest())


def _line(head: PayloadHeader) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(head)}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _head(table: dict[str, Any]) -> PayloadHeader:
    kinds = PayloadHeader.__annotations__
    if set(table) != set(kinds) or any(type(table[name]) is not kind for name, kind in kinds.items()):
        raise FormatError("the header of a payload does not have the expected fields")
    head = PayloadHeader(**table)
    if any(value < 0 for name, value in table.items() if isinstance(value, int) and name != "scale"):
        raise FormatError("the header of a payload has a number below zero")
    if not 0 < len(head.trainer) <= MAX_NAME or abs(head.scale) > 255:
        raise LimitError(f"the header of a payload has a name longer than {MAX_NAME}, or a scale out of range")
    return head


def _pack(mantissas: NDArray[np.uint32]) -> bytes:
    """The low 16 bits of each, then the upper 7 of all, packed."""
    upper = np.unpackbits((mantissas >> np.uint32(16)).astype(np.uint8)[:, None], axis=1)[:, 1:]
    return (mantissas & np.uint32(0xFFFF)).astype("<u2").tobytes() + np.packbits(upper).tobytes()


def _unpack(data: memoryview, count: int) -> NDArray[np.uint32]:
    if len(data) != 2 * count + (7 * count + 7) // 8:
        raise FormatError("a payload does not have one mantissa for each entry")
    lower = np.frombuffer(data[: 2 * count], "<u2").astype(np.uint32)
    bits = np.unpackbits(np.frombuffer(data[2 * count :], np.uint8))
    if bits[7 * count :].any():
        raise FormatError("a payload has unused bits that are not zero")
    upper = np.packbits(np.pad(bits[: 7 * count].reshape(count, 7), ((0, 0), (1, 0))), axis=1)[:, 0]
    return lower | upper.astype(np.uint32) << np.uint32(16)


def summed_unit(total: SparseVector, units: list[int | None]) -> int | None:
    """The unit in which a sum of updates with these units can be written; None if it has to be exact."""
    if any(unit is None for unit in units):
        return None
    unit = min(unit for unit in units if unit is not None)
    v = vectors_of(total.values)
    sizes = v.in_units(total.values, unit)
    return unit if (abs(sizes) <= LARGEST).all() and (sizes == v.xp.round(sizes)).all() else None
