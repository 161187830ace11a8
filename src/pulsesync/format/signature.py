"""Who wrote a record: Ed25519 over its first line, on a second line of the same file.

    key = SigningKey.generate()                        # key.secret goes into a file, key.public to the readers
    data = sign(line, key)
    line = check(data, trust={key.public})

A run's key can let another key write squashed patches, and nothing else: `SigningKey.delegate`.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pulsesync.errors import FormatError, LimitError, SignatureError
from pulsesync.format.layout import load_json

MAX_BYTES = 1 << 10  # of the second line
DELEGATION = "pulse-delegation/1-draft"
_KEY = re.compile("[0-9a-f]{64}")
_SIGNATURE = re.compile("[0-9a-f]{128}")


@dataclass(frozen=True)
class Delegation:
    """The run key's permission for another key to write squashed patches of this run.

    Args:
        by: Public key of the run.
        signature: The run key's signature of the permission, as `SigningKey.delegate` makes it.
    """

    by: str
    signature: str


@dataclass(frozen=True)
class SigningKey:
    """An Ed25519 key to sign with.

    Args:
        secret: 64 hexadecimal digits, as `pulse keygen` writes them.
        delegation: The run key's permission, if this is not the run's own key.

    Raises:
        ValueError: the secret is something else.
    """

    secret: str
    delegation: Delegation | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.secret):
            raise ValueError("a signing key is 64 hexadecimal digits; pulse keygen makes one")

    def __repr__(self) -> str:  # never in a log
        return f"SigningKey(public={self.public!r})"

    @classmethod
    def generate(cls) -> "SigningKey":
        import secrets

        return cls(secrets.token_hex(32))

    @property
    def public(self) -> str:
        """What readers are told to trust: 64 hexadecimal digits."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret)).public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret)).sign(message).hex()

    def delegate(self, run: str, public: str) -> Delegation:
        """Let a key squash a run: its owner passes the result to SigningKey as delegation."""
        return Delegation(self.public, self.sign(_statement(run, public)))


def trusted(keys: str | Collection[str] | None) -> frozenset[str] | None:
    """The public keys to trust, given as one or several; None accepts records without asking who signed them.

    Raises:
        ValueError: no key is given, or something that is not a public key. An empty setting is a mistake in a
            configuration, and must not be taken for the wish to accept everybody's records.
    """
    if keys is None:
        return None
    found = frozenset(key.lower() for key in ([keys] if isinstance(keys, str) else keys))
    if not found or not all(_KEY.fullmatch(key) for key in found):
        shown = ", ".join(repr(key[:80]) for key in sorted(found)) or "none"
        raise ValueError(f"trust must be one or more public keys of 64 hexadecimal digits, or None; got {shown}")
    return found


def _statement(run: str, public: str) -> bytes:
    return _canonical({"format": DELEGATION, "key": public, "kind": "squash", "run": run})


def _canonical(table: dict[str, Any]) -> bytes:
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def sign(line: bytes, key: SigningKey) -> bytes:
    """Return a record with its signature on a second line; line ends with its newline."""
    table: dict[str, Any] = {"key": key.public, "signature": key.sign(line)}
    if key.delegation:
        table["delegation"] = {"by": key.delegation.by, "signature": key.delegation.signature}
    return line + _canonical(table)


def split(data: bytes) -> tuple[bytes, bytes]:
    """Take a record apart into its first line, with the newline, and what follows."""
    end = data.find(b"\n") + 1
    if not end:
        raise FormatError("a record ends with a newline; this one is cut short")
    return data[:end], data[end:]


def check(data: bytes, trust: Collection[str]) -> bytes:
    """Return the first line of a record that a trusted key signed. Nothing of it has been parsed before that.

    Raises:
        SignatureError: there is no signature, it is by another key, or does not fit the line; FormatError: it is not
        written as one.
    """
    line, rest = split(data)
    if not rest:
        raise SignatureError("the record is not signed, and a key to trust was given")
    signature = _parse(rest)
    if not _verify(signature["key"], signature["signature"], line):
        raise SignatureError("the signature does not fit the record", public_key=signature["key"])
    if signature["key"] in trust:
        return line
    said = signature.get("delegation")
    if not said or said["by"] not in trust:
        raise SignatureError(f"signed by {signature['key'][:16]}…, which is not trusted", public_key=signature["key"])
    record = load_json(line, "the record")  # it is signed, by somebody: may that one write this?
    run, kind = record.get("run"), record.get("kind")
    if kind != "squash" or not _verify(said["by"], said["signature"], _statement(str(run), signature["key"])):
        raise SignatureError("the key was not allowed to write this record", public_key=signature["key"])
    return line


def check_form(data: bytes) -> bytes:
    """Return the first line of a record, signed or not, without asking by whom. Raises: FormatError."""
    line, rest = split(data)
    if rest:
        _parse(rest)
    return line


def signer(data: bytes) -> str | None:
    """Return the key that a record names as its signer, None for one that is not signed. It checks no signature."""
    _, rest = split(data)
    return str(_parse(rest)["key"]) if rest else None


def _parse(rest: bytes) -> dict[str, Any]:
    if len(rest) > MAX_BYTES:
        raise LimitError(f"a signature of {len(rest)} bytes; at most {MAX_BYTES} are read", value=len(rest))
    try:
        table = json.loads(rest)
        said = table.get("delegation", {"by": table["key"], "signature": table["signature"]})
        pairs = [(table["key"], _KEY), (table["signature"], _SIGNATURE), (said["by"], _KEY)]
        good = all(isinstance(text, str) and pattern.fullmatch(text) for text, pattern in pairs)
        good = good and isinstance(said["signature"], str) and bool(_SIGNATURE.fullmatch(said["signature"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise FormatError("the second line of the record is not a signature") from e
    known = set(table) <= {"delegation", "key", "signature"} and set(said) == {"by", "signature"}
    if not good or not known or _canonical(table) != rest:
        raise FormatError("the signature of the record is not in canonical form")
    return dict(table)


def _verify(public: str, signature: str, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
