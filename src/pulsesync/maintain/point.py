"""Move a pointer of a run: all workers that follow it sync to the version that it names, newer or older.

    move_pointer("s3://bucket/run", "stable", 120, signing_key=key)

A move is a record that is created if it is absent, numbered after the newest. If two processes move a pointer at the
same time, one succeeds, and the other gets an error with the version that the pointer names now.
"""

import logging
import time
from collections.abc import Collection

from pulsesync.core.arguments import whole
from pulsesync.errors import (
    ConflictError,
    MissingLinkError,
    NotFoundError,
    PointerMovedError,
    SignatureError,
    StoreError,
)
from pulsesync.format import signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import Manifest
from pulsesync.format.pointer import Pointer, check_name
from pulsesync.format.signature import SigningKey, check_signing_key, trusted, trusted_for_pointers
from pulsesync.run import keys, planner
from pulsesync.run.reader import RunReader
from pulsesync.store import Location, open_store

logger = logging.getLogger(__name__)


def move_pointer(
    location: Location,
    name: str,
    version: int,
    *,
    signing_key: SigningKey | None = None,
    trust: str | Collection[str] | None = None,
    trust_pointers: str | Collection[str] | None = None,
) -> Pointer:
    """Move a pointer to a version, or create it if there is none of this name; return its newest move.

    A pointer that names the version already is not changed. A version that no anchor leads to is refused, because a
    new worker could not reach it.

    Args:
        location: A path or URL of the run, or a store.
        name: The name of the pointer, such as "stable".
        version: The version that it names from now on, newer or older than the one before.
        signing_key: Signs the move; required if the run is signed.
        trust: Public keys whose records are accepted; None: that of the signing key, if one is given.
        trust_pointers: Public keys whose earlier moves are accepted as well; that of the signing key always is.

    Raises:
        PointerMovedError: another process moved the pointer first, and this call changed nothing; MissingLinkError: the
            version is not published, or cannot be reached; NothingPublishedError: there is no run, or no anchor yet;
            SignatureError: the run is signed, and no trusted key signed it; ValueError: `name` is not a valid name;
            FormatError, ChainError; StoreError: if it is `retryable`, the same call can be repeated.
    """
    check_name(name)
    check_signing_key(signing_key)
    version = whole("version", version, what="the number of a version")
    store = open_store(location)
    own = frozenset({signing_key.public}) if signing_key else frozenset[str]()
    if trust is None and own.isdisjoint(trusted(trust_pointers) or ()):
        trust = own or None
    movers, allowed = trusted_for_pointers(trust_pointers, trust) | own, trusted(trust)
    records = RunReader(store, allowed, epoch_patches=EPOCH_PATCHES, trust_pointers=movers)
    goal = _target(records, version, signing_key)
    last = records.pointer(name)
    if last is not None and (last.run, last.version, last.digest) == (goal.run, goal.version, goal.digest):
        return last
    move = Pointer(goal.run, name, last.number + 1 if last else 0, version, goal.digest, int(time.time()))
    return _create(records, move, signing_key)


def _target(records: RunReader, version: int, signing_key: SigningKey | None) -> Manifest:
    """Return the record of a version, if a pointer may name it. Raises: as `move_pointer`."""
    goal = records.required_version(version)
    if signing_key is None and goal.signed_by:
        raise SignatureError(
            "this run is signed; pass signing_key= (pulse point --key) to move its pointers",
            key=keys.manifest_key(version),
        )
    try:
        planner.find_path(None, goal, records.look)
    except MissingLinkError:
        if goal.anchor is None:
            raise records.no_anchor(goal) from None
        raise
    return goal


def _create(records: RunReader, move: Pointer, signing_key: SigningKey | None) -> Pointer:
    line, key, store = move.build(), keys.pointer_key(move.name, move.number), records.store
    try:
        store.create(key, signature.sign(line, signing_key))
    except ConflictError as e:
        winner = records.pointer(move.name)
        if winner != move:  # otherwise it is this move: the answer was lost, and the request was sent again
            version = winner.version if winner else None
            raise PointerMovedError(
                f"another process moved {move.name} to version {version} meanwhile, so it was not moved to "
                f"{move.version}; find out what moved it, and move it again if that was wrong",
                key=key,
                pointer=move.name,
                version=version,
            ) from e
    try:
        store.get(keys.manifest_key(move.version), 0, 1)
    except NotFoundError as e:
        raise MissingLinkError(
            f"version {move.version} was pruned while {move.name} was moved to it; move it to another version",
            key=key,
            version=move.version,
        ) from e
    try:
        store.put(keys.pointer_hint(move.name), str(move.number).encode())
    except StoreError as e:  # the hint may lag; the pointer is moved
        logger.warning("Pointer %s was moved, but the hint to its newest move was not written: %s", move.name, e)
    return move
