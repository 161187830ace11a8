"""Each row and function spoils a good record in one way; a reader must refuse it by name, at once, and change nothing.

A few attacks forge what a reader does not have to trust: it still reaches the right state, or forgets its version.
Whatever an attack does, hashes, ids and sizes are made to fit again, unless they are what it is about.
A failure names the attacks that were not refused so.
"""

import dataclasses
import hashlib
import inspect
import json
import resource
import struct
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import zstandard

from pulsesync.core.types import TensorSpec
from pulsesync.errors import (
    BaseMismatchError,
    ChainError,
    ChecksumError,
    FormatError,
    LimitError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
    UnsupportedError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch, wire
from pulsesync.format.index import MAX_TABLES
from pulsesync.format.signature import SigningKey
from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.kernels import reference, spec
from pulsesync.maintain.squash import Squasher
from pulsesync.maintain.verify import RunVerifier
from pulsesync.state.host import HostBackend
from pulsesync.state.views import new_tensors
from pulsesync.state.weights import WeightState
from pulsesync.store.local import LocalStore
from tests import records
from tests.backends import use_kernels
from tests.forked import Forked
from tests.hostile import forge
from tests.hostile.forge import Dense, Gap, Part, Plane, Version, numbers
from tests.tiers import slow

MAX_SECONDS = 5.0
MAX_BYTES = 64 << 20

Spoil = Callable[[Version], object]  # changes the version, or returns what the store will hold, as a dict

RIGHT = "the right state"  # the outcome of attacks that a reader does not have to refuse


@dataclass(frozen=True)
class Attack:
    end: type[PulseError] | str
    name: str
    spoil: Spoil
    on: str = "history"  # which good version
    fit: bool = True  # whether the new sizes of payloads are written to the index
    fresh: bool = False  # whether the reader has the weights of the base and has not identified their version yet
    long: bool = False  # whether it takes even a good reader a quarter of a second: left to the slow tier


ATTACKS: list[Attack] = []


def attack(
    end: type[PulseError] | str, *, on: str = "history", fit: bool = True, fresh: bool = False, long: bool = False
) -> Callable[[Spoil], Spoil]:
    """List a function as an attack."""

    def register(spoil: Spoil) -> Spoil:
        ATTACKS.append(Attack(end, spoil.__name__.replace("_", " "), spoil, on, fit, fresh, long))
        return spoil

    return register


@cache
def victim(name: str) -> forge.Victim:
    """A reader that has once accepted the good version, so that every kernel is compiled."""
    target = forge.Victim(forge.sample(name))
    assert target.feed(target.target.version.objects()) is None
    target.reset()
    return target


GROUPS = [*forge.NAMES, "big", "big.anchor"]
GOOD_EVERY = 24  # in the fast tier: after how many attacks the good version must still be accepted


@pytest.mark.parametrize("on", GROUPS)
def test_every_attack_is_refused_at_once_and_leaves_no_trace(on: str) -> None:
    attacks = [case for case in ATTACKS if case.on == on and not case.long]
    check_attacks(attacks, good_every=GOOD_EVERY, traced=lambda case: case.end is LimitError)


@pytest.mark.slow
@pytest.mark.timeout(180)  # hundreds of attacks, in a few seconds on an idle machine
@pytest.mark.parametrize("on", GROUPS)
def test_every_attack_is_refused_with_little_memory_and_the_good_version_is_accepted_after_it(on: str) -> None:
    check_attacks([case for case in ATTACKS if case.on == on], good_every=1, traced=lambda case: True)


def check_attacks(attacks: list[Attack], good_every: int, traced: Callable[[Attack], bool]) -> None:
    failures = []
    for number, case in enumerate(attacks, 1):
        try:
            check_attack(case, traced(case))
            if number % good_every == 0 or number == len(attacks):
                check_good_version(case.on)
        except Exception:  # noqa: BLE001 - all attacks are tried, and those that succeed are named
            failures.append(f"{case.name}:\n{traceback.format_exc()}")
        finally:
            victim(case.on).take_back()
    assert not failures, "\n".join(failures)
    assert attacks


def check_attack(case: Attack, traced: bool) -> None:
    """traced: whether memory is measured, which makes a reader take twice as long."""
    target = victim(case.on)
    version = target.target.version.copy()
    objects = case.spoil(version)
    if not isinstance(objects, dict):
        for part in version.parts:
            if case.fit and isinstance(part, Part):
                part.fit()
        objects = version.objects()
    if case.fresh:
        target.refresh()
    try:
        if traced:
            tracemalloc.start()
        began = time.process_time()  # a busy machine is not the reader's fault
        error = target.feed(objects)
        took = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if isinstance(case.end, str):
        assert error is None, f"{type(error).__name__}: {error}"
    else:
        assert type(error) is case.end, f"{type(error).__name__}: {error}"
    assert target.accepted_the_right_state() if case.end == RIGHT else target.untouched
    assert (target.subscriber.version is None) or case.end is not NothingPublishedError
    assert took < MAX_SECONDS
    assert peak < MAX_BYTES


def check_good_version(on: str) -> None:
    """A reader that was under attack still accepts it, and reaches the right state."""
    target = victim(on)
    assert target.feed(target.target.version.objects()) is None
    assert target.accepted_the_right_state()


def test_every_function_that_spoils_a_version_is_an_attack_with_an_expected_end() -> None:
    """A function without `@attack(...)` would never run. Helpers take more arguments or return something else."""
    signatures = {name: inspect.signature(it) for name, it in globals().items() if inspect.isfunction(it)}
    spoiling = [
        name
        for name, signature in signatures.items()
        if [p.annotation for p in signature.parameters.values()] == [Version]
        and signature.return_annotation in (None, dict[str, bytes])
    ]
    assert spoiling == [case.spoil.__name__ for case in ATTACKS if case.spoil.__name__ != "<lambda>"]
    assert len({case.name for case in ATTACKS}) == len(ATTACKS)
    assert {case.end for case in ATTACKS if isinstance(case.end, str)} == {RIGHT}


# -- helpers -------------------------------------------------------------------------------------------------------


def put(target: Any, items: dict[Any, Any] | None = None, **attributes: Any) -> None:
    """Set items and attributes of a part of a version."""
    for key, value in (items or {}).items():
        target[key] = value
    for name, value in attributes.items():
        setattr(target, name, value)


def add(target: Any, items: dict[Any, Any] | None = None, **attributes: Any) -> None:
    """Add to numbers in a part of a version."""
    put(target, {key: target[key] + by for key, by in (items or {}).items()})
    put(target, **{name: getattr(target, name) + by for name, by in attributes.items()})


def part_of(v: Version) -> Part:
    (part,) = v.parts
    assert isinstance(part, Part)
    return part


def row(v: Version, tensor: str) -> int:
    """Where a tensor's (first) tile stands in the index."""
    tiles = [tile for tile, *_ in part_of(v).payloads()]
    return tiles.index(forge.TILES[tensor]) if len(tiles) > 1 else 0


def body(v: Version, tensor: str = "main") -> Any:
    return part_of(v).payloads()[row(v, tensor)][3]


def few_cold(v: Version) -> Any:
    """The payload, with two cold changes in place of its own."""
    payload = body(v)
    payload.cold, payload.cold_count, payload.cold_planes = [3, 2, 5, 1], None, None
    return payload


def cold_planes(v: Version) -> forge.Steps:
    columns: forge.Steps = body(v).cold_planes
    return columns


def table_of(v: Version) -> forge.Table:
    table: forge.Table = part_of(v).index.tables[body(v).table]
    return table


def frame(claimed: int, *blocks: bytes, head: int = 0xA0, window: bytes = b"") -> bytes:
    """A zstd frame, by hand: single-segment with a content size of four bytes, unless head and window say otherwise."""
    return b"\x28\xb5\x2f\xfd" + bytes([head]) + window + struct.pack("<I", claimed) + b"".join(blocks)


def run_of(byte: int, count: int, last: bool = True) -> bytes:
    return (count << 3 | 1 << 1 | last).to_bytes(3, "little") + bytes([byte])


def raw(content: bytes, last: bool = True) -> bytes:
    return (len(content) << 3 | last).to_bytes(3, "little") + content


def store_frame(plane: Plane, data: bytes) -> None:
    plane.stored = b"\x01" + wire.number(len(data)) + data


def first_plane(v: Version) -> Plane:
    """A plane whose content a frame may replace: 2,048 bytes of the dense tensor `main`."""
    planes: list[Plane] = body(v).planes
    assert len(planes[0].content) == 2048
    return planes[0]


def store_index(v: Version, stored: bytes) -> None:
    """Put these bytes in the place of section 0."""
    part = part_of(v)
    v.parts = [part.seal([stored, *part.sections()[1:]])]


def with_manifest(v: Version, data: bytes) -> dict[str, bytes]:
    return v.objects() | {v.key: data}


def record_of(v: Version) -> bytes:
    """The record without its signature."""
    return dataclasses.replace(v, signer=None).objects()[v.key]


def block_of(v: Version) -> bytes:
    """The signature alone."""
    return v.objects()[v.key][len(record_of(v)) :]


# -- the file ------------------------------------------------------------------------------------------------------


@attack(FormatError)
def as_many_sections_as_allowed_and_one_not_filled(v: Version) -> None:
    part = part_of(v)
    v.parts = [part.seal([*part.sections(), *[b""] * 16_381, b"x"])]


@attack(LimitError)
def section_sizes_that_overflow_64_bits_to_the_right_sum(v: Version) -> None:
    sections = part_of(v).sections()
    v.parts = [part_of(v).seal(sections, sizes={0: len(sections[0]) + 8, 1: (len(sections[1]) - 8) | 1 << 63})]


@attack(ChecksumError)
def another_part_under_the_id(v: Version) -> None:
    part_of(v).layout = bytes(32)
    v.reseal = False


@attack(ChecksumError)
def a_section_that_is_not_the_one_hashed(v: Version) -> None:
    data = bytearray(part_of(v).write())
    data[-1] ^= 1
    v.parts = [bytes(data)]


@attack(ChecksumError)
def an_index_that_is_not_the_one_hashed(v: Version) -> None:
    data = bytearray(part_of(v).write())
    data[forge.HEADER_BYTES + 80 + 9] ^= 0x10
    v.parts = [bytes(data)]


@attack(FormatError)
def a_part_of_another_size_than_the_manifest_says(v: Version) -> dict[str, bytes]:
    part = v.manifest["parts"][0]
    return with_manifest(v, records.write(v.manifest | {"parts": [part | {"size": part["size"] + 1}]}))


ATTACKS += [
    Attack(FormatError, "an empty file", lambda v: put(v, parts=[b""])),
    Attack(FormatError, "a file cut inside its header", lambda v: put(v, parts=[part_of(v).write()[:43]])),
    Attack(
        FormatError,
        "a file cut inside its section table",
        lambda v: put(v, parts=[part_of(v).write()[: forge.HEADER_BYTES + 40 + 7]]),
    ),
    Attack(
        FormatError,
        "a file cut inside its index",
        lambda v: put(v, parts=[part_of(v).write()[: forge.HEADER_BYTES + 80 + 50]]),
    ),
    Attack(FormatError, "a file cut inside a payload", lambda v: put(v, parts=[part_of(v).write()[:-40]])),
    Attack(FormatError, "a file longer than its sections", lambda v: put(v, parts=[part_of(v).write() + b"\x00"])),
    Attack(FormatError, "a file that begins with other bytes", lambda v: put(part_of(v), magic=b"\x89PULSE\r\n")),
    Attack(UnsupportedError, "an unknown format version", lambda v: put(part_of(v), version=2)),
    Attack(UnsupportedError, "a part of the first draft", lambda v: put(part_of(v), version=0x81)),
    Attack(UnsupportedError, "a part of the second draft", lambda v: put(part_of(v), version=0x82)),
    Attack(UnsupportedError, "flags that are not zero", lambda v: put(part_of(v), flags=1)),
    Attack(
        FormatError, "a part for another layout", lambda v: put(part_of(v), layout=hashlib.sha256(b"another").digest())
    ),
    Attack(LimitError, "no sections", lambda v: put(v, parts=[part_of(v).seal([], count=0)])),
    Attack(LimitError, "more sections than allowed", lambda v: put(v, parts=[part_of(v).seal([b""] * 16_385)])),
    Attack(
        FormatError,
        "more sections than there are",
        lambda v: put(v, parts=[part_of(v).seal(part_of(v).sections(), count=16_384)]),
    ),
    Attack(
        LimitError,
        "a section larger than allowed",
        lambda v: put(v, parts=[part_of(v).seal(part_of(v).sections(), sizes={1: (1 << 40) + 1})]),
    ),
    Attack(
        FormatError,
        "a section of a terabyte that is not there",
        lambda v: put(v, parts=[part_of(v).seal(part_of(v).sections(), sizes={1: 1 << 40})]),
    ),
    Attack(NotFoundError, "a part that is not there", lambda v: {v.key: v.objects()[v.key]}),
]


# -- the index -----------------------------------------------------------------------------------------------------


@attack(FormatError)
def an_index_cut_short(v: Version) -> None:
    plain = part_of(v).index.plain()[:-1]
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def an_index_with_a_byte_too_many(v: Version) -> None:
    plain = part_of(v).index.plain() + b"\x00"
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def an_index_that_says_it_is_shorter_than_its_frame_unpacks_to(v: Version) -> None:
    index = part_of(v).index
    index.packed, index.size = True, len(index.plain()) - 1


@attack(FormatError)
def a_number_written_longer_than_needed(v: Version) -> None:
    plain = part_of(v).index.plain()
    assert plain[0] < 0x80
    plain = bytes([plain[0] | 0x80, 0]) + plain[1:]
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def a_column_that_ends_inside_a_number(v: Version) -> None:
    plain = bytes([1, 9]) + numbers([0, 24, 3]) + b"\x80" * 72
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def a_number_in_a_column_written_longer_than_needed(v: Version) -> None:
    index, table = part_of(v).index, table_of(v)
    assert table.classes * table.ages >= 32  # short columns are read one by one
    before = b"".join(t.write() for t in index.tables[: body(v).table])
    at = len(wire.number(len(index.tables)) + before) + 1 + len(numbers([table.lo, table.classes, table.ages]))
    plain = index.plain()
    plain = plain[:at] + bytes([plain[at] | 0x80, 0]) + plain[at + 1 :]
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(LimitError)
def a_tile_twice_by_a_distance_that_wraps_around(v: Version) -> None:
    part_of(v).index.tiles[1] = (1 << 64) - 1  # the format can only say it so: distances are never negative


@attack(FormatError, fit=False)
def payloads_that_overlap_their_neighbours(v: Version) -> None:
    part_of(v).index.sizes[0] += 3  # in the file one payload begins where the other ends: overlap is too many bytes


@attack(LimitError, fit=False)
def payload_sizes_that_overflow_to_the_right_sum(v: Version) -> None:
    sizes = part_of(v).index.sizes
    sizes[0] += 1 << 63
    sizes[1] += 1 << 63


@attack(VerificationError)
def two_payloads_under_each_others_tiles(v: Version) -> None:
    sections = part_of(v).bodies[0]
    i, j = row(v, "bytes"), row(v, "doubles")
    part_of(v).index.codecs = [0 if k in (i, j) else c for k, c in enumerate(part_of(v).index.codecs)]
    sections[i], sections[j] = Dense([Plane(bytes(33))]), Dense([Plane(bytes(9))] * 8)


ATTACKS += [
    Attack(FormatError, "an empty index", lambda v: store_index(v, b"")),
    Attack(
        FormatError,
        "bytes behind the index in its section",
        lambda v: store_index(v, part_of(v).index.write() + b"\x00"),
    ),
    Attack(LimitError, "an index that says it has 2 to the 60 bytes", lambda v: put(part_of(v).index, size=1 << 60)),
    Attack(LimitError, "an index of 2 to the 60 tiles", lambda v: put(part_of(v).index, tile_count=1 << 60)),
    Attack(
        FormatError, "an index of one tile more than it lists", lambda v: put(part_of(v).place([]).index, tile_count=1)
    ),
    Attack(LimitError, "an index of 2 to the 60 tables", lambda v: put(part_of(v).index, table_count=1 << 60)),
    Attack(
        LimitError, "an index of more tables than allowed", lambda v: put(part_of(v).index, table_count=MAX_TABLES + 1)
    ),
    Attack(FormatError, "a number that never ends", lambda v: store_index(v, b"\xff" * 1000)),
    Attack(FormatError, "a number of eleven bytes", lambda v: store_index(v, b"\xff" * 10 + b"\x01")),
    Attack(LimitError, "a number of ten bytes beyond 64 bits", lambda v: store_index(v, b"\xff" * 9 + b"\x7f")),
    Attack(FormatError, "a tile that does not exist", lambda v: add(part_of(v).index.tiles, {-1: 5})),
    Attack(FormatError, "a section that does not exist", lambda v: put(part_of(v).index.sections, {-1: 1})),
    Attack(
        LimitError,
        "the index itself as a payload section by wrapping around",
        lambda v: put(part_of(v).index.sections, {0: (1 << 64) - 1}),
    ),
    Attack(
        FormatError,
        "payloads that leave a byte of their section",
        lambda v: add(part_of(v).index.sizes, {-1: -1}),
        fit=False,
    ),
    Attack(
        FormatError,
        "payloads that reach beyond their section",
        lambda v: add(part_of(v).index.sizes, {-1: 1}),
        fit=False,
    ),
    Attack(
        FormatError,
        "a section that no payload is in",
        lambda v: put(v, parts=[part_of(v).seal([*part_of(v).sections(), b"unused"])]),
    ),
    Attack(UnsupportedError, "an unknown codec", lambda v: put(part_of(v).index.codecs, {0: 4})),
    Attack(UnsupportedError, "codec 255", lambda v: put(part_of(v).index.codecs, {-1: 255})),
    Attack(
        VerificationError, "a tile sum that is not the weights", lambda v: put(part_of(v).index.sums, {3: bytes(16)})
    ),
    Attack(
        VerificationError, "a changed tile that is left out", lambda v: part_of(v).place(part_of(v).payloads()[:-1])
    ),
]


# -- zstd ----------------------------------------------------------------------------------------------------------


@attack(FormatError, on="dense")
def a_frame_without_its_content_size(v: Version) -> None:
    plane = first_plane(v)
    store_frame(plane, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2048)))


