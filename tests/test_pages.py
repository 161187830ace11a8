"""The pages that people read: their links lead somewhere, and raw figures are in files of their own."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import save_results

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NAMED_TEST = re.compile(r"\]\(([^)\s]+\.py)\) `(test_\w+)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MAX_LINE = 2000


def pages() -> list[Path]:
    """Every Markdown file of the repository, but none of an environment or a model that was put into its folder."""
    listed = [path for pattern in ("*.md", "[!.]*/**/*.md") for path in ROOT.glob(pattern)]
    return sorted(path for path in listed if not {"runs", "dist"} & set(path.relative_to(ROOT).parts))


def anchors(page: Path) -> set[str]:
    """The fragments by which GitHub finds the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue  # another site
        path, _, fragment = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_of_a_page_leads_to_a_file_and_heading_that_exist(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    (tmp_path / "other.md").write_text("# A heading, `in code`\n")
    page.write_text("[a](other.md#a-heading-in-code) [b](other.md#none) [c](none.md) [d](https://example.org/none)\n")
    assert broken_links(page) == ["other.md#none", "none.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_after_a_link_to_its_file_exists(page: Path) -> None:
    named = NAMED_TEST.findall(page.read_text())
    assert [(file, test) for file, test in named if f"def {test}(" not in (page.parent / file).read_text()] == []


@pytest.mark.parametrize(
    "page", sorted(save_results.RESULTS.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT))
)
def test_a_page_of_results_holds_no_raw_figures(page: Path) -> None:
    lines = page.read_text().splitlines()
    assert [number for number, line in enumerate(lines, 1) if line.startswith('{"') or len(line) > MAX_LINE] == []


@pytest.mark.parametrize("file", sorted((save_results.RESULTS / "data").iterdir()), ids=lambda file: file.name)
def test_raw_figures_can_be_read_in_a_diff_and_by_a_program(file: Path) -> None:
    text = file.read_text()
    assert max(map(len, text.splitlines())) <= MAX_LINE
    if file.suffix == ".json":
        json.loads(text)
    elif file.suffix == ".jsonl":
        assert all(json.loads(line) for line in text.splitlines())


def test_figures_are_saved_as_they_were_printed() -> None:
    long = {"points": [{"name": "a", "seconds": [0.25 * i for i in range(100)]}, {"name": "b", "seconds": []}]}
    text, objects = save_results.split(["a table", json.dumps(long), "an end"])
    assert (text, objects) == (["a table", "an end"], [long])
    saved = save_results.pretty(long)
    assert json.loads(saved) == long
    assert max(map(len, saved.splitlines())) <= save_results.WIDTH


def test_the_readme_can_be_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900  # code, tables and their bars counted


def test_the_glossary_defines_each_word_once() -> None:
    rows = re.findall(r"^\| (\*[^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"\*([^*]+)\*", row)]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words))
