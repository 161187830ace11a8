"""Heads of many payloads at once: the bytes of `context`, payload by payload, and what it reads and refuses."""

from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core.types import BLOCK, TensorSpec, Tile
from pulsesync.errors import FormatError, LimitError
from pulsesync.format import wire
from pulsesync.format.codecs import context, heads, planes
from pulsesync.format.codecs.context import Heads
from tests.helpers import many, seeds

SIZES = [1, 5, 300, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK + 77, 9 * BLOCK - 2]
Headed = tuple[Heads, Tile]


def tile_of(size: int, dtype: str = "BF16", groups: tuple[int, ...] = ()) -> Tile:
    """A tile that is a whole tensor; groups: a bundle of them."""
    return Tile(0, TensorSpec("a", dtype, (size,)), 0, 0, size, 1, groups=groups)


def random_tile(rng: np.random.Generator, dtype: str, table: int = 0) -> Headed:
    """Heads of a tile: streams with and without changes, no cold changes, few or many."""
    tile = tile_of(int(rng.choice(SIZES)), dtype)
    if rng.random() < 0.4:  # a bundle
        borders = np.cumsum([0, *rng.integers(1, 400, int(rng.integers(1, 9)))])
        tile = tile_of(int(borders[-1]), dtype, tuple(borders.tolist()))
    kind, size, weights = tile.tensor.kind, tile.size, np.diff(tile.borders)
    coded = rng.random(weights.size) < rng.choice([0.0, 0.5, 1.0])
    changes = np.where(coded, rng.integers(1, weights, endpoint=True), 0)
    lanes = np.where(coded, 1 << rng.integers(0, 6, weights.size), 1)
    words = np.where(coded, rng.integers(0, np.minimum(64 + 3 * weights, 300)), 0)
    cold = np.sort(rng.choice(size, min(size, int(rng.choice([0, 0, 1, 64, 65, 400]))), replace=False))
    most = 1 << int(rng.integers(1, 8 * kind.itemsize))  # half the circle at most
    steps = rng.integers(1, most, cold.size, endpoint=True) * rng.choice([-1, 1], cold.size)
    cut = int(rng.integers(0, 1 << (8 * kind.itemsize - 1 - (kind.exponent_shift or 0)), endpoint=True))
    checks = np.empty(0, np.uint32)
    if context.is_checked(tile):
        checks = rng.integers(0, 1 << 32, int(context.changing(tile, changes, cold).sum()), dtype=np.uint32)
    return Heads(table, cut, changes, lanes, words, cold, steps, checks), tile


def random_tiles(seed: int, dtypes: tuple[str, ...]) -> list[Headed]:
    rng = np.random.default_rng(seed)
    table = int(rng.integers(0, 256))
    return [random_tile(rng, str(rng.choice(dtypes)), table) for _ in range(int(rng.integers(1, 12)))]


def built(some: list[Heads]) -> list[bytes]:
    """The heads of tiles, made at once."""

    def joined(of: str) -> np.ndarray:
        return np.concatenate([getattr(one, of) for one in some])

    first_block = np.cumsum([0, *(one.changes.size for one in some)])
    first_cold = np.cumsum([0, *(one.cold.size for one in some)])
    blocks = joined("changes"), joined("lanes"), joined("words")
    cuts = np.array([one.cut for one in some])
    begins = heads.build_many(some[0].table, cuts, first_block, blocks, np.diff(first_cold))
    colds = heads.build_cold(first_cold, joined("cold"), joined("steps"))
    return [a + b + one.checks.tobytes() for a, b, one in zip(begins, colds, some, strict=True)]


def payload(one: Heads) -> bytes:
    """Heads followed by streams whose words look like numbers of several bytes."""
    return context.build_heads(one) + b"\x81\x92" * int(one.words.sum())


