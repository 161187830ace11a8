"""Verify a run: find its records, and check every byte that they name.

    verifier = RunVerifier("s3://bucket/run", trust=public_key)
    for checked in verifier.run():
        ...                                              # checked.fault is None, or the reason why the record is bad

A store that can list is listed. Otherwise (a plain web server) the versions are read backwards from the newest, and
other records are looked for under the keys that versions name, or that they could have.
"""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

from pulsesync.core.progress import Report, quietly
from pulsesync.errors import (
    ChainError,
    ChecksumError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    PulseError,
    SignatureError,
    StoreError,
    VerificationError,
)
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys, planner
from pulsesync.run.bodies import check_room, fetch_body, stream_bodies
from pulsesync.run.planner import Position
from pulsesync.run.pointers import check_target, list_moves
from pulsesync.run.reader import RunReader, location_of
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import WeightState
from pulsesync.store import Location, Store, open_store

__all__ = ["CheckedRecord", "RunVerifier"]

_Keyed = tuple[str, Manifest]  # a record and its key
_ByVersion = defaultdict[int, list[_Keyed]]

MISSED = 2  # levels without a squashed patch after which higher levels are not searched


@dataclass(frozen=True)
class FoundRecord:
    """A record and its key; the record is None if it cannot be read, and `fault` is the reason."""

    key: str
    record: Manifest | None
    fault: str | None = None


def find_records(records: RunReader, limit: int | None = None, progress: Report = quietly) -> list[FoundRecord]:
    """Return the newest versions of a run, or all, oldest first, with their anchors and squashed patches.

    A record that is bad, or that no trusted key signed, is among them with its fault.

    Raises: StoreError; SignatureError: no trusted key signed the newest version; FormatError, ChainError: it cannot be
    read, and the store cannot list the others.
    """
    listed = _listed(records.store)
    try:
        newest = records.newest()
        if newest is None:
            return []
    except SignatureError:
        raise
    except (FormatError, ChainError):
        if listed is None:
            raise
        newest = None
    if listed is None:
        assert newest is not None
        versions = list(_counted(_walk_back(records, newest, limit), limit or newest.version + 1, progress))
    else:
        named = [key for key in listed if key.startswith("manifests/")]
        named = named[-limit:] if limit else named
        versions = list(_counted((_look(records, key) for key in named), len(named), progress))
    versions = [found for found in versions if found.record or found.fault]  # otherwise it was pruned just now
    good = [found.record for found in versions if found.record]
    first = min((record.epoch for record in good), default=0)
    if listed is None:
        others = list(_guessed(records, good))
    else:
        others = [_look(records, key) for key in listed if not key.startswith("manifests/") and _ends(key) >= first]
    oldest = min((record.version for record in good), default=0) if limit else 0
    others = [found for found in others if found.fault or (found.record and found.record.version >= oldest)]
    return sorted([*versions, *others], key=_order)


def _counted(found: Iterator[FoundRecord], of: int, progress: Report) -> Iterator[FoundRecord]:
    for done, one in enumerate(found, 1):
        yield one
        progress(done, of, "reading records")


def _look(records: RunReader, key: str) -> FoundRecord:
    try:
        return FoundRecord(key, records.look(key))
    except StoreError:
        raise
    except PulseError as e:
        return FoundRecord(key, None, _fault(e, key))


def _order(found: FoundRecord) -> tuple[int, bool, str]:
    """Sort by version; anchors and squashed patches that lead to a version come after it."""
    if found.record is not None:
        return found.record.version, found.record.kind != RecordKind.VERSION, found.key
    return int(found.key[-16:]) if found.key.startswith("manifests/") else -1, True, found.key


def _listed(store: Store) -> list[str] | None:
    """Return all keys of records, in order; None if the store cannot list. Raises: StoreError, if a listing failed."""
    try:
        entries = [entry for prefix in keys.RECORDS for entry in store.list(prefix)]
    except StoreError as e:
        if e.retryable:
            raise  # what would be checked without a listing is less: no pointers
        return None
    return [entry.key for entry in entries if keys.is_record(entry.key)]


def _walk_back(records: RunReader, newest: Manifest, limit: int | None) -> Iterator[FoundRecord]:
    last = max(newest.version - limit, -1) if limit else -1
    for version in range(newest.version, last, -1):
        found = _look(records, keys.manifest_key(version))
        if found.record is None and not found.fault:
            return  # earlier versions were pruned
        yield found


