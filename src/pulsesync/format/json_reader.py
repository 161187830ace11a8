"""JSON that came from elsewhere: whatever is wrong with it is a FormatError, and its size has a limit.

Python's own reader raises another exception for deep nesting, accepts NaN, and takes the last of equal keys.
"""

import json
from typing import Any

from pulsesync.errors import FormatError, LimitError


def read_json(data: bytes, what: str, limit: int | None = None) -> Any:
    """Read a JSON value that has no key twice and no NaN.

    Args:
        data: The text, in UTF-8.
        what: What it is, for messages.
        limit: The most bytes that it may have; None: the caller has seen to that.

    Raises:
        LimitError: it has more bytes; FormatError: it is not JSON, or is nested too deeply to be read.
    """
    if limit is not None and len(data) > limit:
        raise LimitError(f"{what} can have {limit} bytes at most; this has more", limit=limit, value=len(data))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            raise FormatError(f"{what} has a key twice")
        return out

    def refuse(text: str) -> Any:
        raise FormatError(f"{what} contains {text}, which JSON does not allow")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{what} is not JSON: {e}") from e


def load_json(data: bytes, what: str, limit: int | None = None) -> dict[str, Any]:
    """Read a JSON object. Raises: as `read_json`; FormatError: it is another value."""
    out = read_json(data, what, limit)
    if not isinstance(out, dict):
        raise FormatError(f"{what} is not a JSON object")
    return out
