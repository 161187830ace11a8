"""The pages that people read: their links lead somewhere, and raw figures are in files of their own."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
NAMED_TEST = re.compile(r"\]\(([^)\s]+\.py)\) `(test_\w+)`")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
MAX_LINE = 2000
README_WORDS = 900


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


def check() -> list[str]:
    """What is wrong with the pages, a line each."""
    return [f"{path.relative_to(ROOT)}: {problem}" for path, problem in _problems()]


def _problems() -> Iterator[tuple[Path, str]]:
    for page in pages():
        yield from ((page, f"the link {link} leads nowhere") for link in broken_links(page))
        for file, test in NAMED_TEST.findall(page.read_text()):
            if f"def {test}(" not in (page.parent / file).read_text():
                yield page, f"{file} has no {test}"
    for page in RESULTS.rglob("*.md"):
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.startswith('{"') or len(line) > MAX_LINE:
                yield page, f"line {number} is raw figures, which belong in {RESULTS.name}/data"
    for file in (RESULTS / "data").iterdir():
        yield from ((file, problem) for problem in _check_figures(file))
    words = len((ROOT / "README.md").read_text().split())
    if words > README_WORDS:  # code, tables and their bars counted
        yield ROOT / "README.md", f"{words} words cannot be read in five minutes; at most {README_WORDS}"
    glossary = ROOT / "docs" / "glossary.md"
    rows = re.findall(r"^\| (\*[^|]+) \|", glossary.read_text(), re.MULTILINE)
    defined = [word for row in rows for word in re.findall(r"\*([^*]+)\*", row)]
    if not defined:
        yield glossary, "no word of it was found"
    yield from ((glossary, f"{word!r} is defined twice") for word in {*defined} if defined.count(word) > 1)


def _check_figures(file: Path) -> Iterator[str]:
    """Raw figures can be read in a diff and by a program."""
    text = file.read_text()
    if max(map(len, text.splitlines())) > MAX_LINE:
        yield f"a line is longer than {MAX_LINE} characters"
    try:
        for part in [text] if file.suffix == ".json" else text.splitlines() if file.suffix == ".jsonl" else []:
            json.loads(part)
    except ValueError as e:
        yield f"not JSON: {e}"
