"""How much memory this process can still use: of the machine, and of the control groups (containers) that it is in."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SPARE = 4  # a quarter of all memory stays available, for other processes and for what this one needs next
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class Headroom(NamedTuple):
    """The memory that is available, as the kernel counts it, of a limit in bytes."""

    available: int
    limit: int


class _GroupFiles(NamedTuple):
    """Where a version of control groups keeps what it knows."""

    folder: str
    limit: str
    used: str
    cached: tuple[str, str]  # rows of `memory.stat`: bytes of cached files, which the kernel frees when memory is short


_VERSION_1 = _GroupFiles(
    "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_VERSION_2 = _GroupFiles("", "memory.max", "memory.current", ("active_file", "inactive_file"))


def can_take(size_bytes: int, proc: Path = _PROC, groups: Path = _GROUPS) -> bool:
    """Whether a quarter of the memory is still available after this process takes this many bytes.

    Processes that ask before each step share what there is. False where memory is not reported.
    """
    found = find(proc, groups)
    return bool(found) and all(room.available - size_bytes >= room.limit // SPARE for room in found)


def find(proc: Path = _PROC, groups: Path = _GROUPS) -> list[Headroom]:
    """The headroom of the machine, and of control groups that have less memory; nothing where it is not reported."""
    try:
        rows = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
        machine = Headroom(*(1024 * int(rows[name].split()[0]) for name in ("MemAvailable", "MemTotal")))
    except (OSError, ValueError, KeyError):
        return []
    found = [machine]
    with suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                found += _of_groups(groups, path, _VERSION_2, machine.limit)
            elif "memory" in controllers.split(","):
                found += _of_groups(groups, path, _VERSION_1, machine.limit)
    return found


def _of_groups(groups: Path, path: str, files: _GroupFiles, most: int) -> Iterator[Headroom]:
    """The headroom of a group and of all groups that it is in.

    In a container the path may be one of the host, of which only the top exists. most: limits at or above this number
    of bytes count as none; the usage need not be read then, which takes the kernel a while.
    """
    group = Path(path.lstrip("/"))
    for name in (group, *group.parents):
        folder = groups / files.folder / name
        with suppress(OSError, ValueError, KeyError):  # no such group, or no limit: "max" is not a number
            limit = int((folder / files.limit).read_text())
            if limit < most:
                used = int((folder / files.used).read_text())
                rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield Headroom(limit - used + sum(int(rows[row]) for row in files.cached), limit)
