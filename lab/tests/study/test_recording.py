"""The record: what is written is what is read, whatever became of its writer, and ranks add up."""

from dataclasses import replace
from pathlib import Path

import pytest

from pulsesync.errors import FormatError
from pulsesync_lab.study.recording import PatchBytes, Recording, RecordingHeader, Step, WatchedTensor, step_line

HEADER = RecordingHeader(
    "BF16", (WatchedTensor("a", (4, 5), 20, 10), WatchedTensor("b", (), 1, 1)), (1, 2), ("F16",), {"optimizer": "AdamW"}
)


def step(number: int, a: int = 3) -> Step:
    return Step(
        number,
        (a, 1),
        again=2,
        same_way=1,
        up=3,
        units={1: a, 16: 1},
        by_class={118: a + 1},
        weights_by_class={118: 10, 120: 11},
        windows={1: (2, 1)},
        contrast={"F16": (5, 1)},
        gradients=(10, 0),
        moved={-3: 7},
        hot=0.5,
        sizes={"gap": PatchBytes(100, 90), "context": PatchBytes(50)},
        lr=1e-6,
        seconds=0.25,
        facts={"reward": 0.5},
    )


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    recording = Recording(HEADER, (step(0), step(1, 0), Step(2, (0, 0))))
    recording.write(tmp_path / "study.jsonl")
    assert Recording.read(tmp_path / "study.jsonl") == recording
    assert recording.density() == [4 / 21, 1 / 21, 0]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "study.jsonl"
    Recording(HEADER, (step(0),)).write(path)
    with path.open("a") as file:
        file.write(step_line(step(1))[:kept])
    assert Recording.read(path).steps == (step(0),)


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "text\n", '{"study": 2}\n', '{"study": 1}\n'])
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "study.jsonl").write_text(text)
    with pytest.raises(FormatError):
        Recording.read(tmp_path / "study.jsonl")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "study.jsonl").write_bytes(b'{"study": 1}\n\xff\xfe\n')
    with pytest.raises(FormatError, match="not a recording"):
        Recording.read(tmp_path / "study.jsonl")


def test_a_rank_that_is_missing_is_named() -> None:
    ranks = [
        Recording(
            replace(HEADER, facts={"rank": n, "ranks": 4}, contrast=("F16",) if n else ("F16", "F32")), (step(0),)
        )
        for n in range(4)
    ]
    with pytest.raises(FormatError, match="rank 1, 3 of 4 ranks is missing"):
        Recording.join([ranks[0], ranks[2]])
    joined = Recording.join(ranks)
    assert (joined.header.facts, joined.header.contrast) == ({"ranks": 4}, ("F16",))
    assert Recording.join([joined]) == joined


def test_a_damaged_line_in_the_middle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.jsonl"
    Recording(HEADER, (step(0), step(1))).write(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + '{"step": 0}\n' + lines[2])
    with pytest.raises(FormatError, match="damaged"):
        Recording.read(path)


def test_ranks_add_up_and_steps_that_one_did_not_reach_are_left_out() -> None:
    other = RecordingHeader(
        "BF16", (WatchedTensor("c", (7,), 7, 7), WatchedTensor("a", (4, 5), 2, 2)), (1, 2), ("F16",), {}
    )
    theirs = Step(
        1,
        (5, 2),
        again=1,
        up=1,
        units={1: 7},
        by_class={118: 7},
        weights_by_class={118: 9},
        windows={1: (4, 2)},
        contrast={"F16": (0, 1)},
        gradients=(7, 2),
        hot=1.0,
        sizes={"gap": PatchBytes(10)},
        seconds=0.5,
    )
    joined = Recording.join([Recording(HEADER, (step(0), step(1))), Recording(other, (theirs,))])
    assert joined.header.tensors == (
        WatchedTensor("a", (4, 5), 22, 12),
        WatchedTensor("b", (), 1, 1),
        WatchedTensor("c", (7,), 7, 7),
    )
    (found,) = joined.steps
    assert (found.step, found.changed, found.again, found.up) == (1, (5, 1, 5), 3, 4)
    assert found.units == {1: 10, 16: 1}
    assert found.windows == {1: (4, 1, 4)}
    assert found.contrast == {"F16": (6, 1, 0)}
    assert found.gradients == (12, 0, 7)
    assert found.hot == (0.5 * 21 + 9) / 30
    assert found.sizes == {"gap": PatchBytes(110)}
    assert (found.lr, found.seconds, found.facts) == (1e-6, 0.5, {"reward": 0.5})
