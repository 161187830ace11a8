"""Makes the description of the package, which package indexes show, from README.md: a hook of hatchling.

The README links to pages and pictures of the repository by relative paths, which lead nowhere on a package index. The
description keeps the text of such links, leaves such pictures out, and says where the pages are.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_ELSEWHERE = r"(?!https?:|mailto:)"
_PICTURE = re.compile(
    rf"!\[[^\]]*\]\({_ELSEWHERE}[^)\s]*\)|<(?:img|source)\b[^>]*\b(?:src|srcset)=\"{_ELSEWHERE}[^>]*>"
)
_LINK = re.compile(rf"\[([^\[\]]*)\]\({_ELSEWHERE}[^)\s]*\)")
_CODE = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
NOTE = "The pages and files that this text names are in the source distribution, most of them in `docs/`.\n"


def describe(readme: str) -> str:
    """Return the text of a README without links and pictures whose addresses are relative; code stays as it is."""
    pieces = _CODE.split(readme)
    pieces[::2] = [_LINK.sub(r"\1", _PICTURE.sub("", text)) for text in pieces[::2]]
    return f"{''.join(pieces).rstrip()}\n\n{NOTE}"


class ReadmeHook(MetadataHookInterface):
    """Gives the package its description."""

    def update(self, metadata: dict[str, object]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": describe(text)}