def parsed(payloads: list[tuple[bytes, Tile]]) -> list[tuple[Heads, memoryview]]:
    tiles = [tile for _, tile in payloads]
    begun = heads.begin([memoryview(data) for data, _ in payloads], tiles)
    blocks = heads.parse_streams_of(begun)
    streams = heads.streams_of(begun, blocks)
    colds = heads.parse_cold(begun, blocks, streams)
    at, cuts = blocks.first[1:-1], np.cumsum(blocks.colds)[:-1]
    parts = [np.split(array, at) for array in (blocks.changes, blocks.lanes, blocks.words)]
    parts += [np.split(array, cuts) for array in (colds.positions, colds.steps)]
    checks = []
    for tile, of_hot, cold, check in zip(tiles, parts[0], parts[3], np.split(colds.checks, at), strict=True):
        changes = context.changing(tile, of_hot, cold)
        assert not check[~changes].any()
        checks.append(check[changes] if context.is_checked(tile) else check[:0])
    fields = zip(begun.tables.tolist(), begun.cuts.tolist(), *parts, checks, strict=True)
    found = [Heads(*some) for some in fields]
    return list(zip(found, streams, strict=True))


def assert_as_context(payloads: list[tuple[bytes, Tile]]) -> bool:
    """Hold what is read at once against what is read one by one; False if a payload is refused, by both."""
    try:
        expected = [context.parse_heads(memoryview(data), tile) for data, tile in payloads]
    except FormatError:
        with pytest.raises(FormatError):
            parsed(payloads)
        return False
    for (data, _), (one, begin), (found, streams) in zip(payloads, expected, parsed(payloads), strict=True):
        assert (found.table, found.cut) == (one.table, one.cut)
        columns: Any = zip(found[2:], one[2:], strict=True)
        for a, b in columns:
            assert a.dtype == b.dtype
            assert a.tolist() == b.tolist()
        assert streams == memoryview(data)[begin:]
    return True


# What is right


@many
@given(seeds, st.sampled_from(["BF16", "F8_E4M3", "F32"]))
def test_heads_made_at_once_are_those_made_one_by_one(seed: int, dtype: str) -> None:
    some = [one for one, _ in random_tiles(seed, (dtype,))]
    assert built(some) == [context.build_heads(one) for one in some]


@many
@given(seeds)
def test_payloads_read_at_once_are_those_read_one_by_one(seed: int) -> None:
    tiles = random_tiles(seed, ("BF16", "F8_E5M2", "F32", "F16"))
    assert assert_as_context([(payload(one), tile) for one, tile in tiles])


