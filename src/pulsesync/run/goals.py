"""Which version a worker goes to: a given one, the one that a pointer names, or the newest; and how far that is."""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from pulsesync.core.arguments import optional_whole
from pulsesync.errors import (
    ChainError,
    NothingPublishedError,
    PulseError,
    RunChangedError,
    SignatureError,
    StaleWeightsError,
    StateError,
    UnsupportedError,
)
from pulsesync.format.manifest import Manifest
from pulsesync.format.pointer import Pointer, check_name
from pulsesync.run import keys
from pulsesync.run.pointers import check_target
from pulsesync.run.reader import RunReader, location_of

LONGEST_WAIT_S = 60.0  # between attempts, while a store or a server does not answer
T = TypeVar("T")

logger = logging.getLogger(__name__)


class LocalVersion(Protocol):
    """The version of some local weights."""

    @property
    def run(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...


class GoalFinder:
    """Finds the version to go to. It never returns to an earlier move of a pointer than the last that it has seen.

    Args:
        pointer: Name of the pointer that names the version; None: the newest version is followed.
        max_staleness: By how many versions the local one may differ from the one to follow; None: any number.

    Raises: ValueError: the name is not valid, or max_staleness is negative.
    """

    def __init__(self, pointer: str | None = None, max_staleness: int | None = None) -> None:
        self.pointer = None if pointer is None else check_name(pointer)
        self.max_staleness = optional_whole("max_staleness", max_staleness, what="a number of versions")
        self._seen: Pointer | None = None
        self.version: int | None = None  # the version to follow, as it was last found
        self.newest: int | None = None  # the newest version that was seen; with a pointer, the one that it names

    def find(self, records: RunReader, local: LocalVersion | None, version: int | None = None) -> Manifest | None:
        """Return the record of a given version, or of the one to follow; None if it is the local one.

        Raises: NothingPublishedError: there is no version, or no such pointer yet; MissingLinkError: the version is not
        published, or was pruned; RunChangedError: the location has another run than the local version, or than a
        pointer; ChainError: a pointer names another state of its version; FormatError, SignatureError, StoreError.
        """
        if local:
            records.check_run(local.run, local.version, local.digest)
        if version is None:
            goal = self._find_followed(records, local.version if local else None)
        else:
            goal = records.required_version(version, local is not None)
        if goal is None:
            if local is None:
                raise records.nothing_published()
            self.newest = max(local.version, self.newest or 0)
            return None
        if local and goal.run != local.run:
            raise ChainError(  # a bad read, or the run was replaced after the check: the next attempt shows which
                f"version {goal.version} belongs to run {goal.run}, but the local version belongs to run {local.run}; "
                "sync again to check which run is there",
                key=keys.manifest_key(goal.version),
                expected=local.run,
                actual=goal.run,
            )
        follows = version is None and self.pointer is not None
        self.newest = goal.version if follows else max(goal.version, self.newest or 0)
        return goal if not local or goal.version != local.version else None

    def start_over(self, change: RunChangedError) -> None:
        """Forget what was seen of a run that was replaced, or restored from a backup."""
        logger.warning("Starting over from an anchor: %s.", change)
        self._seen = self.version = self.newest = None

    def _find_followed(self, records: RunReader, local: int | None) -> Manifest | None:
        """Return the record of the version to follow; None if that is the local one, or if there is no version."""
        if self.pointer is not None:
            found: Manifest | None = self._find_pointed(records, self.pointer)
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

        After a temporary error the update is tried again. That nothing is published is reported once.

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

        Raises: StaleWeightsError: by more than `max_staleness`, or there is no local version.
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
