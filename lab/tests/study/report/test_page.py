"""The report: one page that needs nothing else and believes no name."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from lab.tests.recordings import header, made, step
from pulsesync_lab.study.recording import Recording, WatchedTensor
from pulsesync_lab.study.report.page import page, write_report
from pulsesync_lab.study.report.panels import plots

ALL = {
    "time",
    "k",
    "dtype",
    "layers",
    "kinds",
    "experts",
    "exponents",
    "units",
    "moved",
    "overlap",
    "bytes",
    "bytes-time",
    "gradients",
    "reward",
}
VOID = {"meta", "br", "!doctype"}


class Tree(HTMLParser):
    """Checks that tags close in order, and notes ids and references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        told = dict(attrs)
        self.ids |= {told["id"] or ""} if "id" in told else set()
        self.links |= {told["href"] or ""} if "href" in told else set()
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_plot_that_has_something_to_show_is_there() -> None:
    kinds = replace(
        header(), tensors=(*header().tensors[:3], WatchedTensor("model.layers.1.mlp.up_proj.weight", (1,), 1000, 100))
    )
    assert {plot.anchor for plot in plots(Recording(kinds, made().steps))} == ALL


def test_what_was_not_recorded_is_left_out() -> None:
    bare = step(
        0,
        1,
        1,
        1,
        1,
        units={},
        by_class={},
        weights_by_class={},
        windows={},
        contrast={},
        gradients=(),
        moved={},
        sizes={},
        facts={},
    )
    assert {plot.anchor for plot in plots(Recording(header(), (bare,)))} <= {"time", "layers", "kinds", "experts"}
    assert "Nothing was recorded." in page(Recording(header(), ()), "empty")


def test_the_page_is_well_formed_and_its_contents_lead_somewhere() -> None:
    tree = Tree(page(made(), "a run"))
    assert {link.removeprefix("#") for link in tree.links} <= tree.ids
    assert {"time", "layers", "bytes", "summary", "tensors"} <= tree.ids


def test_the_page_needs_nothing_else() -> None:
    text = page(made(), "a run")
    tree = Tree(text)
    assert tree.seen.isdisjoint({"script", "link", "img", "iframe", "object"})
    outside = set(re.findall(r"(?:https?:)?//[^\s\"'<]+", text)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert "url(" not in text
    assert "@import" not in text


def test_names_and_facts_are_not_believed() -> None:
    evil = "<script>alert(1)</script>"
    tensors = (WatchedTensor(f"layers.0.{evil}", (1,), 1000, 100), *header().tensors[1:])
    told = replace(header(), tensors=tensors, facts={evil: evil, "betas": evil})
    text = page(Recording(told, made().steps), evil)
    assert "<script" not in text
    assert "&lt;script&gt;" in text


def test_the_dip_and_the_end_of_warm_up_are_marked() -> None:
    text = page(made(), "a run")
    assert "lowest: 96.00 % at step 1" in text
    assert "warm-up ends" in text


def test_the_theory_is_drawn_where_the_rate_is_known() -> None:
    unknown = Recording(header(facts={}), tuple(replace(one, lr=None) for one in made().steps))
    assert "theory, gradients are noise" not in page(unknown, "a run")
    assert "theory, gradients are noise" in page(unknown, "a run", 3e-6)


def test_many_steps_share_the_columns_of_the_heat_map() -> None:
    many = Recording(header(), tuple(step(n, 10, 10, 10, 10) for n in range(200)))
    chart = next(plot.chart for plot in plots(many) if plot.anchor == "layers")
    assert len(chart.columns) == 50  # type: ignore[union-attr]


def test_the_page_is_written_as_text(tmp_path: Path) -> None:
    write_report(made(), tmp_path / "study.html", "a run – mine")
    assert "a run – mine" in (tmp_path / "study.html").read_text(encoding="utf-8")


def test_adams_bound_is_drawn_for_betas_that_have_one() -> None:
    for told, bound in (([0.9, 0.999], "7.27"), ([0.9, 0.8], None), (None, None), ("ab", None), ([0.9], None)):
        text = page(Recording(header(facts={"betas": told}), made().steps), "a run")
        assert ("bound, " + str(bound) in text) == (bound is not None)


def test_of_another_optimizer_nothing_of_adam_is_drawn() -> None:
    facts = {"optimizer": "SGD", "betas": [0.9, 0.999], "lr": 3e-6}
    text = page(Recording(header(facts=facts), made().steps), "a run")
    for words in ("Adam", "theory", "256 ×"):
        assert words not in text


def test_the_critical_size_is_that_of_the_dtype() -> None:
    half = replace(header(), dtype="F16")
    steps = [replace(one, by_class={1: 9, 20: 9}, weights_by_class={1: 99, 20: 99}, lr=3e-6) for one in made().steps]
    text = page(Recording(half, tuple(steps)), "a run")
    assert "2,048 × learning rate" in text
    assert "256 ×" not in text


def test_windows_are_told_in_steps() -> None:
    wide = Recording(header(facts={"every": 5}), made().steps)
    chart = next(plot.chart for plot in plots(wide) if plot.anchor == "k")
    assert chart.x_ticks == [5, 10]  # type: ignore[union-attr]


def test_updates_of_nothing_are_told_and_not_drawn() -> None:
    steps = tuple(replace(one, moved={-254: 300, 0: 100}) for one in made().steps)
    plot = next(plot for plot in plots(Recording(header(), steps)) if plot.anchor == "moved")
    assert plot.chart.curves["updates"] == [(2**0.25, 25.0)]  # type: ignore[union-attr]
    assert "75.00% of the weights in the sample" in plot.about
