"""Which version workers follow: the one that a pointer names, or the newest; and how far from it they may be.

    read_pointers("s3://bucket/run", trust=public_key)["stable"].version

`Subscriber(follow="stable")` syncs to that version; `maintain.point` moves pointers.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

from pulsesync.core.arguments import optional_whole
from pulsesync.errors import (
    ChainError,
    MissingLinkError,
    NothingPublishedError,
    PulseError,
    RunChangedError,
    RunReplacedError,
    SignatureError,
    StaleWeightsError,
    StateError,
    UnsupportedError,
)
from pulsesync.format.manifest import Manifest
from pulsesync.format.pointer import NAME, Pointer, check_name
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys
from pulsesync.run.reader import RunReader, location_of
from pulsesync.store import Location, Store, open_store

PREFIX = "pointers/"
LONGEST_WAIT_S = 60.0  # between attempts, while a store or a server does not answer
T = TypeVar("T")
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


class FollowTarget:
    """The version that a worker follows, and by how many versions the local one may differ from it.

    It never returns to an earlier move of the pointer than the last that it has seen.

    Args:
        name: The pointer that names the version; None: the newest version is followed.
        max_staleness: By how many versions the local one may differ; None: any number.

    Raises:
        ValueError: the name is not valid, or max_staleness is negative.
    """

    def __init__(self, name: str | None, max_staleness: int | None) -> None:
        self.name = None if name is None else check_name(name)
        self.max_staleness = optional_whole("max_staleness", max_staleness, what="a number of versions")
        self._seen: Pointer | None = None
        self.version: int | None = None  # the version to follow, as it was last found

    def forget(self) -> None:
        """Start over: the run was replaced, or restored from a backup."""
        self._seen = self.version = None

    def find(self, records: RunReader, local: int | None) -> Manifest | None:
        """Return the record of the version to follow; None if the local one is the newest, or if there is no version.

        Raises:
            NothingPublishedError: there is no such pointer yet; MissingLinkError: its version is no longer published;
            RunReplacedError: the pointer belongs to another run than that version; ChainError: it names another state
            of that version; FormatError, SignatureError, StoreError.
        """
        if self.name is not None:
            found: Manifest | None = self._find_pointed(records, self.name)
        else:
            found = records.newest(-1 if local is None else local)
        self.version = found.version if found else local
        return found

    def _find_pointed(self, records: RunReader, name: str) -> Manifest:
        pointer = records.pointer(name, self._seen.number if self._seen else -1) or self._seen
        if pointer is None:
            if records.newest() is None:
                raise records.nothing_published()
            place = location_of(records.store)
            raise NothingPublishedError(
                f"the run at {place} has no pointer {name!r} yet; create it with: pulse point {place} {name} VERSION",
                key=keys.pointer_prefix(name),
                location=place,
            )
        goal = check_target(pointer, records.version(pointer.version))
        self._seen = pointer  # only one whose version exists: without a signature, it may have been damaged in transit
        return goal

    def follow(
        self,
        update: Callable[[], T | None],
        local: Callable[[], int | None],
        interval_s: float,
        on_error: Callable[[PulseError], None] | None = None,
    ) -> Iterator[T]:
        """Call `update` repeatedly, without end, and yield what it returns each time that it did something.

        After a temporary error, which is reported, the update is tried again. That nothing is published is reported
        once.

        Args:
            update: Updates to the version to follow; returns None if that is the local version already.
            local: Returns the local version; None if there is none.
            interval_s: Seconds between updates; after each error in a row the wait doubles, up to a minute.
            on_error: Called with each temporary error.

        Raises:
            SignatureError, UnsupportedError, StateError, RunChangedError: waiting would not help. StaleWeightsError: an
            update fails, and the local version is further from the version to follow than `max_staleness` allows.
        """
        wait_s, waiting = interval_s, False
        while True:
            done = None
            try:
                done = update()
                wait_s, waiting = interval_s, False
            except (SignatureError, UnsupportedError, StateError, RunChangedError):
                raise
            except NothingPublishedError as e:
                if on_error and not waiting:
                    on_error(e)
                wait_s, waiting = interval_s, True
            except PulseError as e:
                if on_error:
                    on_error(e)
                if (version := local()) is not None:  # otherwise there are no weights that could be stale
                    self.check_staleness(version)
                wait_s = min(2 * wait_s, max(interval_s, LONGEST_WAIT_S))
            if done is not None:
                yield done
            else:
                time.sleep(wait_s)

    def check_staleness(self, local: int | None) -> int:
        """Return by how many versions a local one differs from the version that was found last.

        After a pointer was moved back, a worker that still has a newer version is as stale as one with an older one.

        Raises:
            StaleWeightsError: by more than `max_staleness`, or there is no local version.
        """
        version, limit = self.version, self.max_staleness
        if version is None or limit is None:
            return 0
        away = limit + 1 if local is None else abs(version - local)
        if away > limit:
            have = "nothing was synced yet" if local is None else f"the local version is {local}, {away} versions away"
            raise StaleWeightsError(
                f"{have}, but the version to follow is {version}: max_staleness={limit} does not permit using these "
                "weights; sync first",
                version=local,
                newest=version,
                max_staleness=limit,
            )
        return away


def is_about_pointer(error: NothingPublishedError) -> bool:
    """Return whether there is a run, and only the pointer to follow is missing."""
    return (error.key or "").startswith(PREFIX)


def check_target(pointer: Pointer, goal: Manifest | None) -> Manifest:
    """Check that a pointer names this version, with this state.

    Raises:
        MissingLinkError, RunReplacedError, ChainError: as `FollowTarget.find`.
    """
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
