"""A folder that always contains a complete version, for programs that load checkpoints from disk.

    FOLDER/current -> a          what to load: transformers, vLLM and safetensors load it as any checkpoint
    FOLDER/a, FOLDER/b           two copies of the weights; the one that is not current is updated to the next version
    FOLDER/.cache                fetched bytes, so that both copies need one fetch

    with HuggingFaceFolder("s3://bucket/run", "weights") as folder:
        for flip in folder.follow():
            ...                                                  # weights/current is now version flip.version

A run that has an `adapter_config.json` is an adapter: its weights are in `adapter_model.safetensors`, as PEFT and vLLM
look for them.

A copy that is being written has no `pulse.json`; it gets one when its weights are written, recounted and on the disk,
and after that `current` is switched to it in one step. So a process that is killed at any moment leaves `current` at a
complete version, and the next process continues from there.

Two things to get right when loading. Resolve the link once and load its target, `realpath("FOLDER/current")`: a program
that opens one file after the other through the link may read two versions. And finish before the copy is written again:
within `hold_s` of the next update, or inside `reading`, which makes the writer wait.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pulsesync.core import arguments
from pulsesync.core.scratch import make_private
from pulsesync.errors import (
    BaseMismatchError,
    ChecksumError,
    ConflictError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PulseError,
    RunChangedError,
    StoreError,
    VerificationError,
)
from pulsesync.format.json_reader import load_json
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import FileRef, Manifest
from pulsesync.format.signature import trusted, trusted_for_pointers
from pulsesync.run import keys, planner
from pulsesync.run.bodies import check_room
from pulsesync.run.follower import RunFollower
from pulsesync.run.goals import GoalFinder
from pulsesync.run.reader import RunReader, forgetting
from pulsesync.run.reporting import SyncEvents, SyncReport
from pulsesync.run.spool import AnchorSpool
from pulsesync.state.checkpoint_files import (
    ADAPTER_CONFIG,
    INDEX,
    TensorFolder,
    WeightFiles,
    by_layout,
    is_companion,
    missing_companions,
    open_checkpoint,
    plan_files,
    writing,
)
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import Recount, WeightState
from pulsesync.store import CachedStore, Location, Store, open_store

__all__ = ["CopyRecord", "FolderUpdate", "HuggingFaceFolder", "reading"]

MARK, HISTORY, LOCK, CURRENT, CACHE = "pulse.json", "pulse.history", ".lock", "current", ".cache"
CACHE_BYTES = 4 << 30
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyRecord:
    """The content of `pulse.json`, which describes a complete copy."""

    run: str
    version: int
    step: int
    digest: str


@dataclass(frozen=True)
class FolderUpdate:
    """A version that has become current."""

    mark: CopyRecord
    folder: Path
    began: str  # what it started from: "memory", "resume" (after a restart), "copy" (of the other folder), "nothing"
    sync: SyncReport
    left_out: tuple[str, ...]  # files of the run that no loader reads, and that were not written
    missing: tuple[str, ...]  # files that a loader needs in addition to the weights, but the run does not have
    seconds: float


class HuggingFaceFolder:
    """Keeps a folder at the versions of a run. One process at a time may do so; any number may read.

    Args:
        location: A path or URL of the run, or a store.
        folder: Where the weights go: a folder that is empty, does not exist yet, or was used for this before.
        trust: As for a `Subscriber`.
        trust_pointers: As for a `Subscriber`.
        cache: A folder for fetched bytes, which other processes may share; if not given, a small one in the folder.
        hold_s: Seconds for which a copy that is no longer current is not changed, so that a program that has begun to
            load it can finish; `reading` keeps it longer.
        follow: As for a `Subscriber`: the pointer to follow.
        max_staleness: By how many versions the folder may differ from the version to follow if it cannot be updated;
            `follow` raises if it differs by more. None: this is not checked.
        follow_replaced: As for `Subscriber.sync`: if the location has another run than the folder, or was restored from
            a backup, start over from an anchor.
        heartbeat: As for a `Subscriber`: the name under which this worker is shown by `pulse status`.

    Raises:
        ValueError: heartbeat is not the name of a worker, or follow not that of a pointer.
        StoreError: the folder cannot be written, has other files in it, or is in use by another process.
    """

    def __init__(
        self,
        location: Location,
        folder: str | Path,
        *,
        trust: str | Collection[str] | None = None,
        trust_pointers: str | Collection[str] | None = None,
        cache: str | Path | None = None,
        hold_s: float = 0.0,
        follow: str | None = None,
        max_staleness: int | None = None,
        follow_replaced: bool = False,
        heartbeat: str | None = None,
    ) -> None:
        self._goals = GoalFinder(follow, max_staleness)
        self.folder = arguments.folder("folder", folder)
        self.trust, self._movers = trusted(trust), trusted_for_pointers(trust_pointers, trust)
        self.hold_s, self.follow_replaced = arguments.seconds("hold_s", hold_s), follow_replaced
        self._origin = open_store(location)
        self._own_cache = cache is None
        self._cache = self.folder / CACHE if cache is None else arguments.folder("cache", cache)
        self.store: Store = CachedStore(self._origin, self._cache)
        self._events = SyncEvents.of(self._origin, heartbeat, follow)
        self._stack = ExitStack()
        self._stack.enter_context(owned(self.folder))
        self._sides = {name: FolderCopy(self.folder / name) for name in "ab"}
        self._layout: Layout | None = None
        self._stack.callback(self._events.close)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> "HuggingFaceFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def current(self) -> CopyRecord | None:
        """The version that is current; None if there is none yet."""
        name = _current(self.folder)
        return self._sides[name].mark() if name else None

    def follow(
        self, interval_s: float = 1.0, on_error: Callable[[PulseError], None] | None = None
    ) -> Iterator[FolderUpdate]:
        """Yield every version that becomes current, without end. A temporary error is reported, and tried again.

        While there is no version that can be synced, this waits, and reports that once, as a NothingPublishedError;
        also when all versions have been removed from the location.

        Raises:
            SignatureError, UnsupportedError, StateError, RunChangedError: waiting would not help. StaleWeightsError:
            the folder cannot be updated, and differs from the version to follow by more than `max_staleness`.
        """
        return self._goals.follow(self.update, self._version, interval_s, on_error)

    def _version(self) -> int | None:
        return current.version if (current := self.current) else None

    def update(self, version: int | None = None) -> FolderUpdate | None:
        """Update the folder to the newest version, that of its pointer, or a given one; None if it has it already.

        Raises:
            PulseError: as `Subscriber.sync`. `current` is then unchanged, and the same call can be repeated.
        """
        version = arguments.optional_whole("version", version, what="the number of a version")
        try:
            done = self._update(version)
        except NothingPublishedError as e:  # it waits for a version; metrics do not count that as a failure
            if self._events.heartbeat is not None:
                self._events.heartbeat.failed(e, self._version())
            raise
        except Exception as e:
            self._events.newest = self._goals.version
            self._events.failed(e, self._version(), torn=False)  # what is current is complete in any case
            raise
        self._events.newest = self._goals.version
        if done is not None:
            if self._events.heartbeat is not None:
                self._events.heartbeat.recounted(True)  # it was, before it became current
            self._events.synced(done.sync)
        elif current := self.current:
            self._events.found_nothing(current.version, current.step, current.digest)
        return done

    def _update(self, version: int | None) -> FolderUpdate | None:
        began = time.perf_counter()
        if self._goal(version) is None:
            return None
        with self._to_write() as side:
            if (goal := self._goal(version)) is None:  # there may be a newer version by now
                return None
            contents = {one.name: fetch_file(self.store, one) for one in goal.files if is_companion(one.name)}
            plan = plan_files(self._layout_of(goal), adapter=ADAPTER_CONFIG in contents)
            if not any(TensorFolder.fits(one.folder, plan) for one in self._sides.values()):
                self._check_room(goal)
            source = self._begin(side, plan, goal)
            report = side.sync(goal.version, self.follow_replaced, self.current)
            mark = CopyRecord(goal.run, goal.version, goal.step, goal.digest)
            side.finish(mark, contents, plan)
            self._turn(side)
        self._tidy()
        left_out = tuple(file.name for file in goal.files if file.name not in contents)
        seconds = time.perf_counter() - began
        return FolderUpdate(mark, side.folder, source, report, left_out, missing_companions(contents), seconds)

    def _goal(self, version: int | None) -> Manifest | None:
        """Return the version to update to; None if it is current. Raises: RunChangedError, and as `GoalFinder.find`."""
        records, current = RunReader(self.store, self.trust, trust_pointers=self._movers), self.current
        try:
            return self._goals.find(records, current, version)
        except RunChangedError as e:
            if not self.follow_replaced:
                raise
            self._goals.start_over(e)
            return self._goals.find(records, None, version)

    def _layout_of(self, goal: Manifest) -> Layout:
        if self._layout is None or self._layout.id != goal.layout:
            self._layout = RunReader(self.store, self.trust).layout(goal.layout)
        return self._layout

    def _check_room(self, goal: Manifest) -> None:
        """Check that there is an anchor for a run that is new to the folder, before files of its size are created.

        Raises: NothingPublishedError, while its first anchor is being written; LimitError, if that is too small.
        """
        records = RunReader(self.store, self.trust)
        try:
            anchor = planner.find_path(None, goal, records.look)[0]
        except MissingLinkError:
            if goal.anchor is None:
                raise records.no_anchor(goal) from None
            raise
        check_room(self.store, anchor, self._layout_of(goal))

    @contextmanager
    def _to_write(self) -> "Iterator[FolderCopy]":
        """Yield the copy that is not current, when no process loads it."""
        name = _current(self.folder)
        side = self._sides["b" if name == "a" else "a"]
        if name:
            age_s = time.time() - os.lstat(self.folder / CURRENT).st_mtime
            time.sleep(min(max(self.hold_s - age_s, 0), self.hold_s))
        with side.alone():
            yield side

    def _begin(self, side: "FolderCopy", plan: WeightFiles, goal: Manifest) -> str:
        """Open a copy for writing, with a subscriber that starts from the best state; return what it started from."""
        mark, history = side.mark(), side.history()
        side.unmark()
        position = side.follower.local.position if side.follower else None
        weights = side.weights
        if weights and weights.plan == plan and weights.in_place and position and position.run == goal.run:
            return "memory"
        if not TensorFolder.fits(side.folder, plan):
            TensorFolder.create(side.folder, plan)
            mark = None
        side.weights = TensorFolder(side.folder, plan)
        side.follower = RunFollower(self._origin, self.trust, cache=self._cache)
        if mark and mark.run == goal.run and side.follower.resume(side.weights.arrays, mark.version, history):
            return "resume"
        name = _current(self.folder)
        other = self._sides[name] if name else None
        there = other.mark() if other else None
        if other and there and there.run == goal.run and TensorFolder.fits(other.folder, plan):
            side.weights.copy_from(TensorFolder(other.folder, plan))
            if side.follower.resume(side.weights.arrays, there.version, other.history()):
                return "copy"
        return "nothing"

    def _turn(self, side: "FolderCopy") -> None:
        """Make a copy current, in one step."""
        link = self.folder / f".{CURRENT}"
        with writing(link):
            link.unlink(missing_ok=True)
            link.symlink_to(side.folder.name)
            os.replace(link, self.folder / CURRENT)
            flush_names(self.folder)

    def _tidy(self) -> None:
        """Keep the cache small. It needs no anchor, because one copy begins as a copy of the other."""
        if not self._own_cache:
            return
        with suppress(OSError):
            AnchorSpool(self._cache / "anchors").keep_only(None)
            files = [(s.st_mtime_ns, s.st_size, path) for path in self._cache.iterdir() if (s := path.stat()).st_nlink]
            excess = sum(size for _, size, _ in files) - CACHE_BYTES
            for _, size, path in sorted(files):
                if excess > 0 and path.is_file():
                    path.unlink(missing_ok=True)
                    excess -= size


class FolderCopy:
    """One of the two copies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.weights: TensorFolder | None = None
        self.follower: RunFollower | None = None

    def mark(self) -> CopyRecord | None:
        """Which version this is; None for a copy that is not complete."""
        return read_mark(self.folder)

    def history(self) -> bytes | None:
        try:
            return (self.folder / HISTORY).read_bytes()
        except OSError:
            return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for processes that load this copy with `reading`, and keep others out."""
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            refuse_link(self.folder)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def unmark(self) -> None:
        with writing(self.folder / MARK) as path:
            path.unlink(missing_ok=True)
            flush_names(self.folder)

    def sync(self, version: int, follow_replaced: bool, current: CopyRecord | None) -> SyncReport:
        """Sync to a version, recount all weights, and report the change from the current copy. Raises: PulseError."""
        assert self.weights is not None
        assert self.follower is not None
        self.follower.reported = (current.run, current.version, current.step) if current else None
        try:
            report = self.follower.sync(self.weights.arrays, version=version, follow_replaced=follow_replaced)
            self.follower.integrity.verify(self.weights.arrays)
        except (BaseMismatchError, VerificationError):
            self.follower = None  # something else may have written to it: the next attempt begins from the other copy
            raise
        return report

    def finish(self, mark: CopyRecord, companions: dict[str, bytes], plan: WeightFiles) -> None:
        """Write the companion files, ensure that everything is on the disk, and then mark the copy as complete."""
        assert self.weights is not None
        assert self.follower is not None
        state = self.follower.state
        assert state is not None
        contents = companions | ({INDEX: plan.index} if plan.index else {})
        if state.history.tiles:
            contents[HISTORY] = state.history.to_bytes()
        with writing(self.folder):
            for path in self.folder.iterdir():
                if path.name not in {LOCK, *plan.files, *contents} and not path.is_dir():
                    path.unlink()
        for name, data in contents.items():
            _write(self.folder / name, data)
        self.weights.flush()
        with writing(self.folder):
            flush_names(self.folder)  # the names of the files too, before the file that marks the copy as complete
        _write(self.folder / MARK, json.dumps(asdict(mark)).encode() + b"\n")


def fetch_file(store: Store, file: FileRef) -> bytes:
    """Fetch a companion file of a run and check it. Raises: ChecksumError, StoreError."""
    key = keys.file_key(file.id)
    with forgetting(store, key):
        data = store.get(key, 0, file.size + 1)
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.id:
            raise ChecksumError(f"the run's {file.name} is damaged", expected=file.id)
    return data


def read_mark(folder: Path) -> CopyRecord | None:
    """Read the `pulse.json` of a copy; None if there is none, or it is malformed."""
    try:
        table = load_json((folder / MARK).read_bytes(), MARK)
        return CopyRecord(str(table["run"]), int(table["version"]), int(table["step"]), str(table["digest"]))
    except (OSError, ValueError, KeyError, TypeError, FormatError):
        return None


@contextmanager
def reading(folder: str | Path) -> Iterator[Path]:
    """Yield the copy that is current; it is not changed until the block ends, however slowly it is loaded.

    Raises:
        NotFoundError: there is no version in the folder yet.
    """
    folder = Path(folder)
    while True:
        name = _current(folder)
        if name is None:
            raise NotFoundError(
                f"there is no version in {folder} yet; start pulse follow to write one", key=str(folder)
            )
        lock = os.open(folder / name / LOCK, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if _current(folder) == name:  # otherwise it may have been written before it was locked
                yield folder / name
                return
        finally:
            os.close(lock)


def _current(folder: Path) -> str | None:
    """Return which of the copies is current."""
    try:
        name = os.readlink(folder / CURRENT)
    except OSError:
        return None
    return name if name in ("a", "b") else None


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Be the only process that writes to a folder, which must be empty or one that this function has used before."""
    with writing(folder):
        make_private(folder)
        if not (folder / LOCK).exists() and any(folder.iterdir()):
            raise StoreError(
                f"{folder} contains other files; give a folder that is empty or does not exist", key=str(folder)
            )
        for name in ("a", "b", CACHE):
            refuse_link(folder / name)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise ConflictError(f"another process writes to {folder}; stop it, or give another folder") from e
        yield
    finally:
        os.close(lock)


