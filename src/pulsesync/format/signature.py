"""Signatures of records and of moves of pointers: Ed25519 over the bytes, in a block that follows them.

    key = SigningKey.from_file("trainer.key")          # as pulse keygen writes it; readers get key.public
    data = sign(record, key)
    check(record, parse(data[len(record) :]), trust={key.public})

A run's key can let another key write squashed patches, and nothing else: `SigningKey.delegate`. A reader can let a key
move pointers, and nothing else: `trust_pointers`.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pulsesync.core.arguments import shown
from pulsesync.core.extras import needed_for
from pulsesync.errors import FormatError, SignatureError
from pulsesync.format import versions

if TYPE_CHECKING:
    from _typeshed import StrPath
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

DELEGATION = "pulse-delegation/1"
PAIR_BYTES = 32 + 64  # of a public key and a signature; a block is one pair, or two with a delegation
_KEY = re.compile("[0-9a-f]{64}")


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
        ValueError: the secret has another form.
    """

    secret: str
    delegation: Delegation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.secret, str) or not _KEY.fullmatch(self.secret):
            raise ValueError(
                "a signing key must be 64 hexadecimal digits; make one with: pulse keygen FILE, and read it with: "
                "SigningKey.from_file(FILE)"
            )

    def __repr__(self) -> str:  # so that the secret never appears in a log
        return f"SigningKey(public={self.public!r})"

    @classmethod
    def generate(cls) -> "SigningKey":
        import secrets

        return cls(secrets.token_hex(32))

    @classmethod
    def from_file(cls, file: "StrPath", delegation: Delegation | None = None) -> "SigningKey":
        """Read the key in a file that `pulse keygen` wrote. Raises: OSError; ValueError, if it has no signing key."""
        if _KEY.fullmatch(str(file)):
            raise ValueError("a file with a signing key is needed here, and this is a key: pass it to SigningKey()")
        with open(file, "rb") as opened:
            text = opened.read(1 << 12).strip()
        if not _KEY.fullmatch(text.decode("ascii", "replace")):
            raise ValueError(
                f"{file} must contain a signing key of 64 hexadecimal digits and nothing else; make one with: pulse "
                "keygen FILE"
            )
        return cls(text.decode(), delegation)

    @property
    def public(self) -> str:
        """The public key, for `trust` of readers: 64 hexadecimal digits."""
        return self._private().public_key().public_bytes_raw().hex()

    def sign(self, message: bytes) -> str:
        return self._private().sign(message).hex()

    def _private(self) -> "Ed25519PrivateKey":
        with needed_for("signatures"):
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.secret))

    def delegate(self, run: str, public: str) -> Delegation:
        """Let a key squash a run: its owner passes the result to SigningKey as delegation.

        Raises:
            ValueError: `run` is not the id of a run, or `public` not a public key.
        """
        for name, value, digits in (("run", run, 32), ("public", public, 64)):
            if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
                raise ValueError(f"{name} must be {digits} hexadecimal digits; got {shown(value)}")
        return Delegation(self.public, self.sign(_statement(run, public)))


def check_signing_key(key: SigningKey | None) -> SigningKey | None:
    """Check and return a signing key, or None. Raises: TypeError, without what was given: it may be a secret."""
    if key is not None and not isinstance(key, SigningKey):
        raise TypeError(
            f"signing_key must be a SigningKey; got a value of type {type(key).__name__}: read the file of a key with "
            "SigningKey.from_file(FILE)"
        )
    return key


def trusted(keys: str | Collection[str] | None) -> frozenset[str] | None:
    """The public keys to trust, given as one or several; None accepts records with any signature, or none.

    Raises:
        ValueError: no key is given, or something that is not a public key. An empty setting is a mistake in a
            configuration, and must not mean that all records are accepted.
    """
    return None if keys is None else _public_keys("trust", keys)


def trusted_for_pointers(keys: str | Collection[str] | None, trust: str | Collection[str] | None) -> frozenset[str]:
    """The public keys that may sign moves of pointers and nothing else, given as one or several; None: there are none.

    Keys in `trust` may do both.

    Raises:
        ValueError: as `trusted`; there is no `trust`, so that any key could publish; a key is in both.
    """
    if keys is None:
        return frozenset()
    found = _public_keys("trust_pointers", keys)
    if trust is None:
        raise ValueError(
            "trust_pointers= needs trust= as well: without the publisher's public key, versions that any key signed, "
            "or none, would be accepted"
        )
    if both := found & _public_keys("trust", trust):
        raise ValueError(
            f"the key {min(both)} is in both trust= and trust_pointers=; keys in trust= may publish versions and move "
            "pointers, keys in trust_pointers= may only move pointers: name it in one of them"
        )
    return found


