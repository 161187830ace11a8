"""Builds the documentation site into site/: `make docs` runs it. Every warning is an error.

It lays out the pages (docs_source.py), with those that are made from the code, and has Zensical build them. Zensical's
strict mode stops at a broken link, a missing heading and an unresolved reference. It only prints what mkdocstrings and
griffe find wrong in docstrings, so this script fails for every line that they print.
"""

import re
import subprocess
import sys
from pathlib import Path

from tools.docs_source import ROOT, BrokenSiteError, write_site_source

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
COMPLAINT = re.compile(r"^(griffe|mkdocstrings|warning|error)\b", re.IGNORECASE | re.MULTILINE)
ANOTHER_SITE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?https?://[^\s\">]+")


def build() -> str | None:
    """Build the site. Return what is wrong with it, or None."""
    try:
        write_site_source()
    except BrokenSiteError as e:
        return str(e)
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run(
        [zensical, "build", "--clean", "--strict"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    output = COLOURS.sub("", done.stdout + done.stderr)
    print(output, end="")
    if done.returncode or COMPLAINT.search(output):
        return "the site has warnings, and warnings are errors: see above"
    pages = sorted((ROOT / "site").rglob("*.html"))
    outside = [f"{page.name}: {found}" for page in pages for found in ANOTHER_SITE.findall(page.read_text())]
    return "a page loads something from another site:\n" + "\n".join(outside) if outside else None


if __name__ == "__main__":
    problem = build()
    sys.exit(f"make docs: {problem}" if problem else 0)
