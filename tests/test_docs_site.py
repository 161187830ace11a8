"""The documentation site: every page has a place, links lead somewhere, and pages are made from the code."""

import re
import tomllib
from pathlib import Path

import pytest

from tools.docs_source import ROOT, BrokenSiteError, SiteSource, api_page, for_python_markdown, made_pages, nav_pages
from tools.lint.public_names import LIST, read_list

MADE = {"api.md": "# Public names\n", "cli.md": "# Commands\n", "api/package.md": api_page("package", ["Thing"])}
NAV = ["index.md", "guide.md", *MADE]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository whose guide links to everything that may be outside docs/."""
    files = {
        "README.md": "# Home\n\nSee [the guide](docs/guide.md#start) and [how](CONTRIBUTING.md).\n",
        "CONTRIBUTING.md": "# Contributing\n\nBack [home](README.md).\n",
        "docs/public_names.txt": "package\n    Thing\n",
        "docs/guide.md": "# Guide\n\n## Start\n\n[a](../examples/run.py) [b](../results/) [c](../results/data.json)\n\n"
        "```\n[not a link](nowhere.md)\n```\n\nNor `[this](nowhere.md)`.\n\n"
        "[names](public_names.txt); `pulse --help`, `pulse log --help`.\n",
        "examples/run.py": "print(1)\n",
        "results/one.md": "# Result one\n",
        "results/data.json": "{}\n",
    }
    for name, text in files.items():
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / name).write_text(text)
    return tmp_path / "repository"


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = made_pages()["cli.md"]
    assert {"pulse publish", "pulse point", "pulse verify"} <= set(re.findall(r"^#+ (pulse .*)$", page, re.M))
    assert "`--read-only" in page


def test_the_page_of_public_names_has_a_line_on_each() -> None:
    page = made_pages()["api.md"]
    for module, names in read_list(LIST.read_text()).items():
        section = page.split(f"\n## `{module}`\n")[1].split("\n## ")[0]
        assert re.findall(r"^\| `(\w+)` \| \S.* \|$", section, re.MULTILINE) == names


def test_the_pages_of_this_repository_can_be_laid_out(tmp_path: Path) -> None:
    nav = list(nav_pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    SiteSource(ROOT, tmp_path / "site").write(nav, made_pages())
    assert (tmp_path / "site" / "index.md").exists()
    assert len(nav) == len(set(nav))


def test_links_lead_to_the_copies_in_the_site(repository: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    SiteSource(repository, site).write(NAV, MADE)
    assert (site / "index.md").read_text() == (
        "# Home\n\nSee [the guide](guide.md#start) and [how](repository/CONTRIBUTING.md).\n"
    )
    assert (site / "repository" / "CONTRIBUTING.md").read_text() == "# Contributing\n\nBack [home](../index.md).\n"
    guide = (site / "guide.md").read_text()
    assert "[a](repository/examples/run.py.md) [b](repository/results/index.md)" in guide
    assert "[c](repository/results/data.json)" in guide
    assert "```\n[not a link](nowhere.md)\n```\n\nNor `[this](nowhere.md)`." in guide
    assert "[names](api.md); [`pulse --help`](cli.md), [`pulse log --help`](cli.md#pulse-log)." in guide
    assert "```python\nprint(1)\n```" in (site / "repository/examples/run.py.md").read_text()
    assert "- [Result one](one.md) (`one.md`)" in (site / "repository/results/index.md").read_text()
    assert (site / "repository/results/data.json").read_text() == "{}\n"
    assert "::: package.Thing" in (site / "api/package.md").read_text()


def test_a_page_without_a_place_in_the_navigation_is_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenSiteError, match=r"^zensical.toml: the navigation lacks guide.md$"):
        SiteSource(repository, tmp_path / "site").write(["index.md", *MADE], MADE)


def test_a_place_without_a_page_is_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenSiteError, match=r"^zensical.toml: there is no tour.md$"):
        SiteSource(repository, tmp_path / "site").write([*NAV, "tour.md"], MADE)


def test_a_link_to_a_missing_file_is_an_error(repository: Path, tmp_path: Path) -> None:
    (repository / "docs" / "guide.md").write_text("# Guide\n\n[x](../none.md)\n")
    with pytest.raises(BrokenSiteError, match=r"^docs/guide.md: no such file: ../none.md$"):
        SiteSource(repository, tmp_path / "site").write(NAV, MADE)


def test_lists_and_tables_are_written_as_python_markdown_reads_them() -> None:
    page = "Steps:\n1. One\n   more.\n2. Two:\n   - inner\n\n   ```\n   code\n   ```\n\nText\n| a | b |\n|---|---|\n"
    steps = "Steps:\n\n1. One\n    more.\n2. Two:\n    - inner\n\n    ```\n    code\n    ```\n\n"
    assert for_python_markdown(page) == steps + "Text\n\n| a | b |\n|---|---|\n"
    fenced = "```\ntext:\n- no list\n| no table |\n```\n"
    assert for_python_markdown(fenced) == fenced
