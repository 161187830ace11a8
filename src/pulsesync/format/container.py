"""The file of one part: a header of fixed form, then sections. Section 0 is the index, the others contain payloads.

The header lists every section by size and SHA-256; a part's id is the SHA-256 of the header. So a reader that trusts an
id can check the whole file, or just the sections that it fetched, and detects every changed byte.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from pulsesync.core.threads import spread
from pulsesync.errors import ChecksumError, FormatError, LimitError
from pulsesync.format import versions
from pulsesync.kernels.arrays import U8

MAGIC = b"\x89PULSE\n\x1a"  # not text, and damaged by programs that convert line ends
HEADER = struct.Struct("<8sBBH32s")  # magic, version, flags, sections, layout
ENTRY = struct.Struct("<Q32s")  # size, SHA-256 of the stored bytes
MAX_SECTIONS = 1 << 14
MAX_SECTION_BYTES = 1 << 40
ALONE = 1 << 18  # bytes that one thread hashes in the time that another needs to start
# Bytes of a piece that are copied in the time that a numpy call, which releases the GIL, needs to start.
SHORT = 1 << 13


Allocate = Callable[[int], U8]  # allocates this number of bytes


@dataclass(frozen=True)
class PartHeader:
    """The header of a file."""

    layout: str  # SHA-256, hexadecimal
    sections: tuple[tuple[int, bytes], ...]  # size and SHA-256
    id: str

    @property
    def size(self) -> int:
        return HEADER.size + ENTRY.size * len(self.sections)

    @property
    def file_size(self) -> int:
        return self.borders[-1]

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """Where the sections begin in the file, and where the last one ends."""
        return tuple(accumulate((size for size, _ in self.sections), initial=self.size))

    def check_section(self, section: int, data: bytes | memoryview) -> None:
        """Raises: ChecksumError, if these bytes do not match the hash in the header."""
        size, digest = self.sections[section]
        if len(data) != size or hashlib.sha256(data).digest() != digest:
            damaged = f"section {section} of part {self.id[:12]} is damaged: its bytes do not match its hash"
            raise ChecksumError(damaged, part=self.id, section=section)


def new_bytes(size: int) -> U8:
    return np.empty(size, np.uint8)


def build(
    layout: str, sections: Sequence[Sequence[bytes | memoryview]], allocate: Allocate = new_bytes
) -> tuple[str, memoryview]:
    """Return the id and the bytes of a part, whose sections are given in pieces (of bytes). Raises: LimitError.

    Every piece is copied once, into memory that is allocated for the whole file; the returned view is read-only.
    """
    if len(sections) > MAX_SECTIONS:
        raise LimitError(
            f"a part can have {MAX_SECTIONS} sections, not {len(sections)}; spread its tiles over several parts",
            value=len(sections),
        )
    sizes = [sum(map(len, pieces)) for pieces in sections]
    end = HEADER.size + ENTRY.size * len(sections)
    *begins, total = accumulate(sizes, initial=end)
    data = allocate(total)
    jobs = zip(begins, sections, strict=True)
    digests = spread(lambda job: _fill(data, *job), jobs, _threads(sizes))
    HEADER.pack_into(data.data, 0, MAGIC, versions.VERSION, 0, len(sections), bytes.fromhex(layout))
    for number, entry in enumerate(zip(sizes, digests, strict=True)):
        ENTRY.pack_into(data.data, HEADER.size + ENTRY.size * number, *entry)
    return hashlib.sha256(data[:end].data).hexdigest(), data.data.toreadonly()


def _fill(data: U8, begin: int, pieces: Sequence[bytes | memoryview]) -> bytes:
    """Copy a section to its place, and hash it while it is in the cache."""
    at, view = begin, data.data
    for piece in pieces:
        end = at + len(piece)
        if len(piece) <= SHORT:
            view[at:end] = piece
        else:
            data[at:end] = np.frombuffer(piece, np.uint8)
        at = end
    return hashlib.sha256(view[begin:at]).digest()


def header_size(data: bytes | memoryview) -> int:
    """The length of a header, from its first bytes, unchecked. Raises: FormatError, if there are too few."""
    if len(data) < HEADER.size:
        raise FormatError(f"a part must have at least {HEADER.size} bytes; this has {len(data)}")
    return HEADER.size + ENTRY.size * int(HEADER.unpack_from(data)[3])


def parse_header(data: bytes | memoryview, expected_id: str | None = None) -> PartHeader:
    """Read the header at the beginning of a file, or of the bytes that were fetched of it.

    Raises:
        FormatError: this is not a part; UnsupportedError: it is of another format version, or uses flags; LimitError:
        too many or too large sections; ChecksumError: the header does not match the id.
    """
    end = header_size(data)
    magic, version, flags, count, layout = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise FormatError("these bytes are not a pulse part: they do not begin with its magic bytes")
    versions.check_version(version, "the part")
    if flags:
        raise versions.unknown(f"the part has flags {flags:#04x}")
    if not 1 <= count <= MAX_SECTIONS:
        raise LimitError(f"a part must have 1 to {MAX_SECTIONS} sections; this has {count}", value=count)
    if len(data) < end:
        raise FormatError(f"the part is cut off: its header has {end} bytes, and only {len(data)} are there")
    digest = hashlib.sha256(data[:end]).hexdigest()
    if expected_id is not None and digest != expected_id:
        raise ChecksumError(f"expected part {expected_id[:12]}, but found part {digest[:12]}", expected=expected_id)
    sections = tuple(ENTRY.unpack_from(data, HEADER.size + ENTRY.size * i) for i in range(count))
    if any(size > MAX_SECTION_BYTES for size, _ in sections):
        raise LimitError(f"a section can have {MAX_SECTION_BYTES} bytes at most; this part has a larger one")
    return PartHeader(layout.hex(), sections, digest)


def open_part(data: bytes | memoryview, expected_id: str | None = None) -> tuple[PartHeader, list[memoryview]]:
    """Check a whole file and return its sections.

    Raises: as `parse_header`; FormatError, if the file has another length; ChecksumError, if a section is damaged.
    """
    header = parse_header(data, expected_id)
    if len(data) != header.file_size:
        raise FormatError(f"part {header.id[:12]} must have {header.file_size} bytes; it has {len(data)}")
    view = memoryview(data)
    sections = [view[begin:end] for begin, end in pairwise(header.borders)]
    threads = _threads([size for size, _ in header.sections])
    spread(lambda i: header.check_section(i, sections[i]), range(len(sections)), threads)
    return header, sections


def _threads(sizes: Sequence[int]) -> int | None:
    """How many threads hash sections of these sizes: one, unless another has enough to do next to the largest."""
    return None if sum(sizes) - max(sizes, default=0) > ALONE else 1
