"""Is there memory to spare? The files that Linux reports it in are made here, as machines and containers have them."""

from pathlib import Path

import pytest

from pulsesync.core import headroom
from pulsesync.core.headroom import Headroom

MB = 1 << 20
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


class Machine:
    """A machine of 1,000 MB, of which some are available, and a process in some control groups."""

    def __init__(self, root: Path, available_mb: int, groups: str = "") -> None:
        self.proc, self.groups = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        rows = f"MemTotal: {1000 * 1024} kB\nMemFree: 0 kB\nMemAvailable: {available_mb * 1024} kB\n"
        (self.proc / "meminfo").write_text(rows + "HugePages_Total: 0\n")
        (self.proc / "self" / "cgroup").write_text(groups)

    def limit(self, folder: str, files: tuple[str, str, str], limit: str, used_mb: int, cached_mb: int) -> None:
        group, (limit_file, used_file, prefix) = self.groups / folder, files
        group.mkdir(parents=True)
        (group / limit_file).write_text(f"{limit}\n")
        (group / used_file).write_text(f"{used_mb * MB}\n")
        halves = (cached_mb // 2 * MB, (cached_mb - cached_mb // 2) * MB)
        stat = [f"{prefix}{name}_file {size}" for name, size in zip(("active", "inactive"), halves, strict=True)]
        (group / "memory.stat").write_text("\n".join(["anon 7", *stat]) + "\n")

    def can_take(self, size_mb: int) -> bool:
        return headroom.can_take(size_mb * MB, self.proc, self.groups)


def test_a_quarter_of_the_memory_stays_available(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_mb=300)
    assert machine.can_take(50)
    assert not machine.can_take(51)


@pytest.mark.parametrize(
    ("groups", "folder", "files"),
    [("0::/jobs/7\n", "jobs", VERSION_2), ("3:cpu:/\n4:memory,hugetlb:/jobs/7\n0::/\n", "memory/jobs", VERSION_1)],
    ids=["version 2", "version 1"],
)
def test_a_container_with_less_memory_than_the_machine_is_what_counts(
    tmp_path: Path, groups: str, folder: str, files: tuple[str, str, str]
) -> None:
    machine = Machine(tmp_path, 900, groups)
    machine.limit(folder, files, str(400 * MB), used_mb=300, cached_mb=50)
    assert headroom.find(machine.proc, machine.groups) == [Headroom(900 * MB, 1000 * MB), Headroom(150 * MB, 400 * MB)]
    assert machine.can_take(50)
    assert not machine.can_take(51)


@pytest.mark.parametrize("limit", ["max", str(1 << 62)])
def test_a_group_without_a_limit_is_not_asked(tmp_path: Path, limit: str) -> None:
    machine = Machine(tmp_path, 900, "0::/\n")
    machine.limit("", VERSION_2, limit, used_mb=10**6, cached_mb=0)
    assert headroom.find(machine.proc, machine.groups) == [Headroom(900 * MB, 1000 * MB)]


def test_a_system_that_does_not_report_its_memory_has_none_to_spare(tmp_path: Path) -> None:
    assert not headroom.can_take(0, tmp_path, tmp_path)


def test_this_machine_reports_its_memory() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux has this file")
    assert 0 < headroom.find()[0].available <= headroom.find()[0].limit
