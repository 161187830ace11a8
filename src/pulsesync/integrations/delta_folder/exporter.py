"""Export a run as delta folders: the first version in full, each next one as a delta."""

import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pulsesync.core import arguments
from pulsesync.core.threads import spread
from pulsesync.core.types import TensorSpec
from pulsesync.errors import ConflictError, MissingLinkError, NothingPublishedError
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.signature import trusted
from pulsesync.integrations.delta_folder import deltas as form
from pulsesync.integrations.delta_folder.deltas import Checksum, DeltaVersion, Encoding, find_folders, octets
from pulsesync.integrations.folder import fetch_file, flush_names, owned
from pulsesync.maintain.verify import find_records
from pulsesync.run import planner
from pulsesync.run.bodies import check_room
from pulsesync.run.follower import RunFollower
from pulsesync.run.reader import RunReader, location_of
from pulsesync.state.checkpoint_files import INDEX, TensorFolder, is_companion, plan_files, stored_names, writing
from pulsesync.state.views import new_tensors
from pulsesync.store import Location, Store, open_store

_RUN, _DIGEST = "pulse_run", "pulse_digest"  # in the metadata of an index: which version of which run a folder is
_PARTIAL = re.compile(r"\.weight_v\d+\.partial")


class DeltaExporter:
    """Writes the versions of a run as delta folders. One process at a time may write to a folder.

    The first version is written as a complete checkpoint, with the run's configuration and tokenizer; each next one as
    what changed since the one before. Two copies of the weights are kept in memory.

    Args:
        location: A path or URL of the run, or a store.
        folder: Where the folders of the versions go: a folder that is empty, does not exist yet, or was exported to
            before, in which case the export is continued.
        first: The version to begin with; None: after the last one in the folder, or with the oldest that can be
            reached.
        encoding: "xor", which is smaller; or "overwrite", which can be applied twice.
        checksum: The checksum of every new tensor: "xxh3-128", "blake3" or "adler32".
        trust: As for a `Subscriber`.

    Raises:
        ValueError: an argument is not one of its choices; UnsupportedError: the checksum needs a package that is not
        installed; StoreError: the folder cannot be written, has other files in it, or is in use by another process.
    """

    def __init__(
        self,
        location: Location,
        folder: str | Path,
        *,
        first: int | None = None,
        encoding: Encoding = "xor",
        checksum: Checksum = "xxh3-128",
        trust: str | Collection[str] | None = None,
    ) -> None:
        arguments.one_of("encoding", encoding, get_args(Encoding))
        arguments.one_of("checksum", checksum, get_args(Checksum))
        form.checksum(checksum, np.zeros(0, np.uint8))  # raises now if a package is missing
        self.store = open_store(location)
        self.folder, self.trust = arguments.folder("folder", folder), trusted(trust)
        self.encoding, self.checksum = encoding, checksum
        self._first = arguments.optional_whole("first", first, what="the number of a version")
        self._weights: _ReplayedWeights | None = None
        self._stack = ExitStack()
        self._stack.enter_context(owned(self.folder))
        for path in self.folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                shutil.rmtree(path)  # left by an export that was interrupted

    def close(self) -> None:
        self._weights = None
        self._stack.close()

    def __enter__(self) -> "DeltaExporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, to: int | None = None) -> list[DeltaVersion]:
        """Write every version up to the newest, or to a given one. Raises: as `advance`."""
        return list(iter(lambda: self.advance(to), None))

    def advance(self, to: int | None = None) -> DeltaVersion | None:
        """Write the next version, unless it is beyond the newest or beyond `to`; None if there is none to write.

        Raises:
            NothingPublishedError: the run has no version; ConflictError: the folder has versions of another run, or
            begins later than `first`; MissingLinkError: a version was pruned, or `first` is not published yet;
            StoreError, FormatError, ChainError, VerificationError: as `Subscriber.sync`. The folders are then
            unchanged, and the call can be repeated.
        """
        records = RunReader(self.store, self.trust)
        newest = records.required_newest()
        last = self._last_exported(records, newest)
        if last is not None:
            number = max(last + 1, self._first or 0)
        else:
            number = _oldest(records) if self._first is None else self._first
        if last is None and number > newest.version:
            raise MissingLinkError(f"version {number} is not published: the newest is {newest.version}", version=number)
        if number > (newest.version if to is None else min(to, newest.version)):
            return None
        try:
            if number - 1 == last and self._weights is None:
                self._weights = _ReplayedWeights(self.store, records, records.required_version(last, local=True))
            return self._export(records, records.required_version(number, local=True))
        except BaseException:
            self._weights = None  # they may be a version ahead of the folders
            raise

    def _last_exported(self, records: RunReader, newest: Manifest) -> int | None:
        """Return the last version in the folder, if any. Raises: ConflictError: of another run; MissingLinkError."""
        folders = find_folders(self.folder)
        if not folders:
            return None
        first, last = min(folders), max(folders)
        index, record, place = form.read_index(folders[last]), records.version(last), location_of(self.store)
        said = (index.metadata.get(_RUN), index.metadata.get(_DIGEST)) if index else (None, None)
        if record is None and said[0] == newest.run and last < newest.version:
            raise MissingLinkError(
                f"version {last}, the last one in {self.folder}, was pruned from the run at {place}, so the changes "
                "since cannot be computed: export to a new folder",
                version=last,
            )
        if record is None or said != (record.run, record.digest):
            raise ConflictError(f"{folders[last]} is not version {last} of the run at {place}: export to a new folder")
        if self._first is not None and self._first < first:
            raise ConflictError(f"{self.folder} begins at version {first}: export {self._first} to a new folder")
        return last

    def _export(self, records: RunReader, record: Manifest) -> DeltaVersion:
        weights = self._weights
        is_delta = bool(weights and weights.version == record.version - 1 and weights.layout.id == record.layout)
        if weights is None or not is_delta:
            self._weights = weights = _ReplayedWeights(self.store, records, record)
        deltas = weights.move_to(record, self.encoding, self.checksum) if is_delta else {}
        with self._appearing(record.version) as folder:
            if is_delta:
                self._write_deltas(folder, record, deltas)
                tensors = len(deltas)
            else:
                tensors = self._write_checkpoint(folder, record, weights)
        written = self.folder / form.folder_name(record.version)
        size_bytes = sum(path.stat().st_size for path in written.glob("*.safetensors"))
        return DeltaVersion(record.version, written, is_delta, tensors, size_bytes)

    @contextmanager
    def _appearing(self, version: int) -> Iterator[Path]:
        """Yield a temporary folder, and rename it when it is on disk. Raises: StoreError, ConflictError."""
        final = self.folder / form.folder_name(version)
        partial = self.folder / f".{final.name}.partial"
        with writing(final):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield partial
            flush_names(partial)
            if final.exists():
                raise ConflictError(f"another process has written {final} meanwhile; stop one of the two exports")
            partial.rename(final)
            flush_names(self.folder)

    def _write_checkpoint(self, folder: Path, record: Manifest, weights: "_ReplayedWeights") -> int:
        plan = plan_files(weights.layout)
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
        files, weight_map = form.delta_files(deltas)
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
        self._follower = RunFollower(store, records.trust)
        self._sync(record)
        self._before = {name: octets(tensor).copy() for name, tensor in self.tensors.items()}
        self._names = stored_names(self.layout)

    def _sync(self, record: Manifest) -> None:
        report = self._follower.sync(self.tensors, version=record.version)
        if report.digest != record.digest:
            raise ConflictError(f"version {record.version} was replaced while it was exported; export again")
        self.version = record.version

    def move_to(self, record: Manifest, encoding: Encoding, algorithm: Checksum) -> dict[str, tuple[bytes, str]]:
        """Sync to the next version; return frame and checksum of each changed tensor, by its name in checkpoints."""
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


def _oldest(records: RunReader) -> int:
    """Return the oldest version that can be reached. Raises: MissingLinkError, if none can."""
    for found in find_records(records):
        if found.record and found.record.kind == RecordKind.VERSION:
            try:
                planner.find_path(None, found.record, records.look)
            except (MissingLinkError, NothingPublishedError):
                continue  # its anchor was pruned, or is not written yet
            return found.record.version
    raise MissingLinkError("no version of this run can be reached, because it has no anchor yet; try again later")


def _write(path: Path, pieces: list[bytes]) -> None:
    with writing(path), path.open("xb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())
