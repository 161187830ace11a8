"""Where the fleet is to be: the version that a named pointer of a run names, and how far from it a worker may be.

    read_pointers("s3://bucket/run", trust=public_key)["stable"].version

`Subscriber(follow="stable")` goes there; `maintain.point` moves pointers.
"""

import re
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

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
from pulsesync.format.signature import trusted
from pulsesync.run import keys
from pulsesync.run.reader import RunReader, location_of
from pulsesync.store import Store, open_store

PREFIX = "pointers/"
LONGEST_WAIT_S = 60.0  # between attempts, while something does not answer
T = TypeVar("T")
_KEY = re.compile(rf"{PREFIX}({NAME.pattern})/([0-9]{{16}})")


def read_pointers(location: str | Store, *, trust: str | Collection[str] | None = None) -> dict[str, Pointer]:
    """Return the newest move of every pointer of a run, by name.

    Args:
        location: A path or URL of the run, or a store.
        trust: As for a `Subscriber`.

    Raises:
        SignatureError: no trusted key signed one of them; FormatError, ChainError: one cannot be read; StoreError.
    """
    store = open_store(location) if isinstance(location, str) else location
    reader = RunReader(store, trusted(trust))
    found = {name: reader.pointer(name) for name in list_moves(store)}
    return {name: pointer for name, pointer in found.items() if pointer is not None}


def list_moves(store: Store) -> dict[str, list[int]]:
    """The numbers of the moves of every pointer, by name, in order; other keys are not those of pointers."""
    found: dict[str, list[int]] = {}
    for entry in store.list(PREFIX):
        if match := _KEY.fullmatch(entry.key):
            found.setdefault(match[1], []).append(int(match[2]))
    return found


class FollowTarget:
    """The version that a worker is to have, and how many versions away from it the local one may be.

    It never goes back to a move before the last that it has seen.

    Args:
        name: The pointer that names the version; None: it is the newest.
        max_staleness: How many versions the local one may be away; None: any number.

    Raises:
        ValueError: that is not a name, or less than none.
    """

    def __init__(self, name: str | None, max_staleness: int | None) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be None or a number of versions; got {max_staleness}")
        self.name = None if name is None else check_name(name)
        self.max_staleness = max_staleness
        self._seen: Pointer | None = None
        self._version: int | None = None  # as it was last found

    def forget(self) -> None:
        """Start over: the run was replaced, or restored from a backup."""
        self._seen = self._version = None

    def find(self, records: RunReader, local: int | None) -> Manifest | None:
        """The record of the version; None if it is the local one, which is the newest, or if there is no version.

        Raises:
            NothingPublishedError: there is no such pointer yet; MissingLinkError: its version is not published any
            more; RunReplacedError: it belongs to another run than that version; ChainError: to another state of it;
            FormatError, SignatureError, StoreError.
        """
        if self.name is not None:
            found: Manifest | None = self._find_pointed(records, self.name)
        else:
            found = records.newest(-1 if local is None else local)
        self._version = found.version if found else local
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
        self._seen = pointer  # not one that leads nowhere, which without a signature may have been damaged on its path
        return goal

    def follow(
        self,
        update: Callable[[], T | None],
        local: Callable[[], int | None],
        interval_s: float,
        on_error: Callable[[PulseError], None] | None = None,
    ) -> Iterator[T]:
        """Update again and again, without end, and yield what an update returns each time that it did something.

        An error that may pass is reported, and tried again; while nothing is published, that is reported once.

        Args:
            update: Goes to the version to follow; None: it is there already.
            local: The version that there is, None if there is none.
            interval_s: Seconds between updates; after an error twice as long each time, up to a minute.
            on_error: Called with each error that may pass.

        Raises:
            SignatureError, UnsupportedError, StateError, RunChangedError: waiting would not help. StaleWeightsError: it
            cannot be updated, and is further from the version to follow than `max_staleness`.
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
                if (version := local()) is not None:  # else there is nothing to use, old or new
                    self.check_staleness(version)
                wait_s = min(2 * wait_s, max(interval_s, LONGEST_WAIT_S))
            if done is not None:
                yield done
            else:
                time.sleep(wait_s)

    def check_staleness(self, local: int | None) -> int:
        """Return how many versions a local one is away from the version that was found last.

        A worker that still has a newer version after its pointer was moved back is as stale as one with an older one.

        Raises:
            StaleWeightsError: more than `max_staleness`, or there is no local version.
        """
        version, limit = self._version, self.max_staleness
        if version is None or limit is None:
            return 0
        away = limit + 1 if local is None else abs(version - local)
        if away > limit:
            have = "nothing was synced yet" if local is None else f"the local version is {local}, {away} versions away"
            raise StaleWeightsError(
                f"{have}, and the version to follow is {version}: max_staleness={limit} does not allow to use these "
                "weights; sync first",
                version=local,
                newest=version,
                max_staleness=limit,
            )
        return away


def is_about_pointer(error: NothingPublishedError) -> bool:
    """Whether there is a run, and the pointer to follow is what is missing."""
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
        raise MissingLinkError(f"{named}, which is not published any more; {again}", **at)
    if goal.run != pointer.run:
        text = f"{named} of run {pointer.run}, and the location now holds run {goal.run}; {again}"
        raise RunReplacedError(text, **at, run=goal.run, expected=pointer.run, actual=goal.run)
    if goal.digest != pointer.digest:
        text = f"{named} with the digest {pointer.digest[:12]}, and the published version has {goal.digest[:12]}"
        raise ChainError(f"{text}; {again}", **at, expected=pointer.digest, actual=goal.digest)
    return goal
