"""Which keys are valid: the same for every store, so that a run can be copied between any two."""

import re

from pulsesync.errors import StoreError

WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # the name of a worker, in the key of its heartbeat
MAX_KEY = 1024  # characters; S3 and Google Cloud allow no more bytes
_HEARTBEAT = re.compile(rf"(?:.+/)?heartbeats/{WORKER.pattern}", re.DOTALL)


def check_key(key: str) -> None:
    """Check that a key is names joined by single slashes. Raises: StoreError, for anything that could leave the run."""
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"a key must be names joined by single slashes, such as parts/0a1b; got {key!r}", key=key)


def check_prefix(prefix: str) -> None:
    """Check that a prefix is a key followed by a slash. Raises: StoreError, for anything else."""
    if not prefix.endswith("/"):
        raise StoreError(f"a prefix must be a key followed by a slash, such as parts/; got {prefix!r}", key=prefix)
    check_key(prefix.removesuffix("/"))


def is_listed(key: str) -> bool:
    """Return whether a listing over HTTP may have a key: one that can be asked for, and cannot disturb a terminal.

    Other programs leave files of any name in a folder, such as `Icon` with a carriage return.
    """
    try:
        check_key(key)
    except StoreError:
        return False
    return len(key) <= MAX_KEY and key.isprintable()  # half a surrogate pair cannot be encoded in a request


def is_heartbeat(key: str) -> bool:
    """Return whether a key is that of a worker's heartbeat, the one object that a server accepts from readers.

    It may begin with the folder of a run, but not with one inside a run: those of pointers have a `head`, as runs do.
    """
    above = key.split("/")[:-2]
    return len(key) <= MAX_KEY and _HEARTBEAT.fullmatch(key) is not None and not {"pointers", "heartbeats"} & set(above)
