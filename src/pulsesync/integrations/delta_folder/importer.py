"""Import delta folders as a run: everything in a folder is decoded and checked before it becomes a version."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pulsesync.core import arguments
from pulsesync.core.threads import spread
from pulsesync.errors import FormatError, MissingLinkError, NothingPublishedError, StateError
from pulsesync.format.manifest import Manifest
from pulsesync.format.signature import SigningKey, check_signing_key
from pulsesync.integrations.delta_folder import deltas as form
from pulsesync.integrations.delta_folder.deltas import DeltaVersion, FolderIndex, Octets, find_folders, octets
from pulsesync.publish.publisher import Publisher
from pulsesync.run.follower import RunFollower
from pulsesync.run.reader import RunReader, location_of
from pulsesync.state.checkpoint_files import INDEX, Checkpoint, open_checkpoint
from pulsesync.state.views import new_tensors
from pulsesync.store import Location, open_store


class DeltaImporter:
    """Publishes delta folders as the versions of a run; the step of each is the version in its folder's name.

    Everything in a folder is decoded and its checksums are compared before any of it is published. The weights, the
    tensors that a folder changes and the publisher's base are in memory.

    Args:
        folder: Where the folders of the versions are.
        location: A path or URL of the run, or a store. A run that an import has begun is continued.
        base: The checkpoint that the engines started with, as a file or folder: the base of the first delta. It is
            published first, once the first delta has been checked against it. If the first folder is a complete
            checkpoint, none is needed, and one that is given is not published.
        signing_key: As for a `Publisher`.
        spool: As for a `Publisher`.
    """

    def __init__(
        self,
        folder: str | Path,
        location: Location,
        *,
        base: str | Path | None = None,
        signing_key: SigningKey | None = None,
        spool: str | Path | None = None,
    ) -> None:
        self.folder = arguments.folder("folder", folder)
        self.base = None if base is None else arguments.folder("base", base)
        self._key = check_signing_key(signing_key)
        self._spool = None if spool is None else arguments.folder("spool", spool)
        self._trust = None if signing_key is None else {signing_key.public}  # of what the run has already
        self.store = open_store(location)
        self.incomplete: Path | None = None  # the last folder, if it is still being written
        self._publisher: Publisher | None = None
        self._tensors: dict[str, Any] = {}
        self._at: int | None = None  # the folder version of the tensors; None before the first is in the run

    def close(self) -> None:
        """Send what is still queued. Raises: as `Publisher.close`."""
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
        """Publish the next folder, or the base as the first version; None if there is none.

        A last folder without an index is still being written: it is skipped, and `incomplete` names it.

        Raises:
            ChecksumError, FormatError, UnsupportedError: a folder is damaged, made for other weights, or of an unknown
            kind; MissingLinkError: a folder is missing, or there is no base; StateError: the run was not made from
            these folders, the trainer has started over, or a folder has tensors that the base does not have;
            StoreError; AnotherPublisherError. The run is then unchanged, and the call can be repeated.
        """
        folders = self._complete()
        if self._at is None and (begun := self._begin(folders)) is not None:
            return begun
        if self._at is not None and folders and max(folders) < self._at:
            raise StateError(
                f"the run is at step {self._at}, but the newest folder is {folders[max(folders)]}: the trainer has "
                "started over, with other weights; import into a new run"
            )
        number = next((version for version in folders if self._at is None or version > self._at), None)
        if number is None:
            return None
        folder = folders[number]
        index = form.read_index(folder)
        if index is None or not index.is_delta:
            return self._publish(_read_checkpoint(folder), number, folder)
        changed = _decode(index, self._tensors, self._at)
        report = self._commit(self._tensors | changed, number)
        return DeltaVersion(report, folder, True, len(changed), index.size_bytes)

    def _complete(self) -> dict[int, Path]:
        """Return the complete folders, by version. Raises: NotFoundError; FormatError: one before the last is not."""
        folders, self.incomplete = find_folders(self.folder), None
        for version, path in list(folders.items()):
            if any((path / name).exists() for name in (INDEX, form.MANIFEST, "model.safetensors")):
                continue
            if version != max(folders):
                raise FormatError(
                    f"{path} has no {INDEX}: writing it was interrupted; remove the folder, or have its trainer write "
                    "it again"
                )
            self.incomplete = folders.pop(version)
        return folders

    def _begin(self, folders: Mapping[int, Path]) -> DeltaVersion | None:
        """Continue the run, or start it with the base; return the base if it was published."""
        opened = open_checkpoint(self.base) if self.base is not None else None
        newest = RunReader(self.store, self._trust).newest()
        if newest is None and not folders:
            return None
        before_first = min(folders) - 1 if folders else None
        if newest is None and opened is None:
            index = form.read_index(folders[min(folders)])
            if index is not None and index.is_delta:
                raise MissingLinkError(
                    f"{index.folder} is a delta to version {index.base_version}, which is missing: pass the checkpoint "
                    "that the engines started with as base= or --base",
                    version=index.base_version,
                )
        if newest is not None and not self._resume(
            newest, folders.get(newest.step), opened if newest.step == before_first else None
        ):
            newest = None
        base = self._read_base(folders) if newest is None and folders else None
        if self._publisher is None:  # otherwise an attempt to publish the first version has failed
            files = opened.files if opened is not None else None
            self._publisher = Publisher(self.store, signing_key=self._key, files=files, spool=self._spool)
        if base is None or before_first is None or self.base is None:
            return None
        return self._publish(base, before_first, self.base)

    def _read_base(self, folders: Mapping[int, Path]) -> Checkpoint | None:
        """Return the base, if the first folder is a delta; it is checked with that delta before it is published."""
        index = form.read_index(folders[min(folders)])
        if self.base is None or index is None or not index.is_delta:
            return None
        base = _read_checkpoint(self.base)
        _decode(index, base.tensors, min(folders) - 1)
        return base

    def _resume(self, newest: Manifest, folder: Path | None, base: Checkpoint | None) -> bool:
        """Load the weights of the newest version; return whether it can be reached.

        An import that was interrupted between its first record and the anchor has left a version that cannot be
        reached. Then the import continues as if nothing had been published.
        """
        layout = RunReader(self.store, self._trust).layout(newest.layout)
        tensors = new_tensors(layout.tensors)
        try:
            RunFollower(self.store, self._trust).sync(tensors, version=newest.version)
        except NothingPublishedError:
            return False
        if (name := _find_different(tensors, folder, base)) is not None:
            raise StateError(
                f"the run at {location_of(self.store)} ends at step {newest.step}, where its tensor {name!r} differs "
                f"from that of {folder or self.base}: it was not made from these folders; import into a new run"
            )
        self._tensors, self._at = tensors, newest.step
        return True

    def _publish(self, opened: Checkpoint, number: int, folder: Path) -> DeltaVersion:
        version = self._commit(dict(opened.tensors), number)
        return DeltaVersion(version, folder, False, len(opened.tensors), opened.size_bytes)

    def _commit(self, tensors: dict[str, Any], number: int) -> int:
        assert self._publisher is not None
        report = self._publisher.publish(tensors, step=number)
        assert report.version is not None
        self._tensors, self._at = tensors, number
        return report.version


def _read_checkpoint(path: Path) -> Checkpoint:
    """Copy a checkpoint into memory: its files may be overwritten while the importer uses its tensors."""
    opened = open_checkpoint(path)
    return replace(opened, tensors={name: tensor.copy() for name, tensor in opened.tensors.items()})


def _decode(index: FolderIndex, tensors: Mapping[str, Any], at: int | None) -> dict[str, Any]:
    """Return the tensors that a folder changes, as they are after it, all checked; `at`: the version before it."""
    if index.base_version != at:
        raise MissingLinkError(
            f"{index.folder} is a delta to version {index.base_version}, but the imported weights are version {at}: a "
            "folder between them is missing; restore it, or import into a new run",
            version=index.base_version,
        )
    deltas = form.read_deltas(index)
    if unknown := sorted(deltas.keys() - tensors.keys()):
        raise StateError(
            f"{index.folder} changes a tensor {unknown[0]!r} that the base does not have; pass the base that the "
            "engines started with"
        )

    def decode(name: str) -> tuple[str, Any]:
        tensor = np.ascontiguousarray(tensors[name])
        new: Octets = form.decode_tensor(index, name, deltas[name], octets(tensor))
        return name, new.view(tensor.dtype).reshape(tensors[name].shape)

    return dict(spread(decode, sorted(deltas)))


def _find_different(tensors: Mapping[str, Any], folder: Path | None, base: Checkpoint | None) -> str | None:
    """Return the first tensor that differs from a folder, or from the base; None if there is nothing to compare with.

    If the folder was deleted, the checksums of the next one find differences.
    """
    index = form.read_index(folder) if folder is not None else None
    if index is not None and index.is_delta:
        for name, delta in form.read_deltas(index).items():
            if name not in tensors or form.checksum(delta.algorithm, octets(tensors[name])) != delta.checksum:
                return name
        return None
    whole = open_checkpoint(folder) if folder is not None else base
    return next((name for name in tensors if not _same(tensors[name], whole, name)), None) if whole else None


def _same(tensor: Any, checkpoint: Checkpoint, name: str) -> bool:
    other = checkpoint.tensors.get(name)
    return other is not None and other.dtype == tensor.dtype and np.array_equal(octets(tensor), octets(other))
