"""What may be the key of an object. The same for every store, so that a run can be copied from any to any."""

from pulsesync.errors import StoreError


def check_key(key: str) -> None:
    """Accept names joined by single slashes. Raises: StoreError, for what is none or could leave the run."""
    if "\0" in key or "\\" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"{key!r} is not a key", key=key)


def check_prefix(prefix: str) -> None:
    """Accept a key with a slash behind it. Raises: StoreError, for anything else."""
    if not prefix.endswith("/"):
        raise StoreError(f"{prefix!r} is not a key with a slash behind it", key=prefix)
    check_key(prefix.removesuffix("/"))