def _public_keys(argument: str, keys: str | Collection[str]) -> frozenset[str]:
    given = list(keys) if isinstance(keys, Collection) and not isinstance(keys, str | bytes) else [keys]
    given = [key.strip() if isinstance(key, str) else key for key in given]
    if any(isinstance(key, SigningKey) for key in given):
        raise TypeError(f"{argument} must be public keys; got a signing key: pass key.public")
    if not given or not all(isinstance(key, str) and _KEY.fullmatch(key.lower()) for key in given):
        found = ", ".join(sorted(map(shown, given))) or "none"
        raise ValueError(
            f"{argument} must be one or more public keys of 64 hexadecimal digits, or None; got {found}. Keys in a "
            "file are read by: pathlib.Path(file).read_text().split()"
        )
    return frozenset(key.lower() for key in given)


def _statement(run: str, public: str) -> bytes:
    table = {"format": DELEGATION, "key": public, "kind": "squash", "run": run}
    return json.dumps(table, sort_keys=True, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True)
class Signature:
    """The block after a record: the key that signed it, and optionally its delegation."""

    key: str
    signature: str
    delegation: Delegation | None = None


def sign(record: bytes, key: SigningKey | None) -> bytes:
    """Return a record, or a move of a pointer, followed by its signature if there is a key."""
    if key is None:
        return record
    said = key.delegation
    return record + bytes.fromhex(key.public + key.sign(record) + (said.by + said.signature if said else ""))


def parse(block: bytes) -> Signature | None:
    """Parse a block, without checking the signature; None for an empty block.

    Raises: UnsupportedError, if it is longer than any that this release knows; FormatError, for another length.
    """
    if not block:
        return None
    both = 2 * PAIR_BYTES
    if len(block) > both:
        raise versions.unknown(f"{len(block)} bytes follow the record: a signature of a kind")
    if len(block) not in (PAIR_BYTES, both):
        raise FormatError(f"a signature must have {PAIR_BYTES} bytes, or {both} from a delegate; this has {len(block)}")
    pairs = (block[:PAIR_BYTES], block[PAIR_BYTES:])
    first, then = ((pair[:32].hex(), pair[32:].hex()) for pair in pairs)
    return Signature(*first, Delegation(*then) if pairs[1] else None)


def check(record: bytes, found: Signature | None, trust: Collection[str], squashed_run: str | None = None) -> None:
    """Check that a trusted key signed a record. The record need not have been parsed before.

    Args:
        record: The bytes that are signed.
        found: What follows them.
        trust: The public keys to trust.
        squashed_run: The run in the record, if it is a squashed patch, which a delegate may write.

    Raises:
        SignatureError: there is no signature, it is by another key, or it is not valid for the record.
    """
    if found is None:
        raise SignatureError(
            "the record is not signed, but trust= accepts only what one of its keys signed; nothing of it was applied. "
            "If the trainer does not sign yet, have it publish with signing_key= to a new location: a run that began "
            "without signatures cannot be signed later. If it does, another program has written this record"
        )
    _check_valid(record, found, "record")
    if found.key in trust:
        return
    said = found.delegation
    if not said or said.by not in trust:
        raise SignatureError(
            f"the record is signed by the key {found.key}, which is not trusted; nothing of it was applied. "
            "Compare it with the public key on the trainer's machine, and do not copy it from here: if they are the "
            "same, correct trust=; if not, another program writes to this run, and must be stopped",
            public_key=found.key,
        )
    if squashed_run is None or not _verify(said.by, said.signature, _statement(squashed_run, found.key)):
        raise SignatureError(
            "the delegated key that signed this record was not allowed to write it: it may sign squashed "
            "patches of its own run only",
            public_key=found.key,
        )


def check_move(move: bytes, found: Signature | None, trust: Collection[str]) -> None:
    """Check that one of these keys signed a move of a pointer; a delegate may not. Raises: SignatureError."""
    if found is None:
        raise SignatureError(
            "the move is not signed, but trust= accepts only what one of its keys signed. Move the pointer again with "
            "signing_key= (pulse point --key)"
        )
    _check_valid(move, found, "move")
    if found.key not in trust:
        raise SignatureError(
            f"the move is signed by the key {found.key}, which may not move pointers. Compare it with the public key "
            "on the operator's machine, and do not copy it from here: if they are the same, add it to "
            "trust_pointers=; if not, another program writes to this run, and must be stopped",
            public_key=found.key,
        )


def _check_valid(data: bytes, found: Signature, what: str) -> None:
    if not _verify(found.key, found.signature, data):
        raise SignatureError(
            f"the signature is not valid for this {what}: one of them was changed; restore the {what} from a backup, "
            "and find what changed it",
            public_key=found.key,
        )


def _verify(public: str, signature: str, message: bytes) -> bool:
    with needed_for("signatures"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True
