"""Retention: delete the records of old versions, and after a grace period the bodies that no record names any more.

Records are deleted first, so that no worker begins a path that is about to disappear; a worker that is already on it
has the grace period to finish. A list of what will be deleted is written before anything is deleted, so that the next
prune can finish one that dies.
"""

import json
import logging
import secrets
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from pulsesync.core import arguments
from pulsesync.core.progress import Report, quietly
from pulsesync.errors import FormatError, NotFoundError
from pulsesync.format.json_reader import read_json
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys
from pulsesync.run.clock import store_time
from pulsesync.run.keys import PRUNED
from pulsesync.run.pointers import list_moves
from pulsesync.run.reader import RunReader
from pulsesync.store import LocalStore, ObjectEntry, Store

__all__ = ["PruneReport", "prune"]

ORPHAN_HOURS = 24.0  # age after which a body that no record names counts as left over from a crash
HEARTBEAT_HOURS = 7 * 24.0  # after which the heartbeat of a worker is deleted
HOUR = 3600.0
MAX_LIST_BYTES = 1 << 28
LOOK_EVERY = 100  # bodies that are deleted before the store is listed again
LISTED_A_CALL = 1000  # keys in one answer of a store's listing
_BODIES = ("parts/", "files/", "layouts/")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneReport:
    """What a prune did."""

    kept_from: int | None  # the oldest version that is kept; None for an empty run
    newest: int | None
    versions: int  # versions removed
    records: int  # anchors and squashed patches removed
    bodies: int  # bodies deleted
    freed_bytes: int
    pinned_by: str | None = None  # a pointer whose version makes the prune keep more than requested


def prune(
    store: Store,
    *,
    keep_versions: int = 100,
    keep_hours: float = 24.0,
    grace_hours: float = 1.0,
    trust: str | Collection[str] | None = None,
    trust_pointers: str | Collection[str] | None = None,
    progress: Report = quietly,
) -> PruneReport:
    """Delete what no worker should need: see docs/protocol.md, Retention. All times are by the store's clock.

    The newest anchor at or before the oldest version to keep is kept, with every version since: there is always a path.
    The version that a pointer names is kept too. Older moves of a pointer are deleted with the versions they name.

    Raises:
        FormatError, SignatureError: a record, or a list that an earlier prune wrote, cannot be read; StoreError. If it
            is a record that existed at the beginning, nothing was deleted. Lists, and records that appear meanwhile,
            are read later: what was deleted by then stays deleted, and the next prune continues.
    """
    keep_versions = arguments.whole("keep_versions", keep_versions, 1, what="a number of versions")
    keep_hours = arguments.number("keep_hours", keep_hours, what="a number of hours")
    grace_hours = arguments.number("grace_hours", grace_hours, what="a number of hours")
    now_s = store_time(store)
    records = RunReader(store, trusted(trust), trust_pointers=trusted_for_pointers(trust_pointers, trust))
    versions = list(_read(store, records, "manifests/", progress))
    others = [record for prefix in ("anchors/", "squashes/") for record in _read(store, records, prefix, progress)]
    pointers = _pointers(store, records, versions)
    asked = _first_kept(versions, others, keep_versions, now_s - keep_hours * HOUR, ())
    pointed = [pointer.version for pointer, _ in pointers]
    first = _first_kept(versions, others, keep_versions, now_s - keep_hours * HOUR, pointed)
    moves = [(pointer, _old_moves(records, pointer.name, numbers, first)) for pointer, numbers in pointers]
    gone = [one for one in versions if one[1].version < first]
    gone += [one for one in others if (one[1].base or one[1]).version < first]
    doomed = [entry.key for entry, _ in gone]
    deleted = set(doomed)
    left = [record for entry, record in (*versions, *others) if entry.key not in deleted]
    if gone:
        _take_out(store, doomed, [record for _, record in gone], progress)
    for pointer, old in moves:
        if old:  # the hint first, so that no reader begins at a move that is deleted
            store.put(keys.pointer_hint(pointer.name), str(pointer.number).encode())
        for key in old:
            store.delete(key)
    seen = {entry.key for entry, _ in (*versions, *others)}
    bodies, freed = _delete_bodies(store, left, now_s, grace_hours * HOUR, records, seen, progress)
    _delete_heartbeats(store, now_s)
    if isinstance(store, LocalStore):
        store.sweep()
    newest = max((record.version for _, record in versions), default=None)
    taken = sum(record.kind == RecordKind.VERSION for _, record in gone)
    pinned_by = min((pointer.version, pointer.name) for pointer, _ in pointers)[1] if first < asked else None
    return PruneReport(None if newest is None else first, newest, taken, len(gone) - taken, bodies, freed, pinned_by)


def _read(store: Store, records: RunReader, prefix: str, progress: Report) -> Iterator[tuple[ObjectEntry, Manifest]]:
    entries = [entry for entry in store.list(prefix) if keys.is_record(entry.key)]
    for done, entry in enumerate(entries, 1):
        record = records.look(entry.key)
        progress(done, len(entries), f"reading {prefix}")
        if record is not None:  # otherwise another process has just deleted it
            yield entry, record


def _pointers(
    store: Store, records: RunReader, versions: list[tuple[ObjectEntry, Manifest]]
) -> list[tuple[Pointer, list[int]]]:
    """Return the newest move of every pointer of this run, with the numbers of its moves; ignore other runs."""
    runs = {record.run for _, record in versions}
    found = [(records.pointer(name), numbers) for name, numbers in list_moves(store).items()]
    return [(pointer, numbers) for pointer, numbers in found if pointer is not None and pointer.run in runs]


