"""Temporary folders of killed processes."""

import fcntl
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.scratch import ScratchFolder
from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.store import MemoryStore
from tests.processes import Fleet, Program, fleet, told
from tests.runs import Watched

__all__ = ["fleet"]

LINE = b"The temporary folder of a pulsesync process that has this file locked.\n"
OURS, OTHER = "pulse-spool-0123456789abcdef", "pulse-spool-fedcba9876543210"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class Started:
    """A process whose temporary folder is this one, at the point where it is ready."""

    def __init__(self, fleet: Fleet, case: Callable[..., None], temporary: Path) -> None:
        sign = temporary.with_name(f"{temporary.name}-ready")
        self.go = temporary.with_name(f"{temporary.name}-go")
        self.program = fleet.start_program(case, {"TMPDIR": str(temporary)}, ready=str(sign), go=str(self.go))
        wait_for(sign, self.program)

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        self.program.kill()

    def end(self) -> None:
        self.go.touch()
        assert self.program.wait() == 0, told(self.program.out)


def wait_for(path: Path, program: Program | None = None) -> None:
    while not path.exists():
        assert program is None or program.code is None, told(program.out)
        time.sleep(0.002)


def load(ready: str, go: str) -> None:
    """Publish, and begin to load an anchor."""
    store = Watched()
    publisher = Publisher(store)
    weights = np.random.default_rng(0).integers(0, 1 << 62, 1000)  # so large that its part is an object
    publisher.publish({"w": weights})
    publisher.flush()

    def stall(verb: str, key: str) -> None:
        if key.startswith("parts/"):
            Path(ready).touch()
            wait_for(Path(go))

    local = {"w": np.zeros(1000, int)}
    worker = Subscriber(store)
    worker.sync(local)
    local["w"][0] ^= 1
    store.before = stall
    worker.sync(local, verify=True)


def test_what_a_killed_trainer_left_is_removed_by_the_next_process_and_a_worker_leaves_nothing(
    temporary: Path, fleet: Fleet
) -> None:
    with Started(fleet, load, temporary) as started:
        before = names(temporary)
        assert {name.rpartition("-")[0] for name in before} == {"pulse-spool"}
        with closing(ScratchFolder()):
            assert before < names(temporary)  # it is in use
        started.program.kill()
        assert before == names(temporary)
    with Publisher(MemoryStore()) as pub:
        pub.publish({"w": np.arange(1000)})
        assert names(temporary).isdisjoint(before)
    assert names(temporary) == set()


def test_a_publisher_makes_its_folder_in_the_process_that_publishes_first(temporary: Path) -> None:
    with Publisher(MemoryStore()) as pub:
        assert names(temporary) == set()  # a process that is forked now makes one of its own
        pub.publish({"w": np.arange(1000)})
        assert len(names(temporary)) == 2
    assert names(temporary) == set()


def hold(ready: str, go: str) -> None:
    folder = ScratchFolder()
    assert folder.path.is_dir()
    Path(ready).touch()
    wait_for(Path(go))


