"""What trainers send each other: entries of an update, coded against the weights that all of them hold.

An entry is sent where theta lies close to the border of its BF16 value, and mostly to cross that border. So each entry
is described by how far the near border is, in octaves, and by whether the trend points there. *Which* entries are sent,
with what sign, and how large they are is then coded like a weight patch whose old weights are those descriptions
(`pulsesync.format`). What is left of an exact value, its mantissa, follows as it is. docs/loco.md has the bytes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync import kernels
from pulsesync.core.digest import count_tile, moved
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, TensorSpec
from pulsesync.errors import BaseMismatchError, ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout, load_json
from pulsesync.format.tables import apply_steps
from pulsesync.format.weights import as_weights
from pulsesync.loco.gate import F32, LARGEST, LOWEST_UNIT, SparseVector, chunks_of
from pulsesync.loco.outer import Trend

FORMAT = "pulse-loco/1-draft"
MAX_HEAD_BYTES = 1 << 12
MAX_NAME = 128
DENSE, EXACT, COMPACT = "dense", "exact", "compact"


@dataclass(frozen=True)
class PayloadHeader:
    """What a payload says of itself. Its base is the digest of the shared state that it goes on from."""

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
    sha256: str  # of the head with this field empty, and everything behind it


def describe(theta: F32, trend: Trend) -> Bits:
    """What everybody knows of each entry: bits 7 to 14 its class, bit 15 the sign of an update that goes the near way.

    The class is twice the octave of the distance to the near border of the BF16 value, plus one where the trend does
    not point there. Differences of neighbouring FP32 numbers are exact, so all machines find the same.
    """
    out, describe = np.empty(theta.size, np.uint16), kernels.active().describe
    spread(lambda here: describe(theta[here], trend[here], out[here]), chunks_of(theta.size))
    return out


@dataclass(frozen=True, eq=False)
class Coder:
    """Encodes and decodes the payloads of one round of one fragment."""

    fragment: int
    round: int
    base: str
    described: Bits | None  # None where payloads are dense

    def encode(self, trainer: str, sent: SparseVector, unit: int | None, begin: int = 0, terms: int = 1) -> bytes:
        """Write entries, those of the fragment from begin on. unit: values are multiples of 2^unit, else exact."""
        mode, scale, coded = DENSE, 0, b""
        if self.described is None:
            rest = np.ascontiguousarray(sent.values, "<f4").tobytes()
        elif unit is not None:
            mode, scale, rest = COMPACT, unit, b""
            sizes = np.abs(sent.values * np.float64(2.0**-unit)).astype(np.int64)
        else:
            bits = sent.values.view(np.uint32)
            octaves = (bits >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)
            mode, scale = EXACT, int(np.bincount(octaves).argmax()) if octaves.size else 0
            off = octaves - scale
            sizes = 1 + ((off << 1) ^ (off >> 63))
            rest = _pack(bits & np.uint32(0x7FFFFF))
        if self.described is not None:
            negative = (sent.values.view(np.uint32) >> np.uint32(31)).astype(np.uint16)
            coded = _encode_steps(self.described[begin : begin + sent.size], sent.positions, sizes, negative)
        head = _sealed(
            PayloadHeader(
                trainer,
                terms,
                self.fragment,
                self.round,
                self.base,
                begin,
                begin + sent.size,
                mode,
                sent.values.size,
                scale,
                len(coded),
                "",
            ),
            coded,
            rest,
        )
        return b"".join((_line(head), coded, rest))

    def decode(
        self, data: bytes | memoryview, trainer: str, begin: int, end: int, terms: int = 1
    ) -> tuple[PayloadHeader, SparseVector]:
        """Check a payload that a trainer sent for these entries, and read it.

        Raises:
            FormatError: and its branches, for whatever is wrong with the bytes, or if they are not this trainer's, of
            this round; BaseMismatchError: it goes on from another shared state.
        """
        head, body = read_head(data)
        if (head.trainer, head.fragment, head.round) != (trainer, self.fragment, self.round):
            told = f"of {head.trainer}, fragment {head.fragment}, round {head.round}"
            raise FormatError(f"the payload is {told}, not {trainer}'s of {self.fragment}, {self.round}")
        if head.base != self.base:
            raise BaseMismatchError(
                f"{trainer} is at another shared state than this trainer", expected=self.base, actual=head.base
            )
        if (head.begin, head.end, head.terms) != (begin, end, terms):
            told = f"{head.terms} updates from {head.begin} to {head.end}"
            raise FormatError(f"the payload is of {told}, not of {terms} from {begin} to {end}")
        if (head.mode == DENSE) != (self.described is None):
            raise FormatError(f"the payload is {head.mode}, which this exchange is not")
        sent = self._read(head, body)
        if terms == 1 and not np.isfinite(sent.values).all():  # a sum may overflow: its round is then an empty one
            raise FormatError("a payload holds what is no number")
        return head, sent

    def _read(self, head: PayloadHeader, body: memoryview) -> SparseVector:
        size = head.end - head.begin
        if self.described is None:
            if head.count != size or head.coded or len(body) != 4 * size:
                raise FormatError("a dense payload has another length than its entries")
            return SparseVector(size, np.arange(size), np.frombuffer(body, "<f4").astype(np.float32))
        described = self.described[head.begin : head.end]
        positions, sizes, negative = _decode_steps(described, body[: head.coded], head.count)
        rest, signs = body[head.coded :], negative.astype(np.uint32) << np.uint32(31)
        if head.mode == COMPACT:
            if len(rest) or not LOWEST_UNIT <= head.scale <= 127 or (sizes > LARGEST).any():
                raise FormatError("a compact payload has a scale or values that none has")
            with np.errstate(over="ignore"):  # what is not finite is refused
                values = (sizes * 2.0**head.scale).astype(np.float32)
            return SparseVector(size, positions, (values.view(np.uint32) | signs).view(np.float32))
        off = sizes - 1
        octaves = ((off >> 1) ^ -(off & 1)) + head.scale
        if ((octaves < 0) | (octaves > 255)).any():
            raise FormatError("an exact payload has an exponent that FP32 has not")
        mantissas = _unpack(rest, head.count)
        return SparseVector(
            size, positions, (signs | octaves.astype(np.uint32) << np.uint32(23) | mantissas).view(np.float32)
        )


def read_head(data: bytes | memoryview) -> tuple[PayloadHeader, memoryview]:
    """Read what a payload says of itself, and check its hash.

    Raises:
        FormatError: this is no payload; UnsupportedError, LimitError; ChecksumError: it is damaged.
    """
    view = memoryview(data)
    front = bytes(view[:MAX_HEAD_BYTES])
    line, newline, _ = front.partition(b"\n")
    if not newline:
        raise FormatError("this is not a payload: it has no head")
    table = load_json(line, "the head of a payload")
    if table.pop("format", None) != FORMAT:
        raise UnsupportedError(f"this reader knows payloads of format {FORMAT}")
    head = _head(table)
    if _line(head) != line + newline:
        raise FormatError("the head of a payload is not in canonical form")
    body = view[len(line) + 1 :]
    if _sealed(head, body).sha256 != head.sha256:
        raise ChecksumError("a payload is damaged", expected=head.sha256)
    if not 0 <= head.begin <= head.end <= layouts.MAX_ELEMENTS or head.count > head.end - head.begin:
        raise LimitError("a payload has more entries than it covers")
    if head.coded > len(body) or head.mode not in (DENSE, EXACT, COMPACT):
        raise FormatError("a payload is of no known mode, or shorter than it says")
    return head, body


def _sealed(head: PayloadHeader, *body: bytes | memoryview) -> PayloadHeader:
    """A head with the hash of all that it says, and of what follows it."""
    h = hashlib.sha256(_line(replace(head, sha256="")))
    for piece in body:
        h.update(piece)
    return replace(head, sha256=h.hexdigest())


def _line(head: PayloadHeader) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(head)}, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _head(table: dict[str, Any]) -> PayloadHeader:
    kinds = PayloadHeader.__annotations__
    if set(table) != set(kinds) or any(type(table[name]) is not kind for name, kind in kinds.items()):
        raise FormatError("the head of a payload holds other fields than it should")
    head = PayloadHeader(**table)
    if any(value < 0 for name, value in table.items() if isinstance(value, int) and name != "scale"):
        raise FormatError("the head of a payload holds a number below zero")
    if not 0 < len(head.trainer) <= MAX_NAME or abs(head.scale) > 255:
        raise LimitError(f"the head of a payload has a name longer than {MAX_NAME}, or no scale")
    return head


# What fired, as a weight patch


def _layout(size: int) -> Layout:
    return layouts.make([TensorSpec("fired", "BF16", (size,))])


def _encode_steps(
    described: Bits, positions: NDArray[np.int64], sizes: NDArray[np.int64], negative: NDArray[np.uint16]
) -> bytes:
    if not positions.size:
        return b""
    layout = _layout(described.size)
    old = described[positions]
    steps = np.where(old >> np.uint16(15) == negative, sizes, -sizes)  # up: the near way
    new = apply_steps(old, steps)
    changes = {}
    for number in range(layout.tiles[0].block_count):
        first, last = np.searchsorted(positions, (number * BLOCK, (number + 1) * BLOCK))
        if first < last:
            here = (positions[first:last] - number * BLOCK).astype(np.uint32)
            changes[0, number] = BlockChange(number, here, old[first:last], new[first:last])
    weights = as_weights({"fired": described})
    diffs = patch.diff_of(layout.tiles, weights, changes)
    return bytes(patch.encode_diff(layout, diffs, weights, {0: count_tile(layout.tiles[0], described)}).data)


def _decode_steps(
    described: Bits, data: memoryview, count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Positions, sizes, and whether each is negative."""
    if not count:
        if len(data):
            raise FormatError("a payload without entries has bytes for some")
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_)
    layout = _layout(described.size)
    decoded = patch.decode(data, layout, {"fired": described})
    if len(decoded.patches) != 1 or decoded.patches[0].changed != count:
        raise FormatError("a payload holds another number of entries than it says")
    found = decoded.patches[0]
    if count_tile(layout.tiles[0], described) + moved(found) != decoded.sums[0]:
        raise ChecksumError("what a payload decodes to is not what was encoded")
    positions = np.concatenate([block.tile_positions() for block in found.blocks])
    old = np.concatenate([block.old for block in found.blocks])
    new = np.concatenate([block.new for block in found.blocks])
    steps = (_ordered(new) - _ordered(old) + (1 << 15) & 0xFFFF) - (1 << 15)
    if (steps == -(1 << 15)).any():
        raise FormatError("a payload holds a value larger than any")
    return positions, np.abs(steps), (old >> np.uint16(15)).astype(np.bool_) ^ (steps < 0)