def _old_moves(records: RunReader, name: str, numbers: list[int], first: int) -> list[str]:
    """Return the keys of a pointer's moves before the first whose version is kept; that of the newest always is."""
    gone = takewhile(lambda number: (move := records.move(name, number)) is None or move.version < first, numbers)
    return [keys.pointer_key(name, number) for number in gone]


def _first_kept(
    versions: list[tuple[ObjectEntry, Manifest]],
    others: list[tuple[ObjectEntry, Manifest]],
    keep: int,
    since_s: float,
    pointed: Collection[int],
) -> int:
    """Return the oldest version to keep: that of the newest anchor from which all versions to keep can be reached."""
    if not versions:
        return 0
    wanted = [record.version for entry, record in versions if entry.modified_s >= since_s]
    wanted += [record.version for _, record in versions][-keep:]
    wanted += pointed
    anchors = [record.version for _, record in others if record.kind == RecordKind.ANCHOR]
    return max((version for version in anchors if version <= min(wanted)), default=0)


def _take_out(store: Store, doomed: list[str], gone: list[Manifest], progress: Report) -> None:
    """Write the list of what will be deleted, then delete records, oldest versions first, and the hints at them."""
    named = sorted({key for record in gone for key in _bodies(record)})
    numbers = [record.version for record in gone]
    store.put(f"{PRUNED}{min(numbers)}-{max(numbers)}-{secrets.token_hex(8)}", json.dumps(named).encode())
    for done, key in enumerate(doomed, 1):
        store.delete(key)
        progress(done, len(doomed), "deleting records")
    for record in gone:
        start = keys.start_key(record.digest)
        with suppress(NotFoundError):
            if store.get(start, 0, 32) == str(record.version).encode():
                store.delete(start)


def _listed(store: Store, key: str) -> list[str]:
    """Return the list that an earlier prune wrote. Raises: FormatError."""
    try:
        named = read_json(store.get(key, 0, MAX_LIST_BYTES + 1), key, MAX_LIST_BYTES)
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise FormatError(f"{key} contains something else")
    except FormatError as e:
        raise FormatError(
            f"{key} must be a list of pruned objects, but cannot be read as one; delete it, and prune again", key=key
        ) from e
    return named


def _bodies(record: Manifest) -> Iterator[str]:
    yield keys.layout_key(record.layout)
    for part in record.parts:
        if part.data is None:
            yield keys.part_key(part.id)
    for file in record.files:
        yield keys.file_key(file.id)


def _delete_bodies(
    store: Store,
    left: list[Manifest],
    now_s: float,
    grace_s: float,
    records: RunReader,
    seen: Collection[str],
    progress: Report,
) -> tuple[int, int]:
    """Delete bodies whose records were removed long enough ago, or that never had one; return number and bytes."""
    named = {key for record in left for key in _bodies(record)}
    stored = {entry.key: entry for prefix in _BODIES for entry in store.list(prefix)}
    waiting: set[str] = set()
    due: set[str] = set()
    lists = [entry for entry in store.list(PRUNED) if keys.is_pruned_list(entry.key)]
    for entry in lists:
        listed = _listed(store, entry.key)
        if entry.modified_s > now_s - grace_s:
            waiting.update(listed)
        else:  # but not what was written again since: a version that is being published may name it
            due.update(key for key in listed if key in stored and stored[key].modified_s <= entry.modified_s)
    orphans = {
        key for key, entry in stored.items() if entry.modified_s < now_s - ORPHAN_HOURS * HOUR and key not in waiting
    }
    doomed = [stored[key] for key in sorted(((due - waiting) | orphans) & (stored.keys() - named))]
    deleted: list[ObjectEntry] = []
    some = max(LOOK_EVERY, len(stored) // LISTED_A_CALL)  # so that listing takes no longer than deleting
    for first in range(0, len(doomed), some):
        going = _still_unused(store, doomed[first : first + some], records, seen)
        for entry in going:
            store.delete(entry.key)
        deleted += going
        progress(min(first + some, len(doomed)), len(doomed), "deleting bodies")
    for entry in lists:
        if entry.modified_s <= now_s - grace_s:
            store.delete(entry.key)
    return len(deleted), sum(entry.size_bytes for entry in deleted)


def _delete_heartbeats(store: Store, now_s: float) -> None:
    """Delete the heartbeats of workers that have been silent for a week."""
    for entry in list(store.list(keys.HEARTBEATS)):
        if entry.modified_s < now_s - HEARTBEAT_HOURS * HOUR:
            store.delete(entry.key)


def _still_unused(
    store: Store, doomed: list[ObjectEntry], records: RunReader, seen: Collection[str]
) -> list[ObjectEntry]:
    """Return those of these bodies that no publisher has written again since, and that no new record names.

    The bytes of a patch can recur. Then its publisher writes the body again before it creates the record.
    """
    there = {entry for prefix in _BODIES for entry in store.list(prefix)}
    unseen = [entry.key for prefix in keys.RECORDS for entry in store.list(prefix) if keys.is_record(entry.key)]
    named = {key for record in map(records.look, set(unseen).difference(seen)) if record for key in _bodies(record)}
    going = [entry for entry in doomed if entry in there and entry.key not in named]
    if len(going) < len(doomed):
        logger.info("%d bodies were written again before they were deleted, and are kept.", len(doomed) - len(going))
    return going
