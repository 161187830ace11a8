"""Progress bars: on a real terminal alone, never with --json, and never between a command and what it prints."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import pulsesync as pulse
from pulsesync.core.progress import ProgressBars
from pulsesync.store import LocalStore
from tests import commands
from tests.runs import publish_steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("progress") / "run"
    publish_steps(str(path), 12)
    return path


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read from a folder takes 0.1 s on the clock that bars go by, as from a store that is far away."""
    late, get, monotonic = [0.0], LocalStore.get, time.monotonic

    def slow(store: LocalStore, key: str, begin: int = 0, end: int | None = None) -> bytes:
        late[0] += 0.1
        return get(store, key, begin, end)

    monkeypatch.setattr(LocalStore, "get", slow)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + late[0])


class Terminal:
    """One whose screen is kept: what was written to it, in `shown` once it is closed."""

    def __init__(self) -> None:
        self._screen, self.end = pty.openpty()
        self._seen = b""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while piece := os.read(self._screen, 1 << 16):
                self._seen += piece

    def close(self) -> None:
        os.close(self.end)
        self._reader.join(30)
        os.close(self._screen)

    @property
    def shown(self) -> str:
        return self._seen.decode(errors="replace")

    @property
    def left(self) -> str:
        """What was not erased."""
        return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]", "", self.shown.rpartition("\x1b[2K")[2])


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    terminal = Terminal()
    yield terminal
    with contextlib.suppress(OSError):  # the test has closed it
        terminal.close()


def on_terminal(terminal: Terminal, *arguments: object) -> commands.Done:
    """Run a command whose stderr is a terminal, and whose stdout is none."""
    with os.fdopen(os.dup(terminal.end), "w") as stderr:
        done = commands.pulse(*arguments, stderr=stderr)
    terminal.close()
    return done


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize(
    ("command", "work"),
    [
        ("verify", ["reading records", "replaying"]),
        ("prune", ["reading manifests/"]),
        ("inspect", ["reading records"]),
        ("squash", ["squashing"]),
        ("log", ["reading records"]),
    ],
)
def test_a_command_shows_bars_on_a_terminal_and_prints_as_ever(
    run: Path, terminal: Terminal, command: str, work: list[str]
) -> None:
    plain = commands.pulse(command, run)
    assert "\x1b" not in plain.out + plain.err
    done = on_terminal(terminal, command, run)
    assert done.code == 0, terminal.shown
    assert done.out.splitlines()[-1] == plain.out.splitlines()[-1]
    assert "\x1b" not in done.out
    assert [what for what in work if what not in terminal.shown] == []
    assert terminal.left == ""


def test_a_process_shows_a_bar_on_its_terminal(run: Path, terminal: Terminal) -> None:
    far_away = (
        "import time; from pulsesync.store import LocalStore; get = LocalStore.get\n"
        "LocalStore.get = lambda *given: (time.sleep(0.03), get(*given))[1]\n"
        "from pulsesync.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", far_away, "inspect", run], stdout=subprocess.PIPE, stderr=terminal.end, text=True
    )
    out, _ = process.communicate(timeout=60)
    terminal.close()
    assert process.returncode == 0, terminal.shown
    assert out == commands.pulse("inspect", run).out
    assert "reading records" in terminal.shown
    assert terminal.left == ""


@pytest.mark.usefixtures("far_away")
@pytest.mark.parametrize("command", ["verify", "prune", "inspect"])
def test_json_is_for_machines_that_want_no_bar(run: Path, terminal: Terminal, command: str) -> None:
    done = on_terminal(terminal, command, run, "--json")
    assert (done.code, terminal.shown) == (0, "")
    assert done.out


def test_a_first_sync_of_the_library_shows_a_bar_with_one_line(
    tmp_path: Path, terminal: Terminal, capfd: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    with pulse.Publisher(str(tmp_path / "run")) as publisher:
        publisher.publish({"w": rng.integers(0, 1 << 32, 1 << 21, np.uint32).view(np.float32)}, step=0)

    def sync() -> None:
        with pulse.show_progress():
            pulse.Subscriber(str(tmp_path / "run")).sync({"w": np.zeros(1 << 21, np.float32)})

    with os.fdopen(os.dup(terminal.end), "w") as stderr, contextlib.redirect_stderr(stderr):
        sync()
    terminal.close()
    assert "anchor" in terminal.shown
    assert " MB" in terminal.shown
    assert terminal.left == ""
    sync()
    assert capfd.readouterr() == ("", "")


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars()
    assert not bars.is_shown
    bars.report(1, 2, "work")
    bars.hide()
    assert capsys.readouterr() == ("", "")


def test_publishing_shows_how_much_of_the_anchor_is_written(tmp_path: Path, terminal: Terminal) -> None:
    rng = np.random.default_rng(0)
    save_file({"w": rng.normal(size=1 << 21).astype(np.float32)}, tmp_path / "model.safetensors")
    done = on_terminal(terminal, "publish", tmp_path / "model.safetensors", tmp_path / "run")
    assert done.code == 0, terminal.shown
    assert done.out.startswith("version 0 (step 0)")
    assert "publishing 8.4 MB of" in terminal.shown
    assert "uploading an anchor" in terminal.shown or "encoding an anchor" in terminal.shown
