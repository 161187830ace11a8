"""A folder as a store, safe for several processes of one machine."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pulsesync.errors import ConflictError, NotFoundError, StoreError


class LocalStore:
    """Objects are files below a folder. A file appears under its name only when all of it is on the disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise StoreError(f"{key!r} is not a key", key=key)
        return self.folder.joinpath(*parts)

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError as e:
            raise NotFoundError(f"there is no {key} in {self.folder}", key=key) from e
        except OSError as e:
            raise StoreError(f"cannot read {key} in {self.folder}: {e}", key=key) from e

    def put(self, key: str, data: bytes) -> None:
        with _Spool(self._path(key), data, key) as spool:
            os.replace(spool.path, spool.target)

    def create(self, key: str, data: bytes) -> None:
        with _Spool(self._path(key), data, key) as spool:
            try:
                os.link(spool.path, spool.target)
            except FileExistsError as e:
                raise ConflictError(f"{key} exists already in {self.folder}", key=key) from e

    def list(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix.rstrip("/"))
        if not folder.is_dir():
            return
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.name.startswith(".spool-"):
                yield path.relative_to(self.folder).as_posix()

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)


class _Spool:
    """A file with the object's bytes, on the disk and beside its target, for as long as the block lasts."""

    def __init__(self, target: Path, data: bytes, key: str) -> None:
        self.target, self.data, self.key = target, data, key

    def __enter__(self) -> "_Spool":
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=".spool-", dir=self.target.parent)
            self.path = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(self.data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as e:
            raise StoreError(f"cannot write {self.key}: {e}", key=self.key) from e
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
