"""Numbers of a recording that was written by hand, and the pages."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pulsesync_lab.study.experiments import results
from pulsesync_lab.study.experiments.arm import Arm, Experiment, Row
from pulsesync_lab.study.experiments.measures import measure
from pulsesync_lab.study.recording import PatchBytes, Recording, RecordingHeader, Step, WatchedTensor

NAMES = ("layers.0.experts.0.up.weight", "layers.0.experts.1.up.weight", "head.weight")


def recording_of(
    *changed: tuple[int, ...],
    windows: tuple[int, ...] = (1, 2),
    lr: float | None = None,
    moved: Mapping[int, int] | None = None,
    arm: Arm | None = None,
    **facts: Any,
) -> Recording:
    """Three tensors of 100 weights, half of them sampled; `changed` has, per step, how many of each tensor change."""
    if arm is not None:
        facts["arm"] = arm.to_json()
    header = RecordingHeader(
        "BF16", tuple(WatchedTensor(name, (100,), 100, 50) for name in NAMES), windows, ("F32", "F8_E4M3"), facts
    )
    steps = [
        Step(
            number,
            counts,
            again=sum(counts) // 2,
            same_way=sum(counts) // 4,
            units={1: 3, 2: 1},
            windows={1: (3, 0, 0)} | ({2: (5, 5, 5)} if number else {}),
            contrast={"F32": (50, 50, 20), "F8_E4M3": (1, 1, 1)},
            gradients=(50, 25, 0),
            sizes={"gap": PatchBytes(100), "context": PatchBytes(90, 30)},
            facts={"reward": number / 10},
            lr=lr,
            moved=dict(moved or {}),
        )
        for number, counts in enumerate(changed)
    ]
    return Recording(header, tuple(steps))


def test_every_column_is_what_the_counts_say() -> None:
    found = measure(recording_of((0, 0, 6), (30, 0, 6), (30, 0, 0), median=0.02))
    assert found == pytest.approx(
        {
            "k1": 100 - 72 / 9,
            "min": 88.0,
            "k2": 90.0,
            "first": 98.0,
            "trough": 92.0,
            "trough step": 1,
            "plateau": 89.0,
            "BF16": 98.0,
            "F32": 20.0,
            "F8_E4M3": 98.0,
            "one unit": 75.0,
            "overlap early": 50.0,
            "overlap late": 50.0,
            "same way": 100 * 16 / 33,
            "inactive": 100 * 5 / 9,
            "bits": 8 * 90 / 72,
            "median": 0.02,
            "gradients": 50.0,
            "experts": 2,
            "experts changed": 100 / 3,
            "experts never": 50.0,
            "least expert": 0.0,
            "most expert": 20.0,
            "reward first": 0.0,
            "reward last": 0.2,
        }
    )


def test_the_trough_is_the_lowest_ten_steps_in_a_row() -> None:
    changed = [(0, 0, 3)] * 20 + [(0, 0, 30)] * 10 + [(0, 0, 6)] * 30
    found = measure(recording_of(*changed))
    assert (found["first"], found["trough"], found["trough step"], found["plateau"]) == (99.0, 90.0, 25.0, 98.0)


def test_a_run_in_which_nothing_changed_leaves_shares_of_changes_out() -> None:
    found = measure(recording_of((0, 0, 0)))
    assert found["k1"] == 100.0
    assert not {"overlap late", "bits", "same way"} & found.keys()


def test_the_mean_update_is_over_the_whole_sample_and_times_the_rate() -> None:
    """Half of a sample of 150 moved by the rate or up to √2 of it; the others did not, and were not always counted."""
    for moved in ({0: 75}, {0: 75, -100: 75}):
        found = measure(recording_of((1, 0, 0), lr=3e-6, moved=moved))
        assert found["moved"] == pytest.approx(3 * 2**0.25 / 2)
    assert "moved" not in measure(recording_of((1, 0, 0), moved={0: 75}))


@pytest.mark.parametrize("masters", ["fp32", "rounded", "bf16"])
def test_without_masters_nothing_is_told_of_what_only_masters_hold(masters: Any) -> None:
    found = measure(recording_of((1, 0, 0), lr=3e-6, moved={0: 75}, arm=Arm("an arm", masters=masters)))
    assert ({"moved", "F32"} & found.keys()) == ({"moved", "F32"} if masters == "fp32" else set())
    assert {"BF16", "F8_E4M3"} <= found.keys()


def test_two_digits_count_and_the_deviation_has_as_many_places() -> None:
    cells = [results.ResultRow("", {"x": values}).cell("x", results.TWO_DIGITS) for values in ((123.4, 123.4), (3.0,))]
    cells += [results.ResultRow("", {"x": values}).cell("x", results.TWO_DIGITS) for values in ((0.0123,), (0.0,))]
    assert cells == ["123 ± 0", "3.0", "0.012", "0.0"]


def test_a_recording_without_steps_says_nothing() -> None:
    assert measure(recording_of()) == {}


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    arms = (Arm("one", game="pendulum"), Arm("two"))
    rows = (
        Row("theirs", "a paper", {"k1": 99.5, "first": 99.9}, beside="one"),
        Row("other", "a book", {"F32": 0.5, "experts changed": 98, "plateau": "45–52"}),
    )
    experiment = Experiment("test", "Why?", arms, rows, "Because.", (0, 1), tuple(results.TABLES))
    folder = tmp_path / "test"
    folder.mkdir()
    for seed in (0, 1):
        path = results.path_of(folder, arms[0], seed)
        recording_of((0, 0, 6 + 6 * seed), (30, 0, 6), arm=arms[0], seed=seed).write(path)
        recording_of((0, 3, 0), arm=arms[0], seed=seed).write(path.with_name(f"critic-{path.name}"))
    recording_of((3, 3, 3), arm=arms[1], seed=0).write(results.path_of(folder, arms[1], 0))
    return experiment


def rows(page: str, title: str) -> dict[str, dict[str, str]]:
    """Of the table with this title, cells by the name of the row."""
    table = page.split(f"## {title}")[1].split("\n\n")[1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {line[0]: dict(zip(cells[0][1:], line[1:], strict=True)) for line in cells if line[0] != "---"}


def test_a_page_has_a_row_for_every_arm_and_every_published_figure(experiment: Experiment, tmp_path: Path) -> None:
    results.write_results(experiment, tmp_path / "test")
    page = (tmp_path / "test" / "results.md").read_text()
    assert page.startswith("# test: Why?\n")
    windows = rows(page, "Weights unchanged")
    assert list(windows) == ["", "one", "one, critic", "*a paper: theirs*", "two"]
    assert windows["one"] == {"k = 1": "92.500 ± 0.707", "min": "88.000 ± 0.000", "2": "90.000 ± 0.000"}
    assert windows["one, critic"]["k = 1"] == "99.000 ± 0.000"
    assert windows["*a paper: theirs*"] == {"k = 1": "*99.500*", "min": "", "2": ""}
    assert windows["two"]["k = 1"] == "97.000"
    assert rows(page, "Over the run")["*a paper: theirs*"]["first step"] == "*99.900*"
    assert rows(page, "Over the run")["*a book: other*"]["plateau"] == "*45–52*"
    assert "2 arms × 2 seeds, 200 optimizer steps, on cpu." in page
    assert rows(page, "Unchanged in a step by dtype")["*a book: other*"]["FP32"] == "*0.500*"
    assert rows(page, "Experts")["*a book: other*"]["changed in a step, %"] == "*98.00*"
    assert "Because." in page
    assert "Published: a book; a paper." in page


def test_the_index_has_every_arm_of_every_experiment(experiment: Experiment, tmp_path: Path) -> None:
    experiment.save(tmp_path / "test")
    results.write_index(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert "## [test](test/results.md): Why?" in page
    assert "| one | 92.500 ± 0.707 |  |  | 0.100 ± 0.000 |" in page
    assert "| *a paper: theirs* | *99.500* |  |  |  |" in page


def test_an_arm_that_was_not_run_has_an_empty_row(experiment: Experiment, tmp_path: Path) -> None:
    results.path_of(tmp_path / "test", experiment.arms[1], 0).unlink()
    results.write_results(experiment, tmp_path / "test")
    assert set(rows((tmp_path / "test" / "results.md").read_text(), "Weights unchanged")["two"].values()) == {""}


@pytest.mark.parametrize("changes", [{"lr": 1e-3}, {"steps": 4}, {"masters": "bf16"}])
def test_a_recording_of_another_configuration_is_not_shown(
    changes: dict[str, Any], experiment: Experiment, tmp_path: Path
) -> None:
    arm, folder = experiment.arms[1], tmp_path / "test"
    recording_of((3, 3, 3), arm=replace(arm, **changes), seed=0).write(results.path_of(folder, arm, 0))
    results.write_results(experiment, folder)
    assert set(rows((folder / "results.md").read_text(), "Weights unchanged")["two"].values()) == {""}


def test_a_recording_from_another_device_is_shown(experiment: Experiment, tmp_path: Path) -> None:
    arm, folder = experiment.arms[1], tmp_path / "test"
    recording_of((3, 3, 3), arm=replace(arm, device="cuda"), seed=0).write(results.path_of(folder, arm, 0))
    results.write_results(experiment, folder)
    assert rows((folder / "results.md").read_text(), "Weights unchanged")["two"]["k = 1"] == "97.000"
