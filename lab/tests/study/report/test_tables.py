"""Tables for the terminal."""

import json
from dataclasses import replace

from rich.console import Console, RenderableType

from lab.tests.recordings import header, made
from pulsesync_lab.study.recording import Recording
from pulsesync_lab.study.report import tables


def drawn(shown: RenderableType) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def row(text: str, begins: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(begins)).removeprefix(begins).split()


def test_the_summary_has_mean_trough_and_first_step() -> None:
    text = drawn(tables.show(made(), "a run"))
    assert row(text, "unchanged in a step, BF16") == ["97.667%"]
    assert row(text, "  first step") == ["99.000%"]
    assert row(text, "  trough") == ["96.000%", "at", "step", "1"]
    assert row(text, "changed a step before too") == ["50.0%,", "2.50%", "by", "chance"]
    assert row(text, "gradients that are not zero") == ["99.00%"]


def test_windows_dtypes_and_codecs_have_a_row_each() -> None:
    text = drawn(tables.show(made(), "a run"))
    assert row(text, "after 2 steps") == ["98.000%", "98.000%", "98.000%"]
    assert row(text, "in F16")[0] == "90.000%"
    assert row(text, "history") == ["100", "80", "+25.0%", "100.0", "3"]
    assert row(text, "gap") == ["200", "–", "–", "40.0", "3"]


def test_experts_that_stood_still_are_shown() -> None:
    text = drawn(tables.show(made(), "a run"))
    experts = text[text.index("Experts") :].splitlines()
    assert experts[2].split() == ["0", "0", "1.6667%", "1", "of", "3"]


def test_what_was_not_looked_at_has_no_table() -> None:
    bare = Recording(header(contrast=(), windows=()), ())
    text = drawn(tables.show(bare, "a run"))
    assert row(text, "weights") == ["4,000"]
    for absent in ("In the sample", "A patch", "By layer", "Experts", "unchanged"):
        assert absent not in text


def test_runs_stand_side_by_side() -> None:
    text = drawn(tables.compare({"one": made(), "two": Recording(made().header, made().steps[:1])}))
    assert row(text, "unchanged in a step, BF16") == ["97.667%", "99.000%"]
    assert row(text, "history, × smaller") == ["100.0", "100.0"]
    assert row(text, "after 2 steps") == ["98.000%", "–"]


def test_the_figures_for_machines_are_json() -> None:
    facts = json.loads(json.dumps(tables.facts(made())))
    assert facts["sparsity"]["least"] == 0.96
    assert facts["by_k"]["2"] == 0.98
    assert facts["bytes"]["history"] == {"predicted": 100, "real": 80, "steps": 3, "comparable": True}
    assert facts["by_step"][1] == [1, 0.96]


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    odd = "x[/red] :smile:"
    told = header(tensors=tuple(replace(tensor, name=f"{odd}{n}") for n, tensor in enumerate(header().tensors)))
    recording = Recording(told, made().steps)
    text = drawn(tables.show(recording, odd))
    assert text.count(odd) > 4
    assert odd in drawn(tables.compare({odd: recording, "b": recording}))


def test_windows_are_told_in_steps() -> None:
    wide = Recording(header(facts={"every": 5}), made().steps)
    text = drawn(tables.show(wide, "a run"))
    assert row(text, "after 10 steps")[0] == "98.000%"
    assert row(text, "unchanged after 5 steps, BF16") == ["97.667%"]
    assert set(tables.facts(wide)["by_k"]) == {"5", "10"}


def test_what_was_cast_is_named() -> None:
    told = header(facts={"cast": {f"t{n}": "F32" for n in range(5)}})
    text = drawn(tables.show(Recording(told, made().steps), "a run"))
    assert "5: t0 (F32), t1 (F32), t2 (F32), …" in text