@attack(FormatError, on="dense")
def a_frame_of_gigabytes(v: Version) -> None:
    blocks = [run_of(0, 1 << 17, last=False)] * 100
    store_frame(first_plane(v), frame((1 << 32) - 1, *blocks, run_of(0, 1 << 17)))


@attack(FormatError, on="dense")
def a_frame_that_unpacks_to_more_than_it_says(v: Version) -> None:
    blocks = [run_of(0, 2048, last=False)] * 100
    store_frame(first_plane(v), frame(2048, *blocks, run_of(0, 2048)))


@attack(LimitError, on="gap")
def a_frame_as_long_as_its_content(v: Version) -> None:
    """Right in everything but that: the gaps get a second byte, always zero, as a frame that saves nothing."""
    gaps = body(v)
    room = gaps.count - len(frame(gaps.count, run_of(0, gaps.count)))
    parts = 1 + room % 3  # a run more costs 4 bytes, an empty block 3
    rest = room - 4 * (parts - 1)
    runs = [run_of(0, 1, last=False)] * (parts - 1) + [run_of(0, gaps.count - parts + 1)]
    plane = Plane(b"")
    store_frame(plane, frame(gaps.count, *[raw(b"", last=False)] * (rest // 3), *runs))
    assert rest % 3 == 0
    gaps.width = 2
    gaps.planes.insert(1, plane)


INDEX_LIMIT = (1 << 24) + 64 * 14  # with the tiles of this layout


@attack(FormatError)
def an_index_that_unpacks_to_as_many_zeros_as_allowed(v: Version) -> None:
    blocks = [run_of(0, 1 << 17, last=False)] * (1 << 7)
    plane = Plane(b"")
    store_frame(plane, frame(INDEX_LIMIT, *blocks, run_of(0, INDEX_LIMIT - (1 << 24))))
    store_index(v, wire.number(INDEX_LIMIT) + plane.write())


@attack(FormatError)
def an_index_that_says_it_unpacks_to_all_that_is_allowed_and_does_not(v: Version) -> None:
    plane = Plane(b"")
    store_frame(plane, frame(INDEX_LIMIT, run_of(0, 100)))
    store_index(v, wire.number(INDEX_LIMIT) + plane.write())


@attack(LimitError)
def an_index_that_unpacks_to_more_than_allowed(v: Version) -> None:
    plane = Plane(b"")
    store_frame(plane, frame(INDEX_LIMIT + 1, run_of(0, 100)))
    store_index(v, wire.number(INDEX_LIMIT + 1) + plane.write())


ATTACKS += [
    Attack(
        UnsupportedError,
        "a plane of unknown kind",
        lambda v: put(first_plane(v), stored=b"\x02" + first_plane(v).content),
        on="dense",
    ),
    Attack(
        LimitError,
        "a frame said to be longer than its content",
        lambda v: put(first_plane(v), stored=b"\x01" + wire.number(1 << 40)),
        on="dense",
    ),
    Attack(
        FormatError,
        "a frame cut short",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048))[:-1]),
        on="dense",
    ),
    Attack(FormatError, "a frame of no bytes", lambda v: store_frame(first_plane(v), b""), on="dense"),
    Attack(
        FormatError,
        "a frame that is not zstd",
        lambda v: store_frame(first_plane(v), b"\x1f\x8b" + bytes(50)),
        on="dense",
    ),
    Attack(
        FormatError,
        "a frame that unpacks to less than it says",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2047))),
        on="dense",
    ),
    Attack(
        LimitError,
        "a frame with a window of two gigabytes",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048), head=0x80, window=bytes([21 << 3]))),
        on="dense",
    ),
    Attack(
        FormatError,
        "a skippable frame",
        lambda v: store_frame(first_plane(v), struct.pack("<II", 0x184D2A50, 8) + bytes(8)),
        on="dense",
    ),
    Attack(
        FormatError,
        "a skippable frame before the real one",
        lambda v: store_frame(
            first_plane(v), struct.pack("<II", 0x184D2A5F, 8) + bytes(8) + frame(2048, run_of(0, 2048))
        ),
        on="dense",
    ),
    Attack(
        FormatError,
        "a skippable frame behind the real one",
        lambda v: store_frame(
            first_plane(v), frame(2048, run_of(0, 2048)) + struct.pack("<II", 0x184D2A50, 8) + bytes(8)
        ),
        on="dense",
    ),
    Attack(
        FormatError,
        "two frames that are the content together",
        lambda v: store_frame(first_plane(v), frame(1024, run_of(0, 1024)) * 2),
        on="dense",
    ),
    Attack(
        FormatError,
        "two whole frames",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048)) * 2),
        on="dense",
    ),
    Attack(
        FormatError,
        "bytes behind a frame",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048)) + b"\x00"),
        on="dense",
    ),
    Attack(
        FormatError,
        "a frame with a wrong checksum",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048), b"\x00\x00\x00\x00", head=0xA4)),
        on="dense",
    ),
    Attack(
        FormatError,
        "a frame that needs a dictionary",
        lambda v: store_frame(first_plane(v), frame(2048, run_of(0, 2048), head=0xA1, window=b"\x07")),
        on="dense",
    ),
    Attack(
        FormatError,
        "a frame with a block of the reserved kind",
        lambda v: store_frame(first_plane(v), frame(2048, (2048 << 3 | 3 << 1 | 1).to_bytes(3, "little") + b"\x00")),
        on="dense",
    ),
]


