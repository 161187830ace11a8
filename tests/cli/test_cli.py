"""The command as people run it: real processes, real folders."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)  # on a machine without cached kernels two processes compile them side by side
PULSE = [sys.executable, "-c", "from pulsesync.cli import main; main()"]


def pulse(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PULSE, *arguments], capture_output=True, text=True, timeout=150, check=False)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, object]]]:
    run = tmp_path_factory.mktemp("demo") / "run"
    done = pulse("demo", "--steps", "3", "--width", "64", "--out", str(run), "--json")
    assert done.returncode == 0, done.stderr
    return run, [json.loads(line) for line in done.stdout.splitlines()]


def test_the_demo_ends_with_identical_weights(demo: tuple[Path, list[dict[str, object]]]) -> None:
    *steps, summary = demo[1]
    assert [step["version"] for step in steps] == [0, 1, 2, 3]
    assert summary["identical"] is True
    assert summary["versions"] == 3


def test_the_demo_refuses_a_folder_in_use(demo: tuple[Path, list[dict[str, object]]]) -> None:
    done = pulse("demo", "--out", str(demo[0]))
    assert done.returncode == 1
    assert "not empty" in done.stderr
    assert "Traceback" not in done.stderr


def test_inspect_lists_the_versions_of_a_run(demo: tuple[Path, list[dict[str, object]]]) -> None:
    done = pulse("inspect", str(demo[0]), "--json")
    assert [row["version"] for row in json.loads(done.stdout)["versions"]] == [0, 1, 2, 3]


def test_inspect_shows_the_tiles_of_a_part(demo: tuple[Path, list[dict[str, object]]]) -> None:
    part = max((demo[0] / "parts").iterdir(), key=lambda path: path.stat().st_size)
    facts = json.loads(pulse("inspect", str(part), "--json").stdout)
    assert [tile["codec"] for tile in facts["tiles"]] == ["dense"] * 3
    assert facts["bytes"] == part.stat().st_size


def test_inspect_refuses_a_damaged_part_in_one_line(demo: tuple[Path, list[dict[str, object]]]) -> None:
    part = min((demo[0] / "parts").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    (part.parent / "damaged").write_bytes(data)
    done = pulse("inspect", str(part.parent / "damaged"))
    (part.parent / "damaged").unlink()
    assert done.returncode == 1
    assert done.stderr.startswith("pulse: section")
    assert len(done.stderr.splitlines()) == 1


def test_inspect_says_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        done = pulse("inspect", str(path))
        assert done.returncode == 1
        assert str(path) in done.stderr
