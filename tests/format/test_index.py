import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import DTYPES, Codec, Sum
from pulsesync.errors import FormatError, LimitError, UnsupportedError
from pulsesync.format import index, tables, wire
from pulsesync.format.index import FrequencyTable, TileEntry
from tests.helpers import FLOATS, seeds


def random_table(rng: np.random.Generator) -> FrequencyTable:
    dtype = str(rng.choice(FLOATS))
    kind = DTYPES[dtype]
    width = 8 * kind.itemsize
    highest = 1 << (width - 1 - (kind.exponent_shift or 0))
    classes = int(rng.integers(1, min(24, highest), endpoint=True))
    lo = int(rng.integers(0, highest - classes, endpoint=True))
    ages = int(rng.choice([1, 2, 5, 128]))
    listed = int(rng.choice([0, 1, tables.most_sizes(width)]))
    sizes = np.sort(rng.choice(np.arange(8, min(1 << (width - 1), 5000)), listed, replace=False)).astype(np.uint32)
    if listed:
        sizes[-1] = (1 << (width - 1)) - 1
    counts = rng.integers(0, 1000, (classes, ages, tables.symbol_count(width) + 2 * listed))
    counts[rng.random(counts.shape) < rng.choice([0.0, 0.5, 0.9, 1.0])] = 0
    counts[rng.random((classes, ages)) < 0.3] = 0
    return FrequencyTable(dtype, lo, tables.normalise(counts), sizes)


def random_entries(rng: np.random.Generator, count: int, tiles: int) -> tuple[list[TileEntry], list[int]]:
    places = np.sort(rng.integers(1, 4, count))
    ordinals = np.sort(rng.choice(tiles, count, replace=False))
    entries = [
        TileEntry(
            int(ordinal),
            Codec(int(rng.integers(0, 6))),
            int(place),
            int(rng.integers(0, 1 << 20)),
            Sum(*(int(n) for n in rng.integers(0, 1 << 64, 2, dtype=np.uint64))),
        )
        for ordinal, place in zip(ordinals, places, strict=True)
    ]
    return entries, [0, *(sum(e.size for e in entries if e.section == s) for s in (1, 2, 3))]


ENTRIES = [
    TileEntry(1, Codec.GAP, 1, 10, Sum(1, 2)),
    TileEntry(4, Codec.DENSE, 1, 5, Sum(3, 4)),
    TileEntry(5, Codec.CONTEXT, 2, 7, Sum(5, 6)),
]
SECTIONS = [0, 15, 7]


def flat_table(dtype: str = "BF16", lo: int = 0, classes: int = 1, ages: int = 1) -> FrequencyTable:
    frequencies = np.zeros((classes, ages, tables.symbol_count(8 * DTYPES[dtype].itemsize)), np.int64)
    frequencies[..., 0], frequencies[..., 1] = tables.TOTAL - 7, 7
    return FrequencyTable(dtype, lo, frequencies)


def section(content: bytes) -> bytes:
    return wire.number(len(content)) + bytes([wire.RAW]) + content


def content(data: bytes) -> bytes:
    reader = wire.ByteReader(data, "the index")
    return bytes(reader.plane(reader.number(1 << 28)))


