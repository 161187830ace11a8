"""What the commands have in common: types of options, locations and keys, exit codes, and how things are printed."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from pulsesync.errors import NotFoundError, PulseError
from pulsesync.format.signature import Delegation, SigningKey
from pulsesync.store import RetryStore, Store, open_store

Key = Annotated[Path | None, Parameter(env_var="PULSE_KEY")]
Trust = Annotated[str | None, Parameter(env_var="PULSE_TRUST")]
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
    """What was asked for makes no sense: exit code 2."""


class NothingThereError(NotFoundError):
    """There is no such run, or nothing in it that can be reached yet: exit code 3."""


def open_place(location: str) -> Store:
    """Open the store of a run, with the token of the environment where it is behind http. Raises: UsageError."""
    try:
        if not location.startswith(("http://", "https://")):
            return open_store(location)
        from pulsesync.store.http import HttpStore

        return RetryStore(HttpStore(location, read_token(), token_in_clear=_read_switch("PULSE_TOKEN_IN_CLEAR")))
    except ValueError as e:
        raise UsageError(str(e)) from e


def read_token(file: Path | None = None, variable: str = "PULSE_TOKEN") -> str | None:
    """Return the token in a file, else that of an environment variable, else none. Raises: UsageError."""
    if file is None:
        token, where = os.environ.get(variable), variable
    else:
        try:
            token, where = file.read_text(encoding="ascii").strip(), str(file)
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"cannot read a token from {file}: {e}") from e
    if token == "":
        raise UsageError(f"{where} has an empty token: give one, or leave it out to go without authentication")
    return token


def _read_switch(variable: str) -> bool:
    """Return whether an environment variable is 1; not if it is 0 or not there. Raises: UsageError."""
    value = os.environ.get(variable, "0")
    if value not in ("0", "1"):
        raise UsageError(f"{variable} must be 0 or 1; got {value!r}")
    return value == "1"


def read_trust(text: str | None) -> frozenset[str] | None:
    """Public keys: 64 hexadecimal digits, several with commas between, or a file of them. Raises: UsageError."""
    if text is None:
        return None
    keys = [key.strip().lower() for key in text.split(",")]
    if not all(_HEX.fullmatch(key) for key in keys):
        try:
            keys = Path(text).read_text(encoding="ascii").lower().split()
        except (OSError, UnicodeDecodeError) as e:
            raise UsageError(f"--trust {text}: neither a public key of 64 hexadecimal digits nor a file of them") from e
    if not keys or not all(_HEX.fullmatch(key) for key in keys):
        raise UsageError(f"--trust {text}: the file does not hold public keys of 64 hexadecimal digits, one on a line")
    return frozenset(keys)


def read_key(file: Path | None, delegation: Path | None = None) -> SigningKey | None:
    """The signing key in a file, and on whose behalf it signs. Raises: UsageError."""
    if file is None:
        if delegation is not None:
            raise UsageError("--delegation says what a key may do: give the key too, with --key")
        return None
    try:
        return SigningKey(file.read_text(encoding="ascii").strip(), _read_delegation(delegation))
    except OSError as e:
        raise UsageError(f"cannot read the key in {file}: {e.strerror}; pulse keygen makes one") from e
    except ValueError as e:
        raise UsageError(f"{file} holds no signing key: it is 64 hexadecimal digits; pulse keygen makes one") from e


def _read_delegation(file: Path | None) -> Delegation | None:
    if file is None:
        return None
    try:
        table = json.loads(file.read_bytes())
        return Delegation(str(table["by"]), str(table["signature"]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UsageError(f"{file} holds no delegation; pulse delegate writes one") from e


class Printer:
    """Tells what happens: one JSON object a line for machines, or sentences for people."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def tell(self, event: str, text: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}) if self.as_json else text, flush=True)

    def note(self, event: str, text: str, **facts: Any) -> None:
        """The same for what is no result: people find it on stderr."""
        if self.as_json:
            self.tell(event, text, **facts)
        else:
            print(f"pulse: {text}", file=sys.stderr, flush=True)

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
    """Bits a second of a link such as 200mbit. Raises: UsageError."""
    match = _RATE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"{option} {text}: give it as 200mbit or 10gbit")
    return float(match[1]) * float(1000 ** " kmgt".index(match[2].lower() or " "))


def size(count: int) -> str:
    """A number of bytes as people read it: 1,234 or 5.6 MB."""
    if count < 100_000:
        return f"{count:,} bytes"
    power = min(range(2, 5), key=lambda p: abs(len(str(int(count / 1000**p))) - 2))
    return f"{count / 1000**power:.1f} {' KMGT'[power]}B"
