"""A griffe extension for the API reference: writes the `Raises:` section of a docstring as a list.

The sections of this package name several errors in one sentence, split by semicolons, or refer to another function. The
parser of griffe wants one error on each line, and warns otherwise.
"""

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"^Raises:\n((?: {4}.*\n?|\n(?= {4}))+)", re.MULTILINE)
NAMES = re.compile(r"^((?:[A-Z]\w*(?:Error|Exit|Interrupt)(?:, | and |$)?)+)(?=:|\.|,|;|$| and)")
NEXT = re.compile(r"(?<=[;.]) (?=[A-Z]\w*Error\b[^:;.]*(?::|;|\.$|$))")


class RaisesAsList(Extension):
    """Rewrites the section wherever griffe meets a docstring."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Called for every object that has been read."""
        if obj.docstring:
            obj.docstring.value = SECTION.sub(_as_list, obj.docstring.value)


def _as_list(section: re.Match[str]) -> str:
    text = " ".join(line.strip() for line in section[1].splitlines() if line.strip())
    items = [item.rstrip(";. ") for item in NEXT.split(text)]
    return "\n".join(["**Raises:**", "", *(f"- {NAMES.sub(_as_code, item)}." for item in items), ""])


def _as_code(names: re.Match[str]) -> str:
    return re.sub(r"\w+(?:Error|Exit|Interrupt)", r"`\g<0>`", names[0])
