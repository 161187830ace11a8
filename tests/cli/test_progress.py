"""Progress bars: on a real terminal alone, never with --json, and never between a command and what it prints."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pulsesync.core.progress import ProgressBars
from tests.commands import PULSE
from tests.runs import Training, publish_steps

# The command, with a store that is as slow as one far away.
SLOW = [
    sys.executable,
    "-c",
    "import time; from pulsesync.store import LocalStore; get = LocalStore.get\n"
    "LocalStore.get = lambda *given: (time.sleep(0.05), get(*given))[1]\n"
    "from pulsesync.cli import main; main()",
]
SYNC = """
import sys, time
import numpy as np
import pulsesync as pulse
from pulsesync.store import LocalStore

class Slow(LocalStore):
    def get(self, key, begin=0, end=None):
        if key.startswith("parts/"):
            time.sleep(0.6)
        return super().get(key, begin, end)

weights = {"w": np.zeros((1 << 22,), np.float32)}
with pulse.show_progress():
    report = pulse.Subscriber(Slow(sys.argv[1])).sync(weights)
print(report.version)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    publish_steps(str(tmp_path / "run"), 12, Training())
    return tmp_path / "run"


def on_terminal(*command: str, timeout_s: float = 60.0) -> tuple[int, str, str]:
    """Run a command whose stderr is a terminal and whose stdout is a pipe; return its code and both."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    seen, until = b"", time.monotonic() + timeout_s
    try:
        while time.monotonic() < until:
            ready, _, _ = select.select([ours], [], [], 0.1)
            if ready:
                try:
                    piece = os.read(ours, 1 << 16)
                except OSError:  # the other end was closed
                    break
                if not piece:
                    break
                seen += piece
            elif process.poll() is not None:
                break
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        os.close(ours)
    return process.returncode, out.decode(), seen.decode(errors="replace")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("verify", "reading records"),
        ("verify", "replaying"),
        ("prune", "reading manifests/"),
        ("inspect", "reading records"),
        ("squash", "squashing"),
        ("log", "reading records"),
    ],
)
def test_a_command_shows_a_bar_on_a_terminal_and_prints_as_ever(run: Path, command: str, what: str) -> None:
    plain = subprocess.run([*PULSE, command, str(run)], capture_output=True, text=True, timeout=60, check=True)
    assert "\x1b" not in plain.stdout + plain.stderr
    code, out, seen = on_terminal(*SLOW, command, str(run))
    assert code == 0, seen
    assert out.splitlines()[-1] == plain.stdout.splitlines()[-1]
    assert "\x1b" not in out
    assert what in seen
    left = seen.rpartition("\x1b[2K")[2]  # what was not erased
    assert re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]", "", left) == ""


@pytest.mark.parametrize("command", ["verify", "prune", "inspect"])
def test_json_is_for_machines_that_want_no_bar(run: Path, command: str) -> None:
    code, out, seen = on_terminal(*SLOW, command, str(run), "--json")
    assert (code, seen) == (0, "")
    assert out


def test_a_first_sync_of_the_library_shows_a_bar_with_one_line(tmp_path: Path) -> None:
    import numpy as np

    import pulsesync as pulse

    with pulse.Publisher(str(tmp_path / "run")) as publisher:
        rng = np.random.default_rng(0)
        publisher.publish({"w": rng.integers(0, 1 << 32, 1 << 22, np.uint32).view(np.float32)}, step=0)
    code, out, seen = on_terminal(sys.executable, "-c", SYNC, str(tmp_path / "run"))
    assert (code, out) == (0, "0\n"), seen
    assert "anchor" in seen
    assert " MB" in seen
    silent = subprocess.run(
        [sys.executable, "-c", SYNC, str(tmp_path / "run")], capture_output=True, text=True, timeout=60, check=True
    )
    assert (silent.stdout, silent.stderr) == ("0\n", "")


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    bars = ProgressBars()
    assert not bars.is_shown
    bars.report(1, 2, "work")
    bars.hide()
    assert capsys.readouterr() == ("", "")


def test_publishing_shows_how_much_of_the_anchor_is_written(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    save_file({"w": rng.normal(size=1 << 22).astype(np.float32)}, tmp_path / "model.safetensors")
    code, out, seen = on_terminal(*PULSE, "publish", str(tmp_path / "model.safetensors"), str(tmp_path / "run"))
    assert code == 0, seen
    assert out.startswith("version 0 (step 0)")
    assert "publishing 16.8 MB of" in seen
    assert "uploading an anchor" in seen or "encoding an anchor" in seen
