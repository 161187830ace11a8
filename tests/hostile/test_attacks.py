"""Each function below spoils a good record in one way; a reader must refuse it by name, at once, and change nothing.

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
import subprocess
import sys
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
from pulsesync.state.host import HostState
from pulsesync.state.views import new_tensors
from pulsesync.store.local import LocalStore
from pulsesync.testing.backends import use_kernels
from tests import records
from tests.hostile import forge
from tests.hostile.forge import Dense, Gap, Part, Plane, Version, numbers

MAX_SECONDS = 5.0
MAX_BYTES = 64 << 20

Spoil = Callable[[Version], dict[str, bytes] | None]  # changes the version, or returns what the store will hold

RIGHT = "the right state"  # the outcome of attacks that a reader does not have to refuse


@dataclass(frozen=True)
class Attack:
    end: type[PulseError] | str
    spoil: Spoil
    on: str  # which good version
    fit: bool  # whether the new sizes of payloads are written to the index
    fresh: bool  # whether the reader has the weights of the base and has not identified their version yet

    @property
    def name(self) -> str:
        end = self.end.replace(" ", "_") if isinstance(self.end, str) else self.end.__name__
        return f"{self.spoil.__name__}-{end}"


ATTACKS: list[Attack] = []


def attack(
    end: type[PulseError] | str, *, on: str = "history", fit: bool = True, fresh: bool = False
) -> Callable[[Spoil], Spoil]:
    """List a function as an attack."""

    def register(spoil: Spoil) -> Spoil:
        ATTACKS.append(Attack(end, spoil, on, fit, fresh))
        return spoil

    return register


@cache
def victim(name: str) -> forge.Victim:
    """A reader that has once accepted the good version, so that every kernel is compiled."""
    target = forge.Victim(forge.sample(name))
    assert target.feed(target.target.version.objects()) is None
    target.reset()
    return target


@pytest.mark.timeout(180)  # hundreds of attacks, in a few seconds on an idle machine
@pytest.mark.parametrize("on", [*forge.NAMES, "big", "big.anchor"])
def test_every_attack_is_refused_at_once_and_leaves_no_trace(on: str) -> None:
    failures = []
    attacks = [case for case in ATTACKS if case.on == on]
    for case in attacks:
        try:
            check_attack(case)
        except Exception:  # noqa: BLE001 - all attacks are tried, and those that succeed are named
            failures.append(f"{case.name}:\n{traceback.format_exc()}")
    assert not failures, "\n".join(failures)
    assert attacks


def check_attack(case: Attack) -> None:
    target = victim(case.on)
    version = target.target.version.copy()
    objects = case.spoil(version)
    if objects is None:
        for part in version.parts:
            if case.fit and isinstance(part, Part):
                part.fit()
        objects = version.objects()
    if case.fresh:
        target.refresh()
    try:
        tracemalloc.start()
        began = time.process_time()  # a busy machine is not the reader's fault
        error = target.feed(objects)
        took = time.process_time() - began
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if isinstance(case.end, str):
            assert error is None, f"{type(error).__name__}: {error}"
        else:
            assert type(error) is case.end, f"{type(error).__name__}: {error}"
        assert target.accepted_the_right_state() if case.end == RIGHT else target.untouched
        assert (target.subscriber.version is None) or case.end is not NothingPublishedError
        assert took < MAX_SECONDS
        assert peak < MAX_BYTES
        assert target.feed(target.target.version.objects()) is None
        assert target.accepted_the_right_state()
    finally:
        tracemalloc.stop()
        target.take_back()


def test_every_function_that_spoils_a_version_is_an_attack_with_an_expected_end() -> None:
    """A function without `@attack(...)` would never run. Helpers take more arguments or return something else."""
    signatures = {name: inspect.signature(it) for name, it in globals().items() if inspect.isfunction(it)}
    spoiling = [
        name
        for name, signature in signatures.items()
        if [p.annotation for p in signature.parameters.values()] == [Version]
        and signature.return_annotation in (None, dict[str, bytes])
    ]
    assert spoiling == [case.spoil.__name__ for case in ATTACKS]
    assert {case.end for case in ATTACKS if isinstance(case.end, str)} == {RIGHT}


# -- helpers -------------------------------------------------------------------------------------------------------


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
def an_empty_file(v: Version) -> None:
    v.parts = [b""]


@attack(FormatError)
def a_file_cut_inside_its_header(v: Version) -> None:
    v.parts = [part_of(v).write()[:43]]


@attack(FormatError)
def a_file_cut_inside_its_section_table(v: Version) -> None:
    v.parts = [part_of(v).write()[: forge.HEADER_BYTES + 40 + 7]]


@attack(FormatError)
def a_file_cut_inside_its_index(v: Version) -> None:
    v.parts = [part_of(v).write()[: forge.HEADER_BYTES + 80 + 50]]


@attack(FormatError)
def a_file_cut_inside_a_payload(v: Version) -> None:
    v.parts = [part_of(v).write()[:-40]]


@attack(FormatError)
def a_file_longer_than_its_sections(v: Version) -> None:
    v.parts = [part_of(v).write() + b"\x00"]


@attack(FormatError)
def a_file_that_begins_with_other_bytes(v: Version) -> None:
    part_of(v).magic = b"\x89PULSE\r\n"


@attack(UnsupportedError)
def an_unknown_format_version(v: Version) -> None:
    part_of(v).version = 2


@attack(UnsupportedError)
def a_part_of_the_first_draft(v: Version) -> None:
    part_of(v).version = 0x81


@attack(UnsupportedError)
def a_part_of_the_second_draft(v: Version) -> None:
    part_of(v).version = 0x82


@attack(UnsupportedError)
def flags_that_are_not_zero(v: Version) -> None:
    part_of(v).flags = 1


@attack(FormatError)
def a_part_for_another_layout(v: Version) -> None:
    part_of(v).layout = hashlib.sha256(b"another").digest()


@attack(LimitError)
def no_sections(v: Version) -> None:
    v.parts = [part_of(v).seal([], count=0)]


@attack(LimitError)
def more_sections_than_allowed(v: Version) -> None:
    v.parts = [part_of(v).seal([b""] * 16_385)]


@attack(FormatError)
def more_sections_than_there_are(v: Version) -> None:
    v.parts = [part_of(v).seal(part_of(v).sections(), count=16_384)]


@attack(FormatError)
def as_many_sections_as_allowed_and_one_not_filled(v: Version) -> None:
    part = part_of(v)
    v.parts = [part.seal([*part.sections(), *[b""] * 16_381, b"x"])]


@attack(LimitError)
def a_section_larger_than_allowed(v: Version) -> None:
    v.parts = [part_of(v).seal(part_of(v).sections(), sizes={1: (1 << 40) + 1})]


@attack(FormatError)
def a_section_of_a_terabyte_that_is_not_there(v: Version) -> None:
    v.parts = [part_of(v).seal(part_of(v).sections(), sizes={1: 1 << 40})]


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


@attack(NotFoundError)
def a_part_that_is_not_there(v: Version) -> dict[str, bytes]:
    return {v.key: v.objects()[v.key]}


# -- the index -----------------------------------------------------------------------------------------------------


@attack(FormatError)
def an_empty_index(v: Version) -> None:
    store_index(v, b"")


@attack(FormatError)
def an_index_cut_short(v: Version) -> None:
    plain = part_of(v).index.plain()[:-1]
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def an_index_with_a_byte_too_many(v: Version) -> None:
    plain = part_of(v).index.plain() + b"\x00"
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def bytes_behind_the_index_in_its_section(v: Version) -> None:
    store_index(v, part_of(v).index.write() + b"\x00")


@attack(LimitError)
def an_index_that_says_it_has_2_to_the_60_bytes(v: Version) -> None:
    part_of(v).index.size = 1 << 60


@attack(FormatError)
def an_index_that_says_it_is_shorter_than_its_frame_unpacks_to(v: Version) -> None:
    index = part_of(v).index
    index.packed, index.size = True, len(index.plain()) - 1


@attack(LimitError)
def an_index_of_2_to_the_60_tiles(v: Version) -> None:
    part_of(v).index.tile_count = 1 << 60


@attack(FormatError)
def an_index_of_one_tile_more_than_it_lists(v: Version) -> None:
    part_of(v).place([]).index.tile_count = 1


@attack(LimitError)
def an_index_of_2_to_the_60_tables(v: Version) -> None:
    part_of(v).index.table_count = 1 << 60


@attack(LimitError)
def an_index_of_more_tables_than_allowed(v: Version) -> None:
    part_of(v).index.table_count = MAX_TABLES + 1


@attack(FormatError)
def a_number_written_longer_than_needed(v: Version) -> None:
    plain = part_of(v).index.plain()
    assert plain[0] < 0x80
    plain = bytes([plain[0] | 0x80, 0]) + plain[1:]
    store_index(v, wire.number(len(plain)) + Plane(plain).write())


@attack(FormatError)
def a_number_that_never_ends(v: Version) -> None:
    store_index(v, b"\xff" * 1000)


@attack(FormatError)
def a_number_of_eleven_bytes(v: Version) -> None:
    store_index(v, b"\xff" * 10 + b"\x01")


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
def a_number_of_ten_bytes_beyond_64_bits(v: Version) -> None:
    store_index(v, b"\xff" * 9 + b"\x7f")


@attack(FormatError)
def a_tile_that_does_not_exist(v: Version) -> None:
    part_of(v).index.tiles[-1] += 5


@attack(LimitError)
def a_tile_twice_by_a_distance_that_wraps_around(v: Version) -> None:
    part_of(v).index.tiles[1] = (1 << 64) - 1  # the format can only say it so: distances are never negative


@attack(FormatError)
def a_section_that_does_not_exist(v: Version) -> None:
    part_of(v).index.sections[-1] = 1


@attack(LimitError)
def the_index_itself_as_a_payload_section_by_wrapping_around(v: Version) -> None:
    part_of(v).index.sections[0] = (1 << 64) - 1


@attack(FormatError, fit=False)
def payloads_that_leave_a_byte_of_their_section(v: Version) -> None:
    part_of(v).index.sizes[-1] -= 1


@attack(FormatError, fit=False)
def payloads_that_reach_beyond_their_section(v: Version) -> None:
    part_of(v).index.sizes[-1] += 1


@attack(FormatError, fit=False)
def payloads_that_overlap_their_neighbours(v: Version) -> None:
    part_of(v).index.sizes[0] += 3  # in the file one payload begins where the other ends: overlap is too many bytes


@attack(LimitError, fit=False)
def payload_sizes_that_overflow_to_the_right_sum(v: Version) -> None:
    sizes = part_of(v).index.sizes
    sizes[0] += 1 << 63
    sizes[1] += 1 << 63


@attack(FormatError)
def a_section_that_no_payload_is_in(v: Version) -> None:
    v.parts = [part_of(v).seal([*part_of(v).sections(), b"unused"])]


@attack(UnsupportedError)
def an_unknown_codec(v: Version) -> None:
    part_of(v).index.codecs[0] = 4


@attack(UnsupportedError)
def codec_255(v: Version) -> None:
    part_of(v).index.codecs[-1] = 255


@attack(VerificationError)
def a_tile_sum_that_is_not_the_weights(v: Version) -> None:
    part_of(v).index.sums[3] = bytes(16)


@attack(VerificationError)
def a_changed_tile_that_is_left_out(v: Version) -> None:
    part_of(v).place(part_of(v).payloads()[:-1])


@attack(VerificationError)
def two_payloads_under_each_others_tiles(v: Version) -> None:
    sections = part_of(v).bodies[0]
    i, j = row(v, "bytes"), row(v, "doubles")
    part_of(v).index.codecs = [0 if k in (i, j) else c for k, c in enumerate(part_of(v).index.codecs)]
    sections[i], sections[j] = Dense([Plane(bytes(33))]), Dense([Plane(bytes(9))] * 8)


# -- zstd ----------------------------------------------------------------------------------------------------------


@attack(UnsupportedError, on="dense")
def a_plane_of_unknown_kind(v: Version) -> None:
    first_plane(v).stored = b"\x02" + first_plane(v).content


@attack(LimitError, on="dense")
def a_frame_said_to_be_longer_than_its_content(v: Version) -> None:
    first_plane(v).stored = b"\x01" + wire.number(1 << 40)


@attack(FormatError, on="dense")
def a_frame_cut_short(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048))[:-1])


@attack(FormatError, on="dense")
def a_frame_of_no_bytes(v: Version) -> None:
    store_frame(first_plane(v), b"")


@attack(FormatError, on="dense")
def a_frame_that_is_not_zstd(v: Version) -> None:
    store_frame(first_plane(v), b"\x1f\x8b" + bytes(50))


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


@attack(FormatError, on="dense")
def a_frame_that_unpacks_to_less_than_it_says(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2047)))


@attack(LimitError, on="dense")
def a_frame_with_a_window_of_two_gigabytes(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048), head=0x80, window=bytes([21 << 3])))


@attack(FormatError, on="dense")
def a_skippable_frame(v: Version) -> None:
    store_frame(first_plane(v), struct.pack("<II", 0x184D2A50, 8) + bytes(8))


@attack(FormatError, on="dense")
def a_skippable_frame_before_the_real_one(v: Version) -> None:
    store_frame(first_plane(v), struct.pack("<II", 0x184D2A5F, 8) + bytes(8) + frame(2048, run_of(0, 2048)))


@attack(FormatError, on="dense")
def a_skippable_frame_behind_the_real_one(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048)) + struct.pack("<II", 0x184D2A50, 8) + bytes(8))


@attack(FormatError, on="dense")
def two_frames_that_are_the_content_together(v: Version) -> None:
    store_frame(first_plane(v), frame(1024, run_of(0, 1024)) * 2)


@attack(FormatError, on="dense")
def two_whole_frames(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048)) * 2)


@attack(FormatError, on="dense")
def bytes_behind_a_frame(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048)) + b"\x00")


@attack(FormatError, on="dense")
def a_frame_with_a_wrong_checksum(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048), b"\x00\x00\x00\x00", head=0xA4))


@attack(FormatError, on="dense")
def a_frame_that_needs_a_dictionary(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, run_of(0, 2048), head=0xA1, window=b"\x07"))


@attack(FormatError, on="dense")
def a_frame_with_a_block_of_the_reserved_kind(v: Version) -> None:
    store_frame(first_plane(v), frame(2048, (2048 << 3 | 3 << 1 | 1).to_bytes(3, "little") + b"\x00"))


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


# -- tables --------------------------------------------------------------------------------------------------------


@attack(UnsupportedError)
def a_table_for_integers(v: Version) -> None:
    table_of(v).dtype = 11


@attack(UnsupportedError)
def a_table_for_no_dtype(v: Version) -> None:
    table_of(v).dtype = 0


@attack(FormatError)
def a_table_without_classes(v: Version) -> None:
    table_of(v).classes, table_of(v).counts = 0, []


@attack(LimitError)
def a_table_of_25_classes(v: Version) -> None:
    table_of(v).classes = 25


@attack(FormatError)
def a_table_without_ages(v: Version) -> None:
    table_of(v).ages, table_of(v).counts = 0, []


@attack(LimitError)
def a_table_of_129_ages(v: Version) -> None:
    table_of(v).ages = 129


@attack(LimitError)
def a_table_that_begins_at_class_2_to_the_40(v: Version) -> None:
    table_of(v).lo = 1 << 40


@attack(FormatError)
def a_table_of_classes_beyond_the_last(v: Version) -> None:
    table_of(v).lo = 256


@attack(LimitError)
def a_context_of_more_symbols_than_there_are(v: Version) -> None:
    table_of(v).counts[0] = 42


@attack(FormatError)
def a_symbol_that_does_not_exist(v: Version) -> None:
    table = table_of(v)
    last = np.cumsum(table.counts)[np.flatnonzero(table.counts)[0]] - 1
    table.skips[last] += 41


@attack(LimitError)
def a_symbol_beyond_64_bits(v: Version) -> None:
    table_of(v).skips[-1] = (1 << 63) + 1


@attack(LimitError)
def frequencies_that_add_up_to_less(v: Version) -> None:
    frequencies = table_of(v).frequencies
    frequencies[int(np.argmax(frequencies))] -= 1


@attack(LimitError)
def frequencies_that_add_up_to_more(v: Version) -> None:
    table_of(v).frequencies[0] += 1


@attack(LimitError)
def frequencies_that_overflow_to_the_right_sum(v: Version) -> None:
    frequencies = table_of(v).frequencies
    frequencies[0] += 1 << 63
    frequencies[1] += 1 << 63


@attack(LimitError)
def a_context_of_one_frequency_too_large(v: Version) -> None:
    table_of(v).frequencies[0] = 1 << 40


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


# -- context and history -------------------------------------------------------------------------------------------


@attack(FormatError)
def a_payload_cut_short(v: Version) -> None:
    part_of(v).bodies[0][row(v, "main")] = body(v).write()[:-2]


@attack(FormatError)
def a_payload_of_no_bytes(v: Version) -> None:
    part_of(v).bodies[0][row(v, "main")] = b""


@attack(FormatError)
def a_payload_with_a_byte_too_many(v: Version) -> None:
    part_of(v).bodies[0][row(v, "main")] = body(v).write() + b"\x00"


@attack(FormatError)
def a_table_that_the_part_does_not_have(v: Version) -> None:
    body(v).table = len(part_of(v).index.tables)


@attack(FormatError)
def a_table_of_another_dtype(v: Version) -> None:
    body(v).table = body(v, "wide").table


@attack(LimitError)
def a_cut_above_the_table(v: Version) -> None:
    body(v).cut = table_of(v).lo + table_of(v).classes + 1


@attack(LimitError)
def a_cut_above_all_classes(v: Version) -> None:
    body(v).cut = 257


@attack(LimitError)
def a_cut_of_2_to_the_63(v: Version) -> None:
    body(v).cut = 1 << 63


@attack(FormatError)
def a_cut_that_falls_in_its_epoch(v: Version) -> None:
    body(v).cut -= 1


@attack(LimitError)
def more_changes_than_weights(v: Version) -> None:
    body(v).heads[0] = 2049 << 3


@attack(LimitError)
def a_block_of_2_to_the_40_changes(v: Version) -> None:
    body(v).heads[0] = 1 << 43


@attack(FormatError)
def a_block_of_64_lanes(v: Version) -> None:
    body(v).heads[0] = body(v).heads[0] & ~7 | 6


@attack(FormatError)
def a_block_of_32_lanes_whose_stream_has_fewer_states(v: Version) -> None:
    body(v).heads[0] = body(v).heads[0] & ~7 | 5


@attack(FormatError)
def a_block_without_changes_that_has_lanes(v: Version) -> None:
    payload = body(v)
    payload.heads, payload.stream = [1], b""


@attack(FormatError)
def a_block_of_one_change_more_than_its_stream_holds(v: Version) -> None:
    body(v).heads[0] += 8


@attack(FormatError)
def a_block_of_one_change_less_than_its_stream_holds(v: Version) -> None:
    body(v).heads[0] -= 8


@attack(LimitError)
def a_stream_of_2_to_the_40_words(v: Version) -> None:
    body(v).heads[1] = 1 << 40


@attack(FormatError)
def a_stream_of_more_words_than_there_are(v: Version) -> None:
    body(v).heads[1] += 1


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
def a_stream_of_zeros(v: Version) -> None:
    body(v).stream = bytes(len(body(v).stream))


@attack(FormatError)
def a_stream_of_ones(v: Version) -> None:
    body(v).stream = b"\xff" * len(body(v).stream)


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


@attack(LimitError)
def a_table_that_lists_more_sizes_than_fit(v: Version) -> None:
    table_of(v).listed = [0] * 12


@attack(FormatError)
def a_table_that_lists_half_the_circle(v: Version) -> None:
    table_of(v).listed = [(1 << 15) - 8]


@attack(LimitError)
def a_table_that_lists_a_size_beyond_any(v: Version) -> None:
    table_of(v).listed = [1 << 63]


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


@attack(LimitError)
def more_cold_changes_than_weights(v: Version) -> None:
    body(v).cold_count = 2049


@attack(FormatError)
def more_cold_changes_than_bytes(v: Version) -> None:
    body(v).cold_count = 2048


@attack(FormatError)
def a_cold_change_behind_the_tile(v: Version) -> None:
    few_cold(v).cold[-2] += 2048


@attack(LimitError)
def a_cold_gap_beyond_2_to_the_47(v: Version) -> None:
    few_cold(v).cold[0] = (1 << 47) + 1


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


@attack(LimitError)
def a_cold_change_of_no_step(v: Version) -> None:
    few_cold(v).cold[1] = 0


@attack(LimitError)
def a_cold_step_longer_than_its_dtype_has(v: Version) -> None:
    few_cold(v).cold[1] = (1 << 17) + 2


@attack(LimitError)
def a_cold_step_of_2_to_the_63(v: Version) -> None:
    few_cold(v).cold[1] = 1 << 63


@attack(UnsupportedError)
def context_for_integers(v: Version) -> None:
    part_of(v).index.codecs[row(v, "ints")] = 2


@attack(UnsupportedError)
def steps_for_integers(v: Version) -> None:
    part_of(v).index.codecs[row(v, "ints")] = 4


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


@attack(FormatError, on="xor")
def an_xor_that_is_a_plane_short(v: Version) -> None:
    body(v).planes.pop()


@attack(VerificationError, on="xor")
def an_xor_taken_for_a_dense_tile(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 0


@attack(UnsupportedError)
def history_for_doubles(v: Version) -> None:
    part_of(v).index.codecs[row(v, "doubles")] = 3


@attack(FormatError, on="anchor", fit=False)
def a_history_payload_in_an_anchor(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 3


@attack(FormatError, on="anchor", fit=False)
def a_gap_payload_in_an_anchor(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 1


@attack(FormatError, on="squash")
def a_history_payload_in_a_squash(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 3


@attack(FormatError)
def a_history_payload_that_says_it_needs_none(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 2


@attack(FormatError, on="context")
def a_context_payload_that_says_it_needs_history(v: Version) -> None:
    part_of(v).index.codecs[row(v, "main")] = 3


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


# -- gap and dense -------------------------------------------------------------------------------------------------


@attack(FormatError, on="gap")
def a_gap_payload_of_no_changes(v: Version) -> None:
    part_of(v).bodies[0][row(v, "main")] = Gap(0, 1, [Plane(b"")] * 3)


@attack(LimitError, on="gap")
def a_gap_payload_of_more_changes_than_weights(v: Version) -> None:
    body(v).count = 2049


@attack(LimitError, on="gap")
def a_gap_payload_of_2_to_the_40_changes(v: Version) -> None:
    body(v).count = 1 << 40


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


@attack(FormatError, on="gap")
def a_gap_payload_that_lacks_a_plane(v: Version) -> None:
    body(v).planes.pop()


@attack(FormatError, on="gap")
def a_gap_payload_with_a_plane_too_many(v: Version) -> None:
    body(v).planes.append(Plane(bytes(body(v).count)))


@attack(VerificationError, on="gap")
def a_gap_payload_with_another_value(v: Version) -> None:
    plane = body(v).planes[-1]
    plane.content, plane.packed = bytes([plane.content[0] ^ 1]) + plane.content[1:], False


@attack(FormatError, on="dense")
def a_dense_payload_that_lacks_a_plane(v: Version) -> None:
    body(v).planes.pop()


@attack(FormatError, on="dense")
def a_dense_payload_with_a_weight_too_many(v: Version) -> None:
    for plane in body(v).planes:
        plane.content += b"\x00"


@attack(FormatError, on="dense")
def a_dense_payload_for_a_tensor_of_another_size(v: Version) -> None:
    part_of(v).bodies[0][row(v, "main")] = body(v, "half")


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


@attack(RIGHT, on="anchor")
def a_raw_payload_in_the_place_of_a_dense_one(v: Version) -> None:
    as_raw(v, main_bytes())


@attack(FormatError, on="anchor")
def a_raw_payload_with_a_weight_too_many(v: Version) -> None:
    as_raw(v, main_bytes() + bytes(2))


@attack(FormatError, on="anchor")
def a_raw_payload_cut_inside_a_weight(v: Version) -> None:
    as_raw(v, main_bytes()[:-1])


@attack(VerificationError, on="anchor")
def a_raw_payload_with_another_weight(v: Version) -> None:
    content = main_bytes()
    as_raw(v, bytes([content[0] ^ 1]) + content[1:])


@attack(FormatError, on="anchor")
def an_anchor_with_a_payload_that_needs_old_weights(v: Version) -> None:
    part, at = part_of(v), row(v, "main")
    part.index.codecs[at] = 1


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


@attack(VerificationError, on="mixed")
def one_of_two_parts_left_out(v: Version) -> None:
    v.parts.pop()


# -- the manifest --------------------------------------------------------------------------------------------------


@attack(FormatError)
def an_empty_manifest(v: Version) -> dict[str, bytes]:
    return with_manifest(v, b"")


@attack(FormatError)
def a_manifest_cut_short(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key][:-20])


@attack(FormatError)
def a_manifest_cut_inside_its_first_bytes(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key][:10])


@attack(UnsupportedError)
def two_manifests(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] * 2)


@attack(FormatError)
def a_manifest_with_a_byte_behind_it(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] + b"\n")


@attack(ChecksumError)
def a_manifest_with_one_other_bit(v: Version) -> dict[str, bytes]:
    data = bytearray(v.objects()[v.key])
    data[30] ^= 1
    return with_manifest(v, bytes(data))


@attack(ChecksumError)
def a_manifest_whose_checksum_is_zero(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key][: -records.CHECK_BYTES] + bytes(records.CHECK_BYTES))


@attack(FormatError)
def a_manifest_that_begins_with_other_bytes(v: Version) -> None:
    v.manifest["magic"] = b"\x89PX"


@attack(UnsupportedError)
def a_manifest_of_the_first_draft(v: Version) -> dict[str, bytes]:
    return with_manifest(v, b'{"format":"pulse-manifest/1-draft"}\n')


@attack(UnsupportedError)
def a_manifest_of_an_unknown_format(v: Version) -> None:
    v.manifest["format"] = 2


@attack(UnsupportedError)
def a_manifest_of_the_second_draft(v: Version) -> None:
    v.manifest["format"] = 0x82


@attack(UnsupportedError)
def a_manifest_with_flags_that_are_not_known(v: Version) -> None:
    v.manifest["flags"] = 0x0B


@attack(UnsupportedError)
def a_manifest_with_an_extension_that_a_reader_must_know(v: Version) -> None:
    v.manifest["extensions"] = [(1, b"may be ignored"), (2, b"may not")]


@attack(RIGHT)
def a_manifest_with_extensions_that_a_reader_may_ignore(v: Version) -> None:
    v.manifest["extensions"] = [(1, b""), (77, bytes(range(256))), (65_535, bytes(3_840))]


@attack(FormatError)
def a_manifest_with_a_flag_for_extensions_and_none(v: Version) -> None:
    v.manifest["extensions"] = []


@attack(FormatError)
def a_manifest_with_the_same_extension_twice(v: Version) -> None:
    v.manifest["extensions"] = [(3, b"one"), (3, b"two")]


@attack(FormatError)
def a_manifest_with_extensions_out_of_order(v: Version) -> None:
    v.manifest["extensions"] = [(5, b""), (3, b"")]


@attack(FormatError)
def a_manifest_with_an_extension_cut_short(v: Version) -> None:
    v.manifest["extensions"] = b"\x01\x01\x05four"  # one, of tag 1 and 5 bytes


@attack(LimitError)
def a_manifest_with_extensions_of_more_bytes_than_allowed(v: Version) -> None:
    v.manifest["extensions"] = [(1, bytes(4_000)), (3, bytes(97))]


@attack(LimitError)
def a_manifest_with_more_extensions_than_allowed(v: Version) -> None:
    v.manifest["extensions"] = [(2 * i + 1, b"") for i in range(17)]


@attack(LimitError)
def a_manifest_with_an_extension_of_a_tag_beyond_the_limit(v: Version) -> None:
    v.manifest["extensions"] = [(65_537, b"")]


@attack(LimitError)
def a_manifest_that_denies_its_history_and_has_it(v: Version) -> None:
    v.manifest["flags"] = 1


@attack(LimitError)
def a_manifest_that_claims_a_base_and_has_none(v: Version) -> None:
    v.manifest |= {"flags": 3, "base": None}


@attack(FormatError)
def a_manifest_with_a_byte_that_no_field_is_for(v: Version) -> None:
    v.manifest["files"] = b"\x00\x00"


@attack(FormatError)
def a_manifest_with_a_field_less(v: Version) -> None:
    del v.manifest["files"]


@attack(ChecksumError)
def a_manifest_that_claims_to_end_earlier(v: Version) -> None:
    v.manifest["length"] = 40


@attack(FormatError)
def a_manifest_that_claims_to_end_later(v: Version) -> None:
    v.manifest["length"] = 1 << 20


@attack(LimitError)
def a_manifest_that_claims_a_length_beyond_its_limit(v: Version) -> None:
    v.manifest["length"] = (1 << 24) + 1


@attack(LimitError)
def a_manifest_with_a_negative_step(v: Version) -> None:
    v.manifest["step"] = -1


@attack(LimitError)
def a_manifest_with_a_number_beyond_2_to_the_53(v: Version) -> None:
    v.manifest["step"] = (1 << 53) + 1


@attack(FormatError)
def a_manifest_with_a_number_longer_than_needed(v: Version) -> None:
    v.manifest["step"] = b"\x80\x00"


@attack(FormatError)
def a_manifest_with_a_number_of_a_million_bytes(v: Version) -> None:
    v.manifest["step"] = b"\xff" * 1_000_000 + b"\x01"


@attack(FormatError)
def a_manifest_that_ends_inside_a_number(v: Version) -> None:
    v.manifest["files"] = b"\x80"


@attack(LimitError)
def a_manifest_of_more_than_16_mib(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] + bytes(1 << 24))


@attack(FormatError)
def a_manifest_without_parts(v: Version) -> None:
    v.parts = []


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


# -- parts that stand in their record ------------------------------------------------------------------------------


def sections_of(v: Version) -> tuple[bytes, bytes]:
    index, payloads = part_of(v).sections()
    return index, payloads


def with_sections(v: Version, index: bytes, payloads: bytes) -> dict[str, bytes]:
    return with_manifest(v, records.write(v.manifest | {"parts": [{"index": index, "payloads": payloads}]}))


@attack(FormatError, on="inline")
def a_part_in_a_record_without_an_index(v: Version) -> dict[str, bytes]:
    return with_sections(v, b"", sections_of(v)[1])


@attack(FormatError, on="inline")
def a_part_in_a_record_without_payloads(v: Version) -> dict[str, bytes]:
    return with_sections(v, sections_of(v)[0], b"")


@attack(FormatError, on="inline")
def a_part_in_a_record_with_a_byte_behind_its_payloads(v: Version) -> dict[str, bytes]:
    index, payloads = sections_of(v)
    return with_sections(v, index, payloads + b"\x00")


@attack(FormatError, on="inline")
def a_part_in_a_record_with_a_byte_behind_its_index(v: Version) -> dict[str, bytes]:
    index, payloads = sections_of(v)
    return with_sections(v, index + b"\x00", payloads)


@attack(LimitError, on="inline")
def a_part_in_a_record_with_an_index_beyond_the_limit(v: Version) -> dict[str, bytes]:
    return with_sections(v, bytes(4097), b"")


@attack(LimitError, on="inline")
def a_part_in_a_record_beyond_the_limit(v: Version) -> dict[str, bytes]:
    return with_sections(v, sections_of(v)[0], bytes(4096))


@attack(LimitError, on="inline")
def parts_in_a_record_that_are_beyond_the_limit_together(v: Version) -> None:
    v.reseal = False
    v.manifest["parts"] = [{"index": bytes([n]), "payloads": bytes(2047)} for n in range(3)]


@attack(FormatError, on="inline")
def a_part_in_a_record_twice(v: Version) -> None:
    v.parts = [*v.parts, *v.copy().parts]


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


@attack(VerificationError, on="inline")
def a_part_in_a_record_with_a_tile_sum_that_is_not_the_weights(v: Version) -> None:
    part_of(v).index.sums[3] = bytes(16)


@attack(RIGHT, on="inline")
def the_same_part_as_an_object(v: Version) -> None:
    v.inline = False


@attack(RIGHT)
def the_same_part_in_the_record(v: Version) -> None:
    v.inline = True


# -- what the record says ------------------------------------------------------------------------------------------


@attack(LimitError)
def a_part_larger_than_a_terabyte(v: Version) -> None:
    v.reseal = False
    v.manifest["parts"][0]["size"] = (1 << 40) + 1


@attack(FormatError)
def a_base_that_is_the_version_itself(v: Version) -> None:
    v.manifest["base"]["version"] = 3


@attack(LimitError)
def a_base_that_is_later_than_the_version(v: Version) -> None:
    v.manifest["base"]["version"] = 1 << 53


@attack(FormatError)
def a_base_that_is_not_the_version_held(v: Version) -> None:
    v.manifest["base"]["version"] = 1


@attack(MissingLinkError)
def a_base_of_another_digest(v: Version) -> None:
    v.manifest["base"]["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(ChainError)
def a_version_of_another_run(v: Version) -> None:
    v.manifest["run"] = "f" * 32


@attack(ChainError)
def another_version_than_was_asked_for(v: Version) -> None:
    v.manifest["version"] = 4
    v.manifest["base"]["version"] = 3


@attack(ChainError)
def a_patch_that_leaves_one_of_its_epoch_out(v: Version) -> None:
    v.manifest["index"] = 4


@attack(ChainError)
def a_patch_of_an_epoch_that_has_ended(v: Version) -> None:
    v.manifest |= {"epoch": 0, "index": 1}


@attack(LimitError)
def a_patch_128_of_its_epoch(v: Version) -> None:
    v.manifest["index"] = 128


@attack(ChainError)
def a_patch_that_begins_an_epoch_in_the_middle_of_one(v: Version) -> None:
    v.manifest |= {"epoch": 1, "index": 1}


@attack(ChainError)
def a_patch_of_another_epoch(v: Version) -> None:
    v.manifest["epoch"] = 1


@attack(FormatError)
def a_patch_without_a_base(v: Version) -> None:
    v.manifest["base"] = None


@attack(FormatError)
def a_patch_of_index_0(v: Version) -> None:
    v.manifest["index"] = 0


@attack(FormatError)
def a_root_with_parts(v: Version) -> None:
    v.manifest |= {"base": None, "index": 0, "history": None}


@attack(MissingLinkError)
def a_root_that_no_anchor_leads_to(v: Version) -> None:
    v.parts = []
    v.manifest |= {"base": None, "epoch": 1, "index": 0, "history": None}


@attack(NothingPublishedError, on="anchor")
def a_run_that_begins_with_a_patch(v: Version) -> dict[str, bytes]:
    base = {"digest": v.manifest["digest"], "version": 0}
    first = v.manifest | {"kind": "version", "version": 1, "index": 1, "base": base}
    return {"manifests/0000000000000001": records.write(first)}


@attack(VerificationError)
def a_digest_that_is_not_the_state(v: Version) -> None:
    v.manifest["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(VerificationError)
def a_history_digest_that_is_not_the_history(v: Version) -> None:
    v.manifest["history"] = hashlib.sha256(b"another history").hexdigest()


@attack(VerificationError)
def a_history_that_is_denied(v: Version) -> None:
    v.manifest["history"] = None


@attack(VerificationError, on="gap")
def a_history_where_none_is_kept(v: Version) -> None:
    v.manifest["history"] = "0" * 64


# -- files published with the weights ------------------------------------------------------------------------------


def a_file(**fields: object) -> dict[str, object]:
    return {"id": "0" * 64, "name": "config.json", "size": 1, **fields}


@attack(FormatError)
def a_file_name_that_leaves_its_folder(v: Version) -> None:
    v.manifest["files"] = [a_file(name="../../.ssh/authorized_keys")]


@attack(FormatError)
def a_file_name_that_begins_at_the_root(v: Version) -> None:
    v.manifest["files"] = [a_file(name="/etc/passwd")]


@attack(FormatError)
def a_file_name_with_a_backslash(v: Version) -> None:
    v.manifest["files"] = [a_file(name="..\\config.json")]


@attack(FormatError)
def a_file_name_that_is_the_folder_above(v: Version) -> None:
    v.manifest["files"] = [a_file(name="..")]


@attack(FormatError)
def a_file_name_that_hides(v: Version) -> None:
    v.manifest["files"] = [a_file(name=".bashrc")]


@attack(FormatError)
def a_file_name_that_is_an_option(v: Version) -> None:
    v.manifest["files"] = [a_file(name="--output=x")]


@attack(FormatError)
def a_file_name_with_a_zero_byte(v: Version) -> None:
    v.manifest["files"] = [a_file(name="config.json\x00.txt")]


@attack(FormatError)
def a_file_name_with_a_newline_behind_it(v: Version) -> None:
    v.manifest["files"] = [a_file(name="config.json\n")]


@attack(FormatError)
def a_file_without_a_name(v: Version) -> None:
    v.manifest["files"] = [a_file(name="")]


@attack(FormatError)
def two_files_of_one_name(v: Version) -> None:
    v.manifest["files"] = [a_file(), a_file(id="1" * 64)]


@attack(FormatError)
def a_file_id_that_leaves_the_store(v: Version) -> None:
    v.manifest["files"] = [a_file(id="../head")]


@attack(LimitError)
def a_file_of_a_terabyte(v: Version) -> None:
    v.manifest["files"] = [a_file(size=1 << 40)]


@attack(LimitError)
def more_files_than_allowed(v: Version) -> None:
    v.manifest["files"] = [a_file(name=f"f{n}") for n in range(257)]


# -- records in the wrong place ------------------------------------------------------------------------------------


@attack(UnsupportedError)
def a_record_of_an_unknown_kind(v: Version) -> None:
    v.manifest["kind"] = 3


@attack(FormatError)
def an_anchor_in_the_place_of_a_version(v: Version) -> None:
    v.manifest |= {"kind": "anchor", "base": None, "history": None}


@attack(FormatError)
def a_squash_in_the_place_of_a_version(v: Version) -> None:
    v.manifest |= {"kind": "squash", "history": None}


@attack(ChainError)
def an_older_manifest_under_the_key(v: Version) -> dict[str, bytes]:
    older = forge.sample("history").published["manifests/0000000000000002"]
    return with_manifest(v, older)


@attack(LimitError)
def an_anchor_of_a_negative_epoch_named(v: Version) -> None:
    v.manifest["anchor"] = -2


@attack(RIGHT)
def an_anchor_named_that_is_far_in_the_future(v: Version) -> None:
    v.manifest["anchor"] = 1 << 53


@attack(RIGHT)
def an_anchor_nobody_needs_that_is_rubbish(v: Version) -> dict[str, bytes]:
    return v.objects() | {"anchors/0000000000000000": b"rubbish"}


@attack(FormatError, on="anchor")
def a_version_in_the_place_of_an_anchor(v: Version) -> None:
    v.parts, v.manifest["kind"] = [], "version"


@attack(FormatError, on="anchor")
def a_squash_in_the_place_of_an_anchor(v: Version) -> None:
    v.manifest |= {"kind": "squash", "version": 1, "base": {"digest": "0" * 64, "version": 0}}


@attack(FormatError, on="anchor")
def an_anchor_with_a_base(v: Version) -> None:
    v.manifest |= {"version": 1, "base": {"digest": "0" * 64, "version": 0}}


@attack(FormatError, on="anchor")
def an_anchor_with_a_history(v: Version) -> None:
    v.manifest["history"] = "0" * 64


@attack(FormatError, on="anchor")
def an_anchor_without_parts(v: Version) -> None:
    v.parts = []


@attack(FormatError, on="anchor")
def an_anchor_that_is_rubbish(v: Version) -> dict[str, bytes]:
    return with_manifest(v, b"rubbish\n")


@attack(LimitError, on="anchor")
def an_anchor_record_of_more_than_16_mib(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] + bytes(1 << 24))


@attack(NothingPublishedError, on="anchor")
def an_anchor_of_another_epoch(v: Version) -> None:
    v.manifest["epoch"] = 5


@attack(NothingPublishedError, on="anchor")
def an_anchor_in_the_place_of_another(v: Version) -> None:
    v.key = "anchors/0000000000000001"


@attack(NothingPublishedError, on="anchor")
def an_anchor_of_another_run(v: Version) -> None:
    v.manifest["run"] = "f" * 32


@attack(NothingPublishedError, on="anchor")
def an_anchor_of_a_later_version(v: Version) -> None:
    v.manifest["version"] = 7


@attack(NothingPublishedError, on="anchor")
def an_anchor_of_another_digest_than_its_version(v: Version) -> None:
    v.manifest["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(VerificationError, on="anchor")
def an_anchor_and_a_version_that_agree_on_a_digest_that_is_not_the_state(v: Version) -> None:
    for table in (v.manifest, *v.beside.values()):
        table["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(FormatError, on="anchor")
def an_anchor_that_leaves_a_tile_out(v: Version) -> None:
    part_of(v).place(part_of(v).payloads()[1:])


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


@attack(NotFoundError, on="anchor")
def an_anchor_part_that_is_not_there(v: Version) -> dict[str, bytes]:
    return {key: data for key, data in v.objects().items() if not key.startswith("parts/")}


@attack(ChecksumError, on="anchor")
def an_anchor_part_with_a_flipped_bit(v: Version) -> None:
    data = bytearray(part_of(v).write())
    data[-1] ^= 1
    v.parts = [bytes(data)]


# -- squashes ------------------------------------------------------------------------------------------------------


@attack(MissingLinkError, on="squash")
def a_squash_of_another_base(v: Version) -> None:
    v.manifest["base"]["version"] = 1


@attack(MissingLinkError, on="squash")
def a_squash_of_a_base_of_another_digest(v: Version) -> None:
    v.manifest["base"]["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(MissingLinkError, on="squash")
def a_squash_that_says_it_leads_further(v: Version) -> None:
    v.manifest |= {"version": 64, "epoch": 1}


@attack(MissingLinkError, on="squash")
def a_squash_that_leads_to_the_middle_of_an_epoch(v: Version) -> None:
    v.manifest |= {"version": 31, "index": 31}


@attack(MissingLinkError, on="squash")
def a_squash_that_leads_back(v: Version) -> None:
    v.manifest |= {"epoch": 0, "index": 0}


@attack(MissingLinkError, on="squash")
def a_squash_in_the_place_of_a_larger_one(v: Version) -> None:
    v.key = "squashes/01/0000000000000000"


@attack(MissingLinkError, on="squash")
def a_squash_in_the_place_of_a_later_one(v: Version) -> None:
    v.key = "squashes/00/0000000000000001"


@attack(MissingLinkError, on="squash")
def a_squash_of_another_digest_than_its_version(v: Version) -> None:
    v.manifest["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(VerificationError, on="squash")
def a_squash_and_a_version_that_agree_on_a_digest_that_is_not_the_state(v: Version) -> None:
    for table in (v.manifest, *v.beside.values()):
        table["digest"] = hashlib.sha256(b"another state").hexdigest()


@attack(FormatError, on="squash")
def a_squash_with_a_history(v: Version) -> None:
    v.manifest["history"] = "0" * 64


@attack(FormatError, on="squash")
def a_squash_without_a_base(v: Version) -> None:
    v.manifest["base"] = None


@attack(FormatError, on="squash")
def a_squash_without_parts(v: Version) -> None:
    v.parts = []


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


@attack(VerificationError, on="squash")
def a_squash_with_a_tile_sum_that_is_not_the_weights(v: Version) -> None:
    part_of(v).index.sums[3] = bytes(16)


@attack(FormatError, on="squash")
def a_squash_with_a_tile_in_two_parts(v: Version) -> None:
    other = v.copy().parts[0]
    assert isinstance(other, Part)
    v.parts.append(other.place(part_of(v).payloads()[3:4]))


# -- signatures ----------------------------------------------------------------------------------------------------


@attack(SignatureError, on="squash")
def a_squash_without_a_signature(v: Version) -> None:
    v.signer = None


@attack(SignatureError, on="squash")
def a_squash_signed_by_a_stranger(v: Version) -> None:
    v.signer = forge.STRANGER


@attack(SignatureError, on="squash")
def a_squash_by_a_delegate_without_the_delegation(v: Version) -> None:
    v.signer = forge.HELPER


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_by_a_stranger(v: Version) -> None:
    said = forge.STRANGER.delegate(forge.RUN, forge.HELPER.public)
    v.signer = SigningKey(forge.HELPER.secret, said)


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_by_a_stranger_in_the_runs_name(v: Version) -> None:
    said = forge.STRANGER.delegate(forge.RUN, forge.HELPER.public)
    v.signer = SigningKey(forge.HELPER.secret, dataclasses.replace(said, by=forge.KEY.public))


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_for_another_run(v: Version) -> None:
    v.signer = SigningKey(forge.HELPER.secret, forge.KEY.delegate("f" * 32, forge.HELPER.public))


@attack(SignatureError, on="squash")
def a_squash_with_a_delegation_for_another_key(v: Version) -> None:
    v.signer = SigningKey(forge.STRANGER.secret, forge.DELEGATE.delegation)


@attack(SignatureError, on="squash")
def a_squash_of_another_run_by_a_delegate(v: Version) -> None:
    v.manifest["run"] = "f" * 32


@attack(SignatureError, on="squash")
def a_version_by_a_delegate(v: Version) -> None:
    v.trusted = forge.DELEGATE


@attack(SignatureError, on="squash")
def an_anchor_by_a_delegate(v: Version) -> None:
    v.manifest |= {"kind": "anchor", "base": None}


@attack(SignatureError, on="squash")
def a_version_without_a_signature(v: Version) -> None:
    v.trusted = None


@attack(SignatureError, on="squash")
def a_version_signed_by_a_stranger(v: Version) -> None:
    v.trusted = forge.STRANGER


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


@attack(UnsupportedError, on="squash")
def a_signature_with_another_behind_it(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] + block_of(v))


@attack(UnsupportedError, on="squash")
def a_signature_with_a_record_behind_it(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key] + record_of(v))


@attack(FormatError, on="squash")
def a_signature_cut_short(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key][:-1])


@attack(SignatureError, on="squash")
def a_signature_without_its_delegation(v: Version) -> dict[str, bytes]:
    return with_manifest(v, v.objects()[v.key][:-96])


@attack(SignatureError, on="squash")
def a_signature_of_zeros(v: Version) -> dict[str, bytes]:
    return with_manifest(v, record_of(v) + bytes(192))


@attack(FormatError, on="squash")
def a_signature_that_is_rubbish(v: Version) -> dict[str, bytes]:
    return with_manifest(v, record_of(v) + b"signed, honestly\n")


@attack(UnsupportedError, on="squash")
def a_signature_of_a_megabyte(v: Version) -> dict[str, bytes]:
    return with_manifest(v, record_of(v) + bytes(1 << 20))


@attack(FormatError)
def a_signature_that_is_rubbish_where_nobody_asks(v: Version) -> dict[str, bytes]:
    return with_manifest(v, record_of(v) + b"signed, honestly\n")


@attack(RIGHT)
def a_signature_by_a_stranger_where_nobody_asks(v: Version) -> None:
    v.signer = forge.STRANGER


# -- hints ---------------------------------------------------------------------------------------------------------


def with_head(v: Version, head: bytes) -> dict[str, bytes]:
    return v.objects() | {"head": head}


def with_start(v: Version, name: bytes) -> dict[str, bytes]:
    """Weights of the base are said to be this version."""
    return v.objects() | {f"starts/{v.manifest['base']['digest']}": name}


@attack(RIGHT)
def a_head_that_is_empty(v: Version) -> dict[str, bytes]:
    return with_head(v, b"")


@attack(RIGHT)
def a_head_that_is_not_a_number(v: Version) -> dict[str, bytes]:
    return with_head(v, b"../../3")


@attack(RIGHT)
def a_head_that_is_negative(v: Version) -> dict[str, bytes]:
    return with_head(v, b"-1")


@attack(RIGHT)
def a_head_in_digits_of_another_script(v: Version) -> dict[str, bytes]:
    return with_head(v, "\uff13".encode())


@attack(RIGHT)
def a_head_beyond_2_to_the_53(v: Version) -> dict[str, bytes]:
    return with_head(v, b"9" * 32)


@attack(RIGHT)
def a_head_of_a_hundred_megabytes(v: Version) -> dict[str, bytes]:
    return with_head(v, b"9" * 100_000_000)


@attack(RIGHT)
def a_head_that_names_a_version_that_is_not_there(v: Version) -> dict[str, bytes]:
    return with_head(v, b"4000")


@attack(RIGHT)
def a_head_that_lags(v: Version) -> dict[str, bytes]:
    return with_head(v, b"0")


@attack(RIGHT, fresh=True)
def a_head_that_lags_for_one_who_holds_nothing(v: Version) -> dict[str, bytes]:
    return with_head(v, b"1")


@attack(FormatError)
def a_head_that_names_rubbish(v: Version) -> dict[str, bytes]:
    return with_head(v, b"9") | {"manifests/0000000000000009": b"rubbish\n"}


@attack(RIGHT, fresh=True)
def a_start_that_names_another_version(v: Version) -> dict[str, bytes]:
    return with_start(v, b"1")


@attack(RIGHT, fresh=True)
def a_start_in_the_middle_of_an_epoch_with_a_history(v: Version) -> dict[str, bytes]:
    return with_start(v, b"2")


@attack(RIGHT, fresh=True)
def a_start_that_names_the_version_after(v: Version) -> dict[str, bytes]:
    return with_start(v, b"3")


@attack(RIGHT, fresh=True)
def a_start_that_names_a_version_that_is_not_there(v: Version) -> dict[str, bytes]:
    return with_start(v, b"77")


@attack(RIGHT, fresh=True)
def a_start_that_is_not_a_number(v: Version) -> dict[str, bytes]:
    return with_start(v, b"two")


@attack(RIGHT, fresh=True)
def a_start_beyond_2_to_the_53(v: Version) -> dict[str, bytes]:
    return with_start(v, b"9" * 32)


@attack(RIGHT, fresh=True)
def a_start_that_names_rubbish(v: Version) -> dict[str, bytes]:
    return with_start(v, b"77") | {"manifests/0000000000000077": b"rubbish\n"}


# -- the layout ----------------------------------------------------------------------------------------------------


def tensors(v: Version) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(forge.sample("anchor").layout.data)
    return table


def entry(table: dict[str, Any], name: str) -> dict[str, Any]:
    return next(t for t in table["tensors"] if t["name"] == name)


@attack(NotFoundError, on="anchor")
def a_layout_that_is_not_there(v: Version) -> None:
    v.set_layout("0" * 64)


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
def a_layout_cut_short(v: Version) -> None:
    forge.new_layout(v, forge.sample("anchor").layout.data[:-1])


@attack(FormatError, on="anchor")
def a_layout_with_a_newline(v: Version) -> None:
    forge.new_layout(v, forge.sample("anchor").layout.data + b"\n")


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


@attack(FormatError, on="anchor")
def a_layout_nested_a_hundred_thousand_deep(v: Version) -> None:
    forge.new_layout(v, b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@attack(UnsupportedError, on="anchor")
def a_layout_whose_format_is_nested_as_deep_as_python_reads(v: Version) -> None:
    forge.new_layout(v, b'{"format":' + b"[" * 400 + b"]" * 400 + b"}")


@attack(UnsupportedError, on="anchor")
def a_layout_of_an_unknown_format(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"format": "pulse-layout/2"})


@attack(UnsupportedError, on="anchor")
def a_layout_of_the_second_draft(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"format": "pulse-layout/1-draft-2"})


@attack(UnsupportedError, on="anchor")
def a_layout_with_one_more_field(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"strides": []})


@attack(UnsupportedError, on="anchor")
def a_tensor_with_one_more_field(v: Version) -> None:
    table = tensors(v)
    entry(table, "main")["scales"] = "doubles"
    forge.new_layout(v, table)


@attack(FormatError, on="anchor")
def a_layout_without_tensors(v: Version) -> None:
    forge.new_layout(v, {"bundles": [], "format": layouts.FORMAT, "ties": {}})


@attack(FormatError, on="anchor")
def a_layout_whose_tensors_are_a_number(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"tensors": 5})


@attack(FormatError, on="anchor")
def a_tensor_that_is_a_list(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"tensors": [[]]})


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


@attack(FormatError, on="anchor")
def an_alias_of_nothing(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"ties": {"head": "nobody"}})


@attack(FormatError, on="anchor")
def an_alias_of_an_alias(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"ties": {"head": "main", "tail": "head"}})


@attack(FormatError, on="anchor")
def an_alias_that_is_a_tensor_itself(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"ties": {"embed": "main"}})


@attack(FormatError, on="anchor")
def an_alias_of_a_list(v: Version) -> None:
    forge.new_layout(v, tensors(v) | {"ties": {"head": ["main"]}})


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


@attack(StateError, on="anchor")
def ten_thousand_aliases_of_the_last_of_ten_thousand_tensors(v: Version) -> None:
    names = [f"t{i:05d}" for i in range(10_000)]
    specs = [TensorSpec(name, "BF16", (1,)) for name in names]
    forge.new_layout(v, layouts.make(specs, {f"a{i:05d}": names[-1] for i in range(10_000)}).data)


@attack(FormatError, on="big.anchor")
def a_grid_of_a_row_for_each_tile_and_a_part_for_another_layout(v: Version) -> None:
    rows = layouts.make([TensorSpec("main", "BF16", (1 << 14, 16), tuple(range(4, 1 << 14, 4)))])
    forge.new_layout(v, rows.data)
    part_of(v).layout = bytes(32)


# -- what is not one version ---------------------------------------------------------------------------------------


def test_every_prefix_of_a_file_is_refused() -> None:
    target = victim("mixed")
    version = target.target.version.copy()
    whole = [part.write() for part in version.parts if isinstance(part, Part)]
    for length in range(0, len(whole[1]), 29):
        version.parts = [whole[0], whole[1][:length]]
        assert isinstance(target.feed(version.objects()), FormatError)
    assert target.untouched


# A prime number of bytes or bits apart, so that fields of every kind and every bit of a byte are met.
SOME, EVERY = pytest.param(29, id="some"), pytest.param(1, id="every", marks=pytest.mark.slow)


@pytest.mark.parametrize("step", [SOME, EVERY])
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


@pytest.mark.parametrize("step", [SOME, EVERY])
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
    [
        ("history", 29),
        ("inline", 211),
        pytest.param("history", 1, marks=pytest.mark.slow),
        pytest.param("inline", 13, marks=pytest.mark.slow),
    ],
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


@pytest.mark.parametrize("fresh", [False, True], ids=["held", "fresh"])
def test_a_bad_squash_is_gone_round_where_the_patches_are_there(fresh: bool) -> None:
    for how, objects in spoilt_squashes().items():
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
        HostState.empty(layout)
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
from pulsesync.maintain.squash import Squasher
from pulsesync.state.host import HostState

size = 1 << 20
old = np.full(size, 0x3F80, np.uint16)
old[200_000:400_000], old[100:2100] = 0x1000, 0x2000
new = old.copy()
new[100:2100:2] += 1
newer = new.copy()
newer[100:2100:2] += 1
state = HostState(layout.make([TensorSpec("w", "BF16", (size,))]), {"w": old}, {})
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
    done = subprocess.run([sys.executable, "-c", DRIFT], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
