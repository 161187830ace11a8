"""Temporary folders of killed processes."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher
from pulsesync.scratch import ScratchFolder
from pulsesync.store import MemoryStore


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@contextmanager
def process(program: str, temporary: Path) -> Iterator[subprocess.Popen[str]]:
    """A Python process whose temporary folder is this one, at the point where it has printed a line."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as started:
        try:
            assert started.stdout is not None
            assert started.stdout.readline() == "ready\n"
            yield started
        finally:
            started.kill()


def kill(started: subprocess.Popen[str]) -> None:
    started.send_signal(signal.SIGKILL)
    started.wait(timeout=20)


LOAD = """
import sys
import numpy as np
from pulsesync import Publisher, Subscriber
from pulsesync.store import MemoryStore

store, get = MemoryStore(), MemoryStore.get
publisher = Publisher(store)
publisher.publish({"w": np.arange(1000)})
publisher.flush()

def stall(self, key, *given):
    if key.startswith("parts/"):
        print("ready", flush=True)
        sys.stdin.read()
    return get(self, key, *given)

MemoryStore.get = stall
Subscriber(store).sync({"w": np.zeros(1000, int)})
"""


def test_what_a_killed_trainer_and_worker_left_is_removed_by_the_next_process(temporary: Path) -> None:
    # Takes two seconds: a process of its own imports the library, publishes and begins to load an anchor.
    with process(LOAD, temporary) as started:
        before = names(temporary)
        assert {name.rpartition("-")[0] for name in before} == {"pulse-spool", "pulse-anchor"}
        with Publisher(MemoryStore()):
            assert before < names(temporary)  # both are in use
        kill(started)
        assert before == names(temporary)
    with Publisher(MemoryStore()) as pub:
        pub.publish({"w": np.arange(1000)})
        assert names(temporary).isdisjoint(before)
    assert names(temporary) == set()


HOLD = """
import sys
from pulsesync.scratch import ScratchFolder
folder = ScratchFolder("test")
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_is_removed_is_logged(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    with process(HOLD, temporary) as started:
        (left,) = temporary.glob("pulse-test-*[!k]")
        (left / "file").write_bytes(b"x")
        kill(started)
    with caplog.at_level(logging.INFO, "pulsesync"), ScratchFolder("test"):
        assert [record.getMessage() for record in caplog.records] == [
            f"Removed {left}, which a process that has ended left behind."
        ]


FORK = """
import os, sys
from pulsesync.scratch import ScratchFolder
folder = ScratchFolder("test")
if os.fork() == 0:
    sys.exit()
os.wait()
assert folder.path.is_dir()
folder.close()
assert not folder.path.exists()
print("ready", flush=True)
"""


def test_a_forked_child_that_exits_leaves_its_parents_folder(temporary: Path) -> None:
    with process(FORK, temporary) as started:
        assert started.wait(timeout=20) == 0
    assert names(temporary) == set()


def test_a_process_that_ends_removes_its_folder(temporary: Path) -> None:
    with process(HOLD, temporary) as started:
        assert len(names(temporary)) == 2
        started.communicate(timeout=20)
    assert names(temporary) == set()


def test_a_folder_is_removed_when_its_object_is(temporary: Path) -> None:
    folder = ScratchFolder("test")
    (folder.path / "file").write_bytes(b"x")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    del folder
    assert names(temporary) == set()


def test_a_folder_without_a_lock_is_left_alone(temporary: Path) -> None:
    (temporary / "pulse-spool-abcdefgh").mkdir()
    with ScratchFolder("spool"):
        pass
    assert names(temporary) == {"pulse-spool-abcdefgh"}


def test_a_lock_that_another_process_removes_before_it_is_held_is_made_anew(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, met = fcntl.flock, []

    def interrupted(handle: int, how: int) -> None:
        if not met:
            (lock,) = temporary.iterdir()
            met.append(lock)
            lock.unlink()
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    folder = ScratchFolder("test")
    assert names(temporary) == {folder.path.name, f"{folder.path.name}.lock"}
    assert met[0].name not in names(temporary)
    folder.close()


def test_what_another_user_owns_is_left_alone(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (temporary / "pulse-test-1").mkdir()
    (temporary / "pulse-test-1.lock").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with ScratchFolder("test"):
        pass
    assert names(temporary) == {"pulse-test-1", "pulse-test-1.lock"}


def test_a_lock_that_is_a_link_is_not_followed(temporary: Path, tmp_path_factory: Any) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "file").touch()
    (temporary / "pulse-test-1").symlink_to(elsewhere)
    (temporary / "pulse-test-1.lock").symlink_to(elsewhere / "file")
    (temporary / "pulse-test-2").symlink_to(elsewhere)
    (temporary / "pulse-test-2.lock").touch()
    with ScratchFolder("test"):
        pass
    assert names(elsewhere) == {"file"}
