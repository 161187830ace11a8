"""Experiments of arms × seeds: which are run, which files are kept, and what is reported."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.tests.study.experiments.arms import tiny
from pulsesync.errors import PulseError
from pulsesync_lab.study.experiments import __main__ as module
from pulsesync_lab.study.experiments import loop, results, runner, sweeps
from pulsesync_lab.study.experiments.arm import Arm, Experiment, Row
from pulsesync_lab.study.experiments.results import path_of
from pulsesync_lab.study.recording import Recording
from tests import commands


def experiment_of(*arms: Arm, **changes: Any) -> Experiment:
    return Experiment("small", "Does it work?", arms, **{"seeds": (0, 1)} | changes)


def test_every_arm_and_seed_is_recorded_and_the_configuration_saved(tmp_path: Path) -> None:
    experiment = experiment_of(tiny("one arm"), tiny("arm 2, 1e-3"))
    told: list[str] = []
    runner.run([experiment], tmp_path, report=told.append)
    assert sorted(path.name for path in (tmp_path / "small").iterdir()) == [
        "arm-2-1e-3-seed0.jsonl",
        "arm-2-1e-3-seed1.jsonl",
        "config.json",
        "one-arm-seed0.jsonl",
        "one-arm-seed1.jsonl",
        "results.md",
    ]
    saved = json.loads((tmp_path / "small" / "config.json").read_text())
    assert saved["arms"] == [arm.to_json() for arm in experiment.arms]
    assert Experiment.load(tmp_path / "small") == experiment
    assert len(told) == 5  # a policy is made, and four arms run


def test_what_is_finished_is_not_run_again_and_what_differs_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = tiny("one")
    runner.run([experiment_of(arm)], tmp_path)
    run: list[tuple[str, int]] = []

    def train(arm: Arm, seed: int, *_: object) -> float:
        run.append((arm.name, seed))
        return 0.0

    monkeypatch.setattr(runner, "_train", train)
    runner.run([experiment_of(arm, tiny("two"))], tmp_path)
    assert run == [("two", 0), ("two", 1)]
    run.clear()
    runner.run([experiment_of(tiny("one", lr=1e-4))], tmp_path)
    assert run == [("one", 0), ("one", 1)]
    run.clear()
    runner.run([experiment_of(tiny("one", device="cuda"))], tmp_path)
    assert run == []


def test_a_run_that_was_interrupted_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm = tiny("one")

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "_check", die)
    with pytest.raises(KeyboardInterrupt):
        runner.run([experiment_of(arm)], tmp_path)
    path = path_of(tmp_path / "small", arm, 0)
    assert not path.exists()
    assert "| one |" in (tmp_path / "results.md").read_text()
    assert path.with_name(f"{path.name}.part").exists()
    monkeypatch.undo()
    runner.run([experiment_of(arm)], tmp_path)
    assert len(Recording.read(path).steps) == arm.steps
    assert not path.with_name(f"{path.name}.part").exists()


def test_an_arm_that_fails_is_told_and_the_others_are_run(tmp_path: Path) -> None:
    experiment = experiment_of(tiny("bad", game="language", model="nowhere"), tiny("good"), seeds=(0,))
    with pytest.raises(PulseError, match=r"1 arms failed: small: bad, seed 0: .*nowhere has no checkpoint"):
        runner.run([experiment], tmp_path)
    assert path_of(tmp_path / "small", experiment.arms[1], 0).exists()
    assert "| good |" in (tmp_path / "small" / "results.md").read_text()


def test_a_policy_that_cannot_be_made_stops_only_arms_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loop.begin

    def begin(arm: Arm, policies: Path) -> Any:
        if arm.shape.width == 32:
            raise PulseError("no luck")
        return real(arm, policies)

    monkeypatch.setattr(loop, "begin", begin)
    experiment = experiment_of(tiny("bad", shape=sweeps.TINY), tiny("good"), seeds=(0,))
    with pytest.raises(PulseError, match=r"2 arms failed: pretrained 32x2x2h: .*; small: bad, seed 0: "):
        runner.run([experiment], tmp_path)
    assert path_of(tmp_path / "small", experiment.arms[1], 0).exists()


def test_a_recording_is_not_replaced_by_one_of_fewer_steps(tmp_path: Path) -> None:
    experiment = experiment_of(tiny("one"), seeds=(0,))
    runner.run([experiment], tmp_path)
    path = path_of(tmp_path / "small", experiment.arms[0], 0)
    before = [file.read_bytes() for file in (path, tmp_path / "small" / "config.json")]
    with pytest.raises(PulseError, match=r"one-seed0.jsonl already has a recording of 3 steps"):
        runner.run([experiment.with_arms(steps=2)], tmp_path)
    assert [file.read_bytes() for file in (path, tmp_path / "small" / "config.json")] == before
    runner.run([experiment.with_arms(steps=4)], tmp_path)
    assert len(Recording.read(path).steps) == 4


def test_pages_show_seeds_that_were_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(tiny("one"))
    runner.run([experiment], tmp_path)
    pages = [tmp_path / "results.md", tmp_path / "small" / "results.md"]
    before = [page.read_text() for page in pages]
    monkeypatch.setattr(runner, "_train", None)  # nothing is run
    runner.run([replace(experiment, seeds=(0,))], tmp_path)
    assert [page.read_text() for page in pages] == before
    assert Experiment.load(tmp_path / "small").seeds == (0, 1)


def test_an_interrupt_does_not_leave_pages_unwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = results.write_results

    def write(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(*args)

    monkeypatch.setattr(results, "write_results", write)
    runner.run([experiment_of(tiny("one"), seeds=(0,))], tmp_path)
    assert "| one |" in (tmp_path / "results.md").read_text()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def interrupt_itself() -> float:
    os.kill(os.getpid(), signal.SIGINT)
    return 0.0


@pytest.mark.slow
def test_a_child_is_not_interrupted() -> None:
    assert runner._work([(interrupt_itself, (), "one"), (interrupt_itself, (), "two")], 2, print) == []


@pytest.mark.slow
def test_several_processes_record_the_same(tmp_path: Path) -> None:
    experiment = experiment_of(tiny("one"))
    runner.run([experiment], tmp_path / "alone")
    runner.run([experiment], tmp_path / "together", jobs=2)
    for seed in (0, 1):
        runs = [
            Recording.read(path_of(tmp_path / place / "small", experiment.arms[0], seed))
            for place in ("alone", "together")
        ]
        assert [step.changed for step in runs[0].steps] == [step.changed for step in runs[1].steps]


def test_what_is_asked_for_changes_every_arm() -> None:
    (one,) = runner.choose(["lr"], steps=7, seeds=[4, 5], device="cuda", quick=True)
    assert {(arm.steps, arm.device, arm.prompts) for arm in one.arms} == {(7, "cuda", 2)}
    assert one.seeds == (4, 5)


def test_a_model_takes_the_sweeps_that_make_sense(tmp_path: Path) -> None:
    chosen = runner.choose(["all"], model=str(tmp_path / "smol"))
    assert [one.name for one in chosen] == [f"{name}-smol" for name in sweeps.WITH_LANGUAGE]
    assert {(arm.game, arm.model) for one in chosen for arm in one.arms} == {("language", str(tmp_path / "smol"))}
    assert [arm.name for arm in chosen[0].arms] == ["5e-7", "1e-6", "3e-6", "5e-6"]
    assert "1.2 million" not in "".join(one.differs for one in chosen)
    with pytest.raises(PulseError, match="scale needs --model demo"):
        runner.choose(["scale"], model=str(tmp_path))


def test_every_experiment_is_sound() -> None:
    assert list(sweeps.EXPERIMENTS) == [
        "lr",
        "windows",
        "delay",
        "scale",
        "optimizer",
        "masters",
        "warm-up",
        "algorithm",
        "sft",
        "moe",
    ]
    for experiment in sweeps.EXPERIMENTS.values():
        names = [arm.name for arm in experiment.arms]
        assert len({arm.file_name for arm in experiment.arms}) == len(names)
        assert {row.beside for row in experiment.published} <= {*names, ""}
        assert experiment.published
        assert experiment.differs
        assert len(experiment.seeds) == 3


def test_names_that_are_not_there_are_told() -> None:
    with pytest.raises(PulseError, match="unknown experiment speed"):
        sweeps.find(["speed"])


def test_an_arm_is_the_same_after_a_file() -> None:
    arm = Arm("a", betas=(0.9, 0.95))
    assert json.loads(json.dumps(arm.to_json())) == arm.to_json()
    assert arm.to_json()["betas"] == [0.9, 0.95]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = experiment_of(tiny("one"), published=(Row("them", "a paper", {"k1": 99.0}),))
    monkeypatch.setattr(sweeps, "EXPERIMENTS", {"small": experiment})
    monkeypatch.setattr(module, "EXPERIMENTS", {"small": experiment})


def test_the_module_runs_and_lists(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert module.main(["list"]) == 0
    assert capsys.readouterr().out == "small       1 arms  Does it work?\n"
    assert module.main(["small", "--out", str(tmp_path), "--seeds", "3", "--steps", "2"]) == 0
    assert len(Recording.read(tmp_path / "small" / "one-seed3.jsonl").steps) == 2
    assert str(tmp_path / "results.md") in capsys.readouterr().out
    assert module.main(["small", "--seeds", "x"]) == 1
    assert module.main(["large"]) == 1
    assert "unknown experiment large" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "folder"), [([], "experiments"), (["--quick"], "experiments-quick")])
def test_quick_runs_have_a_folder_of_their_own(
    options: list[str], folder: str, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "_train", lambda *_: 0.0)
    assert module.main(["small", *options]) == 0
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_the_command_runs_and_lists(small: None, tmp_path: Path) -> None:
    assert "Does it work?" in commands.pulse("study", "experiment", "list").out
    done = commands.pulse("study", "experiment", "small", "--out", tmp_path, "--seeds", "3", "--steps", "2")
    assert done.code == 0
    assert (tmp_path / "small" / "one-seed3.jsonl").exists()
    commands.pulse("study", "experiment", "large").refused(2, "no experiment large")
    commands.pulse("study", "experiment", "small", "--seeds", "x").refused(2, "must be integers such as 0,1,2")


@pytest.mark.slow
def test_the_module_needs_no_command_line_packages() -> None:
    import subprocess

    program = (
        "import sys; sys.modules.update(dict.fromkeys(('cyclopts', 'rich', 'numba', 'transformers')));"
        "from pulsesync_lab.study.experiments.__main__ import main; sys.exit(main(['list']))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("arms") == 10
