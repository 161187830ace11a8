"""The rules of a run, without I/O: which record may follow a version, and which path leads to one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from pulsesync.errors import ChainError, MissingLinkError, RunForkedError, RunReplacedError, RunRolledBackError
from pulsesync.format import epochs
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.run.keys import anchor_key, manifest_key, squash_key

SEARCH = 64  # epochs that are searched for an anchor, if the one that records name is missing or bad
NEWER = 8  # epochs that are searched for a newer anchor than the one that records name
MORE = 256  # records that a path without an anchor may have more: reading each takes a round trip, 8 s at 30 ms
MORE_BYTES = 1 << 20  # or one for each MiB of the path with the anchor: about what a link transfers in a round trip
MAX_LEVEL = 20  # a squash of 2^20 epochs is 33 million versions


@dataclass(frozen=True)
class Position:
    """The position of a version in its run. All records that lead to a version give the same position."""

    run: str
    version: int
    step: int  # the trainer's
    digest: str
    epoch: int
    index: int
    epoch_patches: int

    @classmethod
    def of(cls, record: Manifest) -> "Position":
        place = record.epoch, record.index, record.epoch_patches
        return cls(record.run, record.version, record.step, record.digest, *place)

    @property
    def at_start(self) -> bool:
        """Whether an epoch starts at this version."""
        return epochs.is_start(self.index, self.epoch_patches)

    @property
    def starts(self) -> int:
        """The epoch that starts at this version, if one does."""
        return epochs.started_by(self.epoch, self.index)


@dataclass(frozen=True)
class SyncPlan:
    """What leads from a position to a version: to undo syncs, or to load an anchor and then apply patches."""

    undo: int = 0  # how many of the last syncs are undone; there are no records then
    anchor: Manifest | None = None
    patches: Sequence[Manifest] = ()

    @classmethod
    def of(cls, path: Sequence[Manifest]) -> "SyncPlan":
        if path and path[0].kind == RecordKind.ANCHOR:
            return cls(anchor=path[0], patches=path[1:])
        return cls(patches=path)


def accept(position: Position | None, record: Manifest) -> None:
    """Check that a record may follow a position.

    Raises: ChainError: the record belongs to another run, or has the wrong index in its epoch; MissingLinkError: it
    does not follow the position.
    """
    if position is not None and record.run != position.run:
        raise _another_run(position, record)
    if record.kind == RecordKind.ANCHOR:
        return
    if record.base is None or position is None:
        raise MissingLinkError(
            f"version {record.version} is a patch, which needs its base version; load an anchor first",
            version=record.version,
        )
    if (record.base.version, record.base.digest) != (position.version, position.digest):
        raise MissingLinkError(
            f"version {record.version} is a patch to version {record.base.version} with digest "
            f"{record.base.digest[:12]}, but the version before it is {position.version} with digest "
            f"{position.digest[:12]}",
            version=record.version,
        ).advise(CHECK)
    if record.kind == RecordKind.SQUASH:
        in_place = position.at_start and record.at_start and record.starts > position.starts
    elif record.index == 1:
        in_place = position.at_start and record.epoch == position.starts
    else:
        in_place = (record.epoch, record.index) == (position.epoch, position.index + 1)
    if not in_place:
        raise ChainError(
            f"version {record.version} has the wrong position in its epoch: it is patch {record.index} of epoch "
            f"{record.epoch}, and version {position.version} before it is patch {position.index} of epoch "
            f"{position.epoch}",
            version=record.version,
        ).advise(CHECK)


def _another_run(position: Position, record: Manifest) -> ChainError:
    return ChainError(
        f"version {record.version} belongs to run {record.run}, but the version before it, {position.version}, to run "
        f"{position.run}",
        version=record.version,
        expected=position.run,
        actual=record.run,
    ).advise(CHECK)


CHECK = "pulse verify RUN shows which records of the run do not fit together"
START_OVER = "follow_replaced=True (pulse follow --follow-replaced) starts over from an anchor of the current run"


def check_unchanged(
    run: str, version: int, digest: str, published: Manifest | None, newest: Manifest | None, advice: str = START_OVER
) -> None:
    """Check that a run is still the one from which a local version, with this digest, was taken.

    published: the record of that version as the store has it now; None if there is none. newest: the newest record in
    the store, which is used only if `published` is None. advice: what to do, for the error's message.

    Raises:
        RunReplacedError, RunForkedError, RunRolledBackError: it is another run. A version that was pruned is no error.
    """
    found = published or newest
    if found is not None and found.run != run:
        raise RunReplacedError(
            f"the location now has run {found.run}, but local version {version} belongs to run {run}; {advice}",
            version=version,
            run=found.run,
            expected=run,
            actual=found.run,
        )
    if published is not None and published.digest != digest:
        raise RunForkedError(
            f"local version {version} has the digest {digest[:12]}, but the published version {version} of the same "
            f"run has {published.digest[:12]}: the run was continued from an earlier version; {advice}",
            version=version,
            run=run,
            expected=digest,
            actual=published.digest,
        )
    if published is None and newest is not None and newest.version < version:
        raise RunRolledBackError(
            f"the newest published version is {newest.version}, but the local version is {version}: the run was rolled "
            f"back; {advice}",
            version=version,
            run=run,
            newest=newest.version,
        )


# The record under a key, if there is one; always of the kind that the key names.
Look = Callable[[str], Manifest | None]


def find_path(position: Position | None, goal: Manifest, look: Look) -> list[Manifest]:
    """Return the records that lead from a position to a version, in order, by the path with the fewest bytes.

    The path from the newest anchor is planned first. A path from the position is read only as far as it has no more
    bytes than that one, and not many more records: a late worker does not read thousands before it takes an anchor.

    Raises: ChainError: the position belongs to another run; MissingLinkError: no published path leads to the version.
    """
    if position is not None and position.run != goal.run:
        raise _another_run(position, goal)
    fault: ChainError = MissingLinkError(
        f"no published path leads to version {goal.version}"
        + (f" from the local version {position.version}" if position else "")
        + ": a record on every path was pruned, is lost or cannot be read",
        version=goal.version,
    ).advise(
        "Restore it from a backup, or keep publishing: the next anchor is a new path. pulse verify RUN names what is "
        "bad"
    )
    follows = position is not None and position.version <= goal.version
    is_late = position is None or (goal.anchor is not None and goal.anchor > _newest_start(position))
    searched = is_late or not follows
    anchored = _from_anchor(goal, look) if searched else None
    if position is not None and follows:
        try:
            if (path := _onward(position, goal, look, anchored)) is not None:
                return path
        except MissingLinkError:
            pass
        except ChainError as e:
            fault = e
    found = anchored if searched else _from_anchor(goal, look)
    if found is None:
        raise fault
    return found


def _from_anchor(goal: Manifest, look: Look) -> list[Manifest] | None:
    """Return the path from the newest anchor from which one leads to a version; None if there is none."""
    for anchor in _anchors(goal, look):
        with suppress(ChainError):
            if (path := _onward(Position.of(anchor), goal, look)) is not None:
                return [anchor, *path]
    return None


def _newest_start(at: Position | Manifest) -> int:
    """Return the newest epoch that starts at a version or before it."""
    return at.starts if at.at_start else at.epoch


def _anchors(goal: Manifest, look: Look) -> Iterator[Manifest]:
    """Yield anchors from which a version can be reached, the newest first.

    Records name the newest anchor that their writer knew of. There may be a newer one, whose writer died before a
    record could name it; and the one that is named may be gone.
    """
    last = _newest_start(goal)
    known = goal.epoch if goal.anchor is None else min(goal.anchor, goal.epoch)
    since = range(last, max(known, last - NEWER), -1)
    to_try = [*since, known, *range(known - 1, max(known - 1 - SEARCH, -1), -1)]
    tried: set[int] = set()
    while to_try:
        epoch = to_try.pop(0)
        anchor = look(anchor_key(epoch)) if epoch not in tried else None
        tried.add(epoch)
        if anchor is None or not anchor.at_start or anchor.starts != epoch or anchor.run != goal.run:
            continue
        if anchor.version <= goal.version:
            yield anchor
        if anchor.anchor is not None and anchor.anchor < epoch:
            to_try.insert(0, anchor.anchor)


def _onward(
    position: Position, goal: Manifest, look: Look, anchored: list[Manifest] | None = None
) -> list[Manifest] | None:
    """Return patches, or squashed patches where there are suitable ones, from one version to a later one.

    Returns None if they have more bytes than a path from an anchor, or are many more records. Where there are no
    squashed patches, their number is known before the first is read.

    Raises:
        MissingLinkError: a version is missing, or does not follow; ChainError: it has the wrong position in its epoch.
    """
    limit = None
    if anchored is not None:
        size_bytes = sum(record.path_bytes for record in anchored)
        limit = size_bytes, len(anchored) + max(MORE, size_bytes // MORE_BYTES)
    if limit and goal.version - position.version > limit[1]:
        start = position.starts if position.at_start else position.epoch + 1
        if next(_squashes(start, _newest_start(goal), look), None) is None:
            return None
    try:
        return _walk(position, goal, look, limit, squashed=True)
    except ChainError:
        return _walk(position, goal, look, limit, squashed=False)


def _walk(
    position: Position, goal: Manifest, look: Look, limit: tuple[int, int] | None, squashed: bool
) -> list[Manifest] | None:
    at, path, size_bytes = position, [], 0
    last = _newest_start(goal)
    while at.version < goal.version:
        record = (_squash(at, last, look) if squashed else None) or look(manifest_key(at.version + 1))
        if record is None:
            raise MissingLinkError(
                f"version {at.version + 1}, on the path to version {goal.version}, is no longer published",
                version=at.version + 1,
            )
        accept(at, record)
        path.append(record)
        size_bytes += record.path_bytes
        if limit and (size_bytes > limit[0] or len(path) > limit[1]):
            return None
        at = Position.of(record)
    if (at.version, at.digest) != (goal.version, goal.digest):
        raise ChainError(
            f"the path to version {goal.version} leads to version {at.version} with digest {at.digest[:12]}; expected "
            f"{goal.digest[:12]}",
            version=goal.version,
            expected=goal.digest,
            actual=at.digest,
        ).advise(CHECK)
    return path


def _squash(at: Position, last: int, look: Look) -> Manifest | None:
    """Return the largest squashed patch that begins at a version and does not lead beyond the start of an epoch."""
    for record in _squashes(at.starts, last, look) if at.at_start else ():
        with suppress(ChainError):  # one that does not fit here is skipped
            accept(at, record)
            return record
    return None


def _squashes(epoch: int, last: int, look: Look) -> Iterator[Manifest]:
    """Yield the squashed patches from the start of an epoch to that of a later one up to `last`, the largest first."""
    for level in reversed(range(MAX_LEVEL + 1)):
        if epoch % (1 << level) == 0 and epoch + (1 << level) <= last:
            record = look(squash_key(level, epoch >> level))
            if record is not None and record.starts == epoch + (1 << level):
                yield record
