"""A run as the delta folders of slime, miles and stitch, and their delta folders as a run; bit for bit, both ways.

    with DeltaExporter("s3://bucket/run", "updates") as exporter:
        exporter.update()              # updates/weight_v000004 is a checkpoint, weight_v000005 what changed since, …

    with DeltaImporter("updates", "s3://bucket/run", base="Qwen3-8B") as importer:
        importer.update()              # publishes a version for the base and for every folder

What the folders consist of is in `delta_format`. A folder appears whole or not at all: it is written under another name
and renamed when all of it is on the disk. Both resume: run them again after an interruption, or when there is more.
"""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pulsesync.core.threads import spread
from pulsesync.core.types import TensorSpec
from pulsesync.errors import (
    ConflictError,
    FormatError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    StateError,
)
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.signature import SigningKey, trusted
from pulsesync.integrations import delta_format as form
from pulsesync.integrations.delta_format import Checksum, Encoding, FolderIndex, Octets, octets
from pulsesync.integrations.folder import fetch_file, flush_names, owned
from pulsesync.maintain.verify import find_records
from pulsesync.publish.publisher import Publisher
from pulsesync.run import planner
from pulsesync.run.bodies import check_room
from pulsesync.run.reader import RunReader, location_of
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.checkpoint_files import (
    INDEX,
    SHARD_BYTES,
    Checkpoint,
    TensorFolder,
    is_companion,
    open_checkpoint,
    plan_files,
    stored_names,
    writing,
)
from pulsesync.state.views import new_tensors
from pulsesync.store import Store, open_store

__all__ = ["DeltaExporter", "DeltaImporter", "DeltaVersion"]

_RUN, _DIGEST = "pulse_run", "pulse_digest"  # in the metadata of an index: which version of which run a folder is
_PARTIAL = re.compile(r"\.weight_v\d+\.partial")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeltaVersion:
    """A version that was exported or imported."""

    version: int  # of the run
    folder: Path  # that was written, or read
    is_delta: bool  # not a whole checkpoint
    tensors: int  # in the folder
    size_bytes: int  # of its weight files


# From a run to folders


