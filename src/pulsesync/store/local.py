"""A folder as a store, safe for several processes of one machine."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pulsesync.errors import ConflictError, NotFoundError, StoreError

_SPOOL = ".spool-"


class LocalStore:
    """Objects are files below a folder. A file appears under its name only when all of it is on the disk."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def get(self, key: str) -> bytes:
        with self._translated(key, "read"):
            return self._path(key).read_bytes()

    def put(self, key: str, data: bytes) -> None:
        with self._translated(key, "write"), _spooled(self._path(key), data) as spool:
            os.replace(spool, self._path(key))

    def create(self, key: str, data: bytes) -> None:
        with self._translated(key, "create"), _spooled(self._path(key), data) as spool:
            os.link(spool, self._path(key))

    def list(self, prefix: str) -> Iterator[str]:
        folder = self._path(prefix.rstrip("/") if prefix != "/" else prefix)
        with self._translated(prefix, "list"):
            files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(_SPOOL)]
        yield from sorted(path.relative_to(self.folder).as_posix() for path in files)

    def delete(self, key: str) -> None:
        with self._translated(key, "delete"):
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if "\0" in key or any(part in ("", ".", "..") or "\\" in part for part in parts):
            raise StoreError(f"{key!r} is not a key", key=key)
        return self.folder.joinpath(*parts)

    @contextmanager
    def _translated(self, key: str, verb: str) -> Iterator[None]:
        """Turn what the system raises into the errors of a store."""
        try:
            yield
        except FileExistsError as e:
            if verb != "create":
                raise StoreError(f"cannot {verb} {key} in {self.folder}: {e}", key=key) from e
            raise ConflictError(f"{key} exists already in {self.folder}", key=key) from e
        except FileNotFoundError as e:
            raise NotFoundError(f"there is no {key} in {self.folder}", key=key) from e
        except OSError as e:
            raise StoreError(f"cannot {verb} {key} in {self.folder}: {e}", key=key) from e


@contextmanager
def _spooled(target: Path, data: bytes) -> Iterator[Path]:
    """A file with these bytes, on the disk and beside its target, for as long as the block lasts."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as e:  # not to be taken for the object itself
        raise NotADirectoryError(f"{target.parent} is a file") from e
    path = target.parent / f"{_SPOOL}{secrets.token_hex(8)}"
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield path
    finally:
        path.unlink(missing_ok=True)