def _guessed(records: RunReader, versions: list[Manifest]) -> Iterator[FoundRecord]:
    """Yield anchors and squashed patches of these versions, under every key that one could have."""
    starts = sorted({record.starts for record in versions if record.at_start})
    named = {record.anchor for record in versions if record.anchor is not None}
    for epoch in sorted(named.union(starts)):
        yield _look(records, keys.anchor_key(epoch))
    missed = 0
    for level in range(planner.MAX_LEVEL + 1):
        numbers = [(epoch >> level) - 1 for epoch in starts if epoch and epoch % (1 << level) == 0]
        found = [_look(records, keys.squash_key(level, number)) for number in numbers]
        yield from found
        missed = 0 if any(one.record for one in found) else missed + 1
        if missed == MISSED:
            return


def _ends(key: str) -> int:
    """Return the epoch that begins at the version to which an anchor or squashed patch leads."""
    kind, *level, number = key.split("/")
    return int(number) if kind == "anchors" else (int(number) + 1) << int(level[0])


@dataclass(frozen=True)
class CheckedRecord:
    """A record that was checked, with everything that it names."""

    key: str
    record: Manifest | Pointer | None
    fault: str | None
    blocked: bool = False  # whether the fault is only that a record before it is bad, so that it could not be checked


class RunVerifier:
    """Replays a run in memory: every version from the one before it, compared with every anchor and squashed patch.

    It needs memory for one state, and disk space for one anchor in the temporary folder.

    Args:
        location: A path or URL of the run, or a store.
        trust: As for a `Subscriber`.
        trust_pointers: As for a `Subscriber`.
        progress: Called with how many records were read, of how many, and what is done, while they are read.

    Raises:
        NotFoundError: there is no run; StoreError; SignatureError: no trusted key signed its newest version;
        FormatError, ChainError: that cannot be read, and the store cannot list the others.
    """

    _epoch_patches = EPOCH_PATCHES  # as of `Subscriber`

    def __init__(
        self,
        location: Location,
        *,
        trust: str | Collection[str] | None = None,
        trust_pointers: str | Collection[str] | None = None,
        progress: Report = quietly,
    ) -> None:
        self.store = open_store(location)
        self.trust = trusted(trust)
        movers = trusted_for_pointers(trust_pointers, trust)
        self._records = RunReader(self.store, self.trust, epoch_patches=self._epoch_patches, trust_pointers=movers)
        self.found = find_records(self._records, progress=progress)  # all records that will be checked
        if not self.found:
            raise NotFoundError(
                f"there is no run at {location_of(self.store)}, or it has no version yet: check the location, or try "
                "again later",
                key="manifests/",
            )
        self._state: WeightState | None = None
        self._position: Position | None = None
        self._bad: set[int] = set()  # versions that are bad, or could not be checked
        self._files: dict[str, str | None] = {}  # id -> fault

    def run(self) -> Iterator[CheckedRecord]:
        """Check every record, versions in order, and yield each with its fault; a fault in one does not end the check.

        Raises:
            StoreError: the store does not answer, which is no fault of the run.
        """
        anchors: _ByVersion = defaultdict(list)
        squashes: _ByVersion = defaultdict(list)
        for found in self.found:
            if found.record and found.record.kind == RecordKind.ANCHOR:
                anchors[found.record.version].append((found.key, found.record))
            elif found.record and found.record.base and found.record.kind == RecordKind.SQUASH:
                squashes[found.record.base.version].append((found.key, found.record))
        for found in self.found:
            if found.record is None:
                kind, _, number = found.key.rpartition("/")
                if kind == "manifests":
                    self._bad.add(int(number))
                yield CheckedRecord(found.key, None, found.fault)
            elif found.record.kind == RecordKind.VERSION:
                record, version = found.record, found.record.version
                yield from self._version(found.key, record, anchors.pop(version, []), squashes.pop(version, []))
        for key, other in chain(*anchors.values(), *squashes.values()):
            yield CheckedRecord(key, other, "it belongs to a version that is not published, or was pruned")
        yield from self._pointers()

    def _pointers(self) -> Iterator[CheckedRecord]:
        """Check every move of every pointer. Only the version of the newest move must exist."""
        if _listed(self.store) is None:
            return  # without a listing, the names are not known
        for name, numbers in list_moves(self.store).items():
            for number in numbers:
                move = None
                with _noted(keys.pointer_key(name, number)) as faults:
                    move = self._records.move(name, number)
                    goal = self._records.version(move.version) if move else None
                    if move and (goal or number == numbers[-1]):
                        check_target(move, goal)
                yield faults.about(keys.pointer_key(name, number), move)

    def _version(
        self, key: str, record: Manifest, anchors: list[_Keyed], squashes: list[_Keyed]
    ) -> Iterator[CheckedRecord]:
        onward = self._position and record.base and self._position.version == record.base.version
        with _noted(key) as faults:
            if onward:
                self._replay(record)
            else:
                self._position = None
                if record.base is not None and not anchors:
                    faults.blocked = record.base.version in self._bad
                    raise MissingLinkError(f"its base, version {record.base.version}, could not be replayed")
                if not anchors:
                    raise MissingLinkError(
                        "it cannot be reached: it has no base, and its anchor does not exist yet or is lost"
                    )
            self._check_files(record)
        checked = [faults.about(key, record)]
        for at, anchor in anchors:
            with _noted(at) as faults:
                self._check_anchor(anchor, record)
            checked.append(faults.about(at, anchor))
        if self._position is None and anchors and not checked[0].fault:
            checked[0] = CheckedRecord(key, record, "it can be reached only from its anchor, which is bad", True)
        if checked[0].fault and self._position is None:
            self._bad.add(record.version)
        yield from checked
        for at, squash in squashes:
            with _noted(at) as faults:
                faults.blocked = self._position is None and record.version in self._bad
                self._check_squash(squash)
            yield faults.about(at, squash)

    def _replay(self, record: Manifest) -> None:
        assert self._state is not None
        position, self._position = self._position, None  # set again when it is done
        planner.accept(position, record)
        bodies = [fetch_body(self.store, ref, self._state.layout, None)[0] for ref in record.parts]
        self._state.commit(PatchTransaction(self._state).prepare(record, bodies))
        self._position = Position.of(record)

    def _check_anchor(self, anchor: Manifest, record: Manifest) -> None:
        """Check an anchor against its version; if no patch has led to that version, continue from the anchor."""
        if (anchor.run, anchor.digest, anchor.layout) != (record.run, record.digest, record.layout):
            raise VerificationError(
                f"the anchor has digest {anchor.digest[:12]}; its version {record.version} has {record.digest[:12]}",
                version=record.version,
                expected=record.digest,
                actual=anchor.digest,
            )
        if self._state is None or self._state.layout.id != anchor.layout:
            layout = self._records.layout(anchor.layout)
            check_room(self.store, anchor, layout)
            self._state, self._position = WeightState(HostBackend.empty(layout)), None
        bodies = (body for body, _ in stream_bodies(self.store, anchor.parts, self._state.layout))
        if self._position is None:
            AnchorLoader(self._state).join_whole(anchor, bodies)
            self._position = Position.of(record)
        else:
            AnchorLoader(self._state).check_whole(anchor, bodies)

    def _check_squash(self, squash: Manifest) -> None:
        """Decode a squashed patch over its base, which is the current state, and compare it with its version."""
        if self._position is None or self._state is None:
            raise MissingLinkError("its base could not be replayed")
        planner.accept(self._position, squash)
        bodies = [fetch_body(self.store, ref, self._state.layout, None)[0] for ref in squash.parts]
        PatchTransaction(self._state).prepare(squash, bodies)
        version = self._records.version(squash.version)
        if version is not None and version.digest != squash.digest:
            raise VerificationError(
                f"it leads to digest {squash.digest[:12]}; version {version.version} has {version.digest[:12]}",
                version=version.version,
                expected=version.digest,
                actual=squash.digest,
            )

    def _check_files(self, record: Manifest) -> None:
        for file in record.files:
            if file.id not in self._files:
                data = self.store.get(keys.file_key(file.id), 0, file.size + 1)
                same = len(data) == file.size and hashlib.sha256(data).hexdigest() == file.id
                self._files[file.id] = None if same else f"its file {file.name} ({keys.file_key(file.id)}) is damaged"
            if fault := self._files[file.id]:
                raise ChecksumError(fault, expected=file.id)


@dataclass
class _Faults:
    """What was found in a record."""

    first: str | None = None
    blocked: bool = False  # whether a fault, if there is one, is only that a record before it is bad

    def about(self, key: str, record: Manifest | Pointer | None) -> CheckedRecord:
        return CheckedRecord(key, record, self.first, self.blocked and self.first is not None)


@contextmanager
def _noted(key: str) -> Iterator[_Faults]:
    """Note the fault of the record under a key, and continue; that a store does not answer is raised instead."""
    faults = _Faults()
    try:
        yield faults
    except PulseError as e:
        if isinstance(e, StoreError) and not isinstance(e, NotFoundError):
            raise
        faults.first = _fault(e, key)


def _fault(error: PulseError, key: str) -> str:
    """Return the reason why the record under a key is bad; it names an object only if that is another one."""
    named = getattr(error, "key", None)
    return f"{named}: {error.args[0]}" if error.place and named != key else str(error.args[0])
