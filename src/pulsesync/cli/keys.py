"""`pulse keygen` makes keys to sign with; `pulse delegate` lets another key sign squashed patches."""

import json
import os
import re
from pathlib import Path

from pulsesync.cli.options import Json, Key, NothingThereError, Printer, UsageError, open_place, read_key
from pulsesync.errors import PulseError
from pulsesync.format.signature import SigningKey
from pulsesync.run.reader import RunReader


def keygen(file: Path, *, as_json: Json = False) -> int:
    """Make a key to sign a run with: the secret key goes into FILE; the public key, for --trust, is printed.

    Args:
        file: File for the secret key, which only you can read. A file that exists is never overwritten.
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
        raise PulseError(f"{file} exists already, and a key is never overwritten: give another file") from e
    except OSError as e:
        raise PulseError(f"cannot write {file}: {e.strerror}") from e
    Printer(as_json).tell("key", key.public, public=key.public, file=str(file))
    return 0


def delegate(run: str, public: str, *, key: Key = None, out: Path | None = None) -> int:
    """Let another key sign squashed patches of a run, and nothing else; print the delegation as JSON.

    The owner of the other key passes it to pulse squash --delegation.

    Args:
        run: The run, or its id.
        public: Public key of the process that squashes, as pulse keygen printed it.
        key: File with the run's own signing key.
        out: Write the delegation to this file, for pulse squash --delegation, instead of printing it.

    Raises:
        UsageError: there is no key to sign with, or PUBLIC is not a public key.
        NothingThereError: there is no run, or no version in it yet.
        PulseError: the file cannot be written.
    """
    signing_key = read_key(key)
    if signing_key is None:
        raise UsageError("a delegation is signed with the run's own signing key: give it with --key or PULSE_KEY")
    if not re.fullmatch("[0-9a-f]{64}", public):
        raise UsageError(f"{public[:80]!r} is not a public key of 64 hexadecimal digits, as pulse keygen prints it")
    id_ = run
    if not re.fullmatch("[0-9a-f]{32}", run):
        newest = RunReader(open_place(run), {signing_key.public}).newest()
        if newest is None:
            raise NothingThereError(
                f"there is no run at {run}, or it has no version yet; a delegation is for one run: check the "
                "location, or try again after the first version"
            )
        id_ = newest.run
    delegation = signing_key.delegate(id_, public)
    text = json.dumps({"run": id_, "key": public, "by": delegation.by, "signature": delegation.signature})
    if out is None:
        print(text)
        return 0
    try:
        out.write_text(text + "\n", encoding="ascii")
    except OSError as e:
        raise PulseError(f"cannot write {out}: {e.strerror}") from e
    return 0
