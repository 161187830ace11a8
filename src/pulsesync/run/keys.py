"""The names of the objects of a run in its store. docs/format.md defines them."""

import re

HEARTBEATS = "heartbeats/"  # one object a worker, overwritten; hints for people
LEASES = "publisher/"
LEASE = "publisher/lease"  # which publisher is alive, overwritten: a hint for other publishers
PRUNED = "pruned/"  # what prunes took out of use
CLOCK = "pruned/clock"  # an object that is written to read the store's own time
RECORDS = ("manifests/", "anchors/", "squashes/")
HEAD = "head"  # a hint at the newest version, which may be slightly older than the newest


_RECORD = re.compile(r"(manifests|anchors|squashes/\d\d)/\d{16}", re.ASCII)
_PRUNED_LIST = re.compile(rf"{PRUNED}\d+-\d+-[0-9a-f]+", re.ASCII)


def is_record(key: str) -> bool:
    """Return whether a key is that of a record. Others below the same prefix are none of the run's objects."""
    return _RECORD.fullmatch(key) is not None


def is_pruned_list(key: str) -> bool:
    """Return whether a key is that of a list which a prune has written."""
    return _PRUNED_LIST.fullmatch(key) is not None


def manifest_key(version: int) -> str:
    return f"manifests/{version:016d}"


def part_key(id_: str) -> str:
    return f"parts/{id_}"


def layout_key(id_: str) -> str:
    return f"layouts/{id_}"


def file_key(id_: str) -> str:
    return f"files/{id_}"


def anchor_key(epoch: int) -> str:
    return f"anchors/{epoch:016d}"


def squash_key(level: int, number: int) -> str:
    return f"squashes/{level:02d}/{number:016d}"


def start_key(digest: str) -> str:
    return f"starts/{digest}"


def pointer_prefix(name: str) -> str:
    return f"pointers/{name}/"


def pointer_key(name: str, number: int) -> str:
    return f"pointers/{name}/{number:016d}"


def pointer_hint(name: str) -> str:
    return f"pointers/{name}/{HEAD}"


def heartbeat_key(worker: str) -> str:
    return f"{HEARTBEATS}{worker}"
