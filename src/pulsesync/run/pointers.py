"""The pointers of a run: names for versions, which workers can follow, and which `maintain.point` moves.

read_pointers("s3://bucket/run", trust=public_key)["stable"].version
"""

import re
from collections.abc import Collection
from typing import Any

from pulsesync.errors import ChainError, MissingLinkError, NothingPublishedError, RunReplacedError
from pulsesync.format.manifest import Manifest
from pulsesync.format.pointer import NAME, Pointer
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.store import Location, Store, open_store

PREFIX = "pointers/"
_KEY = re.compile(rf"{PREFIX}({NAME.pattern})/([0-9]{{16}})")


def read_pointers(
    location: Location,
    *,
    trust: str | Collection[str] | None = None,
    trust_pointers: str | Collection[str] | None = None,
) -> dict[str, Pointer]:
    """Return the newest move of every pointer of a run, by name.

    Args:
        location: A path or URL of the run, or a store.
        trust: As for a `Subscriber`.
        trust_pointers: As for a `Subscriber`.

    Raises:
        SignatureError: no key that may move pointers signed one; FormatError, ChainError: a pointer cannot be read;
        StoreError.
    """
    store = open_store(location)
    reader = RunReader(store, trusted(trust), trust_pointers=trusted_for_pointers(trust_pointers, trust))
    found = {name: reader.pointer(name) for name in list_moves(store)}
    return {name: pointer for name, pointer in found.items() if pointer is not None}


def list_moves(store: Store) -> dict[str, list[int]]:
    """Return the numbers of the moves of every pointer, by name, in order; keys that are not pointers' are ignored."""
    found: dict[str, list[int]] = {}
    for entry in store.list(PREFIX):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


def is_about_pointer(error: NothingPublishedError) -> bool:
    """Return whether there is a run, and only the pointer to follow is missing."""
    return (error.key or "").startswith(PREFIX)


def check_target(pointer: Pointer, goal: Manifest | None) -> Manifest:
    """Check that a pointer names this version, with this state. Raises: as `GoalFinder.find`."""
    named = f"pointer {pointer.name!r} names version {pointer.version}"
    again = f"move it with: pulse point RUN {pointer.name} VERSION"
    at: dict[str, Any] = {"key": keys.pointer_key(pointer.name, pointer.number), "version": pointer.version}
    if goal is None:
        raise MissingLinkError(f"{named}, which is no longer published; {again}", **at)
    if goal.run != pointer.run:
        text = f"{named} of run {pointer.run}, but the location now has run {goal.run}; {again}"
        raise RunReplacedError(text, **at, run=goal.run, expected=pointer.run, actual=goal.run)
    if goal.digest != pointer.digest:
        text = f"{named} with the digest {pointer.digest[:12]}, but the published version has {goal.digest[:12]}"
        raise ChainError(f"{text}; {again}", **at, expected=pointer.digest, actual=goal.digest)
    return goal