@given(seeds, st.integers(0, 60))
def test_tables_and_entries_come_back(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    shared = [random_table(rng) for _ in range(int(rng.integers(0, 4)))]
    entries, sections = random_entries(rng, count, 100)
    found, read = index.parse(index.build(shared, entries), 100, sections)
    assert read == entries
    for a, b in zip(found, shared, strict=True):
        assert (a.dtype, a.lo) == (b.dtype, b.lo)
        assert np.array_equal(a.frequencies, b.frequencies)


def test_an_index_of_nothing_comes_back() -> None:
    assert index.parse(index.build([], []), 0, [1]) == ([], [])


@given(seeds, st.data())
def test_a_changed_byte_is_refused_or_read_as_another_index(seed: int, draw: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    entries, sections = random_entries(rng, 5, 10)
    data = bytearray(content(index.build([random_table(rng)], entries)))
    data[draw.draw(st.integers(0, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        shared, read = index.parse(section(bytes(data)), 10, sections)
    except FormatError:
        return
    assert all(np.isin(t.frequencies.sum(axis=2), (0, tables.TOTAL)).all() for t in shared)
    assert [e.tile for e in read] == sorted({e.tile for e in read})
    assert all(0 <= e.tile < 10 and 1 <= e.section < len(sections) for e in read)
    assert [sum(e.size for e in read if e.section == s) for s in (1, 2, 3)] == sections[1:]


@given(st.data())
def test_an_index_cut_short_is_refused(draw: st.DataObject) -> None:
    data = content(index.build([flat_table()], ENTRIES))
    with pytest.raises(FormatError):
        index.parse(section(data[: draw.draw(st.integers(0, len(data) - 1))]), 6, SECTIONS)


@pytest.mark.parametrize("place", ["inside", "behind"])
def test_bytes_too_many_are_refused(place: str) -> None:
    data = index.build([flat_table()], ENTRIES)
    with pytest.raises(FormatError, match="unexpected bytes"):
        index.parse(section(content(data) + b"\0") if place == "inside" else data + b"\0", 6, SECTIONS)


def test_an_index_that_unpacks_to_too_much_is_refused() -> None:
    with pytest.raises(LimitError):
        index.parse(wire.number(index.MAX_INDEX_BYTES + 64 * 6 + 1), 6, SECTIONS)


def test_a_tile_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FormatError, match="does not exist"):
        index.parse(index.build([], ENTRIES), 5, SECTIONS)


def test_more_tiles_than_there_are_are_refused() -> None:
    with pytest.raises(LimitError):
        index.parse(index.build([], ENTRIES), 2, SECTIONS)


def test_a_section_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FormatError, match="does not exist"):
        index.parse(index.build([], ENTRIES), 6, SECTIONS[:2])


@pytest.mark.parametrize("sections", [[0, 16, 7], [0, 15, 6], [0, 15, 7, 1]])
def test_payloads_that_do_not_fill_their_sections_are_refused(sections: list[int]) -> None:
    with pytest.raises(FormatError, match="fill"):
        index.parse(index.build([], ENTRIES), 6, sections)


def test_a_payload_larger_than_any_section_is_refused() -> None:
    with pytest.raises(FormatError):
        index.parse(index.build([], [ENTRIES[0]._replace(size=1 << 50)]), 6, [0, 15])


def test_an_unknown_codec_is_unsupported() -> None:
    data = bytearray(content(index.build([], ENTRIES[:1])))
    assert data[3] == Codec.GAP
    data[3] = 99
    with pytest.raises(UnsupportedError, match="codec"):
        index.parse(section(bytes(data)), 6, [0, 10])


def test_more_tables_than_allowed_are_refused() -> None:
    assert len(index.parse(index.build([flat_table()] * index.MAX_TABLES, []), 0, [1])[0]) == index.MAX_TABLES
    with pytest.raises(LimitError):
        index.parse(index.build([flat_table()] * (index.MAX_TABLES + 1), []), 0, [1])


@pytest.mark.parametrize("code", [0, 1, 6, 14, 15, 16, 255])
def test_a_table_for_a_dtype_without_exponent_is_unsupported(code: int) -> None:
    data = bytearray(content(index.build([flat_table()], [])))
    data[1] = code
    with pytest.raises(UnsupportedError, match="dtype"):
        index.parse(section(bytes(data)), 0, [1])


@pytest.mark.parametrize(
    ("lo", "classes", "ages"), [(0, 0, 1), (0, 1, 0), (0, 25, 1), (0, 1, 129), (256, 1, 1), (240, 24, 1), (257, 1, 1)]
)
def test_a_table_over_classes_or_ages_that_do_not_exist_is_refused(lo: int, classes: int, ages: int) -> None:
    head = wire.number(1) + bytes([9]) + b"".join(map(wire.number, (lo, classes, ages)))
    with pytest.raises(FormatError):
        index.parse(section(head + bytes(4000)), 0, [1])


def test_a_table_up_to_the_last_class_is_taken() -> None:
    shared, _ = index.parse(index.build([flat_table(lo=232, classes=24, ages=128)], []), 0, [1])
    assert shared[0].highest_cut == 256


@pytest.mark.parametrize("error", [-1, 1])
def test_frequencies_that_do_not_add_up_are_refused(error: int) -> None:
    table = flat_table()
    table.frequencies[0, 0, 0] += error
    with pytest.raises(FormatError, match="add up"):
        index.parse(index.build([table], []), 0, [1])


def test_a_symbol_that_does_not_exist_is_refused() -> None:
    # BF16, lo 0, one context, no size listed, with one symbol: 41, the first there is none of, of all the frequency
    data = b"\x01\x09\x00\x01\x01\x00" + wire.number(1) + wire.number(41) + wire.number(tables.TOTAL - 1) + b"\x00"
    with pytest.raises(FormatError, match="symbol"):
        index.parse(section(data), 0, [1])


@pytest.mark.slow
def test_an_index_of_more_tiles_than_payload_bytes_is_refused_before_they_are_listed() -> None:
    count = 1 << 18
    section = index.build([], [TileEntry(tile, Codec.DENSE, 1, 0, Sum(0, 0)) for tile in range(count)])
    assert len(section) < 10_000
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="262144 tiles, too many"):
            index.parse(section, count, [len(section), 0])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20  # the list would take 60 MB
    finally:
        tracemalloc.stop()