# -- tables --------------------------------------------------------------------------------------------------------


@attack(FormatError)
def a_symbol_that_does_not_exist(v: Version) -> None:
    table = table_of(v)
    last = np.cumsum(table.counts)[np.flatnonzero(table.counts)[0]] - 1
    table.skips[last] += 41


@attack(LimitError)
def frequencies_that_add_up_to_less(v: Version) -> None:
    frequencies = table_of(v).frequencies
    frequencies[int(np.argmax(frequencies))] -= 1


@attack(LimitError)
def frequencies_that_overflow_to_the_right_sum(v: Version) -> None:
    frequencies = table_of(v).frequencies
    frequencies[0] += 1 << 63
    frequencies[1] += 1 << 63


@attack(FormatError)
def a_context_that_is_used_and_has_no_frequencies(v: Version) -> None:
    table = table_of(v)
    table.counts, table.skips, table.frequencies = [0] * len(table.counts), [], []


@attack(LimitError)
def as_many_empty_tables_as_allowed_and_an_impossible_tile_count(v: Version) -> None:
    index = part_of(v).index
    empty = forge.Table(12, 0, 24, 128, [0] * 24 * 128, [], [])
    index.tables = [empty] * MAX_TABLES
    index.packed, index.tile_count = True, 1 << 60


ATTACKS += [
    Attack(UnsupportedError, "a table for integers", lambda v: put(table_of(v), dtype=11)),
    Attack(UnsupportedError, "a table for no dtype", lambda v: put(table_of(v), dtype=0)),
    Attack(FormatError, "a table without classes", lambda v: put(table_of(v), classes=0, counts=[])),
    Attack(LimitError, "a table of 25 classes", lambda v: put(table_of(v), classes=25)),
    Attack(FormatError, "a table without ages", lambda v: put(table_of(v), ages=0, counts=[])),
    Attack(LimitError, "a table of 129 ages", lambda v: put(table_of(v), ages=129)),
    Attack(LimitError, "a table that begins at class 2 to the 40", lambda v: put(table_of(v), lo=1 << 40)),
    Attack(FormatError, "a table of classes beyond the last", lambda v: put(table_of(v), lo=256)),
    Attack(LimitError, "a context of more symbols than there are", lambda v: put(table_of(v).counts, {0: 42})),
    Attack(LimitError, "a symbol beyond 64 bits", lambda v: put(table_of(v).skips, {-1: (1 << 63) + 1})),
    Attack(LimitError, "frequencies that add up to more", lambda v: add(table_of(v).frequencies, {0: 1})),
    Attack(LimitError, "a context of one frequency too large", lambda v: put(table_of(v).frequencies, {0: 1 << 40})),
]


# -- context and history -------------------------------------------------------------------------------------------


@attack(FormatError)
def a_block_without_changes_that_has_lanes(v: Version) -> None:
    payload = body(v)
    payload.heads, payload.stream = [1], b""


@attack(FormatError)
def a_stream_that_lacks_its_last_word(v: Version) -> None:
    payload = body(v)
    payload.heads[1] -= 1
    payload.stream = payload.stream[:-2]


@attack(FormatError)
def a_stream_with_a_word_too_many(v: Version) -> None:
    payload = body(v)
    payload.heads[1] += 1
    payload.stream += b"\x00\x00"


@attack(FormatError)
def a_stream_of_no_words(v: Version) -> None:
    payload = body(v)
    payload.heads[1], payload.stream = 0, b""


@attack(FormatError)
def streams_that_end_in_another_state(v: Version) -> None:
    """Good in everything else: an encoder that begins, where a decoder ends, at 65,537."""
    with use_kernels("reference"), mock.patch.object(spec, "STATE_LOW", (1 << 16) + 1):
        v.parts = [forge.run_for("history").encode(forge.sample("history").after, "history")]


@attack(FormatError)
def a_lane_nobody_uses_that_is_not_in_its_first_state(v: Version) -> None:
    payload = body(v, "scalar")
    assert payload.heads[0] == 1 << 3
    payload.heads = [1 << 3 | 1, payload.heads[1] + 2]
    payload.stream = payload.stream[:4] + struct.pack("<I", 1 << 17) + payload.stream[4:]


@attack(FormatError, on="context")
def hot_steps_the_long_way_round(v: Version) -> None:
    """To the right weights: each step is written as the circle less it, in the other direction."""
    real = reference.steps

    def long_way(old: Any, new: Any, shift: int) -> Any:
        symbols, extras, *classes = real(old, new, shift)
        half = 1 << (8 * old.itemsize - 1)
        size_class = (symbols.astype(np.int64) - 1) >> 1
        size = np.where(size_class < 7, size_class + 1, (1 << np.maximum(size_class - 4, 0)) + extras)
        longest = 1 + 2 * (8 * old.itemsize + 3)
        turned = np.where(size < half, longest + symbols % 2, symbols).astype(np.uint8)
        return turned, np.where(size < half, half - size, extras).astype(np.uint32), *classes

    run, good = forge.run_for("context"), forge.sample("context")
    no_cold = mock.patch.object(forge, "low_cut", lambda changes, _: int(np.flatnonzero(changes)[-1]) + 1)
    with use_kernels("reference"), mock.patch.object(reference, "steps", long_way), no_cold:
        v.parts = [run.encode(good.after, "context")]


@attack(FormatError)
def a_listed_size_in_place_of_the_right_one(v: Version) -> None:
    """The last symbol that occurs becomes that of the listed size."""
    table = table_of(v)
    table.listed, end = [0], 0
    for count in table.counts:
        end += count
        if count:
            used = sum(skip + 1 for skip in table.skips[end - count : end]) - 1
            table.skips[end - 1] += 41 - used


@attack(FormatError, on="big")
def cold_gaps_of_2_to_the_47_that_wrap_around_to_positions_named_twice(v: Version) -> None:
    count = 1 << 17  # times 2^47 positions on is where it began
    gaps = forge.Plane(b"\xff" * count, packed=True), forge.Plane(b"\x7f" * count, packed=True)
    payload = body(v)
    payload.cold_planes = forge.Steps([6, 1], [[gaps[0]] * 5 + [gaps[1]], [forge.Plane(bytes(count), packed=True)]])
    payload.cold_count = count


@attack(FormatError)
def many_cold_changes_of_which_the_last_is_behind_the_tile(v: Version) -> None:
    plane = cold_planes(v).planes[0][-1]
    plane.content = plane.content[:-1] + b"\xff"


@attack(FormatError)
def many_cold_changes_with_gaps_of_seven_bytes(v: Version) -> None:
    columns = cold_planes(v)
    columns.planes[0] += [forge.Plane(bytes(len(columns.planes[0][0].content)))] * (7 - columns.widths[0])
    columns.widths[0] = 7


@attack(FormatError)
def many_cold_changes_with_steps_of_more_bytes_than_their_dtype_has(v: Version) -> None:
    columns = cold_planes(v)
    columns.planes[1] += [forge.Plane(bytes(len(columns.planes[1][0].content)))] * (3 - columns.widths[1])
    columns.widths[1] = 3


@attack(FormatError)
def many_cold_changes_written_as_if_they_were_few(v: Version) -> None:
    payload = body(v)
    payload.cold, payload.cold_planes = [0, 2] * payload.cold_count, None


@attack(FormatError)
def a_cold_change_of_a_hot_weight(v: Version) -> None:
    """The hottest there is: zero, which `start` puts at 14."""
    few_cold(v).cold = [14, 2]


@attack(FormatError, on="step")
def a_step_half_the_circle_upwards(v: Version) -> None:
    payload = body(v)
    while payload.columns.widths[1] < 2:
        payload.columns.planes[1].append(forge.Plane(bytes(payload.count)))
        payload.columns.widths[1] += 1
    for plane in payload.columns.planes[1]:
        plane.content = b"\xff" + plane.content[1:]


@attack(FormatError, on="step")
def steps_of_no_bytes(v: Version) -> None:
    columns = body(v).columns
    columns.widths[1], columns.planes[1] = 0, []


@attack(FormatError, on="step")
def a_step_behind_the_tile(v: Version) -> None:
    plane = body(v).columns.planes[0][-1]
    plane.content = plane.content[:-1] + b"\xff"


@attack(FormatError)
def a_table_of_one_age_too_many(v: Version) -> None:
    table = table_of(v)
    by_class = np.array(table.counts).reshape(table.classes, table.ages)
    table.ages += 1
    table.counts = np.pad(by_class, ((0, 0), (0, 1))).reshape(-1).tolist()


@attack(FormatError)
def a_table_of_one_age_too_few(v: Version) -> None:
    table = table_of(v)
    one = [1, *[0] * (table.classes * (table.ages - 1) - 1)]
    table.ages, table.counts, table.skips, table.frequencies = table.ages - 1, one, [0], [(1 << 14) - 1]


@attack(FormatError)
def a_history_payload_for_a_tensor_without_weights(v: Version) -> None:
    part = part_of(v)
    nothing = forge.TILES["empty"], 3, bytes(16), bytes([body(v).table, body(v).cut, 0])
    part.place(sorted([*part.payloads(), nothing], key=lambda p: p[0]))


