"""`pulse study`: what it prints, writes and refuses."""

import sys
from pathlib import Path
from unittest import mock

import pytest

from lab.tests.recordings import made
from pulsesync_lab.study.recording import Recording
from tests.commands import pulse
from tests.runs import publish_steps


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    made().write(tmp_path / "study.jsonl")
    return tmp_path / "study.jsonl"


def test_a_recording_is_shown_as_tables(recorded: Path) -> None:
    done = pulse("study", recorded)
    assert done.code == 0
    for words in ("97.667%", "96.000% at step 1", "By layer", "Experts", "model.embed_tokens.weight"):
        assert words in done.out
    assert done.err == ""


def test_for_machines_it_is_one_object(recorded: Path) -> None:
    (told,) = pulse("study", recorded, "--json").events
    assert (told["name"], told["steps"], told["sparsity"]["least"]) == (str(recorded), 3, 0.96)


def test_everything_that_is_wanted_is_written(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out = tmp_path / "made" / "here"
    done = pulse("study", recorded, "--out", out, "--csv", "--parquet", "--html", tmp_path / "own.html")
    assert done.code == 0
    files = sorted(path.name for path in out.iterdir())
    tables = [f"{name}.{kind}" for name in ("exponents", "steps", "tensors") for kind in ("csv", "parquet")]
    assert files == sorted([*tables, "study.html", "study.jsonl"])
    assert Recording.read(out / "study.jsonl") == made()
    assert (tmp_path / "own.html").read_text() == (out / "study.html").read_text()
    assert f"wrote {out / 'steps.csv'}" in done.out


def test_a_run_is_measured(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "run"), 5)
    (replayed,) = pulse("study", tmp_path / "run", "--json", "--lr", "3e-6").events
    (counted,) = pulse("study", tmp_path / "run", "--json", "--headers").events
    assert replayed["by_step"] == counted["by_step"]
    assert len(replayed["by_step"]) == 4
    assert replayed["units"]
    assert not counted["units"]
    assert "By magnitude" in pulse("study", tmp_path / "run", "--limit", 2).out


def test_the_folder_of_a_demo_has_its_run_in_store(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "demo" / "store"), 3)
    (tmp_path / "demo" / "steps.jsonl").write_text('{"step": 1}\n')
    assert pulse("study", tmp_path / "demo", "--headers", "--json").events[0]["steps"] == 2


def test_several_runs_are_shown_side_by_side(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    made().write(other)
    done = pulse("study", recorded, other, "--out", tmp_path / "out")
    assert done.out.count("97.667%") == 2
    assert len(list((tmp_path / "out").glob("*/study.html"))) == 2
    assert pulse("study", recorded, other, "--html", tmp_path / "x.html").refused(2, "use --out for a report of each")


def test_tables_need_a_folder(recorded: Path) -> None:
    assert pulse("study", recorded, "--csv").refused(2, "--out")


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path, recorded: Path) -> None:
    assert pulse("study", tmp_path / "absent").refused(3, "does not exist")
    assert pulse("study").refused(2, "got nothing")
    (tmp_path / "run" / "manifests").mkdir(parents=True)
    assert pulse("study", tmp_path / "run").refused(3, "no version is published")
    assert pulse("study", tmp_path / "run", recorded).refused(2, "of one kind")


def test_what_cannot_be_written_is_said_in_one_line(recorded: Path) -> None:
    assert pulse("study", recorded, "--out", recorded / "below").refused(1, "cannot write")


@pytest.mark.parametrize("place", [".", "study.jsonl"])
def test_what_is_looked_at_is_not_written_over(recorded: Path, tmp_path: Path, place: str) -> None:
    before = recorded.read_bytes()
    for more in (("--out", tmp_path), ("--html", recorded)):
        assert pulse("study", tmp_path / place, "--limit", 1, *more).refused(2, "would be overwritten")
    assert [file.name for file in tmp_path.iterdir()] == ["study.jsonl"]
    assert recorded.read_bytes() == before


def test_what_was_written_before_stays_whole_if_writing_fails(recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert pulse("study", recorded, "--out", out).code == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    with mock.patch("pulsesync_lab.cli.study.write_report", side_effect=OSError(28, "No space left", "study.html")):
        assert pulse("study", recorded, "--limit", 1, "--out", out).refused(1, "cannot write")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_without_pyarrow_the_extra_is_named(recorded: Path, tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"pyarrow": None}):
        assert pulse("study", recorded, "--out", tmp_path / "o", "--parquet").refused(1, "pulsesync-lab[study]")
