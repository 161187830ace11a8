"""Read the records of a run: fetch them by key, check and remember them, and find the newest version.

Subscriber, Publisher, squash and prune share this. Nothing here changes a run or a weight.
"""

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pulsesync.core.location import without_credentials
from pulsesync.errors import (
    ChainError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    RunChangedError,
    SignatureError,
    StoreError,
    UnsupportedError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import pointer as pointers
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.run import keys, planner
from pulsesync.store import Store, forget
from pulsesync.store.base import layers

DAMAGED = (
    "Nothing of it was applied. Check the disk or store; pulse verify RUN lists all that is damaged. Then restore the "
    "object from a backup, or keep publishing: from the next full checkpoint (anchor) on, workers do not need the "
    "object"
)
DIFFERS = "pulse verify RUN, on another machine, shows whether the version is bad or this machine is"
HINT_BYTES = 32
LOOK_AGAIN_S = 1.5  # a relay remembers for a second what was missing; after this time it asks the store again
CACHE_BYTES = 1 << 34  # bytes of bodies that a cache keeps: those not used for longest are removed first
MAX_PROBES = 1 << 16  # versions by which a head may lag

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NUMBER = re.compile(r"\d{16}", re.ASCII)  # as in a key
_KINDS = {"manifests": RecordKind.VERSION, "anchors": RecordKind.ANCHOR, "squashes": RecordKind.SQUASH}


class RunReader:
    """The records of a run. It remembers what it has read: make a new one to see what has changed since."""

    def __init__(
        self,
        store: Store,
        trust: Collection[str] | None,
        avoid: Collection[str] = (),
        epoch_patches: int = EPOCH_PATCHES,
        trust_pointers: Collection[str] = (),
    ) -> None:
        self.store, self.trust, self.avoid = store, trust, avoid
        self._movers = None if trust is None else frozenset((*trust, *trust_pointers))
        self._epoch_patches = epoch_patches
        self._known: dict[str, Manifest | None] = {}
        self.fetched_bytes = 0

    def look(self, key: str) -> Manifest | None:
        """Return the record under a key, None if there is none, or if it is in `avoid`.

        Raises: SignatureError: no trusted key signed it; FormatError: it is not a record, or not of the kind or version
        that the key names.
        """
        return None if key in self.avoid else self.fetched(key)

    def fetched(self, key: str) -> Manifest | None:
        """Return the record under a key, even if it is in `avoid`. Raises: as `look`."""
        if key not in self._known:
            self._known[key] = self._fetch(key)
        return self._known[key]

    def _fetch(self, key: str) -> Manifest | None:
        try:
            record = read_again(self.store, key, lambda: self._read(key))
        except NotFoundError:
            return None
        if record.kind == RecordKind.VERSION and keys.manifest_key(record.version) != key:
            raise ChainError(
                f"{key} in {location_of(self.store)} must be the record of its own version, but is that of version "
                f"{record.version}; restore it from a backup",
                key=key,
                version=record.version,
            )
        return record

    def _read(self, key: str) -> Manifest:
        data = self.store.get(key, 0, manifests.MAX_BYTES + 1)
        self.fetched_bytes += len(data)
        record = manifests.parse(data, self.trust, self._epoch_patches)
        if record.kind != (kind := _KINDS[key.partition("/")[0]]):
            raise FormatError(f"expected a record of the kind {kind}, found one of the kind {record.kind}")
        return record

    def key_of(self, record: Manifest) -> str:
        return next(key for key, known in self._known.items() if known is record)

    def rewound_at(self, version: int) -> int | None:
        """Return the newest version up to one at which the trainer went back, as far as this was read and recorded."""
        known = self._known.get(keys.manifest_key(version))
        return known.rewound_at if known else None

    def version(self, version: int) -> Manifest | None:
        return self.fetched(keys.manifest_key(version))

    def required_version(self, version: int, local: bool = False) -> Manifest:
        """Return the record of a version; local: there is a local version, so the run is known to have had versions.

        Raises: NothingPublishedError: there is no version at all; MissingLinkError: there are others; and as `look`.
        """
        record = self.version(version)
        if record is not None:
            return record
        if not local and self.newest() is None:
            raise self.nothing_published()
        raise MissingLinkError(
            f"version {version} is not published, or was pruned; pulse log lists the versions of a run", version=version
        )

    def newest(self, after: int = -1) -> Manifest | None:
        """Return the newest version after one, None if there is none: that of the head, or a later one if it exists."""
        return self._last(keys.HEAD, "manifests/", self.version, after)

    def pointer(self, name: str, after: int = -1) -> Pointer | None:
        """Return the newest move of a pointer after one, None if there is none; found as the newest version is.

        Raises: SignatureError: no key that may move pointers signed it; FormatError: it is not a pointer; ChainError:
        it belongs to another key.
        """
        return self._last(
            keys.pointer_hint(name), keys.pointer_prefix(name), lambda number: self.move(name, number), after
        )

    def move(self, name: str, number: int) -> Pointer | None:
        """Return one move of a pointer, None if there is none of this number. Raises: as `pointer`."""
        key = keys.pointer_key(name, number)
        try:
            data = self.store.get(key, 0, pointers.MAX_BYTES + 1)
        except NotFoundError:
            return None
        self.fetched_bytes += len(data)
        try:
            pointer = pointers.parse(data, self._movers)
            if (pointer.name, pointer.number) != (name, number):
                raise ChainError(
                    f"the record is move {pointer.number} of pointer {pointer.name!r}, which has another key; restore "
                    "it from a backup"
                )
        except (FormatError, ChainError) as e:
            locate(e, key, self.store)
            raise
        return pointer

    def _last(self, hint: str, prefix: str, look: Callable[[int], T | None], after: int) -> T | None:
        """Return the last of consecutive records after one.

        The hint may be stale, missing or wrong: the search begins there, but does not trust it. If nothing is found,
        all records are listed, unless the hint names `after` or an earlier record, and `after` exists: records have no
        gaps, so the next one would have been found.
        """
        number = head = self._hint(hint)
        found = look(head) if head > after else None
        if found is None:
            number = after + 1
            found = look(number)
        if found is None and (not 0 <= head <= after or self._is_gone(f"{prefix}{after:016d}", head == after, look)):
            number = self._last_listed(prefix)
            found = look(number) if number > after else None
        for _ in range(MAX_PROBES):
            if found is None or (later := look(number + 1)) is None:
                return found
            number, found = number + 1, later
        raise ChainError(
            f"{hint} is more than {MAX_PROBES} records older than the newest; delete {hint} in the store, so that the "
            "newest record is found by a listing",
            key=hint,
        )

    def _is_gone(self, key: str, is_hinted: bool, look: Callable[[int], object]) -> bool:
        """Return whether a record does not exist. One that a hint names is read only if `check_run` has done so."""
        if is_hinted and key not in self._known:
            return False
        try:
            return look(int(key[-16:])) is None
        except (FormatError, ChainError):
            return False  # it exists, and cannot be read

    def check_run(self, run: str, version: int, digest: str, advice: str = planner.START_OVER) -> None:
        """Check that the run is still the one from which a local version was taken: one small read if it is.

        A contradiction is read a second time, a little later: if two relays share an address, one of them may lag by a
        second; and a record without a signature may have been damaged in transit.

        Raises: RunReplacedError, RunForkedError, RunRolledBackError: as `planner.check_unchanged`;
        NothingPublishedError: there is no version any more; FormatError, SignatureError: the record cannot be read.
        """
        try:
            self._check_run(run, version, digest, advice)
        except (RunChangedError, NothingPublishedError):
            time.sleep(LOOK_AGAIN_S)
            again = RunReader(self.store, self.trust, self.avoid, self._epoch_patches)
            again._check_run(run, version, digest, advice)

    def _check_run(self, run: str, version: int, digest: str, advice: str) -> None:
        try:
            published = self.version(version)
        except SignatureError:
            raise
        except (FormatError, ChainError) as e:
            if (key := keys.manifest_key(version)) not in self.avoid:  # it is read once more
                raise
            logger.warning(
                "Could not check that the run is still the same, because %s cannot be read: %s.", key, e.reason
            )
            return
        newest = None
        if published is None:
            newest = self.newest(version) or self.newest()
            if newest is None:
                raise self.nothing_published(
                    f"; the local weights are version {version} of a run that was there before"
                )
        planner.check_unchanged(run, version, digest, published, newest, advice)

    def required_newest(self) -> Manifest:
        """Return the newest version. Raises: NothingPublishedError; others as `newest`."""
        if (newest := self.newest()) is None:
            raise self.nothing_published()
        return newest

    def nothing_published(self, more: str = "") -> NothingPublishedError:
        """Return the error for a location without a version."""
        place = location_of(self.store)
        return NothingPublishedError(
            f"there is no run at {place}: manifests/ has no version{more}. Check the location, and that its "
            "disk or bucket is there; if the trainer has not published the first version yet, wait for it with "
            "sync(model, wait_s=600)",
            key="manifests/",
            location=place,
        )

    def no_anchor(self, goal: Manifest) -> NothingPublishedError:
        """Return the error for a version that is published before the first anchor of its run."""
        place = location_of(self.store)
        return NothingPublishedError(
            f"version {goal.version} is published at {place}, but no anchor from which it can be reached: the first "
            "anchor is probably still being written. Sync again later, or pass wait_s= to wait for it",
            key=keys.anchor_key(goal.epoch),
            location=place,
            version=goal.version,
        )

    def _hint(self, key: str) -> int:
        try:
            return _number(self.store.get(key, 0, HINT_BYTES))
        except NotFoundError:
            return -1

    def _last_listed(self, prefix: str) -> int:
        """Return the last record in a listing, -1 for none: the first may have been pruned, and the hint be lost."""
        try:
            names = (entry.key.removeprefix(prefix) for entry in self.store.list(prefix))
            return max((int(name) for name in names if _NUMBER.fullmatch(name)), default=-1)
        except StoreError as e:
            if e.retryable:
                raise  # a listing that failed does not show that there is nothing
            return -1  # a store that cannot list

    def start(self, digest: str) -> Manifest | None:
        """Return the version whose state has this digest, if there is one: patches can be applied from there."""
        version = self._hint(keys.start_key(digest))
        found = self.version(version) if version >= 0 else None
        if found is None or found.digest != digest:
            return None
        return found if found.history is None or found.at_start else None

    def layout(self, id_: str) -> Layout:
        """Fetch a layout. Raises: NotFoundError; FormatError, if the bytes do not match the id."""
        key = keys.layout_key(id_)
        with forgetting(self.store, key):
            return layouts.parse(self.store.get(key, 0, layouts.MAX_BYTES + 1), expected_id=id_)


def _number(text: bytes) -> int:
    """Read a hint as a version; -1 if it is not a number."""
    digits = text.strip()
    if not digits.isdigit() or (value := int(digits)) > manifests.MAX_VERSION:
        return -1
    return value


def location_of(store: Store) -> str:
    """Return the address or folder of a store, below all wrappers and without credentials, for messages."""
    *_, inner = layers(store)
    named = (getattr(inner, fact, None) for fact in ("url", "folder", "name"))
    return without_credentials(str(next((place for place in named if place), type(inner).__name__)))


def locate(error: FormatError | ChainError | StoreError | VerificationError, key: str, store: Store) -> None:
    """Name the object that an error is about, unless the error names one already, and what to do."""
    if error.key is None:
        error.key = key
        error.at(f"{key} in {location_of(store)}")
    if isinstance(error, FormatError) and not isinstance(error, SignatureError | UnsupportedError):
        error.advise(DAMAGED)
    elif isinstance(error, VerificationError):
        error.advise(DIFFERS)


@contextmanager
def forgetting(store: Store, key: str) -> Iterator[None]:
    """Name the object of an error about bad bytes, and have caches drop the object."""
    try:
        yield
    except FormatError as e:
        forget(store, key)
        locate(e, key, store)
        raise


def read_again(store: Store, key: str, read: Callable[[], T]) -> T:
    """Read and check an object; if its bytes are bad, read it once more, at once and not from a cache.

    Bytes that are bad twice were not damaged on the network: waiting, or fetching other objects again, does not help.

    Raises: FormatError: the bytes were bad both times. Any other error that `read` raises is raised at once.
    """
    try:
        with forgetting(store, key):
            return read()
    except FormatError as e:
        if not isinstance(e, SignatureError):  # which is rarely a matter of transit
            logger.warning("Reading an object once more, in case it was damaged in transit: %s.", e.reason)
    with forgetting(store, key):
        return read()


def describe(record: Manifest) -> dict[str, Any]:
    """Return a record as a row of a table, for people and for --json."""
    return {
        "version": record.version,
        "kind": "root" if record.kind == RecordKind.VERSION and record.base is None else record.kind.value,
        "step": record.step,
        "base": None if record.base is None else record.base.version,
        "epoch": record.epoch,
        "index": record.index,
        "bytes": record.size_bytes,
        "digest": record.digest,
        "rewound_at": record.rewound_at,
        "created": record.created,
    }