ATTACKS += [
    Attack(
        FormatError, "a payload cut short", lambda v: put(part_of(v).bodies[0], {row(v, "main"): body(v).write()[:-2]})
    ),
    Attack(FormatError, "a payload of no bytes", lambda v: put(part_of(v).bodies[0], {row(v, "main"): b""})),
    Attack(
        FormatError,
        "a payload with a byte too many",
        lambda v: put(part_of(v).bodies[0], {row(v, "main"): body(v).write() + b"\x00"}),
    ),
    Attack(
        FormatError, "a table that the part does not have", lambda v: put(body(v), table=len(part_of(v).index.tables))
    ),
    Attack(FormatError, "a table of another dtype", lambda v: put(body(v), table=body(v, "wide").table)),
    Attack(LimitError, "a cut above the table", lambda v: put(body(v), cut=table_of(v).lo + table_of(v).classes + 1)),
    Attack(LimitError, "a cut above all classes", lambda v: put(body(v), cut=257)),
    Attack(LimitError, "a cut of 2 to the 63", lambda v: put(body(v), cut=1 << 63)),
    Attack(FormatError, "a cut that falls in its epoch", lambda v: add(body(v), cut=-1)),
    Attack(LimitError, "more changes than weights", lambda v: put(body(v).heads, {0: 2049 << 3})),
    Attack(LimitError, "a block of 2 to the 40 changes", lambda v: put(body(v).heads, {0: 1 << 43})),
    Attack(FormatError, "a block of 64 lanes", lambda v: put(body(v).heads, {0: body(v).heads[0] & ~7 | 6})),
    Attack(
        FormatError,
        "a block of 32 lanes whose stream has fewer states",
        lambda v: put(body(v).heads, {0: body(v).heads[0] & ~7 | 5}),
    ),
    Attack(FormatError, "a block of one change more than its stream holds", lambda v: add(body(v).heads, {0: 8})),
    Attack(FormatError, "a block of one change less than its stream holds", lambda v: add(body(v).heads, {0: -8})),
    Attack(LimitError, "a stream of 2 to the 40 words", lambda v: put(body(v).heads, {1: 1 << 40})),
    Attack(FormatError, "a stream of more words than there are", lambda v: add(body(v).heads, {1: 1})),
    Attack(FormatError, "a stream of zeros", lambda v: put(body(v), stream=bytes(len(body(v).stream)))),
    Attack(FormatError, "a stream of ones", lambda v: put(body(v), stream=b"\xff" * len(body(v).stream))),
    Attack(LimitError, "a table that lists more sizes than fit", lambda v: put(table_of(v), listed=[0] * 12)),
    Attack(FormatError, "a table that lists half the circle", lambda v: put(table_of(v), listed=[(1 << 15) - 8])),
    Attack(LimitError, "a table that lists a size beyond any", lambda v: put(table_of(v), listed=[1 << 63])),
    Attack(LimitError, "more cold changes than weights", lambda v: put(body(v), cold_count=2049)),
    Attack(FormatError, "more cold changes than bytes", lambda v: put(body(v), cold_count=2048)),
    Attack(FormatError, "a cold change behind the tile", lambda v: add(few_cold(v).cold, {-2: 2048})),
    Attack(LimitError, "a cold gap beyond 2 to the 47", lambda v: put(few_cold(v).cold, {0: (1 << 47) + 1})),
    Attack(LimitError, "a cold change of no step", lambda v: put(few_cold(v).cold, {1: 0})),
    Attack(LimitError, "a cold step longer than its dtype has", lambda v: put(few_cold(v).cold, {1: (1 << 17) + 2})),
    Attack(LimitError, "a cold step of 2 to the 63", lambda v: put(few_cold(v).cold, {1: 1 << 63})),
    Attack(UnsupportedError, "context for integers", lambda v: put(part_of(v).index.codecs, {row(v, "ints"): 2})),
    Attack(UnsupportedError, "steps for integers", lambda v: put(part_of(v).index.codecs, {row(v, "ints"): 4})),
    Attack(FormatError, "an xor that is a plane short", lambda v: body(v).planes.pop(), on="xor"),
    Attack(
        VerificationError,
        "an xor taken for a dense tile",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 0}),
        on="xor",
    ),
    Attack(UnsupportedError, "history for doubles", lambda v: put(part_of(v).index.codecs, {row(v, "doubles"): 3})),
    Attack(
        FormatError,
        "a history payload in an anchor",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 3}),
        on="anchor",
        fit=False,
    ),
    Attack(
        FormatError,
        "a gap payload in an anchor",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 1}),
        on="anchor",
        fit=False,
    ),
    Attack(
        FormatError,
        "a history payload in a squash",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 3}),
        on="squash",
    ),
    Attack(
        FormatError,
        "a history payload that says it needs none",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 2}),
    ),
    Attack(
        FormatError,
        "a context payload that says it needs history",
        lambda v: put(part_of(v).index.codecs, {row(v, "main"): 3}),
        on="context",
    ),
]


# -- gap and dense -------------------------------------------------------------------------------------------------


@attack(FormatError, on="gap")
def gaps_of_no_bytes(v: Version) -> None:
    payload = body(v)
    payload.width, payload.planes = 0, payload.planes[1:]


@attack(FormatError, on="gap")
def gaps_of_seven_bytes_of_which_the_upper_are_zero(v: Version) -> None:
    payload = body(v)
    assert payload.width == 1
    zeros = [Plane(bytes(payload.count))] * 6
    payload.width, payload.planes = 7, [payload.planes[0], *zeros, *payload.planes[1:]]


@attack(FormatError, on="gap")
def a_gap_behind_the_tile(v: Version) -> None:
    payload = body(v)
    far = bytes(payload.count - 1) + b"\x08"
    payload.width = 2
    payload.planes.insert(1, Plane(far))


@attack(FormatError, on="big")
def gaps_of_2_to_the_48_that_wrap_around_to_where_they_began(v: Version) -> None:
    """2^16 times 2^48 positions on is where it began."""
    index = part_of(v).index
    index.codecs[row(v, "main")] = 1
    planes = [Plane(b"\xff" * (1 << 16), packed=True)] * 6 + [Plane(bytes(1 << 16), packed=True)] * 2
    part_of(v).bodies[0][row(v, "main")] = Gap(1 << 16, 6, planes)


@attack(VerificationError, on="gap")
def a_gap_payload_with_another_value(v: Version) -> None:
    plane = body(v).planes[-1]
    plane.content, plane.packed = bytes([plane.content[0] ^ 1]) + plane.content[1:], False


@attack(FormatError, on="dense")
def a_dense_payload_with_a_weight_too_many(v: Version) -> None:
    for plane in body(v).planes:
        plane.content += b"\x00"


@attack(VerificationError, on="dense")
def a_dense_payload_with_another_weight(v: Version) -> None:
    plane = body(v).planes[0]
    plane.content, plane.packed = bytes([plane.content[0] ^ 1]) + plane.content[1:], False


@attack(FormatError, on="anchor")
def a_dense_payload_with_bytes_for_a_tensor_without_weights(v: Version) -> None:
    part = part_of(v)
    nothing = forge.TILES["empty"], 0, bytes(16), b"\x00"
    part.place(sorted([*part.payloads(), nothing], key=lambda p: p[0]))


def as_raw(v: Version, content: bytes) -> None:
    """Have the tensor `main` of an anchor written as `raw`, with this content."""
    part, at = part_of(v), row(v, "main")
    payloads = part.payloads()
    tile, _, total, _ = payloads[at]
    part.place([*payloads[:at], (tile, 6, total, content), *payloads[at + 1 :]])


def main_bytes() -> bytes:
    return forge.sample("anchor").after["main"].tobytes()


@attack(VerificationError, on="anchor")
def a_raw_payload_with_another_weight(v: Version) -> None:
    content = main_bytes()
    as_raw(v, bytes([content[0] ^ 1]) + content[1:])


@attack(FormatError, on="anchor")
def an_anchor_with_a_payload_that_needs_old_weights(v: Version) -> None:
    part, at = part_of(v), row(v, "main")
    part.index.codecs[at] = 1


ATTACKS += [
    Attack(
        FormatError,
        "a gap payload of no changes",
        lambda v: put(part_of(v).bodies[0], {row(v, "main"): Gap(0, 1, [Plane(b"")] * 3)}),
        on="gap",
    ),
    Attack(LimitError, "a gap payload of more changes than weights", lambda v: put(body(v), count=2049), on="gap"),
    Attack(LimitError, "a gap payload of 2 to the 40 changes", lambda v: put(body(v), count=1 << 40), on="gap"),
    Attack(FormatError, "a gap payload that lacks a plane", lambda v: body(v).planes.pop(), on="gap"),
    Attack(
        FormatError,
        "a gap payload with a plane too many",
        lambda v: body(v).planes.append(Plane(bytes(body(v).count))),
        on="gap",
    ),
    Attack(FormatError, "a dense payload that lacks a plane", lambda v: body(v).planes.pop(), on="dense"),
    Attack(
        FormatError,
        "a dense payload for a tensor of another size",
        lambda v: put(part_of(v).bodies[0], {row(v, "main"): body(v, "half")}),
        on="dense",
    ),
    Attack(RIGHT, "a raw payload in the place of a dense one", lambda v: as_raw(v, main_bytes()), on="anchor"),
    Attack(
        FormatError, "a raw payload with a weight too many", lambda v: as_raw(v, main_bytes() + bytes(2)), on="anchor"
    ),
    Attack(FormatError, "a raw payload cut inside a weight", lambda v: as_raw(v, main_bytes()[:-1]), on="anchor"),
]


# -- several parts -------------------------------------------------------------------------------------------------


@attack(FormatError)
def the_same_part_twice(v: Version) -> None:
    v.parts *= 2


@attack(FormatError, on="big")
def the_same_half_megabyte_two_hundred_times(v: Version) -> None:
    noise = np.random.default_rng(0).bytes(1 << 18)
    v.parts = [part_of(v).place([(0, 0, bytes(16), Dense([Plane(noise)] * 2))]).write()] * 200


@attack(FormatError)
def a_tile_in_two_parts(v: Version) -> None:
    part = part_of(v)
    other = v.copy().parts[0]
    assert isinstance(other, Part)
    v.parts.append(other.place(part.payloads()[3:4]))


@attack(FormatError, on="big")
def two_hundred_parts_that_each_change_every_weight(v: Version) -> None:
    everything = Dense([Plane(bytes(1 << 18), packed=True)] * 2)
    empty = forge.Index([], [], [], [], [], [])
    v.parts = [
        Part(part_of(v).layout, dataclasses.replace(empty), []).place([(0, 0, i.to_bytes(16, "little"), everything)])
        for i in range(200)
    ]


ATTACKS += [Attack(VerificationError, "one of two parts left out", lambda v: v.parts.pop(), on="mixed")]


# -- the manifest --------------------------------------------------------------------------------------------------


@attack(ChecksumError)
def a_manifest_with_one_other_bit(v: Version) -> dict[str, bytes]:
    data = bytearray(v.objects()[v.key])
    data[30] ^= 1
    return with_manifest(v, bytes(data))


@attack(FormatError)
def a_manifest_with_an_extension_cut_short(v: Version) -> None:
    v.manifest["extensions"] = b"\x01\x01\x05four"  # one, of tag 1 and 5 bytes


@attack(FormatError)
def a_manifest_with_a_field_less(v: Version) -> None:
    del v.manifest["files"]


@attack(LimitError)
def a_manifest_of_too_many_parts(v: Version) -> None:
    v.reseal, v.manifest["parts"] = False, v.manifest["parts"] * 65_537


@attack(FormatError)
def a_manifest_that_claims_more_parts_than_it_has(v: Version) -> None:
    v.reseal, v.manifest["parts"] = False, wire.number(65_536)


@attack(FormatError)
def a_manifest_that_names_a_part_twice(v: Version) -> None:
    v.reseal, v.manifest["parts"] = False, v.manifest["parts"] * 2


@attack(UnsupportedError)
def a_manifest_with_a_part_of_another_form(v: Version) -> None:
    v.reseal, v.manifest["parts"] = False, [v.manifest["parts"][0] | {"form": 2}]


@attack(FormatError)
def a_manifest_that_ends_inside_the_id_of_a_part(v: Version) -> None:
    v.reseal, v.manifest["parts"], v.manifest["files"] = False, b"\x01\x00" + b"\xaa" * 31, b""


