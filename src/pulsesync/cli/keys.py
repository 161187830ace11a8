"""What `pulse keygen` and `pulse delegate` do: keys to sign with, and what others may do on their behalf."""

import json
import os
import re
from pathlib import Path

from pulsesync.cli.options import NothingThereError, Printer, UsageError, open_place, read_key
from pulsesync.errors import PulseError
from pulsesync.format.signature import SigningKey
from pulsesync.run.reader import RunReader


def keygen(file: Path, *, as_json: bool) -> int:
    """Write a new signing key that nobody else can read, print its public key; exit code 0. Raises: PulseError."""
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


def delegate(run: str, public: str, *, key: Path | None, out: Path | None) -> int:
    """Print or write the run key's word that another key may squash this run; exit code 0. Raises: PulseError."""
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