def _ordered(bits: Bits) -> NDArray[np.int64]:
    wide = bits.astype(np.int64)
    return wide ^ np.where(wide & 0x8000, 0xFFFF, 0x8000)


def _pack(mantissas: NDArray[np.uint32]) -> bytes:
    """The low 16 bits of each, then the upper 7 of all, packed."""
    upper = np.unpackbits((mantissas >> np.uint32(16)).astype(np.uint8)[:, None], axis=1)[:, 1:]
    return (mantissas & np.uint32(0xFFFF)).astype("<u2").tobytes() + np.packbits(upper).tobytes()


def _unpack(data: memoryview, count: int) -> NDArray[np.uint32]:
    if len(data) != 2 * count + (7 * count + 7) // 8:
        raise FormatError("a payload has another number of mantissas than entries")
    lower = np.frombuffer(data[: 2 * count], "<u2").astype(np.uint32)
    bits = np.unpackbits(np.frombuffer(data[2 * count :], np.uint8))
    if bits[7 * count :].any():
        raise FormatError("a payload has bits behind its end")
    upper = np.packbits(np.pad(bits[: 7 * count].reshape(count, 7), ((0, 0), (1, 0))), axis=1)[:, 0]
    return lower | upper.astype(np.uint32) << np.uint32(16)


def summed_unit(total: SparseVector, units: list[int | None]) -> int | None:
    """The unit in which a sum of updates with these units can be written; None if it has to be exact."""
    if any(unit is None for unit in units):
        return None
    unit = min(unit for unit in units if unit is not None)
    sizes = total.values * np.float64(2.0**-unit)
    return unit if (np.abs(sizes) <= LARGEST).all() and (sizes == np.rint(sizes)).all() else None
