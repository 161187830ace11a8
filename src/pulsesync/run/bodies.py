"""Write and fetch the parts of a run, entire or by section; check every byte, and read again what is bad."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise

from pulsesync.core.threads import read_ahead
from pulsesync.errors import FormatError, NotFoundError, StoreError
from pulsesync.format import container, patch
from pulsesync.format.body import Body
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import MAX_INLINE_BYTES, Manifest, PartRef, inline_part
from pulsesync.format.patch import EncodedPart
from pulsesync.run import keys
from pulsesync.run.reader import locate, read_again
from pulsesync.store import Store, origin_of

SMALL_PART = 1 << 20  # bytes up to which the entire part is fetched, even if only some sections are needed
HEADER_GUESS = 1 << 16  # first bytes of a part that are fetched for its header: enough for 1,600 sections
INLINE_BYTES = MAX_INLINE_BYTES  # bytes of parts that a writer stores in a record: as many as a reader accepts

DOWNLOADS = 2  # parts of an anchor that are fetched concurrently; these, and the one being read, are in memory

logger = logging.getLogger(__name__)


def inline_share(ranks: int = 1) -> int:
    """Return how many bytes of parts each rank of a team may store in a record, so that those of all ranks fit."""
    return INLINE_BYTES // ranks


def put_body(store: Store, part: EncodedPart, inline_limit: int) -> PartRef:
    """Write a part to the store, unless a record may have one so small; return its entry there. Raises: StoreError."""
    if (inline := inline_part(part.data, inline_limit)) is not None:
        return inline
    store.put(keys.part_key(part.id), part.data)
    return PartRef(part.id, len(part.data))


def fetch_body(store: Store, ref: PartRef, layout: Layout, wanted: Collection[int] | None) -> tuple[Body, int]:
    """Fetch a part, or the sections with the wanted tiles, and check every byte; return it and the bytes fetched.

    A part that is stored in its record is not fetched: it came with the record.

    Raises:
        StoreError; FormatError and its subclasses: the bytes do not match the id, and again not when read once more.
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


def stream_bodies(
    store: Store, refs: Sequence[PartRef], layout: Layout, wanted: Collection[int] | None = None
) -> Iterator[tuple[Body, int]]:
    """Yield parts as `fetch_body` returns them, in order; the next ones are fetched while the caller uses one."""
    return ahead(lambda ref: fetch_body(store, ref, layout, wanted), refs)


def ahead(get: Callable[[PartRef], tuple[Body, int]], refs: Sequence[PartRef]) -> Iterator[tuple[Body, int]]:
    """Yield parts in order; `DOWNLOADS` of them are fetched concurrently, while the caller uses another one."""
    with ThreadPoolExecutor(DOWNLOADS, thread_name_prefix="pulse-anchor") as executor:
        jobs = ((ref, [partial(get, ref)]) for ref in refs)
        with closing(read_ahead(executor, jobs, DOWNLOADS)) as coming:
            for _, started in coming:
                yield started.pop().result()  # no name for the future: its error would refer to this frame for ever


def fetch_part(store: Store, ref: PartRef) -> bytes:
    """Fetch the bytes of a part and check only their number. Raises: StoreError; FormatError."""
    data = store.get(keys.part_key(ref.id), 0, ref.size + 1)
    if len(data) != ref.size:
        found = len(data) if len(data) < ref.size else "more"
        raise FormatError(f"the part must have {ref.size} bytes; it has {found}", part=ref.id)
    return data


def keep_body(store: Store, part: EncodedPart) -> None:
    """Check that the part that a new record names is still in the store; write it again if it is not.

    Its bytes may equal those of an earlier patch, whose part a prune was about to delete when this one was written.
    """
    key = keys.part_key(part.id)
    try:
        origin_of(store).get(key, 0, 1)
    except NotFoundError:
        logger.info("%s was deleted while the version that names it was written. Writing it again.", key)
        store.put(key, part.data)
    except StoreError as e:
        logger.warning("Could not check that %s is still in the store: %s", key, e)


def check_room(store: Store, anchor: Manifest, layout: Layout) -> None:
    """Check that an anchor exists and is large enough for its layout, before memory is allocated for its state.

    A record and a layout of a few hundred bytes can describe a state of any size. This is for readers without tensors
    to compare the layout with. It makes one small request for each part that is an object of its own.

    Raises: LimitError: the anchor is too small for such a state; FormatError: a part is shorter than the record states;
    StoreError.
    """
    patch.check_fits(layout, anchor.size_bytes)
    for ref in anchor.parts:
        key = keys.part_key(ref.id)
        if ref.data is None and ref.size and not origin_of(store).get(key, ref.size - 1, ref.size):
            fault = FormatError(f"the part is shorter than {ref.size} bytes", part=ref.id)
            locate(fault, key, store)
            raise fault


def _fetch_sections(store: Store, key: str, ref: PartRef, layout: Layout, wanted: Collection[int]) -> tuple[Body, int]:
    front = store.get(key, 0, min(HEADER_GUESS, ref.size))
    if len(front) < (need := container.header_size(front)):
        front = store.get(key, 0, min(need, ref.size))
    header = container.parse_header(front, ref.id)
    if header.file_size != ref.size:
        raise FormatError(f"the part must have {ref.size} bytes; by its header it has {header.file_size}", part=ref.id)
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
    """Group ascending numbers into runs of consecutive ones: one request for each."""
    out: list[range] = []
    for number in numbers:
        first = out.pop().start if out and out[-1].stop == number else number
        out.append(range(first, number + 1))
    return out
