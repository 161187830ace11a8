"""The demo as people run it: a small run of each kind in real processes, and what is refused before one starts."""

import contextlib
import importlib.resources
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import pulsesync_lab
from pulsesync.cli.options import UsageError
from pulsesync.errors import PulseError
from pulsesync_lab import contrast
from pulsesync_lab.cli import demo
from pulsesync_lab.cli.demo import check_trainers, find_model, open_folder, read_link, run
from pulsesync_lab.demo import replay, smollm2
from pulsesync_lab.demo.replay import RECORDED, ReplayRun
from pulsesync_lab.demo.settings import DemoSettings
from tests import commands
from tests.forked import Forked
from tests.runs import publish_steps

pytestmark = pytest.mark.timeout(180)  # on a machine without cached kernels each process compiles them


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run whose processes are forked; in the slow tier they are started as the command does."""
    pytest.importorskip("torch")
    from lab.tests.demo import forked
    from tests.processes import one_fleet

    fleet = one_fleet(tmp_path_factory)
    folder, out = tmp_path_factory.mktemp("demo") / "run", io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        mock.patch.object(demo, "DemoRun", partial(forked.ForkedRun, fleet)),
        mock.patch.object(demo, "ReplayRun", partial(forked.ForkedReplay, fleet)),
    ):
        assert run(DemoSettings(steps=3, workers=1, prompts=8, group=4), folder, as_json=True) == 0
    return folder, [json.loads(line) for line in out.getvalue().splitlines()]


def test_the_demo_tells_every_step_and_sums_up(real: tuple[Path, list[dict[str, Any]]]) -> None:
    steps, summary = [event for event in real[1] if event["event"] == "step"], real[1][-1]
    assert [(step["event"], step["step"]) for step in steps] == [("step", 1), ("step", 2), ("step", 3)]
    assert all(0 <= step["reward"] <= 1 and 0 < step["size_bytes"] < step["full_bytes"] for step in steps)
    assert (summary["event"], summary["steps"]) == ("summary", 3)
    assert summary["digests_agree"]
    assert summary["recounted_at_end"] == ["0"]


def test_the_folder_keeps_the_run(real: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, events = real
    assert json.loads((folder / "settings.json").read_text())["steps"] == 3
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [{"event": "step", **line} for line in lines] == events[: len(lines)]
    summary = json.loads((folder / "summary.json").read_text())
    assert {"event": "summary", "folder": str(folder), **summary} == events[-1]
    assert (folder / "plots.svg").read_text().startswith("<svg")


def test_the_recorded_steps_follow_the_live_run_and_have_a_key_of_their_own(
    real: tuple[Path, list[dict[str, Any]]],
) -> None:
    replayed = [event["step"] for event in real[1] if event["event"] == "replay_step"]
    assert replayed == list(range(1, 16))
    live, recorded = real[1][-1], real[1][-1]["replay"]
    assert (recorded["steps"], recorded["recounted_at_end"]) == (15, ["0"])
    assert live["times_smaller"] < 30 < 300 < recorded["times_smaller"]
    assert live["in_reach_share"] > 0.5 > 0.01 > recorded["in_reach_share"] > 0


def test_both_results_are_a_line_each_with_the_reason_below(real: tuple[Path, list[dict[str, Any]]]) -> None:
    live, recorded = real[1][-1], real[1][-1]["replay"]
    _, *lines, why, reach, _ = contrast.compare(live, 6e-5, recorded, 3e-6).splitlines()
    for line, result, lr in zip(lines, (live, recorded), ("6e-05", "3e-06"), strict=True):
        assert f" {lr} " in line
        assert f" {result['changed_share']:.1%} " in line
        assert line.endswith(f" {result['times_smaller']:.0f} times smaller than all weights")
    assert why.startswith("Why they differ: ")
    assert f"for {live['in_reach_share']:.1%} of the policy's weights" in reach
    assert f"for {recorded['in_reach_share']:.1%} of SmolLM2's" in reach


@pytest.mark.slow
def test_the_demo_ends_with_both_results_side_by_side(tmp_path: Path) -> None:
    """About 12 s."""
    pytest.importorskip("torch")
    done = commands.pulse("demo", "--steps", 2, "--workers", 1, "--prompts", 8, "--group", 4, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert len([line for line in done.out.splitlines() if line.startswith("step ")]) == 2 + 15
    live = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert done.out.endswith(f"\n\n{contrast.compare(live, 6e-5, live['replay'], 3e-6)}\n")


@pytest.mark.parametrize(
    ("settings", "followed"),
    [
        ({}, True),
        ({"steps": 3, "workers": 5, "lr": 1e-6, "delay": 0}, True),
        ({"sync": "full"}, False),
        ({"model": ".models/smollm2"}, False),
        ({"trainers": 4}, False),
        ({"publish_every": 2}, False),
        ({"store": "s3://bucket/run"}, False),
        ({"read": "http://host/run"}, False),
        ({"link": 1e6}, False),
    ],
)
def test_only_runs_that_compare_with_the_recorded_steps_are_followed_by_them(
    settings: dict[str, Any], followed: bool
) -> None:
    assert contrast.makes_sense(DemoSettings(**settings)) is followed


def test_weights_in_reach_are_those_that_one_learning_rate_rounds_to_another_value() -> None:
    for weights, lr in ((contrast.policy_weights(), 6e-5), (contrast.recorded_weights(), 3e-6)):
        before = weights.astype(np.float32)
        moved = before + np.copysign(np.float32(lr), before)
        changed = np.mean(moved.astype(ml_dtypes.bfloat16).view(np.uint16) != weights.view(np.uint16))
        assert contrast.share_in_reach(weights, lr) == pytest.approx(changed, rel=1e-3)


@pytest.mark.slow
def test_a_demo_that_was_interrupted_in_the_recorded_steps_resumes_there(tmp_path: Path) -> None:
    """About 25 s: two starts of a trainer with torch."""
    pytest.importorskip("torch")
    small = ("--steps", 1, "--workers", 1, "--prompts", 4, "--group", 4)
    process = commands.start("demo", *small, "--out", tmp_path / "run", "--json")
    shown = [json.loads(process.stdout.readline()) for _ in range(2)]
    assert [event["event"] for event in shown] == ["step", "replay_step"]
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    shown += map(json.loads, out.splitlines())
    assert not (tmp_path / "run" / "summary.json").exists()
    done = commands.pulse("demo", *small, "--out", tmp_path / "run", "--json")
    assert (done.code, done.err) == (0, "")
    *rest, summary = done.events
    assert [event["step"] for event in shown + rest if event["event"] == "step"] == [1]
    steps = [event["step"] for event in shown + rest if event["event"] == "replay_step"]
    assert steps == sorted(set(steps))
    assert steps[-1] == 15
    assert summary["replay"]["workers"]["worker 0"]["version"] == 15


def test_a_run_that_has_ended_is_left_alone(real: tuple[Path, list[dict[str, Any]]]) -> None:
    done = commands.pulse("demo", "--steps", 3, "--workers", 1, "--out", real[0])
    assert done.refused(2, "has ended")


class ReplayWithoutTorch(ReplayRun):
    """Its processes are forked from one that has the kernels loaded and no torch."""

    program = (
        "import os, sys; log = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND); "
        "os.dup2(log, 1); os.dup2(log, 2); sys.modules['torch'] = None; "
        "from pulsesync_lab.demo.replay import main; sys.exit(main())"
    )

    def _start(self, name: str) -> None:
        forked = Forked(self.program, self.folder, name, self.folder / f"{name}.log", kernels=True)
        self.processes[name] = cast("subprocess.Popen[bytes]", forked)

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.__exit__(None, None, None)


def test_a_replay_needs_no_torch_and_its_workers_verify_every_version(tmp_path: Path) -> None:
    """Slow tests start its processes as the command does."""
    with (
        mock.patch("pulsesync_lab.cli.demo.find_spec", return_value=None),
        mock.patch.object(demo, "ReplayRun", ReplayWithoutTorch),
    ):
        done = commands.pulse("demo", "--replay", "--steps", 4, "--out", tmp_path / "run")
    assert (done.code, done.err) == (0, "")
    assert len([line for line in done.out.splitlines() if line.startswith("step ")]) == 4
    for words in ("times smaller", "bits a change", "all workers recounted at the end"):
        assert words in done.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 30 < summary["times_smaller"] < 1000
    assert summary["workers"]["worker 1"]["recounted"] == 4


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = ("demo", "--replay", "--workers", 1, "--link", "10mbit", "--out", tmp_path / "run", "--json")
    process = commands.start(*arguments)
    first = json.loads(process.stdout.readline())
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    shown = [first, *map(json.loads, out.splitlines())]
    assert commands.pulse("demo", "--replay", "--workers", 2, "--out", tmp_path / "run").refused(
        2, "was started with workers 1"
    )
    done = commands.pulse(*arguments)
    assert (done.code, done.err) == (0, "")
    *rest, summary = done.events
    steps = [line["step"] for line in shown + rest]
    assert len(shown) < 15
    assert steps == sorted(set(steps))
    assert steps[-1] == 15
    assert summary["recounted_at_end"] == ["0"]


@pytest.mark.slow
def test_what_stops_a_process_for_good_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    publish_steps(str(tmp_path / "store"), 2)
    done = commands.pulse("demo", "--replay", "--workers", 1, "--store", tmp_path / "store", "--out", tmp_path / "run")
    assert "stopped the run" in done.err  # the worker may be first to say that these are other weights
    assert (done.code, len(done.err.splitlines())) == (1, 1)


def test_pretrain_saves_the_bf16_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file

    from pulsesync_lab.demo.policy import fresh

    def quick(seed: int, report: Any) -> Any:
        report(10, 1.5, 0.25)
        return fresh(seed)

    with mock.patch("pulsesync_lab.demo.pretrain.pretrain", quick):
        done = commands.pulse("demo", "pretrain", "--seed", 3, "--out", tmp_path / "new" / "policy.safetensors")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "step 10  loss 1.5000  25.0% right"
    saved, made = load_file(tmp_path / "new" / "policy.safetensors"), fresh(3).state_dict()
    assert saved.keys() == made.keys()
    assert all(torch.equal(saved[name], made[name].bfloat16()) for name in made)


def test_without_torch_one_line_says_what_to_install() -> None:
    with mock.patch("pulsesync_lab.cli.demo.find_spec", return_value=None):
        assert commands.pulse("demo").refused(1, "pip install 'pulsesync[torch]'")
        assert commands.pulse("demo", "pretrain").refused(1, "pip install 'pulsesync[torch]'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--workers", "0"],
        ["--link", "fast"],
        ["--model", "nowhere"],
        ["--sync", "half"],
        ["--replay", "--sync", "full"],
        ["--lr", "x"],
        ["--delay", "-1"],
        ["--publish-every", "0"],
        ["--store", "ftp://host/run"],
        ["--read", "memory://run"],
        ["--trainers", "0"],
        ["--sync-every", "0"],
        ["--trainers", "2", "--loco", "sparse"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    assert commands.pulse("demo", *arguments).refused(2, "")


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["--trainers", "2", "--replay"], "one trainer"),
        (["--trainers", "2", "--sync", "full"], "leave it out"),
        (["--trainers", "2", "--publish-every", "2"], "several publish a version every round"),
        (["--sync-every", "4"], "give --trainers"),
        (["--loco", "dense"], "give --trainers"),
    ],
)
def test_what_several_trainers_cannot_do_is_said_kindly(arguments: list[str], saying: str) -> None:
    pytest.importorskip("torch")
    assert commands.pulse("demo", *arguments).refused(2, saying)


def test_steps_are_rounded_up_to_whole_rounds_and_it_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_trainers(DemoSettings(steps=20, trainers=2)).steps == 24
    assert "24 steps instead of 20" in capsys.readouterr().err
    assert check_trainers(DemoSettings(steps=24, trainers=2)).steps == 24
    assert check_trainers(DemoSettings(steps=20)) == DemoSettings(steps=20)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_several_trainers_are_shown_and_summed_up(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    small = ("--steps", 2, "--sync-every", 2, "--workers", 1, "--prompts", 4, "--group", 4)
    done = commands.pulse("demo", "--trainers", 2, *small, "--out", tmp_path / "run", "--store", tmp_path / "weights")
    assert (done.code, done.err) == (0, "")
    assert "2 trainers, 1 worker," in done.out
    assert "\n  round 1: 2 of 2 trainers" in done.out
    assert "Trainers: 2, which met after every 2 steps, 1 ×" in done.out
    assert (tmp_path / "weights-trainers" / "run").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["recounted_at_end"]) == (2, ["0"])
    assert summary["loco"]["payload_times_smaller"] > 1
    again = commands.pulse("demo", "--trainers", 2, *small, "--out", tmp_path / "2", "--store", tmp_path / "weights")
    assert again.refused(1, "give several trainers a new store")


def test_a_model_that_was_not_fetched_names_the_command_that_does(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    command = f"{sys.executable} -m pulsesync_lab.demo.smollm2 .models/smollm2"
    for command_of in (["demo"], ["study", "experiment", "scale"]):
        done = commands.pulse(*command_of, "--model", "smollm2")
        assert done.refused(2, f"{command} downloads it")
    (tmp_path / ".models" / "smollm2").mkdir(parents=True)
    assert find_model("smollm2") == ".models/smollm2"


@pytest.mark.parametrize(("text", "rate"), [("50mbit", 6.25e6), ("1Gbit/s", 1.25e8), ("800 bit", 100), (None, None)])
def test_a_link_is_given_in_bits(text: str | None, rate: float | None) -> None:
    assert read_link(text) == rate


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(UsageError, match="not empty"):
        open_folder(tmp_path, DemoSettings())


def test_a_folder_goes_on_only_with_the_settings_it_was_begun_with(tmp_path: Path) -> None:
    replace(DemoSettings(steps=7), store=str(tmp_path / "store"), port=5, secret="x").save(tmp_path)
    (tmp_path / "steps.jsonl").write_text("{}\n{}\n{")
    assert open_folder(tmp_path, DemoSettings(steps=7)) == (tmp_path, 2)
    with pytest.raises(UsageError, match="was started with steps 7"):
        open_folder(tmp_path, DemoSettings(steps=8))
    (tmp_path / "settings.json").write_text('{"pace": 3}')
    with pytest.raises(UsageError, match="cannot be read"):
        open_folder(tmp_path, DemoSettings())


def test_the_recording_is_part_of_the_package_with_its_licence() -> None:
    """A wheel holds what lies under src/pulsesync_lab, and nothing else of a checkout."""
    data = importlib.resources.files("pulsesync_lab.demo").joinpath("data")
    assert Path(str(data.joinpath("grpo-slice.npz"))) == RECORDED
    assert RECORDED.is_relative_to(Path(pulsesync_lab.__file__).parent)
    assert "Apache-2.0" in data.joinpath("README.md").read_text()


@pytest.mark.parametrize("missing", ["torch", "gguf", "tokenizers"])
def test_the_model_names_what_it_needs_before_it_downloads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, missing: str
) -> None:
    def never(folder: Path) -> Path:
        raise AssertionError("downloaded")

    for name in ("torch", "gguf", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None if name == missing else ModuleType(name))
    monkeypatch.setattr(smollm2, "download", never)
    monkeypatch.setattr(sys, "argv", ["smollm2", str(tmp_path / "model")])
    assert smollm2.main() == 1
    assert capsys.readouterr().err == f"smollm2: {missing} is not installed: pip install 'pulsesync-lab[llm]'\n"


def test_a_recording_whose_steps_lead_elsewhere_is_refused(tmp_path: Path) -> None:
    with np.load(RECORDED) as file:
        np.savez(tmp_path / "other.npz", **{**file, "final_sha256": "0" * 64})
    with pytest.raises(PulseError, match=r"other\.npz: the last state has SHA-256"):
        replay.load(tmp_path / "other.npz")
