"""What the commands share: types of options, locations and keys, exit codes, and how output is printed."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from pulsesync import metrics
from pulsesync.cli import progress
from pulsesync.core.text import without_controls
from pulsesync.errors import FormatError, NotFoundError, PulseError
from pulsesync.format.json_reader import load_json
from pulsesync.format.signature import Delegation, SigningKey, trusted_for_pointers
from pulsesync.store import Store, open_store

Key = Annotated[Path | None, Parameter(env_var="PULSE_KEY")]
Trust = Annotated[str | None, Parameter(env_var="PULSE_TRUST")]
TrustPointers = Annotated[str | None, Parameter(env_var="PULSE_TRUST_POINTERS")]
Flag = Annotated[bool, Parameter(negative=())]
Json = Annotated[bool, Parameter(name="--json", negative=())]
Count = Annotated[int, Parameter(validator=Number(gte=0))]
Natural = Annotated[int, Parameter(validator=Number(gte=1))]
Version = Annotated[int | None, Parameter(validator=Number(gte=0))]
Amount = Annotated[float, Parameter(validator=Number(gte=0))]
Interval = Annotated[Amount, Parameter(name="--interval")]

_HEX = re.compile("[0-9a-f]{64}")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:bit(?:/s)?|bps)", re.IGNORECASE)


class UsageError(PulseError):
    """The command line is invalid: exit code 2."""


class NothingThereError(NotFoundError):
    """There is no such run, or none of its versions can be synced yet: exit code 3."""


def no_run(location: str) -> str:
    """Return the message for a location without a run."""
    return f"there is no run at {location}, or it has no version yet: check the location, or try again later"


def unreachable(location: str) -> str:
    """Return the message for a location without a version that can be reached."""
    return (
        f"there is no run at {location}, or none of its versions can be reached yet: check the location, or try again "
        "later"
    )


def open_place(location: str) -> Store:
    """Open the store of a run. Raises: UsageError."""
    try:
        return open_store(location)
    except ValueError as e:
        raise UsageError(str(e)) from e


def read_token(file: Path | None = None, variable: str = "PULSE_TOKEN") -> str | None:
    """Return the token in a file, or of a variable, or None: for `pulse serve` and `relay`. Raises: UsageError."""
    if file is None:
        token, where = os.environ.get(variable), variable
    else:
        try:
            token, where = file.read_text(encoding="ascii"), str(file)
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is not ASCII"
            raise UsageError(f"cannot read a token from the file that was given for it: {why}") from e
    if token is not None and not token.strip():
        raise UsageError(f"the token in {where} is empty: give one, or remove it to run without authentication")
    return token if token is None else token.strip()


def export_metrics(address: str | None) -> None:
    """Export the metrics of this process until it ends, if --metrics is given. Raises: UsageError, PulseError."""
    if address is None:
        return
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        raise UsageError(f"--metrics must be a port, or a host and a port such as 0.0.0.0:9464; got {address!r}")
    try:
        metrics.export(int(port), host.strip("[]") or "127.0.0.1")
    except ValueError as e:
        raise UsageError(f"--metrics: {e}") from e


def read_keys(trust: str | None, movers: str | None) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Read the public keys of --trust and of --trust-pointers. Raises: UsageError."""
    keys = read_trust(trust)
    return keys, read_movers(movers, keys)


def read_movers(text: str | None, trust: frozenset[str] | None) -> frozenset[str] | None:
    """Read the public keys of --trust-pointers, as `read_trust` does. Raises: UsageError."""
    found = read_trust(text, "--trust-pointers")
    try:
        trusted_for_pointers(found, trust)
    except ValueError as e:
        raise UsageError(str(e).replace("trust_pointers=", "--trust-pointers").replace("trust=", "--trust")) from e
    return found


def read_trust(text: str | None, option: str = "--trust") -> frozenset[str] | None:
    """Read public keys: 64 hexadecimal digits each, separated by commas, or a file of them. Raises: UsageError."""
    if text is None:
        return None
    keys = [key.strip().lower() for key in text.split(",")]
    if not all(_HEX.fullmatch(key) for key in keys):
        try:
            keys = Path(text).read_text(encoding="ascii").lower().split()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(
                f"{option} must be a public key of 64 hexadecimal digits, or a file of them; got {text!r}"
            ) from e
    if not keys or not all(_HEX.fullmatch(key) for key in keys):
        raise UsageError(
            f"{option} {text}: the file must contain public keys of 64 hexadecimal digits, one on each line"
        )
    return frozenset(keys)


def read_key(file: Path | None, delegation: Path | None = None) -> SigningKey | None:
    """Read the signing key in a file, with its delegation if there is one. Raises: UsageError."""
    if file is None:
        if delegation is not None:
            raise UsageError("--delegation belongs to a key: give that key too, with --key or PULSE_KEY")
        return None
    try:
        return SigningKey.from_file(file, _read_delegation(delegation))
    except OSError as e:
        raise UsageError(f"cannot read the key in {file}: {e.strerror}; make one with pulse keygen") from e
    except ValueError as e:
        raise UsageError(str(e)) from e


def _read_delegation(file: Path | None) -> Delegation | None:
    if file is None:
        return None
    try:
        table = load_json(file.read_bytes(), str(file))
        return Delegation(str(table["by"]), str(table["signature"]))
    except (OSError, ValueError, KeyError, FormatError) as e:
        raise UsageError(f"{file} does not contain a delegation; make one with pulse delegate --out") from e


class Printer:
    """Prints what happens: one JSON object a line for machines, or sentences for people."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def tell(self, event: str, text: str, **facts: Any) -> None:
        progress.hide()
        print(json.dumps({"event": event, **facts}) if self.as_json else without_controls(text), flush=True)

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Print something that is not a result: sentences for people go to stderr."""
        if self.as_json:
            self.tell(event, text, **facts)
        else:
            progress.hide()
            print(f"pulse: {without_controls(text)}", file=sys.stderr, flush=True)

    def retries(self, error: PulseError) -> None:
        """Print an error after which the command continues."""
        self.note("error", f"{error}; trying again", kind=type(error).__name__, message=str(error))

    def table(self, rows: Iterable[Mapping[str, Any]]) -> None:
        rows = list(rows)
        if not rows:
            return
        shown = [{key: "-" if value is None else str(value) for key, value in row.items()} for row in rows]
        widths = {key: max(len(key), *(len(row[key]) for row in shown)) for key in shown[0]}
        print("  ".join(f"{key:>{width}}" for key, width in widths.items()))
        for row in shown:
            print("  ".join(f"{row[key]:>{width}}" for key, width in widths.items()).rstrip())


def read_rate(text: str, option: str) -> float:
    """Return the bits per second of a link such as 200mbit. Raises: UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"{option} must be a rate such as 200mbit or 10gbit; got {text}")
    return float(match[1]) * float(1000 ** " kmgt".index(match[2].lower() or " "))


def size(count: float) -> str:
    """Format a number of bytes for people: 1,234 bytes or 5.6 MB."""
    if count < 100_000:
        return f"{count:,.0f} bytes"
    power = min(range(2, 5), key=lambda p: abs(len(str(int(count / 1000**p))) - 2))
    return f"{count / 1000**power:.1f} {' KMGT'[power]}B"