ATTACKS += [
    Attack(FormatError, "an empty manifest", lambda v: with_manifest(v, b"")),
    Attack(FormatError, "a manifest cut short", lambda v: with_manifest(v, v.objects()[v.key][:-20])),
    Attack(FormatError, "a manifest cut inside its first bytes", lambda v: with_manifest(v, v.objects()[v.key][:10])),
    Attack(UnsupportedError, "two manifests", lambda v: with_manifest(v, v.objects()[v.key] * 2)),
    Attack(FormatError, "a manifest with a byte behind it", lambda v: with_manifest(v, v.objects()[v.key] + b"\n")),
    Attack(
        ChecksumError,
        "a manifest whose checksum is zero",
        lambda v: with_manifest(v, v.objects()[v.key][: -records.CHECK_BYTES] + bytes(records.CHECK_BYTES)),
    ),
    Attack(FormatError, "a manifest that begins with other bytes", lambda v: put(v.manifest, {"magic": b"\x89PX"})),
    Attack(
        UnsupportedError,
        "a manifest of the first draft",
        lambda v: with_manifest(v, b'{"format":"pulse-manifest/1-draft"}\n'),
    ),
    Attack(UnsupportedError, "a manifest of an unknown format", lambda v: put(v.manifest, {"format": 2})),
    Attack(UnsupportedError, "a manifest of the second draft", lambda v: put(v.manifest, {"format": 0x82})),
    Attack(UnsupportedError, "a manifest with flags that are not known", lambda v: put(v.manifest, {"flags": 0x0B})),
    Attack(
        UnsupportedError,
        "a manifest with an extension that a reader must know",
        lambda v: put(v.manifest, {"extensions": [(1, b"may be ignored"), (2, b"may not")]}),
    ),
    Attack(
        RIGHT,
        "a manifest with extensions that a reader may ignore",
        lambda v: put(v.manifest, {"extensions": [(1, b""), (77, bytes(range(256))), (65_535, bytes(3_840))]}),
    ),
    Attack(
        FormatError, "a manifest with a flag for extensions and none", lambda v: put(v.manifest, {"extensions": []})
    ),
    Attack(
        FormatError,
        "a manifest with the same extension twice",
        lambda v: put(v.manifest, {"extensions": [(3, b"one"), (3, b"two")]}),
    ),
    Attack(
        FormatError,
        "a manifest with extensions out of order",
        lambda v: put(v.manifest, {"extensions": [(5, b""), (3, b"")]}),
    ),
    Attack(
        LimitError,
        "a manifest with extensions of more bytes than allowed",
        lambda v: put(v.manifest, {"extensions": [(1, bytes(4_000)), (3, bytes(97))]}),
    ),
    Attack(
        LimitError,
        "a manifest with more extensions than allowed",
        lambda v: put(v.manifest, {"extensions": [(2 * i + 1, b"") for i in range(17)]}),
    ),
    Attack(
        LimitError,
        "a manifest with an extension of a tag beyond the limit",
        lambda v: put(v.manifest, {"extensions": [(65_537, b"")]}),
    ),
    Attack(LimitError, "a manifest that denies its history and has it", lambda v: put(v.manifest, {"flags": 1})),
    Attack(
        LimitError,
        "a manifest that claims a base and has none",
        lambda v: v.manifest.update({"flags": 3, "base": None}),
    ),
    Attack(
        FormatError, "a manifest with a byte that no field is for", lambda v: put(v.manifest, {"files": b"\x00\x00"})
    ),
    Attack(ChecksumError, "a manifest that claims to end earlier", lambda v: put(v.manifest, {"length": 40})),
    Attack(FormatError, "a manifest that claims to end later", lambda v: put(v.manifest, {"length": 1 << 20})),
    Attack(
        LimitError,
        "a manifest that claims a length beyond its limit",
        lambda v: put(v.manifest, {"length": (1 << 24) + 1}),
    ),
    Attack(LimitError, "a manifest with a negative step", lambda v: put(v.manifest, {"step": -1})),
    Attack(
        LimitError, "a manifest with a number beyond 2 to the 53", lambda v: put(v.manifest, {"step": (1 << 53) + 1})
    ),
    Attack(
        FormatError, "a manifest with a number longer than needed", lambda v: put(v.manifest, {"step": b"\x80\x00"})
    ),
    Attack(
        FormatError,
        "a manifest with a number of a million bytes",
        lambda v: put(v.manifest, {"step": b"\xff" * 1_000_000 + b"\x01"}),
    ),
    Attack(FormatError, "a manifest that ends inside a number", lambda v: put(v.manifest, {"files": b"\x80"})),
    Attack(
        LimitError, "a manifest of more than 16 mib", lambda v: with_manifest(v, v.objects()[v.key] + bytes(1 << 24))
    ),
    Attack(FormatError, "a manifest without parts", lambda v: put(v, parts=[])),
]


# -- parts that stand in their record ------------------------------------------------------------------------------


def sections_of(v: Version) -> tuple[bytes, bytes]:
    index, payloads = part_of(v).sections()
    return index, payloads


def with_sections(v: Version, index: bytes, payloads: bytes) -> dict[str, bytes]:
    return with_manifest(v, records.write(v.manifest | {"parts": [{"index": index, "payloads": payloads}]}))


@attack(FormatError, on="inline")
def a_part_in_a_record_with_a_byte_behind_its_payloads(v: Version) -> dict[str, bytes]:
    index, payloads = sections_of(v)
    return with_sections(v, index, payloads + b"\x00")


@attack(FormatError, on="inline")
def a_part_in_a_record_with_a_byte_behind_its_index(v: Version) -> dict[str, bytes]:
    index, payloads = sections_of(v)
    return with_sections(v, index + b"\x00", payloads)


@attack(LimitError, on="inline")
def parts_in_a_record_that_are_beyond_the_limit_together(v: Version) -> None:
    v.reseal = False
    v.manifest["parts"] = [{"index": bytes([n]), "payloads": bytes(2047)} for n in range(3)]


@attack(FormatError, on="inline")
def as_many_empty_parts_in_a_record_as_it_can_name(v: Version) -> None:
    v.reseal, v.manifest["parts"] = False, wire.number(65_536) + b"\x01\x00\x00" * 65_536


@attack(FormatError, on="inline")
def a_tile_in_a_record_and_in_a_part_beside_it(v: Version) -> dict[str, bytes]:
    other = v.copy().parts[0]
    assert isinstance(other, Part)
    data = other.place(part_of(v).payloads()[3:4]).write()
    index, payloads = sections_of(v)
    id_ = forge.part_id(data)
    both = [{"index": index, "payloads": payloads}, {"id": id_, "size": len(data)}]
    return with_manifest(v, records.write(v.manifest | {"parts": both})) | {f"parts/{id_}": data}


ATTACKS += [
    Attack(
        FormatError,
        "a part in a record without an index",
        lambda v: with_sections(v, b"", sections_of(v)[1]),
        on="inline",
    ),
    Attack(
        FormatError,
        "a part in a record without payloads",
        lambda v: with_sections(v, sections_of(v)[0], b""),
        on="inline",
    ),
    Attack(
        LimitError,
        "a part in a record with an index beyond the limit",
        lambda v: with_sections(v, bytes(4097), b""),
        on="inline",
    ),
    Attack(
        LimitError,
        "a part in a record beyond the limit",
        lambda v: with_sections(v, sections_of(v)[0], bytes(4096)),
        on="inline",
    ),
    Attack(FormatError, "a part in a record twice", lambda v: put(v, parts=[*v.parts, *v.copy().parts]), on="inline"),
    Attack(
        VerificationError,
        "a part in a record with a tile sum that is not the weights",
        lambda v: put(part_of(v).index.sums, {3: bytes(16)}),
        on="inline",
    ),
    Attack(RIGHT, "the same part as an object", lambda v: put(v, inline=False), on="inline"),
    Attack(RIGHT, "the same part in the record", lambda v: put(v, inline=True)),
]


# -- what the record says ------------------------------------------------------------------------------------------


@attack(LimitError)
def a_part_larger_than_a_terabyte(v: Version) -> None:
    v.reseal = False
    v.manifest["parts"][0]["size"] = (1 << 40) + 1


@attack(ChainError)
def another_version_than_was_asked_for(v: Version) -> None:
    v.manifest["version"] = 4
    v.manifest["base"]["version"] = 3


@attack(MissingLinkError)
def a_root_that_no_anchor_leads_to(v: Version) -> None:
    v.parts = []
    v.manifest |= {"base": None, "epoch": 1, "index": 0, "history": None}


@attack(NothingPublishedError, on="anchor")
def a_run_that_begins_with_a_patch(v: Version) -> dict[str, bytes]:
    base = {"digest": v.manifest["digest"], "version": 0}
    first = v.manifest | {"kind": "version", "version": 1, "index": 1, "base": base}
    return {"manifests/0000000000000001": records.write(first)}


ATTACKS += [
    Attack(FormatError, "a base that is the version itself", lambda v: put(v.manifest["base"], {"version": 3})),
    Attack(
        LimitError, "a base that is later than the version", lambda v: put(v.manifest["base"], {"version": 1 << 53})
    ),
    Attack(FormatError, "a base that is not the version held", lambda v: put(v.manifest["base"], {"version": 1})),
    Attack(
        MissingLinkError,
        "a base of another digest",
        lambda v: put(v.manifest["base"], {"digest": hashlib.sha256(b"another state").hexdigest()}),
    ),
    Attack(ChainError, "a version of another run", lambda v: put(v.manifest, {"run": "f" * 32})),
    Attack(ChainError, "a patch that leaves one of its epoch out", lambda v: put(v.manifest, {"index": 4})),
    Attack(ChainError, "a patch of an epoch that has ended", lambda v: v.manifest.update({"epoch": 0, "index": 1})),
    Attack(LimitError, "a patch 128 of its epoch", lambda v: put(v.manifest, {"index": 128})),
    Attack(
        ChainError,
        "a patch that begins an epoch in the middle of one",
        lambda v: v.manifest.update({"epoch": 1, "index": 1}),
    ),
    Attack(ChainError, "a patch of another epoch", lambda v: put(v.manifest, {"epoch": 1})),
    Attack(FormatError, "a patch without a base", lambda v: put(v.manifest, {"base": None})),
    Attack(FormatError, "a patch of index 0", lambda v: put(v.manifest, {"index": 0})),
    Attack(FormatError, "a root with parts", lambda v: v.manifest.update({"base": None, "index": 0, "history": None})),
    Attack(
        VerificationError,
        "a digest that is not the state",
        lambda v: put(v.manifest, {"digest": hashlib.sha256(b"another state").hexdigest()}),
    ),
    Attack(
        VerificationError,
        "a history digest that is not the history",
        lambda v: put(v.manifest, {"history": hashlib.sha256(b"another history").hexdigest()}),
    ),
    Attack(VerificationError, "a history that is denied", lambda v: put(v.manifest, {"history": None})),
    Attack(
        VerificationError, "a history where none is kept", lambda v: put(v.manifest, {"history": "0" * 64}), on="gap"
    ),
]


# -- files published with the weights ------------------------------------------------------------------------------


def a_file(**fields: object) -> dict[str, object]:
    return {"id": "0" * 64, "name": "config.json", "size": 1, **fields}


