"""Writes docs/cli.md, the reference of the `pulse` command, from the docstrings and parameters of the commands.

`make docs` writes it, and a test compares the file with what would be written.
"""

import re
import sys
from pathlib import Path

from pulsesync.cli import HELP
from pulsesync.cli.parser import make_app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
GENERATED = (
    "This page is generated from the commands; `pulse COMMAND --help` shows the same. `make docs` writes it anew."
)
INTRODUCTION = HELP.split("\n\n", 1)[1]


def reference() -> str:
    """Return the text of the page."""
    arguments, sys.argv = sys.argv, ["pulse"]  # cyclopts puts the program's name into the usage of nested commands
    try:
        _, _, commands = make_app().generate_docs(output_format="markdown").partition("\n## pulse ")
    finally:
        sys.argv = arguments
    text = re.sub(r"[ \t]+$", "", f"## pulse {commands}", flags=re.MULTILINE)
    return f"# The `pulse` command\n\n{INTRODUCTION}\n\n{GENERATED}\n\n{text.rstrip()}\n"
