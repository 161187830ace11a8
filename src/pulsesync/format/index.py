"""Section 0 of a part: the tables that its tiles share, and for each tile its codec, place and digest.

Everything that a reader needs before it decodes is here, so one fetch of header and index is enough to choose sections.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pulsesync.core.types import DTYPES, Codec, Sum
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import tables, versions, wire
from pulsesync.kernels import spec
from pulsesync.kernels.arrays import I64, U16, U32, U64

MAX_INDEX_BYTES = 1 << 24  # plus 64 for each tile of the layout
MAX_TABLES = 16
MAX_AGES = 128
_CODECS = {int(codec): codec for codec in Codec}
_BY_CODE = {kind.code: name for name, kind in DTYPES.items()}


@dataclass(frozen=True)
class FrequencyTable:
    """Frequencies for the tiles of one dtype: [class above lo, patch that last changed the weight, symbol]."""

    dtype: str
    lo: int  # the class of the first row; lower classes use it too
    frequencies: I64  # (classes, ages, symbols)
    sizes: U32 = field(default_factory=lambda: tables.NO_SIZES)  # steps that have their own symbols

    @property
    def highest_cut(self) -> int:
        return self.lo + int(self.frequencies.shape[0])

    @cached_property
    def contexts(self) -> tables.Contexts:
        return tables.Contexts(self.lo, *self.frequencies.shape)

    @cached_property
    def cumulative(self) -> U16:
        return tables.cumulative(self.frequencies)

    @cached_property
    def reciprocals(self) -> U32:
        return tables.reciprocals(self.frequencies)

    @cached_property
    def shares(self) -> U64:
        return tables.shares(self.frequencies)


class TileEntry(NamedTuple):
    """One tile of a part."""

    tile: int  # ordinal in the layout
    codec: Codec
    section: int
    size: int  # bytes of its payload; payloads follow each other in their section
    sum: Sum  # digest of the tile after the patch


# As `_make`, which is written in Python.
_SUM: Callable[[Iterable[int]], Sum] = partial(tuple.__new__, Sum)
_ENTRY: Callable[[Iterable[Any]], TileEntry] = partial(tuple.__new__, TileEntry)


def build(shared: Sequence[FrequencyTable], entries: Iterable[tuple[int, Codec, int, int, Sum]]) -> bytes:
    """Write the index; entries, with the fields of a `TileEntry`, in the order of their tiles."""
    columns = list(zip(*entries, strict=True))
    out = [wire.number(len(shared)), *map(_table, shared), wire.number(len(columns[0]) if columns else 0)]
    if columns:
        tiles, codecs, sections, sizes, sums = columns
        out += [wire.numbers(np.diff((-1, *tiles)) - 1), bytes(codecs)]
        out += [wire.numbers(np.diff((1, *sections))), wire.numbers(np.array(sizes, np.int64))]
        out.append(struct.pack(f"<{2 * len(sums)}Q", *chain.from_iterable(sums)))
    data = b"".join(out)
    return wire.number(len(data)) + wire.plane(data)


def parse(
    section: bytes | memoryview, tiles: int, sections: Sequence[int]
) -> tuple[list[FrequencyTable], list[TileEntry]]:
    """Read the index of a part whose layout has this number of tiles and whose sections have these sizes.

    Raises: FormatError, also if payloads are placed outside their sections; LimitError.
    """
    outer = wire.ByteReader(section, "the index")
    reader = wire.ByteReader(outer.plane(outer.number(MAX_INDEX_BYTES + 64 * tiles)), "the index")
    outer.end()
    shared = [_parse_table(reader) for _ in range(reader.number(MAX_TABLES))]
    count = reader.number(tiles)
    if count > sum(sections[1:]):
        raise FormatError(f"the index lists {count} tiles, too many for payloads of {sum(sections[1:])} bytes")
    ordinals = np.cumsum(reader.numbers(count, tiles) + 1) - 1
    codecs = reader.take(count)
    places = 1 + np.cumsum(reader.numbers(count, len(sections)))
    sizes = reader.numbers(count, max(sections))
    sums = np.frombuffer(reader.take(16 * count), "<u8").reshape(-1, 2).tolist()
    reader.end()
    if count and (ordinals[-1] >= tiles or places[-1] >= len(sections)):
        raise FormatError("the index lists a tile or a section that does not exist")
    filled = np.bincount(places, sizes, minlength=len(sections)).astype(np.int64) if count else np.zeros(len(sections))
    if filled.tolist()[1:] != list(sections[1:]):
        raise FormatError("the payloads that the index lists do not fill their sections")
    if added := set(codecs) - _CODECS.keys():
        raise versions.unknown(f"the index names the codec {min(added)}")
    named, counted = map(_CODECS.__getitem__, codecs), map(_SUM, sums)
    fields = zip(ordinals.tolist(), named, places.tolist(), sizes.tolist(), counted, strict=True)
    return shared, list(map(_ENTRY, fields))


def _table(table: FrequencyTable) -> bytes:
    classes, ages, _ = table.frequencies.shape
    out = [bytes([DTYPES[table.dtype].code]), wire.number(table.lo), wire.number(classes), wire.number(ages)]
    sizes = np.append(spec.DIRECT, table.sizes).astype(np.int64)
    out += [wire.number(table.sizes.size), wire.numbers(sizes[1:] - sizes[:-1] - 1)]
    rows = table.frequencies.reshape(-1, table.frequencies.shape[2])
    used = rows > 0
    where, symbols = np.nonzero(used)
    first = np.r_[True, where[1:] != where[:-1]] if where.size else np.empty(0, bool)
    before = np.where(first, -1, np.r_[0, symbols[:-1]]) if where.size else symbols
    counts = (used.sum(axis=1), symbols - before - 1, rows[used] - 1)
    return b"".join((*out, *(wire.numbers(some.astype(np.int64)) for some in counts)))


def _parse_table(reader: wire.ByteReader) -> FrequencyTable:
    dtype = _BY_CODE.get(code := reader.byte())
    if dtype is None or DTYPES[dtype].exponent_shift is None:
        raise versions.unknown(f"the index has a table for the dtype of code {code}")
    kind = DTYPES[dtype]
    width = 8 * kind.itemsize
    highest = 1 << (width - 1 - (kind.exponent_shift or 0))
    lo, classes, ages = reader.number(highest), reader.number(tables.CLASSES), reader.number(MAX_AGES)
    if classes == 0 or ages == 0 or lo + classes > highest:
        raise FormatError("the index has a table with classes that do not exist")
    sizes = spec.DIRECT + np.cumsum(reader.numbers(reader.number(tables.most_sizes(width)), 1 << (width - 1)) + 1)
    if sizes.size and sizes[-1] >= 1 << (width - 1):
        raise FormatError("the index has a table with a step outside its dtype's range")
    symbols = tables.symbol_count(width) + 2 * sizes.size
    counts = reader.numbers(classes * ages, symbols)
    used = int(counts.sum())
    row = np.repeat(np.arange(classes * ages), counts)
    gaps = reader.numbers(used, symbols)
    running = np.cumsum(gaps + 1)
    starts = np.cumsum(counts) - counts
    base = np.where(starts > 0, np.r_[0, running][np.minimum(starts, used)], 0)
    symbol = running - np.repeat(base, counts) - 1
    frequencies = np.zeros((classes * ages, symbols), np.int64)
    if used and symbol.max() >= symbols:
        raise FormatError("the index has a table with a symbol that does not exist")
    frequencies[row, symbol] = reader.numbers(used, tables.TOTAL) + 1
    totals = frequencies.sum(axis=1)
    if not ((totals == 0) | (totals == tables.TOTAL)).all():
        raise LimitError(f"the frequencies of a context must add up to {tables.TOTAL}")
    return FrequencyTable(dtype, lo, frequencies.reshape(classes, ages, symbols), sizes.astype(np.uint32))