ATTACKS += [
    Attack(
        FormatError,
        "a file name that leaves its folder",
        lambda v: put(v.manifest, {"files": [a_file(name="../../.ssh/authorized_keys")]}),
    ),
    Attack(
        FormatError,
        "a file name that begins at the root",
        lambda v: put(v.manifest, {"files": [a_file(name="/etc/passwd")]}),
    ),
    Attack(
        FormatError,
        "a file name with a backslash",
        lambda v: put(v.manifest, {"files": [a_file(name="..\\config.json")]}),
    ),
    Attack(
        FormatError, "a file name that is the folder above", lambda v: put(v.manifest, {"files": [a_file(name="..")]})
    ),
    Attack(FormatError, "a file name that hides", lambda v: put(v.manifest, {"files": [a_file(name=".bashrc")]})),
    Attack(
        FormatError, "a file name that is an option", lambda v: put(v.manifest, {"files": [a_file(name="--output=x")]})
    ),
    Attack(
        FormatError,
        "a file name with a zero byte",
        lambda v: put(v.manifest, {"files": [a_file(name="config.json\x00.txt")]}),
    ),
    Attack(
        FormatError,
        "a file name with a newline behind it",
        lambda v: put(v.manifest, {"files": [a_file(name="config.json\n")]}),
    ),
    Attack(FormatError, "a file without a name", lambda v: put(v.manifest, {"files": [a_file(name="")]})),
    Attack(FormatError, "two files of one name", lambda v: put(v.manifest, {"files": [a_file(), a_file(id="1" * 64)]})),
    Attack(
        FormatError, "a file id that leaves the store", lambda v: put(v.manifest, {"files": [a_file(id="../head")]})
    ),
    Attack(LimitError, "a file of a terabyte", lambda v: put(v.manifest, {"files": [a_file(size=1 << 40)]})),
    Attack(
        LimitError,
        "more files than allowed",
        lambda v: put(v.manifest, {"files": [a_file(name=f"f{n}") for n in range(257)]}),
    ),
]


# -- records in the wrong place ------------------------------------------------------------------------------------


@attack(ChainError)
def an_older_manifest_under_the_key(v: Version) -> dict[str, bytes]:
    older = forge.sample("history").published["manifests/0000000000000002"]
    return with_manifest(v, older)


@attack(FormatError, on="anchor")
def a_version_in_the_place_of_an_anchor(v: Version) -> None:
    v.parts, v.manifest["kind"] = [], "version"


