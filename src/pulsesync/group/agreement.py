"""Rounds in which the ranks of a team agree: each sends a message, and reads those of all, its own among them."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from pulsesync.errors import FormatError
from pulsesync.group.collective import Collective

Result = TypeVar("Result")


def read_each(messages: Sequence[bytes], read: Callable[[bytes], Result]) -> list[Result]:
    """Read the messages of all ranks. Raises: FormatError, which names a rank whose message is malformed."""
    out = []
    for rank, message in enumerate(messages):
        try:
            out.append(read(message))
        except (ValueError, TypeError, LookupError) as e:
            raise FormatError(f"malformed message from rank {rank}: {e}") from e
    return out


def exchange_notes(team: Collective, note: Mapping[str, Any], size: int) -> list[dict[str, Any]]:
    """Send a note of this many bytes to all ranks; return those of all. Raises: GroupError, FormatError."""
    data = json.dumps(note).encode().ljust(size)
    assert len(data) == size, data

    def read(row: bytes) -> dict[str, Any]:
        found = json.loads(row)
        if not isinstance(found, dict) or found.keys() != note.keys():
            raise ValueError("it is not a note of this round")
        return found

    return read_each([row.tobytes() for row in team.gather_rows(np.frombuffer(data, np.uint8))], read)


def describe_fault(fault: str, most: int) -> str:
    """An error for a note, at most this long, in characters that JSON does not escape."""
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in fault)[:most]