def refuse_link(path: Path) -> None:
    """Raises: StoreError, if a folder in which other files are deleted is a link to a folder of someone else."""
    if path.is_symlink():
        raise StoreError(
            f"{path} is a symbolic link to {os.readlink(path)}, whose other files would be deleted: remove the link, "
            "or give another folder",
            key=str(path),
        )


def _write(path: Path, data: bytes) -> None:
    """Ensure that a file has these bytes and is on the disk; it is not written again if it has them."""
    with writing(path):
        with suppress(OSError):
            if path.stat().st_size == len(data) and path.read_bytes() == data:
                return
        spool = path.with_name(f".new-{path.name}")
        spool.unlink(missing_ok=True)
        with spool.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(spool, path)
        flush_names(path.parent)


def flush_names(folder: Path) -> None:
    """Return once the names of the files in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Identity:
    """Which version some weights on disk are."""

    digest: str
    record: Manifest | None  # None: no published version of the run
    mark: CopyRecord | None  # the content of the folder's pulse.json


def identify(records: RunReader, path: str | Path) -> Identity:
    """Compute the digest of a checkpoint, or of a folder that `pulse follow` writes, and find its version in a run.

    Raises:
        NotFoundError: there is no run, or no checkpoint; StateError: its tensors are not those of the run; FormatError,
        StoreError; VerificationError: tensors that are tied in the run differ.
    """
    path = Path(path)
    newest = records.required_newest()
    name = _current(path)
    folder = path / name if name else path
    layout = records.layout(newest.layout)
    checkpoint = open_checkpoint(folder, private=True)
    state = WeightState.attach(HostBackend, by_layout(layout, checkpoint.tensors), layout)
    digest, mark = Recount(state).digest(), read_mark(folder)
    guesses = [records.version(mark.version) if mark else None, newest, records.start(digest)]
    found = next((record for record in guesses if record and record.digest == digest), None)
    version = newest.version
    while found is None and version > 0 and (record := records.version(version := version - 1)) is not None:
        found = record if record.digest == digest else None
    return Identity(digest, found, mark)