def test_a_tile_of_more_weights_than_four_bytes_can_count_is_read() -> None:
    size = (1 << 29) + 5
    blocks = -(-size // BLOCK)
    filled = np.full(blocks, 1)
    cold = np.arange(3) * (1 << 28)
    one = Heads(0, 9, filled, filled, filled, cold, np.array([1, -2, 3]))
    assert built([one, one]) == [context.build_heads(one)] * 2
    assert assert_as_context([(payload(one), tile_of(size))] * 2)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", "F32"])
def test_the_longest_steps_and_gaps_are_read(dtype: str) -> None:
    kind, size = tile_of(1, dtype).tensor.kind, 5 * BLOCK
    half, empty = 1 << (8 * kind.itemsize - 1), np.zeros(5, np.int64)
    one = Heads(255, 0, empty, empty + 1, empty, np.array([0, size - 1]), np.array([half, -half]))
    assert built([one, one]) == [context.build_heads(one)] * 2
    assert assert_as_context([(payload(one), tile_of(size, dtype))] * 2)


def many_cold(seed: int, dtype: str = "BF16") -> list[Headed]:
    """Heads of tiles that all have more than a few cold changes, in planes of noise and in planes that repeat."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(int(rng.integers(1, 6))):
        count, tile = (
            int(rng.choice([65, 100, 255, 256, 700])),
            tile_of(int(rng.choice([3 * BLOCK, 40 * BLOCK])), dtype),
        )
        spacing = int(rng.choice([1, 2, 300, 3000]))
        cold = np.cumsum(rng.integers(1, spacing, count, endpoint=True)) - 1
        most = 1 << int(rng.integers(0, 8 * tile.tensor.kind.itemsize))
        steps = rng.integers(1, most, count, endpoint=True) * rng.choice([-1, 1], count)
        streams = np.ones(tile.borders.size - 1, np.int64)
        out.append((Heads(0, 120, streams, streams, streams, cold, steps), tile))
    return out


@many
@given(seeds, st.sampled_from(["BF16", "F32"]))
def test_many_cold_changes_at_once_are_those_one_by_one(seed: int, dtype: str) -> None:
    some = many_cold(seed, dtype)
    assert built([one for one, _ in some]) == [context.build_heads(one) for one, _ in some]
    assert assert_as_context([(payload(one), tile) for one, tile in some])


@given(seeds)
def test_planes_that_were_written_at_once_are_also_read_at_once(seed: int) -> None:
    some = many_cold(seed)
    counts, sizes = (
        np.array(column) for column in zip(*((one.cold.size, tile.size) for one, tile in some), strict=True)
    )
    data = [memoryview(context.build_cold(one.cold, one.steps)) for one, _ in some]
    assert planes.parse(data, counts, sizes, np.full(len(some), 2)).good.all()


def test_planes_of_more_tiles_than_one_thread_takes_are_those_one_by_one() -> None:
    some = [one for seed in range(60) for one in many_cold(seed)]
    assert 4 * len(some) > 2 * wire.MANY_PLANES
    assert built([one for one, _ in some]) == [context.build_heads(one) for one, _ in some]
    assert assert_as_context([(payload(one), tile) for one, tile in some])


# What is wrong


@many
@given(seeds)
def test_bytes_of_planes_changed_at_random_are_read_or_refused_as_one_by_one(seed: int) -> None:
    rng, some = np.random.default_rng(seed), many_cold(seed)
    some = [(one._replace(cut=5), tile) for one, tile in some]
    payloads = [(payload(one), tile) for one, tile in some]
    i = int(rng.integers(0, len(some)))
    data, first = bytearray(payloads[i][0]), len(heads.build_many(0, *before_cold(some[i][0]))[0])
    end = len(context.build_heads(some[i][0]))
    for at in rng.integers(first, rng.choice([min(end, first + 20), end]), int(rng.integers(1, 3))):
        data[at] = rng.choice([0, 1, data[at] ^ 1, data[at] ^ 0x80, rng.integers(0, 256)])
    payloads[i] = bytes(data), payloads[i][1]
    assert_as_context(payloads)


def before_cold(one: Heads) -> tuple[Any, ...]:
    """What `build_many` is given for a tile."""
    streams = one.changes.size
    return np.array([one.cut]), np.array([0, streams]), (one.changes, one.lanes, one.words), np.array([one.cold.size])


def frame_plane(data: bytes, **options: Any) -> bytes:
    """A plane as a zstd frame that another writer makes."""
    frame = zstandard.ZstdCompressor(**options).compress(data)
    return bytes([wire.ZSTD]) + wire.number(len(frame)) + frame


FRAMES = {
    "as ours": frame_plane(bytes(100)),
    "of another level": frame_plane(bytes(100), level=19),
    "with a checksum": frame_plane(bytes(100), write_checksum=True),
    "without its size": frame_plane(bytes(100), write_content_size=False),
    "of another size": frame_plane(bytes(101)),
    "with a byte too many": b"\1" + wire.number(len(frame_plane(bytes(100))) - 1) + frame_plane(bytes(100))[2:] + b"\0",
    "cut short": b"\1" + wire.number(len(frame_plane(bytes(100))) - 3) + frame_plane(bytes(100))[2:-1],
    "as long as its bytes": b"\1" + wire.number(100) + bytes(100),
    "of a length written longer than needed": b"\1\x8d\0" + frame_plane(bytes(100))[2:],
    "of an unknown kind": b"\2" + bytes(100),
    "raw": b"\0" + bytes(100),
}


@pytest.mark.parametrize("why", FRAMES)
@pytest.mark.parametrize("place", range(2))
def test_frames_of_other_writers_are_read_or_refused_as_one_by_one(place: int, why: str) -> None:
    """The plane of the gaps, and that of the steps; tiles before and after it are read as they are."""
    gaps_and_steps = [FRAMES["raw"], FRAMES["raw"]]
    gaps_and_steps[place] = FRAMES[why]
    data = written(5, 1 << 3, 1, 100, *(b"\1" + plane for plane in gaps_and_steps), b"\0\0")
    refused_and_read([data], size=4 * 100)


BY_BLOCK: Any = np.array([[2, 0, 1], [4, 1, 1], [3, 0, 2]])
SMALL = Heads(3, 121, BY_BLOCK[0], BY_BLOCK[1], BY_BLOCK[2], np.array([1, 200, BLOCK]), np.array([1, -90, 5]))
DENSE = SMALL._replace(changes=np.array([2, 9, 1]), words=np.array([3, 0, 2]))  # all blocks have changes
MANY_COLD = DENSE._replace(cold=np.arange(70) * 130, steps=np.arange(70) * 7 + 1)
WEIGHTS = 2 * BLOCK + 40
KINDS = pytest.mark.parametrize(
    "one", [SMALL, DENSE, MANY_COLD], ids=["a block without changes", "every block", "many cold"]
)
FINE = (payload(DENSE), tile_of(WEIGHTS))


def refused_and_read(some: list[bytes], size: int = WEIGHTS) -> tuple[int, int]:
    """Payloads that are refused and that are read, each alone, and each between others that are right."""
    read = 0
    for data in some:
        bad = data, tile_of(size)
        verdicts = {assert_as_context(them) for them in ([bad], [FINE, bad], [bad, FINE], [FINE, bad, FINE])}
        assert len(verdicts) == 1
        read += verdicts.pop()
    return len(some) - read, read


@KINDS
def test_a_payload_cut_short_is_refused(one: Heads) -> None:
    data = payload(one)
    assert refused_and_read([data[:end] for end in range(len(data))]) == (len(data), 0)


@KINDS
def test_bytes_too_many_are_refused(one: Heads) -> None:
    data = payload(one)
    assert refused_and_read([data + more for more in (b"\0", b"\x80", b"\0\0", b"\1\1\1\1")])[1] == 0
    at = len(context.build_heads(one))
    assert refused_and_read([data[:at] + more + data[at:] for more in (b"\0", b"\0\0", b"\1\1")])[1] == 0


@KINDS
def test_every_byte_changed_is_read_or_refused_as_one_by_one(one: Heads) -> None:
    """Of a long payload, one byte in five."""
    data, flips = payload(one), (0x01, 0x02, 0x40, 0x80, 0xFF)
    places = range(0, len(data), 1 if len(data) < 100 else 5)
    some = [data[:i] + bytes([data[i] ^ by]) + data[i + 1 :] for i in places for by in flips]
    refused, read = refused_and_read(some)
    assert refused > len(some) / 8
    assert read > len(some) / 8


@many
@given(seeds)
def test_bytes_changed_at_random_are_read_or_refused_as_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tiles = [(payload(one), tile) for one, tile in random_tiles(seed, ("BF16", "F8_E4M3", "F32"))]
    i = int(rng.integers(0, len(tiles)))
    data = bytearray(tiles[i][0])
    for at in rng.integers(0, min(len(data), 40), 2):
        data[at] = rng.integers(0, 256)
    assert_as_context([*tiles[:i], (bytes(data), tiles[i][1]), *tiles[i + 1 :]])


def written(*numbers: int | bytes) -> bytes:
    """A payload of table 0 and these numbers, or bytes as they are."""
    return b"\0" + b"".join(n if isinstance(n, bytes) else wire.number(n) for n in numbers)


LONG = {
    "one byte": b"\x81\x00",
    "two": b"\x81\x81\x00",
    "four": b"\x81\x81\x81\x81\x00",
    "eleven": b"\x81" * 10 + b"\1",
}


@pytest.mark.parametrize("long", LONG)
@pytest.mark.parametrize("place", range(6))
def test_numbers_written_longer_than_needed_are_refused(place: int, long: str) -> None:
    """The cut, a block's head, its words, the count of cold changes, a gap, a step."""
    right: list[int | bytes] = [5, 1 << 3, 1, 1, 1, 1]
    streams = b"\0\0"
    assert assert_as_context([(written(*right, streams), tile_of(9))])
    wrong = [*right[:place], LONG[long], *right[place + 1 :], streams]
    assert refused_and_read([written(*wrong)], size=9) == (1, 0)


WRONG = {
    "a cut above all classes": [257, 0, 0],
    "lanes without changes": [5, 3, 0],
    "more lanes than there can be": [5, 1 << 3 | 6, 0, 0],
    "more changes than weights": [5, 10 << 3, 0, 0],
    "more words than decisions": [5, 1 << 3, 64 + 3 * 9 + 1, 0],
    "words of which the lowest bits would do": [5, 1 << 3, 1 << 28, 0],
    "a count of which the lowest bits would do": [5, 1 << 3, 0, 1 << 28],
    "streams longer than the payload": [5, 1 << 3, 3, 0],
    "streams longer than the rest": [5, 1 << 3, 1, 0],
    "more cold changes than weights": [5, 0, 10, *[0, 2] * 10],
    "fewer cold changes than it says": [5, 0, 2, 0, 2],
    "more cold changes than it says": [5, 0, 1, 0, 2, 0, 2],
    "half a cold change": [5, 0, 1, 0],
    "a cold change outside": [5, 0, 1, 9, 2],
    "cold changes that end outside": [5, 0, 2, 4, 2, 4, 2],
    "a gap that overflows": [5, 0, 3, 1 << 47, 2, 1 << 47, 2, 1 << 47, 2],
    "a gap beyond the limit": [5, 0, 1, (1 << 47) + 1, 2],
    "a gap beyond 64 bits": [5, 0, 1, 1 << 66, 2],
    "a cold change by nothing": [5, 0, 1, 0, 0],
    "a step beyond the circle": [5, 0, 1, 0, (1 << 16) + 1],
    "more than a few cold changes as numbers": [5, 0, 65, *[0, 2] * 65],
}
RIGHT = [5, 9 << 3 | 5, 0, 2, 0, 1 << 16, 7, 1]


@pytest.mark.parametrize("why", WRONG)
def test_what_no_writer_makes_is_refused(why: str) -> None:
    assert assert_as_context([(written(*RIGHT), tile_of(9))])
    assert refused_and_read([written(*WRONG[why])], size=9) == (1, 0)


def test_what_is_beyond_a_limit_is_named_so() -> None:
    for why in ("a gap beyond the limit", "a cold change by nothing", "a step beyond the circle"):
        with pytest.raises(LimitError):
            parsed([(written(*RIGHT), tile_of(9)), (written(*WRONG[why]), tile_of(9))])


def test_bytes_of_one_payload_are_not_taken_for_those_of_the_next() -> None:
    """The first ends inside a number, or lacks one, which the second's first bytes would complete."""
    for first in ([5, 0, b"\x81"], [5, 0, 1, 0, b"\x81"], [5, 0, 1, 0], [5, 1 << 3, b"\x81"], [5, 1 << 3]):
        for second in (written(*RIGHT), written(5, 0, 0), b"\1" * 9):
            assert not assert_as_context([(written(*first), tile_of(9)), (second, tile_of(9))])


# Runs of numbers


@given(st.lists(st.lists(st.integers(0, (1 << 63) - 1) | st.integers(0, 300), max_size=9), max_size=9))
def test_runs_are_the_numbers_of_each(some: list[list[int]]) -> None:
    values, counts = (
        np.array([n for one in some for n in one], np.int64),
        np.array([len(one) for one in some], np.int64),
    )
    assert wire.runs(values, counts) == [wire.few_numbers(one) for one in some]
