"""What may be the key of an object. The same for every store, so that a run can be copied from any to any."""

import re

from pulsesync.errors import StoreError

WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # the name of a worker, in the key of its heartbeat
_HEARTBEAT = re.compile(rf"(?:.+/)?heartbeats/{WORKER.pattern}", re.DOTALL)


def check_key(key: str) -> None:
    """Accept names joined by single slashes. Raises: StoreError, for what is none or could leave the run."""
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"{key!r} is not a key", key=key)


def check_prefix(prefix: str) -> None:
    """Accept a key with a slash behind it. Raises: StoreError, for anything else."""
    if not prefix.endswith("/"):
        raise StoreError(f"{prefix!r} is not a key with a slash behind it", key=prefix)
    check_key(prefix.removesuffix("/"))


def is_heartbeat(key: str) -> bool:
    """Whether a key is that of a worker's heartbeat, the one object that a server accepts from those who read a run."""
    return len(key) <= 1024 and _HEARTBEAT.fullmatch(key) is not None
