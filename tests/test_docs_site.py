"""The documentation site: every page has a place, links lead somewhere, and the command line's page is up to date."""

import tomllib
from pathlib import Path

import pytest

from tools import docs_cli
from tools.docs_source import ROOT, BrokenSiteError, SiteSource, for_python_markdown, nav_pages

API = "# Public names\n\n## `package`\n\n| name | what it is |\n|---|---|\n| `Thing` | A thing. |\n"
NAV = ["index.md", "api.md", "guide.md", "api/package.md"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A small repository whose guide links to everything that may be outside docs/."""
    files = {
        "README.md": "# Home\n\nSee [the guide](docs/guide.md#start) and [how](CONTRIBUTING.md).\n",
        "CONTRIBUTING.md": "# Contributing\n\nBack [home](README.md).\n",
        "docs/api.md": API,
        "docs/guide.md": "# Guide\n\n## Start\n\n[a](../examples/run.py) [b](../results/) [c](../results/data.json)\n\n"
        "```\n[not a link](nowhere.md)\n```\n\nNor `[this](nowhere.md)`.\n",
        "examples/run.py": "print(1)\n",
        "results/one.md": "# Result one\n",
        "results/data.json": "{}\n",
    }
    for name, text in files.items():
        (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "repository" / name).write_text(text)
    return tmp_path / "repository"


def test_the_page_of_the_command_line_is_what_the_commands_say() -> None:
    assert docs_cli.PAGE.read_text() == docs_cli.reference(), "docs/cli.md is out of date: run make docs"


def test_the_pages_of_this_repository_can_be_laid_out(tmp_path: Path) -> None:
    nav = list(nav_pages(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    SiteSource(ROOT, tmp_path / "site").write(nav)
    assert (tmp_path / "site" / "index.md").exists()
    assert len(nav) == len(set(nav))


def test_links_lead_to_the_copies_in_the_site(repository: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    SiteSource(repository, site).write(NAV)
    assert (site / "index.md").read_text() == (
        "# Home\n\nSee [the guide](guide.md#start) and [how](repository/CONTRIBUTING.md).\n"
    )
    assert (site / "repository" / "CONTRIBUTING.md").read_text() == "# Contributing\n\nBack [home](../index.md).\n"
    guide = (site / "guide.md").read_text()
    assert "[a](repository/examples/run.py.md) [b](repository/results/index.md)" in guide
    assert "[c](repository/results/data.json)" in guide
    assert "```\n[not a link](nowhere.md)\n```\n\nNor `[this](nowhere.md)`." in guide
    assert "```python\nprint(1)\n```" in (site / "repository/examples/run.py.md").read_text()
    assert "- [Result one](one.md) (`one.md`)" in (site / "repository/results/index.md").read_text()
    assert (site / "repository/results/data.json").read_text() == "{}\n"
    assert "::: package.Thing" in (site / "api/package.md").read_text()


def test_a_page_without_a_place_in_the_navigation_is_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenSiteError, match=r"^zensical.toml: the navigation lacks guide.md$"):
        SiteSource(repository, tmp_path / "site").write(["index.md", "api.md", "api/package.md"])


def test_a_place_without_a_page_is_an_error(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(BrokenSiteError, match=r"^zensical.toml: there is no tour.md$"):
        SiteSource(repository, tmp_path / "site").write([*NAV, "tour.md"])


def test_a_link_to_a_missing_file_is_an_error(repository: Path, tmp_path: Path) -> None:
    (repository / "docs" / "guide.md").write_text("# Guide\n\n[x](../none.md)\n")
    with pytest.raises(BrokenSiteError, match=r"^docs/guide.md: no such file: ../none.md$"):
        SiteSource(repository, tmp_path / "site").write(NAV)


def test_lists_and_tables_are_written_as_python_markdown_reads_them() -> None:
    page = "Steps:\n1. One\n   more.\n2. Two:\n   - inner\n\n   ```\n   code\n   ```\n\nText\n| a | b |\n|---|---|\n"
    steps = "Steps:\n\n1. One\n    more.\n2. Two:\n    - inner\n\n    ```\n    code\n    ```\n\n"
    assert for_python_markdown(page) == steps + "Text\n\n| a | b |\n|---|---|\n"
    fenced = "```\ntext:\n- no list\n| no table |\n```\n"
    assert for_python_markdown(fenced) == fenced