@attack(VerificationError, on="anchor")
def an_anchor_and_a_version_that_agree_on_a_digest_that_is_not_the_state(v: Version) -> None:
    for table in (v.manifest, *v.beside.values()):
        table["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(FormatError, on="anchor")
def an_anchor_of_no_tiles(v: Version) -> None:
    part_of(v).index.packed = False  # a frame would be longer than what it holds
    part_of(v).place([])


@attack(FormatError, on="anchor")
def an_anchor_with_a_tile_in_two_parts(v: Version) -> None:
    other = v.copy().parts[0]
    assert isinstance(other, Part)
    other.index.packed = False
    v.parts.append(other.place(part_of(v).payloads()[3:4]))


@attack(VerificationError, on="anchor")
def an_anchor_with_a_tile_sum_that_is_not_the_weights(v: Version) -> None:
    index = part_of(v).index
    index.sums[3] = bytes(16)


@attack(VerificationError, on="anchor")
def an_anchor_with_two_tiles_exchanged(v: Version) -> None:
    """Two halves of a matrix have the same size, and their digests know where they belong."""
    payloads = part_of(v).payloads()
    at = forge.TILES["embed"]
    (i, j) = (n for n, (tile, *_) in enumerate(payloads) if tile in (at, at + 2))
    (a, b), (c, d) = payloads[i][:2], payloads[j][:2]
    payloads[i], payloads[j] = (a, b, *payloads[j][2:]), (c, d, *payloads[i][2:])
    part_of(v).place(payloads)


@attack(ChecksumError, on="anchor")
def an_anchor_part_with_a_flipped_bit(v: Version) -> None:
    data = bytearray(part_of(v).write())
    data[-1] ^= 1
    v.parts = [bytes(data)]


ATTACKS += [
    Attack(UnsupportedError, "a record of an unknown kind", lambda v: put(v.manifest, {"kind": 3})),
    Attack(
        FormatError,
        "an anchor in the place of a version",
        lambda v: v.manifest.update({"kind": "anchor", "base": None, "history": None}),
    ),
    Attack(
        FormatError,
        "a squash in the place of a version",
        lambda v: v.manifest.update({"kind": "squash", "history": None}),
    ),
    Attack(LimitError, "an anchor of a negative epoch named", lambda v: put(v.manifest, {"anchor": -2})),
    Attack(RIGHT, "an anchor named that is far in the future", lambda v: put(v.manifest, {"anchor": 1 << 53})),
    Attack(
        RIGHT,
        "an anchor nobody needs that is rubbish",
        lambda v: v.objects() | {"anchors/0000000000000000": b"rubbish"},
    ),
    Attack(
        FormatError,
        "a squash in the place of an anchor",
        lambda v: v.manifest.update({"kind": "squash", "version": 1, "base": {"digest": "0" * 64, "version": 0}}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an anchor with a base",
        lambda v: v.manifest.update({"version": 1, "base": {"digest": "0" * 64, "version": 0}}),
        on="anchor",
    ),
    Attack(FormatError, "an anchor with a history", lambda v: put(v.manifest, {"history": "0" * 64}), on="anchor"),
    Attack(FormatError, "an anchor without parts", lambda v: put(v, parts=[]), on="anchor"),
    Attack(FormatError, "an anchor that is rubbish", lambda v: with_manifest(v, b"rubbish\n"), on="anchor"),
    Attack(
        LimitError,
        "an anchor record of more than 16 mib",
        lambda v: with_manifest(v, v.objects()[v.key] + bytes(1 << 24)),
        on="anchor",
    ),
    Attack(NothingPublishedError, "an anchor of another epoch", lambda v: put(v.manifest, {"epoch": 5}), on="anchor"),
    Attack(
        NothingPublishedError,
        "an anchor in the place of another",
        lambda v: put(v, key="anchors/0000000000000001"),
        on="anchor",
    ),
    Attack(
        NothingPublishedError, "an anchor of another run", lambda v: put(v.manifest, {"run": "f" * 32}), on="anchor"
    ),
    Attack(
        NothingPublishedError, "an anchor of a later version", lambda v: put(v.manifest, {"version": 7}), on="anchor"
    ),
    Attack(
        NothingPublishedError,
        "an anchor of another digest than its version",
        lambda v: put(v.manifest, {"digest": hashlib.sha256(b"another state").hexdigest()}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an anchor that leaves a tile out",
        lambda v: part_of(v).place(part_of(v).payloads()[1:]),
        on="anchor",
    ),
    Attack(
        NotFoundError,
        "an anchor part that is not there",
        lambda v: {key: data for key, data in v.objects().items() if not key.startswith("parts/")},
        on="anchor",
    ),
]


# -- squashes ------------------------------------------------------------------------------------------------------


@attack(VerificationError, on="squash")
def a_squash_and_a_version_that_agree_on_a_digest_that_is_not_the_state(v: Version) -> None:
    for table in (v.manifest, *v.beside.values()):
        table["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(FormatError, on="squash")
def a_version_in_the_place_of_a_squash(v: Version) -> None:
    v.signer, v.manifest["kind"] = forge.KEY, "version"


@attack(FormatError, on="squash")
def an_anchor_in_the_place_of_a_squash(v: Version) -> None:
    v.signer = forge.KEY
    v.manifest |= {"kind": "anchor", "base": None}


@attack(MissingLinkError, on="squash")
def a_squash_of_another_run(v: Version) -> None:
    v.signer, v.manifest["run"] = forge.KEY, "f" * 32


@attack(VerificationError, on="squash")
def a_squash_that_leaves_a_tile_out(v: Version) -> None:
    part = part_of(v)
    part.place([payload for payload in part.payloads() if payload[0] != forge.TILES["ints"]])


@attack(FormatError, on="squash")
def a_squash_with_a_tile_in_two_parts(v: Version) -> None:
    other = v.copy().parts[0]
    assert isinstance(other, Part)
    v.parts.append(other.place(part_of(v).payloads()[3:4]))


ATTACKS += [
    Attack(
        MissingLinkError, "a squash of another base", lambda v: put(v.manifest["base"], {"version": 1}), on="squash"
    ),
    Attack(
        MissingLinkError,
        "a squash of a base of another digest",
        lambda v: put(v.manifest["base"], {"digest": hashlib.sha256(b"another state").hexdigest()}),
        on="squash",
    ),
    Attack(
        MissingLinkError,
        "a squash that says it leads further",
        lambda v: v.manifest.update({"version": 64, "epoch": 1}),
        on="squash",
    ),
    Attack(
        MissingLinkError,
        "a squash that leads to the middle of an epoch",
        lambda v: v.manifest.update({"version": 31, "index": 31}),
        on="squash",
    ),
    Attack(
        MissingLinkError, "a squash that leads back", lambda v: v.manifest.update({"epoch": 0, "index": 0}), on="squash"
    ),
    Attack(
        MissingLinkError,
        "a squash in the place of a larger one",
        lambda v: put(v, key="squashes/01/0000000000000000"),
        on="squash",
    ),
    Attack(
        MissingLinkError,
        "a squash in the place of a later one",
        lambda v: put(v, key="squashes/00/0000000000000001"),
        on="squash",
    ),
    Attack(
        MissingLinkError,
        "a squash of another digest than its version",
        lambda v: put(v.manifest, {"digest": hashlib.sha256(b"another state").hexdigest()}),
        on="squash",
    ),
    Attack(FormatError, "a squash with a history", lambda v: put(v.manifest, {"history": "0" * 64}), on="squash"),
    Attack(FormatError, "a squash without a base", lambda v: put(v.manifest, {"base": None}), on="squash"),
    Attack(FormatError, "a squash without parts", lambda v: put(v, parts=[]), on="squash"),
    Attack(
        VerificationError,
        "a squash with a tile sum that is not the weights",
        lambda v: put(part_of(v).index.sums, {3: bytes(16)}),
        on="squash",
    ),
]


# -- signatures ----------------------------------------------------------------------------------------------------


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_by_a_stranger(v: Version) -> None:
    said = forge.STRANGER.delegate(forge.RUN, forge.HELPER.public)
    v.signer = SigningKey(forge.HELPER.secret, said)


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_by_a_stranger_in_the_runs_name(v: Version) -> None:
    said = forge.STRANGER.delegate(forge.RUN, forge.HELPER.public)
    v.signer = SigningKey(forge.HELPER.secret, dataclasses.replace(said, by=forge.KEY.public))


@attack(SignatureError, on="squash")
def a_record_changed_after_it_was_signed(v: Version) -> dict[str, bytes]:
    block = block_of(v)
    v.manifest["step"] = 1
    return with_manifest(v, record_of(v) + block)


@attack(ChecksumError, on="squash")
def a_record_damaged_after_it_was_signed(v: Version) -> dict[str, bytes]:
    data = bytearray(v.objects()[v.key])
    data[40] ^= 1
    return with_manifest(v, bytes(data))


@attack(SignatureError, on="squash")
def a_signature_of_another_record(v: Version) -> dict[str, bytes]:
    other = v.copy()
    other.manifest["step"] = 1
    return with_manifest(v, record_of(v) + block_of(other))


ATTACKS += [
    Attack(SignatureError, "a squash without a signature", lambda v: put(v, signer=None), on="squash"),
    Attack(SignatureError, "a squash signed by a stranger", lambda v: put(v, signer=forge.STRANGER), on="squash"),
    Attack(
        SignatureError,
        "a squash by a delegate without the delegation",
        lambda v: put(v, signer=forge.HELPER),
        on="squash",
    ),
    Attack(
        SignatureError,
        "a squash with a delegation for another run",
        lambda v: put(v, signer=SigningKey(forge.HELPER.secret, forge.KEY.delegate("f" * 32, forge.HELPER.public))),
        on="squash",
    ),
    Attack(
        SignatureError,
        "a squash with a delegation for another key",
        lambda v: put(v, signer=SigningKey(forge.STRANGER.secret, forge.DELEGATE.delegation)),
        on="squash",
    ),
    Attack(
        SignatureError,
        "a squash of another run by a delegate",
        lambda v: put(v.manifest, {"run": "f" * 32}),
        on="squash",
    ),
    Attack(SignatureError, "a version by a delegate", lambda v: put(v, trusted=forge.DELEGATE), on="squash"),
    Attack(
        SignatureError,
        "an anchor by a delegate",
        lambda v: v.manifest.update({"kind": "anchor", "base": None}),
        on="squash",
    ),
    Attack(SignatureError, "a version without a signature", lambda v: put(v, trusted=None), on="squash"),
    Attack(SignatureError, "a version signed by a stranger", lambda v: put(v, trusted=forge.STRANGER), on="squash"),
    Attack(
        UnsupportedError,
        "a signature with another behind it",
        lambda v: with_manifest(v, v.objects()[v.key] + block_of(v)),
        on="squash",
    ),
    Attack(
        UnsupportedError,
        "a signature with a record behind it",
        lambda v: with_manifest(v, v.objects()[v.key] + record_of(v)),
        on="squash",
    ),
    Attack(FormatError, "a signature cut short", lambda v: with_manifest(v, v.objects()[v.key][:-1]), on="squash"),
    Attack(
        SignatureError,
        "a signature without its delegation",
        lambda v: with_manifest(v, v.objects()[v.key][:-96]),
        on="squash",
    ),
    Attack(SignatureError, "a signature of zeros", lambda v: with_manifest(v, record_of(v) + bytes(192)), on="squash"),
    Attack(
        FormatError,
        "a signature that is rubbish",
        lambda v: with_manifest(v, record_of(v) + b"signed, honestly\n"),
        on="squash",
    ),
    Attack(
        UnsupportedError,
        "a signature of a megabyte",
        lambda v: with_manifest(v, record_of(v) + bytes(1 << 20)),
        on="squash",
    ),
    Attack(
        FormatError,
        "a signature that is rubbish where nobody asks",
        lambda v: with_manifest(v, record_of(v) + b"signed, honestly\n"),
    ),
    Attack(RIGHT, "a signature by a stranger where nobody asks", lambda v: put(v, signer=forge.STRANGER)),
]


# -- hints ---------------------------------------------------------------------------------------------------------


def with_head(v: Version, head: bytes) -> dict[str, bytes]:
    return v.objects() | {"head": head}


def with_start(v: Version, name: bytes) -> dict[str, bytes]:
    """Weights of the base are said to be this version."""
    return v.objects() | {f"starts/{v.manifest['base']['digest']}": name}


ATTACKS += [
    Attack(RIGHT, "a head that is empty", lambda v: with_head(v, b"")),
    Attack(RIGHT, "a head that is not a number", lambda v: with_head(v, b"../../3")),
    Attack(RIGHT, "a head that is negative", lambda v: with_head(v, b"-1")),
    Attack(RIGHT, "a head in digits of another script", lambda v: with_head(v, "\uff13".encode())),
    Attack(RIGHT, "a head beyond 2 to the 53", lambda v: with_head(v, b"9" * 32)),
    Attack(RIGHT, "a head of a hundred megabytes", lambda v: with_head(v, b"9" * 100_000_000)),
    Attack(RIGHT, "a head that names a version that is not there", lambda v: with_head(v, b"4000")),
    Attack(RIGHT, "a head that lags", lambda v: with_head(v, b"0")),
    Attack(RIGHT, "a head that lags for one who holds nothing", lambda v: with_head(v, b"1"), fresh=True),
    Attack(
        FormatError,
        "a head that names rubbish",
        lambda v: with_head(v, b"9") | {"manifests/0000000000000009": b"rubbish\n"},
    ),
    Attack(RIGHT, "a start that names another version", lambda v: with_start(v, b"1"), fresh=True),
    Attack(RIGHT, "a start in the middle of an epoch with a history", lambda v: with_start(v, b"2"), fresh=True),
    Attack(RIGHT, "a start that names the version after", lambda v: with_start(v, b"3"), fresh=True),
    Attack(RIGHT, "a start that names a version that is not there", lambda v: with_start(v, b"77"), fresh=True),
    Attack(RIGHT, "a start that is not a number", lambda v: with_start(v, b"two"), fresh=True),
    Attack(RIGHT, "a start beyond 2 to the 53", lambda v: with_start(v, b"9" * 32), fresh=True),
    Attack(
        RIGHT,
        "a start that names rubbish",
        lambda v: with_start(v, b"77") | {"manifests/0000000000000077": b"rubbish\n"},
        fresh=True,
    ),
]


# -- the layout ----------------------------------------------------------------------------------------------------


def tensors(v: Version) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(forge.sample("anchor").layout.data)
    return table


def entry(table: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in table["tensors"] if t["name"] == name)


@attack(ChecksumError, on="anchor")
def another_layout_under_the_hash(v: Version) -> None:
    table = tensors(v)
    del entry(table, "embed")["rows"]
    v.layout = forge.json_bytes(table)


@attack(BaseMismatchError)
def a_patch_with_another_layout_of_the_same_tensors(v: Version) -> None:
    table = tensors(v)
    del entry(table, "embed")["rows"]
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_layout_with_a_name_twice(v: Version) -> None:
    table = tensors(v)
    table["tensors"].insert(1, table["tensors"][0])
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_layout_out_of_order(v: Version) -> None:
    table = tensors(v)
    table["tensors"].reverse()
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_layout_that_says_a_key_twice(v: Version) -> None:
    data = forge.sample("anchor").layout.data
    forge.new_layout(v, data.replace(b'{"dtype":"U8"', b'{"dtype":"I8","dtype":"U8"'))


@attack(FormatError, on="anchor")
def a_layout_with_infinity_for_a_shape(v: Version) -> None:
    table = tensors(v)
    entry(table, "bytes")["shape"] = [float("inf")]
    forge.new_layout(v, table)


@attack(UnsupportedError, on="anchor")
def a_tensor_with_one_more_field(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["scales"] = "doubles"
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_tensor_without_a_shape(v: Version) -> None:
    table = tensors(v)
    del entry(table, "main")["shape"]
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_name_that_is_a_number(v: Version) -> None:
    table = tensors(v)
    entry(table, "bytes")["name"] = 5
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_dtype_that_is_a_list(v: Version) -> None:
    table = tensors(v)
    entry(table, "bytes")["dtype"] = ["U8"]
    forge.new_layout(v, table)


@attack(UnsupportedError, on="anchor")
def an_unknown_dtype(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["dtype"] = "F4"
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_negative_shape(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["shape"] = [-64, -32]
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def a_tensor_of_2_to_the_92_weights(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["shape"] = [1 << 46, 1 << 46]
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def a_tensor_of_no_rows_and_2_to_the_92_columns(v: Version) -> None:
    table = tensors(v)
    entry(table, "empty")["shape"] = [0, 1 << 46, 1 << 46]
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def a_tensor_of_nine_dimensions(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["shape"] = [1] * 9
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def a_tensor_without_a_name(v: Version) -> None:
    table = tensors(v)
    entry(table, "bytes")["name"] = ""
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def a_tensor_with_a_name_of_a_megabyte(v: Version) -> None:
    table = tensors(v)
    entry(table, "wide")["name"] = "w" * (1 << 20)
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_name_that_is_half_a_character(v: Version) -> None:
    table = tensors(v)
    entry(table, "wide")["name"] = "\ud800"
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def tiles_that_overlap(v: Version) -> None:
    table = tensors(v)
    entry(table, "embed")["rows"] = [24, 12]
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def tiles_that_reach_beyond_their_tensor(v: Version) -> None:
    table = tensors(v)
    entry(table, "embed")["columns"] = [33]
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_tile_without_rows(v: Version) -> None:
    table = tensors(v)
    entry(table, "embed")["rows"] = [0]
    forge.new_layout(v, table)


@attack(LimitError, on="anchor")
def more_tiles_than_allowed(v: Version) -> None:
    table = tensors(v)
    cuts = list(range(1, 1 << 12))
    entry(table, "main").update(shape=[1 << 12, 1 << 12], rows=cuts, columns=cuts)
    forge.new_layout(v, table)


@attack(LimitError, on="big.anchor")
def a_tile_for_each_weight(v: Version) -> None:
    table = {"columns": list(range(1, 16)), "dtype": "BF16", "name": "main", "rows": list(range(1, 1 << 14))}
    tensors = [table | {"shape": [1 << 14, 16]}]
    forge.new_layout(v, {"bundles": [], "format": layouts.FORMAT, "tensors": tensors, "ties": {}})


@attack(LimitError, on="big.anchor")
def a_grid_of_the_tiles_that_a_hundred_other_tensors_do_not_use(v: Version) -> None:
    cuts = list(range(1, 240))  # 57,600 tiles, and 5.8 kB in all
    table: list[dict[str, Any]] = [{"dtype": "U8", "name": f"{i:02x}", "shape": []} for i in range(105)]
    table.append({"columns": cuts, "dtype": "U8", "name": "main", "rows": cuts, "shape": [240, 240]})
    forge.new_layout(v, {"bundles": [], "format": layouts.FORMAT, "tensors": table, "ties": {}})


@attack(StateError, on="anchor")
def a_layout_of_other_tensors(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["shape"] = [32, 64]
    forge.new_layout(v, table)


@attack(StateError, on="anchor", long=True)
def ten_thousand_aliases_of_the_last_of_ten_thousand_tensors(v: Version) -> None:
    names = [f"t{i:05d}" for i in range(10_000)]
    specs = [TensorSpec(name, "BF16", (1,)) for name in names]
    forge.new_layout(v, layouts.make(specs, {f"a{i:05d}": names[-1] for i in range(10_000)}).data)


@attack(FormatError, on="big.anchor")
def a_grid_of_a_row_for_each_tile_and_a_part_for_another_layout(v: Version) -> None:
    rows = layouts.make([TensorSpec("main", "BF16", (1 << 14, 16), tuple(range(4, 1 << 14, 4)))])
    forge.new_layout(v, rows.data)
    part_of(v).layout = bytes(32)


ATTACKS += [
    Attack(NotFoundError, "a layout that is not there", lambda v: v.set_layout("0" * 64), on="anchor"),
    Attack(
        FormatError,
        "a layout cut short",
        lambda v: forge.new_layout(v, forge.sample("anchor").layout.data[:-1]),
        on="anchor",
    ),
    Attack(
        FormatError,
        "a layout with a newline",
        lambda v: forge.new_layout(v, forge.sample("anchor").layout.data + b"\n"),
        on="anchor",
    ),
    Attack(
        FormatError,
        "a layout nested a hundred thousand deep",
        lambda v: forge.new_layout(v, b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        on="anchor",
    ),
    Attack(
        UnsupportedError,
        "a layout whose format is nested as deep as python reads",
        lambda v: forge.new_layout(v, b'{"format":' + b"[" * 400 + b"]" * 400 + b"}"),
        on="anchor",
    ),
    Attack(
        UnsupportedError,
        "a layout of an unknown format",
        lambda v: forge.new_layout(v, tensors(v) | {"format": "pulse-layout/2"}),
        on="anchor",
    ),
    Attack(
        UnsupportedError,
        "a layout of the second draft",
        lambda v: forge.new_layout(v, tensors(v) | {"format": "pulse-layout/1-draft-2"}),
        on="anchor",
    ),
    Attack(
        UnsupportedError,
        "a layout with one more field",
        lambda v: forge.new_layout(v, tensors(v) | {"strides": []}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "a layout without tensors",
        lambda v: forge.new_layout(v, {"bundles": [], "format": layouts.FORMAT, "ties": {}}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "a layout whose tensors are a number",
        lambda v: forge.new_layout(v, tensors(v) | {"tensors": 5}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "a tensor that is a list",
        lambda v: forge.new_layout(v, tensors(v) | {"tensors": [[]]}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an alias of nothing",
        lambda v: forge.new_layout(v, tensors(v) | {"ties": {"head": "nobody"}}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an alias of an alias",
        lambda v: forge.new_layout(v, tensors(v) | {"ties": {"head": "main", "tail": "head"}}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an alias that is a tensor itself",
        lambda v: forge.new_layout(v, tensors(v) | {"ties": {"embed": "main"}}),
        on="anchor",
    ),
    Attack(
        FormatError,
        "an alias of a list",
        lambda v: forge.new_layout(v, tensors(v) | {"ties": {"head": ["main"]}}),
        on="anchor",
    ),
]


# -- what is not one version ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [97, slow(5)])
def test_every_prefix_of_a_file_is_refused(step: int) -> None:
    target = victim("mixed")
    version = target.target.version.copy()
    whole = [part.write() for part in version.parts if isinstance(part, Part)]
    for length in range(0, len(whole[1]), step):
        version.parts = [whole[0], whole[1][:length]]
        assert isinstance(target.feed(version.objects()), FormatError)
    assert target.untouched


# A prime number of bytes or bits apart, so that fields of every kind and every bit of a byte are met.
SOME, MANY = pytest.param(97, id="some"), slow(5, id="many")


@pytest.mark.parametrize("step", [SOME, MANY])
@pytest.mark.parametrize("kind", ["history", "gap"])
def test_a_flipped_bit_anywhere_is_refused(kind: str, step: int) -> None:
    target = victim(kind)
    objects = target.target.version.objects()
    (part,) = (key for key in objects if key.startswith("parts/"))
    for i in {*range(forge.HEADER_BYTES), *range(0, len(objects[part]), step)}:
        data = bytearray(objects[part])
        data[i] ^= 1 << i % 8
        error = target.feed(objects | {part: bytes(data)})
        assert isinstance(error, FormatError)
        assert i < forge.HEADER_BYTES or isinstance(error, ChecksumError | LimitError)
    assert target.untouched


@pytest.mark.parametrize("step", [SOME, MANY])
@pytest.mark.parametrize("kind", ["history", "inline"])
def test_a_flipped_bit_anywhere_in_a_manifest_is_refused(kind: str, step: int) -> None:
    target = victim(kind)
    objects = target.target.version.objects()
    key = target.target.version.key
    for i in range(0, 8 * len(objects[key]), step):
        data = bytearray(objects[key])
        data[i // 8] ^= 1 << i % 8
        assert isinstance(target.feed(objects | {key: bytes(data)}), FormatError)
    assert target.untouched


@pytest.mark.parametrize(
    ("kind", "step"),  # in most bits of an inline part a flip is found only when it is decoded, which takes 10 ms
    [("history", 97), ("inline", 557), slow("history", 5), slow("inline", 29)],
)
def test_a_bit_flipped_under_a_good_checksum_is_refused_or_changes_only_what_no_weight_depends_on(
    kind: str, step: int
) -> None:
    target = victim(kind)
    objects = target.target.version.objects()
    key = target.target.version.key
    good = records.table_of(manifests.parse(objects[key]))
    for i in range(0, 8 * (len(objects[key]) - records.CHECK_BYTES), step):
        data = bytearray(objects[key][: -records.CHECK_BYTES])
        data[i // 8] ^= 1 << i % 8
        if target.feed(objects | {key: (forged := records.seal(bytes(data)))}) is None:
            now = records.table_of(manifests.parse(forged))
            allowed = {"anchor", "created", "step"} | (
                {"parts"} if kind == "inline" else set()
            )  # a table's unused entry
            assert {k for k in good if good[k] != now[k]} <= allowed
            assert target.accepted_the_right_state()
            target.take_back()
    assert target.untouched


@pytest.mark.parametrize("version", [None, 3])
def test_a_version_that_cannot_be_read_is_the_same_error_every_time(version: int | None) -> None:
    """There is no other path to the version: a reader that raised nothing would silently stay at an old one."""
    target = forge.Victim(forge.sample("history"))
    objects = target.target.version.objects()
    (part,) = (key for key in objects if key.startswith("parts/"))
    target.store.forged = objects | {part: objects[part][:-1] + bytes([objects[part][-1] ^ 1])}
    for _ in range(2):
        with pytest.raises(ChecksumError):
            target.subscriber.sync(target.tensors, version=version)
        assert target.untouched
    target.store.forged = objects
    assert target.subscriber.sync(target.tensors, version=version).version == 3


def spoilt_squashes() -> dict[str, dict[str, bytes]]:
    """Squashes that each fail in their own way."""
    good = forge.sample("squash").version
    flipped = bytearray(part_of(good.copy()).write())
    flipped[-1] ^= 1
    elsewhere, damaged, unsummed = good.copy(), good.copy(), good.copy()
    elsewhere.manifest["digest"] = "0" * 64
    damaged.parts = [bytes(flipped)]
    part_of(unsummed).index.sums[3] = bytes(16)
    gone = {key: data for key, data in good.objects().items() if not key.startswith("parts/")}
    return {
        "leads elsewhere": elsewhere.objects(),
        "damaged": damaged.objects(),
        "wrong": unsummed.objects(),
        "signed with rubbish": good.objects() | {good.key: record_of(good) + b"rubbish\n"},
        "parts gone": gone,
    }


@pytest.mark.parametrize(("fresh", "step"), [(False, 2), (True, 3), *(slow(fresh, 1) for fresh in (0, 1))])
def test_a_bad_squash_is_gone_round_where_the_patches_are_there(fresh: bool, step: int) -> None:
    for how, objects in list(spoilt_squashes().items())[int(fresh and step > 1) :: step]:
        target = forge.Victim(forge.sample("squash"))
        if fresh:
            target.refresh()
        error = target.feed(target.target.patches | objects)
        assert error is None, f"{how}: {type(error).__name__}: {error}"
        assert target.accepted_the_right_state(), how
        assert target.report is not None
        assert target.report.path[-32:] == ("patch",) * 32, how


def test_an_anchor_in_the_middle_of_an_epoch_is_gone_round() -> None:
    """It leads to a state from which the next patch cannot be read: what is remembered there is nowhere written."""
    run = forge.Run(forge.SPECS, forge.TIES)
    for _ in range(5):
        run.advance("history")
    early = run.anchor()
    assert early.key == "anchors/0000000000000001"
    for _ in range(27):
        run.advance("history")
    good = dataclasses.replace(forge.sample("anchor"), after=run.state.flats, history=run.state.history)
    target = forge.Victim(good)
    error = target.feed(run.published | run.latest.objects() | early.objects())
    assert error is None, f"{type(error).__name__}: {error}"
    assert target.subscriber.version == 32
    assert target.accepted_the_right_state()


def terabyte(folder: Path, size: int | None = None) -> str:
    """A run of a kilobyte whose layout describes a tensor of a terabyte; size: what its record says of its part."""
    version = forge.sample("big.anchor").version.copy()
    tensor = {"dtype": "U8", "name": "main", "shape": [1 << 40]}
    forge.new_layout(version, {"bundles": [], "format": layouts.FORMAT, "tensors": [tensor], "ties": {}})
    part_of(version).place([(0, 0, bytes(16), Dense([Plane(b"x")]))])
    objects, store = version.objects(), LocalStore(folder)
    if size is not None:
        (part,) = (key.removeprefix("parts/") for key in objects if key.startswith("parts/"))
        objects[version.key] = forge.signed(version.manifest | {"parts": [{"id": part, "size": size}]}, None)
    for key, data in objects.items():
        store.put(key, data)
    assert sum(map(len, objects.values())) < 2000
    return str(folder)


READERS: dict[str, Callable[[str, Path], object]] = {
    "squash": lambda run, folder: Squasher(run).run(),
    "follow": lambda run, folder: HuggingFaceFolder(run, folder).update(),
}


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file can grow beyond a gigabyte: a reader that fails here does not fill the disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30 if hard == resource.RLIM_INFINITY else min(1 << 30, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("reader", ["squash", "follow"])
def test_a_kilobyte_that_describes_a_terabyte_is_refused_before_memory_is_taken(tmp_path: Path, reader: str) -> None:
    run = terabyte(tmp_path / "run")
    with pytest.raises(LimitError, match="1099511627776 bytes of weights"):
        READERS[reader](run, tmp_path / "folder")


def test_a_kilobyte_that_describes_a_terabyte_is_a_fault_that_verify_reports(tmp_path: Path) -> None:
    faults = [check.fault for check in RunVerifier(terabyte(tmp_path)).run()]
    assert any(fault and "1099511627776 bytes of weights" in fault for fault in faults)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("reader", ["squash", "follow"])
def test_an_anchor_that_says_it_is_large_and_is_not_is_refused_before_memory_is_taken(
    tmp_path: Path, reader: str
) -> None:
    run = terabyte(tmp_path / "run", size=1 << 30)
    with pytest.raises(FormatError, match="is shorter than 1073741824 bytes"):
        READERS[reader](run, tmp_path / "folder")


def test_a_tensor_for_which_there_is_no_memory_is_an_error_with_its_name() -> None:
    layout = layouts.make([TensorSpec("w", "F64", (1 << 46,))])
    with pytest.raises(LimitError, match="'w' needs 562949953421312 bytes"):
        WeightState(HostBackend.empty(layout))
    with pytest.raises(LimitError, match="'w' needs 562949953421312 bytes"):
        new_tensors(layout.tensors)


def test_a_history_part_is_refused_where_no_history_is_kept() -> None:
    good = forge.sample("history")
    with pytest.raises(FormatError):
        patch.decode(part_of(good.version).write(), good.layout, good.before, history=None)


def test_a_layout_of_more_than_128_mib_is_not_parsed() -> None:
    with pytest.raises(LimitError):
        layouts.parse(bytes((1 << 27) + 1))


@pytest.mark.parametrize("key", ["parts/../../secret", "/etc/passwd", "parts//x", "parts/..\\x", "..", ""])
def test_a_key_cannot_leave_the_folder_of_its_store(key: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    with pytest.raises(StoreError):
        LocalStore(tmp_path / "run").get(key)


DRIFT = """
import numpy as np
from pulsesync.errors import PulseError
from pulsesync.format import layout, patch
from pulsesync.format.history import History
from pulsesync.core.types import TensorSpec
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import WeightState

size = 1 << 20
old = np.full(size, 0x3F80, np.uint16)
old[200_000:400_000], old[100:2100] = 0x1000, 0x2000
new = old.copy()
new[100:2100:2] += 1
newer = new.copy()
newer[100:2100:2] += 1
state = WeightState(HostBackend(layout.make([TensorSpec("w", "BF16", (size,))]), {"w": old}))
run = state.layout, state.layout.tiles
first = patch.encode(*run, {"w": old}, {"w": new}, state.sums, codec="history", history=History())
history = History().after(first.patches, {"w": old})
second = patch.encode(*run, {"w": new}, {"w": newer}, first.sums, codec="history", history=history)
live = new.copy()
live[400_000:] = 0x1000  # other code wrote the weights: many more of them are hot than the history has
try:
    patch.decode(second.data, state.layout, {"w": live}, history=history)
except PulseError:
    print("refused")
"""


def test_weights_that_somebody_else_wrote_are_noticed_and_not_a_crash() -> None:
    with Forked(DRIFT) as process:
        printed, errors = process.communicate(50)
    assert (process.returncode, printed) == (0, "refused\n"), errors
