import hashlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.core import threads
from pulsesync.errors import ChecksumError, FormatError, LimitError, UnsupportedError
from pulsesync.format import container

LAYOUT = "ab" * 32
sections_of_bytes = st.lists(st.binary(max_size=50), min_size=1, max_size=6)


def whole(sections: list[bytes]) -> list[list[bytes]]:
    """Sections that are one piece each."""
    return [[section] for section in sections]


def small() -> tuple[str, bytearray]:
    id_, data = container.build(LAYOUT, [[b"index"], [b"pay", b"load"]])
    return id_, bytearray(data)


@given(sections_of_bytes)
def test_sections_come_back(sections: list[bytes]) -> None:
    id_, data = container.build(LAYOUT, whole(sections))
    header, found = container.open_part(data, id_)
    assert [bytes(s) for s in found] == sections
    assert (header.layout, header.id, header.file_size) == (LAYOUT, id_, len(data))


@given(st.lists(st.lists(st.binary(max_size=9), max_size=4), min_size=1, max_size=4))
def test_sections_in_pieces_give_the_same_file(sections: list[list[bytes]]) -> None:
    views = [[memoryview(piece) for piece in pieces] for pieces in sections]
    joined = container.build(LAYOUT, [[b"".join(pieces)] for pieces in sections])
    assert container.build(LAYOUT, views) == container.build(LAYOUT, sections) == joined


def test_a_large_part_is_the_same_from_any_number_of_threads_and_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces = [[bytes([n]) * container.ALONE, b"end"] for n in range(5)]
    parts = []
    for cores in (1, 4):
        monkeypatch.setattr(threads, "default_threads", lambda cores=cores: cores)
        parts.append(container.build(LAYOUT, pieces))
        assert container.open_part(parts[0][1], parts[0][0])[1] == [b"".join(some) for some in pieces]
    assert parts[0] == parts[1]
    assert parts[1][1].readonly


@pytest.mark.parametrize("cores", [1, 4])
def test_damage_in_a_large_part_is_found_by_any_number_of_threads(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "default_threads", lambda: cores)
    id_, data = container.build(LAYOUT, [[bytes(container.ALONE)] for _ in range(5)])
    damaged = bytearray(data)
    damaged[-container.ALONE - 1] ^= 1
    with pytest.raises(ChecksumError) as caught:
        container.open_part(bytes(damaged), id_)
    assert caught.value.section == 3


@given(sections_of_bytes)
def test_the_id_is_the_hash_of_the_header(sections: list[bytes]) -> None:
    id_, data = container.build(LAYOUT, whole(sections))
    assert hashlib.sha256(data[: 44 + 40 * len(sections)]).hexdigest() == id_


@given(sections_of_bytes, st.data())
def test_every_changed_bit_is_found(sections: list[bytes], draw: st.DataObject) -> None:
    id_, data = container.build(LAYOUT, whole(sections))
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    with pytest.raises(FormatError):
        container.open_part(bytes(damaged), id_)


@given(sections_of_bytes, st.data())
def test_every_missing_end_is_found(sections: list[bytes], draw: st.DataObject) -> None:
    id_, data = container.build(LAYOUT, whole(sections))
    with pytest.raises(FormatError):
        container.open_part(data[: draw.draw(st.integers(0, len(data) - 1))], id_)


def test_bytes_behind_the_last_section_are_refused() -> None:
    id_, data = small()
    with pytest.raises(FormatError, match="must have"):
        container.open_part(bytes(data) + b"x", id_)


def test_the_header_alone_is_enough_to_place_and_check_a_section() -> None:
    id_, data = small()
    header = container.parse_header(bytes(data[: 44 + 80]), id_)
    assert header.borders == (124, 129, 136)
    header.check_section(1, bytes(data[129:136]))


def test_another_section_is_a_checksum_error_that_names_it() -> None:
    id_, data = small()
    data[-1] ^= 1
    with pytest.raises(ChecksumError) as caught:
        container.open_part(bytes(data), id_)
    assert (caught.value.part, caught.value.section) == (id_, 1)


def test_another_part_is_a_checksum_error() -> None:
    _, data = small()
    with pytest.raises(ChecksumError, match="but found part"):
        container.open_part(bytes(data), "00" * 32)


def test_other_bytes_at_the_front_are_no_part() -> None:
    _, data = small()
    data[0] ^= 1
    with pytest.raises(FormatError, match="not a pulse part"):
        container.open_part(bytes(data))


@pytest.mark.parametrize(("at", "what"), [(8, "version"), (9, "flags")])
def test_what_this_reader_does_not_know_is_unsupported(at: int, what: str) -> None:
    _, data = small()
    data[at] ^= 1
    with pytest.raises(UnsupportedError, match=what):
        container.open_part(bytes(data))


@pytest.mark.parametrize("count", [0, container.MAX_SECTIONS + 1, 0xFFFF])
def test_too_few_or_too_many_sections_are_refused(count: int) -> None:
    _, data = small()
    data[10:12] = count.to_bytes(2, "little")
    with pytest.raises(LimitError, match="sections"):
        container.open_part(bytes(data) + bytes(40 * 0x10000))


def test_a_section_that_claims_too_much_is_refused() -> None:
    _, data = small()
    data[44:52] = ((1 << 40) + 1).to_bytes(8, "little")
    with pytest.raises(LimitError, match="this part has a larger one"):
        container.parse_header(bytes(data))


@pytest.mark.parametrize("size", [0, 7, 43, 44, 123])
def test_a_header_cut_short_is_refused(size: int) -> None:
    with pytest.raises(FormatError):
        container.parse_header(bytes(small()[1][:size]))


def test_a_part_with_all_the_sections_it_may_have_opens_at_once() -> None:
    _, data = container.build(LAYOUT, [[]] * container.MAX_SECTIONS)
    began = time.process_time()
    container.open_part(data)
    assert time.process_time() - began < 2
