"""What `pulse keygen` and `pulse delegate` do: keys to sign with, and what others may do on their behalf."""

import json
import os
import re
from pathlib import Path

from pulsesync.cli.options import Json, Key, NothingThereError, Printer, UsageError, open_place, read_key
from pulsesync.errors import PulseError
from pulsesync.format.signature import SigningKey
from pulsesync.run.reader import RunReader


def keygen(file: Path, *, as_json: Json = False) -> int:
    """Make a key to sign a run with: the secret goes into FILE, the public key is printed, for workers to --trust.

    Args:
        file: Where the secret goes, readable by you alone. A file that exists is never overwritten.
        as_json: Print one JSON object, for machines.

    Raises:
        PulseError: the file exists, or cannot be written.
    """
    key = SigningKey.generate()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as out:
            out.write(key.secret + "\n")
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError as e:
        raise PulseError(f"{file} is there already, and a key is never overwritten: name another file") from e
    except OSError as e:
        raise PulseError(f"cannot write {file}: {e.strerror}") from e
    Printer(as_json).tell("key", key.public, public=key.public, file=str(file))
    return 0


def delegate(run: str, public: str, *, key: Key = None, out: Path | None = None) -> int:
    """Let another key write squashed patches of a run, and nothing else; prints what that key's owner needs, as JSON.

    Args:
        run: The run, or its id.
        public: Public key of the squasher, as pulse keygen printed it.
        key: File with the run's own signing key.
        out: Write it there instead: the file that pulse squash --delegation reads.

    Raises:
        UsageError: there is no key to sign with, or PUBLIC is not a public key.
        NothingThereError: there is no run, or no version in it yet.
        PulseError: it cannot be written.
    """
    signing_key = read_key(key)
    if signing_key is None:
        raise UsageError("the run's own key speaks here: give it with --key or PULSE_KEY")
    if not re.fullmatch("[0-9a-f]{64}", public):
        raise UsageError(f"{public[:80]!r} is not a public key of 64 hexadecimal digits, as pulse keygen prints it")
    id_ = run
    if not re.fullmatch("[0-9a-f]{32}", run):
        newest = RunReader(open_place(run), {signing_key.public}).newest()
        if newest is None:
            raise NothingThereError(f"there is no run at {run}, or no version in it yet; a delegation is for one run")
        id_ = newest.run
    said = signing_key.delegate(id_, public)
    text = json.dumps({"run": id_, "key": public, "by": said.by, "signature": said.signature})
    if out is None:
        print(text)
        return 0
    try:
        out.write_text(text + "\n", encoding="ascii")
    except OSError as e:
        raise PulseError(f"cannot write {out}: {e.strerror}") from e
    return 0