class DeltaExporter:
    """Writes the versions of a run as delta folders. One process at a time may write to a folder.

    The first version is written as a whole checkpoint, with the run's configuration and tokenizer; each next one as
    what changed since the one before. Two copies of the weights are kept in memory.

    Args:
        location: A path or URL of the run, or a store.
        folder: Where the folders of the versions go: a folder that is empty, does not exist yet, or was exported to
            before, in which case the export is continued.
        first: The version to begin with; None: after the last one in the folder, or with the oldest that can be
            reached.
        encoding: "xor", the smaller one; or "overwrite", which can be applied twice.
        checksum: Of every new tensor: "xxh3-128", "blake3" or "adler32".
        trust: As for a `Subscriber`.
        shard_bytes: The most bytes of weights or deltas in a file.

    Raises:
        ValueError: an argument is not one of its choices; UnsupportedError: the checksum needs a package that is not
        installed; StoreError: the folder cannot be written, holds something else, or is in use by another process.
    """

    def __init__(
        self,
        location: str | Store,
        folder: str | Path,
        *,
        first: int | None = None,
        encoding: Encoding = "xor",
        checksum: Checksum = "xxh3-128",
        trust: str | Collection[str] | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        form.choose("encoding", encoding, get_args(Encoding))
        form.choose("checksum", checksum, get_args(Checksum))
        form.checksum(checksum, np.zeros(0, np.uint8))  # say now that a package is missing
        self.store = open_store(location) if isinstance(location, str) else location
        self.folder, self.trust = Path(folder), trusted(trust)
        self.encoding, self.checksum, self.shard_bytes = encoding, checksum, shard_bytes
        self._first = first
        self._weights: _ReplayedWeights | None = None
        self._stack = ExitStack()
        self._stack.enter_context(owned(self.folder))
        for path in self.folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path)  # of an export that was interrupted

    def close(self) -> None:
        self._weights = None
        self._stack.close()

    def __enter__(self) -> "DeltaExporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, to: int | None = None) -> list[DeltaVersion]:
        """Write every version up to the newest, or to one. Raises: as `advance`."""
        return list(iter(lambda: self.advance(to), None))

    def advance(self, to: int | None = None) -> DeltaVersion | None:
        """Write the next version, unless it is beyond the newest or beyond `to`; None if there is none to write.

        Raises:
            NothingPublishedError: the run has no version; ConflictError: the folder has versions of another run, or
            begins later than `first`; MissingLinkError: a version was pruned, or `first` is not published yet;
            StoreError, FormatError, ChainError, VerificationError: as `Subscriber.sync`. The folders are then as they
            were, and the call can be repeated.
        """
        records = RunReader(self.store, self.trust)
        newest = records.newest()
        if newest is None:
            raise records.nothing_published()
        last = self._last_exported(records)
        number = self._next(records, last)
        if last is None and number > newest.version:
            raise MissingLinkError(f"version {number} is not published: the newest is {newest.version}", version=number)
        if number > (newest.version if to is None else min(to, newest.version)):
            return None
        try:
            if number - 1 == last and self._weights is None:
                self._weights = _ReplayedWeights(self.store, records, _record(records, last))
            return self._export(records, _record(records, number))
        except BaseException:
            self._weights = None  # they may be a version ahead of the folders
            raise

    def _last_exported(self, records: RunReader) -> int | None:
        """The last version in the folder, if there is one. Raises: ConflictError, if it is not of this run."""
        versions = sorted(_versions(self.folder))
        if not versions:
            return None
        path = self.folder / form.folder_name(versions[-1])
        index = form.read_index(path)
        said = (index.metadata.get(_RUN), index.metadata.get(_DIGEST)) if index else (None, None)
        record = records.version(versions[-1])
        if record is None or said != (record.run, record.digest):
            raise ConflictError(
                f"{path} is not version {versions[-1]} of the run at {location_of(self.store)}: export to a new folder"
            )
        if self._first is not None and self._first < versions[0]:
            raise ConflictError(f"{self.folder} begins at version {versions[0]}: export {self._first} to a new folder")
        return versions[-1]

    def _next(self, records: RunReader, last: int | None) -> int:
        if last is not None:
            return max(last + 1, self._first or 0)
        return self._first if self._first is not None else _oldest(records)

    def _export(self, records: RunReader, record: Manifest) -> DeltaVersion:
        weights = self._weights
        if weights is None or weights.version != record.version - 1 or weights.layout.id != record.layout:
            self._weights = weights = _ReplayedWeights(self.store, records, record)
            with self._appearing(record.version) as folder:
                tensors = self._write_checkpoint(folder, record, weights)
            is_delta = False
        else:
            deltas = weights.move_to(record, self.encoding, self.checksum)
            with self._appearing(record.version) as folder:
                self._write_deltas(folder, record, deltas)
            tensors, is_delta = len(deltas), True
        written = self.folder / form.folder_name(record.version)
        size_bytes = sum(path.stat().st_size for path in written.glob("*.safetensors"))
        return DeltaVersion(record.version, written, is_delta, tensors, size_bytes)

    @contextmanager
    def _appearing(self, version: int) -> Iterator[Path]:
        """A folder to fill, which gets its name when it is full and on the disk. Raises: StoreError, ConflictError."""
        final = self.folder / form.folder_name(version)
        partial = self.folder / f".{final.name}.partial"
        with writing(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            flush_names(partial)
            if final.exists():
                raise ConflictError(f"another process has written {final}")
            partial.rename(final)
            flush_names(self.folder)

    def _write_checkpoint(self, folder: Path, record: Manifest, weights: "_ReplayedWeights") -> int:
        plan = plan_files(weights.layout, self.shard_bytes)
        TensorFolder.create(folder, plan)
        files = TensorFolder(folder, plan)
        for name, array in files.arrays.items():
            np.copyto(octets(array), octets(weights.tensors[name]))
        files.flush()
        for file in record.files:
            if is_companion(file.name):
                _write(folder / file.name, [fetch_file(self.store, file)])
        names = stored_names(weights.layout)
        weight_map = {names[spec.name]: shard.name for shard in plan.shards for spec, _ in shard.places}
        metadata = {"total_size": weights.layout.size_bytes, "version": f"{record.version:06d}"}
        _write(folder / INDEX, [form.index_bytes(metadata | _marks(record), weight_map)])
        return len(weight_map)

    def _write_deltas(self, folder: Path, record: Manifest, deltas: Mapping[str, tuple[bytes, str]]) -> None:
        files, weight_map = form.delta_files(deltas, self.shard_bytes)
        for name, pieces in files.items():
            _write(folder / name, pieces)
        metadata = form.delta_metadata(record.version, self.encoding, self.checksum)
        _write(folder / INDEX, [form.index_bytes(metadata | _marks(record), weight_map)])


class _ReplayedWeights:
    """The weights of a version, and how their bytes change from one to the next."""

    def __init__(self, store: Store, records: RunReader, record: Manifest) -> None:
        self.layout: Layout = records.layout(record.layout)
        check_room(store, planner.find_path(None, record, records.look)[0], self.layout)
        self.tensors: dict[str, Any] = new_tensors(self.layout.tensors)
        self._reader = Subscriber(store, trust=records.trust, undo=0)
        self._sync(record)
        self._before = {name: octets(tensor).copy() for name, tensor in self.tensors.items()}
        self._names = stored_names(self.layout)

    def _sync(self, record: Manifest) -> None:
        report = self._reader.sync(self.tensors, version=record.version)
        if report.digest != record.digest:
            raise ConflictError(f"version {record.version} was replaced while it was exported; start again")
        self.version = record.version

    def move_to(self, record: Manifest, encoding: Encoding, algorithm: Checksum) -> dict[str, tuple[bytes, str]]:
        """Go to the next version; return frame and checksum of each tensor that changed, by its name in checkpoints."""
        self._sync(record)

        def encode(spec: TensorSpec) -> tuple[str, tuple[bytes, str]] | None:
            old, new = self._before[spec.name], octets(self.tensors[spec.name])
            frame = form.encode(encoding, old, new)
            if frame is None:
                return None
            np.copyto(old, new)
            return self._names[spec.name], (frame, form.checksum(algorithm, new))

        return dict(found for found in spread(encode, self.layout.tensors) if found is not None)


def _marks(record: Manifest) -> dict[str, str]:
    return {_RUN: record.run, _DIGEST: record.digest}


def _record(records: RunReader, version: int) -> Manifest:
    if (record := records.version(version)) is None:
        raise MissingLinkError(f"version {version} is not published, or not any more", version=version)
    return record


def _oldest(records: RunReader) -> int:
    """The oldest version that can be reached. Raises: MissingLinkError, if none can."""
    for found in find_records(records):
        if found.record and found.record.kind == RecordKind.VERSION:
            try:
                planner.find_path(None, found.record, records.look)
            except (MissingLinkError, NothingPublishedError):
                continue  # what led here was pruned, or its anchor is not written yet
            return found.record.version
    raise MissingLinkError("no version of this run can be reached: there is no anchor")


def _versions(folder: Path) -> list[int]:
    with writing(folder):
        found = [form.folder_version(path) for path in folder.iterdir() if path.is_dir()]
    return [version for version in found if version is not None]


def _write(path: Path, pieces: list[bytes]) -> None:
    with writing(path), path.open("xb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


# From folders to a run


class DeltaImporter:
    """Publishes delta folders as the versions of a run; the step of each is the version that its folder is named for.

    Everything in a folder is decoded and its checksums are compared before any of it is published. The weights, the
    tensors that a folder changes and the publisher's base are in memory.

    Args:
        folder: Where the folders of the versions are.
        location: A path or URL of the run, or a store. A run that an import has begun is continued.
        base: The checkpoint that the engines have started with, as a file or folder: what the first delta is against.
            It is published first. None: the first folder is a whole checkpoint.
        signing_key: As for a `Publisher`.
        spool: As for a `Publisher`.
    """

    def __init__(
        self,
        folder: str | Path,
        location: str | Store,
        *,
        base: str | Path | None = None,
        signing_key: SigningKey | None = None,
        spool: str | Path | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.base = Path(base) if base is not None else None
        self.store = open_store(location) if isinstance(location, str) else location
        self.incomplete: Path | None = None  # the last folder, if it is still being written
        self._key, self._spool = signing_key, spool
        self._publisher: Publisher | None = None
        self._tensors: dict[str, Any] = {}
        self._at: int | None = None  # the version of the folders that the tensors are at, once one is in the run

    def close(self) -> None:
        """Send what is left to send. Raises: as `Publisher.close`."""
        if self._publisher is not None:
            self._publisher.close()

    def __enter__(self) -> "DeltaImporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self) -> list[DeltaVersion]:
        """Publish every folder that is complete and not in the run yet. Raises: as `advance`."""
        return list(iter(self.advance, None))

    def advance(self) -> DeltaVersion | None:
        """Publish the next folder, or first of all the base; None if there is none.

        A last folder that has no index yet is being written: it is left alone, and named by `incomplete`.

        Raises:
            ChecksumError, FormatError, UnsupportedError: a folder is damaged, made for other weights, or of a kind that
            is not known; MissingLinkError: a folder is missing, or there is no base; StateError: the run was not made
            from these folders, or a folder has tensors that the base has not; StoreError; AnotherPublisherError. The
            run is then as it was, and the call can be repeated.
        """
        versions = self._complete()
        if self._at is None and (begun := self._begin(versions)) is not None:
            return begun
        number = next((version for version in versions if self._at is None or version > self._at), None)
        if number is None:
            return None
        folder = self.folder / form.folder_name(number)
        index = form.read_index(folder)
        if index is None or not index.is_delta:
            return self._publish(open_checkpoint(folder), number, folder)
        if index.base_version != self._at:
            raise MissingLinkError(
                f"{folder} is a delta on version {index.base_version}, and the run is at {self._at}: a folder between "
                "them is missing",
                version=index.base_version,
            )
        changed = self._decode(index)
        report = self._commit(self._tensors | changed, number)
        return DeltaVersion(report, folder, True, len(changed), index.size_bytes)

    def _complete(self) -> list[int]:
        """The versions whose folders are complete. Raises: NotFoundError; FormatError: one before the last is not."""
        if not self.folder.is_dir():
            raise NotFoundError(f"there is no folder {self.folder}", key=str(self.folder))
        versions = sorted(_versions(self.folder))
        self.incomplete = None
        for version in versions:
            path = self.folder / form.folder_name(version)
            if not any((path / name).exists() for name in (INDEX, "model.safetensors")):
                if version != versions[-1]:
                    raise FormatError(f"{path} has no {INDEX}: whoever wrote it was interrupted")
                self.incomplete = path
        return versions[:-1] if self.incomplete else versions

    def _begin(self, versions: list[int]) -> DeltaVersion | None:
        """Continue the run, or begin it with the base; return the base if it was published."""
        opened = open_checkpoint(self.base) if self.base is not None else None
        newest = RunReader(self.store, None).newest()
        if newest is None and not versions:
            return None
        before_first = versions[0] - 1 if versions else None
        if newest is None and opened is None:
            index = form.read_index(self.folder / form.folder_name(versions[0]))
            if index is not None and index.is_delta:
                raise MissingLinkError(
                    f"{index.folder} is a delta on version {index.base_version}, which is not here: give the "
                    "checkpoint that the engines have started with as the base",
                    version=index.base_version,
                )
        if newest is not None and not self._resume(newest, opened, before_first):
            newest = None
        if self._publisher is None:  # else an attempt to publish the first version has failed
            files = opened.files if opened is not None else None
            self._publisher = Publisher(self.store, signing_key=self._key, files=files, spool=self._spool)
        if newest is None and opened is not None and self.base is not None and before_first is not None:
            return self._publish(opened, before_first, self.base) if before_first >= 0 else None
        return None

    def _resume(self, newest: Manifest, base: Checkpoint | None, before_first: int | None) -> bool:
        """Take the weights of the newest version; return whether it can be reached.

        An import that was interrupted between its first record and the anchor has left a version that nobody can
        reach. It is then as if nothing had been published.
        """
        layout = RunReader(self.store, None).layout(newest.layout)
        tensors = new_tensors(layout.tensors)
        try:
            Subscriber(self.store, undo=0).sync(tensors, version=newest.version)
        except NothingPublishedError:
            return False
        if (name := self._different(tensors, newest.step, base, before_first)) is not None:
            raise StateError(
                f"the run at {location_of(self.store)} ends at step {newest.step}, and its tensor {name!r} is not that "
                f"of {form.folder_name(newest.step)}: it was not made from these folders; import into a new run"
            )
        self._tensors, self._at = tensors, newest.step
        return True

    def _different(
        self, tensors: Mapping[str, Any], version: int, base: Checkpoint | None, before_first: int | None
    ) -> str | None:
        """The first tensor that is not as the folder of its version, or the base, has it."""
        folder = self.folder / form.folder_name(version)
        if folder.is_dir():
            index = form.read_index(folder)
            if index is not None and index.is_delta:
                sums = {name: delta.checksum for name, delta in form.read_deltas(index).items()}
                return _first(
                    name
                    for name, expected in sums.items()
                    if name not in tensors or form.checksum(index.checksum_format, octets(tensors[name])) != expected
                )
            base = open_checkpoint(folder)
        elif version != before_first:
            base = None  # that folder was deleted: the next one's checksums have to tell
        return _first(name for name, tensor in tensors.items() if base is not None and not _same(tensor, base, name))

    def _decode(self, index: FolderIndex) -> dict[str, Any]:
        """The tensors that a folder changes, as they are after it, all checked."""
        deltas = form.read_deltas(index)
        if unknown := sorted(deltas.keys() - self._tensors.keys()):
            raise StateError(f"{index.folder} changes a tensor {unknown[0]!r} that the base does not have")

        def decode(name: str) -> tuple[str, Any]:
            tensor = np.ascontiguousarray(self._tensors[name])
            new: Octets = form.decode_tensor(index, name, deltas[name], octets(tensor))
            return name, new.view(tensor.dtype).reshape(self._tensors[name].shape)

        return dict(spread(decode, sorted(deltas)))

    def _publish(self, opened: Checkpoint, number: int, folder: Path) -> DeltaVersion:
        version = self._commit(dict(opened.tensors), number)
        return DeltaVersion(version, folder, False, len(opened.tensors), opened.size_bytes)

    def _commit(self, tensors: dict[str, Any], number: int) -> int:
        assert self._publisher is not None
        report = self._publisher.publish(tensors, step=number)
        assert report.version is not None
        self._tensors, self._at = tensors, number
        return report.version


def _same(tensor: Any, checkpoint: Checkpoint, name: str) -> bool:
    other = checkpoint.tensors.get(name)
    return other is not None and other.dtype == tensor.dtype and np.array_equal(octets(tensor), octets(other))


def _first(names: Iterator[str]) -> str | None:
    return next(names, None)
