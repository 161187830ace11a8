"""The bodies of a run: parts put and fetched, whole or by section, checked byte by byte, read again if they are bad."""

import logging
from collections.abc import Collection, Sequence
from itertools import pairwise

from pulsesync.errors import FormatError, NotFoundError, StoreError
from pulsesync.format import container, patch
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_INLINE_BYTES, Manifest, PartRef, inline_part
from pulsesync.format.patch import EncodedPart
from pulsesync.run import keys
from pulsesync.run.reader import read_again
from pulsesync.store import Store, origin_of

SMALL_PART = 1 << 20  # bytes up to which a part is fetched whole, whatever is wanted of it
HEADER_GUESS = 1 << 16  # bytes of a part's front: the header of 1,600 sections
INLINE_BYTES = MAX_INLINE_BYTES  # of parts that a writer puts into a record: all that a reader accepts

logger = logging.getLogger(__name__)


def inline_share(ranks: int = 1) -> int:
    """How many bytes of a record each rank of a team may fill with parts, so that there is room for those of all."""
    return INLINE_BYTES // ranks


def put_body(store: Store, part: EncodedPart, inline_limit: int) -> PartRef:
    """Put a part, unless it has at most so many bytes that it stands in its record; return what the record has of it.

    Raises:
        StoreError.
    """
    inline = inline_part(part.data, inline_limit)
    if inline is not None:
        return inline
    store.put(keys.part_key(part.id), part.data)
    return PartRef(part.id, len(part.data))


def fetch_body(store: Store, ref: PartRef, layout: Layout, wanted: Collection[int] | None) -> tuple[Body, int]:
    """Fetch a part, or those sections in which wanted tiles are, and check every byte; return how many were fetched.

    Of a part that stands in its record nothing is fetched: it came with the record.

    Raises:
        StoreError; FormatError: and branches, if these are not the bytes the id names, not when read again either.
    """
    if ref.data is not None:
        return Body.of(ref.data, layout, ref.id), 0
    key = keys.part_key(ref.id)

    def fetch() -> tuple[Body, int]:
        if wanted is None or ref.size <= SMALL_PART:
            data = fetch_part(store, ref)
            return Body.of(data, layout, ref.id), len(data)
        return _fetch_sections(store, key, ref, layout, wanted)

    return read_again(store, key, fetch)


def fetch_part(store: Store, ref: PartRef) -> bytes:
    """Fetch the bytes of a part, unchecked except for their number. Raises: StoreError; FormatError."""
    data = store.get(keys.part_key(ref.id), 0, ref.size + 1)
    if len(data) != ref.size:
        raise FormatError(f"part {ref.id[:12]} has other than {ref.size} bytes", part=ref.id)
    return data


def keep_body(store: Store, part: EncodedPart) -> None:
    """Check that the part that a new record names is still there; put it again if not.

    Its bytes may be those of an earlier patch, whose part a prune was about to delete when this one was put.
    """
    key = keys.part_key(part.id)
    try:
        origin_of(store).get(key, 0, 1)
    except NotFoundError:
        logger.info("%s was deleted while the version that names it was made. Putting it again.", key)
        store.put(key, part.data)
    except StoreError as e:
        logger.warning("Could not check that %s is still there: %s", key, e)


def check_room(store: Store, anchor: Manifest, layout: Layout) -> None:
    """Check that an anchor is there and large enough for its layout, before memory is taken for its state.

    A record and a layout of a few hundred bytes can describe a state of any size. For readers that hold no tensors
    with which the layout could be compared. One small request for each part that is an object of its own.

    Raises:
        LimitError: it cannot hold such a state; FormatError: a part is shorter than the record says; StoreError.
    """
    patch.check_fits(layout, anchor.size_bytes)
    for ref in anchor.parts:
        key = keys.part_key(ref.id)
        if ref.data is None and ref.size and not origin_of(store).get(key, ref.size - 1, ref.size):
            raise FormatError(f"part {ref.id[:12]} is shorter than {ref.size} bytes", part=ref.id, key=key)


def _fetch_sections(store: Store, key: str, ref: PartRef, layout: Layout, wanted: Collection[int]) -> tuple[Body, int]:
    front = store.get(key, 0, min(HEADER_GUESS, ref.size))
    if len(front) < (need := container.header_size(front)):
        front = store.get(key, 0, min(need, ref.size))
    header = container.parse_header(front, ref.id)
    if header.file_size != ref.size:
        raise FormatError(f"part {ref.id[:12]} has other than {ref.size} bytes", part=ref.id)
    sections: dict[int, memoryview] = {}
    fetched = len(front)

    def take(numbers: range) -> None:
        nonlocal fetched
        begin, *ends = header.borders[numbers.start : numbers.stop + 1]
        data = memoryview(store.get(key, begin, ends[-1]))
        fetched += len(data)
        for number, (first, last) in zip(numbers, pairwise((begin, *ends)), strict=True):
            sections[number] = data[first - begin : last - begin]
            header.check_section(number, sections[number])

    take(range(1))
    index = patch.open_index(header, sections[0], layout)
    for numbers in _neighbours(sorted(index.sections_of(wanted))):
        take(numbers)
    return Body(index, sections), fetched


def _neighbours(numbers: Sequence[int]) -> list[range]:
    """Ascending numbers as runs of those that follow each other: a request for each."""
    out: list[range] = []
    for number in numbers:
        first = out.pop().start if out and out[-1].stop == number else number
        out.append(range(first, number + 1))
    return out
