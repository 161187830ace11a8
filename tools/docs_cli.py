"""Makes the reference of the `pulse` command from the docstrings and parameters of the commands.

`make docs` puts it into the site as cli.md. In a page, `pulse COMMAND --help` is a link to it there.
"""

import re
import sys

from pulsesync.cli import HELP
from pulsesync.cli.parser import make_app

GENERATED = "This page is generated from the commands; `pulse COMMAND --help` shows the same."
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
