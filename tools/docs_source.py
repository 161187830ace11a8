"""Lays out the source of the documentation site, from the pages of the repository: the first step of `make docs`.

A page of `docs/` links to files outside it: to results of benchmarks, to examples, to tests. On a code forge these
links work as they are. A site knows only the files below one folder. So this script copies what is linked into that
folder and rewrites the links of the copies:

- `README.md` becomes the first page of the site, and a page of `docs/` keeps its path below `docs/`;
- a page of `lab/docs/` goes below `repository/` and needs a place in the navigation, as one of `docs/` does;
- every other page, picture and data file goes below `repository/`, under its path in the repository;
- a source file becomes a page that shows it, and a folder becomes a page that lists it;
- every public module gets a page below `api/`, which mkdocstrings fills from the docstrings;
- `cli.md` and `api.md` are made from the commands and the docstrings. A link to `docs/public_names.txt` leads to
  `api.md`, and `pulse COMMAND --help` in a sentence becomes a link to `cli.md`.

It fails when a page of `docs/` or `lab/docs/` is missing from the navigation, when the navigation names a page that
does not exist, and when a link leads to no file of the repository.
"""

import posixpath
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tools import docs_api, docs_cli
from tools.docs_api import MADE_OF, SUBMODULES
from tools.lint.public_names import LIST, read_list

