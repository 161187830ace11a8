"""The `pulse` command. Each command is one function in a module of this package, imported when it is called.

`COMMANDS` has what `pulse --help` shows about each command, so that the list needs no other module: it takes 0.05 s of
CPU time, where cyclopts and rich need 0.2 s to show the same. The rest is in the command's function: its options are
the parameters, and its help is the docstring.
"""

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from pulsesync.core.text import printable
from pulsesync.errors import PulseError

HELP = """Usage: pulse COMMAND

Move model weights from trainers to inference workers, bit for bit, at a small fraction of the bytes.

A run is a location: a folder, s3://bucket/prefix, gs://…, az://…, or the https:// address of pulse serve.

Exit codes: 0, success; 1, failure, and one line on stderr gives the reason; 2, invalid command line; 3, there is no \
such run, or it has no version yet: try later; 130, interrupted."""

# Each command, with the first sentence of its docstring; a test compares them.
COMMANDS = {
    "demo": "Train a small policy by reinforcement, with workers in processes of their own that follow its weights.",
    "study": "Show how many weights change from step to step, where, by how much, and what it costs to send them.",
    "plan": "Predict what a run will send, before any training: bytes a sync, seconds, utilisation, bandwidth needed.",
    "publish": "Publish a checkpoint as the next version of a run; the first one starts the run.",
    "follow": "Keep a folder, a vLLM server or an SGLang server at the newest version of a run.",
    "export": "Write the versions of a run as the delta folders that slime, miles and stitch read.",
    "import": "Publish the delta folders of slime, miles, stitch or SkyRL as the versions of a run.",
    "point": "Show the pointers of a run, or move one: all workers that follow it go to the version that it names.",
    "status": "Show a run and its workers at a glance: newest version, last anchor, pointers, and "
    "where each worker is.",
    "doctor": "Check this machine and, if it is given, a location, and say for each check what was "
    "found and what to do.",
    "log": "List the versions of a run, the newest first, with the anchors and squashed patches that lead to them.",
    "inspect": "Show what a run, a version or a part consists of, after checking every byte of what is shown.",
    "verify": "Replay a run and check every hash and digest in it, or find out which version is in a folder.",
    "squash": "Write squashed patches: many versions as one, so that a worker that was away catches "
    "up with fewer bytes.",
    "prune": "Delete old versions that no worker should need; an anchor and every version since it always remain.",
    "keygen": "Make a key to sign a run with: the secret key goes into FILE; the public key, for --trust, is printed.",
    "delegate": "Let another key sign squashed patches of a run, and nothing else; print the delegation as JSON.",
    "serve": "Serve a folder of runs over http, for workers on other machines to read.",
    "relay": "Serve another location through a cache, so that a site fetches each byte from far away only once.",
}
_ELSEWHERE = {  # functions and apps that are not in the module of their command's name
    "demo": "pulsesync_lab.cli.demo:app",
    "study": "pulsesync_lab.cli.study:app",
    "plan": "pulsesync_lab.cli.plan:plan",
    "export": "pulsesync.cli.delta:export",
    "import": "pulsesync.cli.delta:import_",
    "squash": "pulsesync.cli.upkeep:squash",
    "prune": "pulsesync.cli.upkeep:prune",
    "keygen": "pulsesync.cli.keys:keygen",
    "delegate": "pulsesync.cli.keys:delegate",
    "relay": "pulsesync.cli.serve:relay",
}


def main() -> None:
    """Run the command; an error becomes one line and an exit code, see `pulse --help`."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = _call(sys.argv[1:])
        sys.stdout.flush()
    except PulseError as e:
        code = _fail(e)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)


def place_of(command: str) -> str:
    """Return where the function or app of a command is."""
    return _ELSEWHERE.get(command, f"pulsesync.cli.{command}:{command}")


def _call(arguments: Sequence[str]) -> int:
    if not arguments or (arguments[0].startswith("-") and not {"--help", "-h"}.isdisjoint(arguments)):
        print(overview())
        return 0
    from pulsesync.cli.parser import call

    return call(arguments)


def overview() -> str:
    """Return what `pulse --help` shows, as wide as the terminal."""
    import shutil
    from textwrap import fill

    width = min(shutil.get_terminal_size().columns, 120)
    options = {"--help, -h": "Show this, or with a command its options.", "--version": "Show the version."}
    indent = " " * 14
    return "\n".join(
        [
            *(fill(paragraph, width) for paragraph in HELP.split("\n")),
            "\nCommands:",
            *(
                fill(text, width, initial_indent=f"  {name:12}", subsequent_indent=indent)
                for name, text in (COMMANDS | options).items()
            ),
        ]
    )


def _fail(error: PulseError) -> int:
    """Print what went wrong, in one line, and return the exit code for it."""
    from pulsesync.cli.options import NothingThereError, UsageError

    print(f"pulse: {printable(str(error), 1 << 14)}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 3 if isinstance(error, NothingThereError) else 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