def test_what_is_removed_is_logged(temporary: Path, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    with Started(fleet, hold, temporary) as started:
        (left,) = temporary.glob("pulse-spool-*[!k]")
        (left / "file").write_bytes(b"x")
        started.program.kill()
    with caplog.at_level(logging.INFO, "pulsesync"), closing(ScratchFolder()):
        assert [record.getMessage() for record in caplog.records] == [
            f"Removed {left}, which was left by a process that has ended."
        ]


def fork(ready: str, go: str) -> None:
    folder = ScratchFolder()
    if os.fork() == 0:
        sys.exit()
    os.wait()
    assert folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()
    Path(ready).touch()
    wait_for(Path(go))


def test_a_forked_child_that_exits_leaves_its_parents_folder(temporary: Path, fleet: Fleet) -> None:
    with Started(fleet, fork, temporary) as started:
        assert names(temporary) == set()
        started.end()


def test_a_process_that_ends_removes_its_folder(temporary: Path, fleet: Fleet) -> None:
    with Started(fleet, hold, temporary) as started:
        assert len(names(temporary)) == 2
        started.end()
    assert names(temporary) == set()


def test_a_folder_is_removed_when_its_object_is(temporary: Path) -> None:
    folder = ScratchFolder()
    (folder.path / "file").write_bytes(b"x")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    del folder
    assert names(temporary) == set()


def test_a_folder_without_a_lock_is_left_alone(temporary: Path) -> None:
    (temporary / "pulse-spool-abcdefgh").mkdir()
    with closing(ScratchFolder()):
        pass
    assert names(temporary) == {"pulse-spool-abcdefgh"}


def test_a_lock_that_another_process_removes_before_it_is_held_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    met: list[Path] = []

    def interrupted(handle: int, how: int) -> None:
        if not met:
            (lock,) = temporary.iterdir()
            met.append(lock)
            lock.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    folder = ScratchFolder()
    assert names(temporary) == {folder.path.name, f"{folder.path.name}.lock"}
    assert met[0].name not in names(temporary)
    folder.close()


def test_a_lock_that_a_sweeping_process_has_first_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    met: list[int] = []

    def quicker(handle: int, how: int) -> None:
        if not met:
            met.append(os.open(next(temporary.iterdir()), os.O_RDONLY))
            flock(met[0], fcntl.LOCK_EX)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", quicker)
    with closing(ScratchFolder()) as folder:
        os.close(met[0])
        assert names(temporary) == {folder.path.name, f"{folder.path.name}.lock"}


def left_behind(temporary: Path, name: str, line: bytes = LINE) -> Path:
    """A folder with a file in it, and a lock that no process has."""
    (temporary / name).mkdir()
    (temporary / name / "file").touch()
    (temporary / f"{name}.lock").write_bytes(line)
    return temporary / name


def test_what_a_process_left_behind_is_known_by_its_name_and_the_line_in_its_lock(temporary: Path) -> None:
    left = left_behind(temporary, OURS)
    with closing(ScratchFolder()):
        assert not left.exists()
    assert names(temporary) == set()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pulse-run", b""),  # `flock /tmp/pulse-run.lock train --out /tmp/pulse-run`
        ("pulse-run", LINE),
        ("pulse-other-0123456789abcdef", LINE),
        (f"{OURS}-copy", LINE),
        (OURS, b""),
        (OURS, LINE + b"more"),
    ],
)
def test_a_folder_that_this_library_did_not_make_is_left_alone(temporary: Path, name: str, line: bytes) -> None:
    folder = left_behind(temporary, name, line)
    with closing(ScratchFolder()):
        pass
    assert names(folder) == {"file"}
    assert names(temporary) == {name, f"{name}.lock"}


def test_what_another_user_owns_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_behind(temporary, OURS)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with closing(ScratchFolder()):
        pass
    assert names(temporary) == {OURS, f"{OURS}.lock"}


def test_a_lock_that_is_a_link_is_not_followed(temporary: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").write_bytes(LINE)
    (temporary / OURS).symlink_to(elsewhere)
    (temporary / f"{OURS}.lock").symlink_to(elsewhere / "file")
    (temporary / OTHER).symlink_to(elsewhere)
    (temporary / f"{OTHER}.lock").write_bytes(LINE)
    with closing(ScratchFolder()):
        pass
    assert names(elsewhere) == {"file"}


# Folders that keep what was fetched or will be sent


def publish_with_spool(spool: Path) -> None:
    with Publisher(MemoryStore(), spool=spool, anchor_every=0.0) as publisher:
        for value in range(2):
            publisher.publish({"w": np.full(100_000, value, np.float32)})


def sync_with_cache(cache: Path) -> None:
    Subscriber(published(), cache=cache).sync({"w": np.zeros(100_000, np.float32)})


def follow_in(folder: Path) -> None:
    with HuggingFaceFolder(published(), folder) as kept:
        kept.update()


def published() -> MemoryStore:
    store = MemoryStore()
    with Publisher(store) as publisher:
        publisher.publish({"w": np.arange(100_000, dtype=np.float32)})
    return store


@pytest.mark.parametrize("use", [publish_with_spool, sync_with_cache, follow_in])
def test_other_users_cannot_read_what_a_new_folder_keeps(use: Callable[[Path], None], tmp_path: Path) -> None:
    """The weights are in it. One that exists keeps its mode, so that an operator can share it."""
    before = os.umask(0o022)
    try:
        use(tmp_path / "new" / "folder")
        (tmp_path / "shared").mkdir()
        use(tmp_path / "shared")
    finally:
        os.umask(before)
    assert any(path.is_file() for path in (tmp_path / "new" / "folder").rglob("*"))
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "new" / "folder").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o755
