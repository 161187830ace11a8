"""What is shown of a run, on lines as trainers write them."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from rich.console import Console

from pulsesync_lab.charts import draw
from pulsesync_lab.demo import plots, view
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.view import RunStory


def state(version: int | None, synced: int, **more: Any) -> dict[str, Any]:
    return {
        "version": version,
        "counted": -1,
        "synced": synced,
        "fetched_bytes": 100 * synced,
        "generate_s": 3.0 * synced,
        "sync_s": 0.5 * synced,
        "pause_s": 0.002 * synced,
        "wait_s": 0.5 * synced,
        **more,
    }


def line(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": 1e9 + step,
        "reward": step / 100,
        "loss": 0.1,
        "behind": 1.0,
        "version": step,
        "digest": "0" * 64,
        "changed": 100,
        "total": 10_000,
        "size_bytes": 400,
        "full_bytes": 20_000,
        "seconds": 0.1,
        "wait_s": 1.0,
        "train_s": 2.0,
        "publish_s": 1.0,
        "workers": {"worker 0": state(step - 1, step)},
        **more,
    }


def told(*lines: dict[str, Any], **settings: Any) -> RunStory:
    story = RunStory(DemoSettings(**{"workers": 1, **settings}))
    for one in lines:
        story.add(one)
    return story


def drawn(story: RunStory, restarts: dict[str, int] | None = None) -> str:
    console = Console(width=120, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(view.show(story, restarts or {}, "runs/x"))
    return capture.get()


def test_the_summary_is_what_the_lines_add_up_to() -> None:
    summary = told(*map(line, range(1, 21))).summary({}, ["0"])
    assert (summary["steps"], summary["versions"], summary["seconds"]) == (20, 20, 80.0)
    assert (summary["reward_start"], summary["reward_end"]) == (pytest.approx(0.055), pytest.approx(0.155))
    assert summary["changed_share"] == pytest.approx(0.01)
    assert (summary["bytes_per_sync"], summary["times_smaller"]) == (400, 50)
    assert summary["bits_per_change"] == 32
    assert (summary["generating_share"], summary["training_share"]) == (0.75, 0.5)
    assert summary["pause_s"] == pytest.approx(0.002)
    assert summary["workers"]["worker 0"] == {"version": 19, "recounted": -1, "synced": 20}


def test_a_step_that_was_taken_again_counts_once_and_its_syncs_twice() -> None:
    summary = told(line(1), line(2), line(2, version=4, reward=0.5)).summary({"trainer": 1}, ["0"])
    assert (summary["steps"], summary["versions"], summary["reward_end"]) == (2, 3, pytest.approx(0.255))
    assert summary["restarts"] == {"trainer": 1}


def test_a_step_without_a_version_is_no_sync() -> None:
    lines = [line(1, version=0), line(2, version=1), line(3, version=1), line(4, version=2)]
    assert told(*lines).summary({}, ["0"])["versions"] == 2


def test_what_a_worker_did_before_it_died_is_kept() -> None:
    died = line(4, workers={"worker 0": state(3, 1)})
    summary = told(line(1), line(2), line(3), died).summary({"0": 1}, ["0"])
    assert summary["workers"]["worker 0"]["synced"] == 4


def test_a_worker_that_was_not_there_at_the_end_is_mentioned() -> None:
    story = told(line(1), workers=2)
    assert "1 of the workers did not recount at the end" in view.summarize(story, story.summary({}, ["0"]))
    assert "all workers recounted at the end" in view.summarize(story, story.summary({}, ["0", "1"]))


def test_the_view_shows_where_everybody_is() -> None:
    workers = {"worker 10": state(None, 0), "worker 9": state(5, 5, counted=4)}
    text = drawn(told(line(7, workers=workers)), {"0": 2})
    for words in ("step 7 of 100", "reward 0.070", "1.00%", "400 bytes", "50.0 × smaller", "1.0 steps old"):
        assert words in text
    rows = [row.split() for row in text.splitlines() if row.startswith(("trainer", "worker"))]
    assert rows[:3] == [["trainer", "7"], ["worker", "9", "5", "2", "4", "2.0ms"], ["worker", "10", "–", "–", "–", "–"]]
    assert "worker 0 was started again, 2 ×" in text


def test_before_the_first_step_the_view_says_what_is_going_on() -> None:
    assert "2 processes are starting" in drawn(told())


def test_without_a_terminal_a_step_is_one_line() -> None:
    story = told(line(7))
    text = view.plain(story, line(7))
    assert "\n" not in text
    assert "version 7: workers at 6, behind 1, recounted –, pause 2.0ms" in text


def test_a_round_of_several_trainers_is_one_more_line() -> None:
    first = {
        "round": 1,
        "trainers": ["trainer", "trainer-1", "trainer-2"],
        "fired": 0.05,
        "sent_bytes": 1_000,
        "received_bytes": 2_000,
        "dense_bytes": 40_000,
        "digest": "0" * 64,
    }
    second = {**first, "round": 2, "trainers": ["trainer", "trainer-1"], "sent_bytes": 3_000, "received_bytes": 2_000}
    story = told(line(8, loco=first, meet_s=1.0), line(16, loco=second, meet_s=1.0), trainers=3, steps=24)
    one = "round 2: 2 of 3 trainers, 5.00% of weights sent; payload 3,000 bytes, 13.3 × smaller than dense"
    assert one in view.plain(story, line(16, loco=second)).splitlines()[1]
    assert one in " ".join(drawn(story).split())
    summary = story.summary({"trainer-1": 1}, ["0"])
    assert (summary["steps"], summary["seconds"]) == (16, 10.0)
    assert (summary["loco"]["payload_times_smaller"], summary["loco"]["wire_times_smaller"]) == (20, 30)
    text = view.summarize(story, summary)
    assert "Trainers: 3, which met after every 8 steps, 2 × (pulse)" in text
    assert "means of the first and last 8 steps" in text
    assert "Started again: trainer 1 (1 ×)" in text
    away = {**first, "trainers": ["trainer-1", "trainer-2"], "sent_bytes": 0, "received_bytes": 5_000}
    assert "without the first" in view.met(away, 3)
    assert "in no round" in view.summarize(story, told(line(8, loco=away), trainers=3).summary({}, ["0"]))


def test_one_trainer_has_no_rounds() -> None:
    assert "loco" not in told(line(1)).summary({}, ["0"])
    assert "5 processes are starting" in drawn(told(trainers=4))


def test_the_sparsity_is_told_beside_the_papers_with_the_reason_for_the_difference() -> None:
    text = view.paper(told(line(1, changed=2_000), lr=3e-5))
    assert text.startswith("80.00% of the BF16 weights")
    assert "about 99 %" in text
    assert "changes more" in text
    assert "changes more" not in view.paper(told(line(1), model="folder"))


def test_a_run_that_sends_everything_has_no_sparsity() -> None:
    story = told(line(1, changed=None, size_bytes=20_000))
    assert story.summary({}, ["0"])["changed_share"] is None
    assert "All weights are sent" in view.summarize(story, story.summary({}, ["0"]))
    assert "changed all: 400 bytes" in view.plain(story, line(1, changed=None))


@pytest.mark.parametrize(("values", "bars"), [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 1.0, 2.0], "▁▄█")])
def test_a_trend_goes_from_the_lowest_to_the_highest(values: list[float], bars: str) -> None:
    assert view.trend(values) == bars


@pytest.mark.parametrize(
    "lines", [[], [line(1)], [line(n) for n in range(1, 9)], [line(1, reward=None, changed=None, size_bytes=20_000)]]
)
def test_plots_are_four_in_a_file_that_parses(lines: list[dict[str, Any]]) -> None:
    root = ET.fromstring(draw(plots.panels(told(*lines)), "a <run> & more"))
    groups = [child for child in root if child.tag.endswith("}g")]
    titles = [next(iter(group)).text or "" for group in groups]
    assert [title.split()[0] for title in titles] == ["Reward", "Weights", "Bytes", "Staleness"]
