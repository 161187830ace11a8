"""A part of a version that was fetched, with every byte checked against its hash."""

from collections.abc import Mapping
from dataclasses import dataclass

from pulsesync.format import container, patch
from pulsesync.format.layout import Layout
from pulsesync.format.patch import OpenedIndex


@dataclass(frozen=True)
class Body:
    """A fetched part, all of it or some sections, each of which was checked against its hash."""

    index: OpenedIndex
    sections: Mapping[int, memoryview]

    @classmethod
    def of(cls, data: bytes | memoryview, layout: Layout, expected_id: str | None = None) -> "Body":
        """Check a whole part. Raises: FormatError and subclasses."""
        header, sections = container.open_part(data, expected_id)
        return cls(patch.open_index(header, sections[0], layout), dict(enumerate(sections)))