ROOT = Path(__file__).parents[1]
SITE_SOURCE = ROOT / ".site-source"
LINK = re.compile(r"(\]\()([^)\s]+)(\))|(\b(?:src|href)=\")([^\"]+)(\")")
CODE = re.compile(r"^(```|~~~).*?^\1 *$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
ITEM = re.compile(r" *(?:[-*+]|\d+\.) +(?=\S)")
HELP = re.compile(r"(?<!\[)`pulse( [a-z]+)? --help`")
NAMES = LIST.relative_to(ROOT).as_posix()
PLACES = {"README.md": "index.md", NAMES: "api.md"}
LANGUAGES = {  # of the files that are shown as a page; others are copied
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".txt": "text",
    "": "text",
}


class BrokenSiteError(Exception):
    """The pages and the navigation do not fit together; the message lists all that is wrong."""


class SiteSource:
    """Copies pages and what they link to into the folder that the site is built from."""

    def __init__(self, root: Path, target: Path) -> None:
        self.root = root
        self.target = target
        self.problems: list[str] = []
        self._written: set[str] = set()
        self._waiting: list[str] = []

    def write(self, nav: list[str], made: Mapping[str, str]) -> None:
        """Write the whole folder anew, with pages that are made from the code.

        Raises:
            BrokenSiteError: a link leads nowhere, or the navigation is not the list of the pages.
        """
        shutil.rmtree(self.target, ignore_errors=True)
        folders = (self.root / "docs", self.root / "lab" / "docs")
        docs = sorted(path.relative_to(self.root).as_posix() for folder in folders for path in folder.rglob("*.md"))
        assets = [path.relative_to(self.root).as_posix() for path in (self.root / "docs" / "assets").glob("*")]
        self._waiting = ["README.md", *docs, *assets]
        self._waiting += [path for path in map(self._path_of, nav) if path]
        while self._waiting:
            self._add(self._waiting.pop())
        for page, text in made.items():
            self._put(page, for_python_markdown(text))
        needed = {site_path(page) for page in docs} | made.keys()
        self.problems += [f"zensical.toml: the navigation lacks {page}" for page in sorted(needed - set(nav))]
        self.problems += [f"zensical.toml: there is no {page}" for page in nav if not (self.target / page).exists()]
        if self.problems:
            raise BrokenSiteError("\n".join(self.problems))

    def _path_of(self, page: str) -> str | None:
        """The file of the repository that a page of the navigation outside docs/ shows."""
        path = page.removeprefix("repository/").removesuffix(".md") if page.startswith("repository/") else ""
        for candidate in (path, f"{path}.md", path.removesuffix("/index")):
            if path and (self.root / candidate).exists():
                return candidate
        return None

    def _add(self, path: str) -> None:
        if path in self._written or path == NAMES:
            return
        self._written.add(path)
        source = self.root / path
        if source.is_dir():
            self._put(site_path(path, folder=True), self._listing(path))
        elif source.suffix == ".md":
            self._put(site_path(path), self._rewritten(path))
        elif shows_as_page(path):
            fence = f"```{LANGUAGES[source.suffix]}"
            self._put(site_path(path), f"# `{path}`\n\n{fence}\n{source.read_text()}```\n")
        else:
            copy = self.target / site_path(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)

    def _put(self, page: str, text: str) -> None:
        file = self.target / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def _listing(self, path: str) -> str:
        """A page that lists a folder, and links to its pages and pictures."""
        lines = [f"# `{path}/`", ""]
        for entry in sorted((self.root / path).iterdir(), key=lambda entry: (entry.is_dir(), entry.name)):
            if entry.name.startswith((".", "__")):
                continue
            name = f"{path}/{entry.name}"
            if entry.suffix == ".md":
                lines.append(
                    f"- [{title_of(entry)}]({self._link(site_path(path, folder=True), name)}) (`{entry.name}`)"
                )
            else:
                lines.append(f"- `{entry.name}{'/' if entry.is_dir() else ''}`")
        return "\n".join([*lines, ""])

    def _rewritten(self, path: str) -> str:
        """A page with its links as they must be in the site."""

        def replace(match: re.Match[str]) -> str:
            before, link, after = (match.group(i) or match.group(i + 3) for i in (1, 2, 3))
            if re.match(r"[a-z]+:|#|//", link):
                return match.group()
            target, hash_, fragment = link.partition("#")
            found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
            if not (self.root / found).exists():
                self.problems.append(f"{path}: no such file: {link}")
                return match.group()
            return f"{before}{self._link(site_path(path), found)}{hash_}{fragment}{after}"

        def show_help(match: re.Match[str]) -> str:
            command = f"#pulse-{match[1].strip()}" if match[1] else ""
            return f"[{match[0]}]({posixpath.relpath('cli.md', posixpath.dirname(site_path(path)) or '.')}{command})"

        text = outside_code((self.root / path).read_text(), lambda text: LINK.sub(replace, text))
        return for_python_markdown(HELP.sub(show_help, text))

    def _link(self, page: str, path: str) -> str:
        self._waiting.append(path)
        return posixpath.relpath(site_path(path, folder=(self.root / path).is_dir()), posixpath.dirname(page) or ".")


def api_page(module: str, names: list[str]) -> str:
    """The page of a module: what it says of itself, then its public names in the order of the list."""
    blocks = [f"# `{module}`", f"::: {module}\n    options:\n      members: false\n      show_root_heading: false"]
    for name in names:
        if module == "pulsesync" and name in SUBMODULES:
            blocks.append(f"## `{name}`\n\nThe module [`{SUBMODULES[name]}`]({SUBMODULES[name]}.md).")
        else:
            options = f"\n    options:\n      heading: {name}\n      toc_label: {name}" if name in MADE_OF else ""
            blocks.append(f"::: {module}.{MADE_OF.get(name, name)}{options}")
    return "\n\n".join([*blocks, ""])


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply a change to what is neither in a fenced block nor in a span of code."""
    parts: list[str] = []
    at = 0
    for code in CODE.finditer(text):
        parts += [change(text[at : code.start()]), code.group()]
        at = code.end()
    return "".join([*parts, change(text[at:])])


def for_python_markdown(text: str) -> str:
    """Write lists and tables as Python-Markdown reads them, which asks for more than code forges do.

    There must be an empty line between a paragraph and a list or table after it, and what is inside a list item must be
    indented by four spaces for each level.
    """
    lines: list[str] = []
    levels: list[int] = []  # of the list items around a line: where the text of each begins
    in_fence = False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        item = None if in_fence else ITEM.match(line)
        if line.strip() and not in_fence:
            while levels and indent < levels[-1] and not (item is None and lines and lines[-1].strip()):
                levels.pop()
        starts_block = item is not None or (line.startswith("|") and not in_fence)
        if starts_block and lines and lines[-1].strip() and not _continues(lines[-1], is_item=item is not None):
            lines.append("")
        own = levels[-1] if levels and indent >= levels[-1] else 0
        lines.append(" " * (4 * len(levels)) + line[own:] if levels and line.strip() else line)
        if item is not None:
            levels.append(item.end())
        if line.lstrip().startswith(("```", "~~~")):
            in_fence = not in_fence
    return "\n".join(lines)


def _continues(before: str, *, is_item: bool) -> bool:
    """Whether a list item or a row of a table may follow a line directly."""
    return bool(ITEM.match(before)) or before.startswith("    ") if is_item else before.startswith("|")


def shows_as_page(path: str) -> bool:
    """Whether a source file is shown as a page of its own, rather than copied."""
    return Path(path).suffix in LANGUAGES


def site_path(path: str, *, folder: bool = False) -> str:
    """Where a file of the repository is in the source of the site."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/") and not folder:
        return path.removeprefix("docs/")
    if folder:
        return f"repository/{path}/index.md"
    return f"repository/{path}.md" if shows_as_page(path) else f"repository/{path}"


def title_of(page: Path) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)
    return found.group(1) if found else page.stem


def nav_pages(nav: Any) -> Iterator[str]:
    """Every page that a navigation names, at any depth."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(entry)


def made_pages() -> dict[str, str]:
    """The pages that are made from the code, by their paths in the site."""
    modules = {f"api/{module}.md": api_page(module, names) for module, names in read_list(LIST.read_text()).items()}
    return {"api.md": docs_api.reference(), "cli.md": docs_cli.reference(), **modules}


def write_site_source() -> None:
    """Write the source of the site of this repository.

    Raises:
        BrokenSiteError: a link leads nowhere, or the navigation is not the list of the pages.
    """
    config = tomllib.loads((ROOT / "zensical.toml").read_text())
    SiteSource(ROOT, SITE_SOURCE).write(list(nav_pages(config["project"]["nav"])), made_pages())
